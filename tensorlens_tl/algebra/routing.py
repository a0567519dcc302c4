"""Branches that each act on their own tokens: the experts of a mixture with fixed routing.

A token goes through the experts that it is routed to, Σ_e weight_e · expert_e(x). With fixed routing, that is a sum of
maps, each over a few tokens. Every branch works on its tokens packed side by side, so nothing is computed for tokens
that an expert does not see.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import final

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, MixingMap, PositionwiseMap, WithoutBias, collector
from tensorlens_tl.algebra.numerics import maybe, refuse_autocast, upcast
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, at, shared
from tensorlens_tl.algebra.primitives import Attention, largest_singular_value, mixed, unmixed


@final
@dataclass(frozen=True, eq=False)
class Branch:
    """One map and the tokens that it acts on.

    Attributes:
        map: a positionwise map of the packed tokens, whose vectors are `[*rows, 1, token, d]`.
        places: the tokens, as indices into the flattened axes of `Routed.shape`, without repetition.
        weight: a factor for each token.
        number: the number of the branch, such as the expert's.
    """

    map: AffineMap
    places: Int[Tensor, "token"]
    weight: Float[Tensor, "token"]
    number: int = 0


@final
@dataclass(frozen=True, eq=False, repr=False)
class Routed(PositionwiseMap):
    """``Σ_branches weight · map(x)``, each over its own tokens; zero for tokens that no branch acts on.

    Attributes:
        branches: the maps and their tokens; at least one.
        shape: the axes of vectors that `places` index: batch and pos, or row, batch and 1 if each row has its own
            position.
        width: the width of the output.

    >>> from tensorlens_tl.algebra import Branch, Linear, Routed
    >>> second = Branch(Linear(2 * torch.eye(1)), places=torch.tensor([1]), weight=torch.tensor([0.5]), number=7)
    >>> Routed((second,), shape=(1, 3), width=1)(torch.ones(1, 3, 1)).flatten()
    tensor([0., 1., 0.])
    """

    branches: tuple[Branch, ...]
    shape: tuple[int, ...]
    width: int

    def __repr__(self) -> str:
        tokens = sum(len(branch.places) for branch in self.branches)
        return f"Routed({len(self.branches)} branches, {tokens} tokens)"

    @cached_property
    def _bias(self) -> Tensor:
        biases = [branch.map.bias for branch in self.branches]
        if all(bias is ZERO for bias in biases):
            return ZERO
        total = self.branches[0].weight.new_zeros(*self.shape, self.width).flatten(0, -2)
        for branch, bias in zip(self.branches, biases, strict=True):
            if bias is not ZERO:
                shares = (bias * branch.weight[:, None]).reshape(-1, self.width)
                total.index_add_(0, branch.places, shares.to(total))
        return total.reshape(*self.shape, self.width)

    @property
    def bias(self) -> Tensor:
        return self._bias

    def at(self, where: Where) -> "Routed":
        cells = torch.arange(self.shape[0] * self.shape[1], device=self.branches[0].places.device)
        old_cells = at(cells.reshape(*self.shape, 1), where)[..., 0]  # the old cell of each new one
        if old_cells.ndim == 3 and len(old_cells) == 1:  # one position for all rows
            old_cells = old_cells[0]
        packed_index = torch.full_like(cells, -1)
        branches = []
        for branch in self.branches:
            packed_index[branch.places] = torch.arange(len(branch.places), device=cells.device)
            packed = packed_index[old_cells.flatten()]
            places = (packed >= 0).nonzero()[:, 0]
            index = packed[places]
            packed_index[branch.places] = -1
            if len(places) or not branches:  # one branch stays, if empty, for its width and device
                branches.append(Branch(branch.map.at(index.tolist()), places, branch.weight[index], branch.number))
        if len(branches) > 1 and not len(branches[0].places):
            branches = branches[1:]
        return Routed(tuple(branches), tuple(old_cells.shape), self.width)

    def norm_bound(self) -> float:
        bounds = torch.zeros(math.prod(self.shape), dtype=torch.float64)
        for branch in self.branches:
            if len(branch.places):
                bounds.index_add_(0, branch.places.cpu(), branch.weight.abs().double().cpu() * branch.map.norm_bound())
        return float(bounds.max())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        x = x.expand(*x.shape[: -1 - len(self.shape)], *self.shape, -1)  # a bias may have one position for all
        flat = x.flatten(-1 - len(self.shape), -2)
        out = x.new_zeros(*flat.shape[:-1], self.width)
        for branch in self.branches:
            output = branch.map._forward(flat[..., branch.places, :].unsqueeze(-3), affine).squeeze(-3)
            out = out.index_add(-2, branch.places, output * branch.weight[:, None])
        return out.unflatten(-2, x.shape[-1 - len(self.shape) : -1])

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        flat = g.flatten(-1 - len(self.shape), -2)
        out: Tensor | None = None
        bias_terms = flat.new_zeros(flat.shape[:-1])
        for branch in self.branches:
            terms = collector(biases)
            packed = (flat[..., branch.places, :] * branch.weight[:, None]).unsqueeze(-3)
            pulled = branch.map._backward(packed, terms).squeeze(-3)
            if out is None:
                out = pulled.new_zeros(*flat.shape[:-1], pulled.shape[-1])
            out = out.index_add(-2, branch.places, pulled)
            for term in terms or ():
                bias_terms = bias_terms.index_add(-1, branch.places, term.squeeze(-2))
        assert out is not None  # there is at least one branch
        shape = g.shape[-1 - len(self.shape) : -1]
        if biases is not None and self._bias is not ZERO:
            biases.append(bias_terms.unflatten(-1, shape))
        return out.unflatten(-2, shape)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Beside(PositionwiseMap):
    """Maps that read the same vector, with their outputs concatenated: ``[.., (term d)]``; all of the same width.

    >>> from tensorlens_tl.algebra import Beside, Identity, Linear
    >>> Beside((Identity(), Linear(2 * torch.eye(2))))(torch.ones(1, 1, 2))
    tensor([[[1., 1., 2., 2.]]])
    """

    terms: tuple[AffineMap, ...]

    @property
    def components(self) -> int:
        return len(self.terms)

    def component(self, number: int) -> AffineMap:
        return self.terms[number]

    def __repr__(self) -> str:
        return f"Beside({', '.join(map(repr, self.terms))})"

    @property
    def bias(self) -> Tensor:
        biases = [term.bias for term in self.terms]
        given = [bias for bias in biases if bias is not ZERO]
        if not given:
            return ZERO
        shape = torch.broadcast_shapes(*(bias.shape for bias in given))
        zeros = given[0].new_zeros(shape)
        return torch.cat([zeros if bias is ZERO else bias.expand(shape) for bias in biases], dim=-1)

    def at(self, where: Where) -> "Beside":
        return Beside(tuple(term.at(where) for term in self.terms))

    def norm_bound(self) -> float:
        return sum(term.norm_bound() ** 2 for term in self.terms) ** 0.5

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return torch.cat([term._forward(x, affine) for term in self.terms], dim=-1)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        parts = g.chunk(len(self.terms), dim=-1)
        first, *others = (t._backward(part, biases) for t, part in zip(self.terms, parts, strict=True))
        return sum(others, start=first)


@final
@dataclass(frozen=True, eq=False, repr=False)
class GroupSum(WithoutBias, PositionwiseMap):
    """The sum of concatenated vectors, ``[.., (group d)] -> [.., d]``; follows `Beside`.

    >>> from tensorlens_tl.algebra import GroupSum
    >>> GroupSum(2)(torch.tensor([[[1.0, 2.0, 30.0, 40.0]]]))
    tensor([[[31., 42.]]])
    """

    groups: int

    def __repr__(self) -> str:
        return f"GroupSum({self.groups})"

    def at(self, where: Where) -> "GroupSum":
        return self

    def norm_bound(self) -> float:
        return self.groups**0.5

    def push_groups(
        self, x: Float[Tensor, "*rows batch pos d_in"], groups: int
    ) -> Float[Tensor, "group *rows batch pos d_out"]:
        """Return the groups themselves if they are the map's own."""
        if groups != self.groups:
            return super().push_groups(x, groups)
        return x.unflatten(-1, (groups, -1)).movedim(-2, 0)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return x.unflatten(-1, (self.groups, -1)).sum(-2)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return g.repeat(*(1,) * (g.ndim - 1), self.groups)


