"""How is a block's attention read: values, output, and what stands between them and the pattern?"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from tensorlens_tl.algebra import Linear
from tensorlens_tl.algebra.numerics import maybe, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.parameters import (
    AttentionWeights,
    Gate,
    HeadRouting,
    InnerValues,
    InverseScale,
    Refuse,
    detached,
    flattened,
    floating,
    innermost,
    is_bridge_component,
    read_linear,
    refuse_bypassed,
    shown,
    tried_norm,
    unlike_shown,
)
from tensorlens_tl.models.sublayers.experts import parallel_router

PROJECTIONS = ("q", "k", "v", "o")
"""What a Bridge calls the projections of attention."""


def read_attention(attn: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Return one attention layer's weights; raise `UnsupportedModelError` where it is no readable softmax attention."""
    inner = innermost(attn)
    if isinstance(getattr(inner, "kv_b_proj", None), nn.Module):
        return _latent(inner, cfg, refuse)
    if isinstance(getattr(inner, "kv_proj", None), nn.Module) and hasattr(inner, "experts"):
        return _of_experts(inner, refuse)
    refuse_bypassed(attn, PROJECTIONS, "attn", refuse)
    W_O, b_O = projection(attn, "O", cfg, refuse)
    W_V, b_V = projection(attn, "V", cfg, refuse)
    if not isinstance(W_O, Tensor) or not isinstance(W_V, Tensor):
        if (read := _by_module(inner, refuse)) is not None:
            return _with_inner_norms(read, inner, cfg, refuse)
        raise refuse(
            "no attention with readable W_V and W_O (a state-space, recurrent or compressed-attention "
            "layer?). Only softmax attention can be frozen."
        )
    W_O = floating(W_O, "attn.W_O", refuse)
    W_V = floating(W_V, "attn.W_V", refuse)
    if W_V.ndim != 3 or W_O.ndim != 3:
        raise refuse(
            f"attn.W_V is {tuple(W_V.shape)} and attn.W_O {tuple(W_O.shape)}, not [head, d_model, d_head] "
            "and [head, d_head, d_model]."
        )
    read = AttentionWeights(
        value_matrix=rearrange(W_V, "kv d_model d_head -> d_model (kv d_head)"),
        b_V=maybe(flattened, b_V),
        W_O=rearrange(W_O, "head d_head d_model -> (head d_head) d_model"),
        b_O=detached(b_O),
        heads=W_O.shape[0],
        kv_heads=W_V.shape[0],
    )
    return _with_inner_norms(read, inner, cfg, refuse)


