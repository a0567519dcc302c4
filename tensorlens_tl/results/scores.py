"""Results made of named, scored parts: listing the largest, averaging over prompts, and subtracting results."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import nearest, whole_number
from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.drawing import figure, graphs, terminal
from tensorlens_tl.drawing.marks import counted, number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.target import RANKED
from tensorlens_tl.passes.texts import find_real
from tensorlens_tl.results.entry import Entry, check_batch, largest, shown_prompt
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

Kind = TypeVar("Kind", bound="QueryScores")
Averaged = TypeVar("Averaged", bound="PartScores")


class Parts(NamedTuple):
    """Parts with one score each; `positions` for those that are tokens, `labels` by name for those that have one."""

    scores: Float[Tensor, "part"]
    names: Sequence[str]
    positions: Sequence[Any] | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Bars:
    """Named numbers and their sums: bars in a notebook or figure, a table in a terminal.

    Attributes:
        title: of a table; also of bars without `heading` (in a notebook) or `figure_title` (in a figure).
        lines: names and numbers, largest first.
        sums: lines below a rule, such as a total.
        heading, notes: shown above and below the bars in a notebook.
        columns: a table's headings for names and numbers.
        left: whether a table left-aligns names.
        intervals: an interval for every line and sum, in a figure.
    """

    title: str
    lines: Sequence[tuple[str, float]]
    sums: Sequence[tuple[str, float]] = ()
    heading: str = ""
    notes: Sequence[str] = ()
    columns: tuple[str, str] = ("part", "score")
    left: bool = True
    intervals: Sequence[tuple[float, float]] = ()
    figure_title: str = ""

    def draw(self, ax: Any) -> Any:
        """Draw on matplotlib axes, for print, and return them."""
        title = self.figure_title or self.title
        return figure.signed_bars(self.lines, title, ax, sums=self.sums, intervals=self.intervals)

    def print(self) -> None:
        """Print as a table in a terminal."""
        rows, below = ([(name, number(score)) for name, score in part] for part in (self.lines, self.sums))
        terminal.show_table(self.title, self.columns, rows, below, left=self.columns[: int(self.left)])


class Scored(Result):
    """A result whose parts have one score each, drawn as bars (largest first) unless its class draws otherwise."""

    @abstractmethod
    def _parts(self, *args: Any, **choice: Any) -> Parts:
        """Return all parts for a choice."""

    def _bars(self, *args: Any, **choice: Any) -> Bars:
        """Return bars of the k largest parts, for a result that is drawn as bars."""
        raise NotImplementedError

    def top(self, k: int | None = None, **choice: Any) -> list[Entry]:
        """Return the k parts of largest absolute score.

        Args:
            k: how many (default 10).
            choice: as in `to_html`, and a selection of parts, such as `names` of terms.

        Raises:
            InvalidInputError: k below 1, or an unknown choice, query or prompt.

        >>> tlens.circuits.logit_attribution(frozen, " value").top(1, names="MLP*")[0].name
        'MLP0'
        """
        chosen = {"k": self.PRINTED} | self._chosen("top", "_parts", k, choice)
        count: int = chosen.pop("k")
        parts = self._parts(**chosen)
        return largest(parts.scores, parts.names, count, parts.positions, parts.labels)

    def __len__(self) -> int:
        return len(self._parts().names)

    def __getitem__(self, name: str) -> Any:
        """Return the parts with one name and their scores, among those that `top` lists by default.

        Raises:
            InvalidInputError: unknown part.
        """
        parts = self._parts()
        every = largest(parts.scores, parts.names, max(1, len(parts.names)), parts.positions, parts.labels)
        entries = [entry for entry in every if entry.name == name]
        if not entries:
            raise no_part(name, parts.names)
        return entries

    def _html(self, *args: Any, **choice: Any) -> str:
        bars = self._titled_bars(**choice)
        return self._panel(graphs.bars(bars.lines, bars.sums), title=bars.heading or bars.title, notes=bars.notes)

    def _figure(self, *args: Any, **choice: Any) -> Any:
        ax = choice.pop("ax")
        return self._titled_bars(**choice).draw(ax)

    def _print(self, *args: Any, **choice: Any) -> None:
        self._titled_bars(**choice).print()

    def _titled_bars(self, title: str = "", **choice: Any) -> Bars:
        """Return the bars, with the caller's title if there is one."""
        bars = self._bars(**choice)
        return replace(bars, title=title, heading=title, figure_title=title) if title else bars

    @classmethod
    def _showing(cls) -> list[tuple[str, str, int]]:
        return [*super()._showing(), ("top", "_parts", cls.PRINTED)]

    @classmethod
    def _choices(cls, hook: str) -> dict[str, Parameter]:
        if "choice" not in signature(getattr(cls, hook)).parameters:  # otherwise the choices are those of _bars
            return super()._choices(hook)
        return super()._choices("_bars") | {"title": signature(cls._titled_bars).parameters["title"]}


