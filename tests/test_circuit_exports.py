"""A circuit leaves the library: pages, figures, networkx, GraphML, tables and circuit-tracer, read back."""

import gzip
import json
import re

import networkx
import pandas as pd
import pytest
import torch
from conftest import some_tokens
from test_graphs import CIRCUIT_TRACER

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing import tiny_model

READS = {"q": "queries", "k": "keys", "v": "values", "g": "gate"}


@pytest.fixture(scope="module")
def circuit():
    model = tiny_model("bridge/gpt2")
    tokens = some_tokens()
    clean, corrupted = tlens.freeze(model, tokens), tlens.freeze(model, tokens.flip(1))
    return circuits.edge_scores(clean, corrupted, 5, method="difference").circuit(60)


def facts(circuit):
    """What a file says of the whole circuit: what is explained, by which method, and of which model."""
    return {"target": "logit of '5'", "method": "difference", **circuit.provenance}


def expected(circuit):
    """Score and reading of every edge, by the node that it leads from and the place that it leads to."""
    rows = circuit.to_dataframe()[["source", "destination", "score"]].itertuples(index=False, name=None)
    readings = {}
    for source, destination, score in rows:
        head = re.fullmatch(r"(L\d+H\d+)\.([qkvg])", destination)
        node, letter = (destination, "") if head is None else head.groups()
        readings[source, node, READS.get(letter, "")] = score
    return readings


def of_network(network):
    return {(source, target, edge["reads"]): edge["weight"] for source, target, edge in network.edges(data=True)}


def test_networkx_has_every_edge_with_what_reads_it(circuit):
    network = circuit.to_networkx()
    assert of_network(network) == expected(circuit)
    assert {reads for *_, reads in of_network(network)} == {"queries", "keys", "values", ""}
    assert len({pair[:2] for pair in of_network(network)}) < len(circuit)  # several edges between the same two nodes
    kinds = {data["kind"] for _, data in network.nodes(data=True)}
    assert kinds == {"embedding", "head", "mlp", "target"}
    assert network.nodes["L1H0"] == {"name": "L1H0", "kind": "head", "layer": 1}
    assert networkx.is_directed_acyclic_graph(network)
    assert {"model", "dtype"} < facts(circuit).keys()
    assert network.graph == {**facts(circuit), "edges": len(circuit), "edges_of_model": int(circuit.exists.sum())}


def test_graphml_is_read_back(circuit, tmp_path):
    network = networkx.read_graphml(circuit.export(tmp_path / "circuit.graphml"))
    assert of_network(network) == pytest.approx(expected(circuit))
    assert facts(circuit).items() <= network.graph.items()
    text = (tmp_path / "circuit.graphml").read_text(encoding="utf-8")
    ids = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(set(ids)) == len(ids)
    assert circuit.save(tmp_path / "again.graphml").read_text(encoding="utf-8") == text


def test_node_link_json_is_read_back(circuit, tmp_path):
    content = json.loads(circuit.export(tmp_path / "circuit.json").read_text(encoding="utf-8"))
    network = networkx.node_link_graph(content, edges="links")
    assert network.is_multigraph()
    assert facts(circuit).items() <= network.graph.items()
    assert of_network(network) == pytest.approx(expected(circuit))


def test_the_table_is_read_back(circuit, tmp_path):
    frame = pd.read_csv(circuit.export(tmp_path / "circuit.csv"))
    pd.testing.assert_frame_equal(frame, circuit.to_dataframe())
    assert list(frame.columns) == ["source", "destination", "method", "target", "score"]
    assert {*frame["method"], *frame["target"]} == {"difference", "logit of '5'"}


def test_a_packed_circuit_is_the_same(circuit, tmp_path):
    plain, packed = (circuit.save(tmp_path / name) for name in ("circuit.json", "circuit.json.gz"))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert circuit.save(tmp_path / "again.json.GZ").read_bytes() == packed.read_bytes()
    for read in (circuits.Circuit.load, tlens.load):
        again = read(packed)
        assert (again.edges, again.method) == (circuit.edges, circuit.method)
        assert torch.equal(again.scores[again.exists], circuit.scores[circuit.exists].double())
    for damaged in (packed.read_bytes()[:-9], packed.read_bytes()[:40], gzip.compress(b"GIF89a")):
        packed.write_bytes(damaged)
        with pytest.raises(tlens.FileFormatError, match=r"circuit\.json\.gz: not a circuit"):
            tlens.load(packed)
    with pytest.raises(
        tlens.InvalidInputError, match=r"ends in '.csv.gz', which is not a supported ending.*\.json\.gz"
    ):
        circuit.save(tmp_path / "a.csv.gz")


