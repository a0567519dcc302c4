"""What a run does with some rows of a data set at once: for our own loop, for ``datasets.map`` and for Ray.

A `Work` is what is computed of every row. `attributions` and `circuit_terms` hold those of `attribute_dataset`;
`tensorlens_tl.evaluate.over_rows` holds that of a perturbation test.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl._arguments import plain
from tensorlens_tl.datasets.packing import table_of
from tensorlens_tl.errors import TensorLensError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes.operator import UNCAPPED, logit_label
from tensorlens_tl.results import SEVERAL_TARGETS, TOKENS_OF_QUERIES, number_of
from tensorlens_tl.results.storage import tagged

if TYPE_CHECKING:
    import pyarrow as pa

Record = dict[str, Any]
"""A row of a shard, by column."""


class Work(ABC):
    """What is computed of each row. It can be pickled, and holds no model.

    Attributes:
        name: what messages call it.
        double: whether its numbers are float64 in every model's dtype.
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
    def together(self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]) -> Any:
        """The result of some rows, given as token ids; `per_row` are options of which every row has another value."""

    @abstractmethod
    def packed(self, result: Any) -> list[Record]:
        """Such a result as one record for each row; see `tensorlens_tl.datasets.packing.schema`."""

    @abstractmethod
    def facts(self, result: Any) -> dict[str, Any]:
        """What the rows of such a result have in common, as JSON holds it."""

    def aligned(self, records: list[Record], facts: dict[str, Any]) -> tuple[list[Record], dict[str, Any]]:
        """Records of several results, laid out alike, and what they have in common."""
        return records, facts

    def table(self, records: list[Record], facts: dict[str, Any], double: bool) -> "pa.Table":
        """Records as an Arrow table."""
        return table_of(*self.aligned(records, facts), double or self.double)


def run_rows(
    work: Work, model: ModelLike, tokens: Sequence[np.ndarray], per_row: Mapping[str, Sequence[Any]]
) -> tuple[list[Record], list[tuple[int | None, Any]]]:
    """One record for each row, and the results they come from: of all rows (None), or of a part, by its first row.

    The rows are run together; where that fails, each half is, and so on down to single rows. A row that fails by itself
    is a record with its error. Whole results that are saved are of all rows or of one: there, single rows come next.

    Args:
        work: what is computed.
        model: a TransformerLens model.
        tokens: each row's token ids.
        per_row: options of which every row has another value, `[row]`.
    """

    def run(rows: Sequence[int]) -> tuple[list[Record], Any]:
        row_options = {name: [values[row] for row in rows] for name, values in per_row.items()}
        result = work.together(model, [tokens[row].tolist() for row in rows], row_options)
        return work.packed(result), result

    records: list[Record] = []
    results: list[tuple[int | None, Any]] = []
    parts: list[Sequence[int]] = [range(len(tokens))]
    while parts:
        part = parts.pop()
        try:
            part_records, result = run(part)
            results.append((None if len(part) == len(tokens) else part[0], result))
        except TensorLensError as error:
            if len(part) > 1:
                parts += reversed(_cut(part, 1 if work.save_whole else len(part) // 2))
                continue
            part_records = [{"error": f"{type(error).__name__}: {error.with_prompts({0: 'this row'})}"}]
        records += part_records
    view = ModelView(model)
    for row, record in enumerate(records):
        _describe(record, view, work.options, {name: values[row] for name, values in per_row.items()})
    return records, results


def _cut(rows: Sequence[int], length: int) -> list[Sequence[int]]:
    """Rows in parts of a length; the last may be shorter."""
    return [rows[start : start + length] for start in range(0, len(rows), length)]


def _describe(record: Record, view: ModelView, options: Mapping[str, Any], row_options: Mapping[str, Any]) -> None:
    """Complete a row's record by its options, and by the words for its target, which are not those of its batch."""
    label = record.get("target") or ""
    number = "logit of " if label == SEVERAL_TARGETS else number_of(label)
    is_logit = number in ("logit of ", f"{UNCAPPED} of ")
    stored = json.loads(record.pop("options", "{}"))
    tokens = {tuple(texts) for texts in stored.get(TOKENS_OF_QUERIES, [[]])[0]}
    is_named = is_logit and len(tokens) == 1
    if is_named:
        record["target"] = number + " − ".join(map(repr, tokens.pop()))
        stored = {}
    if stored or row_options:
        record["options"] = json.dumps(stored | tagged(row_options))
    if is_named:
        return
    lists_tokens = any(isinstance(plain(options.get(name)), list | tuple) for name in ("target", "minus"))
    if not (row_options or lists_tokens) or "direction" in row_options:
        return
    if is_logit:
        options = {**options, **row_options}
        capped = UNCAPPED not in number
        record["target"] = logit_label(view, options.get("target"), options.get("minus"), capped=capped)
