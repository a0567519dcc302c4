"""Conversion of user input to model input: tokens and masks, signals, positions, batches.

As in `tensorlens_tl.models.protocol`, aliases are for type checkers only; at run time they are `Any`, because our own
errors explain invalid arguments.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tensorlens_tl._arguments import plain, refuse_meta, whole_number, whole_slice
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError, warn_caller
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ModelView, Query
from tensorlens_tl.passes.texts import find_real, readable_tokens

if TYPE_CHECKING:
    from typing import Literal

    from numpy.typing import NDArray
    from transformer_lens import ActivationCache

    InputLike = str | Tensor | NDArray[Any] | Sequence[object] | Mapping[str, Any]
    """Text, chat messages, token ids, a tokenizer's output, or values of images and sound; one prompt or several."""

    Chat = Sequence[Mapping[str, Any]]
    """Messages, each ``{"role": ..., "content": ...}``."""

    IdsLike = Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | None
    """One integer per token: a mask, or segments."""

    ModelInputs = Mapping[str, object] | None
    """Inputs of a multimodal model's forward besides tokens, by name."""

    Side = Literal["left", "right"] | None
    """The side of padding; None for the right."""

    Store = Literal["model", "cpu"]
    """Where activations are stored."""

    Patterns = Literal["keep", "recompute"]
    """Whether patterns are stored, or recomputed."""

    CacheLike = Mapping[str, Tensor] | ActivationCache | None
    """Activations of an earlier run, by hook-point name."""

    Tolerance = float | None
    """The largest relative error; None for the default of the dtype."""

    Verify = bool | Literal["sample"]
    """Whether every block is verified, at every position or at a few."""
else:
    InputLike = Chat = IdsLike = ModelInputs = Side = Store = Patterns = CacheLike = Tolerance = Verify = Any


SPECIAL = ("CLS", "distillation")
"""The names of positions before the first patch, in order."""

IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""The config entries of multimodal models for the token that represents a piece of an image."""


_EMBEDS = "takes the place of token ids, which embeddings and scores belong to; pass the token ids as input"
NOT_TOKENS = {
    "inputs_embeds": _EMBEDS,
    "decoder_inputs_embeds": _EMBEDS,
    "past_key_values": "contains earlier tokens, but a pass needs every token; pass the whole prompt as input",
}
"""Inputs that models accept in place of tokens, and why a pass does not."""


# ------------------------------------------------------------------
# Input other than text: images, spectrograms and waveforms, and a multimodal model's inputs besides tokens.
#
# | model | input |
# | --- | --- |
# | ViT, DeiT | pixels, `[batch, channel, height, width]` |
# | audio spectrogram transformer | `[batch, time, mel]` |
# | Hubert, Wav2Vec2 | samples, `[batch, sample]` |
#
# Values are used unchanged: prepare them as the model's image processor or feature extractor does. The model runs up to
# its first block to determine the number of positions.


@dataclass(frozen=True)
class Signal:
    """A checked batch of images or sounds, the `input` of the model's forward.

    Attributes:
        names: the names of positions.
        special: the number of initial positions that do not belong to the image or sound.
        class_at: the position that a classifier reads; None for other models.
        image: the image tiled by the patches, `[batch, channel, height, width]`; None if patches overlap, or there are
            not 1 or 3 channels.
    """

    input: Float[Tensor, "batch ..."]
    names: list[str]
    special: int
    class_at: int | None
    image: Float[Tensor, "batch channel height width"] | None


def read_signal(view: ModelView, input: InputLike, others: Mapping[str, object]) -> Signal:
    """Check the input of a model of images or sound, and name its positions.

    Args:
        view: the model.
        input: see the module; one image or sound without batch axis, or a list of them, is accepted. It is cast to the
            model's own dtype and device.
        others: options for token sequences only; passing one is an error.

    Raises:
        InvalidInputError: text or integers, a shape that contradicts the model's config, values that are not finite,
            an input that the model itself rejects, or one of `others`.
    """
    wrong = [name for name, value in others.items() if value is not None]
    if wrong:
        raise InvalidInputError(f"{wrong[0]}: {view.description} reads {view.reads}, not tokens; leave it out.")
    x = _values(view, input)
    parameter = next(view.model.parameters())
    x = x.to(dtype=parameter.dtype, device=view.device)
    name = f"{view.blocks[0].name}.hook_resid_pre"
    try:
        captured, _ = capture(view.model, {"input": x[:1]}, [name], last=name)
    except (RuntimeError, ValueError) as error:
        raise InvalidInputError(f"input: {view.description} does not read {list(x.shape)} ({error}).") from error
    positions = captured[name].shape[1]
    class_at = None if view.class_head is None else 0
    frames = Signal(x, [f" frame {number}" for number in range(positions)], 0, class_at, None)
    patches = view.patches
    if patches is None:
        return frames
    rows, columns = patches.grid(x)
    special = positions - rows * columns
    if not 0 <= special <= len(SPECIAL):
        return frames
    names = [f" {name}" for name in SPECIAL[:special]]
    names += [f" patch {row},{column}" for row in range(rows) for column in range(columns)]
    image = patches.image(x)[..., : rows * patches.kernel[0], : columns * patches.kernel[1]]
    if patches.kernel != patches.stride or image.shape[1] not in (1, 3):
        return Signal(x, names, special, class_at, None)
    return Signal(x, names, special, class_at, image.detach().cpu())


def _values(view: ModelView, input: InputLike) -> Tensor:
    axes, sizes = _expected(view)
    expected = f"{view.reads}, floating-point values [{', '.join(axes)}]"
    if isinstance(input, str) or (isinstance(input, Sequence) and any(isinstance(one, str) for one in input)):
        raise InvalidInputError(f"input: {view.description} reads {expected}, not text.")
    try:
        if isinstance(input, list | tuple):
            input = torch.stack([torch.as_tensor(one) for one in input])
        x = torch.as_tensor(input).detach().clone()  # gradients need a tensor from outside inference mode
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"input: cannot read {type(input).__name__} as {expected} of one size ({error})."
        ) from error
    if not x.is_floating_point():
        raise InvalidInputError(
            f"input: {view.description} reads {expected}, got {x.dtype}. Token ids are for language models; the "
            "model's image processor turns an image into pixels."
        )
    if x.ndim == len(axes) - 1:
        x = x[None]
    fits = x.ndim == len(axes) and x.numel() > 0
    if not fits or any(size not in (None, length) for size, length in zip(sizes, x.shape, strict=True)):
        shape = ", ".join(str(size or name) for name, size in zip(axes, sizes, strict=True))
        raise InvalidInputError(f"input: {view.description} reads {view.reads} [{shape}], got {list(x.shape)}.")
    if not bool(torch.isfinite(x).all()):
        raise InvalidInputError("input: some values are not finite (NaN or Inf).")
    return x


def _expected(view: ModelView) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Return the axes of a model's input, and the sizes fixed by its config."""
    config = view.config
    if view.reads == "images":
        size = getattr(config, "image_size", None)
        height, width = size if isinstance(size, Sequence) else (size, size)
        return ("batch", "channel", "height", "width"), (None, getattr(config, "num_channels", None), height, width)
    if view.patches is not None:
        return ("batch", "time", "mel"), (
            None,
            getattr(config, "max_length", None),
            getattr(config, "num_mel_bins", None),
        )
    return ("batch", "sample"), (None, None)


