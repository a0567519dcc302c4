"""The live model: held fixed by hooks, or run with something changed in copies of its prompts."""

from tensorlens_tl.passes.live.holding import holding_hooks, prove_obedience
from tensorlens_tl.passes.live.layers import EarlierLayers
from tensorlens_tl.passes.live.runs import Copies, LiveModel, repeated

__all__ = [
    "Copies",
    "EarlierLayers",
    "LiveModel",
    "holding_hooks",
    "prove_obedience",
    "repeated",
]
