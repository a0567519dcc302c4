"""What models of images and sound have in place of tokens: how patches are embedded, and what classes are read from."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import fold, unfold

from tensorlens_tl.models.parameters import NormWeights, detached, innermost


@dataclass(frozen=True)
class PatchWeights:
    """A patch embedding: ``patch · weightᵀ + bias`` for every patch, then what is added whatever the image shows.

    Attributes:
        weight: one row of pixels (channel, row, column) for each number of the residual stream.
        bias: of the convolution.
        constant: what the stream begins with besides: position embeddings, and the special tokens in front.
        kernel, stride: of a patch, in pixels; patches overlap where they differ.
        transposed: whether the input is a spectrogram `[batch, time, mel]`, whose image has one row for each mel bin.
    """

    weight: Float[Tensor, "d_model pixel"]
    bias: Float[Tensor, "d_model"] | None
    constant: Float[Tensor, "pos d_model"]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    transposed: bool

    @property
    def tiles(self) -> bool:
        """Whether patches neither overlap nor leave gaps."""
        return self.kernel == self.stride

    def image(self, x: Tensor) -> Float[Tensor, "*rows channel height width"]:
        """The model's input as an image."""
        if self.transposed:
            return x[..., None, :, :].mT
        return x

    def grid(self, x: Tensor) -> tuple[int, int]:
        """How many rows and columns of patches there are."""
        height, width = self.image(x).shape[-2:]
        sizes = zip((height, width), self.kernel, self.stride, strict=True)
        rows, columns = ((size - kernel) // stride + 1 for size, kernel, stride in sizes)
        return rows, columns

    def columns(self, x: Tensor) -> Float[Tensor, "batch patch pixel"]:
        """The pixels of every patch, row by row of patches."""
        return unfold(self.image(x), self.kernel, stride=self.stride).mT

    def onto_input(self, columns: Float[Tensor, "*rows batch patch pixel"], like: Tensor) -> Tensor:
        """The adjoint of `columns`: numbers of patches' pixels, summed where patches overlap, `[*rows, *input]`."""
        image = self.image(like)
        flat = columns.reshape(-1, *columns.shape[-2:]).mT
        folded = fold(flat, image.shape[-2:], self.kernel, stride=self.stride)
        shaped = folded.reshape(*columns.shape[:-3], *image.shape)
        if self.transposed:
            return shaped.mT[..., 0, :, :]
        return shaped


@dataclass(frozen=True)
class ClassHead:
    """Where a classifier's unembedding reads: the mean of the first `tokens` positions, normed once more."""

    tokens: int
    norm: NormWeights | None


def read_patches(embed: Any, transposed: bool) -> PatchWeights | None:
    """The patch embedding of a vision transformer or of an audio spectrogram transformer; None of what is neither."""
    inner = innermost(embed)
    convolution = getattr(getattr(inner, "patch_embeddings", None), "projection", None)
    positions = getattr(inner, "position_embeddings", None)
    if not isinstance(convolution, torch.nn.Conv2d) or not isinstance(positions, Tensor):
        return None
    padded = convolution.padding not in ((0, 0), "valid")
    if convolution.dilation != (1, 1) or convolution.groups != 1 or padded:
        return None
    special = [getattr(inner, name, None) for name in ("cls_token", "distillation_token")]
    constant = positions.detach()[0].clone()
    for position, token in enumerate(token for token in special if token is not None):
        constant[position] += token.detach()[0, 0]
    height, width = convolution.kernel_size
    down, across = convolution.stride
    return PatchWeights(
        weight=convolution.weight.detach().flatten(1),
        bias=detached(convolution.bias),
        constant=constant,
        kernel=(height, width),
        stride=(down, across),
        transposed=transposed,
    )
