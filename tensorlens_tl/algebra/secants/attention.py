"""How heads respond to a change in their queries and keys: the secant of the softmax, with scores bilinear in both."""

from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import MixingMap, PositionwiseMap, WithoutBias
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, at, shared, widened
from tensorlens_tl.algebra.primitives import channels_of, largest_singular_value, several
from tensorlens_tl.algebra.segments import Cut


@dataclass(frozen=True, eq=False)
class ScoreSecant:
    """The heads' response to a change in attention scores: ``Δz_i = Σ_k weights_ik · Δ⟨q_i, k_k⟩ · (v̄_k − c_i)``.

    Attributes:
        weights: the logarithmic mean of the pattern, times the scale of the product and the slope of a soft cap,
            `[batch, query, head, key]`.
        centres: c, which the softmax's normalisation subtracts, `[batch, query, head, d_value]`.
        queries, keys, values: means of the two runs, `[batch, head, pos, d]`; repeated for grouped-query attention.
        kv_heads: the number of key-value heads.
    """

    weights: Float[Tensor, "batch query head key"]
    centres: Float[Tensor, "batch query head d_value"]
    queries: Float[Tensor, "batch head query d_head"]
    keys: Float[Tensor, "batch head key d_head"]
    values: Float[Tensor, "batch head key d_value"]
    kv_heads: int

    @classmethod
    def of(
        cls,
        means: Float[Tensor, "batch head query key"],
        rest: Float[Tensor, "batch head query"],
        scale: Tensor | float,
        queries: Float[Tensor, "batch head query d_head"],
        keys: Float[Tensor, "batch head key d_head"],
        values: Float[Tensor, "batch head key d_value"],
        kv_heads: int,
    ) -> "ScoreSecant":
        """Build the secant from the logarithmic mean of the two patterns.

        Args:
            means: the logarithmic mean of the two runs' probabilities; zero where a key is masked.
            rest: the logarithmic mean of what a row lacks to 1 (attention sinks); zero without sinks.
            scale: the factor of query-key products before the softmax, broadcast to the pattern.
            queries, keys, values, kv_heads: as the attributes.
        """
        total = means.sum(-1) + rest
        shares = means / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
        weights = (means * scale).transpose(1, 2).contiguous()
        return cls(weights, (shares @ values).transpose(1, 2), queries, keys, values, kv_heads)

    def of_head(self, head: int) -> "ScoreSecant":
        """Return the same for one head, which reads one key head."""
        only = slice(head, head + 1)
        by_query = (self.weights[:, :, only], self.centres[:, :, only])
        return ScoreSecant(*by_query, self.queries[:, only], self.keys[:, only], self.values[:, only], 1)

    def between(self, queries: Positions, keys: Positions) -> "ScoreSecant":
        """Return the same for some queries and some keys."""
        return replace(
            self,
            weights=self.weights[:, queries][..., keys],
            centres=self.centres[:, queries],
            queries=self.queries[:, :, queries],
            keys=self.keys[:, :, keys],
            values=self.values[:, :, keys],
        )

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.weights.shape[2]


