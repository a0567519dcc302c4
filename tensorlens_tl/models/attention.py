"""How is a block's attention read: values, output, and what stands between them and the pattern?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from tensorlens_tl.algebra import Chain, Diagonal, Linear, Norm
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.weights import AttentionWeights, detached, innermost, tried_norm

Refuse = Callable[[str], UnsupportedModelError]
"""Makes an error that names the block."""


def shown(module: Any, name: str) -> Any:
    """A property of a part, or None where there is none: a Bridge says so in errors of several kinds."""
    try:
        return getattr(module, name, None)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def floating(weight: Tensor, name: str, refuse: Refuse) -> Tensor:
    """A weight without its graph.

    Raises:
        UnsupportedModelError: it is quantised.
    """
    if not weight.is_floating_point():
        raise refuse(f"{name} is stored as {weight.dtype} (quantised); load the model in floating point.")
    return weight.detach()


def read_attention(attn: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """The weights of one attention layer.

    Raises:
        UnsupportedModelError: what is not softmax attention with readable weights.
    """
    inner = innermost(attn) if attn is not None else None
    if isinstance(getattr(inner, "kv_b_proj", None), nn.Module):
        return _latent(inner, cfg, refuse)
    W_O, W_V = shown(attn, "W_O"), shown(attn, "W_V")
    if not isinstance(W_O, Tensor) or not isinstance(W_V, Tensor):
        if (read := _by_module(inner, refuse)) is not None:
            return _with_inner_norms(read, inner, cfg)
        raise refuse(
            "no attention with readable W_V and W_O (a state-space, recurrent or compressed-attention "
            "layer?). Only softmax attention can be frozen."
        )
    W_O = floating(W_O, "attn.W_O", refuse)
    # HookedTransformer's W_V is expanded to query heads, its _W_V is not; a Bridge has only the latter, as W_V.
    kept = "_W_V" if hasattr(attn, "_W_V") else "W_V"
    W_V = floating(getattr(attn, kept), "attn.W_V", refuse)
    b_V = shown(attn, kept.replace("W", "b"))
    if W_V.ndim != 3 or W_O.ndim != 3:
        raise refuse(
            f"attn.W_V is {tuple(W_V.shape)} and attn.W_O {tuple(W_O.shape)}, not [head, d_model, d_head] "
            "and [head, d_head, d_model]."
        )
    read = AttentionWeights(
        value_matrix=rearrange(W_V, "kv d_model d_head -> d_model (kv d_head)"),
        b_V=None if b_V is None else b_V.detach().reshape(-1),
        W_O=rearrange(W_O, "head d_head d_model -> (head d_head) d_model"),
        b_O=detached(shown(attn, "b_O")),
        heads=W_O.shape[0],
        kv_heads=W_V.shape[0],
    )
    return _with_inner_norms(read, inner, cfg)


def _by_module(inner: Any, refuse: Refuse) -> AttentionWeights | None:
    """The weights of a layer with a head size of its own (Gemma 4), which a Bridge does not show; None without them.

    Values may be read through the keys' projection.
    """
    projections = (innermost(getattr(inner, name, None)) for name in ("v_proj", "k_proj"))
    values = next((part for part in projections if isinstance(part, nn.Module)), None)
    out, d_head = innermost(getattr(inner, "o_proj", None)), getattr(inner, "head_dim", None)
    if values is None or not isinstance(out, nn.Module) or not isinstance(d_head, int):
        return None
    linear, read = Linear(*_weights(values, "attn.v_proj", refuse)), Linear(*_weights(out, "attn.o_proj", refuse))
    heads, kv_heads = read.weight.shape[0] // d_head, linear.weight.shape[1] // d_head
    return AttentionWeights(linear.weight, linear.offset, read.weight, read.offset, heads, kv_heads)


def _weights(linear: Any, name: str, refuse: Refuse) -> tuple[Tensor, Tensor | None]:
    return floating(linear.weight, name, refuse).T, detached(linear.bias)


def _with_inner_norms(read: AttentionWeights, inner: Any, cfg: Any) -> AttentionWeights:
    """The same, with a norm of values (Gemma 4), a norm before W_O (BitNet) and a gate, where there are any."""
    value_norm, sub_norm = (innermost(getattr(inner, name, None)) for name in ("v_norm", "attn_sub_norm"))
    if isinstance(value_norm, nn.Module):
        assert read.value_matrix is not None
        plain, norm = Linear(read.value_matrix, read.b_V), tried_norm(value_norm, cfg, width=_head_width(read))

        def values(x: Tensor) -> Chain:
            v = plain(x).unflatten(-1, (read.kv_heads, -1))
            factor = (1 / norm.scale_of(v)).to(v).expand_as(v)
            factor = factor if norm.gain is None else factor * norm.gain
            return Chain((plain, Diagonal(factor.flatten(-2))))

        if norm.centre or norm.shift is not None:
            raise UnsupportedModelError(f"{type(value_norm).__name__} of values is centred or shifted; not read.")
        read = replace(read, inner_values=values)
    if isinstance(sub_norm, nn.Module):
        outer = tried_norm(sub_norm, cfg, width=read.W_O.shape[0])
        if outer.centre or outer.shift is not None:
            raise UnsupportedModelError(f"{type(sub_norm).__name__} before W_O is centred or shifted; not read.")
        W_O = read.W_O if outer.gain is None else outer.gain[:, None] * read.W_O
        read = replace(read, W_O=W_O, output_factor=lambda x, z: (1 / outer.scale_of(z)).to(z))
    gate = _gate(inner, read)
    return read if gate is None else replace(read, output_factor=gate)


def _head_width(read: AttentionWeights) -> int:
    assert read.value_matrix is not None
    return read.value_matrix.shape[1] // read.kv_heads


def _gate(inner: Any, read: AttentionWeights) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A gate of what the heads give, from what attention reads: per head or per channel."""
    width = read.W_O.shape[0]
    for name, squash in (("gate_proj", torch.sigmoid), ("g_proj", torch.nn.functional.softplus)):
        linear = innermost(getattr(inner, name, None))
        if isinstance(linear, nn.Module) and isinstance(getattr(linear, "weight", None), Tensor):
            weight = linear.weight
            assert isinstance(weight, Tensor)
            return _Gate(Linear(weight.detach().T, detached(linear.bias)), squash, width // len(weight))
    return _gate_beside_queries(inner, width)


def _gate_beside_queries(inner: Any, width: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A gate that the query projection makes as well, head by head after its query (Qwen3-Next, Qwen3.5)."""
    linear, d_head = innermost(getattr(inner, "q_proj", None)), getattr(inner, "head_dim", None)
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(d_head, int) or len(weight) != 2 * width or width % d_head:
        return None
    halves = [
        None if made is None else made.detach().unflatten(0, (-1, 2, d_head))[:, 1].flatten(0, 1)
        for made in (weight, linear.bias)
    ]
    assert halves[0] is not None
    return _Gate(Linear(halves[0].T, halves[1]), torch.sigmoid, 1)


@dataclass(frozen=True)
class _Gate:
    """``squash(x·W + b)``, each channel for so many channels of what the heads give."""

    linear: Linear
    squash: Callable[[Tensor], Tensor]
    each: int

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        return self.squash(self.linear(x)).repeat_interleave(self.each, dim=-1)


def _latent(inner: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Multi-head latent attention (DeepSeek-V2): values are read from a normed latent vector of each token."""
    down, norm, up, out = (getattr(inner, name, None) for name in (
        "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"
    ))  # fmt: skip
    if not all(isinstance(innermost(part), nn.Module) for part in (down, norm, up, out)):
        raise refuse("latent attention without kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj.")
    down, up, out, norm = (innermost(part) for part in (down, up, out, norm))
    rank = up.weight.shape[1]
    W_down = floating(down.weight, "attn.kv_a_proj_with_mqa", refuse)[:rank].T
    b_down = None if down.bias is None else down.bias.detach()[:rank]
    W_O = floating(out.weight, "attn.o_proj", refuse).T
    width = int(inner.v_head_dim)
    heads = W_O.shape[0] // width
    by_head = floating(up.weight, "attn.kv_b_proj", refuse).unflatten(0, (heads, -1))[:, -width:]
    W_up = rearrange(by_head, "head d rank -> rank (head d)")
    b_up = None if up.bias is None else up.bias.detach().unflatten(0, (heads, -1))[:, -width:].reshape(-1)
    read = tried_norm(norm, cfg, width=rank)

    def values(x: Tensor) -> Chain:
        latent = Linear(W_down, b_down)
        scale = read.scale_of(latent(x))
        return Chain((latent, Norm(scale, read.gain, read.shift, read.centre), Linear(W_up, b_up)))

    return AttentionWeights(None, b_up, W_O, detached(out.bias), heads, heads, inner_values=values)
