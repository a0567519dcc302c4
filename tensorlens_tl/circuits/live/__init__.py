"""Runs of the live model with nodes changed, one in each copy of the prompts: ablation and activation patching."""

from tensorlens_tl.circuits.live.changes import NodeChange, losses, sublayer_nodes
from tensorlens_tl.circuits.live.target import LiveTarget

__all__ = [
    "LiveTarget",
    "NodeChange",
    "losses",
    "sublayer_nodes",
]
