"""Reading a data set's rows: all at once, checked, and converted to token ids."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl._arguments import nearest, plain
from tensorlens_tl._row_files import Reading, file_rows, present
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import chats_in, token_rows
from tensorlens_tl.registry import PER_PROMPT

if TYPE_CHECKING:
    import pandas as pd

    RowSource = str | os.PathLike[str] | pd.DataFrame | Iterable[Mapping[str, Any] | str | Sequence[int]]
    """A file, a data frame, a Hugging Face data set, or an iterable of mappings, texts or lists of token ids."""
else:
    RowSource = Any  # `read_rows` checks it


@dataclass
class Rows:
    """The rows of a data set, in order.

    Attributes:
        ids: the rows' names, all different.
        tokens: each row's token ids; empty if the row is not a prompt.
        errors, dropped: by row number, the error message, and the number of tokens cut off.
        options: for each option taken from a column, such as targets, the value for each row.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    options: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def prompts(self) -> list[int]:
        """Return the numbers of the rows that are prompts; raise `InvalidInputError` if there are none."""
        good = [row for row in range(len(self)) if row not in self.errors]
        if not good:
            first = min(self.errors)
            raise InvalidInputError(f"rows: none is a prompt. Row {first}: {self.errors[first].rstrip('.')}.")
        return good

    def record(self, row: int) -> dict[str, Any]:
        """Return what is known about a row before it is run, as columns of a shard."""
        return {
            "id": self.ids[row], "row": row, "token_ids": self.tokens[row], "dropped_tokens": self.dropped.get(row, 0),
        }  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """Return everything a run depends on: the number of rows, and digests of ids, token ids and each column."""
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


def check_columns(
    columns: Mapping[str, str] | None, options: Mapping[str, Any], known: Sequence[str] = PER_PROMPT
) -> None:
    """Raise `InvalidInputError` for columns naming an option that is not `known`, or one that is also passed."""
    if not isinstance(columns, Mapping | None):
        raise InvalidInputError(
            f"columns={columns!r}: pass a mapping of options to columns, such as {{'target': 'answer'}}."
        )
    names = set(columns or {})
    unknown = sorted(names - set(known))
    if unknown:
        near = nearest(unknown[0], known)
        raise InvalidInputError(f"columns: {unknown[0]!r} is not one of {', '.join(known)}.{near}")
    both = sorted(names & set(options))
    if both:
        raise InvalidInputError(f"columns: {both[0]!r} is in a column and an option as well; leave one out.")


def read_rows(view: ModelView, source: RowSource, reading: Reading) -> Rows:
    """Read and tokenize every row of a data set; rows that are not prompts get an error instead."""
    columns = reading.columns or {}
    rows = Rows(options={option: [] for option in columns})
    number_of = dict[str, int]()
    has_ids = False
    for number, row in enumerate(_tables(source, reading.text)):
        if number == 0:
            reading = present(row, reading)
            has_ids = reading.id in row
        name = _name(row.get(reading.id), reading.id, number) if has_ids else str(number)
        if name in number_of:
            raise InvalidInputError(
                f"rows: {reading.id}={name!r} names row {number_of[name]} and row {number}; ids must differ, also as "
                "texts (1 and '1' do not). Name another column with id=, or remove the ids."
            )
        number_of[name] = number
        rows.ids.append(name)
        for option, column in columns.items():
            rows.options[option].append(plain(row.get(column)))
            if row.get(column) is None:
                rows.errors[number] = f"{column}: missing, but needed as this row's {option}"
        rows.tokens.append(_prompt(view, row, number, reading, rows))
    if not len(rows):
        raise InvalidInputError("rows: there is none. Pass a file, a data set, or a list of texts.")
    return rows


def _prompt(view: ModelView, row: Mapping[str, Any], number: int, reading: Reading, rows: Rows) -> np.ndarray:
    """Return one row's token ids, truncated to the context if allowed; record errors and dropped tokens in `rows`."""
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
    if isinstance(value, str) and int(ids[-1]) in special:  # keep an encoder's [SEP]
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


def _name(value: Any, column: str, number: int) -> str:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidInputError(f"rows: {column} of row {number} is {value!r}; an id must be a text or an integer.")
    _check_unicode(str(value), f"rows: {column} of row {number}")
    return str(value)


def _check_unicode(value: str, column: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"{column}: {value!r} is no valid text ({error.reason})") from None


def _token_ids(view: ModelView, value: Any, column: str, prepend_bos: bool | None) -> np.ndarray:
    value = plain(value)
    if value is None or (isinstance(value, float) and value != value):  # NaN marks a missing value in a data frame
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
        raise InvalidInputError(f"{column}: a list of texts or of lists is not one prompt; pass a text, or token ids")
    ids = np.asarray(token_rows(view, value, prepend_bos)[0].cpu(), dtype=np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= view.d_vocab:
        raise InvalidInputError(f"{column}: token ids are 0 to {view.d_vocab - 1}, not {ids.min()} to {ids.max()}")
    return ids
