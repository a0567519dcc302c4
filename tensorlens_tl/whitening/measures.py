"""How white and how stationary is a sequence of vectors? (Whitened Self-Attention, Eqs. 10–14)

The paper measures both over a batch of sequences `[batch, pos, d]`, with the sample covariances of all pos·d numbers.

| measure | of what |
| --- | --- |
| `whiteness` Ψ (Eq. 12) | mean absolute covariance off the diagonal ÷ mean variance |
| the same of correlations | every number scaled to variance 1, as unequal variances make Ψ smaller |
| `stationarity` ρ (Eq. 14) | Σ_t ‖Λ_{t,t+1} − mean‖: how neighbours' covariance changes along the sequence |

None of them is zero for a finite sample of a perfectly white or stationary process, so each comes with what noise alone
gives: √(2/(π(B−1))) for Ψ of B sequences. For ρ the two halves of the batch are independent: the inner product of their
deviations has the expectation of the squared deviation, free of noise.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.errors import InvalidInputError, NumericalError

LEAST = 4
"""Sequences: two halves need two each."""


class Whiteness(NamedTuple):
    """Ψ of covariances (the paper's) and of correlations, and what independent samples would give."""

    covariance: float
    correlation: float
    floor: float


class Stationarity(NamedTuple):
    """ρ, its share of Σ_t ‖Λ_{t,t+1}‖, and both without the noise of a finite batch."""

    rho: float
    relative: float
    rho_without_noise: float
    relative_without_noise: float


def whiteness(x: Float[Tensor, "batch pos d"], *, memory: Memory = None) -> Whiteness:
    """Ψ (Eq. 12): 0 for independent numbers of equal variance.

    Args:
        x: sequences of equal length.
        memory: what covariances may take at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: fewer than four sequences, fewer than two numbers each, or all sequences the same.
        NumericalError: values that are not finite.
    """
    centred = _centred(x).flatten(1)
    spread = centred.norm(dim=0)
    scaled = centred / spread.clamp_min(torch.finfo(centred.dtype).tiny)
    floor = (2 / (torch.pi * (len(x) - 1))) ** 0.5
    return Whiteness(_off_diagonal(centred, memory), _off_diagonal(scaled[:, spread > 0], memory), floor)


def stationarity(x: Float[Tensor, "batch pos d"]) -> Stationarity:
    """ρ (Eq. 14): how far the covariances of neighbours are from their mean over positions, 0 for a stationary process.

    Args:
        x: sequences of equal length.

    Raises:
        InvalidInputError: fewer than four sequences, or fewer than three positions.
        NumericalError: values that are not finite.
    """
    if x.ndim == 3 and x.shape[1] < 3:
        raise InvalidInputError(f"stationarity: {x.shape[1]} positions have one step at most; pass 3 or more.")
    whole = neighbours(_centred(x))
    halves = [neighbours(_centred(half)) for half in (x[::2], x[1::2])]
    deviation = (whole - whole.mean(0)).flatten(1).norm(dim=1).sum()
    size = whole.flatten(1).norm(dim=1).sum().clamp_min(torch.finfo(whole.dtype).tiny)
    one, other = (half - half.mean(0) for half in halves)
    clean = _root((one * other).sum((1, 2)))
    clean_size = _root((halves[0] * halves[1]).sum((1, 2))).clamp_min(torch.finfo(whole.dtype).tiny)
    return Stationarity(float(deviation), float(deviation / size), float(clean), float(clean / clean_size))


def neighbours(centred: Float[Tensor, "batch pos d"]) -> Float[Tensor, "step d d"]:
    """Λ_{t,t+1} (Eq. 13), the covariance of every position with the next one."""
    return torch.einsum("bti,btj->tij", centred[:, :-1], centred[:, 1:]) / (len(centred) - 1)


def _root(squares: Float[Tensor, "step"]) -> Float[Tensor, ""]:
    """The sum of roots of estimated squares, those below zero by noise counting as zero."""
    return squares.clamp_min(0).sqrt().sum()


def _centred(x: Tensor) -> Float[Tensor, "batch pos d"]:
    """Less the mean over sequences, in float64."""
    if x.ndim != 3 or len(x) < 2:
        raise InvalidInputError(f"pass sequences [batch, pos, d], {LEAST} or more of them, got {tuple(x.shape)}.")
    if not bool(torch.isfinite(x).all()):
        raise NumericalError("the sequences have values that are not finite.")
    wide = x.detach().double()
    return wide - wide.mean(0)


def _off_diagonal(centred: Float[Tensor, "batch n"], memory: Memory) -> float:
    """Mean absolute covariance off the diagonal ÷ mean variance."""
    batch, count = centred.shape
    if batch < LEAST or count < 2:
        raise InvalidInputError(
            f"whiteness: {batch} sequences of {count} numbers that vary; pass {LEAST} of 2 or more."
        )
    total = centred.new_zeros(())
    for rows in chunks(count, count * centred.element_size(), memory, "covariances"):
        total += (centred[:, rows.start : rows.stop].T @ centred).abs().sum()
    variance = centred.square().sum()
    return float((total - variance) / variance / (count - 1))
