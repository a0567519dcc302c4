"""Pushing a difference through a map whose matrices' outputs are known in either run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, Chain, Sum
from tensorlens_tl.algebra.primitives import Linear
from tensorlens_tl.algebra.secants.change import Change


@dataclass(frozen=True, eq=False)
class Passage:
    """A matrix in a map, and what it read and gave in either run.

    What enters it in a push is the difference of what it read, or the map is wrong; what leaves it is then the
    difference of what it gave, and no product is needed.
    """

    stage: Linear
    read: Change
    gives: Change


def passages_of(*changes: tuple[Change, Change]) -> dict[int, Passage]:
    """Those of pairs of two values that lie one matrix apart, the same in both runs, by the identity of its stage."""
    passages: dict[int, Passage] = {}
    for read, gives in changes:
        *before, last = gives.stages
        follows = len(before) == len(read.stages) and all(map(is_, before, read.stages))
        if follows and isinstance(last, Linear):
            passages[id(last)] = Passage(last, read, gives)
    return passages


def push_along(
    m: AffineMap,
    x: Float[Tensor, "batch pos d"],
    passages: Mapping[int, Passage],
    compare: Callable[[Tensor, Change], None],
) -> Float[Tensor, "batch pos d_out"]:
    """``m(x)``, without the products that are known.

    Args:
        m: the map.
        x: a difference.
        passages: the matrices in it whose outputs are known, by the identity of their stages.
        compare: is called with what enters each of these, and what it read.
    """
    passage = passages.get(id(m))
    if passage is not None and passage.stage is m:
        compare(x, passage.read)
        return (passage.gives.a - passage.gives.b).to(x.dtype)
    match m:
        case Chain(stages=stages):
            for stage in stages:
                x = push_along(stage, x, passages, compare)
            return x
        case Sum(terms=terms):
            first, *others = (push_along(term, x, passages, compare) for term in terms)
            return sum(others, start=first)
        case _:
            return m(x)
