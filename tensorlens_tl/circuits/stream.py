"""The frozen model as steps of its residual stream: what reads from it, and what writes to it.

It starts from token and position embeddings, where they can be separated. The hook points of these differ by class, and
which of them are added differs by family (a shortformer's positions never enter the stream). The known combinations
are data; the one whose sum is nearest to the stream is used.

The residual stream passes through *steps*. At each step *sublayers* (attention, the MLP) read the stream and write back
to it, and then the whole stream passes through the step's *outer* map, if it has one (a post-LN norm; at the end the
final norm or a prediction head):

    x[s+1] = outer( x[s] + Σ_sublayers write(read(x[s])) )

A sequential block is two steps, a parallel block one with two sublayers; whitening before a block is one more step,
without sublayers, whose outer map mixes positions. Without the sublayers, what remains is how a vector in the stream
reaches the end *directly*: the identity in a pre-LN model, the norms in a post-LN model.

A sublayer's hidden vector, read(x), is a row of groups: one per head, or one for the whole MLP. A group is a *node*:
its output is linear in its part of the hidden vector, so its share of anything is an inner product with the same part
of the pulled-back vector. What `write` and `outer` add beyond that are *biases*, which are sources too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
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
    Norm,
    Routed,
    Segment,
    Sum,
    stages_of,
)
from tensorlens_tl.algebra.memory import Memory, slices
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.algebra.secants import Offset, without_offsets
from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.core import Paired, Recorded
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import capture, hook_points
from tensorlens_tl.models import FrozenRule, LayerRange, ModelView, Place, Query, TokenLike, Within, known_rule
from tensorlens_tl.models.names import ENCODER_NORM, ENTRY_NORM, PER_LAYER_NORM
from tensorlens_tl.models.offload import loaded
from tensorlens_tl.models.parameters import NormWeights, norm_epsilon, norm_weights
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import Difference, FrozenPass, PassOrDifference, check_explained
from tensorlens_tl.passes.inputs import one_query, query_positions
from tensorlens_tl.passes.target import chosen_layers, end_of, resolve_target, through_final_norm

Kind = Literal["head", "query", "key", "gate", "mixer", "mlp", "per_layer"]
"""The kinds of a sublayer's nodes: heads by their values, and in a difference of two runs by the effect of their
queries and keys on where they attend, and by a gate of their output; a mixer in place of attention; an MLP or experts;
a layer's own input for each token."""

LETTERS: dict[Kind, str] = {"head": "v", "query": "q", "key": "k", "gate": "g"}
"""What heads read by: values, queries, keys, or a gate."""


