"""Heat maps and evaluations as matplotlib figures, for papers (``tensorlens-tl[plot]``)."""

from typing import Any

import numpy as np

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.evaluate.result import Evaluation
from tensorlens_tl.evaluate.statistics import bootstrap_interval
from tensorlens_tl.report.marks import NEGATIVE, POSITIVE, STRONGEST, largest_of, visible

CELL, LABEL = 0.28, 7
"""Inches of a cell, points of a label."""

FITTING = 16
"""Cells a side up to which numbers fit into them."""


def heat_map(result: Attribution, batch: int = 0, ax: Any = None, values: bool | None = None) -> Any:
    """One prompt of a result on matplotlib axes; see `Attribution.plot`."""
    plt = _pyplot()
    from matplotlib.colors import LinearSegmentedColormap

    keys = [position for position, real in enumerate(result.mask[batch].tolist()) if real]
    asked = result.queries[batch].tolist()
    rows = [row for row, position in enumerate(asked) if result.mask[batch, position]]
    plane = result.plane(batch).double().cpu().numpy()[np.ix_(rows, keys)]
    height, width = plane.shape
    largest = largest_of(plane) or 1.0
    if ax is None:
        size = (2.2 + CELL * width, 1.6 + CELL * height)
        _, ax = plt.subplots(figsize=size, layout="constrained")
    on_white = [tuple(1 - STRONGEST * (1 - channel / 255) for channel in rgb) for rgb in (NEGATIVE, POSITIVE)]
    colours = LinearSegmentedColormap.from_list("tensorlens", [on_white[0], (1, 1, 1), on_white[1]])
    image = ax.imshow(plane, cmap=colours, vmin=-largest, vmax=largest, aspect="equal" if height > 1 else "auto")
    tokens = [_plain(visible(token)) for token in result.tokens[batch]]
    ax.set_xticks(range(width), [tokens[key] for key in keys], rotation=90, fontsize=LABEL)
    ax.set_yticks(range(height), [tokens[asked[row]] for row in rows], fontsize=LABEL)
    ax.set_xlabel("source token")
    ax.set_ylabel("query")
    ax.set_title(_plain(result.describe()), fontsize=LABEL + 2, loc="left")
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_linewidth(0.5)
    if values if values is not None else max(height, width) <= FITTING:
        for row, column in np.ndindex(plane.shape):
            if plane[row, column]:
                ax.text(column, row, f"{plane[row, column]:.2g}", ha="center", va="center", fontsize=LABEL - 2)
    ax.figure.colorbar(image, ax=ax, shrink=0.8 if height > 4 else 1.0).ax.tick_params(labelsize=LABEL)
    return ax


def evaluation(result: Evaluation, metric: str | None = None, methods: list[str] | None = None, ax: Any = None) -> Any:
    """One metric of an evaluation on matplotlib axes; see `Evaluation.plot`."""
    frame = result.table(metric)
    metric = metric or next(iter(result.metrics))
    chosen = [str(method) for method in (frame.index if methods is None else result.only(*methods).methods)]
    plt = _pyplot()
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if result.curves is not None and result.axis is not None:
        curves = result.curves[list(result.metrics).index(metric)]
        for method in chosen:
            values = curves[result.methods.index(method)]
            low, high = bootstrap_interval(values.T)
            (line,) = ax.plot(result.axis, values.nanmean(0), label=_plain(method))
            ax.fill_between(result.axis, low, high, alpha=0.15, color=line.get_color())
        ax.set(xlabel=_plain(result.axis_name), ylabel=_plain(metric), title=_plain(result.kind))
        ax.legend(fontsize="small")
    else:
        frame = frame.where(np.isfinite(frame))
        mean, low, high = (frame.loc[chosen[::-1], (metric, name)].to_numpy() for name in ("mean", "low", "high"))
        ax.barh(
            [_plain(method) for method in chosen[::-1]], mean, xerr=np.nan_to_num([mean - low, high - mean]).clip(0)
        )
        ax.set(xlabel=_plain(metric), title=_plain(result.kind))
    return ax


def _plain(text: str) -> str:
    """Text as matplotlib shows it: a dollar sign would begin mathematics, an underscore in front hides a label."""
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install 'tensorlens-tl[plot]'.") from error
    return plt
