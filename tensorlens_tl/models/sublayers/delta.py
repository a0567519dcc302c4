"""Mixers of the gated delta rule (Yang, Kautz & Hatamizadeh 2025) as attention with another kind of pattern.

With keys k, queries q, decays α and strengths β, a head keeps a state that forgets, takes back what it holds under the
key it reads, and writes the new value there:

    S_t = α_t·S_{t−1}·(I − β_t·k_t·k_tᵀ) + β_t·v_t·k_tᵀ          o_t = S_t·q_t

All of q, k, α and β held at one input, this is linear in the values, and exactly ``o = M·v`` with (Γ_tj = α_{j+1}⋯α_t)

    M = tril(Γ ⊙ Q·Kᵀ) · (I + strict_tril(diag(β)·(Γ ⊙ K·Kᵀ)))⁻¹ · diag(β)

M is quadratic in positions, as a softmax pattern is; its rows do not sum to 1, and it has negative numbers. The mixer
is then, right to left,

    Linear(out) @ gate @ norm @ Attention(M) @ ratio @ CausalConvolution @ Linear(values) @ mask

Three ways to store the projections are read: fused (`in_proj_qkvz` and `in_proj_ba`, Qwen3-Next), by kind
(`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, Qwen3.5) and apart (`q_proj` and the like, OLMo Hybrid). Padding
is zeroed before them, and only there. Hugging Face's own modules round to float32 in float64 models too.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus

from tensorlens_tl.algebra import Attention, CausalConvolution, Chain
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.models.activations import is_elementwise
from tensorlens_tl.models.parameters import LinearWeights
from tensorlens_tl.models.sublayers.mixing import (
    Ends,
    Entry,
    GatedNorm,
    Mask,
    MixerWeights,
    biased_entry,
    rates,
    read_convolution,
    read_linear,
    read_part,
    require,
    wide,
)

EPSILON = 1e-6
"""What every implementation adds to the squared length of keys and queries."""

PARTS = ("A_log", "dt_bias", "conv1d", "activation", "head_k_dim", "head_v_dim", "num_k_heads", "num_v_heads")
"""What every implementation has; beside them, one of three sets of projections."""

FUSED = ("in_proj_qkvz", "in_proj_ba")
BY_KIND = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
APART = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")


def delta_pattern(
    q: Float[Tensor, "batch pos head width"],
    k: Float[Tensor, "batch pos head width"],
    log_decay: Float[Tensor, "batch pos head"],
    strength: Float[Tensor, "batch pos head"],
) -> Float[Tensor, "batch head query key"]:
    """Return M of every head, by one triangular solve; `q` and `k` as the model scales them, `strength` is β."""
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    passed = log_decay.transpose(1, 2).cumsum(-1)
    beta = strength.transpose(1, 2)
    later = torch.ones(passed.shape[-1], passed.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    decays = (passed[..., None] - passed[..., None, :]).masked_fill(later, -torch.inf).exp()
    taken_back = beta[..., None] * decays * (k @ k.mT)  # of which the solve reads what is below the diagonal
    read = decays * (q @ k.mT)
    written = torch.linalg.solve_triangular(taken_back, read, upper=False, left=False, unitriangular=True)
    return written * beta[..., None, :]


# ------------------------------------------------------------------ reading modules


def is_delta(module: nn.Module) -> bool:
    """True if a mixer follows the gated delta rule, by what it is made of."""
    return _has(module, PARTS) and _projection_names(module) is not None


def _projection_names(module: nn.Module) -> tuple[str, ...] | None:
    return next((names for names in (FUSED, BY_KIND, APART) if _has(module, names)), None)


def _has(module: nn.Module, names: Sequence[str]) -> bool:
    return all(hasattr(module, name) for name in names)


def read_delta(module: Any) -> MixerWeights:
    """Return the parts of a gated-delta-rule mixer; raise `UnsupportedModelError` with the part that is not as
    expected."""
    from transformers.activations import ACT2FN  # transformers is slow to import

    names = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim")
    heads, key_heads, width, key_width = (int(getattr(module, name)) for name in names)
    keys, values = key_width * key_heads, width * heads
    require(heads % key_heads == 0, module, "num_v_heads", f"({heads}) is no multiple of the {key_heads} of keys")
    q, k, v, *others = _projections(module, keys, values)
    convolution = read_convolution(module)
    convolved = 2 * keys + values
    require(len(convolution.weight) == convolved, module, "conv1d", "does not take queries, keys and values")
    order = [*range(2 * keys, convolved), *range(2 * keys)]  # values come last in the model, and first here
    convolution = CausalConvolution(convolution.weight[order], maybe(itemgetter(order), convolution.offset))
    known = isinstance(module.activation, str) and module.activation in ACT2FN
    require(known, module, "activation", f"is {module.activation}, which transformers does not know")
    activation = ACT2FN[module.activation]
    W_in, b_in = _side_by_side([v, q, k, *others])
    require(is_elementwise(activation, W_in.dtype, W_in.device), module, "activation", "does not treat channels alone")
    norm_name = _first_name(module, "norm", "o_norm")
    ends = Ends(W_in, b_in, convolution, activation, *read_linear(module, _first_name(module, "out_proj", "o_proj")))
    inner = read_part(module, norm_name)
    known = _has(inner, ("weight", "variance_epsilon")) and inner.weight.shape == (width,)
    require(known, module, norm_name, f"({type(inner).__name__}) is not an RMSNorm of each head with a gate")
    norm = GatedNorm(inner.weight.detach().repeat(heads), float(inner.variance_epsilon), heads, first=True)
    of_gate = ACT2FN[getattr(inner, "activation", "silu")]
    A, b_delta = rates(module), module.dt_bias.detach()
    strongest = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0  # of 2, the state may turn its sign

    def unit(part: Tensor) -> Float[Tensor, "batch pos head width"]:
        """Of length 1, once for each head of values."""
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
    # those of Mamba zero padding again after the convolution, and a short convolution is followed by nothing that mixes
    if not leaking and convolution.offset is not None and bool(convolution.offset.any()):
        leaking = f"the convolution of {type(module).__name__} has a bias"
    return MixerWeights("DeltaRule", ends, hold, A, leaking)


def _first_name(module: nn.Module, *names: str) -> str:
    """Return the first of some names that a module has; raise `UnsupportedModelError` without one."""
    present = [name for name in names if hasattr(module, name)]
    require(bool(present), module, names[0], "is missing")
    return present[0]


def _projections(module: Any, keys: int, values: int) -> list[LinearWeights]:
    """Queries, keys, values, gate, strengths and steps, heads side by side."""
    names = _projection_names(module)
    assert names is not None
    stored = [read_linear(module, name) for name in names]
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
    """The parts of what a projection gives; of several groups it gives all parts of one beside each other."""

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
