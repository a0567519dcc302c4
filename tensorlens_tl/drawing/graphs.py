"""Pictures of circuits: named parts as signed bars, heads as a grid, and graphs as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

import numpy as np

from tensorlens_tl.drawing.marks import largest_of, number, rgb, share, short, tab_stop, visible

HIGH = 22
APART = 4
BETWEEN = 8
"""Pixels of a node's height, between nodes, and between rows."""
SIDE = 76
MARGIN = 8
"""Pixels that the names of rows take, and around a graph."""
LETTER = 6.6
LABEL = 26
"""Pixels of a letter, and letters of a node's label at most."""
WIDE = 900
CELLS = (260, 190, 130, 90, 60)
"""Pixels that a graph takes at most, where one of these widths of a cell lets it."""
BENT = 60
"""Pixels of height from which an edge between neighbours bows, so that edges do not lie on each other."""

KEY_WIDTH = 92
KEY_HEIGHT = 18
"""Pixels of what a kind of line means."""

ABOVE = {"others": -2, "whitening": -1, "mlp": 1, "neuron": 1, "feature": 2, "error": 2, "bias": 2}
"""How far each kind stands above heads in the rows of a layer."""
ROWS = {"mlp": "MLP", "neuron": "MLP", "feature": "features", "error": "features", "bias": "bias"}
"""What a row is called by the kind of its nodes; others are heads."""


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
        attended: what heads read most, ``" ← John 73 %"``; empty texts, or no list, elsewhere.
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
    attended: Sequence[str] = ()

    @property
    def labels(self) -> list[str]:
        """What stands in the nodes."""
        attended = self.attended or [""] * len(self.names)
        return [_label(SHORT.get(name, name), what) for name, what in zip(self.names, attended, strict=True)]

    @property
    def columns(self) -> list[int]:
        """Where nodes stand from left to right: at their position, and what is not drawn before all positions."""
        return [-1 if kind == "others" else pos for kind, pos in zip(self.kinds, self.positions, strict=True)]

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
        if not self.placed or self.kinds[node] == "others":
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
SHORT = {"embed": "token", "pos_embed": "place", "target": "answer"}
"""Nodes that pages call by another name."""

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
    '<span class="zoom" role="group" aria-label="zoom"><button class="out-of" type="button" title="Smaller">−</button> '
    '<button class="fit" type="button" title="As wide as the page">Fit</button> '
    '<button class="into" type="button" title="Larger">+</button></span>'
    '<span>Save as <button class="svg" type="button">SVG</button> <button class="png" type="button">PNG</button></span>'
    "</div>"
)


def graph(picture: GraphPicture, *, shown: int | None = None) -> str:
    """Positions side by side, layers upwards, the target on top.

    Blue adds to the target, orange takes away; a node's colour and an edge's width are its weight, and an edge's line
    says what a head reads it by. The picture can be read without a script; with it one hides small edges, looks at a
    node's inputs and outputs, zooms, pins, groups, searches, and saves what is shown.

    Args:
        picture: nodes and edges.
        shown: how many edges are drawn at first, and all nodes however few edges are; None draws all edges, and leaves
            out nodes that have none.
    """
    if not picture.strengths:
        return '<div class="graph circuit"><p>No edge leads to the target.</p></div>'
    meaning = "what it adds and what feeds it"
    if not picture.weights:
        meaning = "what feeds it"
    by_place = '<option value="place">layers at each token</option>' if picture.placed else ""
    tools = TOOLS.format(by_place=by_place)
    first = "" if shown is None else f' data-shown="{shown}"'
    return (
        f'<div class="graph circuit"{first}>{tools}'
        f'<div class="both"><div class="scroll rove">{_svg(picture, shown)}</div>'
        '<div class="side" role="region" aria-label="the chosen node"></div></div>'
        f'<output class="out" aria-live="polite">Point at a node to read {meaning}; click it for more.</output></div>'
    )


def _label(name: str, attended: str) -> str:
    """What stands in a node; of what its head attends to, the token is cut and not the share."""
    token, _, share = attended.removesuffix(" %").rpartition(" ")
    if len(name + attended) > LABEL and token:
        attended = f"{short(token, max(4, LABEL - len(f'{name} {share} %')))} {share} %"
    return short(name + attended, LABEL)


