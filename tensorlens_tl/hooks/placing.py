"""Putting hooks on a model and taking them off again, whatever happens in between.

An interrupt (Ctrl-C) can come between any two instructions, also while hooks are put on or taken off. So what takes
something off is noted before it is put on, does no harm if it is done twice, and is done twice: an interrupt that comes
during the first time leaves the second. Where even that is cut short, by a second interrupt or between the two, it is
taken off as the placing is freed; a traceback that somebody keeps holds it, so the next run on the model takes off what
is left too (`take_off_leftovers`).
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

TORCH_TABLES = ("_forward_hooks", "_forward_pre_hooks")
BESIDE_THEM = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Where torch keeps a module's forward hooks by number, and what else it notes about them by the same number."""

_runs: "WeakKeyDictionary[Any, WeakSet[Placing]]" = WeakKeyDictionary()  # by model; one whose run has ended is gone

EDITED = "A forward hook edited hook_scale/hook_normalized on the native-autograd path"
"""How a Bridge's norm begins to warn that its scale was edited, and that its output is then computed from it."""


class Placing:
    """What was put on a model, to be taken off again: in a ``with``, or by `take_off`, twice in a ``finally``."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._hooked: list[tuple[Any, Any]] = []
        self.frame = 0

    def __enter__(self) -> "Placing":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.take_off()
        finally:
            self.take_off()

    def __del__(self) -> None:
        self.take_off()

    def take_off(self) -> None:
        """Take off what is on the model; again, where that was interrupted."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self._hooked.clear()

    def then(self, undo: Callable[[], None]) -> None:
        """Note what undoes a step, before the step; it must do no harm where there is nothing to undo, or twice."""
        self._undo.append(undo)

    def at_points(self, model: Any, points: Mapping[str, Any], hooks: Iterable[tuple[Any, Callable[..., Any]]]) -> None:
        """Put hooks at hook points, by their names or filters of names, as ``run_with_hooks`` does."""
        level = model.context_level + 1

        def leave() -> None:
            model.context_level = level - 1

        self.then(leave)
        model.context_level = level
        for name, function in hooks:
            names = filter(name, points) if callable(name) else [name]
            for point in {id(points[at]): points[at] for at in names}.values():
                self.then(lambda point=point, function=function: _off_point(point, function))
                point.add_hook(function, level=level)
                self._hooked.append((point, function))
        if any(str(point.name).endswith((".hook_scale", ".hook_normalized")) for point, _ in self._hooked):
            self._expecting_edits()

    def _expecting_edits(self) -> None:
        """Leave out the warning that a norm's scale was edited, which is what hooks of ours there are for.

        Only this warning, in this thread, as long as the hooks are on. `warnings.catch_warnings` would put back what
        another thread has changed meanwhile, and would make every other warning be said again after each run.
        """
        filters: Any = warnings.filters
        ignored: Any = ("ignore", _InThisThread(EDITED), UserWarning, None, 0)

        def restore() -> None:
            now: Any = warnings.filters
            for listed in (filters, now):  # a `catch_warnings` inside has its own list
                if ignored in listed:
                    listed.remove(ignored)

        self.then(restore)
        filters.insert(0, ignored)

    @property
    def is_whole(self) -> bool:
        """Whether every hook that was put at a hook point is still there: somebody may have called `reset_hooks`."""
        return all(any(handle.user_hook is function for handle in point.fwd_hooks) for point, function in self._hooked)

    def on_module(self, module: nn.Module, function: Callable[..., Any], *, before: bool = False) -> None:
        """Put one of torch's forward hooks on a module; `before` it runs, it is given keyword arguments too."""
        self.then(lambda: _off_module(module, lambda hook: hook is function))
        if before:
            module.register_forward_pre_hook(function, with_kwargs=True)
        else:
            module.register_forward_hook(function)

    def instead_of(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Put a function in the place of one of a module's own, such as ``"forward"``."""
        attributes = vars(module)
        replaced = attributes.get(name)

        def restore() -> None:
            if replaced is None:
                attributes.pop(name, None)
            else:
                attributes[name] = replaced

        self.then(restore)
        attributes[name] = function


class _InThisThread:
    """A beginning of messages of the thread that made this, as a filter of warnings asks for it."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning
        self._home = threading.get_ident()

    def match(self, message: str) -> bool:
        return threading.get_ident() == self._home and message.startswith(self._beginning)


def run_placing(model: Any) -> Placing:
    """A placing of one run, that the model's next run takes off if this one is cut short.

    To be called by the function that takes it off, while it holds the model's lock.
    """
    take_off_leftovers(model, 2)
    placing = Placing()
    placing.frame = id(sys._getframe(1))
    _runs.setdefault(model, WeakSet()).add(placing)
    return placing


def take_off_leftovers(model: Any, depth: int = 1) -> None:
    """Take off what runs left on a model that are no longer running; whoever calls this holds the model's lock.

    >>> from tensorlens_tl.hooks import take_off_leftovers
    >>> take_off_leftovers(model)
    """
    runs = list(_runs.get(model, ()))
    if not runs:
        return
    frame = sys._getframe(depth).f_back
    running = set[int]()  # by this thread alone, which holds the lock
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    for placing in runs:
        if placing.frame not in running:
            placing.take_off()


def _off_point(point: Any, function: Callable[..., Any]) -> None:
    """Take a hook off a hook point, also one that torch knows already and TransformerLens not yet, or no longer."""
    point.fwd_hooks[:] = [handle for handle in point.fwd_hooks if handle.user_hook is not function]
    _off_module(
        point, lambda hook: any(_content(cell) is function for cell in getattr(hook, "__closure__", None) or ())
    )


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _off_module(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    tables = vars(module)
    for table in TORCH_TABLES:
        for number in [number for number, hook in list(tables[table].items()) if is_ours(hook)]:
            for other in BESIDE_THEM:
                tables[other].pop(number, None)
            tables[table].pop(number, None)
