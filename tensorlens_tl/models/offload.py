"""Weights that are offloaded between calls, to disk or CPU memory, and brought in by accelerate's hooks.

A module that accelerate has offloaded keeps its parameters on torch's ``meta`` device, with a shape but no numbers; its
hook loads them before the module runs and drops them afterwards. `loaded` does the same while weights are read. Nothing
here imports accelerate: a hook is recognised by its attributes.

A product saves its weights for the backward pass, so the graph of a whole run would hold all weights of a model that
may not fit into memory. Inside `saved_by_name`, it stores the module and name of each weight instead, and the backward
pass reads them again one at a time, the last block's first.
"""

import json
import os
import threading
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tensorlens_tl.errors import UnsupportedModelError

Read = TypeVar("Read")

_locks: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # by model
_guard = threading.Lock()


def lock_of(model: Any) -> Any:
    """Return the lock of a model, which is re-entrant."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


def offload_hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks that bring in a module's weights."""
    hook: Any = vars(module).get("_hf_hook")  # not getattr: a Bridge's component forwards to what it wraps
    if hook is None:
        return []
    hooks = getattr(hook, "hooks", (hook,))  # several hooks are combined in one
    return [each for each in hooks if getattr(each, "offload", False) and hasattr(each, "weights_map")]


def modules_of(*parts: Any) -> Iterator[nn.Module]:
    """Yield the modules inside some parts of a model, each once and in order; skips anything that is not a module."""
    seen: set[nn.Module] = set()
    stack = [part for part in reversed(parts) if isinstance(part, nn.Module)]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            yield module
            stack += [child for child in reversed(module._modules.values()) if child is not None]


