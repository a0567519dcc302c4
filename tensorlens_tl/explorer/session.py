"""What the page shows, as dictionaries of numbers and text: one model, the passes of recent prompts, and its views.

Every number is a sum that the library gives, with its `gap`. Positions are counted over all tokens of a
prompt. Nothing here knows of the web.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.circuits import Features, full_ov
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, TensorLensError
from tensorlens_tl.explorer.calls import Call, code_of
from tensorlens_tl.explorer.generated import call_of, view_of
from tensorlens_tl.explorer.images import Images, on_image
from tensorlens_tl.explorer.parts import (
    TOP,
    baseline_name,
    component_view,
    feature_effects_view,
    feature_view,
    graph_view,
    neuron_view,
    why_rows,
    with_labels,
)
from tensorlens_tl.explorer.passes import Passes, has_chat
from tensorlens_tl.explorer.questions import Question
from tensorlens_tl.explorer.targets import aim_of, next_logits, query_of, target_of
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes import Difference, FrozenPass
from tensorlens_tl.passes.operator import chosen_head, token_label
from tensorlens_tl.registry import get_method, list_methods

View = dict[str, Any]

BEST = 10
"""Next tokens that are listed."""
NODES = 40
"""Nodes of the graph, where the page asks for no other number."""
MOST_NODES = 200
"""Nodes of the graph at most: more are a thicket."""


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
        self._calls: list[Call | str] = []
        self.images = Images(model, images, processor)
        self._passes = Passes(model, other, self.images, passes)
        self._views: dict[str, Callable[[Question], View]] = {
            "prompt": self._prompt,
            "tokens": self._tokens,
            "components": self._components,
            "head": self._head,
            "routes": self._routes,
            "ablate": self._ablate,
            "graph": self._graph,
            "neurons": self._neurons,
            "features": self._features,
            "feature": self._feature,
            "generated": self._generated,
            "image": self._image,
        }

    def view(self, name: str, fields: Mapping[str, Any]) -> View:
        """One view of one question, with the Python that gives the same numbers as ``"code"``.

        A model that has changed since (other weights, configuration or hooks) is frozen again, and ``"version"``, how
        often that happened so far, is one more.

        Args:
            name: ``"prompt"``, ``"tokens"``, ``"components"``, ``"head"``, ``"routes"``, ``"ablate"``, ``"graph"``,
                ``"neurons"``, ``"features"``, ``"feature"``, ``"generated"`` or ``"image"``.
            fields: those of a `Question`.

        Raises:
            InvalidInputError: no such view, or a field that is none.
            TensorLensError: what the library refuses.
        """
        if name not in self._views:
            raise InvalidInputError(f"explorer: view {name!r}; use one of {', '.join(self._views)}.")
        question = Question.of(fields)
        self._passes.refresh()
        try:
            answer = self._computed(name, question)
        except FrozenModelError:  # it changed while it was asked
            self._passes.clear()
            answer = self._computed(name, question)
        self.question = question
        code = code_of(question, self._calls, two_models=self.other is not None)
        return answer | {"code": code, "version": self._passes.version}

    def _computed(self, name: str, question: Question) -> View:
        self._calls = []
        return self._views[name](question)

    def about(self) -> View:
        """The model, the methods that the page offers, and which inputs it takes."""
        methods = [{"name": method, "about": _first_sentence(method)} for method in list_methods()]
        view: View = {"name": self.name, "two_models": self.other is not None, "methods": methods}
        view["dictionaries"] = [dictionary.hook for dictionary in self.dictionaries]
        view |= {"chat": has_chat(self.model), "version": self._passes.version}
        model = ModelView(self.model)
        if model.reads == "images":
            classes = [token_label(model, token) for token in range(model.d_vocab)]
            view |= {"images": self.images.given, "classes": classes, "processor": self.images.has_processor}
        return view

    # ------------------------------------------------------------------ passes

    def frozen(self, question: Question, *, second: bool = False) -> FrozenPass:
        """The pass of a question's prompt or image, or of its second prompt, held for later questions."""
        return self._passes.frozen(question, second=second)

    def change(self, question: Question) -> Difference:
        """The difference of two prompts' runs, first less second; of two models the second prompt runs on `other`."""
        return self._passes.change(question)

    def _result(self, run: FrozenPass | Difference, path: str, *places: int, **options: Any) -> Any:
        """Call a public function, and remember the call for the code and its result for Python."""
        return self._answer(Call(path, places, options), run)

    def _answer(self, call: Call, subject: Any) -> Any:
        self.last = call(subject)
        self._calls.append(call)
        return self.last

    def _run(self, question: Question) -> FrozenPass | Difference:
        if question.other is None:
            return self.frozen(question)
        return self.change(question)

    # ------------------------------------------------------------------ views

    def _prompt(self, question: Question) -> View:
        """Tokens of the prompt, and what the model says after the query; of two runs, what each of them says."""
        frozen = self.frozen(question)
        chances = next_logits(self._passes, question).double().softmax(-1)
        target = target_of(self._passes, question)
        view = {
            "tokens": frozen.str_tokens[0],
            "query": query_of(self._passes, question),
            "next": _likeliest(frozen, chances),
            **{name: _token(frozen, token) for name, token in target.items()},
            "proof": max(frozen.errors.values(), default=0.0),
            "numbers": [self._number(frozen, target, query_of(self._passes, question))],
        }
        if question.other is not None:
            change = self.change(question)
            view |= {"tokens": change.str_tokens[0], "proof": max(change.errors.values(), default=0.0)}
            view["changed"] = (change.a.tokens != change.b.tokens)[0].tolist()
            view["numbers"] = [self._number(run, target, view["query"]) for run in change.runs]
            logits = change.b.logits(view["query"])
            assert logits is not None
            others = logits[0, 0].double().softmax(-1)
            view["next"] = _of_both(frozen, chances, others)
            self._calls.append(f"result = [of.logits({view['query']}) for of in run.runs]")
        else:
            self._calls.append(f"result = run.logits({view['query']})")
        return view

    def _number(self, run: FrozenPass, target: Mapping[str, int], query: int) -> float:
        """One run's own logit of the target, or logit difference."""
        logits = run.logits(query)
        assert logits is not None
        number = logits[0, 0, target["target"]]
        if "minus" in target:
            number = number - logits[0, 0, target["minus"]]
        return float(number)

    def _tokens(self, question: Question) -> View:
        """What each token gives to the target, by the method that was chosen."""
        run = self._run(question)
        method = "difference" if question.other is not None else question.method
        options: dict[str, Any] = {"query": query_of(self._passes, question)}
        if get_method(method).explains_prediction():
            options |= target_of(self._passes, question)
        attribution = self._result(run, "attribute", method=method, **options)
        view: View = {"scores": attribution.scores[0, 0].tolist(), "label": attribution.target, "method": method}
        view["additive"] = attribution.additive
        for name in ("bias", "total", "gap"):
            value = getattr(attribution, name)
            view[name] = None if value is None else float(value[0, 0])
        if method == "difference" and question.other is None:
            view["baseline"] = baseline_name(self.frozen(question))
        return view

    def _components(self, question: Question) -> View:
        """The direct effects of heads and MLPs, and of all else that writes to the stream."""
        run = self._run(question)
        terms = self._result(run, "circuits.logit_attribution", by="head", **aim_of(self._passes, question))
        return component_view(terms, self.frozen(question)) | {
            "total": float(terms.total[0, 0]),
            "gap": float(terms.gap[0, 0]),
            "label": terms.target,
        }

    def _head(self, question: Question) -> View:
        """Where a head attends, what it moves, what it promotes, and why it attends there.

        Raises:
            InvalidInputError: no head was named.
        """
        if question.layer is None or question.head is None:
            raise InvalidInputError("explorer: layer and head are missing; click a head.")
        run = self._run(question)
        frozen = self.frozen(question)
        layer, head = chosen_head(frozen.view, question.layer, question.head)
        aim = aim_of(self._passes, question)
        query = aim["query"]
        if question.key is not None and question.key > query and frozen.prompt.class_at is None:
            raise InvalidInputError(f"explorer: key is {question.key}; the query, {query}, comes before it.")
        name = f"L{layer}H{head}"
        patterns = [frozen.pattern(layer)[0, head, query]]
        if isinstance(run, Difference):
            patterns.append(run.b.pattern(layer)[0, head, query])
        terms = self._result(run, "circuits.logit_attribution", by="head_token", **aim)
        assert terms.keys is not None
        moved = terms.keys[0, 0, terms.names.index(name)]
        key = question.key
        if key is None:
            key = int((patterns[0] - patterns[-1]).abs().argmax()) if len(patterns) > 1 else int(patterns[0].argmax())
        return {
            "name": name,
            "pattern": patterns[0].tolist(),
            "other_pattern": patterns[1].tolist() if len(patterns) > 1 else None,
            "moved": moved.nan_to_num(0.0).tolist(),
            "score": float(terms[name][0, 0]),
            "key": key,
            "reads": frozen.str_tokens[0][key],
            "why": self._why(run, layer, head, query, key),
            "promotes": _promotes(frozen, layer, head, key),
        }

    def _why(self, run: FrozenPass | Difference, *place: int) -> View:
        """Why a head attends there: the score, or the change of its pattern, by components.

        Args:
            run: one run, or the difference of two.
            place: layer, head, query and key.
        """
        of = "pattern" if isinstance(run, Difference) else "score"
        try:
            parts = self._result(run, "circuits.qk_attribution", *place, by="head", of=of)
        except TensorLensError as error:
            return {"refused": str(error)}
        return {
            "of": of,
            "rows": why_rows(parts),
            "total": float(parts.total[0]),
            "gap": float(parts.gap[0]),
        }

    def _routes(self, question: Question) -> View:
        """By which routes the change of two runs passes each layer.

        Raises:
            InvalidInputError: one prompt alone.
        """
        if question.other is None:
            raise InvalidInputError("explorer: routes are of two prompts; type a second one.")
        change = self.change(question)
        passed = self._result(change, "circuits.routes", **aim_of(self._passes, question))
        table = passed.to_dataframe().pivot_table(index="layer", columns="route", values="score", sort=False)
        table = table.loc[:, (table != 0).any()]
        return {
            "layers": list(table.index),
            "routes": list(table.columns),
            "scores": table.to_numpy().tolist(),
            "total": float(passed.total[0, 0]),
            "gap": float(passed.gap.max()),
        }

    def _ablate(self, question: Question) -> View:
        """What the target loses without one node, in the frozen model and in the live one.

        Raises:
            InvalidInputError: no node was named.
        """
        if question.node is None:
            raise InvalidInputError("explorer: node is missing; click a head or an MLP.")
        if question.other is not None:
            raise InvalidInputError("explorer: an ablation is of one run; leave the second prompt out.")
        frozen = self.frozen(question)
        aim = aim_of(self._passes, question)
        losses: View = {}
        total = 0.0
        for live in (False, True):
            terms = self._result(frozen, "circuits.total_effects", nodes=[question.node], live=live, **aim)
            losses["live" if live else "frozen"] = float(terms.scores[0, 0, 0])
            total = float(terms.total[0, 0])
        return {"node": question.node, "before": total, "after": total - losses["live"], **losses}

    def _graph(self, question: Question) -> View:
        """The strongest nodes through which the target came about, and the edges between them."""
        count = min(question.nodes or NODES, MOST_NODES)
        run = self._run(question)
        graph = self._result(
            run, "circuits.contribution_graph", **aim_of(self._passes, question), nodes=count, threshold=0
        )
        return graph_view(graph)

    def _neurons(self, question: Question) -> View:
        """The neurons of one MLP that write most to the target.

        Raises:
            InvalidInputError: no MLP was named.
        """
        if question.node is None:
            raise InvalidInputError("explorer: node is missing; click an MLP.")
        terms = self._result(
            self._run(question), "circuits.logit_attribution", **aim_of(self._passes, question), by="neuron"
        )
        return neuron_view(terms, question.node)

    def _features(self, question: Question) -> View:
        """The features of a dictionary that give most to the target."""
        features = self._active(question)
        call = Call("circuits.feature_effects", options=aim_of(self._passes, question), subject="features")
        return feature_effects_view(features, self._answer(call, features))

    def _feature(self, question: Question) -> View:
        """What makes one feature active, and which tokens it promotes.

        Raises:
            InvalidInputError: no feature was named.
        """
        if question.feature is None:
            raise InvalidInputError("explorer: feature is missing; click a feature.")
        features = self._active(question)
        at = query_of(self._passes, question) if question.at is None else question.at
        call = Call("circuits.feature_attribution", (question.feature,), {"query": at}, "features")
        sources = self._answer(call, features)
        shown = self.dictionaries[question.dictionary or 0].examples(self.model, features.frozen, question.feature)
        return feature_view(features, question.feature, at, sources, shown)

    def _active(self, question: Question) -> Features:
        """The active features of the dictionary that is asked about.

        Raises:
            InvalidInputError: there is none, or two prompts are compared.
        """
        number = question.dictionary or 0
        if number >= len(self.dictionaries):
            raise InvalidInputError(
                f"explorer: dictionary {number} of {len(self.dictionaries)}; pass explore(model, dictionaries=…)."
            )
        if question.other is not None:
            raise InvalidInputError("explorer: features are of one run; leave the second prompt out.")
        dictionary = self.dictionaries[number]
        self._calls.append(dictionary.code)
        return dictionary.features(self.frozen(question))

    def _generated(self, question: Question) -> View:
        """What the model writes, and what a stretch of it came from.

        Raises:
            InvalidInputError: nothing is to be written, or a comparison.
        """
        call = call_of(question)
        written = self._passes.written(question)
        attribution = self._answer(call, written)
        return view_of(written, attribution)

    def _image(self, question: Question) -> View:
        """The scores of an image's patches, with the image as the model reads it.

        Raises:
            InvalidInputError: no image.
            UnsupportedModelError: patches that do not tile it.
        """
        if question.image is None:
            raise InvalidInputError("explorer: image is missing; choose or upload one.")
        return self._tokens(question) | on_image(self.frozen(question))


