"""Which layers, heads and MLPs an operator holds: arguments checked, and said what is wrong with them."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorlens_tl.errors import InvalidInputError

if TYPE_CHECKING:
    from tensorlens_tl.frozen import FrozenPass
    from tensorlens_tl.view import ModelView


def chosen_layers(n_layers: int, layers: Any) -> range:
    """A contiguous range out of a slice, a sequence, or None for all."""
    if layers is None:
        return range(n_layers)
    if not isinstance(layers, slice | Sequence):
        raise InvalidInputError(f"layers={layers!r}: use a slice or consecutive layers, such as slice({layers}, None).")
    if isinstance(layers, slice):
        start, stop, step = layers.indices(n_layers)
        wanted = [bound for bound in (layers.start, layers.stop) if bound is not None]
        if step != 1 or start >= stop or any(not -n_layers <= bound <= n_layers for bound in wanted):
            raise InvalidInputError(f"layers={layers}: no such range in a model of {n_layers} layers.")
        return range(start, stop)
    chosen = list(layers)
    if not chosen or any(not isinstance(i, int) or not 0 <= i < n_layers for i in chosen):
        raise InvalidInputError(f"layers={chosen}: use layers 0 to {n_layers - 1}.")
    if chosen != list(range(chosen[0], chosen[0] + len(chosen))):
        raise InvalidInputError(f"layers={chosen}: an operator needs consecutive layers without a gap.")
    return range(chosen[0], chosen[-1] + 1)


def chosen_heads(frozen: "FrozenPass", layer: int, chosen: range, ids: Any) -> list[int]:
    """The heads of one layer to keep."""
    if layer not in chosen:
        raise InvalidInputError(f"heads: layer {layer} is not among the operator's layers {list(chosen)}.")
    count = frozen.view.blocks[layer].attention.heads
    if not isinstance(ids, Collection):
        raise InvalidInputError(f"heads: pass a collection of heads for layer {layer}, such as {{{layer}: [0, 2]}}.")
    if any(not isinstance(head, int) or not 0 <= head < count for head in ids):
        raise InvalidInputError(f"heads: layer {layer} has heads 0 to {count - 1}, got {list(ids)}.")
    return list(ids)


def chosen_head(view: "ModelView", layer: Any, head: Any) -> tuple[int, int]:
    """One head, as a layer and a query head of it."""
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < view.n_layers:
        raise InvalidInputError(f"layer={layer!r}: this model has layers 0 to {view.n_layers - 1}.")
    weights = view.blocks[layer].attention
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < weights.heads:
        grouped = (
            f" (query heads; each of {weights.kv_heads} key-value heads serves {weights.heads // weights.kv_heads})"
            if weights.kv_heads != weights.heads
            else ""
        )
        raise InvalidInputError(f"head={head!r}: layer {layer} has heads 0 to {weights.heads - 1}{grouped}.")
    return layer, head


def chosen_mlps(layers: Any, chosen: range) -> set[int]:
    """The layers whose MLPs to keep."""
    if not isinstance(layers, Collection) or isinstance(layers, Mapping):
        raise InvalidInputError(f"mlp={layers!r}: use True, False, or the layers whose MLPs to keep (each whole).")
    outside = [layer for layer in layers if layer not in chosen]
    if outside:
        raise InvalidInputError(f"mlp: layers {outside} are not among the operator's layers {list(chosen)}.")
    return set(layers)
