"""Reading a model once for its passes, as long as it stays what it was.

A `ModelView` reads weights when they are first needed: the same ones for every pass, also for every batch of a data
set.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from tensorlens_tl.hooks import ModelPoints, hook_numbers, lock_of, model_points
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.lifecycle import WeightState, configuration
from tensorlens_tl.models.offload import whole


@dataclass(frozen=True, eq=False)
class Reading:
    """The state that a model was in when it was read.

    Attributes:
        weights: what its weights were.
        configuration: what decided its numbers besides them.
        hooks: which user-installed hooks were on it.
        modes: what its modules were, and whether it showed what heads write.
        tokenizer: what read its prompts.
    """

    weights: WeightState
    configuration: Mapping[str, str]
    hooks: frozenset[int]
    modes: tuple[Any, ...]
    tokenizer: Any

    @classmethod
    def of(cls, model: Any) -> "Reading":
        """The state of a model now."""
        tokenizer = getattr(model, "tokenizer", None)
        with lock_of(model):
            weights = WeightState.of(model)
            return cls(weights, configuration(model), hook_numbers(model), _modes(model), tokenizer)

    def equals(self, other: "Reading") -> bool:
        """Whether the model was the same twice: what a frozen pass checks of it, and its hooks and modes besides."""
        return (
            self.weights.equals(other.weights)
            and self.configuration is other.configuration
            and self.hooks == other.hooks
            and self.modes == other.modes
            and self.tokenizer is other.tokenizer
        )


def _modes(model: Any) -> tuple[Any, ...]:
    """What else changes how a model is read: whether it shows what heads write, and every module.

    A module has a mode (RWKV halves its stream in eval mode), a class, and perhaps another forward or activation.
    """
    shows_heads = bool(getattr(model.cfg, "use_attn_result", False))
    return (shows_heads, *map(_mode, whole(model)))


def _mode(module: nn.Module) -> tuple[Any, ...]:
    replaced = vars(module)
    return module.training, type(module), replaced.get("forward"), replaced.get("act_fn")


_views: "WeakKeyDictionary[Any, ref[ModelView]]" = WeakKeyDictionary()  # by model, the last one
_readings: "WeakKeyDictionary[ModelView, Reading]" = WeakKeyDictionary()
_points: "WeakKeyDictionary[ModelView, ModelPoints]" = WeakKeyDictionary()
_held: ContextVar[list[ModelView] | None] = ContextVar("held", default=None)


@contextmanager
def one_reading() -> Generator[None, None, None]:
    """Passes that are frozen inside share the reading of their model until its state changes; nothing is left after.

    Elsewhere a pass shares the reading of another that is still there. Every pass is proved against the model's own
    run all the same.

    >>> from tensorlens_tl.passes import one_reading
    >>> with one_reading():
    ...     first, second = tlens.freeze(model, text), tlens.freeze(model, "for x in")
    >>> first.view is second.view
    True
    """
    token = _held.set([])
    try:
        yield
    finally:
        _held.reset(token)


def unchecked_view(model: Any) -> ModelView:
    """A model's view for what depends on no weight, such as the lengths of prompts and the memory that they take.

    Raises:
        UnsupportedModelError, InvalidInputError: as `ModelView`.
    """
    held = _held.get()
    if held and held[0].model is model:
        return held[0]
    return ModelView(model)


def shared_view(view: ModelView) -> tuple[ModelView, WeightState]:
    """The view of a model's last pass where the model is what it was, else this one; and its weights' state.

    A view whose weights are brought in is shared inside `one_reading` alone: two threads may bring them in at once.
    """
    model = view.model
    reading = Reading.of(model)
    held = _held.get()
    if held is not None or not (view.any_offloaded or view.any_moved):
        last = _views.get(model, lambda: None)()
        if last is not None and reading.equals(_readings[last]):
            view = last
        _views[model] = ref(view)
    reading = _readings.setdefault(view, reading)
    if held is not None:
        held[:] = [view]
    return view, reading.weights


def points_of(view: ModelView) -> ModelPoints:
    """A view's hook points: of a shared reading those that it has already.

    Raises:
        UnsupportedModelError: as `model_points`.
    """
    if view not in _readings:
        return model_points(view)
    if view not in _points:
        _points[view] = model_points(view)
    return _points[view]
