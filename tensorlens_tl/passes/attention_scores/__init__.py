"""Attention scores as the weights make them, and patterns that are recomputed from them."""

from tensorlens_tl.passes.attention_scores.reading import ScoreReading, added_positions, score_candidates
from tensorlens_tl.passes.attention_scores.recompute import PatternReader, refuse_unreadable

__all__ = ["PatternReader", "ScoreReading", "added_positions", "refuse_unreadable", "score_candidates"]
