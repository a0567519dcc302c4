"""A published method in twenty lines: attention weighted by the length of what it carries, summed over heads."""

import torch

from tensorlens_tl import Attribution, FrozenPass, register_method
from tensorlens_tl.layerwise import locals_of, select_query


@register_method("value-times-attention")
def value_times_attention(frozen: FrozenPass, *, query: int | str = "all") -> Attribution:
    """Σ_h A^h_ij ‖v_j^h W_O^h‖, averaged over layers."""
    layers = torch.stack([layer.head_norms().sum(1) for layer in locals_of(frozen)])
    scores = select_query(frozen, layers.mean(0), query)
    return Attribution.of(frozen, scores, method="value-times-attention", query=query, layers=layers)
