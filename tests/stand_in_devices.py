"""Devices that this machine does not have: `cpu:1` and on, whose tensors refuse to be mixed, as those of GPUs do.

torch knows the device `cpu:1` by name, and puts tensors for it where all others are. Inside `several_devices` such a
tensor is an `Elsewhere`: its `device` is the one that was asked for, ``.to(...)`` copies it, autograd moves gradients
back, and an operation on tensors of two devices raises what CUDA raises. As on CUDA, a number (0 dimensions) may be on
the CPU, and so may an index.
"""

from contextlib import contextmanager

import accelerate
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

OTHER = torch.device("cpu", 1)
HOME = torch.device("cpu")
INDEXED = {
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}  # fmt: skip
_active = []
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Elsewhere(torch.Tensor):
    """A tensor of a stand-in device; `numbers` is the plain tensor that it stands for."""

    @staticmethod
    def __new__(cls, numbers, device=None, requires_grad=False):
        numbers = plain(numbers)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device or OTHER,
            requires_grad=requires_grad,
        )

    def __init__(self, numbers, device=None, requires_grad=False):
        self.numbers = plain(numbers)
        self.place = device or OTHER

    def __repr__(self):
        return f"Elsewhere({self.numbers}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return computed(operation, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Puts what is made for a stand-in device there."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return computed(operation, args, kwargs or {})


class Lists(TorchFunctionMode):
    """Puts what is made of lists for a stand-in device there, and gives lists back: these ask no dispatcher."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.tolist:
            return function(plain(args[0]))
        if function is torch.Tensor.new_tensor:
            place = kwargs.pop("device", None) or device_of(args[0])
            return function(plain(args[0]), *args[1:], **kwargs).to(place)
        place = kwargs.get("device")
        if function not in (torch.tensor, torch.as_tensor, torch.from_numpy) or place is None:
            return function(*args, **kwargs)
        return function(*args, **{**kwargs, "device": None}).to(place)


def device_of(tensor):
    return tensor.place if isinstance(tensor, Elsewhere) else HOME


def computed(operation, args, kwargs):
    """What an operation gives, on the device of what it was given, or of the one that it was told."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    devices = {device_of(tensor) for tensor in tensors}
    if operation not in COPIES and len(devices) > 1:
        devices = {device_of(tensor) for tensor in involved(operation, args, tensors)}
        if len(devices) > 1:
            places = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"{operation}: Expected all tensors to be on the same device, found {places}")
    target = kwargs.get("device")
    if target is None and tensors:
        target = device_of(tensors[0]) if operation in COPIES else next(iter(devices))
    target = HOME if target is None or target.index in (None, 0) else target
    plain_args, plain_kwargs = tree_map(plain, (args, {**kwargs}))
    if "device" in kwargs:
        plain_kwargs["device"] = HOME
    before = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, Elsewhere)}
    result = operation(*plain_args, **plain_kwargs)
    if operation is torch.ops.aten._to_copy.default and any(result is value for value in plain_args):
        result = result.clone()

    def wrapped(value):
        if not isinstance(value, torch.Tensor) or target == HOME:
            return value
        return before.get(id(value)) if id(value) in before else Elsewhere(value, target)

    return tree_map(wrapped, result)


def involved(operation, args, tensors):
    """The tensors that must be on one device."""
    if operation in INDEXED:
        tensors = [args[0], *(index for index in args[1] if device_of(args[0]) == HOME and index is not None)]
    return [tensor for tensor in tensors if tensor.ndim or device_of(tensor) != HOME] or tensors


def plain(value):
    return value.numbers if isinstance(value, Elsewhere) else value


@contextmanager
def several_devices():
    """Inside, `cpu:1` and on are devices of their own; nested uses are one."""
    if _active:
        yield
        return
    _active.append(True)
    try:
        with Lists(), Factories():
            yield
    finally:
        _active.clear()


def with_last_blocks_elsewhere(module):
    """A Hugging Face model whose last block of each stack, and what follows it, is on the other device.

    What shares its weight with the embedding stays with it. accelerate moves what the parts read.
    """
    accelerate.dispatch_model(module, _places(module), main_device="cpu", force_hooks=True)
    return module


def _places(module):
    """The device of every part, by name."""
    stacks = [
        name
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.ModuleList) and len(part) > 1 and not any(map(str.isdigit, name.split(".")))
    ]
    embedding = module.get_input_embeddings()
    places = {name: HOME for name, _ in module.named_buffers(recurse=False)}
    after = False
    for name, part in module.named_modules():
        if any(name == stack or name.startswith(f"{stack}.") for stack in stacks):
            stack, _, number = name.rpartition(".")
            if stack in stacks:
                after = int(number) == len(module.get_submodule(stack)) - 1
                places[name] = OTHER if after else HOME
            continue
        holds_others = not name or any(stack.startswith(f"{name}.") for stack in stacks)
        if holds_others or not (part._parameters or part._buffers):
            continue
        tied = any(weight is embedding.weight for weight in part._parameters.values())
        places[name] = OTHER if after and not tied else HOME
    return places


def put(module, device=OTHER):
    """Put the weights of a module on a stand-in device, in place."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, weight in held.items():
                if weight is not None:
                    trained = weight.requires_grad
                    held[name] = Elsewhere(weight.detach(), device)
                    if held is part._parameters:
                        held[name] = torch.nn.Parameter(held[name], requires_grad=trained)