class QueryScores(Scored):
    """Scores at queries of prompts; one such result can be subtracted from another."""

    NUMBERS: ClassVar[tuple[str, ...]] = ()
    """The tensors to subtract, and to average over prompts."""

    scores: Tensor
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    tokens: list[list[str]]
    target: str
    provenance: dict[str, str]

    def query_row(self, query: int | str = -1, batch: int = 0) -> int:
        """Return the index of a query on the query axis.

        Args:
            query: an index over the prompt's real queries, or a text: the last token of its last occurrence among the
                queries' tokens (in generated text, among the explained tokens).
            batch: the prompt.

        Raises:
            InvalidInputError: no such prompt or query.
        """
        check_batch(batch, self.tokens)
        real = self._real_rows(batch)
        explained = self._explained(batch)
        named = {place: row for row in real for place in explained[row]}
        if isinstance(query, str):
            spans = find_real(self.tokens[batch], self.mask[batch].tolist(), query)
            rows = [named[span[-1]] for span in spans if span[-1] in named]
            if rows:
                return rows[-1]
        elif -len(real) <= whole_number("query", query, why="one of the queries, or a text") < len(real):
            return real[query]
        at_position = ""
        if query in named:
            at_position = f" The one at position {query} is query={real.index(named[query])}."
        raise InvalidInputError(
            f"query={query!r} is an index into the queries of prompt {batch}, 0 to {len(real) - 1}, or their text; "
            f"this result has those at positions {list(named)}.{at_position} To explain others, pass query= "
            "(query='all' for all) where the result is computed."
        )

    def _explained(self, batch: int) -> Sequence[Sequence[int]]:
        """Return the positions of the tokens that each query of a prompt is about."""
        return [[position] for position in self.queries[batch].tolist()]

    def _real_rows(self, batch: int) -> list[int]:
        """Return the rows of the queries that are not padding."""
        return [row for row, position in enumerate(self.queries[batch].tolist()) if self.mask[batch, position]]

    def _which(self, batch: int, row: int) -> str:
        """Say which prompt and query are shown if there are several, in terms that `query_row` accepts."""
        parts = [shown_prompt(batch, len(self.tokens))]
        if self.queries.shape[1] > 1:
            real = self._real_rows(batch)
            number = sum(other < row for other in real)
            place = self._explained(batch)[row][-1]
            parts.append(f"query={number}, {self.tokens[batch][place]!r} at {place}, one of {len(real)}")
        return ", ".join(filter(None, parts))

    def __sub__(self: Kind, other: Any) -> Kind:
        """Subtract another result's scores, for another target, prompt or model, at the same positions.

        A part that one of the two lacks counts as zero there. Totals and remainders are subtracted too, so sums still
        hold. Provenance is the first result's, with differing entries of the second under ``"second model"``.

        Raises:
            InvalidInputError: the positions or parts differ, or the target means something else in each result.

        >>> value, name = (tlens.circuits.logit_attribution(frozen, token) for token in (" value", " name"))
        >>> both = tlens.circuits.logit_attribution(frozen, " value", " name")
        >>> torch.allclose((value - name).total, both.total, atol=1e-4)
        True
        """
        kind = next(kind for kind in type(self).__mro__ if "_aligned" in vars(kind))  # the class that defines alignment
        if not isinstance(other, kind):
            return NotImplemented
        first, second = self._aligned(other)
        names = [name for name in (*first.NUMBERS, "keys") if hasattr(first, name)]
        pairs = {name: (getattr(first, name), getattr(second, name)) for name in names}
        return replace(
            first,
            **{name: None if a is None or b is None else a - b for name, (a, b) in pairs.items()},
            target=self._difference(other),
            provenance=provenance_of_both(self, other),
        )

    @abstractmethod
    def _aligned(self, other: Any) -> tuple[Any, Any]:
        """Return both results with the same parts in the same order; raise `InvalidInputError` if they do not match."""

    def _difference(self, other: Any) -> str:
        """Describe the target of the difference from another result."""
        return f"{self.target} − {other.target}"


