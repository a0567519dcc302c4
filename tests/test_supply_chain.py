"""What comes with the package, and what it does when it is imported, built and installed."""

import csv
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LICENCES = ROOT / "docs" / "_static" / "dependencies.csv"
OFFLINE = """
import socket, json, sys, warnings
def refuse(*args, **options):
    raise AssertionError(f"the network was asked for: {args}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
"""


def python(code, **environment):
    """Run code in a fresh interpreter; returns what it printed as JSON in its last line, and its standard error."""
    hidden = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONWARNINGS")
    known = {name: value for name, value in os.environ.items() if name not in hidden}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**known, **environment}, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.strip().split("\n")[-1]), run.stderr


@pytest.mark.whole
def test_nothing_is_asked_of_the_network():
    """Neither by importing nor by freezing, attributing, drawing, saving and evaluating on the bundled model."""
    job = """
import tensorlens_tl as tlens, tempfile
model = tlens.load_demo_model()
frozen = tlens.freeze(model, "Return the value of the")
results = [tlens.attribute(frozen, method=name) for name in ("tensorlens", "rollout", "alti")]
with tempfile.TemporaryDirectory() as folder:
    tlens.Attribution.load(results[0].save(folder + "/x"))
    tlens.report.compare(results).save(folder + "/x.html")
task = tlens.evaluate.recall(3)
tlens.evaluate.known_answer(tlens.load_demo_model("recall"), task, ["rollout attention"])
tlens.testing.check_model(tlens.testing.tiny_model("bridge/gpt2"))
print(json.dumps(len(results)))
"""
    assert python(OFFLINE + "import tensorlens_tl.testing" + job)[0] == 3


def test_importing_adds_no_warning_and_nothing_heavy():
    """Beside TransformerLens: its own modules, and no library that is not needed before somebody draws or saves."""
    job = """
import json, sys, warnings
with warnings.catch_warnings(record=True):
    import transformer_lens, torch
before = set(sys.modules)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tensorlens_tl
added = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps([added, [str(w.message) for w in caught]]))
"""
    (added, caught), _ = python(job)
    assert caught == []
    assert "tensorlens_tl" in added
    assert not {"matplotlib", "scipy", "hypothesis", "pytest", "IPython", "selenium", "requests"} & set(added)


def direct_requirements():
    return [Requirement(text) for text in metadata.requires("tensorlens-tl") or ()]


def test_every_dependency_is_listed_with_its_licence():
    """Ours, of every extra, as their own metadata say; a dependency added without a line here fails."""
    with LICENCES.open(encoding="utf-8", newline="") as file:
        listed = {row["package"].strip("`"): row["licence"] for row in csv.DictReader(file)}
    named = {requirement.name for requirement in direct_requirements()} - {"tensorlens-tl"}
    assert set(listed) == named
    for name in named:
        try:
            found = metadata.metadata(name)
        except metadata.PackageNotFoundError:  # of another extra
            continue
        declared = " ".join([found.get("License-Expression") or "", *(found.get_all("Classifier") or ())])
        declared += found.get("License") or ""
        words = re.findall(r"MIT|BSD|Apache|MPL|Python", listed[name])
        assert words
        assert any(word in declared for word in words), (name, listed[name], declared)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.mark.whole
def test_archives_hold_the_package_and_nothing_else(built):
    package = ROOT / "tensorlens_tl"
    files = {
        str(path.relative_to(ROOT)) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built[1]) as archive:
        wheel = set(archive.namelist())
    assert {name for name in wheel if ".dist-info/" not in name} == files - {"tensorlens_tl/conftest.py"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    with tarfile.open(built[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert files <= inside
    assert "examples/1_first_look.ipynb" in inside
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= inside
    assert not [name for name in inside if ".venv" in name or ".git/" in name or "__pycache__" in name]


@pytest.mark.whole
def test_the_wheel_works_outside_the_checkout(built, tmp_path):
    """Installed into an empty folder and run from another: nothing may come from here."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(built[1])], check=True, capture_output=True, text=True)
    job = f"""
import json, os
os.chdir({str(tmp_path)!r})
import tensorlens_tl as tlens
frozen = tlens.freeze(tlens.load_demo_model(), "Return the value of the")
result = tlens.attribute(frozen)
print(json.dumps([tlens.__file__, float(result.gap.max()), len(result.to_html()), tlens.list_methods()]))
"""
    (file, gap, size, methods), _ = python(job, PYTHONPATH=str(site))
    assert Path(file).is_relative_to(site)
    assert gap < 1e-5
    assert size > 1000
    assert "tensorlens" in methods
