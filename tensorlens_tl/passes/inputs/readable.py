"""Tokens as people read them, which token a text is, and where words begin."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs.spans import readable_bytes, token_bytes

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
