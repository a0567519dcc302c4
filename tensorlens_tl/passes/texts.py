"""Text and tokens: finding a text in a prompt, the tokens of a word, and the text of each token."""

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
    "mean": "Only `tlens.attribute` takes a mean over queries; pass a position, or query='all' where several can be.",
    "last": "The last token is query=-1.",
    "first": "The first token is query=0.",
}
"""Hints for texts that users may pass with another meaning."""

BYTE_PIECE = "<0x[0-9A-F]{2}>"
"""The name of a byte in a vocabulary with byte fallback."""

PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PLAIN]
BYTES = {chr(byte): byte for byte in PLAIN} | {chr(256 + number): byte for number, byte in enumerate(OTHERS)}
"""The bytes that byte-level vocabularies write as characters (GPT-2's alphabet)."""

BEFORE = (".", "\n", "a", "1", "(", "e.", "。")
"""Texts after which tokenization is tried: a text that merges with one of them is separate after another."""

Readable = tuple[list[list[str]], list[list[bool]] | None]


def readable_tokens(view: ModelView, tokens: Tensor) -> Readable:
    """Return tokens as text, and which begin a word by the tokenizer's own marks (Ġ, ▁, or ## for continuation)."""
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
    """Return the positions of special tokens among each prompt's real tokens; None if no tokenizer names them."""
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
    """A tokenizer's single tokens, each read once; `size` is their number."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        no_piece = (None, getattr(tokenizer, "unk_token_id", None))
        self._has_word_pieces = tokenizer.convert_tokens_to_ids("##s") not in no_piece
        self._known: dict[int, _Token] = {}
        self._ids: dict[str, list[int]] = {}

    def read(self, tokens: Iterable[int]) -> Mapping[int, _Token]:
        """Return these tokens by number, possibly with others."""
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
        """The text of a token that may be part of a character, or a character that is also a token."""
        if re.fullmatch(BYTE_PIECE, piece):
            return piece if "�" in text or self._number(text) is not None else text
        if not set(piece) <= BYTES.keys():
            return text
        return readable_bytes(bytes(BYTES[each] for each in piece))

    def ids(self, text: str) -> list[int]:
        """Return the id of a text that is one token, otherwise the ids of its several tokens, or none.

        With a leading space a text begins a word, without one it continues a word; if only one of these is a token,
        that is used. WordPiece tokens have no spaces: ``##`` continues a word.
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
        """The tokens of a text that follows another text without sharing a token; none if it always shares one."""
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
        """The token that reads as this text, found by its name in the vocabulary."""
        letters = {byte: letter for letter, byte in BYTES.items()}
        spellings = [text, text.replace(" ", "▁"), "".join(letters[byte] for byte in token_bytes(text))]
        numbers = [number for number in map(self._number, spellings) if number is not None]
        return next((number for number in numbers if self.read([number])[number].text == text), None)

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _number(self, piece: str) -> int | None:
        """The number of a token by its name in the vocabulary; None if there is none."""
        number = self.tokenizer.convert_tokens_to_ids(piece)
        if number is None or (number == self.tokenizer.unk_token_id and piece != self.tokenizer.unk_token):
            return None
        return int(number)

    def _is_one(self, ids: list[int]) -> bool:
        return len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id


def other_spacing(text: str) -> str:
    """Return a text with its leading space removed or added; empty for a mere space."""
    if not text.strip():
        return ""
    if text[:1].isspace():
        return text[1:] if text[0] == " " and not text[1].isspace() else ""
    return f" {text}"


def token_text(view: ModelView, token: int) -> str:
    """Return one token as text, as in `readable_tokens`."""
    return _vocabulary_of(view).read([token])[token].text


def text_ids(view: ModelView, text: str) -> list[int]:
    """Return the id of a text that is one token, or the ids of its several tokens: see `_Vocabulary.ids`."""
    return _vocabulary_of(view).ids(text)


