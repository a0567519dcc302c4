"""What two runs of a module are paired by: their operations in their order, and the weights that differ.

The run that goes first notes what its operations are given. The other one finds it there, operation by operation.

Modules that choose by live values, such as mixtures of experts, may choose differently in the two runs. Then the runs
have no operations in common, and the smallest module around the choice that gives a stream, as it is given one, is run
with the choice r of either run for both:

    F(x; a) − F(y; b) = ½ Σ_r [F(x; r) − F(y; r)] + what the changed choice adds

F(·; r) is the module with the choice r, and with what that counts: an expert has the mean of its weights, 0 where a
token is not sent. What is added is a constant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens_tl.algebra.secants import MatrixChange
from tensorlens_tl.core.rules import Operation, Rule, calling_module, secant, stands
from tensorlens_tl.errors import UnsupportedModelError

CHOOSES = frozenset(["topk", "sort", "argsort", "argmax", "argmin"])
"""Operations that give numbers of experts, tokens or groups."""


class OtherWayError(UnsupportedModelError):
    """The two runs have different operations, or choose differently."""

    def __init__(self) -> None:
        super().__init__("the two runs take different ways through a module. Ask about each run by itself.")


class Place(NamedTuple):
    """How much of a run was noted: of its values, of what was held, of indices, of choices, and of calls."""

    values: int = 0
    held: int = 0
    indices: int = 0
    choices: int = 0
    calls: int = 0


NOTHING = Place()


@dataclass(eq=False)
class Call:
    """A call of a module that may choose, in the run that goes first.

    Attributes:
        forward, args, kwargs: the call.
        out: what it gave.
        start, end: how much the run had noted before and after it.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any = None
    start: Place = NOTHING
    end: Place = NOTHING

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    @property
    def gives_choices(self) -> bool:
        """Whether it is a router: numbers are among what it gives."""
        return any(_is_index(part) for part in _parts(self.out))

    @property
    def gives_stream(self) -> bool:
        """Whether it is given a stream, and gives one; rows may be flattened."""
        x = next((x for x in self.given if isinstance(x, Tensor)), None)
        y = next(iter(_parts(self.out)), None)
        if x is None or not x.requires_grad or not isinstance(y, Tensor):
            return False
        return y.shape[-1:] == x.shape[-1:] and y.numel() == x.numel()

    def with_held_of(self, other: "Call") -> "Call":
        """The call with what another is given beside live values, which is part of its choice."""
        kwargs = {name: _with_held(arg, other.kwargs[name]) for name, arg in self.kwargs.items()}
        return Call(self.forward, _with_held(self.args, other.args), kwargs)

    def __call__(self) -> Any:
        """Call the module."""
        self.out = self.forward(*self.args, **self.kwargs)
        return self.out


def _with_held(arg: Any, other: Any) -> Any:
    if isinstance(arg, list | tuple):
        return type(arg)(map(_with_held, arg, other))
    if hasattr(arg, "get_seq_length"):  # a cache, which holds nothing of a whole prompt
        return None
    return other if isinstance(arg, Tensor) and not arg.requires_grad else arg


