"""Vectors that hooks add to the stream are constants of a pass, and of the difference to a run without them."""

import pytest
import torch
from conftest import close, hooks_left, rest_whole, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.hooks import capture, hook_points
from tensorlens_tl.testing import model_names, tiny_model

pytestmark = pytest.mark.numeric

NAMES = [
    "bridge/gpt2", "hooked/ln", "hooked/parallel", "hooked/sandwich", "encoder/bert",
    "bridge/llama", "bridge/gemma2", "bridge/neox", "bridge/llama-compatibility",
]  # fmt: skip
NAMES = [name for name in NAMES if name in model_names()]
HANDFUL = [name for name in ("bridge/gpt2", "hooked/ln", "hooked/parallel", "encoder/bert") if name in NAMES]
POINTS = [
    "blocks.1.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post", "blocks.0.hook_resid_mid",
    "blocks.0.hook_normalized_resid_post", "blocks.0.hook_attn_out", "blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out",
]  # fmt: skip
TARGET = 5


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def points_of(name, model):
    """The points of the stream; on a Bridge `hook_resid_mid` is what the second norm reads."""
    known = hook_points(model)
    bridge = name.startswith("bridge/")
    return [point for point in POINTS if point in known and not (bridge and point.endswith("resid_mid"))]


def adding(*pairs):
    """Hooks that add a vector each."""
    return [(point, lambda x, hook, vectors=vectors: x + vectors.to(x)) for point, vectors in pairs]


def steered_and_plain(model, *pairs, **options):
    tokens = some_tokens()
    plain = tlens.freeze(model, tokens)
    with model.hooks(fwd_hooks=adding(*pairs)):
        steered = tlens.freeze(model, tokens, **options)
    return steered, plain


def live_logit(model, hooks=()):
    with torch.no_grad():
        return model.run_with_hooks(some_tokens(), fwd_hooks=list(hooks))[:, -1:, TARGET].double()


@pytest.mark.parametrize("name", rest_whole(NAMES, *HANDFUL))
def test_a_pass_holds_what_hooks_add(name, model_named):
    model = model_named(name)
    for point in points_of(name, model):
        for options in ({}, {"verify": "sample"}, {"patterns": "recompute"}):
            with model.hooks(fwd_hooks=adding((point, drawn(6, model.cfg.d_model)))):
                live = live_logit(model)
                steered = tlens.freeze(model, some_tokens(), **options)
            assert max(steered.errors.values()) <= tolerance(name)
            assert [stream.name for stream in steered.capture.additions.constant] == [point]
            operator = steered.operator()
            assert close(operator(operator.x), steered.output, 10 * tolerance(name))
            if steered.soft_cap is None and steered.view.mlm_head is None:
                assert close(tlens.attribute(steered, TARGET).total, live, 10 * tolerance(name))
    assert hooks_left(model) == 0


@pytest.mark.parametrize("name", rest_whole(NAMES, *HANDFUL))
def test_the_held_model_adds_it_once(name, model_named):
    model = model_named(name)
    for point in points_of(name, model):
        with model.hooks(fwd_hooks=adding((point, drawn(6, model.cfg.d_model)))):
            steered = tlens.freeze(model, some_tokens())
            with steered.attached() as held:
                seen, _ = capture(held, steered.inputs, [steered.points.output])
        output = seen[steered.points.output].reshape(steered.output.shape)
        assert close(output, steered.output, 10 * tolerance(name))


@pytest.mark.parametrize("name", ["bridge/mixtral", "bridge/qwen3-next"])
def test_what_is_held_as_a_whole_adds_it_once(name, model_named):
    model = model_named(name)
    known = hook_points(model)
    for point in ("blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"):
        if point not in known:
            continue
        with model.hooks(fwd_hooks=adding((point, drawn(6, model.cfg.d_model)))):
            steered = tlens.freeze(model, some_tokens())
            with steered.attached() as held:
                seen, _ = capture(held, steered.inputs, [steered.points.output])
        assert close(seen[steered.points.output], steered.output, 1e-5)


