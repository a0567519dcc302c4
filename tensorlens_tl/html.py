"""Token heat maps as self-contained HTML: no script, no network, every piece of text escaped."""

from collections.abc import Sequence
from html import escape

POSITIVE, NEGATIVE = "33,113,181", "217,95,14"
"""Blue and orange: told apart in every common kind of colour blindness, on light and dark ground."""

STYLE = (
    "<style>"
    ".tlens{font:14px/1.9 system-ui,sans-serif;color-scheme:light dark;overflow-x:auto}"
    ".tlens .t{padding:2px 1px;border-radius:3px;white-space:pre-wrap;cursor:default}"
    ".tlens .q{outline:1.5px solid currentColor;outline-offset:-1px}"
    ".tlens .n{opacity:.75;font-size:12px;line-height:1.5}"
    ".tlens table{border-collapse:collapse;font-size:12px;line-height:1.5}"
    ".tlens th{font-weight:400;padding:1px 5px;white-space:pre;text-align:right}"
    ".tlens td{min-width:18px;height:18px;padding:1px 5px;text-align:right}"
    ".tlens .b{display:inline-block;width:120px;height:10px;vertical-align:middle;margin:0 6px;border-radius:3px;"
    f"background:linear-gradient(90deg,rgba({NEGATIVE},.65),transparent,rgba({POSITIVE},.65))}}"
    "</style>"
)


def visible(token: str) -> str:
    """A token as it can be read: line breaks and tabs as signs, nothing as a sign of its own."""
    return token.replace("\n", "↵").replace("\t", "⇥") or "∅"


def colour(value: float, largest: float) -> str:
    """CSS background of a signed value: zero is transparent, ±largest is strongest."""
    share = 0.0 if largest <= 0 or value != value else min(1.0, abs(value) / largest)
    return f"background:rgba({POSITIVE if value >= 0 else NEGATIVE},{0.65 * share:.3f})"


def colour_bar(largest: float) -> str:
    """The scale of the colours, zero in the middle."""
    return f'<span class="n">−{largest:.3g}<span class="b"></span>+{largest:.3g}</span>'


def token_line(tokens: Sequence[str], values: Sequence[float], largest: float, query: int | None = None) -> str:
    """One prompt as coloured text; the value shows on hover, the query token is outlined."""
    spans = []
    for position, (token, value) in enumerate(zip(tokens, values, strict=True)):
        label = f"{visible(token)} at {position}: {value:.4g}"
        marked = " q" if position == query else ""
        spans.append(
            f'<span class="t{marked}" tabindex="0" title="{escape(label)}" aria-label="{escape(label)}" '
            f'style="{colour(value, largest)}">{escape(visible(token))}</span>'
        )
        if "\n" in token:
            spans.append("<br>")
    return "<div>" + "".join(spans) + "</div>"


def token_matrix(queries: Sequence[str], keys: Sequence[str], values: Sequence[Sequence[float]], largest: float) -> str:
    """All queries at once: a row per query, a column per source token."""
    head = "<tr><th></th>" + "".join(f'<th scope="col">{escape(visible(key))}</th>' for key in keys) + "</tr>"
    body = []
    for query, row in zip(queries, values, strict=True):
        cells = "".join(
            f'<td title="{escape(f"{visible(query)} ← {visible(key)}: {value:.4g}")}" '
            f'style="{colour(value, largest)}"></td>'
            for key, value in zip(keys, row, strict=True)
        )
        body.append(f'<tr><th scope="row">{escape(visible(query))}</th>{cells}</tr>')
    return f"<table>{head}{''.join(body)}</table>"


def panel(title: str, parts: Sequence[str], notes: str = "", style: bool = True) -> str:
    """A titled block; `parts` and nothing else is taken as HTML."""
    body = f'<div><b>{escape(title)}</b></div>{"".join(parts)}<div class="n">{escape(notes)}</div>'
    return (STYLE if style else "") + f'<div class="tlens">{body}</div>'


def page(title: str, body: str) -> str:
    """A whole file that opens without a network."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>{STYLE}"
        "<style>:root{color-scheme:light dark}body{max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "font:15px/1.6 system-ui,sans-serif}table.r{border-collapse:collapse}table.r td,table.r th{padding:2px 10px;"
        "text-align:right}table.r td:first-child,table.r th:first-child{text-align:left}</style>"
        f"</head><body>{body}</body></html>\n"
    )
