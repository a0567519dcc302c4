"""The same question put to every method: generated text by any of them, and the mean over queries."""

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import evaluate, results
from tensorlens_tl.errors import InvalidInputError, MethodError, RegistryError
from tensorlens_tl.generation import freeze_generation
from tensorlens_tl.testing import tiny_model

NEXT = tlens.NEXT
NAME = "bridge/gpt2"
UNEVEN = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(NAME)


# ------------------------------------------------------------------ the mean over queries


@pytest.mark.parametrize("method", tlens.list_methods())
@pytest.mark.few(8)
def test_the_mean_over_queries_is_that_of_every_query(method, model):
    tokens = [row * 2 for row in UNEVEN]
    options = {"target": 5} if tlens.get_method(method).explains_prediction() else {}
    if method == "difference":
        options["baseline"] = 3
    every = tlens.attribute(model, tokens, method=method, query="all", **options)
    mean = tlens.attribute(model, tokens, method=method, query="mean", **options)
    for row, length in enumerate(map(len, tokens)):
        assert torch.allclose(mean.scores[row, 0], every.scores[row, :length].mean(0), atol=1e-12)
    assert mean.options["query"] == "mean"
    assert "mean over the queries" in mean.target
    if every.additive:
        assert mean.additive
        assert float(mean.gap.max()) < 1e-9


def test_its_total_is_the_mean_of_the_models_own_numbers(model):
    logits = [model(torch.tensor([row])).detach()[0] for row in UNEVEN]
    expected = torch.stack([(row[:, 5] - row[:, 9]).mean() for row in logits])[:, None]
    assert close(tlens.attribute(model, UNEVEN, 5, minus=9, query="mean").total, expected)
    assert close(tlens.attribute(model, UNEVEN, 5, minus=9, query="mean", memory="20KB").total, expected)
    expected = torch.stack(
        [row[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean() for row, ids in zip(logits, UNEVEN, strict=True)]
    )[:, None]
    following = tlens.attribute(model, UNEVEN, NEXT, query="mean")
    assert close(following.total, expected)
    assert close(following.scores.sum(-1) + following.bias, expected)


def test_a_prompt_of_one_token_has_no_next_one(model):
    with pytest.raises(InvalidInputError, match="prompt of one token"):
        tlens.attribute(model, [[3], [4]], NEXT, query="mean")


# ------------------------------------------------------------------ generated text by any method


@pytest.mark.parametrize("method", [name for name in tlens.list_methods() if name not in ("tensorlens", "difference")])
@pytest.mark.few(8)
def test_generated_text_by_any_method(method, model):
    written = freeze_generation(model, some_tokens(batch=2, pos=4), max_new_tokens=3, stop_at_eos=False)
    explains = tlens.get_method(method).explains_prediction()
    target = {"target": NEXT} if explains else {}
    expected = tlens.attribute(written.frozen, method=method, query=[3, 4, 5], **target)
    tokens = written.attribute(method=method)
    assert close(tokens.scores, expected.scores)
    assert tokens.options["asked"] == [[4, 5, 6]] * 2
    assert tokens.method == method
    span = written.attribute(method=method, span=slice(1, 3))
    rows = expected.scores[:, 1:]
    assert close(span.scores[:, 0], rows.sum(1) if explains else rows.mean(1))
    assert (results.EACH_SPAN in span.target) is explains
    assert "generated" in span.to_html()


def test_an_additive_method_sums_over_a_span(model):
    prompts = [row[:length] for row, length in zip(UNEVEN, (5, 2, 4), strict=True)]
    options = {"max_new_tokens": 4, "stop_at_eos": False, "span": "all", "minus": "runner-up"}
    exact = tlens.attribute_generation(model, prompts, **options)
    ours = tlens.attribute_generation(model, prompts, method="decompx", aggregate="target", **options)
    assert close(ours.total, exact.total)
    assert ours.additive
    assert float(ours.gap.max()) < 1e-9
    assert ours.target == exact.target
    parts = tlens.attribute_generation(model, prompts, method="relp", memory="30KB", **options)
    whole = tlens.attribute_generation(model, prompts, method="relp", **options)
    assert close(parts.scores, whole.scores[..., : parts.scores.shape[-1]])  # one position of padding less
    assert parts.options["generated"] == whole.options["generated"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "attention", "minus": 5}, InvalidInputError, "no option 'minus'"),
        ({"method": "relp", "hops": 1}, InvalidInputError, "hops"),
        ({"method": "relp", "target": 5}, InvalidInputError, "span= chooses"),
        ({"method": "relp", "bias": "position"}, InvalidInputError, "no option 'bias'"),
        ({"method": "relp", "steps": 5}, InvalidInputError, "no option 'steps'"),
        ({"collapse": "norm"}, InvalidInputError, "'collapse'"),
        ({"method": "lime"}, RegistryError, "lime"),
    ],
)
def test_what_a_method_cannot_say_is_refused_before_work(options, error, message, model):
    with pytest.raises(error, match=message):
        tlens.attribute_generation(model, [[3, 4]], max_new_tokens=2, **options)


