"""Which sources make an attention score, and which kinds of heads there are."""

from tensorlens_tl.circuits.scores.attribution import qk_attribution
from tensorlens_tl.circuits.scores.kinds import duplicate_token_scores, induction_scores, previous_token_scores
from tensorlens_tl.circuits.scores.reading import ScoreReading, score_reading

__all__ = [
    "ScoreReading",
    "duplicate_token_scores",
    "induction_scores",
    "previous_token_scores",
    "qk_attribution",
    "score_reading",
]
