"""Where a text stands among the tokens of a prompt."""

from collections.abc import Sequence

from tensorlens_tl.errors import InvalidInputError


def find(tokens: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Every occurrence of a text that begins and ends with whole tokens, as ``(first, last + 1)``.

    White space at its ends does not count; ``##`` continues a word.

    >>> find(["If", " the", " file", " is", " un", "readable"], "file")
    [(2, 3)]
    >>> find(["If", " the", " file", " is", " un", "readable"], "unreadable")
    [(4, 6)]

    Raises:
        InvalidInputError: no such occurrence.
    """
    pieces = any(token.startswith("##") for token in tokens)
    texts = [token.removeprefix("##") if token.startswith("##") else " " * pieces + token for token in tokens]
    wanted, found = text.strip(), []
    for first in range(len(texts)):
        if not wanted or not texts[first].strip() or not wanted.startswith(texts[first].strip()):
            continue
        joined = ""
        for last in range(first, len(texts)):
            joined += texts[last]
            if joined.strip() == wanted:
                found.append((first, last + 1))
                break
            if len(joined.strip()) > len(wanted):
                break
    if not found:
        raise InvalidInputError(f"{text!r} does not occur as whole tokens; the prompt's tokens are {list(tokens)}.")
    return found
