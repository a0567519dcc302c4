"""The contribution graph: how a logit is composed, node by node and position by position.

Nodes are the token and position embeddings, every head, every MLP, every bias, and the target, each at each position.
A node's *weight* is its contribution to the target through everything later: its output dotted with the target pulled
back to it through the whole frozen model. The *edge* from a source to a node is the share of that contribution which
entered the node through the source: pull the target back to the node's output, through the node alone to the residual
stream, and dot with the source's output there. So

* a node's incoming edges and its bias sum to its weight;
* embeddings and biases (both source nodes and the biases of nodes) sum to the logit.

An edge into a head starts at the source's position, and so shows which token was read; an edge out of a head mixes all
that the head has read. ``sources=k`` splits each head at each query into a node for each of the k source tokens with
the largest contributions, ``L0H3←5``, and one for all others, ``L0H3.rest``: an edge out of such a node belongs to one
head and one source token. ``neurons=k`` splits each MLP at each position into its k largest neurons, ``MLP0.N17``, and
the rest, ``MLP0.rest``. A node's parts sum to it, edge by edge, so both sums above hold for the parts as well.

``dictionaries`` splits the stream where a sparse autoencoder stands: everything written before ends in its active
features, ``F12``, its reconstruction error, and b_dec, and these feed everything later. ``features=k`` makes nodes of
the k largest features at each position, and one node, ``F.rest``, of the others. With several dictionaries, node names
begin with the block after which each stands, ``L0.F12``, or, inside a block, with the block and the number of its steps
that come before, ``L0.1.F12``. Both sums hold as before, and a feature's weight is its score in `feature_effects`.

Nothing is trained and nothing is approximated: attention patterns, activation ratios and norm scales are frozen. In a
post-LN model a source's output passes the norms of the residual stream before it enters a node. Whitening passes
vectors on from position to position, so it is one node, which receives everything written before it. A mixer in place
of attention (a state-space layer, a convolution) is one node with edges from every earlier position.

An encoder–decoder is one stream, the encoder's positions and then the decoder's, and every node has only the positions
of its side. A head of cross-attention, ``L2.cross.H0``, is at the decoder's positions; the edges into it come from the
encoder's, through the norm after its last block and the head's values.

In a difference of two runs (`tensorlens_tl.passes.difference`), weights and edges are parts of the target's change, and
nothing is frozen. Every head is then three nodes: ``L0H3.v``, the effect of its changed values, and ``L0H3.q`` and
``L0H3.k``, the effects of its changed queries and keys on where it attends. An edge from one head to another's ``.k``
says that the first directs the second's attention.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Number, checked_names, formerly, plain, real_number, whole_number
from tensorlens_tl.algebra import ZERO, Chain
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.circuits import graph_nodes
from tensorlens_tl.circuits.arguments import Direction, RuleLike, Share
from tensorlens_tl.circuits.graph_nodes import (
    Choice,
    Dictionaries,
    FeatureSplit,
    Node,
    Row,
    feature_splits,
    row_of,
    rows_alone,
)
from tensorlens_tl.circuits.ruled import target_under
from tensorlens_tl.circuits.stream import Pulled, Step, Stream, StreamTarget, Sublayer, stream_target, token_pairs
from tensorlens_tl.core import recordable
from tensorlens_tl.errors import InvalidInputError, SizeError
from tensorlens_tl.models import ONCE_ACTIVATION, LayerRange, Query, TokenLike
from tensorlens_tl.passes import Difference, PassOrDifference, one_question
from tensorlens_tl.passes.target import target_ids
from tensorlens_tl.registry import frozen_rule, is_of_run
from tensorlens_tl.results import ContributionGraph

# ------------------------------------------------------------------ edges

PullEach = Callable[[Float[Tensor, "*rows 1 pos node channel"], Sequence[int]], Float[Tensor, "some *rows 1 pos d"]]
"""Pulls vectors at some nodes of a sublayer back through each of these nodes alone."""

EDGE_BYTES = 256 * 2**20
"""Bytes of edge weights that are computed at once."""


class Carried(NamedTuple):
    """The contents of the stream before a step.

    Attributes:
        outputs: each earlier source's output, carried to the stream there.
        rows: the sources' rows.
    """

    outputs: Float[Tensor, "source pos d_model"]
    rows: Int[Tensor, "source"]

    @property
    def positions(self) -> Int[Tensor, "pos"]:
        """0, 1, 2, …"""
        return torch.arange(self.outputs.shape[1], device=self.outputs.device)

    @property
    def numbers(self) -> Int[Tensor, "source pos"]:
        """The sources' node numbers at every position."""
        return self.rows[:, None] * self.outputs.shape[1] + self.positions