def whole(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a model, including those that a Bridge wraps but omits from its own tree."""
    return modules_of(model, getattr(model, "original_model", None))


def offloaded(*parts: Any) -> bool:
    """Whether any module inside these parts is offloaded."""
    return any(offload_hooks(module) for module in modules_of(*parts))


@contextmanager
def loaded(*parts: Any) -> Generator[bool, None, None]:
    """Load the weights of every offloaded module of some parts, and drop them afterwards; yield whether any was loaded.

    Modules that are already loaded stay loaded, so this may be nested, also inside a module's own run.
    """
    opened: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules_of(*parts):
            for hook in offload_hooks(module):
                if any(weight.is_meta for weight in module.parameters(recurse=bool(hook.place_submodules))):
                    opened.append((module, hook))
                    before = hook.input_device  # set if this is inside of a run
                    _bring(module, hook)
                    hook.input_device = before
        yield bool(opened)
    finally:
        for module, hook in reversed(opened):
            hook.post_forward(module, None)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return a module's computation with its current weights; accelerate's own call would drop them afterwards."""
    return vars(module).get("_old_forward", module)


def _bring(module: nn.Module, hook: Any) -> None:
    try:
        hook.pre_forward(module)
    except KeyError as error:
        raise UnsupportedModelError(
            f"{error} of a {type(module).__name__} is not among the weights that were offloaded: TransformerLens 3.9 "
            "gives an unembedding a bias when it wraps a model. Let accelerate offload the model after it was wrapped "
            "(accelerate.disk_offload(bridge.original_model, folder)), or use TransformerLens 4.3."
        ) from error


class weights_read(cached_property[Read]):  # noqa: N801 — used as functools.cached_property is
    """A `cached_property` of weights; offloaded ones are read each time, or once within the innermost `opened`.

    Its class has `loaded`, which brings in weights, and `placed`, which moves a value to where it is used.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Read the value, with the weights loaded."""
        if instance is None:
            return self
        assert self.attrname is not None
        with instance.loaded(self.attrname):
            value = instance.placed(self.attrname, super().__get__(instance, owner))
            vars(instance)[self.attrname] = value
            return value


class Residence:
    """Whether parts of a model are loaded while they are read; `near` is read ahead, `loads` counts loads."""

    def __init__(self, model: Any, *parts: Any, near: Sequence[nn.Module] = ()):
        self.model = model
        self.parts = parts
        self.near = near
        self.loads = 0
        self._names: set[str] = set()
        self._depth = 0

    @contextmanager
    def opened(self, values: dict[str, Any], *names: str) -> Generator[None, None, None]:
        """Keep weights loaded inside the context; leaving the outermost one removes all names read from `values`."""
        with lock_of(self.model), loaded(*self.parts) as fresh:
            self.loads += fresh
            if fresh:
                read_ahead(self.near)
            self._depth += 1
            self._names.update(names)
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    self._leave(values)
                    self._names.clear()

    def renewed(self, values: dict[str, Any]) -> "Residence":
        """Return a residence for a copy of its owner, removing what is currently loaded from the copy's `values`."""
        self._leave(values)
        other = Residence(self.model, *self.parts, near=self.near)
        other.loads = self.loads
        return other

    def _leave(self, values: dict[str, Any]) -> None:
        for name in self._names:
            values.pop(name, None)


def read_ahead(parts: Iterable[nn.Module]) -> None:
    """Ask the system to read the files of some parts' weights into its cache, if it supports such hints."""
    if not hasattr(os, "posix_fadvise"):
        return
    for part in parts:
        for path, name, changed, _ in sources(part)[1]:
            start, length = 0, 0  # the whole file
            if path.endswith(".safetensors"):
                start, length = _places(path, changed)[name]
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


@lru_cache(maxsize=64)
def _places(path: str, changed: int) -> dict[str, tuple[int, int]]:
    """Return offset and size in bytes of each tensor in a safetensors file; cached until the file changes."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + size + start, end - start) for name, (start, end) in ends.items()}


def sources(model: nn.Module) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Return a model's tensors in memory, and the files of offloaded ones with their times and sizes."""
    weights = _parameters_of(model)
    files: list[tuple[Any, ...]] = []
    if not any(weight.is_meta for weight in weights):
        return weights, files
    away = list(_away(model))
    brought = {id(each.weight) for each in away}
    tensors = [weight for weight in weights if not weight.is_meta and id(weight) not in brought]
    for each in away:
        tensor, file = _source(each.hook.weights_map, each.name)
        if tensor is not None:
            tensors.append(tensor)
        if file is not None:
            files.append(file)
    return tensors, files


def _parameters_of(model: nn.Module) -> list[Tensor]:
    """Return a model's parameters without looking up names, which takes most of the time; for a Bridge, the wrapped."""
    modules = modules_of(getattr(model, "original_model", model))
    weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
    return list({id(weight): weight for weight in weights}.values())


def version_of(weight: Tensor) -> tuple[int, int]:
    """Return a key that changes when a weight is replaced, moved or written to: its storage and torch's write count."""
    if weight.is_inference():  # tensors created in inference mode have no count
        return weight.data_ptr(), 0
    return weight.data_ptr(), weight._version


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every offloaded weight with its name in its module, reading one at a time."""
    return ((each.name, each.hook.weights_map[each.name]) for each in _away(model))


class _Away(NamedTuple):
    """An offloaded weight: the module with the hook that holds it, its name in both, and its placeholder."""

    module: nn.Module
    hook: Any
    name: str
    weight: Tensor


def _away(model: nn.Module) -> Iterator[_Away]:
    """Yield every offloaded weight of a model or part."""
    for module in whole(model):
        for hook in offload_hooks(module):
            for name, weight in module.named_parameters(recurse=bool(hook.place_submodules)):
                yield _Away(module, hook, name, weight)


def _source(weights: Any, name: str) -> tuple[Tensor | None, tuple[Any, ...] | None]:
    """Return a weight that its hook holds in memory, or the file it is read from; neither if the hook has none."""
    if isinstance(weights, ChainMap):  # TransformerLens prepends the bias of an unembedding
        sources = (_source(each, name) for each in weights.maps)
        return next((source for source in sources if any(part is not None for part in source)), (None, None))
    while hasattr(weights, "dataset") and hasattr(weights, "prefix"):
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    in_memory = getattr(weights, "state_dict", weights)
    if name in in_memory:
        return in_memory[name], None
    entry: Any = getattr(weights, "index", {}).get(name)
    if entry is None:
        return None, None
    folder: Any = getattr(weights, "save_folder", None)
    path = Path(entry.get("safetensors_file") or Path(folder or ".") / f"{name}.dat")
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{name} was offloaded to {path}, which is gone. Offload the model again, to a folder that stays."
        ) from None
    return None, (str(path), entry.get("weight_name", name), status.st_mtime_ns, status.st_size)


def execution_device(part: nn.Module) -> torch.device:
    """Return the device on which a part runs: that of its first weight once it is loaded."""
    first = next(part.parameters(), torch.empty(0))
    if not first.is_meta:
        return first.device
    for each in _away(part):
        if each.weight is first and each.hook.execution_device is not None:
            return torch.device(each.hook.execution_device)
    return first.device


def refuse_offloaded(model: Any, what: str) -> None:
    """Raise `UnsupportedModelError` for offloaded weights, since anything written to them would be lost."""
    if any(offload_hooks(module) for module in whole(model)):
        raise UnsupportedModelError(
            f"{what}: this model's weights are offloaded and read again for every run, so anything written to them "
            "would be lost. Load it into memory (without device_map or offload_folder)."
        )


# ------------------------------------------------------------------ tensors that autograd saves


class SavedView(NamedTuple):
    """Where a saved tensor's numbers are: a view of one weight of an offloaded module."""

    module: nn.Module
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


Weights = dict[int, list[tuple[nn.Module, str]]]
"""The offloaded matrices of a model, as module and name, by their size in bytes."""


@contextmanager
def saved_by_name(model: Any) -> Generator[None, None, None]:
    """Keep offloaded matrices out of this model's autograd graphs; backward passes read them again.

    Both the run and the backward pass must be inside, under the model's lock. Offloaded weights get no gradient there,
    since a graph stores weights that require one.
    """
    with lock_of(model):
        weights: Weights = {}
        for module, _, name, weight in _away(model):
            if weight.ndim > 1:  # vectors are too small to be worth rereading
                weights.setdefault(weight.numel() * weight.element_size(), []).append((module, name))
        if not weights:
            yield
            return
        trained = [(module, name) for module, _, name, weight in _away(model) if weight.requires_grad]
        for module, name in trained:
            module.get_parameter(name).requires_grad_(False)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: _packed(saved, weights), _unpacked):
                yield
        finally:
            for module, name in trained:
                module.get_parameter(name).requires_grad_(True)


def _packed(saved: Tensor, weights: Weights) -> Tensor | SavedView:
    """Return a saved tensor or, if it is a loaded weight, its place.

    Detached, since an output kept by its own node in Python would never be freed.
    """
    if saved.ndim < 2 or saved.layout is not torch.strided:
        return saved.detach()
    storage = saved.untyped_storage()
    for module, name in weights.get(storage.nbytes(), ()):
        weight = module.get_parameter(name)
        if not weight.is_meta and weight.dtype is saved.dtype and weight.data_ptr() == storage.data_ptr():
            return SavedView(module, name, saved.size(), saved.stride(), int(saved.storage_offset()))
    return saved.detach()


def _unpacked(saved: Tensor | SavedView) -> Tensor:
    """Return the numbers of a saved tensor, reading them again if they are offloaded."""
    if isinstance(saved, Tensor):
        return saved
    with torch.inference_mode(False), torch.no_grad(), loaded(saved.module):
        weight = saved.module.get_parameter(saved.name)
        return weight.detach().as_strided(saved.size, saved.stride, saved.offset)
