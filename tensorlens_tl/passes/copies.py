"""Copies of a pass's prompts, for runs of the live model in which something differs from copy to copy."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def repeated(inputs: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """A pass's inputs with every prompt as often as there are copies, copy after copy."""
    return {
        name: value.repeat(copies, *(1,) * (value.ndim - 1)) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
