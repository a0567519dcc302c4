"""The conformance battery of maps: what any `AffineMap`, ours or yours, must hold.

>>> import torch
>>> from tensorlens_tl.algebra import Linear
>>> from tensorlens_tl.testing import check_map
>>> check_map(Linear(torch.randn(8, 5)), torch.randn(2, 3, 8))
"""

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, RowPositions
from tensorlens_tl.algebra.bias_spreading import Spread, source_vectors, walk
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.testing.requirements import EXACT, Check, checks_of, require, same

if TYPE_CHECKING:
    Map = AffineMap | FrozenOperator
    Vectors = Float[Tensor, "batch pos d_in"] | None
else:
    Map = Vectors = Any  # `map_checks` says what is wrong with them

TOLERANCE = {torch.float64: EXACT, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_map(map: Map, x: Vectors = None, *, tolerance: float | None = None, seed: int = 0) -> None:
    """Put a map through everything the library relies on: all of `MAP_CHECKS`.

    Shapes, dtype and unchanged inputs; repeatable results; independent rows, so that any chunking gives the same, and
    prompts; linearity of `push` and `pull`; ``m(x) = push(x) + bias``; the bias by the adjoint; the dot test
    ⟨A·x, g⟩ = ⟨x, Aᵀ·g⟩; the transpose; which positions it mixes, the map cut to some of them, and pulls between single
    positions; the bound of its norm; and the walk that spreads its biases.

    Args:
        map: an `AffineMap`, or a `FrozenOperator` (then leave `x` out).
        x: vectors `[batch, pos, d_in]`: random ones of their shape, dtype and device are used instead.
        tolerance: largest relative difference; None takes 1e-9 for float64, 1e-4 for float32.
        seed: of the random vectors.

    Raises:
        InvalidInputError: not a map, or no vectors to try it on.
        ConformanceError: naming what does not hold.
    """
    for check in map_checks(map, x, tolerance=tolerance, seed=seed):
        check()


def map_checks(map: Map, x: Vectors = None, *, tolerance: float | None = None, seed: int = 0) -> list[Check]:
    """The checks of `check_map`, one by one, for `parametrize_with_checks`.

    >>> from tensorlens_tl.testing import map_checks
    >>> [check.name for check in map_checks(frozen.operator())][:3]
    ['shapes', 'repeatable', 'rows']

    Raises:
        InvalidInputError: not a map, or no vectors to try it on.
    """
    if isinstance(map, FrozenOperator):
        if x is None:
            x = map.x
        map = map.map
    if not isinstance(map, AffineMap):
        raise InvalidInputError(f"check_map: {type(map).__name__} is no AffineMap or FrozenOperator.")
    if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point():
        raise InvalidInputError("check_map: x must be vectors the map accepts, a float tensor [batch, pos, d_in].")
    if tolerance is None:
        tolerance = TOLERANCE.get(x.dtype, 1e-4)
    return checks_of(MAP_CHECKS, partial(MapCase, map, x, tolerance, seed))


class MapCase:
    """A map, and the vectors it is tried on."""

    def __init__(self, m: AffineMap, x: Tensor, tolerance: float, seed: int) -> None:
        self.m = m
        self.like = x
        self.tolerance = tolerance
        self.name = type(m).__name__
        self.generator = torch.Generator().manual_seed(seed)

    @cached_property
    def d_out(self) -> int:
        """The width of what the map gives."""
        return self.m.push(self.draw()).shape[-1]

    def draw(self, *rows: int, out: bool = False) -> Tensor:
        """Random vectors at the map's input or output."""
        width = self.d_out if out else self.like.shape[2]
        shape = (*rows, *self.like.shape[:2], width)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.like)

    def require(self, holds: bool, message: str) -> None:
        """Raise unless it holds, naming the map."""
        require(holds, f"{self.name}: {message}")

    def same(self, mine: Tensor, theirs: Tensor, what: str) -> None:
        """Raise unless both agree, naming the map."""
        same(mine, theirs, self.tolerance, f"{self.name}: {what}")

    @cached_property
    def causal(self) -> bool:
        """True if no output position depends on a later input position, as measured."""
        x = self.draw(4)
        y = self.m.push(x)
        for last in range(x.shape[-2] - 1):
            changed = x.clone()
            changed[..., last + 1 :, :] = self.draw(4)[..., last + 1 :, :]
            if not torch.equal(self.m.push(changed)[..., : last + 1, :], y[..., : last + 1, :]):
                return False
        return True


def check_shapes(case: MapCase) -> None:
    """Only the width changes; dtype stays; inputs are left alone."""
    x = case.draw(3)
    before = x.clone()
    y = case.m.push(x)
    case.require(torch.equal(x, before), "push writes to its input.")
    case.require(y.shape[:-1] == x.shape[:-1], f"push maps {list(x.shape)} to {list(y.shape)}; only d may change.")
    case.require(y.dtype == x.dtype, f"push turns {x.dtype} into {y.dtype}.")
    case.require(bool(torch.isfinite(y).all()), "push gives values that are not finite.")
    g = case.draw(3, out=True)
    before = g.clone()
    back = case.m.pull(g)
    case.require(torch.equal(g, before), "pull writes to its input.")
    case.require(back.shape == x.shape, f"pull maps {list(g.shape)} to {list(back.shape)}, not {list(x.shape)}.")
    case.require(back.dtype == g.dtype, f"pull turns {g.dtype} into {back.dtype}.")
    whole = case.m(x)
    case.require(whole.dtype == x.dtype and whole.shape == y.shape, "m(x) has another dtype or shape than push.")