# ------------------------------------------------------------------ evaluations of the token that was explained

METHODS = ["tensorlens target", "relp", "mean attention", "random"]


def test_methods_are_tested_on_the_token_that_is_named(model):
    """One replacement of one token, by hand."""
    tokens = some_tokens(batch=3, pos=6)
    options = {"fractions": (0, 0.2), "replacement": 3}
    result = evaluate.perturbation(model, tokens, METHODS, target=[5, 6, 7], minus=[9, 9, 9], **options)
    every = evaluate.perturbation(model, tokens, METHODS, target=[5, 6, 7], **options)
    for row, target in enumerate((5, 6, 7)):
        whole = model(tokens[row : row + 1]).detach()[0, -1]
        for method, name in enumerate(METHODS):
            if name in ("mean attention", "random"):
                continue
            registered = {"tensorlens target": "tensorlens"}.get(name, name)
            for answer, minus in ((result, 9), (every, None)):
                scores = tlens.attribute(model, tokens[row], target, method=registered, minus=minus).scores[0, 0]
                changed = tokens[row : row + 1].clone()
                changed[0, scores.argmax()] = 3
                fall = whole - model(changed).detach()[0, -1]
                expected = fall[target] - (0 if minus is None else fall[minus])
                assert answer.curves[2, method, row, 1] == pytest.approx(float(expected), abs=1e-9)
    assert result.settings["target"].startswith("logit of")


def test_the_prediction_is_what_is_explained_where_none_is_named(model):
    tokens = some_tokens(batch=3, pos=6)
    predicted = model(tokens).detach()[:, -1].argmax(-1).tolist()
    options = {"fractions": (0, 0.5), "replacement": 3}
    assert torch.equal(
        evaluate.perturbation(model, tokens, METHODS, **options).curves,
        evaluate.perturbation(model, tokens, METHODS, target=predicted, **options).curves,
    )
    logits = model(tokens).detach()[:, -1]
    second = logits.topk(2).indices[:, 1].tolist()
    assert torch.equal(
        evaluate.perturbation(model, tokens, METHODS, minus="runner-up", **options).curves,
        evaluate.perturbation(model, tokens, METHODS, target=predicted, minus=second, **options).curves,
    )


