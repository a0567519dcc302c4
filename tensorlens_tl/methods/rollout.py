"""Aggregation of per-layer maps over layers: attention rollout (Abnar & Zuidema 2020), and the plain mean."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import add_residual, mean_of_layers, normalize_rows, of_layers, product
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import get_layer_map, register_method
from tensorlens_tl.requirements import Requirement
from tensorlens_tl.results import Attribution

SHARE = "a share between 0 and 1, None or 'auto'"


def _needs_of_map(options: Mapping[str, Any]) -> tuple[Requirement, ...]:
    return get_layer_map(options["layer_map"]).requirements()


def _needs_of_product(options: Mapping[str, Any]) -> tuple[Requirement | str, ...]:
    return (*_needs_of_map(options), "unwhitened")


@register_method("rollout", needs=_needs_of_product)
@checked_arguments
def rollout(
    frozen: FrozenPass,
    *,
    layer_map: str = "attention",
    residual: Annotated[int | float | Literal["auto"] | None, SHARE] = "auto",
    normalize: bool = True,
    query: Query = "all",
) -> Attribution:
    """Multiply a layer map over layers, with a residual share added to its rows (Abnar & Zuidema 2020).

    Rows are normalised, then (1 − residual)·A + residual·I. In a decoder block of an encoder–decoder a row has both
    attentions of the token, cross- and self-attention, which share (1 − residual).

    Args:
        layer_map: one of `list_layer_maps()`: `attention`, `norm:attn`, `norm:attn_res`, `norm:attn_res_ln`, `globenc`,
            `alti`, `ifr`, `ff-ig`, `value-zeroing`, and user-registered maps.
        residual: the share of the residual connection, or None for none. ``"auto"`` is 0.5, and none for maps that
            include the residual connection.
        normalize: whether to divide rows by their sum first.

    Raises:
        InvalidInputError: also an unknown map, or a residual outside [0, 1].
        UnsupportedModelError: the map is undefined for this model, or the model is whitened.

    >>> tlens.methods.rollout(frozen, layer_map="norm:attn", query=-1).options["residual"]
    0.5
    """
    chosen = get_layer_map(layer_map)
    if residual == "auto":
        residual = None if chosen.holds_residual else 0.5
    if residual is not None and not 0 <= residual <= 1:
        raise InvalidInputError(f"residual={residual!r}; use {SHARE}.")
    maps = chosen(frozen)
    if normalize:
        maps = normalize_rows(maps)
    if residual is not None:
        maps = add_residual(maps, float(residual), frozen.mask)
    options = {"layer_map": layer_map, "residual": residual, "normalize": normalize}
    return of_layers(frozen, product(maps), maps, method="rollout", query=query, **options)


@register_method("mean", needs=_needs_of_map)
@checked_arguments
def mean(
    frozen: FrozenPass, *, layer_map: str = "attention", normalize: bool = False, query: Query = "all"
) -> Attribution:
    """Average a layer map over layers; in an encoder–decoder, over the layers of the token's side.

    Arguments and errors are those of `rollout`.

    >>> torch.equal(tlens.methods.mean(frozen).scores, tlens.methods.attention(frozen).scores)
    True
    """
    maps = get_layer_map(layer_map)(frozen)
    if normalize:
        maps = normalize_rows(maps)
    options = {"layer_map": layer_map, "normalize": normalize}
    return of_layers(frozen, mean_of_layers(frozen, maps), maps, method="mean", query=query, **options)
