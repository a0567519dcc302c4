"""Reading a run back: as results, as tables, one shard at a time."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tensorlens_tl.datasets.folder import Folder
from tensorlens_tl.datasets.packing import facts_in, unpacked
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.attribution import Attribution

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class DatasetResults:
    """A run's results, finished or not; read from its folder when they are asked for.

    `path` is the folder and `manifest` what it says the run is. The shards are plain Parquet files, which
    ``datasets.load_dataset("parquet", data_files="run/part-*.parquet")``, pandas, polars and DuckDB read as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder(path)
        self.path, self.manifest = self._folder.path, self._folder.manifest()

    def __repr__(self) -> str:
        identity, made = self.manifest.identity, len(self)
        rows = f"{made} rows" if self.complete else f"{made} of {self.manifest.rows} rows"
        return f"DatasetResults({str(self.path)!r}, {identity['method']!r}, {rows})"

    @property
    def shards(self) -> list[int]:
        """The shards that are there."""
        return [number for number in range(len(self.manifest.shards)) if self._folder.shard(number).exists()]

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

    def __iter__(self) -> Iterator[tuple[str, Attribution]]:
        """Ids and results of the rows that did not fail, shard by shard."""
        for table in self.tables():
            for row in table.to_pylist():
                if row["error"] is None:
                    yield row["id"], self._result(row, table)

    def __getitem__(self, id: str | int) -> Attribution:
        """The result of one row.

        Raises:
            InvalidInputError: there is no such row (yet), or it failed.
        """
        if str(id) not in self._places:
            state = "" if self.complete else " among those that are done"
            raise InvalidInputError(f"{self.path}: no row has the id {id!r}{state}.")
        shard, place = self._places[str(id)]
        table = self._folder.read_shard(self.manifest, shard)
        (row,) = table.slice(place, 1).to_pylist()
        if row["error"] is not None:
            raise InvalidInputError(f"{self.path}: row {id!r} failed: {row['error']}")
        return self._result(row, table)

    def _result(self, row: dict[str, Any], table: "pa.Table") -> Attribution:
        return unpacked(row, facts_in(table))

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return {
            name: (shard, place)
            for shard, table in zip(self.shards, self.tables(["id"]), strict=True)
            for place, name in enumerate(table["id"].to_pylist())
        }

    def to_dataframe(self, columns: Sequence[str] | None = None) -> "pd.DataFrame":
        """All rows in their own order, a line each; `columns` names those to read."""
        import pyarrow as pa

        tables = list(self.tables(columns))
        if not tables:
            raise InvalidInputError(f"{self.path}: no row is done yet.")
        frame = pa.concat_tables([table.replace_schema_metadata() for table in tables]).to_pandas()
        frame = frame.sort_values("row", ignore_index=True)
        return frame if columns is None else frame.reindex(columns=list(columns))

    def errors(self) -> "pd.DataFrame":
        """The rows that failed: `row`, `id` and `error`."""
        frame = self.to_dataframe(["row", "id", "error"])
        return frame.dropna(subset=["error"]).reset_index(drop=True)


def load_results(path: str | os.PathLike[str]) -> DatasetResults:
    """The results of a run that `attribute_dataset` began.

    Raises:
        FileFormatError: there is no run in that folder, or its manifest is damaged.
    """
    return DatasetResults(path)
