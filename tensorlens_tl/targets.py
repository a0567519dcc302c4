"""What a prediction is asked about: a token, a difference of two, or any direction of the residual stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.arguments import check_pass
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.view import ModelView

if TYPE_CHECKING:
    from tensorlens_tl.frozen import FrozenPass


def token_ids(view: ModelView, tokens: Any, batch: int, name: str = "target") -> Int[Tensor, "batch"]:
    """One token id per prompt.

    Args:
        view: the model.
        tokens: a string of one token, a token id, or one of either per prompt.
        batch: the number of prompts.
        name: the argument's name, for messages.

    Raises:
        InvalidInputError: several tokens, none, out of the vocabulary, or not one per prompt.
    """
    if hasattr(tokens, "tolist"):  # tensors and numpy's arrays and integers
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        tokens = [tokens] * batch
    if len(tokens) != batch:
        raise InvalidInputError(
            f"{name}: {len(tokens)} tokens for {batch} prompts; pass one, or one for each prompt. A difference of two "
            "tokens takes the second as minus=, a vector goes in direction=."
        )
    return torch.tensor([_token_id(view, token, name) for token in tokens])


def _token_id(view: ModelView, token: Any, name: str) -> int:
    vocabulary = view.d_vocab if view.unembedding is None else view.unembedding[0].shape[1]
    if isinstance(token, str):
        tokenizer = getattr(view.model, "tokenizer", None)
        if tokenizer is None:
            raise InvalidInputError(f"{name}={token!r}: this model has no tokenizer; pass a token id.")
        ids = tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            pieces = [tokenizer.decode([piece]) for piece in ids]
            spaced = " " + token.lstrip()
            helps = len(tokenizer(spaced, add_special_tokens=False)["input_ids"]) == 1
            hint = f" Words inside a text often start with a space: try {spaced!r}." if helps else ""
            raise InvalidInputError(f"{name}={token!r} is {len(ids)} tokens {pieces}; a target is one token.{hint}")
        if ids[0] == getattr(tokenizer, "unk_token_id", None) and token != tokenizer.unk_token:
            raise InvalidInputError(f"{name}={token!r} is not in the vocabulary; pass a token the tokenizer knows.")
        return int(ids[0])
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidInputError(f"{name}={token!r}: pass a token as a string or an id, or use direction= for a vector.")
    if not 0 <= token < vocabulary:
        raise InvalidInputError(f"{name}={token} is outside the vocabulary of {vocabulary} tokens.")
    return token


def token_label(view: ModelView, token: int) -> str:
    """A token id as readable text."""
    tokenizer = getattr(view.model, "tokenizer", None)
    return str(token) if tokenizer is None else tokenizer.decode([token])


def logit_label(view: ModelView, target: Any, minus: Any = None) -> str:
    """What a token target explains, in words: ids are named by their text."""
    asked = [token.tolist() if hasattr(token, "tolist") else token for token in (target, minus)]
    return "logit of " + " − ".join(
        repr(token_label(view, token)) if isinstance(token, int) else repr(token)
        for token in asked
        if token is not None
    )


@dataclass(frozen=True)
class Question:
    """A linear question about the end of the model: ``vector · stream + constant``, one per prompt.

    `of_tokens` tells whether the stream is the one that is unembedded (a token's logit) or the operator's own output.
    """

    vectors: Float[Tensor, "batch d"]
    constant: Float[Tensor, "batch"]
    of_tokens: bool
    label: str


def question(frozen: "FrozenPass", target: Any = None, minus: Any = None, direction: Any = None) -> Question:
    """What `target`, `minus` and `direction` ask, checked.

    Args:
        frozen: the pass.
        target: a token (string or id), or one per prompt.
        minus: another token, for ``logit(target) − logit(minus)``.
        direction: instead of a token, a vector `[d_model]` or `[batch, d_model]` at the operator's output.

    Raises:
        InvalidInputError: no target, both kinds, several tokens, out of the vocabulary, or a wrong shape.
        UnsupportedModelError: a token target where the model's logits are not ``cap(W_U·x + b_U)``.
    """
    check_pass(frozen)
    if direction is not None:
        if target is not None or minus is not None:
            raise InvalidInputError("target: pass either tokens or direction=, not both.")
        batch, width = len(frozen.tokens), frozen.output.shape[-1]
        try:
            direction = torch.as_tensor(direction).detach().to(frozen.output)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidInputError(f"direction={direction!r} is no vector of numbers.") from None
        if direction.shape not in ((width,), (batch, width)):
            raise InvalidInputError(
                f"direction is {tuple(direction.shape)}; pass [{width}] or one for each prompt, [{batch}, {width}]."
            )
        if not bool(torch.isfinite(direction).all()):
            raise InvalidInputError("direction has values that are not finite.")
        return Question(direction.expand(batch, width), direction.new_zeros(batch), False, "direction")
    if target is None:
        also = " (minus alone is no target)" if minus is not None else ""
        raise InvalidInputError(f"target: missing{also}. Pass a token (target=' Paris'), or direction=Tensor[d_model].")
    vectors, constant = unembedding_rows(frozen, target, minus)
    return Question(vectors, constant, True, logit_label(frozen.view, target, minus))


def unembedding_rows(
    frozen: "FrozenPass", target: Any, minus: Any = None
) -> tuple[Float[Tensor, "batch d"], Float[Tensor, "batch"]]:
    """Per prompt: the direction of a token's logit (or a difference of two), and its constant b_U.

    Raises:
        InvalidInputError: not one token for each prompt.
        UnsupportedModelError: the model's logits are not ``cap(W_U·x + b_U)``, measured.
    """
    if frozen.view.unembedding is None:
        raise UnsupportedModelError(f"target: {frozen.view.description} predicts no tokens; use direction=.")
    W_U, b_U = frozen.view.unembedding
    batch, device = len(frozen.tokens), frozen.tokens.device
    ids = token_ids(frozen.view, target, batch)
    others = None if minus is None else token_ids(frozen.view, minus, batch, "minus")
    error = frozen.unembedding_error
    if error is None or not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"target: the logits of {frozen.view.description} are not cap(W_U·x + b_U) as read from its weights "
            f"(relative error {error:.1e}; scaled logits?). Use direction=."
        )
    vectors = W_U[:, ids.to(W_U.device)].T
    constant = vectors.new_zeros(batch) if b_U is None else b_U[ids.to(b_U.device)]
    if others is not None:
        vectors = vectors - W_U[:, others.to(W_U.device)].T
        constant = constant if b_U is None else constant - b_U[others.to(b_U.device)]
    return vectors.to(device), constant.to(device)
