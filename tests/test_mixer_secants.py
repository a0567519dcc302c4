"""The secants of mixers against Hugging Face's own modules, run twice and differentiated, all in float64."""

import copy

import pytest
import torch
import transformers as hf
from conftest import rest_whole
from test_scans import FAMILIES, Wide, family, off

from tensorlens_tl.algebra.secants import Change, DecayedProducts, ScanResponse, ScanRun, offset_terms, scans
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.sublayers import read_mixer
from tensorlens_tl.passes.two_runs.mixers import mixer_secant
from tensorlens_tl.testing import check_map

pytestmark = pytest.mark.numeric

LENGTH = 9
LFM2 = "LFM2"
NAMES = [*FAMILIES, LFM2]
ONE_OF_EACH = ("Mamba", "Mamba2", "Qwen3Next", LFM2)

CONSTANTS = {
    "Mamba": {
        "W_x", "b_x", "conv_x", "conv_x.b", "W_step", "W_B", "W_C", "W_delta", "b_delta", "A", "D", "W_gate", "b_gate",
        "W_out", "b_out",
    },
    "Mamba2": {
        "W_x", "b_x", "conv_x", "conv_x.b", "W_B", "b_B", "conv_B", "conv_B.b", "W_C", "b_C", "conv_C", "conv_C.b",
        "W_delta", "b_delta", "b_step", "A", "D", "W_gate", "b_gate", "norm.w", "W_out", "b_out",
    },
    "Qwen3Next": {
        "W_Q", "conv_Q", "W_K", "conv_K", "W_V", "conv_V", "W_strength", "W_decay", "b_step", "A", "W_gate", "norm.w",
        "W_out",
    },
    LFM2: {"W_x", "b_x", "W_B", "b_B", "W_C", "b_C", "conv_x", "conv_x.b", "W_out", "b_out"},
}  # fmt: skip
"""What two mixers with other weights differ by, by the names of their constants."""


def short_convolution():
    torch.manual_seed(0)
    config = hf.Lfm2Config(hidden_size=16, vocab_size=61, num_hidden_layers=1, num_attention_heads=2, conv_bias=True)
    module = hf.models.lfm2.modeling_lfm2.Lfm2ShortConv(config, 0).double()
    for part in module.parameters():
        part.data = 0.4 * torch.randn_like(part)
    return module


def mixer_of(name):
    return short_convolution() if name == LFM2 else family(name)[1]


def varied(module):
    """The same with every parameter changed."""
    other = copy.deepcopy(module)
    for part in other.parameters():
        part.data = part.data + 0.1 * torch.randn_like(part)
    return other


