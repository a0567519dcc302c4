"""What is asked of the live model's logits: a token's, or the difference of two, at some queries."""

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import refuse_attached
from tensorlens_tl.models.protocol import Query, TokenLike
from tensorlens_tl.models.state import refuse_dropout
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.prompts import query_positions
from tensorlens_tl.passes.target import logit_label, target_ids


class AskedLogits:
    """Which logits are asked about, checked.

    Attributes:
        positions: each query's position, `[batch, query]`; `in_logits` is the same as the model's logits count them.
        ids, others: the target token of each query, and the one that is subtracted, or None.
        real: True at queries that are real tokens.
        label: the same in words.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range or without a prediction.
        UnsupportedModelError: the model predicts no tokens, or has dropout that is on.
        FrozenModelError: the model's weights are no longer those of the pass, or a frozen pass is attached to it.
    """

    def __init__(self, frozen: FrozenPass, target: TokenLike, minus: TokenLike, query: Query) -> None:
        if target is None:
            raise InvalidInputError("target: missing. Pass a token, such as target=' Paris'.")
        if frozen.view.unembedding is None:
            raise UnsupportedModelError(f"target: {frozen.view.description} predicts no tokens.")
        frozen.check_fresh()
        refuse_attached(frozen.model)
        refuse_dropout(frozen.view.model)
        self.positions = query_positions(frozen.prompt, query)
        self.in_logits = frozen.prompt.in_logits(self.positions)
        self.ids, self.others = target_ids(frozen, self.positions, target, minus)
        self.real = torch.take_along_dim(frozen.mask, self.positions, dim=1)
        self.label = logit_label(frozen.view, target, minus)

    def read(
        self, logits: Float[Tensor, "*any batch query d_vocab"], queries: slice = slice(None)
    ) -> Float[Tensor, "*any batch query"]:
        """The number asked about, from what the model gives (or any function of it) at some of the queries."""

        def taken(ids: Tensor) -> Tensor:
            # autograd keeps no index that was made in somebody's inference mode
            index = ids[:, queries, None].clone().to(logits.device).expand(*logits.shape[:-1], 1)
            return logits.gather(-1, index)[..., 0]

        return taken(self.ids) if self.others is None else taken(self.ids) - taken(self.others)
