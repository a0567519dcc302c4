"""Pairing of two runs of a module by the order of their operations, and the weights that differ.

The run that goes first records the inputs of its operations. The other run reads them, operation by operation.

Modules that choose by live values, such as mixtures of experts, may choose differently in the two runs. The runs then
have different operations, so the smallest module around the choice that maps a stream to a stream is run for both
inputs with the choice r of either run:

    F(x; a) − F(y; b) = ½ Σ_r [F(x; r) − F(y; r)] + the effect of the changed choice

F(·; r) is the module with the choice r and its weights: an expert has the mean of its weights, 0 where a token is not
routed to it. The last term is a constant.
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
"""Operations that return indices of experts, tokens or groups."""


class OtherWayError(UnsupportedModelError):
    """The two runs have different operations, or choose differently."""

    def __init__(self) -> None:
        super().__init__("the two runs take different ways through a module. Explain each run separately.")


class Mark(NamedTuple):
    """A position in a run's record: the number of values, held values, indices, choices and calls before it."""

    values: int = 0
    held: int = 0
    indices: int = 0
    choices: int = 0
    calls: int = 0


NOTHING = Mark()


@dataclass(eq=False)
class Call:
    """A call, in the run that goes first, of a module that may make choices.

    Attributes:
        forward, args, kwargs: the call.
        out: its output.
        start, end: the positions in the run's record before and after it.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any = None
    start: Mark = NOTHING
    end: Mark = NOTHING

    @property
    def given(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    @property
    def gives_choices(self) -> bool:
        """Whether the module is a router: its output contains indices."""
        return any(_is_index(part) for part in _parts(self.out))

    @property
    def gives_stream(self) -> bool:
        """Whether the module maps a stream to a stream; rows may be flattened."""
        x = next((x for x in self.given if isinstance(x, Tensor)), None)
        y = next(iter(_parts(self.out)), None)
        if x is None or not x.requires_grad or not isinstance(y, Tensor):
            return False
        return y.shape[-1:] == x.shape[-1:] and y.numel() == x.numel()

    def with_held_of(self, other: "Call") -> "Call":
        """Return the call with another call's held arguments, which are part of its choice."""
        kwargs = {name: _with_held(arg, other.kwargs[name]) for name, arg in self.kwargs.items()}
        return Call(self.forward, _with_held(self.args, other.args), kwargs)

    def __call__(self) -> Any:
        """Call the module."""
        self.out = self.forward(*self.args, **self.kwargs)
        return self.out


def _with_held(arg: Any, other: Any) -> Any:
    if isinstance(arg, list | tuple):
        return type(arg)(map(_with_held, arg, other))
    if hasattr(arg, "get_seq_length"):  # a cache, which is empty for a whole prompt
        return None
    return other if isinstance(arg, Tensor) and not arg.requires_grad else arg


