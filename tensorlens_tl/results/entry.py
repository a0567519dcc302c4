"""One line of a result: what every `top()` returns; and which line of its query axis a result is asked for."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.drawing import page
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.inputs import find_real

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


def query_row(
    queries: Int[Tensor, "batch query"], mask: Bool[Tensor, "batch pos"], tokens: Sequence[Sequence[str]],
    query: int | str, batch: int, explained: Sequence[Sequence[int]] = (),
) -> int:  # fmt: skip
    """Where a query lies on a result's query axis: counted over the prompt's real queries, or named by its text.

    Args:
        queries, mask, tokens: the result's.
        query: an index, or a text: its last token, where it occurs last among the tokens that name a row.
        batch: the prompt.
        explained: the positions of the tokens that name each row, where these are not those of the queries.

    Raises:
        InvalidInputError: no such prompt, or not among the held queries.
    """
    check_batch(batch, tokens)
    positions = queries[batch].tolist()
    real = [number for number, position in enumerate(positions) if mask[batch, position]]
    named = {place: row for row in real for place in _names_of(positions, row, explained)}
    if isinstance(query, str):
        spans = find_real(tokens[batch], mask[batch].tolist(), query)
        rows = [named[span[-1]] for span in spans if span[-1] in named]
        if rows:
            return rows[-1]
    elif -len(real) <= whole_number("query", query, why="one of the queries, or a text") < len(real):
        return real[query]
    at_position = ""
    if query in named:
        at_position = f" The one at position {query} is query={real.index(named[query])}."
    raise InvalidInputError(
        f"query={query!r} is an index into the queries of prompt {batch}, 0 to {len(real) - 1}, or their text; this "
        f"result holds those at positions {list(named)}.{at_position} Ask for others where it is made, query='all' for "
        "all."
    )


def _names_of(positions: Sequence[int], row: int, explained: Sequence[Sequence[int]]) -> Sequence[int]:
    """The positions of the tokens that name a row."""
    return explained[row] if explained else [positions[row]]


def check_batch(batch: int, prompts: Sequence[Any]) -> None:
    """Raise `InvalidInputError` for a prompt that a result does not hold."""
    batch = whole_number("batch", batch, why="one of the prompts")
    if not -len(prompts) <= batch < len(prompts):
        raise InvalidInputError(f"batch={batch}, but this result holds {len(prompts)} prompts.")


def shown_prompt(batch: int, prompts: int) -> str:
    """Which prompt is shown, where a result holds several; nothing where it holds one."""
    if prompts == 1:
        return ""
    return f"prompt {batch % prompts} of {prompts}"


def shown_query(
    queries: Int[Tensor, "batch query"], mask: Bool[Tensor, "batch pos"], tokens: Sequence[Sequence[str]],
    row: int, batch: int, explained: Sequence[Sequence[int]] = (),
) -> str:  # fmt: skip
    """Which query and which prompt are shown, where a result holds several; see `query_row`, which takes its words."""
    positions = queries[batch].tolist()
    parts = [shown_prompt(batch, len(tokens))]
    if len(positions) > 1:
        number = sum(1 for position in positions[:row] if mask[batch, position])
        count = number + sum(1 for position in positions[row:] if mask[batch, position])
        place = _names_of(positions, row, explained)[-1]
        parts.append(f"query={number}, {tokens[batch][place]!r} at {place}, one of {count}")
    return ", ".join(filter(None, parts))


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


def provenance_note(provenance: Mapping[str, str]) -> str:
    """What a result depends on besides the prompts, in one line below its picture."""
    return " · ".join(f"{name.replace('_', ' ')}: {fact}" for name, fact in provenance.items())


def panel(title: str, *parts: str, notes: Sequence[str] = ()) -> str:
    """Pictures below a title, with notes in one line."""
    return page.panel(title, *parts, notes=" · ".join(filter(None, notes)))
