"""Tokens in the place of others, drawn from what the model itself would write there.

A mean embedding, or a token that fits nowhere, takes a trained model to inputs that it has never seen: one of them may
break a prediction wherever it stands, so that a test by it says nothing about which token mattered. A token that the
model expects after what stands before keeps the prompt a text.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, PromptNumber
from tensorlens_tl.evaluate.arguments import ReplacementName
from tensorlens_tl.generation import not_causal
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import Prompt, prepare
from tensorlens_tl.passes.replacement import Mean, Replacement

RESAMPLED = "resampled"
"""The name of the replacement; a `Replacement` of that name has no tokens before they are drawn for some prompts."""

AT_ONCE = 2**23
"""How many probabilities are held at once, in float64."""


def replacement_of(view: ModelView, prompt: Prompt, name: ReplacementName, mean: Mean | None = None) -> Replacement:
    """The replacement that a user names; None is ``"resampled"`` of a causal language model that reads tokens alone.

    Raises:
        InvalidInputError: ``"resampled"`` of another model; see also `Replacement.of`.
        UnsupportedModelError: see `Replacement.of`.
    """
    if name is not None and not (isinstance(name, str) and name == RESAMPLED):
        return Replacement.of(view, prompt, name, mean)
    why = not_causal(view)
    if why is None and prompt.extra:
        why = f"reads more than tokens here ({', '.join(sorted(prompt.extra))})"
    if why is None and view.unembedding is not None and view.unembedding[0].shape[1] != view.d_vocab:
        why = "has logits that are not those of the tokens that it reads"
    if why is None:
        return Replacement(RESAMPLED)
    if name is None:
        return Replacement.of(view, prompt, None, mean)
    raise InvalidInputError(
        f"replacement={RESAMPLED!r}: a token is drawn from a causal language model's own predictions, and "
        f"{view.description} {why}. Use 'mean', 'zero', or of a model that reads text 'mask' or a token."
    )


def drawn(view: ModelView, prompt: Prompt, replacement: Replacement, draws: int, seed: int) -> list[Replacement]:
    """What stands for tokens in some prompts: `draws` times other tokens, or the replacement itself where it is fixed.

    Each prompt is run by itself and without padding, and its draws depend on the seed, their number and its own tokens:
    they are the same in every batch.

    Raises:
        InvalidInputError: a vocabulary in which no other token is left; names the prompt.
    """
    if replacement.name != RESAMPLED:
        return [replacement]
    tokens = prompt.tokens.repeat(draws, 1, 1)
    for row, mask in enumerate(prompt.mask):
        ids = prompt.tokens[row, mask]
        seeds = [hash((seed, draw, *ids.tolist())) for draw in range(draws)]
        rngs = [random.Random(one) for one in seeds]
        uniform = torch.tensor([[rng.random() for _ in range(len(ids))] for rng in rngs], dtype=torch.float64)
        parts: list[Tensor] = []
        for probabilities in _expected(view, ids):
            if not bool(torch.isfinite(probabilities).all()):
                raise InvalidInputError(
                    PromptNumber(row),
                    f": replacement={RESAMPLED!r} finds no other token to draw: all are special tokens, or the logits "
                    "are not finite. Use 'mean', 'zero' or a token.",
                )
            first = sum(part.shape[1] for part in parts)
            up_to = probabilities.cumsum(-1)
            at = (uniform[:, first : first + len(up_to)].T * up_to[:, -1:]).contiguous()
            parts.append(torch.searchsorted(up_to, at, right=True).T)
        tokens[:, row, mask] = torch.cat(parts, dim=1).to(tokens.device)
    return [replace(replacement, tokens=some) for some in tokens]


def _expected(view: ModelView, ids: Int[Tensor, "pos"]) -> Iterator[Float[Tensor, "_some d_vocab"]]:
    """What the model expects at each position of one prompt, some of them at a time, in float64 on the CPU.

    Neither the token that stands there nor a special one is among it. The first position has nothing before it (where
    a BOS token does not stand there, which is never replaced): there it is the mean over what follows each token.
    """
    _, logits = capture(view.model, prepare(view, [ids.tolist()]).kwargs, [])
    logits = logits[0]
    ids = ids.cpu()
    size = max(1, AT_ONCE // logits.shape[-1])
    special = torch.tensor(sorted(getattr(view.tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    special = special[special < logits.shape[-1]]

    def without(some: Tensor, besides: Tensor) -> Tensor:
        some = some.double().cpu()
        some[:, special] = -torch.inf
        return some.scatter(1, besides[:, None], -torch.inf).softmax(-1)

    sums = [without(some, ids[:1].expand(len(some))).sum(0) for some in logits.split(size)]
    yield torch.stack(sums).sum(0, keepdim=True) / len(ids)
    for some, besides in zip(logits[:-1].split(size), ids[1:].split(size), strict=True):
        if len(besides):
            yield without(some, besides)
