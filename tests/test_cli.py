"""The command line, as a user types it."""

import subprocess
import sys

import pytest

import tensorlens_tl as tlens
from tensorlens_tl.commands import main


def test_demo_writes_a_page_that_needs_no_network(tmp_path, capsys):
    page = tmp_path / "demo.html"
    assert main(["demo", "-o", str(page)]) == 0
    printed = capsys.readouterr().out
    for part in ("bias (no token)", "total", "proof", "forward passes"):
        assert part in printed
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "http" not in text
    assert text.count('class="line rove"') == 3


def test_demo_escapes_its_text(tmp_path):
    page = tmp_path / "demo.html"
    assert main(["demo", "<img src=x onerror=alert(1)> is not found", "-o", str(page)]) == 0
    assert "<img src=x" not in page.read_text(encoding="utf-8")


def test_module_and_console_script_are_the_same():
    run = subprocess.run([sys.executable, "-m", "tensorlens_tl", "methods"], capture_output=True, text=True, check=True)
    assert "tensorlens" in run.stdout


def test_methods(capsys):
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in tlens.list_methods())


@pytest.mark.parametrize("kind", [[], ["--kind", "bridge"]])
def test_verify(capsys, kind):
    assert main(["verify", *kind]) == 0
    printed = capsys.readouterr().out
    assert "supported" in printed
    assert "blocks.3" in printed


def test_verify_on_a_local_folder(capsys):
    assert main(["verify", "--model", str(tlens.demo.MODEL_FOLDER), "Return the value"]) == 0
    assert "TransformerBridge" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--target", " the"],
        ["--collapse", "norm"],
        ["--target", " the", "--minus", " a", "--query", "2"],
        ["--top", "2"],
    ],
)
def test_attribute(capsys, options):
    assert main(["attribute", "Return the value of", *options]) == 0
    assert "score" in capsys.readouterr().out


def test_attribute_saves(tmp_path):
    page, file = tmp_path / "a.html", tmp_path / "a.safetensors"
    for path in (page, file):
        assert main(["attribute", "Return the value of", "-o", str(path)]) == 0
    assert "<!doctype html>" in page.read_text(encoding="utf-8")
    assert tlens.Attribution.load(file).method == "tensorlens"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attribute", "the", "--method", "tensorlns"], "Did you mean 'tensorlens'"),
        (["attribute", "the", "--target", "two words"], "a target is one token"),
        (["attribute", ""], "empty"),
        (["verify", "--model", "no/such/folder"], "cannot be loaded"),
    ],
)
def test_errors_are_printed_without_a_traceback(capsys, arguments, message):
    assert main(arguments) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "Traceback" not in printed
