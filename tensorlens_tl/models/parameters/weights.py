"""The weights of a model's parts, in one form for every class, and how norms and activation functions are read."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import Chain, Diagonal, Linear, Norm
from tensorlens_tl.algebra.numerics import centred, maybe, plus, times, upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Activation
from tensorlens_tl.models.parameters.offload import forward_of


@dataclass(frozen=True)
class NormWeights:
    """Gain and shift of a norm (None where it has none); `centre` is True for LayerNorm, False for RMSNorm.

    `epsilon` is set where TransformerLens has no `hook_scale` for it that can be read and replaced: the scale then
    follows from what the norm reads, and the norm is held as a whole.
    """

    gain: Float[Tensor, "d"] | None
    shift: Float[Tensor, "d"] | None
    centre: bool
    epsilon: float | None = None

    def scale_of(self, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any 1"]:
        """√(var + ε) or √(mean square + ε) of what the norm reads, in float32 at least."""
        assert self.epsilon is not None
        return (centred(upcast(x), self.centre).square().mean(-1, keepdim=True) + self.epsilon).sqrt()

    def scales(self, x: Float[Tensor, "*any width"], groups: int) -> Float[Tensor, "*any group"]:
        """The scale of each of several equal groups of channels."""
        return self.scale_of(x.unflatten(-1, (groups, -1)))[..., 0]

    def gains(self, x: Float[Tensor, "*any width"], groups: int) -> Float[Tensor, "width"]:
        """The gain of every channel of several groups; 1 where there is none."""
        ones = torch.ones_like(x[..., :1, :].flatten(0, -2)[0]).unflatten(-1, (groups, -1))
        return times(ones, self.gain).to(x).flatten()

    @property
    def is_plain(self) -> bool:
        """Whether its gain and shift change nothing: folded into what reads the norm, or never trained."""
        has_gain = self.gain is not None and not bool((self.gain == 1).all())
        has_shift = self.shift is not None and bool(self.shift.any())
        return not has_gain and not has_shift

    @property
    def only_scales(self) -> bool:
        """Whether it neither subtracts a mean nor adds anything."""
        return not self.centre and self.shift is None


@dataclass(frozen=True)
class Gate:
    """``squash(x·W + b)``, from what a sublayer reads: a factor, each channel for several of what it multiplies."""

    linear: Linear
    squash: Activation
    each: int = 1

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """The factor of every channel."""
        return self.squash(self.linear(x)).repeat_interleave(self.each, dim=-1)


@dataclass(frozen=True)
class InverseScale:
    """1 / the scale of a norm inside a sublayer, from what the norm reads; its gain belongs to the next matrix."""

    norm: NormWeights

    def __call__(self, z: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """The factor of every position."""
        return (1 / self.norm.scale_of(z)).to(z)


@dataclass(frozen=True)
class InnerValues:
    """Values through a norm: that of each head's values (Gemma 4), or of a latent vector before them (DeepSeek).

    Attributes:
        entry: from what attention reads to what the norm reads.
        norm: with one scale for each of `groups` of channels; one that only scales, if there are several.
        out: from there to the values; None where the norm gives them.
    """

    entry: Linear
    norm: NormWeights
    groups: int
    out: Linear | None = None

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """With the scales held that the norm has at x."""
        read = self.entry(x)
        if self.out is not None:
            return Chain((self.entry, self.held(read), self.out))
        by_group = read.unflatten(-1, (self.groups, -1))
        factor = times((1 / self.norm.scale_of(by_group)).to(read).expand_as(by_group), self.norm.gain)
        return Chain((self.entry, Diagonal(factor.flatten(-2))))

    def held(self, read: Float[Tensor, "batch pos width"]) -> Norm:
        """The norm of a latent vector, with the scale that it has there."""
        return Norm(self.norm.scale_of(read), self.norm.gain, self.norm.shift, self.norm.centre)


@dataclass(frozen=True)
class HeadRouting:
    """Which experts a token's queries are read by, of a mixture of attention heads (JetMoe).

    Attributes:
        linear: from what attention reads to a number for every expert.
        count: how many experts there are.
        choices: how many a token is sent to: those with the largest numbers, which count by their softmax.
    """

    linear: Linear
    count: int
    choices: int

    def patterns(
        self, pattern: Float[Tensor, "batch choice_kv query key"], x: Float[Tensor, "batch query d_model"]
    ) -> Float[Tensor, "batch head query key"]:
        """The pattern of every expert's heads, times what the expert counts for the query; zero for one not chosen.

        Args:
            pattern: of the choices, the first choice's heads first.
            x: what attention reads.
        """
        numbers, index = self.linear(x).topk(self.choices, dim=-1)
        weight = numbers.float().softmax(-1).to(pattern)  # the router computes in float32, whatever the dtype
        sent = torch.nn.functional.one_hot(index, self.count).to(pattern) * weight[..., None]
        by_choice = pattern.unflatten(1, (self.choices, -1))
        return torch.einsum("bckqj,bqce->bkeqj", by_choice, sent).flatten(1, 2)


@dataclass(frozen=True)
class AttentionWeights:
    """Value and output weights with heads side by side; values keep the key-value heads of grouped attention.

    With the pattern held, attention is ``(output_factor ⊙ (pattern · values(x)))·W_O + b_O``. Values are most often
    x·W_V + b_V, and there is seldom a factor.

    Attributes:
        value_matrix, b_V: W_V and its bias; no matrix where values go through a norm inside (latent attention).
        inner_values: values where they are more than x·W_V + b_V.
        output_factor: what multiplies what the heads give: a gate, or the scale of a norm before W_O. None for 1.
        routing: where heads belong to experts that a token is sent to; None where every token has all heads.
        shared: whether values are those of an earlier block, read from the stream there.
        shown: whether values and what heads give have hook points.
    """

    value_matrix: Float[Tensor, "d_model kv_width"] | None
    b_V: Float[Tensor, "kv_width"] | None
    W_O: Float[Tensor, "width d_model"]
    b_O: Float[Tensor, "d_model"] | None
    heads: int
    kv_heads: int
    inner_values: InnerValues | None = None
    output_factor: Gate | InverseScale | None = None
    routing: HeadRouting | None = None
    shared: bool = False
    shown: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is no more than pattern, W_V and W_O."""
        return self.inner_values is None and self.output_factor is None and self.routing is None and not self.shared

    @property
    def hooked(self) -> bool:
        """Whether holding the pattern holds it; else it is held as a whole, by what it reads."""
        return self.is_plain and self.shown

    def scaled(self, factor: float, reads: float = 1.0) -> "AttentionWeights":
        """The same, with what it writes multiplied by a factor, and what it reads by another."""
        scaled = self
        if factor != 1:
            scaled = replace(self, W_O=self.W_O * factor, b_O=maybe(partial(torch.mul, other=factor), self.b_O))
        if reads == 1:
            return scaled
        return replace(scaled, value_matrix=maybe(partial(torch.mul, other=reads), self.value_matrix))

    @property
    def W_V(self) -> Float[Tensor, "d_model kv_width"]:
        """The value weights.

        Raises:
            UnsupportedModelError: values, or what heads give, depend on more than weights and pattern.
        """
        if self.value_matrix is None or not self.is_plain:
            raise UnsupportedModelError(
                "attention with a gate, a norm or a latent inside: what a head reads and writes is no product of its "
                "weights alone. The operator and what is made from it (tensorlens, decompx, stream terms) work."
            )
        return self.value_matrix


