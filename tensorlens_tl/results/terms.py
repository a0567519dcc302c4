"""Named parts of one number of the model: what each component, head, path or feature adds to it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tensorlens_tl._arguments import nearest
from tensorlens_tl.algebra.numerics import maybe, relative_gap
from tensorlens_tl.drawing import figure, graphs, matrix, page, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import (
    Entry,
    check_batch,
    largest,
    mean_title,
    provenance_note,
    query_row,
    shown_prompt,
    shown_query,
    shown_target,
    some_numbers,
    with_style,
)
from tensorlens_tl.results.means import less, mean_over_prompts
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.statistics import bootstrap_interval
from tensorlens_tl.results.targets import targets_of_queries

if TYPE_CHECKING:
    import pandas as pd

BESIDE = 6
"""How many terms stand below a grid of heads that has no place for them."""


NOISE = 1e-6
"""What share of the largest total is rounding."""


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
        return Terms(**less(self, other), labels={**other.labels, **self.labels})

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
        return Terms(**mean_over_prompts(self, level), labels=self.labels)

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
        index = np.indices(values.shape).reshape(values.ndim, -1)
        batch = index[0]
        positions = self.queries.cpu().numpy()[index[0], index[1]]
        frame = pd.DataFrame({"batch": batch, "query": positions})
        frame["query_token"] = [self.tokens[b][q] for b, q in zip(batch, positions, strict=True)]
        frame["term"] = [self.names[i] for i in index[2]]
        real = self.mask.cpu().numpy()[batch, positions]
        if keys:
            frame["key"] = index[3]
            frame["key_token"] = [self.tokens[b][k] for b, k in zip(batch, index[3], strict=True)]
            real = real & self.mask.cpu().numpy()[batch, index[3]]
        targets = np.array(targets_of_queries(self.target, self.queries), dtype=object)
        frame["target"] = targets[index[0], index[1]]
        if self.counts is not None:
            frame["n"] = self.counts.cpu().numpy()[index[0], index[1]]
        for name in ("low", "high"):
            bound = getattr(self, name)
            if bound is not None and not keys:
                frame[name] = bound.double().cpu().reshape(-1).numpy()
        frame["score"] = values.detach().double().cpu().reshape(-1).numpy()
        frame = frame.loc[real]
        if keys:  # parts that belong to no source token: a line of their own, so that the lines still sum
            whole = self.to_dataframe(keys=False)
            keyless = frame.loc[frame["score"].isna(), "term"].unique()
            frame = pd.concat([frame.dropna(subset="score"), whole.loc[whole["term"].isin(keyless)]])
        return frame.reset_index(drop=True)

    # ------------------------------------------------------------------ showing

    def _lines(
        self, k: int, query: int | str, batch: int
    ) -> tuple[str, list[tuple[str, float]], list[tuple[str, float]]]:
        """Which query is shown, the k largest parts and all others, and what they sum to."""
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
        which = shown_query(self.queries, self.mask, self.tokens, row, batch)
        total = float(self.total[batch, row])
        if not self.additive:  # a rule with a total below would look like a sum
            left = len(self) - len(entries)
            note = f"effects on {number(total)}, which do not add up"
            if left:
                note += f"; {left} more"
            return " · ".join(filter(None, (which, note))), lines, []
        return which, lines, [("total", total)]

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

    @property
    def _by_token(self) -> str:
        """Where each part's shares by token are, which no list of parts shows."""
        if self.keys is None:
            return ""
        return "each token's share: to_dataframe()"

    def _of_query(self, query: int | str) -> "Terms":
        """One query of each prompt."""
        if self.queries.shape[1] == 1:
            return self
        rows = torch.tensor([self.query_row(query, prompt) for prompt in range(len(self.tokens))])[:, None]
        one = partial(_at_rows, rows=rows.to(self.queries.device))
        return Terms(
            self.names, one(self.scores), one(self.total), one(self.queries), self.mask, self.tokens, self.target,
            remainder=maybe(one, self.remainder), labels=self.labels, provenance=self.provenance,
        )  # fmt: skip

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
        batch = batch or 0
        which, lines, sums = self._lines(k, query, batch)
        notes = [which, self._by_token]
        if self.additive:
            gap = float(self.gap[batch, self.query_row(query, batch)])
            notes.append(f"sums to the model's own number to {gap:.1e}")
        notes.append(provenance_note(self.provenance))
        picture = graphs.bars(lines, sums)
        return with_style(page.panel(title or self.heading, picture, notes=" · ".join(filter(None, notes))), style)

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
        notes = f"beside them: {beside}" if beside else ""
        return with_style(page.panel(heading, matrix.head_grid(cells, heading), notes=notes), style)

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
            return self._plot_mean(k, query, ax)
        which, lines, sums = self._lines(k, query, batch or 0)
        title = " · ".join(filter(None, [shown_target(self.target), which]))
        return figure.signed_bars(lines, title, ax, sums=sums)

    def _plot_mean(self, k: int, query: int | str, ax: Any) -> Any:
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
        title = mean_title(self.target, len(values))
        lines = list(zip(names, means[: len(names)], strict=True))
        return figure.signed_bars(lines, title, ax, sums=sums, intervals=intervals)

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
        which, lines, sums = self._lines(k, query, batch or 0)
        title = " · ".join(filter(None, [shown_target(self.target), which, self._by_token]))
        rows, below = ([(name, number(score)) for name, score in part] for part in (lines, sums))
        terminal.show_table(title, ("part", "score"), rows, below, left=("part",))


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
