"""The live model: held fixed by hooks, or run with something changed in copies of its prompts."""

from tensorlens_tl.passes.live.holding import holding_hooks, prove_obedience
from tensorlens_tl.passes.live.layers import EarlierLayers, one_copy_attends, replace_forward, rows_of
from tensorlens_tl.passes.live.runs import Copies, LiveModel, repeated

__all__ = [
    "Copies",
    "EarlierLayers",
    "LiveModel",
    "holding_hooks",
    "one_copy_attends",
    "prove_obedience",
    "repeated",
    "replace_forward",
    "rows_of",
]