def _svg(picture: GraphPicture, shown: int | None) -> str:
    places = layout(picture)
    order = np.abs(picture.strengths).argsort().tolist()
    fed: dict[int, list[int]] = {}
    for edge in order:
        fed.setdefault(picture.targets[edge], []).append(edge)
    strongest = largest_of(np.array(picture.strengths))
    first = len(order) - (len(order) if shown is None else shown)
    lines = [_edge(picture, edge, places, strongest, number < first) for number, edge in enumerate(order)]
    marks = [_mark(picture, node, places, fed.get(node, [])) for node in range(len(picture.names))]
    rows = [
        f'<text class="row" data-level="{level}" x="4" y="{y + 4:.0f}">{name}</text>' for level, name, y in places.rows
    ]
    heads = list[str]()
    if picture.placed:
        names = [visible(token.strip(" ").removeprefix("patch ")) for token in picture.tokens]
        tokens = dict(zip(picture.columns, names, strict=True)) | {-1: "not drawn"}
        heads = [
            f'<text class="column" data-column="{pos}" x="{x:.0f}" y="{places.height - 8:.0f}" text-anchor="middle">'
            f"{escape(short(tokens[pos], 12))}<title>{pos}: {escape(tokens[pos])}</title></text>"
            for pos, x in places.columns.items()
        ]
    size = f"{places.width:.0f} {places.height:.0f}"
    return (
        f'<svg width="{places.width:.0f}" height="{places.height:.0f}" viewBox="0 0 {size}" role="group" '
        f'aria-label="graph, {len(picture.names)} nodes">{_key(picture)}'
        f'{"".join(rows + lines + marks)}<g class="columns">{"".join(heads)}</g></svg>'
    )


def _edge(picture: GraphPicture, edge: int, places: "Layout", strongest: float, hidden: bool) -> str:
    source = picture.sources[edge]
    target = picture.targets[edge]
    strength = picture.strengths[edge]
    size = share(strength, strongest)
    line = READS.get(picture.reads[edge], WHOLE)
    start, *corners = (f"{across:.0f} {down:.0f}" for across, down in curve(picture, edge, places))
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    dash += ' hidden=""' * hidden
    return (
        f'<path data-e="{source} {target} {strength:.9g}" data-reads="{picture.reads[edge]}" '
        f'd="M{start}C{" ".join(corners)}" fill="none" stroke="rgb({rgb(size)})" stroke-opacity=".55" '
        f'stroke-width="{0.7 + 5 * abs(size):.1f}"{dash}/>'
    )


def curve(picture: GraphPicture, edge: int, places: "Layout") -> list[tuple[float, float]]:
    """The four points of an edge as a cubic curve, from the top of a node to the bottom of another.

    One between neighbours bows, to the right where it adds and to the left where it takes away: edges of one column do
    not lie on each other.
    """
    source = picture.sources[edge]
    target = picture.targets[edge]
    start = float(places.x[source])
    end = float(places.x[target])
    if not picture.placed:
        end += READS.get(picture.reads[edge], WHOLE).beside
    bottom = float(places.y[source]) - HIGH / 2
    top = float(places.y[target]) + HIGH / 2
    bend = max(12.0, (bottom - top) / 2)
    bow = 0.0
    if abs(places.x[source] - places.x[target]) < HIGH and bottom - top > BENT:
        bow = min(90.0, 10 + 0.12 * (bottom - top)) * (1 if picture.strengths[edge] >= 0 else -1)
    return [(start, bottom), (start + bow, bottom - bend), (end + bow, top + bend), (end, top)]


