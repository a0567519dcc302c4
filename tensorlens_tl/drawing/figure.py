"""Heat maps, bars and curves as matplotlib figures, for papers (extra ``plot``).

Every picture is drawn on axes `ax`, or where these are None on those of a new figure of fitting size, below a `title`.
"""

import math
import re
import textwrap
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorlens_tl.drawing.charts import LINES
from tensorlens_tl.drawing.graphs import READS, WHOLE, GraphPicture, Layout, curve, layout
from tensorlens_tl.drawing.marks import NEGATIVE, POSITIVE, STRONGEST, largest_of, share, short, sign_colour, visible
from tensorlens_tl.drawing.matrix import head_cells
from tensorlens_tl.errors import warn_caller

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
    """Numbers of heads and MLPs by layer and column (``"H3"``, ``"MLP"``) as a heat map, blank where there is none."""
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
        ax.plot(steps, mean, label=plain(name), color=colour, linestyle=_dash(dash, 0.8), linewidth=1.5, zorder=3)
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
        name: of what is counted.
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


ACROSS = 96
DOWN = 130
"""Pixels of the picture on a page, to an inch of the figure."""


def graph(picture: GraphPicture, title: str, ax: Axes | None = None) -> Axes:
    """Positions side by side, layers upwards, the target on top; widths and sizes are weights, lines are readings."""
    places = layout(picture)
    x, y, width, height = places.x, places.y, places.width, places.height
    ax = axes(ax, (max(3.0, width / ACROSS), max(2.0, height / DOWN)))
    _draw_edges(picture, places, ax)
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
            column = places.columns[position]
            name = plain(short(visible(token), 10))
            ax.text(column, height, name, ha="center", va="bottom", fontsize=LABEL, color="0.35")
    ax.set_xlim(0, width)
    ax.set_ylim(height + 4, 0)
    ax.set_axis_off()
    set_title(ax, title)
    return ax


def _draw_edges(picture: GraphPicture, places: Layout, ax: Axes) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    strongest = largest_of(np.array(picture.strengths))
    for edge in np.abs(picture.strengths).argsort().tolist():
        strength = picture.strengths[edge]
        line = READS.get(picture.reads[edge], WHOLE)
        path = Path(curve(picture, edge, places), [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
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


LAST_RESORT = "Last Resort"
"""A font of boxes that name the script; it has every character and shows none."""

_WARNED: set[str] = set()


def use_fonts_with_letters(drawn: Any) -> None:
    """Give every text of some axes or of a figure, beside its own font, those that have the letters which it lacks.

    Letters that no font of the machine has are warned of once for each script.
    """
    from matplotlib.text import Text

    missing: set[str] = set()
    for text in drawn.findobj(Text):
        lacking = [letter for letter in dict.fromkeys(text.get_text()) if _needs_another(letter, text)]
        others = {letter: _font_with(letter) for letter in lacking}
        missing |= {script(letter) for letter, font in others.items() if not font}
        fonts = dict.fromkeys(font for font in others.values() if font)
        if fonts:
            text.set_family([text.get_fontproperties().get_name(), *fonts])
    new = sorted(missing - _WARNED)
    if new:
        _WARNED.update(new)
        warn_caller(
            f"plot: no font on this machine has letters of {', '.join(new)}, so a figure shows boxes for them. Install "
            "one (such as Noto Sans of that script), or save as .html, which takes the fonts of whoever reads it.",
            UserWarning,
        )


def script(letter: str) -> str:
    """The script of a letter in words, as its name in Unicode begins.

    >>> script("ก"), script("א")
    ('Thai', 'Hebrew')
    """
    return unicodedata.name(letter, "unnamed characters").split()[0].title()


def _needs_another(letter: str, text: Any) -> bool:
    from matplotlib.font_manager import findfont

    if letter.isspace() or ord(letter) < 128:
        return False
    return ord(letter) not in _letters(findfont(text.get_fontproperties()))


@lru_cache(maxsize=512)
def _letters(path: str) -> frozenset[int]:
    """The characters that a font's file has; none of one that cannot be read."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@lru_cache(maxsize=4096)
def _font_with(letter: str) -> str:
    """The name of a font that has a letter, an upright and ordinary one where there is one; an empty text for none."""
    from matplotlib.font_manager import fontManager

    def unusual(font: Any) -> tuple[bool, bool, str]:
        return font.style != "normal", str(font.weight) not in ("400", "normal"), font.name

    for font in sorted(fontManager.ttflist, key=unusual):
        if not font.name.startswith(LAST_RESORT) and ord(letter) in _letters(font.fname):
            return font.name
    return ""
