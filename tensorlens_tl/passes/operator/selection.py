"""Which layers, heads, MLPs and source tokens are meant. Arguments are checked, and an error says what is wrong."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_number, whole_slice
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import LayerRange, ModelView, Query
from tensorlens_tl.passes.inputs import Prompt, is_all, span_positions
from tensorlens_tl.passes.linearisation import Linearisation


def chosen_layers(n_layers: int, layers: LayerRange) -> range:
    """A contiguous range out of a slice, a sequence, or None for all."""
    if layers is None:
        return range(n_layers)
    if not isinstance(layers, slice):
        layers = plain(layers)
    if not isinstance(layers, slice | Sequence):
        raise InvalidInputError(
            f"layers={layers!r}: use a slice or consecutive layers, such as slice(0, {layers}) for those before the "
            f"input of blocks.{layers}."
        )
    if isinstance(layers, slice):
        layers = whole_slice("layers", layers, why="layers of this model")
        start, stop, step = layers.indices(n_layers)
        bounds = [bound for bound in (layers.start, layers.stop) if bound is not None]
        if step != 1 or start >= stop or any(not -n_layers <= bound <= n_layers for bound in bounds):
            raise InvalidInputError(f"layers={layers}: no such range in a model of {n_layers} layers.")
        return range(start, stop)
    chosen = [whole_number("layers", layer, 0, n_layers - 1, why="layers of this model") for layer in layers]
    if not chosen:
        raise InvalidInputError(f"layers=[]: use layers 0 to {n_layers - 1}.")
    if chosen != list(range(chosen[0], chosen[0] + len(chosen))):
        raise InvalidInputError(f"layers={chosen}: an operator needs consecutive layers without a gap.")
    return range(chosen[0], chosen[-1] + 1)


def end_of(frozen: Linearisation, last: int, final_norm: bool) -> str:
    """Where some layers end, in words; `last` is the first layer after them."""
    if last < frozen.n_layers:
        return f"{frozen.view.blocks[last].name} input"
    if final_norm and frozen.view.final_norm is not None:
        return "the final norm's output"
    return "the last block's output"


def through_final_norm(frozen: Linearisation, last: int, final_norm: bool | None) -> bool:
    """Return whether the norm after the last layer is included: where layers end there, if `final_norm` is None.

    Raises `InvalidInputError` if it is requested, and the layers end before it.
    """
    if final_norm and last < frozen.n_layers:
        raise InvalidInputError(
            f"final_norm=True: these layers end at {end_of(frozen, last, True)}, before the final norm. Leave it out "
            "for a direction of the stream there; tlens.circuits.logit_lens(frozen, ...) applies the final norm to the "
            "stream before every layer."
        )
    return last == frozen.n_layers and final_norm is not False


def chosen_heads(frozen: Linearisation, layer: int, chosen: range, ids: object) -> list[int]:
    """The heads of one layer to keep."""
    if layer not in chosen:
        raise InvalidInputError(f"heads: layer {layer} is not among the operator's layers {list(chosen)}.")
    count = frozen.view.blocks[layer].attention.heads
    if not isinstance(ids, Collection):
        raise InvalidInputError(f"heads: pass a collection of heads for layer {layer}, such as {{{layer}: [0, 2]}}.")
    return [whole_number(f"heads[{layer}]", head, 0, count - 1, why=f"heads of layer {layer}") for head in ids]


def chosen_head(view: ModelView, layer: object, head: object, *, cross: bool = False) -> tuple[int, int]:
    """One head, as a layer and a query head of it; with `cross` one of an encoder–decoder's cross-attention."""
    layer = whole_number("layer", layer, 0, view.n_layers - 1, why="a layer of this model")
    weights = view.blocks[layer].attention
    if cross:
        check_crossing(view, layer)
        weights = view.blocks[layer].require_cross_attention()
    heads = weights.heads
    kv_heads = weights.kv_heads
    which = f"a head of layer {layer}"
    if cross:
        which += "'s cross-attention"
    if kv_heads != heads:
        which += f" (query heads; each of {kv_heads} key-value heads serves {heads // kv_heads})"
    return layer, whole_number("head", head, 0, heads - 1, why=which)


def check_crossing(view: ModelView, layer: int) -> None:
    """Raise `InvalidInputError` for a layer without cross-attention."""
    if view.blocks[layer].cross_attention is not None:
        return
    raise InvalidInputError(f"layer={layer} has no cross-attention; of this model {view.crossing_layers()}.")


def chosen_mlps(layers: object, chosen: range) -> set[int]:
    """The layers whose MLPs to keep."""
    if not isinstance(layers, Collection) or isinstance(layers, Mapping):
        raise InvalidInputError(f"mlp={layers!r}: use True, False, or the layers whose MLPs to keep (each whole).")
    outside = [layer for layer in layers if layer not in chosen]
    if outside:
        raise InvalidInputError(f"mlp: layers {outside} are not among the operator's layers {list(chosen)}.")
    return set(layers)


def places_bias(bias: str) -> bool:
    """True if biases count for the positions where they are added, instead of apart."""
    if bias not in ("apart", "position"):
        raise InvalidInputError(f"bias={bias!r}; use 'apart' (not part of the scores) or 'position'.")
    return bias == "position"


@dataclass(frozen=True, eq=False)
class Keys:
    """The requested source tokens.

    Attributes:
        positions: requested in any prompt, ascending.
        mask: True where such a position is a real token.
        columns: each prompt's and key's index in `positions`; None for all in order.
    """

    positions: list[int]
    mask: Bool[Tensor, "batch position"]
    columns: Int[Tensor, "batch key"] | None = None

    @property
    def chosen(self) -> list[int] | None:
        """The positions, or None for all."""
        return None if self.columns is None else self.positions

    def select(self, result: Tensor, dim: int) -> Tensor:
        """A result over `positions`, indexed by the requested keys instead."""
        if self.columns is None:
            return result
        in_order = torch.arange(len(self.positions), device=self.columns.device).expand(len(self.columns), -1)
        if torch.equal(self.columns, in_order):  # nothing to copy
            return result
        index = self.columns.reshape(len(self.columns), *(1,) * (dim - 1), -1, *(1,) * (result.ndim - dim - 1))
        return torch.take_along_dim(result, index, dim=dim)


def chosen_keys(prompt: Prompt, keys: Query) -> Keys:
    """Return source tokens, see `span_positions`."""
    mask = prompt.mask
    if is_all(keys):
        return Keys(list(range(mask.shape[1])), mask)
    requested = span_positions(prompt, keys)
    positions = requested.unique()
    return Keys(positions.tolist(), mask[:, positions], torch.searchsorted(positions, requested.contiguous()))
