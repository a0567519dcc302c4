"""A module in two runs: the exact linear map from the difference of its inputs to the difference of its outputs.

The second run goes first and records the inputs of its operations. Then the first run is recorded as a graph, in which
each operation has the secant between its own values and those of the second (`rules.secant`) as its gradient. This does
not depend on what the module computes. For runs of two models, the effects of differing weights are named constants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import ZERO, note_bias
from tensorlens_tl.algebra.positions import Where
from tensorlens_tl.algebra.secants import Offset, WithConstants
from tensorlens_tl.core.linearise import in_pairs, refuse_other_functions
from tensorlens_tl.core.pairing import Constant, Pairing
from tensorlens_tl.core.recorded import Recorded, gradients, recordable

Given = TypeVar("Given")
Numbers = Callable[[Tensor], Tensor]
"""A module as a function of its input."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Paired(WithConstants):
    """The map from the difference of a module's inputs in two runs to the difference of its outputs.

    Attributes:
        linear: the linear part, along the secants.
        constants: the effects of differing weights.

    >>> from tensorlens_tl.core import paired
    >>> a, b = torch.tensor([[[3.0]]]), torch.tensor([[[1.0]]])
    >>> module = torch.nn.Identity()
    >>> square = paired(lambda x: x * x, lambda x: x * x, (module, module), a, b)
    >>> square(a - b)
    tensor([[[8.]]])
    """

    linear: Recorded
    constants: tuple[Constant, ...] = ()

    def __repr__(self) -> str:
        return f"Paired({list(self.linear.given.shape)} → {list(self.linear.output.shape)})"

    @property
    def positions(self) -> int | None:
        """The number of positions in the runs."""
        return self.linear.positions

    @property
    def bias(self) -> Tensor:
        """The total effect of differing weights."""
        return sum((self._pushed(constant) for constant in self.constants), start=ZERO)

    def at(self, where: Where) -> "Paired":
        """Restrict the map to contiguous positions."""
        return replace(self, linear=self.linear.at(where))

    def norm_bound(self) -> float:
        """The bound for the linear part."""
        return self.linear.norm_bound()

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        pushed = self.linear._forward(x, affine)
        return pushed + self.bias.to(pushed) if affine and self.constants else pushed

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        if biases is not None and self.constants:
            note_bias(g, self.bias.to(g), biases)
        return self.linear._backward(g, biases)

    def pull_groups(
        self, g: Float[Tensor, "*rows batch pos group channel"], chosen: Sequence[int]
    ) -> Float[Tensor, "some *rows batch pos d_in"]:
        """See `Recorded.pull_groups`."""
        return self.linear.pull_groups(g, chosen)

    def noted(self, g: Float[Tensor, "*rows batch pos d"]) -> list[tuple[Offset, Tensor]]:
        """Return each weight's effect with a vector at the output pulled to it, the last first; see `pull_noting`."""
        noted: list[tuple[Offset, Tensor]] = []
        for constant in reversed(self.constants):
            place = self._place(constant)
            pulled = self._by_position(self.linear.pulled_to(constant.leaf, g), place)
            vectors = self._by_position(constant.added[None], place)[0]
            offset = Offset(vectors, constant.name, constant.change)
            noted.append((offset, pulled.reshape(*g.shape[:-1], -1)))
        return noted

    def _pushed(self, constant: Constant) -> Float[Tensor, "batch pos d"]:
        """The effect of a constant on the output."""
        pushed = self.linear.pushed_from(constant.leaf, constant.added[None])
        return pushed.reshape(*self.linear.shape, -1)[..., self.linear.cut, :]

    def _by_position(self, rows: Float[Tensor, "row ..."], place: "_Axis") -> Float[Tensor, "row batch pos d"]:
        """The numbers of a value inside the module, as vectors of positions."""
        batch, length = self.linear.shape
        rows = rows.unflatten(1, (batch, -1))
        if place.dim is None:
            rows = torch.nn.functional.pad(rows.flatten(2)[:, :, None], (0, 0, place.at, length - 1 - place.at))
        else:
            rows = rows.movedim(place.dim + 1, 2)
            if rows.shape[2] > length and rows.shape[2] % length == 0:  # one row holds all heads of a position
                rows = rows.unflatten(2, (length, -1))
        return rows[:, :, :length][:, :, self.linear.cut].flatten(3)

    def _place(self, constant: Constant) -> "_Axis":
        """Where positions are in a value inside the module.

        If several dimensions have the length of the positions, it is the one whose first index only the first position
        of a causal module reaches, and whose last index only the last. A value without one is at the last position that
        reaches it.
        """
        batch, length = self.linear.shape
        sizes = constant.leaf.unflatten(0, (batch, -1)).shape
        dims = [dim for dim in range(1, len(sizes)) if sizes[dim] >= length]
        alike = [dim for dim in dims if sizes[dim] == length]
        if len(alike) == 1 and len(sizes) > 3:
            return _Axis(alike[0])

        def reaching(dim: int, index: int) -> list[bool]:
            chosen = torch.zeros_like(constant.leaf)
            chosen.unflatten(0, (batch, -1)).select(dim, index).fill_(1.0)
            return self._reaching(constant.before, chosen)

        for dim in sorted(dims, key=lambda dim: sizes[dim] != length):
            each = sizes[dim] // length if sizes[dim] % length == 0 else 1
            if not any(reaching(dim, 0)[1:]) and reaching(dim, each * (length - 1))[-1]:
                return _Axis(dim)
        everywhere = self._reaching(constant.before, torch.ones_like(constant.leaf))
        return _Axis(None, max((position for position, reaches in enumerate(everywhere) if reaches), default=0))

    def _reaching(self, value: Tensor, weights: Tensor) -> list[bool]:
        """Whether each input position reaches a weighted sum of some value inside the module."""
        given = gradients(value, self.linear.given, weights[None])[0]
        return given.flatten(2).any(-1).any(0).tolist()


