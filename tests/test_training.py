"""The scripts that made the embedded models run from end to end: a few steps, and what comes out can be loaded."""

import json
import sys
from pydoc_data.topics import topics

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.demo import train, train_small


@pytest.fixture(scope="module")
def few_documents():
    """The language reference alone; reading the whole standard library takes most of the time."""
    return [str(text) for text in topics.values()]


def run(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train", *map(str, arguments)])
    module.main()


@pytest.mark.parametrize("name", list(train_small.STEPS))
def test_small_models(name, tmp_path, monkeypatch, few_documents):
    monkeypatch.setattr(train_small, "python_documents", lambda: few_documents)
    run(train_small, monkeypatch, name, tmp_path, "--steps", 2)
    facts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert facts["steps"] == 2
    model = tlens.load_demo_model(name=name, folder=tmp_path)
    made, shipped = (dict(m.named_parameters()) for m in (model, tlens.load_demo_model(name=name)))
    assert {key: value.shape for key, value in made.items()} == {key: value.shape for key, value in shipped.items()}


def test_the_language_model(tmp_path, monkeypatch, few_documents):
    monkeypatch.setattr(train, "python_documents", lambda: few_documents)
    monkeypatch.setattr(train, "held_out_loss", lambda model, stream: 0.0 * len(stream))  # half a minute each
    with pytest.raises(SystemExit, match="no induction after 1 steps"):
        run(train, monkeypatch, tmp_path, "--most-induction-steps", 1)
    monkeypatch.setattr(train, "learn_induction", lambda *_: 0)
    run(train, monkeypatch, tmp_path, "--text-steps", 2)
    facts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert facts["text_steps"] == 2
    model = tlens.load_demo_model(folder=tmp_path)
    assert torch.isfinite(model(model.to_tokens("Return the value"))).all()


def test_documents_are_split_by_their_text():
    documents = [f"document {number} " * 20 for number in range(500)]
    training, unseen = train.split_documents(documents)
    assert sorted(training + unseen) == sorted(documents)
    assert 5 < len(unseen) < 50
    again = train.split_documents(documents[::-1])
    assert set(again[1]) == set(unseen)
