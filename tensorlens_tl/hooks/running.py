"""Running a model: one thread at a time, and nobody else's hooks taken for our own.

Hooks live on the model, so two runs of one model at once would see each other's. Whatever the library runs holds the
model's lock; its observing hooks ignore runs of other threads, and hooks that hold activations fixed ignore a run that
is to be the model's own. What a user runs in another thread is outside this lock: use ``frozen.attached()`` there,
which holds it.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from tensorlens_tl.algebra.numerics import refuse_autocast
from tensorlens_tl.algebra.progress import is_watched, note_progress
from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks.loops import without_numbers
from tensorlens_tl.hooks.placing import Placing, run_placing, take_off_leftovers
from tensorlens_tl.models import HookedModel, is_looped
from tensorlens_tl.models.offload import lock_of as lock_of, whole

FwdHook = tuple[Any, Callable[..., Any]]
"""A hook point's name (or a filter of names) and what is called there, as TransformerLens takes them."""

_unheld: ContextVar[bool] = ContextVar("unheld", default=False)
_keepers: "WeakKeyDictionary[Any, WeakSet[Any]]" = WeakKeyDictionary()  # by model
_known: ContextVar["_Listing | None"] = ContextVar("known", default=None)


def run(
    model: HookedModel,
    inputs: Mapping[str, Any],
    hooks: Sequence[FwdHook],
    points: Mapping[str, Any] | None = None,
) -> Any:
    """The model's output with these hooks on, which are gone afterwards, also on an exception.

    Args:
        model: any TransformerLens model.
        inputs: keyword arguments of its forward.
        hooks: names (or filters of names) and what is called there.
        points: the model's hook points, where they were just listed: a Bridge of 30 layers takes 5 ms for that.

    Raises:
        InvalidInputError: inside ``torch.autocast``.
        FrozenModelError: somebody took these hooks off while the model ran.

    >>> from tensorlens_tl.hooks import run
    >>> run(model, frozen.inputs, [("hook_embed", lambda activation, hook: print(activation.shape))]).shape
    torch.Size([1, 7, 128])
    torch.Size([1, 7, 2048])
    """
    refuse_autocast(next(model.parameters()).device)
    placed = [*hooks, *progress_hooks()]
    whole_model: Any = model
    with lock_of(model):
        placing = run_placing(model)
        try:
            points = dict(hook_points(model) if points is None else points)
            if is_looped(model):
                placed = without_numbers(model, points, placed)
            _drop_patterns(model, placing)
            placing.at_points(model, points, placed)
            output = whole_model.forward(**inputs)
            if not placing.is_whole:
                raise FrozenModelError(_TAKEN_OFF)
            return output
        except Exception as error:
            if placing.is_whole or isinstance(error, FrozenModelError):
                raise
            raise FrozenModelError(_TAKEN_OFF) from error
        finally:
            try:
                placing.take_off()
            finally:
                placing.take_off()


@contextmanager
def hooked(model: HookedModel, hooks: Sequence[FwdHook]) -> Generator[None, None, None]:
    """Inside, hooks are on the model, as with ``model.hooks``; whoever uses this holds the model's lock.

    Raises:
        FrozenModelError: somebody took them off inside.
    """
    placing = Placing()
    try:
        placing.at_points(model, hook_points(model), hooks)
        yield
        if not placing.is_whole:
            raise FrozenModelError(_TAKEN_OFF)
    finally:
        try:
            placing.take_off()
        finally:
            placing.take_off()


_TAKEN_OFF = (
    "hooks of the library were taken off the model during its run, which then computes something else: a hook, or "
    "another thread, called reset_hooks() or remove_hooks(). Let it take off its own hooks alone "
    "(`with model.hooks(...)`), or call it before or after."
)


def progress_hooks(note: Callable[[], None] = note_progress) -> list[FwdHook]:
    """A hook at the entry of every block that notes progress, where somebody watches; none where nobody does."""
    if not is_watched():
        return []
    return [(_enters_block, in_this_thread(lambda activation, hook: note()))]


def _enters_block(name: str) -> bool:
    return name.endswith(".hook_resid_pre")


def _drop_patterns(model: HookedModel, placing: Placing) -> None:
    """No layer keeps its pattern: a Bridge's joint attention leaves its last one on itself, and nobody reads it."""
    if model not in _keepers:
        whole_model: Any = model
        _keepers[model] = WeakSet(module for module in whole_model.modules() if "_pattern" in vars(module))
    for module in _keepers[model]:
        module._pattern = None
        placing.on_module(module, _drop)


def _drop(module: Any, args: Any, output: Any) -> None:
    module._pattern = None


@contextmanager
def unheld_run(model: HookedModel) -> Generator[None, None, None]:
    """Runs inside are the model's own: this thread holds its lock, and a frozen pass's hooks do nothing."""
    with listed_once(model):
        take_off_leftovers(model)
        before = _unheld.get()
        try:
            _unheld.set(True)
            yield
        finally:  # twice, as an interrupt may come in between
            try:
                _unheld.set(before)
            finally:
                _unheld.set(before)


@contextmanager
def listed_once(model: HookedModel) -> Generator[None, None, None]:
    """Inside, this thread holds the model's lock, and its hook points and modules are listed once.

    A Bridge puts its list of hook points together again for each caller.
    """
    with lock_of(model):
        before = _known.get()
        try:
            if before is None or before.model is not model:
                _known.set(_Listing(model))
            yield
        finally:  # twice, as an interrupt may come in between
            try:
                _known.set(before)
            finally:
                _known.set(before)


class _Listing:
    """A model's hook points and modules, each listed when somebody first asks."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @cached_property
    def points(self) -> dict[str, Any]:
        return dict(self.model.hook_dict)

    @cached_property
    def modules(self) -> list[nn.Module]:
        return list(whole(self.model))


def hook_points(model: HookedModel) -> dict[str, Any]:
    """The model's hook points by name."""
    known = _known.get()
    if known is None or known.model is not model:
        return dict(model.hook_dict)
    return known.points


def modules(model: Any) -> list[nn.Module]:
    """All modules of a model; of a Bridge also those of the model that it wraps."""
    known = _known.get()
    if known is None or known.model is not model:
        return list(whole(model))
    return known.modules


def is_unheld() -> bool:
    """Whether this thread is inside `unheld_run`."""
    return _unheld.get()


def in_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does nothing in other threads."""
    return partial(_in_thread, threading.get_ident(), function)


def _in_thread(home: int, function: Callable[..., Any], tensor: Any, *, hook: Any) -> Any:
    if threading.get_ident() != home:
        return None
    return function(tensor, hook=hook)
