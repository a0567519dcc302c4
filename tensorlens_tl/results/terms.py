"""Named parts of one number of the model: what each component, head, path, feature or changed weight adds to it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tensorlens_tl._arguments import nearest
from tensorlens_tl.algebra.numerics import maybe, relative_gap
from tensorlens_tl.drawing import figure, matrix, page
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import (
    Entry,
    check_batch,
    largest,
    mean_title,
    panel,
    provenance_note,
    query_row,
    shown_prompt,
    shown_query,
    shown_target,
    some_numbers,
)
from tensorlens_tl.results.means import both_provenances, mean_of, mean_queries, mean_words, refuse_ranked
from tensorlens_tl.results.result import Bars, Result, axes_of, long_table
from tensorlens_tl.results.statistics import bootstrap_interval
from tensorlens_tl.results.targets import targets_of_queries

if TYPE_CHECKING:
    import pandas as pd

Kind = TypeVar("Kind", bound="Terms")

BESIDE = 6
"""How many terms stand below a grid of heads that has no place for them."""


NOISE = 1e-6
"""What share of the largest total is rounding."""

BY_TOKEN = "each token's share: to_dataframe()"
"""Where each part's shares by token are, which no list of parts shows."""

LONGEST = 80
"""Letters of a target in the title of a mean: one that names each prompt's own token is longer."""


