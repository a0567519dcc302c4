"""Features of sparse dictionaries: which are active, what makes them, what they do, and what they stand for."""

from tensorlens_tl.circuits.dictionary_features.active import Features, features
from tensorlens_tl.circuits.dictionary_features.circuits import feature_attribution, feature_edges, feature_effects
from tensorlens_tl.circuits.dictionary_features.examples import feature_examples
from tensorlens_tl.circuits.dictionary_features.labels import feature_labels, names_with_labels

__all__ = [
    "Features",
    "feature_attribution",
    "feature_edges",
    "feature_effects",
    "feature_examples",
    "feature_labels",
    "features",
    "names_with_labels",
]
