"""The paper's experiments: published numbers as data, each experiment on a small model, and the command."""

import json

import numpy as np
import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.commands import main, reproduce
from tensorlens_tl.evaluate.paper import PAPER_METHODS
from tensorlens_tl.evaluate.scorers import STANDARD

TEXTS = ["Return the value of the first item that is not found in the list. " * 3, "too short"]
LENGTH = 12
"""The least that loses a token when 5 % of them are replaced."""


@pytest.fixture(scope="module")
def encoder():
    return tlens.load_demo_model("encoder")


@pytest.fixture(scope="module")
def made(encoder):
    """Each experiment on little data, run once."""
    done = {}

    def get(name):
        if name not in done:
            experiment = evaluate.EXPERIMENTS[name]
            if experiment.reads == "images":
                run = (tlens.load_demo_model("digits"), demo.digit_images()[0]), {"n": 2}
            elif experiment.reads == "relations":
                run = (tlens.load_demo_model("relations"), [relation("factual"), relation("linguistic")]), {}
            else:
                model = tlens.load_demo_model() if experiment.demo == "language" else encoder
                run = (model, TEXTS), {"length": LENGTH}
            done[name] = evaluate.reproduce(name, *run[0], **run[1])
        return done[name]

    return get


def relation(category):
    """A few samples of a shipped relation, under a category of LRE's data set."""
    whole = evaluate.shipped_relations()["country capital"]
    return evaluate.Relation(category, whole.prompt_templates, whole.samples[:5], category)


# ------------------------------------------------------------------------------------- published numbers


def test_published_numbers_are_complete():
    """Tables whole, of figures the areas that the text states, and each with its source."""
    numbers = evaluate.published()
    sizes = {name: len(evaluate.published(name)) for name in evaluate.EXPERIMENTS}
    assert sizes == {
        "table-1": 3 * 2 * 11, "table-2": 2 * 10, "figure-3": 10, "figure-4": 10,
        "figure-5": 0, "figure-6": 0, "figure-7": 0,
    }  # fmt: skip
    assert len(set(numbers)) == len(numbers) == sum(sizes.values())
    for number in numbers:
        experiment = evaluate.EXPERIMENTS[number.name]
        assert number.source.startswith("TensorLens (2026), ")
        assert number.model in experiment.what
        assert number.data == experiment.data
        assert number.metric in experiment.metrics
        assert number.method in experiment.methods
        assert number.hub == number.hub.casefold()
        assert number.bound in "=<>"
        assert number.value is None or 0 < number.value < 10
    none = {(n.model, n.method) for n in numbers if n.value is None}
    parallel = ("Pythia-1B", "Phi-1.5")  # their blocks have no place for a second norm after attention
    assert none == {(model, method) for model in parallel for method in ("Rollout, GlbEnc", "Mean, GlbEnc")}
    assert set(PAPER_METHODS.values()) <= set(STANDARD)
    assert not any("biases" in label for label in PAPER_METHODS.values())


@pytest.mark.parametrize(
    ("name", "model", "metric", "method", "printed"),
    [
        ("table-1", "Pythia-1B", "hs_mse", "Mean, W-AttnResLN", "3.708"),
        ("table-1", "Pico-570M", "aopc_abs", "Rollout, W-AttnResLN", "0.067"),
        ("table-1", "Phi-1.5", "hs_mse", "Mean, W-Attn", "0.905"),
        ("table-1", "Phi-1.5", "aopc_abs", "Mean, GlbEnc", "N.A"),
        ("table-2", "ModernBert-Base", "hs_mse", "Tensor, In+Out", "0.112"),
        ("table-2", "Gemma3-270M", "hs_mse", "Mean, GlbEnc", "0.021"),
        ("figure-3", "DeiT-Base", "hs_mse", "Tensor, In+Out", ">0.82"),
        ("figure-4", "BERT-Base", "hs_mse", "Tensor, Norm", "0.101"),
        ("figure-4", "BERT-Base", "hs_mse", "Rollout, Attn", "<0.09"),
    ],
)
def test_published_numbers_are_the_papers(name, model, metric, method, printed):
    (number,) = [n for n in evaluate.published(name) if (n.model, n.metric, n.method) == (model, metric, method)]
    assert str(number) == printed


