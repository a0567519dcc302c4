"""Whether the model's logits are ``cap(W_U·x + b_U)``: compared at every position that a result is about."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl.passes.capture import Capture


class LogitsCheck:
    """The positions whose logits were compared with the model's own, and the largest error there.

    A cache of a pass: it grows with the positions that results are about, and nothing else depends on it.

    Attributes:
        error: the largest ``max abs(ours − logits) / max abs(logits)`` so far; None before any comparison.
        compared: True where logits were compared.
    """

    def __init__(self, mask: Bool[Tensor, "batch pos"]) -> None:
        self.error: float | None = None
        self.compared = torch.zeros_like(mask)

    def covers(self, positions: Int[Tensor, "batch query"]) -> bool:
        """Whether every one of some positions was compared."""
        return bool(torch.take_along_dim(self.compared, positions, dim=1).all())

    def add(self, error: float, positions: Int[Tensor, "batch query"]) -> None:
        """Note what a comparison at some positions measured."""
        self.compared = self.compared.scatter(1, positions, True)
        self.error = max(error, self.error or 0.0)


def logits_error(capture: Capture, states: Tensor, logits: object, positions: Int[Tensor, "batch query"]) -> float:
    """How far the weights' logits of the model's last states are from the model's own, at some positions.

    Args:
        capture: the pass.
        states: what the model unembeds.
        logits: what the model gave there, `[batch, query, d_vocab]`; anything else differs infinitely.
        positions: which of the states.

    Returns:
        The largest ``max abs(ours − logits) / max abs(logits)`` of real tokens.
    """
    ours = capture.view.logits(torch.take_along_dim(states, positions[..., None], dim=1))
    if not isinstance(logits, Tensor) or logits.shape != ours.shape:
        return float("inf")
    expected = logits.to(ours)
    scale = expected.abs().amax(-1).clamp_min(torch.finfo(expected.dtype).tiny)
    real = torch.take_along_dim(capture.mask, positions, dim=1)
    errors = ((ours - expected).abs().amax(-1) / scale)[real]
    return float(errors.max()) if errors.numel() else 0.0
