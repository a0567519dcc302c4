"""Layers of other libraries that wrap a layer of the model and add to what it gives, such as those of peft.

Nothing here imports peft: its layers are known by what they hold, a `base_layer` (LoRA and the like) or an
`original_module` (a part that was trained whole), and by the names of the adapters that are active.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from tensorlens_tl.models.parameters.offload import whole

WRAPPED = {"base_layer", "original_module"}
"""What adapters call the layer that they wrap."""

State = tuple[tuple[str, ...], tuple[str, ...], bool, tuple[tuple[str, float], ...]]


def is_adapter(module: Any) -> bool:
    """Whether a module wraps another one, with adapters that can be switched."""
    inside = getattr(module, "_modules", None)
    return bool(inside) and not inside.keys().isdisjoint(WRAPPED) and hasattr(module, "active_adapters")


def in_effect(module: Any) -> tuple[str, ...]:
    """The names of the adapters that change what a module gives, or are merged into its weights."""
    active, merged, disabled, _ = adapter_state(module)
    if disabled:
        return ()
    holders = [getattr(module, name, ()) for name in _holders(module)]
    return merged or tuple(name for name in active if any(name in holder for holder in holders))


def _holders(module: Any) -> tuple[str, ...]:
    """The attributes of an adapter's layer that hold its parameters by adapter."""
    return (*getattr(module, "adapter_layer_names", ()), "modules_to_save", "token_adapter")


def adapter_state(module: Any) -> State:
    """What an adapter's layer can be switched to without any change of a parameter: active, merged, off, scales."""
    scaling = getattr(module, "scaling", None)
    scales: dict[str, Any] = {}
    if isinstance(scaling, dict):
        scales = scaling
    return (
        tuple(module.active_adapters),
        tuple(getattr(module, "merged_adapters", ())),
        bool(getattr(module, "disable_adapters", False)),
        tuple(sorted((name, float(scale)) for name, scale in scales.items())),
    )


def adapter_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The adapters' layers of a model."""
    return (module for module in whole(model) if is_adapter(module))


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """The names of all adapters in effect in a model or a part of it, in alphabetical order."""
    return tuple(sorted({name for module in adapter_layers(model) for name in in_effect(module)}))


def copied(layer: nn.Module) -> nn.Module:
    """A copy of an adapter's layer in float32 at least: a small adapter would be lost in a half-precision sum.

    Hooks of accelerate, which hold the weights of a whole model, are not copied: what they bring in is loaded now.
    """
    dtype = torch.float32
    shared = dict[int, Any]()
    for module in layer.modules():
        hook = vars(module).get("_hf_hook")
        if hook is not None:
            shared[id(hook)] = None
    for parameter in layer.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    wide = copy.deepcopy(layer, shared)
    for module in wide.modules():
        if "_hf_hook" in vars(module):
            for name in ("_hf_hook", "_old_forward", "forward"):
                vars(module).pop(name, None)
    return wide.to(dtype).requires_grad_(False)


def merge(layer: Any) -> Any:
    """Merge the adapters of a copied layer that are in effect, by its own means; returns its base layer.

    Raises:
        NotImplementedError, RuntimeError, ValueError: an adapter that cannot be merged.
    """
    base = layer.base_layer
    if layer.disable_adapters or layer.merged_adapters:
        return base
    if getattr(base, "bias", None) is None and any(getattr(layer, "lora_bias", {}).values()):
        width = stored_linear(base).shape[1]
        base.bias = nn.Parameter(base.weight.new_zeros(width), requires_grad=False)
    layer.merge()
    return base


def stored_linear(module: Any) -> Shaped[Tensor, "d_in d_out"]:
    """A linear layer's weight from input to output, as Hugging Face's `Conv1D` stores it; others do the transpose."""
    from transformers.pytorch_utils import Conv1D  # transformers is slow to import

    return module.weight if isinstance(module, Conv1D) else module.weight.T
