"""Norm-based attention analysis: Kobayashi et al. 2020 and 2021.

With a_ij = Σ_h α^h_ij f^h(x_j), f(x) = (x·W_V + b_V)·W_O, and x read through the frozen norm that feeds attention:

    attn         ‖a_ij‖                                     2020, Eq. 2; per head ‖α f(x)‖
    attn_res     ‖a_ij + δ_ij x_i‖                          2021, with the residual connection
    attn_res_ln  ‖LN(a_ij + δ_ij x_i)‖, linear part of LN   2021, with the norm around it

Ours, outside post-LN: pre-LN and parallel blocks have no norm around the sum, so `attn_res_ln` equals `attn_res` there
(the ATB of Kobayashi et al. 2024). In sandwich and post-only blocks the norm after attention belongs to a_ij. In a
whitened model x_j is the whitened vector of token j, which contains contributions from earlier tokens. A decoder block
of an encoder–decoder has a sum of two attentions: the vectors of self-attention and the stream pass the norm around it
into the sum with those of cross-attention, and `attn_res_ln` includes the norm around that sum as well.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra import Norm
from tensorlens_tl.layerwise import LocalLayer, Maps, locals_of, mean_of_layers, of_layers, side_by_side
from tensorlens_tl.methods.globenc import globenc_norms
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.requirements import norm_after_sum
from tensorlens_tl.results import Attribution

Scope = Literal["attn", "attn_res", "attn_res_ln"]
"""How much of what surrounds attention is included in a vector."""


def norm_map(frozen: FrozenPass, scope: Scope = "attn") -> Maps:
    """Return one scope's norms, for every layer."""

    def part(layer: LocalLayer) -> Tensor:
        residual = scope != "attn" and not layer.is_cross
        return layer.pair_norms(_outer_norms(layer, scope), residual=residual)

    return side_by_side(frozen, part)


def _outer_norms(layer: LocalLayer, scope: Scope | Literal["globenc"]) -> tuple[Norm, ...]:
    """Return the norms through which a scope pushes attention's vectors."""
    if scope == "globenc":
        return globenc_norms(layer)
    if scope == "attn_res_ln":
        return layer.outer
    return ()


@register_layer_map("norm:attn", holds_residual=False, needs=("head_vectors",), both_stacks=True)
def attn_map(frozen: FrozenPass) -> Maps:
    """Return the norms of attention alone."""
    return norm_map(frozen, "attn")


@register_layer_map("norm:attn_res", holds_residual=True, needs=("head_vectors",), both_stacks=True)
def attn_res_map(frozen: FrozenPass) -> Maps:
    """Return the norms with the residual connection."""
    return norm_map(frozen, "attn_res")


@register_layer_map("norm:attn_res_ln", holds_residual=True, needs=("head_vectors",), both_stacks=True)
def attn_res_ln_map(frozen: FrozenPass) -> Maps:
    """Return the norms with the residual connection and the norm around it."""
    return norm_map(frozen, "attn_res_ln")


@register_method("norm", needs=("head_vectors",))
@checked_arguments
def norm(frozen: FrozenPass, *, scope: Scope = "attn", query: Query = "all") -> Attribution:
    """Average the norms of attention's token-to-token vectors over layers (Kobayashi 2020, 2021).

    Args:
        scope: `"attn"` (attention alone), `"attn_res"` (with the residual connection) or `"attn_res_ln"` (with the norm
            around both).

    Raises:
        UnsupportedModelError: a layer without softmax attention, or with a gate or a norm inside it.

    >>> tlens.methods.norm(frozen, scope="attn_res").layers.shape
    torch.Size([4, 1, 7, 7])
    """
    layers = norm_map(frozen, scope)
    return of_layers(frozen, mean_of_layers(frozen, layers), layers, method="norm", query=query, scope=scope)


def head_norms(frozen: FrozenPass) -> Float[Tensor, "layer batch head query key"]:
    """Compute ‖α^h_ij f^h(x_j)‖ per head (Kobayashi 2020).

    >>> tlens.methods.head_norms(frozen).shape
    torch.Size([4, 1, 4, 7, 7])
    """
    return torch.stack([layer.head_norms() for layer in locals_of(frozen)])


@checked_arguments
def mixing_ratio(
    frozen: FrozenPass, scope: Scope | Literal["globenc"] = "attn_res_ln"
) -> Float[Tensor, "layer batch query"]:
    """Compute how much a token takes from the others: ‖Σ_{j≠i}‖ / (‖Σ_{j≠i}‖ + ‖own‖) (Kobayashi 2021).

    The share is between 0 and 1 for each layer and token; 0 at padding. `scope` is one of `norm`'s, or ``"globenc"``
    for the whole block of GlobEnc (Modarressi 2022).

    Raises:
        InvalidInputError: an unknown scope.
        UnsupportedModelError: see the `norm` and `globenc` methods.

    >>> ratios = tlens.methods.mixing_ratio(frozen)
    >>> ratios.shape, bool(ratios[..., 0].max() == 0)  # the first token takes from itself alone
    (torch.Size([4, 1, 7]), True)
    """
    if scope == "globenc":
        norm_after_sum.check(frozen, "globenc")
    ratios = []
    for layer in locals_of(frozen):
        diagonal, others = layer.itself_and_others(_outer_norms(layer, scope), residual=scope != "attn")
        mixing = others.norm(dim=-1)
        ratios.append(mixing / (mixing + diagonal.norm(dim=-1)) * frozen.mask)
    return torch.stack(ratios)
