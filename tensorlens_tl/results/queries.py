"""Several queries of an Attribution as one: their sum, or their mean."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.results.attribution import Attribution
from tensorlens_tl.results.targets import TOKENS_OF_QUERIES


def one_query(result: Attribution, *, mean: bool) -> Attribution:
    """Scores of every prompt's real queries, summed or averaged; bias and total likewise, so that sums still hold.

    The one query of the result is at the last of them. Standard errors, which are not independent, are left out.

    Args:
        result: with any number of queries.
        mean: the mean over the queries, instead of their sum.
    """
    queries = result.queries.to(result.mask.device)
    real = torch.take_along_dim(result.mask, queries, dim=1)
    weights = real.to(result.scores)
    if mean:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1)
    axis = result.axes.index("query")
    shape = [1] * result.scores.ndim
    shape[0], shape[axis] = weights.shape
    scores = (result.scores * weights.reshape(shape)).sum(axis, keepdim=True)
    bias = _weighted(result.bias, weights)
    total = _weighted(result.total, weights)
    gap = None
    if bias is not None and total is not None:
        gap = relative_gap(scores, bias, total)
    last = (queries * real).amax(1, keepdim=True)
    options = {name: value for name, value in result.options.items() if name != TOKENS_OF_QUERIES}
    fields = {"scores": scores, "bias": bias, "total": total, "gap": gap, "queries": last, "options": options}
    return replace(result, **fields, stderr=None)


def _weighted(
    values: Float[Tensor, "batch query"] | None, weights: Float[Tensor, "batch query"]
) -> Float[Tensor, "batch 1"] | None:
    if values is None:
        return None
    return (values * weights.to(values)).sum(1, keepdim=True)
