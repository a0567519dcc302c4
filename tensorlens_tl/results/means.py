"""Terms of two results one less the other, and the mean of terms over prompts."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.operator import RANKED
from tensorlens_tl.results.entry import both_provenances
from tensorlens_tl.results.statistics import bootstrap_interval


@runtime_checkable
class _Parts(Protocol):
    """What is read of terms; see `Terms` for each of them."""

    @property
    def names(self) -> list[str]: ...

    @property
    def scores(self) -> Float[Tensor, "batch query term"]: ...

    @property
    def total(self) -> Float[Tensor, "batch query"]: ...

    @property
    def remainder(self) -> Float[Tensor, "batch query"] | None: ...

    @property
    def keys(self) -> Float[Tensor, "batch query term key"] | None: ...

    @property
    def queries(self) -> Int[Tensor, "batch query"]: ...

    @property
    def mask(self) -> Bool[Tensor, "batch pos"]: ...

    @property
    def tokens(self) -> list[list[str]]: ...

    @property
    def target(self) -> str: ...

    @property
    def soft_cap(self) -> float | None: ...

    @property
    def provenance(self) -> dict[str, str]: ...


def less(first: _Parts, second: _Parts) -> dict[str, Any]:
    """The fields of a result's terms less those of another; a part that one of them lacks is zero there.

    Raises:
        InvalidInputError: other prompts or queries, or parts of different kinds.
    """
    for name, left, right in (
        ("number of prompts", len(first.queries), len(second.queries)),
        ("number of tokens", _lengths(first), _lengths(second)),
        ("queries", first.queries.tolist(), second.queries.tolist()),
    ):
        if left != right:
            raise InvalidInputError(f"difference: the two differ in {name}; subtract terms of the same positions.")
    if not set(first.names) & set(second.names):
        raise InvalidInputError(
            f"difference: no part has the same name ({first.names[0]!r} …, {second.names[0]!r} …); ask for both by= "
            "the same kind of part."
        )
    refuse_ranked(first.target, second.target)
    names = list(dict.fromkeys([*first.names, *second.names]))
    remainder = None
    if first.remainder is not None and second.remainder is not None:
        remainder = first.remainder - second.remainder
    keys = None
    if first.keys is not None and second.keys is not None and first.names == second.names:
        keys = first.keys - second.keys
    soft_cap = first.soft_cap
    if first.soft_cap != second.soft_cap:
        soft_cap = None
    return {
        "names": names,
        "scores": _aligned(first, names) - _aligned(second, names),
        "total": first.total - second.total,
        "remainder": remainder,
        "keys": keys,
        "queries": first.queries,
        "mask": first.mask,
        "tokens": first.tokens,
        "target": f"{first.target} − {second.target}",
        "soft_cap": soft_cap,
        "provenance": both_provenances(first.provenance, second.provenance),
    }


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


def mean_over_prompts(terms: _Parts, level: int | float) -> dict[str, Any]:
    """The fields of the mean over prompts, as of one prompt, with an interval for each part.

    Raises:
        InvalidInputError: a level outside (0, 1).
    """
    real = torch.take_along_dim(terms.mask, terms.queries, dim=1)
    low, high = intervals(terms.scores, real, level)
    return {
        "names": terms.names,
        "scores": mean_of(terms.scores, real),
        "low": low,
        "high": high,
        "total": mean_of(terms.total, real),
        "remainder": None if terms.remainder is None else mean_of(terms.remainder, real),
        "counts": real.sum(0)[None],
        "target": f"{terms.target}, {mean_words(real)}",
        "soft_cap": terms.soft_cap,
        "provenance": terms.provenance,
        **mean_queries(real),
    }


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


def intervals(
    scores: Float[Tensor, "batch query term"], real: Bool[Tensor, "batch query"], level: int | float
) -> tuple[Float[Tensor, "1 query term"], Float[Tensor, "1 query term"]]:
    """The ends of a bootstrap interval over prompts for the mean of each part; NaN of fewer than two prompts.

    Raises:
        InvalidInputError: a level outside (0, 1).
    """
    if not isinstance(level, int | float) or not 0 < level < 1:
        raise InvalidInputError(f"level={level!r}: pass a confidence between 0 and 1.")
    known = torch.where(real[..., None], scores.detach().double(), torch.nan).cpu()
    low, high = bootstrap_interval(known.movedim(0, -1), level)
    return low[None], high[None]


def _aligned(terms: _Parts, names: Sequence[str]) -> Float[Tensor, "batch query term"]:
    """Scores of these names, zero of those that the terms lack."""
    columns = {name: column for column, name in enumerate(names)}
    scores = terms.scores.new_zeros(*terms.scores.shape[:2], len(names))
    scores[..., [columns[name] for name in terms.names]] = terms.scores
    return scores


def _lengths(terms: _Parts) -> list[int]:
    """How many tokens each prompt has."""
    return terms.mask.sum(1).tolist()
