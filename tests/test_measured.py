"""method="measured": what is measured is patching's, what is not is the middle estimate, and the stated error is true.

The independent computation is a live run of every node and edge (`method="patching"`), which test_patching.py compares
with hooks. Draws, intervals and bounds are tried on numbers of which all misses are known.
"""

import re

import pytest
import torch
from conftest import close, tolerance
from scipy import stats
from test_patching import ASKED, BOTH, HERE, LIVE, LIVE_BOTH, NAMES, two

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.circuits import compare
from tensorlens_tl.circuits.measured import measure
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.results.measured import student

BY = {"hooked/gqa": "neuron", "bridge/llama": "stream", "bridge/neox": "component"}


END = " is raised. If the file is not found, a File"
PROMPTS = [
    "If the file is not found, a FileNotFoundError" + END,
    "If the module is not found, a ModuleNotFoundError" + END,
]


@pytest.fixture(autouse=True)
def a_gradient_near_the_clean_prompt(monkeypatch):
    """One of the estimates is the integrated gradient of one step, near the clean prompt."""
    monkeypatch.setitem(compare.POINTS, "near", compare.NEAR[1])


ESTIMATES = (
    {"method": "difference"},
    {"method": "gradient"},
    {"method": "integrated-gradients", "steps": 1, "points": "near"},
)
METHODS = ({"method": "measured"}, {"method": "patching"})


def estimated(scores_of, *passes, part="scores", **options):
    """The three estimates of each score."""
    return torch.stack([getattr(scores_of(*passes, **options, **method), part) for method in ESTIMATES])


def middle(estimates):
    return estimates.sort(0).values[1]


def largest_of(estimates):
    """How large each score may be."""
    return estimates.abs().amax(0) + estimates.amax(0) - estimates.amin(0)


def correlation(first, second):
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


# ------------------------------------------------------------------ nodes and edges of models


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [*NAMES, *BOTH])
def test_nodes_are_patchings_where_they_are_measured_and_the_middle_estimate_elsewhere(name, model_named):
    clean, corrupted = two(model_named(name))
    options = ASKED | {"by": BY.get(name, "head")}
    scores = circuits.patch_scores(clean, corrupted, **options, method="measured", live=2, seed=3)
    patched = circuits.patch_scores(clean, corrupted, **options, method="patching")
    estimates = estimated(circuits.patch_scores, clean, corrupted, **options)
    measured = scores.measured
    assert scores.names == patched.names
    assert close(scores.scores[measured], patched.scores[measured], tolerance(name))
    if not bool(measured.all()):
        assert close(scores.scores[~measured], middle(estimates)[~measured], tolerance(name))
    largest = largest_of(estimates)[..., 1:].topk(2).indices + 1
    assert bool(measured.gather(2, largest).all())
    assert bool(measured[..., 0].all())  # the whole input
    assert bool((measured.sum(-1) <= 2 * (1 + 2)).all()) or bool(measured.all())


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*LIVE, *LIVE_BOTH])
def test_so_are_nodes_at_positions(name, model_named):
    clean, corrupted = two(model_named(name))
    options = ASKED | {"positions": True}
    scores, patched = (circuits.patch_scores(clean, corrupted, **options, **method) for method in METHODS)
    estimates = estimated(circuits.patch_scores, clean, corrupted, **options, part="keys")
    measured = scores.measured_keys
    assert 10 <= int(measured[0].sum()) <= 15
    assert close(scores.keys[measured], patched.keys[measured], tolerance(name))
    assert close(scores.keys[~measured], middle(estimates)[~measured], tolerance(name))
    assert scores.rest(keys=True)["measured"].tolist() == measured.flatten(1).sum(1).tolist()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*LIVE, *LIVE_BOTH])
def test_so_are_edges(name, model_named):
    clean, corrupted = two(model_named(name))
    scores, patched = (circuits.edge_scores(clean, corrupted, **ASKED, **method) for method in METHODS)
    estimates = estimated(circuits.edge_scores, clean, corrupted, **ASKED)
    measured = scores.measured
    assert not bool(measured[:, ~scores.exists].any())
    assert 10 <= int(measured[0].sum()) <= 15
    assert close(scores.scores[measured], patched.scores[measured], tolerance(name))
    assert close(scores.scores[~measured], middle(estimates)[~measured], tolerance(name))
    everything = circuits.edge_scores(clean, corrupted, **ASKED, method="measured", live=1.0)
    assert close(everything.scores, patched.scores, tolerance(name))
    assert not everything.rest()[["off", "high", "largest"]].any(axis=None)


