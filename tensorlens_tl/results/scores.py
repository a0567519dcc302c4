"""Scores of named parts: the largest of them, what they sum to, their mean over prompts, and one less another."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.drawing import figure, graphs, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.results.entry import Entry, largest, panel, query_row
from tensorlens_tl.results.means import both_provenances, mean_of, mean_queries, mean_words
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

Kind = TypeVar("Kind", bound="QueryScores")


class Parts(NamedTuple):
    """Parts that have a score each; `positions` of those that are tokens, `labels` by name of those that have one."""

    scores: Float[Tensor, "part"]
    names: Sequence[str]
    positions: Sequence[Any] | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Bars:
    """Named numbers and what they sum to: bars around zero in a notebook and in print, a table in a terminal.

    Attributes:
        title: above a table.
        lines: names and numbers, the largest first.
        sums: what stands below a rule, such as a total.
        heading, notes: above and below the bars in a notebook; the title by default.
        figure_title: above a figure; the title by default.
        columns: what a table calls names and numbers.
        left: whether a table aligns names to the left.
        intervals: of every line and sum, in a figure.
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

    def html(self) -> str:
        """For a notebook or a page."""
        return panel(self.heading or self.title, graphs.bars(self.lines, self.sums), notes=self.notes)

    def draw(self, ax: Any) -> Any:
        """For print, on matplotlib's axes, which are returned."""
        title = self.figure_title or self.title
        return figure.signed_bars(self.lines, title, ax, sums=self.sums, intervals=self.intervals)

    def print(self) -> None:
        """For a terminal."""
        rows, below = ([(name, number(score)) for name, score in part] for part in (self.lines, self.sums))
        terminal.show_table(self.title, self.columns, rows, below, left=self.columns[: int(self.left)])


class Scored(Result):
    """A result whose parts have a score each; drawn as bars, the largest first, where its class shows nothing else."""

    @abstractmethod
    def _parts(self, *args: Any, **choice: Any) -> Parts:
        """All parts of what is chosen."""

    def _bars(self, *args: Any, **choice: Any) -> Bars:
        """What is drawn of the k largest parts, of a result that is drawn as bars."""
        raise NotImplementedError

    def top(self, *k: Any, **choice: Any) -> list[Entry]:
        """The k parts of largest absolute score.

        Args:
            k: how many, 10 where it is not said.
            choice: as in `to_html`; also which parts, where its class says so, such as `names` of terms.

        Raises:
            InvalidInputError: k below 1, or nothing of that name to choose; no such query or prompt.

        >>> tlens.circuits.logit_attribution(frozen, " value").top(1, names="MLP*")[0].name
        'MLP3'
        """
        chosen = {"k": self.PRINTED} | self._chosen("top", self._parts, k, choice)
        count: int = chosen.pop("k")
        parts = self._parts(**chosen)
        return largest(parts.scores, parts.names, count, parts.positions, parts.labels)

    def _html(self, *args: Any, **choice: Any) -> str:
        return self._titled_bars(**choice).html()

    def _figure(self, *args: Any, **choice: Any) -> Any:
        ax = choice.pop("ax")
        return self._titled_bars(**choice).draw(ax)

    def _print(self, *args: Any, **choice: Any) -> None:
        self._titled_bars(**choice).print()

    def _titled_bars(self, title: str = "", **choice: Any) -> Bars:
        """The bars, with a title of the caller's where there is one."""
        bars = self._bars(**choice)
        return replace(bars, title=title, heading=title, figure_title=title) if title else bars

    def _choices(self, hook: Callable[..., Any]) -> list[str]:
        names = super()._choices(hook)
        return [*super()._choices(self._bars), "title"] if "choice" in names else names


