"""Attribution methods, one file each; importing this package registers them.

A method is a function of a frozen pass with its options as keywords, and has a name for `attribute`:

    >>> tlens.methods.globenc(frozen, normalize=True, query=-1)
    Attribution('globenc', batch=1, query=1, key=7)

Methods document only their own options. What they share:

* `frozen` is the pass, or for some methods the difference of two.
* `query` chooses positions, ``"all"`` or -1 for the last real token; see `tensorlens_tl.passes.inputs.query_positions`.
* `target` and `minus` are a token, and one to subtract: one for all, one per prompt, or one per query
  (``[batch][query]``).
* `memory` is how much may be allocated at once, as ``"512MB"`` or bytes.
* They return scores `[batch, query, key]`, each layer's map in `layers` if there is one, and for an explained logit its
  total, bias and gap `[batch, query]`.
* `InvalidInputError` is raised for an unknown option, several or no tokens as target, or a query out of range;
  `UnsupportedModelError` if a model lacks what the method needs (`docs/support.md`); `FrozenModelError`, by methods
  that run the model again, if it no longer reproduces the pass or a frozen pass is attached to it; and
  `NumericalError` if gradients are not finite, as with padding on the left in some models.
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