def _mark(picture: GraphPicture, node: int, places: "Layout", fed: Sequence[int]) -> str:
    """A node's box with its name; what is read aloud names the largest edges into it, the last ones of `fed`."""
    name = picture.names[node]
    token = visible(picture.tokens[node])
    label = picture.called(node)
    facts = f'data-name="{escape(name)}" data-layer="{picture.layers[node]}" data-kind="{picture.kinds[node]}" '
    facts += (
        f'data-level="{_level(picture, node)}" data-row="{_row(picture, node)}" data-column="{picture.columns[node]}" '
    )
    if picture.placed:
        if picture.kinds[node] != "others":
            label += f" ({token})"
        facts += f'data-node="{escape(name)}@{picture.positions[node]}" data-at="{picture.positions[node]}" '
        facts += f'data-token="{escape(token)}" '
    if picture.attended:
        label += picture.attended[node]
    if picture.weights:
        label += f": {number(picture.weights[node])}"
        facts += f'data-weight="{picture.weights[node]:.9g}" data-bias="{picture.biases[node]:.9g}" '
    inputs = ", ".join(_input(picture, edge) for edge in reversed(fed[-4:]))
    if inputs:
        label += f"; from {inputs}"
    part = picture.sizes[node] if picture.kinds[node] != "target" else 0.0
    wide = places.wide[node]
    x = places.x[node]
    y = places.y[node]
    return (
        f'<g class="t" role="img" {tab_stop(node == 0)} aria-label="{escape(label)}" {facts}>'
        f"<title>{escape(label)}</title>"
        f'<rect x="{x - wide / 2:.1f}" y="{y - HIGH / 2:.1f}" width="{wide}" height="{HIGH}" rx="4" class="ground"/>'
        f'<rect x="{x - wide / 2:.1f}" y="{y - HIGH / 2:.1f}" width="{wide}" height="{HIGH}" rx="4" '
        f'fill="rgb({rgb(part)})" fill-opacity="{0.06 + 0.6 * abs(part):.2f}" stroke="rgb({rgb(part)})"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{escape(picture.labels[node])}</text></g>'
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
        x = MARGIN + KEY_WIDTH * number_of
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


def _row(picture: GraphPicture, node: int) -> str:
    """What the row of a node is called."""
    kind = picture.kinds[node]
    layer = picture.layers[node]
    if node == len(picture.names) - 1:
        return "answer"
    if layer < 0:
        return {"bias": "final norm", "others": ""}.get(kind, "embedding")
    return "" if kind == "others" else f"L{layer} {ROWS.get(kind, 'heads')}"


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything stands, in pixels.

    Attributes:
        x, y, wide: the middle of every node, and its width.
        width, height: of the picture.
        columns: the middle of each column.
        rows: level, name and middle of each row.
    """

    x: np.ndarray
    y: np.ndarray
    wide: np.ndarray
    width: float
    height: float
    columns: dict[int, float]
    rows: list[tuple[int, str, float]]


def layout(picture: GraphPicture) -> Layout:
    """A column per position, a row per layer and kind; a cell has its nodes in lines.

    Cells become narrower, and higher, until the picture is no wider than `WIDE`. The script does the same with the
    nodes that it shows.
    """
    for cell in CELLS:
        places = _laid_out(picture, cell)
        if places.width <= WIDE:
            return places
    return _laid_out(picture, CELLS[2])


def _laid_out(picture: GraphPicture, cell: int) -> Layout:
    """With nodes of a cell in lines no wider than so much, unless a single node is."""
    levels = [_level(picture, node) for node in range(len(picture.names))]
    names = {level: _row(picture, node) for node, level in enumerate(levels)}
    wide = np.array([ceil(LETTER * len(label) + 14) for label in picture.labels])
    lines: dict[tuple[int, int], list[list[int]]] = {}
    for node, place in enumerate(zip(levels, picture.columns, strict=True)):
        of_cell = lines.setdefault(place, [])
        if of_cell and _width(wide, [*of_cell[-1], node]) <= cell:
            of_cell[-1].append(node)
        else:
            of_cell.append([node])
    x, y = np.zeros((2, len(levels)))
    left = float(SIDE)
    columns = dict[int, float]()
    for pos in sorted({pos for _, pos in lines}):
        most = max(_width(wide, line) for (_, at), of_cell in lines.items() if at == pos for line in of_cell)
        columns[pos] = left + (MARGIN + most) / 2
        left += MARGIN + most
    height = float(MARGIN + (KEY_HEIGHT if picture.readings else 0))
    rows = list[tuple[int, str, float]]()
    for level in sorted(names, reverse=True):
        cells = {pos: of_cell for (at, pos), of_cell in lines.items() if at == level}
        high = max(map(len, cells.values())) * (HIGH + APART)
        rows.append((level, names[level], height + high / 2))
        for pos, of_cell in cells.items():
            down = height + (high - len(of_cell) * (HIGH + APART)) / 2
            for line_number, line in enumerate(of_cell):
                start = columns[pos] - _width(wide, line) / 2
                for node in line:
                    x[node] = start + wide[node] / 2
                    y[node] = down + (line_number + 0.5) * (HIGH + APART)
                    start += wide[node] + APART
        height += high + BETWEEN
    width = float(max(left + MARGIN, len(picture.readings) * KEY_WIDTH))
    return Layout(x, y, wide, width, height + BETWEEN, columns, rows)


def _width(wide: np.ndarray, line: Sequence[int]) -> float:
    return float(wide[list(line)].sum()) + APART * (len(line) - 1)
