"""What differs between a clean and a corrupted prompt, node by node and edge by edge."""

from tensorlens_tl.circuits.compare.edges import edge_layout, edge_scores, run_circuits
from tensorlens_tl.circuits.compare.nodes import patch_scores
from tensorlens_tl.circuits.compare.pairs import METHODS, POINTS, SYNONYMS, corrupted_stream, pair_target

__all__ = [
    "METHODS",
    "POINTS",
    "SYNONYMS",
    "corrupted_stream",
    "edge_layout",
    "edge_scores",
    "pair_target",
    "patch_scores",
    "run_circuits",
]
