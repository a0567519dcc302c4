"""Attribution methods, one file each; importing this package registers them."""

from tensorlens_tl.methods import contextualisation
from tensorlens_tl.methods.alti import alti
from tensorlens_tl.methods.attention import attention
from tensorlens_tl.methods.decompx import decompx
from tensorlens_tl.methods.ff_ig import ff_ig
from tensorlens_tl.methods.globenc import globenc
from tensorlens_tl.methods.gradients import input_x_gradient, integrated_gradients
from tensorlens_tl.methods.norm import head_norms, mixing_ratio, norm
from tensorlens_tl.methods.rollout import mean, rollout
from tensorlens_tl.methods.tensorlens import tensorlens

__all__ = [
    "alti",
    "attention",
    "contextualisation",
    "decompx",
    "ff_ig",
    "globenc",
    "head_norms",
    "input_x_gradient",
    "integrated_gradients",
    "mean",
    "mixing_ratio",
    "norm",
    "rollout",
    "tensorlens",
]
