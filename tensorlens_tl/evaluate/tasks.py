"""Prompts of which the truth is known: tasks and the source token that determines what follows, and pairs of prompts.

| task | prompt | what follows | source |
| --- | --- | --- | --- |
| `recall` | key–value pairs among distractors, ``? key`` | the key's value | the value, where the pair stood |
| `brackets` | nested brackets of several kinds | the innermost open one's closing bracket | that open bracket |
| `induction` | a random segment, the beginning of its second copy | its next token | that token, in the first copy |

Change the source and the answer changes with it; change any other token that is not part of the question and it does
not. Every prompt of a task has the same length, so that they run as one batch.

    >>> task = recall(2, seed=0)
    >>> task.tokens.shape, task.sources.sum(1).tolist()
    (torch.Size([2, 29]), [1, 1])

A clean and a corrupted prompt differ in one token and in what follows; the logit difference of the two answers is what
circuits are measured by:

| change | what is replaced | what the model must notice |
| --- | --- | --- |
| `source` | the token that determines the answer, by another of its kind | what stands there: *what* heads move |
| `question` | the last token, by another that is answered in the prompt | where to look: *from where* they move it |

Texts of your own become either kind: two lists, a data frame, or a CSV file with a header (`text_answers`,
`text_pairs`).

`KnownComponents` and `KnownAttention` are to components and attention what `KnownAnswers` is to tokens. Nobody knows
them of a trained model; a hand-constructed model states them (`tensorlens_tl.demo.programs`).
"""

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tensorlens_tl._arguments import Seed, Whole, check_choice, checked_names, plain, whole_count, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.scorers import PROMPTS_AT_ONCE, Mask, TokenIds, predictions
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import tokenized
from tensorlens_tl.passes.target import token_ids

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

BOS = "<|bos|>"
PAD = "<|pad|>"
FILLERS = ("the", "of", "and", "to", "in", "is", "it", "on")
KEYS = tuple("abcdefghijklmnopqrstuvwx")
VALUES = tuple(str(number) for number in range(24))
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ("<", ">"), ("/", "\\"), ("«", "»"))

RECALL_WORDS = (BOS, PAD, "?", *KEYS, *VALUES, *FILLERS)
"""The vocabulary of the recall model: token ids are indices into it."""
BRACKET_WORDS = (BOS, PAD, *(opening for opening, _ in BRACKETS), *(closing for _, closing in BRACKETS), *FILLERS)
"""The vocabulary of the bracket model."""

DEEPEST = 5
"""So many brackets are open at once at most."""

CHANGES = ("source", "question")
COLUMNS = ("clean", "corrupted")
OPTIONAL = ("target", "minus")

Place = tuple[str, int]
"""A node at a position, such as ``("L0H3", 5)``: where it writes."""


