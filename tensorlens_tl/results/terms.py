"""Named parts of one number of the model: the contribution of each component, head, path, feature or changed weight.

Also the routes by which its change passes each layer; each layer's routes sum to the whole change.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields as dataclass_fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Seed, whole_number
from tensorlens_tl.algebra.numerics import maybe, relative_gap
from tensorlens_tl.drawing import Axes, figure, matrix, page, terminal
from tensorlens_tl.drawing.marks import counted, number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import (
    largest,
    mean_title,
    shown_prompt,
    shown_target,
    some_numbers,
    targets_of_queries,
)
from tensorlens_tl.results.scores import Bars, Parts, PartScores, long_table, no_part, refuse_ranked
from tensorlens_tl.results.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

Kind = TypeVar("Kind", bound="Terms")

ROUTES = (
    "direct",
    "values", "values, scale", "queries", "queries, scale", "keys", "keys, scale", "gates", "gates, scale",
    "cross values", "cross queries", "cross queries, scale", "cross keys",
    "mixer", "mixer, scale", "MLP", "MLP, scale",
    "norms", "constants", "later constants",
)  # fmt: skip
"""The routes by which a change can pass a layer."""

SCALE = ", scale"
"""The ending of a route that acts through the scale of a norm."""

HEAD_ROUTES = ROUTES[ROUTES.index("values") : ROUTES.index("mixer")]
"""The routes that go through heads."""

CROSS = "cross "
"""The prefix of a route that goes through cross-attention."""

NOISE = 1e-9
"""Numbers below this share of a table's largest are rounding errors, printed as zero."""

BESIDE = 6
"""How many terms are listed below a grid of heads, for lack of a cell in it."""

BY_TOKEN = "each token's share: to_dataframe()"
"""Where to find each part's shares by token, which lists of parts do not show."""

LONGEST = 80
"""Longer targets, which name each prompt's own token, are shortened in the title of a mean."""


