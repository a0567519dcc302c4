"""What a question asks about: its position, its target and what that is compared with, or their defaults."""

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.explorer.passes import Passes
from tensorlens_tl.explorer.questions import Question
from tensorlens_tl.passes.operator import token_ids


def query_of(passes: Passes, question: Question) -> int:
    """The position, counted over all tokens; of an image, the one that its class is read at.

    Raises:
        InvalidInputError: past the end.
    """
    frozen = passes.frozen(question)
    if frozen.prompt.class_at is not None:
        return frozen.prompt.class_at
    length = frozen.tokens.shape[1]
    if question.query is None:
        return length - 1
    if question.query >= length:
        raise InvalidInputError(f"explorer: query is {question.query}; the prompt has {length} tokens.")
    return question.query


def next_logits(passes: Passes, question: Question) -> Float[Tensor, "d_vocab"]:
    """The model's logits at the query.

    Raises:
        UnsupportedModelError: a model without, or without probabilities.
    """
    logits = passes.logits(question, query_of(passes, question))
    if logits is None:
        raise UnsupportedModelError("explorer: this model predicts no tokens, which the page asks about.")
    passes.frozen(question).view.require_probabilities("explorer")
    return logits


def target_of(passes: Passes, question: Question) -> dict[str, int]:
    """Target and minus as options of the library's functions.

    Raises:
        InvalidInputError: a number or a text that is no token.
    """
    logits = next_logits(passes, question)
    size = len(logits)
    minus = question.minus
    if isinstance(minus, str):  # as text, even where it is a word for a rank such as "first-choice"
        minus = int(token_ids(passes.frozen(question).view, minus, 1, "explorer: minus"))
    for name, token in (("target", question.target), ("minus", minus)):
        if token is not None and token >= size:
            raise InvalidInputError(f"explorer: {name} is {token}; the vocabulary has {size} tokens.")
    best = logits.topk(min(2, size)).indices.tolist()
    target = question.target
    if target is None:
        target = best[0]
        if minus == best[0]:  # no token stands against itself
            target = best[-1]
    if question.runner_up:
        minus = runner_up(logits, target)
    if minus == target and size == 1:  # the only class there is
        minus = None
    return {"target": target} if minus is None else {"target": target, "minus": minus}


def runner_up(logits: Float[Tensor, "d_vocab"], target: int) -> int | None:
    """The likeliest token besides a target; None where there is no other."""
    best = logits.topk(min(2, len(logits))).indices.tolist()
    return next((token for token in best if token != target), None)


def aim_of(passes: Passes, question: Question) -> dict[str, int]:
    """Target, minus and query as options of the library's functions."""
    return {**target_of(passes, question), "query": query_of(passes, question)}
