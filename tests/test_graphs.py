"""Contribution graphs with split nodes, and how they are handed on: sums hold for parts, in files, and elsewhere.

The independent computation is the live model, held fixed by hooks: taking one neuron, or what one head reads from one
token, away there must cost exactly that node's weight.
"""

import itertools
import json
import types
from collections import defaultdict

import networkx
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import some_tokens, tolerance
from test_circuits import token_logit

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits import graph_nodes
from tensorlens_tl.results import graph as result_module
from tensorlens_tl.testing import model_names, tiny_model

FAMILIES = [
    name
    for name in ("hooked/gqa-ungrouped", "hooked/sandwich", "bridge/gpt2", "bridge/neox", "bridge/llama", "bridge/bert")
    if name in model_names()
]
"""Every block layout, and both classes of models."""


def entering(made):
    return made.edges.groupby("target")["weight"].sum().reindex(made.nodes.index, fill_value=0.0)


def scale(made):
    return float(made.nodes["weight"].abs().max())


# ------------------------------------------------------------------ neurons, and heads by source token


@pytest.mark.parametrize("asked", [{"neurons": 2}, {"neurons": 0.2, "sources": 0.3}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_sums_hold_for_parts(model_named, name, asked):
    one = tlens.freeze(model_named(name), some_tokens(batch=1))
    made, plain = (circuits.contribution_graph(one, 5, 7, threshold=0, **split) for split in (asked, {}))
    atol = tolerance(name) * max(scale(made), 1)
    nodes = made.nodes
    inner = nodes["kind"].isin(["head", "mlp", "neuron", "target"])
    assert float((entering(made) + nodes["bias"] - nodes["weight"])[inner].abs().max()) < atol
    assert made.gap < tolerance(name)
    sources = nodes["kind"].isin(["embedding", "bias"])
    assert nodes["weight"][sources].sum() + nodes["bias"][~sources].sum() == pytest.approx(made.total, abs=atol)
    assert made.total == plain.total
    assert made.completeness == pytest.approx(1.0)

    # parts sum to what they are part of: weights, own biases, and edges between whole nodes
    kinds = set(nodes["kind"])
    assert ("neuron" in kinds) is ("neurons" in asked)
    assert nodes["name"].str.contains("←").any() == ("sources" in asked)
    whole = nodes["name"].str.replace(r"(\.N\d+|←\d+|\.rest)$", "", regex=True)
    for column in ("weight", "bias"):
        summed = nodes.groupby([whole, nodes["pos"]])[column].sum()
        expected = plain.nodes.set_index(["name", "pos"])[column]
        assert float((summed - expected).abs().max()) < atol
        assert len(summed) == len(expected)

    def between(found, names):
        frame = found.edges.assign(
            **{end: [(names[n], found.nodes["pos"][n]) for n in found.edges[end]] for end in ("source", "target")}
        )
        return frame.groupby(["source", "target"])["weight"].sum()

    gap = between(made, whole).sub(between(plain, plain.nodes["name"]), fill_value=0)
    assert float(gap.abs().max()) < atol


def test_parts_are_the_largest(model_named):
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    few = circuits.contribution_graph(one, 5, threshold=0, neurons=2, sources=1).nodes
    every = circuits.contribution_graph(one, 5, threshold=0, neurons=10**6, sources=10**6).nodes
    for kind, most in (("neuron", 2), ("head", 1)):
        chosen = few[(few["kind"] == kind) & (few["part"] >= 0)]
        assert chosen.groupby([chosen["name"].str.split(r"\.|←", regex=True).str[0], "pos"]).size().max() == most
        parts = every[(every["kind"] == kind) & (every["part"] >= 0)].set_index(["name", "pos"])["weight"]
        for (name, pos), weight in chosen.set_index(["name", "pos"])["weight"].items():
            stem = name.split("←")[0] if kind == "head" else name.split(".")[0]
            others = [w for (n, p), w in parts.items() if n.startswith((f"{stem}←", f"{stem}.N")) and p == pos]
            assert parts[name, pos] == pytest.approx(weight, rel=1e-12)
            assert sum(abs(other) > abs(weight) * (1 + 1e-9) for other in others) < most
    large = circuits.contribution_graph(one, 5, threshold=0, neurons=0.25).nodes
    sizes = every[every["kind"] == "neuron"]["weight"].abs()
    assert (large["kind"] == "neuron").sum() == (sizes >= 0.25 * sizes.max()).sum()


@pytest.mark.parametrize("name", [name for name in FAMILIES if "sandwich" not in name])
def test_parts_are_worth_what_their_removal_costs(model_named, name):
    """In the live model, held fixed: one neuron set to zero, and one token's share taken out of a head."""
    one = tlens.freeze(model_named(name), some_tokens(batch=1))
    nodes = circuits.contribution_graph(one, 5, 7, threshold=0, neurons=1, sources=1).nodes
    whole, atol = token_logit(one), tolerance(name) * max(float(nodes["weight"].abs().max()), 1)
    neuron = nodes[(nodes["kind"] == "neuron") & (nodes["layer"] == 0)].iloc[-1]
    points = one.points.blocks[0]

    def silence(post, *, hook):
        post = post.clone()
        post.view(-1, post.shape[-1])[int(neuron["pos"]), int(neuron["part"])] = 0
        return post

    assert neuron["weight"] == pytest.approx(float(whole - token_logit(one, [(points.post, silence)])), abs=atol)
    part = nodes[(nodes["kind"] == "head") & (nodes["part"] >= 0) & (nodes["layer"] == 0)].iloc[-1]
    head, query, key = int(part["name"].split("←")[0].split("H")[1]), int(part["pos"]), int(part["part"])
    seen = {}

    def see(v, *, hook):
        seen["v"] = v

    def subtract(z, *, hook):
        z, pattern, v = z.clone(), one.pattern(0)[0], seen["v"][0]
        z[0, query, head] -= pattern[head, query, key] * v[key, head // (pattern.shape[0] // v.shape[1])]
        return z

    lost = whole - token_logit(one, [(points.value, see), (points.z, subtract)])
    assert part["weight"] == pytest.approx(float(lost), abs=atol)


def of_nodes(graph):
    """Edges by the names, positions and parts of their ends."""
    names = list(zip(*(graph.nodes[column] for column in ("name", "pos", "part")), strict=True))
    table = (graph.edges[column].tolist() for column in ("source", "target", "weight"))
    return names, {(names[source], names[end]): weight for source, end, weight in zip(*table, strict=True)}


@pytest.mark.parametrize("split", [{}, {"neurons": 2}, {"sources": 2}, "features", "difference"], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES[:2], "demo"])
def test_the_strongest_nodes_have_the_edges_that_they_have_in_the_whole_graph(model_named, demo_model, name, split):
    if split == "features" and name != "demo":
        pytest.skip("the dictionary is the bundled model's")
    tokens = some_tokens(batch=1)
    run = tlens.freeze(demo_model if name == "demo" else model_named(name), tokens)
    options = split
    if split == "features":
        options = {
            "dictionaries": circuits.features(run, tlens.load_demo_dictionary(dtype=torch.float64)),
            "features": 3,
        }
    if split == "difference":
        other = tokens.clone()
        other[0, 1] += 1
        run = tlens.difference(run, tlens.freeze(demo_model if name == "demo" else model_named(name), other))
        options = {}
    whole = circuits.contribution_graph(run, 5, 7, threshold=0, **options)
    part = circuits.contribution_graph(run, 5, 7, threshold=0, nodes=20, **options)
    names, edges = of_nodes(whole)
    chosen, inner = of_nodes(part)
    sizes = whole.nodes["weight"].iloc[:-1].abs()
    assert part.nodes["weight"].iloc[:-1].abs().min() >= sizes.nlargest(20).min() - 1e-6 * scale(whole)
    assert len(chosen) == 21
    atol = 1e-5 * scale(whole)
    for ends, weight in edges.items():
        if set(ends) <= set(chosen):
            assert inner.pop(ends, 0.0) == pytest.approx(weight, abs=atol)
    assert all(abs(weight) < atol for weight in inner.values())
    entering = whole.nodes["entering"].to_numpy()[[names.index(node) for node in chosen]]
    assert part.nodes["entering"].to_numpy() == pytest.approx(entering, rel=1e-4, abs=atol)
    assert (part.total, part.gap) == (whole.total, whole.gap)


@pytest.mark.parametrize("threshold", [0, 0.3])
@pytest.mark.parametrize("share", [0.3, 0.8, 0.99])
def test_nodes_cover_a_share_of_the_target_and_no_node_more(demo_model, share, threshold, monkeypatch):
    run = tlens.freeze(demo_model, "The value is not found, a value")
    graph = circuits.contribution_graph(run, 5, 7, threshold=threshold, nodes=share)
    assert share <= graph.coverage
    whole = circuits.contribution_graph(run, 5, 7, threshold=0)
    assert whole.coverage == pytest.approx(1)
    assert np.abs(whole.others).max() < 1e-4 * scale(whole)
    final = whole.inputs("target", k=len(whole.edges))
    drawn = {*zip(graph.nodes["name"], graph.nodes["pos"], strict=True)}
    carried = [entry for entry in final if (entry.name, entry.position) in drawn]
    sizes = [abs(entry.score) for entry in carried]
    assert sum(sizes) / sum(abs(entry.score) for entry in final) == pytest.approx(graph.coverage, rel=1e-4)
    assert graph.others[-1] == pytest.approx(
        sum(entry.score for entry in final) - sum(entry.score for entry in carried), abs=1e-4 * scale(whole)
    )
    monkeypatch.setattr(circuits.graph, "MOST_COVERING", len(graph.nodes) - 2)  # with one node fewer it is less
    assert circuits.contribution_graph(run, 5, 7, threshold=threshold, nodes=share).coverage < share


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "all"])
def test_a_number_of_nodes_that_is_none_is_refused(demo_model, value):
    with pytest.raises(tlens.InvalidInputError, match="contribution_graph: nodes"):
        circuits.contribution_graph(tlens.freeze(demo_model, "The value"), 5, nodes=value)


