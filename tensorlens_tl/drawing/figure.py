"""Heat maps and evaluations as matplotlib figures, for papers (``tensorlens-tl[plot]``)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.drawing.marks import NEGATIVE, POSITIVE, STRONGEST, largest_of, visible

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
) -> Axes:
    """Signed scores `[query, key]` on matplotlib axes; `values` writes numbers into cells, None where they fit."""
    _pyplot()
    from matplotlib.colors import LinearSegmentedColormap

    height, width = plane.shape
    largest = largest_of(plane) or 1.0
    if values is None:
        values = max(height, width) <= FITTING
    ax = axes(ax, (2.2 + CELL * width, 1.6 + CELL * height))
    on_white = [tuple(1 - STRONGEST * (1 - channel / 255) for channel in rgb) for rgb in (NEGATIVE, POSITIVE)]
    colours = LinearSegmentedColormap.from_list("tensorlens", [on_white[0], (1, 1, 1), on_white[1]])
    image = ax.imshow(plane, cmap=colours, vmin=-largest, vmax=largest, aspect="equal" if height > 1 else "auto")
    ax.set_xticks(range(width), [_plain(visible(token)) for token in keys], rotation=90, fontsize=LABEL)
    ax.set_yticks(range(height), [_plain(visible(token)) for token in queries], fontsize=LABEL)
    ax.set_xlabel("source token")
    ax.set_ylabel("query")
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


def axes(ax: Axes | None = None, size: tuple[float, float] = (7, 4.5)) -> Axes:
    """The axes that were passed, or new ones."""
    if ax is not None:
        return ax
    return _pyplot().subplots(figsize=size, layout="constrained")[1]


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
