"""Text among tokens: where a text stands in a prompt, and which tokens make a word."""

import string
from collections.abc import Sequence

from tensorlens_tl.errors import InvalidInputError


def find(tokens: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Every occurrence of a text that begins and ends with whole tokens, as ``(first, last + 1)``.

    White space at its ends does not count, nor punctuation where the text occurs only with it; ``##`` continues a word.

    >>> find(["If", " the", " file", " is", " un", "readable"], "file")
    [(2, 3)]
    >>> find(["If", " the", " file", " is", " un", "readable"], "unreadable")
    [(4, 6)]
    >>> find([" of", " strings."], "strings")
    [(1, 2)]

    Raises:
        InvalidInputError: no such occurrence.
    """
    pieces = any(token.startswith("##") for token in tokens)
    texts = [without_mark(token) if token.startswith("##") else " " * pieces + token for token in tokens]
    for trimmed in (str.strip, _bare):
        wanted = trimmed(text)
        found = []
        for first in range(len(texts) if wanted else 0):
            start = trimmed(texts[first])
            if not start or not wanted.startswith(start):
                continue
            joined = ""
            for last in range(first, len(texts)):
                joined += texts[last]
                if trimmed(joined) == wanted:
                    found.append((first, last + 1))
                    break
                if len(trimmed(joined)) > len(wanted):
                    break
        if found:
            return found
    raise InvalidInputError(f"{text!r} does not occur as whole tokens; the prompt's tokens are {list(tokens)}.")


def find_real(tokens: Sequence[str], mask: Sequence[bool], text: str) -> list[list[int]]:
    """The same among a prompt's real tokens: the positions of every occurrence.

    Raises:
        InvalidInputError: no such occurrence.
    """
    real = [position for position, kept in enumerate(mask) if kept]
    return [real[first:last] for first, last in find([tokens[position] for position in real], text)]


def _bare(text: str) -> str:
    """A text without white space and punctuation at its ends."""
    return text.strip(string.whitespace + string.punctuation)


def word_starts(tokens: Sequence[str]) -> list[bool]:
    """Word starts by white space alone, for tokens without a tokenizer; ``##`` continues."""
    pieces = any(token.startswith("##") for token in tokens)
    before = (" ", *tokens[:-1])
    return [
        not token.startswith("##") if pieces else token[:1].isspace() or last[-1:].isspace()
        for token, last in zip(tokens, before, strict=True)
    ]


def word_ids(starts: Sequence[bool], mask: Sequence[bool]) -> list[int]:
    """The word each token belongs to, counted from 0; padding is −1."""
    ids = []
    word = -1
    for starting, real in zip(starts, mask, strict=True):
        word += real and (starting or word < 0)
        ids.append(word if real else -1)
    return ids


def without_mark(token: str) -> str:
    """A token without the ``##`` of WordPiece."""
    return token.removeprefix("##")
