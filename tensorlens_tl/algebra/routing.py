"""Branches that act on some tokens only, each on its own: the experts of a mixture with their routing held.

A token goes through the experts that it was sent to, Σ_e weight_e · expert_e(x). With routing held, that is a sum of
maps, each over a few tokens. Every branch works on its tokens packed side by side, so no product is made for a token
that an expert does not see.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, PositionwiseMap, collector
from tensorlens_tl.algebra.positions import Where, at


@final
@dataclass(frozen=True, eq=False)
class Branch:
    """One map and the tokens that it acts on.

    Attributes:
        map: positionwise, over the packed tokens: vectors are `[*rows, 1, token, d]`.
        places: which tokens, counted over the flattened axes of `Routed.shape`; none twice.
        weight: a factor for each of them.
        number: which branch it is, for people: an expert's number.
    """

    map: AffineMap
    places: Int[Tensor, "token"]
    weight: Float[Tensor, "token"]
    number: int = 0


@final
@dataclass(frozen=True, eq=False, repr=False)
class Routed(PositionwiseMap):
    """``Σ_branches weight · map(x)``, each over its own tokens; zero for tokens that no branch acts on.

    Attributes:
        branches: the maps and their tokens; at least one.
        shape: the axes of vectors that the places are counted over: batch and pos; with a position of its own for each
            row, row, batch and 1.
        width: of the vectors that come out.

    >>> from tensorlens_tl.algebra import Branch, Linear, Routed
    >>> second = Branch(Linear(2 * torch.eye(1)), places=torch.tensor([1]), weight=torch.tensor([0.5]), number=7)
    >>> Routed((second,), shape=(1, 3), width=1)(torch.ones(1, 3, 1)).flatten()
    tensor([0., 1., 0.])
    """

    branches: tuple[Branch, ...]
    shape: tuple[int, ...]
    width: int

    def __repr__(self) -> str:
        tokens = sum(len(branch.places) for branch in self.branches)
        return f"Routed({len(self.branches)} branches, {tokens} tokens)"

    @cached_property
    def _bias(self) -> Tensor:
        biases = [branch.map.bias for branch in self.branches]
        if all(bias is ZERO for bias in biases):
            return ZERO
        total = self.branches[0].weight.new_zeros(*self.shape, self.width).flatten(0, -2)
        for branch, bias in zip(self.branches, biases, strict=True):
            if bias is not ZERO:
                shares = (bias * branch.weight[:, None]).reshape(-1, self.width)
                total.index_add_(0, branch.places, shares.to(total))
        return total.reshape(*self.shape, self.width)

    @property
    def bias(self) -> Tensor:
        return self._bias

    def at(self, where: Where) -> "Routed":
        cells = torch.arange(self.shape[0] * self.shape[1], device=self.branches[0].places.device)
        old_cells = at(cells.reshape(*self.shape, 1), where)[..., 0]  # of each new cell
        if old_cells.ndim == 3 and len(old_cells) == 1:  # one position for all rows
            old_cells = old_cells[0]
        packed_index = torch.full_like(cells, -1)
        branches = []
        for branch in self.branches:
            packed_index[branch.places] = torch.arange(len(branch.places), device=cells.device)
            packed = packed_index[old_cells.flatten()]
            places = (packed >= 0).nonzero()[:, 0]
            index = packed[places]
            packed_index[branch.places] = -1
            if len(places) or not branches:  # one branch stays, with no tokens, to tell widths and devices
                branches.append(Branch(branch.map.at(index.tolist()), places, branch.weight[index], branch.number))
        if len(branches) > 1 and not len(branches[0].places):
            branches = branches[1:]
        return Routed(tuple(branches), tuple(old_cells.shape), self.width)

    def norm_bound(self) -> float:
        bounds = torch.zeros(math.prod(self.shape), dtype=torch.float64)
        for branch in self.branches:
            if len(branch.places):
                bounds.index_add_(0, branch.places.cpu(), branch.weight.abs().double().cpu() * branch.map.norm_bound())
        return float(bounds.max())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        x = x.expand(*x.shape[: -1 - len(self.shape)], *self.shape, -1)  # a bias may be given once for all positions
        flat = x.flatten(-1 - len(self.shape), -2)
        out = x.new_zeros(*flat.shape[:-1], self.width)
        for branch in self.branches:
            output = branch.map._forward(flat[..., branch.places, :].unsqueeze(-3), affine).squeeze(-3)
            out = out.index_add(-2, branch.places, output * branch.weight[:, None])
        return out.unflatten(-2, x.shape[-1 - len(self.shape) : -1])

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        flat = g.flatten(-1 - len(self.shape), -2)
        out: Tensor | None = None
        bias_terms = flat.new_zeros(flat.shape[:-1])
        for branch in self.branches:
            terms = collector(biases)
            packed = (flat[..., branch.places, :] * branch.weight[:, None]).unsqueeze(-3)
            pulled = branch.map._backward(packed, terms).squeeze(-3)
            if out is None:
                out = pulled.new_zeros(*flat.shape[:-1], pulled.shape[-1])
            out = out.index_add(-2, branch.places, pulled)
            for term in terms or ():
                bias_terms = bias_terms.index_add(-1, branch.places, term.squeeze(-2))
        assert out is not None  # there is at least one branch
        shape = g.shape[-1 - len(self.shape) : -1]
        if biases is not None and self._bias is not ZERO:
            biases.append(bias_terms.unflatten(-1, shape))
        return out.unflatten(-2, shape)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Beside(PositionwiseMap):
    """Maps that read the same vector, what they give side by side: ``[.., (term d)]``; all of the same width.

    >>> from tensorlens_tl.algebra import Beside, Identity, Linear
    >>> Beside((Identity(), Linear(2 * torch.eye(2))))(torch.ones(1, 1, 2))
    tensor([[[1., 1., 2., 2.]]])
    """

    terms: tuple[AffineMap, ...]

    @property
    def components(self) -> int:
        return len(self.terms)

    def component(self, number: int) -> AffineMap:
        return self.terms[number]

    def __repr__(self) -> str:
        return f"Beside({', '.join(map(repr, self.terms))})"

    @property
    def bias(self) -> Tensor:
        biases = [term.bias for term in self.terms]
        given = [bias for bias in biases if bias is not ZERO]
        if not given:
            return ZERO
        shape = torch.broadcast_shapes(*(bias.shape for bias in given))
        zeros = given[0].new_zeros(shape)
        return torch.cat([zeros if bias is ZERO else bias.expand(shape) for bias in biases], dim=-1)

    def at(self, where: Where) -> "Beside":
        return Beside(tuple(term.at(where) for term in self.terms))

    def norm_bound(self) -> float:
        return sum(term.norm_bound() ** 2 for term in self.terms) ** 0.5

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return torch.cat([term._forward(x, affine) for term in self.terms], dim=-1)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        parts = g.chunk(len(self.terms), dim=-1)
        first, *others = (t._backward(part, biases) for t, part in zip(self.terms, parts, strict=True))
        return sum(others, start=first)


@final
@dataclass(frozen=True, eq=False, repr=False)
class GroupSum(PositionwiseMap):
    """The sum of vectors that are side by side: ``[.., (group d)] -> [.., d]``; what ends `Beside`.

    >>> from tensorlens_tl.algebra import GroupSum
    >>> GroupSum(2)(torch.tensor([[[1.0, 2.0, 30.0, 40.0]]]))
    tensor([[[31., 42.]]])
    """

    groups: int

    def __repr__(self) -> str:
        return f"GroupSum({self.groups})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "GroupSum":
        return self

    def norm_bound(self) -> float:
        return self.groups**0.5

    def push_groups(
        self, x: Float[Tensor, "*rows batch pos d_in"], groups: int
    ) -> Float[Tensor, "group *rows batch pos d_out"]:
        """The groups themselves, where they are its own."""
        if groups != self.groups:
            return super().push_groups(x, groups)
        return x.unflatten(-1, (groups, -1)).movedim(-2, 0)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return x.unflatten(-1, (self.groups, -1)).sum(-2)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return g.repeat(*(1,) * (g.ndim - 1), self.groups)
