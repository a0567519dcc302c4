"""The inputs and intermediate values of a block's parts in one run, between which secants are drawn."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Tap
from tensorlens_tl.algebra.numerics import plus
from tensorlens_tl.models import Within
from tensorlens_tl.models.names import PER_LAYER_NORM
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.attention_scores import CrossStreams
from tensorlens_tl.passes.block_maps import BlockMaps

ATTENTION = "attention"
VALUES = "values"
HEADS = "heads"
MLP = "mlp"
CROSSING = "crossing"
CROSS_HEADS = "cross heads"


@dataclass(frozen=True, eq=False)
class CrossValues:
    """The cross-attention of one decoder block in one run.

    Attributes:
        streams: the inputs of its queries, keys and values.
        heads: the heads' outputs, concatenated, before W_O.
    """

    streams: CrossStreams
    heads: Float[Tensor, "batch decoder width"]


@dataclass(frozen=True, eq=False)
class HiddenValues:
    """The inputs and outputs of an MLP's neurons in one run, as stored by the pass.

    Attributes:
        pre: the pre-activation; in a gated MLP that of the gate.
        activated: φ of it.
        linear: the factor of φ in a gated MLP; None in a plain one.
    """

    pre: Float[Tensor, "batch pos d_mlp"]
    activated: Float[Tensor, "batch pos d_mlp"]
    linear: Float[Tensor, "batch pos d_mlp"] | None = None


@dataclass(frozen=True, eq=False)
class BlockValues:
    """One block in one run, at the positions that the block acts on.

    Attributes:
        norms: the input of each norm, by name.
        attention: the input of attention, or of the mixer in its place, after the norm before it.
        heads: the heads' outputs, concatenated, before a gate, a norm and W_O; a mixer's output before W_O.
        mlp: the input of the MLP; None without one.
        experts: the input of each part of a mixture of experts, by name.
        cross: the values of cross-attention; None without it.
        values: the values of attention's heads, concatenated; None for another mixer.
    """

    norms: dict[str, Float[Tensor, "batch pos d_model"]]
    attention: Float[Tensor, "batch pos d_model"]
    heads: Float[Tensor, "batch pos width"]
    mlp: Float[Tensor, "batch pos d_model"] | None
    experts: dict[str, Float[Tensor, "batch pos d_model"]]
    cross: CrossValues | None = None
    values: Float[Tensor, "batch pos kv_width"] | None = None


def block_values(maps: BlockMaps, layer: int) -> BlockValues:
    """Run one block's frozen map at its own input, and record the inputs of its parts."""
    seen: dict[str, Tensor] = {}
    parts = maps.parts(layer)
    norms = {name: Chain((Tap(seen, name), norm)) for name, norm in parts.norms.items()}
    *inside, out = maps.mixer(layer).stages
    if maps.view.blocks[layer].mixer is None:
        inside.insert(1, Tap(seen, VALUES))
    attention = Chain((Tap(seen, ATTENTION), *inside, Tap(seen, HEADS), out))
    mlp = None if parts.mlp is None else Chain((Tap(seen, MLP), _tapped_mlp(maps, layer, parts.mlp, seen)))
    within = None if parts.within is None else _tapped_crossing(parts.within, seen)
    tapped = parts._replace(attention=attention, mlp=mlp, norms=norms, within=within)
    maps.composed(layer, maps.layouts[layer], tapped)(maps.capture.resid_pre(layer))
    experts, inner_norms = _experts_values(maps, layer, seen)
    read = {name: seen[name] for name in norms if name in seen}
    per_layer = maps.per_layer(layer)
    if per_layer is not None:
        inner_norms[PER_LAYER_NORM] = per_layer(per_layer_values(maps, layer)[0])
    cross = _cross_values(maps, layer, seen)
    place = maps.layouts[layer].cross
    if cross is not None and place is not None and place.before is not None:
        read[place.before] = cross.streams.queries  # with a held pattern, that norm is not evaluated
    return BlockValues(
        read | inner_norms, seen[ATTENTION], seen[HEADS], seen.get(MLP), experts, cross, seen.get(VALUES)
    )


