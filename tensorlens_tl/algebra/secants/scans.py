"""The secant of a selective scan: what it gives for a change of its input, step sizes, and what it writes and reads.

With decays α_t = exp(Δ_t·A), u_t = Δ_t·x_t and states h_t = α_t·h_{t−1} + B_t·u_t, a scan gives y_t = ⟨C_t, h_t⟩. For
two runs, δ their difference and bars their means, every product by the product rule,

    δh_t = ᾱ_t·δh_{t−1} + h̄_{t−1}·δα_t + B̄_t·δu_t + ū_t·δB_t
    δα_t = L_t·Ā·δΔ_t,    δu_t = Δ̄_t·δx_t + x̄_t·δΔ_t,    δy_t = ⟨C̄_t, δh_t⟩ + ⟨h̄_t, δC_t⟩

with L the logarithmic mean of both runs' decays. So it is one more scan, with mean decays, driven by what differs; its
adjoint is that scan from the last position to the first. Where both runs are the same, it is the derivative.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl.algebra.maps import ZERO, MixingMap
from tensorlens_tl.algebra.positions import Where, shared
from tensorlens_tl.algebra.recursion import diagonal_scan, passed_back
from tensorlens_tl.algebra.secants.numbers import logarithmic_mean

CHUNK_BYTES = 16 * 2**20
"""The largest array of states, of as many channels as fit."""

WORKING_ARRAYS = 6
"""Arrays of states that a push or a pull holds at once, about."""


@dataclass(frozen=True, eq=False)
class ScanRun:
    """What a selective scan reads in one run; every channel has a step size and rates of its own, as in Mamba 1.

    Attributes:
        x: its input.
        delta: the step sizes Δ.
        A: the rates at which states decay, negative.
        B: what an input writes to each state.
        C: what an output reads of each.
    """

    x: Float[Tensor, "batch pos channel"]
    delta: Float[Tensor, "batch pos channel"]
    A: Float[Tensor, "channel state"]
    B: Float[Tensor, "batch pos state"]
    C: Float[Tensor, "batch pos state"]

    def until(self, stop: int) -> "ScanRun":
        """Its first positions."""
        cut = {name: getattr(self, name)[:, :stop] for name in ("x", "delta", "B", "C")}
        return replace(self, **cut)

    def log_decays(self, channels: slice) -> Float[Tensor, "batch pos some state"]:
        """Of some channels."""
        return self.delta[..., channels, None] * self.A[channels]

    def states(self, channels: slice) -> Float[Tensor, "batch pos some state"]:
        """All states h of some channels."""
        u = (self.delta * self.x)[..., channels]
        return _scanned(u[..., None] * self.B[..., None, :], self.log_decays(channels).exp())


@dataclass(frozen=True, eq=False)
class _Factors:
    """What the secant of some channels is made of; means of the two runs, but `by_delta`, h̄_{t−1}·L_t·Ā."""

    decay: Float[Tensor, "batch pos some state"]
    by_delta: Float[Tensor, "batch pos some state"]
    states: Float[Tensor, "batch pos some state"]
    delta: Float[Tensor, "batch pos some"]
    x: Float[Tensor, "batch pos some"]
    u: Float[Tensor, "batch pos some"]
    B: Float[Tensor, "batch pos state"]
    C: Float[Tensor, "batch pos state"]

    def absolute(self) -> "_Factors":
        """All of them without their signs."""
        return _Factors(*(getattr(self, field.name).abs() for field in fields(self)))

    def after(self, start: int) -> "_Factors":
        """From one position on."""
        if not start:
            return self
        return _Factors(*(getattr(self, field.name)[:, start:] for field in fields(self)))


@final
@dataclass(frozen=True, eq=False, repr=False)
class ScanResponse(MixingMap):
    """From changes of x, Δ, B and C, side by side in this order, to the change of what a selective scan gives.

    States and decays, which take a number for every position, channel and state, are computed where they are used,
    some channels at a time.

    Attributes:
        a, b: what the scan reads in either run.
        start: the first position that counts; states come from those before it.

    >>> from tensorlens_tl.algebra.secants import ScanResponse, ScanRun
    >>> one, rate = torch.ones(1, 3, 1), -torch.ones(1, 1)
    >>> secant = ScanResponse(ScanRun(2 * one, one, rate, one, one), ScanRun(one, one, rate, one, one))
    >>> only_x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 3, 4)
    >>> secant(only_x).flatten()
    tensor([1.0000, 1.3679, 1.5032])
    """

    a: ScanRun
    b: ScanRun
    start: int = 0

    @property
    def positions(self) -> int | None:
        return self.a.x.shape[1] - self.start

    @property
    def channels(self) -> int:
        """How many channels are scanned."""
        return self.a.x.shape[-1]

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of x, Δ, B and C, as they lie side by side."""
        states = self.a.B.shape[-1]
        return self.channels, self.channels, states, states

    def __repr__(self) -> str:
        return f"ScanResponse({self.channels} channels, {self.a.B.shape[-1]} states)"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "ScanResponse":
        where = shared(where)
        if not isinstance(where, slice):
            raise TypeError("a scan is cut to neighbouring positions; use a slice.")
        begin, end, _ = where.indices(self.a.x.shape[1] - self.start)
        stop = self.start + end
        return ScanResponse(self.a.until(stop), self.b.until(stop), self.start + begin)

    def norm_bound(self) -> float:
        """√(largest row sum · largest column sum) of what the same scan of absolute values gives (Schur's test)."""
        batch, pos, channels = self.a.x[:, self.start :].shape
        ones = self.a.x.new_ones(batch, pos, 1, dtype=torch.float64)
        rows = self._sent(ones.expand(-1, -1, sum(self.widths)), absolute=True).max()
        columns = self._returned(ones.expand(-1, -1, channels), absolute=True).max()
        return float((rows * columns).sqrt())

    def by_rates(self) -> Float[Tensor, "batch pos channel"]:
        """What the scan gives because the rates A of two models differ."""
        parts: list[Tensor] = []
        change = self.a.A - self.b.A
        for channels in self._chunks(1, self.a.x.dtype):
            factors = self._factors(channels)
            previous = _previous((self.a.states(channels) + self.b.states(channels)) / 2)
            slopes = logarithmic_mean(self.a.log_decays(channels), self.b.log_decays(channels))
            drive = (previous * slopes)[:, self.start :] * factors.delta[..., None] * change[channels]
            parts.append((_scanned(drive, factors.decay) @ factors.C[..., None])[..., 0])
        return torch.cat(parts, dim=-1)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self._sent(x)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return self._returned(g)

    def _sent(self, vectors: Tensor, absolute: bool = False) -> Tensor:
        wide = torch.promote_types(vectors.dtype, self.a.x.dtype)
        x, delta, B, C = vectors.to(wide).split(self.widths, dim=-1)
        parts: list[Tensor] = []
        for channels in self._chunks(vectors[..., 0, 0, 0].numel(), wide):
            factors = self._factors(channels, absolute)
            u = factors.delta * x[..., channels] + factors.x * delta[..., channels]
            drive = factors.by_delta * delta[..., channels, None]
            drive = drive + factors.B[..., None, :] * u[..., None]
            drive = drive + factors.u[..., None] * B[..., None, :]
            read = _scanned(drive, factors.decay) @ factors.C[..., None].to(wide)
            parts.append((read + factors.states.to(wide) @ C[..., None])[..., 0])
        return torch.cat(parts, dim=-1).to(vectors.dtype)

    def _returned(self, g: Tensor, absolute: bool = False) -> Tensor:
        wide = torch.promote_types(g.dtype, self.a.x.dtype)
        by_x: list[Tensor] = []
        by_delta: list[Tensor] = []
        by_B = g.new_zeros(*g.shape[:-1], self.a.B.shape[-1], dtype=wide)
        by_C = torch.zeros_like(by_B)
        for channels in self._chunks(g[..., 0, 0, 0].numel(), wide):
            factors = self._factors(channels, absolute)
            read = g[..., channels].to(wide)
            written = _scanned_back(read[..., None] * factors.C[..., None, :], factors.decay)
            by_u = (written @ factors.B[..., None].to(wide))[..., 0]
            by_x.append(factors.delta * by_u)
            by_delta.append((written * factors.by_delta).sum(-1) + factors.x * by_u)
            by_B = by_B + (factors.u[..., None, :].to(wide) @ written)[..., 0, :]
            by_C = by_C + (read[..., None, :] @ factors.states.to(wide))[..., 0, :]
        return torch.cat([*by_x, *by_delta, by_B, by_C], dim=-1).to(g.dtype)

    def _chunks(self, rows: int, dtype: torch.dtype) -> Iterator[slice]:
        """Channels whose states fit."""
        batch, pos, channels = self.a.x.shape
        size = max(1, rows) * batch * pos * self.a.B.shape[-1] * dtype.itemsize
        width = max(1, CHUNK_BYTES // size)
        return (slice(first, first + width) for first in range(0, channels, width))

    def _factors(self, channels: slice, absolute: bool = False) -> _Factors:
        a = self.a
        b = self.b
        logs = (a.log_decays(channels), b.log_decays(channels))
        states = (a.states(channels) + b.states(channels)) / 2
        rates = (a.A[channels] + b.A[channels]) / 2
        factors = _Factors(
            decay=(logs[0].exp() + logs[1].exp()) / 2,
            by_delta=_previous(states) * logarithmic_mean(*logs) * rates,
            states=states,
            delta=(a.delta[..., channels] + b.delta[..., channels]) / 2,
            x=(a.x[..., channels] + b.x[..., channels]) / 2,
            u=((a.delta * a.x)[..., channels] + (b.delta * b.x)[..., channels]) / 2,
            B=(a.B + b.B) / 2,
            C=(a.C + b.C) / 2,
        ).after(self.start)
        return factors.absolute() if absolute else factors


def _previous(states: Float[Tensor, "batch pos some state"]) -> Float[Tensor, "batch pos some state"]:
    """The states one position before, zero before the first."""
    return pad(states, (0, 0, 0, 0, 1, 0))[:, :-1]


def _scanned(drive: Tensor, decay: Tensor) -> Float[Tensor, "*rows batch pos some state"]:
    """All ``h_t = decay_t ⊙ h_{t−1} + drive_t``."""
    h = diagonal_scan(drive.flatten(-2), decay.to(drive).flatten(-2))
    return h.unflatten(-1, decay.shape[-2:])


def _scanned_back(drive: Tensor, decay: Tensor) -> Float[Tensor, "*rows batch pos some state"]:
    """The adjoint, from the last position to the first."""
    h = diagonal_scan(drive.flatten(-2).flip(-2), passed_back(decay.to(drive).flatten(-2)))
    return h.flip(-2).unflatten(-1, decay.shape[-2:])
