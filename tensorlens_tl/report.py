"""Pages about one prompt: several methods side by side, or everything about one prediction.

* `compare` shows several methods side by side;
* `explain` shows everything about one prediction;
* `explain_difference` shows why two prompts are answered differently;
* `explain_generation` shows everything about a text that a model wrote;
* `Picture` is what they return: it displays in a notebook, and ``.save("page.html")`` writes it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from tqdm.auto import tqdm

from tensorlens_tl import circuits
from tensorlens_tl._arguments import checked_names
from tensorlens_tl.drawing import graphs
from tensorlens_tl.drawing.heat_maps import LOOSE, side_by_side, strips
from tensorlens_tl.drawing.marks import colour_bar, counted, largest_of, note, number, short, token_marks, visible
from tensorlens_tl.drawing.page import Picture, folded, panel, table
from tensorlens_tl.errors import InvalidInputError, TensorLensError, warn_caller
from tensorlens_tl.generation import Continuation, Count, FrozenGeneration, Hops, Span, check_hops, freeze_generation
from tensorlens_tl.models import RUNNER_UP, ModelLike, Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass, PassOrDifference, freeze, one_check
from tensorlens_tl.passes.inputs import InputLike, one_query
from tensorlens_tl.passes.target import logit_label, target_ids, token_label
from tensorlens_tl.passes.texts import joined
from tensorlens_tl.registry import Method, attribute, get_method, list_methods
from tensorlens_tl.results import COVERED, Attribution, Terms, array

__all__ = ["Picture", "compare", "explain", "explain_difference", "explain_generation"]

if TYPE_CHECKING:
    Results = Attribution | Iterable[Attribution] | Mapping[str, Attribution]
else:
    Results = Any  # `compare` rejects anything but Attributions

LISTED = 5
"""How many of the most likely tokens are listed."""

NAMED = 5
"""How many tokens and components the first screen names."""

EDGES = 200
"""How many edges a page's graph shows."""

LARGEST = 12
"""How many source tokens a table on a generated text's page names."""

SMALL = 0.01
"""Scores below this share of the largest are ignored in the error of an estimate."""

FACTS = ("bias", "total", "gap")
"""Fields of a result shown below its tokens, if present."""

COMPONENT = re.compile(r"(encoder\.|decoder\.)?(L\d+(H\d+|\.cross\.H\d+|E\d+|\.mixer|\.shared)|MLP\d+)")
"""Matches the names of heads, experts, mixers and MLPs."""

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "tensorlens": {"target": {"collapse": "target"}, "in_out": {"collapse": "in_out"}, "norm": {"collapse": "norm"}},
    "mean": {"norm": {"layer_map": "norm:attn_res_ln"}},  # with the attention map it equals that method
    "decompx": {"target": {"aggregate": "target"}, "norm": {"aggregate": "norm"}},
}
"""Methods shown in several variants, with the options of each; a target among them is the report's target."""

ESTIMATES: dict[str, dict[str, Any]] = {"tensorlens (norm)": {"probes": 32, "rows": "orthonormal"}}
"""Methods that are estimated when exact scores cost too much, with the options for it."""

LIMIT = 2e11
"""The most operations one method may cost in a report unless named or `slow`: some seconds on two cores."""


# --------------------------------------------------------------------------- several results side by side


@checked_names
def compare(results: Results, *, batch: int = 0, query: int | str = -1) -> Picture:
    """Show several results for one prompt side by side: a row per source token, a column per result.

    Each column has its own colour scale, since methods use different units. If a result has a total, its bias, total
    and gap are shown below.

    Args:
        results: Attributions, or a mapping from headings to Attributions.
        batch: the prompt, by index.
        query: which query to show if results hold several: an index over the real queries, or a text.

    Returns:
        A Picture: it displays in a notebook, and ``.save("page.html")`` writes it.

    Raises:
        InvalidInputError: no results, or results of different prompts.

    >>> results = {name: tlens.attribute(frozen, method=name) for name in ("ifr", "alti")}
    >>> tlens.report.compare(results).title
    '2 attributions of one prompt'
    """
    named = _named(results)
    first = next(iter(named.values()))
    tokens = first.tokens[batch]
    for name, result in named.items():
        if result.tokens[batch : batch + 1] != [tokens]:
            raise InvalidInputError(
                f"compare: {name!r} is of other tokens than {next(iter(named))!r}; compare one prompt."
            )
    rows = {name: result.query_row(query, batch) for name, result in named.items()}
    positions = {name: int(result.queries[batch, rows[name]]) for name, result in named.items()}
    if len(set(positions.values())) > 1:
        raise InvalidInputError(f"compare: the results are for different queries (positions {positions}); compare one.")
    columns, facts = _columns(named, batch, rows)
    hints = {name: result.target or result.method for name, result in named.items()}
    colours = "Blue adds, orange takes away; each column from its own largest value."
    caption = " ".join([colours, *_footnotes(named, batch, rows)])
    chart = side_by_side(_real_tokens(first, batch), columns, hints, facts, caption=caption)
    title = f"{len(named)} attributions of one prompt"
    return Picture(title, panel(title, chart))


