"""Pairs of a clean and a corrupted prompt that differ in one token and in what follows.

| change | what is replaced | what the model must notice |
| --- | --- | --- |
| `source` | the token that determines the answer, by another of its kind | what stands there: *what* heads move |
| `question` | the last token, by another that is answered in the prompt | where to look: *from where* they move it |

The corrupted prompt has another answer; the logit difference of the two answers is what circuits are measured by.
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.known.tasks import KEYS, RECALL_WORDS, VALUES, AnswerTask, KnownAnswers, token_ids

if TYPE_CHECKING:
    Change = Literal["source", "question"]
else:
    Change = Any  # another one is refused by `prompt_pairs`

CHANGES = ("source", "question")


@dataclass(frozen=True)
class PromptPairs:
    """Clean prompts beside corrupted ones of the same length.

    Attributes:
        name: of the task, and of the change.
        clean, corrupted: token ids, `[prompt, pos]`.
        answers, others: what follows the clean prompt, and what follows the corrupted one, `[prompt]`.
    """

    name: str
    clean: Int[Tensor, "prompt pos"]
    corrupted: Int[Tensor, "..."]
    answers: Int[Tensor, "..."]
    others: Int[Tensor, "..."]

    def __post_init__(self) -> None:
        for name, axes in (("clean", 2), ("corrupted", 2), ("answers", 1), ("others", 1)):
            object.__setattr__(self, name, token_ids(f"PromptPairs: {name}", getattr(self, name), axes))
        if self.clean.shape != self.corrupted.shape:
            raise InvalidInputError(
                f"PromptPairs: clean prompts are {tuple(self.clean.shape)} and corrupted ones "
                f"{tuple(self.corrupted.shape)}; positions must match."
            )
        for name, tokens in (("answers", self.answers), ("others", self.others)):
            if tuple(tokens.shape) != (len(self.clean),):
                raise InvalidInputError(f"PromptPairs: {name} are {tuple(tokens.shape)}, one for each prompt needed.")
        same = self.answers == self.others
        if bool(same.any()):
            pair = int(same.nonzero()[0])
            raise InvalidInputError(
                f"PromptPairs: answers and others of pair {pair} are the same token, {int(self.answers[pair])}, whose "
                "logit difference is zero. Choose a corrupted prompt that the model answers with another token, or "
                "name the two tokens (answers=, others=)."
            )

    def __len__(self) -> int:
        return len(self.clean)

    def __repr__(self) -> str:
        return f"PromptPairs({self.name!r}, prompts={len(self)}, pos={self.clean.shape[1]})"

    def only(self, selection: Bool[Tensor, "prompt"] | Int[Tensor, "selected"]) -> "PromptPairs":
        """Some of the pairs, by a mask or by number."""
        parts = (self.clean, self.corrupted, self.answers, self.others)
        return PromptPairs(self.name, *(part[selection] for part in parts))


if TYPE_CHECKING:
    Pairs = PromptPairs
else:
    Pairs = Any  # another object is refused with a message


@checked_names
def prompt_pairs(task: AnswerTask, change: Change = "source", *, seed: int = 0) -> PromptPairs:
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
    """Whether a token at the end of the prompt would have another answer: it occurs once, and so does what follows."""
    token = row[position]
    following = row[position + 1]
    if row.count(token) > 1 or following == answer:
        return False
    if keys:
        return token in keys
    return row.count(following) == 1
