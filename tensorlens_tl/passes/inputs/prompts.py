"""From what a user passes to what a model takes: tokens, mask, keyword arguments, and readable tokens."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_number, whole_slice
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.protocol import Query
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.inputs.signals import Signal, extra_inputs, named_images, read_signal, refuse_signal
from tensorlens_tl.passes.inputs.spans import find_real


@dataclass(frozen=True, repr=False)
class Prompt:
    """A checked batch of prompts.

    An encoder–decoder's positions are its encoder's, `encoder_length` of them, and then its decoder's. Images and sound
    have no token ids: there `tokens` are position numbers.

    `mask` is True at real tokens; `kwargs` is what the model's forward takes; `str_tokens` are for people, and
    `word_starts` says which of them begin a word (None without a tokenizer). A classifier reads its classes at
    `class_at`; the first `special` positions of an image or a sound are no part of it; `image` is what its patches
    tile exactly, where they do. `extra` names the keyword arguments that a multimodal model was given besides tokens.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    kwargs: dict[str, Any]
    str_tokens: list[list[str]]
    word_starts: list[list[bool]] | None = None
    encoder_length: int = 0
    class_at: int | None = None
    special: int = 0
    image: Float[Tensor, "batch channel height width"] | None = None
    extra: tuple[str, ...] = ()

    @property
    def sides(self) -> list[list[str]] | None:
        """Whether each position is the encoder's or the decoder's, by name; None of a model with one stack."""
        if not self.encoder_length:
            return None
        decoder = self.tokens.shape[1] - self.encoder_length
        return [["encoder"] * self.encoder_length + ["decoder"] * decoder for _ in self.tokens]

    def in_logits(self, positions: Int[Tensor, "batch query"]) -> Int[Tensor, "batch query"]:
        """Positions as the model's logits count them: an encoder–decoder's decoder has its own, a classifier just one.

        Raises:
            InvalidInputError: a position of the encoder, or of a classifier that its classes are not read from: these
                predict nothing.
        """
        if self.class_at is not None and bool((positions != self.class_at).any()):
            raise InvalidInputError(
                f"query: this model tells its classes at position {self.class_at} alone; use query={self.class_at} (or "
                "leave it out), or direction= for another position."
            )
        if self.encoder_length and bool((positions < self.encoder_length).any()):
            raise InvalidInputError(
                f"query: positions 0 to {self.encoder_length - 1} are the encoder's, which predicts no tokens; the "
                "decoder's follow them (-1 is its last), or use direction=."
            )
        return positions - self.encoder_length

    def again(self, rows: slice | Tensor = slice(None)) -> dict[str, Any]:
        """What `freeze` takes to run these prompts, or some of them, once more.

        Raises:
            InvalidInputError: some prompts of several, where a model was given more than tokens: images need not be
                one for each prompt.
        """
        some = isinstance(rows, Tensor) or rows != slice(None)
        if self.extra and some and len(self.tokens) > 1:
            raise InvalidInputError("model_inputs: these belong to all prompts together; pass one prompt at a time.")
        if self.kwargs["input"].is_floating_point():
            return {"input": self.kwargs["input"][rows]}
        mask = self.mask[rows]
        start = self.encoder_length or self.mask.shape[1]
        given: dict[str, Any] = {"input": self.kwargs["input"][rows]}
        given |= {} if bool(mask[:, :start].all()) else {"attention_mask": mask[:, :start]}
        named = [name for name in ("token_type_ids", "decoder_input_ids") if name in self.kwargs]
        given |= {name: self.kwargs[name][rows] for name in named}
        if self.encoder_length and not bool(mask[:, start:].all()):
            given["decoder_attention_mask"] = mask[:, start:]
        return given | ({"model_inputs": {name: self.kwargs[name] for name in self.extra}} if self.extra else {})

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        return f"Prompt({''.join(self.str_tokens[0])[:60]!r}, batch={batch}, pos={pos})"


