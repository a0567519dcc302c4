"""Which scores of nodes and edges hold in the live model, and which circuits do the task?

`patching_agreement` correlates each method's scores with activation patching, the live model's answer, prompt by
prompt. `circuit_faithfulness` chooses circuits by each method's mean scores and runs them, as the Mechanistic
Interpretability Benchmark does (MIB, Mueller et al. 2025). With m(k) the mean logit difference of the circuit of k
edges, all others patched from the corrupted prompt,

    f(k) = (m(k) − m(corrupted)) / (m(clean) − m(corrupted))

| metric | area over the proportions of edges, 0.001 to 1, by trapezoids | circuits take edges by |
| --- | --- | --- |
| `cpr` | ∫ f: how much of the behaviour circuits have; more than all of it counts as more | score |
| `cmd` | ∫ abs(1 − f): how far circuits are from the model's behaviour, lower is better | size of the score |

Both are the benchmark's areas, of means over prompts. A prompt's value is its share of them: its f has the mean
m(clean) − m(corrupted) below it, and its 1 − f the sign of the mean's. The mean over prompts is the benchmark's number.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import Seed, Whole, check_choice, checked_names, nearest, whole_count
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.compare import METHODS, SYNONYMS, edge_scores, patch_scores, run_circuits
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError, warn_caller
from tensorlens_tl.evaluate.checks import correlation, spearman
from tensorlens_tl.evaluate.scorers import PROMPTS_AT_ONCE, RANDOM, Names, predictions
from tensorlens_tl.evaluate.tasks import Pairs, PromptPairs
from tensorlens_tl.models import ModelLike
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.results import CHOICES, EdgeScores, Evaluation, Terms

VARIANTS = {"integrated-gradients, left": {"method": "integrated-gradients", "points": "left"}}
"""Rows that are a method with another option: EAP-IG at the left ends of its steps, as its published code has it."""

ROWS = (
    *METHODS[: METHODS.index("integrated-gradients") + 1],
    *VARIANTS,
    *METHODS[METHODS.index("integrated-gradients") + 1 :],
)
"""The methods of `circuits.patch_scores` and `circuits.edge_scores`, and their variants beside them."""

EDGE_ROWS = tuple(name for name in ROWS if name != "atp*")
"""Those that score edges."""

PROPORTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The benchmark's proportions of edges."""

MIB_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"proportions": PROPORTIONS, "absolute": None, "choice": "top", "only_correct": False}
)
"""Options of `circuit_faithfulness` that give the benchmark's own numbers.

All pairs count, also those that the model answers wrongly. Circuits are ``int(share · edges)`` best edges, pruned, by
score for CPR and by size for CMD. Its EAP-IG is the method ``"integrated-gradients, left"`` with five steps, the
default.
"""

if TYPE_CHECKING:
    PatchedBy = Literal["component", "head", "neuron", "stream", "edge"]
    Choice = Literal["top", "greedy"]
else:
    PatchedBy = Choice = Any  # others are refused with a message

PATCHED_BY = ("component", "head", "neuron", "stream", "edge")
"""What `patching_agreement` compares scores of."""

SAVED_AT = 0.1
"""The proportion of edges that saved circuits have."""


