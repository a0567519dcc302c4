"""Modules that choose by live values, such as mixtures of experts, in two runs that choose differently.

A batch of both runs cannot be halved where a choice has sorted its rows. So the smallest module around a choice that
gives what it is given, a stream, is run once for each run, and its operations are paired by their order. Where the two
runs choose differently, they have no operations in common, and each choice r is made in both:

    F(x; a) − F(y; b) = ½ Σ_r [F(x; r) − F(y; r)] + what the changed choice adds

F(·; r) is the module with the choice r, and with what that counts: an expert has the mean of its weights, 0 where a
token is not sent. What is added is a constant. So are other values that are held and differ between the two runs.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tensorlens_tl.core.rules import Rule, secant, stands
from tensorlens_tl.errors import UnsupportedModelError

CHOOSES = frozenset(["topk", "sort", "argsort", "argmax", "argmin"])
"""Operations that give numbers of experts, tokens or groups."""


class ChoiceError(UnsupportedModelError):
    """The two runs choose by themselves, and no module around the choice could be run for each."""


@dataclass
class Trace:
    """What the operations of one run of a module were given, in their order.

    Attributes:
        name: of what is held and differs.
        which: 0 for the first run, 1 for the second.
        other: the trace of the other run, where its values are paired with this one's.
        chosen: that of the run whose choices are made; None for this one's own.
        differing: which of `beside` are others in the other run.
        values: what was paired.
        beside: what was held beside live values.
        places: integers and booleans beside live values: which rows an operation takes, or where it applies.
        choices: what choices gave.
    """

    name: str
    which: int
    other: "Trace | None" = None
    chosen: "Trace | None" = None
    differing: Collection[int] = ()
    values: list[Tensor] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)
    choices: list[Any] = field(default_factory=list)

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A value of the first run and of the second; of a run by itself twice the same."""
        x = x.detach()
        self.values.append(x.clone())  # what follows may change it in place
        if self.other is None:
            return x, x
        in_other = self.other.values[len(self.values) - 1]
        return (in_other, x) if self.which else (x, in_other)

    def sees(self, held: Tensor) -> bool:
        """Note a value that is held beside live ones, and say whether it is another in the other run."""
        self.beside.append(held.clone())
        return len(self.beside) - 1 in self.differing

    def choose(self, choice: Callable[[], Any]) -> Any:
        """What a choice gives, or what it gave in the run whose choices are made."""
        out = choice() if self.chosen is None else self.chosen.choices[len(self.choices)]
        self.choices.append(out)
        return out

    def is_beside(self, other: "Trace") -> bool:
        """Whether both runs took the same way, row by row."""
        mine, theirs = ([x.shape for x in trace.values] for trace in (self, other))
        if mine != theirs or len(self.places) != len(other.places) or len(self.beside) != len(other.beside):
            return False
        return all(torch.equal(*places) for places in zip(self.places, other.places, strict=True))


@runtime_checkable
class RunUnderRule(Protocol):
    """What `Linearised` has."""

    rule: Rule
    trace: Trace | None

    def constant(self, name: str, value: Tensor) -> Tensor:
        """A value that no source gives, as a source by itself."""
        ...


