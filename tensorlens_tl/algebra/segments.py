"""Maps that act on some positions only, and related maps for encoder–decoders, offloading and several streams.

An encoder–decoder is treated as one stream: the encoder's positions, then the decoder's. An encoder block acts on the
former, a decoder block on the latter; cross-attention reads the former and writes only to the latter.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, MixingMap, PositionwiseMap, WithoutBias, collector
from tensorlens_tl.algebra.memory import WORKING_BYTES, joined
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, by_position, widened
from tensorlens_tl.algebra.primitives import Attention, Identity, mixed, unmixed


@final
@dataclass(frozen=True, eq=False, repr=False)
class Segment(AffineMap):
    """``inner`` on the positions of a segment; elsewhere the identity, or zero.

    Attributes:
        inner: the map of vectors at the segment's positions.
        start, stop: the segment.
        length: the number of all positions.
        only: whether the other positions come out zero instead of unchanged.
    """

    inner: AffineMap
    start: int
    stop: int
    length: int
    only: bool = False

    @property
    def positions(self) -> int | None:
        return self.length

    def __repr__(self) -> str:
        only = ", only" if self.only else ""
        return f"Segment({self.inner}, {self.start} to {self.stop} of {self.length}{only})"

    @property
    def bias(self) -> Tensor:
        bias = self.inner.bias
        if bias is ZERO:
            return ZERO
        bias = bias.expand(*(bias.shape[:-2] or (1,)), self.stop - self.start, bias.shape[-1])
        return widened(bias, self.start, self.length)

    @property
    def is_segment(self) -> bool:
        return True

    @property
    def mixes(self) -> bool:
        return self.inner.mixes

    @property
    def components(self) -> int:
        if not self.only:  # the other positions pass through every component
            return 1
        return self.inner.components

    def component(self, number: int) -> "Segment":
        if not self.only:
            return self
        return replace(self, inner=self.inner.component(number))

    def group_read_by(self, number: int) -> tuple[int, int]:
        if not self.only:
            return 0, 1
        return self.inner.group_read_by(number)

    def of_group(self, group: int, groups: int) -> AffineMap:
        if not self.only:
            return super().of_group(group, groups)
        return replace(self, inner=self.inner.of_group(group, groups))

    @property
    def is_channelwise(self) -> bool:
        return self.inner.is_channelwise

    def push_groups(self, x: Tensor, groups: int) -> Tensor:
        if not self.only:
            return super().push_groups(x, groups)
        return self.beside_others(x, self.inner.push_groups(x[..., self.start : self.stop, :], groups))

    @property
    def needs_positions(self) -> bool:
        return True  # it selects positions

    def at(self, where: Where) -> "Segment | Picked":
        if isinstance(where, RowPositions):
            inside = (where.positions >= self.start) & (where.positions < self.stop)
            within = (where.positions - self.start).clamp(0, self.stop - self.start - 1)
            return Picked(self.inner.at(RowPositions(within)), inside[..., None, None], self.only)
        if isinstance(where, slice):
            first, last, _ = where.indices(self.length)
            start, stop = (min(max(bound, first), last) for bound in (self.start, self.stop))
            inner = self.inner.at(slice(start - self.start, stop - self.start))
            if start == stop and not self.only:  # the segment is empty
                inner = Identity()
            return replace(self, inner=inner, start=start - first, stop=stop - first, length=last - first)
        if list(where) != sorted(where):
            raise TypeError(f"positions {where} must ascend.")
        inside = [position for position in where if self.start <= position < self.stop]
        start = sum(position < self.start for position in where)
        inner = self.inner.at([position - self.start for position in inside])
        return replace(self, inner=inner, start=start, stop=start + len(inside), length=len(where))

    def norm_bound(self) -> float:
        bound = self.inner.norm_bound()
        return bound if self.only else max(1.0, bound)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self.beside_others(x, self.inner._forward(x[..., self.start : self.stop, :], affine))

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        terms = collector(biases)
        inside = self.inner._backward(g[..., self.start : self.stop, :], terms)
        if biases is not None:
            around = (self.start, self.length - self.stop)
            biases += [torch.nn.functional.pad(term, around) for term in terms or ()]
        return self.beside_others(g, inside)

    def beside_others(self, x: Tensor, inside: Tensor) -> Tensor:
        """Return the segment's output with the other positions before and after it."""
        if self.only:
            return widened(inside, self.start, self.length)
        return torch.cat([x[..., : self.start, :], inside, x[..., self.stop :, :]], dim=-2)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Picked(PositionwiseMap):
    """A segment for rows with one position each: ``inner`` for rows inside, the others unchanged or zero.

    Attributes:
        inner: the map of vectors `[row, batch, 1, d]`.
        inside: which rows are inside, `[row, batch, 1, 1]`; a row axis of length 1 serves all rows.
        only: as in `Segment`.
    """

    inner: AffineMap
    inside: Tensor
    only: bool

    def __repr__(self) -> str:
        return f"Picked({self.inner})"

    @property
    def bias(self) -> Tensor:
        return ZERO if self.inner.bias is ZERO else self.inner.bias * self.inside

    def at(self, where: Where) -> "Picked":
        return self

    def norm_bound(self) -> float:
        return max(1.0, self.inner.norm_bound())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        output = self.inner._forward(x, affine)
        outside = torch.zeros_like(output) if self.only else x
        return torch.where(self.inside, output, outside)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        zeros = torch.zeros_like(g)
        pulled = self.inner._backward(torch.where(self.inside, g, zeros), biases)
        return pulled if self.only else pulled + torch.where(self.inside, zeros, g)


