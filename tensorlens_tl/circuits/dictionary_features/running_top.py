"""The k largest examples of many features while a data set passes by: matrix operations, and memory that is bounded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

OCTAVE = 2
"""Bins of the histogram in a factor of two."""

LOWEST = -10
HIGHEST = 15
"""Powers of two that the histogram spans; what is beyond is counted in its first and last bin."""

BINS = OCTAVE * (HIGHEST - LOWEST)


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of features: rows of a data set, each at the token where the feature is largest in it.

    Attributes:
        peaks: the value there, `[feature, example]`.
        rows, positions: which row, and where in it; −1 for no example.
        activations: the values around it, `[feature, example, window]`, zero outside the row.
        tokens: the token ids there; −1 outside the row.
    """

    peaks: Float[Tensor, "feature example"]
    rows: Int[Tensor, "feature example"]
    positions: Int[Tensor, "feature example"]
    activations: Float[Tensor, "feature example window"]
    tokens: Int[Tensor, "feature example window"]

    @classmethod
    def none(cls, features: int, window: int, like: Tensor) -> "Examples":
        """No examples of so many features."""
        numbers = torch.empty(features, 0, dtype=torch.long, device=like.device)
        values = like.new_empty(features, 0)
        around = values.new_empty(features, 0, window)
        return cls(values, numbers, numbers, around, around.long())

    @classmethod
    def of(
        cls, values: Float[Tensor, "row pos feature"], tokens: Int[Tensor, "row pos"], rows: Int[Tensor, "row"],
        lengths: Int[Tensor, "row"], k: int, window: tuple[int, int],
    ) -> "Examples":  # fmt: skip
        """The largest of one batch: at most one example a row, of the k rows that are largest.

        Args:
            values: of every feature at every token, zero where it is not active.
            tokens: token ids.
            rows: the rows' numbers, rising.
            lengths: real tokens of each row.
            k: examples of a feature.
            window: tokens before and after.
        """
        sizes = values.abs()
        size = sizes.amax(dim=1)
        positions = (sizes == size[:, None]).int().argmax(dim=1)  # the first of several that are alike
        order = size.argsort(dim=0, descending=True, stable=True)[:k].T  # [feature, example]
        at = positions.T.gather(1, order)
        before, after = window
        columns = at[..., None] + torch.arange(-before, after + 1, device=at.device)
        inside = (columns >= 0) & (columns < lengths[order][..., None])
        columns = columns.clamp(0, values.shape[1] - 1)
        features = torch.arange(values.shape[2], device=at.device)[:, None]
        peaks = values[order, at, features]
        active = peaks != 0
        around = values[order[..., None], columns, features[..., None]] * inside * active[..., None]
        ids = tokens[order[..., None], columns].masked_fill(~inside | ~active[..., None], -1)
        return cls(peaks, rows[order].masked_fill(~active, -1), at.masked_fill(~active, -1), around, ids)

    @classmethod
    def of_features(cls, parts: Sequence["Examples"]) -> "Examples":
        """The examples of several groups of features, one group after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def merged(self, other: "Examples", k: int) -> "Examples":
        """The k largest of both; of examples that are alike, those of the earlier rows."""
        both = Examples(
            *(torch.cat([getattr(self, name), getattr(other, name)], dim=1) for name in self.__dataclass_fields__)
        )
        by_row = torch.where(both.rows < 0, torch.iinfo(torch.long).max, both.rows).argsort(dim=1, stable=True)
        sizes = both.peaks.abs().gather(1, by_row)
        order = by_row.gather(1, sizes.argsort(dim=1, descending=True, stable=True))[:, :k]
        wide = order[..., None].expand(-1, -1, both.tokens.shape[-1])
        return Examples(
            both.peaks.gather(1, order),
            both.rows.gather(1, order),
            both.positions.gather(1, order),
            both.activations.gather(1, wide),
            both.tokens.gather(1, wide),
        )


def histogram(
    values: Float[Tensor, "active"], columns: Int[Tensor, "active"], features: int
) -> Int[Tensor, "feature bin"]:
    """How many values of each feature lie in each bin, by size: half octaves from 2**LOWEST to 2**HIGHEST."""
    bins = (OCTAVE * (values.double().abs().log2() - LOWEST)).floor().clamp(0, BINS - 1).long()
    return (columns * BINS + bins).bincount(minlength=features * BINS).reshape(features, BINS)
