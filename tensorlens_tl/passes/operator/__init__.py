"""The frozen pass as one affine map, and what is computed from it: scores, norms, gradients, pixels."""

from tensorlens_tl.passes.operator.operator import Collapse, FrozenOperator
from tensorlens_tl.passes.operator.pixels import PatchEmbedding, PixelScores, patch_embedding, pixel_scores
from tensorlens_tl.passes.operator.selection import (
    check_crossing,
    chosen_head,
    chosen_layers,
    end_of,
    through_final_norm,
)
from tensorlens_tl.passes.operator.target import (
    EACH_NEXT as EACH_NEXT,
    FIRST_CHOICE_ID as FIRST_CHOICE_ID,
    RANKED as RANKED,
    RUNNER_UP_ID as RUNNER_UP_ID,
    UNCAPPED as UNCAPPED,
    explained_tokens,
    logit_label,
    logit_word,
    next_ids as next_ids,
    predicts_at,
    resolve_target,
    target_ids,
    token_ids,
    token_label,
    unembedding_rows,
)

__all__ = [
    "Collapse",
    "FrozenOperator",
    "PatchEmbedding",
    "PixelScores",
    "check_crossing",
    "chosen_head",
    "chosen_layers",
    "end_of",
    "explained_tokens",
    "logit_label",
    "logit_word",
    "patch_embedding",
    "pixel_scores",
    "predicts_at",
    "resolve_target",
    "target_ids",
    "through_final_norm",
    "token_ids",
    "token_label",
    "unembedding_rows",
]