@dataclass(eq=False)
class Edges:
    """The edges that are large relative to the largest, and the total size of all edges into each node.

    Nodes are numbered as row · positions + position.

    Attributes:
        threshold: the share of the largest edge below which edges are dropped.
        most: the largest allowed number of edges.
        selection: nodes between which edges are kept, by number, the target last; None for all. Edges of other heads
            are not computed.
        rest: what enters the selected nodes, in their order, from all others, by row; None without a selection.
        entering: Σ abs of all edges into nodes, `[row, pos]`, keyed by the first of the rows.
        tables: sources, targets and weights of the edges so far.
        largest: the size of the largest edge so far.
        count: the number of edges in the tables.
        carries: whether nodes' outputs are carried on to the target.
        covered: the target's number if every edge into it is kept, however small; None where `threshold` decides.
    """

    threshold: float
    most: int
    selection: Bool[Tensor, "node"] | None = None
    rest: Float[Tensor, "row selected"] | None = None
    carries: bool = True
    covered: int | None = None
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
        """Add edges into an MLP, its neurons or its experts, which read only their own position.

        The first node's row is `first`; `cotangent` is the target pulled back to the hidden vector.
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
        """Add edges into nodes that read only their own position; `reads` is the target pulled through each."""
        outputs = carried.outputs
        pos = outputs.shape[1]
        at = carried.positions
        if self.selection is not None:
            at = at[self.selection[first * pos :][: len(reads) * pos].view(-1, pos).any(0)]
            reads = reads[:, at]
            outputs = outputs[:, at]
        for part in reads.split(_at_once(max(outputs[..., 0].numel(), 1), outputs)):
            # by position, where an einsum would copy all outputs for each node
            weights = (part.transpose(0, 1) @ outputs.permute(1, 2, 0)).permute(1, 2, 0)
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
        """Add edges into heads, from every position that they read; arguments as in `into_positionwise`.

        The smaller set of vectors is multiplied: the target pulled through each head and query, or the values of all
        sources. Causal heads read from half of all pairs.
        """
        whole = not any(len(node.chosen) for node in nodes)
        width = cotangent.shape[-1] // len(nodes) * sublayer.mixing.kv_heads
        few = len(nodes) * carried.outputs.shape[1] <= 2 * width
        if whole and (few or self.selection is not None):
            self.into_mixing(first, sublayer.pull_each, sublayer.split(cotangent[0, 0]), carried)
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
        pull_each: PullEach,
        cotangents: Float[Tensor, "pos node channel"],
        carried: Carried,
    ) -> None:
        """Add edges from every position into whole nodes that mix positions, all nodes of a sublayer in one product.

        `first` is the first node's row, `pull_each` is `Sublayer.pull_each`, and `cotangents` are the target's vectors
        at each node.
        """
        outputs = carried.outputs
        pos, count, width = cotangents.shape
        at = carried.positions
        wanted = torch.ones(count, pos, dtype=torch.bool, device=outputs.device)
        if self.selection is not None:
            wanted = self.selection[first * pos :][: count * pos].view(-1, pos)
        self.entering[first] = torch.zeros(count, pos).to(outputs)
        nodes = wanted.any(1).nonzero()[:, 0]
        queries = at[wanted.any(0)]
        if not len(nodes):
            return
        cotangents = cotangents * wanted.T[..., None]
        at_once = _at_once((len(outputs) + 3 * width) * pos, outputs)
        queries_at_once = min(len(queries), at_once, _at_once(4 * cotangents.numel(), outputs))
        for some in nodes.split(max(1, at_once // queries_at_once)):
            for part in queries.split(queries_at_once):
                alone = place(cotangents[part].flatten(1)[:, None], part[:, None], cotangents.flatten(1)[None])
                rows = pull_each(alone.unflatten(-1, (count, width)), some.tolist())[:, :, 0]
                # [node, source, query, key]
                weights = _mixed_products(rows.flatten(0, 1), outputs).unflatten(0, (len(some), -1)).transpose(1, 2)
                self.entering[first][some[:, None], part] = weights.abs().sum((1, 3))
                ends = (first + some[:, None]) * pos + part
                self.add(carried.numbers[:, None], ends[:, None, :, None], weights)

    def add(self, source: Tensor, target: Tensor, weights: Tensor) -> None:
        """Add the edges that are large enough; node numbers broadcast to `weights`."""
        if not weights.numel():
            return
        sizes = weights.abs()
        if self.selection is not None and self.rest is not None:
            pos = (len(self.selection) - 1) // len(self.rest)
            entering = (self.selection[target] & ~self.selection[source] & (sizes > 0)).nonzero(as_tuple=True)
            rows = source.expand_as(weights)[entering] // pos
            numbers = self.selection.cumsum(0)[target.expand_as(weights)[entering]] - 1
            self.rest.index_put_((rows, numbers), weights[entering].to(self.rest), accumulate=True)
            sizes = sizes * (self.selection[source] & self.selection[target])
        self.largest = max(self.largest, float(sizes.max()))
        large = (self._are_large(sizes, target) & (sizes > 0)).nonzero(as_tuple=True)
        self.tables.append((source.expand_as(weights)[large], target.expand_as(weights)[large], weights[large]))
        self.count += len(self.tables[-1][2])
        if self.count > 4 * self.most:
            self._leave_small()  # a later, larger edge raises what the threshold means
            self._check_count(4 * self.most)

    def table(self) -> tuple[Int[Tensor, "edge"], Int[Tensor, "edge"], Float[Tensor, "edge"]]:
        """Return the sources, targets and weights of the edges that are large enough.

        Raises:
            SizeError: there are more than `most`.
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
                "tensorlens_tl.circuits.graph.MOST_EDGES."
            )

    def _are_large(self, sizes: Tensor, target: Tensor) -> Tensor:
        """Return which edges to keep, by their sizes and targets."""
        large = sizes >= self.threshold * self.largest
        return large if self.covered is None else large | (target == self.covered)

    def _leave_small(self) -> None:
        source, target, weights = (torch.cat(column) for column in zip(*self.tables, strict=True))
        large = self._are_large(weights.abs(), target)
        self.tables = [(source[large], target[large], weights[large])]
        self.count = len(self.tables[0][2])


