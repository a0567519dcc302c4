"""An attention score as a sum over pairs of sources, one in the query and one in the key."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.drawing import figure, graphs, matrix, page, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.results.entry import Entry, check_batch, largest, with_others, with_style
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.views import array

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ScoreAttribution(Result):
    """An attention score as a sum over pairs of sources: tokens, components or heads. See `circuits.qk_attribution`.

    ``pairs + query_sources + key_sources + bias``, all summed, are `total` up to `gap`.

    Attributes:
        names: what the sources are, one list per prompt: tokens, or components of the model.
        pairs: `[batch, source_q, source_k]`: source a in the query with source b in the key.
        query_sources: sources of the query with the key's bias, `[batch, source_q]`.
        key_sources: sources of the key with the query's bias, `[batch, source_k]`.
        bias: the two biases' own product, `[batch]`.
        total: the score before soft cap and mask, ALiBi left out, computed from the captured stream, `[batch]`.
        by: ``"token"``, ``"component"`` or ``"head"``.
        alibi: what ALiBi adds to it, or None.
        soft_cap: the cap the model puts on the score, or None.
        rotary: whether queries and keys are rotated (the distance is in the pairs then).
        reading_error: how far the softmax of all the layer's scores, so read, is from its own pattern.
    """

    TENSORS: ClassVar = ("pairs", "query_sources", "key_sources", "bias", "total", "alibi")
    FACTS: ClassVar = ("names", "by", "soft_cap", "rotary", "reading_error")

    names: list[list[str]]
    pairs: Float[Tensor, "batch source_q source_k"]
    query_sources: Float[Tensor, "batch source_q"]
    key_sources: Float[Tensor, "batch source_k"]
    bias: Float[Tensor, "batch"]
    total: Float[Tensor, "batch"]
    by: str
    rotary: bool
    reading_error: float
    alibi: Float[Tensor, "batch"] | None = None
    soft_cap: float | None = None

    def __repr__(self) -> str:
        total = ", ".join(f"{total:.4g}" for total in self.total.tolist())
        gap = f"{float(self.gap.max()):.1e}"
        return f"ScoreAttribution(by={self.by!r}, total={total}, gap={gap}, reading={self.reading_error:.1e})"

    @property
    def gap(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum is from holding."""
        parts = torch.cat([self.pairs.flatten(1), self.query_sources, self.key_sources], dim=1)
        return relative_gap(parts, self.bias, self.total)

    def _label(self, batch: int, source: int) -> str:
        name = self.names[batch][source]
        if self.by == "token":
            return f"{source} {name}"
        return name

    def top(self, k: int = 10, batch: int = 0) -> list[Entry]:
        """The k pairs of largest absolute score; positions are those of the two tokens, query first.

        Raises:
            InvalidInputError: k below 1.

        >>> pairs = tlens.circuits.qk_attribution(frozen, 1, 0, key=2)
        >>> len(pairs.top(3))
        3
        """
        check_batch(batch, self.names)
        pairs = self.pairs[batch]
        sources = [divmod(number, pairs.shape[1]) for number in range(pairs.numel())]
        names = [f"{self._label(batch, i)} × {self._label(batch, j)}" for i, j in sources]
        positions = None
        if self.by == "token":
            positions = sources
        return largest(pairs.flatten(), names, k, positions)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per pair: batch, query_source, key_source, score."""
        import pandas as pd

        batch, query, key = np.indices(self.pairs.shape).reshape(3, -1).tolist()
        frame = pd.DataFrame({"batch": batch})
        frame["query_source"] = [self._label(b, i) for b, i in zip(batch, query, strict=True)]
        frame["key_source"] = [self._label(b, j) for b, j in zip(batch, key, strict=True)]
        frame["score"] = self.pairs.detach().double().cpu().reshape(-1).numpy()
        return frame

    def _sums(self, batch: int) -> list[tuple[str, float]]:
        """What the pairs leave out, and the total."""
        return [
            ("with the key's bias", float(self.query_sources[batch].double().sum())),
            ("with the query's bias", float(self.key_sources[batch].double().sum())),
            ("both biases", float(self.bias[batch])),
            ("total", float(self.total[batch])),
        ]

    @property
    def heading(self) -> str:
        """The title of its page."""
        return "Attention score by source in the query and in the key"

    def _square(self, batch: int) -> tuple[list[str], np.ndarray]:
        """Labels of the sources, and their pairs `[source_q, source_k]`."""
        check_batch(batch, self.names)
        labels = [self._label(batch, source) for source in range(len(self.names[batch]))]
        return labels, array(self.pairs[batch])

    def to_html(self, batch: int = 0, *, style: bool = True) -> str:
        """A matrix, a row per source of the query and a column per source of the key; what they leave out below."""
        labels, values = self._square(batch)
        square = matrix.matrix(labels, labels, values, label=self.heading, corner="in the query ↓ in the key →")
        notes = f"sums to the score to {float(self.gap[batch]):.1e}"
        sums = graphs.bars([], [("all pairs", float(values.sum())), *self._sums(batch)])
        return with_style(page.panel(self.heading, square, sums, notes=notes), style)

    def plot(self, batch: int = 0, *, ax: Any = None) -> Any:
        """A matplotlib heat map of the pairs (install ``tensorlens-tl[plot]``); returns the axes.

        Args:
            batch: the prompt.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: no such prompt.
            ImportError: matplotlib is not installed.
        """
        labels, values = self._square(batch)
        names = ("source in the query", "source in the key")
        return figure.heat_map(values, labels, labels, self.heading, ax, names=names)

    def show(self, k: int = 10, batch: int = 0) -> None:
        """Display the matrix in a notebook; elsewhere print the k largest pairs and what they leave out.

        Args:
            k, batch: as in `top`.
        """
        if page.display_in_notebook(lambda: self.to_html(batch)):
            return
        pairs = self.pairs[batch].double()
        lines = with_others(self.top(k, batch), float(pairs.sum()), pairs.numel())
        sums = self._sums(batch)
        rows, below = ([(name, number(score)) for name, score in part] for part in (lines, sums))
        terminal.show_table("attention score", ("query source × key source", "score"), rows, below)
