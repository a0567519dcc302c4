"""Find heads that attend to the previous token, to an earlier copy of a token, or to what followed it (induction).

Each score is the mean attention that a head pays to such a position, over the tokens that have one (Olsson et al.
2022). Where a token occurred several times before, its positions count together.

`transformer_lens.head_detector.detect_head` divides the same sum by the attention of every token, including those
without such a position: its score with ``error_measure="mul"`` is ours times the share of tokens that have one.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.passes.inputs import InputLike, prompt_batches
from tensorlens_tl.results import HeadScores, joined

Places = Callable[[FrozenPass], Bool[Tensor, "batch query key"]]
"""Returns where each query of a pass should attend."""


@checked_names
def previous_token_scores(
    model: ModelLike | FrozenPass, prompts: InputLike | None = None, *, memory: Memory = None, **freezing: Any
) -> HeadScores:
    """Measure how much each head attends from a token to the one before it.

    Args:
        model: a frozen pass, or a model together with prompts.
        prompts: strings or token ids, if `model` is a model.
        memory: how much may be allocated at once, as ``"512MB"`` or bytes; it bounds how many prompts run together.
        freezing: options of `freeze`.

    Returns:
        The mean attention `[batch, layer, head]`, over each prompt's real tokens except the first.

    Raises:
        InvalidInputError: a pass with prompts, a model without, or prompts of one token.
        UnsupportedModelError: no attention, an encoder–decoder, or a model that reads no tokens.

    >>> tlens.circuits.previous_token_scores(frozen).scores.shape
    torch.Size([1, 4, 4])
    """
    return _scores(model, prompts, _previous, "to the previous token", memory, freezing)


@checked_names
def duplicate_token_scores(
    model: ModelLike | FrozenPass, prompts: InputLike | None = None, *, memory: Memory = None, **freezing: Any
) -> HeadScores:
    """Measure how much each head attends from a token to its earlier occurrences.

    Args:
        model, prompts, memory, freezing: as for `previous_token_scores`.

    Returns:
        The mean attention `[batch, layer, head]`, over each prompt's tokens that occurred before.

    Raises:
        InvalidInputError: no token of the prompts occurred before; and as for `previous_token_scores`.
        UnsupportedModelError: as for `previous_token_scores`.

    >>> tlens.circuits.duplicate_token_scores(frozen).counts
    tensor([1])
    """
    return _scores(model, prompts, _duplicates, "to earlier occurrences of the token", memory, freezing)


@checked_names
def induction_scores(
    model: ModelLike | FrozenPass, prompts: InputLike | None = None, *, memory: Memory = None, **freezing: Any
) -> HeadScores:
    """Measure how much each head attends from a token to those that followed its earlier occurrences.

    Repeated random tokens show it best: ``evaluate.induction(d_vocab=...).tokens``.

    Args:
        model, prompts, memory, freezing: as for `previous_token_scores`.

    Returns:
        The mean attention `[batch, layer, head]`, over each prompt's tokens that occurred before.

    Raises:
        InvalidInputError: no token of the prompts occurred before; and as for `previous_token_scores`.
        UnsupportedModelError: as for `previous_token_scores`.

    >>> tlens.circuits.induction_scores(model, [text, "the file and the"]).scores.shape
    torch.Size([2, 4, 4])
    """
    return _scores(model, prompts, _after_duplicates, "to what followed the token before", memory, freezing)


def _scores(
    model: Any, prompts: Any, places: Places, target: str, memory: Memory, freezing: dict[str, Any]
) -> HeadScores:
    """Return the scores of a pass, or of a model's prompts in batches."""
    if isinstance(model, FrozenPass):
        if prompts is not None or freezing:
            raise InvalidInputError(f"attention {target}: a frozen pass has its prompts already; pass it by itself.")
        result = _of_pass(model, places, target)
    elif prompts is None:
        raise InvalidInputError(f"attention {target}: `prompts` are missing; pass strings or token ids.")
    else:
        rows, batches = prompt_batches(ModelView(model), prompts, freezing, memory)
        if len(batches) < 2:
            result = _of_pass(freeze(model, prompts, **freezing), places, target)
        else:
            options = {name: value for name, value in freezing.items() if name != "prepend_bos"}  # rows are token ids
            frozen = (freeze(model, [rows[i] for i in batch], **options) for batch in batches)
            result = joined([_of_pass(each, places, target) for each in frozen], batches)
    if not bool(result.counts.any()):
        raise InvalidInputError(
            f"attention {target}: none of the prompts has such a token. Pass prompts in which tokens repeat, such as "
            "evaluate.induction(d_vocab=...).tokens."
        )
    return result


def _of_pass(frozen: FrozenPass, places: Places, target: str) -> HeadScores:
    view = frozen.view
    view.refuse_encoder_decoder(f"attention {target}")
    if view.reads != "tokens":
        raise UnsupportedModelError(f"attention {target}: {view.description} reads no tokens.")
    layers = [number for number, points in enumerate(frozen.points.blocks) if points.pattern is not None]
    if not layers:
        raise UnsupportedModelError(f"attention {target}: no layer of {view.description} has attention.")
    chosen = places(frozen)
    counts = chosen.any(-1).sum(-1)
    means: dict[int, Tensor] = {}  # of each head; NaN for a prompt without such a token
    for layer in layers:
        pattern = upcast(frozen.pattern(layer))
        means[layer] = torch.einsum("bhqk,bqk->bh", pattern, chosen.to(pattern)) / counts[:, None]
    heads = max(mean.shape[1] for mean in means.values())
    scores = means[layers[0]].new_full((len(chosen), frozen.n_layers, heads), torch.nan)
    for layer, mean in means.items():
        scores[:, layer, : mean.shape[1]] = mean
    return HeadScores(scores, counts, target, frozen.provenance())


def _previous(frozen: FrozenPass) -> Bool[Tensor, "batch query key"]:
    mask = frozen.mask
    pos = mask.shape[1]
    before = torch.ones(pos, pos, dtype=torch.bool, device=mask.device).tril(-1).triu(-1)
    return before & mask[:, :, None] & mask[:, None]


def _duplicates(frozen: FrozenPass) -> Bool[Tensor, "batch query key"]:
    tokens = frozen.tokens
    real = frozen.mask[:, :, None] & frozen.mask[:, None]
    return ((tokens[:, :, None] == tokens[:, None]) & real).tril(-1)


def _after_duplicates(frozen: FrozenPass) -> Bool[Tensor, "batch query key"]:
    earlier = _duplicates(frozen)
    after = torch.cat([torch.zeros_like(earlier[..., :1]), earlier[..., :-1]], dim=-1)
    return after & frozen.mask[:, None]
