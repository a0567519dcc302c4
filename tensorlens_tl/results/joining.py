"""Joining the results of batches: padded to the longest prompt, with prompts in their original order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad

from tensorlens_tl.results.attribution import Attribution
from tensorlens_tl.results.entry import MINUS, SEVERAL_TARGETS, TOKENS_OF_QUERIES, number_of, shown_target
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.terms import ModelChange

Joined = TypeVar("Joined", bound=Result)

FILLS: dict[str, list[Any]] = {"tokens": [""], "word_starts": [False], "special": []}
"""Per-prompt fields stored as lists, with the value used for padding."""


def joined(
    results: Sequence[Joined], batches: Sequence[Sequence[int]], options: dict[str, Any] | None = None
) -> Joined:
    """Join the results of several batches; `batches` lists the prompt numbers of each. Missing terms are zero.

    `options` are an `Attribution`'s, for all prompts.
    """
    parts: list[Any] = list(results)
    order = torch.tensor([number for batch in batches for number in batch]).argsort()
    if isinstance(parts[0], ModelChange):
        names = list(dict.fromkeys(name for part in parts for name in part.names))
        parts = [part.with_names(names) for part in parts]
    first: Any = parts[0]
    sizes: dict[str, int] = {}
    for part in parts:
        for name, axes in part._axes().items():
            for axis, size in zip(axes, getattr(part, name).shape, strict=True):
                sizes[axis] = max(size, sizes.get(axis, 0))
    uneven = "query" in sizes and any(part.queries.shape[1] != sizes["query"] for part in parts)
    every_query = uneven and isinstance(first, Attribution) and all(map(_counts_up, parts))
    if uneven and not every_query:
        sizes["key"] += 1  # every prompt then ends in padding, which its missing queries point to
    fields: dict[str, Any] = {name: _tensor(parts, name, sizes, order) for name in first.TENSORS}
    if every_query:
        fields["queries"] = torch.arange(sizes["query"], device=order.device).expand(len(order), -1)
    for name, fill in FILLS.items():
        if hasattr(first, name):
            fields[name] = _lists(parts, name, fill, sizes["key"], order)
    if isinstance(first, Attribution):
        fields["options"] = first.options | (options or {})
        texts = [row for part in parts for row in part.options.get(TOKENS_OF_QUERIES, [])]
        if len(texts) == len(order):  # tokens per prompt and query, where they differ
            fields["options"][TOKENS_OF_QUERIES] = [texts[number] for number in order.tolist()]
    fields["target"] = _target([part.target for part in parts])
    whole: Any = replace(first, **fields)
    return whole


def _tensor(parts: Sequence[Any], name: str, sizes: dict[str, int], order: torch.Tensor) -> torch.Tensor | None:
    """Join one tensor, padded at the end of its axes, in prompt order; None if a part lacks it."""
    padded: list[torch.Tensor] = []
    batch = 0
    for part in parts:
        tensor = getattr(part, name)
        if tensor is None:
            return None
        axes = part._axes()[name]
        batch = axes.index("batch")
        missing = [0 if axis == "batch" else sizes[axis] - size for axis, size in zip(axes, tensor.shape, strict=True)]
        widths = [width for count in reversed(missing) for width in (0, count)]
        padded.append(pad(tensor, widths, value=sizes["key"] - 1 if name == "queries" else 0))
    return torch.cat(padded, batch).index_select(batch, order.to(padded[0].device))


def _lists(
    parts: Sequence[Any], name: str, fill: list[Any], length: int, order: torch.Tensor
) -> list[list[Any]] | None:
    """Join one list per prompt, padded at the end, in prompt order; None if a part lacks it."""
    lists = [getattr(part, name) for part in parts]
    if any(rows is None for rows in lists):
        return None
    rows = [row + fill * (length - len(row)) for rows in lists for row in rows]
    return [rows[number] for number in order.tolist()]


def _counts_up(part: Attribution) -> bool:
    """Whether the queries of every prompt are 0, 1, 2, …"""
    return bool((part.queries == torch.arange(part.queries.shape[1]).to(part.queries)).all())


def _target(targets: Sequence[str]) -> str:
    """Describe the target of all parts, replacing token lists, which differ by batch, by a description."""
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
