"""How is a block's MLP read: plain, gated, or with a norm inside?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens_tl.models.activations import Activation, is_elementwise
from tensorlens_tl.models.parameters import (
    MLPWeights,
    Refuse,
    detached,
    find_activation,
    floating,
    innermost,
    is_bridge_component,
    read_linear,
    refuse_bypassed,
    shown,
    tried_norm,
    unlike_shown,
)

PROJECTIONS: Sequence[tuple[str, str, str]] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("", "up_proj", "down_proj"),
    ("", "wi", "wo"),
    ("", "fc1", "fc2"),
)
"""What Hugging Face's MLPs call gate, input and output."""


PARTS = ("in", "out", "gate")
"""What TransformerLens calls the projections of an MLP."""


def read_mlp(mlp: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    """The weights of a plain or gated MLP.

    Raises:
        UnsupportedModelError: it is neither.
    """
    refuse_bypassed(mlp, PARTS, "mlp", refuse)
    (W_in, b_in), (W_out, b_out), (W_gate, b_gate) = (_projection(mlp, part, refuse) for part in PARTS)
    if not isinstance(W_in, Tensor) or not isinstance(W_out, Tensor) or W_in.ndim != 2:
        raise refuse(
            f"mlp ({type(mlp).__name__}) has no readable W_in and W_out [d_model, d_mlp], and no experts that are. "
            "Only plain and gated MLPs, and mixtures of them, can be frozen."
        )
    phi = read_activation(mlp, cfg, refuse)
    gated = isinstance(W_gate, Tensor)
    added_after = gated and not is_bridge_component(mlp)  # HookedTransformer: φ(g)·u + b_in
    fused = not gated and W_in.shape[1] == 2 * W_out.shape[0]  # gate and input in one projection (ModernBERT)
    if fused:
        W_gate, W_in = W_in.chunk(2, dim=1)
        b_gate, b_in = (None, None) if b_in is None else b_in.chunk(2)
    read = MLPWeights(
        W_in=floating(W_in, "mlp.W_in", refuse),
        b_in=None if added_after else b_in,
        W_gate=floating(W_gate, "mlp.W_gate", refuse) if isinstance(W_gate, Tensor) else None,
        b_gate=b_gate if gated or fused else None,
        b_post=b_in if added_after else None,
        W_out=floating(W_out, "mlp.W_out", refuse),
        b_out=b_out,
        activation=phi,
        hooked=not fused,
    )
    return _with_inner_norm(read, innermost(mlp), cfg, refuse)


def _projection(mlp: Any, part: str, refuse: Refuse) -> tuple[Any, Tensor | None]:
    """One of an MLP's matrices, from input to output, as its module computes it, and its bias."""
    module = unlike_shown(mlp, part)
    if module is not None:
        return read_linear(module, f"mlp.{part}", refuse)
    return shown(mlp, f"W_{part}"), _bias(mlp, f"b_{part}", part)


def _bias(mlp: Any, name: str, part: str) -> Tensor | None:
    found = shown(mlp, name)
    if isinstance(found, Tensor) and found.is_meta:  # a Bridge shows the one that was there when it wrapped the model
        found = shown(mlp._modules.get(part), "bias")
    return detached(found)


def _with_inner_norm(read: MLPWeights, inner: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    """The same, with a norm between activation and output where there is one (BitNet)."""
    norm = innermost(getattr(inner, "ffn_sub_norm", None))
    if not isinstance(norm, nn.Module):
        return read
    weights = tried_norm(norm, cfg, width=read.W_out.shape[0])
    if weights.centre or weights.shift is not None:
        raise refuse(f"the norm inside its mlp ({type(norm).__name__}) is centred or shifted; it is not read.")
    W_out = read.W_out if weights.gain is None else weights.gain[:, None] * read.W_out
    return replace(read, W_out=W_out, post_factor=lambda post: (1 / weights.scale_of(post)).to(post), hooked=False)


def read_module(module: nn.Module, cfg: Any, refuse: Refuse) -> MLPWeights:
    """The weights of a Hugging Face MLP that TransformerLens does not show (an expert, a shared expert).

    Raises:
        UnsupportedModelError: its projections are not found.
    """
    fused = [innermost(getattr(module, name, None)) for name in ("input_linear", "output_linear")]
    if all(isinstance(getattr(part, "weight", None), Tensor) and part.weight.ndim == 2 for part in fused):
        both, out = (read_linear(part, "shared_mlp", refuse).weight for part in fused)
        gate, linear = both.chunk(2, dim=1)
        phi = read_activation(module, cfg, refuse)
        return MLPWeights(linear, None, gate, None, None, out, None, phi, hooked=False)
    for names in PROJECTIONS:
        parts = [innermost(getattr(module, name, None)) if name else None for name in names]
        if all(
            isinstance(getattr(part, "weight", None), Tensor) for part, name in zip(parts, names, strict=True) if name
        ):
            gate, linear, out = (
                None if part is None else read_linear(part, name, refuse)
                for part, name in zip(parts, names, strict=True)
            )
            assert linear is not None
            assert out is not None
            return MLPWeights(
                W_in=linear.weight,
                b_in=linear.bias,
                W_gate=None if gate is None else gate.weight,
                b_gate=None if gate is None else gate.bias,
                b_post=None,
                W_out=out.weight,
                b_out=out.bias,
                activation=read_activation(module, cfg, refuse),
                hooked=False,
            )
    raise refuse(f"{type(module).__name__} has no projections with known names.")


def read_activation(owner: Any, cfg: Any, refuse: Refuse) -> Activation:
    """An MLP's activation function.

    Raises:
        UnsupportedModelError: it is not found, not elementwise, or has a norm inside.
    """
    phi = find_activation(owner, cfg)
    if phi is None:
        raise refuse(f"mlp has no activation function called {cfg.act_fn!r} that we can find.")
    own = next(iter(phi.parameters()), None) if isinstance(phi, nn.Module) else None  # xIELU has weights
    where = ("cpu", torch.float32) if own is None else (own.device, own.dtype)
    if not is_elementwise(phi, where[1], where[0]):
        raise refuse(f"mlp activation {cfg.act_fn!r} mixes channels; only elementwise ones are frozen.")
    if getattr(owner, "hook_mid", None) is not None:
        raise refuse(f"mlp activation {cfg.act_fn!r} has a LayerNorm inside, which is not frozen.")
    return phi
