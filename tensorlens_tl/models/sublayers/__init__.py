"""How the parts of a block are read: attention, MLPs, experts, and mixers in place of attention."""

from tensorlens_tl.models.sublayers.attention import (
    pattern_reader,
    read_attention,
    read_shared_attention,
    shared_source,
)
from tensorlens_tl.models.sublayers.delta import delta_pattern, is_delta
from tensorlens_tl.models.sublayers.experts import (
    ExpertsWeights,
    PerLayerWeights,
    Routing,
    has_experts,
    read_experts,
    read_per_layer,
)
from tensorlens_tl.models.sublayers.mixers import (
    Mixer,
    NoMixing,
    is_attention,
    is_mlp,
    mixer_map,
    read_mixer,
    read_only_mixer,
)
from tensorlens_tl.models.sublayers.mlps import read_mlp, read_module
from tensorlens_tl.models.sublayers.query_key import read_latent_scores, read_query_key
from tensorlens_tl.models.sublayers.rwkv import (
    ChannelMixWeights,
    channel_mix_weights,
    halves_after,
    halving_period,
    is_channel_mix,
)
from tensorlens_tl.models.sublayers.scans import scan_of

__all__ = [
    "ChannelMixWeights",
    "ExpertsWeights",
    "Mixer",
    "NoMixing",
    "PerLayerWeights",
    "Routing",
    "channel_mix_weights",
    "delta_pattern",
    "halves_after",
    "halving_period",
    "has_experts",
    "is_attention",
    "is_channel_mix",
    "is_delta",
    "is_mlp",
    "mixer_map",
    "pattern_reader",
    "read_attention",
    "read_experts",
    "read_latent_scores",
    "read_mixer",
    "read_mlp",
    "read_module",
    "read_only_mixer",
    "read_per_layer",
    "read_query_key",
    "read_shared_attention",
    "scan_of",
    "shared_source",
]
