"""An evaluation over several seeds: the mean where a seed only adds noise, all prompts where it draws them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.evaluation import Evaluation

SUMMED = ("prompts", "dropped")
"""Settings that count the prompts of one seed."""


def over_seeds(
    run: Callable[[int], Evaluation], seeds: Iterable[int] = (0, 1, 2), *, units: str = "same"
) -> Evaluation:
    """Run an evaluation once per seed, and put the results together.

    Args:
        run: makes the Evaluation of a seed.
        seeds: at least one.
        units: ``"same"`` where every seed asks about the same prompts (a random order, noise, scrambled weights): each
            prompt's value is its mean over the seeds, so that intervals and tests still count prompts and not runs.
            ``"drawn"`` where each seed draws prompts of its own: all of them are kept.

    Returns:
        An Evaluation as each run gives, with the list of seeds in ``settings["seed"]``.

    Raises:
        InvalidInputError: no seed, one that is there twice, or runs that differ in metrics, methods, steps or, of the
            same prompts, in their number.
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
    names = first.units
    if units == "drawn":
        names = [f"seed {seed}, {unit}" for seed, result in zip(chosen, runs, strict=True) for unit in result.units]
    return replace(
        first,
        values=_together([result.values for result in runs], units),
        curves=None if first.curves is None else _together([_curves(result) for result in runs], units),
        units=names,
        settings=first.settings | {"seed": chosen} | (_counts(runs) if units == "drawn" else {}),
    )


def _shape(result: Evaluation, units: str) -> tuple[Any, ...]:
    axis = None if result.axis is None else result.axis.tolist()
    return result.kind, result.metrics, result.methods, axis, result.units if units == "same" else None


def _curves(result: Evaluation) -> Tensor:
    assert result.curves is not None  # `_shape`
    return result.curves


def _together(parts: list[Tensor], units: str) -> Tensor:
    return torch.stack(parts).nanmean(0) if units == "same" else torch.cat(parts, dim=2)


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
