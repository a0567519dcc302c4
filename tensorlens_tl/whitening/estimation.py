"""The first-order whitening filter of a process, from its covariances (Whitened Self-Attention, Eqs. 5–9).

A stationary process whose covariance reaches one position far has the block-tridiagonal covariance (6), with Λ_0 on the
diagonal and C = E[x_i x_{i−1}ᵀ] beside it. The blocks of its Cholesky factor settle:

    L Lᵀ = Λ_0 − C (L Lᵀ)⁻¹ Cᵀ,    M = C L⁻ᵀ

and ``w_i = L⁻¹(x_i − M w_{i−1})`` (Eq. 9) is white, but for the first positions, where the factor has not settled yet.
Real sequences are correlated farther than that: then no such factor need exist, and the filter is the nearest model's.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import scan, spectral_radius
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.whitening.measures import Sequences, shape_or_type

STEPS = 10_000

if TYPE_CHECKING:
    Reach = float | Literal["auto"]
    """A factor of the covariance of neighbours, or the choice of one."""
    Number = float
else:
    Reach = Number = Any  # `estimate` says what is wrong with them


@dataclass(frozen=True, eq=False)
class WhiteningFilter:
    """``w_i = L⁻¹(x_i − M w_{i−1})`` (Eq. 9).

    Attributes:
        L_inv, M: its matrices, acting on column vectors as in the paper.
        mean: what is taken off every vector first.
        reach: the share of the neighbours' covariance that it was made for.
    """

    L_inv: Float[Tensor, "d d"]
    M: Float[Tensor, "d d"]
    mean: Float[Tensor, "d"]
    reach: float = 1.0

    def __repr__(self) -> str:
        return f"WhiteningFilter(d={len(self.mean)}, radius={self.radius:.3g}, reach={self.reach:g})"

    @property
    def radius(self) -> float:
        """The spectral radius of L⁻¹M: what is left of a vector one position later, in the long run."""
        return spectral_radius(self.L_inv @ self.M)

    def __call__(self, x: Float[Tensor, "*rows pos d"]) -> Float[Tensor, "*rows pos d"]:
        """The whitened sequences.

        Raises:
            InvalidInputError: vectors of another width.
        """
        if x.shape[-1] != len(self.mean):
            raise InvalidInputError(f"this filter is for vectors of {len(self.mean)} numbers, got {tuple(x.shape)}.")
        L_inv = self.L_inv.to(x)
        M = self.M.to(x)
        return scan((x - self.mean.to(x)) @ L_inv.T, -(L_inv @ M).T)


@checked_names
def estimate(x: Sequences, *, reach: Reach = 1.0, ridge: Number = 1e-6) -> WhiteningFilter:
    """The filter of a process, from sequences of it.

    >>> from tensorlens_tl.whitening import estimate
    >>> noise = torch.randn(2000, 9, 1, generator=torch.Generator().manual_seed(0))
    >>> filter = estimate(noise[:, 1:] + 0.5 * noise[:, :-1])  # x_i = e_i + e_{i−1}/2, so L = 1 and M = 1/2
    >>> round(filter.radius, 1)
    0.5

    Args:
        x: sequences of equal length, a tensor `[batch, pos, d]`; means and covariances are taken over all positions,
            as of a stationary process.
        reach: a factor of the neighbours' covariance C, at most 1: less than 1 where no factor exists otherwise.
            ``"auto"`` takes 1 where that has a factor, else 0.1 less than the largest of 0.95, 0.9, … that has one:
            at the edge a filter is nearly singular, and makes things worse.
        ridge: a share of the mean variance that is added to every variance.

    Returns:
        The filter, in float64, for vectors of d numbers.

    Raises:
        InvalidInputError: fewer than two positions, or numbers out of range; no factor exists (says what to try).
        NumericalError: values that are not finite.
    """
    _check_sequences(x)
    if reach != "auto":
        _check_share("reach", reach, 1.0)
    _check_share("ridge", ridge, float("inf"))
    wide = x.detach().double()
    mean = wide.mean((0, 1))
    centred = wide - mean
    batch, pos, _ = x.shape
    here = torch.einsum("bti,btj->ij", centred, centred) / (batch * pos)
    here += ridge * here.diagonal().mean() * torch.eye(len(here), dtype=here.dtype, device=here.device)
    before = torch.einsum("bti,btj->ij", centred[:, 1:], centred[:, :-1]) / (batch * (pos - 1))
    share = _safe_reach(here, before) if reach == "auto" else reach
    L = None if share is None else _steady_factor(here, share * before)
    if share is None or L is None:
        raise InvalidInputError(
            "estimate: a process with these covariances reaches farther than one position, and has no first-order "
            "filter. Pass a smaller reach=, which shrinks what neighbours have in common, or reach='auto'."
        )
    L_inv = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    return WhiteningFilter(L_inv, share * before @ L_inv.T, mean, float(share))


def _check_sequences(x: object) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] < 2:
        raise InvalidInputError(
            f"estimate: pass a tensor [batch, pos, d] of 2 positions or more, got {shape_or_type(x)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise NumericalError("estimate: the sequences have values that are not finite.")


def _check_share(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidInputError(f"{name}={value!r}: pass a number from 0 to {most:g}.")


def _safe_reach(here: Float[Tensor, "d d"], before: Float[Tensor, "d d"]) -> float | None:
    """A share of the neighbours' covariance for which a factor exists, with a margin."""
    exists = [step for step in range(20, 0, -1) if _steady_factor(here, step / 20 * before) is not None]
    if not exists:
        return None
    largest = exists[0]
    if largest == 20:
        return 1.0
    return max(largest - 2, 1) / 20


def _steady_factor(here: Float[Tensor, "d d"], before: Float[Tensor, "d d"]) -> Float[Tensor, "d d"] | None:
    """L at its steady state; None where the covariances have no such factor."""
    squared = here
    for _ in range(STEPS):
        factor, failed = torch.linalg.cholesky_ex(squared)
        if int(failed):
            return None
        following = here - before @ torch.cholesky_solve(before.T, factor)
        settled = float((following - squared).norm()) <= 1e-13 * float(squared.norm())
        squared = following
        if settled:
            break
    factor, failed = torch.linalg.cholesky_ex(squared)
    if int(failed):
        return None
    return factor
