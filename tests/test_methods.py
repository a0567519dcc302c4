"""Every method on every family, by the shipped battery: it holds, or it refuses and says why."""

import inspect
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from conftest import FLOAT32_INSIDE, hooks_left, rerun_tolerance, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import contextualisation
from tensorlens_tl.requirements import REQUIREMENTS
from tensorlens_tl.testing import check_attribution, method_checks, model_names, parametrize_with_checks, tiny_model

METHODS = "tensorlens_tl.methods."
BUILT_IN = [name for name in tlens.list_methods() if tlens.get_method(name).function.__module__.startswith(METHODS)]


def options_of(method):
    """What a method cannot be called without, and few steps."""
    registered = tlens.get_method(method)
    if REQUIREMENTS["predictions"] not in registered.requirements():
        return {}
    return {name: value for name, value in {"target": 5, "steps": 3}.items() if name in registered.options}


VARIED = {
    "attention, heads": ("attention", {"head_reduction": None}),
    "mean": ("mean", {"layer_map": "norm:attn_res_ln"}),
    "norm": ("norm", {"scope": "attn_res_ln"}),
    "decompx, target": ("decompx", {"aggregate": "target", "target": 5, "query": -1}),
    "decompx, vectors": ("decompx", {"aggregate": "vector", "bias": "token", "query": 0}),
    "tensorlens": ("tensorlens", {"collapse": "in_out", "query": "all"}),
    "tensorlens, norm": ("tensorlens", {"collapse": "norm"}),
    "tensorlens, target": ("tensorlens", {"collapse": "target", "target": 5, "minus": 9}),
    "chefer": ("chefer", {"target": 5, "minus": 9}),
    "leave-one-out, deleted": ("leave-one-out", {"target": 5, "of": "probability", "replacement": "delete"}),
    "attnlrp": ("attnlrp", {"target": 5, "minus": 9}),
}
CASES = {method: (method, options_of(method)) for method in BUILT_IN} | VARIED


REFUSAL = (
    r"undefined at blocks\.0|is whitened|attention sinks|a norm inside attention"
    r"|a mixture of attention heads"
    r"|blocks\.0 .*(no softmax attention|beside its attention|a gate or a norm|held as a whole)"
)
"""Every refusal names the block, or what the whole model has."""


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
@pytest.mark.few(40)
def test_battery(check):
    check()


@pytest.mark.whole
@parametrize_with_checks(battery([name for name in FULLY if name not in BY_DEFAULT]))
def test_battery_on_other_layouts(check):
    check()


@cache
def frozen_named(name):
    return tlens.freeze(tiny_model(name), some_tokens())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(300)
def test_every_method_on_every_family(name, case):
    """It holds what every result must, or refuses what its registration says that it needs, naming the block."""
    method, options = CASES[case]
    frozen = frozen_named(name)
    refusal = tlens.get_method(method).refusal(frozen, options)
    if not refusal:
        allowed = tolerance(name)
        if tlens.get_method(method).explains_differences:  # the scores of two runs are computed anew
            allowed = max(allowed, rerun_tolerance(name))
        check_attribution(tlens.attribute(frozen, method=method, **options), frozen, tolerance=allowed)
    else:
        assert re.search(REFUSAL, refusal)
        with pytest.raises(tlens.UnsupportedModelError, match=re.escape(refusal)):
            tlens.attribute(frozen, method=method, **options)
    assert hooks_left(frozen.model) == 0


def test_every_built_in_method_is_in_the_battery():
    """What the package publishes, found in another way than the battery finds it: by the files of its folder."""
    sources = [path.read_text(encoding="utf-8") for path in Path(tlens.methods.__file__).parent.glob("*.py")]
    registered = {name for source in sources for name in re.findall(r'@register_(?:method|alias)\("([^"]+)"', source)}
    assert registered == set(BUILT_IN) == {method for method, _ in CASES.values()}


# ------------------------------------------------------------------- requirements


def test_requirements_have_a_sentence_and_an_order():
    for name, requirement in REQUIREMENTS.items():
        assert requirement.name == name
        assert re.fullmatch(r"[A-Z].*\.", requirement.summary)
    method = tlens.get_method("chefer")
    assert [need.name for need in method.requirements()] == ["predictions", "head_vectors", "unwhitened"]
    assert "needs: predictions, head_vectors, unwhitened" in repr(method)


