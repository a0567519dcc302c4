"""Layer maps `[layer, batch, query, key]`, and how they are aggregated over layers.

An encoder–decoder is one sequence, its encoder's tokens before its decoder's. An encoder block's map relates the
encoder's tokens, and a decoder block's has a row for each of the decoder's tokens with columns for both sides:
cross-attention's, and self-attention's. At the tokens of the other side, which the block leaves as they are, every map
is the identity; so the product of all maps follows the encoder's tokens through the encoder into the decoder, as ALTI+
does (Ferrando et al. 2022, "Towards opening the black box of neural machine translation").
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.layerwise.local import LocalLayer
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import is_all, query_positions
from tensorlens_tl.results import AXES, Attribution

Maps = Float[Tensor, "layer batch query key"]
"""One map of token pairs per layer; padding is zero."""

MapsOfAttentions = Float[Tensor, "_attention batch query key"]
"""One for each attention of a block: two in a decoder block of an encoder–decoder."""


def locals_of(frozen: FrozenPass) -> list[LocalLayer]:
    """Every layer of a pass of one stack, seen locally.

    Raises:
        UnsupportedModelError: an encoder–decoder, whose decoder blocks have two attentions: see `attentions_of`.
        FrozenModelError: the model is no longer the one that the pass was taken from.
    """
    frozen.view.refuse_encoder_decoder("what the tokens of one layer give each other (locals_of)")
    return [layer for block in attentions_of(frozen) for layer in block]


def attentions_of(frozen: FrozenPass, with_biases: bool = True) -> list[tuple[LocalLayer, ...]]:
    """The attention of every block, seen locally: one, and in a decoder block cross-attention after it.

    Args:
        frozen: the pass.
        with_biases: see `LocalLayer`.

    Raises:
        FrozenModelError: the model is no longer the one that the pass was taken from.
    """
    frozen.check_fresh()
    blocks: list[tuple[LocalLayer, ...]] = []
    for number in range(frozen.n_layers):
        layer = LocalLayer(frozen, number, with_biases)
        blocks.append((layer,) if layer.cross is None else (layer, layer.cross))
    return blocks


def side_by_side(
    frozen: FrozenPass, part: Callable[[LocalLayer], Tensor], with_biases: bool = True
) -> Float[Tensor, "layer batch *head query key"]:
    """One map for each block, in which cross-attention's columns stand beside those of self-attention.

    Args:
        frozen: the pass.
        part: the rows of one attention, `[batch, *head, query, key]` for its own queries and keys.
        with_biases: see `LocalLayer`.
    """
    maps: list[Tensor] = []
    for layers in attentions_of(frozen, with_biases):
        rows = torch.cat([part(layer) for layer in reversed(layers)], dim=-1)  # the encoder's tokens come first
        maps.append(among_all(layers[0], rows))
    return torch.stack(maps)


def by_attention(
    frozen: FrozenPass, part: Callable[[LocalLayer], Tensor], with_biases: bool = True
) -> list[MapsOfAttentions]:
    """For each block the maps of its attentions, in their order, among all positions.

    Args:
        frozen: the pass.
        part: the rows of one attention, with the stream's part (see `LocalLayer.with_stream`).
        with_biases: see `LocalLayer`.
    """
    blocks = attentions_of(frozen, with_biases)
    return [torch.stack([among_all(layer, part(layer)) for layer in layers]) for layers in blocks]


def among_all(layer: LocalLayer, rows: Float[Tensor, "batch *head query column"]) -> Tensor:
    """Rows of one attention's queries as a map of all positions, with the identity at the others.

    Args:
        layer: the attention.
        rows: with a column for every position, or for those of the queries.
    """
    frozen = layer.frozen
    if frozen.sides is None:
        return rows
    whole = torch.diag_embed(frozen.mask.to(rows.dtype))
    between = rows.shape[1:-2]
    whole = whole.view(len(whole), *(1 for _ in between), *whole.shape[1:]).repeat(1, *between, 1, 1)
    first = 0 if rows.shape[-1] == whole.shape[-1] else layer.queries.start
    whole[..., layer.queries, :] = 0
    whole[..., layer.queries, first : first + rows.shape[-1]] = rows
    return whole


def only_acting(
    frozen: FrozenPass, maps: Float[Tensor, "layer batch *head query key"]
) -> Float[Tensor, "layer batch *head query key"]:
    """Maps of blocks without the identity at the tokens that a block leaves as they are: zero there."""
    if frozen.sides is None:
        return maps
    acting = torch.zeros(len(maps), maps.shape[-2], 1, dtype=maps.dtype, device=maps.device)
    for layer, rows in enumerate(acting):
        rows[slice(*frozen.capture.side(layer))] = 1
    return maps * acting.view(len(maps), *(1 for _ in maps.shape[1:-2]), *acting.shape[1:])


def mean_of_layers(
    frozen: FrozenPass, maps: Float[Tensor, "layer batch *head query key"]
) -> Float[Tensor, "batch *head query key"]:
    """The mean over layers; of an encoder–decoder, for each token over the layers of its own side."""
    if frozen.sides is None:
        return maps.mean(0)
    encoder = frozen.sides[0]
    first = frozen.view.encoder_layers
    sides = (maps[:first, ..., :encoder, :], maps[first:, ..., encoder:, :])
    return torch.cat([side.mean(0) for side in sides], dim=-2)


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


def of_layers(
    frozen: FrozenPass,
    scores: Tensor,
    layers: Float[Tensor, "layer batch *head query key"],
    *,
    method: str,
    query: Query,
    axes: Sequence[str] = AXES,
    **options: Any,
) -> Attribution:
    """A method's result, beside the maps of layers that it aggregates.

    Args:
        frozen: the pass.
        scores: of every query, `[batch, query, key]`, or with the further axes that `axes` names.
        layers: one map for each layer.
        method, options: how they came to be.
        query: the queries that the result has.
    """
    return Attribution.of(
        frozen,
        select_query(frozen, scores, query),
        method=method,
        query=query,
        axes=axes,
        layers=layers,
        options={**options, "query": query},
    )
