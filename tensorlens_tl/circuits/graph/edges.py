"""The edges of a contribution graph: what enters each node from every source before it, and which of it is large."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.circuits.graph.nodes import Node, row_of, rows_alone
from tensorlens_tl.circuits.stream import Sublayer
from tensorlens_tl.errors import SizeError

EDGE_BYTES = 256 * 2**20
"""Bytes of edge weights that are looked at at once."""


class Carried(NamedTuple):
    """What the stream carries before a step.

    Attributes:
        outputs: what each source so far has written, carried to the stream there.
        rows: their rows.
    """

    outputs: Float[Tensor, "source pos d_model"]
    rows: Int[Tensor, "source"]

    @property
    def positions(self) -> Int[Tensor, "pos"]:
        """0, 1, 2, …"""
        return torch.arange(self.outputs.shape[1], device=self.outputs.device)

    @property
    def numbers(self) -> Int[Tensor, "source pos"]:
        """The sources' numbers at every position."""
        return self.rows[:, None] * self.outputs.shape[1] + self.positions


@dataclass(eq=False)
class Edges:
    """The edges that are large beside the largest, and the size of all that enter each node.

    Nodes have numbers: row · positions + position.

    Attributes:
        threshold: the share of the largest edge below which edges are left out.
        most: how many there may be.
        selection: nodes between which edges are kept, by their numbers, the target last; None for all. Of other
            heads' edges nothing is computed.
        entering: Σ abs of all edges into nodes, `[row, pos]`, by the first of the rows.
        tables: sources, targets and weights of the edges so far.
        largest: the size of the largest edge so far.
        count: how many edges the tables hold.
    """

    reads_sources: ClassVar = True

    threshold: float
    most: int
    selection: Bool[Tensor, "node"] | None = None
    entering: dict[int, Tensor] = field(default_factory=dict)
    tables: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    largest: float = 0.0
    count: int = 0

    def into_positionwise(
        self,
        sublayer: Sublayer,
        nodes: list[Node],
        first: int,
        cotangent: Float[Tensor, "1 1 pos width"],
        carried: Carried,
    ) -> None:
        """Edges into an MLP, its neurons or its experts: what was written at a position stays there.

        Args:
            sublayer: what the nodes belong to.
            nodes: its nodes.
            first: the first one's row.
            cotangent: what the target becomes at the hidden vector, pulled back.
            carried: the sources.
        """
        parts = sublayer.split(cotangent[0, 0])
        reads = [sublayer.read_of(number) for number in range(len(nodes))]
        if not any(len(node.chosen) for node in nodes):
            alone = parts.unbind(1)
            pulled = [read.pull(part[None, None])[:, 0] for read, part in zip(reads, alone, strict=True)]
            self.into_rows(first, torch.cat(pulled), carried)
            return
        for number, (node, read) in enumerate(zip(nodes, reads, strict=True)):
            for alone in rows_alone(parts[:, number], node.chosen):
                self.into_rows(first, read.pull(alone[:, None])[:, 0], carried)
                first += len(alone)

    def into_rows(self, first: int, reads: Float[Tensor, "row pos d_model"], carried: Carried) -> None:
        """Edges into nodes that take what was written at their position.

        Args:
            first: the first one's row.
            reads: the target, pulled through each node to the stream.
            carried: the sources.
        """
        outputs = carried.outputs
        pos = outputs.shape[1]
        at = carried.positions
        if self.selection is not None:
            at = at[self.selection[first * pos :][: len(reads) * pos].view(-1, pos).any(0)]
            reads = reads[:, at]
            outputs = outputs[:, at]
        for part in reads.split(_at_once(max(outputs[..., 0].numel(), 1), outputs)):
            weights = _products(part, outputs).permute(1, 2, 0)
            self.entering[first] = part.new_zeros(len(part), pos)
            self.entering[first][:, at] = weights.abs().sum(1)
            rows = first + torch.arange(len(part), device=outputs.device)
            self.add(carried.numbers[:, at], rows[:, None, None] * pos + at, weights)
            first += len(part)

    def into_heads(
        self,
        sublayer: Sublayer,
        nodes: list[Node],
        first: int,
        cotangent: Float[Tensor, "1 1 pos width"],
        carried: Carried,
    ) -> None:
        """Edges into heads, from every position that they read; arguments as in `into_positionwise`.

        The fewer vectors are multiplied: the target pulled through each head at each query to what it reads, or the
        values of all sources. Causal heads read from half of all pairs.
        """
        whole = not any(len(node.chosen) for node in nodes)
        width = cotangent.shape[-1] // len(nodes) * sublayer.mixing.kv_heads
        few = len(nodes) * carried.outputs.shape[1] <= 2 * width
        if whole and (few or self.selection is not None):
            reads = [sublayer.read_of(number) for number in range(len(nodes))]
            self.into_mixing(first, reads, sublayer.split(cotangent[0, 0]).unbind(-2), carried)
            return
        outputs = carried.outputs
        pos = outputs.shape[1]
        at = carried.positions
        mixing = sublayer.mixing
        pattern = mixing.pattern[0]
        read = Chain(sublayer.read.stages[:-1])
        values = rearrange(read.push(outputs[:, None])[:, 0], "m k (kv d) -> kv m k d", kv=mixing.kv_heads)
        head_cotangents = sublayer.split(cotangent[0, 0])
        at_once = _at_once(pos * pos, outputs)
        for head, node in enumerate(nodes):
            rows = first + row_of(node.chosen, pos)  # which row a source token's share goes to, [query, key]
            ends = rows * pos + at[:, None]
            entering = torch.zeros(len(node.weights), pos).to(outputs)
            head_values = values[head // (len(nodes) // mixing.kv_heads)]
            for start in range(0, len(outputs), at_once):
                part = slice(start, start + at_once)
                # [source, query, key]
                weights = pattern[head] * (head_cotangents[:, head] @ head_values[part].mT)
                entering.T.scatter_add_(1, rows - first, weights.abs().sum(0).to(entering))
                self.add(carried.numbers[part, None], ends, weights)
            self.entering[first] = entering
            first += len(entering)

    def into_mixing(
        self,
        first: int,
        reads: Sequence[AffineMap],
        cotangents: Sequence[Float[Tensor, "pos _width"]],
        carried: Carried,
    ) -> None:
        """Edges from every position into whole nodes that mix positions, all nodes of a sublayer in one product.

        Args:
            first: the first one's row.
            reads: what each of them reads.
            cotangents: what the target becomes at each, pulled back.
            carried: the sources.
        """
        outputs = carried.outputs
        pos = outputs.shape[1]
        at = carried.positions
        wanted = torch.ones(len(reads), pos, dtype=torch.bool, device=outputs.device)
        if self.selection is not None:
            wanted = self.selection[first * pos :][: len(reads) * pos].view(-1, pos)
        self.entering[first] = torch.zeros(len(reads), pos).to(outputs)
        nodes = wanted.any(1).nonzero()[:, 0]
        queries = at[wanted.any(0)]
        if not len(nodes):
            return
        width = max(cotangent.shape[1] for cotangent in cotangents)
        at_once = _at_once((len(outputs) + 3 * width) * pos, outputs)
        together = max(1, at_once // len(queries))
        for some in nodes.split(together):
            for part in queries.split(at_once):
                rows: list[Tensor] = []
                for node in some.tolist():
                    vectors = cotangents[node][part] * wanted[node, part, None]
                    alone = place(vectors[:, None], part[:, None], cotangents[node][None])
                    rows.append(reads[node].pull(alone)[:, 0])
                # [node, source, query, key]
                weights = _mixed_products(torch.cat(rows), outputs).unflatten(0, (len(some), -1)).transpose(1, 2)
                self.entering[first][some[:, None], part] = weights.abs().sum((1, 3))
                ends = (first + some[:, None]) * pos + part
                self.add(carried.numbers[:, None], ends[:, None, :, None], weights)

    def add(self, source: Tensor, target: Tensor, weights: Tensor) -> None:
        """Add the edges that are large enough; numbers of nodes broadcast to `weights`."""
        if not weights.numel():
            return
        sizes = weights.abs()
        if self.selection is not None:
            sizes = sizes * (self.selection[source] & self.selection[target])
        self.largest = max(self.largest, float(sizes.max()))
        least = self.threshold * self.largest
        large = (sizes >= least if least > 0 else sizes > 0).nonzero(as_tuple=True)
        self.tables.append((source.expand_as(weights)[large], target.expand_as(weights)[large], weights[large]))
        self.count += len(self.tables[-1][2])
        if self.count > 4 * self.most:
            self._leave_small()  # the largest edge may come late, and with it what the threshold means
            self._check_count(4 * self.most)

    def table(self) -> tuple[Int[Tensor, "edge"], Int[Tensor, "edge"], Float[Tensor, "edge"]]:
        """Sources, targets and weights of the edges that are large enough.

        Raises:
            SizeError: they are more than `most`.
        """
        self._leave_small()
        self._check_count(self.most)
        source, target, weight = self.tables[0]
        return source.cpu(), target.cpu(), upcast(weight).cpu()

    def _check_count(self, most: int) -> None:
        if self.count > most:
            raise SizeError(
                f"contribution_graph: more than {most:,} edges are at least {self.threshold:g} of the largest "
                f"so far. Raise threshold={self.threshold:g}, shorten the prompt, or raise "
                "tensorlens_tl.circuits.graph.graph.MOST_EDGES."
            )

    def _leave_small(self) -> None:
        source, target, weights = (torch.cat(column) for column in zip(*self.tables, strict=True))
        large = weights.abs() >= self.threshold * self.largest
        self.tables = [(source[large], target[large], weights[large])]
        self.count = len(self.tables[0][2])


class NoEdges(Edges):
    """No edges: for a walk that only weighs the nodes, and need not carry what they write."""

    reads_sources: ClassVar = False

    def into_positionwise(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    into_rows = into_heads = into_mixing = add = into_positionwise


def _products(
    reads: Float[Tensor, "row pos d_model"], outputs: Float[Tensor, "source pos d_model"]
) -> Float[Tensor, "pos row source"]:
    """Of every read and every output at a position; where an einsum would copy all outputs for each node."""
    return reads.transpose(0, 1) @ outputs.permute(1, 2, 0)


def _mixed_products(
    reads: Float[Tensor, "row pos d_model"], outputs: Float[Tensor, "source pos d_model"]
) -> Float[Tensor, "row source pos"]:
    """Of every read and every output at each position; of reads that are zero there, as after a query, none."""
    products = reads.new_zeros(reads.shape[1], len(reads), len(outputs))
    live = reads.any(-1).T
    for position, rows in enumerate(live):
        products[position, rows] = reads[rows, position] @ outputs[:, position].T
    return products.permute(1, 2, 0)


def _at_once(numbers: int, like: Tensor) -> int:
    """How many rows of so many numbers are looked at at once."""
    return max(1, EDGE_BYTES // (numbers * like.element_size()))
