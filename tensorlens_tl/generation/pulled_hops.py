"""Hops of one row of scores, by one pull each: signed shares are known before they are pulled."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.generation.hops import quotients
from tensorlens_tl.models import NEXT
from tensorlens_tl.passes import PassOrDifference


class GeneratedTokens(NamedTuple):
    """The generated tokens of some texts.

    Attributes:
        positions: where they stand, `[batch, token]`; padding where a text has fewer.
        queries: the positions that predict them.
        real: which of them are tokens.
        totals: what their shares are of, zero where these say nothing; see `tensorlens_tl.generation.hops.divisors`.
    """

    positions: Int[Tensor, "batch token"]
    queries: Int[Tensor, "batch token"]
    real: Bool[Tensor, "batch token"]
    totals: Float[Tensor, "batch token"]


def sent_on_by_pulls(
    frozen: PassOrDifference,
    tokens: GeneratedTokens,
    scores: Float[Tensor, "batch 1 key"],
    bias: Float[Tensor, "batch 1"],
    hops: int,
    settings: dict[str, Any],
) -> tuple[Float[Tensor, "batch 1 key"], Float[Tensor, "batch 1"]]:
    """What `sent_on` gives with signed shares, without the scores of every generated token.

    Args:
        frozen: the texts, or the difference of two.
        tokens: the generated ones.
        scores, bias: one row, of a span.
        hops: how many; no more are pulled than leave something on generated tokens.
        settings: bias, activation and memory, as for a target.
    """
    others = dict(settings)
    operator = frozen.operator(activation=others.pop("activation"))
    at = tokens.positions[:, None]
    for _ in range(hops):
        held = torch.take_along_dim(scores, at, dim=2) * tokens.real[:, None]
        reached = held[:, 0].any(0)
        if not bool(reached.any()):
            break
        weights = quotients(held[:, 0], tokens.totals)[:, reached]
        given = operator.target(NEXT, query=tokens.queries[:, reached], weights=weights, summed=True, **others)
        assert given.bias is not None  # every target has one
        scores = scores.scatter_add(2, at, -held) + given.scores
        bias = bias + given.bias + (held * (tokens.totals == 0)[:, None]).sum(-1)
    return scores, bias
