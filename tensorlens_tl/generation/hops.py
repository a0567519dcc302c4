"""Hops: what reached generated tokens is sent on to what made those.

Let s be scores over the keys of a text and s_b a bias, and let generated token g be made by scores a_g over the earlier
keys and a bias. With the weights

    w_g = |a_g| / (Σ_j |a_gj| + |a_gb|),        w_gb = |a_gb| / (the same),

one hop replaces the score s_g of every generated token at once by s_g·w_g, spread over what made it:

    s_j ← s_j·[j is of the prompt] + Σ_g s_g·w_gj,        s_b ← s_b + Σ_g s_g·w_gb

The weights of a token sum to 1, the bias among them, so that Σ_j s_j + s_b is the same after every hop: what has landed
on the prompt, what is still on generated tokens, and the bias. A token is made by earlier ones only, so nothing is left
on n generated tokens after n hops. With W the weights between generated tokens (strictly lower triangular) everything
that ever passes through them is s_G·(I − W)⁻¹, one triangular solve; k hops are k products with W. The idea of hops is
FlashTrace's (2026), whose weights are of its own; conservation with the bias, and the solve, are ours.

Only s itself is linear in the frozen model. The weights are shares of absolute scores: they say in what proportion a
token's makers take over what it was given, and are no derivative of anything.
"""

from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import whole_number

if TYPE_CHECKING:
    Hops = int | Literal["all"]
    """A number of hops, or as many as there are generated tokens."""
else:
    Hops = Any  # what is wrong with it is said by `check_hops`


def check_hops(hops: Hops) -> int | None:
    """How many hops, None for all.

    Raises:
        InvalidInputError: neither a number of at least 0 nor ``"all"``.
    """
    if isinstance(hops, str) and hops == "all":
        return None
    return whole_number("hops", hops, least=0, why="a number of hops, or 'all'")


def sent_on(
    scores: Float[Tensor, "batch query key"],
    bias: Float[Tensor, "batch query"],
    links: Float[Tensor, "batch token key"],
    link_bias: Float[Tensor, "batch token"],
    generated: Bool[Tensor, "batch token key"],
    hops: Hops = "all",
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

    Returns:
        Scores `[batch, query, key]` and bias `[batch, query]` with the same sum.

    Raises:
        InvalidInputError: neither a number of at least 0 nor ``"all"``.
    """
    count = check_hops(hops)
    at = generated.to(scores)
    size = links.abs().sum(-1) + link_bias.abs()
    weights = links.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)[..., None]
    bias_weights = (1 - weights.sum(-1)).to(scores)  # the weights sum to 1
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
    return scores + passed @ outside + held @ at, bias + (passed @ bias_weights[..., None])[..., 0]
