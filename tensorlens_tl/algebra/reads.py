"""Maps that follow each other, of which some also read what entered an earlier one of them.

A block that takes its values from an earlier block (shared keys and values) writes what is linear in two streams: its
own and that one's. All blocks between the two are one map then, with the earlier stream set aside on the way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, MixingMap
from tensorlens_tl.algebra.positions import Where


class EarlierRead(NamedTuple):
    """What is added to the vector that enters a stage: a map of what entered an earlier stage."""

    source: int
    map: AffineMap


@final
@dataclass(frozen=True, eq=False, repr=False)
class ChainWithReads(MixingMap):
    """Stages applied one after the other; before some of them, a map of what entered an earlier stage is added.

    Attributes:
        stages: in the order of application; vectors have the same width before and after each.
        reads: by the number of the stage that they are added before; each source is an earlier stage.

    >>> from tensorlens_tl.algebra import Identity, Linear
    >>> from tensorlens_tl.algebra.reads import ChainWithReads, EarlierRead
    >>> double = Linear(2 * torch.eye(2))
    >>> both = ChainWithReads((double, double), {1: EarlierRead(0, Identity())})
    >>> both.push(torch.ones(1, 1, 2))
    tensor([[[6., 6.]]])
    """

    stages: tuple[AffineMap, ...]
    reads: Mapping[int, EarlierRead]

    def __repr__(self) -> str:
        return f"ChainWithReads({len(self.stages)} stages, {len(self.reads)} reads)"

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return (*self.stages, *(read.map for read in self.reads.values()))

    @property
    def bias(self) -> Tensor:
        bias = ZERO
        entered: list[Tensor] = []
        for number, stage in enumerate(self.stages):
            if number in self.reads:
                source, read = self.reads[number]
                bias = bias + self._carried(read, entered[source])
            entered.append(bias)
            bias = self._carried(stage, bias)
        return bias

    def _carried(self, part: AffineMap, bias: Tensor) -> Tensor:
        """The bias after a part, of the bias before it."""
        if bias is ZERO:
            return part.bias
        if bias.ndim < 3:
            bias = bias[None, None]
        if self.positions is not None:
            bias = bias.expand(*bias.shape[:-2], self.positions, bias.shape[-1])
        return part._forward(bias, affine=True)

    def at(self, where: Where) -> "ChainWithReads":
        reads = {number: EarlierRead(read.source, read.map.at(where)) for number, read in self.reads.items()}
        return ChainWithReads(tuple(stage.at(where) for stage in self.stages), reads)

    def norm_bound(self) -> float:
        bound = 1.0
        entered: list[float] = []
        for number, stage in enumerate(self.stages):
            if number in self.reads:
                source, read = self.reads[number]
                bound += read.norm_bound() * entered[source]
            entered.append(bound)
            bound *= stage.norm_bound()
        return bound

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        entered: list[Tensor] = []
        for number, stage in enumerate(self.stages):
            if number in self.reads:
                source, read = self.reads[number]
                x = x + read._forward(entered[source], affine)
            entered.append(x)
            x = stage._forward(x, affine)
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        at_source: dict[int, Tensor] = {}
        for number, stage in reversed(list(enumerate(self.stages))):
            g = stage._backward(g, biases)
            if number in at_source:
                g = g + at_source.pop(number)
            if number in self.reads:
                source, read = self.reads[number]
                pulled = read._backward(g, biases)
                at_source[source] = at_source.get(source, torch.zeros_like(pulled)) + pulled
        return g
