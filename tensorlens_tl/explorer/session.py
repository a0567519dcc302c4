"""What the page shows, as dictionaries of numbers and text: its views, and a session of one model that gives them.

Every number is a sum that the library gives, with its `gap`. Positions are counted over all tokens of a
prompt. Nothing here knows of the web.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.circuits import Features, full_ov, patch_scores
from tensorlens_tl.circuits.compare import patched_at
from tensorlens_tl.circuits.effects import Ablation
from tensorlens_tl.drawing.marks import short
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, TensorLensError
from tensorlens_tl.explorer.images import Images, on_image
from tensorlens_tl.explorer.mends import aligned, mends
from tensorlens_tl.explorer.questions import TOP, Call, Inquiry, Passes, Question, runner_up, with_labels
from tensorlens_tl.explorer.why import attended, why_view
from tensorlens_tl.generation import FrozenGeneration
from tensorlens_tl.models import RUNNER_UP, ModelView
from tensorlens_tl.passes import Difference, FrozenPass, one_check
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.target import token_label
from tensorlens_tl.registry import DEFAULT, Method, get_method, list_methods, list_rules
from tensorlens_tl.results import COVERED, SHOWN_EDGES, ContributionGraph, Terms

View = dict[str, Any]

EXAMPLE_NAMES = ("Mary", "John")
GIVEN = "When Mary and John went to the store, {} gave a drink to"
ARGUMENTS = "The first argument is a {}. The second argument is a"
ERRORS = "If the module is not found, a ModuleNotFoundError is raised. If the file is not found, a FileNotFoundError is"
EXAMPLES: dict[bool, list[View]] = {
    True: [
        {"name": "Two prompts: who gets the drink?", "text": GIVEN.format("John"), "other": GIVEN.format("Mary")},
        {"name": "A fact: where is the Eiffel Tower?", "text": "The Eiffel Tower is in the city of"},
        {"name": "Code: what is returned?", "text": "def add(a, b):\n    return a +"},
    ],
    False: [
        {"name": "Two prompts: string or list?", "text": ARGUMENTS.format("string"), "other": ARGUMENTS.format("list")},
        {"name": "A sentence: what happens to the error?", "text": ERRORS},
        {"name": "Code: what is the base class?", "text": "class Name(object): pass\n\nclass File("},
    ],
}
"""Questions that the page offers, for models that know the names and for those that do not."""

BEST = 10
"""Next tokens that are listed."""
LONGEST_LABEL = 200
"""Characters of a feature's label that are shown."""
MOST_NODES = 200
"""Nodes of the graph at most: more are a thicket."""


def prompt_view(inquiry: Inquiry) -> View:
    """Tokens of the prompt, and what the model says after the query; of two runs, what each of them says.

    It takes one run for each prompt, and no frozen pass. Two prompts need not have as many tokens.
    """
    logits = inquiry.logits
    model = inquiry.view
    target = inquiry.target
    foils = [runner_up(of, target["target"]) for of in logits]
    prompts = inquiry.prompts
    chances = [of.double().softmax(-1) for of in logits]
    view = {
        "tokens": prompts[0].str_tokens[0],
        "query": inquiry.query,
        "next": _likeliest(model, chances),
        **{name: _token(model, token, chances) for name, token in target.items()},
        "runners_up": [_token(model, token) for token in foils if token is not None],
        "second_choice": inquiry.second_choice not in (None, target["target"]),
        "numbers": [float(of[target["target"]] - (of[target["minus"]] if "minus" in target else 0)) for of in logits],
    }
    if not inquiry.question.is_comparison:
        inquiry.calls.append(f"result = run.logits({inquiry.query})")
        return view
    view["moved"] = [_token(model, token) for token in _moved(*logits)]
    if not inquiry.is_aligned:
        inquiry.calls.append("result = [of.logits() for of in (run, other)]")
        return view | {"aligned": aligned(*prompts)}
    inquiry.calls.append(f"result = [of.logits({inquiry.query}) for of in run.runs]")
    return view | {"changed": (prompts[0].tokens != prompts[1].tokens)[0].tolist()}


