"""Experts of a mixture taken away where they are called, in some copies of the prompts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.hooks import CallChange, CallPoint
from tensorlens_tl.models.sublayers import ExpertsWeights, Routing


class Expert(NamedTuple):
    """One expert of a mixture; `number` is None for the shared one."""

    mixture: ExpertsWeights
    number: int | None


def without_experts(experts: Sequence[tuple[int, Expert]], copies: int, tokens: Tensor) -> list[CallChange]:
    """The calls that take experts away, each in its copy: it counts nothing for the tokens that are sent there.

    Args:
        experts: the copy of each, and the expert.
        copies: how many copies of the prompts there are.
        tokens: the prompts.
    """
    changes: list[CallChange] = []
    mixtures = {id(expert.mixture): expert.mixture for _, expert in experts}
    for mixture in mixtures.values():
        dropped = torch.zeros(copies, mixture.count, dtype=torch.bool, device=tokens.device)
        shared = torch.ones(copies, 1, dtype=torch.bool, device=tokens.device)
        for copy, expert in experts:
            if expert.mixture is not mixture:
                continue
            if expert.number is None:
                shared[copy] = False
            else:
                dropped[copy, expert.number] = True
        if bool(dropped.any()):
            point = CallPoint(mixture.routing.module, mixture.routing.weight)
            changes.append(CallChange(point, partial(_routed_elsewhere, routing=mixture.routing, dropped=dropped)))
        if mixture.shared_module is not None and not bool(shared.all()):
            point = CallPoint(mixture.shared_module, "output")
            changes.append(CallChange(point, partial(_without_shared, shared=shared, positions=tokens.numel())))
    return changes


def _routed_elsewhere(
    arguments: Mapping[str, Any],
    weight: Float[Tensor, "token choice"],
    routing: Routing,
    dropped: Bool[Tensor, "copy expert"],
) -> Float[Tensor, "token choice"]:
    """What each choice counts, zero for the experts that a token's copy is without."""
    of_token = dropped.to(weight.device).repeat_interleave(weight.shape[0] // len(dropped), dim=0)
    if not routing.dense:
        index = arguments[routing.index].to(of_token.device)
        is_expert = index < of_token.shape[1]  # some models send tokens to a number that is no expert's
        of_token = of_token.gather(1, index.where(is_expert, 0).long()) & is_expert
    return weight.masked_fill(of_token, 0)


def _without_shared(
    arguments: Mapping[str, Any], output: Tensor, shared: Bool[Tensor, "copy one"], positions: int
) -> Tensor:
    """What a shared expert gives, zero in the copies that are without it."""
    split = output.reshape(len(shared), positions, -1)
    return (split * shared[:, None].to(split)).reshape(output.shape)
