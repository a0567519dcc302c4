"""Heat maps of token pairs: one matrix with its labels, and small multiples of many.

The picture is a PNG, so it is there without a script; the script adds reading single values, by pointer and by arrow
keys. Values travel as float32 beside it.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from tensorlens_tl.drawing.marks import colour_bar, largest_of, note, number, packed, picture, visible
from tensorlens_tl.drawing.page import table

MOST_CELLS = 12_000
"""Cells that small multiples may have in all (7 bytes each); larger matrices are pooled until they fit."""

NAMED = 12
"""Pairs that the list for screen readers, and for places without scripts, names."""


def head_grid(cells: Mapping[tuple[int, str], float], label: str) -> str:
    """Values of heads and MLPs as a grid: a row per layer, a column per head (``"H3"``), and the MLP (``"MLP"``)."""
    layers, columns, values = head_cells(cells)
    return matrix([f"L{layer}" for layer in layers], columns, values, label=label, corner="layer ↓ part →")


def head_cells(cells: Mapping[tuple[int, str], float]) -> tuple[list[int], list[str], np.ndarray]:
    """Layers, columns and values `[layer, column]` of such a grid; zero where a layer lacks a column."""
    columns = sorted({column for _, column in cells}, key=_column_order)
    layers = sorted({layer for layer, _ in cells})
    values = np.array([[cells.get((layer, column), 0.0) for column in columns] for layer in layers])
    return layers, columns, values


def _column_order(name: str) -> tuple[bool, bool, int]:
    """Heads by number, then those of cross-attention, then MLPs: ``"H3"``, ``"cross.H3"``, ``"MLP"``."""
    cross, _, head = name.rpartition("H")
    if name == "MLP":
        return True, False, 0
    return False, bool(cross), int(head)


def matrix(
    rows: Sequence[str], columns: Sequence[str], values: np.ndarray, *, label: str, corner: str = "query ↓ key →"
) -> str:
    """Signed values `[row, column]` with a label at every row and column.

    Args:
        rows, columns: labels, shown as text.
        values: `[row, column]`.
        label: what the picture is, for screen readers.
        corner: what rows and columns are.
    """
    values = np.asarray(values, dtype=float)
    return _grid(rows, columns, values, label, corner) + colour_bar(values) + strongest(rows, columns, values)


def small_multiples(
    names: Sequence[str], rows: Sequence[str], columns: Sequence[str], planes: np.ndarray, *, label: str
) -> str:
    """A small picture of every plane; the chosen one is shown large, with labels and values.

    Each plane has its own colours, from its own largest value. Long prompts are pooled, a few neighbouring tokens to a
    cell that shows the largest of them, so that all planes together stay small.

    Args:
        names: one per plane, such as ``"layer 0"``.
        rows, columns: labels.
        planes: `[plane, row, column]`.
        label: what it is, for screen readers.
    """
    planes = np.asarray(planes, dtype=float)
    pooled = 1
    while np.prod([len(planes), *(-(-size // pooled) for size in planes.shape[1:])]) > MOST_CELLS:
        pooled += 1
    planes = pool(planes, pooled)
    rows = pool_labels(rows, pooled)
    columns = pool_labels(columns, pooled)
    buttons = []
    for count, (name, plane) in enumerate(zip(names, planes, strict=True)):
        buttons.append(
            f'<button type="button" aria-pressed="{str(count == 0).lower()}" '
            f'data-values="{packed(plane)}" data-bar="{escape(colour_bar(plane))}">'
            f'<img alt="" src="{picture(plane, largest_of(plane))}"><span>{escape(name)}</span></button>'
        )
    pooling = note(f"{pooled} × {pooled} pairs to a cell: the largest of them." if pooled > 1 else "")
    return (
        f'<div class="multiples"><div class="thumbs" role="group" aria-label="{escape(label)}">{"".join(buttons)}</div>'
        f"{pooling}{_grid(rows, columns, planes[0], f'{label}, {names[0]}', 'query ↓ key →')}"
        f"{colour_bar(planes[0])}</div>"
    )


def pool(planes: np.ndarray, size: int) -> np.ndarray:
    """Blocks of size × size cells as the one of largest absolute value."""
    if size == 1:
        return planes
    count, height, width = planes.shape
    padded = np.pad(planes, ((0, 0), (0, -height % size), (0, -width % size)))
    blocks = padded.reshape(count, -(-height // size), size, -(-width // size), size).swapaxes(2, 3)
    blocks = blocks.reshape(*blocks.shape[:3], size * size)
    strongest = np.abs(np.nan_to_num(blocks)).argmax(-1)
    return np.take_along_axis(blocks, strongest[..., None], -1)[..., 0]


def pool_labels(labels: Sequence[str], size: int) -> list[str]:
    """Neighbouring labels as one."""
    return ["".join(labels[start : start + size]) for start in range(0, len(labels), size)]


def cell_size(count: int) -> int:
    """Pixels of a cell: large for short prompts, never less than a readable label is high."""
    return next((size for most, size in ((12, 30), (24, 22), (48, 16), (80, 12)) if count <= most), 10)


def _grid(rows: Sequence[str], columns: Sequence[str], values: np.ndarray, label: str, corner: str) -> str:
    height, width = values.shape
    size = cell_size(width)
    if height > 12:
        size = max(size, cell_size(height))
    lines = "".join(f"<span>{escape(visible(row))}</span>" for row in rows)
    heads = "".join(f"<span>{escape(visible(column))}</span>" for column in columns)
    label = escape(f"{label}; use the arrow keys to read its cells")
    image = picture(values, largest_of(values))
    return (
        f'<div class="scroll"><div class="grid" tabindex="0" role="application" aria-label="{label}" '
        f'style="--c:{size}px" data-values="{packed(values)}" data-width="{width}">'
        f'<div class="corner">{escape(corner)}</div><div class="cols" aria-hidden="true">{heads}</div>'
        f'<div class="rows" aria-hidden="true">{lines}</div><div class="cells">'
        f'<img alt="" src="{image}" style="width:{size * width}px;height:{size * height}px">'
        '<div class="cursor" hidden></div></div></div></div>'
        '<output class="out" aria-live="polite">Point at a cell, or focus it and use the arrow keys.</output>'
    )


def strongest(rows: Sequence[str], columns: Sequence[str], values: np.ndarray) -> str:
    """The cells of largest absolute value as a table to be opened, for screen readers and places without scripts."""
    order = np.abs(np.nan_to_num(values)).argsort(axis=None, kind="stable")[::-1][:NAMED].tolist()
    cells = [divmod(int(index), len(columns)) for index in order]
    pairs = [(visible(rows[r]), visible(columns[c]), number(float(values[r, c]))) for r, c in cells if values[r, c]]
    largest = table(("row", "column", "value"), pairs)
    return f"<details><summary>The {NAMED} largest, as a table</summary>{largest}</details>"