def _token(model: ModelView, token: int, chances: Sequence[Float[Tensor, "d_vocab"]] = ()) -> View:
    """A token's number and text, and its probability in each run."""
    names = ("chance", "other_chance")
    said = {name: float(of[token]) for name, of in zip(names, chances, strict=False)}
    return {"id": token, "text": token_label(model, token), **said}


def _moved(first: Float[Tensor, "d_vocab"], second: Float[Tensor, "d_vocab"]) -> list[int]:
    """The tokens that the first and the second run make likelier most, by p·ln(p/q); none where nothing moves."""
    logs = first.double().log_softmax(-1), second.double().log_softmax(-1)
    change = logs[0] - logs[1]
    more = logs[0].exp() * change, -logs[1].exp() * change
    return [int(of.argmax()) for of in more] if all(float(of.max()) > 0 for of in more) else []


def _likeliest(model: ModelView, chances: list[Float[Tensor, "d_vocab"]]) -> list[View]:
    """The tokens that one of the runs finds likeliest, with their probability in each."""
    best = torch.stack(chances).amax(0).argsort(descending=True)[:BEST].tolist()
    return [_token(model, token, chances) for token in best]


def mends_view(inquiry: Inquiry) -> View:
    """How two prompts of different lengths become equally long, and what the model says then."""
    question = inquiry.question
    if not question.is_comparison or inquiry.is_aligned:
        raise InvalidInputError("explorer: there is nothing to mend; both prompts have the same number of tokens.")
    if question.chat or question.is_of_written or inquiry.view.tokenizer is None:
        return {"mends": []}

    def say(prompt: Prompt, which: int) -> Float[Tensor, "d_vocab"]:
        logits = inquiry.passes.predictor(second=bool(which)).logits(prompt, -1)
        assert logits is not None  # of a model that gave some
        return logits[0]

    return {"mends": mends(inquiry.prompts, inquiry.passes.predictor(), say)}


def tokens_view(inquiry: Inquiry) -> View:
    """What each token gives to the target, by the method that was chosen."""
    question = inquiry.question
    frozen = inquiry.frozen
    method = question.method
    if question.is_comparison:
        method = "difference"
    options: dict[str, Any] = {"query": inquiry.query}
    if get_method(method).explains_prediction():
        options |= inquiry.target
    rule = question.rule if method == DEFAULT else None
    options |= {"method": method} if rule is None else inquiry.rule
    attribution = inquiry.result(inquiry.run, "attribute", **options)
    view: View = {"scores": attribution.scores[0, 0].tolist(), "label": attribution.target, "method": method}
    view["rule"] = rule
    view["additive"] = attribution.additive
    view["proof"] = max(inquiry.run.errors.values(), default=0.0)
    for name in ("bias", "total", "gap"):
        value = getattr(attribution, name)
        view[name] = None if value is None else float(value[0, 0])
    if method == "difference" and not question.is_comparison:
        view["baseline"] = "the mean embedding in every place"
        if frozen.view.reads != "tokens":
            view["baseline"] = "its mean patch in every place"
        elif getattr(frozen.view.tokenizer, "mask_token_id", None) is not None:
            view["baseline"] = "the mask token in every place"
    return view


def removed_view(inquiry: Inquiry) -> View:
    """What the live model loses without each token, one at a time."""
    if inquiry.question.is_comparison:
        raise InvalidInputError("explorer: tokens are removed from one run; leave the second prompt out.")
    options = {"query": inquiry.query, "method": "leave-one-out", **inquiry.target}
    removed = inquiry.result(inquiry.run, "attribute", **options)
    return {"scores": removed.scores[0, 0].tolist(), "label": removed.target}


