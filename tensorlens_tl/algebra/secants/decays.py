"""Secants of attention without a softmax, whose patterns decay: M_ij = exp(ℓ_{j+1} + … + ℓ_i)·⟨q_i, k_j⟩ for j ≤ i.

Mamba 2 and the gated delta rule mix positions by such patterns, with ℓ the logarithm of a head's decay at a position.
For two runs, δ their difference and bars their means,

    δ(M·v)_i = Σ_j M̄_ij·δv_j + Σ_j Γ̄_ij·δ⟨q_i, k_j⟩·v̄_j + Σ_j mean(⟨q_i, k_j⟩)·L_ij·(δℓ_{j+1} + … + δℓ_i)·v̄_j

where Γ is the exponential and L the logarithmic mean of its two values. Values go through attention with the mean
pattern, queries and keys through the responses of a `ScoreSecant` whose centres are zero, and decays through
`DecayResponse`. As a softmax's secant, it holds a number for each pair of positions and head.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl.algebra.held_scores import grouped_products
from tensorlens_tl.algebra.maps import ZERO, AffineMap, Chain, MixingMap
from tensorlens_tl.algebra.positions import Where, shared
from tensorlens_tl.algebra.secants.attention import KeyResponse, QueryResponse, ScoreSecant
from tensorlens_tl.algebra.secants.change import Change
from tensorlens_tl.algebra.secants.numbers import logarithmic_mean


@final
@dataclass(frozen=True, eq=False, repr=False)
class DecayResponse(MixingMap):
    """What heads give for a change of the logarithms of their decays: ``[.., head] -> [.., (head d)]``.

    ``Δz_i = Σ_j weights_ij · (Δℓ_{j+1} + … + Δℓ_i) · v̄_j``.

    Attributes:
        weights: zero where a key is not before the query. Queries may be the last ones alone: keys before them wait for
            what decays since, but nothing decays before.
        values: the mean of the two runs' values.

    >>> from tensorlens_tl.algebra.secants import DecayResponse
    >>> weights = torch.ones(1, 1, 3, 3).tril(-1)
    >>> DecayResponse(weights, torch.ones(1, 1, 3, 1))(torch.tensor([[[9.0], [1.0], [2.0]]])).flatten()
    tensor([0., 1., 5.])
    """

    weights: Float[Tensor, "batch head query key"]
    values: Float[Tensor, "batch head key d_value"]

    def __repr__(self) -> str:
        return f"DecayResponse({self.weights.shape[1]} heads)"

    @property
    def positions(self) -> int | None:
        return self.weights.shape[-2]

    @property
    def earlier(self) -> int:
        """How many keys are before the first query."""
        return self.weights.shape[-1] - self.weights.shape[-2]

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "DecayResponse":
        where = shared(where)
        if not isinstance(where, slice):
            raise TypeError("decays are cut to neighbouring positions; use a slice.")
        begin, end, _ = where.indices(self.weights.shape[-2])
        stop = self.earlier + end
        return DecayResponse(self.weights[:, :, begin:end, :stop], self.values[:, :, :stop])

    def norm_bound(self) -> float:
        """√(largest row sum · largest column sum) of the same map without signs (Schur's test)."""
        alike = DecayResponse(self.weights.double().abs(), self.values.double().abs())
        batch, heads, pos, _ = self.weights.shape
        ones = alike.values.new_ones(batch, pos, heads * self.values.shape[-1])
        rows = alike.push(ones[..., :heads]).max()
        return float((rows * alike.pull(ones).max()).clamp_min(0).sqrt())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, self.weights.dtype))
        passed = x.expand(*x.shape[:-2], self.weights.shape[-2], x.shape[-1]).cumsum(-2).mT[..., None]
        before = pad(passed, (0, 0, self.earlier, 0))
        z = passed * (self.weights @ self.values) - self.weights @ (before * self.values)
        return z.transpose(-3, -2).flatten(-2).to(dtype)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        heads = g.unflatten(-1, (self.weights.shape[1], -1)).transpose(-3, -2)
        heads = heads.to(torch.promote_types(g.dtype, self.weights.dtype))
        by_query = (heads * (self.weights @ self.values)).sum(-1)
        by_key = ((self.weights.mT @ heads) * self.values).sum(-1)[..., self.earlier :]
        return (by_query - by_key).mT.flip(-2).cumsum(-2).flip(-2).to(g.dtype)


