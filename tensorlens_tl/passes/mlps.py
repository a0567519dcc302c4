"""An MLP, or a mixture of experts, as a map: activations and routing held."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, Sum
from tensorlens_tl.algebra.routing import Branch, Routed
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Coefficients, coefficients
from tensorlens_tl.models.experts import ExpertsWeights
from tensorlens_tl.models.weights import MLPWeights


def held_coefficients(weights: MLPWeights, x: Float[Tensor, "batch pos d_model"], activation: str) -> Coefficients:
    """The coefficients of an MLP's activation under a rule, at what it reads."""
    pre_in = Linear(weights.W_in, weights.b_in)(x)
    if weights.W_gate is None:
        return coefficients(weights.activation, pre_in, None, activation)
    gate = Linear(weights.W_gate, weights.b_gate)(x)
    return coefficients(weights.activation, gate, pre_in, activation, weights.linear_activation)


def mlp_chain(weights: MLPWeights, held: Coefficients, post: Tensor | None = None) -> Chain:
    """An MLP with its activation replaced by these coefficients; `post` is a factor of the hidden vector."""
    through = Diagonal(held.through, held.offset(weights.b_post))
    if weights.W_gate is None or held.gate is None:
        hidden: tuple[AffineMap, ...] = (Linear(weights.W_in, weights.b_in), through)
    else:
        branches = (
            Chain((Linear(weights.W_in, weights.b_in), through)),
            Chain((Linear(weights.W_gate, weights.b_gate), Diagonal(held.gate))),
        )
        hidden = (Sum(branches),)
    factor = () if post is None else (Diagonal(post),)
    return Chain((*hidden, *factor, Linear(weights.W_out, weights.b_out)))


def frozen_mlp(weights: MLPWeights, x: Float[Tensor, "batch pos d_model"], activation: str) -> Chain:
    """An MLP as a map, from what it reads."""
    held = held_coefficients(weights, x, activation)
    if weights.post_factor is None:
        return mlp_chain(weights, held)
    *hidden, _ = mlp_chain(weights, held).stages
    return mlp_chain(weights, held, weights.post_factor(Chain(tuple(hidden))(x)))


def expert_maps(
    weights: ExpertsWeights,
    x: Float[Tensor, "batch pos d_model"],
    beside: Float[Tensor, "batch pos d_model"],
    index: Int[Tensor, "batch pos choice"] | None,
    weight: Float[Tensor, "batch pos choice"],
    activation: str,
) -> dict[str, AffineMap]:
    """What a mixture of experts is the sum of, by name: ``"experts"`` and, where there are any, ``"shared"``.

    Args:
        weights: of the experts.
        x: what the experts read.
        beside: what stands beside them reads.
        index: which experts each token is sent to; None where `weight` counts every expert.
        weight: what each of them counts.
        activation: the rule for their activations.
    """
    routing = weights.routing
    if index is None:
        index = torch.arange(weights.count, device=x.device).expand(weight.shape)
    if index.shape != weight.shape:
        raise UnsupportedModelError(
            f"experts are called with {tuple(index.shape)} choices and {tuple(weight.shape)} weights for tokens "
            f"{tuple(x.shape[:2])}; only routing [token, choice] is read."
        )
    flat_index, flat_weight = index.flatten(0, 1), weight.flatten(0, 1).to(x)
    flat_x, factor = x.flatten(0, 1), routing.factor * weights.branch_factor
    branches = []
    for number in flat_index[flat_weight != 0].unique().tolist():
        if number >= weights.count:  # a place that is no expert
            continue
        places, choice = ((flat_index == number) & (flat_weight != 0)).nonzero(as_tuple=True)
        scale = flat_weight[places, choice]
        packed = flat_x[places][None]
        outer = torch.full_like(scale, factor) if routing.scales_input else scale * factor
        inner = packed * scale[:, None] if routing.scales_input else packed
        made = frozen_mlp(weights.expert(number), inner, activation)
        if routing.scales_input:
            made = Chain((Diagonal(scale[None, :, None]), *made.stages))
        branches.append(Branch(made, places, outer, number))
    maps: dict[str, AffineMap] = {"experts": Routed(tuple(branches), tuple(x.shape[:2]), x.shape[-1])}
    if weights.shared is not None:
        shared = frozen_mlp(weights.shared, beside, activation)
        gates = [] if weights.shared_gate is None else [weights.shared_gate(beside)]
        if weights.branch_factor != 1:
            gates.append(torch.full_like(x[:1, :1, :1], weights.branch_factor))
        maps["shared"] = Chain((*shared.stages, *(Diagonal(gate) for gate in gates)))
    return maps
