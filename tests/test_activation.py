"""The rules: exact at the input, right at and near zero, and the quadrature held against its closed forms."""

import pytest
import torch
from hypothesis import given, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl.models.activations import coefficients, derivative, is_elementwise, path_mean, ratio

pytestmark = pytest.mark.numeric

ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "softplus": torch.nn.functional.softplus,  # φ(0) is not 0
}
EDGES = torch.tensor(
    [0.0, -0.0, 1e-320, -1e-300, 1e-160, 1e-12, -1e-9, 1e-8, 1e-4, -1.0, 3.0, -30.0, 1e3, -1e4], dtype=torch.float64
)


@pytest.fixture(params=ACTIVATIONS)
def phi(request):
    return ACTIVATIONS[request.param]


def linear_form(held, z, u=None):
    total = held.through * (z if u is None else u)
    total = total if held.gate is None else total + held.gate * z
    return total if held.rest is None else total + held.rest


@pytest.mark.parametrize("rule", tlens.FROZEN_RULES)
@pytest.mark.parametrize("gated", [False, True])
def test_exact_at_the_input(phi, rule, gated):
    z = torch.cat([EDGES, torch.randn(50, dtype=torch.float64) * 3])[None, None]
    u = torch.randn_like(z) if gated else None
    held = coefficients(phi, z, u, rule)
    own = phi(z) * (1 if u is None else u)
    assert torch.allclose(linear_form(held, z, u), own, rtol=1e-12, atol=1e-14)
    assert all(torch.isfinite(t).all() for t in (held.through, held.gate, held.rest) if t is not None)


@pytest.mark.parametrize(("name", "at_zero"), [("gelu", 0.5), ("gelu_new", 0.5), ("silu", 0.5), ("relu", 0.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ratio_at_zero_is_the_derivative(name, at_zero, dtype):
    z = torch.tensor([0.0, -0.0], dtype=dtype)
    assert ratio(ACTIVATIONS[name], z).tolist() == [at_zero, at_zero]


def test_ratio_is_smooth_through_zero():
    z = torch.logspace(-300, -1, 400, dtype=torch.float64)
    for name in ("gelu", "silu"):
        made = ratio(ACTIVATIONS[name], torch.cat([-z, z]))
        exact = torch.cat([-z, z])
        exact = torch.sigmoid(exact) if name == "silu" else torch.special.ndtr(exact)
        assert torch.allclose(made, exact, rtol=1e-12)


@given(
    st.floats(-30, 30).filter(lambda z: z == 0 or abs(z) > 1e-100),
    st.sampled_from(["gelu", "silu", "relu", "softplus"]),
)
def test_integrated_gradients_of_a_plain_mlp_are_the_ratio(z, name):
    """∫₀¹ φ'(αz) dα by quadrature, the independent witness, is (φ(z) − φ(0))/z."""
    phi, z = ACTIVATIONS[name], torch.tensor([z], dtype=torch.float64)
    steps = torch.linspace(0, 1, 20001, dtype=torch.float64)
    middle = (steps[1:] + steps[:-1]) / 2
    quadrature = derivative(phi, middle * z).mean()
    assert torch.allclose(ratio(phi, z), quadrature, atol=2e-4 if name == "relu" else 1e-6)
    plain = coefficients(phi, z[None, None])
    for rule in ("frozen-integrated-gradients", "frozen-split"):
        assert torch.equal(coefficients(phi, z[None, None], None, rule).through, plain.through)


def test_path_mean_against_closed_form():
    """∫₀¹ relu(αg) dα = relu(g)/2, and for GELU by a fine midpoint rule."""
    g = torch.linspace(-8, 8, 41, dtype=torch.float64)
    assert torch.allclose(path_mean(torch.relu, g), torch.relu(g) / 2, rtol=1e-12)
    steps = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for name in ("gelu", "silu"):
        fine = torch.stack([ACTIVATIONS[name](steps * x).mean() for x in g])
        assert torch.allclose(path_mean(ACTIVATIONS[name], g), fine, atol=1e-9)


def test_rules_differ_for_gated_mlps_only(model_named):
    gated, plain = (tlens.freeze(model_named(n), torch.arange(3, 8)[None]) for n in ("bridge/llama", "bridge/gpt2"))
    for frozen, same in ((gated, False), (plain, True)):
        ratio_scores = frozen.operator(rule="frozen").in_out().scores
        for rule in ("frozen-integrated-gradients", "frozen-split"):
            assert torch.allclose(frozen.operator(rule=rule).in_out().scores, ratio_scores) is same


def test_softmax_activations_are_told_apart():
    assert is_elementwise(torch.relu, torch.float32, "cpu")
    assert not is_elementwise(lambda x: x * torch.softmax(x, -1), torch.float32, "cpu")
