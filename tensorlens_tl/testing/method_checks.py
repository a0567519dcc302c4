"""The conformance battery of methods: what any method, ours or yours, must hold on any model.

>>> from tensorlens_tl.testing import check_method
>>> refusals = check_method("globenc", ["bridge/gpt2", "bridge/neox"])
>>> print(refusals["bridge/neox"][:18])
globenc: undefined
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tensorlens_tl.errors import (
    ConformanceError,
    FrozenModelError,
    InvalidInputError,
    NumericalError,
    TensorLensError,
    UnsupportedModelError,
)
from tensorlens_tl.models import ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import FrozenPass, difference
from tensorlens_tl.registry import attribute, get_method
from tensorlens_tl.results import Attribution
from tensorlens_tl.testing.models import Models, as_list, labelled, random_input
from tensorlens_tl.testing.requirements import (
    COARSEST,
    ROUNDING,
    Check,
    Side,
    Untouched,
    activation_change,
    checks_of,
    frozen_rows,
    named,
    precision,
    real_positions,
    require,
    same,
)

if TYPE_CHECKING:
    import pandas as pd


class Residual(NamedTuple):
    """The largest relative difference that a check measured, and what it allows; none where it compares no numbers."""

    measured: float | None = None
    allowed: float | None = None

    @property
    def share(self) -> float:
        """The measured part of what is allowed; below zero where nothing was measured."""
        if self.measured is None or not self.allowed:
            return -1.0
        return self.measured / self.allowed

    def __str__(self) -> str:
        return "ok" if self.measured is None else f"{self.measured:.1e}"


class MethodReport(dict[str, str]):
    """The models that a method does not support, with its messages; and what was measured on the others.

    >>> from tensorlens_tl.testing import check_method
    >>> report = check_method("rollout", ["bridge/gpt2", "bridge/neox"])
    >>> dict(report), len(report.to_dataframe())
    ({}, 14)

    Attributes:
        method: the method's name.
        residuals: by model, the checks and the largest relative difference of each.
    """

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.residuals: dict[str, dict[str, Residual]] = {}

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per model and check: the largest relative difference that was measured, and what is allowed."""
        import pandas as pd

        rows = [
            (model, name, *residual) for model, checks in self.residuals.items() for name, residual in checks.items()
        ]
        return pd.DataFrame(rows, columns=["model", "check", "measured", "allowed"])

    def __repr__(self) -> str:
        models = len(self.residuals) + len(self)
        lines = [f"{self.method} holds on {len(self.residuals)} of {models} models; the largest relative differences:"]
        width = max(map(len, [*self.residuals, *self]), default=0)
        for model, checks in self.residuals.items():
            said = ", ".join(f"{name} {residual}" for name, residual in checks.items())
            lines.append(f"  {model:<{width}}  {said}")
        lines += [f"  {model:<{width}}  refused: {why}" for model, why in self.items()]
        return "\n".join(lines)


if TYPE_CHECKING:
    Result = Attribution
else:
    Result = Any  # what is wrong with a result is said by `check_attribution`

LENGTH = 6
SHORT = 4
EVERY_LAYOUT = [f"bridge/{family}" for family in ("gpt2", "llama", "neox", "bert", "opt", "gemma2", "olmo2")]
"""Pre, parallel, post, sandwich and post-only blocks; LayerNorm and RMSNorm; plain, gated, grouped-query."""


