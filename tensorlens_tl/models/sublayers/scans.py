"""Mixers of state-space layers as exact affine maps: what is held fixed follows from their weights and one input.

A mixer projects its input, convolves it over a few positions, scans it and gates what comes out. With the activation
ratio after the convolution, Δ, B, C, the gate and the inner norm's scale held at one input, that is a chain of linear
maps (Ali, Zimerman & Wolf 2024; Zimerman and others 2025), right to left

    Linear(out) @ norm @ gate @ (SelectiveScan + D) @ ratio @ CausalConvolution @ Linear(in) @ mask

Modules are told apart by what they are made of, never by their class.

| made of | kind | seen in |
| --- | --- | --- |
| `x_proj`, `dt_proj`, a rate for each channel and state | Mamba 1 | Mamba; FalconMamba and Jamba, with norms |
| `dt_bias`, a rate for each head | Mamba 2 | Mamba 2, Bamba, FalconH1, GraniteMoeHybrid, NemotronH, Zamba 2 |

Padding counts as Hugging Face counts it: zeroed before the first projection, whose bias the convolution then reads, and
again before the scan. Held values are made in float32 at least, and in float64 where the input is; Hugging Face's own
modules, the norms of Δ, B and C among them, round to float32 in float64 models too, and differ from these maps by that.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from tensorlens_tl.algebra import Chain, Diagonal, SelectiveScan
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.activations import is_elementwise
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers.mixing import (
    Ends,
    Entry,
    Mask,
    MixerWeights,
    biased_entry,
    gated_norm,
    rates,
    read_convolution,
    read_linear,
    require,
    wide,
)


def scan_of(mixer: Chain) -> SelectiveScan:
    """The scan of a state-space mixer's map, whose `implicit_attention` shows which positions it reads.

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


def read_scan(module: nn.Module) -> MixerWeights:
    """Return the parts of a Mamba 1 or 2 layer; raise `UnsupportedModelError` with the part that is not as expected."""
    for name in ("in_proj", "conv1d", "A_log", "D", "out_proj"):
        require(hasattr(module, name), module, name, "is missing")
    axes = module.A_log.ndim
    require(axes in (1, 2), module, "A_log", f"has {axes} axes, not one (Mamba 2) or two (Mamba 1)")
    read, names = (_mamba, ("x_proj", "dt_proj")) if axes == 2 else (_mamba2, ("dt_bias", "n_groups"))
    for name in names:
        require(hasattr(module, name), module, name, "is missing")
    return read(module)


def _mamba(module: Any) -> MixerWeights:
    """`in_proj` gives x and the gate, `x_proj` what Δ, B and C come from, each by its norm, if it has one."""
    ends = _ends(module)
    A, D = rates(module), module.D.detach()
    channels, states = A.shape
    W_select, b_select = read_linear(module, "x_proj")
    W_delta, b_delta = read_linear(module, "dt_proj")
    rank = len(W_delta)
    require(ends.W_in.shape[1] == 2 * channels, module, "in_proj", "does not make x and a gate of all channels")
    require(len(ends.convolution.weight) == channels, module, "conv1d", "does not take the channels of the scan")
    require(b_select is None, module, "x_proj", "has a bias")
    require(W_select.shape == (channels, rank + 2 * states), module, "x_proj", "does not make the rank of Δ, B and C")
    norms = [innermost(getattr(module, f"{part}_layernorm", nn.Identity())) for part in ("dt", "b", "c")]

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        into = Entry(ends, x, slice(0, channels), mask)
        parts = (into.after @ W_select).split([rank, states, states], dim=-1)
        step, B, C = (norm(part) for norm, part in zip(norms, parts, strict=True))
        delta = softplus(plus(step @ W_delta, b_delta))
        scan = SelectiveScan(wide(delta), A, wide(B)[:, :, None], wide(C)[:, :, None])
        return into.chain(scan + Diagonal(D[None, None]), silu(into.projected[..., channels:]), None)

    return MixerWeights("Mamba", ends, hold, A, biased_entry(module, ends))


def _mamba2(module: Any) -> MixerWeights:
    """`in_proj` gives the gate, then x, B and C (all three convolved), then Δ of each head; groups share B and C."""
    ends = _ends(module)
    A, D = rates(module), module.D.detach()
    heads, groups = len(A), module.n_groups
    channels = len(ends.W_out)
    convolved = len(ends.convolution.weight)
    require(channels % heads == 0 == heads % groups, module, "A_log", "has no equal share of channels and groups")
    require((convolved - channels) % (2 * groups) == 0, module, "conv1d", "does not take x, B and C")
    width = ends.W_in.shape[1]
    expected = channels + convolved + heads
    require(width == expected, module, "in_proj", f"makes {width} numbers, not the {expected} of gate, x, B, C and Δ")
    require(D.shape == (heads,), module, "D", "is not one number for each head")
    smallest, largest = map(float, getattr(module, "time_step_limit", None) or (0.0, float("inf")))
    norm, b_delta = gated_norm(module), module.dt_bias.detach()
    of_head = channels // heads

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        into = Entry(ends, x, slice(channels, width - heads), mask)
        B, C = (wide(part).unflatten(-1, (groups, -1)) for part in into.after[..., channels:].chunk(2, dim=-1))
        delta = softplus(into.projected[..., -heads:] + b_delta).clamp(smallest, largest)
        scan = SelectiveScan(wide(delta), A, B, C, of_head)
        gate = silu(wide(into.projected[..., :channels]))
        return into.chain(scan + Diagonal(D.repeat_interleave(of_head)[None, None]), gate, norm)

    return MixerWeights("Mamba2", ends, hold, A, biased_entry(module, ends))


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