def _by_head(x: Float[Tensor, "*rows pos width"], heads: int, like: Tensor) -> Float[Tensor, "*rows head pos d"]:
    """Split concatenated heads, in the dtype of the computation."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2).to(like.dtype)


def _side_by_side(x: Float[Tensor, "*rows head pos d"]) -> Float[Tensor, "*rows pos width"]:
    return x.transpose(-3, -2).flatten(-2)


@final
@dataclass(frozen=True, eq=False, repr=False)
class QueryResponse(WithoutBias, PositionwiseMap):
    """The heads' response to a change in their queries, through the pattern: ``[.., (head d_head)] -> [.., (head d)]``.

    A query only changes its own attention, so positions are separate.

    Attributes:
        weights, centres: those of a `ScoreSecant`, with heads concatenated.
        keys, values: those of a `ScoreSecant`, at all positions.
    """

    weights: Float[Tensor, "*rows batch pos head_key"]
    centres: Float[Tensor, "*rows batch pos head_d_value"]
    keys: Float[Tensor, "batch head key d_head"]
    values: Float[Tensor, "batch head key d_value"]

    @classmethod
    def of(cls, secant: ScoreSecant) -> "QueryResponse":
        """Build the map from the scores' secant."""
        return cls(secant.weights.flatten(-2), secant.centres.flatten(-2), secant.keys, secant.values)

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.keys.shape[1]

    def __repr__(self) -> str:
        return f"QueryResponse({self.heads} heads)"

    @property
    def positions(self) -> int | None:
        return several(self.weights)

    @property
    def components(self) -> int:
        return self.heads

    def component(self, number: int) -> "QueryResponse":
        cut = partial(channels_of, group=number, groups=self.heads)
        only = slice(number, number + 1)
        return QueryResponse(cut(self.weights), cut(self.centres), self.keys[:, only], self.values[:, only])

    def group_read_by(self, number: int) -> tuple[int, int]:
        return number, self.heads

    def at(self, where: Where) -> "QueryResponse":
        return replace(self, weights=at(self.weights, where), centres=at(self.centres, where))

    def norm_bound(self) -> float:
        bound = 0.0
        for head in range(self.heads):
            alone = self.component(head)
            keys = alone.keys[:, 0]
            by_value = torch.einsum("...bqk,bke,bkd->...bqed", alone.weights, keys, alone.values[:, 0])
            by_centre = torch.einsum("...bqk,bke,...bqd->...bqed", alone.weights, keys, alone.centres)
            bound = max(bound, largest_singular_value(by_value - by_centre))
        return bound

    @property
    def _by_head(self) -> tuple[Tensor, Tensor]:
        """Weights and centres, `[*rows, batch, head, pos, ·]`."""
        return _by_head(self.weights, self.heads, self.weights), _by_head(self.centres, self.heads, self.centres)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        weights, centres = self._by_head
        products = weights * (_by_head(x, self.heads, self.keys) @ self.keys.mT)
        return _side_by_side(products @ self.values - products.sum(-1, keepdim=True) * centres).to(x.dtype)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        weights, centres = self._by_head
        heads = _by_head(g, self.heads, self.values)
        products = weights * (heads @ self.values.mT - (heads * centres).sum(-1, keepdim=True))
        return _side_by_side(products @ self.keys).to(g.dtype)


