"""How are the queries and keys of a block's attention read, from the stream or from latent vectors?"""

from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from tensorlens_tl.algebra import Linear
from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.models.parameters import (
    Latent,
    QueryKeyWeights,
    Refuse,
    flattened,
    floating,
    innermost,
    norm_epsilon,
    norm_weights,
    read_linear,
    tried_norm,
)
from tensorlens_tl.models.sublayers.attention import projection


def read_query_key(attn: Any, cfg: Any, refuse: Refuse, factor: float = 1.0) -> QueryKeyWeights:
    """Return the weights of one layer's scores; `factor` is what the block multiplies its input by.

    Raises `UnsupportedModelError` for queries of experts, and without readable W_Q and W_K.
    """
    inner = innermost(attn)
    if hasattr(inner, "kv_proj") and hasattr(inner, "experts"):
        raise refuse(
            "its queries are read by experts that each token is sent to (a mixture of attention heads), so "
            "that its attention scores are not read."
        )
    (W_Q, b_Q), (W_K, b_K) = (projection(attn, letter, cfg, refuse) for letter in "QK")
    if not isinstance(W_Q, Tensor) or not isinstance(W_K, Tensor) or W_Q.ndim != 3 or W_K.ndim != 3:
        raise refuse("no readable W_Q and W_K [head, d_model, d_head]; its attention scores cannot be read.")
    q_norm, k_norm = (getattr(attn, name, None) for name in ("q_norm", "k_norm"))
    read_norm = partial(norm_weights, cfg=cfg)
    for_both = innermost(getattr(inner, "qk_norm", None))  # of Llama 4
    if isinstance(for_both, nn.Module):
        q_norm = k_norm = for_both
        read_norm = partial(tried_norm, cfg=cfg, width=W_Q.shape[2])
    keys = float(getattr(inner, "key_multiplier", 1.0))  # of Falcon-H1
    W_Q = _multiplied(floating(W_Q, "attn.W_Q", refuse), factor)
    W_K = _multiplied(floating(W_K, "attn.W_K", refuse), factor * keys)
    return QueryKeyWeights(
        W_Q=rearrange(W_Q, "head d_model d_head -> d_model (head d_head)"),
        b_Q=maybe(flattened, b_Q),
        W_K=rearrange(W_K, "kv d_model d_head -> d_model (kv d_head)"),
        b_K=maybe(partial(_multiplied, factor=keys), maybe(flattened, b_K)),
        q_norm=maybe(read_norm, q_norm),
        k_norm=maybe(read_norm, k_norm),
        epsilon=norm_epsilon(q_norm, cfg),
    )


def _multiplied(weight: Tensor, factor: float) -> Tensor:
    """A weight and a constant that stands beside it; no copy where that is 1."""
    return weight if factor == 1 else weight * factor


def read_latent_scores(attn: Any, cfg: Any, refuse: Refuse) -> QueryKeyWeights | None:
    """Return queries and keys of latent attention, each head's rotated channels first; None for other attention.

    A key is read from the values' latent vector, and from channels that all heads share.
    """
    inner = innermost(attn)
    if not isinstance(getattr(inner, "kv_b_proj", None), nn.Module):
        return None
    rotated = int(inner.qk_rope_head_dim)
    plain = int(inner.qk_nope_head_dim)
    W_Q, b_Q, query_latent = _latent_queries(inner, cfg, refuse)
    W_up, b_up = read_linear(inner.kv_b_proj, "attn.kv_b_proj", refuse)
    heads = W_Q.shape[1] // (rotated + plain)
    rank = len(W_up)

    def rotated_first(both: Tensor) -> Tensor:
        return both.unflatten(-1, (heads, -1)).roll(rotated, dims=-1).flatten(-2)

    W_K = W_up.new_zeros(rank + rotated, heads, rotated + plain)
    W_K[:rank, :, rotated:] = W_up.unflatten(-1, (heads, -1))[..., :plain]
    W_K[rank:, :, :rotated] = torch.eye(rotated).to(W_up)[:, None]
    b_K = None
    if b_up is not None:
        b_K = torch.nn.functional.pad(b_up.unflatten(-1, (heads, -1))[..., :plain], (rotated, 0)).flatten()
    return QueryKeyWeights(
        W_Q=rotated_first(W_Q),
        b_Q=maybe(rotated_first, b_Q),
        W_K=W_K.flatten(1),
        b_K=b_K,
        q_norm=None,
        k_norm=None,
        epsilon=0.0,
        query_latent=query_latent,
        key_latent=_latent_of(inner, "kv_a_proj_with_mqa", "kv_a_layernorm", rank, cfg, refuse),
    )


def _latent_queries(inner: Any, cfg: Any, refuse: Refuse) -> tuple[Tensor, Tensor | None, Latent | None]:
    """Their matrix, its bias, and the latent vector that they are read from; None for what attention reads."""
    if isinstance(getattr(inner, "q_b_proj", None), nn.Module):
        W_Q, b_Q = read_linear(inner.q_b_proj, "attn.q_b_proj", refuse)
        return W_Q, b_Q, _latent_of(inner, "q_a_proj", "q_a_layernorm", len(W_Q), cfg, refuse)
    W_Q, b_Q = read_linear(inner.q_proj, "attn.q_proj", refuse)
    return W_Q, b_Q, None


def _latent_of(inner: Any, entry: str, norm: str, rank: int, cfg: Any, refuse: Refuse) -> Latent:
    read = tried_norm(innermost(getattr(inner, norm)), cfg, width=rank)
    if not read.only_scales:
        raise refuse(f"attn.{norm} is centred or shifted; queries and keys through it are not read.")
    return Latent(Linear(*read_linear(getattr(inner, entry), f"attn.{entry}", refuse)), read, rank)
