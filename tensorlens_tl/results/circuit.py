"""Edges between the parts of a model: their names, their scores, circuits of some of them, and what files hold.

An edge leads from what one node writes to what a later one reads. Nodes that write are *sources*: the first block's
input (``"embed"``), heads, MLPs. What reads are *destinations*: a head's queries, keys and values (``"L1H0.q"``,
``"L1H0.k"``, ``"L1H0.v"``) and a gate of what it gives (``"L1H0.g"``), MLPs, and the target. An edge is called
``"L0H3 → L1H0.k"``, one into cross-attention ``"L0H3 → L2.cross.H0.k"``.

A circuit is shown as a picture, as networkx' graph, and as circuit-tracer's JSON. A head is one node, and its queries,
keys and values are told apart by its edges: each has ``reads``. Between the same two nodes there can be three of them,
so that the graph is a multigraph.

circuit-tracer's files and pages have one link between two nodes. What a head reads is a node of its own there, such as
``L1H0.k``, and a link leads from it into the head, whose weight is the sum of the edges read that way (``reads`` says
so too). Circuits are about no position: all nodes stand at the first one.

Files of circuits are the JSON of the Mechanistic Interpretability Benchmark (Mueller et al. 2025): an object with
`cfg`, `nodes` (name → ``{"in_graph": …}``) and `edges` (name → ``{"score": …, "in_graph": …}``); nodes are called
``input``, ``a0.h1``, ``m0``, ``logits``, edges ``a0.h1->m0`` or, into a head, ``input->a0.h1<q>``.
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
from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.results import exchange
from tensorlens_tl.results.entry import check_batch, mean_title, prompts_in_words, shown_target, targets_of_queries
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
"""What heads are called: of self-attention ``"L0H3"``, of cross-attention ``"L2.cross.H3"``."""
READS = {"q": "queries", "k": "keys", "v": "values", "g": "gate"}
"""What a head reads, by the letter in the names of its edges, in the order of the forward pass."""

EXPORTED = {
    frozenset(["graph", "nodes", "links"]): "networkx' node-link form, which export() writes for other tools",
    frozenset(["metadata", "nodes", "links"]): "circuit-tracer's JSON, which export() writes for other tools",
}
"""What a JSON file is that has these names."""

OF_ENDING = {".graphml": "GraphML, which networkx.read_graphml reads"}
"""What kind of XML it is."""

BENCHMARK_NAMES = {"embed": "input", TARGET: "logits"}

EVERYWHERE = "every position"
"""The one token of a circuit in circuit-tracer's files."""

SHOWN_EDGES = 200
"""Edges of a circuit that a picture shows."""


def node_read_at(destination: str) -> str:
    """The node that a destination belongs to: ``"L0H3"`` of ``"L0H3.q"``."""
    return re.sub(r"(H\d+)\.[qkvg]$", r"\1", destination)


def place(name: str) -> tuple[int, int, str, int]:
    """Return where a name comes in the forward pass: a layer's heads (and cross-attention's), its MLP, what hooks
    add."""
    if name == TARGET:
        return sys.maxsize, 0, "", 0
    match = re.fullmatch(r"L(\d+)(\.cross\.)?H(\d+)(?:\.([qkvg]))?", name)
    if match is not None:
        layer, cross, head, letter = match.groups()
        order = "" if letter is None else str(list(READS).index(letter))
        return int(layer), 0, "4" * bool(cross) + order, int(head)  # cross-attention comes after all that
    number = re.search(r"\d+", name)
    if number is None:
        return -1, 0, "", 0
    return int(number[0]), {"mixer": 0, "mlp": 1}.get(kind_of(name), 2), name, 0  # what hooks add comes last


