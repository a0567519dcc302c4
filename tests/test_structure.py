"""Packages and their folders have faces: others import what an `__init__` names, and nothing past it."""

import ast
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import tensorlens_tl

ROOT = Path(tensorlens_tl.__file__).parent
FOLDERS = sorted(
    ".".join(path.parent.relative_to(ROOT.parent).parts)
    for path in ROOT.glob("*/*/__init__.py")
    if path.parent.parent.name != "demo"
)

PACKAGES = sorted(f"tensorlens_tl.{path.parent.name}" for path in ROOT.glob("*/__init__.py"))
OPEN = {
    "algebra": {"bias_spreading", "memory", "numerics", "positions", "probes", "progress"},
    "circuits": {"compare", "effects", "graph", "scores", "stream", "weights"},
    "datasets": {"work"},
    "drawing": {"charts", "heat_maps", "marks", "page", "terminal"},
    "models": {"lifecycle", "mixers", "names", "offload", "parameters", "sublayers", "writing"},
    "passes": {"attention_scores", "inputs", "live", "operator", "proof", "replacement", "target", "texts"},
    "results": {"exchange", "statistics", "storage"},
}
"""Modules that other packages import by name, which says what they are about."""


@cache
def imports(path):
    """The modules that a file imports names from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("folder", FOLDERS)
def test_nobody_imports_past_a_folders_face(folder):
    past = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in ROOT.rglob("*.py")
        if not ".".join(path.relative_to(ROOT.parent).parts).startswith(folder + ".")
        for module in imports(path)
        if module.startswith(folder + ".")
    }
    assert not past


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_package_imports_past_a_packages_face(package):
    name = package.split(".")[1]
    allowed = {package, *(folder for folder in FOLDERS if folder.startswith(package + "."))}
    allowed |= {f"{package}.{module}" for module in OPEN.get(name, ())}
    past = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != name
        for module in imports(path)
        if (module + ".").startswith(package + ".") and module not in allowed
    }
    assert not past


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_is_called_as_a_name_of_its_folders_face(folder):
    """`from folder import name` would give the one or the other, as they were imported."""
    face = importlib.import_module(folder)
    modules = {path.stem for path in Path(face.__file__).parent.glob("*.py")}
    assert not modules & set(face.__all__)


def test_the_road_of_a_score_goes_through_what_exists():
    """CONTRIBUTING.md names each thing by the module that defines it."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## How the score of a token comes about")[2].partition("\n## ")[0]
    names = {name for name in re.findall(r"`([\w.]+)`", section) if "." in name}
    assert len(names) > 15
    for name in names:
        thing = pkgutil.resolve_name(f"tensorlens_tl.{name}")
        assert inspect.ismodule(thing) or f"{thing.__module__}.{thing.__qualname__}" == f"tensorlens_tl.{name}"


@pytest.mark.parametrize("package", [*PACKAGES, *FOLDERS])
def test_a_table_of_modules_is_of_the_modules_there_are(package):
    table = (importlib.import_module(package).__doc__ or "").partition("| module |")[2]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    folder = Path(importlib.import_module(package).__file__).parent
    files = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert not named or named == files - {"__init__"}
