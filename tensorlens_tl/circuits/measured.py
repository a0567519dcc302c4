"""Scores of which the largest are measured by patching the live model, and how far the others are off.

Three estimates of every score cost a few runs together. The exact difference of the two runs hardly ever misses a large
node, and overrates what the model repairs. The gradient at the prompt that is patched is right about small nodes, and
blind to nodes behind a saturated softmax. The gradient a tenth of the way to the other prompt hardly is; where all of a
prompt changes, it may be several times too large for early nodes (measured on trained models: docs/evaluation.md). So

1. the nodes that may be the largest are patched live, each by itself: those with the largest sum of the size of an
   estimate and how far the estimates are apart;
2. the middle one of the three is the score of the others;
3. of the others, some are drawn at random and patched as well. With x_i = abs(live score − score) and p_i the
   probability of a draw, x_i / p_i is an unbiased estimate of Σx, whatever the p_i are (Hansen and Hurwitz 1943). They
   are larger where the estimates differ, p_i ∝ how far they are apart + half of its mean: where misses are, so
   that draws scatter less;
4. what is then still unmeasured is divided at random into groups, each of which is patched as a whole, so that a large
   node which all estimates miss shows in the run of its group, without a run of its own. AtP* (Kramár et al. 2024)
   tells by random subsets in the same way.

`live` largest are patched for each prompt, and of nodes the whole input besides; there are half as many draws, and as
many groups as draws, at least 2. `tensorlens_tl.results.measured` says how they become an interval and a bound. Each
prompt has nodes of its own in a run, so that several prompts take no more runs than one.
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
"""How many of the largest are patched where `live` does not say."""

EVERYWHERE = 0.5
"""What is added to every probability of a draw, as a share of how far estimates are apart on average."""

WAYS = "how many of the largest are patched, a share of all (0.1), or the largest error of the rest ('error<5%')"

Patched = Callable[[Bool[Tensor, "run batch part"]], Float[Tensor, "run batch"]]
"""What the target loses for each prompt in runs of the live model with some of its parts patched."""


class Budget(NamedTuple):
    """How much is measured: so many of the largest, or a share of all; or until the stated error is small enough.

    Attributes:
        number: how many, or None.
        share: of all parts, or None.
        error: how large the error of the rest may be at most, as a share of the sizes of all scores; None for any.
    """

    number: int | None = None
    share: float | None = None
    error: float | None = None

    def of(self, parts: int, what: str) -> int:
        """How many of so many parts are patched for being the largest, at first.

        Raises:
            InvalidInputError: more than there are.
        """
        if self.share is not None:
            return ceil(self.share * parts)
        if self.number is None:
            return min(LARGEST, parts)
        return whole_number("live", self.number, 1, parts, why=f"this model has {parts} {what}")


def budget_of(live: Any, method: str | None) -> Budget:
    """What `live=` asks for.

    Raises:
        InvalidInputError: it is nothing of the kind, or the method measures nothing.
    """
    if live is None:
        return Budget()
    if method != "measured":
        raise InvalidInputError(
            f"live={live!r}, method={method!r}: how many scores are measured is a question of method='measured'; use "
            "that, or leave live out."
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
    """Scores of which some are measured.

    Attributes:
        scores: of every part.
        measured: which of them are those of a live run.
        draws: what each draw says about the sum of what the others were off.
        groups: what each group of the unmeasured gave together, less the sum of its scores.
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
    """Measure the largest, fill in the others, and see how far these are off.

    Args:
        estimates: of every score, three; the middle one is the score of what is not measured.
        patched: the live model.
        first: how many of the largest are measured, at first.
        error: how large the stated error may be, as a share of the sizes of all scores; twice as many are measured
            until it is smaller.
        seed: of draws and groups.
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
    if left <= len(groups):  # each is in a group by itself, and so is measured as well
        scores = scores + torch.einsum("gbp,bg->bp", groups.to(scores), together)
        measured, together = torch.ones_like(measured), together[:, :0]
    return Measurement(scores, measured, draws, together)


def _one_by_one(parts: Int[Tensor, "batch run"], count: int) -> Bool[Tensor, "run batch part"]:
    """Runs in each of which one part of every prompt is patched."""
    runs = torch.zeros(parts.shape[1], len(parts), count, dtype=torch.bool, device=parts.device)
    return runs.scatter_(2, parts.T[..., None], True)


def _drawn(
    apart: Float[Tensor, "batch part"], rest: Bool[Tensor, "batch part"], count: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch draw"], Float[Tensor, "batch draw"]]:
    """Draws with replacement from the rest, more often where estimates differ, and the probability of each."""
    left = rest | ~rest.any(1, keepdim=True)  # a prompt that has nothing left draws anything, which counts nothing
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
    """Each prompt's unmeasured parts, divided at random into groups of one size or one less."""
    groups = min(most, int(rest.sum(1).max()))
    places = torch.rand(rest.shape, generator=generator, dtype=torch.float64).to(rest.device)
    order = places.masked_fill(~rest, 2).argsort(1).argsort(1)
    return (order % max(groups, 1) == torch.arange(groups, device=rest.device)[:, None, None]) & rest
