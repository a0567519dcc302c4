"""Proofs at a few positions: which ones, and a block's attention there.

A query's output needs what all its keys hold, and of everything else only what happens at the query itself. Values are
linear, so each head of a sampled query mixes what attention reads before W_V is applied, Σ_j A_qj (x_j W_V) =
(Σ_j A_qj x_j) W_V: no matrix is applied to every token. Half precision, and queries so many that this would take more
products, compute the values of every token.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, AnyAttention, Diagonal, Linear
from tensorlens_tl.algebra.positions import RowPositions
from tensorlens_tl.models import Layout, ModelView
from tensorlens_tl.passes.block_maps import BlockMaps

POSITIONS = 8
"""Queries of each prompt at which a sampled proof looks."""


def sampled_positions(mask: Bool[Tensor, "batch pos"], count: int = POSITIONS) -> Int[Tensor, "batch query"]:
    """Return each prompt's last real token and random others, ascending, the same for the same mask; repeats fill
    rows."""
    real = mask.cpu()
    numbers = torch.arange(real.shape[1])
    last = (real * (numbers + 1)).amax(1, keepdim=True).sub(1).clamp_min(0)
    priorities = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~real, -1.0)
    priorities = priorities.scatter(1, last, 2.0)
    priority, drawn = priorities.topk(min(count, int(real.sum(1).amax().clamp_min(1))), dim=1)
    return torch.where(priority < 0, last, drawn).sort(dim=1).values.to(mask.device)


def can_be_sampled(view: ModelView, layer: int) -> bool:
    """True if a block can be evaluated at some positions.

    Not so with whitening and other mixers, which pass on from token to token, in an encoder–decoder, and with shared
    values.
    """
    block = view.blocks[layer]
    if block.reads_embedding:
        return False
    mixes = block.whitening is not None or block.mixer is not None or block.has_beside
    return not view.is_encoder_decoder and not mixes and block.values_layer is None


def attention_at(
    maps: BlockMaps, layer: int, layout: Layout, positions: Int[Tensor, "batch query"]
) -> tuple[Float[Tensor, "batch query width"], Diagonal]:
    """Return what a block's heads gather at some positions, and the map to what attention writes there."""
    x = maps.capture.resid_pre(layer)
    if layout.attn.before is not None:
        x = maps.norm(layer, layout.attn.before)(x)
    values, mixing, out = maps.attention(layer).stages
    assert isinstance(mixing, AnyAttention)
    mixed = _mixed(values, mixing, x, positions)
    # one position per row, as what follows the mixing may hold a factor for each position
    attended = out.at(RowPositions(positions.T))(mixed.transpose(0, 1)[:, :, None])[:, :, 0].transpose(0, 1)
    return mixed, Diagonal(torch.zeros_like(attended), attended)  # a constant: it ignores what it reads


def _mixed(
    values: AffineMap,
    mixing: AnyAttention,
    x: Float[Tensor, "batch key d_model"],
    positions: Int[Tensor, "batch query"],
) -> Float[Tensor, "batch query width"]:
    """What the heads gather at some positions."""
    exact = x.dtype in (torch.float32, torch.float64)
    if not exact or not isinstance(values, Linear) or values.weight.dtype != x.dtype:
        return mixing.at_queries(values(x), positions)
    rows = mixing.rows_at(positions)
    heads = rows.shape[1] * rows.shape[2]
    if 2 * heads > values.weight.shape[1]:
        return mixing.at_queries(values(x), positions)
    read = rows.to(x.dtype).flatten(1, 2) @ x[:, : rows.shape[-1]]
    by_head = rearrange(read, "b (kv group q) d -> kv b (group q) d", kv=mixing.kv_heads, q=rows.shape[2])
    weights = rearrange(values.weight, "d (kv e) -> kv 1 d e", kv=mixing.kv_heads)
    gathered = by_head @ weights
    if values.offset is not None:
        sums = rearrange(rows.sum(-1), "b (kv group) q -> kv b (group q) 1", kv=mixing.kv_heads)
        gathered = gathered + sums * rearrange(values.offset, "(kv e) -> kv 1 1 e", kv=mixing.kv_heads)
    return rearrange(gathered, "kv b (group q) e -> b q (kv group e)", q=rows.shape[2])