def test_a_saved_circuit_says_its_method(circuit, tmp_path):
    assert circuits.Circuit.load(circuit.save(tmp_path / "circuit")).method == "difference"


@pytest.mark.parametrize(
    ("name", "format_", "what"),
    [
        ("a.json", None, r"networkx' node-link form, which export\(\) writes for other tools"),
        ("a.json", "circuit-tracer", r"circuit-tracer's JSON, which export\(\) writes for other tools"),
        ("a.graphml", None, "GraphML, which networkx.read_graphml reads"),
        ("a.html", None, "an HTML page"),
        ("a.csv", None, "a CSV table"),
    ],
)
def test_loading_an_export_says_what_the_file_is(circuit, tmp_path, name, format_, what):
    path = circuit.export(tmp_path / name, format_)
    with pytest.raises(tlens.FileFormatError, match=rf"{re.escape(name)}: {what}.*\.json or \.json\.gz, or in nothing"):
        circuits.Circuit.load(path)


def test_circuit_tracers_file_is_read_back(circuit, tmp_path):
    path = circuit.export(tmp_path / "circuit.json", "circuit-tracer", slug="mine", scan="tiny")
    data = json.loads(path.read_text(encoding="utf-8"))
    for part, fields in CIRCUIT_TRACER.items():
        for row in data[part] if isinstance(data[part], list) else [data[part]]:
            assert {name for name in fields if type(row[name]) not in fields[name]} == set()
    assert (data["metadata"]["slug"], data["metadata"]["scan"]) == ("mine", "tiny")
    assert facts(circuit).items() <= data["metadata"]["generation_settings"].items()
    assert data["metadata"]["info"]["description"].startswith(circuit.heading)
    assert circuit.to_circuit_tracer()["metadata"]["scan"] == circuit.provenance["model"]
    names = {node["node_id"]: node["clerp"] for node in data["nodes"]}
    assert len(names) == len(data["nodes"])
    assert len({(node["layer"], node["feature"]) for node in data["nodes"]}) == len(names)
    assert sum(node["is_target_logit"] for node in data["nodes"]) == 1
    pairs = [(link["source"], link["target"]) for link in data["links"]]
    assert len(set(pairs)) == len(pairs)  # its page keeps one link between two nodes
    assert {end for pair in pairs for end in pair} == set(names)
    found, into = {}, {}
    for link in data["links"]:
        source, target = names[link["source"]], names[link["target"]]
        reads, _, head = target.partition(" of ")
        if " of " in source:
            into[target, link["reads"]] = into.get((target, link["reads"]), 0) + link["weight"]
        elif head:
            assert link["reads"] == reads
            found[source, head, reads] = link["weight"]
        else:
            found[source, "target" if "target" in target else target, ""] = link["weight"]
    assert found == pytest.approx(expected(circuit))
    sums = {}
    for (_, head, reads), score in expected(circuit).items():
        if reads:
            sums[head, reads] = sums.get((head, reads), 0) + score
    assert into == pytest.approx(sums)


def test_circuit_tracers_own_class_reads_the_file(circuit):
    models = pytest.importorskip("circuit_tracer.frontend.graph_models", reason="circuit-tracer is not installed")
    read = models.Model(**circuit.to_circuit_tracer("mine"))
    assert len(read.nodes) == len(circuit.to_circuit_tracer()["nodes"])


