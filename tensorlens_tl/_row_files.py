"""Reading rows from files. Imports nothing heavy, so that a misspelt file or column name fails at once."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tensorlens_tl._arguments import nearest
from tensorlens_tl.errors import InvalidInputError

UNKNOWN_ID = "id"
"""The default id column; rows are numbered where it is missing."""

FILES = {".jsonl": "lines of JSON", ".csv": "CSV with a header", ".parquet": "Parquet"}
"""Supported file types by ending."""


@dataclass(frozen=True)
class Reading:
    """How rows become prompts; see `attribute_dataset` for the options."""

    text: str = "text"
    id: str = UNKNOWN_ID
    columns: Mapping[str, str] | None = None
    truncate: bool = False
    prepend_bos: bool | None = None


def check_rows(path: Path, reading: Reading) -> None:
    """Raise `InvalidInputError`, before a model loads, for a missing file, unreadable first row or unknown column."""
    for row in islice(file_rows(path), 1):
        present(row, reading)


def file_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    """Yield the rows of a file as mappings from column to value."""
    kind = path.suffix.lower()
    if kind not in FILES:
        known = ", ".join(f"{end} ({what})" for end, what in FILES.items())
        raise InvalidInputError(f"rows: cannot read {path}; a file is one of {known}. Pass one text as rows=[text].")
    if not path.is_file():
        raise InvalidInputError(f"rows: there is no file {path}.")
    return _rows_in(path, kind)


def _rows_in(path: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    try:
        yield from {".jsonl": _of_jsonl, ".csv": _of_csv, ".parquet": _of_parquet}[kind](path)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"rows: {path} is not UTF-8 ({error}); save it as UTF-8.") from error


def _of_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:  # skips a byte-order mark, which some programs write
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInputError(f"rows: line {number} of {path} is not valid JSON ({error}).") from error
            if not isinstance(row, dict):
                raise InvalidInputError(f"rows: line {number} of {path} is {type(row).__name__}, not an object.")
            yield row


def _of_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            names = reader.fieldnames or []
            repeated = [name for name in names if names.count(name) > 1]
            if repeated:
                raise InvalidInputError(f"rows: {path} has two columns named {repeated[0]!r}.")
            for row in reader:
                if None in row:  # where csv puts surplus fields, usually because of an unquoted comma
                    raise InvalidInputError(
                        f"rows: line {reader.line_num} of {path} has more fields than the header; quote texts that "
                        "contain commas."
                    )
                yield row
        except csv.Error as error:
            raise InvalidInputError(
                f"rows: line {reader.line_num} of {path} cannot be read ({error}); long texts go in JSONL or Parquet."
            ) from error


def _of_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InvalidInputError(f"rows: {path} is not a Parquet file, or is damaged ({error}).") from error


def present(row: Mapping[str, Any], reading: Reading) -> Reading:
    """Return the columns to read; raise `InvalidInputError` if the row lacks one of them.

    If the default text column is missing, ``"prompt"`` is read instead.
    """
    if reading.text == Reading.text and reading.text not in row and "prompt" in row:
        reading = replace(reading, text="prompt")
    columns = [reading.text, *(reading.columns or {}).values()]
    if reading.id != UNKNOWN_ID:
        columns.append(reading.id)
    missing = [name for name in columns if name not in list(row)]  # a list as a name has no hash
    if missing:
        hint = nearest(missing[0], map(str, row))
        if {"role", "content"} <= set(row):
            hint = " The messages of one chat are one row: pass [messages]."
        elif missing[0] == reading.text and (reading.text == Reading.text or not hint):
            longest = max(row, key=lambda name: len(str(row[name])), default="prompt")
            hint = f" Name the column that holds the prompts, such as text={longest!r}."
        raise InvalidInputError(f"rows: there is no column {missing[0]!r}, only {', '.join(map(repr, row))}.{hint}")
    return reading
