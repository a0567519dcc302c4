"""Every method on every family, by the shipped battery: it holds, or it refuses and says why."""

from dataclasses import replace

import pytest
import torch
from conftest import FLOAT32_INSIDE, MIXED, hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import contextualisation
from tensorlens_tl.testing import check_attribution, method_checks, model_names, parametrize_with_checks, tiny_model

CASES = {
    "attention": ("attention", {}),
    "attention, heads": ("attention", {"head_reduction": None}),
    "mean": ("mean", {"layer_map": "norm:attn_res_ln"}),
    "rollout": ("rollout", {}),
    "norm": ("norm", {"scope": "attn_res_ln"}),
    "ff-ig": ("ff-ig", {}),
    "globenc": ("globenc", {}),
    "alti": ("alti", {}),
    "alti-logit": ("alti-logit", {"target": 5}),
    "ifr": ("ifr", {}),
    "decompx": ("decompx", {}),
    "decompx, target": ("decompx", {"aggregate": "target", "target": 5, "query": -1}),
    "decompx, vectors": ("decompx", {"aggregate": "vector", "bias": "token", "query": 0}),
    "tensorlens": ("tensorlens", {"query": None}),
    "tensorlens, norm": ("tensorlens", {"collapse": "norm"}),
    "tensorlens, target": ("tensorlens", {"collapse": "target", "target": 5, "minus": 9}),
    "input-x-gradient": ("input-x-gradient", {"target": 5}),
    "integrated-gradients": ("integrated-gradients", {"target": 5, "steps": 3}),
    "value-zeroing": ("value-zeroing", {}),
    "chefer": ("chefer", {"target": 5, "minus": 9}),
    "leave-one-out": ("leave-one-out", {"target": 5}),
    "leave-one-out, deleted": ("leave-one-out", {"target": 5, "of": "probability", "replacement": "delete"}),
    "relp": ("relp", {"target": 5}),
    "attnlrp": ("attnlrp", {"target": 5, "minus": 9}),
    "cp-lrp": ("cp-lrp", {"target": 5}),
    "gim": ("gim", {"target": 5}),
}
FACTORS = ("afmoe", "bitnet")
"""A gate, or a norm before W_O: what a source token gives a query depends on the query by more than the pattern."""

REFUSES = {
    "globenc": ("parallel", "neox", "phi", "gptj", "attn-only", "olmo2", "post-only", *FACTORS),
    "ff-ig": ("parallel", "neox", "phi", "gptj", "attn-only", *FACTORS),
    **dict.fromkeys(("norm", "mean", "alti", "alti-logit", "ifr", "value-zeroing", "chefer"), FACTORS),
    "attnlrp": ("deepseek", "llama4", *FACTORS),
    "gim": ("deepseek", "llama4", "sinks", "gpt-oss", *FACTORS),
}


WHITENED = ("rollout", "alti", "alti-logit", "ifr", "globenc", "ff-ig", "value-zeroing", "chefer")
"""They refuse where vectors are passed on between positions outside attention."""


REFUSAL = (
    r"undefined at blocks\.0| is whitened|blocks\.0 .*(no softmax attention|a gate or a norm|held as a whole)"
    r"|attention sinks|a norm inside attention"
)
ANY_MAP = (
    "tensorlens", "decompx", "input-x-gradient", "integrated-gradients", "leave-one-out", "relp", "cp-lrp",
)  # fmt: skip
"""All that asks for nothing but maps, or the model itself."""


def refuses(method, name):
    if name.removeprefix("bridge/") in MIXED:
        return method not in ANY_MAP
    if "whitened" in name and method in WHITENED:
        return True
    sequential = "sequential" in name or name == "bridge/phi3" or "whitened" in name
    return not sequential and any(part in name for part in REFUSES.get(method, ()))


FULLY = (
    "hooked/sandwich",
    "encoder/bert",
    "bridge/gpt2",
    "bridge/gptj",
    "bridge/llama",
    "bridge/olmo2",
    "bridge/roberta",
)
FULLY = [name for name in FULLY if name in model_names()]


def tolerance(name):
    return 1e-5 if any(family in name for family in FLOAT32_INSIDE) else 1e-9


BY_DEFAULT = ("bridge/bert", "bridge/gpt2")
"""Post-LN that sees both ways, pre-LN that does not; the others are in the whole run."""


def battery(models):
    for case, (method, options) in CASES.items():
        for check in method_checks(method, models, options=options):
            yield replace(check, name=f"{case} on {check.name}")


