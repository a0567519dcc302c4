"""What several programs are made of.

Every layer has one head more than the program needs: it attends to all tokens and copies them into a space that nothing
reads. Its vectors are as long as the program's own, so that a method that measures vectors sees it, and one that
asks what reaches the answer does not.
"""

import random

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.demo.programs.building import BOS, SHARP, Design, Head, Neurons, Spaces
from tensorlens_tl.demo.programs.definition import Row, Why

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
SEPARATOR = "|"

CONFIDENCE = 10.0
"""The logit of the right answer, where a whole token is copied; all others are 0."""


def shift(positions: int) -> Float[Tensor, "pos pos"]:
    """From each position's one-hot vector to that of the one before it."""
    return torch.diag(torch.ones(positions - 1), -1)


def idle(spaces: Spaces, positions: int) -> Head:
    """A head that attends to all tokens, to later ones a little more, and writes what nothing reads."""
    always = torch.ones(positions, 1)
    later = torch.arange(positions)[:, None] / 4
    return Head(
        spaces.read("position", always), spaces.read("position", later), spaces.read("token"), spaces.write("idle")
    )


def before(spaces: Spaces, positions: int, value: str, out: str) -> Head:
    """A head that copies a space of the position before."""
    query = spaces.read("position", SHARP * shift(positions))
    return Head(query, spaces.read("position"), spaces.read(value), spaces.write(out))


def design(
    name: str,
    words: tuple[str, ...],
    spaces: Spaces,
    heads: list[Head],
    neurons: dict[int, Neurons] | None = None,
    unembed: Float[Tensor, "width word"] | None = None,
) -> Design:
    """One head of the program in each layer, and an idle one."""
    unembed = CONFIDENCE * spaces.read("answer") if unembed is None else unembed
    positions = spaces.write("position")
    layers = tuple((head, idle(spaces, len(positions))) for head in heads)
    return Design(name, words, spaces.write("token"), positions, layers, unembed, neurons or {})


def vocabulary(*special: str, letters: int) -> tuple[tuple[str, ...], list[int]]:
    """The words of a program, and the token ids of its letters."""
    words = (BOS, *special, *LETTERS[:letters])
    return words, list(range(len(words) - letters, len(words)))


def places(*positions: int) -> frozenset[int]:
    """Positions as a set."""
    return frozenset(positions)


def by_position(layer: int, query: int, key: int) -> Why:
    """A choice of the layer's first head that position embeddings alone make."""
    here = frozenset({"pos_embed"})
    return Why(layer, 0, query, key, places(query), places(key), here, here)


def swapped(row: Row, first: int, second: int) -> Row:
    """The row with two of its tokens exchanged."""
    row[first], row[second] = row[second], row[first]
    return row


def replaced(row: Row, place: int, letters: list[int], rng: random.Random) -> Row:
    """The row with a letter in one place that it has nowhere."""
    row[place] = rng.choice([letter for letter in letters if letter not in row])
    return row