def test_published_numbers_of_the_same_model_come_alone():
    for model, expected in [
        ("EleutherAI/pythia-1b", {"Pythia-1B"}),
        ("microsoft/phi-1_5", {"Phi-1.5"}),
        ("EleutherAI/pythia-1.4b", {"Pythia-1B", "Pico-570M", "Phi-1.5"}),
    ]:
        assert {n.model for n in evaluate.published("table-1", model)} == expected
    assert {n.model for n in evaluate.published("table-2", "answerdotai/ModernBERT-base")} == {"ModernBert-Base"}


# ------------------------------------------------------------------------------------- experiments


ALIKE = ("figure-6", "figure-7")
"""Run as figure-4 and figure-3 are; the command runs one of them below."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if name in ALIKE else ()) for name in evaluate.EXPERIMENTS]
)
@pytest.mark.few(2)
def test_every_experiment_runs(name, made, tmp_path, capsys):
    result, experiment = made(name), evaluate.EXPERIMENTS[name]
    result.show()
    printed = capsys.readouterr().out
    assert name in printed
    assert all(str(number) in printed for number in result.published)
    frame = result.to_dataframe()
    assert frame["mean"].notna().all()
    assert result.evaluation.settings["reproduces"] == name
    if name != "figure-5":
        assert tuple(result.evaluation.methods) == experiment.methods
        assert result.evaluation.axis.tolist() == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
        assert len(frame) == max(len(result.published), len(experiment.methods))
    loaded = evaluate.Reproduction.load(result.save(tmp_path / "result"))
    assert loaded.to_dataframe().equals(frame)
    assert "<table" in loaded.to_html()


def test_texts_are_cut_to_one_length(made):
    """Table 1 by hand on the cut text: the same call of `perturbation`; the paper's AOPC is the absolute change."""
    model = tlens.load_demo_model()
    tokens = model.to_tokens(TEXTS[0])[:, :LENGTH]
    found = made("table-1").evaluation
    assert found.settings["data"] == "1 texts of 12 tokens, 1 too short"
    asked = {"metrics": ["hs_mse", "aopc_abs"], "replacement": "mean"}
    again = evaluate.perturbation(model, tokens, ["tensorlens target"], **asked)
    row = found.values[:, found.methods.index("Tensor, In+Class")]
    torch.testing.assert_close(row, again.values[:, 0], rtol=1e-6, atol=1e-9)


