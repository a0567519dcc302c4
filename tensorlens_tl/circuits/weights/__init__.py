"""OV and QK circuits read from the weights, and how heads compose (Elhage et al. 2021)."""

from tensorlens_tl.circuits.weights.composition import composition_scores
from tensorlens_tl.circuits.weights.ov_qk import (
    as_pass,
    as_view,
    copying_scores,
    full_ov,
    full_qk,
    ov,
    ov_eigenvalues,
    qk,
    stream_unembedding,
    svd_tokens,
    virtual_head,
)

__all__ = [
    "as_pass",
    "as_view",
    "composition_scores",
    "copying_scores",
    "full_ov",
    "full_qk",
    "ov",
    "ov_eigenvalues",
    "qk",
    "stream_unembedding",
    "svd_tokens",
    "virtual_head",
]
