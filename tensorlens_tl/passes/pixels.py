"""Scores of pixels: the patch embedding is affine, so an operator's scores of patches are sums over their pixels.

A logit is ``Σ scores of pixels + bias``, where the bias comprises everything that does not come from a pixel: the CLS
token, position embeddings, the convolution's bias, and the biases of the model. A pixel's score is ``pixel · (Tᵀ g)``,
pulled through the patch embedding too; if patches overlap, the pixel sums its shares of each. (Ours; the collapse of
TensorLens, Eq. 24, with one more linear map before it.)

The change of a logit between two images is the same sum over the changes of their pixels. The difference of two models'
patch embeddings, at the mean image, is part of the bias.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, formerly
from tensorlens_tl.algebra.memory import Memory, slices
from tensorlens_tl.algebra.numerics import relative_error, relative_gap, upcast
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, PatchWeights, Query, TokenLike
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.linearisation import Linearisation, check_explained
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.target import resolve_target


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """The embedding of an image's (or a spectrogram's) patches as an affine map, verified on one pass.

    Attributes:
        weights: those of the convolution, and the constants added to every image.
        x: the model's own input in the pass.
        special: the number of positions before the first patch.
        error: the largest relative error of any position against the model's own stream.
    """

    weights: PatchWeights
    x: Float[Tensor, "batch ..."]
    special: int
    error: float

    def __repr__(self) -> str:
        rows, columns = self.weights.grid(self.x)
        return f"PatchEmbedding({rows} × {columns} patches of {self.weights.kernel}, error={self.error:.1e})"

    @property
    def weight(self) -> Float[Tensor, "d_model pixel"]:
        """The weight of each pixel of a patch; its columns run over channels, rows and columns of the patch."""
        return self.weights.weight

    @property
    def bias(self) -> Float[Tensor, "pos d_model"]:
        """The constant part of the stream: special tokens, position embeddings, the convolution's bias."""
        bias = self.weights.constant.clone()
        if self.weights.bias is not None:
            bias[self.special :] += self.weights.bias
        return bias

    def push(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch pos d_model"]:
        """Apply the linear part, from pixels to the stream."""
        patches = self.weights.columns(x) @ self.weight.T
        return torch.cat([patches.new_zeros(len(x), self.special, patches.shape[-1]), patches], dim=1)

    def __call__(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch pos d_model"]:
        """Return the stream that enters the first block, for images of the pass's size."""
        return self.push(x) + self.bias

    def pull(self, g: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "..."]:
        """Apply the adjoint of `push`, from vectors at positions to numbers at pixels, `[*rows, *input]`."""
        return self.weights.onto_input(g[..., self.special :, :] @ self.weight, self.x)


@checked_names
def patch_embedding(frozen: Linearisation) -> PatchEmbedding:
    """Return the patch embedding of a vision or audio spectrogram transformer, read from its convolution.

    Args:
        frozen: a pass of the model.

    Raises:
        InvalidInputError: not a frozen pass, or a difference, whose two runs have one each.
        UnsupportedModelError: the model embeds no patches, or they do not give the stream that enters its first block.
    """
    check_explained(frozen)
    if len(frozen.runs) > 1:
        raise InvalidInputError("patch_embedding: a difference has two runs; pass one of them, difference.a.")
    weights = frozen.view.patches
    if weights is None:
        raise UnsupportedModelError(
            f"patch_embedding: {frozen.view.description} has no patch embedding of a supported form (one convolution, "
            "and position embeddings)."
        )
    frozen.check_fresh()
    x = frozen.prompt.kwargs["input"]
    embedding = PatchEmbedding(weights, x, frozen.prompt.special, 0.0)
    error = float("inf")
    if weights.constant.shape == frozen.resid_pre(0).shape[1:]:
        error = relative_error(embedding(x), frozen.resid_pre(0), frozen.mask)
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"patch_embedding: the input of the first block of this {frozen.view.description} is not its patches times "
            f"the convolution's weights plus constants (relative error {error:.1e}, allowed {frozen.tolerance:.0e})."
        )
    return replace(embedding, error=error)


def _pixels_and_rest(frozen: Linearisation) -> tuple[PatchEmbedding, Float[Tensor, "*batch pos d_model"]]:
    """Return the map from pixels (or their change) to the stream, and the rest of the stream (or of its change)."""
    first, *others = map(patch_embedding, frozen.runs)
    if not others:
        return first, first.bias
    (second,) = others
    weights = (first.weights, second.weights)
    mean, change = ((weights[0].weight + sign * weights[1].weight) / 2 for sign in (1, -1))
    of_changes = replace(first, x=first.x - second.x, weights=replace(weights[0], weight=mean))
    of_weights = replace(first, weights=replace(weights[0], weight=change))
    return of_changes, of_weights.push(first.x + second.x) + first.bias - second.bias


@dataclass(frozen=True, eq=False)
class PixelScores:
    """The contribution of every pixel to a logit or a direction, or of every pixel's change to its change.

    Attributes:
        scores: `[batch, query, *input]`: channel, row and column of an image; time and mel bin of a spectrogram.
        bias: the part that does not come from pixels, `[batch, query]`.
        total: the sum of scores and bias.
        gap: the measured abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)).
        queries: the positions of the predictions.
        target: the explained number, in words.
    """

    scores: Float[Tensor, "batch query ..."]
    bias: Float[Tensor, "batch query"]
    total: Float[Tensor, "batch query"]
    gap: Float[Tensor, "batch query"]
    queries: Int[Tensor, "batch query"]
    target: str

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.scores.shape))
        return f"PixelScores({self.target!r}, [{shape}], gap={float(self.gap.max()):.1e})"


@formerly(ONCE_ACTIVATION)
@checked_names
def pixel_scores(
    frozen: Linearisation,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Float[Tensor, "..."] | None = None,
    rule: FrozenRule = "frozen",
    memory: Memory = None,
) -> PixelScores:
    """Return the exact effect of every pixel on the logit of a class, a logit difference, or any direction.

    Args:
        frozen: a pass of a vision transformer or an audio spectrogram transformer, or the difference of two: then
            scores are the effects of pixels' changes on the change of the logit, 0 for unchanged pixels.
        target, minus, query, direction: as in `FrozenOperator.target`.
        rule: the rule for MLPs.
        memory: the memory that may be allocated beyond the result, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError, UnsupportedModelError: see `patch_embedding` and `FrozenOperator.target`.
    """
    check_explained(frozen)
    embedding, rest = _pixels_and_rest(frozen)
    operator = FrozenOperator.of(frozen, rule=rule)
    collapse = operator.target(target, minus, query=query, direction=direction, memory=memory)
    gradient = operator.gradient(target, minus, query=query, direction=direction, memory=memory)
    assert collapse.bias is not None
    assert collapse.total is not None
    x = embedding.x
    scores = x.new_zeros(*gradient.shape[:2], *x.shape[1:])
    for chunk in slices(gradient.shape[1], frozen.row_bytes, memory, "queries"):
        scores[:, chunk] = (embedding.pull(gradient[:, chunk].transpose(0, 1)) * x).transpose(0, 1)
    bias = upcast(collapse.bias) + (upcast(gradient) * rest.unsqueeze(-3)).sum((-2, -1))
    gap = relative_gap(scores.flatten(2), bias, collapse.total)
    positions = query_positions(frozen.prompt, query)
    label = resolve_target(frozen, target, minus, direction, positions).label
    if len(frozen.runs) > 1:
        label = f"change of the {label}"
    return PixelScores(scores, bias, collapse.total, gap, positions, label)
