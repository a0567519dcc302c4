"""Input that is no text: images, spectrograms and waveforms, and what a multimodal model takes besides its tokens.

| model | input |
| --- | --- |
| ViT, DeiT | pixels, `[batch, channel, height, width]` |
| audio spectrogram transformer | `[batch, time, mel]` |
| Hubert, Wav2Vec2 | samples, `[batch, sample]` |

Values are used as they are: prepare them as the model's image processor or feature extractor does. The model runs up to
its first block, which shows how many positions they become.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs.arguments import InputLike, ModelInputs

SPECIAL = ("CLS", "distillation")
"""What the positions before the first patch are called, in this order."""

IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Where configs of multimodal models say which token stands for a piece of an image."""


_EMBEDS = "takes the place of token ids, which embeddings and scores belong to; pass the token ids as input"
NOT_TOKENS = {
    "inputs_embeds": _EMBEDS,
    "decoder_inputs_embeds": _EMBEDS,
    "past_key_values": "holds tokens that ran before, and a pass holds every token; pass the whole prompt as input",
}
"""What models take in place of tokens, and why a pass does not."""


@dataclass(frozen=True)
class Signal:
    """A checked batch of images or sounds, `input` of the model's forward.

    Attributes:
        names: of its positions.
        special: how many first positions are no part of it.
        class_at: the position that a classifier reads; None for other models.
        image: what the patches tile, `[batch, channel, height, width]`; None where they overlap, or the channels are
            not 1 or 3.
    """

    input: Float[Tensor, "batch ..."]
    names: list[str]
    special: int
    class_at: int | None
    image: Float[Tensor, "batch channel height width"] | None


def read_signal(view: ModelView, input: InputLike, others: Mapping[str, object]) -> Signal:
    """Check what a model of images or sound reads, and name its positions.

    Args:
        view: the model.
        input: see the module; one image or sound without its batch axis, or a list of them, will do. It is cast to the
            model's own dtype and device.
        others: options that only token sequences have, to be refused by name.

    Raises:
        InvalidInputError: text or integers, another shape than the model's config says, values that are not finite,
            something that the model itself does not take, or one of `others`.
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
        x = torch.as_tensor(input).detach().clone()  # an inference tensor would not do where gradients are wanted
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
        raise InvalidInputError("input: it has values that are not finite (NaN or Inf).")
    return x


def _expected(view: ModelView) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """The axes of a model's input, and the sizes that its config fixes."""
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
    """Raise `InvalidInputError` where a language model is given pixels or sound."""
    if isinstance(input, Tensor) and input.is_floating_point() and input.ndim > 2:
        raise InvalidInputError(
            f"input: {view.description} reads tokens, got values of {input.dtype}, {list(input.shape)}. Images and "
            "sound of a multimodal model go in model_inputs={'pixel_values': ...}, beside the token ids; embeddings "
            "(inputs_embeds) are not read in place of token ids."
        )


def extra_inputs(view: ModelView, given: ModelInputs) -> dict[str, Any]:
    """What a multimodal model takes besides tokens, checked by name and put on its device.

    Raises:
        InvalidInputError: no mapping, a name that the model's forward does not have, one that `freeze` has an argument
            for, or numbers that are not finite.
        UnsupportedModelError: images of a model that adds their features between blocks.
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
    """Raise `UnsupportedModelError` where features of an image go in between blocks too, which no block's map has."""
    layers = getattr(getattr(view.config, "vision_config", None), "deepstack_visual_indexes", None)
    images = [name for name in given if name.startswith("pixel_values")]
    if layers and images:
        raise UnsupportedModelError(
            f"model_inputs: {view.description} adds features of the image to the residual stream between blocks 0 and "
            f"{len(layers)} (DeepStack), which are no part of any block. With tokens alone it can be frozen."
        )


def _moved(value: object, dtype: torch.dtype, device: torch.device) -> object:
    """A tensor on the device, its floating-point numbers in the dtype; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        value = value.to(dtype)
    return value.to(device)


def image_tokens(view: ModelView) -> set[int]:
    """The ids of tokens that stand for pieces of images."""
    ids = (getattr(view.config, name, None) for name in IMAGE_TOKENS)
    return {token for token in ids if token is not None}


def named_images(view: ModelView, tokens: Int[Tensor, "batch pos"], texts: list[list[str]]) -> list[list[str]]:
    """Readable tokens, with those that stand for pieces of images numbered in each prompt."""
    ids = image_tokens(view)
    rows = []
    for row, names in zip(tokens.tolist(), texts, strict=True):
        positions = [position for position, token in enumerate(row) if token in ids]
        named = {position: f" image {number}" for number, position in enumerate(positions)}
        rows.append([named.get(position, text) for position, text in enumerate(names)])
    return rows