def prepare(
    view: ModelView,
    input: Any,
    *,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Any = None,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    model_inputs: Any = None,
) -> Prompt:
    """Check an input and turn it into a `Prompt`.

    Args:
        view: the model.
        input: a string, a list of strings, or token ids: a tensor `[batch, pos]` or `[pos]`, or lists, which may differ
            in length; or what a tokenizer or processor returns (a mapping with `input_ids`); of a model that reads
            images or sound, see `tensorlens_tl.passes.inputs.signals`.
        attention_mask: 1 at real tokens, 0 at padding, `[batch, pos]`; only with token ids.
        token_type_ids: segment ids for BERT-like models, `[batch, pos]`.
        decoder_input_ids, decoder_attention_mask: what an encoder–decoder's decoder reads, likewise; for such a model
            they are needed, for any other refused.
        prepend_bos: as in TransformerLens; None is the model's default. Strings only.
        padding_side: ``"left"`` or ``"right"``, where several strings differ in length. None pads right, whatever the
            tokenizer says: real tokens never see it, while some bridges give NaN for left-padded prompts.
        model_inputs: what else a multimodal model's forward takes, by name; goes to the model as it is.

    Raises:
        InvalidInputError: empty, longer than the context, token ids outside the vocabulary, shapes that differ, or
            messages of a chat; see also `read_signal` and `extra_inputs`.
    """
    if isinstance(input, Mapping):
        passed = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "model_inputs": model_inputs}
        passed |= {"decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
        encoded = _of_tokenizer(view, input, passed)
        return prepare(view, **encoded, prepend_bos=prepend_bos, padding_side=padding_side)
    if view.reads != "tokens":
        others = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "model_inputs": model_inputs}
        others |= {"decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
        return _of_signal(read_signal(view, input, others | {"prepend_bos": prepend_bos, "padding_side": padding_side}))
    refuse_signal(view, input)
    extra = extra_inputs(view, model_inputs)
    if (decoder_input_ids is not None) != view.is_encoder_decoder:
        raise InvalidInputError(
            f"decoder_input_ids: {view.description} is an encoder–decoder; pass what its decoder reads, beginning with "
            "its start token (model.original_model.config.decoder_start_token_id)."
            if view.is_encoder_decoder
            else f"decoder_input_ids: {view.description} is no encoder–decoder."
        )
    read = partial(_rows, view, prepend_bos=prepend_bos, padding_side=padding_side)
    tokens, mask = read(input, attention_mask, "attention_mask", view.d_vocab)
    kwargs: dict[str, Any] = {"input": tokens}
    # HookedTransformer derives a mask of its own from padding tokens where it pads left; an explicit one is exact.
    if attention_mask is not None or not bool(mask.all()) or not view.is_bridge:
        kwargs["one_zero_attention_mask" if view.is_hooked_encoder else "attention_mask"] = mask.long()
    if token_type_ids is not None:
        kwargs["token_type_ids"] = _segments(view, token_type_ids, tokens)
    kwargs |= extra
    if decoder_input_ids is None:
        texts, starts = _readable(view, tokens)
        return Prompt(tokens, mask, kwargs, named_images(view, tokens, texts), starts, extra=tuple(extra))
    try:
        decoder, real = read(decoder_input_ids, decoder_attention_mask, "decoder_attention_mask", view.decoder_vocab)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).replace("input: ", "decoder_input_ids: ", 1)) from None
    if len(decoder) != len(tokens):
        raise InvalidInputError(
            f"decoder_input_ids: {len(decoder)} prompts for the decoder, but {len(tokens)} for the encoder."
        )
    kwargs["decoder_input_ids"] = decoder
    if decoder_attention_mask is not None or not bool(real.all()):
        kwargs["decoder_attention_mask"] = real.long()
    both = torch.cat([tokens, decoder], dim=1)
    length = tokens.shape[1]
    texts, starts = _readable(view, both)
    for row, first in zip(starts or (), real.long().argmax(1).tolist(), strict=starts is not None):
        row[length + first] = True  # a word never goes on from the encoder to the decoder
    return Prompt(both, torch.cat([mask, real], dim=1), kwargs, texts, starts, length, extra=tuple(extra))


