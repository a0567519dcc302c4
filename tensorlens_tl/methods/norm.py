"""Norm-based attention analysis: Kobayashi et al. 2020 and 2021.

With a_ij = Σ_h α^h_ij f^h(x_j), f(x) = (x·W_V + b_V)·W_O, and x read through the frozen norm that feeds attention:

    attn         ‖a_ij‖                                     2020, Eq. 2; per head ‖α f(x)‖
    attn_res     ‖a_ij + δ_ij x_i‖                          2021, with the residual connection
    attn_res_ln  ‖LN(a_ij + δ_ij x_i)‖, linear part of LN   2021, with the norm around it

Ours, outside post-LN: pre-LN and parallel blocks have no norm around the sum, so `attn_res_ln` equals `attn_res` there
(the ATB of Kobayashi et al. 2024). In sandwich and post-only blocks the norm after attention belongs to a_ij. In a
whitened model x_j is the whitened vector of token j, which contains contributions from the tokens before it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import Maps, locals_of, select_query
from tensorlens_tl.methods.globenc import globenc_norms
from tensorlens_tl.models.protocol import Query
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results.attribution import Attribution

SCOPES = ("attn", "attn_res", "attn_res_ln")


def norm_map(frozen: FrozenPass, scope: str = "attn") -> Maps:
    """One scope's norms, of every layer."""
    maps = []
    for layer in locals_of(frozen):
        outer = layer.norms(layer.attn.outer) if scope == "attn_res_ln" else ()
        maps.append(layer.pair_norms(outer, residual=scope != "attn"))
    return torch.stack(maps)


@register_layer_map("norm:attn", holds_residual=False)
def attn_map(frozen: FrozenPass) -> Maps:
    """The norms of attention alone."""
    return norm_map(frozen, "attn")


@register_layer_map("norm:attn_res", holds_residual=True)
def attn_res_map(frozen: FrozenPass) -> Maps:
    """The norms with the residual connection."""
    return norm_map(frozen, "attn_res")


@register_layer_map("norm:attn_res_ln", holds_residual=True)
def attn_res_ln_map(frozen: FrozenPass) -> Maps:
    """The norms with the residual connection and the norm around it."""
    return norm_map(frozen, "attn_res_ln")


@register_method("norm")
def norm(frozen: FrozenPass, *, scope: str = "attn", query: Query = None) -> Attribution:
    """The norms of attention's token-to-token vectors (Kobayashi 2020, 2021), averaged over layers.

    Args:
        frozen: the pass.
        scope: `"attn"` (attention alone), `"attn_res"` (with the residual connection) or `"attn_res_ln"` (with the norm
            around both).
        query: positions, every one unless said; see `tensorlens_tl.passes.inputs.query_positions`.

    Raises:
        InvalidInputError: an unknown scope, or a query out of range.
    """
    _check(scope, SCOPES)
    layers = norm_map(frozen, scope)
    return Attribution.of(
        frozen,
        select_query(frozen, layers.mean(0), query),
        method="norm",
        query=query,
        layers=layers,
        options={"scope": scope, "query": query},
    )


def head_norms(frozen: FrozenPass) -> Float[Tensor, "layer batch head query key"]:
    """‖α^h_ij f^h(x_j)‖ per head (Kobayashi 2020)."""
    return torch.stack([layer.head_norms() for layer in locals_of(frozen)])


def mixing_ratio(frozen: FrozenPass, scope: str = "attn_res_ln") -> Float[Tensor, "layer batch query"]:
    """How much a token takes from the others: ‖Σ_{j≠i}‖ / (‖Σ_{j≠i}‖ + ‖own‖) (Kobayashi 2021).

    Args:
        frozen: the pass.
        scope: one of `SCOPES`, or ``"globenc"`` for the whole of GlobEnc's block (Modarressi 2022).
    """
    _check(scope, (*SCOPES, "globenc"))
    ratios = []
    for layer in locals_of(frozen):
        outer = layer.norms(layer.attn.outer) if scope == "attn_res_ln" else ()
        outer = globenc_norms(layer) if scope == "globenc" else outer
        diagonal, others = layer.own_and_others(outer, residual=scope != "attn")
        mixing = others.norm(dim=-1)
        ratios.append(mixing / (mixing + diagonal.norm(dim=-1)) * frozen.mask)
    return torch.stack(ratios)


def _check(scope: str, known: tuple[str, ...]) -> None:
    if scope not in known:
        raise InvalidInputError(f"scope={scope!r}; use one of {', '.join(map(repr, known))}.")
