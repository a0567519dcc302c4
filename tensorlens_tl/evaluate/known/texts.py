"""Prompt pairs and known answers out of texts: two lists, a data frame, or a CSV file with a header."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tensorlens_tl._arguments import checked_names, plain
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.known.pairs import PromptPairs
from tensorlens_tl.evaluate.known.tasks import KnownAnswers
from tensorlens_tl.evaluate.scorers import predictions
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import tokenized
from tensorlens_tl.passes.operator import token_ids

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    Texts = Sequence[object] | pd.Series | NDArray[Any] | None
    """Texts, or chats; also as a column."""

    Table = Sequence[str] | Mapping[str, Sequence[str]] | pd.DataFrame | str | os.PathLike[str]
    """The clean prompts; or a frame, a mapping or a CSV file with columns ``clean`` and ``corrupted``."""

    Answers = Sequence[str | int] | None
    """One token for each prompt; None is what the model itself predicts."""
else:
    Texts = Table = Answers = Any  # our own errors say what is wrong

COLUMNS = ("clean", "corrupted")
OPTIONAL = ("answer", "other")
PROMPTS_AT_ONCE = 16


@checked_names
def text_pairs(
    model: ModelLike,
    clean: Table,
    corrupted: Texts = None,
    *,
    answers: Answers = None,
    others: Answers = None,
    name: str = "texts",
    prepend_bos: bool | None = None,
) -> PromptPairs:
    """Clean prompts beside corrupted ones, as texts that have the same number of tokens.

    Args:
        model: whose tokenizer reads them.
        clean: the clean prompts; or a data frame, a mapping, or the path of a CSV file with a header, with columns
            ``clean`` and ``corrupted``, and where known ``answer`` and ``other``.
        corrupted: the corrupted prompts, beside a list of clean ones.
        answers, others: what follows each clean prompt, and what follows each corrupted one: tokens with their leading
            space, or ids. None takes the column, or without one what the model itself predicts.
        name: of the task.
        prepend_bos: as in TransformerLens.

    Raises:
        InvalidInputError: a column that is missing, lists of different lengths, a pair that does not align (it shows
            where), prompts of several lengths, an answer of several tokens, or one answer for both prompts of a pair.

    >>> from tensorlens_tl import evaluate
    >>> pairs = evaluate.text_pairs(model, ["The value of"], ["The name of"], answers=[" the"], others=[" a"])
    >>> (pairs.clean != pairs.corrupted).nonzero().tolist()
    [[0, 2]]
    """
    texts = _Texts.of(clean, corrupted, answers, others)
    view = ModelView(model)
    sides = texts.aligned(view, prepend_bos)
    lengths = Counter(map(len, sides[0]))
    if len(lengths) > 1:
        counts = ", ".join(f"{count} of {length} tokens" for length, count in sorted(lengths.items()))
        raise InvalidInputError(
            f"pairs: their prompts have several lengths ({counts}); all run together, so pass those of one length."
        )
    first, second = map(torch.tensor, sides)
    return PromptPairs(
        name,
        first,
        second,
        _answers(view, first, texts.answers, "answers"),
        _answers(view, second, texts.others, "others"),
    )


@checked_names
def text_answers(
    model: ModelLike,
    clean: Table,
    corrupted: Texts = None,
    *,
    answers: Answers = None,
    name: str = "texts",
    prepend_bos: bool | None = None,
) -> KnownAnswers:
    """Prompts whose answer is determined by the tokens in which each differs from a corrupted one.

    Args:
        model, clean, corrupted, answers, name, prepend_bos: as for `text_pairs`.

    Returns:
        The clean prompts, with those tokens as their true sources: for `known_answer`. Both prompts of a pair have as
        many tokens; pairs may have more or fewer than others.

    Raises:
        InvalidInputError: as for `text_pairs`, but for prompts of several lengths; also a pair of equal prompts.

    >>> from tensorlens_tl import evaluate
    >>> task = evaluate.text_answers(model, ["The value of"], ["The name of"], answers=[" the"])
    >>> task.sources.nonzero().tolist()
    [[0, 2]]
    """
    texts = _Texts.of(clean, corrupted, answers, None)
    view = ModelView(model)
    rows = [list(map(torch.tensor, side)) for side in texts.aligned(view, prepend_bos)]
    first, second = (pad_sequence(side, batch_first=True) for side in rows)
    equal = (first == second).all(1)
    if bool(equal.any()):
        raise InvalidInputError(f"pair {int(equal.nonzero()[0])}: both prompts are equal, so nothing is a source.")
    lengths = torch.tensor([len(row) for row in rows[0]])
    if bool((lengths == first.shape[1]).all()):
        return KnownAnswers(name, first, _answers(view, first, texts.answers, "answers"), first != second)
    predicted = torch.zeros_like(lengths)
    task = KnownAnswers(name, first, predicted, first != second, lengths)
    if texts.answers is not None:
        return replace(task, answers=_answers(view, first, texts.answers, "answers"))
    for part, length in task.parts(PROMPTS_AT_ONCE):
        predicted[part] = _answers(view, first[part, :length], None, "answers")
    return replace(task, answers=predicted)


@dataclass(frozen=True)
class _Texts:
    """Pairs of texts, or of chats, and what follows each."""

    clean: list[Any]
    corrupted: list[Any]
    answers: Answers
    others: Answers

    @classmethod
    def of(cls, clean: Table, corrupted: Texts, answers: Answers, others: Answers) -> "_Texts":
        """Two lists, or the columns of a table.

        Raises:
            InvalidInputError: a column that is missing, or lists of different lengths.
        """
        if corrupted is None:
            columns = _columns(clean)
            if answers is None:
                answers = columns.get("answer")
            if others is None:
                others = columns.get("other")
            clean, corrupted = (columns[column] for column in COLUMNS)
        sides: dict[str, Any] = {"clean": plain(clean), "corrupted": plain(corrupted)}  # also columns and arrays
        if not all(isinstance(side, Sequence) and not isinstance(side, str) for side in sides.values()):
            raise InvalidInputError("clean and corrupted: pass two lists of texts, or one table with both as columns.")
        counts = {name: len(side) for name, side in sides.items()}
        counts |= {name: len(part) for name, part in (("answers", answers), ("others", others)) if part is not None}
        if len(set(counts.values())) > 1 or not counts["clean"]:
            raise InvalidInputError(f"pairs: there are {counts}; pass the same number of each, and one at least.")
        return cls(list(sides["clean"]), list(sides["corrupted"]), answers, others)

    def aligned(self, view: ModelView, prepend_bos: bool | None) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of both prompts of every pair.

        Raises:
            InvalidInputError: a pair whose prompts have different lengths.
        """
        clean, corrupted = (tokenized(view, texts, prepend_bos) for texts in (self.clean, self.corrupted))
        for number, (first, second) in enumerate(zip(clean, corrupted, strict=True)):
            if len(first) != len(second):
                raise InvalidInputError(_misaligned(view, number, first, second))
        return clean, corrupted


