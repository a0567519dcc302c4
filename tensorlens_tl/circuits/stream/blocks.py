"""One block as steps of the residual stream, by its proven layout."""

from collections.abc import Sequence
from dataclasses import replace

from tensorlens_tl.algebra import (
    AffineMap,
    Beside,
    Chain,
    CrossAttention,
    GroupSum,
    Identity,
    Routed,
    Segment,
    stages_of,
)
from tensorlens_tl.algebra.secants import Offset, without_offsets
from tensorlens_tl.circuits.stream.sublayers import Kind, Step, Sublayer, among_all
from tensorlens_tl.models import Place, Within
from tensorlens_tl.models.names import ENCODER_NORM, PER_LAYER_NORM
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import PassOrDifference


def block_steps(frozen: PassOrDifference, layer: int, rule: str) -> list[Step]:
    """One block's steps, by its proven layout."""
    layout = frozen.layouts[layer]
    mixing = frozen.maps.mixer(layer)
    beside = frozen.maps.beside(layer)
    attention = _mixing_nodes(frozen, layer, layout.attn, mixing)
    if beside is not None:
        attention.append(_mixer(frozen, layer, layout.attn, beside))
    mlp: list[Sublayer] = []
    if frozen.view.blocks[layer].has_mlp:
        hidden, output, names = _mlp_nodes(frozen, layer, rule)
        mlp.append(_sublayer(frozen, layer, layout.mlp, (hidden,), output, names, "b_out", "mlp"))
    middle, late = frozen.maps.stream_offsets(layer)
    within = frozen.maps.within(layer)
    steps: list[Step] = []
    whitening = frozen.maps.whitening(layer)
    if whitening is not None:
        steps.append(Step(layer, (), whitening, f"L{layer}.whitening"))
    if layout.parallel:
        both = Step(layer, (*attention, *mlp), Identity(), f"L{layer}").among(within)
        return [*steps, both, *_offset_steps(layer, middle + late), *_end_steps(frozen, layer, rule)]
    steps += _half(frozen, layer, layout.attn, attention, middle, within)
    if layout.cross is not None and within is not None:
        steps.append(_crossing(frozen, layer, layout.cross, within))
    steps += _half(frozen, layer, layout.mlp, mlp, late, within)
    return steps + _end_steps(frozen, layer, rule)


def _half(
    frozen: PassOrDifference,
    layer: int,
    at: Place,
    sublayers: Sequence[Sublayer],
    offsets: Sequence[Offset],
    within: Within | None,
) -> list[Step]:
    """Attention or the MLP of a block whose sublayers follow each other, and the norm around the sum."""
    outer = _outer(frozen, layer, at)
    outer_name = f"L{layer}.{at.outer}.b"
    if not offsets:
        return [Step(layer, tuple(sublayers), outer, outer_name).among(within)] if sublayers else []
    # they are added between the sublayers and the norm around the sum
    steps = [Step(layer, tuple(sublayers), Identity(), "").among(within), *_offset_steps(layer, offsets)]
    if at.outer is not None:
        steps.append(Step(layer, (), outer, outer_name).among(within))
    return steps


def _outer(frozen: PassOrDifference, layer: int, at: Place) -> AffineMap:
    """The norm around a sum, or the identity."""
    return Identity() if at.outer is None else frozen.maps.norm(layer, at.outer)


def _crossing(frozen: PassOrDifference, layer: int, at: Place, within: Within) -> Step:
    """Cross-attention: its heads read the encoder's output and write at the decoder's positions.

    What its queries go through first is part of the pattern, or, in a difference of two runs, of what reads them.
    """
    assert within.read is not None
    assert within.out is not None
    heads = frozen.view.blocks[layer].require_cross_attention().heads
    names = tuple(f"L{layer}.cross.H{head}" for head in range(heads))
    sublayers = _of_heads(frozen, layer, Place(after=at.after), within.read, within.out, names, "cross.b_O")
    placed: list[Sublayer] = []
    for sublayer in sublayers:
        *before, mixing = sublayer.read.stages
        if isinstance(mixing, CrossAttention):  # so that its pattern is one of all positions
            mixing = mixing.square
        read, write = Chain((*before, mixing)), among_all(sublayer.write, within)
        placed.append(replace(sublayer, read=read, write=write, is_cross=True))
    outer = within(_outer(frozen, layer, at))
    return Step(layer, tuple(placed), outer, f"L{layer}.{at.outer}.b", (within.start, within.stop))


def _end_steps(frozen: PassOrDifference, layer: int, rule: str) -> list[Step]:
    """What the stream goes through after a block's sublayers."""
    steps: list[Step] = []
    per_layer = frozen.maps.per_layer(layer, rule)
    if per_layer is not None:  # what a block adds for an input of each token at this layer, as a node
        *inside, output = per_layer.stages
        write = Chain((output, frozen.maps.norm(layer, PER_LAYER_NORM)))
        name = f"L{layer}.per_layer"
        node = Sublayer(layer, Chain(tuple(inside)), write, (name,), f"{name}.b_out", "per_layer")
        steps.append(Step(layer, (node,), Identity(), ""))
    for end in frozen.maps.ends(layer):
        if isinstance(end, Offset):
            steps += _offset_steps(layer, [end])
        elif isinstance(end, Segment):
            steps.append(Step(layer, (), end, f"{ENCODER_NORM}.b", (end.start, end.stop)))
        else:
            steps.append(Step(layer, (), end, f"L{layer}.end"))
    return steps