def test_what_has_no_neurons_or_no_pattern(model_named):
    moe = next(name for name in model_names() if "mixtral" in name)
    one = tlens.freeze(model_named(moe), some_tokens(batch=1))
    with pytest.raises(tlens.UnsupportedModelError, match="mixture of experts"):
        circuits.contribution_graph(one, 5, neurons=2)
    made = circuits.contribution_graph(one, 5, threshold=0, sources=1)
    inner = made.nodes["kind"].isin(["head", "mlp", "target"])
    gap = (entering(made) + made.nodes["bias"] - made.nodes["weight"])[inner].abs().max()
    assert float(gap) < tolerance(moe) * max(scale(made), 1)


@pytest.mark.parametrize("name", [n for n in ("bridge/whitened", "bridge/jamba") if n in model_names()])
def test_sums_hold_beside_mixers_and_whitening(model_named, name):
    one = tlens.freeze(model_named(name), some_tokens(batch=1))
    asked = {"sources": 1} if name == "bridge/jamba" else {"sources": 1, "neurons": 1}  # a mixture of experts
    made = circuits.contribution_graph(one, 5, threshold=0, **asked)
    inner = ~made.nodes["kind"].isin(["embedding", "bias"])
    gap = (entering(made) + made.nodes["bias"] - made.nodes["weight"])[inner].abs().max()
    assert float(gap) < tolerance(name) * max(scale(made), 1)
    assert made.gap < tolerance(name)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "all", 1.0, float("nan")])
