"""Reading a run back: as results, as tables, one shard at a time."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tensorlens_tl._arguments import check_choice, checked_names, plain
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.datasets.folder import Folder
from tensorlens_tl.datasets.work import facts_in, schema, unpacked, unpacked_terms
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import Attribution, Evaluation, Terms, area

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    Quantiles = float | Sequence[float] | np.ndarray | torch.Tensor
    """One share of the values, or several."""
else:
    Quantiles = Any  # what is no share is refused by `summary`

ENDS = 1.96
"""Standard errors from a mean to the ends of its 95 % interval."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


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
            return _evaluation(curves[:, :, None], [row["id"]], facts)
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
            frames = list[pd.DataFrame]()
            for row in table.to_pylist():
                if row["error"] is None:
                    result = self._result(row, table)
                    frame = result.to_dataframe()
                    if isinstance(result, Attribution) and row["keys"] is not None:
                        frame = _stored(frame, row, result)
                    frame = frame.drop(columns="batch", errors="ignore")
                    frame.insert(0, "id", row["id"])
                    frame.insert(1, "row", row["row"])
                    frames.append(frame)
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
            _check_columns(columns, schema(self.manifest.double).names)
        tables = list(self.tables(columns))
        if not tables:
            raise InvalidInputError(f"{self.path}: no row is done yet.")
        frame = pa.concat_tables([table.replace_schema_metadata() for table in tables]).to_pandas()
        return _chosen(frame.sort_values("row", ignore_index=True), columns)

    def summary(self, quantiles: Quantiles = QUANTILES, *, names: str = "*", memory: Memory = None) -> "pd.DataFrame":
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
        import pandas as pd

        self._check_kind("Terms", "summary", "of method='logit_attribution' or 'total_effects'")
        shares = _quantiles(quantiles)
        bound = in_bytes(memory)
        terms = list[str]()
        lengths = list[int]()  # of the rows, in queries
        for table in self.tables(["shape"]):
            terms += [name for name in facts_in(table).get("names", ()) if name not in terms]
            lengths += [shape[0] for shape in table["shape"].to_pylist() if shape is not None]
        chosen = [name for name in terms if fnmatchcase(name, names)]
        if not chosen:
            raise InvalidInputError(f"names={names!r}: there are {', '.join(terms[:8])}, …")
        # shards hold a row's terms side by side: as many terms as fit are gathered from all shards at once
        count = sum(lengths)
        at_once = max(1, bound // (3 * 8 * max(1, count)))  # the values, and what the variance and the quantiles copy
        lines: list[list[float]] = []
        for start in range(0, len(chosen), at_once):
            values = self._gathered(chosen[start : start + at_once], count)
            lines += _statistics(values, lengths, shares).tolist()
        columns = ["mean", "low", "high", "variance", "std", *(f"{100 * share:g}%" for share in shares)]
        frame = pd.DataFrame(lines, columns=pd.Index(columns), index=pd.Index(chosen, name="term"))
        frame.insert(0, "count", count)
        return frame

    def _gathered(self, terms: Sequence[str], count: int) -> np.ndarray:
        """Each term's value at every query of every row, `[term, value]`; zero where a batch had no such term."""
        values = np.zeros((len(terms), count))
        start = 0
        for table in self.tables(["scores"]):
            columns = {name: column for column, name in enumerate(facts_in(table).get("names", ()))}
            if not columns:  # every row of the shard failed
                continue
            parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["scores"].chunks]
            scores = np.concatenate(parts).reshape(-1, len(columns))
            for number, name in enumerate(terms):
                if name in columns:
                    values[number, start : start + len(scores)] = scores[:, columns[name]]
            start += len(scores)
        return values

    def evaluation(self) -> Evaluation:
        """All rows that are done as one evaluation, in the data set's order, of `evaluate.perturbation_dataset`.

        It holds every row's curves in memory: eight bytes for each metric, method and step.

        Raises:
            InvalidInputError: the rows are no evaluations, or no row is done.
            FileFormatError: a shard is damaged.
        """
        self._check_kind("Evaluation", "evaluation", "of evaluate.perturbation_dataset")
        curves_of = dict[int, np.ndarray]()
        facts = dict[str, Any]()
        failed = 0
        units = dict[int, str]()
        for table in self.tables(["row", "id", "scores", "shape"]):
            shard_facts = facts_in(table)
            if "methods" in shard_facts:
                facts = shard_facts
            for row in table.to_pylist():
                if row["scores"] is None:
                    failed += 1
                    continue
                curves_of[row["row"]] = np.array(row["scores"]).reshape(row["shape"])
                units[row["row"]] = row["id"]
        if not curves_of:
            raise InvalidInputError("evaluation: no row of this run is done, or all failed.")
        order = sorted(curves_of)
        curves = torch.from_numpy(np.stack([curves_of[row] for row in order], axis=2))
        return _evaluation(curves, [units[row] for row in order], facts, failed)

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


