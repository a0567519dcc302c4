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

KEY_WIDTH = 92
KEY_HEIGHT = 18
"""Pixels of what a kind of line means."""

ABOVE = {"others": -2, "whitening": -1, "mlp": 1, "neuron": 1, "feature": 2, "error": 2, "bias": 2}
"""How far each kind stands above heads in the rows of a layer."""

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
            bias, others (all that is not drawn) and target.
        layers, positions: where they stand; layer −1 for none.
        weights, biases: of the nodes; a bias is the node's own part of its weight. Empty where nodes have no weight.
        sources, targets, strengths: of the edges.
        reads: what a head reads an edge by: values, queries, keys or gate; empty texts elsewhere.
        placed: whether nodes stand at positions of a prompt; else all have one, which is not shown.
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
    reads: list[str]
    placed: bool = True

    @property
    def sizes(self) -> list[float]:
        """Each node's weight as a share of the largest, the target's 1; all equal where nodes have no weight."""
        largest = largest_of(np.array(self.weights[:-1]))
        shares = [share(weight, largest) for weight in self.weights[:-1]] or [0.25] * (len(self.names) - 1)
        return [*shares, 1.0]

    @property
    def readings(self) -> list[str]:
        """The kinds of reading whose edges have lines of their own, where there are several."""
        kinds = set(self.reads) - {""}
        return [kind for kind in READS if kind in kinds and kinds != {"values"}]

    def called(self, node: int) -> str:
        """A node by its name, and where it stands."""
        if not self.placed:
            return self.names[node]
        return f"{self.names[node]} at {self.positions[node]}"


@dataclass(frozen=True)
class Line:
    """How the edges that one kind of reading reads are drawn.

    Attributes:
        dash: lengths of strokes and gaps in pixels; empty for a whole line.
        beside: pixels to the right of the middle of the node at which they arrive, where a node reads in several ways.
    """

    dash: str
    beside: int


READS = {"values": Line("", 0), "queries": Line("2 4", -7), "keys": Line("9 4", 7), "gate": Line("9 3 2 3", 14)}
"""Lines of edges by what a head reads them by."""
WHOLE = READS["values"]

TOOLS = (
    '<div class="tools" role="group" aria-label="what the graph shows">'
    '<label>Hide edges below <input class="least" type="range" min="0" max="100" value="0"></label>'
    '<output class="count"></output>'
    '<label>Show <select class="by"><option value="">single nodes</option><option value="layer">layers</option>'
    "{by_place}</select></label>"
    '<label>Find <input class="find" type="search" placeholder="name or token" size="14"></label>'
    '<output class="hits"></output>'
    '<button class="pin" type="button" aria-pressed="false" disabled>Pin</button>'
    '<label>Group the pinned as <input class="name" size="10"></label>'
    '<button class="join" type="button" disabled>Group</button>'
    '<button class="part" type="button" hidden>Ungroup</button>'
    '<span>Save as <button class="svg" type="button">SVG</button> <button class="png" type="button">PNG</button></span>'
    "</div>"
)


def graph(picture: GraphPicture) -> str:
    """Positions side by side, layers upwards, the target on top.

    Blue adds to the target, orange takes away; a mark's size and an edge's width are its weight, and an edge's line
    says what a head reads it by. The picture can be read without a script; with it one hides small edges, looks at a
    node's inputs and outputs, pins, groups, searches, and saves what is shown.
    """
    if not picture.strengths:
        return '<div class="graph circuit"><p>No edge leads to the target.</p></div>'
    meaning = "what it adds and what feeds it"
    if not picture.weights:
        meaning = "what feeds it"
    by_place = '<option value="place">layers at each token</option>' if picture.placed else ""
    tools = TOOLS.format(by_place=by_place)
    return (
        f'<div class="graph circuit">{tools}<div class="both"><div class="scroll rove">{_svg(picture)}</div>'
        '<div class="side" role="region" aria-label="the chosen node"></div></div>'
        f'<output class="out" aria-live="polite">Point at a node to read {meaning}; click it for more.</output></div>'
    )


def _svg(picture: GraphPicture) -> str:
    x, y, width, height = layout(picture)
    order = np.abs(picture.strengths).argsort().tolist()
    fed: dict[int, list[int]] = {}
    for edge in order:
        fed.setdefault(picture.targets[edge], []).append(edge)
    strongest = largest_of(np.array(picture.strengths))
    lines = [_edge(picture, edge, x, y, strongest) for edge in order]
    marks = [_mark(picture, node, x[node], y[node], fed.get(node, [])) for node in range(len(picture.names))]
    heads = list[str]()
    if picture.placed:
        positions = np.array(picture.positions)
        heads = [
            f'<text class="column" data-at="{pos}" x="{np.mean(x[positions == pos]):.0f}" y="{height - 8:.0f}" '
            f'text-anchor="middle">{escape(short(visible(token), 9))}<title>{pos}: {escape(visible(token))}</title>'
            "</text>"
            for pos, token in dict(zip(picture.positions, picture.tokens, strict=True)).items()
        ]
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="group" '
        f'aria-label="graph, {len(picture.names)} nodes">{_key(picture)}{"".join(lines + marks + heads)}</svg>'
    )


