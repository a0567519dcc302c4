"""Contribution graphs with the features of sparse dictionaries as nodes: every sum holds, and weights are their scores.

The independent computations are `feature_effects` and `feature_edges`, which pull through whole blocks and know no
graph, and the dictionaries' own weights.
"""

import json

import pytest
import torch
from conftest import NAMES, some_tokens, tolerance
from test_features import Dictionary, Transcoder
from test_graphs import entering, scale, written

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits import graph_nodes

CASES = [
    ("hooked/ln", "jumprelu", "layer_norm"),
    ("hooked/sandwich", "relu", "none"),
    ("bridge/gpt2", "topk", "constant_norm_rescale"),
    ("bridge/llama", "topk", "layer_norm"),
    ("bridge/phi", "gained", "constant_norm_rescale"),
    ("bridge/bert", "relu", "layer_norm"),
    ("bridge/whitened", "topk", "none"),
]
"""Families, how features are chosen, and how the early dictionary normalises what it reads."""
ON_HAND = [case for case in CASES if case[0] in NAMES]
FEW = [name for name in ("hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/phi") if name in NAMES]


def two(frozen, kind="relu", normalise="none"):
    """Features after the first block and after the last."""
    width = frozen.output.shape[-1]
    early = circuits.features(frozen, Dictionary(width, kind, normalise), frozen.capture.output_name(0))
    last = frozen.capture.output_name(frozen.n_layers - 1)
    return early, circuits.features(frozen, Dictionary(width, "topk", seed=3), last)


def check_sums(made, name):
    """Incoming edges and own bias are a node's weight, outgoing edges too; sources sum to the logit."""
    nodes, atol = made.nodes, tolerance(name) * max(scale(made), 1)
    source = nodes["kind"].isin(["embedding", "bias"])
    fed = ~source & (nodes["kind"] != "whitening")
    assert float((entering(made) + nodes["bias"] - nodes["weight"])[fed].abs().max()) < atol
    out = made.edges.groupby("source")["weight"].sum().reindex(nodes.index, fill_value=0.0)
    assert float((out - nodes["weight"])[:-1].abs().max()) < atol
    assert nodes["weight"][source].sum() + nodes["bias"][~source].sum() == pytest.approx(made.total, abs=atol)
    assert made.gap < tolerance(name)
    assert made.completeness == pytest.approx(1.0)


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize("asked", [{}, {"features": 3, "neurons": 2, "sources": 1}, {"features": 0.3}], ids=str)
@pytest.mark.parametrize(("name", "kind", "normalise"), ON_HAND)
@pytest.mark.few(8)
def test_sums_hold_with_features(model_named, name, kind, normalise, asked):
    one = tlens.freeze(model_named(name), some_tokens(batch=1))
    early, late = two(one, kind, normalise)
    for dictionaries in (early, late, [late, early]):
        check_sums(circuits.contribution_graph(one, 5, 7, threshold=0, dictionaries=dictionaries, **asked), name)


@pytest.mark.parametrize(("name", "kind", "normalise"), ON_HAND)
def test_a_weight_is_the_score_of_feature_effects(model_named, name, kind, normalise):
    one = tlens.freeze(model_named(name), some_tokens(batch=1))
    for found in two(one, kind, normalise):
        terms = circuits.feature_effects(found, 5, 7)
        nodes = circuits.contribution_graph(one, 5, 7, dictionaries=found).nodes
        atol = tolerance(name) * max(float(nodes["weight"].abs().max()), 1)
        own = nodes[nodes["kind"].isin(["feature", "error"]) & (nodes["name"] != "input mean")]
        at = dict(zip(own["name"] + "@" + own["pos"].astype(str), own["weight"], strict=True))
        scores = {term: float(terms[term][0, 0]) for term in terms.names}
        assert at == pytest.approx({term: score for term, score in scores.items() if "@" in term}, abs=atol)
        constants = {"b_dec", "input mean"} & set(terms.names)
        for constant in constants:
            assert nodes["weight"][nodes["name"] == constant].sum() == pytest.approx(scores[constant], abs=atol)
        assert ("input mean" in set(nodes["name"])) is ("input mean" in terms.names)
        assert len(own) == len(found.values) + len(found.frozen.tokens[0])


