"""The checks before a release see what they are for; the texts that go with it agree."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tensorlens_tl as tlens
from scripts import release, rounding

ROOT = Path(__file__).parents[1]
BUNDLED = sorted((ROOT / "tensorlens_tl" / "demo").rglob("*.safetensors"))


def test_texts_agree():
    assert list(release.texts_agree(tlens.__version__)) == []


def test_another_version_is_noticed():
    assert len(list(release.texts_agree("99.0"))) == 2


def test_words_are_counted_without_addresses_and_code():
    assert release.words("One [two](three/four.md).\n\n```python\nfive()\n```\n") == (2, 5)


def test_links_become_absolute_once():
    text = "![A](docs/_static/explorer.png) [B](docs/howto) [C](docs/methods.md) [D](https://x.y/z) [E](#part)"
    address = "https://host.example/owner/name"
    changed = release.absolute(text, address)
    assert re.findall(r"\(([^)]*)\)", changed) == [
        f"{address}/raw/main/docs/_static/explorer.png",
        f"{address}/tree/main/docs/howto",
        f"{address}/blob/main/docs/methods.md",
        "https://x.y/z",
        "#part",
    ]
    assert release.absolute(changed, address) == changed


def test_urls_are_written_once():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    once = release.with_urls(text, "https://host.example/owner/name")
    again = release.with_urls(once, "https://host.example/owner/other")
    assert tomllib.loads(once)["project"]["urls"]["Issues"] == "https://host.example/owner/name/issues"
    assert again == once.replace("owner/name", "owner/other")


def test_too_large_a_wheel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "DIST", tmp_path)
    monkeypatch.setattr(release.subprocess, "run", lambda *args, **options: type("Run", (), {"returncode": 0}))
    (tmp_path / "a.tar.gz").write_bytes(b"")
    (tmp_path / "a.whl").write_bytes(b"0" * (release.MOST_BYTES + 1))
    assert ["at most 8" in fault for fault in release.archives_fit()] == [True]


def test_weights_are_rounded_to_the_nearest():
    """As numpy rounds the mantissa, ties to even; twice changes nothing, and half precision stays as it is."""
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 4096)
    ties = 1 + (2 * torch.arange(64) + 1) * 2.0**-rounding.SIGNIFICANT
    weights = torch.cat([weights, ties, -ties, torch.zeros(1)])
    mantissa, exponent = np.frexp(weights.double().numpy())
    nearest = np.ldexp(np.round(np.ldexp(mantissa, rounding.SIGNIFICANT)), exponent - rounding.SIGNIFICANT)
    rounded = rounding.rounded(weights)
    assert rounded.tolist() == nearest.tolist()
    assert torch.equal(rounding.rounded(rounded), rounded)
    assert torch.equal(rounding.rounded(weights.half()), weights.half())


def test_a_file_of_weights_is_rounded_in_place(tmp_path):
    path, weights = tmp_path / "a.safetensors", {"a": torch.tensor([[0.1, 0.2]]), "b": torch.ones(2)}
    save_file(weights, path, {"format": "pt"})
    rounding.main([str(path)])
    assert torch.equal(load_file(path)["a"], rounding.rounded(weights["a"]))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    rounding.main(["--half", str(path)])
    assert load_file(path)["b"].dtype == torch.float16


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_bundled_weights_are_rounded(path):
    for name, weight in load_file(path).items():
        assert torch.equal(rounding.rounded(weight), weight), f"{name}: python -m scripts.rounding {path}"


def test_licences_of_data_are_named():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (expression,) = re.findall(r'^license = "(.*)"', text, flags=re.M)
    data = {path.stem for path in (ROOT / "LICENSES").iterdir()}
    assert set(expression.split(" AND ")) == {"MIT", *data}


def test_the_workflow_runs_every_part():
    """The public run is that of `.ci/run`, in parts; other Pythons are jobs of their own."""
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    (parts,) = re.findall(r"part: \[(.*)\]", workflow)
    private = re.findall(r"^make (.*)", (ROOT / ".ci/run").read_text(encoding="utf-8"), flags=re.M)
    targets = {word for line in private for word in line.split() if re.fullmatch(r"[a-z][\w-]*", word)}
    assert {*parts.split(", "), "test-pythons"} == targets
    assert ".ci/numeric" in workflow