def _named(results: Results) -> dict[str, Attribution]:
    """Map headings to results; without a mapping, name them by their methods and what their scores measure."""
    if isinstance(results, Attribution):
        results = [results]
    named: dict[str, Any] = {}
    if isinstance(results, Mapping):
        named = {str(name): result for name, result in results.items()}
    else:
        for result in results:
            name = str(getattr(result, "method", result))
            options = getattr(result, "options", {})
            kind = options.get("collapse") or options.get("aggregate")
            if kind:
                name = f"{name} ({kind})"
            if name in named:
                name = f"{name} {len(named)}"
            named[name] = result
    if not named or not all(isinstance(result, Attribution) for result in named.values()):
        raise InvalidInputError("compare: pass Attributions, [a, b, …] or {'heading': a, …}, of one prompt.")
    return named


def _real_tokens(result: Attribution, batch: int = 0) -> dict[int, str]:
    return {at: token for at, token in enumerate(result.tokens[batch]) if result.mask[batch, at]}


def _columns(
    results: Mapping[str, Attribution], batch: int, rows: Mapping[str, int]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, float | None]]]:
    """Return each result's scores of the real tokens for its query, and the numbers shown below them."""
    columns = {name: array(of.plane(batch)[rows[name]])[[*_real_tokens(of, batch)]] for name, of in results.items()}
    return columns, {what: {name: _fact(of, what, batch, rows[name]) for name, of in results.items()} for what in FACTS}


def _fact(result: Attribution, what: str, batch: int, row: int) -> float | None:
    """Return one of `FACTS` for one query, or None if the result lacks it."""
    values = getattr(result, what)
    if values is None:
        return None
    return float(values[batch, row])


def _is_loose(result: Attribution, batch: int, row: int) -> bool:
    """Whether scores and bias of a query visibly fail to sum to its total."""
    gap = _fact(result, "gap", batch, row)
    return gap is not None and gap > LOOSE


def _footnotes(results: Mapping[str, Attribution], batch: int, rows: Mapping[str, int]) -> list[str]:
    """Explain each gap that is framed for being large, one sentence per reason."""
    loose: dict[str, list[str]] = {}
    for name, result in results.items():
        if not _is_loose(result, batch, rows[name]):
            continue
        if "steps" in result.options:
            why = f"its integral has not converged at steps={result.options['steps']}; take more steps."
        elif not result.additive:
            why = "the method does not claim that scores and bias add up to the logit."
        else:
            why = "scores and bias should add up and do not; compute in float64."
        loose.setdefault(why, []).append(name)
    return [f"The gap of {' and '.join(names)} is framed: {why}" for why, names in loose.items()]


# --------------------------------------------------------------------------- what is predicted


class Chance(NamedTuple):
    """A token that may come next, with its probability.

    Attributes:
        name: the token.
        probability: between 0 and 1.
        role: ``"explained"``, ``"against"``, or empty.
    """

    name: str
    probability: float
    role: str = ""


@dataclass(frozen=True)
class Prediction:
    """A model's prediction at one position of one prompt, and the logit that is explained.

    Attributes:
        query: the position, as a query for the library's functions.
        position: the same position, counted over all tokens.
        chances: the most likely tokens with their probabilities, followed by the explained ones if not among them.
            Empty for a model that predicts no tokens, and for a classifier whose classes are not exclusive.
        target, minus: the explained token, and the one it is compared with.
        label: a description of both.
    """

    query: int
    position: int
    chances: list[Chance]
    target: int | None = None
    minus: int | None = None
    label: str = ""

    @property
    def best(self) -> list[tuple[str, float]]:
        """The most likely tokens with their probabilities; empty for a model that predicts no tokens."""
        return [(chance.name, chance.probability) for chance in self.chances[:LISTED]]

    @property
    def options(self) -> dict[str, Any]:
        """Target and minus as options for a method or circuit."""
        tokens = {"target": self.target, "minus": self.minus}
        return {name: token for name, token in tokens.items() if token is not None}

    @property
    def question(self) -> dict[str, Any]:
        """Target, minus and query as options for a method or circuit."""
        return {**self.options, "query": self.query}


def predict(
    frozen: FrozenPass, target: TokenLike = None, minus: TokenLike = None, query: Query | None = None
) -> Prediction:
    """Return the model's prediction at one position, and what to explain about it.

    Args:
        frozen: a pass of one prompt.
        target, minus: a token, and one to compare it with. By default the model's first choice against its second.
        query: one position. By default the last, or the one that a classifier reads; in a masked language model the
            first mask.

    Raises:
        InvalidInputError: several positions, an unknown token, or a target for a model that predicts no tokens.
    """
    if query is None:
        query = -1
        mask = getattr(frozen.view.tokenizer, "mask_token_id", None)
        real = frozen.tokens[0][frozen.mask[0]].tolist()
        if frozen.view.mlm_head is not None and frozen.view.classes is None and mask in real:
            query = real.index(mask)
    at = one_query(frozen.prompt, query)
    position = int(at)
    number = int(frozen.mask[0, :position].sum())  # real tokens before it
    logits = frozen.logits(number)
    if logits is None:
        if target is not None or minus is not None:
            raise InvalidInputError(f"target: {frozen.view.description} predicts no tokens; leave it out.")
        return Prediction(number, position, [])
    logits = logits[0, 0]
    order = logits.argsort(descending=True).tolist()
    if target is None:
        target = order[0]
        if minus is None and frozen.view.has_probabilities:
            minus = order[1]
    ids, others = target_ids(frozen, at, target, minus)
    target_id = int(ids)
    minus_id = None if others is None else int(others)
    roles = {minus_id: "against", target_id: "explained"}
    label = logit_label(frozen.view, target_id, minus_id)
    if not frozen.view.has_probabilities:
        return Prediction(number, position, [], target_id, minus_id, label)
    probabilities = logits.double().softmax(-1)
    chances = [
        Chance(token_label(frozen.view, token), float(probabilities[token]), roles.get(token, ""))
        for token in dict.fromkeys([*order[:LISTED], target_id, minus_id])
        if token is not None
    ]
    return Prediction(number, position, chances, target_id, minus_id, label)


