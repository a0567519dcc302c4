"""Where TransformerLens lets us look and hold on: hook-point names, capture, and freezing."""

from tensorlens_tl.hooks.capture import capture, check_finite, from_cache, run_until
from tensorlens_tl.hooks.freeze import (
    attention_hooks,
    is_attached,
    mlp_hooks,
    patterns_take_effect,
    refuse_attached,
    replace,
)
from tensorlens_tl.hooks.points import BlockPoints, ModelPoints, model_points

__all__ = [
    "BlockPoints",
    "ModelPoints",
    "attention_hooks",
    "capture",
    "check_finite",
    "from_cache",
    "is_attached",
    "mlp_hooks",
    "model_points",
    "patterns_take_effect",
    "refuse_attached",
    "replace",
    "run_until",
]
