"""Pictures of circuits: named parts as signed bars, heads as a grid, and graphs as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tensorlens_tl.drawing.marks import largest_of, number, rgb, share, short, tab_stop, visible

SPACING = 52
ROW_HEIGHT = 58
MARGIN = 40
"""Pixels between neighbours at least, between rows, and around a graph."""

LABEL = 12
LETTER = 6.5
"""Letters of a node's label at most, and pixels of one."""


def bars(rows: Sequence[tuple[str, float]], sums: Sequence[tuple[str, float]]) -> str:
    """Signed values as bars around zero, in their order, and sums below a rule."""
    largest = largest_of(np.array([value for _, value in rows]))
    lines = "".join(_bar(name, value, largest) for name, value in rows)
    lines += "".join(
        f'<tr class="sum"><th scope="row">{escape(name)}</th><td></td><td>{number(value)}</td></tr>'
        for name, value in sums
    )
    return f'<table class="r terms"><tbody>{lines}</tbody></table>'


def _bar(name: str, value: int | float, largest: int | float) -> str:
    part = share(value, largest)
    start = 50 + min(0, 50 * part)
    bar = f'<i><b style="left:{start:.1f}%;width:{50 * abs(part):.1f}%;background:rgb({rgb(part)})"></b></i>'
    return f'<tr><td>{escape(visible(name))}</td><td class="track">{bar}</td><td>{number(value)}</td></tr>'


@dataclass(frozen=True, eq=False)
class GraphPicture:
    """A graph as lists: its nodes, one of them (the last) the target, and its edges by node number.

    Attributes:
        names, kinds, tokens: of the nodes; kinds are embedding, whitening, head, mixer, mlp, neuron, feature, error,
            bias and target.
        layers, positions: where they stand; layer −1 for none.
        weights, biases: of the nodes; a bias is the node's own part of its weight.
        sources, targets, strengths: of the edges.
    """

    names: list[str]
    kinds: list[str]
    tokens: list[str]
    layers: list[int]
    positions: list[int]
    weights: list[float]
    biases: list[float]
    sources: list[int]
    targets: list[int]
    strengths: list[float]


TOOLS = (
    '<div class="tools" role="group" aria-label="what the graph shows">'
    '<label>Hide edges below <input class="least" type="range" min="0" max="100" value="0"></label>'
    '<output class="count"></output>'
    '<label>Find <input class="find" type="search" placeholder="name or token" size="14"></label>'
    '<output class="hits"></output>'
    '<button class="pin" type="button" aria-pressed="false" disabled>Pin</button>'
    '<label>Group the pinned as <input class="name" size="10"></label>'
    '<button class="join" type="button" disabled>Group</button>'
    '<button class="part" type="button" hidden>Ungroup</button></div>'
)


def graph(picture: GraphPicture) -> str:
    """Positions side by side, layers upwards, the target on top.

    Blue adds to the target, orange takes away; a mark's size and an edge's width are its weight. The picture can be
    read without a script; with it one hides small edges, looks at a node's inputs and outputs, pins, groups, searches.
    """
    if not picture.strengths:
        return '<div class="graph circuit"><p>No edge leads to the target.</p></div>'
    return (
        f'<div class="graph circuit">{TOOLS}<div class="both"><div class="scroll rove">{_svg(picture)}</div>'
        '<div class="side" role="region" aria-label="the chosen node"></div></div>'
        '<output class="out" aria-live="polite">Point at a node to read what it adds and what feeds it; '
        "click it for more.</output></div>"
    )