def hidden_values(maps: BlockMaps, layer: int) -> HiddenValues | None:
    """Return the inputs and outputs of an MLP's neurons; None if the pass does not store them (experts, inner norms).

    If the pass stores ratios, φ(z) is the ratio times z: an activation costs more than a product of its size.
    """
    points = maps.points.blocks[layer]
    weights = maps.view.blocks[layer].dense_mlp
    if weights is None or points.pre is None or points.mlp is not None:
        return None
    pre = maps.capture.activation(points.pre)
    if points.pre_linear is not None:
        gate = maps.mlp_coefficients(layer)
        assert gate is not None
        return HiddenValues(pre, gate.through, maps.capture.activation(points.pre_linear))
    held = maps.cache.ratios.get(layer)
    if held is None or pre.dtype not in (torch.float32, torch.float64):
        return HiddenValues(pre, weights.activation(pre))
    return HiddenValues(pre, plus(held.through * pre, held.rest))


def known(a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the values of two runs, or None if one of them is unknown."""
    if a is None or b is None:
        return None
    return a, b


def _tapped_crossing(within: Within, seen: dict[str, Tensor]) -> Within:
    """Return where a block acts, with taps at cross-attention's ends."""
    if within.read is None or within.out is None:
        return within
    read = Chain((Tap(seen, CROSSING), within.read))
    return replace(within, read=read, out=Chain((Tap(seen, CROSS_HEADS), within.out)))


def _cross_values(maps: BlockMaps, layer: int, seen: dict[str, Tensor]) -> CrossValues | None:
    """Return the recorded values at cross-attention's ends; None without it."""
    if CROSSING not in seen:
        return None
    start, stop = maps.capture.side(layer)
    stream = seen[CROSSING]
    return CrossValues(CrossStreams(stream[:, start:stop], stream[:, :start]), seen[CROSS_HEADS])


def _tapped_mlp(maps: BlockMaps, layer: int, mlp: AffineMap, seen: dict[str, Tensor]) -> AffineMap:
    """Return the MLP, with taps for experts with norms around them; zero if nothing in the block reads its output."""
    weights = maps.view.blocks[layer].mlp
    if isinstance(weights, ExpertsWeights) and weights.around:
        parts = maps.experts(layer).items()
        tapped = {name: Chain((Tap(seen, name), part, Tap(seen, _written(name)))) for name, part in parts}
        return maps.mixture(layer, tapped)
    place = maps.layouts[layer].mlp
    ends_encoder = maps.view.encoder_norm is not None and layer + 1 == maps.view.encoder_layers
    if place.after is None and place.outer is None and not ends_encoder:
        return Diagonal(torch.zeros_like(maps.capture.resid_pre(0)[:1, :1, :1]))
    return mlp


def _written(name: str) -> str:
    return f"{name} written"


def _experts_values(
    maps: BlockMaps, layer: int, seen: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inputs of the parts of a mixture of experts, and of the norms around them."""
    weights = maps.view.blocks[layer].mlp
    if not isinstance(weights, ExpertsWeights):
        return {}, {}
    experts = {name: seen.get(name, seen[MLP]) for name in maps.experts(layer)}
    norms: dict[str, Tensor] = {}
    for name, (before, after) in weights.around.items():
        norms |= {before: seen[MLP], after: seen[_written(name)]}
    return experts, norms


def per_layer_values(
    maps: BlockMaps, layer: int
) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos d_input"]]:
    """Return the input of the gate for a separate input of each token, and that input, for a layer that has one."""
    points = maps.points.blocks[layer]
    assert points.per_layer is not None
    assert points.per_layer_input is not None
    return maps.capture.activation(points.per_layer.into), maps.capture.activation(points.per_layer_input)
