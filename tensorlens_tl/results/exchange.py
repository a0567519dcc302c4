"""Export of graphs to other formats: circuit-tracer's JSON, node-link JSON and GraphML.

circuit-tracer's schema is that of `circuit_tracer.frontend.graph_models` (version 0.5, ``schema_version`` 1), which
Neuronpedia reads as well. Its pages know four values of `feature_type` and draw any other as a node with a name:

* ``embedding``: token embeddings; ``logit``: the target, whatever it is;
* ``cross layer transcoder`` and ``mlp reconstruction error``: features by layer and number, and errors;
* our own, with the node's name and token as the label `clerp` and without a feature's examples: ``attention head``,
  ``mlp``, ``neuron``, ``mixer``, ``whitening``, ``bias``, ``other embedding`` (positions, token types) and ``other
  features`` (the sum of features without a node, the mean that a dictionary subtracts, and a second dictionary in the
  same block, whose feature numbers would be confused with the first's).

`activation` holds a node's weight, its contribution to the target. `influence` is the cumulative share of Σ abs(weight)
up to this node, largest first, as circuit-tracer's own threshold pruning expects. b_U, which is not a node in this
library, becomes one, so that the links into the logit sum to it. In addition to circuit-tracer's fields, nodes have
``bias`` (their own part of the weight), links into heads have ``reads`` (values, queries, keys or a gate), and the
metadata state which library wrote the file and how exactly the sums hold.
"""

import io
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tensorlens_tl._arguments import check_choice, real_number
from tensorlens_tl.drawing.marks import visible
from tensorlens_tl.drawing.page import page
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.texts import joined
from tensorlens_tl.results.scores import Scored
from tensorlens_tl.results.storage import check_folder

FORMATS = ("html", "json", "circuit-tracer", "graphml", "csv")
"""Export formats; ``json`` is networkx' node-link form."""

SYNONYMS = {"neuronpedia": "circuit-tracer", "attribution-graph": "circuit-tracer", "networkx": "json"}
"""Other names of these formats; Neuronpedia reads circuit-tracer's JSON."""

SUFFIXES = {".html": "html", ".json": "json", ".graphml": "graphml", ".csv": "csv"}

FEATURE_TYPES = {
    "embedding": "embedding",
    "whitening": "whitening",
    "head": "attention head",
    "mixer": "mixer",
    "mlp": "mlp",
    "neuron": "neuron",
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "bias": "bias",
    "target": "logit",
}


def format_of(path: Path, name: str | None) -> str:
    """Return the format of this name or, by default, of the file's suffix."""
    known = f"use one of {', '.join(FORMATS)}"
    suffix = path.suffix.lower()
    elsewhere = "A figure (.pdf, .svg, .png) is what save(path) writes and plot() draws."
    if name is None and suffix not in SUFFIXES:
        raise InvalidInputError(f"format: {path.name!r} does not end in {', '.join(SUFFIXES)}; {known}. {elsewhere}")
    if name is not None:
        check_choice("format", name, FORMATS, SYNONYMS)
    return name or SUFFIXES[suffix]


