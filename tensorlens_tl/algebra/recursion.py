"""Maps whose every position passes something on to the next: y_i = x_i + step(y_{i−1}).

`Recursion` takes the same matrix at every step, y_i = x_i + y_{i−1}·W, as whitened self-attention does (Eq. 9).
`DiagonalRecursion` takes a factor for each position and channel, y_i = x_i + a_i ⊙ y_{i−1}: the scan of state-space
layers with their gates held fixed. Both are linear and look back only; their adjoints are the same recursions from
the last position to the first.

Positions one after the other are many small products. A *chunked* scan takes chunks one position at a time, all chunks
at once, and then hands over what each chunk ends with; a *prefix* scan (Blelloch 1990) pairs neighbours, solves the
pairs, and fills in the places between. Both do the arithmetic twice, in far fewer steps. *Doubling* (Hillis & Steele
1986) does it log2(pos) times, in the fewest: best where vectors are few. `scan` takes what costs least.
"""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, MixingMap
from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.algebra.positions import Where, shared
from tensorlens_tl.algebra.primitives import largest_singular_value

CHUNK = 16
"""Positions of a chunk."""
STEP = 800_000
"""What a step costs besides its arithmetic, in multiplications and additions (measured on a CPU)."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Recursion(MixingMap):
    """``y_i = x_i + y_{i−1} @ weight``.

    Attributes:
        weight: the step.
        keep: True at positions that take part; the others (padding) neither give, receive, nor pass on. None for all.

    >>> from tensorlens_tl.algebra import Recursion
    >>> Recursion(0.5 * torch.eye(1))(torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    weight: Float[Tensor, "d d"]
    keep: Bool[Tensor, "batch pos"] | None = None

    @property
    def needs_positions(self) -> bool:
        return self.keep is None

    @property
    def positions(self) -> int | None:
        return maybe(_length, self.keep)

    def __repr__(self) -> str:
        padded = "" if self.keep is None else ", padded"
        return f"Recursion({len(self.weight)}{padded})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "Recursion":
        if self.keep is None:
            return self
        return replace(self, keep=self.keep[:, shared(where)])

    def norm_bound(self) -> float:
        """A bound of ``Σ_k ‖Wᵏ‖``, infinite where the powers do not shrink."""
        bound = 1.0
        power = self.weight.double()
        for _ in range(64):  # Σ_{k<2m} ‖Wᵏ‖ ≤ (1 + ‖Wᵐ‖) Σ_{k<m} ‖Wᵏ‖
            if not bool(power.abs().max() < 1e100):
                break
            size = largest_singular_value(power)
            bound *= 1 + size
            if size < 1e-12:
                return bound
            power = power @ power
        return float("inf")

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return scan_where(x, self.weight, self.keep)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return scan_where(g, self.weight.T, self.keep, backwards=True)


@final
@dataclass(frozen=True, eq=False, repr=False)
class DiagonalRecursion(MixingMap):
    """``y_i = x_i + factor_i ⊙ y_{i−1}``, channels and states side by side in the last axis of vectors.

    Attributes:
        factor: of every position, `[batch, pos, channel, state]`; the first position's multiplies nothing.

    >>> from tensorlens_tl.algebra import DiagonalRecursion
    >>> DiagonalRecursion(torch.full((1, 3, 1, 1), 0.5))(torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    factor: Float[Tensor, "batch pos channel state"]

    @property
    def positions(self) -> int | None:
        return self.factor.shape[1]

    def __repr__(self) -> str:
        return "DiagonalRecursion({} channels, {} states)".format(*self.factor.shape[-2:])

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "DiagonalRecursion":
        return DiagonalRecursion(self.factor[:, shared(where)])

    def norm_bound(self) -> float:
        """√(largest row sum · largest column sum) of the absolute kernel (Schur's test)."""
        sizes = self.factor.flatten(-2).abs().double()
        ones = torch.ones_like(sizes)
        rows = diagonal_scan(ones, sizes).max()
        columns = diagonal_scan(ones.flip(-2), passed_back(sizes)).max()
        return float((rows * columns).sqrt())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        factor = self.factor.flatten(-2)
        return diagonal_scan(x.expand(torch.broadcast_shapes(x.shape, factor.shape)), factor)  # a bias may come once

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return diagonal_scan(g.flip(-2), passed_back(self.factor.flatten(-2))).flip(-2)


def _length(keep: Bool[Tensor, "batch pos"]) -> int:
    return keep.shape[-1]


def passed_back(factor: Float[Tensor, "*any pos d"]) -> Float[Tensor, "*any pos d"]:
    """The factors of the adjoint's scan, which runs from the last position: each acts one step later."""
    back = factor.flip(-2)
    return torch.cat([torch.ones_like(back[..., :1, :]), back[..., :-1, :]], dim=-2)


def spectral_radius(weight: Float[Tensor, "d d"]) -> float:
    """The largest absolute eigenvalue: what a step makes of a vector's size, in the long run."""
    return float(torch.linalg.eigvals(weight.double()).abs().max())


# ------------------------------------------------------------------ scans


def scan(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """All ``y_i = x_i + y_{i−1} @ weight``; differentiable, also twice."""
    if x.numel() == 0:
        return x
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Scan.apply(x, weight)
    return fastest(x, weight)


def scan_where(
    x: Float[Tensor, "*rows pos d"],
    weight: Float[Tensor, "d d"],
    keep: Bool[Tensor, "batch length"] | None,
    *,
    backwards: bool = False,
) -> Float[Tensor, "..."]:
    """The scan of the positions to keep, as if the others were not there; these give zero.

    Args:
        x, weight: as for `scan`.
        keep: True where a position takes part, or None for all.
        backwards: from the last position to the first.
    """
    order = None
    if keep is not None:
        x = x.masked_fill(~keep[..., None], 0)  # what padding holds need not be finite
        if _has_gaps(keep):  # the neighbours of a gap move together
            order = keep.long().argsort(dim=-1, descending=True, stable=True)[..., None]
            x = torch.take_along_dim(x, order.expand(*x.shape[-3:-1], 1), dim=-2)
    y = scan(x.flip(-2), weight).flip(-2) if backwards else scan(x, weight)
    if keep is None:
        return y
    if order is not None:
        y = torch.take_along_dim(y, order.argsort(dim=-2), dim=-2)
    return y.masked_fill(~keep[..., None], 0)


def _has_gaps(keep: Bool[Tensor, "batch length"]) -> bool:
    """Whether any row has a position left out between two that are kept."""
    starts = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
    return bool((starts > 1).any())


def diagonal_scan(x: Float[Tensor, "*rows pos d"], factor: Float[Tensor, "*any pos d"]) -> Float[Tensor, "*rows pos d"]:
    """All ``y_i = x_i + factor_i ⊙ y_{i−1}``, by a prefix scan; differentiable by autograd."""
    pos = x.shape[-2]
    if pos == 1:
        return x
    even, odd = x[..., 0::2, :], x[..., 1::2, :]
    at_even, at_odd = factor[..., 0::2, :], factor[..., 1::2, :]
    both = at_odd * at_even[..., : at_odd.shape[-2], :]
    pairs = diagonal_scan(odd + at_odd * even[..., : odd.shape[-2], :], both)
    rest = even[..., 1:, :] + at_even[..., 1:, :] * pairs[..., : even.shape[-2] - 1, :]
    return _interleaved(torch.cat([even[..., :1, :], rest], dim=-2), pairs)


class _Scan(torch.autograd.Function):
    """The adjoint written out: the same scan backwards, and one product for the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return fastest(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, weight = ctx.saved_tensors
        h = scan(g.flip(-2), weight.mT).flip(-2)
        if not ctx.needs_input_grad[1]:
            return h, None
        width = y.shape[-1]
        return h, y[..., :-1, :].reshape(-1, width).mT @ h[..., 1:, :].reshape(-1, width)


def fastest(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """The scan that costs least for so many rows and positions: by steps, products of vectors, and powers of W."""
    pos, width = x.shape[-2:]
    vectors = 2 * x[..., 0].numel() * width**2
    power = 2 * width**3
    rounds = max(1, (pos - 1).bit_length())
    costs = {
        sequential: pos * STEP + vectors,
        chunked: (CHUNK + pos / CHUNK) * STEP + 2 * vectors + CHUNK * power,
        prefix: rounds * (4 * STEP + power) + 2 * vectors,
        doubling: rounds * (2 * STEP + power + vectors),
    }
    return min(costs, key=lambda way: costs[way])(x, weight)


def sequential(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """One position after the other."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y[..., 0, :] = x[..., 0, :]
    for position in range(1, x.shape[-2]):
        y[..., position, :] = x[..., position, :] + y[..., position - 1, :] @ weight
    return y


def chunked(
    x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"], size: int = CHUNK
) -> Float[Tensor, "*rows pos d"]:
    """Chunks one position after the other, all at once; then what each chunk hands on to the next."""
    pos, width = x.shape[-2:]
    chunks = -(-pos // size)
    padded = torch.nn.functional.pad(x, (0, 0, 0, chunks * size - pos)).unflatten(-2, (chunks, size))
    inside = sequential(padded, weight)
    powers = [weight]
    for _ in range(size - 1):
        powers.append(powers[-1] @ weight)
    ends = fastest(inside[..., -1, :], powers[-1])
    handed = torch.cat(powers, dim=1)  # what a chunk's start receives is multiplied by W, W², … inside it
    carried = (ends[..., :-1, :] @ handed).unflatten(-1, (size, width))
    inside[..., 1:, :, :] += carried
    return inside.reshape(*x.shape[:-2], -1, width)[..., :pos, :]


def prefix(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """Pairs of neighbours first, then the places between them: 2·log2(pos) rounds (Blelloch 1990)."""
    if x.shape[-2] == 1:
        return x
    even, odd = x[..., 0::2, :], x[..., 1::2, :]
    pairs = prefix(odd + even[..., : odd.shape[-2], :] @ weight, weight @ weight)
    rest = even[..., 1:, :] + pairs[..., : even.shape[-2] - 1, :] @ weight
    return _interleaved(torch.cat([even[..., :1, :], rest], dim=-2), pairs)


def doubling(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """What comes from one position before, then from two, four, … before: log2(pos) rounds (Hillis & Steele 1986)."""
    y = x
    reach = 1
    while reach < x.shape[-2]:
        if reach > 1:
            weight = weight @ weight
        y = torch.cat([y[..., :reach, :], y[..., reach:, :] + y[..., :-reach, :] @ weight], dim=-2)
        reach *= 2
    return y


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Two sequences, one position of each in turn; the second may be one shorter."""
    pos = even.shape[-2] + odd.shape[-2]
    if odd.shape[-2] < even.shape[-2]:
        odd = torch.nn.functional.pad(odd, (0, 0, 0, 1))
    return torch.stack([even, odd], dim=-2).reshape(*even.shape[:-2], -1, even.shape[-1])[..., :pos, :]
