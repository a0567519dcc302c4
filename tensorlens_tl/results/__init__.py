"""Results: what every method, circuit and evaluation returns, how it is read, shown and kept."""

from tensorlens_tl.results.attribution import Attribution
from tensorlens_tl.results.circuit import Circuit, EdgeScores
from tensorlens_tl.results.entry import Entry
from tensorlens_tl.results.evaluation import Comparison, Evaluation
from tensorlens_tl.results.feature_edges import FeatureEdges
from tensorlens_tl.results.graph import ContributionGraph
from tensorlens_tl.results.pairs import ScoreAttribution
from tensorlens_tl.results.terms import Paths, Terms

__all__ = [
    "Attribution",
    "Circuit",
    "Comparison",
    "ContributionGraph",
    "EdgeScores",
    "Entry",
    "Evaluation",
    "FeatureEdges",
    "Paths",
    "ScoreAttribution",
    "Terms",
]
