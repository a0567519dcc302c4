"""Norms of the tensor's blocks from random rows, with their standard error.

For a random row r with E rᵀr = 1, s = ‖r·T‖² has mean ‖T‖²_F. Gaussian rows are independent. Orthonormal rows, a random
frame of k directions scaled by √d, are unbiased too; d of them give the norm exactly.

With A = TTᵀ, Var s = 2 tr A² for Gaussian rows: the mean of k samples approximately follows a χ² distribution with k·ν
degrees of freedom, where ν = (tr A)² / tr A² is the tensor's effective rank (Satterthwaite 1946). It is estimated from
inner products of different pulled rows: E (r₁A r₂ᵀ)² = tr A², and E s₁s₂ = (tr A)². This detects exactly a tensor of
rank one, whose samples scatter most and say least about their own scatter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, real_number, whole_number
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError

ROWS = ("gaussian", "orthonormal")

FIRST = 16
"""Initial number of rows of an estimate to a tolerance; each further round adds half as many again."""

CAUTION = 3
"""Intervals widen the relative spread by this number divided by the number of stored rows. Measured; see the tests."""

STORED = 64
"""Maximal number of rows whose pairwise products are computed."""

NEGLIGIBLE = 0.01
"""Pairs below this share of their query's largest norm need not reach the tolerance."""


def check_probes(probes: Any, tol: Any, rows: Any) -> tuple[int | None, float | None]:
    """Return the first two as Python's numbers; raise `InvalidInputError` for arguments that define no estimate."""
    check_choice("rows", rows, ROWS)
    if probes is not None and tol is not None:
        raise InvalidInputError("norm: pass either probes= (the number of rows) or tol= (the accuracy), not both.")
    if probes is not None:
        probes = whole_number("probes", probes, 2, why="for a standard error")
    if tol is not None:
        tol = real_number("tol", tol, lambda x: x > 0, "pass the relative standard error to reach, such as 0.05")
    return probes, tol


class Estimate(NamedTuple):
    """Estimated norms from random rows, each `[batch, key]`.

    Attributes:
        norm: the root of the mean square.
        stderr: its standard error.
        freedom: degrees of freedom of the mean square, for intervals.
        rows: the number of rows used.
    """

    norm: Tensor
    stderr: Tensor
    freedom: Tensor
    rows: int


def probed(
    pull: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    shape: tuple[int, int],
    generator: torch.Generator,
    *,
    probes: int | None,
    tol: float | None,
    rows: str,
    stored: int,
) -> Estimate | None:
    """Estimate the norms for one query from random rows.

    Args:
        pull: takes vectors `[row, batch, d]` and a number n; returns ‖vector·T_ij‖², `[row, batch, key]`, and
            vector·T_ij of the first n vectors, `[row, batch, key, d]`.
        shape: batch and d.
        generator: draws the rows.
        probes: the number of rows; None to use `tol`.
        tol: the relative standard error to reach.
        rows: one of `ROWS`.
        stored: the number of rows whose pairwise products are computed.

    Returns:
        The estimate; None if `tol` needs d rows or more.
    """
    batch, width = shape
    frame: Tensor | None = None
    frame_width: int | None = None
    if rows == "orthonormal":
        frame = _frame(batch, width, probes or width, generator)
        frame_width = width
    samples: list[Tensor] = []
    pulled: list[Tensor] = []
    taken = 0
    wanted = probes or FIRST
    while tol is None or wanted < width:
        if frame is not None:
            vectors = frame[taken:wanted]
        else:
            vectors = torch.randn(wanted - taken, batch, width, generator=generator, dtype=torch.float32)
        squares, first = pull(vectors, min(max(0, stored - taken), len(vectors)))
        samples.append(squares)
        pulled.append(first)
        taken = wanted
        estimate = _estimate(torch.cat(samples), torch.cat(pulled), frame_width)
        relevant = estimate.norm > NEGLIGIBLE * estimate.norm.amax(-1, keepdim=True)
        if tol is None or not bool((estimate.stderr > tol * estimate.norm)[relevant].any()):
            return estimate
        wanted += -(-taken // 2)
    return None


def stored_rows(bytes_per_row: int, memory: Memory) -> tuple[int, Memory]:
    """Return the number of pulled rows that an estimate may store, at least two, and the remaining memory."""
    bound = in_bytes(memory)
    stored = max(2, min(STORED, bound // (4 * max(1, bytes_per_row))))
    if memory is None:
        return stored, None
    return stored, max(1, bound - 2 * stored * bytes_per_row)


def _frame(batch: int, width: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return random orthonormal rows times √width, one frame per prompt, `[row, batch, width]`."""
    gaussian = torch.randn(batch, width, rows, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(gaussian)
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # without it the frame is not uniform
    return (width**0.5 * Q).permute(2, 0, 1).float()


def _estimate(samples: Tensor, pulled: Tensor, width: int | None) -> Estimate:
    """Estimate from the squares of all rows and the first few rows; `width` is given if the rows form a frame."""
    count = len(samples)
    tiny = torch.finfo(samples.dtype).tiny
    norm = samples.mean(0).sqrt()
    spread = _inverse_rank(pulled, width)
    # a few products say little, and underestimating the spread gives intervals that miss; 1 means rank one
    cautious = (spread * (1 + CAUTION / len(pulled))).clamp(max=1.0)
    variance, wide = (_relative_variance(inverse, count, width) for inverse in (spread, cautious))
    return Estimate(norm, norm * variance.sqrt() / 2, 2 / wide.clamp_min(tiny), count)


def _inverse_rank(pulled: Float[Tensor, "row batch key d"], width: int | None) -> Float[Tensor, "batch key"]:
    """Return tr A² / (tr A)², the inverse of the effective rank, from the pairwise products of rows."""
    products = torch.einsum("ibkd,jbkd->ijbk", pulled, pulled).double()
    squares = products.diagonal().permute(2, 0, 1)
    pairs = torch.triu_indices(len(pulled), len(pulled), 1, device=pulled.device).unbind(0)
    both = (squares[pairs[0]] * squares[pairs[1]]).sum(0)
    ratio = products[pairs].square().sum(0) / both.clamp_min(torch.finfo(both.dtype).tiny)
    if width is not None:  # rows of a frame are orthogonal, which makes both smaller
        ratio = ((width + 1) * ratio + 1) / (width + 2 * ratio)
    return ratio.clamp(max=1.0)


def _relative_variance(inverse_rank: Tensor, count: int, width: int | None) -> Tensor:
    """Return Var / mean² of the mean square of `count` rows."""
    if width is None:
        return 2 * inverse_rank / count
    of_one = 2 * (width * inverse_rank - 1).clamp_min(0) / (width + 2)
    return of_one / count * (width - count) / (width - 1)


def chi_square_quantile(freedom: Float[Tensor, "..."], level: float) -> Float[Tensor, "..."]:
    """Return the χ² quantile for any positive degrees of freedom, by bisecting the incomplete gamma function."""
    half = freedom.double() / 2
    low, high = torch.zeros_like(half), half + 20 * (half.sqrt() + 1)
    for _ in range(200):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + high