def refuse_signal(view: ModelView, input: object) -> None:
    """Raise `InvalidInputError` if a language model gets pixels or sound."""
    if isinstance(input, Tensor) and input.is_floating_point() and input.ndim > 2:
        raise InvalidInputError(
            f"input: {view.description} reads tokens, got values of {input.dtype}, {list(input.shape)}. Pass images "
            "and sound of a multimodal model as model_inputs={'pixel_values': ...}, in addition to the token ids; "
            "embeddings (inputs_embeds) are not accepted in place of token ids."
        )


def extra_inputs(view: ModelView, given: ModelInputs) -> dict[str, Any]:
    """Check a multimodal model's inputs besides tokens by name, and move them to its device.

    Raises:
        InvalidInputError: not a mapping, a name that the model's forward does not have, a name for which `freeze` has
            its own argument, or numbers that are not finite.
        UnsupportedModelError: images for a model that adds their features between blocks.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidInputError(
            f"model_inputs={type(given).__name__}: pass a mapping, such as {{'pixel_values': ...}}."
        )
    named = {"input", "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels"}
    forward = inspect.signature(getattr(view.model, "original_model", view.model).forward).parameters
    takes = [name for name, parameter in forward.items() if parameter.kind is not parameter.VAR_KEYWORD]
    for name, value in given.items():
        if name in named or name not in takes:
            why = "freeze has its own argument for it" if name in named else "its forward has no such argument"
            raise InvalidInputError(
                f"model_inputs: {name!r} cannot be given to {view.description}: {why}. It takes "
                f"{', '.join(sorted(set(takes) - named))}."
            )
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InvalidInputError(f"model_inputs: {name} has values that are not finite (NaN or Inf).")
        if name in NOT_TOKENS:
            raise InvalidInputError(f"model_inputs: {name!r} {NOT_TOKENS[name]}.")
    _refuse_deep_stack(view, given)
    parameter = next(view.model.parameters())
    moved = {name: _moved(value, parameter.dtype, view.device) for name, value in given.items()}
    return {name: value for name, value in moved.items() if value is not None}


def _refuse_deep_stack(view: ModelView, given: Mapping[str, object]) -> None:
    """Raise `UnsupportedModelError` if features of an image are also added between blocks, which no block's map has."""
    layers = getattr(getattr(view.config, "vision_config", None), "deepstack_visual_indexes", None)
    images = [name for name in given if name.startswith("pixel_values")]
    if layers and images:
        raise UnsupportedModelError(
            f"model_inputs: {view.description} adds features of the image to the residual stream between blocks 0 and "
            f"{len(layers)} (DeepStack), which belong to no block. It can be frozen with tokens only."
        )


