"""The primitive maps: identity, matrix, frozen factor, norm with its scale held, attention with its pattern held."""

from dataclasses import dataclass, replace
from typing import final

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, PositionwiseMap, note_bias
from tensorlens_tl.algebra.positions import BiasTerms, RowPositions, Where, at, shared


@final
@dataclass(frozen=True, eq=False, repr=False)
class Identity(PositionwiseMap):
    """The residual connection."""

    def __repr__(self) -> str:
        return "Identity"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "Identity":
        return self

    def norm_bound(self) -> float:
        return 1.0

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return g


@final
@dataclass(frozen=True, eq=False, repr=False)
class Tap(PositionwiseMap):
    """The identity, which notes the vectors that were last sent forward through it: ``seen[name]``."""

    seen: dict[str, Tensor]
    name: str

    def __repr__(self) -> str:
        return f"Tap({self.name})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "Tap":
        return self

    def norm_bound(self) -> float:
        return 1.0

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        self.seen[self.name] = x
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return g


@final
@dataclass(frozen=True, eq=False, repr=False)
class Linear(PositionwiseMap):
    """``x @ weight + offset``: the same matrix at every position.

    A weight may be wider than the vectors (an adapter merged in float32 beside a model in bfloat16): products are then
    made in the wider dtype, and come back in that of the vectors.
    """

    weight: Float[Tensor, "d_in d_out"]
    offset: Float[Tensor, "d_out"] | None = None

    def __repr__(self) -> str:
        return "Linear({} → {}{})".format(*self.weight.shape, "" if self.offset is None else ", offset")

    @property
    def bias(self) -> Tensor:
        return ZERO if self.offset is None else self.offset

    def at(self, where: Where) -> "Linear":
        return self

    def norm_bound(self) -> float:
        return largest_singular_value(self.weight)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return _product(x, self.weight.T, self.offset if affine else None)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        return _product(g, self.weight)


def _product(x: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
    if x.dtype == weight.dtype and (offset is None or offset.dtype == x.dtype):
        return torch.nn.functional.linear(x, weight, offset)
    wide = torch.promote_types(x.dtype, weight.dtype)
    offset = None if offset is None else offset.to(wide)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide), offset).to(x.dtype)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(PositionwiseMap):
    """``x * factor + offset``: a frozen factor per position and channel, such as an activation ratio."""

    factor: Float[Tensor, "*rows batch pos d"]
    offset: Float[Tensor, "*rows batch pos d"] | None = None

    @property
    def positions(self) -> int | None:
        return self.factor.shape[-2] if self.factor.shape[-2] > 1 else None

    def __repr__(self) -> str:
        return f"Diagonal({self.factor.shape[-1]}{'' if self.offset is None else ', offset'})"

    @property
    def bias(self) -> Tensor:
        return ZERO if self.offset is None else self.offset

    def at(self, where: Where) -> "Diagonal":
        return Diagonal(at(self.factor, where), None if self.offset is None else at(self.offset, where))

    def norm_bound(self) -> float:
        return float(self.factor.abs().max())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = x * self.factor
        return y if self.offset is None or not affine else y + self.offset

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        return g * self.factor


@final
@dataclass(frozen=True, eq=False, repr=False)
class Norm(PositionwiseMap):
    """LayerNorm or RMSNorm with its denominator held fixed: ``(x − mean x) / scale * gain + shift``.

    `scale` is √(var + ε) or √(mean square + ε); `centre` tells LayerNorm (subtracts the mean) from RMSNorm.
    Models divide in float32 and cast back; a float32 scale beside bfloat16 vectors does the same here.
    """

    scale: Float[Tensor, "*rows batch pos 1"]
    gain: Float[Tensor, "d"] | None = None
    shift: Float[Tensor, "d"] | None = None
    centre: bool = True

    @property
    def positions(self) -> int | None:
        return self.scale.shape[-2] if self.scale.shape[-2] > 1 else None

    def __repr__(self) -> str:
        return f"Norm({'centred' if self.centre else 'not centred'})"

    @property
    def bias(self) -> Tensor:
        return ZERO if self.shift is None else self.shift

    def at(self, where: Where) -> "Norm":
        return replace(self, scale=at(self.scale, where))

    def norm_bound(self) -> float:
        return (1.0 if self.gain is None else float(self.gain.abs().max())) / float(self.scale.min())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = ((x - x.mean(-1, keepdim=True) if self.centre else x) / self.scale).to(x.dtype)
        y = y if self.gain is None else y * self.gain
        y = y if self.shift is None or not affine else y + self.shift
        return y.to(x.dtype)  # gains in float32 beside bfloat16 vectors

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        y = ((g if self.gain is None else g * self.gain) / self.scale).to(g.dtype)
        return y - y.mean(-1, keepdim=True) if self.centre else y