@dataclass(frozen=True)
class Latent:
    """What queries or keys are read from in place of the stream (DeepSeek): x·W + b, its first channels normed.

    Attributes:
        entry: the matrix.
        norm: one that only scales.
        rank: how many channels it norms.
    """

    entry: Linear
    norm: NormWeights
    rank: int

    def scale(self, read: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """The norm's scale, from what the matrix gives."""
        return self.norm.scale_of(read[..., : self.rank])

    @property
    def gain(self) -> Float[Tensor, "width"]:
        """What every channel is multiplied by, the scale apart."""
        gain = torch.ones_like(self.entry.weight[0])
        return torch.cat([times(gain[: self.rank], self.norm.gain).to(gain), gain[self.rank :]])


@dataclass(frozen=True)
class QueryKeyWeights:
    """Query and key weights with heads side by side, and the norms of queries and keys where there are any.

    `epsilon` is those norms'. Keys keep the key-value heads of grouped attention. With a latent, the weights are from
    that to heads.
    """

    W_Q: Float[Tensor, "d_read width"]
    b_Q: Float[Tensor, "width"] | None
    W_K: Float[Tensor, "d_latent kv_width"]
    b_K: Float[Tensor, "kv_width"] | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    epsilon: float
    query_latent: Latent | None = None
    key_latent: Latent | None = None


@dataclass(frozen=True)
class WhiteningWeights:
    """What the stream goes through before a block: ``w_i = x_i @ entry + w_{i−1} @ step``."""

    entry: Float[Tensor, "d_model d_model"]
    step: Float[Tensor, "d_model d_model"]


@dataclass(frozen=True)
class MLPWeights:
    """``out(φ(in))`` or gated ``out(φ(gate)·in + b_post)``; `W_gate` is None for a plain MLP.

    Attributes:
        linear_activation: ψ of a gated MLP φ(gate)·ψ(in) (the clamp of gpt-oss); None for the identity.
        post_factor: what multiplies the hidden vector after the activation: the scale of a norm inside (BitNet); None
            without.
        hooked: whether its pre-activations have hook points; else they follow from what it reads, and it is held as a
            whole.
    """

    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, "d_mlp"] | None
    W_gate: Float[Tensor, "d_model d_mlp"] | None
    b_gate: Float[Tensor, "d_mlp"] | None
    b_post: Float[Tensor, "d_mlp"] | None
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"] | None
    activation: Activation
    linear_activation: Activation | None = None
    post_factor: InverseScale | None = None
    hooked: bool = True

    @property
    def hidden(self) -> int:
        """Numbers that a vector takes inside at most."""
        matrices = [W for W in (self.W_in, self.W_gate, self.W_out) if W is not None]
        return self.W_in.shape[1] * len(matrices)

    def scaled(self, factor: float) -> "MLPWeights":
        """The same, with what it writes multiplied by a factor."""
        if factor == 1:
            return self
        return replace(self, W_out=self.W_out * factor, b_out=maybe(partial(torch.mul, other=factor), self.b_out))


