"""Generated text as coloured tokens: point at a generated token, or reach it by keyboard, and see what made it.

The first row is coloured without a script; the script colours others (`assets/generated.js`). A click, or Enter,
keeps a row while others are pointed at.
"""

from collections.abc import Sequence
from html import escape

import numpy as np

from tensorlens_tl.drawing.marks import colour, colour_bar, largest_of, note, number, packed, tab_stop, visible


def generated_text(
    tokens: Sequence[str],
    positions: Sequence[int],
    values: np.ndarray,
    first: int,
    targets: Sequence[Sequence[int]],
    facts: Sequence[str],
    *,
    chosen: int = -1,
) -> str:
    """A prompt and what was generated after it, in the colours of one question about it.

    Args:
        tokens: of the text.
        positions: what they are called.
        values: scores of the tokens, `[question, token]`.
        first: the number of the first generated token among them.
        targets: the tokens that each question is about, by number; a token belongs to at most one question where there
            are several.
        facts: a line about each question, such as its bias and total.
        chosen: the question that is shown first.
    """
    chosen %= len(values)
    several = len(values) > 1
    questions: dict[int, int] = {}
    if several:
        questions = {token: question for question, tokens_of in enumerate(targets) for token in tokens_of}
    largest = largest_of(values[chosen])
    marks = ['<span class="n">prompt </span>']
    for column, token in enumerate(tokens):
        if column == first:
            marks.append('<br><span class="n">generated </span>')
        value = float(values[chosen, column])
        kind = "t q" if column in targets[chosen] else "t"
        role = f'role="img" {tab_stop(column == 0)}'
        if column in questions:
            role = f'role="button" {tab_stop(column == 0)} data-question="{questions[column]}" aria-pressed="false"'
        name = f"{visible(token)} at {positions[column]}"
        marks.append(
            f'<span class="{kind}" {role} data-name="{escape(name)}" aria-label="{escape(f"{name}: {number(value)}")}" '
            f'style="{colour(value, largest)}">{escape(visible(token))}</span>'
        )
        if "\n" in token and column + 1 != first:
            marks.append("<br>")
    line = f'<div class="line rove">{"".join(marks)}</div>'
    if not several:
        return line + colour_bar(values[chosen]) + note(facts[chosen])
    data = f'data-values="{packed(values)}" data-width="{len(tokens)}" data-facts="{escape(_joined(facts))}"'
    return (
        f'<div class="generated" {data} data-chosen="{chosen}">{line}'
        f'<output class="out" aria-live="polite">{escape(facts[chosen])}</output></div>'
        '<div class="n">Blue adds, orange takes away, each token from its own largest value. Point at a generated '
        "token, or move to it with the arrow keys, to see what made it; a click or Enter keeps it.</div>"
    )


def _joined(facts: Sequence[str]) -> str:
    """Lines as one attribute; a line holds no line feed."""
    return "\n".join(fact.replace("\n", "↵") for fact in facts)
