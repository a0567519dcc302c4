"""Heat maps, bars and curves as matplotlib figures, for papers (extra ``plot``)."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.drawing.charts import LINES
from tensorlens_tl.drawing.fonts import use_fonts_with_letters
from tensorlens_tl.drawing.marks import NEGATIVE, POSITIVE, STRONGEST, largest_of, sign_colour, visible
from tensorlens_tl.drawing.matrix import head_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is an extra

CELL = 0.28
ROW = 0.21
LABEL = 7
"""Inches of a cell and of a bar's row, points of a label."""

MOST_ACROSS = 3
"""Panels in a row."""

MOST_SIZES = 4
"""Bins between the first and the last size that is written below a histogram, at most."""

GREY = "0.72"
"""Of bars that are sums."""

INTERVAL = {"ecolor": "0.25", "elinewidth": 0.9, "capsize": 2, "capthick": 0.9}
"""How intervals are drawn."""

TOKEN = re.compile(r"(?<!\w)'[^']{1,20}'")
"""A token in a title, which no line ends in."""

NO_BREAK = "\N{NO-BREAK SPACE}"

FITTING = 16
"""Cells a side up to which numbers fit into them."""


def heat_map(
    plane: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str],
    title: str,
    ax: Axes | None = None,
    values: bool | None = None,
    names: tuple[str, str] = ("query", "source token"),
) -> Axes:
    """Scores `[query, key]` on matplotlib axes, in colours from zero upwards where none is negative.

    Args:
        plane: the scores.
        queries, keys: labels of rows and columns.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
        values: write numbers into cells, to the third digit of the largest; None does so where they fit.
        names: what rows and columns are.
    """
    height, width = plane.shape
    if values is None:
        values = max(height, width) <= FITTING
    ax = axes(ax, (2.2 + CELL * width, 1.6 + CELL * height))
    colours, least, largest = scale(plane)
    image = ax.imshow(plane, cmap=colours, vmin=least, vmax=largest, aspect="equal" if height > 1 else "auto")
    ax.set_xticks(range(width), [plain(visible(token)) for token in keys], rotation=90, fontsize=LABEL)
    ax.set_yticks(range(height), [plain(visible(token)) for token in queries], fontsize=LABEL)
    ax.set_ylabel(names[0], fontsize=LABEL + 1)
    ax.set_xlabel(names[1], fontsize=LABEL + 1)
    set_title(ax, title)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_linewidth(0.5)
    if values:
        decimals = max(0, 2 - math.floor(math.log10(largest)))
        for row, column in np.ndindex(plane.shape):
            cell = f"{plane[row, column]:.{decimals}f}"
            if np.isfinite(plane[row, column]) and float(cell):
                ax.text(column, row, cell, ha="center", va="center", fontsize=LABEL - 1)
    beside = ax.inset_axes((1 + 0.4 / width, 0, 0.45 / width, 1))  # as high as the map, and half a cell wide
    bar = ax.figure.colorbar(image, cax=beside)
    bar.outline.set_linewidth(0.5)
    bar.ax.tick_params(labelsize=LABEL, width=0.5)
    use_fonts_with_letters(ax)
    return ax


def head_map(cells: Mapping[tuple[int, str], float], title: str, ax: Axes | None = None) -> Axes:
    """Numbers of heads and MLPs by layer and column (``"H3"``, ``"MLP"``) as a heat map, blank where there is none.

    Args:
        cells: the numbers.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
    """
    layers, columns, values = head_cells(cells)
    missing = np.array([[(layer, column) not in cells for column in columns] for layer in layers])
    rows = [f"layer {layer}" for layer in layers]
    return heat_map(np.where(missing, np.nan, values), rows, columns, title, ax, names=("", ""))


def scale(values: np.ndarray) -> tuple[Any, float, float]:
    """The colours of these values with the numbers at their ends.

    Orange, white and blue around zero, or white to blue from zero upwards where no value is negative. Common kinds of
    colour blindness keep orange and blue apart, and either grows darker away from zero, so that sizes survive in grey.
    """
    _pyplot()
    from matplotlib.colors import LinearSegmentedColormap

    largest = largest_of(values) or 1.0
    colours = [on_white(NEGATIVE), (1, 1, 1), on_white(POSITIVE)]
    least = -largest
    if not bool((values < 0).any()):
        colours = colours[1:]
        least = 0.0
    return LinearSegmentedColormap.from_list("tensorlens", colours), least, largest


