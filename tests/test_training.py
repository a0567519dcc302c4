"""The scripts that made the bundled models run from end to end: a few steps, and what comes out can be loaded."""

import json
import sys
from pydoc_data.topics import topics

import pytest
import torch

import tensorlens_tl as tlens
from scripts import train, train_dictionary, train_induction, train_reversal, train_small, train_vision, train_whitened

pytestmark = pytest.mark.whole  # every script reads and trains something


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
    model = tlens.load_demo_model(name, folder=tmp_path)
    made, shipped = (dict(m.named_parameters()) for m in (model, tlens.load_demo_model(name)))
    assert {key: value.shape for key, value in made.items()} == {key: value.shape for key, value in shipped.items()}


def test_dictionaries(tmp_path, monkeypatch, few_documents):
    """A few steps bring the error down, and what the script saves is what `load_demo_dictionary` reads."""
    monkeypatch.setattr(train_dictionary, "python_documents", lambda: few_documents)
    monkeypatch.setattr(train_dictionary, "ASLEEP", 2)
    monkeypatch.setattr(train_dictionary, "ROWS", 4)
    explained = []
    for steps in (1, 25):
        train_dictionary.main([str(tmp_path), "--steps", str(steps)])
        facts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
        assert facts["steps"] == steps
        explained.append([facts[hook]["explained"] for hook in tlens.demo.DICTIONARIES])
    for hook, first, more in zip(tlens.demo.DICTIONARIES, *explained, strict=True):
        assert first + 0.05 < more < shipped_facts()[hook]["explained"]
        made, shipped = (tlens.load_demo_dictionary(hook, folder=folder) for folder in (tmp_path, None))
        assert made.W_enc.shape == shipped.W_enc.shape
        assert made.W_dec.norm(dim=1).allclose(torch.ones(512), atol=1e-2)


def shipped_facts():
    return json.loads((tlens.demo.DICTIONARY_FOLDER / "training.json").read_text(encoding="utf-8"))


def test_whitened_models(tmp_path, monkeypatch, few_documents):
    """Every row from the same batches; what the script saves is what `load_demo_model` reads."""
    monkeypatch.setattr(train_whitened, "python_documents", lambda: few_documents)
    sizes = {"width": 8, "larger": 12, "context": 16, "batch": 2, "held-out": 4, "steps": 3, "every": 2}
    small = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    train_whitened.main([str(tmp_path), *small])
    facts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    runs = facts["runs"]
    assert [(run["row"], run["seed"]) for run in runs] == [
        (row, seed) for seed in (0, 1) for row in train_whitened.ROWS
    ]
    standard, larger, whitened, control = runs[:4]
    assert standard["parameters"] + 4 * 8 * 8 == whitened["parameters"] == control["parameters"] < larger["parameters"]
    assert standard["loss"][0] == pytest.approx(whitened["loss"][0], abs=2e-4)  # both begin as the same model
    assert whitened["steps"] == [0, 2, 3]
    assert len(whitened["radii"]) == 2
    model = tlens.load_demo_model("whitened", folder=tmp_path / "whitened")
    assert model.blocks[1].whitening.M.weight.abs().max() > 0
    text = tmp_path / "text.txt"
    text.write_text("a whole other text of some length, " * 30, encoding="utf-8")
    train, unseen, known = train_whitened.characters(text)
    assert len(train) == 9 * len(unseen)
    assert known == sorted({*text.read_text(encoding="utf-8"), "\n", "?"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "no.txt"], "no such file"),
        (["--larger", "8", "--width", "8"], "--larger the larger one"),
        (["--context", "100000"], "needs more"),
    ],
)
def test_what_cannot_be_trained_is_said_at_once(words, message, monkeypatch, few_documents, tmp_path, capsys):
    monkeypatch.setattr(train_whitened, "python_documents", lambda: few_documents)
    with pytest.raises(SystemExit):
        train_whitened.main([str(tmp_path), *words])
    assert message in capsys.readouterr().err


def test_the_whitened_model_is_the_best_of_what_was_trained_like_it():
    folder = tlens.demo.FOLDERS["whitened"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    last = {(run["row"], run["seed"]): run["loss"][-1] for run in facts["runs"]}
    seeds = {seed for _, seed in last}
    assert len(seeds) >= 2
    assert all(last["whitened", seed] + 0.05 < last["standard", seed] for seed in seeds)
    model = tlens.load_demo_model("whitened")
    tokens = tlens.demo.held_out_prompts(model, 64, 127)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) < 1.8
    assert model.tokenizer.decode(model.to_tokens("If the file")[0]).strip() == "If the file"