def read_shared_attention(attn: Any, source: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Return the weights of attention that takes keys and values from the earlier `source` (Gemma 4).

    Raises `UnsupportedModelError` for a gate or norm after either's heads, and weights that cannot be read.
    """
    values = read_attention(source, cfg, refuse)
    inner = innermost(attn)
    W_O, b_O = read_linear(inner.o_proj, "attn.o_proj", refuse)
    gated = isinstance(innermost(getattr(inner, "attn_sub_norm", None)), nn.Module)
    if gated or values.output_factor is not None or values.routing is not None:
        raise refuse("a gate or a norm before W_O beside values of an earlier block, which is not read.")
    return replace(values, W_O=W_O, b_O=b_O, heads=len(W_O) // inner.head_dim, shared=True)


def pattern_reader(attn: Any) -> Callable[[Any], Any] | None:
    """Return how to read the pattern from the outputs of attention's module; None where a Bridge has a hook point for
    it.

    A Bridge may have none (NemotronH), or show the second output there, which is a bias of relative positions before
    the pattern (Switch Transformers; of T5 TransformerLens knows that).
    """
    if not is_bridge_component(attn):
        return None
    if not hasattr(attn, "hook_pattern"):
        return partial(_returned, number=1)
    is_relative = hasattr(innermost(attn), "has_relative_attention_bias")
    if is_relative and not getattr(attn, "requires_relative_position_bias", True):
        return partial(_returned, number=2)
    return None


def _returned(outputs: Any, number: int) -> Any:
    """One of a module's outputs; None where it returns fewer."""
    return outputs[number] if isinstance(outputs, tuple) and len(outputs) > number else None


def shared_source(attentions: Sequence[Any]) -> int | None:
    """Return which earlier attention the last of several takes keys and values from, None for its own.

    Raises `UnsupportedModelError` where no earlier layer stores what it takes.
    """
    *earlier, last = (innermost(attn) for attn in attentions)
    if not getattr(last, "is_kv_shared_layer", False):
        return None
    for number in reversed(range(len(earlier))):
        stores = getattr(earlier[number], "store_full_length_kv", False)
        if stores and getattr(earlier[number], "layer_type", None) == getattr(last, "layer_type", None):
            return number
    raise UnsupportedModelError("it takes keys and values of an earlier block, and none that stores them is known.")


def projection(attn: Any, letter: str, cfg: Any, refuse: Refuse) -> tuple[Any, Any]:
    """Return one of Q, K, V, O by head, as its module computes it, `[head, d_model, d_head]` (O: `[head, d_head,
    d_model]`).

    And its bias. Grouped attention has key-value heads; None where it is missing or not shown by head.
    """
    module = unlike_shown(attn, letter.lower())
    if is_bridge_component(attn) and not hasattr(attn, "hook_pattern"):  # nothing of it is shown (NemotronH)
        module = innermost(getattr(innermost(attn), f"{letter.lower()}_proj", None))
    if module is None:
        # HookedTransformer's W_V is expanded to query heads, its _W_V is not; a Bridge has only the latter, as W_V.
        prefix = "_" if letter in "KV" and hasattr(attn, f"_W_{letter}") else ""
        weight = shown(attn, f"{prefix}W_{letter}")
        module = innermost(attn._modules.get("q"))
        if weight is not None or letter != "Q" or not isinstance(module, nn.Module):
            return weight, shown(attn, f"{prefix}b_{letter}")
    weight, bias = read_linear(module, f"attn.{letter.lower()}", refuse)
    heads = cfg.n_heads
    if letter in "KV":
        heads = getattr(cfg, "n_key_value_heads", None) or heads
    if letter == "O":
        return rearrange(weight, "(head d_head) d_model -> head d_head d_model", head=heads), bias
    width = weight.shape[1] // heads
    if letter == "Q" and width == 2 * cfg.d_head:  # a gate beside each head's query
        width = cfg.d_head
    by_head = rearrange(weight, "d_model (head d_head) -> head d_model d_head", head=heads)[..., :width]
    return by_head, maybe(lambda b: b.unflatten(0, (heads, -1))[:, :width], bias)


def _by_module(inner: Any, refuse: Refuse) -> AttentionWeights | None:
    """Return the weights of a layer with another head size (Gemma 4), which a Bridge does not show; None without them.

    Values may be read through the keys' projection.
    """
    projections = (innermost(getattr(inner, name, None)) for name in ("v_proj", "k_proj"))
    values = next((part for part in projections if isinstance(part, nn.Module)), None)
    out = innermost(getattr(inner, "o_proj", None))
    d_head = getattr(inner, "head_dim", None)
    if values is None or not isinstance(out, nn.Module) or not isinstance(d_head, int):
        return None
    linear = Linear(*read_linear(values, "attn.v_proj", refuse))
    read = Linear(*read_linear(out, "attn.o_proj", refuse))
    heads = read.weight.shape[0] // d_head
    kv_heads = linear.weight.shape[1] // d_head
    return AttentionWeights(linear.weight, linear.offset, read.weight, read.offset, heads, kv_heads)


def _with_inner_norms(read: AttentionWeights, inner: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """The same, with a norm of values (Gemma 4), a norm before W_O (BitNet) and a gate, where there are any."""
    value_norm, sub_norm = (innermost(getattr(inner, name, None)) for name in ("v_norm", "attn_sub_norm"))
    if isinstance(value_norm, nn.Module):
        assert read.value_matrix is not None
        norm = tried_norm(value_norm, cfg, width=read.value_matrix.shape[1] // read.kv_heads)
        if not norm.only_scales:
            raise UnsupportedModelError(f"{type(value_norm).__name__} of values is centred or shifted; not read.")
        read = replace(read, inner_values=InnerValues(Linear(read.value_matrix, read.b_V), norm, read.kv_heads))
    if isinstance(sub_norm, nn.Module):
        outer = tried_norm(sub_norm, cfg, width=read.W_O.shape[0])
        if not outer.only_scales:
            raise UnsupportedModelError(f"{type(sub_norm).__name__} before W_O is centred or shifted; not read.")
        W_O = times(read.W_O.mT, outer.gain).mT
        read = replace(read, W_O=W_O, output_factor=InverseScale(outer))
    return replace(read, output_factor=_gate(inner, read, refuse) or read.output_factor)


def _gate(inner: Any, read: AttentionWeights, refuse: Refuse) -> Gate | None:
    """A gate of what the heads give, from what attention reads: per head or per channel."""
    width = read.W_O.shape[0]
    for name, squash in (("gate_proj", torch.sigmoid), ("g_proj", torch.nn.functional.softplus)):
        linear = innermost(getattr(inner, name, None))
        if isinstance(linear, nn.Module) and isinstance(getattr(linear, "weight", None), Tensor):
            weight, bias = read_linear(linear, f"attn.{name}", refuse)
            return Gate(Linear(weight, bias), squash, width // weight.shape[1])
    return _gate_beside_queries(inner, width, refuse)


def _gate_beside_queries(inner: Any, width: int, refuse: Refuse) -> Gate | None:
    """A gate that the query projection gives as well, head by head after its query (Qwen3-Next, Qwen3.5)."""
    linear = innermost(getattr(inner, "q_proj", None))
    d_head = getattr(inner, "head_dim", None)
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(d_head, int) or len(weight) != 2 * width or width % d_head:
        return None
    weight, bias = read_linear(linear, "attn.q_proj", refuse)

    def second_half(both: Tensor) -> Tensor:
        return both.unflatten(-1, (-1, 2, d_head))[..., 1, :].flatten(-2)

    return Gate(Linear(second_half(weight), maybe(second_half, bias)), torch.sigmoid, 1)


def _of_experts(inner: Any, refuse: Refuse) -> AttentionWeights:
    """Return a mixture of attention heads (JetMoe): experts have queries and outputs of their own, and share values.

    A key-value head has one head of each expert.
    """
    experts = innermost(inner.experts)
    router, choices = parallel_router(experts, refuse)
    _, W_V = read_linear(inner.kv_proj, "attn.kv_proj", refuse).weight.chunk(2, dim=1)
    W_O = floating(innermost(experts.output_linear).weight, "attn.experts.output_linear", refuse)
    kv_heads = int(inner.num_key_value_heads)
    count = len(W_O)
    return AttentionWeights(
        value_matrix=W_V,
        b_V=None,
        W_O=rearrange(W_O, "expert d_model (kv d_head) -> (kv expert d_head) d_model", kv=kv_heads),
        b_O=detached(getattr(experts, "bias", None)),
        heads=kv_heads * count,
        kv_heads=kv_heads,
        routing=HeadRouting(Linear(*read_linear(router, "attn.experts.router", refuse)), count, choices),
    )


def _latent(inner: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Multi-head latent attention (DeepSeek-V2): values are read from a normed latent vector of each token."""
    down, norm, up, out = (getattr(inner, name, None) for name in (
        "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"
    ))  # fmt: skip
    if not all(isinstance(innermost(part), nn.Module) for part in (down, norm, up, out)):
        raise refuse("latent attention without kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj.")
    norm = innermost(norm)
    W_down, b_down = read_linear(down, "attn.kv_a_proj_with_mqa", refuse)
    W_up, b_up = read_linear(up, "attn.kv_b_proj", refuse)
    W_O, b_O = read_linear(out, "attn.o_proj", refuse)
    rank = len(W_up)
    width = int(inner.v_head_dim)
    heads = len(W_O) // width
    read = tried_norm(norm, cfg, width=rank)

    def values_of(both: Tensor) -> Tensor:
        return both.unflatten(-1, (heads, -1))[..., -width:].flatten(-2)

    latent = Linear(W_down[:, :rank], maybe(partial(torch.narrow, dim=0, start=0, length=rank), b_down))
    b_up = maybe(values_of, b_up)
    up_to_values = Linear(values_of(W_up), b_up)

    values = InnerValues(latent, read, 1, up_to_values)
    return AttentionWeights(None, b_up, W_O, b_O, heads, heads, inner_values=values)
