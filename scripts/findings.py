"""Runs the code of `docs/findings.md` on a trained model: ``python -m scripts.findings`` draws its pictures again.

A number in a sentence of that page stands before a comment with the expression that gives it.
"""

import re
from collections.abc import Iterator
from typing import Any

from scripts.gallery import DOCS, run
from scripts.real_models import FOLDER

PAGE, PICTURES = DOCS / "findings.md", DOCS / "_static" / "findings"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUMBER = re.compile(r"([+−]?[\d.]+)<!-- (.*?) -->")


def sections() -> list[str]:
    """The page's introduction, then its sections."""
    return re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)


def code(section: str) -> str:
    """What a section runs, on the model that `make real` has fetched."""
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    return "\n".join(blocks).replace(MODEL, str(FOLDER / "smollm2"))


def numbers(section: str, names: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Every number of a section's sentences as it is written, with its expression and what that gives."""
    for written, expression in NUMBER.findall(section):
        yield written, expression, float(eval(expression, names))


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    names: dict[str, Any] = {}
    for section in sections():
        run(code(section), names, PICTURES)
        for written, expression, value in numbers(section, names):
            print(f"{written:>8} {value:+.4f} {expression}", flush=True)


if __name__ == "__main__":
    main()