class Cut(NamedTuple):
    """A map from one segment, `keys`, to another, `queries`, restricted to some positions of both."""

    of_queries: slice
    of_keys: slice
    queries: tuple[int, int]
    keys: tuple[int, int]
    length: int

    @classmethod
    def of(cls, where: Where, queries: tuple[int, int], keys: tuple[int, int], length: int) -> "Cut":
        """Return the part of either segment that stays, and where the two lie among the positions that stay.

        Raises:
            TypeError: the positions are not a slice.
        """
        if not isinstance(where, slice):
            raise TypeError("a map that mixes positions of two segments can only be cut to a slice.")
        first, last, _ = where.indices(length)
        q0, q1, k0, k1 = (min(max(bound, first), last) for bound in (*queries, *keys))
        return cls(
            slice(q0 - queries[0], q1 - queries[0]),
            slice(k0 - keys[0], k1 - keys[0]),
            (q0 - first, q1 - first),
            (k0 - first, k1 - first),
            last - first,
        )


@final
@dataclass(frozen=True, eq=False, repr=False)
class CrossAttention(WithoutBias, MixingMap):
    """Mixing of one segment's values into another segment's positions by a frozen pattern, in head space.

    Like `Attention`, with a pattern that is not square: keys lie at `keys`, queries at `queries`, of `length`
    positions.
    """

    pattern: Tensor
    kv_heads: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    length: int

    @property
    def positions(self) -> int | None:
        return self.length

    def __repr__(self) -> str:
        _, heads, query, key = self.pattern.shape
        return f"CrossAttention({heads} heads, {query} × {key})"

    def at(self, where: Where) -> "CrossAttention":
        cut = Cut.of(where, self.queries, self.keys, self.length)
        pattern = self.pattern[:, :, cut.of_queries, cut.of_keys]
        return CrossAttention(pattern, self.kv_heads, cut.queries, cut.keys, cut.length)

    def norm_bound(self) -> float:
        return self.square.norm_bound()

    @property
    def square(self) -> Attention:
        """The same map among all positions, with a pattern that is zero except from keys to queries."""
        first, last = self.keys
        pad = (first, self.length - last, self.queries[0], self.length - self.queries[1])
        return Attention(torch.nn.functional.pad(self.pattern, pad), self.kv_heads)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        outputs = mixed(self.pattern, self.kv_heads, x[..., slice(*self.keys), :])
        return widened(outputs, self.queries[0], self.length)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        values = unmixed(self.pattern, self.kv_heads, g[..., slice(*self.queries), :])
        return widened(values, self.keys[0], self.length)


Value = TypeVar("Value")


# ------------------------------------------------------------------
# A map that is computed on the device of its weights, for vectors on another device.


