"""Results of several batches of prompts as one: the batches padded to the longest, prompts in their own order."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl.results.attribution import Attribution
from tensorlens_tl.results.changes import NUMBERS, ModelChange
from tensorlens_tl.results.entry import MINUS, shown_target
from tensorlens_tl.results.targets import SEVERAL_TARGETS, TOKENS_OF_QUERIES, number_of

BATCH_AXES = {"layers": 1}
"""The number of the batch axis, where it is not the first."""


def joined(parts: Sequence[Attribution], batches: Sequence[Sequence[int]], options: dict[str, Any]) -> Attribution:
    """One Attribution out of those of batches of prompts.

    Args:
        parts: one for each batch, made by the same method with the same options.
        batches: the prompts of each, by their number in the whole.
        options: of the method, for all prompts.
    """
    order = torch.tensor([number for batch in batches for number in batch]).argsort()
    length = max(part.mask.shape[1] for part in parts)
    queries = max(part.queries.shape[1] for part in parts)
    uneven = any(part.queries.shape[1] != queries for part in parts)
    every_query = uneven and all(map(_counts_up, parts))
    if uneven and not every_query:
        length += 1  # every prompt ends in padding, where its missing queries are placed
    layer_queries = max((part.layers.shape[-2] for part in parts if part.layers is not None), default=0)
    padded = [padded_to(part, length, queries, layer_queries) for part in parts]
    tensors = {name: _concatenated(padded, name, order) for name in Attribution.TENSORS}
    if every_query:
        tensors["queries"] = torch.arange(queries, device=order.device).expand(len(order), -1)
    first = padded[0]
    return replace(
        first,
        **tensors,
        tokens=_rows(padded, "tokens", order),
        word_starts=_rows(padded, "word_starts", order),
        special=_rows(padded, "special", order),
        target=_target([part.target for part in parts]),
        options=first.options | options | _tokens_of_queries(parts, order),
    )


def _tokens_of_queries(parts: Sequence[Attribution], order: Int[Tensor, "prompt"]) -> dict[str, Any]:
    """The tokens of each prompt and query, where they have some of their own."""
    rows = [row for part in parts for row in part.options.get(TOKENS_OF_QUERIES, [])]
    if len(rows) < len(order):
        return {}
    return {TOKENS_OF_QUERIES: [rows[number] for number in order.tolist()]}


def joined_changes(parts: Sequence[ModelChange], batches: Sequence[Sequence[int]]) -> ModelChange:
    """One ModelChange out of those of batches of prompts; a term that a batch lacks is zero there.

    Args:
        parts: one for each batch, of the same models by the same terms.
        batches: the prompts of each, by their number in the whole.
    """
    order = torch.tensor([number for batch in batches for number in batch]).argsort()
    names = list(dict.fromkeys(name for part in parts for name in part.names))
    queries = max(part.queries.shape[1] for part in parts)
    length = max(part.mask.shape[1] for part in parts)
    if any(part.queries.shape[1] != queries for part in parts):
        length += 1  # every prompt ends in padding, where its missing queries are placed
    sizes = {"query": queries, "pos": length}
    axes = dict.fromkeys(NUMBERS, ("batch", "query"))
    axes |= {
        "scores": ("batch", "query", "term"),
        "keys": ("batch", "query", "term", "pos"),
        "mask": ("batch", "pos"),
        "queries": ("batch", "query"),
    }
    tensors: dict[str, Tensor | None] = {}
    aligned = [part.with_names(names) for part in parts]
    for name, of_field in axes.items():
        value = length - 1 if name == "queries" else 0
        padded = [_padded(getattr(part, name), of_field, sizes, value) for part in aligned]
        tensors[name] = _in_order(padded, 0, order)
    first = parts[0]
    tokens = [_filled(row, "", length) for part in parts for row in part.tokens]
    tokens = [tokens[number] for number in order.tolist()]
    return replace(first, **tensors, names=names, tokens=tokens, target=_target([part.target for part in parts]))


def _target(targets: Sequence[str]) -> str:
    """What all parts explain, in words; lists of tokens, which are those of a part, by what they are."""
    if len(set(targets)) == 1:
        return targets[0]
    shown = set(map(shown_target, targets))
    if len(shown) == 1:
        return shown.pop()
    numbers = set(map(number_of, targets))
    answers, signs, others = map(set, zip(*(target.partition(MINUS) for target in targets), strict=True))
    if len(numbers) > 1 or numbers == {""} or len(signs) > 1:
        return SEVERAL_TARGETS
    if len(answers) == 1:
        return f"{answers.pop()}{MINUS}each other"
    answer = f"{numbers.pop()}each answer"
    if len(others) == 1:
        return answer + signs.pop() + others.pop()
    return f"{answer}{MINUS}other"


def padded_to(part: Attribution, length: int, queries: int, layer_queries: int) -> Attribution:
    """An Attribution with padding at the end of its axes.

    Args:
        part: of some prompts.
        length: how many source tokens each prompt then has.
        queries: how many queries; the added ones are those of the last position.
        layer_queries: how many queries the maps of its layers have.
    """
    sizes = {"key": length, "query": queries, "layer query": layer_queries}
    axes: dict[str, Sequence[str]] = dict.fromkeys(("queries", "bias", "total", "gap"), ("batch", "query"))
    axes |= {"scores": part.axes, "stderr": part.axes, "mask": ("batch", "key")}
    if part.layers is not None:
        inner = [f"axis {number}" for number in range(part.layers.ndim - 4)]
        axes["layers"] = ("layer", "batch", *inner, "layer query", "key")
    tensors = {name: _padded(getattr(part, name), axes[name], sizes) for name in axes}
    tensors["queries"] = _padded(part.queries, axes["queries"], sizes, value=length - 1)
    return replace(
        part,
        **tensors,
        tokens=[_filled(row, "", length) for row in part.tokens],
        word_starts=part.word_starts and [_filled(row, False, length) for row in part.word_starts],
    )


def _padded(tensor: Tensor | None, axes: Sequence[str], sizes: Mapping[str, int], value: int = 0) -> Tensor | None:
    """A tensor with a value added at the end of its axes, up to their sizes."""
    if tensor is None:
        return None
    missing = [sizes.get(axis, size) - size for axis, size in zip(axes, tensor.shape, strict=True)]
    widths = [width for count in reversed(missing) for width in (0, count)]
    return pad(tensor, widths, value=value)


def _concatenated(parts: Sequence[Attribution], name: str, order: Int[Tensor, "prompt"]) -> Tensor | None:
    """One field of every part, in the order of the prompts; None where a part does not have it."""
    return _in_order([getattr(part, name) for part in parts], BATCH_AXES.get(name, 0), order)


def _in_order(parts: Sequence[Tensor | None], batch: int, order: Int[Tensor, "prompt"]) -> Tensor | None:
    """Tensors of several batches side by side, in the order of the prompts; None where one is missing."""
    tensors = [tensor for tensor in parts if tensor is not None]
    if len(tensors) < len(parts):
        return None
    return torch.cat(tensors, batch).index_select(batch, order.to(tensors[0].device))


def _rows(parts: Sequence[Attribution], name: str, order: Int[Tensor, "prompt"]) -> list[list[Any]] | None:
    """One list for each prompt, in the order of the prompts; None where a part has none."""
    lists = [getattr(part, name) for part in parts]
    if any(rows is None for rows in lists):
        return None
    rows = [row for part in lists for row in part]
    return [rows[number] for number in order.tolist()]


def _counts_up(part: Attribution) -> bool:
    """Whether the queries of every prompt are 0, 1, 2, …"""
    return bool((part.queries == torch.arange(part.queries.shape[1]).to(part.queries)).all())


def _filled(row: list[Any], value: Any, length: int) -> list[Any]:
    """A row with a value added at its end, up to so many entries."""
    return row + [value] * (length - len(row))
