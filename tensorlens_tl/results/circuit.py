"""Circuits, some edges of a model: as pictures, as networkx' graphs, and as circuit-tracer's JSON.

A head is one node, and its queries, keys and values are told apart by its edges: each has ``reads``. Between the same
two nodes there can be three of them, so that the graph is a multigraph.

circuit-tracer's files and pages have one link between two nodes. What a head reads is a node of its own there, such as
``L1H0.k``, and a link leads from it into the head, whose weight is the sum of the edges read that way (``reads`` says
so too). Circuits are about no position: all nodes stand at the first one.
"""

import gzip
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.drawing import figure, graphs, matrix
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import exchange
from tensorlens_tl.results.benchmark import benchmark_json, read_benchmark
from tensorlens_tl.results.edge_names import ARROW, HEAD, TARGET, kind_of, node_read_at, place
from tensorlens_tl.results.entry import shown_target
from tensorlens_tl.results.exchange import SharedGraph
from tensorlens_tl.results.result import array
from tensorlens_tl.results.scores import Bars, Parts
from tensorlens_tl.results.storage import replacing

if TYPE_CHECKING:
    import networkx
    import pandas as pd

LETTERS = {"q": "queries", "k": "keys", "v": "values", "g": "gate"}
EVERYWHERE = "every position"
"""The one token of a circuit in circuit-tracer's files."""

