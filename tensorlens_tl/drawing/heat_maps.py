"""Prompts and images in the colours of their scores, as HTML: one, several side by side, and what they are made of.

Generated text is coloured by one token of it after the other: the first row without a script, which colours others
(`assets/generated.js`); a click, or Enter, keeps a row while others are pointed at. Under an image's scores the image
is in middle greys: every coloured patch is a score, and a score looks much the same on dark and on light pixels.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from tensorlens_tl.drawing.marks import (
    STRONGEST,
    colour,
    colour_bar,
    item,
    largest_of,
    note as note_line,
    number,
    packed,
    png,
    rgb,
    share,
    tab_stop,
    token_marks,
    visible,
)
from tensorlens_tl.drawing.matrix import matrix, small_multiples, strongest
from tensorlens_tl.drawing.page import panel
from tensorlens_tl.errors import InvalidInputError

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
        marks = token_marks(tokens, plane[0].tolist(), largest_of(plane), queries[0][0], positions, parts)
        drawings = [f'<div class="line rove">{marks}</div>{colour_bar(plane)}']
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
    for name, values in lines.items():
        about = {"named": f"{name}, ", "first": not rows}
        marks = token_marks(list(tokens.values()), values.tolist(), largest, query, list(tokens), **about)
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


def generated_text(
    tokens: Sequence[str],
    positions: Sequence[int],
    values: np.ndarray,
    first: int,
    targets: Sequence[Sequence[int]],
    facts: Sequence[str],
) -> str:
    """A prompt and what was generated after it, in the colours of the last question about it.

    Args:
        tokens: of the text.
        positions: what they are called.
        values: scores of the tokens, `[question, token]`.
        first: the number of the first generated token among them.
        targets: the tokens that each question is about, by number; a token belongs to at most one question where there
            are several.
        facts: a line about each question, such as its bias and total.
    """
    chosen = len(values) - 1
    questions: dict[int, int] = {}
    if chosen:
        questions = {token: question for question, tokens_of in enumerate(targets) for token in tokens_of}
    largest = largest_of(values[chosen])
    marks = ['<span class="n">prompt </span>']
    for column, token in enumerate(tokens):
        if column == first:
            marks.append('<br><span class="n">generated </span>')
        value = float(values[chosen, column])
        kind = "t q" if column in targets[chosen] else "t"
        role = f'role="img" {tab_stop(column == 0)}'
        if column in questions:
            role = f'role="button" {tab_stop(column == 0)} data-question="{questions[column]}" aria-pressed="false"'
        name = f"{visible(token)} at {positions[column]}"
        marks.append(
            f'<span class="{kind}" {role} data-name="{escape(name)}" aria-label="{escape(f"{name}: {number(value)}")}" '
            f'style="{colour(value, largest)}">{escape(visible(token))}</span>'
        )
        if "\n" in token and column + 1 != first:
            marks.append("<br>")
    line = f'<div class="line rove">{"".join(marks)}</div>'
    if not chosen:
        return line + colour_bar(values[chosen]) + note_line(facts[chosen])
    lines = "\n".join(fact.replace("\n", "↵") for fact in facts)  # a line holds no line feed
    data = f'data-values="{packed(values)}" data-width="{len(tokens)}" data-facts="{escape(lines)}"'
    return (
        f'<div class="generated" {data} data-chosen="{chosen}">{line}'
        f'<output class="out" aria-live="polite">{escape(facts[chosen])}</output></div>'
        '<div class="n">Blue adds, orange takes away, each token from its own largest value. Point at a generated '
        "token, or move to it with the arrow keys, to see what made it; a click or Enter keeps it.</div>"
    )


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

    @property
    def largest(self) -> tuple[str, float, int]:
        """The largest token, its value and its position."""
        return self.tokens[self.peak], self.values[self.peak], self.positions[self.peak]


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
        _, value, position = row.largest
        fact = f"{number(value)}, row {row.row} at {position}"
        lines.append(f'<div><span class="n">{escape(fact)} </span>{"".join(marks)}</div>')
    return f'<div class="line rove">{"".join(lines)}</div>{colour_bar(values)}'


def promoted(tokens: Sequence[str], logits: Sequence[float]) -> str:
    """The tokens that a feature's decoder row promotes, with what one unit of it gives each."""
    if not tokens:
        return ""
    marks = [
        f'<span title="{number(logit)}">{escape(visible(token))}</span>'
        for token, logit in zip(tokens, logits, strict=True)
    ]
    return f'<div class="n">promotes, per unit of the decoder</div><div class="special">{"".join(marks)}</div>'


SMALLEST = 256
LARGEST = 640
"""Pixels of a picture's longer side, where the page has room: small images are enlarged, large ones reduced."""

DARKEST = 80
LIGHTEST = 230
"""The greys under the scores."""

LUMA = (0.299, 0.587, 0.114)
"""How bright red, green and blue are (ITU-R BT.601)."""


