"""Scores whose largest are measured by patching the live model, with an error for the others.

Three estimates of every score cost a few runs together. The exact difference of the two runs hardly ever misses a large
node, but overrates nodes whose effect the model repairs. The gradient at the prompt that is patched is right about
small nodes, but blind to nodes behind a saturated softmax. The gradient a tenth of the way to the other prompt hardly
has that blind spot; where all of a prompt changes, it may be several times too large for early nodes (measured on
trained models: docs/evaluation.md). So

1. the nodes that may be the largest are patched live, each on its own: those with the largest sum of an estimate's size
   and the spread of the estimates;
2. the others are scored by the median of the three;
3. some of the others are drawn at random and patched as well. With x_i = abs(live score − score) and p_i the
   probability of a draw, x_i / p_i is an unbiased estimate of Σx, whatever the p_i are (Hansen and Hurwitz 1943). To
   reduce the variance, they are larger where the estimates differ, as misses are likely there: p_i ∝ spread of the
   estimates + half of its mean;
4. what is then still unmeasured is divided at random into groups, each patched as a whole, so that a large node that
   all estimates miss shows up in its group's run, without a run of its own. AtP* (Kramár et al. 2024) uses random
   subsets in the same way.

`live` of the largest are patched for each prompt, and among nodes the whole input as well; there are half as many
draws, and as many groups as draws, at least 2. `tensorlens_tl.results.measured` turns them into an interval and a
bound. In one run each prompt patches different nodes, so that several prompts take no more runs than one.
"""

import re
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import rest_interval

LARGEST = 10
"""How many of the largest are patched by default."""

EVERYWHERE = 0.5
"""What is added to every probability of a draw, as a share of the estimates' mean spread."""

WAYS = "how many of the largest are patched, a share of all (0.1), or the largest error of the rest ('error<5%')"

Patched = Callable[[Bool[Tensor, "run batch part"]], Float[Tensor, "run batch"]]
"""Returns what the target loses for each prompt in live runs with some parts patched."""


class Budget(NamedTuple):
    """How much to measure: a number of the largest, a share of all, or until the stated error is small enough.

    Attributes:
        number: how many, or None.
        share: the share of all parts, or None.
        error: the largest acceptable error of the rest, as a share of the sum of all absolute scores; None for any.
    """

    number: int | None = None
    share: float | None = None
    error: float | None = None

    def of(self, parts: int, what: str) -> int:
        """Return how many of the parts to patch at first, as the largest.

        Raises:
            InvalidInputError: more than there are.
        """
        if self.share is not None:
            return ceil(self.share * parts)
        if self.number is None:
            return min(LARGEST, parts)
        return whole_number("live", self.number, 1, parts, why=f"this model has {parts} {what}")


def budget_of(live: Any, method: str | None) -> Budget:
    """Parse the `live=` argument.

    Raises:
        InvalidInputError: an invalid value, or a method that measures nothing.
    """
    if live is None:
        return Budget()
    if method != "measured":
        raise InvalidInputError(
            f"live={live!r}, method={method!r}: only method='measured' measures scores; use it, or leave live out."
        )
    if isinstance(live, str):
        match = re.fullmatch(r"\s*error\s*<=?\s*(\d*\.?\d+)\s*(%?)\s*", live)
        error = float(match[1]) / (100 if match[2] else 1) if match else 0.0
        if 0 < error < 1:
            return Budget(error=error)
    elif isinstance(live, float):
        if 0 < live <= 1:
            return Budget(share=live)
    else:
        return Budget(whole_number("live", live, least=1, why=WAYS))
    raise InvalidInputError(f"live={live!r}: pass {WAYS}.")


class Measurement(NamedTuple):
    """Scores, some of which are measured.

    Attributes:
        scores: of every part.
        measured: which of them come from a live run.
        draws: each draw's estimate of the sum of the others' errors.
        groups: each unmeasured group's live loss minus the sum of its scores.
    """

    scores: Float[Tensor, "batch part"]
    measured: Bool[Tensor, "batch part"]
    draws: Float[Tensor, "batch draw"]
    groups: Float[Tensor, "batch group"]


