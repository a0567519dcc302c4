"""What people call the features of a dictionary: labels from a CSV or JSON file, or from a mapping."""

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.circuits.arguments import LabelsLike
from tensorlens_tl.errors import FileFormatError, InvalidInputError

NUMBER_COLUMNS = ("feature", "index", "feature_id", "id")
LABEL_COLUMNS = ("label", "description", "explanation", "name")
"""Columns that are read, the first of each that a file has; Neuronpedia's exports have `index` and `description`."""

ENDINGS = (".csv", ".tsv", ".json")


@checked_names
def feature_labels(labels: LabelsLike) -> dict[int, str]:
    """Labels of features, from a file or a mapping.

    Args:
        labels: a path, or a mapping of features (``12``, ``"12"`` or ``"F12"``) to texts. A ``.csv`` or ``.tsv`` file
            has a header with a column of `NUMBER_COLUMNS` and one of `LABEL_COLUMNS`; a ``.json`` file is an object
            ``{"12": "a label"}``, or a list of objects with such keys. Empty labels are left out.

    Raises:
        FileFormatError: a file that cannot be read so, or that labels one feature twice.
        InvalidInputError: no path and no mapping, another ending, or a feature or a label that is none.
        OSError: there is no such file.

    >>> tlens.circuits.feature_labels({"F12": "forms of *to be*"})
    {12: 'forms of *to be*'}
    """
    if labels is None:
        return {}
    if isinstance(labels, Mapping):
        return dict(_checked(labels.items()))
    if not isinstance(labels, str | os.PathLike):
        raise InvalidInputError(
            f"labels: cannot read a {type(labels).__name__}; pass a mapping such as {{12: 'a label'}}, or the path of "
            "a CSV or JSON file."
        )
    path = Path(labels)
    if path.suffix.lower() not in ENDINGS:
        raise InvalidInputError(f"labels: {path.name!r} ends in {path.suffix!r}; use one of {', '.join(ENDINGS)}.")
    read: dict[int, str] = {}
    try:
        for number, label in _checked(_lines(path)):
            if number in read:
                raise InvalidInputError(f"feature {number} is labelled twice, {read[number]!r} and {label!r}")
            read[number] = label
    except (InvalidInputError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: no labels of features ({error}).") from error
    return read


def names_with_labels(names: Iterable[str], labels: Mapping[int, str]) -> dict[str, str]:
    """Which of the names of parts, such as ``"F12@7"`` and ``"L2.F12"``, are features with a label, and the label.

    >>> from tensorlens_tl.circuits.dictionary_features import names_with_labels
    >>> names_with_labels(["F12@7", "error@7", "F3@7"], {12: "to be"})
    {'F12@7': 'to be'}
    """
    labelled: dict[str, str] = {}
    for name in names:
        match = re.search(r"(?:^|\.)F(\d+)(?:@\d+)?$", name)
        if match and int(match[1]) in labels:
            labelled[name] = labels[int(match[1])]
    return labelled


def _lines(path: Path) -> list[tuple[Any, Any]]:
    """Features and labels of a file, as they are written there."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json":
        content = json.loads(text)
        if isinstance(content, Mapping):
            return list(content.items())
        if not isinstance(content, list) or not all(isinstance(row, Mapping) for row in content):
            raise InvalidInputError('it is neither an object {"12": "a label"} nor a list of objects')
        rows = content
    else:
        delimiter = ","
        if path.suffix.lower() == ".tsv":
            delimiter = "\t"
        rows = list(csv.DictReader(text.splitlines(), delimiter=delimiter))
    if not rows:
        return []
    number, label = (_column(rows[0], names) for names in (NUMBER_COLUMNS, LABEL_COLUMNS))
    return [(row.get(number), row.get(label)) for row in rows]


def _column(row: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first of some names that a row has."""
    for name in names:
        if name in row:
            return name
    raise InvalidInputError(f"its columns are {', '.join(map(repr, row))}; one of {', '.join(names)} is needed")


def _checked(lines: Iterable[tuple[Any, Any]]) -> Iterable[tuple[int, str]]:
    for feature, label in lines:
        number = feature
        if isinstance(feature, str) and re.fullmatch(r"F?\d+", feature.strip()):
            number = int(feature.strip().removeprefix("F"))
        number = whole_number("labels: feature", number, least=0, why="a feature's number, or its name such as 'F12'")
        if label is not None and not isinstance(label, str):
            raise InvalidInputError(f"labels: feature {number} has the label {label!r}; pass a text.")
        if label and label.strip():
            yield number, label.strip()
