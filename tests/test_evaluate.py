"""Evaluations: engines held against a computation by hand, oracles that must win, and random ones that must not."""

import json
import random
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import close, hooks_left, some_tokens, tolerance
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.commands import main
from tensorlens_tl.evaluate.known_answer import ranking
from tensorlens_tl.evaluate.perturbation import rank
from tensorlens_tl.evaluate.scorers import random_scores, scorers_of
from tensorlens_tl.results.statistics import bootstrap_interval, sign_flip_p
from tensorlens_tl.testing import model_names

FAMILIES = ("hooked/gqa", "bridge/gpt2", "bridge/bert", "bridge/llama", "encoder/bert", "bridge/neox")
FAMILIES = [name for name in FAMILIES if name in model_names()]
THIRDS = (0.0, 1 / 3, 2 / 3, 1.0)


@pytest.fixture(scope="module")
def recall_model():
    return tlens.load_demo_model(name="recall")


@pytest.fixture(scope="module")
def relations_model():
    return tlens.load_demo_model(name="relations", dtype=torch.float64)


def fixed(tokens, scores):
    """A method whose scores do not depend on the model: each prompt gets its own row."""
    rows = {tuple(row): score for row, score in zip(tokens.tolist(), scores, strict=True)}
    return lambda frozen: torch.stack([rows[tuple(row)] for row in frozen.tokens.tolist()])


# ------------------------------------------------------------------------------------- perturbation


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replacement", [7, "zero", "mean"])
def test_the_engine_against_a_computation_by_hand(family, replacement, model_named):
    """Three steps over six tokens: every run, metric and area once more, by hand."""
    model, tokens = model_named(family), some_tokens(2, 6)
    scores = torch.tensor([[5.0, 1, 4, 2, 6, 3], [1.0, 2, 3, 4, 5, 6]], dtype=torch.float64)
    result = evaluate.perturbation(
        model, tokens, {"mine": fixed(tokens, scores)}, query=-1, fractions=THIRDS, replacement=replacement
    )
    frozen = tlens.freeze(model, tokens)
    order = [[4, 0, 2, 5, 3, 1], [5, 4, 3, 2, 1, 0]]
    name = next(n for n in ("embed.hook_out", "embed.hook_embed", "hook_embed") if n in model.hook_dict)
    for row in range(2):
        hidden, logits = [], []
        for count in (0, 2, 4, 6):
            changed, gone = tokens[row : row + 1].clone(), order[row][:count]
            seen, embedded = {}, model.run_with_cache(**frozen.inputs, names_filter=name)[1][name]

            def see(value, *, hook, gone=gone, seen=seen, embedded=embedded):
                if hook.name == name and isinstance(replacement, str):
                    value = value.clone()
                    value[:, gone] = 0 if replacement == "zero" else embedded.reshape(12, -1).mean(0)
                    return value
                seen[hook.name] = value
                return None

            if replacement == 7:
                changed[:, gone] = 7
            out = model.run_with_hooks(changed, fwd_hooks=[(name, see), (frozen.points.unembed_in, see)])
            hidden.append(list(seen.values())[-1][0, -1])  # the last hook point to fire is the unembedding's input
            logits.append(out[0, -1])
        target = int(logits[0].argmax())
        by_hand = {
            "hs_mse": [float((h - hidden[0]).square().mean()) for h in hidden],
            "aopc": [float(logits[0].softmax(-1)[target] - z.softmax(-1)[target]) for z in logits],
            "logit": [float(logits[0][target] - z[target]) for z in logits],
        }
        for number, metric in enumerate(result.metrics):
            a, b, c, d = by_hand[metric]
            assert close(
                result.curves[number, 0, row], torch.tensor([a, b, c, d], dtype=torch.float64), tolerance(family)
            ), metric
            area = (a + 2 * b + 2 * c + d) / 6
            assert close(result.values[number, 0, row], torch.tensor(area, dtype=torch.float64), tolerance(family)), (
                metric
            )
    assert hooks_left(model) == 0


