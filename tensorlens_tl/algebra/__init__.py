"""Affine maps of the residual stream, and nothing about models.

| module | question |
| --- | --- |
| `maps` | what is an affine map, and how do maps combine? |
| `primitives` | which maps are all others made of? |
| `segments` | which maps act on one side of an encoder–decoder, attend across it, or add several streams? |
| `routing` | which maps act on some tokens only, or recompute their attention pattern? |
| `recursion` | which maps carry a state from position to position, as state-space layers do? |
| `secants` | which maps take the difference of two runs' inputs to the difference of their outputs? |
| `positions` | where do vectors live, so that no work is done elsewhere? |
| `bias_spreading` | how is each bias spread over the source tokens? |
| `probes` | how is a norm estimated from random rows? |
| `memory` | how much may be allocated at once? |
| `progress` | how is progress reported, and where can long work be cancelled? |
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
    ones_at as ones_at,
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
