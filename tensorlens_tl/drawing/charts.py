"""Charts: means with intervals as bars, curves, and how often each size occurs."""

from collections.abc import Sequence
from html import escape

import numpy as np

from tensorlens_tl.drawing.marks import POSITIVE, short, tab_stop

LINES = (("#3a8fd6", ""), ("#e0861f", "7 3"), ("#1d9e77", "2 3"), ("#cc6fa0", "9 3 2 3"), ("#8f7ae6", "4 2"))
"""Colours that common kinds of colour blindness keep apart, on either ground, and dashes for all others."""

WIDTH = 760
HEIGHT = 300
LEFT = 64
RIGHT = 210
TOP = 12
BOTTOM = 40
"""Pixels of a chart, and of what stands around it."""

LINE_HEIGHT = 13

HISTOGRAM_WIDTH = 340
HISTOGRAM_HEIGHT = 90
FLOOR = 18
"""Pixels of the histogram, and of the line of figures below it."""


def intervals(names: Sequence[str], means: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> str:
    """A row per name: the interval as a bar, the mean as a mark in it, and both in figures; missing values left out."""
    shown = np.isfinite([means, lows, highs]).all(0)
    if not shown.any():
        return "<p>No values.</p>"
    start = min(0.0, float(lows[shown].min()))
    end = max(0.0, float(highs[shown].max()))
    scale = 100 / ((end - start) or 1.0)
    lines = []
    for row in map(int, np.flatnonzero(shown)):
        mean, low, high = (float(values[row]) for values in (means, lows, highs))
        left = scale * (low - start)
        width = scale * (high - low)
        mark = scale * (mean - start)
        bar = f'<i><b style="left:{left:.1f}%;width:{width:.1f}%"></b><s style="left:{mark:.1f}%"></s></i>'
        lines.append(
            f'<tr><td>{escape(names[row])}</td><td class="track">{bar}</td>'
            f"<td>{mean:.3g} [{low:.3g}, {high:.3g}]</td></tr>"
        )
    scale_ends = f"<th></th><th class=scale><span>{start:.3g}</span><span>{end:.3g}</span></th><th>mean [95 %]</th>"
    return (
        f'<div class="scroll"><table class="r spans"><tbody><tr>{scale_ends}</tr>{"".join(lines)}</tbody></table></div>'
    )


def curves(
    names: Sequence[str],
    steps: np.ndarray,
    means: np.ndarray,
    lows: np.ndarray,
    highs: np.ndarray,
    *,
    metric: str,
    axis_name: str,
) -> str:
    """A line per name over the steps; the first few are coloured, with their intervals, all can be pointed at and read.

    Args:
        names: of the lines, best first.
        steps: `[step]`.
        means: `[name, step]`.
        lows, highs: the intervals' ends of the first `len(LINES)` names, `[name, step]`.
        metric, axis_name: what is shown, over what.
    """
    bottom = float(np.nanmin(means))
    top = float(np.nanmax(means))
    if top == bottom:
        top += 1.0
    x = LEFT + (WIDTH - LEFT - RIGHT) * (steps - steps[0]) / ((steps[-1] - steps[0]) or 1.0)

    def height(of: np.ndarray) -> np.ndarray:
        return (HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (of - bottom) / (top - bottom)).clip(0, HEIGHT)

    y = height(means)
    labels = _apart(y[: len(LINES), -1])
    marks = []
    for row, name in reversed(list(enumerate(names))):
        read = ", ".join(f"{step:.3g}: {mean:.3g}" for step, mean in zip(steps, means[row], strict=True))
        label = escape(f"{name} · {axis_name} {read}")
        colour, dash = dict(enumerate(LINES)).get(row, ("currentColor", ""))
        way = _way(x, y[row])
        kind = "t other"
        beside = ""
        line = f'<path class="line" d="{way}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>'
        if row < len(LINES) and np.isfinite(y[row, -1]):
            ends = _way(np.concatenate([x, x[::-1]]), np.concatenate([height(highs[row]), height(lows[row])[::-1]]))
            kind = "t"
            beside = (
                f'<path class="band" d="{ends}Z" fill="{colour}"/>'
                f'<path d="M{x[-1]:.0f} {y[row, -1]:.0f}L{x[-1] + 6:.0f} {labels[row]:.0f}" stroke="{colour}"/>'
                f'<text x="{x[-1] + 8:.0f}" y="{labels[row] + 4:.0f}">{escape(short(name, 34))}</text>'
            )
        marks.append(
            f'<g class="{kind}" role="img" {tab_stop(row == 0)} '
            f'aria-label="{label}"><title>{label}</title><path class="wide" d="{way}" fill="none"/>{line}{beside}</g>'
        )
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    svg = f'<svg {size} role="group" aria-label="{escape(metric)} by method">{_axes(steps, x, bottom, top, axis_name)}'
    return (
        f'<div class="graph curves"><div class="scroll rove">{svg}{"".join(marks)}</svg></div>'
        '<output class="out" aria-live="polite">Point at a line to read it.</output></div>'
    )


def _axes(steps: np.ndarray, x: np.ndarray, bottom: int | float, top: int | float, name: str) -> str:
    floor = HEIGHT - BOTTOM
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines = [f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" stroke-opacity=".5"/>']
    for value, y in ((top, TOP), ((top + bottom) / 2, (TOP + floor) / 2), (bottom, floor)):
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{value:.3g}</text>')
    shown = range(0, len(steps), -(-len(steps) // 11))
    lines += [f'<text x="{x[i]:.0f}" y="{floor + 15}" text-anchor="middle">{steps[i]:.3g}</text>' for i in shown]
    lines.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(name)}</text>')
    return "".join(lines)


def _way(x: np.ndarray, y: np.ndarray) -> str:
    """A path through points; it breaks where a value is missing."""
    way = []
    pen = "M"
    for across, up in zip(x, y, strict=True):
        if np.isfinite(up):
            way.append(f"{pen}{across:.0f} {up:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(way)


def _apart(y: np.ndarray) -> np.ndarray:
    """Heights of labels beside the ends of their lines, a line of text apart."""
    y = np.nan_to_num(y, nan=float(TOP))
    placed = np.empty_like(y)
    least = float(TOP)
    for row in y.argsort(kind="stable"):
        least = placed[row] = max(y[row], least)
        least += LINE_HEIGHT
    return placed - max(0.0, placed.max(initial=0.0) - (HEIGHT - BOTTOM))


def histogram(edges: Sequence[float], counts: Sequence[int]) -> str:
    """How often each size occurs, on a logarithmic axis; bins in which nothing lies at either end are left out.

    Args:
        edges: of the bins, one more than there are bins.
        counts: of values in each.
    """
    filled = np.flatnonzero(counts)
    if not len(filled):
        return ""
    first = int(filled[0])
    last = int(filled[-1]) + 1
    width = HISTOGRAM_WIDTH / (last - first)
    most = max(counts)
    bars = []
    for bin in range(first, last):
        height = HISTOGRAM_HEIGHT * counts[bin] / most
        words = f"{edges[bin]:.3g} to {edges[bin + 1]:.3g}: {counts[bin]} tokens"
        bars.append(
            f'<rect x="{(bin - first) * width:.1f}" y="{HISTOGRAM_HEIGHT - height:.1f}" width="{width * 0.9:.1f}" '
            f'height="{height:.1f}" fill="rgb{POSITIVE}"><title>{escape(words)}</title></rect>'
        )
    ends = (
        f'<text x="0" y="{HISTOGRAM_HEIGHT + FLOOR - 4}">{edges[first]:.3g}</text>'
        f'<text x="{HISTOGRAM_WIDTH}" y="{HISTOGRAM_HEIGHT + FLOOR - 4}" text-anchor="end">{edges[last]:.3g}</text>'
    )
    label = f"sizes of {sum(counts)} activations, from {edges[first]:.3g} to {edges[last]:.3g}"
    height = HISTOGRAM_HEIGHT + FLOOR
    return (
        f'<div class="scroll"><svg width="{HISTOGRAM_WIDTH}" height="{height}" '
        f'viewBox="0 0 {HISTOGRAM_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(bars)}{ends}</svg>'
        "</div>"
    )
