"""The kinds of argument that several compressions share.

As those of `tensorlens_tl.models.protocol` they tell a type checker what may be passed, and are `Any` at run time: what
is wrong with an argument is said by the function that reads it, in the library's own errors.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    Number = float | torch.Tensor | None
    """A number of any kind (numpy's and torch's too), or None where another option says it."""

    Count = int | torch.Tensor | None
    """An integer of any kind."""

    RankChoice = Sequence[int] | torch.Tensor | None
    """(R1, R2, R3), or None."""

    Layers = int | slice | Sequence[int] | set[int] | None
    """A layer, several, a slice, or None for all."""

    MLPShare = float | Mapping[str, float] | None
    """LASER's ρ for all of an MLP's matrices, or by name."""

    RankRule = Literal["free", "paper"]
    Layout = Literal["paper", "released"]
    Gauge = Literal["circuit"] | None
    Start = Literal["hosvd", "sequential"]
else:
    Number = Count = RankChoice = Layers = MLPShare = RankRule = Layout = Gauge = Start = Any
