"""Memory bounds: results that are too large raise an error, and work is cut into chunks of rows."""

import re
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl.algebra.progress import note_progress
from tensorlens_tl.errors import InvalidInputError, SizeError

if TYPE_CHECKING:
    Memory = int | str | None
    """A bound: bytes, or a text such as ``"512MB"``; None for `WORKING_BYTES`."""
else:
    Memory = Any  # `in_bytes` says what is wrong with a bound

WORKING_BYTES = 256 * 2**20
"""Default number of bytes that an operation may allocate beyond its result (`memory=`)."""

MOST_BYTES = 4 * 2**30
"""Size in bytes of the largest tensor that `slice`, `dense` and `contributions` return."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def in_bytes(memory: Memory) -> int:
    """Return a bound in bytes: an integer, or text such as ``"512MB"`` or ``"1.5GiB"``; None means `WORKING_BYTES`.

    Raises:
        InvalidInputError: `memory` cannot be read, or is not positive.
    """
    if memory is None:
        return WORKING_BYTES
    size = float("nan")
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B?)\s*", memory, flags=re.IGNORECASE)
        if match and match[2].upper() in UNITS:
            size = float(match[1]) * UNITS[match[2].upper()]
    elif isinstance(memory, Integral) and not isinstance(memory, bool):
        size = int(memory)
    if not size >= 1:
        raise InvalidInputError(f"memory={memory!r}: pass bytes, or a text such as '512MB' or '2GiB'.")
    return int(size)


def check_size(what: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise `SizeError` if a result would be larger than `MOST_BYTES`."""
    size = like.element_size()
    for length in shape:
        size *= length
    if size > MOST_BYTES:
        raise SizeError(
            f"{what}: the result {list(shape)} would take {size / 2**30:.1f} GiB, above the limit of "
            f"{MOST_BYTES / 2**30:.0f} GiB. Use a collapse (in_out, target, norm) or a shorter prompt, or raise "
            "tensorlens_tl.algebra.memory.MOST_BYTES."
        )


def chunks(rows: int, bytes_per_row: int, memory: Memory, what: str, parts: int = 1) -> Iterator[range]:
    """Yield at least `parts` ranges of rows that fit the bound, with a progress bar for long work.

    Raises:
        InvalidInputError: `memory` cannot be read.
        SizeError: a single row exceeds an explicit bound.
    """
    bound = in_bytes(memory)
    if memory is not None and bytes_per_row > bound:
        raise SizeError(
            f"{what}: one row of this prompt takes {bytes_per_row:,} bytes, more than memory={memory!r}. Raise "
            "it, or freeze fewer or shorter prompts at once."
        )
    step = max(1, min(bound // max(bytes_per_row, 1), -(-rows // parts)))
    starts = range(0, rows, step)
    bar = tqdm(starts, desc=what, leave=False, delay=2.0, disable=len(starts) < 4)
    return _noted((range(start, min(start + step, rows)) for start in bar), what, len(starts))


def slices(rows: int, bytes_per_row: int, memory: Memory, what: str, parts: int = 1) -> Iterator[slice]:
    """Yield the ranges of `chunks` as slices, which index a tensor without a copy."""
    return (slice(part.start, part.stop) for part in chunks(rows, bytes_per_row, memory, what, parts))


def _noted(ranges: Iterable[range], what: str, count: int) -> Iterator[range]:
    for number, rows in enumerate(ranges):
        if count > 1:
            note_progress(what, number / count)
        yield rows
    note_progress(what, 1.0)


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Join chunks of rows into one tensor; a single chunk is not copied."""
    first, *others = parts
    return torch.cat([first, *others]) if others else first
