"""A value in two runs, and the chain of secants from which its difference follows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, Chain, Sum
from tensorlens_tl.algebra.numerics import plus, times, upcast
from tensorlens_tl.algebra.primitives import Diagonal, Linear, Norm
from tensorlens_tl.algebra.secants.maps import Offset, RankOne
from tensorlens_tl.algebra.secants.numbers import slope
from tensorlens_tl.algebra.secants.parts import (
    gain_secant,
    linear_secant,
    norm_secant,
    same,
    scale_response,
    shift_secant,
)


@dataclass(frozen=True, eq=False)
class Change:
    """A value in two runs, and the stages that map the difference of a part's inputs to the value's difference.

    A part begins with ``Change(x_a, x_b)``, its input; each rule updates both the values and the stages.

    Attributes:
        a, b: the value in either run.
        stages: the stages of the map whose output is ``a − b``.

    >>> from tensorlens_tl.algebra import Linear
    >>> from tensorlens_tl.algebra.secants import Change
    >>> x = Change(torch.ones(1, 1, 2), torch.zeros(1, 1, 2))
    >>> double = Linear(2 * torch.eye(2))
    >>> square = x.linear(double, double, "W").times(x)
    >>> square.a - square.b, square.map(x.a - x.b)
    (tensor([[[2., 2.]]]), tensor([[[2., 2.]]]))
    """

    a: Float[Tensor, "batch pos d"]
    b: Float[Tensor, "batch pos d"]
    stages: tuple[AffineMap, ...] = ()

    @property
    def map(self) -> Chain:
        """The secant."""
        return Chain(self.stages)

    @property
    def mean(self) -> Float[Tensor, "batch pos d"]:
        """The mean of the two runs."""
        return (self.a + self.b) / 2

    def linear(self, a: Linear, b: Linear, name: str, values: tuple[Tensor, Tensor] | None = None) -> "Change":
        """Apply a matrix of either run, adding one stage; see `linear_secant`.

        Args:
            a, b: the layer in either run.
            name: the name of the matrix.
            values: the outputs in either run if they are known; None computes them.
        """
        secant = linear_secant(a, b, self.a, self.b, name)
        stage = secant[0] if len(secant) == 1 else Chain(secant)
        out_a, out_b = values or (a(self.a), b(self.b))
        return Change(out_a, out_b, (*self.stages, stage))

    def written(self, a: Linear, b: Linear, name: str) -> Chain:
        """Return the secant up to the outputs of a matrix, without computing these; see `linear`."""
        return Chain((*self.stages, Chain(linear_secant(a, b, self.a, self.b, name))))

    def elementwise(
        self,
        phi: Callable[[Tensor], Tensor],
        derivative: Callable[[Tensor], Tensor],
        values: tuple[Tensor, Tensor] | None = None,
    ) -> "Change":
        """Apply an elementwise function; its `values` in either run are computed unless given; see `slope`."""
        phi_a, phi_b = values or (phi(self.a), phi(self.b))
        slopes = Diagonal(slope(derivative, (self.a, self.b), (phi_a, phi_b)))
        return Change(phi_a, phi_b, (*self.stages, slopes))

    def times(self, other: "Change") -> "Change":
        """Multiply by another value with the same input: Δ(uv) = Δu·v̄ + ū·Δv.

        Each channel of the narrower value multiplies the same number of adjacent channels of the wider one.
        """
        factor = other.repeated(self.a.shape[-1] // other.a.shape[-1])
        by_self = Chain((*self.stages, Diagonal(factor.mean)))
        by_factor = Chain((*factor.stages, Diagonal(self.mean)))
        return Change(self.a * factor.a, self.b * factor.b, (Sum((by_self, by_factor)),))

    def repeated(self, each: int, size: int = 1) -> "Change":
        """Repeat every group of `size` adjacent channels `each` times."""
        if each == 1:
            return self
        width = self.a.shape[-1]
        groups = torch.eye(width).to(self.a).unflatten(-1, (-1, size))
        repeat = Linear(groups.repeat_interleave(each, dim=-2).flatten(-2))
        return self.linear(repeat, repeat, "")

    def multiplied(self, factor: Float[Tensor, "#batch #pos #d"] | None) -> "Change":
        """Multiply by numbers that are the same in both runs; None for 1."""
        if factor is None:
            return self
        return Change(self.a * factor, self.b * factor, (*self.stages, Diagonal(factor.to(self.a))))

    def weighted(self, a: Float[Tensor, "#batch #pos #d"], b: Float[Tensor, "#batch #pos #d"], name: str) -> "Change":
        """Multiply by given numbers of each run, Δ(wx) = w̄·Δx + x̄·Δw; the second term is a named offset."""
        if same(a, b):
            return self.multiplied(a)
        held = Diagonal(((a + b) / 2).to(self.a))
        return Change(self.a * a, self.b * b, (*self.stages, held, Offset(self.mean * (a - b), name)))

    def plus(self, a: Float[Tensor, "d"], b: Float[Tensor, "d"], name: str) -> "Change":
        """Add a vector of each run; their difference, if any, is a named offset."""
        return Change(plus(self.a, a), plus(self.b, b), (*self.stages, *shift_secant(a, b, name)))

    def over(
        self,
        a: Float[Tensor, "batch pos group"],
        b: Float[Tensor, "batch pos group"],
        gains: tuple[Tensor | None, Tensor | None] = (None, None),
        name: str = "",
        groups: int = 1,
        first: int | None = None,
    ) -> "Change":
        """Divide by the scale of either run's RMSNorm, and multiply by the norm's gain.

        Args:
            a, b: the scales, one for each group of channels.
            gains: of every channel; None for 1.
            name: the name of the norm, for the offset if its gains differ.
            groups: the number of groups of channels with separate scales.
            first: the number of leading channels to divide; None for all.
        """
        width = self.a.shape[-1]
        first = width if first is None else first
        filled = partial(torch.nn.functional.pad, pad=(0, width - first))
        inverse_a = filled((1 / a).repeat_interleave(first // groups, dim=-1), value=1.0)
        inverse_b = filled((1 / b).repeat_interleave(first // groups, dim=-1), value=1.0)
        held = Diagonal(((inverse_a + inverse_b) / 2).to(self.a))
        responds = scale_response(upcast(self.a[..., :first]), upcast(self.b[..., :first]), a, b, groups)
        if first < width:
            responds = RankOne(filled(responds.read), filled(responds.write))
        normed_a = self.a * inverse_a.to(self.a)
        normed_b = self.b * inverse_b.to(self.b)
        gained = gain_secant(*gains, (normed_a + normed_b) / 2, name)
        stages = (*self.stages, Sum((held, responds)), *gained)
        return Change(times(normed_a, gains[0]), times(normed_b, gains[1]), stages)

    def normed(self, a: Norm, b: Norm, name: str) -> "Change":
        """Apply a norm of either run with that run's scale; see `norm_secant`."""
        secant = norm_secant(a, b, self.a, self.b, name)
        return Change(a(self.a), b(self.b), (*self.stages, *secant.stages))