# --------------------------------------------------------------------------- what the methods say


@dataclass(frozen=True)
class Answer:
    """One method's scores for a prediction; `about_target` says whether it explains the report's target."""

    method: Method
    result: Attribution
    about_target: bool


@dataclass(frozen=True)
class Answers:
    """Methods with an answer (`shown`), and inapplicable (`refused`) and failing ones (`failed`) with the reason."""

    shown: dict[str, Answer] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def answers(
    frozen: FrozenPass, prediction: Prediction, methods: Sequence[str], *, slow: bool = False, named: bool = False
) -> Answers:
    """Run every method for one query and collect answers and reasons for missing ones; a failing method also warns.

    With `slow`, everything is exact whatever it costs; otherwise methods above `LIMIT` are skipped, unless `named`.
    """
    variants = [
        (method, variant, options)
        for method in sorted(methods, key=lambda name: (name != "tensorlens", name))
        for variant, options in VARIANTS.get(method, {"": {}}).items()
    ]
    said = Answers()
    for method, variant, options in tqdm(variants, desc="methods", leave=False, disable=None):
        registered = get_method(method)
        if registered.explains_prediction(options) and not prediction.options:
            continue
        name = f"{method} ({variant})" if variant else method
        count = operations(frozen, registered, options)
        if not slow and count > LIMIT and name in ESTIMATES:
            options = options | ESTIMATES[name]
        elif not slow and count > LIMIT and not named:
            said.refused[name] = (
                f"It runs the model {registered.cost(frozen, options)} times, some {count:.0e} operations; a report "
                f"leaves out what costs more than {LIMIT:.0e}. Name it in methods= (--methods), or pass slow=True "
                "(--slow)."
            )
            continue
        about_target = registered.explains_prediction(options)
        question = {"query": prediction.query, **(prediction.options if about_target else {})}
        question = {option: value for option, value in question.items() if registered.takes(option)}
        try:
            result = attribute(frozen, method=registered.name, **options, **question)
        except TensorLensError as error:
            said.refused[name] = str(error)
        except Exception as error:  # from a third-party method: the others still have answers
            said.failed[name] = f"Method {name!r} failed: {type(error).__name__}: {error}"
            warn_caller(said.failed[name])
        else:
            if prediction.position in result.queries[0].tolist():
                said.shown[name] = Answer(registered, result, about_target)
            else:
                said.refused[name] = f"It has no scores for position {prediction.position}."
    return said


def operations(frozen: FrozenPass, method: Method, options: dict[str, Any]) -> float:
    """Count the additions and multiplications a method costs: two per weight and token, for each of its runs."""
    weights = sum(parameter.numel() for parameter in frozen.model.parameters())
    return 2.0 * weights * frozen.tokens.numel() * method.cost(frozen, options)


# --------------------------------------------------------------------------- the first screen

Lines = list[tuple[str, float]]


def answer_html(frozen: FrozenPass, prediction: Prediction, tokens: Attribution, components: Terms | None) -> str:
    """Return the first screen of a report: the prediction, its tokens' scores, and direct effects (or None)."""
    parts: list[str] = []
    if prediction.chances:
        place = "after"
        if frozen.view.classes is not None:
            place = "at"
        elif frozen.view.mlm_head is not None:
            place = "in place of"
        token = frozen.str_tokens[0][prediction.position]
        title = f"What it expects {place} {token!r}, position {prediction.position}"
        parts.append(_card(title, _chances(prediction.chances)))
    parts.append(tokens_card(tokens))
    if components is not None:
        parts.append(components_card(components))
    return f"{_statement(prediction, tokens)}{_prompt(tokens)}{_cards(*parts)}"


def _statement(prediction: Prediction, tokens: Attribution) -> str:
    """Return a heading with the prediction, and a sentence on what is explained."""
    assert tokens.total is not None
    total = float(tokens.total[0, -1])
    if not prediction.chances:
        return (
            "<h1>What the model's output is made of</h1><p>This model predicts no tokens. Explained here: "
            f"the {escape(tokens.target)} at position {prediction.position}, <b>{total:.4g}</b>.</p>"
        )
    best = prediction.chances[0]
    return (
        f'<h1>The model predicts <span class="token">{escape(repr(best.name))}</span>, '
        f"with {_percent(best.probability)}</h1>"
        f"<p>Explained here: the {escape(prediction.label)}, <b>{total:+.4g}</b>.</p>"
    )


