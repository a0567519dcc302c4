"""The nodes of a contribution graph: heads and MLPs, whole or in parts, and the features of dictionaries.

A head is a sum over the tokens that it reads, an MLP a sum over its neurons. Both are split in the same way: at each
position, the parts with the largest contributions to the target become nodes, and all others together are one more
node, the rest. A *slot* holds one part at each position (the largest, the second largest, …), so that everything is a
matrix over positions, whichever parts are chosen.

Feature nodes decompose the stream at one place with a sparse dictionary:

    x = Σ active s·f_i·W_dec_i + s·b_dec + error (+ the mean that the dictionary subtracts)
    f_i = ⟨W_enc_i, n(x)⟩ + b_enc_i

With the active set and scales frozen, every part is affine in x, and the parts sum to x. So each becomes a node:
everything written before ends in these nodes, and they feed everything later. With g the target pulled back to x, and o
a source's output,

* feature i has the weight ⟨g, s·W_dec_i⟩·f_i; the edge from the source is ⟨g, s·W_dec_i⟩·⟨W_enc_i, n(o)⟩, and the
  feature's bias is ⟨g, s·W_dec_i⟩·b_enc_i;
* the mean of a dictionary that centres its input is linear in x, and receives ⟨g, mean(o)·1⟩ from the source;
* b_dec is a source;
* the error is the remainder: its edges are ⟨g, o⟩ minus all of the above, its bias is minus the others' constants.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.memory import slices
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.dictionary_features import Features
from tensorlens_tl.circuits.stream import Pulled, Stream, Sublayer, token_pairs
from tensorlens_tl.errors import InvalidInputError, SizeError

# ------------------------------------------------------------------ heads and MLPs

ROW_BYTES = 256 * 2**20
"""Bytes of hidden vectors with a single neuron each that are processed at once."""

MOST_NODES = 200_000
"""The most nodes that a graph may have."""


@dataclass(frozen=True)
class Choice:
    """Which parts become nodes.

    Attributes:
        name: the option that chose them, for messages.
        most: how many at each position.
        least: the smallest contribution that becomes a node.
    """

    name: str
    most: int
    least: float = 0.0

    @classmethod
    def of_largest(cls, name: str, value: int | float, largest: float) -> "Choice":
        """Choose a number of parts, or all that are at least a share of the largest."""
        if value >= 1:
            return cls(name, int(value))
        return cls(name, sys.maxsize, value * largest)

    def of(self, shares: Float[Tensor, "pos part"]) -> Int[Tensor, "slot pos"]:
        """Return the numbers of the chosen parts, largest first; −1 where a slot is empty at a position.

        Raises:
            SizeError: more than `MOST_NODES`.
        """
        sizes, chosen = shares.abs().topk(min(self.most, shares.shape[1]), dim=1)
        chosen = chosen.masked_fill((sizes < self.least) | (sizes == 0), -1).T
        chosen = chosen[(chosen >= 0).any(1)]
        if chosen.numel() > MOST_NODES:
            raise SizeError(
                f"contribution_graph: more than {MOST_NODES:,} nodes. Ask for fewer {self.name}=, shorten the prompt, "
                "or raise tensorlens_tl.circuits.graph_nodes.MOST_NODES."
            )
        return chosen


@dataclass(frozen=True, eq=False)
class Row:
    """One node at every position, or one part of a node.

    Attributes:
        name: the node's name; for a part, without its number, which differs by position.
        kind: such as head, mlp, feature or bias.
        layer: −1 for none.
        weights: its contributions to the target.
        biases: the part of the weight that is the node's bias.
        numbers: the parts' numbers, −1 where there is none; None if the node is whole.
        side: the positions that it can have, in an encoder–decoder those of one side; None for all.
    """

    name: str
    kind: str
    layer: int
    weights: Float[Tensor, "pos"]
    biases: Float[Tensor, "pos"]
    numbers: Int[Tensor, "pos"] | None = None
    side: tuple[int, int] | None = None

    @property
    def parts(self) -> Int[Tensor, "pos"]:
        """The parts' numbers, −1 where the node is whole."""
        if self.numbers is not None:
            return self.numbers
        return torch.full_like(self.weights, -1, dtype=torch.long)

    @property
    def exists(self) -> Bool[Tensor, "pos"]:
        """Whether there is a node at each position."""
        if self.numbers is not None:
            return self.numbers >= 0
        exists = torch.ones_like(self.weights, dtype=torch.bool)
        if self.side is None:
            return exists
        start, stop = self.side
        exists[:start] = False
        exists[stop:] = False
        return exists

    @property
    def names(self) -> list[str]:
        """The node's name at every position."""
        if self.numbers is None:
            return [self.name] * len(self.weights)
        return [f"{self.name}{part}" for part in self.numbers.tolist()]


