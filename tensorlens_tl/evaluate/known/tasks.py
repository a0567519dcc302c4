"""Tasks whose true answer is known: prompts, and the source token that determines what follows.

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
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.arguments import Mask, TokenIds, WholeNumber

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
            object.__setattr__(self, name, token_ids(f"KnownAnswers: {name}", getattr(self, name), axes))
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
        lengths = token_ids("KnownAnswers: lengths", lengths, 1)
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


if TYPE_CHECKING:
    AnswerTask = KnownAnswers
else:
    AnswerTask = Any  # another object is refused with a message


def token_ids(what: str, value: TokenIds, axes: int) -> Int[Tensor, "..."]:
    """Token ids as a tensor of so many axes; lists of them will do.

    Raises:
        InvalidInputError: texts, which only a model's tokenizer turns into tokens, or anything else.
    """
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


@checked_names
def recall(
    prompts: WholeNumber = 200, *, seed: int = 0, pairs: WholeNumber = 8, distractors: WholeNumber = 10
) -> KnownAnswers:
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
    prompts = whole_number("prompts", prompts, least=1)
    pairs = whole_number("pairs", pairs, 1, len(KEYS))
    distractors = whole_number("distractors", distractors, 0)
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
def brackets(prompts: WholeNumber = 200, *, seed: int = 0, length: WholeNumber = 24) -> KnownAnswers:
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
    prompts = whole_number("prompts", prompts, least=1)
    length = whole_number("length", length, least=4)
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
    prompts: WholeNumber = 200,
    *,
    d_vocab: WholeNumber,
    seed: int = 0,
    segment: WholeNumber = 16,
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
    prompts = whole_number("prompts", prompts, least=1)
    segment = whole_number("segment", segment, least=4)
    d_vocab = whole_number("d_vocab", d_vocab, least=least_token + segment, why="there must be a segment of tokens")
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
