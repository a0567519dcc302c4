"""What operators and targets need of a model that is held fixed as an affine map: a linearisation.

A linearisation gives every block a map that is exact at one point, a vector that enters, and a number of the model
that a sum over what enters must equal. The operator and its targets need no more; methods and circuits still take a
`FrozenPass`. The frozen pass of one run is a linearisation: its block maps are affine, the residual stream at the first
block enters, biases are the constants, and the sum is a logit.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import Prompt


@runtime_checkable
class HasGap(Protocol):
    """A result whose parts explain a number of the model."""

    @property
    def gap(self) -> Any:
        """How far the parts are from the number, relative to their size."""
        ...


SumType = TypeVar("SumType", bound=HasGap)


class Linearisation(ABC):
    """Block maps that are exact at one point, and what they are applied to."""

    @property
    @abstractmethod
    def view(self) -> ModelView:
        """The reading of the model's weights."""

    @property
    @abstractmethod
    def prompt(self) -> Prompt:
        """Tokens `[batch, pos]`, mask, keyword arguments and readable tokens."""

    @property
    @abstractmethod
    def mask(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens."""

    @property
    @abstractmethod
    def n_layers(self) -> int:
        """The number of blocks."""

    @property
    @abstractmethod
    def tolerance(self) -> float:
        """The largest error that the proof of a map may show."""

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether no layer passes anything from a position to an earlier one."""

    @property
    @abstractmethod
    def sides(self) -> tuple[int, int] | None:
        """How many positions are an encoder's and a decoder's, in this order; None where there is one stack."""

    @property
    @abstractmethod
    def soft_cap(self) -> float | None:
        """The cap c of c·tanh(x/c) that the model's logit is after the number that sums give; None without."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """What one vector allocates at most on its way through the blocks."""

    @property
    @abstractmethod
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """What the maps give, one after the other: after the final norm, or the last block's output."""

    @abstractmethod
    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """What enters a block; ``layer == n_layers`` is the last block's output."""

    @abstractmethod
    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """What the model unembeds."""

    @abstractmethod
    def stages(
        self, layers: range, *, activation: str, heads: Mapping[int, Collection[int]], mlp: Collection[int]
    ) -> list[AffineMap]:
        """Consecutive blocks as maps that follow each other.

        Args:
            layers: which.
            activation: the rule for MLPs.
            heads: of some layers, the heads of self-attention to keep.
            mlp: the layers whose MLPs are kept.
        """

    @abstractmethod
    def final_map(self) -> AffineMap | None:
        """What follows the last block: the final norm, or None."""

    @abstractmethod
    def prediction_head(self, activation: str = "ratio") -> Chain | None:
        """What lies between the model's output and its unembedding; None where nothing does."""

    @abstractmethod
    def logit_vectors(
        self, ids: Int[Tensor, "batch query"], positions: Int[Tensor, "batch query"]
    ) -> tuple[Float[Tensor, "batch query d_model"], Float[Tensor, "batch query"]]:
        """The directions of some tokens' logits in what is unembedded, and their constants."""

    @abstractmethod
    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if the model is no longer the one that the maps belong to."""

    @property
    def runs(self) -> "tuple[Linearisation, ...]":
        """The runs that it is of: itself, or the two that it is the difference of, the first less the second."""
        return (self,)

    def noise(self, unembedded: bool) -> Float[Tensor, "batch pos"] | None:
        """The length of what rounding may leave in `output`, or in what is unembedded, beside its own size.

        None of one run, whose rounding is small beside what it has. A difference of two may itself be rounding.
        """
        return None

    @abstractmethod
    def checked(self, result: SumType, noise: Float[Tensor, "..."] | float = 0.0) -> SumType:
        """A sum computed from these maps, after a look at its gap: too large a one is a warning or an error.

        Args:
            result: the sum.
            noise: the part of its gap that rounding explains.
        """


def check_linearisation(frozen: Any) -> None:
    """Raise `InvalidInputError` where a model, or anything else, was passed instead of a frozen pass."""
    if not isinstance(frozen, Linearisation):
        raise InvalidInputError(
            f"a frozen pass is needed, got {type(frozen).__name__}: tlens.freeze(model, text) returns one."
        )