def test_negative_with_the_order_reversed_is_positive(model_named):
    model, tokens = model_named("bridge/gpt2"), some_tokens(3, 8)
    scores = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    run = lambda s, order: evaluate.perturbation(model, tokens, {"x": fixed(tokens, s)}, order=order, fractions=THIRDS)  # noqa: E731
    positive, negative = run(scores, "descending"), run(-scores, "ascending")
    assert torch.equal(positive.curves, negative.curves)
    assert not torch.equal(positive.curves, run(scores, "ascending").curves)
    assert positive.metrics == dict.fromkeys(("hs_mse", "aopc", "logit"), True)
    assert negative.metrics == dict.fromkeys(("hs_mse", "aopc", "logit"), False)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(0, 10**6))
def test_ranks(length, seed):
    """A permutation; tokens that may not be replaced last; the ascending order is the descending one reversed."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (2, length), generator=generator).double()  # many ties
    ties = torch.rand(2, length, generator=generator, dtype=torch.float64)
    allowed = torch.rand(2, length, generator=generator) < 0.7
    down, up = (rank(scores, allowed, order, ties) for order in ("descending", "ascending"))
    assert torch.equal(down.sort(1).values, torch.arange(length).expand(2, -1))
    for row in range(2):
        kept = allowed[row].nonzero()[:, 0]
        count = len(kept)
        assert torch.equal(down[row, kept], count - 1 - up[row, kept])
        assert bool((down[row, ~allowed[row]] >= count).all())
        by_rank = scores[row, kept][down[row, kept].argsort()]
        assert bool((by_rank.diff() <= 0).all())


def test_special_tokens_and_padding_are_never_replaced(monkeypatch):
    """Everything else is replaced at 100 %, and nothing but that is seen to change."""
    model, seen = demo.load_demo_model(), []
    texts = ["Return the value of the module", "If the file is not found, a FileNotFoundError is raised here today"]
    original = model.run_with_hooks

    def spy(*args, **kwargs):
        seen.append(kwargs["input"].clone())
        return original(*args, **kwargs)

    frozen = tlens.freeze(model, texts)
    monkeypatch.setattr(model, "run_with_hooks", spy)
    evaluate.perturbation(model, texts, ["random"], fractions=(0, 1), replacement=9, metrics=["hs_mse"])
    last = seen[-1]
    assert bool((last[:, 0] == 0).all())  # <|bos|>
    assert bool((last[frozen.mask][last[frozen.mask] != 0] == 9).all())
    assert torch.equal(last[~frozen.mask], frozen.tokens[~frozen.mask])


def test_an_oracle_wins_and_random_loses(recall_model):
    task = evaluate.recall(24, seed=5)
    methods = {
        "oracle": fixed(task.tokens, task.sources.double()),
        "anti-oracle": fixed(task.tokens, -task.sources.double()),
        "random": random_scores(1),
    }
    result = evaluate.perturbation(recall_model, task.tokens, methods, fractions=(0, 0.05), metrics=["aopc"])
    table = result.table()
    assert list(table.index) == ["oracle", "random", "anti-oracle"]
    won = result.compare("oracle", "random")
    assert won.low > 0.2
    assert won.p < 0.01
    answers = evaluate.known_answer(recall_model, task, methods | {"norm": "tensorlens norm"})
    assert answers.mean("mrr", "oracle") == answers.mean("precision", "oracle") == answers.mean("mass", "oracle") == 1
    assert answers.mean("mrr", "anti-oracle") == pytest.approx(1 / task.tokens.shape[1])


def test_batches_queries_and_memory(model_named):
    """One by one, in a batch, and within a small bound: the same; other queries are other numbers."""
    model, tokens = model_named("bridge/bert"), some_tokens(3, 8)
    run = lambda t, **o: evaluate.perturbation(model, t, ["tensorlens in+out"], fractions=THIRDS, **o)  # noqa: E731
    whole = run(tokens)
    alone = torch.cat([run(tokens[row : row + 1], replacement=5).curves for row in range(3)], dim=2)
    assert close(alone, run(tokens, replacement=5).curves)
    assert close(run(tokens, memory=20_000).curves, whole.curves)
    cls, mean = run(tokens, query="cls"), run(tokens, query="mean")
    assert close(cls.values, run(tokens, query=0).values)
    assert not close(cls.values, whole.values)
    assert list(mean.metrics) == ["hs_mse"]
    lengths = torch.ones_like(tokens)
    lengths[0, 6:] = 0
    padded = run(tokens, attention_mask=lengths, replacement=5)
    assert close(padded.curves[:, :, 0], run(tokens[:1, :6], replacement=5).curves[:, :, 0])


def test_all_methods_run_and_those_that_do_not_fit_are_named(model_named):
    """Of its own accord it leaves out what a parallel model does not have; when asked for it refuses."""
    model = model_named("bridge/neox")
    result = evaluate.perturbation(model, some_tokens(2, 8), fractions=THIRDS)
    assert set(result.methods) | set(result.skipped) == {*evaluate.STANDARD, "random"}
    assert set(result.skipped) == {"globenc", "mean globenc", "rollout globenc", "ff-ig"}
    with pytest.raises(tlens.UnsupportedModelError, match=r"globenc: .*parallel"):
        evaluate.perturbation(model, some_tokens(2, 8), ["globenc"], fractions=THIRDS)
    assert bool(torch.isfinite(result.values).all())


BAD = [
    ({"fractions": (0, 1.2)}, r"fractions=.*\[0, 1\]"),
    ({"fractions": (0.1, 0.2)}, "the first 0"),
    ({"fractions": (0, 0.2, 0.1)}, "ascending"),
    ({"fractions": "a lot"}, "fractions='a lot'"),
    ({"fractions": (0, 0.01)}, "prompt 0 has 6 tokens .* prompts of 50 or more"),
    ({"metrics": ["accuracy"]}, "metrics="),
    ({"metrics": []}, "metrics="),
    ({"query": "middle"}, "query='middle'"),
    ({"query": 6}, "query=6"),
    ({"query": "mean", "metrics": ["logit"]}, "no single prediction"),
    ({"order": "up"}, "order='up'"),
    ({"replacement": "mask"}, "no mask token"),
    ({"replacement": "pad"}, "no pad token"),
    ({"replacement": 10**6}, "outside the vocabulary"),
    ({"methods": []}, "methods="),
    ({"methods": ["rollout", "rollout"]}, "twice"),
    ({"methods": {"x": 5}}, "'x' is 5"),
    ({"methods": {"x": ("rollout", {"shape": 1})}}, "no option 'shape'"),
    ({"methods": ["no-such"]}, "no method called 'no-such'"),
    ({"methods": {"x": ("input-x-gradient", {})}}, "target: missing.*PREDICTED"),
    ({"methods": {"x": lambda frozen: torch.zeros(3)}}, r"x: gives \(3,\)"),
    ({"methods": {"x": lambda frozen: frozen.mask * float("nan")}}, "not finite"),
    ({"methods": {"x": ("attention", {"head_reduction": None})}}, "its axes are"),
    (
        {"methods": {"x": ("tensorlens", {"collapse": "target", "target": evaluate.PREDICTED})}, "query": "mean"},
        "one query",
    ),
    ({"memory": "a bit"}, "memory="),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(options, message, model_named):
    model = model_named("bridge/gpt2")
    with pytest.raises(tlens.TensorLensError, match=message):
        evaluate.perturbation(model, some_tokens(2, 6), **{"fractions": THIRDS, "methods": ["rollout"], **options})
    assert hooks_left(model) == 0


# ------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize("n", [1, 2, 7, 29])
def test_expected_rank_of_a_random_score(n):
    """H_n / n for one source; for several, against all placements."""
    assert evaluate.expected_mrr(n) == pytest.approx(sum(1 / k for k in range(1, n + 1)) / n)
    if n >= 3:
        rng = random.Random(0)
        drawn = [min(rng.sample(range(1, n + 1), 2)) for _ in range(20_000)]
        assert evaluate.expected_mrr(n, 2) == pytest.approx(np.mean([1 / r for r in drawn]), rel=0.03)


def test_random_scores_get_what_is_expected(recall_model):
    result = evaluate.known_answer(recall_model, evaluate.recall(300, seed=3), ["random"])
    low, high = bootstrap_interval(result.values[0, 0], 0.99)
    assert float(low) < result.settings["random_mrr"] < float(high)
    assert result.settings["random_mrr"] == evaluate.expected_mrr(29)


@pytest.mark.parametrize(("name", "make"), [("recall", evaluate.recall), ("brackets", evaluate.brackets)])
def test_the_models_know_their_tasks_and_the_sources_are_true(name, make):
    """Nearly every answer is right; another value at the source changes the answer, at another place it does not."""
    model, task = tlens.load_demo_model(name=name), make(100, seed=77)
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


def test_bad_tasks(recall_model, model_named):
    task = evaluate.recall(3)
    with pytest.raises(tlens.InvalidInputError, match="known answers"):
        evaluate.known_answer(recall_model, task.tokens)
    wrong = evaluate.KnownAnswers("wrong", task.tokens, (task.answers + 1) % 24, task.sources)
    with pytest.raises(tlens.InvalidInputError, match="answers none of these"):
        evaluate.known_answer(recall_model, wrong, ["random"])
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


# ------------------------------------------------------------------------------------- relation decoding


def test_one_operator_on_its_own_prompt_is_the_model(relations_model):
    """m = 1 on the training prompt: the model's own state, exactly; with m = 3 the mean of three single decoders."""
    relation = evaluate.shipped_relations()["country capital"]
    decoder = evaluate.RelationDecoder.fit(relations_model, relation, m=1)
    own = decoder.frozen.output[:, -1]
    assert float((decoder.states(decoder.frozen.tokens) - own).norm() / own.norm()) < 1e-9
    assert torch.equal(decoder.decode(decoder.frozen), evaluate.predictions(decoder.frozen)[0])

    asked = evaluate.few_shot_prompts(relations_model, relation.prompt_templates[0], relation.samples[5:9])
    texts = [f"The capital of {sample.subject} is" for sample in relation.samples[:3]]
    together = evaluate.RelationDecoder.fit(relations_model, texts, m=3).states(asked)
    alone = [evaluate.RelationDecoder.fit(relations_model, [text], m=1).states(asked) for text in texts]
    assert close(together, torch.stack(alone).mean(0))


