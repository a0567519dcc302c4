"""A map that acts on some positions, while the others stay as they are or are left out.

An encoder–decoder is one stream: the encoder's positions, then the decoder's. An encoder block acts on the first, a
decoder block on the others; what cross-attention writes, it writes to the decoder's positions only.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, PositionwiseMap, collector
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, widened
from tensorlens_tl.algebra.primitives import Attention, Identity, mixed, unmixed


@final
@dataclass(frozen=True, eq=False, repr=False)
class Segment(AffineMap):
    """``inner`` on the positions of a segment; elsewhere the identity, or zero.

    Attributes:
        inner: takes vectors at the segment's positions.
        start, stop: the segment.
        length: of all positions.
        only: whether the other positions come out zero, instead of as they were.
    """

    inner: AffineMap
    start: int
    stop: int
    length: int
    only: bool = False

    @property
    def positions(self) -> int | None:
        return self.length

    def __repr__(self) -> str:
        only = ", only" if self.only else ""
        return f"Segment({self.inner}, {self.start} to {self.stop} of {self.length}{only})"

    @property
    def bias(self) -> Tensor:
        bias = self.inner.bias
        if bias is ZERO:
            return ZERO
        bias = bias.expand(*(bias.shape[:-2] or (1,)), self.stop - self.start, bias.shape[-1])
        return widened(bias, self.start, self.length)

    @property
    def is_segment(self) -> bool:
        return True

    @property
    def mixes(self) -> bool:
        return self.inner.mixes

    @property
    def components(self) -> int:
        if not self.only:  # the other positions pass every component
            return 1
        return self.inner.components

    def component(self, number: int) -> "Segment":
        if not self.only:
            return self
        return replace(self, inner=self.inner.component(number))

    def group_read_by(self, number: int) -> tuple[int, int]:
        if not self.only:
            return 0, 1
        return self.inner.group_read_by(number)

    def of_group(self, group: int, groups: int) -> AffineMap:
        if not self.only:
            return super().of_group(group, groups)
        return replace(self, inner=self.inner.of_group(group, groups))

    @property
    def is_channelwise(self) -> bool:
        return self.inner.is_channelwise

    def push_groups(self, x: Tensor, groups: int) -> Tensor:
        if not self.only:
            return super().push_groups(x, groups)
        return self._beside_others(x, self.inner.push_groups(x[..., self.start : self.stop, :], groups))

    @property
    def needs_positions(self) -> bool:
        return True  # it cuts positions out

    def at(self, where: Where) -> "Segment | Picked":
        if isinstance(where, RowPositions):
            inside = (where.positions >= self.start) & (where.positions < self.stop)
            within = (where.positions - self.start).clamp(0, self.stop - self.start - 1)
            return Picked(self.inner.at(RowPositions(within)), inside[..., None, None], self.only)
        if isinstance(where, slice):
            first, last, _ = where.indices(self.length)
            start, stop = (min(max(bound, first), last) for bound in (self.start, self.stop))
            inner = self.inner.at(slice(start - self.start, stop - self.start))
            if start == stop and not self.only:  # nothing of it is left
                inner = Identity()
            return replace(self, inner=inner, start=start - first, stop=stop - first, length=last - first)
        if list(where) != sorted(where):
            raise TypeError(f"positions {where} must ascend.")
        inside = [position for position in where if self.start <= position < self.stop]
        start = sum(position < self.start for position in where)
        inner = self.inner.at([position - self.start for position in inside])
        return replace(self, inner=inner, start=start, stop=start + len(inside), length=len(where))

    def norm_bound(self) -> float:
        bound = self.inner.norm_bound()
        return bound if self.only else max(1.0, bound)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self._beside_others(x, self.inner._forward(x[..., self.start : self.stop, :], affine))

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        terms = collector(biases)
        inside = self.inner._backward(g[..., self.start : self.stop, :], terms)
        if biases is not None:
            around = (self.start, self.length - self.stop)
            biases += [torch.nn.functional.pad(term, around) for term in terms or ()]
        return self._beside_others(g, inside)

    def _beside_others(self, x: Tensor, inside: Tensor) -> Tensor:
        """What the segment became, with the other positions before and after it."""
        if self.only:
            return widened(inside, self.start, self.length)
        return torch.cat([x[..., : self.start, :], inside, x[..., self.stop :, :]], dim=-2)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        if self.mixes:
            return self._pull_among(g, here, destination, reach, biases)
        return self._pull_alone(g, here, biases)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Picked(PositionwiseMap):
    """A segment where every row lives at one position: ``inner`` for rows inside, the others as they are or zero.

    Attributes:
        inner: takes vectors `[row, batch, 1, d]`.
        inside: which rows, `[row, batch, 1, 1]`; a row axis of length 1 serves all rows.
        only: as in `Segment`.
    """

    inner: AffineMap
    inside: Tensor
    only: bool

    def __repr__(self) -> str:
        return f"Picked({self.inner})"

    @property
    def bias(self) -> Tensor:
        return ZERO if self.inner.bias is ZERO else self.inner.bias * self.inside

    def at(self, where: Where) -> "Picked":
        return self

    def norm_bound(self) -> float:
        return max(1.0, self.inner.norm_bound())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        output = self.inner._forward(x, affine)
        outside = torch.zeros_like(output) if self.only else x
        return torch.where(self.inside, output, outside)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        zeros = torch.zeros_like(g)
        pulled = self.inner._backward(torch.where(self.inside, g, zeros), biases)
        return pulled if self.only else pulled + torch.where(self.inside, zeros, g)


def shared_slice(where: Where) -> slice:
    """Positions that follow each other: what cross-attention can be cut to.

    Raises:
        TypeError: any others.
    """
    if not isinstance(where, slice):
        raise TypeError("a map that mixes positions of two segments can only be cut to a slice.")
    return where


@final
@dataclass(frozen=True, eq=False, repr=False)
class CrossAttention(AffineMap):
    """Mixes values of one segment's positions into another's by a frozen pattern, in head space.

    As `Attention`, for a pattern that is not square: keys lie at `keys`, queries at `queries`, of `length` positions.
    """

    pattern: Tensor
    kv_heads: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    length: int

    @property
    def positions(self) -> int | None:
        return self.length

    def __repr__(self) -> str:
        _, heads, query, key = self.pattern.shape
        return f"CrossAttention({heads} heads, {query} × {key})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    @property
    def mixes(self) -> bool:
        return True

    def at(self, where: Where) -> "CrossAttention":
        first, last, _ = shared_slice(where).indices(self.length)
        q0, q1, k0, k1 = (min(max(bound, first), last) for bound in (*self.queries, *self.keys))
        pattern = self.pattern[:, :, q0 - self.queries[0] : q1 - self.queries[0], k0 - self.keys[0] : k1 - self.keys[0]]
        segments = (q0 - first, q1 - first), (k0 - first, k1 - first)
        return CrossAttention(pattern, self.kv_heads, *segments, last - first)

    def norm_bound(self) -> float:
        return self.square.norm_bound()

    @property
    def square(self) -> Attention:
        """The same among all positions, by a pattern that is zero but from keys to queries."""
        first, last = self.keys
        pad = (first, self.length - last, self.queries[0], self.length - self.queries[1])
        return Attention(torch.nn.functional.pad(self.pattern, pad), self.kv_heads)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        outputs = mixed(self.pattern, self.kv_heads, x[..., slice(*self.keys), :])
        return widened(outputs, self.queries[0], self.length)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        values = unmixed(self.pattern, self.kv_heads, g[..., slice(*self.queries), :])
        return widened(values, self.keys[0], self.length)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        return self._pull_among(g, here, destination, reach, biases)
