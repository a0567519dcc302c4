"""Pairs of prompts for trained language models: tasks whose texts are built for any tokenizer.

| task | clean prompt | its answer | the corrupted prompt |
| --- | --- | --- | --- |
| `indirect objects` | When Mary and John went to the store, John gave a drink to | Mary | has Mary give it |
| `agreement` | …, and the keys to the cabinet | are | has one key |
| `retrieval` | My dog is called Max and my cat is called Luna. My cat is called | Luna | has a cat of another name |
| `facts` | The capital of France is the city of | Paris | has another country |
| `greater than` | The war lasted from the year 1739 to the year 17 | a digit above 3 | begins in another decade |
| `sequences` | Monday, Tuesday, Wednesday, | Thursday | has other days, months or numbers |
| `opposites` | The opposite of big is small. The opposite of hot is | cold | has another word |
| `copying` | List: tree glass road … tree glass | road | has another word in the first copy |
| `arguments` | def save(self, path, mode): … :param path: the path :param | mode | has another argument |
| `pronouns` | Mary was late because | she | has a man's name |

Indirect objects come in either order of names and in twenty templates. In `agreement` a noun of the other number stands
between subject and verb. In `SOURCED` one token is the answer, which is read from there. A pair is used where both
prompts have as many tokens as those of most other pairs, answers are one token each, and the model predicts both. Texts
are drawn at random until there are enough.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorlens_tl._arguments import Seed, Whole, check_choice, checked_names, whole_number, whole_seed
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.scorers import PROMPTS_AT_ONCE, predictions
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
OPENINGS = (
    "When {} and {} went to",
    "After {} and {} came to",
    "While {} and {} were at",
    "Because {} and {} walked to",
)
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

SPANS = ("war", "journey", "reign", "project", "trial", "drought", "treaty", "siege")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
OPPOSITES = (
    ("hot", "cold"), ("up", "down"), ("left", "right"), ("high", "low"), ("old", "young"), ("rich", "poor"),
    ("open", "closed"), ("black", "white"), ("early", "late"), ("fast", "slow"), ("good", "bad"), ("full", "empty"),
    ("hard", "soft"), ("light", "dark"), ("long", "short"), ("strong", "weak"), ("true", "false"), ("wet", "dry"),
)  # fmt: skip
WORDS = (
    "tree", "glass", "road", "music", "paper", "king", "stone", "river", "table", "green", "winter", "machine", "money",
    "story", "bread", "engine", "market", "silver", "bridge", "summer", "letter", "garden", "doctor", "window",
)  # fmt: skip
ARGUMENTS = ("path", "mode", "size", "name", "key", "value", "index", "text", "color", "width", "data", "label")
CALLS = ("load", "save", "open", "run", "update", "find")
WOMEN = ("Mary", "Anna", "Jane", "Sarah", "Laura", "Emma", "Alice", "Kate", "Lisa", "Susan")
MEN = ("John", "Paul", "Peter", "David", "James", "Mark", "Tom", "Robert", "Michael", "George")
REASONS = ("was late because", "was happy when", "went home after", "was tired, but", "did not sleep because")

Pair = tuple[str, str, Sequence[str], Sequence[str]]
"""The clean text, the corrupted one, and the answers that are right for each."""


def _objects(rng: random.Random) -> Pair:
    (first, second), (place, thing) = rng.sample(NAMES, 2), rng.choice(GIFTS)
    text = f"{rng.choice(OPENINGS).format(first, second)} the {place}, {{}} gave a {thing} to"
    giver, other = rng.sample((first, second), 2)
    return text.format(giver), text.format(other), [f" {other}"], [f" {giver}"]


def _agreement(rng: random.Random) -> Pair:
    (subject, other), several = rng.choice(THINGS), rng.random() < 0.5
    numbers = (f"{subject}s", subject) if several else (subject, f"{subject}s")
    attractor = other if several else f"{other}s"
    start = rng.choice(("I think that", "She said that", "Everyone knows that", "It is true that"))
    text = f"{start} the {{}} {BETWEEN.get(subject, 'of')} the {attractor}"
    verb, other_verb = (" are", " is") if several else (" is", " are")
    return text.format(numbers[0]), text.format(numbers[1]), [verb], [other_verb]


def _retrieval(rng: random.Random) -> Pair:
    (one, two), (first, second, third) = rng.sample(ANIMALS, 2), rng.sample(PETS, 3)
    text = f"My {one} is called {first} and my {two} is called {{}}. My {two} is called"
    return text.format(second), text.format(third), [f" {second}"], [f" {third}"]


def _facts(rng: random.Random) -> Pair:
    first, second = rng.sample(sorted(CAPITALS), 2)
    text = rng.choice(("The capital of {} is the city of", "Everyone knows that the capital of {} is"))
    return text.format(first), text.format(second), [f" {CAPITALS[first]}"], [f" {CAPITALS[second]}"]


def _greater(rng: random.Random) -> Pair:
    low, high = sorted(rng.sample(range(1, 9), 2))
    text = f"The {rng.choice(SPANS)} lasted from the year 17{{}}9 to the year 17"
    decades = [[str(digit) for digit in range(first + 1, last + 1)] for first, last in ((low, high), (high, 9))]
    sides = rng.sample([(low, decades[0]), (high, decades[1])], 2)
    return text.format(sides[0][0]), text.format(sides[1][0]), sides[0][1], sides[1][1]


def _sequences(rng: random.Random) -> Pair:
    names = rng.choice((DAYS, MONTHS, NUMBERS, LETTERS))
    starts = rng.sample(range(len(names) - 3), 2)
    clean, corrupted = (f"{', '.join(names[start : start + 3])}," for start in starts)
    return clean, corrupted, [f" {names[starts[0] + 3]}"], [f" {names[starts[1] + 3]}"]


def _opposites(rng: random.Random) -> Pair:
    (first, answer), (second, other) = (rng.sample(pair, 2) for pair in rng.sample(OPPOSITES, 2))
    text = "The opposite of big is small. The opposite of {} is"
    return text.format(first), text.format(second), [f" {answer}"], [f" {other}"]


def _copying(rng: random.Random) -> Pair:
    *words, answer, other = rng.sample(WORDS, 9)
    start, again = f"List: {' '.join(words)}", " ".join(words)
    return f"{start} {answer} {again}", f"{start} {other} {again}", [f" {answer}"], [f" {other}"]


def _arguments(rng: random.Random) -> Pair:
    first, second, third, other = rng.sample(ARGUMENTS, 4)
    name = rng.choice(CALLS)
    text = (
        f'def {name}(self, {first}, {second}, {{}}):\n    """{name} it\n\n    :param {first}: the {first}\n'
        f"    :param {second}: the {second}\n    :param"
    )
    return text.format(third), text.format(other), [f" {third}"], [f" {other}"]


