"""The secants of RWKV's two sublayers: nothing is held.

The weighted mean of time mixing is a quotient N/D of two sums over earlier tokens, S(exp(k)⊙v) and S(exp(k)), with one
linear map S. With y = N/D, ``Δy = (ΔN − ȳ·ΔD)/D̄``, which divides by neither run's sum alone, and ``Δexp(k) = L·Δk``,
where L is the logarithmic mean of both exponentials. All of a channel's exponentials are divided by its largest one of
both runs, which leaves the quotient as it is. Channel mixing is an MLP times a gate.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, DiagonalRecursion, Identity, Linear, Sum
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import Change, Offset, logarithmic_mean
from tensorlens_tl.models.sublayers import ChannelMixWeights, Mix, TimeMixWeights, shifted, squared_relu, weighted_mean
from tensorlens_tl.passes.two_runs.mlps import activated

Name = Callable[[str], str]


def time_mix_secant(a: TimeMixWeights, b: TimeMixWeights, read: Change, name: Name) -> Change:
    """What time mixing makes of what it reads, before the matrix that writes it.

    Args:
        a, b: its weights in either run.
        read: what it reads.
        name: of a part.
    """
    key, value, receptance = (
        _mixed(getattr(a, part), getattr(b, part), read, part, name) for part in ("key", "value", "receptance")
    )
    key = key.elementwise(_as_rounded, torch.ones_like)
    weights = _exponential(key)
    numerator = _summed(value.times(weights), a, b, name)
    denominator = _summed(weights, a, b, name)
    y_a = weighted_mean(key.a, a.A, a.bonus, value.a.dtype).push(value.a)
    y_b = weighted_mean(key.b, b.A, b.bonus, value.b.dtype).push(value.b)
    by_numerator = Chain((*numerator.stages, Diagonal(1 / denominator.mean)))
    by_denominator = Chain((*denominator.stages, Diagonal(-(y_a + y_b) / 2 / denominator.mean)))
    mean = Change(y_a, y_b, (Sum((by_numerator, by_denominator)),))
    return mean.times(activated(receptance, torch.sigmoid))


def channel_mix_secant(a: ChannelMixWeights, b: ChannelMixWeights, read: Change, block: str) -> Chain:
    """What channel mixing makes of what it reads.

    Args:
        a, b: its weights in either run.
        read: what it reads.
        block: what the names of its parts begin with, for what differs between two models.
    """
    name = partial("{}.channel_mix.{}".format, block)
    neurons = activated(_mixed(a.key, b.key, read, "key", name), squared_relu)
    written = neurons.linear(Linear(a.W_out, a.b_out), Linear(b.W_out, b.b_out), name("W_out"))
    gate = activated(_mixed(a.receptance, b.receptance, read, "receptance", name), torch.sigmoid)
    return Chain((*written.times(gate).stages, Identity()))


def _mixed(a: Mix, b: Mix, read: Change, part: str, name: Name) -> Change:
    """Through a matrix that reads each token mixed with the one before it."""
    return read.convolved(a.convolution, b.convolution, name(f"mix_{part}")).linear(
        a.linear, b.linear, name(f"W_{part}")
    )


def _as_rounded(key: Tensor) -> Tensor:
    """What the model makes of a key before it computes with it."""
    return key.float().to(key)


def _exponential(key: Change) -> Change:
    """exp(k), each channel divided by its largest of both runs."""
    largest = torch.maximum(upcast(key.a).amax(1, keepdim=True), upcast(key.b).amax(1, keepdim=True))
    log_a = upcast(key.a) - largest
    log_b = upcast(key.b) - largest
    return Change(log_a.exp(), log_b.exp(), (*key.stages, Diagonal(logarithmic_mean(log_a, log_b))))


def _summed(x: Change, a: TimeMixWeights, b: TimeMixWeights, name: Name) -> Change:
    """The sum over earlier tokens, by how long ago they are, and over the token itself with its bonus."""
    of_a = _earlier(a, x.a)
    of_b = _earlier(b, x.b)
    stages: list[AffineMap] = [of_a]
    if not torch.equal(a.A, b.A):
        half = Diagonal(x.a.new_full((1, 1, 1), 0.5))
        stages = [Chain((half, Sum((of_a, of_b)))), Offset(of_a.push(x.mean) - of_b.push(x.mean), name("A"))]
    earlier = Change(of_a.push(x.a), of_b.push(x.b), (*x.stages, *stages))
    itself = x.weighted(_bonus(a, x.a), _bonus(b, x.a), name("bonus"))
    return Change(earlier.a + itself.a, earlier.b + itself.b, (Sum((earlier.map, itself.map)),))


def _earlier(weights: TimeMixWeights, x: Tensor) -> Chain:
    """What a channel remembers of the tokens before each."""
    decays = weights.A.exp().to(x).expand(1, x.shape[1], -1)
    return Chain((shifted(x, x.dtype), DiagonalRecursion(decays[..., None])))


def _bonus(weights: TimeMixWeights, x: Tensor) -> Tensor:
    return weights.bonus.exp().to(x)[None, None]
