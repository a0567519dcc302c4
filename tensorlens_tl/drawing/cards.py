"""What a report begins with: cards with a few bars each, and the probabilities of tokens."""

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from tensorlens_tl.drawing.marks import note


class Chance(NamedTuple):
    """A token that may come next.

    Attributes:
        name: the token.
        probability: between 0 and 1.
        role: ``"explained"``, ``"against"``, or nothing.
    """

    name: str
    probability: float
    role: str = ""


def cards(*parts: str) -> str:
    """Cards side by side where there is room for them."""
    return f'<div class="tlens"><div class="cards">{"".join(parts)}</div></div>'


def card(title: str, body: str, notes: str = "") -> str:
    """A framed part of a page; `body` is taken as HTML."""
    return f'<section class="card" aria-label="{escape(title)}"><h2>{escape(title)}</h2>{body}{note(notes)}</section>'


def chances(rows: Iterable[Chance]) -> str:
    """Tokens with their probabilities as bars; what is explained and what it is compared with are named."""
    lines = []
    for row in rows:
        bar = f'<i><b style="width:{100 * row.probability:.1f}%"></b></i>'
        lines.append(
            f'<tr class="{row.role}"><td>{escape(repr(row.name))}</td><td class="track">{bar}</td>'
            f"<td>{percent(row.probability)}</td><td>{row.role}</td></tr>"
        )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("token", "", "probability", ""))
    return f'<table class="r chances"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def token(name: str) -> str:
    """A token in quotes that is not torn between lines."""
    return f'<span class="token">{escape(repr(name))}</span>'


def percent(share: float) -> str:
    """A share in percent, in as many digits as it has something to say."""
    if 0 < share < 0.001:
        return f"{100 * share:.1e} %"
    return f"{100 * share:.1f} %"
