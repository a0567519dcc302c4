"""The secant of what mixes positions in place of attention: nothing is held.

| kind | secant |
| --- | --- |
| gated short convolution | two products, and the convolution, which is linear |
| selective scan (Mamba 1) | one more scan, driven by what differs (`ScanResponse`) |
| scan of heads (Mamba 2) | its pattern, exp(Σ Δ·A)·⟨C_i, B_j⟩, by decays and by products (`DecayedProducts`) |
| time mixing of RWKV | a quotient of two sums over earlier tokens (`rwkv`) |
| gated delta rule | o = L·w, (I + β·S)·w = β·v, with patterns L and S of that kind; both products by the product rule |

Of the delta rule, with bars for means of the two runs and Δ for their difference, T = I + β·S,

    T̄·Δw = Δ(β·v) − β̄·(ΔS·w̄) − Δβ·(S̄·w̄),    Δo = L̄·Δw + ΔL·w̄
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import silu, softplus

from tensorlens_tl.algebra import (
    AffineMap,
    Attention,
    CausalConvolution,
    Chain,
    Diagonal,
    Linear,
    Norm,
    SelectiveScan,
    Sum,
)
from tensorlens_tl.algebra.numerics import maybe, upcast
from tensorlens_tl.algebra.secants import Change, DecayedProducts, Offset, Placed, ScanResponse, ScanRun
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import Activation
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.models.sublayers import (
    DeltaWeights,
    Ends,
    GatedNorm,
    Mamba2Weights,
    MambaWeights,
    MixerWeights,
    ShortConvolution,
    TimeMixWeights,
)
from tensorlens_tl.passes.two_runs.mlps import activated
from tensorlens_tl.passes.two_runs.rwkv import time_mix_secant

Keep = Float[Tensor, "batch pos 1"] | None
"""1 at real tokens; None where all are."""


def mixer_secant(a: MixerWeights, b: MixerWeights, read: Change, keep: Keep, block: str) -> Chain:
    """What a mixer makes of what it reads; the last stage is what writes it.

    Args:
        a, b: its weights in either run.
        read: what it reads.
        keep: which tokens are real.
        block: what the names of its parts begin with, for what differs between two models.

    Raises:
        UnsupportedModelError: the two are of different kinds, or a part is not read.
    """
    name = partial("{}.mixer.{}".format, block)
    read = read.multiplied(keep)
    match (a, b):
        case (ShortConvolution(), ShortConvolution()):
            inside = _short_convolution(_Entry(a.ends, b.ends, read, name))
        case (MambaWeights(), MambaWeights()):
            inside = _selective_scan(a, b, _Entry(a.ends, b.ends, read, name, keep))
        case (Mamba2Weights(), Mamba2Weights()):
            inside = _scan_of_heads(a, b, _Entry(a.ends, b.ends, read, name, keep))
        case (DeltaWeights(), DeltaWeights()):
            inside = _delta_rule(a, b, _Entry(a.ends, b.ends, read, name))
        case (TimeMixWeights(), TimeMixWeights()):
            inside = time_mix_secant(a, b, read, name)
        case _:
            raise UnsupportedModelError(f"difference: what mixes positions in {block} is of two kinds.")
    return inside.written(_output(a.ends), _output(b.ends), name("W_out"))


def _output(ends: Ends) -> Linear:
    return Linear(ends.W_out, ends.b_out)


@dataclass(frozen=True, eq=False)
class _Entry:
    """The parts of what a mixer's first projection gives.

    Attributes:
        a, b: what comes before the mixing, in either run.
        read: what the projection reads.
        name: of a part.
        keep: which tokens are real, where the mixer masks again after its convolution.
    """

    a: Ends
    b: Ends
    read: Change
    name: Callable[[str], str]
    keep: Keep = None

    def projected(self, part: str, first: int, stop: int) -> Change:
        """Some of its channels."""
        a = _columns(self.a, first, stop)
        b = _columns(self.b, first, stop)
        return self.read.linear(a, b, self.name(f"W_{part}"))

    def convolved(self, part: str, first: int, stop: int, start: int) -> Change:
        """Some of its channels after the convolution, whose first channel is that at `start`, and the activation."""
        before = self.filtered(self.projected(part, first, stop), part, first - start, stop - start)
        return activated(before, self.a.activation).multiplied(self.keep)

    def filtered(self, before: Change, part: str, first: int, stop: int) -> Change:
        """Through some channels of the convolution."""
        a = _channels(self.a.convolution, first, stop)
        b = _channels(self.b.convolution, first, stop)
        return before.convolved(a, b, self.name(f"conv_{part}"))

    def gate(self, first: int, stop: int, activation: Activation) -> Change:
        """Some channels that gate what is mixed."""
        return activated(self.projected("gate", first, stop), activation)


def _columns(ends: Ends, first: int, stop: int) -> Linear:
    return Linear(ends.W_in[:, first:stop], maybe(itemgetter(slice(first, stop)), ends.b_in))


def _channels(convolution: CausalConvolution, first: int, stop: int) -> CausalConvolution:
    some = slice(first, stop)
    return CausalConvolution(convolution.weight[some], maybe(itemgetter(some), convolution.offset))


# ------------------------------------------------------------------ kinds


def _short_convolution(entry: _Entry) -> Change:
    """C ⊙ conv(B ⊙ x)."""
    width = len(entry.a.W_out)
    B, C, x = (entry.projected(part, number * width, (number + 1) * width) for number, part in enumerate("BCx"))
    return entry.filtered(x.times(B), "x", 0, width).times(C)


def _selective_scan(a: MambaWeights, b: MambaWeights, entry: _Entry) -> Change:
    """A scan of channels, with D beside it, times its gate."""
    channels, states = a.A.shape
    rank = len(a.W_delta)
    x = entry.convolved("x", 0, channels, 0)
    inner = Change(x.a, x.b)
    stops = (rank, rank + states, rank + 2 * states)
    norms = zip(a.norm_weights(), b.norm_weights(), strict=True)
    parts: list[Change] = []
    for part, stop, (norm_a, norm_b) in zip(("step", "B", "C"), stops, norms, strict=True):
        some = slice(stops[len(parts) - 1] if parts else 0, stop)
        selected = inner.linear(Linear(a.W_select[:, some]), Linear(b.W_select[:, some]), entry.name(f"W_{part}"))
        parts.append(_normed(selected, norm_a, norm_b, entry.name(f"norm_{part}")))
    step, B, C = parts
    steps = step.linear(Linear(a.W_delta, a.b_delta), Linear(b.W_delta, b.b_delta), entry.name("W_delta"))
    delta = activated(steps, softplus)
    run_a = ScanRun(*map(upcast, (inner.a, delta.a, a.A, B.a, C.a)))
    run_b = ScanRun(*map(upcast, (inner.b, delta.b, b.A, B.b, C.b)))
    response = ScanResponse(run_a, run_b)
    stages: list[AffineMap] = [Sum(tuple(_placed((inner, delta, B, C)))), response]
    if not torch.equal(a.A, b.A):
        stages.append(Offset(response.by_rates().to(x.a), entry.name("A")))
    passed = inner.weighted(a.D[None, None], b.D[None, None], entry.name("D"))
    both = Sum((Chain(tuple(stages)), passed.map))
    y = Change(_scanned(run_a).to(x.a) + passed.a, _scanned(run_b).to(x.a) + passed.b, (*x.stages, both))
    return y.times(entry.gate(channels, 2 * channels, silu))


def _normed(x: Change, a: NormWeights | None, b: NormWeights | None, name: str) -> Change:
    """Through a norm, where there is one.

    Raises:
        UnsupportedModelError: the two runs' are of different forms.
    """
    if a is None and b is None:
        return x
    if a is None or b is None or a.centre != b.centre:
        raise UnsupportedModelError(f"difference: {name} is of two forms.")
    norm_a = Norm(a.scale_of(x.a), a.gain, a.shift, a.centre)
    norm_b = Norm(b.scale_of(x.b), b.gain, b.shift, b.centre)
    return x.normed(norm_a, norm_b, name)


def _placed(parts: tuple[Change, ...]) -> list[Chain]:
    """Several values side by side."""
    widths = [part.a.shape[-1] for part in parts]
    return [
        Chain((*part.stages, Placed(sum(widths[:number]), widths[number], sum(widths))))
        for number, part in enumerate(parts)
    ]


def _scanned(run: ScanRun) -> Float[Tensor, "batch pos channel"]:
    return SelectiveScan(run.delta, run.A, run.B[:, :, None], run.C[:, :, None]).push(run.x)


def _scan_of_heads(a: Mamba2Weights, b: Mamba2Weights, entry: _Entry) -> Change:
    """A scan of heads by its pattern, with D beside it, times its gate and through its norm."""
    heads = a.heads
    channels = len(a.ends.W_out)
    width = channels // heads
    convolved = len(a.ends.convolution.weight)
    states = (convolved - channels) // 2
    x = entry.convolved("x", channels, 2 * channels, channels)
    B = entry.convolved("B", 2 * channels, 2 * channels + states, channels)
    C = entry.convolved("C", 2 * channels + states, channels + convolved, channels)
    steps = entry.projected("delta", channels + convolved, channels + convolved + heads)
    steps = steps.plus(a.b_delta, b.b_delta, entry.name("b_step"))
    delta = activated(steps, partial(_step_size, limits=a.limits))
    log_decays = delta.weighted(upcast(a.A)[None, None], upcast(b.A)[None, None], entry.name("A"))
    queries = C.repeated(heads // a.groups, states // a.groups)
    pattern = DecayedProducts.of(_wide(queries), _wide(B), _wide(log_decays), a.groups)
    u = x.times(delta)
    D_a, D_b = (weights.D.repeat_interleave(width)[None, None] for weights in (a, b))
    passed = x.weighted(D_a, D_b, entry.name("D"))
    mixing = Chain((*u.stages, Attention(pattern.mean, heads)))
    routes = (mixing, *pattern.responses(_by_head(upcast(u.mean), heads)), passed.map)
    y_a = Attention(pattern.a, heads).push(u.a) + passed.a
    y_b = Attention(pattern.b, heads).push(u.b) + passed.b
    y = Change(y_a, y_b, (Sum(routes),))
    gate = entry.gate(0, channels, silu)
    if a.norm is None or b.norm is None:
        return y.times(gate)
    return _gated_norm(y, gate, a.norm, b.norm, entry.name("norm"))


def _step_size(z: Tensor, limits: tuple[float, float]) -> Tensor:
    return softplus(z).clamp(*limits)


def _gated_norm(y: Change, gate: Change, a: GatedNorm, b: GatedNorm, name: str) -> Change:
    """Through a norm of groups of channels, and times its gate, in the order of the model."""
    if not a.first:
        y = y.times(gate)
    normed = y.over(_scales(y.a, a), _scales(y.b, b), (a.gain, b.gain), name, a.groups)
    return normed.times(gate) if a.first else normed


def _scales(y: Float[Tensor, "batch pos width"], norm: GatedNorm) -> Float[Tensor, "batch pos group"]:
    return (upcast(y).unflatten(-1, (norm.groups, -1)).square().mean(-1) + norm.epsilon).sqrt()


def _delta_rule(a: DeltaWeights, b: DeltaWeights, entry: _Entry) -> Change:
    """The gated delta rule by its two patterns, through its norm and times its gate."""
    heads = a.heads
    values = len(a.ends.W_out)
    keys = (len(a.ends.convolution.weight) - values) // 2
    gates = values + 2 * keys
    after = gates + values
    repeats = heads // a.key_heads
    q = _unit(entry.convolved("Q", values, values + keys, 0), a, b).multiplied(_number(a.key_width**-0.5, entry))
    k = _wide(_unit(entry.convolved("K", values + keys, gates, 0), a, b))
    strength = activated(entry.projected("strength", after, after + heads), torch.sigmoid)
    strength = strength.weighted(_number(a.strongest, entry), _number(b.strongest, entry), entry.name("strongest"))
    steps = entry.projected("decay", after + heads, after + 2 * heads).plus(a.b_delta, b.b_delta, entry.name("b_step"))
    decays = activated(steps, softplus).weighted(upcast(a.A)[None, None], upcast(b.A)[None, None], entry.name("A"))
    log_decays = _wide(decays)
    queries, each = (part.repeated(repeats, keys // a.key_heads) for part in (_wide(q), k))
    read = DecayedProducts.of(queries, k, log_decays, a.key_heads)
    held = DecayedProducts.of(each, k, log_decays, a.key_heads, itself=False)
    v = entry.convolved("V", 0, values, 0)
    written = _Written.of(v, strength, held)
    mixing = torch.linalg.solve_triangular(written.taken, read.mean, upper=False, left=False, unitriangular=True)
    routes = (Chain((written.driven, Attention(mixing, heads))), *read.responses(written.mean))
    y_a, y_b = (_side_by_side(pattern @ w).to(v.a) for pattern, w in ((read.a, written.a), (read.b, written.b)))
    gate = entry.gate(gates, after, a.gate)
    return _gated_norm(Change(y_a, y_b, (Sum(routes),)), gate, a.norm, b.norm, entry.name("norm"))


@dataclass(frozen=True, eq=False)
class _Written:
    """What the delta rule writes at every position, the solution w of (I + β·S)·w = β·v, and what drives its change.

    Attributes:
        a, b: w in either run.
        taken: the mean of I + β·S.
        driven: from what the mixer reads to ``(mean of I + β·S)·Δw``.
    """

    a: Float[Tensor, "batch head pos d"]
    b: Float[Tensor, "batch head pos d"]
    taken: Float[Tensor, "batch head pos pos"]
    driven: Sum

    @classmethod
    def of(cls, v: Change, strength: Change, held: DecayedProducts) -> "_Written":
        """From values, strengths β and what earlier positions hold under a key, S."""
        heads = held.heads
        strengths = strength.repeated(v.a.shape[-1] // heads)
        new = v.times(strengths)
        taken_a, w_a = _solved(held.a, strength.a, new.a)
        taken_b, w_b = _solved(held.b, strength.b, new.b)
        mean = (w_a + w_b) / 2
        minus = Diagonal(-strengths.mean)
        by_strength = Diagonal(-_side_by_side(held.mean @ mean).to(v.a))
        routes = (
            new.map,
            *(Chain((response, minus)) for response in held.responses(mean)),
            Chain((*strengths.stages, by_strength)),
        )
        return cls(w_a, w_b, (taken_a + taken_b) / 2, Sum(routes))

    @property
    def mean(self) -> Float[Tensor, "batch head pos d"]:
        """w̄."""
        return (self.a + self.b) / 2


def _solved(
    held: Float[Tensor, "batch head pos pos"], strength: Float[Tensor, "batch pos head"], new: Tensor
) -> tuple[Tensor, Float[Tensor, "batch head pos d"]]:
    """I + β·S, and the w of (I + β·S)·w = β·v in one run."""
    taken = torch.eye(held.shape[-1]).to(held) + upcast(strength).transpose(1, 2)[..., None] * held
    values = _by_head(upcast(new), held.shape[1])
    return taken, torch.linalg.solve_triangular(taken, values, upper=False, unitriangular=True)


def _unit(x: Change, a: DeltaWeights, b: DeltaWeights) -> Change:
    """Of length 1, by head of keys."""
    width = x.a.shape[-1] // a.key_heads
    lengths = [
        (upcast(of_run).unflatten(-1, (a.key_heads, -1)).square().sum(-1) + weights.epsilon).sqrt()
        for weights, of_run in ((a, x.a), (b, x.b))
    ]
    scaled = x.over(lengths[0] / width**0.5, lengths[1] / width**0.5, groups=a.key_heads)
    return scaled.multiplied(scaled.a.new_full((1, 1, 1), width**-0.5))


def _number(value: float, entry: _Entry) -> Float[Tensor, "1 1 1"]:
    return entry.read.a.new_full((1, 1, 1), value)


def _wide(x: Change) -> Change:
    """In float32 at least: small decays, and sums over many positions, need the digits."""
    return Change(upcast(x.a), upcast(x.b), x.stages)


def _by_head(x: Float[Tensor, "batch pos width"], heads: int) -> Float[Tensor, "batch head pos d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _side_by_side(x: Float[Tensor, "batch head pos d"]) -> Float[Tensor, "batch pos width"]:
    return x.transpose(1, 2).flatten(2)