@pytest.mark.parametrize(
    ("method", "options", "needs"),
    [
        ("rollout", {}, ["patterns", "unwhitened"]),
        ("rollout", {"layer_map": "globenc"}, ["norm_after_sum", "head_vectors", "unwhitened"]),
        ("mean", {"layer_map": "value-zeroing"}, ["head_vectors"]),
        ("ifr", {"aggregate": "sum"}, ["head_vectors"]),
        ("ff-ig", {"scope": "atb"}, ["sequential_mlp", "head_vectors"]),
        ("relp", {}, ["predictions"]),
        ("relp", {"attention": "live"}, ["predictions", "attention_products"]),
        ("cp-lrp", {}, ["predictions"]),
        ("decompx", {"target": 5}, ["predictions"]),
        ("tensorlens", {"target": 5}, []),
    ],
)
def test_requirements_follow_the_options(method, options, needs):
    assert [need.name for need in tlens.get_method(method).requirements(options)] == needs


def test_a_method_of_ones_own_is_refused_before_it_is_called(model_named, clean_registry):
    calls = []

    @tlens.Requirement
    def short(frozen, method):
        """The prompts have four tokens at most."""
        if frozen.tokens.shape[1] > 4:
            raise tlens.UnsupportedModelError(f"{method}: blocks.0 is too long")

    @tlens.register_method("mine", needs=[short, "patterns"])
    def mine(frozen, *, query=-1):
        calls.append(query)
        return tlens.attribute(frozen, method="rollout", query=query)

    long, brief = (tlens.freeze(model_named("bridge/gpt2"), some_tokens(1, length)) for length in (6, 3))
    assert [need.name for need in tlens.get_method("mine").requirements()] == ["patterns", "short"]
    for call in (mine, lambda frozen: tlens.attribute(frozen, method="mine")):
        with pytest.raises(tlens.UnsupportedModelError, match=r"mine: blocks\.0 is too long"):
            call(long)
    assert not calls
    assert mine(brief).method == "rollout"
    assert "mine" in tlens.list_methods(brief)
    assert "mine" not in tlens.list_methods(long)
    with pytest.raises(tlens.InvalidInputError, match="a frozen pass is needed"):
        mine("Return the value")


@pytest.mark.parametrize(
    ("needs", "error", "message"),
    [
        (("pattern",), tlens.RegistryError, "needs 'pattern', which is not a requirement; choose from 'one_stack'"),
        ("patterns", tlens.RegistryError, r"needs=\('patterns',\)"),
        ((3,), tlens.InvalidInputError, r"needs=\(3,\); use names of requirements"),
        (3, tlens.InvalidInputError, "needs=3; use names of requirements"),
    ],
)
@pytest.mark.parametrize("register", [tlens.register_method, partial(tlens.register_layer_map, holds_residual=False)])
def test_needs_that_are_none_are_refused(clean_registry, register, needs, error, message):
    with pytest.raises(error, match=message):
        register("mine", needs=needs)


def test_a_layer_map_of_ones_own_has_needs(clean_registry):
    tlens.register_layer_map("whole", holds_residual=False, needs=("unwhitened",))(lambda frozen: None)
    whitened = tlens.freeze(tiny_model("bridge/whitened"), some_tokens())
    with pytest.raises(tlens.UnsupportedModelError, match=r"mean: the stream .* is whitened"):
        tlens.attribute(whitened, method="mean", layer_map="whole")
    with pytest.raises(tlens.UnsupportedModelError, match=r"layer map 'whole': the stream .* is whitened"):
        tlens.registry.get_layer_map("whole")(whitened)


# ------------------------------------------------------------------- functions


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_method_is_a_typed_function_of_a_pass(method):
    """`tlens.methods.alti(frozen, distance="l2")`: a signature that tools complete, and the same numbers."""
    function = getattr(tlens.methods, method.replace("-", "_"))
    assert function is tlens.get_method(method).function
    first, *options = inspect.signature(function).parameters.values()
    takes = tlens.FrozenPass
    if tlens.get_method(method).explains_differences:
        takes = tlens.FrozenPass | tlens.Difference
    assert first.annotation == takes
    assert all(option.kind is option.KEYWORD_ONLY and option.annotation is not option.empty for option in options)
    own, shared = inspect.getdoc(function), inspect.getdoc(tlens.methods)
    assert ">>> " in own
    other = re.search(r"those of `(\w+)`", own)
    own += inspect.getdoc(getattr(tlens.methods, other[1])) if other else ""
    for name in (first.name, *(option.name for option in options)):
        assert re.search(rf"\b{name}\b", own) or f"`{name}`" in shared, name
    frozen = frozen_named("bridge/gpt2")
    by_name = tlens.attribute(frozen, method=method, **options_of(method))
    assert torch.equal(function(frozen, **options_of(method)).scores, by_name.scores)
    with pytest.raises(tlens.InvalidInputError, match="a frozen pass is needed, got str"):
        function("Return the value")