def test_a_number_of_parts_that_is_none_is_refused(model_named, value):
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    for option in ("neurons", "sources"):
        with pytest.raises(tlens.InvalidInputError, match=f"{option}="):
            circuits.contribution_graph(one, 5, **{option: value})
    with pytest.raises(tlens.InvalidInputError, match="threshold="):
        circuits.contribution_graph(one, 5, threshold=1.1)


def test_too_many_nodes_are_refused(model_named, monkeypatch):
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    monkeypatch.setattr(graph_nodes, "MOST_NODES", 50)
    with pytest.raises(tlens.SizeError, match="fewer neurons="):
        circuits.contribution_graph(one, 5, neurons=40)
    with pytest.raises(tlens.SizeError, match="neurons=, sources= or features="):
        circuits.contribution_graph(one, 5, neurons=4)


def test_many_parts_go_in_pieces(model_named, monkeypatch):
    one = tlens.freeze(model_named("bridge/llama"), some_tokens(batch=1))
    made = circuits.contribution_graph(one, 5, threshold=0, neurons=5, sources=3)
    monkeypatch.setattr(circuits.graph_nodes, "ROW_BYTES", 1)
    monkeypatch.setattr(circuits.graph, "EDGE_BYTES", 1)
    again = circuits.contribution_graph(one, 5, threshold=0, neurons=5, sources=3)
    assert list(again.nodes["name"]) == list(made.nodes["name"])
    pairs = [found.edges.set_index(["source", "target"])["weight"] for found in (made, again)]
    assert float(pairs[0].sub(pairs[1], fill_value=0).abs().max()) < 1e-12