def test_lre_is_the_first_order_approximation(relations_model):
    """Its Jacobian against torch's own, and at its own prompt with β = 1 the model's own state."""
    relation = evaluate.shipped_relations()["animal young"]
    prompts = evaluate.few_shot_prompts(relations_model, relation.prompt_templates[0], relation.samples[:1])
    assert relations_model.to_string(prompts.tokens[0, prompts.subject_ends[0]]) == relation.samples[0].subject
    for layer in (0, 2):
        lre = evaluate.LinearRelation.fit(relations_model, prompts, layer=layer)
        frozen = tlens.freeze(relations_model, prompts.tokens)
        end = int(prompts.subject_ends[0])

        def through(s, frozen=frozen, end=end, layer=layer):
            kept = []

            def put(live, *, hook):
                live = live.clone()
                live[0, end] = s
                return live

            hooks = [
                (frozen.points.blocks[layer].resid_pre, put),
                ("unembed.hook_in", lambda t, *, hook: kept.append(t)),
            ]
            relations_model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
            return kept[0][0, -1]

        W = torch.autograd.functional.jacobian(through, frozen.resid_pre(layer)[0, end])
        assert close(lre.W, W)
        assert close(lre.states(prompts)[0], frozen.output[0, -1])
        doubled = evaluate.LinearRelation.fit(relations_model, prompts, layer=layer, beta=2.0)
        assert close(doubled.states(prompts) - doubled.b, 2 * (lre.states(prompts) - lre.b))