@checked_names
def patching_agreement(
    model: ModelLike,
    pairs: Pairs,
    methods: Names = None,
    *,
    by: PatchedBy = "head",
    only_correct: bool = True,
    steps: Whole = 5,
    memory: Memory = None,
) -> Evaluation:
    """Correlate each method's scores with activation patching in the live model, over nodes or edges.

    The first block's input is no node here: to patch it is to take the other prompt.

    Args:
        model: a TransformerLens model.
        pairs: prompts; see `prompt_pairs`.
        methods: of `circuits.patch_scores`, or with ``by="edge"`` of `circuits.edge_scores`;
            ``"integrated-gradients, left"`` is EAP-IG with ``points="left"``; None is all that the model allows.
        by: as in `circuits.patch_scores`, or ``"edge"``.
        only_correct: leave out pairs of which the model answers one prompt wrongly.
        steps: gradients of ``"integrated-gradients"``.
        memory: what the patching runs may allocate at once.

    Returns:
        An Evaluation with `pearson` and `spearman` per prompt; NaN where scores are all alike.

    Raises:
        InvalidInputError: no pairs, no such method, or no pair that the model answers.

    >>> from tensorlens_tl import evaluate
    >>> pairs = evaluate.prompt_pairs(evaluate.recall(4))
    >>> list(evaluate.patching_agreement(tlens.load_demo_model("recall"), pairs, ["frozen"]).metrics)
    ['pearson', 'spearman']
    """
    check_choice("by", by, PATCHED_BY)
    steps = whole_count("steps", steps)
    known = [name for name in (EDGE_ROWS if by == "edge" else ROWS) if name != "patching"]
    chosen = checked_methods(methods, known)
    work = PairWork(model, pairs, only_correct)
    skipped = dict[str, str]()
    if methods is None:
        chosen, skipped = work.usable(chosen, by)
    correlations: list[Tensor] = []
    for part in work.parts():
        scores = torch.stack([part.scores(by, name, steps=steps, memory=memory) for name in chosen]).double().cpu()
        truth = part.scores(by, "patching", steps=steps, memory=memory).double().cpu()
        centred = (values - values.mean(-1, keepdim=True) for values in (scores, truth))
        every_part = torch.ones_like(truth, dtype=torch.bool)
        ranks_agree = spearman(scores, truth.expand_as(scores), every_part)
        correlations.append(torch.stack([correlation(*centred), ranks_agree]))
    return Evaluation(
        kind=f"agreement with patching: {work.pairs.name}, by {by}",
        values=torch.cat(correlations, dim=-1),
        metrics={"pearson": True, "spearman": True},
        methods=chosen,
        units=work.units,
        settings=work.settings | {"by": by, "steps": steps},
        skipped=skipped,
    )


@checked_names
def circuit_faithfulness(
    model: ModelLike,
    pairs: Pairs,
    methods: Names = None,
    *,
    proportions: Sequence[int | float] = PROPORTIONS,
    absolute: bool | None = None,
    choice: Choice = "top",
    only_correct: bool = True,
    steps: Whole = 5,
    seed: Seed = 0,
    folder: str | Path | None = None,
    memory: Memory = None,
) -> Evaluation:
    """Measure CPR and CMD of the circuits that each method chooses, with the curves of f.

    f is the share of the behaviour that circuits of growing size have; `cpr` is its area, and `cmd` the area of
    abs(1 − f), how far circuits are from the model; lower is better.

    Args:
        model: a TransformerLens model with pre-LN blocks.
        pairs: prompts; see `prompt_pairs`.
        methods: of `circuits.edge_scores`, ``"integrated-gradients, left"`` (EAP-IG with ``points="left"``) and
            ``"random"``; None is all but ``"patching"``, which runs the model once for each edge.
        proportions: of all edges, rising to 1.
        absolute: whether circuits take edges by size; None takes them by score for CPR and by size for CMD.
        choice: ``"top"`` or ``"greedy"``; see `EdgeScores.circuit`.
        only_correct: leave out pairs of which the model answers one prompt wrongly; the benchmark does not, see
            `MIB_OPTIONS`.
        steps: gradients of ``"integrated-gradients"``.
        seed: of the random scores.
        folder: where to save each method's scores and its circuit of a tenth of the edges, by size, in the
            benchmark's JSON.
        memory: what runs of circuits may allocate at once.

    Raises:
        InvalidInputError: no pairs, no such method or choice, proportions that do not rise to 1, no such folder, no
            pair that the model answers, or two prompts that give one mean logit difference.
        UnsupportedModelError: what `circuits.edge_scores` raises.

    >>> from tensorlens_tl import evaluate
    >>> model, pairs = tlens.load_demo_model("recall"), evaluate.prompt_pairs(evaluate.recall(4))
    >>> list(evaluate.circuit_faithfulness(model, pairs, ["frozen"], proportions=(0.1, 1)).metrics)
    ['cpr', 'cmd']
    """
    axis = _axis(proportions)
    check_choice("choice", choice, CHOICES)
    steps = whole_count("steps", steps)
    if folder is not None and not Path(folder).is_dir():
        if Path(folder).exists() or not Path(folder).parent.is_dir():
            raise InvalidInputError(f"folder: {folder} is a file, or there is no folder to make it in.")
        Path(folder).mkdir()
    chosen = checked_methods(
        methods, [*EDGE_ROWS, RANDOM], [name for name in (*EDGE_ROWS, RANDOM) if name != "patching"]
    )
    work = PairWork(model, pairs, only_correct)
    parts = work.parts()
    scores = {name: _mean_scores(parts, name, steps, seed, memory) for name in chosen}
    if folder is not None:
        for name, method_scores in scores.items():
            method_scores.circuit(int(SAVED_AT * len(method_scores))).save(Path(folder) / f"{name}.json")
    sizes = [False, True] if absolute is None else [absolute]
    circuits = [
        method_scores.circuit(int(share * len(method_scores)), absolute=size, choice=choice)
        for size in sizes
        for method_scores in scores.values()
        for share in axis.tolist()
    ]
    differences = torch.cat(
        [run_circuits(p.clean, p.corrupted, circuits, p.target, p.minus, memory=memory) for p in parts], dim=1
    )
    by_size = differences.double().cpu().unflatten(0, (len(sizes), len(chosen), len(axis))).mT
    first = next(iter(scores.values()))
    clean, corrupted = (numbers.double().cpu() for numbers in (first.clean, first.corrupted))
    gap = (clean - corrupted).mean()
    if not float(gap.abs()) > 1e-6 * float((clean.abs() + corrupted.abs()).mean()):
        raise InvalidInputError(
            f"circuit_faithfulness: clean and corrupted prompts give the same mean logit difference ({float(gap):.1e} "
            "apart), so that faithfulness has no unit. Corrupt the prompts so that the answer changes."
        )
    faithfulness = (by_size[0] - corrupted[:, None]) / gap
    distance = (clean[:, None] - by_size[-1]) / gap
    curves = torch.stack([faithfulness, distance * distance.mean(1, keepdim=True).sign()])
    return Evaluation(
        kind=f"circuits: {work.pairs.name}",
        values=torch.trapezoid(curves, axis, dim=-1),
        metrics={"cpr": True, "cmd": False},
        methods=chosen,
        units=work.units,
        curves=curves,
        axis=axis,
        axis_name="proportion of edges",
        settings=work.settings
        | {"edges": len(first), "choice": choice, "absolute": absolute, "steps": steps, "seed": seed},
    )


