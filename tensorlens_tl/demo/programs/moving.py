"""Programs that move tokens: where from, their position or their order says."""

import random

import torch

from tensorlens_tl.demo.programs.building import SHARP, Head, Neurons, Spaces
from tensorlens_tl.demo.programs.definition import Change, Program, Row, Truth, Why, carried
from tensorlens_tl.demo.programs.parts import (
    SEPARATOR,
    before,
    by_position,
    design,
    places,
    replaced,
    swapped,
    vocabulary,
)


def previous_token() -> Program:
    """L0H0 attends to the token before, and copies it."""
    positions = 12
    words, letters = vocabulary(letters=12)
    spaces = Spaces(token=len(words), position=positions, answer=len(words), idle=len(words))

    def sample(rng: random.Random) -> Row:
        return [0, *rng.choices(letters, k=9)]

    def explain(row: Row, query: int) -> Truth:
        path = (("embed", query - 1), ("L0H0", query))
        return Truth(row[query - 1], (path,), (by_position(0, query, query - 1),))

    def other_source(row: Row, rng: random.Random) -> Row:
        return replaced(row, len(row) - 2, letters, rng)

    return Program(
        "previous-token",
        "says the token before",
        design("previous-token", words, spaces, [before(spaces, positions, "token", "answer")]),
        tuple(range(2, 10)),
        sample,
        explain,
        {"source": Change(other_source, *carried("L0H0.v"))},
    )


def two_back() -> Program:
    """L0H0 copies the token before; L1H0 copies what L0H0 has put there, one position before."""
    positions = 12
    words, letters = vocabulary(letters=12)
    spaces = Spaces(token=len(words), position=positions, previous=len(words), answer=len(words), idle=len(words))
    heads = [before(spaces, positions, "token", "previous"), before(spaces, positions, "previous", "answer")]

    def sample(rng: random.Random) -> Row:
        return [0, *rng.choices(letters, k=9)]

    def explain(row: Row, query: int) -> Truth:
        path = (("embed", query - 2), ("L0H0", query - 1), ("L1H0", query))
        return Truth(row[query - 2], (path,), (by_position(0, query - 1, query - 2), by_position(1, query, query - 1)))

    def other_source(row: Row, rng: random.Random) -> Row:
        return replaced(row, len(row) - 3, letters, rng)

    return Program(
        "two-back",
        "says the token two before, by way of the one between",
        design("two-back", words, spaces, heads),
        tuple(range(3, 10)),
        sample,
        explain,
        {"source": Change(other_source, *carried("L0H0.v", "L1H0.v"))},
    )


def reverse() -> Program:
    """Letters, a separator, and the letters again from the last to the first.

    L0H0 finds the separator and copies its position s. At query p, a neuron of MLP0 for each pair (s, p) writes where
    to look, 2s − 1 − p; L1H0 looks there and copies the token.
    """
    positions = 12
    words, letters = vocabulary(SEPARATOR, letters=12)
    spaces = Spaces(
        token=len(words), position=positions, separator=positions, aim=positions, answer=len(words), idle=len(words)
    )
    score = torch.zeros(len(words), 1)
    score[:2, 0] = torch.tensor([SHARP, 2 * SHARP])  # the first token, where there is no separator yet
    find = Head(
        spaces.read("position", torch.ones(positions, 1)),
        spaces.read("token", score),
        spaces.read("position"),
        spaces.write("separator"),
    )
    copy = Head(
        spaces.read("aim", SHARP * torch.eye(positions)),
        spaces.read("position"),
        spaces.read("token"),
        spaces.write("answer"),
    )
    pairs = [(s, p) for s in range(2, positions) for p in range(s, min(2 * s - 1, positions))]
    one_hot = torch.eye(positions)
    both = Neurons(  # 1 where separator and query are the pair's, nothing where one of them is not
        spaces.read("separator", 2 * one_hot[:, [s for s, _ in pairs]])
        + spaces.read("position", 2 * one_hot[:, [p for _, p in pairs]]),
        torch.full((len(pairs),), -3.0).double(),
        spaces.write("aim", one_hot[[2 * s - 1 - p for s, p in pairs]]),
    )

    def sample(rng: random.Random) -> Row:
        row = rng.sample(letters, rng.choice([5, 6, 7]))
        return [0, *row, 1, *reversed(row)][:11]

    def explain(row: Row, query: int) -> Truth:
        separator = row.index(1)
        source = 2 * separator - 1 - query
        where = frozenset({"pos_embed"})
        finds = Why(0, 0, query, separator, places(query), places(separator), where, frozenset({"embed"}))
        read = frozenset({"MLP0"})
        copies = Why(1, 0, query, source, places(separator, query), places(source), read, where)
        return Truth(row[source], ((("embed", source), ("L1H0", query)),), (finds, copies))

    def other_source(row: Row, rng: random.Random) -> Row:
        return replaced(row, 2 * row.index(1) - len(row), letters, rng)

    def other_choice(row: Row, rng: random.Random) -> Row:
        return swapped(row, row.index(1), row.index(1) + 1)

    return Program(
        "reverse",
        "says the letters before the separator, from the last to the first",
        design("reverse", words, spaces, [find, copy], {0: both}),
        (8, 9, 10),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L1H0.v")),
            "choice": Change(other_choice, *carried("L0H0.k", "MLP0", "L1H0.q")),
        },
    )


def sort() -> Program:
    """Letters, a separator, and the letters again in their order.

    L0H0 scores each letter by how soon it comes after the query's own token in the alphabet, and copies the first.
    """
    words, letters = vocabulary(SEPARATOR, letters=26)
    positions = 12
    last = len(words)
    spaces = Spaces(token=len(words), position=positions, answer=len(words), idle=len(words))
    query_word = torch.arange(len(words))[:, None]
    key_word = torch.arange(len(words))
    later = (key_word > query_word) & (query_word >= 1)  # the separator asks for the first of all
    table = torch.where(later, SHARP * (last - (key_word - query_word)), 0)
    token = spaces.read("token")
    copy = Head(spaces.read("token", table), token, token, spaces.write("answer"))

    def sample(rng: random.Random) -> Row:
        row = rng.sample(letters[::2], 5)  # every other letter, so that the next one can take its place
        return [0, *row, 1, *sorted(row)[:-1]]

    def explain(row: Row, query: int) -> Truth:
        end = row.index(1)
        answer = min(letter for letter in row[1:end] if letter > row[query])
        source = row.index(answer)
        parts = frozenset({"embed"})
        why = Why(0, 0, query, source, places(query), places(source), parts, parts)
        return Truth(answer, ((("embed", source), ("L0H0", query)),), (why,))

    def other_source(row: Row, rng: random.Random) -> Row:
        source = row.index(explain(row, len(row) - 1).answer)
        row[source] += 1
        return row

    def other_choice(row: Row, rng: random.Random) -> Row:
        row[-1] = rng.choice(row[row.index(1) : -1])
        return row

    return Program(
        "sort",
        "says the letters before the separator in the order of the alphabet",
        design("sort", words, spaces, [copy]),
        (6, 7, 8, 9, 10),
        sample,
        explain,
        {"source": Change(other_source, *carried("L0H0.v")), "choice": Change(other_choice, *carried("L0H0.q"))},
    )
