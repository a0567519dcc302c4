"""Text among tokens: where it stands in a prompt, which tokens make a word, and what each token is as text."""

import re
import string
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelView

NO_TEXTS = {
    "mean": "Only `attribute` takes a mean over queries; query='all' gives every one of them here.",
    "last": "The last token is query=-1.",
    "first": "The first token is query=0.",
}
"""What texts stand for that are no part of the prompt."""

BYTE_PIECE = "<0x[0-9A-F]{2}>"
"""What a vocabulary with byte fallback calls a byte."""

PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PLAIN]
BYTES = {chr(byte): byte for byte in PLAIN} | {chr(256 + number): byte for number, byte in enumerate(OTHERS)}
"""The bytes that byte-level vocabularies write as letters (GPT-2's alphabet)."""

BEFORE = (".", "\n", "a", "1", "(", "e.", "。")
"""Texts after which a token is looked for: what merges with one of them is apart from another."""

Readable = tuple[list[list[str]], list[list[bool]] | None]


def readable_tokens(view: ModelView, tokens: Tensor) -> Readable:
    """Tokens as text, and which begin a word, as the tokenizer itself marks it (Ġ, ▁, or ## for what continues)."""
    if view.tokenizer is None:
        return [[f" {int(token)}" for token in row] for row in tokens], None  # each id reads as a word
    rows = tokens.tolist()
    known = _vocabulary_of(view).read(token for row in rows for token in row)
    special = set(view.tokenizer.all_special_ids)
    starts: list[list[bool]] = []
    for row in rows:
        starts.append([])
        after_gap = True
        for token in row:
            starts[-1].append(after_gap or token in special or not known[token].continues)
            after_gap = token in special or known[token].text[-1:].isspace()
    return [[known[token].text for token in row] for row in rows], starts


def special_positions(view: ModelView, prompt: Any) -> list[list[int]] | None:
    """The positions of special tokens in each prompt, its real tokens only; None where no tokenizer names them."""
    if prompt.kwargs["input"].is_floating_point():
        return [list(range(prompt.special)) for _ in prompt.tokens]
    if view.tokenizer is None:
        return None
    special = torch.tensor(view.tokenizer.all_special_ids, dtype=torch.long)
    is_special = torch.isin(prompt.tokens.cpu(), special) & prompt.mask.cpu()
    return [row.nonzero()[:, 0].tolist() for row in is_special]


class _Token(NamedTuple):
    """A token's text, and whether it continues the word before it."""

    text: str
    continues: bool


