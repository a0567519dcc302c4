"""Running a model with hooks: in one thread at a time, with reliable removal, and telling our hooks from the user's.

Hooks live on the model, so two simultaneous runs of one model would see each other's. Every run by the library holds
the model's lock; observing hooks ignore runs of other threads, and hooks that hold activations fixed ignore runs of the
original model. A user's run in another thread does not hold this lock: use ``frozen.attached()`` there, which does.

An interrupt (Ctrl-C) can come between any two instructions, even while hooks are installed or removed. Therefore the
removal of a hook is scheduled before it is installed, is idempotent, and runs twice: an interrupt during the first time
leaves the second. If even that is cut short, by a second interrupt or one between the two, hooks are removed when the
placing is freed. A stored traceback keeps the placing alive, so the next run on the model also removes what is left
(`take_off_leftovers`).

Some hook points fire several times in a forward pass (`tensorlens_tl.models.loops`). TransformerLens calls the hooks of
such a point each time, without saying which time it is. Here a point that fires n times has n additional names such as
``"L_blocks.0@3.hook_in"``, and the hooks at these names are installed as a single hook that counts.

User code can act on a run in three ways: by a TransformerLens hook at a hook point, by one of torch's own hooks on any
module, or by a replaced `forward` of a module. All three are detected and named here; hooks of the libraries that a
model is made of are not counted.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.nn.modules.module as torch_modules
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import refuse_autocast
from tensorlens_tl.algebra.progress import is_watched, note_progress
from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.models import HookedModel, call_counts, is_looped
from tensorlens_tl.models.offload import lock_of as lock_of, whole
from tensorlens_tl.models.parameters import innermost

# ------------------------------------------------------------------ installing and removing hooks

TORCH_TABLES = ("_forward_hooks", "_forward_pre_hooks")
BESIDE_THEM = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""The tables in which torch stores a module's forward hooks by number, and their properties by the same number."""

_runs: "WeakKeyDictionary[Any, WeakSet[Placing]]" = WeakKeyDictionary()  # by model; one whose run has ended is gone

EDITED = "A forward hook edited hook_scale/hook_normalized on the native-autograd path"
"""The beginning of a Bridge's warning that a norm's scale was edited and its output is computed from it."""