@pytest.mark.parametrize("name", FEW)
def test_edges_between_features(model_named, name):
    """Directly, what one writes and the other reads; through everything between, `feature_edges`."""
    one = tlens.freeze(model_named(name), some_tokens(batch=1))
    early, late = two(one)
    made = circuits.contribution_graph(one, 5, 7, threshold=0, dictionaries=[early, late])
    names, atol = made.nodes["name"], tolerance(name) * max(scale(made), 1)
    direct = {(source, target): weight for source, target, weight in made.edges.itertuples(index=False, name=None)}
    number = int(one.n_layers) - 1
    rows = {which: made.nodes[names.str.startswith(f"L{layer}.F")] for which, layer in (("early", 0), ("late", number))}
    checked = 0
    for end, target in rows["late"][rows["late"]["pos"] == 5].iterrows():
        gain = target["weight"] / float(late.value(int(target["part"]))[0, 5])
        for start, source in rows["early"][rows["early"]["pos"] == 5].iterrows():
            read = late.dictionary.W_enc[:, target["part"]] @ early.dictionary.W_dec[source["part"]]
            expected = gain * float(read * early.value(int(source["part"]))[0, 5])
            assert direct[start, end] == pytest.approx(expected, abs=atol)
            checked += 1
    assert checked > 10

    for feature in (4, 9):  # whether it is active or not: its pre-activation is a direction of the stream
        edges = circuits.feature_edges(early, late, [feature])
        towards = late.dictionary.W_enc[:, feature]
        nodes = circuits.contribution_graph(one, direction=towards, final_norm=False, dictionaries=early).nodes
        for node in nodes[nodes["kind"].isin(["feature", "error"])].itertuples():
            assert node.weight == pytest.approx(float(edges[f"{node.name}@{node.pos}"][0, 0]), abs=atol)


def test_features_at_every_place(model_named):
    """Before the first block, inside one, at the end of some layers; without edges from what another took in."""
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    hooks = ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_mid", "blocks.0.hook_resid_post"]
    hooks += ["blocks.1.hook_resid_mid", "blocks.1.hook_resid_post"]
    found = [circuits.features(one, Dictionary(seed=seed), hook) for seed, hook in enumerate(hooks)]
    made = circuits.contribution_graph(one, 5, threshold=0, dictionaries=found)
    check_sums(made, "bridge/gpt2")
    prefixes = ["L0.0.", "L0.1.", "L0.", "L1.1.", "L1."]
    assert set(prefixes) == {n[: -len("error")] for n in made.nodes["name"][made.nodes["kind"] == "error"]}
    first = made.nodes.index[made.nodes["name"].str.startswith(prefixes[0])]
    readers = made.nodes["name"][made.edges["target"][made.edges["source"].isin(first)]]
    assert {name[: -len("error")] for name in readers if name.endswith("error")} == {"L0.1."}
    assert not readers.str.startswith(("MLP", "L1H")).any()
    cut = circuits.contribution_graph(
        one,
        direction=torch.ones(16).double(),
        layers=slice(0, 1),
        threshold=0,
        dictionaries=found[:3],
        final_norm=False,
    )
    check_sums(cut, "bridge/gpt2")
    assert cut.nodes["name"].iloc[-2] == "L0.b_dec"
    later = circuits.contribution_graph(one, 5, layers=slice(1, 2), threshold=0, dictionaries=found[2])
    check_sums(later, "bridge/gpt2")


