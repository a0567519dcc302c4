"""What is read off the tables of docs/evaluation_tables.md: one screen of them all, and one CSV file.

``python benchmarks/evaluation_pages.py`` writes both again, without measuring; `make evaluation` does so as well.
"""

import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
TABLES, PAGE, NUMBERS = DOCS / "evaluation_tables.md", DOCS / "evaluation.md", DOCS / "_static" / "evaluation.csv"
START, END = "<!-- overview, written by benchmarks/evaluation_pages.py -->", "<!-- end of the overview -->"
SHOWN = {
    "Language model: positive perturbation": ("text +", "logit"),
    "Language model: negative perturbation": ("text −", "logit"),
    "Masked encoder: positive perturbation": ("encoder +", "logit"),
    "Masked encoder: negative perturbation": ("encoder −", "logit"),
    "Recall model: positive perturbation": ("recall +", "logit"),
    "Recall model: negative perturbation": ("recall −", "logit"),
    "Digits: positive perturbation": ("images +", "logit"),
    "Digits: negative perturbation": ("images −", "logit"),
    "Key–value recall": ("recall, known", "mass"),
    "Brackets": ("brackets, known", "mass"),
    "Induction, language model": ("induction, known", "mass"),
}
"""The columns of the screen: a table, its short name, and the metric that is shown."""
SPACE = "\N{NO-BREAK SPACE}"
CELL = re.compile(r"\**(-?[\d.e-]+)\**(?: \[(-?[\d.e-]+), (-?[\d.e-]+)\])?")


class Cell(NamedTuple):
    """A number of a table: its mean with the bounds of its interval, where it has one."""

    table: str
    method: str
    metric: str
    mean: str
    low: str
    high: str


def sections(text: str) -> dict[str, str]:
    """The parts of the page by their titles."""
    return {part.split("\n", 1)[0]: part for part in re.split(r"^### ", text, flags=re.M)[1:]}


def cells(text: str) -> list[Cell]:
    """Every number with or without an interval, of all tables whose rows are methods."""
    found = []
    for title, section in sections(text).items():
        for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.M):
            head, _, *rows = (
                [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
            )
            if head[0] == "method":
                found += [Cell(title, row[0], *number) for row in rows for number in numbers_of(head, row)]
    return found


def numbers_of(head: list[str], row: list[str]) -> list[tuple[str, str, str, str]]:
    """The numbers of a row, each with its metric and the bounds of its interval; other cells are left out."""
    matches = [(metric, CELL.fullmatch(cell)) for metric, cell in zip(head[1:], row[1:], strict=True)]
    return [(metric, match[1], match[2] or "", match[3] or "") for metric, match in matches if match]


def leading(section: str, metric: str, methods: list[str]) -> tuple[str, set[str]]:
    """The first method by a metric, and those that do not differ significantly from it."""
    line = next(line for line in section.splitlines() if line.startswith(f"* `{metric}`: first is"))
    first = re.findall(r"first is \*\*(.*?)\*\*", line)[0]
    listed = re.findall(r"paired\): (.*?)\.(?: Best TensorLens|$)", line)
    names = sorted(methods, key=len, reverse=True)  # "tensorlens in_out, biases" before "tensorlens in_out"
    pattern = "|".join(re.escape(name) for name in names)
    return first, set(re.findall(rf"(?:^|, )({pattern})(?=, |$)", listed[0])) if listed else set()


def marked(number: str, is_first: bool, is_tied: bool) -> str:
    """A cell of the screen."""
    if is_first:
        return f"●{SPACE}{number}"
    if is_tied:
        return f"○{SPACE}{number}"
    return number


def overview(text: str) -> str:
    """Every method in every test, a column each: ● first, ○ not significantly different from the first."""
    parts, numbers = sections(text), {(c.table, c.method, c.metric): c.mean for c in cells(text)}
    methods = list(dict.fromkeys(c.method for c in cells(text) if c.table in SHOWN))
    marks: dict[str, list[str]] = {method: [] for method in methods}
    for title, (_, metric) in SHOWN.items():
        first, tied = leading(parts[title], metric, methods)
        for method in methods:
            number = numbers.get((title, method, metric), "–")
            marks[method].append(marked(number, method == first, method in tied))
    order = sorted(methods, key=lambda method: (-sum(cell[0] in "●○" for cell in marks[method]), method))
    head = ["method", *(name for name, _ in SHOWN.values())]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join([method, *marks[method]])} |" for method in order)])


def numbers_file(text: str) -> str:
    """All numbers as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Cell._fields)
    writer.writerows(cells(text))
    return file.getvalue()


def page() -> str:
    """The page of findings with its overview written again."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(START)], text[text.index(END) :]
    return f"{before}{START}\n\n{overview(TABLES.read_text(encoding='utf-8'))}\n\n{after}"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    NUMBERS.write_text(numbers_file(TABLES.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
