"""What the rows of a run amount to: how each component's effect is distributed, and one evaluation of all rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tensorlens_tl._arguments import plain
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.datasets.packing import facts_in
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import Evaluation, area

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ENDS = 1.96
"""Standard errors from a mean to the ends of its 95 % interval."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

if TYPE_CHECKING:
    Quantiles = float | Sequence[float] | np.ndarray | torch.Tensor
    """One share of the values, or several."""
else:
    Quantiles = Any  # what is no share is refused by `summary`

Tables = Callable[[Sequence[str]], Iterator["pa.Table"]]
"""Some columns of every shard, one shard after another."""


def summary(tables: Tables, quantiles: Quantiles, names: str, memory: Memory) -> "pd.DataFrame":
    """See `tensorlens_tl.datasets.DatasetResults.summary`.

    Shards hold a row's terms side by side. As many terms as fit the bound are gathered from all shards at once, so
    that quantiles are exact and memory is that of some terms over all rows, or of one shard.
    """
    import pandas as pd

    shares = _quantiles(quantiles)
    bound = in_bytes(memory)
    terms = list[str]()
    lengths = list[int]()  # of the rows, in queries
    for table in tables(["shape"]):
        terms += [name for name in facts_in(table).get("names", ()) if name not in terms]
        lengths += [shape[0] for shape in table["shape"].to_pylist() if shape is not None]
    chosen = [name for name in terms if fnmatchcase(name, names)]
    if not chosen:
        raise InvalidInputError(f"names={names!r}: there are {', '.join(terms[:8])}, …")
    count = sum(lengths)
    at_once = max(1, bound // (3 * 8 * max(1, count)))  # the values, and what the variance and the quantiles copy
    lines: list[list[float]] = []
    for start in range(0, len(chosen), at_once):
        values = _gathered(tables, chosen[start : start + at_once], count)
        lines += _statistics(values, lengths, shares).tolist()
    columns = ["mean", "low", "high", "variance", "std", *(f"{100 * share:g}%" for share in shares)]
    frame = pd.DataFrame(lines, columns=pd.Index(columns), index=pd.Index(chosen, name="term"))
    frame.insert(0, "count", count)
    return frame


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


def _gathered(tables: Tables, terms: Sequence[str], count: int) -> np.ndarray:
    """Each term's value at every query of every row, `[term, value]`; zero where a batch had no such term."""
    values = np.zeros((len(terms), count))
    start = 0
    for table in tables(["scores"]):
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


def evaluation(tables: Tables) -> Evaluation:
    """See `tensorlens_tl.datasets.DatasetResults.evaluation`."""
    curves_of = dict[int, np.ndarray]()
    facts = dict[str, Any]()
    failed = 0
    units = dict[int, str]()
    for table in tables(["row", "id", "scores", "shape"]):
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
    return evaluation_of(curves, [units[row] for row in order], facts, failed)


def evaluation_of(curves: torch.Tensor, units: list[str], facts: Mapping[str, Any], failed: int = 0) -> Evaluation:
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