def test_an_encoder_is_measured_where_its_blocks_end(encoder, made):
    """The final state of the first token, before the prediction head; a text ends in its separator also when cut."""
    whole = encoder.tokenizer(TEXTS[0])["input_ids"]
    tokens = torch.tensor([[*whole[: LENGTH - 1], encoder.tokenizer.sep_token_id]])
    found = made("figure-4").evaluation
    options = {"query": 0, "metrics": ["hs_mse", "logit"]}
    output, unembedded = (
        evaluate.perturbation(encoder, tokens, ["tensorlens in_out"], hidden=hidden, **options)
        for hidden in ("output", "unembedded")
    )
    row = found.values[0, found.methods.index("Tensor, In+Out")]
    torch.testing.assert_close(row, output.values[0, 0], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(row, unembedded.values[0, 0], rtol=0.01)
    torch.testing.assert_close(output.values[1], unembedded.values[1], rtol=1e-6, atol=1e-9)  # logits do not change
    assert made("table-2").evaluation.settings["query"] == -1
    with pytest.raises(tlens.InvalidInputError, match="hidden='last'"):
        evaluate.perturbation(encoder, tokens, ["random"], hidden="last")


def test_methods_that_a_model_lacks_are_left_out(model_named, capsys):
    """GlbEnc on parallel blocks, as in the paper."""
    made = evaluate.reproduce("table-1", model_named("bridge/neox"), some_tokens(2, LENGTH), n=1)
    assert len(made.evaluation.units) == 1
    assert set(made.evaluation.skipped) == {"Rollout, GlbEnc", "Mean, GlbEnc"}
    frame = made.to_dataframe().set_index("method")
    assert frame.loc["Mean, GlbEnc", "mean"].isna().all()
    made.show()
    printed = capsys.readouterr().out
    assert "left out: Mean, GlbEnc" in printed
    assert "N.A" in printed


def test_orders_are_compared_where_numbers_are_printed(made):
    frame, ranks = made("table-2").to_dataframe(), made("table-2").rank_correlations()
    assert set(ranks) == {("hs_mse", "ModernBert-Base"), ("hs_mse", "Gemma3-270M")}
    rows = frame[frame["published model"] == "Gemma3-270M"]
    ours, theirs = rows["mean"].rank(), rows["published"].rank()
    assert ranks["hs_mse", "Gemma3-270M"] == pytest.approx(ours.corr(theirs))
    assert made("figure-4").rank_correlations() == {}  # bounds only


def test_relations_follow_the_papers_protocol(made):
    result = made("figure-5").evaluation
    assert result.units == ["factual"]
    assert result.skipped == {"linguistic": "category 'linguistic', not in the paper"}
    assert [result.settings[name] for name in ("m", "shots", "splits", "top_k")] == [3, 2, 6, 20]
    assert result.methods == ["tensorlens mean operator", "LRE layer 0, β=2.5", "random"]
    assert made("figure-5").published == []
    with pytest.raises(tlens.InvalidInputError, match="no relation of the categories"):
        evaluate.reproduce("figure-5", tlens.load_demo_model("relations"), [relation("linguistic")])


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("table-3", TEXTS, {}, "no 'table-3'; use one of 'table-1'"),
        ("table-1", None, {}, "data is missing; .* WikiText-103"),
        ("table-1", "a text", {}, "data is one text"),
        ("table-1", [], {}, "data is empty"),
        ("table-1", TEXTS, {}, "none of the 2 texts has 128 tokens"),
        ("table-1", TEXTS, {"length": 300}, "the context of this model is 256"),
        ("table-1", TEXTS, {"length": 0}, "length=0"),
        ("table-1", torch.zeros(2, 20), {}, r"data is \(2, 20\) of torch.float32"),
        ("table-1", [[1, 2], [3]], {}, "neither texts nor one array"),
        ("table-1", [TEXTS[0], 5], {}, "neither texts nor one array"),
        ("table-1", some_tokens(2, 20), {"length": 12}, "length=12"),
        ("table-1", TEXTS, {"n": 0}, "n=0"),
        ("figure-3", TEXTS, {}, "about images; .* reads tokens"),
        ("figure-4", TEXTS, {"length": LENGTH}, "in a causal model no other reaches"),
        ("figure-5", None, {"length": 12}, "figure-5 has no such option"),
        ("figure-5", TEXTS, {}, "a list of Relation objects"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said_before(demo_model, name, data, options, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        evaluate.reproduce(name, demo_model, data, **options)


def test_next_tokens_need_a_causal_model(encoder):
    with pytest.raises(tlens.InvalidInputError, match="next token"):
        evaluate.reproduce("table-1", encoder, TEXTS, length=LENGTH)


def test_other_evaluations_reproduce_nothing(encoder, tmp_path):
    path = evaluate.perturbation(encoder, TEXTS[:1], ["random"]).save(tmp_path / "other")
    with pytest.raises(tlens.FileFormatError, match="no result of reproduce"):
        evaluate.Reproduction.load(path)


# ------------------------------------------------------------------------------------- the command


def test_the_command_names_every_experiment():
    assert tuple(evaluate.EXPERIMENTS) == reproduce.EXPERIMENTS


def test_the_command_on_the_embedded_model_that_fits(tmp_path, capsys):
    assert main(["reproduce", "figure-7", "-n", "2", "-o", str(tmp_path / "x.csv")]) == 0
    printed = capsys.readouterr().out
    assert "here tensorlens-demo-digits on 2 images" in printed
    assert "drawn, not printed" in printed
    assert (tmp_path / "x.csv").read_text().count("\n") == 1 + 10


@pytest.mark.whole
@pytest.mark.parametrize("name", evaluate.EXPERIMENTS)
def test_the_command_whole(name, capsys):
    """As the paper has it, 128 tokens, on the bundled models."""
    assert main(["reproduce", name]) == 0
    assert name in capsys.readouterr().out


def test_the_command_reads_files(tmp_path, encoder, monkeypatch):
    """What each experiment is given: the run itself is tested above."""
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text, "label": 1}) for text in TEXTS))
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    images = demo.digit_images()[0][:2]
    np.save(tmp_path / "images.npy", images.numpy())
    folder = tmp_path / "relations" / "factual"
    folder.mkdir(parents=True)
    facts = {"name": "capital", "prompt_templates": ["{} is in"], "samples": [{"subject": "a", "object": "b"}] * 4}
    facts |= {"prompt_templates_zs": [], "properties": {"relation_type": "factual", "symmetric": False}}
    (folder / "capital.json").write_text(json.dumps(facts))
    given = []
    monkeypatch.setattr(reproduce.shared, "loaded_model", lambda *_, **__: encoder)

    class Shown:
        def show(self):
            pass

    monkeypatch.setattr(evaluate, "reproduce", lambda name, model, data, **_: given.append(data) or Shown())
    for name, file in [
        ("table-2", "texts.jsonl"), ("figure-6", "texts.txt"), ("figure-7", "images.npy"), ("figure-5", "relations"),
        ("figure-5", "relations/factual/capital.json"),
    ]:  # fmt: skip
        assert main(["reproduce", name, "--data", str(tmp_path / file)]) == 0
    assert given[0] == given[1] == TEXTS
    assert torch.equal(given[2], images)
    for relations in given[3:]:
        assert [(r.name, r.category, len(r.samples)) for r in relations] == [("capital", "factual", 4)]
    assert main(["reproduce", "table-2", "--length", "20", "-n", "3"]) == 0
    assert given[-1].shape == (3, 20)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("one\n\ntwo\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "other.jsonl").write_text('{"review": "x"}\n')
    (tmp_path / "images.npy").write_text("no array")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "relation.json").write_text('{"relation": "capital", "pairs": []}')
    (tmp_path / "none").mkdir()
    for command, message in [
        (["table-9"], "no 'table-9'"),
        (["table-1", "--model", "demo:recall"], "data is missing"),
        (["table-1", "--data", str(tmp_path / "nothing")], "there is no 'nothing'"),
        (["table-1", "--data", str(tmp_path / "folder")], "that is a folder"),
        (["table-1", "--data", str(tmp_path / "short.txt")], "none of the 2 texts has 128 tokens"),
        (["table-1", "--data", str(tmp_path / "empty.txt")], "the file is empty"),
        (["table-1", "--data", str(tmp_path / "other.jsonl")], "no JSON with a field 'text'"),
        (["table-1", "--length", "1"], "leaves no token"),
        (["figure-3", "--data", str(tmp_path / "images.npy")], "not an array"),
        (["figure-5", "--data", str(tmp_path / "folder")], "not a relation"),
        (["figure-5", "--data", str(tmp_path / "none")], "no .json file"),
        (["table-1", "-o", str(tmp_path)], "that is a folder"),
    ]:
        assert main(["reproduce", *command]) == 1, command
        assert message in " ".join(capsys.readouterr().err.split()), command