def check_repeatable(case: MapCase) -> None:
    """The same result twice, to the last bit."""
    x = case.draw()
    g = case.draw(out=True)
    case.require(torch.equal(case.m.push(x), case.m.push(x)), "push gives another result the second time.")
    case.require(torch.equal(case.m.pull(g), case.m.pull(g)), "pull gives another result the second time.")


def check_rows(case: MapCase) -> None:
    """Any number of row axes, cut in any way."""
    for direction, out in ((case.m.push, False), (case.m.pull, True)):
        many = case.draw(2, 3, out=out)
        many[1] *= 100  # rows of different size, so that mixing them shows
        together = direction(many)
        where = f"{direction.__name__} mixes its rows"
        for i in range(2):
            for j in range(3):
                case.same(together[i, j], direction(many[i, j]), where)
        flat = many.flatten(0, 1)
        chunked = torch.cat([direction(flat[:1]), direction(flat[1:5]), direction(flat[5:])])
        for row, expected in zip(together.flatten(0, 1), chunked, strict=True):
            case.same(row, expected, where)


def check_batch(case: MapCase) -> None:
    """What one prompt's vectors are does not matter to another prompt."""
    for direction, out in ((case.m.push, False), (case.m.pull, True)):
        one = case.draw(out=out)
        for prompt in range(one.shape[0]):
            other = torch.zeros_like(one)
            other[prompt] = one[prompt]
            case.same(direction(other)[prompt], direction(one)[prompt], f"{direction.__name__} mixes prompts")


def check_linear(case: MapCase) -> None:
    """Push and pull are linear."""
    for direction, out in ((case.m.push, False), (case.m.pull, True)):
        x = case.draw(out=out)
        y = case.draw(out=out)
        combined = direction(2 * x - 3 * y)
        case.same(combined, 2 * direction(x) - 3 * direction(y), f"{direction.__name__} is not linear")
        nothing = direction(torch.zeros_like(x))
        case.require(not bool(nothing.any()), f"{direction.__name__} of zero is not zero: it adds a bias.")


def check_groups(case: MapCase) -> None:
    """What groups of channels give by themselves is what the map makes of these channels alone."""
    x = case.draw(2)
    groups = next((groups for groups in (3, 2) if x.shape[-1] % groups == 0), 1)
    apart = case.m.push_groups(x, groups)
    case.require(len(apart) == groups, f"push_groups gives {len(apart)} groups of {groups}.")
    for number, output in enumerate(apart):
        alone = torch.zeros_like(x).unflatten(-1, (groups, -1))
        alone[..., number, :] = x.unflatten(-1, (groups, -1))[..., number, :]
        case.same(output, case.m.push(alone.flatten(-2)), "push_groups is not push of one group's channels")


def check_affine(case: MapCase) -> None:
    """m(x) is push(x) plus the bias."""
    x = case.draw(2)
    bias = case.m.bias.to(x)
    case.same(case.m(x), case.m.push(x) + bias, "m(x) is not push(x) + bias")
    alone = case.m(torch.zeros_like(x))
    case.same(alone, bias.expand_as(alone), "m(0) is not the bias")


def check_bias_by_the_adjoint(case: MapCase) -> None:
    """⟨g, bias⟩ comes with the pull."""
    g = case.draw(4, out=True)
    pulled, share = case.m.pull_with_bias(g)
    case.same(pulled, case.m.pull(g), "pull_with_bias pulls otherwise than pull")
    weighted = (g * case.m.bias.to(g)).expand_as(g)
    size = weighted.abs().sum((-2, -1)).clamp_min(torch.finfo(g.dtype).tiny)
    off = float(((share - weighted.sum((-2, -1))).abs() / size).max())
    case.require(off <= case.tolerance, f"pull_with_bias misses ⟨g, bias⟩ (by {off:.1e}).")


def check_adjoint(case: MapCase) -> None:
    """The dot test."""
    for rows in ((), (3, 2)):
        x = case.draw(*rows)
        g = case.draw(*rows, out=True)
        forward = case.m.push(x) * g
        backward = x * case.m.pull(g)
        size = forward.abs().sum((-3, -2, -1)).clamp_min(torch.finfo(x.dtype).tiny)
        off = float(((forward.sum((-3, -2, -1)) - backward.sum((-3, -2, -1))).abs() / size).max())
        case.require(off <= case.tolerance, f"pull is not the adjoint of push (dot test off by {off:.1e}).")


def check_transpose(case: MapCase) -> None:
    """The transpose is the adjoint, without a bias."""
    x = case.draw(2)
    g = case.draw(2, out=True)
    case.same(case.m.T.push(g), case.m.pull(g), "T.push is not pull")
    case.same(case.m.T.pull(x), case.m.push(x), "T.pull is not push")
    case.require(not bool(case.m.T.bias.any()), "the transpose has a bias.")