@dataclass(frozen=True, eq=False)
class Node:
    """A head, MLP, expert or mixer at every position: its slots and, in the last row, the rest of it, or all of it.

    Attributes:
        name: the whole node's name, ``"L0H3"`` or ``"MLP0"``.
        kind: head, mixer or mlp.
        chosen: the neuron, or source position of a head, that each slot holds; −1 where it holds none.
        weights: each row's contribution to the target.
        biases: the part of the weight that is the node's bias.
        outputs: each row's output, without biases of the sublayer.
    """

    name: str
    kind: str
    chosen: Int[Tensor, "slot pos"]
    weights: Float[Tensor, "row pos"]
    biases: Float[Tensor, "row pos"]
    outputs: Float[Tensor, "row pos d_model"]

    def rows(self, layer: int, side: tuple[int, int] | None) -> list[Row]:
        """Return its slots, and the rest of it or all of it, at the positions of a side."""
        of = [(self.name, self.kind, None)]
        if len(self.chosen):
            name, kind = (f"{self.name}.N", "neuron") if self.kind == "mlp" else (f"{self.name}←", "head")
            of = [*((name, kind, numbers) for numbers in self.chosen), (f"{self.name}.rest", self.kind, None)]
        return [
            Row(name, kind, layer, weights, biases, numbers, side)
            for (name, kind, numbers), weights, biases in zip(of, self.weights, self.biases, strict=True)
        ]


def whole(
    sublayer: Sublayer, hidden: Float[Tensor, "1 pos width"], cotangent: Float[Tensor, "1 1 pos width"]
) -> list[Node]:
    """Return a sublayer's whole nodes; `cotangent` is the target pulled back to its hidden vector."""
    shares = cotangent[0, 0] * hidden[0]
    bias_shares = cotangent[0, 0] * _hidden_bias(sublayer)
    weights, biases = (sublayer.split(part).sum(-1).T for part in (shares, bias_shares))
    none = torch.zeros(0, hidden.shape[1], dtype=torch.long, device=hidden.device)
    kind = sublayer.node_kind
    rows = zip(sublayer.part_names, weights, biases, sublayer.outputs(hidden)[:, 0], strict=True)
    return [Node(name, kind, none, weight[None], bias[None], out[None]) for name, weight, bias, out in rows]


def neurons(
    sublayer: Sublayer, hidden: Float[Tensor, "1 pos width"], cotangent: Float[Tensor, "1 1 pos width"], choice: Choice
) -> list[Node]:
    """Split an MLP into its largest neurons at each position and the rest."""
    shares = upcast(cotangent[0, 0]) * hidden[0]
    chosen = choice.of(shares)
    bias_shares = cotangent[0, 0] * _hidden_bias(sublayer)
    weights, biases = (torch.cat([part.sum(-1) for part in rows_alone(part, chosen)]) for part in (shares, bias_shares))
    outputs = torch.cat([sublayer.write.push(row[:, None])[:, 0] for row in rows_alone(hidden[0], chosen)])
    return [Node(sublayer.name, "mlp", chosen, weights, biases, outputs)]


