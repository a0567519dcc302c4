"""Where TransformerLens lets us look and hold on: hook-point names, capture, and freezing."""

from tensorlens_tl.hooks.capture import capture, capture_before, check_finite, from_cache, only_at, run_until
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
    "capture_before",
    "check_finite",
    "from_cache",
    "is_attached",
    "mlp_hooks",
    "model_points",
    "only_at",
    "patterns_take_effect",
    "refuse_attached",
    "replace",
    "run_until",
]
