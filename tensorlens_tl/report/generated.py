"""Everything about a text that a model wrote, as one page."""

from dataclasses import replace
from html import escape
from typing import Any

import torch

from tensorlens_tl import circuits
from tensorlens_tl._arguments import checked_names
from tensorlens_tl.drawing import cards
from tensorlens_tl.drawing.marks import note, number, short, visible
from tensorlens_tl.drawing.page import Picture, folded, table
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.generation import FrozenGeneration, check_hops, freeze_generation
from tensorlens_tl.models import RUNNER_UP, ModelLike, TokenLike
from tensorlens_tl.passes.inputs import joined
from tensorlens_tl.report.answer import components_card, tokens_card
from tensorlens_tl.results import Attribution, Terms

NAMED = 12
"""Source tokens that a table of the page names."""


@checked_names
def explain_generation(
    model: ModelLike | FrozenGeneration,
    prompt: Any = None,
    *,
    max_new_tokens: Any = None,
    continuation: Any = None,
    span: Any = "all",
    hops: Any = "all",
    minus: TokenLike = None,
) -> Picture:
    """What made a generated text: every token of it, a stretch as a whole, and what the stretch took by way of others.

    Args:
        model: a causal language model, or a `FrozenGeneration` of one prompt (then leave `prompt` out).
        prompt, max_new_tokens, continuation: as for `tlens.attribute_generation`.
        span: the stretch that is explained as a whole.
        hops: how far the page follows it; see `tensorlens_tl.generation.hops`.
        minus: the token that each is compared with, as for `tlens.attribute_generation`.

    Raises:
        InvalidInputError: several prompts, none, and what `tlens.attribute_generation` refuses.
        UnsupportedModelError: not a causal language model, or one that cannot be frozen.

    Returns:
        A Picture: a notebook shows it, and ``.save("page.html")`` writes it.

    >>> tlens.report.explain_generation(model, "Return the", max_new_tokens=2).title.partition(":")[0]
    'What made a generated text'
    """
    last = check_hops(hops)
    if isinstance(model, FrozenGeneration):
        if prompt is not None or max_new_tokens is not None or continuation is not None:
            raise InvalidInputError(
                "explain_generation: the text is frozen already; leave the prompt and its text out."
            )
        text = model
    elif prompt is None:
        raise InvalidInputError("explain_generation: `prompt` is missing; pass a string or token ids.")
    else:
        text = freeze_generation(model, prompt, max_new_tokens=max_new_tokens, continuation=continuation)
    if len(text.positions) != 1:
        raise InvalidInputError(f"explain_generation: {len(text.positions)} prompts; pass one.")
    tokens = text.attribute(minus=minus)
    whole = text.attribute(span=span, minus=minus)
    steps = {hop: text.attribute(span=span, minus=minus, hops=hop) for hop in _followed(last, tokens.queries.shape[1])}
    parts = [
        _opening(text, tokens, whole, minus),
        "<h2>Each token</h2>",
        tokens.to_html(style=False),
        "<h2>The stretch as a whole</h2>",
        whole.to_html(style=False),
        _largest(whole),
    ]
    if steps:
        ended = list(steps.values())[-1]
        parts += [
            "<h2>By way of generated tokens</h2>",
            "<p>What generated tokens gave to the stretch is passed on to the tokens that made them, in shares of "
            "each one's own logit, the bias included. The total stays the same at every hop.</p>",
            _hops({0: whole} | steps, text.generated_ranges()[0][0]),
            ended.to_html(style=False),
            _largest(ended),
        ]
    parts.append(
        _proofs(text, {"each token": tokens, "the stretch": whole} | {f"{h} hops": s for h, s in steps.items()})
    )
    title = f"What made a generated text: {visible(text.texts[0])[:60]}"
    return Picture(title, "".join(parts))


def _followed(last: int | None, tokens: int) -> list[Any]:
    """The hops that the page shows: the first few, and the last of them."""
    if last is None:
        return [*range(1, min(4, tokens)), "all"]
    return sorted({*range(1, min(4, last + 1)), last} - {0})


