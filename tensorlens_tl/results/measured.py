"""Scores whose largest entries are measured in the live model, with estimates of how far the others are off.

For each prompt, draws x estimate Σ abs(live score − score) over all but the largest scores; their mean is unbiased.
The errors are long-tailed, so a normal interval for the mean would be too short. Instead, the interval is log-normal
(Cox's, as given by Zhou and Gao 1997), with v the variance of log x over n draws, none of which counts as less than a
tenth of the mean:

    mean · exp(±t √((v + v²/2) / (n − 1))),  t of Student with n − 1 degrees of freedom

Cox has v/n in the first term; n − 1 attains the nominal coverage even with two draws.

The unmeasured parts are divided into groups, each patched as a whole. A group's r is its joint effect less the sum of
its scores: the errors of its parts, and their interaction. If the largest error of one part is θ, its group has
r = θ + ε, with ε distributed as in the other groups: θ ≤ max abs(r) + t √(mean r²), with t of a one-sided Student.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import confidence
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.circuit import EdgeScores
from tensorlens_tl.results.scores import Bars, Scored
from tensorlens_tl.results.terms import Terms

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.9
LEAST = 0.1
"""The least that a draw counts for the width of an interval, as a share of the mean."""


def rest_interval(
    draws: Float[Tensor, "batch draw"], level: float = LEVEL
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Return the mean of long-tailed draws and both ends of its interval; zero without draws."""
    count = draws.shape[1]
    if not count:
        zero = draws.sum(1).double()
        return zero, zero, zero
    mean = draws.double().mean(1)
    least = (LEAST * mean).clamp_min(torch.finfo(torch.float64).tiny)
    variance = torch.maximum(draws.double(), least[:, None]).log().var(1)
    error = ((variance + variance**2 / 2) / (count - 1)).sqrt()
    width = (student((1 + level) / 2, count - 1) * error).exp()
    return mean, mean / width, mean * width


def largest_miss(groups: Float[Tensor, "batch group"], level: float = LEVEL) -> Float[Tensor, "batch"]:
    """Return a bound on the error of any single unmeasured score; zero without groups."""
    count = groups.shape[1]
    if not count:
        return groups.sum(1).double()
    size = groups.double().abs()
    return size.amax(1) + student(level, count - 1) * size.square().mean(1).sqrt()


