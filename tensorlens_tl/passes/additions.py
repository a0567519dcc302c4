"""Vectors that hooks add to the residual stream during a pass: measured, proved constant, and held.

What a hook adds is a constant of the pass if it does not depend on what the hook reads. It is tried: the model runs
once more, with another stream at its first block.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.hooks import Passed, StreamPoint, capture as run_and_capture, in_this_thread, passing
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
    again = _with_another_stream(capture, changed)
    constant: dict[StreamPoint, Tensor] = {}
    dependent: list[StreamPoint] = []
    for point, passed in changed.items():
        if point in again and _is_constant(passed, again[point]):
            constant[point] = _by_token(capture, passed.after - passed.before)
        else:
            dependent.append(point)
    return replace(capture, additions=Additions(constant, tuple(dependent)))


def _with_another_stream(capture: Capture, points: Mapping[StreamPoint, Any]) -> dict[StreamPoint, Passed]:
    """What goes through some points when the first block reads something else."""
    seen: dict[StreamPoint, Passed] = {}
    last = capture.points.last_output
    others = [(name, _put(other_vectors(capture.activation(name)))) for name in capture.stream_names(0)]
    with passing(capture.view, list(points), seen.__setitem__):
        run_and_capture(capture.model, capture.inputs, [last], hooks=others, last=last)
    return seen


def _put(vectors: Tensor) -> Callable[..., Tensor]:
    """A hook that puts other vectors in the place of a tensor."""

    def put(tensor: Tensor, *, hook: Any) -> Tensor:
        return vectors.to(tensor).reshape(tensor.shape)

    return partial(in_this_thread(put))


def _is_constant(first: Passed, second: Passed) -> bool:
    """Whether hooks added the same to two different tensors, but for rounding."""
    tensors = [first.before, first.after, second.before, second.after]
    if len({tensor.shape for tensor in tensors}) > 1 or torch.equal(first.before, second.before):
        return False
    added = [upcast(passed.after) - upcast(passed.before) for passed in (first, second)]
    size = torch.stack([upcast(tensor).abs() for tensor in tensors]).amax(0)
    rounding = ROUNDING * torch.finfo(first.after.dtype).eps * size
    return bool(((added[0] - added[1]).abs() <= rounding).all())


def _by_token(capture: Capture, vectors: Tensor) -> Float[Tensor, "batch pos d_model"]:
    """With batch and position apart, on the prompt's device."""
    batch, pos = capture.tokens.shape
    return vectors.reshape(batch, pos, -1).to(capture.tokens.device)


def other_vectors(x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
    """Vectors of like size that point elsewhere: a uniform factor would be invisible behind a norm."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(x)
    return x + noise * upcast(x).square().mean(-1, keepdim=True).sqrt().to(x)
