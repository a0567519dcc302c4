"""Writes the top of every page in `docs/methods` (`make methods`): an example, its picture and the method's evidence.

All pages explain the same prediction. The rows of evidence are those of `docs/evaluation.md`.
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
OTHERS = {
    "attention": ["mean attention"],
    "mean": ["mean attention", "mean norm:attn", "mean norm:attn_res_ln", "mean globenc"],
    "norm": ["mean norm:attn", "mean norm:attn_res_ln"],
}
"""The rows of methods that no evaluation runs by their own name."""


def built_in() -> list[str]:
    """The methods that have a page."""
    return sorted(path.stem for path in PAGES.glob("*.md"))


def code(name: str) -> str:
    """The example: the target where the method takes one, else the last token as the query."""
    method = tlens.get_method(name)
    if not method.takes("target"):
        options = ["query=-1"]
    elif method.takes("minus"):
        options = [f'"{TARGET}"', f'minus="{MINUS}"']
    else:
        options = [f'"{TARGET}"']
    call = ", ".join(["frozen", *options, f'method="{name}"'])
    return (
        "import tensorlens_tl as tlens\n\n"
        f'frozen = tlens.freeze(tlens.load_demo_model(), "{PROMPT}")\n'
        f"why = tlens.attribute({call})\n"
        "why.show()\n"
    )


def rows() -> dict[str, list[str]]:
    """The lines of the overview for each method, its heading first."""
    text = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    head, line, *lines = re.findall(r"^\|.*", text, flags=re.M)
    labels = {each.split(" | ")[0].strip("| "): each for each in lines}
    chosen = {}
    for name in built_in():
        of = OTHERS.get(name, [label for label in labels if label == name or label.startswith(f"{name} ")])
        chosen[name] = [head, line, *(labels[label] for label in of)]
    return chosen


def block(name: str, evidence: list[str]) -> str:
    """What stands between the marks of a page."""
    return "\n".join(
        [
            START,
            "",
            f"```python\n{code(name)}```",
            "",
            f"![The prompt coloured by {name}](../_static/methods/{name}.svg)",
            "",
            "The same sentence on every page: blue adds to the prediction, orange takes away; a method without signs "
            "has blue alone. How the method did in [the evaluation](../evaluation.md) (● first, ○ not significantly "
            "different from the first):",
            "",
            *evidence,
            "",
            END,
        ]
    )


def written(name: str, text: str, evidence: list[str]) -> str:
    """A page with its block, above the definition."""
    text = re.sub(rf"{re.escape(START)}.*?{re.escape(END)}\n\n", "", text, flags=re.S)
    return text.replace("## Definition", f"{block(name, evidence)}\n\n## Definition", 1)


def draw(name: str, folder: Path) -> None:
    """The picture of an example."""
    names: dict[str, Any] = {}
    run(code(name).replace("why.show()", f'why.save("{name}.svg")'), names, folder)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    evidence = rows()
    for name in built_in():
        draw(name, PICTURES)
        page = PAGES / f"{name}.md"
        page.write_text(written(name, page.read_text(encoding="utf-8"), evidence[name]), encoding="utf-8")


if __name__ == "__main__":
    main()