@pytest.mark.parametrize("patched", ["corrupted", "both"])
def test_so_are_they_where_the_corrupted_run_is_patched(patched, model_named):
    clean, corrupted = two(model_named(LIVE[0]))
    for scores_of in (circuits.patch_scores, circuits.edge_scores):
        options = ASKED | {"patched": patched}
        scores = scores_of(clean, corrupted, **options, method="measured", live=2)
        live = scores_of(clean, corrupted, **options, method="patching")
        estimates = estimated(scores_of, clean, corrupted, **options)
        assert 0 < int(scores.measured.sum()) < scores.measured.numel()
        assert close(scores.scores[scores.measured], live.scores[scores.measured], tolerance(LIVE[0]))
        assert close(scores.scores[~scores.measured], middle(estimates)[~scores.measured], tolerance(LIVE[0]))


@pytest.fixture(scope="module")
def words():
    """Two prompts of the bundled model; the second part of each is the same."""
    model = tlens.load_demo_model()
    return tuple(tlens.freeze(model, prompt) for prompt in PROMPTS)


@pytest.fixture(scope="module")
def patched(words):
    return circuits.patch_scores(*words, "N", "Error", method="patching")


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_a_trained_model_agree_and_state_their_error(words, patched, seed):
    scores = circuits.patch_scores(*words, "N", "Error", method="measured", seed=seed)
    found = circuits.patch_scores(*words, "N", "Error", method="difference")
    assert correlation(scores.scores, patched.scores) > 0.999
    assert correlation(scores.scores, patched.scores) >= correlation(found.scores, patched.scores)
    rest = scores.rest().iloc[0]
    estimates = estimated(circuits.patch_scores, *words, target="N", minus="Error")[:, 0, 0]
    size = largest_of(estimates)
    size[0] = torch.inf  # the whole input is measured
    others = size.argsort(descending=True)[1 + 10 :]
    truth = (middle(estimates) - patched.scores[0, 0])[others].abs().sum() / scores.scores.abs().sum()
    assert rest["low"] <= float(truth) <= rest["high"]
    assert float((scores.scores - patched.scores).abs().max()) <= rest["largest"]


def test_other_orders_of_names_carry_all_that_parts_have(words):
    """Which of them are measured, and the nodes of paths."""
    scores = circuits.patch_scores(*words, "N", "Error", method="measured", live=2, positions=True)
    paths = circuits.paths(words[0], "N", "Error")
    for terms in (scores, paths):
        order = [*range(1, len(terms)), 0]
        other = terms.with_names([terms.names[number] for number in order])
        assert torch.equal(other.scores, terms.scores[..., order])
    again = scores.with_names(scores.names[::-1])
    assert torch.equal(again.measured, scores.measured.flip(2))
    assert torch.equal(again.measured_keys, scores.measured_keys.flip(2))
    more = paths.with_names(["nothing", *paths.names[::-1]])
    labels = [" → ".join(nodes) or "direct" for nodes in more.nodes]
    assert [label for label in labels if label != "direct"] == [name for name in more.names if name[0] in "LM"]


def test_as_many_are_measured_as_the_error_takes(words, patched):
    counts = []
    for error in ("error<50%", "error < 0.02", "error<0.0001%"):
        scores = circuits.patch_scores(*words, "N", "Error", method="measured", live=error)
        counts.append(int(scores.measured.sum()))
        asked = float(re.search(r"[\d.]+", error)[0]) / (100 if "%" in error else 1)
        assert float(scores.rest()["high"].iloc[0]) <= asked
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == len(scores)
    assert torch.equal(scores.scores, patched.scores)
    share = circuits.patch_scores(*words, "N", "Error", method="measured", live=0.1)
    assert 4 <= int(share.measured.sum()) <= 2 * (1 + 2)


