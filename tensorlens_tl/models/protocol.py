"""What a model must be able to do, and the argument types that many functions share.

Models are typed by what they can do, never by their class, since HookedTransformer does not exist in TransformerLens 4.
The type aliases document arguments for type checkers and readers. At run time they are `Any`, so that
`tensorlens_tl._arguments.checked_arguments` leaves the check to the functions themselves, whose messages can name
values, layers or positions.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class HookedModel(Protocol):
    """Any TransformerLens model: HookedTransformer, HookedEncoder, HookedEncoderDecoder, TransformerBridge.

    >>> from tensorlens_tl.models import HookedModel
    >>> isinstance(model, HookedModel), isinstance("gpt2", HookedModel)
    (True, False)
    """

    cfg: Any

    if TYPE_CHECKING:  # not at run time: a Bridge would rebuild the dictionary for every isinstance check

        @property
        def hook_dict(self) -> Mapping[str, Any]:
            """Hook points by name."""
            ...

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Run once, with ``fwd_hooks=[(name, function), ...]``."""
        ...

    def hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Attach the same hooks inside a ``with`` block."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the weights."""
        ...


class Relative(Enum):
    """Targets that are defined relative to the query."""

    NEXT = "next"

    def __repr__(self) -> str:
        return self.name


NEXT = Relative.NEXT
"""As a target: each query's own next token, the one that follows it in the prompt."""

FIRST_CHOICE = "first-choice"
"""As `target=` (or `minus=`): the token with the largest logit at each query, which the model predicts."""

RUNNER_UP = "runner-up"
"""As `minus=`: the token with the largest logit other than the target, at each query."""

if TYPE_CHECKING:
    ModelLike = HookedModel
    """A model, as users pass it."""

    TokenLike = str | int | Tensor | Sequence[str | int] | Sequence[Sequence[str | int]] | Literal[Relative.NEXT] | None
    """A token as text, id or `FIRST_CHOICE`; one for each prompt; one for each query, `[batch][query]`; or `NEXT`."""

    Query = int | str | slice | Sequence[int | str] | Tensor
    """Positions, counted over each prompt's real tokens: one, a list or a slice of them, a text, or "all" of them."""

    Direction = Tensor | None
    """A vector `[d_model]`, one for each prompt, `[batch, d_model]`, or for each query, `[batch, query, d_model]`."""

    HeadChoice = Mapping[int, Collection[int]] | None
    """Layer → the heads to keep; layers that are not named keep all."""

    MlpChoice = bool | Collection[int]
    """Whether to keep MLPs, or the layers whose MLPs to keep."""

    LayerRange = slice | Sequence[int] | None
    """Consecutive layers; None for all."""

    Device = str | torch.device | None
else:
    ModelLike = TokenLike = Query = Direction = HeadChoice = MlpChoice = LayerRange = Device = Any
