"""What mixers in place of attention have in common: two projections, a short convolution, a gate and a norm beside it.

Held values are made in float32 at least, and in float64 where the input is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, CausalConvolution, Chain, Diagonal, Linear
from tensorlens_tl.algebra.numerics import maybe, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Activation, coefficients
from tensorlens_tl.models.parameters import LinearWeights, detached, innermost, is_norm, read_linear as linear_of

Mask = Bool[Tensor, "_ _"] | Int[Tensor, "_ _"] | Float[Tensor, "_ _"]
"""True, or not zero, at real tokens, `[batch, pos]`."""


@dataclass(frozen=True)
class Ends:
    """What every mixer has before its scan and after it; `W_in` gives more than goes to the convolution."""

    W_in: Float[Tensor, "d_model d_in"]
    b_in: Float[Tensor, "d_in"] | None
    convolution: CausalConvolution
    activation: Activation
    W_out: Float[Tensor, "channel d_model"]
    b_out: Float[Tensor, "d_model"] | None


@dataclass(frozen=True, eq=False)
class MixerWeights:
    """A mixer whose parts are as expected.

    Attributes:
        kind: in a word.
        ends: what comes before all positions are mixed, and after.
        hold: from input and mask to its map, with all that depends on the input frozen.
        rates: of its states, if any.
        leaking: what carries something from padded positions to later ones, if anything does.
    """

    kind: str
    ends: Ends
    hold: Callable[[Float[Tensor, "batch pos d_model"], Mask | None], Chain]
    rates: Tensor | None = None
    leaking: str = ""

    @property
    def form(self) -> str:
        """Its kind and sizes, which two models of one architecture have in common."""
        ends = self.ends
        parts = (ends.W_in, ends.convolution.weight, ends.W_out, self.rates)
        return f"{self.kind} of {', '.join('×'.join(map(str, part.shape)) for part in parts if part is not None)}"


@dataclass(frozen=True)
class GatedNorm:
    """An RMSNorm of groups of channels beside the gate; `first` where it comes before the gate."""

    gain: Float[Tensor, "channel"]
    epsilon: float
    groups: int
    first: bool

    def factor(self, y: Float[Tensor, "batch pos channel"]) -> Float[Tensor, "batch pos channel"]:
        """Gain ÷ scale, held at y."""
        grouped = y.unflatten(-1, (self.groups, -1))
        scale = (grouped.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return self.gain * scale.expand_as(grouped).flatten(-2)

    def beside(self, gate: Tensor, y: Float[Tensor, "batch pos channel"]) -> list[Tensor]:
        """The factor and the gate in the order in which they multiply `y`."""
        if self.first:
            return [self.factor(y), gate]
        return [gate, self.factor(y * gate)]


class Entry:
    """A mixer's input on its way to what mixes all positions; the first channels of what is convolved go through it.

    Attributes:
        keep: 1 at real tokens, or None for all; `again` the same after the convolution, where the mixer masks twice.
        projected: all that `W_in` gives.
        before, after: the activation that follows the convolution.
    """

    def __init__(self, ends: Ends, x: Tensor, convolved: slice, mask: Mask | None, twice: bool = True) -> None:
        self.ends = ends
        self.keep = real_tokens(mask, x)
        self.start = convolved.start
        self.again = self.keep if twice else None
        self.projected = Linear(ends.W_in, ends.b_in)(times(x, self.keep))
        self.before = ends.convolution(self.projected[..., convolved])
        self.after = times(ends.activation(self.before), self.again)

    def chain(self, mixing: AffineMap, gate: Tensor, norm: GatedNorm | None) -> Chain:
        """All maps of the mixer, with `mixing` between the activation and the gate."""
        ends = self.ends
        like = self.after
        channels = slice(0, len(ends.W_out))
        projected = slice(self.start, self.start + channels.stop)
        held = coefficients(ends.activation, self.before[..., channels])
        ratio = times(held.through, self.again)
        rest = maybe(partial(times, factor=self.again), held.rest)
        weight = ends.convolution.weight[channels]
        offset = maybe(itemgetter(channels), ends.convolution.offset)
        gates = [gate]
        if norm is not None:
            gates = norm.beside(gate, wide(mixing(like[..., channels])))
        entry: list[AffineMap] = [Linear(ends.W_in[:, projected])]
        if ends.b_in is not None:  # at every position: what mixes positions must be told how many have it
            b_in = ends.b_in[projected].expand(1, like.shape[1], -1)
            entry.append(Diagonal(like.new_ones(()).expand_as(b_in), b_in))
        stages = (
            *entry,
            CausalConvolution(weight, offset, like.shape[1]),
            Diagonal(ratio, rest),
            mixing,
            *(Diagonal(factor.to(like)) for factor in gates),
            Linear(ends.W_out, ends.b_out),
        )
        if self.keep is not None:
            stages = (Diagonal(self.keep), *stages)
        return Chain(stages)


def real_tokens(mask: Mask | None, x: Tensor) -> Float[Tensor, "batch pos 1"] | None:
    """1 at real tokens and 0 at padding, in the dtype of `x`; None where all are real."""
    if mask is None or bool(mask.all()):
        return None
    return (mask != 0)[..., None].to(x)


def wide(held: Tensor) -> Tensor:
    """In float32 at least: small decays and sums of squares need the digits, also beside bfloat16 vectors."""
    return held.to(torch.promote_types(held.dtype, torch.float32))


# ------------------------------------------------------------------ reading modules


def gated_norm(module: Any) -> GatedNorm | None:
    """The norm beside the gate of a mixer's channels, or None."""
    norm = innermost(getattr(module, "norm", None))
    if not is_norm(norm):
        return None
    known = hasattr(norm, "weight") and hasattr(norm, "variance_epsilon")
    require(known, module, "norm", f"({type(norm).__name__}) is not an RMSNorm with a gate")
    gain = norm.weight.detach()
    size = getattr(norm, "group_size", len(gain) // getattr(norm, "n_groups", 1))
    return GatedNorm(gain, float(norm.variance_epsilon), len(gain) // size, getattr(norm, "norm_before_gate", False))


def rates(module: Any) -> Tensor:
    """How fast states decay, negative."""
    return -wide(module.A_log.detach()).exp()


def biased_entry(module: Any, ends: Ends) -> str:
    """What gives padded positions something that reaches later ones, where the first projection does."""
    if ends.b_in is None or not bool(ends.b_in.any()):
        return ""
    return f"the first projection of {type(module).__name__} has a bias"


def read_convolution(module: Any, name: str = "conv1d") -> CausalConvolution:
    """The short convolution of each channel by itself."""
    conv = read_part(module, name)
    channels = conv.weight.shape[0]
    width = conv.weight.shape[-1]
    alike = (conv.groups, conv.padding, conv.stride, conv.dilation) == (channels, (width - 1,), (1,), (1,))
    require(alike, module, name, "is not a causal convolution of each channel by itself")
    return CausalConvolution(conv.weight.detach()[:, 0], detached(conv.bias))


def read_linear(module: Any, name: str) -> LinearWeights:
    """What a linear layer of a mixer does: a weight, from input to output, and a bias."""

    def refuse(message: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"mixer_map: of {type(module).__name__}, {message}")

    return linear_of(getattr(module, name), f"`{name}`", refuse)


def read_part(module: Any, name: str) -> Any:
    """A part, or what it wraps where another library has put its own around it."""
    return innermost(getattr(module, name))


def require(holds: bool, module: Any, part: str, message: str) -> None:
    """Raise `UnsupportedModelError` about a part of a mixer unless it is as expected."""
    if not holds:
        raise UnsupportedModelError(
            f"mixer_map: `{part}` of {type(module).__name__} {message}. Mixers like those of Mamba, Mamba 2 and the "
            "hybrids named in tensorlens_tl.models.sublayers.mixers can be read."
        )