def rows_alone(
    values: Float[Tensor, "pos width"], chosen: Int[Tensor, "slot pos"]
) -> Iterator[Float[Tensor, "row pos width"]]:
    """Split a hidden vector into rows with one chosen neuron each, some at a time; the last row has all the others."""
    width = values.shape[1]
    size = max(1, ROW_BYTES // (values.numel() * values.element_size()))
    at = torch.where(chosen >= 0, chosen, width)  # empty slots write past the end, which is cut off
    for start in range(0, len(at), size):
        numbers = at[start : start + size]
        alone = values.new_zeros(len(numbers), values.shape[0], width + 1)
        held = torch.nn.functional.pad(values, (0, 1)).gather(1, numbers.T).T
        yield alone.scatter_(2, numbers[..., None], held[..., None])[..., :width]
    others = values.new_ones(values.shape[0], width + 1).scatter_(1, at.T, 0)[:, :width]
    yield (values * others)[None]


def sources(
    sublayer: Sublayer, x: Float[Tensor, "1 pos d_model"], cotangent: Float[Tensor, "1 1 pos width"], choice: Choice
) -> list[Node]:
    """Split each head at each query into the source tokens that contribute most and the rest; see `whole`."""
    pattern = sublayer.mixing.pattern[0]
    values = sublayer.values(x)[0]
    shares = token_pairs(sublayer, x, cotangent)[0, 0]
    bias_shares = token_pairs(sublayer, torch.zeros_like(x), cotangent)[0, 0]
    nodes = list[Node]()
    width = values.shape[-1]
    for head, name in enumerate(sublayer.part_names):
        chosen = choice.of(shares[head])
        at = chosen.clamp(min=0)
        filled = chosen >= 0
        number = row_of(chosen, shares.shape[-1])
        rest = number == len(chosen)
        weights, biases = (
            torch.cat([part.gather(1, at.T).T * filled, (part * rest).sum(1)[None]])
            for part in (shares[head], bias_shares[head])
        )
        moved = pattern[head].gather(1, at.T).T[..., None] * values[head][at] * filled[..., None]
        others = (pattern[head] * rest) @ values[head]
        hidden = values.new_zeros(len(chosen) + 1, *cotangent.shape[2:])
        hidden[..., head * width : (head + 1) * width] = torch.cat([moved, others[None]])
        nodes.append(Node(name, "head", chosen, weights, biases, sublayer.write.push(hidden[:, None])[:, 0]))
    return nodes


def row_of(chosen: Int[Tensor, "slot query"], keys: int) -> Int[Tensor, "query key"]:
    """Return the row of each source token of a head within its node: a slot, or the rest, which is the last."""
    rows = torch.full((chosen.shape[1], keys + 1), len(chosen), device=chosen.device)  # empty slots write past the end
    at = torch.where(chosen >= 0, chosen, keys).T
    return rows.scatter_(1, at, torch.arange(len(chosen), device=chosen.device).expand_as(at))[:, :keys]


def _hidden_bias(sublayer: Sublayer) -> Float[Tensor, "..."]:
    """Return the part of a sublayer's hidden vector that comes from its biases."""
    bias = sublayer.read.bias
    if bias.ndim < 3:
        return bias
    return bias[0]


# ------------------------------------------------------------------ features of dictionaries

if TYPE_CHECKING:
    Dictionaries = Features | list[Features] | tuple[Features, ...] | None
    """Features of dictionaries as a user passes them."""
else:
    Dictionaries = Any  # our errors say what is wrong


@dataclass(frozen=True, eq=False)
class FeatureSplit:
    """A dictionary's nodes at its place in the stream of one prompt.

    Attributes:
        features: the dictionary's features.
        layer: the block after or inside which it stands.
        prefix: the start of its nodes' names, if there are several dictionaries.
        cotangent: the target pulled back to the place.
        choice: which features become nodes, with one node for all others; None for all.
    """

    features: Features
    layer: int
    prefix: str
    cotangent: Float[Tensor, "pos d_model"]
    choice: Choice | None = None

    @cached_property
    def gains(self) -> Float[Tensor, "active"]:
        """The target's gain per unit of each active feature."""
        return self.features.gains(self.cotangent[None, None])[0].to(upcast(self.cotangent))

    @cached_property
    def weights(self) -> Float[Tensor, "active"]:
        """Each active feature's contribution to the target."""
        return self.gains * self.features.values

    @cached_property
    def chosen(self) -> Int[Tensor, "slot pos"]:
        """The active feature that each slot holds, by its row of ``features.index``; −1 where it holds none."""
        position = self.features.index[:, 1]
        counts = position.bincount(minlength=len(self.cotangent))
        active = torch.arange(len(position), device=position.device)
        # as wide as the position with the most active features
        table = position.new_full((len(self.cotangent), int(counts.max())), -1)
        table[position, active - (counts.cumsum(0) - counts)[position]] = active
        if self.choice is None:
            return table.T
        shares = torch.zeros_like(table, dtype=self.weights.dtype)
        shares[table >= 0] = self.weights
        slots = self.choice.of(shares)
        return table.T.gather(0, slots.clamp(min=0)).masked_fill(slots < 0, -1)

    def rows(self) -> list[Row]:
        """Return all nodes: features by slot, the others together, the mean, the error, and b_dec."""
        features = self.features
        name = f"{self.prefix}{{}}".format
        layer = self.layer
        filled = self.chosen >= 0
        at = self.chosen.clamp(min=0)
        position, feature = features.index[:, 1:].T
        encoder_biases = self.gains * features.dictionary.b_enc[feature]
        zero = self.weights.new_zeros(len(self.cotangent))
        rows = [
            Row(
                name("F"),
                "feature",
                layer,
                self.weights[row] * held,
                encoder_biases[row] * held,
                feature[row].masked_fill(~held, -1),
            )
            for row, held in zip(at, filled, strict=True)
        ]
        if self.choice is not None:
            others = self._others
            weights, biases = (
                zero.index_add(0, position[others], part[others]) for part in (self.weights, encoder_biases)
            )
            rows.append(Row(name("F.rest"), "feature", layer, weights, biases))
        g = upcast(self.cotangent)
        constant, *means = ((g * x[0]).sum(-1) for x in features.others.values())
        rows += [Row(name(of), "feature", layer, mean, zero) for of, mean in zip(self._means, means, strict=True)]
        biases = -zero.index_add(0, position, encoder_biases) - constant
        return [
            *rows,
            Row(name("error"), "error", layer, (g * features.error[0]).sum(-1), biases),
            Row(name("b_dec"), "bias", layer, constant, zero),
        ]

    def outputs(self) -> Float[Tensor, "row pos d_model"]:
        """Return the part of the stream that each node stands for."""
        features = self.features
        W_dec = features.dictionary.W_dec
        outputs = [self._spread(W_dec, features.values, part) for part in self._slots()]
        if self.choice is not None:
            outputs.append(self._summed(W_dec, features.values)[None])
        scaled = [features.writer.push(part[:, None])[:, 0] for part in outputs]
        b_dec, *means = features.others.values()
        return torch.cat([*scaled, *means, features.error, b_dec])

    def reads(self) -> Iterator[Float[Tensor, "row pos d_model"]]:
        """Yield the vectors by which each node reads what was written before; b_dec reads nothing."""
        features = self.features
        W_enc = features.dictionary.W_enc.T
        left = self.cotangent
        for part in self._slots():
            pulled = features.reader.pull(self._spread(W_enc, self.gains, part)[:, None])[:, 0]
            left = left - pulled.sum(0)
            yield pulled
        if self.choice is not None:
            pulled = features.reader.pull(self._summed(W_enc, self.gains)[None])
            left = left - pulled[0]
            yield pulled
        for _ in self._means:
            pulled = (self.cotangent.mean(-1, keepdim=True) * features.frozen.mask[0, :, None]).expand_as(
                self.cotangent
            )
            left = left - pulled
            yield pulled[None]
        yield left[None]

    @property
    def _means(self) -> list[str]:
        """The names of the means that a centring dictionary adds back."""
        return list(self.features.others)[1:]

    def _slots(self) -> Iterator[Int[Tensor, "some pos"]]:
        size = max(1, ROW_BYTES // (self.cotangent.numel() * self.cotangent.element_size()))
        return (self.chosen[start : start + size] for start in range(0, len(self.chosen), size))

    @cached_property
    def _others(self) -> Int[Tensor, "other"]:
        """The active features that are in no slot."""
        alone = torch.ones_like(self.features.values, dtype=torch.bool)
        alone[self.chosen[self.chosen >= 0]] = False
        return alone.nonzero()[:, 0]

    def _spread(
        self, vectors: Float[Tensor, "feature d"], factors: Float[Tensor, "active"], part: Int[Tensor, "slot pos"]
    ) -> Float[Tensor, "slot pos d"]:
        """Return the vector of the feature in each slot, times its factor; zero for an empty slot."""
        at = part.clamp(min=0)
        return vectors[self.features.index[:, 2][at]] * (factors[at] * (part >= 0)).to(vectors)[..., None]

    def _summed(self, vectors: Float[Tensor, "feature d"], factors: Float[Tensor, "active"]) -> Float[Tensor, "pos d"]:
        """Sum the vectors of the features in no slot at each position, times their factors."""
        position, feature = self.features.index[:, 1:].T
        sums = upcast(vectors.new_zeros(len(self.cotangent), vectors.shape[1]))
        for part in slices(len(self._others), 3 * vectors.shape[1] * sums.element_size(), None, "features"):
            at = self._others[part]
            sums.index_add_(0, position[at], upcast(vectors[feature[at]]) * factors[at, None])
        return sums.to(vectors)


def feature_splits(dictionaries: Any, stream: Stream, pulled: Pulled) -> dict[int, FeatureSplit]:
    """Return each dictionary's nodes, keyed by the number of the step before which it stands.

    Raises:
        InvalidInputError: not a `Features` object or one of another pass, a transcoder, two dictionaries at one place,
            or one outside the stream's layers.
    """
    given = dictionaries
    if dictionaries is None:
        given = []
    elif isinstance(dictionaries, Features):
        given = [dictionaries]
    if not isinstance(given, (list, tuple)):
        raise _not_features(given)
    splits: dict[int, FeatureSplit] = {}
    for features in given:
        if not isinstance(features, Features):
            raise _not_features(features)
        number = _step_before(features, stream)
        if number in splits:
            raise InvalidInputError(
                f"contribution_graph: dictionaries= has two at one place, {splits[number].features.hook} and "
                f"{features.hook}. Only one dictionary can stand at a place; make a graph with each."
            )
        at = features.writes.place
        layer = at.layer
        prefix = f"L{layer}.{at.step}."
        if at.step == 0 and layer > 0:  # it follows the block before
            layer -= 1
            prefix = f"L{layer}."
        if len(given) == 1:
            prefix = ""
        splits[number] = FeatureSplit(features, layer, prefix, pulled.stream[number][0, 0])
    return splits


def _step_before(features: Features, stream: Stream) -> int:
    """Return the number of the step before which a dictionary stands."""
    name = features.dictionary.name
    if features.frozen is not stream.frozen:
        raise InvalidInputError(
            f"contribution_graph: the features of {name} at {features.hook} are of another pass. Compute "
            "them with circuits.features(frozen, dictionary) from the same pass as the graph."
        )
    if features.dictionary.transcodes:
        raise InvalidInputError(
            f"contribution_graph: {name} is a transcoder, from {features.hook} to {features.hook_out}; only "
            "dictionaries that reconstruct the residual stream become nodes. Use feature_effects for what its features "
            "do and feature_attribution for what makes them; neurons= splits the MLP itself."
        )
    at = features.writes.place
    if at.layer not in stream.layers and (at.layer, at.step) != (stream.layers.stop, 0):
        raise InvalidInputError(
            f"contribution_graph: the features at {features.hook} are outside layers= {stream.layers.start} to "
            f"{stream.layers.stop - 1}. Leave out this dictionary, or choose layers that contain its place."
        )
    return stream.step_at(at.layer, at.step)


def _not_features(given: Any) -> InvalidInputError:
    return InvalidInputError(
        f"contribution_graph: dictionaries= takes features of this pass, got {type(given).__name__}: make them with "
        "circuits.features(frozen, dictionary)."
    )
