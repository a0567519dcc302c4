"""Patterns recomputed from queries and keys: the same numbers, and nothing quadratic in the prompt is kept."""

import gc
import json
import subprocess
import sys

import pytest
import torch
from conftest import close, hooks_left, rerun_tolerance, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.algebra import HeldScores, RowPositions, routing
from tensorlens_tl.errors import NumericalError
from tensorlens_tl.testing import Allocations, check_map, model_names
from tensorlens_tl.testing.models import build_bridge

pytestmark = pytest.mark.numeric

REFUSED = {
    "bridge/llama4": "its queries and keys give",  # it attends within chunks
    "bridge/qwen3-next": "gated delta rule",
    "bridge/deepseek-v3": "no readable W_Q",
    "bridge/jetmoe": "a mixture of attention heads",
}
OF_EVERY_KIND = ("hooked/rotary", "hooked/alibi", "hooked/local", "hooked/sinks", "bridge/gemma2", "bridge/bert")
SMALL = tuple(name for name in OF_EVERY_KIND if name in model_names())
"""One of every way to make scores."""

PLAIN = "hooked/ln" if "hooked/ln" in model_names() else "bridge/gpt2"
ROTARY = "hooked/rotary" if "hooked/rotary" in model_names() else "bridge/llama"


def few(name, chosen=("hooked/alibi", "bridge/gemma2")):
    """The default run has those that are chosen; the others belong to the whole run."""
    return name if name in chosen else pytest.param(name, marks=pytest.mark.whole)


def both(model, tokens, **options):
    return tlens.freeze(model, tokens, **options), tlens.freeze(model, tokens, patterns="recompute", **options)


@pytest.mark.whole
def test_the_same_numbers(name, model):
    tokens = some_tokens(pos=9)
    if name in REFUSED:
        with pytest.raises(tlens.UnsupportedModelError, match=rf"(?s)blocks\.0.*{REFUSED[name]}.*patterns='keep'"):
            tlens.freeze(model, tokens, patterns="recompute")
        return
    kept, made = both(model, tokens)
    atol = rerun_tolerance(name)
    assert max(made.errors.values()) <= made.tolerance
    ops = kept.operator(), made.operator()
    g = torch.randn(2, *ops[0].x.shape, dtype=ops[0].x.dtype)
    for ask in (
        lambda op: op.in_out("all").scores,
        lambda op: op.slice(query=4),
        lambda op: op.slice(keys=[0, 3]),
        lambda op: op.contributions(),
        lambda op: op.contributions([2, 5], keys=[1, 4]),
        lambda op: op.push(g),
        lambda op: op.pull(g),
        lambda op: op.bias,
    ):
        assert close(ask(ops[1]), ask(ops[0]), atol=atol)
    for layer, points in enumerate(made.points.blocks):
        if points.pattern is None:
            continue
        assert points.pattern not in made.capture.activations
        assert close(made.pattern(layer), kept.pattern(layer), atol=atol)
        assert made.capture.held_scores[points.pattern].error <= made.tolerance
    assert made.causal == kept.causal


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [few(name) for name in (*SMALL, "bridge/neox")])
def test_padding(name, side, model_named):
    tokens, model = some_tokens(pos=9), model_named(name)
    prompts = {"input": [tokens[0].tolist(), tokens[1, :6].tolist()], "padding_side": side}
    try:
        kept = tlens.freeze(model, **prompts)
    except (tlens.UnsupportedModelError, NumericalError) as error:
        with pytest.raises(type(error)):
            tlens.freeze(model, patterns="recompute", **prompts)
        assert not hooks_left(model)
        return
    made = tlens.freeze(model, patterns="recompute", **prompts)
    ops = kept.operator(), made.operator()
    for ask in (lambda op: op.in_out("all").scores, lambda op: op.slice(), lambda op: op.contributions()):
        assert close(ask(ops[1]), ask(ops[0]), atol=rerun_tolerance(name))