def _of_tokenizer(view: ModelView, encoding: Mapping[Any, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """What a tokenizer or processor returns, as arguments of `prepare`.

    Raises:
        InvalidInputError: it has no token ids, or something that was passed besides.
    """
    if "input_ids" not in encoding:
        _refuse_chat(encoding)
        raise InvalidInputError(
            f"input: a mapping with {', '.join(map(repr, encoding)) or 'nothing'} in it and without 'input_ids'; pass "
            "what a tokenizer returns, or the values that this model reads themselves."
        )
    arguments: dict[str, Any] = {"input": encoding["input_ids"]}
    others: dict[str, Any] = {}
    for name, value in encoding.items():
        if name in passed:
            arguments[name] = value
        elif name != "input_ids":
            others[name] = value
    if others:
        arguments["model_inputs"] = others
    for name, value in passed.items():
        if value is not None and name in arguments:
            raise InvalidInputError(f"{name}: the input has one already; pass it once.")
        arguments.setdefault(name, value)
    if _is_ragged(arguments["input"]) and _all_ones(arguments["attention_mask"]):
        arguments["attention_mask"] = None  # rows that are not padded are real throughout
    if not (view.is_bridge or view.is_hooked_encoder) and not _any_number(arguments["token_type_ids"]):
        arguments["token_type_ids"] = None  # one segment: what a model without segments reads anyway
    return arguments


def _all_ones(mask: Any) -> bool:
    return mask is not None and all(bool(torch.as_tensor(row).all()) for row in mask)


def _any_number(segments: Any) -> bool:
    return segments is not None and any(bool(torch.as_tensor(row).any()) for row in segments)


def _refuse_chat(input: Any) -> None:
    """Raise `InvalidInputError` for messages of a chat: how they become tokens is the template's, and the caller's."""
    first = input
    while isinstance(first, Sequence) and not isinstance(first, str) and first:
        first = first[0]
    if isinstance(first, Mapping) and "role" in first:
        raise InvalidInputError(
            "input: messages of a chat; pass what the tokenizer's template makes of them, such as "
            "model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors='pt')."
        )


def _of_signal(signal: Signal) -> Prompt:
    """Images or sound as prompts, all of their positions real."""
    batch = len(signal.input)
    pos = len(signal.names)
    tokens = torch.arange(pos, device=signal.input.device).expand(batch, pos)
    rows = [list(signal.names) for _ in range(batch)]
    return Prompt(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        {"input": signal.input},
        rows,
        [[True] * pos for _ in range(batch)],
        class_at=signal.class_at,
        special=signal.special,
        image=signal.image,
    )


def _rows(
    view: ModelView,
    input: Any,
    attention_mask: Any,
    name: str,
    vocabulary: int,
    *,
    prepend_bos: bool | None,
    padding_side: str | None,
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Token ids and mask of one input, on the model's device."""
    if _is_text(input) or _is_ragged(input):
        if attention_mask is not None:
            raise InvalidInputError(
                f"{name}: made from the text or the rows themselves; pass it only together with token ids of "
                "equal length."
            )
        tokens, mask = _pad(view, token_rows(view, input, prepend_bos), padding_side)
    else:
        tokens = _as_ids(input)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if attention_mask is not None:
            mask = torch.as_tensor(attention_mask).bool()
            mask = mask[None] if mask.ndim == 1 else mask
            if mask.shape != tokens.shape:
                raise InvalidInputError(
                    f"{name} is {tuple(mask.shape)}, the token ids are {tuple(tokens.shape)}; they must agree."
                )
        elif _ends_in_padding(view, tokens):
            warnings.warn(
                "input: token ids that begin or end with several padding tokens, and no attention_mask: all of them "
                "count as real. Pass attention_mask=, 1 at real tokens and 0 at padding.",
                stacklevel=5,
            )
    _check(view, tokens, mask, name, vocabulary)
    return tokens.to(view.device), mask.to(view.device)


def token_rows(view: ModelView, input: Any, prepend_bos: bool | None = None) -> list[Int[Tensor, "pos"]]:
    """Each prompt's token ids, unpadded; see `prepare` for the arguments and errors."""
    if isinstance(input, str):
        input = [input]
    if _is_text(input):
        if wrong := [number for number, text in enumerate(input) if not isinstance(text, str)]:
            raise InvalidInputError(
                f"input: prompt 0 is text and prompt {wrong[0]} is {type(input[wrong[0]]).__name__}; pass all as text "
                "or all as token ids."
            )
        return [_tokenize(view, text, number, prepend_bos) for number, text in enumerate(input)]
    if _is_ragged(input):
        return [_as_ids(row)[0] for row in input]
    return list(_as_ids(input))


def _is_text(input: Any) -> bool:
    return isinstance(input, str) or (isinstance(input, Sequence) and bool(input) and isinstance(input[0], str))


def _is_ragged(input: Any) -> bool:
    """Whether it is a list of rows of token ids of different lengths."""
    if not isinstance(input, Sequence) or not all(hasattr(row, "__len__") for row in input):
        return False
    return len({len(row) for row in input}) > 1


def _segments(view: ModelView, token_type_ids: Any, tokens: Tensor) -> Tensor:
    if not (view.is_bridge or view.is_hooked_encoder):
        raise InvalidInputError(f"token_type_ids: {view.class_name} takes none; they are for BERT-like encoders.")
    segments = torch.as_tensor(token_type_ids, device=tokens.device)
    segments = segments[None] if segments.ndim == 1 else segments
    if segments.shape != tokens.shape:
        raise InvalidInputError(
            f"token_type_ids is {tuple(segments.shape)}, the token ids are {tuple(tokens.shape)}; they must agree."
        )
    return segments


def _tokenize(view: ModelView, text: str, number: int, prepend_bos: bool | None) -> Tensor:
    model = view.model
    if not text:
        raise InvalidInputError(f"input: text number {number} is empty; pass at least one token.")
    if view.tokenizer is None:
        raise InvalidInputError(
            "input: this model has no tokenizer, or an empty one; pass token ids, or call model.set_tokenizer(...)."
        )
    if view.is_hooked_encoder:
        return model.to_tokens(text, truncate=False)[0][0]
    options = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
    tokens = model.to_tokens(text, truncate=False, **options)[0]
    if len(tokens) == 0:
        raise InvalidInputError(f"input: text number {number} ({text!r}) has no token; add text or prepend_bos=True.")
    return tokens


def _pad(view: ModelView, rows: list[Tensor], padding_side: str | None) -> tuple[Tensor, Tensor]:
    tokenizer = view.tokenizer
    side = padding_side or "right"
    if side not in ("left", "right"):
        raise InvalidInputError(f"padding_side={side!r}; use 'left' or 'right'.")
    longest = max(map(len, rows))
    fill = getattr(tokenizer, "pad_token_id", None) or 0
    tokens = torch.full((len(rows), longest), fill)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, ids in enumerate(rows):
        place = slice(longest - len(ids), None) if side == "left" else slice(None, len(ids))
        tokens[row, place] = ids.cpu()
        mask[row, place] = True
    return tokens, mask


def _as_ids(input: Any) -> Tensor:
    _refuse_chat(input)
    try:
        tokens = torch.as_tensor(input)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"input: cannot read {type(input).__name__} as token ids ({error}). Pass a string, a list of strings, or "
            "token ids of equal length with an attention_mask."
        ) from error
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise InvalidInputError(f"input: token ids must be [batch, pos] and not empty, got {tuple(tokens.shape)}.")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InvalidInputError(f"input: token ids must be integers, got {tokens.dtype}.")
    return tokens.long().clone()  # an inference tensor would not do where gradients are wanted


def _ends_in_padding(view: ModelView, tokens: Tensor) -> bool:
    """Whether a prompt begins or ends with two padding tokens or more; one may well be a BOS or EOS of the same id."""
    pad = getattr(view.tokenizer, "pad_token_id", None)
    if pad is None or tokens.shape[1] < 3:
        return False
    ends = torch.stack([tokens[:, :2], tokens[:, -2:]])
    return bool((ends == pad).all(-1).any())


def _check(view: ModelView, tokens: Tensor, mask: Tensor, name: str, vocabulary: int) -> None:
    length = tokens.shape[1]
    context = view.n_ctx
    if length > context:
        raise InvalidInputError(
            f"input: {length} tokens, but the context of this model is {context}; shorten the prompt."
        )
    outside = (tokens < 0) | (tokens >= vocabulary)
    if bool(outside.any()):
        row, pos = outside.nonzero()[0].tolist()
        raise InvalidInputError(
            f"input: token id {int(tokens[row, pos])} at [{row}, {pos}] is outside the vocabulary of {vocabulary}."
        )
    empty = ~mask.any(dim=1)
    if bool(empty.any()):
        raise InvalidInputError(f"{name}: row {int(empty.nonzero()[0])} has no real token.")


def _readable(view: ModelView, tokens: Tensor) -> tuple[list[list[str]], list[list[bool]] | None]:
    """Tokens as text, and which begin a word, as the tokenizer itself marks it (Ġ, ▁, or ## for what continues)."""
    tokenizer = view.tokenizer
    if tokenizer is None:
        return [[f" {int(token)}" for token in row] for row in tokens], None  # ids are words: they do not run together
    word_pieces = tokenizer.convert_tokens_to_ids("##s") not in (None, getattr(tokenizer, "unk_token_id", None))
    special = set(tokenizer.all_special_ids)
    texts = []
    starts = []
    for row in tokens.tolist():
        known = len(tokenizer)
        pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(row)]
        decoded = tokenizer.batch_decode([[token] for token in row], clean_up_tokenization_spaces=False)
        # decoding one token drops the space that SentencePiece writes as ▁
        shown = [f" {t}" if p.startswith("▁") and t[:1] != " " else t for p, t in zip(pieces, decoded, strict=True)]
        texts.append([t if token < known else f" {token}" for token, t in zip(row, shown, strict=True)])
        after_gap = True
        begins = []
        for token, piece, text in zip(row, pieces, texts[-1], strict=True):
            starting = not piece.startswith("##") if word_pieces else text[:1].isspace()
            begins.append(after_gap or token in special or starting)
            after_gap = token in special or text[-1:].isspace()
        starts.append(begins)
    return texts, starts


def query_positions(prompt: Prompt, query: Query = None, name: str = "query") -> Int[Tensor, "batch query"]:
    """The positions a query stands for: the one rule for `query` everywhere in the library.

    Args:
        prompt: the prompts.
        query: an integer counts each prompt's real tokens (−1 is the last, or where a classifier of images or sound
            reads its classes: the CLS token); a list holds several; a slice is taken of the real tokens; a text stands
            for the last token of its last occurrence; None for every position, padding included (whose entries are
            zero in every result). A tensor `[batch, query]` names places of each prompt, padding counted.
        name: the argument's name, for messages. Keys predict nothing: of them −1 is always the last.

    Raises:
        InvalidInputError: beyond a prompt's real tokens, not in it, none, or a slice of unequal lengths.
    """
    mask = prompt.mask
    if query is None:
        return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if isinstance(query, Tensor) and query.ndim == 2:
        return _places(query.to(mask.device), mask, name)
    if isinstance(query, slice):
        query = whole_slice(name, query, why="positions of a prompt")
        return _equally_many([where[query] for where in _real_positions(mask)], mask, f"{name}={query}")
    query = plain(query)
    if isinstance(query, str) or not isinstance(query, Sequence):
        return _position(prompt, query, name)
    if not query:
        raise InvalidInputError(f"{name}=[]: pass at least one position, or None for every one.")
    return torch.cat([_position(prompt, one, name) for one in query], dim=1)


def _places(places: Tensor, mask: Bool[Tensor, "batch pos"], name: str) -> Int[Tensor, "batch query"]:
    """Places of each prompt as they were passed, checked."""
    batch, pos = mask.shape
    whole = not (places.is_floating_point() or places.is_complex() or places.dtype == torch.bool)
    if len(places) != batch or not places.numel() or not whole or not bool(((places >= 0) & (places < pos)).all()):
        raise InvalidInputError(
            f"{name}: a tensor {tuple(places.shape)} of {places.dtype}; places of several prompts are integers of 0 to "
            f"{pos - 1}, [{batch}, query]."
        )
    return places.long()


def one_query(prompt: Prompt, query: Query, name: str = "query") -> Int[Tensor, "batch 1"]:
    """The position a query stands for, where an answer is about one.

    Raises:
        InvalidInputError: several positions, or what `query_positions` refuses.
    """
    positions = query_positions(prompt, query, name)
    if positions.shape[1] != 1:
        raise InvalidInputError(
            f"{name}={query!r} stands for {positions.shape[1]} positions; this is about one: pass an integer or a text."
        )
    return positions


def span_positions(prompt: Prompt, keys: Query, name: str = "keys") -> Int[Tensor, "batch key"]:
    """The same for source tokens, where a text stands for all of its tokens.

    Raises:
        InvalidInputError: see `query_positions`; also a text that has another number of tokens in another prompt.
    """
    if not isinstance(keys, str):
        return query_positions(prompt, keys, name)
    return _equally_many(_spans(prompt, keys, name), prompt.mask, f"{name}={keys!r}")


def _spans(prompt: Prompt, text: str, name: str) -> list[list[int]]:
    """The positions of each prompt's last occurrence of a text."""
    places = []
    for row, (tokens, mask) in enumerate(zip(prompt.str_tokens, prompt.mask.tolist(), strict=True)):
        try:
            places.append(find_real(tokens, mask, text)[-1])
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}, prompt {row}: {error}") from None
    return places


