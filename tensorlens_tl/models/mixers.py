"""Mixers, which replace attention in some blocks, as exact affine maps with their gates held at one input.

| kind | seen in |
| --- | --- |
| state-space layers, Mamba 1 and 2 | Mamba, FalconMamba, Jamba; Mamba 2, Bamba, GraniteMoeHybrid, NemotronH |
| the gated delta rule | Qwen3-Next, Qwen3.5, OLMo Hybrid |
| gated short convolutions | LFM2 |
| time mixing | RWKV-4 |

Recording the module itself under the corresponding rule (`tensorlens_tl.core.FROZEN`) gives the same map, and the tests
compare the two. The maps here are several times as fast for many vectors, since they are not the graph of a loop over
tokens and do not differentiate through the parts that are held; and their scan or pattern can be inspected.

All mixers here have two projections, a short convolution, a gate, and a norm before or after it. Held values are
computed in float32 or wider (float64 if the input is).

**Gated delta rule** (Yang, Kautz & Hatamizadeh 2025): attention with another kind of pattern. With keys k, queries q,
decays α and strengths β, a head's state decays, removes what it stores under the current key, and stores the new value
there:

    S_t = α_t·S_{t−1}·(I − β_t·k_t·k_tᵀ) + β_t·v_t·k_tᵀ          o_t = S_t·q_t

With q, k, α and β held at one input, this is linear in the values, exactly ``o = M·v`` with (Γ_tj = α_{j+1}⋯α_t)

    M = tril(Γ ⊙ Q·Kᵀ) · (I + strict_tril(diag(β)·(Γ ⊙ K·Kᵀ)))⁻¹ · diag(β)

M is quadratic in positions like a softmax pattern, but its rows do not sum to 1 and it has negative entries. The mixer
is then, right to left,

    Linear(out) @ gate @ norm @ Attention(M) @ ratio @ CausalConvolution @ Linear(values) @ mask

Three layouts of the projections are read: fused (`in_proj_qkvz` and `in_proj_ba`, Qwen3-Next), by kind (`in_proj_qkv`,
`in_proj_z`, `in_proj_b`, `in_proj_a`, Qwen3.5) and separate (`q_proj` and so on, OLMo Hybrid). Padding is zeroed only
before them. Hugging Face's own modules round to float32 even in float64 models.

**RWKV-4** (Peng and others 2023): both of its sublayers, with their gates held at one input, read each token mixed with
the previous one, ``mix(x)_i = μ ⊙ x_i + (1 − μ) ⊙ x_{i−1}``, with a μ for each matrix. Time mixing gives every channel
a weighted mean of its values so far,

    y_i = (Σ_{j<i} exp(k_j − (i−1−j)·w)·v_j + exp(k_i + u)·v_i) / (the same without v)

whose weights sum to 1 and take the place of an attention pattern; w and u are parameters of the channel. With these
weights and the gate σ(r) held, it is linear in the values. Channel mixing is an MLP, ``σ(r) ⊙ (relu(k)²·W_out)``. Right
to left, with a token's mean over earlier ones written as a scan,

    time mixing:    Linear(out) @ σ(r) @ (SelectiveScan @ shift + Diagonal) @ Linear(value) @ mix
    channel mixing: σ(r) @ Linear(out) @ ratio @ Linear(key) @ mix

Hugging Face's module rounds the keys of time mixing to float32 whatever its dtype, and so does the map. Padding counts
like any other token, since the model ignores its mask. After every few blocks the model halves its stream, outside its
hook points, and in its first run scales weights to match.

**State-space layers**: a mixer projects its input, convolves it over a few positions, scans it and gates the result.
With the activation ratio after the convolution, Δ, B, C, the gate and the inner norm's scale held at one input, that is
a chain of linear maps (Ali, Zimerman & Wolf 2024; Zimerman and others 2025), right to left

    Linear(out) @ norm @ gate @ (SelectiveScan + D) @ ratio @ CausalConvolution @ Linear(in) @ mask

Modules are recognised by their parts, never by their class.

| parts | kind | seen in |
| --- | --- | --- |
| `x_proj`, `dt_proj`, a rate for each channel and state | Mamba 1 | Mamba; FalconMamba and Jamba, with norms |
| `dt_bias`, a rate for each head | Mamba 2 | Mamba 2, Bamba, FalconH1, GraniteMoeHybrid, NemotronH, Zamba 2 |

Padding is treated as in Hugging Face: zeroed before the first projection, whose bias the convolution then reads, and
again before the scan. Hugging Face's own modules, including the norms of Δ, B and C, round to float32 even in float64
models and differ from these maps accordingly.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from tensorlens_tl.algebra import (
    AffineMap,
    Attention,
    CausalConvolution,
    Chain,
    Diagonal,
    Identity,
    Linear,
    SelectiveScan,
    Sum,
    on_device,
)
from tensorlens_tl.algebra.numerics import maybe, plus, times
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.activations import Activation, FrozenRule, coefficients, is_elementwise
from tensorlens_tl.models.parameters import (
    LinearWeights,
    detached,
    first_output,
    innermost,
    is_norm,
    read_linear as linear_of,
)
from tensorlens_tl.models.sublayers import has_experts, has_projections

Mask = Bool[Tensor, "_ _"] | Int[Tensor, "_ _"] | Float[Tensor, "_ _"]
"""Non-zero at real tokens, `[batch, pos]`."""


@dataclass(frozen=True)
class Ends:
    """The parts of every mixer before and after its scan; `W_in` outputs more than the convolution reads."""

    W_in: Float[Tensor, "d_model d_in"]
    b_in: Float[Tensor, "d_in"] | None
    convolution: CausalConvolution
    activation: Activation
    W_out: Float[Tensor, "channel d_model"]
    b_out: Float[Tensor, "d_model"] | None


@dataclass(frozen=True, eq=False)
class MixerWeights:
    """A mixer whose parts have been recognised.

    Attributes:
        kind: a one-word name.
        ends: the parts before and after positions are mixed.
        hold: returns the map for an input and mask, with everything that depends on the input frozen.
        rates: the decay rates of its states, if any.
        leaking: describes what carries something from padding to later positions, if anything does.
    """

    kind: str
    ends: Ends
    hold: Callable[[Float[Tensor, "batch pos d_model"], Mask | None], Chain]
    rates: Tensor | None = None
    leaking: str = ""

    @property
    def form(self) -> str:
        """Its kind and sizes, which are equal for two models of one architecture."""
        ends = self.ends
        parts = (ends.W_in, ends.convolution.weight, ends.W_out, self.rates)
        return f"{self.kind} of {', '.join('×'.join(map(str, part.shape)) for part in parts if part is not None)}"


@dataclass(frozen=True)
class GatedNorm:
    """An RMSNorm of groups of channels next to the gate; `first` if it precedes the gate."""

    gain: Float[Tensor, "channel"]
    epsilon: float
    groups: int
    first: bool

    def factor(self, y: Float[Tensor, "batch pos channel"]) -> Float[Tensor, "batch pos channel"]:
        """Return gain ÷ scale, held at y."""
        grouped = y.unflatten(-1, (self.groups, -1))
        scale = (grouped.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return self.gain * scale.expand_as(grouped).flatten(-2)

    def beside(self, gate: Tensor, y: Float[Tensor, "batch pos channel"]) -> list[Tensor]:
        """Return the norm's factor and the gate in the order in which they multiply `y`."""
        if self.first:
            return [self.factor(y), gate]
        return [gate, self.factor(y * gate)]


