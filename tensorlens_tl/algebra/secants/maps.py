"""Maps that secants need in addition to the primitives: named offsets, maps of rank one, rotations."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, MixingMap, PositionwiseMap, WithoutBias, note_bias
from tensorlens_tl.algebra.numerics import product
from tensorlens_tl.algebra.positions import Where, at
from tensorlens_tl.algebra.primitives import channels_of, largest_singular_value, several


@dataclass(frozen=True, eq=False)
class MatrixChange:
    """The factors of x̄·ΔW, for a matrix that differs between two models.

    Attributes:
        read: x̄, the mean of the two inputs.
        a, b: the two matrices.
    """

    read: Float[Tensor, "batch pos d_in"]
    a: Float[Tensor, "d_in d_out"]
    b: Float[Tensor, "d_in d_out"]

    @property
    def matrix(self) -> Float[Tensor, "d_in d_out"]:
        """ΔW."""
        return self.a - self.b

    @property
    def vectors(self) -> Float[Tensor, "batch pos d_out"]:
        """x̄·ΔW."""
        return product(self.read, self.matrix).to(self.read.dtype)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Offset(PositionwiseMap):
    """``x + vectors``: a named constant that is added to the input.

    >>> from tensorlens_tl.algebra.secants import Offset
    >>> Offset(torch.tensor([[[1.0, 2.0]]]), "L0.W_V")(torch.ones(1, 1, 2))
    tensor([[[2., 3.]]])
    """

    vectors: Float[Tensor, "*rows #batch #pos d"]
    name: str
    change: MatrixChange | None = None
    """The factors of the vectors, if they come from a change of a matrix."""

    def __repr__(self) -> str:
        return f"Offset({self.name})"

    @property
    def positions(self) -> int | None:
        return several(self.vectors)

    @property
    def bias(self) -> Tensor:
        return self.vectors

    @property
    def is_channelwise(self) -> bool:
        return True

    def of_group(self, group: int, groups: int) -> "Offset":
        return Offset(channels_of(self.vectors, group, groups), self.name)

    def at(self, where: Where) -> "Offset":
        return Offset(at(self.vectors, where), self.name)

    def placed(self, place: Callable[[Tensor], Tensor]) -> "Offset":
        """Return the offset with its vectors, one for each position, placed among more positions."""
        change = self.change
        if change is not None:
            change = replace(change, read=place(change.read))
        return Offset(place(self.vectors), self.name, change)

    def norm_bound(self) -> float:
        return 1.0

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return x + self.vectors.to(x) if affine else x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.vectors, biases)
        return g


class WithConstants(MixingMap):
    """A map that has named constants inside, but is not composed of other maps."""

    @abstractmethod
    def noted(self, g: Float[Tensor, "*rows batch pos d"]) -> list[tuple[Offset, Tensor]]:
        """Return each constant, the last of the map first, with the vector pulled to it from the map's output."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class RankOne(WithoutBias, PositionwiseMap):
    """``write · ⟨read, x⟩`` at every position, in each of several equal groups of channels.

    >>> from tensorlens_tl.algebra.secants import RankOne
    >>> RankOne(read=torch.tensor([[[1.0, 1.0]]]), write=torch.tensor([[[0.0, 2.0]]]))(torch.tensor([[[3.0, 4.0]]]))
    tensor([[[ 0., 14.]]])
    """

    read: Float[Tensor, "*rows batch pos d"]
    write: Float[Tensor, "*rows batch pos d"]
    groups: int = 1

    def __repr__(self) -> str:
        return f"RankOne({self.read.shape[-1]})"

    @property
    def positions(self) -> int | None:
        return several(self.read)

    def of_group(self, group: int, groups: int) -> AffineMap:
        if self.groups % groups:
            return super().of_group(group, groups)
        cut = partial(channels_of, group=group, groups=groups)
        return RankOne(cut(self.read), cut(self.write), self.groups // groups)

    @property
    def is_channelwise(self) -> bool:
        return self.groups > 1  # as far as heads are concerned: each head is a group

    def at(self, where: Where) -> "RankOne":
        return replace(self, read=at(self.read, where), write=at(self.write, where))

    def norm_bound(self) -> float:
        lengths = [part.unflatten(-1, (self.groups, -1)).norm(dim=-1) for part in (self.read, self.write)]
        return float((lengths[0] * lengths[1]).max())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self._sent(x, self.read, self.write)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return self._sent(g, self.write, self.read)

    def _sent(self, x: Tensor, read: Tensor, write: Tensor) -> Tensor:
        if self.groups == 1:
            return ((read * x).sum(-1, keepdim=True) * write).to(x.dtype)
        products = (read * x).unflatten(-1, (self.groups, -1)).sum(-1, keepdim=True)
        return (products * write.unflatten(-1, (self.groups, -1))).flatten(-2).to(x.dtype)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Rotation(WithoutBias, PositionwiseMap):
    """A rotation of each head's vector by its position's matrix (RoPE): ``[.., (head d)] -> [.., (head d)]``.

    >>> from tensorlens_tl.algebra.secants import Rotation
    >>> quarter = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])
    >>> Rotation.of(quarter)(torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]))
    tensor([[[ 0.,  1., -1.,  0.]]])
    """

    flat: Float[Tensor, "*rows batch pos entries"]
    """The flattened matrices, which are applied from the right."""
    d_head: int

    @classmethod
    def of(cls, matrices: Float[Tensor, "pos d d"]) -> "Rotation":
        """Build the map from one matrix for each position, ``x_i @ matrices[i]``."""
        return cls(matrices.flatten(1)[None], matrices.shape[-1])

    def __repr__(self) -> str:
        return f"Rotation({self.d_head})"

    @property
    def positions(self) -> int | None:
        return several(self.flat)

    @property
    def is_channelwise(self) -> bool:
        return True  # as far as heads are concerned

    def of_group(self, group: int, groups: int) -> "Rotation":
        return self

    def at(self, where: Where) -> "Rotation":
        return replace(self, flat=at(self.flat, where))

    def norm_bound(self) -> float:
        return largest_singular_value(self.flat.unflatten(-1, (self.d_head, self.d_head)))

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self._times(x, self.flat.unflatten(-1, (self.d_head, self.d_head)))

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return self._times(g, self.flat.unflatten(-1, (self.d_head, self.d_head)).mT)

    def _times(self, x: Tensor, matrices: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.d_head))
        return (heads @ matrices.to(x)).flatten(-2)
