"""Argument checks shared by many functions, with uniform error messages."""

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

    Seed = int | Any
    """An integer of any kind, which `checked_names` passes on as Python's."""
else:
    Whole = Number = Seed = Any  # the functions check these themselves, to name the argument in their message

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
"""How messages describe the most common types."""


def checked_names(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Decorate a function to reject unknown, surplus and missing arguments with a helpful message.

    An argument called `seed` may be an integer of any kind, and reaches the function as Python's: the hash of a tensor,
    or of a text, differs from run to run.

    Raises:
        WrongCallError: the arguments do not fit the signature; suggests the nearest name and lists all.
        InvalidInputError: a seed that is not an integer.

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
        if "seed" in kwargs:
            kwargs["seed"] = whole_seed(kwargs["seed"])
        return function(*args, **kwargs)

    return checked


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Bind a call's arguments to their names; raise `WrongCallError` if they do not fit the signature."""
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
            wrong += " Arguments after '*' must be passed by name."
        raise WrongCallError(f"{name}: {wrong} It is called as {name}({_in_order(signature)}).") from None


def _in_order(signature: inspect.Signature) -> str:
    """List the arguments in order of declaration, with ``=`` after optional ones.

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
"""Old argument names, each with its current name and the current names of any renamed values."""


def formerly(old: Old) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Decorate a function to accept old argument names with a warning; see `current_names`.

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
    """Translate arguments to their current names, warning about each old one.

    Raises:
        WrongCallError: an argument is passed under both its old and its new name.
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
            raise WrongCallError(f"{function}: {name}= is {today}= now, and both were passed; leave out {name}=.")
        renamed[today] = value
        warn_caller(
            f"{function}: {name}={_in_short(arguments[name])} is {today}={_in_short(value)} now; the old name goes in "
            f"version {NEXT_VERSION}.",
            DeprecationWarning,
        )
    return renamed


NEXT_VERSION = "0.3"
"""The version that removes the names that warn now."""


def checked_arguments(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Decorate a function to reject arguments that do not match their annotations.

    Where the type alone says too little, ``Annotated[type, "words"]`` describes what to pass. `Any` is not checked: it
    marks arguments that the function checks itself, with a better message (see `tensorlens_tl.models.protocol`).

    Raises:
        InvalidInputError: an argument has the wrong type or value; names the function and the argument, what was
            passed and what is accepted.
        WrongCallError: as in `checked_names`.

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
    """Describe what an annotation accepts: the choices of a `Literal`, the members of a union, or the type in words.

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
    """List the values of a `Literal`."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Annotated, Union, UnionType):
        return [value for member in get_args(hint) for value in _choices(member)]
    return []


def nearest(value: Any, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return a hint for a misspelt name or another library's name, as the end of a message; empty if there is none.

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
    """Raise unless the value is one of the known names; suggests the nearest, or the name used here for a synonym.

    Args:
        name: the argument, for the message.
        synonyms: names used elsewhere, each with the known name it stands for.

    Raises:
        InvalidInputError: the value is not a known name.
    """
    known = list(known)
    if value not in known:
        near = nearest(value, [word for word in known if word is not None], synonyms)
        raise InvalidInputError(f"{name}={value!r}; use one of {', '.join(map(repr, known))}.{near}")


def _in_short(value: Any) -> str:
    """Abbreviate a value for a message: kind and shape of a tensor or array, the beginning of anything long."""
    if getattr(value, "shape", None):
        return f"<{type(value).__name__} {list(value.shape)} {value.dtype}>"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None, why: str = "") -> int:
    """Return an integer of any kind (Python's, numpy's or torch's) as a Python int, checking its bounds.

    Raises:
        InvalidInputError: not an integer, a boolean, or out of bounds.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidInputError(f"{name}={value!r}: pass an integer{why and ', ' + why}.") from None
    if (least is not None and number < least) or (most is not None and number > most):
        ends = [f"at {which} {end}" for which, end in (("least", least), ("most", most)) if end is not None]
        bounds = ends[0] if len(ends) == 1 else f"{least} to {most}"
        raise InvalidInputError(f"{name}={number}: pass {bounds}{why and ', ' + why}.")
    return number


def real_number(name: str, value: Any, fits: Callable[[float], bool], words: str) -> float:
    """Return a number of any kind (Python's, numpy's or torch's) as a float, if it `fits`; `words` say what does.

    Raises:
        InvalidInputError: not a number, a boolean, or one that does not fit.
    """
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not fits(number):
        raise InvalidInputError(f"{name}={value!r}: {words}.")
    return float(number)


def confidence(level: Number) -> float:
    """Return the level of an interval; anything that is not between 0 and 1 raises `InvalidInputError`."""
    return real_number("level", level, lambda x: 0 < x < 1, "pass a confidence between 0 and 1")


MOST_AT_ONCE = 1_000_000
"""The largest number of runs, draws or prompts in one call; with many more, memory or patience would run out."""


def whole_count(name: str, value: Any, least: int = 1, why: str = "") -> int:
    """Return how often something is done, or how many items are built: an integer up to `MOST_AT_ONCE`."""
    return whole_number(name, whole_number(name, value, least, why=why), most=MOST_AT_ONCE)


def whole_seed(seed: Any, least: int = -(2**63)) -> int:
    """Return a seed that torch's generators accept; see `whole_number`."""
    return whole_number("seed", whole_number("seed", seed, least), most=2**64 - 1)


def refuse_meta(name: str, value: Any) -> None:
    """Raise `InvalidInputError` for a tensor on the meta device, which has a shape but no values."""
    if getattr(value, "is_meta", False):
        what = ": ".join(filter(None, [name, f"a tensor {list(value.shape)}"]))
        raise InvalidInputError(
            f"{what} on the meta device has no values; pass one on the CPU or on the model's device."
        )


def whole_slice(name: str, value: slice, why: str = "") -> slice:
    """Return a slice with Python ints, checking that its ends are integers or None and its step is not zero.

    Raises:
        InvalidInputError: an end is not an integer, or the step is zero.
    """
    ends = [end if end is None else whole_number(name, end, why=why) for end in (value.start, value.stop, value.step)]
    if ends[2] == 0:
        raise InvalidInputError(f"{name}={value}: a slice goes in steps of 1 or more, or backwards; its step is 0.")
    return slice(*ends)


def plain(value: Any) -> Any:
    """Convert tensors, numpy arrays and numpy integers to plain Python values; return anything else unchanged.

    Raises:
        InvalidInputError: a tensor on the meta device.
    """
    refuse_meta("", value)
    return value.tolist() if hasattr(value, "tolist") else value
