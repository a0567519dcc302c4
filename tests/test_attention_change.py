"""Why attention moved: exact sums for the change of a score and of an entry of the pattern, against the live model."""

import copy

import pytest
import torch
from conftest import SCORES, close, hooks_left, pattern_point, rerun_tolerance, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.passes import freeze_changed
from tensorlens_tl.testing import encoder_decoder_names, model_names, tiny_input, tiny_model

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]
HERE = set(model_names())
SIDES = ("bridge/bart", "bridge/t5", "encoder-decoder/tied")
NAMES = [
    name
    for name in (
        "hooked/ln", "hooked/gqa", "hooked/rotary", "hooked/alibi", "hooked/soft-caps", "hooked/sinks",
        "hooked/shortformer", "hooked/post-only", "hooked/sandwich", "hooked/qk-norm", "hooked/local", "encoder/bert",
        "bridge/gpt2", "bridge/llama", "bridge/gemma2", "bridge/qwen3", "bridge/opt", "bridge/neox", "bridge/mixtral",
        "bridge/whitened", "bridge/deepseek-v3", "bridge/afmoe",
    )
    if name in HERE
]  # fmt: skip
QUICK = ("hooked/ln", "hooked/soft-caps", "hooked/shortformer", "encoder/bert", "bridge/llama", "bridge/gpt2", *SIDES)
FEW = [name for name in ("hooked/ln", "hooked/gqa", "bridge/gpt2", "bridge/llama") if name in HERE]
WHERE = {"layer": 1, "head": 2, "query": 4, "key": 3}
HEAD = (slice(None), WHERE["head"])


def places(names, scores):
    """Models with the scores that are asked about, as `qk_attribution` takes them, and their places in the pattern."""
    one_stack = {"self": (WHERE, (*HEAD, 4, 3))}
    both = {side: ({**where, "head": WHERE["head"]}, (*HEAD, *inside)) for side, (where, inside) in scores.items()}
    cases = [
        pytest.param(name, place, id=f"{name}-{side}", marks=() if name in QUICK else pytest.mark.whole)
        for name in names
        for side, place in (both if name in encoder_decoder_names() else one_stack).items()
    ]
    return pytest.mark.parametrize(("name", "place"), cases)


ALL = places([*NAMES, *encoder_decoder_names()], SCORES)
SOME = places([*FEW, *(name for name in SIDES if name in HERE)], {side: SCORES[side] for side in ("decoder", "cross")})


def two(model, seeds=(0, 1)):
    inputs = [tiny_input(model, seed=seed) for seed in seeds]
    return [tlens.freeze(model, tokens, **options) for tokens, options in inputs]


def live_pattern(frozen, layer, cross=False, **_):
    """The pattern of a run of the model, seen by a hook of our own."""
    seen = {}

    def see(pattern, hook):
        seen["pattern"] = pattern.detach().clone()

    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[(pattern_point(frozen, layer, cross), see)])
    return seen["pattern"]


def whole(change):
    return change.query_sources.sum(-1) + change.key_sources.sum(-1) + change.constants.sum(-1)


@pytest.mark.few(16)
@pytest.mark.parametrize("by", ["token", "component", "head"])
@ALL
def test_parts_sum_to_the_change_of_the_live_pattern_and_score(name, place, by, model_named):
    where, inside = place
    a, b = two(model_named(name))
    difference = tlens.difference(a, b)
    allowed = rerun_tolerance(name)
    moved = circuits.qk_attribution(difference, **where, by=by, of="pattern")
    change = live_pattern(a, **where) - live_pattern(b, **where)
    assert close(whole(moved), change[inside], allowed)
    assert float(moved.total.abs().max()) > 1e-3
    scored = circuits.qk_attribution(difference, **where, by=by)
    numbers = [circuits.qk_attribution(run, **where).total for run in (a, b)]
    assert close(whole(scored), numbers[0] - numbers[1], allowed)
    assert not hooks_left(a.model)


@pytest.mark.few(10)
@pytest.mark.parametrize("of", ["pattern", "score"])
@ALL
def test_sides_do_not_depend_on_what_sources_are(name, place, of, model_named):
    """Tokens go through the secants of all earlier blocks, components are what hooks saw written."""
    where, _ = place
    difference = tlens.difference(*two(model_named(name)))
    by = {way: circuits.qk_attribution(difference, **where, by=way, of=of) for way in ("token", "component", "head")}
    for side in ("query_sources", "key_sources"):
        sums = [getattr(change, side).sum(-1) for change in by.values()]
        if name == "bridge/mixtral":  # a changed routing is a constant among tokens, and part of what an MLP wrote
            sums = sums[1:]
        for other in sums[1:]:
            assert close(other, sums[0], rerun_tolerance(name))
    heads = [number for number, label in enumerate(by["head"].names[0]) if label.startswith("L0H")]
    attention = by["component"].names[0].index("L0.attn")
    assert close(by["head"].scores[:, heads].sum(-1), by["component"].scores[:, attention], rerun_tolerance(name))


