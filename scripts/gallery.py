"""Draws the figures of `docs/gallery.md` into `docs/_static/gallery`, by running the page's code there."""

import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "gallery.md"
PICTURES = DOCS / "_static" / "gallery"
SETTINGS: Any = {"svg.hashsalt": "tensorlens", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Arial"]}
"""Of matplotlib: the same figure gives the same file, and letters are the reader's own, which makes files small."""


def snippets(page: Path = PAGE) -> list[str]:
    """The code of the page, in its order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)


def pictures(page: Path = PAGE) -> list[str]:
    """The names of the pictures that the page shows, in its order."""
    return re.findall(r"\(_static/gallery/([\w.-]+)\)", page.read_text(encoding="utf-8"))


def texts(picture: Path) -> list[str]:
    """Everything that is written in a picture, in its order, but for numbers: processors round them differently."""
    every = (element.text or "" for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"))
    every = (re.sub(r"gap \S+", "gap", text) for text in every)
    return [text for text in every if not re.fullmatch(r"[+\-−\d.e]*", text)]


def run(code: str, names: dict[str, Any], folder: Path) -> None:
    """Run one snippet in a folder, which its figures are written to.

    Args:
        code: of the page.
        names: what earlier snippets have defined; this one's are added.
        folder: where to.
    """
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date in a file
    before = Path.cwd()
    os.chdir(folder)
    try:
        with matplotlib.rc_context(SETTINGS):
            exec(compile(code, PAGE.name, "exec"), names)
    finally:
        os.chdir(before)
    pyplot.close("all")


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.iterdir():
        old.unlink()
    names: dict[str, Any] = {}
    for code in snippets():
        run(code, names, PICTURES)
    size = sum(path.stat().st_size for path in PICTURES.iterdir())
    print(f"{len(pictures())} pictures, {size / 1000:.0f} kB, in {PICTURES}")


if __name__ == "__main__":
    main()