def _statistics(values: np.ndarray, lengths: Sequence[int], shares: Sequence[float]) -> np.ndarray:
    """Mean, its interval, variance, standard deviation and quantiles of each line of `[term, value]`.

    The values of a row, as many as `lengths` says, stand side by side. What is handed over is overwritten.
    """
    mean = values.mean(axis=1)
    error = np.full(len(values), np.nan)
    rows = len(lengths)
    if rows > 1:  # each row's sum of deviations counts once, however many queries it has
        starts = np.cumsum([0, *lengths[:-1]])
        deviations = np.add.reduceat(values, starts, axis=1) - np.outer(mean, lengths)
        error = np.sqrt(rows / (rows - 1) * (deviations**2).sum(axis=1)) / values.shape[1]
    variance = np.full(len(values), np.nan)
    if values.shape[1] > 1:
        variance = values.var(axis=1, ddof=1)
    statistics = [mean, mean - ENDS * error, mean + ENDS * error, variance, np.sqrt(variance)]
    if shares:
        statistics += list(np.quantile(values, shares, axis=1, overwrite_input=True))
    return np.column_stack(statistics)


def _quantiles(quantiles: Quantiles) -> list[float]:
    value = plain(quantiles)
    if isinstance(value, int | float):
        value = [value]
    try:
        shares = [float(share) for share in value]
    except (TypeError, ValueError):
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise InvalidInputError(f"quantiles={quantiles!r}: pass shares of the rows, such as (0.05, 0.5, 0.95).")
    return shares


def _evaluation(curves: torch.Tensor, units: list[str], facts: Mapping[str, Any], failed: int = 0) -> Evaluation:
    """Curves `[metric, method, unit, step]` as an evaluation, described by a shard's `facts`."""
    axis = torch.tensor(facts["axis"], dtype=torch.float64)
    settings = facts["settings"] | {"prompts": len(units)}
    if failed:
        settings["failed"] = failed
    return Evaluation(
        kind=facts["kind"],
        values=area(curves, axis),
        metrics=facts["metrics"],
        methods=facts["methods"],
        units=units,
        curves=curves,
        axis=axis,
        axis_name=facts["axis_name"],
        settings=settings,
        skipped=facts["skipped"],
    )


def _stored(frame: "pd.DataFrame", row: Mapping[str, Any], result: Attribution) -> "pd.DataFrame":
    """Without the lines of source tokens whose scores were not stored, and with their sum as one line per query."""
    import pandas as pd

    if result.scores.ndim != 3:
        raise InvalidInputError(f"long table: results are {result.axes}; keep='scores' stores all of them.")
    keys = np.array(row["keys"]).reshape(row["shape"])
    positions = result.queries[0].tolist()
    pairs = {(position, key) for position, of_query in zip(positions, keys.tolist(), strict=True) for key in of_query}
    lines = zip(frame["query"], frame["key"], frame["kind"], strict=True)
    chosen = frame.loc[[kind != "token" or (query, key) in pairs for query, key, kind in lines]]
    first = frame.drop_duplicates("query").set_index("query").loc[positions].reset_index()
    rest = first.assign(key=pd.NA, key_token="", kind="rest", generated=False, score=row["rest"])
    table = pd.concat([chosen, rest.astype(frame.dtypes)], ignore_index=True)
    order = {position: number for number, position in enumerate(positions)}
    return table.sort_values("query", kind="stable", key=lambda column: column.map(order), ignore_index=True)
