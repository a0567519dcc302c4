"""How is a block's MLP read: plain, gated, or with a norm inside?"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import maybe, times
from tensorlens_tl.models.activations import Activation, is_elementwise
from tensorlens_tl.models.parameters import (
    InverseScale,
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

PROJECTIONS: Sequence[tuple[str, ...]] = (
    ("up_proj", "down_proj", "gate_proj"),
    ("w3", "w2", "w1"),
    ("wi_1", "wo", "wi_0"),
    ("up_proj", "down_proj"),
    ("wi", "wo"),
    ("fc1", "fc2"),
)
"""What Hugging Face's MLPs call input, output and gate, if they have one."""


PARTS = ("in", "out", "gate")
"""What TransformerLens calls the projections of an MLP."""


def read_mlp(mlp: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    """Return the weights of a plain or gated MLP; raise `UnsupportedModelError` for anything else."""
    refuse_bypassed(mlp, PARTS, "mlp", refuse)
    (W_in, b_in), (W_out, b_out), (W_gate, b_gate) = (_projection(mlp, part, refuse) for part in PARTS)
    if not isinstance(W_in, Tensor) or not isinstance(W_out, Tensor) or W_in.ndim != 2:
        raise refuse(
            f"mlp ({type(mlp).__name__}) has no readable W_in and W_out [d_model, d_mlp], and no experts that are. "
            "Only plain and gated MLPs, and mixtures of them, can be frozen."
        )
    phi = read_activation(mlp, cfg, refuse)
    b_post: Tensor | None = None
    fused = False
    if not isinstance(W_gate, Tensor):
        W_gate = None
        b_gate = None
        fused = W_in.shape[1] == 2 * W_out.shape[0]  # gate and input in one projection (ModernBERT)
        if fused:
            W_gate, W_in = W_in.chunk(2, dim=1)
            b_gate, b_in = maybe(partial(torch.chunk, chunks=2), b_in) or (None, None)
    elif not is_bridge_component(mlp):  # HookedTransformer: φ(g)·u + b_in
        b_post = b_in
        b_in = None
    read = MLPWeights(
        W_in=floating(W_in, "mlp.W_in", refuse),
        b_in=b_in,
        W_gate=maybe(partial(floating, name="mlp.W_gate", refuse=refuse), W_gate),
        b_gate=b_gate,
        b_post=b_post,
        W_out=floating(W_out, "mlp.W_out", refuse),
        b_out=b_out,
        activation=phi,
        hooked=not fused,
    )
    return _with_inner_norm(_multiplied(read, innermost(mlp)), innermost(mlp), cfg, refuse)


def _multiplied(read: MLPWeights, inner: Any) -> MLPWeights:
    """The same, with the constants by which some multiply their gate and what they write (Falcon-H1)."""
    gate = float(getattr(inner, "gate_multiplier", 1.0))
    phi = read.activation
    if gate != 1:
        read = replace(read, activation=lambda z: phi(z * gate))
    return read.scaled(float(getattr(inner, "down_multiplier", 1.0)))


def _projection(mlp: Any, part: str, refuse: Refuse) -> tuple[Any, Tensor | None]:
    """One of an MLP's matrices, from input to output, as its module computes it, and its bias."""
    module = unlike_shown(mlp, part)
    if module is not None:
        return read_linear(module, f"mlp.{part}", refuse)
    return shown(mlp, f"W_{part}"), _bias(mlp, f"b_{part}", part)


def _bias(mlp: Any, name: str, part: str) -> Tensor | None:
    bias = shown(mlp, name)
    if isinstance(bias, Tensor) and bias.is_meta:  # a Bridge shows the one that it had when it wrapped the model
        bias = shown(mlp._modules.get(part), "bias")
    return detached(bias)


def _with_inner_norm(read: MLPWeights, inner: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    """The same, with a norm between activation and output where there is one (BitNet)."""
    norm = innermost(getattr(inner, "ffn_sub_norm", None))
    if not isinstance(norm, nn.Module):
        return read
    weights = tried_norm(norm, cfg, width=read.W_out.shape[0])
    if not weights.only_scales:
        raise refuse(f"the norm inside its mlp ({type(norm).__name__}) is centred or shifted; it is not read.")
    W_out = times(read.W_out.mT, weights.gain).mT
    return replace(read, W_out=W_out, post_factor=InverseScale(weights), hooked=False)


def has_projections(module: nn.Module) -> bool:
    """True if a module has the projections of an MLP, under names that are known."""
    return any(all(isinstance(getattr(module, name, None), nn.Module) for name in names) for names in PROJECTIONS)


def read_module(module: nn.Module, cfg: Any, refuse: Refuse) -> MLPWeights:
    """Return the weights of a Hugging Face MLP that TransformerLens does not show (an expert), else
    `UnsupportedModelError`."""
    fused = [innermost(getattr(module, name, None)) for name in ("input_linear", "output_linear")]
    if all(isinstance(getattr(part, "weight", None), Tensor) and part.weight.ndim == 2 for part in fused):
        both, out = (read_linear(part, "shared_mlp", refuse).weight for part in fused)
        gate, linear = both.chunk(2, dim=1)
        phi = read_activation(module, cfg, refuse)
        return MLPWeights(linear, None, gate, None, None, out, None, phi, hooked=False)
    for names in PROJECTIONS:
        parts = {name: innermost(getattr(module, name, None)) for name in names}
        if all(isinstance(getattr(part, "weight", None), Tensor) for part in parts.values()):
            linear, out, *gates = (read_linear(part, name, refuse) for name, part in parts.items())
            W_gate, b_gate = gates[0] if gates else (None, None)
            return MLPWeights(
                W_in=linear.weight,
                b_in=linear.bias,
                W_gate=W_gate,
                b_gate=b_gate,
                b_post=None,
                W_out=out.weight,
                b_out=out.bias,
                activation=read_activation(module, cfg, refuse),
                hooked=False,
            )
    raise refuse(f"{type(module).__name__} has no projections with known names.")


def read_activation(owner: Any, cfg: Any, refuse: Refuse) -> Activation:
    """Return an MLP's activation; raise `UnsupportedModelError` if it has none, none by element, or a norm inside."""
    phi = find_activation(owner, cfg)
    if phi is None:
        raise refuse(f"mlp has no activation function called {cfg.act_fn!r} that we can find.")
    like = torch.zeros(())
    if isinstance(phi, nn.Module):  # xIELU has weights
        like = next(iter(phi.parameters()), like)
    if not is_elementwise(phi, like.dtype, like.device):
        raise refuse(f"mlp activation {cfg.act_fn!r} mixes channels; only elementwise ones are frozen.")
    if getattr(owner, "hook_mid", None) is not None:
        raise refuse(f"mlp activation {cfg.act_fn!r} has a LayerNorm inside, which is not frozen.")
    return phi