def _edge(picture: GraphPicture, edge: int, x: np.ndarray, y: np.ndarray, strongest: float) -> str:
    source = picture.sources[edge]
    target = picture.targets[edge]
    strength = picture.strengths[edge]
    size = share(strength, strongest)
    line = READS.get(picture.reads[edge], WHOLE)
    start, *corners = (f"{across:.0f} {down:.0f}" for across, down in curve(picture, edge, x, y))
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return (
        f'<path data-e="{source} {target} {strength:.9g}" data-reads="{picture.reads[edge]}" '
        f'd="M{start}C{" ".join(corners)}" fill="none" stroke="rgb({rgb(size)})" stroke-opacity=".55" '
        f'stroke-width="{0.7 + 6 * abs(size):.1f}"{dash}/>'
    )


def curve(picture: GraphPicture, edge: int, x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """The four points of an edge as a cubic curve; one that would run straight through other nodes bows past them."""
    source = picture.sources[edge]
    target = picture.targets[edge]
    end = float(x[target])
    if not picture.placed:
        end += READS.get(picture.reads[edge], WHOLE).beside
    start = float(x[source])
    rise = float(y[source] - y[target])
    bow = 0.0
    if abs(x[source] - x[target]) < 1 and rise > 1.5 * ROW_HEIGHT:
        bow = min(60.0, 0.2 * rise)
    middle = float(y[source] + y[target]) / 2
    return [(start, float(y[source])), (start + bow, middle), (end + bow, middle), (end, float(y[target]))]


def _mark(picture: GraphPicture, node: int, x: float, y: float, fed: Sequence[int]) -> str:
    """A node's circle with its name; what is read aloud names the largest edges into it, the last ones of `fed`."""
    name = picture.names[node]
    token = visible(picture.tokens[node])
    label = picture.called(node)
    facts = f'data-name="{escape(name)}" data-layer="{picture.layers[node]}" data-kind="{picture.kinds[node]}" '
    facts += f'data-level="{_level(picture, node)}" '
    if picture.placed:
        label += f" ({token})"
        facts += f'data-at="{picture.positions[node]}" data-token="{escape(token)}" '
    if picture.weights:
        label += f": {number(picture.weights[node])}"
        facts += f'data-weight="{picture.weights[node]:.9g}" data-bias="{picture.biases[node]:.9g}" '
    inputs = ", ".join(_input(picture, edge) for edge in reversed(fed[-4:]))
    if inputs:
        label += f"; from {inputs}"
    part = picture.sizes[node]
    return (
        f'<g class="t" role="img" {tab_stop(node == 0)} aria-label="{escape(label)}" {facts}>'
        f"<title>{escape(label)}</title>"
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{4 + 7 * abs(part) ** 0.5:.1f}" fill="rgb({rgb(part)})"/>'
        f'<text x="{x:.0f}" y="{y - 13:.0f}" text-anchor="middle">{escape(short(name, LABEL))}</text></g>'
    )


def _input(picture: GraphPicture, edge: int) -> str:
    text = f"{picture.called(picture.sources[edge])} {number(picture.strengths[edge])}"
    if len(picture.readings) > 1 and picture.reads[edge]:
        text += f" ({picture.reads[edge]})"
    return text


def _key(picture: GraphPicture) -> str:
    """What the lines of edges mean, above the picture, where they differ."""
    parts = list[str]()
    for number_of, kind in enumerate(picture.readings):
        x = MARGIN / 2 + KEY_WIDTH * number_of
        parts.append(
            f'<path d="M{x:.0f} 10H{x + 28:.0f}" stroke="currentColor" stroke-width="2" fill="none" '
            f'stroke-dasharray="{READS[kind].dash}"/><text x="{x + 34:.0f}" y="14">{kind}</text>'
        )
    if not parts:
        return ""
    return f'<g class="key">{"".join(parts)}</g>'


def _level(picture: GraphPicture, node: int) -> int:
    """How high a node stands: by layer, and in a layer by kind."""
    top = 4 * (max(picture.layers) + 2)
    kind = picture.kinds[node]
    if node == len(picture.names) - 1:
        return top
    if kind == "bias" and picture.layers[node] < 0:  # the final norm's
        return top - 1
    return 4 * (picture.layers[node] + 1) + ABOVE.get(kind, 0)


def layout(picture: GraphPicture) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Where each node stands, and the picture's width and height in pixels: a column per position, a row per layer and
    kind; neighbours in a row keep apart. The script does the same with the nodes that it shows."""
    levels = [_level(picture, node) for node in range(len(picture.names))]
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
    kinds = len(picture.readings)
    if kinds:  # room for what their lines mean
        y += KEY_HEIGHT
        height += KEY_HEIGHT
    return x, y, max(start + MARGIN, kinds * KEY_WIDTH), height
