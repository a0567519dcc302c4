"""Measures over a model's depth, as a picture."""

from typing import TYPE_CHECKING

import numpy as np

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.drawing.charts import curves
from tensorlens_tl.drawing.page import Picture, panel, table
from tensorlens_tl.errors import InvalidInputError

if TYPE_CHECKING:
    import pandas as pd

CURVES = {
    "Whiteness Ψ, lower is whiter": ("whiteness", "of correlations", "floor"),
    "Stationarity ρ relative to Σ‖Λ‖, lower is more stationary": ("relative", "relative without noise"),
}


@checked_names
def picture(
    measures: "pd.DataFrame", filtered: "pd.DataFrame | None" = None, title: str = "Whiteness and stationarity"
) -> Picture:
    """Curves over hook points, in the order of the table, and the figures.

    Args:
        measures: what `measure` gave, two hook points or more.
        filtered: what it gave for the same hook points with ``filters=``.
        title: of the page.

    Returns:
        A picture that a notebook shows, and that saves itself as a page.

    Raises:
        InvalidInputError: a table of something else, of one hook point, or of other hook points than the first.
    """
    tables = {"": measures}
    if filtered is not None:
        tables[", filtered"] = filtered
    for values_table in tables.values():
        _check_table(values_table, measures)
    panels = []
    for heading, columns in CURVES.items():
        lines = {column + of: values_table[column] for of, values_table in tables.items() for column in columns}
        lines.pop("floor, filtered", None)
        values = np.stack([line.to_numpy() for line in lines.values()])
        depth = np.arange(len(measures), dtype=float)
        chart = curves(list(lines), depth, values, values, values, metric=heading, axis_name="hook point")
        panels.append(panel(heading, chart))
    rows = [
        (f"{number}: {name}{of}", *(f"{value:.4g}" for value in row))
        for of, values_table in tables.items()
        for number, (name, *row) in enumerate(values_table.itertuples())
    ]
    panels.append(panel("Values", table(["hook point", *measures.columns], rows)))
    return Picture(title, "".join(panels))


def _check_table(values: "pd.DataFrame", measures: "pd.DataFrame") -> None:
    start = "picture: pass tables of whitening.measure for the same hook points, 2 or more"
    missing = [column for columns in CURVES.values() for column in columns if column not in values]
    if missing:
        raise InvalidInputError(f"{start}; one has no column {missing[0]!r}.")
    if len(values) < 2 or list(values.index) != list(measures.index):
        raise InvalidInputError(f"{start}, not {len(values)}.")
