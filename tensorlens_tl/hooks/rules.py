"""Rules that change a model's backward pass and leave its forward pass as it is.

A rule is data: how much of a gradient each factor of a product is given, which activation rule stands for φ, and at
which temperature softmax is differentiated. Norm scales are always held. What is held (norms, activations) is held by
the hooks of a frozen pass; attention stays live, and only the gradients of its pattern and its values are changed, by
gradient hooks on the tensors that the model computes with. No activation is replaced, so this also works where a
TransformerLens hook point only observes.

With the scores s and P = softmax(s), z = P·v:

* a share `values` of the gradient at z reaches v, and a share `scores` reaches s through P (queries and keys alike);
* at a temperature T, the gradient at s is J(s/T)·g instead of J(s)·g, with J(s) = diag(P) − P·Pᵀ (no factor 1/T). It is
  made at P: h = (J(s/T)·g)/P has J(s)·h = J(s/T)·g, since the rows of J sum to zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import refuse_nan, upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks.points import AttentionPoints
from tensorlens_tl.hooks.running import FwdHook, in_this_thread


@dataclass(frozen=True)
class BackwardRule:
    """How a gradient passes through what is not linear; norm scales are held in all of them.

    Attributes:
        activation: the rule of φ, and how a gated product φ(g)·u is shared; see `tensorlens_tl.models.activations`.
        values: the share of the gradient that reaches the values v of the product P·v.
        scores: the share that reaches the scores by way of the pattern P.
        temperature: at which softmax is differentiated.
    """

    activation: str
    values: float
    scores: float
    temperature: float = 1.0


class RuleHooks:
    """The hooks by which the attention of a live model follows a rule, for one forward pass and its backward passes.

    The norms of queries and keys have their scales held as well.
    """

    def __init__(self, rule: BackwardRule, sites: Sequence[AttentionPoints], scales: Sequence[str]) -> None:
        """A rule, the attention that follows it, and the hook points of the scales of its norms."""
        self.rule = rule
        self._sites = sites
        self._scales = scales
        self._seen: dict[str, Tensor] = {}
        self._plain = False

    @property
    def hooks(self) -> list[FwdHook]:
        """For one run with gradients enabled."""
        hooks: list[FwdHook] = [(name, in_this_thread(_detached)) for name in self._scales]
        for site in self._sites:
            for name, change in ((site.value, self._value), (site.pattern, self._pattern), (site.z, None)):
                hooks.append((name, in_this_thread(partial(self._note, name, change))))
        return hooks

    def _note(self, name: str, change: Callable[..., Tensor] | None, tensor: Tensor, *, hook: Any) -> Tensor | None:
        if name not in self._seen:  # a Bridge in compatibility mode calls a hook once for each of its point's names
            self._seen[name] = tensor
            if change is not None and tensor.requires_grad:
                tensor.register_hook(partial(change, tensor.detach()))
        # a Bridge shows values and z as views by head, and computes on with the view only where a hook returns it
        return None if name.endswith("hook_pattern") else tensor

    def _value(self, value: Tensor, gradient: Tensor) -> Tensor:
        return gradient if self._plain else gradient * self.rule.values

    def _pattern(self, pattern: Tensor, gradient: Tensor) -> Tensor:
        if self._plain:
            return gradient
        if self.rule.temperature != 1:
            gradient = _tempered(pattern, gradient, self.rule.temperature)
        return gradient * self.rule.scores

    def forget(self) -> None:
        """Let go of the run: its tensors, which hold these hooks, would otherwise never be freed."""
        self._seen.clear()

    def check(self, description: str, tolerance: float) -> None:
        """After the run: every pattern, value and z was seen, and a temperature has a meaning for every pattern.

        Raises:
            UnsupportedModelError: a hook point that is not part of the computation; attention sinks at a temperature.
        """
        for site in self._sites:
            for name in (site.pattern, site.value, site.z):
                if name not in self._seen or not self._seen[name].requires_grad:
                    raise UnsupportedModelError(_unreached(name, description))
            total = self._seen[site.pattern].detach().sum(-1)
            off = ((total - 1).abs() > tolerance) & (total != 0)  # nothing is attended where every token is masked
            if self.rule.temperature != 1 and bool(off.any()):
                raise UnsupportedModelError(
                    f"{site.pattern} of {description}: its rows do not sum to 1 (attention sinks), and softmax at "
                    "another temperature is not read there; attnlrp and relp are."
                )

    def prove(self, outputs: Sequence[Tensor], description: str, tolerance: float) -> None:
        """Prove by one plain backward pass, whose graph is kept, that z is made of pattern and values alone.

        Then ⟨P, ∂P⟩ = ⟨v, ∂v⟩ = ⟨z, ∂z⟩ for any gradient, as z = P·v is linear in both. A tensor that is only shown is
        given none of the gradient, or a part.

        Raises:
            UnsupportedModelError: one of them differs by more than `tolerance`, relative to Σ|z ∂z|.
        """
        names = [name for site in self._sites for name in (site.z, site.pattern, site.value)]
        noise = torch.Generator().manual_seed(0)
        random = [torch.randn(y.shape, generator=noise).to(y) for y in outputs]
        self._plain = True
        try:
            seen = [self._seen[name] for name in names]
            gradients = torch.autograd.grad(outputs, seen, random, retain_graph=True, allow_unused=True)
        finally:
            self._plain = False
        products: list[Tensor] = []
        for name, activation, gradient in zip(names, seen, gradients, strict=True):
            if gradient is None:
                raise UnsupportedModelError(_unreached(name, description))
            refuse_nan(f"the gradient at {name}", gradient)
            products.append(upcast(gradient) * activation.detach())
        for number, (name, product) in enumerate(zip(names, products, strict=True)):
            whole = products[number - number % 3]  # of the z that it is a factor of
            if not bool((product.sum() - whole.sum()).abs() <= tolerance * whole.abs().sum()):
                raise UnsupportedModelError(_unreached(name, description))


def _unreached(name: str, description: str) -> str:
    return (
        f"{name} of {description}: this hook point only shows a copy, so the gradient through it cannot be changed; "
        "rules with live softmax (attnlrp, gim, relp with attention='live') need it. cp-lrp, relp and tensorlens work."
    )


def _detached(scale: Tensor, *, hook: Any) -> Tensor:
    return scale.detach()


def _tempered(
    pattern: Float[Tensor, "*any key"], gradient: Float[Tensor, "*any key"], temperature: float
) -> Float[Tensor, "*any key"]:
    """What must arrive at P = softmax(s) for J(s/T)·gradient to arrive at s; zero where P is."""
    live = pattern > 0
    soft = torch.where(live, pattern, torch.zeros_like(pattern)).pow(1 / temperature)
    soft = soft / soft.sum(-1, keepdim=True).clamp_min(torch.finfo(pattern.dtype).tiny)
    wanted = soft * (gradient - (soft * gradient).sum(-1, keepdim=True))
    return torch.where(live, wanted / torch.where(live, pattern, torch.ones_like(pattern)), torch.zeros_like(pattern))
