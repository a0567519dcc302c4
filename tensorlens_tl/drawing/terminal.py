"""Tables in a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


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

    Args:
        title: above it; none if empty.
        headings: of the columns.
        rows: its lines.
        sums: lines below a rule, such as a bias and a total.
        left: headings whose columns are not aligned to the right.
        caption: below it.
        console: where to.
    """
    table = Table()
    if title:
        table.title = Text(title)
    if caption:
        table.caption = Text(caption)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")  # no number is cut
    for row in rows:
        table.add_row(*map(Text, row))
    sums = list(sums)
    if sums:
        table.add_section()
    for row in sums:
        table.add_row(*map(Text, row))
    (console or Console()).print(table)
