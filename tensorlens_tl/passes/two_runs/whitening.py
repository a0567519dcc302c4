"""The secant of the whitening before a block, whose weights two models may differ in.

    y_i = x_i·E + y_{i−1}·S    ⟹    Δy_i = Δx_i·Ē + x̄_i·ΔE + Δy_{i−1}·S̄ + ȳ_{i−1}·ΔS

The first and the third term are a whitening with the mean weights; the others are constants that enter its recursion.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Linear, Recursion
from tensorlens_tl.algebra.secants import Change, MatrixChange, Offset, same
from tensorlens_tl.models.parameters import WhiteningWeights


def whitening_secant(
    a: WhiteningWeights | None,
    b: WhiteningWeights | None,
    read: Change,
    keep: Bool[Tensor, "batch pos"] | None,
    name: str,
) -> Chain | None:
    """Return the whitening of two runs as one map; None if neither model has any.

    Args:
        a, b: the weights of either run; None for a model without whitening, whose stream passes unchanged.
        read: the streams before it.
        keep: True at positions that take part; None for all.
        name: the name of the whitening; the effects of changed weights are ``"{name}.entry"`` and ``"{name}.step"``.
    """
    if a is None and b is None:
        return None
    of_a, of_b = (weights or _identity(read) for weights in (a, b))
    entry = read.linear(Linear(of_a.entry), Linear(of_b.entry), f"{name}.entry")
    stages: list[AffineMap] = [*entry.stages]
    if not same(of_a.step, of_b.step):
        mean = (Recursion(of_a.step, keep)(entry.a) + Recursion(of_b.step, keep)(entry.b)) / 2
        change = MatrixChange(_before(mean, keep), of_a.step, of_b.step)
        stages.append(Offset(change.vectors, f"{name}.step", change))
    return Chain((*stages, Recursion((of_a.step + of_b.step) / 2, keep)))


def _identity(read: Change) -> WhiteningWeights:
    """Return weights that leave the stream unchanged."""
    identity = torch.eye(read.a.shape[-1]).to(read.a)
    return WhiteningWeights(identity, torch.zeros_like(identity))


def _before(
    y: Float[Tensor, "batch pos d_model"], keep: Bool[Tensor, "batch pos"] | None
) -> Float[Tensor, "batch pos d_model"]:
    """Return at every position the vector of the previous position that takes part, zero if there is none."""
    shifted = torch.nn.functional.pad(y[:, :-1], (0, 0, 1, 0))
    if keep is None:
        return shifted
    number = torch.arange(y.shape[1], device=y.device).expand_as(keep)
    latest = torch.where(keep, number, -1).cummax(dim=-1).values
    before = torch.nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
    vectors = torch.take_along_dim(y, before.clamp_min(0)[..., None], dim=1)
    return vectors.masked_fill((before < 0)[..., None] | ~keep[..., None], 0)
