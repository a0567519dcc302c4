"""The four rules of the frozen model: how an activation function is linearised at its input.

A plain MLP computes φ(z), a gated one φ(g)·u. A rule replaces this by ``c_u·u + c_g·g + rest`` (plain: ``c_u·z +
rest``), which equals it at the captured input. Coefficients are computed from φ and the captured pre-activations, never
by dividing post-activations, so they are exact at zero too.

| rule | plain | gated |
| --- | --- | --- |
| `frozen` (TensorLens: the ratio) | φ(z)/z | c_u = φ(g), c_g = 0 |
| `frozen-integrated-gradients` (zero baseline) | φ(z)/z, the same | c_u = ∫₀¹ φ(αg) dα, c_g = u·(φ(g) − c_u)/g |
| `frozen-split` (the uniform rule of AttnLRP) | φ(z)/z, the same | c_u = φ(g)/2, c_g = u·φ(g)/(2g) |
| `frozen-tangent` (the Jacobian) | φ'(z) | c_u = φ(g), c_g = u·φ'(g) |

Integrated gradients from a zero baseline through z = Σ_j z_j give exactly z_j·φ(z)/z. For a plain MLP, the IG
decomposition of Kobayashi et al. (2024), the zero-origin ratio of DecompX and the ratio of TensorLens are therefore the
same operator. For gated MLPs they differ; there, `frozen-integrated-gradients` is our own: ∂(φ(g)u)/∂u integrated along
the straight path with u fixed, and the rest assigned to g so that the sum stays exact. Where φ(0) ≠ 0, the ratio is
(φ(z) − φ(0))/z, and φ(0) counts as bias.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl._arguments import nearest
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.errors import InvalidInputError

Activation = Callable[[Tensor], Tensor]
if TYPE_CHECKING:
    FrozenRule = Literal["frozen", "frozen-integrated-gradients", "frozen-split", "frozen-tangent"]
    """One of `FROZEN_RULES`."""
else:
    FrozenRule = Any  # `known_rule` checks it

FROZEN_RULES: tuple[FrozenRule, ...] = ("frozen", "frozen-integrated-gradients", "frozen-split", "frozen-tangent")
"""The four rules, in the order of the table above."""

OLD_RULES = {
    "ratio": "frozen",
    "ig": "frozen-integrated-gradients",
    "split": "frozen-split",
    "tangent": "frozen-tangent",
}
"""Their former names, as values of the former argument `activation`."""

ONCE_ACTIVATION = {"activation": ("rule", OLD_RULES)}
"""Renamings for `tensorlens_tl._arguments.formerly`."""

QUADRATURE_POINTS = 32
"""Gauss–Legendre points for ∫₀¹ φ(αg) dα; more change it by less than 1e-9 for |g| < 8 and smooth φ."""


@dataclass(frozen=True)
class Coefficients:
    """``φ(z) = through·z + rest`` or, gated, ``φ(g)·u = through·u + gate·g + rest``; None stands for zero.

    >>> from tensorlens_tl.models.activations import coefficients
    >>> z = torch.tensor([[[2.0, -1.0, 0.0]]])
    >>> held = coefficients(torch.nn.functional.gelu, z)
    >>> torch.allclose(held.through * z, torch.nn.functional.gelu(z)), held.rest
    (True, None)
    """

    through: Float[Tensor, "batch pos d_mlp"]
    gate: Float[Tensor, "batch pos d_mlp"] | None = None
    rest: Float[Tensor, "batch pos d_mlp"] | None = None

    def offset(self, after: Float[Tensor, "d_mlp"] | None) -> Float[Tensor, "batch pos d_mlp"] | None:
        """Return the constant part: `rest`, and `after`, which the model adds to the product; None for nothing."""
        if after is None:
            return self.rest
        return plus(after.expand_as(self.through), self.rest)


def known_rule(rule: str) -> FrozenRule:
    """Return the rule; raise `InvalidInputError` unless it is one of `FROZEN_RULES`."""
    for known in FROZEN_RULES:
        if rule == known:
            return known
    raise InvalidInputError(
        f"rule={rule!r}: scores computed from weights need a rule of the frozen model; use one of "
        f"{', '.join(map(repr, FROZEN_RULES))}.{nearest(rule, FROZEN_RULES, OLD_RULES)}"
    )


def coefficients(
    phi: Activation,
    pre: Float[Tensor, "batch pos d_mlp"],
    linear: Float[Tensor, "batch pos d_mlp"] | None = None,
    rule: FrozenRule = "frozen",
    psi: Activation | None = None,
) -> Coefficients:
    """Return a rule's coefficients (table above) at pre-activations: z for a plain MLP; g, with `linear` u, for a gated
    one.

    `psi` is for MLPs φ(g)·ψ(u), as in gpt-oss, which clamps u and adds 1: the rule is applied at ψ(u), and ψ(u) itself
    is linearised by its own ratio (``frozen-tangent``: its derivative). An unknown rule raises `InvalidInputError`.
    """
    known_rule(rule)
    if psi is not None and linear is not None:
        outer = coefficients(phi, pre, psi(linear), rule)
        inner = coefficients(psi, linear, None, rule)
        rest = outer.rest
        if inner.rest is not None:
            rest = plus(outer.through * inner.rest, outer.rest)
        return Coefficients(outer.through * inner.through, outer.gate, rest)
    if linear is None:
        if rule == "frozen-tangent":
            value = phi(pre)
            slope = derivative(phi, pre)
            return Coefficients(slope, rest=value - slope * pre)
        return Coefficients(ratio(phi, pre), rest=_at_zero(phi, pre))
    if rule == "frozen":
        return Coefficients(phi(pre))
    if rule == "frozen-integrated-gradients":
        mean = path_mean(phi, pre)
        return Coefficients(mean, gate=linear * _quotient(phi, pre, phi(pre) - mean, share=0.5))
    if rule == "frozen-split":
        rest = maybe(lambda at_zero: linear * at_zero / 2, _at_zero(phi, pre))
        return Coefficients(phi(pre) / 2, gate=linear * ratio(phi, pre) / 2, rest=rest)
    gate = linear * derivative(phi, pre)
    return Coefficients(phi(pre), gate=gate, rest=-gate * pre)


def _at_zero(phi: Activation, z: Tensor) -> Tensor | None:
    """Return φ(0) for every entry, or None if it is 0."""
    at_zero = phi(z.new_zeros(()))
    if at_zero == 0:
        return None
    return at_zero.expand_as(z)


def ratio(phi: Activation, z: Tensor) -> Tensor:
    """Return (φ(z) − φ(0))/z elementwise, φ'(0) at z = 0 (½ for GELU and SiLU, 0 for ReLU)."""
    return _quotient(phi, z, plus(phi(z), maybe(torch.neg, _at_zero(phi, z))), share=1.0)


