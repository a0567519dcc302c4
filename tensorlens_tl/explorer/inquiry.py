"""One question with its runs, and the calls of public functions that answer it: what a view is computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tensorlens_tl.explorer.calls import Call
from tensorlens_tl.explorer.parts import LabelledDictionary
from tensorlens_tl.explorer.passes import Passes
from tensorlens_tl.explorer.questions import Question
from tensorlens_tl.explorer.targets import aim_of, query_of, target_of
from tensorlens_tl.passes import Difference, FrozenPass


@dataclass(eq=False)
class Inquiry:
    """One question, while a view answers it.

    Attributes:
        question: what the page asks.
        passes: where its runs are, or are frozen now.
        dictionaries: in which features are shown.
        calls: those that answered it so far, or lines of Python, in their order.
        last: what the last of these calls returned; None before the first.
    """

    question: Question
    passes: Passes
    dictionaries: Sequence[LabelledDictionary] = ()
    calls: list[Call | str] = field(default_factory=list[Call | str])
    last: Any = None

    @property
    def frozen(self) -> FrozenPass:
        """The pass of its prompt or image; of a comparison the first run's."""
        return self.passes.frozen(self.question)

    @property
    def change(self) -> Difference:
        """The difference of its two runs, first less second."""
        return self.passes.change(self.question)

    @property
    def run(self) -> FrozenPass | Difference:
        """What it is about: one run, or the difference of two."""
        if self.question.is_comparison:
            return self.change
        return self.frozen

    @cached_property
    def query(self) -> int:
        """The position, counted over all tokens."""
        return query_of(self.passes, self.question)

    @cached_property
    def target(self) -> dict[str, int]:
        """Target and minus as options of the library's functions."""
        return target_of(self.passes, self.question)

    @property
    def aim(self) -> dict[str, int]:
        """Target, minus and query as options of the library's functions."""
        return aim_of(self.passes, self.question)

    def result(self, run: FrozenPass | Difference, path: str, *places: int, **options: Any) -> Any:
        """Call a public function, and remember the call for the code and its result for Python.

        Args:
            run: its first argument.
            path: of the function, from the package: ``"circuits.routes"``.
            places: positional arguments after the run.
            options: keyword arguments.
        """
        return self.answer(Call(path, places, options), run)

    def answer(self, call: Call, subject: Any) -> Any:
        """Make a call of any subject, and remember it with its result."""
        self.last = call(subject)
        self.calls.append(call)
        return self.last
