"""Tables in a terminal: as wide as it is, in several parts where that is too narrow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

BORDER = 3
"""What a column adds to its content: a space on each side, and a line."""

LONGEST = 20
"""Letters of a name that is not broken; a longer one is, where the terminal is too narrow for it."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: its name.
        cells: its texts.
        is_name: whether it says what a line is about, such as a token: every part of the table has it.
        is_left: whether its cells are aligned to the left.
    """

    heading: str
    cells: Sequence[str]
    is_name: bool
    is_left: bool

    @property
    def width(self) -> int:
        """Of everything on one line."""
        return max(map(cell_len, (self.heading, *self.cells)))

    @property
    def least(self) -> int:
        """Of a heading that breaks between words; numbers never break, and names between words, or where too long."""
        heading = _longest_word(self.heading)
        if self.is_name:
            return max(heading, min(LONGEST, max(map(_longest_word, self.cells), default=0)))
        return max([heading, *map(cell_len, self.cells)])


def show_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    sums: Iterable[Sequence[str]] = (),
    *,
    left: Sequence[str] = (),
    caption: str = "",
    console: Console | None = None,
) -> None:
    """Print a table; everything in it is taken as text.

    Where the terminal is too narrow, headings break between words, and columns of numbers go on in a second table with
    the same names; no number is broken.

    Args:
        title: above it; none if empty.
        headings: of the columns. The first one, and those of `left`, are names.
        rows: its lines.
        sums: lines below a rule, such as a bias and a total.
        left: headings whose columns are not aligned to the right.
        caption: below it.
        console: where to.
    """
    console = console or Console()
    lines = [*rows]
    ending = [*sums]
    columns: list[Column] = []
    for place, heading in enumerate(headings):
        cells = [line[place] for line in (*lines, *ending)]
        columns.append(Column(heading, cells, place == 0 or heading in left, heading in left))
    if title:
        console.print(Text(title, style="table.title"))
    for part in parts(columns, console.width):
        console.print(_table(part, len(lines), fits=_width(part) <= console.width))
    if caption:
        console.print(Text(caption, style="table.caption"))


def parts(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns of each of the tables that a terminal of this width has place for; names are in all of them."""
    if _width(columns) <= width:
        return [list(columns)]
    names = [column for column in columns if column.is_name]
    room = width - 1 - sum(column.least + BORDER for column in names)
    groups: list[list[Column]] = [[]]
    for column in columns:
        if column.is_name:
            continue
        taken = sum(other.least + BORDER for other in groups[-1])
        if groups[-1] and taken + column.least + BORDER > room:
            groups.append([])
        groups[-1].append(column)
    return [[column for column in columns if column.is_name or column in group] for group in groups]


def _table(columns: Sequence[Column], rows: int, *, fits: bool) -> Table:
    """A table whose first so many lines stand above a rule, where there is one."""
    table = Table()
    for column in columns:
        options: dict[str, Any] = {"justify": "right", "overflow": "fold"}
        if column.is_left:
            options["justify"] = "left"
        if not fits and column.is_name:
            options["min_width"] = column.least
        elif not fits:
            options["width"] = column.least
        table.add_column(column.heading, **options)
    for number, line in enumerate(zip(*(column.cells for column in columns), strict=True)):
        if number == rows:
            table.add_section()
        table.add_row(*map(Text, line))
    return table


def _width(columns: Sequence[Column]) -> int:
    return 1 + sum(column.width + BORDER for column in columns)


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
