"""One report: a prediction, what every method says about it, the heads and paths that made it, and the proofs."""

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl import circuits
from tensorlens_tl.drawing.marks import visible
from tensorlens_tl.drawing.page import Picture, table
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.models import ModelLike, Query, TokenLike
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.registry import attribute, get_method, list_methods
from tensorlens_tl.report.compare import compare
from tensorlens_tl.report.prediction import Prediction, predict
from tensorlens_tl.results import Attribution

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "tensorlens": {"target": {"collapse": "target"}, "in_out": {"collapse": "in_out"}, "norm": {"collapse": "norm"}},
    "mean": {"norm": {"layer_map": "norm:attn_res_ln"}},  # of attention it is the same as that method
    "decompx": {"target": {"aggregate": "target"}, "norm": {"aggregate": "norm"}},
}
"""Methods that answer several questions, with the options of each; a target in them is the report's target."""


def explain(
    model: ModelLike | FrozenPass,
    input: Any = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query | None = None,
    methods: Sequence[str] | None = None,
) -> Picture:
    """Everything about one prediction of one prompt, as one page that opens without a network.

    Args:
        model: a TransformerLens model, or a `FrozenPass` of one prompt (then leave `input` out).
        input: a string or token ids.
        target, minus: the token that is explained, and one to compare it with. By default the model's first choice
            against its second.
        query: the position whose prediction it is, counted over the prompt's tokens. By default the last; in a masked
            language model the first mask.
        methods: names of methods; None takes every registered one. Methods that refuse this model are named with
            their reason.

    Raises:
        InvalidInputError: several prompts, no input, an unknown token, a query out of range.
        RegistryError: an unknown method.

    Returns:
        A Picture: a notebook shows it, and ``.save("page.html")`` writes it.

    >>> tlens.report.explain(frozen, methods=["tensorlens"]).title
    'Where a prediction comes from: <|bos|>Return the value. Return the'
    """
    if methods is None:
        methods = list_methods()
    elif isinstance(methods, str):
        methods = [methods]
    chosen = [get_method(name).name for name in methods]
    if not isinstance(model, FrozenPass):
        if input is None:
            raise InvalidInputError("explain: `input` is missing; pass a string or token ids.")
        model = freeze(model, input)
    elif input is not None:
        raise InvalidInputError("explain: a frozen pass has its input already; leave `input` out.")
    frozen: FrozenPass = model
    if len(frozen.tokens) != 1:
        raise InvalidInputError(f"explain: the pass has {len(frozen.tokens)} prompts; freeze one.")
    prediction = predict(frozen, target, minus, query)
    results, refused = attributions(frozen, prediction, chosen)
    parts = [_opening(frozen, prediction)]
    if results:
        first = next(iter(results.values()))
        parts += ["<h2>The tokens that moved it</h2>", first.to_html(style=False)]
        parts += ["<h2>Every method, side by side</h2>", compare(results).body]
    proofs = {f"{name}: Σ scores + bias against its total": a.gap for name, a in results.items()}
    if prediction.options:
        try:
            sections, proved = _circuits(frozen, prediction)
        except TensorLensError as error:  # logits that are not cap(W_U·x + b_U), a graph too large
            refused["circuits"] = str(error)
        else:
            parts.append(sections)
            proofs |= proved
    parts.append(_refusals(refused))
    parts.append(_proofs(frozen, {name: float(r.max()) for name, r in proofs.items() if r is not None}))
    text = "".join(frozen.str_tokens[0])
    if len(text) > 60:
        text = f"{text[:59]}…"
    return Picture(f"Where a prediction comes from: {text}", "".join(parts))


