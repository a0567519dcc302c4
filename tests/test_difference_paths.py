"""Paths through what differs between two runs: their sum is the change of the live model's logit."""

import itertools

import pytest
import torch
from conftest import close, hooks_left, rerun_tolerance, rest_whole, some_tokens
from test_difference import logits

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.testing import model_names, tiny_model
from tensorlens_tl.testing.models import build_bridge

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]
HERE = set(model_names())
NAMES = [
    name
    for name in (
        "hooked/gqa", "hooked/sandwich", "hooked/post-only", "hooked/sinks", "encoder/bert", "bridge/gpt2",
        "bridge/llama", "bridge/neox", "bridge/mixtral",
    )
    if name in HERE
]  # fmt: skip
QUICK = ("hooked/gqa", "hooked/sandwich", "encoder/bert", "bridge/gpt2", "bridge/llama")


def two(model, batch=2):
    return [tlens.freeze(model, some_tokens(batch, seed=seed)) for seed in (0, 1)]


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_paths_sum_to_the_change_of_the_live_logit(name, model_named):
    a, b = two(model_named(name))
    paths = circuits.paths(tlens.difference(a, b), 5, minus=7, max_order=2)
    changes = (logits(a) - logits(b))[:, -1]
    expected = changes[:, [5]] - changes[:, [7]]
    size = max(1.0, float(logits(a).abs().max()))
    assert close((paths.scores.sum(-1) + paths.remainder) / size, expected / size, rerun_tolerance(name))
    assert close(paths.orders.sum(-1, keepdim=True) / size, expected / size, rerun_tolerance(name))
    assert paths.target.startswith("change of the logit of")
    heads = {node for path in paths.nodes for node in path if "H" in node}
    assert heads == {f"L{layer}H{head}.{way}" for layer in (0, 1) for head in range(4) for way in "qkv"}
    assert not hooks_left(a.model)


@pytest.mark.parametrize("name", rest_whole(NAMES, "hooked/sandwich", "hooked/post-only", "bridge/llama"))
def test_norms_of_two_models_after_attention_are_counted_once(name):
    """Queries, keys and values write through the same norm; what two models' gains differ by is added once."""
    a, b = (tlens.freeze(tiny_model(name, seed=seed), some_tokens(2)) for seed in (0, 1))
    difference = tlens.difference(a, b)
    stream = Stream.of(difference)
    assert close(stream.x[-1], difference.unembedded(), rerun_tolerance(name) * float(stream.x[-1].abs().max()))
    terms = circuits.logit_attribution(difference, 5, 7, by="head")
    changes = (logits(a) - logits(b))[:, -1]
    assert close(terms.scores.sum(-1), changes[:, [5]] - changes[:, [7]], 10 * rerun_tolerance(name))


@pytest.mark.parametrize("name", rest_whole([name for name in NAMES if name != "bridge/mixtral"], *QUICK))
def test_every_path_is_listed_and_all_through_a_node_are_its_score(name, model_named):
    """With no order left out, the paths through a head or MLP sum to what its change does through everything later."""
    a, b = two(model_named(name), batch=1)
    paths = circuits.paths(tlens.difference(a, b), 5, minus=7, max_order=4)
    assert float(paths.remainder.abs().max()) < 1e-12
    scores = circuits.patch_scores(a, b, 5, 7, method="difference")
    for node in ("L0H1", "L1H2", "MLP0", "MLP1"):
        through = [n for n, path in enumerate(paths.nodes) if any(part.split(".")[0] == node for part in path)]
        assert close(paths.scores[..., through].sum(-1), scores[node], rerun_tolerance(name)), node
    direct = circuits.logit_attribution(tlens.difference(a, b), 5, 7, by="head")
    for node in ("L0H1", "L1H2", "MLP1"):
        last = [n for n, path in enumerate(paths.nodes) if path and path[-1].split(".")[0] == node]
        assert close(paths.scores[..., last].sum(-1), direct[node], rerun_tolerance(name)), node


@pytest.mark.parametrize("name", [name for name in ("hooked/gqa", "bridge/gpt2", "encoder/bert") if name in HERE])
def test_a_path_is_its_maps_one_after_the_other(name, model_named):
    """Forwards, each node alone, and past all others in between."""
    a, b = two(model_named(name), batch=1)
    difference = tlens.difference(a, b)
    paths = circuits.paths(difference, 5, max_order=2)
    stream = Stream.of(difference)
    nodes = {
        part: (number, sublayer, place)
        for number, step in enumerate(stream.steps)
        for sublayer in step.sublayers
        for place, part in enumerate(sublayer.part_names)
    }
    for ends in itertools.product("vqk", repeat=2):
        path = (f"L0H1.{ends[0]}", f"L1H2.{ends[1]}")
        x = difference.resid_pre(0)
        at = 0
        for node in path:
            number, sublayer, place = nodes[node]
            for step in stream.steps[at:number]:
                x = step.outer.push(x)
            alone = torch.zeros_like(sublayer.read.push(x))
            sublayer.split(alone)[..., place, :] = sublayer.split(sublayer.read.push(x))[..., place, :]
            x = stream.steps[number].outer.push(sublayer.write.push(alone))
            at = number + 1
        for step in stream.steps[at:]:
            x = step.outer.push(x)
        vector = difference.logit_vectors(torch.tensor([[5]]), torch.tensor([[5]]))[0][0, 0]
        score = paths.scores[0, 0, paths.nodes.index(path)]
        assert close(score, x[0, -1] @ vector)


