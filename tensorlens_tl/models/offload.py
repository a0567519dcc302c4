"""Weights that lie elsewhere between calls: on disk or in the CPU's memory, brought in by accelerate's hooks.

A module that accelerate has offloaded keeps its parameters on torch's ``meta`` device, with a shape and no numbers; its
hook reads them before the module runs and drops them after. `loaded` does the same for a reading of the weights.
Nothing here imports accelerate: a hook is known by what it holds.

A product saves its weights for the backward pass, so that the graph of a whole run would hold all weights of a model
that is larger than memory. Inside `saved_by_name` it holds the module and the name of each, and a backward pass reads
them again one at a time, the last block's first.
"""

import json
import os
import threading
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tensorlens_tl.errors import UnsupportedModelError

Read = TypeVar("Read")

_locks: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # by model
_guard = threading.Lock()


def lock_of(model: Any) -> Any:
    """The lock of one model; a thread that holds it may take it again."""
    with _guard:
        return _locks.setdefault(model, threading.RLock())


def offload_hooks(module: nn.Module) -> list[Any]:
    """The hooks of accelerate that bring a module's weights in."""
    hook: Any = vars(module).get("_hf_hook")  # not getattr: a Bridge's component hands on that of what it wraps
    if hook is None:
        return []
    hooks = getattr(hook, "hooks", (hook,))  # several of them come as one
    return [each for each in hooks if getattr(each, "offload", False) and hasattr(each, "weights_map")]


def modules_of(*parts: Any) -> Iterator[nn.Module]:
    """The modules inside some parts of a model, each once and in their order; parts that are none are left out."""
    seen: set[nn.Module] = set()
    stack = [part for part in reversed(parts) if isinstance(part, nn.Module)]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            yield module
            stack += [child for child in reversed(module._modules.values()) if child is not None]