def _moved(value: object, dtype: torch.dtype, device: torch.device) -> object:
    """Move a tensor to the device and cast floating-point numbers to the dtype; return anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        value = value.to(dtype)
    return value.to(device)


def image_tokens(view: ModelView) -> set[int]:
    """Return the ids of tokens that represent pieces of images."""
    ids = (getattr(view.config, name, None) for name in IMAGE_TOKENS)
    return {token for token in ids if token is not None}


def named_images(view: ModelView, tokens: Int[Tensor, "batch pos"], texts: list[list[str]]) -> list[list[str]]:
    """Return readable tokens, with those that represent pieces of images numbered in each prompt."""
    ids = image_tokens(view)
    rows = []
    for row, names in zip(tokens.tolist(), texts, strict=True):
        positions = [position for position, token in enumerate(row) if token in ids]
        named = {position: f" image {number}" for number, position in enumerate(positions)}
        rows.append([named.get(position, text) for position, text in enumerate(names)])
    return rows


@dataclass(frozen=True, repr=False)
class Prompt:
    """A checked batch of prompts; in an encoder–decoder, the `encoder_length` encoder positions precede the decoder's.

    `mask` is True at real tokens; `tokens` are position numbers for images and sound; `kwargs` go to the model's
    forward; `str_tokens` are readable, and `word_starts` says which begin a word (None without a tokenizer). A
    classifier reads its classes at `class_at`, counted over real tokens; the first `special` positions of an image or
    sound do not belong to it; `image` is the image that the patches tile exactly. `extra` names a multimodal model's
    inputs besides tokens.
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
        """The name of each position's side, ``"encoder"`` or ``"decoder"``; None for a model with one stack."""
        if not self.encoder_length:
            return None
        decoder = self.tokens.shape[1] - self.encoder_length
        return [["encoder"] * self.encoder_length + ["decoder"] * decoder for _ in self.tokens]

    def in_logits(self, positions: Int[Tensor, "batch query"]) -> Int[Tensor, "batch query"]:
        """Return positions as indices into the model's logits: only the decoder's, or a classifier's single one.

        Raises `InvalidInputError` for positions without a prediction: an encoder's, or a classifier's other tokens.
        """
        if self.class_at is not None and bool((positions != self.mask.long().argmax(1, keepdim=True)).any()):
            raise InvalidInputError(
                f"query: this model predicts its classes only at position {self.class_at}; use query={self.class_at} "
                "(or leave it out), or direction= for another position."
            )
        if self.encoder_length and bool((positions < self.encoder_length).any()):
            raise InvalidInputError(
                f"query: positions 0 to {self.encoder_length - 1} are the encoder's, which predicts no tokens; the "
                "decoder's follow them (-1 is its last), or use direction=."
            )
        return positions - self.encoder_length

    def predicts(self, positions: Int[Tensor, "batch query"]) -> bool:
        """Return whether the model predicts something at all of these positions; see `in_logits`."""
        try:
            self.in_logits(positions)
        except InvalidInputError:
            return False
        return True

    def again(self, rows: slice | Tensor = slice(None)) -> dict[str, Any]:
        """Return the arguments of `freeze` that run these prompts, or some of them, again.

        Raises `InvalidInputError` for some of the prompts if the model reads more than tokens, such as images.
        """
        selects = isinstance(rows, Tensor) or rows != slice(None)
        if self.extra and selects and len(self.tokens) > 1:
            raise InvalidInputError("model_inputs: these belong to all prompts jointly; pass one prompt at a time.")
        if self.kwargs["input"].is_floating_point():
            return {"input": self.kwargs["input"][rows]}
        mask = self.mask[rows]
        start = self.encoder_length or self.mask.shape[1]
        given: dict[str, Any] = {"input": self.kwargs["input"][rows]}
        if not bool(mask[:, :start].all()):
            given["attention_mask"] = mask[:, :start]
        if "token_type_ids" in self.kwargs:
            given["token_type_ids"] = self.kwargs["token_type_ids"][rows]
        for name in token_inputs(self.kwargs)[1:]:
            given["decoder_input_ids"] = self.kwargs[name][rows]
        if self.encoder_length and not bool(mask[:, start:].all()):
            given["decoder_attention_mask"] = mask[:, start:]
        if self.extra:
            given["model_inputs"] = {name: self.kwargs[name] for name in self.extra}
        return given

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        return f"Prompt({''.join(self.str_tokens[0])[:60]!r}, batch={batch}, pos={pos})"


def prepare(
    view: ModelView,
    input: InputLike,
    *,
    attention_mask: IdsLike = None,
    token_type_ids: IdsLike = None,
    decoder_input_ids: InputLike | None = None,
    decoder_attention_mask: IdsLike = None,
    prepend_bos: bool | None = None,
    padding_side: Side = None,
    model_inputs: ModelInputs = None,
) -> Prompt:
    """Check an input and turn it into a `Prompt`.

    Args:
        view: the model.
        input: a string, several strings (a list, an array, a column of a data frame), or token ids: a tensor
            `[batch, pos]` or `[pos]`, or lists, which may differ in length; or the messages of one or several chats; or
            the output of a tokenizer or processor (a mapping with `input_ids`); for a model of images or sound, see
            `tensorlens_tl.passes.inputs`.
        attention_mask: 1 at real tokens, 0 at padding, `[batch, pos]`; only with token ids.
        token_type_ids: segment ids for BERT-like models, `[batch, pos]`.
        decoder_input_ids, decoder_attention_mask: the same for an encoder–decoder's decoder; required for such a model,
            and an error for any other.
        prepend_bos: as in TransformerLens; None is the model's default, and for an encoder all special tokens that its
            checkpoint's own tokenizer adds. Strings only; one that begins with the BOS token never gets a second one.
        padding_side: ``"left"`` or ``"right"``, for strings that differ in length. None pads right, whatever the
            tokenizer says: real tokens never see that padding, while some bridges give NaN for left-padded prompts.
        model_inputs: further inputs of a multimodal model's forward, by name; passed on unchanged.

    Raises:
        InvalidInputError: an input that is empty, longer than the context, or outside the vocabulary; shapes that
            differ; messages that the tokenizer's chat template rejects; see also `read_signal` and `extra_inputs`.
    """
    arguments = {
        "attention_mask": attention_mask,
        "token_type_ids": token_type_ids,
        "model_inputs": model_inputs,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_attention_mask,
    }
    tokenizing: dict[str, Any] = {"prepend_bos": prepend_bos, "padding_side": padding_side}
    if isinstance(input, Mapping):
        return prepare(view, **_of_tokenizer(view, input, arguments), **tokenizing)
    if view.reads != "tokens":
        return _of_signal(read_signal(view, input, arguments | tokenizing))
    refuse_signal(view, input)
    extra = extra_inputs(view, model_inputs)
    _check_decoder(view, decoder_input_ids)
    read = partial(_rows, view, **tokenizing)
    tokens, mask = read(input, attention_mask, "attention_mask", view.d_vocab)
    kwargs: dict[str, Any] = {"input": tokens}
    # HookedTransformer derives its own mask from padding tokens if it pads left; an explicit one is exact.
    if attention_mask is not None or not bool(mask.all()) or not view.is_bridge:
        one_zero = view.is_hooked_encoder or view.is_hooked_encoder_decoder
        name = "one_zero_attention_mask" if one_zero else "attention_mask"
        # A HookedEncoderDecoder multiplies it by the smallest number of its config's dtype. An integer mask would give
        # a float32 product, where float64's smallest number is -inf: NaN at real tokens, and zeros as their patterns.
        kwargs[name] = mask.to(view.cfg.dtype) if view.is_hooked_encoder_decoder else mask.long()
    if token_type_ids is not None:
        kwargs["token_type_ids"] = _segments(view, token_type_ids, tokens)
    kwargs |= extra
    if view.classes is not None and view.classes.padding is not None:
        _refuse_padding_last(tokens, mask, view.classes.padding)
    if decoder_input_ids is None:
        texts, starts = readable_tokens(view, tokens)
        texts = named_images(view, tokens, texts)
        class_at = 0 if view.classes is not None and view.classes.at_first else None
        return Prompt(tokens, mask, kwargs, texts, starts, class_at=class_at, extra=tuple(extra))
    try:
        decoder, real = read(
            decoder_input_ids, decoder_attention_mask, "decoder_attention_mask", view.decoder_vocab, is_encoder=False
        )
    except InvalidInputError as error:
        message, *rest = error.args
        raise InvalidInputError(message.replace("input: ", "decoder_input_ids: ", 1), *rest) from None
    if prepend_bos is None and _is_text(plain_input(view, decoder_input_ids)):
        _refuse_another_start(view, decoder, real)
    if len(decoder) != len(tokens):
        raise InvalidInputError(
            f"decoder_input_ids: {len(decoder)} prompts for the decoder, but {len(tokens)} for the encoder."
        )
    kwargs[view.decoder_argument] = decoder
    # a HookedEncoderDecoder accepts no such mask: real tokens do not see padding that follows them
    if not view.is_hooked_encoder_decoder and (decoder_attention_mask is not None or not bool(real.all())):
        kwargs["decoder_attention_mask"] = real.long()
    both = torch.cat([tokens, decoder], dim=1)
    length = tokens.shape[1]
    texts, starts = readable_tokens(view, both)
    for row, first in zip(starts or (), real.long().argmax(1).tolist(), strict=starts is not None):
        row[length + first] = True  # no word continues from the encoder to the decoder
    return Prompt(both, torch.cat([mask, real], dim=1), kwargs, texts, starts, length, extra=tuple(extra))


