"""Layer maps `[layer, batch, query, key]`, and how they are aggregated over layers."""

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.layerwise.local import LocalLayer
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import is_all, query_positions

Maps = Float[Tensor, "layer batch query key"]
"""One map of token pairs per layer; padding is zero."""


def locals_of(frozen: FrozenPass) -> list[LocalLayer]:
    """Every layer of a pass, seen locally.

    Raises:
        FrozenModelError: the model is no longer the one that the pass was taken from.
    """
    frozen.check_fresh()
    return [LocalLayer(frozen, layer) for layer in range(frozen.n_layers)]


def normalize_rows(maps: Float[Tensor, "*any query key"]) -> Float[Tensor, "*any query key"]:
    """Rows divided by their sum; an empty row (padding) stays zero."""
    total = maps.sum(-1, keepdim=True)
    return maps / torch.where(total == 0, torch.ones_like(total), total)


def add_residual(maps: Maps, share: float, mask: Tensor) -> Maps:
    """``(1 − share)·map + share·I`` on real tokens."""
    return (1 - share) * maps + share * torch.diag_embed(mask.to(maps.dtype))


def product(maps: Maps) -> Float[Tensor, "batch query key"]:
    """M_L ⋯ M_2 M_1: what reaches the last layer from the first."""
    result = maps[0]
    for later in maps[1:]:
        result = later @ result
    return result


def refuse_whitened(frozen: FrozenPass, method: str) -> None:
    """Refuse to multiply layer maps where whitening passes vectors on between positions, for which they have no factor.

    Raises:
        UnsupportedModelError: the model is whitened.
    """
    if frozen.view.is_whitened:
        raise UnsupportedModelError(
            f"{method}: the stream of this {frozen.view.description} is whitened before its blocks, which passes "
            "vectors on between positions; a product of one map per layer has no factor for that. Use tensorlens or "
            "decompx, which hold it exactly, or mean, which multiplies nothing."
        )


def select_query(frozen: FrozenPass, scores: Tensor, query: Query) -> Tensor:
    """The asked queries of `[batch, ..., query, key]`; "all" keeps every one."""
    if is_all(query):
        return scores
    index = query_positions(frozen.prompt, query)
    index = index.view(len(index), *(1 for _ in scores.shape[1:-2]), index.shape[1], 1)
    return torch.take_along_dim(scores, index, dim=-2)