def _svg(picture: GraphPicture) -> str:
    x, y, width, height = layout(picture)
    largest = largest_of(np.array(picture.weights[:-1]))
    strongest = largest_of(np.array(picture.strengths))
    order = np.abs(picture.strengths).argsort().tolist()
    lines = []
    fed: dict[int, list[int]] = {}
    for edge in order:
        a = picture.sources[edge]
        b = picture.targets[edge]
        size = share(picture.strengths[edge], strongest)
        middle = (y[a] + y[b]) / 2
        lines.append(
            f'<path data-e="{a} {b} {picture.strengths[edge]:.9g}" '
            f'd="M{x[a]:.0f} {y[a]:.0f}C{x[a]:.0f} {middle:.0f} {x[b]:.0f} {middle:.0f} {x[b]:.0f} {y[b]:.0f}" '
            f'fill="none" stroke="rgb({rgb(size)})" stroke-opacity=".55" stroke-width="{0.7 + 6 * abs(size):.1f}"/>'
        )
        fed.setdefault(b, []).append(edge)
    marks = []
    for node, name in enumerate(picture.names):
        position = picture.positions[node]
        token = visible(picture.tokens[node])
        inputs = ", ".join(
            f"{picture.names[source]} at {picture.positions[source]} {number(picture.strengths[edge])}"
            for edge in reversed(fed.get(node, [])[-4:])
            for source in [picture.sources[edge]]
        )
        label = f"{name} at {position} ({token}): {number(picture.weights[node])}"
        if inputs:
            label += f"; from {inputs}"
        part = share(picture.weights[node], largest)
        if picture.kinds[node] == "target":
            part = 1.0
        caption = (
            f'<text x="{x[node]:.0f}" y="{y[node] - 13:.0f}" text-anchor="middle">{escape(short(name, LABEL))}</text>'
        )
        marks.append(
            f'<g class="t" role="img" {tab_stop(node == 0)} aria-label="{escape(label)}" '
            f'data-name="{escape(name)}" data-at="{position}" data-token="{escape(token)}" '
            f'data-weight="{picture.weights[node]:.9g}" data-bias="{picture.biases[node]:.9g}">'
            f"<title>{escape(label)}</title>"
            f'<circle cx="{x[node]:.0f}" cy="{y[node]:.0f}" r="{4 + 7 * abs(part) ** 0.5:.1f}" '
            f'fill="rgb({rgb(part)})"/>{caption}</g>'
        )
    positions = np.array(picture.positions)
    heads = [
        f'<text x="{np.mean(x[positions == pos]):.0f}" y="{height - 8:.0f}" text-anchor="middle">'
        f"{escape(short(visible(token), 9))}<title>{pos}: {escape(visible(token))}</title></text>"
        for pos, token in dict(zip(picture.positions, picture.tokens, strict=True)).items()
    ]
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="group" '
        f'aria-label="contribution graph, {len(picture.names)} nodes">{"".join(lines + marks + heads)}</svg>'
    )


def layout(picture: GraphPicture) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Where each node stands: a column per position, a row per layer and kind; neighbours in a row keep apart."""
    top = 4 * (max(picture.layers) + 2)
    order = {"whitening": -1, "mlp": 1, "neuron": 1, "feature": 2, "error": 2, "bias": 2}  # others are below: 0
    levels = [4 * (layer + 1) + order.get(kind, 0) for kind, layer in zip(picture.kinds, picture.layers, strict=True)]
    levels[-1] = top
    for node, kind in enumerate(picture.kinds):
        if kind == "bias" and picture.layers[node] < 0:  # the final norm's
            levels[node] = top - 1
    used = {level: row for row, level in enumerate(sorted(set(levels)))}
    cells: dict[tuple[int, int], list[int]] = {}
    for node, (level, pos) in enumerate(zip(levels, picture.positions, strict=True)):
        cells.setdefault((level, pos), []).append(node)
    spacing = max(SPACING, LETTER * min(LABEL, max(map(len, picture.names))))
    columns = {}
    start = float(MARGIN)
    for pos in sorted(set(picture.positions)):
        count = max(len(nodes) for (_, at), nodes in cells.items() if at == pos)
        width = max(66.0, spacing * (count + 1))
        columns[pos] = (start, width)
        start += width
    height = float(ROW_HEIGHT * len(used) + MARGIN)
    x = np.zeros(len(levels))
    y = np.zeros(len(levels))
    for (level, pos), nodes in cells.items():
        left, width = columns[pos]
        for number_in_cell, node in enumerate(nodes, start=1):
            x[node] = left + width * number_in_cell / (len(nodes) + 1)
            y[node] = height - MARGIN - ROW_HEIGHT * used[level]
    return x, y, start + MARGIN, height