@dataclass(frozen=True, eq=False)
class Terms(PartScores):
    """Named parts of a logit before any final soft cap (or of a logit difference, or any direction).

    If `additive`, ``scores.sum(-1) + remainder == total`` up to `gap`. Total effects are not additive: an effect
    through two parts counts for both. `top`, `show`, `plot` and `to_html` take `query` and `batch`, by default the mean
    over prompts. ``top(names="L*H*")`` selects heads, ``"L3H*"`` those of one layer, ``"MLP*"`` MLPs.

    Attributes:
        names: names such as ``"embed"``, ``"L0H3"``, ``"L0H3 → L1H5"``, ``"MLP1.N7"``, ``"L0.b_O"``.
        scores: `[batch, query, term]`.
        total: the model's own number, `[batch, query]`.
        remainder: the part of the total outside these terms, `[batch, query]`; None if they are not additive.
        queries, mask, tokens, target, provenance: as in `Attribution`.
        low, high: for a `mean`, the interval of each part, `[batch, query, term]`; otherwise None.
        counts: for a `mean`, how many prompts have each query, `[batch, query]`; otherwise None.
        keys: each part's score by the token it reads, `[batch, query, term, key]`, NaN for parts that read none; None
            if not computed.
        soft_cap: the cap that the model applies to its logits after `total`, or None.
        labels: alternative names of parts, such as a dictionary's descriptions of features, for pictures and tables.
    """

    NUMBERS: ClassVar = ("scores", "total", "remainder")
    NAMES: ClassVar = {"term": "names"}
    HEADING: ClassVar = "What adds to {}"

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

    @property
    def additive(self) -> bool:
        """Whether scores and remainder sum to the total."""
        return self.remainder is not None

    @property
    def gap(self) -> Float[Tensor, "batch query"]:
        """abs(Σ scores + remainder − total) / (Σ abs(scores) + abs(remainder)): how far the sum misses the total.

        Raises:
            InvalidInputError: the parts are not additive.
        """
        if self.remainder is None:
            raise InvalidInputError(f"gap: these {self.target} effects are not additive, so there is no sum to check.")
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
        """Return one part's score for every prompt and query; raise `InvalidInputError` for an unknown part."""
        if name not in self.names:
            raise no_part(name, self.names, "term")
        return self.scores[..., self.names.index(name)]

    def _aligned(self, other: Any) -> tuple[Any, Any]:
        for what, first, second in (
            ("number of prompts", len(self.queries), len(other.queries)),
            ("number of tokens", self.mask.sum(1).tolist(), other.mask.sum(1).tolist()),
            ("queries", self.queries.tolist(), other.queries.tolist()),
        ):
            if first != second:
                raise InvalidInputError(f"difference: the two differ in {what}; subtract terms of the same positions.")
        if not set(self.names) & set(other.names):
            raise InvalidInputError(
                f"difference: no part has the same name ({self.names[0]!r} …, {other.names[0]!r} …); compute both with "
                "the same by=."
            )
        refuse_ranked(self.target, other.target)
        soft_cap = self.soft_cap if self.soft_cap == other.soft_cap else None
        plain = {"low": None, "high": None, "counts": None, "soft_cap": soft_cap}
        first, second = (result._changed(**plain) for result in (self, other))
        if first.names != second.names:
            names = list(dict.fromkeys([*first.names, *second.names]))
            first, second = (result._changed(keys=None).with_names(names) for result in (first, second))
        return replace(first, labels={**other.labels, **self.labels}), second

    def with_names(self: Kind, names: Sequence[str]) -> Kind:
        """Return these parts in this order, zero if missing; raise `InvalidInputError` if one of its own is omitted."""
        missing = [name for name in self.names if name not in names]
        if missing:
            raise InvalidInputError(f"names: {missing[0]!r} is a term of this change, and its sum needs it.")
        columns = [names.index(name) for name in self.names]

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(*values.shape[:2], len(names), *values.shape[3:]).index_copy(
                2, torch.tensor(columns, device=values.device), values
            )

        by_term = [name for name, axes in self._axes().items() if "term" in axes]
        parts: dict[str, Any] = {name: spread(getattr(self, name)) for name in by_term}
        return replace(self, names=list(names), **parts | {"low": None, "high": None})

    def _changed(self, **fields: Any) -> "Terms":
        """Return the result with some fields replaced, as plain `Terms`: other data belongs to single prompts."""
        return Terms(**{field.name: getattr(self, field.name) for field in dataclass_fields(Terms)} | fields)

    def _parts(self, query: int | str = -1, batch: int | None = None, *, names: str = "*") -> Parts:
        """Return the parts of one query, for one prompt or the mean over several; `names` as in `top`."""
        of, prompt, row = self._at(query, batch)
        indices = [i for i, name in enumerate(self.names) if fnmatchcase(name, names)]
        return Parts(of.scores[prompt, row, indices], [self.names[i] for i in indices], None, self.labels)

    def _at(self, query: int | str, batch: int | None) -> tuple["Terms", int, int]:
        """Return the terms to show (the mean over several prompts if none is chosen), with prompt and row."""
        if batch is None and len(self.tokens) > 1:
            return self._of_query(query).mean(), 0, 0
        return self, batch or 0, self.query_row(query, batch or 0)

    def to_dataframe(self, *, keys: bool | None = None) -> "pd.DataFrame":
        """Return one row per score: batch, query, query_token, term, target, score; `keys` adds a row per source token.

        Shares exist after ``by="head_token"`` or ``positions=True``, and are then included in table files too;
        ``keys=False`` gives one row per part. Parts without a source token have one row without `key` and `key_token`.
        A `mean` adds ``n``, the number of prompts with the query, and ``low`` and ``high``, before the score.

        Raises:
            InvalidInputError: `keys` is true, but there are no shares.

        >>> effects = tlens.circuits.logit_attribution(frozen, " value")
        >>> table = effects.to_dataframe()
        >>> len(table) == len(effects.names)
        True
        """
        import pandas as pd

        if keys is None:
            keys = self.keys is not None
        values = self.keys if keys else self.scores
        if values is None:
            raise InvalidInputError(
                "keys: there are no shares by source token; compute them with logit_attribution(by='head_token'), or "
                "with positions=True in compare_models and patch_scores."
            )
        columns: dict[str, Any] = {"target": np.array(targets_of_queries(self.target, self.queries), dtype=object)}
        columns |= {name: column.cpu() for name, column in self._columns(keys).items() if column is not None}
        axes = dict.fromkeys(self._axes()["keys" if keys else "scores"]) | {"term": self.names}
        frame = long_table(self, values, axes, **columns)
        if keys:  # parts without a source token get a row of their own, so that rows still sum
            whole = self.to_dataframe(keys=False)
            keyless = frame.loc[frame["score"].isna(), "term"].unique()
            frame = pd.concat([frame.dropna(subset="score"), whole.loc[whole["term"].isin(keyless)]])
        return frame.reset_index(drop=True)

    def _columns(self, keys: bool) -> dict[str, Tensor | None]:
        """Return additional columns for a table of parts, or of their shares by token."""
        return {"n": self.counts} | ({} if keys else {"low": self.low, "high": self.high})

    # ------------------------------------------------------------------ showing

    def _bars(self, k: int, query: int | str = -1, batch: int | None = None) -> Bars:
        """Return bars of one query's k largest parts, the rest, and the sums; means for several prompts."""
        of, prompt, row = self._at(query, batch)
        scores = of.scores[prompt, row].double()
        largest_parts = largest(scores, self.names, k, labels=self.labels)
        parts = {entry.labelled: [self.names.index(entry.name)] for entry in largest_parts}
        total = float(of.total[prompt, row])
        notes = [of._which(prompt, row)]
        sums = []
        exact = ""
        if of.remainder is not None:
            parts |= self._rest(scores, [index for indices in parts.values() for index in indices])
            sums = [("total", total)]
            exact = f"sums to the model's own number to {float(of.gap[prompt, row]):.1e}"
        else:  # a rule with a total below it would suggest a sum
            left = len(self) - len(parts)
            notes.append(f"effects on {number(total)}, which do not add up{f'; {left} more' if left else ''}")
        lines = [(name, float(scores[indices].sum())) for name, indices in parts.items()]
        has_remainder = of.remainder is not None and bool(of.remainder[prompt, row])
        if of.remainder is not None and has_remainder:
            lines.append(("everything not listed", float(of.remainder[prompt, row])))
        by_token = BY_TOKEN if of.keys is not None else ""
        title, printed = (" · ".join(filter(None, [shown_target(of.target), *notes, more])) for more in ("", by_token))
        bars = Bars(printed, lines, sums, of.heading, [*notes, by_token, exact], figure_title=title)
        if of is self:
            return bars
        every = self._of_query(query)
        values = [every.scores[:, 0, indices].sum(1) for indices in parts.values()]
        values += [every.remainder[:, 0]] if every.remainder is not None and has_remainder else []
        values += [every.total[:, 0]] if sums else []
        low, high = bootstrap_interval(torch.stack(values).detach().double().cpu())
        intervals = list(zip(low.tolist(), high.tolist(), strict=True))
        return replace(bars, figure_title=mean_title(self.target, len(self.tokens)), intervals=intervals)

    def _rest(self, scores: Float[Tensor, "term"], shown: Sequence[int]) -> dict[str, list[int]]:
        """Group the parts that are not shown into one row.

        If its sum exceeds every part shown, use a row for each kind of part or, for a single kind, for each layer.
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
        if self.queries.shape[1] == 1:
            return self
        rows = [self.query_row(query, prompt) for prompt in range(len(self.tokens))]
        at = torch.arange(len(rows)), torch.tensor(rows)
        values = {name: maybe(lambda of: of[at][:, None], getattr(self, name)) for name in (*self.NUMBERS, "queries")}
        return self._changed(**values, keys=None)

    def heads_to_html(self, query: int | str = -1, batch: int = 0, *, title: str = "", style: bool = True) -> str:
        """Draw heads as a grid with a row per layer and a column per head, then MLPs; empty if there are none.

        The largest other terms (embedding, unembedding, norms, biases) are listed below.
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
        grid = page.panel(heading, matrix.head_grid(cells, heading), notes=" · ".join(notes))
        return page.head(grid) + grid if style else grid

    def plot_heads(self, query: int | str = -1, batch: int | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw heads and MLPs as a matplotlib heat map, a row per layer (extra ``plot``).

        Args:
            query: as in `top`.
            batch: one prompt; None for the only one, or for the mean over several.
            ax: the axes to draw on; None creates a figure of suitable size.

        Raises:
            InvalidInputError: no term is a head or an MLP, or no such query or prompt.
            ImportError: matplotlib is not installed.

        >>> tlens.circuits.logit_attribution(frozen, " value", by="head").plot_heads()
        <Axes: ...>
        """
        of, prompt, row = self._at(query, batch)
        title = " · ".join(filter(None, [shown_target(self.target), shown_prompt(prompt, len(of.tokens))]))
        if of is not self:
            title = mean_title(self.target, len(self.tokens))
        cells = self._cells(of.scores[prompt, row])
        if not cells:
            raise InvalidInputError("plot_heads: no term is a head or an MLP; logit_attribution(by='head') has them.")
        return figure.head_map(cells, title, ax)

    def _cells(self, scores: Float[Tensor, "term"]) -> dict[tuple[int, str], float]:
        """Return the scores of heads and MLPs by layer and column."""
        named = {_cell(name): score for name, score in zip(self.names, scores.tolist(), strict=True)}
        return {cell: score for cell, score in named.items() if cell is not None}


def _counted(count: int, kind: str) -> str:
    """Name a row of parts that are not shown: ``"297 others"``, ``"12 other heads"``."""
    noun, space, where = kind.partition(" ")
    return counted(count, f"other {noun}".strip()) + space + where


KINDS = {
    r"L\d+(\.cross\.)?H\d+": "head",
    r"MLP\d+": "MLP",
    r"MLP\d+\.N\d+": "neuron",
    r".* → .*": "path",
}
"""Kinds of parts, by the pattern of their names."""


def _kind(name: str) -> str:
    return next((kind for pattern, kind in KINDS.items() if re.fullmatch(pattern, name)), "part")


def _layer(name: str) -> str:
    match = re.match(r"(?:L|MLP)(\d+)", name)
    return f"part of layer {match[1]}" if match else "part"


def _cell(name: str) -> tuple[int, str] | None:
    """Return layer and column of a head or MLP: (3, "H1") for ``"L3H1"``, (3, "cross.H1") for ``"L3.cross.H1"``."""
    match = re.fullmatch(r"L(\d+)(H\d+|\.cross\.H\d+)|MLP(\d+)", name)
    if match is None:
        return None
    layer, head, mlp = match.groups()
    return int(layer or mlp), (head or "MLP").removeprefix(".")


@dataclass(frozen=True, eq=False, repr=False)
class Paths(Terms):
    """Scores of paths for one query, by order.

    Attributes:
        nodes: each path's nodes, first to last; empty for the direct path.
        orders: the sum of all paths of each order, listed or not, `[batch, order]`; the last entry is all longer ones.
            They come from a separate pull, so `gap` checks the listed paths.
    """

    nodes: Sequence[Sequence[str]] = ()
    orders: Float[Tensor, "batch order"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "nodes", tuple(map(tuple, self.nodes)))

    def with_names(self, names: Sequence[str]) -> "Paths":
        """Return these paths in this order; see `Terms.with_names`."""
        nodes = dict(zip(self.names, self.nodes, strict=False))  # b_U, the last name, is no path
        return replace(super().with_names(names), nodes=tuple(nodes.get(name, ()) for name in names))


@dataclass(frozen=True, eq=False, repr=False)
class FeatureEdges(Terms):
    """Edges from an earlier dictionary's parts into a later one's `features`, one row of `scores` per query."""

    features: Sequence[int] = ()

    def into(self, feature: int) -> Terms:
        """Return the edges into a feature at each of its positions; raise `InvalidInputError` for another feature."""
        rows = [row for row, number in enumerate(self.features) if number == feature]
        if not rows:
            raise InvalidInputError(f"no edges into feature {feature}; there are {list(dict.fromkeys(self.features))}.")
        chosen = {name: getattr(self, name)[:, rows] for name in (*Terms.NUMBERS, "queries")}
        target = self.target.replace("pre-activations", f"pre-activation of F{feature}", 1)
        return self._changed(**chosen, target=target, keys=None)

    def to_dataframe(self, *, keys: bool | None = None) -> "pd.DataFrame":
        """Return one row per edge: batch, query, query_token, feature (of the later one), term, target, score."""
        import pandas as pd

        frames = []
        for feature in dict.fromkeys(self.features):
            frame = self.into(feature).to_dataframe(keys=keys)
            frame.insert(list(frame.columns).index("term"), "feature", feature)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True, eq=False, repr=False)
class ModelChange(Terms):
    """The contribution of every changed weight to the change of a logit, from `compare_models`.

    Attributes:
        base, tuned: the two models' own numbers, `[batch, query]`; `total` is the second minus the first.
        by: what each term stands for.
    """

    NUMBERS: ClassVar = (*Terms.NUMBERS, "base", "tuned")

    base: Float[Tensor, "batch query"] | None = None
    tuned: Float[Tensor, "batch query"] | None = None
    by: str = "matrix"

    @property
    def gap(self) -> Float[Tensor, "batch query"]:
        """abs(Σ scores + remainder − total), relative to the size of the terms and of the two models' numbers.

        The total is a difference of two rounded numbers: if a change has no effect (as with a bias of keys), it is pure
        rounding error.
        """
        assert self.remainder is not None
        miss = (self.scores.sum(-1) + self.remainder - self.total).abs()
        size = self.scores.abs().sum(-1) + self.remainder.abs()
        if self.base is not None and self.tuned is not None:
            size = size + self.base.abs() + self.tuned.abs()
        return miss / size.clamp_min(torch.finfo(size.dtype).tiny)

    @property
    def _short_target(self) -> str:
        return self.target if len(self.target) <= LONGEST else "change of each prompt's number"

    def _changed(self, **fields: Any) -> "ModelChange":
        return replace(self, **fields)

    def summary(
        self, level: int | float = 0.95, *, query: int | str = -1, names: str = "*", seed: Seed = 0
    ) -> "pd.DataFrame":
        """Return each term's mean over prompts with its bootstrap interval, largest first, and that of the total.

        Whole prompts are resampled: the interval shows how the mean would vary over other prompts like these.

        Args:
            level: the confidence of the intervals.
            query: one of each prompt's queries, as in `Terms.query_row`.
            names: only some terms: ``"L*H*"`` selects heads, ``"L1.*"`` the weights of one layer.
            seed: the seed of the resampling.

        Returns:
            One row per term, and ``"total"`` last: `mean`, `low`, `high`; bounds are NaN for a single prompt.

        Raises:
            InvalidInputError: a level outside (0, 1), no such term, or no such query.

        Source: `tensorlens_tl.evaluate.bootstrap_interval` (percentiles).

        >>> change = tlens.compare_models(model, model, [text, "Set the name"], " value")
        >>> list(change.summary().index)
        ['embed', 'total']
        """
        import pandas as pd

        columns = [column for column, name in enumerate(self.names) if fnmatchcase(name, names)]
        if not columns:
            raise InvalidInputError(f"names={names!r}: there are {', '.join(self.names[:8])}, …")
        for prompt in range(len(self.tokens)):
            self.query_row(query, prompt)
        one = self._of_query(query)
        values = torch.cat([one.scores[:, 0, columns], one.total], dim=1).detach().double().cpu().mT
        low, high = bootstrap_interval(values, level, seed=seed)
        frame = pd.DataFrame(
            {"mean": values.mean(-1).tolist(), "low": low.tolist(), "high": high.tolist()},
            index=pd.Index([*(self.names[column] for column in columns), "total"], name="term"),
        )
        by_size = frame["mean"].iloc[:-1].abs().sort_values(ascending=False, kind="stable").index
        return frame.loc[[*by_size, "total"]]

    def _aligned(self, other: Any) -> tuple[Any, Any]:
        if self.by != other.by or self.queries.shape != other.queries.shape:
            raise InvalidInputError(
                f"a - b: terms by {self.by!r} for {tuple(self.queries.shape)} prompts and queries, and by {other.by!r} "
                f"for {tuple(other.queries.shape)}. Compare both by the same terms; for other prompts, their means."
            )
        names = list(dict.fromkeys([*self.names, *other.names]))
        return self.with_names(names), other.with_names(names)

    def _difference(self, other: Any) -> str:
        return self.target if other.target == self.target else super()._difference(other)


@dataclass(frozen=True, eq=False, repr=False)
class ChangeRoutes(PartScores):
    """The routes by which the change of a number passes each layer, from `circuits.routes`.

    Every layer's scores sum to the whole change: layers are cuts through the same change at different depths, so they
    must not be added together. `show`, `plot` and `to_html` take `query` and `batch`, by default the mean over prompts;
    `top` also needs a `layer`.

    Attributes:
        layers: names of the layer axis: ``"L0"`` …, and ``"end"``, everything after the last block.
        scores: `[batch, query, layer, route]`, with routes as in `ROUTES`: past the layer (``"direct"``); through each
            head's values, queries, keys and gates; through cross-attention (``"cross values"``, ``"cross queries"``,
            ``"cross keys"``); through a mixer in place of attention, and the MLP; through the scale of the norm before
            a sublayer (``", scale"``); through other norms (``"norms"``); and the changed weights of two models in this
            layer and after it (``"constants"``, ``"later constants"``).
        heads: each head's share of the attention routes (`HEAD_ROUTES`), `[batch, query, layer, head, route]`; for
            routes through cross-attention, the heads are those of cross-attention.
        total: the change of the number, `[batch, query]`.
        queries, mask, tokens, target, provenance: as in `Attribution`.
        soft_cap: the cap that the model applies to its logits after `total`, or None.
    """

    NUMBERS: ClassVar = ("scores", "heads", "total")
    NAMES: ClassVar = {"layer": "layers"}
    HEADING: ClassVar = "How the {} passes each layer"

    layers: list[str]
    scores: Float[Tensor, "batch query layer route"]
    heads: Float[Tensor, "batch query layer head head_route"]
    total: Float[Tensor, "batch query"]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    tokens: list[list[str]]
    target: str
    soft_cap: float | None = None
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def gap(self) -> Float[Tensor, "batch query layer"]:
        """abs(Σ scores − total) / Σ abs(scores) for every layer: how far its sum misses the total."""
        total = self.total[..., None].expand(self.scores.shape[:-1])
        return relative_gap(self.scores, torch.zeros_like(total), total)

    def __repr__(self) -> str:
        totals = some_numbers(self.total)
        gap = float(self.gap.max())
        return f"ChangeRoutes({self.target!r}, {len(self.layers)} layers, total={totals}, gap={gap:.1e})"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, route: str) -> Float[Tensor, "batch query layer"]:
        """Return one route's score at every layer; raise `InvalidInputError` for an unknown route."""
        if route not in ROUTES:
            raise InvalidInputError(f"no route {route!r}; there are {', '.join(ROUTES)}.")
        return self.scores[..., ROUTES.index(route)]

    def at(self, layer: int) -> Terms:
        """Return the routes through one layer as terms that sum to the whole change, with attention split by head.

        Layer -1 is everything after the last block. An unknown layer raises `InvalidInputError`.
        """
        count = len(self.layers)
        layer = whole_number("layer", layer, -count, count - 1, why="a layer of this result") % count
        here = self.layers[layer]
        names: list[str] = []
        parts: list[Tensor] = []
        for column, route in enumerate(ROUTES):
            if route not in HEAD_ROUTES:
                names.append(route)
                parts.append(self.scores[:, :, layer, column, None])
                continue
            if route.startswith(CROSS) and not bool(self[route].any()):
                continue  # most models have no cross-attention
            attention = f"{here}.cross." if route.startswith(CROSS) else here
            names += [f"{attention}H{head} {route.removeprefix(CROSS)}" for head in range(self.heads.shape[3])]
            parts.append(self.heads[:, :, layer, :, HEAD_ROUTES.index(route)])
        scores = torch.cat(parts, dim=-1)
        return Terms(
            names=names, scores=scores, total=self.total, remainder=torch.zeros_like(self.total),
            queries=self.queries, mask=self.mask, tokens=self.tokens, target=f"{self.target}, at {here}",
            soft_cap=self.soft_cap, provenance=self.provenance,
        )  # fmt: skip

    def _parts(self, query: int | str = -1, batch: int | None = None, *, layer: int) -> Parts:
        return self.at(layer)._parts(query, batch)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per score: batch, query, query_token, layer, route, score."""
        axes = dict.fromkeys(self._axes()["scores"]) | {"layer": self.layers, "route": ROUTES}
        return long_table(self, self.scores, axes)

    def _aligned(self, other: Any) -> tuple[Any, Any]:
        shapes = [(*result.heads.shape, result.queries.tolist()) for result in (self, other)]
        if shapes[0] != shapes[1]:
            raise InvalidInputError("a − b: routes of other prompts, queries, layers or heads; subtract their means.")
        refuse_ranked(self.target, other.target)
        return self, other

    # ------------------------------------------------------------------ showing

    def _table(self, query: int | str, batch: int | None) -> tuple[str, list[str], np.ndarray, float]:
        """Return a description, the non-zero routes, their scores `[layer, route]`, and their sum."""
        prompts = [batch or 0]
        if batch is None:
            prompts = list(range(len(self.tokens)))
        rows = [self.query_row(query, prompt) for prompt in prompts]
        which = f"mean of {len(rows)} prompts"
        if len(rows) == 1:
            which = self._which(prompts[0], rows[0])
        scores = self.scores[prompts, rows].detach().double().mean(0)
        used = [column for column in range(len(ROUTES)) if bool(scores[:, column].any())]
        total = float(self.total[prompts, rows].double().mean())
        return which, [ROUTES[column] for column in used], scores[:, used].cpu().numpy(), total

    def _html(self, k: int, query: int | str = -1, batch: int | None = None, *, title: str = "") -> str:
        """Draw a row per layer and a column per route; every row sums to the change."""
        which, routes, values, _ = self._table(query, batch)
        label = title or self.heading
        picture = matrix.matrix(self.layers, routes, values, label=label, corner="layer ↓ route →")
        sums = f"every row sums to the change to {float(self.gap.max()):.1e}"
        return self._panel(picture, title=title, notes=[which, sums])

    def _figure(self, k: int, query: int | str = -1, batch: int | None = None, *, ax: Any) -> Any:
        which, routes, values, _ = self._table(query, batch)
        title = self.heading
        if len(self.tokens) > 1:
            title = f"{title} · {which}"
        return figure.heat_map(values, self.layers, routes, title, ax, names=("layer", "route"))

    def _print(self, k: int, query: int | str = -1, batch: int | None = None) -> None:
        """Print a row per layer and a column per route; routes through a norm's scale go in a row below."""
        which, routes, values, total = self._table(query, batch)
        values[np.abs(values) < NOISE * np.abs(values).max(initial=0.0)] = 0.0
        columns = list(dict.fromkeys(route.removesuffix(SCALE) for route in routes))
        rows: list[tuple[str, ...]] = []
        for layer, scores in zip(self.layers, values.tolist(), strict=True):
            shown = {route: f"{score:+.3g}" for route, score in zip(routes, scores, strict=True)}
            rows.append((layer, *(shown.get(column, "") for column in columns)))
            if any(score and route.endswith(SCALE) for route, score in zip(routes, scores, strict=True)):
                rows.append((f"{layer}{SCALE}", *(shown.get(f"{column}{SCALE}", "") for column in columns)))
        title = " · ".join(filter(None, [self.target, which]))
        caption = f"every layer sums to {number(total)}"
        terminal.show_table(title, ("layer", *columns), rows, left=("layer",), caption=caption)
