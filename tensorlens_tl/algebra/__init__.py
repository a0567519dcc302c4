"""Affine maps of the residual stream, and nothing about models.

| module | question |
| --- | --- |
| `maps` | what is an affine map, and how do maps combine? |
| `primitives` | which maps is everything made of? |
| `segments` | what acts on one side of an encoder–decoder, attends across, or adds several streams to each other? |
| `routing` | what acts on some tokens only, on another device, or with a pattern that is recomputed? |
| `recursion` | what passes from each position to the next, and what do state-space layers pass on? |
| `secants` | which maps take the difference of what two runs read to that of what they give? |
| `positions` | where do vectors live, so that no work is done elsewhere? |
| `bias_spreading` | where does each bias go, if source tokens are to have it? |
| `probes` | how is a norm estimated from random rows? |
| `memory` | how much may be allocated at once? |
| `progress` | how far is long work, and where can it be stopped? |
| `numerics` | how far apart are two results? |
"""

from tensorlens_tl.algebra.maps import (
    ZERO,
    AffineMap,
    Chain,
    ChannelGroup,
    MixingMap,
    PositionwiseMap,
    Sum,
    Transpose,
    note_bias,
    stages_of,
)
from tensorlens_tl.algebra.positions import RowPositions, Where
from tensorlens_tl.algebra.primitives import Attention, Diagonal, Identity, Linear, Norm, Tap
from tensorlens_tl.algebra.recursion import (
    CausalConvolution,
    DiagonalRecursion,
    Recursion,
    SelectiveScan,
    scan as scan,
    scan_where as scan_where,
    spectral_radius as spectral_radius,
)
from tensorlens_tl.algebra.routing import (
    AnyAttention,
    Beside,
    Branch,
    GroupSum,
    HeldScores as HeldScores,
    RecomputedAttention,
    Routed,
    grouped_products as grouped_products,
    query_chunks as query_chunks,
)
from tensorlens_tl.algebra.segments import (
    ChainWithReads as ChainWithReads,
    CrossAttention as CrossAttention,
    EarlierRead as EarlierRead,
    LazyMap,
    Placed as Placed,
    Segment as Segment,
    Streams,
    on_device as on_device,
)

__all__ = [
    "ZERO",
    "AffineMap",
    "AnyAttention",
    "Attention",
    "Beside",
    "Branch",
    "CausalConvolution",
    "Chain",
    "ChannelGroup",
    "Diagonal",
    "DiagonalRecursion",
    "GroupSum",
    "Identity",
    "LazyMap",
    "Linear",
    "MixingMap",
    "Norm",
    "PositionwiseMap",
    "RecomputedAttention",
    "Recursion",
    "Routed",
    "RowPositions",
    "SelectiveScan",
    "Streams",
    "Sum",
    "Tap",
    "Transpose",
    "Where",
    "note_bias",
    "stages_of",
]
