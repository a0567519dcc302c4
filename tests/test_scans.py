"""Mixers of state-space layers, read from Hugging Face's own modules: what they give, and what is held."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import Wide
from torch import nn
from torch.nn.functional import pad, silu, softplus

from tensorlens_tl import core
from tensorlens_tl.algebra import CausalConvolution, Chain, Diagonal, DiagonalRecursion, Linear
from tensorlens_tl.core import families
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.mixers import delta_pattern, mixer_map, read_mixer, scan_of
from tensorlens_tl.testing import check_map

pytestmark = pytest.mark.numeric

SIZE = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0}
MAMBA = SIZE | {"state_size": 6}
MAMBA_2 = MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
HYBRID = SIZE | {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
HYBRID |= {"mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2}
GROUPS = HYBRID | {"mamba_n_groups": 2, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 24}
FALCON_H1 = GROUPS | {"mamba_d_ssm": 32, "mamba_rms_norm": True}
DELTA = HYBRID | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
DELTA |= {"linear_value_head_dim": 5, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES = {
    "Mamba": MAMBA | {"use_bias": True, "time_step_rank": 3},
    "Mamba plain": MAMBA | {"use_conv_bias": False, "hidden_act": "gelu"},
    "FalconMamba": MAMBA | {"use_bias": True, "time_step_rank": 3},
    "Jamba": HYBRID | {"mamba_dt_rank": 3, "mamba_proj_bias": True, "num_experts": 1, "attn_layer_offset": 1},
    "Mamba2": MAMBA_2 | {"use_bias": True, "time_step_limit": (0.4, 0.9)},
    "Bamba": GROUPS | {"attn_layer_indices": [1], "mamba_proj_bias": True},
    "GraniteMoeHybrid": GROUPS | EXPERTS | {"layer_types": ["mamba", "attention"]},
    "NemotronH": HYBRID
    | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6}
    | {"n_groups": 2, "chunk_size": 4, "head_dim": 8, "time_step_min": 0.6},
    "Zamba2": HYBRID
    | {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 8, "mamba_ngroups": 2}
    | {"num_mem_blocks": 1, "adapter_rank": 4, "chunk_size": 4, "add_bias_linear": True},
    "FalconH1": FALCON_H1
    | {"ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.6], "mamba_proj_bias": True},
    "FalconH1 without a norm": FALCON_H1 | {"mamba_rms_norm": False},
    "FalconH1 norm first": FALCON_H1 | {"mamba_norm_before_gate": True},
    "Qwen3Next": DELTA | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "Qwen3_5": DELTA,
    "OlmoHybrid": DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "OlmoHybrid of small steps": DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": False},
}


_made: dict = {}


def family(name):
    """A tiny model in float64 with every parameter random, and its first mixer."""
    if name not in _made:
        torch.manual_seed(0)
        kind = name.split()[0]
        config = getattr(hf, "Qwen3_5TextConfig" if kind == "Qwen3_5" else f"{kind}Config")(**FAMILIES[name])
        config._attn_implementation = config._experts_implementation = "eager"
        model = getattr(hf, f"{kind}ForCausalLM")(config).double().eval()
        for part in model.parameters():
            part.data = part.data + 0.3 * torch.randn_like(part) if part.ndim == 1 else 0.4 * torch.randn_like(part)
        _made[name] = model, next(part for part in model.modules() if hasattr(part, "A_log"))
    return _made[name]


def run(name, length=9, padding=0, wide=True):
    """One forward pass of the whole model: its mixer, what that is given, its mask, and what it gives."""
    model, mixer = family(name)
    seen = {}

    def see(_, args, kwargs, output):
        given = dict(zip(("hidden_states", "cache_params", "attention_mask"), args, strict=False)) | kwargs
        seen.update(x=given["hidden_states"], mask=given.get("attention_mask"), y=output)

    handle = mixer.register_forward_hook(see, with_kwargs=True)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :padding] = 0
    ids = torch.randint(1, 61, (2, length))
    try:
        with torch.no_grad(), Wide() if wide else torch.no_grad():
            model(ids, attention_mask=mask, use_cache=False)
    finally:
        handle.remove()
    return mixer, seen["x"], seen["mask"], seen["y"]


def off(mine, theirs):
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_map_gives_what_the_mixer_gives(name, padding):
    mixer, x, mask, y = run(name, padding=padding)
    assert (mask is not None and not mask.all()) == (padding > 0)
    with Wide():  # the norms of Δ, B and C are the module's own
        m = mixer_map(mixer, x, mask)
    assert off(m(x), y) <= 1e-9
    if name in ("Mamba", "Mamba2", "Qwen3Next"):
        check_map(m, x)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_the_frozen_rule_is_the_map(name, padding):
    """The mixer itself runs, with what a line of data names held; the map is read from its weights."""
    mixer, x, mask, _ = run(name, padding=padding)
    leaf = x.clone().requires_grad_()
    with Wide():
        m = mixer_map(mixer, x, mask)
        with core.ruled(mixer, core.FROZEN) as frozen:
            y = mixer(leaf, attention_mask=mask)
    assert frozen is not None
    assert frozen.ones is not None
    vectors = torch.randn_like(y)
    pulled, of_constants = torch.autograd.grad(y, [leaf, frozen.ones.leaf], vectors, materialize_grads=True)
    assert off(pulled, m.pull(vectors[None])[0]) <= 1e-9
    assert float((of_constants - (vectors * m.bias).sum()).abs()) <= 1e-9 * float(vectors.norm() * (1 + m.bias.norm()))
    assert "forward" not in vars(mixer)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Qwen3Next"])
def test_a_mixer_without_a_line_is_refused(name, monkeypatch):
    monkeypatch.setattr(families, "MIXERS", ())
    mixer, x, mask, _ = run(name)
    leaf = x.clone().requires_grad_()
    with pytest.raises(UnsupportedModelError, match=f"in {type(mixer).__name__}: "), core.ruled(mixer, core.FROZEN):
        mixer(leaf, attention_mask=mask).sum().backward()


def test_a_delta_rule_masks_only_what_it_reads():
    """A bias of its convolution, which none of these models has, would reach real tokens from padded ones."""
    mixer = copy.deepcopy(family("Qwen3_5")[1])
    mixer.conv1d.bias = nn.Parameter(torch.randn(len(mixer.conv1d.weight), dtype=torch.float64))
    x, mask = torch.randn(2, 9, 16, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    with Wide():
        assert off(mixer_map(mixer, x, mask)(x), mixer(x, attention_mask=mask)) <= 1e-9
    with pytest.raises(UnsupportedModelError, match="the convolution of Qwen3_5GatedDeltaNet has a bias"):
        read_mixer(mixer)(x, mask)
    assert off(read_mixer(mixer)(x, mask.flip(1))(x), mixer_map(mixer, x, mask.flip(1))(x)) == 0


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Qwen3Next"])
def test_what_is_rounded_to_float32(name):
    """Left as it is, a float64 module differs by its own rounding; in float32 and bfloat16 dtypes are kept."""
    mixer, x, mask, y = run(name, wide=False)
    assert off(mixer_map(mixer, x, mask)(x), y) <= 1e-6
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        narrow = family(name)[0].to(dtype)
        made = mixer_map(mixer, x.to(dtype))(x.to(dtype))
        narrow.double()
        assert made.dtype == dtype
        assert off(made.double(), y) <= allowed
    _made.pop(name)  # its weights were rounded


# ------------------------------------------------------------------ held at one input, used at another


def convolved(mixer, projected, bias):
    """The convolution of what is projected, one position and tap at a time."""
    weight, offset = mixer.conv1d.weight[:, 0], mixer.conv1d.bias
    reach = weight.shape[1]
    before = pad(projected, (0, 0, reach - 1, 0))
    rows = [(before[:, i : i + reach].mT * weight).sum(-1) for i in range(projected.shape[1])]
    return torch.stack(rows, 1) + (offset if bias else 0)


def scanned(x, decay, write, read):
    """One position after the other: x `[b, i, c]`, decay and write `[b, i, c, n]`, read the same."""
    h, rows = torch.zeros_like(decay[:, 0]), []
    for i in range(x.shape[1]):
        h = decay[:, i] * h + write[:, i] * x[:, i, :, None]
        rows.append((h * read[:, i]).sum(-1))
    return torch.stack(rows, 1)


def literal_mamba(mixer, x, other):
    """Mamba 1 as printed, everything that depends on the input from `x`, vectors from `other`."""
    channels, rank = mixer.intermediate_size, mixer.time_step_rank
    before = convolved(mixer, mixer.in_proj(x)[..., :channels], True)
    after, gate = silu(before), silu(mixer.in_proj(x)[..., channels:])
    step, B, C = mixer.x_proj(after).split([rank, mixer.ssm_state_size, mixer.ssm_state_size], -1)
    delta = softplus(mixer.dt_proj(step))[..., None]
    u = convolved(mixer, mixer.in_proj(other)[..., :channels], True) * after / before
    y = scanned(u, torch.exp(delta * -mixer.A_log.exp()), delta * B[:, :, None], C[:, :, None]) + mixer.D * u
    return mixer.out_proj(y * gate)


def literal_mamba2(mixer, x, other):
    """Mamba 2 likewise, every channel with its head's rate."""
    channels, heads, groups = mixer.intermediate_size, mixer.num_heads, mixer.n_groups
    gate, inner, step = mixer.in_proj(x).split([channels, mixer.conv_dim, heads], -1)
    before = convolved(mixer, inner, True)
    after = silu(before)
    u = convolved(mixer, mixer.in_proj(other)[..., channels:-heads], True) * after / before
    B, C = (part.unflatten(-1, (groups, -1)) for part in after[..., channels:].chunk(2, -1))
    B, C = (part.repeat_interleave(channels // groups, 2) for part in (B, C))
    delta = softplus(step + mixer.dt_bias).clamp(*mixer.time_step_limit)
    delta, A, D = (part.repeat_interleave(channels // heads, -1) for part in (delta, -mixer.A_log.exp(), mixer.D))

    def through(u):
        made = scanned(u, torch.exp(delta * A)[..., None].expand_as(B), delta[..., None] * B, C) + D * u
        return (made * silu(gate)).unflatten(-1, (groups, -1))

    scale = (through(after[..., :channels]).square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon).sqrt()
    return mixer.out_proj(mixer.norm.weight * (through(u[..., :channels]) / scale).flatten(-2))


def delta_loop(q, k, v, decay, strength):
    """The gated delta rule one position after the other: q, k and v `[b, i, h, d]`, decay and strength `[b, i, h]`."""
    state, rows, one = torch.zeros_like(v[:, 0, ..., None] * k[:, 0, :, None]), [], torch.eye(k.shape[-1]).to(k)
    for i in range(q.shape[1]):
        a, beta, key = decay[:, i, :, None, None], strength[:, i, :, None, None], k[:, i, :, None]
        state = a * state @ (one - beta * key.mT * key) + beta * v[:, i, ..., None] * key
        rows.append((state * q[:, i, :, None]).sum(-1))
    return torch.stack(rows, 1)


def literal_delta(mixer, x, other):
    """Qwen3-Next and Qwen3.5 as printed, everything that depends on the input from `x`, values from `other`."""

    def made(given):
        if hasattr(mixer, "in_proj_qkvz"):
            parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(given), mixer.in_proj_ba(given))
            return torch.cat([part.flatten(2) for part in parts[:3]], -1), *parts[3:]
        parts = [getattr(mixer, f"in_proj_{name}")(given) for name in ("qkv", "z", "b", "a")]
        return parts[0], parts[1].unflatten(-1, (mixer.num_v_heads, -1)), *parts[2:]

    first, z, b, a = made(x)
    before, keys = convolved(mixer, first, False), 2 * mixer.key_dim
    after = silu(before)
    q, k = (part.unflatten(-1, (mixer.num_k_heads, -1)) for part in after[..., :keys].chunk(2, -1))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, 2) for part in (q, k))
    decay = torch.exp(-mixer.A_log.exp() * softplus(a + mixer.dt_bias))

    def through(v):
        return delta_loop(q / mixer.head_k_dim**0.5, k, v.unflatten(-1, (mixer.num_v_heads, -1)), decay, b.sigmoid())

    scale = (through(after[..., keys:]).square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon).sqrt()
    u = (convolved(mixer, made(other)[0], False) * after / before)[..., keys:]
    return mixer.out_proj((mixer.norm.weight * through(u) / scale * silu(z)).flatten(-2))


LITERAL = {"Mamba": literal_mamba, "Mamba2": literal_mamba2, "Qwen3Next": literal_delta, "Qwen3_5": literal_delta}


@pytest.mark.parametrize("name", LITERAL)
@torch.no_grad()
def test_held_at_one_input_and_used_at_another(name):
    mixer, x, _, _ = run(name)
    other = torch.randn_like(x)
    expected = LITERAL[name](mixer, x, other)
    assert off(mixer_map(mixer, x)(other), expected) <= 1e-9


def test_the_delta_rule_is_attention_with_a_pattern_of_its_own():
    """Also where states change their sign (β above 1), keys are not of length 1, and decays are strong."""
    q, k, v = (torch.randn(2, 13, 3, width, dtype=torch.float64) for width in (4, 4, 5))
    decay, strength = (torch.rand(2, 13, 3, dtype=torch.float64) for _ in range(2))
    k, decay, strength = 0.7 * k, decay**6, 2 * strength
    pattern = delta_pattern(q, k, decay.log(), strength)
    assert not pattern.triu(1).any()
    assert off(torch.einsum("bhqk,bkhd->bqhd", pattern, v), delta_loop(q, k, v, decay, strength)) <= 1e-9


@torch.no_grad()
def test_a_recurrent_block_needs_no_map_of_its_own():
    """RecurrentGemma: a convolution, then a recursion with one state for each channel, its gates held fixed."""
    torch.manual_seed(0)
    config = hf.RecurrentGemmaConfig(hidden_size=16, lru_width=16, num_attention_heads=2, vocab_size=61)
    block = hf.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock(config, 0).double()
    for part in block.parameters():
        part.data = 0.5 * torch.randn_like(part)
    x, places, seen = torch.randn(2, 11, 16, dtype=torch.float64), torch.arange(11).expand(2, -1), {}
    lru: Any = block.rg_lru
    own, lru._rnn_scan = lru._rnn_scan, lambda **held: seen.update(held) or own(**held)
    with Wide():
        expected = block(x, places, None, use_cache=False)[0]
    scaled = seen["hidden_states"]  # x after the convolution, times gates that are held fixed
    projected = block.linear_x(x)
    m = CausalConvolution(block.conv_1d.weight[:, 0], block.conv_1d.bias)
    recursion = DiagonalRecursion((seen["recurrent_gate"] * ~seen["reset"])[..., None])
    m = Diagonal(block.act_fn(block.linear_y(x))) @ recursion @ Diagonal(scaled / m(projected)) @ m
    # the scan's accumulator is float32, whatever the dtype: a default argument
    assert off(block.linear_out(m(projected)), expected) <= 1e-6
    assert off(recursion.push(scaled), own(**(seen | {"acc_dtype": torch.float64}))[0]) <= 1e-12


# ------------------------------------------------------------------ what is refused


def changed(name, **parts):
    """A mixer with some parts in other forms."""
    mixer = family(name)[1]

    class Changed(nn.Module):
        def __getattr__(self, part):
            if part in parts and parts[part] is None:
                raise AttributeError(part)
            return parts[part] if part in parts else getattr(mixer, part)

    return Changed()


REFUSED = {
    "no mixer": (lambda: nn.Linear(16, 16), "`in_proj` of Linear is missing"),
    "no rates": (lambda: changed("Mamba", A_log=None), "`A_log` of Changed is missing"),
    "per head": (lambda: changed("Mamba", A_log=torch.zeros(2, 16, 6)), "`A_log` of Changed has 3 axes"),
    "no choice": (lambda: changed("Mamba", x_proj=None), "`x_proj` of Changed is missing"),
    "biased choice": (lambda: changed("Mamba", x_proj=nn.Linear(32, 15).double()), "`x_proj` of Changed has a bias"),
    "another rank": (lambda: changed("Mamba", x_proj=nn.Linear(32, 16, False)), "`x_proj` of Changed does not make"),
    "not causal": (lambda: changed("Mamba", conv1d=nn.Conv1d(32, 32, 4, groups=32)), "`conv1d` of Changed is not a"),
    "few": (
        lambda: changed("Mamba", conv1d=nn.Conv1d(16, 16, 4, groups=16, padding=3)),
        "`conv1d` of Changed does not",
    ),
    "no gate": (lambda: changed("Mamba", in_proj=nn.Linear(16, 32)), "`in_proj` of Changed does not make x and a gate"),
    "softmax": (lambda: changed("Mamba", act=nn.Softmax(-1)), "`act` of Changed does not treat"),
    "quantised": (lambda: changed("Mamba", out_proj=quantised()), "of Changed, `out_proj` is stored as torch.int8"),
    "no groups": (lambda: changed("Mamba2", n_groups=None), "`n_groups` of Changed is missing"),
    "uneven": (lambda: changed("Mamba2", n_groups=3), "`A_log` of Changed has no equal share"),
    "odd": (lambda: changed("Mamba2", n_groups=4, conv1d=nn.Conv1d(33, 33, 4, groups=33, padding=3)), "`conv1d` of"),
    "with an MLP": (lambda: changed("Mamba2", in_proj=nn.Linear(16, 99)), "`in_proj` of Changed makes 99 numbers"),
    "wide skip": (lambda: changed("Mamba2", D=torch.ones(32)), "`D` of Changed is not one number"),
    "few keys": (lambda: changed("Qwen3_5", num_k_heads=3), "`num_v_heads` of Changed .4. is no multiple of the 3"),
    "another split": (
        lambda: changed("Qwen3_5", head_v_dim=6),
        "`in_proj_qkv` of Changed makes 44 numbers, not",
    ),
    "few of a delta": (
        lambda: changed("Qwen3_5", conv1d=nn.Conv1d(20, 20, 4, groups=20, padding=3)),
        "`conv1d` of Changed does not take queries",
    ),
    "softmax of a delta": (lambda: changed("Qwen3_5", activation="softmax"), "`activation` of Changed is softmax"),
    "no way out": (lambda: changed("Qwen3_5", out_proj=None), "`out_proj` of Changed is missing"),
    "layer norm of a delta": (lambda: changed("Qwen3_5", norm=nn.LayerNorm(5)), r"`norm` of Changed \(LayerNorm\) is"),
    "half a convolution": (
        lambda: Made(in_proj=nn.Linear(16, 40), conv=CONV_16, out_proj=nn.Linear(16, 16)),
        "`in_proj` of Made does not make B, C and x",
    ),
    "layer norm": (lambda: changed("Mamba2", norm=nn.LayerNorm(32)), r"`norm` of Changed \(LayerNorm\) is not"),
}


CONV_16 = nn.Conv1d(16, 16, 3, groups=16, padding=2)


class Made(nn.Module):
    """What it is made of."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def quantised():
    layer = nn.Linear(32, 16)
    layer.weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_part(case):
    make, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=f"mixer_map: {message}"):
        mixer_map(make(), torch.randn(1, 3, 16, dtype=torch.float64))


def test_vectors_and_masks_of_another_shape():
    mixer, x = family("Mamba")[1], torch.randn(2, 5, 16, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match="takes vectors of 16, x has 8"):
        mixer_map(mixer, x[..., :8])
    with pytest.raises(InvalidInputError, match=r"the mask is \[2, 4\]"):
        mixer_map(mixer, x, torch.ones(2, 4, dtype=torch.bool))


def test_parts_that_another_library_wraps_are_read():
    mixer, x, _, y = run("Mamba2")
    wrapped = {name: SimpleNamespace(original_component=getattr(mixer, name)) for name in ("in_proj", "conv1d", "norm")}
    assert off(mixer_map(changed("Mamba2", **wrapped), x)(x), y) <= 1e-9


def test_the_scan_is_found_and_the_weights_are_the_models():
    mixer, x, mask, _ = run("Mamba2")
    m = mixer_map(mixer, x, mask)
    output = m.stages[-1]
    assert isinstance(output, Linear)
    assert output.weight.data_ptr() == mixer.out_proj.weight.data_ptr()
    attention = scan_of(m).implicit_attention()
    assert attention.shape == (2, 4, 9, 9)
    assert not attention.triu(1).any()
    for made in (m @ m, Chain(m.stages[:2])):
        with pytest.raises(InvalidInputError, match=f"scan_of: {2 * (made.stages[2:] != ())} scans"):
            scan_of(made)