def _quotient(phi: Activation, z: Tensor, numerator: Tensor, share: float) -> Tensor:
    """Return ``numerator / z``, or its limit ``share·φ'(0)`` where z is too small to divide by."""
    if z.dtype == torch.float16:  # its smallest numbers are not negligible: with a ReLU, the limit would drop them
        return _quotient(phi, z.float(), numerator.float(), share).to(z.dtype)
    # Below this |z| the quotient loses digits (denormals, or cancellation where φ(0) ≠ 0), while the limit is
    # exact to rounding once multiplied by z again.
    info = torch.finfo(z.dtype)
    smallest = info.tiny if _at_zero(phi, z) is None else info.eps
    small = z.abs() < smallest**0.5
    if not bool(small.any()):
        return numerator / z
    limit = share * derivative(phi, z.new_zeros(1))
    return torch.where(small, limit, numerator / torch.where(small, torch.ones_like(z), z))


def derivative(phi: Activation, z: Tensor) -> Tensor:
    """Return φ'(z) elementwise by autograd, which also works inside ``torch.no_grad`` and inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = z.detach().clone().requires_grad_(True)
        return torch.autograd.grad(phi(leaf).sum(), leaf)[0]


def path_mean(phi: Activation, g: Tensor) -> Tensor:
    """Return ∫₀¹ φ(αg) dα elementwise by Gauss–Legendre quadrature."""
    total = torch.zeros_like(g)
    for node, weight in zip(*_gauss_legendre(QUADRATURE_POINTS), strict=True):
        total += weight * phi(node * g)
    return total


@cache
def _gauss_legendre(points: int) -> tuple[list[float], list[float]]:
    """Return nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return ((nodes + 1) / 2).tolist(), (weights / 2).tolist()


def is_elementwise(phi: Activation, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether φ treats each channel separately (unlike SoLU's softmax, for example)."""
    probe = torch.linspace(-2.0, 2.0, 8, dtype=torch.float32).to(device=device, dtype=dtype)
    rtol = max(1e-3, 4 * torch.finfo(dtype).eps)
    return bool(torch.allclose(phi(probe[None]), phi(probe[:, None]).T, rtol=rtol, atol=1e-4))


# ------------------------------------------------------------------ in one kernel

GELU_TANH = ("gelu_new", "NewGELUActivation")
"""GELU's tanh form in TransformerLens (a function) and transformers (a module), by name."""

LIBRARIES = ("transformer_lens.", "transformers.")


def in_one_kernel(phi: Activation, dtype: torch.dtype) -> Activation:
    """Return torch's own kernel for GELU's tanh form, which is four times as fast; any other function unchanged.

    Half precision is left unchanged too, where the composite rounds after each operation and the kernel only once.
    """
    if dtype not in (torch.float32, torch.float64) or not _is_written_out(phi):
        return phi
    return partial(nn.functional.gelu, approximate="tanh")


def _is_written_out(phi: Any) -> bool:
    """Whether it is the libraries' own GELU, without hooks or replacements."""
    if not isinstance(phi, nn.Module):
        return _is_of_libraries(phi) and phi.__name__ in GELU_TANH
    is_unchanged = "forward" not in vars(phi) and not phi._forward_hooks and not phi._forward_pre_hooks
    return is_unchanged and type(phi).__name__ in GELU_TANH and _is_of_libraries(type(phi).forward)


def _is_of_libraries(function: Any) -> bool:
    """Whether a function is defined in one of the libraries."""
    return hasattr(function, "__name__") and (function.__module__ or "").startswith(LIBRARIES)