class QueryScores(Scored):
    """Scores at queries of prompts, with a total each: averaged over prompts, and subtracted."""

    NUMBERS: ClassVar[tuple[str, ...]] = ()
    """The tensors that are averaged over prompts, and subtracted."""

    scores: Tensor
    total: Float[Tensor, "batch query"]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    tokens: list[list[str]]
    target: str
    provenance: dict[str, str]

    def query_row(self, query: int | str = -1, batch: int = 0) -> int:
        """Where a query lies on the query axis: counted over the prompt's real queries, or named by its text.

        Raises:
            InvalidInputError: not among the held queries.
        """
        return query_row(self.queries, self.mask, self.tokens, query, batch)

    def mean(self: Kind, *, level: int | float = 0.95) -> Kind:
        """The mean over prompts, as of one prompt, query by query; sums still hold.

        Args:
            level: the confidence of the intervals, percentile bootstraps over prompts (`evaluate.bootstrap_interval`);
                NaN of one prompt.

        Returns:
            The same kind of result, or `Terms` of what is about single prompts, such as `Paths`. Terms have an interval
            for every part, `low` and `high`, and `counts`: how many prompts have a query, such as the tenth token of
            each, which shorter prompts lack. `to_dataframe` has them as columns.

        Raises:
            InvalidInputError: a level outside (0, 1).

        >>> several = tlens.freeze(model, [text, "Set the name", "Raise an error"])
        >>> tlens.circuits.logit_attribution(several, " the", by="head").mean().scores.shape[:2]
        torch.Size([1, 1])
        """
        real = torch.take_along_dim(self.mask, self.queries, dim=1)
        fields: dict[str, Any] = {}
        if "low" in self.TENSORS:
            known = torch.where(real[..., None], self.scores.detach().double(), torch.nan).cpu()
            low, high = bootstrap_interval(known.movedim(0, -1), level)
            fields = {"low": low[None], "high": high[None], "counts": real.sum(0)[None], "keys": None}
        fields |= {name: maybe(partial(mean_of, real=real), getattr(self, name)) for name in self.NUMBERS}
        target = f"{self._short_target}, {mean_words(real)}"
        return self._changed(**fields, **mean_queries(real), target=target)

    def __sub__(self: Kind, other: Any) -> Kind:
        """Each part's score less another result's: of another target, prompt, or model, at the same positions.

        A part that one of the two lacks is zero there. Totals and what the parts leave out are subtracted likewise, so
        that the parts sum to the difference of the two totals where they sum to these.

        Raises:
            InvalidInputError: other positions, or other parts.

        >>> value, name = (tlens.circuits.logit_attribution(frozen, token) for token in (" value", " name"))
        >>> both = tlens.circuits.logit_attribution(frozen, " value", " name")
        >>> torch.allclose((value - name).total, both.total, atol=1e-4)
        True
        """
        if not isinstance(other, self._subtracted()):
            return NotImplemented
        first, second = self._aligned(other)
        return replace(
            first,
            **first._less(second, [name for name in first.TENSORS if name in (*first.NUMBERS, "keys")]),
            target=self._difference(other.target),
            provenance=both_provenances(self.provenance, other.provenance),
        )

    def _changed(self: Kind, **fields: Any) -> Kind:
        """The same with other fields, which are of no single prompt."""
        result: Any = self
        return replace(result, **fields)

    @property
    def _short_target(self) -> str:
        """The target as the title of a mean has it."""
        return self.target

    @abstractmethod
    def _aligned(self, other: Any) -> tuple[Any, Any]:
        """This result and another one with the same parts in the same order.

        Raises:
            InvalidInputError: they are of other positions, or of other parts.
        """

    def _difference(self, other: str) -> str:
        """What is explained less what another result explains."""
        return f"{self.target} − {other}"

    @classmethod
    def _subtracted(cls) -> type:
        """Which results can be taken from one of this class."""
        return cls


COLUMNS: Mapping[str, str] = {
    "id": "of a data set: the name of the row",
    "row": "of a data set: its number",
    "batch": "the prompt, counted from 0",
    "query": "the position that is explained, padding counted",
    "query_token": "its token; of generated text, the token or the stretch that is explained",
    "query_side": "of an encoder–decoder: the side of the query",
    "key": "the position of the source token, padding counted; empty where a row is about no token",
    "key_token": "its token",
    "key_side": "of an encoder–decoder: its side",
    "head": "the number of a head, where an attribution has an axis of heads",
    "kind": "`token`, `bias`, `total`, `left out` (tokens that `without` leaves out, together), or `rest`: all tokens "
    'that a data set did not store (`keep="top:N"`)',
    "generated": "whether the model wrote the source token",
    "target": "what is explained, in words; for head scores, what is attended to",
    "term": "the name of a part: a head, an MLP, a path, a feature",
    "feature": "a feature of a dictionary",
    "label": "of a feature: what it is called",
    "rank": "of an example: its place among the feature's largest, counted from 0",
    "position": "of an active feature: the position of the token in its prompt or row, padding counted",
    "token": "that token",
    "activation": "how active the feature is there",
    "is_peak": "whether the example was chosen for this token",
    "layer": "a layer",
    "route": "by which route a change passes the layer",
    "source": "where an edge begins, or the part that is read",
    "destination": "where an edge ends",
    "side": "`query` or `key`, whose part it is",
    "query_source": "of an attention score: the part of the query",
    "key_source": "the part of the key",
    "n": "of a mean: over how many prompts it is",
    "low": "of a mean: the lower end of its interval",
    "high": "the upper end",
    "score": "the number",
    "weight": "the weight of an edge of a graph",
    "source_pos": "of a graph: the position of the node where an edge begins",
    "source_token": "its token",
    "destination_pos": "the position of the node where the edge ends",
    "destination_token": "its token",
    "reads": "what the edge is read by",
    "metric": "of an evaluation: what is measured",
    "method": "the method that the numbers are of; of an evaluation, the one that is measured",
    "unit": "the prompt that it is measured on",
    "value": "the measured number",
}
"""The columns of every result's `to_dataframe`; an evaluation's axis and a program's own numbers come besides."""


def long_table(
    result: Any, values: Tensor, axes: Mapping[str, Sequence[str] | None], *, real: Any = True, **columns: Any
) -> "pd.DataFrame":
    """One line per score: its place on every axis, further columns, and the score.

    Positions, their tokens and a line for real tokens only come from the result, where it has them.

    Args:
        result: with `queries`, `mask` and `tokens`, where there is an axis ``"query"`` or ``"key"``.
        values: the scores.
        axes: what the places on each axis of `values` are called; None where their number says it.
        real: which scores have a line.
        columns: a text, or values for the first axes of `values`.
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
