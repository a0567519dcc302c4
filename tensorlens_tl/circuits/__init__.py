"""OV and QK circuits, paths and graphs: functions of a model, or of a frozen pass.

| question | function |
| --- | --- |
| what does a head read and write, by its weights | `ov`, `qk`, `full_ov`, `full_qk`, `svd_tokens` |
| does it copy | `copying_scores`, `ov_eigenvalues` |
| which heads read from which | `composition_scores`, `virtual_head` |
| what wrote this logit directly | `logit_attribution` |
| what does one head move, and what becomes of it | `head_map` |
| through which nodes did it come | `paths`, `top_paths`, `contribution_graph` |
| why does this head attend there | `qk_attribution` |
"""

from tensorlens_tl.circuits.components import HeadMap, head_map, logit_attribution
from tensorlens_tl.circuits.composition import composition_scores
from tensorlens_tl.circuits.graph import ContributionGraph, contribution_graph
from tensorlens_tl.circuits.paths import Paths, paths, top_paths
from tensorlens_tl.circuits.qk_attribution import ScoreAttribution, qk_attribution
from tensorlens_tl.circuits.terms import Term, Terms
from tensorlens_tl.circuits.weights import (
    copying_scores,
    full_ov,
    full_qk,
    ov,
    ov_eigenvalues,
    qk,
    svd_tokens,
    virtual_head,
)

__all__ = [
    "ContributionGraph",
    "HeadMap",
    "Paths",
    "ScoreAttribution",
    "Term",
    "Terms",
    "composition_scores",
    "contribution_graph",
    "copying_scores",
    "full_ov",
    "full_qk",
    "head_map",
    "logit_attribution",
    "ov",
    "ov_eigenvalues",
    "paths",
    "qk",
    "qk_attribution",
    "svd_tokens",
    "top_paths",
    "virtual_head",
]
