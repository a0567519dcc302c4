"""Value zeroing, Chefer's relevance and leaving one out, each beside its published formula, written out with loops."""

import importlib

import pytest
import torch
from conftest import close, hooks_left, rerun_tolerance, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl.registry import get_layer_map
from tensorlens_tl.testing import model_names, tiny_model

WITNESSED = [
    name
    for name in ("hooked/ln", "hooked/gqa", "encoder/bert", "bridge/gpt2", "bridge/bert", "bridge/llama", "bridge/opt")
    if name in model_names()
]
CAUSAL = [name for name in model_names() if "bert" not in name]
REFUSALS = ("no softmax attention", "beside its attention", "a gate or a norm")
"""Attention that value zeroing and Chefer's rule do not read."""

LEAVE_ONE_OUT = importlib.import_module("tensorlens_tl.methods.leave_one_out")


@pytest.fixture(params=WITNESSED)
def frozen(request, model_named):
    model = model_named(request.param)
    yield tlens.freeze(model, some_tokens(2, 5))
    assert hooks_left(model) == 0


def precision(frozen):
    return tolerance(frozen.view.description.lower())


# ------------------------------------------------------------------------------------------ value zeroing


def zeroed_one_by_one(frozen):
    """Mohebbi et al. 2023, one layer and one token at a time: its value is zero in one layer of the plain model."""
    layers, (batch, pos) = frozen.n_layers, frozen.tokens.shape
    change = torch.zeros(layers, batch, pos, pos, dtype=torch.float64)
    for layer in range(layers):
        for j in range(pos):
            seen = {}

            def zero(value, hook, j=j):
                value = value.clone()
                of_values = value[..., value.shape[-1] // 2 :] if hook.name.endswith("kv.hook_out") else value
                of_values.transpose(1, 1 if value.shape[1] == pos else 2)[:, j] = 0  # DeepSeek has heads first
                return value

            def keep(output, hook, seen=seen):
                seen["output"] = output.detach().clone()

            of_both = f"blocks.{layer}.attn.hook_kv"  # of JetMoe: keys and values side by side
            point = of_both if of_both in frozen.model.hook_dict else f"blocks.{layer}.attn.hook_v"
            hooks = [(point, zero), (frozen.capture.output_name(layer), keep)]
            frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
            change[layer, :, :, j] = 1 - torch.cosine_similarity(seen["output"], frozen.resid_pre(layer + 1), dim=-1)
    return change / change.sum(-1, keepdim=True)


def test_value_zeroing_by_the_published_formula(frozen):
    maps = zeroed_one_by_one(frozen)
    result = tlens.attribute(frozen, method="value-zeroing")
    assert close(result.layers, maps, precision(frozen))
    assert close(result.scores, maps[1] @ maps[0], precision(frozen))  # the rollout adds no residual
    assert close(tlens.attribute(frozen, method="rollout", layer_map="value-zeroing").scores, result.scores)
    assert close(tlens.attribute(frozen, method="mean", layer_map="value-zeroing").scores, maps.mean(0), 1e-6)


@pytest.mark.whole
def test_value_zeroing_of_every_family(name, model):
    frozen = tlens.freeze(model, some_tokens())
    try:
        made = get_layer_map("value-zeroing")(frozen)
    except tlens.UnsupportedModelError as refusal:
        assert any(why in str(refusal) for why in REFUSALS)  # noqa: PT017
        return
    if "whitened" not in name:
        assert close(made, zeroed_one_by_one(frozen), 1e-6)


def test_value_zeroing_in_filled_rows_is_that_of_whole_prompts(frozen, monkeypatch):
    """Rows of any positions, and one copy's attention for all, against a whole prompt for each token."""
    zeroing = importlib.import_module("tensorlens_tl.methods.value_zeroing")
    layers = tlens.attribute(frozen, method="value-zeroing").layers
    layout = zeroing._proven_layout
    heads = zeroing._Heads.__init__

    def all_attend(self, *arguments):
        heads(self, *arguments)
        self.attends_once = False

    monkeypatch.setattr(zeroing, "_proven_layout", lambda heads, may_pack: layout(heads, may_pack=False))
    monkeypatch.setattr(zeroing._Heads, "__init__", all_attend)
    assert close(layers, tlens.attribute(frozen, method="value-zeroing").layers, precision(frozen) / 1000)


@pytest.mark.parametrize("name", [name for name in ("hooked/ln", "bridge/gpt2") if name in model_names()])
def test_value_zeroing_computes_attention_once(name, monkeypatch):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens(1, 6))
    tlens.attribute(frozen, method="value-zeroing")  # what is proved once
    attention = model.blocks[1].attn
    forward = type(attention).forward
    rows = []

    def noting(self, *args, **kwargs):
        if self is attention:
            rows.append(len(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(attention), "forward", noting)
    tlens.attribute(frozen, method="value-zeroing")
    assert rows == [1, 1, 1]  # the pass's prompt, the proof of the layout, and all tokens


def test_value_zeroing_is_the_same_in_small_runs(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(1, 9))
    whole = tlens.attribute(frozen, method="value-zeroing")
    assert close(tlens.attribute(frozen, method="value-zeroing", memory="60KB").scores, whole.scores, 1e-12)
    with pytest.raises(tlens.SizeError, match="memory="):
        tlens.attribute(frozen, method="value-zeroing", memory=10)


def test_a_value_that_is_zero_already_changes_nothing():
    """The score is that of the value vector: with W_V zero no token gives another anything."""
    model = tiny_model("bridge/llama")  # no b_V
    model.blocks[0].attn.W_V.data.zero_()
    result = tlens.attribute(model, some_tokens(), method="value-zeroing")
    assert not bool(result.layers[0].any())
    assert bool(result.layers[1].any())


def test_layers_that_do_not_read_what_hooks_put_there_are_refused(model_named, monkeypatch):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    zeroing = importlib.import_module("tensorlens_tl.methods.value_zeroing")
    put = zeroing._Run._put

    def ignored(self, name, x, side):
        point, hook = put(self, name, x, side)
        return point, (lambda live, *, hook: live) if name == "blocks.1.hook_resid_pre" else hook

    monkeypatch.setattr(zeroing._Run, "_put", ignored)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .* does not read what a hook puts at its input"):
        tlens.attribute(frozen, method="value-zeroing")


# ------------------------------------------------------------------------------------------ Chefer's relevance


def relevance_at(frozen, query, target):
    """Chefer et al. 2021: the whole R of one query, by autograd at the patterns that the plain model shows."""
    (batch, pos), patterns = frozen.tokens.shape, {}

    def keep(layer):
        return lambda pattern, hook: patterns.setdefault(layer, pattern) if layer not in patterns else None

    names = [(f"blocks.{layer}.attn.hook_pattern", keep(layer)) for layer in range(frozen.n_layers)]
    with torch.enable_grad():
        logits = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=names)
        gradients = torch.autograd.grad(logits[:, query, target].sum(), list(patterns.values()))
    R = torch.eye(pos, dtype=torch.float64).repeat(batch, 1, 1)
    for pattern, gradient in zip(patterns.values(), gradients, strict=True):
        R = R + (gradient * pattern).clamp(min=0).mean(1).detach().double() @ R
    return R[:, query]


