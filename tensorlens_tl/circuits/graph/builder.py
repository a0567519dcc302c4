"""The walk through the steps of a stream that puts a contribution graph together, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import ZERO
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.graph import nodes as graph_nodes
from tensorlens_tl.circuits.graph.edges import Carried, Edges
from tensorlens_tl.circuits.graph.features import FeatureSplit
from tensorlens_tl.circuits.graph.nodes import Choice, Node
from tensorlens_tl.circuits.stream import Pulled, Step, StreamTarget, Sublayer
from tensorlens_tl.errors import SizeError
from tensorlens_tl.results import ContributionGraph


def kind_of_split(sublayer: Sublayer) -> str:
    """What a sublayer's nodes are split into: heads by source, MLPs by neuron."""
    if sublayer.letter and not sublayer.is_attention:  # a head's part that mixes no values
        return ""
    return {"head": "sources", "mlp": "neurons"}.get(sublayer.node_kind, "")


@dataclass(frozen=True, eq=False)
class _Row:
    """One node at every position, or one part of a node; `numbers` are the parts', −1 where there is none.

    `side` are the only positions that it can be at, of an encoder–decoder those of one side.
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
        """Where there is a node."""
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
        """Its name at every position."""
        if self.numbers is None:
            return [self.name] * len(self.weights)
        return [f"{self.name}{part}" for part in self.numbers.tolist()]


@dataclass(eq=False)
class GraphBuilder:
    """Walks the steps forwards with every source's output, and collects nodes and edges.

    `carried` are the rows whose outputs the stream still carries, directly, to the stream before the current step;
    `prepared` are the nodes of sublayers, in their order, those of an earlier walk included.
    """

    readout: StreamTarget
    pulled: Pulled
    edges: Edges
    choices: dict[str, Choice]
    splits: dict[int, FeatureSplit] = field(default_factory=dict[int, FeatureSplit])
    rows: list[_Row] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    prepared: dict[int, list[Node]] = field(default_factory=dict[int, "list[Node]"])

    def graph(self, prediction: dict[str, Any]) -> ContributionGraph:
        """The whole graph."""
        return self._tables(self.walk(), prediction)

    def walk(self) -> Float[Tensor, "source pos"]:
        """All rows and their edges; what each source that is still carried adds to the target itself."""
        stream = self.readout.stream
        sources = stream.sources()
        outputs = upcast(torch.stack([part[0] for part in sources.values()]))
        for name, weights in zip(sources, (outputs * self.pulled.stream[0][0, 0]).sum(-1), strict=True):
            self.carried.append(self._add(name, "embedding", -1, weights))
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
            if self.edges.reads_sources:
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

    def largest(self, count: int) -> Bool[Tensor, "node"]:
        """Which nodes have the largest weights, by their numbers; the target, the last, is one of them."""
        sizes = torch.stack([row.weights.abs().masked_fill(~row.exists, -1) for row in self.rows]).flatten()
        selection = torch.zeros(len(sizes) + 1, dtype=torch.bool, device=sizes.device)
        selection[sizes.topk(min(count, len(sizes))).indices] = True
        selection[-1] = True
        return selection

    def _tables(self, final: Float[Tensor, "source pos"], prediction: dict[str, Any]) -> ContributionGraph:
        import pandas as pd

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
        exists = torch.cat([*(row.exists.cpu() for row in self.rows), torch.tensor([True])])
        if self.edges.selection is not None:
            exists &= self.edges.selection.cpu()
        source, end, weight = self.edges.table()
        renumbered = exists.cumsum(0) - 1
        edges = pd.DataFrame(
            {"source": renumbered[source].numpy(), "target": renumbered[end].numpy(), "weight": weight.numpy()}
        )
        graph = ContributionGraph(
            nodes.loc[exists.numpy()].reset_index(drop=True), edges, self.readout.label, float(total), float(constant),
            gap, self.readout.soft_cap, **prediction, labels=self._labels(names),
        )  # fmt: skip
        return self.readout.stream.frozen.checked(graph, float(self.readout.noise) / size)

    def _labels(self, names: Sequence[str]) -> dict[str, str]:
        """What the graph's features are called, by the names of their nodes."""
        labels = {
            f"{split.prefix}F{number}": label
            for split in self.splits.values()
            for number, label in split.features.labels.items()
        }
        return {name: labels[name] for name in dict.fromkeys(names) if name in labels}

    # ------------------------------------------------------------------ nodes

    def _add(
        self,
        name: str,
        kind: str,
        layer: int,
        weights: Float[Tensor, "pos"],
        biases: Float[Tensor, "pos"] | None = None,
        numbers: Int[Tensor, "pos"] | None = None,
        side: tuple[int, int] | None = None,
    ) -> int:
        if biases is None:
            biases = torch.zeros_like(weights)
        self.rows.append(_Row(name, kind, layer, weights, biases, numbers, side))
        return len(self.rows) - 1

    def _carried(self, outputs: Float[Tensor, "source pos d_model"]) -> Carried:
        return Carried(outputs, torch.tensor(self.carried, device=outputs.device))

    def _bias(self, name: str, step: Step, bias: Tensor, cotangent: Tensor) -> Float[Tensor, "1 pos d_model"]:
        bias = bias.expand_as(cotangent[0])
        self._add(name, "bias", step.layer, (bias * cotangent[0])[0].sum(-1), side=step.side)
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
        """A sublayer's nodes with their edges, and what each of them wrote."""
        cotangent = sublayer.write.pull(g)
        first = len(self.rows)
        if first not in self.prepared:
            self.prepared[first] = self._nodes(sublayer, x, hidden, cotangent)
        nodes = self.prepared[first]
        for node in nodes:
            for (name, kind, numbers), weights, biases in zip(node.rows, node.weights, node.biases, strict=True):
                self._add(name, kind, sublayer.layer, weights, biases, numbers, step.side)
        self._check_count(x.shape[1], sublayer.layer)
        carried = self._carried(outputs)
        if sublayer.has_pattern:
            self.edges.into_heads(sublayer, nodes, first, cotangent, carried)
        elif sublayer.read.mixes:
            reads = [sublayer.read_of(number) for number in range(len(nodes))]
            self.edges.into_mixing(first, reads, sublayer.split(cotangent[0, 0]).unbind(-2), carried)
        else:
            self.edges.into_positionwise(sublayer, nodes, first, cotangent, carried)
        return [node.outputs for node in nodes]

    def _nodes(self, sublayer: Sublayer, x: Tensor, hidden: Tensor, cotangent: Tensor) -> list[Node]:
        """A sublayer's nodes, whole or in the parts that were chosen."""
        choice = self.choices.get(kind_of_split(sublayer))
        if choice is None:
            return graph_nodes.whole(sublayer, hidden, cotangent)
        if sublayer.is_attention:
            return graph_nodes.sources(sublayer, x, cotangent, choice)
        return graph_nodes.neurons(sublayer, hidden, cotangent, choice)

    def _check_count(self, pos: int, layer: int) -> None:
        most = graph_nodes.MOST_NODES
        if len(self.rows) * pos > most:
            raise SizeError(
                f"contribution_graph: more than {most:,} nodes up to layer {layer}. Ask for fewer neurons=, "
                "sources= or features=, shorten the prompt, or raise tensorlens_tl.circuits.graph.nodes.MOST_NODES."
            )

    def _features(
        self, split: FeatureSplit, outputs: Float[Tensor, "source pos d_model"]
    ) -> Float[Tensor, "row pos d_model"]:
        """A dictionary's nodes: all that was written before ends there."""
        choice = self.choices.get("features")
        first = len(self.rows)
        chosen = split.chosen(choice)
        rest = choice is not None
        for row in split.rows(chosen, rest):
            self._add(row.name, row.kind, split.layer, row.weights, row.biases, row.numbers)
        self._check_count(outputs.shape[1], split.layer)
        row = first
        carried = self._carried(outputs)
        for reads in split.reads(chosen, rest):
            self.edges.into_rows(row, reads, carried)
            row += len(reads)
        self.carried = list(range(first, len(self.rows)))
        return split.outputs(chosen, rest)

    def _through(self, number: int, outputs: Float[Tensor, "source pos d_model"]) -> Float[Tensor, "1 pos d_model"]:
        """A step that mixes positions (whitening) as a node at every position: all that was written before ends there.

        Only so does an edge keep the position that it comes from.
        """
        step = self.readout.stream.steps[number]
        cotangent = self.pulled.stream[number + 1][0, 0]
        output = self.readout.stream.x[number + 1][0]
        biases = None
        if step.outer.bias is not ZERO:  # what changed weights of it add
            biases = (cotangent * step.outer.bias[0]).sum(-1)
        row = self._add(step.outer_name, "whitening", step.layer, (cotangent * output).sum(-1), biases)
        self.edges.into_mixing(row, [step.outer], [cotangent], self._carried(outputs))
        self.carried = [row]
        return output[None]