def test_the_vision_model(tmp_path):
    train_vision.main([str(tmp_path), "--steps", "2"])
    facts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    made, shipped = (tlens.load_demo_model("digits", folder=folder) for folder in (tmp_path, None))
    assert facts["steps"] == 2
    assert facts["held_out_accuracy"] == round(accuracy(made), 4) != round(accuracy(shipped), 4)
    shapes = [{key: value.shape for key, value in model.named_parameters()} for model in (made, shipped)]
    assert shapes[0] == shapes[1]
    config = [(folder / "config.json").read_text() for folder in (tmp_path, tlens.demo.FOLDERS["digits"])]
    assert json.loads(config[0]) | {"transformers_version": None} == json.loads(config[1]) | {
        "transformers_version": None
    }


def accuracy(model):
    images, labels = tlens.demo.digit_images()
    with torch.no_grad():
        return float((model(images).argmax(-1) == labels).float().mean())


def test_the_reversal_model(tmp_path):
    train_reversal.main([str(tmp_path), "--steps", "2"])
    facts, shipped = (
        json.loads((folder / "training.json").read_text(encoding="utf-8"))
        for folder in (tmp_path, tlens.demo.FOLDERS["reversal"])
    )
    assert (facts["steps"], facts["parameters"]) == (2, shipped["parameters"])
    assert facts["held_out_accuracy"] < 0.1 < 0.95 < shipped["held_out_accuracy"]
    model = tlens.load_demo_model("reversal", folder=tmp_path)
    words = tlens.demo.reversal_words()
    assert bool(train_reversal.is_held_out_word(words).all())
    assert not bool(train_reversal.is_held_out_word(words + torch.tensor([0, 0, 0, 0, 0, 1])).any())
    logits, answers = train_reversal.predicted(model.original_model, words[:3])
    assert answers.tolist() == [[*word[::-1], 2] for word in words[:3].tolist()]
    assert torch.allclose(
        logits,
        model(train_reversal.started(words[:3]), decoder_input_ids=train_reversal.started(answers[:, :-1])),
        atol=1e-5,
    )


def test_the_checkpoints_of_induction(tmp_path, monkeypatch):
    monkeypatch.setattr(train_induction, "CHECKPOINTS", (0, 2))
    train_induction.main([str(tmp_path), "--steps", "3"])
    facts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert list(facts["losses"]) == ["0", "2", "3"]
    assert facts["losses"]["3"] == facts["held_out_loss"] != facts["losses"]["0"]
    models = tlens.demo.induction_checkpoints(folder=tmp_path)
    assert list(models) == [0, 2, 3]
    shipped = tlens.demo.induction_checkpoints()
    shapes = [{name: value.shape for name, value in one.named_parameters()} for one in (models[3], shipped[2200])]
    assert shapes[0] == shapes[1]
    assert not torch.equal(models[0].W_E, models[3].W_E)


def test_rows_are_repeated_and_what_is_repeated_is_learnt():
    rows = train_induction.repeated_rows(torch.Generator().manual_seed(0))
    for _ in range(20):
        tokens, period = next(rows)
        assert tokens.shape == (64, train_induction.CONTEXT)
        assert torch.equal(tokens[:, 1 + period :], tokens[:, 1:-period])
        assert all(len(set(row)) == period for row in tokens[:, 1 : 1 + period].tolist())
        assert int(tokens[:, 1:].min()) >= 2


def test_digits_are_distorted_a_little():
    images, labels = (part[:64] for part in tlens.demo.digit_images(held_out=False))
    first, second = (train_vision.distorted(images, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(first, train_vision.distorted(images, torch.Generator().manual_seed(0)))
    assert (first - second).abs().amax((1, 2, 3)).min() > 0.05  # each is resampled
    assert 0 <= float(first.min()) <= float(first.max()) <= 1
    with torch.no_grad():
        read = tlens.load_demo_model("digits")(first).argmax(-1)
    assert float((read == labels).float().mean()) > 0.9  # they still show their digits


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
