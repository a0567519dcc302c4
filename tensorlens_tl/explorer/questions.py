"""What the page asks: a prompt, a position, a target, checked as they arrive."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import RUNNER_UP

LONGEST_TEXT = 20_000
"""Characters of a prompt: more is refused before a tokenizer reads it."""
LONGEST_NAME = 200
"""Characters of a method's or a node's name."""
MOST_NEW = 200
"""Tokens that the model may be asked to write."""


@dataclass(frozen=True)
class Question:
    """One question of the page.

    Attributes:
        text: the prompt; empty of an image.
        other: the prompt of the second run, or None: then a view is of one run.
        query: the explained position; None is the last.
        target, minus: token ids; a target of None is the likeliest token, a minus of None no other token, and a minus
            may be the text of a token, as it was typed.
        runner_up: whether the target is compared with the next likeliest token.
        method: of the token scores.
        layer, head: the head that is looked at, or None.
        key: the position that the head attends to, or None: the one it attends to most.
        node: what is ablated or taken apart, such as ``"L1H3"`` or ``"MLP2"``, or None.
        nodes: how many the graph has.
        dictionary: which of the session's dictionaries the features are of, counted from 0.
        feature, at: a feature, and the position that it is active at; None for the query.
        chat: whether prompts are messages of a user, in the tokenizer's chat template.
        image: the name of an image that is read in place of a prompt, or None.
        other_image: the name of the image of the second run, or None.
        new: how many tokens the model writes after the prompt, or None.
        start, stop: a stretch of these, `stop` excluded; without them all.
        hops: how often what reached generated tokens is sent on to what made those, or ``"all"``.
    """

    text: str
    other: str | None = None
    query: int | None = None
    target: int | None = None
    minus: int | str | None = None
    runner_up: bool = True
    method: str = "tensorlens"
    layer: int | None = None
    head: int | None = None
    key: int | None = None
    node: str | None = None
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
    def second(self) -> "Question":
        """The same of the second run alone."""
        return replace(self, text=self.other or "", image=self.other_image, other=None, other_image=None)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Question":
        """From what the page sent.

        Raises:
            InvalidInputError: says which field is wrong, and what it must be.
        """
        minus = fields.get("minus", RUNNER_UP)
        image = _text(fields, "image")
        other_image = _text(fields, "other_image")
        text = _text(fields, "text") or ""
        other = _text(fields, "other")
        if not text and image is None:
            _refuse("text", "empty", "type a prompt")
        if other_image is not None and image is None:
            _refuse("image", "missing", "choose the first image, too")
        if other is not None and image is not None:
            _refuse("other", "a prompt and image an image", "send other_image to compare two images")
        return cls(
            text=text,
            other=other,
            query=_number(fields, "query"),
            target=_number(fields, "target"),
            minus=None if minus == RUNNER_UP else _token(fields, "minus"),
            runner_up=minus == RUNNER_UP,
            method=_text(fields, "method", LONGEST_NAME) or "tensorlens",
            layer=_number(fields, "layer"),
            head=_number(fields, "head"),
            key=_number(fields, "key"),
            node=_text(fields, "node", LONGEST_NAME),
            **{name: _number(fields, name) for name in ("nodes", "dictionary", "feature", "at")},
            chat=_switch(fields, "chat"),
            image=image,
            other_image=other_image,
            new=_new(fields),
            start=_number(fields, "start"),
            stop=_number(fields, "stop"),
            hops=_hops(fields),
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


def _token(fields: Mapping[str, Any], name: str) -> int | str | None:
    """A token's id or its text, or None."""
    if isinstance(fields.get(name), str):
        return _text(fields, name, LONGEST_NAME)
    return _number(fields, name)


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    """True or False; False where nothing is said."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(name, repr(value)[:80], "send true or false")
    return bool(value)


def _new(fields: Mapping[str, Any]) -> int | None:
    """How many tokens to write, or None."""
    value = _number(fields, "new")
    if value is not None and not 1 <= value <= MOST_NEW:
        _refuse("new", str(value)[:80], f"ask for 1 to {MOST_NEW} tokens")
    return value


def _hops(fields: Mapping[str, Any]) -> int | str:
    """A number of hops, or "all"; 0 where nothing is said."""
    value = fields.get("hops")
    if value == "all":
        return "all"
    return _number(fields, "hops") or 0


def _refuse(name: str, what: str, advice: str) -> Any:
    raise InvalidInputError(f"explorer: {name} is {what}; {advice}.")
