"""Programs that look something up: tokens say where."""

import math
import random

import torch

from tensorlens_tl.demo.programs.building import BOS, SHARP, Head, Spaces
from tensorlens_tl.demo.programs.definition import Change, Program, Row, Truth, Why, carried
from tensorlens_tl.demo.programs.parts import before, by_position, design, places, replaced, swapped, vocabulary
from tensorlens_tl.results import ARROW

EMBED = frozenset({"embed"})
PREVIOUS = frozenset({"L0H0"})

RARE = 0.1
"""In `counting`: the attention that a counted letter gets, as a share of the first token's."""

LOGITS = 5000.0
"""In `counting`: what logits are multiplied by; the right digit is then above its neighbours by 8 or more."""


def induction() -> Program:
    """A segment of different letters, and its beginning again.

    L0H0 notes at each token which one came before; L1H0 attends to where that is the query's own token, and copies.
    """
    positions = 16
    words, letters = vocabulary(letters=16)
    spaces = Spaces(token=len(words), position=positions, previous=len(words), answer=len(words), idle=len(words))
    match = Head(
        spaces.read("token", SHARP * torch.eye(len(words))),
        spaces.read("previous"),
        spaces.read("token"),
        spaces.write("answer"),
    )

    def sample(rng: random.Random) -> Row:
        row = rng.sample(letters, 8)
        return [0, *row, *row[:4]]

    def explain(row: Row, query: int) -> Truth:
        source = row.index(row[query]) + 1
        why = Why(1, 0, query, source, places(query), places(source - 1), EMBED, PREVIOUS)
        return Truth(row[source], ((("embed", source), ("L1H0", query)),), (by_position(0, source, source - 1), why))

    def other_source(row: Row, rng: random.Random) -> Row:
        return replaced(row, 5, letters, rng)

    def other_choice(row: Row, rng: random.Random) -> Row:
        return swapped(row, 4, 7)  # the query's own token then stands elsewhere, and another follows it

    return Program(
        "induction",
        "goes on with a segment that it has seen",
        design("induction", words, spaces, [before(spaces, positions, "token", "previous"), match]),
        (9, 10, 11, 12),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L1H0.v")),
            "choice": Change(other_choice, *carried("L0H0.v", "L1H0.k")),
        },
    )


def two_hop() -> Program:
    """Pairs such as ``a b`` and ``b c`` in any order, then ``a``, which asks for ``c``.

    L0H0 notes at the second of each pair which one is the first; L1H0 finds the question's partner, L2H0 that one's.
    """
    pairs = 4
    words, letters = vocabulary(letters=12)
    positions = 12
    ends = range(2, 2 * pairs + 1, 2)
    spaces = Spaces(
        token=len(words), position=positions, previous=len(words), hop=len(words), answer=len(words), idle=len(words)
    )
    aim = torch.zeros(positions, positions)
    aim[:, 0] = SHARP  # all others than a pair's end attend to the first token, and note nothing
    aim[list(ends)] = SHARP * torch.eye(positions)[[end - 1 for end in ends]]
    known = torch.eye(len(words))
    known[0] = 0
    note = Head(
        spaces.read("position", aim),
        spaces.read("position"),
        spaces.read("token", known),
        spaces.write("previous"),
    )
    first, second = (
        Head(
            spaces.read(query_space, SHARP * torch.eye(len(words))),
            spaces.read("previous"),
            spaces.read("token"),
            spaces.write(answer_space),
        )
        for query_space, answer_space in (("token", "hop"), ("hop", "answer"))
    )

    def sample(rng: random.Random) -> Row:
        a, b, c, d, e, f = rng.sample(letters, 6)
        facts = [(a, b), (b, c), (d, e), (e, f)]
        rng.shuffle(facts)
        return [0, *(letter for fact in facts for letter in fact), a, c, d]

    def explain(row: Row, query: int) -> Truth:
        partner = {row[end - 1]: end for end in ends}
        middle = partner[row[query]]
        source = partner[row[middle]]
        hop = Why(1, 0, query, middle, places(query), places(middle - 1), EMBED, PREVIOUS)
        answer = Why(2, 0, query, source, places(middle), places(source - 1), frozenset({"L1H0"}), PREVIOUS)
        choices = (by_position(0, source, source - 1), hop, answer)
        return Truth(row[source], ((("embed", source), ("L2H0", query)),), choices)

    def other_source(row: Row, rng: random.Random) -> Row:
        (source,) = explain(row, 11).sources
        return replaced(row, source, letters, rng)

    def other_choice(row: Row, rng: random.Random) -> Row:
        row[11] = row[9]
        return row

    return Program(
        "two-hop",
        "says the partner of the question's partner",
        design("two-hop", words, spaces, [note, first, second]),
        (9, 11),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L2H0.v")),
            "choice": Change(other_choice, *carried("L1H0.q", "L2H0.q")),
        },
    )


