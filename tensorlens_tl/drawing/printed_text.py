"""A text in the colours of its scores as a matplotlib figure, with letters of one width."""

import unicodedata
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.drawing.figure import LABEL, axes, plain, scale, set_title, width_of
from tensorlens_tl.drawing.fonts import use_fonts_with_letters
from tensorlens_tl.drawing.marks import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is an extra

SIZE = LABEL + 1
LETTER = 0.62 * SIZE / 72
"""Points of a letter, and inches that it is wide at most."""

WIDTH = 6.5
LINE = 0.24
BELOW = 0.75
"""Inches: of a new figure, of a line, of what stands around the lines."""


def text(
    tokens: Sequence[str],
    values: np.ndarray,
    title: str,
    ax: Axes | None = None,
    *,
    marked: Collection[int] = (),
    first: int | None = None,
) -> Axes:
    """One prompt as coloured text with the scale of its colours below.

    Args:
        tokens: of the prompt.
        values: their scores, `[token]`.
        title: above it.
        ax: draw here; None makes a figure of fitting size.
        marked: tokens to underline, by number.
        first: the token that begins a line after a rule, as the first generated one does.
    """
    names = [visible(token) for token in tokens]
    inches = WIDTH
    if ax is not None:
        inches = width_of(ax)
    letters = max(12, int(inches / LETTER))
    starts = _starts(tokens, names, letters, first)
    lines = 1 + max((line for line, _ in starts), default=0)
    ax = axes(ax, (WIDTH, LINE * lines + BELOW))
    colours, least, largest = scale(values)
    image = _scale_below(ax, colours, least, largest)
    for number, ((line, column), name) in enumerate(zip(starts, names, strict=True)):
        _draw_token(ax, line, column, name, image.to_rgba(values[number]), underlined=number in marked)
    if first is not None:
        ax.axhline(starts[first][0] - 0.1, color="0.6", linewidth=0.5)
    ax.set_xlim(0, letters)
    ax.set_ylim(lines, 0)
    ax.set_axis_off()
    set_title(ax, title)
    use_fonts_with_letters(ax)
    return ax


def _starts(tokens: Sequence[str], names: Sequence[str], letters: int, first: int | None) -> list[tuple[int, int]]:
    """Line and column at which each token begins; a line break in a token ends its line."""
    starts = list[tuple[int, int]]()
    line = 0
    column = 0
    for number, name in enumerate(names):
        wide = cells(name)
        if column and (number == first or column + wide > letters):
            line += 1
            column = 0
        starts.append((line, column))
        column += wide
        if "\n" in tokens[number]:
            line += 1
            column = 0
    return starts


def cells(name: str) -> int:
    """Letters of one width that a text takes; East Asian ones are wide."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in name)


def _draw_token(ax: Axes, line: int, column: int, name: str, colour: Any, *, underlined: bool) -> None:
    from matplotlib.patches import Rectangle

    wide = cells(name)
    ax.add_patch(Rectangle((column, line + 0.06), wide, 0.88, facecolor=colour, linewidth=0))
    style = {"fontsize": SIZE, "family": "monospace", "ha": "center", "va": "center_baseline"}
    ax.text(column + wide / 2, line + 0.5, plain(name), **style)
    if underlined:
        ax.plot([column, column + wide], [line + 0.94] * 2, color="black", linewidth=1, solid_capstyle="butt")


def _scale_below(ax: Axes, colours: Any, least: float, largest: float) -> Any:
    """The colour of every number, with its scale drawn below."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    image = ScalarMappable(Normalize(least, largest), colours)
    bar = ax.figure.colorbar(image, ax=ax, orientation="horizontal", shrink=0.35, aspect=22, anchor=(0, 1), pad=0.02)
    bar.outline.set_linewidth(0.5)
    bar.ax.tick_params(labelsize=LABEL, width=0.5, length=2)
    return image
