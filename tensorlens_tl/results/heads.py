"""Results about attention: how much each head follows a known pattern, and attention scores split by source.

A score is a sum over pairs of sources, one in the query and one in the key; its change is a sum over sources.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.drawing import Axes, figure, graphs, matrix
from tensorlens_tl.drawing.marks import counted, note
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import check_batch, closing, shown_prompt, some_numbers
from tensorlens_tl.results.result import array
from tensorlens_tl.results.scores import Bars, Parts, Scored, long_table, no_part, provenance_of_both

if TYPE_CHECKING:
    import pandas as pd

Sources = TypeVar("Sources", bound="SourceScores")

SIDES = ("query", "key")
READABLE = 40
"""How many sources per side a matrix shows individually; more are grouped by layer."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(Scored):
    """A number from 0 to 1 for every head and prompt: mean attention over the relevant tokens.

    `top`, `show` and `plot` take `batch`; by default they show the mean over prompts.

    Attributes:
        scores: `[batch, layer, head]`; NaN for heads that a layer lacks and prompts without such a token.
        counts: how many tokens the mean is taken over, `[batch]`.
        target: what is attended to.
        provenance: model name, class, TransformerLens version, weight processing, dtype, user-installed hooks.
    """

    HEADING: ClassVar = "Attention {}"

    scores: Float[Tensor, "batch layer head"]
    counts: Int[Tensor, "batch"]
    target: str
    provenance: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        prompts, layers, heads = self.scores.shape
        best = self.top(1)[0]
        sizes = f"{counted(prompts, 'prompt')}, {layers} × {heads} heads"
        return f"HeadScores({self.target!r}, {sizes}, {best.name}={best.score:.3f})"

    def __getitem__(self, name: str) -> Float[Tensor, "batch"]:
        """Return one head's number for every prompt: ``scores["L3H1"]``.

        Raises:
            InvalidInputError: unknown head.
        """
        names = self._parts().names
        if name not in names:
            raise no_part(name, names)
        layer, head = map(int, name[1:].split("H"))
        return self.scores[:, layer, head]

    def __sub__(self, other: "HeadScores") -> "HeadScores":
        """Subtract another kind of head, or another model, head by head, for the same prompts.

        Raises:
            InvalidInputError: the heads or prompts differ.
        """
        if not isinstance(other, HeadScores):
            return NotImplemented
        if self.scores.shape != other.scores.shape or not torch.equal(self.counts, other.counts):
            raise InvalidInputError(
                f"a − b: {list(self.scores.shape)} and {list(other.scores.shape)} prompts, layers and heads do not "
                "match, or the means are over other numbers of tokens; subtract scores of the same prompts."
            )
        target = self.target if self.target == other.target else f"{self.target} − {other.target}"
        changed = {"target": target, "provenance": provenance_of_both(self, other)}
        return replace(self, scores=self.scores - other.scores, **changed)

    def mean(self) -> "HeadScores":
        """Return the mean over prompts that have such tokens, as a result for one prompt."""
        return replace(self, scores=self.scores.nanmean(0)[None], counts=self.counts.sum()[None])

    def _parts(self, batch: int | None = None) -> Parts:
        """Return the existing heads, for one prompt or the mean over prompts."""
        scores = self._plane(batch)
        names = [f"L{layer}H{head}" for layer, head in scores.isfinite().nonzero().tolist()]
        return Parts(scores[scores.isfinite()], names)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per prompt and head: batch, layer, head, target, score."""
        axes = dict.fromkeys(self._axes()["scores"])
        return long_table(self, self.scores, axes, real=self.scores.isfinite().cpu(), target=self.target)

    def _plane(self, batch: int | None) -> Float[Tensor, "layer head"]:
        if batch is None:
            return self.scores.nanmean(0)
        check_batch(batch, list(self.scores))
        return self.scores[batch]

    def _cells(self, batch: int | None) -> dict[tuple[int, str], float]:
        """Return the scores of existing heads by layer and column."""
        plane = self._plane(batch)
        return {(layer, f"H{head}"): float(plane[layer, head]) for layer, head in plane.isfinite().nonzero().tolist()}

    def _title(self, batch: int | None) -> str:
        count = int(self.counts.sum()) if batch is None else int(self.counts[batch])
        tokens = f"mean over {count} tokens"
        if batch is not None:
            return f"{self.heading} · prompt {batch} · {tokens}"
        return f"{self.heading} · {tokens} of {counted(len(self.scores), 'prompt')}"

    def _html(self, k: int, batch: int | None = None) -> str:
        """Draw a row for each layer and a column for each head."""
        picture = matrix.head_grid(self._cells(batch), self.heading)
        return self._panel(picture, title=self._title(batch))

    def _figure(self, k: int, batch: int | None = None, *, ax: Any) -> Any:
        return self.plot_heads(batch, ax=ax)

    def plot_heads(self, batch: int | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw heads as a matplotlib heat map, a row per layer (extra ``plot``).

        Args:
            batch, ax: see `plot`.

        Raises:
            InvalidInputError: no such prompt.
            ImportError: matplotlib is not installed.

        >>> tlens.circuits.induction_scores(frozen).plot_heads()
        <Axes: ...>
        """
        return figure.head_map(self._cells(batch), self._title(batch), ax)

    def _bars(self, k: int, batch: int | None = None) -> Bars:
        lines = [(entry.name, entry.score) for entry in self.top(k, batch=batch)]
        return Bars(self._title(batch), lines, columns=("head", "score"))


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceScores(Scored):
    """Contributions of sources to an attention number; `top`, `show` and `plot` take `batch`, by default the first."""

    names: list[list[str]]
    total: Float[Tensor, "batch"]
    by: str
    reading_error: float
    places: Sequence[str] = ()
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    @property
    @abstractmethod
    def gap(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum misses the total."""

    @property
    @abstractmethod
    def target(self) -> str:
        """What is explained, in words."""

    @property
    @abstractmethod
    def sides(self) -> tuple[Float[Tensor, "batch source_q"], Float[Tensor, "batch source_k"]]:
        """Return each source's contribution in the query, and each one's in the key."""

    def by_layer(self: Sources) -> Sources:
        """Return the same sum with the sources of each layer merged, ``"L0"``; tokens stay separate.

        >>> tlens.circuits.qk_attribution(frozen, 1, 0, by="head").by_layer().names[0]
        ['embed', 'pos_embed', 'L0']
        """
        if self.by == "token":
            return self
        layers = [layer_of(name) for name in self.names[0]]
        names = list(dict.fromkeys(layers))
        members = torch.tensor([[layer == name for name in names] for layer in layers]).to(self.total)
        return replace(self, names=[names] * len(self.names), by="layer", **self._summed(members))

    @abstractmethod
    def _summed(self, members: Float[Tensor, "source group"]) -> dict[str, Tensor]:
        """Return its tensors with sources summed into groups."""

    def __repr__(self) -> str:
        of = f"of={self.of!r}, " if isinstance(self, ScoreChange) else ""
        totals = some_numbers(self.total, len(self.total))
        sums = f"total={totals}, gap={float(self.gap.max()):.1e}, reading={self.reading_error:.1e}"
        return f"{type(self).__name__}({of}by={self.by!r}, {sums})"

    @property
    def heading(self) -> str:
        """The title of its page."""
        return self._title(0)

    def _title(self, batch: int) -> str:
        """Say what is shown: head, query and key, and the prompt if there are several."""
        batch %= len(self.names)
        which = [*self.places[batch : batch + 1], shown_prompt(batch, len(self.names))]
        return " · ".join(filter(None, [self.target, *which]))

    def _labels(self, batch: int) -> list[str]:
        """Name the sources of a prompt: tokens with their positions, or parts of the model."""
        check_batch(batch, self.names)
        if self.by != "token":
            return self.names[batch]
        return [f"{position} {token}" for position, token in enumerate(self.names[batch])]

    def _exact(self, batch: int, what: str) -> str:
        """Say how exactly the parts sum."""
        return f"sums to the {what} to {float(self.gap[batch]):.1e}"


def layer_of(source: str) -> str:
    """Return the layer of a part of the model, ``"L3"`` for ``"L3H1"`` and ``"MLP3"``; otherwise its own name."""
    match = re.match(r"(?:L|MLP)(\d+)", source)
    return f"L{match[1]}" if match else source


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ScoreAttribution(SourceScores):
    """An attention score as a sum over pairs of sources, from `circuits.qk_attribution`.

    The sum of ``pairs + query_sources + key_sources + bias + relative`` equals `total` up to `gap`.

    Attributes:
        names: the sources, one list per prompt: tokens, components or heads.
        pairs: `[batch, source_q, source_k]`: source a in the query with source b in the key.
        query_sources: sources of the query with the key's bias, `[batch, source_q]`.
        key_sources: sources of the key with the query's bias, `[batch, source_k]`.
        bias: the product of the two biases, `[batch]`.
        total: the score before soft cap, mask and ALiBi, computed from the captured stream, `[batch]`.
        by: ``"token"``, ``"component"`` or ``"head"``.
        alibi: the amount that ALiBi adds, or None.
        relative: the amount that T5's relative positions add, which is part of the total, or None.
        soft_cap: the cap on the score, or None.
        rotary: whether queries and keys are rotated (the pairs then include the effect of distance).
        reading_error: how far the softmax of the layer's recomputed scores is from its actual pattern.
        places: a description of head, query and key for each prompt.
        provenance: as in `Attribution`.
    """

    pairs: Float[Tensor, "batch source_q source_k"]
    query_sources: Float[Tensor, "batch source_q"]
    key_sources: Float[Tensor, "batch source_k"]
    bias: Float[Tensor, "batch"]
    rotary: bool
    alibi: Float[Tensor, "batch"] | None = None
    relative: Float[Tensor, "batch"] | None = None
    soft_cap: float | None = None

    @property
    def target(self) -> str:
        """What is explained, in words."""
        return "Attention score by source in the query and in the key"

    @property
    def gap(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum misses the total."""
        parts = [self.pairs.flatten(1), self.query_sources, self.key_sources]
        if self.relative is not None:
            parts.append(self.relative[:, None].to(self.pairs))
        return relative_gap(torch.cat(parts, dim=1), self.bias, self.total)

    def _parts(self, batch: int | None = None) -> Parts:
        """Return a prompt's pairs (default: the first prompt); positions are those of both tokens, query first."""
        labels = self._labels(batch or 0)
        pairs = self.pairs[batch or 0]
        sources = [divmod(number, pairs.shape[1]) for number in range(pairs.numel())]
        names = [f"{labels[i]} × {labels[j]}" for i, j in sources]
        return Parts(pairs.flatten(), names, sources if self.by == "token" else None)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per pair: batch, query_source, key_source, score."""
        import pandas as pd

        labels = [self._labels(batch) for batch in range(len(self.names))]
        places = np.ndindex(*self.pairs.shape)
        lines = [(batch, labels[batch][query], labels[batch][key]) for batch, query, key in places]
        frame = pd.DataFrame(lines, columns=["batch", "query_source", "key_source"])
        return frame.assign(score=array(self.pairs).ravel())

    @property
    def sides(self) -> tuple[Float[Tensor, "batch source_q"], Float[Tensor, "batch source_k"]]:
        """Return each source's contribution in the query, with the whole key; and in the key, with the whole query.

        Either one, together with `alone`, sums to the total.
        """
        return self.pairs.sum(2) + self.query_sources, self.pairs.sum(1) + self.key_sources

    def alone(self, batch: int, side: str) -> dict[str, float]:
        """Return the parts that belong to no source of a side (``"query"`` or ``"key"``): bias, relative positions."""
        others = self.key_sources if side == "query" else self.query_sources
        parts = {f"the {side}'s bias": float(others[batch].double().sum() + self.bias[batch])}
        if self.relative is not None:
            parts["relative positions"] = float(self.relative[batch])
        return {name: part for name, part in parts.items() if part}

    def _summed(self, members: Float[Tensor, "source group"]) -> dict[str, Tensor]:
        sides = {"query_sources": self.query_sources @ members, "key_sources": self.key_sources @ members}
        return sides | {"pairs": torch.einsum("bij,ig,jh->bgh", self.pairs, members, members)}

    def _tables(self, k: int, batch: int) -> list[Bars]:
        """Return tables of each side's sources (by layer if they are parts of the model) and of the largest's parts."""
        layers = self.by_layer()
        labels = layers._labels(batch)
        total = ("total", float(self.total[batch]))
        tables: list[Bars] = []
        inside: list[Bars] = []
        for number, side in enumerate(SIDES):
            scores = layers.sides[number][batch]
            sums = [*self.alone(batch, side).items(), total]
            title = "" if number else self._title(batch)
            tables.append(_table(f"source in the {side}", closing(scores, labels, k), sums, title))
            best = int(scores.abs().argmax())
            of_best = [name == labels[best] for name in map(layer_of, self.names[batch])]
            whole = ("all of it", float(scores[best]))
            if self.by != "token" and sum(of_best) > 1:
                parts = self.sides[number][batch][torch.tensor(of_best)]
                names = [name for name, is_part in zip(self.names[batch], of_best, strict=True) if is_part]
                inside.append(_table(f"{labels[best]} in the {side}, by part", closing(parts, names, k), [whole]))
            if self.by == "token" and side == "query":
                bias = [("with the key's bias", float(self.query_sources[batch, best]))]
                sums = [*(one for one in bias if one[1]), whole]
                name = f"{labels[best]} in the query × source in the key"
                inside.append(_table(name, closing(self.pairs[batch, best], labels, k), sums))
        return tables + inside

    def _print(self, k: int, batch: int | None = None) -> None:
        for table in self._tables(k, batch or 0):
            table.print()

    def _drawn(self) -> "ScoreAttribution":
        """Return the result as a matrix shows it, grouped by layer if there are too many sources."""
        return self.by_layer() if len(self.names[0]) > READABLE else self

    def _html(self, k: int, batch: int | None = None) -> str:
        """Draw sums over the query's and the key's sources, and a matrix of both with a row per query source."""
        batch = batch or 0
        drawn = self._drawn()
        labels, values = drawn._labels(batch), array(drawn.pairs[batch])
        square = matrix.matrix(labels, labels, values, label=self._title(batch), corner="in the query ↓ in the key →")
        sums = [note(table.columns[0]) + graphs.bars(table.lines, table.sums) for table in self._tables(k, batch)]
        return self._panel(*sums, square, title=self._title(batch), notes=[self._exact(batch, "score")])

    def _figure(self, k: int, batch: int | None = None, *, ax: Any) -> Any:
        batch = batch or 0
        drawn = self._drawn()
        labels, values = drawn._labels(batch), array(drawn.pairs[batch])
        rows = _last(np.asarray(values.any(1)))  # tokens after the query or the key contribute nothing
        columns = _last(np.asarray(values.any(0)))
        names = ("source in the query", "source in the key")
        shown = values[:rows, :columns]
        return figure.heat_map(shown, labels[:rows], labels[:columns], self._title(batch), ax, names=names)


def _table(name: str, lines: list[tuple[str, float]], sums: list[tuple[str, float]], title: str = "") -> Bars:
    return Bars(title, lines, sums, columns=(name, "score"), left=False)


def _last(used: np.ndarray) -> int:
    """Return the number of entries up to the last used one; all if none is used."""
    return int(max(np.flatnonzero(used), default=len(used) - 1)) + 1


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ScoreChange(SourceScores):
    """The change of an attention score, or of a pattern entry, between two runs, from `circuits.qk_attribution`.

    The sum of ``query_sources + key_sources + constants`` equals `total` up to `gap`.

    Attributes:
        names: the sources, one list per prompt: tokens, components or heads.
        query_sources: each source's contribution through the query, `[batch, source]`.
        key_sources: each one's through the key (for a pattern entry, all keys of its row), `[batch, source]`.
        constant_names, constants: parts that belong to no source, `[batch, constant]`: changed weights, routing, sinks.
        total: the change of the models' own number, `[batch]`; for a score, before soft cap and ALiBi.
        by: ``"token"``, ``"component"`` or ``"head"``.
        of: ``"score"`` or ``"pattern"``.
        reading_error: how far the softmax of the layer's recomputed scores is from its actual patterns.
        places: a description of head, query and key for each prompt.
        provenance: as in `Attribution`.
    """

    query_sources: Float[Tensor, "batch source"]
    key_sources: Float[Tensor, "batch source"]
    constant_names: list[str]
    constants: Float[Tensor, "batch constant"]
    of: str

    @property
    def gap(self) -> Float[Tensor, "batch"]:
        """abs(Σ − total) / Σ abs: how far the sum misses the total."""
        parts = torch.cat([self.query_sources, self.key_sources, self.constants], dim=1)
        return relative_gap(parts, torch.zeros_like(self.total), self.total)

    @property
    def sides(self) -> tuple[Float[Tensor, "batch source"], Float[Tensor, "batch source"]]:
        """Return each source's contribution through the query, and through the key."""
        return self.query_sources, self.key_sources

    def _summed(self, members: Float[Tensor, "source group"]) -> dict[str, Tensor]:
        return {"query_sources": self.query_sources @ members, "key_sources": self.key_sources @ members}

    @property
    def scores(self) -> Float[Tensor, "batch source"]:
        """Each source's contribution through query and keys together."""
        return self.query_sources + self.key_sources

    def _sided(self, batch: int) -> tuple[list[str], list[str], list[int | None], Float[Tensor, "part"]]:
        """Return sides, labels, positions and scores of all parts of the total."""
        labels = self._labels(batch)
        places: list[int | None] = [None] * len(labels)
        if self.by == "token":
            places = list(range(len(labels)))
        sides = ["query"] * len(labels) + ["key"] * len(labels) + [""] * len(self.constant_names)
        scores = torch.cat([self.query_sources[batch], self.key_sources[batch], self.constants[batch]])
        none: list[int | None] = [None] * len(self.constant_names)
        return sides, [*labels, *labels, *self.constant_names], [*places, *places, *none], scores

    def _parts(self, batch: int | None = None) -> Parts:
        """Return the parts of a prompt (default: the first): ``"query: L0H3"``, ``"key: 5 the"``, and constants."""
        sides, labels, places, scores = self._sided(batch or 0)
        named = [f"{side}: {label}" if side else label for side, label in zip(sides, labels, strict=True)]
        return Parts(scores, named, places)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per part: batch, side (query, key, or empty for a constant), source, score."""
        import pandas as pd

        frames: list[pd.DataFrame] = []
        for batch in range(len(self.names)):
            sides, labels, _, scores = self._sided(batch)
            values = scores.detach().double().cpu().numpy()
            frames.append(pd.DataFrame({"batch": batch, "side": sides, "source": labels, "score": values}))
        return pd.concat(frames, ignore_index=True)

    @property
    def target(self) -> str:
        """What is explained, in words."""
        return {"score": "Change of an attention score", "pattern": "Change of an entry of the pattern"}[self.of]

    def _bars(self, k: int, batch: int | None = None) -> Bars:
        batch = batch or 0
        parts = self._parts(batch)
        lines = closing(parts.scores, parts.names, k)  # parts that are equal in both runs are omitted
        sums = [("total", float(self.total[batch]))]
        notes = [self._exact(batch, "change")]
        return Bars(self._title(batch), lines, sums, notes=notes, columns=("source", "score"), left=False)