def panels(count: int, size: tuple[float, float], *, shared: bool = False) -> list[Axes]:
    """New axes side by side, at most three in a row.

    Args:
        count: how many.
        size: inches of one.
        shared: whether the vertical axis is the same in a row.
    """
    across = min(count, MOST_ACROSS)
    down = -(-count // across)
    figure, grid = _pyplot().subplots(
        down,
        across,
        figsize=(size[0] * across, size[1] * down),
        layout="constrained",
        squeeze=False,
        sharey=shared,
    )
    every = list(grid.flat)
    for unused in every[count:]:
        figure.delaxes(unused)
    return every[:count]


def curves(
    steps: np.ndarray,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    labels: Mapping[str, str],
    ax: Axes | None,
    *,
    legend: bool = True,
    baseline: str = "",
) -> Axes:
    """Mean, low and high of each line over the steps; the first few in colours and dashes, the others thin and grey.

    Args:
        steps: `[step]`.
        lines: by name, in the order in which they get their colours.
        labels: matplotlib's ``xlabel``, ``ylabel``, ``title``.
        ax: draw here; None makes a figure of fitting size.
        legend: name the coloured lines beside the axes, or leave it to the caller (`legend_beside`).
        baseline: a line that is named even where it is not among the first few: dotted and grey then.
    """
    ax = axes(ax, (5.5, 3.2))
    for number, (name, (mean, low, high)) in reversed(list(enumerate(lines.items()))):
        if number >= len(LINES) and name == baseline:
            ax.plot(steps, mean, label=plain(name), color="0.45", linestyle=":", linewidth=1.2, zorder=1)
            continue
        if number >= len(LINES):
            ax.plot(steps, mean, color="0.75", linewidth=0.8, zorder=1)
            continue
        colour, dash = LINES[number]
        style = (0, [0.6 * float(length) for length in dash.split()]) if dash else "solid"
        ax.plot(steps, mean, label=plain(name), color=colour, linestyle=style, linewidth=1.5, zorder=3)
        ax.fill_between(steps, low, high, alpha=0.15, color=colour, linewidth=0, zorder=2)
    _dress(ax, labels)
    if legend:
        legend_beside(ax)
    return ax


def legend_beside(ax: Axes) -> None:
    """The names of the lines of these axes, first line first, to the right of all panels of their figure."""
    marks, names = ax.get_legend_handles_labels()
    style = {"fontsize": LABEL, "frameon": False, "handlelength": 2.6}
    if ax.figure.get_layout_engine() is None:
        ax.legend(marks[::-1], names[::-1], **style)
        return
    ax.figure.legend(marks[::-1], names[::-1], loc="outside right upper", **style)


def bars(lines: Mapping[str, Sequence[float]], labels: Mapping[str, str], ax: Axes | None) -> Axes:
    """Mean, low and high of each name as horizontal bars, the first on top; labels as in `curves`."""
    ax = axes(ax, (5.5, 0.9 + ROW * len(lines)))
    mean, low, high = np.array(list(lines.values())[::-1], dtype=float).T
    rows = range(len(mean))
    reach = np.nan_to_num([mean - low, high - mean]).clip(0)
    ax.barh(rows, mean, xerr=reach, color=of_sign(1.0), error_kw=INTERVAL, height=0.7)
    ax.set_yticks(rows, [plain(name) for name in lines][::-1])
    ax.axvline(0, color="black", linewidth=0.5)
    _dress(ax, labels)
    ax.tick_params(axis="y", length=0)
    return ax


def signed_bars(
    lines: Sequence[tuple[str, float]],
    title: str,
    ax: Axes | None = None,
    *,
    sums: Sequence[tuple[str, float]] = (),
    intervals: Sequence[tuple[float, float]] = (),
) -> Axes:
    """Signed values as horizontal bars around zero, the first on top.

    Args:
        lines: names and values.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
        sums: what the values sum to, below them in grey.
        intervals: low and high end for each of the lines and sums, NaN where unknown; none without.
    """
    every = [*lines, *sums]
    ax = axes(ax, (5.5, 0.8 + ROW * len(every)))
    names = [plain(visible(name)) for name, _ in every][::-1]
    values = np.array([value for _, value in every], dtype=float)[::-1]
    colours = [*(of_sign(value) for _, value in lines), *(GREY for _ in sums)][::-1]
    rows = ax.barh(range(len(names)), values, color=colours, height=0.75)
    ends = values
    if len(intervals):
        low, high = np.array(intervals, dtype=float)[::-1].T
        reach = np.nan_to_num([values - low, high - values]).clip(0)
        ax.errorbar(values, range(len(names)), xerr=reach, fmt="none", **INTERVAL)
        ends = np.where(values >= 0, values + reach[1], values - reach[0])
    for row, (value, end) in enumerate(zip(values.tolist(), ends.tolist(), strict=True)):
        place = {"xytext": (3, 0), "ha": "left"}
        if value < 0:
            place = {"xytext": (-3, 0), "ha": "right"}
        text = {"fontsize": LABEL, "textcoords": "offset points", "va": "center_baseline"}
        ax.annotate(f"{value:+.3g}", (end, row), **place, **text)
    ax.set_yticks(range(len(rows)), names)
    ax.margins(x=0.15, y=0.02)
    ax.axvline(0, color="black", linewidth=0.5)
    _dress(ax, {"title": title})
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def histogram(edges: Sequence[float], counts: Sequence[int], title: str, name: str, ax: Axes | None = None) -> Axes:
    """How often each size occurs, on a logarithmic axis.

    Args:
        edges: of the bins, one more than there are bins.
        counts: of values in each.
        title: above it.
        name: of what is counted.
        ax: draw here; None makes a figure of fitting size.
    """
    ax = axes(ax, (5.5, 2.6))
    ax.stairs(counts, edges, fill=True, color=of_sign(1.0))
    ax.set_xscale("log")
    ax.minorticks_off()
    marked = edges[:: -(-(len(edges) - 1) // MOST_SIZES)]
    ax.set_xticks(marked, [f"{edge:.3g}" for edge in marked])
    _dress(ax, {"title": title, "xlabel": name, "ylabel": "tokens"})
    return ax


def axes(ax: Axes | None = None, size: tuple[float, float] = (7, 4.5)) -> Axes:
    """The axes that were passed, or new ones."""
    if ax is not None:
        return ax
    return _pyplot().subplots(figsize=size, layout="constrained")[1]


def set_title(ax: Axes, text: str) -> None:
    """A title at the left, on several lines where it is longer than the axes are wide."""
    inches = width_of(ax)
    if len(ax.figure.axes) == 1:  # nothing stands to the right of it
        inches += (1 - ax.get_position().x1) * ax.figure.bbox.width / ax.figure.dpi
    letters = max(24, int(inches * 72 / (0.55 * (LABEL + 2))))
    unbroken = TOKEN.sub(lambda token: token[0].replace(" ", NO_BREAK), plain(text))
    lines = textwrap.wrap(unbroken, letters, break_long_words=False) or [""]
    ax.set_title("\n".join(lines).replace(NO_BREAK, " "), fontsize=LABEL + 2, loc="left")


def width_of(ax: Axes) -> float:
    """Inches from the left end of axes to the right one."""
    return ax.get_position().width * ax.figure.bbox.width / ax.figure.dpi


def _dress(ax: Axes, labels: Mapping[str, str]) -> None:
    """Small labels, thin lines, no frame on the right or above; `labels` are ``xlabel``, ``ylabel``, ``title``."""
    ax.tick_params(labelsize=LABEL, width=0.5, length=2.5)
    for label in ("xlabel", "ylabel"):
        if label in labels:
            getattr(ax, f"set_{label}")(plain(labels[label]), fontsize=LABEL + 1)
    set_title(ax, labels.get("title", ""))
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_linewidth(0.5)


def on_white(rgb: tuple[int, int, int]) -> tuple[float, ...]:
    """A colour of the palette at full strength, on paper."""
    return tuple(1 - STRONGEST * (1 - channel / 255) for channel in rgb)


def of_sign(value: int | float) -> tuple[float, ...]:
    """The colour of a value's sign, on paper."""
    return on_white(sign_colour(value))


def plain(text: str) -> str:
    """Text as matplotlib shows it: a dollar sign would begin mathematics, an underscore in front hides a label."""
    if text.startswith("_"):
        text = f" {text}"
    return text.replace("$", r"\$")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: in a clone, pip install -e '.[plot]'.") from error
    return plt
