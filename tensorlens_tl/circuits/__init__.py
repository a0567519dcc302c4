"""Circuit analyses of a model's weights or of a frozen pass: OV and QK circuits, paths, graphs, and comparisons.

| question | function |
| --- | --- |
| what a head reads and writes, from its weights | `ov`, `qk`, `full_ov`, `full_qk`, `svd_tokens` |
| which heads look back one token, or at what followed a repeated one | `previous_token_scores`, `induction_scores` |
| which heads look at an earlier occurrence of a token | `duplicate_token_scores` |
| whether a head copies | `copying_scores`, `ov_eigenvalues` |
| which heads read from which | `composition_scores`, `virtual_head` |
| what contributed directly to this logit | `logit_attribution` |
| what the model would predict if it stopped before a layer | `logit_lens` |
| what is lost without a head, through all later layers | `total_effects` |
| what one head moves, and its effect downstream | `head_map` |
| through which nodes a logit was computed | `paths`, `top_paths`, `contribution_graph` |
| what differs between a clean and a corrupted prompt | `patch_scores`, `edge_scores` |
| which changed weights of a fine-tuned model changed its answer | `compare_models` |
| whether a difference between two runs acts through values, attention patterns or norm scales | `routes` |
| what a circuit of some edges does on its own | `EdgeScores.circuit`, `run_circuits` |
| why a head attends there, or no longer does | `qk_attribution` |
| which features of a sparse dictionary are active | `features` |
| where in a data set a feature is most active; what it is called | `feature_examples`, `feature_labels` |
| what drives a feature, what it does, what it feeds | `feature_attribution`, `feature_effects`, `feature_edges` |
| how large the operator is | `spectral_norm`, `singular_directions`, `norm_bound`, `spectral_norm_bound` |
| how wrong it is away from its input | `error_bound`, `frozen_error_bound` |
"""

from typing import TYPE_CHECKING, Any

from tensorlens_tl._arguments import nearest
from tensorlens_tl.circuits.compare import edge_scores, patch_scores, run_circuits
from tensorlens_tl.circuits.dictionary_features import Features, feature_labels, features
from tensorlens_tl.circuits.effects import (
    HeadMap,
    head_map,
    logit_attribution,
    logit_lens,
    paths,
    top_paths,
    total_effects,
)
from tensorlens_tl.circuits.feature_circuits import feature_attribution, feature_edges, feature_effects
from tensorlens_tl.circuits.feature_rows import feature_examples
from tensorlens_tl.circuits.graph import contribution_graph
from tensorlens_tl.circuits.head_kinds import duplicate_token_scores, induction_scores, previous_token_scores
from tensorlens_tl.circuits.scores import qk_attribution
from tensorlens_tl.circuits.size import (
    Directions,
    ErrorBound,
    FrozenErrorBound,
    as_scipy,
    error_bound,
    frozen_error_bound,
    norm_bound,
    singular_directions,
    spectral_norm,
    spectral_norm_bound,
)
from tensorlens_tl.circuits.two_runs import compare_models, routes
from tensorlens_tl.circuits.weights import (
    composition_scores,
    copying_scores,
    full_ov,
    full_qk,
    ov,
    ov_eigenvalues,
    qk,
    svd_tokens,
    virtual_head,
)
from tensorlens_tl.results import (
    ChangeRoutes,
    Circuit,
    ContributionGraph,
    EdgeScores,
    FeatureEdges,
    FeatureExamples,
    HeadScores,
    MeasuredEdges,
    MeasuredTerms,
    ModelChange,
    Paths,
    ScoreAttribution,
    ScoreChange,
    Terms,
)

__all__ = [
    "ChangeRoutes",
    "Circuit",
    "ContributionGraph",
    "Directions",
    "EdgeScores",
    "ErrorBound",
    "FeatureEdges",
    "FeatureExamples",
    "Features",
    "FrozenErrorBound",
    "HeadMap",
    "HeadScores",
    "MeasuredEdges",
    "MeasuredTerms",
    "ModelChange",
    "Paths",
    "ScoreAttribution",
    "ScoreChange",
    "Terms",
    "as_scipy",
    "compare_models",
    "composition_scores",
    "contribution_graph",
    "copying_scores",
    "duplicate_token_scores",
    "edge_scores",
    "error_bound",
    "feature_attribution",
    "feature_edges",
    "feature_effects",
    "feature_examples",
    "feature_labels",
    "features",
    "frozen_error_bound",
    "full_ov",
    "full_qk",
    "head_map",
    "induction_scores",
    "logit_attribution",
    "logit_lens",
    "norm_bound",
    "ov",
    "ov_eigenvalues",
    "patch_scores",
    "paths",
    "previous_token_scores",
    "qk",
    "qk_attribution",
    "routes",
    "run_circuits",
    "singular_directions",
    "spectral_norm",
    "spectral_norm_bound",
    "svd_tokens",
    "top_paths",
    "total_effects",
    "virtual_head",
]

if not TYPE_CHECKING:  # a type checker would accept any name as one of this package

    def __getattr__(name: str) -> Any:
        others = {
            "path_patching": "edge_scores",
            "edge_attribution_patching": "edge_scores",
            "activation_patching": "patch_scores",
            "attribution_patching": "patch_scores",
            "direct_logit_attribution": "logit_attribution",
        }
        pointer = "" if name.startswith("_") else nearest(name, __all__, others)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{pointer}")
