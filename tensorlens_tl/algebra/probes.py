"""Norms of the tensor's blocks from random rows, with their standard error.

For a random row r with E rᵀr = 1, E‖r·T‖² = ‖T‖²_F. Gaussian rows are independent. Orthonormal ones, a random frame of
k directions stretched by √d, are unbiased too; d of them give the norm exactly, so the variance of their mean carries
the finite-population factor (d − k)/d. The norm is the root of the mean; to first order se(‖·‖) = se(‖·‖²) / (2‖·‖).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError

ROWS = ("gaussian", "orthonormal")

FIRST = 16
"""Rows that an estimate to a tolerance begins with; each further round takes half as many again as there are."""

NEGLIGIBLE = 0.01
"""Pairs below this share of their query's largest norm need not reach the tolerance."""


def check_probes(probes: Any, tol: Any, rows: Any) -> None:
    """Raise `InvalidInputError` for what makes no estimate."""
    if rows not in ROWS:
        raise InvalidInputError(f"rows={rows!r}; use one of {', '.join(ROWS)}.")
    if probes is not None and tol is not None:
        raise InvalidInputError("norm: pass either probes= (how many) or tol= (how exact), not both.")
    if probes is not None and (isinstance(probes, bool) or not isinstance(probes, int) or probes < 2):
        raise InvalidInputError(f"probes={probes!r}: a standard error needs at least 2.")
    if tol is not None and not (isinstance(tol, (int, float)) and tol > 0):
        raise InvalidInputError(f"tol={tol!r}: the relative standard error to reach, such as 0.05.")


def probed(
    squares: Callable[[Tensor], Tensor],
    shape: tuple[int, int],
    generator: torch.Generator,
    *,
    probes: int | None,
    tol: float | None,
    rows: str,
) -> tuple[Tensor, Tensor, int] | None:
    """Norms for one query from random rows.

    Args:
        squares: vectors `[row, batch, d]` -> ‖vector·T_ij‖², `[row, batch, key]`.
        shape: batch and d.
        generator: of the rows.
        probes: how many, or
        tol: until this relative standard error is reached.
        rows: one of `ROWS`.

    Returns:
        Norm and standard error, `[batch, key]` each, and the rows taken; None if `tol` needs d rows or more.
    """
    batch, width = shape
    frame = _frame(batch, width, probes or width, generator) if rows == "orthonormal" else None
    samples: list[Tensor] = []
    taken, wanted = 0, probes or FIRST
    while tol is None or wanted < width:
        if frame is not None:
            vectors = frame[taken:wanted]
        else:
            vectors = torch.randn(wanted - taken, batch, width, generator=generator, dtype=torch.float32)
        samples.append(squares(vectors))
        taken = wanted
        norm, stderr = _estimate(torch.cat(samples), width if frame is not None else None)
        relevant = norm > NEGLIGIBLE * norm.amax(-1, keepdim=True)
        if tol is None or not bool((stderr > tol * norm)[relevant].any()):
            return norm, stderr, taken
        wanted += -(-taken // 2)
    return None


def _frame(batch: int, width: int, rows: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal rows times √width, one frame per prompt, `[row, batch, width]`."""
    gaussian = torch.randn(batch, width, rows, generator=generator, dtype=torch.float64)
    Q, R = torch.linalg.qr(gaussian)
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # without it the frame is not uniform
    return (width**0.5 * Q).permute(2, 0, 1).float()


def _estimate(samples: Tensor, width: int | None) -> tuple[Tensor, Tensor]:
    """Root of the mean and its standard error by the delta method; `width` where the rows are a frame of so many."""
    count = len(samples)
    norm = samples.mean(0).sqrt()
    error = samples.std(0) / count**0.5
    if width is not None:
        error = error * ((width - count) / width) ** 0.5
    return norm, error / (2 * norm).clamp_min(torch.finfo(norm.dtype).tiny)
