"""What the page shows, as dictionaries of numbers and text: one model, the passes of recent prompts, and its views.

Every number is a sum that the library gives, with its `gap`. Positions are counted over all tokens of a
prompt. Nothing here knows of the web.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tensorlens_tl.errors import FrozenModelError, InvalidInputError
from tensorlens_tl.explorer.calls import code_of
from tensorlens_tl.explorer.images import Images
from tensorlens_tl.explorer.inquiry import Inquiry
from tensorlens_tl.explorer.parts import with_labels
from tensorlens_tl.explorer.passes import Passes, has_chat
from tensorlens_tl.explorer.questions import Question
from tensorlens_tl.explorer.views import VIEWS
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes import Difference, FrozenPass
from tensorlens_tl.passes.operator import token_label
from tensorlens_tl.registry import get_method, list_methods

View = dict[str, Any]


class Session:
    """One model's answers to the page's questions.

    Args:
        model: the model, of either class.
        other: a second model of its architecture, such as a fine-tuned one: runs of two prompts are then of both.
        name: what the page calls it.
        dictionaries: sparse autoencoders of the model, one or several, in which the page shows features.
        labels: what their features are called, for each dictionary as `circuits.feature_labels` takes it.
        passes: how many prompts' passes stay in memory.
        images: those that the page offers to a model of images, prepared as it reads them.
        processor: the model's image processor, for uploads; see `Images`.

    >>> from tensorlens_tl.explorer import Session
    >>> session = Session(model)
    >>> view = session.view("tokens", {"text": text})
    >>> abs(sum(view["scores"]) + view["bias"] - view["total"]) < 1e-3
    True
    """

    def __init__(
        self,
        model: Any,
        other: Any = None,
        *,
        name: str = "",
        dictionaries: Any = None,
        labels: Any = None,
        passes: int = 16,
        images: Any = None,
        processor: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.other = other
        self.name = name
        self.dictionaries = with_labels(dictionaries, labels)
        self.last: Any = None
        self.question: Question | None = None
        self.images = Images(model, images, processor)
        self._passes = Passes(model, other, self.images, passes)
        self._views: dict[str, Callable[[Inquiry], View]] = dict(VIEWS)

    def view(self, name: str, fields: Mapping[str, Any]) -> View:
        """One view of one question, with the Python that gives the same numbers as ``"code"``.

        A model that has changed since (other weights, configuration or hooks) is frozen again, and ``"version"``, how
        often that happened so far, is one more.

        Args:
            name: ``"prompt"``, ``"tokens"``, ``"components"``, ``"head"``, ``"routes"``, ``"ablate"``, ``"graph"``,
                ``"neurons"``, ``"features"``, ``"feature"``, ``"generated"`` or ``"image"``.
            fields: those of a `Question`.

        Raises:
            InvalidInputError: no such view, or a field that is none.
            TensorLensError: what the library refuses.
        """
        if name not in self._views:
            raise InvalidInputError(f"explorer: view {name!r}; use one of {', '.join(self._views)}.")
        question = Question.of(fields)
        self._passes.refresh()
        try:
            answer = self._computed(name, question)
        except FrozenModelError:  # it changed while it was asked
            self._passes.clear()
            answer = self._computed(name, question)
        return answer | {"version": self._passes.version}

    def _computed(self, name: str, question: Question) -> View:
        inquiry = Inquiry(question, self._passes, self.dictionaries)
        answer = self._views[name](inquiry)
        self.question = question
        if inquiry.last is not None:
            self.last = inquiry.last
        return answer | {"code": code_of(question, inquiry.calls, two_models=self.other is not None)}

    def about(self) -> View:
        """The model, the methods that the page offers, and which inputs it takes."""
        methods = [{"name": method, "about": _first_sentence(method)} for method in list_methods()]
        view: View = {"name": self.name, "two_models": self.other is not None, "methods": methods}
        view["dictionaries"] = [dictionary.hook for dictionary in self.dictionaries]
        view |= {"chat": has_chat(self.model), "version": self._passes.version}
        model = ModelView(self.model)
        if model.reads == "images":
            classes = [token_label(model, token) for token in range(model.d_vocab)]
            view |= {"images": self.images.given, "pictures": self.images.pictures}
            view |= {"classes": classes, "processor": self.images.has_processor}
        return view

    # ------------------------------------------------------------------ passes

    def frozen(self, question: Question, *, second: bool = False) -> FrozenPass:
        """The pass of a question's prompt or image, or of its second prompt, held for later questions."""
        return self._passes.frozen(question, second=second)

    def change(self, question: Question) -> Difference:
        """The difference of two prompts' runs, first less second; of two models the second prompt runs on `other`."""
        return self._passes.change(question)


def _first_sentence(method: str) -> str:
    return (get_method(method).__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("`", "")
