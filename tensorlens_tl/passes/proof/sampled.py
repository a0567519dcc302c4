"""Proofs at a few positions: which ones, and a block's attention there.

A query's output needs the values of all its keys, and of everything else only what happens at the query itself. So
attention's values are computed at every token, and patterns, norms, activations and matrices after them only at the
sampled queries: about a tenth of what the whole block costs at GPT-2 small's shape.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AnyAttention, Diagonal
from tensorlens_tl.algebra.positions import RowPositions
from tensorlens_tl.models import Layout, ModelView
from tensorlens_tl.passes.block_maps import BlockMaps

POSITIONS = 8
"""Queries of each prompt at which a sampled proof looks."""


def sampled_positions(mask: Bool[Tensor, "batch pos"], count: int = POSITIONS) -> Int[Tensor, "batch query"]:
    """Real tokens of each prompt, ascending: its last one, and others drawn at random, the same for the same mask.

    A prompt with fewer real tokens than others gives its last one several times.
    """
    real = mask.cpu()
    numbers = torch.arange(real.shape[1])
    last = (real * (numbers + 1)).amax(1, keepdim=True).sub(1).clamp_min(0)
    priorities = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~real, -1.0)
    priorities = priorities.scatter(1, last, 2.0)
    priority, drawn = priorities.topk(min(count, int(real.sum(1).amax().clamp_min(1))), dim=1)
    return torch.where(priority < 0, last, drawn).sort(dim=1).values.to(mask.device)


def can_be_sampled(view: ModelView, layer: int) -> bool:
    """Whether a block can be evaluated at some positions: whitening and mixers other than attention pass something on
    from token to token, a block of an encoder–decoder acts on one side only, and shared values are another block's."""
    block = view.blocks[layer]
    if block.reads_embedding:
        return False
    mixes = block.whitening is not None or block.mixer is not None or block.has_beside
    return not view.is_encoder_decoder and not mixes and block.values_layer is None


def attention_at(
    maps: BlockMaps, layer: int, layout: Layout, positions: Int[Tensor, "batch query"]
) -> tuple[Float[Tensor, "batch query width"], Diagonal]:
    """What the heads of a block gather at some positions, and the map that gives what its attention writes there.

    Args:
        maps: the parts of the blocks.
        layer: of a block that `can_be_sampled`.
        layout: how it is put together.
        positions: real tokens.
    """
    x = maps.capture.resid_pre(layer)
    if layout.attn.before is not None:
        x = maps.norm(layer, layout.attn.before)(x)
    values, mixing, out = maps.attention(layer).stages
    assert isinstance(mixing, AnyAttention)
    mixed = mixing.at_queries(values(x), positions)
    # one position per row, as what follows the mixing may hold a factor for each position
    attended = out.at(RowPositions(positions.T))(mixed.transpose(0, 1)[:, :, None])[:, :, 0].transpose(0, 1)
    return mixed, Diagonal(torch.zeros_like(attended), attended)  # a constant: it ignores what it reads
