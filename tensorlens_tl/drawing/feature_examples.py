"""A feature of a sparse dictionary as HTML: how often it is active, where most, and which tokens it promotes."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from tensorlens_tl.drawing.marks import POSITIVE, colour, colour_bar, item, largest_of, number, visible

HISTOGRAM_WIDTH = 340
HISTOGRAM_HEIGHT = 90
FLOOR = 18
"""Pixels of the histogram, and of the line of figures below it."""


class Example(NamedTuple):
    """One row of a data set around the token where the feature is largest.

    Attributes:
        row: its number in the data set.
        positions: of the tokens shown.
        tokens: their texts.
        values: of the feature, one for each.
        peak: which of them is the largest token.
    """

    row: int
    positions: Sequence[int]
    tokens: Sequence[str]
    values: Sequence[float]
    peak: int


def examples(rows: Sequence[Example]) -> str:
    """Each example as a line of shaded tokens; all lines have one scale of colours."""
    if not rows:
        return "<p>Not active at any token.</p>"
    values = np.concatenate([np.asarray(row.values, dtype=float) for row in rows])
    largest = largest_of(values)
    lines = []
    for count, row in enumerate(rows):
        marks = []
        for column, (position, token, value) in enumerate(zip(row.positions, row.tokens, row.values, strict=True)):
            label = f"{visible(token)} at {position} of row {row.row}: {number(value)}"
            first = count == 0 and column == 0
            shade = colour(value, largest)
            marks.append(item(visible(token), label, shade, marked=column == row.peak, first=first))
        fact = f"{number(row.values[row.peak])}, row {row.row} at {row.positions[row.peak]}"
        lines.append(f'<div><span class="n">{escape(fact)} </span>{"".join(marks)}</div>')
    return f'<div class="line rove">{"".join(lines)}</div>{colour_bar(values)}'


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
    total = sum(counts)
    label = f"sizes of {total} activations, from {edges[first]:.3g} to {edges[last]:.3g}"
    height = HISTOGRAM_HEIGHT + FLOOR
    return (
        f'<div class="scroll"><svg width="{HISTOGRAM_WIDTH}" height="{height}" '
        f'viewBox="0 0 {HISTOGRAM_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(bars)}{ends}</svg>'
        "</div>"
    )


def promoted(tokens: Sequence[str], logits: Sequence[float]) -> str:
    """The tokens that a feature's decoder row promotes, with what one unit of it gives each."""
    if not tokens:
        return ""
    marks = [
        f'<span title="{number(logit)}">{escape(visible(token))}</span>'
        for token, logit in zip(tokens, logits, strict=True)
    ]
    return f'<div class="n">promotes, per unit of the decoder</div><div class="special">{"".join(marks)}</div>'
