"""Which fonts of this machine have the letters of a figure: matplotlib takes one, and draws a box for what it lacks."""

import unicodedata
from functools import lru_cache
from typing import Any

from tensorlens_tl.errors import warn_caller

LAST_RESORT = "Last Resort"
"""A font of boxes that name the script; it has every character and shows none."""

_WARNED: set[str] = set()


def use_fonts_with_letters(drawn: Any) -> None:
    """Give every text of some axes or of a figure, beside its own font, those that have the letters which it lacks.

    Letters that no font of the machine has are warned of once for each script.
    """
    from matplotlib.text import Text

    missing: set[str] = set()
    for text in drawn.findobj(Text):
        lacking = [letter for letter in dict.fromkeys(text.get_text()) if _needs_another(letter, text)]
        others = {letter: _font_with(letter) for letter in lacking}
        missing |= {script(letter) for letter, font in others.items() if not font}
        fonts = dict.fromkeys(font for font in others.values() if font)
        if fonts:
            text.set_family([text.get_fontproperties().get_name(), *fonts])
    new = sorted(missing - _WARNED)
    if new:
        _WARNED.update(new)
        warn_caller(
            f"plot: no font on this machine has letters of {', '.join(new)}, so a figure shows boxes for them. Install "
            "one (such as Noto Sans of that script), or save as .html, which takes the fonts of whoever reads it.",
            UserWarning,
        )


def script(letter: str) -> str:
    """The script of a letter in words, as its name in Unicode begins.

    >>> script("ก"), script("א")
    ('Thai', 'Hebrew')
    """
    return unicodedata.name(letter, "unnamed characters").split()[0].title()


def _needs_another(letter: str, text: Any) -> bool:
    from matplotlib.font_manager import findfont

    if letter.isspace() or ord(letter) < 128:
        return False
    return ord(letter) not in _letters(findfont(text.get_fontproperties()))


@lru_cache(maxsize=512)
def _letters(path: str) -> frozenset[int]:
    """The characters that a font's file has; none of one that cannot be read."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(path).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@lru_cache(maxsize=4096)
def _font_with(letter: str) -> str:
    """The name of a font that has a letter, an upright and ordinary one where there is one; an empty text for none."""
    from matplotlib.font_manager import fontManager

    def unusual(font: Any) -> tuple[bool, bool, str]:
        return font.style != "normal", str(font.weight) not in ("400", "normal"), font.name

    for font in sorted(fontManager.ttflist, key=unusual):
        if not font.name.startswith(LAST_RESORT) and ord(letter) in _letters(font.fname):
            return font.name
    return ""
