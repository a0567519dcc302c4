"""What reads the residual stream and writes to it, one step after the other: the parts of a `Stream`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import (
    ZERO,
    AffineMap,
    AnyAttention,
    Attention,
    Beside,
    Chain,
    CrossAttention,
    GroupSum,
    Identity,
    Routed,
    Segment,
    Sum,
    stages_of,
)
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import Offset, without_offsets
from tensorlens_tl.models import Place, Within
from tensorlens_tl.models.names import PER_LAYER_NORM
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import PassOrDifference

Kind = Literal["head", "query", "key", "gate", "mixer", "mlp", "per_layer"]
"""What a sublayer's nodes are: heads by what they mix, and in a difference of two runs by where their queries and keys
make them attend and by a gate of what they give; a mixer in place of attention; an MLP or experts; an input of each
token at its layer."""

LETTERS: dict[Kind, str] = {"head": "v", "query": "q", "key": "k", "gate": "g"}
"""What heads read by: values, queries, keys, or a gate."""


@dataclass(frozen=True, eq=False)
class Sublayer:
    """What reads the stream and writes to it.

    Attributes:
        layer: its block.
        read: stream -> hidden: heads side by side (mixed over positions), or the MLP's neurons after the activation.
        write: hidden -> stream; its bias is `bias_name`'s, not the nodes'.
        nodes: the names of its nodes, ``"L0H3"``, ``"MLP0"``, or of a mixture of experts ``"L0E2"`` for each expert
            that is chosen and ``"L0.shared"``. In a difference of two runs a head has several sublayers.
        kind: what its nodes are.
        in_parts: whether the heads have other sublayers beside it, by queries, keys, values and gates.
        is_cross: whether its heads are those of cross-attention, ``"L2.cross.H0"``.
    """

    layer: int
    read: Chain
    write: Chain
    nodes: tuple[str, ...]
    bias_name: str
    kind: Kind
    in_parts: bool = False
    is_cross: bool = False

    @property
    def name(self) -> str:
        """All nodes together: ``"L0.attn"``, ``"L2.cross"``, ``"MLP0"``, or ``"L0.mixer"``."""
        if self.is_cross:
            return f"L{self.layer}.cross"
        if self.letter:
            return f"L{self.layer}.attn"
        if self.is_mlp:
            return f"MLP{self.layer}"
        return self.nodes[0]

    @property
    def letter(self) -> str:
        """What heads read by, ``"v"``, ``"q"``, ``"k"`` or ``"g"``; an empty text of anything else."""
        return LETTERS.get(self.kind, "")

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of its nodes, apart from those of the same heads in other sublayers: ``"L0H3.k"``."""
        if not self.in_parts:
            return self.nodes
        return tuple(f"{node}.{self.letter}" for node in self.nodes)

    @property
    def node_kind(self) -> str:
        """What its nodes are called where kinds are listed: a head, a mixer or an MLP."""
        return {"query": "head", "key": "head", "gate": "head", "per_layer": "mlp"}.get(self.kind, self.kind)

    @property
    def is_attention(self) -> bool:
        """Whether its nodes are heads that mix values by a pattern."""
        return self.kind == "head"

    @property
    def is_mlp(self) -> bool:
        """Whether it is an MLP, or the experts in its place."""
        return self.kind == "mlp"

    @property
    def is_positionwise(self) -> bool:
        """Whether it moves nothing between positions: an MLP, or an input of each token."""
        return not self.read.mixes

    @property
    def heads(self) -> int:
        """How many attention heads it has."""
        return len(self.nodes) if self.is_attention else 0

    @property
    def mixing(self) -> AnyAttention:
        """What moves values between positions, of heads."""
        mixing = self.read.stages[-1]
        assert isinstance(mixing, AnyAttention)
        return mixing

    def values(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head pos d_head"]:
        """The values of every head; those of grouped-query attention are repeated."""
        mixing = self.mixing
        values = rearrange(Chain(self.read.stages[:-1])(x), "b k (kv d) -> b kv k d", kv=mixing.kv_heads)
        return values.repeat_interleave(len(self.nodes) // mixing.kv_heads, dim=1)

    def neurons(self, hidden: Float[Tensor, "*rows width"]) -> list[str]:
        """The names of the channels of a hidden vector: ``"MLP0.N7"``."""
        return [f"{self.name}.N{neuron}" for neuron in range(hidden.shape[-1])]

    def split(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows node channel"]:
        """A hidden vector by node."""
        return rearrange(hidden, "... (node channel) -> ... node channel", node=len(self.nodes))

    def shares(
        self, cotangent: Float[Tensor, "*rows batch pos width"], hidden: Float[Tensor, "batch pos width"]
    ) -> Float[Tensor, "*rows batch node"]:
        """Each node's part of ⟨cotangent, hidden⟩, over all positions."""
        return self.split(upcast(cotangent) * hidden).sum((-3, -1))

    def outputs(self, hidden: Float[Tensor, "batch pos width"]) -> Float[Tensor, "node batch pos d_model"]:
        """What each node writes by itself, biases apart."""
        if len(self.nodes) == 1:
            return self.write.push(hidden[None])
        return self.write.push_groups(hidden, len(self.nodes))

    def read_of(self, node: int) -> Chain:
        """What one node reads, as a separate map: for a head, its values and its pattern only."""
        if len(self.nodes) == 1:
            return self.read
        if self.kind == "gate":
            return self.read.of_group(node, len(self.nodes))
        return self.read.component(node)

    def among(self, within: Within) -> "Sublayer":
        """The same among all positions of an encoder–decoder, zero at those of the other side."""
        return replace(self, read=_among(self.read, within), write=_among(self.write, within))


@dataclass(frozen=True, eq=False)
class Step:
    """Sublayers of one layer that read the same stream, and what the stream goes through after them.

    Attributes:
        layer: its block; -1 after the last.
        sublayers: what reads the stream and writes to it.
        outer: what the stream goes through then.
        outer_name: the name of the bias of `outer`.
        side: the positions that it changes, from the first to the one after the last; None for all.
    """

    layer: int
    sublayers: tuple[Sublayer, ...]
    outer: AffineMap
    outer_name: str
    side: tuple[int, int] | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all sublayers, in their order, each once."""
        return tuple(dict.fromkeys(node for sublayer in self.sublayers for node in sublayer.nodes))

    @property
    def part_names(self) -> tuple[str, ...]:
        """The nodes of each sublayer, those of the same heads in several apart."""
        return tuple(name for sublayer in self.sublayers for name in sublayer.part_names)

    @property
    def map(self) -> Chain:
        """The whole step."""
        inside = Sum((Identity(), *(sublayer.write @ sublayer.read for sublayer in self.sublayers)))
        return Chain((inside, self.outer))

    def directly(self, x: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "*rows batch pos d_model"]:
        """What the stream carries past the sublayers, the biases of the step included."""
        for sublayer in self.sublayers:
            if sublayer.write.bias is not ZERO:
                x = x + sublayer.write.bias
        return self.outer(x)

    @property
    def biases(self) -> list[tuple[str, Tensor, bool]]:
        """What the step adds by itself: name, bias, and whether it still goes through `outer`."""
        terms = [(sublayer.bias_name, sublayer.write.bias, True) for sublayer in self.sublayers]
        terms.append((self.outer_name, self.outer.bias, False))
        return [term for term in terms if term[1] is not ZERO]

    def among(self, within: Within | None) -> "Step":
        """The same among all positions, of a block of an encoder–decoder; without sides, as it is."""
        if within is None:
            return self
        sublayers = tuple(sublayer.among(within) for sublayer in self.sublayers)
        return replace(self, sublayers=sublayers, outer=within(self.outer), side=(within.start, within.stop))


def block_steps(frozen: PassOrDifference, layer: int, rule: str) -> list[Step]:
    """One block's steps, by its proven layout."""
    layout = frozen.layouts[layer]
    mixing = frozen.maps.mixer(layer)
    beside = frozen.maps.beside(layer)
    if frozen.view.blocks[layer].mixer is not None:
        attention = [_mixer(frozen, layer, layout.attn, mixing)]
    else:
        *inside, output = mixing.stages
        attention = _heads(frozen, layer, layout.attn, tuple(inside), output)
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
    if at.outer is None:
        return Identity()
    return frozen.maps.norm(layer, at.outer)


def _crossing(frozen: PassOrDifference, layer: int, at: Place, within: Within) -> Step:
    """Cross-attention: its heads read the encoder's output and write at the decoder's positions.

    What its queries go through first is part of the pattern, or, in a difference of two runs, of what reads them.
    """
    assert within.read is not None
    assert within.out is not None
    heads = frozen.view.blocks[layer].require_cross_attention().heads
    names = tuple(f"L{layer}.cross.H{head}" for head in range(heads))
    sublayers = _of_heads(frozen, layer, Place(after=at.after), within.read, within.out, names, "cross.b_O")
    placed = [
        replace(sublayer, read=_squared(sublayer.read), write=_among(sublayer.write, within), is_cross=True)
        for sublayer in sublayers
    ]
    outer = within(_outer(frozen, layer, at))
    return Step(layer, tuple(placed), outer, f"L{layer}.{at.outer}.b", (within.start, within.stop))


def _squared(read: Chain) -> Chain:
    """What heads of cross-attention read, their pattern one of all positions."""
    *before, mixing = read.stages
    return Chain((*before, mixing.square)) if isinstance(mixing, CrossAttention) else read


def _among(m: Chain, within: Within) -> Chain:
    """A chain of one side's positions as one of all positions, zero at the others after every stage."""
    sides = (within.start, within.stop)
    stages: list[AffineMap] = []
    for stage in m.stages:
        if isinstance(stage, Attention):  # remains one, so that its pattern can be read
            stages.append(CrossAttention(stage.pattern, stage.kv_heads, sides, sides, within.length).square)
        else:
            stages.append(within(stage, only=True))
    return Chain(tuple(stages))


def _end_steps(frozen: PassOrDifference, layer: int, rule: str) -> list[Step]:
    """What the stream goes through after a block's sublayers."""
    steps: list[Step] = []
    per_layer = frozen.maps.per_layer(layer, rule)
    if per_layer is not None:
        steps.append(Step(layer, (_per_layer_node(frozen, layer, per_layer),), Identity(), ""))
    for end in frozen.maps.ends(layer):
        if isinstance(end, Offset):
            steps += _offset_steps(layer, [end])
        elif isinstance(end, Segment):
            steps.append(Step(layer, (), end, "encoder_ln_final.b", (end.start, end.stop)))
        else:
            steps.append(Step(layer, (), end, f"L{layer}.end"))
    return steps


def _offset_steps(layer: int, offsets: Sequence[Offset]) -> list[Step]:
    """What hooks add to the stream, each as a step whose bias has the name of the hook point."""
    return [Step(layer, (), offset, offset.name) for offset in offsets]


def _mixer(frozen: PassOrDifference, layer: int, at: Place, mixing: Chain) -> Sublayer:
    """A mixer in place of attention, or beside it, as one node."""
    *inside, output = mixing.stages
    return _sublayer(frozen, layer, at, tuple(inside), output, (f"L{layer}.mixer",), "mixer.b_out", "mixer")


def _heads(
    frozen: PassOrDifference, layer: int, at: Place, inside: tuple[AffineMap, ...], output: AffineMap
) -> list[Sublayer]:
    """Attention as sublayers: one of a pass, whose patterns are held; of a difference by queries, keys and values.

    A gate after the heads is held in these, and one more. What the output adds by itself is the bias of the last.
    """
    names = tuple(f"L{layer}H{head}" for head in range(frozen.view.blocks[layer].attention.heads))
    read = inside[0]
    if len(inside) > 1:
        read = Chain(inside)
    return _of_heads(frozen, layer, at, read, output, names, "b_O")


def _of_heads(
    frozen: PassOrDifference,
    layer: int,
    at: Place,
    read: AffineMap,
    output: AffineMap,
    names: tuple[str, ...],
    bias_name: str,
) -> list[Sublayer]:
    """Heads as sublayers, by the routes that what they read is the sum of."""
    routes = read.summands
    if len(routes) == 1:
        return [_sublayer(frozen, layer, at, routes, output, names, bias_name, "head")]
    by_value, by_query, by_key, *by_gate = routes
    alone = without_offsets(output)  # what two models' outputs differ by is added once
    kinds: list[tuple[AffineMap, AffineMap, Kind]] = [
        (by_query, alone, "query"),
        (by_key, alone, "key"),
        (by_value, output, "head"),
    ]
    if by_gate:  # each of the others ends with it
        kinds = [(Chain(read.parts[:-1]), Chain((read.parts[-1], *stages_of(out))), kind) for read, out, kind in kinds]
        kinds.insert(0, (by_gate[0], alone, "gate"))
    sublayers = [_sublayer(frozen, layer, at, (read,), out, names, bias_name, kind) for read, out, kind in kinds]
    return [replace(sublayer, in_parts=True) for sublayer in sublayers]


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


def _per_layer_node(frozen: PassOrDifference, layer: int, per_layer: Chain) -> Sublayer:
    """What a block adds for an input of each token at this layer, as a node."""
    *inside, output = per_layer.stages
    write = Chain((output, frozen.maps.norm(layer, PER_LAYER_NORM)))
    name = f"L{layer}.per_layer"
    return Sublayer(layer, Chain(tuple(inside)), write, (name,), f"{name}.b_out", "per_layer")


def _norms(frozen: PassOrDifference, layer: int, name: str | None) -> tuple[AffineMap, ...]:
    """The norm of this name, or none."""
    if name is None:
        return ()
    return (frozen.maps.norm(layer, name),)


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
    before, after = (_norms(frozen, layer, name) for name in (at.before, at.after))
    bias = f"L{layer}.{bias_name}"
    inside = [stage for part in read for stage in stages_of(part)]
    return Sublayer(layer, Chain((*before, *inside)), Chain((*stages_of(output), *after)), nodes, bias, kind)