def _given_by_keys(
    secant: ScoreSecant, x: Float[Tensor, "*rows #batch key kv_width"]
) -> Float[Tensor, "*rows batch query width"]:
    """Return the heads' response to a change in their keys."""
    keys = _by_head(x, secant.kv_heads, secant.queries).repeat_interleave(secant.heads // secant.kv_heads, dim=-3)
    products = secant.weights.transpose(1, 2) * (secant.queries @ keys.mT)
    centres = products.sum(-1, keepdim=True) * secant.centres.transpose(1, 2)
    return _side_by_side(products @ secant.values - centres).to(x.dtype)


def _pulled_to_keys(
    secant: ScoreSecant, g: Float[Tensor, "*rows batch query width"]
) -> Float[Tensor, "*rows batch key kv_width"]:
    """Apply the adjoint of `_given_by_keys`."""
    heads = _by_head(g, secant.heads, secant.values)
    centres = (heads * secant.centres.transpose(1, 2)).sum(-1, keepdim=True)
    products = secant.weights.transpose(1, 2) * (heads @ secant.values.mT - centres)
    return _grouped(products.mT @ secant.queries, secant.kv_heads).to(g.dtype)


def _grouped(
    by_head: Float[Tensor, "*rows batch head key d_head"], kv_heads: int
) -> Float[Tensor, "*rows batch key kv_width"]:
    """Sum over the heads that share keys."""
    return _side_by_side(by_head.unflatten(-3, (kv_heads, -1)).sum(-3))


@final
@dataclass(frozen=True, eq=False, repr=False)
class KeyResponse(WithoutBias, MixingMap):
    """The heads' response to a change in their keys, through the pattern: ``[.., (kv d_head)] -> [.., (head d)]``."""

    secant: ScoreSecant

    def __repr__(self) -> str:
        return f"KeyResponse({self.secant.heads} heads)"

    @property
    def positions(self) -> int | None:
        return self.secant.weights.shape[-1]

    @property
    def components(self) -> int:
        return self.secant.heads

    def component(self, number: int) -> "KeyResponse":
        return KeyResponse(self.secant.of_head(number))

    def group_read_by(self, number: int) -> tuple[int, int]:
        return number * self.secant.kv_heads // self.secant.heads, self.secant.kv_heads

    def at(self, where: Where) -> "KeyResponse":
        where = shared(where)
        return KeyResponse(self.secant.between(where, where))

    def norm_bound(self) -> float:
        """The Frobenius norm, taken jointly over heads that share keys."""
        held = self.secant
        weights = held.weights.transpose(1, 2).double()
        lengths = held.queries.double().square().sum(-1, keepdim=True)
        distances = torch.cdist(held.centres.transpose(1, 2).double(), held.values.double()).square()
        squares = (weights.square() * lengths * distances).sum((-2, -1))
        return float(squares.unflatten(1, (held.kv_heads, -1)).sum(2).max().sqrt())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return _given_by_keys(self.secant, x)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return _pulled_to_keys(self.secant, g)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        if not isinstance(here, RowPositions):
            return self._pull_among(g, here, destination, reach, biases)
        held = self.secant
        rows = here.positions
        index = torch.arange(rows.shape[1], device=rows.device)
        weights = held.weights[index, rows][..., destination]  # [row, batch, head, key]
        queries = held.queries[index, :, rows]
        values = held.values[:, :, destination]
        heads = g[:, :, 0].unflatten(-1, (held.heads, -1)).to(values.dtype)
        products = (
            torch.einsum("rbhd,bhkd->rbhk", heads, values) - (heads * held.centres[index, rows]).sum(-1)[..., None]
        )
        return _grouped((weights * products)[..., None] * queries[..., None, :], held.kv_heads).to(g.dtype)


@final
@dataclass(frozen=True, eq=False, repr=False)
class CrossKeyResponse(WithoutBias, MixingMap):
    """The response of cross-attention heads in one segment to a change in their keys, read in another segment.

    Like `KeyResponse`, with weights that are not square: keys lie at `keys`, queries at `queries`, of `length`
    positions.
    """

    secant: ScoreSecant
    queries: tuple[int, int]
    keys: tuple[int, int]
    length: int

    def __repr__(self) -> str:
        _, query, heads, key = self.secant.weights.shape
        return f"CrossKeyResponse({heads} heads, {query} × {key})"

    @property
    def positions(self) -> int | None:
        return self.length

    @property
    def components(self) -> int:
        return self.secant.heads

    def component(self, number: int) -> "CrossKeyResponse":
        return replace(self, secant=self.secant.of_head(number))

    def group_read_by(self, number: int) -> tuple[int, int]:
        return number * self.secant.kv_heads // self.secant.heads, self.secant.kv_heads

    def at(self, where: Where) -> "CrossKeyResponse":
        cut = Cut.of(where, self.queries, self.keys, self.length)
        return CrossKeyResponse(self.secant.between(cut.of_queries, cut.of_keys), cut.queries, cut.keys, cut.length)

    def norm_bound(self) -> float:
        return KeyResponse(self.secant).norm_bound()

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        outputs = _given_by_keys(self.secant, x[..., slice(*self.keys), :])
        return widened(outputs, self.queries[0], self.length)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        keys = _pulled_to_keys(self.secant, g[..., slice(*self.queries), :])
        return widened(keys, self.keys[0], self.length)
