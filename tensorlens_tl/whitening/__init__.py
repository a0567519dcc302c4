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
| `measures` | how white, and how stationary, is a sequence? |
| `estimation` | which filter whitens a process? |
| `stream` | how white and stationary is what a model has at its hook points? |
| `picture` | the same over a model's depth |
| `layer` | whitening as a layer to train |
| `insertion` | `whiten` and `unwhiten`, which put the layer on a TransformerLens model and take it off |
| `adapters` | what of that depends on the model's class? |
"""

from tensorlens_tl.whitening.estimation import WhiteningFilter, estimate
from tensorlens_tl.whitening.insertion import unwhiten, whiten
from tensorlens_tl.whitening.layer import Whitening, attach, detach
from tensorlens_tl.whitening.measures import Stationarity, Whiteness, stationarity, whiteness
from tensorlens_tl.whitening.picture import picture
from tensorlens_tl.whitening.stream import SETTLING as SETTLING, measure, stream_filters

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
