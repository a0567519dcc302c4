"""Perturbation tests: replace source tokens in the order of their scores, and see what that does to the live model.

With the most relevant tokens first (``order="descending"``, positive perturbation) a faithful map breaks the model
sooner: higher is better. With the least relevant first (``"ascending"``, negative perturbation) it leaves the model as
it was: lower is better. After a share f of a prompt's tokens has been replaced, at the query:

| metric | damage(f) |
| --- | --- |
| `hs_mse` | mean squared difference of the final hidden state (what the model unembeds, or what its blocks give) |
| `aopc` | p(0) − p(f), p the probability of the token that was predicted for the whole prompt |
| `logit` | the same token's logit(0) − logit(f) |

An area under the curve is the trapezoid rule over the fractions, divided by their range: the damage averaged over it.
Special tokens and padding are never replaced. (TensorLens 2026, Figures 3 to 7; AOPC: Samek et al. 2017.)
"""

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
from tensorlens_tl.evaluate.arguments import (
    Fractions,
    Hidden,
    Methods,
    Metrics,
    Order,
    PerturbationQuery,
    ReplacementName,
)
from tensorlens_tl.evaluate.perturbed_runs import PREDICTED, PerturbedRuns
from tensorlens_tl.evaluate.scorers import MEAN_TOLERANCE, Scorer, random_scores, scorers_of, usable
from tensorlens_tl.models import ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import InputLike, Prompt, prepare, query_positions
from tensorlens_tl.passes.operator import logit_label
from tensorlens_tl.passes.replacement import Replacement
from tensorlens_tl.results import Evaluation, area

FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
METRICS = ("hs_mse", "aopc", "logit")
"""The metrics that are measured unless others are named."""

KINDS = {"descending": "positive perturbation", "ascending": "negative perturbation"}
"""What an evaluation is called, by the order of replacement."""

PROMPTS_AT_ONCE = 16


