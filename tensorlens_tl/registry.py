"""The method registry: one name, one call, one kind of result.

A method is a function of a `FrozenPass` and keyword options that returns an `Attribution`:

    >>> import tensorlens_tl as tlens
    >>> @tlens.register_method("uniform")
    ... def uniform(frozen, *, query=-1):
    ...     \"\"\"The same score for every source token: a baseline.\"\"\"
    ...     scores = frozen.operator().in_out(query).scores
    ...     return tlens.Attribution.of(frozen, 0 * scores + 1, method="uniform", query=query)
    >>> "uniform" in tlens.list_methods()
    True

Packages publish methods through the entry-point group ``tensorlens_tl.methods``; built-in methods
register with the same decorator.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.errors import InvalidInputError, RegistryError
from tensorlens_tl.freezing import freeze
from tensorlens_tl.frozen import FrozenPass

ENTRY_POINTS = "tensorlens_tl.methods"
MethodFunction = TypeVar("MethodFunction", bound=Callable[..., Attribution])


@dataclass(frozen=True, repr=False)
class Method:
    """A registered method: its function, and the options it takes with their defaults."""

    name: str
    function: Callable[..., Attribution]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", inspect.getdoc(self.function))  # help() of a method is its own

    def __repr__(self) -> str:
        return f"Method({self.name!r}, options: {', '.join(self.options) or 'none'})"

    @property
    def options(self) -> dict[str, Any]:
        """Its keyword options with their defaults."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}

    @property
    def takes_any_option(self) -> bool:
        """Whether it accepts options it does not name."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.function).parameters.values())

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]


_METHODS: dict[str, Method] = {}
_LOADED: set[str] = set()


def register_method(name: Any) -> Callable[[MethodFunction], MethodFunction]:
    """Register a function under a name, as a decorator.

    The same function (by module and qualified name) may register again, as notebook cells do.

    Raises:
        RegistryError: the name belongs to another function.
    """

    if not isinstance(name, str):
        raise RegistryError("register_method takes the method's name: write @register_method('my-method').")

    def decorate(function: MethodFunction) -> MethodFunction:
        taken = _METHODS.get(name)
        if taken is not None and _identity(taken.function) != _identity(function):
            raise RegistryError(
                f"register_method: {name!r} is already {'.'.join(_identity(taken.function))}; choose another name, "
                f"such as 'my-{name}'."
            )
        _METHODS[name] = Method(name, function)
        return function

    return decorate


def _identity(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, getattr(function, "__qualname__", repr(function))


def list_methods() -> list[str]:
    """The names `attribute` knows: built in, registered here, and published by installed packages."""
    _load_published()
    return sorted(_METHODS)


def get_method(name: str) -> Method:
    """A registered method.

    Raises:
        RegistryError: no such name; suggests the nearest.
    """
    if name not in _METHODS:
        _load_published()
    if name not in _METHODS:
        raise RegistryError(unknown_method(name, list_methods()))
    return _METHODS[name]


def unknown_method(name: Any, known: Iterable[str]) -> str:
    """What to say about a name that is none of the known ones: the nearest, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no method called {name!r}.{hint} There are {', '.join(map(repr, known))}."


def _load_published() -> None:
    """Load each published method once; it may register itself, or is registered under its entry point's name."""
    for point in entry_points(group=ENTRY_POINTS):
        if point.value in _LOADED:
            continue
        _LOADED.add(point.value)
        try:
            loaded: Any = point.load()
        except Exception as error:  # somebody else's package must not take ours down
            warnings.warn(
                f"the published method {point.name!r} ({point.value}) cannot be loaded: {error!r}. Update or uninstall "
                "the package that publishes it; everything else works.",
                stacklevel=3,
            )
            continue
        if callable(loaded) and all(method.function is not loaded for method in _METHODS.values()):
            register_method(point.name)(cast(Callable[..., Attribution], loaded))


def attribute(model: Any, input: Any = None, *, method: str = "tensorlens", **options: Any) -> Attribution:
    """Attribute with any registered method.

    Args:
        model: a TransformerLens model, or a `FrozenPass` (then leave `input` out).
        input: a string, a list of strings, or token ids.
        method: one of `list_methods()`.
        options: the method's options (``help(tlens.get_method(name).function)`` describes them; the default method
            takes `collapse`, `query`, `target`, `minus`, `direction`, `layers`, `heads`, `mlp`, `activation`,
            `probes`); those of `freeze` (`attention_mask`, `prepend_bos`, `verify` …) go there.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an option that neither knows; see also `freeze`.
        FrozenModelError: the model's weights were changed after the frozen pass was made.
    """
    chosen = get_method(method)
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in chosen.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if name not in chosen.options and not chosen.takes_any_option]
    if unknown:
        raise InvalidInputError(
            f"attribute: method {method!r} has no option {unknown[0]!r}. It takes "
            f"{', '.join(chosen.options) or 'none'}; freezing takes {', '.join(freezing)}."
        )
    if isinstance(model, FrozenPass):
        if input is not None or for_freeze:
            raise InvalidInputError(
                "attribute: a frozen pass has its input already; leave `input` and its options out."
            )
        model.check_fresh()
        return _checked(method, chosen.function(model, **for_method))
    if input is None:
        raise InvalidInputError("attribute: `input` is missing; pass a string, a list of strings or token ids.")
    return _checked(method, chosen.function(freeze(model, input, **for_freeze), **for_method))


def _checked(method: str, result: Any) -> Attribution:
    if not isinstance(result, Attribution):
        raise RegistryError(
            f"method {method!r} returned {type(result).__name__}, not an Attribution; wrap its scores with "
            "tlens.Attribution.of(frozen, scores, method=..., query=...)."
        )
    return result
