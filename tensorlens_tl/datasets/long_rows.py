"""A row's result as lines of a long table."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import Attribution, Result

if TYPE_CHECKING:
    import pandas as pd


def long_rows(row: Mapping[str, Any], result: Result) -> "pd.DataFrame":
    """The lines of `to_dataframe`, with the row's name and number; of scores that were stored in part, those alone.

    Raises:
        InvalidInputError: such scores with further axes.
    """
    frame = result.to_dataframe()
    if isinstance(result, Attribution) and row["keys"] is not None:
        frame = _stored(frame, row, result)
    if "batch" in frame:
        frame = frame.drop(columns="batch")
    frame.insert(0, "id", row["id"])
    frame.insert(1, "row", row["row"])
    return frame


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
