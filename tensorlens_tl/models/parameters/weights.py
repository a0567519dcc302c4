"""The weights of a model's parts, in one form for every class, and how norms and activation functions are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap
from tensorlens_tl.algebra.numerics import upcast
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
        x = x.double() if x.dtype == torch.float64 else x.float()
        spread = x - x.mean(-1, keepdim=True) if self.centre else x
        return (spread.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


@dataclass(frozen=True)
class AttentionWeights:
    """Value and output weights with heads side by side; values keep the key-value heads of grouped attention.

    With the pattern held, attention is ``(output_factor ⊙ (pattern · values(x)))·W_O + b_O``. Values are most often
    x·W_V + b_V, and there is seldom a factor.

    Attributes:
        value_matrix, b_V: W_V and its bias; no matrix where values go through a norm inside (latent attention).
        inner_values: values as a map, given what attention reads `[batch, pos, d_model]`, where they are more than
            x·W_V + b_V.
        output_factor: a factor `[batch, pos, width or 1]` of what the heads give, from what attention reads and from
            the heads themselves: a gate, or the scale of a norm before W_O. None for 1.
    """

    value_matrix: Float[Tensor, "d_model kv_width"] | None
    b_V: Float[Tensor, "kv_width"] | None
    W_O: Float[Tensor, "width d_model"]
    b_O: Float[Tensor, "d_model"] | None
    heads: int
    kv_heads: int
    inner_values: Callable[[Tensor], AffineMap] | None = None
    output_factor: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def hooked(self) -> bool:
        """Whether holding the pattern holds it; else it is held as a whole, by what it reads."""
        return self.inner_values is None and self.output_factor is None

    @property
    def W_V(self) -> Float[Tensor, "d_model kv_width"]:
        """The value weights.

        Raises:
            UnsupportedModelError: values, or what heads give, depend on more than weights and pattern.
        """
        if self.value_matrix is None or not self.hooked:
            raise UnsupportedModelError(
                "attention with a gate, a norm or a latent inside: what a head reads and writes is no product of its "
                "weights alone. The operator and what is made from it (tensorlens, decompx, stream terms) work."
            )
        return self.value_matrix


@dataclass(frozen=True)
class QueryKeyWeights:
    """Query and key weights with heads side by side, and the norms of queries and keys where there are any.

    `epsilon` is those norms'. Keys keep the key-value heads of grouped attention.
    """

    W_Q: Float[Tensor, "d_model width"]
    b_Q: Float[Tensor, "width"] | None
    W_K: Float[Tensor, "d_model kv_width"]
    b_K: Float[Tensor, "kv_width"] | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    epsilon: float


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
        post_factor: from the hidden vector after the activation to a factor of it, `[batch, pos, d_mlp or 1]` (the
            scale of a norm inside, as in BitNet); None without.
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
    post_factor: Callable[[Tensor], Tensor] | None = None
    hooked: bool = True

    @property
    def hidden(self) -> int:
        """Numbers that a vector takes inside at most."""
        return self.W_in.shape[1] * (2 if self.W_gate is None else 3)


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
        gain = getattr(norm, "w", None)
        shift = getattr(norm, "b", None)
        return NormWeights(detached(gain), detached(shift), centre="RMS" not in type(norm).__name__)
    inner = innermost(norm)
    said = getattr(norm, "uses_rms_norm", None)
    if said is None or not (isinstance(inner, nn.LayerNorm) or "RMSNorm" in type(inner).__name__):
        return tried_norm(inner, cfg, width=cfg.d_model, hooked=said)
    gain = getattr(inner, "weight", None)
    shift = getattr(inner, "bias", None)
    offset = getattr(norm, "uses_weight_offset", said and bool(getattr(cfg, "rmsnorm_uses_offset", False)))
    gain = detached(gain)
    if said and not offset and gain is not None and _adds_one(inner, gain):
        # TransformerLens 3.9 does not know it of Qwen3-Next: what its hooks replace would have another gain
        return tried_norm(inner, cfg, width=len(gain))
    # a Bridge cannot apply a scale that a hook gave it where there is no weight
    epsilon = _epsilon(inner, cfg) if gain is None else None
    if gain is not None and offset:
        gain = 1 + upcast(gain)  # as Gemma adds it: in half precision the sum would be rounded
    return NormWeights(gain, detached(shift), not said, epsilon)


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


def _adds_one(inner: nn.Module, gain: Tensor) -> bool:
    """Whether an RMSNorm stores its gain as an offset from 1, by what it does to a random vector."""
    x = torch.randn(len(gain), generator=torch.Generator().manual_seed(0)).to(gain)
    with torch.no_grad():
        made = forward_of(inner)(x[None])[0] * x.square().mean().sqrt()
    return float((made - x * (1 + gain)).abs().sum()) < float((made - x * gain).abs().sum())


def tried_norm(inner: nn.Module, cfg: Any, *, width: int, hooked: bool | None = None) -> NormWeights:
    """Read a norm of another library by what it does to random vectors.

    Args:
        inner: the module.
        cfg: the model's config, which may know an epsilon that the module does not show.
        width: of what it reads.
        hooked: whether TransformerLens takes it for an RMSNorm (True) or a LayerNorm (False), or has no scale for it.

    Raises:
        UnsupportedModelError: it is neither.
    """
    gain = detached(getattr(inner, "weight", None))
    shift = detached(getattr(inner, "bias", None))
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    x = x if gain is None else x.to(gain)
    epsilon = _epsilon(inner, cfg)
    options = []
    with torch.no_grad():
        made = forward_of(inner)(x)
    for centre in (False, True):
        for factor in (gain,) if gain is None else (gain, 1 + upcast(gain)):
            read = NormWeights(factor, shift, centre, epsilon)
            y = (x - x.mean(-1, keepdim=True) if centre else x) / read.scale_of(x).to(x)
            y = y if factor is None else y * factor
            options.append((float((y if shift is None else y + shift).sub(made).abs().max()), read))
    error, best = min(options, key=lambda option: option[0])
    # norms of other libraries round in up to four places
    if not error <= (1e-2 + 4 * torch.finfo(made.dtype).eps) * float(made.abs().max()):
        raise UnsupportedModelError(f"{type(inner).__name__} is not read as a LayerNorm or an RMSNorm.")
    good = hooked is not None and hooked is not best.centre and gain is not None
    return replace(best, epsilon=None) if good else best


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
    owners = (component, getattr(component, "original_component", None))
    for owner in owners:
        for name in ("act_fn", "act", "activation_fn", "gelu_impl", "activation"):
            phi = getattr(owner, name, None) if owner is not None else None
            if callable(phi):
                return _unhooked(phi)
    from transformers.activations import ACT2FN

    name = getattr(cfg, "act_fn", None)
    return ACT2FN[name] if isinstance(name, str) and name in ACT2FN else None


def _unhooked(phi: Callable[..., Any]) -> Activation:
    """A Bridge may wrap the activation in a component with hooks of its own; take what it wraps."""
    return getattr(phi, "original_component", None) or phi


def is_bridge_component(module: Any) -> bool:
    """Whether it wraps a part of another library's model."""
    return hasattr(module, "original_component")


def detached(tensor: Any) -> Tensor | None:
    """A tensor without its graph; None for what is none."""
    return tensor.detach() if isinstance(tensor, Tensor) else None
