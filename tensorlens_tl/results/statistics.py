"""Uncertainty of means over prompts: bootstrap intervals and paired tests."""

import torch
from jaxtyping import Float
from torch import Tensor

RESAMPLES = 2000


def bootstrap_interval(
    values: Float[Tensor, "... unit"], level: float = 0.95, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Percentile bootstrap interval of the mean over units (prompts, splits); the same resamples for every row.

    Missing values (NaN) are left out of each resample's mean.

    Returns:
        Lower and upper ends; NaN where fewer than two values are known, which say nothing of how they scatter.
    """
    units = values.shape[-1]
    draws = torch.randint(units, (resamples, units), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(resamples, units, dtype=torch.float64).scatter_add_(
        1, draws, torch.ones(resamples, units, dtype=torch.float64)
    )
    values = values.double()
    known = torch.isfinite(values)
    means = (torch.where(known, values, 0) @ counts.T) / (known.double() @ counts.T)
    tail = (1 - level) / 2
    low, high = torch.nanquantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=-1)
    enough = known.sum(-1) > 1
    return torch.where(enough, low, torch.nan), torch.where(enough, high, torch.nan)


def sign_flip_p(differences: Float[Tensor, "unit"], *, seed: int = 0, resamples: int = 10_000) -> float:
    """Two-sided p-value of a mean difference of pairs: how often random signs give one as large (permutation test).

    NaN where no pair is known.
    """
    differences = differences[torch.isfinite(differences)].double()
    if not len(differences):
        return float("nan")
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (resamples, len(differences)), generator=generator).double() * 2 - 1
    means = (signs @ differences).abs() / len(differences)
    as_large = (means >= differences.mean().abs() * (1 - 1e-12)).sum()
    return float((as_large + 1) / (resamples + 1))
