"""What one attention pattern shows of padding and of the direction in which a layer looks."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import query_chunks
from tensorlens_tl.errors import NumericalError, UnsupportedModelError


def looks_ahead(pattern: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch query"]) -> bool:
    """True if a real query has weight on later tokens."""
    keys = torch.arange(pattern.shape[-1], device=pattern.device)
    return any(
        bool(((pattern[:, :, at] != 0) & (keys > queries[:, None]) & mask[:, None, at, None]).any())
        for at, queries in _some_queries(pattern)
    )


def check_pattern(
    name: str,
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    keys: Bool[Tensor, "batch key"],
) -> None:
    """Raise for padding in one pattern that the model does not handle: NaN at real queries, or weight on padded
    keys."""
    if bool(torch.isnan(pattern.sum())) and bool(torch.isnan(pattern).any()):
        raise NumericalError(
            f"NaN at {name}, in a padded batch: this model does not handle a query all of whose keys are "
            "padding or outside its window (left padding on several bridges, short prompts beside ones longer than "
            "a sliding window). Pad on the right, or freeze the prompts one by one."
        )
    padded = ~keys
    columns = padded.any(0).nonzero()[:, 0]
    if not len(columns):
        return
    # the keys between the first padding and the last: with prompts of similar length these are few
    within = slice(int(columns[0]), int(columns[-1]) + 1)
    reads = pattern[..., within]
    padded = padded[:, within]
    if any(
        bool(((reads[:, :, at] != 0) & queries[:, None, at, None] & padded[:, None, None, :]).any())
        for at, _ in _some_queries(reads)
    ):
        raise UnsupportedModelError(
            f"{name} puts weight on padded tokens: this model ignores the attention mask (a bidirectional "
            "HookedTransformer does). Freeze the prompts one by one."
        )


def _some_queries(pattern: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the queries and their positions, so that no other tensor of the whole pattern's size is allocated."""
    positions = torch.arange(pattern.shape[2], device=pattern.device)
    per_query = pattern[:, :, :1].numel() * pattern.element_size()
    return ((at, positions[at]) for at in query_chunks(pattern.shape[2], per_query))
