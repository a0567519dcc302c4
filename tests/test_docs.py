"""The documentation: its code runs, its links lead to what they name, and nothing public is left out."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import tensorlens_tl as tlens

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts and "tutorial" not in path.parts)
HOW_TO = sorted((DOCS / "howto").glob("*.md"))
SECTIONS = ["Definition", "Source", "Cost", "When to trust it", "Deviations from the original"]
NOT_REFERENCE = {"demo.train", "demo.train_small", "testing.allocations", "__main__"}


def resolve(name):
    """The object of a dotted name; attributes of a dataclass are looked up among its fields."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("path", HOW_TO, ids=lambda path: path.stem)
def test_how_to_pages_run(path, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.S):
        code = compile(block, path.name, "exec")
        if "boot_transformers(" not in block:  # needs the hub
            exec(code, names)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_to_what_they_name(path):
    text = path.read_text(encoding="utf-8")
    for shown, target in re.findall(r"\[([^\]]+)\]\(#(tensorlens_tl[\w.]*)\)", text):
        assert resolve(target) is not None, shown
    for target in re.findall(r"\]\(([\w/.-]+\.(?:md|ipynb))\)", text):
        assert (path.parent / target).exists(), target


def test_every_formula_of_the_mathematics_is_linked():
    """Each row of a table with calls names the function that computes it."""
    lines = (DOCS / "mathematics.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and "---" not in line]
    headings = ("| what is frozen", "| name")
    assert len(rows) > 12
    for row in rows:
        assert row.startswith(headings) or "](#tensorlens_tl." in row, row


@pytest.mark.parametrize(
    "method",
    [
        name
        for name in tlens.list_methods()
        if tlens.get_method(name).function.__module__.startswith("tensorlens_tl.methods")
    ],
)
def test_every_method_has_its_page(method):
    text = (DOCS / "methods" / f"{method}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, flags=re.M) == SECTIONS
    (target,) = re.findall(r"\(#(tensorlens_tl\.methods[\w.]*)\)", text)
    assert resolve(target) is tlens.get_method(method).function
    assert f'method="{method}"' in text
    assert f"methods/{method}.md" in (DOCS / "methods.md").read_text(encoding="utf-8")


def test_every_module_is_in_the_reference():
    reference = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"automodule:: tensorlens_tl\.([\w.]+)", reference))
    modules = {m.name.removeprefix("tensorlens_tl.") for m in pkgutil.walk_packages(tlens.__path__, "tensorlens_tl.")}
    rooms = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)}
    helpers = {
        "arguments", "budget", "model_state", "probes", "selection", "storage", "circuits.embeddings",
        "report.terminal", "testing.requirements",
    }  # fmt: skip
    assert modules - rooms - helpers - NOT_REFERENCE <= listed