@cache
def student(level: float, freedom: int) -> float:
    """Return a quantile of Student's t: √n · tan θ, with ∫ cosⁿ⁻¹ up to θ equal to `level` of the whole integral."""
    angles = torch.linspace(-torch.pi / 2, torch.pi / 2, 200_001, dtype=torch.float64)
    shares = torch.cumulative_trapezoid(angles.cos().clamp_min(0) ** (freedom - 1), angles)
    place = int(torch.searchsorted(shares, level * shares[-1]))
    return float(freedom**0.5 * angles[place + 1].tan())


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MeasuredScores(Scored):
    """Scores whose largest entries are measured by patching the live model.

    Attributes:
        draws: estimates of Σ abs(live score − score) over all but the largest, one from each randomly drawn and patched
            part, `[batch, draw]`.
        groups: the effect of each group of unmeasured parts, patched as a whole, less the sum of its scores,
            `[batch, group]`.
    """

    draws: Float[Tensor, "batch draw"]
    groups: Float[Tensor, "batch group"]

    def rest(self, level: int | float = LEVEL) -> "pd.DataFrame":
        """Estimate how far the unmeasured scores are off, one row per prompt, with intervals and bound at a `level`.

        Returns:
            `measured`, the number of measured scores, out of `parts`; `off`, an unbiased estimate of Σ abs(live score −
            score) before the draws were measured, as a share of Σ abs(score), with its interval `low` to `high`;
            `largest`, a bound on the error of any single unmeasured score.

        Raises:
            InvalidInputError: a level outside (0, 1).

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> scores = tlens.circuits.patch_scores(frozen, corrupted, " value", " name", method="measured")
        >>> scores.rest().columns.tolist()
        ['batch', 'measured', 'parts', 'off', 'low', 'high', 'largest']
        """
        return _rest(level, *self._measured(), self.draws, self.groups)

    @abstractmethod
    def _measured(self) -> tuple[Bool[Tensor, "batch part"], Float[Tensor, "batch part"]]:
        """Return which scores are measured, and all scores."""

    def _titled_bars(self, title: str = "", **choice: Any) -> Bars:
        bars = super()._titled_bars(title, **choice)
        return replace(bars, notes=[*bars.notes, self._stated(choice.get("batch"))])

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self._stated()})"

    def _stated(self, batch: int | None = None) -> str:
        """Say how many scores are measured and how far the rest is off, for one prompt or the worst one."""
        rest = self.rest()
        if batch is not None:
            rest = rest[rest["batch"] == batch]
        counts = f"{rest['measured'].min()} of {rest['parts'].max()} measured"
        if not rest["largest"].any():
            return counts
        off, high = (f"{100 * rest[name].max():.2g} %" for name in ("off", "high"))
        return f"{counts}, the rest off by {off} of all ({100 * LEVEL:.0f} %: at most {high})"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MeasuredTerms(MeasuredScores, Terms):
    """Scores of nodes with the largest ones measured, from `patch_scores(method="measured")`.

    Their `mean`, and the difference of two, are plain `Terms`.

    Attributes:
        measured: which scores are measured in a live run, `[batch, query, term]`.
        measured_keys: the same for `keys`, `[batch, query, term, key]`, or None.
        draws_of_keys, groups_of_keys: `draws` and `groups` for nodes at positions.
    """

    measured: Bool[Tensor, "batch query term"]
    measured_keys: Bool[Tensor, "batch query term key"] | None = None
    draws_of_keys: Float[Tensor, "batch draw_of_keys"] | None = None
    groups_of_keys: Float[Tensor, "batch group_of_keys"] | None = None

    def rest(self, level: int | float = LEVEL, *, keys: bool = False) -> "pd.DataFrame":
        """Estimate how far the unmeasured scores (or `keys`, for nodes at positions) are off, as `MeasuredScores.rest`.

        Raises:
            InvalidInputError: a level outside (0, 1), or these scores have no positions.
        """
        if not keys:
            return super().rest(level)
        if self.keys is None or self.measured_keys is None:
            raise InvalidInputError("keys: no positions here; patch_scores(positions=True) has them.")
        assert self.draws_of_keys is not None
        assert self.groups_of_keys is not None
        measured, scores = self.measured_keys.flatten(1), self.keys.flatten(1)
        return _rest(level, measured, scores, self.draws_of_keys, self.groups_of_keys)

    def _measured(self) -> tuple[Bool[Tensor, "batch part"], Float[Tensor, "batch part"]]:
        return self.measured.flatten(1), self.scores.flatten(1)

    def _columns(self, keys: bool) -> dict[str, Tensor | None]:
        return {"measured": self.measured_keys if keys else self.measured}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MeasuredEdges(MeasuredScores, EdgeScores):
    """Scores of edges with the largest ones measured, from `edge_scores(method="measured")`.

    `measured` says which are measured in a live run, `[batch, source, destination]`.
    """

    measured: Bool[Tensor, "batch source destination"]

    def _measured(self) -> tuple[Bool[Tensor, "batch part"], Float[Tensor, "batch part"]]:
        return self.measured[:, self.exists], self.scores[:, self.exists]

    def _columns(self) -> dict[str, Tensor]:
        return {"measured": self.measured}


def _rest(
    level: int | float,
    measured: Bool[Tensor, "batch part"],
    scores: Float[Tensor, "batch part"],
    draws: Float[Tensor, "batch draw"],
    groups: Float[Tensor, "batch group"],
) -> "pd.DataFrame":
    import pandas as pd

    level = confidence(level)
    unmeasured = ~measured.all(1)
    size = scores.double().abs().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    shares = [(end / size * unmeasured).tolist() for end in rest_interval(draws, level)]
    return pd.DataFrame(
        {
            "batch": range(len(scores)),
            "measured": measured.sum(1).tolist(),
            "parts": measured.shape[1],
            **dict(zip(("off", "low", "high"), shares, strict=True)),
            "largest": (largest_miss(groups, level) * unmeasured).tolist(),
        }
    )
