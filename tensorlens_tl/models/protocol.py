"""What a model must be able to do, and the kinds of argument that many functions share.

Models are typed by what they can do, never by their class: HookedTransformer does not exist in TransformerLens 4. The
aliases tell a type checker, and whoever reads a signature, what may be passed; at run time they are `Any`, so that
`tensorlens_tl._arguments.checked_arguments` leaves them to the functions that read them: those refuse with the names of
the values, the model's layers or positions, and what to pass, which a type cannot say.
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

    if TYPE_CHECKING:  # not asked for at run time: a Bridge makes the dictionary anew for each such question

        @property
        def hook_dict(self) -> Mapping[str, Any]:
            """Hook points by name."""
            ...

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Run once, with ``fwd_hooks=[(name, function), ...]``."""
        ...

    def hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """The same hooks, inside a ``with`` block."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights."""
        ...


class Relative(Enum):
    """Targets that depend on the query."""

    NEXT = "next"

    def __repr__(self) -> str:
        return self.name


NEXT = Relative.NEXT
"""As a target: every query asks for its own next token, the one that follows it in the prompt."""

FIRST_CHOICE = "first-choice"
"""As `target=` (or `minus=`): at each query the token of largest logit, which the model predicts."""

RUNNER_UP = "runner-up"
"""As `minus=`: at each query the token of largest logit besides the target."""

if TYPE_CHECKING:
    ModelLike = HookedModel
    """A model, as a user passes it."""

    TokenLike = str | int | Tensor | Sequence[str | int] | Sequence[Sequence[str | int]] | Literal[Relative.NEXT] | None
    """A token as text, id or `FIRST_CHOICE`; one for each prompt; one for each query, `[batch][query]`; or `NEXT`."""

    Query = int | str | slice | Sequence[int | str] | Tensor
    """Positions, counted over each prompt's real tokens: one, a list or a slice of them, a text, or "all" of them."""

    Direction = Tensor | None
    """A vector `[d_model]`, one for each prompt, `[batch, d_model]`, or for each query, `[batch, query, d_model]`."""

    HeadChoice = Mapping[int, Collection[int]] | None
    """Layer → the heads that stay; a layer that is not named keeps all."""

    MlpChoice = bool | Collection[int]
    """Whether MLPs stay, or the layers whose MLPs do."""

    LayerRange = slice | Sequence[int] | None
    """Consecutive layers, None for all."""

    Device = str | torch.device | None
else:
    ModelLike = TokenLike = Query = Direction = HeadChoice = MlpChoice = LayerRange = Device = Any
