"""RWKV halves its stream after every few blocks, past its hook points, and in its first run scales weights to fit."""

from typing import Any

from tensorlens_tl.models.parameters import innermost


def halving_period(block: Any) -> int:
    """After how many blocks the model halves its stream; 0 where it does not."""
    return getattr(getattr(innermost(block), "config", None), "rescale_every", 0)


def halves_after(block: Any, layer: int) -> bool:
    """Whether the model halves its stream after a block: not in train mode, in which its weights are not scaled."""
    every = halving_period(block)
    return every > 0 and not innermost(block).training and (layer + 1) % every == 0