@pytest.mark.parametrize("name", [name for name in ("hooked/gqa", "bridge/gpt2") if name in HERE])
def test_the_largest_paths_are_among_all_of_them(name, model_named):
    a, b = two(model_named(name), batch=1)
    difference = tlens.difference(a, b)
    every = circuits.paths(difference, 5, max_order=4)
    top = circuits.top_paths(difference, 5, k=5, width=1000)
    largest = every.top(5)
    assert [entry.name for entry in top.top(5)] == [entry.name for entry in largest]
    for entry in largest:
        assert abs(float(top[entry.name]) - entry.score) < 1e-12
    assert close(top.scores.sum(-1) + top.remainder, every.total)


# ------------------------------------------------------------------ gates and norms behind the heads

BEHIND = [
    pytest.param(name, marks=pytest.mark.whole) if name == "bridge/bitnet" else name
    for name in ("bridge/afmoe", "bridge/bitnet")
    if name in HERE
]


@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_behind_the_heads_is_a_way_of_its_own(name, model_named):
    """A gate reads the stream beside queries, keys and values; a norm's scale responds in what heads write."""
    a, b = two(model_named(name), batch=1)
    difference = tlens.difference(a, b)
    changes = (logits(a) - logits(b))[:, -1]
    expected = changes[:, [5]] - changes[:, [7]]
    ways = "gqkv" if name == "bridge/afmoe" else "qkv"
    for result in (
        circuits.logit_attribution(difference, 5, 7, by="head"),
        circuits.logit_attribution(difference, 5, 7, by="head_token"),
        circuits.paths(difference, 5, 7, max_order=1),
        circuits.top_paths(difference, 5, 7, k=4),
    ):
        assert close(result.scores.sum(-1) + result.remainder, expected, 1e-5)  # their norms compute in float32
    paths = circuits.paths(difference, 5, 7, max_order=1)
    assert {node.split(".")[1] for path in paths.nodes for node in path if "H" in node} == set(ways)
    graph = circuits.contribution_graph(difference, 5, 7)
    assert graph.gap < 1e-5
    assert {f"L1H2.{way}" for way in ways} <= set(graph.nodes["name"])
    by = circuits.routes(difference, 5, 7)
    assert close(by.scores.sum(-1), expected[..., None].expand(by.scores.shape[:-1]), 1e-5)
    assert bool(by["gates"].any()) is (name == "bridge/afmoe")


def test_a_gated_head_writes_its_change(model_named):
    """By its four ways together what the live model's own gated heads change by, times W_O."""
    if "bridge/afmoe" not in HERE:
        pytest.skip("no gates here")
    a, b = two(model_named("bridge/afmoe"), batch=1)
    stream = Stream.of(tlens.difference(a, b))
    for layer in (0, 1):
        number, _ = stream.at(layer)
        hidden = zip(stream.steps[number].sublayers, stream.hidden[number], strict=True)
        written = sum(sublayer.outputs(value) for sublayer, value in hidden)
        inputs = []
        for frozen in (a, b):
            seen = {}
            out = frozen.view.blocks[layer].module.attn.o
            handle = out.register_forward_pre_hook(lambda module, args, seen=seen: seen.update(x=args[0].detach()))
            with torch.no_grad():
                frozen.model(**frozen.inputs)
            handle.remove()
            inputs.append(seen["x"])
        change = (inputs[0] - inputs[1]).unflatten(-1, (len(written), -1))
        W_O = a.view.blocks[layer].attention.W_O.unflatten(0, (len(written), -1))
        heads = torch.einsum("bphd,hdm->hbpm", change, W_O)
        after = stream.steps[number].sublayers[0].write.stages[1:]  # the gate's route, after W_O
        assert len(written) == len(heads) == 4
        for stage in after:
            heads = stage.push(heads)
        assert close(written, heads, 1e-5)


def test_edges_into_gates():
    """Edges into a node, its gate included, sum to its score, and those into the end to the change of the logit."""
    if "bridge/afmoe" not in HERE:
        pytest.skip("no gates here")
    a, b = two(build_bridge("afmoe", num_dense_layers=2))
    edges = circuits.edge_scores(a, b, 5, 7, method="difference", positions=True)
    nodes = circuits.patch_scores(a, b, 5, 7, method="difference")
    for layer, head in itertools.product((0, 1), range(4)):
        node = f"L{layer}H{head}"
        into = [f"{node}.{letter}" for letter in "qkvg"]
        scores = edges.scores[:, :, [edges.destinations.index(name) for name in into]]
        assert close(scores.sum((1, 2)), nodes[node][:, 0], 1e-5)
        assert bool(scores[..., -1].any())
    assert close(edges.scores[..., -1].sum(-1), edges.clean - edges.corrupted, 1e-5)
    assert close(edges.by_position.sum(-1), edges.scores, 1e-9)
    assert not bool(edges.scores[:, ~edges.exists].any())
    assert len(edges.circuit(len(edges))) > 0