def whole(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model: a Bridge's own tree leaves out some of those that it wraps."""
    return modules_of(model, getattr(model, "original_model", None))


def offloaded(*parts: Any) -> bool:
    """True if any module inside these parts is offloaded."""
    return any(offload_hooks(module) for module in modules_of(*parts))


@contextmanager
def loaded(*parts: Any) -> Generator[bool, None, None]:
    """Load the weights of every offloaded module of some parts, and drop them afterwards; yields whether any was
    loaded.

    Modules that are loaded already stay so: this may be nested, also in a module's own run.
    """
    opened: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules_of(*parts):
            for hook in offload_hooks(module):
                if any(weight.is_meta for weight in module.parameters(recurse=bool(hook.place_submodules))):
                    opened.append((module, hook))
                    before = hook.input_device  # of a run that this may be inside of
                    _bring(module, hook)
                    hook.input_device = before
        yield bool(opened)
    finally:
        for module, hook in reversed(opened):
            hook.post_forward(module, None)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """What a module computes with the weights that it has now: accelerate's own call would drop them after."""
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


@runtime_checkable
class Reader(Protocol):
    """What has weights that are read: a block, or a model's other parts."""

    def loaded(self, *names: str) -> AbstractContextManager[None]:
        """Bring in what properties read."""
        ...

    def placed(self, name: str, value: Any) -> Any:
        """What a property has read, on the device that it is used on."""
        ...


class weights_read(cached_property[Read]):  # noqa: N801 — used as functools.cached_property is
    """A `cached_property` of weights; an offloaded part's are read each time, or once in the innermost `opened`."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Read it, with the weights loaded."""
        if instance is None:
            return self
        assert self.attrname is not None
        with instance.loaded(self.attrname):
            value = instance.placed(self.attrname, super().__get__(instance, owner))
            vars(instance)[self.attrname] = value
            return value


class Residence:
    """Whether parts of a model are loaded for as long as they are read; `near` is read ahead, `loads` counts loads."""

    def __init__(self, model: Any, *parts: Any, near: Sequence[nn.Module] = ()):
        self.model = model
        self.parts = parts
        self.near = near
        self.loads = 0
        self._names: set[str] = set()
        self._depth = 0

    @contextmanager
    def opened(self, values: dict[str, Any], *names: str) -> Generator[None, None, None]:
        """Inside, the weights stay loaded; at the end of the outermost, all names read inside leave `values`."""
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
        """One for a copy of what reads the weights, whose `values` are left without what is loaded just now."""
        self._leave(values)
        other = Residence(self.model, *self.parts, near=self.near)
        other.loads = self.loads
        return other

    def _leave(self, values: dict[str, Any]) -> None:
        for name in self._names:
            values.pop(name, None)


def read_ahead(parts: Iterable[nn.Module]) -> None:
    """Have the system read the files of some parts' weights into its cache, where it takes such a hint."""
    if not hasattr(os, "posix_fadvise"):
        return
    for part in parts:
        for path, name, changed, _ in sources(part)[1]:
            start, length = 0, 0  # all of the file
            if path.endswith(".safetensors"):
                start, length = _places(path, changed)[name]
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


@lru_cache(maxsize=64)
def _places(path: str, changed: int) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file begins, and how many bytes it takes; read again once the file changes."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + size + start, end - start) for name, (start, end) in ends.items()}


def sources(model: nn.Module) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """Return where a model's numbers lie: tensors in memory, and the files of offloaded ones with their times and
    sizes."""
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
    """``list(model.parameters())`` without the names, which take most of its time; of a Bridge, those that it wraps."""
    modules = modules_of(getattr(model, "original_model", model))
    weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
    return list({id(weight): weight for weight in weights}.values())


def version_of(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight is replaced, moved or written to: its storage, and torch's own count of writes."""
    if weight.is_inference():  # tensors made under inference_mode keep no count
        return weight.data_ptr(), 0
    return weight.data_ptr(), weight._version


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight that is offloaded, by its name in its module, read one at a time."""
    return ((each.name, each.hook.weights_map[each.name]) for each in _away(model))


class _Away(NamedTuple):
    """A weight that is offloaded: the module with the hook that holds it, its name in both, and what stands for it."""

    module: nn.Module
    hook: Any
    name: str
    weight: Tensor


def _away(model: nn.Module) -> Iterator[_Away]:
    """Every weight of a model, or of a part of it, that is offloaded."""
    for module in whole(model):
        for hook in offload_hooks(module):
            for name, weight in module.named_parameters(recurse=bool(hook.place_submodules)):
                yield _Away(module, hook, name, weight)


def _source(weights: Any, name: str) -> tuple[Tensor | None, tuple[Any, ...] | None]:
    """A weight that its hook holds in memory, or the file that it reads it from; neither where it knows none."""
    if isinstance(weights, ChainMap):  # TransformerLens puts the bias of an unembedding before the others
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
    """Where a part of a model runs: the device of its first weight, or the one that this is brought to."""
    first = next(part.parameters(), torch.empty(0))
    if not first.is_meta:
        return first.device
    for each in _away(part):
        if each.weight is first and each.hook.execution_device is not None:
            return torch.device(each.hook.execution_device)
    return first.device


def refuse_offloaded(model: Any, what: str) -> None:
    """Raise `UnsupportedModelError` for a model whose weights cannot be written to, as they are brought in again."""
    if any(offload_hooks(module) for module in whole(model)):
        raise UnsupportedModelError(
            f"{what}: this model's weights are offloaded and read again for every run, so that nothing written to them "
            "would stay. Load it into memory (without device_map or offload_folder)."
        )


# ------------------------------------------------------------------ what autograd saves


class Place(NamedTuple):
    """Where the numbers of a saved tensor are: a view of one weight of an offloaded module."""

    module: nn.Module
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


Weights = dict[int, list[tuple[nn.Module, str]]]
"""The offloaded matrices of a model, module and name, by their size in bytes."""


@contextmanager
def saved_by_name(model: Any) -> Generator[None, None, None]:
    """Inside, a graph of this model stores no offloaded matrix; its backward passes read them again.

    Run and backward passes both belong inside, under the model's lock. Offloaded weights take no gradient there, as a
    graph stores those that do.
    """
    with lock_of(model):
        weights: Weights = {}
        for module, _, name, weight in _away(model):
            if weight.ndim > 1:  # vectors are too small to be worth reading again
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


def _packed(saved: Tensor, weights: Weights) -> Tensor | Place:
    """Return a saved tensor, or a loaded weight's place, if it is one.

    Detached: an output that its own node keeps in Python would never be freed.
    """
    if saved.ndim < 2 or saved.layout is not torch.strided:
        return saved.detach()
    storage = saved.untyped_storage()
    for module, name in weights.get(storage.nbytes(), ()):
        weight = module.get_parameter(name)
        if not weight.is_meta and weight.dtype is saved.dtype and weight.data_ptr() == storage.data_ptr():
            return Place(module, name, saved.size(), saved.stride(), int(saved.storage_offset()))
    return saved.detach()


def _unpacked(saved: Tensor | Place) -> Tensor:
    """The numbers of a saved tensor, read again where they lie elsewhere."""
    if isinstance(saved, Tensor):
        return saved
    with torch.inference_mode(False), torch.no_grad(), loaded(saved.module):
        weight = saved.module.get_parameter(saved.name)
        return weight.detach().as_strided(saved.size, saved.stride, saved.offset)
