"""What does a model predict at one position, and what is there to explain about it?"""

from dataclasses import dataclass
from typing import Any

from tensorlens_tl.drawing import cards
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.passes.operator import logit_label, target_ids, token_label

LISTED = 5
"""How many of the likeliest tokens are listed."""


@dataclass(frozen=True)
class Prediction:
    """What a model predicts at one position of one prompt, and which logit is explained.

    Attributes:
        query: the position, as a query of the library's functions.
        position: the same, counted over all tokens.
        chances: the likeliest tokens with their probabilities, and after them what is explained, where it is not
            among them; none for a model that predicts no tokens, and of a classifier whose answers do not exclude each
            other.
        target, minus: the token that is explained, and the one that it is compared with.
        label: both in words.
    """

    query: int
    position: int
    chances: list[cards.Chance]
    target: int | None = None
    minus: int | None = None
    label: str = ""

    @property
    def best(self) -> list[tuple[str, float]]:
        """The likeliest tokens with their probabilities; none for a model that predicts no tokens."""
        return [(chance.name, chance.probability) for chance in self.chances[:LISTED]]

    @property
    def options(self) -> dict[str, Any]:
        """Target and minus as options of a method or a circuit."""
        tokens = {"target": self.target, "minus": self.minus}
        return {name: token for name, token in tokens.items() if token is not None}


def predict(
    frozen: FrozenPass, target: TokenLike = None, minus: TokenLike = None, query: Query | None = None
) -> Prediction:
    """The model's prediction, and what is to be explained about it.

    Args:
        frozen: a pass of one prompt.
        target, minus: a token, and one to compare it with. By default the model's first choice against its second.
        query: one position. By default the last, or the one that a classifier reads; in a masked language model the
            first mask.

    Raises:
        InvalidInputError: several positions, a token that is none, or a target of a model that predicts no tokens.
    """
    if query is None:
        query = _default_query(frozen)
    at = one_query(frozen.prompt, query)
    position = int(at)
    number = int(frozen.mask[0, :position].sum())  # real tokens before it
    logits = frozen.logits(number)
    if logits is None:
        if target is not None or minus is not None:
            raise InvalidInputError(f"target: {frozen.view.description} predicts no tokens; leave it out.")
        return Prediction(number, position, [])
    logits = logits[0, 0]
    order = logits.argsort(descending=True).tolist()
    if target is None:
        target = order[0]
        if minus is None and frozen.view.has_probabilities:
            minus = order[1]
    ids, others = target_ids(frozen, at, target, minus)
    target_id = int(ids)
    minus_id = None if others is None else int(others)
    roles = {minus_id: "against", target_id: "explained"}
    label = logit_label(frozen.view, target_id, minus_id)
    if not frozen.view.has_probabilities:
        return Prediction(number, position, [], target_id, minus_id, label)
    probabilities = logits.double().softmax(-1)
    chances = [
        cards.Chance(token_label(frozen.view, token), float(probabilities[token]), roles.get(token, ""))
        for token in dict.fromkeys([*order[:LISTED], target_id, minus_id])
        if token is not None
    ]
    return Prediction(number, position, chances, target_id, minus_id, label)


def _default_query(frozen: FrozenPass) -> int:
    """The first mask of a masked language model, else the last token."""
    mask = getattr(frozen.view.tokenizer, "mask_token_id", None)
    real = frozen.tokens[0][frozen.mask[0]].tolist()
    if frozen.view.mlm_head is not None and frozen.view.classes is None and mask in real:
        return real.index(mask)
    return -1
