"""Whitening: how white the stream of a model is, the filter that makes a sequence white, and the layer to train.

>>> import torch
>>> from tensorlens_tl import whitening
>>> noise = torch.randn(500, 16, 4, generator=torch.Generator().manual_seed(0))
>>> x = noise[:, 1:] + 0.5 * noise[:, :-1]  # every vector has something of the one before
>>> white = whitening.estimate(x)(x)
>>> whitening.whiteness(x[:, 8:]).covariance > 1.5 * whitening.whiteness(white[:, 8:]).covariance
True

| module | question |
| --- | --- |
| `measures` | how white and stationary is a sequence, or a model's stream over its depth? Which filter whitens it? |
| `layer` | whitening as a layer to train; `whiten` and `unwhiten` put it on a TransformerLens model and take it off |
"""

from tensorlens_tl.whitening.layer import Whitening, attach, detach, unwhiten, whiten
from tensorlens_tl.whitening.measures import (
    SETTLING as SETTLING,
    Stationarity,
    Whiteness,
    WhiteningFilter,
    estimate,
    measure,
    picture,
    stationarity,
    stream_filters,
    whiteness,
)

__all__ = [
    "Stationarity",
    "Whiteness",
    "Whitening",
    "WhiteningFilter",
    "attach",
    "detach",
    "estimate",
    "measure",
    "picture",
    "stationarity",
    "stream_filters",
    "unwhiten",
    "whiten",
    "whiteness",
]
