"""Which rows does a data set hold? Read once, checked, and turned into token ids."""

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl._arguments import nearest, plain
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import chats_in, token_rows
from tensorlens_tl.registry import PER_PROMPT

UNKNOWN_ID = "id"
"""The column of ids that may be missing: rows are then known by their number."""

FILES = {".jsonl": "lines of JSON", ".csv": "CSV with a header", ".parquet": "Parquet"}
"""The files that are read, by the ends of their names."""

if TYPE_CHECKING:
    import pandas as pd

    RowSource = str | os.PathLike[str] | pd.DataFrame | Iterable[Mapping[str, Any] | str | Sequence[int]]
    """A file, a data frame, a Hugging Face data set, or an iterable of tables, texts or lists of token ids."""
else:
    RowSource = Any  # what holds no rows is refused by `read_rows`


@dataclass(frozen=True)
class Reading:
    """How rows become prompts; see `attribute_dataset` for each option."""

    text: str = "text"
    id: str = UNKNOWN_ID
    columns: Mapping[str, str] | None = None
    truncate: bool = False
    prepend_bos: bool | None = None


@dataclass
class Rows:
    """The rows of a data set in its order.

    Attributes:
        ids: their names, all different.
        tokens: each row's token ids; empty where the row is no prompt.
        errors, dropped: by row number, what is wrong, and how many tokens were cut off.
        options: each option's values from a column, such as targets.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    options: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def prompts(self) -> list[int]:
        """The rows that are prompts, by number."""
        good = [row for row in range(len(self)) if row not in self.errors]
        if not good:
            first = min(self.errors)
            raise InvalidInputError(f"rows: none is a prompt. Row {first}: {self.errors[first]}.")
        return good

    def record(self, row: int) -> dict[str, Any]:
        """What is known of a row before it is run, by the columns of a shard."""
        return {
            "id": self.ids[row], "row": row, "token_ids": self.tokens[row], "dropped_tokens": self.dropped.get(row, 0),
        }  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """All that a run depends on: how many rows there are, and digests of ids, token ids and each column."""
        parts: dict[str, Iterable[bytes]] = {
            "ids": (json.dumps(name).encode() for name in self.ids),
            "tokens": (
                json.dumps([self.errors.get(row), len(tokens)]).encode()
                + np.ascontiguousarray(tokens, dtype="<i8").tobytes()
                for row, tokens in enumerate(self.tokens)
            ),
        }
        for option in sorted(self.options):
            parts[option] = (json.dumps(repr(value)).encode() for value in self.options[option])
        digests = dict[str, str]()
        for name, values in parts.items():
            digest = hashlib.sha256()
            for value in values:
                digest.update(value)
            digests[name] = digest.hexdigest()
        return {"rows": len(self)} | digests


def check_columns(columns: Mapping[str, str] | None, options: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` for a column of an option that rows cannot have, or that is also given."""
    names = set(columns or {})
    unknown = sorted(names - set(PER_PROMPT))
    if unknown:
        near = nearest(unknown[0], PER_PROMPT)
        raise InvalidInputError(f"columns: {unknown[0]!r} is not one of {', '.join(PER_PROMPT)}.{near}")
    both = sorted(names & set(options))
    if both:
        raise InvalidInputError(f"columns: {both[0]!r} is in a column and an option as well; leave one out.")


def read_rows(view: ModelView, source: RowSource, reading: Reading) -> Rows:
    """Every row of a data set, tokenized; a row that is no prompt has an error instead."""
    columns = reading.columns or {}
    rows = Rows(options={option: [] for option in columns})
    number_of = dict[str, int]()
    has_ids = False
    for number, row in enumerate(_tables(source, reading.text)):
        if number == 0:
            reading = _present(row, reading)
            has_ids = reading.id in row
        name = _name(row.get(reading.id), reading.id, number) if has_ids else str(number)
        if name in number_of:
            raise InvalidInputError(
                f"rows: {reading.id}={name!r} names row {number_of[name]} and row {number}; ids must differ, also as "
                "texts (1 and '1' do not). Name another column with id=, or leave the ids out."
            )
        number_of[name] = number
        rows.ids.append(name)
        for option, column in columns.items():
            rows.options[option].append(plain(row.get(column)))
            if row.get(column) is None:
                rows.errors[number] = f"{column}: missing, and it is this row's {option}"
        rows.tokens.append(_prompt(view, row, number, reading, rows))
    if not len(rows):
        raise InvalidInputError("rows: there is none. Pass a file, a data set, or a list of texts.")
    return rows