class Entry:
    """A mixer's input up to where positions are mixed; the first channels of the convolution's output go on to it.

    Attributes:
        keep: 1 at real tokens, or None for all; `again` is the same after the convolution, if the mixer masks twice.
        projected: the whole output of `W_in`.
        before, after: input and output of the activation that follows the convolution.
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
        """Return the whole chain of maps, with `mixing` between the activation and the gate."""
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
        if ends.b_in is not None:  # an affine map over positions needs to know how many there are
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
    """Return 1 at real tokens and 0 at padding, in the dtype of `x`; None if all are real."""
    if mask is None or bool(mask.all()):
        return None
    return (mask != 0)[..., None].to(x)


def wide(held: Tensor) -> Tensor:
    """Cast to float32 or wider: small decays and sums of squares need the precision, even with bfloat16 vectors."""
    return held.to(torch.promote_types(held.dtype, torch.float32))


# ------------------------------------------------------------------ reading modules


def gated_norm(module: Any) -> GatedNorm | None:
    """Return the norm next to the gate of a mixer's channels, or None."""
    norm = innermost(getattr(module, "norm", None))
    if not is_norm(norm):
        return None
    known = hasattr(norm, "weight") and hasattr(norm, "variance_epsilon")
    require(known, module, "norm", f"({type(norm).__name__}) is not an RMSNorm with a gate")
    gain = norm.weight.detach()
    size = getattr(norm, "group_size", len(gain) // getattr(norm, "n_groups", 1))
    return GatedNorm(gain, float(norm.variance_epsilon), len(gain) // size, getattr(norm, "norm_before_gate", False))


def rates(module: Any) -> Tensor:
    """Return the decay rates of the states, as negative numbers."""
    return -wide(module.A_log.detach()).exp()


def biased_entry(module: Any, ends: Ends) -> str:
    """Describe how padding leaks through the bias of the first projection; empty if it does not."""
    if ends.b_in is None or not bool(ends.b_in.any()):
        return ""
    return f"the first projection of {type(module).__name__} has a bias"


def read_convolution(module: Any, name: str = "conv1d") -> CausalConvolution:
    """Return the short convolution, which treats each channel separately."""
    conv = read_part(module, name)
    channels = conv.weight.shape[0]
    width = conv.weight.shape[-1]
    alike = (conv.groups, conv.padding, conv.stride, conv.dilation) == (channels, (width - 1,), (1,), (1,))
    require(alike, module, name, "is not a causal convolution of each channel by itself")
    return CausalConvolution(conv.weight.detach()[:, 0], detached(conv.bias))


def linear_part(module: Any, name: str) -> LinearWeights:
    """Return a mixer's linear layer as a weight (from input to output) and a bias."""

    def refuse(message: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"mixer_map: of {type(module).__name__}, {message}")

    return linear_of(getattr(module, name), f"`{name}`", refuse)


def read_part(module: Any, name: str) -> Any:
    """Return a part, unwrapped if another library wraps it."""
    return innermost(getattr(module, name))


def require(holds: bool, module: Any, part: str, message: str) -> None:
    """Raise `UnsupportedModelError` about a part of a mixer unless a condition holds."""
    if not holds:
        raise UnsupportedModelError(
            f"mixer_map: `{part}` of {type(module).__name__} {message}. Mixers like those of Mamba, Mamba 2 and the "
            "hybrids named in tensorlens_tl.models.mixers can be read."
        )


EPSILON = 1e-6
"""The constant that every implementation adds to the squared length of keys and queries."""

DELTA_PARTS = ("A_log", "dt_bias", "conv1d", "activation", "head_k_dim", "head_v_dim", "num_k_heads", "num_v_heads")
"""The parts of every implementation, which also has one of three sets of projections."""

FUSED = ("in_proj_qkvz", "in_proj_ba")
BY_KIND = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
APART = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")


def delta_pattern(
    q: Float[Tensor, "batch pos head width"],
    k: Float[Tensor, "batch pos head width"],
    log_decay: Float[Tensor, "batch pos head"],
    strength: Float[Tensor, "batch pos head"],
) -> Float[Tensor, "batch head query key"]:
    """Return M for every head by one triangular solve; `q` and `k` are scaled as in the model, `strength` is β."""
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    passed = log_decay.transpose(1, 2).cumsum(-1)
    beta = strength.transpose(1, 2)
    later = torch.ones(passed.shape[-1], passed.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    decays = (passed[..., None] - passed[..., None, :]).masked_fill(later, -torch.inf).exp()
    taken_back = beta[..., None] * decays * (k @ k.mT)  # the solve reads only the part below the diagonal
    read = decays * (q @ k.mT)
    written = torch.linalg.solve_triangular(taken_back, read, upper=False, left=False, unitriangular=True)
    return written * beta[..., None, :]


# ------------------------------------------------------------------ reading modules


def is_delta(module: nn.Module) -> bool:
    """Whether a mixer follows the gated delta rule, judging by its parts."""
    return _has_all(module, DELTA_PARTS) and _projection_names(module) is not None


def _projection_names(module: nn.Module) -> tuple[str, ...] | None:
    return next((names for names in (FUSED, BY_KIND, APART) if _has_all(module, names)), None)


def _has_all(module: nn.Module, names: Sequence[str]) -> bool:
    return all(hasattr(module, name) for name in names)


def read_delta(module: Any) -> MixerWeights:
    """Return the parts of a gated-delta-rule mixer; raise `UnsupportedModelError` naming one that does not fit."""
    from transformers.activations import ACT2FN  # transformers is slow to import

    names = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim")
    heads, key_heads, width, key_width = (int(getattr(module, name)) for name in names)
    keys, values = key_width * key_heads, width * heads
    require(heads % key_heads == 0, module, "num_v_heads", f"({heads}) is no multiple of the {key_heads} of keys")
    q, k, v, *others = _projections(module, keys, values)
    convolution = read_convolution(module)
    convolved = 2 * keys + values
    require(len(convolution.weight) == convolved, module, "conv1d", "does not take queries, keys and values")
    order = [*range(2 * keys, convolved), *range(2 * keys)]  # moves the values from the last place to the first
    convolution = CausalConvolution(convolution.weight[order], maybe(itemgetter(order), convolution.offset))
    known = isinstance(module.activation, str) and module.activation in ACT2FN
    require(known, module, "activation", f"is {module.activation}, which transformers does not know")
    activation = ACT2FN[module.activation]
    W_in, b_in = _side_by_side([v, q, k, *others])
    require(is_elementwise(activation, W_in.dtype, W_in.device), module, "activation", "does not treat channels alone")
    norm_name = _first_name(module, "norm", "o_norm")
    ends = Ends(W_in, b_in, convolution, activation, *linear_part(module, _first_name(module, "out_proj", "o_proj")))
    inner = read_part(module, norm_name)
    known = _has_all(inner, ("weight", "variance_epsilon")) and inner.weight.shape == (width,)
    require(known, module, norm_name, f"({type(inner).__name__}) is not an RMSNorm of each head with a gate")
    norm = GatedNorm(inner.weight.detach().repeat(heads), float(inner.variance_epsilon), heads, first=True)
    of_gate = ACT2FN[getattr(inner, "activation", "silu")]
    A, b_delta = rates(module), module.dt_bias.detach()
    strongest = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0  # at 2, the state may flip its sign

    def unit(part: Tensor) -> Float[Tensor, "batch pos head width"]:
        """Normalise to length 1 and repeat for each head of values."""
        by_head = wide(part).unflatten(-1, (key_heads, -1))
        length = (by_head.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        return (by_head / length).repeat_interleave(heads // key_heads, dim=-2)

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        into = Entry(ends, x, slice(0, convolved), mask, twice=False)
        gate, b, a = (wide(part) for part in into.projected[..., convolved:].split([values, heads, heads], dim=-1))
        q, k = map(unit, into.after[..., values:].chunk(2, dim=-1))
        pattern = delta_pattern(q * key_width**-0.5, k, A * softplus(a + b_delta), strongest * b.sigmoid())
        return into.chain(Attention(pattern.to(x), heads), of_gate(gate), norm)

    leaking = biased_entry(module, ends)
    # unlike Mamba, padding is not zeroed again after the convolution; in a short convolution nothing that mixes follows
    if not leaking and convolution.offset is not None and bool(convolution.offset.any()):
        leaking = f"the convolution of {type(module).__name__} has a bias"
    return MixerWeights("DeltaRule", ends, hold, A, leaking)


def _first_name(module: nn.Module, *names: str) -> str:
    """Return the first of these names that a module has; raise `UnsupportedModelError` if it has none."""
    present = [name for name in names if hasattr(module, name)]
    require(bool(present), module, names[0], "is missing")
    return present[0]


def _projections(module: Any, keys: int, values: int) -> list[LinearWeights]:
    """Return queries, keys, values, gate, strengths and steps, with heads side by side."""
    names = _projection_names(module)
    assert names is not None
    stored = [linear_part(module, name) for name in names]
    heads = int(module.num_v_heads)
    split = {
        FUSED: [[keys, keys, values, values], [heads, heads]],
        BY_KIND: [[keys, keys, values], [values], [heads], [heads]],
        APART: [[keys], [keys], [values], [values], [heads], [heads]],
    }[names]
    groups = int(module.num_k_heads) if names == FUSED else 1
    parts: list[LinearWeights] = []
    for name, projection, sizes in zip(names, stored, split, strict=True):
        width = projection[0].shape[-1]
        expected = sum(sizes)
        require(width == expected, module, name, f"makes {width} numbers, not the {expected} of its heads")
        parts += _parts(projection, sizes, groups)
    return parts


def _parts(stored: LinearWeights, sizes: list[int], groups: int) -> list[LinearWeights]:
    """Split a projection's output into parts; with several groups, each group has all parts side by side."""

    def apart(joint: Tensor) -> list[Tensor]:
        grouped = joint.unflatten(-1, (groups, -1)).split([size // groups for size in sizes], dim=-1)
        return [part.flatten(-2) for part in grouped]

    weight, bias = stored
    return list(map(LinearWeights, apart(weight), maybe(apart, bias) or [None] * len(sizes)))


def _side_by_side(parts: list[LinearWeights]) -> LinearWeights:
    joint = torch.cat([weight for weight, _ in parts], dim=-1)
    if all(bias is None for _, bias in parts):
        return LinearWeights(joint, None)
    return LinearWeights(joint, torch.cat([plus(weight.new_zeros(weight.shape[-1]), bias) for weight, bias in parts]))


TIME_MIX = ("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance", "output")
"""Parts of a time mixing, besides its matrices `key`, `value` and `receptance`."""

CHANNEL_MIX = ("time_mix_key", "time_mix_receptance", "key", "value", "receptance")
"""Parts of a channel mixing."""


@dataclass(frozen=True)
class Mix:
    """A matrix whose input is each token mixed with the previous one."""

    convolution: CausalConvolution
    linear: Linear

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """Return the matrix's output."""
        return self.linear(self.convolution(x))

    def stages(self, length: int) -> tuple[AffineMap, AffineMap]:
        """Return it as two maps over this many positions."""
        return replace(self.convolution, length=length), self.linear


def weighted_mean(
    k: Float[Tensor, "batch pos channel"], A: Float[Tensor, "channel"], bonus: Tensor, dtype: torch.dtype
) -> Sum:
    """Return the sum of a channel's mean over earlier values and the contribution of the token's own.

    `A` are the decay rates of the weights; `bonus` is added to a token's key when it reads itself. Computed in
    `dtype`.
    """
    keys = k.double()  # weights of distant tokens are tiny next to a channel's largest key, and must not underflow
    largest = keys.amax(1, keepdim=True)
    itself = (keys + bonus - largest).exp()
    earlier = pad((keys - largest).exp(), (0, 0, 1, 0))[:, :-1, :, None]
    ones = torch.ones_like(itself)
    scan = SelectiveScan(ones, A.double(), earlier, ones[..., None])
    before = k.new_tensor([[1.0, 0.0]], dtype=dtype).expand(k.shape[-1], -1)
    shift = CausalConvolution(before, length=k.shape[1])  # the previous position of every channel; zero at the first
    total = scan.push(shift.push(ones)) + itself
    held = replace(scan, C=total.reciprocal()[..., None])
    return Sum((Chain((shift, held)), Diagonal((itself / total).to(dtype))))


@dataclass(frozen=True)
class ChannelMixWeights:
    """Channel mixing, in place of an MLP, frozen as a whole: neurons computed by `key`, gated by `receptance`."""

    key: Mix
    receptance: Mix
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"] | None

    @property
    def hooked(self) -> bool:
        """Whether its pre-activations can be held individually."""
        return False

    @property
    def hidden(self) -> int:
        """The largest number of entries of a vector inside."""
        return 2 * self.W_out.shape[0] + 2 * self.W_out.shape[1]

    def hold(self, x: Float[Tensor, "batch pos d_model"], rule: FrozenRule) -> Chain:
        """Return the sublayer as a map, with neurons and gate frozen at `x` by an activation rule.

        The neurons are those of a plain MLP; their output times the gate is treated as a gated MLP's product.
        """
        length = x.shape[1]
        pre = self.key(x)
        neurons = coefficients(squared_relu, pre, None, rule)
        out = Linear(self.W_out, self.b_out)
        gate = self.receptance(x)
        held = coefficients(torch.sigmoid, gate, out(squared_relu(pre)), rule)
        written = (*self.key.stages(length), Diagonal(neurons.through, neurons.rest), out)
        if held.gate is None:
            return Chain((*written, Diagonal(held.through)))
        by_gate = Chain((*self.receptance.stages(length), Diagonal(held.gate, held.rest)))
        return Chain((Sum((Chain((*written, Diagonal(held.through))), by_gate)), Identity()))


def squared_relu(z: Tensor) -> Tensor:
    """Return relu(z)²."""
    return z.relu().square()


# ------------------------------------------------------------------ reading modules


def is_time_mix(module: nn.Module) -> bool:
    """Whether a mixer is a time mixing, judging by its parts."""
    return all(hasattr(module, name) for name in TIME_MIX)


def read_time_mix(module: Any) -> MixerWeights:
    """Return the parts of a time mixing; raise `UnsupportedModelError` naming one that does not fit."""
    names = ("key", "value", "receptance")
    key, value, receptance = mixes = [_mix(module, name) for name in names]
    W_out, b_out = linear_part(module, "output")
    channels = len(W_out)
    for name, mix in zip(names, mixes, strict=True):
        width = mix.linear.weight.shape[1]
        require(width == channels, module, name, f"gives {width} numbers, not the {channels} that `output` reads")
    A, bonus = -module.time_decay.detach().exp(), module.time_first.detach()
    require(A.shape == (channels,), module, "time_decay", "is not one number for each channel")

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        """Hold the weights of the mean and the gate; no token is masked."""
        gate = receptance(x).sigmoid()
        mean = weighted_mean(key(x).float(), A, bonus, x.dtype)
        return Chain((*value.stages(x.shape[1]), mean, Diagonal(gate), Linear(W_out, b_out)))

    ends = Ends(value.linear.weight, value.linear.offset, value.convolution, nn.Identity(), W_out, b_out)
    return MixerWeights("TimeMix", ends, hold, A, f"{type(module).__name__} reads padding as it reads tokens")


def is_channel_mix(module: Any) -> bool:
    """Whether the module in place of an MLP is a channel mixing, judging by its parts."""
    return all(hasattr(module, name) for name in CHANNEL_MIX)


def channel_mix_weights(module: Any) -> ChannelMixWeights:
    """Return the parts of a channel mixing; raise `UnsupportedModelError` naming one that does not fit."""
    return ChannelMixWeights(_mix(module, "key"), _mix(module, "receptance"), *linear_part(module, "value"))


def halving_period(block: Any) -> int:
    """Return after how many blocks the model halves its stream; 0 if it does not."""
    return getattr(getattr(innermost(block), "config", None), "rescale_every", 0)


def halves_after(block: Any, layer: int) -> bool:
    """Whether the model halves its stream after a block (not in train mode, where its weights are not scaled)."""
    every = halving_period(block)
    return every > 0 and not innermost(block).training and (layer + 1) % every == 0


def _mix(module: Any, name: str) -> Mix:
    weight, bias = linear_part(module, name)
    share = getattr(module, f"time_mix_{name}").detach().flatten()
    require(len(share) == len(weight), module, f"time_mix_{name}", "is not one number for each channel of the stream")
    require(_shifts_by_one(module), module, "time_shift", "does not give each token the one before it")
    return Mix(CausalConvolution(torch.stack([1 - share, share], dim=-1)), Linear(weight, bias))


@torch.no_grad()
def _shifts_by_one(module: Any) -> bool:
    """Whether its `time_shift` does what its name says."""
    probe = torch.arange(1.0, 4.0)[None, :, None]
    return read_part(module, "time_shift")(probe).flatten().tolist() == [0.0, 1.0, 2.0]


def scan_of(mixer: Chain) -> SelectiveScan:
    """Return the scan of a state-space mixer's map; its `implicit_attention` shows which positions it reads.

    Raises:
        InvalidInputError: the map has no scan, or more than one.

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
    """Return the parts of a Mamba 1 or 2 layer; raise `UnsupportedModelError` naming one that does not fit."""
    for name in ("in_proj", "conv1d", "A_log", "D", "out_proj"):
        require(hasattr(module, name), module, name, "is missing")
    axes = module.A_log.ndim
    require(axes in (1, 2), module, "A_log", f"has {axes} axes, not one (Mamba 2) or two (Mamba 1)")
    read, names = (_mamba, ("x_proj", "dt_proj")) if axes == 2 else (_mamba2, ("dt_bias", "n_groups"))
    for name in names:
        require(hasattr(module, name), module, name, "is missing")
    return read(module)


def _mamba(module: Any) -> MixerWeights:
    """Read Mamba 1: `in_proj` gives x and the gate, `x_proj` the inputs of Δ, B and C (each with an optional norm)."""
    ends = _ends(module)
    A, D = rates(module), module.D.detach()
    channels, states = A.shape
    W_select, b_select = linear_part(module, "x_proj")
    W_delta, b_delta = linear_part(module, "dt_proj")
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
    """Read Mamba 2: `in_proj` gives gate, x, B, C (the last three convolved) and a Δ per head; groups share B and C."""
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
    """Return both projections and the convolution, with FalconH1's multipliers included in the weights."""
    W_in, b_in = linear_part(module, "in_proj")
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
    return Ends(W_in, b_in, read_convolution(module), activation, *linear_part(module, "out_proj"))


@torch.no_grad()
def mixer_map(module: nn.Module, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
    """Return a mixer as an exact affine map of its input, with everything that depends on the input frozen at `x`.

    Args:
        module: the Hugging Face module (see the table above).
        x: its input, after the block's norm.
        mask: True at real tokens, as the mixer takes it; None if all are real.

    Raises:
        UnsupportedModelError: a module of another kind; names the part that is missing or does not fit.
        InvalidInputError: vectors of another width, or a mask of another shape.
    """
    weights = _weights(module)
    width = len(weights.ends.W_in)
    if x.shape[-1] != width:
        raise InvalidInputError(f"mixer_map: {type(module).__name__} takes vectors of {width}, x has {x.shape[-1]}.")
    if mask is not None and mask.shape != x.shape[:2]:
        raise InvalidInputError(f"mixer_map: the mask is {list(mask.shape)}, x is {list(x.shape)}; pass [batch, pos].")
    return weights.hold(x.detach(), mask)


@dataclass(frozen=True, eq=False)
class Mixer:
    """A mixer in place of attention, read from its module at each use.

    Its map raises an error if left padding would reach real tokens through a bias of the mixer (`leaking` says how).
    """

    module: nn.Module
    refuse: Callable[[str], UnsupportedModelError]
    leaking: str

    def __call__(self, x: Tensor, mask: Mask | None) -> Chain:
        """Return its map for an input and a mask of real tokens, with everything that depends on the input held."""
        if self.leaking and mask is not None and bool(((mask != 0).cumsum(1) == 0).any()):
            raise self.refuse(
                f"{self.leaking}, which left padding passes on to real tokens, so padding would change the model's "
                "output. Pad on the right, or freeze the prompts one by one."
            )
        device = next(self.module.parameters()).device
        return on_device(mixer_map(self.module, *on_device((x, mask), device)), x.device)

    @property
    def form(self) -> str:
        """Its kind and sizes, which are equal for two models of one architecture."""
        return _weights(self.module).form

    def runs(self, mask: Mask | None) -> Callable[[Tensor], Tensor]:
        """Return the module as a function of its input that uses plain torch operations, not custom kernels."""
        forward = next(filter(None, (getattr(self.module, name, None) for name in PLAIN)))
        takes_mask = mask is not None and "attention_mask" in inspect.signature(forward).parameters
        options = {"attention_mask": mask.long()} if takes_mask and mask is not None else {}

        return lambda x: first_output(forward(x, **options))


PLAIN = ("torch_forward", "slow_forward", "forward")
"""Methods that compute a mixer without custom kernels; the last is for mixers that have none."""


def read_mixer(module: nn.Module, refuse: Callable[[str], UnsupportedModelError] = UnsupportedModelError) -> Mixer:
    """Read a mixer of any known kind; raise `UnsupportedModelError` naming a part that does not fit."""
    return Mixer(module, refuse, _weights(module).leaking)


def read_only_mixer(mixers: Mapping[str, Any], refuse: Callable[[str], UnsupportedModelError]) -> Mixer | None:
    """Return a block's only mixer, or None; raise `UnsupportedModelError` for two, or one that cannot be read."""
    names = list(mixers)
    if len(names) > 1:
        raise refuse(f"{' and '.join(names)} next to each other, which is not supported.")
    if not names:
        return None
    try:
        return read_mixer(innermost(mixers[names[0]]), refuse)
    except UnsupportedModelError as error:
        raise refuse(f"{names[0]}: {error}") from None


def _weights(module: nn.Module) -> MixerWeights:
    """Read a mixer's parts, whatever its kind."""
    if is_delta(module):
        return read_delta(module)
    if is_time_mix(module):
        return read_time_mix(module)
    parts = [innermost(getattr(module, name, None)) for name in ("in_proj", "conv", "out_proj")]
    if all(isinstance(part, nn.Module) for part in parts) and not hasattr(module, "A_log"):
        return _short_convolution(module)
    return read_scan(module)


def _short_convolution(module: nn.Module) -> MixerWeights:
    """Read a gated short convolution: out(C ⊙ conv(B ⊙ x)), with B, C and x parts of one projection."""
    ends = Ends(
        *linear_part(module, "in_proj"),
        read_convolution(module, "conv"),
        nn.Identity(),
        *linear_part(module, "out_proj"),
    )
    channels = len(ends.W_out)
    fits = ends.W_in.shape[1] == 3 * channels == 3 * len(ends.convolution.weight)
    require(fits, module, "in_proj", "does not make B, C and x")
    last = slice(2 * channels, None)

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        keep = real_tokens(mask, x)
        before, after, _ = Linear(ends.W_in, ends.b_in)(times(x, keep)).chunk(3, dim=-1)
        offset = maybe(lambda b_in: before * b_in[last], ends.b_in)
        stages: list[AffineMap] = [] if keep is None else [Diagonal(keep)]
        convolution = replace(ends.convolution, length=x.shape[1])
        stages += [Linear(ends.W_in[:, last]), Diagonal(before, offset), convolution, Diagonal(after)]
        return Chain((*stages, Linear(ends.W_out, ends.b_out)))

    return MixerWeights("ShortConvolution", ends, hold, leaking=biased_entry(module, ends))


# ------------------------------------------------------------------ blocks of one sublayer each (NemotronH)


def is_attention(module: Any) -> bool:
    """Whether the module in a mixer's place is softmax attention, judging by its parts."""
    inner = innermost(module)
    return _has(inner, "q_proj", "o_proj") and not hasattr(inner, "A_log")


def is_mlp(module: Any) -> bool:
    """Whether it is an MLP or a mixture of experts, judging by its parts."""
    inner = innermost(module)
    return isinstance(inner, nn.Module) and not _has(inner, "o_proj") and (has_projections(inner) or has_experts(inner))


def _has(inner: Any, *names: str) -> bool:
    return all(isinstance(innermost(getattr(inner, name, None)), nn.Module) for name in names)


@dataclass(frozen=True)
class NoMixing:
    """The mixer of a block that is only an MLP: a map that gives zero."""

    form = "nothing that mixes positions"

    def __call__(self, x: Tensor, mask: Mask | None) -> Chain:
        """Return zero, as the map of an empty hidden vector."""
        nothing = x.new_zeros(x.shape[-1], 1)
        return Chain((Linear(nothing), Linear(nothing.mT)))
