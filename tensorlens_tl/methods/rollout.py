"""Aggregating a per-layer map over layers: attention rollout (Abnar & Zuidema 2020), and the plain mean."""

from typing import Any

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import add_residual, normalize_rows, product, refuse_whitened, select_query
from tensorlens_tl.models.protocol import Query
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.registry import get_layer_map, register_method
from tensorlens_tl.results.attribution import Attribution


@register_method("rollout")
def rollout(
    frozen: FrozenPass,
    *,
    layer_map: str = "attention",
    residual: Any = "auto",
    normalize: bool = True,
    query: Query = None,
) -> Attribution:
    """The product over layers of a layer map, with a residual share added to its rows (Abnar & Zuidema 2020).

    Rows are normalised, then (1 − residual)·A + residual·I.

    Args:
        frozen: the pass.
        layer_map: one of `list_layer_maps()`: `attention`, `norm:attn`, `norm:attn_res`, `norm:attn_res_ln`, `globenc`,
            `alti`, `ifr`, `ff-ig`, `value-zeroing`, and those that are registered.
        residual: the share of the residual connection, or None for none. ``"auto"`` is 0.5, and none for maps that hold
            the residual connection already.
        normalize: whether rows are divided by their sum first.
        query: positions, every one unless said; see `tensorlens_tl.passes.inputs.query_positions`.

    Raises:
        InvalidInputError: an unknown map, a residual outside [0, 1], or a query out of range.
        UnsupportedModelError: the map is undefined for this model, or the model is whitened.
    """
    refuse_whitened(frozen, "rollout")
    chosen = get_layer_map(layer_map)
    share = residual
    if share == "auto":
        share = None if chosen.holds_residual else 0.5
    if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
        raise InvalidInputError(f"residual={share!r}; use a share between 0 and 1, None or 'auto'.")
    maps = chosen(frozen)
    maps = normalize_rows(maps) if normalize else maps
    maps = add_residual(maps, float(share), frozen.mask) if isinstance(share, int | float) else maps
    return Attribution.of(
        frozen,
        select_query(frozen, product(maps), query),
        method="rollout",
        query=query,
        layers=maps,
        options={"layer_map": layer_map, "residual": share, "normalize": normalize, "query": query},
    )


@register_method("mean")
def mean(
    frozen: FrozenPass, *, layer_map: str = "attention", normalize: bool = False, query: Query = None
) -> Attribution:
    """The average over layers of a layer map.

    Args:
        frozen: the pass.
        layer_map: as for `rollout`.
        normalize: whether rows are divided by their sum first.
        query: positions, every one unless said; see `tensorlens_tl.passes.inputs.query_positions`.

    Raises:
        InvalidInputError: an unknown map, or a query out of range.
        UnsupportedModelError: the map is undefined for this model.
    """
    maps = get_layer_map(layer_map)(frozen)
    maps = normalize_rows(maps) if normalize else maps
    return Attribution.of(
        frozen,
        select_query(frozen, maps.mean(0), query),
        method="mean",
        query=query,
        layers=maps,
        options={"layer_map": layer_map, "normalize": normalize, "query": query},
    )