def test_an_alias_is_its_method_with_another_name(model_named, clean_registry):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    assert tlens.get_method("cp-lrp").alias_of == ("tensorlens", {"collapse": "target"})
    assert tlens.get_method("tensorlens").alias_of is None
    alias = tlens.attribute(frozen, method="cp-lrp", target=5)
    original = tlens.attribute(frozen, method="tensorlens", collapse="target", target=5)
    for field in ("scores", "bias", "total", "gap"):
        assert torch.equal(getattr(alias, field), getattr(original, field))
    assert (alias.method, alias.target, alias.additive) == ("cp-lrp", original.target, True)
    assert alias.options == {"target": 5, "minus": None, "query": -1}
    assert alias.provenance.keys() == original.provenance.keys()

    @tlens.registry.register_alias("norms", of="rollout", layer_map="norm:attn")
    def norms(frozen, *, query="all"):
        """A rollout of norms."""

    assert [need.name for need in tlens.get_method("norms").requirements()] == ["head_vectors", "unwhitened"]
    assert not tlens.get_method("norms").explains_prediction()
    assert norms(frozen, query=2).options == {"query": 2}
    with pytest.raises(tlens.InvalidInputError, match="no option 'layer_map'"):
        tlens.attribute(frozen, method="norms", layer_map="attention")


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


@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.few(24)
def test_one_query_is_a_row_of_all(frozen, method):
    every, one = (tlens.attribute(frozen, method=method, query=query, **options_of(method)) for query in ("all", 2))
    assert torch.allclose(one.scores[:, 0], every.scores[:, 2])
    assert one.queries.tolist() == [[2], [2]]


def test_decompx_target_is_additive_and_without_bias_is_not(frozen):
    result = tlens.attribute(frozen, method="decompx", aggregate="target", target=5, minus=9)
    assert result.additive
    assert float(result.gap.max()) < 1e-5
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
        float(tlens.attribute(frozen, method="integrated-gradients", target=5, steps=steps).gap.max())
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
        ("decompx", {"rule": "frozen-split"}, "'frozen' or 'frozen-tangent'"),
        ("decompx", {"aggregate": "sum"}, "'vector'"),
        ("decompx", {"aggregate": "target"}, "needs one"),
        ("decompx", {"aggregate": "norm", "target": 3}, "needs one"),
        ("decompx", {"target": 3, "minus": 3}, "same token"),
        ("chefer", {"target": 99}, "outside the vocabulary"),
        ("leave-one-out", {"target": 5, "of": "loss"}, "'log_probability'"),
        ("leave-one-out", {"target": 5, "replacement": "pad"}, "no pad token.*or 'delete'"),
        ("leave-one-out", {"target": 5, "replacement": 99}, "'zero'.*'delete'"),
        ("value-zeroing", {"memory": "much"}, "'512MB'"),
        ("integrated-gradients", {"target": 5, "steps": 0}, "at least 1"),
        ("relp", {"target": 5, "attention": "half"}, "'frozen' or 'live'"),
        ("ifr", {"aggregate": "max"}, "'product' or 'sum'"),
        ("ifr", {"threshold": "much"}, "at least 0, below 1"),
        ("alti-logit", {"target": 5, "updates": "mlp"}, "'attention' or 'all'"),
        ("rollout", {"residual": "half"}, "between 0 and 1, None or 'auto'"),
        ("rollout", {"normalize": "yes"}, "normalize='yes'; use True or False"),
        ("tensorlens", {"final_norm": torch.ones(2, 3)}, r"final_norm=<Tensor \[2, 3\] torch.float32>; use True"),
        ("tensorlens", {"collapse": "norm", "probes": 3, "seed": "a"}, "seed='a': pass an integer"),
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
