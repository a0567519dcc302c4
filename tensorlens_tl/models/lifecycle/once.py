"""What is found out about a model once, and again when its weights are others."""

from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from tensorlens_tl.models.lifecycle.weight_state import WeightState
from tensorlens_tl.models.protocol import HookedModel

Value = TypeVar("Value")


class OncePerWeights(Generic[Value]):
    """One value for each model, which holds as long as its weights have the versions that they had.

    A model is held weakly: its value goes with it. Weights whose versions are unknown (those of a copied pass) have no
    value, and none is stored for them.

    >>> from tensorlens_tl.models.lifecycle import OncePerWeights
    >>> layouts = OncePerWeights()
    >>> layouts.set(model, frozen.capture.weights, "pre")
    >>> layouts.get(model, frozen.capture.weights)
    'pre'
    """

    def __init__(self) -> None:
        self._stored: WeakKeyDictionary[nn.Module | HookedModel, tuple[list[tuple[object, ...]], Value]] = (
            WeakKeyDictionary()
        )

    def get(self, model: nn.Module | HookedModel, weights: WeightState) -> Value | None:
        """The value that was stored for a model with these weights.

        Args:
            model: whose value it is.
            weights: the model's weights now.

        Returns:
            The value; None where none was stored, or for other weights.
        """
        versions, value = self._stored.get(model, (None, None))
        return value if versions is not None and versions == weights.versions else None

    def set(self, model: nn.Module | HookedModel, weights: WeightState, value: Value) -> None:
        """Store a value, in place of any other one of this model.

        Args:
            model: whose value it is.
            weights: the weights that it holds for.
            value: what `get` gives from now on.
        """
        if weights.versions is not None:
            self._stored[model] = (weights.versions, value)
