"""The smallest marks of a picture: readable tokens, signed colours with zero in the middle, and numbers as text."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape

import numpy as np

POSITIVE = (66, 146, 230)
NEGATIVE = (235, 120, 40)
"""Blue and orange: told apart in every common kind of colour blindness, on light and dark ground."""

STRONGEST = 0.65
"""Opacity of the largest value. Zero is transparent, so text keeps its contrast and any ground shows through."""

_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡", "\u00a0": "⍽"}
_CONTROL = str.maketrans({chr(code): chr(0x2400 + code) for code in range(32)} | _SIGNS)


def visible(token: str) -> str:
    """A token as it can be read: control characters as signs, nothing as a sign of its own."""
    return token.translate(_CONTROL) or "∅"


def short(text: str, most: int) -> str:
    """A text of at most so many characters."""
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


def counted(count: int, noun: str) -> str:
    """So many of something: ``"1 prompt"``, ``"2 prompts"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number(value: int | float) -> str:
    """A signed value in four digits."""
    return f"{value:+.4g}"


LARGE = 1e5
SMALL = 1e-3
"""The largest of some values is written as it is between these two."""

NEGLIGIBLE = 1e-6
"""Of the largest value: what is smaller is not written out."""


def numbers(values: Sequence[float]) -> tuple[list[str], str]:
    """Values as texts in four digits, in one unit, and that unit; an empty text is 1.

    Where the largest is far from 1, the unit is a power of a thousand; what is a millionth of it or less is ``≈0``.

    >>> numbers([5.051e18, 1.5e17, -3.0, 0.0])
    (['+5.051', '+0.15', '≈0', '+0'], '1e18')
    >>> numbers([12.5, -0.25])
    (['+12.5', '-0.25'], '')
    """
    largest = largest_of(np.array(values, dtype=np.float64))
    power = 0
    if largest and not SMALL <= largest < LARGE:
        power = max(-300, 3 * math.floor(math.log10(largest) / 3))
    texts = ["≈0" if 0 < abs(value) <= NEGLIGIBLE * largest else number(value / 10.0**power) for value in values]
    return texts, f"1e{power}" if power else ""


def largest_of(values: np.ndarray) -> float:
    """The largest absolute value, NaN apart; 0 where there is none."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def share(value: int | float, largest: int | float) -> float:
    """A value as a share of the largest, in [−1, 1]; 0 where either is no number."""
    if not largest > 0 or math.isnan(value):
        return 0.0
    return max(-1.0, min(1.0, value / largest))


def colour(value: int | float, largest: int | float) -> str:
    """CSS background of a signed value: zero is transparent, ±largest is strongest."""
    part = share(value, largest)
    return f"background:rgba({rgb(part)},{STRONGEST * abs(part):.3f})"


def sign_colour(value: int | float) -> tuple[int, int, int]:
    """Red, green and blue of a value's sign."""
    if value >= 0:
        return POSITIVE
    return NEGATIVE


def rgb(value: int | float) -> str:
    """The colour of a value's sign, as CSS lists it."""
    return ",".join(map(str, sign_colour(value)))


def tab_stop(first: bool) -> str:
    """The attribute by which only the first of a group is a tab stop; the script moves on with the arrow keys."""
    if first:
        return 'tabindex="0"'
    return 'tabindex="-1"'


def note(text: str) -> str:
    """A line below a picture; nothing without a text."""
    if not text:
        return ""
    return f'<div class="n">{escape(text)}</div>'


def colour_bar(values: np.ndarray) -> str:
    """The scale of the colours of all values: zero in the middle, or at the left where no value is negative."""
    largest = largest_of(values)
    if np.nanmin(values, initial=0.0) < 0:
        kind = "bar"
        low = f"−{largest:.3g}"
        label = f"from −{largest:.3g}, orange, through 0, clear,"
    else:
        kind = "bar unsigned"
        low = "0"
        label = "from 0, clear,"
    return (
        f'<div class="{kind}" role="img" aria-label="colours run {label} to +{largest:.3g}, blue">'
        f"<span>{low}</span><i></i><span>+{largest:.3g}</span></div>"
    )


def item(token: str, label: str, style: str = "", *, marked: bool = False, first: bool = False) -> str:
    """One mark that can be pointed at, focused and read aloud; hovering or focusing it shows `label`."""
    kind = "t q" if marked else "t"
    attributes = f'class="{kind}" role="img" {tab_stop(first)} aria-label="{escape(label)}"'
    if style:
        attributes += f' style="{style}"'
    return f"<span {attributes}>{escape(token)}</span>"


def token_marks(
    tokens: Sequence[str],
    values: Sequence[float],
    largest: float,
    query: int | None,
    positions: Sequence[int],
    parts: Sequence[str] = (),
    *,
    named: str = "",
    first: bool = True,
) -> str:
    """The marks of one coloured line, on the scale of `largest`; a value shows on hover and focus.

    The token at position `query` is underlined. `parts` names for each token the part of the prompt it belongs to; each
    part begins a line with its name. `named` stands before what each mark says, and only the `first` line of a group
    has a tab stop.
    """
    marks: list[str] = []
    for count, (position, token, value) in enumerate(zip(positions, tokens, values, strict=True)):
        if parts and (not count or parts[count] != parts[count - 1]):
            marks.append(f'{"<br>" if count else ""}<span class="n">{escape(parts[count])} </span>')
        label = f"{named}{visible(token)} at {position}: {number(value)}"
        is_first = first and count == 0
        marks.append(item(visible(token), label, colour(value, largest), marked=position == query, first=is_first))
        if "\n" in token:
            marks.append("<br>")
    return "".join(marks)


# ------------------------------------------------------------------ many cells at once


def levels(values: np.ndarray, largest: int | float) -> np.ndarray:
    """Signed values as palette indices: 127 is zero, 0 and 254 are ∓largest."""
    if largest <= 0:
        return np.full(values.shape, 127, dtype=np.uint8)
    shares = np.nan_to_num(values / largest, nan=0.0, posinf=1.0, neginf=-1.0)
    return (127 + np.rint(127 * shares.clip(-1, 1))).astype(np.uint8)


def picture(values: np.ndarray, largest: int | float) -> str:
    """A matrix of signed values as a data URI: a PNG of one pixel per value, in the colours of `colour`.

    A table of 128 × 128 cells would be a megabyte of HTML; this is about ten kilobytes.
    """
    steps = range(-127, 128)
    colours = bytes(channel for step in steps for channel in sign_colour(step))
    alpha = bytes(round(255 * STRONGEST * abs(step) / 127) for step in steps)
    return png(levels(values, largest), (b"PLTE", colours), (b"tRNS", alpha))


def png(pixels: np.ndarray, *palette: tuple[bytes, bytes]) -> str:
    """Pixels as a data URI.

    Args:
        pixels: bytes, `[row, column, channel]` of grey or of red, green and blue; or `[row, column]` of a palette.
        palette: its chunks, which stand between header and pixels: names and contents.
    """
    height, width, *channels = pixels.shape
    kind = {(1,): 0, (3,): 2, (): 3}[tuple(channels)]  # PNG's colour type
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    packed = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", header), *palette, (b"IDAT", rows), (b"IEND", b""))
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + packed).decode("ascii")


def packed(values: np.ndarray) -> str:
    """Values for the script to read: little-endian float32, base64."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
