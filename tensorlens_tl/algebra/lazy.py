"""A map that is made when it is used and dropped after: a block of a model that is larger than memory."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, MixingMap
from tensorlens_tl.algebra.memory import WORKING_BYTES
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import BiasTerms, RowPositions, Where, by_position


@final
@dataclass(frozen=True, eq=False, repr=False)
class LazyMap(MixingMap):
    """A map that is made when it is pushed, pulled or asked for its bias, once for all rows, and dropped after.

    The rows are cut into chunks here, inside one making of the map, and not by whoever passes them: what a chunk
    allocates on its way is bounded, and the weights are read once.

    Attributes:
        make: opens the map; what it holds may be released when the context ends.
        length: how many positions it was made for.
        row_bytes: what one row allocates inside.
        name: for the repr.
        cuts: what `at` cut it to, one after the other.
    """

    make: Callable[[], AbstractContextManager[AffineMap]]
    length: int
    row_bytes: int
    name: str = "map"
    cuts: tuple[Where, ...] = ()

    def __repr__(self) -> str:
        return f"LazyMap({self.name})"

    @contextmanager
    def _made(self) -> Generator[AffineMap, None, None]:
        with self.make() as made:
            for where in self.cuts:
                made = made.at(where)
            yield made

    @property
    def bias(self) -> Tensor:
        with self._made() as made:
            return made.bias

    @property
    def needs_positions(self) -> bool:
        return True

    @property
    def positions(self) -> int | None:
        length = self.length
        for where in self.cuts:
            if isinstance(where, slice):
                length = len(range(*where.indices(length)))
            else:
                length = 1 if isinstance(where, RowPositions) else len(where)
        return length

    def at(self, where: Where) -> "LazyMap":
        return replace(self, cuts=(*self.cuts, where))

    def norm_bound(self) -> float:
        with self._made() as made:
            return made.norm_bound()

    def _chunks(self, rows: int) -> Iterator[slice]:
        step = max(1, WORKING_BYTES // max(1, self.row_bytes))
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        with self._made() as made:
            if x.ndim <= 3 or x[..., 0, 0, 0].numel() < 2:
                return made._forward(x, affine)
            rows = x.flatten(0, -4)
            done = _gathered(made._forward(rows[some], affine) for some in self._chunks(len(rows)))
        return done.unflatten(0, x.shape[:-3])

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        with self._made() as made:
            if g.ndim <= 3 or g[..., 0, 0, 0].numel() < 2:
                return made._backward(g, biases)
            rows, sums = g.flatten(0, -4), list[Tensor]()

            def pulled(some: slice) -> Tensor:
                noted: list[Tensor] | None = None if biases is None else []
                back = made._backward(rows[some], noted)
                if noted:
                    sums.append(torch.stack(noted).sum(0))
                return back

            done = _gathered(pulled(some) for some in self._chunks(len(rows)))
        if biases is not None and sums:
            biases.append(torch.cat(sums).unflatten(0, g.shape[:-3]))
        return done.unflatten(0, g.shape[:-3])

    def _pull(self, g: Tensor, here: Where, there: slice | list[int], reach: slice, biases: BiasTerms | None) -> Tensor:
        sums: list[Tensor] = []
        with self._made() as made:

            def pulled(some: slice) -> Tensor:
                terms: BiasTerms | None = None if biases is None else []
                own = here
                if isinstance(here, RowPositions) and len(here.positions) > 1:
                    own = RowPositions(here.positions[some])
                back = made._pull(g[some], own, there, reach, terms)
                if terms is not None:  # a mixture of experts may have met others in another chunk: one sum of each
                    like = upcast(g[:0, :1, :1, 0]).new_zeros(len(g[some]), g.shape[1], reach.stop)
                    sums.append(by_position(terms, like))
                return back

            if not len(g):
                return made._pull(g, here, there, reach, biases)
            done = _gathered(pulled(some) for some in self._chunks(len(g)))
        if biases is not None:
            biases.append((torch.cat(sums), reach))
        return done


def _gathered(parts: Iterator[Tensor]) -> Tensor:
    found = list(parts)
    return found[0] if len(found) == 1 else torch.cat(found)
