"""What autograd saves of weights that lie elsewhere: where they are, in place of their numbers.

A product saves its weights for the backward pass, so that the graph of a whole run would hold all weights of a model
that is larger than memory. Inside `saved_by_name` it holds the module and the name of each, and a backward pass reads
them again one at a time, the last block's first.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens_tl.models.parameters.offload import loaded, lock_of, offload_hooks, whole


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
    """Inside, a graph of this model holds no offloaded matrix, and its backward passes read them again.

    Both the run and its backward passes belong inside; the model's lock is held. Weights take no gradient there, as a
    graph would hold those that do. Of a model in memory nothing is different.
    """
    with lock_of(model):
        weights = _matrices(model)
        if not weights:
            yield
            return
        trained = _without_gradients(model)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: _packed(saved, weights), _unpacked):
                yield
        finally:
            for module, name in trained:
                module.get_parameter(name).requires_grad_(True)


def _names(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Module and name of every offloaded weight."""
    return [
        (module, name)
        for module in whole(model)
        for hook in offload_hooks(module)
        for name, _ in module.named_parameters(recurse=bool(hook.place_submodules))
    ]


def _matrices(model: nn.Module) -> Weights:
    """Those that are worth reading again: vectors are small."""
    weights: Weights = {}
    for module, name in _names(model):
        weight = module.get_parameter(name)
        if weight.ndim > 1:
            weights.setdefault(weight.numel() * weight.element_size(), []).append((module, name))
    return weights


def _without_gradients(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Let offloaded weights take no gradient; those that did are handed back."""
    trained = [(module, name) for module, name in _names(model) if module.get_parameter(name).requires_grad]
    for module, name in trained:
        module.get_parameter(name).requires_grad_(False)
    return trained


def _packed(saved: Tensor, weights: Weights) -> Tensor | Place:
    """A saved tensor, or where its numbers are, if it is a weight that was brought in.

    Detached, as an output that its own node holds in Python would never be freed.
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
