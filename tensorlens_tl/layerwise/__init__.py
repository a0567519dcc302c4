"""What the tokens of one layer give each other, and how layers are aggregated."""

from tensorlens_tl.layerwise.aggregate import (
    Maps,
    add_residual,
    locals_of,
    normalize_rows,
    product,
    refuse_whitened,
    select_query,
)
from tensorlens_tl.layerwise.implicit import implicit_attention
from tensorlens_tl.layerwise.local import LocalLayer, through

__all__ = [
    "LocalLayer",
    "Maps",
    "add_residual",
    "implicit_attention",
    "locals_of",
    "normalize_rows",
    "product",
    "refuse_whitened",
    "select_query",
    "through",
]
