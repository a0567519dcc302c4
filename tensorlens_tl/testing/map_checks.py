"""The conformance battery of maps: what any `AffineMap`, ours or yours, must hold.

>>> import torch
>>> from tensorlens_tl import Linear
>>> from tensorlens_tl.testing import check_map
>>> check_map(Linear(torch.randn(8, 5)), torch.randn(2, 3, 8))
"""

from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.maps import AffineMap
from tensorlens_tl.operator import FrozenOperator
from tensorlens_tl.testing.requirements import EXACT, require, same

TOLERANCE = {torch.float64: EXACT, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_map(map: Any, x: Any = None, *, tolerance: float | None = None, seed: int = 0) -> None:
    """Put a map through everything the library relies on.

    Shapes, dtype and inputs left alone; the same result twice; rows that do not know of each other, so that any
    chunking gives the same; prompts of a batch that do not mix; linearity of `push` and `pull`;
    ``m(x) = push(x) + bias``; the bias by the adjoint; the dot test ⟨A·x, g⟩ = ⟨x, Aᵀ·g⟩; and the transpose.

    Args:
        map: an `AffineMap`, or a `FrozenOperator` (then leave `x` out).
        x: vectors it accepts, `[batch, pos, d_in]`: their shape, dtype and device count, random ones take their place.
        tolerance: largest relative difference; None takes 1e-9 for float64, 1e-4 for float32.
        seed: of the random vectors.

    Raises:
        InvalidInputError: not a map, or no vectors to try it on.
        ConformanceError: naming what does not hold.
    """
    if isinstance(map, FrozenOperator):
        map, x = map.map, map.x if x is None else x
    if not isinstance(map, AffineMap):
        raise InvalidInputError(f"check_map: {type(map).__name__} is no AffineMap or FrozenOperator.")
    if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point():
        raise InvalidInputError("check_map: x must be vectors the map accepts, a float tensor [batch, pos, d_in].")
    with torch.no_grad():
        _MapChecks(map, x, TOLERANCE.get(x.dtype, 1e-4) if tolerance is None else tolerance, seed).run()


class _MapChecks:
    def __init__(self, m: AffineMap, x: Tensor, tolerance: float, seed: int) -> None:
        self.m, self.like, self.tolerance, self.name = m, x, tolerance, type(m).__name__
        self.generator = torch.Generator().manual_seed(seed)
        self.d_out = 0

    def run(self) -> None:
        self.shapes()
        self.repeatable()
        self.rows()
        self.batch()
        self.linear()
        self.affine()
        self.bias_by_the_adjoint()
        self.adjoint()
        self.transpose()

    def draw(self, *rows: int, out: bool = False) -> Tensor:
        """Random vectors at the map's input or output."""
        shape = (*rows, *self.like.shape[:2], self.d_out if out else self.like.shape[2])
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.like)

    def require(self, holds: bool, message: str) -> None:
        require(holds, f"{self.name}: {message}")

    def same(self, mine: Tensor, theirs: Tensor, what: str) -> None:
        same(mine, theirs, self.tolerance, f"{self.name}: {what}")

    def shapes(self) -> None:
        x = self.draw(3)
        kept = x.clone()
        y = self.m.push(x)
        self.require(torch.equal(x, kept), "push writes to its input.")
        self.require(y.shape[:-1] == x.shape[:-1], f"push maps {list(x.shape)} to {list(y.shape)}; only d may change.")
        self.require(y.dtype == x.dtype, f"push turns {x.dtype} into {y.dtype}.")
        self.require(bool(torch.isfinite(y).all()), "push gives values that are not finite.")
        self.d_out = y.shape[-1]
        g = self.draw(3, out=True)
        kept = g.clone()
        back = self.m.pull(g)
        self.require(torch.equal(g, kept), "pull writes to its input.")
        self.require(back.shape == x.shape, f"pull maps {list(g.shape)} to {list(back.shape)}, not {list(x.shape)}.")
        self.require(back.dtype == g.dtype, f"pull turns {g.dtype} into {back.dtype}.")
        whole = self.m(x)
        self.require(whole.dtype == x.dtype and whole.shape == y.shape, "m(x) has another dtype or shape than push.")

    def repeatable(self) -> None:
        x, g = self.draw(), self.draw(out=True)
        self.require(torch.equal(self.m.push(x), self.m.push(x)), "push gives another result the second time.")
        self.require(torch.equal(self.m.pull(g), self.m.pull(g)), "pull gives another result the second time.")

    def rows(self) -> None:
        """Any number of row axes, cut in any way."""
        for direction, out in ((self.m.push, False), (self.m.pull, True)):
            many = self.draw(2, 3, out=out)
            many[1] *= 100  # rows of different size: whatever mixes them shows
            together = direction(many)
            where = f"{direction.__name__} mixes its rows"
            for i in range(2):
                for j in range(3):
                    self.same(together[i, j], direction(many[i, j]), where)
            flat = many.flatten(0, 1)
            chunked = torch.cat([direction(flat[:1]), direction(flat[1:5]), direction(flat[5:])])
            for row, expected in zip(together.flatten(0, 1), chunked, strict=True):
                self.same(row, expected, where)

    def batch(self) -> None:
        """What one prompt's vectors are does not matter to another prompt."""
        for direction, out in ((self.m.push, False), (self.m.pull, True)):
            one = self.draw(out=out)
            for prompt in range(one.shape[0]):
                other = torch.zeros_like(one)
                other[prompt] = one[prompt]
                self.same(direction(other)[prompt], direction(one)[prompt], f"{direction.__name__} mixes prompts")

    def linear(self) -> None:
        for direction, out in ((self.m.push, False), (self.m.pull, True)):
            x, y = self.draw(out=out), self.draw(out=out)
            combined = direction(2 * x - 3 * y)
            self.same(combined, 2 * direction(x) - 3 * direction(y), f"{direction.__name__} is not linear")
            nothing = direction(torch.zeros_like(x))
            self.require(not bool(nothing.any()), f"{direction.__name__} of zero is not zero: it adds a bias.")

    def affine(self) -> None:
        x = self.draw(2)
        bias = self.m.bias.to(x)
        self.same(self.m(x), self.m.push(x) + bias, "m(x) is not push(x) + bias")
        alone = self.m(torch.zeros_like(x))
        self.same(alone, bias.expand_as(alone), "m(0) is not the bias")

    def bias_by_the_adjoint(self) -> None:
        g = self.draw(4, out=True)
        pulled, share = self.m.pull_with_bias(g)
        self.same(pulled, self.m.pull(g), "pull_with_bias pulls otherwise than pull")
        weighted = (g * self.m.bias.to(g)).expand_as(g)
        size = weighted.abs().sum((-2, -1)).clamp_min(torch.finfo(g.dtype).tiny)
        off = float(((share - weighted.sum((-2, -1))).abs() / size).max())
        self.require(off <= self.tolerance, f"pull_with_bias misses ⟨g, bias⟩ (by {off:.1e}).")

    def adjoint(self) -> None:
        for rows in ((), (3, 2)):
            x, g = self.draw(*rows), self.draw(*rows, out=True)
            forward, backward = self.m.push(x) * g, x * self.m.pull(g)
            size = forward.abs().sum((-3, -2, -1)).clamp_min(torch.finfo(x.dtype).tiny)
            off = float(((forward.sum((-3, -2, -1)) - backward.sum((-3, -2, -1))).abs() / size).max())
            self.require(off <= self.tolerance, f"pull is not the adjoint of push (dot test off by {off:.1e}).")

    def transpose(self) -> None:
        x, g = self.draw(2), self.draw(2, out=True)
        self.same(self.m.T.push(g), self.m.pull(g), "T.push is not pull")
        self.same(self.m.T.pull(x), self.m.push(x), "T.pull is not push")
        self.require(not bool(self.m.T.bias.any()), "the transpose has a bias.")
