"""A method as a function of columns, for tools that run functions over data sets: Ray Data, ``datasets.map``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tensorlens_tl.datasets.attributing import work_of
from tensorlens_tl.datasets.options import LoadModel, Reading
from tensorlens_tl.datasets.rows import read_rows
from tensorlens_tl.datasets.work import Record, run_rows
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelView

if TYPE_CHECKING:
    import pyarrow as pa


class BatchAttributor:
    """Columns of rows in, columns of results out; it can be pickled, and loads its model where it first works.

        rows.map_batches(BatchAttributor, fn_constructor_args=(load_model,), concurrency=4, num_gpus=1)   # Ray Data
        rows.map(BatchAttributor(load_model, target=" the"), batched=True)                                # Hugging Face

    The results have the columns of `attribute_dataset`'s shards, one row for each row; there is no folder, no plan of
    batches and nothing to resume: the tool has its own way of doing these.

    Args:
        load_model: a function of no arguments that gives the model (a function of a module, where it is to be pickled).
        method, text, columns, keep, truncate, prepend_bos, options: see `attribute_dataset`.
        id: the column that names rows; it is required.

    Raises:
        InvalidInputError: `load_model` is no function, or an unknown option.
        RegistryError: unknown method.
    """

    def __init__(
        self,
        load_model: LoadModel,
        *,
        method: str = "tensorlens",
        text: str = "text",
        id: str = "id",
        columns: Mapping[str, str] | None = None,
        keep: str = "scores",
        truncate: bool = False,
        prepend_bos: bool | None = None,
        **options: Any,
    ) -> None:
        if not callable(load_model) or isinstance(load_model, torch.nn.Module):
            raise InvalidInputError("load_model: pass a function that loads the model, such as lambda: model.")
        self.load_model = load_model
        self.work = work_of(method, keep, options, columns)
        self.reading = Reading(text, id, columns, truncate, prepend_bos)
        self._model: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> "pa.Table":
        """The results of some rows, given as columns.

        Raises:
            InvalidInputError: a column is missing, or two rows have the same id.
        """
        if self._model is None:
            self._model = ModelView(self.load_model()).model
        names = list(batch)
        if self.reading.id not in names:
            raise InvalidInputError(f"rows: there is no column {self.reading.id!r} to name them; pass id=.")
        tables = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = read_rows(ModelView(self._model), tables, self.reading)
        by_row: dict[int, Record] = {row: {"error": error} for row, error in rows.errors.items()}
        facts = dict[str, Any]()
        good = [row for row in range(len(rows)) if row not in rows.errors]
        if good:
            per_row = {name: [values[row] for row in good] for name, values in rows.options.items()}
            records, results = run_rows(self.work, self._model, [rows.tokens[row] for row in good], per_row)
            by_row |= dict(zip(good, records, strict=True))
            if results:
                facts = self.work.facts(results[-1][1])
        double = next(self._model.parameters()).dtype == torch.float64
        return self.work.table([rows.record(row) | by_row[row] for row in range(len(rows))], facts, double)
