"""Results: what every method, circuit and evaluation returns, how it is read, shown and kept."""

from tensorlens_tl.results.attribution import AXES as AXES, Attribution
from tensorlens_tl.results.changes import HEAD_ROUTES as HEAD_ROUTES, ROUTES as ROUTES, ChangeRoutes, ModelChange
from tensorlens_tl.results.edges import ARROW as ARROW, CHOICES as CHOICES, TARGET as TARGET, Circuit, EdgeScores
from tensorlens_tl.results.entry import Entry, check_batch as check_batch, largest as largest
from tensorlens_tl.results.evaluation import Comparison, Evaluation, area as area
from tensorlens_tl.results.feature_edges import FeatureEdges
from tensorlens_tl.results.feature_examples import FeatureExamples
from tensorlens_tl.results.graph import ContributionGraph
from tensorlens_tl.results.joining import (
    SEVERAL_TARGETS as SEVERAL_TARGETS,
    joined as joined,
    joined_changes as joined_changes,
)
from tensorlens_tl.results.pairs import ScoreAttribution, ScoreChange
from tensorlens_tl.results.result import RESULT_ENDINGS as RESULT_ENDINGS, Result
from tensorlens_tl.results.terms import Paths, Terms
from tensorlens_tl.results.views import array as array

__all__ = [
    "Attribution",
    "ChangeRoutes",
    "Circuit",
    "Comparison",
    "ContributionGraph",
    "EdgeScores",
    "Entry",
    "Evaluation",
    "FeatureEdges",
    "FeatureExamples",
    "ModelChange",
    "Paths",
    "Result",
    "ScoreAttribution",
    "ScoreChange",
    "Terms",
]
