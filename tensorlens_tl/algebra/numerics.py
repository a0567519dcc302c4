"""Precision and error measures that every layer of the library shares."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Half precision as float32, where sums of products would overflow or lose their digits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def relative_error(
    made: Float[Tensor, "*any d"], own: Float[Tensor, "*any d"], mask: Bool[Tensor, "..."] | None = None
) -> float:
    """‖made − own‖ / ‖own‖ of the worst vector: infinite where shapes differ, NaN where a value is.

    Args:
        made: vectors that should be `own`.
        own: what they are compared with.
        mask: True at the vectors that count, one entry for each; None counts all.
    """
    if made.shape != own.shape:
        return float("inf")
    errors = (made - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(torch.finfo(own.dtype).tiny)
    errors = errors if mask is None else errors[mask]
    return float(errors.max()) if errors.numel() else 0.0


def relative_residual(
    scores: Float[Tensor, "*any key"], bias: Float[Tensor, "*any"], total: Float[Tensor, "*any"]
) -> Float[Tensor, "*any"]:
    """abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)): how far an additive claim is from holding."""
    size = scores.abs().sum(-1) + bias.abs()
    return (scores.sum(-1) + bias - total).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)
