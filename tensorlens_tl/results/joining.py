"""Attributions of several batches of prompts as one: the batches padded to the longest, prompts in their own order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl.results.attribution import Attribution

SEVERAL_TARGETS = "a target of its own for each prompt"
"""What is explained, where that differs."""


def joined(parts: Sequence[Attribution], batches: Sequence[Sequence[int]], options: dict[str, Any]) -> Attribution:
    """One Attribution out of those of batches of prompts.

    Args:
        parts: one for each batch, made by the same method with the same options.
        batches: the prompts of each, by their number in the whole.
        options: what the method was asked, for all prompts.
    """
    first = parts[0]
    order = torch.tensor([number for batch in batches for number in batch]).argsort()
    length = max(part.mask.shape[1] for part in parts)
    uneven = any(part.queries.shape[1] != first.queries.shape[1] for part in parts)
    every_query = uneven and all(_counts_up(row) for part in parts for row in part.queries)
    if uneven and not every_query:
        length += 1  # every prompt ends in padding, where its missing queries are placed
    n_queries = max(part.queries.shape[1] for part in parts)
    sizes = {"key": length, "query": n_queries}

    def joined_field(name: str, axes: Sequence[str], batch: int = 0) -> Tensor | None:
        """One field of every part, padded and in the order of the prompts; None where a part does not have it."""
        tensors = [getattr(part, name) for part in parts]
        if any(tensor is None for tensor in tensors):
            return None
        padded = []
        fill = length - 1 if name == "queries" else 0
        for tensor in tensors:
            missing = [sizes.get(axis, size) - size for axis, size in zip(axes, tensor.shape, strict=True)]
            widths = [width for added in reversed(missing) for width in (0, added)]
            padded.append(pad(tensor, widths, value=fill))
        return torch.cat(padded, batch).index_select(batch, order.to(padded[0].device))

    layers = None
    if first.layers is not None:
        inner = [f"axis {number}" for number in range(first.layers.ndim - 4)]
        sizes |= {"layer query": max(part.layers.shape[-2] for part in parts if part.layers is not None)}
        layers = joined_field("layers", ("layer", "batch", *inner, "layer query", "key"), batch=1)
    queries = joined_field("queries", ("batch", "query"))
    if every_query and queries is not None:
        queries = torch.arange(n_queries, device=queries.device).expand(len(queries), -1)
    tokens = [row for part in parts for row in part.tokens]
    starts = None if first.word_starts is None else [row for part in parts for row in part.word_starts or ()]
    labels = list(dict.fromkeys(part.target for part in parts))
    return replace(
        first,
        scores=joined_field("scores", first.axes),
        mask=joined_field("mask", ("batch", "key")),
        queries=queries,
        layers=layers,
        stderr=joined_field("stderr", first.axes),
        **{name: joined_field(name, ("batch", "query")) for name in ("bias", "total", "residual")},
        image=joined_field("image", ("batch", "channel", "height", "width")),
        tokens=[_filled(tokens[i], "", length) for i in order],
        word_starts=None if starts is None else [_filled(starts[i], False, length) for i in order],
        target=labels[0] if len(labels) == 1 else SEVERAL_TARGETS,
        options=first.options | options,
    )


def _counts_up(positions: Tensor) -> bool:
    """Whether positions are 0, 1, 2, …"""
    return bool((positions == torch.arange(len(positions)).to(positions)).all())


def _filled(row: list[Any], fill: Any, length: int) -> list[Any]:
    """A row, filled up at its end to so many entries."""
    return row + [fill] * (length - len(row))
