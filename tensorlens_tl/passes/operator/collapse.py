"""Scores of source tokens, with everything needed to check them."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.probes import chi_square_quantile
from tensorlens_tl.errors import InvalidInputError


@dataclass(frozen=True, repr=False)
class Collapse:
    """Scores of source tokens for a query, `[batch, query, key]`.

    Where `total` is given, ``scores.sum(-1) + bias == total`` up to `gap`, which is
    abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)).

    Attributes:
        scores: `[batch, query, key]`.
        bias: what no source token explains, `[batch, query]`; None where the collapse is not additive.
        total: the model's own number that is explained, `[batch, query]`.
        gap: how far the sum is from it, `[batch, query]`.
        stderr: standard error of estimated scores, `[batch, query, key]`.
        freedom: degrees of freedom of their squares, infinite where exact; `interval` uses them.
        soft_cap: the cap that the model applies to its logits after this total (a target's), or None.
        probes: how many random rows each query's estimate took; None for exact scores.
    """

    scores: Float[Tensor, "batch query key"]
    bias: Float[Tensor, "batch query"] | None = None
    total: Float[Tensor, "batch query"] | None = None
    gap: Float[Tensor, "batch query"] | None = None
    stderr: Float[Tensor, "batch query key"] | None = None
    freedom: Float[Tensor, "batch query key"] | None = None
    soft_cap: float | None = None
    probes: int | None = None

    def __repr__(self) -> str:
        batch, query, key = self.scores.shape
        gap = "" if self.gap is None else f", gap={float(self.gap.max()):.1e}"
        return f"Collapse(batch={batch}, query={query}, key={key}{gap})"

    def interval(self, level: Any = 0.95) -> tuple[Tensor, Tensor]:
        """Where the true score lies with this confidence; the score itself if exact.

        The mean of the squares is taken to be distributed as a χ² of `freedom` degrees (Satterthwaite). At a level of
        0.95 it covers 91 to 99 % from 4 probes on, at any effective rank of the block; with 2 probes it covers
        as little as 80 % where that is above one.

        Returns:
            Lower and upper ends, `[batch, query, key]` each.

        Raises:
            InvalidInputError: a level outside (0, 1).

        >>> norms = frozen.operator().norm(probes=64)
        >>> low, high = norms.interval()
        >>> bool((low <= norms.scores).all() and (norms.scores <= high).all())
        True
        """
        if not 0 < level < 1:
            raise InvalidInputError(f"level={level!r}: pass a confidence between 0 and 1.")
        if self.freedom is None:
            return self.scores, self.scores
        return self._end((1 + level) / 2), self._end((1 - level) / 2)

    def _end(self, level: float) -> Tensor:
        assert self.freedom is not None
        estimated = torch.isfinite(self.freedom)
        freedom = torch.where(estimated, self.freedom, 1.0).double()
        factor = (freedom / chi_square_quantile(freedom, level)).sqrt()
        return self.scores * torch.where(estimated, factor, 1.0).to(self.scores)
