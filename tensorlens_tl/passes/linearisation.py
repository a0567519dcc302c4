"""What operators and targets need of a model that is held fixed as an affine map: a linearisation.

A linearisation gives every block a map that is exact at one point, a vector that enters, and a number of the model
that a sum over what enters must equal. The operator and its targets need no more; methods and circuits still take a
`FrozenPass`. The frozen pass of one run is a linearisation: its block maps are affine, the residual stream at the first
block enters, biases are the constants, and the sum is a logit.

Passes of one model share its `ModelView` as long as the model stays what it was: it reads weights when they are first
needed, also for every batch of a data set.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary, ref

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import ModelPoints, hook_numbers, lock_of, model_points
from tensorlens_tl.models import FrozenRule, ModelView
from tensorlens_tl.models.lifecycle import WeightState, configuration
from tensorlens_tl.models.offload import whole
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
        self, layers: range, *, rule: FrozenRule, heads: Mapping[int, Collection[int]], mlp: Collection[int]
    ) -> list[AffineMap]:
        """Consecutive blocks as maps that follow each other.

        Args:
            layers: which.
            rule: the rule for MLPs.
            heads: of some layers, the heads of self-attention to keep.
            mlp: the layers whose MLPs are kept.
        """

    @abstractmethod
    def final_map(self) -> AffineMap | None:
        """What follows the last block: the final norm, or None."""

    @abstractmethod
    def prediction_head(self, rule: FrozenRule = "frozen") -> Chain | None:
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


@dataclass(frozen=True, eq=False)
class Reading:
    """The state that a model was in when it was read.

    Attributes:
        weights: what its weights were.
        configuration: what decided its numbers besides them.
        hooks: which user-installed hooks were on it.
        modes: what its modules were, and whether it showed what heads write.
        tokenizer: what read its prompts.
    """

    weights: WeightState
    configuration: Mapping[str, str]
    hooks: frozenset[int]
    modes: tuple[Any, ...]
    tokenizer: Any

    @classmethod
    def of(cls, model: Any) -> "Reading":
        """The state of a model now."""
        tokenizer = getattr(model, "tokenizer", None)
        with lock_of(model):
            weights = WeightState.of(model)
            return cls(weights, configuration(model), hook_numbers(model), _modes(model), tokenizer)

    def equals(self, other: "Reading") -> bool:
        """Whether the model was the same twice: what a frozen pass checks of it, and its hooks and modes besides."""
        return (
            self.weights.equals(other.weights)
            and self.configuration is other.configuration
            and self.hooks == other.hooks
            and self.modes == other.modes
            and self.tokenizer is other.tokenizer
        )


def _modes(model: Any) -> tuple[Any, ...]:
    """What else changes how a model is read: whether it shows what heads write, and every module.

    A module has a mode (RWKV halves its stream in eval mode), a class, and perhaps another forward or activation.
    """
    shows_heads = bool(getattr(model.cfg, "use_attn_result", False))
    return (shows_heads, *map(_mode, whole(model)))


def _mode(module: nn.Module) -> tuple[Any, ...]:
    replaced = vars(module)
    return module.training, type(module), replaced.get("forward"), replaced.get("act_fn")


_views: "WeakKeyDictionary[Any, ref[ModelView]]" = WeakKeyDictionary()  # by model, the last one
_readings: "WeakKeyDictionary[ModelView, Reading]" = WeakKeyDictionary()
_points: "WeakKeyDictionary[ModelView, ModelPoints]" = WeakKeyDictionary()
_held: ContextVar[list[ModelView] | None] = ContextVar("held", default=None)


@contextmanager
def one_reading() -> Generator[None, None, None]:
    """Passes that are frozen inside share the reading of their model until its state changes; nothing is left after.

    Elsewhere a pass shares the reading of another that is still there. Every pass is proved against the model's own
    run all the same.

    >>> from tensorlens_tl.passes import one_reading
    >>> with one_reading():
    ...     first, second = tlens.freeze(model, text), tlens.freeze(model, "for x in")
    >>> first.view is second.view
    True
    """
    token = _held.set([])
    try:
        yield
    finally:
        _held.reset(token)


def unchecked_view(model: Any) -> ModelView:
    """A model's view for what depends on no weight, such as the lengths of prompts and the memory that they take.

    Raises:
        UnsupportedModelError, InvalidInputError: as `ModelView`.
    """
    held = _held.get()
    if held and held[0].model is model:
        return held[0]
    return ModelView(model)


def shared_view(view: ModelView) -> tuple[ModelView, WeightState]:
    """The view of a model's last pass where the model is what it was, else this one; and its weights' state.

    A view whose weights are brought in is shared inside `one_reading` alone: two threads may bring them in at once.
    """
    model = view.model
    reading = Reading.of(model)
    held = _held.get()
    if held is not None or not (view.any_offloaded or view.any_moved):
        last = _views.get(model, lambda: None)()
        if last is not None and reading.equals(_readings[last]):
            view = last
        _views[model] = ref(view)
    reading = _readings.setdefault(view, reading)
    if held is not None:
        held[:] = [view]
    return view, reading.weights


def points_of(view: ModelView) -> ModelPoints:
    """A view's hook points: of a shared reading those that it has already.

    Raises:
        UnsupportedModelError: as `model_points`.
    """
    if view not in _readings:
        return model_points(view)
    if view not in _points:
        _points[view] = model_points(view)
    return _points[view]
