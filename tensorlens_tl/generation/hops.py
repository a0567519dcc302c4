"""Hops: what reached generated tokens is sent on to what made those.

Let s be scores over the keys of a text and s_b a bias, and let generated token g be made by scores a_g over the earlier
keys and a bias a_gb, which sum to its own total t_g: its logit, or of the difference of two texts the change of that.
One hop replaces the score s_g of every generated token at once by s_g·w_g, spread over what made it:

    s_j ← s_j·[j is of the prompt] + Σ_g s_g·w_gj,        s_b ← s_b + Σ_g s_g·w_gb

The weights of a token sum to 1, the bias among them, so that Σ_j s_j + s_b is the same after every hop: what has landed
on the prompt, what is still on generated tokens, and the bias. There are two kinds:

* ``"signed"``, the shares of the token's own total: w_gj = a_gj / t_g and w_gb = a_gb / t_g. They are linear in what is
  sent on, so a hop of everything is one pull of Σ_g (s_g / t_g)·u_g, where u_g is the vector of token g's logit at the
  position that predicts it: as dear as one question, whatever the number of tokens. A source that speaks against a
  token takes over a share of the opposite sign. Shares of a total that is next to nothing would be large and say
  little: what reached a token whose |t_g| is below `LEAST_TOTAL` of the root mean square of its text's totals goes to
  the bias.
* ``"absolute"``, shares of absolute scores: w_gj = |a_gj| / (Σ_j |a_gj| + |a_gb|), and likewise for the bias. They are
  at most 1, and take the scores of each generated token by itself: one pull for each of them.

A token is made by earlier ones only, so nothing is left on n generated tokens after n hops. With W the weights between
generated tokens (strictly lower triangular) everything that ever passes through them is s_G·(I − W)⁻¹, one triangular
solve; k hops are k products with W. The idea of hops is FlashTrace's (2026), whose weights are of its own; conservation
with the bias, signed shares by one pull, and the solve, are ours.

Only s itself is linear in the frozen model. The weights say in what proportion a token's makers take over what it was
given, and are no derivative of anything.

Signed shares are known before they are pulled, and what hops send on is linear in what has reached the generated
tokens. So each hop of one stretch asks only for the scores of generated tokens, which in a causal model needs nothing
of the prompt before them, and all that was ever sent on is pulled to the prompt at the end, by one pull
(`sent_on_by_pulls`).
"""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, whole_number
from tensorlens_tl.models import NEXT, TokenLike
from tensorlens_tl.passes import Collapse, FrozenOperator

if TYPE_CHECKING:
    Hops = int | Literal["all"]
    """A number of hops, or as many as there are generated tokens."""

    Shares = Literal["signed", "absolute"]
    """The weights of hops."""
else:
    Hops = Shares = Any  # what is wrong with them is said by `sent_on`

SHARES = ("signed", "absolute")
SIGNED = SHARES[0]

LEAST_TOTAL = 0.25
"""A total below this part of a typical one of its text is next to nothing, and has no signed shares."""


def check_hops(hops: Hops) -> int | None:
    """Return how many hops, None for all; raise `InvalidInputError` for anything but a number from 0 or ``"all"``."""
    if isinstance(hops, str) and hops == "all":
        return None
    return whole_number("hops", hops, least=0, why="a number of hops, or 'all'")


def divisors(totals: Float[Tensor, "batch token"], real: Bool[Tensor, "batch token"]) -> Float[Tensor, "batch token"]:
    """Return the totals that signed shares are of; zero where a `real` token's total is next to nothing."""
    typical = (totals.square().sum(1, keepdim=True) / real.sum(1, keepdim=True)).sqrt()
    return totals.masked_fill(totals.abs() < LEAST_TOTAL * typical, 0.0)


