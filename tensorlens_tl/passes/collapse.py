"""Scores of source tokens, with everything needed to check them."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError


@dataclass(frozen=True, repr=False)
class Collapse:
    """Scores of source tokens for a query, `[batch, query, key]`.

    Where `total` is given, ``scores.sum(-1) + bias == total`` up to `residual`, which is
    abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)).

    Attributes:
        scores: `[batch, query, key]`.
        bias: what no source token explains, `[batch, query]`; None where the collapse is not additive.
        total: the model's own number that is explained, `[batch, query]`.
        residual: how far the sum is from it, `[batch, query]`.
        stderr: standard error of estimated scores, `[batch, query, key]`.
        soft_cap: the cap that the model applies to its logits after this total (a target's), or None.
        probes: how many random rows each query's estimate took; None for exact scores.
    """

    scores: Float[Tensor, "batch query key"]
    bias: Float[Tensor, "batch query"] | None = None
    total: Float[Tensor, "batch query"] | None = None
    residual: Float[Tensor, "batch query"] | None = None
    stderr: Float[Tensor, "batch query key"] | None = None
    soft_cap: float | None = None
    probes: int | None = None

    def __repr__(self) -> str:
        batch, query, key = self.scores.shape
        residual = "" if self.residual is None else f", residual={float(self.residual.max()):.1e}"
        return f"Collapse(batch={batch}, query={query}, key={key}{residual})"

    def interval(self, level: Any = 0.95) -> tuple[Tensor, Tensor]:
        """Where the true score lies with this confidence, by the normal approximation; the score itself if exact.

        Returns:
            Lower and upper ends, `[batch, query, key]` each.

        Raises:
            InvalidInputError: a level outside (0, 1).
        """
        if not 0 < level < 1:
            raise InvalidInputError(f"level={level!r}: pass a confidence between 0 and 1.")
        width = 0.0 if self.stderr is None else NormalDist().inv_cdf((1 + level) / 2) * self.stderr
        return self.scores - width, self.scores + width
