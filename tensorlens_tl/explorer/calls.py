"""A call of a public function that can be made and can be printed: what a view shows is what "copy as Python" gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorlens_tl
from tensorlens_tl.explorer.questions import Question


@dataclass(frozen=True)
class Call:
    """A public function with arguments besides the run.

    Attributes:
        path: of the function, from the package: ``"circuits.routes"``.
        places: positional arguments after the run.
        options: keyword arguments.
        subject: what the code calls its first argument.

    >>> from tensorlens_tl.explorer.calls import Call
    >>> call = Call("attribute", options={"target": 5, "method": "rollout"})
    >>> print(call.code)
    tlens.attribute(run, target=5, method='rollout')
    """

    path: str
    places: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    subject: str = "run"

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        function: Any = tensorlens_tl
        for name in self.path.split("."):
            function = getattr(function, name)
        return function

    def __call__(self, run: Any) -> Any:
        """Make it, of a pass, of the difference of two, or of the features of one."""
        return self.function(run, *self.places, **self.options)

    @property
    def code(self) -> str:
        """The call as Python."""
        arguments = [
            self.subject,
            *map(repr, self.places),
            *(f"{name}={value!r}" for name, value in self.options.items()),
        ]
        return f"tlens.{self.path}({', '.join(arguments)})"


def code_of(question: Question, calls: Sequence[Call | str], *, two_models: bool) -> str:
    """Lines that give the results of some calls, where `model` is the model and `tuned` the second one.

    Args:
        question: tells the prompts.
        calls: in their order, or lines as they stand; the last call's result is called ``result``.
        two_models: whether the second run is of a second model.
    """
    models = "# model is the model that the page shows"
    if two_models:
        models += ", tuned the second one"
    lines = ["import tensorlens_tl as tlens", "", models, f"run = tlens.freeze(model, {question.text!r})"]
    if question.other is not None:
        second = "tuned" if two_models else "model"
        lines += [f"other = tlens.freeze({second}, {question.other!r})", "run = tlens.difference(run, other)"]
    lines += [call if isinstance(call, str) else f"result = {call.code}" for call in calls]
    return "\n".join(lines)
