"""Experts of a mixture taken away where they are called, in some copies of the prompts."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorlens_tl.hooks import CallChange, CallPoint
from tensorlens_tl.models.sublayers import ExpertsWeights, Routing


class Expert(NamedTuple):
    """One expert of a mixture; without a `number`, what a module of the mixture gives: the shared one, or all."""

    mixture: ExpertsWeights
    number: int | None
    module: nn.Module | None = None


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
        present: dict[nn.Module, Tensor] = {}
        for copy, expert in experts:
            if expert.mixture is not mixture:
                continue
            if expert.number is not None:
                dropped[copy, expert.number] = True
            elif expert.module is not None:
                ones = torch.ones(copies, 1, dtype=torch.bool, device=tokens.device)
                present.setdefault(expert.module, ones)[copy] = False
        if bool(dropped.any()) and mixture.routing.shown:
            changes += _silenced(mixture, dropped)
        elif bool(dropped.any()):
            point = CallPoint(mixture.routing.module, mixture.routing.weight)
            changes.append(CallChange(point, partial(_routed_elsewhere, routing=mixture.routing, dropped=dropped)))
        for module, copies_with in present.items():
            change = partial(_without_module, present=copies_with, positions=tokens.numel())
            changes.append(CallChange(CallPoint(module, "output"), change))
    return changes


def _silenced(mixture: ExpertsWeights, dropped: Bool[Tensor, "copy expert"]) -> Iterator[CallChange]:
    """What takes experts away where each is a module by itself: it gives nothing for the tokens of its copies.

    Its share is not taken away in the weights: they are normalised, and the model would choose another expert.
    """
    sent: dict[str, Tensor] = {}

    def note(arguments: Mapping[str, Any], index: Int[Tensor, "token choice"]) -> Tensor:
        sent["index"] = index
        return index

    def silence(arguments: Mapping[str, Any], output: Float[Tensor, "row d"], number: int) -> Float[Tensor, "row d"]:
        index = sent["index"]
        _, token = index.T.eq(number).nonzero(as_tuple=True)  # in the order of the packed tokens
        of_token = dropped[:, number].to(output.device).repeat_interleave(len(index) // len(dropped))
        return output.masked_fill(of_token[token.to(output.device), None], 0)

    yield CallChange(CallPoint(getattr(mixture.module, mixture.routing.index), "output"), note)
    for number in dropped.any(0).nonzero()[:, 0].tolist():
        yield CallChange(CallPoint(mixture.modules[number], "output", optional=True), partial(silence, number=number))


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


def _without_module(
    arguments: Mapping[str, Any], output: Tensor, present: Bool[Tensor, "copy one"], positions: int
) -> Tensor:
    """What a module gives, a shared expert or a whole mixture, zero in the copies that are without it."""
    split = output.reshape(len(present), positions, -1)
    return (split * present[:, None].to(split)).reshape(output.shape)
