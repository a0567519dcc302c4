"""Heat maps of prompts: coloured text or a matrix, what they are made of below, and several columns side by side."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from tensorlens_tl.drawing.marks import colour, largest_of, note as note_line, token_line, visible
from tensorlens_tl.drawing.matrix import matrix, small_multiples

LOOSE = 1e-2
"""A gap above this is pointed out: scores and bias are not their total."""

LOOSELY = (
    " Where a gap is framed, scores and bias do not add up to the total: a quadrature that has not converged; "
    "raise its steps=."
)


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


def side_by_side(
    tokens: Mapping[int, str],
    columns: Mapping[str, np.ndarray],
    hints: Mapping[str, str],
    facts: Mapping[str, Mapping[str, float | None]],
) -> str:
    """A row per source token, a column per result, each in its own colours, since methods have their own units.

    Args:
        tokens: by position.
        columns: values by heading, one for each token.
        hints: what each heading stands for, in words.
        facts: lines below the tokens, such as bias, total and gap: by name, then by heading.
    """
    largest = {name: largest_of(values) for name, values in columns.items()}
    heads = "".join(f'<th scope="col" title="{escape(hints[name])}">{escape(name)}</th>' for name in columns)
    lines = []
    for row, (position, token) in enumerate(tokens.items()):
        cells = "".join(
            f'<td style="{colour(float(values[row]), largest[name])}">{values[row]:.3g}</td>'
            for name, values in columns.items()
        )
        lines.append(f'<tr><td title="{position}">{escape(visible(token))}</td>{cells}</tr>')
    first = " class=sum"
    for fact, values in facts.items():
        if any(value is not None for value in values.values()):
            line = "".join(_fact(fact, values.get(name)) for name in columns)
            lines.append(f'<tr{first}><th scope="row">{escape(fact)}</th>{line}</tr>')
            first = ""
    caption = "Blue adds, orange takes away; each column from its own largest value."
    if any("class=loose" in line for line in lines):
        caption += LOOSELY
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="methods side by side"><table class="r"><thead><tr>'
        f'<th scope="col">token</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        f"{note_line(caption)}"
    )


def _fact(fact: str, value: int | float | None) -> str:
    if value is None:
        return "<td></td>"
    if fact != "gap":
        return f"<td>{value:.3g}</td>"
    if value > LOOSE:
        return f"<td class=loose>{value:.1e}</td>"
    return f"<td>{value:.1e}</td>"
