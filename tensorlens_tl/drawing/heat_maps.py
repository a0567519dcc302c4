"""Heat maps of prompts: coloured text or a matrix, what they are made of below, and several columns side by side."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from tensorlens_tl.drawing.marks import (
    colour,
    colour_bar,
    largest_of,
    note as note_line,
    token_line,
    token_marks,
    visible,
)
from tensorlens_tl.drawing.matrix import matrix, small_multiples

LOOSE = 1e-2
"""A gap above this is pointed out: scores and bias are not their total."""

GAP = "gap"
"""The fact that is a small relative number."""


class Stack(NamedTuple):
    """Maps that a picture is made of, such as layers or heads: `[plane, row, key]`, and the rows' labels."""

    name: str
    planes: np.ndarray
    rows: list[str]


def prompt(
    tokens: Sequence[str],
    positions: Sequence[int],
    plane: np.ndarray,
    queries: Sequence[tuple[int, str]],
    *,
    label: str,
    stacks: Sequence[Stack] = (),
    note: str = "",
    parts: Sequence[str] = (),
) -> str:
    """One prompt: coloured text for one query, a matrix for several; stacks below, to be opened.

    Args:
        tokens: of the source positions.
        positions: what those positions are called.
        plane: scores, `[query, key]`.
        queries: position and token of each query.
        label: what is shown, for screen readers.
        stacks: what it is made of.
        note: a line below.
        parts: which part of the prompt each token belongs to, by name, where it has several.
    """
    if len(queries) == 1:
        drawings = [token_line(tokens, plane[0].tolist(), queries[0][0], positions, parts)]
    else:
        drawings = [matrix([token for _, token in queries], tokens, plane, label=label)]
    drawings.append(note_line(note))
    for name, planes, rows in stacks:
        names = [f"{name} {number}" for number in range(len(planes))]
        if planes.shape[1] == 1:
            chart = matrix(names, tokens, planes[:, 0], label=f"by {name}", corner=f"{name} ↓ key →")
        else:
            chart = small_multiples(names, rows, tokens, planes, label=f"by {name}")
        drawings.append(f"<details><summary>By {escape(name)}</summary>{chart}</details>")
    return "".join(drawings)


def strips(
    tokens: Mapping[int, str],
    lines: Mapping[str, np.ndarray],
    hints: Mapping[str, str],
    query: int | None = None,
    *,
    scaled_by: Sequence[str] = (),
) -> str:
    """The prompt as coloured text, once for each result, all on one scale.

    Args:
        tokens: by position.
        lines: values by name, one for each token.
        hints: what each name stands for, in words.
        query: the position that is underlined.
        scaled_by: the names whose values set the scale; larger ones are drawn like the largest of these. All, where
            there are none.
    """
    everything = np.concatenate([lines[name].astype(float) for name in scaled_by or lines])
    largest = largest_of(everything)
    rows = []
    for count, (name, values) in enumerate(lines.items()):
        marks = token_marks(
            list(tokens.values()),
            values.tolist(),
            largest,
            query,
            list(tokens),
            named=f"{name}, ",
            first=count == 0,
        )
        rows.append(
            f'<div class="strip"><span class="name" title="{escape(hints[name])}">{escape(name)}</span>'
            f'<span class="line">{marks}</span></div>'
        )
    return f'<div class="strips rove">{"".join(rows)}</div>{colour_bar(everything)}'


def side_by_side(
    tokens: Mapping[int, str],
    columns: Mapping[str, np.ndarray],
    hints: Mapping[str, str],
    facts: Mapping[str, Mapping[str, float | None]],
    *,
    scaled_by: Sequence[str] | None = None,
    caption: str = "",
) -> str:
    """A row per source token, a column per result.

    Args:
        tokens: by position.
        columns: values by heading, one for each token.
        hints: what each heading stands for, in words.
        facts: lines below the tokens, such as bias, total and gap: by name, then by heading.
        scaled_by: the headings whose values set one scale for all columns, see `strips`; None gives each its own.
        caption: a line below.
    """
    largest = {name: largest_of(values) for name, values in columns.items()}
    if scaled_by is not None:
        largest = dict.fromkeys(columns, max(largest[name] for name in scaled_by or columns))
    heads = "".join(f'<th scope="col" title="{escape(hints[name])}">{escape(name)}</th>' for name in columns)
    lines = []
    for row, (position, token) in enumerate(tokens.items()):
        cells = "".join(
            f'<td style="{colour(float(values[row]), largest[name])}">{values[row]:.3g}</td>'
            for name, values in columns.items()
        )
        lines.append(f'<tr><th scope="row" title="{position}">{escape(visible(token))}</th>{cells}</tr>')
    first = " class=sum"
    for fact, values in facts.items():
        if any(value is not None for value in values.values()):
            line = "".join(_fact(fact, values.get(name)) for name in columns)
            lines.append(f'<tr{first}><th scope="row">{escape(fact)}</th>{line}</tr>')
            first = ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="methods side by side"><table class="r beside">'
        f'<thead><tr><th scope="col">token</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        f"{note_line(caption)}"
    )


def _fact(fact: str, value: int | float | None) -> str:
    if value is None:
        return "<td></td>"
    if fact != GAP:
        return f"<td>{value:.3g}</td>"
    if value > LOOSE:
        return f"<td class=loose>{value:.1e}</td>"
    return f"<td>{value:.1e}</td>"
