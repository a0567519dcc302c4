"""From pictures to what shows them: a notebook cell, or one HTML file that opens without a network."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from tensorlens_tl.drawing.marks import note
from tensorlens_tl.errors import InvalidInputError

ONLY_WITH = {
    'class="cards"': ("cards.css",),
    'class="strips rove"': ("cards.css",),
    'class="graph circuit"': ("graph.css", "graph.js"),
    'class="generated"': ("generated.css", "generated.js"),
}
"""Assets that only some pictures need, by what these contain."""


NO_STYLE = re.compile(r"/\*.*?\*/\s*|(?<=\n) +|\n", re.DOTALL)
"""What a browser does not read in our style sheets: comments, indents, ends of lines."""


@cache
def asset(name: str) -> str:
    """One of the files in `assets/`; of a style sheet what a browser reads, since every notebook cell carries it."""
    text = (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")
    return NO_STYLE.sub("", text) if name.endswith(".css") else text


def head(body: str = "") -> str:
    """What every picture needs beside it, once: style, and the script that reads values; and what only some need."""
    names = ["base.css", "style.css", "script.js"]
    names += dict.fromkeys(name for mark, files in ONLY_WITH.items() if mark in body for name in files)
    style, script = ("".join(asset(name) for name in names if name.endswith(kind)) for kind in (".css", ".js"))
    return f"<style>{style}</style><script>{script}</script>"


def panel(title: str, *parts: str, notes: str = "") -> str:
    """A titled block; `parts` and nothing else is taken as HTML."""
    return f'<div class="tlens"><div class="title">{escape(title)}</div>{"".join(parts)}{note(notes)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A plain table; everything in it is taken as text."""
    heads = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="r {kind}"><tr>{heads}</tr>{lines}</table></div>'


def folded(summary: str, body: str) -> str:
    """What unfolds below a line of text; `body` is taken as HTML."""
    return f'<details class="folded"><summary>{escape(summary)}</summary>{body}</details>'


def page(title: str, body: str) -> str:
    """A whole file that opens without a network; `body` is taken as HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{asset('page.css')}</style>{head(body)}</head><body>{body}</body></html>\n"
    )


def display_in_notebook(html: Callable[[], str]) -> bool:
    """Display HTML where this runs in a notebook, or any IPython shell; False, and nothing is computed, elsewhere."""
    shell = sys.modules.get("IPython")
    if shell is None or shell.get_ipython() is None:
        return False
    shell.display.display(shell.display.HTML(html()))
    return True


@dataclass(frozen=True, repr=False)
class Picture:
    """HTML that shows itself in a notebook and saves itself as a page.

    >>> from tensorlens_tl.drawing import Picture
    >>> Picture("Scores", "<p>+0.5</p>")
    Picture('Scores', 0 kB; a notebook shows it, .save('page.html') keeps it)

    Attributes:
        title: in words, for the page.
        body: HTML without style and script.
    """

    title: str
    body: str

    def __repr__(self) -> str:
        return (
            f"Picture({self.title!r}, {len(self.body) / 1000:.0f} kB; a notebook shows it, .save('page.html') keeps it)"
        )

    def _repr_html_(self) -> str:
        return head(self.body) + self.body

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML file that opens without a network.

        Args:
            path: of the file; an older one is replaced.

        Returns:
            The path.

        Raises:
            InvalidInputError: there is no such folder.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise InvalidInputError(f"save: cannot write {path}, there is no folder {path.parent}.")
        written = page(self.title, self.body).encode()  # before an older file is emptied
        path.write_bytes(written)
        return path