@dataclass(frozen=True, eq=False)
class Terms(Result):
    """Named parts of a logit before any final soft cap (or of a logit difference, or of any direction).

    Where `additive`, ``scores.sum(-1) + remainder == total`` up to `gap`. Total effects are not: what goes
    through two parts counts for both.

    Attributes:
        names: what the parts are, such as ``"embed"``, ``"L0H3"``, ``"L0H3 → L1H5"``, ``"MLP1.N7"``, ``"L0.b_O"``.
        scores: `[batch, query, term]`.
        total: the model's own number, `[batch, query]`.
        remainder: what the named parts leave out, `[batch, query]`; None where they are not additive.
        queries: the positions the query axis stands for, `[batch, query]`.
        mask: True at real tokens, `[batch, pos]`.
        tokens: readable tokens of each prompt.
        target: what the scores explain, in words.
        low, high: of a `mean` over prompts, the ends of each part's interval, `[batch, query, term]`; else None.
        counts: of a `mean` over prompts, how many of them have each query, `[batch, query]`; else None.
        keys: for parts that read other tokens, each token's share, `[batch, query, term, key]`; NaN for parts that
            belong to no token; None where not asked for.
        soft_cap: the cap that the model applies to its logits after `total`, or None.
        labels: what some of the parts are called besides, by name, such as features of a dictionary; pictures and
            tables in a terminal show it.
        provenance: what they depend on besides the prompts, as of `Attribution`.
    """

    TENSORS: ClassVar = ("scores", "total", "remainder", "queries", "mask", "keys", "low", "high", "counts")
    FACTS: ClassVar = ("names", "tokens", "target", "soft_cap")
    LATER_FACTS: ClassVar = ("labels", "provenance")
    NUMBERS: ClassVar = ("scores", "total", "remainder")
    """What is averaged over prompts, and subtracted of two results, beside `keys`."""

    names: list[str]
    scores: Float[Tensor, "batch query term"]
    total: Float[Tensor, "batch query"]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    tokens: list[list[str]]
    target: str
    remainder: Float[Tensor, "batch query"] | None = None
    keys: Float[Tensor, "batch query term key"] | None = None
    soft_cap: float | None = None
    low: Float[Tensor, "batch query term"] | None = None
    high: Float[Tensor, "batch query term"] | None = None
    counts: Int[Tensor, "batch query"] | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        shape = (*self.queries.shape, len(self.names))
        if tuple(self.scores.shape) != shape:
            raise InvalidInputError(f"{type(self).__name__}: scores are {tuple(self.scores.shape)}, not {shape}.")

    @property
    def additive(self) -> bool:
        """Whether scores and remainder sum to the total."""
        return self.remainder is not None

    @property
    def gap(self) -> Float[Tensor, "batch query"]:
        """abs(Σ scores + remainder − total) / (Σ abs(scores) + abs(remainder)): how far the sum is from holding.

        Raises:
            InvalidInputError: the parts are not additive.
        """
        if self.remainder is None:
            raise InvalidInputError(f"gap: these {self.target} effects are not additive; there is no sum to check.")
        return relative_gap(self.scores, self.remainder, self.total)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        totals = some_numbers(self.total)
        gap = "not additive"
        if self.additive:
            gap = f"gap={float(self.gap.max()):.1e}"
        return f"{type(self).__name__}({len(self)} of {shown_target(self.target)!r}, total={totals}, {gap})"

    def __getitem__(self, name: str) -> Float[Tensor, "batch query"]:
        """One part's score for every prompt and query.

        Raises:
            InvalidInputError: no part of that name.
        """
        if name not in self.names:
            near = nearest(name, self.names)
            raise InvalidInputError(f"no term {name!r}; there are {', '.join(self.names[:8])}, ….{near}")
        return self.scores[..., self.names.index(name)]

    def __sub__(self, other: "Terms") -> "Terms":
        """Each part's score less another result's: of another target, prompt, or model, at the same positions.

        A part that one of the two lacks is zero there. Totals and remainders are subtracted likewise, so the parts sum
        to the difference of the two totals where both results are additive.

        Raises:
            InvalidInputError: other positions, or no part of the same name.

        >>> value, name = (tlens.circuits.logit_attribution(frozen, token) for token in (" value", " name"))
        >>> both = tlens.circuits.logit_attribution(frozen, " value", " name")
        >>> torch.allclose((value - name).total, both.total, atol=1e-4)
        True
        """
        if not isinstance(other, Terms):
            return NotImplemented
        for what, first, second in (
            ("number of prompts", len(self.queries), len(other.queries)),
            ("number of tokens", self.mask.sum(1).tolist(), other.mask.sum(1).tolist()),
            ("queries", self.queries.tolist(), other.queries.tolist()),
        ):
            if first != second:
                raise InvalidInputError(f"difference: the two differ in {what}; subtract terms of the same positions.")
        if not set(self.names) & set(other.names):
            raise InvalidInputError(
                f"difference: no part has the same name ({self.names[0]!r} …, {other.names[0]!r} …); ask for both by= "
                "the same kind of part."
            )
        refuse_ranked(self.target, other.target)
        first, second = (result._terms(low=None, high=None, counts=None) for result in (self, other))
        if first.names != second.names:
            names = list(dict.fromkeys([*first.names, *second.names]))
            first, second = (result._terms(keys=None).with_names(names) for result in (first, second))
        return replace(
            first,
            **first._less(second, (*Terms.NUMBERS, "keys")),
            target=f"{self.target} − {other.target}",
            soft_cap=self.soft_cap if self.soft_cap == other.soft_cap else None,
            labels={**other.labels, **self.labels},
            provenance=both_provenances(self.provenance, other.provenance),
        )

    def with_names(self: Kind, names: Sequence[str]) -> Kind:
        """With these parts in this order, of which those that it lacks are zero.

        Raises:
            InvalidInputError: one of its own parts is left out, so that the others would no longer sum to the total.
        """
        missing = [name for name in self.names if name not in names]
        if missing:
            raise InvalidInputError(f"names: {missing[0]!r} is a term of this change, and its sum needs it.")
        columns = [names.index(name) for name in self.names]

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(*values.shape[:2], len(names), *values.shape[3:]).index_copy(
                2, torch.tensor(columns, device=values.device), values
            )

        return replace(
            self, names=list(names), scores=spread(self.scores), keys=maybe(spread, self.keys), low=None, high=None
        )

    def mean(self, *, level: int | float = 0.95) -> "Terms":
        """The mean over prompts, as of one prompt, query by query, with an interval for every part; sums still hold.

        Args:
            level: the confidence of the intervals, percentile bootstraps over prompts (`evaluate.bootstrap_interval`);
                NaN of one prompt.

        Returns:
            Terms with `low`, `high` and `counts`: how many prompts have a query, such as the tenth token of each, which
            shorter prompts lack. `to_dataframe` has them as columns.

        Raises:
            InvalidInputError: a level outside (0, 1).

        >>> several = tlens.freeze(model, [text, "Set the name", "Raise an error"])
        >>> tlens.circuits.logit_attribution(several, " the", by="head").mean().scores.shape[:2]
        torch.Size([1, 1])
        """
        return self._terms(**self._mean(level, self.target))

    def _mean(self, level: int | float, target: str) -> dict[str, Any]:
        """The fields in which the mean over prompts differs from the whole."""
        if not isinstance(level, int | float) or not 0 < level < 1:
            raise InvalidInputError(f"level={level!r}: pass a confidence between 0 and 1.")
        real = torch.take_along_dim(self.mask, self.queries, dim=1)
        known = torch.where(real[..., None], self.scores.detach().double(), torch.nan).cpu()
        low, high = bootstrap_interval(known.movedim(0, -1), level)
        return {
            **{name: maybe(partial(mean_of, real=real), getattr(self, name)) for name in self.NUMBERS},
            "low": low[None],
            "high": high[None],
            "counts": real.sum(0)[None],
            "keys": None,
            "target": f"{target}, {mean_words(real)}",
            **mean_queries(real),
        }

    def _terms(self, **changes: Any) -> "Terms":
        """The same as terms of no further kind, some fields aside."""
        return Terms(**{field.name: getattr(self, field.name) for field in fields(Terms)} | changes)

    def query_row(self, query: int | str = -1, batch: int = 0) -> int:
        """Where a query lies on the query axis: counted over the prompt's real queries, or named by its text.

        Raises:
            InvalidInputError: not among the held queries.
        """
        return query_row(self.queries, self.mask, self.tokens, query, batch)

    def top(self, k: int = 10, query: int | str = -1, batch: int | None = None, *, names: str = "*") -> list[Entry]:
        """The k parts of largest absolute score for one query, as `show` lists them.

        Args:
            k: how many.
            query: which of the held queries, counted over the prompt's real ones, or a text.
            batch: one prompt; None for the only one, or for the mean over several.
            names: of parts of such names only: ``"L*H*"`` are heads, ``"L3H*"`` those of one layer, ``"MLP*"`` MLPs.

        Raises:
            InvalidInputError: k below 1, or no such query.

        >>> effects = tlens.circuits.logit_attribution(frozen, " value")
        >>> len(effects.top(3))
        3
        """
        if batch is None and len(self.tokens) > 1:
            return self._of_query(query).mean().top(k, names=names)
        batch = batch or 0
        indices = [i for i, name in enumerate(self.names) if fnmatchcase(name, names)]
        row = self.scores[batch, self.query_row(query, batch)]
        return largest(row[indices], [self.names[i] for i in indices], k, labels=self.labels)

    def to_dataframe(self, *, keys: bool | None = None) -> "pd.DataFrame":
        """One line per score: batch, query, query_token, term, target, score; with `keys`, one per source's share.

        Shares are there where ``by="head_token"`` or ``positions=True`` asked for them, and then tables and table files
        have them; ``keys=False`` has a line per part.

        Of a `mean`, ``n``, the number of prompts that have the query, ``low`` and ``high`` stand before the score.

        Parts that belong to no source token then have one line, without `key` and `key_token`.

        Raises:
            InvalidInputError: shares were not asked for when these were made.

        >>> effects = tlens.circuits.logit_attribution(frozen, " value")
        >>> table = effects.to_dataframe()
        >>> len(table) == len(effects.names)
        True
        """
        import pandas as pd

        if keys is None:
            keys = self.keys is not None
        values = self.scores
        if keys:
            values = self.keys
        if values is None:
            raise InvalidInputError(
                "keys: no source tokens' shares here; logit_attribution(by='head_token') has them, and compare_models "
                "and patch_scores with positions=True."
            )
        columns: dict[str, Any] = {"target": np.array(targets_of_queries(self.target, self.queries), dtype=object)}
        if self.counts is not None:
            columns["n"] = self.counts.cpu()
        for name in ("low", "high"):
            bound = getattr(self, name)
            if bound is not None and not keys:
                columns[name] = bound.double().cpu()
        axes = dict.fromkeys(axes_of(self, "keys" if keys else "scores")) | {"term": self.names}
        frame = long_table(self, values, axes, **columns)
        if keys:  # parts that belong to no source token: a line of their own, so that the lines still sum
            whole = self.to_dataframe(keys=False)
            keyless = frame.loc[frame["score"].isna(), "term"].unique()
            frame = pd.concat([frame.dropna(subset="score"), whole.loc[whole["term"].isin(keyless)]])
        return frame.reset_index(drop=True)

    # ------------------------------------------------------------------ showing

    def _bars(self, k: int, query: int | str, batch: int) -> Bars:
        """The k largest parts of one query and all others, and what they sum to."""
        check_batch(batch, self.tokens)
        row = self.query_row(query, batch)
        entries = self.top(k, query, batch)
        lines = [(entry.labelled, entry.score) for entry in entries]
        if self.additive:
            scores = self.scores[batch, row].double()
            rest = self._rest(scores, [self.names.index(entry.name) for entry in entries])
            lines += [(name, float(scores[indices].sum())) for name, indices in rest.items()]
        if self.remainder is not None and bool(self.remainder[batch, row]):
            lines.append(("everything not listed", float(self.remainder[batch, row])))
        notes = [shown_query(self.queries, self.mask, self.tokens, row, batch)]
        total = float(self.total[batch, row])
        sums = [("total", total)]
        if not self.additive:  # a rule with a total below would look like a sum
            sums = []
            left = len(self) - len(entries)
            notes.append(f"effects on {number(total)}, which do not add up{f'; {left} more' if left else ''}")
        title = " · ".join(filter(None, [shown_target(self.target), *notes]))
        if self.keys is not None:
            notes.append(BY_TOKEN)
        if self.additive:
            notes.append(f"sums to the model's own number to {float(self.gap[batch, row]):.1e}")
        notes.append(provenance_note(self.provenance))
        return Bars(title, lines, sums, heading=self.heading, notes=notes)

    def _rest(self, scores: Float[Tensor, "term"], shown: Sequence[int]) -> dict[str, list[int]]:
        """The parts that are not shown, by the name of their row.

        It is one row, unless that would be larger than every part shown: then there is one for each kind of part, or
        where all are of one kind for each layer.
        """
        left = sorted(set(range(len(self))) - set(shown))
        if not left:
            return {}
        together = {_counted(len(left), ""): left}
        if abs(float(scores[left].sum())) <= float(scores[list(shown)].abs().max()):
            return together
        for kind_of in (_kind, _layer):
            by_kind: dict[str, list[int]] = {}
            for i in left:
                by_kind.setdefault(kind_of(self.names[i]), []).append(i)
            if len(by_kind) > 1:
                return {_counted(len(indices), kind): indices for kind, indices in by_kind.items()}
        return together

    def _of_query(self, query: int | str) -> "Terms":
        """One query of each prompt."""
        if self.queries.shape[1] == 1:
            return self
        rows = torch.tensor([self.query_row(query, prompt) for prompt in range(len(self.tokens))])[:, None]
        one = partial(_at_rows, rows=rows.to(self.queries.device))
        values = {name: maybe(one, getattr(self, name)) for name in (*Terms.NUMBERS, "queries")}
        return self._terms(**values, keys=None)

    def to_html(
        self, k: int = 15, query: int | str = -1, batch: int | None = None, *, title: str = "", style: bool = True
    ) -> str:
        """The k largest parts of one query as bars around zero; what they leave out, and their total, below.

        Args:
            k, query: as in `top`.
            batch: one prompt; None for the only one, or for the mean over several.
            title: above it; an own one by default.
            style: whether the style sheet comes with it.
        """
        if batch is None and len(self.tokens) > 1:
            return self._of_query(query).mean().to_html(k, title=title, style=style)
        return self._bars(k, query, batch or 0).html(title=title, style=style)

    def heads_to_html(self, query: int | str = -1, batch: int = 0, *, title: str = "", style: bool = True) -> str:
        """Terms of heads as a grid, a row per layer and a column per head, MLPs beside them; empty without any.

        The largest of the other terms stand below: the embedding, the unembedding, norms and biases.
        """
        scores = self.scores[batch, self.query_row(query, batch)]
        cells = self._cells(scores)
        if not cells:
            return ""
        heading = title or f"Heads and MLPs on {shown_target(self.target)}"
        by_name = zip(self.names, scores.tolist(), strict=True)
        others = [(name, score) for name, score in by_name if _cell(name) is None and score]
        others.sort(key=lambda term: -abs(term[1]))
        beside = ", ".join(f"{name} {number(score)}" for name, score in others[:BESIDE])
        notes = [f"beside them: {beside}"] if beside else []
        return panel(heading, matrix.head_grid(cells, heading), notes=notes, style=style)

    @property
    def heading(self) -> str:
        """The title of its page."""
        return f"What adds to {shown_target(self.target)}"

    def plot(self, k: int = 15, query: int | str = -1, batch: int | None = None, *, ax: Any = None) -> Any:
        """The k largest parts of one query as matplotlib bars (extra ``plot``); returns the axes.

        Args:
            k, query: as in `top`.
            batch: one prompt; None for the only one, or for the mean over several with its 95 % bootstrap intervals.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: k below 1, or no such query or prompt.
            ImportError: matplotlib is not installed.
        """
        if batch is None and len(self.tokens) > 1:
            return self._mean_bars(k, query).draw(ax)
        return self._bars(k, query, batch or 0).draw(ax)

    def _mean_bars(self, k: int, query: int | str) -> Bars:
        """The k parts of largest mean, all others in one line, and the total, each with its interval."""
        chosen_query = self._of_query(query)
        scores, total = (values[:, 0].detach().double().cpu() for values in (chosen_query.scores, chosen_query.total))
        entries = largest(scores.mean(0), self.names, k, labels=self.labels)
        chosen = [self.names.index(entry.name) for entry in entries]
        columns = [scores[:, chosen]]
        names = [entry.labelled for entry in entries]
        if self.additive:
            for name, indices in self._rest(scores.mean(0), chosen).items():
                names.append(name)
                columns.append(scores[:, indices].sum(1, keepdim=True))
            left = total - scores.sum(1)
            if bool(left.abs().max() > NOISE * total.abs().max()):
                names.append("everything not listed")
                columns.append(left[:, None])
            columns.append(total[:, None])
        values = torch.cat(columns, dim=1)
        means = values.mean(0).tolist()
        low, high = bootstrap_interval(values.mT)
        sums = [("total", mean) for mean in means[len(names) :]]
        intervals = list(zip(low.tolist(), high.tolist(), strict=True))
        lines = list(zip(names, means[: len(names)], strict=True))
        return Bars(mean_title(self.target, len(values)), lines, sums, intervals=intervals)

    def plot_heads(self, query: int | str = -1, batch: int | None = None, *, ax: Any = None) -> Any:
        """Heads and MLPs as a matplotlib heat map, a row per layer (extra ``plot``); returns the axes.

        Args:
            query: as in `top`.
            batch: one prompt; None for the only one, or for the mean over several.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: no term is a head or an MLP, or no such query or prompt.
            ImportError: matplotlib is not installed.

        >>> tlens.circuits.logit_attribution(frozen, " value", by="head").plot_heads()
        <Axes: ...>
        """
        title = shown_target(self.target)
        if batch is None and len(self.tokens) > 1:
            title = mean_title(self.target, len(self.tokens))
            scores = self._of_query(query).scores[:, 0].mean(0)
        else:
            scores = self.scores[batch or 0, self.query_row(query, batch or 0)]
            title = " · ".join(filter(None, [title, shown_prompt(batch or 0, len(self.tokens))]))
        cells = self._cells(scores)
        if not cells:
            raise InvalidInputError("plot_heads: no term is a head or an MLP; logit_attribution(by='head') has them.")
        return figure.head_map(cells, title, ax)

    def _cells(self, scores: Float[Tensor, "term"]) -> dict[tuple[int, str], float]:
        """The scores of heads and MLPs by layer and column."""
        named = {_cell(name): score for name, score in zip(self.names, scores.tolist(), strict=True)}
        return {cell: score for cell, score in named.items() if cell is not None}

    def show(self, k: int = 10, query: int | str = -1, batch: int | None = None) -> None:
        """Display the bars in a notebook; elsewhere print the k largest parts, all others in one line, and the total.

        Args:
            k, query, batch: as in `to_html`.
        """
        if page.display_in_notebook(lambda: self.to_html(k, query, batch)):
            return
        if batch is None and len(self.tokens) > 1:
            self._of_query(query).mean().show(k)
            return
        bars = self._bars(k, query, batch or 0)
        if self.keys is not None:
            bars = replace(bars, title=f"{bars.title} · {BY_TOKEN}")
        bars.print()


