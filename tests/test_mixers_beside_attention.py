"""A mixer beside attention in one block (Falcon-H1), against what the block computes, written out from its weights."""

import pytest
import torch
from conftest import close, hooks_left, some_tokens
from torch.nn.functional import silu, softplus

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models import scan_of
from tensorlens_tl.testing import tiny_model

pytestmark = pytest.mark.numeric

NAME = "bridge/falcon-h1"


@pytest.fixture
def frozen(model_named):
    return tlens.freeze(model_named(NAME), some_tokens(2, 7))


def weight(module):
    return getattr(module, "original_component", module).weight.detach()


def attended(module, pattern, x):
    """Keys and values of two heads for four queries', each of them multiplied as the config says."""
    value = (0.8 * x) @ weight(module.v_proj).T
    gathered = torch.einsum("bhij,bjhd->bihd", pattern, value.unflatten(-1, (2, 4)).repeat_interleave(2, 2))
    return 1.3 * gathered.flatten(2) @ weight(module.o_proj).T


def over_positions(taps, values):
    """A causal convolution of every channel by itself."""
    moved = [values.roll(back, 1).index_fill(1, torch.arange(back), 0) for back in range(4)]
    return sum(taps[:, 3 - back] * values for back, values in enumerate(moved))


def mixed(module, at, x):
    """The recurrence of Mamba 2, position by position: what depends on the input is read at `at`, the rest at `x`."""
    W_in = weight(module.in_proj)
    taps = weight(module.conv1d)[:, 0]
    b_conv = getattr(module.conv1d, "original_component", module.conv1d).bias.detach()
    gate, convolved, step = (at @ W_in.T).split([16, 40, 4], -1)
    live = (x @ W_in.T)[..., 16:56]
    before = b_conv + over_positions(taps, convolved)
    through = over_positions(taps, live)
    kept, B, C = silu(before).split([16, 12, 12], -1)
    read = (silu(before) / before * through)[..., :16]
    delta = softplus(step + module.dt_bias)
    A = -module.A_log.exp()

    def scanned(values):
        state = torch.zeros(len(x), 4, 4, 6, dtype=x.dtype)
        given = []
        for i in range(x.shape[1]):
            of_head = [part[:, i].unflatten(-1, (2, 6)).repeat_interleave(2, 1) for part in (B, C)]
            entering = (delta[:, i, :, None] * values[:, i].unflatten(-1, (4, 4)))[..., None] * of_head[0][:, :, None]
            state = (delta[:, i] * A).exp()[..., None, None] * state + entering
            given.append((state * of_head[1][:, :, None]).sum(-1).flatten(1))
        return torch.stack(given, 1) + module.D.repeat_interleave(4) * values

    norm = getattr(module.norm, "original_component", module.norm)
    y = scanned(kept) if norm.norm_before_gate else scanned(kept) * silu(gate)
    factor = (y.unflatten(-1, (2, 8)).square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    scaled = scanned(read) * silu(gate) * factor.expand(-1, -1, 2, 8).flatten(-2) * norm.weight.detach()
    return 0.7 * scaled @ weight(module.out_proj).T


@torch.no_grad()
def test_the_block_is_what_its_weights_compute(frozen):
    """With patterns, scales, gates and what the scan reads held, at another stream, to the digits of float64."""
    layer = frozen.model.original_model.model.layers[0]
    pattern = frozen.activation("blocks.0.attn.hook_pattern")
    at = frozen.activation("blocks.0.mamba.hook_in")
    other = torch.randn_like(frozen.resid_pre(0))
    normed = other / frozen.activation("blocks.0.ln1.hook_scale") * weight(layer.input_layernorm)
    attn, mamba = (getattr(part, "original_component", part) for part in (layer.self_attn, layer.mamba))
    middle = other + attended(attn, pattern, normed) + mixed(mamba, at, normed)
    normed = middle / frozen.activation("blocks.0.ln2.hook_scale") * weight(layer.pre_ff_layernorm)
    mlp = getattr(layer.feed_forward, "original_component", layer.feed_forward)
    gate = 0.9 * frozen.activation("blocks.0.mlp.hook_pre")
    expected = middle + 1.4 * (silu(gate) * (normed @ weight(mlp.up_proj).T)) @ weight(mlp.down_proj).T
    assert close(frozen.maps.block_map(0).push(other), expected, 1e-9)


@pytest.mark.parametrize("by", ["head", "component"])
def test_heads_and_mixer_are_terms_of_one_layer(frozen, by):
    terms = circuits.logit_attribution(frozen, 7, by=by, query=[3, -1])
    assert {"L0.mixer", "L1.mixer", "L1H3" if by == "head" else "L1.attn"} <= set(terms.names)
    assert float(terms.gap.max()) < 1e-6
    with torch.no_grad():
        assert close(terms.total[:, 1], frozen.model(**frozen.inputs)[:, -1, 7], 1e-6)


def test_the_mixer_alone_is_taken_away(frozen):
    effects = circuits.total_effects(frozen, 7)
    seen = {}
    silent = (frozen.points.blocks[0].beside.out, lambda live, *, hook: torch.zeros_like(live))
    end = (frozen.points.unembed_in, lambda live, *, hook: seen.update(x=live))
    totals = []
    for hooks in ([], [silent]):
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*frozen.fwd_hooks(), *hooks, end])
        totals.append(seen["x"][:, -1] @ frozen.view.unembedding[0][:, 7])
    assert close(effects["L0.mixer"][:, 0], 0.5 * (totals[0] - totals[1]).detach(), 1e-6)
    assert hooks_left(frozen.model) == 0