def _promotes(frozen: FrozenPass, layer: int, head: int, key: int) -> list[View]:
    """The tokens whose logits a head raises most where it reads the key's token, by its weights alone."""
    try:
        circuit = full_ov(frozen, layer, head)
    except TensorLensError:
        return []
    row = circuit.A[frozen.tokens[0, key]] @ circuit.B
    best = row.topk(min(TOP, len(row)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [_token(frozen, token) | {"score": score} for token, score in pairs]


def _likeliest(frozen: FrozenPass, chances: Tensor) -> list[View]:
    """The tokens that may come next, likeliest first."""
    best = chances.argsort(descending=True)[:BEST].tolist()
    return [_token(frozen, token) | {"chance": float(chances[token])} for token in best]


def _of_both(frozen: FrozenPass, chances: Tensor, others: Tensor) -> list[View]:
    """The tokens that either of two runs finds likely, with the probability in each."""
    order = torch.maximum(chances, others).argsort(descending=True)[:BEST].tolist()
    return [
        _token(frozen, token) | {"chance": float(chances[token]), "other_chance": float(others[token])}
        for token in order
    ]


def _token(frozen: FrozenPass, token: int) -> View:
    return {"id": token, "text": token_label(frozen.view, token)}


def _first_sentence(method: str) -> str:
    return (get_method(method).__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("`", "")
