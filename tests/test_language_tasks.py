"""Tasks for trained language models: which pairs are used, and what is said of a model that does not do the task.

A stand-in answers some prompts by what the texts say; `tests/real` has trained models.
"""

import random
import re
from types import SimpleNamespace

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl import evaluate
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate import language

SEVERAL = {" Rocky": 2, " Vienna": 2, " Laura": 2}
"""Words of several tokens."""


class Words:
    """A tokenizer with a token for each word, but some."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        words = re.findall(r" ?\w+|\W", text)
        pieces = [f"{word}{piece}" for word in words for piece in range(SEVERAL.get(word, 1))]
        return SimpleNamespace(input_ids=[self.ids.setdefault(piece, len(self.ids)) for piece in pieces])


def recorded(task, answers, tokenizer):
    def draw(rng):
        pair = task(rng)
        for text, (answer, *_) in ((pair[0], pair[2]), (pair[1], pair[3])):
            answers[tuple(tokenizer(text, False).input_ids)] = tokenizer(answer, False).input_ids[0]
        return pair

    return draw


@pytest.fixture
def stand_in(monkeypatch):
    """A model that answers two of three clean prompts, and every corrupted one."""
    tokenizer, answers = Words(), {}

    def predicted(tokens):
        found = [answers[tuple(row)] if sum(row) % 3 else -1 for row in tokens.tolist()]
        return torch.tensor(found), None

    tasks = {name: recorded(task, answers, tokenizer) for name, task in language.TASKS.items()}
    monkeypatch.setattr(language, "TASKS", tasks)
    monkeypatch.setattr(language, "ModelView", lambda model: SimpleNamespace(tokenizer=tokenizer))
    monkeypatch.setattr(
        language, "tokenized", lambda view, texts, _: [tokenizer(text, False).input_ids for text in texts]
    )
    monkeypatch.setattr(language, "freeze", lambda model, tokens, verify: tokens)
    monkeypatch.setattr(language, "predictions", predicted)
    return answers


@pytest.mark.parametrize("name", language.TASKS)
def test_pairs_align_and_are_those_that_are_answered(name, stand_in):
    task = evaluate.language_task(None, name, 6)
    assert len(task.pairs) == 6 < task.aligned <= task.tried
    assert all(sum(row) % 3 for row in [*task.pairs.clean.tolist(), *task.pairs.corrupted.tolist()])
    for tokens, answers in ((task.pairs.clean, task.pairs.target), (task.pairs.corrupted, task.pairs.minus)):
        assert [stand_in[tuple(row)] for row in tokens.tolist()] == answers.tolist()
    again = evaluate.language_task(None, name, 6)
    assert torch.equal(again.pairs.clean, task.pairs.clean)
    sources = task.known.sources
    assert torch.equal(sources, task.pairs.clean != task.pairs.corrupted)
    if name in language.SOURCED:
        assert bool((task.pairs.clean[sources] == task.pairs.target).all())


def test_an_attractor_has_the_other_number():
    rng = random.Random(0)
    for _ in range(50):
        clean, corrupted, answer, other = language.TASKS["agreement"](rng)
        assert {*answer, *other} == {" is", " are"}
        assert clean.endswith("s") == (answer == [" is"])  # the last noun, which the verb does not follow
        (place,) = [
            number for number, (a, b) in enumerate(zip(clean.split(), corrupted.split(), strict=True)) if a != b
        ]
        assert clean.split()[place].endswith("s") == (answer == [" are"])


def test_a_later_year_is_right_for_one_of_the_two_prompts():
    rng = random.Random(0)
    for _ in range(50):
        *texts, answers, others = language.TASKS["greater than"](rng)
        decades = [int(re.search(r"17(\d)9", text)[1]) for text in texts]
        for decade, right in zip(decades, (answers, others), strict=True):
            assert right
            assert all(int(digit) > decade for digit in right)
        assert not {*answers} & {*others}


def test_a_model_that_does_not_do_a_task_is_said_to():
    demo = tlens.load_demo_model()
    with pytest.raises(InvalidInputError, match="name='counting'"):
        evaluate.language_task(demo, "counting")
    with pytest.raises(InvalidInputError, match="prompts=0"):
        evaluate.language_task(demo, "facts", 0)
    with pytest.raises(InvalidInputError, match=r"facts: of \d+ pairs of prompts, \d+ have one length .* answers 0 of"):
        evaluate.language_task(demo, "facts")
