"""Which sources make an attention score."""

from tensorlens_tl.circuits.scores.attribution import qk_attribution
from tensorlens_tl.circuits.scores.reading import ScoreReading, score_reading

__all__ = [
    "ScoreReading",
    "qk_attribution",
    "score_reading",
]
