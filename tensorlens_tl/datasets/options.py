"""How a run over a data set reads its rows, cuts them into batches and writes them; what is computed is a `Work`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelLike

UNKNOWN_ID = "id"
"""The column of ids that may be missing: rows are then known by their number."""

if TYPE_CHECKING:
    Engine = Literal["ray"] | None
    """Where a run computes: None in this process, or on the actors of a Ray cluster."""

    LoadModel = Callable[[], ModelLike]
    """A function without arguments that loads the model."""
else:
    Engine = LoadModel = Any  # our own errors say what is wrong with an argument


@dataclass(frozen=True)
class Reading:
    """How rows become prompts; see `attribute_dataset` for each option."""

    text: str = "text"
    id: str = UNKNOWN_ID
    columns: Mapping[str, str] | None = None
    truncate: bool = False
    prepend_bos: bool | None = None


@dataclass(frozen=True)
class RunOptions:
    """How a run is read, cut into batches and written; see `attribute_dataset` for each option.

    Nothing here is part of a run's identity but what it makes of the rows: a run may be resumed in other batches, with
    or without a bar, here or on Ray.

    Raises:
        InvalidInputError: a number of tokens below 1, an unknown engine, or a file where the folder should be.
    """

    out: str | PathLike[str]
    reading: Reading = Reading()
    tokens_per_batch: int = 8192
    resume: bool = True
    progress: bool = True
    engine: Engine = None
    load_model: LoadModel | None = None
    num_actors: int = 1
    num_gpus: float | int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_batch", whole_number("tokens_per_batch", self.tokens_per_batch, 1))
        if self.engine not in (None, "ray"):
            raise InvalidInputError(f"engine={self.engine!r}; use None for this process, or 'ray'.")
        if Path(self.out).is_file():
            raise InvalidInputError(f"out={self.out}: that is a file; name a folder.")
