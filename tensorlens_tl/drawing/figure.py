"""Heat maps, bars, curves and graphs as matplotlib figures, for papers (``tensorlens-tl[plot]``)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.drawing.graphs import GraphPicture, layout
from tensorlens_tl.drawing.marks import NEGATIVE, POSITIVE, STRONGEST, largest_of, share, short, sign_colour, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is an extra

CELL = 0.28
LABEL = 7
"""Inches of a cell, points of a label."""

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
        values: write numbers into cells; None does so where they fit.
        names: what rows and columns are.
    """
    _pyplot()
    from matplotlib.colors import LinearSegmentedColormap

    height, width = plane.shape
    largest = largest_of(plane) or 1.0
    if values is None:
        values = max(height, width) <= FITTING
    ax = axes(ax, (2.2 + CELL * width, 1.6 + CELL * height))
    scale = [_on_white(NEGATIVE), (1, 1, 1), _on_white(POSITIVE)]
    least = -largest
    if not bool((plane < 0).any()):
        scale = scale[1:]
        least = 0.0
    colours = LinearSegmentedColormap.from_list("tensorlens", scale)
    image = ax.imshow(plane, cmap=colours, vmin=least, vmax=largest, aspect="equal" if height > 1 else "auto")
    ax.set_xticks(range(width), [_plain(visible(token)) for token in keys], rotation=90, fontsize=LABEL)
    ax.set_yticks(range(height), [_plain(visible(token)) for token in queries], fontsize=LABEL)
    ax.set_ylabel(names[0])
    ax.set_xlabel(names[1])
    ax.set_title(_plain(title), fontsize=LABEL + 2, loc="left")
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_linewidth(0.5)
    if values:
        for row, column in np.ndindex(plane.shape):
            if plane[row, column]:
                ax.text(column, row, f"{plane[row, column]:.2g}", ha="center", va="center", fontsize=LABEL - 2)
    ax.figure.colorbar(image, ax=ax, shrink=0.8 if height > 4 else 1.0).ax.tick_params(labelsize=LABEL)
    return ax


def curves(
    steps: np.ndarray,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    labels: Mapping[str, str],
    ax: Axes | None,
) -> Axes:
    """Mean, low and high of each line over the steps; `labels` are matplotlib's ``xlabel``, ``ylabel``, ``title``."""
    ax = axes(ax)
    for name, (mean, low, high) in lines.items():
        (line,) = ax.plot(steps, mean, label=_plain(name))
        ax.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
    ax.set(**{what: _plain(text) for what, text in labels.items()})
    ax.legend(fontsize="small")
    return ax


def bars(lines: Mapping[str, Sequence[float]], labels: Mapping[str, str], ax: Axes | None) -> Axes:
    """Mean, low and high of each name as horizontal bars, the first on top."""
    ax = axes(ax)
    mean, low, high = np.array(list(lines.values())[::-1], dtype=float).T
    ax.barh([_plain(name) for name in lines][::-1], mean, xerr=np.nan_to_num([mean - low, high - mean]).clip(0))
    ax.set(**{what: _plain(text) for what, text in labels.items()})
    return ax


def signed_bars(lines: Sequence[tuple[str, float]], title: str, ax: Axes | None = None) -> Axes:
    """Signed values as horizontal bars around zero, the first on top.

    Args:
        lines: names and values.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
    """
    ax = axes(ax, (5.5, 1.0 + 0.24 * len(lines)))
    names = [_plain(visible(name)) for name, _ in lines][::-1]
    values = np.array([value for _, value in lines])[::-1]
    rows = ax.barh(range(len(names)), values, color=[_of_sign(value) for value in values])
    ax.bar_label(rows, [f"{value:+.3g}" for value in values], padding=2, fontsize=LABEL)
    ax.set_yticks(range(len(names)), names, fontsize=LABEL + 1)
    ax.margins(x=0.15)
    ax.axvline(0, color="black", linewidth=0.5)
    ax.tick_params(axis="x", labelsize=LABEL)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_title(_plain(title), fontsize=LABEL + 2, loc="left")
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
    ax.stairs(counts, edges, fill=True, color=_of_sign(1.0))
    ax.set_xscale("log")
    ax.set_xlabel(name)
    ax.set_ylabel("tokens")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(_plain(title), fontsize=LABEL + 2, loc="left")
    return ax


def graph(picture: GraphPicture, title: str, ax: Axes | None = None) -> Axes:
    """Positions side by side, layers upwards, the target on top; widths and sizes are weights.

    Args:
        picture: nodes and edges.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
    """
    _pyplot()
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    x, y, width, height = layout(picture)
    ax = axes(ax, (max(3.0, width / 90), max(2.0, height / 90)))
    strongest = largest_of(np.array(picture.strengths))
    for source, target, strength in zip(picture.sources, picture.targets, picture.strengths, strict=True):
        middle = (y[source] + y[target]) / 2
        corners = [(x[source], y[source]), (x[source], middle), (x[target], middle), (x[target], y[target])]
        curve = Path(corners, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
        part = share(strength, strongest)
        line = {"edgecolor": _of_sign(part), "linewidth": 0.4 + 3 * abs(part), "facecolor": "none", "alpha": 0.6}
        ax.add_patch(PathPatch(curve, zorder=1, **line))
    largest = largest_of(np.array(picture.weights[:-1]))
    parts = [share(weight, largest) for weight in picture.weights[:-1]] + [1.0]
    sizes = [15 + 85 * abs(part) for part in parts]
    ax.scatter(x, y, s=sizes, c=[_of_sign(part) for part in parts], zorder=2, edgecolors="white", linewidths=0.5)
    for node, name in enumerate(picture.names):
        label = {"fontsize": LABEL - 1, "ha": "center", "zorder": 3}
        ax.annotate(_plain(short(name, 14)), (x[node], y[node]), (0, 6), textcoords="offset points", **label)
    for position, token in dict(zip(picture.positions, picture.tokens, strict=True)).items():
        column = x[np.array(picture.positions) == position].mean()
        ax.text(column, height, _plain(short(visible(token), 12)), ha="center", va="bottom", fontsize=LABEL)
    ax.set_xlim(0, width)
    ax.set_ylim(height + 20, 0)
    ax.set_axis_off()
    ax.set_title(_plain(title), fontsize=LABEL + 2, loc="left")
    return ax


def axes(ax: Axes | None = None, size: tuple[float, float] = (7, 4.5)) -> Axes:
    """The axes that were passed, or new ones."""
    if ax is not None:
        return ax
    return _pyplot().subplots(figsize=size, layout="constrained")[1]


def _on_white(rgb: tuple[int, int, int]) -> tuple[float, ...]:
    """A colour of the palette at full strength, on paper."""
    return tuple(1 - STRONGEST * (1 - channel / 255) for channel in rgb)


def _of_sign(value: float) -> tuple[float, ...]:
    return _on_white(sign_colour(value))


def _plain(text: str) -> str:
    """Text as matplotlib shows it: a dollar sign would begin mathematics, an underscore in front hides a label."""
    if text.startswith("_"):
        text = f" {text}"
    return text.replace("$", r"\$")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install 'tensorlens-tl[plot]'.") from error
    return plt
