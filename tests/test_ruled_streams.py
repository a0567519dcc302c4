"""Graphs, paths, direct effects and edges of the live model under a rule, from parts of its own run.

Under the frozen rule they are the frozen model's, which reads weights; under the others a gradient of the run that is
not cut, patched modules differentiated by hand, and the sums that each answer states.
"""

import pytest
import torch
from conftest import close, hooks_left, rerun_tolerance, tolerance
from test_patching import two

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits.ruled import ruled_target
from tensorlens_tl.circuits.stream import stream_target
from tensorlens_tl.core import RULES, gradients, recorded
from tensorlens_tl.results import HEAD_ROUTES
from tensorlens_tl.testing import model_names, tiny_input, tiny_model

pytestmark = pytest.mark.numeric
ASKED = {"target": 5, "minus": 7}
LAYOUTS = [
    name
    for name in (
        "hooked/gqa", "hooked/parallel", "hooked/post-only", "hooked/attn-only", "encoder/bert", "bridge/gpt2",
        "bridge/llama", "bridge/neox", "bridge/bert", "bridge/opt", "bridge/opt-350m", "bridge/gemma3", "bridge/mamba",
        "bridge/falcon-h1", "bridge/rwkv", "bridge/bart", "bridge/t5", "bridge/t5gemma", "bridge/whitened",
        "hooked/whitened", "encoder-decoder/tied",
    )
    if name in model_names()
]  # fmt: skip
"""Every block layout, all classes of models, mixers in the place of attention and beside it, pairs of stacks."""
ALL_RULES = ("attnlrp", "frozen", "gim", "relp", "tangent")
REFUSED = ("loop", "altup")


def one(model):
    tokens, given = tiny_input(model, 1)
    return tlens.freeze(model, tokens, **given)


def answers(rule, name):
    """Whether a rule says something of a model."""
    return rule in ("frozen", "tangent") or name not in ("bridge/mamba", "bridge/falcon-h1", "bridge/rwkv")


def weights(graph):
    """The weights of nodes that are not nothing, by name and position; biases of a layer together.

    What two sublayers that write at once add by themselves is seen as one.
    """
    nodes = graph.nodes.copy()
    biases = nodes["kind"] == "bias"
    nodes.loc[biases, "name"] = "biases of " + nodes.loc[biases, "layer"].astype(str)
    table = nodes.groupby(["name", "pos"])["weight"].sum()
    return table[table.abs() > 1e-5]


@pytest.mark.parametrize("name", LAYOUTS)
def test_graphs_under_the_frozen_rule_are_the_frozen_models(name, model_named):
    """One by parts of the live run, the other by weights: every node and every edge."""
    frozen = one(model_named(name))
    mine, theirs = (
        circuits.contribution_graph(frozen, **ASKED, threshold=0, rule=rule) for rule in (RULES["frozen"], None)
    )
    assert mine.gap < rerun_tolerance(name)
    ours, expected = weights(mine), weights(theirs)
    assert list(ours.index) == list(expected.index)
    atol = rerun_tolerance(name) * max(1.0, float(expected.abs().max()))
    assert torch.allclose(torch.tensor(ours.values), torch.tensor(expected.values), atol=atol)

    def edges(graph):
        named = graph.nodes["name"] + "@" + graph.nodes["pos"].astype(str)
        table = graph.edges
        table = table[~graph.nodes["kind"].eq("bias")[table["source"]].values & (table["weight"].abs() > 1e-5)]
        keys = named[table["source"]].str.cat(named[table["target"]].values, sep=" → ").values
        return dict(zip(keys, table["weight"], strict=True))

    assert edges(mine) == pytest.approx(edges(theirs), abs=atol)