def test_relation_decoding(relations_model):
    relations = [evaluate.shipped_relations()[name] for name in ("country capital", "number next")]
    result = evaluate.relation_decoding(relations_model, relations, splits=2, layers=[1], betas=[1.0])
    assert result.units == [relation.name for relation in relations]
    assert close(result.values, result.curves.mean(-1))
    assert result.curves.shape == (2, 3, 2, 2)  # metric, method, relation, split
    assert result.methods == ["tensorlens mean operator", "LRE layer 1, β=1", "random"]
    assert result.mean("faithful", "tensorlens mean operator") > 0.9 > 2 * result.mean("faithful", "random")
    table = evaluate.by_relation(result)
    assert list(table.index) == ["country capital", "number next"]
    assert table.loc["number next", ("random", "mean")] == pytest.approx(float(result.values[0, 2, 1]))
    few = evaluate.Relation("few", ("The capital of {} is",), relations[0].samples[:3])
    with pytest.raises(tlens.InvalidInputError, match=r"nothing to evaluate.*fewer than 3"):
        evaluate.relation_decoding(relations_model, [few])
    with pytest.raises(tlens.InvalidInputError, match="no result of relation_decoding"):
        evaluate.by_relation(replace(result, curves=None, axis=None))
    both = evaluate.relation_decoding(relations_model, [few, relations[0]], splits=1, layers=[], top_k=None)
    assert list(both.skipped) == ["few"]