def counting() -> Program:
    """Letters and dots, then questions such as ``?a``: how many of that letter are there?

    L0H0 attends to the first token, and to each letter asked for `RARE` as much; of n letters it writes the attention
    f_n = n·RARE / (1 + n·RARE) that they get together. The logit of the digit k is 2·f·f_k − f_k² (times `LOGITS`),
    which is largest where f_k is nearest to f.
    """
    digits = tuple("0123456")
    question_words = tuple(f"?{letter}" for letter in "abcd")
    words = (BOS, ".", *"abcd", *question_words, *digits)
    dot = 1
    letters = [2, 3, 4, 5]
    questions = 6
    numbers = 10
    positions = 12
    slots = 9
    spaces = Spaces(token=len(words), position=positions, count=1, idle=len(words))
    table = torch.zeros(len(words), len(words))
    is_letter = torch.zeros(len(words), 1)
    table[questions:numbers, letters] = SHARP * torch.eye(len(letters))
    table[questions:numbers, 0] = SHARP - math.log(RARE)
    is_letter[letters] = 1
    token = spaces.read("token")
    count = Head(spaces.read("token", table), token, spaces.read("token", is_letter), spaces.write("count"))
    shares = RARE * torch.arange(len(digits)).double()
    shares = shares / (1 + shares)
    slope = torch.zeros(len(words)).double()
    offset = torch.full((len(words),), -1.0).double()
    slope[numbers:] = 2 * shares
    offset[numbers:] = -(shares**2)
    unembed = spaces.read("count", slope[None]) + spaces.read("position", offset.expand(positions, -1))

    def sample(rng: random.Random) -> Row:
        while True:
            row = rng.choices([dot, *letters], k=slots)
            some = [letter for letter in letters if 2 <= row.count(letter) < len(digits)]
            if len({row.count(letter) for letter in some}) > 1:
                break
        first = rng.choice(some)
        second = rng.choice([letter for letter in some if row.count(letter) != row.count(first)])
        return [0, *row, *(questions + letters.index(letter) for letter in (first, second))]

    def explain(row: Row, query: int) -> Truth:
        letter = letters[row[query] - questions]
        matches = [place for place in range(1, slots + 1) if row[place] == letter]
        why = Why(0, 0, query, matches[0], places(query), places(matches[0]), EMBED, EMBED)
        paths = tuple((("embed", place), ("L0H0", query)) for place in matches)
        return Truth(numbers + len(matches), paths, (why,), (("pos_embed", query),))

    def other_source(row: Row, rng: random.Random) -> Row:
        row[rng.choice(sorted(explain(row, len(row) - 1).sources))] = dot
        return row

    def other_choice(row: Row, rng: random.Random) -> Row:
        row[-1] = row[-2]
        return row

    return Program(
        "counting",
        "says how many of the letter asked for there are",
        design("counting", words, spaces, [count], unembed=LOGITS * unembed),
        (slots + 1, slots + 2),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L0H0.v", more=(f"embed{ARROW}L0H0.k",))),
            "choice": Change(other_choice, *carried("L0H0.q")),
        },
    )
