"""Information flow routes: Ferrando & Voita 2024.

The importance of a vector a for a sum y that it is added to is how much nearer a comes to y than the zero vector, as a
share of the total over all summands of y:

    proximity(a, y) = max(0, ‖y‖₁ − ‖y − a‖₁),   importance = proximity / Σ proximities of y's summands

    attention   y_i = x_i + Σ_hj A^h_ij u_j^h + b_O    an edge for the stream x_i, and for every head and source token
    MLP         y_i = x_i + MLP(x_i)                   an edge for the stream, and one for the MLP
    parallel    y_i = x_i + Σ_hj A^h_ij u_j^h + MLP(x_i) + biases, one sum

b_V is in u_j^h; b_O, and what a norm after attention adds, have no edge. A layer's map sums over heads; what stays at
a position (the stream, and a parallel block's MLP) is added to its diagonal. A separate MLP step begins and ends at one
position, and moves nothing between tokens.

The paper draws the graph of edges above a threshold; the product of the maps over layers is the importance of all its
paths, summed (ours). In a post-LN block y is the sum before the norm (ours). A decoder block of an encoder–decoder has
one more sum, cross-attention's, whose edges come from the encoder's tokens and the stream (ours); its map is the
product of the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import (
    LocalLayer,
    Maps,
    by_attention,
    normalize_rows,
    of_layers,
    only_acting,
    product,
    side_by_side,
)
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import Attribution

THRESHOLD = "a share of a sum, at least 0, below 1"
Threshold = Annotated[int | float, THRESHOLD]


@dataclass(frozen=True, eq=False)
class FlowEdges:
    """The importance of every edge of every layer; those into one sum add up to 1.

    A sum that none of its summands brings nearer has no edges: they are zero, as at padding.

    Attributes:
        heads: from source token to query, through each head.
        stream: the residual stream that attention is added to.
        mlp: the MLP's output; in a parallel block, in one sum with `heads` and `stream`.
        bypass: the residual stream that a separate MLP step is added to; zero in a parallel block.
    """

    heads: Float[Tensor, "layer batch head query key"]
    stream: Float[Tensor, "layer batch query"]
    mlp: Float[Tensor, "layer batch query"]
    bypass: Float[Tensor, "layer batch query"]


@checked_arguments
def flow_edges(frozen: FrozenPass, threshold: Threshold = 0.0, *, value_bias: bool = True) -> FlowEdges:
    """Return the edges that `ifr` multiplies, by head, and those through MLPs; arguments and errors are `ifr`'s.

    >>> edges = tlens.methods.flow_edges(frozen)
    >>> sums = edges.heads.sum((2, 4)) + edges.stream  # of what meets in attention's sum
    >>> torch.allclose(sums, torch.ones_like(sums), rtol=1e-3)
    True
    """
    _check_threshold(threshold)
    frozen.view.refuse_encoder_decoder("flow_edges, with one sum of attention for each layer")
    frozen.check_fresh()
    layers = [_edges(LocalLayer(frozen, layer, value_bias), threshold) for layer in range(frozen.n_layers)]
    return FlowEdges(*(torch.stack(parts) for parts in zip(*layers, strict=True)))


@register_layer_map("ifr", holds_residual=True, needs=("head_vectors",), both_stacks=True)
def ifr_map(frozen: FrozenPass, threshold: Threshold = 0.0, *, value_bias: bool = True) -> Maps:
    """Return the importance of each source token for each query, per layer; the residual is on the diagonal."""
    _check_threshold(threshold)

    def part(layer: LocalLayer) -> Tensor:
        heads, stream, mlp, _ = _edges(layer, threshold)
        if frozen.layouts[layer.layer].parallel:
            stream = stream + mlp
        return layer.with_stream(heads.sum(1), stream)

    return torch.stack([product(maps) for maps in by_attention(frozen, part, value_bias)])


def _needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    if options["aggregate"] == "product":
        return "head_vectors", "unwhitened"
    return ("head_vectors",)


@register_method("ifr", needs=_needs)
@checked_arguments
def ifr(
    frozen: FrozenPass,
    *,
    aggregate: Literal["product", "sum"] = "product",
    threshold: Threshold = 0.0,
    value_bias: bool = True,
    query: Query = "all",
) -> Attribution:
    """Score how much nearer each head's vector of a token brings the stream, along all routes (Ferrando & Voita 2024).

    Args:
        aggregate: ``"product"`` follows the edges through all layers to the input tokens: rows are distributions.
            ``"sum"`` adds up attention's edges into the query's own position over layers, and counts a token's vector
            in any layer for that token, as FlashTrace does.
        threshold: edges of no more than this importance are dropped, and the others of a sum rescaled to add up to 1.
        value_bias: whether b_V (and what a norm before attention adds) belongs to a source token's vector. FlashTrace
            computes False, where the model has such a bias.

    Raises:
        InvalidInputError: also a threshold outside [0, 1).
        UnsupportedModelError: the model is whitened (for the product), has layers without softmax attention, or a
            factor on the heads' outputs.

    >>> result = tlens.methods.ifr(frozen, threshold=0.01, query=-1)
    >>> [entry.name for entry in result.top(2)]
    [' value', ' the']
    """
    if aggregate == "product":
        maps = ifr_map(frozen, threshold, value_bias=value_bias)
        scores = product(maps)
    else:
        _check_threshold(threshold)
        heads = side_by_side(frozen, lambda layer: _edges(layer, threshold)[0].sum(1), value_bias)
        maps = only_acting(frozen, heads)
        scores = maps.sum(0)
    options = {"aggregate": aggregate, "threshold": threshold, "value_bias": value_bias}
    return of_layers(frozen, scores, maps, method="ifr", query=query, **options)


def _check_threshold(threshold: Threshold) -> None:
    if isinstance(threshold, bool) or not 0 <= threshold < 1:
        raise InvalidInputError(f"threshold={threshold!r}; use {THRESHOLD}.")


def _edges(layer: LocalLayer, threshold: Threshold) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one layer's heads, stream, MLP and bypass, as in `FlowEdges`."""
    y = layer.attention_sum()
    mlp = layer.mlp_write
    parallel = layer.frozen.layouts[layer.layer].parallel
    real = layer.frozen.mask[:, layer.queries].to(upcast(y).dtype)
    summands = [layer.x]
    if mlp is not None and parallel:
        summands.append(mlp(layer.x))
        y = y + summands[-1]
    nearer = (upcast(y).norm(p=1, dim=-1)[:, None, :, None] - layer.head_distances(y)).clamp_min(0)
    nearer = rearrange(nearer * layer.pairs[:, None], "b h q k -> b q (h k)")
    shares = _shares(torch.cat([nearer, _proximities(summands, y) * real[..., None]], dim=-1), threshold)
    shares, others = shares.split([nearer.shape[-1], len(summands)], dim=-1)
    heads = rearrange(shares, "b q (h k) -> b h q k", k=layer.pairs.shape[-1])
    zero = torch.zeros_like(real)
    if parallel:
        beside = zero if mlp is None else others[..., 1]
        return heads, others[..., 0], beside, zero
    if mlp is None:
        return heads, others[..., 0], zero, real
    x = layer.attended()
    update = mlp(x)
    through, bypass = _shares(_proximities([update, x], x + update) * real[..., None], threshold).unbind(-1)
    return heads, others[..., 0], through, bypass


def _proximities(summands: list[Tensor], y: Float[Tensor, "batch query d"]) -> Float[Tensor, "batch query summand"]:
    """Return how much nearer each vector comes to y than the zero vector."""
    y = upcast(y)
    return torch.stack([y.norm(p=1, dim=-1) - (y - a).norm(p=1, dim=-1) for a in summands], dim=-1).clamp_min(0)


def _shares(nearer: Float[Tensor, "batch query summand"], threshold: Threshold) -> Float[Tensor, "batch query summand"]:
    """Normalise proximities to importances, keeping those above the threshold."""
    shares = normalize_rows(nearer)
    if threshold == 0:
        return shares
    return normalize_rows(shares * (shares > threshold))
