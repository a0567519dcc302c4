"""Pictures of circuits: named terms as signed bars, heads as a grid, and the contribution graph."""

import re
from html import escape

import numpy as np

from tensorlens_tl.circuits.graph import ContributionGraph
from tensorlens_tl.circuits.terms import Terms
from tensorlens_tl.report.marks import NEGATIVE, POSITIVE, largest_of, number, share, short, visible
from tensorlens_tl.report.matrix import matrix
from tensorlens_tl.report.page import panel

MOST_EDGES = 60
"""Edges of a graph that a picture shows: more are a thicket."""


def terms(found: Terms, k: int = 15, batch: int = 0, title: str = "") -> str:
    """The k largest terms of one prompt as bars around zero; what they leave out, and the total they sum to, below."""
    shown = found.top(k, batch)
    total, remainder = float(found.total[batch]), float(found.remainder[batch])
    rest = float(found.scores[batch].double().sum()) - sum(term.score for term in shown)
    largest = largest_of(np.array([term.score for term in shown]))
    lines = "".join(_bar(term.name, term.score, largest) for term in shown)
    others = len(found) - len(shown)
    if others:
        lines += _bar(f"the other {others}", rest, largest)
    if remainder:
        lines += _bar("everything not listed", remainder, largest)
    lines += f'<tr class="sum"><th scope="row">total</th><td></td><td>{number(total)}</td></tr>'
    residual = f"sums to the model's own number to {float(found.residual[batch]):.1e}"
    return panel(
        title or f"What adds to {found.question}",
        f'<table class="r terms"><tbody>{lines}</tbody></table>',
        notes=residual,
    )


def _bar(name: str, score: float, largest: float) -> str:
    part = share(score, largest)
    rgb = ",".join(map(str, POSITIVE if part >= 0 else NEGATIVE))
    start = 50 if part >= 0 else 50 + 50 * part
    bar = f'<i><b style="left:{start:.1f}%;width:{50 * abs(part):.1f}%;background:rgb({rgb})"></b></i>'
    return f'<tr><td>{escape(visible(name))}</td><td class="track">{bar}</td><td>{number(score)}</td></tr>'


def head_grid(found: Terms, batch: int = 0, title: str = "") -> str:
    """Terms of ``logit_attribution(by="head")`` as a grid: a row per layer, a column per head, and the MLP."""
    cells: dict[tuple[int, str], float] = {}
    for name, score in zip(found.names, found.scores[batch].tolist(), strict=True):
        if match := re.fullmatch(r"L(\d+)(H\d+)|MLP(\d+)", name):
            layer, head, mlp = match.groups()
            cells[int(layer or mlp), head or "MLP"] = score
    if not cells:
        return ""
    columns = sorted({column for _, column in cells}, key=lambda name: (name == "MLP", int(name.strip("HMLP") or 0)))
    layers = sorted({layer for layer, _ in cells})
    values = np.array([[cells.get((layer, column), 0.0) for column in columns] for layer in layers])
    label = title or f"Direct effects on {found.question}"
    names = [f"L{layer}" for layer in layers]
    return panel(label, matrix(names, columns, values, label=label, corner="layer ↓ part →"))


def graph(found: ContributionGraph, most: int = MOST_EDGES, title: str = "") -> str:
    """A contribution graph as SVG: positions side by side, layers upwards, the target on top.

    A larger graph is pruned until at most `most` edges are left. Blue adds to the target, orange takes away; a mark's
    size and an edge's width are its weight.
    """
    small, keep = found, 1.0
    while len(small.edges) > most and keep > 0.01:
        keep *= 0.9
        small = found.prune(keep)
    drawn = _svg(small) if len(small.edges) else "<p>No edge leads to the target.</p>"
    shown = f"{len(small.edges)} of {len(found.edges)} edges"
    shown += f", which carry {small.completeness:.0%} of what enters the nodes shown"
    return panel(
        title or f"How {found.question} comes about",
        f'<div class="graph"><div class="scroll rove">{drawn}</div>'
        '<output class="out" aria-live="polite">Point at a node to read what it adds and what feeds it.</output></div>',
        notes=f"{shown} · sums to the logit to {found.residual:.1e}",
    )


SPACING, ROW_HEIGHT, MARGIN = 52, 58, 40


