"""Several streams of one width beside each other in the channels of a vector, and what adds them to each other."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, PositionwiseMap
from tensorlens_tl.algebra.positions import Where


@final
@dataclass(frozen=True, eq=False, repr=False)
class Streams(PositionwiseMap):
    """Each stream that it gives is a sum of the streams that it reads, each times a number.

    >>> from tensorlens_tl.algebra import Streams
    >>> total_and_second = Streams(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    >>> total_and_second(torch.tensor([[[1.0, 2.0, 30.0, 40.0]]]))  # two streams of width 2
    tensor([[[31., 42., 30., 40.]]])
    """

    factors: Float[Tensor, "given read"]

    def __repr__(self) -> str:
        return f"Streams({self.factors.shape[1]} → {self.factors.shape[0]})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "Streams":
        return self

    def norm_bound(self) -> float:
        return float(torch.linalg.matrix_norm(self.factors.double(), 2))

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self._sums(x, self.factors)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return self._sums(g, self.factors.T)

    def _sums(self, x: Tensor, factors: Tensor) -> Tensor:
        by_stream = x.unflatten(-1, (factors.shape[1], -1))
        return (factors.to(x) @ by_stream).flatten(-2)