# ------------------------------------------------------------------ prompts


class FrozenPairs:
    """Some pairs, frozen; and their scores by one of `ROWS`, with options of the functions of `circuits`."""

    def __init__(self, model: ModelLike, pairs: PromptPairs, verify: bool) -> None:
        self.clean: FrozenPass = freeze(model, pairs.clean, verify=verify)
        self.corrupted: FrozenPass = freeze(model, pairs.corrupted, verify=verify)
        self.target = pairs.target.tolist()
        self.minus = pairs.minus.tolist()

    def nodes(self, row: str, **options: Any) -> Terms:
        """See `circuits.patch_scores`."""
        method = VARIANTS.get(row, {"method": row})
        return patch_scores(self.clean, self.corrupted, self.target, self.minus, **method, **options)

    def edges(self, row: str, **options: Any) -> EdgeScores:
        """See `circuits.edge_scores`."""
        method = VARIANTS.get(row, {"method": row})
        return edge_scores(self.clean, self.corrupted, self.target, self.minus, **method, **options)

    def scores(self, by: str, row: str, **options: Any) -> Float[Tensor, "batch part"]:
        """Scores of every node or edge; the first block's input is no node."""
        if by == "edge":
            edges = self.edges(row, **options)
            return edges.scores[:, edges.exists]
        return self.nodes(row, by=by, **options).scores[:, 0, 1:]