@pytest.mark.parametrize("point", ["hook_attn_out", "attn.hook_out", "hook_mlp_out", "mlp.hook_out"])
def test_before_and_after_a_constant_of_the_block(point, model_named):
    """Granite multiplies what sublayers write, and shows it before that and after it at hook points of their own."""
    model = model_named("bridge/granite-moe")
    with model.hooks(fwd_hooks=adding((f"blocks.0.{point}", drawn(6, model.cfg.d_model)))):
        live = live_logit(model)
        steered = tlens.freeze(model, some_tokens())
        with steered.attached() as held:
            seen, _ = capture(held, steered.inputs, [steered.points.output])
    assert [stream.name for stream in steered.capture.additions.constant] == [f"blocks.0.{point}"]
    assert close(seen[steered.points.output], steered.output, 1e-5)
    terms = circuits.logit_attribution(steered, TARGET)
    assert close(terms.total, live, 1e-6)
    assert close(terms.scores.sum(-1), live, 1e-6)
    change = tlens.difference(steered, tlens.freeze(model, some_tokens()))
    assert close(tlens.attribute(change, TARGET).total, live - live_logit(model), 1e-6)
    assert f"blocks.0.{point}" in circuits.logit_attribution(change, TARGET).names


@pytest.mark.parametrize("name", rest_whole(NAMES, *HANDFUL))
def test_the_difference_to_a_plain_run_is_the_effect_of_the_vector(name, model_named):
    model = model_named(name)
    for point in points_of(name, model):
        steered, plain = steered_and_plain(model, (point, drawn(6, model.cfg.d_model)))
        change = tlens.difference(steered, plain)
        assert max(change.errors.values()) <= 10 * tolerance(name)
        why = tlens.attribute(change, TARGET)
        effect = (steered.unembedded() - plain.unembedded())[:, -1:] @ steered.view.unembedding[0][:, TARGET]
        assert close(why.total, effect, 10 * tolerance(name))
        assert close(why.bias, why.total, 100 * tolerance(name))
        assert not bool(why.scores.any())
        back = tlens.attribute(tlens.difference(plain, steered), TARGET)
        assert close(back.bias, -why.bias, 100 * tolerance(name))


@pytest.mark.parametrize("name", rest_whole(NAMES, *HANDFUL))
def test_terms_name_the_hook_point_and_the_heads_it_acts_through(name, model_named):
    model = model_named(name)
    for point in points_of(name, model):
        steered, plain = steered_and_plain(model, (point, drawn(6, model.cfg.d_model)))
        change = tlens.difference(steered, plain)
        for by in ("component", "head"):
            terms = circuits.logit_attribution(change, TARGET, by=by)
            assert point in terms.names
            assert close(terms.scores.sum(-1), terms.total, 100 * tolerance(name))
        acts = bool(terms.scores[..., [name.startswith("L1H") for name in terms.names]].abs().max() > 1e-6)
        assert acts == (not point.startswith("blocks.1.hook_resid_post") and point != "blocks.1.hook_mlp_out")
        own = circuits.logit_attribution(steered, TARGET, by="head")
        assert point in own.names
        assert close(own.scores.sum(-1), own.total, 100 * tolerance(name))


@pytest.mark.parametrize("name", HANDFUL)
def test_several_hooks_and_different_vectors_at_each_position(name, model_named):
    model = model_named(name)
    points = points_of(name, model)
    at_last = torch.zeros(6, model.cfg.d_model, dtype=torch.float64)
    at_last[-1] = drawn(model.cfg.d_model)
    of_rows = drawn(2, 6, model.cfg.d_model)
    pairs = [(point, vectors) for point in points for vectors in (at_last, of_rows)]
    steered, plain = steered_and_plain(model, *pairs)
    added = steered.capture.additions.constant
    assert {stream.name for stream in added} == set(points)
    assert all(close(vectors, at_last + of_rows) for vectors in added.values())
    terms = circuits.logit_attribution(tlens.difference(steered, plain), TARGET, by="head")
    assert set(points) <= set(terms.names)
    assert close(terms.scores.sum(-1), terms.total, 1e-9)


def test_a_result_says_what_splits_the_bias_that_a_vector_adds_to(model_named, capsys):
    model = model_named("bridge/gpt2")
    steered, plain = steered_and_plain(model, ("blocks.1.hook_resid_pre", drawn(16)))
    pointer = "circuits.logit_attribution splits the bias"
    results = {
        "steered": tlens.attribute(tlens.difference(steered, plain), TARGET),
        "prompt": tlens.attribute(plain, TARGET, minus=TARGET + 1, baseline="zero", method="difference"),
        "vectors": tlens.attribute(steered, collapse="in_out", query=-1),
    }
    for name, result in results.items():
        result.show(batch=0)
        printed = " ".join(capsys.readouterr().out.split())
        assert (pointer in printed) == (name == "steered"), name
        assert (pointer in result.to_html(batch=0)) == (name == "steered"), name