def test_prompts_of_a_batch_have_nodes_of_their_own(words):
    """Each is measured where its own scores are large, in the runs that one prompt takes."""
    both = [tlens.freeze(words[0].model, prompts) for prompts in (PROMPTS, PROMPTS[::-1])]
    scores = circuits.patch_scores(*both, "N", "Error", method="measured", live=2)
    alone = circuits.patch_scores(*words, "N", "Error", method="measured", live=2)
    assert not torch.equal(scores.measured[0], scores.measured[1])
    every = circuits.patch_scores(*both, "N", "Error", method="patching")
    assert torch.allclose(scores.scores[scores.measured], every.scores[scores.measured], atol=1e-4)
    assert scores.names == alone.names


# ------------------------------------------------------------------ draws, intervals and bounds


def drawn(seed, parts=200, live=10):
    """Scores of a truth that is known, of which three estimates are off by long tails; it, and they."""
    generator = torch.Generator().manual_seed(seed)
    gradients, size, above, below, sign = torch.randn(5, 1, parts, generator=generator, dtype=torch.float64)
    misses = 0.05 * torch.exp(1.2 * size) * sign.sign()
    estimates = torch.stack([gradients, gradients + misses * above.exp(), gradients - misses * below.exp()])
    truth = gradients + misses

    def patched(masks):
        return (masks * truth).sum(-1)

    return measure(estimates, patched, live, None, seed), truth, estimates


def test_draws_are_unbiased_and_intervals_and_bounds_hold():
    """Over many seeds: the mean of the draws is the sum of misses, and 90 % of statements are true."""
    ratios, covered, bounded = [], [], []
    for seed in range(600):
        result, truth, estimates = drawn(seed)
        largest = largest_of(estimates).topk(10).indices
        expected = (truth - middle(estimates)).abs().scatter(1, largest, 0).sum()
        ratios.append(float(result.draws.mean() / expected))
        size = float(result.scores.abs().sum())
        low, high, bound = as_terms(result).rest()[["low", "high", "largest"]].iloc[0]
        covered.append(low <= float(expected) / size <= high)
        bounded.append(float((truth - result.scores).abs().max()) <= bound)
        assert torch.equal(result.scores[result.measured], truth[result.measured])
        assert torch.equal(result.scores[~result.measured], middle(estimates)[~result.measured])
    ratios = torch.tensor(ratios, dtype=torch.float64)
    assert abs(float(ratios.mean()) - 1) < 4 * float(ratios.std()) / len(ratios) ** 0.5 < 0.2
    assert sum(covered) >= 0.9 * len(covered)
    assert sum(bounded) >= 0.9 * len(bounded)


def as_terms(result):
    """A measurement as the result that states its error."""
    count = result.scores.shape[1]
    return circuits.MeasuredTerms(
        names=[f"L0H{number}" for number in range(count)],
        scores=result.scores[:, None],
        total=result.scores.sum(1, keepdim=True),
        queries=torch.zeros(1, 1, dtype=torch.long),
        mask=torch.ones(1, 1, dtype=torch.bool),
        tokens=[["a"]],
        target="logit of 'a'",
        measured=result.measured[:, None],
        draws=result.draws,
        groups=result.groups,
    )