def check_method(
    name: str,
    models: Models = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    options: dict[str, Any] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> MethodReport:
    """Put a registered method through everything that a result of this library promises: all of `METHOD_CHECKS`.

    Shapes and axes, finite and repeatable scores, a batch that equals its prompts one by one, padding without any
    effect, causality, declared additivity, files, errors of the library's own, and an unchanged model: hooks,
    gradients, weights and modes.

    Args:
        name: a registered method.
        models: a model, or several models or names of `model_names()`, best in float64; None takes one of every layout.
        target, minus: of a method that explains a prediction, as in `FrozenOperator.target`. An id or
            ``"first-choice"`` suits models of any vocabulary.
        options: the method's further options.
        tolerance: largest relative difference; None takes 1e-9, or a hundred times what the model's own proof measures
            where that is more (norms that compute in float32).
        seed: of the random tokens.

    Returns:
        What was checked on each model, with the largest difference: print it. As a dictionary it holds the models that
        the method does not support, with its messages; it is empty if the method runs everywhere.

    Raises:
        ConformanceError: naming what does not hold, and where.
        InvalidInputError: a target that is among the options as well.
    """
    options = _with_target(options, target=target, minus=minus)
    report = MethodReport(name)
    for label, model in _labelled(models):
        case = MethodCase(name, model, label, options, tolerance, seed)
        for check in METHOD_CHECKS:
            _on(check, case)
        if case.refusal is not None:
            report[label] = case.refusal
        else:
            report.residuals[label] = case.residuals
    return report


def method_checks(
    name: str,
    models: Models = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    options: dict[str, Any] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> list[Check]:
    """The same, one by one, for `parametrize_with_checks`; on a model that the method refuses they hold as well."""
    options = _with_target(options, target=target, minus=minus)
    checks = []
    for label, model in _labelled(models):
        case = partial(MethodCase, name, model, label, options, tolerance, seed)
        checks += checks_of(METHOD_CHECKS, case, label, _on)
    return checks


def _with_target(options: dict[str, Any] | None, **question: TokenLike) -> dict[str, Any]:
    """A method's options with the tokens that it explains."""
    options = dict(options or {})
    for name, token in question.items():
        if token is None:
            continue
        if name in options:
            raise InvalidInputError(f"{name}: it is among the options as well; leave one out.")
        options[name] = token
    return options


def _on(check: Callable[["MethodCase"], None], case: "MethodCase") -> None:
    """Run a check that must leave the model as it was."""
    with Untouched(case.model, case.who):
        try:
            if case.refusal is None:
                case.begin(named(check))
                check(case)
        except TensorLensError:
            raise
        except Exception as error:
            raise ConformanceError(f"{case.who}: {type(error).__name__}: {error}") from error


def _labelled(models: Models) -> Iterator[tuple[str, ModelLike | str]]:
    for number, model in enumerate(as_list(models, EVERY_LAYOUT)):
        label, _ = labelled(model)
        if not isinstance(model, str):
            label = f"{label} {number}"
        yield label, model


class MethodCase:
    """One method on one model, with two random prompts."""

    def __init__(
        self, name: str, model: ModelLike | str, label: str, options: dict[str, Any], tolerance: float | None, seed: int
    ) -> None:
        self.name = name
        self.options = options
        self.who = f"{name} on {label}"
        self._tolerance = tolerance
        self.residuals: dict[str, Residual] = {}
        self._check = ""
        self.model = labelled(model)[1]()
        generator = torch.Generator().manual_seed(seed)
        self.tokens = random_input(self.model, LENGTH, generator)
        self.encoder = 0
        if ModelView(self.model).is_encoder_decoder:
            self.encoder = LENGTH // 2

    def begin(self, check: str) -> None:
        """Name the check whose differences are measured next."""
        self._check = check
        self.residuals[check] = Residual()

    def note(self, measured: float, allowed: float) -> None:
        """Store a difference that a check measured, if it is the one nearest to what is allowed."""
        residual = Residual(measured, allowed)
        if residual.share > self.residuals.get(self._check, Residual()).share:
            self.residuals[self._check] = residual

    @cached_property
    def frozen(self) -> FrozenPass:
        """Both prompts."""
        return self.freeze(self.tokens)

    def freeze(self, tokens: Tensor, mask: Tensor | None = None, encoder: int | None = None) -> FrozenPass:
        """A pass of other tokens; of an encoder–decoder the first of them are the encoder's."""
        if encoder is None:
            encoder = self.encoder
        return frozen_rows(self.model, tokens, encoder, mask)

    @property
    def length(self) -> int:
        """Positions of a prompt."""
        return self.frozen.tokens.shape[1]

    @cached_property
    def tolerance(self) -> float:
        """The largest relative difference."""
        if self._tolerance is None:
            return precision(self.frozen)
        return self._tolerance

    def allowed_gap(self, frozen: FrozenPass) -> float:
        """The largest gap of a sum: what attention scores lose that a method computes again, some models in float32."""
        if not get_method(self.name).explains_differences:
            return self.tolerance
        return max(self.tolerance, difference(frozen, frozen).rounding)

    @cached_property
    def refusal(self) -> str | None:
        """Why the method refuses the model; None where it does not."""
        try:
            _ = self.result
        except UnsupportedModelError as refusal:
            return str(refusal)
        return None

    @cached_property
    def result(self) -> Attribution:
        """What the method gives by default."""
        return self.attribution(self.frozen)

    def attribution(self, frozen: FrozenPass, **more: Any) -> Attribution:
        """What the method gives for a pass."""
        return attribute(frozen, method=self.name, **{**self.options, **more})

    def require(self, holds: bool, message: str) -> None:
        """Raise unless it holds, naming method and model."""
        require(holds, f"{self.who}: {message}")

    def same(self, mine: Tensor, theirs: Tensor, what: str, at_least: float = 0.0) -> None:
        """Raise unless both agree, naming method and model."""
        allowed = min(max(10 * self.allowed_gap(self.frozen), at_least), 2 * COARSEST)
        self.note(same(mine, theirs, allowed, f"{self.who}: {what}"), allowed)

    def refused(self, error: type[Exception], what: str, call: Callable[[], object]) -> None:
        """Raise unless a call is refused, with an error of the library and some words."""
        try:
            call()
        except error as refusal:
            self.require(len(str(refusal)) > 20, f"refuses {what} with no more than {str(refusal)!r}.")
            return
        except Exception as other:
            message = f"{self.who}: refuses {what} with {type(other).__name__}, not {error.__name__}."
            raise ConformanceError(message) from other
        self.require(False, f"takes {what}; raise {error.__name__}.")


def check_result(case: MethodCase) -> None:
    """Shapes, finite scores, padding, causality, additivity, files."""
    allowed = case.allowed_gap(case.frozen)
    check_attribution(case.result, case.frozen, tolerance=allowed)
    if case.result.additive and case.result.gap is not None:
        case.note(float(case.result.gap.max()), allowed)


def check_repeatable(case: MethodCase) -> None:
    """Twice on one pass, and on a pass made again: to the last bit."""
    again = case.attribution(case.frozen)
    case.require(torch.equal(case.result.scores, again.scores), "two runs on one pass differ.")
    anew = case.attribution(case.freeze(case.tokens))
    case.require(torch.equal(case.result.scores, anew.scores), "two passes over one prompt differ.")


def check_one_by_one(case: MethodCase) -> None:
    """A batch is its prompts one by one."""
    for row in range(2):
        alone = case.attribution(case.freeze(case.tokens[row : row + 1]), **_per_prompt(case.options, row))
        case.same(case.result.scores[row], alone.scores[0], "a batch differs from its prompts one by one")


def check_causality(case: MethodCase, result: Attribution | None = None, **more: Any) -> None:
    """In a causal model the queries before a token do not know of it; `result` is of the options `more`."""
    if not case.frozen.causal:
        return
    result = case.result if result is None else result
    tokens = case.tokens.clone()
    tokens[:, -1] = (tokens[:, -1] + 1) % case.model.cfg.d_vocab
    other = case.attribution(case.freeze(tokens), **more)
    for row in range(2):
        before = result.queries[row] < case.length - 1
        mine, theirs = (_pairs_first(r)[row][before.to(r.scores.device)] for r in (result, other))
        if len(mine):
            case.same(mine, theirs, "a query's scores change with a token after it")


def check_every_query(case: MethodCase) -> None:
    """Queries beside the default one: each asked alone is what it is among all, and none knows a later token."""
    if "query" not in get_method(case.name).options or "query" in case.options:
        return
    frozen = case.frozen
    last = case.length - 1
    try:
        whole = case.attribution(frozen, query="all")
    except InvalidInputError:  # one query at a time, or the one that a classifier reads its classes at
        whole = None
    at = frozen.prompt.class_at
    if whole is None or (at is not None and whole.target != case.result.target):  # nothing is predicted elsewhere
        first = case.encoder  # the encoder's own positions predict nothing
        queries = (at,)
        if at is None:
            queries = (first, max(first + 1, last // 2))
        rows = {query: case.attribution(frozen, query=query) for query in queries}
    else:
        check_attribution(whole, frozen, tolerance=case.allowed_gap(frozen))
        check_causality(case, whole, query="all")
        rows = {}
        at = case.result.queries[..., None].expand(-1, -1, _pairs_first(whole).shape[2])
        if _pairs_first(whole).ndim == 3:
            expected = torch.take_along_dim(_pairs_first(whole), at.to(whole.scores.device), dim=1)
            case.same(
                _pairs_first(case.result), expected, "what it gives by default is not what query='all' gives there"
            )
        for query in (0, last // 2, last):
            rows[query] = alone = case.attribution(frozen, query=query)
            mine = _pairs_first(alone)[:, 0]
            case.same(mine, _pairs_first(whole)[:, query], f"query={query} is not what query='all' gives there")
        some = case.attribution(frozen, query=[last, 0])
        case.require(some.queries.tolist() == [[last, 0]] * 2, "query=[…] gives other queries.")
        case.same(_pairs_first(some), _pairs_first(whole)[:, [last, 0]], "query=[…] is not what query='all' gives")
    for query, alone in rows.items():
        case.require(alone.queries.tolist() == [[query]] * 2, f"query={query} gives queries {alone.queries.tolist()}.")
        check_attribution(alone, frozen, tolerance=case.allowed_gap(frozen))
        check_causality(case, alone, query=query)


def check_padding(case: MethodCase) -> None:
    """The second prompt cut short and padded is what it is alone, as far as the model's own activations are."""
    if case.frozen.view.reads != "tokens":  # images and sounds of one batch are equally large
        return
    sizes = [LENGTH]
    counts = [SHORT]
    cut_encoder = 0
    if case.encoder:
        sizes = [case.encoder, LENGTH - case.encoder]
        counts = [SHORT // 2] * 2
        cut_encoder = SHORT // 2
    cut = case.tokens[1, real_positions(sizes, counts, "right")]
    short = case.freeze(cut[None], encoder=cut_encoder)
    alone = case.attribution(short, **_per_prompt(case.options, 1))
    sides: tuple[Side, ...] = ("right", "left")
    for side in sides:
        real = real_positions(sizes, counts, side)
        tokens = case.tokens.clone()
        mask = torch.ones_like(case.tokens)
        tokens[1] = 0
        mask[1] = real.to(mask)
        tokens[1, real] = cut
        try:
            frozen = case.freeze(tokens, mask)
        except (UnsupportedModelError, NumericalError):
            continue  # the model itself does not handle such padding
        change = activation_change(frozen, 1, real, short)
        if change > frozen.tolerance:
            continue  # another input to the model, as where positions are counted from the first column
        try:
            padded = case.attribution(frozen)
        except (UnsupportedModelError, NumericalError):
            continue  # refused is not wrong
        check_attribution(padded, frozen, tolerance=case.allowed_gap(frozen))
        mine = _pairs_first(padded)[1]
        theirs = _pairs_first(alone)[0]
        if len(mine) == LENGTH:
            mine = mine[real]
        # sources after the prompt's positions are no tokens, such as a bias
        mine = torch.cat([mine[:, :LENGTH][:, real], mine[:, LENGTH:]], dim=1)
        case.same(mine, theirs, f"padding on the {side} changes the scores", at_least=ROUNDING * change)


def check_refusals(case: MethodCase) -> None:
    """What is wrong is said in the library's own errors."""
    method = get_method(case.name)
    frozen = case.frozen
    if not method.takes_any_option:
        case.refused(
            InvalidInputError, "an option it does not have", lambda: case.attribution(frozen, no_such_option=1)
        )
    if "query" in method.options:
        case.refused(InvalidInputError, "a query out of range", lambda: case.attribution(frozen, query=case.length))
    weights = frozen.capture.weights
    stale_weights = replace(weights, sample=weights.sample + 1)
    stale = replace(frozen, maps=replace(frozen.maps, capture=replace(frozen.capture, weights=stale_weights)))
    case.refused(FrozenModelError, "a pass older than the model's weights", lambda: case.attribution(stale))


METHOD_CHECKS = (
    check_result,
    check_repeatable,
    check_one_by_one,
    check_causality,
    check_every_query,
    check_padding,
    check_refusals,
)
"""Everything a method must hold."""


def check_attribution(result: Result, frozen: FrozenPass, *, tolerance: float = 1e-9) -> None:
    """Check an Attribution of a pass: shapes, finite scores, padding, causality, additivity, files.

    >>> from tensorlens_tl.testing import check_attribution
    >>> check_attribution(tlens.attribute(frozen, method="rollout"), frozen, tolerance=1e-4)

    Args:
        result: the method's result for the pass.
        frozen: the pass.
        tolerance: the largest relative gap of a method that is declared additive.

    Raises:
        ConformanceError: naming what does not hold.
    """
    require(isinstance(result, Attribution), f"the result is {type(result).__name__}, not an Attribution.")
    name = result.method
    batch = len(result.mask)  # an Attribution checks that its own parts fit together
    prompts = len(frozen.tokens)
    require(batch == prompts, f"{name}: a batch axis of {batch} for {prompts} prompts.")
    require(bool(torch.isfinite(result.scores).all()), f"{name}: scores that are not finite.")

    scores = _pairs_first(result)
    real_query = torch.take_along_dim(result.mask, result.queries, dim=1)
    padded = ~(real_query[:, :, None] & result.mask[:, None, :])
    require(not bool(scores[padded].any()), f"{name}: padding gives or receives scores.")
    if frozen.causal:
        ahead = torch.arange(frozen.tokens.shape[1], device=result.queries.device) > result.queries[..., None]
        require(not bool(scores[:, :, : ahead.shape[2]][ahead].any()), f"{name}: scores ahead of the query.")
    if result.additive:
        _additive(result, tolerance)
    with tempfile.TemporaryDirectory() as folder:
        loaded = Attribution.load(result.save(Path(folder) / "result"))
    require(torch.equal(loaded.scores, result.scores.cpu()), f"{name}: saving and loading changes the scores.")


def _additive(result: Attribution, tolerance: float) -> None:
    name = result.method
    if result.bias is None or result.total is None:
        missing = "a bias" if result.bias is None else "a total"
        raise ConformanceError(f"{name}: declared additive, but without {missing}.")
    off = (result.scores.sum(-1) + result.bias - result.total).abs()
    size = result.scores.abs().sum(-1) + result.bias.abs()
    worst = float((off / size.clamp_min(1e-30)).max())
    require(worst <= tolerance, f"{name}: declared additive, but off by {worst:.1e}.")


def _per_prompt(options: dict[str, Any], row: int) -> dict[str, Any]:
    """Options that name one thing for each prompt, cut to one of the prompts."""
    lists = {name: value for name, value in options.items() if isinstance(value, list) and len(value) == 2}
    return {name: value[row : row + 1] for name, value in lists.items()}


def _pairs_first(result: Attribution) -> Tensor:
    """Scores with batch, query and key in front of any other axis."""
    order = [result.axes.index(axis) for axis in ("batch", "query", "key")]
    rest = [axis for axis in range(result.scores.ndim) if axis not in order]
    return result.scores.permute(*order, *rest)