def test_a_prompt_with_padding(model_named):
    model = model_named("bridge/gpt2")
    tokens = some_tokens(batch=1)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), tokens], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    both = []
    for frozen in (tlens.freeze(model, tokens), tlens.freeze(model, padded, attention_mask=mask)):
        made = circuits.contribution_graph(frozen, 5, 7, threshold=0, dictionaries=two(frozen))
        check_sums(made, "bridge/gpt2")
        nodes = made.nodes[made.nodes["kind"].isin(["feature", "error"])]
        both.append({(n.name, n.pos - len(frozen.tokens[0]) + 6): n.weight for n in nodes.itertuples() if n.weight})
    assert both[0] == pytest.approx(both[1], abs=1e-9)


# ------------------------------------------------------------------ which features


def test_the_largest_features_and_the_rest(model_named):
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    early, _ = two(one, normalise="layer_norm")
    ask = lambda **options: circuits.contribution_graph(one, 5, 7, threshold=0, dictionaries=early, **options)  # noqa: E731
    every, few, large = (ask(**options).nodes for options in ({}, {"features": 2}, {"features": 0.25}))
    sizes = every[every["part"] >= 0].set_index(["name", "pos"])["weight"]
    chosen = few[few["part"] >= 0].set_index(["name", "pos"])["weight"]
    for pos, at in chosen.groupby("pos"):
        best = sizes.xs(pos, level="pos").abs().nlargest(2)
        assert sorted(at.abs()) == pytest.approx(sorted(best))
    rest = few[few["name"] == "F.rest"].set_index("pos")
    for column in ("weight", "bias"):
        parts = every[every["part"] >= 0].groupby("pos")[column].sum()
        parts -= few[few["part"] >= 0].groupby("pos")[column].sum().reindex(parts.index, fill_value=0.0)
        assert rest[column].to_dict() == pytest.approx(parts.reindex(rest.index, fill_value=0.0).to_dict(), abs=1e-12)
    assert "F.rest" not in set(every["name"])
    assert (large["part"] >= 0).sum() == (sizes.abs() >= 0.25 * sizes.abs().max()).sum()


def test_nothing_is_active(model_named):
    """Then all is error and b_dec."""
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    silent = Dictionary()
    silent.b_enc = silent.b_enc - 100
    found = circuits.features(one, silent, one.capture.output_name(0))
    for options in ({}, {"features": 2}, {"features": 0.2}):
        made = circuits.contribution_graph(one, 5, threshold=0, dictionaries=found, **options)
        check_sums(made, "bridge/gpt2")
        assert not (made.nodes["part"] >= 0).any()


def test_features_go_in_pieces(model_named, monkeypatch):
    one = tlens.freeze(model_named("bridge/llama"), some_tokens(batch=1))
    found = two(one, normalise="layer_norm")
    whole = circuits.contribution_graph(one, 5, threshold=0, dictionaries=found, features=4)
    monkeypatch.setattr(circuits.graph_nodes, "ROW_BYTES", 1)
    monkeypatch.setattr(circuits.graph, "EDGE_BYTES", 1)
    again = circuits.contribution_graph(one, 5, threshold=0, dictionaries=found, features=4)
    assert list(again.nodes["name"]) == list(whole.nodes["name"])
    pairs = [made.edges.set_index(["source", "target"])["weight"] for made in (whole, again)]
    assert float(pairs[0].sub(pairs[1], fill_value=0).abs().max()) < 1e-12
    monkeypatch.setattr(graph_nodes, "MOST_NODES", 60)
    with pytest.raises(tlens.SizeError, match="features="):
        circuits.contribution_graph(one, 5, dictionaries=found)


# ------------------------------------------------------------------ handed on


