"""An MLP, or a mixture of experts, as a map: activations and routing held."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Branch, Chain, Diagonal, Linear, Routed, Sum
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import Coefficients, coefficients, in_one_kernel
from tensorlens_tl.models.parameters import MLPWeights
from tensorlens_tl.models.sublayers import ExpertsWeights

EXPERTS = "experts"
SHARED = "shared"


@dataclass(frozen=True, eq=False)
class Routes:
    """Where the tokens of one layer are sent.

    Attributes:
        index: experts' numbers, `[batch, pos, choice]`.
        weight: what each of them counts, the same; it scales what the expert gives, or (Llama 4) what it reads.
    """

    index: Int[Tensor, "batch pos choice"]
    weight: Float[Tensor, "batch pos choice"]


def held_coefficients(weights: MLPWeights, x: Float[Tensor, "batch pos d_model"], activation: str) -> Coefficients:
    """The coefficients of an MLP's activation under a rule, at what it reads."""
    pre_in = Linear(weights.W_in, weights.b_in)(x)
    phi = in_one_kernel(weights.activation, pre_in.dtype)
    if weights.W_gate is None:
        return coefficients(phi, pre_in, None, activation)
    gate = Linear(weights.W_gate, weights.b_gate)(x)
    return coefficients(phi, gate, pre_in, activation, weights.linear_activation)


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
    if post is not None:
        hidden = (*hidden, Diagonal(post))
    return Chain((*hidden, Linear(weights.W_out, weights.b_out)))


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
    routes: Routes,
    activation: str,
) -> dict[str, AffineMap]:
    """What a mixture of experts is the sum of, by name: ``"experts"`` and, where there are any, ``"shared"``.

    Args:
        weights: of the experts.
        x: what the experts read.
        beside: what the shared expert reads.
        routes: where its tokens are sent.
        activation: the rule for their activations.

    Raises:
        UnsupportedModelError: routing of another form.
    """
    if routes.index.shape != routes.weight.shape:
        raise UnsupportedModelError(
            f"experts are called with {tuple(routes.index.shape)} choices and {tuple(routes.weight.shape)} weights for "
            f"tokens {tuple(x.shape[:2])}; only routing [token, choice] is read."
        )
    flat_index = routes.index.flatten(0, 1)
    flat_weight = routes.weight.flatten(0, 1).to(x)
    flat_x = x.flatten(0, 1)
    branches = []
    for number in flat_index[flat_weight != 0].unique().tolist():
        if number >= weights.count:  # some routers have a choice that is no expert
            continue
        tokens, choice = ((flat_index == number) & (flat_weight != 0)).nonzero(as_tuple=True)
        scale = flat_weight[tokens, choice]
        packed = flat_x[tokens][None]
        if weights.routing.scales_input:
            inner = frozen_mlp(weights.expert(number), packed * scale[:, None], activation)
            expert = Chain((Diagonal(scale[None, :, None]), *inner.stages))
            scale = torch.ones_like(scale)
        else:
            expert = frozen_mlp(weights.expert(number), packed, activation)
        branches.append(Branch(expert, tokens, scale * weights.branch_factor, number))
    if not branches:  # every token's choices count nothing
        nothing = frozen_mlp(weights.expert(0), flat_x[:0][None], activation)
        branches.append(Branch(nothing, flat_index.new_zeros(0), flat_weight.new_zeros(0)))
    maps: dict[str, AffineMap] = {EXPERTS: Routed(tuple(branches), tuple(x.shape[:2]), x.shape[-1])}
    if weights.shared is not None:
        shared = frozen_mlp(weights.shared, beside, activation)
        stages = list(shared.stages)
        if weights.shared_gate is not None:
            stages.append(Diagonal(weights.shared_gate(beside)))
        if weights.branch_factor != 1:
            stages.append(Diagonal(torch.full_like(x[:1, :1, :1], weights.branch_factor)))
        maps[SHARED] = Chain(tuple(stages))
    return maps
