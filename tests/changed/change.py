"""What a change of a model is, and the list of all of them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """Something that people do to a model.

    Attributes:
        name: what is changed, as the table says it.
        group: the heading it stands under.
        before: made on the model before it is frozen; a context is left when all questions are answered.
        after: made between freezing and the questions.
        freezing, asking: contexts around freezing, and around every single question.
        frozen_as: makes a fresh model the untouched equivalent of what was frozen; None where there is none.
        asked_as: the same of the model at the time of the questions; by default what it was frozen as.
        of_row: whether it reaches one row of a batch: of several prompts at once nobody can say what the model is.
        unlike: the questions (a regular expression) whose answer tells it from its equivalent.
        takes: tells by class and dtype whether a model can be changed so.
    """

    name: str
    group: str
    before: Callable[[Any], Any] | None = None
    after: Callable[[Any], Any] | None = None
    freezing: Callable[[Any], Any] | None = None
    asking: Callable[[Any], Any] | None = None
    frozen_as: Callable[[Any], None] | None = None
    asked_as: Callable[[Any], None] | str | None = "the same"
    of_row: bool = False
    unlike: str = ""
    takes: Callable[[str, str], bool] = lambda name, dtype: True

    @property
    def now(self) -> Callable[[Any], None] | None:
        """The equivalent at the time of the questions."""
        return self.frozen_as if isinstance(self.asked_as, str) else self.asked_as

    @property
    def leaves_weights(self) -> bool:
        """Whether it is about activations: what reads weights alone may know nothing of it."""
        return "hook" in self.name or "replaced" in self.name


def untouched(model: Any) -> None:
    """Nothing is changed."""


CHANGES: list[Change] = []


def add(name: str, group: str, **fields: Any) -> None:
    """A line of the table."""
    CHANGES.append(Change(name, group, **fields))


bridges = lambda name, dtype: name.startswith("bridge/")  # noqa: E731
hooked = lambda name, dtype: name.startswith("hooked/")  # noqa: E731
gpt2 = lambda name, dtype: name == "bridge/gpt2"  # noqa: E731
rotary = lambda name, dtype: name == "bridge/llama"  # noqa: E731
gated_bridges = lambda name, dtype: name == "bridge/llama"  # noqa: E731

add("nothing", "control", frozen_as=untouched)


def names() -> list[str]:
    """Of all changes; each is another."""
    found = [change.name for change in CHANGES]
    assert len(set(found)) == len(found)
    return found


@contextmanager
def applied(change: Change, model: Any) -> Iterator[Any]:
    """The model, changed as it is before freezing."""
    with ExitStack() as stack:
        if change.name == "a copy by copy.deepcopy":
            model = copy.deepcopy(model)
        if change.before is not None:
            context = change.before(model)
            if hasattr(context, "__enter__"):
                stack.enter_context(context)
        yield model
