"""What a module is called with or gives, where TransformerLens has no hook point: routing of experts, some patterns."""

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks.placing import Placing
from tensorlens_tl.hooks.points import PATTERN, CallPoint


@contextmanager
def seen_calls(calls: Mapping[str, CallPoint], see: Callable[[str, Tensor], None]) -> Generator[None, None, None]:
    """Inside, `see` is shown the tensors at `calls`, detached, whenever this thread calls their modules.

    Raises:
        UnsupportedModelError: afterwards, where a module was not called; inside, where it is called again, or with
            something else.
    """
    if not calls:
        yield
        return
    home = threading.get_ident()
    seen = set[str]()

    def note(name: str, value: Any) -> None:
        call = calls[name]
        what = f"{name} ({type(call.module).__name__}, {call.argument})"
        if call.optional and (name in seen or not isinstance(value, Tensor)):
            return
        if name in seen:
            raise UnsupportedModelError(f"{what} is called several times in one forward pass; that cannot be frozen.")
        if value is None and name.endswith(PATTERN):
            raise UnsupportedModelError(
                f"{what} is no pattern over all pairs of tokens: attention within windows, or fused attention. Fused "
                "attention shows its pattern where the Hugging Face model is loaded with attn_implementation='eager'."
            )
        if not isinstance(value, Tensor):
            raise UnsupportedModelError(f"{what} is {type(value).__name__}, not a tensor.")
        seen.add(name)
        see(name, value.detach())

    def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == home:
            arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            note(name, arguments.get(calls[name].argument))

    def after(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == home:
            note(name, calls[name].read(output))

    with Placing() as placing:
        for name, call in calls.items():
            _put(placing, call, partial(before, name), partial(after, name))
        yield
    silent = [name for name, call in calls.items() if name not in seen and not call.optional]
    if silent:
        raise UnsupportedModelError(
            f"{silent[0]}: {type(calls[silent[0]].module).__name__} was not called in a forward pass (fused experts?). "
            "Load the Hugging Face model with experts_implementation='eager'."
        )


def _put(placing: Placing, call: CallPoint, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Put one of two hooks on a module, as what is seen there is an argument or the output."""
    if call.argument == "output":
        placing.on_module(call.module, after)
    else:
        placing.on_module(call.module, before, before=True)


class CallChange(NamedTuple):
    """What a module is called with, or its output, changed.

    Attributes:
        point: where.
        change: from the arguments of the call by name, and the tensor at `point`, to what stands in its place.
    """

    point: CallPoint
    change: Callable[[Mapping[str, Any], Tensor], Tensor]


@contextmanager
def changed_calls(changes: Sequence[CallChange]) -> Generator[None, None, None]:
    """Inside, calls of some modules are changed in this thread.

    Raises:
        UnsupportedModelError: afterwards, where a module was not called; inside, where there is no tensor to change.
    """
    home = threading.get_ident()
    called = set[int]()

    def tensor_of(number: int, value: Any) -> Tensor:
        called.add(number)
        if not isinstance(value, Tensor):
            point = changes[number].point
            what = f"{type(point.module).__name__}, {point.argument}"
            raise UnsupportedModelError(f"{what}: {type(value).__name__}, and no tensor that could be changed.")
        return value

    def before(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != home:
            return None
        point, change = changes[number]
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        tensor = tensor_of(number, bound.arguments.get(point.argument))
        bound.arguments[point.argument] = change(bound.arguments, tensor)
        return bound.args, bound.kwargs

    def after(number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != home:
            return None
        change = changes[number].change
        if isinstance(output, tuple):
            return (change({}, tensor_of(number, output[0])), *output[1:])
        return change({}, tensor_of(number, output))

    with Placing() as placing:
        for number, change in enumerate(changes):
            _put(placing, change.point, partial(before, number), partial(after, number))
        yield
    for number, change in enumerate(changes):
        if number not in called and not change.point.optional:
            module = type(change.point.module).__name__
            raise UnsupportedModelError(
                f"{module} was not called in a forward pass (fused experts?), so that nothing could be changed there. "
                "Load the Hugging Face model with experts_implementation='eager'."
            )
