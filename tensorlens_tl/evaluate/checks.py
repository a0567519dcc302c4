"""Checks that a method can be put through on any model and prompts, without knowing the answer.

* `completeness`: do its scores sum to what they explain, and how much of it do no tokens explain?
* `randomisation`: do its scores change when the weights are scrambled (Adebayo et al. 2018)? A map that does not is
  about the prompt, not about the model.
* `stability`: do they stay when the embeddings get a little noise?
* `agreement`: how alike do methods rank the tokens?
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from tensorlens_tl._arguments import Number, Seed, Whole, checked_names, real_number, whole_count, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.scorers import Methods, Scorer, query_rows, scorers_of, usable
from tensorlens_tl.hooks import hooked, lock_of
from tensorlens_tl.models import ModelLike
from tensorlens_tl.models.lifecycle import copied
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.passes.inputs import InputLike
from tensorlens_tl.results import Attribution, Evaluation

if TYPE_CHECKING:
    import pandas as pd


@checked_names
def completeness(
    model: ModelLike, prompts: InputLike, methods: Methods = None, *, seed: Seed = 0, **freezing: Any
) -> Evaluation:
    """Measure how far each method's scores and bias are from the total they explain, and the bias' share of it.

    Args:
        model: a TransformerLens model.
        prompts: strings or token ids.
        methods: see `tensorlens_tl.evaluate.scorers`; None is every standard method that is additive and fits.
        seed: of the random baseline.
        freezing: options of `tlens.freeze`.

    Returns:
        An Evaluation: `gap` (abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias))) and `unexplained`
        (abs(bias) / (Σ abs(scores) + abs(bias))); NaN for methods that claim no total.

    >>> from tensorlens_tl import evaluate
    >>> evaluate.completeness(model, text, ["tensorlens target"]).mean("gap", "tensorlens target") < 1e-4
    True
    """
    scorers = scorers_of(methods, seed=seed)
    frozen = freeze(model, prompts, **freezing)
    scorers, skipped = usable(scorers, frozen, -1, skip=methods is None)
    values = {scorer.label: _completeness(scorer, frozen) for scorer in scorers}
    if methods is None:
        values = {label: row for label, row in values.items() if bool(torch.isfinite(row).any())}
    return Evaluation(
        kind="completeness",
        values=torch.stack(list(values.values()), dim=1),
        metrics={"gap": False, "unexplained": False},
        methods=list(values),
        units=_units(frozen),
        settings=frozen.provenance(),
        skipped=skipped,
    )


def _completeness(scorer: Scorer, frozen: FrozenPass) -> Float[Tensor, "2 batch"]:
    nothing = torch.full((2, len(frozen.tokens)), float("nan"), dtype=torch.float64)
    attribution = scorer.result(frozen)
    if not isinstance(attribution, Attribution) or attribution.gap is None or attribution.bias is None:
        return nothing
    size = attribution.scores.abs().sum(-1) + attribution.bias.abs()
    unexplained = attribution.bias.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
    rows = query_rows(attribution, frozen, -1)
    numbers = [torch.take_along_dim(t, rows.to(t.device), dim=1)[:, 0] for t in (attribution.gap, unexplained)]
    return torch.stack(numbers).double().cpu()


@checked_names
def randomisation(
    model: ModelLike, prompts: InputLike, methods: Methods = None, *, seed: Seed = 0, **freezing: Any
) -> Evaluation:
    """Correlate each method's scores with its scores on the same model, weights scrambled from the top down.

    Block by block from the last to the first, the entries of every weight matrix are permuted, on a copy of the model.
    A target is what the scrambled model predicts. Arguments are those of `completeness`; `seed` is also that of the
    permutations.

    Returns:
        An Evaluation: `similarity` (Spearman) with all blocks scrambled, lower is better; curves over the number of
        scrambled blocks.

    >>> from tensorlens_tl import evaluate
    >>> list(evaluate.randomisation(model, [text], ["ifr"]).metrics)
    ['similarity']
    """
    scorers = scorers_of(methods, seed=seed)
    frozen = freeze(model, prompts, **freezing)
    frozen.view.refuse_encoder_decoder("randomisation")
    scorers, skipped = usable(scorers, frozen, -1, skip=methods is None)
    before = torch.stack([scorer(frozen) for scorer in scorers])
    other: Any = copied(model)
    generator = torch.Generator().manual_seed(seed)
    layers = frozen.n_layers
    curve = [spearman(before, before, frozen.mask)]
    for layer in reversed(range(layers)):
        with torch.no_grad():
            for parameter in other.blocks[layer].parameters():
                if parameter.ndim >= 2:
                    order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                    parameter.copy_(parameter.flatten()[order].view_as(parameter))
        again = freeze(other, **frozen.prompt.again(), verify=False)
        curve.append(spearman(before, torch.stack([scorer(again) for scorer in scorers]), frozen.mask))
    curves = torch.stack(curve, dim=-1)[None]
    return Evaluation(
        kind="weight randomisation",
        values=curves[..., -1],
        metrics={"similarity": False},
        methods=[scorer.label for scorer in scorers],
        units=_units(frozen),
        curves=curves,
        axis=torch.arange(layers + 1, dtype=torch.float64),
        axis_name="blocks scrambled, from the last",
        settings=frozen.provenance() | {"seed": seed},
        skipped=skipped,
    )


@checked_names
def stability(
    model: ModelLike,
    prompts: InputLike,
    methods: Methods = None,
    *,
    noise: Number = 0.01,
    draws: Whole = 4,
    seed: Seed = 0,
    **freezing: Any,
) -> Evaluation:
    """Correlate each method's scores with its scores when the first block's input gets Gaussian noise.

    Args:
        model, prompts, methods, freezing: as in `completeness`.
        noise: its size, as a share of each token's vector; must be positive.
        draws: how many noisy inputs are averaged.
        seed: of the noise, and of the random baseline.

    Returns:
        An Evaluation: `similarity` (Spearman), higher is better.

    >>> from tensorlens_tl import evaluate
    >>> list(evaluate.stability(model, [text], ["ifr"], draws=1).metrics)
    ['similarity']
    """
    noise = real_number("noise", noise, lambda x: x > 0, "pass a positive share, such as 0.01")
    draws = whole_count("draws", draws)
    scorers = scorers_of(methods, seed=seed)
    frozen = freeze(model, prompts, **freezing)
    frozen.view.refuse_encoder_decoder("stability")
    scorers, skipped = usable(scorers, frozen, -1, skip=methods is None)
    before = torch.stack([scorer(frozen) for scorer in scorers])
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(before.shape[:2], dtype=torch.float64)
    x = frozen.resid_pre(0)
    for _ in range(draws):
        added = torch.randn(x.shape, generator=generator).to(x) * x.norm(dim=-1, keepdim=True)
        added = noise * added / x.shape[-1] ** 0.5
        with lock_of(model), hooked(model, [(frozen.points.blocks[0].resid_pre, _plus(added))]):
            again = freeze(model, **frozen.prompt.again(), verify=False)
            after = torch.stack([scorer(again) for scorer in scorers])
        total += spearman(before, after, frozen.mask).to(total)
    return Evaluation(
        kind="stability under noise",
        values=(total / draws)[None],
        metrics={"similarity": True},
        methods=[scorer.label for scorer in scorers],
        units=_units(frozen),
        settings=frozen.provenance() | {"noise": noise, "draws": draws, "seed": seed},
        skipped=skipped,
    )


def _plus(value: Tensor) -> Callable[..., Tensor]:
    """A hook that adds the same to every copy of the prompts: methods run several at once."""

    def hook(live: Tensor, *, hook: HookPoint) -> Tensor:
        return live + value.to(live).repeat(len(live) // len(value), 1, 1)

    return hook


@checked_names
def agreement(
    model: ModelLike, prompts: InputLike, methods: Methods = None, *, seed: Seed = 0, **freezing: Any
) -> Evaluation:
    """Correlate the ranks of every two methods' scores for the last token; arguments are those of `completeness`.

    The Evaluation has one metric for each method, ``"with <method>"``: `agreement_table` makes a square of it.

    >>> from tensorlens_tl import evaluate
    >>> evaluate.agreement_table(evaluate.agreement(model, text, ["ifr", "alti"])).shape
    (2, 2)
    """
    scorers = scorers_of(methods, seed=seed)
    frozen = freeze(model, prompts, **freezing)
    scorers, skipped = usable(scorers, frozen, -1, skip=methods is None)
    scores = torch.stack([scorer(frozen) for scorer in scorers])
    labels = [scorer.label for scorer in scorers]
    return Evaluation(
        kind="agreement",
        values=torch.stack([spearman(scores, other.expand_as(scores), frozen.mask) for other in scores]),
        metrics={f"{WITH}{label}": None for label in labels},
        methods=labels,
        units=_units(frozen),
        settings=frozen.provenance() | {"seed": seed},
        skipped=skipped,
    )


WITH = "with "


@checked_names
def agreement_table(result: Evaluation) -> "pd.DataFrame":
    """The means of `agreement`, as a square table of methods.

    Raises:
        InvalidInputError: no result of `agreement`.

    >>> from tensorlens_tl import evaluate
    >>> table = evaluate.agreement_table(evaluate.agreement(model, [text], ["ifr", "alti"]))
    >>> list(table.columns) == list(table.index)
    True
    """
    import pandas as pd

    if result.kind != "agreement":
        raise InvalidInputError(f"agreement_table: this is a result of {result.kind!r}.")
    columns = [metric.removeprefix(WITH) for metric in result.metrics]
    means = result.values.nanmean(-1).T.tolist()
    return pd.DataFrame(means, index=pd.Index(result.methods, name="method"), columns=columns)


@checked_names
def spearman(
    a: Float[Tensor, "*method batch pos"], b: Float[Tensor, "*method batch pos"], mask: Tensor
) -> Float[Tensor, "*method batch"]:
    """Rank correlation over each prompt's real tokens, equal scores sharing their rank; NaN for constant or NaN scores.

    >>> from tensorlens_tl import evaluate
    >>> ranks = torch.tensor([[1.0, 2.0, 3.0]])
    >>> round(evaluate.spearman(ranks, -ranks, torch.ones(1, 3, dtype=torch.bool)).item(), 6)
    -1.0
    """
    return correlation(*(_centred_ranks(t, mask) for t in (a, b)))


def correlation(a: Float[Tensor, "*any part"], b: Float[Tensor, "*some part"]) -> Float[Tensor, "*any"]:
    """The correlation over parts of numbers less their means; NaN for constant ones. One `b` may be for several `a`."""
    size = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(size > 0, (a * b).sum(-1) / size, torch.nan)


def _centred_ranks(scores: Tensor, mask: Tensor) -> Tensor:
    """Average ranks among real tokens, less their mean; zero at padding."""
    pairs = mask[..., None, :] & mask[..., :, None]
    below = (scores[..., None, :] < scores[..., :, None]) & pairs
    equal = (scores[..., None, :] == scores[..., :, None]) & pairs
    ranks = torch.where(scores.isnan() & mask, torch.nan, below.sum(-1) + 0.5 * equal.sum(-1))
    mean = (ranks * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return ((ranks - mean) * mask).double()


def _units(frozen: FrozenPass) -> list[str]:
    return [f"prompt {number}" for number in range(len(frozen.tokens))]


SUMMED = ("prompts", "dropped")
"""Settings that count the prompts of one seed."""


@checked_names
def over_seeds(
    run: Callable[[int], Evaluation], seeds: Iterable[Whole] = (0, 1, 2), *, units: str = "same"
) -> Evaluation:
    """Run an evaluation once per seed, and join the results.

    Args:
        run: from a seed to an Evaluation.
        seeds: at least one.
        units: ``"same"`` where every seed has the same prompts (a random order, noise, scrambled weights): each
            prompt's value is its mean over the seeds, so that intervals and tests still count prompts and not runs.
            ``"drawn"`` where each seed draws other prompts: the result has all of them.

    Returns:
        An Evaluation with the list of seeds in ``settings["seed"]``.

    Raises:
        InvalidInputError: no seed, a seed twice, or runs that differ in metrics, methods, steps or, of the
            same prompts, in their number.

    >>> from tensorlens_tl import evaluate
    >>> run = lambda seed: evaluate.stability(model, [text], ["ifr"], draws=1, seed=seed)
    >>> result = evaluate.over_seeds(run, seeds=(0, 1))
    >>> result.mean("similarity", "ifr") > 0.5
    True
    """
    chosen = [whole_number("seeds", seed) for seed in seeds] if isinstance(seeds, Iterable) else []
    if not chosen or len(set(chosen)) < len(chosen) or units not in ("same", "drawn"):
        raise InvalidInputError(
            f"over_seeds: seeds={seeds!r}, units={units!r}; pass different seeds, and 'same' or 'drawn'."
        )
    runs = [run(seed) for seed in chosen]
    first = runs[0]
    for seed, other in zip(chosen, runs, strict=True):
        if _shape(other, units) != _shape(first, units):
            raise InvalidInputError(
                f"over_seeds: seed {seed} gives other metrics, methods, steps or units than seed {chosen[0]}."
            )
    curves = [result.curves for result in runs if result.curves is not None]
    names = first.units
    settings = first.settings | {"seed": chosen}
    if units == "drawn":
        names = [f"seed {seed}, {unit}" for seed, result in zip(chosen, runs, strict=True) for unit in result.units]
        settings |= _counts(runs)

    def together(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=2) if units == "drawn" else torch.stack(parts).nanmean(0)

    values = together([result.values for result in runs])
    return replace(first, values=values, curves=together(curves) if curves else None, units=names, settings=settings)


def _shape(result: Evaluation, units: str) -> tuple[Any, ...]:
    """What must agree between the runs."""
    steps = result.axis is not None and result.axis.tolist()
    shape = (result.kind, result.metrics, result.methods, steps, result.curves is None)
    if units == "same":
        return (*shape, result.units)
    return shape


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