_vocabularies: "WeakKeyDictionary[ModelView, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(view: ModelView) -> _Vocabulary:
    """Return the vocabulary of a view's tokenizer, cached while that is unchanged."""
    vocabulary = _vocabularies.get(view)
    tokenizer = view.tokenizer
    if vocabulary is None or vocabulary.tokenizer is not tokenizer or vocabulary.size != len(tokenizer):
        vocabulary = _vocabularies[view] = _Vocabulary(tokenizer)
    return vocabulary


def find(tokens: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Return every occurrence of a text that begins and ends with whole tokens, as ``(first, last + 1)``.

    White space at its ends is ignored, and punctuation if the text occurs only with it; ``##`` continues a word. Bytes
    of a character that is split over several tokens are written as in `readable_bytes`. Raises `InvalidInputError` if
    there is no occurrence.

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
    if is_pieces or not any(map(str.isspace, "".join(tokens))):  # a WordPiece prompt need not contain a ##
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
    """Return the tokens that cover each occurrence of a text, if they contain nothing else that is not trimmed.

    A token with part of a character covers the whole character, as in a tokenizer's offsets.
    """
    pieces = [token_bytes(text) for text in texts]
    whole = b"".join(pieces).decode("utf-8", "surrogateescape")
    characters = list(accumulate((len(each.encode("utf-8", "surrogateescape")) for each in whole), initial=0))
    limits = list(accumulate(map(len, pieces), initial=0))
    after = [bisect_left(characters, limit) for limit in limits]  # for a limit inside a character, the one after it
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
    """Join tokens into one text, restoring characters that were split over several tokens.

    >>> joined([" a", " <0xF0><0x9F>", "<0x98>", "<0x82>"])
    ' a 😂'
    """
    return readable_bytes(b"".join(map(token_bytes, tokens)))


def readable_bytes(data: bytes) -> str:
    """Decode UTF-8, with each byte that belongs to no complete character as ``<0xF0>``."""
    text = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)


def token_bytes(token: str) -> bytes:
    """Encode a token as UTF-8, with parts of characters as bytes again."""
    data = token.encode("utf-8", "surrogatepass")
    return re.sub(rb"<0x([89A-F][0-9A-F])>", lambda byte: bytes([int(byte[1], 16)]), data)


def find_real(tokens: Sequence[str], mask: Sequence[bool], text: str) -> list[list[int]]:
    """Return the positions of every occurrence among a prompt's real tokens; raise `InvalidInputError` if none."""
    real = [position for position, is_real in enumerate(mask) if is_real]
    return [real[first:last] for first, last in find([tokens[position] for position in real], text)]


def _continued(token: str) -> str:
    """Return a WordPiece token as it continues a text: after a space, or without one if it continues a word."""
    return without_mark(token) if token.startswith("##") else f" {token}"


def _punctuation_apart(text: str) -> str:
    """Return a text with spaces around each punctuation mark, as WordPiece tokens are joined."""
    signs = {sign for sign in text if sign in string.punctuation or unicodedata.category(sign).startswith("P")}
    return " ".join("".join(f" {each} " if each in signs else each for each in text).split())


def _bare(text: str) -> str:
    """Return a text without white space and punctuation at its ends."""
    return text.strip(string.whitespace + string.punctuation)


def word_starts(tokens: Sequence[str]) -> list[bool]:
    """Return which tokens begin a word by white space only, for tokens without a tokenizer; ``##`` continues."""
    if any(token.startswith("##") for token in tokens):
        return [not token.startswith("##") for token in tokens]
    before = (" ", *tokens[:-1])
    return [token[:1].isspace() or last[-1:].isspace() for token, last in zip(tokens, before, strict=True)]


def word_ids(starts: Sequence[bool], mask: Sequence[bool]) -> list[int]:
    """Return the word that each token belongs to, counted from 0; padding is −1."""
    ids = [-1] * len(starts)
    word = -1
    for position, (starts_word, real) in enumerate(zip(starts, mask, strict=True)):
        if real and (starts_word or word < 0):
            word += 1
        if real:
            ids[position] = word
    return ids


def without_mark(token: str) -> str:
    """Return a token without WordPiece's ``##``."""
    return token.removeprefix("##")