def kind_of(name: str) -> str:
    """What a node is: embedding, head, mixer, mlp, target, or a bias, which a hook adds."""
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
    """A score for every edge and prompt: what the target loses when the edge carries its corrupted value.

    `top`, `show` and `plot` take `batch`; without it they show the mean over prompts.

    Attributes:
        sources, destinations: names along the two axes, in the order of the forward pass.
        scores: `[batch, source, destination]`, zero where there is no edge.
        exists: which pairs are edges, `[source, destination]`.
        clean, corrupted: the target's number for the two prompts, before any final soft cap, `[batch]`.
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
        prompts = prompts_in_words(len(self.scores))
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
        """Each edge's score less another result's: of another target, method or model, for as many prompts.

        Raises:
            InvalidInputError: other edges, or another number of prompts.
        """
        if not isinstance(other, EdgeScores):
            return NotImplemented
        same = self.sources == other.sources and self.destinations == other.destinations
        if not same or self.scores.shape != other.scores.shape or not torch.equal(self.exists, other.exists):
            raise InvalidInputError(
                f"a − b: {len(self)} and {len(other)} edges of {len(self.scores)} and {len(other.scores)} prompts are "
                "not the same ones; subtract scores of the same edges and as many prompts."
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
        """The mean over prompts, as of one prompt."""
        means = {name: getattr(self, name).mean(0, keepdim=True) for name in ("scores", "clean", "corrupted")}
        over = prompts_in_words(len(self.scores))
        return self._plain(**means, by_position=None, target=f"{self.target}, mean of {over}")

    def _plain(self, **fields: Any) -> "EdgeScores":
        """The same with other fields, as scores of no further kind: what these have besides is of single runs."""
        stated = {one.name: getattr(self, one.name) for one in dataclass_fields(EdgeScores)}
        return EdgeScores(**stated | fields)

    def _parts(self, batch: int | None = None) -> Parts:
        """The edges of one prompt, or of the mean over prompts; those of largest score first."""
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
        """Return the circuit of the best edges, without those on no path from the input to the target.

        Args:
            edges: how many are chosen, before pruning: in a small circuit of a deep model half of them may go.
            batch: choose by one prompt's scores, or (None) by the mean.
            absolute: choose by size; else the most positive first.
            choice: ``"top"`` takes the best edges anywhere; ``"greedy"`` the best of those that lead into what is
                already reached, from the target backwards.
            prune: False keeps the edges on no such path, which have no effect.

        Raises:
            InvalidInputError: more edges than there are, or no such choice or prompt.

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
        """One line per prompt and edge: batch, source, destination, method, target, score."""
        axes = {"batch": None, "source": self.sources, "destination": self.destinations}
        targets = targets_of_queries(self.target, torch.zeros(len(self.scores), 1, dtype=torch.long))
        columns = {"method": self.method, "target": np.array(targets, dtype=object)[:, 0]}
        columns |= {name: column.cpu() for name, column in self._columns().items()}
        return long_table(self, self.scores, axes, real=self.exists.cpu(), **columns)

    def _columns(self) -> dict[str, Tensor]:
        """Further columns of a table."""
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
    """All edges in the order in which circuits take them in, by their number in the flattened matrix of scores."""
    check_choice("choice", choice, CHOICES)
    if not bool(torch.isfinite(scores[exists]).all()):
        raise InvalidInputError("edges: some of their scores are not finite, so that they have no order.")
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
    """Drop the edges on no path from the input (or what hooks add) to the target; leading axes are many circuits."""
    node_of = [node_read_at(name) for name in destinations]
    entries = torch.tensor(
        [[node == name for node in node_of] for name in sources], device=selection.device
    )  # [source, destination]: what the node reads at
    fed = torch.zeros(selection.shape[:-1], dtype=torch.bool, device=selection.device)
    fed[..., ~entries.any(1)] = True  # what reads nothing: the embedding, and what hooks add
    reading = entries.any(1).nonzero()[:, 0].tolist()
    for source in reading:  # in the order of the forward pass: what feeds a node is known before it
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
    """Some edges of a model; all others carry what they carry for the corrupted prompt.

    `show`, `plot` and `to_html` draw the k largest edges as a graph, with lines of their own for a head's queries, keys
    and values; ``plot(kind="matrix")`` draws all. `save` writes the Mechanistic Interpretability Benchmark's JSON,
    which `load` reads, to a name without an ending, in ``.json`` or ``.json.gz`` (every edge of the model is in it); a
    multigraph for Gephi, Cytoscape or yEd to ``.graphml``; and pages, tables and figures as every result does. `export`
    writes the JSON of networkx and of circuit-tracer.

    Attributes:
        sources, destinations, exists: as in `EdgeScores`.
        scores: by which it was chosen, `[source, destination]`.
        selection: which edges are in it, `[source, destination]`.
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
        return [ARROW.join((self.sources[source], self.destinations[end])) for source, end in pairs]

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
        axes = {"source": self.sources, "destination": self.destinations}
        facts = {"method": self.method, "target": self.target}
        frame = long_table(self, self.scores, axes, real=self.selection.cpu(), **facts)
        return frame.sort_values(
            "score", key=abs, ascending=False, kind="stable", na_position="first", ignore_index=True
        )

    def _matrix(self) -> tuple[list[str], list[str], np.ndarray]:
        """The sources and destinations that it has edges at, and the scores of its edges between them."""
        rows = self.selection.any(1).nonzero()[:, 0].tolist()
        columns = self.selection.any(0).nonzero()[:, 0].tolist()
        scores = array(self.scores.masked_fill(~self.selection, 0.0))[np.ix_(rows, columns)]
        return [self.sources[row] for row in rows], [self.destinations[column] for column in columns], scores

    def _parts(self) -> Parts:
        """Its edges."""
        return Parts(self.scores[self.selection].double().cpu(), self.edges)

    def _bars(self, k: int) -> Bars:
        lines = [(entry.name, entry.score) for entry in self.top(k)]
        return Bars(f"{self.heading} · {len(lines)} shown", lines, columns=("edge", "score"))

    def _html(self, k: int) -> str:
        """Draw the k largest edges as a graph, layers upwards, above a matrix of source nodes and destinations.

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
        """Return the circuit as a networkx multigraph (networkx comes with torch).

        Nodes have `name`, `kind` (embedding, head, mlp, target) and `layer` (−1 for none); edges `name`, `weight` (the
        score) and `reads` (a head's queries, keys or values, else empty); the graph `target`, `method`, `edges`,
        `edges_of_model` and every fact of `provenance`.

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
        """Write the benchmark's JSON; a score that is NaN is null."""
        sources = [_benchmark_name(name) for name in self.sources]
        destinations = [_benchmark_name(name) for name in self.destinations]
        used = self.selection.any(1).tolist()
        nodes = {name: {"in_graph": is_used} for name, is_used in zip(sources, used, strict=True)}
        if bool(self.scores[self.exists].isinf().any()):
            raise InvalidInputError("save: some scores are infinite, which JSON has no number for.")
        scores, selection = self.scores.tolist(), self.selection.tolist()
        edges = {
            f"{sources[s]}->{destinations[d]}": {
                "score": exchange.null_for_nan(scores[s][d]),
                "in_graph": selection[s][d],
            }
            for s, d in self.exists.nonzero().tolist()
        }
        facts = {"target": self.target, "method": self.method, "provenance": self.provenance}
        facts = {name: fact for name, fact in facts.items() if fact}  # the benchmark reads past them
        nodes["logits"] = {"in_graph": True}
        content = json.dumps({"cfg": self.config, "nodes": nodes, "edges": edges, **facts}, allow_nan=False).encode()
        if path.suffix.lower() == ".gz":
            content = gzip.compress(content, mtime=0)  # without a time, the same circuit gives the same file
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Circuit":
        """Read the JSON that `save` wrote, or the benchmark's, packed by gzip or not.

        Scores and edges of neurons are not read; null is NaN. Files that `export` wrote cannot be loaded.

        Raises:
            FileFormatError: another kind of file, or one without the edges outside the circuit.
            OSError: there is no such file.
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
    return READS[match[1]]


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


def _content(path: Path) -> Any:
    """The JSON in a file that is not plainly of another kind, such as what `export` writes for other tools."""
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
    """JSON's true or false; a text such as "false" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f'"{name}" is {value!r}, not true or false')
    return value


def _score(value: Any) -> float:
    """A finite number, or NaN for null."""
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'"score" is {value!r}, not a number or null')
    if not isfinite(value):
        raise ValueError(f'"score" is {value!r}, which no JSON holds')
    return float(value)


def _check_all_edges(
    path: str | os.PathLike[str], sources: Sequence[str], pairs: Sequence[tuple[str, ...]], parallel: bool
) -> None:
    """Refuse a file whose edges are not those of its nodes: every node to whatever comes later."""
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
            f"{path}: {ARROW.join(min(wrong))!r} is no edge: what it leads from does not come before what it leads to."
        )


def _benchmark_name(name: str) -> str:
    """``"L0H3.q"`` as ``"a0.h3<q>"``, ``"MLP1"`` as ``"m1"``, the first block's input as ``"input"``."""
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
    """The library's name of one of the benchmark's nodes: the inverse of `_benchmark_name`."""
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