class SharedGraph(Scored):
    """A graph that can be exported to networkx, Gephi, circuit-tracer and Neuronpedia."""

    PAGE_EDGES: ClassVar = 600
    """How many edges a page shows if no script can hide any."""
    DRAWN_ARE_LISTED: ClassVar = False

    target: str
    provenance: Mapping[str, str]

    @abstractmethod
    def to_networkx(self) -> Any:
        """Return the graph as a networkx graph (networkx comes with torch)."""

    @abstractmethod
    def _traced(self) -> "Traced":
        """Return the graph in circuit-tracer's fields."""

    def to_circuit_tracer(
        self, slug: str = "tensorlens", *, scan: str | None = None, node_threshold: Any = 1.0
    ) -> dict[str, Any]:
        """Return the graph in circuit-tracer's format, which Neuronpedia also shows.

        See `tensorlens_tl.results.exchange` for the mapping. A circuit's link weights are edge scores, and each input
        of a head is a node before it (``"L1H0.k"``), with a link into the head.

        Args:
            slug: the graph's name; the file is named ``{slug}.json``.
            scan: the model's name; default: the name in the provenance.
            node_threshold: the share of Σ abs(weight) covered by the nodes shown at first, largest first.

        Raises:
            InvalidInputError: an empty slug, a threshold outside [0, 1], or a score that is not finite.
        """
        if not slug:
            raise InvalidInputError("slug: empty; it names the graph and its file.")
        words = "pass a share of all nodes' size, from 0 to 1"
        node_threshold = real_number("node_threshold", node_threshold, lambda x: 0 <= x <= 1, words)
        import tensorlens_tl

        traced = self._traced()
        target = next(node["node_id"] for node in traced.nodes if node["is_target_logit"])
        return {
            "metadata": {
                "slug": slug,
                "scan": self.provenance.get("model", "custom") if scan is None else scan,
                "transcoder_list": [],
                "prompt_tokens": traced.tokens,
                "prompt": joined(traced.tokens),
                "node_threshold": float(node_threshold),
                "schema_version": 1,
                "info": {
                    "description": traced.description,
                    "generator": {"name": "tensorlens_tl", "version": tensorlens_tl.__version__},
                },
                "generation_settings": {**traced.settings},
            },
            "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": target, "sg_pos": ""},
            "nodes": traced.nodes,
            "links": traced.links,
        }

    def export(self, path: str | os.PathLike[str], format: str | None = None, **options: Any) -> Path:
        """Write the graph for other tools; `save` writes files for this library, or a circuit for the benchmark.

        Args:
            path: the file.
            format: ``"html"`` (an interactive page that needs no network), ``"circuit-tracer"``, ``"graphml"``,
                ``"json"`` (networkx' node-link form) or ``"csv"`` (edges); by default from the file's ending.
            options: options of `to_html` or `to_circuit_tracer`.

        Raises:
            InvalidInputError: unknown format, or no such folder.

        >>> import pathlib, tempfile
        >>> graph = tlens.circuits.contribution_graph(frozen, " value", threshold=0.1)
        >>> graph.export(pathlib.Path(tempfile.mkdtemp()) / "graph.graphml").name
        'graph.graphml'
        """
        path = Path(path)
        chosen = format_of(path, format)
        check_folder(path, "export")
        content = WRITERS[chosen](self, options)  # before opening the file: an error must not empty an older one
        try:
            path.write_bytes(content)
        except OSError as error:
            raise InvalidInputError(f"export: cannot write {path}: {error.strerror}.") from error
        return path

    @classmethod
    def _writers(cls) -> Mapping[str, Callable[[Any], bytes]]:
        exchanged = {suffix: partial(WRITERS[format], options={}) for suffix, format in SUFFIXES.items()}
        written = {**super()._writers(), **exchanged}
        return {suffix: writer for suffix, writer in written.items() if suffix not in cls.LOADABLE}


class Traced(NamedTuple):
    """A graph in circuit-tracer's fields, with the target among its nodes, and facts about the whole."""

    nodes: list[dict[str, Any]]
    links: list[dict[str, Any]]
    tokens: list[str]
    description: str
    settings: Mapping[str, Any]


def node_of(
    name: str, feature_type: str, layer: str, pos: int, number: int, weight: float, token: str, bias: float = 0.0
) -> dict[str, Any]:
    """Return a node in circuit-tracer's fields."""
    return {
        "node_id": f"{name}_{pos}",
        "feature": number,
        "layer": layer,
        "ctx_idx": pos,
        "feature_type": feature_type,
        "token_prob": 0.0,
        "is_target_logit": False,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{name}-{pos}",
        "clerp": f"{name} at {visible(token)}",
        "influence": None,
        "activation": weight,
        "bias": bias,
    }


def _as_html(graph: SharedGraph, options: Mapping[str, Any]) -> bytes:
    return page(graph.heading, graph.to_html(**{"k": graph.PAGE_EDGES, **options}, style=False)).encode()


def _as_json(graph: SharedGraph, options: Mapping[str, Any]) -> bytes:
    digraph = graph.to_networkx(**options)
    linked = {
        "directed": True,
        "multigraph": digraph.is_multigraph(),
        "graph": digraph.graph,
        "nodes": [{"id": number, **node} for number, node in digraph.nodes(data=True)],
        "links": [
            {"source": source, "target": target, **{name: null_for_nan(value) for name, value in edge.items()}}
            for source, target, edge in digraph.edges(data=True)
        ],
    }
    return _json_bytes(linked)


def null_for_nan(value: Any) -> Any:
    """Return None (JSON's null) for NaN, which JSON lacks; return other values unchanged."""
    if isinstance(value, float) and isnan(value):
        return None
    return value


def _as_graphml(graph: SharedGraph, options: Mapping[str, Any]) -> bytes:
    import networkx

    digraph = graph.to_networkx(**options)
    file = io.BytesIO()
    for values in (digraph.graph, *(node for _, node in digraph.nodes(data=True))):
        for name in {"token", "target"} & set(values):
            values[name] = visible(values[name])  # XML does not allow control characters
    edge_id = None
    if digraph.is_multigraph():
        edge_id = "name"
    networkx.write_graphml(digraph, file, edge_id_from_attribute=edge_id)
    return file.getvalue()


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    """Encode as JSON, with numpy numbers as Python's; raise for numbers that JSON lacks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=lambda number: number.item()).encode()


WRITERS: Mapping[str, Callable[..., bytes]] = {
    "html": _as_html,
    "json": _as_json,
    "circuit-tracer": lambda graph, options: _json_bytes(graph.to_circuit_tracer(**options)),
    "graphml": _as_graphml,
    "csv": lambda graph, options: graph.to_dataframe(**options).to_csv(index=False).encode(),
}
