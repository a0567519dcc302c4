"""The blocks of a loop as one map, from the embedding to the output of the last call.

Between blocks there are two streams beside each other: what the blocks of a call read and write, and the state of the
stack that is not called. A call that ends gives its stack's new state; the next one reads the sum of both, and beside
it stands the state of the stack that it is not of: of two calls of one stack the same as before, else the new one.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Streams, Sum
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import FAST, SLOW, Loop
from tensorlens_tl.passes.capture import Capture

FIRST = ((1.0, 0.0),)
IN_FIRST = ((1.0,), (0.0,))
SECOND_STAYS = ((0.0, 0.0), (0.0, 1.0))
SAME_STACK = ((1.0, 1.0), (0.0, 1.0))
OTHER_STACK = ((1.0, 1.0), (1.0, 0.0))


def unrolled(loop: Loop, stages: Sequence[AffineMap], x: Float[Tensor, "batch pos d_model"]) -> list[AffineMap]:
    """The maps of all blocks in the order of their calls, put together as the loop does.

    Args:
        loop: the calls.
        stages: of each block, with the norm that ends a call but the last.
        x: what the first block reads, for its dtype.
    """

    def streams(factors: Sequence[Sequence[float]]) -> Streams:
        return Streams(torch.tensor(factors, dtype=x.dtype, device=x.device))

    maps: list[AffineMap] = [streams(((1.0,), (loop.scale,)))]  # the first block scales what it reads by itself
    remaining = iter(stages)
    for call, after in zip(loop.calls, [*loop.calls[1:], None], strict=True):
        blocks = [next(remaining) for _ in range(call.length)]
        called = Chain((streams(FIRST), *blocks, streams(IN_FIRST)))
        maps.append(Sum((called, streams(SECOND_STAYS))))
        if after is None:
            maps.append(streams(FIRST))
        else:
            maps.append(streams(SAME_STACK if after.stack == call.stack else OTHER_STACK))
    return maps


def check_loop(capture: Capture, tolerance: float) -> dict[str, float]:
    """Compare what the first block of every call reads with the sum of both states.

    Returns:
        The largest relative error, as ``"loop"``; nothing of a model without a loop.

    Raises:
        UnsupportedModelError: they differ: the calls follow each other in another way.
    """
    loop = capture.view.loop
    if loop is None:
        return {}
    first = 0
    x = capture.resid_pre(0)
    states = {SLOW: x * loop.scale, FAST: loop.start.to(x).expand_as(x)}
    worst = 0.0
    for call in loop.calls:
        total = sum(states.values(), start=torch.zeros_like(x))
        worst = max(worst, relative_error(total, capture.resid_read(first), capture.mask))
        first += call.length
        states[call.stack] = capture.resid_post(first - 1)
    if not worst <= tolerance:
        raise UnsupportedModelError(
            f"{capture.view.description}: its stacks are not called as its config says: a block reads another stream "
            f"than the sum of their states (relative error {worst:.1e}, allowed {tolerance:.0e})."
        )
    return {"loop": worst}
