"""Entries of a result, as every `top()` returns them, and descriptions of what a result explains."""

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_number
from tensorlens_tl.drawing.marks import counted
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import NEXT
from tensorlens_tl.passes.target import EACH_NEXT, RANKED
from tensorlens_tl.passes.texts import joined

_TOKEN = r"""(?:-?\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_TOKENS = rf"\[{_TOKEN}(?:, {_TOKEN})*\]"
LIST_OF_TOKENS = rf"(?<![^ ])(?:{_TOKENS}|\[{_TOKENS}(?:, {_TOKENS})*\])$"
"""Matches tokens at the end of a target or its foil, written as a Python list, with one item per prompt or query."""

MINUS = " − "

SEVERAL_TARGETS = "a target of its own for each prompt"
"""The target of a result whose prompts have different ones."""

EACH_GENERATED = "each generated token"
"""The explained tokens of generated text, with one query per token."""

EACH_SPAN = "each prompt's span"
"""The explained spans of generated text after several prompts, with one query per span."""

EACH_MINUS = "each minus token"
"""The foil of generated tokens, where it differs between them."""

MEAN_QUERY = "mean over the queries"
"""The description of ``query="mean"``."""

OF_GENERATED = ("generated", "asked")
"""Options of a generated text's attribution: the range of generated tokens, and the positions of the explained ones."""

TOKENS_OF_QUERIES = "explained"
"""Option holding the texts of target and foil of each prompt and query, where they differ."""


class _Line(NamedTuple):
    name: str
    score: float
    position: int | tuple[int, int] | None = None


class Entry(_Line):
    """One part of a result with its score: a source token, a component, a path, or a pair of tokens.

    A tuple of name, score and position; the label is an attribute.

    Attributes:
        name: the token's text, or the part's name.
        score: its contribution.
        position: the token's position; both positions of a pair; None for a part of the model.
        label: another name, such as a feature's description in a dictionary; may be empty.
    """

    label: str

    def __new__(
        cls, name: str, score: float, position: int | tuple[int, int] | None = None, label: str = ""
    ) -> "Entry":
        """Create a tuple of three, with the label as an attribute only."""
        entry = super().__new__(cls, name, score, position)
        entry.label = label
        return entry

    def __repr__(self) -> str:
        label = f", label={self.label!r}" if self.label else ""
        return f"Entry(name={self.name!r}, score={self.score!r}, position={self.position!r}{label})"

    @property
    def labelled(self) -> str:
        """The name, followed by the label if there is one."""
        return " · ".join(filter(None, [self.name, self.label]))

    @property
    def token(self) -> str:
        """The name, for an entry that is a token."""
        return self.name