def test_examples_of_unequal_length(relations_model):
    relation = evaluate.shipped_relations()["country capital"]  # South Korea and two others are two tokens
    with pytest.raises(tlens.InvalidInputError, match=r"'South Korea' \(7\).*most common length, 6 tokens"):
        evaluate.few_shot_prompts(relations_model, relation.prompt_templates[0], relation.samples)
    kept = evaluate.few_shot_prompts(
        relations_model, relation.prompt_templates[0], relation.samples, length="most common"
    )
    assert len(kept.samples) == len(relation.samples) - 3
    assert evaluate.few_shot_prompts(
        relations_model, "The capital of {} is", relation.samples, length=7
    ).tokens.shape == (3, 7)
    with pytest.raises(tlens.InvalidInputError, match="no prompt has it"):
        evaluate.few_shot_prompts(relations_model, "The capital of {} is", relation.samples, length=9)
    texts = ["The capital of France is", "The capital of South Korea is", "The capital of Italy is"]
    fit = evaluate.RelationDecoder.fit
    with pytest.raises(tlens.InvalidInputError, match=r"South Korea is' \(7\)"):
        fit(relations_model, texts, m=2)
    decoder = fit(relations_model, texts, m=2, length="most common")
    with pytest.raises(tlens.InvalidInputError, match="made from prompts of 6 tokens, these have 7"):
        decoder.decode(texts[1])
    pairs = [("France", "Paris"), ("Italy", "Rome")]
    assert fit(relations_model, pairs, m=2, template="The capital of {} is").frozen.tokens.shape == (2, 13)
    for examples, options, message in [
        (pairs, {}, "template="), (pairs, {"template": "The capital is"}, "one {}"), ([], {}, "no examples"),
        (pairs, {"template": "The capital of {} is", "m": 3}, "2 examples, m=3"), (texts[:1], {"m": 2}, "1 examples"),
    ]:  # fmt: skip
        with pytest.raises(tlens.InvalidInputError, match=message):
            fit(relations_model, examples, **{"m": 2, **options})


def test_relations_in_the_published_format(tmp_path):
    facts = {
        "name": "x",
        "prompt_templates": ["{} is"],
        "samples": [{"subject": "a", "object": "b"}],
        "properties": {"k": 1},
    }
    (tmp_path / "x.json").write_text(json.dumps(facts))
    assert evaluate.Relation.load(tmp_path / "x.json").samples == (evaluate.Sample("a", "b"),)
    broken = [
        ("{", "not a relation"),
        (json.dumps({**facts, "samples": []}), "no samples"),
        (json.dumps({**facts, "prompt_templates": ["no place"]}), "needs one {}"),
        (json.dumps({k: v for k, v in facts.items() if k != "name"}), "KeyError"),
    ]
    for text, message in broken:
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(tlens.FileFormatError, match=message):
            evaluate.Relation.load(tmp_path / "x.json")
    with pytest.raises(tlens.FileFormatError, match="FileNotFoundError"):
        evaluate.Relation.load(tmp_path / "none.json")
    assert len(evaluate.shipped_relations()) >= 5


def test_models_without_a_plain_unembedding_decode_no_relations(model_named):
    decoder = evaluate.RelationDecoder.fit(model_named("bridge/bert"), some_tokens(2, 6), m=2)
    with pytest.raises(tlens.UnsupportedModelError, match="no plain unembedding"):
        decoder.decode(some_tokens(2, 6))


# ------------------------------------------------------------------------------------- checks