CHUNK_BYTES = 32 * 2**20
"""Bytes of a pattern that are computed at once; computing them allocates about four times as much."""


# ------------------------------------------------------------------
# Attention whose pattern is computed when needed, for a few queries at a time, and not stored.


@final
@dataclass(frozen=True, eq=False, repr=False)
class RecomputedAttention(WithoutBias, MixingMap):
    """`Attention` without a stored pattern: `source` computes its rows for a few queries at a time.

    A pull from one query computes one row, and at most `CHUNK_BYTES` of a pattern exist at once, however many rows are
    pushed or pulled; `pattern` computes the whole pattern.

    Attributes:
        source: computes the rows.
        heads: a factor for each head, `[head]`, 0 for heads that are left out; None keeps all.
        cut: the positions that the map is restricted to, ascending; None for all.
    """

    source: "HeldScores"
    kv_heads: int
    dtype: torch.dtype
    heads: Float[Tensor, "head"] | None = None
    cut: Int[Tensor, "cut"] | None = None

    @property
    def positions(self) -> int | None:
        return len(self._queries())

    @property
    def pattern(self) -> Float[Tensor, "batch head query key"]:
        batch, heads, _ = self.source.shape
        queries = self._queries()
        pattern = torch.zeros(batch, heads, len(queries), len(queries), dtype=self.dtype, device=queries.device)
        for chunk in self._chunks(len(queries)):
            rows = self._rows(queries[chunk].expand(batch, -1))
            pattern[:, :, chunk, : rows.shape[-1]] = rows
        return pattern

    @property
    def n_heads(self) -> int:
        """The number of heads."""
        return self.source.shape[1]

    def of_head(self, head: int) -> "RecomputedAttention":
        """Return one head, which mixes the values of its key-value head."""
        factor = maybe(partial(torch.narrow, dim=0, start=head, length=1), self.heads)
        return replace(self, source=self.source.of_head(head), kv_heads=1, heads=factor)

    @property
    def components(self) -> int:
        return self.n_heads

    def component(self, number: int) -> "RecomputedAttention":
        return self.of_head(number)

    def group_read_by(self, number: int) -> tuple[int, int]:
        return number * self.kv_heads // self.n_heads, self.kv_heads

    def __repr__(self) -> str:
        return f"Attention({self.n_heads} heads, {self.positions} × {self.positions}, recomputed)"

    def at(self, where: Where) -> "RecomputedAttention":
        return replace(self, cut=self._queries()[shared(where)])

    def norm_bound(self) -> float:
        return largest_singular_value(rearrange(self.pattern, "b (kv group) q k -> b kv (group q) k", kv=self.kv_heads))

    def at_queries(
        self, x: Float[Tensor, "batch key d_in"], queries: Int[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query d_out"]:
        """Return the mixed values at some queries of each prompt; other queries are not computed."""
        rows = self.rows_at(queries)
        return mixed(rows, self.kv_heads, x[None, :, : rows.shape[-1]])[0]

    def rows_at(self, queries: Int[Tensor, "batch query"]) -> Float[Tensor, "batch head query key"]:
        """Return the pattern's rows at some queries of each prompt, up to the last key that any of them reads."""
        return self._rows(self._queries()[queries])

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        queries = self._queries()
        parts: list[Tensor] = []
        for chunk in self._chunks(len(queries)):
            rows = self._rows(queries[chunk].expand(self.source.shape[0], -1))
            parts.append(mixed(rows, self.kv_heads, x[..., : rows.shape[-1], :]))
        return torch.cat(parts, dim=-2)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        queries = self._queries()
        vectors = g.reshape(-1, *g.shape[-3:])
        pulled = self._pulled(vectors, queries, slice(0, len(queries)))
        return pulled.reshape(*g.shape[:-3], *pulled.shape[1:])

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        queries = self._queries()
        if not isinstance(here, RowPositions):
            return self._pulled(g, queries[here], destination)
        origin = queries[here.positions.to(queries.device)]
        if len(origin) == 1:  # all vectors share one query per prompt
            return unmixed(self._keys(self._rows(origin.T), destination), self.kv_heads, g)
        parts: list[Tensor] = []
        for chunk in self._chunks(len(origin)):
            rows = rearrange(self._keys(self._rows(origin[chunk].T), destination), "b h r k -> r b h k")
            grouped = rearrange(rows, "r b (kv group) k -> r b kv group k", kv=self.kv_heads)
            heads = rearrange(
                g[chunk, :, 0], "r b (kv group d) -> r b kv group d", kv=self.kv_heads, group=grouped.shape[3]
            )
            parts.append(torch.einsum("rbcgk,rbcgd->rbkcd", grouped, heads).flatten(-2))
        return torch.cat(parts)

    # ------------------------------------------------------------------ inside

    def _pulled(
        self, g: Float[Tensor, "row batch query width"], queries: Int[Tensor, "query"], destination: Positions
    ) -> Float[Tensor, "row batch key d"]:
        count = self._queries()[destination].numel()
        width = g.shape[-1] * self.kv_heads // self.n_heads
        total = g.new_zeros(*g.shape[:2], count, width)
        for chunk in self._chunks(len(queries)):
            rows = self._rows(queries[chunk].expand(self.source.shape[0], -1))
            if isinstance(destination, slice):
                rows = rows[..., destination]
                total[:, :, : rows.shape[-1]] += unmixed(rows, self.kv_heads, g[:, :, chunk])
            else:
                total += unmixed(self._keys(rows, destination), self.kv_heads, g[:, :, chunk])
        return total

    def _rows(self, positions: Int[Tensor, "batch query"]) -> Float[Tensor, "batch head query reached"]:
        """The pattern's rows at some queries, at the keys that the map is restricted to."""
        rows = self.source.rows(positions, self.dtype)
        if self.cut is not None:
            rows = rows[..., self.cut[self.cut < rows.shape[-1]]]
        if self.heads is None:
            return rows
        return rows * self.heads[:, None, None]

    def _keys(self, rows: Float[Tensor, "batch head query reached"], destination: Positions) -> Tensor:
        """The columns of the destination; keys that no query reaches are zero."""
        end = destination.stop if isinstance(destination, slice) else max(destination) + 1
        return torch.nn.functional.pad(rows, (0, max(0, end - rows.shape[-1])))[..., destination]

    def _queries(self) -> Int[Tensor, "query"]:
        if self.cut is not None:
            return self.cut
        return torch.arange(self.source.shape[-1], device=self.source.queries.device)

    def _chunks(self, queries: int) -> Iterator[slice]:
        batch, heads, positions = self.source.shape
        return query_chunks(queries, batch * heads * positions * torch.finfo(self.dtype).bits // 8)


AnyAttention = Attention | RecomputedAttention
"""Attention with a stored or recomputed pattern; both have `pattern`, `kv_heads`, `at_queries` and `rows_at`."""


def query_chunks(queries: int, bytes_per_query: int) -> Iterator[slice]:
    """Yield slices of queries whose rows fit `CHUNK_BYTES`."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_query))
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))


# ------------------------------------------------------------------
# What one layer's pattern is recomputed from: queries, keys, and row sums.


def grouped_products(
    queries: Float[Tensor, "batch head query d_head"], keys: Float[Tensor, "batch kv key d_head"]
) -> Float[Tensor, "batch head query key"]:
    """Return q·kᵀ for every query head; each key head serves the same number of consecutive query heads."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    return (grouped @ keys[:, :, None].mT).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class HeldScores:
    """The tensors that one layer's pattern is recomputed from.

    Attributes:
        queries, keys: after norms and rotation, `[batch, head, pos, d_head]` and `[batch, kv, pos, d_head]`.
        sums: the sum of each row of the pattern, `[batch, head, pos]`.
        real: True at real tokens; other tokens have no weight.
        scale, soft_cap: as in `ScoreReading`.
        slopes: ALiBi's slope of each head, added for each position between key and query; None without ALiBi.
        back, ahead: how far before and after its query a key may lie; None for any distance.
        device: where patterns are computed.
        error: the largest relative error of a row, measured during verification.
    """

    queries: Float[Tensor, "batch head pos d_head"]
    keys: Float[Tensor, "batch kv pos d_head"]
    sums: Float[Tensor, "batch head pos"]
    real: Bool[Tensor, "batch pos"]
    scale: float
    soft_cap: float | None
    slopes: Float[Tensor, "head"] | None
    back: int | None
    ahead: int | None
    device: torch.device
    error: float = float("inf")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Prompts, heads, positions."""
        batch, heads, pos, _ = self.queries.shape
        return batch, heads, pos

    def rows(
        self, positions: Int[Tensor, "batch query"], dtype: torch.dtype
    ) -> Float[Tensor, "batch head query reached"]:
        """Return the pattern's rows at some queries, up to the last key that any of them can reach."""
        refuse_autocast(self.device)
        at = positions.to(self.queries.device)
        pos = self.shape[-1]
        reached = pos if self.ahead is None or not at.numel() else min(pos, int(at.max()) + 1 + self.ahead)
        q = torch.take_along_dim(self.queries, at[:, None, :, None], dim=2).to(self.device)
        k = self.keys[:, :, :reached].to(self.device)
        scores = grouped_products(q, k).mul_(self.scale)
        if self.soft_cap is not None:
            scores = scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        distance = (at[:, :, None] - torch.arange(reached, device=at.device)).to(self.device)[:, None]
        if self.slopes is not None:
            scores += self.slopes[:, None, None].to(scores) * distance.clamp_min(0)
        shut = ~self.real[:, None, None, :reached].to(self.device)
        if self.ahead is not None:
            shut = shut | (distance < -self.ahead)
        if self.back is not None:
            shut = shut | (distance > self.back)
        pattern = torch.softmax(upcast(scores.masked_fill_(shut, -torch.inf)), dim=-1)
        pattern = pattern.masked_fill_(shut.all(-1, keepdim=True), 0.0)  # a softmax over no key
        sums = torch.take_along_dim(self.sums, at[:, None], dim=2).to(pattern)
        return pattern.mul_(sums[..., None]).to(dtype)

    def on(self, device: torch.device) -> "HeldScores":
        """Return the same with patterns computed on another device; the inputs are moved there a few rows at a time."""
        return self if device == self.device else replace(self, device=device)

    def of_head(self, head: int) -> "HeldScores":
        """Return the same for one head."""
        kv = head // (self.shape[1] // self.keys.shape[1])
        only = slice(head, head + 1)
        return replace(
            self,
            queries=self.queries[:, only],
            keys=self.keys[:, kv : kv + 1],
            sums=self.sums[:, only],
            slopes=None if self.slopes is None else self.slopes[only],
        )

    def cut(self, length: int) -> "HeldScores":
        """Return the same for the first tokens of a causal pass."""
        cut = {name: getattr(self, name)[:, :, :length] for name in ("queries", "keys", "sums")}
        return replace(self, **cut, real=self.real[:, :length])

    def attention(self, dtype: torch.dtype, heads: Tensor | None = None) -> RecomputedAttention:
        """Return attention by this pattern, recomputed for a few queries at a time."""
        return RecomputedAttention(self, self.keys.shape[1], dtype, heads)
