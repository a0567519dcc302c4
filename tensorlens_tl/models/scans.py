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
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from tensorlens_tl.algebra import AffineMap, CausalConvolution, Chain, Diagonal, Linear, SelectiveScan, Sum
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.activations import Activation, coefficients, is_elementwise
from tensorlens_tl.models.weights import innermost

Mask = Bool[Tensor, "_ _"] | Int[Tensor, "_ _"] | Float[Tensor, "_ _"]
"""True, or not zero, at real tokens, `[batch, pos]`."""


@dataclass(frozen=True)
class Ends:
    """What every mixer has before its scan and after it; `W_in` makes more than goes to the convolution."""

    W_in: Float[Tensor, "d_model d_in"]
    b_in: Float[Tensor, "d_in"] | None
    convolution: CausalConvolution
    activation: Activation
    W_out: Float[Tensor, "channel d_model"]
    b_out: Float[Tensor, "d_model"] | None


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


@dataclass(frozen=True)
class MambaWeights:
    """A Mamba 1 mixer. `W_in` makes x and the gate; `W_select` makes what Δ, B and C come from, each by its norm.

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
        into = _Entry(self.ends, x, slice(0, len(self.D)), mask)
        rank, states = len(self.W_delta), self.A.shape[-1]
        parts = (into.after @ self.W_select).split([rank, states, states], dim=-1)
        step, B, C = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        made = step @ self.W_delta
        delta = softplus(made if self.b_delta is None else made + self.b_delta)
        scan = SelectiveScan(_wide(delta), _wide(self.A), _wide(B)[:, :, None], _wide(C)[:, :, None])
        gate = silu(into.projected[..., len(self.D) :])
        return into.chain(scan, self.D, gate, None)


@dataclass(frozen=True)
class Mamba2Weights:
    """A Mamba 2 mixer. `W_in` makes the gate, then x, B and C (all three convolved), then Δ of each head.

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

    def hold(self, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
        """The mixer as a map, with everything that depends on its input held at `x`."""
        heads, channels = len(self.A), len(self.ends.W_out)
        into = _Entry(self.ends, x, slice(channels, self.ends.W_in.shape[1] - heads), mask)
        B, C = (part.unflatten(-1, (self.groups, -1)) for part in into.after[..., channels:].chunk(2, dim=-1))
        delta = softplus(into.projected[..., -heads:] + self.b_delta).clamp(*self.limits)
        width = channels // heads
        scan = SelectiveScan(_wide(delta), _wide(self.A), _wide(B), _wide(C), width)
        gate = silu(_wide(into.projected[..., :channels]))
        return into.chain(scan, self.D.repeat_interleave(width), gate, self.norm)


class _Entry:
    """A mixer's input on its way to the scan; the first channels of what is convolved go through it."""

    def __init__(self, ends: Ends, x: Tensor, convolved: slice, mask: Mask | None) -> None:
        keep = None if mask is None or bool(mask.all()) else (mask != 0)[..., None].to(x)
        self.ends, self.keep, self.start = ends, keep, convolved.start
        self.projected = Linear(ends.W_in, ends.b_in)(x if keep is None else x * keep)
        self.before = ends.convolution(self.projected[..., convolved])
        after = ends.activation(self.before)
        self.after = after if keep is None else after * keep

    def chain(self, scan: SelectiveScan, D: Tensor, gate: Tensor, norm: GatedNorm | None) -> Chain:
        """All maps of the mixer, from the channels that are scanned."""
        ends, like = self.ends, self.after
        channels = slice(0, len(ends.W_out))
        projected = slice(self.start, self.start + channels.stop)
        held = coefficients(ends.activation, self.before[..., channels])
        ratio, rest = held.through, held.rest
        if self.keep is not None:
            ratio, rest = ratio * self.keep, None if rest is None else rest * self.keep
        weight, offset = ends.convolution.weight, ends.convolution.offset
        scanned = scan + Diagonal(D.to(like)[None, None])
        gates = [gate]
        if norm is not None:
            y = _wide(scanned(like[..., channels]))
            gates = [norm.factor(y), gate] if norm.first else [gate, norm.factor(y * gate)]
        entry: list[AffineMap] = [Linear(ends.W_in[:, projected])]
        if ends.b_in is not None:  # at every position: what mixes positions must be told how many have it
            b_in = ends.b_in[projected].expand(1, like.shape[1], -1)
            entry.append(Diagonal(like.new_ones(()).expand_as(b_in), b_in))
        stages = (
            *entry,
            CausalConvolution(weight[channels], None if offset is None else offset[channels]),
            Diagonal(ratio, rest),
            scanned,
            *(Diagonal(factor.to(like)) for factor in gates),
            Linear(ends.W_out, ends.b_out),
        )
        return Chain(stages if self.keep is None else (Diagonal(self.keep), *stages))


def _wide(held: Tensor) -> Tensor:
    """In float32 at least: small decays and sums of squares need the digits, also beside bfloat16 vectors."""
    return held.to(torch.promote_types(held.dtype, torch.float32))


# ------------------------------------------------------------------ reading modules


@torch.no_grad()
def mixer_map(module: nn.Module, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
    """A state-space mixer as an exact affine map of its input, with everything that depends on it held at `x`.

    Args:
        module: the mixer, as Hugging Face has it (see the table above).
        x: what it is given, after the block's norm.
        mask: True at real tokens, as the mixer is given it; None for all.

    Returns:
        The chain; `scan_of` finds the scan in it.

    Raises:
        UnsupportedModelError: a module of another kind, naming the part that is missing or not as expected.
        InvalidInputError: vectors of another width, or a mask of another shape.
    """
    weights = mixer_weights(module)
    width = len(weights.ends.W_in)
    if x.shape[-1] != width:
        raise InvalidInputError(f"mixer_map: {type(module).__name__} takes vectors of {width}, x has {x.shape[-1]}.")
    if mask is not None and mask.shape != x.shape[:2]:
        raise InvalidInputError(f"mixer_map: the mask is {list(mask.shape)}, x is {list(x.shape)}; pass [batch, pos].")
    return weights.hold(x.detach(), mask)


Mixer = Callable[[Tensor, "Mask | None"], Chain]
"""From what a mixer reads, and which tokens are real, to its map."""


def read_mixer(module: nn.Module) -> Mixer:
    """How a mixer's map follows from what it reads.

    Raises:
        UnsupportedModelError: a mixer of no known kind; names the part.
    """
    if _is_short_convolution(module):
        return partial(short_convolution, module)
    mixer_weights(module)  # refuses what is not read
    return partial(mixer_map, module)


def _is_short_convolution(module: nn.Module) -> bool:
    parts = [innermost(getattr(module, name, None)) for name in ("in_proj", "conv", "out_proj")]
    return all(isinstance(part, nn.Module) for part in parts) and not hasattr(module, "A_log")


def short_convolution(module: nn.Module, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
    """A gated short convolution (LFM2): out(C ⊙ conv(B ⊙ x')), with B, C and x' three parts of one projection.

    B and C, which depend on the input, are held: what is left is linear in x'.

    Args:
        module: Hugging Face's.
        x: what it reads.
        mask: which tokens are real; None for all.
    """
    W, b = _linear(module, "in_proj")
    W_out, b_out = _linear(module, "out_proj")
    keep = None if mask is None else mask.to(x)[..., None]
    read = x if keep is None else x * keep
    before, after, _ = Linear(W, b)(read).chunk(3, dim=-1)
    width = W.shape[1] // 3
    convolution: Any = innermost(module.conv)
    bias = convolution.bias
    moved = CausalConvolution(convolution.weight.detach()[:, 0], None if bias is None else bias.detach())
    own = None if b is None else before * b[2 * width :]
    stages: list[AffineMap] = [] if keep is None else [Diagonal(keep)]
    stages += [Linear(W[:, 2 * width :]), Diagonal(before, own), moved, Diagonal(after), Linear(W_out, b_out)]
    return Chain(tuple(stages))


def scan_of(mixer: Chain) -> SelectiveScan:
    """The scan of a mixer's map, whose `implicit_attention` shows which positions it takes from.

    Raises:
        InvalidInputError: there is none, or more than one.
    """
    terms = [term for stage in mixer.stages for term in (stage.terms if isinstance(stage, Sum) else (stage,))]
    scans = [term for term in terms if isinstance(term, SelectiveScan)]
    if len(scans) != 1:
        raise InvalidInputError(f"scan_of: {len(scans)} scans in {mixer}; pass the map of one mixer.")
    return scans[0]


def mixer_weights(module: nn.Module) -> MambaWeights | Mamba2Weights:
    """What a mixer is made of.

    Raises:
        UnsupportedModelError: neither Mamba 1 nor Mamba 2, naming the part that is missing or not as expected.
    """
    for name in ("in_proj", "conv1d", "A_log", "D", "out_proj"):
        _require(hasattr(module, name), module, name, "is missing")
    axes = module.A_log.ndim
    _require(axes in (1, 2), module, "A_log", f"has {axes} axes, not one (Mamba 2) or two (Mamba 1)")
    for name in ("x_proj", "dt_proj") if axes == 2 else ("dt_bias", "n_groups"):
        _require(hasattr(module, name), module, name, "is missing")
    return _mamba(module) if axes == 2 else _mamba2(module)


def _mamba(module: Any) -> MambaWeights:
    ends, D = _ends(module), module.D.detach()
    channels, states = module.A_log.shape
    select, delta = _linear(module, "x_proj"), _linear(module, "dt_proj")
    rank = len(delta[0])
    _require(ends.W_in.shape[1] == 2 * channels, module, "in_proj", "does not make x and a gate of all channels")
    _require(len(ends.convolution.weight) == channels, module, "conv1d", "does not take the channels of the scan")
    _require(select[1] is None, module, "x_proj", "has a bias")
    _require(select[0].shape == (channels, rank + 2 * states), module, "x_proj", "does not make the rank of Δ, B and C")
    names = [f"{part}_layernorm" for part in ("dt", "b", "c")]
    norms = tuple(_part(module, name) if hasattr(module, name) else nn.Identity() for name in names)
    return MambaWeights(ends, select[0], norms, *delta, _rates(module), D)


def _mamba2(module: Any) -> Mamba2Weights:
    ends, D, heads = _ends(module), module.D.detach(), len(module.A_log)
    channels, convolved, groups = len(ends.W_out), len(ends.convolution.weight), module.n_groups
    _require(channels % heads == 0 == heads % groups, module, "A_log", "has no equal share of channels and groups")
    _require((convolved - channels) % (2 * groups) == 0, module, "conv1d", "does not take x, B and C")
    made = channels + convolved + heads
    _require(
        ends.W_in.shape[1] == made,
        module,
        "in_proj",
        f"makes {ends.W_in.shape[1]} numbers, not the {made} of gate, x, B, C and Δ",
    )
    _require(D.shape == (heads,), module, "D", "is not one number for each head")
    low, high = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
    limits = (float(low), float(high))
    return Mamba2Weights(ends, module.dt_bias.detach(), limits, _rates(module), D, groups, _gated_norm(module))


def _ends(module: Any) -> Ends:
    """Both projections and the convolution, with the multipliers of FalconH1 in the weights."""
    W_in, b_in = _linear(module, "in_proj")
    scale, scales = getattr(module, "ssm_in_multiplier", 1.0), getattr(module, "mup_vector", None)
    if scale != 1.0:
        W_in = W_in * scale
    if scales is not None:
        W_in, b_in = W_in * scales.flatten().to(W_in), None if b_in is None else b_in * scales.flatten().to(W_in)
    conv = _part(module, "conv1d")
    channels, width = conv.weight.shape[0], conv.weight.shape[-1]
    alike = (conv.groups, conv.padding, conv.stride, conv.dilation) == (channels, (width - 1,), (1,), (1,))
    _require(alike, module, "conv1d", "is not a causal convolution of each channel by itself")
    activation = _part(module, "act") if hasattr(module, "act") else silu
    _require(is_elementwise(activation, W_in.dtype, W_in.device), module, "act", "does not treat channels alone")
    offset = None if conv.bias is None else conv.bias.detach()
    convolution = CausalConvolution(conv.weight.detach()[:, 0], offset)
    return Ends(W_in, b_in, convolution, activation, *_linear(module, "out_proj"))


def _gated_norm(module: Any) -> GatedNorm | None:
    norm = _part(module, "norm") if getattr(module, "norm", None) is not None else nn.Identity()
    if isinstance(norm, nn.Identity):
        return None
    known = hasattr(norm, "weight") and hasattr(norm, "variance_epsilon")
    _require(known, module, "norm", f"({type(norm).__name__}) is not an RMSNorm with a gate")
    gain = norm.weight.detach()
    size = getattr(norm, "group_size", len(gain) // getattr(norm, "n_groups", 1))
    return GatedNorm(gain, float(norm.variance_epsilon), len(gain) // size, getattr(norm, "norm_before_gate", False))


def _rates(module: Any) -> Tensor:
    return -_wide(module.A_log.detach()).exp()


def _linear(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """A linear layer's weight, from input to output, and its bias."""
    layer = _part(module, name)
    _require(layer.weight.is_floating_point(), module, name, f"has weights of {layer.weight.dtype} (quantised)")
    bias = getattr(layer, "bias", None)
    return layer.weight.detach().T, None if bias is None else bias.detach()


def _part(module: Any, name: str) -> Any:
    """A part, or what it wraps where another library has put its own around it."""
    return innermost(getattr(module, name))


def _require(holds: bool, module: Any, part: str, message: str) -> None:
    if not holds:
        raise UnsupportedModelError(
            f"mixer_map: `{part}` of {type(module).__name__} {message}. Mixers like those of Mamba, Mamba 2 and the "
            "hybrids named in tensorlens_tl.models.scans can be read; for another, build a Chain from its weights."
        )