def test_completeness_is_measured(model_named):
    result = evaluate.completeness(model_named("bridge/gpt2"), some_tokens(2, 6))
    exact = [m for m in result.methods if m.startswith(("tensorlens", "decompx"))]
    assert exact == [
        "tensorlens in+out",
        "tensorlens in+out, biases",
        "tensorlens target",
        "tensorlens target, biases",
        "decompx target",
    ]
    assert max(result.mean("residual", method) for method in exact) < 1e-9
    assert result.mean("residual", "integrated-gradients") > 1e-6  # quadrature
    assert result.mean("unexplained", "tensorlens in+out, biases") == 0
    assert result.mean("unexplained", "tensorlens in+out") > 0.01
    claimed = evaluate.completeness(model_named("bridge/gpt2"), some_tokens(2, 6), ["rollout"])
    assert np.isnan(claimed.mean("residual", "rollout"))


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


# ------------------------------------------------------------------------------------- the result


@pytest.fixture
def result():
    values = torch.tensor([[[1.0, 2, 3, 4], [2.0, 3, 4, 5.5], [9.0, 9, 9, float("nan")]]])
    return evaluate.Evaluation(
        "test", values, {"score": True}, ["a", "b", "c"], ["p", "q", "r", "s"], settings={"seed": 1}
    )


def test_tables_and_comparisons(result):
    table = result.table()
    assert list(table.index) == ["c", "b", "a"]
    assert table.loc["a", ("score", "mean")] == 2.5
    assert table.loc["a", ("score", "low")] < 2.5 < table.loc["a", ("score", "high")]
    assert table.loc["c", ("score", "low")] == table.loc["c", ("score", "high")] == 9
    compared = result.compare("b", "a")
    assert compared.difference == pytest.approx(1.125)
    assert 1 <= compared.low < 1.125 < compared.high
    assert compared.p == pytest.approx(2 / 16, rel=0.1)  # two of the sixteen sign patterns are as large
    assert list(result.paired("a").index) == ["b", "c"]
    assert "**9** [9, 9]" in result.to_markdown()
    assert len(result.to_dataframe()) == 12
    assert result.only("b").methods == ["b"]
    for call in (lambda: result.table("other"), lambda: result.compare("a", "z"), lambda: result.table(level=1)):
        with pytest.raises(tlens.InvalidInputError):
            call()


