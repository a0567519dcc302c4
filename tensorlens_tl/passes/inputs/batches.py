"""Many prompts: how long is each, and which of them are frozen together?"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_slice
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelView, Query
from tensorlens_tl.passes.inputs.arguments import InputLike
from tensorlens_tl.passes.inputs.prompts import plain_input, prepare, token_rows

WASTE = 0.25
"""The share of a batch that may be padding before a new one begins."""

FEW = 8
"""So many prompts are frozen together however much of their batch is padding."""


def tokenized(view: ModelView, input: InputLike, prepend_bos: bool | None = None) -> list[list[int]]:
    """Each prompt's token ids; see `tensorlens_tl.passes.inputs.prepare` for what may be passed."""
    return [row.tolist() for row in token_rows(view, input, prepend_bos)]


def like_length(lengths: Sequence[int], fits: Callable[[int, int, int], bool]) -> list[list[int]]:
    """Return numbers of prompts of similar length, longest first, as many together as fit.

    `fits(count, longest, shortest)` says whether so many prompts are one batch; a single prompt always is.

    >>> from tensorlens_tl.passes.inputs import like_length
    >>> like_length([2, 5, 4], lambda count, longest, shortest: count * longest <= 10)
    [[1, 2], [0]]
    """
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        batch = batches[-1] if batches else []
        if batch and fits(len(batch) + 1, lengths[batch[0]], lengths[number]):
            batch.append(number)
        else:
            batches.append([number])
    return batches


def memory_batches(view: ModelView, lengths: Sequence[int], memory: Memory = None) -> list[list[int]]:
    """Return numbers of prompts of similar length, as many together as captured activations fit `memory` when padded.

    Lengths of a batch differ by less than a sliding window (`ModelView.sliding_window`).
    """
    bound = in_bytes(memory)
    window = view.sliding_window

    def fits(count: int, longest: int, shortest: int) -> bool:
        wasteful = count > FEW and shortest < (1 - WASTE) * longest
        if window is not None and longest - shortest >= window:
            return False
        return not wasteful and count * captured_bytes(view, longest) <= bound

    return like_length(lengths, fits)


WHOLE = ("attention_mask", "token_type_ids", "cache", "decoder_input_ids", "model_inputs")
"""Options of `freeze` that describe all prompts of one pass together."""


def prompt_batches(
    view: ModelView, input: Any, freezing: Mapping[str, Any], memory: Memory = None
) -> tuple[list[Any], list[list[int]]]:
    """Return prompts as rows of token ids, and batches of them; no batches where they are one pass.

    Images and sounds are their own rows; `freezing` are options of `freeze`.
    """
    if view.reads == "tokens":
        input = plain_input(view, input)
    together = set(WHOLE) & set(freezing)
    if together or isinstance(input, str | Mapping) or not hasattr(input, "__len__") or len(input) < 2:
        return [], []
    if view.reads != "tokens":
        prompt = prepare(view, input)
        values = list(prompt.kwargs["input"])
        return values, memory_batches(view, [prompt.tokens.shape[1]] * len(values), memory)
    rows = tokenized(view, input, freezing.get("prepend_bos"))
    return rows, memory_batches(view, [len(row) for row in rows], memory)


def one_per_prompt(name: str, value: object, prompts: int) -> list[Any] | Tensor | None:
    """Return an option's value for each prompt, or None for one shared value; raise `InvalidInputError` for another
    count."""
    values = _several(value, name == "direction")
    if values is not None and len(values) != prompts:
        raise InvalidInputError(f"{name}: {len(values)} for {prompts} prompts; pass one, or one for each prompt.")
    return values


def _several(value: object, is_vector: bool) -> list[Any] | Tensor | None:
    """The values of an option that has several: tokens, or vectors; None of an option that has one."""
    if value is None:
        return None
    if is_vector:
        vectors = torch.as_tensor(value)
        return vectors if vectors.ndim > 1 else None
    value = plain(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    return list(value)


def taken(values: list[Any] | Tensor, batch: Sequence[int]) -> list[Any] | Tensor:
    """The values of a batch's prompts."""
    return values[torch.tensor(batch)] if isinstance(values, Tensor) else [values[number] for number in batch]


def check_slice(query: Query | None, lengths: Sequence[int]) -> None:
    """Refuse a slice that stands for more positions in one prompt than in another, as a single pass does."""
    if not isinstance(query, slice):
        return
    query = whole_slice("query", query, why="positions of a prompt")
    counts = {len(range(length)[query]) for length in lengths}
    if len(counts) > 1:
        raise InvalidInputError(
            f"query={query} stands for {sorted(counts)} tokens of these prompts; it must be the same number in each."
        )


def captured_bytes(view: ModelView, length: int) -> int:
    """What freezing stores of one prompt of so many tokens: streams, patterns, pre-activations and ratios."""
    sizes = [block.captured for block in view.blocks]
    numbers = length * sum(by_token + by_pair * length for by_token, by_pair in sizes)
    return numbers * next(view.model.parameters()).element_size()
