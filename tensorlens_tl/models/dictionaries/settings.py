"""What a dictionary's object says of itself: attributes, configuration and metadata."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor


def setting(source: Any, name: str) -> Any:
    """What an object, its configuration or its metadata says, in this order; None where none does."""
    values = (entry(holder, name) for holder in holders(source))
    return next((value for value in values if value is not None), None)


def holders(source: Any) -> list[Any]:
    """An object, its configuration and its metadata."""
    configurations = [part for name in ("cfg", "config") if (part := entry(source, name)) is not None]
    metadata = [entry(holder, "metadata") for holder in (source, *configurations)]
    return [source, *configurations, *(part for part in metadata if part is not None)]


def entry(holder: Any, name: str) -> Any:
    """An item of a mapping, or an attribute of an object; None where it is missing."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def attributes_of(holder: Any) -> dict[str, Any]:
    """What an object says of itself that is no method: its attributes, a module's weights and parts, its class's."""
    if isinstance(holder, Mapping):
        return dict(holder)
    attributes = dict[str, Any]()
    for kind in reversed(type(holder).__mro__):
        if kind.__module__.partition(".")[0] not in ("builtins", "torch", "types"):
            attributes |= {name: value for name, value in vars(kind).items() if not _is_method(value)}
    attributes |= getattr(holder, "__dict__", {})
    for inside in ("_parameters", "_buffers", "_modules"):
        attributes |= attributes.pop(inside, None) or {}
    return {
        name: value
        for name, value in attributes.items()
        if not name.startswith("_") and not hasattr(value, "fwd_hooks")
    }


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod | cached_property)


def says_nothing(value: Any) -> bool:
    """Whether a value stands for something absent."""
    if isinstance(value, Tensor):
        return False
    if value is None or value is False or value == "none":
        return True
    return isinstance(value, str | Mapping | Sequence) and not value
