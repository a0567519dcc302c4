"""Dictionaries on the command line: ``tensorlens-tl explore --dictionary FOLDER --labels FILE``."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

import tensorlens_tl as tlens
from tensorlens_tl.commands import main
from tensorlens_tl.commands.explore import named_dictionary, named_labels

uvicorn = pytest.importorskip("uvicorn")

METADATA = {
    "sae_lens_version": "6.21.0",
    "dataset_path": "text",
    "hook_name": "blocks.2.hook_resid_post",
    "model_class_name": "HookedTransformer",
    "hook_head_index": None,
    "context_size": 128,
    "seqpos_slice": [None],
    "model_from_pretrained_kwargs": {},
    "prepend_bos": True,
    "exclude_special_tokens": False,
    "sequence_separator_token": "bos",
    "disable_concat_sequences": False,
}
CONFIGURATION = {
    "d_in": 128,
    "d_sae": 512,
    "dtype": "float32",
    "device": "cpu",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": METADATA,
}


def saved(folder, **changes):
    """The bundled dictionary as SAELens' ``save_model`` writes one."""
    folder.mkdir(exist_ok=True)
    bundled = tlens.load_demo_dictionary()
    weights = {name: getattr(bundled, name).contiguous() for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    save_file(weights, folder / "sae_weights.safetensors")
    configuration = CONFIGURATION | {"architecture": "topk", "k": bundled.k} | changes
    (folder / "cfg.json").write_text(json.dumps(configuration), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model():
    return tlens.load_demo_model()


@pytest.mark.parametrize("of_file", [False, True])
def test_a_folder_of_saelens_has_the_features_of_the_object(model, tmp_path, of_file):
    name = saved(tmp_path / "sae")
    if of_file:
        name = name / "sae_weights.safetensors"
    frozen = tlens.freeze(model, tlens.demo.PROMPT)
    active = tlens.circuits.features(frozen, named_dictionary(str(name), model))
    expected = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
    assert torch.equal(active.index, expected.index)
    assert torch.allclose(active.reconstruction, expected.reconstruction)
    assert active.hook == "blocks.2.hook_resid_post"


def test_the_weights_take_the_models_dtype(tmp_path):
    model = tlens.load_demo_model(dtype=torch.float64)
    for name in (str(saved(tmp_path / "sae")), "demo", "demo:blocks.0.hook_resid_post"):
        dictionary = named_dictionary(name, model)
        assert dictionary.W_enc.dtype == torch.float64
        tlens.circuits.features(tlens.freeze(model, "If the"), dictionary)


def without(folder, name):
    (folder / name).unlink()
    return folder


def written(folder, name, content):
    (folder / name).write_bytes(content)
    return folder


WRONG = {
    "no folder": (lambda folder: folder / "nothing", "there is no file"),
    "no configuration": (lambda folder: without(saved(folder), "cfg.json"), "there is no file .*cfg.json"),
    "no weights": (lambda folder: without(saved(folder), "sae_weights.safetensors"), "there is no file"),
    "broken weights": (lambda folder: written(saved(folder), "sae_weights.safetensors", b"x"), "it cannot be read"),
    "broken configuration": (lambda folder: written(saved(folder), "cfg.json", b"{"), "it cannot be read"),
    "a list": (lambda folder: written(saved(folder), "cfg.json", b"[]"), "cfg.json is no JSON object"),
    "gated": (lambda folder: saved(folder, architecture="gated"), "only ReLU, JumpReLU and TopK"),
    "unknown": (lambda folder: saved(folder, lateral=0.5), "lateral, which is not supported"),
    "one head": (lambda folder: saved(folder, metadata=METADATA | {"hook_head_index": 3}), "hook_head_index"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_folders_are_refused_by_name(model, tmp_path, name):
    write, message = WRONG[name]
    with pytest.raises(tlens.InvalidInputError, match=f"^--dictionary .*{message}"):
        named_dictionary(str(write(tmp_path / "sae")), model)


def test_no_such_bundled_dictionary(model):
    with pytest.raises(tlens.InvalidInputError, match="load_demo_dictionary: hook='nowhere'"):
        named_dictionary("demo:nowhere", model)


def test_labels_are_in_the_order_of_the_dictionaries(tmp_path):
    file = tmp_path / "labels.csv"
    file.write_text("feature,label\n357,forms of to be\n", encoding="utf-8")
    assert named_labels([], 2) is None
    assert named_labels(["-", str(file)], 2) == [{}, {357: "forms of to be"}]
    with pytest.raises(tlens.InvalidInputError, match="--labels: 1 for 2 --dictionary"):
        named_labels([str(file)], 2)
    with pytest.raises(tlens.InvalidInputError, match="there is no such file"):
        named_labels([str(tmp_path / "none.csv")], 1)


def test_the_command_shows_features_with_their_labels(tmp_path, monkeypatch, capsys):
    sessions = []
    explorer = tlens.explorer.Explorer.__init__

    def noted(page, session, port):
        sessions.append(session)
        explorer(page, session, port)

    monkeypatch.setattr("tensorlens_tl.explorer.Explorer.__init__", noted)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: sockets[0].close())
    labels = tmp_path / "labels.json"
    labels.write_text('{"357": "forms of to be"}', encoding="utf-8")
    words = ["explore", "--dictionary", str(saved(tmp_path / "sae")), "--labels", str(labels), "--dictionary", "demo"]
    assert main(words) == 1
    assert "1 for 2 --dictionary" in capsys.readouterr().err
    assert main([*words, "--labels", "-"]) == 0
    (session,) = sessions
    assert session.about()["dictionaries"] == ["blocks.2.hook_resid_post"] * 2
    views = [session.view("features", {"text": tlens.demo.PROMPT, "dictionary": number}) for number in (0, 1)]
    assert views[0]["top"][0]["label"] == "forms of to be"
    assert views[1]["top"][0]["label"] == ""
    assert [row["score"] for row in views[0]["top"]] == pytest.approx([row["score"] for row in views[1]["top"]])


def test_a_missing_folder_ends_the_command_before_the_page(tmp_path, capsys):
    assert main(["explore", "--dictionary", str(tmp_path / "none")]) == 1
    assert re.search(r"--dictionary .*none: there is no file", capsys.readouterr().err)
