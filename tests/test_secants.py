"""Exact secants of the parts of a transformer: what they give for a difference, and their limits."""

from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

from tensorlens_tl.algebra import Chain, Identity, Linear, Norm
from tensorlens_tl.algebra.secants import (
    KeyResponse,
    QueryResponse,
    RankOne,
    ScoreSecant,
    linear_secant,
    logarithmic_mean,
    norm_secant,
    offset_terms,
    slope,
)
from tensorlens_tl.models.activations import derivative

pytestmark = pytest.mark.numeric

ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "squared relu": lambda z: torch.relu(z).square(),
}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def distances(dtype=torch.float64):
    """Differences of every size, from nothing to large."""
    return torch.cat([torch.zeros(1), torch.logspace(-17, 2, 60)]).to(dtype)


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("phi", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("at", [-3.0, -1e-3, 0.0, 0.4, 5.0])
def test_a_slope_times_the_difference_is_the_difference(phi, at, dtype):
    a = torch.tensor(at, dtype=dtype) + distances(dtype)
    b = torch.full_like(a, at)
    slopes = slope(partial(derivative, phi), (a, b), (phi(a), phi(b)))
    sizes = phi(a).abs() + phi(b).abs() + a.abs()
    assert ((slopes * (a - b) - (phi(a) - phi(b))).abs() <= 20 * torch.finfo(dtype).eps * sizes).all()


@pytest.mark.parametrize("phi", [ACTIVATIONS["gelu"], ACTIVATIONS["tanh"]])
def test_a_slope_of_close_values_is_the_derivative(phi):
    b = torch.linspace(-4, 4, 41, dtype=torch.float64)
    for distance in distances()[distances() < 1e-6]:
        a = b + distance
        error = slope(partial(derivative, phi), (a, b), (phi(a), phi(b))) - derivative(phi, b)
        assert error.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_logarithmic_mean_times_the_difference_of_logarithms_is_the_difference(dtype):
    log_a = torch.tensor(-2.0, dtype=dtype)
    log_b = log_a - distances(dtype)
    mean = logarithmic_mean(log_a.expand_as(log_b), log_b)
    expected = -torch.expm1((log_b - log_a).double()) * log_a.double().exp()
    assert torch.allclose((mean.double() * (log_a - log_b).double()), expected, rtol=8 * torch.finfo(dtype).eps)


def test_the_logarithmic_mean_of_what_underflows_is_between_both():
    log_a = torch.tensor([-1.0, -2000.0, -torch.inf, -torch.inf, 0.0], dtype=torch.float64)
    log_b = torch.tensor([-2000.0, -1.0, -1.0, -torch.inf, 0.0], dtype=torch.float64)
    expected = torch.tensor([torch.e**-1 / 1999, torch.e**-1 / 1999, 0, 0, 1], dtype=torch.float64)
    assert torch.allclose(logarithmic_mean(log_a, log_b), expected, rtol=1e-14)


# ------------------------------------------------------------------ parts


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("two_models", [False, True])
def test_a_norm(centre, two_models):
    x_a, x_b = normal(2, 2, 3, 8)

    def norm(x, gain, shift):
        c = x - x.mean(-1, keepdim=True) if centre else x
        return Norm((c.square().mean(-1, keepdim=True) + 1e-5).sqrt(), gain, shift, centre)

    weights = [(normal(8), normal(8)), (normal(8), normal(8))] if two_models else [(normal(8), normal(8))] * 2
    a, b = (norm(x, *gains) for x, gains in zip((x_a, x_b), weights, strict=True))
    secant = norm_secant(a, b, x_a, x_b, "ln1")
    assert torch.allclose(secant(x_a - x_b), a(x_a) - b(x_b), rtol=1e-12, atol=1e-13)
    names = [name for name, _ in offset_terms(secant, normal(2, 3, 8))]
    assert sorted(names) == (["ln1.b", "ln1.w"] if two_models else [])


def test_a_norm_of_one_input_is_its_derivative():
    x, g = normal(2, 2, 3, 8)
    gain = normal(8)

    def live(x):
        return torch.nn.functional.layer_norm(x, (8,), gain, eps=1e-5)

    held = Norm((x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(), gain)
    _, expected = torch.autograd.functional.vjp(live, x, g)
    assert torch.allclose(norm_secant(held, held, x, x, "ln1").pull(g), expected, rtol=1e-10, atol=1e-12)


def test_a_linear_layer_of_two_models():
    a, b = (Linear(normal(8, 5), normal(5)) for _ in "ab")
    x_a, x_b = normal(2, 2, 3, 8)
    given_x, changed, bias = linear_secant(a, b, x_a, x_b, "L0.W_V")
    assert (changed.name, bias.name) == ("L0.W_V", "L0.b_V")
    assert torch.allclose(bias(changed(given_x(x_a - x_b))), a(x_a) - b(x_b), rtol=1e-12)
    assert len(linear_secant(a, Linear(a.weight.clone(), a.offset.clone()), x_a, x_b, "L0.W_V")) == 1


def test_offsets_are_met_where_they_are_added():
    a, b = (Linear(normal(8, 8), normal(8)) for _ in "ab")
    x_a, x_b = normal(2, 2, 3, 8)
    layer = Chain(linear_secant(a, b, x_a, x_b, "W_1"))
    m = Chain((Identity() + layer, RankOne(normal(2, 3, 8), normal(2, 3, 8)) + layer))
    g = normal(4, 2, 3, 8)
    total = sum(term.sum(-1) for _, term in offset_terms(m, g))
    assert torch.allclose(total, m.pull_with_bias(g)[1], rtol=1e-10)


# ------------------------------------------------------------------ attention


def heads(q, k, v, mask, sink=-torch.inf):
    """What heads give, and the logarithms of their pattern and of what the sink takes."""
    scores = (0.5 * q @ k.mT).masked_fill(~mask, -torch.inf)
    logs = torch.cat([scores, scores.new_full((*scores.shape[:-1], 1), sink)], -1).log_softmax(-1)
    return logs[..., :-1].exp() @ v, logs[..., :-1], logs[..., -1]


def attention_secant(run_a, run_b, mask, sink=-torch.inf):
    _, patterns, sinks = zip(*(heads(*run, mask, sink) for run in (run_a, run_b)), strict=True)
    q, k, v = ((of_a + of_b) / 2 for of_a, of_b in zip(run_a, run_b, strict=True))
    return ScoreSecant.of(logarithmic_mean(*patterns), logarithmic_mean(*sinks), 0.5, q, k, v, 4)


def flat(x):
    return x.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 40.0], ids=lambda size: f"{size:g}")
