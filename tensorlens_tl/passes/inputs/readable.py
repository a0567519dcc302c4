"""Tokens as people read them, and where words begin."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tensorlens_tl.models import ModelView

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
    """What a tokenizer makes of single tokens, each of which is read once.

    Attributes:
        tokenizer: the model's.
        size: how many tokens it knows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        no_piece = (None, getattr(tokenizer, "unk_token_id", None))
        self._has_word_pieces = tokenizer.convert_tokens_to_ids("##s") not in no_piece
        self._known: dict[int, _Token] = {}

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
        if number >= self.size:
            text = f" {number}"
        elif piece.startswith("▁") and text[:1] != " ":
            text = f" {text}"  # decoding one token drops the space that SentencePiece writes as ▁
        continues = piece.startswith("##") if self._has_word_pieces else not text[:1].isspace()
        return _Token(text, continues)


_vocabularies: "WeakKeyDictionary[ModelView, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(view: ModelView) -> _Vocabulary:
    """The vocabulary of a view's tokenizer, as long as that stays what it was."""
    vocabulary = _vocabularies.get(view)
    tokenizer = view.tokenizer
    if vocabulary is None or vocabulary.tokenizer is not tokenizer or vocabulary.size != len(tokenizer):
        vocabulary = _vocabularies[view] = _Vocabulary(tokenizer)
    return vocabulary