def _at_rows(values: Shaped[Tensor, "batch query *term"], rows: Int[Tensor, "batch 1"]) -> Tensor:
    """One query of each prompt."""
    return torch.take_along_dim(values, rows.reshape(*rows.shape, *(1,) * (values.ndim - 2)), dim=1)


def _counted(count: int, kind: str) -> str:
    """The name of a row of parts that are not shown: ``"297 others"``, ``"12 other heads"``."""
    plural = "" if count == 1 else "s"
    if not kind:
        return f"{count} other{plural}"
    noun, space, where = kind.partition(" ")
    return f"{count} other {noun}{plural}{space}{where}"


KINDS = {
    r"L\d+(\.cross\.)?H\d+": "head",
    r"MLP\d+": "MLP",
    r"MLP\d+\.N\d+": "neuron",
    r".* → .*": "path",
}
"""What parts of these names are."""


def _kind(name: str) -> str:
    return next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, name)), "part")


def _layer(name: str) -> str:
    match = re.match(r"(?:L|MLP)(\d+)", name)
    return f"part of layer {match[1]}" if match else "part"


def _cell(name: str) -> tuple[int, str] | None:
    """Layer and column of a head's or MLP's name: ``"L3H1"`` is (3, "H1"), ``"MLP2"`` (2, "MLP"); else None.

    A head of cross-attention, ``"L3.cross.H1"``, is (3, "cross.H1").
    """
    match = re.fullmatch(r"L(\d+)(H\d+|\.cross\.H\d+)|MLP(\d+)", name)
    if match is None:
        return None
    layer, head, mlp = match.groups()
    return int(layer or mlp), (head or "MLP").removeprefix(".")


