"""Circuits: some edges of a model."""

import gzip
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.drawing import figure, graphs, matrix, page, printed_graph, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import exchange
from tensorlens_tl.results.edges import sharing
from tensorlens_tl.results.edges.benchmark import benchmark_fields, benchmark_json
from tensorlens_tl.results.edges.names import ARROW, check_shape
from tensorlens_tl.results.entry import panel, provenance_note, shown_target
from tensorlens_tl.results.result import Result, array
from tensorlens_tl.results.storage import replacing

if TYPE_CHECKING:
    import networkx
    import pandas as pd

SHOWN_EDGES = 200
"""Edges of a circuit that a picture shows."""


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(Result):
    """Some edges of a model. Everything else is to carry what it carries for the corrupted prompt.

    `show`, `plot` and a notebook draw it as a graph, in which edges that a head reads by its queries, keys and values
    have lines of their own; `export` writes it for other tools.

    Attributes:
        sources, destinations, exists: as of `EdgeScores`.
        scores: by which it was chosen, `[source, destination]`.
        selection: which edges are in it, `[source, destination]`.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`.
        target: what the scores explain, in words.
        provenance: what they depend on besides the prompts, as of `Attribution`.
        method: how the scores were computed.
    """

    sources: list[str]
    destinations: list[str]
    scores: Float[Tensor, "source destination"]
    exists: Bool[Tensor, "source destination"]
    selection: Bool[Tensor, "source destination"]
    config: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    provenance: dict[str, str] = field(default_factory=dict[str, str])
    method: str = ""

    def __post_init__(self) -> None:
        check_shape(self.sources, self.destinations, self.exists, self.scores, self.selection)
        if bool((self.selection & ~self.exists).any()):
            raise InvalidInputError("Circuit: its selection has a pair that is no edge.")

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

    LOADABLE: ClassVar = ("", ".json", ".json.gz")

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

    def to_html(self, most: int = SHOWN_EDGES, *, style: bool = True) -> str:
        """The graph, layers upwards, and below it a matrix: a row for each node that an edge leads from, and a column
        for each place that one leads to.

        Where scripts run, small edges can be hidden, nodes pinned, grouped and searched for, and the picture saved.

        Args:
            most: how many edges the graph shows, the largest ones.
            style: with the style and the script that a page needs once.

        Raises:
            InvalidInputError: most below 1.
        """
        drawn = sharing.picture(self, exchange.checked_most(most))
        parts = ["<p>No edge.</p>"]
        if len(self):
            rows, columns, scores = self._matrix()
            grid = matrix.matrix(rows, columns, scores, label=self.heading, corner="from ↓ to →")
            parts = [graphs.graph(drawn), f"<details><summary>All edges as a matrix</summary>{grid}</details>"]
        count = f"{len(drawn.strengths)} of the circuit's {len(self)} edges; the model has {int(self.exists.sum())}"
        notes = [count, provenance_note(self.provenance)]
        return panel(self.heading, *parts, notes=notes, style=style)

    def plot(self, kind: str = "graph", *, most: int = SHOWN_EDGES, ax: Any = None) -> Any:
        """The graph, or the matrix, as a matplotlib figure (extra ``plot``); returns the axes.

        Args:
            kind: which picture.
            most: how many edges a graph shows, the largest ones; a matrix has all.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: a circuit without edges, no such kind, or most below 1.
            ImportError: matplotlib is not installed.

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> circuit = tlens.circuits.edge_scores(frozen, corrupted, " value", " name").circuit(20)
        >>> circuit.plot(), circuit.plot("matrix")
        (<Axes: ...>, <Axes: ...>)
        """
        if kind not in ("graph", "matrix"):
            raise InvalidInputError(f"plot: kind={kind!r}; use 'graph' or 'matrix'.")
        drawn = sharing.picture(self, exchange.checked_most(most))
        rows, columns, scores = self._matrix()
        if not rows:
            raise InvalidInputError("plot: this circuit has no edges.")
        if kind == "graph":
            return printed_graph.graph(drawn, self.heading, ax)
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
        return sharing.networkx_graph(self)

    def to_circuit_tracer(
        self, slug: str = "tensorlens", *, scan: str | None = None, node_threshold: Any = 1.0
    ) -> dict[str, Any]:
        """The circuit as circuit-tracer writes graphs and Neuronpedia shows them.

        What a head reads is a node before it (``"L1H0.k"``), with a link into the head; see
        `tensorlens_tl.results.edges.sharing`. The weight of a link is the score of the edge.

        Args:
            slug: the graph's name there: ``{slug}.json``.
            scan: the model's name there, by default the model's own.
            node_threshold: as in `ContributionGraph.to_circuit_tracer`.

        Raises:
            InvalidInputError: no slug, a threshold outside [0, 1], or a score that is no finite number.
        """
        exchange.check_names(slug, node_threshold)
        return sharing.circuit_tracer(self, slug, scan, float(node_threshold))

    PAGE_EDGES: ClassVar = 600

    def export(self, path: str | os.PathLike[str], format: str | None = None, **options: Any) -> Path:
        """Write the circuit for others to read; `save` and `load` keep it for this library and the benchmark.

        Args:
            path: where to.
            format: ``"html"`` (an interactive page that needs no network), ``"circuit-tracer"``, ``"graphml"``,
                ``"json"`` (networkx' node-link form) or ``"csv"`` (edges); by default what the name ends in says.
            options: of `to_html` or `to_circuit_tracer`.

        Raises:
            InvalidInputError: no such format or folder.

        >>> import pathlib, tempfile
        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> circuit = tlens.circuits.edge_scores(frozen, corrupted, " value", " name").circuit(20)
        >>> circuit.export(pathlib.Path(tempfile.mkdtemp()) / "circuit.graphml").name
        'circuit.graphml'
        """
        return exchange.write(self, path, format, options)

    def show(self, k: int = 10) -> None:
        """Display the graph in a notebook; elsewhere print the k edges of largest absolute score.

        Args:
            k: how many.
        """
        if page.display_in_notebook(self.to_html):
            return
        columns = ["source", "destination", "score"]
        lines = self.to_dataframe()[columns].head(k).itertuples(index=False, name=None)
        rows = [(source + ARROW + destination, number(score)) for source, destination, score in lines]
        title = f"{self.heading} · {len(rows)} shown"
        terminal.show_table(title, ("edge", "score"), rows, [], left=("edge",))

    def save(self, path: str | os.PathLike[str], *, batch: int | None = None) -> Path:
        """Write one file; what its name ends in says which kind. An older file is replaced in one step.

        | a name ends in | the file is |
        | --- | --- |
        | nothing, ``.json`` | the Mechanistic Interpretability Benchmark's JSON, which `load` reads back |
        | ``.json.gz`` | the same, packed by gzip: the format lists every edge of the model, and is large |
        | ``.html`` | a page with the graph, which opens without a network |
        | ``.graphml`` | a multigraph for Gephi, Cytoscape or yEd |
        | ``.csv``, ``.parquet`` | the table of `to_dataframe`, a line for each edge |
        | ``.pdf``, ``.svg``, ``.png`` | the figure that `plot` draws |

        The node-link JSON of networkx and the JSON of circuit-tracer are written by `export`.

        Args:
            path: of the file.
            batch: None: a circuit is of no single prompt.

        Returns:
            The path.

        Raises:
            InvalidInputError: no such folder, or a name with another ending; a `batch`; or scores that are infinite, or
                nodes without a name in the benchmark's JSON.
            ImportError: a figure, and matplotlib is not installed.
            OSError: it cannot be written, as on a full disk.
        """
        return super().save(path, batch=batch)

    @classmethod
    def _writers(cls) -> Mapping[str, Callable[[Any], bytes]]:
        written = {suffix: writer for suffix, writer in super()._writers().items() if suffix not in cls.LOADABLE}
        return {**written, ".graphml": partial(_exchanged, "graphml"), ".html": partial(_exchanged, "html")}

    def _keep(self, path: Path) -> Path:
        """Write the JSON of the Mechanistic Interpretability Benchmark (`tensorlens_tl.results.edges.benchmark`)."""
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
        return cls(**benchmark_fields(path))


def _exchanged(format: str, circuit: Circuit) -> bytes:
    return exchange.WRITERS[format](circuit, {})