class PartScores(QueryScores):
    """Scores of parts that are the same in every prompt, with a total, so that they have a mean over prompts."""

    total: Float[Tensor, "batch query"]

    def mean(self: Averaged, *, level: int | float = 0.95) -> Averaged:
        """Return the mean over prompts, query by query, as a result for one prompt; sums still hold.

        Args:
            level: the confidence of the terms' intervals, from a bootstrap over prompts
                (`evaluate.bootstrap_interval`); NaN for one prompt.

        Raises:
            InvalidInputError: for terms, a level outside (0, 1).

        >>> several = tlens.freeze(model, [text, "Set the name", "Raise an error"])
        >>> tlens.circuits.logit_attribution(several, " the", by="head").mean().scores.shape[:2]
        torch.Size([1, 1])
        """
        real = torch.take_along_dim(self.mask, self.queries, dim=1)  # [batch, query]

        def mean_of(values: Tensor) -> Tensor:
            further = (1,) * (values.ndim - 2)
            counts = real.sum(0).clamp_min(1).reshape(-1, *further)
            return ((values * real.reshape(*real.shape, *further)).sum(0) / counts)[None]

        counts: list[int] = real.sum(0).tolist()
        fields: dict[str, Any] = {
            "queries": torch.arange(len(counts), device=real.device)[None],
            "mask": real.any(0)[None],
            "tokens": [[f"mean of {counted(count, 'prompt')}" for count in counts]],
        }
        if "low" in self.TENSORS:
            known = torch.where(real[..., None], self.scores.detach().double(), torch.nan).cpu()
            low, high = bootstrap_interval(known.movedim(0, -1), level)
            fields |= {"low": low[None], "high": high[None], "counts": real.sum(0)[None], "keys": None}
        fields |= {name: maybe(mean_of, getattr(self, name)) for name in self.NUMBERS}
        known = [count for count in counts if count] or [0]
        over = counted(max(known), "prompt")
        if min(known) < max(known):
            over = f"{min(known)} to {over}"
        return self._changed(**fields, target=f"{self._short_target}, mean of {over}")

    def _changed(self: Averaged, **fields: Any) -> Averaged:
        """Return the result with some fields replaced, for values that belong to no single prompt."""
        result: Any = self
        return replace(result, **fields)

    @property
    def _short_target(self) -> str:
        """The target, shortened for the title of a mean."""
        return self.target


def no_part(name: Any, names: Sequence[str], kind: str = "part") -> InvalidInputError:
    """Return the error for looking up an unknown part."""
    return InvalidInputError(f"no {kind} {name!r}; there are {', '.join(names[:8])}, ….{nearest(str(name), names)}")


def provenance_of_both(first: Any, second: Any) -> dict[str, str]:
    """Return the first result's provenance, with differing entries of the second under ``"second model"``."""
    facts: dict[str, str] = first.provenance
    others: dict[str, str] = second.provenance
    which = "second"
    if any(name.startswith("second ") for name in (*facts, *others)):
        which = "subtracted"  # one of the two is itself a difference of models
    return facts | {f"{which} {name}": fact for name, fact in others.items() if facts.get(name) != fact}


def refuse_ranked(first: str, second: str, *tokens: Any) -> None:
    """Raise if two results to be subtracted name tokens by rank, since each prompt and model has its own.

    `first` and `second` are their targets; `tokens` are targets and foils as passed, which may say more.
    """
    named = f"{first} {second} {tokens}"
    for token, words in RANKED.items():
        if words in named or repr(token) in named:
            raise InvalidInputError(
                f"a − b: each side of {first!r} and {second!r} may have another {words.removeprefix('the ')}, so that "
                "the two numbers would belong to different tokens. Name the token, such as ' Rome', on both sides; or "
                "use tlens.difference(a, b)."
            )