@dataclass(frozen=True, eq=False, repr=False)
class Paths(Terms):
    """Path scores of one query, order by order.

    Attributes:
        nodes: each path's nodes, first to last; empty for the direct path.
        orders: the sum of all paths of each order, listed or not, `[batch, order]`; the last is every longer one. They
            come from a pull of their own, so `gap` measures the listed paths against them.
    """

    TENSORS: ClassVar = (*Terms.TENSORS, "orders")
    FACTS: ClassVar = (*Terms.FACTS, "nodes")

    nodes: Sequence[Sequence[str]] = ()
    orders: Float[Tensor, "batch order"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "nodes", tuple(map(tuple, self.nodes)))


@dataclass(frozen=True, eq=False, repr=False)
class FeatureEdges(Terms):
    """Edges from an early dictionary's parts into a late one's features, a row of `scores` for each of these.

    Attributes:
        features: which late feature each row is about; where it is asked about is in `queries`.
    """

    FACTS: ClassVar = (*Terms.FACTS, "features")

    features: Sequence[int] = ()

    def into(self, feature: int) -> Terms:
        """The edges into one feature, at every position that was asked about.

        Raises:
            InvalidInputError: it is not among the late features.
        """
        rows = [row for row, number in enumerate(self.features) if number == feature]
        if not rows:
            raise InvalidInputError(f"no edges into feature {feature}; there are {list(dict.fromkeys(self.features))}.")
        chosen = {name: getattr(self, name)[:, rows] for name in (*Terms.NUMBERS, "queries")}
        target = self.target.replace("pre-activations", f"pre-activation of F{feature}", 1)
        return self._terms(**chosen, target=target, keys=None)

    def to_dataframe(self, *, keys: bool | None = None) -> "pd.DataFrame":
        """One line per edge: batch, query, query_token, feature (the late one), term, target, score."""
        import pandas as pd

        frames = []
        for feature in dict.fromkeys(self.features):
            frame = self.into(feature).to_dataframe(keys=keys)
            frame.insert(list(frame.columns).index("term"), "feature", feature)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True, eq=False, repr=False)
