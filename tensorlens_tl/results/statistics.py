"""Uncertainty of means over prompts (bootstrap intervals, paired tests and their correction), and the AUROC."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import Number, Whole, confidence, whole_count, whole_seed
from tensorlens_tl.errors import InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    Numbers = Tensor | ArrayLike
    """Numbers of any kind: a tensor, an array, a column of a data frame or a list."""
else:
    Numbers = Any  # `_read` checks them

RESAMPLES = 2000


def _read(name: str, values: Numbers) -> Float[Tensor, "*any item"]:
    """Return numbers as a float64 tensor."""
    try:
        read = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, np.float64))
    except (TypeError, ValueError):
        read = torch.tensor(0)
    if read.ndim == 0:
        raise InvalidInputError(f"{name}: pass a list of numbers, an array or a tensor.")
    return read.double()


def bootstrap_interval(
    values: Numbers, level: Number = 0.95, *, seed: Whole = 0, resamples: Whole = RESAMPLES
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return the percentile bootstrap interval of the mean over units, the last axis; rows share their resamples.

    NaN values are ignored; both ends are NaN if fewer than two values remain.

    Raises:
        InvalidInputError: values that are not numbers, a level outside (0, 1), or no resamples.

    >>> from tensorlens_tl import evaluate
    >>> low, high = evaluate.bootstrap_interval(torch.arange(10.0))
    >>> bool(low < 4.5 < high)
    True
    """
    level = confidence(level)
    resamples = whole_count("resamples", resamples)
    generator = torch.Generator().manual_seed(whole_seed(seed))
    values = _read("values", values)
    units = values.shape[-1]
    if units < 2:
        unknown = values.new_full(values.shape[:-1], torch.nan)
        return unknown, unknown
    draws = torch.randint(units, (resamples, units), generator=generator)
    counts = torch.zeros(resamples, units, dtype=torch.float64).scatter_add_(
        1, draws, torch.ones(resamples, units, dtype=torch.float64)
    )
    known = torch.isfinite(values)
    means = (torch.where(known, values, 0) @ counts.T) / (known.double() @ counts.T)
    tail = (1 - level) / 2
    low, high = torch.nanquantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=-1)
    enough = known.sum(-1) > 1
    return torch.where(enough, low, torch.nan), torch.where(enough, high, torch.nan)


def sign_flip_p(differences: Float[Tensor, "unit"], *, seed: int = 0, resamples: int = 10_000) -> float:
    """Return the two-sided p-value of a mean difference by random sign flips; NaN if there are no pairs."""
    differences = differences[torch.isfinite(differences)].double()
    if not len(differences):
        return float("nan")
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (resamples, len(differences)), generator=generator).double() * 2 - 1
    means = (signs @ differences).abs() / len(differences)
    as_large = (means >= differences.mean().abs() * (1 - 1e-12)).sum()
    return float((as_large + 1) / (resamples + 1))


def holm(p: Numbers) -> Float[Tensor, "comparison"]:
    """Correct the p-values of one family of comparisons by Holm's step-down method.

    The k-th smallest of n p-values is multiplied by n − k + 1, keeping the results in ascending order and at most 1.
    The chance of any false finding below α is then at most α, whatever the dependence (Holm 1979). NaN values are not
    counted and stay NaN.

    Raises:
        InvalidInputError: not a list of numbers, or a value outside [0, 1].

    >>> from tensorlens_tl import evaluate
    >>> evaluate.holm(torch.tensor([0.01, 0.04]))
    tensor([0.0200, 0.0400], dtype=torch.float64)
    """
    p = _read("p", p)
    if p.ndim > 1:
        raise InvalidInputError(f"p: pass the p-values of one family, not {list(p.shape)}.")
    known = ~p.isnan()
    ordered, order = p[known].sort()
    if bool(((ordered < 0) | (ordered > 1)).any()):
        raise InvalidInputError(f"p={p.tolist()}: p-values are in [0, 1].")
    stepped = (ordered * torch.arange(len(ordered), 0, -1)).clamp(max=1)
    corrected = torch.full_like(p, torch.nan)
    if len(ordered):
        corrected[known.nonzero()[order, 0]] = stepped.cummax(0).values
    return corrected


def auroc(scores: Numbers, true: Numbers) -> float:
    """Return the area under the ROC curve: the chance that a true item outscores a false one, ties counting half.

    NaN if all items are true or all are false, or if a score is NaN.

    Args:
        scores: one per item.
        true: whether each item is true, as booleans or as 1 and 0.

    Raises:
        InvalidInputError: not two lists of one length, or labels other than these.

    >>> from tensorlens_tl import evaluate
    >>> evaluate.auroc(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([True, False, False]))
    1.0
    """
    scores = _read("scores", scores)
    labels = _read("true", true)
    if scores.ndim > 1 or scores.shape != labels.shape or not bool(((labels == 0) | (labels == 1)).all()):
        raise InvalidInputError("auroc: pass one score per item, and for each of them True or False.")
    true = labels.bool()
    if bool(scores.isnan().any()) or bool(true.all()) or not bool(true.any()):
        return float("nan")
    above = scores[true]
    below = scores[~true].sort().values
    lower, upper = (torch.searchsorted(below, above, right=right) for right in (False, True))
    return float((lower + upper).double().mean() / (2 * len(below)))
