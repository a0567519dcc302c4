"""An evaluation over several seeds: the mean where a seed only adds noise, all prompts where it draws them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import Evaluation

SUMMED = ("prompts", "dropped")
"""Settings that count the prompts of one seed."""


@checked_names
def over_seeds(
    run: Callable[[int], Evaluation], seeds: Iterable[int] = (0, 1, 2), *, units: str = "same"
) -> Evaluation:
    """Run an evaluation once per seed, and put the results together.

    Args:
        run: makes the Evaluation of a seed.
        seeds: at least one.
        units: ``"same"`` where every seed has the same prompts (a random order, noise, scrambled weights): each
            prompt's value is its mean over the seeds, so that intervals and tests still count prompts and not runs.
            ``"drawn"`` where each seed draws other prompts: the result has all of them.

    Returns:
        An Evaluation as each run gives, with the list of seeds in ``settings["seed"]``.

    Raises:
        InvalidInputError: no seed, a seed twice, or runs that differ in metrics, methods, steps or, of the
            same prompts, in their number.

    >>> from tensorlens_tl import evaluate
    >>> run = lambda seed: evaluate.stability(model, [text], ["ifr"], draws=1, seed=seed)
    >>> result = evaluate.over_seeds(run, seeds=(0, 1))
    >>> result.mean("similarity", "ifr") > 0.5
    True
    """
    chosen = list(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or units not in ("same", "drawn"):
        raise InvalidInputError(
            f"over_seeds: seeds={chosen}, units={units!r}; pass different seeds, and 'same' or 'drawn'."
        )
    runs = [run(seed) for seed in chosen]
    first = runs[0]
    for seed, other in zip(chosen, runs, strict=True):
        if _shape(other, units) != _shape(first, units):
            raise InvalidInputError(
                f"over_seeds: seed {seed} gives other metrics, methods, steps or units than seed {chosen[0]}."
            )
    values = [result.values for result in runs]
    curves = [result.curves for result in runs if result.curves is not None]
    settings = first.settings | {"seed": chosen}
    if units == "same":
        return replace(first, values=_mean(values), curves=_mean(curves), settings=settings)
    return replace(
        first,
        values=_all(values),
        curves=_all(curves),
        units=[f"seed {seed}, {unit}" for seed, result in zip(chosen, runs, strict=True) for unit in result.units],
        settings=settings | _counts(runs),
    )


def _shape(result: Evaluation, units: str) -> tuple[Any, ...]:
    """What must agree between the runs."""
    steps = result.axis is not None and result.axis.tolist()
    shape = (result.kind, result.metrics, result.methods, steps, result.curves is None)
    if units == "same":
        return (*shape, result.units)
    return shape


def _mean(parts: list[Tensor]) -> Tensor | None:
    """The mean over seeds; None of results without curves."""
    return torch.stack(parts).nanmean(0) if parts else None


def _all(parts: list[Tensor]) -> Tensor | None:
    """The units of all seeds; None of results without curves."""
    return torch.cat(parts, dim=2) if parts else None


def _counts(runs: list[Evaluation]) -> dict[str, Any]:
    """Counts summed over the seeds, and the accuracy over all of their prompts."""
    settings = [result.settings for result in runs]
    counts: dict[str, Any] = {
        name: sum(facts[name] for facts in settings) for name in SUMMED if all(name in facts for facts in settings)
    }
    if "prompts" in counts and all("accuracy" in facts for facts in settings):
        right = sum(facts["accuracy"] * facts["prompts"] for facts in settings)
        counts["accuracy"] = right / counts["prompts"]
    return counts
