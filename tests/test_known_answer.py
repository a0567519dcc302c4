"""Tasks whose answer is known: their models solve them, their sources are true, and ranks are what is expected."""

import random

import numpy as np
import pytest
import torch
from evaluation_cases import recall_model

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.evaluate.known import ranking
from tensorlens_tl.results.statistics import bootstrap_interval


@pytest.mark.parametrize("n", [1, 2, 7, 29])
def test_expected_rank_of_a_random_score(n):
    """H_n / n for one source; for several, against all placements."""
    assert evaluate.expected_mrr(n) == pytest.approx(sum(1 / k for k in range(1, n + 1)) / n)
    if n >= 3:
        rng = random.Random(0)
        drawn = [min(rng.sample(range(1, n + 1), 2)) for _ in range(20_000)]
        assert evaluate.expected_mrr(n, 2) == pytest.approx(np.mean([1 / r for r in drawn]), rel=0.03)


def test_random_scores_get_what_is_expected():
    result = evaluate.known_answer(recall_model(), evaluate.recall(300, seed=3), ["random"])
    low, high = bootstrap_interval(result.values[0, 0], 0.99)
    assert float(low) < result.settings["random_mrr"] < float(high)
    assert result.settings["random_mrr"] == evaluate.expected_mrr(29)


@pytest.mark.parametrize(("name", "make"), [("recall", evaluate.recall), ("brackets", evaluate.brackets)])
def test_the_models_know_their_tasks_and_the_sources_are_true(name, make):
    """Nearly every answer is right; another value at the source changes the answer, at another place it does not."""
    model, task = tlens.load_demo_model(name), make(100, seed=77)
    assert sum(path.stat().st_size for path in demo.FOLDERS[name].iterdir()) < 1_000_000
    answer = lambda tokens: model(tokens)[:, -1].argmax(-1)  # noqa: E731
    with torch.no_grad():
        right = answer(task.tokens) == task.answers
        changed = task.tokens.clone()
        # the next kind of bracket, or the next value
        first, kinds = (2, 6) if name == "brackets" else (3 + 24, 24)
        changed[task.sources] = first + (task.tokens[task.sources] - first + 1) % kinds
        moved = answer(changed) != task.answers
    assert float(right.double().mean()) > 0.97
    assert float(moved[right].double().mean()) > 0.97
    result = evaluate.known_answer(model, make(40, seed=78), ["tensorlens norm", "tensorlens target", "random"])
    assert max(result.mean("mrr", method) for method in result.methods) > 0.9
    assert result.mean("mrr", "random") < 0.4


def test_induction_on_the_embedded_language_model(demo_model):
    task = evaluate.induction(24, d_vocab=demo_model.cfg.d_vocab, seed=1)
    result = evaluate.known_answer(demo_model, task, ["tensorlens target", "random"])
    assert result.settings["accuracy"] > 0.6
    assert result.mean("mrr", "tensorlens target") > 0.7 > 3 * result.mean("mrr", "random")


def test_ranking_by_hand():
    scores = torch.tensor([[3.0, -4, 2, 1]], dtype=torch.float64)
    sources = torch.tensor([[False, False, True, True]])
    ties = torch.zeros(1, 4, dtype=torch.float64)
    assert ranking(scores, sources, ties)[:, 0].tolist() == [1 / 2, 1 / 2, 3 / 10]
    assert ranking(scores, sources, ties, 1)[:, 0].tolist() == [1 / 2, 0, 3 / 10]


def test_bad_tasks(model_named):
    task = evaluate.recall(3)
    with pytest.raises(tlens.InvalidInputError, match="known answers"):
        evaluate.known_answer(recall_model(), task.tokens)
    wrong = evaluate.KnownAnswers("wrong", task.tokens, (task.answers + 1) % 24, task.sources)
    with pytest.raises(tlens.InvalidInputError, match="answers none of these"):
        evaluate.known_answer(recall_model(), wrong, ["random"])
    with pytest.raises(tlens.InvalidInputError, match="prompt 1 has no source"):
        evaluate.KnownAnswers("none", task.tokens, task.answers, task.sources & torch.tensor([[1], [0], [1]]).bool())
    with pytest.raises(tlens.InvalidInputError, match="must agree"):
        evaluate.KnownAnswers("none", task.tokens, task.answers, task.sources[:, 1:])
    for make, options in [
        (evaluate.recall, {"prompts": 0}), (evaluate.recall, {"pairs": 25}), (evaluate.brackets, {"length": 3}),
        (evaluate.induction, {"d_vocab": 4}), (evaluate.expected_mrr, {"tokens": 3, "sources": 4}),
    ]:  # fmt: skip
        with pytest.raises(tlens.InvalidInputError, match="pass"):
            make(**options)


def test_the_answer_can_be_explained_less_another_token():
    model, task = recall_model(), evaluate.recall(20, seed=3)
    one = evaluate.known_answer(model, task, ["tensorlens target"], minus=5, only_correct=False)
    each = evaluate.known_answer(model, task, ["tensorlens target"], minus=[5] * 20, only_correct=False)
    alone = evaluate.known_answer(model, task, ["tensorlens target"], only_correct=False)
    assert torch.equal(one.values, each.values)
    assert not torch.equal(one.values, alone.values)
    frozen = tlens.freeze(model, task.tokens[:1])
    token, logits = evaluate.predictions(frozen)
    scores = tlens.attribute(frozen, target=int(token), minus=int(logits.topk(2).indices[0, 1])).scores[0, -1].abs()
    runner_up = evaluate.known_answer(model, task, ["tensorlens target"], minus="runner-up", only_correct=False)
    mass = float((scores * task.sources[0]).sum() / scores.sum())
    assert float(runner_up.values[list(runner_up.metrics).index("mass"), 0, 0]) == pytest.approx(mass, rel=1e-4)
