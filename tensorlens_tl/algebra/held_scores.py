"""What one layer's pattern is recomputed from: queries, keys, and what each row sums to."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import refuse_autocast, upcast
from tensorlens_tl.algebra.recomputed import RecomputedAttention


def grouped_products(
    queries: Float[Tensor, "batch head query d_head"], keys: Float[Tensor, "batch kv key d_head"]
) -> Float[Tensor, "batch head query key"]:
    """q·kᵀ for every query head; each key head serves as many consecutive query heads as any other."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    return (grouped @ keys[:, :, None].mT).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class HeldScores:
    """What one layer's pattern is recomputed from; a `PatternRows`.

    Attributes:
        queries, keys: after norms and rotation, `[batch, head, pos, d_head]` and `[batch, kv, pos, d_head]`.
        sums: what each row of the pattern sums to, `[batch, head, pos]`.
        real: True at real tokens; others have no weight.
        scale, soft_cap: as of `ScoreReading`.
        slopes: of ALiBi by head, what is added for each position that a key lies before its query; None without.
        back, ahead: how far before and after its query a key may lie; None for any distance.
        device: where patterns are made.
        error: the largest relative error of a row, measured when it was proved.
    """

    queries: Float[Tensor, "batch head pos d_head"]
    keys: Float[Tensor, "batch kv pos d_head"]
    sums: Float[Tensor, "batch head pos"]
    real: Bool[Tensor, "batch pos"]
    scale: float
    soft_cap: float | None
    slopes: Float[Tensor, "head"] | None
    back: int | None
    ahead: int | None
    device: torch.device
    error: float = float("inf")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Prompts, heads, positions."""
        batch, heads, pos, _ = self.queries.shape
        return batch, heads, pos

    def rows(
        self, positions: Int[Tensor, "batch query"], dtype: torch.dtype
    ) -> Float[Tensor, "batch head query reached"]:
        """The pattern's rows of some queries, up to the last key that any of them can reach."""
        refuse_autocast(self.device)
        at = positions.to(self.queries.device)
        pos = self.shape[-1]
        reached = pos if self.ahead is None or not at.numel() else min(pos, int(at.max()) + 1 + self.ahead)
        q = torch.take_along_dim(self.queries, at[:, None, :, None], dim=2).to(self.device)
        k = self.keys[:, :, :reached].to(self.device)
        scores = grouped_products(q, k).mul_(self.scale)
        if self.soft_cap is not None:
            scores = scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        distance = (at[:, :, None] - torch.arange(reached, device=at.device)).to(self.device)[:, None]
        if self.slopes is not None:
            scores += self.slopes[:, None, None].to(scores) * distance.clamp_min(0)
        shut = ~self.real[:, None, None, :reached].to(self.device)
        if self.ahead is not None:
            shut = shut | (distance < -self.ahead)
        if self.back is not None:
            shut = shut | (distance > self.back)
        pattern = torch.softmax(upcast(scores.masked_fill_(shut, -torch.inf)), dim=-1)
        pattern = pattern.masked_fill_(shut.all(-1, keepdim=True), 0.0)  # a softmax over no key
        sums = torch.take_along_dim(self.sums, at[:, None], dim=2).to(pattern)
        return pattern.mul_(sums[..., None]).to(dtype)

    def on(self, device: torch.device) -> "HeldScores":
        """The same, with patterns made on another device; what they are made from is moved a few rows at a time."""
        return self if device == self.device else replace(self, device=device)

    def of_head(self, head: int) -> "HeldScores":
        """The same for one head."""
        kv = head // (self.shape[1] // self.keys.shape[1])
        only = slice(head, head + 1)
        return replace(
            self,
            queries=self.queries[:, only],
            keys=self.keys[:, kv : kv + 1],
            sums=self.sums[:, only],
            slopes=None if self.slopes is None else self.slopes[only],
        )

    def cut(self, length: int) -> "HeldScores":
        """Of the first tokens of a causal pass."""
        cut = {name: getattr(self, name)[:, :, :length] for name in ("queries", "keys", "sums")}
        return replace(self, **cut, real=self.real[:, :length])

    def attention(self, dtype: torch.dtype, heads: Tensor | None = None) -> RecomputedAttention:
        """Attention by the pattern, which is made a few queries at a time."""
        return RecomputedAttention(self, self.keys.shape[1], dtype, heads)