def _prompt(view: ModelView, row: Mapping[str, Any], number: int, reading: Reading, rows: Rows) -> np.ndarray:
    """One row's token ids, cut to the context where they may be; `rows` gets its error, or how many were cut off."""
    value = row.get(reading.text)
    try:
        ids = _token_ids(view, value, reading.text, reading.prepend_bos)
    except TensorLensError as error:
        rows.errors[number] = str(error)
        return np.zeros(0, dtype=np.int64)
    excess = len(ids) - view.n_ctx
    if excess <= 0:
        return ids
    if not reading.truncate:
        rows.errors[number] = (
            f"{reading.text}: {len(ids)} tokens, but the context of this model is {view.n_ctx}; shorten the text, or "
            "pass truncate=True to leave out its end"
        )
        return ids
    rows.dropped[number] = excess
    special = getattr(view.tokenizer, "all_special_ids", None) or ()
    if isinstance(value, str) and int(ids[-1]) in special:  # an encoder's [SEP] stays
        return np.concatenate([ids[: view.n_ctx - 1], ids[-1:]])
    return ids[: view.n_ctx]


def _tables(source: Any, text: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(source, str | os.PathLike):
        source = file_rows(Path(source))
    elif isinstance(source, Mapping):
        raise InvalidInputError("rows: one table is one row; pass a list of them, or a file, or a data set.")
    elif hasattr(source, "to_dict") and hasattr(source, "columns"):
        source = source.to_dict("records")
    if not isinstance(source, Iterable):
        raise InvalidInputError(f"rows: {type(source).__name__} holds no rows; pass a file, a data set, or a list.")
    for row in source:
        if not isinstance(row, Mapping):
            row = {text: row}
        yield row


def check_rows(path: Path, reading: Reading) -> None:
    """Raise `InvalidInputError` before a model is loaded: no such file, an unreadable first row, or no such column."""
    for row in islice(file_rows(path), 1):
        _present(row, reading)


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


def _present(row: Mapping[str, Any], reading: Reading) -> Reading:
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


def _name(value: Any, column: str, number: int) -> str:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInputError(f"rows: {column} of row {number} is {value!r}; an id is a text or an integer.")
    _check_unicode(str(value), f"rows: {column} of row {number}")
    return str(value)


def _check_unicode(value: str, column: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{column}: {value!r} is no valid text ({error.reason})") from None


def _token_ids(view: ModelView, value: Any, column: str, prepend_bos: bool | None) -> np.ndarray:
    """One row's token ids."""
    value = plain(value)
    if value is None or (isinstance(value, float) and value != value):  # a data frame's gap
        raise InvalidInputError(f"{column}: missing")
    if isinstance(value, bytes | bytearray):
        raise InvalidInputError(f"{column}: bytes, not text; decode them first, as with .decode('utf-8')")
    if isinstance(value, str):
        if not value.strip():
            raise InvalidInputError(f"{column}: empty")
        _check_unicode(value, column)
    elif not isinstance(value, Sequence) or not value:
        raise InvalidInputError(f"{column}: {value!r} is neither a text, nor messages of a chat, nor token ids")
    elif chats_in(value) is None and any(isinstance(entry, str | Sequence) for entry in value):
        raise InvalidInputError(f"{column}: a list of texts or of lists is no one prompt; pass a text, or token ids")
    ids = np.asarray(token_rows(view, value, prepend_bos)[0].cpu(), dtype=np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= view.d_vocab:
        raise InvalidInputError(f"{column}: token ids are 0 to {view.d_vocab - 1}, not {ids.min()} to {ids.max()}")
    return ids