@dataclass(frozen=True)
class KnownAnswers:
    """Prompts with known answers.

    Attributes:
        name: of the task.
        tokens: `[prompt, pos]`; prompts that are shorter than the longest have anything after their end.
        answers: the token that follows each prompt, `[prompt]`.
        sources: True at the tokens that determine the answer, `[prompt, pos]`.
        lengths: how many tokens each prompt has, `[prompt]`; None is all of them.
    """

    name: str
    tokens: Int[Tensor, "prompt pos"]
    answers: Int[Tensor, "..."]
    sources: Bool[Tensor, "..."]
    lengths: Int[Tensor, "..."] | None = None

    def __post_init__(self) -> None:
        for name, axes in (("tokens", 2), ("answers", 1)):
            object.__setattr__(self, name, _token_ids(f"KnownAnswers: {name}", getattr(self, name), axes))
        object.__setattr__(self, "sources", _truths("KnownAnswers: sources", self.sources))
        if self.tokens.shape != self.sources.shape or len(self.answers) != len(self.tokens):
            raise InvalidInputError(
                f"KnownAnswers: tokens {tuple(self.tokens.shape)}, sources {tuple(self.sources.shape)} and answers "
                f"{tuple(self.answers.shape)} must agree."
            )
        if self.lengths is not None:
            self._check_lengths(self.lengths)
        lacking = ~self.sources.any(1)
        if bool(lacking.any()):
            raise InvalidInputError(f"KnownAnswers: prompt {int(lacking.nonzero()[0])} has no source token.")

    def _check_lengths(self, lengths: TokenIds) -> None:
        lengths = _token_ids("KnownAnswers: lengths", lengths, 1)
        object.__setattr__(self, "lengths", lengths)
        prompts, pos = self.tokens.shape
        if len(lengths) != prompts or not bool(((lengths >= 1) & (lengths <= pos)).all()):
            raise InvalidInputError(
                f"KnownAnswers: lengths {lengths.tolist()}; pass one for each of {prompts} prompts, from 1 to {pos}."
            )
        beyond = self.sources & (torch.arange(pos) >= lengths[:, None])
        if bool(beyond.any()):
            raise InvalidInputError(
                f"KnownAnswers: prompt {int(beyond.any(1).nonzero()[0])} has a source beyond its end."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        prompts, pos = self.tokens.shape
        if self.lengths is not None:
            pos = f"{int(self.lengths.min())} to {int(self.lengths.max())}"
        return f"KnownAnswers({self.name!r}, prompts={prompts}, pos={pos})"

    def parts(self, most: int) -> list[tuple[Int[Tensor, "..."], int]]:
        """The prompts' numbers in parts of one length, and that length: the shortest first, at most so many in each."""
        if self.lengths is None:
            return [(numbers, self.tokens.shape[1]) for numbers in torch.arange(len(self)).split(most)]
        return [
            (numbers, length)
            for length in sorted(set(self.lengths.tolist()))
            for numbers in (self.lengths == length).nonzero()[:, 0].split(most)
        ]

    def refuse_several_lengths(self, what: str) -> None:
        """Raise `InvalidInputError` where the prompts do not have one length."""
        if self.lengths is not None and bool((self.lengths != self.tokens.shape[1]).any()):
            raise InvalidInputError(
                f"{what}: the prompts of {self.name!r} have several lengths, and all run together here; make a task "
                "of those of one length."
            )

    def only(self, selection: Bool[Tensor, "prompt"]) -> "KnownAnswers":
        """Some of the prompts, by a mask."""
        lengths = None if self.lengths is None else self.lengths[selection]
        return KnownAnswers(
            self.name, self.tokens[selection], self.answers[selection], self.sources[selection], lengths
        )


@dataclass(frozen=True)
class PromptPairs:
    """Clean prompts beside corrupted ones of the same length.

    Attributes:
        name: of the task, and of the change.
        clean, corrupted: token ids, `[prompt, pos]`.
        target, minus: what follows the clean prompt, and what follows the corrupted one, `[prompt]`.
    """

    name: str
    clean: Int[Tensor, "prompt pos"]
    corrupted: Int[Tensor, "..."]
    target: Int[Tensor, "..."]
    minus: Int[Tensor, "..."]

    def __post_init__(self) -> None:
        for name, axes in (("clean", 2), ("corrupted", 2), ("target", 1), ("minus", 1)):
            object.__setattr__(self, name, _token_ids(f"PromptPairs: {name}", getattr(self, name), axes))
        if self.clean.shape != self.corrupted.shape:
            raise InvalidInputError(
                f"PromptPairs: clean prompts are {tuple(self.clean.shape)} and corrupted ones "
                f"{tuple(self.corrupted.shape)}; positions must match."
            )
        for name, tokens in (("target", self.target), ("minus", self.minus)):
            if tuple(tokens.shape) != (len(self.clean),):
                raise InvalidInputError(f"PromptPairs: {name} is {tuple(tokens.shape)}, one for each prompt needed.")
        same = self.target == self.minus
        if bool(same.any()):
            pair = int(same.nonzero()[0])
            raise InvalidInputError(
                f"PromptPairs: target and minus of pair {pair} are the same token, {int(self.target[pair])}, "
                "whose logit difference is zero. Choose a corrupted prompt that the model answers with another token, "
                "or name the two tokens (target=, minus=)."
            )

    def __len__(self) -> int:
        return len(self.clean)

    def __repr__(self) -> str:
        return f"PromptPairs({self.name!r}, prompts={len(self)}, pos={self.clean.shape[1]})"

    def only(self, selection: Bool[Tensor, "prompt"] | Int[Tensor, "selected"]) -> "PromptPairs":
        """Some of the pairs, by a mask or by number."""
        parts = (self.clean, self.corrupted, self.target, self.minus)
        return PromptPairs(self.name, *(part[selection] for part in parts))


@dataclass(frozen=True)
class KnownComponents:
    """Prompts whose answer known components compute.

    Attributes:
        name: of the task.
        pairs: the prompts, each beside a corrupted one.
        paths: for each prompt, the paths along which the answer's content comes to the last position: places in their
            order, from an embedding to the node that writes to the target.
        nodes: what carries the difference between clean and corrupted prompt, named as by `circuits.patch_scores`;
            ``"embed"`` is the first block's input.
        edges: the same for edges, named as by `circuits.edge_scores`.
    """

    name: str
    pairs: PromptPairs
    paths: tuple[tuple[tuple[Place, ...], ...], ...]
    nodes: frozenset[str]
    edges: frozenset[str]

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.pairs):
            raise InvalidInputError(
                f"KnownComponents: paths of {len(self.paths)} prompts, but there are {len(self.pairs)} prompts."
            )
        if not self.nodes or not self.edges or not all(paths and all(paths) for paths in self.paths):
            raise InvalidInputError(
                f"KnownComponents: {self.name!r} has a prompt without a path, or no true node or edge; each is needed."
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return f"KnownComponents({self.name!r}, prompts={len(self)}, nodes={sorted(self.nodes)})"


@dataclass(frozen=True)
class KnownChoice:
    """Why one head attends from one position to another.

    Attributes:
        layer, head: which head.
        query, key: the two positions in each prompt, `[prompt]`.
        query_tokens, key_tokens: for each prompt, the positions of the tokens that make the head's query, and its key.
        query_parts, key_parts: the components that write what the head's query, and its key, is read from.
    """

    layer: int
    head: int
    query: Int[Tensor, "prompt"]
    key: Int[Tensor, "..."]
    query_tokens: tuple[frozenset[int], ...]
    key_tokens: tuple[frozenset[int], ...]
    query_parts: frozenset[str]
    key_parts: frozenset[str]


@dataclass(frozen=True)
class KnownAttention:
    """Prompts with known reasons for where heads attend.

    Attributes:
        name: of the task.
        tokens: `[prompt, pos]`, all of one length.
        choices: what is known, the same heads for every prompt.
    """

    name: str
    tokens: Int[Tensor, "prompt pos"]
    choices: tuple[KnownChoice, ...]

    def __post_init__(self) -> None:
        prompts, pos = self.tokens.shape
        if not self.choices:
            raise InvalidInputError(f"KnownAttention: {self.name!r} has no choices; state at least one head's.")
        for choice in self.choices:
            where = f"KnownAttention: L{choice.layer}H{choice.head} of {self.name!r}"
            lengths = {len(choice.query), len(choice.key), len(choice.query_tokens), len(choice.key_tokens)}
            if lengths != {prompts}:
                raise InvalidInputError(f"{where} is stated for {sorted(lengths)} prompts; there are {prompts}.")
            ends = torch.cat([choice.query, choice.key])
            positions = frozenset(ends.tolist()).union(*choice.query_tokens, *choice.key_tokens)
            if not all(0 <= position < pos for position in positions):
                raise InvalidInputError(f"{where} names a position outside 0 to {pos - 1}.")
            if not all((*choice.query_tokens, *choice.key_tokens, choice.query_parts, choice.key_parts)):
                raise InvalidInputError(f"{where} lacks a true source of its query or of its key.")

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        heads = ", ".join(f"L{choice.layer}H{choice.head}" for choice in self.choices)
        return f"KnownAttention({self.name!r}, prompts={len(self)}, heads={heads})"


if TYPE_CHECKING:
    AnswerTask = KnownAnswers
    Pairs = PromptPairs
    ComponentTask = KnownComponents
    AttentionTask = KnownAttention

    Change = Literal["source", "question"]

    Texts = Sequence[object] | pd.Series | NDArray[Any] | None
    """Texts, or chats; also as a column."""

    Table = Sequence[str] | Mapping[str, Sequence[str]] | pd.DataFrame | str | os.PathLike[str]
    """The clean prompts; or a frame, a mapping or a CSV file with columns ``clean`` and ``corrupted``."""

    Answers = Sequence[str | int] | None
    """One token for each prompt; None is what the model itself predicts."""
else:
    AnswerTask = Pairs = ComponentTask = AttentionTask = Any  # another object is refused with a message
    Change = Texts = Table = Answers = Any


def _token_ids(what: str, value: TokenIds, axes: int) -> Int[Tensor, "..."]:
    """Token ids as a tensor of so many axes; lists of them will do."""
    shape = {1: "one for each prompt", 2: "rows of one length"}[axes]
    hint = f"pass token ids, {shape}, such as model.to_tokens(texts, padding_side='right')"
    first = value
    while isinstance(first, Sequence) and not isinstance(first, str) and first:
        first = first[0]
    if isinstance(first, str):
        raise InvalidInputError(
            f"{what}: {first!r} is a text, and a task has no tokenizer; evaluate.text_pairs and "
            f"text_answers read texts, or {hint}."
        )
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"{what}: cannot read {type(value).__name__} ({error}); {hint}.") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim != axes:
        raise InvalidInputError(f"{what} are {ids.dtype} {tuple(ids.shape)}; {hint}.")
    return ids


