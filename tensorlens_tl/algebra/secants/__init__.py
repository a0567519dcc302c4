"""Exact secants: maps that take the difference of two inputs exactly to the difference of the two outputs.

For a function f and two inputs a and b, a secant S is a linear map with ``S(a − b) = f(a) − f(b)``. Every part of a
transformer has one. Bars are means of a and b, Δ is a's value minus b's:

| part | secant |
| --- | --- |
| product uv | Δ(uv) = Δu·v̄ + ū·Δv |
| activation φ | Δφ = (Δφ/Δz)·Δz, and φ' at the midpoint where Δz is tiny (`slope`) |
| norm, c the centred input | Δ(c/σ) = mean(1/σ)·Δc + c̄·Δ(1/σ), Δ(1/σ) = −mean(2c̄·Δc) / (2σ̄·σ_a·σ_b) |
| softmax | ΔP_k = L_k·(Δs_k − Σ_j w_j·Δs_j), w = L/ΣL, with the logarithmic mean L_k = ΔP_k / Δln P_k |

For a = b each of them is the derivative. The midpoint rule for products is their Shapley value for two factors; the
rule for activations is DeepLIFT's rescale rule (Shrikumar et al. 2017); the logarithmic mean comes from index
decomposition (Vartia 1976; Ang 2004). The softmax rule is ours: it is unchanged when a constant is added to all scores
of a row in either run, as the softmax is.
"""

from tensorlens_tl.algebra.secants.attention import CrossKeyResponse, KeyResponse, QueryResponse, ScoreSecant
from tensorlens_tl.algebra.secants.change import Change
from tensorlens_tl.algebra.secants.maps import MatrixChange, Offset, RankOne, Rotation, WithConstants
from tensorlens_tl.algebra.secants.numbers import logarithmic_mean, mean_share, slope
from tensorlens_tl.algebra.secants.parts import (
    bias_name,
    linear_secant,
    norm_secant,
    offset_terms,
    pull_noting,
    same,
    scale_response,
    without_offsets,
)

__all__ = [
    "Change",
    "CrossKeyResponse",
    "KeyResponse",
    "MatrixChange",
    "Offset",
    "QueryResponse",
    "RankOne",
    "Rotation",
    "ScoreSecant",
    "WithConstants",
    "bias_name",
    "linear_secant",
    "logarithmic_mean",
    "mean_share",
    "norm_secant",
    "offset_terms",
    "pull_noting",
    "same",
    "scale_response",
    "slope",
    "without_offsets",
]