def measure(
    estimates: Float[Tensor, "estimate batch part"],
    patched: Patched,
    first: int,
    error: float | None,
    seed: int,
) -> Measurement:
    """Measure the largest scores, estimate the others, and sample how far off these are.

    Args:
        estimates: three estimates of every score; their median is the score of what is not measured.
        patched: runs the live model.
        first: how many of the largest are measured at first.
        error: the acceptable stated error, as a share of the sum of all absolute scores; the number measured doubles
            until it is reached.
        seed: the seed of draws and groups.
    """
    guesses = estimates.median(0).values
    scores = guesses.clone()
    measured = torch.zeros_like(guesses, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    apart = estimates.amax(0) - estimates.amin(0)
    size = estimates.abs().amax(0) + apart
    count, left = first, guesses.shape[1]
    while True:
        count = min(count, left)
        largest = size.masked_fill(measured, -1).topk(count).indices.sort(1).values
        measured.scatter_(1, largest, True)
        rest = ~measured
        drawn, chances = _drawn(apart, rest, max(count // 2, 2) if count < left else 0, generator)
        measured.scatter_(1, drawn, True)
        groups = _groups(~measured, max(first // 2, 2), generator)
        runs = torch.cat([largest, drawn], dim=1)
        lost = patched(torch.cat([_one_by_one(runs, guesses.shape[1]), groups])).T.to(scores)
        alone, together = lost[:, : runs.shape[1]], lost[:, runs.shape[1] :]
        misses = (alone[:, count:] - guesses.gather(1, drawn)).abs()
        draws = misses / chances.to(scores) * rest.any(1, keepdim=True)
        scores.scatter_(1, runs, alone)
        left = int((~measured).sum(1).max())
        high = rest_interval(draws)[2]
        if not left or error is None or bool((high <= error * scores.abs().sum(1)).all()):
            break
        count = 2 * count
    together = together - torch.einsum("gbp,bp->bg", groups.to(scores), scores)
    if left <= len(groups):  # every group has a single part, which is thereby measured
        scores = scores + torch.einsum("gbp,bg->bp", groups.to(scores), together)
        measured, together = torch.ones_like(measured), together[:, :0]
    return Measurement(scores, measured, draws, together)


def _one_by_one(parts: Int[Tensor, "batch run"], count: int) -> Bool[Tensor, "run batch part"]:
    """Return runs that each patch one part of every prompt."""
    runs = torch.zeros(parts.shape[1], len(parts), count, dtype=torch.bool, device=parts.device)
    return runs.scatter_(2, parts.T[..., None], True)


def _drawn(
    apart: Float[Tensor, "batch part"], rest: Bool[Tensor, "batch part"], count: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch draw"], Float[Tensor, "batch draw"]]:
    """Draw from the rest with replacement, more often where estimates differ; return the draws' probabilities."""
    left = rest | ~rest.any(1, keepdim=True)  # a prompt with nothing left may draw anything: it does not count
    off = apart.double().where(rest, 0)
    mean = off.sum(1, keepdim=True) / left.sum(1, keepdim=True)
    weights = (off + EVERYWHERE * mean.where(mean > 0, 1)) * left
    chances = weights / weights.sum(1, keepdim=True)
    places = torch.rand(len(rest), count, generator=generator, dtype=torch.float64).sort(1).values.to(chances.device)
    last = rest.shape[1] - 1 - left.flip(1).double().argmax(1, keepdim=True)  # rounding may end the sum below 1
    drawn = torch.searchsorted(chances.cumsum(1), places, right=True).minimum(last)
    return drawn, chances.gather(1, drawn)


def _groups(
    rest: Bool[Tensor, "batch part"], most: int, generator: torch.Generator
) -> Bool[Tensor, "group batch part"]:
    """Divide each prompt's unmeasured parts at random into groups whose sizes differ by at most one."""
    groups = min(most, int(rest.sum(1).max()))
    places = torch.rand(rest.shape, generator=generator, dtype=torch.float64).to(rest.device)
    order = places.masked_fill(~rest, 2).argsort(1).argsort(1)
    return (order % max(groups, 1) == torch.arange(groups, device=rest.device)[:, None, None]) & rest