class NoEdges(Edges):
    """A stand-in that collects no edges, for a walk that only computes node weights."""

    def into_positionwise(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    into_rows = into_heads = into_mixing = add = into_positionwise


def _mixed_products(
    reads: Float[Tensor, "row pos d_model"], outputs: Float[Tensor, "source pos d_model"]
) -> Float[Tensor, "row source pos"]:
    """Multiply every read with every output at each position, skipping reads that are zero there (after a query)."""
    products = reads.new_zeros(reads.shape[1], len(reads), len(outputs))
    live = reads.any(-1).T
    for position, rows in enumerate(live):
        products[position, rows] = reads[rows, position] @ outputs[:, position].T
    return products.permute(1, 2, 0)


def _at_once(numbers: int, like: Tensor) -> int:
    """Return how many rows of the given length fit into `EDGE_BYTES`."""
    return max(1, EDGE_BYTES // (numbers * like.element_size()))


# ------------------------------------------------------------------ the walk through the steps of a stream


def kind_of_split(sublayer: Sublayer) -> str:
    """Return the option that splits a sublayer's nodes: heads by source, MLPs by neuron."""
    if sublayer.letter and not sublayer.is_attention:  # a head's part that mixes no values
        return ""
    return {"head": "sources", "mlp": "neurons"}.get(sublayer.node_kind, "")


@dataclass(eq=False)
class GraphBuilder:
    """Walks forward through the steps with every source's output, and collects nodes and edges.

    `carried` lists the rows whose outputs are still in the stream before the current step; `prepared` holds the nodes
    of sublayers in order, including those of an earlier walk.
    """

    readout: StreamTarget
    pulled: Pulled
    edges: Edges
    choices: dict[str, Choice]
    splits: dict[int, FeatureSplit] = field(default_factory=dict[int, FeatureSplit])
    rows: list[Row] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    prepared: dict[int, list[Node]] = field(default_factory=dict[int, "list[Node]"])

    def walk(self) -> Float[Tensor, "source pos"]:
        """Build all rows and their edges; return what each source that is still carried adds to the target itself."""
        stream = self.readout.stream
        sources = stream.sources()
        outputs = upcast(torch.stack([part[0] for part in sources.values()]))
        for name, weights in zip(sources, (outputs * self.pulled.stream[0][0, 0]).sum(-1), strict=True):
            self.carried.append(len(self.rows))
            self.rows.append(Row(name, "embedding", -1, weights, torch.zeros_like(weights)))
        for number, step in enumerate(stream.steps):
            if number in self.splits:
                outputs = self._features(self.splits[number], outputs)
            if step.outer.mixes:
                outputs = self._through(number, outputs)
                continue
            written = list[Tensor]()
            before = len(self.rows)
            x = upcast(stream.x[number])
            for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
                written += self._sublayer(step, sublayer, x, upcast(hidden), self.pulled.sums[number], outputs)
            for name, bias in [(name, bias) for name, bias, within in step.biases if within]:
                written.append(self._bias(name, step, bias, self.pulled.sums[number]))
            if self.edges.carries:
                outputs = torch.cat([outputs, *written])
            outputs = step.outer.push(outputs[:, None])[:, 0]
            for name, bias, within in step.biases:
                if not within:
                    cotangent = self.pulled.stream[number + 1]
                    outputs = torch.cat([outputs, self._bias(name, step, bias, cotangent)])
            self.carried += range(before, len(self.rows))
        if len(stream.steps) in self.splits:
            outputs = self._features(self.splits[len(stream.steps)], outputs)
        return (outputs * self.pulled.stream[-1][0, 0]).sum(-1)

    def largest(self, nodes: Share) -> Bool[Tensor, "node"]:
        """Return which nodes are kept, by number; the last is the target, which always is.

        A count keeps the nodes of the largest weights; a share keeps as many nodes of the largest weights or direct
        contributions to the target as give this share of its inputs, at most `MOST_COVERING`.
        """
        assert nodes is not None
        final = self.walk()[:, int(self.readout.positions)].abs()
        sizes = torch.stack([row.weights.abs().masked_fill(~row.exists, -1) for row in self.rows])
        count = int(nodes)
        if nodes < 1:
            given = torch.zeros_like(sizes)
            given[self.carried, int(self.readout.positions)] = final.to(given)
            sizes = torch.maximum(sizes, given)
            order = sizes.flatten().argsort(descending=True)
            carried = given.flatten()[order].cumsum(0)
            count = min(int((carried < nodes * final.sum()).sum()) + 1, MOST_COVERING)
        selection = torch.zeros(sizes.numel() + 1, dtype=torch.bool, device=sizes.device)
        selection[sizes.flatten().topk(min(count, sizes.numel())).indices] = True
        selection[-1] = True
        return selection

    def graph(self, prediction: dict[str, Any]) -> ContributionGraph:
        """Build the whole graph, with the facts about the prediction that other formats need."""
        import pandas as pd

        final = self.walk()
        query = int(self.readout.positions)
        total = self.readout.total[0, 0]
        constant = self.readout.constant[0, 0]
        pos = final.shape[1]
        count = len(self.rows)
        tokens = prediction["tokens"]
        final = final[:, query]
        carried = torch.tensor(self.carried, device=final.device)
        self.edges.add(carried * pos + query, torch.full_like(carried, count * pos), final)
        weights = torch.stack([row.weights for row in self.rows])
        biases = torch.stack([row.biases.to(weights) for row in self.rows])
        numbers = torch.stack([row.parts for row in self.rows]).cpu()
        entering = torch.zeros_like(weights)
        for first, amounts in self.edges.entering.items():
            entering[first : first + len(amounts)] = amounts
        sources = torch.tensor([row.kind in ("embedding", "bias") for row in self.rows])
        reached = [float(final.sum() + constant), float(weights[sources].sum() + biases[~sources].sum() + constant)]
        size = float(final.abs().sum() + constant.abs())
        size = max(size, torch.finfo(weights.dtype).tiny)
        gap = max(abs(value - float(total)) for value in reached) / size
        names = [name for row in self.rows for name in row.names]
        nodes = pd.DataFrame(
            {
                "name": [*names, "target"],
                "kind": [*(row.kind for row in self.rows for _ in range(pos)), "target"],
                "layer": [*(row.layer for row in self.rows for _ in range(pos)), -1],
                "pos": [*list(range(pos)) * count, query],
                "token": [*list(tokens) * count, tokens[query]],
                "part": [*numbers.flatten().tolist(), -1],
                "weight": [*weights.flatten().tolist(), float(total)],
                "bias": [*biases.flatten().tolist(), float(constant)],
                "entering": [*entering.flatten().tolist(), float(final.abs().sum())],
            }
        )
        nodes = nodes.assign(**self._attended(nodes, pos))
        exists = torch.cat([*(row.exists.cpu() for row in self.rows), torch.tensor([True])])
        if self.edges.selection is not None:
            exists &= self.edges.selection.cpu()
        source, end, weight = self.edges.table()
        renumbered = exists.cumsum(0) - 1
        edges = pd.DataFrame(
            {"source": renumbered[source].numpy(), "target": renumbered[end].numpy(), "weight": weight.numpy()}
        )
        labels = {
            f"{split.prefix}F{number}": label
            for split in self.splits.values()
            for number, label in split.features.labels.items()
        }
        graph = ContributionGraph(
            nodes.loc[exists.numpy()].reset_index(drop=True), edges, self.readout.label, float(total), float(constant),
            gap, self.readout.soft_cap, **prediction,
            labels={name: labels[name] for name in dict.fromkeys(names) if name in labels},
            rest=self._rest(),
        )  # fmt: skip
        return self.readout.stream.frozen.checked(graph, float(self.readout.noise) / size)

    def _attended(self, nodes: Any, pos: int) -> dict[str, np.ndarray]:
        """Return the position that each head attends to most, and how much; in a difference, in the first run."""
        frozen = self.readout.stream.frozen
        run = frozen.a if isinstance(frozen, Difference) else frozen
        attends = np.full(len(nodes), -1)
        attention = np.zeros(len(nodes))
        most: dict[int, tuple[Tensor, Tensor]] = {}
        for number, row in enumerate(self.rows):
            match = re.match(r"L(\d+)H(\d+)(?!\d)", row.name)
            if row.kind != "head" or match is None:
                continue
            layer, head = map(int, match.groups())
            if layer not in most:
                values, positions = run.pattern(layer)[0].max(-1)
                most[layer] = (values.float().cpu(), positions.cpu())
            values, positions = most[layer]
            if values.shape[-1] == pos:
                at = slice(number * pos, (number + 1) * pos)
                attends[at] = positions[head]
                attention[at] = values[head]
        return {"attends": attends, "attention": attention}

    def _rest(self) -> list[tuple[str, int, int, float]]:
        """Sum what enters the kept nodes from all others, by the others' kind and layer."""
        if self.edges.rest is None:
            return []
        sums: dict[tuple[str, int, int], float] = {}
        for number, node in self.edges.rest.nonzero().tolist():
            row = self.rows[number]
            key = (row.kind, row.layer, node)
            sums[key] = sums.get(key, 0.0) + float(self.edges.rest[number, node])
        return [(*key, amount) for key, amount in sums.items()]

    def _carried(self, outputs: Float[Tensor, "source pos d_model"]) -> Carried:
        return Carried(outputs, torch.tensor(self.carried, device=outputs.device))

    def _bias(self, name: str, step: Step, bias: Tensor, cotangent: Tensor) -> Float[Tensor, "1 pos d_model"]:
        bias = bias.expand_as(cotangent[0])
        weights = (bias * cotangent[0])[0].sum(-1)
        self.rows.append(Row(name, "bias", step.layer, weights, torch.zeros_like(weights), side=step.side))
        return bias

    def _sublayer(
        self,
        step: Step,
        sublayer: Sublayer,
        x: Float[Tensor, "1 pos d_model"],
        hidden: Float[Tensor, "1 pos width"],
        g: Float[Tensor, "1 1 pos d_model"],
        outputs: Float[Tensor, "source pos d_model"],
    ) -> list[Float[Tensor, "_row pos d_model"]]:
        """Add a sublayer's nodes with their edges, and return each one's output."""
        cotangent = sublayer.write.pull(g)
        first = len(self.rows)
        choice = self.choices.get(kind_of_split(sublayer))
        if first in self.prepared:
            nodes = self.prepared[first]
        elif choice is None:
            nodes = graph_nodes.whole(sublayer, hidden, cotangent)
        elif sublayer.is_attention:
            nodes = graph_nodes.sources(sublayer, x, cotangent, choice)
        else:
            nodes = graph_nodes.neurons(sublayer, hidden, cotangent, choice)
        self.prepared[first] = nodes
        self.rows += [row for node in nodes for row in node.rows(sublayer.layer, step.side)]
        self._check_count(x.shape[1], sublayer.layer)
        carried = self._carried(outputs)
        if sublayer.has_pattern:
            self.edges.into_heads(sublayer, nodes, first, cotangent, carried)
        elif sublayer.read.mixes:
            self.edges.into_mixing(first, sublayer.pull_each, sublayer.split(cotangent[0, 0]), carried)
        else:
            self.edges.into_positionwise(sublayer, nodes, first, cotangent, carried)
        return [node.outputs for node in nodes]

    def _check_count(self, pos: int, layer: int) -> None:
        most = graph_nodes.MOST_NODES
        if len(self.rows) * pos > most:
            raise SizeError(
                f"contribution_graph: more than {most:,} nodes up to layer {layer}. Ask for fewer neurons=, "
                "sources= or features=, shorten the prompt, or raise tensorlens_tl.circuits.graph_nodes.MOST_NODES."
            )

    def _features(
        self, split: FeatureSplit, outputs: Float[Tensor, "source pos d_model"]
    ) -> Float[Tensor, "row pos d_model"]:
        """Add a dictionary's nodes, in which everything written before ends."""
        first = row = len(self.rows)
        self.rows += split.rows()
        self._check_count(outputs.shape[1], split.layer)
        carried = self._carried(outputs)
        for reads in split.reads():
            self.edges.into_rows(row, reads, carried)
            row += len(reads)
        self.carried = list(range(first, len(self.rows)))
        return split.outputs()

    def _through(self, number: int, outputs: Float[Tensor, "source pos d_model"]) -> Float[Tensor, "1 pos d_model"]:
        """Add a step that mixes positions (whitening) as a node, in which everything written before ends.

        Otherwise an edge would lose the position that it comes from.
        """
        step = self.readout.stream.steps[number]
        cotangent = self.pulled.stream[number + 1][0, 0]
        output = self.readout.stream.x[number + 1][0]
        weights = (cotangent * output).sum(-1)
        biases = torch.zeros_like(weights)
        if step.outer.bias is not ZERO:  # the contribution of its changed weights
            biases = (cotangent * step.outer.bias[0]).sum(-1)
        row = len(self.rows)
        self.rows.append(Row(step.outer_name, "whitening", step.layer, weights, biases))

        def pull_whole(g: Tensor, nodes: Sequence[int]) -> Tensor:
            return step.outer.pull(g.flatten(-2))[None]

        self.edges.into_mixing(row, pull_whole, cotangent[:, None], self._carried(outputs))
        self.carried = [row]
        return output[None]


# ------------------------------------------------------------------ the graph

MOST_EDGES = 2_000_000
"""The most edges that a graph may keep."""

MOST_COVERING = 80
"""The most nodes that are kept to cover a share of the target."""


@formerly(ONCE_ACTIVATION)
@recordable()
@checked_names
@one_question
def contribution_graph(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    threshold: Number = 0.01,
    nodes: Share = None,
    neurons: Share = None,
    sources: Share = None,
    dictionaries: Dictionaries = None,
    features: Share = None,
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    rule: RuleLike = None,
) -> ContributionGraph:
    """Build the contribution graph of one logit of one prompt.

    Args:
        frozen: a pass of one prompt, or the difference of two.
        target, minus, direction, layers, final_norm: as in `logit_attribution`.
        threshold: drop edges smaller than this share of the largest edge (0 keeps all but exact zeros). Nodes keep
            their weights, and `ContributionGraph.completeness` is the share that the kept edges carry.
        nodes: how many nodes to keep, those of the largest abs(weight), with the edges between them; this takes a
            fraction of the time on a large model. A number below 1 keeps as many nodes, by how much passes through
            them, as carry this share of the target's inputs (`ContributionGraph.coverage`), at most `MOST_COVERING`,
            and every edge into the target. ``entering`` and `ContributionGraph.others` include what enters from other
            nodes. None keeps every node.
        neurons: split MLPs into neurons: an integer keeps the largest at each position of each MLP; a number below 1
            keeps all whose abs(weight) is at least this share of the largest neuron's. None leaves MLPs whole.
        sources: split heads by the token that they read: an integer or share, as for `neurons`, for each head and
            query. None leaves heads whole. Mixers have no pattern and stay whole.
        dictionaries: the active features of one or several sparse autoencoders in this pass, from
            `tensorlens_tl.circuits.features`. Each splits the residual stream at its hook point; only one dictionary
            can stand at a hook point.
        features: which active features become nodes: an integer or share, as for `neurons`, at each position. None
            makes a node of each.
        query: one position; see `tensorlens_tl.passes.inputs.query_positions`.
        rule: what replaces the nonlinear operations: one of ``tlens.list_rules()``, or a `Rule`. If it lets patterns
            respond, a head is three nodes, as in a difference; what a node adds besides its linear map is its
            bias. Only rules of the frozen model support `sources` and `dictionaries`.

    Raises:
        InvalidInputError: several prompts or queries, a threshold outside [0, 1], nodes below 1, neurons, sources or
            features that are neither a count nor a share, features without dictionaries, dictionaries of another pass,
            outside the layers or two at one place, transcoders (see `feature_effects` for these), and what
            `logit_attribution` rejects.
        UnsupportedModelError: neurons of a mixture of experts.
        SizeError: more than `MOST_NODES` nodes, or more than `MOST_EDGES` edges to keep.

    >>> graph = tlens.circuits.contribution_graph(frozen, " value", threshold=0.1)
    >>> graph.gap < 1e-4
    True
    """
    nodes, neurons, sources, features = (plain(value) for value in (nodes, neurons, sources, features))
    check_options(threshold, neurons, sources, features)
    if nodes is not None and not (isinstance(nodes, float) and 0 < nodes < 1):
        nodes = whole_number("contribution_graph: nodes", nodes, 1, why="or a share of the target between 0 and 1")
    if features is not None and dictionaries in (None, [], ()):
        raise InvalidInputError(f"features={features!r}: there are none without dictionaries=.")
    readout = stream_target(frozen, target, minus, direction, query, frozen_rule(rule), layers, final_norm)
    if is_of_run(rule) and (sources is not None or dictionaries not in (None, [], ())):
        raise InvalidInputError(
            "contribution_graph(rule=): only rules of the frozen model support sources= and dictionaries=. "
            "Leave sources and dictionaries out, or rule."
        )
    readout = target_under(readout, rule, "contribution_graph", neurons=neurons is not None)
    if len(frozen.tokens) != 1:
        raise InvalidInputError(f"contribution_graph: the pass has {len(frozen.tokens)} prompts; freeze one.")
    if neurons is not None:
        for layer in readout.stream.layers:
            frozen.view.blocks[layer].require_dense_mlp()
    pulled = readout.stream.pull(upcast(readout.seed))
    split = {"neurons": neurons, "sources": sources}
    choices = {name: _choice(readout.stream, pulled, name, value) for name, value in split.items() if value is not None}
    splits = feature_splits(dictionaries, readout.stream, pulled)
    if features is not None:
        sizes = [float(split.weights.abs().max()) for split in splits.values() if len(split.weights)]
        choice = Choice.of_largest("features", features, max(sizes, default=0.0))
        splits = {number: replace(split, choice=choice) for number, split in splits.items()}
    edges = Edges(float(threshold), MOST_EDGES)
    builder = GraphBuilder(readout, pulled, edges, choices, splits)
    if nodes is not None:
        none = NoEdges(0.0, MOST_EDGES, carries=nodes < 1)
        weighed = GraphBuilder(readout, pulled, none, choices, splits)
        edges.selection = weighed.largest(nodes)
        edges.rest = torch.zeros(len(weighed.rows), int(edges.selection.sum())).to(readout.seed)
        edges.covered = len(edges.selection) - 1 if nodes < 1 else None
        builder.prepared = weighed.prepared
    return builder.graph(_prediction(readout, target, minus))


def check_options(threshold: Number, neurons: Share, sources: Share, features: Share = None) -> None:
    """Raise `InvalidInputError` for options that `contribution_graph` rejects, before there is a pass."""
    real_number("threshold", threshold, lambda x: 0 <= x <= 1, "a share of the largest edge, from 0 to 1")
    for name, value in {"neurons": neurons, "sources": sources, "features": features}.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and (0 < value < 1 or (isinstance(value, int) and value >= 1))):
            raise InvalidInputError(
                f"{name}={value!r}: a whole number of them at each position, 1 or more, or a share of the largest, "
                "above 0 and below 1."
            )


def _choice(stream: Stream, pulled: Pulled, name: str, value: int | float) -> Choice:
    """Return which neurons or source tokens become nodes; a share takes a look at all of them for the largest."""
    if value >= 1:
        return Choice.of_largest(name, value, 0.0)
    largest = 0.0
    for number, step in enumerate(stream.steps):
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            if kind_of_split(sublayer) != name:
                continue
            cotangent = sublayer.write.pull(pulled.sums[number])
            shares = cotangent[0] * hidden
            if sublayer.is_attention:
                shares = token_pairs(sublayer, stream.x[number], cotangent)
            largest = max(largest, float(shares.abs().max()))
    return Choice.of_largest(name, value, largest)


def _prediction(readout: StreamTarget, target: TokenLike, minus: TokenLike) -> dict[str, Any]:
    """Return the facts about the model and its prediction that other formats need besides the graph."""
    frozen = readout.stream.frozen
    (query,) = readout.positions[0].tolist()
    view = frozen.view
    token_ids: list[int] = []
    if not frozen.tokens.is_floating_point():
        token_ids = frozen.tokens[0].tolist()
    facts: dict[str, Any] = {
        "tokens": list(frozen.str_tokens[0]),
        "token_ids": token_ids,
        "n_layers": frozen.n_layers,
        "d_vocab": 0 if view.unembedding is None else view.unembedding[0].shape[1],  # tokens, or classes
        "provenance": frozen.provenance(),
    }
    if target is not None and minus is None and view.unembedding is not None:
        run = frozen.a if isinstance(frozen, Difference) else frozen
        logits = upcast(view.logits(run.unembedded()[0, query]))
        token = int(target_ids(frozen, readout.positions, target)[0])
        facts["token_id"] = token
        if view.has_probabilities:
            facts["probability"] = float(logits.softmax(-1)[token])
    return facts