class _Axis(NamedTuple):
    """Where positions are in a value inside a module whose first dimension is the prompts.

    Attributes:
        dim: the dimension of positions; None if the whole value is at one position.
        at: that position.
    """

    dim: int | None
    at: int = 0


def paired(
    first: Numbers, second: Numbers, modules: tuple[nn.Module, nn.Module], a: Tensor, b: Tensor, name: str = ""
) -> Paired:
    """Return the difference of a module's outputs in two runs as a linear map of the difference of its inputs.

    Args:
        first, second: the module in either run, as a function of its input, `[batch, pos, d]`.
        modules: the modules that these call: one, or those of two models.
        a, b: the input in either run.
        name: the prefix for the names of its weights.

    Raises:
        UnsupportedModelError: the two runs take different paths, or no rule covers an operation.
    """
    with torch.inference_mode(False):
        given, other = (x.detach().clone().requires_grad_() for x in (a, b))
    output, constants = in_two_runs(lambda: first(given), lambda: second(other), modules, name)
    refuse_other_functions([output])
    return Paired(Recorded(given, output, (a.shape[0], a.shape[1])), constants)


def in_two_runs(
    first: Callable[[], Given], second: Callable[[], Any], modules: tuple[nn.Module, nn.Module], name: str = ""
) -> tuple[Given, tuple[Constant, ...]]:
    """Return the first run's result, with the gradients of its difference from the second, and the constants.

    Args:
        first, second: the runs, whose inputs require gradients.
        modules: the modules that these call: one, or those of two models.
        name: the prefix for the names of its weights.

    Raises:
        UnsupportedModelError: as in `paired`.
    """
    weights = {} if modules[0] is modules[1] else [dict(module.named_parameters()) for module in modules]
    names = [{id(weight): readable(f"{name}.{key}") for key, weight in of.items()} for of in weights] or [{}, {}]

    def label(module: str) -> str:
        return f"{name}.{module}.routing".strip(".")

    with recordable(), torch.enable_grad(), in_pairs(modules) as run:
        noted = Pairing(names[1], label)
        run.under(noted, second)
        mine = Pairing(names[0], label, noted)
        output = run.under(mine, first)
        mine.finish()
    return output, tuple(mine.constants)


def readable(name: str) -> str:
    """Return a weight's name without a Bridge's wrappers."""
    return name.replace("._original_component", "").strip(".")
