"""Pairs of prompts for trained language models: tasks whose texts are built for any tokenizer.

| task | clean prompt | its answer | the corrupted prompt |
| --- | --- | --- | --- |
| `indirect objects` | When Mary and John went to the store, John gave a drink to | Mary | has Mary give it |
| `agreement` | …, and the keys to the cabinet | are | has one key |
| `retrieval` | My dog is called Max and my cat is called Luna. My cat is called | Luna | has a cat of another name |
| `facts` | The capital of France is the city of | Paris | has another country |

In `agreement` a noun of the other number stands between subject and verb. In `retrieval` one token determines the
answer. A pair is used where both prompts have as many tokens as those of all other pairs, answers are one token each,
and the model predicts both. Texts are drawn at random until there are enough.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tensorlens_tl._arguments import check_choice, checked_names, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.scorers import PROMPTS_AT_ONCE, WholeNumber, predictions
from tensorlens_tl.evaluate.tasks import KnownAnswers, PromptPairs
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import tokenized

NAMES = (
    "Mary", "John", "Anna", "Paul", "Jane", "Peter", "Sarah", "David", "Laura", "James", "Emma", "Mark", "Alice", "Tom",
    "Kate", "Robert", "Lisa", "Michael", "Susan", "George",
)  # fmt: skip
PETS = ("Luna", "Max", "Bella", "Charlie", "Daisy", "Rocky", "Lucy", "Buddy", "Molly", "Jack")
ANIMALS = ("dog", "cat", "horse", "bird", "fish", "rabbit")
GIFTS = (("store", "drink"), ("office", "letter"), ("garden", "flower"), ("school", "book"), ("park", "ball"))
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "Japan": "Tokyo", "Russia": "Moscow",
    "Greece": "Athens", "Egypt": "Cairo", "Ireland": "Dublin", "Poland": "Warsaw", "England": "London",
    "Austria": "Vienna", "Portugal": "Lisbon", "Cuba": "Havana", "China": "Beijing", "Sweden": "Stockholm",
}  # fmt: skip
THINGS = (
    ("key", "cabinet"), ("picture", "house"), ("book", "teacher"), ("letter", "friend"), ("car", "neighbor"),
    ("door", "room"), ("window", "building"), ("road", "village"), ("dog", "farmer"), ("river", "city"),
)  # fmt: skip
BETWEEN = {"key": "to", "road": "to", "door": "of", "window": "of", "picture": "of", "river": "near"}

Pair = tuple[str, str, str, str]
"""The clean text, the corrupted one, and the answer of each."""


def _objects(rng: random.Random) -> Pair:
    (first, second), (place, thing) = rng.sample(NAMES, 2), rng.choice(GIFTS)
    text = f"When {first} and {second} went to the {place}, {{}} gave a {thing} to"
    return text.format(second), text.format(first), f" {first}", f" {second}"


def _agreement(rng: random.Random) -> Pair:
    (subject, other), several = rng.choice(THINGS), rng.random() < 0.5
    numbers = (f"{subject}s", subject) if several else (subject, f"{subject}s")
    attractor = other if several else f"{other}s"
    start = rng.choice(("I think that", "She said that", "Everyone knows that", "It is true that"))
    text = f"{start} the {{}} {BETWEEN.get(subject, 'of')} the {attractor}"
    verb, other_verb = (" are", " is") if several else (" is", " are")
    return text.format(numbers[0]), text.format(numbers[1]), verb, other_verb


def _retrieval(rng: random.Random) -> Pair:
    (one, two), (first, second, third) = rng.sample(ANIMALS, 2), rng.sample(PETS, 3)
    text = f"My {one} is called {first} and my {two} is called {{}}. My {two} is called"
    return text.format(second), text.format(third), f" {second}", f" {third}"


def _facts(rng: random.Random) -> Pair:
    first, second = rng.sample(sorted(CAPITALS), 2)
    text = rng.choice(("The capital of {} is the city of", "Everyone knows that the capital of {} is"))
    return text.format(first), text.format(second), f" {CAPITALS[first]}", f" {CAPITALS[second]}"


TASKS: dict[str, Callable[[random.Random], Pair]] = {
    "indirect objects": _objects,
    "agreement": _agreement,
    "retrieval": _retrieval,
    "facts": _facts,
}
"""What draws a pair of texts of each task."""

CANDIDATES = 200
"""How many different pairs of texts are tried at most."""


@dataclass(frozen=True)
class LanguageTask:
    """Pairs of prompts that a model answers, and how many it was given.

    Attributes:
        name: of the task.
        pairs: the prompts and their answers.
        tried: how many pairs were tried until there were enough.
        aligned: how many of these had prompts of the usual length and answers of one token.
    """

    name: str
    pairs: PromptPairs
    tried: int
    aligned: int

    @property
    def known(self) -> KnownAnswers:
        """The clean prompts; their true sources are the tokens in which the corrupted ones differ."""
        pairs = self.pairs
        return KnownAnswers(self.name, pairs.clean, pairs.answers, pairs.clean != pairs.corrupted)


@checked_names
def language_task(model: ModelLike, name: str, prompts: WholeNumber = 8, *, seed: int = 0) -> LanguageTask:
    """Pairs of prompts of a task that a trained model answers, built for its tokenizer.

    Args:
        model: of language, with a tokenizer.
        name: ``"indirect objects"``, ``"agreement"``, ``"retrieval"`` or ``"facts"``.
        prompts: how many pairs.
        seed: of the texts.

    Raises:
        InvalidInputError: no such task, or the model answers fewer pairs of those that were tried.

    >>> from tensorlens_tl import evaluate
    >>> try:
    ...     evaluate.language_task(model, "facts")
    ... except tlens.InvalidInputError as error:
    ...     print(str(error)[:29])
    facts: of 200 pairs of prompt
    """
    check_choice("name", name, TASKS)
    prompts = whole_number("prompts", prompts, 1, CANDIDATES)
    view, rng = ModelView(model), random.Random(whole_number("seed", seed, least=0))
    texts = list(dict.fromkeys(TASKS[name](rng) for _ in range(4 * CANDIDATES)))[:CANDIDATES]
    clean, corrupted, *words = zip(*texts, strict=True)
    sides = [tokenized(view, list(side), None) for side in (clean, corrupted)]
    answers = [[view.tokenizer(word, add_special_tokens=False).input_ids for word in side] for side in words]
    rows = list(zip(*sides, *answers, strict=True))
    usual, _ = Counter(len(row[0]) for row in rows).most_common(1)[0]
    aligned = [
        number for number, row in enumerate(rows) if [*map(len, row)] == [usual, usual, 1, 1] and row[2] != row[3]
    ]
    right: list[int] = []
    for start in range(0, len(aligned), PROMPTS_AT_ONCE):
        part = aligned[start : start + PROMPTS_AT_ONCE]
        predicted = [
            predictions(freeze(model, torch.tensor([rows[number][side] for number in part]), verify=False))[0].tolist()
            for side in (0, 1)
        ]
        right += [
            number
            for number, first, second in zip(part, *predicted, strict=True)
            if [[first], [second]] == [*rows[number][2:]]
        ]
        if len(right) >= prompts:
            break
    if len(right) < prompts:
        raise InvalidInputError(
            f"{name}: of {len(texts)} pairs of prompts, {len(aligned)} have one length and answers of one token in "
            f"this tokenizer, and the model answers {len(right)} of these, fewer than {prompts}: nothing to explain. "
            "Use a model that does the task, or ask for fewer."
        )
    chosen = right[:prompts]
    tried = chosen[-1] + 1
    columns = [torch.tensor([rows[number][side] for number in chosen]) for side in range(4)]
    pairs = PromptPairs(name, columns[0], columns[1], columns[2][:, 0], columns[3][:, 0])
    return LanguageTask(name, pairs, tried, sum(number < tried for number in aligned))
