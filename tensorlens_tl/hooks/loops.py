"""Hook points that fire several times in a forward pass, by the number of the time: ``"L_blocks.0@3.hook_in"``.

TransformerLens calls the hooks of such a point again each time it fires, and does not say which time it is. Here a
point that fires n times has n names besides its own, and the hooks at these names are put on it as one, which counts.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from tensorlens_tl.models import call_counts, is_looped

START = "embed.hook_out"
"""A hook point that fires once, at the start of each forward pass."""


@dataclass(frozen=True, eq=False)
class NumberedPoint:
    """What a hook point shows the n-th time.

    Attributes:
        name: with the number.
        at: the name of the point.
        number: counted from 0.
    """

    name: str
    at: str
    number: int


_numbered: "WeakKeyDictionary[Any, dict[int, NumberedPoint]]" = WeakKeyDictionary()  # by hook point


def numbered(model: Any, points: Mapping[str, Any]) -> dict[str, Any]:
    """Hook points by name, and those of a loop also by number; names of one point share their numbered points."""
    if not is_looped(model):
        return dict(points)
    known = dict(points)
    counts = call_counts(model)
    for name, point in points.items():
        stack, _, rest = name.partition("_")
        if stack not in counts or not rest.startswith(("blocks.", "ln_final.")):
            continue
        head, inside = _split(name)
        for number in range(counts[stack]):
            name_of_call = f"{head}@{number}.{inside}"
            of_point = _numbered.setdefault(point, {})
            known[name_of_call] = of_point.setdefault(number, NumberedPoint(name_of_call, name, number))
    return known


def _split(name: str) -> tuple[str, str]:
    """``"L_blocks.0"`` or ``"L_ln_final"``, and the rest of a name."""
    parts = name.split(".")
    length = 2 if parts[0].endswith("blocks") else 1
    return ".".join(parts[:length]), ".".join(parts[length:])


def without_numbers(
    model: Any, points: Mapping[str, Any], hooks: Sequence[tuple[Any, Callable[..., Any]]]
) -> list[tuple[Any, Callable[..., Any]]]:
    """Hooks as TransformerLens takes them: those at numbered points are put together for each point.

    Args:
        model: any TransformerLens model.
        points: its hook points by name.
        hooks: names, or filters of names, and what is called there.
    """
    if not is_looped(model):
        return list(hooks)
    known = numbered(model, points)
    placed: list[tuple[Any, Callable[..., Any]]] = []
    counting: dict[int, _Counting] = {}
    for wanted, function in hooks:
        names = [wanted] if isinstance(wanted, str) else list(filter(wanted, known))
        wanted_points = {id(known[name]): known[name] for name in names if name in known}
        placed += [(name, function) for name in names if not isinstance(known.get(name), NumberedPoint)]
        for point in wanted_points.values():
            if isinstance(point, NumberedPoint):
                at = counting.setdefault(id(points[point.at]), _Counting(point.at))
                at.hooks.setdefault(point.number, []).append((point, function))
    if not counting:
        return placed
    return [(START, _restart(counting.values())), *((at.name, at.hook()) for at in counting.values()), *placed]


@dataclass(eq=False)
class _Counting:
    """The hooks of one point, by the number of the time they are called.

    Attributes:
        name: of the point.
        hooks: a numbered point and a function each.
        times: how often the point has fired in this forward pass, by thread.
    """

    name: str
    hooks: dict[int, list[tuple[NumberedPoint, Callable[..., Any]]]] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)

    def hook(self) -> Callable[..., Any]:
        """What is called whenever the point fires."""

        def hook(tensor: Tensor, *, hook: Any) -> Tensor | None:
            home = threading.get_ident()
            number = self.times.get(home, 0)
            self.times[home] = number + 1
            result = tensor
            for point, function in self.hooks.get(number, ()):
                changed = function(result, hook=point)
                result = result if changed is None else changed
            return None if result is tensor else result

        functions = [function for at in self.hooks.values() for _, function in at]
        return _marked(hook, all(getattr(function, "holds_fixed", False) for function in functions))


def _restart(counting: Iterable[_Counting]) -> Callable[..., Any]:
    """A hook that starts to count again."""
    points = list(counting)

    def hook(tensor: Tensor, *, hook: Any) -> None:
        for point in points:
            point.times.pop(threading.get_ident(), None)

    return _marked(hook, True)


def _marked(hook: Callable[..., Any], holds_fixed: bool) -> Callable[..., Any]:
    """Recognised by `tensorlens_tl.hooks.inspection`."""
    hook.holds_fixed = holds_fixed  # pyright: ignore[reportFunctionMemberAccess]
    return hook
