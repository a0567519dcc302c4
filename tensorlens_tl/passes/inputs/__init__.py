"""From what a user passes to what a model takes: tokens and masks, signals, positions, batches."""

from tensorlens_tl.passes.inputs.arguments import (
    CacheLike,
    IdsLike,
    InputLike,
    ModelInputs,
    Patterns,
    Side,
    Store,
    Tolerance,
    Verify,
)
from tensorlens_tl.passes.inputs.batches import (
    captured_bytes,
    check_slice,
    like_length,
    memory_batches,
    one_per_prompt,
    prompt_batches,
    taken,
    tokenized,
)
from tensorlens_tl.passes.inputs.positions import is_all, one_query, query_positions, span_positions
from tensorlens_tl.passes.inputs.prompts import (
    Prompt,
    chat_text,
    chats_in,
    plain_input,
    prepare,
    token_inputs,
    token_rows,
)
from tensorlens_tl.passes.inputs.readable import readable_tokens, special_positions, text_ids, token_text
from tensorlens_tl.passes.inputs.signals import image_tokens
from tensorlens_tl.passes.inputs.spans import find, find_real, joined, without_mark, word_ids, word_starts

__all__ = [
    "CacheLike",
    "IdsLike",
    "InputLike",
    "ModelInputs",
    "Patterns",
    "Prompt",
    "Side",
    "Store",
    "Tolerance",
    "Verify",
    "captured_bytes",
    "chat_text",
    "chats_in",
    "check_slice",
    "find",
    "find_real",
    "image_tokens",
    "is_all",
    "joined",
    "like_length",
    "memory_batches",
    "one_per_prompt",
    "one_query",
    "plain_input",
    "prepare",
    "prompt_batches",
    "query_positions",
    "readable_tokens",
    "span_positions",
    "special_positions",
    "taken",
    "text_ids",
    "token_inputs",
    "token_rows",
    "token_text",
    "tokenized",
    "without_mark",
    "word_ids",
    "word_starts",
]
