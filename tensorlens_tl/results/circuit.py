"""Circuits: edges between the parts of a model, their names and scores, and the files that store them.

An edge leads from one node's output to a later node's input. Nodes that write to the residual stream are *sources*: the
first block's input (``"embed"``), heads and MLPs. *Destinations* read from it: a head's queries, keys and values
(``"L1H0.q"``, ``"L1H0.k"``, ``"L1H0.v"``) and the gate of its output (``"L1H0.g"``), MLPs, and the target. An edge is
named ``"L0H3 → L1H0.k"``; an edge into cross-attention ``"L0H3 → L2.cross.H0.k"``.

A circuit can be shown as a picture, as a networkx graph, and as circuit-tracer JSON. A head is one node; its edges
carry an attribute ``reads`` that distinguishes queries, keys and values. Since two nodes can be connected by three
such edges, the graph is a multigraph.

circuit-tracer's files allow one link between two nodes. There, each input of a head is a node of its own, such as
``L1H0.k``, with a link into the head whose weight is the sum of its edges (and whose ``reads`` is set as well).
Circuits have no positions: all nodes are placed at the first one.

Circuit files use the JSON format of the Mechanistic Interpretability Benchmark (Mueller et al. 2025): an object with
`cfg`, `nodes` (name → ``{"in_graph": …}``) and `edges` (name → ``{"score": …, "in_graph": …}``). Nodes are named
``input``, ``a0.h1``, ``m0``, ``logits``; edges ``a0.h1->m0`` or, into a head, ``input->a0.h1<q>``.
"""

import gzip
import heapq
import json
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields as dataclass_fields, replace
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Whole, check_choice, nearest, whole_number
from tensorlens_tl.drawing import figure, graphs, matrix
from tensorlens_tl.drawing.marks import counted
from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.results import exchange
from tensorlens_tl.results.entry import check_batch, mean_title, shown_target, targets_of_queries
from tensorlens_tl.results.exchange import SharedGraph
from tensorlens_tl.results.result import array
from tensorlens_tl.results.scores import Bars, Parts, Scored, long_table, provenance_of_both, refuse_ranked
from tensorlens_tl.results.statistics import bootstrap_interval
from tensorlens_tl.results.storage import GZIP_FILE, JSON_FILE, other_kind, replacing

if TYPE_CHECKING:
    import networkx
    import pandas as pd

CHOICES = ("top", "greedy")

ARROW = " → "
TARGET = "target"
HEAD = r"L\d+(?:\.cross\.)?H\d+"
"""Matches head names: ``"L0H3"`` in self-attention, ``"L2.cross.H3"`` in cross-attention."""
READS = {"q": "queries", "k": "keys", "v": "values", "g": "gate"}
"""A head's inputs by the letter in edge names, in forward-pass order."""

EXPORTED = {
    frozenset(["graph", "nodes", "links"]): "networkx' node-link form, which export() writes for other tools",
    frozenset(["metadata", "nodes", "links"]): "circuit-tracer's JSON, which export() writes for other tools",
}
"""Kinds of JSON files, by the keys they contain."""

OF_ENDING = {".graphml": "GraphML, which networkx.read_graphml reads"}
"""Kinds of XML files, by ending."""

BENCHMARK_NAMES = {"embed": "input", TARGET: "logits"}

EVERYWHERE = "every position"
"""The only token of a circuit in circuit-tracer's files."""

SHOWN_EDGES = 200
"""How many of a circuit's edges a picture shows."""


def node_read_at(destination: str) -> str:
    """Return the node that a destination belongs to: ``"L0H3"`` for ``"L0H3.q"``."""
    return re.sub(r"(H\d+)\.[qkvg]$", r"\1", destination)


def place(name: str) -> tuple[int, int, str, int]:
    """Return a sort key for forward-pass order: by layer; heads (cross-attention's too), then MLP, then hooks."""
    if name == TARGET:
        return sys.maxsize, 0, "", 0
    match = re.fullmatch(r"L(\d+)(\.cross\.)?H(\d+)(?:\.([qkvg]))?", name)
    if match is not None:
        layer, cross, head, letter = match.groups()
        order = "" if letter is None else str(list(READS).index(letter))
        return int(layer), 0, "4" * bool(cross) + order, int(head)  # cross-attention comes after self-attention
    number = re.search(r"\d+", name)
    if number is None:
        return -1, 0, "", 0
    return int(number[0]), {"mixer": 0, "mlp": 1}.get(kind_of(name), 2), name, 0  # hooks' additions come last


