"""A result in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorlens_tl.attribution import Attribution


def show(result: Attribution, k: int = 10) -> None:
    """Print the top source tokens of every prompt's last query."""
    for batch in range(len(result.tokens)):
        table = Table(title=Text(result.describe()))
        for heading in ("position", "token", "score"):
            table.add_column(heading, justify="left" if heading == "token" else "right")
        for entry in result.top(k, batch=batch):
            table.add_row(str(entry.position), Text(repr(entry.token)), f"{entry.score:+.4g}")
        Console().print(table)
