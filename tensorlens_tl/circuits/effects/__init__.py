"""What components do to a logit: directly, by paths, head by head, and in all."""

from tensorlens_tl.circuits.effects.direct import BY, direct_effects, logit_attribution
from tensorlens_tl.circuits.effects.heads import HeadMap, head_map
from tensorlens_tl.circuits.effects.lens import logit_lens
from tensorlens_tl.circuits.effects.node_paths import paths, top_paths
from tensorlens_tl.circuits.effects.total import total_effects

__all__ = [
    "BY",
    "HeadMap",
    "direct_effects",
    "head_map",
    "logit_attribution",
    "logit_lens",
    "paths",
    "top_paths",
    "total_effects",
]
