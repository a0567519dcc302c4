"""ALTI: Ferrando et al. 2022.

    T_ij = LN(a_ij + δ_ij x_i), linear part;   y_i = LN(x_i + attention output), biases included
    C_ij = max(0, ‖y_i‖ − ‖y_i − T_ij‖), rows divided by their sum;   aggregated by the product of C

Pre-LN blocks (as in the code of ALTI+) and parallel ones (ours): no norm around the sum, y = x + attention output. The
original adds 1e-6 to every component inside its distance, an error of about 1e-5; here the formula is exact.

Encoder–decoders (ALTI+, Ferrando et al. 2022, "Towards opening the black box of neural machine translation"): after a
decoder block's self-attention, whose C is as above, cross-attention is a second sum, of the encoder's tokens and the
stream x_i; its row is [C_ij of the encoder's tokens, C_i of the stream]. A block's map is the product of the two: the
stream's share of the cross-attention sum is distributed over the decoder's tokens by self-attention's C.
"""

from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.layerwise import (
    LocalLayer,
    Maps,
    MapsOfAttentions,
    by_attention,
    normalize_rows,
    of_layers,
    product,
    through,
)
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import Attribution

Distance = Literal["l1", "l2"]
"""The norm that measures how far a vector is from a layer's output."""


@register_layer_map("alti", holds_residual=True, needs=("head_vectors",), both_stacks=True)
def alti_map(frozen: FrozenPass, distance: Distance = "l1") -> Maps:
    """Return C_ij of every layer."""
    return torch.stack([product(maps) for maps in alti_by_attention(frozen, distance)])


def alti_by_attention(frozen: FrozenPass, distance: Distance = "l1") -> list[MapsOfAttentions]:
    """Return C_ij of every layer's attentions: one, or in a decoder block self-attention and then cross-attention."""
    order = {"l1": 1, "l2": 2}[distance]
    return by_attention(frozen, partial(_contributions, order=order))


def _contributions(layer: LocalLayer, order: int) -> Float[Tensor, "batch query column"]:
    """Return C_ij of one attention, with the stream's part."""
    outer = layer.norms(layer.attn.outer)
    y = layer.attended()
    length = y.norm(p=order, dim=-1)
    scores = layer.x.new_empty(*layer.pairs.shape)
    for keys, vectors in layer.vectors(outer, residual=not layer.is_cross):
        scores[..., keys] = (y - vectors).norm(p=order, dim=-1).permute(1, 2, 0)
    scores = (length[..., None] - scores).clamp_min(0) * layer.pairs
    if layer.is_cross:
        stream = length - (y - through(outer, layer.x)).norm(p=order, dim=-1)
        scores = layer.with_stream(scores, stream.clamp_min(0) * layer.frozen.mask[:, layer.queries])
    return normalize_rows(scores)


@register_method("alti", needs=("head_vectors", "unwhitened"))
@checked_arguments
def alti(frozen: FrozenPass, *, distance: Distance = "l1", query: Query = "all") -> Attribution:
    """Score how much nearer each token's vector brings a layer's output, rolled out over layers (Ferrando 2022).

    Rows are distributions: they sum to 1. `distance` is ``"l1"`` or ``"l2"``.

    Raises:
        UnsupportedModelError: whitening, a layer without softmax attention, or a gate or norm inside attention.

    >>> tlens.methods.alti(frozen, query=-1).scores.sum(-1).round(decimals=4)
    tensor([[1.]])
    """
    maps = alti_map(frozen, distance)
    return of_layers(frozen, product(maps), maps, method="alti", query=query, distance=distance)
