"""Tiny random models of every supported class and family, for tests of maps, hooks and methods.

Every parameter is drawn afresh, biases and norm gains included: with the usual initial values (zero
biases, unit gains) half of the ways to be wrong cannot be seen. No network is needed.

    >>> from tensorlens_tl.testing import model_names, tiny_model
    >>> model = tiny_model("bridge/gpt2")
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.testing.building import BUILDERS, MULTIMODAL_BUILDERS, SIGNAL_BUILDERS
from tensorlens_tl.testing.configurations import ENCODER_DECODER

if TYPE_CHECKING:
    Reads = Literal["tokens", "signals", "both"]
else:
    Reads = str  # `model_names` says which there are


def model_names(reads: Reads = "tokens") -> list[str]:
    """The names `tiny_model` knows on the installed TransformerLens, as ``class/variant``.

    >>> from tensorlens_tl.testing import model_names
    >>> model_names("both")
    ['bridge/llava', 'bridge/gemma3-sees']

    Args:
        reads: ``"tokens"``, or ``"signals"`` for models of images and sound; ``"both"`` for those of images and tokens.

    Returns:
        Their names, such as ``"bridge/gpt2"``.

    Raises:
        InvalidInputError: something else.
    """
    known = {"tokens": BUILDERS, "signals": SIGNAL_BUILDERS, "both": MULTIMODAL_BUILDERS}
    if reads not in known:
        raise InvalidInputError(f"model_names: reads={reads!r}; use one of {', '.join(map(repr, known))}.")
    return list(known[reads])


def encoder_decoder_names() -> list[str]:
    """Those of them with an encoder and a decoder: `freeze` needs ``decoder_input_ids`` for them (see `tiny_input`)."""
    bridges = [name for name in BUILDERS if name.removeprefix("bridge/") in ENCODER_DECODER]
    return [name for name in BUILDERS if name in bridges or name.startswith("encoder-decoder/")]


def tiny_input(
    model: ModelLike, prompts: int = 2, length: int = 6, *, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Random tokens for any model that reads tokens, and the options `freeze` needs with them.

    >>> from tensorlens_tl import freeze
    >>> model = tiny_model("bridge/bart")
    >>> input, options = tiny_input(model)
    >>> freeze(model, input, **options).sides
    (6, 4)

    Args:
        model: a TransformerLens model.
        prompts: how many.
        length: in tokens; an encoder–decoder's decoder gets two thirds as many.
        seed: of the tokens.

    Returns:
        Token ids `[prompt, pos]`, and of an encoder–decoder ``{"decoder_input_ids": …}``.
    """
    generator = torch.Generator().manual_seed(seed)
    view = ModelView(model)

    def draw(pos: int) -> Tensor:
        return torch.randint(3, view.d_vocab, (prompts, pos), generator=generator)

    tokens = draw(length)
    if not view.is_encoder_decoder:
        return tokens, {}
    return tokens, {"decoder_input_ids": draw(max(1, 2 * length // 3))}


def tiny_model(name: str, *, seed: int = 0) -> Any:
    """A two-layer, 16-wide float64 model of one class and family, with random weights, biases and gains.

    >>> from tensorlens_tl.testing import tiny_model
    >>> tiny_model("bridge/gpt2", seed=1).cfg.d_model
    16

    Args:
        name: one of `model_names()`, such as ``"hooked/gqa"``, ``"encoder/bert"`` or ``"bridge/llama"``.
        seed: seeds torch's global generator for the weights, and restores it afterwards.

    Returns:
        The model, in eval mode.

    Raises:
        InvalidInputError: no such name on this TransformerLens.
    """
    builders = BUILDERS | SIGNAL_BUILDERS | MULTIMODAL_BUILDERS
    if name not in builders:
        raise InvalidInputError(f"tiny_model: no model called {name!r}; there are {', '.join(builders)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return builders[name]()


def labelled(model: ModelLike | str) -> tuple[str, Callable[[], Any]]:
    """What a test calls a model, and how to get it: a model, or one of `model_names()`, which is built when called."""
    if isinstance(model, str):
        return model, partial(tiny_model, model)
    return type(model).__name__, lambda: model


def random_input(model: ModelLike, length: int, generator: torch.Generator) -> Tensor:
    """Two random prompts, images, spectrograms or waveforms, as a model reads them.

    Args:
        model: the model.
        length: of the prompts, as far as the context goes, and about as many frames of a waveform; images and
            spectrograms have the size that the model's config says.
        generator: of the numbers.

    Returns:
        Token ids `[2, pos]`, or images, spectrograms or waveforms as the model takes them.
    """
    view = ModelView(model)
    if view.reads == "tokens":
        return torch.randint(3, view.d_vocab, (2, min(length, view.n_ctx)), generator=generator)
    config = view.config
    if view.reads == "images":
        shape = (config.num_channels, config.image_size, config.image_size)
    elif view.patches is not None:
        shape = (config.max_length, config.num_mel_bins)
    else:
        shape = ((length + 2) * math.prod(config.conv_stride),)
    return torch.randn(2, *shape, generator=generator)
