"""The prompts of a file: a text file's lines, or a column of a table."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorlens_tl.commands.options import PROMPTS
from tensorlens_tl.errors import InvalidInputError

COLUMNS = ("prompt", "text")
"""The columns of a table that prompts are read from, the first that it has."""

QUESTIONS = ("target", "minus", "query")
"""The columns of a table that say what is asked of each prompt."""

SHOWN = 5
"""Rows that an error lists by their numbers."""

HELP = "a text file, one prompt a line, or a .csv, .jsonl or .parquet file with a column 'prompt' or 'text'"
"""What ``--prompts`` takes, for its help."""


def prompts_of(args: argparse.Namespace, model: Any, *, most: int = PROMPTS, length: int = 48) -> Any:
    """The prompts of a file, or `most` windows of the text that a bundled model was not trained on.

    Raises:
        InvalidInputError: no such file, an empty one, a table without prompts, or a model without text.
    """
    from tensorlens_tl import demo

    if args.prompts is None:
        if args.model not in ("demo", "demo:language", "demo:encoder", "demo:whitened"):
            raise InvalidInputError(
                f"--prompts: {args.model} has no text of its own here; pass a file, a prompt a line."
            )
        return demo.held_out_prompts(model, args.n or most, length)
    return read_prompts(args.prompts)


def check_prompts(args: argparse.Namespace) -> None:
    """Raise `InvalidInputError` for a file of prompts that `read_prompts` refuses, or with `-n`: before a model is
    loaded."""
    path = getattr(args, "prompts", None)
    if path is None:
        return
    if getattr(args, "n", None) is not None:
        raise InvalidInputError("-n: it counts prompts that we make; with --prompts every line of the file is one.")
    read_prompts(path)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file; empty lines of a text file are left out.

    Raises:
        InvalidInputError: no such file, an empty one, one that is no text, a table without a column of prompts, or one
            with a prompt that is empty.
    """
    from tensorlens_tl.datasets import FILES

    if not path.is_file():
        raise InvalidInputError(f"--prompts {path}: no such file.")
    if path.suffix.lower() in FILES:
        lines = _column(path)
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"--prompts {path}: not a text file in UTF-8 ({error}).") from error
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise InvalidInputError(f"--prompts {path}: the file is empty.")
    return lines


def questions_of(path: Path | None) -> dict[str, list[Any]]:
    """What the columns `QUESTIONS` of a table say of each of its prompts; nothing of a text file, or of none.

    Raises:
        InvalidInputError: see `read_prompts`; also a row without what others have.
    """
    from tensorlens_tl.datasets import FILES

    if path is None or path.suffix.lower() not in FILES:
        return {}
    rows, _ = _rows(path)
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in QUESTIONS if name in rows[0]}
    for name, values in columns.items():
        missing = next((number for number, value in enumerate(values) if value in (None, "")), None)
        if missing is not None:
            raise InvalidInputError(
                f"--prompts {path}: prompt {missing} has no {name!r}; fill it in, or leave the column out."
            )
    return columns


def _column(path: Path) -> list[str]:
    """The column of prompts of a table."""
    rows, name = _rows(path)
    return [row[name] for row in rows]


def _rows(path: Path) -> tuple[list[Mapping[str, Any]], str]:
    """The rows of a table, and the column that their prompts are in.

    Raises:
        InvalidInputError: no such table, none with prompts, or a row whose prompt is empty.
    """
    from tensorlens_tl.datasets import file_rows

    try:
        rows = list(file_rows(path))
    except InvalidInputError as error:
        raise InvalidInputError(f"--prompts: {str(error).removeprefix('rows: ')}") from error
    names = list(rows[0]) if rows else list(COLUMNS)
    name = next((column for column in COLUMNS if column in names), "")
    if not name:
        raise InvalidInputError(
            f"--prompts {path}: its columns are {', '.join(map(repr, names))}; call the one with the prompts "
            f"{' or '.join(map(repr, COLUMNS))}."
        )
    for number, row in enumerate(rows, 1):
        text = row.get(name)
        if not isinstance(text, str):
            raise InvalidInputError(f"--prompts {path}: {name!r} of row {number} is {text!r}, no text.")
    if not rows:
        raise InvalidInputError(f"--prompts {path}: the file is empty.")
    _check_filled(path, rows, name)
    return rows, name


def _check_filled(path: Path, rows: list[Mapping[str, Any]], name: str) -> None:
    """Raise `InvalidInputError` for empty prompts: without their rows, those that follow would have other numbers."""
    empty = [number for number, row in enumerate(rows, 1) if not row[name].strip()]
    if not empty:
        return
    which = f"row {empty[0]}"
    advice = "fill it in, or take the row out"
    if len(empty) > 1:
        which = f"rows {', '.join(map(str, empty[:SHOWN]))}"
        advice = "fill them in, or take the rows out"
    if len(empty) > SHOWN:
        which += f" and {len(empty) - SHOWN} more"
    raise InvalidInputError(
        f"--prompts {path}: {name!r} is empty in {which}; {advice}. Rows are counted from 1, without a header."
    )
