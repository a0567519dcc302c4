"""The interface that operators and targets need from a model held fixed as an affine map: a linearisation.

A linearisation provides a map of every block that is exact at one point, the input vectors there, and a number of the
model that the sum over the input must equal. The operator and its targets need no more; methods and circuits still take
a `FrozenPass`. The frozen pass of one run is a linearisation: its block maps are affine, its input is the residual
stream at the first block, its constants are biases, and the sum is a logit.

Passes of one model share its `ModelView`, which reads weights when they are first needed, until the model changes, even
across the batches of a data set.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain
from tensorlens_tl.algebra.numerics import refuse_nan
from tensorlens_tl.errors import GapWarning, InvalidInputError, NumericalError, warn_caller
from tensorlens_tl.hooks import ModelPoints, hook_numbers, lock_of, model_points
from tensorlens_tl.models import FrozenRule, Layout, ModelView
from tensorlens_tl.models.lifecycle import WeightState, configuration
from tensorlens_tl.models.offload import whole
from tensorlens_tl.passes.block_maps import Blocks
from tensorlens_tl.passes.inputs import Prompt


@runtime_checkable
class HasGap(Protocol):
    """A result whose parts sum to a number of the model."""

    @property
    def gap(self) -> Any:
        """The difference of sum and number, relative to the size of the parts."""
        ...


SumType = TypeVar("SumType", bound=HasGap)


@dataclass(frozen=True, eq=False, repr=False)
class Linearisation(ABC):
    """Block maps that are exact at one point, with their input.

    Attributes:
        maps: the parts of every block; ``maps.capture`` is the run that defines positions, the first of two runs.
    """

    maps: Blocks

    @property
    def view(self) -> ModelView:
        """The reader of the weights of the model, the first of two."""
        return self.maps.view

    @property
    def points(self) -> ModelPoints:
        """The hook points whose activations were captured, in the first of two models."""
        return self.maps.capture.points

    @property
    def prompt(self) -> Prompt:
        """Tokens `[batch, pos]`, mask, keyword arguments and readable tokens, of the first of two runs."""
        return self.maps.capture.prompt

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """Token ids, of the first of two runs; for images and sound, position numbers."""
        return self.maps.capture.tokens

    @property
    def mask(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens, the same in two runs."""
        return self.maps.capture.mask

    @property
    def n_layers(self) -> int:
        """The number of blocks."""
        return self.maps.capture.n_layers

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each block: how it is composed."""
        return self.maps.layouts

    @property
    def sides(self) -> tuple[int, int] | None:
        """The numbers of encoder and decoder positions, in this order; None if there is one stack."""
        return self.maps.capture.sides

    @property
    def row_bytes(self) -> int:
        """The maximal bytes that one vector allocates on its way through the blocks."""
        return self.maps.row_bytes

    @property
    @abstractmethod
    def tolerance(self) -> float:
        """The largest error that the proof of a map allows."""

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether no layer passes anything from a position to an earlier one."""

    @property
    @abstractmethod
    def soft_cap(self) -> float | None:
        """The cap c of c·tanh(x/c) that follows the explained number x in the model; None without a cap."""

    @property
    @abstractmethod
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The output of all maps: after the final norm, or the last block's output."""

    @abstractmethod
    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return the input of a block; ``layer == n_layers`` is the last block's output."""

    @abstractmethod
    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """Return the stream that the model unembeds."""

    def stages(
        self, layers: range, *, rule: FrozenRule, heads: Mapping[int, Collection[int]], mlp: Collection[int]
    ) -> list[AffineMap]:
        """Return consecutive blocks as maps to be applied one after the other.

        Args:
            layers: the blocks.
            rule: the rule for MLPs.
            heads: the heads of self-attention to keep, for some layers.
            mlp: the layers whose MLPs are kept.
        """
        return self.maps.stages(layers, rule=rule, heads=heads, mlp=mlp)

    def final_map(self) -> AffineMap | None:
        """Return the map after the last block, the final norm, or None."""
        return self.maps.final_map()

    def prediction_head(self, rule: FrozenRule = "frozen") -> Chain | None:
        """Return the map between the model's output and its unembedding, or None."""
        return self.maps.prediction_head(rule)

    @abstractmethod
    def logit_vectors(
        self, ids: Int[Tensor, "batch query"], positions: Int[Tensor, "batch query"]
    ) -> tuple[Float[Tensor, "batch query d_model"], Float[Tensor, "batch query"]]:
        """Return the directions of some tokens' logits in the unembedded stream, and their constants."""

    @abstractmethod
    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if the model has changed since the maps were made."""

    @property
    def runs(self) -> "tuple[Linearisation, ...]":
        """The underlying runs: itself, or the two whose difference it is, the first minus the second."""
        return (self,)

    def noise(self, unembedded: bool) -> Float[Tensor, "batch pos"] | None:
        """Return the length of possible rounding errors in `output`, or in the unembedded stream.

        None for one run, in which rounding is small. A difference of two runs may itself be rounding.
        """
        return None

    # ------------------------------------------------------------------ the gaps of sums

    @property
    @abstractmethod
    def allowed_gap(self) -> float:
        """The largest gap allowed for a sum: the tolerance of a block, or the total error of all blocks if larger."""

    @property
    @abstractmethod
    def is_strict(self) -> bool:
        """Whether a gap above `allowed_gap` is an error instead of a warning."""

    @abstractmethod
    def _missed(self, parts: str, gap: float) -> str:
        """Return the message for a sum of `parts`, such as ``"Terms"``, with a gap above `allowed_gap`."""

    def checked(self, result: SumType, noise: Float[Tensor, "..."] | float = 0.0) -> SumType:
        """Return a sum computed from these maps, unchanged, after checking its gap.

        Warns (`GapWarning`) if the gap minus the `noise`, two runs' rounding, is above `allowed_gap`: a difference
        that is itself rounding is not an error of the maps. The reported gap includes the noise.

        Raises:
            NumericalError: instead of the warning, if a run was frozen with ``strict=True``; or the gap is NaN.
        """
        parts = type(result).__name__
        gap = float((torch.as_tensor(result.gap) - noise).max())
        refuse_nan(f"the gap of these {parts}", gap)
        if gap <= self.allowed_gap:
            return result
        if self.is_strict:
            raise NumericalError(self._missed(parts, gap))
        warn_caller(self._missed(parts, gap), GapWarning)
        return result


def check_explained(frozen: Any) -> None:
    """Raise `InvalidInputError` unless the argument is a frozen pass or the difference of two."""
    if not isinstance(frozen, Linearisation):
        raise InvalidInputError(
            f"a frozen pass is needed, got {type(frozen).__name__}: tlens.freeze(model, text) returns one."
        )


@dataclass(frozen=True, eq=False)
class Reading:
    """The state of a model when it was read.

    Attributes:
        weights: the state of its weights.
        configuration: the settings that determine its outputs besides weights.
        hooks: the user-installed hooks on it.
        modes: the modes and classes of its modules, and whether it shows the heads' outputs.
        tokenizer: its tokenizer.
    """

    weights: WeightState
    configuration: Mapping[str, str]
    hooks: frozenset[int]
    modes: tuple[Any, ...]
    tokenizer: Any

    @classmethod
    def of(cls, model: Any) -> "Reading":
        """Return the current state of a model."""
        tokenizer = getattr(model, "tokenizer", None)
        with lock_of(model):
            weights = WeightState.of(model)
            return cls(weights, configuration(model), hook_numbers(model), _modes(model), tokenizer)

    def equals(self, other: "Reading") -> bool:
        """Return whether two states are equal: what a frozen pass checks, plus hooks and modes."""
        return (
            self.weights.equals(other.weights)
            and self.configuration is other.configuration
            and self.hooks == other.hooks
            and self.modes == other.modes
            and self.tokenizer is other.tokenizer
        )


def _modes(model: Any) -> tuple[Any, ...]:
    """Return further state that affects reading: whether the model shows heads' outputs, and the state of every module.

    A module has a mode (RWKV halves its stream in eval mode), a class, and possibly another forward or activation.
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
    """Share the reading of a model among passes frozen inside, until its state changes; it is dropped afterwards.

    Elsewhere a pass shares the reading of another pass that still exists. Every pass is verified against the model's
    own run in any case.

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
    """Return a model's view for properties that do not depend on weights, such as lengths and memory of prompts.

    Raises:
        UnsupportedModelError, InvalidInputError: as `ModelView`.
    """
    held = _held.get()
    if held and held[0].model is model:
        return held[0]
    return ModelView(model)


def shared_view(view: ModelView) -> tuple[ModelView, WeightState]:
    """Return the view of a model's last pass if the model is unchanged, else this one; and its weights' state.

    A view with offloaded weights is only shared inside `one_reading`, as two threads may load them at once.
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
    """Return a view's hook points, cached for a shared view.

    Raises:
        UnsupportedModelError: as `model_points`.
    """
    if view not in _readings:
        return model_points(view)
    if view not in _points:
        _points[view] = model_points(view)
    return _points[view]