def largest(
    scores: Float[Tensor, "part"],
    names: Sequence[str],
    k: int,
    positions: Sequence[Any] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[Entry]:
    """Return the k parts of largest absolute score, ties in order; raise `InvalidInputError` for k below 1."""
    k = whole_number("k", k, least=1, why="how many parts to show")
    order: list[int] = scores.abs().argsort(descending=True, stable=True)[:k].tolist()
    positions = positions or [None] * len(names)
    labels = labels or {}
    return [Entry(names[i], float(scores[i]), positions[i], labels.get(names[i], "")) for i in order]


def with_others(entries: Sequence[Entry], everything: float, count: int) -> list[tuple[str, float]]:
    """Return table lines that sum to the whole: the entries shown, and one line for the rest."""
    lines = [(entry.labelled, entry.score) for entry in entries]
    left = count - len(entries)
    if not left:
        return lines
    return [*lines, (counted(left, "other"), everything - sum(score for _, score in lines))]


def closing(scores: Float[Tensor, "part"], names: Sequence[str], k: int) -> list[tuple[str, float]]:
    """Return table lines that sum to the whole: the k largest non-zero parts, and one line for the rest.

    More than k are shown if the rest together would otherwise exceed the largest part.
    """
    scores = scores.detach().double().cpu()
    order = scores.abs().argsort(descending=True, stable=True)
    left = (scores.sum() - scores[order].cumsum(0)).abs()
    is_enough = (left <= scores.abs().amax()) & (torch.arange(1, len(scores) + 1) >= min(k, len(scores)))
    count = int(is_enough.nonzero()[0]) + 1
    shown: list[int] = order[:count].tolist()
    entries = [Entry(names[at], float(scores[at])) for at in shown if scores[at]]
    return with_others(entries, float(scores.sum()), len(scores))


def some_numbers(values: Tensor, most: int = 4) -> str:
    """Format the first numbers of a tensor with four digits, marking whether there are more."""
    numbers = [f"{value:.4g}" for value in values.flatten().tolist()]
    if len(numbers) > most:
        numbers = [*numbers[:most], "…"]
    return ", ".join(numbers)


def check_batch(batch: int, prompts: Sequence[Any]) -> None:
    """Raise `InvalidInputError` for a prompt index that the result does not have."""
    batch = whole_number("batch", batch, why="one of the prompts")
    if not -len(prompts) <= batch < len(prompts):
        raise InvalidInputError(
            f"batch={batch}, but this result holds {counted(len(prompts), 'prompt')}, numbered from 0."
        )


def shown_prompt(batch: int, prompts: int) -> str:
    """Say which prompt is shown if a result holds several; otherwise empty."""
    if prompts == 1:
        return ""
    return f"prompt {batch % prompts} of {prompts}"


def shown_target(target: str) -> str:
    """Shorten a target for a title: replace lists of tokens, one per prompt, by a description.

    >>> from tensorlens_tl.results.entry import shown_target
    >>> shown_target("logit of [5, 12, 7] − [1, 2, 3]"), shown_target("logit of ' a' − [1, 2]")
    ('logit of each answer − other', "logit of ' a' − each other")
    >>> shown_target("logit of [[5, 12], [7, 2]]")
    'logit of each answer'
    """
    first, minus, second = target.partition(MINUS)
    if re.search(LIST_OF_TOKENS, first):
        first = re.sub(LIST_OF_TOKENS, "each answer", first)
        return first + minus + re.sub(LIST_OF_TOKENS, "other", second)
    return first + minus + re.sub(LIST_OF_TOKENS, "each other", second)


def mean_title(target: str, prompts: int) -> str:
    """Return the title of a mean over prompts, such as ``"mean of 32 prompts: logit of answer − other"``."""
    return f"mean of {prompts} prompts: {shown_target(target).replace('each ', '')}"


def targets_of_queries(target: str, queries: Int[Tensor, "batch query"]) -> list[list[str]]:
    """Return the target of each prompt and query, replacing token lists by the query's own token.

    >>> from tensorlens_tl.results.entry import targets_of_queries
    >>> targets_of_queries("logit of [' a', ' b'] − [1, 2]", torch.tensor([[4], [5]]))
    [["logit of ' a' − 1"], ["logit of ' b' − 2"]]
    """
    prompts, count = queries.shape

    def of_query(batch: int, row: int) -> str:
        def single(tokens: re.Match[str]) -> str:
            token = _of_query(literal_eval(tokens[0]), batch, row, prompts, count)
            return tokens[0] if isinstance(token, list) else _named(token)

        return shown_target(MINUS.join(re.sub(LIST_OF_TOKENS, single, part) for part in target.split(MINUS)))

    return [[of_query(batch, row) for row in range(count)] for batch in range(prompts)]


def number_of(target: str) -> str:
    """Return the words of a target before its token, such as ``"change of the logit of "``; empty without a token."""
    number = re.match(r".*?\b(?:logit|probability) of ", target)
    return "" if number is None else number[0]


def span_text(tokens: Sequence[str]) -> str:
    """Describe generated tokens by their number and, if they are few, their text."""
    count = counted(len(tokens), "generated token")
    if len(tokens) > 12:
        return count
    return f"{count} {joined(tokens)!r}"


def _named(token: Any) -> str:
    """Describe a token given as an option."""
    if token is NEXT:
        return EACH_NEXT
    if isinstance(token, str) and token in RANKED:
        return RANKED[token]
    return repr(token)


def _of_query(value: Any, batch: int, row: int, prompts: int, queries: int) -> Any:
    """Select one query's value from a list of tokens in an option."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) == prompts and (prompts > 1 or queries == 1 or isinstance(value[0], list | tuple)):
        value = value[batch]
    if isinstance(value, list | tuple) and len(value) == queries:
        return value[row]
    return value


class Explained:
    """Descriptions of what an attribution explains, as a whole and at each query of each prompt."""

    tokens: list[list[str]]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    target: str
    options: dict[str, Any]

    def _explained(self, batch: int) -> list[list[int]]:
        """Return the positions of the tokens each query is about: its own, or in generated text those explained."""
        queries = self.queries[batch].tolist()
        written = self._spans(batch)
        if written and len(queries) == 1:
            return [list(dict.fromkeys(written))]  # a merged word may contain several of them
        generated = iter(written)
        return [[next(generated, position) if self.mask[batch, position] else position] for position in queries]

    def _query_texts(self, batch: int) -> list[str]:
        """Describe each query of a prompt: by its token, or by the span of text it stands for."""
        if isinstance(self.options.get("query"), str) and self.options["query"] == "mean":
            return [MEAN_QUERY]
        tokens = self.tokens[batch]
        return [joined([tokens[place] for place in places]) for places in self._explained(batch)]

    def _target_texts(self, batch: int) -> list[str]:
        """Describe the target at each query of a prompt, naming its own tokens."""
        tokens = self.tokens[batch]
        explained = self._explained(batch)
        labels = list[str]()
        for row, position in enumerate(self.queries[batch].tolist()):
            label = self._label_of_query(batch, row)
            after = position + 1
            if EACH_SPAN in label:
                label = label.replace(EACH_SPAN, span_text([tokens[place] for place in self._spans(batch)]))
            elif EACH_GENERATED in label and self.mask[batch, position]:
                label = label.replace(EACH_GENERATED, repr(tokens[explained[row][0]]))
            elif EACH_NEXT in label and after < len(tokens) and MEAN_QUERY not in label:
                label = label.replace(EACH_NEXT, repr(tokens[after]))
            labels.append(label)
        return labels

    def _target_of_prompt(self, batch: int, row: int | None = None) -> str:
        """Return a prompt's target, for one query `row` or (None) all, naming its own tokens if all queries agree."""
        shown = shown_target(self.target)
        of_each = row is not None and (EACH_GENERATED in shown or EACH_NEXT in shown)
        names_rank = any(rank in shown for rank in RANKED.values())
        if len(self.tokens) == 1 and shown == self.target and not of_each and not names_rank:
            return shown
        texts = self._target_texts(batch)
        if row is not None:
            return texts[row]
        real = self.mask[batch].tolist()
        positions = self.queries[batch].tolist()
        labels = {text for text, position in zip(texts, positions, strict=True) if real[position]}
        if len(labels) == 1:
            return labels.pop()
        return shown

    def _with_next_tokens(self) -> dict[str, Any]:
        """Return the options with each query's next token in words, since merged words no longer have the tokens."""
        options: dict[str, Any] = self.options
        if EACH_NEXT not in self.target or MEAN_QUERY in self.target or TOKENS_OF_QUERIES in options:
            return options
        minus = plain(options.get("minus"))
        others = [] if minus is None else [minus if isinstance(minus, str) else str(minus)]
        texts = [
            [[*row[position + 1 : position + 2], *others] for position in positions]
            for row, positions in zip(self.tokens, self.queries.tolist(), strict=True)
        ]
        return {**options, TOKENS_OF_QUERIES: texts}

    def _spans(self, batch: int) -> list[int]:
        """Return the positions of a prompt's explained generated tokens."""
        rows: Sequence[list[int]] = self.options.get(OF_GENERATED[1], [])
        return rows[batch] if rows else []

    def _label_of_query(self, batch: int, row: int) -> str:
        """Describe the target of one query, with its own tokens if prompts or queries differ."""
        if self.target == SEVERAL_TARGETS:
            what = "logit of "
        else:
            what = number_of(self.target)
        tokens = self._tokens_of_query(batch, row)
        if tokens and EACH_MINUS in self.target:
            return self.target.replace(EACH_MINUS, tokens[-1])
        if not tokens or not what or MEAN_QUERY in what:
            return self.target
        return what + " − ".join(tokens)

    def _tokens_of_query(self, batch: int, row: int) -> list[str]:
        """Describe target and foil of one query; empty if all queries share them or they are unknown."""
        texts: Sequence[Sequence[Sequence[str]]] = self.options.get(TOKENS_OF_QUERIES, [])
        if -len(texts) <= batch < len(texts) and row < len(texts[batch]):
            return [repr(text) for text in texts[batch][row]]
        named = [plain(self.options.get(name)) for name in ("target", "minus")]
        prompts, queries = self.queries.shape
        tokens = [_of_query(value, batch, row, prompts, queries) for value in named if value is not None]
        is_known = not any(isinstance(token, list | tuple) for token in tokens)
        if is_known and any(isinstance(value, list | tuple) for value in named):
            return list(map(_named, tokens))
        return []