def _offset_steps(layer: int, offsets: Sequence[Offset]) -> list[Step]:
    """What hooks add to the stream, each as a step whose bias has the name of the hook point."""
    return [Step(layer, (), offset, offset.name) for offset in offsets]


def _mixing_nodes(frozen: PassOrDifference, layer: int, at: Place, mixing: Chain) -> list[Sublayer]:
    """Attention, or what mixes positions in its place; nothing of a block that is an MLP alone."""
    block = frozen.view.blocks[layer]
    if block.parts.is_mlp_alone:
        return []
    if block.mixer is not None:
        return [_mixer(frozen, layer, at, mixing)]
    *inside, output = mixing.stages
    names = tuple(f"L{layer}H{head}" for head in range(block.attention.heads))
    read = inside[0] if len(inside) == 1 else Chain(tuple(inside))
    return _of_heads(frozen, layer, at, read, output, names, "b_O")


def _mixer(frozen: PassOrDifference, layer: int, at: Place, mixing: Chain) -> Sublayer:
    """A mixer in place of attention, or beside it, as one node."""
    *inside, output = mixing.stages
    return _sublayer(frozen, layer, at, tuple(inside), output, (f"L{layer}.mixer",), "mixer.b_out", "mixer")


def _of_heads(
    frozen: PassOrDifference,
    layer: int,
    at: Place,
    read: AffineMap,
    output: AffineMap,
    names: tuple[str, ...],
    bias_name: str,
) -> list[Sublayer]:
    """Attention as sublayers: one of a pass, whose patterns are held; of a difference by queries, keys and values.

    A gate after the heads is held in these, and one more. What the output adds by itself is the bias of the last.
    """
    routes = read.summands
    if len(routes) == 1:
        return [_sublayer(frozen, layer, at, routes, output, names, bias_name, "head")]
    by_value, by_query, by_key, *by_gate = routes
    kinds: list[tuple[AffineMap, AffineMap, Kind]] = [
        (by_query, output, "query"),
        (by_key, output, "key"),
        (by_value, output, "head"),
    ]
    if by_gate:  # each of the others ends with it
        kinds = [(Chain(read.parts[:-1]), Chain((read.parts[-1], *stages_of(out))), kind) for read, out, kind in kinds]
        kinds.insert(0, (by_gate[0], output, "gate"))
    sublayers: list[Sublayer] = []
    for part, out, kind in kinds:
        sublayer = _sublayer(frozen, layer, at, (part,), out, names, bias_name, kind)
        if kind != "head":  # what two models' outputs, or the norms after them, differ by is added once
            sublayer = replace(sublayer, write=without_offsets(sublayer.write))
        sublayers.append(replace(sublayer, in_parts=True))
    return sublayers


def _mlp_nodes(frozen: PassOrDifference, layer: int, rule: str) -> tuple[AffineMap, AffineMap, tuple[str, ...]]:
    """An MLP's hidden vector, what writes it, and its nodes: the whole MLP, or every expert that is chosen.

    An expert's hidden vector is what it writes, its share of the routing and its biases included.
    """
    if not isinstance(frozen.view.blocks[layer].mlp, ExpertsWeights):
        mlp = frozen.maps.mlp(layer, rule)
        assert isinstance(mlp, Chain)
        *hidden, output = mlp.stages
        return Chain(tuple(hidden)), output, (f"MLP{layer}",)
    parts = frozen.maps.experts(layer, rule)
    routed = parts["experts"]
    assert isinstance(routed, Routed)
    alone = {f"L{layer}E{branch.number}": replace(routed, branches=(branch,)) for branch in routed.branches}
    terms = {name: frozen.maps.with_norms(layer, "experts", part) for name, part in alone.items()}
    if "shared" in parts:
        terms[f"L{layer}.shared"] = frozen.maps.with_norms(layer, "shared", parts["shared"])
    return Beside(tuple(terms.values())), GroupSum(len(terms)), tuple(terms)


def _sublayer(
    frozen: PassOrDifference,
    layer: int,
    at: Place,
    read: tuple[AffineMap, ...],
    output: AffineMap,
    nodes: tuple[str, ...],
    bias_name: str,
    kind: Kind,
) -> Sublayer:
    before, after = ([frozen.maps.norm(layer, name)] if name else [] for name in (at.before, at.after))
    bias = f"L{layer}.{bias_name}"
    inside = [stage for part in read for stage in stages_of(part)]
    return Sublayer(layer, Chain((*before, *inside)), Chain((*stages_of(output), *after)), nodes, bias, kind)
