"""Which rows does a data set hold? Read once, checked, and kept as token ids."""

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tensorlens_tl._arguments import plain
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.inputs import token_rows
from tensorlens_tl.registry import PER_PROMPT

FILES = {".jsonl": "lines of JSON", ".csv": "CSV with a header", ".parquet": "Parquet"}
"""The files that are read, by the ends of their names."""

UNKNOWN_ID = "id"
"""The column of ids that need not be there: rows are then known by their number."""


@dataclass
class Rows:
    """The rows of a data set in their own order.

    Attributes:
        ids: their names, all different.
        tokens: each row's token ids; empty where the row is no prompt.
        errors: what is wrong with a row, by its number.
        dropped: how many tokens were cut off a row, by its number.
        options: what a column says of each row, such as its target, by the option's name.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    options: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def record(self, row: int) -> dict[str, Any]:
        """What is known of a row before it is run, by the columns of a shard."""
        known = {"id": self.ids[row], "row": row, "token_ids": self.tokens[row]}
        return known | {"dropped_tokens": self.dropped.get(row, 0)}

    def identity(self) -> dict[str, Any]:
        """All that a run depends on: how many rows there are, and digests of ids, token ids and each column."""
        numbers = range(len(self))
        parts = {
            "ids": map(_as_json, self.ids),
            "tokens": (
                _as_json([self.errors.get(row), len(self.tokens[row])]) + _bytes(self.tokens[row]) for row in numbers
            ),
        }
        parts |= {option: (_as_json(repr(value)) for value in self.options[option]) for option in sorted(self.options)}
        return {"rows": len(self)} | {name: _digest(values) for name, values in parts.items()}


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _bytes(ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i8").tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def check_columns(columns: Mapping[str, str] | None, options: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` where a column is to say what no row can have of its own, or what an option says."""
    if unknown := sorted(set(columns or {}) - set(PER_PROMPT)):
        raise InvalidInputError(f"columns: {unknown[0]!r} is not one of {', '.join(PER_PROMPT)}.")
    if both := sorted(set(columns or {}) & set(options)):
        raise InvalidInputError(f"columns: {both[0]!r} is in a column and an option as well; leave one out.")


def read_rows(
    view: ModelView,
    source: Any,
    *,
    text: str = "text",
    id: str = UNKNOWN_ID,
    columns: Mapping[str, str] | None = None,
    prepend_bos: bool | None = None,
    truncate: bool = False,
) -> Rows:
    """Every row of a data set, tokenized; a row that is no prompt has an error instead.

    Args:
        view: the model, whose tokenizer and context count.
        source: a file (see `FILES`), a Hugging Face data set, a data frame, or any iterable of tables
            (``{"text": ...}``), texts, or lists of token ids.
        text: the column that holds a text, or token ids.
        id: the column that names rows; rows without ``"id"`` are named by their number.
        columns: options that each row has a value of, and the column it is in: ``{"target": "answer"}``.
        prepend_bos: as in TransformerLens; texts only.
        truncate: whether what is longer than the context loses its end.

    Raises:
        InvalidInputError: no row, no such file or column, or two rows with one id.
    """
    rows = Rows(options={option: [] for option in columns or {}})
    known = dict[str, int]()
    numbered = False
    for number, row in enumerate(_tables(source, text)):
        if number == 0:
            _check_present(row, [text, *(columns or {}).values(), *([id] if id != UNKNOWN_ID else [])])
            numbered = id not in row
        name = str(number) if numbered else _name(row.get(id), id, number)
        if name in known:
            raise InvalidInputError(
                f"rows: {id}={name!r} names row {known[name]} and row {number}; ids must differ, also as texts (1 and "
                "'1' do not). Name another column with id=, or leave the ids out."
            )
        known[name] = number
        rows.ids.append(name)
        for option, column in (columns or {}).items():
            rows.options[option].append(plain(row.get(column)))
            if row.get(column) is None:
                rows.errors[number] = f"{column}: missing, and it is this row's {option}"
        try:
            ids = _token_ids(view, row.get(text), text, prepend_bos)
        except TensorLensError as error:
            rows.errors[number] = str(error)
            ids = np.zeros(0, dtype=np.int64)
        if len(ids) > view.n_ctx and truncate:
            ends = (
                1 if isinstance(row.get(text), str) and _is_special(view, int(ids[-1])) else 0
            )  # an encoder's [SEP] stays
            rows.dropped[number] = len(ids) - view.n_ctx
            ids = np.concatenate([ids[: view.n_ctx - ends], ids[len(ids) - ends :]])
        elif len(ids) > view.n_ctx:
            rows.errors[number] = (
                f"{text}: {len(ids)} tokens, but the context of this model is {view.n_ctx}; shorten the text, or pass "
                "truncate=True to leave out its end"
            )
        rows.tokens.append(ids)
    if not len(rows):
        raise InvalidInputError("rows: there is none. Pass a file, a data set, or a list of texts.")
    return rows