def test_chefer_by_the_published_formula(frozen):
    every = tlens.attribute(frozen, method="chefer", target=5, query="all")
    itself = torch.eye(5, dtype=torch.float64)
    for query in (2, 4):
        expected = relevance_at(frozen, query, 5)
        attended = expected - itself[query]  # what is small beside the 1 that a token gives itself counts as well
        assert float((every.scores[:, query] - expected).abs().max() / attended.abs().max()) < precision(frozen)
        alone = tlens.attribute(frozen, method="chefer", target=5, query=query)
        assert close(alone.scores[:, 0], expected, precision(frozen))
        assert float(attended.abs().max()) > 0


@pytest.mark.whole
def test_chefer_of_every_family(name, model):
    frozen = tlens.freeze(model, some_tokens())
    try:
        result = tlens.attribute(frozen, method="chefer", target=5)
    except tlens.UnsupportedModelError as refusal:
        assert any(why in str(refusal) for why in (*REFUSALS, "whitened"))  # noqa: PT017
        return
    assert close(result.scores[:, 0], relevance_at(frozen, 5, 5), tolerance(name))


def test_chefer_with_weights_that_need_no_gradient(model_named):
    """As a user leaves them who wants to save memory."""
    expected = tlens.attribute(model_named("bridge/gpt2"), some_tokens(), method="chefer", target=5)
    model = tiny_model("bridge/gpt2").requires_grad_(False)
    with torch.no_grad():
        assert close(tlens.attribute(model, some_tokens(), method="chefer", target=5).scores, expected.scores)


