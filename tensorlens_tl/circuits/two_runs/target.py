"""The number whose change between two runs is explained."""

from dataclasses import replace

from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.circuits.stream import StreamTarget, stream_target
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import Difference


def change_target(
    difference: Difference, target: TokenLike, minus: TokenLike, direction: Direction, query: Query
) -> StreamTarget:
    """The change of a number of two runs, named after the number; see `stream_target` for what is refused."""
    readout = stream_target(difference, target, minus, direction, query, "ratio", one=False)
    soft_cap = difference.view.soft_cap if readout.of_tokens else None
    return replace(readout, label=f"change of the {readout.name}", soft_cap=soft_cap)
