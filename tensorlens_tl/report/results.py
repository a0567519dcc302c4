"""Pictures of Attributions: of one, and of several methods side by side for one prompt."""

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from torch import Tensor

from tensorlens_tl.attribution import AXES, Attribution
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.report.marks import colour, largest_of, number, token_line, visible
from tensorlens_tl.report.matrix import matrix, small_multiples
from tensorlens_tl.report.page import Picture, panel

LOOSE = 1e-2
"""A residual above this is pointed out: scores and bias are not their total."""

LOOSELY = (
    " Where a residual is framed, scores and bias do not add up to the total: a quadrature that has not converged; "
    "raise its steps=."
)

MOST_PROMPTS = 8
"""Prompts of a batch that one picture shows."""


def attribution(result: Attribution, batch: int | None = None) -> str:
    """The heat maps of one result as HTML: coloured text for one query, a matrix for several.

    A further axis (heads) and the method's layers become small multiples, or rows where there is one query.

    Args:
        result: any Attribution.
        batch: one prompt, or None for all (of many, the first few; a note says how many are left out).
    """
    count = len(result.tokens)
    chosen = range(min(count, MOST_PROMPTS)) if batch is None else [batch]
    parts = [_prompt(result, one) for one in chosen]
    if batch is None and count > MOST_PROMPTS:
        parts.append(f'<div class="n">{count - MOST_PROMPTS} more prompts: to_html(batch={MOST_PROMPTS}) …</div>')
    facts = " · ".join(f"{name.replace('_', ' ')}: {fact}" for name, fact in result.provenance.items())
    return panel(result.describe(), *parts, notes=facts)


def _prompt(result: Attribution, batch: int) -> str:
    mask = result.mask[batch].tolist()
    keys = [position for position, real in enumerate(mask) if real]
    tokens = [result.tokens[batch][position] for position in keys]
    asked = result.queries[batch].tolist()
    rows = [number for number, position in enumerate(asked) if mask[position]]
    labels = [result.tokens[batch][asked[row]] for row in rows]
    plane = _array(result.plane(batch))[np.ix_(rows, keys)]
    if len(rows) == 1:
        parts = [token_line(tokens, plane[0].tolist(), asked[rows[0]], keys)]
    else:
        parts = [matrix(labels, tokens, plane, label=result.describe())]
    if result.additive and result.bias is not None and result.total is not None and len(rows) == 1:
        bias, total = (float(t[batch, rows[0]]) for t in (result.bias, result.total))
        parts.append(f'<div class="n">bias, from no token: {number(bias)} · total: {number(total)}</div>')
    for name, planes in _stacks(result, batch):
        whole = planes.shape[1] != len(asked)  # a method's layers hold every query, also where one was asked for
        planes = planes[:, keys if whole else rows][:, :, keys]
        names = [f"{name} {place}" for place in range(len(planes))]
        if planes.shape[1] == 1:
            drawn = matrix(names, tokens, planes[:, 0], label=f"by {name}", corner=f"{name} ↓ key →")
        else:
            drawn = small_multiples(names, tokens if whole else labels, tokens, planes, label=f"by {name}")
        parts.append(f"<details><summary>By {escape(name)}</summary>{drawn}</details>")
    return "".join(parts)


def _stacks(result: Attribution, batch: int) -> list[tuple[str, np.ndarray]]:
    """What can be taken apart further, `[plane, query, key]` each: a head axis, and layers."""
    stacks = []
    for axis in result.axes:
        if axis not in (*AXES, "d_model"):
            scores = result.scores[batch].movedim(result.axes.index(axis) - 1, 0)
            if scores.ndim == 3:
                stacks.append((axis, _array(scores)))
    if result.layers is not None:
        layers = _array(result.layers[:, batch])
        while layers.ndim > 3:  # heads
            layers = layers.mean(1)
        if layers.shape[-1] == result.mask.shape[1]:
            stacks.append(("layer", layers))
    return stacks


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def compare(results: Any, *, batch: int = 0, query: int = -1) -> Picture:
    """Several results of one prompt side by side: a row per source token, a column per result.

    Every column has its own colours, since methods have their own units. Where a result is additive, its bias, total
    and residual stand below.

    Args:
        results: Attributions, or a mapping from headings to Attributions.
        batch: the prompt.
        query: which query of those that hold several, counted over real ones.

    Raises:
        InvalidInputError: no results, or results of different prompts.
    """
    named = _named(results)
    first = next(iter(named.values()))
    tokens = first.tokens[batch]
    for name, result in named.items():
        if result.tokens[batch : batch + 1] != [tokens]:
            raise InvalidInputError(
                f"compare: {name!r} is of other tokens than {next(iter(named))!r}; compare one prompt."
            )
    columns = {name: _query_row(result, batch, query) for name, result in named.items()}
    asked = {name: int(result.queries[batch, columns[name][0]]) for name, result in named.items()}
    if len(set(asked.values())) > 1:
        raise InvalidInputError(f"compare: results of different queries (positions {asked}); compare one query.")
    largest = {name: largest_of(values) for name, (_, values) in columns.items()}
    heads = "".join(
        f'<th scope="col" title="{escape(result.target or result.method)}">{escape(name)}</th>'
        for name, result in named.items()
    )
    lines = []
    for position, token in enumerate(tokens):
        if not first.mask[batch, position]:
            continue
        cells = "".join(
            f'<td style="{colour(values[position], largest[name])}">{values[position]:.3g}</td>'
            for name, (_, values) in columns.items()
        )
        lines.append(f'<tr><td title="{position}">{escape(visible(token))}</td>{cells}</tr>')
    for fact in ("bias", "total", "residual"):
        found = [
            None if (t := getattr(result, fact)) is None else float(t[batch, columns[name][0]])
            for name, result in named.items()
        ]
        if any(value is not None for value in found):
            line = "".join(_fact(fact, value) for value in found)
            lines.append(f'<tr{" class=sum" if fact == "bias" else ""}><th scope="row">{fact}</th>{line}</tr>')
    body = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="methods side by side"><table class="r"><thead><tr>'
        f'<th scope="col">token</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        '<div class="n">Blue adds, orange takes away; each column from its own largest value.'
        f"{LOOSELY if 'loose' in ''.join(lines) else ''}</div>"
    )
    title = f"{len(named)} attributions of one prompt"
    return Picture(title, panel(title, body))


def _fact(fact: str, value: float | None) -> str:
    if value is None:
        return "<td></td>"
    if fact != "residual":
        return f"<td>{value:.3g}</td>"
    return f"<td{' class=loose' if value > LOOSE else ''}>{value:.1e}</td>"


def _named(results: Any) -> dict[str, Attribution]:
    if isinstance(results, Mapping):
        named = {str(name): result for name, result in results.items()}
    else:
        results = [results] if isinstance(results, Attribution) else list(results)
        named = {}
        for result in results:
            kind = getattr(result, "options", {}).get("collapse") or getattr(result, "options", {}).get("aggregate")
            name = f"{result.method} ({kind})" if kind else str(getattr(result, "method", result))
            named[name if name not in named else f"{name} {len(named)}"] = result
    if not named or not all(isinstance(result, Attribution) for result in named.values()):
        raise InvalidInputError("compare: pass Attributions, [a, b, …] or {'heading': a, …}, of one prompt.")
    return named


def _query_row(result: Attribution, batch: int, query: int) -> tuple[int, np.ndarray]:
    """The asked query's place on the query axis, and its scores."""
    row = result.query_row(query, batch)
    return row, _array(result.plane(batch)[row])