class PairWork:
    """The pairs that are measured, and their settings in an Evaluation."""

    def __init__(self, model: ModelLike, pairs: Pairs, only_correct: bool) -> None:
        if not isinstance(pairs, PromptPairs):
            raise InvalidInputError(
                f"pairs={type(pairs).__name__}: pass PromptPairs, such as evaluate.prompt_pairs(evaluate.recall())."
            )
        answered = self._answered(model, pairs)
        if only_correct and not bool(answered.any()):
            raise InvalidInputError(
                f"{pairs.name}: the model answers both prompts of none of these {len(pairs)} pairs, so there is "
                "nothing to explain. Use a model trained on the task, or only_correct=False."
            )
        numbers = torch.arange(len(pairs))
        if only_correct:
            numbers = numbers[answered]
        self.model = model
        self.pairs = pairs.only(numbers)
        self.units = [f"prompt {number}" for number in numbers.tolist()]
        self.settings: dict[str, Any] = {
            **freeze(model, pairs.clean[:1]).view.provenance(),
            "pairs": pairs.name,
            "prompts": len(pairs),
            "dropped": len(pairs) - len(numbers),
            "accuracy": float(answered.double().mean()),
        }

    @staticmethod
    def _answered(model: ModelLike, pairs: PromptPairs) -> Bool[Tensor, "prompt"]:
        """Whether the model answers both prompts of each pair."""
        answered = []
        for start in range(0, len(pairs), PROMPTS_AT_ONCE):
            part = slice(start, start + PROMPTS_AT_ONCE)
            clean, _ = predictions(freeze(model, pairs.clean[part], verify=False))
            corrupted, _ = predictions(freeze(model, pairs.corrupted[part], verify=False))
            clean_answered = clean.cpu() == pairs.target[part]
            corrupted_answered = corrupted.cpu() == pairs.minus[part]
            answered.append(clean_answered & corrupted_answered)
        return torch.cat(answered)

    def usable(self, methods: Sequence[str], by: str) -> tuple[list[str], dict[str, str]]:
        """The methods that this model allows, and why not the others, tried on one pair."""
        part = FrozenPairs(self.model, self.pairs.only(torch.arange(1)), verify=True)
        names = list[str]()
        refused = {}
        for name in methods:
            try:
                part.scores(by, name, steps=1)
                names.append(name)
            except UnsupportedModelError as error:
                refused[name] = str(error)
        if not names:
            raise UnsupportedModelError(f"no method fits this model: {refused}")
        return names, refused

    def parts(self) -> list[FrozenPairs]:
        """The pairs, some at a time, frozen."""
        numbers = torch.arange(len(self.pairs)).split(PROMPTS_AT_ONCE)
        return [FrozenPairs(self.model, self.pairs.only(part), verify=index == 0) for index, part in enumerate(numbers)]


# ------------------------------------------------------------------ scores


def checked_methods(methods: Names, known: Sequence[str], default: Sequence[str] | None = None) -> list[str]:
    """The methods of an evaluation, all known and none twice; None is `default`, or all that are known."""
    if methods is None:
        methods = default or known
    if isinstance(methods, str):
        methods = [methods]
    if not isinstance(methods, Iterable):
        raise InvalidInputError(f"methods={methods!r}: pass a list, some of {', '.join(map(repr, known))}.")
    chosen = [re.sub(r"^integrated(?=$|,)", "integrated-gradients", name) for name in methods]
    for name, old in zip(chosen, methods, strict=True):
        if name != old:
            warn_caller(f"methods: {old!r} is {name!r} now; the old name goes in version 0.3.", DeprecationWarning)
        if name not in known:
            near = nearest(name, known, SYNONYMS | {"eap-ig": "integrated-gradients, left"})
            raise InvalidInputError(f"methods: {name!r}; use some of {', '.join(map(repr, known))}.{near}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise InvalidInputError("methods: none, or one is there twice.")
    return chosen


def _axis(proportions: Sequence[int | float]) -> Float[Tensor, "step"]:
    try:
        axis = torch.as_tensor(list(proportions), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        axis = torch.zeros(0)
    if len(axis) < 2 or not bool((axis.diff() > 0).all()) or float(axis[0]) < 0 or float(axis[-1]) != 1:
        raise InvalidInputError(f"proportions={proportions!r}: rising shares of all edges, at least two, up to 1.")
    return axis


def _mean_scores(parts: Sequence[FrozenPairs], method: str, steps: int, seed: int, memory: Memory) -> EdgeScores:
    """One method's edge scores of all prompts."""
    row = "frozen" if method == RANDOM else method  # for the edges, whose random scores are drawn below
    results = [part.edges(row, steps=steps, memory=memory) for part in parts]
    first = results[0]
    scores = torch.cat([result.scores for result in results])
    if method == RANDOM:
        noise = torch.randn(first.exists.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scores = (noise.to(scores) * first.exists).expand_as(scores)
    return EdgeScores(
        first.sources,
        first.destinations,
        scores,
        first.exists,
        torch.cat([result.clean for result in results]),
        torch.cat([result.corrupted for result in results]),
        first.target,
        method,
        first.config,
        provenance=first.provenance,
    )
