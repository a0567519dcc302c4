"""Raw attention."""

import torch

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import Maps, locals_of, select_query
from tensorlens_tl.models.protocol import Query
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results.attribution import AXES, Attribution


@register_layer_map("attention", holds_residual=False)
def attention_map(frozen: FrozenPass) -> Maps:
    """The pattern, averaged over heads."""
    return torch.stack([layer.pattern.mean(1) * layer.pairs for layer in locals_of(frozen)])


@register_method("attention")
def attention(frozen: FrozenPass, *, head_reduction: str | None = "mean", query: Query = None) -> Attribution:
    """The attention pattern itself, averaged over layers; per layer and head in `layers`.

    Args:
        frozen: the pass.
        head_reduction: `"mean"` or `"max"` over heads, or None for every head (axes batch, head, query, key).
        query: positions, every one unless said; see `tensorlens_tl.passes.inputs.query_positions`.

    Raises:
        InvalidInputError: an unknown reduction, or a query out of range.
    """
    if head_reduction not in ("mean", "max", None):
        raise InvalidInputError(f"head_reduction={head_reduction!r}; use 'mean', 'max' or None.")
    patterns = [layer.pattern * layer.pairs[:, None] for layer in locals_of(frozen)]
    if head_reduction is not None:
        patterns = [p.mean(1) if head_reduction == "mean" else p.amax(1) for p in patterns]
    layers = torch.stack(patterns)
    return Attribution.of(
        frozen,
        select_query(frozen, layers.mean(0), query),
        method="attention",
        query=query,
        axes=AXES if head_reduction else ("batch", "head", "query", "key"),
        layers=layers,
        options={"head_reduction": head_reduction, "query": query},
    )
