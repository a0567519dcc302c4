"""A call of a public function that can be made and can be printed: what a view shows is what "copy as Python" gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorlens_tl
from tensorlens_tl.explorer.questions import Question


@dataclass(frozen=True)
class Call:
    """A public function with arguments besides the run, or a method of the run.

    Attributes:
        path: of the function, from the package: ``"circuits.routes"``; or the method's name.
        places: positional arguments after the run.
        options: keyword arguments.
        subject: what the code calls its first argument.
        is_method: whether it is a method of the run, such as ``attribute`` of generated text.

    >>> from tensorlens_tl.explorer.calls import Call
    >>> call = Call("attribute", options={"target": 5, "method": "rollout"})
    >>> print(call.code)
    tlens.attribute(run, target=5, method='rollout')
    """

    path: str
    places: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    subject: str = "run"
    is_method: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        function: Any = tensorlens_tl
        for name in self.path.split("."):
            function = getattr(function, name)
        return function

    def __call__(self, run: Any) -> Any:
        """Make it, of a pass, of the difference of two, of generated text, or of the features of a pass."""
        if self.is_method:
            return getattr(run, self.path)(*self.places, **self.options)
        return self.function(run, *self.places, **self.options)

    @property
    def code(self) -> str:
        """The call as Python."""
        arguments = [*map(repr, self.places), *(f"{name}={value!r}" for name, value in self.options.items())]
        if self.is_method:
            return f"{self.subject}.{self.path}({', '.join(arguments)})"
        return f"tlens.{self.path}({', '.join([self.subject, *arguments])})"


def code_of(question: Question, calls: Sequence[Call | str], *, two_models: bool) -> str:
    """Lines that give the results of some calls, where `model` is the model and `tuned` the second one.

    Args:
        question: tells the prompts.
        calls: in their order, or lines as they stand; the last call's result is called ``result``.
        two_models: whether the second run is of a second model.
    """
    of_text = any(isinstance(call, Call) and call.is_method for call in calls)
    lines = ["import tensorlens_tl as tlens", "", *_given(question, two_models=two_models)]
    if of_text:
        lines += [
            f"run = tlens.generation.freeze_generation(model, {_prompt(question)}, max_new_tokens={question.new})"
        ]
    else:
        lines += [f"run = tlens.freeze(model, {_prompt(question)})"]
    if question.is_comparison:
        second = "tuned" if two_models else "model"
        lines += [
            f"other = tlens.freeze({second}, {_prompt(question.second, 'other_pixels')})",
            "run = tlens.difference(run, other)",
        ]
    lines += [call if isinstance(call, str) else f"result = {call.code}" for call in calls]
    return "\n".join(lines)


def _given(question: Question, *, two_models: bool) -> list[str]:
    """What the code takes as given."""
    models = "# model is the model that the page shows"
    if two_models:
        models += ", tuned the second one"
    lines = [models]
    if question.image is not None:
        lines += [f"# pixels is the image {question.image}, [1, channel, height, width], as the model reads it"]
    if question.other_image is not None:
        lines += [f"# other_pixels is the image {question.other_image}"]
    return lines


def _prompt(question: Question, pixels: str = "pixels") -> str:
    """What is frozen, as Python; `pixels` is what the code calls an image."""
    if question.image is not None:
        return pixels
    if question.chat:
        return repr(question.message)
    return repr(question.text)
