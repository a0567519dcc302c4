"""Checks that many functions share, with one way to say what is wrong."""

import difflib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from beartype.door import is_bearable

from tensorlens_tl.errors import InvalidInputError, WrongCallError, warn_caller

if TYPE_CHECKING:
    Whole = SupportsIndex
    """An integer: Python's, numpy's or torch's."""

    Number = float
    """A number of any kind."""
else:
    Whole = Number = Any  # what is none is refused with the name of the argument

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "an integer",
    SupportsIndex: "an integer",
    float: "a number",
    SupportsFloat: "a number",
    str: "a text",
    NoneType: "None",
    Mapping: "a mapping",
    Sequence: "a list",
    Callable: "a function",
}
"""What is said of the types that are annotated most."""


def checked_names(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """A function that refuses arguments which it does not have, and calls that lack one, as a decorator.

    Raises:
        WrongCallError: no such argument, one too many, or one missing; says which name is near, and which there are.

    >>> @checked_names
    ... def rows(of, *, as_share=False):
    ...     return of
    >>> rows(1, as_shares=True)
    Traceback (most recent call last):
        ...
    tensorlens_tl.errors.WrongCallError: rows: there is no argument 'as_shares'. Did you mean 'as_share'? ...
    """
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        _bound(function, signature, args, kwargs)
        return function(*args, **kwargs)

    return checked


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What each argument of a call is.

    Raises:
        WrongCallError: the function does not take these.
    """
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        parameters = signature.parameters
        name = getattr(function, "__name__", "call")
        unknown = [key for key in kwargs if key not in parameters]
        wrong = f"{error}."
        if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            wrong = f"there is no argument {unknown[0]!r}.{nearest(unknown[0], parameters)}"
        elif str(error) == "too many positional arguments":
            wrong += " Those after '*' are passed by name."
        raise WrongCallError(f"{name}: {wrong} It is called as {name}({_in_order(signature)}).") from None


def _in_order(signature: inspect.Signature) -> str:
    """The names of the arguments as they are declared, with ``=`` where they may be left out.

    >>> _in_order(inspect.signature(check_choice))
    'name, value, known, synonyms='
    """
    names: list[str] = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            names.append("*")
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        optional = "" if parameter.default is parameter.empty else "="
        names.append(stars + parameter.name + optional)
    return ", ".join(names)


Old = Mapping[str, tuple[str, Mapping[Any, Any]]]
"""Old names of arguments: today's name of each, and today's of its values that have another one."""


def formerly(old: Old) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """A function that takes old names of its arguments and warns, as a decorator; see `current_names`.

    >>> @formerly({"of": ("by", {})})
    ... def rows(by):
    ...     return by
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     rows(of="layer")
    'layer'
    >>> str(caught[0].message)
    "rows: of='layer' is by='layer' now; the old name goes in version 0.3."
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        @wraps(function)
        def current(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            if any(name in kwargs for name in old):
                return function(*args, **current_names(function.__name__, kwargs, old))  # pyright: ignore[reportCallIssue]
            return function(*args, **kwargs)

        return current

    return decorate


def current_names(function: str, arguments: Mapping[str, Any], old: Old) -> dict[str, Any]:
    """Arguments by their names of today; warns of each old one, with the new spelling.

    Raises:
        WrongCallError: an argument by its old name and its new one.
    """
    renamed = {name: value for name, value in arguments.items() if name not in old}
    for name, (today, values) in old.items():
        if name not in arguments:
            continue
        value = arguments[name]
        if isinstance(value, str):
            value = values.get(value, value)
        if today == name and value == arguments[name]:
            renamed[name] = value
            continue
        if today in renamed:
            raise WrongCallError(f"{function}: {name}= is {today}= now, and both were passed; leave {name} out.")
        renamed[today] = value
        warn_caller(
            f"{function}: {name}={_in_short(arguments[name])} is {today}={_in_short(value)} now; the old name goes in "
            f"version {NEXT_VERSION}.",
            DeprecationWarning,
        )
    return renamed


NEXT_VERSION = "0.3"
"""The version without the names that warn now."""


def checked_arguments(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """A function that refuses arguments which are not what it is annotated to take, as a decorator.

    Where a type does not say enough, ``Annotated[type, "words"]`` says what to pass. `Any` is not checked: arguments
    that the function checks, with better words than a type has, are annotated so (see `tensorlens_tl.models.protocol`).

    Raises:
        InvalidInputError: an argument is something else; names the function and the argument, what was passed and
            what is accepted. Also what `checked_names` refuses.

    >>> @checked_arguments
    ... def share(x: int | float, of: Literal["rows", "columns"] = "rows"):
    ...     return x
    >>> share(1)
    1
    >>> share(0.5, of="layers")
    Traceback (most recent call last):
        ...
    tensorlens_tl.errors.InvalidInputError: share: of='layers'; use 'rows' or 'columns'.
    """
    signature = inspect.signature(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    accepted = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation not in (parameter.empty, Any) and parameter.kind not in variadic
    }

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        passed = _bound(function, signature, args, kwargs)
        for name, value in passed.items():
            if name in accepted and not is_bearable(value, accepted[name]):
                words = in_words(accepted[name])
                choices = [choice for choice in _choices(accepted[name]) if isinstance(choice, str)]
                near = nearest(value, choices)
                raise InvalidInputError(f"{function.__name__}: {name}={_in_short(value)}; use {words}.{near}")
        return function(*args, **kwargs)

    return checked


def in_words(hint: Any) -> str:
    """What an annotation accepts: the choices of a `Literal`, the members of a union, or what is said of a type.

    >>> in_words(Literal["l1", "l2"] | None)
    "'l1', 'l2' or None"
    """
    *most, last = dict.fromkeys(_alternatives(hint))
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(hint: Any) -> list[str]:
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return [arguments[1]] if isinstance(arguments[1], str) else _alternatives(arguments[0])
    if origin is Literal:
        return [repr(value) for value in arguments]
    if origin in (Union, UnionType):
        return [words for member in arguments for words in _alternatives(member)]
    kind = origin or hint
    return [WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"]


def _choices(hint: Any) -> list[Any]:
    """The values that an annotation lists."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Annotated, Union, UnionType):
        return [value for member in get_args(hint) for value in _choices(member)]
    return []


def nearest(value: Any, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """What to say where a value is nearly one of the known names, or what others call it; else nothing.

    >>> nearest("methods", ["method", "target"])
    " Did you mean 'method'?"
    >>> nearest("eap", ["gradient"], {"eap": "gradient"})
    " It is called 'gradient' here."
    """
    if not isinstance(value, str):
        return ""
    others = {_plain_name(other): name for other, name in (synonyms or {}).items()}
    if _plain_name(value) in others:
        return f" It is called {others[_plain_name(value)]!r} here."
    plain_names = {_plain_name(name): name for name in known} | others
    near = difflib.get_close_matches(_plain_name(value), list(plain_names), n=1, cutoff=0.6)
    if not near:
        return ""
    return f" Did you mean {plain_names[near[0]]!r}?"


def _plain_name(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def check_choice(name: str, value: Any, known: Iterable[str | None], synonyms: Mapping[str, str] | None = None) -> None:
    """Refuse a value that is none of the known names; says which is near, or what others' name stands for.

    Args:
        name: of the argument.
        value: what was passed.
        known: what may be passed.
        synonyms: names that others use, and the known one for each.

    Raises:
        InvalidInputError: it is none of them.
    """
    known = list(known)
    if value not in known:
        near = nearest(value, [word for word in known if word is not None], synonyms)
        raise InvalidInputError(f"{name}={value!r}; use one of {', '.join(map(repr, known))}.{near}")


def _in_short(value: Any) -> str:
    """A value in a message: the kind and shape of a tensor or an array, and the beginning of anything longer."""
    if getattr(value, "shape", None):
        return f"<{type(value).__name__} {list(value.shape)} {value.dtype}>"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None, why: str = "") -> int:
    """An integer of any kind (numpy's and torch's too) within bounds, as Python's own.

    Raises:
        InvalidInputError: not an integer, a truth value, or out of bounds; says which.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidInputError(f"{name}={value!r}: pass an integer{why and ', ' + why}.") from None
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"{least} to {most}" if least is not None and most is not None else f"at least {least}"
        raise InvalidInputError(f"{name}={number}: pass {bounds}{why and ', ' + why}.")
    return number


def refuse_meta(name: str, value: Any) -> None:
    """Raise `InvalidInputError` for a tensor on the meta device, which has a shape and no values."""
    if getattr(value, "is_meta", False):
        what = ": ".join(filter(None, [name, f"a tensor {list(value.shape)}"]))
        raise InvalidInputError(
            f"{what} on the meta device has no values; pass one on the CPU or on the model's device."
        )


def whole_slice(name: str, value: slice, why: str = "") -> slice:
    """A slice whose ends and step are integers or None, its step not zero, as Python's own.

    Raises:
        InvalidInputError: another one; says what is wrong.
    """
    ends = [end if end is None else whole_number(name, end, why=why) for end in (value.start, value.stop, value.step)]
    if ends[2] == 0:
        raise InvalidInputError(f"{name}={value}: a slice goes in steps of 1 or more, or backwards; its step is 0.")
    return slice(*ends)


def plain(value: Any) -> Any:
    """Tensors and numpy's arrays and integers as Python's own; anything else as it is.

    Raises:
        InvalidInputError: a tensor on the meta device.
    """
    refuse_meta("", value)
    return value.tolist() if hasattr(value, "tolist") else value