def _columns(table: Any) -> dict[str, list[str]]:
    """The columns of a frame, a mapping or a CSV file.

    Raises:
        InvalidInputError: no such file or table, or a column that is missing.
    """
    import pandas as pd

    if isinstance(table, str | os.PathLike):
        path = Path(table)
        if not path.is_file():
            raise InvalidInputError(f"clean={str(table)!r}: no such CSV file, and no list of texts.")
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    elif isinstance(table, Mapping):
        table = pd.DataFrame(table)
    if not isinstance(table, pd.DataFrame):
        raise InvalidInputError(
            f"clean is {type(table).__name__}, and corrupted= is missing: pass two lists of texts, or a frame or a CSV "
            f"file with columns {' and '.join(map(repr, COLUMNS))}."
        )
    missing = [column for column in COLUMNS if column not in table.columns]
    if missing:
        raise InvalidInputError(
            f"pairs: no column {missing[0]!r} among {[str(name) for name in table.columns]}; columns are "
            f"{', '.join(map(repr, COLUMNS))}, and where known {', '.join(map(repr, OPTIONAL))}."
        )
    return {column: table[column].tolist() for column in (*COLUMNS, *OPTIONAL) if column in table.columns}


def _misaligned(view: ModelView, number: int, first: Sequence[int], second: Sequence[int]) -> str:
    """Which tokens two prompts have, and where they begin to differ."""
    decode = view.tokenizer.decode
    clean, corrupted = ([decode([token]) for token in tokens] for tokens in (first, second))
    pairs = enumerate(zip_longest(clean, corrupted))
    place = next(position for position, (left, right) in pairs if left != right)
    left, right = (repr(part[place]) if place < len(part) else "nothing" for part in (clean, corrupted))
    return (
        f"pair {number} does not align: the clean prompt has {len(first)} tokens, {clean}, and the corrupted one "
        f"{len(second)}, {corrupted}. They differ from position {place} on: {left} and {right}. Choose words "
        "of as many tokens."
    )


def _answers(view: ModelView, tokens: Int[Tensor, "prompt pos"], answers: Answers, name: str) -> Int[Tensor, "prompt"]:
    """The tokens that follow each prompt: as they are named, or as the model predicts."""
    if answers is not None:
        return token_ids(view, list(answers), len(tokens), name)[:, 0]
    passes = (freeze(view.model, part) for part in tokens.split(PROMPTS_AT_ONCE))
    return torch.cat([predictions(frozen)[0].cpu() for frozen in passes])