class ModelChange(Terms):
    """What every changed weight of a model adds to the change of a logit; `compare_models` returns one.

    Attributes:
        base, tuned: the two models' own numbers, `[batch, query]`; `total` is the second less the first.
        by: what a term is.
    """

    TENSORS: ClassVar = (*Terms.TENSORS, "base", "tuned")
    FACTS: ClassVar = (*Terms.FACTS, "by")
    NUMBERS: ClassVar = (*Terms.NUMBERS, "base", "tuned")

    base: Float[Tensor, "batch query"] | None = None
    tuned: Float[Tensor, "batch query"] | None = None
    by: str = "matrix"

    @property
    def gap(self) -> Float[Tensor, "batch query"]:
        """abs(Σ scores + remainder − total), relative to the size of the terms and of the two models' numbers.

        The total is a difference of two numbers, each of which is rounded: of a change that has no effect, such as that
        of a bias of keys, their rounding is all there is.
        """
        assert self.remainder is not None
        miss = (self.scores.sum(-1) + self.remainder - self.total).abs()
        size = self.scores.abs().sum(-1) + self.remainder.abs()
        if self.base is not None and self.tuned is not None:
            size = size + self.base.abs() + self.tuned.abs()
        return miss / size.clamp_min(torch.finfo(size.dtype).tiny)

    def mean(self, *, level: float = 0.95) -> "ModelChange":
        """The mean over prompts, as of one prompt; a term that a prompt lacks counts as zero there.

        Args:
            level: the confidence of the intervals in `low` and `high`, as in `Terms.mean`.

        Raises:
            InvalidInputError: a level outside (0, 1).

        >>> change = tlens.compare_models(model, model, text, " value")
        >>> change.mean().scores.shape == (1, 1, len(change))
        True
        """
        target = self.target
        if len(target) > LONGEST:
            target = "change of each prompt's number"
        return replace(self, **self._mean(level, target))

    def summary(
        self, level: int | float = 0.95, *, query: int | str = -1, names: str = "*", seed: int = 0
    ) -> "pd.DataFrame":
        """The mean of each term over the prompts with its bootstrap interval, the largest first, and of the total.

        Prompts are resampled, whole: a term's interval says how its mean would scatter over other prompts like these.

        Args:
            level: the confidence of the intervals.
            query: which of the queries of each prompt, as in `Terms.query_row`.
            names: of terms of such names only: ``"L*H*"`` are heads, ``"L1.*"`` the weights of one layer.
            seed: of the resamples.

        Returns:
            A line for each term, and ``"total"`` last: `mean`, `low`, `high`; NaN ends of a single prompt.

        Raises:
            InvalidInputError: a level outside (0, 1), no such term, or no such query.

        Source: `tensorlens_tl.evaluate.bootstrap_interval` (percentiles).

        >>> change = tlens.compare_models(model, model, [text, "Set the name"], " value")
        >>> list(change.summary().index)
        ['embed', 'total']
        """
        import pandas as pd

        if not 0 < level < 1:
            raise InvalidInputError(f"level={level!r}: pass a confidence between 0 and 1.")
        columns = [column for column, name in enumerate(self.names) if fnmatchcase(name, names)]
        if not columns:
            raise InvalidInputError(f"names={names!r}: there are {', '.join(self.names[:8])}, …")
        prompts = range(len(self.queries))
        rows = torch.tensor([self.query_row(query, prompt) for prompt in prompts], device=self.queries.device)
        at_query = torch.take_along_dim(self.scores, rows[:, None, None], dim=1)[:, 0, columns]
        total = torch.take_along_dim(self.total, rows[:, None], dim=1)
        values = torch.cat([at_query, total], dim=1).detach().double().cpu().mT
        low, high = bootstrap_interval(values, level, seed=seed)
        frame = pd.DataFrame(
            {"mean": values.mean(-1).tolist(), "low": low.tolist(), "high": high.tolist()},
            index=pd.Index([*(self.names[column] for column in columns), "total"], name="term"),
        )
        by_size = frame["mean"].iloc[:-1].abs().sort_values(ascending=False, kind="stable").index
        return frame.loc[[*by_size, "total"]]

    def __sub__(self, other: Terms) -> "ModelChange":
        """Term by term; one that only one of the two has is zero in the other.

        Raises:
            InvalidInputError: other prompts' numbers, other kinds of terms, or no such result.
        """
        if not isinstance(other, ModelChange):
            return NotImplemented
        if self.by != other.by or self.queries.shape != other.queries.shape:
            raise InvalidInputError(
                f"a - b: terms by {self.by!r} of {tuple(self.queries.shape)} prompts and queries, and by {other.by!r} "
                f"of {tuple(other.queries.shape)}. Compare both by the same terms; for other prompts, their means."
            )
        names = list(dict.fromkeys([*self.names, *other.names]))
        first, second = self.with_names(names), other.with_names(names)
        target = self.target
        if other.target != target:
            target = f"{target} − {other.target}"
        provenance = both_provenances(self.provenance, other.provenance)
        differences = first._less(second, (*self.NUMBERS, "keys"))
        return replace(first, **differences, target=target, provenance=provenance)
