"""A map that is opened when it is used and dropped after: a block of a model that is larger than memory."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, MixingMap, collector
from tensorlens_tl.algebra.memory import WORKING_BYTES, joined
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import BiasTerms, Positions, RowPositions, Where, by_position


@final
@dataclass(frozen=True, eq=False, repr=False)
class LazyMap(MixingMap):
    """A map that is opened when it is pushed, pulled or its bias is read, once for all rows, and dropped after.

    The rows are cut into chunks here, while the map is open, and not by callers: what a chunk allocates on its way is
    bounded, and the weights are read once.

    Attributes:
        make: opens the map; what it holds may be released when the context ends.
        length: how many positions it has.
        row_bytes: what one row allocates inside.
        name: for the repr.
        cuts: what `at` cut it to, one after the other.

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
                # a mixture of experts may reach other experts in another chunk: one sum of each
                like = upcast(g[:0, :1, :1, 0]).new_zeros(len(g[chunk]), g.shape[1], reach.stop)
                sums.append(by_position(terms, like))
                return cotangents

            if not len(g):
                return inner._pull(g, here, destination, reach, biases)
            cotangents = joined(pulled(chunk) for chunk in self._chunks(len(g)))
        if biases is not None:
            biases.append((torch.cat(sums), reach))
        return cotangents