@dataclass
class Pairing:
    """One of two runs of a module, whose operations are paired with those of the other by their order.

    Attributes:
        names: of the weights, by the identity of their tensors; empty where both runs have the same.
        label: the name of what a module chooses, from the module's own.
        first: what the run that went first noted; None of that run itself.
        forced: the choices to make instead of its own; None for these.
        values: what operations were given that are not linear.
        held: what was held beside live values, and the live values.
        indices: integers and booleans beside live values, and which weights are.
        choices: what was chosen by live values.
        calls: of modules that may choose.
        constants: what other weights and changed choices add.
        place: in the second run, how much of the first it has passed.
        routing: the name of what the module that runs chooses.
        chooses: whether that module has chosen already.
    """

    names: Mapping[int, str]
    label: Callable[[str], str]
    first: "Pairing | None" = None
    forced: Sequence[Any] | None = None
    values: list[Tensor] = field(default_factory=list[Tensor])
    held: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list[tuple[list[Tensor], list[Tensor]]])
    indices: list[tuple[list[Tensor], list[tuple[str, Tensor]]]] = field(
        default_factory=list[tuple[list[Tensor], list[tuple[str, Tensor]]]]
    )
    choices: list[Any] = field(default_factory=list[Any])
    calls: list[Call] = field(default_factory=list[Call])
    constants: list["Constant"] = field(default_factory=list["Constant"])
    place: Place = NOTHING
    routing: str = ""
    chooses: bool = False
    _copies: dict[int, list[Callable[[], None]]] = field(default_factory=dict[int, list[Callable[[], None]]])

    @property
    def rule(self) -> Rule:
        """Of the run that goes first no gradient is needed; the other one has secants."""
        return _noting(self.pair) if self.first is None else secant(self.pair)

    @property
    def noted(self) -> Place:
        """How much is noted of the run that goes first."""
        return Place(len(self.values), len(self.held), len(self.indices), len(self.choices), len(self.calls))

    def _next(self, kind: str) -> Any:
        """What the run that went first noted at this place."""
        number = getattr(self.place, kind)
        noted = getattr(self.first, kind)
        if number >= len(noted):
            raise OtherWayError
        self.place = self.place._replace(**{kind: number + 1})
        return noted[number]

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A value of this run and of the other; of the run that goes first twice the same."""
        x = x.detach()
        if self.first is None:
            self._note(self.values, x)
            return x, x
        other = self._next("values")
        if other.shape != x.shape:
            raise OtherWayError
        return x, other

    def beside(self, held: list[Tensor], live: list[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """What the other run held in place of this, and its live values; None where it held the same."""
        if self.first is None:
            self.held.append(([], []))
            for noted, tensors in zip(self.held[-1], (held, live), strict=True):
                for x in tensors:
                    self._note(noted, x.detach())
            return None
        other = self._next("held")
        mine = (held, live)
        if [[x.shape for x in part] for part in mine] != [[x.shape for x in part] for part in other]:
            raise OtherWayError
        return None if all(map(torch.equal, held, other[0])) else other

    def index(self, indices: list[Tensor], weights: list[Tensor]) -> None:
        """Refuse to take other rows, other places or other weights than the run that went first."""
        mine = indices, [(self.name_of(x), x.detach()) for x in weights]
        if self.first is None:
            self.indices.append(mine)
            return
        others = self._next("indices")
        alike = len(indices) == len(others[0]) and all(map(torch.equal, indices, others[0]))
        if not alike or len(weights) != len(others[1]) or not all(map(self._is_same, mine[1], others[1])):
            raise OtherWayError

    def _is_same(self, mine: tuple[str, Tensor], other: tuple[str, Tensor]) -> bool:
        """Whether two named weights are one; of one model, which has no names, they may have been loaded twice."""
        if self.names:
            return mine[0] == other[0] and mine[1].shape == other[1].shape
        same_memory = mine[1].data_ptr() == other[1].data_ptr() and mine[1].shape == other[1].shape
        return same_memory or torch.equal(mine[1], other[1])

    def choose(self, choice: Any) -> Any:
        """What is chosen: the forced choice, or this."""
        self.chooses = True
        if self.first is not None:
            self._next("choices")
        if self.forced is not None:
            choice = self.forced[len(self.choices)]
        self.choices.append(choice)
        return choice

    def drop(self, call: Call) -> None:
        """Forget a call, and what was noted inside."""
        for kind, start in zip(Place._fields, call.start, strict=True):
            del getattr(self, kind)[start:]

    def other_call(self) -> Call:
        """The same call in the run that went first."""
        return self._next("calls")

    def finish(self) -> None:
        """Refuse to end before the run that went first did."""
        assert self.first is not None
        if self.place != self.first.noted:
            raise OtherWayError

    def before_change(self, x: Tensor) -> None:
        """Copy what was noted of a tensor before it is changed in place."""
        for copy in self._copies.pop(x.untyped_storage().data_ptr(), ()):
            copy()

    def _note(self, noted: list[Tensor], x: Tensor) -> None:
        place = len(noted)
        noted.append(x)

        def copy() -> None:
            if place < len(noted):  # else the call was a router's, and is forgotten
                noted[place] = noted[place].clone()

        self._copies.setdefault(x.untyped_storage().data_ptr(), []).append(copy)

    def may_differ(self, x: Tensor) -> bool:
        """Whether a held value may be another in the other run: of one model, the weights are the same."""
        return bool(self.names) or not is_weight(x)

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


def is_weight(x: Tensor) -> bool:
    """Whether a tensor is a weight, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def same_indices(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether the integers among some values are the same."""
    pairs = [[x for value in of for x in _parts(value) if _is_index(x)] for of in (mine, theirs)]
    return len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))


def _parts(values: Any) -> list[Any]:
    return [part for part in (values if isinstance(values, list | tuple) else (values,)) if part is not None]


def _is_index(part: Any) -> bool:
    return isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool


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
        ends = operation(lambda x: first.get(id(x), x)), operation(lambda x: second.get(id(x), x))
        return torch.where(ends[0] == ends[1], 0, ends[0] - ends[1])  # −∞ of both where they are masked

    explained = change_by()
    differing = [x for x in held if not torch.equal(mine[id(x)], theirs[id(x)])]
    added = [change_by(x) - explained for x in differing]
    added[-1] = added[-1] + (change_by(*held) - explained - sum(added[1:], start=added[0]))
    linear = of_means(lambda x: means.get(id(x), x))
    leaf = torch.zeros_like(linear.detach()).requires_grad_()
    read = (mine[id(live[0])] + theirs[id(live[0])]) / 2
    for x, value in zip(differing, added, strict=True):
        change = _matrix_change(read, mine[id(x)], theirs[id(x)], value)
        name = pairing.name_of(x) or pairing.routing or calling_module()
        pairing.constants.append(Constant(name, leaf, value, change, linear))
    return stands(operation(lambda x: mine.get(id(x), x)), linear + leaf)


def _matrix_change(read: Tensor, a: Tensor, b: Tensor, added: Tensor) -> MatrixChange | None:
    """The factors of what a matrix adds, where it is one of a linear layer."""
    if a.ndim != 2 or read.ndim != 3 or a.shape != (added.shape[-1], read.shape[-1]):
        return None
    return MatrixChange(read, a.mT, b.mT)
