"""Down to the pixels: the patch embedding is affine, so an operator's scores of patches are sums over their pixels.

A logit is ``Σ scores of pixels + bias``, where the bias holds all that no pixel brings: the CLS token, position
embeddings, the convolution's bias, and the biases of the model. A pixel's score is ``pixel · (Tᵀ g)``, pulled on
through the patch embedding; where patches overlap, a pixel has a share of each. (Ours; the collapse of TensorLens, Eq.
24, with one more linear map before it.)

The change of a logit between two images is the same sum over the changes of their pixels. What two models' patch
embeddings make otherwise of the mean image is no pixel's, and part of the bias.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, formerly
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_error, relative_gap, upcast
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, PatchWeights, Query, TokenLike
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.linearisation import Linearisation, check_linearisation
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.target import resolve_target


@dataclass(frozen=True, eq=False)
class PatchEmbedding:
    """The embedding of an image's (or a spectrogram's) patches as an affine map, proved on one pass.

    Attributes:
        weights: of the convolution, and what is added to every image.
        x: the model's own input in the pass.
        special: how many positions come before the first patch.
        error: largest relative error of any position against the model's own stream.
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
        """What each pixel of a patch writes: its columns go through channels, rows and columns of the patch."""
        return self.weights.weight

    @property
    def bias(self) -> Float[Tensor, "pos d_model"]:
        """What the stream holds for every image: special tokens, position embeddings, the convolution's bias."""
        bias = self.weights.constant.clone()
        if self.weights.bias is not None:
            bias[self.special :] += self.weights.bias
        return bias

    def push(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch pos d_model"]:
        """The linear part, from pixels to the stream."""
        patches = self.weights.columns(x) @ self.weight.T
        return torch.cat([patches.new_zeros(len(x), self.special, patches.shape[-1]), patches], dim=1)

    def __call__(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch pos d_model"]:
        """The stream that enters the first block, of images of the pass's size."""
        return self.push(x) + self.bias

    def pull(self, g: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "..."]:
        """The adjoint of `push`: vectors at positions as numbers at pixels, `[*rows, *input]`."""
        return self.weights.onto_input(g[..., self.special :, :] @ self.weight, self.x)


@checked_names
def patch_embedding(frozen: Linearisation) -> PatchEmbedding:
    """The patch embedding of a vision transformer or an audio spectrogram transformer, read from its convolution.

    Args:
        frozen: a pass of it.

    Raises:
        InvalidInputError: no frozen pass, or a difference, whose two runs have one each.
        UnsupportedModelError: the model embeds no patches, or they do not give the stream that enters its first block.
    """
    check_linearisation(frozen)
    if len(frozen.runs) > 1:
        raise InvalidInputError("patch_embedding: a difference has two runs; pass one of them, difference.a.")
    weights = frozen.view.patches
    if weights is None:
        raise UnsupportedModelError(
            f"patch_embedding: {frozen.view.description} has no patch embedding that is read (one convolution, and "
            "position embeddings)."
        )
    frozen.check_fresh()
    x = frozen.prompt.kwargs["input"]
    embedding = PatchEmbedding(weights, x, frozen.prompt.special, 0.0)
    error = float("inf")
    if weights.constant.shape == frozen.resid_pre(0).shape[1:]:
        error = relative_error(embedding(x), frozen.resid_pre(0), frozen.mask)
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"patch_embedding: what enters the first block of this {frozen.view.description} is not its patches times "
            f"the convolution's weights plus constants (relative error {error:.1e}, allowed {frozen.tolerance:.0e})."
        )
    return replace(embedding, error=error)


def _pixels_and_rest(frozen: Linearisation) -> tuple[PatchEmbedding, Float[Tensor, "*batch pos d_model"]]:
    """What takes pixels, or their change, to the stream, and what the stream holds, or changes by, besides."""
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
    """What every pixel, or the change of every pixel, gives to a logit or a direction, or its change.

    Attributes:
        scores: `[batch, query, *input]`: channel, row and column of an image; time and mel bin of a spectrogram.
        bias: what no pixel brings, `[batch, query]`.
        total: what scores and bias sum to.
        gap: measured abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)).
        queries: the positions of the predictions.
        target: what the scores explain, in words.
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
    """The effect of every pixel on one logit of a class, a difference of two, or any direction; exact.

    Args:
        frozen: a pass of a vision transformer or an audio spectrogram transformer, or the difference of two: then what
            the change of every pixel gives to the change of the logit, and pixels that are the same give 0.
        target, minus, query, direction: as in `FrozenOperator.target`.
        rule: the rule for MLPs.
        memory: what may be allocated beyond the result, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError, UnsupportedModelError: see `patch_embedding` and `FrozenOperator.target`.
    """
    check_linearisation(frozen)
    embedding, rest = _pixels_and_rest(frozen)
    operator = FrozenOperator.of(frozen, rule=rule)
    collapse = operator.target(target, minus, query=query, direction=direction, memory=memory)
    gradient = operator.gradient(target, minus, query=query, direction=direction, memory=memory)
    assert collapse.bias is not None
    assert collapse.total is not None
    x = embedding.x
    scores = x.new_zeros(*gradient.shape[:2], *x.shape[1:])
    for rows in chunks(gradient.shape[1], frozen.row_bytes, memory, "queries"):
        chunk = slice(rows.start, rows.stop)
        scores[:, chunk] = (embedding.pull(gradient[:, chunk].transpose(0, 1)) * x).transpose(0, 1)
    bias = upcast(collapse.bias) + (upcast(gradient) * rest.unsqueeze(-3)).sum((-2, -1))
    gap = relative_gap(scores.flatten(2), bias, collapse.total)
    positions = query_positions(frozen.prompt, query)
    label = resolve_target(frozen, target, minus, direction, positions).label
    if len(frozen.runs) > 1:
        label = f"change of the {label}"
    return PixelScores(scores, bias, collapse.total, gap, positions, label)