def _truths(what: str, value: Mask) -> Bool[Tensor, "..."]:
    """A mask as a tensor of truth values."""
    try:
        mask = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{what}: cannot read {type(value).__name__} ({error}); pass True and False."
        ) from error
    if mask.dtype != torch.bool:
        raise InvalidInputError(f"{what} are {mask.dtype}; pass True at the tokens that determine the answer.")
    return mask


# ------------------------------------------------------------------ tasks


@checked_names
def recall(prompts: Whole = 200, *, seed: Seed = 0, pairs: Whole = 8, distractors: Whole = 10) -> KnownAnswers:
    """Key–value pairs with distractors between them, and a question for one key's value.

    Args:
        prompts: how many.
        seed: of the prompts.
        pairs: keys in a prompt, all different.
        distractors: filler words strewn between the pairs.

    Raises:
        InvalidInputError: a number out of range.

    >>> from tensorlens_tl import evaluate
    >>> task = evaluate.recall(2, pairs=4)
    >>> bool((task.tokens[task.sources] == task.answers).all())  # the source is the answer itself
    True
    """
    prompts = whole_count("prompts", prompts)
    pairs = whole_number("pairs", pairs, 1, len(KEYS))
    distractors = whole_count("distractors", distractors, 0)
    rng = random.Random(seed)
    ids = {word: number for number, word in enumerate(RECALL_WORDS)}
    rows = [recall_row(rng, pairs, distractors) for _ in range(prompts)]
    tokens = torch.tensor([[ids[word] for word in words] for words, _ in rows])
    return _task("recall", tokens[:, :-1], tokens[:, -1], [positions[0] for _, positions in rows])


