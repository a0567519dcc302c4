"""The edges of a contribution graph: what enters each node from every source before it, and which of it is kept."""

from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, AnyAttention, Chain
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.circuits.graph.nodes import Node, row_of, rows_alone
from tensorlens_tl.circuits.stream import Sublayer
from tensorlens_tl.errors import SizeError

EDGE_BYTES = 256 * 2**20
"""Bytes of edge weights that are looked at at once."""


@dataclass(eq=False)
class Edges:
    """The edges that are large beside the largest, and the size of all that enter each node.

    Nodes have numbers: row · positions + position.

    Attributes:
        threshold: the share of the largest edge below which edges are left out.
        most: how many may be kept.
        entering: Σ abs of all edges into nodes, `[row, pos]`, by the first of the rows.
    """

    threshold: float
    most: int
    entering: dict[int, Tensor] = field(default_factory=dict)
    tables: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    largest: float = 0.0

    def into_positionwise(
        self,
        sublayer: Sublayer,
        nodes: list[Node],
        first: int,
        cotangent: Float[Tensor, "1 1 pos width"],
        outputs: Float[Tensor, "source pos d_model"],
        carried: Int[Tensor, "source"],
    ) -> None:
        """Edges into an MLP, its neurons or its experts: what was written at a position stays there.

        Args:
            sublayer: what the nodes belong to.
            nodes: its nodes.
            first: the first one's row.
            cotangent: what the target becomes at the hidden vector, pulled back.
            outputs: what each source so far has written, carried to what the sublayer reads.
            carried: their rows.
        """
        parts = sublayer.split(cotangent[0, 0])
        for number, node in enumerate(nodes):
            read = sublayer.read_of(number)
            for alone in rows_alone(parts[:, number], node.chosen):
                self.into_rows(first, read.pull(alone[:, None])[:, 0], outputs, carried)
                first += len(alone)

    def into_rows(
        self,
        first: int,
        reads: Float[Tensor, "row pos d_model"],
        outputs: Float[Tensor, "source pos d_model"],
        carried: Int[Tensor, "source"],
    ) -> None:
        """Edges into nodes that take what was written at their own position.

        Args:
            first: the first one's row.
            reads: the target, pulled through each node to the stream.
            outputs, carried: as in `into_positionwise`.
        """
        pos = outputs.shape[1]
        at = torch.arange(pos, device=outputs.device)
        for part in reads.split(self._at_once(outputs)):
            weights = torch.einsum("rpd,mpd->rmp", part, outputs)
            self.entering[first] = weights.abs().sum(1)
            rows = first + torch.arange(len(part), device=at.device)
            self.keep(carried[:, None] * pos + at, rows[:, None, None] * pos + at, weights)
            first += len(part)

    def _at_once(self, outputs: Float[Tensor, "source pos d_model"]) -> int:
        """Rows whose edges are looked at at once."""
        return max(1, EDGE_BYTES // (outputs[..., 0].numel() * outputs.element_size()))

    def into_heads(
        self,
        sublayer: Sublayer,
        nodes: list[Node],
        first: int,
        cotangent: Float[Tensor, "1 1 pos width"],
        outputs: Float[Tensor, "source pos d_model"],
        carried: Int[Tensor, "source"],
    ) -> None:
        """Edges into heads, from every position that they read; arguments as in `into_positionwise`."""
        *before, mix = sublayer.read.stages
        assert isinstance(mix, AnyAttention)
        pos = outputs.shape[1]
        at = torch.arange(pos, device=outputs.device)
        values = rearrange(Chain(tuple(before)).push(outputs[:, None])[:, 0], "m k (kv d) -> kv m k d", kv=mix.kv_heads)
        head_cotangents = sublayer.split(cotangent[0, 0])
        pattern = mix.pattern
        chunk = max(1, EDGE_BYTES // (pos * pos * outputs.element_size()))
        for head, node in enumerate(nodes):
            rows = first + row_of(node.chosen, pos)  # which row a source token's share goes to, [query, key]
            ends = rows * pos + at[:, None]
            entering = torch.zeros(len(node.weights), pos).to(outputs)
            head_values = values[head // (len(nodes) // mix.kv_heads)]
            for start in range(0, len(outputs), chunk):
                weights = pattern[0, head] * (
                    head_cotangents[:, head] @ head_values[start : start + chunk].mT
                )  # [source, query, key]
                entering.T.scatter_add_(1, rows - first, weights.abs().sum(0).to(entering))
                source = carried[start : start + len(weights)] * pos
                self.keep(source[:, None, None] + at, ends, weights)
            self.entering[first] = entering
            first += len(entering)

    def into_mixing(
        self,
        row: int,
        m: AffineMap,
        cotangent: Float[Tensor, "pos width"],
        outputs: Float[Tensor, "source pos d_model"],
        carried: Int[Tensor, "source"],
    ) -> None:
        """Edges from every position into what mixes positions without a pattern, a few queries at a time."""
        pos, width = cotangent.shape
        self.entering[row] = torch.zeros(1, pos).to(outputs)
        at = torch.arange(pos, device=cotangent.device)
        chunk = max(1, EDGE_BYTES // ((len(outputs) + 3 * width) * pos * outputs.element_size()))
        for start in range(0, pos, chunk):
            queries = at[start : start + chunk]
            rows = place(cotangent[queries][:, None], queries[:, None], cotangent[None])
            weights = torch.einsum("qkd,mkd->mqk", m.pull(rows)[:, 0], outputs)
            self.entering[row][0, queries] = weights.abs().sum((0, 2))
            self.keep(carried[:, None, None] * pos + at, row * pos + queries[:, None], weights)

    def keep(self, source: Tensor, target: Tensor, weights: Tensor) -> None:
        """Note the edges that are worth it; numbers of nodes broadcast to `weights`."""
        sizes = weights.abs()
        self.largest = max(self.largest, float(sizes.max()))
        large = (sizes >= self.threshold * self.largest) & (sizes > 0)
        self.tables.append((source.expand_as(weights)[large], target.expand_as(weights)[large], weights[large]))
        if sum(len(edge[2]) for edge in self.tables) > 4 * self.most:
            self._leave_small()  # the largest edge may come late, and with it what the threshold means
            self._check_count(4 * self.most)

    def table(self) -> tuple[Int[Tensor, "edge"], Int[Tensor, "edge"], Float[Tensor, "edge"]]:
        """Sources, targets and weights of the edges that are kept.

        Raises:
            SizeError: they are more than `most`.
        """
        self._leave_small()
        self._check_count(self.most)
        source, target, weight = self.tables[0]
        return source.cpu(), target.cpu(), upcast(weight).cpu()

    def _check_count(self, most: int) -> None:
        if sum(len(edge[2]) for edge in self.tables) > most:
            raise SizeError(
                f"contribution_graph: more than {most:,} edges are at least {self.threshold:g} of the largest "
                f"so far. Raise threshold={self.threshold:g}, shorten the prompt, or raise "
                "tensorlens_tl.circuits.graph.graph.MOST_EDGES."
            )

    def _leave_small(self) -> None:
        source, target, weights = (torch.cat(column) for column in zip(*self.tables, strict=True))
        large = weights.abs() >= self.threshold * self.largest
        self.tables = [(source[large], target[large], weights[large])]
