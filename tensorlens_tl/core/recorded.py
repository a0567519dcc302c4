"""Parts of a run under a rule as affine maps, represented by their autograd graphs."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import ZERO, MixingMap, note_bias
from tensorlens_tl.algebra.memory import joined
from tensorlens_tl.algebra.positions import BiasTerms, Positions, Where, shared, widened
from tensorlens_tl.hooks import FwdHook, in_this_thread

ROW_BYTES = 64 * 2**20
"""Estimated maximal bytes of the rows that go through a graph at once."""

INSIDE = 16
"""The estimated size of a graph, as a multiple of the size of its input and output."""


Side = tuple[int, int]
"""The first position of a stack, and the position after its last."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Recorded(MixingMap):
    """The map from a value in a run to a later value, along the gradients that a rule defines.

    Vectors are `[*rows, batch, pos, d]`, whatever shape the model's values have; heads are concatenated.

    Attributes:
        given: the input: the start of the run, or an earlier value.
        output: the later value.
        shape: the number of prompts and positions.
        across: whether an output position may depend on other input positions.
        offset: the bias, ``output − push(given)`` unless it is counted elsewhere.
        cut: the positions that the map is restricted to.
        sides: the ranges of input and output positions in a pair of stacks; None if both have all positions.

    >>> from tensorlens_tl.core import Linearised, RELP
    >>> z = torch.tensor([[[2.0]]], requires_grad=True)
    >>> with Linearised(RELP):
    ...     phi = Recorded(z, torch.nn.functional.silu(z) * 3, (1, 1))
    >>> torch.equal(phi(z.detach()), phi.output.detach()), torch.equal(phi.pull(z.detach()), phi.push(z.detach()))
    (True, True)
    """

    given: Tensor
    output: Tensor
    shape: tuple[int, int]
    across: bool = True
    offset: Float[Tensor, "batch pos d_out"] | None = None
    cut: slice = field(default_factory=lambda: slice(None))
    sides: tuple[Side, Side] | None = None
    apart: dict[int, int] = field(default_factory=dict[int, int])
    """Cached results of `_read_apart`, by the number of groups."""

    def __repr__(self) -> str:
        return f"Recorded({list(self.given.shape)} → {list(self.output.shape)})"

    @property
    def positions(self) -> int | None:
        """The number of positions in the run."""
        return self.shape[1]

    @property
    def mixes(self) -> bool:
        """See `across`."""
        return self.across

    @property
    def bias(self) -> Tensor:
        """The offset."""
        return ZERO if self.offset is None else self.offset[..., self.cut, :]

    def at(self, where: Where) -> "Recorded":
        """Restrict the map to contiguous positions."""
        where = shared(where)
        assert isinstance(where, slice)
        return replace(self, cut=slice(*where.indices(self.shape[1])))

    def norm_bound(self) -> float:
        """The Frobenius norm, from one pull for each number of the output."""
        rows = torch.eye(self.output.numel(), dtype=self.output.dtype, device=self.output.device)
        return float(gradients(self.output, self.given, rows.reshape(-1, *self.output.shape)).norm())

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        return self._vectors(self.pulled_to(self.given, g), 0, g)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        batch, length = self.shape
        x = x.expand(*x.shape[:-3], batch, len(range(*self.cut.indices(length))), -1)
        pushed = self._vectors(self.pushed_from(self.given, self._at_end(x, 0)), 1, x)
        return pushed if self.offset is None or not affine else pushed + self.bias

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        return self._pull_among(g, here, destination, reach, biases)  # a graph is not cut to one position per row

    def pull_groups(
        self, g: Float[Tensor, "*rows batch pos group channel"], chosen: Sequence[int]
    ) -> Float[Tensor, "some *rows batch pos d_in"]:
        """Pull vectors at equal groups of output channels, such as heads, separately for some of the groups.

        Groups that read different channels go through the graph together, as queries do; groups that share input
        channels, as heads that share a key, go one after the other.
        """
        apart = self._read_apart(g.shape[-2])
        shared = g.shape[-2] // apart
        places = sorted({group % shared for group in chosen})
        alone = torch.zeros(len(places), *g.shape).to(g).unflatten(-2, (apart, shared))
        for row, at in zip(alone, places, strict=True):
            row[..., at, :] = g[..., at::shared, :]
        pulled = self.pull(alone.flatten(-3)).unflatten(-1, (apart, -1))
        each = torch.zeros(len(chosen), *pulled.shape[1:]).to(pulled)
        for row, group in zip(each, chosen, strict=True):
            row[..., group // shared, :] = pulled[places.index(group % shared)][..., group // shared, :]
        return each.flatten(-2)

    def _read_apart(self, groups: int) -> int:
        """The number of equal groups of input channels such that every group of output channels reads just one."""
        if groups in self.apart:
            return self.apart[groups]
        given, output = (end.shape[2:].numel() for end in (self.given, self.output))
        count = given * groups // output
        self.apart[groups] = 1
        if count > 1 and given * groups == count * output and groups % count == 0:
            bits = torch.arange(count) >> torch.arange((count - 1).bit_length())[:, None] & 1
            chosen = torch.cat([bits, 1 - bits])[:, None, None, :, None].to(self.output)  # distinguishes any two groups
            random = torch.randn(self.output.shape, generator=torch.Generator().manual_seed(0)).to(self.output)
            rows = random.reshape(*random.shape[:2], count, -1) * chosen
            pulled = gradients(self.output, self.given, rows.reshape(-1, *random.shape))
            others = pulled.reshape(len(rows), *self.given.shape[:2], count, -1) * (1 - chosen)
            if not bool(others.any()):
                self.apart[groups] = count
        return self.apart[groups]

    def pulled_to(self, place: Tensor, g: Float[Tensor, "*rows batch pos d_out"]) -> Float[Tensor, "row ..."]:
        """Pull vectors at the output to any value of the graph, in its own shape."""
        rows = self._at_end(g, 1).to(self.output)
        return joined(gradients(self.output, place, part) for part in rows.split(self._at_once))

    def pushed_from(self, place: Tensor, rows: Float[Tensor, "row ..."]) -> Float[Tensor, "row ..."]:
        """Push rows in the shape of any value of the graph from there to the output."""
        cotangent, pulled = self._pulled if place is self.given else self._pulled_back(place)
        return joined(gradients(pulled, cotangent, part) for part in rows.to(place).split(self._at_once))

    @cached_property
    def _pulled(self) -> tuple[Tensor, Tensor]:
        return self._pulled_back(self.given)

    def _pulled_back(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """A cotangent and its pullback, which is linear in the cotangent; the derivative of the pullback pushes."""
        cotangent = torch.zeros_like(self.output, requires_grad=True)
        with torch.enable_grad():
            return cotangent, gradients(self.output, place, cotangent[None], create_graph=True)[0]

    def _at_end(self, vectors: Float[Tensor, "*rows some d"], end: int) -> Float[Tensor, "row ..."]:
        """Vectors of positions in the shape of one end: given (0) or output (1)."""
        rows = widened(vectors, self.cut.start or 0, self.shape[1])
        if self.sides is not None:
            rows = rows[..., slice(*self.sides[end]), :]
        return rows.reshape(-1, *(self.given, self.output)[end].shape)

    def _vectors(self, rows: Float[Tensor, "row ..."], end: int, like: Tensor) -> Float[Tensor, "*rows some d"]:
        """Values at one end as vectors of positions."""
        start, stop = (0, self.shape[1]) if self.sides is None else self.sides[end]
        vectors = rows.reshape(*like.shape[:-2], stop - start, -1)
        return widened(vectors, start, self.shape[1])[..., self.cut, :].to(like)

    @property
    def _at_once(self) -> int:
        ends = (self.given.numel() + self.output.numel()) * self.output.element_size()
        return max(1, ROW_BYTES // (INSIDE * ends))


@dataclass(eq=False)
class Cuts:
    """Cuts in a run: the values that arrive at each, and the leaves from which the next part of the run starts."""

    arrived: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    leaves: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def at(self, name: str, instead: Tensor | None = None) -> FwdHook:
        """Return a hook that ends one part of the run and starts the next, with another value if one is given."""

        def cut(live: Tensor, *, hook: Any) -> Tensor:
            self.arrived[name] = live
            self.leaves[name] = (live if instead is None else instead.to(live)).detach().clone().requires_grad_()
            return self.leaves[name]

        return name, in_this_thread(cut)


def depends(output: Tensor, given: Tensor) -> bool:
    """Return whether a gradient of the output reaches an input."""
    if not output.requires_grad:
        return False
    nothing = torch.zeros_like(output)
    return torch.autograd.grad(output, given, nothing, retain_graph=True, allow_unused=True)[0] is not None


def gradients(
    output: Tensor, given: Tensor, rows: Float[Tensor, "row ..."], *, create_graph: bool = False
) -> Float[Tensor, "row ..."]:
    """Return the gradients of ⟨row, output⟩ with respect to an input, one per row; zeros if nothing depends on it."""
    if not output.requires_grad:
        return given.new_zeros(len(rows), *given.shape)
    options: Any = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    if len(rows) == 1:  # without vmap, which some operations do not support
        of_row = torch.autograd.grad(output, given, rows[0], **options)[0]
        pulled = None if of_row is None else of_row[None]
    else:
        pulled = torch.autograd.grad(output, given, rows, is_grads_batched=True, **options)[0]
    # torch would give one row of zeros for all
    return given.new_zeros(len(rows), *given.shape) if pulled is None else pulled


@contextmanager
def recordable() -> Generator[None, None, None]:
    """Let autograd record computations, even in ``inference_mode``; a context manager and decorator."""
    with_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        yield