def _prompt(tokens: Attribution) -> str:
    """Return the prompt as coloured text, or as an image under coloured patches."""
    if tokens.image is not None:
        return tokens.to_html(style=False)
    real = _real_tokens(tokens)
    values = array(tokens.plane()[-1])[[*real]]
    sides = [] if tokens.sides is None else [tokens.sides[0][at] for at in real]
    names = list(real.values())
    marks = token_marks(names, values.tolist(), largest_of(values), int(tokens.queries[0, -1]), [*real], sides)
    return f'<div class="tlens"><div class="rove"><div class="line tall">{marks}</div></div>{colour_bar(values)}</div>'


def tokens_card(tokens: Attribution, title: str = "The tokens that moved it") -> str:
    """Return a card of the tokens with the largest scores, the rest, and the bias; tokens of score 0 are not named."""
    entries = [entry for entry in tokens.top(NAMED) if entry.score] or tokens.top(1)
    scores = array(tokens.plane()[-1])[tokens.mask[0].cpu().numpy()]
    lines = [(f"{entry.name!r} · {entry.position}", entry.score) for entry in entries]
    lines += _rest(len(scores) - len(entries), float(scores.sum()) - sum(value for _, value in lines), "token")
    if tokens.bias is not None:
        lines.append(("bias (no token)", float(tokens.bias[0, -1])))
    return _sum_card(title, lines, tokens)


def components_card(components: Terms, title: str = "The components that moved it") -> str:
    """Return a card of the heads, mixers, experts and MLPs with the largest direct effects, and the remainder."""
    scores = dict(zip(components.names, array(components.scores[0, -1]).tolist(), strict=True))
    parts = {name: score for name, score in scores.items() if COMPONENT.fullmatch(name)}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:NAMED]
    lines = [(name, parts[name]) for name in largest]
    lines += _rest(len(parts) - len(largest), sum(parts.values()) - sum(value for _, value in lines), "component")
    left = sum(scores.values()) - sum(parts.values())
    if components.remainder is not None:
        left += float(components.remainder[0, -1])
    lines.append(("embeddings and biases", left))
    return _sum_card(title, lines, components)


def _rest(count: int, value: float, name: str) -> Lines:
    return [(counted(count, f"other {name}"), value)] if count else []


def _sum_card(title: str, lines: Sequence[tuple[str, float]], result: Attribution | Terms) -> str:
    """Return lines as bars, with their sum and the model's own number if the result has one."""
    sums = []
    notes = ""
    if result.total is not None and result.gap is not None:
        sums = [("sum", sum(value for _, value in lines))]
        gap = f"{float(result.gap[0, -1]):.1e}".replace("0.0e+00", "0")
        notes = f"The model's own number: {float(result.total[0, -1]):+.4g}. Relative error: {gap}."
    return _card(title, graphs.bars(lines, sums), notes)


def _cards(*parts: str) -> str:
    """Lay out cards side by side as space allows."""
    return f'<div class="tlens"><div class="cards">{"".join(parts)}</div></div>'


def _card(title: str, body: str, notes: str = "") -> str:
    """Return a framed part of a page; `body` is HTML."""
    return f'<section class="card" aria-label="{escape(title)}"><h2>{escape(title)}</h2>{body}{note(notes)}</section>'


def _chances(rows: Iterable[Chance]) -> str:
    """Return tokens with their probabilities as bars, marking the explained token and its comparison."""
    lines = []
    for row in rows:
        bar = f'<i><b style="width:{100 * row.probability:.1f}%"></b></i>'
        lines.append(
            f'<tr class="{row.role}"><td>{escape(repr(row.name))}</td><td class="track">{bar}</td>'
            f"<td>{_percent(row.probability)}</td><td>{row.role}</td></tr>"
        )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("token", "", "probability", ""))
    return f'<table class="r chances"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _percent(share: float) -> str:
    """Format a share as a percentage with as many digits as are meaningful."""
    if 0 < share < 0.001:
        return f"{100 * share:.1e} %"
    return f"{100 * share:.1f} %"


# --------------------------------------------------------------------------- methods in groups of one unit


@dataclass(frozen=True)
class Group:
    """Methods whose scores mean the same kind of thing, described by `what`.

    They are shown `in_shares` of each method's sum of absolute scores if the methods' units differ.
    """

    title: str
    what: str
    in_shares: bool = True


SUMS = Group(
    "Sums to the logit",
    "Scores in units of the logit. With the bias, they add up to it, up to the stated gap.",
    in_shares=False,
)
RELEVANCE = Group(
    "Relevance for the prediction, without a sum",
    "These explain the same prediction but do not add up to it. Each is divided by its sum of absolute scores.",
)
MAPS = Group(
    "Maps of token pairs",
    "How much of each token reaches this position, whatever is predicted there, divided by the sum of absolute scores.",
)
PERTURBATION = Group(
    "Perturbation",
    "What the live model does when a token or its value is removed, divided by the sum of absolute scores.",
)
GROUPS = (SUMS, RELEVANCE, MAPS, PERTURBATION)
"""The groups, in page order."""


