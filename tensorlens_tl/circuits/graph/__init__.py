"""The contribution graph: how a logit came about, node by node and position by position."""

from tensorlens_tl.circuits.graph.graph import check_options, contribution_graph

__all__ = [
    "check_options",
    "contribution_graph",
]