def test_features_for_circuit_tracer(model_named, tmp_path):
    """Numbered by layer and feature; a second dictionary in the same block cannot be, and no two nodes are alike."""
    one = tlens.freeze(model_named("bridge/gpt2"), some_tokens(batch=1))
    hooks = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_mid", "blocks.1.hook_resid_post"]
    found = [circuits.features(one, Dictionary(seed=seed), hook) for seed, hook in enumerate(hooks)]
    made = circuits.contribution_graph(one, 5, threshold=0, dictionaries=found, features=30)
    data = written(made, tmp_path)
    nodes = data["nodes"]
    assert len({node["node_id"] for node in nodes}) == len(nodes)
    assert len({(node["layer"], node["feature"], node["ctx_idx"]) for node in nodes}) == len(nodes)
    of = {kind: [n for n in nodes if n["feature_type"] == kind] for kind in {n["feature_type"] for n in nodes}}
    own = made.nodes[(made.nodes["part"] >= 0) & (made.nodes["kind"] == "feature")]
    own = own[~own["name"].str.startswith("L1.F")]
    expected = {
        (str(n.layer), (n.layer + n.part) * (n.layer + n.part + 1) // 2 + n.part, n.pos) for n in own.itertuples()
    }
    features = of["cross layer transcoder"]
    assert {(node["layer"], node["feature"], node["ctx_idx"]) for node in features} == expected
    assert len(of["mlp reconstruction error"]) == 3 * 6
    assert {node["clerp"].split(" at ")[0].rpartition(".")[0] for node in of["other features"]} >= {"L0.F", "L1"}
    sums = {}
    for link in data["links"]:
        sums[link["target"]] = sums.get(link["target"], 0.0) + link["weight"]
    for node in (*features, *of["other features"], *of["mlp reconstruction error"]):
        assert sums.get(node["node_id"], 0.0) + node["bias"] == pytest.approx(node["activation"], abs=1e-9)
    again = type(made).load(made.save(tmp_path / "graph"))
    assert json.dumps(again.to_circuit_tracer()) == json.dumps(made.to_circuit_tracer())
    assert "L0.F" in made.to_html(400)
    assert made.prune(0.5).completeness < 1
    assert made.top(3, kind="error")[0].name.endswith("error")


# ------------------------------------------------------------------ bad input


def test_bad_dictionaries_of_a_graph(model_named):
    model = model_named("bridge/gpt2")
    one = tlens.freeze(model, some_tokens(batch=1))
    early, late = two(one)
    elsewhere, _ = two(tlens.freeze(model, some_tokens(batch=1)))
    same = circuits.features(one, Dictionary(seed=5), "blocks.0.hook_resid_post")
    transcoder = circuits.features(one, Transcoder(), "blocks.0.mlp.hook_in", hook_out="blocks.0.hook_mlp_out")
    for options, message in (
        ({"dictionaries": Dictionary()}, r"got Dictionary: make them with circuits.features"),
        ({"dictionaries": [early, "b"]}, r"got str: make them with circuits.features"),
        ({"dictionaries": elsewhere}, "the features of Dictionary at blocks.1.* are of another pass"),
        ({"dictionaries": [early, same]}, "two at one place, blocks.1.hook_resid_pre and blocks.0.hook_resid_post"),
        ({"dictionaries": transcoder}, "Transcoder is a transcoder, .* Use feature_effects"),
        ({"dictionaries": early, "features": 0}, "features=0: a whole number"),
        ({"dictionaries": early, "features": 1.5}, "features=1.5: a whole number"),
        ({"features": 3}, "features=3: there are none without dictionaries="),
        ({"dictionaries": [], "features": 3}, "features=3: there are none without dictionaries="),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            circuits.contribution_graph(one, 5, **options)
    some = {"direction": torch.ones(16).double(), "layers": slice(0, 1), "final_norm": False}
    with pytest.raises(tlens.InvalidInputError, match=r"are outside layers= 0 to 0\. Leave out"):
        circuits.contribution_graph(one, dictionaries=late, **some)
    pair = tlens.freeze(model, some_tokens())
    with pytest.raises(tlens.InvalidInputError, match="the pass has 2 prompts"):
        circuits.contribution_graph(pair, 5, dictionaries=two(pair))