def _hops(steps: dict[Any, Attribution], first: int) -> str:
    """Where the total is after each hop."""
    rows = []
    for hop, result in steps.items():
        assert result.bias is not None
        scores = result.scores[0, 0]
        shares = (scores[:first].sum(), scores[first:].sum(), result.bias[0, 0])
        total = torch.stack(shares).sum()
        rows.append((str(hop), *(number(float(value)) for value in (*shares, total))))
    hop_table = table(("hops", "on the prompt", "on generated tokens", "bias", "sum"), rows)
    return f'<div class="tlens">{hop_table}</div>'


def _opening(text: FrozenGeneration, tokens: Attribution, whole: Attribution, minus: TokenLike) -> str:
    """What was written, and the tokens and components that the explained stretch comes from."""
    assert whole.total is not None
    before = joined(text.frozen.str_tokens[0][: text.generated_ranges()[0][0]])
    named = [tokens_card(whole, f"The tokens that moved {_stretch(whole)}")]
    components = stretch_components(text, whole, minus)
    if components is not None:
        named.append(components_card(components, f"The components that moved {_stretch(whole)}"))
    named.append(cards.card("Where each token comes from", _largest_sources(tokens)))
    return (
        f"<h1>The text goes on with {escape(short(repr(text.texts[0]), 120))}</h1>"
        f"<p>after <q>{escape(visible(before))}</q>. Explained here: {escape(whole.target)}, "
        f"<b>{float(whole.total[0, 0]):+.4g}</b>.</p>{cards.cards(*named)}"
    )


def _stretch(whole: Attribution) -> str:
    """The stretch that is explained, in quotes."""
    return repr(short(joined([whole.tokens[0][at] for at in whole.options["asked"][0]]), 40))


def stretch_components(text: FrozenGeneration, whole: Attribution, minus: TokenLike) -> Terms | None:
    """Direct effects of heads and MLPs on the tokens of a stretch, summed over them; None where there are none.

    Args:
        text: one prompt and its continuation.
        whole: the attribution of the stretch.
        minus: the token that each is compared with; a runner-up is another one for each, and has no components here.
    """
    if isinstance(minus, str) and minus == RUNNER_UP:
        return None
    positions = whole.options["asked"][0]
    targets = text.frozen.tokens[0, positions].tolist()
    queries = [position - 1 for position in positions]
    try:
        terms = circuits.logit_attribution(text.frozen, [targets], minus, by="head", query=queries)
    except TensorLensError:  # logits that are not cap(W_U·x + b_U)
        return None
    summed = {name: getattr(terms, name).sum(1, keepdim=True) for name in ("scores", "total", "remainder")}
    return replace(terms, queries=terms.queries[:, -1:], target=whole.target, **summed)


def _largest_sources(tokens: Attribution) -> str:
    """For each generated token the source of largest score."""
    rows: list[tuple[str, str, str]] = []
    for query, position in enumerate(tokens.options["asked"][0][:NAMED]):
        at = int(tokens.scores[0, query].abs().argmax())
        score = number(float(tokens.scores[0, query, at]))
        rows.append((repr(tokens.tokens[0][position]), f"{tokens.tokens[0][at]!r} · {at}", score))
    left = len(tokens.options["asked"][0]) - len(rows)
    more = note(f"{left} more tokens below") if left else ""
    return table(("token", "largest source", "score"), rows) + more


def _largest(result: Attribution) -> str:
    rows = [(repr(entry.name), str(entry.position), number(entry.score)) for entry in result.top(NAMED)]
    sources = table(("source", "position", "score"), rows)
    return f'<div class="tlens">{folded("The largest sources", sources)}</div>'


def _proofs(text: FrozenGeneration, results: dict[str, Attribution]) -> str:
    """How exactly everything on the page sums to the model's logits."""
    measured = {
        f"{part}: the composed map against the model's own": error for part, error in text.frozen.errors.items()
    }
    for name, result in results.items():
        assert result.gap is not None
        measured[f"{name}: Σ scores + bias against the logits"] = float(result.gap.max())
    rows = ((name, f"{value:.1e}") for name, value in measured.items())
    proved = table(("claim", "gap"), rows, "words")
    summary = f"{len(measured)} measured gaps, {max(measured.values()):.1e} at most"
    return f'<h2>The proofs</h2><div class="tlens">{folded(summary, proved)}</div>'
