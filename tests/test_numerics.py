"""Numbers at their limits, inside whole models: all holds as elsewhere, or is refused with a name and a place."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import close, hooks_left, some_tokens
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models.parameters import tried_norm
from tensorlens_tl.passes import backward
from tensorlens_tl.testing import check_model, model_names, tiny_model
from tensorlens_tl.testing.models import build_bridge


def gpt2(act="gelu", **changes):
    torch.manual_seed(0)
    return build_bridge("gpt2", activation_function=act, **changes)


def llama(act="silu", **changes):
    torch.manual_seed(0)
    return build_bridge("llama", hidden_act=act, **changes)


MODELS = {
    "gelu": gpt2,
    "relu": lambda: gpt2("relu"),
    "gelu_new": lambda: gpt2("gelu_new"),
    "gated silu": llama,
    "gated relu": lambda: llama("relu"),
}


def inner(model, layer=0):
    """The first matrices of an MLP: what makes z, or g and u."""
    mlp = model.blocks[layer].mlp.original_component
    return [getattr(mlp, name) for name in ("c_fc", "gate_proj", "up_proj") if hasattr(mlp, name)]


def dead(model):
    for linear in inner(model):
        linear.weight.zero_()
        if linear.bias is not None:
            linear.bias.fill_(-1e3)


def at_zero(model):
    for linear in inner(model):
        linear.weight.zero_()
        if linear.bias is not None:
            linear.bias.zero_()


def at_minus_zero(model):
    at_zero(model)
    for linear in inner(model):
        if linear.bias is not None:
            linear.bias.fill_(-0.0)


def huge(model):
    for linear in inner(model):
        linear.weight.mul_(1e6)


def denormal(model):
    for linear in inner(model):
        linear.weight.mul_(1e-310)
        if linear.bias is not None:
            linear.bias.mul_(1e-310)


def one_neuron_of_each(model):
    for linear in inner(model):
        weight = linear.weight.T if type(linear).__name__ == "Conv1D" else linear.weight
        for neuron, factor in enumerate((0.0, -0.0, 1e-320, 1e-160, 1e-8, 1e2)):
            weight[neuron] *= factor


def one_hot_attention(model):
    """Scores so far apart that all but one probability is exactly zero."""
    attn = model.blocks[0].attn.original_component
    (attn.c_attn.weight if hasattr(attn, "c_attn") else attn.q_proj.weight).mul_(1e4)


def constant_embedding(model):
    """A token without variance: its norm divides by √ε."""
    for parameter in model.parameters():
        if parameter.shape[0] in (48, 24) and parameter.ndim == 2 and parameter.shape[1] == 16:
            parameter[:] = 0.7


def zero_embedding(model):
    constant_embedding(model)
    for parameter in model.parameters():
        if parameter.shape == (48, 16):
            parameter.zero_()
            return


def large_stream(model):
    for parameter in model.parameters():
        if parameter.shape == (48, 16):
            parameter.mul_(1e8)
            return


EDGES = [
    dead, at_zero, at_minus_zero, huge, denormal, one_neuron_of_each, one_hot_attention, constant_embedding,
    zero_embedding, large_stream,
]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
@pytest.mark.parametrize("kind", MODELS)
def test_exact_at_the_limits(kind, edge):
    model = MODELS[kind]()
    with torch.no_grad():
        edge(model)
    report = check_model(model, some_tokens())
    assert max(report.errors.values()) <= report.tolerance <= 1e-4
    frozen = tlens.freeze(model, some_tokens())
    for rule in tlens.FROZEN_RULES:
        op = frozen.operator(rule=rule)
        assert torch.isfinite(op.contributions()).all()
        assert torch.isfinite(op.norm("all").scores).all()
    assert hooks_left(model) == 0


@pytest.mark.parametrize("kind", [pytest.param("gelu", marks=pytest.mark.whole), "gated silu"])
@pytest.mark.parametrize("sizes", ["one head", "one layer", "one wide"])
@pytest.mark.parametrize("tokens", [[[5]], [[5], [9]], [[3, 4, 5, 6]]])
def test_the_smallest_models_and_prompts(kind, sizes, tokens):
    names = ("n_head", "n_layer", "n_inner") if kind == "gelu" else (
        "num_attention_heads", "num_hidden_layers", "intermediate_size")  # fmt: skip
    changes = {dict(zip(("one head", "one layer", "one wide"), names, strict=True))[sizes]: 1}
    if changes.get("num_attention_heads"):
        changes["num_key_value_heads"] = 1
    check_model(gpt2(**changes) if kind == "gelu" else llama(**changes), torch.tensor(tokens))


@pytest.mark.parametrize("name", [n for n in ("hooked/sinks", "hooked/ln") if n in model_names()] + ["bridge/gpt2"])
def test_fully_masked_rows(name):
    """Left padding: the first queries attend to nothing real, or rows sum to less than 1 (sinks)."""
    tokens, mask = some_tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, :4] = 0
    report = check_model(tiny_model(name), torch.where(mask.bool(), tokens, 0), attention_mask=mask)
    assert max(report.errors.values()) < 1e-9


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 6e4), (torch.bfloat16, 1e37), (torch.float32, 1e37)])
@pytest.mark.parametrize("kind", ["gelu", "gated silu"])
def test_overflow_names_its_place(kind, dtype, factor):
    model = MODELS[kind]().to(dtype)
    with torch.no_grad():
        model.blocks[0].mlp.original_component.get_submodule("c_proj" if kind == "gelu" else "down_proj").weight.mul_(
            factor
        )
        model.blocks[0].attn.original_component.get_submodule("c_proj" if kind == "gelu" else "o_proj").weight.mul_(
            factor
        )
    with pytest.raises(tlens.NumericalError, match=r"(NaN|Inf) at blocks\.[01]\..*wider dtype"):
        tlens.freeze(model, some_tokens())
    assert hooks_left(model) == 0


def test_scores_that_underflow_have_no_residual_of_their_own():
    """Nothing written at all: zero scores, zero total, and a gap that is a number."""
    model = gpt2()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_final" in name or "ln_f" in name:
                parameter.zero_()
    in_out = tlens.freeze(model, some_tokens()).operator().in_out()
    assert not in_out.scores.any()
    assert float(in_out.gap.max()) == 0


def test_float16_overflow_is_an_error_or_right():
    model = tiny_model("bridge/gpt2").to(torch.float16)
    with torch.no_grad():
        model.blocks[1].mlp.original_component.c_proj.weight.mul_(400)
        model.ln_final.original_component.weight.mul_(400)
    op = tlens.freeze(model, some_tokens(), tolerance=0.1).operator()
    assert float(op.output.float().square().sum(-1).max()) > 65504  # float16's largest number
    with pytest.raises(tlens.NumericalError, match="overflow float16"):
        op.in_out()
    assert torch.isfinite(op.target(5).scores).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_norms_are_read_whatever_their_numbers(dtype):
    """In half precision a norm of four channels is as far from its reading as a few roundings take it."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    for seed in range(60):
        torch.manual_seed(seed)
        for norm, centre in ((Gemma2RMSNorm(4), False), (torch.nn.LayerNorm(4), True)):
            for parameter in norm.parameters():
                parameter.data.normal_(std=1.5)
            assert tried_norm(norm.to(dtype), SimpleNamespace(eps=1e-6), width=4).centre == centre


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numbers", [(25, 25), (100, 100), (300, 300), (1, 3e4), (-1, 3e4), (0.3, 0)], ids=str)
def test_whether_a_norm_adds_one_is_not_decided_within_rounding(dtype, numbers):
    """A gain of 100 and one of 101 are the same beside half precision's rounding, and 0.3 and 1.3 beside 30,000."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for norm, offset in ((Gemma3RMSNorm(8), 1), (LlamaRMSNorm(8), 0)):
        norm.weight.data.copy_(torch.tensor([*numbers] * 4) + torch.arange(8) / 8)
        norm.to(dtype)
        read = tried_norm(norm, SimpleNamespace(eps=1e-6), width=8)
        assert close(read.gain, offset + norm.weight.detach().double(), 1e-6)
        assert not read.centre
        assert norm.weight.dtype == dtype


def without_a_head(z, hook):
    return z * (torch.arange(z.shape[2]) > 0)[:, None].to(z)


@pytest.mark.parametrize(("dtype", "gain"), [(torch.bfloat16, 100), (torch.float16, 20)], ids=str)
def test_large_gains_in_half_precision(dtype, gain):
    """Within the model's own rounding, and a head of zeros is refused as ever."""
    model = tiny_model("bridge/gemma3").double()
    with torch.no_grad():
        for name, parameter in model.original_model.named_parameters():
            if "norm" in name:
                parameter.add_(gain)
        model.to(dtype)
        narrow = model(some_tokens())[:, -1].double()
        exact = copy.deepcopy(model).double()(some_tokens())[:, -1]
    chosen = exact.argmax(-1)
    rounding = (narrow - exact).abs().amax(-1)
    result = tlens.attribute(tlens.freeze(model, some_tokens()), chosen.tolist())
    sums = (result.scores.sum(-1) + result.bias)[:, 0].double()
    expected = exact.gather(-1, chosen[:, None])[:, 0]
    assert bool(((sums - expected).abs() <= 2 * rounding + 8 * torch.finfo(dtype).eps * expected.abs()).all())
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", without_a_head)]), pytest.raises(tlens.UnsupportedModelError):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("name", ["bridge/gemma3", "bridge/llama", "bridge/gpt2"])
@pytest.mark.parametrize("point", ["attn.hook_z", "ln1.hook_out", "mlp.hook_out"])
def test_a_real_error_is_no_rounding(name, point):
    """A head of zeros, a gain and a write by other factors, in half precision."""
    model = tiny_model(name).to(torch.bfloat16)

    def changed(x, hook):
        return without_a_head(x, hook) if point == "attn.hook_z" else 1.2 * x

    tlens.freeze(model, some_tokens())
    with model.hooks(fwd_hooks=[(f"blocks.1.{point}", changed)]), pytest.raises(tlens.UnsupportedModelError):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.003), (torch.bfloat16, 0.02)], ids=str)