@final
@dataclass(frozen=True, eq=False, repr=False)
class Attention(AffineMap):
    """Mixes values over positions by a frozen pattern, in head space: ``[.., (kv d_head)] -> [.., (head d_head)]``.

    Grouped-query attention needs no expanded weights: query head h reads key-value head ``h // (heads // kv_heads)``.
    Pattern rows need not sum to 1 (attention sinks, fully masked rows).
    """

    pattern: Float[Tensor, "batch head query key"]
    kv_heads: int

    @property
    def positions(self) -> int | None:
        return self.pattern.shape[-1]

    @property
    def n_heads(self) -> int:
        """How many heads mix."""
        return self.pattern.shape[1]

    def of_head(self, head: int) -> "Attention":
        """One head alone: it mixes the values of its key-value head."""
        return Attention(self.pattern[:, head : head + 1], 1)

    def __repr__(self) -> str:
        _, heads, query, key = self.pattern.shape
        return f"Attention({heads} heads, {query} × {key})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    @property
    def mixes(self) -> bool:
        return True

    def at(self, where: Where) -> "Attention":
        where = shared(where)
        return replace(self, pattern=self.pattern[:, :, where][..., where])

    def norm_bound(self) -> float:
        # heads that share a key-value head read the same values: their patterns stack
        return largest_singular_value(rearrange(self.pattern, "b (kv group) q k -> b kv (group q) k", kv=self.kv_heads))

    def at_queries(
        self, x: Float[Tensor, "batch key d_in"], queries: Int[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query d_out"]:
        """What some queries of each prompt mix from the values of all keys; other queries are not computed."""
        rows = torch.take_along_dim(self.pattern, queries[:, None, :, None], dim=2)
        return replace(self, pattern=rows)._forward(x, affine=False)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        made = mixed(self.pattern, self.kv_heads, x.reshape(-1, *x.shape[-3:]))
        return made.reshape(*x.shape[:-3], *made.shape[1:])

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        pulled = unmixed(self.pattern, self.kv_heads, g.reshape(-1, *g.shape[-3:]))
        return pulled.reshape(*g.shape[:-3], *pulled.shape[1:])

    def _pull(self, g: Tensor, here: Where, there: slice | list[int], reach: slice, biases: BiasTerms | None) -> Tensor:
        keys = self.pattern[..., there]
        if not isinstance(here, RowPositions):
            return unmixed(keys[:, :, here], self.kv_heads, g)
        rows = here.positions
        index = torch.arange(rows.shape[1], device=rows.device)
        pattern = rearrange(keys[index, :, rows], "r b (kv group) k -> r b kv group k", kv=self.kv_heads)
        heads = rearrange(g[:, :, 0], "r b (kv group d) -> r b kv group d", kv=self.kv_heads, group=pattern.shape[3])
        if pattern.shape[0] == 1 != heads.shape[0]:  # one query for all rows: a product per head
            return torch.einsum("bcgk,rbcgd->rbkcd", pattern[0], heads).flatten(-2)
        return torch.einsum("rbcgk,rbcgd->rbkcd", pattern, heads).flatten(-2)


def mixed(
    pattern: Float[Tensor, "batch head query key"], kv_heads: int, x: Float[Tensor, "row _ _ kv_width"]
) -> Float[Tensor, "row batch query width"]:
    """Values mixed over positions by a pattern; one batch row or one position of them serves all."""
    values = rearrange(x, "r b k (kv d) -> r b k kv d", kv=kv_heads)
    made = torch.einsum("bcgqk,rbkcd->rbqcgd", pattern.unflatten(1, (kv_heads, -1)), values)
    return made.flatten(3)


def unmixed(
    pattern: Float[Tensor, "batch head query key"], kv_heads: int, g: Float[Tensor, "row _ _ width"]
) -> Float[Tensor, "row batch key kv_width"]:
    """The adjoint of `mixed`."""
    grouped = pattern.unflatten(1, (kv_heads, -1))
    heads = rearrange(g, "r b q (kv group d) -> r b q kv group d", kv=kv_heads, group=grouped.shape[2])
    return torch.einsum("bcgqk,rbqcgd->rbkcd", grouped, heads).flatten(-2)


def largest_singular_value(matrix: Float[Tensor, "*batch rows columns"]) -> float:
    """By the Gram matrix of the smaller side, in float64: several times faster than singular values."""
    matrix = matrix.double()
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    return float(torch.linalg.eigvalsh(gram)[..., -1].max().clamp_min(0).sqrt())
