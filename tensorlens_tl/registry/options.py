"""The options of a call: which are the method's, which are those of `freeze`, and which name is meant."""

import inspect
from collections.abc import Mapping
from typing import Any

from tensorlens_tl._arguments import nearest
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes import freeze
from tensorlens_tl.registry.entries import Method
from tensorlens_tl.registry.registering import get_method, list_methods

PER_PROMPT = ("target", "minus", "direction")
"""Options that may name one thing for each prompt."""

QUESTIONS = ("target", "minus", "direction")
"""Options that say which number is explained."""


PROBABILITIES = (
    " A probability is no sum over tokens. With minus= scores sum to a difference of two logits, which is that of "
    "the two tokens' log-probabilities; method='leave-one-out' measures how a probability changes "
    "(of='log_probability')."
)


def _without_target(option: str) -> str:
    """What to say where a method does not take the number that it is to explain: which do."""
    others = [name for name in list_methods() if option in get_method(name).options]
    return f" What it scores is not one number of the model. These take one: {', '.join(map(repr, others))}."


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `freeze`, and those of the method.

    Raises:
        InvalidInputError: one that neither knows; suggests the nearest.
    """
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    del freezing["query"]  # of a method; `attribute` tells `freeze` of it
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in method.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if not method.takes(name)]
    if unknown:
        hint = nearest(unknown[0], method.options)
        if unknown[0] in QUESTIONS:
            hint = _without_target(unknown[0])
        elif unknown[0] == "of" or "prob" in unknown[0]:
            hint = PROBABILITIES
        raise InvalidInputError(
            f"attribute: method {method.name!r} has no option {unknown[0]!r}.{hint} It "
            f"takes {', '.join(method.options) or 'none'}; freezing takes {', '.join(freezing)}."
        )
    return for_freeze, for_method