# ------------------------------------------------------------------ in others' formats


@pytest.fixture(scope="module")
def made(demo_model):
    frozen = tlens.freeze(demo_model, "If the file is\nnot found, it is")
    return circuits.contribution_graph(frozen, " raised", threshold=0.01, neurons=2, sources=1)


NUMBER, TEXT, MAYBE = (int, float), (str,), (float, int, types.NoneType)
CIRCUIT_TRACER = {
    "metadata": {
        "slug": TEXT, "scan": TEXT, "transcoder_list": (list,), "prompt_tokens": (list,), "prompt": TEXT,
        "node_threshold": MAYBE, "schema_version": (int, types.NoneType),
    },
    "qParams": {"pinnedIds": (list,), "supernodes": (list,), "linkType": TEXT, "clickedId": TEXT, "sg_pos": TEXT},
    "nodes": {
        "node_id": TEXT, "feature": (int,), "layer": TEXT, "ctx_idx": (int,), "feature_type": TEXT,
        "token_prob": NUMBER, "is_target_logit": (bool,), "run_idx": (int,), "reverse_ctx_idx": (int,),
        "jsNodeId": TEXT, "clerp": TEXT, "influence": MAYBE, "activation": MAYBE,
    },
    "links": {"source": TEXT, "target": TEXT, "weight": NUMBER},
}  # fmt: skip
"""Every field of `circuit_tracer.frontend.graph_models`, version 0.5.0, and of the links its `Link` describes."""


def written(graph, tmp_path, **options):
    path = graph.export(tmp_path / "graph.json", "circuit-tracer", **options)
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_field_of_circuit_tracer_is_there(made, tmp_path):
    data = written(made, tmp_path, slug="my-graph", scan="my-model", node_threshold=0.8)
    assert set(data) == set(CIRCUIT_TRACER)
    for part, fields in CIRCUIT_TRACER.items():
        for row in data[part] if isinstance(data[part], list) else [data[part]]:
            assert set(fields) <= set(row)
            assert {name: type(row[name]) for name in fields if type(row[name]) not in fields[name]} == {}
    meta, nodes = data["metadata"], data["nodes"]
    assert (meta["slug"], meta["scan"], meta["node_threshold"]) == ("my-graph", "my-model", 0.8)
    assert meta["prompt_tokens"] == list(made.tokens)
    assert meta["prompt"].endswith("If the file is\nnot found, it is")
    ids = [node["node_id"] for node in nodes]
    assert len(set(ids)) == len(ids) == len(made.nodes)
    assert {link[end] for link in data["links"] for end in ("source", "target")} <= set(ids)
    # what its page makes of a node: no two alike, layers that are numbers, and a logit that names token and p
    assert len({(node["layer"], node["feature"], node["ctx_idx"]) for node in nodes}) == len(nodes)
    assert all(node["layer"] == "E" or 0 <= int(node["layer"]) <= 5 for node in nodes)
    assert not any("," in each or "supernode" in each for each in ids)
    logit = nodes[-1]
    assert (logit["feature_type"], logit["is_target_logit"]) == ("logit", True)
    assert logit["clerp"] == f'Output " raised" (p={made.probability:.3f})'
    assert {"embedding", "attention head", "mlp", "neuron", "bias"} < {node["feature_type"] for node in nodes}
    assert logit["token_prob"] == pytest.approx(made.probability)


def test_the_probability_is_the_models_own(made, demo_model):
    logits = tlens.freeze(demo_model, "If the file is\nnot found, it is").last_logits[0]
    assert made.probability == pytest.approx(float(logits.softmax(-1)[made.token_id]), rel=1e-9)