def test_the_same_vector_in_both_runs_is_no_difference(model_named):
    model = model_named("bridge/gpt2")
    point = "blocks.1.hook_resid_pre"
    with model.hooks(fwd_hooks=adding((point, drawn(6, 16)))):
        a = tlens.freeze(model, some_tokens(seed=1))
        b = tlens.freeze(model, some_tokens(seed=2))
    change = tlens.difference(a, b)
    assert point not in circuits.logit_attribution(change, TARGET).names
    why = tlens.attribute(change, TARGET)
    assert close(why.scores.sum(-1), why.total)


def test_a_hook_may_write_into_what_it_is_given(model_named):
    model = model_named("bridge/gpt2")
    vector = drawn(16)

    def steer(x, hook):
        x[:, -1] += vector
        return x

    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", steer)]):
        steered = tlens.freeze(model, some_tokens())
    (vectors,) = steered.capture.additions.constant.values()
    assert close(vectors[:, -1], vector.expand(2, -1))
    assert not bool(vectors[:, :-1].any())


def scaled(x, hook):
    return 1.5 * x


def rectified(x, hook):
    return x.relu()


def averaged(x, hook):
    return x.mean(0, keepdim=True).expand_as(x)


def projected_out(x, hook):
    direction = torch.nn.functional.normalize(drawn(x.shape[-1]), dim=0)
    return x - (x @ direction)[..., None] * direction


def thresholded(x, hook):
    return torch.where(x.abs() > x.abs().median(), x, 0)


@pytest.mark.parametrize("act", [scaled, rectified, averaged, thresholded, projected_out])
@pytest.mark.parametrize("name", HANDFUL)
@pytest.mark.few(8)
def test_what_depends_on_what_it_reads_is_refused_by_name(name, act, model_named):
    model = model_named(name)
    for point in points_of(name, model):
        match = rf"cannot be frozen.*A hook at {point} adds something that depends on what it reads"
        with model.hooks(fwd_hooks=[(point, act)]), pytest.raises(tlens.UnsupportedModelError, match=match):
            tlens.freeze(model, some_tokens())
    assert hooks_left(model) == 0


# ------------------------------------------------------------------ patches


def ablated(x, hook):
    x = x.clone()
    x[:, 1:3] = 0
    return x


def nearly_ablated(x, hook):
    return ablated(x, hook) + 1e-14


def patched(x, hook):
    return drawn(*x.shape).to(x)


def patched_at_a_position(x, hook):
    x = x.clone()
    x[:, 2] = drawn(x.shape[-1]).to(x)
    return x


def patched_in_some_channels_and_steered(x, hook):
    x = x + drawn(x.shape[-1]).to(x)
    x[:, 1:4, :5] = 0.7
    return x


PATCHES = [ablated, patched, patched_at_a_position, patched_in_some_channels_and_steered]


def patched_and_plain(model, point, act):
    plain = tlens.freeze(model, some_tokens())
    with model.hooks(fwd_hooks=[(point, act)]):
        run = tlens.freeze(model, some_tokens())
    return run, plain


@pytest.mark.parametrize("act", PATCHES)
@pytest.mark.parametrize("name", rest_whole(NAMES, *HANDFUL))
@pytest.mark.few(6)
def test_the_difference_to_a_plain_run_is_the_effect_of_a_patch(name, act, model_named):
    model = model_named(name)
    for point in points_of(name, model):
        run, plain = patched_and_plain(model, point, act)
        assert [stream.name for stream in run.capture.additions.patched] == [point]
        change = tlens.difference(run, plain)
        why = tlens.attribute(change, TARGET)
        if plain.soft_cap is None and plain.view.mlm_head is None:
            live = live_logit(model, [(point, act)]) - live_logit(model)
            assert close(why.total, live, 10 * tolerance(name))
        assert close(why.bias, why.total, 100 * tolerance(name))
        assert not bool(why.scores.any())
        terms = circuits.logit_attribution(change, TARGET, by="head")
        assert close(terms.scores.sum(-1), terms.total, 100 * tolerance(name))
        assert point in terms.names
        back = tlens.attribute(tlens.difference(plain, run), TARGET)
        assert close(back.bias, -why.bias, 100 * tolerance(name))
    assert hooks_left(model) == 0