def components_view(inquiry: Inquiry) -> View:
    """The direct effects: heads and MLPs as rows of a matrix, and all else that writes to the stream by name."""
    terms = inquiry.result(inquiry.run, "circuits.logit_attribution", by="head", **inquiry.aim)
    scores = dict(zip(terms.names, terms.scores[0, 0].tolist(), strict=True))
    heads: list[list[float | None]] = []
    mlps: list[float | None] = []
    for layer, block in enumerate(inquiry.frozen.view.blocks):
        count = 0 if block.mixer else block.attention.heads
        heads.append([scores.pop(f"L{layer}H{head}", None) for head in range(count)])
        mlps.append(scores.pop(f"MLP{layer}", None))
    rest = sorted(scores.items(), key=lambda item: -abs(item[1]))
    return {
        "heads": heads,
        "mlps": mlps,
        "rest": [{"name": name, "score": score} for name, score in rest],
        "total": float(terms.total[0, 0]),
        "gap": float(terms.gap[0, 0]),
        "label": terms.target,
    }


def head_view(inquiry: Inquiry) -> View:
    """Where a head attends, what it moves to the answer, and what it promotes."""
    layer, head, key, patterns = attended(inquiry)
    run = inquiry.run
    frozen = inquiry.frozen
    name = f"L{layer}H{head}"
    terms = inquiry.result(run, "circuits.logit_attribution", by="head_token", **inquiry.aim)
    moved = terms.keys[0, 0, terms.names.index(name)]
    return {
        "name": name,
        "pattern": patterns[0].tolist(),
        "other_pattern": patterns[1].tolist() if len(patterns) > 1 else None,
        "moved": moved.nan_to_num(0.0).tolist(),
        "score": float(terms[name][0, 0]),
        "key": key,
        "reads": frozen.str_tokens[0][key],
        "promotes": _promotes(frozen, layer, head, key, [*inquiry.target.values()]),
    }


def _promotes(frozen: FrozenPass, layer: int, head: int, key: int, explained: list[int]) -> list[View]:
    """What a head gives to the explained tokens where it reads the key's token, by its weights alone, and the tokens to
    which it gives most."""
    try:
        circuit = full_ov(frozen, layer, head, tokens=[int(frozen.tokens[0, key])])
    except TensorLensError:
        return []
    row = circuit.A[0] @ circuit.B
    best = [token for token in row.topk(min(TOP, len(row))).indices.tolist() if token not in explained]
    return [_token(frozen.view, token) | {"score": float(row[token])} for token in explained + best]


def routes_view(inquiry: Inquiry) -> View:
    """By which routes the change of two runs passes each layer."""
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
    """What the live model says with heads and MLPs ablated together, and how much of the explained number is left.

    Of two runs both are ablated, unless the first one is given the values of the second.
    """
    question = inquiry.question
    if question.without is None:
        raise InvalidInputError("explorer: without is missing; click a head or an MLP, and ablate it.")
    patched = question.by == "other"
    if patched and not question.is_comparison:
        raise InvalidInputError("explorer: by is 'other'; type a second prompt, whose values can be taken.")
    nodes = question.without.split(",")
    runs = inquiry.change.runs if question.is_comparison else [inquiry.frozen]
    others = {"other": runs[1]} if patched else {}
    ablated = runs[:1] if patched else runs
    after: list[Tensor] = []
    for rows in [ablated] if inquiry.passes.other is None else [[run] for run in ablated]:  # of one model in one run
        key = ("ablation", len(rows), len(after), inquiry.query)
        ablation = inquiry.passes.result(question, key, lambda rows=rows: Ablation(rows[0], inquiry.query, *rows[1:]))
        after += ablation.logits(nodes, question.by, **others)[:, 0]
    before = inquiry.logits
    after += before[len(after) :]
    target = inquiry.target
    numbers = [
        [float(of[target["target"]] - (of[target["minus"]] if "minus" in target else 0)) for of in side]
        for side in (before, after)
    ]
    whole, left = (of[0] - sum(of[1:]) for of in numbers)
    chances = [[of.double().softmax(-1) for of in side] for side in (before, after)]
    model = inquiry.view
    arguments = f"{nodes!r}, by={question.by!r}{', other=run.b' if patched else ''}, query={inquiry.query}"
    subject = "run.a" if question.is_comparison else "run"
    inquiry.calls.append("from tensorlens_tl.circuits.effects import ablated_logits")
    inquiry.calls.append(f"result = ablated_logits({subject}, {arguments})")
    return {
        "nodes": nodes,
        "by": question.by,
        "before": whole,
        "after": left,
        "share": left / whole if whole else None,
        "answers": [
            _token(model, token)
            | {"before": [float(of[token]) for of in chances[0]], "after": [float(of[token]) for of in chances[1]]}
            for token in target.values()
        ],
        "next": [_likeliest(model, [*pair]) for pair in zip(*chances, strict=True)],
    }


