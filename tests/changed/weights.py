"""Tiny models of both classes, and their weights by one name each: `x @ matrix(model, layer, part)`."""

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens_tl.testing import model_names, tiny_model

MODELS = [name for name in ("hooked/ln", "hooked/gated", "bridge/gpt2", "bridge/llama") if name in model_names()]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOUD, WEAK = 12.0, 0.3
"""One channel of the stream is large, as trained models have them, and one head of each layer writes little: what is
changed of that head is little beside the stream."""

WIDTH, HEADS, HEAD, NEURONS = 16, 4, 4, 24


def built(name: str, dtype: torch.dtype) -> Any:
    """A fresh model; of half precision, with the weights that rounding leaves."""
    model = tiny_model(name)
    with torch.no_grad(), redirect_stdout(StringIO()):
        if not is_hooked(model):  # an adapter on a tied unembedding would be one on the embedding too
            linear = inner(model, None, "unembed")
            linear.weight = nn.Parameter(linear.weight.detach().clone())
        embedding(model)[:, 3] += LOUD
        for layer in (0, 1):
            weak = torch.ones(WIDTH, 1, dtype=torch.float64)
            weak[2 * HEAD : 3 * HEAD] = WEAK
            scale_matrix(model, layer, "o", weak)
        return model.to(dtype)


def vector(size: int, seed: int = 0, scale: float = 0.5) -> Tensor:
    """The numbers that a change adds."""
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------ weights of either class


def is_hooked(model: Any) -> bool:
    """Whether it is a HookedTransformer."""
    return not hasattr(model, "original_model")


def is_gated(model: Any) -> bool:
    """Whether its MLPs have gates."""
    if is_hooked(model):
        return hasattr(model.blocks[0].mlp, "W_gate")
    return "blocks.0.mlp.gate.hook_in" in model.hook_dict


def wrapper(model: Any, layer: int | None, part: str) -> Any:
    """The Bridge's module around a linear: q, k, v, o, gate, in, out, or unembed."""
    where = "attn" if part in "qkvo" else "mlp"
    point = model.hook_dict["unembed.hook_in" if layer is None else f"blocks.{layer}.{where}.{part}.hook_in"]
    (owner,) = {id(m): m for m in model.modules() if m._modules.get("hook_in") is point}.values()
    return owner


def inner(model: Any, layer: int | None, part: str) -> Any:
    """The linear module itself."""
    return wrapper(model, layer, part).original_component


HOOKED = {"q": "Q", "k": "K", "v": "V", "o": "O", "in": "in", "gate": "gate", "out": "out", "unembed": "U"}


def _hooked_home(model: Any, layer: int | None, part: str) -> Any:
    if layer is None:
        return model.unembed
    return model.blocks[layer].attn if part in "qkvo" else model.blocks[layer].mlp


def matrix(model: Any, layer: int | None, part: str) -> Tensor:
    """A weight as ``x @ W`` reads it, `[d_in, d_out]`, copied."""
    if not is_hooked(model):
        module = inner(model, layer, part)
        weight = module.weight.detach().clone()
        return weight.T.contiguous() if isinstance(module, nn.Linear) else weight
    weight = getattr(_hooked_home(model, layer, part), f"W_{HOOKED[part]}").detach().clone()
    if part in "qkv":
        return weight.permute(1, 0, 2).flatten(1)
    return weight.flatten(0, 1) if part == "o" else weight


@torch.no_grad()
def set_matrix(model: Any, layer: int | None, part: str, new: Tensor) -> None:
    """Write what `matrix` read."""
    if not is_hooked(model):
        module = inner(model, layer, part)
        module.weight.copy_(new.T if isinstance(module, nn.Linear) else new)
        return
    weight = getattr(_hooked_home(model, layer, part), f"W_{HOOKED[part]}")
    if part in "qkv":
        new = new.unflatten(1, (HEADS, HEAD)).permute(1, 0, 2)
    weight.copy_(new.reshape(weight.shape))


@torch.no_grad()
def add_bias(model: Any, layer: int | None, part: str, added: Tensor) -> None:
    """Add to a linear's bias, which is made where there is none."""
    if is_hooked(model):
        home = _hooked_home(model, layer, part)
        if part == "gate":  # a HookedTransformer's gate has no bias
            raise NoEquivalentError
        bias = getattr(home, f"b_{HOOKED[part]}")
        bias.add_(added.to(bias).reshape(bias.shape))
        return
    module = inner(model, layer, part)
    if module.bias is None:
        module.bias = nn.Parameter(added.to(module.weight))
    else:
        module.bias.add_(added.to(module.bias))


class NoEquivalentError(Exception):
    """No untouched model gives these numbers."""


def embedding(model: Any) -> Tensor:
    return model.embed.W_E if is_hooked(model) else bridge_weight(model, "embed")


def bridge_weight(model: Any, name: str) -> Tensor:
    point = model.hook_dict[f"{name}.hook_in"]
    (owner,) = {id(m): m for m in model.modules() if m._modules.get("hook_in") is point}.values()
    return owner.original_component.weight


@torch.no_grad()
def add_to_stream(model: Any, added: Tensor, position: int | None = None) -> None:
    """Add to what enters the first block, at every position or at one."""
    if is_hooked(model):
        table = model.pos_embed.W_pos
    elif "pos_embed.hook_in" in model.hook_dict:
        table = bridge_weight(model, "pos_embed")
    elif position is None:
        table = embedding(model)
    else:  # a token's embedding goes wherever the token goes
        raise NoEquivalentError
    rows = slice(None) if position is None else position
    table[rows] += added.to(table)


def scale_matrix(model: Any, layer: int, part: str, factor: Any) -> None:
    """Multiply a weight, columns or rows by what broadcasts."""
    set_matrix(model, layer, part, matrix(model, layer, part) * factor)
