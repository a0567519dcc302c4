"""An attention score as a sum over pairs of sources, one in the query and one in the key; its change over sources."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.drawing import figure, graphs, matrix, page, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.results.entry import (
    Entry,
    check_batch,
    largest,
    provenance_note,
    shown_prompt,
    with_others,
    with_style,
)
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.views import array

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ScoreAttribution(Result):
    """An attention score as a sum over pairs of sources: tokens, components or heads. See `circuits.qk_attribution`.

    ``pairs + query_sources + key_sources + bias + relative``, all summed, are `total` up to `gap`.

    Attributes:
        names: what the sources are, one list per prompt: tokens, or components of the model.
        pairs: `[batch, source_q, source_k]`: source a in the query with source b in the key.
        query_sources: sources of the query with the key's bias, `[batch, source_q]`.
        key_sources: sources of the key with the query's bias, `[batch, source_k]`.
        bias: the two biases' own product, `[batch]`.
        total: the score before soft cap and mask, ALiBi left out, computed from the captured stream, `[batch]`.
        by: ``"token"``, ``"component"`` or ``"head"``.
        alibi: what ALiBi adds to it, or None.
        relative: what T5's relative positions add, a part of the total, or None.
        soft_cap: the cap the model puts on the score, or None.
        rotary: whether queries and keys are rotated (the distance is in the pairs then).
        reading_error: how far the softmax of all the layer's scores, so read, is from its own pattern.
        places: head, query and key of each prompt, in words.
        provenance: what they depend on besides the prompts, as of `Attribution`.
    """

    TENSORS: ClassVar = ("pairs", "query_sources", "key_sources", "bias", "total", "alibi", "relative")
    FACTS: ClassVar = ("names", "by", "soft_cap", "rotary", "reading_error", "places")
    LATER_FACTS: ClassVar = ("provenance",)

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
    relative: Float[Tensor, "batch"] | None = None
    soft_cap: float | None = None
    places: Sequence[str] = ()
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    def __repr__(self) -> str:
        total = ", ".join(f"{total:.4g}" for total in self.total.tolist())
        gap = f"{float(self.gap.max()):.1e}"
        return f"ScoreAttribution(by={self.by!r}, total={total}, gap={gap}, reading={self.reading_error:.1e})"

    @property
    def gap(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum is from holding."""
        parts = [self.pairs.flatten(1), self.query_sources, self.key_sources]
        if self.relative is not None:
            parts.append(self.relative[:, None].to(self.pairs))
        return relative_gap(torch.cat(parts, dim=1), self.bias, self.total)

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
        sums = [
            ("with the key's bias", float(self.query_sources[batch].double().sum())),
            ("with the query's bias", float(self.key_sources[batch].double().sum())),
            ("both biases", float(self.bias[batch])),
        ]
        if self.relative is not None:
            sums.append(("relative positions", float(self.relative[batch])))
        return [*sums, ("total", float(self.total[batch]))]

    @property
    def heading(self) -> str:
        """The title of its page."""
        return self._title(0)

    def _title(self, batch: int) -> str:
        return _title("Attention score by source in the query and in the key", self.places, batch, len(self.names))

    def _square(self, batch: int) -> tuple[list[str], np.ndarray]:
        """Labels of the sources, and their pairs `[source_q, source_k]`."""
        check_batch(batch, self.names)
        labels = [self._label(batch, source) for source in range(len(self.names[batch]))]
        return labels, array(self.pairs[batch])

    def to_html(self, batch: int = 0, *, style: bool = True) -> str:
        """A matrix, a row per source of the query and a column per source of the key; what they leave out below."""
        labels, values = self._square(batch)
        square = matrix.matrix(labels, labels, values, label=self._title(batch), corner="in the query ↓ in the key →")
        facts = [f"sums to the score to {float(self.gap[batch]):.1e}", provenance_note(self.provenance)]
        notes = " · ".join(filter(None, facts))
        sums = graphs.bars([], [("all pairs", float(values.sum())), *self._sums(batch)])
        return with_style(page.panel(self._title(batch), square, sums, notes=notes), style)

    def plot(self, batch: int = 0, *, ax: Any = None) -> Any:
        """A matplotlib heat map of the pairs (extra ``plot``); returns the axes.

        Args:
            batch: the prompt.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: no such prompt.
            ImportError: matplotlib is not installed.
        """
        labels, values = self._square(batch)
        rows = _last(np.asarray(values.any(1)))  # what stands behind the query, or the key, gives nothing
        columns = _last(np.asarray(values.any(0)))
        names = ("source in the query", "source in the key")
        drawn = values[:rows, :columns]
        return figure.heat_map(drawn, labels[:rows], labels[:columns], self._title(batch), ax, names=names)

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
        terminal.show_table(self._title(batch), ("query source × key source", "score"), rows, below)


def _title(what: str, places: Sequence[str], batch: int, prompts: int) -> str:
    """What is shown, at which head, query and key, and of which prompt where there are several."""
    batch %= prompts
    return " · ".join(filter(None, [what, *places[batch : batch + 1], shown_prompt(batch, prompts)]))


def _last(used: np.ndarray) -> int:
    """How many there are up to the last one that is used; all where none is."""
    return int(max(np.flatnonzero(used), default=len(used) - 1)) + 1


