"""A result in a terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorlens_tl.attribution import Attribution


def show(result: Attribution, k: int = 10, console: Console | None = None) -> None:
    """Print the top source tokens of every prompt's last query, and what no token explains."""
    for batch in range(len(result.tokens)):
        table = Table(title=Text(result.describe()))
        for heading in ("position", "token", "score"):
            table.add_column(heading, justify="left" if heading == "token" else "right")
        for entry in result.top(k, batch=batch):
            table.add_row(str(entry.position), Text(repr(entry.token)), f"{entry.score:+.4g}")
        if result.bias is not None and result.total is not None:
            row = result.query_row(batch=batch)
            table.add_section()
            table.add_row("", "bias (no token)", f"{float(result.bias[batch, row]):+.4g}")
            table.add_row("", "total", f"{float(result.total[batch, row]):+.4g}")
        (console or Console()).print(table)