def test_a_vector_that_a_hook_adds_is_multiplied_as_the_block_multiplies_it(model_named):
    model = model_named(NAME)
    vector = torch.randn(16, dtype=torch.float64)
    with model.hooks(fwd_hooks=[("blocks.0.hook_attn_out", lambda live, *, hook: live + vector)]):
        steered = tlens.freeze(model, some_tokens(2, 7))
        terms = circuits.logit_attribution(steered, 7)
    assert float(terms.gap.max()) < 1e-6
    assert "blocks.0.hook_attn_out" in terms.names


@pytest.mark.parametrize("method", ["rollout", "alti", "norm"])
def test_patterns_are_not_all_that_tokens_take_from_each_other(frozen, method):
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*mamba stands beside its attention"):
        tlens.attribute(frozen, method=method)


def test_both_are_shown_by_themselves(frozen):
    with pytest.raises(tlens.InvalidInputError, match=r"frozen\.maps\.beside\(layer\)"):
        tlens.implicit_attention(frozen, 0)
    assert frozen.pattern(0).shape == scan_of(frozen.maps.beside(0)).implicit_attention().shape == (2, 4, 7, 7)
    assert tlens.freeze(tiny_model("bridge/llama"), [[3, 4, 5]]).maps.beside(0) is None


def test_other_weights_of_a_block_with_constants_are_refused(frozen):
    with pytest.raises(tlens.UnsupportedModelError, match="multiplied by a constant"):
        frozen.view.with_weights({0: {"W_O": frozen.model.blocks[0].attn.W_O}})


@pytest.mark.parametrize("name", [NAME, "bridge/granite-moe"])
def test_a_branch_without_its_factor_has_the_precision_of_the_stream(name, model_named):
    """The factor is taken out in the precision in which it was put in."""
    frozen = tlens.freeze(model_named(name), some_tokens(1, 5))
    x = torch.randn_like(frozen.resid_pre(0))
    factor = frozen.view.blocks[0].attention_factor
    assert factor != 1
    assert close(frozen.maps.attention_alone(0)(x) * factor, frozen.maps.mixer(0)(x), 1e-14)