COLUMNS: Mapping[str, str] = {
    "id": "in a data set: the name of the row",
    "row": "in a data set: the number of the row",
    "batch": "the prompt, counted from 0",
    "query": "the explained position, counting padding",
    "query_token": "the token at the explained position; in generated text, the explained token or span",
    "query_side": "in an encoder–decoder: the side of the query",
    "key": "the position of the source token, counting padding; empty if the row has no source token",
    "key_token": "the source token",
    "key_side": "in an encoder–decoder: the side of the source token",
    "head": "the number of the head, if scores are split by head",
    "kind": "`token`, `bias`, `total`, `left out` (the sum of the tokens that `without` leaves out) or `rest` (all "
    'tokens that a data set did not store, with `keep="top:N"`)',
    "generated": "whether the model generated the source token",
    "target": "the explained number, in words; for head scores, the attended position",
    "term": "the name of a head, an MLP, a path or a feature",
    "feature": "the number of a dictionary feature",
    "label": "the label of a feature",
    "rank": "the example's rank among the feature's largest activations, counted from 0",
    "position": "the position of the token at which a feature is active, in its prompt or row, counting padding",
    "token": "the token at `position`",
    "activation": "the feature's activation at `position`",
    "is_peak": "whether the example was chosen for this token",
    "layer": "the layer",
    "route": "the route by which a change passes through the layer",
    "source": "the node where an edge begins, or the part that is read",
    "destination": "the node where an edge ends",
    "side": "`query` or `key`: the side to which the part belongs",
    "query_source": "for an attention score: the part of the query",
    "key_source": "for an attention score: the part of the key",
    "n": "for a mean: the number of prompts",
    "low": "for a mean: the lower end of its interval",
    "high": "for a mean: the upper end of its interval",
    "measured": "whether the score was measured in a live run, if only some scores were",
    "score": "the score",
    "weight": "in a graph: the weight of the edge",
    "source_pos": "in a graph: the position of the edge's source node",
    "source_token": "in a graph: the token at the source node",
    "destination_pos": "in a graph: the position of the edge's destination node",
    "destination_token": "in a graph: the token at the destination node",
    "reads": "in a graph: the input through which the destination reads the edge",
    "metric": "in an evaluation: the name of the measure",
    "method": "the method that gave the numbers; in an evaluation, the method being measured",
    "unit": "in an evaluation: the prompt",
    "value": "in an evaluation: the measured number",
}
"""The columns of every result's `to_dataframe`; evaluations and programs add columns of their own."""


def long_table(
    result: Any, values: Tensor, axes: Mapping[str, Sequence[str] | None], *, real: Any = True, **columns: Any
) -> "pd.DataFrame":
    """Return a table with one row per score: its index on every axis, further columns, and the score.

    Args:
        result: provides `queries`, `mask` and `tokens` if an axis is ``"query"`` or ``"key"``.
        axes: the labels along each axis, or None to use indices.
        real: which scores get a row.
        columns: a string, or values for the leading axes of `values`.
    """
    import pandas as pd

    places = dict(zip(axes, np.indices(tuple(values.shape)).reshape(values.ndim, -1), strict=True))
    lines = np.broadcast_to(real, tuple(values.shape)).ravel()
    table: dict[str, Any] = {}
    for axis, names in axes.items():
        if axis == "query":
            places[axis] = result.queries.cpu().numpy()[places["batch"], places[axis]]
        table[axis] = places[axis] if names is None else [names[place] for place in places[axis]]
        if axis in ("query", "key"):
            at = places["batch"], places[axis]
            table[f"{axis}_token"] = [result.tokens[batch][position] for batch, position in zip(*at, strict=True)]
            lines = lines & result.mask.cpu().numpy()[at]
    for name, column in columns.items():
        if not isinstance(column, str):
            column = np.array(column)
            column = column.reshape(*column.shape, *(1,) * (values.ndim - column.ndim))
            column = np.broadcast_to(column, tuple(values.shape)).ravel()
        table[name] = column
    table["score"] = values.detach().double().cpu().reshape(-1).numpy()
    return pd.DataFrame(table).loc[lines].reset_index(drop=True)
