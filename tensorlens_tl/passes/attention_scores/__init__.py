"""Attention scores as the weights make them, and patterns that are recomputed from them."""

from tensorlens_tl.passes.attention_scores.encodings import relative_bias
from tensorlens_tl.passes.attention_scores.fitting import projected, score_reading, unread
from tensorlens_tl.passes.attention_scores.reading import (
    CrossStreams,
    HeadProjection,
    ScoreReading,
    added_positions,
    score_candidates,
    score_projections,
    side_read,
)
from tensorlens_tl.passes.attention_scores.recompute import PatternReader, refuse_unreadable

__all__ = [
    "CrossStreams",
    "HeadProjection",
    "PatternReader",
    "ScoreReading",
    "added_positions",
    "projected",
    "refuse_unreadable",
    "relative_bias",
    "score_candidates",
    "score_projections",
    "score_reading",
    "side_read",
    "unread",
]