def recall_row(rng: random.Random, pairs: int, distractors: int, questions: int = 1) -> tuple[list[str], list[int]]:
    """The words of one prompt with its questions answered, and for each question the position of its value."""
    keys = rng.sample(KEYS, pairs)
    values = rng.choices(VALUES, k=pairs)
    gaps = sorted(rng.choices(range(pairs + 1), k=distractors))
    words = [BOS]
    position_of = dict[str, int]()
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        words += [rng.choice(FILLERS) for _ in range(gaps.count(number))] + [key, value]
        position_of[key] = len(words) - 1
    words += [rng.choice(FILLERS) for _ in range(gaps.count(pairs))]
    question_keys = rng.sample(keys, questions)
    for key in question_keys:
        words += ["?", key, words[position_of[key]]]
    return words, [position_of[key] for key in question_keys]


@checked_names
def brackets(prompts: Whole = 200, *, seed: Seed = 0, length: Whole = 24) -> KnownAnswers:
    """Nested brackets, fillers between them, ended where a bracket closes.

    Args:
        prompts: how many.
        seed: of the prompts.
        length: tokens in each.

    Raises:
        InvalidInputError: a number out of range.

    >>> from tensorlens_tl import evaluate
    >>> task = evaluate.brackets(2)
    >>> task.answers.tolist() == (task.tokens[task.sources] + 6).tolist()  # six kinds open, then six close
    True
    """
    prompts = whole_count("prompts", prompts)
    length = whole_count("length", length, 4)
    rng = random.Random(seed)
    ids = {word: number for number, word in enumerate(BRACKET_WORDS)}
    rows: list[tuple[list[int], int]] = []
    while len(rows) < prompts:
        words, matches = bracket_row(rng, length + 1)
        if matches[-1] is not None:
            rows.append(([ids[word] for word in words], matches[-1]))
    tokens = torch.tensor([row for row, _ in rows])
    return _task("brackets", tokens[:, :-1], tokens[:, -1], [source for _, source in rows])