def group_of(answer: Answer) -> Group:
    """Return the group of an answer, from its method's registration and whether it claims a sum."""
    method = answer.method
    if method.alias_of is not None:
        method = get_method(method.alias_of[0])
    if method.perturbs:
        return PERTURBATION
    if not answer.about_target:
        return MAPS
    if answer.result.additive or "steps" in answer.result.options:  # integrated gradients sum to the logit in the limit
        return SUMS
    return RELEVANCE


def grouped_html(shown: Mapping[str, Answer], position: int) -> str:
    """Return every non-empty group, one below the other, for the query at a position."""
    parts = []
    for group in GROUPS:
        members = {name: answer.result for name, answer in shown.items() if group_of(answer) is group}
        if members:
            parts.append(_group_html(group, members, position))
    return f'<div class="tlens">{"".join(parts)}</div>'


def _group_html(group: Group, members: Mapping[str, Attribution], position: int) -> str:
    tokens = _real_tokens(next(iter(members.values())))
    rows = {name: result.queries[0].tolist().index(position) for name, result in members.items()}
    columns, facts = _columns(members, 0, rows)
    hints = {name: result.target or result.method for name, result in members.items()}
    trusted = [name for name in members if not _is_loose(members[name], 0, rows[name])]
    if group.in_shares:
        sizes = {name: np.abs(array(result.plane()[rows[name]])).sum() or 1.0 for name, result in members.items()}
        columns = {name: scores / sizes[name] for name, scores in columns.items()}
        facts = {}
        trusted = list(members)
    listed = side_by_side(tokens, columns, hints, facts, scaled_by=trusted)
    estimated = (estimate(name, result, rows[name]) for name, result in members.items())
    notes = [*filter(None, estimated)]
    if not group.in_shares:
        for name, result in members.items():
            if result.target.startswith("change of "):  # a logit's difference from that of a baseline
                assert result.total is not None
                total = float(result.total[0, rows[name]])
                notes.append(f"{name} adds up to the {result.target} from its baseline, {total:+.4g}.")
        notes += _footnotes(members, 0, rows)
    if trusted and len(trusted) < len(members):
        notes.append("The others set the scale of the colours.")
    summary = f"The numbers of {counted(len(members), 'method')}, token by token"
    return (
        f'<section class="group" aria-label="{escape(group.title)}"><h3>{escape(group.title)}</h3>{note(group.what)}'
        f"{strips(tokens, columns, hints, position, scaled_by=trusted)}{''.join(map(note, notes))}"
        f"{folded(summary, listed)}</section>"
    )


def estimate(name: str, result: Attribution, row: int) -> str:
    """Describe the uncertainty of estimated scores; empty for exact ones."""
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


# --------------------------------------------------------------------------- everything about a prediction

TARGET_FOLLOWS = "a frozen pass has its input already, so what follows it is the target: "


@checked_names
def explain(
    model: ModelLike | FrozenPass,
    input: InputLike | None = None,
    target: TokenLike = None,
    *,
    minus: TokenLike = None,
    query: Query | None = None,
    methods: Sequence[str] | None = None,
    slow: bool = False,
) -> Picture:
    """Explain one prediction of one prompt on a single, self-contained HTML page.

    The page begins with the answer: what is predicted, and the five tokens and five components that matter most.

    Args:
        model: a TransformerLens model; or a `FrozenPass` of one prompt, which already includes the input: the target
            may then come next, as in ``explain(frozen, " Paris")``.
        input: a string or token ids.
        target, minus: the explained token, and one to compare it with. By default the model's first choice against
            its second; a `target` alone means its plain logit, as in `tensorlens_tl.attribute`.
        query: the position whose prediction is explained, counted over the prompt's tokens. By default the last; in a
            masked language model the first mask.
        methods: names of methods; None takes every registered one. Methods that do not apply to this model are listed
            with the reason.
        slow: also run methods that cost more than `tensorlens_tl.report.LIMIT` operations on this model and prompt
            (leave-one-out, value zeroing and integrated gradients on larger models), and compute expensive norms
            exactly. Without it, such methods are left out unless `methods` names them, such norms are estimated, and
            the page says so.

    Raises:
        InvalidInputError: several prompts, no input, an unknown token, or a query out of range.
        RegistryError: an unknown method.

    Returns:
        A Picture: it displays in a notebook, and ``.save("page.html")`` writes it.

    >>> tlens.report.explain(frozen, methods=["tensorlens"]).title
    'Where a prediction comes from: <|bos|>Return the value. Return the'
    """
    if isinstance(methods, str):
        methods = [methods]
    chosen = list_methods() if methods is None else [get_method(name).name for name in methods]
    in_place_of_input = isinstance(model, FrozenPass) and input is not None
    if in_place_of_input:
        if target is not None:
            raise InvalidInputError(f"explain: {TARGET_FOLLOWS}explain(frozen, ' Paris').")
        input, target = None, cast("TokenLike", input)
    if isinstance(model, FrozenPass):
        frozen = model
    elif input is None:
        raise InvalidInputError("explain: `input` is missing; pass a string or token ids.")
    else:
        frozen = freeze(model, input)
    if len(frozen.tokens) != 1:
        raise InvalidInputError(f"explain: the pass has {len(frozen.tokens)} prompts; freeze one.")
    with one_check(frozen.model):  # otherwise each of some 25 methods would compare all weights with the pass's
        frozen.check_fresh()
        try:
            prediction = predict(frozen, target, minus, query)
        except InvalidInputError as error:
            if not in_place_of_input:
                raise
            raise InvalidInputError(f"explain: {TARGET_FOLLOWS}explain(frozen, ' Paris'). ", *error.args) from error
        page = _page(frozen, prediction, answers(frozen, prediction, chosen, slow=slow, named=methods is not None))
    frozen.check_fresh()  # a third-party method may have changed the weights
    return page