def test_bootstrap_covers():
    """95 % intervals of means of 40 normal numbers hold the truth about as often as they say."""
    values = torch.randn(400, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low, high = bootstrap_interval(values)
    assert 0.90 < float(((low < 0) & (high > 0)).double().mean()) < 0.97
    p = [sign_flip_p(row) for row in values[:100]]
    assert np.mean(np.array(p) < 0.1) == pytest.approx(0.1, abs=0.08)


def test_files(result, tmp_path):
    path = result.save(tmp_path / "result")
    loaded = evaluate.Evaluation.load(path)
    assert torch.equal(loaded.values, result.values) or torch.equal(loaded.values.isnan(), result.values.isnan())
    assert (loaded.metrics, loaded.methods, loaded.settings) == (result.metrics, result.methods, {"seed": 1})
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(tlens.FileFormatError, match="not a readable"):
        evaluate.Evaluation.load(path)
    with pytest.raises(tlens.InvalidInputError, match="no folder"):
        result.save(tmp_path / "none" / "result")
    attribution = tlens.attribute(demo.load_demo_model(), "Return the").save(tmp_path / "attribution")
    with pytest.raises(tlens.FileFormatError, match="no Evaluation of this library"):
        evaluate.Evaluation.load(attribution)


def test_plots(result, model_named):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert len(result.plot().patches) == 3
    curves = evaluate.perturbation(model_named("bridge/gpt2"), some_tokens(2, 6), ["rollout", "alti"], fractions=THIRDS)
    assert len(curves.plot("logit", ["alti"]).lines) == 1
    assert len(curves.to_dataframe()) == 3 * 2 * 2 * 4


def test_methods_may_be_given_in_many_ways(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens(2, 6))
    for query in (-1, 2, None):
        made = scorers_of(
            {"a": "rollout", "b": ("rollout", {"query": None}), "c": lambda f: tlens.attribute(f, method="rollout")}
        )
        if query is None:
            made = [made[0], made[2]]
        scores = [scorer(frozen, query) for scorer in made if scorer.label != "b"]
        assert torch.equal(scores[0], scores[1])
    assert torch.equal(random_scores(3)(frozen), random_scores(3)(frozen))
    assert not torch.equal(random_scores(3)(frozen), random_scores(4)(frozen))


# ------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "command",
    [
        ["perturbation", "-n", "2", "--methods", "rollout", "random"],
        ["known-answer", "--model", "demo:recall", "-n", "3", "--methods", "tensorlens target"],
        ["stability", "-n", "2", "--methods", "rollout", "random"],
        ["agreement", "-n", "2", "--methods", "rollout", "random"],
    ],
    ids=lambda command: command[0],
)
def test_evaluate_from_the_command_line(command, tmp_path, capsys):
    output = tmp_path / ("result.csv" if command[0] == "agreement" else "result")
    assert main(["evaluate", *command, "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert command[-1].split(" ")[0] in printed
    assert "saved to" in printed
    assert output.exists()


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    for command, message in [
        (["perturbation", "--model", "demo:recall"], "--prompts"),
        (["perturbation", "--prompts", str(tmp_path / "none")], "no such file"),
        (["perturbation", "--prompts", str(tmp_path / "empty")], "is empty"),
        (["perturbation", "-n", "2", "--methods", "nothing"], "no method called"),
        (["relations", "--model", "demo:relations", "--relations", str(tmp_path / "none")], "not a relation"),
        (["known-answer", "--model", "demo:poems"], "name='poems'"),
    ]:
        assert main(["evaluate", *command]) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_splits_that_nobody_knows_are_left_out_alone(relations_model):
    """A split without a known subject takes neither the others nor the relation with it."""
    relation = evaluate.shipped_relations()["country capital"]
    false = [
        evaluate.Sample(sample.subject, relation.samples[k - 3].object) for k, sample in enumerate(relation.samples)
    ]
    mixed = evaluate.Relation("half wrong", relation.prompt_templates, (*false[:5], *relation.samples[5:8]))
    result = evaluate.relation_decoding(relations_model, [mixed], splits=8, layers=[])
    known = result.curves[0, 0, 0].isfinite()
    assert bool(known.any())
    assert not result.skipped
    assert result.values[0, 0, 0] == result.curves[0, 0, 0][known].mean()


def test_nothing_known_is_not_significant():
    assert np.isnan(sign_flip_p(torch.full((4,), torch.nan)))
    assert np.isnan(sign_flip_p(torch.zeros(0)))


def test_the_query_that_is_asked_is_the_one_that_is_read():
    """Held somewhere on the query axis, in a padded batch too; another one is refused."""
    model = tlens.testing.tiny_model("bridge/gpt2")
    tokens, mask = some_tokens(), torch.ones(2, 6, dtype=torch.long)
    tokens[1, 4:], mask[1, 4:] = 0, 0
    last = {"x": lambda frozen: tlens.attribute(frozen, query=-1)}
    with pytest.raises(tlens.InvalidInputError, match="asked for position"):
        evaluate.perturbation(model, tokens, last, attention_mask=mask, query=1, fractions=(0, 0.5))

    def half_unexplained(frozen):
        result = tlens.attribute(frozen, query=None)
        return replace(result, residual=torch.where(frozen.mask, 0.5, 0.0).double())

    found = evaluate.completeness(model, tokens, {"x": half_unexplained}, attention_mask=mask)
    assert found.values[list(found.metrics).index("residual"), 0].tolist() == [0.5, 0.5]


def test_completeness_keeps_a_target_of_ones_own():
    model = tlens.testing.tiny_model("bridge/gpt2")
    own = {"x": ("tensorlens", {"collapse": "target", "target": 5})}
    result = evaluate.completeness(model, some_tokens(), own)
    assert result.mean("residual", "x") < 1e-9
    made = tlens.attribute(model, some_tokens(), collapse="target", target=5)
    bias = made.bias.abs() / (made.scores.abs().sum(-1) + made.bias.abs())
    assert close(result.values[1, 0], bias[:, 0])