def test_a_group_shows_a_large_part_that_both_estimates_miss():
    zeros = torch.zeros(3, 1, 100, dtype=torch.float64)
    truth = torch.randn(1, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.01
    truth[0, 57] = 3.0
    result = measure(zeros, lambda masks: (masks * truth).sum(-1), 5, None, 0)
    assert not bool(result.measured[0, 57])
    assert float(as_terms(result).rest()["largest"].iloc[0]) >= 3.0


def test_parts_without_any_effect_are_off_by_nothing():
    zeros = torch.zeros(3, 2, 30)
    result = measure(zeros, lambda masks: torch.zeros(masks.shape[:2]), 3, 0.5, 0)
    assert not result.scores.any()
    assert not result.draws.any()
    assert torch.isfinite(result.groups).all()


@pytest.mark.parametrize("freedom", [1, 2, 4, 19])
@pytest.mark.parametrize("level", [0.6, 0.9, 0.995])
def test_quantiles_are_students(level, freedom):
    assert student(level, freedom) == pytest.approx(stats.t.ppf(level, freedom), rel=1e-3)


# ------------------------------------------------------------------ what is kept and said


def test_the_mark_and_the_error_are_kept_and_shown(words, tmp_path, capsys):
    scores = circuits.patch_scores(*words, "N", "Error", method="measured", positions=True)
    edges = circuits.edge_scores(*words, "N", "Error", method="measured")
    for result in (scores, edges):
        again = tlens.load(result.save(tmp_path / "result"))
        assert torch.equal(again.measured, result.measured)
        assert again.rest().equals(result.rest())
        assert repr(again) == repr(result)
        assert "measured, the rest off by" in repr(result)
        assert "measured, the rest off by" in result.to_html()
        table = result.to_dataframe()
        assert 0 < int(table["measured"].sum()) < len(table)
    assert again.circuit(20).to_dataframe().shape[0]
    assert int(scores.to_dataframe(keys=False)["measured"].sum()) == int(scores.measured.sum())
    assert type(scores.mean()) is circuits.Terms
    assert type(scores - scores) is circuits.Terms
    narrow, wide = (scores.rest(level).iloc[0] for level in (0.5, 0.99))
    assert wide["low"] < narrow["low"] < narrow["high"] < wide["high"]
    assert narrow["largest"] < wide["largest"]


WRONG = {
    "live=0: pass at least 1": {"live": 0},
    "live=True: pass an integer": {"live": True},
    "live=21: pass 1 to 20, this model has 20 nodes besides the input": {"live": 21},
    "live=0.0: pass how many": {"live": 0.0},
    "live=1.5: pass how many": {"live": 1.5},
    "live=nan: pass how many": {"live": float("nan")},
    "live='5%': pass how many": {"live": "5%"},
    "live='error<0': pass how many": {"live": "error<0"},
    "live='error<100%': pass how many": {"live": "error<100%"},
    "live=3, method='gradient': only method='measured'": {"live": 3, "method": "gradient"},
    "live=3, method=None: only method='measured'": {"live": 3, "method": None},
    "seed=-1: pass at least 0": {"seed": -1},
    "rule='gim', method='measured': a rule says": {"rule": "gim"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_measured_is_refused(message, words):
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        circuits.patch_scores(*words, "N", "Error", **{"method": "measured"} | WRONG[message])
    if "nodes" not in message:
        with pytest.raises(InvalidInputError, match=re.escape(message)):
            circuits.edge_scores(*words, "N", "Error", **{"method": "measured"} | WRONG[message])


def test_edges_are_refused_as_patchings_are(words, model_named):
    with pytest.raises(InvalidInputError, match="patching measures whole edges"):
        circuits.edge_scores(*words, "N", method="measured", positions=True)
    with pytest.raises(InvalidInputError, match="live=480: pass 1 to 479, this model has 479 edges"):
        circuits.edge_scores(*words, "N", method="measured", live=480)
    name = next(name for name in ("hooked/sandwich", "encoder/bert", "bridge/bert") if name in HERE)
    with pytest.raises(UnsupportedModelError, match="live edges of this"):
        circuits.edge_scores(*two(model_named(name)), **ASKED, method="measured")
    for name in HERE & {"bridge/qwen3-next", "hooked/shortformer"}:  # one has gates, which are destinations as well
        with pytest.raises(UnsupportedModelError, match="live edges of this"):
            circuits.edge_scores(*two(model_named(name)), **ASKED, method="measured")
    with pytest.raises(InvalidInputError, match="no positions here"):
        circuits.patch_scores(*words, "N", method="measured").rest(keys=True)
    with pytest.raises(InvalidInputError, match="level=2: pass a confidence between 0 and 1"):
        circuits.patch_scores(*words, "N", method="measured").rest(2)


def test_one_prompt_twice_has_no_scores_and_no_error(words):
    scores = circuits.patch_scores(words[0], words[0], "N", "Error", method="measured")
    assert not scores.scores.any()
    assert not scores.rest()[["off", "high", "largest"]].any(axis=None)


def test_agreement_is_evaluated():
    pairs = evaluate.prompt_pairs(evaluate.recall(4))
    found = evaluate.patching_agreement(tlens.load_demo_model("recall"), pairs, ["gradient", "measured"])
    assert float(found.values[0, 1].min()) > 0.98
