"""From results to what the page shows of them: graphs, the neurons of an MLP, and the features of dictionaries."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tensorlens_tl.circuits import ContributionGraph, FeatureExamples, Features, feature_examples, features
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.results import Attribution, ScoreAttribution, ScoreChange, Terms

View = dict[str, Any]

TOP = 12
"""Neurons, features, tokens and parts of an attention score that are listed."""
LONGEST_LABEL = 200
"""Characters of a feature's label that are shown."""


@dataclass(frozen=True)
class LabelledDictionary:
    """A dictionary, and what its features are called.

    Attributes:
        weights: the dictionary.
        labels: as `circuits.feature_labels` takes them.
    """

    weights: Any
    labels: Any = None

    @property
    def hook(self) -> str:
        """Where it stands, in its words."""
        return str(getattr(self.weights, "hook_name", None) or type(self.weights).__name__)

    @property
    def code(self) -> str:
        """The line that computes its features."""
        labels = "" if self.labels is None else ", labels=labels"
        return f"features = tlens.circuits.features(run, dictionary{labels})  # dictionary: the one of {self.hook}"

    def features(self, frozen: FrozenPass) -> Features:
        """Its active features in a pass."""
        return features(frozen, self.weights, labels=self.labels)

    def examples(self, model: Any, frozen: FrozenPass, feature: int) -> FeatureExamples:
        """Where in the prompt one feature is active, and which tokens it promotes."""
        return feature_examples(model, self.weights, frozen.tokens, [feature], promoted=TOP)


def with_labels(dictionaries: Any, labels: Any) -> list[LabelledDictionary]:
    """Dictionaries, one or several or none, with the labels of each.

    Raises:
        InvalidInputError: several dictionaries, and not as many labels.
    """
    if dictionaries is None:
        return []
    if not isinstance(dictionaries, (list, tuple)):
        return [LabelledDictionary(dictionaries, labels)]
    if labels is None:
        labels = [None] * len(dictionaries)
    if not isinstance(labels, (list, tuple)) or len(labels) != len(dictionaries):
        raise InvalidInputError(
            f"labels: there are {len(dictionaries)} dictionaries; pass a list with the labels of each, or None for one."
        )
    return [LabelledDictionary(*pair) for pair in zip(dictionaries, labels, strict=True)]


def graph_view(graph: ContributionGraph) -> View:
    """Nodes and edges. What enters a node besides the edges and its bias comes from nodes that are not in the graph."""
    columns = ["name", "kind", "layer", "pos", "token", "weight", "bias"]
    rows = zip(*(graph.nodes[column].tolist() for column in columns), strict=True)
    nodes: list[View] = [dict(zip(columns, row, strict=True)) for row in rows]
    for node in nodes:
        sources = node["kind"] in ("embedding", "bias")
        node["others"] = 0.0 if sources else node["weight"] - node["bias"]
    edges = list(zip(*(graph.edges[column].tolist() for column in ("source", "target", "weight")), strict=True))
    for _, end, weight in edges:
        nodes[end]["others"] -= weight
    edges.sort(key=lambda edge: -abs(edge[2]))
    view = {"nodes": nodes, "edges": edges, "label": graph.target, "total": graph.total, "gap": graph.gap}
    return view | {"completeness": graph.completeness}


def component_view(terms: Terms, frozen: FrozenPass) -> View:
    """Heads and MLPs as rows of a matrix, and the other terms by name."""
    scores = dict(zip(terms.names, terms.scores[0, 0].tolist(), strict=True))
    heads: list[list[float | None]] = []
    mlps: list[float | None] = []
    for layer, block in enumerate(frozen.view.blocks):
        count = 0 if block.mixer else block.attention.heads
        heads.append([scores.pop(f"L{layer}H{head}", None) for head in range(count)])
        mlps.append(scores.pop(f"MLP{layer}", None))
    rest = sorted(scores.items(), key=lambda item: -abs(item[1]))
    return {"heads": heads, "mlps": mlps, "rest": [{"name": name, "score": score} for name, score in rest]}


def neuron_view(terms: Terms, node: str) -> View:
    """The neurons of one MLP with the largest effects, and the sum of the others.

    Raises:
        InvalidInputError: no such MLP.
    """
    scores = zip(terms.names, terms.scores[0, 0].tolist(), strict=True)
    neurons = [{"name": name, "score": score} for name, score in scores if name.startswith(f"{node}.N")]
    if not neurons:
        raise InvalidInputError(f"explorer: node is {shorten(node, 40)!r}; click an MLP, which has neurons.")
    return {"node": node, **_largest(neurons), "label": terms.target, "gap": float(terms.gap[0, 0])}


