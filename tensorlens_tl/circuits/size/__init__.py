"""How large the frozen operator is, and how far it is from the model at another input."""

from tensorlens_tl.circuits.size.bounds import (
    ErrorBound,
    PropositionBound,
    appendix_e_bound,
    error_bound,
    norm_bound,
    proposition_1,
)
from tensorlens_tl.circuits.size.spectrum import Directions, as_scipy, singular_directions, spectral_norm

__all__ = [
    "Directions",
    "ErrorBound",
    "PropositionBound",
    "appendix_e_bound",
    "as_scipy",
    "error_bound",
    "norm_bound",
    "proposition_1",
    "singular_directions",
    "spectral_norm",
]
