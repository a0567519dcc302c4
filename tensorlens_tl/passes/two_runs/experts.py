"""The secant of a mixture of experts, and the effect of a changed routing.

    Δ Σ_e w_e·f_e(x) = Σ_e w̄_e·Δf_e + Σ_e Δw_e·f̄_e

An expert to which a token is routed in only one run has weight 0 in the other. The first sum is a map of the experts'
input: the secant of each expert, over the tokens that are routed to it in either run. The second is a constant: the
choice of experts and their weights are not a linear function of the router's input, so a changed routing is a separate
term. If the two runs are the same, the map is the Jacobian with the routing held fixed.

A weight may scale its expert's input instead (Llama 4), f_e(w_e·x): then x̄·Δw_e goes through the expert's secant.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Branch, Chain, Diagonal, Routed
from tensorlens_tl.algebra.secants import Change
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.block_maps import EXPERTS, SHARED, Routes
from tensorlens_tl.passes.two_runs.mlps import gate_secant, mlp_secant


@dataclass(frozen=True, eq=False)
class Mixture:
    """One layer's experts, their weights and routing in one run."""

    weights: ExpertsWeights
    routes: Routes

    def counts(self) -> Float[Tensor, "token expert"]:
        """Return the weight of every expert for every token; 0 where a token is not routed."""
        index = self.routes.index.flatten(0, 1).long()
        weight = self.routes.weight.flatten(0, 1)
        counts = weight.new_zeros(len(index), max(self.weights.count, int(index.max()) + 1))
        return counts.scatter_add(1, index, weight)[:, : self.weights.count]  # some choices are not an expert


def experts_secant(a: Mixture, b: Mixture, read: dict[str, Change], layer: int) -> dict[str, AffineMap]:
    """Return the summands of a mixture of experts by name, as in `expert_maps`, each as a secant.

    The constant of a changed routing is an `Offset` in each expert's branch, called ``"L{layer}.routing"``.

    Args:
        a, b: those of the two runs.
        read: the input of each part, by name.

    Raises:
        UnsupportedModelError: the two have different forms.
    """
    forms = [_form(mixture.weights) for mixture in (a, b)]
    if forms[0] != forms[1]:
        raise UnsupportedModelError(f"difference: the experts of L{layer} have different forms.")
    maps: dict[str, AffineMap] = {EXPERTS: _routed(a, b, read[EXPERTS], layer)}
    if a.weights.shared is not None and b.weights.shared is not None:
        maps[SHARED] = _shared(a.weights, b.weights, read[SHARED], layer)
    return maps


def _form(weights: ExpertsWeights) -> tuple[object, ...]:
    parts = (weights.shared is None, weights.shared_gate is None)
    return *parts, weights.count, weights.routing.scales_input, weights.branch_factor


def _routed(a: Mixture, b: Mixture, read: Change, layer: int) -> Routed:
    """Return the routed experts together."""
    name = f"L{layer}.routing"
    counts_a, counts_b = (mixture.counts().to(read.a) for mixture in (a, b))
    x_a = read.a.flatten(0, 1)
    x_b = read.b.flatten(0, 1)
    factor = a.weights.branch_factor
    scales_input = a.weights.routing.scales_input
    branches: list[Branch] = []
    chosen = ((counts_a != 0) | (counts_b != 0)).any(0).nonzero()[:, 0].tolist()
    for number in chosen or [0]:  # a map of no tokens if all weights are zero
        tokens = ((counts_a[:, number] != 0) | (counts_b[:, number] != 0)).nonzero()[:, 0]
        weights = (counts_a[tokens, number][None, :, None], counts_b[tokens, number][None, :, None], name)
        packed = Change(x_a[tokens][None], x_b[tokens][None])
        if scales_input:
            packed = packed.weighted(*weights)
        expert = mlp_secant(a.weights.expert(number), b.weights.expert(number), packed, f"L{layer}E{number}")
        if not scales_input:
            expert = expert.weighted(*weights)
        branches.append(Branch(expert.map, tokens, torch.full_like(x_a[tokens, 0], factor), number))
    return Routed(tuple(branches), tuple(read.a.shape[:2]), read.a.shape[-1])


def _shared(a: ExpertsWeights, b: ExpertsWeights, read: Change, layer: int) -> Chain:
    """Return the shared expert with its gate."""
    assert a.shared is not None
    assert b.shared is not None
    shared = mlp_secant(a.shared, b.shared, read, f"L{layer}.shared")
    if a.shared_gate is not None and b.shared_gate is not None:
        shared = shared.times(gate_secant(a.shared_gate, b.shared_gate, read, f"L{layer}.shared.W_factor"))
    if a.branch_factor == 1:
        return shared.map
    return Chain((*shared.stages, Diagonal(torch.full_like(read.a[:1, :1, :1], a.branch_factor))))