def _pronouns(rng: random.Random) -> Pair:
    sides = [(rng.choice(WOMEN), " she"), (rng.choice(MEN), " he")]
    (clean, answer), (corrupted, other) = rng.sample(sides, 2)
    reason = rng.choice(REASONS)
    return f"{clean} {reason}", f"{corrupted} {reason}", [answer], [other]


TASKS: dict[str, Callable[[random.Random], Pair]] = {
    "indirect objects": _objects,
    "agreement": _agreement,
    "retrieval": _retrieval,
    "facts": _facts,
    "greater than": _greater,
    "sequences": _sequences,
    "opposites": _opposites,
    "copying": _copying,
    "arguments": _arguments,
    "pronouns": _pronouns,
}
"""What draws a pair of texts of each task."""

SOURCED = ("retrieval", "copying", "arguments")
"""Tasks in which the answer stands in the prompt, at the token in which clean and corrupted prompts differ."""

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
        return KnownAnswers(self.name, pairs.clean, pairs.target, pairs.clean != pairs.corrupted)


@checked_names
def language_task(model: ModelLike, name: str, prompts: Whole = 8, *, seed: Seed = 0) -> LanguageTask:
    """Pairs of prompts of a task that a trained model answers, built for its tokenizer.

    Args:
        model: of language, with a tokenizer.
        name: ``"indirect objects"``, ``"agreement"``, ``"retrieval"``, ``"facts"``, ``"greater than"``,
            ``"sequences"``, ``"opposites"``, ``"copying"``, ``"arguments"`` or ``"pronouns"``.
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
    view, rng = ModelView(model), random.Random(whole_seed(seed, least=0))
    drawn = (TASKS[name](rng) for _ in range(4 * CANDIDATES))
    texts = list({text[:2]: text for text in drawn}.values())[:CANDIDATES]
    sides = [tokenized(view, list(side), None) for side in list(zip(*texts, strict=True))[:2]]
    answers = [[_single_tokens(view.tokenizer, side) for side in text[2:]] for text in texts]
    rows = list(zip(*sides, answers, strict=True))
    usual, _ = Counter(len(clean) for clean, _, _ in rows).most_common(1)[0]
    aligned = [
        number
        for number, (clean, corrupted, of_row) in enumerate(rows)
        if len(clean) == len(corrupted) == usual and all(of_row) and not of_row[0] & of_row[1]
    ]
    right = dict[int, tuple[int, int]]()
    for start in range(0, len(aligned), PROMPTS_AT_ONCE):
        part = aligned[start : start + PROMPTS_AT_ONCE]
        predicted = [
            predictions(freeze(model, torch.tensor([rows[number][side] for number in part]), verify=False))[0].tolist()
            for side in (0, 1)
        ]
        for number, *pair in zip(part, *predicted, strict=True):
            if all(token in known for token, known in zip(pair, answers[number], strict=True)):
                right[number] = pair[0], pair[1]
        if len(right) >= prompts:
            break
    if len(right) < prompts:
        raise InvalidInputError(
            f"{name}: of {len(texts)} pairs of prompts, {len(aligned)} have one length and answers of one token in "
            f"this tokenizer, and the model answers {len(right)} of these, fewer than {prompts}: nothing to explain. "
            "Use a model that does the task, or ask for fewer."
        )
    chosen = [*right][:prompts]
    tried = chosen[-1] + 1
    clean, corrupted = (torch.tensor([rows[number][side] for number in chosen]) for side in (0, 1))
    first, second = torch.tensor([right[number] for number in chosen]).T
    pairs = PromptPairs(name, clean, corrupted, first, second)
    return LanguageTask(name, pairs, tried, sum(number < tried for number in aligned))


def _single_tokens(tokenizer: Any, words: Sequence[str]) -> set[int]:
    """The tokens of those words that are one token."""
    tokens = [tokenizer(word, add_special_tokens=False).input_ids for word in words]
    return {ids[0] for ids in tokens if len(ids) == 1}