@dataclass(frozen=True)
class MLMHead:
    """The transform between a masked language model's encoder and its unembedding: norm(φ(x·W + b)).

    `scale_name` is the hook point of its norm's scale, or None where that follows from what the norm reads.
    """

    W: Float[Tensor, "d_model d_model"]
    b: Float[Tensor, "d_model"] | None
    activation: Activation
    norm: NormWeights
    scale_name: str | None


def innermost(module: Any) -> Any:
    """What a component of a Bridge wraps, however deep; any other module itself."""
    while hasattr(module, "original_component"):
        module = module.original_component
    return module


def is_norm(norm: Any) -> bool:
    """Whether there is a norm that does anything; a Bridge may wrap an Identity."""
    return norm is not None and not isinstance(innermost(norm), nn.Identity)


def norm_weights(norm: Any, cfg: Any) -> NormWeights:
    """Read a norm of either class; gains stored as an offset from 1 (Gemma) come back whole.

    Raises:
        UnsupportedModelError: a part of a Bridge that is neither a LayerNorm nor an RMSNorm.
    """
    if not is_bridge_component(norm):
        gain = detached(getattr(norm, "w", None))
        shift = detached(getattr(norm, "b", None))
        return NormWeights(gain, shift, centre=_subtracts_mean(norm, gain, cfg))
    measured = _measured_norm(innermost(norm), cfg, cfg.d_model)
    is_rms = getattr(norm, "uses_rms_norm", None)
    adds_one = bool(getattr(norm, "uses_weight_offset", is_rms and getattr(cfg, "rmsnorm_uses_offset", False)))
    # TransformerLens 3.9 does not know that Qwen3-Next adds one: what its hooks replace would have another gain. And a
    # Bridge cannot apply a scale that a hook gave it where there is no weight
    reads_alike = is_rms is not None and bool(is_rms) != measured.weights.centre and adds_one == measured.adds_one
    if reads_alike and measured.weights.gain is not None:
        return replace(measured.weights, epsilon=None)
    return measured.weights


def _subtracts_mean(norm: nn.Module, gain: Tensor | None, cfg: Any) -> bool:
    """Whether a norm of TransformerLens is a LayerNorm, which gives the same of a vector plus a constant.

    Its hook points stand aside, so that nobody's hooks are called.
    """
    aside = copy(norm)
    vars(aside)["_modules"] = {name: nn.Identity() for name in norm._modules}
    x = torch.randn(1, 2, _width(gain, cfg), generator=torch.Generator().manual_seed(0))
    if gain is not None:
        x = x.to(gain)
    with torch.no_grad():
        outputs = type(norm).forward(aside, x)
        moved = type(norm).forward(aside, x + 3)
    return bool((moved - outputs).norm() < 0.1 * (outputs - outputs.flip(1)).norm())


def _width(gain: Tensor | None, cfg: Any) -> int:
    return cfg.d_model if gain is None else len(gain)


