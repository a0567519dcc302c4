"""What the page asks, and what answers it: a question, the frozen passes that it is about, and calls of the library.

`Question` is what arrived, checked; `Passes` holds the runs of recent questions; an `Inquiry` is one question while a
view answers it, by calls of public functions that "copy as Python" prints.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from jaxtyping import Float
from torch import Tensor

import tensorlens_tl
from tensorlens_tl.circuits import FeatureExamples, Features, feature_examples, features
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.explorer.images import Images
from tensorlens_tl.explorer.predictions import Predictor
from tensorlens_tl.generation import FrozenGeneration, freeze_generation
from tensorlens_tl.models import RUNNER_UP, ModelView
from tensorlens_tl.passes import Difference, FrozenPass, difference, freeze
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.target import token_ids
from tensorlens_tl.registry import DEFAULT

LONGEST_TEXT = 20_000
"""Characters of a prompt: more is refused before a tokenizer reads it."""
LONGEST_NAME = 200
"""Characters of a method's or a node's name."""
LONGEST_LIST = 2_000
"""Characters of the names of ablated nodes."""
MOST_NEW = 200
"""Tokens that the model may be asked to write."""
MOST_BYTES = 2**29
"""Bytes of activations that each store of passes, differences or texts holds for later questions; what the present
question needs is held whatever its size."""
MOST_RESULTS = 8
"""Results of the present question's runs that are there for the next click."""
TOP = 12
"""Neurons, features, tokens and parts of an attention score that are listed."""


# --------------------------------------------------------------------------- what the page asks


