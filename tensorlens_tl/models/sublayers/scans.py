"""Mixers of state-space layers as exact affine maps: what is held fixed follows from their weights and one input.

A mixer projects its input, convolves it over a few positions, scans it and gates what comes out. With the activation
ratio after the convolution, Δ, B, C, the gate and the inner norm's scale held at one input, that is a chain of linear
maps (Ali, Zimerman & Wolf 2024; Zimerman and others 2025), right to left

    Linear(out) @ norm @ gate @ (SelectiveScan + D) @ ratio @ CausalConvolution @ Linear(in) @ mask

Modules are told apart by what they are made of, never by their class.

| made of | kind | seen in |
| --- | --- | --- |
| `x_proj`, `dt_proj`, a rate for each channel and state | `MambaWeights` | Mamba; FalconMamba and Jamba, with norms |
| `dt_bias`, a rate for each head | `Mamba2Weights` | Mamba 2, Bamba, FalconH1, GraniteMoeHybrid, NemotronH, Zamba 2 |

Padding counts as Hugging Face counts it: zeroed before the first projection, whose bias the convolution then reads, and
again before the scan. Held values are made in float32 at least, and in float64 where the input is; Hugging Face's own
modules, the norms of Δ, B and C among them, round to float32 in float64 models too, and differ from these maps by that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from tensorlens_tl.algebra import Chain, Diagonal, SelectiveScan, Sum
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.activations import is_elementwise
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers.mixing import (
    Ends,
    Entry,
    GatedNorm,
    Mask,
    gated_norm,
    rates,
    read_convolution,
    read_linear,
    require,
    wide,
)


@dataclass(frozen=True)
class MambaWeights:
    """A Mamba 1 mixer. `W_in` gives x and the gate; `W_select` gives what Δ, B and C come from, each by its norm.

    Attributes:
        ends: what comes before the scan and after it.
        W_select: from x after the convolution, to the rank of Δ and the states of B and C.
        norms: of the three parts; identities where the model has none.
        W_delta: from the rank to Δ, before softplus.
        b_delta: added to it.
        A: the rates, negative.
        D: what passes by the scan.
    """

    ends: Ends
    W_select: Float[Tensor, "channel rank_and_states"]
    norms: tuple[Callable[[Tensor], Tensor], ...]
    W_delta: Float[Tensor, "rank channel"]
    b_delta: Float[Tensor, "channel"] | None
    A: Float[Tensor, "channel state"]
    D: Float[Tensor, "channel"]

    def hold(self, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
        """The mixer as a map, with everything that depends on its input held at `x`."""
        into = Entry(self.ends, x, slice(0, len(self.D)), mask)
        rank = len(self.W_delta)
        states = self.A.shape[-1]
        parts = (into.after @ self.W_select).split([rank, states, states], dim=-1)
        step, B, C = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        delta = softplus(plus(step @ self.W_delta, self.b_delta))
        scan = SelectiveScan(wide(delta), wide(self.A), wide(B)[:, :, None], wide(C)[:, :, None])
        gate = silu(into.projected[..., len(self.D) :])
        return into.chain(_beside(scan, self.D), gate, None)


@dataclass(frozen=True)
class Mamba2Weights:
    """A Mamba 2 mixer. `W_in` gives the gate, then x, B and C (all three convolved), then Δ of each head.

    Attributes:
        ends: what comes before the scan and after it.
        b_delta: added to Δ before softplus.
        limits: the smallest and largest Δ.
        A: the rates, negative.
        D: what passes by the scan.
        groups: of heads that share B and C.
        norm: the norm beside the gate, or None.
    """

    ends: Ends
    b_delta: Float[Tensor, "head"]
    limits: tuple[float, float]
    A: Float[Tensor, "head"]
    D: Float[Tensor, "head"]
    groups: int
    norm: GatedNorm | None

    @property
    def heads(self) -> int:
        """How many heads it has."""
        return len(self.A)

    def hold(self, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
        """The mixer as a map, with everything that depends on its input held at `x`."""
        heads = self.heads
        channels = len(self.ends.W_out)
        into = Entry(self.ends, x, slice(channels, self.ends.W_in.shape[1] - heads), mask)
        B, C = (part.unflatten(-1, (self.groups, -1)) for part in into.after[..., channels:].chunk(2, dim=-1))
        delta = softplus(into.projected[..., -heads:] + self.b_delta).clamp(*self.limits)
        width = channels // heads
        scan = SelectiveScan(wide(delta), wide(self.A), wide(B), wide(C), width)
        gate = silu(wide(into.projected[..., :channels]))
        return into.chain(_beside(scan, self.D.repeat_interleave(width)), gate, self.norm)


def _beside(scan: SelectiveScan, D: Tensor) -> Sum:
    """What is scanned, and what passes by the scan."""
    return scan + Diagonal(D[None, None])


# ------------------------------------------------------------------ reading modules


def scan_of(mixer: Chain) -> SelectiveScan:
    """The scan of a mixer's map, whose `implicit_attention` shows which positions it takes from.

    Args:
        mixer: the map of a state-space layer, such as `mixer_map` returns.

    Returns:
        The scan.

    Raises:
        InvalidInputError: there is none, or more than one.

    >>> from tensorlens_tl.models import scan_of
    >>> from tensorlens_tl.testing import tiny_model
    >>> scan_of(tlens.freeze(tiny_model("bridge/mamba"), [[3, 4, 5]]).maps.mixer(0))
    SelectiveScan(32 × 1 channels, 6 states)
    """
    scans = [term for stage in mixer.stages for term in stage.summands if isinstance(term, SelectiveScan)]
    if len(scans) != 1:
        raise InvalidInputError(f"scan_of: {len(scans)} scans in {mixer}; pass the map of one mixer.")
    return scans[0]


def mixer_weights(module: nn.Module) -> MambaWeights | Mamba2Weights:
    """What a mixer is made of.

    Raises:
        UnsupportedModelError: neither Mamba 1 nor Mamba 2, naming the part that is missing or not as expected.
    """
    for name in ("in_proj", "conv1d", "A_log", "D", "out_proj"):
        require(hasattr(module, name), module, name, "is missing")
    axes = module.A_log.ndim
    require(axes in (1, 2), module, "A_log", f"has {axes} axes, not one (Mamba 2) or two (Mamba 1)")
    read, names = (_mamba, ("x_proj", "dt_proj")) if axes == 2 else (_mamba2, ("dt_bias", "n_groups"))
    for name in names:
        require(hasattr(module, name), module, name, "is missing")
    return read(module)


def _mamba(module: Any) -> MambaWeights:
    ends = _ends(module)
    D = module.D.detach()
    channels, states = module.A_log.shape
    select = read_linear(module, "x_proj")
    delta = read_linear(module, "dt_proj")
    rank = len(delta[0])
    require(ends.W_in.shape[1] == 2 * channels, module, "in_proj", "does not make x and a gate of all channels")
    require(len(ends.convolution.weight) == channels, module, "conv1d", "does not take the channels of the scan")
    require(select[1] is None, module, "x_proj", "has a bias")
    require(select[0].shape == (channels, rank + 2 * states), module, "x_proj", "does not make the rank of Δ, B and C")
    names = [f"{part}_layernorm" for part in ("dt", "b", "c")]
    norms = tuple(innermost(getattr(module, name, nn.Identity())) for name in names)
    return MambaWeights(ends, select[0], norms, *delta, rates(module), D)


def _mamba2(module: Any) -> Mamba2Weights:
    ends = _ends(module)
    D = module.D.detach()
    heads = len(module.A_log)
    channels = len(ends.W_out)
    convolved = len(ends.convolution.weight)
    groups = module.n_groups
    require(channels % heads == 0 == heads % groups, module, "A_log", "has no equal share of channels and groups")
    require((convolved - channels) % (2 * groups) == 0, module, "conv1d", "does not take x, B and C")
    width = ends.W_in.shape[1]
    expected = channels + convolved + heads
    require(width == expected, module, "in_proj", f"makes {width} numbers, not the {expected} of gate, x, B, C and Δ")
    require(D.shape == (heads,), module, "D", "is not one number for each head")
    low, high = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    limits = (float(low), float(high))
    return Mamba2Weights(ends, module.dt_bias.detach(), limits, rates(module), D, groups, gated_norm(module))


def _ends(module: Any) -> Ends:
    """Both projections and the convolution, with the multipliers of FalconH1 in the weights."""
    W_in, b_in = read_linear(module, "in_proj")
    scale = getattr(module, "ssm_in_multiplier", 1.0)
    if scale != 1.0:
        W_in = W_in * scale
    scales = getattr(module, "mup_vector", None)
    if scales is not None:
        scales = scales.flatten().to(W_in)
        W_in = W_in * scales
        b_in = maybe(scales.__mul__, b_in)
    activation = innermost(getattr(module, "act", silu))
    require(is_elementwise(activation, W_in.dtype, W_in.device), module, "act", "does not treat channels alone")
    return Ends(W_in, b_in, read_convolution(module), activation, *read_linear(module, "out_proj"))
