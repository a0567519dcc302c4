"""Generated text as coloured tokens: point at a generated token, or reach it by keyboard, and see what made it.

The first row is coloured without a script; the script colours others (`assets/generated.js`). A click, or Enter,
keeps a row while others are pointed at.
"""

from collections.abc import Sequence
from html import escape

import numpy as np

from tensorlens_tl.drawing.marks import colour, colour_bar, largest_of, number, packed, visible


def generated_text(
    tokens: Sequence[str],
    positions: Sequence[int],
    values: np.ndarray,
    first: int,
    asked: Sequence[Sequence[int]],
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
        asked: the tokens that each question is about, by number; a token belongs to at most one question where there
            are several.
        facts: a line about each question, such as its bias and total.
        chosen: the question that is shown first.
    """
    chosen %= len(values)
    of = {place: question for question, places in enumerate(asked) for place in places}
    several = len(values) > 1
    largest = largest_of(values[chosen])
    marks = ['<span class="n">prompt </span>']
    for place, token in enumerate(tokens):
        if place == first:
            marks.append('<br><span class="n">generated </span>')
        value = float(values[chosen, place])
        kind = "t q" if place in asked[chosen] else "t"
        question = f' data-question="{of[place]}" aria-pressed="false"' if several and place in of else ""
        name = f"{visible(token)} at {positions[place]}"
        marks.append(
            f'<span class="{kind}" role="{"button" if question else "img"}" tabindex="{0 if place == 0 else -1}"'
            f'{question} data-name="{escape(name)}" aria-label="{escape(f"{name}: {number(value)}")}" '
            f'style="{colour(value, largest)}">{escape(visible(token))}</span>'
        )
        if "\n" in token and place + 1 != first:
            marks.append("<br>")
    line = f'<div class="line rove">{"".join(marks)}</div>'
    if not several:
        return f"{line}{colour_bar(values[chosen])}<div class='n'>{escape(facts[chosen])}</div>"
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
