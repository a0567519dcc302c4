"""Contribution graphs with split nodes, and how they are handed on: sums hold for parts, in files, and elsewhere.

The independent computation is the live model, held fixed by hooks: taking one neuron, or what one head reads from one
token, away there must cost exactly that node's weight.
"""

import pytest
from conftest import some_tokens, tolerance
from test_circuits import token_logit

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits import graph as graph_module
from tensorlens_tl.testing import model_names

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
    assert made.residual < tolerance(name)
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
    assert made.residual < tolerance(name)


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
    monkeypatch.setattr(graph_module, "MOST_NODES", 50)
    with pytest.raises(tlens.SizeError, match="fewer neurons="):
        circuits.contribution_graph(one, 5, neurons=40)
    with pytest.raises(tlens.SizeError, match="neurons= or sources="):
        circuits.contribution_graph(one, 5, neurons=4)


def test_many_parts_go_in_pieces(model_named, monkeypatch):
    one = tlens.freeze(model_named("bridge/llama"), some_tokens(batch=1))
    made = circuits.contribution_graph(one, 5, threshold=0, neurons=5, sources=3)
    monkeypatch.setattr(circuits.parts, "ROW_BYTES", 1)
    monkeypatch.setattr(circuits.edges, "EDGE_BYTES", 1)
    again = circuits.contribution_graph(one, 5, threshold=0, neurons=5, sources=3)
    assert list(again.nodes["name"]) == list(made.nodes["name"])
    pairs = [found.edges.set_index(["source", "target"])["weight"] for found in (made, again)]
    assert float(pairs[0].sub(pairs[1], fill_value=0).abs().max()) < 1e-12