def test_sums_survive_the_file_of_circuit_tracer(demo_model, model_named, tmp_path):
    for frozen, asked in (
        (tlens.freeze(demo_model, "Return the value"), {"target": " of"}),
        (tlens.freeze(model_named("bridge/phi"), some_tokens(batch=1)), {"target": 5, "minus": 7}),  # b_U is not zero
    ):
        graph = circuits.contribution_graph(frozen, **asked, threshold=0, neurons=1, sources=1)
        data = written(graph, tmp_path)
        sums = defaultdict(float)
        for link in data["links"]:
            sums[link["target"]] += link["weight"]
        *inner, logit = data["nodes"]
        atol = 1e-6 * max(scale(graph), 1)
        assert sums[logit["node_id"]] == pytest.approx(graph.total, abs=atol)
        assert logit["activation"] == graph.total
        for node in inner:
            if node["feature_type"] in ("attention head", "mlp", "neuron"):
                assert sums[node["node_id"]] + node["bias"] == pytest.approx(node["activation"], abs=atol)
        sources = [node for node in inner if node["feature_type"] in ("embedding", "other embedding", "bias")]
        own = sum(node["activation"] for node in sources) + sum(n["bias"] for n in inner)
        assert own == pytest.approx(graph.total, abs=atol)
        assert [link["weight"] for link in data["links"]][: len(graph.edges)] == graph.edges["weight"].tolist()
    assert any(node["clerp"].startswith("b_U at") for node in inner) == bool(graph.constant)
    assert "−" in logit["clerp"]
    assert logit["feature"] == graph.d_vocab  # no token's number
    shares = sorted(node["influence"] for node in inner)
    assert shares[-1] == pytest.approx(1)
    largest = max(inner, key=lambda node: abs(node["activation"]))
    assert largest["influence"] == shares[0]


def test_circuit_tracers_own_class_reads_the_file(made, tmp_path):
    models = pytest.importorskip("circuit_tracer.frontend.graph_models", reason="circuit-tracer is not installed")
    data = written(made, tmp_path)
    read = models.Model.model_validate_json((tmp_path / "graph.json").read_text(encoding="utf-8"))
    assert read.links == data["links"]
    assert [node.activation for node in read.nodes] == [node["activation"] for node in data["nodes"]]


