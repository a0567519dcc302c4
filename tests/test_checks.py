"""Checks of methods: completeness, scrambled weights, noise, and how far methods agree."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import close, hooks_left, some_tokens
from hypothesis import given, settings, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate


def test_completeness_is_measured(model_named):
    result = evaluate.completeness(model_named("bridge/gpt2"), some_tokens(2, 6))
    exact = [m for m in result.methods if m.startswith(("tensorlens", "decompx"))]
    assert exact == [
        "tensorlens in_out",
        "tensorlens in_out, biases",
        "tensorlens target",
        "tensorlens target, biases",
        "decompx target",
    ]
    assert max(result.mean("gap", method) for method in exact) < 1e-9
    assert result.mean("gap", "integrated-gradients") > 1e-6  # quadrature
    assert result.mean("unexplained", "tensorlens in_out, biases") == 0
    assert result.mean("unexplained", "tensorlens in_out") > 0.01
    claimed = evaluate.completeness(model_named("bridge/gpt2"), some_tokens(2, 6), ["rollout"])
    assert np.isnan(claimed.mean("gap", "rollout"))


def test_completeness_keeps_a_target_of_ones_own():
    model = tlens.testing.tiny_model("bridge/gpt2")
    own = {"x": ("tensorlens", {"collapse": "target", "target": 5})}
    result = evaluate.completeness(model, some_tokens(), own)
    assert result.mean("gap", "x") < 1e-9
    made = tlens.attribute(model, some_tokens(), collapse="target", target=5)
    bias = made.bias.abs() / (made.scores.abs().sum(-1) + made.bias.abs())
    assert close(result.values[1, 0], bias[:, 0])


@pytest.mark.whole
def test_scrambled_weights_and_noise(demo_model):
    """What does not look at the model never changes; the norm of T does, and is steady under a little noise."""
    prompts = demo.held_out_prompts(demo_model, 3, 20)
    methods = {"places": lambda frozen: frozen.mask.cumsum(1), "norm": "tensorlens norm"}
    before = [p.clone() for p in demo_model.parameters()]
    scrambled = evaluate.randomisation(demo_model, prompts, methods)
    assert scrambled.curves.shape == (1, 2, 3, 5)
    assert bool((scrambled.curves[..., 0] == 1).all())
    assert scrambled.mean("similarity", "places") == 1 > scrambled.mean("similarity", "norm") + 0.05
    steady = evaluate.stability(demo_model, prompts, methods, draws=1)
    assert steady.mean("similarity", "places") == 1 > steady.mean("similarity", "norm") > 0.9
    assert steady.mean("similarity", "norm") > evaluate.stability(
        demo_model, prompts, methods, noise=1.0, draws=1
    ).mean("similarity", "norm")
    assert all(torch.equal(a, b) for a, b in zip(before, demo_model.parameters(), strict=True))
    assert hooks_left(demo_model) == 0
    with pytest.raises(tlens.InvalidInputError, match="noise=0"):
        evaluate.stability(demo_model, prompts, methods, noise=0)


def test_agreement_is_a_rank_correlation(model_named):
    result = evaluate.agreement(model_named("bridge/bert"), some_tokens(2, 6), ["rollout", "alti", "random"])
    assert result.methods == ["rollout", "alti", "random"]
    assert len(result.units) == 2
    table = evaluate.agreement_table(result)
    assert np.allclose(table, table.T)
    assert np.allclose(np.diag(table), 1)
    assert abs(table.loc["rollout", "alti"]) < 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9))
def test_spearman_is_pandas(pairs):
    a, b = torch.tensor(pairs, dtype=torch.float64).T
    mask = torch.ones(1, len(a) + 2, dtype=torch.bool)
    mask[:, -2:] = False
    pad = lambda t: torch.cat([t, torch.tensor([9.0, -9.0])])[None]  # noqa: E731
    mine = float(evaluate.spearman(pad(a), pad(b), mask))
    theirs = pd.Series(a).corr(pd.Series(b), method="spearman") if len(set(a)) and len(set(b)) else float("nan")
    assert mine == pytest.approx(theirs, abs=1e-9, nan_ok=True)


def test_scores_that_are_not_numbers_have_no_rank():
    """A NaN is neither below nor equal to any score, which made its rank the lowest."""
    a, b = torch.tensor([[[1.0, 2.0, torch.nan]], [[1.0, 2.0, 4.0]]]), torch.tensor([[1.0, 2.0, 3.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert evaluate.spearman(a, b.expand_as(a), mask).isnan().tolist() == [[True], [False]]
    mask[:, -1] = False
    assert evaluate.spearman(a, b.expand_as(a), mask).tolist() == [[pytest.approx(1)]] * 2


def test_methods_that_run_copies_of_the_prompts_are_stable_too(model_named):
    """The noise is added to every copy, and to a prompt with another token: a replaced stream would fit none."""
    methods = ["value-zeroing", "leave-one-out", "chefer"]
    result = evaluate.stability(model_named("bridge/gpt2"), some_tokens(), methods, noise=1e-6, draws=1)
    assert not result.skipped
    assert bool((result.values > 0.99).all())