@pytest.mark.numeric
@parametrize_with_checks(battery(BY_DEFAULT))
def test_battery(check):
    check()


@pytest.mark.whole
@parametrize_with_checks(battery([name for name in FULLY if name not in BY_DEFAULT]))
def test_battery_on_other_layouts(check):
    check()


def test_every_method_on_every_family(name, model):
    """It holds what every result must, or refuses, naming the block."""
    frozen = tlens.freeze(model, some_tokens())
    for method, options in CASES.values():
        if refuses(method, name):
            with pytest.raises(
                tlens.UnsupportedModelError,
                match=REFUSAL,
            ):
                tlens.attribute(frozen, method=method, **options)
            continue
        check_attribution(tlens.attribute(frozen, method=method, **options), frozen, tolerance=tolerance(name))
    assert hooks_left(model) == 0


def test_every_registered_method_is_in_the_battery():
    built_in = {"attention", "mean", "rollout", "norm", "ff-ig", "globenc", "alti", "decompx", "tensorlens"}
    built_in |= {"alti-logit", "ifr"}
    built_in |= {"input-x-gradient", "integrated-gradients", "value-zeroing", "chefer", "leave-one-out"}
    built_in |= {"relp", "attnlrp", "cp-lrp", "gim"}
    assert built_in <= set(tlens.list_methods())
    assert {method for method, _ in CASES.values()} >= built_in


@pytest.fixture(params=["bridge/gpt2", "bridge/bert", "bridge/llama"])
def frozen(request, model_named):
    return tlens.freeze(model_named(request.param), some_tokens())


@pytest.mark.parametrize("layer_map", tlens.list_layer_maps())
@pytest.mark.parametrize("method", ["rollout", "mean"])
def test_layer_maps(frozen, method, layer_map):
    result = tlens.attribute(frozen, method=method, layer_map=layer_map, normalize=True)
    assert torch.allclose(result.scores.sum(-1), torch.ones_like(result.scores[..., 0]))  # rows are distributions
    check_attribution(result, frozen)
    residual = result.options.get("residual")
    assert method == "mean" or residual == (0.5 if layer_map in ("attention", "norm:attn") else None)


def test_rollout_by_hand(frozen):
    patterns = [frozen.pattern(layer).mean(1) for layer in range(2)]
    eye = torch.eye(6, dtype=patterns[0].dtype)
    expected = (0.5 * patterns[1] + 0.5 * eye) @ (0.5 * patterns[0] + 0.5 * eye)
    assert torch.allclose(tlens.attribute(frozen, method="rollout").scores, expected)
    bare = tlens.attribute(frozen, method="rollout", residual=None, normalize=False)
    assert torch.allclose(bare.scores, patterns[1] @ patterns[0])


def test_one_query_is_a_row_of_all(frozen):
    for method in ("attention", "rollout", "norm", "globenc", "alti", "ifr", "ff-ig", "decompx", "value-zeroing"):
        every, one = (tlens.attribute(frozen, method=method, query=query) for query in (None, 2))
        assert torch.allclose(one.scores[:, 0], every.scores[:, 2])
        assert one.queries.tolist() == [[2], [2]]


def test_decompx_target_is_additive_and_without_bias_is_not(frozen):
    result = tlens.attribute(frozen, method="decompx", aggregate="target", target=5, minus=9)
    assert result.additive
    assert float(result.residual.max()) < 1e-5
    bare = tlens.attribute(frozen, method="decompx", aggregate="target", target=5, minus=9, bias="none")
    assert not bare.additive


def test_decompx_without_biases_is_the_operator_where_b_V_is_zero():
    """Then nothing is left for the two to disagree about."""
    from tensorlens_tl.testing import tiny_model

    model = tiny_model("bridge/gpt2")
    with torch.no_grad():
        for block in model.blocks:
            block.ln1.original_component.bias.zero_()
            block.attn.original_component.c_attn.bias.zero_()
    frozen = tlens.freeze(model, some_tokens())
    vectors = tlens.attribute(frozen, method="decompx", aggregate="vector", bias="none").scores
    assert torch.allclose(vectors, frozen.operator().contributions(), atol=1e-12)