def check_mixes(case: MapCase) -> None:
    """A map that says it treats positions alone does."""
    if case.m.mixes:
        return
    x = case.draw()
    for position in range(x.shape[1]):
        alone = torch.zeros_like(x)
        alone[:, position] = x[:, position]
        expected = torch.zeros_like(case.m.push(x))
        expected[:, position] = case.m.push(x)[:, position]
        case.same(case.m.push(alone), expected, "mixes says False, but a position reaches another")


def check_cut(case: MapCase) -> None:
    """Cut to some positions, the map does there what it does among all."""
    x = case.draw(2)
    pos = case.like.shape[1]
    if case.m.mixes and not case.causal:
        return  # it is never cut
    for start, stop in ((0, pos - 1), (1, pos), (0, 1)):
        if stop <= start:
            continue
        inside = torch.zeros_like(x)
        inside[..., start:stop, :] = x[..., start:stop, :]
        cut = case.m.at(slice(start, stop))
        expected = case.m.push(inside)[..., start:stop, :]
        case.same(cut.push(inside[..., start:stop, :]), expected, "cut to some positions it pushes otherwise")
        if not case.m.mixes:
            affine = cut(x[..., start:stop, :])
            case.same(affine, case.m(x)[..., start:stop, :], "cut to some positions it has another bias")


def check_pull_between(case: MapCase) -> None:
    """Pulls from single positions to all source tokens or some are the whole pull, biases included."""
    batch, pos = case.like.shape[:2]
    rows, prompts = (torch.arange(size, device=case.like.device) for size in (pos, batch))
    queries = (rows[:, None] + prompts) % pos
    vectors = case.draw(pos, out=True)[:, :, 0]
    placed = vectors.new_zeros(pos, batch, pos, vectors.shape[-1])
    placed[rows[:, None], prompts, queries] = vectors
    stretch = slice(pos // 3, max(pos - 1, 1))  # vectors that live at neighbouring positions
    neighbours = torch.zeros_like(case.draw(2, out=True))
    neighbours[:, :, stretch] = case.draw(2, out=True)[:, :, stretch]
    for what, g, at, given in (
        ("", placed, RowPositions(queries), vectors),
        ("a stretch of queries, ", neighbours, stretch, neighbours[:, :, stretch]),
    ):
        whole, share = case.m.pull_with_bias(g)
        for keys in (None, [0], [pos - 1], sorted({0, pos - 1})):
            terms: list[Any] = []
            pulled = case.m.pull_between(given, at, keys, pos, causal=case.causal, biases=terms)
            expected = whole[:, :, slice(None) if keys is None else keys]
            padded = torch.zeros_like(expected)
            padded[:, :, : pulled.shape[2]] = pulled
            case.same(padded, expected, f"pull_between ({what}keys={keys}) is not pull")
            if keys is not None:
                continue  # the map adds biases at these positions only
            total = sum((term.sum(-1) for term, _ in terms), start=torch.zeros_like(share))
            size = share.abs().max().clamp_min(torch.finfo(share.dtype).tiny)
            off = float((total - share).abs().max() / size)
            case.require(off <= max(case.tolerance, 1e-12), f"pull_between misses ⟨g, bias⟩ ({what}by {off:.1e}).")


def check_norm_bound(case: MapCase) -> None:
    """The bound is no smaller than what power iteration finds."""
    x = case.draw().double()
    bound = case.m.norm_bound()
    for _ in range(12):
        x = (x / x.norm()).to(case.like)
        y = case.m.push(x)
        growth = float(y.double().norm())
        case.require(
            growth <= bound * (1 + 10 * max(case.tolerance, 1e-12)),
            f"norm_bound is {bound:.6g}, a vector grows {growth:.6g}.",
        )
        x = case.m.pull(y).double()
        if not bool(x.any()):
            return


def check_bias_walk(case: MapCase) -> None:
    """Source vectors taken through the map, biases spread over them, sum to what the map gives."""
    x = case.draw()
    batch, pos, _ = x.shape
    reach = torch.ones(pos, batch, pos, dtype=torch.bool, device=x.device)
    if case.causal:
        reach = reach & torch.ones(pos, pos, dtype=torch.bool, device=x.device).triu()[:, None]
    spread = Spread("norm", reach, torch.zeros(batch, dtype=torch.long, device=x.device))
    vectors = walk(case.m, source_vectors(x, False), spread, causal=case.causal, width=max(x.shape[-1], case.d_out))
    case.same(vectors.sum(0), case.m(x), "the walk of its biases does not sum to m(x)")


MAP_CHECKS = (
    check_shapes,
    check_repeatable,
    check_rows,
    check_batch,
    check_linear,
    check_groups,
    check_affine,
    check_bias_by_the_adjoint,
    check_adjoint,
    check_transpose,
    check_mixes,
    check_cut,
    check_pull_between,
    check_norm_bound,
    check_bias_walk,
)
"""Everything a map must hold, in an order in which the first to fail says most."""
