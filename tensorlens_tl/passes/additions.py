"""What hooks add to the residual stream during a pass, or put in the place of it: measured, and held where constant.

What a hook adds is a constant of the pass if it does not depend on what the hook reads. It is tried: the model runs
once more, and the hooks are given zeros, so that a constant comes out as it is, without the rounding of a sum. A patch
puts values in the place of some entries, which do not depend on what was there either. That is tried by a third run, in
which the hooks are given a stream of other signs and sizes: every entry must be what it was given, plus a constant, in
all runs, or the same value in all of them. What changed there in the pass, the value less what it replaced, is then
held as a constant; that it depends on what it replaced is for `tensorlens_tl.passes.two_runs` to know, and for a pass
by itself a reason to refuse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
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
    with passing(capture.view, list(changed), alone.__setitem__, instead=torch.zeros_like):
        run_and_capture(capture.model, capture.inputs, [last], last=last)
    sums = {point for point, passed in changed.items() if point in alone and _is_sum(passed, alone[point].after)}
    others = [point for point in changed if point not in sums]
    elsewhere: dict[StreamPoint, Passed] = {}
    if others:
        with passing(capture.view, others, elsewhere.__setitem__, instead=_other_stream):
            run_and_capture(capture.model, capture.inputs, [last], last=last)
    batch, pos = capture.tokens.shape
    constant: dict[StreamPoint, Float[Tensor, "batch pos d_model"]] = {}
    patched: list[StreamPoint] = []
    dependent: list[StreamPoint] = []
    for point, passed in changed.items():
        if point in sums:
            vectors = alone[point].after
        elif point in alone and point in elsewhere and _is_patch([passed, elsewhere[point]], alone[point].after):
            vectors = (upcast(passed.after) - upcast(passed.before)).to(passed.after)
            patched.append(point)
        else:
            dependent.append(point)
            continue
        constant[point] = vectors.reshape(batch, pos, -1).to(capture.tokens.device)
    return replace(capture, additions=Additions(constant, tuple(patched), tuple(dependent)))


def _other_stream(x: Tensor) -> Tensor:
    """Vectors of other signs and sizes in every channel: what chooses entries by these chooses others."""
    return -3 * x.flip(-1)


def _is_sum(passed: Passed, vectors: Tensor) -> bool:
    """Whether hooks made of a tensor what it is with these vectors added, but for rounding."""
    return passed.before.shape == passed.after.shape == vectors.shape and bool(_summed(passed, vectors).all())


def _is_patch(runs: Sequence[Passed], vectors: Tensor) -> bool:
    """Whether every entry is what went in with a vector added in all runs, or this vector itself in all of them."""
    if any(not passed.before.shape == passed.after.shape == vectors.shape for passed in runs):
        return False
    summed = torch.ones_like(vectors, dtype=torch.bool)
    put = torch.ones_like(summed)
    for passed in runs:
        summed &= _summed(passed, vectors)
        put &= passed.after == vectors
    return bool((summed | put).all())


def _summed(passed: Passed, vectors: Tensor) -> Bool[Tensor, "..."]:
    """Where a tensor is what it was with these vectors added, but for rounding."""
    before, after, added = (upcast(tensor) for tensor in (passed.before, passed.after, vectors))
    rounding = ROUNDING * torch.finfo(passed.after.dtype).eps * (before.abs() + after.abs() + added.abs())
    return (after - before - added).abs() <= rounding
