"""Edges between the parts of a model with a score each, and circuits that consist of some of them."""

from tensorlens_tl.results.edges.choosing import CHOICES
from tensorlens_tl.results.edges.circuit import Circuit
from tensorlens_tl.results.edges.names import ARROW, TARGET
from tensorlens_tl.results.edges.scores import EdgeScores

__all__ = ["ARROW", "CHOICES", "TARGET", "Circuit", "EdgeScores"]
