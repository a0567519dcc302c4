"""What is pulled back through a map: a vector for each query, or their sum, and the number that scores must sum to."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, RowPositions
from tensorlens_tl.algebra.positions import Queries
from tensorlens_tl.errors import InvalidInputError


def factors(weights: object, total: Float[Tensor, "batch query"]) -> Float[Tensor, "batch query"]:
    """Factors of the queries' targets, in the precision of their totals."""
    if not isinstance(weights, Tensor) or weights.shape != total.shape or not bool(torch.isfinite(weights).all()):
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise InvalidInputError(f"weights: {shape}; pass finite numbers {list(total.shape)}, one for each query.")
    return weights.to(total)


@dataclass(frozen=True, eq=False)
class Question:
    """`vectors` to pull, one for each query at `positions`, and the number `total` that the scores must sum to.

    Attributes:
        through: the map from the operator's input to where the vectors live.
        constant: the part of the bias that no map adds.
        noise: what rounding may leave in the total.
        soft_cap: the cap that the model applies to the total afterwards.
        span: the positions that one vector for all queries covers; None where each query has its own position.
    """

    vectors: Float[Tensor, "batch query *live d"]
    positions: Int[Tensor, "batch query"]
    through: AffineMap
    total: Float[Tensor, "batch query"]
    constant: Float[Tensor, "batch query"]
    noise: Float[Tensor, "batch query"]
    soft_cap: float | None = None
    span: slice | None = None

    @property
    def first(self) -> int:
        """The first position where a vector lives."""
        if self.span is not None:
            return self.span.start
        return int(self.positions.min())

    def after(self, first: int) -> "Question":
        """The same in a causal map of the positions from `first` on, which no vector lives before."""
        span = self.span
        if span is not None:
            span = slice(span.start - first, span.stop - first)
        through = self.through.at(slice(first, None))
        return replace(self, through=through, positions=(self.positions - first).clamp_min(0), span=span)

    def where(self, chunk: slice) -> Queries:
        """Where the vectors of some queries live."""
        return self.span or RowPositions(self.positions[:, chunk].T)

    def at_real_tokens(self, mask: Bool[Tensor, "batch pos"]) -> "Question":
        """The same, zero at queries that are padding."""
        real = torch.take_along_dim(mask, self.positions, dim=1)
        vectors = self.vectors * real[..., None]
        return replace(self, vectors=vectors, total=self.total * real, constant=self.constant * real)

    def weighted(self, weights: Float[Tensor, "batch query"]) -> "Question":
        """The same, times a number for each query."""
        return replace(
            self,
            vectors=self.vectors * weights[..., None].to(self.vectors),
            total=self.total * weights,
            constant=self.constant * weights,
            noise=self.noise * weights.abs(),
        )

    def summed(self, mask: Bool[Tensor, "batch pos"], whole: bool) -> "Question":
        """One vector, over the span that the queries cover (`whole`: from the first position on), that is their sum."""
        real = torch.take_along_dim(mask, self.positions, dim=1)
        first = 0 if whole else int(self.positions.min())
        length = int(self.positions.max()) + 1 - first
        vectors = self.vectors.new_zeros(len(self.vectors), length, self.vectors.shape[-1])
        vectors.scatter_add_(1, (self.positions - first)[..., None].expand_as(self.vectors), self.vectors)
        return replace(
            self,
            vectors=vectors[:, None],
            positions=(self.positions * real).amax(1, keepdim=True),
            total=self.total.sum(1, keepdim=True),
            constant=self.constant.sum(1, keepdim=True),
            noise=self.noise.sum(1, keepdim=True),
            span=slice(first, first + vectors.shape[1]),
        )