@pytest.mark.parametrize("sink", [-torch.inf, 0.3])
def test_attention(size, sink):
    """Also where probabilities of one run underflow and the other's do not."""
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    run_b = normal(3, 2, 4, 5, 3)
    run_a = run_b + size * normal(3, 2, 4, 5, 3)
    secant = attention_secant(run_a, run_b, mask, sink)
    by_query = QueryResponse.of(secant)(flat(run_a[0] - run_b[0]))
    by_key = KeyResponse(secant)(flat(run_a[1] - run_b[1]))
    means = [heads(*run, mask, sink)[1].exp() for run in (run_a, run_b)]
    by_value = flat((means[0] + means[1]) / 2 @ (run_a[2] - run_b[2]))
    expected = flat(heads(*run_a, mask, sink)[0] - heads(*run_b, mask, sink)[0])
    assert torch.allclose(by_query + by_key + by_value, expected, rtol=1e-9, atol=1e-13 * (1 + size))


def test_attention_of_one_input_is_its_derivative():
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    run = normal(3, 2, 4, 5, 3)
    secant = attention_secant(run, run, mask)
    g = normal(2, 4, 5, 3)
    _, (to_queries, to_keys) = torch.autograd.functional.vjp(
        lambda q, k: heads(q, k, run[2], mask)[0], (run[0], run[1]), g
    )
    assert torch.allclose(QueryResponse.of(secant).pull(flat(g)), flat(to_queries), rtol=1e-10, atol=1e-13)
    assert torch.allclose(KeyResponse(secant).pull(flat(g)), flat(to_keys), rtol=1e-10, atol=1e-13)


@given(st.floats(-50, 50), st.floats(-50, 50))
def test_a_constant_of_a_row_changes_nothing(in_a, in_b):
    """Another zero of the scores, of either run, is no other attention: the logarithms of the pattern are the same."""
    logs = normal(2, 2, 4, 3, 3)
    queries, keys, values = normal(3, 2, 4, 3, 2)

    def response(shifts):
        patterns = tuple((log + shift).log_softmax(-1) for log, shift in zip(logs, shifts, strict=True))
        return ScoreSecant.of(logarithmic_mean(*patterns), torch.zeros(2, 4, 3), 0.5, queries, keys, values, 4).weights

    assert torch.allclose(response((in_a, in_b)), response((0.0, 0.0)), rtol=1e-11, atol=1e-14)


def by_logarithmic_means(score_a, score_b, g):
    """The pull of our rule through the softmax of one row, ΔP_k = L_k·(Δs_k − Σ_j w_j·Δs_j)."""
    means = logarithmic_mean(score_a.log_softmax(-1), score_b.log_softmax(-1))
    return means * (g - (means * g).sum(-1, keepdim=True) / means.sum(-1, keepdim=True))


def by_exponentials(score_a, score_b, g):
    """That of the rule by steps, y_k = a_k·v with a = exp(s) and v = 1/Σa, each with its own secant."""
    exponentials = [score.exp() for score in (score_a, score_b)]
    inverses = [1 / exponential.sum(-1, keepdim=True) for exponential in exponentials]
    products = [exponential * inverse for exponential, inverse in zip(exponentials, inverses, strict=True)]
    by_logarithm = (products[0] - products[1]) / (products[0].log() - products[1].log())
    of_inverse = (inverses[0].log() - inverses[1].log()) / (inverses[0] - inverses[1])
    to_sum = -inverses[0] * inverses[1] * (g * by_logarithm * of_inverse).sum(-1, keepdim=True)
    return g * by_logarithm + to_sum * (exponentials[0] - exponentials[1]) / (score_a - score_b)


def test_a_rule_by_exponentials_is_complete_and_depends_on_the_zero_of_scores():
    """Why the softmax has a rule of its own: in the other, a constant added to a run's scores moves what keys get."""
    score_a, score_b, g = normal(3, 8, 6)
    expected = ((score_a.softmax(-1) - score_b.softmax(-1)) * g).sum(-1)
    rules = (by_logarithmic_means, by_exponentials)
    ours, steps = (rule(score_a, score_b, g) for rule in rules)
    for pulled in (ours, steps):
        assert torch.allclose((pulled * (score_a - score_b)).sum(-1), expected, rtol=1e-10, atol=1e-13)
    ours_moved, steps_moved = (rule(score_a + 3, score_b, g) for rule in rules)
    assert torch.allclose(ours_moved, ours, rtol=1e-10, atol=1e-13)
    assert float((steps_moved - steps).abs().max()) > 0.01
