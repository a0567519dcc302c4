"""Methods in groups of one unit each: the prompt in colours, one scale for all of a group, and the numbers folded."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

import numpy as np

from tensorlens_tl.drawing.heat_maps import side_by_side, strips
from tensorlens_tl.drawing.marks import note
from tensorlens_tl.drawing.page import folded
from tensorlens_tl.registry import get_method
from tensorlens_tl.report.compare import FACTS, fact, footnotes, is_loose
from tensorlens_tl.report.methods import Answer
from tensorlens_tl.results import Attribution, array

SMALL = 0.01
"""Scores below this share of the largest do not count for the error of an estimate."""


@dataclass(frozen=True)
class Group:
    """Methods whose scores mean the same kind of thing.

    Attributes:
        title: of its part of the page.
        what: what its scores are, in a sentence.
        in_shares: whether each method's scores are divided by their absolute sum, since their units differ.
    """

    title: str
    what: str
    in_shares: bool = True


SUMS = Group(
    "Sums to the logit",
    "Scores in units of the logit; with the bias they add up to it, as far as the gap says.",
    in_shares=False,
)
RELEVANCE = Group(
    "Relevance for the prediction, without a sum",
    "These explain the same prediction and do not claim to add up to it; each is shown as shares of its absolute sum.",
)
MAPS = Group(
    "Maps of token pairs",
    "How much of each token arrives at this position, whatever is predicted there; as shares of each absolute sum.",
)
PERTURBATION = Group(
    "Perturbation",
    "What the live model does when a token, or its value, is taken away; as shares of each absolute sum.",
)
GROUPS = (SUMS, RELEVANCE, MAPS, PERTURBATION)
"""In the order of the page."""


def group_of(answer: Answer) -> Group:
    """The group of a method's answer: by what is registered of it, and whether it claims a sum."""
    method = answer.method
    if method.alias_of is not None:
        method = get_method(method.alias_of[0])
    if method.perturbs:
        return PERTURBATION
    if not answer.about_target:
        return MAPS
    if answer.result.additive or "steps" in answer.result.options:  # a quadrature sums in the limit
        return SUMS
    return RELEVANCE


def grouped_html(shown: Mapping[str, Answer], position: int) -> str:
    """All groups that have a method, one below the other, for the query at a position."""
    parts = []
    for group in GROUPS:
        members = {name: answer.result for name, answer in shown.items() if group_of(answer) is group}
        if members:
            parts.append(_group_html(group, members, position))
    return f'<div class="tlens">{"".join(parts)}</div>'


def _group_html(group: Group, members: Mapping[str, Attribution], position: int) -> str:
    first = next(iter(members.values()))
    rows = {name: result.queries[0].tolist().index(position) for name, result in members.items()}
    real = [at for at, is_real in enumerate(first.mask[0].tolist()) if is_real]
    tokens = {at: first.tokens[0][at] for at in real}
    columns = {name: _values(result, rows[name], group)[real] for name, result in members.items()}
    hints = {name: result.target or result.method for name, result in members.items()}
    facts = {name: {m: fact(result, name, 0, rows[m]) for m, result in members.items()} for name in FACTS}
    if group.in_shares:
        facts = {}
    count = f"{len(members)} methods"
    if len(members) == 1:
        count = "1 method"
    trusted = [name for name in members if not is_loose(members[name], 0, rows[name])]
    if group.in_shares:
        trusted = list(members)
    table = side_by_side(tokens, columns, hints, facts, scaled_by=trusted)
    estimated = (estimate(name, result, rows[name]) for name, result in members.items())
    notes = [*filter(None, estimated)]
    if not group.in_shares:
        notes += [_of_change(name, result, rows[name]) for name, result in members.items() if _is_change(result)]
        notes += footnotes(members, 0, rows)
    if trusted and len(trusted) < len(members):
        notes.append("The others set the scale of the colours.")
    return (
        f'<section class="group" aria-label="{escape(group.title)}"><h3>{escape(group.title)}</h3>{note(group.what)}'
        f"{strips(tokens, columns, hints, position, scaled_by=trusted)}{''.join(map(note, notes))}"
        f"{folded(f'The numbers of {count}, token by token', table)}</section>"
    )


def _is_change(result: Attribution) -> bool:
    return result.target.startswith("change of ")


def _of_change(name: str, result: Attribution, row: int) -> str:
    """What scores add up to that explain how a logit differs from that of a baseline."""
    assert result.total is not None
    return f"{name} adds up to the {result.target} from its baseline, {float(result.total[0, row]):+.4g}."


def _values(result: Attribution, row: int, group: Group) -> np.ndarray:
    """One query's scores in the unit of the group."""
    scores = array(result.plane()[row])
    size = np.abs(scores).sum()
    if group.in_shares and size > 0:
        return scores / size
    return scores


def estimate(name: str, result: Attribution, row: int) -> str:
    """How sure estimated scores are, in words; nothing of exact ones."""
    if result.stderr is None:
        return ""
    scores = array(result.scores[0, row])
    errors = array(result.stderr[0, row])
    largest = np.abs(scores).max(initial=0.0)
    counted = np.abs(scores) >= SMALL * largest
    worst = (errors[counted] / np.abs(scores[counted])).max(initial=0.0)
    return (
        f"{name} is estimated from {result.options.get('probes', 'some')} random rows: its standard errors are "
        f"{worst:.1%} of the scores at most (scores below a hundredth of the largest aside). slow=True (--slow) "
        "computes it exactly."
    )