@pytest.mark.parametrize("rule", ALL_RULES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_answer_sums_to_the_logit_under_every_rule(name, rule, model_named):
    if not answers(rule, name):
        pytest.skip("refused by name")
    frozen = one(model_named(name))
    graph = circuits.contribution_graph(frozen, **ASKED, threshold=0, rule=RULES[rule])
    nodes = graph.nodes
    entering = graph.edges.groupby("target")["weight"].sum().reindex(nodes.index, fill_value=0.0)
    inner = nodes["kind"].isin(["head", "mlp", "mixer", "target"])
    atol = rerun_tolerance(name) * max(float(nodes["weight"].abs().max()), 1.0)
    assert float((entering + nodes["bias"] - nodes["weight"])[inner].abs().max()) < atol
    assert graph.total == pytest.approx(float(circuits.logit_attribution(frozen, **ASKED).total), abs=atol)
    routes = circuits.routes(frozen, **ASKED, rule=RULES[rule])
    allowed = rerun_tolerance(name)
    if name == "bridge/t5gemma":  # its last norm rounds pulls to float32, and what is rounded nearly cancels
        pulled = ruled_target(stream_target(frozen, 5, 7, None, -1, "frozen"), RULES[rule])[1]
        terms = pulled.stream[-2] * frozen.resid_pre(frozen.n_layers)
        allowed = max(allowed, torch.finfo(torch.float32).eps * float(terms.abs().sum() / routes.total.abs()))
    assert float(routes.gap.max()) < allowed
    for terms in (
        circuits.top_paths(frozen, **ASKED, k=5, rule=RULES[rule]),
        circuits.paths(frozen, **ASKED, max_order=1, rule=RULES[rule]),
        circuits.logit_attribution(frozen, **ASKED, by="head", rule=RULES[rule]),
    ):
        assert float(terms.gap.max()) < rerun_tolerance(name)
    assert not hooks_left(frozen.model)


@pytest.mark.parametrize("name", [*LAYOUTS, "bridge/t5", "bridge/whitened"])
def test_routes_of_a_pass_sum_at_every_layer_and_are_those_under_the_frozen_rule(name, model_named):
    if name not in model_names():
        pytest.skip("not on this TransformerLens")
    frozen = two(model_named(name))[0]
    held = circuits.routes(frozen, **ASKED, query=[-1, -2])
    assert float(held.gap.max()) < tolerance(name)
    heads = held.heads.sum((3, 4)) - sum(held[route] for route in HEAD_ROUTES)
    assert float(heads.abs().max()) < 1e-9 * float(held.scores.abs().max())
    if name in LAYOUTS:
        live = circuits.routes(frozen, **ASKED, query=[-1, -2], rule=RULES["frozen"])
        assert close(live["direct"], held["direct"], atol=rerun_tolerance(name))
        assert close(live["MLP"] + live["constants"], held["MLP"] + held["constants"], atol=rerun_tolerance(name))


@pytest.mark.parametrize("rule", ["gim", "tangent"])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if answers("gim", name) and name != "bridge/bart"])
def test_edges_of_a_node_sum_to_the_node_where_norms_follow_too(name, rule, model_named):
    """Nodes by gradients of the uncut run, edges by its parts; BART's norms behind its parts have no edges."""
    clean, corrupted = two(model_named(name))
    nodes = circuits.patch_scores(clean, corrupted, **ASKED, rule=rule)
    edges = circuits.edge_scores(clean, corrupted, **ASKED, rule=rule)
    order = [nodes.names.index(source) for source in edges.sources]
    assert close(edges.scores.sum(-1), nodes.scores[:, 0, order], atol=rerun_tolerance(name))


