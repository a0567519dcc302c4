"""What state a model is in: its weights, its configuration, and what its checkpoint left out."""

from tensorlens_tl.models.lifecycle.checkpoint import Untrained
from tensorlens_tl.models.lifecycle.copies import copied
from tensorlens_tl.models.lifecycle.once import OncePerWeights
from tensorlens_tl.models.lifecycle.settings import changed, compact, configuration
from tensorlens_tl.models.lifecycle.weight_state import (
    WeightState,
    fingerprint,
    refuse_devices,
    refuse_dropout,
    sampled,
)

__all__ = [
    "OncePerWeights",
    "Untrained",
    "WeightState",
    "changed",
    "compact",
    "configuration",
    "copied",
    "fingerprint",
    "refuse_devices",
    "refuse_dropout",
    "sampled",
]
