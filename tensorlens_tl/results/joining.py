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
    every_query = uneven and all(
        bool((row == torch.arange(len(row)).to(row)).all()) for part in parts for row in part.queries
    )
    length += uneven and not every_query  # a place of padding in every prompt, which missing queries stand at
    queries = max(part.queries.shape[1] for part in parts)
    sizes = {"key": length, "query": queries}

    def whole(name: str, axes: Sequence[str], batch: int = 0) -> Tensor | None:
        """One field of every part, padded and put in the prompts' order; None where a part has none."""
        tensors = [getattr(part, name) for part in parts]
        if any(tensor is None for tensor in tensors):
            return None
        padded = []
        for tensor in tensors:
            missing = [sizes.get(axis, size) - size for axis, size in zip(axes, tensor.shape, strict=True)]
            fill = length - 1 if name == "queries" else 0
            padded.append(pad(tensor, [n for added in reversed(missing) for n in (0, added)], value=fill))
        return torch.cat(padded, batch).index_select(batch, order.to(padded[0].device))

    layers = None
    if first.layers is not None:
        inner = [f"axis {number}" for number in range(first.layers.ndim - 4)]
        sizes |= {"layer query": max(part.layers.shape[-2] for part in parts if part.layers is not None)}
        layers = whole("layers", ("layer", "batch", *inner, "layer query", "key"), batch=1)
    held = whole("queries", ("batch", "query"))
    if every_query and held is not None:
        held = torch.arange(queries, device=held.device).expand(len(held), -1)
    rows = [row for part in parts for row in part.tokens]
    starts = None if first.word_starts is None else [row for part in parts for row in part.word_starts or ()]
    labels = list(dict.fromkeys(part.target for part in parts))
    return replace(
        first,
        scores=whole("scores", first.axes),
        mask=whole("mask", ("batch", "key")),
        queries=held,
        layers=layers,
        stderr=whole("stderr", first.axes),
        **{name: whole(name, ("batch", "query")) for name in ("bias", "total", "residual")},
        image=whole("image", ("batch", "channel", "height", "width")),
        tokens=[rows[i] + [""] * (length - len(rows[i])) for i in order],
        word_starts=None if starts is None else [starts[i] + [False] * (length - len(starts[i])) for i in order],
        target=labels[0] if len(labels) == 1 else SEVERAL_TARGETS,
        options=first.options | options,
    )