def _page(frozen: FrozenPass, prediction: Prediction, said: Answers) -> Picture:
    refused = dict(said.refused)
    ours = said.shown.get("tensorlens (target)")
    if ours is not None and ours.about_target:
        tokens = ours.result
    else:
        tokens = attribute(frozen, **prediction.question)
    results = {name: answer.result for name, answer in said.shown.items()}
    proofs = {f"{name}: Σ scores + bias against its total": a.gap for name, a in results.items()}
    components: Terms | None = None
    sections: list[str] = []
    if prediction.options:
        try:
            components = circuits.logit_attribution(frozen, by="head", **prediction.question)
            *sections, gap = _circuits(frozen, prediction, components, prediction.label)
        except TensorLensError as error:  # logits that are not cap(W_U·x + b_U), or a graph that is too large
            refused["circuits"] = str(error)
        else:
            proofs["direct effects of heads and MLPs: their sum against the logit"] = components.gap
            proofs["contribution graph: its sources against the logit"] = torch.tensor(gap)
    parts = [answer_html(frozen, prediction, tokens, components)]
    if results:
        parts += ["<h2>What each method says</h2>", grouped_html(said.shown, prediction.position)]
    parts += [*sections, *map(note, said.failed.values())]
    if refused:
        reasons = table(("what", "why"), refused.items(), "words")
        parts.append(f'<div class="tlens">{folded(f"{len(refused)} not shown, and why", reasons)}</div>')
    sums = {name: float(gaps.max()) for name, gaps in proofs.items() if gaps is not None}
    worst = max(frozen.errors.values(), default=0.0)
    compared = f"On this prompt every part's map reproduces the model's own output, to {worst:.1e} at most."
    parts.append(_proofs(frozen.errors, sums, compared, repr(frozen)))
    text = joined(frozen.str_tokens[0])
    return Picture(f"Where a prediction comes from: {short(text, 60)}", "".join(parts))


def _circuits(run: PassOrDifference, prediction: Prediction, heads: Terms, label: str) -> tuple[str, str, float]:
    """Return heads and paths, and the graph, as HTML; and the graph's gap."""
    paths = circuits.top_paths(run, k=12, width=16, **prediction.question)
    graph = circuits.contribution_graph(run, nodes=COVERED, threshold=0, **prediction.question)
    grid = heads.heads_to_html(title=f"Direct effects of heads and MLPs on the {label}", style=False)
    effects = heads.to_html(15, title=f"The largest direct effects on the {label}", style=False)
    ways = paths.to_html(12, title=f"The largest paths to the {label}", style=False)
    lists = folded("The largest direct effects", effects) + folded("The largest paths", ways)
    picture = graph.to_html(EDGES, title=f"How the {label} comes about", style=False)
    components = f'<h2>Heads and MLPs</h2>{grid}<div class="tlens">{lists}</div>'
    return components, f"<h2>The circuit</h2>{picture}", graph.gap


def _proofs(errors: Mapping[str, float], sums: Mapping[str, float], *notes: str) -> str:
    """Return the measured errors as a folded table: the model's parts against their maps, then sums against totals."""
    measured = {f"{part}: the composed map against the model's own": error for part, error in errors.items()} | dict(
        sums
    )
    claims = table(("claim", "gap"), ((claim, f"{gap:.1e}") for claim, gap in measured.items()), "words")
    summary = f"{len(measured)} measured gaps, {max(measured.values(), default=0.0):.1e} at most"
    return f'<h2>The proofs</h2><div class="tlens">{folded(summary, claims)}{"".join(map(note, notes))}</div>'


# --------------------------------------------------------------------------- why two prompts differ