SHOWN_EDGES = 200
"""Edges of a circuit that a picture shows."""


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(SharedGraph):
    """Some edges of a model. Everything else is to carry what it carries for the corrupted prompt.

    ``plot(kind="matrix")`` draws every edge in a matrix, `plot` and `to_html` the k largest as a graph.

    `show`, `plot` and a notebook draw it as a graph, in which edges that a head reads by its queries, keys and values
    have lines of their own. `save` writes what `load` reads back as the Mechanistic Interpretability Benchmark's JSON,
    to a name without an ending, or one in ``.json`` or, as every edge of the model is in it, ``.json.gz``; a multigraph
    for Gephi, Cytoscape or yEd to one in ``.graphml``; a page, a table or a figure as every result does. `export`
    writes the JSON of networkx and of circuit-tracer.

    Attributes:
        sources, destinations, exists: as of `EdgeScores`.
        scores: by which it was chosen, `[source, destination]`.
        selection: which edges are in it, `[source, destination]`.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`.
        target: what the scores explain, in words.
        provenance: what they depend on besides the prompts, as of `Attribution`.
        method: how the scores were computed.
    """

    TENSORS: ClassVar = ()  # its file is the benchmark's JSON
    FACTS: ClassVar = ()
    LATER_FACTS: ClassVar = ()
    NAMES: ClassVar = {"source": "sources", "destination": "destinations"}
    LOADABLE: ClassVar = ("", ".json", ".json.gz")
    DRAWN: ClassVar = SHOWN_EDGES
    BY_PLACE: ClassVar = {"plot": ("kind",)}

    sources: list[str]
    destinations: list[str]
    scores: Float[Tensor, "source destination"]
    exists: Bool[Tensor, "source destination"]
    selection: Bool[Tensor, "source destination"]
    config: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    method: str = ""

    def _misfit(self) -> str:
        return super()._misfit() or "its selection has a pair that is no edge" * bool(
            (self.selection & ~self.exists).any()
        )

    def __len__(self) -> int:
        return int(self.selection.sum())

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {int(self.exists.sum())} edges, {len(self.nodes)} nodes)"

    @property
    def edges(self) -> list[str]:
        """The names of its edges."""
        pairs = self.selection.nonzero().tolist()
        return [self.sources[source] + ARROW + self.destinations[destination] for source, destination in pairs]

    @property
    def nodes(self) -> list[str]:
        """The sources that an edge of it leads from."""
        return [name for name, used in zip(self.sources, self.selection.any(1).tolist(), strict=True) if used]

    @property
    def heading(self) -> str:
        """The title of its page."""
        title = f"Circuit of {len(self)} edges"
        if self.target:
            title += f" for {shown_target(self.target)}"
        return title

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per edge of it, largest first: source, destination, method, target, score."""
        import pandas as pd

        source, destination = self.selection.nonzero(as_tuple=True)
        scores = self.scores[source, destination].double().cpu()
        order = scores.abs().argsort(descending=True, stable=True).tolist()
        return pd.DataFrame(
            {
                "source": [self.sources[int(source[edge])] for edge in order],
                "destination": [self.destinations[int(destination[edge])] for edge in order],
                "method": self.method,
                "target": self.target,
                "score": scores[order].tolist(),
            }
        )

    def _matrix(self) -> tuple[list[str], list[str], np.ndarray]:
        """The sources and destinations that it has edges at, and the scores of its edges between them."""
        rows = self.selection.any(1).nonzero()[:, 0].tolist()
        columns = self.selection.any(0).nonzero()[:, 0].tolist()
        scores = array(self.scores.masked_fill(~self.selection, 0.0))[np.ix_(rows, columns)]
        return [self.sources[row] for row in rows], [self.destinations[column] for column in columns], scores

    def _parts(self) -> Parts:
        """Its edges."""
        edges = self._scored
        scores = torch.tensor([score for *_, score in edges], dtype=torch.float64)
        return Parts(scores, [source + ARROW + destination for source, destination, _ in edges])

    def _bars(self, k: int) -> Bars:
        lines = [(entry.name, entry.score) for entry in self.top(k)]
        return Bars(f"{self.heading} · {len(lines)} shown", lines, columns=("edge", "score"))

    def _html(self, k: int) -> str:
        """The graph of the k largest edges, layers upwards, and below it a matrix: a row for each node that an edge
        leads from, and a column for each place that one leads to.

        Where scripts run, small edges can be hidden, nodes pinned, grouped and searched for, and the picture saved.
        """
        drawn = self._picture(k)
        parts = ["<p>No edge.</p>"]
        if len(self):
            rows, columns, scores = self._matrix()
            grid = matrix.matrix(rows, columns, scores, label=self.heading, corner="from ↓ to →")
            parts = [graphs.graph(drawn), f"<details><summary>All edges as a matrix</summary>{grid}</details>"]
        count = f"{len(drawn.strengths)} of the circuit's {len(self)} edges; the model has {int(self.exists.sum())}"
        return self._panel(*parts, notes=[count])

    def _figure(self, k: int, kind: str = "graph", *, ax: Any) -> Any:
        """The graph of the k largest edges, or with ``kind="matrix"`` the matrix of all of them."""
        if kind not in ("graph", "matrix"):
            raise InvalidInputError(f"plot: kind={kind!r}; use 'graph' or 'matrix'.")
        rows, columns, scores = self._matrix()
        if not rows:
            raise InvalidInputError("plot: this circuit has no edges.")
        if kind == "graph":
            return figure.graph(self._picture(k), self.heading, ax)
        return figure.heat_map(scores, rows, columns, self.heading, ax, values=False, names=("from", "to"))

    def to_networkx(self) -> "networkx.MultiDiGraph":
        """The circuit as networkx has graphs, which come with torch; several edges can lead between two nodes.

        Returns:
            Nodes by name, with `name`, `kind` (embedding, head, mlp, target) and `layer` (−1 for none). Edges by name
            as well, with `name`, `weight` (the score) and `reads`: queries, keys or values of a head, or an empty text.
            The graph's attributes are `target`, `method`, `edges`, `edges_of_model` and every fact of `provenance`.

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> circuit = tlens.circuits.edge_scores(frozen, corrupted, " value", " name").circuit(20)
        >>> circuit.to_networkx().number_of_edges() == len(circuit)
        True
        """
        import networkx

        graph = networkx.MultiDiGraph(edges=len(self), edges_of_model=int(self.exists.sum()))
        graph.graph.update(self._said)
        for name in self._ends:
            graph.add_node(name, name=name, kind=kind_of(name), layer=layer_of(name))
        for source, destination, score in self._scored:
            name = source + ARROW + destination
            graph.add_edge(source, node_read_at(destination), name, name=name, weight=score, reads=reading(destination))
        return graph

    def _keep(self, path: Path) -> Path:
        """Write the JSON of the Mechanistic Interpretability Benchmark (`tensorlens_tl.results.benchmark`)."""
        content = benchmark_json(self).encode()
        if path.suffix.lower() == ".gz":
            content = gzip.compress(content, mtime=0)  # without a time, the same circuit gives the same file
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Circuit":
        """Read the JSON that `save` wrote, or the benchmark's, packed by gzip or not.

        Scores and edges of neurons are not read; null is NaN.

        What `export` writes is for other tools, and is not read back.

        Raises:
            FileFormatError: another kind of file, or one that lacks edges of its nodes: those outside the circuit are
                needed as well.
            OSError: there is no such file.
        """
        return read_benchmark(path, cls)

    # ------------------------------------------------------------------ for other tools

    @property
    def _scored(self) -> list[tuple[str, str, float]]:
        """Source, destination and score of every edge, in the order of the forward pass."""
        return [
            (self.sources[source], self.destinations[destination], float(self.scores[source, destination]))
            for source, destination in self.selection.nonzero().tolist()
        ]

    @property
    def _ends(self) -> list[str]:
        """The nodes that edges lead from or to, in the order of the forward pass; the target is the last, always."""
        ends = {node_read_at(destination) for _, destination, _ in self._scored}
        return sorted({*self.nodes, *ends, TARGET}, key=place)

    @property
    def _said(self) -> dict[str, str]:
        """What files say of the whole circuit."""
        return {**self.provenance, "target": self.target, "method": self.method}

    def _picture(self, most: int) -> graphs.GraphPicture:
        """A circuit's nodes by layer, with the edges of largest absolute score, of which there are at most so many."""
        every = sorted(self._scored, key=lambda edge: -abs(edge[2]) if not isnan(edge[2]) else 0.0)
        edges = every[:most]
        used = {TARGET}.union(*({source, node_read_at(destination)} for source, destination, _ in edges))
        names = [name for name in self._ends if name in used]
        number = {name: row for row, name in enumerate(names)}
        return graphs.GraphPicture(
            names=names,
            kinds=[kind_of(name) for name in names],
            tokens=[""] * len(names),
            layers=[layer_of(name) for name in names],
            positions=[0] * len(names),
            weights=[],
            biases=[],
            sources=[number[source] for source, _, _ in edges],
            targets=[number[node_read_at(destination)] for _, destination, _ in edges],
            strengths=[score for _, _, score in edges],
            reads=[reading(destination) for _, destination, _ in edges],
            placed=False,
        )

    def _traced(self) -> exchange.Traced:
        edges = self._scored
        for source, destination, score in edges:
            if not isfinite(score):
                edge = source + ARROW + destination
                raise InvalidInputError(
                    f"export: {edge} has the score {score}, and circuit-tracer's links need numbers."
                )
        last = self.config.get("n_layers", 1 + max(map(layer_of, self._ends)))
        readers = {destination for _, destination, _ in edges if reading(destination)}
        names = sorted({*self._ends, *readers}, key=place)
        nodes = [_node(name, number, last) for number, name in enumerate(names, start=2)]
        ids = {name: node["node_id"] for name, node in zip(names, nodes, strict=True)}
        ends = list(edges)
        for reader in filter(reading, names):  # all that a head reads in one way, into the head
            ends.append((reader, node_read_at(reader), sum(score for _, end, score in edges if end == reader)))
        links = [
            {"source": ids[source], "target": ids[end], "weight": score, "reads": reading(end) or reading(source)}
            for source, end, score in ends
        ]
        description = f"{self.heading}; the model has {int(self.exists.sum())}, and weights are the scores of edges"
        return exchange.Traced(nodes, links, [EVERYWHERE], description, {**self._said, **self.config})


def reading(destination: str) -> str:
    """What a head reads an edge by: ``"keys"`` at ``"L1H3.k"``; an empty text of anything else."""
    match = re.fullmatch(HEAD + r"\.([qkvg])", destination)
    if match is None:
        return ""
    return LETTERS[match[1]]


def layer_of(name: str) -> int:
    """A node's layer; −1 of the embedding and the target."""
    if name in ("embed", TARGET):
        return -1
    return place(name)[0]


def _node(name: str, number: int, n_layers: int) -> dict[str, Any]:
    kind = kind_of(name)
    type_ = {"embedding": "other embedding", "target": "logit"}.get(kind, exchange.FEATURE_TYPES[kind])
    layer = {"embedding": "E", "target": str(n_layers + 1)}.get(kind, str(layer_of(name)))
    node = exchange.node_of(name, type_, layer, 0, -number, 0.0, EVERYWHERE)
    node |= {"clerp": name, "activation": None}
    if reading(name):
        node["clerp"] = f"{reading(name)} of {node_read_at(name)}"
    if kind == "target":
        node |= {"node_id": f"{layer}_0_0", "jsNodeId": "L_0-0", "feature": 0, "is_target_logit": True}
        node["clerp"] = 'Output "target" (p=0.000)'
    return node
