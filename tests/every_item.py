"""beartype that looks at every item of a container of arrays.

beartype itself looks at one item, drawn at random: a wrong annotation then passes on some days and fails on others.

jaxtyping binds the arguments of a call, so that axes have one size in a signature, and checks them twice, which takes
most of the time of a checked run. Most functions have no array in their signature: of these beartype alone checks the
same. Of the others it checks arguments and result once, while jaxtyping holds the sizes of axes of that call. Functions
inside another are new each time that the outer one runs, and to make a check takes longer than most calls: the first of
them is checked.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, isfunction, isgeneratorfunction, signature
from types import CodeType, UnionType
from typing import Any, ForwardRef, Literal, Union, get_args, get_origin

import jaxtyping
from beartype import beartype
from beartype.door import is_bearable
from jaxtyping import AbstractArray

jaxtyped = jaxtyping.jaxtyped
_inner: set[CodeType] = set()
NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def checked(function):
    """The function, its arguments and what it returns checked as it is called."""
    by_beartype = beartype(function)
    called = signature(function)
    hints = {p.name: p.annotation for p in called.parameters.values() if p.kind in NAMED and _has_arrays(p.annotation)}
    if not hints and not _has_arrays(called.return_annotation):
        return by_beartype

    @wraps(function)
    def check(*args, **kwargs):
        arguments = called.bind(*args, **kwargs).arguments
        for name, hint in hints.items():
            _check(name, arguments.get(name), hint)
        returned = by_beartype(*args, **kwargs)
        _check("return", returned, called.return_annotation)
        return returned

    return check


def jaxtyped_for_arrays(function: Any = None, *, typechecker: Any = None) -> Any:
    """jaxtyping's decorator; it resolves annotations that are text, which beartype does not."""
    if function is None:
        return partial(jaxtyped_for_arrays, typechecker=typechecker)
    if not isfunction(function) or typechecker is None:
        return jaxtyped(function, typechecker=typechecker)
    if "<locals>" in function.__qualname__:
        if function.__code__ in _inner:
            return function
        _inner.add(function.__code__)
    hints = function.__annotations__.values()
    if not any(map(_is_or_has_array, hints)):
        return typechecker(function)
    if any(map(_is_text, hints)) or isgeneratorfunction(function):
        return jaxtyped(function, typechecker=typechecker)
    return jaxtyped(typechecker(function), typechecker=None)


jaxtyping.jaxtyped = jaxtyped_for_arrays  # what the import hook writes above every function is looked up here


def _is_or_has_array(hint: Any) -> bool:
    """Also of annotations that are text."""
    return _is_text(hint) or _is_array(hint) or any(map(_is_or_has_array, _parts(hint)))


def _is_text(hint: Any) -> bool:
    return isinstance(hint, ForwardRef | str) or any(map(_is_text, _parts(hint)))


def _parts(hint: Any) -> Sequence:
    """Also of the arguments of a Callable, which are a list; what a Literal holds is no annotation."""
    if isinstance(hint, list):
        return hint
    return () if get_origin(hint) is Literal else get_args(hint)


def _check(name: str, value: Any, hint: Any) -> None:
    for where, item, of_item in _items(name, value, hint):
        if not is_bearable(item, of_item):
            raise TypeError(f"{where} is not {of_item}: {getattr(item, 'shape', item)}")


def _has_arrays(hint: Any) -> bool:
    """Whether some part of an annotation is a container, and one of its parts an array."""
    return any(_is_array(part) or _has_arrays(part) for part in get_args(hint))


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _items(where: str, value: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each item of a sequence or mapping, with its own annotation; of items that are containers, theirs."""
    if not _has_arrays(hint):
        return
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for part in get_args(hint):
            if _has_arrays(part) and is_bearable(value, get_origin(part)):
                yield from _items(where, value, part)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _item(f"{where}[{key!r}]", item, get_args(hint)[-1])
    elif isinstance(value, Sequence):
        hints = get_args(hint)
        alike = len(hints) == 1 or hints[-1] is Ellipsis
        for i, item in enumerate(value):
            yield from _item(f"{where}[{i}]", item, hints[0] if alike else hints[i])


def _item(where: str, item: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    yield where, item, hint
    yield from _items(where, item, hint)
