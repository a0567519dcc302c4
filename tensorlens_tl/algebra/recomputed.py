"""Attention whose pattern is computed when it is needed, for a few queries at a time, and dropped."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, final, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap
from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, shared
from tensorlens_tl.algebra.primitives import Attention, largest_singular_value, mixed, unmixed

CHUNK_BYTES = 32 * 2**20
"""How much of a pattern is computed at once; computing it allocates some four times as much."""


@runtime_checkable
class PatternRows(Protocol):
    """What computes the rows of a pattern."""

    def of_head(self, head: int) -> "PatternRows":
        """The same for one head."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Prompts, heads, positions."""
        ...

    @property
    def queries(self) -> Tensor:
        """Something on the pattern's device."""
        ...

    def rows(
        self, positions: Int[Tensor, "batch query"], dtype: torch.dtype
    ) -> Float[Tensor, "batch head query reached"]:
        """The pattern's rows of some queries, up to the last key that any of them can reach."""
        ...


@final
@dataclass(frozen=True, eq=False, repr=False)
class RecomputedAttention(AffineMap):
    """`Attention` that holds no pattern: `source` computes rows of it, a few queries at a time.

    A pull from one query computes one row, and no map holds more of a pattern than `CHUNK_BYTES` at once, whatever the
    number of rows pushed or pulled; `pattern` makes the whole.

    Attributes:
        source: makes the rows.
        heads: a factor for each head, `[head]`: 0 for those that are left out; None keeps all.
        cut: the positions that the map is cut to, ascending; None for all.
    """

    source: PatternRows
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
        """How many heads mix."""
        return self.source.shape[1]

    def of_head(self, head: int) -> "RecomputedAttention":
        """One head alone: it mixes the values of its key-value head."""
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

    @property
    def bias(self) -> Tensor:
        return ZERO

    @property
    def mixes(self) -> bool:
        return True

    def at(self, where: Where) -> "RecomputedAttention":
        return replace(self, cut=self._queries()[shared(where)])

    def norm_bound(self) -> float:
        return largest_singular_value(rearrange(self.pattern, "b (kv group) q k -> b kv (group q) k", kv=self.kv_heads))

    def at_queries(
        self, x: Float[Tensor, "batch key d_in"], queries: Int[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query d_out"]:
        """What some queries of each prompt mix from the values of all keys; other queries are not computed."""
        rows = self.rows_at(queries)
        return mixed(rows, self.kv_heads, x[None, :, : rows.shape[-1]])[0]

    def rows_at(self, queries: Int[Tensor, "batch query"]) -> Float[Tensor, "batch head query key"]:
        """The pattern's rows of some queries of each prompt, without keys that none of them reads."""
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
        if len(origin) == 1:  # one query of each prompt serves every vector
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
        """Rows of some queries, at the keys that the map is cut to."""
        rows = self.source.rows(positions, self.dtype)
        if self.cut is not None:
            rows = rows[..., self.cut[self.cut < rows.shape[-1]]]
        if self.heads is None:
            return rows
        return rows * self.heads[:, None, None]

    def _keys(self, rows: Float[Tensor, "batch head query reached"], destination: Positions) -> Tensor:
        """The keys of the destination; those that no query reaches are zero."""
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
"""Attention by a pattern, held or recomputed; both have `pattern`, `kv_heads`, `at_queries` and `rows_at`."""


def query_chunks(queries: int, bytes_per_query: int) -> Iterator[slice]:
    """Slices of queries whose rows fit `CHUNK_BYTES`."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_query))
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))