@pytest.mark.parametrize("act", [patched_at_a_position, ablated])
@pytest.mark.parametrize("name", rest_whole(NAMES, *HANDFUL))
@pytest.mark.few(3)
def test_edges_show_by_which_ways_a_patch_reached_the_target(name, act, model_named):
    """Into the target they sum to the live effect, and the edges that leave the patch to what the patch does at all."""
    model = model_named(name)
    for point in points_of(name, model):
        run, plain = patched_and_plain(model, point, act)
        asked = {"target": TARGET, "minus": 7, "method": "difference"}
        edges = circuits.edge_scores(run, plain, **asked, positions=True)
        nodes = circuits.patch_scores(run, plain, **asked, positions=True)
        effect = (edges.clean - edges.corrupted)[:, None]
        if plain.soft_cap is None and plain.view.mlm_head is None:
            numbers = [live_logits(model, hooks) for hooks in ([(point, act)], [])]
            live = [logits[:, -1:, TARGET] - logits[:, -1:, 7] for logits in numbers]
            assert close(edges.clean[:, None], live[0], 10 * tolerance(name))
            assert close(effect, live[0] - live[1], 10 * tolerance(name))
        assert close(nodes.total, effect, 10 * tolerance(name))
        error = 100 * tolerance(name)
        assert close(edges.scores[:, :, -1].sum(-1, keepdim=True), effect, error)
        assert close(nodes[point], effect, error)
        source = edges.sources.index(point)
        assert close(edges.scores[:, source].sum(-1, keepdim=True), effect, error)
        assert close(edges.by_position.sum(-1), edges.scores, 1e-9)
        assert close(nodes.keys.sum(-1), nodes.scores, 1e-9)
        assert not bool(nodes["embed"].any())
        assert len(set(edges.destinations)) == len(edges.destinations)
        assert not bool(edges.scores[:, ~edges.exists].any())
        before = ~edges.exists[source]  # what reads the stream before the patch
        assert bool(before.any())
        assert not bool((edges.scores[:, :, before].abs() > error).any())


def live_logits(model, hooks):
    with torch.no_grad():
        return model.run_with_hooks(some_tokens(), fwd_hooks=hooks).double()


def test_a_patch_is_a_node_of_the_graph(model_named):
    model = model_named("bridge/gpt2")
    run, plain = patched_and_plain(model, "blocks.1.hook_resid_pre", patched_at_a_position)
    row = [tlens.freeze(model, some_tokens()[:1])]
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", patched_at_a_position)]):
        row.insert(0, tlens.freeze(model, some_tokens()[:1]))
    graph = circuits.contribution_graph(tlens.difference(*row), TARGET)
    (node,) = graph.nodes.index[(graph.nodes["name"] == "blocks.1.hook_resid_pre") & (graph.nodes["pos"] == 2)]
    effect = live_logit(model, [("blocks.1.hook_resid_pre", patched_at_a_position)]) - live_logit(model)
    assert graph.nodes.loc[node, "weight"] == pytest.approx(float(effect[0]), abs=1e-9)
    assert float(graph.gap) < 1e-9
    assert close(tlens.attribute(tlens.difference(run, plain), TARGET).total, effect)


@pytest.mark.parametrize("point", ["blocks.0.hook_attn_out", "blocks.0.hook_resid_post"])
def test_a_patched_run_of_another_prompt(point, model_named):
    """What differs before the patch passes it, and the constant is what the patch changed in its run."""
    model = model_named("bridge/gpt2")
    with model.hooks(fwd_hooks=[(point, patched_at_a_position)]):
        run = tlens.freeze(model, some_tokens(seed=1))
    other = tlens.freeze(model, some_tokens(seed=2))
    for change in (tlens.difference(run, other), tlens.difference(other, run)):
        why = tlens.attribute(change, TARGET)
        assert close(why.scores.sum(-1) + why.bias, why.total)
        assert bool(why.scores.any())
        edges = circuits.edge_scores(change.a, change.b, TARGET, method="difference")
        assert close(edges.scores[:, :, -1].sum(-1), edges.clean - edges.corrupted)


def test_the_same_patch_in_both_runs_is_no_source(model_named):
    model = model_named("bridge/gpt2")
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", patched_at_a_position)]):
        runs = [tlens.freeze(model, some_tokens()) for _ in range(2)]
        edges = circuits.edge_scores(*runs, TARGET, method="difference")
    assert "blocks.1.hook_resid_pre" not in edges.sources
    assert not bool(edges.scores.any())