def test_an_edge_into_a_key_is_what_autograd_says_of_a_patched_projection():
    """The gradient by the keys that a module gives, alone, pulled to what the module reads by hand."""
    model = tiny_model("bridge/gpt2")
    clean, corrupted = two(model)
    edges = circuits.edge_scores(clean, corrupted, **ASKED, method="gradient")
    added = []

    def add(live, hook):
        added.append(torch.zeros_like(live, requires_grad=True))
        return live + added[0]

    with torch.enable_grad():
        logits = model.run_with_hooks(clean.tokens, fwd_hooks=[("blocks.1.attn.hook_k", add)])
        (at_keys,) = torch.autograd.grad((logits[:, -1, 5] - logits[:, -1, 7]).sum(), added)
    block = model.original_model.transformer.h[1]
    stream = clean.resid_pre(1).clone().requires_grad_(True)
    norm = getattr(block.ln_1, "original_component", block.ln_1)
    projection = getattr(block.attn.c_attn, "original_component", block.attn.c_attn)
    keys = projection(norm(stream)).chunk(3, dim=-1)[1]
    heads = at_keys.reshape(*keys.shape[:2], 4, -1)
    for head in range(4):
        alone = torch.zeros_like(heads)
        alone[:, :, head] = heads[:, :, head]
        (pulled,) = torch.autograd.grad(keys, stream, alone.flatten(2), retain_graph=True)
        change = clean.resid_pre(0) - corrupted.resid_pre(0)
        assert close(edges[f"embed → L1H{head}.k"], (change * pulled).sum((1, 2)), atol=1e-9)


@pytest.mark.parametrize("rule", ["frozen", "gim", "tangent"])
def test_parts_of_a_run_are_maps(rule, model_named):
    """Push and pull are adjoint, each part gives its own value, and a node's pull is that of its part."""
    readout = stream_target(one(model_named("bridge/gpt2")), 5, 7, None, -1, "frozen")
    stream = ruled_target(readout, RULES[rule])[0].stream
    x = stream.x[0]
    for part, value in zip(stream.steps[0].sublayers, stream.hidden[0], strict=True):
        assert close(part.read(x), value, atol=1e-9)
        rows, vectors = torch.randn(3, *x.shape).to(x), torch.randn(3, *value.shape).to(x)
        pushed, pulled = part.read.push(rows), part.read.pull(vectors)
        assert close((pushed * vectors).sum((1, 2, 3)), (rows * pulled).sum((1, 2, 3)), atol=1e-9)
        each = part.pull_each(part.split(vectors))
        assert close(each.sum(0), pulled, atol=1e-9)
        assert close(each[1], part.read_of(1).pull(part.split(vectors)[..., 1, :]), atol=1e-9)
        last = part.read.stages[-1]
        width = last.given.numel() // x.shape[1]
        basis = torch.eye(width * x.shape[1], dtype=x.dtype).unflatten(-1, (1, x.shape[1], width))
        assert float(torch.linalg.matrix_norm(last.push(basis).flatten(1), 2)) <= last.norm_bound() + 1e-9
        first = slice(0, 2)  # of a causal model: nothing later reaches these positions
        later = vectors.clone()
        later[..., 2:, :] = 0
        assert close(last.at(first).pull(vectors[..., first, :]), last.pull(later)[..., first, :], atol=1e-9)


@pytest.mark.parametrize("name", [name for name in model_names() if any(part in name for part in REFUSED)])
def test_what_cannot_be_cut_is_refused_by_name(name, model_named):
    model = model_named(name)
    try:
        frozen, _ = two(model, 1)
        readout = stream_target(frozen, 5, 7, None, -1, "frozen")
    except tlens.TensorLensError:
        pytest.skip("has no stream at all")
    with pytest.raises(tlens.UnsupportedModelError, match="cannot be cut out of a run"):
        ruled_target(readout, RULES["tangent"])