def _tables(source: Any, text: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(source, str | os.PathLike):
        source = _of_file(Path(source))
    elif isinstance(source, Mapping):
        raise InvalidInputError("rows: one table is one row; pass a list of them, or a file, or a data set.")
    elif hasattr(source, "to_dict") and hasattr(source, "columns"):
        source = source.to_dict("records")
    if not isinstance(source, Iterable):
        raise InvalidInputError(f"rows: {type(source).__name__} holds no rows; pass a file, a data set, or a list.")
    for row in source:
        yield row if isinstance(row, Mapping) else {text: row}


def _of_file(path: Path) -> Iterable[Mapping[str, Any]]:
    kind = path.suffix.lower()
    if kind not in FILES:
        known = ", ".join(f"{end} ({what})" for end, what in FILES.items())
        raise InvalidInputError(f"rows: cannot read {path}; a file is one of {known}. One text is rows=[text].")
    if not path.is_file():
        raise InvalidInputError(f"rows: there is no file {path}.")
    return _readable(path, {".jsonl": _of_jsonl, ".csv": _of_csv, ".parquet": _of_parquet}[kind](path))


def _readable(path: Path, rows: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The rows of a file whose bytes are text of the right encoding."""
    try:
        yield from rows
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
            if twice := [name for name in names if names.count(name) > 1]:
                raise InvalidInputError(f"rows: {path} has two columns {twice[0]!r}.")
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


def _check_present(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in row]
    if missing:
        raise InvalidInputError(f"rows: there is no column {missing[0]!r}, only {', '.join(map(repr, row))}.")


def _name(value: Any, column: str, number: int) -> str:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInputError(f"rows: {column} of row {number} is {value!r}; an id is a text or an integer.")
    _check_unicode(str(value), f"rows: {column} of row {number}")
    return str(value)


def _is_special(view: ModelView, token: int) -> bool:
    return token in (getattr(view.tokenizer, "all_special_ids", None) or ())


def _check_unicode(value: str, column: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{column}: {value!r} is no valid text ({error.reason})") from None


def _token_ids(view: ModelView, value: Any, column: str, prepend_bos: bool | None) -> np.ndarray:
    """One row's token ids.

    Raises:
        InvalidInputError: it is neither a text nor token ids, is empty, or is outside the vocabulary.
    """
    if value is None or (isinstance(value, float) and value != value):  # a data frame's gap
        raise InvalidInputError(f"{column}: missing")
    if isinstance(value, bytes | bytearray):
        raise InvalidInputError(f"{column}: bytes, not text; decode them first, as with .decode('utf-8')")
    if isinstance(value, str) and not value.strip():
        raise InvalidInputError(f"{column}: empty")
    if isinstance(value, str):
        _check_unicode(value, column)
    value = value if isinstance(value, str) else plain(value)
    if not isinstance(value, str) and isinstance(value, Sequence) and any(isinstance(v, str | Sequence) for v in value):
        raise InvalidInputError(f"{column}: a list of texts or of lists is no one prompt; pass a text, or token ids")
    if not isinstance(value, str) and not (isinstance(value, Sequence) and value):
        raise InvalidInputError(f"{column}: {value!r} is neither a text nor token ids")
    ids = np.asarray(token_rows(view, value, prepend_bos)[0].cpu(), dtype=np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= view.d_vocab:
        raise InvalidInputError(f"{column}: token ids are 0 to {view.d_vocab - 1}, not {ids.min()} to {ids.max()}")
    return ids