def test_how_exact_scores_are_in_half_precision(dtype, most):
    """docs/howto/3 says so: of the largest score, beside the same weights in float32."""
    prompts = tlens.demo.held_out_prompts(tlens.load_demo_model(kind="bridge"), 8, 32)
    scores = []
    for wide in (dtype, torch.float32):
        model = tlens.load_demo_model(kind="bridge").to(dtype).to(wide)
        scores.append(tlens.attribute(model, prompts[:, :-1], prompts[:, -1].tolist()).scores.double())
    half, exact = scores
    errors = (half - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert 1e-5 < float(errors.max()) < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_result_says_how_many_of_its_digits_hold(dtype, capsys):
    model = tlens.load_demo_model(kind="bridge").to(dtype)
    result = tlens.attribute(model, tlens.demo.held_out_prompts(model, 1, 32), 5)
    missed = float((result.scores.sum(-1) + result.bias - result.total).abs().max())
    result.show()
    shown = f"bfloat16 is off by up to {missed:.2g}" in capsys.readouterr().out
    assert shown == (dtype == torch.bfloat16)
    assert shown == (missed > 5e-4 * float(result.total.abs()))


@pytest.mark.parametrize("method", ["input-x-gradient", "attnlrp", "gim", "chefer"])
@pytest.mark.few(2)
def test_gradients_that_lose_digits_say_so(method, monkeypatch):
    """In bfloat16, also in a strict pass; in float32 and by a method that pulls in float32 nothing is lost.

    How much is lost depends on the processor: here a thousandth is notable.
    """
    monkeypatch.setattr(backward, "NOTABLE", 1e-3)
    prompt = tlens.demo.held_out_prompts(tlens.load_demo_model(kind="bridge"), 1, 32)
    for dtype, strict in ((torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)):
        frozen = tlens.freeze(tlens.load_demo_model(kind="bridge").to(dtype), prompt, strict=strict)
        tlens.attribute(frozen, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error", tlens.GapWarning)
            if dtype == torch.float32:
                tlens.attribute(frozen, 5, method=method)
                continue
            with pytest.raises(tlens.NumericalError if strict else tlens.GapWarning, match="digits to bfloat16"):
                tlens.attribute(frozen, 5, method=method)


@pytest.mark.parametrize("strict", [False, True])
def test_a_quadrature_that_misses_its_integral_says_so(strict):
    frozen = tlens.freeze(tiny_model("bridge/llama"), some_tokens(), strict=strict)
    with pytest.raises(tlens.NumericalError) if strict else pytest.warns(tlens.GapWarning, match="steps=4"):
        assert float(tlens.attribute(frozen, 5, method="integrated-gradients", steps=1).gap.max()) > 0.05


ONE_CLASS = pytest.mark.skipif("hooked/ln" not in model_names(), reason="its patterns have 0 in the place of NaN")

HIDDEN = {
    "qk_attribution": lambda run, other: circuits.qk_attribution(run, 1, 0, key=3),
    "composition_scores": lambda run, other: circuits.composition_scores(run.model, "Q"),
    "gradients of nodes": lambda run, other: circuits.patch_scores(run, other, 5, method="gradient"),
    "difference": lambda run, other: tlens.difference(run, other).operator().target(5),
    "attnlrp": lambda run, other: tlens.attribute(run, 5, method="attnlrp"),
}


@ONE_CLASS
@pytest.mark.parametrize("question", HIDDEN)
def test_a_weight_that_is_nan_is_named_where_the_pattern_hides_it(question):
    """What the model computes is finite, and so is the frozen pass; what reads the weight itself is not."""
    model = tiny_model("hooked/ln")
    model.blocks[1].attn.W_Q.data[0, 0, 0] = float("nan")
    run, other = (tlens.freeze(model, torch.arange(first, first + 6)[None]) for first in (3, 4))
    assert torch.isfinite(tlens.attribute(run, 5).scores).all()
    with pytest.raises(tlens.NumericalError, match=r"NaN\. Look for weights that are not finite"):
        HIDDEN[question](run, other)


@ONE_CLASS
def test_logits_that_are_nan_are_called_so():
    model = tiny_model("hooked/ln")
    model.W_U.data[:, 3] = float("nan")
    with pytest.raises(tlens.NumericalError, match="target: the logits"):
        tlens.attribute(tlens.freeze(model, torch.arange(3, 9)[None]), 5)


@pytest.mark.parametrize("clip", [1e3, 1e-4])
def test_a_clip_that_acts_is_named(clip):
    """OLMo's clip_qkv: where nothing is clipped the model is exact, elsewhere the refusal says what does it."""
    from transformers import OlmoConfig, OlmoForCausalLM

    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = OlmoConfig(**sizes, num_attention_heads=4, clip_qkv=clip, attn_implementation="eager")
    model = build_bridge_from_module(OlmoForCausalLM(config).double().eval(), "OlmoForCausalLM", hf_config=config)
    if clip > 1:
        assert max(tlens.freeze(model, some_tokens()).errors.values()) < 1e-6
        return
    with pytest.raises(tlens.UnsupportedModelError, match=r"clip_qkv=0\.0001") as raised:
        tlens.freeze(model, some_tokens())
    assert "reset_hooks" not in str(raised.value)
