"""A perturbation test: what is measured of prompts, and which of their tokens are replaced at each step."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.evaluate.arguments import Fractions, Hidden, Methods, Metrics, Order, PerturbationQuery, WholeNumber
from tensorlens_tl.evaluate.perturbed_runs import PREDICTED, PerturbedRuns
from tensorlens_tl.evaluate.resampling import RESAMPLED, drawn
from tensorlens_tl.evaluate.scorers import MEAN_TOLERANCE, Scorer, random_scores, scorers_of
from tensorlens_tl.models import FIRST_CHOICE, ModelView, TokenLike
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import Prompt, query_positions
from tensorlens_tl.passes.operator import logit_label
from tensorlens_tl.passes.replacement import Replacement

FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
METRICS = ("hs_mse", "aopc", "logit")
"""The metrics that are measured unless others are named."""

KINDS = {"descending": "positive perturbation", "ascending": "negative perturbation"}
"""What an evaluation is called, by the order of replacement."""

PROMPTS_AT_ONCE = 16


@dataclass(frozen=True)
class PerturbationTest:
    """What is measured of prompts; see `perturbation` for each option. It can be pickled where its scorers can.

    Attributes:
        scorers: the methods.
        steps: the shares of tokens that are replaced.
        names: of the metrics.
        working_bytes: what perturbed runs may allocate.

    Raises:
        InvalidInputError: see `perturbation`.
    """

    methods: InitVar[Methods]
    query: PerturbationQuery
    fractions: InitVar[Fractions]
    metrics: InitVar[Metrics]
    order: Order
    absolute: bool
    hidden: Hidden
    seed: int
    draws: WholeNumber
    memory: InitVar[Memory]
    scorers: list[Scorer] = field(init=False)
    steps: list[float] = field(init=False)
    names: list[str] = field(init=False)
    working_bytes: int = field(init=False)

    def __post_init__(self, methods: Methods, fractions: Fractions, metrics: Metrics, memory: Memory) -> None:
        checked = {
            "scorers": scorers_of(methods, seed=self.seed),
            "steps": _fractions(fractions),
            "names": _metrics(metrics, self.query),
            "working_bytes": in_bytes(memory),
            "draws": whole_number("draws", self.draws, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.order not in ("descending", "ascending"):
            raise InvalidInputError(f"order={self.order!r}; use 'descending' (most relevant first) or 'ascending'.")
        if self.hidden not in ("unembedded", "output"):
            raise InvalidInputError(
                f"hidden={self.hidden!r}; use 'unembedded' or 'output' (what blocks and final norm give)."
            )

    def query_of(self, view: ModelView, prompt: Prompt) -> int | Literal["all"]:
        """The query of some prompts as methods take it, "all" for the mean; prompts and model are checked.

        Raises:
            InvalidInputError: prompts of special tokens alone, or too short for the query.
            UnsupportedModelError: a metric needs a prediction, and the model has none.
        """
        query = _query(self.query, prompt)
        predicts = bool(set(PREDICTED) & set(self.names))
        if predicts and query != "all":
            prompt.in_logits(query_positions(prompt, query))
        if predicts and view.unembedding is None:
            raise UnsupportedModelError(f"{view.description} predicts no tokens; use metrics=['hs_mse'].")
        _counts(perturbable(view, prompt), self.steps)
        return query

    def check_explained(self, target: TokenLike, minus: TokenLike) -> None:
        """Refuse tokens that this test cannot be about.

        Raises:
            InvalidInputError: a mean over queries, or a method that holds no token against another.
        """
        if self.query == "mean" and (target is not None or minus is not None):
            raise InvalidInputError("query='mean' has no single prediction; leave target= and minus= out.")
        if minus is not None:
            for scorer in self.scorers:
                scorer.check_minus()

    def check_generated(self, minus: TokenLike) -> None:
        """Refuse what cannot be measured of a stretch of generated text.

        Raises:
            InvalidInputError: another query, or a method that explains no such stretch; names it.
        """
        if self.query != "last":
            raise InvalidInputError(
                f"query={self.query!r}: span= chooses among the generated tokens; leave query= out."
            )
        for scorer in self.scorers:
            scorer.check_stretch()
            if minus is not None:
                scorer.check_minus()

    def runs(
        self,
        view: ModelView,
        prompt: Prompt,
        replacement: Replacement,
        target: TokenLike = None,
        minus: TokenLike = None,
        query: Int[Tensor, "prompt query"] | None = None,
    ) -> PerturbedRuns:
        """The live model on some prompts, checked by `query_of`; or at the queries of a stretch of generated text."""
        replacements = drawn(view, prompt, replacement, int(self.draws), self.seed)
        at = _query(self.query, prompt) if query is None else query
        of_output = self.hidden == "output"
        return PerturbedRuns(view, prompt, at, replacements, self.names, of_output, self.working_bytes, target, minus)

    def curves(
        self, runs: PerturbedRuns, scorers: Sequence[Scorer], progress: bool = True
    ) -> Float[Tensor, "metric method prompt step"]:
        """The damage done to each prompt after each step."""
        prompt = runs.prompt
        allowed = replaceable(runs)
        counts = _counts(allowed, self.steps)
        curves = torch.zeros(len(self.names), len(scorers), len(prompt.tokens), len(self.steps), dtype=torch.float64)
        ties_of = random_scores(self.seed)
        at_once = 1 if runs.alone else PROMPTS_AT_ONCE
        starts = range(0, len(prompt.tokens), at_once)
        for start in tqdm(starts, desc="perturbation", leave=False, delay=2.0, disable=not progress):
            part = slice(start, start + at_once)
            frozen = freeze(runs.model, **prompt.again(part))
            ties = ties_of(frozen).cpu()  # those of a prompt do not depend on its batch
            for number, scorer in enumerate(scorers):
                scores = scorer(frozen, runs.query, runs.explained(part)).cpu()
                if self.absolute:
                    scores = scores.abs()
                ranks = rank(scores, allowed[part], self.order, ties)
                # nothing is replaced at the first step, and no damage done
                curves[:, number, part, 1:] = runs.damage(part, ranks[:, None] < counts[part, 1:, None])
        return curves

    def described(
        self,
        view: ModelView,
        replacement: Replacement,
        scorers: Sequence[Scorer],
        prompts: int,
        target: str = "",
        span: str = "",
    ) -> dict[str, Any]:
        """What an Evaluation says besides the numbers.

        Args:
            view: the model.
            replacement: what tokens were replaced by.
            scorers: the methods.
            prompts: their number.
            target: what is explained, where that is named.
            span: which generated tokens that is about.
        """
        settings = {
            **view.provenance(),
            "prompts": prompts,
            "query": self.query,
            "replacement": replacement.name,
            "order": self.order,
            "absolute": self.absolute,
            "hidden": self.hidden,
            "seed": self.seed,
            "biases": "methods without 'biases' in their label leave the model's biases out of the scores, as the "
            "paper",
        }
        if replacement.name == RESAMPLED:
            settings["draws"] = self.draws
        if target:
            settings["target"] = target
        if span:
            settings["query"] = f"span {span}"
        if self.query == "mean" and any(scorer.estimates_norms for scorer in scorers):
            settings["norms"] = f"estimated by random rows to a relative standard error of {MEAN_TOLERANCE:g}"
        return {
            "kind": KINDS[self.order],
            "metrics": dict.fromkeys(self.names, self.order == "descending"),
            "methods": [scorer.label for scorer in scorers],
            "axis_name": "share of tokens replaced",
            "settings": settings,
        }


def explained_in_words(view: ModelView, target: TokenLike, minus: TokenLike) -> str:
    """What methods explain and metrics measure, where a token is named."""
    if target is None and minus is None:
        return ""
    if target is None:
        target = FIRST_CHOICE
    return logit_label(view, target, minus, capped=True)


def replaceable(runs: PerturbedRuns) -> Bool[Tensor, "prompt pos"]:
    """True at the tokens of these runs that may be replaced; of generated text, those before the stretch."""
    allowed = perturbable(ModelView(runs.model), runs.prompt)
    if not runs.is_stretch or runs.positions is None:
        return allowed
    first = runs.positions[:, :1].cpu()
    return allowed & (torch.arange(allowed.shape[1]) <= first)


def rank(
    scores: Float[Tensor, "batch pos"],
    allowed: Bool[Tensor, "batch pos"],
    order: str = "descending",
    ties: Float[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, "batch pos"]:
    """Each token's rank in the order of replacement, from 0; tokens that are not allowed come after all others.

    Equal scores are ordered by `ties`, by position without them. Reversing the order reverses the ranks.
    """
    if ties is None:
        ties = torch.arange(scores.shape[1]).expand_as(scores)
    by_ties = ties.argsort(dim=1)
    key = scores.gather(1, by_ties)
    ordered = by_ties.gather(1, key.argsort(dim=1, stable=True))  # ascending
    if order == "descending":
        ordered = ordered.flip(1)
    forbidden = ~allowed.gather(1, ordered)
    ordered = ordered.gather(1, forbidden.long().argsort(dim=1, stable=True))
    return ordered.argsort(dim=1)


def perturbable(view: ModelView, prompt: Prompt) -> Bool[Tensor, "prompt pos"]:
    """True at tokens that may be replaced: neither padding nor special tokens (of an image, all but its patches)."""
    tokenizer = view.tokenizer
    if view.reads != "tokens":
        return (prompt.mask & (prompt.tokens >= prompt.special)).cpu()
    special = torch.tensor(sorted(getattr(tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    return (prompt.mask.cpu() & ~torch.isin(prompt.tokens.cpu(), special)).clone()


# ------------------------------------------------------------------------------------------- checks


def _fractions(fractions: Fractions) -> list[float]:
    try:
        steps = [float(f) for f in fractions]
    except (TypeError, ValueError):
        raise InvalidInputError(f"fractions={fractions!r}: pass shares such as (0, 0.1, 0.2).") from None
    if len(steps) < 2 or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)) or steps[-1] > 1:
        raise InvalidInputError(f"fractions={steps}: pass at least two shares in [0, 1], ascending, the first 0.")
    return steps


def _metrics(metrics: Metrics, query: PerturbationQuery) -> list[str]:
    if isinstance(metrics, str):
        metrics = [metrics]
    names = list[str](metrics)
    known = ("hs_mse", *PREDICTED)
    unknown = [metric for metric in names if metric not in known]
    if unknown or not names:
        raise InvalidInputError(f"metrics={names!r}; use some of {', '.join(map(repr, known))}.")
    if query != "mean":
        return names
    if tuple(names) not in (METRICS, ("hs_mse",)):
        raise InvalidInputError("query='mean' has no single prediction; use metrics=['hs_mse'], or one query.")
    return ["hs_mse"]


def _query(query: PerturbationQuery, prompt: Prompt) -> int | Literal["all"]:
    """The query as the methods take it: an integer, or "all" for the mean."""
    if isinstance(query, str):
        known: dict[str, int | Literal["all"]] = {"last": -1, "cls": 0, "mean": "all"}
        if query not in known:
            raise InvalidInputError(f"query={query!r}; use 'last', 'cls', 'mean' or a position.")
        return known[query]
    position = whole_number("query", query, why="or 'last', 'cls', 'mean'")
    query_positions(prompt, position)
    return position


def _counts(allowed: Bool[Tensor, "prompt pos"], steps: Sequence[float]) -> Int[Tensor, "prompt step"]:
    """How many tokens each step replaces: its share rounded, and at least one, so that short prompts need no others.

    Raises:
        InvalidInputError: a prompt of which no token may be replaced.
    """
    tokens = allowed.sum(1)
    counts = (tokens[:, None] * torch.tensor(steps, dtype=torch.float64) + 0.5).long()
    counts[:, 1:].clamp_(min=1)
    empty = (tokens == 0).nonzero()
    if len(empty):
        raise InvalidInputError(
            PromptNumber(int(empty[0])), " has no token that may be replaced: all are special tokens or padding."
        )
    return counts