@dataclass(frozen=True)
class Question:
    """One question of the page.

    Attributes:
        text: the prompt; empty of an image.
        other: the prompt of the second run, or None: then a view is of one run.
        query: the explained position; None is the last.
        target, minus: token ids; a target of None is the likeliest token, a minus of None no other token, and a minus
            may be the text of a token, as it was typed.
        runner_up: whether the target is compared with the next likeliest token; of two runs with the second's first
            choice, where it is another one.
        method: of the token scores.
        rule: of a single run, what stands in place of what is not linear, in the graph and in token scores of the
            default method; None is the frozen model.
        layer, head: the head that is looked at, or None.
        key: the position that the head attends to, or None: the one it attends to most; of two runs the one that gains
            most.
        part: the row of a list that is opened, such as ``"query L20"``: tokens by position, layers, heads and MLPs.
        node: the MLP that is taken apart, such as ``"MLP2"``, or None.
        without: the heads and MLPs that are ablated together, such as ``"L1H3,MLP2"``, or None.
        by: what takes their place: ``"zero"``, ``"mean"``, or ``"other"``, the value of the second run.
        nodes: how many the graph has.
        dictionary: which of the session's dictionaries the features are of, counted from 0.
        feature, at: a feature, and the position that it is active at; None for the query.
        chat: whether prompts are messages of a user, in the tokenizer's chat template.
        image: the name of an image that is read in place of a prompt, or None.
        other_image: the name of the image of the second run, or None.
        new: how many tokens the model writes after the prompt, or None.
        start, stop: a stretch of these, `stop` excluded; without them all. With a start, the other views are of prompt
            and continuation, and explain the token there.
        hops: how often what reached generated tokens is sent on to what made those, or ``"all"``.
    """

    text: str
    other: str | None = None
    query: int | None = None
    target: int | None = None
    minus: int | str | None = None
    runner_up: bool = True
    method: str = DEFAULT
    rule: str | None = None
    layer: int | None = None
    head: int | None = None
    key: int | None = None
    part: str | None = None
    node: str | None = None
    without: str | None = None
    by: str = "zero"
    nodes: int | None = None
    dictionary: int | None = None
    feature: int | None = None
    at: int | None = None
    chat: bool = False
    image: str | None = None
    other_image: str | None = None
    new: int | None = None
    start: int | None = None
    stop: int | None = None
    hops: int | str = 0

    @property
    def is_comparison(self) -> bool:
        """Whether it is about two runs."""
        return self.other is not None or self.other_image is not None

    @property
    def message(self) -> list[dict[str, str]]:
        """The prompt as a chat of one message."""
        return [{"role": "user", "content": self.text}]

    @property
    def is_of_written(self) -> bool:
        """Whether its runs are of prompts with what the model writes after them."""
        return self.new is not None and self.start is not None

    @property
    def run(self) -> tuple[str, bool, str | None, int | None]:
        """What its first run is of."""
        return self.text, self.chat, self.image, self.new if self.is_of_written else None

    @property
    def second(self) -> "Question":
        """The same of the second run alone."""
        return replace(self, text=self.other or "", image=self.other_image, other=None, other_image=None)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Question":
        """From what the page sent."""
        texts: dict[str, Any] = {name: _text(fields, name) for name in ("other", "image", "other_image")}
        text = _text(fields, "text") or ""
        if not text and texts["image"] is None:
            _refuse("text", "empty", "type a prompt")
        if texts["other_image"] is not None and texts["image"] is None:
            _refuse("image", "missing", "choose the first image, too")
        if texts["other"] is not None and texts["image"] is not None:
            _refuse("other", "a prompt and image an image", "send other_image to compare two images")
        rule = _text(fields, "rule", LONGEST_NAME)
        if rule is not None and (texts["other"] is not None or texts["other_image"] is not None):
            _refuse("rule", f"{rule!r}, and there are two runs", "a rule applies to one run; leave it out")
        names = "query target layer head key nodes dictionary feature at new start stop"
        numbers: dict[str, Any] = {name: _number(fields, name) for name in names.split()}
        new = numbers["new"]
        if new is not None and not 1 <= new <= MOST_NEW:
            _refuse("new", str(new)[:80], f"ask for 1 to {MOST_NEW} tokens")
        minus = fields.get("minus", RUNNER_UP)
        runner_up = minus == RUNNER_UP
        if runner_up:
            minus = None
        elif isinstance(minus, str):
            minus = _text(fields, "minus", LONGEST_NAME)
        else:
            minus = _number(fields, "minus")
        chat = fields.get("chat")
        if chat is not None and not isinstance(chat, bool):
            _refuse("chat", repr(chat)[:80], "send true or false")
        hops = fields.get("hops")
        if hops != "all":
            hops = _number(fields, "hops") or 0
        return cls(
            text,
            minus=minus,
            runner_up=runner_up,
            method=_text(fields, "method", LONGEST_NAME) or DEFAULT,
            rule=rule,
            part=_text(fields, "part", LONGEST_NAME),
            node=_text(fields, "node", LONGEST_NAME),
            without=_text(fields, "without", LONGEST_LIST),
            by=_text(fields, "by", LONGEST_NAME) or "zero",
            chat=bool(chat),
            hops=hops,
            **texts,
            **numbers,
        )


def _text(fields: Mapping[str, Any], name: str, longest: int = LONGEST_TEXT) -> str | None:
    """A text, or None where there is none or it is empty."""
    value = fields.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        _refuse(name, type(value).__name__, "send a text")
    if len(value) > longest:
        _refuse(name, f"{len(value)} characters long", f"shorten it to {longest} characters")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        _refuse(name, "a text with half of a surrogate pair", "remove it")
    return value


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    """A whole number of at least 0, or None."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        _refuse(name, repr(value)[:80], "send a whole number of at least 0")
    return value


def _refuse(name: str, what: str, advice: str) -> Any:
    raise InvalidInputError(f"explorer: {name} is {what}; {advice}.")


# --------------------------------------------------------------------------- the runs of recent questions

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The values that were used last, by key.

    Args:
        most: how many.
        size: bytes of a value; where they are more than `MOST_BYTES` in all, those used longest ago are dropped, too.

    >>> from tensorlens_tl.explorer.questions import Recent
    >>> squares = Recent(2)
    >>> [squares.get(number, lambda: number**2) for number in (1, 2, 3)], len(squares)
    ([1, 4, 9], 2)
    """

    def __init__(self, most: int, size: Callable[[Value], int] = lambda _: 0) -> None:
        self._most = most
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._sizes: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """What is stored under a key, or computed now."""
        if key not in self._values:
            self._values[key] = compute()
            self._sizes[key] = self._size(self._values[key])
        self._values.move_to_end(key)
        while len(self) > 1 and (len(self) > self._most or sum(self._sizes.values()) > MOST_BYTES):
            oldest, _ = self._values.popitem(last=False)
            del self._sizes[oldest]
        return self._values[key]

    def clear(self) -> None:
        """Drop all of them."""
        self._values.clear()
        self._sizes.clear()