@dataclass(frozen=True, eq=False)
class ScoreChange(Result):
    """The change of an attention score, or of one entry of the pattern, between two runs as a sum over sources.

    See `circuits.qk_attribution`. ``query_sources + key_sources + constants``, all summed, are `total` up to `gap`.

    Attributes:
        names: what the sources are, one list per prompt: tokens, or components of the model.
        query_sources: what each source gives by the query, `[batch, source]`.
        key_sources: what each gives by keys, of an entry of the pattern by all keys of its row, `[batch, source]`.
        constant_names: what is no source's: what changed weights of two models, a changed routing and sinks add.
        constants: the same, `[batch, constant]`.
        total: the change of the models' own number, `[batch]`; of a score before a soft cap and ALiBi.
        by: ``"token"``, ``"component"`` or ``"head"``.
        of: ``"score"`` or ``"pattern"``.
        reading_error: how far the softmax of the layer's scores is from its own patterns.
        places: head, query and key of each prompt, in words.
        provenance: what they depend on besides the prompts, as of `Attribution`.
    """

    TENSORS: ClassVar = ("query_sources", "key_sources", "constants", "total")
    FACTS: ClassVar = ("names", "constant_names", "by", "of", "reading_error", "places")
    LATER_FACTS: ClassVar = ("provenance",)

    names: list[list[str]]
    query_sources: Float[Tensor, "batch source"]
    key_sources: Float[Tensor, "batch source"]
    constant_names: list[str]
    constants: Float[Tensor, "batch constant"]
    total: Float[Tensor, "batch"]
    by: str
    of: str
    reading_error: float
    places: Sequence[str] = ()
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    def __repr__(self) -> str:
        total = ", ".join(f"{total:.4g}" for total in self.total.tolist())
        gap = f"{float(self.gap.max()):.1e}"
        facts = f"of={self.of!r}, by={self.by!r}, total={total}, gap={gap}, reading={self.reading_error:.1e}"
        return f"ScoreChange({facts})"

    @property
    def gap(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum is from holding."""
        parts = torch.cat([self.query_sources, self.key_sources, self.constants], dim=1)
        return relative_gap(parts, torch.zeros_like(self.total), self.total)

    @property
    def scores(self) -> Float[Tensor, "batch source"]:
        """What each source gives by query and keys together."""
        return self.query_sources + self.key_sources

    def _parts(self, batch: int) -> tuple[list[str], list[str], list[int | None], Float[Tensor, "part"]]:
        """Sides, labels, positions and scores of everything that sums to the total."""
        check_batch(batch, self.names)
        names = self.names[batch]
        places: list[int | None] = [None] * len(names)
        if self.by == "token":
            places = list(range(len(names)))
        labels = [name if place is None else f"{place} {name}" for place, name in zip(places, names, strict=True)]
        sides = ["query"] * len(names) + ["key"] * len(names) + [""] * len(self.constant_names)
        scores = torch.cat([self.query_sources[batch], self.key_sources[batch], self.constants[batch]])
        none: list[int | None] = [None] * len(self.constant_names)
        return sides, [*labels, *labels, *self.constant_names], [*places, *places, *none], scores

    def top(self, k: int = 10, batch: int = 0) -> list[Entry]:
        """The k parts of largest absolute score: ``"query: L0H3"``, ``"key: 5 the"``, or a constant.

        Raises:
            InvalidInputError: k below 1.

        >>> other = tlens.freeze(model, text.replace("red", "blue"))
        >>> change = tlens.circuits.qk_attribution(tlens.difference(frozen, other), 1, 0, key=2)
        >>> len(change.top(3))
        3
        """
        sides, labels, places, scores = self._parts(batch)
        named = [f"{side}: {label}" if side else label for side, label in zip(sides, labels, strict=True)]
        return largest(scores, named, k, places)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per part: batch, side (query, key, or empty of a constant), source, score."""
        import pandas as pd

        frames: list[pd.DataFrame] = []
        for batch in range(len(self.names)):
            sides, labels, _, scores = self._parts(batch)
            values = scores.detach().double().cpu().numpy()
            frames.append(pd.DataFrame({"batch": batch, "side": sides, "source": labels, "score": values}))
        return pd.concat(frames, ignore_index=True)

    @property
    def heading(self) -> str:
        """The title of its page."""
        return self._title(0)

    def _title(self, batch: int) -> str:
        what = {"score": "Change of an attention score", "pattern": "Change of an entry of the pattern"}[self.of]
        return _title(what, self.places, batch, len(self.names))

    def _lines(self, k: int, batch: int) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        """The k largest parts with all others in one line, and the total."""
        scores = self._parts(batch)[-1].double()
        entries = [entry for entry in self.top(k, batch) if entry.score]  # what is the same in both runs is no line
        lines = with_others(entries, float(scores.sum()), len(scores))
        return lines, [("total", float(self.total[batch]))]

    def to_html(self, k: int = 15, batch: int = 0, *, style: bool = True) -> str:
        """The k largest parts as bars around zero; all others, and the total, below."""
        lines, sums = self._lines(k, batch)
        facts = [f"sums to the change to {float(self.gap[batch]):.1e}", provenance_note(self.provenance)]
        notes = " · ".join(filter(None, facts))
        return with_style(page.panel(self._title(batch), graphs.bars(lines, sums), notes=notes), style)

    def plot(self, k: int = 15, batch: int = 0, *, ax: Any = None) -> Any:
        """The k largest parts as matplotlib bars (extra ``plot``); returns the axes.

        Args:
            k, batch: as in `top`.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: k below 1, or no such prompt.
            ImportError: matplotlib is not installed.
        """
        lines, sums = self._lines(k, batch)
        return figure.signed_bars(lines, self._title(batch), ax, sums=sums)

    def show(self, k: int = 10, batch: int = 0) -> None:
        """Display the bars in a notebook; elsewhere print the k largest parts, all others in one line, and the total.

        Args:
            k, batch: as in `top`.
        """
        if page.display_in_notebook(lambda: self.to_html(k, batch)):
            return
        rows, below = ([(name, number(score)) for name, score in part] for part in self._lines(k, batch))
        terminal.show_table(self._title(batch), ("source", "score"), rows, below)
