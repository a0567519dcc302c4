"""Files that are not ours, damaged, forged or newer: a clear error, and never anything that runs."""

import json
import os
import pickle
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import some_tokens
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import tensorlens_tl as tlens
from tensorlens_tl.evaluate import Evaluation
from tensorlens_tl.results import storage
from tensorlens_tl.testing import tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of one file of ours."""
    frozen = tlens.freeze(tiny_model("bridge/gpt2"), some_tokens())
    return tlens.attribute(frozen, query="all").save(tmp_path_factory.mktemp("files") / "result").read_bytes()


@pytest.fixture
def path(saved, tmp_path):
    (tmp_path / "result").write_bytes(saved)
    return tmp_path / "result"


def parts(path):
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def forge(path, change):
    """A file whose digest fits: changed by somebody who knows the format."""
    tensors, metadata = parts(path)
    facts = json.loads(metadata["facts"])
    change(tensors, facts)
    text = json.dumps(facts)
    metadata |= {"facts": text, "digest": storage._digest(tensors, text)}
    save_file(tensors, path, metadata=metadata)


FORGERIES = {
    "no scores": lambda t, f: t.pop("scores"),
    "no tokens": lambda t, f: f.pop("tokens"),
    "scores of another shape": lambda t, f: t.update(scores=t["scores"][:, :2].contiguous()),
    "a mask of another length": lambda t, f: t.update(mask=t["mask"][:, :2].contiguous()),
    "a mask of numbers": lambda t, f: t.update(mask=t["mask"].double()),
    "scores of integers": lambda t, f: t.update(scores=t["scores"].long()),
    "queries outside": lambda t, f: t.update(queries=t["queries"] + 100),
    "a bias of another shape": lambda t, f: t.update(bias=torch.zeros(3)),
    "a total of another shape": lambda t, f: t.update(total=torch.zeros(2, 5)),
    "too few prompts": lambda t, f: f.update(tokens=f["tokens"][:1]),
    "too few tokens": lambda t, f: f.update(tokens=[row[:2] for row in f["tokens"]]),
    "tokens that are no text": lambda t, f: f.update(tokens=[[1] * 6] * 2),
    "tokens that are a number": lambda t, f: f.update(tokens=7),
    "axes of another number": lambda t, f: f.update(axes=["batch", "key"]),
    "axes of other names": lambda t, f: f.update(axes=["batch", "to", "from"]),
    "axes twice": lambda t, f: f.update(axes=["batch", "key", "key"]),
    "axes that are none": lambda t, f: f.update(axes=None),
    "options that are no table": lambda t, f: f.update(options=[1]),
    "queries that are yes or no": lambda t, f: t.update(queries=t["queries"].bool()),
    "word starts that are numbers": lambda t, f: f.update(word_starts=[[1] * 6] * 2),
    "axes in another order": lambda t, f: f.update(axes=["batch", "key", "query"]),
    "layers of another shape": lambda t, f: t.update(layers=torch.zeros(3, 2)),
    "a tensor too many": lambda t, f: t.update(__reduce__=torch.ones(1)),
    "no target": lambda t, f: f.update(target=None),
    "a target that is a number": lambda t, f: f.update(target=3),
    "sums that are a text": lambda t, f: f.update(additive="yes"),
    "provenance that is a list": lambda t, f: f.update(provenance=["x"]),
    "axes of any length": lambda t, f: f.update(axes={"$range": [0, 10**15, 1]}),
    "a tuple of any length": lambda t, f: f.update(axes={"$tuple": {"$range": [0, 10**15, 1]}}),
    "a set of any length": lambda t, f: f.update(options={"x": {"$set": {"$range": [0, 10**15, 1]}}}),
    "a tensor of any length": lambda t, f: f.update(options={"x": {"$tensor": [{"$range": [0, 10**15, 1]}]}}),
    "pairs of any length": lambda t, f: f.update(options={"x": {"$pairs": [{"$range": [0, 10**15, 1]}]}}),
    "a prompt of any length": lambda t, f: f.update(tokens=[{"$range": [0, 10**15, 1]}] * 2),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_files(path, forgery):
    forge(path, FORGERIES[forgery])
    with pytest.raises(tlens.FileFormatError, match=r"not a readable Attribution|no Attribution has"):
        tlens.Attribution.load(path)


EVALUATION_FORGERIES = {
    "no values": lambda t, f: t.pop("values"),
    "values of another shape": lambda t, f: t.update(values=t["values"][:, :1].contiguous()),
    "curves of another length": lambda t, f: t.update(curves=t["curves"][..., :2].contiguous()),
    "no axis": lambda t, f: t.pop("axis"),
    "no methods": lambda t, f: f.pop("methods"),
    "metrics that are a list": lambda t, f: f.update(metrics=["mrr"]),
    "units that are a number": lambda t, f: f.update(units=3),
    "a metric that is neither": lambda t, f: f.update(metrics={"mrr": "up"}),
    "no metrics": lambda t, f: f.update(metrics={}),
    "methods that are a text": lambda t, f: f.update(methods="ab"),
    "a method twice": lambda t, f: f.update(methods=["a", "a"]),
    "reasons that are no text": lambda t, f: f.update(skipped={"x": 1}),
    "whole numbers": lambda t, f: t.update(values=t["values"].long()),
    "an axis of two rows": lambda t, f: t.update(axis=torch.rand(2, 2)),
    "an axis name that is a number": lambda t, f: f.update(axis_name=1),
    "settings that are no table": lambda t, f: f.update(settings=[1]),
    "a tensor too many": lambda t, f: t.update(scores=torch.ones(1)),
}


@pytest.mark.parametrize("forgery", EVALUATION_FORGERIES)
def test_forged_evaluations(tmp_path, forgery):
    values, curves = torch.rand(1, 2, 3), torch.rand(1, 2, 3, 4)
    whole = Evaluation("x", values, {"mrr": True}, ["a", "b"], list("123"), curves, torch.rand(4), "fraction")
    path = whole.save(tmp_path / "result")
    assert torch.equal(Evaluation.load(path).values, values)
    forge(path, EVALUATION_FORGERIES[forgery])
    with pytest.raises(tlens.FileFormatError, match=r"not a readable Evaluation|no Evaluation has"):
        Evaluation.load(path)


def changed_scores(path):
    tensors, metadata = parts(path)
    tensors["scores"][0, 0, 0] += 1e-9
    save_file(tensors, path, metadata=metadata)


def changed_facts(path):
    tensors, metadata = parts(path)
    metadata["facts"] = metadata["facts"].replace("first-choice", "runner-up")
    save_file(tensors, path, metadata=metadata)


def changed_metadata(**changes):
    def change(path):
        tensors, metadata = parts(path)
        metadata = {name: value for name, value in (metadata | changes).items() if value is not None}
        save_file(tensors, path, metadata=metadata)

    return change


DAMAGES = {
    "scores changed": (changed_scores, "digest does not fit"),
    "facts changed": (changed_facts, "digest does not fit"),
    "no digest": (changed_metadata(digest=None), "not a readable"),
    "newer": (changed_metadata(version="2"), "newer than this library"),
    "no version of ours": (changed_metadata(version="one"), "not a readable"),
    **{f"version {text!r}": (changed_metadata(version=text), "never was") for text in ("0", "-1", " 1", "01", "")},
    "no version": (changed_metadata(version=None), "not a readable"),
    "foreign": (changed_metadata(format="pt"), "not one that this library saved"),
    "nothing": (lambda path: path.write_bytes(b""), "not a readable"),
    "text": (lambda path: path.write_text("scores: 1\n" * 100), "not a readable"),
    "a pickle": (lambda path: torch.save({"scores": torch.ones(1)}, path), "not a readable"),
    "weights": (lambda path: save_file({"scores": torch.ones(1)}, path), "not one that this library saved"),
    "nested without end": (
        lambda path: save_file({}, path, metadata=dict(zip(
            ("format", "version", "facts", "digest"),
            ("tensorlens_tl.Attribution", "1", "[" * 10**5, storage._digest({}, "[" * 10**5)), strict=True,
        ))),
        "not a readable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(path, damage):
    change, message = DAMAGES[damage]
    change(path)
    with pytest.raises(tlens.FileFormatError, match=message) as raised:
        tlens.Attribution.load(path)
    assert "result" in str(raised.value)  # which file


@given(st.data())
def test_truncated_anywhere(saved, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "result"
    path.write_bytes(saved[: data.draw(st.integers(0, len(saved) - 1))])
    with pytest.raises(tlens.FileFormatError):
        tlens.Attribution.load(path)


@given(st.data())
def test_any_flipped_byte_is_noticed_or_harmless(saved, tmp_path_factory, data):
    """Nothing but our own error, or the very same result (a byte of padding)."""
    where = data.draw(st.integers(0, len(saved) - 1))
    flipped = bytearray(saved)
    flipped[where] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("flip") / "result"
    path.write_bytes(bytes(flipped))
    try:
        loaded = tlens.Attribution.load(path)
    except tlens.FileFormatError:
        return
    path.write_bytes(saved)
    own = tlens.Attribution.load(path)
    assert torch.equal(loaded.scores, own.scores)
    assert (loaded.tokens, loaded.options, loaded.provenance) == (own.tokens, own.options, own.provenance)


def test_nothing_in_a_file_runs(path, monkeypatch):
    """A pickle that would run code is refused before anything unpickles it."""

    class Bomb:
        def __reduce__(self):
            return (os.putenv, ("TLENS_BOMB", "1"))

    path.write_bytes(pickle.dumps(Bomb()))
    monkeypatch.setattr("torch.load", None)
    with pytest.raises(tlens.FileFormatError):
        tlens.Attribution.load(path)
    assert "TLENS_BOMB" not in subprocess.run(["env"], capture_output=True, text=True, check=True).stdout


def test_what_the_system_says_stays_its_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        tlens.Attribution.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        tlens.Attribution.load(tmp_path)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("step", ["pathlib.Path.write_bytes", "os.replace"])
def test_saving_is_one_step(path, saved, monkeypatch, error, step):
    """Whatever goes wrong, the old file is whole and nothing is left beside it."""
    result = tlens.Attribution.load(path)

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(step, fail)
    with pytest.raises(type(error)):
        result.save(path)
    assert path.read_bytes() == saved
    assert os.listdir(path.parent) == ["result"]


def test_a_file_is_read_once(path, monkeypatch):
    """Another process may replace or remove it as soon as it was read."""
    scores = tlens.Attribution.load(path).scores
    read_bytes = Path.read_bytes

    def read_and_lose(file):
        content = read_bytes(file)
        file.unlink()
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_lose)
    assert torch.equal(tlens.Attribution.load(path).scores, scores)


def test_threads_that_save_one_path(path):
    """Whoever is last has saved it, whole, and nobody fails."""
    result = tlens.Attribution.load(path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: result.save(path), range(200)))
    assert torch.equal(tlens.Attribution.load(path).scores, result.scores)
    assert os.listdir(path.parent) == ["result"]


def test_every_file_has_the_mode_that_the_user_wants(path):
    result = tlens.Attribution.load(path)
    modes = {stat.S_IMODE(result.save(path.with_name(name)).stat().st_mode) for name in ("a", "a.safetensors", "a.csv")}
    path.with_name("b").touch()
    assert modes == {stat.S_IMODE(path.with_name("b").stat().st_mode)}


def test_what_would_not_load_is_not_saved(path):
    result = tlens.Attribution.load(path)
    object.__setattr__(result, "target", None)
    with pytest.raises(tlens.InvalidInputError, match=r"Attribution\.target is a NoneType, not str"):
        result.save(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(path, saved):
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(OSError, match="ermission"):
            tlens.Attribution.load(path).save(path)
    finally:
        path.parent.chmod(stat.S_IRWXU)
    assert path.read_bytes() == saved


def test_half_precision_and_other_axes_are_kept(tmp_path):
    result = tlens.Attribution(
        torch.rand(1, 2, 3, 3).bfloat16(), [["a", "ü\n", ""]], torch.arange(3)[None], torch.ones(1, 3).bool(), "x",
        axes=("batch", "head", "query", "key"), options={"layers": slice(0, 2), "heads": {1: [0]}},
    )  # fmt: skip
    again = tlens.Attribution.load(result.save(tmp_path / "x"))
    assert torch.equal(again.scores, result.scores)
    assert again.tokens == result.tokens


def test_shared_tensors_can_be_saved(model_named, tmp_path):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    scores = frozen.operator().in_out().scores
    result = tlens.Attribution.of(frozen, scores, method="x", query=-1, layers=scores[None])
    assert torch.equal(tlens.Attribution.load(result.save(tmp_path / "x")).layers[0], scores)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("why.csv", "a CSV table, which pandas.read_csv reads"),
        ("why.json", "a JSON file"),
        ("why.parquet", "a Parquet table, which pandas.read_parquet reads"),
        ("why.html", "an HTML page"),
        ("why.pdf", "a PDF figure"),
        ("why.svg", "an SVG figure"),
        ("why.png", "a PNG figure"),
    ],
)
def test_what_holds_no_tensors_is_named_and_not_loaded(name, message, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    why = tlens.attribute(tlens.load_demo_model(), "Return the value of the")
    path = why.save(tmp_path / name)
    with pytest.raises(tlens.errors.FileFormatError, match=r"ends in \.safetensors") as raised:
        tlens.Attribution.load(path)
    assert message in str(raised.value)
    assert "Safetensor" not in str(raised.value)


def test_an_empty_file_is_named_as_one(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"")
    with pytest.raises(tlens.errors.FileFormatError, match="an empty file"):
        tlens.Terms.load(path)


def test_a_file_of_tensors_loads_whatever_its_length_begins_with(tmp_path):
    """The length of its facts may be the byte of a brace."""
    terms = tlens.circuits.logit_attribution(tlens.freeze(tlens.load_demo_model(), "Return the"), 5)
    path = terms.save(tmp_path / "terms")
    written = path.read_bytes()
    length = int.from_bytes(written[:8], "little")
    longer = (length // 256 + 1) * 256 + ord("{")
    header = written[8 : 8 + length].ljust(longer)
    path.write_bytes(longer.to_bytes(8, "little") + header + written[8 + length :])
    assert path.read_bytes()[:1] == b"{"
    assert tlens.Terms.load(path).names == terms.names
