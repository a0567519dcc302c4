"""The weights of a model's parts, in one form for every class, and how norms and activation functions are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Activation


@dataclass(frozen=True)
class NormWeights:
    """Gain and shift of a norm (None where it has none); `centre` is True for LayerNorm, False for RMSNorm."""

    gain: Float[Tensor, "d"] | None
    shift: Float[Tensor, "d"] | None
    centre: bool


@dataclass(frozen=True)
class AttentionWeights:
    """Value and output weights with heads side by side; values keep the key-value heads of grouped attention."""

    W_V: Float[Tensor, "d_model kv_width"]
    b_V: Float[Tensor, "kv_width"] | None
    W_O: Float[Tensor, "width d_model"]
    b_O: Float[Tensor, "d_model"] | None
    heads: int
    kv_heads: int


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
    """``out(φ(in))`` or gated ``out(φ(gate)·in + b_post)``; `W_gate` is None for a plain MLP."""

    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, "d_mlp"] | None
    W_gate: Float[Tensor, "d_model d_mlp"] | None
    b_gate: Float[Tensor, "d_mlp"] | None
    b_post: Float[Tensor, "d_mlp"] | None
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"] | None
    activation: Activation


@dataclass(frozen=True)
class MLMHead:
    """The transform between a masked language model's encoder and its unembedding: norm(φ(x·W + b))."""

    W: Float[Tensor, "d_model d_model"]
    b: Float[Tensor, "d_model"] | None
    activation: Activation
    norm: NormWeights
    scale_name: str


def is_norm(norm: Any) -> bool:
    """Whether there is a norm that does anything; a Bridge may wrap an Identity."""
    return norm is not None and not isinstance(getattr(norm, "original_component", norm), nn.Identity)


def norm_weights(norm: Any, cfg: Any) -> NormWeights:
    """Read a norm of either class; gains stored as an offset from 1 (Gemma) come back whole.

    Raises:
        UnsupportedModelError: a part of a Bridge that does not say which norm it is.
    """
    if not is_bridge_component(norm):
        gain, shift = getattr(norm, "w", None), getattr(norm, "b", None)
        return NormWeights(detached(gain), detached(shift), centre="RMS" not in type(norm).__name__)
    inner = norm.original_component
    gain, shift = getattr(inner, "weight", None), getattr(inner, "bias", None)
    if not hasattr(norm, "uses_rms_norm"):
        raise UnsupportedModelError(
            f"{getattr(norm, 'name', None) or type(norm).__name__} wraps {type(inner).__name__}, which is not read as "
            "a LayerNorm or an RMSNorm."
        )
    centre = not norm.uses_rms_norm
    offset = getattr(norm, "uses_weight_offset", not centre and bool(getattr(cfg, "rmsnorm_uses_offset", False)))
    gain = detached(gain)
    return NormWeights(1 + gain if gain is not None and offset else gain, detached(shift), centre)


def find_activation(component: Any, cfg: Any) -> Activation | None:
    """The activation function of an MLP or head: its own module where it has one, else the one the config names."""
    owners = (component, getattr(component, "original_component", None))
    for owner in owners:
        for name in ("act_fn", "act", "activation_fn"):
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
