"""`RESULTS.md`: sections of one heading each, every one with when and on which code it was measured."""

import csv
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from subprocess import run
from typing import Any

RESULTS = Path(__file__).parent / "RESULTS.md"
STATIC = Path(__file__).parent.parent / "docs" / "_static"
"""Where tables of the site are, as CSV files."""

Lines = Iterator[str]
Section = Callable[[], Lines]
"""Yields its table line by line; its docstring begins with the heading."""


def table(*columns: str) -> str:
    """The head of a table."""
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def row(*cells: Any) -> str:
    """A line of a table, numbers with two digits after the point."""
    return f"| {' | '.join(f'{cell:.2f}' if isinstance(cell, float) else str(cell) for cell in cells)} |"


def rows(lines: Iterable[str]) -> list[list[str]]:
    """The cells of a table's lines, its head first."""
    cells = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if not set("".join(row)) <= set("- ")]


def save(name: str, lines: Iterable[Sequence[str]]) -> None:
    """Write a table of the site."""
    with (STATIC / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def heading(section: Section) -> str:
    return _description(section)[0]


def measured(section: Section) -> str:
    """A section's text, each line printed as it is measured."""
    title, explanation = _description(section)
    load = os.getloadavg()[0]
    start = time.monotonic()
    print(f"\n## {title}\n", flush=True)
    lines: list[str] = []
    for line in section():
        print(line, flush=True)
        lines.append(line)
    minutes = (time.monotonic() - start) / 60
    stamp = f"*{date.today()}, {_commit()}, {minutes:.1f} minutes, load average {load:.1f} at the start.*"
    return "\n\n".join(part for part in (f"## {title}", explanation, "\n".join(lines).strip(), stamp) if part)


def write(head: str, sections: dict[str, str], order: list[str]) -> None:
    """Put sections, by heading, into the page; those that it has besides stay, and all are in the given order."""
    _, *present = RESULTS.read_text(encoding="utf-8").split("\n## ")
    texts = {text.partition("\n")[0]: f"## {text.strip()}" for text in present} | sections
    RESULTS.write_text(
        "\n\n".join([head, *(texts[title] for title in order if title in texts)]) + "\n", encoding="utf-8"
    )


def _description(section: Section) -> tuple[str, str]:
    """The heading and the explanation of a section."""
    title, *rest = (section.__doc__ or "").strip().splitlines()
    return title.removeprefix("## "), " ".join(line.strip() for line in rest).strip()


def _commit() -> str:
    """What code was measured; "+" where it was changed since, this page apart."""
    name = _git("rev-parse", "--short", "HEAD")
    if not name:
        return "no commit"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":!{RESULTS.name}")
    return f"commit {name}{'+' if changed else ''}"


def _git(*arguments: str) -> str:
    """What git prints; nothing where there is no repository."""
    return run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()
