"""Attribution methods, one file each; importing this package registers them.

A method is a function of a frozen pass with its options as keywords, beside its name for `attribute`:

    >>> tlens.methods.globenc(frozen, normalize=True, query=-1)
    Attribution('globenc', batch=1, query=1, key=7)
"""

from tensorlens_tl.methods import contextualisation
from tensorlens_tl.methods.alti import alti
from tensorlens_tl.methods.alti_logit import alti_logit
from tensorlens_tl.methods.attention import attention
from tensorlens_tl.methods.chefer import chefer
from tensorlens_tl.methods.decompx import decompx
from tensorlens_tl.methods.difference import difference
from tensorlens_tl.methods.ff_ig import ff_ig
from tensorlens_tl.methods.globenc import globenc
from tensorlens_tl.methods.gradients import input_x_gradient, integrated_gradients
from tensorlens_tl.methods.ifr import FlowEdges, flow_edges, ifr
from tensorlens_tl.methods.leave_one_out import leave_one_out
from tensorlens_tl.methods.norm import head_norms, mixing_ratio, norm
from tensorlens_tl.methods.rollout import mean, rollout
from tensorlens_tl.methods.rules import attnlrp, cp_lrp, gim, relp
from tensorlens_tl.methods.tensorlens import tensorlens
from tensorlens_tl.methods.value_zeroing import value_zeroing

__all__ = [
    "FlowEdges",
    "alti",
    "alti_logit",
    "attention",
    "attnlrp",
    "chefer",
    "contextualisation",
    "cp_lrp",
    "decompx",
    "difference",
    "ff_ig",
    "flow_edges",
    "gim",
    "globenc",
    "head_norms",
    "ifr",
    "input_x_gradient",
    "integrated_gradients",
    "leave_one_out",
    "mean",
    "mixing_ratio",
    "norm",
    "relp",
    "rollout",
    "tensorlens",
    "value_zeroing",
]
