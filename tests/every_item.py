"""beartype that looks at every item of a container of arrays.

beartype itself looks at one item, drawn at random: a wrong annotation then passes on some days and fails on others.

jaxtyping binds the arguments of every call, so that axes have one size in a signature. That takes most of the time of a
checked run, and most functions have no array in their signature: of these beartype alone checks the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, isfunction, signature
from types import UnionType
from typing import Any, ForwardRef, Union, get_args, get_origin

import jaxtyping
from beartype import beartype
from beartype.door import is_bearable
from jaxtyping import AbstractArray

jaxtyped = jaxtyping.jaxtyped
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


def jaxtyped_for_arrays(function: Any = None, **options: Any) -> Any:
    """jaxtyping's decorator, but for functions whose signature has no array: these get the checker alone."""
    if function is None:
        return partial(jaxtyped_for_arrays, **options)
    if isfunction(function) and options.get("typechecker") and not _may_have_arrays(function):
        return options["typechecker"](function)
    return jaxtyped(function, **options)


jaxtyping.jaxtyped = jaxtyped_for_arrays  # what the import hook writes above every function is looked up here


def _may_have_arrays(function: Callable) -> bool:
    return any(_is_or_has_array(hint) for hint in function.__annotations__.values())


def _is_or_has_array(hint: Any) -> bool:
    """Also of annotations that are text: jaxtyping reads them where their names are known, beartype insists."""
    if isinstance(hint, ForwardRef | str):
        return True
    if isinstance(hint, list):  # the arguments of a Callable
        return any(_is_or_has_array(part) for part in hint)
    return _is_array(hint) or any(_is_or_has_array(part) for part in get_args(hint))


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