def test_chefer_in_small_runs(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    options = {"method": "chefer", "target": 5, "minus": 9, "query": "all"}
    assert close(tlens.attribute(frozen, **options, memory="200KB").scores, tlens.attribute(frozen, **options).scores)


# ------------------------------------------------------------------------------------------ leave one out


def numbers(logits, of):
    return {"logit": logits, "probability": logits.softmax(-1), "log_probability": logits.log_softmax(-1)}[of]


@pytest.mark.parametrize("of", ["logit", "probability", "log_probability"])
def test_leave_one_out_by_hand(frozen, of):
    result = tlens.attribute(frozen, method="leave-one-out", target=5, minus=9, of=of, replacement=7, query="all")
    own = numbers(frozen.model(**frozen.inputs), of)
    for j in range(5):
        inputs = {**frozen.inputs, "input": frozen.tokens.clone()}
        inputs["input"][:, j] = 7
        lost = own - numbers(frozen.model(**inputs), of)
        assert close(result.scores[:, :, j], (lost[..., 5] - lost[..., 9]).detach(), precision(frozen))
    assert f"{of.replace('_', '-')} of '5' − '9'" == result.target


@pytest.mark.parametrize("replacement", ["mean", "zero", "delete"])
def test_what_stands_in_its_place(replacement, model_named):
    model, tokens = model_named("bridge/gpt2"), some_tokens(2, 5)
    result = tlens.attribute(model, tokens, method="leave-one-out", target=5, replacement=replacement)
    for j in range(5):
        if replacement == "delete":
            without = model(torch.cat([tokens[:, :j], tokens[:, j + 1 :]], dim=1))[:, -1, 5]
        else:
            vector = model.W_E.mean(0) if replacement == "mean" else torch.zeros_like(model.W_E[0])

            def put(embedded, hook, j=j, vector=vector):
                embedded = embedded.clone()
                embedded[:, j] = vector
                return embedded

            without = model.run_with_hooks(tokens, fwd_hooks=[("embed.hook_out", put)])[:, -1, 5]
        assert close(result.scores[:, 0, j], (model(tokens)[:, -1, 5] - without).detach())
    assert result.options["replacement"] == replacement


@pytest.mark.parametrize("name", [name for name in (*WITNESSED, "hooked/rotary", "bridge/gemma2") if name in CAUSAL])
def test_shared_beginnings_are_run_once(name, model_named, monkeypatch):
    """From the second run on, tokens before the first that is replaced are not run again, and nothing changes by it."""
    starts, run = [], LEAVE_ONE_OUT._Replaced._with_replaced

    def noted(self, copies, start):
        assert copies[0] is copies[-1] is None  # unchanged
        starts.append((copies[1], start))
        return run(self, copies, start)

    monkeypatch.setattr(LEAVE_ONE_OUT._Replaced, "_with_replaced", noted)
    frozen, options = tlens.freeze(model_named(name), some_tokens(2, 13)), {"target": 5, "replacement": 7}
    shared = tlens.attribute(frozen, method="leave-one-out", **options)
    assert len(starts) > 2
    assert all(token == start for token, start in starts)
    monkeypatch.setattr(LEAVE_ONE_OUT.SharedPrefix, "applies", lambda frozen: False)
    starts.clear()
    alone = tlens.attribute(frozen, method="leave-one-out", **options)
    assert close(alone.scores, shared.scores, rerun_tolerance(name))
    assert starts == [(0, 0)]


def test_a_cache_that_is_wrong_is_not_used(model_named, monkeypatch):
    frozen, options = tlens.freeze(model_named("bridge/gpt2"), some_tokens(2, 13)), {"target": 5, "replacement": 7}
    expected = tlens.attribute(frozen, method="leave-one-out", **options)
    before = LEAVE_ONE_OUT.SharedPrefix.before

    def another(self, inputs, copies):
        made = before(self, inputs, copies)
        made["past_key_values"].layers[0].keys.mul_(1.01)
        return made

    monkeypatch.setattr(LEAVE_ONE_OUT.SharedPrefix, "before", another)
    assert close(tlens.attribute(frozen, method="leave-one-out", **options).scores, expected.scores, 1e-12)


def test_a_token_in_its_own_place_changes_nothing(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), [[3, 4, 4, 6]])
    scores = tlens.attribute(frozen, method="leave-one-out", target=5, replacement=4).scores[0, 0]
    assert close(scores[1:3], torch.zeros(2, dtype=scores.dtype), 1e-12)
    assert bool((scores[[0, 3]].abs() > 1e-6).all())


def test_a_querys_own_token_deleted(model_named):
    """A causal model is asked before it, one that sees both ways cannot be."""
    tokens = some_tokens(1, 4)
    causal, both = (
        tlens.attribute(model_named(name), tokens, method="leave-one-out", target=5, replacement="delete", query="all")
        for name in ("bridge/gpt2", "bridge/bert")
    )
    logits = model_named("bridge/gpt2")(tokens)[0, :, 5]
    assert close(causal.scores[0].diagonal()[1:], logits.diff().detach())
    assert float(causal.scores[0, 0, 0]) == 0
    assert not bool(both.scores[0].diagonal().any())
    alone = tlens.attribute(model_named("bridge/gpt2"), [[3]], method="leave-one-out", target=5, replacement="delete")
    assert alone.scores.tolist() == [[[0.0]]]


def test_the_mask_token_is_the_default_where_there_is_one(demo_model):
    encoder, text = tlens.load_demo_model("encoder"), "the value of the file"
    named = tlens.attribute(encoder, text, method="leave-one-out", target=5, replacement="mask")
    assert torch.equal(tlens.attribute(encoder, text, method="leave-one-out", target=5).scores, named.scores)
    assert bool(named.scores.any())
    default = tlens.attribute(demo_model, text, method="leave-one-out", target=5)
    assert default.options["replacement"] == "mean"


def test_deletion_from_two_streams_and_images_is_refused_by_name(model_named):
    frozen = tlens.freeze(model_named("bridge/bart"), [[3, 4, 5]], decoder_input_ids=[[3, 4]])
    with pytest.raises(tlens.UnsupportedModelError, match="'delete'"):
        tlens.attribute(frozen, method="leave-one-out", target=5, replacement="delete")
    digits = tlens.freeze(tlens.load_demo_model("digits"), tlens.demo.digit_images()[0][:1])
    with pytest.raises(tlens.InvalidInputError, match="more than tokens"):
        tlens.attribute(digits, method="leave-one-out", target="3", replacement="delete")
