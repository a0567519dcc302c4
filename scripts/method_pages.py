"""Writes the example and the picture of every method into the pages of `docs/methods` (`make methods`).

All methods explain the same prediction.
"""

import re
from pathlib import Path
from typing import Any

import tensorlens_tl as tlens
from scripts.gallery import run

DOCS = Path(__file__).parent.parent / "docs"
PAGES, PICTURES = DOCS / "methods", DOCS / "_static" / "methods"
START, END = "<!-- example, written by `make methods` -->", "<!-- end of the example -->"
PROMPT = "If the file is not found, a FileNotFoundError is"
TARGET, MINUS = " raised", " not"
HEADING = re.compile(r"^## `([\w-]+)`$", flags=re.M)


def pages() -> dict[str, str]:
    """The page on which each method has its section."""
    return {name: path.stem for path in sorted(PAGES.glob("*.md")) for name in HEADING.findall(path.read_text("utf-8"))}


def page_of(name: str) -> str:
    """The name of a method's page."""
    return pages()[name]


def sections(text: str) -> dict[str, str]:
    """The sections of a page by the method that each is about."""
    _, *parts = HEADING.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def call(name: str) -> str:
    """The example: the target where the method takes one, else the last token as the query."""
    method = tlens.get_method(name)
    if not method.takes("target"):
        options = ["query=-1"]
    elif method.takes("minus"):
        options = [f'"{TARGET}"', f'minus="{MINUS}"']
    else:
        options = [f'"{TARGET}"']
    options = ["frozen", *options, f'method="{name}"']
    return f"tlens.attribute({', '.join(options)})"


def block(name: str) -> str:
    """What stands between the marks of a section."""
    return "\n".join(
        [
            START,
            "",
            f"```python\n{call(name)}.show()\n```",
            "",
            f"![The prompt coloured by {name}](../_static/methods/{name}.svg)",
            "",
            END,
        ]
    )


def written(text: str) -> str:
    """A page with the block of each method above its formula."""
    text = re.sub(rf"{re.escape(START)}.*?{re.escape(END)}\n\n", "", text, flags=re.S)
    for name, section in sections(text).items():
        text = text.replace(section, section.replace("\n$$\n", f"\n{block(name)}\n\n$$\n", 1))
    return text


def draw(name: str, folder: Path) -> None:
    """The picture of an example."""
    names: dict[str, Any] = {}
    code = (
        "import tensorlens_tl as tlens\n"
        f'frozen = tlens.freeze(tlens.load_demo_model(), "{PROMPT}")\n'
        f'{call(name)}.save("{name}.svg")\n'
    )
    run(code, names, folder)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in pages():
        draw(name, PICTURES)
    for page in PAGES.glob("*.md"):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
