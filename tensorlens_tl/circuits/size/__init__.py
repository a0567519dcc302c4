"""How large the frozen operator is, and how far it is from the model at another input."""

from tensorlens_tl.circuits.size.bounds import (
    ErrorBound,
    FrozenErrorBound,
    error_bound,
    frozen_error_bound,
    norm_bound,
    spectral_norm_bound,
)
from tensorlens_tl.circuits.size.spectrum import Directions, as_scipy, singular_directions, spectral_norm

__all__ = [
    "Directions",
    "ErrorBound",
    "FrozenErrorBound",
    "as_scipy",
    "error_bound",
    "frozen_error_bound",
    "norm_bound",
    "singular_directions",
    "spectral_norm",
    "spectral_norm_bound",
]
