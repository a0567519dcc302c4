"""What two runs of a module are paired by: their operations in their order, and the weights that differ.

The run that goes first notes what its operations are given. The other one finds it there, operation by operation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tensorlens_tl.algebra.secants import MatrixChange
from tensorlens_tl.core.rules import Operation, Rule, calling_module, secant, stands
from tensorlens_tl.errors import UnsupportedModelError

Noted = TypeVar("Noted")


@dataclass
class Pairing:
    """One of two runs of a module, whose operations are paired with those of the other by their order.

    Attributes:
        names: of the weights, by the identity of their tensors; empty where both runs have the same.
        first: what the run that went first noted; None of that run itself.
        values: what operations were given that are not linear.
        held: what was held beside live values, and the live values.
        choices: integers and booleans beside live values, and what was chosen by them.
        constants: what other weights add.
    """

    names: Mapping[int, str]
    first: "Pairing | None" = None
    values: list[Tensor] = field(default_factory=list[Tensor])
    held: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list[tuple[list[Tensor], list[Tensor]]])
    choices: list[Tensor] = field(default_factory=list[Tensor])
    constants: list["Constant"] = field(default_factory=list["Constant"])
    _copies: dict[int, list[Callable[[], None]]] = field(default_factory=dict[int, list[Callable[[], None]]])

    def __post_init__(self) -> None:
        if self.first is not None:
            self._left = (iter(self.first.values), iter(self.first.held), iter(self.first.choices))

    @property
    def rule(self) -> Rule:
        """Of the run that goes first no gradient is needed; the other one has secants."""
        return _noting(self.pair) if self.first is None else secant(self.pair, lambda mean: mean)

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A value of this run and of the other; of the run that goes first twice the same."""
        x = x.detach()
        if self.first is None:
            self._note(self.values, x)
            return x, x
        other = _next(self._left[0])
        if other.shape != x.shape:
            raise other_way()
        return x, other

    def beside(self, held: list[Tensor], live: list[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """What the other run held in place of this, and its live values; None where it held the same."""
        if self.first is None:
            self.held.append(([], []))
            for noted, tensors in zip(self.held[-1], (held, live), strict=True):
                for x in tensors:
                    self._note(noted, x.detach())
            return None
        other = _next(self._left[1])
        mine = (held, live)
        if [[x.shape for x in part] for part in mine] != [[x.shape for x in part] for part in other]:
            raise other_way()
        return None if all(map(torch.equal, held, other[0])) else other

    def choose(self, choices: Sequence[Tensor]) -> None:
        """Refuse other choices, or other rows, than in the run that went first."""
        if self.first is None:
            self.choices += choices
        elif not all(torch.equal(choice, _next(self._left[2])) for choice in choices):
            raise other_way()

    def finish(self) -> None:
        """Refuse to end before the run that went first did."""
        if any(True for noted in self._left for _ in noted):
            raise other_way()

    def before_change(self, x: Tensor) -> None:
        """Copy what was noted of a tensor before it is changed in place."""
        for copy in self._copies.pop(x.untyped_storage().data_ptr(), ()):
            copy()

    def _note(self, noted: list[Tensor], x: Tensor) -> None:
        place = len(noted)
        noted.append(x)

        def copy() -> None:
            noted[place] = noted[place].clone()

        self._copies.setdefault(x.untyped_storage().data_ptr(), []).append(copy)

    def may_differ(self, x: Tensor) -> bool:
        """Whether a held value may be another in the other run: of one model, the weights are the same."""
        return bool(self.names) or not (isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter))

    def name_of(self, x: Tensor) -> str:
        """The weight that a tensor is, or is computed from."""
        return getattr(x, NAME, "") or self.names.get(id(x), "") or self.names.get(id(x._base), "")

    def named(self, out: Any, given: Sequence[Tensor]) -> Any:
        """What is computed from weights alone, with the name of the first of them."""
        name = next(filter(None, map(self.name_of, given)), "") if self.names else ""
        if name and isinstance(out, Tensor) and not self.name_of(out):
            setattr(out, NAME, name)
        return out


NAME = "_tensorlens_weight"
"""The attribute of what is computed from weights alone that says of which."""


def _next(noted: Iterator[Noted]) -> Noted:
    for value in noted:
        return value
    raise other_way()


def other_way() -> UnsupportedModelError:
    """The error where operations have no partner."""
    return UnsupportedModelError("the two runs take different ways through a module. Ask about each run by itself.")


def _noting(pair: Callable[[Tensor], Any]) -> Rule:
    """The rule of the run that goes first: it notes what `secant` asks for, in the same order."""

    def product(f: Operation, x: Tensor, y: Tensor) -> Tensor:
        pair(y)
        pair(x)
        return stands(f(x.detach(), y.detach()), x)

    def function(f: Operation, z: Tensor) -> Tensor:
        out = f(z.detach())
        pair(z)
        pair(out)
        return stands(out, z)

    def softmax(f: Operation, scores: Tensor, dim: int) -> Tensor:
        pair(scores)
        return stands(f(scores.detach(), dim), scores)

    def mean(x: Tensor) -> Tensor:
        return pair(x)[0]

    return Rule(product, product, function, function, function, softmax, mean, runs=2)


@dataclass(frozen=True, eq=False)
class Constant:
    """What another weight adds to what an operation gives.

    Attributes:
        name: of the weight.
        leaf: zero, where it is added in the first run.
        added: what it adds, of the same shape.
        change: of a matrix that changed, what that is the product of.
        before: what it is added to, in the first run's graph.
    """

    name: str
    leaf: Tensor
    added: Tensor
    change: MatrixChange | None
    before: Tensor


# ------------------------------------------------------------------ operations beside other weights


def beside_other_weights(
    pairing: Pairing,
    operation: Callable[..., Tensor],
    of_means: Callable[[Callable[[Tensor], Tensor]], Tensor],
    held: list[Tensor],
    live: list[Tensor],
    other: tuple[list[Tensor], list[Tensor]],
) -> Tensor:
    """An operation that is linear in weights, with the mean of both runs' weights, and constants for what differs.

    Args:
        pairing: of the first run.
        operation: from a function that says which tensor stands for which, to what the operation gives.
        of_means: the same with gradients, by the rule.
        held, live: what it is given.
        other: the same of the other run.
    """
    theirs = dict(zip(map(id, (*held, *live)), (*other[0], *other[1]), strict=True))
    mine = {id(x): x.detach() for x in (*held, *live)}
    means = {id(x): (x.detach() + theirs[id(x)]) / 2 for x in held}

    def change_by(*apart: Tensor) -> Tensor:
        """What the output of both runs differs by if of the weights only these are each run's."""
        shared = {key: mean for key, mean in means.items() if key not in map(id, apart)}
        first, second = (of | shared for of in (mine, theirs))
        return operation(lambda x: first.get(id(x), x)) - operation(lambda x: second.get(id(x), x))

    explained = change_by()
    differing = [x for x in held if not torch.equal(mine[id(x)], theirs[id(x)])]
    added = [change_by(x) - explained for x in differing]
    added[-1] = added[-1] + (change_by(*held) - explained - sum(added[1:], start=added[0]))
    linear = of_means(lambda x: means.get(id(x), x))
    leaf = torch.zeros_like(linear.detach()).requires_grad_()
    read = (mine[id(live[0])] + theirs[id(live[0])]) / 2
    for x, value in zip(differing, added, strict=True):
        change = _matrix_change(read, mine[id(x)], theirs[id(x)], value)
        name = pairing.name_of(x) or calling_module()
        pairing.constants.append(Constant(name, leaf, value, change, linear))
    return stands(operation(lambda x: mine.get(id(x), x)), linear + leaf)


def _matrix_change(read: Tensor, a: Tensor, b: Tensor, added: Tensor) -> MatrixChange | None:
    """The factors of what a matrix adds, where it is one of a linear layer."""
    if a.ndim != 2 or read.ndim != 3 or a.shape != (added.shape[-1], read.shape[-1]):
        return None
    return MatrixChange(read, a.mT, b.mT)