def bracket_row(rng: random.Random, length: int) -> tuple[list[str], list[int | None]]:
    """The words of one row, and for each closing bracket where its opening one stands (None elsewhere)."""
    closing = dict(BRACKETS)
    words: list[str] = [BOS]
    matches: list[int | None] = [None]
    open_at: list[int] = []
    while len(words) < length:
        kinds = ["filler"]
        if len(open_at) < DEEPEST:
            kinds += ["open"] * 3
        if open_at:
            kinds += ["close"] * 2
        kind = rng.choice(kinds)
        match = None
        if kind == "open":
            open_at.append(len(words))
            words.append(rng.choice(BRACKETS)[0])
        elif kind == "close":
            match = open_at.pop()
            words.append(closing[words[match]])
        else:
            words.append(rng.choice(FILLERS))
        matches.append(match)
    return words, matches


@checked_names
def induction(
    prompts: Whole = 200,
    *,
    d_vocab: Whole,
    seed: Seed = 0,
    segment: Whole = 16,
    start: int | None = 0,
    least_token: int = 1,
) -> KnownAnswers:
    """A random segment of different tokens, and the beginning of its second copy.

    Args:
        prompts: how many.
        d_vocab: tokens are drawn below it.
        seed: of the prompts.
        segment: tokens in the segment; between a quarter and three quarters of it are repeated.
        start: a token before everything (``<|bos|>``), or None.
        least_token: tokens are drawn from it upwards, to leave special ones out.

    Raises:
        InvalidInputError: a number out of range.

    >>> from tensorlens_tl import evaluate
    >>> task = evaluate.induction(3, d_vocab=100)
    >>> bool((task.tokens[task.sources] == task.answers).all())  # the source is the answer itself
    True
    """
    prompts = whole_count("prompts", prompts)
    segment = whole_count("segment", segment, 4)
    d_vocab = whole_count("d_vocab", d_vocab, least_token + segment, why="there must be a segment of tokens")
    rng = random.Random(seed)
    repeated = segment // 2
    before = [] if start is None else [start]
    rows = [rng.sample(range(least_token, d_vocab), segment) for _ in range(prompts)]
    tokens = torch.tensor([[*before, *row, *row[:repeated]] for row in rows])
    return _task("induction", tokens, torch.tensor([row[repeated] for row in rows]), [len(before) + repeated] * prompts)


def _task(name: str, tokens: Tensor, answers: Tensor, positions: list[int]) -> KnownAnswers:
    """A task with one source token in each prompt."""
    sources = torch.zeros_like(tokens, dtype=torch.bool)
    sources[torch.arange(len(tokens)), torch.tensor(positions)] = True
    return KnownAnswers(name, tokens, answers, sources)