@dataclass(frozen=True, eq=False)
class DecayedProducts:
    """The pattern of heads that decays, in two runs, and what it changes by.

    Attributes:
        queries: of every head, side by side.
        keys: likewise; each head of them serves as many consecutive heads of queries.
        log_decays: of every head.
        a, b: the pattern in either run.
        mean_decays: Γ̄.
        by_decays: what weighs a change of decays.
    """

    queries: Change
    keys: Change
    log_decays: Change
    a: Float[Tensor, "batch head query key"]
    b: Float[Tensor, "batch head query key"]
    mean_decays: Float[Tensor, "batch head query key"]
    by_decays: Float[Tensor, "batch head query key"]
    kv_heads: int

    @classmethod
    def of(
        cls, queries: Change, keys: Change, log_decays: Change, kv_heads: int, itself: bool = True
    ) -> "DecayedProducts":
        """From what the pattern is made of.

        Args:
            queries, keys, log_decays: as the attributes.
            kv_heads: how many heads the keys have.
            itself: whether a position attends to itself.
        """
        heads = log_decays.a.shape[-1]
        logs = [_passed(decays, itself) for decays in (log_decays.a, log_decays.b)]
        products = [
            grouped_products(_by_head(q, heads), _by_head(k, kv_heads))
            for q, k in ((queries.a, keys.a), (queries.b, keys.b))
        ]
        decays = [passed.exp() for passed in logs]
        mean_decays = (decays[0] + decays[1]) / 2
        by_decays = (logarithmic_mean(logs[0], logs[1]) * (products[0] + products[1]) / 2).tril(-1)
        patterns = (decays[0] * products[0], decays[1] * products[1])
        return cls(queries, keys, log_decays, *patterns, mean_decays, by_decays, kv_heads)

    @property
    def mean(self) -> Float[Tensor, "batch head query key"]:
        """M̄, between both runs."""
        return (self.a + self.b) / 2

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.a.shape[1]

    def responses(self, values: Float[Tensor, "batch head pos d_value"]) -> tuple[AffineMap, ...]:
        """How what heads give changes with queries, keys and decays, at the means of the two runs' values."""
        queries = _by_head(self.queries.mean, self.heads)
        keys = _by_head(self.keys.mean, self.kv_heads).repeat_interleave(self.heads // self.kv_heads, dim=1)
        centres = torch.zeros_like(values.transpose(1, 2))
        weights = self.mean_decays.transpose(1, 2)
        secant = ScoreSecant(weights, centres, queries, keys, values, self.kv_heads)
        return (
            Chain((*self.queries.stages, QueryResponse.of(secant))),
            Chain((*self.keys.stages, KeyResponse(secant))),
            Chain((*self.log_decays.stages, DecayResponse(self.by_decays, values))),
        )


def _by_head(x: Float[Tensor, "batch pos width"], heads: int) -> Float[Tensor, "batch head pos d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _passed(log_decays: Float[Tensor, "batch pos head"], itself: bool) -> Float[Tensor, "batch head query key"]:
    """ln Γ, −inf where a key is later than the query, or is the query and counts not; sums are taken in float64."""
    passed = log_decays.double().cumsum(1).transpose(1, 2)
    between = (passed[..., None] - passed[..., None, :]).to(log_decays)
    allowed = torch.ones_like(between[0, 0], dtype=torch.bool).tril(0 if itself else -1)
    return between.masked_fill(~allowed, -torch.inf)
