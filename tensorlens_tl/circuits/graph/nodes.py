"""The nodes of a sublayer: whole heads and MLPs, or their largest parts at each position and one node for the rest.

A head is a sum over the tokens that it reads, an MLP a sum over its neurons. Both are split in the same way: at each
position the parts with the largest contributions to the target become nodes, and what the others give together is one
node more, the rest. A *slot* holds one part at each position (the largest, the second largest, …), so that everything
is a matrix over positions whichever parts are chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.stream import Sublayer, token_pairs
from tensorlens_tl.errors import SizeError

ROW_BYTES = 256 * 2**20
"""Bytes of hidden vectors that hold one neuron each and are worked on at once."""

MOST_NODES = 200_000
"""Nodes a graph may have."""


@dataclass(frozen=True)
class Choice:
    """Which parts become nodes.

    Attributes:
        name: what they are, for messages.
        room: how many nodes there may be of one head or MLP.
        most: how many at each position.
        least: the smallest contribution that is one.
    """

    name: str
    room: int
    most: int
    least: float = 0.0

    def of(self, shares: Float[Tensor, "pos part"]) -> Int[Tensor, "slot pos"]:
        """The numbers of the chosen parts, largest first; −1 where a slot is empty at a position.

        Raises:
            SizeError: more than there is room for.
        """
        sizes, chosen = shares.abs().topk(min(self.most, shares.shape[1]), dim=1)
        chosen = chosen.masked_fill((sizes < self.least) | (sizes == 0), -1).T
        chosen = chosen[(chosen >= 0).any(1)]
        if chosen.numel() > self.room:
            raise SizeError(
                f"contribution_graph: more than {self.room:,} nodes. Ask for fewer {self.name}=, shorten the prompt, "
                "or raise tensorlens_tl.circuits.graph.nodes.MOST_NODES."
            )
        return chosen


@dataclass(frozen=True, eq=False)
class Node:
    """A head, MLP, expert or mixer at every position: its slots, and in the last row the rest of it, or all of it.

    Attributes:
        name: of all of it, ``"L0H3"`` or ``"MLP0"``.
        kind: head, mixer or mlp.
        chosen: which neuron, or which source position of a head, each slot holds; −1 where it holds none.
        weights: what each row contributes to the target.
        biases: the part of the weight that is the bias of the node.
        outputs: what each row writes, biases of the sublayer apart.
    """

    name: str
    kind: str
    chosen: Int[Tensor, "slot pos"]
    weights: Float[Tensor, "row pos"]
    biases: Float[Tensor, "row pos"]
    outputs: Float[Tensor, "row pos d_model"]

    @property
    def rows(self) -> list[tuple[str, str, Int[Tensor, "pos"] | None]]:
        """Name, kind and part numbers of each row; a slot's name lacks the part's number, which differs by position."""
        if not len(self.chosen):
            return [(self.name, self.kind, None)]
        name, kind = (f"{self.name}←", "head")
        if self.kind == "mlp":
            name, kind = (f"{self.name}.N", "neuron")
        return [*((name, kind, numbers) for numbers in self.chosen), (f"{self.name}.rest", self.kind, None)]


def whole(
    sublayer: Sublayer, hidden: Float[Tensor, "1 pos width"], cotangent: Float[Tensor, "1 1 pos width"]
) -> list[Node]:
    """The sublayer's nodes as they are.

    Args:
        sublayer: what reads the stream and writes to it.
        hidden: its hidden vector.
        cotangent: what the target becomes there, pulled back.
    """
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
    """An MLP's largest neurons at each position, and the rest of it."""
    shares = upcast(cotangent[0, 0]) * hidden[0]
    chosen = choice.of(shares)
    bias_shares = cotangent[0, 0] * _hidden_bias(sublayer)
    weights, biases = (torch.cat([part.sum(-1) for part in rows_alone(part, chosen)]) for part in (shares, bias_shares))
    outputs = torch.cat([sublayer.write.push(row[:, None])[:, 0] for row in rows_alone(hidden[0], chosen)])
    return [Node(sublayer.name, "mlp", chosen, weights, biases, outputs)]


def rows_alone(
    values: Float[Tensor, "pos width"], chosen: Int[Tensor, "slot pos"]
) -> Iterator[Float[Tensor, "row pos width"]]:
    """A hidden vector taken apart: rows with one chosen neuron each, some at a time; the last holds all the others."""
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
    """What each head moves to each query from the tokens that give most, and from all others together.

    Args:
        sublayer: heads.
        x: what it reads.
        cotangent: what the target becomes at its hidden vector, pulled back.
        choice: which tokens become nodes.
    """
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
    """The row of its node that each source token of a head belongs to: a slot, or the rest, which is the last."""
    rows = torch.full((chosen.shape[1], keys + 1), len(chosen), device=chosen.device)  # empty slots write past the end
    at = torch.where(chosen >= 0, chosen, keys).T
    return rows.scatter_(1, at, torch.arange(len(chosen), device=chosen.device).expand_as(at))[:, :keys]


def _hidden_bias(sublayer: Sublayer) -> Float[Tensor, "..."]:
    """The part of a sublayer's hidden vector that its biases give."""
    bias = sublayer.read.bias
    if bias.ndim < 3:
        return bias
    return bias[0]
