"""Whether the model's logits are ``cap(W_U·x + b_U)``: compared at every position that a result is about."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.models import ModelView, Query
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.inputs import Prompt, query_positions


class LogitsCheck:
    """The positions whose logits were compared with the model's own; a cache that grows with the positions of results.

    Attributes:
        error: the largest ``max abs(ours − logits) / max abs(logits)`` so far; None before any comparison.
        compared: True where logits were compared, or will be when the error is first read.
        postponed: the model's logits that are compared then, and where; None after that.
    """

    def __init__(self, mask: Bool[Tensor, "batch pos"]) -> None:
        self.error: float | None = None
        self.compared = torch.zeros_like(mask)
        self.postponed: tuple[object, Int[Tensor, "batch query"]] | None = None

    def covers(self, positions: Int[Tensor, "batch query"]) -> bool:
        """True if every one of some positions was compared."""
        return bool(torch.take_along_dim(self.compared, positions, dim=1).all())

    def add(self, error: float, positions: Int[Tensor, "batch query"]) -> None:
        """Note what a comparison at some positions measured."""
        self.compared = self.compared.scatter(1, positions, True)
        self.error = max(error, self.error or 0.0)

    def postpone(self, logits: object, positions: Int[Tensor, "batch query"]) -> None:
        """Hold the model's logits at some positions until somebody reads their error: it reads all of W_U."""
        self.compared = self.compared.scatter(1, positions, True)
        self.postponed = logits, positions

    def held(self, positions: Int[Tensor, "batch query"]) -> Float[Tensor, "batch query d_vocab"] | None:
        """The model's logits at some positions, while they are held; None otherwise."""
        if self.postponed is None:
            return None
        logits, places = self.postponed
        matches = places[:, :, None] == positions[:, None].to(places.device)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or not bool(matches.any(1).all()):
            return None
        return torch.take_along_dim(logits, matches.int().argmax(1)[..., None].to(logits.device), dim=1)

    def catch_up(self, capture: Capture, states: Tensor) -> None:
        """Compare what was postponed with the weights' logits of the model's last states."""
        if self.postponed is None:
            return
        logits, positions = self.postponed
        self.postponed = None
        self.add(logits_error(capture, states, logits, positions), positions)


def compared_positions(view: ModelView, prompt: Prompt, query: Query | None = None) -> Int[Tensor, "batch compared"]:
    """Return the positions whose logits are compared while freezing; some may repeat.

    They are each prompt's last real token, those of `query`, and in a masked language model the first and every mask.
    """
    last = query_positions(prompt, -1)
    columns = [last]
    if query is not None:
        columns.append(query_positions(prompt, query).to(last.device))
        prompt.in_logits(columns[-1])
    mask_id = getattr(view.tokenizer, "mask_token_id", None)
    if view.mlm_head is not None:
        columns.append(query_positions(prompt, 0))
    if view.mlm_head is not None and mask_id is not None:
        masks = prompt.tokens == mask_id
        numbers = torch.arange(masks.shape[1], device=masks.device)
        places = torch.where(masks, numbers, last)  # a prompt with fewer masks has its last token several times
        columns.append(places[:, masks.any(0)])
    return torch.cat(columns, dim=1)


def logits_error(capture: Capture, states: Tensor, logits: object, positions: Int[Tensor, "batch query"]) -> float:
    """Return the largest ``max abs(ours − logits) / max abs(logits)`` of real tokens, ours from weights and last
    states.

    `logits` are the model's, `[batch, query, d_vocab]`; any other shape has an infinite error.
    """
    ours = capture.view.logits(torch.take_along_dim(states, positions[..., None], dim=1))
    if not isinstance(logits, Tensor) or logits.shape != ours.shape:
        return float("inf")
    expected = logits.to(ours)
    scale = expected.abs().amax(-1).clamp_min(torch.finfo(expected.dtype).tiny)
    real = torch.take_along_dim(capture.mask, positions, dim=1)
    errors = ((ours - expected).abs().amax(-1) / scale)[real]
    return float(errors.max()) if errors.numel() else 0.0