class Placing:
    """Changes of a model that are undone at the end: in a ``with``, or by `take_off`, called twice in a ``finally``."""

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
        """Undo all changes; call it again in case the first call is interrupted."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self._hooked.clear()

    def then(self, undo: Callable[[], None]) -> None:
        """Schedule the undoing of a step before the step; it must be harmless without the step, or when repeated."""
        self._undo.append(undo)

    def at_points(self, model: Any, points: Mapping[str, Any], hooks: Iterable[tuple[Any, Callable[..., Any]]]) -> None:
        """Install hooks at hook points, by name or by a filter of names, as ``run_with_hooks`` does."""
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
        """Suppress TransformerLens' warning that a norm's scale was edited, which our hooks do on purpose.

        Only in this thread: `warnings.catch_warnings` would undo other threads' changes, and repeat all other warnings.
        """
        filters: Any = warnings.filters
        ignored: Any = ("ignore", _InThisThread(EDITED), UserWarning, None, 0)

        def restore() -> None:
            now: Any = warnings.filters
            for listed in (filters, now):  # a nested `catch_warnings` has its own list
                if ignored in listed:
                    listed.remove(ignored)

        self.then(restore)
        filters.insert(0, ignored)

    @property
    def is_whole(self) -> bool:
        """Whether every hook that was installed is still there: `reset_hooks` may have been called."""
        return all(any(handle.user_hook is function for handle in point.fwd_hooks) for point, function in self._hooked)

    def on_module(self, module: nn.Module, function: Callable[..., Any], *, before: bool = False) -> None:
        """Install one of torch's forward hooks on a module; a hook `before` the module also gets keyword arguments."""
        self.then(lambda: _off_module(module, lambda hook: hook is function))
        if before:
            module.register_forward_pre_hook(function, with_kwargs=True)
        else:
            module.register_forward_hook(function)

    def instead_of(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Replace one of a module's own functions, such as ``"forward"``."""
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
    """The beginning of messages from the thread that created it, usable as a filter of warnings."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning
        self._home = threading.get_ident()

    def match(self, message: str) -> bool:
        return threading.get_ident() == self._home and message.startswith(self._beginning)


def run_placing(model: Any) -> Placing:
    """Return a placing of one run that the model's next run removes if this one is cut short.

    The caller holds the model's lock, and undoes the placing.
    """
    take_off_leftovers(model, 2)
    placing = Placing()
    placing.frame = id(sys._getframe(1))
    _runs.setdefault(model, WeakSet()).add(placing)
    return placing


def take_off_leftovers(model: Any, depth: int = 1) -> None:
    """Remove what finished runs left on a model; the caller holds the model's lock.

    >>> from tensorlens_tl.hooks import take_off_leftovers
    >>> take_off_leftovers(model)
    """
    runs = list(_runs.get(model, ()))
    if not runs:
        return
    frame = sys._getframe(depth).f_back
    running = set[int]()  # only in this thread, which holds the lock
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    for placing in runs:
        if placing.frame not in running:
            placing.take_off()


def _off_point(point: Any, function: Callable[..., Any]) -> None:
    """Remove a hook from a hook point, even if only torch or only TransformerLens knows it."""
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


# ------------------------------------------------------------------ points that fire several times

START = "embed.hook_out"
"""A hook point that fires once, at the start of each forward pass."""


@dataclass(frozen=True, eq=False)
class NumberedPoint:
    """The n-th firing of the hook point `at`, counted from 0; `name` includes the number."""

    name: str
    at: str
    number: int


_numbered: "WeakKeyDictionary[Any, dict[int, NumberedPoint]]" = WeakKeyDictionary()  # by hook point


def numbered(model: Any, points: Mapping[str, Any]) -> dict[str, Any]:
    """Return hook points by name, in a loop also by number; names of one point share their numbered points."""
    if not is_looped(model):
        return dict(points)
    known = dict(points)
    counts = call_counts(model)
    for name, point in points.items():
        stack, _, rest = name.partition("_")
        if stack not in counts or not rest.startswith(("blocks.", "ln_final.")):
            continue
        head, inside = _split(name)
        for number in range(counts[stack]):
            name_of_call = f"{head}@{number}.{inside}"
            of_point = _numbered.setdefault(point, {})
            known[name_of_call] = of_point.setdefault(number, NumberedPoint(name_of_call, name, number))
    return known


def _split(name: str) -> tuple[str, str]:
    """Split a name into the block, ``"L_blocks.0"``, or ``"L_ln_final"``, and the rest."""
    parts = name.split(".")
    length = 2 if parts[0].endswith("blocks") else 1
    return ".".join(parts[:length]), ".".join(parts[length:])


def without_numbers(
    model: Any, points: Mapping[str, Any], hooks: Sequence[tuple[Any, Callable[..., Any]]]
) -> list[tuple[Any, Callable[..., Any]]]:
    """Return hooks as TransformerLens takes them: those at numbered points are combined for each point."""
    if not is_looped(model):
        return list(hooks)
    known = numbered(model, points)
    placed: list[tuple[Any, Callable[..., Any]]] = []
    counting: dict[int, _Counting] = {}
    for wanted, function in hooks:
        names = [wanted] if isinstance(wanted, str) else list(filter(wanted, known))
        wanted_points = {id(known[name]): known[name] for name in names if name in known}
        placed += [(name, function) for name in names if not isinstance(known.get(name), NumberedPoint)]
        for point in wanted_points.values():
            if isinstance(point, NumberedPoint):
                at = counting.setdefault(id(points[point.at]), _Counting(point.at))
                at.hooks.setdefault(point.number, []).append((point, function))
    if not counting:
        return placed
    return [(START, _restart(counting.values())), *((at.name, at.hook()) for at in counting.values()), *placed]


@dataclass(eq=False)
class _Counting:
    """The hooks of one point by the number of its firing in a forward pass, counted per thread."""

    name: str
    hooks: dict[int, list[tuple[NumberedPoint, Callable[..., Any]]]] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)

    def hook(self) -> Callable[..., Any]:
        """The hook that is called whenever the point fires."""

        def hook(tensor: Tensor, *, hook: Any) -> Tensor | None:
            home = threading.get_ident()
            number = self.times.get(home, 0)
            self.times[home] = number + 1
            result = tensor
            for point, function in self.hooks.get(number, ()):
                changed = function(result, hook=point)
                result = result if changed is None else changed
            return None if result is tensor else result

        functions = [function for at in self.hooks.values() for _, function in at]
        return _marked(hook, all(getattr(function, "holds_fixed", False) for function in functions))


def _restart(counting: Iterable[_Counting]) -> Callable[..., Any]:
    """Return a hook that restarts the counting."""
    points = list(counting)

    def hook(tensor: Tensor, *, hook: Any) -> None:
        for point in points:
            point.times.pop(threading.get_ident(), None)

    return _marked(hook, True)


def _marked(hook: Callable[..., Any], holds_fixed: bool) -> Callable[..., Any]:
    """Mark a hook for `hooks_on`."""
    hook.holds_fixed = holds_fixed  # pyright: ignore[reportFunctionMemberAccess]
    return hook


# ------------------------------------------------------------------ runs

Value = TypeVar("Value")
FwdHook = tuple[Any, Callable[..., Any]]
"""A hook point's name (or a filter of names) and a function, as TransformerLens takes them."""

_unheld: ContextVar[bool] = ContextVar("unheld", default=False)
_keepers: "WeakKeyDictionary[Any, WeakSet[Any]]" = WeakKeyDictionary()  # by model
_known: ContextVar["_Listing | None"] = ContextVar("known", default=None)


def run(
    model: HookedModel,
    inputs: Mapping[str, Any],
    hooks: Sequence[FwdHook],
    points: Mapping[str, Any] | None = None,
) -> Any:
    """Run the model with some hooks and return its output; the hooks are removed, also on an exception.

    Args:
        model: any TransformerLens model.
        inputs: keyword arguments of its forward.
        hooks: names (or filters of names) and functions.
        points: the model's hook points, if just listed: listing those of a Bridge with 30 layers takes 5 ms.

    Raises:
        InvalidInputError: inside ``torch.autocast``.
        FrozenModelError: these hooks were removed while the model ran.

    >>> from tensorlens_tl.hooks import run
    >>> run(model, frozen.inputs, [("hook_embed", lambda activation, hook: print(activation.shape))]).shape
    torch.Size([1, 7, 128])
    torch.Size([1, 7, 2048])
    """
    refuse_autocast(next(model.parameters()).device)
    placed = [*hooks, *progress_hooks()]
    whole_model: Any = model
    with lock_of(model), run_placing(model) as placing:
        try:
            points = dict(hook_points(model) if points is None else points)
            if is_looped(model):
                placed = without_numbers(model, points, placed)
            if model not in _keepers:
                _keepers[model] = WeakSet(module for module in whole_model.modules() if "_pattern" in vars(module))
            for module in _keepers[model]:
                module._pattern = None
                placing.on_module(module, _drop)
            placing.at_points(model, points, placed)
            output = whole_model.forward(**inputs)
            if not placing.is_whole:
                raise FrozenModelError(_TAKEN_OFF)
            return output
        except Exception as error:
            if placing.is_whole or isinstance(error, FrozenModelError):
                raise
            raise FrozenModelError(_TAKEN_OFF) from error


@contextmanager
def hooked(model: HookedModel, hooks: Sequence[FwdHook]) -> Generator[None, None, None]:
    """Install hooks while the context is open, as ``model.hooks`` does; the caller holds the model's lock.

    Raises `FrozenModelError` if they were removed meanwhile.
    """
    with Placing() as placing:
        placing.at_points(model, hook_points(model), hooks)
        yield
        if not placing.is_whole:
            raise FrozenModelError(_TAKEN_OFF)


_TAKEN_OFF = (
    "the library's hooks were removed from the model during a run, so the result would be wrong: a hook, or another "
    "thread, called reset_hooks() or remove_hooks(). Let it remove only its own hooks (`with model.hooks(...)`), or "
    "call it before or after the run."
)


def progress_hooks(note: Callable[[], None] = note_progress) -> list[FwdHook]:
    """Return a hook at the entry of every block that reports progress; none if progress is not watched."""
    if not is_watched():
        return []
    return [(lambda name: name.endswith(".hook_resid_pre"), in_this_thread(lambda activation, hook: note()))]


def drop_patterns(module: Any) -> None:
    """Drop the last patterns that a Bridge's joint attention stored on itself or its submodules."""
    for part in module.modules():
        if "_pattern" in vars(part):
            part._pattern = None


def _drop(module: Any, args: Any, output: Any) -> None:
    """Drop the last pattern that a Bridge's joint attention stores on itself, which nothing reads."""
    module._pattern = None


@contextmanager
def unheld_run(model: HookedModel) -> Generator[None, None, None]:
    """Run the original model inside: this thread holds its lock, and a frozen pass's hooks do nothing."""
    with listed_once(model):
        take_off_leftovers(model)
        with _set(_unheld, True):
            yield


@contextmanager
def listed_once(model: HookedModel) -> Generator[None, None, None]:
    """Hold the model's lock and list its hook points once inside: a Bridge rebuilds the list at every call."""
    with lock_of(model), _set(_known, _listing(model)):
        yield


@contextmanager
def _set(variable: ContextVar[Value], value: Value) -> Generator[None, None, None]:
    """Give a variable another value while the context is open."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:  # twice, as an interrupt may come in between
        try:
            variable.set(before)
        finally:
            variable.set(before)


class _Listing:
    """A model's hook points and modules, each listed at first use."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @cached_property
    def points(self) -> dict[str, Any]:
        return dict(self.model.hook_dict)

    @cached_property
    def modules(self) -> list[nn.Module]:
        return list(whole(self.model))


def _listing(model: Any) -> _Listing:
    """Return the listing of this model that `listed_once` holds, or a new one."""
    known = _known.get()
    return known if known is not None and known.model is model else _Listing(model)


def hook_points(model: HookedModel) -> dict[str, Any]:
    """Return the model's hook points by name."""
    return _listing(model).points


def modules(model: Any) -> list[nn.Module]:
    """Return all modules of a model; for a Bridge also those of the wrapped model."""
    return _listing(model).modules


def is_unheld() -> bool:
    """Return whether this thread is inside `unheld_run`."""
    return _unheld.get()


def in_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing in other threads."""
    return partial(_in_thread, threading.get_ident(), function)


def _in_thread(home: int, function: Callable[..., Any], tensor: Any, *, hook: Any) -> Any:
    if threading.get_ident() != home:
        return None
    return function(tensor, hook=hook)


# ------------------------------------------------------------------ which hooks are on a model

LIBRARIES = ("transformer_lens.", "transformers.", "accelerate.", "torch.", "tensorlens_tl.whitening.")
"""Libraries whose functions on a module are part of the model: they prepare its weights, or observe."""

OURS = "tensorlens_tl."
"""This library, whose functions are on a module only during a run."""

TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The tables of a module for hooks from torch's `register_…` methods."""

EVERY_MODULE = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""The tables of torch for hooks on every module."""


class PlacedHook(NamedTuple):
    """One hook on a model, at a hook point or a named place of a module.

    A `permanent` hook belongs to the model; `number` is torch's own, unique in this process.
    """

    point: str
    function: Any
    permanent: bool
    number: int

    @property
    def holds_fixed(self) -> bool:
        """Whether the hook belongs to a frozen pass."""
        return getattr(self.function, "holds_fixed", False)


def hooks_on(model: Any) -> list[PlacedHook]:
    """Return every hook on a model, with one name of its point or module; a 4.x Bridge has a few permanent ones."""
    return [*_at_points(model), *_on_modules(model)]


def is_attached(model: Any) -> bool:
    """Return whether hooks of a frozen pass are on the model.

    >>> from tensorlens_tl.hooks import is_attached
    >>> with frozen.attached():
    ...     print(is_attached(model))
    True
    >>> is_attached(model)
    False
    """
    return any(hook.holds_fixed for hook in _at_points(model))


def refuse_attached(model: Any) -> None:
    """Raise `FrozenModelError` if a frozen pass is attached to the model; waits for runs in other threads."""
    with lock_of(model):
        take_off_leftovers(model)
        attached = is_attached(model)
    if attached:
        raise FrozenModelError("a frozen pass is attached to this model; exit its `with frozen.attached():` first.")


def foreign_hooks(model: Any) -> list[PlacedHook]:
    """Return hooks installed by the user, not by a frozen pass or the model's libraries.

    Waits for runs in other threads, whose hooks would otherwise count.
    """
    with lock_of(model):
        take_off_leftovers(model)
        placed = [
            hook
            for hook in _at_points(model)
            if not hook.holds_fixed and not _module_of(hook.function).startswith("transformer_lens.")
        ]
        return [*placed, *_on_modules(model, foreign=True)]


def unembeds_by_libraries(model: Any) -> bool:
    """Return whether all classes that compute logits (model, wrapped model, unembedding) belong to the libraries.

    Each position's logits then depend only on that position's stream.
    """
    unembed = getattr(model, "unembed", nn.Identity())
    parts = [model, getattr(model, "original_model", model), *unembed.modules(), *innermost(unembed).modules()]
    return all(type(part).__module__.startswith((*LIBRARIES, OURS)) for part in parts)


def other_hooks(model: Any) -> list[str]:
    """Return the names of the points and modules that have `foreign_hooks`, each once.

    >>> from tensorlens_tl.hooks import other_hooks
    >>> with model.hooks([("embed.hook_out", lambda activation, hook: activation)]):
    ...     print(other_hooks(model))
    ['embed.hook_out']
    """
    return list(dict.fromkeys(hook.point for hook in foreign_hooks(model)))


def with_other_names(model: Any, names: Sequence[str]) -> list[str]:
    """Return names of hook points and modules, with a hook point's other names in parentheses: a Bridge's have several.

    >>> from tensorlens_tl.hooks import with_other_names
    >>> bridge = tlens.testing.tiny_model("bridge/gpt2")
    >>> with_other_names(bridge, ["blocks.0.ln2.hook_in", "blocks.0.mlp (torch hook)"])
    ['blocks.0.ln2.hook_in (blocks.0.hook_resid_mid)', 'blocks.0.mlp (torch hook)']
    """
    points = hook_points(model)
    shown: list[str] = []
    for name in names:
        others = [other for other, point in points.items() if other != name and point is points.get(name)]
        shown.append(f"{name} ({', '.join(others)})" if others else name)
    return shown


def hook_numbers(model: Any) -> frozenset[int]:
    """Return the numbers of the current `foreign_hooks`, which change when hooks are added or removed."""
    return frozenset(hook.number for hook in foreign_hooks(model))


def _at_points(model: Any) -> Iterator[PlacedHook]:
    """Return the hooks at TransformerLens hook points.

    First checks whether any module has hooks, as most have none: listing the hook points of a 3.9 Bridge is slow.
    """
    if not any(vars(module).get("fwd_hooks") or vars(module).get("bwd_hooks") for module in modules(model)):
        return
    points = {id(point): (name, point) for name, point in reversed(hook_points(model).items())}
    for name, point in points.values():
        for handle in (*point.fwd_hooks, *point.bwd_hooks):
            permanent = bool(getattr(handle, "is_permanent", False))
            yield PlacedHook(name, getattr(handle, "user_hook", None), permanent, handle.hook.id)


def _on_modules(model: Any, *, foreign: bool = False) -> Iterator[PlacedHook]:
    """Return torch's hooks and replaced `forward`s; `foreign` excludes those of libraries, a dozen per Bridge block."""
    names: dict[int, str] = {}
    for module, function, number, what in _registered(model):
        permanent = _is_of_libraries(function)
        if foreign and (permanent or _module_of(function).startswith(OURS)):
            continue
        names = names or _names(model)
        yield PlacedHook(f"{names.get(id(module), 'the model')} ({what})", function, permanent, number)
    for table in EVERY_MODULE:
        for number, function in (getattr(torch_modules, table, None) or {}).items():
            permanent = _is_of_libraries(function)
            if not (foreign and (permanent or _module_of(function).startswith(OURS))):
                yield PlacedHook("every module (torch hook)", function, permanent, number)


def _registered(model: Any) -> Iterator[tuple[nn.Module, Any, int, str]]:
    """Return each module that has a function on it, the function, torch's number of it, and its kind."""
    for module in modules(model):
        attributes = vars(module)
        for table in TABLES:
            for number, function in attributes[table].items():
                if not _module_of(function).startswith("transformer_lens."):  # hooks at hook points are listed there
                    yield module, function, number, "torch hook"
        if "forward" in attributes:
            yield module, attributes["forward"], id(attributes["forward"]), "forward replaced"


def _names(model: Any) -> dict[int, str]:
    """Return every module's shortest name in a model."""
    names: dict[int, str] = {}
    inner = getattr(model, "original_model", None)  # a Bridge's own tree omits some of its modules
    ways = {"": model} if inner is None else {"": model, "original_model.": inner}
    for prefix, tree in ways.items():
        shortest: dict[int, str] = {}
        for name, module in tree.named_modules(remove_duplicate=False):
            name = (prefix + name).removesuffix(".") or "the model"
            shortest[id(module)] = min(shortest.get(id(module), name), name, key=len)
        names = shortest | names
    return names


def _is_of_libraries(function: Any) -> bool:
    return _module_of(function).startswith(LIBRARIES)


def _module_of(function: Any) -> str:
    """Return the name of the module in which a function was defined."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__module__", None) or ""
