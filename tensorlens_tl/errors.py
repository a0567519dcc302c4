"""The library's errors. Each message says what was wrong, where, and what to do about it.

All derive from `TensorLensError`. Each also derives from the built-in error a caller would expect, so that
``except ValueError`` keeps working.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple


class PromptNumber(NamedTuple):
    """The part of a message that names a prompt, by its number in the batch."""

    number: int
    noun: str = "prompt"

    def __str__(self) -> str:
        return f"{self.noun} {self.number}"


class TensorLensError(Exception):
    """Base class of every error that this library raises on purpose.

    Args:
        *args: the message, or its parts in order; `PromptNumber` parts can be renamed by `with_prompts`.
    """

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    def with_prompts(self, names: Mapping[int, object]) -> "TensorLensError":
        """Return the same error with the prompts renamed: `names` maps their numbers in this message to other names."""
        return type(self)(
            *(names.get(part.number, part) if isinstance(part, PromptNumber) else part for part in self.args)
        )


class InvalidInputError(TensorLensError, ValueError):
    """An argument is out of range, of the wrong shape, empty, or names something that does not exist."""


class UnsupportedModelError(TensorLensError, NotImplementedError):
    """Part of the model cannot be read as an affine map; the message names the block and component."""


class NumericalError(TensorLensError, ArithmeticError):
    """Weights or activations contain NaN or Inf, so no exact map exists."""


class WrongCallError(InvalidInputError, TypeError):
    """A call has an unknown argument, too many arguments, or lacks a required one."""


class GapWarning(UserWarning):
    """A sum misses the model's own number by more than the pass's proof allows, or gradients lose precision."""


class UntrainedWarning(UserWarning):
    """The explained numbers depend on randomly initialised weights that the model's checkpoint does not contain."""


class FrozenModelError(TensorLensError, RuntimeError):
    """Frozen hooks run on an input they were not made for: another batch or length, or a missing hook point."""


class RegistryError(TensorLensError, LookupError):
    """A method is unknown, or its name is already taken."""


class MethodError(TensorLensError, RuntimeError):
    """A registered method or function raised an error that is not one of this library's; the message names it."""


class SizeError(TensorLensError, MemoryError):
    """A result would exceed the stated size limit."""


class FileFormatError(TensorLensError, ValueError):
    """A file was not written by this library, is damaged, or comes from a newer version."""


class ConformanceError(TensorLensError, AssertionError):
    """A map, method or model fails a check of `tensorlens_tl.testing`."""


INSIDE = {"tensorlens_tl", "jaxtyping", "beartype", "contextlib", "functools"}
"""Packages to skip when looking for the user's line to attach to a warning: ours, and those that wrap our functions."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, pointing at the first line outside this package in the call stack."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
