"""What a report begins with: the prediction, and the few tokens and components that it comes from, with their sums."""

import re
from collections.abc import Sequence
from html import escape

from tensorlens_tl.drawing import cards, graphs
from tensorlens_tl.drawing.marks import colour_bar, largest_of, token_marks
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.report.prediction import Prediction
from tensorlens_tl.results import Attribution, Terms, array

NAMED = 5
"""How many tokens and components are named."""

COMPONENT = re.compile(r"(encoder\.|decoder\.)?(L\d+(H\d+|\.cross\.H\d+|E\d+|\.mixer|\.shared)|MLP\d+)")
"""The names of heads, experts, mixers and MLPs."""

Lines = list[tuple[str, float]]


def answer_html(frozen: FrozenPass, prediction: Prediction, tokens: Attribution, components: Terms | None) -> str:
    """The first screen of a report.

    Args:
        frozen: a pass of one prompt.
        prediction: what is explained.
        tokens: the scores of the prompt's tokens, which sum to what is explained.
        components: direct effects of heads and MLPs; None where there are none.
    """
    parts: list[str] = []
    if prediction.chances:
        place = "after"
        if frozen.view.classes is not None:
            place = "at"
        elif frozen.view.mlm_head is not None:
            place = "in place of"
        token = frozen.str_tokens[0][prediction.position]
        title = f"What it expects {place} {token!r}, position {prediction.position}"
        parts.append(cards.card(title, cards.chances(prediction.chances)))
    parts.append(tokens_card(tokens))
    if components is not None:
        parts.append(components_card(components))
    return f"{_statement(prediction, tokens)}{_prompt(tokens)}{cards.cards(*parts)}"


def _statement(prediction: Prediction, tokens: Attribution) -> str:
    """What is predicted, and what is explained about it, as a heading and a sentence."""
    assert tokens.total is not None
    total = float(tokens.total[0, -1])
    if not prediction.chances:
        return (
            "<h1>What the model's output is made of</h1><p>This model predicts no tokens. Explained here: "
            f"the {escape(tokens.target)} at position {prediction.position}, <b>{total:.4g}</b>.</p>"
        )
    best = prediction.chances[0]
    return (
        f"<h1>The model predicts {cards.token(best.name)}, with {cards.percent(best.probability)}</h1>"
        f"<p>Explained here: the {escape(prediction.label)}, <b>{total:+.4g}</b>.</p>"
    )


def _prompt(tokens: Attribution) -> str:
    """The prompt as coloured text, or as an image under coloured patches."""
    if tokens.image is not None:
        return tokens.to_html(style=False)
    real = [at for at, is_real in enumerate(tokens.mask[0].tolist()) if is_real]
    values = array(tokens.plane()[-1])[real]
    sides: list[str] = []
    if tokens.sides is not None:
        sides = [tokens.sides[0][at] for at in real]
    names = [tokens.tokens[0][at] for at in real]
    marks = token_marks(names, values.tolist(), largest_of(values), int(tokens.queries[0, -1]), real, sides)
    return f'<div class="tlens"><div class="rove"><div class="line tall">{marks}</div></div>{colour_bar(values)}</div>'


def tokens_card(tokens: Attribution, title: str = "The tokens that moved it") -> str:
    """The tokens of largest score, all others, and what no token explains."""
    entries = tokens.top(NAMED)
    scores = array(tokens.plane()[-1])[tokens.mask[0].cpu().numpy()]
    lines = [(f"{entry.name!r} · {entry.position}", entry.score) for entry in entries]
    lines += _rest(len(scores) - len(entries), float(scores.sum()) - sum(value for _, value in lines), "token")
    if tokens.bias is not None:
        lines.append(("bias (no token)", float(tokens.bias[0, -1])))
    return _card(title, lines, tokens)


def components_card(components: Terms, title: str = "The components that moved it") -> str:
    """The heads, mixers, experts and MLPs of largest direct effect, all others, and what belongs to none of them."""
    scores = dict(zip(components.names, array(components.scores[0, -1]).tolist(), strict=True))
    parts = {name: score for name, score in scores.items() if COMPONENT.fullmatch(name)}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:NAMED]
    lines = [(name, parts[name]) for name in largest]
    lines += _rest(len(parts) - len(largest), sum(parts.values()) - sum(value for _, value in lines), "component")
    left = sum(scores.values()) - sum(parts.values())
    if components.remainder is not None:
        left += float(components.remainder[0, -1])
    lines.append(("embeddings and biases", left))
    return _card(title, lines, components)


def _rest(count: int, value: float, name: str) -> Lines:
    """All others in one line."""
    if not count:
        return []
    if count > 1:
        name += "s"
    return [(f"{count} other {name}", value)]


def _card(title: str, lines: Sequence[tuple[str, float]], result: Attribution | Terms) -> str:
    sums = []
    notes = ""
    if result.total is not None and result.gap is not None:
        sums = [("sum", sum(value for _, value in lines))]
        gap = f"{float(result.gap[0, -1]):.1e}".replace("0.0e+00", "0")
        notes = f"The model's own number: {float(result.total[0, -1]):+.4g}. Gap: {gap}."
    return cards.card(title, graphs.bars(lines, sums), notes)
