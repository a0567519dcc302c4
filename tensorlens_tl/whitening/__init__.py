"""Whitening: how white a model's stream is, filters that make a sequence white, and a trainable whitening layer.

>>> import torch
>>> from tensorlens_tl import whitening
>>> noise = torch.randn(500, 16, 4, generator=torch.Generator().manual_seed(0))
>>> x = noise[:, 1:] + 0.5 * noise[:, :-1]  # neighbours are correlated
>>> white = whitening.estimate(x)(x)
>>> whitening.whiteness(x[:, 8:]).covariance > 1.5 * whitening.whiteness(white[:, 8:]).covariance
True

| module | question |
| --- | --- |
| `measures` | how white and stationary is a sequence, or a model's stream at each depth, and which filter whitens it? |
| `layer` | how is whitening trained as a layer, and how do `whiten` and `unwhiten` put it on a model and remove it? |
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