@pytest.mark.parametrize("name", FEW)
def test_a_row_of_the_pattern_moves_by_nothing_in_all(name, model_named):
    """Its entries sum to 1 in both runs, and so does what every token gives to all keys sum to 0."""
    difference = tlens.difference(*two(model_named(name)))
    rows = [circuits.qk_attribution(difference, 1, 0, query=4, key=key, of="pattern") for key in range(5)]
    assert close(sum(row.query_sources for row in rows), torch.zeros_like(rows[0].query_sources))
    assert close(sum(row.key_sources for row in rows), torch.zeros_like(rows[0].key_sources))


@pytest.mark.parametrize("name", FEW)
def test_the_query_side_is_the_secant_written_out(name, model_named):
    """At the first layer, by the formula, from the live model's own scores of both runs and mixtures of the two."""
    a, b = two(model_named(name))
    difference = tlens.difference(a, b)
    first = circuits.qk_attribution(difference, 0, 1, query=4, key=2, of="pattern")
    readings = [circuits.scores.score_reading(run, 0) for run in (a, b)]
    (q_a, k_a), (q_b, k_b) = (
        reading.vectors(run.capture.resid_read(0)) for reading, run in zip(readings, (a, b), strict=True)
    )
    repeat = readings[0].heads // readings[0].kv_heads
    k_a, k_b = (keys.repeat_interleave(repeat, 1)[:, 1, :5] for keys in (k_a, k_b))
    q_a, q_b = q_a[:, 1, 4], q_b[:, 1, 4]
    p_a, p_b = (live_pattern(run, 0)[:, 1, 4, :5] for run in (a, b))
    close_logs = (p_a.log() - p_b.log()).abs() < 1e-9
    means = torch.where(close_logs, p_a, (p_a - p_b) / (p_a.log() - p_b.log()))
    weights = means / means.sum(-1, keepdim=True)
    by_query = readings[0].scale * torch.einsum("bd,bkd->bk", q_a - q_b, (k_a + k_b) / 2)
    by_key = readings[0].scale * torch.einsum("bd,bkd->bk", (q_a + q_b) / 2, k_a - k_b)
    for sources, scores in ((first.query_sources, by_query), (first.key_sources, by_key)):
        expected = means[:, 2] * (scores[:, 2] - (weights * scores).sum(-1))
        assert close(sources.sum(-1), expected, rerun_tolerance(name))
    assert not first.query_sources[:, [0, 1, 2, 3, 5]].any()
    assert not first.key_sources[:, 5].any()


@SOME
def test_of_close_runs_it_is_the_live_models_gradient(name, place, model_named):
    where, inside = place
    a, _ = two(model_named(name))
    size = 1e-5
    at = a.points.blocks[0].resid_pre  # of an encoder–decoder the encoder's
    leaf = a.activation(at).clone().requires_grad_(True)
    step = size / 2 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    runs = [freeze_changed(a, a.inputs, [(at, lambda x, hook, add=add: x + add)]) for add in (step, -step)]
    moved = circuits.qk_attribution(tlens.difference(*runs), **where, of="pattern")
    seen = {}

    def see(pattern, hook):
        seen["entry"] = pattern[inside].sum()

    point = pattern_point(a, where["layer"], where.get("cross", False))
    with torch.enable_grad():
        a.model.run_with_hooks(**a.inputs, fwd_hooks=[(at, lambda x, hook: leaf), (point, see)])
        (gradient,) = torch.autograd.grad(seen["entry"], leaf)
    assert close(moved.scores[:, : leaf.shape[1]] / size, (gradient * 2 * step / size).sum(-1), 1e-5)
    assert not moved.scores[:, leaf.shape[1] :].any()


@SOME
def test_swapped_runs_have_opposite_parts_and_equal_runs_none(name, place, model_named):
    where, _ = place
    a, b = two(model_named(name))
    there, back, same = (
        circuits.qk_attribution(tlens.difference(*runs), **where, of="pattern") for runs in ((a, b), (b, a), (a, a))
    )
    assert close(back.scores, -there.scores, 1e-12)
    assert not same.scores.any()
    assert not same.total.any()


