"""Types in signatures as the source has them: many are aliases that stand for what `Any` leaves open at run time.

The code checks such arguments itself, with messages that say more than a type can (`tensorlens_tl.models.protocol`).
"""

import ast
import importlib
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path

import tensorlens_tl

PACKAGE = Path(tensorlens_tl.__file__).parent


@cache
def aliases():
    """What stands below `if TYPE_CHECKING`, by module and name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for branch in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING":
                found |= {
                    (module, node.targets[0].id): re.sub(r"\b(np|os|pd|torch)\.(?=[A-Z])", "", ast.unparse(node.value))
                    for node in branch.body
                    if isinstance(node, ast.Assign)
                }
    return found


@cache
def imports(module):
    """The module that each imported name of a module comes from."""
    nodes = ast.walk(ast.parse(inspect.getsource(importlib.import_module(module))))
    return {name.name: node.module for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}


def meaning(name, module):
    """What an alias stands for in a module; another name as it is."""
    home = imports(module).get(name, module)
    exact = aliases().get((home, name))
    below = [text for (where, alias), text in aliases().items() if alias == name and where.startswith(f"{home}.")]
    found = exact or next(iter(below), name)
    return found if found == name else spelled_out(found, home if exact else module)


def spelled_out(text, module):
    """An annotation without aliases."""
    return re.sub(r"(?<!['\"\w.])[A-Z]\w*(?!['\"\w])", lambda match: meaning(match[0], module), text)


def of(function):
    """What the source of a function says that each argument is, and what it returns."""
    function = inspect.unwrap(function)
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    if not isinstance(definition, ast.FunctionDef):
        return {}
    arguments = definition.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    written = {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}
    if definition.returns is not None:
        written["return"] = ast.unparse(definition.returns)
    return {name: spelled_out(text, function.__module__) for name, text in written.items()}
