"""Small readings of modules: what a Bridge wraps, tensors without their graph, activation functions."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import maybe, upcast
from tensorlens_tl.models.activations import Activation


def innermost(module: Any) -> Any:
    """What a component of a Bridge wraps, however deep; any other module itself."""
    while hasattr(module, "original_component"):
        module = module.original_component
    return module


def widened(module: nn.Module) -> nn.Module:
    """The same module with its weights in float32 at least, to see what it computes without half precision's rounding.

    It stands beside the module, which nobody else sees changed, and runs the same hooks. A module whose `forward` was
    replaced runs with the weights that the replacement knows, and is returned itself.
    """
    accelerated = "_hf_hook" in vars(module)  # its weights are loaded now, and its `forward` is accelerate's
    narrow = any(upcast(tensor) is not tensor for tensor in (*module.parameters(), *module.buffers()))
    if not narrow or ("forward" in vars(module) and not accelerated):
        return module
    aside = object.__new__(type(module))
    attributes = dict(vars(module))
    if accelerated:
        for name in ("_hf_hook", "_old_forward", "forward"):
            attributes.pop(name, None)
    for table in ("_parameters", "_buffers"):
        attributes[table] = {name: maybe(_wide, tensor) for name, tensor in attributes[table].items()}
    attributes["_modules"] = {name: maybe(widened, child) for name, child in module._modules.items()}
    vars(aside).update(attributes)
    return aside


def _wide(tensor: Tensor) -> Tensor:
    return upcast(tensor.detach())


def find_activation(component: Any, cfg: Any) -> Activation | None:
    """The activation function of an MLP or head: its own module where it has one, else the one the config names."""
    owners = [owner for owner in (component, getattr(component, "original_component", None)) if owner is not None]
    for owner in owners:
        for name in ("act_fn", "act", "activation_fn", "gelu_impl", "activation"):
            phi = getattr(owner, name, None)
            if callable(phi):
                return _unhooked(phi)
    from transformers.activations import ACT2FN

    name = getattr(cfg, "act_fn", None)
    if isinstance(name, str) and name in ACT2FN:
        return ACT2FN[name]
    return None


def _unhooked(phi: Callable[..., Any]) -> Activation:
    """A Bridge may wrap the activation in a component with hooks of its own; take what it wraps."""
    return getattr(phi, "original_component", None) or phi


def is_bridge_component(module: Any) -> bool:
    """Whether it wraps a part of another library's model."""
    return hasattr(module, "original_component")


def flattened(bias: Tensor) -> Float[Tensor, "width"]:
    """A bias by head, heads side by side."""
    return bias.detach().reshape(-1)


def detached(tensor: Any) -> Tensor | None:
    """A tensor without its graph; None for what is none."""
    return tensor.detach() if isinstance(tensor, Tensor) else None
