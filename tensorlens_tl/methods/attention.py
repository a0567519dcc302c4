"""Raw attention."""

from typing import Literal

import torch

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.layerwise import Maps, locals_of, select_query
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import AXES, Attribution


@register_layer_map("attention", holds_residual=False, needs=("patterns",))
def attention_map(frozen: FrozenPass) -> Maps:
    """The pattern, averaged over heads."""
    return torch.stack([layer.pattern.mean(1) * layer.pairs for layer in locals_of(frozen)])


@register_method("attention", needs=("one_stack", "patterns"))
@checked_arguments
def attention(
    frozen: FrozenPass, *, head_reduction: Literal["mean", "max"] | None = "mean", query: Query = "all"
) -> Attribution:
    """The attention pattern itself, averaged over layers; per layer and head in `layers`.

    Args:
        frozen: the pass.
        head_reduction: `"mean"` or `"max"` over heads, or None for every head (axes batch, head, query, key).
        query: positions, every one by default; see `tensorlens_tl.passes.inputs.query_positions`.

    Returns:
        Scores `[batch, query, key]`, or `[batch, head, query, key]`, and each layer's patterns in `layers`.

    Raises:
        InvalidInputError: an unknown reduction, or a query out of range.
        UnsupportedModelError: a layer without softmax attention, or an encoder–decoder.

    >>> tlens.methods.attention(frozen, head_reduction=None, query=-1)
    Attribution('attention', batch=1, head=4, query=1, key=7)
    """
    layers = torch.stack([layer.pattern * layer.pairs[:, None] for layer in locals_of(frozen)])
    if head_reduction == "mean":
        layers = layers.mean(2)
    elif head_reduction == "max":
        layers = layers.amax(2)
    return Attribution.of(
        frozen,
        select_query(frozen, layers.mean(0), query),
        method="attention",
        query=query,
        axes=AXES if head_reduction else ("batch", "head", "query", "key"),
        layers=layers,
        options={"head_reduction": head_reduction, "query": query},
    )
