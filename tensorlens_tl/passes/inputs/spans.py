"""Text among tokens: where a text stands in a prompt, and which tokens make a word."""

import string
from collections.abc import Sequence

from tensorlens_tl.errors import InvalidInputError

NO_TEXTS = {
    "mean": "Only `attribute` takes a mean over queries; query='all' gives every one of them here.",
    "last": "The last token is query=-1.",
    "first": "The first token is query=0.",
}
"""What texts stand for that are no part of the prompt."""


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
    texts = [_continued(token) for token in tokens] if pieces else tokens
    for trimmed in (str.strip, _bare):
        wanted = trimmed(text)
        matches: list[tuple[int, int]] = []
        for first in range(len(texts) if wanted else 0):
            start = trimmed(texts[first])
            if not start or not wanted.startswith(start):
                continue
            joined = ""
            for last in range(first, len(texts)):
                joined += texts[last]
                if trimmed(joined) == wanted:
                    matches.append((first, last + 1))
                    break
                if len(trimmed(joined)) > len(wanted):
                    break
        if matches:
            return matches
    hint = ""
    if text in NO_TEXTS:
        hint = f" {NO_TEXTS[text]}"
    raise InvalidInputError(f"{text!r} does not occur as whole tokens; the prompt's tokens are {list(tokens)}.{hint}")


def find_real(tokens: Sequence[str], mask: Sequence[bool], text: str) -> list[list[int]]:
    """The same among a prompt's real tokens: the positions of every occurrence.

    Raises:
        InvalidInputError: no such occurrence.
    """
    real = [position for position, is_real in enumerate(mask) if is_real]
    return [real[first:last] for first, last in find([tokens[position] for position in real], text)]


def _continued(token: str) -> str:
    """A token of WordPiece as it joins the text before it: after a space, or without one where it continues a word."""
    return without_mark(token) if token.startswith("##") else f" {token}"


def _bare(text: str) -> str:
    """A text without white space and punctuation at its ends."""
    return text.strip(string.whitespace + string.punctuation)


def word_starts(tokens: Sequence[str]) -> list[bool]:
    """Word starts by white space alone, for tokens without a tokenizer; ``##`` continues."""
    if any(token.startswith("##") for token in tokens):
        return [not token.startswith("##") for token in tokens]
    before = (" ", *tokens[:-1])
    return [token[:1].isspace() or last[-1:].isspace() for token, last in zip(tokens, before, strict=True)]


def word_ids(starts: Sequence[bool], mask: Sequence[bool]) -> list[int]:
    """The word each token belongs to, counted from 0; padding is −1."""
    ids = [-1] * len(starts)
    word = -1
    for position, (starts_word, real) in enumerate(zip(starts, mask, strict=True)):
        if real and (starts_word or word < 0):
            word += 1
        if real:
            ids[position] = word
    return ids


def without_mark(token: str) -> str:
    """A token without the ``##`` of WordPiece."""
    return token.removeprefix("##")