def graph_view(inquiry: Inquiry) -> View:
    """The nodes through which most of the target came about, and the edges between them, as a picture and as tables.

    All else is nodes of kind ``"others"``, by layers: what enters any node is its edges and its bias.
    """
    chosen = _graph(inquiry)
    graph = chosen.with_others()
    columns = ["name", "kind", "layer", "pos", "token", "weight", "bias"]
    rows = zip(*(graph.nodes[column].tolist() for column in columns), strict=True)
    edges = list(zip(*(graph.edges[column].tolist() for column in ("source", "target", "weight")), strict=True))
    edges.sort(key=lambda edge: -abs(edge[2]))
    return {
        "nodes": [dict(zip(columns, row, strict=True)) for row in rows],
        "edges": edges,
        "picture": graph.drawn(SHOWN_EDGES),
        "count": len(chosen.nodes) - 1,
        "others": float(chosen.others[-1]),
        "label": graph.target,
        "total": graph.total,
        "gap": graph.gap,
        "coverage": chosen.coverage,
        "covered": chosen.coverage >= COVERED,
    }


def _graph(inquiry: Inquiry) -> ContributionGraph:
    """The nodes that are drawn."""
    count = inquiry.question.nodes
    share = COVERED if count is None else min(count, MOST_NODES)
    options = {**inquiry.aim, **inquiry.rule}
    return inquiry.result(inquiry.run, "circuits.contribution_graph", **options, nodes=share, threshold=0)


def measured_view(inquiry: Inquiry) -> View:
    """What patching each drawn node live, at its position, takes from the answer, beside what the difference finds.

    A head is patched whole, with its values, queries and keys.
    """
    if not inquiry.question.is_comparison:
        raise InvalidInputError("explorer: measured nodes are of two runs; type a second prompt.")
    drawn = _graph(inquiry).nodes
    runs = inquiry.change.runs
    aim: dict[str, Any] = inquiry.aim
    options = ", ".join(f"{name}={value}" for name, value in aim.items())
    estimates = inquiry.passes.result(
        inquiry.question, ("difference", *aim.items()), lambda: patch_scores(*runs, **aim, positions=True)
    )
    inquiry.calls.append(f"estimates = tlens.circuits.patch_scores(run.a, run.b, {options}, positions=True)")
    marks: dict[str, list[str]] = {}
    for name, at in zip(drawn["name"], drawn["pos"], strict=True):
        node = re.sub(r"\.[qkvg]$", "", name)  # a head is patched whole
        if node in estimates.names:
            marks.setdefault(f"{node}@{at}", []).append(f"{name}@{at}")
    if not marks:
        raise InvalidInputError("explorer: no head, MLP or token is drawn; choose more nodes.")
    nodes = [*marks]
    key = ("patched", *nodes, *aim.items())
    live = inquiry.passes.result(inquiry.question, key, lambda: patched_at(*runs, **aim, nodes=nodes))
    inquiry.calls.append("from tensorlens_tl.circuits.compare import patched_at")
    inquiry.calls.append(f"result = patched_at(run.a, run.b, nodes={nodes!r}, {options})")
    inquiry.last = live
    assert estimates.keys is not None  # of every position
    rows: list[View] = []
    for node, lost in zip(nodes, live.scores[0, 0].tolist(), strict=True):
        name, _, at = node.rpartition("@")
        score = float(estimates.keys[0, 0, estimates.names.index(name), int(at)])
        rows.append({"name": name, "at": int(at), "difference": score, "live": lost, "nodes": marks[node]})
    rows.sort(key=lambda row: -abs(row["live"]))
    return {"rows": rows, "label": live.target, "total": float(live.total[0, 0])}


