"""One line of a result: what every `top()` returns; and what is explained, in words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.errors import InvalidInputError

_TOKEN = r"""(?:-?\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_TOKENS = rf"\[{_TOKEN}(?:, {_TOKEN})*\]"
LIST_OF_TOKENS = rf"(?<![^ ])(?:{_TOKENS}|\[{_TOKENS}(?:, {_TOKENS})*\])$"
"""Tokens at the end of a target or of what is subtracted from it, as Python writes a list, or one for each prompt."""

MINUS = " − "


class _Line(NamedTuple):
    name: str
    score: float
    position: int | tuple[int, int] | None = None


class Entry(_Line):
    """One part of a result and its score: a source token, a component, a path, a pair of tokens.

    A tuple of name, score and position; the label stands beside it.

    Attributes:
        name: the token's text, or the part's name.
        score: what it gives.
        position: where the token stands; of a pair, both positions; None for a part of the model.
        label: what the part is called besides, such as a feature of a dictionary; an empty text for nothing.
    """

    label: str

    def __new__(
        cls, name: str, score: float, position: int | tuple[int, int] | None = None, label: str = ""
    ) -> "Entry":
        """A tuple of three, and a label that is not among them."""
        entry = super().__new__(cls, name, score, position)
        entry.label = label
        return entry

    def __repr__(self) -> str:
        label = f", label={self.label!r}" if self.label else ""
        return f"Entry(name={self.name!r}, score={self.score!r}, position={self.position!r}{label})"

    @property
    def labelled(self) -> str:
        """The name, and its label where it has one."""
        return " · ".join(filter(None, [self.name, self.label]))

    @property
    def token(self) -> str:
        """The name, of an entry that is a token."""
        return self.name


def largest(
    scores: Float[Tensor, "part"],
    names: Sequence[str],
    k: int,
    positions: Sequence[Any] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[Entry]:
    """The k parts of largest absolute score, equal ones in their order; `labels` by name, of those that have one.

    Raises:
        InvalidInputError: k below 1.
    """
    k = whole_number("k", k, least=1, why="how many parts to show")
    order: list[int] = scores.abs().argsort(descending=True, stable=True)[:k].tolist()
    positions = positions or [None] * len(names)
    labels = labels or {}
    return [Entry(names[i], float(scores[i]), positions[i], labels.get(names[i], "")) for i in order]


def with_others(entries: Sequence[Entry], everything: float, count: int) -> list[tuple[str, float]]:
    """Lines of a table that sum to everything: the entries shown, and all others in one."""
    lines = [(entry.labelled, entry.score) for entry in entries]
    left = count - len(entries)
    if not left:
        return lines
    others = f"{left} others"
    if left == 1:
        others = "1 other"
    return [*lines, (others, everything - sum(score for _, score in lines))]


def some_numbers(values: Tensor, most: int = 4) -> str:
    """The first numbers of a tensor in four digits, and whether there are more."""
    numbers = [f"{value:.4g}" for value in values.flatten().tolist()]
    if len(numbers) > most:
        numbers = [*numbers[:most], "…"]
    return ", ".join(numbers)


def check_batch(batch: int, prompts: Sequence[Any]) -> None:
    """Raise `InvalidInputError` for a prompt that a result does not hold."""
    batch = whole_number("batch", batch, why="one of the prompts")
    if not -len(prompts) <= batch < len(prompts):
        raise InvalidInputError(f"batch={batch}, but this result holds {len(prompts)} prompts.")


def prompts_in_words(count: int) -> str:
    """``"1 prompt"``, ``"2 prompts"`` and so on."""
    if count == 1:
        return "1 prompt"
    return f"{count} prompts"


def shown_prompt(batch: int, prompts: int) -> str:
    """Which prompt is shown, where a result holds several; nothing where it holds one."""
    if prompts == 1:
        return ""
    return f"prompt {batch % prompts} of {prompts}"


def shown_target(target: str) -> str:
    """A target as a title names it: lists of tokens, one for each prompt, by what they are.

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
    """The title of a mean over prompts, as in ``"mean of 32 prompts: logit of answer − other"``."""
    return f"mean of {prompts} prompts: {shown_target(target).replace('each ', '')}"
