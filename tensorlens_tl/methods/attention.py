"""Raw attention."""

from typing import Literal

from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.layerwise import LocalLayer, Maps, mean_of_layers, of_layers, only_acting, side_by_side
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import AXES, Attribution


@register_layer_map("attention", holds_residual=False, needs=("patterns",), both_stacks=True)
def attention_map(frozen: FrozenPass) -> Maps:
    """Return the pattern, averaged over heads."""
    return side_by_side(frozen, lambda layer: layer.pattern.mean(1) * layer.pairs)


@register_method("attention", needs=("patterns",))
@checked_arguments
def attention(
    frozen: FrozenPass, *, head_reduction: Literal["mean", "max"] | None = "mean", query: Query = "all"
) -> Attribution:
    """Return the attention pattern itself, averaged over layers; per layer and head in `layers`.

    A decoder token of an encoder–decoder has two patterns, of self- and of cross-attention: its row sums to 2.

    Args:
        head_reduction: `"mean"` or `"max"` over heads, or None for every head (axes batch, head, query, key).

    Raises:
        UnsupportedModelError: a layer without softmax attention.

    >>> tlens.methods.attention(frozen, head_reduction=None, query=-1)
    Attribution('attention', batch=1, head=4, query=1, key=7)
    """

    def part(layer: LocalLayer) -> Tensor:
        pattern = layer.pattern * layer.pairs[:, None]
        if head_reduction == "mean":
            return pattern.mean(1)
        if head_reduction == "max":
            return pattern.amax(1)
        return pattern

    layers = only_acting(frozen, side_by_side(frozen, part))
    axes = AXES if head_reduction else ("batch", "head", "query", "key")
    scores = mean_of_layers(frozen, layers)
    return of_layers(frozen, scores, layers, method="attention", query=query, axes=axes, head_reduction=head_reduction)