def quotients(held: Float[Tensor, "*rows"], totals: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """held ÷ totals, and zero where a total is zero."""
    return torch.where(totals == 0, 0.0, held / torch.where(totals == 0, 1.0, totals))


@checked_names
def sent_on(
    scores: Float[Tensor, "batch query key"],
    bias: Float[Tensor, "batch query"],
    links: Float[Tensor, "batch token key"],
    link_bias: Float[Tensor, "batch token"],
    generated: Bool[Tensor, "batch token key"],
    hops: Hops = "all",
    shares: Shares = "signed",
    totals: Float[Tensor, "batch token"] | None = None,
) -> tuple[Float[Tensor, "batch query key"], Float[Tensor, "batch query"]]:
    """Scores after some hops; see `tensorlens_tl.generation.hops` for the definition.

    >>> from tensorlens_tl.generation import sent_on
    >>> scores = torch.tensor([[[1.0, 0.0, 4.0]]])  # the last of three tokens was generated, and has a score of 4
    >>> links = torch.tensor([[[1.0, 2.0, 0.0]]])  # the two prompt tokens that it came from, by a quarter and a half
    >>> generated = torch.tensor([[[False, False, True]]])
    >>> landed, _ = sent_on(scores, torch.zeros(1, 1), links, torch.ones(1, 1), generated)
    >>> landed.tolist()  # the bias has the missing 1
    [[[2.0, 2.0, 0.0]]]

    Args:
        scores, bias: what is sent on, one row for each query.
        links, link_bias: scores of each generated token, over the keys and for the bias, in the order of generation.
        generated: where each generated token stands: one True in each row, none in a row that stands for no token.
        hops: how many, or ``"all"``.
        shares: ``"signed"`` or ``"absolute"``.
        totals: what signed shares are of; a token whose total is zero gives everything to the bias. None for the sums
            of scores and bias.

    Returns:
        Scores `[batch, query, key]` and bias `[batch, query]` with the same sum.

    Raises:
        InvalidInputError: another number of hops, or no such shares.
    """
    count = check_hops(hops)
    check_choice("shares", shares, SHARES)
    at = generated.to(scores)
    if shares == SIGNED:
        if totals is None:
            totals = links.sum(-1) + link_bias
        weights = quotients(links, totals[..., None].expand_as(links))
        bias_weights = torch.where(totals == 0, 1.0, quotients(link_bias, totals))
    else:  # they sum to 1
        size = links.abs().sum(-1) + link_bias.abs()
        weights = links.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)[..., None]
        bias_weights = 1 - weights.sum(-1)
    weights = weights.to(scores)
    between = weights @ at.mT  # [batch, token, token]: what a generated token gives to one before it
    held = scores @ at.mT
    scores = scores - held @ at
    if count is None:  # held + held·W + held·W² + …
        solved = torch.eye(between.shape[-1]).to(between) - between
        passed = torch.linalg.solve_triangular(solved, held, upper=False, left=False)
        held = torch.zeros_like(held)
    else:
        passed = torch.zeros_like(held)
        for _ in range(min(count, between.shape[-1])):  # nothing is left after as many hops as tokens
            passed = passed + held
            held = held @ between
    outside = weights - between @ at
    sent_to_bias = (passed @ bias_weights.to(scores)[..., None])[..., 0]
    return scores + passed @ outside + held @ at, bias + sent_to_bias


class GeneratedTokens(NamedTuple):
    """The generated tokens of some texts: their `positions` `[batch, token]`, the `queries` that predict them, which
    are `real`."""

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
    """Return a stretch's scores `[batch, 1, key]` after some hops, as `sent_on` does with signed shares, with bias and
    total.

    `queries` predict the stretch's tokens; `settings` are bias and memory, as for a target.
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
        scores, bias = scores_and_bias(ask(query=tokens.queries, weights=weights + explained))
        total = (totals * explained).sum(1, keepdim=True)
    else:
        first = ask(minus, query=queries)
        scores, bias = scores_and_bias(first)
        others = scores_and_bias(ask(query=tokens.queries, weights=weights))
        scores = scores + others[0]
        bias = bias + others[1]
        total = first.total
    at = tokens.positions[:, None]
    gives = (given != 0).long()
    before_some = gives.flip(1).cumsum(1).flip(1) > gives  # nothing is left on others, not even rounding
    left = (torch.take_along_dim(scores, at, dim=2)[:, 0] - sent) * before_some * tokens.real
    lost = (sent * (shared == 0)).sum(1, keepdim=True)
    return Collapse(scores.scatter(2, at, left[:, None]), bias + lost, total)


def scores_and_bias(collapse: Collapse) -> tuple[Float[Tensor, "batch query key"], Float[Tensor, "batch query"]]:
    """Those of a collapse to one score for each source token, which always has a bias."""
    assert collapse.bias is not None
    return collapse.scores, collapse.bias
