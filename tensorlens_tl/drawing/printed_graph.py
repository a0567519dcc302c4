"""Graphs as matplotlib figures."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.drawing.figure import LABEL, axes, of_sign, plain, set_title
from tensorlens_tl.drawing.graphs import READS, WHOLE, GraphPicture, curve, layout
from tensorlens_tl.drawing.marks import largest_of, share, short, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is an extra

ACROSS = 96
DOWN = 130
"""Pixels of the picture on a page, to an inch of the figure."""


def graph(picture: GraphPicture, title: str, ax: Axes | None = None) -> Axes:
    """Positions side by side, layers upwards, the target on top; widths and sizes are weights, lines are readings.

    Args:
        picture: nodes and edges.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
    """
    x, y, width, height = layout(picture)
    ax = axes(ax, (max(3.0, width / ACROSS), max(2.0, height / DOWN)))
    _draw_edges(picture, x, y, ax)
    sizes = [15 + 85 * abs(part) for part in picture.sizes]
    colours = [of_sign(part) for part in picture.sizes]
    ax.scatter(x, y, s=sizes, c=colours, zorder=2, edgecolors="white", linewidths=0.5)
    for node, name in enumerate(picture.names):
        ax.annotate(
            plain(short(name, 14)),
            (x[node], y[node]),
            (0, 6),
            textcoords="offset points",
            fontsize=LABEL,
            ha="center",
            zorder=3,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "boxstyle": "square,pad=0.05"},
        )
    if picture.placed:
        for position, token in dict(zip(picture.positions, picture.tokens, strict=True)).items():
            column = x[np.array(picture.positions) == position].mean()
            name = plain(short(visible(token), 10))
            ax.text(column, height, name, ha="center", va="bottom", fontsize=LABEL, color="0.35")
    ax.set_xlim(0, width)
    ax.set_ylim(height + 4, 0)
    ax.set_axis_off()
    set_title(ax, title)
    return ax


def _draw_edges(picture: GraphPicture, x: np.ndarray, y: np.ndarray, ax: Axes) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    strongest = largest_of(np.array(picture.strengths))
    for edge in np.abs(picture.strengths).argsort().tolist():
        strength = picture.strengths[edge]
        line = READS.get(picture.reads[edge], WHOLE)
        path = Path(curve(picture, edge, x, y), [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
        part = share(strength, strongest)
        width = 0.4 + 3 * abs(part)
        style = {"edgecolor": of_sign(part), "facecolor": "none", "alpha": 0.7, "linewidth": width}
        patch = PathPatch(path, zorder=1, linestyle=_dash(line.dash, 1 / width), capstyle="butt", **style)
        ax.add_patch(patch)
    if picture.readings:
        marks = [
            Line2D([], [], color="0.3", linewidth=1.2, linestyle=_dash(READS[kind].dash, 0.6), label=kind)
            for kind in picture.readings
        ]
        style = {"fontsize": LABEL, "frameon": False, "handlelength": 3, "borderaxespad": 0}
        ax.legend(handles=marks, loc="upper left", ncols=len(marks), **style)


def _dash(dash: str, factor: float) -> Any:
    """A dash in pixels as matplotlib's, which it multiplies by the width of the line."""
    if not dash:
        return "solid"
    return (0, [0.75 * float(length) * factor for length in dash.split()])