def on_device(value: Value, device: torch.device) -> Value:
    """Return a copy of an object with all its tensors on one device; the object itself if they are there already.

    Args:
        value: a tensor; a map or another dataclass; tuples, lists and dictionaries of these. Modules and functions
            are left unchanged.
        device: the device for the tensors.

    >>> from tensorlens_tl.algebra import Linear, on_device
    >>> double = Linear(2 * torch.eye(2))
    >>> on_device(double, torch.device("cpu")) is double, on_device(double, torch.device("meta")).weight.device
    (True, device(type='meta'))
    """
    return _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value is ZERO else value.to(device)
    if isinstance(value, dict):
        return _changed(value, {key: _moved(part, device) for key, part in value.items()})
    if isinstance(value, tuple | list):
        parts = [_moved(part, device) for part in value]
        if all(part is before for part, before in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return _moved_fields(value, device)
    return device if isinstance(value, torch.device) else value


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    """Return `after`, or `before` if nothing in it was moved."""
    return before if all(after[key] is part for key, part in before.items()) else after


def _moved_fields(value: Any, device: torch.device) -> Any:
    """Return a dataclass with its fields moved, without its cached values and without repeating its checks."""
    before = {field.name: getattr(value, field.name) for field in fields(value)}
    after = _changed(before, {name: _moved(part, device) for name, part in before.items()})
    if after is before:
        return value
    other = copy(value)
    for name in set(vars(other)) - set(after):
        del vars(other)[name]
    for name, part in after.items():
        object.__setattr__(other, name, part)
    return other


@final
@dataclass(frozen=True, eq=False, repr=False)
class Placed(MixingMap):
    """A map with weights on another device than the vectors, which are moved there and back.

    Attributes:
        inner: the map, with all its tensors on `device`.
        device: the device of its weights.
        outside: the device of the vectors.

    >>> from tensorlens_tl.algebra import Linear, Placed
    >>> cpu = torch.device("cpu")
    >>> double = Placed(Linear(2 * torch.eye(2)), cpu, cpu)
    >>> double, double.push(torch.ones(1, 3, 2)).sum()
    (Linear(2 → 2) on cpu, tensor(12.))
    """

    inner: AffineMap
    device: torch.device
    outside: torch.device

    def __repr__(self) -> str:
        return f"{self.inner} on {self.device}"

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return (self.inner,)

    @property
    def bias(self) -> Tensor:
        return on_device(self.inner.bias, self.outside)

    def at(self, where: Where) -> "Placed":
        return replace(self, inner=self.inner.at(on_device(where, self.device)))

    def norm_bound(self) -> float:
        return self.inner.norm_bound()

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self.inner._forward(x.to(self.device), affine).to(self.outside)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        terms = collector(biases)
        pulled = self.inner._backward(g.to(self.device), terms)
        if biases is not None:
            biases += on_device(terms or [], self.outside)
        return pulled.to(self.outside)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        terms: BiasTerms | None = None if biases is None else []
        pulled = self.inner._pull(g.to(self.device), on_device(here, self.device), destination, reach, terms)
        if biases is not None:
            biases += on_device(terms or [], self.outside)
        return pulled.to(self.outside)


# ------------------------------------------------------------------
# A map that is loaded for each use and released afterwards: a block of a model that is larger than memory.


@final
@dataclass(frozen=True, eq=False, repr=False)
class LazyMap(MixingMap):
    """A map that is loaded when it is pushed, pulled or its bias is read, once for all rows, and released afterwards.

    Rows are cut into chunks here, while the map is loaded, and not by callers: this bounds what a chunk allocates, and
    the weights are read once.

    Attributes:
        make: loads the map; what it holds may be released when the context ends.
        length: the number of positions.
        row_bytes: the bytes that one row allocates inside.
        name: for the repr.
        cuts: the restrictions made by `at`, in order.

    >>> from contextlib import nullcontext
    >>> from tensorlens_tl.algebra import LazyMap, Linear
    >>> lazy = LazyMap(lambda: nullcontext(Linear(2 * torch.eye(2))), length=3, row_bytes=8, name="double")
    >>> lazy, lazy.push(torch.ones(1, 3, 2)).sum()
    (LazyMap(double), tensor(12.))
    """

    make: Callable[[], AbstractContextManager[AffineMap]]
    length: int
    row_bytes: int
    name: str = "map"
    cuts: tuple[Where, ...] = ()

    def __repr__(self) -> str:
        return f"LazyMap({self.name})"

    @contextmanager
    def _opened(self) -> Generator[AffineMap, None, None]:
        with self.make() as inner:
            for where in self.cuts:
                inner = inner.at(where)
            yield inner

    @property
    def bias(self) -> Tensor:
        with self._opened() as inner:
            return inner.bias

    @property
    def needs_positions(self) -> bool:
        return True

    @property
    def positions(self) -> int | None:
        length = self.length
        for where in self.cuts:
            match where:
                case slice():
                    length = len(range(*where.indices(length)))
                case RowPositions():
                    length = 1
                case _:
                    length = len(where)
        return length

    def at(self, where: Where) -> "LazyMap":
        return replace(self, cuts=(*self.cuts, where))

    def norm_bound(self) -> float:
        with self._opened() as inner:
            return inner.norm_bound()

    def _chunks(self, rows: int) -> Iterator[slice]:
        step = max(1, WORKING_BYTES // max(1, self.row_bytes))
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        with self._opened() as inner:
            if x.ndim <= 3 or x[..., 0, 0, 0].numel() < 2:
                return inner._forward(x, affine)
            rows = x.flatten(0, -4)
            outputs = joined(inner._forward(rows[chunk], affine) for chunk in self._chunks(len(rows)))
        return outputs.unflatten(0, x.shape[:-3])

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        with self._opened() as inner:
            if g.ndim <= 3 or g[..., 0, 0, 0].numel() < 2:
                return inner._backward(g, biases)
            rows = g.flatten(0, -4)
            sums: list[Tensor] = []

            def pulled(chunk: slice) -> Tensor:
                terms = collector(biases)
                cotangents = inner._backward(rows[chunk], terms)
                if terms:
                    sums.append(torch.stack(terms).sum(0))
                return cotangents

            cotangents = joined(pulled(chunk) for chunk in self._chunks(len(rows)))
        if biases is not None and sums:
            biases.append(torch.cat(sums).unflatten(0, g.shape[:-3]))
        return cotangents.unflatten(0, g.shape[:-3])

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        sums: list[Tensor] = []
        with self._opened() as inner:

            def pulled(chunk: slice) -> Tensor:
                origin = here
                if isinstance(here, RowPositions) and len(here.positions) > 1:
                    origin = RowPositions(here.positions[chunk])
                if biases is None:
                    return inner._pull(g[chunk], origin, destination, reach, None)
                terms: BiasTerms = []
                cotangents = inner._pull(g[chunk], origin, destination, reach, terms)
                # another chunk may reach other experts of a mixture, so each chunk's bias terms are summed to one
                like = upcast(g[:0, :1, :1, 0]).new_zeros(len(g[chunk]), g.shape[1], reach.stop)
                sums.append(by_position(terms, like))
                return cotangents

            if not len(g):
                return inner._pull(g, here, destination, reach, biases)
            cotangents = joined(pulled(chunk) for chunk in self._chunks(len(g)))
        if biases is not None:
            biases.append((torch.cat(sums), reach))
        return cotangents


# ------------------------------------------------------------------
# Maps that follow each other, some of which also read the input of an earlier one.
#
# The output of a block that takes its values from an earlier block (shared keys and values) is linear in two streams:
# its own and the earlier block's. All blocks between the two are then one map, which keeps the earlier stream.


class EarlierRead(NamedTuple):
    """A map of an earlier stage's input, whose output is added to the input of a later stage."""

    source: int
    map: AffineMap


@final
@dataclass(frozen=True, eq=False, repr=False)
class ChainWithReads(MixingMap):
    """Stages applied one after the other, some of which also receive a map of an earlier stage's input.

    Attributes:
        stages: in order of application; none changes the width of vectors.
        reads: by the number of the stage that receives them; each source is an earlier stage.

    >>> from tensorlens_tl.algebra import Identity, Linear
    >>> from tensorlens_tl.algebra.segments import ChainWithReads, EarlierRead
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
                carried = self._bias_after(read, entered[source])
                bias = carried if bias is ZERO else bias if carried is ZERO else bias + carried
            entered.append(bias)
            bias = self._bias_after(stage, bias)
        return bias

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


# ------------------------------------------------------------------
# Several streams of one width, concatenated in the channels of a vector, and the map that mixes them.


@final
@dataclass(frozen=True, eq=False, repr=False)
class Streams(WithoutBias, PositionwiseMap):
    """A mixture of several streams: each output stream is a weighted sum of the input streams.

    >>> from tensorlens_tl.algebra import Streams
    >>> total_and_second = Streams(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    >>> total_and_second(torch.tensor([[[1.0, 2.0, 30.0, 40.0]]]))  # two streams of width 2
    tensor([[[31., 42., 30., 40.]]])
    """

    factors: Float[Tensor, "given read"]

    def __repr__(self) -> str:
        return f"Streams({self.factors.shape[1]} → {self.factors.shape[0]})"

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
