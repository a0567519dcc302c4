"""How a layer makes its attention scores, read from its weights and proved against the pattern that it gave.

The known ways are candidates (`tensorlens_tl.passes.attention_scores.reading`); a reading is right when the softmax of
its scores is the pattern of the model itself.
"""

from tensorlens_tl.passes import PassLike, attention_scores, check_pass
from tensorlens_tl.passes.attention_scores import ScoreReading

__all__ = ["ScoreReading", "score_reading"]


def score_reading(frozen: PassLike, layer: int) -> ScoreReading:
    """The reading of one layer's scores that reproduces its pattern.

    Raises:
        UnsupportedModelError: no known reading does; says how near the best came. An encoder–decoder.
    """
    check_pass(frozen)
    frozen.view.refuse_encoder_decoder("attention scores")
    return attention_scores.score_reading(frozen.maps, layer)
