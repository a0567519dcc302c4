"""Generated text: what the model writes, and what a stretch of it came from."""

from typing import Any

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.explorer.calls import Call
from tensorlens_tl.explorer.questions import Question
from tensorlens_tl.generation import FrozenGeneration
from tensorlens_tl.models import RUNNER_UP
from tensorlens_tl.results import Attribution


def call_of(question: Question) -> Call:
    """The call that attributes a question's stretch of generated tokens.

    Raises:
        InvalidInputError: nothing is to be written, an empty stretch, or a comparison.
    """
    if question.new is None:
        raise InvalidInputError("explorer: new is missing; say how many tokens the model shall write.")
    if question.is_comparison:
        raise InvalidInputError("explorer: generated text is of one run; leave the second prompt out.")
    options: dict[str, Any] = {"span": "all"}
    if question.start is not None and question.stop is not None:
        if question.start >= question.stop:
            raise InvalidInputError(f"explorer: start is {question.start} and stop {question.stop}: no token.")
        options["span"] = (question.start, question.stop)
    minus = question.minus
    if question.runner_up:
        minus = RUNNER_UP
    if minus is not None:
        options["minus"] = minus
    if question.hops:
        options["hops"] = question.hops
    return Call("attribute", options=options, is_method=True)


def view_of(written: FrozenGeneration, attribution: Attribution) -> dict[str, Any]:
    """Tokens of prompt and continuation, and what each gave to a stretch of the continuation."""
    numbers = {"bias": attribution.bias, "total": attribution.total, "gap": attribution.gap}
    positions = attribution.options["asked"][0]
    return {
        "tokens": written.frozen.str_tokens[0],
        "first": written.generated_ranges()[0][0],
        "start": positions[0],
        "stop": positions[-1] + 1,
        "scores": attribution.scores[0, 0].tolist(),
        "label": attribution.target,
        **{name: float(value[0, 0]) for name, value in numbers.items() if value is not None},
    }
