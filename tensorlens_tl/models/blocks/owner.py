"""What a block knows of the model that it belongs to."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.models.parameters import norm_weights


@dataclass(frozen=True, eq=False)
class Owner:
    """What a block needs of the view of its model.

    Not the view itself: the two would refer to each other, and the weights that a view has copied would stay in memory
    until Python looks for such circles.

    Attributes:
        model, cfg: as of the view.
        description: class and name, for messages.
        is_hooked_encoder_decoder: whether it is TransformerLens' own class of encoder–decoders.
        device: where results are, and what is read of the weights: that of the model's first weight.
    """

    model: Any
    cfg: Any
    description: str
    is_hooked_encoder_decoder: bool
    device: torch.device

    @property
    def encoder_gain(self) -> Float[Tensor, "d_model"] | None:
        """What cross-attention multiplies the encoder's output by, as it is shown; None for nothing."""
        if not self.is_hooked_encoder_decoder:
            return None
        return norm_weights(self.model.encoder_final_ln, self.cfg).gain