def patch_scores(
    image: np.ndarray, scores: np.ndarray, *, title: str, special: Mapping[str, float] | None = None
) -> str:
    """Scores of an image's patches in colours over it; a patch's score shows on hover and focus.

    Colours are scaled to the patches' largest absolute score; a special token beyond it has the strongest colour.

    Args:
        image: `[channel, height, width]`, one channel (grey) or three (red, green, blue), of any range: the smallest
            value is shown as 0 and the largest as full, one image without any difference as middle grey.
        scores: `[row, column]` of the patches, which divide the whole image evenly; where a model leaves out pixels at
            the right and the bottom, crop them.
        title: above the picture.
        special: scores of tokens that are no patch, such as ``{"CLS": 0.3}``, shown with their labels.

    Raises:
        InvalidInputError: another shape, or a value that is not finite.
    """
    image = np.asarray(image, dtype=float)
    scores = np.asarray(scores, dtype=float)
    special = dict(special or {})
    _check(image, scores, special)
    pixels = _bytes(_reduced(image))
    height, width = image.shape[1:]
    size = width / max(height, width) * min(max(height, width, SMALLEST), LARGEST)
    rows, columns = scores.shape
    largest = largest_of(scores)
    label = f"{title}: scores of {rows} × {columns} patches; use the arrow keys to read them"
    over = _frame(_greys(pixels), height, width, "group", label, _rectangles(scores, height, width, largest))
    beside = _frame(pixels, height, width, "img", "the image itself")
    parts = [
        f'<div class="graph"><div class="images" style="--w:{size:.0f}px">'
        f'<figure class="rove" data-width="{columns}">{over}</figure><figure>{beside}</figure></div>'
        '<output class="out" aria-live="polite">Point at a patch, or focus it and use the arrow keys.</output></div>',
        colour_bar(scores),
    ]
    if special:
        marks = "".join(
            f'<span style="{colour(score, largest)}">{escape(visible(name))} {number(score)}</span>'
            for name, score in special.items()
        )
        parts.append(f'<div class="special" role="group" aria-label="tokens that are no patch">{marks}</div>')
    parts.append(strongest([str(row) for row in range(rows)], [str(column) for column in range(columns)], scores))
    return panel(title, *parts)


def picture_of(image: np.ndarray, *, greys: bool = False) -> str:
    """An image as a data URI.

    Args:
        image: `[channel, height, width]`, as for `patch_scores`.
        greys: in middle greys, as it lies under scores.
    """
    pixels = _bytes(_reduced(np.asarray(image, dtype=float)))
    return png(_greys(pixels) if greys else pixels)


def _check(image: np.ndarray, scores: np.ndarray, special: Mapping[str, float]) -> None:
    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.size:
        raise InvalidInputError(
            f"patch_scores: the image has shape {list(image.shape)}; give [channel, height, width] of one image, "
            "with one channel (grey) or three (red, green, blue)."
        )
    if scores.ndim != 2 or not scores.size:
        raise InvalidInputError(f"patch_scores: scores have shape {list(scores.shape)}; give [row, column] of patches.")
    values = {"the image": image, "scores": scores} | {
        f"the score of {name}": np.array(s) for name, s in special.items()
    }
    for name, value in values.items():
        if not np.isfinite(value).all():
            raise InvalidInputError(f"patch_scores: {name} must be finite; found NaN or infinity.")


def _reduced(image: np.ndarray) -> np.ndarray:
    """Means of square blocks of pixels, so many that the longer side is at most `LARGEST`."""
    height, width = image.shape[1:]
    block = -(-max(height, width) // LARGEST)
    down = np.arange(0, height, block)
    across = np.arange(0, width, block)
    sums = np.add.reduceat(np.add.reduceat(image, down, axis=1), across, axis=2)
    return sums / np.outer(np.diff([*down, height]), np.diff([*across, width]))


def _bytes(image: np.ndarray) -> np.ndarray:
    """Values as 0 to 255, `[row, column, channel]`."""
    low = float(image.min())
    high = float(image.max())
    shares = np.full_like(image, 0.5)
    if high > low:
        shares = (image - low) / (high - low)
    return np.rint(255 * shares).astype(np.uint8).transpose(1, 2, 0)


def _greys(pixels: np.ndarray) -> np.ndarray:
    """A brightness for every pixel, between `DARKEST` and `LIGHTEST`."""
    brightness = pixels @ np.array({1: (1.0,), 3: LUMA}[pixels.shape[-1]]) / 255
    return np.rint(DARKEST + (LIGHTEST - DARKEST) * brightness).astype(np.uint8)[..., None]


def _frame(pixels: np.ndarray, height: int, width: int, role: str, label: str, marks: str = "") -> str:
    """The image as an SVG in its own coordinates, with marks over it."""
    sharp = ' style="image-rendering:pixelated"' if max(height, width) < SMALLEST else ""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="{role}" aria-label="{escape(label)}"><image width="{width}" '
        f'height="{height}" preserveAspectRatio="none"{sharp} href="{png(pixels)}"/>{marks}</svg>'
    )


def _rectangles(scores: np.ndarray, height: int, width: int, largest: int | float) -> str:
    high = height / scores.shape[0]
    wide = width / scores.shape[1]
    marks = []
    for (row, column), score in np.ndenumerate(scores):
        part = share(float(score), largest)
        label = f"row {row}, column {column}: {number(float(score))}"
        marks.append(
            f'<rect class="t" x="{column * wide:.6g}" y="{row * high:.6g}" width="{wide:.6g}" height="{high:.6g}" '
            f'fill="rgb({rgb(part)})" fill-opacity="{STRONGEST * abs(part):.3f}" role="img" '
            f'{tab_stop(not marks)} aria-label="{label}"><title>{label}</title></rect>'
        )
    return "".join(marks)