def changed(name, seed=0):
    other = tiny_model(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return other


@pytest.mark.parametrize("of", ["pattern", "score"])
@SOME
def test_changed_weights_are_constants_by_name(name, place, of, model_named):
    where, inside = place
    model = model_named(name)
    (a, _), (b, _) = two(model), two(changed(name))
    difference = tlens.difference(a, b)
    by = {way: circuits.qk_attribution(difference, **where, by=way, of=of) for way in ("token", "head")}
    expected = (live_pattern(a, **where) - live_pattern(b, **where))[inside]
    if of == "score":
        numbers = [circuits.qk_attribution(run, **where).total for run in (a, b)]
        expected = numbers[0] - numbers[1]
    for change in by.values():
        assert close(whole(change), expected, rerun_tolerance(name))
    layer = f"L{where['layer']}.cross" if "cross" in where else f"L{where['layer']}"
    assert {f"{layer}.W_Q", f"{layer}.W_K"} <= set(by["head"].constant_names)
    assert {"L0.W_Q", "L0.W_V", "L0.W_in", f"{layer}.W_Q"} <= set(by["token"].constant_names)
    assert not any(label.startswith("L0") for label in by["head"].constant_names)
    relative = "cross" not in where and name in ("encoder-decoder/tied", "bridge/t5")
    assert (f"{layer}.relative_bias" in by["head"].constant_names) == relative


def test_sinks_of_two_models_are_a_constant(model_named):
    if "hooked/ln" not in HERE:
        pytest.skip("of HookedTransformers")
    from test_fuzz import build

    model = build("hooked", "raw", {"use_attention_sinks": True})
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].attn.sinks.add_(0.5)
    a, b = (tlens.freeze(each, some_tokens()) for each in (model, other))
    change = circuits.qk_attribution(tlens.difference(a, b), 1, 1, query=4, key=2, of="pattern")
    assert change.constant_names == ["L1.sinks"]
    assert not change.scores.any()
    assert close(change.constants[:, 0], (live_pattern(a, 1) - live_pattern(b, 1))[:, 1, 4, 2])
    assert not circuits.qk_attribution(tlens.difference(a, b), 1, 1, query=4, key=2).constant_names
    # a head's node has its sinks inside
    paths = circuits.paths(tlens.difference(a, b), 5, max_order=1)
    assert float(paths.gap.max()) < 1e-9


def test_padded_prompts_are_their_own(model_named):
    model = model_named("bridge/gpt2")
    rows = [[some_tokens(2, 6, seed)[0].tolist(), some_tokens(2, 6, seed)[1, :4].tolist()] for seed in (0, 1)]
    together = tlens.difference(*(tlens.freeze(model, batch, padding_side="left") for batch in rows))
    change = circuits.qk_attribution(together, 1, 2, query=-1, key=3, of="pattern")
    alone = tlens.difference(*(tlens.freeze(model, batch[1]) for batch in rows))
    assert close(change.scores[1, 2:], circuits.qk_attribution(alone, 1, 2, query=-1, key=3, of="pattern").scores[0])
    assert not change.scores[1, :2].any()


def test_it_is_shown_and_stored(model_named, tmp_path, capsys):
    a, b = two(model_named("bridge/gpt2"))
    difference = tlens.difference(a, b)
    change = circuits.qk_attribution(difference, **WHERE, by="head", of="pattern")
    change.show(3)
    assert "total" in capsys.readouterr().out
    assert len(repr(change)) < 200
    best = change.top(1)[0]
    side, _, name = best.name.partition(": ")
    sources = {"query": change.query_sources, "key": change.key_sources}[side]
    assert best.score == float(sources[0, change.names[0].index(name)])
    table = change.to_dataframe()
    assert close(torch.tensor(table.groupby("batch")["score"].sum().to_numpy()), change.total)
    again = circuits.ScoreChange.load(change.save(tmp_path / "change.safetensors"))
    assert torch.equal(again.key_sources, change.key_sources)
    assert again.names == change.names
    by_token = circuits.qk_attribution(difference, **WHERE)
    assert {entry.position for entry in by_token.top(50) if entry.name.startswith("query")} == set(range(6))


def test_what_cannot_be_asked_is_refused(model_named):
    a, b = two(model_named("bridge/gpt2"))
    difference = tlens.difference(a, b)
    with pytest.raises(tlens.InvalidInputError, match="use one of 'score', 'pattern'"):
        circuits.qk_attribution(difference, **WHERE, of="logit")
    with pytest.raises(tlens.InvalidInputError, match="of a single run is not a sum"):
        circuits.qk_attribution(a, **WHERE, of="pattern")
    with pytest.raises(tlens.InvalidInputError, match="the key comes after the query"):
        circuits.qk_attribution(difference, 1, 2, query=1, key=4, of="pattern")
    with pytest.raises(tlens.InvalidInputError, match="use one of 'token'"):
        circuits.qk_attribution(difference, **WHERE, by="neuron")


@pytest.mark.parametrize("name", [name for name in ("hooked/local", "bridge/gemma2") if name in HERE])
def test_a_key_outside_a_local_window_has_no_score(name, model_named):
    model = model_named(name)
    windows = [layer for layer in range(2) if not tlens.freeze(model, some_tokens()).pattern(layer)[:, :, 5, 0].any()]
    assert len(windows) == 1
    a, b = two(model)
    where = {"layer": windows[0], "head": 2, "query": 5, "key": 0}
    for asked in (a, tlens.difference(a, b)):
        with pytest.raises(tlens.InvalidInputError, match=r"H2, 5 .* prompt 0: a mask .* hides the key from the query"):
            circuits.qk_attribution(asked, **where)
    assert float(circuits.qk_attribution(a, **where | {"key": 4}).gap.max()) < 1e-6
    assert not circuits.qk_attribution(tlens.difference(a, b), **where, of="pattern").total.any()
    assert hooks_left(model) == 0