def perturbation(
    model: ModelLike,
    prompts: InputLike,
    methods: Methods = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: PerturbationQuery = "last",
    fractions: Fractions = FRACTIONS,
    replacement: ReplacementName = None,
    metrics: Metrics = METRICS,
    order: Order = "descending",
    absolute: bool = False,
    hidden: Hidden = "unembedded",
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
    memory: Memory = None,
) -> Evaluation:
    """How much damage is done by replacing the tokens that each method names first.

    Args:
        model: a TransformerLens model.
        prompts: strings, or token ids `[prompt, pos]`; of a model of images or sound, what it reads (see
            `tlens.freeze`): its patches are replaced, or a sound's frames.
        methods: see `tensorlens_tl.evaluate.scorers`; None is all that fit the model, and a random order. Methods that
            you name must fit the model. A method without a target ranks tokens in one order for every target.
        target, minus: the token that methods explain and metrics measure, and one that it is compared with (also
            ``"runner-up"``); one for each prompt, or one for all. None is what the model predicts for the whole prompt.
            With `minus`, `logit` and `aopc` are falls of the difference of both logits, or probabilities.
        query: ``"last"``, ``"cls"`` (the first token), a position counted over real tokens, or ``"mean"``: scores and
            final hidden states averaged over all positions (metric `hs_mse` alone; norms of T are then estimated, to
            `MEAN_TOLERANCE`).
        fractions: shares of a prompt's tokens to replace, ascending, the first 0.
        replacement: ``"mask"`` or ``"pad"`` (the tokenizer's), a token (string or id), ``"mean"`` (the token
            embedding's mean over all prompts) or ``"zero"`` (no token embedding; positions stay). None is the mask
            token where there is one, else the mean. Of patches, `"mean"` and `"zero"` are those of what the patch
            embedding gives.
        metrics: of `hs_mse` (mean squared change of the final hidden state), `aopc` (how far the probability of the
            model's first choice falls), `aopc_abs` (the absolute value of that: TensorLens' Table 1), `logit` (how
            far its logit falls).
        order: ``"descending"`` (positive perturbation) or ``"ascending"`` (negative).
        absolute: order by absolute score; the paper and the default keep the sign.
        hidden: which vector `hs_mse` measures: ``"unembedded"``, what the model unembeds, or ``"output"``, what its
            blocks and final norm give. They differ where a prediction head lies between (masked language models).
        attention_mask: 1 at real tokens, with token ids only.
        prepend_bos: as in TransformerLens, with strings only.
        seed: of the random order and of the order of equal scores.
        memory: what the perturbed runs may allocate, as ``"512MB"`` or bytes.

    Returns:
        An Evaluation: areas per prompt in `values`, curves over the fractions.

    Raises:
        InvalidInputError: fractions outside [0, 1] or not ascending, an unknown metric, order or replacement, prompts
            too short for the smallest fraction, or methods that cannot be run with their options.
        UnsupportedModelError: the model cannot be frozen, or a metric needs a prediction and it has none.

    >>> from tensorlens_tl import evaluate
    >>> result = evaluate.perturbation(model, [text], ["tensorlens target", "random"], fractions=(0, 0.5, 1))
    >>> result.curves.shape  # metric, method, prompt, step
    torch.Size([3, 2, 1, 3])
    """
    test = PerturbationTest(methods, query, fractions, metrics, order, absolute, hidden, seed, memory)
    test.check_explained(target, minus)
    view = ModelView(model)
    view.refuse_encoder_decoder("perturbation")
    prompt = prepare(view, prompts, attention_mask=attention_mask, prepend_bos=prepend_bos)
    position = test.query_of(view, prompt)
    runs = test.runs(view, prompt, Replacement.of(view, prompt, replacement), target, minus)
    first = freeze(model, **prompt.again(slice(0, 1)))
    scorers, skipped = usable(test.scorers, first, position, skip=methods is None)
    curves = test.curves(runs, scorers)
    axis = torch.tensor(test.steps, dtype=torch.float64)
    return Evaluation(
        values=area(curves, axis),
        units=[f"prompt {number}" for number in range(len(prompt.tokens))],
        curves=curves,
        axis=axis,
        skipped=skipped,
        **test.described(view, runs.replacement, scorers, len(prompt.tokens), explained_in_words(view, target, minus)),
    )


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
            InvalidInputError: prompts too short for the smallest fraction or for the query.
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

    def runs(
        self,
        view: ModelView,
        prompt: Prompt,
        replacement: Replacement,
        target: TokenLike = None,
        minus: TokenLike = None,
    ) -> PerturbedRuns:
        """The live model on some prompts, checked by `query_of`."""
        query = _query(self.query, prompt)
        of_output = self.hidden == "output"
        return PerturbedRuns(view, prompt, query, replacement, self.names, of_output, self.working_bytes, target, minus)

    def curves(
        self, runs: PerturbedRuns, scorers: Sequence[Scorer], progress: bool = True
    ) -> Float[Tensor, "metric method prompt step"]:
        """The damage done to each prompt after each step."""
        prompt = runs.prompt
        allowed = perturbable(ModelView(runs.model), prompt)
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
        self, view: ModelView, replacement: Replacement, scorers: Sequence[Scorer], prompts: int, target: str = ""
    ) -> dict[str, Any]:
        """What an Evaluation says besides the numbers; `target` is what is explained, where that is named."""
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
        if target:
            settings["target"] = target
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
        return "logit of " + " − ".join(("the prediction", logit_label(view, minus).removeprefix("logit of ")))
    return logit_label(view, target, minus)


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
    """How many tokens each step replaces.

    Raises:
        InvalidInputError: a prompt so short that the smallest fraction replaces none.
    """
    tokens = allowed.sum(1)
    counts = (tokens[:, None] * torch.tensor(steps, dtype=torch.float64) + 0.5).long()
    short = (counts[:, 1] == 0).nonzero()
    if len(short):
        row = int(short[0])
        least = -int(-0.5 // steps[1])
        raise InvalidInputError(
            PromptNumber(row),
            f" has {int(tokens[row])} tokens that may be replaced, and the fraction {steps[1]} of them is "
            f"less than one token: use prompts of {least} or more, or larger fractions.",
        )
    return counts