def _refuse_another_start(view: ModelView, decoder: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]) -> None:
    """Raise `InvalidInputError` if the decoder's text does not begin with the decoder's start token."""
    start = getattr(view.config or view.cfg, "decoder_start_token_id", None)
    first = torch.take_along_dim(decoder, real.long().argmax(1, keepdim=True), dim=1)
    if start is None or bool((first == start).all()):
        return
    names = readable_tokens(view, torch.tensor([[start, int(first[first != start][0])]]))[0][0]
    raise InvalidInputError(
        f"decoder_input_ids: this model's decoder starts with {names[0]!r} (token {start}), but the tokenized text "
        f"with {names[1]!r}; pass token ids that begin with {start}."
    )


def _refuse_padding_last(tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"], padding: int) -> None:
    """Raise `InvalidInputError` if a prompt's last real token is the one that a classifier takes for padding."""
    last = (torch.arange(mask.shape[1], device=mask.device) * mask).argmax(1, keepdim=True)
    rows = (torch.take_along_dim(tokens, last, dim=1)[:, 0] == padding).nonzero()
    if len(rows):
        raise InvalidInputError(
            "input: ",
            PromptNumber(int(rows[0])),
            f" ends in token {padding}, which this classifier takes for padding: it reads its classes before it. Leave "
            "it out, or pass token ids with attention_mask= set to 0 there.",
        )


def token_inputs(inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of a forward's token-id arguments: those of its one stack, or of encoder and decoder."""
    return [name for name in ("input", "decoder_input_ids", "decoder_input") if name in inputs]


def _check_decoder(view: ModelView, decoder_input_ids: object) -> None:
    """Raise `InvalidInputError` unless there is a decoder input exactly if the model is an encoder–decoder."""
    if view.is_encoder_decoder and decoder_input_ids is None:
        raise InvalidInputError(
            f"decoder_input_ids: {view.description} is an encoder–decoder; pass its decoder's input, beginning with "
            "the start token (decoder_start_token_id of model.original_model.config, or of a HookedEncoderDecoder's "
            "model.cfg)."
        )
    if decoder_input_ids is not None and not view.is_encoder_decoder:
        raise InvalidInputError(f"decoder_input_ids: {view.description} is not an encoder–decoder; leave it out.")


def _of_tokenizer(view: ModelView, encoding: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's output as arguments of `prepare`; raise an error without ids, or for one passed twice."""
    if "input_ids" not in encoding:
        if _is_message(encoding):
            raise InvalidInputError("input: one message of a chat; pass a list of messages, [message].")
        raise InvalidInputError(
            f"input: a mapping with {', '.join(map(repr, encoding)) or 'nothing'} in it, but without 'input_ids'; pass "
            "a tokenizer's output, or the values that this model reads."
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
            raise InvalidInputError(f"{name}: the input already contains it; pass it only once.")
        arguments.setdefault(name, value)
    if _is_ragged(arguments["input"]) and _all_ones(arguments["attention_mask"]):
        arguments["attention_mask"] = None  # rows without padding need no mask
    if not (view.is_bridge or view.is_hooked_encoder) and not _any_number(arguments["token_type_ids"]):
        arguments["token_type_ids"] = None  # a single segment, as in a model without segments
    return arguments


def _all_ones(mask: IdsLike) -> bool:
    return mask is not None and all(bool(torch.as_tensor(row).all()) for row in mask)


def _any_number(segments: IdsLike) -> bool:
    return segments is not None and any(bool(torch.as_tensor(row).any()) for row in segments)


def plain_input(view: ModelView, input: InputLike) -> InputLike:
    """Return columns and arrays of texts as a list, chats as token ids (see `chat_ids`), anything else unchanged."""
    chats = chats_in(input)
    if chats is not None:
        return [chat_ids(view, chat) for chat in chats]
    if isinstance(input, Tensor | Mapping):
        return input
    values: Any = input
    if hasattr(values, "to_numpy"):  # a column of a data frame
        values = values.to_numpy()
    if hasattr(values, "dtype") and values.dtype.kind not in "biufc":  # an array without numbers
        return plain_input(view, values.tolist())
    return values


def chats_in(input: object) -> list[Chat] | None:
    """Return the chats in an input, one or several; None if it is something else."""
    if not isinstance(input, Sequence) or isinstance(input, str) or not input:
        return None
    if _is_message(input[0]):
        return [input]
    if isinstance(input[0], Sequence) and input[0] and _is_message(input[0][0]):
        return list(input)
    return None


def _is_message(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and ("role" in value or "content" in value) and "input_ids" not in value


def chat_ids(view: ModelView, chat: Chat) -> list[int]:
    """Return the token ids of a chat rendered by its template, up to the beginning of the assistant's answer.

    Raises `InvalidInputError` without tokenizer or template, for a message without role or content, or one that the
    template rejects.
    """
    return _rendered(view, chat, tokenize=True, return_dict=False)


def chat_text(view: ModelView, chat: Chat) -> str:
    """Return the same as text, including special tokens; see `chat_ids`."""
    return _rendered(view, chat, tokenize=False)


def _rendered(view: ModelView, chat: Chat, **options: Any) -> Any:
    if not getattr(view.tokenizer, "chat_template", None):
        raise InvalidInputError(
            "input: messages of a chat, but this model's tokenizer has no chat template; set "
            "model.tokenizer.chat_template, or pass the text that the model should read."
        )
    for number, message in enumerate(chat):
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise InvalidInputError(
                f"input: message {number} of a chat is {message!r}; a message is a dict such as "
                "{'role': 'user', 'content': 'Hello'}."
            )
    try:
        return view.tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program, which may raise anything
        raise InvalidInputError(
            f"input: the chat template of this model's tokenizer rejects these messages ({error}). Pass roles and "
            "contents that it supports, or the text that the model should read."
        ) from error


def _of_signal(signal: Signal) -> Prompt:
    """Return images or sound as prompts, with all positions real."""
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
    input: InputLike,
    attention_mask: IdsLike,
    name: str,
    vocabulary: int,
    *,
    prepend_bos: bool | None,
    padding_side: Side,
    is_encoder: bool | None = None,
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Return token ids and mask of one input, on the model's device."""
    input = plain_input(view, input)
    if _is_text(input) or _is_ragged(input):
        if attention_mask is not None:
            raise InvalidInputError(
                f"{name}: for text, or rows of different lengths, it follows from the input; pass it only together "
                "with token ids of equal length."
            )
        tokens, mask = _pad(view, token_rows(view, input, prepend_bos, is_encoder), padding_side)
    else:
        tokens = _as_ids(input)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if attention_mask is not None:
            refuse_meta(name, attention_mask)
            try:
                mask = _batched(torch.as_tensor(attention_mask).bool())
            except (TypeError, ValueError, RuntimeError) as error:
                raise InvalidInputError(f"{name}: pass 1 at real tokens and 0 at padding ({error}).") from error
            if mask.shape != tokens.shape:
                raise InvalidInputError(
                    f"{name} is {tuple(mask.shape)}, the token ids are {tuple(tokens.shape)}; they must agree."
                )
        elif _ends_in_padding(view, tokens):
            warn_caller(
                "input: token ids begin or end with several padding tokens, but there is no attention_mask, so they "
                "count as real. Pass attention_mask=, 1 at real tokens and 0 at padding.",
            )
    _check(view, tokens, mask, name, vocabulary)
    return tokens.to(view.device), mask.to(view.device)


def token_rows(
    view: ModelView, input: InputLike, prepend_bos: bool | None = None, is_encoder: bool | None = None
) -> list[Int[Tensor, "_pos"]]:
    """Return each prompt's unpadded token ids, for the encoder if `is_encoder` (None: the first stack)."""
    is_encoder = view.begins_with_encoder if is_encoder is None else is_encoder
    input = plain_input(view, input)
    if isinstance(input, Mapping):
        return _rows_of_tokenizer(view, input)
    if isinstance(input, str):
        input = [input]
    if _is_text(input):
        return [_tokenize(view, text, number, prepend_bos, is_encoder) for number, text in enumerate(input)]
    if _is_ragged(input):
        return [_as_ids(row)[0] for row in input]
    return list(_as_ids(input))


def _rows_of_tokenizer(view: ModelView, encoding: Mapping[str, Any]) -> list[Int[Tensor, "_pos"]]:
    """Return each prompt's unpadded token ids from a tokenizer's output; raise an error if it has more than ids."""
    if not _any_number(encoding.get("token_type_ids")):  # one segment is like none
        encoding = {name: value for name, value in encoding.items() if name != "token_type_ids"}
    others = set(encoding) - {"input_ids", "attention_mask"}
    if "input_ids" in encoding and others:
        raise InvalidInputError(
            f"input: {', '.join(map(repr, sorted(others)))} cannot be used here, where prompts are just token ids; "
            "pass only input_ids and attention_mask."
        )
    prompt = prepare(view, encoding)
    return [row[real] for row, real in zip(prompt.tokens, prompt.mask, strict=True)]


def _batched(row: Tensor) -> Tensor:
    """Return one prompt's values as a batch of one; a batch is returned unchanged."""
    return row[None] if row.ndim == 1 else row


def _is_text(input: object) -> TypeGuard[Sequence[object]]:
    return isinstance(input, str) or (isinstance(input, Sequence) and bool(input) and isinstance(input[0], str))


def _is_ragged(input: object) -> bool:
    """Return whether the input is a list of token-id rows of different lengths."""
    if not isinstance(input, Sequence) or not all(hasattr(row, "__len__") for row in input):
        return False
    return len({len(row) for row in input}) > 1


def _segments(view: ModelView, token_type_ids: IdsLike, tokens: Tensor) -> Tensor:
    if not (view.is_bridge or view.is_hooked_encoder):
        raise InvalidInputError(f"token_type_ids: {view.class_name} takes none; they are for BERT-like encoders.")
    segments = _batched(torch.as_tensor(token_type_ids, device=tokens.device))
    if segments.shape != tokens.shape:
        raise InvalidInputError(
            f"token_type_ids is {tuple(segments.shape)}, the token ids are {tuple(tokens.shape)}; they must agree."
        )
    return segments


def _tokenize(
    view: ModelView, text: object, number: int, prepend_bos: bool | None, is_encoder: bool
) -> Int[Tensor, "_pos"]:
    model = view.model
    if not isinstance(text, str):
        raise InvalidInputError(
            f"input: prompt 0 is text and prompt {number} is {type(text).__name__}; pass all as text or all as token "
            "ids."
        )
    if view.tokenizer is None:
        raise InvalidInputError(
            "input: this model has no tokenizer, or an empty one; pass token ids, or call model.set_tokenizer(...)."
        )
    if view.is_hooked_encoder or view.is_hooked_encoder_decoder:
        tokens = model.to_tokens(text, truncate=False)[0][0]
    elif is_encoder and prepend_bos is None:
        tokens = torch.tensor(ids_as_trained(view.tokenizer, text), dtype=torch.long)
    else:
        tokens = model.to_tokens(text, prepend_bos=prepend_bos, truncate=False)[0]
    if len(tokens) == 0:
        raise InvalidInputError(f"input: text number {number} ({text!r}) has no token; add text or prepend_bos=True.")
    return _without_doubled(view.tokenizer, text, tokens)


def _without_doubled(tokenizer: Any, text: str, tokens: Int[Tensor, "pos"]) -> Int[Tensor, "_pos"]:
    """Return a text's tokens without added special tokens that the text itself already begins or ends with.

    A chat template writes BOS into its text, and TransformerLens would prepend another one.
    """
    ids: list[int] = tokens.tolist()
    first = max(_surplus(tokenizer, name, text, ids, 1) for name in ("bos", "cls"))
    last = max(_surplus(tokenizer, name, text, ids[first:], -1) for name in ("eos", "sep"))
    return tokens[first : len(ids) - last]


def _surplus(tokenizer: Any, name: str, text: str, ids: Sequence[int], step: int) -> int:
    """Return how many special tokens were added before a text that has them already; with a step of −1, after it."""
    token: str | None = getattr(tokenizer, f"{name}_token", None)
    if not token:
        return 0
    written = re.match(f"(?:{re.escape(token[::step])})*", text[::step])
    count = len(written[0]) // len(token) if written else 0
    if count == 0:
        return 0
    number = getattr(tokenizer, f"{name}_token_id", None)
    return max(0, sum(1 for _ in takewhile(lambda token: token == number, ids[::step])) - count)


def _pad(view: ModelView, rows: list[Tensor], padding_side: Side) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids to one length; return them with a mask that is True at real tokens."""
    side = padding_side or "right"
    if side not in ("left", "right"):
        raise InvalidInputError(f"padding_side={side!r}; use 'left' or 'right'.")
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = [row.cpu() for row in rows]
    fill = getattr(view.tokenizer, "pad_token_id", None) or 0
    of_config = getattr(view.text_config, "pad_token_id", None)
    if view.begins_with_encoder and of_config is not None:  # RoBERTa counts positions by tokens other than this one
        fill = of_config
    return pad(ids, padding_value=fill), pad([torch.ones_like(row, dtype=torch.bool) for row in ids])


def _as_ids(input: object) -> Tensor:
    if isinstance(input, Sequence) and input and isinstance(input[0], Mapping):
        raise InvalidInputError(
            f"input: a list of {type(input[0]).__name__}; tokenize all texts in one call, tokenizer(texts, "
            "padding=True, return_tensors='pt'), and pass its output, or pass the texts themselves."
        )
    try:
        tokens = torch.as_tensor(input)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"input: cannot read {type(input).__name__} as token ids ({error}). Pass a string, a list of strings, or "
            "token ids of equal length with an attention_mask."
        ) from error
    refuse_meta("input", tokens)
    tokens = _batched(tokens)
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise InvalidInputError(f"input: token ids must be [batch, pos] and not empty, got {tuple(tokens.shape)}.")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InvalidInputError(f"input: token ids must be integers, got {tokens.dtype}.")
    return tokens.long().clone()  # gradients need a tensor from outside inference mode


def _ends_in_padding(view: ModelView, tokens: Tensor) -> bool:
    """Return whether a prompt begins or ends with several padding tokens; one may be a BOS or EOS of the same id."""
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
        raise InvalidInputError(f"{name}: ", PromptNumber(int(empty.nonzero()[0]), "row"), " has no real token.")


# ------------------------------------------------------------------ special tokens as an encoder's checkpoint has them

OTHERWISE = (
    "Pass token ids, tokenizer(text)['input_ids'] of the tokenizer that the model was trained with, or prepend_bos= "
    "(True or False) to tokenize as TransformerLens does."
)


def ids_as_trained(tokenizer: Any, text: str) -> list[int]:
    """Return a text's token ids as the checkpoint's tokenizer gives them.

    TransformerLens reloads tokenizers with ``add_bos_token=True``, which loses a template that comes from a file
    (``[CLS] … [SEP]``, ``</s>``). Raises `InvalidInputError` if that may be the case and the original cannot be loaded.
    """
    ids: list[int] = tokenizer(text)["input_ids"]
    if not _may_have_lost_its_template(tokenizer, text, ids):
        return ids
    return _loaded_as_it_was(tokenizer)(text)["input_ids"]


def _may_have_lost_its_template(tokenizer: Any, text: str, ids: list[int]) -> bool:
    """Return whether these token ids are what ``add_bos_token=True`` gives for a text, whatever the template was."""
    if not tokenizer.init_kwargs.get("add_bos_token"):
        return False
    body: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if getattr(tokenizer, "add_eos_token", False) and ids[-1:] == [tokenizer.eos_token_id]:
        ids = ids[:-1]
    return ids in (body, [tokenizer.bos_token_id, *body])


_as_they_were: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


def _loaded_as_it_was(tokenizer: Any) -> Any:
    """Load the tokenizer from the same folder or name, with its original template."""
    loaded = _as_they_were.get(tokenizer)
    if loaded is None:
        options = dict(tokenizer.init_kwargs)
        name = options.pop("name_or_path", None)
        del options["add_bos_token"]
        options["local_files_only"] = True  # TransformerLens loaded it from there
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(name, **options)
        except Exception as error:  # a tokenizer may be a program, which may raise anything
            raise InvalidInputError(
                "input: TransformerLens loads tokenizers with add_bos_token=True, which drops the other special tokens "
                f"used in an encoder's training, and the tokenizer itself cannot be loaded from {name!r} to restore "
                f"them ({error}). {OTHERWISE}"
            ) from error
        _as_they_were[tokenizer] = loaded
    _refuse_another_vocabulary(tokenizer, loaded)
    return loaded


def _refuse_another_vocabulary(tokenizer: Any, loaded: Any) -> None:
    """Raise `InvalidInputError` if tokens were added besides the special ones that TransformerLens adds."""
    if len(tokenizer) == len(loaded):
        return
    added = set(tokenizer.get_vocab()) - set(loaded.get_vocab())
    added -= {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    if added:
        raise InvalidInputError(
            f"input: the tokenizer of this model has tokens ({', '.join(map(repr, sorted(added)[:3]))}) that are "
            f"missing in {tokenizer.name_or_path!r}, the source of the encoder's special tokens. {OTHERWISE}"
        )


# ------------------------------------------------------------------
# The positions denoted by a query or a key: one rule for the whole library.


def is_all(query: Query) -> bool:
    """Return whether a query or keys are the word for every position."""
    return isinstance(query, str) and query == "all"


def query_positions(prompt: Prompt, query: Query | None = "all", name: str = "query") -> Int[Tensor, "batch query"]:
    """Return the positions that a query denotes: the one rule for `query` in the whole library.

    Args:
        prompt: the prompts.
        query: an integer counts each prompt's real tokens (−1 is the last, or the CLS token at which a classifier of
            images or sound reads its classes); a list holds several; a slice selects real tokens; a text denotes the
            last token of its last occurrence. ``"all"``, the default, denotes every position, including padding
            (whose entries are zero in every result); the word in a prompt is ``" all"``, with its space. A tensor
            `[batch, query]` holds positions of each prompt, counting padding.
        name: the argument's name, for messages. Keys predict nothing, so for them −1 is always the last token.

    Returns:
        Positions in each prompt's row, counting padding, `[batch, query]`.

    >>> from tensorlens_tl.passes.inputs import query_positions
    >>> frozen.str_tokens[0]
    ['<|bos|>', 'Return', ' the', ' value', '.', ' Return', ' the']
    >>> query_positions(frozen.prompt, -1), query_positions(frozen.prompt, [0, " value"])
    (tensor([[6]]), tensor([[0, 3]]))

    Raises:
        InvalidInputError: the query is None, an empty list, beyond a prompt's real tokens, a text that is not in it, or
            a slice with different numbers of tokens.
    """
    mask = prompt.mask
    if query is None:
        raise InvalidInputError(f'{name}=None: pass "all" for every position, or -1 for the last.')
    if is_all(query):
        return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if isinstance(query, Tensor) and query.ndim == 2:
        return _checked(query.to(mask.device), mask, name)
    if isinstance(query, slice):
        query = whole_slice(name, query, why="positions of a prompt")
        return _equally_many([where[query] for where in _real_positions(mask)], mask, f"{name}={query}")
    query = plain(query)
    if isinstance(query, str) or not isinstance(query, Sequence):
        return _position(prompt, query, name)
    if not query:
        raise InvalidInputError(f'{name}=[]: pass at least one position, or "all" for every one.')
    return torch.cat([_position(prompt, one, name) for one in query], dim=1)


def _checked(positions: Tensor, mask: Bool[Tensor, "batch pos"], name: str) -> Int[Tensor, "batch query"]:
    """Return the positions of each prompt from a tensor passed by the user."""
    batch, pos = mask.shape
    whole = not (positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool)
    inside = whole and bool(((positions >= 0) & (positions < pos)).all())
    if len(positions) != batch or not positions.numel() or not inside:
        raise InvalidInputError(
            f"{name}: a tensor {tuple(positions.shape)} of {positions.dtype}; pass positions of several prompts as "
            f"integers from 0 to {pos - 1}, [{batch}, query]."
        )
    return positions.long()


def one_query(prompt: Prompt, query: Query, name: str = "query") -> Int[Tensor, "batch 1"]:
    """Return the single position that a query denotes; raise `InvalidInputError` for several or none."""
    positions = query_positions(prompt, query, name)
    if positions.shape[1] != 1:
        raise InvalidInputError(
            f"{name}={query!r} stands for {positions.shape[1]} positions, but one is needed: pass an integer or a text."
        )
    return positions


def span_positions(prompt: Prompt, keys: Query) -> Int[Tensor, "batch key"]:
    """Like `query_positions`, for source tokens: a text denotes all its tokens, ``"all"`` every source token.

    Also raises an error if a text has different numbers of tokens in the prompts.
    """
    if is_all(keys) or not isinstance(keys, str):
        return query_positions(prompt, keys, "keys")
    return _equally_many(_spans(prompt, keys, "keys"), prompt.mask, f"keys={keys!r}")


def _spans(prompt: Prompt, text: str, name: str) -> list[list[int]]:
    """Return the positions of each prompt's last occurrence of a text."""
    spans = []
    for row, (tokens, mask) in enumerate(zip(prompt.str_tokens, prompt.mask.tolist(), strict=True)):
        try:
            spans.append(find_real(tokens, mask, text)[-1])
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}, ", PromptNumber(row), f": {error}") from None
    return spans


def occurrence_counts(prompt: Prompt, query: object) -> list[int]:
    """Return how often a text query occurs in each prompt (it denotes the last occurrence); 1 for any other query."""
    rows = zip(prompt.str_tokens, prompt.mask.tolist(), strict=True)
    if not isinstance(query, str):
        return [1 for _ in rows]
    return [len(find_real(tokens, mask, query)) for tokens, mask in rows]


def _position(prompt: Prompt, query: object, name: str) -> Int[Tensor, "batch 1"]:
    mask = prompt.mask
    if isinstance(query, str):
        return torch.tensor([[span[-1]] for span in _spans(prompt, query, name)], device=mask.device)
    query = whole_number(name, query, why='a position, a list or a slice of them, a text, or "all"')
    if query == -1 and prompt.class_at is not None and not name.startswith("key"):
        query = prompt.class_at
    counts = mask.sum(1)
    shortest = int(counts.min())
    if not -shortest <= query < shortest:
        row = int(counts.argmin())
        raise InvalidInputError(
            f"{name}={query} is out of range: ",
            PromptNumber(row, "row"),
            f" has {shortest} real tokens; use -{shortest} to {shortest - 1}.",
        )
    numbers = mask.long().cumsum(1) - 1
    if query < 0:
        numbers -= counts[:, None]
    return ((numbers == query) & mask).long().argmax(1, keepdim=True)


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


WASTE = 0.25
"""The maximal share of padding in a batch."""

FEW = 8
"""The number of prompts that are frozen together whatever their share of padding."""


# ------------------------------------------------------------------
# Many prompts: their lengths, and batches that are frozen together.


def tokenized(view: ModelView, input: InputLike, prepend_bos: bool | None = None) -> list[list[int]]:
    """Return each prompt's token ids; see `tensorlens_tl.passes.inputs.prepare` for valid inputs."""
    return [row.tolist() for row in token_rows(view, input, prepend_bos)]


def like_length(lengths: Sequence[int], fits: Callable[[int, int, int], bool]) -> list[list[int]]:
    """Return batches of prompt numbers of similar length, longest first, as many together as fit.

    `fits(count, longest, shortest)` says whether `count` prompts form a batch; a single prompt always does.

    >>> from tensorlens_tl.passes.inputs import like_length
    >>> like_length([2, 5, 4], lambda count, longest, shortest: count * longest <= 10)
    [[1, 2], [0]]
    """
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        batch = batches[-1] if batches else []
        if batch and fits(len(batch) + 1, lengths[batch[0]], lengths[number]):
            batch.append(number)
        else:
            batches.append([number])
    return batches


def memory_batches(view: ModelView, lengths: Sequence[int], memory: Memory = None) -> list[list[int]]:
    """Return batches of prompt numbers of similar length whose padded activations fit `memory`.

    Lengths in a batch differ by less than a sliding window (`ModelView.sliding_window`).
    """
    bound = in_bytes(memory)
    window = view.sliding_window

    def fits(count: int, longest: int, shortest: int) -> bool:
        wasteful = count > FEW and shortest < (1 - WASTE) * longest
        if window is not None and longest - shortest >= window:
            return False
        return not wasteful and count * captured_bytes(view, longest) <= bound

    return like_length(lengths, fits)


WHOLE = ("attention_mask", "token_type_ids", "cache", "decoder_input_ids", "model_inputs")
"""Options of `freeze` that describe all prompts of one pass together."""


def prompt_batches(
    view: ModelView, input: Any, freezing: Mapping[str, Any], memory: Memory = None
) -> tuple[list[Any], list[list[int]]]:
    """Return prompts as rows of token ids, and batches of them; no batches if they form a single pass.

    Images and sounds are rows themselves; `freezing` are options of `freeze`.
    """
    if view.reads == "tokens":
        input = plain_input(view, input)
    together = set(WHOLE) & set(freezing)
    single = isinstance(input, str | Mapping) or getattr(input, "ndim", 1) == 0
    if together or single or not hasattr(input, "__len__") or len(input) < 2:
        return [], []
    if view.reads != "tokens":
        prompt = prepare(view, input)
        values = list(prompt.kwargs["input"])
        return values, memory_batches(view, [prompt.tokens.shape[1]] * len(values), memory)
    rows = tokenized(view, input, freezing.get("prepend_bos"))
    return rows, memory_batches(view, [len(row) for row in rows], memory)


def one_per_prompt(name: str, value: object, prompts: int) -> list[Any] | Tensor | None:
    """Return an option's value for each prompt, or None for one shared value; another count raises an error."""
    values = _several(value, name == "direction")
    if values is not None and len(values) != prompts:
        raise InvalidInputError(f"{name}: {len(values)} for {prompts} prompts; pass one, or one for each prompt.")
    return values


def _several(value: object, is_vector: bool) -> list[Any] | Tensor | None:
    """Return the values of an option with several tokens or vectors; None for an option with one."""
    if value is None:
        return None
    if is_vector:
        vectors = torch.as_tensor(value)
        return vectors if vectors.ndim > 1 else None
    value = plain(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    return list(value)


def taken(values: list[Any] | Tensor, batch: Sequence[int]) -> list[Any] | Tensor:
    """Return the values for a batch's prompts."""
    return values[torch.tensor(batch)] if isinstance(values, Tensor) else [values[number] for number in batch]


def check_slice(query: Query | None, lengths: Sequence[int]) -> None:
    """Refuse a slice that denotes different numbers of positions in the prompts, as a single pass does."""
    if not isinstance(query, slice):
        return
    query = whole_slice("query", query, why="positions of a prompt")
    counts = {len(range(length)[query]) for length in lengths}
    if len(counts) > 1:
        raise InvalidInputError(
            f"query={query} stands for {sorted(counts)} tokens of these prompts; it must be the same number in each."
        )


def captured_bytes(view: ModelView, length: int) -> int:
    """Return the bytes stored for one prompt of this length: streams, patterns, pre-activations and ratios."""
    sizes = [block.captured for block in view.blocks]
    numbers = length * sum(by_token + by_pair * length for by_token, by_pair in sizes)
    return numbers * next(view.model.parameters()).element_size()
