"""What is wrong with names in the arguments, before torch and a model are imported, which takes many seconds."""

import argparse
import re
import sys
from contextlib import suppress
from pathlib import Path

from tensorlens_tl._arguments import nearest
from tensorlens_tl._method_names import built_in_methods, published_elsewhere, unknown_method
from tensorlens_tl.errors import InvalidInputError, RegistryError

NO_FOLDER = re.compile(r"(demo|program)(:.*)?|\w[\w.-]*(/\w[\w.-]*)?")
"""What ``--model`` takes besides folders: bundled models, and names as the hub has them, with one slash at most."""


def check(args: argparse.Namespace) -> None:
    """Raise an error for a folder, a file or a method that does not exist, with the nearest name."""
    for flag in ("model", "tuned"):
        _check_model(flag, getattr(args, flag, None))
    for flag in ("prompts", "pairs", "data"):
        path = getattr(args, flag, None)
        if path is not None and not path.exists():
            raise InvalidInputError(f"--{flag} {path}: {_missing(path)}")
        if flag != "data" and path is not None and path.is_dir():
            raise InvalidInputError(f"--{flag} {path}: that is a folder; name a file in it.")
    _check_methods(args)


def _check_model(flag: str, name: str | None) -> None:
    """Raise `InvalidInputError` for a folder that does not exist, where the name can be nothing but a folder's."""
    if name is None or NO_FOLDER.fullmatch(name):
        return
    path = Path(name)
    if path.is_file():
        raise InvalidInputError(f"--{flag} {name}: that is a file; name the folder of the model.")
    if not path.is_dir():
        raise InvalidInputError(f"--{flag} {name}: {_missing(path)}")


def _missing(path: Path) -> str:
    """Which part of a path does not exist, and what is nearly called so."""
    while not path.parent.is_dir():
        path = path.parent
    present = []
    with suppress(OSError):  # a folder that one may not read
        present = [entry.name for entry in path.parent.iterdir()]
    return f"there is no {path.name!r} in {path.parent.absolute()}.{nearest(path.name, present)}"


def _check_methods(args: argparse.Namespace) -> None:
    """Raise `RegistryError` for a method that does not exist, unless others may have registered it, or will."""
    if not hasattr(args, "imports") or args.imports or "tensorlens_tl.registry" in sys.modules:
        return
    if published_elsewhere():
        return
    names = [args.method] if hasattr(args, "method") else getattr(args, "methods", None) or ()
    known = [*built_in_methods(), *args.more_methods]
    for name in names:
        method = name.partition(" ")[0]  # labels of evaluations go on with options
        if method not in known:
            raise RegistryError(unknown_method(method, known))