@dataclass(frozen=True, eq=False)
class Sublayer:
    """A part of a layer that reads the stream and writes to it.

    Attributes:
        layer: its block.
        read: stream -> hidden: heads side by side (mixed over positions), or the MLP's neurons after the activation.
        write: hidden -> stream; its bias is named `bias_name` and belongs to none of the nodes.
        nodes: the names of its nodes, ``"L0H3"``, ``"MLP0"``, or in a mixture of experts ``"L0E2"`` for each expert
            that is chosen and ``"L0.shared"``. In a difference of two runs a head has several sublayers.
        kind: what its nodes are.
        in_parts: whether its heads are split over several sublayers, by queries, keys, values and gates.
        is_cross: whether its heads belong to cross-attention, ``"L2.cross.H0"``.
        point: the hook point of the hidden vector, in a run under a rule.
    """

    layer: int
    read: Chain
    write: Chain
    nodes: tuple[str, ...]
    bias_name: str
    kind: Kind
    in_parts: bool = False
    is_cross: bool = False
    point: str = ""

    @property
    def name(self) -> str:
        """The name of all nodes together: ``"L0.attn"``, ``"L2.cross"``, ``"MLP0"``, or ``"L0.mixer"``."""
        if self.is_cross:
            return f"L{self.layer}.cross"
        if self.letter:
            return f"L{self.layer}.attn"
        if self.is_mlp:
            return f"MLP{self.layer}"
        return self.nodes[0]

    @property
    def letter(self) -> str:
        """What heads read by, ``"v"``, ``"q"``, ``"k"`` or ``"g"``; an empty text for anything else."""
        return LETTERS.get(self.kind, "")

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of its nodes, distinct from those of the same heads in other sublayers: ``"L0H3.k"``."""
        if not self.in_parts:
            return self.nodes
        return tuple(f"{node}.{self.letter}" for node in self.nodes)

    @property
    def node_kind(self) -> str:
        """The kind that listings show for its nodes: a head, a mixer or an MLP."""
        return {"query": "head", "key": "head", "gate": "head", "per_layer": "mlp"}.get(self.kind, self.kind)

    @property
    def is_attention(self) -> bool:
        """Whether its nodes are heads that mix values by a pattern."""
        return self.kind == "head"

    @property
    def has_pattern(self) -> bool:
        """Whether its nodes are heads with a frozen pattern."""
        return self.is_attention and isinstance(self.read.stages[-1], AnyAttention)

    @property
    def is_mlp(self) -> bool:
        """Whether it is an MLP, or experts in its place."""
        return self.kind == "mlp"

    @property
    def has_neurons(self) -> bool:
        """Whether its hidden vector consists of neurons: of an MLP, experts, or a layer's own input of each token."""
        return self.kind in ("mlp", "per_layer")

    @property
    def heads(self) -> int:
        """The number of attention heads."""
        return len(self.nodes) if self.is_attention else 0

    @property
    def mixing(self) -> AnyAttention:
        """For heads, the map that moves values between positions."""
        mixing = self.read.stages[-1]
        assert isinstance(mixing, AnyAttention)
        return mixing

    def values(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head pos d_head"]:
        """Return the values of every head, repeated in grouped-query attention."""
        mixing = self.mixing
        values = rearrange(Chain(self.read.stages[:-1])(x), "b k (kv d) -> b kv k d", kv=mixing.kv_heads)
        return values.repeat_interleave(len(self.nodes) // mixing.kv_heads, dim=1)

    def split(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows node channel"]:
        """Split a hidden vector by node."""
        return rearrange(hidden, "... (node channel) -> ... node channel", node=len(self.nodes))

    def shares(
        self, cotangent: Float[Tensor, "*rows batch pos width"], hidden: Float[Tensor, "batch pos width"]
    ) -> Float[Tensor, "*rows batch node"]:
        """Return each node's part of ⟨cotangent, hidden⟩, over all positions."""
        return self.split(upcast(cotangent) * hidden).sum((-3, -1))

    def terms(
        self, products: Float[Tensor, "*rows batch pos width"], by: str
    ) -> tuple[list[str], Float[Tensor, "*rows batch term pos"]]:
        """Sum products with a hidden vector into named terms at every position.

        By ``"component"`` for all nodes together, by ``"neuron"`` for each channel of an MLP, otherwise for each node.
        """
        if by == "component":
            return [self.name], products.sum(-1)[..., None, :]
        if by == "neuron" and self.has_neurons:
            name = self.name
            return [f"{name}.N{neuron}" for neuron in range(products.shape[-1])], products.mT
        return list(self.nodes), self.split(products).sum(-1).mT

    def outputs(self, hidden: Float[Tensor, "batch pos width"]) -> Float[Tensor, "node batch pos d_model"]:
        """Return each node's output, without biases."""
        if len(self.nodes) == 1:
            return self.write.push(hidden[None])
        return self.write.push_groups(hidden, len(self.nodes))

    def read_of(self, node: int) -> Chain:
        """Return one node's read as a separate map: for a head, its values and its pattern only."""
        if len(self.nodes) == 1:
            return self.read
        if self.kind == "gate" or isinstance(self.read.stages[-1], Recorded | Paired):
            return self.read.of_group(node, len(self.nodes))
        return self.read.component(node)

    def pull_each(
        self, cotangents: Float[Tensor, "*rows batch pos node channel"], nodes: Sequence[int] | None = None
    ) -> Float[Tensor, "some *rows batch pos d_model"]:
        """Pull vectors at nodes' parts of the hidden vector back through each (chosen) node alone."""
        *before, last = self.read.stages
        chosen = range(len(self.nodes)) if nodes is None else nodes
        if isinstance(last, Recorded | Paired):
            return Chain(tuple(before)).pull(last.pull_groups(cotangents, chosen))
        return torch.stack([self.read_of(node).pull(cotangents[..., node, :]) for node in chosen])

    def among(self, within: Within) -> "Sublayer":
        """Return the sublayer on all positions of an encoder–decoder, zero at those of the other side."""
        return replace(self, read=among_all(self.read, within), write=among_all(self.write, within))


@dataclass(frozen=True, eq=False)
class Step:
    """Sublayers of one layer that read the same stream, and the map that the stream passes after them.

    Attributes:
        layer: its block; -1 after the last.
        sublayers: the sublayers.
        outer: the map that the whole stream passes afterwards.
        outer_name: the name of the bias of `outer`.
        side: the positions that it changes, from the first to one past the last; None for all.
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

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """The nodes of each sublayer, with the parts of a head distinct."""
        return tuple(name for sublayer in self.sublayers for name in sublayer.part_names)

    @property
    def map(self) -> Chain:
        """The whole step."""
        inside = Sum((Identity(), *(sublayer.write @ sublayer.read for sublayer in self.sublayers)))
        return Chain((inside, self.outer))

    def directly(self, x: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "*rows batch pos d_model"]:
        """Carry the stream past the sublayers, adding the biases of the step."""
        for sublayer in self.sublayers:
            if sublayer.write.bias is not ZERO:
                x = x + sublayer.write.bias
        return self.outer(x)

    @property
    def biases(self) -> list[tuple[str, Tensor, bool]]:
        """The step's constants: name, bias, and whether it still passes `outer`."""
        terms = [(sublayer.bias_name, sublayer.write.bias, True) for sublayer in self.sublayers]
        terms.append((self.outer_name, self.outer.bias, False))
        return [term for term in terms if term[1] is not ZERO]

    def among(self, within: Within | None) -> "Step":
        """Return an encoder–decoder's step on all positions; without sides, the step itself."""
        if within is None:
            return self
        sublayers = tuple(sublayer.among(within) for sublayer in self.sublayers)
        return replace(self, sublayers=sublayers, outer=within(self.outer), side=(within.start, within.stop))


def among_all(m: Chain, within: Within) -> Chain:
    """Extend a chain from one side's positions to all, with zeros at the others after every stage."""
    sides = (within.start, within.stop)
    stages: list[AffineMap] = []
    for stage in m.stages:
        if isinstance(stage, Attention):  # stays an attention, so that its pattern can be read
            stages.append(CrossAttention(stage.pattern, stage.kv_heads, sides, sides, within.length).square)
        else:
            stages.append(within(stage, only=True))
    return Chain(tuple(stages))


WHOLE = {"embed": "hook_embed"}
"""The sum of all parts on a BERT Bridge, including the norm."""

PARTS: tuple[tuple[dict[str, str], str | None], ...] = (
    ({"embed": "hook_embed", "pos_embed": "hook_pos_embed"}, None),
    (
        {
            "embed": "embed.hook_out",
            "pos_embed": "pos_embed.hook_out",
            "token_type_embed": "token_type_embed.hook_out",
        },
        "embed_ln",
    ),
    (
        {
            "embed": "embed.hook_embed",
            "pos_embed": "embed.hook_pos_embed",
            "token_type_embed": "embed.hook_token_type_embed",
        },
        "embed.ln",
    ),
    ({"embed": "embed.hook_out"}, f"blocks.0.{ENTRY_NORM}"),
    (WHOLE, None),
)
"""Hook points that add up to the first block's input, and the norm that they pass, if any."""


def embedding_parts(frozen: PassOrDifference) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """Return the summands of the first block's input by name; ``"embed"`` alone where no known combination fits.

    An encoder–decoder has ``"embed"`` alone: each side has its own embeddings.

    An embedding norm is frozen like any other: its linear part is applied to each summand and its shift is one more. In
    a difference of two runs, the summands are differences.
    """
    if isinstance(frozen, Difference):
        first, second = (embedding_parts(run) for run in (frozen.a, frozen.b))
        if first.keys() != second.keys():
            return {"embed": frozen.resid_pre(0)}
        return {name: first[name] - second[name] for name in first}
    points = frozen.points.blocks[0]
    x = frozen.resid_pre(0)
    if frozen.sides is not None:
        return {"embed": x}
    known = hook_points(frozen.model)
    scales = {norm: f"{norm}.hook_scale" for _, norm in PARTS if norm is not None}
    candidates = {name for names, _ in PARTS for name in names.values()} | set(scales.values())
    hook_names = sorted(candidates & set(known))
    activations, _ = capture(frozen.model, frozen.inputs, hook_names, last=points.resid_pre, optional=hook_names)
    best = float("inf")
    nearest = {"embed": x}
    for names, norm in PARTS:
        if names == WHOLE and best < float("inf"):
            break  # its parts are known
        if not all(name in activations for name in names.values()) or (
            norm is not None and scales[norm] not in activations
        ):
            continue
        parts = {part: _as_stream(activations[name], x) for part, name in names.items()}
        if any(part is None for part in parts.values()):
            continue
        summands = {part: tensor for part, tensor in parts.items() if tensor is not None}
        if norm is not None:
            module = frozen.view.model.get_submodule(norm)
            with loaded(module):
                weights = norm_weights(module, frozen.view.cfg)
            held = Norm(activations[scales[norm]], weights.gain, weights.shift, weights.centre)
            summands = {part: held.push(tensor) for part, tensor in summands.items()}
            if weights.shift is not None:
                summands[f"{norm}.b"] = weights.shift.expand_as(x)
        total = sum(summands.values(), start=torch.zeros_like(x))
        error = relative_error(total, x, frozen.mask)
        if error <= frozen.tolerance and error < best:
            best, nearest = error, summands
    return nearest


def _as_stream(tensor: Tensor, x: Tensor) -> Tensor | None:
    """Expand an embedding to every prompt: position embeddings may come without a batch axis or with one row."""
    tensor = tensor.to(x)
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or tensor.shape[1:] != x.shape[1:] or tensor.shape[0] not in (1, x.shape[0]):
        return None
    return tensor.expand_as(x)


def block_steps(frozen: PassOrDifference, layer: int, rule: FrozenRule) -> list[Step]:
    """Return one block's steps, by its verified layout."""
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
    """Return the steps of attention or the MLP in a sequential block, with the norm around the sum."""
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
    """Return the norm around a sum, or the identity."""
    return Identity() if at.outer is None else frozen.maps.norm(layer, at.outer)


def _crossing(frozen: PassOrDifference, layer: int, at: Place, within: Within) -> Step:
    """Return the step of cross-attention: heads read the encoder's output and write at the decoder's positions.

    The norms before its queries are part of the pattern, or, in a difference of two runs, of the queries' read.
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


def _end_steps(frozen: PassOrDifference, layer: int, rule: FrozenRule) -> list[Step]:
    """Return the steps after a block's sublayers."""
    steps: list[Step] = []
    per_layer = frozen.maps.per_layer(layer, rule)
    if per_layer is not None:  # a layer's own input for each token, as a node
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
    """Return what hooks add to the stream as steps, whose biases are named by hook points."""
    return [Step(layer, (), offset, offset.name) for offset in offsets]


def _mixing_nodes(frozen: PassOrDifference, layer: int, at: Place, mixing: Chain) -> list[Sublayer]:
    """Return attention, or the mixer in its place, as sublayers; none for a block that is an MLP alone."""
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
    """Return a mixer in place of attention, or beside it, as one node."""
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
    """Return attention as sublayers: one for a pass, whose patterns are frozen; several for a difference.

    These are by queries, keys and values; a gate after the heads is frozen in them, and is one more sublayer. The
    output's bias belongs to the last.
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
    if by_gate:  # each of the others ends with the gate
        kinds = [(Chain(read.parts[:-1]), Chain((read.parts[-1], *stages_of(out))), kind) for read, out, kind in kinds]
        kinds.insert(0, (by_gate[0], output, "gate"))
    sublayers: list[Sublayer] = []
    for part, out, kind in kinds:
        sublayer = _sublayer(frozen, layer, at, (part,), out, names, bias_name, kind)
        if kind != "head":  # differences between two models' outputs, or the norms after them, are added only once
            sublayer = replace(sublayer, write=without_offsets(sublayer.write))
        sublayers.append(replace(sublayer, in_parts=True))
    return sublayers


def _mlp_nodes(frozen: PassOrDifference, layer: int, rule: FrozenRule) -> tuple[AffineMap, AffineMap, tuple[str, ...]]:
    """Return an MLP's read and write, and its nodes: the whole MLP, or every expert that is chosen.

    An expert's hidden vector is its output, with its routing weight and its biases.
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


@dataclass(frozen=True, eq=False)
class Pulled:
    """A vector at the end, pulled back along the steps.

    Attributes:
        stream: the vector at the stream before each step, and at the end, each `[*rows, batch, pos, d_model]`.
        sums: the vector at each step's sum: after its sublayers have written and before its outer map.
    """

    stream: list[Tensor]
    sums: list[Tensor]

    def of_biases(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Yield every bias on the way: step, name, the bias, and the vector that it is dotted with."""
        for number, step in enumerate(steps):
            for name, bias, inside in step.biases:
                vectors = self.stream[number + 1]
                if inside:
                    vectors = self.sums[number]
                yield number, name, bias, vectors


@dataclass(frozen=True, eq=False)
class Stream:
    """A frozen pass, or some of its layers, as steps, with the values that the pass's input gives them.

    Attributes:
        layers: the range of layers.
        final_norm: whether the norm after the last layer is included, if the layers reach it.
        steps: the steps of the stream.
        values: `x` and `hidden` of a run that supplies them; None where the steps compute them.
    """

    frozen: PassOrDifference
    layers: range
    final_norm: bool
    steps: tuple[Step, ...]
    values: tuple[list[Tensor], list[tuple[Tensor, ...]]] | None = None

    @classmethod
    def of(
        cls,
        frozen: PassOrDifference,
        rule: FrozenRule = "frozen",
        *,
        layers: LayerRange = None,
        final_norm: bool | None = None,
        to_tokens: bool = True,
    ) -> "Stream":
        """Build the stream up to the unembedding's input, or (``to_tokens=False``) to the operator's output.

        Args:
            frozen: the pass.
            rule: the rule for MLPs.
            layers: consecutive layers; a range that ends before the last ends at the next block's input.
            final_norm: whether the norm after the last layer is part of it.
            to_tokens: whether a prediction head is part of it.

        Raises:
            InvalidInputError: no such activation rule or layers.
            FrozenModelError: the weights were changed since the pass.
            UnsupportedModelError: a block uses keys and values of an earlier one.
        """
        frozen.view.require_single_streams("the stream of a circuit")
        rule = known_rule(rule)
        chosen = chosen_layers(frozen.n_layers, layers)
        ends_normed = through_final_norm(frozen, chosen.stop, final_norm)
        frozen.check_fresh()
        steps = [step for layer in chosen for step in block_steps(frozen, layer, rule)]
        if chosen.stop == frozen.n_layers:
            ends = dict[str, AffineMap | None]()
            if ends_normed:
                ends["ln_final.b"] = frozen.maps.final_map()
            if to_tokens:
                ends["prediction head b"] = frozen.prediction_head(rule)
            last = frozen.maps.capture.side(frozen.n_layers - 1)
            steps += [Step(-1, (), end, name, last) for name, end in ends.items() if end is not None]
        return cls(frozen, chosen, ends_normed, tuple(steps))

    @cached_property
    def _values(self) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        return self.values or self._walked(anchored=False)

    def anchored(self) -> "Stream":
        """Return the stream with the run's own values at each block's start, so that rounding does not accumulate."""
        return replace(self, values=self.values or self._walked(anchored=True))

    def _walked(self, *, anchored: bool) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """Compute `x` and `hidden`, step by step, from the first input alone or from the input of every block."""
        x: list[Tensor] = []
        hidden: list[tuple[Tensor, ...]] = []
        after, layer = self.frozen.resid_pre(self.layers.start), self.layers.start
        for step in self.steps:
            reached = step.layer if step.layer >= 0 else self.layers.stop
            if anchored and reached != layer:
                after, layer = self.frozen.resid_pre(reached), reached
            x.append(after)
            hidden.append(tuple(sublayer.read(after) for sublayer in step.sublayers))
            written = sum((s.write(h) for s, h in zip(step.sublayers, hidden[-1], strict=True)), start=after)
            after = step.outer(written)
        return [*x, after], hidden

    @property
    def x(self) -> list[Float[Tensor, "batch pos d_model"]]:
        """The stream before each step, and after the last."""
        return self._values[0]

    @property
    def hidden(self) -> list[tuple[Float[Tensor, "batch pos _width"], ...]]:
        """Each sublayer's hidden vector, by step and sublayer."""
        return self._values[1]

    def step_at(self, layer: int, step: int = 0) -> int:
        """Return the number of a layer's step; for the layer after the last, of what follows the blocks."""
        return sum(0 <= earlier.layer < layer for earlier in self.steps) + step

    @property
    def run(self) -> FrozenPass:
        """The pass of a stream that is not a difference of two."""
        assert isinstance(self.frozen, FrozenPass)
        return self.frozen

    @property
    def widest(self) -> int:
        """The width of the widest hidden vector."""
        return max((hidden.shape[-1] for step in self.hidden for hidden in step), default=0)

    def sources(self) -> dict[str, Float[Tensor, "batch pos d_model"]]:
        """Return what the stream begins with: token and position embeddings, or the input of the first layer."""
        if self.layers.start:
            return {f"{self.frozen.view.blocks[self.layers.start].name} input": self.x[0]}
        return embedding_parts(self.frozen)

    def at(self, layer: int, *, cross: bool = False) -> tuple[int, Sublayer]:
        """Return the step and the attention sublayer of one layer; with `cross`, its cross-attention.

        Raises:
            InvalidInputError: the layer is not in the stream.
        """
        for number, step in enumerate(self.steps):
            for sublayer in step.sublayers:
                if sublayer.layer == layer and sublayer.is_attention and sublayer.is_cross == cross:
                    return number, sublayer
        raise InvalidInputError(f"layers: layer {layer} is not among {list(self.layers)}.")

    def pull(
        self,
        g: Float[Tensor, "*rows batch pos d_model"],
        *,
        sublayers: bool = True,
        joining: Mapping[int, Tensor] | None = None,
    ) -> Pulled:
        """Pull a vector at the end through everything, or (``sublayers=False``) only directly, past all sublayers.

        `joining` has vectors to add on the way, at the stream before a step.
        """
        stream = [g]
        sums = []
        for number, step in reversed(list(enumerate(self.steps))):
            g = step.outer.pull(g)
            sums.append(g)
            if sublayers:
                g = sum((s.read.pull(s.write.pull(g)) for s in step.sublayers), start=g)
            if joining and number in joining:
                g = g + joining[number]
            stream.append(g)
        return Pulled(stream[::-1], sums[::-1])

    def terms(self, number: int, pulled: Pulled, by: str) -> Iterator[tuple[Sublayer, list[str], Tensor]]:
        """Yield what each of a step's sublayers contributes to a pulled target: names, and terms by position.

        Raises:
            UnsupportedModelError: neurons of a mixture of experts.
        """
        for sublayer, hidden in zip(self.steps[number].sublayers, self.hidden[number], strict=True):
            if by == "neuron" and sublayer.has_neurons:
                self.frozen.view.blocks[sublayer.layer].require_dense_mlp()
            cotangent = sublayer.write.pull(pulled.sums[number])
            yield sublayer, *sublayer.terms(upcast(cotangent) * hidden, by)

    @cached_property
    def direct(self) -> list[Tensor]:
        """What bypasses every sublayer, with the input and the biases on the way: before each step, and at the end."""
        carried = [self.x[0]]
        for step in self.steps:
            carried.append(step.directly(carried[-1]))
        return carried

    @cached_property
    def direct_hidden(self) -> list[tuple[Tensor, ...]]:
        """Each sublayer's hidden vector for the input that reaches it directly."""
        return [
            tuple(sublayer.read(x) for sublayer in step.sublayers)
            for step, x in zip(self.steps, self.direct, strict=False)
        ]

    @cached_property
    def shown(self) -> list[tuple[Float[Tensor, "2 batch pos _width"], ...]]:
        """Each sublayer's hidden vector, and that of `direct_hidden`; for a single node, its output for the two.

        Many vectors can then meet a node at its output, without being pulled into a wider hidden layer.
        """
        return [
            tuple(
                sublayer.write.push(torch.stack(both)) if len(sublayer.nodes) == 1 else torch.stack(both)
                for sublayer, *both in zip(step.sublayers, hidden, direct, strict=True)
            )
            for step, hidden, direct in zip(self.steps, self.hidden, self.direct_hidden, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class StreamTarget:
    """A target at some queries of a frozen pass, and the stream that leads to it.

    Attributes:
        stream: the stream up to where the target reads it.
        read_at: the hook point that the target reads; in an encoder–decoder its decoder's part (see `points`).
        vectors: the target's vector for each query, `[batch, query, d_model]`.
        constant: the constant that is added to the product (b_U), `[batch, query]`.
        total: the model's own value, before any final soft cap, `[batch, query]`.
        positions: the queries, `[batch, query]`.
        label: a description of the target, with where it is read.
        constant_name: the name of the constant among the terms.
        soft_cap: the cap that the model applies afterwards, or None.
        name: the target without where it is read; for a difference, the number whose change it is.
        of_tokens: whether the target is made of logits.
    """

    stream: Stream
    read_at: str
    vectors: Float[Tensor, "batch query d_model"]
    constant: Float[Tensor, "batch query"]
    total: Float[Tensor, "batch query"]
    positions: Int[Tensor, "batch query"]
    label: str
    constant_name: str = "b_U"
    soft_cap: float | None = None
    name: str = ""
    of_tokens: bool = False

    @cached_property
    def seed(self) -> Float[Tensor, "query batch pos d_model"]:
        """The vectors at their positions, a row per query."""
        return self.seed_of(slice(None))

    def seed_of(self, queries: slice) -> Float[Tensor, "query batch pos d_model"]:
        """Return the seed of some queries."""
        vectors, positions = self.vectors[:, queries].transpose(0, 1), self.positions[:, queries].T
        return place(vectors, positions, self.stream.frozen.resid_pre(0))

    def some_queries(self, row_bytes: int, memory: Memory) -> Iterator[slice]:
        """Yield slices of queries that fit into memory together; a single query is not bounded."""
        count = self.positions.shape[1]
        return slices(count, row_bytes, memory if count > 1 else None, "queries")

    @property
    def points(self) -> tuple[str, ...]:
        """The hook points that it reads: one, or in an encoder–decoder one for each side."""
        frozen = self.stream.frozen
        if frozen.sides is None:
            return (self.read_at,)
        if self.read_at not in (frozen.points.unembed_in, frozen.points.output):
            return tuple(frozen.maps.capture.stream_names(self.stream.layers.stop))
        assert frozen.points.encoder_output is not None
        return frozen.points.encoder_output, self.read_at

    def read_of(
        self, activation: Callable[[str], Float[Tensor, "*rows batch some d_model"]]
    ) -> Float[Tensor, "*rows batch pos d_model"]:
        """Join the activations at `points` into what the target reads."""
        return torch.cat([activation(name) for name in self.points], dim=-2)

    def number_of(
        self, activation: Callable[[str], Float[Tensor, "*rows batch some d_model"]]
    ) -> Float[Tensor, "*rows batch query"]:
        """Return the target's value in another run from its activations at `points`; see `number`."""
        return self.number(self.read_of(activation))

    def number(self, read: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "*rows batch query"]:
        """Return the target's value for another stream at `read_at`, before any final soft cap."""
        positions = self.positions[..., None].expand(*read.shape[:-2], -1, 1)
        activations = torch.take_along_dim(upcast(read.to(self.vectors.device)), positions, dim=-2)
        return (activations * self.vectors).sum(-1) + self.constant

    @property
    def noise(self) -> Float[Tensor, "batch query"]:
        """The rounding of two runs in the change, which may be of the same size; zero for one run."""
        frozen = self.stream.frozen
        if not isinstance(frozen, Difference):
            return torch.zeros_like(self.total)
        lengths = [upcast(self.read_of(run.activation)).norm(dim=-1) for run in frozen.runs]
        at_queries = torch.stack(lengths).sum(0).gather(1, self.positions)
        return frozen.rounding * at_queries * self.vectors.norm(dim=-1)

    def fields(self) -> dict[str, Any]:
        """Return the fields that every result of these queries has."""
        frozen = self.stream.frozen
        return {
            "total": self.total,
            "queries": self.positions,
            "mask": frozen.mask,
            "tokens": frozen.str_tokens,
            "target": self.label,
            "soft_cap": self.soft_cap,
            "provenance": frozen.provenance(),
        }


def stream_target(
    frozen: PassOrDifference,
    target: TokenLike,
    minus: TokenLike,
    direction: Direction,
    query: Query,
    rule: FrozenRule,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    *,
    one: bool = True,
) -> StreamTarget:
    """Check the arguments, and build the stream up to where the target reads it.

    Args:
        frozen: the pass, or the difference of two.
        target, minus, direction: as in `FrozenOperator.target`; a direction reads the stream where the layers end.
        query: the queries, or with `one` a single one.
        rule: the rule for MLPs.
        layers: consecutive layers, None for all.
        final_norm: whether the norm after the last layer is included.

    Raises:
        InvalidInputError: no frozen pass, a query out of range, several with `one`, a token target before the
            last layer, and what `resolve_target` rejects.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
    """
    check_explained(frozen)
    chosen = chosen_layers(frozen.n_layers, layers)
    normed = through_final_norm(frozen, chosen.stop, final_norm)
    if frozen.view.final_norm is None:  # the last block's output is unembedded directly
        normed = chosen.stop == frozen.n_layers
    if direction is None and target is not None and not normed:
        raise InvalidInputError(
            f"target: the chosen part ends at {end_of(frozen, chosen.stop, normed)}, before the unembedding; use "
            "direction=, or all layers with their final norm. tlens.circuits.logit_lens unembeds the stream before "
            "every layer."
        )
    positions = one_query(frozen.prompt, query) if one else query_positions(frozen.prompt, query)
    resolved = resolve_target(frozen, target, minus, direction, positions)
    stream = Stream.of(frozen, rule, layers=layers, final_norm=final_norm, to_tokens=resolved.of_tokens)
    if resolved.of_tokens:
        read_at = frozen.points.unembed_in
    elif not normed or frozen.view.final_norm is None:
        read_at = frozen.maps.capture.output_name(chosen.stop - 1)
    else:
        read_at = frozen.points.output
    assert read_at is not None  # a token needs an unembedding
    label = resolved.label
    soft_cap = frozen.soft_cap
    if not resolved.of_tokens:
        label = f"{label} at {end_of(frozen, chosen.stop, normed)}"
        soft_cap = None
    if isinstance(frozen, Difference):
        label = f"change of the {label}"
    real = torch.take_along_dim(frozen.mask, positions, dim=1)  # padding has no target
    vectors = resolved.vectors * real[..., None]
    constant = resolved.constant.to(upcast(frozen.resid_pre(0))) * real
    readout = StreamTarget(
        stream, read_at, vectors, constant, constant, positions, label,
        soft_cap=soft_cap, name=resolved.label, of_tokens=resolved.of_tokens,
    )  # fmt: skip
    return replace(readout, total=readout.number_of(frozen.activation))


def token_pairs(
    sublayer: Sublayer, x: Float[Tensor, "batch pos d_model"], cotangent: Float[Tensor, "*rows batch pos width"]
) -> Float[Tensor, "*rows batch head query key"]:
    """Return what each head moves from each source token to each query, along a vector at its hidden layer.

    With the cotangent g this is ``A^h_ij ⟨g_i^h, v_j^h⟩``; summed over keys, g's inner product with the hidden vector.
    """
    pairs = rearrange(sublayer.split(cotangent), "... q h d -> ... h q d") @ sublayer.values(x).mT
    return sublayer.mixing.pattern * pairs


def summed_by_name(
    names: list[str], values: Float[Tensor, "*any"], dim: int
) -> tuple[list[str], Float[Tensor, "*summed"]]:
    """Sum values of equal names along a dimension, such as a head's by queries, keys and values; keep the names' order.

    `names` has one name for each index along the dimension.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    if len(numbers) == len(names):
        return names, values
    index = torch.tensor([numbers[name] for name in names], device=values.device)
    shape = list(values.shape)
    shape[dim] = len(numbers)
    return list(numbers), values.new_zeros(shape).index_add_(dim, index, values)


def normed(view: ModelView, norm: NormWeights, name: str | None, x: Tensor) -> Float[Tensor, "*any d"]:
    """Apply a norm with the scale of these vectors; `name` is its module (or its hook point), if it has one."""
    if norm.epsilon is None:
        assert name is not None  # it has a hook point of its own
        module = view.model.get_submodule(name.removesuffix(".hook_scale"))
        norm = replace(norm, epsilon=norm_epsilon(module, view.cfg))
    return norm.held(x)(x)


def dot(g: Float[Tensor, "*rows batch pos d"], x: Tensor) -> Float[Tensor, "*rows batch"]:
    """Return ⟨g, x⟩ of each row and prompt; `x` may be one vector for all positions, or a bias that is zero."""
    return (upcast(g) * x).sum((-2, -1))
