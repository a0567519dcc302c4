"""One report: the answer on one screen; then what every method says, heads, paths and the circuit, and the proofs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl import circuits
from tensorlens_tl._arguments import checked_names
from tensorlens_tl.drawing.marks import note, short
from tensorlens_tl.drawing.page import Picture, folded, table
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.models import ModelLike, Query, TokenLike
from tensorlens_tl.passes import FrozenPass, freeze, one_check
from tensorlens_tl.passes.inputs import joined
from tensorlens_tl.registry import attribute, get_method, list_methods
from tensorlens_tl.report.answer import answer_html
from tensorlens_tl.report.groups import grouped_html
from tensorlens_tl.report.methods import Limits, answers
from tensorlens_tl.report.prediction import Prediction, predict
from tensorlens_tl.results import Terms

TARGET_FOLLOWS = "a frozen pass has its input already, so what follows it is the target: "


@checked_names
def explain(
    model: ModelLike | FrozenPass,
    input: Any = None,
    target: TokenLike = None,
    *,
    minus: TokenLike = None,
    query: Query | None = None,
    methods: Sequence[str] | None = None,
    slow: bool = False,
) -> Picture:
    """Everything about one prediction of one prompt, as one page that opens without a network.

    The page begins with the answer: what is predicted, and the five tokens and five components that it comes from.

    Args:
        model: a TransformerLens model; or a `FrozenPass` of one prompt, which has its input already: the target may
            come next, as in ``explain(frozen, " Paris")``.
        input: a string or token ids.
        target, minus: the token that is explained, and one to compare it with. By default the model's first choice
            against its second; a `target` by itself is its plain logit, as `tensorlens_tl.attribute` has it.
        query: the position whose prediction it is, counted over the prompt's tokens. By default the last; in a masked
            language model the first mask.
        methods: names of methods; None takes every registered one. Methods that refuse this model are named with
            their reason.
        slow: also take methods that cost more than `tensorlens_tl.report.methods.LIMIT` operations on this model and
            prompt (leave-one-out, value zeroing and integrated gradients on larger ones), and compute norms exactly
            that cost more than that. Without it these methods are left out unless `methods` names them, such norms are
            estimated, and the page says so.

    Raises:
        InvalidInputError: several prompts, no input, an unknown token, a query out of range.
        RegistryError: an unknown method.

    Returns:
        A Picture: a notebook shows it, and ``.save("page.html")`` writes it.

    >>> tlens.report.explain(frozen, methods=["tensorlens"]).title
    'Where a prediction comes from: <|bos|>Return the value. Return the'
    """
    chosen = _chosen(methods)
    in_place_of_input = isinstance(model, FrozenPass) and input is not None
    if in_place_of_input:
        if target is not None:
            raise InvalidInputError(f"explain: {TARGET_FOLLOWS}explain(frozen, ' Paris').")
        input, target = None, input
    frozen = _one_prompt(model, input)
    limits = Limits(every=slow, named=methods is not None)
    with one_check(frozen.model):  # not each of some 25 methods compares all weights with those of the pass
        frozen.check_fresh()
        try:
            prediction = predict(frozen, target, minus, query)
        except InvalidInputError as error:
            if not in_place_of_input:
                raise
            raise InvalidInputError(f"explain: {TARGET_FOLLOWS}explain(frozen, ' Paris'). ", *error.args) from error
        page = _page(frozen, prediction, chosen, limits)
    frozen.check_fresh()  # a method that somebody registered may have changed them
    return page


def _page(frozen: FrozenPass, prediction: Prediction, chosen: Sequence[str], limits: Limits) -> Picture:
    said = answers(frozen, prediction, chosen, limits)
    refused = dict(said.refused)
    ours = said.shown.get("tensorlens (target)")
    if ours is not None and ours.about_target:
        tokens = ours.result
    else:
        tokens = attribute(frozen, query=prediction.query, **prediction.options)
    results = {name: answer.result for name, answer in said.shown.items()}
    proofs = {f"{name}: Σ scores + bias against its total": a.gap for name, a in results.items()}
    components: Terms | None = None
    sections = ""
    if prediction.options:
        try:
            components = circuits.logit_attribution(frozen, by="head", query=prediction.query, **prediction.options)
            sections, proved = _circuits(frozen, prediction, components)
        except TensorLensError as error:  # logits that are not cap(W_U·x + b_U), a graph too large
            refused["circuits"] = str(error)
        else:
            proofs |= proved
    parts = [answer_html(frozen, prediction, tokens, components)]
    if results:
        parts += ["<h2>What each method says</h2>", grouped_html(said.shown, prediction.position)]
    parts += [sections, *map(note, said.failed.values()), _refusals(refused)]
    parts.append(_proofs(frozen, {name: float(r.max()) for name, r in proofs.items() if r is not None}))
    text = joined(frozen.str_tokens[0])
    return Picture(f"Where a prediction comes from: {short(text, 60)}", "".join(parts))


def _chosen(methods: Sequence[str] | None) -> list[str]:
    """The methods of these names, or every one."""
    if methods is None:
        return list_methods()
    if isinstance(methods, str):
        methods = [methods]
    return [get_method(name).name for name in methods]


def _one_prompt(model: ModelLike | FrozenPass, input: Any) -> FrozenPass:
    """The pass itself, or that of an input.

    Raises:
        InvalidInputError: no input, or several prompts.
    """
    if not isinstance(model, FrozenPass):
        if input is None:
            raise InvalidInputError("explain: `input` is missing; pass a string or token ids.")
        model = freeze(model, input)
    if len(model.tokens) != 1:
        raise InvalidInputError(f"explain: the pass has {len(model.tokens)} prompts; freeze one.")
    return model


# ------------------------------------------------------------------ what is shown


def _refusals(refused: dict[str, str]) -> str:
    if not refused:
        return ""
    reasons = table(("what", "why"), refused.items(), "words")
    return f'<div class="tlens">{folded(f"{len(refused)} not shown, and why", reasons)}</div>'


def _circuits(frozen: FrozenPass, prediction: Prediction, heads: Terms) -> tuple[str, dict[str, Tensor]]:
    """Heads, paths and the graph; and how exactly each of them sums to the model's number."""
    question: dict[str, Any] = {**prediction.options, "query": prediction.query}
    paths = circuits.top_paths(frozen, k=12, width=16, **question)
    graph = circuits.contribution_graph(frozen, **question)
    label = prediction.label
    lists = (
        folded(
            "The largest direct effects",
            heads.to_html(15, title=f"The largest direct effects on the {label}", style=False),
        ),
        folded("The largest paths", paths.to_html(12, title=f"The largest paths to the {label}", style=False)),
    )
    sections = "".join(
        (
            "<h2>Heads and MLPs</h2>",
            heads.heads_to_html(title=f"Direct effects of heads and MLPs on the {label}", style=False),
            f'<div class="tlens">{"".join(lists)}</div>',
            "<h2>The circuit</h2>",
            graph.to_html(title=f"How the {label} comes about", style=False),
        )
    )
    proved = {
        "direct effects of heads and MLPs: their sum against the logit": heads.gap,
        "contribution graph: its sources against the logit": torch.tensor(graph.gap),
    }
    return sections, proved


def _proofs(frozen: FrozenPass, measured: dict[str, float]) -> str:
    blocks = {f"{part}: the composed map against the model's own": error for part, error in frozen.errors.items()}
    rows = ((name, f"{value:.1e}") for name, value in (blocks | measured).items())
    proved = table(("claim", "gap"), rows, "words")
    worst = max(blocks.values(), default=0.0)
    compared = note(f"On this prompt every part's map gives what the model itself gives, to {worst:.1e} at most.")
    summary = f"{len(blocks) + len(measured)} measured gaps"
    return f'<h2>The proofs</h2><div class="tlens">{compared}{folded(summary, proved)}{note(repr(frozen))}</div>'