def neurons_view(inquiry: Inquiry) -> View:
    """The neurons of one MLP with the largest effects on the target, and the sum of the others."""
    node = inquiry.question.node
    if node is None:
        raise InvalidInputError("explorer: node is missing; click an MLP.")
    terms: Terms = inquiry.result(inquiry.run, "circuits.logit_attribution", **inquiry.aim, by="neuron")
    scores = zip(terms.names, terms.scores[0, 0].tolist(), strict=True)
    neurons = [{"name": name, "score": score} for name, score in scores if name.startswith(f"{node}.N")]
    if not neurons:
        raise InvalidInputError(f"explorer: node is {short(node, 40)!r}; click an MLP, which has neurons.")
    return {"node": node, **_largest(neurons), "label": terms.target, "gap": float(terms.gap[0, 0])}


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


def features_view(inquiry: Inquiry) -> View:
    """The features of a dictionary with the largest effects, the sum of the others, and what belongs to no feature."""
    active = _active(inquiry)
    call = Call("circuits.feature_effects", options=inquiry.aim, subject="features")
    terms: Terms = inquiry.answer(call, active)
    tokens = active.frozen.str_tokens[0]
    listed: list[View] = []
    rest: dict[str, float] = {}
    for name, score in zip(terms.names, terms.scores[0, 0].tolist(), strict=True):
        number, _, position = name.removeprefix("F").partition("@")
        if not (name.startswith("F") and number.isdecimal()):
            kind = name.partition("@")[0]
            rest[kind] = rest.get(kind, 0.0) + score
            continue
        feature = int(number)
        at = int(position)
        about = {"feature": feature, "at": at, "label": _label(active, feature), "token": tokens[at]}
        listed.append({"name": name, "score": score, **about})
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


def feature_view(inquiry: Inquiry) -> View:
    """Which tokens a feature's pre-activation comes from, and which it promotes, by one unit of its decoder."""
    question = inquiry.question
    feature = question.feature
    if feature is None:
        raise InvalidInputError("explorer: feature is missing; click a feature.")
    active = _active(inquiry)
    at = question.at
    if at is None:
        at = inquiry.query
    sources = inquiry.answer(Call("circuits.feature_attribution", (feature,), {"query": at}, "features"), active)
    dictionary = inquiry.dictionaries[question.dictionary or 0]
    shown = dictionary.examples(inquiry.passes.model, active.frozen, feature)
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


def _active(inquiry: Inquiry) -> Features:
    """The active features of the dictionary that is asked about."""
    number = inquiry.question.dictionary or 0
    count = len(inquiry.dictionaries)
    if number >= count:
        raise InvalidInputError(f"explorer: dictionary {number} of {count}; pass explore(model, dictionaries=…).")
    if inquiry.question.is_comparison:
        raise InvalidInputError("explorer: features are of one run; leave the second prompt out.")
    dictionary = inquiry.dictionaries[number]
    inquiry.calls.append(dictionary.code)
    return dictionary.features(inquiry.frozen)


def _label(active: Features, feature: int) -> str:
    """What a feature is called, as text that every page can show."""
    return short(active.labels.get(feature, "").encode(errors="replace").decode(), LONGEST_LABEL)


