"""Attention whose pattern is made when it is needed, for a few queries at a time, and dropped."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, final, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap
from tensorlens_tl.algebra.positions import BiasTerms, RowPositions, Where, shared
from tensorlens_tl.algebra.primitives import Attention, largest_singular_value, mixed, unmixed

CHUNK_BYTES = 32 * 2**20
"""How much of a pattern is made at once; while it is made, some four times as much is allocated."""


@runtime_checkable
class PatternRows(Protocol):
    """What can make the rows of a pattern."""

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
    """`Attention` that holds no pattern: `source` makes rows of it, a few queries at a time.

    A pull from one query makes one row, and no map holds more of a pattern than `CHUNK_BYTES` at once, whatever the
    number of rows pushed or pulled; `pattern` makes the whole.

    Attributes:
        source: makes the rows.
        heads: a factor for each head, `[head]`: 0 for those that are left out; None keeps all.
        kept: the positions that the map is cut to, ascending; None for all.
    """

    source: PatternRows
    kv_heads: int
    dtype: torch.dtype
    heads: Float[Tensor, "head"] | None = None
    kept: Int[Tensor, "kept"] | None = None

    @property
    def positions(self) -> int | None:
        return self.source.shape[-1] if self.kept is None else len(self.kept)

    @property
    def pattern(self) -> Float[Tensor, "batch head query key"]:
        batch, heads, _ = self.source.shape
        queries = self._queries()
        made = torch.zeros(batch, heads, len(queries), len(queries), dtype=self.dtype, device=queries.device)
        for chunk in self._chunks(len(queries)):
            rows = self._rows(queries[chunk].expand(batch, -1))
            made[:, :, chunk, : rows.shape[-1]] = rows
        return made

    @property
    def n_heads(self) -> int:
        """How many heads mix."""
        return self.source.shape[1]

    def of_head(self, head: int) -> "RecomputedAttention":
        """One head alone: it mixes the values of its key-value head."""
        factor = None if self.heads is None else self.heads[head : head + 1]
        return replace(self, source=self.source.of_head(head), kv_heads=1, heads=factor)

    def __repr__(self) -> str:
        return f"Attention({self.n_heads} heads, {self.positions} × {self.positions}, recomputed)"

    @property
    def bias(self) -> Tensor:
        return ZERO

    @property
    def mixes(self) -> bool:
        return True

    def at(self, where: Where) -> "RecomputedAttention":
        return replace(self, kept=self._queries()[shared(where)])

    def norm_bound(self) -> float:
        return largest_singular_value(rearrange(self.pattern, "b (kv group) q k -> b kv (group q) k", kv=self.kv_heads))

    def at_queries(
        self, x: Float[Tensor, "batch key d_in"], queries: Int[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query d_out"]:
        """What some queries of each prompt mix from the values of all keys; other queries are not computed."""
        rows = self._rows(self._queries()[queries])
        return mixed(rows, self.kv_heads, x[None, :, : rows.shape[-1]])[0]

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        queries, values = self._queries(), x.reshape(-1, *x.shape[-3:])
        parts: list[Tensor] = []
        for chunk in self._chunks(len(queries)):
            rows = self._rows(queries[chunk].expand(self.source.shape[0], -1))
            parts.append(mixed(rows, self.kv_heads, values[:, :, : rows.shape[-1]]))
        made = torch.cat(parts, dim=2)
        return made.reshape(*x.shape[:-3], *made.shape[1:])

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        queries, vectors = self._queries(), g.reshape(-1, *g.shape[-3:])
        pulled = self._pulled(vectors, queries, slice(0, len(queries)))
        return pulled.reshape(*g.shape[:-3], *pulled.shape[1:])

    def _pull(self, g: Tensor, here: Where, there: slice | list[int], reach: slice, biases: BiasTerms | None) -> Tensor:
        queries = self._queries()
        if not isinstance(here, RowPositions):
            return self._pulled(g, queries[here], there)
        asked = queries[here.positions]
        if len(asked) == 1:  # one query of each prompt serves every vector
            return unmixed(self._keys(self._rows(asked.T), there), self.kv_heads, g)
        parts: list[Tensor] = []
        for chunk in self._chunks(len(asked)):
            rows = rearrange(self._keys(self._rows(asked[chunk].T), there), "b h r k -> r b h k")
            grouped = rearrange(rows, "r b (kv group) k -> r b kv group k", kv=self.kv_heads)
            heads = rearrange(
                g[chunk, :, 0], "r b (kv group d) -> r b kv group d", kv=self.kv_heads, group=grouped.shape[3]
            )
            parts.append(torch.einsum("rbcgk,rbcgd->rbkcd", grouped, heads).flatten(-2))
        return torch.cat(parts)

    # ------------------------------------------------------------------ inside

    def _pulled(
        self, g: Float[Tensor, "row batch query width"], queries: Int[Tensor, "query"], there: slice | list[int]
    ) -> Float[Tensor, "row batch key d"]:
        count = len(range(there.stop)[there]) if isinstance(there, slice) else len(there)
        width = g.shape[-1] * self.kv_heads // self.source.shape[1]
        total = g.new_zeros(*g.shape[:2], count, width)
        for chunk in self._chunks(len(queries)):
            rows = self._rows(queries[chunk].expand(self.source.shape[0], -1))
            if isinstance(there, slice):
                rows = rows[..., there]
                total[:, :, : rows.shape[-1]] += unmixed(rows, self.kv_heads, g[:, :, chunk])
            else:
                total += unmixed(self._keys(rows, there), self.kv_heads, g[:, :, chunk])
        return total

    def _rows(self, positions: Int[Tensor, "batch query"]) -> Float[Tensor, "batch head query reached"]:
        """Rows of some queries, at the keys that the map is cut to."""
        rows = self.source.rows(positions, self.dtype)
        if self.kept is not None:
            rows = rows[..., self.kept[self.kept < rows.shape[-1]]]
        return rows if self.heads is None else rows * self.heads[:, None, None]

    def _keys(self, rows: Float[Tensor, "batch head query reached"], there: slice | list[int]) -> Tensor:
        """The keys that are asked for; those that no query reaches are zero."""
        wanted = there.stop if isinstance(there, slice) else max(there) + 1
        return torch.nn.functional.pad(rows, (0, max(0, wanted - rows.shape[-1])))[..., there]

    def _queries(self) -> Int[Tensor, "query"]:
        if self.kept is not None:
            return self.kept
        return torch.arange(self.source.shape[-1], device=self.source.queries.device)

    def _chunks(self, queries: int) -> Iterator[slice]:
        batch, heads, positions = self.source.shape
        return query_chunks(queries, batch * heads * positions * torch.finfo(self.dtype).bits // 8)


AnyAttention = Attention | RecomputedAttention
"""Attention by a pattern, held or recomputed; both have `pattern`, `kv_heads` and `at_queries`."""


def query_chunks(queries: int, bytes_per_query: int) -> Iterator[slice]:
    """Slices of queries whose rows fit `CHUNK_BYTES`."""
    step = max(1, CHUNK_BYTES // max(1, bytes_per_query))
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))
