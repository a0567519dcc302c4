"""Reading a run back: as results, as tables, one shard at a time."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tensorlens_tl._arguments import check_choice, checked_names
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.datasets import summing
from tensorlens_tl.datasets.circuit_terms import unpacked_terms
from tensorlens_tl.datasets.folder import Folder
from tensorlens_tl.datasets.long_rows import long_rows
from tensorlens_tl.datasets.packing import facts_in, unpacked
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import Attribution, Evaluation, Terms

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class DatasetResults:
    """A run's results, finished or not; a result is read from the run's folder when it is needed.

    `path` is the folder and `manifest` what it says the run is. The shards are plain Parquet files, which
    ``datasets.load_dataset("parquet", data_files="run/part-*.parquet")``, pandas, polars and DuckDB read as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder(path)
        self.path = self._folder.path
        self.manifest = self._folder.manifest()

    def __repr__(self) -> str:
        rows = f"{len(self)} rows"
        if not self.complete:
            rows = f"{len(self)} of {self.manifest.rows} rows"
        return f"DatasetResults({str(self.path)!r}, {self.manifest.identity['method']!r}, {rows})"

    @property
    def shards(self) -> list[int]:
        """The shards that are written."""
        return self._folder.shards(self.manifest)

    @property
    def complete(self) -> bool:
        """Whether every row was dealt with."""
        return len(self.shards) == len(self.manifest.shards)

    def __len__(self) -> int:
        """Rows that were dealt with."""
        return sum(len(self.manifest.rows_of(number)) for number in self.shards)

    def tables(self, columns: Sequence[str] | None = None) -> Iterator["pa.Table"]:
        """One shard after another, as Arrow tables.

        Raises:
            FileFormatError: a shard is damaged.
        """
        for number in self.shards:
            yield self._folder.read_shard(self.manifest, number, columns)

    def __iter__(self) -> Iterator[tuple[str, Attribution | Terms | Evaluation]]:
        """Ids and results of the rows that did not fail, shard by shard."""
        for table in self.tables():
            for row in table.to_pylist():
                if row["error"] is None:
                    yield row["id"], self._result(row, table)

    # which kind of result it is stands in the folder, not in the code that reads it
    def __getitem__(self, id: str | int) -> Any:
        """The result of one row: an Attribution, or Terms of a circuit, or an Evaluation of one unit.

        Raises:
            InvalidInputError: there is no such row (yet), or it failed.
        """
        if str(id) not in self._rows:
            state = "" if self.complete else " among those that are done"
            raise InvalidInputError(f"{self.path}: no row has the id {id!r}{state}.")
        shard, index = self._rows[str(id)]
        table = self._folder.read_shard(self.manifest, shard)
        (row,) = table.slice(index, 1).to_pylist()
        if row["error"] is not None:
            raise InvalidInputError(f"{self.path}: row {id!r} failed: {row['error']}")
        return self._result(row, table)

    def _result(self, row: dict[str, Any], table: "pa.Table") -> Any:
        facts = facts_in(table)
        kind = facts.get("result")
        if kind == "Evaluation":
            curves = torch.tensor(row["scores"], dtype=torch.float64).reshape(row["shape"])
            return summing.evaluation_of(curves[:, :, None], [row["id"]], facts)
        if kind == "Terms":
            return unpacked_terms(row, facts)
        return unpacked(row, facts)

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """Each row's shard, and its index in it, by id."""
        return {
            name: (shard, index)
            for shard, table in zip(self.shards, self.tables(["id"]), strict=True)
            for index, name in enumerate(table["id"].to_pylist())
        }

    def frames(self) -> "Iterator[pd.DataFrame]":
        """The long tables of the rows that did not fail, one shard after another, in the order of the shards.

        Columns: `id` and `row` of the data set, then those of the result's own `to_dataframe` besides `batch`. Of
        ``keep="top:N"`` a line of the kind ``"rest"`` is the sum of what was not stored, so that lines still sum.

        Raises:
            FileFormatError: a shard is damaged.
        """
        import pandas as pd

        for table in self.tables():
            rows = (row for row in table.to_pylist() if row["error"] is None)
            frames = [long_rows(row, self._result(row, table)) for row in rows]
            if frames:
                yield pd.concat(frames, ignore_index=True)

    def to_dataframe(self, columns: Sequence[str] | None = None, *, long: bool = False) -> "pd.DataFrame":
        """All rows in the data set's order, a line each; `columns` names those to read.

        Args:
            columns: which; None is all of them.
            long: one line per row, query and source instead, as `frames` gives them shard by shard.

        Raises:
            InvalidInputError: no row is done yet, or no such column.
            FileFormatError: a shard is damaged.
        """
        import pandas as pd
        import pyarrow as pa

        if long:
            frames = [*self.frames()]
            if not frames:
                raise InvalidInputError(f"{self.path}: no row is done yet, or all failed.")
            frame = pd.concat(frames, ignore_index=True)
            frame = frame.sort_values("row", kind="stable", ignore_index=True)
            return _chosen(frame, columns)
        if columns is not None and self.shards:
            _check_columns(columns, self._folder.columns(self.shards[0]))
        tables = list(self.tables(columns))
        if not tables:
            raise InvalidInputError(f"{self.path}: no row is done yet.")
        frame = pa.concat_tables([table.replace_schema_metadata() for table in tables]).to_pandas()
        return _chosen(frame.sort_values("row", ignore_index=True), columns)

    def summary(
        self, quantiles: summing.Quantiles = summing.QUANTILES, *, names: str = "*", memory: Memory = None
    ) -> "pd.DataFrame":
        """How each component's effect is distributed over the rows that are done, of ``method="logit_attribution"``.

        Exact, from what the shards hold; memory is that of some components over all rows, or of one shard.

        Args:
            quantiles: which, as shares of the values; between two values they are interpolated.
            names: of components with such names only: ``"L*H*"`` are heads, ``"L3H*"`` those of one layer.
            memory: what may be allocated at once, as ``"512MB"`` or bytes; less reads the shards more often.

        Returns:
            A line for each component: `count`, `mean`, `low` and `high`, `variance` (with count − 1), `std`, and the
            quantiles as ``"5%"``. Each query of each row is one value. `low` and `high` are the ends of the mean's 95 %
            interval, 1.96 standard errors away, where rows are independent and the queries of one row are not; it is
            too narrow for fewer than some 30 rows, and NaN for one.

        Raises:
            InvalidInputError: the rows are no terms, no row is done, no such component, or no such quantile.
            FileFormatError: a shard is damaged.
        """
        self._check_kind("Terms", "summary", "of method='logit_attribution' or 'total_effects'")
        return summing.summary(self.tables, quantiles, names, memory)

    def evaluation(self) -> Evaluation:
        """All rows that are done as one evaluation, in the data set's order, of `evaluate.perturbation_dataset`.

        It holds every row's curves in memory: eight bytes for each metric, method and step.

        Raises:
            InvalidInputError: the rows are no evaluations, or no row is done.
            FileFormatError: a shard is damaged.
        """
        self._check_kind("Evaluation", "evaluation", "of evaluate.perturbation_dataset")
        return summing.evaluation(self.tables)

    def _check_kind(self, kind: str, name: str, what: str) -> None:
        """Raise InvalidInputError unless the rows are of such a kind."""
        shards = map(facts_in, self.tables(["row"]))
        kinds = {facts.get("result", "Attribution") for facts in shards if "dtype" in facts}
        if not kinds:
            raise InvalidInputError(f"{name}: no row of {self.path} is done, or all failed.")
        if kinds != {kind}:
            method = self.manifest.identity["method"]
            raise InvalidInputError(f"{name}: these rows are results of {method!r}, not {what}.")

    def errors(self) -> "pd.DataFrame":
        """The rows that failed: `row`, `id` and `error`."""
        frame = self.to_dataframe(["row", "id", "error"])
        return frame.dropna(subset=["error"]).reset_index(drop=True)


def _chosen(frame: "pd.DataFrame", columns: Sequence[str] | None) -> "pd.DataFrame":
    """Some columns of a table, in this order; None is all of them."""
    if columns is None:
        return frame
    _check_columns(columns, frame.columns)
    return frame.reindex(columns=list(columns))


def _check_columns(columns: Sequence[str], known: Iterable[str]) -> None:
    """Raise InvalidInputError for a column that there is not."""
    for name in columns:
        check_choice("columns", name, known)


@checked_names
def load_results(path: str | os.PathLike[str]) -> DatasetResults:
    """The results of a run that `attribute_dataset` began.

    Raises:
        FileFormatError: there is no run in that folder, or its manifest is damaged.
    """
    return DatasetResults(path)