@dataclass(frozen=True)
class ChangedAnswer:
    """Why two prompts are answered differently.

    Attributes:
        difference: the difference of the two runs.
        predictions: each run's prediction for the same tokens.
        logits: the explained number in each run.
        tokens: how much each differing token contributes to the change.
        components: how much each head and MLP contributes.
    """

    difference: Difference
    predictions: tuple[Prediction, Prediction]
    logits: tuple[float, float]
    tokens: Attribution
    components: Terms

    @property
    def question(self) -> str:
        """The question, in words."""
        view, prediction = self.difference.view, self.predictions[0]
        assert prediction.target is not None
        explained = repr(token_label(view, prediction.target))
        if prediction.minus is None:
            return f"Why does {explained} change?"
        return f"Why {explained} and not {token_label(view, prediction.minus)!r}?"

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Each token with its probability after the first prompt and after the second."""
        of_runs = [{chance.name: chance.probability for chance in run.chances} for run in self.predictions]
        names = [chance.name for chance in self.predictions[0].chances if chance.role]
        return [(repr(name), _percent(of_runs[0][name]), _percent(of_runs[1][name])) for name in names]

    @property
    def statement(self) -> str:
        """A sentence with the explained number after both prompts."""
        first, second = self.logits
        return (
            f"The {self.predictions[0].label} is {first:+.4g} after the first prompt and {second:+.4g} after the "
            f"second: {first - second:+.4g} between them."
        )

    def page(self) -> Picture:
        """Return the whole explanation as one page."""
        difference, prediction = self.difference, self.predictions[0]
        with one_check(difference.a.model):
            components, picture, gap = _circuits(
                difference, prediction, self.components, f"change of the {prediction.label}"
            )
        heads = ("token", "after the first prompt", "after the second")
        cards = [_card("Both tokens", table(heads, self.rows))] if self.rows else []
        cards += [
            tokens_card(self.tokens, "The tokens that changed it"),
            components_card(self.components, "The components that changed it"),
        ]
        sums = {"contribution graph: its sources against the change": gap}
        if self.tokens.gap is not None:
            sums["tokens: Σ scores + bias against the change"] = float(self.tokens.gap.max())
        parts = (
            f"<h1>{escape(self.question)}</h1><p>{escape(self.statement)}</p>",
            _prompt(self.tokens),
            _cards(*cards),
            picture,
            components,
            _proofs(difference.errors, sums, repr(difference)),
        )
        return Picture(self.question, "".join(parts))


def changed_answer(
    difference: PassOrDifference, target: TokenLike = None, minus: TokenLike = None, query: Query | None = None
) -> ChangedAnswer:
    """Return why two prompts are answered differently; see `explain_difference`."""
    if not isinstance(difference, Difference):
        raise InvalidInputError(
            f"explain_difference: a difference of two runs is needed, got {type(difference).__name__}: "
            "create one with tlens.difference(first, second)."
        )
    if len(difference.tokens) != 1:
        raise InvalidInputError(f"explain_difference: {len(difference.tokens)} pairs of prompts; compare one.")
    difference.check_fresh()
    first = predict(difference.a, target, minus, query)
    if first.target is None:
        raise InvalidInputError(
            f"explain_difference: {difference.view.description} predicts no tokens; use "
            "tlens.attribute(difference, direction=...)."
        )
    if target is None and minus is None:
        chosen = predict(difference.b, query=first.query).target
        first = predict(difference.a, first.target, first.minus if chosen == first.target else chosen, first.query)
    second = predict(difference.b, **first.question)
    tokens = attribute(difference, **first.question)
    components = circuits.logit_attribution(difference, by="head", **first.question)
    logits = [float(run.operator().totals(**first.question)) for run in difference.runs]
    return ChangedAnswer(difference, (first, second), (logits[0], logits[1]), tokens, components)


@checked_names
def explain_difference(
    difference: PassOrDifference, target: TokenLike = None, *, minus: TokenLike = None, query: Query | None = None
) -> Picture:
    """Explain why two prompts are answered differently, on a single, self-contained HTML page.

    The page begins with the question and with both tokens' probabilities after either prompt. It then shows which of
    the differing tokens change the answer, and through which heads, MLPs and paths. Everything sums to the change of
    the logit.

    Args:
        difference: of the runs on two prompts, or of two models.
        target, minus: the explained token, and one to compare it with. By default the first run's prediction against
            the second's, or against the first run's second choice if both predict the same.
        query: the position whose prediction is explained; default as in `explain`.

    Raises:
        InvalidInputError: not a difference, several prompts, an unknown token, or a model that predicts no tokens.

    Returns:
        A Picture: it displays in a notebook, and ``.save("page.html")`` writes it.

    >>> other = tlens.freeze(model, text.replace("red", "blue"))
    >>> tlens.report.explain_difference(tlens.difference(frozen, other), " value", minus=" file").title
    "Why ' value' and not ' file'?"
    """
    return changed_answer(difference, target, minus, query).page()


# --------------------------------------------------------------------------- everything about a generated text


@checked_names
def explain_generation(
    model: ModelLike | FrozenGeneration,
    prompt: InputLike | None = None,
    *,
    max_new_tokens: Count = None,
    continuation: Continuation = None,
    span: Span = "all",
    hops: Hops = "all",
    minus: TokenLike = None,
) -> Picture:
    """Explain a generated text on one page: each of its tokens, a span as a whole, and indirect effects within it.

    Args:
        model: a causal language model, or a `FrozenGeneration` of one prompt (then leave `prompt` out).
        prompt, max_new_tokens, continuation: as for `tlens.attribute_generation`.
        span: the stretch that is explained as a whole.
        hops: how many hops back the page traces the span; see `tensorlens_tl.generation.written`.
        minus: the token to compare each with, as for `tlens.attribute_generation`.

    Raises:
        InvalidInputError: several prompts, none, or anything that `tlens.attribute_generation` rejects.
        UnsupportedModelError: not a causal language model, or one that cannot be frozen.

    Returns:
        A Picture: it displays in a notebook, and ``.save("page.html")`` writes it.

    >>> tlens.report.explain_generation(model, "Return the", max_new_tokens=2).title.partition(":")[0]
    'What made a generated text'
    """
    last = check_hops(hops)
    if isinstance(model, FrozenGeneration):
        if prompt is not None or max_new_tokens is not None or continuation is not None:
            raise InvalidInputError(
                "explain_generation: the text is frozen already; leave out the prompt and what follows it."
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
    if last is None:
        followed: list[Any] = [*range(1, min(4, tokens.queries.shape[1])), "all"]
    else:  # the first few, and the last
        followed = sorted({*range(1, min(4, last + 1)), last} - {0})
    steps = {hop: text.attribute(span=span, minus=minus, hops=hop) for hop in followed}
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
        first = text.generated_ranges()[0][0]
        rows: list[tuple[str, ...]] = []
        for hop, result in {0: whole, **steps}.items():
            assert result.bias is not None
            scores = result.scores[0, 0]
            shares = (scores[:first].sum(), scores[first:].sum(), result.bias[0, 0])
            total = torch.stack(shares).sum()
            rows.append((str(hop), *(number(float(value)) for value in (*shares, total))))
        by_hop = table(("hops", "on the prompt", "on generated tokens", "bias", "sum"), rows)
        parts += [
            "<h2>By way of generated tokens</h2>",
            "<p>What the span received from generated tokens is passed back to the tokens that produced them, in "
            "shares of each one's own logit, the bias included. The total stays the same at every hop.</p>",
            f'<div class="tlens">{by_hop}</div>',
            ended.to_html(style=False),
            _largest(ended),
        ]
    results = {"each token": tokens, "the stretch": whole} | {f"{hop} hops": step for hop, step in steps.items()}
    sums: dict[str, float] = {}
    for name, result in results.items():
        assert result.gap is not None
        sums[f"{name}: Σ scores + bias against the logits"] = float(result.gap.max())
    parts.append(_proofs(text.frozen.errors, sums))
    return Picture(f"What made a generated text: {visible(text.texts[0])[:60]}", "".join(parts))


def _opening(text: FrozenGeneration, tokens: Attribution, whole: Attribution, minus: TokenLike) -> str:
    """Return the generated text, and the tokens and components that the explained span comes from."""
    assert whole.total is not None
    before = joined(text.frozen.str_tokens[0][: text.generated_ranges()[0][0]])
    named = [tokens_card(whole, f"The tokens that moved {_stretch(whole)}")]
    components = stretch_components(text, whole, minus)
    if components is not None:
        named.append(components_card(components, f"The components that moved {_stretch(whole)}"))
    named.append(_card("Where each token comes from", _largest_sources(tokens)))
    return (
        f"<h1>The text goes on with {escape(short(repr(text.texts[0]), 120))}</h1>"
        f"<p>after <q>{escape(visible(before))}</q>. Explained here: {escape(whole.target)}, "
        f"<b>{float(whole.total[0, 0]):+.4g}</b>.</p>{_cards(*named)}"
    )


def _stretch(whole: Attribution) -> str:
    """Return the explained span, in quotes."""
    return repr(short(joined([whole.tokens[0][at] for at in whole.options["asked"][0]]), 40))


def stretch_components(text: FrozenGeneration, whole: Attribution, minus: TokenLike) -> Terms | None:
    """Return direct effects of heads and MLPs, summed over a span's tokens.

    None if logits are not affine in the stream, or for a runner-up, which is another token at each position.
    """
    if isinstance(minus, str) and minus == RUNNER_UP:
        return None
    positions = whole.options["asked"][0]
    targets = text.frozen.tokens[0, positions].tolist()
    queries = [position - 1 for position in positions]
    try:
        terms = circuits.logit_attribution(text.frozen, [targets], minus, by="head", query=queries)
    except TensorLensError:  # the logits are not cap(W_U·x + b_U)
        return None
    summed = {name: getattr(terms, name).sum(1, keepdim=True) for name in ("scores", "total", "remainder")}
    return replace(terms, queries=terms.queries[:, -1:], target=whole.target, **summed)


def _largest_sources(tokens: Attribution) -> str:
    rows: list[tuple[str, str, str]] = []
    for query, position in enumerate(tokens.options["asked"][0][:LARGEST]):
        at = int(tokens.scores[0, query].abs().argmax())
        score = number(float(tokens.scores[0, query, at]))
        rows.append((repr(tokens.tokens[0][position]), f"{tokens.tokens[0][at]!r} · {at}", score))
    left = len(tokens.options["asked"][0]) - len(rows)
    more = note(f"{left} more tokens below") if left else ""
    return table(("token", "largest source", "score"), rows) + more


def _largest(result: Attribution) -> str:
    rows = [(repr(entry.name), str(entry.position), number(entry.score)) for entry in result.top(LARGEST)]
    sources = table(("source", "position", "score"), rows)
    return f'<div class="tlens">{folded("The largest sources", sources)}</div>'
