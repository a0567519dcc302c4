"""One forward pass as an exact affine map: capturing, verifying, freezing and evaluating it.

| module | question |
| --- | --- |
| `inputs`, `texts` | what does a model take, which positions does a query denote, and where does a text occur? |
| `capture` | which activations does a pass store? |
| `block_maps` | which maps do the parts of a block become, and blocks that run in a loop? |
| `attention_scores` | how are attention scores computed, and how is a pattern recomputed from them? |
| `proof` | does the model compute what its weights imply? |
| `linearisation` | what do operators, targets and circuits need from a pass, and has the model changed since? |
| `target` | which output of the model is explained? |
| `operator` | which scores does the whole map give, for which target and which of its parts? |
| `live` | how is the live model held fixed, or run again with a change? |
| `frozen` | the pass that users work with, composed of capture, maps and proof |
| `freezing` | can a model be frozen, and how does one run of it become a pass? |
| `two_runs` | which exact linear map takes the difference of two runs' inputs to that of their outputs? |
| `pixels` | how much does each pixel of an image contribute? |
| `backward`, `replacement` | what does the live model give under other backward rules, or with a token replaced? |
"""

from typing import TYPE_CHECKING, Any

from tensorlens_tl.passes.backward import (
    entering as entering,
    note_rounding as note_rounding,
    rule_scores as rule_scores,
    run_under_rule as run_under_rule,
)
from tensorlens_tl.passes.block_maps import BlockMaps, Routes, mlp_chain as mlp_chain
from tensorlens_tl.passes.capture import (
    Capture,
    note_fresh as note_fresh,
    one_check as one_check,
    one_question as one_question,
)
from tensorlens_tl.passes.freezing import TOLERANCE as TOLERANCE, freeze, freeze_changed
from tensorlens_tl.passes.frozen import FrozenPass, PassLike as PassLike, check_pass as check_pass
from tensorlens_tl.passes.linearisation import (
    Linearisation,
    check_explained,
    one_reading as one_reading,
    unchecked_view as unchecked_view,
)
from tensorlens_tl.passes.operator import Collapse, FrozenOperator
from tensorlens_tl.passes.pixels import PatchEmbedding, PixelScores, patch_embedding, pixel_scores
from tensorlens_tl.passes.proof import Proof
from tensorlens_tl.passes.two_runs import (
    Difference,
    SecantMaps,
    check_one_architecture as check_one_architecture,
    difference,
)

if TYPE_CHECKING:
    PassOrDifference = FrozenPass | Difference
    """A frozen pass, or the difference of two, as an argument."""
else:
    PassOrDifference = Any  # `check_explained` raises our own error for anything else


__all__ = [
    "BlockMaps",
    "Capture",
    "Collapse",
    "Difference",
    "FrozenOperator",
    "FrozenPass",
    "Linearisation",
    "PassOrDifference",
    "PatchEmbedding",
    "PixelScores",
    "Proof",
    "Routes",
    "SecantMaps",
    "check_explained",
    "difference",
    "freeze",
    "freeze_changed",
    "patch_embedding",
    "pixel_scores",
]
