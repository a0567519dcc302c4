"""Features of sparse dictionaries: which are active, what makes them and what they do."""

from tensorlens_tl.circuits.dictionary_features.active import Features, features
from tensorlens_tl.circuits.dictionary_features.circuits import feature_attribution, feature_edges, feature_effects

__all__ = [
    "Features",
    "feature_attribution",
    "feature_edges",
    "feature_effects",
    "features",
]
