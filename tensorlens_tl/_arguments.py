"""Checks that many functions share, with one way to say what is wrong."""

import operator
from typing import Any

from tensorlens_tl.errors import InvalidInputError


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
    """Tensors and numpy's arrays and integers as Python's own; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