class _Vocabulary:
    """What a tokenizer makes of single tokens, each read once; `size` is how many it knows."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        no_piece = (None, getattr(tokenizer, "unk_token_id", None))
        self._has_word_pieces = tokenizer.convert_tokens_to_ids("##s") not in no_piece
        self._known: dict[int, _Token] = {}
        self._ids: dict[str, list[int]] = {}

    def read(self, tokens: Iterable[int]) -> Mapping[int, _Token]:
        """These tokens by number, and perhaps others."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._known]
        if new:
            pieces = self.tokenizer.convert_ids_to_tokens(new)
            texts = self.tokenizer.batch_decode([[token] for token in new], clean_up_tokenization_spaces=False)
            for token, piece, text in zip(new, pieces, texts, strict=True):
                self._known[token] = self._token(token, piece or "", text)
        return self._known

    def _token(self, number: int, piece: str, text: str) -> _Token:
        spaced = piece.replace("▁", " ")
        if number >= self.size:
            text = f" {number}"
        elif piece.startswith("▁") and spaced.endswith(text):
            text = spaced  # decoding one token drops the space that SentencePiece writes as ▁
        elif "�" in text or re.fullmatch(BYTE_PIECE, piece):
            text = self._of_bytes(piece, text)
        continues = piece.startswith("##") if self._has_word_pieces else not text[:1].isspace()
        return _Token(text, continues)

    def _of_bytes(self, piece: str, text: str) -> str:
        """The text of a token that may be a part of a character, or a character that is a token of its own as well."""
        if re.fullmatch(BYTE_PIECE, piece):
            return piece if "�" in text or self._number(text) is not None else text
        if not set(piece) <= BYTES.keys():
            return text
        return readable_bytes(bytes(BYTES[each] for each in piece))

    def ids(self, text: str) -> list[int]:
        """Return the token of a text, or else the several or no tokens that it is.

        With a space before it a text begins a word, without it continues one; where only one of these is a token, that
        is taken. WordPiece tokens have no spaces: ``##`` continues a word.
        """
        if text not in self._ids:
            self._ids[text] = self._read_ids(text)
        return self._ids[text]

    def _read_ids(self, text: str) -> list[int]:
        piece = self._number(text)
        is_byte = re.search(BYTE_PIECE, text) is not None
        if piece is not None and (is_byte or piece in self.tokenizer.all_special_ids):
            return [piece]
        if self._has_word_pieces:
            return self._word_piece(text)
        ids = self._after_text(text)
        if self._is_one(ids):
            return ids
        other = self._after_text(other_spacing(text))
        if self._is_one(other):
            return other
        spelled = self._spelled(text)
        if spelled is not None and (is_byte or not ids):
            return [spelled]
        return ids or self._encoded(text)

    def _word_piece(self, text: str) -> list[int]:
        ids = self._encoded(text)
        continued = self._number(text if text.startswith("##") else f"##{text.strip()}")
        if continued is not None and (text.startswith("##") or not self._is_one(ids)):
            return [continued]
        return ids

    def _after_text(self, text: str) -> list[int]:
        """The tokens of a text as they stand after another text, with which it shares none; none if it always does."""
        several: list[int] = []
        for before in BEFORE if text else ():
            first = self._encoded(before)
            both = self._encoded(before + text)
            ids = both[len(first) :]
            if not first or self.tokenizer.unk_token_id in first or both[: len(first)] != first:
                continue
            if self._is_one(ids) and self.read(ids)[ids[0]].text[:1].isspace() == text[:1].isspace():
                return ids
            several = several or ids
        return several

    def _spelled(self, text: str) -> int | None:
        """The token that reads as this text, found by what the vocabulary calls it."""
        letters = {byte: letter for letter, byte in BYTES.items()}
        spellings = [text, text.replace(" ", "▁"), "".join(letters[byte] for byte in token_bytes(text))]
        numbers = [number for number in map(self._number, spellings) if number is not None]
        return next((number for number in numbers if self.read([number])[number].text == text), None)

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _number(self, piece: str) -> int | None:
        """The number of a token by what the vocabulary calls it; None where it has none of that name."""
        number = self.tokenizer.convert_tokens_to_ids(piece)
        if number is None or (number == self.tokenizer.unk_token_id and piece != self.tokenizer.unk_token):
            return None
        return int(number)

    def _is_one(self, ids: list[int]) -> bool:
        return len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id


def other_spacing(text: str) -> str:
    """A text that begins a word as one that continues it, and the other way round; nothing for space alone."""
    if not text.strip():
        return ""
    if text[:1].isspace():
        return text[1:] if text[0] == " " and not text[1].isspace() else ""
    return f" {text}"


def token_text(view: ModelView, token: int) -> str:
    """One token as text, as `readable_tokens` writes it."""
    return _vocabulary_of(view).read([token])[token].text


def text_ids(view: ModelView, text: str) -> list[int]:
    """The id of a text that is one token, or the ids of its several tokens: see `_Vocabulary.ids`."""
    return _vocabulary_of(view).ids(text)


_vocabularies: "WeakKeyDictionary[ModelView, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(view: ModelView) -> _Vocabulary:
    """The vocabulary of a view's tokenizer, as long as that stays what it was."""
    vocabulary = _vocabularies.get(view)
    tokenizer = view.tokenizer
    if vocabulary is None or vocabulary.tokenizer is not tokenizer or vocabulary.size != len(tokenizer):
        vocabulary = _vocabularies[view] = _Vocabulary(tokenizer)
    return vocabulary


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
