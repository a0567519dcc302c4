"""The views of the page by name, each a function of an `Inquiry` that returns numbers and text."""

from collections.abc import Callable, Mapping
from typing import Any

from tensorlens_tl.circuits import Features
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.explorer.calls import Call
from tensorlens_tl.explorer.generated import call_of, view_of
from tensorlens_tl.explorer.heads import head_view
from tensorlens_tl.explorer.images import on_image
from tensorlens_tl.explorer.inquiry import Inquiry
from tensorlens_tl.explorer.parts import (
    baseline_name,
    component_view,
    feature_effects_view,
    feature_view,
    graph_view,
    neuron_view,
)
from tensorlens_tl.explorer.predictions import prompt_view
from tensorlens_tl.registry import get_method

View = dict[str, Any]

NODES = 40
"""Nodes of the graph, where the page asks for no other number."""
MOST_NODES = 200
"""Nodes of the graph at most: more are a thicket."""


def tokens_view(inquiry: Inquiry) -> View:
    """What each token gives to the target, by the method that was chosen."""
    question = inquiry.question
    method = question.method
    if question.is_comparison:
        method = "difference"
    options: dict[str, Any] = {"query": inquiry.query}
    if get_method(method).explains_prediction():
        options |= inquiry.target
    attribution = inquiry.result(inquiry.run, "attribute", method=method, **options)
    view: View = {"scores": attribution.scores[0, 0].tolist(), "label": attribution.target, "method": method}
    view["additive"] = attribution.additive
    for name in ("bias", "total", "gap"):
        value = getattr(attribution, name)
        view[name] = None if value is None else float(value[0, 0])
    if method == "difference" and not question.is_comparison:
        view["baseline"] = baseline_name(inquiry.frozen)
    return view


def components_view(inquiry: Inquiry) -> View:
    """The direct effects of heads and MLPs, and of all else that writes to the stream."""
    terms = inquiry.result(inquiry.run, "circuits.logit_attribution", by="head", **inquiry.aim)
    return component_view(terms, inquiry.frozen) | {
        "total": float(terms.total[0, 0]),
        "gap": float(terms.gap[0, 0]),
        "label": terms.target,
    }


def routes_view(inquiry: Inquiry) -> View:
    """By which routes the change of two runs passes each layer.

    Raises:
        InvalidInputError: one run alone.
    """
    if not inquiry.question.is_comparison:
        raise InvalidInputError("explorer: routes are of two runs; type a second prompt, or choose a second image.")
    passed = inquiry.result(inquiry.change, "circuits.routes", **inquiry.aim)
    table = passed.to_dataframe().pivot_table(index="layer", columns="route", values="score", sort=False)
    table = table.loc[:, (table != 0).any()]
    return {
        "layers": list(table.index),
        "routes": list(table.columns),
        "scores": table.to_numpy().tolist(),
        "total": float(passed.total[0, 0]),
        "gap": float(passed.gap.max()),
    }


def ablate_view(inquiry: Inquiry) -> View:
    """What the target loses without one node, in the frozen model and in the live one.

    Raises:
        InvalidInputError: no node was named, or two runs are compared.
    """
    node = inquiry.question.node
    if node is None:
        raise InvalidInputError("explorer: node is missing; click a head or an MLP.")
    if inquiry.question.is_comparison:
        raise InvalidInputError("explorer: an ablation is of one run; leave the second prompt or image out.")
    losses: View = {}
    total = 0.0
    for name, live in (("frozen", False), ("live", True)):
        terms = inquiry.result(inquiry.frozen, "circuits.total_effects", nodes=[node], live=live, **inquiry.aim)
        losses[name] = float(terms.scores[0, 0, 0])
        total = float(terms.total[0, 0])
    return {"node": node, "before": total, "after": total - losses["live"], **losses}


def strongest_view(inquiry: Inquiry) -> View:
    """The strongest nodes through which the target came about, and the edges between them."""
    count = min(inquiry.question.nodes or NODES, MOST_NODES)
    graph = inquiry.result(inquiry.run, "circuits.contribution_graph", **inquiry.aim, nodes=count, threshold=0)
    return graph_view(graph)


def neurons_view(inquiry: Inquiry) -> View:
    """The neurons of one MLP that write most to the target.

    Raises:
        InvalidInputError: no MLP was named.
    """
    node = inquiry.question.node
    if node is None:
        raise InvalidInputError("explorer: node is missing; click an MLP.")
    terms = inquiry.result(inquiry.run, "circuits.logit_attribution", **inquiry.aim, by="neuron")
    return neuron_view(terms, node)


def features_view(inquiry: Inquiry) -> View:
    """The features of a dictionary that give most to the target."""
    features = _active(inquiry)
    call = Call("circuits.feature_effects", options=inquiry.aim, subject="features")
    return feature_effects_view(features, inquiry.answer(call, features))


def one_feature_view(inquiry: Inquiry) -> View:
    """What makes one feature active, and which tokens it promotes.

    Raises:
        InvalidInputError: no feature was named.
    """
    question = inquiry.question
    if question.feature is None:
        raise InvalidInputError("explorer: feature is missing; click a feature.")
    features = _active(inquiry)
    at = question.at
    if at is None:
        at = inquiry.query
    call = Call("circuits.feature_attribution", (question.feature,), {"query": at}, "features")
    sources = inquiry.answer(call, features)
    dictionary = inquiry.dictionaries[question.dictionary or 0]
    shown = dictionary.examples(inquiry.passes.model, features.frozen, question.feature)
    return feature_view(features, question.feature, at, sources, shown)


def _active(inquiry: Inquiry) -> Features:
    """The active features of the dictionary that is asked about.

    Raises:
        InvalidInputError: there is none, or two runs are compared.
    """
    number = inquiry.question.dictionary or 0
    count = len(inquiry.dictionaries)
    if number >= count:
        raise InvalidInputError(f"explorer: dictionary {number} of {count}; pass explore(model, dictionaries=…).")
    if inquiry.question.is_comparison:
        raise InvalidInputError("explorer: features are of one run; leave the second prompt out.")
    dictionary = inquiry.dictionaries[number]
    inquiry.calls.append(dictionary.code)
    return dictionary.features(inquiry.frozen)


def generated_view(inquiry: Inquiry) -> View:
    """What the model writes, and what a stretch of it came from.

    Raises:
        InvalidInputError: nothing is to be written, or a comparison.
    """
    call = call_of(inquiry.question)
    written = inquiry.passes.written(inquiry.question)
    return view_of(written, inquiry.answer(call, written))


def image_view(inquiry: Inquiry) -> View:
    """The scores of an image's patches, with the image as the model reads it; of two images, with the second one.

    Raises:
        InvalidInputError: no image.
        UnsupportedModelError: patches that do not tile it.
    """
    question = inquiry.question
    if question.image is None:
        raise InvalidInputError("explorer: image is missing; choose or upload one.")
    view = tokens_view(inquiry) | on_image(inquiry.frozen)
    if question.is_comparison:
        view["second_picture"] = on_image(inquiry.change.b)["picture"]
    return view


VIEWS: Mapping[str, Callable[[Inquiry], View]] = {
    "prompt": prompt_view,
    "tokens": tokens_view,
    "components": components_view,
    "head": head_view,
    "routes": routes_view,
    "ablate": ablate_view,
    "graph": strongest_view,
    "neurons": neurons_view,
    "features": features_view,
    "feature": one_feature_view,
    "generated": generated_view,
    "image": image_view,
}
"""What the page can ask for."""