def by_runs(linearised: RunUnderRule, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module's output, run by run where it chooses.

    Raises:
        ChoiceError: it chooses, and cannot be run so; a module around it may.
    """
    try:
        return forward(*args, **kwargs)
    except ChoiceError as error:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if x is None or not x.requires_grad or len(x) % 2:
            raise
        return _ByRuns(linearised, name, forward, x, args, kwargs, error).output()


@dataclass
class _ByRuns:
    """A module that is run for each of two runs."""

    linearised: RunUnderRule
    routing: str
    forward: Callable[..., Any]
    x: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    error: ChoiceError

    def output(self) -> Any:
        """What the module gives in both runs, with the gradient of secants."""
        runs_apart = self.noted()
        if any(_is_number(part) for _, out in runs_apart for part in _parts(out)):
            return self.forward(*map(_held, self.args), **{name: _held(arg) for name, arg in self.kwargs.items()})
        values = [self.stream(out) for _, out in runs_apart]
        linear = self.paired([trace for trace, _ in runs_apart])
        if linear is None:
            both = [self.paired([seen for seen, _ in self.noted(trace)], trace) for trace, _ in runs_apart]
            if both[0] is None or both[1] is None:
                raise self.error
            linear = [(first + second) / 2 for first, second in zip(*both, strict=True)]
            change, explained = (ends[0].detach() - ends[1].detach() for ends in (values, linear))
            shares = ((change - explained) / 2, (explained - change) / 2)
            linear = [y + self.linearised.constant(self.routing, k) for y, k in zip(linear, shares, strict=True)]
        return self.like(runs_apart[0][1], torch.cat([stands(*ends) for ends in zip(values, linear, strict=True)]))

    def noted(self, chosen: Trace | None = None, differing: Collection[int] = ()) -> list[tuple[Trace, Any]]:
        """Each run by itself: what its operations were given, and its output."""
        traces = [Trace(self.routing, which, chosen=chosen, differing=differing) for which in (0, 1)]
        return [(trace, self.run(trace)) for trace in traces]

    def paired(self, traces: list[Trace], chosen: Trace | None = None) -> list[Tensor] | None:
        """What the module gives in each run, with the gradient of the secants between them; None if rows differ."""
        first, second = traces
        if not first.is_beside(second):
            return None
        held = enumerate(zip(first.beside, second.beside, strict=True))
        differing = [number for number, ends in held if not torch.equal(*ends)]
        if differing:
            first, second = (trace for trace, _ in self.noted(chosen, differing))
        runs = [Trace(self.routing, which, other, chosen, differing) for which, other in enumerate((second, first))]
        return [self.stream(self.run(trace)) for trace in runs]

    def run(self, trace: Trace) -> Any:
        """The module's output in one of the runs."""
        before = self.linearised.rule, self.linearised.trace
        self.linearised.rule, self.linearised.trace = secant(trace.pair, lambda x: x), trace
        try:
            return self.forward(
                *(self.part(arg, trace) for arg in self.args),
                **{name: self.part(arg, trace) for name, arg in self.kwargs.items()},
            )
        finally:
            self.linearised.rule, self.linearised.trace = before

    def part(self, arg: Any, trace: Trace) -> Any:
        """What belongs to one run of what the module is given; what is held is part of a choice."""
        if isinstance(arg, list | tuple):
            return type(arg)(self.part(item, trace) for item in arg)
        is_weight = not isinstance(arg, Tensor) or arg.ndim < 2 or isinstance(arg, nn.Parameter)
        if not is_weight and len(arg) == len(self.x):
            return arg.chunk(2)[trace.which if arg.requires_grad or trace.chosen is None else trace.chosen.which]
        return None if hasattr(arg, "get_seq_length") else arg  # a cache, which holds nothing of a whole prompt

    def stream(self, out: Any) -> Tensor:
        """What the module gives, if it is a stream as what it is given."""
        y = _parts(out)[0]
        if y.shape[-1] != self.x.shape[-1] or 2 * y.numel() != self.x.numel():  # rows may be flattened
            raise self.error
        return y

    def like(self, out: Any, stream: Tensor) -> Any:
        """The output of both runs; what else a module gives, such as the scores of its router, is left out."""
        return (stream, *(None for _ in out[1:])) if isinstance(out, tuple) else stream


def _held(arg: Any) -> Any:
    """What a router is given: what it gives is a choice, and no operation passes anything on."""
    return arg.detach() if isinstance(arg, Tensor) else arg


def _parts(out: Any) -> list[Any]:
    return [part for part in (out if isinstance(out, tuple) else (out,)) if part is not None]


def _is_number(part: Any) -> bool:
    return not isinstance(part, Tensor) or not part.is_floating_point()
