"""Prompt pairs and known answers out of texts, aligned token by token."""

import pandas as pd
import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import evaluate
from tensorlens_tl.errors import InvalidInputError

CLEAN = ["Return the value of the file", "Set the value of the file"]
CORRUPTED = ["Return the name of the file", "Set the name of the file"]


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model(dtype=torch.float64)


def same(first, second):
    for name in ("clean", "corrupted", "target", "minus"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_lists_frames_mappings_and_files_are_the_same_pairs(model, tmp_path):
    lists = evaluate.text_pairs(model, CLEAN, CORRUPTED, target=[" is", " the"], minus=[" to", " a"])
    columns = {"clean": CLEAN, "corrupted": CORRUPTED, "target": [" is", " the"], "minus": [" to", " a"], "id": [1, 2]}
    path = tmp_path / "pairs.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    for table in (columns, pd.DataFrame(columns), path, str(path)):
        same(evaluate.text_pairs(model, table), lists)
    assert torch.equal(lists.clean, model.to_tokens(CLEAN))
    assert model.tokenizer.decode(lists.target) == " is the"
    overruled = evaluate.text_pairs(model, path, target=[" a", " is"])
    assert model.tokenizer.decode(overruled.target) == " a is"


def test_without_answers_the_model_predicts_them(model):
    corrupted = ["If the file is not found, a Module", "If the file is not found, a Value"]
    clean = ["If the file is not found, a File", "If the file is not found, a Key"]
    pairs = evaluate.text_pairs(model, clean, corrupted, minus=[" is", " is"])
    assert torch.equal(pairs.target, model(pairs.clean)[:, -1].argmax(-1))


def test_the_tokens_that_differ_are_the_sources(model):
    task = evaluate.text_answers(model, CLEAN, CORRUPTED, target=[" is", " the"])
    value = model.to_single_token(" value")
    assert bool((task.tokens[task.sources] == value).all())
    result = evaluate.known_answer(model, task, ["tensorlens target"], only_correct=False)
    assert result.values.shape[-1] == 2


def test_prompts_of_several_lengths_are_what_each_is_alone(model):
    clean = [*CLEAN, "Return the value", "Set the file of the value of the file", "Return the file"]
    corrupted = [*CORRUPTED, "Return the name", "Set the name of the value of the name", "Return the name"]
    methods = ["tensorlens target", "relp", "random"]
    for answers in (None, [" is", " the", " of", " to", " is"]):
        task = evaluate.text_answers(model, clean, corrupted, target=answers)
        together = evaluate.known_answer(model, task, methods, only_correct=False)
        assert together.values.shape[-1] == len(clean)
        random_mrr = 0.0
        for row, pair in enumerate(zip(clean, corrupted, strict=True)):
            answer = None if answers is None else answers[row : row + 1]
            alone = evaluate.text_answers(model, pair[:1], pair[1:], target=answer)
            length = alone.tokens.shape[1]
            assert torch.equal(task.tokens[row, :length], alone.tokens[0])
            assert torch.equal(task.sources[row].nonzero(), alone.sources[0].nonzero())
            assert task.answers[row] == alone.answers[0]
            result = evaluate.known_answer(model, alone, methods, only_correct=False)
            torch.testing.assert_close(together.values[:, :, row], result.values[:, :, 0], rtol=1e-9, atol=1e-12)
            random_mrr += result.settings["random_mrr"] / len(clean)
        assert together.settings["random_mrr"] == pytest.approx(random_mrr, abs=1e-12)
    chosen = task.only(torch.tensor([True, False, True, False, True]))
    assert repr(chosen) == "KnownAnswers('texts', prompts=3, pos=4 to 7)"
    half = evaluate.known_answer(model, chosen, methods, only_correct=False, minus=[" a", " to", " not"])
    assert half.values.shape[-1] == 3
    with pytest.raises(InvalidInputError, match="several lengths"):
        evaluate.compression(model, task, {"half": tlens.compress.plan(model, ratio=2)})
    with pytest.raises(InvalidInputError, match="prompt 0 has a source beyond its end"):
        evaluate.KnownAnswers("x", task.tokens, task.answers, task.sources, torch.ones(5).long())


def test_a_pair_that_does_not_align_is_shown(model):
    with pytest.raises(InvalidInputError) as error:
        evaluate.text_pairs(model, CLEAN, [CORRUPTED[0], "Set the FileNotFoundError of the file"])
    message = str(error.value)
    assert message.startswith("pair 1 does not align")
    assert "['<|bos|>', 'Set', ' the', ' value', ' of', ' the', ' file']" in message
    assert "from position 3 on: ' value' and " in message
    with pytest.raises(InvalidInputError, match="' file' and nothing"):
        evaluate.text_pairs(model, CLEAN[:1], ["Return the value of the"])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (({"clean": CLEAN, "other": CLEAN},), {}, "no column 'corrupted' among"),
        ((CLEAN,), {}, "corrupted= is missing"),
        (("no_such.csv",), {}, "no such CSV file"),
        ((CLEAN[0], CORRUPTED), {}, "two lists of texts"),
        ((CLEAN, CORRUPTED[:1]), {}, "same number of each"),
        (([], []), {}, "one at least"),
        ((CLEAN, CORRUPTED), {"target": [" is"]}, "same number of each"),
        ((CLEAN, CORRUPTED), {"target": ["FileNotFoundError", " is"]}, "target='FileNotFoundError' is"),
        (([*CLEAN, "Return the"], [*CORRUPTED, "Set the"]), {}, "several lengths"),
    ],
)
def test_what_is_no_pair_is_refused(arguments, options, message, model):
    with pytest.raises(InvalidInputError, match=message):
        evaluate.text_pairs(model, *arguments, **options)


def test_equal_prompts_have_no_source(model):
    with pytest.raises(InvalidInputError, match="pair 1: both prompts are equal"):
        evaluate.text_answers(model, CLEAN, [CORRUPTED[0], CLEAN[1]], target=[" is", " is"])


def test_a_method_whose_target_is_optional_is_given_the_prediction(model, clean_registry):
    """`target=None` in a signature is a token that the evaluation names."""

    @tlens.register_method("mine")
    def mine(frozen, *, target=None, query=-1):
        assert target is not None
        return tlens.attribute(frozen, target, method="relp", query=query)

    task = evaluate.text_answers(model, CLEAN, CORRUPTED, target=[" is", " the"])
    result = evaluate.known_answer(model, task, ["mine", "relp"], only_correct=False)
    assert torch.equal(result.values[:, 0], result.values[:, 1])
