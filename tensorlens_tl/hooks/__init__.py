"""Where TransformerLens lets us look and hold on: hook points, capture, freezing, and which hooks are on a model."""

from tensorlens_tl.hooks.capture import capture, check_finite, from_cache, only_at
from tensorlens_tl.hooks.freeze import FwdHook, attention_hooks, mlp_hooks, patterns_take_effect, replace
from tensorlens_tl.hooks.inspection import PlacedHook, hooks_on, is_attached, other_hooks, refuse_attached
from tensorlens_tl.hooks.points import BlockPoints, ModelPoints, model_points

__all__ = [
    "BlockPoints",
    "FwdHook",
    "ModelPoints",
    "PlacedHook",
    "attention_hooks",
    "capture",
    "check_finite",
    "from_cache",
    "hooks_on",
    "is_attached",
    "mlp_hooks",
    "model_points",
    "only_at",
    "other_hooks",
    "patterns_take_effect",
    "refuse_attached",
    "replace",
]