def test_the_page_needs_no_network_and_shows_every_edge(circuit, tmp_path):
    html = circuit.export(tmp_path / "circuit.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert html.count("data-e=") == len(circuit)
    for reads in ("queries", "keys", "values"):
        assert html.count(f'data-reads="{reads}"') == sum(edge[2] == reads for edge in expected(circuit))
    assert "http" not in html
    assert circuit.to_html(7).count("data-e=") == 7
    assert circuit._repr_html_() == circuit.to_html()


def test_figures_tell_queries_keys_and_values_apart(circuit):
    pytest.importorskip("matplotlib").use("Agg")
    axes = circuit.plot()
    assert len(axes.patches) == len(circuit)
    styles = {str(patch.get_linestyle()) for patch in axes.patches}
    assert len(styles) >= 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["values", "queries", "keys"]
    names = {text.get_text() for text in axes.texts}
    assert names == set(circuit.to_networkx().nodes)
    assert len(circuit.plot(k=5).patches) == 5
    matrix = circuit.plot(kind="matrix").images[0].get_array()
    assert (matrix != 0).sum() == len(circuit)


def test_a_circuit_without_edges_says_so(circuit, tmp_path):
    none = circuits.Circuit(
        circuit.sources, circuit.destinations, circuit.scores, circuit.exists, torch.zeros_like(circuit.selection)
    )
    assert "No edge." in none.to_html()
    assert list(none.to_networkx().nodes) == ["target"]
    assert len(none.to_circuit_tracer()["nodes"]) == 1
    with pytest.raises(tlens.InvalidInputError, match="no edges"):
        none.plot()


def test_scores_that_are_no_numbers_are_null_or_refused(circuit, tmp_path):
    scores = torch.full_like(circuit.scores, torch.nan)
    unknown = circuits.Circuit(circuit.sources, circuit.destinations, scores, circuit.exists, circuit.selection)
    content = json.loads(unknown.export(tmp_path / "circuit.json").read_text(encoding="utf-8"))
    assert {link["weight"] for link in content["links"]} == {None}
    with pytest.raises(tlens.InvalidInputError, match=r"has the score nan, and circuit-tracer's links need numbers"):
        unknown.to_circuit_tracer()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda circuit, folder: circuit.export(folder / "a.xlsx"), "use one of html, json"),
        (lambda circuit, folder: circuit.export(folder / "a.html", "gexf"), "use one of 'html'"),
        (lambda circuit, folder: circuit.export(folder / "none" / "a.html"), "there is no folder"),
        (lambda circuit, folder: circuit.to_circuit_tracer(""), "slug: empty"),
        (lambda circuit, folder: circuit.to_circuit_tracer(node_threshold=2), "node_threshold=2"),
        (lambda circuit, folder: circuit.plot(kind="tree"), "use 'graph' or 'matrix'"),
        (lambda circuit, folder: circuit.to_html(0), "k=0"),
    ],
)
def test_what_cannot_be_written_is_refused(circuit, tmp_path, attempt, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        attempt(circuit, tmp_path)
    assert not list(tmp_path.iterdir())


def test_saving_says_what_each_ending_gives():
    text = f"{circuits.Circuit.__doc__}{circuits.Circuit.save.__doc__}"
    for ending in {".json", *circuits.Circuit._writers()}:
        assert f"``{ending}``" in text


@pytest.mark.parametrize("name", ["bridge/qwen3-next", "bridge/gpt2"])
def test_circuits_of_mixers_gates_and_hooks_leave_too(name, tmp_path):
    """Nodes that are neither heads nor MLPs: what stands in place of attention, a gate, and what a hook adds."""
    model = tiny_model(name)
    tokens = some_tokens()[:1]
    clean = tlens.freeze(model, tokens)
    with model.hooks([("blocks.0.hook_resid_post", lambda x, hook: x + 0.1)]):
        steered = tlens.freeze(model, tokens)
    edges = circuits.edge_scores(clean, steered, 5, method="difference")
    circuit = edges.circuit(int(edges.exists.sum()))
    assert of_network(circuit.to_networkx()).keys() == expected(circuit).keys()
    hook = next(source for source in circuit.sources if source.startswith("blocks.0"))
    assert hook in circuit.nodes
    circuit.export(tmp_path / "circuit.html")
    circuit.to_circuit_tracer()
    into_target = circuit.scores[:, -1][circuit.selection[:, -1]].sum()
    assert torch.isclose(into_target, edges.clean[0] - edges.corrupted[0])
