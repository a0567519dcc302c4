"""Circuits for other tools: as pictures, as networkx' graphs, and as circuit-tracer's JSON.

A head is one node, and its queries, keys and values are told apart by its edges: each has ``reads``. Between the same
two nodes there can be three of them, so that the graph is a multigraph.

circuit-tracer's files and pages have one link between two nodes. What a head reads is a node of its own there, such as
``L1H0.k``, and a link leads from it into the head, whose weight is the sum of the edges read that way (``reads`` says
so too). Circuits are about no position: all nodes stand at the first one.
"""

import re
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

from tensorlens_tl.drawing import graphs
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import exchange
from tensorlens_tl.results.edges.names import ARROW, HEAD, TARGET, kind_of, node_read_at, place

if TYPE_CHECKING:
    import networkx

Circuit = Any
"""A `Circuit`, whose module imports this one."""

LETTERS = {"q": "queries", "k": "keys", "v": "values", "g": "gate"}
EVERYWHERE = "every position"
"""The one token of a circuit in circuit-tracer's files."""


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


def edges_of(circuit: Circuit) -> list[tuple[str, str, float]]:
    """Source, destination and score of every edge, in the order of the forward pass."""
    return [
        (circuit.sources[source], circuit.destinations[destination], float(circuit.scores[source, destination]))
        for source, destination in circuit.selection.nonzero().tolist()
    ]


def nodes_of(circuit: Circuit) -> list[str]:
    """The nodes that edges lead from or to, in the order of the forward pass; the target is the last, always."""
    ends = {node_read_at(destination) for _, destination, _ in edges_of(circuit)}
    return sorted({*circuit.nodes, *ends, TARGET}, key=place)


def networkx_graph(circuit: Circuit) -> "networkx.MultiDiGraph":
    """See `Circuit.to_networkx`."""
    import networkx

    graph = networkx.MultiDiGraph(edges=len(circuit), edges_of_model=int(circuit.exists.sum()))
    graph.graph.update(_facts(circuit))
    for name in nodes_of(circuit):
        graph.add_node(name, name=name, kind=kind_of(name), layer=layer_of(name))
    for source, destination, score in edges_of(circuit):
        name = source + ARROW + destination
        graph.add_edge(source, node_read_at(destination), name, name=name, weight=score, reads=reading(destination))
    return graph


def _facts(circuit: Circuit) -> dict[str, str]:
    """What files say of the whole circuit."""
    return {**circuit.provenance, "target": circuit.target, "method": circuit.method}


def picture(circuit: Circuit, most: int) -> graphs.GraphPicture:
    """A circuit's nodes by layer, with the edges of largest absolute score, of which there are at most so many."""
    every = sorted(edges_of(circuit), key=lambda edge: -abs(edge[2]) if not isnan(edge[2]) else 0.0)
    edges = every[:most]
    used = {TARGET}.union(*({source, node_read_at(destination)} for source, destination, _ in edges))
    names = [name for name in nodes_of(circuit) if name in used]
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


def circuit_tracer(circuit: Circuit, slug: str, scan: str | None, threshold: float) -> dict[str, Any]:
    """See `Circuit.to_circuit_tracer`.

    Raises:
        InvalidInputError: a score that is no finite number.
    """
    edges = edges_of(circuit)
    for source, destination, score in edges:
        if not isfinite(score):
            raise InvalidInputError(
                f"export: {source}{ARROW}{destination} has the score {score}, and circuit-tracer's links need numbers."
            )
    last = circuit.config.get("n_layers", 1 + max(map(layer_of, nodes_of(circuit))))
    readers = {destination for _, destination, _ in edges if reading(destination)}
    names = sorted({*nodes_of(circuit), *readers}, key=place)
    nodes = [_node(name, number, last) for number, name in enumerate(names, start=2)]
    ids = {name: node["node_id"] for name, node in zip(names, nodes, strict=True)}
    links = [
        {"source": ids[source], "target": ids[end], "weight": score, "reads": reading(end)}
        for source, end, score in edges
    ]
    for reader in names:
        if reading(reader):
            into = sum(score for _, end, score in edges if end == reader)
            head = ids[node_read_at(reader)]
            links.append({"source": ids[reader], "target": head, "weight": into, "reads": reading(reader)})
    model = scan
    if model is None:
        model = circuit.provenance.get("model", "custom")
    description = f"{circuit.heading}; the model has {int(circuit.exists.sum())}, and weights are the scores of edges"
    settings = {**_facts(circuit), **circuit.config}
    facts = exchange.metadata(slug, model, [EVERYWHERE], threshold, description, settings)
    return {"metadata": facts, "qParams": exchange.page_state(ids[TARGET]), "nodes": nodes, "links": links}


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
