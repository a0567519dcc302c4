"""What do the methods say about one prediction? Those that are cheap enough, and why the others are left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from tensorlens_tl.errors import TensorLensError, warn_caller
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import Method, attribute, get_method
from tensorlens_tl.report.prediction import Prediction
from tensorlens_tl.results import Attribution

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "tensorlens": {"target": {"collapse": "target"}, "in_out": {"collapse": "in_out"}, "norm": {"collapse": "norm"}},
    "mean": {"norm": {"layer_map": "norm:attn_res_ln"}},  # of attention it is the same as that method
    "decompx": {"target": {"aggregate": "target"}, "norm": {"aggregate": "norm"}},
}
"""Methods that answer several questions, with the options of each; a target in them is the report's target."""

ESTIMATES: dict[str, dict[str, Any]] = {"tensorlens (norm)": {"probes": 32, "rows": "orthonormal"}}
"""What is estimated where the exact scores cost too much, and with which options."""

LIMIT = 2e11
"""Operations that one method may cost in a report, unless it is named or all are wanted: some seconds on two cores."""


@dataclass(frozen=True)
class Limits:
    """What a report leaves out.

    Attributes:
        every: nothing is left out, and everything is exact.
        named: the methods were named, and run whatever they cost.
    """

    every: bool = False
    named: bool = False


NONE_SLOW = Limits()


@dataclass(frozen=True)
class Answer:
    """One method's scores for a prediction.

    Attributes:
        method: as it is registered.
        result: its scores.
        about_target: whether it explains the report's target.
    """

    method: Method
    result: Attribution
    about_target: bool


@dataclass(frozen=True)
class Answers:
    """What the methods say, by name.

    Attributes:
        shown: the answers.
        refused: the methods without one, and why.
        failed: the methods that raised an error that is none of the library's, and which.
    """

    shown: dict[str, Answer] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def answers(frozen: FrozenPass, prediction: Prediction, methods: Sequence[str], limits: Limits = NONE_SLOW) -> Answers:
    """Every method's answer for one query, and why some have none. A method that fails also warns.

    Args:
        frozen: a pass of one prompt.
        prediction: the query, and what is explained.
        methods: names of methods.
        limits: what is left out because it costs more than `LIMIT`.
    """
    variants = [
        (method, variant, options)
        for method in sorted(methods, key=lambda name: (name != "tensorlens", name))
        for variant, options in VARIANTS.get(method, {"": {}}).items()
    ]
    said = Answers()
    for method, variant, options in tqdm(variants, desc="methods", leave=False, disable=None):
        registered = get_method(method)
        if registered.explains_prediction(options) and not prediction.options:
            continue
        name = method
        if variant:
            name = f"{method} ({variant})"
        is_slow = not limits.every and operations(frozen, registered, options) > LIMIT
        if is_slow and name in ESTIMATES:
            options = options | ESTIMATES[name]
        elif is_slow and not limits.named:
            said.refused[name] = _too_slow(frozen, registered, options)
            continue
        try:
            answer = _answer(frozen, prediction, registered, options)
        except Exception as error:  # of a method that somebody registered: the others still have answers
            said.failed[name] = f"Method {name!r} failed: {type(error).__name__}: {error}"
            warn_caller(said.failed[name])
            continue
        if isinstance(answer, str):
            said.refused[name] = answer
        else:
            said.shown[name] = answer
    return said


def _answer(frozen: FrozenPass, prediction: Prediction, method: Method, options: dict[str, Any]) -> Answer | str:
    """One method's answer, or why it has none."""
    about_target = method.explains_prediction(options)
    question = _question(method, prediction, about_target)
    try:
        result = attribute(frozen, method=method.name, **options, **question)
    except TensorLensError as error:
        return str(error)
    if prediction.position not in result.queries[0].tolist():
        return f"It says nothing about position {prediction.position}."
    return Answer(method, result, about_target)


def operations(frozen: FrozenPass, method: Method, options: dict[str, Any]) -> float:
    """Additions and multiplications that a method costs: two for each weight and token, in each of its runs."""
    weights = sum(parameter.numel() for parameter in frozen.model.parameters())
    return 2.0 * weights * frozen.tokens.numel() * method.cost(frozen, options)


def _too_slow(frozen: FrozenPass, method: Method, options: dict[str, Any]) -> str:
    cost = operations(frozen, method, options)
    return (
        f"It runs the model {method.cost(frozen, options)} times, some {cost:.0e} operations; a report leaves out what "
        f"costs more than {LIMIT:.0e}. Name it in methods= (--methods), or pass slow=True (--slow)."
    )


def _question(method: Method, prediction: Prediction, about_target: bool) -> dict[str, Any]:
    """The report's query and target, as far as the method takes them."""
    question: dict[str, Any] = {"query": prediction.query}
    if about_target:
        question |= prediction.options
    return {option: value for option, value in question.items() if method.takes(option)}