@pytest.mark.whole
def test_integrated_gradients_converge(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    off = [
        float(tlens.attribute(frozen, method="integrated-gradients", target=5, steps=steps).residual.max())
        for steps in (4, 256)
    ]
    assert off[1] < off[0] / 2  # slowly: norms bend sharply near a zero baseline


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("attention", {"head_reduction": "sum"}, "'mean', 'max' or None"),
        ("rollout", {"layer_map": "flow"}, "'norm:attn_res_ln'"),
        ("rollout", {"residual": 2}, "between 0 and 1"),
        ("mean", {"layer_map": "none"}, "layer_map='none'"),
        ("norm", {"scope": "all"}, "'attn_res'"),
        ("ff-ig", {"scope": "atb_ln_ff_everything"}, "-LN model; use one of"),
        ("alti", {"distance": "cosine"}, "'l1' or 'l2'"),
        ("decompx", {"bias": "even"}, "'abssim'"),
        ("decompx", {"activation": "ig"}, "'ratio' and 'tangent'"),
        ("decompx", {"aggregate": "sum"}, "'vector'"),
        ("decompx", {"aggregate": "target"}, "needs one"),
        ("decompx", {"aggregate": "norm", "target": 3}, "needs one"),
        ("decompx", {"target": 3, "minus": 3}, "same token"),
        ("input-x-gradient", {}, "missing"),
        ("chefer", {}, "missing"),
        ("chefer", {"target": 99}, "outside the vocabulary"),
        ("leave-one-out", {}, "missing"),
        ("leave-one-out", {"target": 5, "of": "loss"}, "'log_probability'"),
        ("leave-one-out", {"target": 5, "replacement": "pad"}, "no pad token.*or 'delete'"),
        ("leave-one-out", {"target": 5, "replacement": 99}, "'zero'.*'delete'"),
        ("value-zeroing", {"memory": "much"}, "'512MB'"),
        ("integrated-gradients", {"target": 5, "steps": 0}, "at least 1"),
        ("relp", {"target": 5, "attention": "half"}, "'frozen' or 'live'"),
        ("gim", {}, "missing"),
        ("globenc", {"query": 9}, "out of range"),
        ("globenc", {"scope": "attn"}, "no option 'scope'"),
    ],
)
def test_bad_options(frozen, method, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.attribute(frozen, method=method, **options)


# ------------------------------------------------------------------- the analyses of Kobayashi et al. 2024


SCOPES = {
    "bridge/bert": ("atb", "atb_ff_res", "atb_ff_res_ln"),
    "bridge/gpt2": ("atb", "atb_ln_ff_res", "atb_ln_ff_res_nextln"),
}


@pytest.fixture(params=SCOPES)
def analysed(request, model_named):
    return tlens.freeze(model_named(request.param), some_tokens()), SCOPES[request.param]


def test_context_change(analysed):
    frozen, (first, middle, last) = analysed
    assert torch.allclose(
        contextualisation.context_change(frozen, first, first), torch.zeros(2, 2).double(), atol=1e-12
    )
    change = contextualisation.context_change(frozen, first, last)
    pandas = pytest.importorskip("pandas")
    maps = [tlens.attribute(frozen, method="ff-ig", scope=scope).layers[1, 0] for scope in (first, last)]
    live = torch.ones(6, 6).tril().bool() if frozen.causal else torch.ones(6, 6).bool()
    a, b = (pandas.Series(m[live].numpy()).rank() for m in maps)
    assert float(change[1, 0]) == pytest.approx(1 - a.corr(b))
    without = contextualisation.context_change(frozen, middle, last, without_low_gain=0.3)
    assert not torch.allclose(without, contextualisation.context_change(frozen, middle, last))
    with pytest.raises(tlens.InvalidInputError, match="share"):
        contextualisation.context_change(frozen, first, last, without_low_gain=1.0)


def test_amplified_pairs(analysed):
    frozen, (first, middle, _) = analysed
    amp = contextualisation.ff_amp(frozen, first, middle)
    assert torch.allclose(amp.sum(-2), torch.zeros(2, 2, 6).double(), atol=1e-12)  # both maps' columns sum to 1
    first, *others = contextualisation.top_pairs(frozen, amp, 3, batch=1)
    assert first.score == float(amp[:, 1].max()) >= others[0].score >= others[1].score
    layer, (query, key) = int(first.name.split(":")[0].removeprefix("layer ")), first.position
    assert float(amp[layer, 1, query, key]) == first.score
    with pytest.raises(tlens.InvalidInputError, match="at least one"):
        contextualisation.top_pairs(frozen, amp, 0)


def test_feed_forward_output_beside_the_bypass(analysed):
    """Against the activations the model itself gives."""
    frozen, _ = analysed
    _, cache = frozen.model.run_with_cache(frozen.tokens)
    ratio = contextualisation.ff_against_bypass(frozen)
    for layer in range(2):
        written = cache[f"blocks.{layer}.hook_mlp_out"]
        after = frozen.layouts[layer].mlp.outer
        if after is None:
            bypass = frozen.resid_pre(layer + 1) - written
            assert torch.allclose(ratio[layer], written.norm(dim=-1) / bypass.norm(dim=-1), rtol=1e-9)
    gains = contextualisation.gain_against_ff(frozen)
    assert gains.shape == (2,)
    assert bool(((gains >= -1) & (gains <= 1)).all())


@pytest.mark.parametrize("as_printed", [False, True])
def test_feed_forward_maps_by_the_papers_formulas(as_printed, model_named):
    """Kobayashi 2024, Eqs. 15 to 58, one pair of tokens at a time from Hugging Face's own weights (post-LN)."""
    frozen = tlens.freeze(model_named("bridge/bert"), some_tokens(1, 5))
    own = frozen.model.original_model
    encoder = getattr(own, "bert", own).encoder.layer
    inner = lambda module: getattr(module, "original_component", module)  # noqa: E731
    for number, layer in enumerate(encoder):
        attention = inner(layer.attention)
        part = lambda *names, m=attention: inner(getattr(inner(getattr(m, names[0])), names[1]))  # noqa: E731
        value, out, norm = part("self", "value"), part("output", "dense"), part("output", "LayerNorm")
        into, last = inner(inner(layer.intermediate).dense), inner(inner(layer.output).dense)
        end = inner(inner(layer.output).LayerNorm)
        x, A = frozen.resid_pre(number)[0], frozen.pattern(number)[0]
        heads, width = A.shape[0], x.shape[-1] // A.shape[0]
        v = x @ value.weight.T + (0 if as_printed else value.bias)

        def from_to(i, j, A=A, v=v, out=out, heads=heads, width=width):
            mixed = torch.cat([A[h, i, j] * v[j, h * width : (h + 1) * width] for h in range(heads)])
            return mixed @ out.weight.T

        def normed(vector, at, norm):
            scale = (((at - at.mean()) ** 2).mean() + norm.eps).sqrt()
            return (vector - vector.mean()) / scale * norm.weight

        b_V = value.bias @ out.weight.T if as_printed else 0
        after = [x[i] + sum(from_to(i, j) for j in range(5)) + b_V + out.bias for i in range(5)]
        for i in range(5):
            y = normed(after[i], after[i], norm) + norm.bias
            z = y @ into.weight.T + into.bias
            phi = torch.nn.functional.gelu(z)
            whole = y + phi @ last.weight.T + last.bias
            for j in range(5):
                atb = normed(from_to(i, j) + (x[i] if i == j else 0), after[i], norm)
                ff = (phi / z * (atb @ into.weight.T)) @ last.weight.T
                res = ff + (atb if i == j or not as_printed else 0)
                for scope, vector in (
                    ("atb", atb), ("atb_ff", ff), ("atb_ff_res", res), ("atb_ff_res_ln", normed(res, whole, end)),
                ):  # fmt: skip
                    made = tlens.attribute(frozen, method="ff-ig", scope=scope, as_printed=as_printed).layers
                    assert float(made[number, 0, i, j]) == pytest.approx(float(vector.norm()), rel=1e-6), (i, j, scope)


@pytest.mark.parametrize("method", ["input-x-gradient", "integrated-gradients", "chefer"])
def test_gradients_that_the_model_does_not_have_are_refused(method):
    """Compatibility mode of TransformerLens 3.9 has none after padding on the left: softmax of nothing, set to zero."""
    model, tokens, mask = tiny_model("bridge/gpt2"), some_tokens(), torch.ones(2, 6, dtype=torch.long)
    model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: x + (0 * x).sqrt())  # the same values, no gradient
    with pytest.raises(tlens.NumericalError, match="use float32 or float64"):
        tlens.attribute(model, tokens, method=method, target=5)
    tokens[1, :2], mask[1, :2] = 0, 0
    with pytest.raises(tlens.NumericalError, match="pad on the right, or take one prompt"):
        tlens.attribute(model, tokens, attention_mask=mask, method=method, target=5)