def generated_view(inquiry: Inquiry) -> View:
    """Tokens of prompt and continuation, and what each gave to a stretch of the latter; of two runs both texts."""
    question = inquiry.question
    if question.new is None:
        raise InvalidInputError("explorer: new is missing; say how many tokens the model shall write.")
    if question.image is not None:
        raise InvalidInputError("explorer: text is generated after a prompt; leave the image out.")
    options: dict[str, Any] = {"span": "all"}
    if question.start is not None and question.stop is not None:
        if question.start >= question.stop:
            raise InvalidInputError(f"explorer: start is {question.start} and stop {question.stop}: no token.")
        options["span"] = (question.start, question.stop)
    minus = question.minus
    if question.runner_up:
        minus = RUNNER_UP
    if minus is not None:
        options["minus"] = minus
    if question.hops:
        options["hops"] = question.hops
    view = _text_of(inquiry, inquiry.passes.written(question), options, "run")
    if question.is_comparison:
        view["second"] = _text_of(inquiry, inquiry.passes.written(question, second=True), options, "other")
    return view


def _text_of(inquiry: Inquiry, written: FrozenGeneration, options: Mapping[str, Any], subject: str) -> View:
    """One text, and what each of its tokens gave to a stretch of it."""
    attribution = inquiry.answer(Call("attribute", options=options, subject=subject, is_method=True), written)
    numbers = {"bias": attribution.bias, "total": attribution.total, "gap": attribution.gap}
    positions = attribution.options["asked"][0]
    return {
        "tokens": written.frozen.str_tokens[0],
        "first": written.generated_ranges()[0][0],
        "start": positions[0],
        "stop": positions[-1] + 1,
        "scores": attribution.scores[0, 0].tolist(),
        "label": attribution.target,
        **{name: float(value[0, 0]) for name, value in numbers.items() if value is not None},
    }


def image_view(inquiry: Inquiry) -> View:
    """The scores of an image's patches, with the image as the model reads it; of two images, with the second one."""
    question = inquiry.question
    if question.image is None:
        raise InvalidInputError("explorer: image is missing; choose or upload one.")
    view = tokens_view(inquiry) | on_image(inquiry.frozen)
    if question.is_comparison:
        view["second_picture"] = on_image(inquiry.change.b)["picture"]
    return view


def _group(method: Method) -> str:
    """What a method's scores are, by what is registered of it."""
    if method.perturbs:
        return "Removal: what is lost without a token"
    if method.explains_prediction():
        return "Prediction: what a token adds to it"
    return "Flow: how much reaches the output, whatever it predicts"


def _examples(model: ModelView) -> list[View]:
    """Questions to begin with, the first of them of two prompts, in words that the model's tokenizer knows."""
    if model.reads != "tokens" or model.unembedding is None or model.classes is not None or model.tokenizer is None:
        return []
    knows_names = all(len(model.tokenizer.encode(f" {name}", add_special_tokens=False)) == 1 for name in EXAMPLE_NAMES)
    return [*EXAMPLES[knows_names]]


VIEWS: Mapping[str, Callable[[Inquiry], View]] = {
    "prompt": prompt_view,
    "mends": mends_view,
    "tokens": tokens_view,
    "removed": removed_view,
    "components": components_view,
    "head": head_view,
    "why": why_view,
    "routes": routes_view,
    "ablate": ablate_view,
    "graph": graph_view,
    "measured": measured_view,
    "neurons": neurons_view,
    "features": features_view,
    "feature": feature_view,
    "generated": generated_view,
    "image": image_view,
}
"""What the page can ask for."""


