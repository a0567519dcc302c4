"""An evaluation over several seeds: means of the same prompts, or the prompts of all seeds."""

import numpy as np
import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, evaluate, whitening
from tensorlens_tl.testing import tiny_model

nan = float("nan")


def made(seed, prompts=2, **changes):
    """A metric, two methods; every value says which seed it is of."""
    values = torch.arange(2.0 * prompts, dtype=torch.float64).reshape(1, 2, prompts) + 10 * seed
    settings = {"seed": seed, "prompts": prompts + seed, "dropped": seed, "accuracy": prompts / (prompts + seed)}
    facts = {"values": values, "metrics": {"score": True}, "methods": ["a", "b"]} | changes
    return evaluate.Evaluation("test", units=[f"prompt {n}" for n in range(prompts)], settings=settings, **facts)


def test_the_same_prompts_are_averaged():
    """Each prompt's value is its mean over seeds: as many units as before, missing values left out."""
    runs = [made(seed) for seed in (1, 2, 6)]
    runs[1].values[0, 0, 0] = nan
    result = evaluate.over_seeds(dict(zip((1, 2, 6), runs, strict=True)).__getitem__, (1, 2, 6))
    assert result.values.tolist() == [[[35.0, 31.0], [32.0, 33.0]]]
    assert result.units == ["prompt 0", "prompt 1"]
    assert result.settings["seed"] == [1, 2, 6]


def test_drawn_prompts_are_all_kept():
    result = evaluate.over_seeds(lambda seed: made(seed, prompts=1 + seed), (0, 1), units="drawn")
    assert result.values.tolist() == [[[0.0, 10.0, 11.0], [1.0, 12.0, 13.0]]]
    assert result.units == ["seed 0, prompt 0", "seed 1, prompt 0", "seed 1, prompt 1"]
    assert result.settings == {"seed": [0, 1], "prompts": 1 + 3, "dropped": 1, "accuracy": pytest.approx(3 / 4)}


def test_a_random_order_scatters_less_over_seeds():
    """What the mean is for: one seed's random order differs from another's, and the methods do not."""
    model = tlens.load_demo_model("recall")
    tokens = evaluate.recall(4, seed=1).tokens
    methods = ["rollout attention", "random"]

    def run(seed):
        return evaluate.perturbation(model, tokens, methods, metrics=["hs_mse"], replacement="mean", seed=seed)

    runs = [run(seed) for seed in (0, 1)]
    result = evaluate.over_seeds(run, (0, 1))
    assert torch.equal(runs[0].values[0, 0], runs[1].values[0, 0])
    assert not torch.equal(runs[0].values[0, 1], runs[1].values[0, 1])
    torch.testing.assert_close(result.values, (runs[0].values + runs[1].values) / 2)
    torch.testing.assert_close(result.curves, (runs[0].curves + runs[1].curves) / 2)
    assert "over 4" in result.to_html()


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (made, {"seeds": ()}, "pass different seeds"),
        (made, {"seeds": (1, 1)}, "pass different seeds"),
        (made, {"units": "other"}, "'same' or 'drawn'"),
        (lambda seed: made(seed, prompts=1 + seed), {}, "seed 1 gives other metrics"),
        (lambda seed: made(seed, methods=["a", f"b{seed}"]), {"units": "drawn"}, "seed 1 gives other metrics"),
    ],
)
def test_runs_that_do_not_fit_are_refused(run, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        evaluate.over_seeds(run, **options)


@pytest.mark.parametrize("seed", [np.int64(1), torch.tensor(1)])
def test_seeds_are_integers_of_any_kind(seed):
    """A tensor's hash is its place in memory: random scores of ``seed=torch.tensor(1)`` differed from call to call."""
    model = tiny_model("bridge/gpt2")
    frozen = tlens.freeze(model, torch.tensor([[7, 11, 23, 31]]))
    calls = (
        lambda seed: evaluate.induction(2, d_vocab=40, seed=seed).tokens,
        lambda seed: evaluate.agreement(model, frozen.tokens, ["ifr", "random"], seed=seed).values,
        lambda seed: evaluate.stability(model, frozen.tokens, ["ifr"], draws=1, seed=seed).values,
        lambda seed: frozen.operator().norm(probes=3, seed=seed).scores,
        lambda seed: compress.sharing(model, draws=1, seed=seed).chance,
        lambda seed: tlens.demo.program("induction").components(2, seed=seed).pairs.corrupted,
        lambda seed: evaluate.scorers.random_scores(seed)(frozen),
        lambda seed: tlens.attribute(frozen, collapse="norm", probes=3, seed=seed).scores,
    )
    for call in calls:
        assert torch.equal(call(seed).nan_to_num(), call(1).nan_to_num())
        for wrong in ("one", 0.5, None):
            with pytest.raises(tlens.InvalidInputError, match="seed="):
                call(wrong)
    assert circuits.spectral_norm(frozen.operator(), seed=-seed) > 0


@pytest.mark.parametrize("half", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_numbers_are_of_any_kind(half):
    """Shares, levels and tolerances; True is none."""
    model = tiny_model("bridge/gpt2")
    frozen = tlens.freeze(model, torch.tensor([[7, 11, 23, 31]]))
    x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    calls = {
        "noise": lambda share: evaluate.stability(model, frozen.tokens, ["ifr"], draws=1, noise=share).values,
        "level": lambda share: torch.stack(evaluate.bootstrap_interval([1.0, 2.0, 4.0], share)),
        "threshold": lambda share: torch.tensor(len(circuits.contribution_graph(frozen, 5, threshold=share).edges)),
        "tol": lambda share: frozen.operator().norm(tol=share).scores,
        "reach": lambda share: whitening.estimate(x, reach=share).M,
        "tolerance": lambda share: tlens.attribute(model, frozen.tokens, 5, tolerance=share).scores,
    }
    for name, call in calls.items():
        assert torch.equal(call(half), call(0.5))
        with pytest.raises(tlens.InvalidInputError, match=f"{name}=True"):
            call(True)
    probes = np.int64(3)
    assert torch.equal(frozen.operator().norm(probes=probes).scores, frozen.operator().norm(probes=3).scores)


def test_seeds_of_several_runs_are_integers_of_any_kind():
    assert evaluate.over_seeds(made, np.arange(2)).settings["seed"] == [0, 1]
