"""A small algebra of affine maps of the residual stream.

Every map can `push` a vector through its linear part and `pull` one back through the adjoint, and has a `bias`. The
primitives (`tensorlens_tl.algebra.primitives`) are `Identity`, `Linear`, `Diagonal`, `Norm` and `Attention`; `Sum`,
`Chain` and `Transpose` combine them, and nothing else in the library multiplies matrices.

Vectors are `[*rows, batch, pos, d]`. The leading `*rows` carry many vectors through one product, so tokens, basis
vectors, probes and targets need no loop. `batch` and `pos` are always those of the frozen prompt.

    >>> import torch
    >>> from tensorlens_tl.algebra import Linear
    >>> double, shift = Linear(2 * torch.eye(3)), Linear(torch.eye(3), torch.ones(3))
    >>> both = shift @ double
    >>> both
    Linear(3 → 3, offset) @ Linear(3 → 3)
    >>> both(torch.ones(1, 1, 3))
    tensor([[[3., 3., 3.]]])
    >>> both.pull(torch.ones(5, 1, 1, 3)).shape
    torch.Size([5, 1, 1, 3])

**To write a map**, inherit from `PositionwiseMap` (an output position reads only the same input position) or from
`MixingMap`, and define every abstract member: a class that lacks one cannot be instantiated. Nothing else in the
library needs to know the new class. Classes are either abstract (those two, `WithoutBias` and `AffineMap`) or final.
`tensorlens_tl.testing.check_map` checks every rule.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import refuse_autocast
from tensorlens_tl.algebra.positions import BiasTerms, Positions, Queries, Where, add_at, spread_to
from tensorlens_tl.algebra.progress import note_progress

ZERO = torch.zeros(())
"""The bias of a linear map: a scalar, which broadcasts on any device without promoting any dtype."""

SHOWN = 6
"""Maximal number of stages in the repr of a chain."""


class AffineMap(ABC):
    """An affine map ``m(x) = m.push(x) + m.bias``, with the adjoint of its linear part in ``m.pull``.

    >>> block = frozen.maps.block_map(0)
    >>> x = frozen.resid_pre(0)
    >>> torch.allclose(block(x), block.push(x) + block.bias, atol=1e-3)
    True
    >>> block.pull(torch.ones(5, *x.shape)).shape == (5, *x.shape)
    True
    """

    # ------------------------------------------------------------------ members that a map defines

    @property
    @abstractmethod
    def bias(self) -> Tensor:
        """The constant part of the map, broadcastable to `[batch, pos, d_out]`; `ZERO` if there is none."""

    @property
    @abstractmethod
    def mixes(self) -> bool:
        """Whether an output position may depend on other input positions."""

    @abstractmethod
    def at(self, where: Where) -> "AffineMap":
        """Restrict the map to some positions, of both its input and its output.

        A map that mixes positions can only be restricted to a slice, and only if no vector lives outside the slice and
        no result outside it is needed.
        """

    @abstractmethod
    def norm_bound(self) -> float:
        """An upper bound on the largest singular value of the linear part."""

    @abstractmethod
    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        """The linear part of `x`, plus the bias if `affine`."""

    @abstractmethod
    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        """The adjoint; appends each primitive's ⟨g, bias⟩ per position (`[*rows, batch, pos]`) to a list `biases`."""

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        """The adjoint for vectors `[row, batch, live, d_out]` that live `here`.

        A map that mixes positions returns the vectors at the `destination`; any other map returns them `here`. Nothing
        lives outside `reach`, which begins at 0.
        """
        if self.mixes:
            return self._pull_among(g, here, destination, reach, biases)
        return self._pull_alone(g, here, biases)

    def _pull_alone(self, g: Tensor, here: Where, biases: BiasTerms | None) -> Tensor:
        """`_pull` for a map that does not mix positions: the adjoint, restricted to where the vectors live."""
        terms = collector(biases)
        pulled = self.at(here)._backward(g, terms)
        if biases is not None:
            biases += [(term, here) for term in terms or ()]
        return pulled

    def _pull_among(
        self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None
    ) -> Tensor:
        """`_pull` for any map: place the vectors among all positions in reach, and return those at the destination."""
        pulled = self._pull_alone(spread_to(g, here, reach), reach, biases)
        return pulled if destination == reach else pulled[:, :, destination]

    @property
    def needs_positions(self) -> bool:
        """Whether the map mixes positions without knowing how many there are.

        A bias given once for all positions must be expanded to every position before it goes through such a map.
        """
        return any(part.needs_positions for part in self.parts)

    @property
    def positions(self) -> int | None:
        """The number of positions that the map's tensors are made for; None if they do not determine it."""
        return next((part.positions for part in self.parts if part.positions is not None), None)

    @property
    def parts(self) -> tuple["AffineMap", ...]:
        """The maps that this map combines; empty for a primitive."""
        return ()

    @property
    def is_identity(self) -> bool:
        """Whether the map is the identity, such as a residual connection."""
        return False

    @property
    def is_segment(self) -> bool:
        """Whether the map acts on some positions and leaves the others unchanged."""
        return False

    # ------------------------------------------------------------------ the structure of a map

    @property
    def summands(self) -> tuple["AffineMap", ...]:
        """The branches that add up to the map; a map that is not a sum is its only summand."""
        return (self,)

    @property
    def steps(self) -> tuple["AffineMap", ...]:
        """The stages that vectors of source tokens go through one at a time; any map but a chain is a single step."""
        return (self,)

    def component(self, number: int) -> "AffineMap":
        """Return one parallel component, such as a head or a term of `Beside`; by default the whole map."""
        return self

    @property
    def components(self) -> int:
        """The number of parallel components, such as heads; 1 if the map has none."""
        return 1

    def group_read_by(self, number: int) -> tuple[int, int]:
        """Return which group of input channels a component reads, and the number of equal groups."""
        return 0, 1

    def of_group(self, group: int, groups: int) -> "AffineMap":
        """Return the map restricted to one of several equal groups of its output channels."""
        if groups == 1:
            return self
        return Chain((*stages_of(self), ChannelGroup(group, groups)))

    @property
    def is_channelwise(self) -> bool:
        """Whether every output channel reads only the same input channel."""
        return False

    def push_adding(self, x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Apply the linear part to `x`, calling ``add(vectors, bias)`` wherever a bias is added."""
        return add(self.push(x), self.bias)

    def push_groups(
        self, x: Float[Tensor, "*rows batch pos d_in"], groups: int
    ) -> Float[Tensor, "group *rows batch pos d_out"]:
        """Push each of several equal groups of input channels separately: each head's output, for instance."""
        alone = torch.diag_embed(x.unflatten(-1, (groups, -1)).movedim(-1, 0))  # [channel, *rows, batch, pos, n, n]
        return self.push(alone.movedim(-1, 0).movedim(1, -1).flatten(-2))

    def _bias_after(self, part: "AffineMap", bias: Tensor) -> Tensor:
        """Return the bias after one of the parts, given the bias before it: vectors, or one for all positions.

        Raises:
            TypeError: the part would take one vector for a single position, and the number of positions is unknown.
        """
        if bias is ZERO:
            return part.bias
        if bias.ndim < 3:
            bias = bias[None, None]
        if bias.shape[-2] == 1 and part.needs_positions:
            if self.positions is None:
                raise TypeError(
                    f"{part} does not know how many positions there are, but the bias before it is given once for all "
                    "of them. Pass the bias at every position, as the offset of a Diagonal [batch, pos, d]."
                )
            bias = bias.expand(*bias.shape[:-2], self.positions, bias.shape[-1])
        return part._forward(bias, affine=True)

    # ------------------------------------------------------------------ operations of every map

    def push(self, x: Float[Tensor, "*rows batch pos d_in"]) -> Float[Tensor, "*rows batch pos d_out"]:
        """Apply the linear part, J·x, to every row.

        Args:
            x: the vectors; any number of leading rows.

        Returns:
            One vector of the output width for each input vector.

        Raises:
            InvalidInputError: inside ``torch.autocast``.

        >>> from tensorlens_tl.algebra import Linear
        >>> Linear(2 * torch.eye(3), torch.ones(3)).push(torch.ones(1, 1, 3))
        tensor([[[2., 2., 2.]]])
        """
        refuse_autocast(x.device)
        return self._forward(x, affine=False)

    def __call__(self, x: Float[Tensor, "*rows batch pos d_in"]) -> Float[Tensor, "*rows batch pos d_out"]:
        """Apply the whole map, J·x + bias, at the cost of one push."""
        refuse_autocast(x.device)
        return self._forward(x, affine=True)

    def pull(self, g: Float[Tensor, "*rows batch pos d_out"]) -> Float[Tensor, "*rows batch pos d_in"]:
        """Apply the adjoint of the linear part, Jᵀ·g, to every row.

        Args:
            g: vectors at the map's output; any number of leading rows.

        Returns:
            One vector of the input width for each vector in `g`.

        Raises:
            InvalidInputError: inside ``torch.autocast``.

        >>> from tensorlens_tl.algebra import Linear
        >>> Linear(torch.ones(3, 2)).pull(torch.ones(1, 1, 2))
        tensor([[[2., 2., 2.]]])
        """
        refuse_autocast(g.device)
        return self._backward(g, None)

    def pull_with_bias(
        self, g: Float[Tensor, "*rows batch pos d_out"]
    ) -> tuple[Float[Tensor, "*rows batch pos d_in"], Float[Tensor, "*rows batch"]]:
        """Return ``(Jᵀ·g, ⟨g, bias⟩)`` for every row; the second uses the adjoint too, so the bias is never pushed.

        Args:
            g: vectors at the map's output; any number of leading rows.

        Returns:
            One vector of the input width for each vector in `g`, and one number for each row and prompt.

        Raises:
            InvalidInputError: inside ``torch.autocast``.
        """
        refuse_autocast(g.device)
        biases: list[Tensor] = []
        pulled = self._backward(g, biases)
        total = torch.stack(biases).sum((0, -1)) if biases else g.new_zeros(g.shape[:-2])
        return pulled, total

    def pull_between(
        self,
        vectors: Float[Tensor, "row batch *live d_out"],
        queries: Queries,
        sources: list[int] | None,
        length: int,
        *,
        causal: bool,
        biases: BiasTerms | None = None,
    ) -> Float[Tensor, "row batch live d_in"]:
        """Pull vectors at one position per row, or at a slice of positions, back to the source tokens.

        No other position is computed.

        Args:
            vectors: one per row and prompt; if `queries` is a slice, one for each of its positions,
                `[row, batch, live, d_out]`.
            queries: the positions of the vectors.
            sources: the source tokens to pull to, ascending, or None for all.
            length: the number of positions.
            causal: whether no part of the map looks ahead: then nothing lives after the last query.
            biases: a list that collects ⟨vector, bias⟩ of every primitive, at the positions where the vector lived;
                with `sources`, biases before the first stage that mixes positions only at those tokens.

        Returns:
            The pulled vectors at the source tokens up to the last query; those at later tokens are zero and left out.
        """
        refuse_autocast(vectors.device)
        if isinstance(queries, slice):
            begin, end, _ = queries.indices(length)
            queries = slice(begin, end)
        else:
            end, vectors = int(queries.positions.max()) + 1, vectors[:, :, None]
        reach = slice(0, length)
        if causal:
            reach = slice(0, end)
        destination: Positions = reach
        reached = count = reach.stop
        if sources is not None:
            reached = sum(source < reach.stop for source in sources)
            destination = sources[:reached] or [0]  # if no source is reached, pull to one and cut it off below
            count = len(destination)
        g = self._pull(vectors, queries, destination, reach, biases)
        if not self.mixes:
            g = add_at(g.new_zeros(*g.shape[:2], count, g.shape[-1]), g, queries, destination)
        return g[:, :, :reached]

    @property
    def T(self) -> "AffineMap":
        """The adjoint of the linear part as a map, with bias zero."""
        return Transpose(self)

    def __matmul__(self, other: "AffineMap") -> "Chain":
        """``(a @ b)(x) = a(b(x))``."""
        return Chain((*stages_of(other), *stages_of(self)))

    def __add__(self, other: "AffineMap") -> "Sum":
        return Sum((*self.summands, *other.summands))


class PositionwiseMap(AffineMap):
    """A map that treats every position separately; `at` must accept any kind of positions."""

    @property
    def mixes(self) -> bool:
        """False."""
        return False


class MixingMap(AffineMap):
    """A map whose output positions depend on several input positions; `at` must accept a slice of positions."""

    @property
    def mixes(self) -> bool:
        """True."""
        return True


class WithoutBias(AffineMap):
    """A linear map."""

    @property
    def bias(self) -> Tensor:
        """`ZERO`."""
        return ZERO


def note_bias(g: Tensor, bias: Tensor, biases: list[Tensor] | None) -> None:
    """Append ⟨g, bias⟩ per position to `biases`, as the `_backward` of a primitive with a bias must do.

    Args:
        g: the vector that is pulled, `[*rows, batch, pos, d_out]`.
        bias: the bias of the primitive.
        biases: the list that receives `[*rows, batch, pos]`; None to skip.

    >>> from tensorlens_tl.algebra import note_bias
    >>> terms = []
    >>> note_bias(torch.ones(1, 1, 2), torch.tensor([1.0, 2.0]), terms)
    >>> terms
    [tensor([[3.]])]
    """
    if biases is None or bias is ZERO:
        return
    bias = bias.to(g.dtype)
    biases.append(g @ bias if bias.ndim == 1 else (g * bias).sum(-1))


def collector(biases: list[Any] | None) -> list[Tensor] | None:
    """Return an empty list for the bias terms of an inner map, or None if biases are not collected."""
    return None if biases is None else []


def bias_of(offset: Tensor | None) -> Tensor:
    """Return `offset`, or `ZERO` if there is none."""
    return ZERO if offset is None else offset


def stages_of(m: AffineMap) -> tuple[AffineMap, ...]:
    """Return the stages of a chain, with nested chains flattened; any other map is a single stage.

    >>> from tensorlens_tl.algebra import Identity, Linear, stages_of
    >>> stages_of(Linear(torch.ones(2, 3)) @ Identity())
    (Identity, Linear(2 → 3))
    """
    if not isinstance(m, Chain):
        return (m,)
    return tuple(inner for stage in m.stages for inner in stages_of(stage))


@final
@dataclass(frozen=True, eq=False, repr=False)
class ChannelGroup(WithoutBias, PositionwiseMap):
    """One of several equal groups of channels: ``[.., (group d)] -> [.., d]``.

    >>> from tensorlens_tl.algebra import ChannelGroup
    >>> ChannelGroup(1, 2)(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    tensor([[[3., 4.]]])
    """

    group: int
    groups: int

    def __repr__(self) -> str:
        return f"ChannelGroup({self.group} of {self.groups})"

    def at(self, where: Where) -> "ChannelGroup":
        return self

    def norm_bound(self) -> float:
        return 1.0

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return x.unflatten(-1, (self.groups, -1))[..., self.group, :]

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        whole = g.new_zeros(*g.shape[:-1], self.groups, g.shape[-1])
        whole[..., self.group, :] = g
        return whole.flatten(-2)


# ----------------------------------------------------------------------------------- combinations


@final
@dataclass(frozen=True, eq=False, repr=False)
class Chain(AffineMap):
    """Maps applied one after the other; `stages` are in order of application, each with its own bias.

    >>> from tensorlens_tl.algebra import Chain, Linear
    >>> Chain((Linear(torch.ones(2, 3)), Linear(torch.ones(3, 4))))
    Linear(3 → 4) @ Linear(2 → 3)
    """

    stages: tuple[AffineMap, ...]

    def __repr__(self) -> str:
        shown = [f"({stage})" if isinstance(stage, Sum) else repr(stage) for stage in reversed(stages_of(self))]
        if len(shown) > SHOWN:
            shown = [*shown[: SHOWN // 2], f"… {len(shown) - SHOWN} more …", *shown[-(SHOWN // 2) :]]
        return " @ ".join(shown)

    @property
    def bias(self) -> Tensor:
        bias = ZERO
        for stage in self.stages:
            refuse_autocast(bias.device)
            bias = self._bias_after(stage, bias)
        return bias

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return self.stages

    @property
    def steps(self) -> tuple[AffineMap, ...]:
        """Its stages; nested chains are flattened if they mix positions or contain a segment."""
        steps: list[AffineMap] = []
        for stage in self.stages:
            apart = stage.mixes or any(part.is_segment for part in stage.parts)
            steps += stage.steps if apart else (stage,)
        return tuple(steps)

    def component(self, number: int) -> "Chain":
        """Return one component of the last stage, with only what it reads of the earlier stages.

        Trailing channelwise stages are skipped: the component is that of the stage before them, restricted to its
        channels.
        """
        *before, last = self.stages
        after: list[AffineMap] = []
        while last.is_channelwise and last.components == 1 and any(stage.components > 1 for stage in before):
            after = [last, *after]
            *before, last = before
        read = Chain(tuple(before)).of_group(*last.group_read_by(number))
        cut = [stage.of_group(number, last.components) for stage in after]
        return Chain((*read.stages, last.component(number), *cut))

    def of_group(self, group: int, groups: int) -> "Chain":
        """Restrict the last stage that mixes channels, and the channelwise stages after it, to one group."""
        if groups == 1:
            return self
        stages = list(self.stages)
        for number, stage in reversed(list(enumerate(stages))):
            stages[number] = stage.of_group(group, groups)
            if not stage.is_channelwise:
                break
        return Chain(tuple(stages))

    def push_groups(
        self, x: Float[Tensor, "*rows batch pos d_in"], groups: int
    ) -> Float[Tensor, "group *rows batch pos d_out"]:
        """Push the groups separately through the first stage, and side by side as rows through the others."""
        if not self.stages:
            return super().push_groups(x, groups)
        first, *others = self.stages
        return Chain(tuple(others)).push(first.push_groups(x, groups))

    def push_adding(self, x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Go stage by stage, adding each bias where it occurs."""
        for stage in self.stages:
            x = stage.push_adding(x, add)
        return x

    @property
    def mixes(self) -> bool:
        return any(stage.mixes for stage in self.stages)

    def at(self, where: Where) -> "Chain":
        return Chain(tuple(stage.at(where) for stage in self.stages))

    def norm_bound(self) -> float:
        bound = 1.0
        for stage in self.stages:
            bound *= stage.norm_bound()
        return bound

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        for stage in self.stages:
            note_progress()
            x = stage._forward(x, affine)
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        for stage in reversed(self.stages):
            note_progress()
            g = stage._backward(g, biases)
        return g

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        # the first stage that mixes positions is pulled through last of these: before it no other position matters
        first = next((number for number, stage in enumerate(self.stages) if stage.mixes), None)
        for number, stage in reversed(list(enumerate(self.stages))):
            note_progress()
            arrival = destination if number == first else reach
            g = stage._pull(g, here, arrival, reach, biases)
            if stage.mixes:
                here = arrival
        return g


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sum(AffineMap):
    """Branches that read the same vector and add up.

    >>> from tensorlens_tl.algebra import Identity, Linear
    >>> residual = Identity() + Linear(2 * torch.eye(2))
    >>> residual, residual(torch.ones(1, 1, 2))
    (Identity + Linear(2 → 2), tensor([[[3., 3.]]]))
    """

    terms: tuple[AffineMap, ...]

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))

    @property
    def bias(self) -> Tensor:
        biases = [term.bias for term in self.terms]
        return sum((bias for bias in biases if bias is not ZERO), start=ZERO)

    @property
    def summands(self) -> tuple[AffineMap, ...]:
        return self.terms

    def push_adding(self, x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Go through each branch separately, adding its biases where they occur."""
        return torch.stack([term.push_adding(x, add) for term in self.terms]).sum(0)

    @property
    def mixes(self) -> bool:
        return any(term.mixes for term in self.terms)

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return self.terms

    def at(self, where: Where) -> "Sum":
        return Sum(tuple(term.at(where) for term in self.terms))

    def norm_bound(self) -> float:
        return sum(term.norm_bound() for term in self.terms)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        first, *others = (term._forward(x, affine) for term in self.terms)
        return sum(others, start=first)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        first, *others = (term._backward(g, biases) for term in self.terms)
        return sum(others, start=first)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        pulled = [(term.mixes, term._pull(g, here, destination, reach, biases)) for term in self.terms]
        moved = [vectors for mixes, vectors in pulled if mixes]
        stayed = [vectors for mixes, vectors in pulled if not mixes]
        if not moved:
            return sum(stayed[1:], start=stayed[0])
        total = sum(moved[1:], start=moved[0])
        for vectors in stayed:
            total = add_at(total, vectors, here, destination)
        return total


@final
@dataclass(frozen=True, eq=False, repr=False)
class Transpose(WithoutBias):
    """The adjoint of a map's linear part.

    >>> from tensorlens_tl.algebra import Linear
    >>> Linear(torch.ones(2, 3)).T.push(torch.ones(1, 1, 3))
    tensor([[[3., 3.]]])
    """

    inner: AffineMap

    def __repr__(self) -> str:
        return f"({self.inner}).T"

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return (self.inner,)

    @property
    def mixes(self) -> bool:
        return self.inner.mixes

    def at(self, where: Where) -> "Transpose":
        return Transpose(self.inner.at(where))

    def norm_bound(self) -> float:
        return self.inner.norm_bound()

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self.inner._backward(x, None)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return self.inner._forward(g, affine=False)
