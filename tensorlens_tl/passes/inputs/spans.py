"""Text among tokens: where a text stands in a prompt, and which tokens make a word."""

import re
import string
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from tensorlens_tl.errors import InvalidInputError

NO_TEXTS = {
    "mean": "Only `attribute` takes a mean over queries; query='all' gives every one of them here.",
    "last": "The last token is query=-1.",
    "first": "The first token is query=0.",
}
"""What texts stand for that are no part of the prompt."""


def find(tokens: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return every occurrence of a text that begins and ends with whole tokens, as ``(first, last + 1)``.

    White space at its ends is ignored, and punctuation if the text occurs only with it; ``##`` continues a word. Bytes
    of a character that several tokens share are written as `readable_bytes` writes them. Raises `InvalidInputError` if
    none.

    >>> find(["If", " the", " file", " is", " un", "readable"], "file")
    [(2, 3)]
    >>> find(["If", " the", " file", " is", " un", "readable"], "unreadable")
    [(4, 6)]
    >>> find([" of", " strings."], "strings")
    [(1, 2)]
    >>> find(["so", " <0xF0><0x9F>", "<0x98>", "<0x82>"], "😂")
    [(1, 4)]
    """
    lines = [(tokens, text)]
    is_pieces = any(token.startswith("##") for token in tokens)
    if is_pieces or not any(map(str.isspace, "".join(tokens))):  # nor does a prompt of WordPiece need to have a ##
        apart = [_continued(token) for token in tokens]
        lines = [*lines[is_pieces:], (apart, text), (apart, _punctuation_apart(text))]
    for trimmed in (str.strip, _bare):
        for texts, searched in lines:
            matches = _occurrences(texts, trimmed(searched), trimmed)
            if matches:
                return matches
    hint = ""
    if text in NO_TEXTS:
        hint = f" {NO_TEXTS[text]}"
    raise InvalidInputError(f"{text!r} does not occur as whole tokens; the prompt's tokens are {list(tokens)}.{hint}")


def _occurrences(texts: Sequence[str], wanted: str, trimmed: Callable[[str], str]) -> list[tuple[int, int]]:
    """Return the tokens that cover each occurrence of a text, if they have nothing else but what is trimmed.

    A token with part of a character covers it all, as in a tokenizer's offsets.
    """
    pieces = [token_bytes(text) for text in texts]
    whole = b"".join(pieces).decode("utf-8", "surrogateescape")
    characters = list(accumulate((len(each.encode("utf-8", "surrogateescape")) for each in whole), initial=0))
    limits = list(accumulate(map(len, pieces), initial=0))
    after = [bisect_left(characters, limit) for limit in limits]  # of a limit inside a character, what follows it
    before = [bisect_right(characters, limit) - 1 for limit in limits]
    matches: dict[tuple[int, int], None] = {}
    at = whole.find(wanted) if wanted else -1
    while at >= 0:
        end = at + len(wanted)
        first = bisect_right(after, at, lo=1) - 1
        last = bisect_left(before, end, hi=len(texts))
        shares_first = before[first + 1] == at < after[first + 1]  # the token ends inside the text's first character
        shares_last = before[last - 1] < end == after[last - 1]
        if (shares_first or not trimmed(whole[after[first] : at])) and (
            shares_last or not trimmed(whole[end : before[last]])
        ):
            matches[first, last] = None
        at = whole.find(wanted, at + 1)
    return list(matches)


def joined(tokens: Sequence[str]) -> str:
    """Tokens as one text, in which a character of several tokens is whole again.

    >>> joined([" a", " <0xF0><0x9F>", "<0x98>", "<0x82>"])
    ' a 😂'
    """
    return readable_bytes(b"".join(map(token_bytes, tokens)))


def readable_bytes(data: bytes) -> str:
    """UTF-8 as text, with each byte that belongs to no whole character as ``<0xF0>``."""
    text = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)


def token_bytes(token: str) -> bytes:
    """The UTF-8 of a token, in which parts of characters are bytes again."""
    data = token.encode("utf-8", "surrogatepass")
    return re.sub(rb"<0x([89A-F][0-9A-F])>", lambda byte: bytes([int(byte[1], 16)]), data)


def find_real(tokens: Sequence[str], mask: Sequence[bool], text: str) -> list[list[int]]:
    """Return the positions of every occurrence among a prompt's real tokens; raise `InvalidInputError` if none."""
    real = [position for position, is_real in enumerate(mask) if is_real]
    return [real[first:last] for first, last in find([tokens[position] for position in real], text)]


def _continued(token: str) -> str:
    """A token of WordPiece as it joins the text before it: after a space, or without one where it continues a word."""
    return without_mark(token) if token.startswith("##") else f" {token}"


def _punctuation_apart(text: str) -> str:
    """A text with a space on either side of each sign, as tokens of WordPiece are joined."""
    signs = {sign for sign in text if sign in string.punctuation or unicodedata.category(sign).startswith("P")}
    return " ".join("".join(f" {each} " if each in signs else each for each in text).split())


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
