"""Rows of files, as tables of their columns. Nothing heavy is imported, so that a wrong name costs no time."""

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
"""The column of ids that may be missing: rows are then known by their number."""

FILES = {".jsonl": "lines of JSON", ".csv": "CSV with a header", ".parquet": "Parquet"}
"""The files that are read, by the ends of their names."""


@dataclass(frozen=True)
class Reading:
    """How rows become prompts; see `attribute_dataset` for each option."""

    text: str = "text"
    id: str = UNKNOWN_ID
    columns: Mapping[str, str] | None = None
    truncate: bool = False
    prepend_bos: bool | None = None


def check_rows(path: Path, reading: Reading) -> None:
    """Raise `InvalidInputError` before a model is loaded: no such file, an unreadable first row, or no such column."""
    for row in islice(file_rows(path), 1):
        present(row, reading)


def file_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    """The rows of a file, each as a table of its columns."""
    kind = path.suffix.lower()
    if kind not in FILES:
        known = ", ".join(f"{end} ({what})" for end, what in FILES.items())
        raise InvalidInputError(f"rows: cannot read {path}; a file is one of {known}. One text is rows=[text].")
    if not path.is_file():
        raise InvalidInputError(f"rows: there is no file {path}.")
    return _rows_in(path, kind)


def _rows_in(path: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    try:
        yield from {".jsonl": _of_jsonl, ".csv": _of_csv, ".parquet": _of_parquet}[kind](path)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"rows: {path} is not UTF-8 ({error}); save it as UTF-8.") from error


def _of_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:  # other programs write a byte-order mark
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInputError(f"rows: line {number} of {path} is no JSON ({error}).") from error
            if not isinstance(row, dict):
                raise InvalidInputError(f"rows: line {number} of {path} is {type(row).__name__}, not a table {{...}}.")
            yield row


def _of_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            names = reader.fieldnames or []
            repeated = [name for name in names if names.count(name) > 1]
            if repeated:
                raise InvalidInputError(f"rows: {path} has two columns {repeated[0]!r}.")
            for row in reader:
                if None in row:  # what csv calls fields without a column: most often a comma that is not quoted
                    raise InvalidInputError(
                        f"rows: line {reader.line_num} of {path} has more fields than the header; put texts with "
                        "commas in quotes."
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
        raise InvalidInputError(f"rows: {path} is no Parquet file, or damaged ({error}).") from error


def present(row: Mapping[str, Any], reading: Reading) -> Reading:
    """The columns to read; raises `InvalidInputError` where a row lacks one.

    Without a column of the default name, prompts may be in one that is called ``"prompt"``.
    """
    if reading.text == Reading.text and reading.text not in row and "prompt" in row:
        reading = replace(reading, text="prompt")
    columns = [reading.text, *(reading.columns or {}).values()]
    if reading.id != UNKNOWN_ID:
        columns.append(reading.id)
    missing = [name for name in columns if name not in row]
    if missing:
        hint = nearest(missing[0], map(str, row))
        if {"role", "content"} <= set(row):
            hint = " Messages are one chat, which is one row: pass [messages]."
        elif missing[0] == reading.text and (reading.text == Reading.text or not hint):
            longest = max(row, key=lambda name: len(str(row[name])), default="prompt")
            hint = f" Say which one holds the prompts, such as text={longest!r}."
        raise InvalidInputError(f"rows: there is no column {missing[0]!r}, only {', '.join(map(repr, row))}.{hint}")
    return reading
