"""Reading a model once for the passes of one run, as long as it stays what it was.

A `ModelView` reads weights when they are first needed: the same ones for every batch of a data set.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensorlens_tl.hooks import ModelPoints, hook_numbers, lock_of, model_points
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.lifecycle import WeightState, configuration
from tensorlens_tl.models.parameters import whole


@dataclass(frozen=True, eq=False)
class Reading:
    """A view of a model, and the state that the model was in.

    Attributes:
        view: the reading of its weights.
        weights: what its weights were.
        configuration: what decided its numbers besides them.
        hooks: which user-installed hooks were on it.
        modes: which modes its modules were in, and whether it showed what heads write.
    """

    view: ModelView
    weights: WeightState
    configuration: Mapping[str, str]
    hooks: frozenset[int]
    modes: tuple[bool, ...]

    @classmethod
    def of(cls, model: Any) -> "Reading":
        """The reading of a model now."""
        view = ModelView(model)
        with lock_of(model):
            return cls(view, WeightState.of(model), configuration(model), hook_numbers(model), _modes(model))

    @cached_property
    def points(self) -> ModelPoints:
        """The model's hook points.

        Raises:
            UnsupportedModelError: as `model_points`.
        """
        return model_points(self.view)

    def holds(self, model: Any) -> bool:
        """Whether a model is still what was read: what a frozen pass checks of it, and its hooks and modes besides."""
        if self.view.model is not model:
            return False
        with lock_of(model):
            return (
                self.weights.holds(model)
                and self.configuration is configuration(model)
                and self.hooks == hook_numbers(model)
                and self.modes == _modes(model)
            )


def _modes(model: Any) -> tuple[bool, ...]:
    """What else changes how a model is read: whether it shows what heads write, and the modes of its modules.

    RWKV halves its stream in eval mode.
    """
    shows_heads = bool(getattr(model.cfg, "use_attn_result", False))
    return (shows_heads, *(module.training for module in whole(model)))


_shared: ContextVar[list[Reading] | None] = ContextVar("shared", default=None)


@contextmanager
def one_reading() -> Generator[None, None, None]:
    """Passes that are frozen inside share the reading of their model until its state changes; nothing is left after.

    Every pass is proved against the model's own run all the same.

    >>> from tensorlens_tl.passes import one_reading
    >>> with one_reading():
    ...     first, second = tlens.freeze(model, text), tlens.freeze(model, "for x in")
    >>> first.view is second.view
    True
    """
    token = _shared.set([])
    try:
        yield
    finally:
        _shared.reset(token)


def unchecked_view(model: Any) -> ModelView:
    """A model's view for what depends on no weight, such as the lengths of prompts and the memory that they take.

    Raises:
        UnsupportedModelError, InvalidInputError: as `ModelView`.
    """
    shared = _shared.get()
    if shared and shared[0].view.model is model:
        return shared[0].view
    return ModelView(model)


def view_of(model: Any) -> ModelView:
    """A model's view: inside `one_reading` the same one as before, where that still holds.

    Raises:
        UnsupportedModelError, InvalidInputError: as `ModelView`.
    """
    shared = _shared.get()
    if shared is None:
        return ModelView(model)
    if not shared or not shared[0].holds(model):
        shared[:] = [Reading.of(model)]
    view = shared[0].view
    view.refuse_split_inputs()
    return view


def points_of(view: ModelView) -> ModelPoints:
    """A view's hook points: of a shared reading those that it has already.

    Raises:
        UnsupportedModelError: as `model_points`.
    """
    shared = _shared.get()
    if shared and shared[0].view is view:
        return shared[0].points
    return model_points(view)
