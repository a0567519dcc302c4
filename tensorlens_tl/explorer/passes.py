"""The frozen passes of recent questions: what is read, how many are held, and when they are frozen again.

Passes, differences and generated texts of the most recent questions stay in memory, within a number and a size. They
belong to the model as it was. Where its weights, its configuration or its hooks are others since (it was fine-tuned or
edited between two clicks), all of them are dropped, and the next question freezes again.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.explorer.images import Images
from tensorlens_tl.explorer.questions import Question
from tensorlens_tl.generation import FrozenGeneration, freeze_generation
from tensorlens_tl.hooks import hook_numbers
from tensorlens_tl.passes import Difference, FrozenPass, difference, freeze

Value = TypeVar("Value")

MOST_BYTES = 2**29
"""Bytes of activations that each store of passes, differences or texts holds for later questions; what the present
question needs is held whatever its size."""


class Recent(Generic[Value]):
    """The values that were used last, by key.

    Args:
        most: how many.
        size: bytes of a value; where they are more than `MOST_BYTES` in all, those used longest ago are dropped, too.

    >>> from tensorlens_tl.explorer.passes import Recent
    >>> squares = Recent(2)
    >>> [squares.get(number, lambda: number**2) for number in (1, 2, 3)], len(squares)
    ([1, 4, 9], 2)
    """

    def __init__(self, most: int, size: Callable[[Value], int] = lambda _: 0) -> None:
        self._most = most
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """What is stored under a key, or computed now."""
        if key not in self._values:
            self._values[key] = compute()
            self._sizes[key] = self._size(self._values[key])
        self._values.move_to_end(key)
        while len(self) > 1 and (len(self) > self._most or sum(self._sizes.values()) > MOST_BYTES):
            oldest, _ = self._values.popitem(last=False)
            del self._sizes[oldest]
        return self._values[key]

    def clear(self) -> None:
        """Drop all of them."""
        self._values.clear()
        self._sizes.clear()

    def newest(self) -> Value | None:
        """What was used last; None where nothing is stored."""
        if not self._values:
            return None
        return next(reversed(self._values.values()))


class Passes:
    """The passes of a session's recent questions.

    Args:
        model, other: the models; the second run of a comparison is of `other`, where it is given.
        images: those that questions name.
        most: how many passes are held.

    Attributes:
        version: how often the model was seen to have changed.
    """

    def __init__(self, model: Any, other: Any, images: Images, most: int) -> None:
        self.model = model
        self.other = other
        self.version = 0
        self._images = images
        self._frozen: tuple[Recent[FrozenPass], Recent[FrozenPass]] = (Recent(most, _bytes), Recent(most, _bytes))
        self._differences = Recent[Difference](most // 2, lambda change: sum(map(_bytes, (change.a, change.b))))
        self._written = Recent[FrozenGeneration](max(1, most // 4), lambda written: sum(map(_bytes, _runs(written))))
        self._logits = Recent[Tensor | None](4 * most)

    def frozen(self, question: Question, *, second: bool = False) -> FrozenPass:
        """The pass of a question's prompt or image; `second` is that of its second one.

        Raises:
            TensorLensError: what `freeze` refuses.
        """
        of_other = second and self.other is not None
        model: Any = self.other if of_other else self.model
        single = question
        if second:
            single = question.second
        key = (single.text, single.chat, single.image)
        return self._frozen[of_other].get(key, lambda: freeze(model, self._input(single)))

    def change(self, question: Question) -> Difference:
        """The difference of a question's two runs, first less second."""
        key = (question.text, question.other, question.chat, question.image, question.other_image)

        def of_two() -> Difference:
            return difference(self.frozen(question), self.frozen(question, second=True))

        return self._differences.get(key, of_two)

    def written(self, question: Question) -> FrozenGeneration:
        """What the model writes after a question's prompt.

        Raises:
            TensorLensError: what `freeze_generation` refuses.
        """
        prompt = self._input(question)
        key = (question.text, question.chat, question.new)
        return self._written.get(key, lambda: freeze_generation(self.model, prompt, max_new_tokens=question.new))

    def logits(self, question: Question, query: int) -> Float[Tensor, "d_vocab"] | None:
        """The model's logits at a position of the prompt; None of a model that has none."""
        frozen = self.frozen(question)
        key = (question.text, question.chat, question.image, query)
        logits = self._logits.get(key, lambda: frozen.logits(query))
        return None if logits is None else logits[0, 0]

    def _input(self, question: Question) -> Any:
        """What the model reads of a question's first run: a text, a chat of one message, or pixels.

        Raises:
            InvalidInputError: no such image.
        """
        if question.image is not None:
            return self._images.pixels(question.image)
        if question.chat:
            return question.message
        return question.text

    # ------------------------------------------------------------------ a model that changes

    def refresh(self) -> None:
        """Drop everything where a model is no longer that of its passes."""
        newest = [passes.newest() for passes in self._frozen]
        written = self._written.newest()
        if written is not None:
            newest += _runs(written)
        if not all(_is_fresh(frozen) for frozen in newest if frozen is not None):
            self.clear()

    def clear(self) -> None:
        """Drop everything: the model has changed."""
        self.version += 1
        for store in (*self._frozen, self._differences, self._written, self._logits):
            store.clear()


def has_chat(model: Any) -> bool:
    """Whether a model's tokenizer has a chat template."""
    return bool(getattr(getattr(model, "tokenizer", None), "chat_template", None))


def _runs(written: FrozenGeneration) -> list[FrozenPass]:
    """The pass of a generated text."""
    return [run for run in written.frozen.runs if isinstance(run, FrozenPass)]


def _is_fresh(frozen: FrozenPass) -> bool:
    """Whether the model still is that of a pass, hooks on it included."""
    try:
        frozen.check_fresh()
    except FrozenModelError:
        return False
    return hook_numbers(frozen.model) == frozen.capture.hook_numbers


def _bytes(frozen: FrozenPass) -> int:
    return sum(tensor.nbytes for tensor in frozen.capture.activations.values())
