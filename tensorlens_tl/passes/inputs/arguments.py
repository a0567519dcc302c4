"""What may be passed as input, and the option strings of `freeze`.

As in `tensorlens_tl.models.protocol`, the aliases tell a type checker what may be passed; at run time they are `Any`,
because our own errors say what is wrong with an argument.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from numpy.typing import NDArray
    from torch import Tensor
    from transformer_lens import ActivationCache

    InputLike = str | Tensor | NDArray[Any] | Sequence[object] | Mapping[str, Any]
    """Text, messages of a chat, token ids, what a tokenizer returns, or the values of images and sound; one prompt or
    several."""

    Chat = Sequence[Mapping[str, Any]]
    """Messages, a ``{"role": ..., "content": ...}`` each."""

    IdsLike = Tensor | NDArray[Any] | Sequence[int] | Sequence[Sequence[int]] | None
    """Integers of each token: a mask, or segments."""

    ModelInputs = Mapping[str, object] | None
    """What a multimodal model's forward takes besides tokens, by name."""

    Side = Literal["left", "right"] | None
    """Where padding stands; None for the right."""

    Store = Literal["model", "cpu"]
    """Where activations are stored."""

    Patterns = Literal["keep", "recompute"]
    """Whether patterns are stored, or recomputed."""

    CacheLike = Mapping[str, Tensor] | ActivationCache | None
    """Activations of an earlier run, by hook-point name."""

    Tolerance = float | None
    """The largest relative error; None for the default of the dtype."""

    Verify = bool | Literal["sample"]
    """Whether every block is proved: at every position, or at a few."""
else:
    InputLike = Chat = IdsLike = ModelInputs = Side = Store = Patterns = CacheLike = Tolerance = Verify = Any
