"""The primitive maps: identity, matrix, frozen factor, norm with a fixed scale, attention with a fixed pattern."""

from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.maps import MixingMap, PositionwiseMap, WithoutBias, bias_of, note_bias
from tensorlens_tl.algebra.numerics import centred, maybe, plus, times
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, at, shared


@final
@dataclass(frozen=True, eq=False, repr=False)
class Identity(WithoutBias, PositionwiseMap):
    """The residual connection.

    >>> from tensorlens_tl.algebra import Identity
    >>> Identity()(torch.ones(1, 1, 2))
    tensor([[[1., 1.]]])
    """

    def __repr__(self) -> str:
        return "Identity"

    @property
    def is_identity(self) -> bool:
        return True

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
class Tap(WithoutBias, PositionwiseMap):
    """The identity, recording the vectors that last went through it: forward in ``seen``, backward in ``pulled``.

    >>> from tensorlens_tl.algebra import Linear, Tap
    >>> seen = {}
    >>> _ = (Tap(seen, "middle") @ Linear(2 * torch.eye(2)))(torch.ones(1, 1, 2))
    >>> seen["middle"]
    tensor([[[2., 2.]]])
    """

    seen: dict[str, Tensor]
    name: str
    pulled: dict[str, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Tap({self.name})"

    def at(self, where: Where) -> "Tap":
        return self

    def norm_bound(self) -> float:
        return 1.0

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        self.seen[self.name] = x
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        if self.pulled is not None:
            self.pulled[self.name] = g
        return g


@final
@dataclass(frozen=True, eq=False, repr=False)
class Linear(PositionwiseMap):
    """``x @ weight + offset``: the same matrix at every position.

    The weight may have a wider dtype than the vectors (an adapter merged in float32 into a bfloat16 model): products
    are then computed in the wider dtype and returned in that of the vectors.

    >>> from tensorlens_tl.algebra import Linear
    >>> Linear(torch.eye(2), offset=torch.tensor([0.0, 10.0]))(torch.ones(1, 1, 2))
    tensor([[[ 1., 11.]]])
    """

    weight: Float[Tensor, "d_in d_out"]
    offset: Float[Tensor, "d_out"] | None = None

    def __repr__(self) -> str:
        return "Linear({} → {}{})".format(*self.weight.shape, _shown(self.offset))

    @property
    def bias(self) -> Tensor:
        return bias_of(self.offset)

    def at(self, where: Where) -> "Linear":
        return self

    def norm_bound(self) -> float:
        return largest_singular_value(self.weight)

    def of_group(self, group: int, groups: int) -> "Linear":
        cut = partial(channels_of, group=group, groups=groups)
        return Linear(cut(self.weight), maybe(cut, self.offset))

    def push_groups(
        self, x: Float[Tensor, "*rows batch pos d_in"], groups: int
    ) -> Float[Tensor, "group *rows batch pos d_out"]:
        """Multiply each group by its own rows of the matrix."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        vectors = x.to(wide).unflatten(-1, (groups, -1)).flatten(0, -3).transpose(0, 1)
        outputs = vectors @ self.weight.to(wide).unflatten(0, (groups, -1))
        return outputs.to(x.dtype).unflatten(1, x.shape[:-1])

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return _product(x, self.weight.T, self.offset if affine else None)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        return _product(g, self.weight)


def _product(x: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
    if x.dtype == weight.dtype and (offset is None or offset.dtype == x.dtype):
        return torch.nn.functional.linear(x, weight, offset)
    wide = torch.promote_types(x.dtype, weight.dtype)
    offset = maybe(partial(Tensor.to, dtype=wide), offset)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide), offset).to(x.dtype)


def channels_of(channels: Tensor, group: int, groups: int) -> Tensor:
    """Return one of several equal groups of channels."""
    return channels.unflatten(-1, (groups, -1))[..., group, :]


def _shown(offset: Tensor | None) -> str:
    """Return the mention of an offset in a repr."""
    return "" if offset is None else ", offset"


def several(held: Tensor) -> int | None:
    """Return the number of positions of a tensor; None if one entry serves all."""
    return held.shape[-2] if held.shape[-2] > 1 else None


@final
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(PositionwiseMap):
    """``x * factor + offset``, with a frozen factor per position and channel, such as an activation ratio.

    >>> from tensorlens_tl.algebra import Diagonal
    >>> Diagonal(torch.tensor([[[2.0, 0.0]]]))(torch.ones(1, 1, 2))
    tensor([[[2., 0.]]])
    """

    factor: Float[Tensor, "*rows batch pos d"]
    offset: Float[Tensor, "*rows batch pos d"] | None = None

    @property
    def positions(self) -> int | None:
        return several(self.factor)

    def __repr__(self) -> str:
        return f"Diagonal({self.factor.shape[-1]}{_shown(self.offset)})"

    @property
    def bias(self) -> Tensor:
        return bias_of(self.offset)

    def at(self, where: Where) -> "Diagonal":
        return Diagonal(at(self.factor, where), maybe(partial(at, where=where), self.offset))

    @property
    def is_channelwise(self) -> bool:
        return True

    def of_group(self, group: int, groups: int) -> "Diagonal":
        cut = partial(channels_of, group=group, groups=groups)
        return Diagonal(cut(self.factor), maybe(cut, self.offset))

    def norm_bound(self) -> float:
        return float(self.factor.abs().max())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = x * self.factor
        return plus(y, self.offset) if affine else y

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        return g * self.factor


@final
@dataclass(frozen=True, eq=False, repr=False)
class Norm(PositionwiseMap):
    """LayerNorm or RMSNorm with a fixed denominator: ``(x − mean x) / scale * gain + shift``.

    `scale` is √(var + ε) for LayerNorm and √(mean square + ε) for RMSNorm; with `centre`, the mean is subtracted
    (LayerNorm). Models divide in float32 and cast back, as happens here with a float32 scale and bfloat16 vectors.

    >>> from tensorlens_tl.algebra import Norm
    >>> Norm(scale=torch.full((1, 1, 1), 2.0))(torch.tensor([[[1.0, 3.0]]]))
    tensor([[[-0.5000,  0.5000]]])
    """

    scale: Float[Tensor, "*rows batch pos 1"]
    gain: Float[Tensor, "d"] | None = None
    shift: Float[Tensor, "d"] | None = None
    centre: bool = True

    @property
    def positions(self) -> int | None:
        return several(self.scale)

    def __repr__(self) -> str:
        return f"Norm({'centred' if self.centre else 'not centred'})"

    @property
    def bias(self) -> Tensor:
        return bias_of(self.shift)

    def at(self, where: Where) -> "Norm":
        return replace(self, scale=at(self.scale, where))

    def norm_bound(self) -> float:
        bound = 1.0
        if self.gain is not None:
            bound = float(self.gain.abs().max())
        return bound / float(self.scale.min())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = times((centred(x, self.centre) / self.scale).to(x.dtype), self.gain)
        if affine:
            y = plus(y, self.shift)
        return y.to(x.dtype)  # gains may be float32 when vectors are bfloat16

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        return centred((times(g, self.gain) / self.scale).to(g.dtype), self.centre)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Attention(WithoutBias, MixingMap):
    """Mixing of values over positions by a frozen pattern, in head space: ``[.., (kv d_head)] -> [.., (head d_head)]``.

    Grouped-query attention needs no expanded weights: query head h reads key-value head ``h // (heads // kv_heads)``.
    Pattern rows need not sum to 1 (attention sinks, fully masked rows).

    >>> from tensorlens_tl.algebra import Attention
    >>> pattern = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    >>> Attention(pattern, kv_heads=1)(torch.tensor([[[1.0], [3.0]]])).flatten()
    tensor([1., 2.])
    """

    pattern: Float[Tensor, "batch head query key"]
    kv_heads: int

    @property
    def positions(self) -> int | None:
        return self.pattern.shape[-1]

    @property
    def n_heads(self) -> int:
        """The number of heads."""
        return self.pattern.shape[1]

    def of_head(self, head: int) -> "Attention":
        """Return one head, which mixes the values of its key-value head."""
        return Attention(self.pattern[:, head : head + 1], 1)

    @property
    def components(self) -> int:
        return self.n_heads

    def component(self, number: int) -> "Attention":
        return self.of_head(number)

    def group_read_by(self, number: int) -> tuple[int, int]:
        return number * self.kv_heads // self.n_heads, self.kv_heads

    def __repr__(self) -> str:
        _, heads, query, key = self.pattern.shape
        return f"Attention({heads} heads, {query} × {key})"

    def at(self, where: Where) -> "Attention":
        where = shared(where)
        return replace(self, pattern=self.pattern[:, :, where][..., where])

    def norm_bound(self) -> float:
        # heads that share a key-value head read the same values: their patterns stack
        return largest_singular_value(rearrange(self.pattern, "b (kv group) q k -> b kv (group q) k", kv=self.kv_heads))

    def at_queries(
        self, x: Float[Tensor, "batch key d_in"], queries: Int[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query d_out"]:
        """Return the mixed values at some queries of each prompt; other queries are not computed."""
        return replace(self, pattern=self.rows_at(queries))._forward(x, affine=False)

    def rows_at(self, queries: Int[Tensor, "batch query"]) -> Float[Tensor, "batch head query key"]:
        """Return the pattern's rows at some queries of each prompt."""
        return torch.take_along_dim(self.pattern, queries[:, None, :, None], dim=2)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return mixed(self.pattern, self.kv_heads, x)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return unmixed(self.pattern, self.kv_heads, g)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        keys = self.pattern[..., destination]
        if not isinstance(here, RowPositions):
            return unmixed(keys[:, :, here], self.kv_heads, g)
        rows = here.positions
        index = torch.arange(rows.shape[1], device=rows.device)
        pattern = rearrange(keys[index, :, rows], "r b (kv group) k -> r b kv group k", kv=self.kv_heads)
        heads = rearrange(g[:, :, 0], "r b (kv group d) -> r b kv group d", kv=self.kv_heads, group=pattern.shape[3])
        wide = torch.promote_types(pattern.dtype, g.dtype)
        pattern = pattern.to(wide)
        heads = heads.to(wide)
        if pattern.shape[0] == 1 != heads.shape[0]:  # all rows share one query: a product per head
            return torch.einsum("bcgk,rbcgd->rbkcd", pattern[0], heads).flatten(-2).to(g.dtype)
        return torch.einsum("rbcgk,rbcgd->rbkcd", pattern, heads).flatten(-2).to(g.dtype)


def mixed(
    pattern: Float[Tensor, "batch head query key"], kv_heads: int, x: Float[Tensor, "*rows _ _ kv_width"]
) -> Float[Tensor, "*rows batch query width"]:
    """Mix values over positions by a pattern; a batch or position axis of length 1 broadcasts.

    Computed in the wider of the two dtypes, and returned in the dtype of the values.
    """
    wide = torch.promote_types(pattern.dtype, x.dtype)
    grouped = pattern.unflatten(1, (kv_heads, -1)).to(wide)
    values = rearrange(x[None].flatten(0, -4), "r b k (kv d) -> r b k kv d", kv=kv_heads).to(wide)
    outputs = torch.einsum("bcgqk,rbkcd->rbqcgd", grouped, values).flatten(3)
    return outputs.reshape(*x.shape[:-3], *outputs.shape[1:]).to(x.dtype)


def unmixed(
    pattern: Float[Tensor, "batch head query key"], kv_heads: int, g: Float[Tensor, "*rows _ _ width"]
) -> Float[Tensor, "*rows batch key kv_width"]:
    """Apply the adjoint of `mixed`."""
    wide = torch.promote_types(pattern.dtype, g.dtype)
    grouped = pattern.unflatten(1, (kv_heads, -1)).to(wide)
    heads = rearrange(
        g[None].flatten(0, -4), "r b q (kv group d) -> r b q kv group d", kv=kv_heads, group=grouped.shape[2]
    ).to(wide)
    if grouped.shape[2] > 1 and grouped.shape[0] == heads.shape[1] and grouped.shape[3] == heads.shape[2]:
        values = _unmixed_by_group(grouped, heads).flatten(-2)
    else:
        values = torch.einsum("bcgqk,rbqcgd->rbkcd", grouped, heads).flatten(-2)
    return values.reshape(*g.shape[:-3], *values.shape[1:]).to(g.dtype)


def _unmixed_by_group(
    grouped: Float[Tensor, "batch kv group query key"], heads: Float[Tensor, "row batch query kv group d"]
) -> Float[Tensor, "row batch key kv d"]:
    """`unmixed` for heads that share keys and values, one head of each group after the other: a single sum over queries
    and groups would copy the whole pattern, which takes longer than the products.
    """
    by_head = rearrange(heads, "r b q kv group d -> group b kv q (r d)")
    values = grouped[:, :, 0].mT @ by_head[0]
    for number in range(1, len(by_head)):
        values += grouped[:, :, number].mT @ by_head[number]
    return rearrange(values, "b kv k (r d) -> r b k kv d", r=len(heads))


def largest_singular_value(matrix: Float[Tensor, "*batch rows columns"]) -> float:
    """Return the largest singular value from the smaller Gram matrix, in float64: several times faster than an SVD."""
    matrix = matrix.double()
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = matrix.mT
    return float(torch.linalg.eigvalsh(matrix @ matrix.mT)[..., -1].max().clamp_min(0).sqrt())
