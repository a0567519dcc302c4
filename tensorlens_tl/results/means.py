"""Means of results over prompts, and what two results less one another need besides numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.operator import RANKED


def both_provenances(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """What a result less another depends on: the facts of the first, and those of the second that are others.

    These are called ``"second …"``; where a result is itself of two models, ``"subtracted …"``.
    """
    which = "second"
    if any(name.startswith("second ") for name in (*first, *second)):
        which = "subtracted"
    differing = {f"{which} {name}": value for name, value in second.items() if first.get(name) != value}
    return {**first, **differing}


def refuse_ranked(first: str, second: str, *tokens: Any) -> None:
    """Refuse to subtract results of tokens that are named by their rank, which each prompt and model has its own of.

    Args:
        first, second: what either explains, in words.
        tokens: targets and foils of either, as they were named, where words may say less.

    Raises:
        InvalidInputError: one of them is of such a token.
    """
    named = f"{first} {second} {tokens}"
    for token, words in RANKED.items():
        if words in named or repr(token) in named:
            raise InvalidInputError(
                f"a − b: each side of {first!r} and {second!r} may have another {words.removeprefix('the ')}, so that "
                "the two numbers are not of the same tokens. Name the token, such as ' Rome', on both sides; or ask "
                "about tlens.difference(a, b)."
            )


def mean_queries(real: Bool[Tensor, "batch query"]) -> dict[str, Any]:
    """The queries of a mean over prompts: each is called by how many prompts have it."""
    counts: list[int] = real.sum(0).tolist()
    return {
        "queries": torch.arange(len(counts), device=real.device)[None],
        "mask": real.any(0)[None],
        "tokens": [[f"mean of {prompts_in_words(count)}" for count in counts]],
    }


def mean_words(real: Bool[Tensor, "batch query"]) -> str:
    """Over how many prompts a mean is, where some prompts lack a query: ``"mean of 2 to 8 prompts"``."""
    counts: list[int] = real.sum(0).tolist()
    counts = [count for count in counts if count] or [0]
    if min(counts) == max(counts):
        return f"mean of {prompts_in_words(counts[0])}"
    return f"mean of {min(counts)} to {prompts_in_words(max(counts))}"


def prompts_in_words(count: int) -> str:
    """``"1 prompt"``, ``"2 prompts"`` and so on."""
    if count == 1:
        return "1 prompt"
    return f"{count} prompts"


def mean_of(values: Float[Tensor, "batch query *term"], real: Bool[Tensor, "batch query"]) -> Tensor:
    """The mean over prompts, padding left out, as of one prompt."""
    further = (1,) * (values.ndim - 2)
    counts = real.sum(0).clamp_min(1).reshape(-1, *further)
    return ((values * real.reshape(*real.shape, *further)).sum(0) / counts)[None]
