"""A small algebra of affine maps of the residual stream.

Every map knows how to `push` a vector through its linear part, how to `pull` one back through the adjoint, and its
`bias`. Primitives (`tensorlens_tl.algebra.primitives`) are `Identity`, `Linear`, `Diagonal`, `Norm` and `Attention`;
`Sum`, `Chain` and `Transpose` combine them, and nothing else in the library multiplies matrices.

Vectors are `[*rows, batch, pos, d]`. The leading `*rows` carry many vectors through one product: that axis is how
tokens, basis vectors, probes and targets are all handled without a loop. `batch` and `pos` are always the frozen
prompt's.

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

**To write a map**, inherit from `PositionwiseMap` (an output position reads the same input position and no other) or
from `MixingMap`, and define every abstract member; nothing else in the library needs to know the new class, and one
that lacks a rule cannot be instantiated. Classes are either abstract (those two and `AffineMap`) or final.
`tensorlens_tl.testing.check_map` tries every rule.
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
"""Stages that the repr of a chain writes out."""


class AffineMap(ABC):
    """``m(x) = m.push(x) + m.bias``, with the adjoint of the linear part in ``m.pull``.

    >>> block = frozen.maps.block_map(0)
    >>> x = frozen.resid_pre(0)
    >>> torch.allclose(block(x), block.push(x) + block.bias, atol=1e-3)
    True
    >>> block.pull(torch.ones(5, *x.shape)).shape == (5, *x.shape)
    True
    """

    # ------------------------------------------------------------------ what a map defines

    @property
    @abstractmethod
    def bias(self) -> Tensor:
        """What the map adds besides its linear part; broadcasts to `[batch, pos, d_out]`. `ZERO` if nothing."""

    @property
    @abstractmethod
    def mixes(self) -> bool:
        """Whether an output position may depend on another input position."""

    @abstractmethod
    def at(self, where: Where) -> "AffineMap":
        """The map cut to some positions, at its input and its output alike.

        A map that mixes positions is only ever cut to a slice, and only where the positions left out do not matter:
        where vectors live in the slice alone and nothing outside it is asked for.
        """

    @abstractmethod
    def norm_bound(self) -> float:
        """An upper bound of the largest singular value of the linear part."""

    @abstractmethod
    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        """The linear part of `x`, plus the bias where `affine`."""

    @abstractmethod
    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        """The adjoint; appends each primitive's ⟨g, bias⟩ per position (`[*rows, batch, pos]`) to a list `biases`."""

    @abstractmethod
    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        """The adjoint for vectors `[row, batch, live, d_out]` that live `here`.

        A map that mixes positions returns what arrives at the `destination`, any other map what stays `here`. Nothing
        lives outside `reach`, which begins at 0. Defined by `PositionwiseMap` and `MixingMap`.
        """

    def _pull_alone(self, g: Tensor, here: Where, biases: BiasTerms | None) -> Tensor:
        """`_pull` of a map that treats positions alone: the adjoint of the map cut to where the vectors live."""
        terms = collector(biases)
        pulled = self.at(here)._backward(g, terms)
        if biases is not None:
            biases += [(term, here) for term in terms or ()]
        return pulled

    def _pull_among(
        self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None
    ) -> Tensor:
        """`_pull` of any map: vectors are placed among all positions within reach, and what is asked for is taken."""
        pulled = self._pull_alone(spread_to(g, here, reach), reach, biases)
        return pulled if destination == reach else pulled[:, :, destination]

    @property
    def needs_positions(self) -> bool:
        """Whether it passes something on from position to position without knowing how many there are.

        A bias that is given once for all positions must be given at each of them before it goes through such a map.
        """
        return any(part.needs_positions for part in self.parts)

    @property
    def positions(self) -> int | None:
        """How many positions it was made for, if what it holds says so."""
        return next((part.positions for part in self.parts if part.positions is not None), None)

    @property
    def parts(self) -> tuple["AffineMap", ...]:
        """The maps that it is made of, if it is made of maps."""
        return ()

    @property
    def is_identity(self) -> bool:
        """Whether it is the identity, such as a residual connection."""
        return False

    @property
    def is_segment(self) -> bool:
        """Whether it acts on some positions and leaves the others as they are."""
        return False

    # ------------------------------------------------------------------ what a map is put together of

    @property
    def summands(self) -> tuple["AffineMap", ...]:
        """The branches that add up to it; one that is no sum is its only summand."""
        return (self,)

    @property
    def steps(self) -> tuple["AffineMap", ...]:
        """The stages that vectors of source tokens take one at a time: a chain's, others are one step."""
        return (self,)

    def component(self, number: int) -> "AffineMap":
        """One of the maps that stand side by side in it: a head of attention, a term of `Beside`; else all of it."""
        return self

    @property
    def components(self) -> int:
        """How many maps stand side by side in it; 1 where they are no parts of it."""
        return 1

    def group_read_by(self, number: int) -> tuple[int, int]:
        """Which group of its input's channels a component reads, and of how many equal groups."""
        return 0, 1

    def of_group(self, group: int, groups: int) -> "AffineMap":
        """The map that gives one of several equal groups of its output's channels, and nothing else."""
        if groups == 1:
            return self
        return Chain((*stages_of(self), ChannelGroup(group, groups)))

    @property
    def is_channelwise(self) -> bool:
        """Whether every output channel reads the same channel of the input and no other."""
        return False

    def push_adding(self, x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The linear part of `x`, with ``add(vectors, bias)`` called wherever a bias is added."""
        return add(self.push(x), self.bias)

    def push_groups(
        self, x: Float[Tensor, "*rows batch pos d_in"], groups: int
    ) -> Float[Tensor, "group *rows batch pos d_out"]:
        """The linear part of each of several equal groups of the input's channels by itself: what each head writes."""
        alone = torch.diag_embed(x.unflatten(-1, (groups, -1)).movedim(-1, 0))  # [channel, *rows, batch, pos, n, n]
        return self.push(alone.movedim(-1, 0).movedim(1, -1).flatten(-2))

    # ------------------------------------------------------------------ what every map can do

    def push(self, x: Float[Tensor, "*rows batch pos d_in"]) -> Float[Tensor, "*rows batch pos d_out"]:
        """The linear part, J·x, for every row.

        Args:
            x: vectors; any number of leading rows.

        Returns:
            As many vectors, of the output's width.

        Raises:
            InvalidInputError: inside ``torch.autocast``.

        >>> from tensorlens_tl.algebra import Linear
        >>> Linear(2 * torch.eye(3), torch.ones(3)).push(torch.ones(1, 1, 3))
        tensor([[[2., 2., 2.]]])
        """
        refuse_autocast(x.device)
        return self._forward(x, affine=False)

    def __call__(self, x: Float[Tensor, "*rows batch pos d_in"]) -> Float[Tensor, "*rows batch pos d_out"]:
        """The whole map, J·x + bias, at the cost of one push."""
        refuse_autocast(x.device)
        return self._forward(x, affine=True)

    def pull(self, g: Float[Tensor, "*rows batch pos d_out"]) -> Float[Tensor, "*rows batch pos d_in"]:
        """The adjoint of the linear part, Jᵀ·g, for every row.

        Args:
            g: vectors where the map ends; any number of leading rows.

        Returns:
            As many vectors, of the input's width.

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
        """``(Jᵀ·g, ⟨g, bias⟩)`` for every row, the second by the adjoint as well, so the bias is never pushed.

        Args:
            g: vectors where the map ends; any number of leading rows.

        Returns:
            As many vectors, of the input's width, and one number for each row and prompt.

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
        """Pull vectors at one position per row, or at some neighbouring ones, back to the source tokens.

        No other position is touched.

        Args:
            vectors: one per row and prompt; where `queries` is a slice, one for each of its positions,
                `[row, batch, live, d_out]`.
            queries: where they live.
            sources: the source tokens that are wanted, ascending, or None for all.
            length: the number of positions.
            causal: whether no part of the map looks forward: then nothing lives after the last query.
            biases: takes ⟨vector, bias⟩ of every primitive, at the positions where the vector lived, if a list. With
                `sources`, biases before the first stage that mixes positions are counted at those alone.

        Returns:
            The pulled vectors at the source tokens, as far as the last query can reach: those after it are zero.
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
            destination = sources[:reached] or [0]  # where no source is reached, one is pulled to and cut off
            count = len(destination)
        g = self._pull(vectors, queries, destination, reach, biases)
        if not self.mixes:
            g = add_at(g.new_zeros(*g.shape[:2], count, g.shape[-1]), g, queries, destination)
        return g[:, :, :reached]

    @property
    def T(self) -> "AffineMap":
        """The adjoint of the linear part as a map of its own, with bias zero."""
        return Transpose(self)

    def __matmul__(self, other: "AffineMap") -> "Chain":
        """``(a @ b)(x) = a(b(x))``."""
        return Chain((*stages_of(other), *stages_of(self)))

    def __add__(self, other: "AffineMap") -> "Sum":
        return Sum((*self.summands, *other.summands))


class PositionwiseMap(AffineMap):
    """A map that treats every position by itself; `at` must take any kind of positions."""

    @property
    def mixes(self) -> bool:
        """Never."""
        return False

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        return self._pull_alone(g, here, biases)


class MixingMap(AffineMap):
    """A map whose positions depend on each other; `at` must take a slice of positions."""

    @property
    def mixes(self) -> bool:
        """Always."""
        return True

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        return self._pull_among(g, here, destination, reach, biases)


def note_bias(g: Tensor, bias: Tensor, biases: list[Tensor] | None) -> None:
    """What a primitive's `_backward` does with its bias: append ⟨g, bias⟩ per position, if anybody collects them.

    Args:
        g: the vector that is pulled, `[*rows, batch, pos, d_out]`.
        bias: of the primitive.
        biases: takes `[*rows, batch, pos]`; None where nobody collects them.

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
    """An empty list for the bias terms of an inner map, if anybody collects them; else None."""
    return None if biases is None else []


def bias_of(offset: Tensor | None) -> Tensor:
    """The bias of a map with this offset: `ZERO` where it has none."""
    return ZERO if offset is None else offset


def stages_of(m: AffineMap) -> tuple[AffineMap, ...]:
    """The stages of a chain, those of chains inside it among them; any other map is one stage.

    >>> from tensorlens_tl.algebra import Identity, Linear, stages_of
    >>> stages_of(Linear(torch.ones(2, 3)) @ Identity())
    (Identity, Linear(2 → 3))
    """
    if not isinstance(m, Chain):
        return (m,)
    return tuple(inner for stage in m.stages for inner in stages_of(stage))


@final
@dataclass(frozen=True, eq=False, repr=False)
class ChannelGroup(PositionwiseMap):
    """One of several equal groups of channels: ``[.., (group d)] -> [.., d]``.

    >>> from tensorlens_tl.algebra import ChannelGroup
    >>> ChannelGroup(1, 2)(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    tensor([[[3., 4.]]])
    """

    group: int
    groups: int

    def __repr__(self) -> str:
        return f"ChannelGroup({self.group} of {self.groups})"

    @property
    def bias(self) -> Tensor:
        return ZERO

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
    """Maps applied one after the other; `stages` are in the order of application, each with its bias.

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
            bias = stage.bias if bias is ZERO else stage._forward(self._accepted_by(stage, bias), affine=True)
        return bias

    def _accepted_by(self, stage: AffineMap, bias: Tensor) -> Tensor:
        """A bias as vectors that a stage accepts; one vector for all positions becomes `[1, 1, d]` and broadcasts.

        Raises:
            TypeError: the stage would take it for a single position, and nothing tells how many there are.
        """
        if bias.ndim < 3:
            bias = bias[None, None]
        if bias.shape[-2] > 1 or not stage.needs_positions:
            return bias
        if self.positions is None:
            raise TypeError(
                f"{stage} does not know how many positions there are, but the bias before it is given once for all of "
                "them. Give it at every position, as the offset of a Diagonal [batch, pos, d]."
            )
        return bias.expand(*bias.shape[:-2], self.positions, bias.shape[-1])

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return self.stages

    @property
    def steps(self) -> tuple[AffineMap, ...]:
        """Its stages; chains among them are taken apart where they mix positions, or act on some alone."""
        steps: list[AffineMap] = []
        for stage in self.stages:
            apart = stage.mixes or any(part.is_segment for part in stage.parts)
            steps += stage.steps if apart else (stage,)
        return tuple(steps)

    def component(self, number: int) -> "Chain":
        """What one component of the last stage gives, with what it reads of the stages before, and nothing else.

        Where the last stages treat each channel alone, it is of the stage before them that has components.
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
        """Cut at its end: the last stage that mixes channels, and what treats each channel alone after it."""
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
        """Apart in the first stage, side by side as rows in the others."""
        if not self.stages:
            return super().push_groups(x, groups)
        first, *others = self.stages
        return Chain(tuple(others)).push(first.push_groups(x, groups))

    def push_adding(self, x: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Stage by stage, each bias where it is added."""
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
        # the first stage to mix positions is the last one pulled through: before it no other position matters
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
        """Each branch by itself, its biases where they are added."""
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
class Transpose(AffineMap):
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
    def bias(self) -> Tensor:
        return ZERO

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

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        if self.mixes:
            return self._pull_among(g, here, destination, reach, biases)
        return self._pull_alone(g, here, biases)