@dataclass
class Pairing:
    """One of two runs of a module, whose operations are paired with those of the other by their order.

    Attributes:
        names: the names of weights, by the identity of their tensors; empty if both runs have the same weights.
        label: the name of a module's choices, from the module's name.
        first: the record of the run that goes first; None for that run itself.
        forced: the choices to make instead of the run's own; None for the run's own.
        values: the inputs of operations that are not linear.
        held: held values together with the live values of the same operation.
        indices: integers and booleans used with live values, and which weights are used.
        choices: choices made by live values.
        calls: calls of modules that may make choices.
        constants: the effects of differing weights and changed choices.
        place: in the second run, the current position in the record of the first.
        routing: the name of the choices of the module that is running.
        chooses: whether that module has made a choice already.
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
    place: Mark = NOTHING
    routing: str = ""
    chooses: bool = False
    _copies: dict[int, list[Callable[[], None]]] = field(default_factory=dict[int, list[Callable[[], None]]])

    @property
    def rule(self) -> Rule:
        """The rule of this run: the run that goes first needs no gradient, the other one has secants."""
        return _noting(self.pair) if self.first is None else secant(self.pair)

    @property
    def noted(self) -> Mark:
        """The length of the record so far, in the run that goes first."""
        return Mark(len(self.values), len(self.held), len(self.indices), len(self.choices), len(self.calls))

    def _next(self, kind: str) -> Any:
        """The next item of this kind in the record of the run that goes first."""
        number = getattr(self.place, kind)
        noted = getattr(self.first, kind)
        if number >= len(noted):
            raise OtherWayError
        self.place = self.place._replace(**{kind: number + 1})
        return noted[number]

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a value of this run and of the other; in the run that goes first, twice the same."""
        x = x.detach()
        if self.first is None:
            self._note(self.values, x)
            return x, x
        other = self._next("values")
        if other.shape != x.shape:
            raise OtherWayError
        return x, other

    def beside(self, held: list[Tensor], live: list[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the other run's held values and live values; None if it held the same."""
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
        """Refuse rows, places or weights that differ from those of the run that goes first."""
        mine = indices, [(self.name_of(x), x.detach()) for x in weights]
        if self.first is None:
            self.indices.append(mine)
            return
        others = self._next("indices")
        alike = len(indices) == len(others[0]) and all(map(torch.equal, indices, others[0]))
        if not alike or len(weights) != len(others[1]) or not all(map(self._is_same, mine[1], others[1])):
            raise OtherWayError

    def _is_same(self, mine: tuple[str, Tensor], other: tuple[str, Tensor]) -> bool:
        """Whether two named weights are the same; those of one model have no names and may have been loaded twice."""
        if self.names:
            return mine[0] == other[0] and mine[1].shape == other[1].shape
        same_memory = mine[1].data_ptr() == other[1].data_ptr() and mine[1].shape == other[1].shape
        return same_memory or torch.equal(mine[1], other[1])

    def choose(self, choice: Any) -> Any:
        """Return the forced choice, if any, or the given one."""
        self.chooses = True
        if self.first is not None:
            self._next("choices")
        if self.forced is not None:
            choice = self.forced[len(self.choices)]
        self.choices.append(choice)
        return choice

    def drop(self, call: Call) -> None:
        """Remove a call, and everything inside it, from the record."""
        for kind, start in zip(Mark._fields, call.start, strict=True):
            del getattr(self, kind)[start:]

    def other_call(self) -> Call:
        """Return the same call in the run that goes first."""
        return self._next("calls")

    def finish(self) -> None:
        """Refuse to end before the record of the run that goes first does."""
        assert self.first is not None
        if self.place != self.first.noted:
            raise OtherWayError

    def before_change(self, x: Tensor) -> None:
        """Copy a recorded tensor before it is changed in place."""
        for copy in self._copies.pop(x.untyped_storage().data_ptr(), ()):
            copy()

    def _note(self, noted: list[Tensor], x: Tensor) -> None:
        place = len(noted)
        noted.append(x)

        def copy() -> None:
            if place < len(noted):  # else the call was a router's, and was dropped
                noted[place] = noted[place].clone()

        self._copies.setdefault(x.untyped_storage().data_ptr(), []).append(copy)

    def may_differ(self, x: Tensor) -> bool:
        """Return whether a held value may differ in the other run; runs of one model have the same weights."""
        return bool(self.names) or not is_weight(x)

    def name_of(self, x: Tensor) -> str:
        """Return the name of the weight that a tensor is, or is computed from."""
        return getattr(x, NAME, "") or self.names.get(id(x), "") or self.names.get(id(x._base), "")

    def named(self, out: Any, given: Sequence[Tensor]) -> Any:
        """Name a value computed from weights alone after the first of them."""
        name = next(filter(None, map(self.name_of, given)), "") if self.names else ""
        if name and isinstance(out, Tensor) and not self.name_of(out):
            setattr(out, NAME, name)
        return out


NAME = "_tensorlens_weight"
"""The attribute with the weight's name, on values computed from weights alone."""


def is_weight(x: Tensor) -> bool:
    """Return whether a tensor is a weight, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def same_indices(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Return whether the integers among some values are the same."""
    pairs = [[x for value in of for x in _parts(value) if _is_index(x)] for of in (mine, theirs)]
    return len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))


def _parts(values: Any) -> list[Any]:
    return [part for part in (values if isinstance(values, list | tuple) else (values,)) if part is not None]


def _is_index(part: Any) -> bool:
    return isinstance(part, Tensor) and not part.is_floating_point() and part.dtype != torch.bool


def _noting(pair: Callable[[Tensor], Any]) -> Rule:
    """Return the rule of the run that goes first: it records what `secant` reads, in the same order."""

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
    """The effect of a differing weight on an operation's output.

    Attributes:
        name: the name of the weight.
        leaf: a zero that is added in the first run.
        added: the effect, in the same shape.
        change: its factors, if it comes from a change of a matrix.
        before: the value that it is added to, in the first run's graph.
    """

    name: str
    leaf: Tensor
    added: Tensor
    change: MatrixChange | None
    before: Tensor


# ------------------------------------------------------------------ operations with differing weights


def beside_other_weights(
    pairing: Pairing,
    operation: Callable[..., Tensor],
    of_means: Callable[[Callable[[Tensor], Tensor]], Tensor],
    held: list[Tensor],
    live: list[Tensor],
    other: tuple[list[Tensor], list[Tensor]],
) -> Tensor:
    """Run an operation that is linear in weights with the mean of both runs' weights, plus constants.

    Args:
        pairing: the pairing of the first run.
        operation: takes a function that maps each tensor to its substitute, and returns the operation's output.
        of_means: the same with gradients by the rule.
        held, live: the inputs of the operation.
        other: those of the other run.
    """
    theirs = dict(zip(map(id, (*held, *live)), (*other[0], *other[1]), strict=True))
    mine = {id(x): x.detach() for x in (*held, *live)}
    means = {id(x): (x.detach() + theirs[id(x)]) / 2 for x in held}

    def change_by(*apart: Tensor) -> Tensor:
        """The difference of the two outputs if only these weights are each run's own, and all others are means."""
        shared = {key: mean for key, mean in means.items() if key not in map(id, apart)}
        first, second = (of | shared for of in (mine, theirs))
        ends = operation(lambda x: first.get(id(x), x)), operation(lambda x: second.get(id(x), x))
        return torch.where(ends[0] == ends[1], 0, ends[0] - ends[1])  # both are −∞ where masked

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
    """Return the factors of a matrix's effect, if the matrix belongs to a linear layer."""
    if a.ndim != 2 or read.ndim != 3 or a.shape != (added.shape[-1], read.shape[-1]):
        return None
    return MatrixChange(read, a.mT, b.mT)
