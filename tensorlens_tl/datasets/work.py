"""What a run does with some rows of a data set at once: for our own loop, for ``datasets.map`` and for Ray.

A `Work` is a question asked of every row. `attributions` and `circuit_terms` hold those of `attribute_dataset`;
`tensorlens_tl.evaluate.over_rows` holds that of a perturbation test.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorlens_tl._arguments import plain
from tensorlens_tl.datasets.packing import table_of
from tensorlens_tl.errors import TensorLensError
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.operator import logit_label
from tensorlens_tl.results.joining import SEVERAL_TARGETS
from tensorlens_tl.results.storage import tagged

Record = dict[str, Any]


class Work(ABC):
    """What is computed of each row. It can be pickled, and holds no model.

    Attributes:
        name: what it is called in messages.
        double: whether its numbers are float64 whatever the model's dtype.
        save_whole: whether results are also saved as safetensors.
    """

    name: str
    double = False
    save_whole = False
    options: Mapping[str, Any]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What must be the same when a run of it is resumed: ``method``, ``options``, ``keep``."""

    @abstractmethod
    def together(self, model: Any, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]) -> Any:
        """The result of some rows, given as token ids; `per_row` are options of which every row has its own value."""

    @abstractmethod
    def packed(self, result: Any) -> list[Record]:
        """Such a result as one record for each row; see `tensorlens_tl.datasets.packing.schema`."""

    @abstractmethod
    def facts(self, result: Any) -> dict[str, Any]:
        """What the rows of such a result have in common, as JSON holds it."""

    def aligned(self, records: list[Record], facts: dict[str, Any]) -> tuple[list[Record], dict[str, Any]]:
        """Records of several results, laid out alike, and what they have in common."""
        return records, facts

    def table(self, records: list[Record], facts: dict[str, Any], double: bool) -> Any:
        """Records as an Arrow table."""
        return table_of(*self.aligned(records, facts), double or self.double)


def run_rows(
    work: Work, model: Any, tokens: Sequence[np.ndarray], per_row: Mapping[str, Sequence[Any]]
) -> tuple[list[Record], list[tuple[int | None, Any]]]:
    """One record for each row, and the results they were made from: of all rows (None), or of one by its place.

    The rows are run together; where that fails, each by itself, and a row that fails then is a record with its error.

    Args:
        work: what is asked.
        model: a TransformerLens model.
        tokens: each row's token ids.
        per_row: options of which every row has a value of its own.
    """

    def run(rows: Sequence[int]) -> tuple[list[Record], Any]:
        row_options = {name: [values[row] for row in rows] for name, values in per_row.items()}
        result = work.together(model, [tokens[row].tolist() for row in rows], row_options)
        return work.packed(result), result

    records: list[Record] = []
    results: list[tuple[int | None, Any]] = []
    try:
        records, together = run(range(len(tokens)))
        results = [(None, together)]
    except TensorLensError:
        for row in range(len(tokens)):
            try:
                row_records, result = run([row])
                records += row_records
                results.append((row, result))
            except TensorLensError as error:
                message = re.sub(r"\b(?:row|prompt) 0\b", "this row", str(error))  # it was alone
                records.append({"error": f"{type(error).__name__}: {message}"})
    listed = any(isinstance(plain(work.options.get(name)), list | tuple) for name in ("target", "minus"))
    for row, record in enumerate(records if per_row or listed else ()):
        row_options = {name: values[row] for name, values in per_row.items()}
        if per_row:
            record["options"] = json.dumps(tagged(row_options))
        # what is explained, in words for this row alone
        if (record.get("target") or "").startswith(("logit of", SEVERAL_TARGETS)) and "direction" not in row_options:
            options = {"target": None, "minus": None} | dict(work.options) | row_options
            record["target"] = logit_label(ModelView(model), options["target"], options["minus"])
    return records, results
