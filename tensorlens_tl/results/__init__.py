"""Result classes: what every method, circuit and evaluation returns, with ways to read, show and save it."""

from tensorlens_tl.results.attribution import AXES as AXES, Attribution, one_query as one_query
from tensorlens_tl.results.circuit import ARROW as ARROW, CHOICES as CHOICES, TARGET as TARGET, Circuit, EdgeScores
from tensorlens_tl.results.entry import (
    EACH_GENERATED as EACH_GENERATED,
    EACH_MINUS as EACH_MINUS,
    EACH_SPAN as EACH_SPAN,
    MEAN_QUERY as MEAN_QUERY,
    SEVERAL_TARGETS as SEVERAL_TARGETS,
    TOKENS_OF_QUERIES as TOKENS_OF_QUERIES,
    Entry,
    check_batch as check_batch,
    closing as closing,
    number_of as number_of,
    span_text as span_text,
)
from tensorlens_tl.results.evaluation import Comparison, Evaluation, area as area, cell as cell
from tensorlens_tl.results.feature_examples import FeatureExamples
from tensorlens_tl.results.graph import COVERED as COVERED, SHOWN_EDGES as SHOWN_EDGES, ContributionGraph
from tensorlens_tl.results.heads import SIDES as SIDES, HeadScores, ScoreAttribution, ScoreChange, layer_of as layer_of
from tensorlens_tl.results.joining import joined as joined
from tensorlens_tl.results.measured import MeasuredEdges, MeasuredTerms, rest_interval as rest_interval
from tensorlens_tl.results.result import (
    RESULT_ENDINGS as RESULT_ENDINGS,
    Result,
    array as array,
    check_file as check_file,
)
from tensorlens_tl.results.scores import COLUMNS, Parts as Parts, Scored as Scored
from tensorlens_tl.results.terms import (
    HEAD_ROUTES as HEAD_ROUTES,
    ROUTES as ROUTES,
    ChangeRoutes,
    FeatureEdges,
    ModelChange,
    Paths,
    Terms,
)

__all__ = [
    "COLUMNS",
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
    "HeadScores",
    "MeasuredEdges",
    "MeasuredTerms",
    "ModelChange",
    "Paths",
    "Result",
    "ScoreAttribution",
    "ScoreChange",
    "Terms",
]
