"""The options of a call: which are the method's, which are those of `freeze`, and which name is meant."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes import freeze
from tensorlens_tl.registry.entries import Method

PER_PROMPT = ("target", "minus", "direction")
"""Options that may name one thing for each prompt."""


def unknown_method(name: Any, known: Iterable[str]) -> str:
    """What to say about a name that is none of the known ones: the nearest, or all of them where none is near."""
    known = list(known)
    near = nearest(name, known)
    if near:
        return f"no method called {name!r}.{near}"
    return f"no method called {name!r}. There are {', '.join(map(repr, known))}."


def nearest(name: Any, known: Iterable[str]) -> str:
    """A question, where a name is nearly one of the known ones."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `freeze`, and those of the method.

    Raises:
        InvalidInputError: one that neither knows; suggests the nearest.
    """
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in method.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if not method.takes(name)]
    if unknown:
        raise InvalidInputError(
            f"attribute: method {method.name!r} has no option {unknown[0]!r}.{nearest(unknown[0], method.options)} It "
            f"takes {', '.join(method.options) or 'none'}; freezing takes {', '.join(freezing)}."
        )
    return for_freeze, for_method
