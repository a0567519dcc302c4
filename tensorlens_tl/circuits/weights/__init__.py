"""OV and QK circuits read from the weights, and how heads compose (Elhage et al. 2021)."""

from tensorlens_tl.circuits.weights.composition import composition_scores
from tensorlens_tl.circuits.weights.layer_weights import as_pass, as_view, stream_unembedding
from tensorlens_tl.circuits.weights.ov_qk import full_ov, full_qk, ov, qk, virtual_head
from tensorlens_tl.circuits.weights.spectra import copying_scores, ov_eigenvalues, svd_tokens

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