# ------------------------------------------------------------------ pairs of prompts


@checked_names
def prompt_pairs(task: AnswerTask, change: Change = "source", *, seed: Seed = 0) -> PromptPairs:
    """A task's prompts, each beside one with another answer.

    Args:
        task: `recall` or `induction`.
        change: what the other prompt has another of: ``"source"``, the token that determines the answer, or
            ``"question"``, the last token.
        seed: of what takes a token's place.

    Raises:
        InvalidInputError: another task or change.

    >>> from tensorlens_tl import evaluate
    >>> pairs = evaluate.prompt_pairs(evaluate.recall(4))
    >>> (pairs.clean != pairs.corrupted).sum(1).tolist()
    [1, 1, 1, 1]
    """
    check_choice("change", change, CHANGES)
    if not isinstance(task, KnownAnswers) or task.name not in ("recall", "induction"):
        what = repr(task.name) if isinstance(task, KnownAnswers) else type(task).__name__
        raise InvalidInputError(f"task={what}: pass evaluate.recall() or evaluate.induction(), or make PromptPairs.")
    rng = random.Random(seed)
    corrupted = task.tokens.clone()
    others = list[int]()
    keys = set[int]()
    kind = set(task.tokens[:, 1:].flatten().tolist())
    if task.name == "recall":
        ids = {word: number for number, word in enumerate(RECALL_WORDS)}
        keys = {ids[key] for key in KEYS}
        kind = {ids[value] for value in VALUES}
    rows = zip(task.tokens.tolist(), task.sources.tolist(), task.answers.tolist(), strict=True)
    for number, (row, sources, answer) in enumerate(rows):
        if change == "source":
            choices = sorted(kind - set(row))
            if not choices:
                raise InvalidInputError("prompt_pairs: no token is left to take the source's place; make more prompts.")
            others.append(rng.choice(choices))
            corrupted[number, sources.index(True)] = others[-1]
            continue
        questions = [position for position in range(len(row) - 2) if _is_question(row, position, answer, keys)]
        if not questions:
            raise InvalidInputError(f"prompt_pairs: prompt {number} answers no other question.")
        position = rng.choice(questions)
        corrupted[number, -1] = row[position]
        others.append(row[position + 1])
    return PromptPairs(f"{task.name}, {change} changed", task.tokens, corrupted, task.answers, torch.tensor(others))


def _is_question(row: list[int], position: int, answer: int, keys: set[int]) -> bool:
    """True if a token at the end of the prompt would have another answer: it occurs once, and so does what follows."""
    token = row[position]
    following = row[position + 1]
    if row.count(token) > 1 or following == answer:
        return False
    if keys:
        return token in keys
    return row.count(following) == 1


# ------------------------------------------------------------------ texts of your own


@checked_names
def text_pairs(
    model: ModelLike,
    clean: Table,
    corrupted: Texts = None,
    *,
    target: Answers = None,
    minus: Answers = None,
    name: str = "texts",
    prepend_bos: bool | None = None,
) -> PromptPairs:
    """Clean prompts beside corrupted ones, as texts that have the same number of tokens.

    Args:
        model: whose tokenizer reads them.
        clean: the clean prompts; or a data frame, a mapping, or the path of a CSV file with a header, with columns
            ``clean`` and ``corrupted``, and where known ``target`` and ``minus``.
        corrupted: the corrupted prompts, beside a list of clean ones.
        target, minus: what follows each clean prompt, and what follows each corrupted one: tokens with their leading
            space, or ids. None takes the column, or without one what the model itself predicts.
        name: of the task.
        prepend_bos: as in TransformerLens.

    Raises:
        InvalidInputError: a column that is missing, lists of different lengths, a pair that does not align (it shows
            where), prompts of several lengths, an answer of several tokens, or one answer for both prompts of a pair.

    >>> from tensorlens_tl import evaluate
    >>> pairs = evaluate.text_pairs(model, ["The value of"], ["The name of"], target=[" the"], minus=[" a"])
    >>> (pairs.clean != pairs.corrupted).nonzero().tolist()
    [[0, 2]]
    """
    texts = _Texts.of(clean, corrupted, target, minus)
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
        _answers(view, first, texts.target, "target"),
        _answers(view, second, texts.minus, "minus"),
    )