def _svg(found: ContributionGraph) -> str:
    x, y, width, height = _places(found)
    nodes, edges = found.nodes, found.edges
    weights = nodes["weight"].tolist()
    strengths = edges["weight"].tolist()
    largest, strongest = largest_of(np.array(weights[:-1])), largest_of(np.array(strengths))
    sources, targets = edges["source"].to_numpy(int), edges["target"].to_numpy(int)
    lines = []
    for edge in np.abs(strengths).argsort():
        a, b, size = sources[edge], targets[edge], share(strengths[edge], strongest)
        middle = (y[a] + y[b]) / 2
        lines.append(
            f'<path d="M{x[a]:.0f} {y[a]:.0f}C{x[a]:.0f} {middle:.0f} {x[b]:.0f} {middle:.0f} {x[b]:.0f} {y[b]:.0f}" '
            f'fill="none" stroke="{_rgb(size)}" stroke-opacity=".55" stroke-width="{0.7 + 6 * abs(size):.1f}"/>'
        )
    names, kinds = nodes["name"].tolist(), nodes["kind"].tolist()
    positions, tokens = nodes["pos"].tolist(), nodes["token"].tolist()
    marks = []
    for node, name in enumerate(names):
        goal = kinds[node] == "target"
        fed = [edge for edge in np.abs(strengths).argsort()[::-1] if targets[edge] == node][:4]
        inputs = ", ".join(f"{names[sources[e]]} at {positions[sources[e]]} {number(strengths[e])}" for e in fed)
        label = f"{name} at {positions[node]} ({visible(tokens[node])}): {number(weights[node])}"
        label += f"; from {inputs}" if inputs else ""
        part = 1.0 if goal else share(weights[node], largest)
        marks.append(
            f'<g class="t" role="img" tabindex="{0 if node == 0 else -1}" aria-label="{escape(label)}">'
            f"<title>{escape(label)}</title>"
            f'<circle cx="{x[node]:.0f}" cy="{y[node]:.0f}" r="{4 + 7 * abs(part) ** 0.5:.1f}" fill="{_rgb(part)}"/>'
            f'<text x="{x[node]:.0f}" y="{y[node] - 13:.0f}" text-anchor="middle">{escape(short(name, 12))}</text></g>'
        )
    heads = [
        f'<text x="{np.mean(x[np.array(positions) == pos]):.0f}" y="{height - 8:.0f}" text-anchor="middle">'
        f"{escape(short(visible(token), 9))}<title>{pos}: {escape(visible(token))}</title></text>"
        for pos, token in dict(zip(positions, tokens, strict=True)).items()
    ]
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="group" '
        f'aria-label="contribution graph, {len(nodes)} nodes">{"".join(lines + marks + heads)}</svg>'
    )


def _places(found: ContributionGraph) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Where each node stands: a column per position, a row per layer and kind; neighbours in a row keep apart."""
    kinds, layers = found.nodes["kind"].tolist(), found.nodes["layer"].tolist()
    top = 3 * (max(layers) + 2)
    order = {"embedding": 0, "head": 0, "mlp": 1, "bias": 2}
    levels = [3 * (layer + 1) + order.get(kind, 0) for kind, layer in zip(kinds, layers, strict=True)]
    levels[-1] = top
    for node, kind in enumerate(kinds):
        if kind == "bias" and layers[node] < 0:  # the final norm's
            levels[node] = top - 1
    used = {level: place for place, level in enumerate(sorted(set(levels)))}
    positions = found.nodes["pos"].tolist()
    cells: dict[tuple[int, int], list[int]] = {}
    for node, (level, pos) in enumerate(zip(levels, positions, strict=True)):
        cells.setdefault((level, pos), []).append(node)
    columns, start = {}, float(MARGIN)
    for pos in sorted(set(positions)):
        count = max(len(nodes) for (_, at), nodes in cells.items() if at == pos)
        width = max(66.0, SPACING * (count + 1))
        columns[pos] = (start, width)
        start += width
    height = float(ROW_HEIGHT * len(used) + MARGIN)
    x, y = np.zeros(len(levels)), np.zeros(len(levels))
    for (level, pos), nodes in cells.items():
        left, width = columns[pos]
        for place, node in enumerate(nodes):
            x[node] = left + width * (place + 1) / (len(nodes) + 1)
            y[node] = height - MARGIN - ROW_HEIGHT * used[level]
    return x, y, start + MARGIN, height


def _rgb(part: float) -> str:
    return f"rgb({','.join(map(str, POSITIVE if part >= 0 else NEGATIVE))})"
