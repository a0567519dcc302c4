"""How a layer makes its attention scores, read from its weights and proved against the pattern that it gave.

The known ways are candidates (`tensorlens_tl.passes.attention_scores.reading`); a reading is right when the softmax of
its scores is the pattern of the model itself.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.passes import PassLike, check_pass
from tensorlens_tl.passes.attention_scores import ScoreReading, added_positions, score_candidates

__all__ = ["ScoreReading", "score_reading"]


def score_reading(frozen: PassLike, layer: int) -> ScoreReading:
    """The reading of one layer's scores that reproduces its pattern.

    Raises:
        UnsupportedModelError: no known reading does; says how near the best came.
    """
    check_pass(frozen)
    frozen.view.refuse_encoder_decoder("attention scores")
    x = frozen.capture.resid_read(layer)
    pattern = frozen.pattern(layer)
    before = frozen.layouts[layer].attn.before
    candidates = [
        replace(candidate, error=_error(candidate, x, pattern.to(x.dtype), frozen.mask))
        for candidate in score_candidates(frozen.maps, layer, before, added_positions(frozen.maps))
    ]
    best = min(candidates, key=lambda reading: reading.error, default=None)
    if best is None or not best.error <= frozen.tolerance:
        nearest = min((candidate.error for candidate in candidates), default=float("nan"))
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: its attention scores cannot be read; no known scale "
            f"and position encoding reproduces its pattern (nearest: off by {nearest:.1e}). "
            "Relative position biases and centred query norms are not supported."
        )
    # what the pattern cannot tell apart (one token; nothing but uniform attention) goes to what the model states
    near = [reading for reading in candidates if reading.error <= 2 * best.error]
    scores = best.scores(x)
    unlike = [reading for reading in near if float((reading.scores(x) - scores).norm()) > 0.1 * float(scores.norm())]
    if unlike and x.shape[1] > 1:
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: several ways to make its attention scores reproduce "
            f"its pattern equally well (off by {best.error:.1e} and {unlike[0].error:.1e}); it is too even to tell. "
            "Freeze a longer prompt, or use a wider dtype."
        )
    if unlike:
        return near[0]
    return best


def _error(reading: ScoreReading, x: Tensor, pattern: Tensor, mask: Tensor) -> float:
    """The largest error of an attention probability. Rows need not sum to 1: attention sinks take their share."""
    allowed = pattern > 0
    scores = reading.finished(reading.scores(x)).masked_fill(~allowed, -torch.inf)
    probabilities = torch.softmax(upcast(scores), dim=-1) * pattern.sum(-1, keepdim=True)
    real = mask[:, None, :, None] & allowed.any(-1, keepdim=True)
    return float((probabilities - pattern).masked_fill(~real, 0.0).abs().max())
