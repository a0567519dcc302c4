"""Hops of one stretch by pulls: signed shares are known before they are pulled.

What hops send on is linear in what has reached the generated tokens. So each hop asks only for the scores of generated
tokens, which in a causal model needs nothing of the prompt before them, and all that was ever sent on is pulled to the
prompt at the end, by one pull.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.generation.hops import divisors, quotients
from tensorlens_tl.models import NEXT, TokenLike
from tensorlens_tl.passes import Collapse, FrozenOperator


class GeneratedTokens(NamedTuple):
    """The generated tokens of some texts.

    Attributes:
        positions: where they stand, `[batch, token]`; padding where a text has fewer.
        queries: the positions that predict them.
        real: which of them are tokens.
    """

    positions: Int[Tensor, "batch token"]
    queries: Int[Tensor, "batch token"]
    real: Bool[Tensor, "batch token"]


def sent_on_by_pulls(
    operator: FrozenOperator,
    tokens: GeneratedTokens,
    queries: Int[Tensor, "batch query"],
    hops: int,
    minus: TokenLike = None,
    **settings: Any,
) -> Collapse:
    """A stretch's scores after some hops, as `sent_on` gives them with signed shares.

    Args:
        operator: of the texts, or of the difference of two.
        tokens: the generated ones.
        queries: the positions that predict those of the stretch.
        hops: how many, at least 1.
        minus: what is subtracted from each token of the stretch.
        settings: bias and memory, as for a target.

    Returns:
        Scores `[batch, 1, key]` with bias and total.
    """
    ask = partial(operator.target, NEXT, summed=True, **settings)
    reached = partial(ask, keys=tokens.positions)
    totals = operator.totals(NEXT, query=tokens.queries)
    shared = divisors(totals, tokens.real)
    held = reached(minus, query=queries).scores[:, 0]
    given = quotients(held, shared)
    sent = held
    weights = given
    for _ in range(hops - 1):
        if not bool(given.any()):
            break
        held = reached(query=tokens.queries, weights=given).scores[:, 0]
        given = quotients(held, shared)
        sent = sent + held
        weights = weights + given
    explained = (tokens.queries[..., None] == queries[:, None]).any(-1) & tokens.real
    if minus is None:
        scores, bias = _parts(ask(query=tokens.queries, weights=weights + explained))
        total = (totals * explained).sum(1, keepdim=True)
    else:
        first = ask(minus, query=queries)
        scores, bias = _parts(first)
        others = _parts(ask(query=tokens.queries, weights=weights))
        scores = scores + others[0]
        bias = bias + others[1]
        total = first.total
    at = tokens.positions[:, None]
    left = (torch.take_along_dim(scores, at, dim=2)[:, 0] - sent) * _before_some(given) * tokens.real
    lost = (sent * (shared == 0)).sum(1, keepdim=True)
    return Collapse(scores.scatter(2, at, left[:, None]), bias + lost, total)


def _parts(collapse: Collapse) -> tuple[Float[Tensor, "batch 1 key"], Float[Tensor, "batch 1"]]:
    """Scores and bias of a target of every key."""
    assert collapse.bias is not None
    return collapse.scores, collapse.bias


def _before_some(given: Float[Tensor, "batch token"]) -> Bool[Tensor, "batch token"]:
    """The tokens before one that gives something on: nothing is left on others, not even rounding."""
    gives = (given != 0).long()
    return gives.flip(1).cumsum(1).flip(1) > gives
