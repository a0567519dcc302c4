"""What the tokens of one layer give each other, and how layers are aggregated."""

from tensorlens_tl.layerwise.aggregate import (
    Maps,
    MapsOfAttentions,
    add_residual,
    attentions_of,
    by_attention,
    locals_of,
    mean_of_layers,
    normalize_rows,
    of_layers,
    only_acting,
    product,
    refuse_whitened,
    select_query,
    side_by_side,
)
from tensorlens_tl.layerwise.local import LocalLayer, implicit_attention, through

__all__ = [
    "LocalLayer",
    "Maps",
    "MapsOfAttentions",
    "add_residual",
    "attentions_of",
    "by_attention",
    "implicit_attention",
    "locals_of",
    "mean_of_layers",
    "normalize_rows",
    "of_layers",
    "only_acting",
    "product",
    "refuse_whitened",
    "select_query",
    "side_by_side",
    "through",
]