def computes_in_float32(norm: Any) -> bool:
    """Whether a norm with float64 weights gives the very same of a vector and of that vector rounded to float32.

    Hugging Face's RMSNorms do.
    """
    inner = innermost(norm)
    weight = getattr(inner, "weight", None)
    if weight is None or weight.dtype != torch.float64:
        return False
    x = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight.device)
    with torch.no_grad():
        return torch.equal(forward_of(inner)(x), forward_of(inner)(x.float().double()))


def tried_norm(inner: nn.Module, cfg: Any, *, width: int) -> NormWeights:
    """Read a norm of another library by what it does to random vectors; its epsilon is set.

    Args:
        inner: the module.
        cfg: the model's config, which may know an epsilon that the module does not show.
        width: of what it reads, where it has no gain.

    Raises:
        UnsupportedModelError: it is neither a LayerNorm nor an RMSNorm.
    """
    return _measured_norm(inner, cfg, width).weights


class _Measured(NamedTuple):
    """A norm as its output shows it, and whether it adds 1 to the gain that it stores."""

    weights: NormWeights
    adds_one: bool


def _measured_norm(inner: nn.Module, cfg: Any, width: int) -> _Measured:
    stored = detached(getattr(inner, "weight", None))
    shift = detached(getattr(inner, "bias", None))
    epsilon = _epsilon(inner, cfg)
    gains: list[tuple[Tensor | None, bool]] = [(None, False)]
    x = _off_centre(width).clone()
    if stored is not None:
        gains = [(stored, False), (1 + upcast(stored), True)]  # as Gemma adds it: in half precision it would be rounded
        x = _off_centre(*stored.shape).to(stored, copy=True)
    with torch.no_grad():
        output = forward_of(inner)(x)
    rounding = torch.finfo(output.dtype).eps
    largest = float(output.abs().max())
    options: list[tuple[float, _Measured]] = []
    likelier = shift is not None  # most LayerNorms have a shift, no RMSNorm has
    for centre in (likelier, not likelier):
        for gain, adds_one in gains:
            read = NormWeights(gain, shift, centre, epsilon)
            expected = plus(times(centred(x, centre) / read.scale_of(x).to(x), gain), shift)
            error = float((expected - output).abs().max())
            options.append((error, _Measured(read, adds_one)))
            if error <= 8 * rounding * largest:  # no other can be better by more than rounding
                return options[-1][1]
    error, best = min(options, key=lambda option: option[0])
    # norms of other libraries round in up to four places
    if not error <= (1e-2 + 4 * rounding) * largest:
        raise UnsupportedModelError(f"{type(inner).__name__} is not read as a LayerNorm or an RMSNorm.")
    return best


@lru_cache(maxsize=64)
def _off_centre(*shape: int) -> Tensor:
    """Random vectors with a mean that only a LayerNorm subtracts; the same ones for every norm, drawn once."""
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(0)) + 1


def norm_epsilon(norm: Any, cfg: Any) -> float:
    """ε of a norm of either class."""
    return _epsilon(innermost(norm), cfg)


def _epsilon(inner: Any, cfg: Any) -> float:
    for owner, name in ((inner, "variance_epsilon"), (inner, "eps"), (inner, "epsilon"), (cfg, "eps")):
        value = getattr(owner, name, None)
        if isinstance(value, int | float | Tensor):
            return float(value)
    return 1e-5


def find_activation(component: Any, cfg: Any) -> Activation | None:
    """The activation function of an MLP or head: its own module where it has one, else the one the config names."""
    owners = [owner for owner in (component, getattr(component, "original_component", None)) if owner is not None]
    for owner in owners:
        for name in ("act_fn", "act", "activation_fn", "gelu_impl", "activation"):
            phi = getattr(owner, name, None)
            if callable(phi):
                return _unhooked(phi)
    from transformers.activations import ACT2FN

    name = getattr(cfg, "act_fn", None)
    if isinstance(name, str) and name in ACT2FN:
        return ACT2FN[name]
    return None


def _unhooked(phi: Callable[..., Any]) -> Activation:
    """A Bridge may wrap the activation in a component with hooks of its own; take what it wraps."""
    return getattr(phi, "original_component", None) or phi


def is_bridge_component(module: Any) -> bool:
    """Whether it wraps a part of another library's model."""
    return hasattr(module, "original_component")


def flattened(bias: Tensor) -> Float[Tensor, "width"]:
    """A bias by head, heads side by side."""
    return bias.detach().reshape(-1)


def detached(tensor: Any) -> Tensor | None:
    """A tensor without its graph; None for what is none."""
    return tensor.detach() if isinstance(tensor, Tensor) else None
