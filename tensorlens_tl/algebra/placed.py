"""A map that is computed on the device of its weights, between vectors that are on another one."""

from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap, MixingMap, collector
from tensorlens_tl.algebra.positions import BiasTerms, Positions, Where

Value = TypeVar("Value")


def on_device(value: Value, device: torch.device) -> Value:
    """A copy of what holds tensors, with all of them on one device; itself where they are there already.

    Args:
        value: a tensor; a map, or another dataclass; tuples, lists and dictionaries of such. Modules and functions
            stay as they are.
        device: where the tensors shall be.

    >>> from tensorlens_tl.algebra import Linear, on_device
    >>> double = Linear(2 * torch.eye(2))
    >>> on_device(double, torch.device("cpu")) is double, on_device(double, torch.device("meta")).weight.device
    (True, device(type='meta'))
    """
    return _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value is ZERO else value.to(device)
    if isinstance(value, dict):
        return _changed(value, {key: _moved(part, device) for key, part in value.items()})
    if isinstance(value, tuple | list):
        parts = [_moved(part, device) for part in value]
        if all(part is before for part, before in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return _moved_fields(value, device)
    return device if isinstance(value, torch.device) else value


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    """The second of two dictionaries, or the first where nothing in it was moved."""
    return before if all(after[key] is part for key, part in before.items()) else after


def _moved_fields(value: Any, device: torch.device) -> Any:
    """A dataclass with its fields moved, and without what it has cached; its checks do not run again."""
    before = {field.name: getattr(value, field.name) for field in fields(value)}
    after = _changed(before, {name: _moved(part, device) for name, part in before.items()})
    if after is before:
        return value
    other = copy(value)
    for name in set(vars(other)) - set(after):
        del vars(other)[name]
    for name, part in after.items():
        object.__setattr__(other, name, part)
    return other


@final
@dataclass(frozen=True, eq=False, repr=False)
class Placed(MixingMap):
    """A map whose weights are on another device than the vectors: these are moved there, and what it gives back.

    Attributes:
        inner: the map, with everything that it holds on `device`.
        device: the device of its weights.
        outside: the device of the vectors.

    >>> from tensorlens_tl.algebra import Linear, Placed
    >>> cpu = torch.device("cpu")
    >>> double = Placed(Linear(2 * torch.eye(2)), cpu, cpu)
    >>> double, double.push(torch.ones(1, 3, 2)).sum()
    (Linear(2 → 2) on cpu, tensor(12.))
    """

    inner: AffineMap
    device: torch.device
    outside: torch.device

    def __repr__(self) -> str:
        return f"{self.inner} on {self.device}"

    @property
    def parts(self) -> tuple[AffineMap, ...]:
        return (self.inner,)

    @property
    def bias(self) -> Tensor:
        return on_device(self.inner.bias, self.outside)

    def at(self, where: Where) -> "Placed":
        return replace(self, inner=self.inner.at(on_device(where, self.device)))

    def norm_bound(self) -> float:
        return self.inner.norm_bound()

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self.inner._forward(x.to(self.device), affine).to(self.outside)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        terms = collector(biases)
        pulled = self.inner._backward(g.to(self.device), terms)
        if biases is not None:
            biases += on_device(terms or [], self.outside)
        return pulled.to(self.outside)

    def _pull(self, g: Tensor, here: Where, destination: Positions, reach: slice, biases: BiasTerms | None) -> Tensor:
        terms: BiasTerms | None = None if biases is None else []
        pulled = self.inner._pull(g.to(self.device), on_device(here, self.device), destination, reach, terms)
        if biases is not None:
            biases += on_device(terms or [], self.outside)
        return pulled.to(self.outside)
