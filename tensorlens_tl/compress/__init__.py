"""Compressing a model's attention, and measuring what is lost: TensorLLM and its baselines.

>>> import tensorlens_tl as tlens
>>> from tensorlens_tl import compress
>>> model = tlens.load_demo_model()
>>> plan = compress.plan(model, ratio=2, method="circuit-svd")
>>> plan.ratio, list(plan.layers)
(2.0, [0, 1, 2, 3])

| module | question |
| --- | --- |
| `heads` | how are a layer's heads read, stacked and factorised, which ranks are best, and do heads share a subspace? |
| `methods` | what does each method keep of a layer, and which dense weights does that stand for? |
| `plan` | how is a model compressed, and how does it get its own weights back? |
| `effect` | how does a compression change one prediction? |
"""

from tensorlens_tl.compress.effect import CompressionEffect, Sharing, Split, compression_effect, sharing
from tensorlens_tl.compress.heads import (
    HOSVD,
    LAYOUTS,
    HeadWeights,
    Tucker,
    head_weights,
    hooi,
    in_circuit_gauge,
    paper_ranks,
    parameter_count,
    rotate_heads,
    sequential_hosvd,
    stack_heads,
)
from tensorlens_tl.compress.methods import (
    METHODS,
    Dense,
    LowRank,
    Replacement,
    SharedTucker,
    circuit_svd,
    head_svd,
    laser,
    laser_mlp,
    tucker,
)
from tensorlens_tl.compress.plan import Plan, plan, shared_tucker

__all__ = [
    "HOSVD",
    "LAYOUTS",
    "METHODS",
    "CompressionEffect",
    "Dense",
    "HeadWeights",
    "LowRank",
    "Plan",
    "Replacement",
    "SharedTucker",
    "Sharing",
    "Split",
    "Tucker",
    "circuit_svd",
    "compression_effect",
    "head_svd",
    "head_weights",
    "hooi",
    "in_circuit_gauge",
    "laser",
    "laser_mlp",
    "paper_ranks",
    "parameter_count",
    "plan",
    "rotate_heads",
    "sequential_hosvd",
    "shared_tucker",
    "sharing",
    "stack_heads",
    "tucker",
]
