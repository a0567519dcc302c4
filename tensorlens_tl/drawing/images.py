"""Heat maps of images: scores of patches over the image that they belong to, and the image itself beside it.

Under the scores the image is in middle greys: every coloured patch is a score, and a score looks much the same
on dark and on light pixels.
"""

from collections.abc import Mapping
from html import escape

import numpy as np

from tensorlens_tl.drawing.marks import (
    STRONGEST,
    colour,
    colour_bar,
    largest_of,
    number,
    png,
    rgb,
    share,
    tab_stop,
    visible,
)
from tensorlens_tl.drawing.matrix import strongest
from tensorlens_tl.drawing.page import panel
from tensorlens_tl.errors import InvalidInputError

SMALLEST = 256
LARGEST = 640
"""Pixels of a picture's longer side, where the page has room: small images are enlarged, large ones reduced."""

DARKEST = 80
LIGHTEST = 230
"""The greys under the scores."""

LUMA = (0.299, 0.587, 0.114)
"""How bright red, green and blue are (ITU-R BT.601)."""


def patch_scores(
    image: np.ndarray,
    scores: np.ndarray,
    *,
    title: str,
    special: Mapping[str, float] | None = None,
    note: str = "",
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
        note: a line below.

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
    return panel(title, *parts, notes=note)


def picture_of(image: np.ndarray, *, greys: bool = False) -> str:
    """An image as a data URI.

    Args:
        image: `[channel, height, width]`, as for `patch_scores`.
        greys: in middle greys, as it lies under scores.
    """
    pixels = _bytes(_reduced(np.asarray(image, dtype=float)))
    if greys:
        pixels = _greys(pixels)
    return png(pixels, {1: 0, 3: 2}[pixels.shape[-1]])


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
    kind = {1: 0, 3: 2}[pixels.shape[-1]]
    return (
        f'<svg viewBox="0 0 {width} {height}" role="{role}" aria-label="{escape(label)}"><image width="{width}" '
        f'height="{height}" preserveAspectRatio="none"{sharp} href="{png(pixels, kind)}"/>{marks}</svg>'
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
