"""ALTI: Ferrando et al. 2022.

    T_ij = LN(a_ij + δ_ij x_i), linear part;   y_i = LN(x_i + attention output), biases included
    C_ij = max(0, ‖y_i‖ − ‖y_i − T_ij‖), rows divided by their sum;   aggregated by the product of C

Pre-LN and parallel blocks (ours): no norm around the sum, y = x + attention output. The original adds 1e-6 to every
component inside its distance, an error of about 1e-5; here the formula is exact.
"""

from typing import Literal

import torch

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.layerwise import Maps, locals_of, normalize_rows, product, select_query
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import Attribution

Distance = Literal["l1", "l2"]
"""How far a vector is from a layer's output."""


@register_layer_map("alti", holds_residual=True, needs=("head_vectors",))
def alti_map(frozen: FrozenPass, distance: Distance = "l1") -> Maps:
    """C_ij of every layer."""
    order = {"l1": 1, "l2": 2}[distance]
    maps = []
    for layer in locals_of(frozen):
        outer = layer.norms(layer.attn.outer)
        y = layer.attended()
        scores = layer.x.new_empty(*layer.pairs.shape)
        for keys, vectors in layer.vectors(outer, residual=True):
            scores[..., keys] = (y - vectors).norm(p=order, dim=-1).permute(1, 2, 0)
        scores = (y.norm(p=order, dim=-1)[..., None] - scores).clamp_min(0) * layer.pairs
        maps.append(normalize_rows(scores))
    return torch.stack(maps)


@register_method("alti", needs=("one_stack", "head_vectors", "unwhitened"))
@checked_arguments
def alti(frozen: FrozenPass, *, distance: Distance = "l1", query: Query = "all") -> Attribution:
    """How much nearer each token's vector brings a layer's output, rolled out over layers (Ferrando 2022).

    Rows are distributions: they sum to 1.

    Args:
        frozen: the pass.
        distance: `"l1"` or `"l2"`.
        query: positions, every one by default; see `tensorlens_tl.passes.inputs.query_positions`.

    Returns:
        Scores `[batch, query, key]`, and each layer's map in `layers`.

    Raises:
        InvalidInputError: an unknown distance, or a query out of range.
        UnsupportedModelError: the model is whitened, an encoder–decoder, has a layer without softmax attention, or a
            gate or a norm inside attention.

    >>> tlens.methods.alti(frozen, query=-1).scores.sum(-1).round(decimals=4)
    tensor([[1.]])
    """
    maps = alti_map(frozen, distance)
    return Attribution.of(
        frozen,
        select_query(frozen, product(maps), query),
        method="alti",
        query=query,
        layers=maps,
        options={"distance": distance, "query": query},
    )