def kind_of(name: str) -> str:
    """Return a node's kind: embedding, head, mixer, mlp, target, or bias (added by a hook)."""
    kinds = {
        "target": TARGET,
        "embedding": "embed",
        "head": HEAD,
        "mlp": r"MLP\d+|L\d+\.per_layer",
        "mixer": r"L\d+\.mixer",
    }
    return next((kind for kind, pattern in kinds.items() if re.fullmatch(pattern, name)), "bias")


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScores(Scored):
    """A score for every edge and prompt: the drop in the target when the edge carries its corrupted value.

    `top`, `show` and `plot` take `batch`; by default they show the mean over prompts.

    Attributes:
        sources, destinations: names along the two axes, in forward-pass order.
        scores: `[batch, source, destination]`, zero where there is no edge.
        exists: which pairs are edges, `[source, destination]`.
        clean, corrupted: the target's value on the two prompts, before any final soft cap, `[batch]`.
        target: what the scores explain.
        method: how they were computed.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`, for files.
        by_position: scores by the position where the destination reads, `[batch, source, destination, pos]`, or None.
        provenance: as in `Attribution`.
    """

    NAMES: ClassVar = {"source": "sources", "destination": "destinations"}
    HEADING: ClassVar = "Edges that act on {}"
    DRAWN: ClassVar = 20

    sources: list[str]
    destinations: list[str]
    scores: Float[Tensor, "batch source destination"]
    exists: Bool[Tensor, "source destination"]
    clean: Float[Tensor, "batch"]
    corrupted: Float[Tensor, "batch"]
    target: str
    method: str
    config: dict[str, Any] = field(default_factory=dict)
    by_position: Float[Tensor, "batch source destination pos"] | None = None
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return int(self.exists.sum())

    def __repr__(self) -> str:
        prompts = counted(len(self.scores), "prompt")
        return f"{type(self).__name__}({len(self)} edges, {prompts}, {self.target!r}, method={self.method!r})"

    def __getitem__(self, edge: Any) -> Float[Tensor, "batch"]:
        """Return one edge's score for every prompt; raise `InvalidInputError` for an unknown edge."""
        source, _, destination = str(edge).partition(ARROW)
        if source not in self.sources or destination not in self.destinations:
            some = ARROW.join((self.sources[0], self.destinations[0]))
            names = [self._name(number) for number in self.exists.flatten().nonzero()[:, 0].tolist()]
            near = nearest(str(edge).replace(" ", "").replace("->", ARROW), names)
            raise InvalidInputError(f"no edge {edge!r}; edges are called by name, as {some!r}.{near}")
        pair = self.sources.index(source), self.destinations.index(destination)
        if not self.exists[pair]:
            raise InvalidInputError(f"no edge {edge!r}: {destination} does not read what {source} writes.")
        return self.scores[(slice(None), *pair)]

    def __sub__(self, other: "EdgeScores") -> "EdgeScores":
        """Subtract another result's scores edge by edge: for another target, method or model, with as many prompts.

        Raises:
            InvalidInputError: the edges or the number of prompts differ.
        """
        if not isinstance(other, EdgeScores):
            return NotImplemented
        same = self.sources == other.sources and self.destinations == other.destinations
        if not same or self.scores.shape != other.scores.shape or not torch.equal(self.exists, other.exists):
            raise InvalidInputError(
                f"a − b: {len(self)} and {len(other)} edges of {len(self.scores)} and {len(other.scores)} prompts do "
                "not match; subtract scores of the same edges and of as many prompts."
            )
        refuse_ranked(self.target, other.target)
        changed: dict[str, Any] = {}
        for name in ("target", "method"):
            changed[name] = " − ".join(dict.fromkeys((getattr(self, name), getattr(other, name))))
        for name in ("scores", "clean", "corrupted", "by_position"):
            a, b = getattr(self, name), getattr(other, name)
            changed[name] = None if a is None or b is None or a.shape != b.shape else a - b
        return self._plain(**changed, provenance=provenance_of_both(self, other))

    def mean(self) -> "EdgeScores":
        """Return the mean over prompts, as a result for one prompt."""
        means = {name: getattr(self, name).mean(0, keepdim=True) for name in ("scores", "clean", "corrupted")}
        over = counted(len(self.scores), "prompt")
        return self._plain(**means, by_position=None, target=f"{self.target}, mean of {over}")

    def _plain(self, **fields: Any) -> "EdgeScores":
        """Return the scores with some fields replaced, as plain `EdgeScores`: other data belongs to single runs."""
        stated = {one.name: getattr(self, one.name) for one in dataclass_fields(EdgeScores)}
        return EdgeScores(**stated | fields)

    def _parts(self, batch: int | None = None) -> Parts:
        """Return the edges of one prompt, or of the mean over prompts, by descending score."""
        scores = self._row(batch)
        order = edge_order(scores, self.exists, self.sources, self.destinations)
        return Parts(scores.flatten()[order], [self._name(edge) for edge in order.tolist()])

    def circuit(
        self,
        edges: Whole,
        batch: int | None = None,
        *,
        absolute: bool = True,
        choice: str = "top",
        prune: bool = True,
    ) -> "Circuit":
        """Return the circuit of the best edges, dropping those on no path from the input to the target.

        Args:
            edges: how many to choose, before pruning; in a small circuit of a deep model, half of them may be pruned.
            batch: choose by one prompt's scores, or (None) by the mean.
            absolute: choose by absolute score; otherwise the most positive first.
            choice: ``"top"`` takes the best edges anywhere; ``"greedy"`` works backwards from the target, taking the
                best edges into nodes already reached.
            prune: False keeps edges on no such path, which have no effect.

        Raises:
            InvalidInputError: more edges than the model has, or no such choice or prompt.

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
        >>> edges.circuit(5)
        Circuit(5 of 479 edges, 4 nodes)
        >>> edges.circuit(20), edges.circuit(20, prune=False)
        (Circuit(18 of 479 edges, 10 nodes), Circuit(20 of 479 edges, 11 nodes))
        """
        edges = whole_number("edges", edges, 0, len(self), why=f"this model has {len(self)} edges")
        scores = self._row(batch)
        order = edge_order(scores, self.exists, self.sources, self.destinations, absolute=absolute, choice=choice)
        selection = torch.zeros_like(self.exists)
        selection.view(-1)[order[:edges]] = True
        if prune:
            selection = pruned(selection, self.sources, self.destinations)
        return Circuit(
            self.sources, self.destinations, scores, self.exists, selection, self.config, self.target, self.provenance,
            self.method,
        )  # fmt: skip

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per prompt and edge: batch, source, destination, method, target, score."""
        axes = {"batch": None, "source": self.sources, "destination": self.destinations}
        targets = targets_of_queries(self.target, torch.zeros(len(self.scores), 1, dtype=torch.long))
        columns = {"method": self.method, "target": np.array(targets, dtype=object)[:, 0]}
        columns |= {name: column.cpu() for name, column in self._columns().items()}
        return long_table(self, self.scores, axes, real=self.exists.cpu(), **columns)

    def _columns(self) -> dict[str, Tensor]:
        """Return additional columns of the table."""
        return {}

    def _bars(self, k: int, batch: int | None = None) -> Bars:
        lines = [(entry.name, entry.score) for entry in self.top(k, batch=batch)]
        facts = [shown_target(self.target), self.method]
        several = batch is None and len(self.scores) > 1
        if batch is not None:
            facts.append(f"prompt {batch}")
        elif several:
            facts.append(f"mean of {len(self.scores)} prompts")
        bars = Bars(" · ".join(facts), lines, heading=self.heading, notes=facts, columns=("edge", "score"))
        if not several:
            return bars
        low, high = bootstrap_interval(torch.stack([self[name] for name, _ in lines]).double().cpu())
        title = f"{mean_title(self.target, len(self.scores))} · {self.method}"
        return replace(bars, figure_title=title, intervals=list(zip(low.tolist(), high.tolist(), strict=True)))

    def _row(self, batch: int | None) -> Float[Tensor, "source destination"]:
        if batch is None:
            return self.scores.mean(0)
        check_batch(batch, list(self.scores))
        return self.scores[batch]

    def _name(self, edge: int) -> str:
        source, destination = divmod(edge, len(self.destinations))
        return self.sources[source] + ARROW + self.destinations[destination]


def edge_order(
    scores: Float[Tensor, "source destination"],
    exists: Bool[Tensor, "source destination"],
    sources: Sequence[str],
    destinations: Sequence[str],
    *,
    absolute: bool = True,
    choice: str = "top",
) -> Int[Tensor, "edge"]:
    """Return all edges in the order in which circuits include them, as indices into the flattened score matrix."""
    check_choice("choice", choice, CHOICES)
    if not bool(torch.isfinite(scores[exists]).all()):
        raise InvalidInputError("edges: some scores are not finite, so edges cannot be ordered.")
    size = scores
    if absolute:
        size = scores.abs()
    edges = exists.flatten().nonzero()[:, 0]
    by_size = edges[size.flatten()[edges].argsort(descending=True, stable=True)]
    if choice == "top":
        return by_size
    width = len(destinations)
    node_of = [node_read_at(name) for name in destinations]
    into: dict[str, list[int]] = {}
    for edge in by_size.tolist():
        into.setdefault(node_of[edge % width], []).append(edge)
    flat = size.flatten().tolist()
    waiting = [(-flat[edge], edge) for edge in into[TARGET]]
    heapq.heapify(waiting)
    reached = {TARGET}
    order = list[int]()
    while waiting:
        _, edge = heapq.heappop(waiting)
        order.append(edge)
        source = sources[edge // width]
        if source not in reached:
            reached.add(source)
            for other in into.get(source, ()):
                heapq.heappush(waiting, (-flat[other], other))
    return torch.tensor(order, device=scores.device)


def pruned(
    selection: Bool[Tensor, "*row source destination"], sources: Sequence[str], destinations: Sequence[str]
) -> Bool[Tensor, "*row source destination"]:
    """Drop edges on no path from the input (or a hook's addition) to the target; leading axes are several circuits."""
    node_of = [node_read_at(name) for name in destinations]
    entries = torch.tensor(
        [[node == name for node in node_of] for name in sources], device=selection.device
    )  # [source, destination]: the node that the destination belongs to
    fed = torch.zeros(selection.shape[:-1], dtype=torch.bool, device=selection.device)
    fed[..., ~entries.any(1)] = True  # nodes without inputs: the embedding and hooks' additions
    reading = entries.any(1).nonzero()[:, 0].tolist()
    for source in reading:  # in forward-pass order, so that a node's inputs are known before it
        fed[..., source] = (selection[..., entries[source]] & fed[..., None]).flatten(-2).any(-1)
    used = torch.zeros_like(fed)
    to_target = torch.tensor([name == TARGET for name in node_of], device=selection.device)
    for source in reversed(range(len(sources))):
        is_used = (used[..., None, :] & entries.T).any(-1) | to_target  # destinations whose node is used
        used[..., source] = (selection[..., source, :] & is_used).any(-1)
    ends = (used[..., None, :] & fed[..., None, :] & entries.T).any(-1) | to_target
    return selection & (fed & used)[..., None] & ends[..., None, :]


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(SharedGraph):
    """A subset of a model's edges; all others carry their value on the corrupted prompt.

    `show`, `plot` and `to_html` draw the k largest edges as a graph, with separate lines for a head's queries, keys and
    values; ``plot(kind="matrix")`` draws all of them. `save` writes the Mechanistic Interpretability Benchmark's JSON,
    which includes every edge of the model and which `load` reads, to a name without an ending, in ``.json`` or
    ``.json.gz``; a multigraph for Gephi, Cytoscape or yEd to ``.graphml``; and pages, tables and figures as for any
    result. `export` writes the JSON of networkx and circuit-tracer.

    Attributes:
        sources, destinations, exists: as in `EdgeScores`.
        scores: the scores by which it was chosen, `[source, destination]`.
        selection: which edges it includes, `[source, destination]`.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`.
        target: what the scores explain.
        provenance: as in `Attribution`.
        method: how the scores were computed.
    """

    TENSORS: ClassVar = ()  # its file is the benchmark's JSON
    FACTS: ClassVar = ()
    LATER_FACTS: ClassVar = ()
    NAMES: ClassVar = {"source": "sources", "destination": "destinations"}
    LOADABLE: ClassVar = ("", ".json", ".json.gz")
    DRAWN: ClassVar = SHOWN_EDGES

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
        return super()._misfit() or "its selection has a pair that is not an edge" * bool(
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
        return [ARROW.join((self.sources[source], self.destinations[end])) for source, end in pairs]

    @property
    def nodes(self) -> list[str]:
        """The sources of its edges."""
        return [name for name, used in zip(self.sources, self.selection.any(1).tolist(), strict=True) if used]

    @property
    def heading(self) -> str:
        """The title of its page."""
        title = f"Circuit of {len(self)} edges"
        if self.target:
            title += f" for {shown_target(self.target)}"
        return title

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per edge, largest first: source, destination, method, target, score."""
        axes = {"source": self.sources, "destination": self.destinations}
        facts = {"method": self.method, "target": self.target}
        frame = long_table(self, self.scores, axes, real=self.selection.cpu(), **facts)
        return frame.sort_values(
            "score", key=abs, ascending=False, kind="stable", na_position="first", ignore_index=True
        )

    def _matrix(self) -> tuple[list[str], list[str], np.ndarray]:
        """Return the sources and destinations of its edges, and the scores between them as a matrix."""
        rows = self.selection.any(1).nonzero()[:, 0].tolist()
        columns = self.selection.any(0).nonzero()[:, 0].tolist()
        scores = array(self.scores.masked_fill(~self.selection, 0.0))[np.ix_(rows, columns)]
        return [self.sources[row] for row in rows], [self.destinations[column] for column in columns], scores

    def _parts(self) -> Parts:
        return Parts(self.scores[self.selection].double().cpu(), self.edges)

    def _bars(self, k: int) -> Bars:
        lines = [(entry.name, entry.score) for entry in self.top(k)]
        return Bars(f"{self.heading} · {len(lines)} shown", lines, columns=("edge", "score"))

    def _html(self, k: int) -> str:
        """Draw the k largest edges as a graph, layers upwards, above a matrix of sources and destinations.

        Scripts let readers hide small edges, pin, group and search nodes, and save the picture.
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
        """Draw a graph of the k largest edges or, with ``kind="matrix"``, a matrix of all of them."""
        if kind not in ("graph", "matrix"):
            raise InvalidInputError(f"plot: kind={kind!r}; use 'graph' or 'matrix'.")
        rows, columns, scores = self._matrix()
        if not rows:
            raise InvalidInputError("plot: this circuit has no edges.")
        if kind == "graph":
            return figure.graph(self._picture(k), self.heading, ax)
        return figure.heat_map(scores, rows, columns, self.heading, ax, values=False, names=("from", "to"))

    def to_networkx(self) -> "networkx.MultiDiGraph":
        """Return the circuit as a networkx multigraph (networkx comes with torch).

        Nodes have `name`, `kind` (embedding, head, mlp, target) and `layer` (−1 for none). Edges have `name`, `weight`
        (the score) and `reads` (a head's queries, keys or values, otherwise empty). The graph has `target`, `method`,
        `edges`, `edges_of_model` and every entry of `provenance`.

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

    def _write(self, path: Path) -> Path:
        """Write the benchmark's JSON, with null for NaN scores."""
        sources = [_benchmark_name(name) for name in self.sources]
        destinations = [_benchmark_name(name) for name in self.destinations]
        used = self.selection.any(1).tolist()
        nodes = {name: {"in_graph": is_used} for name, is_used in zip(sources, used, strict=True)}
        if bool(self.scores[self.exists].isinf().any()):
            raise InvalidInputError("save: some scores are infinite, which JSON cannot represent.")
        scores, selection = self.scores.tolist(), self.selection.tolist()
        edges = {
            f"{sources[s]}->{destinations[d]}": {
                "score": exchange.null_for_nan(scores[s][d]),
                "in_graph": selection[s][d],
            }
            for s, d in self.exists.nonzero().tolist()
        }
        facts = {"target": self.target, "method": self.method, "provenance": self.provenance}
        facts = {name: fact for name, fact in facts.items() if fact}  # the benchmark ignores them
        nodes["logits"] = {"in_graph": True}
        content = json.dumps({"cfg": self.config, "nodes": nodes, "edges": edges, **facts}, allow_nan=False).encode()
        if path.suffix.lower() == ".gz":
            content = gzip.compress(content, mtime=0)  # no timestamp, so that the same circuit gives the same file
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Circuit":
        """Read the JSON that `save` wrote, or the benchmark's own, gzipped or not.

        Scores and edges of neurons are ignored; null is read as NaN. Files that `export` wrote cannot be loaded.

        Raises:
            FileFormatError: the file is of another kind, or lacks the edges outside the circuit.
            OSError: the file does not exist.
        """
        content = _content(Path(path))
        try:
            config = dict(content["cfg"])
            edges = dict(content["edges"])
            facts = {name: content[name] for name in ("target", "method", "provenance") if name in content}
            sources = ["embed", *(_library_name(n) for n in content["nodes"] if n not in ("input", "logits"))]
            pairs = [tuple(map(_library_name, name.split("->"))) for name in edges]
            destinations = sorted({end for _, end in pairs}, key=place)
            sources.sort(key=place)
            exists = torch.zeros(len(sources), len(destinations), dtype=torch.bool)
            selection = exists.clone()
            scores = torch.zeros(exists.shape, dtype=torch.float64)
            for (source, destination), edge in zip(pairs, edges.values(), strict=True):
                pair = sources.index(source), destinations.index(destination)
                exists[pair] = True
                selection[pair] = _truth(edge["in_graph"], "in_graph")
                scores[pair] = _score(edge["score"])
            parallel = "parallel_attn_mlp" in config and _truth(config["parallel_attn_mlp"], "parallel_attn_mlp")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FileFormatError(_unreadable(path, error)) from error
        _check_all_edges(path, sources, pairs, parallel)
        try:
            return cls(sources, destinations, scores, exists, selection, config, **facts)
        except InvalidInputError as error:
            raise FileFormatError(_unreadable(path, error)) from error

    # ------------------------------------------------------------------ for other tools

    @property
    def _scored(self) -> list[tuple[str, str, float]]:
        """Source, destination and score of every edge, in forward-pass order."""
        return [
            (self.sources[source], self.destinations[destination], float(self.scores[source, destination]))
            for source, destination in self.selection.nonzero().tolist()
        ]

    @property
    def _ends(self) -> list[str]:
        """The nodes at either end of an edge, in forward-pass order; the target always comes last."""
        ends = {node_read_at(destination) for _, destination, _ in self._scored}
        return sorted({*self.nodes, *ends, TARGET}, key=place)

    @property
    def _said(self) -> dict[str, str]:
        """What files state about the circuit as a whole."""
        return {**self.provenance, "target": self.target, "method": self.method}

    def _picture(self, most: int) -> graphs.GraphPicture:
        """Arrange nodes by layer, with at most `most` edges, those of largest absolute score."""
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
        for reader in filter(reading, names):  # the sum of a head's edges of one kind, as a link into the head
            ends.append((reader, node_read_at(reader), sum(score for _, end, score in edges if end == reader)))
        links = [
            {"source": ids[source], "target": ids[end], "weight": score, "reads": reading(end) or reading(source)}
            for source, end, score in ends
        ]
        description = f"{self.heading}; the model has {int(self.exists.sum())}, and weights are the scores of edges"
        return exchange.Traced(nodes, links, [EVERYWHERE], description, {**self._said, **self.config})


def reading(destination: str) -> str:
    """Return which of a head's inputs an edge feeds: ``"keys"`` for ``"L1H3.k"``; empty for other destinations."""
    match = re.fullmatch(HEAD + r"\.([qkvg])", destination)
    if match is None:
        return ""
    return READS[match[1]]


def layer_of(name: str) -> int:
    """Return a node's layer; −1 for the embedding and the target."""
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


def _content(path: Path) -> Any:
    """Read a file's JSON, unless it is recognisably of another kind, such as files that `export` writes."""
    written = path.read_bytes()
    kind = other_kind(written, path)
    if kind == GZIP_FILE:
        try:
            written = gzip.decompress(written)
        except (OSError, EOFError, zlib.error) as error:
            raise FileFormatError(_unreadable(path, error)) from error
        kind = other_kind(written, path)
    if kind not in ("", JSON_FILE):
        raise FileFormatError(_of_another_kind(path, OF_ENDING.get(path.suffix.lower(), kind)))
    try:
        content = json.loads(written.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(_unreadable(path, error)) from error
    for names, exported in EXPORTED.items():
        if isinstance(content, dict) and names <= set(content):
            raise FileFormatError(_of_another_kind(path, exported))
    return content


def _of_another_kind(path: Path, kind: str) -> str:
    return (
        f"{path}: {kind}, not a circuit in the benchmark's JSON. Load what save() wrote with a name that ends in "
        ".json or .json.gz, or in nothing."
    )


def _unreadable(path: str | os.PathLike[str], error: Exception) -> str:
    return (
        f"{path}: not a circuit in the benchmark's JSON ({type(error).__name__}: {error}). Circuit.load reads what "
        "Circuit.save wrote, and the benchmark's own files."
    )


def _truth(value: Any, name: str) -> bool:
    """Require JSON's true or false; a string such as "false" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f'"{name}" is {value!r}, not true or false')
    return value


def _score(value: Any) -> float:
    """Return a finite number, or NaN for null."""
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'"score" is {value!r}, not a number or null')
    if not isfinite(value):
        raise ValueError(f'"score" is {value!r}, which JSON cannot represent')
    return float(value)


def _check_all_edges(
    path: str | os.PathLike[str], sources: Sequence[str], pairs: Sequence[tuple[str, ...]], parallel: bool
) -> None:
    """Raise unless the file has every possible edge between its nodes: from each node to all later ones."""
    ends = [TARGET]
    for name in sources[1:]:
        if name.startswith("MLP"):
            ends.append(name)
        else:
            ends += [f"{name}.{letter}" for letter in "qkv"]

    def step(name: str) -> tuple[int, int]:
        layer, mlp, *_ = place(name)
        if parallel:
            return layer, 0
        return layer, mlp

    expected = {(source, end) for end in ends for source in sources if step(source) < step(end)}
    if missing := expected - set(pairs):
        some = ARROW.join(min(missing))
        raise FileFormatError(
            f"{path}: {len(missing)} of the {len(expected)} edges between its nodes are missing, such as {some!r}. A "
            'circuit\'s file lists every edge of the model, those outside the circuit with "in_graph": false.'
        )
    if wrong := set(pairs) - expected:
        raise FileFormatError(
            f"{path}: {ARROW.join(min(wrong))!r} is no edge: its source does not come before its destination."
        )


def _benchmark_name(name: str) -> str:
    """Translate a name to the benchmark's: ``"L0H3.q"`` to ``"a0.h3<q>"``, ``"MLP1"`` to ``"m1"``, and so on."""
    if name in BENCHMARK_NAMES:
        return BENCHMARK_NAMES[name]
    head = re.fullmatch(r"L(\d+)H(\d+)(?:\.([qkv]))?", name)
    mlp = re.fullmatch(r"MLP(\d+)", name)
    if mlp is not None:
        return f"m{mlp[1]}"
    if head is None:
        raise InvalidInputError(
            f"save: the benchmark's files have heads and MLPs of one stack only, and no name for {name!r}. Save as "
            ".html, .graphml or .csv, or keep the EdgeScores."
        )
    node = f"a{head[1]}.h{head[2]}"
    if head[3]:
        return f"{node}<{head[3]}>"
    return node


def _library_name(name: str) -> str:
    """Translate one of the benchmark's node names back: the inverse of `_benchmark_name`."""
    for library_name, benchmark_name in BENCHMARK_NAMES.items():
        if name == benchmark_name:
            return library_name
    match = re.fullmatch(r"a(\d+)\.h(\d+)(?:<([qkv])>)?|m(\d+)", name)
    if match is None:
        raise ValueError(f"no node {name!r}")
    layer, head, letter, mlp = match.groups()
    if mlp is not None:
        return f"MLP{mlp}"
    return ".".join(filter(None, [f"L{layer}H{head}", letter]))