def test_a_data_set_has_a_target_in_a_column(model, tmp_path):
    tokens = some_tokens(batch=5, pos=6).tolist()
    rows = [{"text": row, "answer": 5 + number} for number, row in enumerate(tokens)]
    options = {"fractions": (0, 0.5), "replacement": 3}
    run = evaluate.perturbation_dataset(
        model, rows, tmp_path / "run", METHODS, columns={"target": "answer"}, minus="runner-up",
        tokens_per_batch=12, progress=False, **options,
    )  # fmt: skip
    whole = evaluate.perturbation(
        model, torch.tensor(tokens), METHODS, target=[5, 6, 7, 8, 9], minus="runner-up", **options
    )
    assert close(run.evaluation().curves, whole.curves)
    assert run.evaluation().settings["target"] == results.SEVERAL_TARGETS
    for refused, message in (
        ({"target": [5, 6]}, "columns= names"),
        ({"columns": {"direction": "answer"}}, "not one of"),
        ({"columns": {"target": "answer"}, "target": 5}, "in a column and an option"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            evaluate.perturbation_dataset(model, rows, tmp_path / "no", METHODS, **refused, **options)


def test_the_first_choice_is_what_is_tested_where_none_is_named(model):
    tokens = some_tokens(batch=3, pos=6)
    options = {"fractions": (0, 0.5), "replacement": 3}
    for metrics in (["hs_mse"], ["hs_mse", "aopc", "logit"]):
        silent, named = (
            evaluate.perturbation(model, tokens, METHODS, target=target, metrics=metrics, **options).curves
            for target in (None, "first-choice")
        )
        assert torch.equal(silent, named)
    some = evaluate.perturbation(model, tokens, METHODS, target=[5, "first-choice", 7], **options)
    predicted = int(model(tokens).detach()[1, -1].argmax())
    assert torch.equal(
        some.curves, evaluate.perturbation(model, tokens, METHODS, target=[5, predicted, 7], **options).curves
    )
    with pytest.raises(InvalidInputError, match="measure 'aopc'"):
        evaluate.perturbation(model, tokens, METHODS, target=[5, "first-choice", 7], metrics="hs_mse", **options)


# ------------------------------------------------------------------ evaluations of the text that was explained


def test_methods_are_tested_on_generated_text(model):
    """Two tokens of a span: the token that a method names is replaced by hand, one pass for each prompt."""
    prompts = [row[:length] for row, length in zip(UNEVEN, (5, 3, 4), strict=True)]
    written = freeze_generation(model, prompts, max_new_tokens=3, stop_at_eos=False)
    span = (1, 3)
    options = {"fractions": (0, 0.2), "replacement": 3, "minus": 9}
    result = evaluate.perturbation(
        model, prompts, ["tensorlens target", "relp", "alti"], max_new_tokens=3, span=span, **options
    )
    assert result.settings["target"] == "sum of the logit differences to 9 of each prompt's span"
    assert result.settings["query"] == "span (1, 3)"
    for row, prompt in enumerate(prompts):
        text = written.frozen.tokens[row][written.frozen.mask[row]][None]
        first = len(prompt)
        targets = text[0, first + 1 : first + 3]
        before, after = (first, first + 2)
        for method, name in enumerate(("tensorlens", "relp", "alti")):
            minus = {} if name == "alti" else {"minus": 9}
            scores = tlens.attribute_generation(
                model, [prompt], max_new_tokens=3, stop_at_eos=False, span=span, method=name, **minus
            ).scores[0, 0, : first + 1]
            changed = text.clone()
            changed[0, scores.argmax()] = 3
            whole, perturbed = (model(ids).detach()[0, before:after] for ids in (text, changed))
            falls = whole - perturbed
            logit = falls.gather(1, targets[:, None]).sum() - falls[:, 9].sum()
            chances = whole.softmax(-1) - perturbed.softmax(-1)
            aopc = (chances.gather(1, targets[:, None])[:, 0] - chances[:, 9]).mean()
            assert result.curves[2, method, row, 1] == pytest.approx(float(logit), abs=1e-9)
            assert result.curves[1, method, row, 1] == pytest.approx(float(aopc), abs=1e-9)


def test_a_span_of_one_token_is_that_token(model):
    """The same numbers as of the token at its query, where the continuation has one token."""
    tokens = some_tokens(batch=2, pos=6)
    options = {"fractions": (0, 0.5), "replacement": 3}
    alone = evaluate.perturbation(model, tokens, METHODS[:3], target=[5, 6], **options)
    span = evaluate.perturbation(model, tokens, METHODS[:3], continuation=[[5], [6]], **options)
    assert close(alone.curves, span.curves)


def test_every_method_is_tested_on_generated_text(model):
    result = evaluate.perturbation(
        model, some_tokens(batch=2, pos=5), continuation=[[5, 6], [7]], fractions=(0, 0.5), replacement=3
    )
    assert {*result.methods, *result.skipped} == {*evaluate.STANDARD, "random"}
    assert {"tensorlens target", "gim", "leave-one-out", "tensorlens norm"} <= {*result.methods}
    assert bool(result.curves.isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 5, "minus": 5}, "same token"),
        ({"target": [5, 6, 7]}, "3 tokens for 2 prompts"),
        ({"target": 5, "query": "mean", "metrics": ["hs_mse"]}, "single prediction"),
        ({"minus": "runner-up", "metrics": ["hs_mse"]}, "needs target="),
        ({"target": 5, "minus": "runner-up", "metrics": ["hs_mse"]}, "measure 'aopc'"),
        ({"target": 5, "minus": 6, "methods": ["one token"]}, "'one token' explains a token's logit"),
        ({"span": 0}, "max_new_tokens, continuation"),
        ({"max_new_tokens": 2, "span": 5}, "span"),
        ({"max_new_tokens": 2, "target": 5}, "their own targets"),
        ({"max_new_tokens": 2, "query": 1}, "span= chooses"),
        ({"max_new_tokens": 2, "methods": {"mine": ("relp", {"target": 5})}}, "'mine' has target="),
        ({"max_new_tokens": 2, "methods": ["no query"]}, "'no query' has no option 'query'"),
        ({"max_new_tokens": 2, "methods": ["one token"], "minus": 5}, "'one token' explains a token's logit"),
        ({"max_new_tokens": 2, "methods": {"f": lambda frozen: tlens.attribute(frozen)}}, "f: a function is not told"),
    ],
)
def test_what_cannot_be_tested_is_refused(options, message, model, clean_registry):
    @tlens.register_method("no query")
    def no_query(frozen):
        return tlens.attribute(frozen)

    @tlens.register_method("one token")
    def one_token(frozen, *, target=None, query=-1):
        return tlens.attribute(frozen, target, method="relp", query=query)

    options = {"methods": ["tensorlens target"], "fractions": (0, 0.5), "replacement": 3} | options
    with pytest.raises(InvalidInputError, match=message):
        evaluate.perturbation(model, some_tokens(batch=2, pos=6), **options)


def test_a_method_that_fails_is_named(model):
    def broken(frozen):
        raise ValueError("no such thing")

    with pytest.raises(MethodError, match="method 'mine' failed: ValueError: no such thing") as caught:
        evaluate.completeness(model, some_tokens(batch=1, pos=5), {"mine": broken})
    assert isinstance(caught.value.__cause__, ValueError)