def test_what_makes_no_sense_is_refused(model_named):
    clean, corrupted = two(model_named("bridge/gpt2"), 1)
    change = tlens.difference(clean, corrupted)
    for asked in (
        circuits.contribution_graph,
        circuits.top_paths,
        circuits.paths,
        circuits.logit_attribution,
        circuits.routes,
    ):
        with pytest.raises(tlens.InvalidInputError, match="a rule applies to one run"):
            asked(change, **ASKED, rule="gim")
        with pytest.raises(tlens.InvalidInputError, match="use one of"):
            asked(clean, **ASKED, rule="guess")
    with pytest.raises(tlens.InvalidInputError, match="Leave sources and dictionaries out"):
        circuits.contribution_graph(clean, **ASKED, rule="gim", sources=2)
    with pytest.raises(tlens.InvalidInputError, match="by='head'"):
        circuits.logit_attribution(clean, **ASKED, rule="gim", by="head_token")


def test_an_attached_pass_is_refused_and_inference_mode_is_none(model_named):
    clean, _ = two(model_named("bridge/gpt2"), 1)
    expected = circuits.top_paths(clean, **ASKED, rule="gim", k=3)
    with clean.attached(), pytest.raises(tlens.FrozenModelError, match="attached"):
        circuits.top_paths(clean, **ASKED, rule="gim")
    with torch.inference_mode():
        there = circuits.top_paths(tlens.freeze(clean.model, clean.tokens), **ASKED, rule="gim", k=3)
    assert there.names == expected.names
    assert close(there.scores, expected.scores, 1e-12)


def test_a_model_that_hooks_changed_since_is_refused_as_another_one(model_named):
    frozen = one(model_named("bridge/gpt2"))
    with frozen.model.hooks(fwd_hooks=[("blocks.0.hook_out", lambda live, hook: 2 * live)]):
        for asked in (circuits.routes, circuits.logit_attribution, circuits.total_effects):
            with pytest.raises(tlens.FrozenModelError, match="hooks were put on it or taken off since"):
                asked(frozen, **ASKED, rule="gim")


def test_padded_prompts_are_as_alone(model_named):
    model = model_named("bridge/llama")
    both = tlens.freeze(
        model, torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]]), attention_mask=torch.tensor([[1] * 4, [1, 1, 1, 0]])
    )
    alone = tlens.freeze(model, torch.tensor([[7, 8, 9]]))
    terms, expected = (circuits.logit_attribution(passed, **ASKED, rule="gim") for passed in (both, alone))
    assert close(terms.scores[1:], expected.scores, 1e-6)


def test_a_part_that_is_missed_is_refused(model_named, monkeypatch):
    """The parts are compared with the whole: one whose gradients are a hundredth too large is none of it."""
    readout = stream_target(one(model_named("bridge/gpt2")), 5, 7, None, -1, "frozen")
    assert bool(ruled_target(readout, RULES["gim"])[1].stream[0].any())
    monkeypatch.setattr(recorded, "gradients", lambda *given, **options: 1.01 * gradients(*given, **options))
    with pytest.raises(tlens.NumericalError, match="parts of a run are not the whole"):
        ruled_target(readout, RULES["gim"])


def test_neurons_that_no_hook_point_shows_are_refused(model_named):
    """An MLP that is held as a whole shows what it writes, whose channels are no neurons."""
    frozen = one(model_named("bridge/bitnet"))
    assert circuits.logit_attribution(frozen, **ASKED, by="neuron")["MLP0.N3"].shape == (1, 1)
    for answer in (
        lambda: circuits.logit_attribution(frozen, **ASKED, by="neuron", rule="gim"),
        lambda: circuits.contribution_graph(frozen, **ASKED, neurons=2, rule="gim"),
    ):
        with pytest.raises(tlens.UnsupportedModelError, match="shows the neurons of MLP0"):
            answer()
    shown = one(model_named("bridge/gpt2"))
    by_neuron, by_head = (circuits.logit_attribution(shown, **ASKED, by=by, rule="gim") for by in ("neuron", "head"))
    neurons = [number for number, name in enumerate(by_neuron.names) if name.startswith("MLP0.N")]
    assert close(by_neuron.scores[..., neurons].sum(-1), by_head["MLP0"], 1e-12)