class Passes:
    """The passes, differences and generated texts of a session's recent questions, within a number and a size.

    They belong to the model as it was. Where its weights, its configuration or its hooks are others since (it was
    fine-tuned or edited between two clicks), all of them are dropped, and the next question freezes again.

    Args:
        model, other: the models; the second run of a comparison is of `other`, where it is given.
        images: those that questions name.
        most: how many passes are held.

    Attributes:
        version: how often the model was seen to have changed.
    """

    def __init__(self, model: Any, other: Any, images: Images, most: int) -> None:
        self.model = model
        self.other = other
        self.version = 0
        self._images = images
        self._frozen: tuple[Recent[FrozenPass], Recent[FrozenPass]] = (Recent(most, _bytes), Recent(most, _bytes))
        self._differences = Recent[Difference](most // 2, lambda change: _bytes(change.a, change.b))
        self._written = Recent[FrozenGeneration](max(1, most // 4), lambda written: _bytes(*_runs(written)))
        self._logits = Recent[Tensor | None](4 * most)
        self._results = Recent[Any](MOST_RESULTS)
        self._results_of: Hashable = None
        self._predictors: dict[bool, Predictor] = {}

    def predictor(self, *, second: bool = False) -> Predictor:
        """The model of a question's first or second run, as it is now."""
        of_other, model = self._model(second)
        if of_other not in self._predictors:
            self._predictors[of_other] = Predictor(model)
        return self._predictors[of_other]

    def _model(self, second: bool) -> tuple[bool, Any]:
        """Whether a question's first or second run is of another model, and the model."""
        of_other = second and self.other is not None
        return of_other, self.other if of_other else self.model

    def frozen(self, question: Question, *, second: bool = False) -> FrozenPass:
        """The pass of a question's prompt or image; `second` is that of its second one.

        Raises:
            TensorLensError: what `freeze` refuses.
        """
        if question.is_of_written:
            return _runs(self.written(question, second=second))[0]
        of_other, model = self._model(second)
        single = question.second if second else question

        def frozen_now() -> FrozenPass:
            few = self.predictor(second=second).has_few_logits(self.prompt(question, second=second))
            return freeze(model, self._input(single), query="all" if few else None)

        return self._frozen[of_other].get(single.run, frozen_now)

    def prompt(self, question: Question, *, second: bool = False) -> Prompt:
        """The tokens of a question's first or second run; nothing is run, unless the model writes some of them."""
        if question.is_of_written:
            return self.frozen(question, second=second).capture.prompt
        return self.predictor(second=second).prompt(self._input(question.second if second else question))

    def change(self, question: Question) -> Difference:
        """The difference of a question's two runs, first less second."""
        key = (*question.run, *question.second.run)

        def of_two() -> Difference:
            return difference(self.frozen(question), self.frozen(question, second=True))

        return self._differences.get(key, of_two)

    def result(self, question: Question, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What belongs to a question's runs under a key, or computed now: until a question of other runs is asked."""
        runs = (question.run, question.second.run if question.is_comparison else None)
        if runs != self._results_of:
            self._results.clear()
            self._results_of = runs
        return self._results.get(key, compute)

    def written(self, question: Question, *, second: bool = False) -> FrozenGeneration:
        """What the model writes after a question's prompt; `second` is after its second one.

        Raises:
            TensorLensError: what `freeze_generation` refuses.
        """
        of_other, model = self._model(second)
        single = question.second if second else question
        prompt = self._input(single)
        key = (of_other, single.text, single.chat, single.new)
        return self._written.get(key, lambda: freeze_generation(model, prompt, max_new_tokens=single.new))

    def of_one_length(self, question: Question) -> Question:
        """The same question of as many written tokens in both runs, where one text ends before the other."""
        if not (question.is_of_written and question.is_comparison):
            return question
        counts = [len(self.written(question, second=second).positions[0]) for second in (False, True)]
        return replace(question, new=min(counts))

    def logits(self, question: Question, query: int, *, second: bool = False) -> Float[Tensor, "d_vocab"] | None:
        """The model's logits at a position of the first or second run, by one run; None of a model that has none."""
        single = question.second if second else question
        predictor = self.predictor(second=second)
        prompt = self.prompt(question, second=second)
        queries = list(range(prompt.tokens.shape[1])) if predictor.has_few_logits(prompt) else [query]
        key = (second and self.other is not None, *single.run, *queries[:1], len(queries))
        logits = self._logits.get(key, lambda: predictor.logits(prompt, queries))
        return None if logits is None else logits[queries.index(query)]

    def _input(self, question: Question) -> Any:
        """What the model reads of a question's first run: a text, a chat of one message, or pixels."""
        if question.image is not None:
            return self._images.pixels(question.image)
        if question.chat:
            return question.message
        return question.text

    def refresh(self) -> None:
        """Drop everything if a model has changed since it was read."""
        if not all(predictor.is_current() for predictor in self._predictors.values()):
            self.clear()
        for second in {False, self.other is not None}:
            self.predictor(second=second)

    def clear(self) -> None:
        """Drop everything: the model has changed."""
        self.version += 1
        self._predictors.clear()
        for store in (*self._frozen, self._differences, self._written, self._logits, self._results):
            store.clear()


def _runs(written: FrozenGeneration) -> list[FrozenPass]:
    """The pass of a generated text."""
    return [run for run in written.frozen.runs if isinstance(run, FrozenPass)]


def _bytes(*runs: FrozenPass) -> int:
    return sum(tensor.nbytes for frozen in runs for tensor in frozen.capture.activations.values())


# --------------------------------------------------------------------------- dictionaries


@dataclass(frozen=True)
class LabelledDictionary:
    """A sparse dictionary, and what its features are called, as `circuits.feature_labels` takes it."""

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
    """Dictionaries, one or several or none, with the labels of each."""
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


# --------------------------------------------------------------------------- a question while it is answered


@dataclass(frozen=True)
class Call:
    """A call of a public function that can be made, and printed: a view shows what "copy as Python" gives.

    Attributes:
        path: of the function, from the package: ``"circuits.routes"``; or the method's name.
        places: positional arguments after the run.
        options: keyword arguments.
        subject: what the code calls its first argument.
        is_method: whether it is a method of the run, such as ``attribute`` of generated text.

    >>> from tensorlens_tl.explorer.questions import Call
    >>> call = Call("attribute", options={"target": 5, "method": "rollout"})
    >>> print(call.code)
    tlens.attribute(run, target=5, method='rollout')
    """

    path: str
    places: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    subject: str = "run"
    is_method: bool = False

    def __call__(self, run: Any) -> Any:
        """Make it, of a pass, of the difference of two, of generated text, or of the features of a pass."""
        if self.is_method:
            return getattr(run, self.path)(*self.places, **self.options)
        function: Any = tensorlens_tl
        for name in self.path.split("."):
            function = getattr(function, name)
        return function(run, *self.places, **self.options)

    @property
    def code(self) -> str:
        """The call as Python."""
        arguments = [*map(repr, self.places), *(f"{name}={value!r}" for name, value in self.options.items())]
        if self.is_method:
            return f"{self.subject}.{self.path}({', '.join(arguments)})"
        return f"tlens.{self.path}({', '.join([self.subject, *arguments])})"


@dataclass(eq=False)
class Inquiry:
    """One question, while a view answers it.

    Attributes:
        question: what the page asks.
        passes: where its runs are, or are frozen now.
        dictionaries: in which features are shown.
        calls: those that answered it so far, or lines of Python, in their order.
        last: what the last of these calls returned; None before the first.
    """

    question: Question
    passes: Passes
    dictionaries: Sequence[LabelledDictionary] = ()
    calls: list[Call | str] = field(default_factory=list[Call | str])
    last: Any = None

    @property
    def frozen(self) -> FrozenPass:
        """The pass of its prompt or image; of a comparison the first run's."""
        return self.passes.frozen(self.question)

    @property
    def change(self) -> Difference:
        """The difference of its two runs, first less second."""
        return self.passes.change(self.question)

    @property
    def run(self) -> FrozenPass | Difference:
        """What it is about: one run, or the difference of two."""
        if self.question.is_comparison:
            return self.change
        return self.frozen

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The tokens of its run, or of its two."""
        return [self.passes.prompt(self.question, second=second) for second in self._runs]

    @property
    def _runs(self) -> list[bool]:
        return [False, True] if self.question.is_comparison else [False]

    @cached_property
    def query(self) -> int:
        """The position, counted over all tokens; of an image, the one that its class is read at."""
        return self._query(second=False)

    def _query(self, *, second: bool) -> int:
        """That of the first run, or of the second, which of prompts of other lengths is another."""
        prompt = self.prompts[int(second)]
        if prompt.class_at is not None:
            return prompt.class_at
        length = prompt.tokens.shape[1]
        query = self.question.query
        if query is None and self.question.is_of_written:
            return self._before_written(second=second)
        if query is None or (second and not self.is_aligned):
            return length - 1
        if query >= length:
            raise InvalidInputError(f"explorer: query is {query}; the prompt has {length} tokens.")
        return query

    def _before_written(self, *, second: bool) -> int:
        """The position that predicts the generated token that is asked about."""
        first, stop = self.passes.written(self.question, second=second).generated_ranges()[0]
        start = self.question.start or 0
        if start >= stop - first:
            raise InvalidInputError(f"explorer: start is {start}; the model wrote {stop - first} tokens.")
        return first + start - 1

    @property
    def is_aligned(self) -> bool:
        """Whether its two prompts have as many tokens, so that a difference can be taken."""
        return len({prompt.tokens.shape[1] for prompt in self.prompts}) == 1

    @cached_property
    def logits(self) -> list[Float[Tensor, "d_vocab"]]:
        """The logits of its run at the query, or of its two; of prompts of different lengths the second one's last."""
        logits = [self.passes.logits(self.question, self._query(second=of), second=of) for of in self._runs]
        if any(of is None for of in logits):
            raise UnsupportedModelError("explorer: this model predicts no tokens, which the page asks about.")
        self.view.require_probabilities("explorer")
        return [of for of in logits if of is not None]

    @property
    def view(self) -> ModelView:
        """The model of its first run."""
        return self.passes.predictor().view

    @property
    def second_choice(self) -> int | None:
        """Of two runs the token that the second finds likeliest."""
        return int(self.logits[1].argmax()) if self.question.is_comparison else None

    @cached_property
    def target(self) -> dict[str, int]:
        """Target and minus, or their defaults, as options of the library's functions."""
        logits = self.logits[0]
        size = len(logits)
        minus = self.question.minus
        if isinstance(minus, str):  # as text, even where it is a word for a rank such as "first-choice"
            minus = int(token_ids(self.view, minus, 1, "explorer: minus"))
        for name, token in (("target", self.question.target), ("minus", minus)):
            if token is not None and token >= size:
                raise InvalidInputError(f"explorer: {name} is {token}; the vocabulary has {size} tokens.")
        best = logits.topk(min(2, size)).indices.tolist()
        target = self.question.target
        if target is None:
            target = best[0]
            if minus == best[0]:  # no token stands against itself
                target = best[-1]
        if self.question.runner_up:
            minus = runner_up(logits, target)
            if self.second_choice not in (None, target):
                minus = self.second_choice
        if minus == target and size == 1:  # the only class there is
            minus = None
        return {"target": target} if minus is None else {"target": target, "minus": minus}

    @property
    def rule(self) -> dict[str, str]:
        """Its rule as an option of the library's functions, where it has one."""
        return {} if self.question.rule is None else {"rule": self.question.rule}

    @property
    def aim(self) -> dict[str, int]:
        """Target, minus and query as options of the library's functions."""
        return {**self.target, "query": self.query}

    def result(self, run: FrozenPass | Difference, path: str, *places: int, **options: Any) -> Any:
        """Call a public function of the question's runs, by its path from the package: ``"circuits.routes"``.

        The same call is not made twice of the same runs. See `answer`.
        """
        call = Call(path, places, options)
        key = (path, places, *sorted(options.items()))
        return self.noted(call, self.passes.result(self.question, key, lambda: call(run)))

    def answer(self, call: Call, subject: Any) -> Any:
        """Make a call, and remember it for the code, and its result for Python."""
        return self.noted(call, call(subject))

    def noted(self, call: Call, result: Any) -> Any:
        """The result of a call, which is remembered with it."""
        self.last = result
        self.calls.append(call)
        return result

    @property
    def code(self) -> str:
        """Lines that give the results of its calls, the last of them as ``result``.

        There `model` is the model, and `tuned` the second one.
        """
        question = self.question
        two_models = self.passes.other is not None
        lines = ["import tensorlens_tl as tlens", "", "# model is the model that the page shows"]
        if two_models:
            lines[-1] += ", tuned the second one"
        if question.image is not None:
            lines.append(f"# pixels is the image {question.image}, [1, channel, height, width], as the model reads it")
        if question.other_image is not None:
            lines.append(f"# other_pixels is the image {question.other_image}")
        is_text = any(isinstance(call, Call) and call.is_method for call in self.calls)
        names = (("run", "model", _prompt(question)),)
        if question.is_comparison:
            second = "tuned" if two_models else "model"
            names += (("other", second, _prompt(question.second, "other_pixels")),)
        for name, model, prompt in names:
            written = f"tlens.generation.freeze_generation({model}, {prompt}, max_new_tokens={question.new})"
            if is_text:
                lines.append(f"{name} = {written}")
            elif question.is_of_written:
                lines.append(f"{name} = {written}.frozen")
            else:
                lines.append(f"{name} = tlens.freeze({model}, {prompt})")
        if question.is_comparison and not is_text and self.is_aligned:
            lines.append("run = tlens.difference(run, other)")
        lines += [call if isinstance(call, str) else f"result = {call.code}" for call in self.calls]
        return "\n".join(lines)


def runner_up(logits: Float[Tensor, "d_vocab"], target: int) -> int | None:
    """The likeliest token besides a target; None where there is no other."""
    best = logits.topk(min(2, len(logits))).indices.tolist()
    return next((token for token in best if token != target), None)


def _prompt(question: Question, pixels: str = "pixels") -> str:
    """What is frozen, as Python; `pixels` is what the code calls an image."""
    if question.image is not None:
        return pixels
    if question.chat:
        return repr(question.message)
    return repr(question.text)
