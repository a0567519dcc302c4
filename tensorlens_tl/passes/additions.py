"""Vectors that hooks add to the residual stream during a pass: measured, and held where they are constant.

What a hook adds is a constant of the pass if it does not depend on what the hook reads. It is tried: the model runs
once more, and the hooks are given zeros, so that a constant comes out as it is, without the rounding of a sum.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.hooks import Passed, StreamPoint, capture as run_and_capture, passing
from tensorlens_tl.passes.capture import Additions, Capture

ROUNDING = 4
"""Units of rounding by which a sum and its first summand, subtracted, may miss the second."""


def with_additions(capture: Capture, seen: Mapping[StreamPoint, Passed]) -> Capture:
    """A capture with what hooks added during its run.

    Args:
        capture: the pass.
        seen: what went through the hook points of the stream that hooks are on.
    """
    changed = {point: passed for point, passed in seen.items() if not torch.equal(passed.before, passed.after)}
    if not changed:
        return capture
    alone: dict[StreamPoint, Passed] = {}
    last = capture.points.last_output
    with passing(capture.view, list(changed), alone.__setitem__, zeros=True):
        run_and_capture(capture.model, capture.inputs, [last], last=last)
    batch, pos = capture.tokens.shape
    constant: dict[StreamPoint, Float[Tensor, "batch pos d_model"]] = {}
    dependent: list[StreamPoint] = []
    for point, passed in changed.items():
        if point in alone and _is_sum(passed, alone[point].after):
            constant[point] = alone[point].after.reshape(batch, pos, -1).to(capture.tokens.device)
        else:
            dependent.append(point)
    return replace(capture, additions=Additions(constant, tuple(dependent)))


def _is_sum(passed: Passed, vectors: Tensor) -> bool:
    """Whether hooks made of a tensor what it is with these vectors added, but for rounding."""
    if not passed.before.shape == passed.after.shape == vectors.shape:
        return False
    before, after, added = (upcast(tensor) for tensor in (passed.before, passed.after, vectors))
    rounding = ROUNDING * torch.finfo(passed.after.dtype).eps * (before.abs() + after.abs() + added.abs())
    return bool(((after - before - added).abs() <= rounding).all())
