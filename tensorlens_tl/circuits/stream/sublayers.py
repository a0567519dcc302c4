"""What reads the residual stream and writes to it, one step after the other: the parts of a `Stream`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import ZERO, AffineMap, AnyAttention, Attention, Chain, CrossAttention, Identity, Sum
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.core import Recorded
from tensorlens_tl.models import Within

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
    def has_pattern(self) -> bool:
        """Whether its nodes are heads whose pattern is held."""
        return self.is_attention and isinstance(self.read.stages[-1], AnyAttention)

    @property
    def is_mlp(self) -> bool:
        """Whether it is an MLP, or the experts in its place."""
        return self.kind == "mlp"

    @property
    def has_neurons(self) -> bool:
        """Whether its hidden vector is one of neurons: of an MLP or experts, or of an input of each token."""
        return self.kind in ("mlp", "per_layer")

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

    def split(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows node channel"]:
        """A hidden vector by node."""
        return rearrange(hidden, "... (node channel) -> ... node channel", node=len(self.nodes))

    def shares(
        self, cotangent: Float[Tensor, "*rows batch pos width"], hidden: Float[Tensor, "batch pos width"]
    ) -> Float[Tensor, "*rows batch node"]:
        """Each node's part of ⟨cotangent, hidden⟩, over all positions."""
        return self.split(upcast(cotangent) * hidden).sum((-3, -1))

    def terms(
        self, products: Float[Tensor, "*rows batch pos width"], by: str
    ) -> tuple[list[str], Float[Tensor, "*rows batch term pos"]]:
        """Names, and what each gives at every position, of products with a hidden vector.

        By ``"component"`` for all nodes together, by ``"neuron"`` for each channel of an MLP, otherwise for each node.
        """
        if by == "component":
            return [self.name], products.sum(-1)[..., None, :]
        if by == "neuron" and self.has_neurons:
            return [f"{self.name}.N{neuron}" for neuron in range(products.shape[-1])], products.mT
        return list(self.nodes), self.split(products).sum(-1).mT

    def outputs(self, hidden: Float[Tensor, "batch pos width"]) -> Float[Tensor, "node batch pos d_model"]:
        """What each node writes by itself, biases apart."""
        if len(self.nodes) == 1:
            return self.write.push(hidden[None])
        return self.write.push_groups(hidden, len(self.nodes))

    def read_of(self, node: int) -> Chain:
        """What one node reads, as a separate map: for a head, its values and its pattern only."""
        if len(self.nodes) == 1:
            return self.read
        if self.kind == "gate" or isinstance(self.read.stages[-1], Recorded):
            return self.read.of_group(node, len(self.nodes))
        return self.read.component(node)

    def pull_each(
        self, cotangents: Float[Tensor, "*rows batch pos node channel"], nodes: Sequence[int] | None = None
    ) -> Float[Tensor, "some *rows batch pos d_model"]:
        """A vector at each node's part of the hidden vector, pulled back through that node alone; of some nodes."""
        *before, last = self.read.stages
        chosen = range(len(self.nodes)) if nodes is None else nodes
        if isinstance(last, Recorded):
            return Chain(tuple(before)).pull(last.pull_groups(cotangents, chosen))
        return torch.stack([self.read_of(node).pull(cotangents[..., node, :]) for node in chosen])

    def among(self, within: Within) -> "Sublayer":
        """The same among all positions of an encoder–decoder, zero at those of the other side."""
        return replace(self, read=among_all(self.read, within), write=among_all(self.write, within))


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

    @cached_property
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


def among_all(m: Chain, within: Within) -> Chain:
    """A chain of one side's positions as one of all positions, zero at the others after every stage."""
    sides = (within.start, within.stop)
    stages: list[AffineMap] = []
    for stage in m.stages:
        if isinstance(stage, Attention):  # remains one, so that its pattern can be read
            stages.append(CrossAttention(stage.pattern, stage.kv_heads, sides, sides, within.length).square)
        else:
            stages.append(within(stage, only=True))
    return Chain(tuple(stages))
