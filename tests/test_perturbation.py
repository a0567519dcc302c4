"""The perturbation engine held against a computation by hand; oracles must win, and random scores must not."""

from dataclasses import replace

import pytest
import torch
from conftest import close, hooks_left, some_tokens, tolerance
from evaluation_cases import THIRDS, recall_model
from hypothesis import given, settings, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate, generation
from tensorlens_tl.evaluate.perturbation import rank
from tensorlens_tl.evaluate.scorers import random_scores
from tensorlens_tl.testing import model_names

FAMILIES = ("hooked/gqa", "bridge/gpt2", "bridge/bert", "bridge/llama", "encoder/bert", "bridge/neox")
FAMILIES = [name for name in FAMILIES if name in model_names()]


def fixed(tokens, scores):
    """A method whose scores do not depend on the model: each prompt gets its own row."""
    rows = {tuple(row): score for row, score in zip(tokens.tolist(), scores, strict=True)}
    return lambda frozen: torch.stack([rows[tuple(row)] for row in frozen.tokens.tolist()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replacement", [7, "zero", "mean"])
@pytest.mark.few(6)
def test_the_engine_against_a_computation_by_hand(family, replacement, model_named):
    """Three steps over six tokens: every run, metric and area once more, by hand."""
    model, tokens = model_named(family), some_tokens(2, 6)
    scores = torch.tensor([[5.0, 1, 4, 2, 6, 3], [1.0, 2, 3, 4, 5, 6]], dtype=torch.float64)
    result = evaluate.perturbation(
        model, tokens, {"mine": fixed(tokens, scores)}, query=-1, fractions=THIRDS, replacement=replacement,
        metrics=("hs_mse", "aopc", "aopc_abs", "logit"),
    )  # fmt: skip
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
            "aopc_abs": [abs(float(logits[0].softmax(-1)[target] - z.softmax(-1)[target])) for z in logits],
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
    original = type(model).forward

    def spy(model, input, *args, **kwargs):
        seen.append(input.clone())
        return original(model, input, *args, **kwargs)

    frozen = tlens.freeze(model, texts)
    monkeypatch.setattr(type(model), "forward", spy)
    evaluate.perturbation(model, texts, ["random"], fractions=(0, 1), replacement=9, metrics=["hs_mse"])
    last = seen[-1][1:-1]  # the first and the last are whole prompts
    assert bool((last[:, 0] == 0).all())  # <|bos|>
    assert bool((last[frozen.mask][last[frozen.mask] != 0] == 9).all())
    assert torch.equal(last[~frozen.mask], frozen.tokens[~frozen.mask])


def test_an_oracle_wins_and_random_loses():
    task = evaluate.recall(24, seed=5)
    methods = {
        "oracle": fixed(task.tokens, task.sources.double()),
        "anti-oracle": fixed(task.tokens, -task.sources.double()),
        "random": random_scores(1),
    }
    result = evaluate.perturbation(
        recall_model(), task.tokens, methods, fractions=(0, 0.05), metrics=["aopc"], replacement="mean"
    )
    table = result.table()
    assert list(table.index) == ["oracle", "random", "anti-oracle"]
    won = result.compare("oracle", "random")
    assert won.low > 0.2
    assert won.p < 0.01
    answers = evaluate.known_answer(recall_model(), task, methods | {"norm": "tensorlens norm"})
    assert answers.mean("mrr", "oracle") == answers.mean("precision", "oracle") == answers.mean("mass", "oracle") == 1
    assert answers.mean("mrr", "anti-oracle") == pytest.approx(1 / task.tokens.shape[1])


def test_batches_queries_and_memory(model_named):
    """One by one, in a batch, and within a small bound: the same; other queries are other numbers."""
    model, tokens = model_named("bridge/bert"), some_tokens(3, 8)
    run = lambda t, **o: evaluate.perturbation(model, t, ["tensorlens in_out"], fractions=THIRDS, **o)  # noqa: E731
    whole = run(tokens)
    alone = torch.cat([run(tokens[row : row + 1], replacement=5).curves for row in range(3)], dim=2)
    assert close(alone, run(tokens, replacement=5).curves)
    assert close(run(tokens, memory=20_000).curves, whole.curves)
    mean = run(tokens, query="mean")
    assert not close(run(tokens, query=0).values, whole.values)
    assert close(run(tokens, query=7).values, whole.values)
    assert list(mean.metrics) == ["hs_mse"]
    lengths = torch.ones_like(tokens)
    lengths[0, 6:] = 0
    padded = run(tokens, attention_mask=lengths, replacement=5)
    assert close(padded.curves[:, :, 0], run(tokens[:1, :6], replacement=5).curves[:, :, 0])


def test_the_query_that_is_asked_is_the_one_that_is_read():
    """Held somewhere on the query axis, in a padded batch too; another one is refused."""
    model = tlens.testing.tiny_model("bridge/gpt2")
    tokens, mask = some_tokens(), torch.ones(2, 6, dtype=torch.long)
    tokens[1, 4:], mask[1, 4:] = 0, 0
    last = {"x": lambda frozen: tlens.attribute(frozen, query=-1)}
    with pytest.raises(tlens.InvalidInputError, match="the query is position"):
        evaluate.perturbation(model, tokens, last, attention_mask=mask, query=1, fractions=(0, 0.5))

    def half_unexplained(frozen):
        result = tlens.attribute(frozen, query="all")
        return replace(result, gap=torch.where(frozen.mask, 0.5, 0.0).double())

    found = evaluate.completeness(model, tokens, {"x": half_unexplained}, attention_mask=mask)
    assert found.values[list(found.metrics).index("gap"), 0].tolist() == [0.5, 0.5]


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
    ({"fractions": (0, float("nan"))}, r"fractions=.*\[0, 1\]"),
    ({"fractions": (0.1, 0.2)}, "the first 0"),
    ({"fractions": (0, 0.2, 0.1)}, "ascending"),
    ({"fractions": "a lot"}, "fractions='a lot'"),
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
    ({"methods": ["tensorlens"], "query": "mean"}, "it explains a prediction, and a target needs one query"),
    ({"methods": {"x": lambda frozen: torch.zeros(3)}}, r"x: gives \(3,\)"),
    ({"methods": {"x": lambda frozen: frozen.mask * float("nan")}}, "not finite"),
    ({"methods": {"x": ("attention", {"head_reduction": None})}}, "its axes are"),
    (
        {"methods": {"x": ("tensorlens", {"collapse": "target", "target": evaluate.PREDICTED})}, "query": "mean"},
        "one query",
    ),
    ({"memory": "a bit"}, "memory="),
]


def test_short_prompts_need_no_other_fractions(model_named):
    """Each step replaces at least one token: the default fractions of 4 tokens are 1, of 6 tokens 1 and 2."""
    model, methods, by_hand = model_named("bridge/gpt2"), ["rollout", "random"], {4: [1] * 6, 6: [1, 1, 1, 1, 2, 2]}
    for length, counts in by_hand.items():
        tokens = some_tokens(2, length)
        found = evaluate.perturbation(model, tokens, methods, replacement=7)
        exact = evaluate.perturbation(model, tokens, methods, replacement=7, fractions=(0, 1 / length, 2 / length))
        assert found.curves[..., 1:].abs().amax() > 0
        assert torch.equal(found.curves[..., 0], exact.curves[..., 0])
        for step, count in enumerate(counts, 1):
            assert close(found.curves[..., step], exact.curves[..., count])


def test_a_prompt_of_special_tokens_alone_is_refused(demo_model):
    texts = [[demo_model.tokenizer.bos_token_id], [demo_model.tokenizer.bos_token_id, 5]]
    with pytest.raises(tlens.InvalidInputError, match="prompt 0 has no token that may be replaced"):
        evaluate.perturbation(demo_model, texts, ["random"])


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(options, message, model_named):
    model = model_named("bridge/gpt2")
    with pytest.raises(tlens.TensorLensError, match=message):
        evaluate.perturbation(model, some_tokens(2, 6), **{"fractions": THIRDS, "methods": ["rollout"], **options})
    assert hooks_left(model) == 0


@pytest.mark.whole
def test_norms_of_every_query_are_estimated_and_said_to_be(demo_model):
    texts = [
        "Return the value of the first file that was found here",
        "Raise an exception if there is no such file in it",
    ]
    run = lambda methods, query: evaluate.perturbation(  # noqa: E731
        demo_model, texts, methods, query=query, fractions=(0, 0.2), metrics="hs_mse"
    )
    mean = run(["tensorlens norm"], "mean")
    assert "estimated by random rows" in mean.settings["norms"]
    exact = run({"exact": lambda frozen: _mean_norm(frozen)}, "mean")
    assert "norms" not in exact.settings
    assert "norms" not in run(["tensorlens norm"], -1).settings
    frozen = tlens.freeze(demo_model, texts)
    scorer = evaluate.scorers.scorers_of(["tensorlens norm"])[0]
    made, wanted = scorer(frozen, "all"), _mean_norm(frozen)
    assert float(((made - wanted).abs() / wanted.amax(-1, keepdim=True)).max()) < 0.05
    assert not torch.equal(made, wanted)


def _mean_norm(frozen):
    scores = frozen.operator().norm("all").scores.double()
    return (scores * frozen.mask[..., None]).sum(1) / frozen.mask.sum(1, keepdim=True)


def test_generated_text_is_in_the_settings(demo_model):
    """A result of generated answers says what was generated, and how much was asked for."""
    result = evaluate.perturbation(
        demo_model, ["Return the name of the"], ["random"], fractions=(0, 1), metrics=["aopc"], max_new_tokens=3
    )
    text = generation.freeze_generation(demo_model, "Return the name of the", max_new_tokens=3).texts
    assert result.settings["generated"] == text
    assert result.settings["max_new_tokens"] == 3
    given = evaluate.perturbation(
        demo_model, ["Return the name of the"], ["random"], fractions=(0, 1), metrics=["aopc"], continuation=[" value"]
    )
    assert given.settings["generated"] == [" value"]
    assert "max_new_tokens" not in given.settings