def test_a_patched_run_by_itself_has_no_map_where_it_was_patched(model_named):
    model = model_named("bridge/gpt2")
    run, plain = patched_and_plain(model, "blocks.1.hook_resid_pre", patched_at_a_position)
    match = r"blocks\.0 .*a hook at blocks\.1\.hook_resid_pre replaced values.*difference"
    for question in (
        lambda: run.operator(),
        lambda: tlens.attribute(run, TARGET),
        lambda: tlens.attribute(run, method="alti"),
        lambda: tlens.attribute(run, method="decompx", aggregate="norm"),
        lambda: circuits.logit_attribution(run, TARGET),
        lambda: circuits.total_effects(run, TARGET),
        lambda: circuits.contribution_graph(run, TARGET),
        lambda: circuits.edge_scores(run, plain, TARGET, method="frozen"),
        lambda: circuits.patch_scores(run, plain, TARGET, method="frozen"),
    ):
        with pytest.raises(tlens.UnsupportedModelError, match=match):
            question()
    after = run.operator(layers=slice(1, None))  # begins after the patch
    assert close(after(after.x), run.output)
    assert close(after.x[:, 2], drawn(16).expand(2, -1))


@pytest.mark.parametrize("name", HANDFUL)
def test_a_stream_of_zeros_is_compared_with_what_it_was(name, model_named):
    """However the zeros round: a sum that hooks cancel, to zero or to nearly zero, is as exact as its summands."""
    model = model_named(name)
    for act in (ablated, nearly_ablated):
        with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", act)]):
            run = tlens.freeze(model, some_tokens())
        assert run.errors["blocks.0"] < 1e-12


def test_circuits_of_a_patch_are_not_run(model_named):
    model = model_named("bridge/gpt2")
    run, plain = patched_and_plain(model, "blocks.1.hook_resid_pre", patched_at_a_position)
    edges = circuits.edge_scores(run, plain, TARGET, method="difference")
    with pytest.raises(tlens.UnsupportedModelError, match="replaced values that the model computes"):
        circuits.run_circuits(run, plain, edges.circuit(3), TARGET)


def test_a_hook_that_only_looks_costs_no_further_run(model_named):
    model = model_named("bridge/gpt2")
    tlens.freeze(model, some_tokens())
    runs = []
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: runs.append(1))]):
        frozen = tlens.freeze(model, some_tokens())
    assert len(runs) == 1
    assert not frozen.capture.additions.constant


def test_what_a_norm_of_a_bridge_reads_is_no_place_of_the_stream(model_named):
    """A Bridge's `hook_resid_mid` is what the second norm reads; the stream goes past it."""
    model = model_named("bridge/gpt2")
    hooks = adding(("blocks.0.hook_resid_mid", drawn(6, 16)))
    with (
        model.hooks(fwd_hooks=hooks),
        pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*cannot be frozen"),
    ):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("point", ["blocks.0.hook_attn_out", "blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"])
@pytest.mark.parametrize("name", [name for name in HANDFUL if name != "encoder/bert"])
@pytest.mark.parametrize("query", [2, "all"])
def test_decompx_spreads_it_as_a_bias(query, name, point, model_named):
    model = model_named(name)
    hooks = adding((point, drawn(6, model.cfg.d_model)))
    with model.hooks(fwd_hooks=hooks):  # every query's logit is compared with the model's
        steered = tlens.freeze(model, some_tokens())
        result = tlens.methods.decompx(steered, target=TARGET, query=query)
    assert close(result.scores.sum(-1) + result.bias, result.total)


@pytest.mark.parametrize("method", ["tensorlens", "input-x-gradient", "rollout", "globenc", "alti", "ifr"])
def test_methods_give_what_they_give_for_a_model_with_the_bias(method, model_named):
    """The same vector at every position acts as a bias."""
    model = model_named("bridge/gpt2")
    vector = drawn(16)
    options = {"target": TARGET} if method in ("tensorlens", "input-x-gradient") else {}
    steered, _ = steered_and_plain(model, ("blocks.0.hook_attn_out", vector), ("blocks.1.hook_mlp_out", vector))
    with model.hooks(fwd_hooks=adding(("blocks.0.hook_attn_out", vector), ("blocks.1.hook_mlp_out", vector))):
        scores = tlens.attribute(steered, method=method, **options).scores
    biased = tiny_model("bridge/gpt2")
    blocks = biased.original_model.transformer.h
    blocks[0].attn.c_proj.bias.data += vector
    blocks[1].mlp.c_proj.bias.data += vector
    assert close(scores, tlens.attribute(tlens.freeze(biased, some_tokens()), method=method, **options).scores)
