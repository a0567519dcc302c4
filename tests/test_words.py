"""Names that say what a thing is: no identifier of the package is made of filler words."""

import ast
from pathlib import Path

import pytest

import tensorlens_tl

ROOT = Path(tensorlens_tl.__file__).parent
FILLERS = {"made", "asked", "found", "met", "told", "kept", "own", "there", "whatever"}
EXCEPTIONS: dict[str, str] = {}
"""Identifiers that may stay, each with its reason."""


def identifiers(tree):
    """The names that a module defines, with their lines: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def parts(identifier):
    """The words of a name in snake case; a class's are not split."""
    return set(identifier.lower().strip("_").split("_"))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_identifiers_name_things(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    fillers = {
        f"{path.relative_to(ROOT.parent)}:{line}: {name}"
        for name, line in identifiers(tree)
        if parts(name) & FILLERS and name not in EXCEPTIONS
    }
    assert not fillers


def test_every_kind_of_name_is_read():
    source = """
class Made:
    kept: int
    def asked(self, told, *found, own=0, **met):
        self.there = [whatever for whatever in told]
        for last_made in found:
            with self as kept_file:
                try:
                    import os as own_os
                except OSError as own_error:
                    pass
        match told:
            case [first_found, *rest_found]:
                pass
"""
    names = {name for name, _ in identifiers(ast.parse(source)) if parts(name) & FILLERS}
    assert names == {
        "Made", "kept", "asked", "told", "found", "own", "met", "there", "whatever", "last_made", "kept_file",
        "own_os", "own_error", "first_found", "rest_found",
    }  # fmt: skip


def test_exceptions_still_exist():
    defined = {
        name for path in ROOT.rglob("*.py") for name, _ in identifiers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert set(EXCEPTIONS) <= defined
