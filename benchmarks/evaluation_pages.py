"""What docs/evaluation.md shows of the tables of benchmarks/EVALUATION.md: CSV files, which the page filters.

One screen of every method in every test, all numbers, the verdict of each test, and the tables that have other rows than
methods or other cells than numbers. ``python benchmarks/evaluation_pages.py`` writes them again, without measuring;
`make evaluation` does so as well.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE, DOCS = Path(__file__).parent, Path(__file__).parent.parent / "docs"
TABLES, PAGE, STATIC = HERE / "EVALUATION.md", DOCS / "evaluation.md", DOCS / "_static"
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


class Table(NamedTuple):
    """A table of the page, by its heading."""

    title: str
    head: list[str]
    rows: list[list[str]]


def tables(text: str) -> list[Table]:
    """Every table of the page, in its order."""
    found = []
    for title, section in sections(text).items():
        for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.M):
            head, _, *rows = (
                [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
            )
            found.append(Table(title, head, rows))
    return found


def cells(text: str) -> list[Cell]:
    """Every number with or without an interval, of all tables whose rows are methods."""
    return [
        Cell(table.title, row[0], *number)
        for table in tables(text)
        if table.head[0] == "method"
        for row in table.rows
        for number in numbers_of(table.head, row)
    ]


def other_cells(text: str) -> list[tuple[str, str, str, str]]:
    """Every cell that `cells` leaves out, with its table, its row and its column."""
    counted = {(cell.table, cell.method, cell.metric) for cell in cells(text)}
    return [
        (table.title, row[0], column, cell)
        for table in tables(text)
        for row in table.rows
        for column, cell in zip(table.head[1:], row[1:], strict=True)
        if (table.title, row[0], column) not in counted
    ]


def verdicts(text: str) -> list[tuple[str, str, str]]:
    """What each table says of each metric: who is first, who does not differ from it, and how far ours is behind."""
    return [
        (title, metric, sentence.replace("**", ""))
        for title, section in sections(text).items()
        for metric, sentence in re.findall(r"^\* `(\w+)`: (.*)$", section, flags=re.M)
    ]


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


def overview(text: str) -> list[list[str]]:
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
    return [["method", *(name for name, _ in SHOWN.values())], *([method, *marks[method]] for method in order)]


def files(text: str) -> dict[str, str]:
    """The files of the page by their names, as CSV."""
    return {
        "evaluation-overview.csv": as_csv(overview(text)),
        "evaluation.csv": as_csv([Cell._fields, *cells(text)]),
        "evaluation-verdicts.csv": as_csv([("table", "metric", "verdict"), *verdicts(text)]),
        "evaluation-others.csv": as_csv([("table", "row", "column", "value"), *other_cells(text)]),
    }


def as_csv(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def main() -> None:
    for name, content in files(TABLES.read_text(encoding="utf-8")).items():
        (STATIC / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