def baseline_name(frozen: FrozenPass) -> str:
    """What the method `difference` compares one prompt with, where no baseline is chosen."""
    if frozen.view.reads != "tokens":
        return "its mean patch in every place"
    if getattr(frozen.view.tokenizer, "mask_token_id", None) is not None:
        return "the mask token in every place"
    return "the mean embedding in every place"


def why_rows(parts: ScoreAttribution | ScoreChange) -> list[View]:
    """The largest parts of an attention score, or of its change, and what all others give: they sum to its total."""
    rows: list[View] = [{"name": entry.name, "score": entry.score} for entry in parts.top(TOP)]
    alone: dict[str, float] = {}
    if isinstance(parts, ScoreAttribution):
        kind = "pairs"
        all_parts = parts.pairs[0]
        alone["the query alone, with the key’s bias"] = float(parts.query_sources[0].double().sum())
        alone["the key alone, with the query’s bias"] = float(parts.key_sources[0].double().sum())
        alone["both biases"] = float(parts.bias[0])
    else:
        kind = "parts"
        all_parts = torch.cat([parts.query_sources[0], parts.key_sources[0], parts.constants[0]])
    count = all_parts.numel() - len(rows)
    if count:
        others = float(all_parts.double().sum()) - sum(row["score"] for row in rows)
        rows += [{"name": f"{count} other {kind}", "score": others, "muted": True}]
    return rows + [{"name": name, "score": score, "muted": True} for name, score in alone.items() if score]


def _label(active: Features, feature: int) -> str:
    """What a feature is called, as text that every page can show."""
    label = active.labels.get(feature, "").encode(errors="replace").decode()
    return shorten(label, LONGEST_LABEL)


def shorten(text: str, most: int) -> str:
    """A text of at most so many characters, with an ellipsis where it was longer."""
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"


def feature_effects_view(active: Features, terms: Terms) -> View:
    """The features with the largest effects, the sum of the others, and what belongs to no feature."""
    tokens = active.frozen.str_tokens[0]
    listed: list[View] = []
    rest: dict[str, float] = {}
    for name, score in zip(terms.names, terms.scores[0, 0].tolist(), strict=True):
        number, _, position = name.removeprefix("F").partition("@")
        if not (name.startswith("F") and number.isdecimal()):
            kind = name.partition("@")[0]
            rest[kind] = rest.get(kind, 0.0) + score
            continue
        at = int(position)
        label = _label(active, int(number))
        listed.append({"name": name, "score": score, "feature": int(number), "at": at, "label": label})
        listed[-1]["token"] = tokens[at]
    return {
        **_largest(listed),
        "rest": [{"name": name, "score": score} for name, score in rest.items()],
        "label": terms.target,
        "whole": float(terms.total[0, 0]),
        "gap": float(terms.gap[0, 0]),
        "hook": active.hook,
        "explained": active.explained,
        "active": active.active_per_token,
    }


def feature_view(active: Features, feature: int, at: int, sources: Attribution, shown: FeatureExamples) -> View:
    """Which tokens a feature's pre-activation comes from, and which it promotes, by one unit of its decoder."""
    assert sources.bias is not None
    assert sources.total is not None
    assert sources.gap is not None
    promoted = zip(shown.promoted[0].tolist(), shown.promotion[0].tolist(), strict=True)
    return {
        "name": f"F{feature}",
        "feature": feature,
        "at": at,
        "label": _label(active, feature),
        "value": float(active.value(feature)[0, at]),
        "scores": sources.scores[0, 0].tolist(),
        "bias": float(sources.bias[0, 0]),
        "total": float(sources.total[0, 0]),
        "gap": float(sources.gap[0, 0]),
        "promotes": [{"text": shown.texts[token], "score": score} for token, score in promoted],
    }


def _largest(rows: Iterable[View]) -> View:
    """The largest of some scored rows, how many others there are, and what these and all give."""
    ordered = sorted(rows, key=lambda row: -abs(row["score"]))
    others = ordered[TOP:]
    return {
        "top": ordered[:TOP],
        "count": len(others),
        "others": sum(row["score"] for row in others),
        "total": sum(row["score"] for row in ordered),
    }
