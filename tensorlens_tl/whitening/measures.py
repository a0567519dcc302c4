"""How white and how stationary is a sequence of vectors? (Whitened Self-Attention, Eqs. 10–14)

The paper measures both over a batch of sequences `[batch, pos, d]`, with the sample covariances of all pos·d numbers.

| measure | of what |
| --- | --- |
| `whiteness` Ψ (Eq. 12) | mean absolute covariance off the diagonal ÷ mean variance |
| the same of correlations | every number scaled to variance 1, as unequal variances make Ψ smaller |
| `stationarity` ρ (Eq. 14) | Σ_t ‖Λ_{t,t+1} − mean‖: how neighbours' covariance changes along the sequence |

None of them is zero for a finite sample of a perfectly white or stationary process, so each comes with what noise alone
gives: √(2/(π(B−1))) for Ψ of B sequences. For ρ the two halves of the batch are independent: the inner product of their
deviations has the expectation of the squared deviation, without the noise's own square; what is left of the noise
cancels over positions, where its roots are taken with their sign.

Numbers that are the same in all sequences (a first token that all prompts share) tell nothing, and are left out of Ψ.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.errors import InvalidInputError, NumericalError

if TYPE_CHECKING:
    Sequences = Float[Tensor, "batch pos d"]
    """Sequences of equal length."""
else:
    Sequences = Any  # what is wrong with them is said by the functions that measure

LEAST = 4
"""Sequences: two halves need two each."""
SAME = 1e-6
"""Numbers that vary by less than this share of their size are the same: what they vary by is rounding."""


class Whiteness(NamedTuple):
    """Ψ of covariances (the paper's) and of correlations, and what independent samples would give."""

    covariance: float
    correlation: float
    floor: float


class Stationarity(NamedTuple):
    """ρ, its share of Σ_t ‖Λ_{t,t+1}‖, and both with the noise of a finite batch taken off, as far as two halves tell.

    The last is NaN where the covariances themselves are no more than noise.
    """

    rho: float
    relative: float
    rho_without_noise: float
    relative_without_noise: float


@checked_names
def whiteness(x: Sequences, *, memory: Memory = None) -> Whiteness:
    """Ψ (Eq. 12): 0 for independent numbers of equal variance.

    >>> from tensorlens_tl.whitening import whiteness
    >>> same = torch.randn(100, 1, 4).expand(100, 8, 4)  # every position repeats the first
    >>> psi = whiteness(same + 0.1 * torch.randn(100, 8, 4))
    >>> psi.covariance > 2 * psi.floor  # far above what noise alone gives
    True

    Args:
        x: sequences of equal length, a tensor `[batch, pos, d]`.
        memory: what covariances may take at once, as ``"512MB"`` or bytes.

    Returns:
        Ψ of covariances and of correlations, and what noise alone gives.

    Raises:
        InvalidInputError: fewer than four sequences, fewer than two numbers each, or all sequences the same.
        NumericalError: values that are not finite.
    """
    centred = _centred(x, "whiteness").flatten(1)
    spread = centred.norm(dim=0)
    varies = spread > SAME * x.detach().double().flatten(1).norm(dim=0)
    centred = centred[:, varies]
    spread = spread[varies]
    floor = (2 / (torch.pi * (len(x) - 1))) ** 0.5
    return Whiteness(_off_diagonal(centred, memory), _off_diagonal(centred / spread, memory), floor)


@checked_names
def stationarity(x: Sequences) -> Stationarity:
    """ρ (Eq. 14): how far the covariances of neighbours are from their mean over positions, 0 for a stationary process.

    >>> from tensorlens_tl.whitening import stationarity
    >>> steps = torch.randn(200, 12, 2).cumsum(1)  # a random walk: its variance grows along the sequence
    >>> stationarity(steps).relative > 0.3
    True

    Args:
        x: sequences of equal length, a tensor `[batch, pos, d]`.

    Returns:
        ρ, ρ relative to the size of the covariances, and both without the noise of a finite batch.

    Raises:
        InvalidInputError: fewer than four sequences, or fewer than three positions.
        NumericalError: values that are not finite.
    """
    if isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] < 3:
        raise InvalidInputError(f"stationarity: {x.shape[1]} positions have one step at most; pass 3 or more.")
    whole = neighbours(_centred(x, "stationarity"))
    halves = [neighbours(_centred(half, "stationarity")) for half in (x[::2], x[1::2])]
    deviation = (whole - whole.mean(0)).flatten(1).norm(dim=1).sum()
    size = whole.flatten(1).norm(dim=1).sum().clamp_min(torch.finfo(whole.dtype).tiny)
    one, other = (half - half.mean(0) for half in halves)
    clean = _root((one * other).sum((1, 2)))
    clean_size = _root((halves[0] * halves[1]).sum((1, 2)))
    relative = torch.where(clean_size > 0.1 * size, clean / clean_size, torch.nan)
    return Stationarity(float(deviation), float(deviation / size), float(clean), float(relative))


def neighbours(centred: Float[Tensor, "batch pos d"]) -> Float[Tensor, "step d d"]:
    """Λ_{t,t+1} (Eq. 13), the covariance of every position with the next one."""
    return torch.einsum("bti,btj->tij", centred[:, :-1], centred[:, 1:]) / (len(centred) - 1)


def _root(squares: Float[Tensor, "step"]) -> Float[Tensor, ""]:
    """The sum of roots of estimated squares, of those below zero by noise with their sign; at least zero."""
    return (squares.abs().sqrt() * squares.sign()).sum().clamp_min(0)


def shape_or_type(x: object) -> str:
    """What was passed in place of sequences, for messages."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    return type(x).__name__


def _centred(x: Sequences, name: str) -> Float[Tensor, "batch pos d"]:
    """The sequences less their mean, in float64."""
    if not isinstance(x, Tensor) or x.ndim != 3 or len(x) < 2:
        raise InvalidInputError(
            f"{name}: pass a tensor [batch, pos, d] of {LEAST} sequences or more, got {shape_or_type(x)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise NumericalError("the sequences have values that are not finite.")
    wide = x.detach().double()
    return wide - wide.mean(0)


def _off_diagonal(centred: Float[Tensor, "batch n"], memory: Memory) -> float:
    """Mean absolute covariance off the diagonal ÷ mean variance."""
    batch, count = centred.shape
    if batch < LEAST or count < 2:
        raise InvalidInputError(
            f"whiteness: {batch} sequences with {count} numbers that vary between them; at least {LEAST} sequences, "
            "and 2 such numbers, are needed."
        )
    total = centred.new_zeros(())
    for rows in chunks(count, count * centred.element_size(), memory, "covariances"):
        total += (centred[:, rows.start : rows.stop].T @ centred).abs().sum()
    variance = centred.square().sum()
    return float((total - variance) / variance / (count - 1))