def attributions(
    frozen: FrozenPass, prediction: Prediction, methods: Sequence[str]
) -> tuple[dict[str, Attribution], dict[str, str]]:
    """Every method's answer for one query, and why some refused."""
    results: dict[str, Attribution] = {}
    refused: dict[str, str] = {}
    variants = [
        (method, variant, options)
        for method in sorted(methods, key=lambda name: (name != "tensorlens", name))
        for variant, options in VARIANTS.get(method, {"": {}}).items()
    ]
    for method, variant, options in tqdm(variants, desc="methods", leave=False, disable=None):
        registered = get_method(method)
        about_target = registered.explains_prediction(options)
        if about_target and not prediction.options:
            continue
        question: dict[str, Any] = {"query": prediction.query}
        if about_target:
            question = {**prediction.options, **question}
        question = {option: value for option, value in question.items() if registered.takes(option)}
        name = f"{method} ({variant})" if variant else method
        try:
            result = attribute(frozen, method=method, **options, **question)
        except TensorLensError as error:
            refused[name] = str(error)
        else:
            results[name] = result
    return results, refused


# ------------------------------------------------------------------ what is shown


def _opening(frozen: FrozenPass, prediction: Prediction) -> str:
    text = "".join(frozen.str_tokens[0])
    chances = table(("token", "probability"), ((repr(token), f"{chance:.1%}") for token, chance in prediction.best))
    at = f"at position {prediction.position}, after {escape(repr(frozen.str_tokens[0][prediction.position]))}"
    if prediction.best:
        summary = f"<p>The prediction {at}:</p>{chances}<p>Explained here: the {escape(prediction.label)}.</p>"
    else:
        summary = f"<p>This model predicts no tokens. Explained here: its output {at}.</p>"
    return (
        f"<h1>Where a prediction comes from</h1><p><q>{escape(visible(text))}</q></p>"
        f'<div class="tlens">{summary}<div class="n">{escape(repr(frozen))}</div></div>'
    )


def _refusals(refused: dict[str, str]) -> str:
    if not refused:
        return ""
    reasons = table(("what", "why"), refused.items(), "words")
    return f'<div class="tlens"><details><summary>{len(refused)} not shown</summary>{reasons}</details></div>'


def _circuits(frozen: FrozenPass, prediction: Prediction) -> tuple[str, dict[str, Tensor]]:
    """Heads, components, paths and the graph; and how exactly each of them sums to the model's number."""
    question: dict[str, Any] = {**prediction.options, "query": prediction.query}
    components = circuits.logit_attribution(frozen, **question)
    heads = circuits.logit_attribution(frozen, by="head", **question)
    paths = circuits.top_paths(frozen, k=12, width=16, **question)
    graph = circuits.contribution_graph(frozen, **question)
    label = prediction.label
    sections = "".join(
        (
            "<h2>The components that made it</h2>",
            components.to_html(title=f"Direct effects on the {label}", style=False),
            "<h2>The heads</h2>",
            heads.heads_to_html(title=f"Direct effects of heads and MLPs on the {label}", style=False),
            heads.to_html(12, title=f"The largest direct effects on the {label}", style=False),
            "<h2>The paths</h2>",
            paths.to_html(12, title=f"The largest paths to the {label}", style=False),
            "<h2>The circuit</h2>",
            graph.to_html(title=f"How the {label} comes about", style=False),
        )
    )
    proofs = {"direct effects of components": components, "direct effects of heads": heads}
    proved = {f"{name}: their sum against the logit": result.gap for name, result in proofs.items()}
    return sections, proved | {"contribution graph: its sources against the logit": torch.tensor(graph.gap)}


def _proofs(frozen: FrozenPass, measured: dict[str, float]) -> str:
    blocks = {f"{part}: the composed map against the model's own": error for part, error in frozen.errors.items()}
    rows = ((name, f"{value:.1e}") for name, value in (blocks | measured).items())
    return (
        '<h2>The proofs</h2><div class="tlens"><p class="n">Relative errors, measured on this prompt. Integrated '
        "gradients is a quadrature and exact only in the limit; everything else holds to rounding.</p>"
        f"{table(('claim', 'gap'), rows, 'words')}</div>"
    )