class Session:
    """One model's answers to the page's questions.

    Args:
        model: the model, of either class.
        other: a second model of its architecture, such as a fine-tuned one: runs of two prompts are then of both.
        name: what the page calls it.
        dictionaries: sparse autoencoders of the model, one or several, in which the page shows features.
        labels: what their features are called, for each dictionary as `circuits.feature_labels` takes it.
        passes: how many prompts' passes stay in memory.
        images: those that the page offers to a model of images, prepared as it reads them.
        processor: the model's image processor, for uploads; see `Images`.

    >>> from tensorlens_tl.explorer import Session
    >>> session = Session(model)
    >>> view = session.view("tokens", {"text": text})
    >>> abs(sum(view["scores"]) + view["bias"] - view["total"]) < 1e-3
    True
    """

    def __init__(
        self,
        model: Any,
        other: Any = None,
        *,
        name: str = "",
        dictionaries: Any = None,
        labels: Any = None,
        passes: int = 16,
        images: Any = None,
        processor: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.other = other
        self.name = name
        self.dictionaries = with_labels(dictionaries, labels)
        self.last: Any = None
        self.question: Question | None = None
        self.images = Images(model, images, processor)
        self._passes = Passes(model, other, self.images, passes)
        self._views: dict[str, Callable[[Inquiry], View]] = dict(VIEWS)

    def view(self, name: str, fields: Mapping[str, Any]) -> View:
        """One view of one question, with the Python that gives the same numbers as ``"code"``.

        A model that has changed since (other weights, configuration or hooks) is frozen again, and ``"version"``, how
        often that happened so far, is one more.

        Args:
            name: ``"prompt"``, ``"mends"``, ``"tokens"``, ``"removed"``, ``"components"``, ``"head"``, ``"why"``,
                ``"routes"``, ``"ablate"``, ``"graph"``, ``"measured"``, ``"neurons"``, ``"features"``, ``"feature"``,
                ``"generated"`` or ``"image"``.
            fields: those of a `Question`.

        Raises:
            InvalidInputError: no such view, or a field that is none.
            TensorLensError: what the library refuses.
        """
        if name not in self._views:
            raise InvalidInputError(f"explorer: view {name!r}; use one of {', '.join(self._views)}.")
        question = Question.of(fields)
        try:
            answer = self._computed(name, question)
        except FrozenModelError:  # it changed while it was asked
            self._passes.clear()
            answer = self._computed(name, question)
        return answer | {"version": self._passes.version}

    def _computed(self, name: str, question: Question) -> View:
        with one_check(self.model), one_check(self.model if self.other is None else self.other):
            self._passes.refresh()
            return self._answer(name, question)

    def _answer(self, name: str, question: Question) -> View:
        of_runs = question if name == "generated" else self._passes.of_one_length(question)
        inquiry = Inquiry(of_runs, self._passes, self.dictionaries)
        answer = self._views[name](inquiry)
        self.question = question
        if inquiry.last is not None:
            self.last = inquiry.last
        return answer | {"code": inquiry.code}

    def about(self) -> View:
        """The model, the methods that the page offers, and which inputs it takes."""
        methods: list[View] = []
        for method in sorted(list_methods(), key=lambda name: name != DEFAULT):
            sentence = (get_method(method).__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("`", "")
            methods.append({"name": method, "about": sentence, "group": _group(get_method(method))})
        view: View = {
            "name": self.name,
            "two_models": self.other is not None,
            "methods": methods,
            "rules": list_rules(),
            "dictionaries": [dictionary.hook for dictionary in self.dictionaries],
            "chat": bool(getattr(getattr(self.model, "tokenizer", None), "chat_template", None)),
            "version": self._passes.version,
        }
        model = ModelView(self.model)
        view["examples"] = _examples(model)
        if model.reads == "images":
            classes = [token_label(model, token) for token in range(model.d_vocab)]
            view |= {"images": self.images.given, "pictures": self.images.pictures}
            view |= {"classes": classes, "processor": self.images.processor is not None}
        return view

    def frozen(self, question: Question, *, second: bool = False) -> FrozenPass:
        """The pass of a question's prompt or image, or of its second prompt, held for later questions."""
        return self._passes.frozen(question, second=second)

    def change(self, question: Question) -> Difference:
        """The difference of two prompts' runs, first less second; of two models the second prompt runs on `other`."""
        return self._passes.change(question)