def padding(side):
    """Which tokens are real: three of the first prompt are not."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    if side == "left":
        mask[0, :3] = False
    if side == "right":
        mask[0, -3:] = False
    return mask


def live(module, x, mask):
    """What the module itself gives, in float64."""
    with Wide():
        return module(x, attention_mask=mask.long())


def inputs(size=1.0):
    x_a = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    return x_a, x_a + size * torch.randn_like(x_a)


def secant_of(module_a, module_b, x_a, x_b, mask):
    keep = None if mask.all() else mask[..., None].to(x_a)
    weights = (read_mixer(module).weights for module in (module_a, module_b))
    return mixer_secant(*weights, Change(x_a, x_b), keep, "L0")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_it_gives_the_difference_of_what_the_module_gives(name, side):
    module = mixer_of(name)
    mask = padding(side)
    x_a, x_b = inputs()
    expected = live(module, x_a, mask) - live(module, x_b, mask)
    with Wide():
        secant = secant_of(module, module, x_a, x_b, mask)
    assert off((secant(x_a - x_b))[mask], expected[mask]) <= 1e-9
    assert not bool(torch.as_tensor(secant.bias).any())


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
def test_of_one_input_it_is_the_derivative(name, side):
    module = mixer_of(name)
    mask = padding(side)
    x, _ = inputs()
    g = torch.randn_like(x) * mask[..., None]
    leaf = x.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(live(module, leaf, mask), leaf, g)
    with torch.no_grad(), Wide():
        secant = secant_of(module, module, x, x, mask)
    assert off(secant.pull(g), expected) <= 1e-9


@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_both_inputs_count_alike(name):
    module = mixer_of(name)
    mask = padding("left")
    x_a, x_b = inputs()
    g = torch.randn(3, 2, LENGTH, 16, dtype=torch.float64)
    there, back = secant_of(module, module, x_a, x_b, mask), secant_of(module, module, x_b, x_a, mask)
    assert off(back.pull(g), there.pull(g)) <= 1e-12


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_other_weights_are_constants_by_name(name, side):
    module = mixer_of(name)
    other = varied(module)
    mask = padding(side)
    x_a, x_b = inputs()
    expected = live(module, x_a, mask) - live(other, x_b, mask)
    with Wide():
        secant = secant_of(module, other, x_a, x_b, mask)
    assert off((secant(x_a - x_b))[mask], expected[mask]) <= 1e-9
    g = torch.randn_like(expected)
    terms = offset_terms(secant, g)
    assert off(sum(term.sum(-1) for _, term in terms), (g * secant.bias).sum((-2, -1))) <= 1e-9
    if name in CONSTANTS:
        assert {name.removeprefix("L0.mixer.") for name, _ in terms} == CONSTANTS[name]


@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_it_is_a_map(name):
    module = mixer_of(name)
    mask = padding("left")
    x_a, x_b = inputs()
    check_map(secant_of(module, varied(module), x_a, x_b, mask), x_a)


@pytest.mark.parametrize("size", [1e-14, 1e-10, 1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("name", ONE_OF_EACH)
@torch.no_grad()
def test_differences_of_any_size(name, size):
    """Of close inputs it is the derivative, to the rounding of the difference itself."""
    module = mixer_of(name)
    mask = padding("none")
    x_a, x_b = inputs(size)
    with Wide():
        secant = secant_of(module, module, x_a, x_b, mask)
    y_a, y_b = live(module, x_a, mask), live(module, x_b, mask)
    error = (secant(x_a - x_b) - (y_a - y_b)).norm()
    assert error <= 1e-9 * (y_a - y_b).norm() + 1e-13 * (y_a.norm() + y_b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
@torch.no_grad()
def test_dtypes_are_kept(name, dtype):
    module = mixer_of(name)
    mask = padding("left")
    x_a, x_b = inputs()
    expected = live(module, x_a, mask) - live(module, x_b, mask)
    narrow = copy.deepcopy(module).to(dtype)
    secant = secant_of(narrow, narrow, x_a.to(dtype), x_b.to(dtype), mask)
    y = secant((x_a - x_b).to(dtype))
    assert y.dtype == secant.pull(y).dtype == dtype
    assert off(y.double()[mask], expected[mask]) <= {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]


@torch.no_grad()
def test_kinds_that_differ_are_refused():
    x_a, x_b = inputs()
    with pytest.raises(UnsupportedModelError, match="L0 is of two kinds"):
        secant_of(mixer_of("Mamba"), mixer_of("Mamba2"), x_a, x_b, padding("none"))


def test_what_is_no_norm_is_refused_before_work():
    module = copy.deepcopy(mixer_of("Jamba"))
    module.b_layernorm = torch.nn.Softmax(-1)
    with pytest.raises(UnsupportedModelError, match="JambaMambaMixer: Softmax is not read as a LayerNorm"):
        read_mixer(module).require_response()
    read_mixer(mixer_of("Jamba")).require_response()


# ------------------------------------------------------------------ the scan


def scan_run(pos=7, channels=5, states=3, rates=None):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    rates = -normal(channels, states).exp() if rates is None else rates
    steps = torch.rand(2, pos, channels, dtype=torch.float64)
    return ScanRun(normal(2, pos, channels), steps, rates, normal(2, pos, states), normal(2, pos, states))


def literal_states(run):
    """One position after the other."""
    h = torch.zeros_like(run.delta[:, 0, :, None] * run.A)
    states = []
    for t in range(run.x.shape[1]):
        u = run.delta[:, t] * run.x[:, t]
        h = torch.exp(run.delta[:, t, :, None] * run.A) * h + u[..., None] * run.B[:, t, None]
        states.append(h)
    return torch.stack(states, 1)


def literal_secant(a, b, change):
    """The recursion as it is printed, with the slope of exp in place of the logarithmic mean."""
    channels, states = a.A.shape
    x, delta, B, C = change.split([channels, channels, states, states], -1)
    h_a, h_b = literal_states(a), literal_states(b)
    h = torch.zeros_like(h_a[:, 0])
    outputs = []
    for t in range(a.x.shape[1]):
        logs = [run.delta[:, t, :, None] * run.A for run in (a, b)]
        slopes = (logs[0].exp() - logs[1].exp()) / (logs[0] - logs[1])
        u_a, u_b = (run.delta[:, t] * run.x[:, t] for run in (a, b))
        by_u = (a.delta + b.delta)[:, t] / 2 * x[:, t] + (a.x + b.x)[:, t] / 2 * delta[:, t]
        h = (logs[0].exp() + logs[1].exp()) / 2 * h
        if t:
            h = h + (h_a + h_b)[:, t - 1] / 2 * slopes * a.A * delta[:, t, :, None]
        h = h + (a.B + b.B)[:, t, None] / 2 * by_u[..., None] + (u_a + u_b)[..., None] / 2 * B[:, t, None]
        outputs.append((h * (a.C + b.C)[:, t, None] / 2 + (h_a + h_b)[:, t] / 2 * C[:, t, None]).sum(-1))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("pos", [1, 2, 7, 16])
def test_a_scan_responds_by_the_recursion_of_its_means(pos):
    a = scan_run(pos)
    b = scan_run(pos, rates=a.A)
    change = torch.randn(2, pos, 16, dtype=torch.float64)
    secant = ScanResponse(a, b)
    assert off(secant(change), literal_secant(a, b, change)) <= 1e-12
    outputs = [(literal_states(run) * run.C[:, :, None]).sum(-1) for run in (a, b)]
    parts = torch.cat([getattr(a, name) - getattr(b, name) for name in ("x", "delta", "B", "C")], -1)
    assert off(secant(parts), outputs[0] - outputs[1]) <= 1e-12


def test_rates_that_differ_are_the_rest():
    a, b = scan_run(), scan_run()
    secant = ScanResponse(a, b)
    outputs = [(literal_states(run) * run.C[:, :, None]).sum(-1) for run in (a, b)]
    parts = torch.cat([getattr(a, name) - getattr(b, name) for name in ("x", "delta", "B", "C")], -1)
    assert off(secant(parts) + secant.by_rates(), outputs[0] - outputs[1]) <= 1e-12


def test_channels_take_turns(monkeypatch):
    """However many states fit, the same comes out."""
    secant = ScanResponse(scan_run(), scan_run())
    change, g = torch.randn(4, 2, 7, 16, dtype=torch.float64), torch.randn(4, 2, 7, 5, dtype=torch.float64)
    whole = [secant.push(change), secant.pull(g), secant.by_rates()]
    for fitting in (1, 4 * 2 * 7 * 3 * 8 * 2):
        monkeypatch.setattr(scans, "CHUNK_BYTES", fitting)
        for ours, expected in zip([secant.push(change), secant.pull(g), secant.by_rates()], whole, strict=True):
            assert off(ours, expected) <= 1e-12


def test_a_scan_that_forgets_everything():
    """Decays that underflow, and none at all."""
    rates = torch.tensor([[-1e4, -1e-9, 0.0]] * 5, dtype=torch.float64)
    a, b = scan_run(rates=rates), scan_run(rates=rates)
    outputs = [(literal_states(run) * run.C[:, :, None]).sum(-1) for run in (a, b)]
    parts = torch.cat([getattr(a, name) - getattr(b, name) for name in ("x", "delta", "B", "C")], -1)
    assert off(ScanResponse(a, b)(parts), outputs[0] - outputs[1]) <= 1e-12


# ------------------------------------------------------------------ patterns that decay


def decaying_heads(q, k, log_decays, v, itself=True):
    """One query and key after the other, by what decays between them; `[batch, pos, head, d]`."""
    z = torch.zeros_like(v)
    for i in range(v.shape[1]):
        for j in range(i + itself):
            passed = log_decays[:, j + 1 : i + 1].sum(1)
            z[:, i] += (passed.exp() * (q[:, i] * k[:, j]).sum(-1))[..., None] * v[:, j]
    return z


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("size", [1e-9, 1.0, 30.0])
def test_a_pattern_responds_to_queries_keys_and_decays(itself, size):
    """Two heads of keys for four of queries; at equal values, that is all that changes."""
    q, k, v = (torch.randn(2, 7, heads, 3, dtype=torch.float64) for heads in (4, 2, 4))
    log_decays = -torch.rand(2, 7, 4, dtype=torch.float64)
    runs = [[q, k, log_decays], [part - size * torch.rand_like(part) for part in (q, k, log_decays)]]
    expected = torch.zeros_like(v)
    for sign, (queries, keys, decays) in zip((1, -1), runs, strict=True):
        expected += sign * decaying_heads(queries, keys.repeat_interleave(2, 2), decays, v, itself)
    parts = [Change(*(run[part].flatten(2) for run in runs)) for part in range(3)]
    pattern = DecayedProducts.of(*parts, 2, itself=itself)
    responses = pattern.responses(v.transpose(1, 2))
    changed = [response(part.a - part.b) for response, part in zip(responses, parts, strict=True)]
    assert off(sum(changed), expected.flatten(2)) <= (1e-6 if size < 1e-6 else 1e-12)
    for of_run, (queries, keys, decays) in zip((pattern.a, pattern.b), runs, strict=True):
        z = (of_run @ v.transpose(1, 2)).transpose(1, 2)
        assert off(z, decaying_heads(queries, keys.repeat_interleave(2, 2), decays, v, itself)) <= 1e-12


def test_decays_that_underflow():
    """No number is lost, and none is invented, where either run forgets everything."""
    log_decays = [torch.full((1, 5, 1), value, dtype=torch.float64) for value in (-1e4, -0.1)]
    one = torch.ones(1, 5, 1, dtype=torch.float64)
    same = Change(one, one)
    pattern = DecayedProducts.of(same, same, Change(*log_decays), 1)
    *_, by_decays = pattern.responses(one[:, None])
    expected = [decaying_heads(one[..., None], one[..., None], decays, one[..., None])[..., 0] for decays in log_decays]
    assert off(by_decays(log_decays[0] - log_decays[1]), expected[0] - expected[1]) <= 1e-12
