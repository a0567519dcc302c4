"""The library's errors. Each message says what was wrong, where, and what to do about it.

All derive from `TensorLensError`; each also derives from the built-in error that a caller would
expect for it, so that ``except ValueError`` keeps working.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple


class PromptNumber(NamedTuple):
    """The part of a message that names a prompt: its number among those that were run together."""

    number: int
    noun: str = "prompt"

    def __str__(self) -> str:
        return f"{self.noun} {self.number}"


class TensorLensError(Exception):
    """Base of every error this library raises on purpose.

    Args:
        *args: the message, or its parts in order; a `PromptNumber` among them can be replaced by another name.
    """

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    def with_prompts(self, names: Mapping[int, object]) -> "TensorLensError":
        """The same error with other names for the prompts, by their numbers here."""
        return type(self)(
            *(names.get(part.number, part) if isinstance(part, PromptNumber) else part for part in self.args)
        )


class InvalidInputError(TensorLensError, ValueError):
    """An argument is out of range, of the wrong shape, empty, or names something that does not exist."""


class UnsupportedModelError(TensorLensError, NotImplementedError):
    """The model has a part that no known affine map reproduces; names the block, component and measurement."""


class NumericalError(TensorLensError, ArithmeticError):
    """NaN or Inf in weights or activations: an exact map does not exist."""


class WrongCallError(InvalidInputError, TypeError):
    """A call with an argument that the function does not have, one too many, or without one that it needs."""


class GapWarning(UserWarning):
    """A sum is further from the model's own number than the proof of its pass allows, or gradients lose digits."""


class UntrainedWarning(UserWarning):
    """Numbers are explained that come from random weights: the model's checkpoint does not have them."""


class FrozenModelError(TensorLensError, RuntimeError):
    """The frozen hooks meet a run they were not made for (another batch, length, or a missing hook point)."""


class RegistryError(TensorLensError, LookupError):
    """An unknown method, or a name that another method already has."""


class MethodError(TensorLensError, RuntimeError):
    """A registered method or a function raised an error that is none of this library's; names the method."""


class SizeError(TensorLensError, MemoryError):
    """A result would be larger than the stated limit."""


class FileFormatError(TensorLensError, ValueError):
    """A file is not an Attribution of this library, is damaged, or comes from a newer version."""


class ConformanceError(TensorLensError, AssertionError):
    """A map, method or model does not hold what the battery of `tensorlens_tl.testing` asks of it."""


INSIDE = {"tensorlens_tl", "jaxtyping", "beartype", "contextlib", "functools"}
"""Packages whose calls stand between a user's line and a warning: ours, and those that wrap ours."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line outside of this package that led here."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