@pytest.mark.parametrize("name", [few(name, ("hooked/local", "bridge/bert")) for name in SMALL])
def test_rows_are_made_a_few_at_a_time(name, model_named, monkeypatch):
    """With chunks of one query, everything is as with one chunk; and the map passes the battery of maps."""
    monkeypatch.setattr(routing, "CHUNK_BYTES", 1)
    kept, made = both(model_named(name), some_tokens(pos=7))
    ops = kept.operator(), made.operator()
    for ask in (lambda op: op.in_out("all").scores, lambda op: op.contributions()):
        assert close(ask(ops[1]), ask(ops[0]), atol=rerun_tolerance(name))
    weights = kept.view.blocks[0].attention
    maps = [frozen.maps.attention(0).stages[1] for frozen in (kept, made)]
    assert isinstance(maps[1], routing.RecomputedAttention)
    x = torch.randn(3, 2, 7, weights.W_O.shape[0] // weights.heads * weights.kv_heads, dtype=torch.float64)
    g = torch.randn(3, 2, 4, weights.W_O.shape[0], dtype=torch.float64)
    atol = rerun_tolerance(name)
    cut = [m.at(slice(2, 6)) for m in maps]
    assert close(cut[1].push(x[:, :, 2:6]), cut[0].push(x[:, :, 2:6]), atol=atol)
    assert close(cut[1].pull(g), cut[0].pull(g), atol=atol)
    rows = RowPositions(torch.tensor([[1, 6], [3, 0], [6, 6]]))
    for there in (slice(0, 7), [0, 2, 5]):
        for where, vectors in ((rows, g[:, :, :1]), (RowPositions(rows.positions[:1]), g[:, :, :1]), (slice(1, 5), g)):
            pulled = [m._pull(vectors, where, there, slice(0, 7), None) for m in maps]
            assert close(pulled[1], pulled[0], atol=atol)
    heads = [m.of_head(1) for m in maps]
    assert close(heads[1].pattern, heads[0].pattern, atol=atol)
    left_out = [frozen.maps.attention(0, heads=[1]).stages[1].pattern for frozen in (kept, made)]
    assert close(left_out[1], left_out[0], atol=atol)
    assert abs(maps[1].norm_bound() - maps[0].norm_bound()) <= atol


def test_the_map_passes_the_battery():
    torch.manual_seed(0)
    shape = (2, 4, 5, 3)
    held = HeldScores(
        torch.randn(shape, dtype=torch.float64), torch.randn(2, 2, 5, 3, dtype=torch.float64),
        torch.rand(shape[:3], dtype=torch.float64), torch.tensor([[False, True, True, True, True], [True] * 5]),
        0.5, 3.0, torch.rand(4, dtype=torch.float64), 2, 0, torch.device("cpu"),
    )  # fmt: skip
    check_map(held.attention(torch.float64), torch.randn(2, 5, 6, dtype=torch.float64))
    check_map(held.attention(torch.float64).at(slice(1, 4)), torch.randn(2, 3, 6, dtype=torch.float64))


@pytest.mark.parametrize("method", [few(method, ("tensorlens", "rollout")) for method in tlens.list_methods()])
def test_every_method(method, model_named):
    model, tokens = model_named(PLAIN), some_tokens()
    options = {"method": method, "query": -1}
    known = tlens.get_method(method).options
    options |= {"target": 5} if "target" in known else {}
    options = {name: value for name, value in options.items() if name == "method" or name in known}
    made = tlens.attribute(model, tokens, patterns="recompute", **options)
    assert close(made.scores, tlens.attribute(model, tokens, **options).scores)


@pytest.mark.parametrize("name", [few(n, (PLAIN, "bridge/bert")) for n in (PLAIN, *SMALL)])
def test_the_live_model_is_held(name, model_named):
    model, tokens = model_named(name), some_tokens()
    kept, made = both(model, tokens)
    other = {**kept.inputs, next(iter(kept.inputs)): some_tokens(seed=3)}
    outputs = []
    for frozen in (kept, made):
        with frozen.attached(), torch.no_grad():
            outputs.append(model(**other))
    outputs = [getattr(output, "logits", output) for output in outputs]
    assert close(outputs[1], outputs[0], atol=rerun_tolerance(name))


def test_circuits_and_cuts(model_named):
    model, tokens = model_named(ROTARY), some_tokens()[:1]
    kept, made = both(model, tokens)
    for ask in (
        lambda frozen: tlens.circuits.logit_attribution(frozen, 5, by="head").scores,
        lambda frozen: frozen.cut(4).operator().in_out().scores,
        lambda frozen: frozen.maps.with_capture(frozen.capture.block_at_start(0, 3)).attention(0)(
            frozen.resid_pre(0)[:, :3]
        ),
        lambda frozen: frozen.operator(heads={1: [0, 2]}).in_out().scores,
        lambda frozen: tlens.implicit_attention(frozen, 1),
        lambda frozen: tlens.circuits.scores.score_reading(frozen, 1).scores(frozen.capture.resid_read(1)),
    ):
        assert close(ask(made), ask(kept), atol=rerun_tolerance(ROTARY))


def square(tensor, length):
    return sum(size == length for size in tensor.shape) >= 2


def square_tensors(length):
    return {id(t): t for t in gc.get_objects() if type(t) is torch.Tensor and square(t, length)}


@pytest.mark.parametrize("name", dict.fromkeys([PLAIN, "bridge/gpt2", "bridge/llama"]))
@pytest.mark.few(1)
def test_nothing_quadratic_is_alive(name, model_named):
    """In the pass, or on the model: a Bridge's joint attention leaves its last pattern on itself."""
    model, length = model_named(name), 11
    tokens, before = some_tokens(pos=length), square_tensors(length)
    frozen = tlens.freeze(model, tokens, patterns="recompute")
    op = frozen.operator()
    op.in_out("all")
    op.slice()
    frozen.logits(3)
    assert not [t.shape for key, t in square_tensors(length).items() if key not in before]
    held = [
        t
        for scores in frozen.capture.held_scores.values()
        for t in vars(scores).values()
        if isinstance(t, torch.Tensor)
    ]
    assert len(held) >= 4 * frozen.n_layers
    kept = tlens.freeze(model, tokens)
    assert len(square_tensors(length)) >= len(before) + kept.n_layers  # what this test would see


def test_what_is_not_recomputed_is_refused(model_named):
    model, tokens = model_named(PLAIN), some_tokens()
    with pytest.raises(tlens.InvalidInputError, match="patterns='never'; use 'keep' or 'recompute'"):
        tlens.freeze(model, tokens, patterns="never")
    _, cache = model.run_with_cache(tokens)
    with pytest.raises(tlens.InvalidInputError, match="cache: patterns='recompute'"):
        tlens.freeze(model, tokens, cache=cache, patterns="recompute")
    with pytest.raises(tlens.UnsupportedModelError, match=r"encoder–decoder.*patterns='keep'"):
        tlens.freeze(model_named("bridge/bart"), tokens, decoder_input_ids=tokens, patterns="recompute")


@pytest.mark.skipif(PLAIN != "hooked/ln", reason="needs TransformerLens 3.9")
def test_a_pattern_that_something_else_makes_is_refused(model_named):
    """A hook that changes the scores is followed by a pattern that is kept; queries and keys do not give it."""
    model, tokens = model_named(PLAIN), some_tokens()
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", lambda scores, hook: scores * 1.5)]):
        tlens.freeze(model, tokens)
        before = hooks_left(model)
        with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .*relative error of a row: \d"):
            tlens.freeze(model, tokens, patterns="recompute")
        assert hooks_left(model) == before
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", lambda q, hook: q * 1.5)]):  # what the scores are made of
        kept, made = both(model, tokens)
    assert close(made.operator().in_out().scores, kept.operator().in_out().scores)


def test_what_is_stored_on_the_cpu_is_the_same(model_named):
    model, tokens = model_named(PLAIN), some_tokens()
    kept, made = both(model, tokens, store="cpu")
    assert close(made.operator().in_out().scores, kept.operator().in_out().scores)


def test_a_pull_from_one_query_makes_one_row(monkeypatch):
    """No map of a causal model makes more of the last layer's pattern than the row that is asked for."""
    torch.manual_seed(0)
    model = build_bridge("gpt2", n_layer=1, n_positions=512)
    frozen = tlens.freeze(model, torch.randint(3, 48, (1, 512)), patterns="recompute")
    op = frozen.operator()
    op.target(5)
    pattern = frozen.pattern(0)
    with Allocations() as used:
        op.target(5)
    assert used.peak < 0.2 * pattern.numel() * pattern.element_size()


GROWTH = """
import json, torch
import tensorlens_tl as tlens
from tensorlens_tl.testing import Allocations
from tensorlens_tl.testing.models import build_bridge
def measured(length, patterns):
    torch.manual_seed(0)
    model = build_bridge("gpt2", n_layer=6, n_head=2, n_embd=16, n_positions=length).to(torch.float32)
    tokens = torch.randint(3, 48, (1, length))
    with Allocations() as freezing:
        frozen = tlens.freeze(model, tokens, patterns=patterns)
    kept = freezing.now
    with Allocations() as asking:
        frozen.operator().target(5)
    with Allocations() as forward, torch.no_grad():
        model(tokens)
    return [freezing.peak, kept, asking.peak, forward.peak]
print(json.dumps([measured(512, "recompute"), measured(2048, "recompute"), measured(2048, "keep")]))
"""


@pytest.mark.whole
def test_memory_is_linear_but_for_one_pattern():
    """Six layers: kept patterns grow with the square, recomputed ones leave what the model itself allocates."""
    made = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    short, long, squared = json.loads(made.stdout.splitlines()[-1])
    one = 2 * 4 * 2048**2
    assert long[1] < 4.5 * short[1]  # what is kept: linear
    assert long[1] < one  # of all six layers together
    assert long[2] < 4.5 * short[2] + routing.CHUNK_BYTES * 5  # a question
    assert long[0] < long[3] + 2 * one + long[1] + routing.CHUNK_BYTES * 5  # freezing: what the model makes itself
    assert squared[1] > 6 * one  # the same measure sees patterns that are kept