@checked_names
def text_answers(
    model: ModelLike,
    clean: Table,
    corrupted: Texts = None,
    *,
    target: Answers = None,
    name: str = "texts",
    prepend_bos: bool | None = None,
) -> KnownAnswers:
    """Prompts whose answer is determined by the tokens in which each differs from a corrupted one.

    Args:
        model, clean, corrupted, target, name, prepend_bos: as for `text_pairs`.

    Returns:
        The clean prompts, with those tokens as their true sources: for `known_answer`. Both prompts of a pair have as
        many tokens; pairs may have more or fewer than others.

    Raises:
        InvalidInputError: as for `text_pairs`, but for prompts of several lengths; also a pair of equal prompts.

    >>> from tensorlens_tl import evaluate
    >>> task = evaluate.text_answers(model, ["The value of"], ["The name of"], target=[" the"])
    >>> task.sources.nonzero().tolist()
    [[0, 2]]
    """
    texts = _Texts.of(clean, corrupted, target, None)
    view = ModelView(model)
    rows = [list(map(torch.tensor, side)) for side in texts.aligned(view, prepend_bos)]
    first, second = (pad_sequence(side, batch_first=True) for side in rows)
    equal = (first == second).all(1)
    if bool(equal.any()):
        raise InvalidInputError(f"pair {int(equal.nonzero()[0])}: both prompts are equal, so nothing is a source.")
    lengths = torch.tensor([len(row) for row in rows[0]])
    if bool((lengths == first.shape[1]).all()):
        return KnownAnswers(name, first, _answers(view, first, texts.target, "target"), first != second)
    predicted = torch.zeros_like(lengths)
    task = KnownAnswers(name, first, predicted, first != second, lengths)
    if texts.target is not None:
        return replace(task, answers=_answers(view, first, texts.target, "target"))
    for part, length in task.parts(PROMPTS_AT_ONCE):
        predicted[part] = _answers(view, first[part, :length], None, "target")
    return replace(task, answers=predicted)


@dataclass(frozen=True)
class _Texts:
    """Pairs of texts, or of chats, and what follows each."""

    clean: list[Any]
    corrupted: list[Any]
    target: Answers
    minus: Answers

    @classmethod
    def of(cls, clean: Table, corrupted: Texts, target: Answers, minus: Answers) -> "_Texts":
        """Two lists, or the columns of a table."""
        if corrupted is None:
            columns = _columns(clean)
            if target is None:
                target = columns.get("target")
            if minus is None:
                minus = columns.get("minus")
            clean, corrupted = (columns[column] for column in COLUMNS)
        sides: dict[str, Any] = {"clean": plain(clean), "corrupted": plain(corrupted)}  # also columns and arrays
        if not all(isinstance(side, Sequence) and not isinstance(side, str) for side in sides.values()):
            raise InvalidInputError("clean and corrupted: pass two lists of texts, or one table with both as columns.")
        counts = {name: len(side) for name, side in sides.items()}
        counts |= {name: len(part) for name, part in (("target", target), ("minus", minus)) if part is not None}
        if len(set(counts.values())) > 1 or not counts["clean"]:
            raise InvalidInputError(f"pairs: there are {counts}; pass the same number of each, and one at least.")
        return cls(list(sides["clean"]), list(sides["corrupted"]), target, minus)

    def aligned(self, view: ModelView, prepend_bos: bool | None) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of both prompts of every pair."""
        clean, corrupted = (tokenized(view, texts, prepend_bos) for texts in (self.clean, self.corrupted))
        for number, (first, second) in enumerate(zip(clean, corrupted, strict=True)):
            if len(first) != len(second):
                raise InvalidInputError(_misaligned(view, number, first, second))
        return clean, corrupted


def _columns(table: Any) -> dict[str, list[str]]:
    """The columns of a frame, a mapping or a CSV file."""
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