def _position(prompt: Prompt, query: Any, name: str) -> Int[Tensor, "batch 1"]:
    mask = prompt.mask
    if isinstance(query, str):
        return torch.tensor([[span[-1]] for span in _spans(prompt, query, name)], device=mask.device)
    query = whole_number(name, query, why="a position, a list or a slice of them, a text, or None for all")
    if query == -1 and prompt.class_at is not None and not name.startswith("key"):
        return torch.full((len(mask), 1), prompt.class_at, device=mask.device)
    counts = mask.sum(1)
    shortest = int(counts.min())
    if not -shortest <= query < shortest:
        row = int(counts.argmin())
        raise InvalidInputError(
            f"{name}={query} is out of range: row {row} has {shortest} real tokens; use -{shortest} to {shortest - 1}."
        )
    order = mask.long().cumsum(1) - 1
    wanted = (counts + query if query < 0 else torch.full_like(counts, query))[:, None]
    return ((order == wanted) & mask).long().argmax(1, keepdim=True)


def _real_positions(mask: Bool[Tensor, "batch pos"]) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in mask]


def _equally_many(rows: list[list[int]], mask: Tensor, what: str) -> Int[Tensor, "batch query"]:
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1 or not counts[0]:
        raise InvalidInputError(
            f"{what} stands for {sorted(set(counts))} tokens of these prompts; it must be the same number in each, and "
            "at least one."
        )
    return torch.tensor(rows, device=mask.device)
