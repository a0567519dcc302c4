"""The frozen model as steps of its residual stream: what reads from it, and what writes to it."""

from tensorlens_tl.circuits.stream.blocks import block_steps
from tensorlens_tl.circuits.stream.ruled import Start, ruled_target, target_under
from tensorlens_tl.circuits.stream.stream import (
    Pulled,
    Stream,
    StreamTarget,
    dot,
    stream_target,
    summed_by_name,
    token_pairs,
)
from tensorlens_tl.circuits.stream.sublayers import Step, Sublayer

__all__ = [
    "Pulled",
    "Start",
    "Step",
    "Stream",
    "StreamTarget",
    "Sublayer",
    "block_steps",
    "dot",
    "ruled_target",
    "stream_target",
    "summed_by_name",
    "target_under",
    "token_pairs",
]