def test_features_and_errors_are_written_as_circuit_tracers_own(made, tmp_path):
    """They come from dictionaries; the formats know them already."""
    nodes = made.nodes.copy()
    drawn = nodes.index.isin(made.edges["source"]) & (nodes["kind"] == "neuron")
    first, second = nodes.index[drawn][:2]
    nodes.loc[first, ["name", "kind", "layer", "part"]] = ["L1.F9", "feature", 1, 9]
    nodes.loc[second, ["name", "kind", "layer"]] = ["L1.error", "error", 1]
    graph = type(made)(nodes, made.edges, *(getattr(made, name) for name in made.FACTS), n_layers=4)
    data = written(graph, tmp_path)
    (feature,) = [node for node in data["nodes"] if node["feature_type"] == "cross layer transcoder"]
    (error,) = [node for node in data["nodes"] if node["feature_type"] == "mlp reconstruction error"]
    assert feature["node_id"] == f"1_9_{feature['ctx_idx']}"
    assert (feature["feature"], error["feature"]) == (10 * 11 // 2 + 9, -1)  # Cantor's pairing, as its frontend undoes
    assert error["node_id"] == f"0_1_{error['ctx_idx']}"
    assert "L1.F9" in graph.to_html(10**6)
    assert graph.top(3, kind="feature")[0].name == "L1.F9"


def test_networks_tables_and_files_hold_the_same(made, tmp_path):
    graphml = networkx.read_graphml(made.export(tmp_path / "g.graphml"), node_type=int)
    linked = json.loads(made.export(tmp_path / "g.json").read_text(encoding="utf-8"))
    table = pd.read_csv(made.export(tmp_path / "g.csv"), keep_default_na=False)
    again = type(made).load(made.save(tmp_path / "g.safetensors"))
    weights = made.edges["weight"].tolist()
    ends = list(zip(made.edges["source"], made.edges["target"], strict=True))
    assert [graphml.edges[pair]["weight"] for pair in ends] == weights
    assert [node["part"] for _, node in sorted(graphml.nodes(data=True))] == made.nodes["part"].tolist()
    assert graphml.nodes[0]["weight"] == made.nodes["weight"][0]
    assert "↵" in {node["token"] for _, node in graphml.nodes(data=True)}  # XML knows no control characters
    assert graphml.graph["total"] == made.total
    assert {"model", "dtype"} < set(made.provenance)
    assert made.provenance.items() <= graphml.graph.items()
    assert made.provenance.items() <= linked["graph"].items()
    assert set(table["target"]) == {made.target}
    assert networkx.node_link_graph(linked, edges="links").number_of_edges() == len(weights)
    assert {(link["source"], link["target"]): link["weight"] for link in linked["links"]} == dict(
        zip(ends, weights, strict=True)
    )
    assert np.allclose(sorted(table["weight"]), sorted(weights), rtol=1e-12)
    pd.testing.assert_frame_equal(again.nodes, made.nodes)
    assert again.to_circuit_tracer() == made.to_circuit_tracer()


def test_graphs_of_earlier_files_are_read(made, tmp_path, monkeypatch):
    tensors, facts = made._packed()
    older = {name: value for name, value in facts.items() if name not in made.LATER_FACTS}
    monkeypatch.setattr(
        type(made), "_packed", lambda _: ({n: t for n, t in tensors.items() if n != "nodes.part"}, older)
    )
    again = type(made).load(made.save(tmp_path / "old.safetensors"))
    assert (again.nodes["part"] == -1).all()
    assert again.to_circuit_tracer()["metadata"]["prompt_tokens"]


def test_what_cannot_be_written_is_refused(made, tmp_path):
    cases = [
        (lambda: made.export(tmp_path / "a.html", "dot"), "format='dot'"),
        (lambda: made.export(tmp_path / "a.pdf"), "does not end in"),
        (lambda: made.export(tmp_path / "none" / "a.html"), "there is no folder"),
        (lambda: made.export(tmp_path, "html"), "that is a folder"),
        (lambda: made.to_circuit_tracer(""), "slug"),
        (lambda: made.to_circuit_tracer(node_threshold=1.5), "node_threshold=1.5"),
        (lambda: made.to_html(0), "k=0"),
    ]
    for call, message in cases:
        with pytest.raises(tlens.InvalidInputError, match=message):
            call()
    assert not list(tmp_path.iterdir())


def test_a_page_bears_so_many_nodes_and_says_so(made, monkeypatch):
    monkeypatch.setattr(result_module, "MOST_SHOWN", 20)
    html = made.to_html(10**6)
    others = html.count('data-kind="others"')
    shown = html.count("data-name=") - others
    assert others > 0
    assert 0 < shown < 20
    from_others = sum(html.count(f'data-e="{shown - 1 + number} ') for number in range(others))
    edges = html.count("data-e=") - from_others
    assert f"{edges} of {len(made.edges)} edges between {shown} of {len(made.nodes)} nodes" in html


def test_inputs_and_outputs_of_a_node(demo_model):
    frozen = tlens.freeze(demo_model, "If the file is not found, a FileNotFoundError is")
    graph = circuits.contribution_graph(frozen, " raised", threshold=0)
    nodes, last = graph.nodes, len(graph.nodes)
    into = graph.inputs("MLP3", 16, k=last)
    (row,) = nodes.index[(nodes["name"] == "MLP3") & (nodes["pos"] == 16)]
    assert sum(entry.score for entry in into) + nodes["bias"][row] == pytest.approx(nodes["weight"][row], abs=1e-9)
    assert abs(into[0].score) == max(abs(entry.score) for entry in into)
    to = next(entry for entry in graph.outputs("MLP3", 16, k=last) if entry.name == "target")
    assert to.score == next(e.score for e in graph.inputs("target", k=last) if (e.name, e.position) == ("MLP3", 16))
    with pytest.raises(tlens.InvalidInputError, match="occurs at positions"):
        graph.inputs("MLP3")
    with pytest.raises(tlens.InvalidInputError, match="this graph has no such node"):
        graph.outputs("MLP9")


# ------------------------------------------------------------------ a circuit that acts by attention

PREVIOUS, ANSWER, QUERY = 8, 9, 24
"""Of the prompt below: the token that is changed, the answer's first place, and the last token."""


@pytest.fixture(scope="module")
def induction(demo_model):
    """Random tokens twice; in the second prompt another token stands before the answer's first place."""
    task = tlens.evaluate.induction(1, d_vocab=demo_model.cfg.d_vocab)
    prompt = task.tokens
    assert int(task.sources[0].nonzero()[0]) == ANSWER
    assert prompt.shape == (1, QUERY + 1)
    other = prompt.clone()
    other[0, PREVIOUS] = prompt[0, 3]
    change = tlens.difference(tlens.freeze(demo_model, prompt), tlens.freeze(demo_model, other))
    return change, {"target": int(task.answers), "minus": int(prompt[0, 3])}


CIRCUIT = [
    ("embed", PREVIOUS, "L0H3.v", ANSWER, "values"),
    ("L0H3.v", ANSWER, "MLP0", ANSWER, ""),
    *(("MLP0", ANSWER, f"L1H{head}.k", QUERY, "keys") for head in range(4)),
    *(("L0H3.v", ANSWER, f"L1H{head}.k", QUERY, "keys") for head in range(4)),
    *((f"L1H{head}.k", QUERY, "target", QUERY, "") for head in range(4)),
]
"""Induction: a previous-token head moves a token to the one after it, where induction heads find it by their keys."""


def test_the_induction_circuit_is_one_graph(induction):
    change, asked = induction
    graph = circuits.contribution_graph(change, **asked)
    assert graph.gap < 1e-9
    live = [frozen.last_logits[0] for frozen in (change.a, change.b)]
    expected = float((live[0] - live[1])[asked["target"]] - (live[0] - live[1])[asked["minus"]])
    assert graph.total == pytest.approx(expected, abs=1e-9)
    assert graph.target.startswith("change of the logit of")
    table = graph.to_dataframe()
    edges = {row[:4] + row[5:]: row[4] for row in table[
        ["source", "source_pos", "destination", "destination_pos", "weight", "reads"]
    ].itertuples(index=False, name=None)}  # fmt: skip
    assert set(CIRCUIT) <= set(edges)
    assert all(edges[edge] > 0.01 * graph.total for edge in CIRCUIT)
    assert [entry[0] for entry in graph.top(3)] == ["embed", "L0H3.v", "MLP0"]
    # all that differs is one token, and nearly all of what it does passes the previous-token head
    nodes = {(row.name_, row.pos): row.weight for row in graph.nodes.rename(columns={"name": "name_"}).itertuples()}
    assert nodes["embed", PREVIOUS] == pytest.approx(graph.total)
    assert nodes["L0H3.v", ANSWER] > 0.9 * graph.total
    keys = sum(nodes[f"L1H{head}.k", QUERY] for head in range(4))
    assert keys > 0.9 * graph.total
    values = sum(abs(nodes.get((f"L1H{head}.v", QUERY), 0)) for head in range(4))
    assert values < 0.1 * keys
    assert circuits.top_paths(change, **asked, k=8, query=-1).names[0].startswith("L0H3.v → MLP0 → L1H")


def test_attention_moved_because_of_the_previous_token_head(induction):
    change, _ = induction
    for head in range(4):
        moved = circuits.qk_attribution(change, 1, head, query=QUERY, key=ANSWER, of="pattern", by="head")
        assert float(moved.total) > 0.9  # the head turned away
        assert {entry.name for entry in moved.top(2)} == {"key: MLP0", "key: L0H3"}
        sources = dict(zip(moved.names[0], moved.key_sources[0].tolist(), strict=True))
        assert sources["MLP0"] + sources["L0H3"] > 0.95 * float(moved.total)
        tokens = circuits.qk_attribution(change, 1, head, query=QUERY, key=ANSWER, of="pattern")
        assert tokens.key_sources[0].nonzero()[:, 0].tolist() == [PREVIOUS]  # the only token that differs
        assert float(tokens.key_sources[0, PREVIOUS] + tokens.query_sources[0, PREVIOUS]) == pytest.approx(
            float(moved.total), abs=1e-9
        )


def test_the_induction_circuit_survives_graphml(induction, tmp_path):
    change, asked = induction
    graph = circuits.contribution_graph(change, **asked)
    again = networkx.read_graphml(graph.export(tmp_path / "induction.graphml"), node_type=int)
    nodes = again.nodes
    read = {
        (nodes[one]["name"], nodes[one]["pos"], nodes[two]["name"], nodes[two]["pos"], edge["reads"]): edge["weight"]
        for one, two, edge in again.edges(data=True)
    }
    assert set(CIRCUIT) <= set(read)
    assert sorted(read.values()) == sorted(graph.edges["weight"])
    best = max(networkx.all_simple_paths(again, *_ends(again)), key=lambda path: _weakest(again, path))
    assert [nodes[node]["name"] for node in best][:3] == ["embed", "L0H3.v", "MLP0"]
    assert nodes[best[3]]["name"].endswith(".k")
    assert [again.edges[pair]["reads"] for pair in itertools.pairwise(best)][:3] == ["values", "", "keys"]


def _ends(network):
    """The changed token's embedding, and the target."""
    named = {(node["name"], node["pos"]): number for number, node in network.nodes(data=True)}
    return named["embed", PREVIOUS], named["target", QUERY]


def _weakest(network, path):
    return min(abs(network.edges[pair]["weight"]) for pair in itertools.pairwise(path))


def test_the_induction_circuit_survives_circuit_tracers_file(induction, tmp_path):
    change, asked = induction
    data = written(circuits.contribution_graph(change, **asked), tmp_path, slug="induction")
    for part, fields in CIRCUIT_TRACER.items():
        for row in data[part] if isinstance(data[part], list) else [data[part]]:
            assert {name: type(row[name]) for name in fields if type(row[name]) not in fields[name]} == {}
    names = {}
    for node in data["nodes"]:
        name = "embed" if node["feature_type"] == "embedding" else node["clerp"].split(" at ")[0]
        names[node["node_id"]] = ("target" if node["is_target_logit"] else name, node["ctx_idx"])
    read = {(*names[link["source"]], *names[link["target"]], link["reads"]) for link in data["links"]}
    assert set(CIRCUIT) <= read
    assert {node["feature_type"] for node in data["nodes"] if ".k at" in node["clerp"]} == {"attention head"}
    assert "difference of two runs" in data["metadata"]["info"]["description"]
    assert "|" in data["metadata"]["prompt_tokens"][PREVIOUS]
    models = pytest.importorskip("circuit_tracer.frontend.graph_models", reason="circuit-tracer is not installed")
    assert models.Model.model_validate(data).links == data["links"]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("change", ["source", "choice"])
def test_the_graph_of_a_program_is_the_program(change, norm):
    """Where the answer's token changes, values carry it; where another token matches, keys do."""
    program = tlens.demo.program("induction")
    task = program.components(4, change=change)
    pairs = task.pairs
    model = program.model(norm=norm, dtype=torch.float64)
    for clean, corrupted, answer, other in zip(
        pairs.clean, pairs.corrupted, pairs.target.tolist(), pairs.minus.tolist(), strict=True
    ):
        difference = tlens.difference(*(tlens.freeze(model, prompt[None]) for prompt in (clean, corrupted)))
        graph = circuits.contribution_graph(difference, answer, other, threshold=0.05)
        assert graph.gap < 1e-9
        table = graph.to_dataframe()
        sources = [source.split(".")[0] for source in table["source"]]
        edges = {" → ".join(pair) for pair in zip(sources, table["destination"], strict=True)}
        assert set(task.edges) <= edges
        by_values = table.loc[table["destination"] == "L1H0.v", "weight"].abs().sum()
        by_keys = table.loc[table["destination"] == "L1H0.k", "weight"].abs().sum()
        assert bool(by_keys > 100 * by_values) is (change == "choice")
        assert bool(by_values > 100 * by_keys) is (change == "source")
        assert set(table.loc[table["destination"] == "L1H0.k", "reads"]) <= {"keys"}


@pytest.mark.parametrize(
    "name", [name for name in ("hooked/ln", "bridge/gemma2", "bridge/llama") if name in model_names()]
)
@pytest.mark.parametrize("nodes", [None, 8])
def test_graphs_in_bfloat16(name, nodes):
    """A norm may compute in float32: the graph is counted in float32 throughout, of a run and of a difference."""
    model = tiny_model(name).to(torch.bfloat16)
    runs = [tlens.freeze(model, some_tokens(batch=1, seed=seed), tolerance=0.3) for seed in (0, 1)]
    for explained in (runs[0], tlens.difference(*runs)):
        graph = circuits.contribution_graph(explained, 5, nodes=nodes)
        assert float(graph.gap) < 0.02
