"""What the parts of a block read and held in one run: the numbers that a secant is drawn between."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Tap
from tensorlens_tl.passes.block_maps import BlockMaps

ATTENTION = "attention"
HEADS = "heads"
MLP = "mlp"


@dataclass(frozen=True, eq=False)
class BlockValues:
    """One block of one run, at the positions that the block acts on.

    Attributes:
        norms: what each norm read, by its name.
        attention: what attention read, after the norm before it.
        heads: what its heads gave, side by side, before W_O.
        mlp: what the MLP read; None without one.
    """

    norms: dict[str, Float[Tensor, "batch pos d_model"]]
    attention: Float[Tensor, "batch pos d_model"]
    heads: Float[Tensor, "batch pos width"]
    mlp: Float[Tensor, "batch pos d_model"] | None


def block_values(maps: BlockMaps, layer: int) -> BlockValues:
    """Run one block's frozen map at its own input, and note what its parts read.

    Args:
        maps: of the run.
        layer: which block; one with attention.
    """
    seen: dict[str, Tensor] = {}
    parts = maps.parts(layer)
    place = maps.layouts[layer].mlp
    norms = {name: Chain((Tap(seen, name), norm)) for name, norm in parts.norms.items()}
    *inside, out = maps.attention(layer).stages
    attention = Chain((Tap(seen, ATTENTION), *inside, Tap(seen, HEADS), out))
    mlp = parts.mlp
    if mlp is not None:
        if place.after is None and place.outer is None:
            mlp = _nothing(maps)  # nothing in the block reads what it writes
        mlp = Chain((Tap(seen, MLP), mlp))
    block = maps.composed(layer, maps.layouts[layer], parts._replace(attention=attention, mlp=mlp, norms=norms))
    block(maps.capture.resid_pre(layer))
    return BlockValues(
        {name: seen[name] for name in norms if name in seen}, seen[ATTENTION], seen[HEADS], seen.get(MLP)
    )


def _nothing(maps: BlockMaps) -> AffineMap:
    return Diagonal(torch.zeros_like(maps.capture.resid_pre(0)[:1, :1, :1]))
