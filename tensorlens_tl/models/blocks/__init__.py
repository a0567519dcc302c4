"""One transformer block of a model.

| module | question |
| --- | --- |
| `block` | what are the weights of its parts? |
| `parts` | which parts does it have, and what does it call them? |
| `owner` | what does it know of its model? |
| `checks` | is it what a frozen run, or a method, needs? |
| `other_weights` | how is it read with other weights than the model has? |
"""

from tensorlens_tl.models.blocks.block import BlockView
from tensorlens_tl.models.blocks.checks import (
    require_attention_alone,
    require_one_stream,
    require_scaled_weights,
    require_scores,
)
from tensorlens_tl.models.blocks.other_weights import with_weights
from tensorlens_tl.models.blocks.owner import Owner

__all__ = [
    "BlockView",
    "Owner",
    "require_attention_alone",
    "require_one_stream",
    "require_scaled_weights",
    "require_scores",
    "with_weights",
]
