"""Runs of the live model with nodes changed, one in each copy of the prompts, and its gradients at nodes."""

from tensorlens_tl.circuits.live.changes import NodeChange, losses, sublayer_nodes
from tensorlens_tl.circuits.live.gradients import NodeGradients, refuse_other_values
from tensorlens_tl.circuits.live.target import LiveTarget

__all__ = [
    "LiveTarget",
    "NodeChange",
    "NodeGradients",
    "losses",
    "refuse_other_values",
    "sublayer_nodes",
]
