"""What differs between two runs, as parts that add up: the changed weights of two models, and the routes by which a
change passes each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.drawing import figure, matrix, page, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import (
    Entry,
    check_batch,
    query_row,
    shown_query,
    shown_target,
    some_numbers,
    with_style,
)
from tensorlens_tl.results.means import intervals, mean_of
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.statistics import bootstrap_interval
from tensorlens_tl.results.terms import Terms

if TYPE_CHECKING:
    import pandas as pd

ROUTES = (
    "direct",
    "values", "values, scale", "queries", "queries, scale", "keys", "keys, scale", "gates", "gates, scale",
    "mixer", "mixer, scale", "MLP", "MLP, scale",
    "norms", "constants", "later constants",
)  # fmt: skip
"""The ways in which a change passes a layer."""

SCALE = ", scale"
"""What the name of a route ends with that acts by the scale of a norm."""

HEAD_ROUTES = ROUTES[1:9]
"""Those of them that are heads'."""

LONGEST = 80
"""Letters of a target in the title of a mean: one that names each prompt's own token is longer."""

NOISE = 1e-9
"""What share of a table's largest number is rounding, and printed as zero."""

ROUNDING = 64
"""Units of the dtype's rounding that the number of either model may be off by."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelChange(Terms):
    """What every changed weight of a model adds to the change of a logit; `compare_models` returns one.

    Attributes:
        base, tuned: the two models' own numbers, `[batch, query]`; `total` is the second less the first.
        by: what a term is.
    """

    TENSORS: ClassVar = (*Terms.TENSORS, "base", "tuned")
    FACTS: ClassVar = (*Terms.FACTS, "by")

    base: Float[Tensor, "batch query"] | None = None
    tuned: Float[Tensor, "batch query"] | None = None
    by: str = "matrix"

    @property
    def gap(self) -> Float[Tensor, "batch query"]:
        """abs(Σ scores + remainder − total) beyond the rounding of the two numbers, relative to the terms' size.

        Of a change that has no effect, such as that of a bias of keys, rounding is all there is.
        """
        assert self.remainder is not None
        miss = (self.scores.sum(-1) + self.remainder - self.total).abs()
        if self.base is not None and self.tuned is not None:
            epsilon = torch.finfo(self.total.dtype).eps
            miss = (miss - ROUNDING * epsilon * (self.base.abs() + self.tuned.abs())).clamp_min(0)
        size = self.scores.abs().sum(-1) + self.remainder.abs()
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
        real = torch.take_along_dim(self.mask, self.queries, dim=1)
        prompts, queries = self.queries.shape
        low, high = intervals(self.scores, real, level)
        numbers = {name: getattr(self, name) for name in ("scores", *NUMBERS)}
        target = self.target
        if len(target) > LONGEST:
            target = "change of each prompt's number"
        return replace(
            self,
            **{name: None if value is None else mean_of(value, real) for name, value in numbers.items()},
            low=low,
            high=high,
            target=f"{target}, mean of {prompts} prompts",
            keys=None,
            queries=torch.arange(queries, device=self.queries.device)[None],
            mask=real.any(0)[None],
            tokens=[[f"mean of {prompts} prompts"] * queries],
        )

    def summary(
        self, level: int | float = 0.95, *, query: int | str = -1, names: str = "*", seed: int = 0
    ) -> "pd.DataFrame":
        """The mean of each term over the prompts with its bootstrap interval, the largest first, and of the total.

        Prompts are drawn anew, whole: a term's interval says how its mean would scatter over other prompts like these.

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
        a = self.with_names(names)
        b = other.with_names(names)
        target = self.target
        if other.target != target:
            target = f"{target} − {other.target}"
        pairs = {name: (getattr(a, name), getattr(b, name)) for name in ("scores", "keys", *NUMBERS)}
        tensors = {name: None if x is None or y is None else x - y for name, (x, y) in pairs.items()}
        return replace(a, **tensors, target=target)

    def with_names(self, names: Sequence[str]) -> "ModelChange":
        """With these terms in this order, of which those that it lacks are zero.

        Raises:
            InvalidInputError: one of its own terms is left out, so that the others would no longer sum to the change.
        """
        missing = [name for name in self.names if name not in names]
        if missing:
            raise InvalidInputError(f"names: {missing[0]!r} is a term of this change, and its sum needs it.")
        columns = [names.index(name) for name in self.names]
        scores = self.scores.new_zeros(*self.scores.shape[:2], len(names))
        scores[..., columns] = self.scores
        keys = None
        if self.keys is not None:
            keys = self.keys.new_zeros(*scores.shape, self.keys.shape[-1])
            keys[:, :, columns] = self.keys
        return replace(self, names=list(names), scores=scores, keys=keys, low=None, high=None)


NUMBERS = ("total", "remainder", "base", "tuned")
"""What a `ModelChange` says of each prompt and query."""


@dataclass(frozen=True, eq=False, repr=False)
class ChangeRoutes(Result):
    """By which routes the change of a number passes each layer; `circuits.routes` returns one.

    Every layer's scores sum to the whole change: layers are cuts through one and the same change at different depths,
    and do not add up to each other.

    Attributes:
        layers: what the layer axis is: ``"L0"`` …, and ``"end"``, what follows the last block.
        scores: `[batch, query, layer, route]`, the routes being `ROUTES`: past the layer (``"direct"``); by each head's
            values, queries, keys and gates; through what mixes positions in place of attention, and through the MLP;
            where the norm before a sublayer responds with its scale, under ``", scale"``; by the scales of norms around
            the stream or after a sublayer (``"norms"``); and what the weights of two models add in this layer and after
            it (``"constants"``, ``"later constants"``).
        heads: each head's share of the routes of attention (`HEAD_ROUTES`), `[batch, query, layer, head, route]`.
        total: the change of the number, `[batch, query]`.
        queries: the positions that the query axis stands for, `[batch, query]`.
        mask: True at real tokens, `[batch, pos]`.
        tokens: readable tokens of each prompt.
        target: what the change is of, in words.
        soft_cap: the cap that the model applies to its logits after `total`, or None.
    """

    TENSORS: ClassVar = ("scores", "heads", "total", "queries", "mask")
    FACTS: ClassVar = ("layers", "tokens", "target", "soft_cap")

    layers: list[str]
    scores: Float[Tensor, "batch query layer route"]
    heads: Float[Tensor, "batch query layer head head_route"]
    total: Float[Tensor, "batch query"]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    tokens: list[list[str]]
    target: str
    soft_cap: float | None = None

    @property
    def gap(self) -> Float[Tensor, "batch query layer"]:
        """abs(Σ scores − total) / Σ abs(scores) of every layer: how far its sum is from holding."""
        total = self.total[..., None].expand(self.scores.shape[:-1])
        return relative_gap(self.scores, torch.zeros_like(total), total)

    def __repr__(self) -> str:
        totals = some_numbers(self.total)
        gap = float(self.gap.max())
        return f"ChangeRoutes({self.target!r}, {len(self.layers)} layers, total={totals}, gap={gap:.1e})"

    def __getitem__(self, route: str) -> Float[Tensor, "batch query layer"]:
        """One route's score at every layer.

        Raises:
            InvalidInputError: no such route.
        """
        if route not in ROUTES:
            raise InvalidInputError(f"no route {route!r}; there are {', '.join(ROUTES)}.")
        return self.scores[..., ROUTES.index(route)]

    def at(self, layer: int) -> Terms:
        """The routes through one layer as terms that sum to the whole change, those of attention head by head.

        Args:
            layer: counted from the first; the last, -1, is what follows the blocks.

        Raises:
            InvalidInputError: no such layer.
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
            names += [f"{here}H{head} {route}" for head in range(self.heads.shape[3])]
            parts.append(self.heads[:, :, layer, :, HEAD_ROUTES.index(route)])
        scores = torch.cat(parts, dim=-1)
        return Terms(
            names=names, scores=scores, total=self.total, remainder=torch.zeros_like(self.total),
            queries=self.queries, mask=self.mask, tokens=self.tokens, target=f"{self.target}, at {here}",
            soft_cap=self.soft_cap,
        )  # fmt: skip

    def top(self, k: int = 10, query: int | str = -1, batch: int = 0, *, layer: int) -> list[Entry]:
        """The k routes of largest absolute score through one layer.

        Raises:
            InvalidInputError: k below 1, or no such layer, query or prompt.
        """
        return self.at(layer).top(k, query, batch)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per score: batch, query, query_token, layer, route, score."""
        import pandas as pd

        index = np.indices(self.scores.shape).reshape(4, -1)
        batch = index[0]
        positions = self.queries.cpu().numpy()[batch, index[1]]
        frame = pd.DataFrame({"batch": batch, "query": positions})
        frame["query_token"] = [self.tokens[b][q] for b, q in zip(batch, positions, strict=True)]
        frame["layer"] = [self.layers[i] for i in index[2]]
        frame["route"] = [ROUTES[i] for i in index[3]]
        frame["score"] = self.scores.detach().double().cpu().reshape(-1).numpy()
        return frame.loc[self.mask.cpu().numpy()[batch, positions]].reset_index(drop=True)

    # ------------------------------------------------------------------ showing

    def _table(self, query: int | str, batch: int) -> tuple[str, list[str], np.ndarray]:
        """Which query is shown, the routes that give anything, and their scores `[layer, route]`."""
        check_batch(batch, self.tokens)
        row = query_row(self.queries, self.mask, self.tokens, query, batch)
        scores = self.scores[batch, row]
        used = [column for column in range(len(ROUTES)) if bool(scores[:, column].any())]
        which = shown_query(self.queries, self.tokens, row, batch)
        values = scores[:, used].detach().double().cpu().numpy()
        return which, [ROUTES[column] for column in used], values

    def to_html(self, query: int | str = -1, batch: int = 0, *, title: str = "", style: bool = True) -> str:
        """A row per layer and a column per route; every row sums to the change."""
        which, routes, values = self._table(query, batch)
        heading = title or self.heading
        picture = matrix.matrix(self.layers, routes, values, label=heading, corner="layer ↓ route →")
        gap = float(self.gap[batch].max())
        notes = " · ".join(filter(None, [which, f"every row sums to the change to {gap:.1e}"]))
        return with_style(page.panel(heading, picture, notes=notes), style)

    @property
    def heading(self) -> str:
        """The title of its page."""
        return f"How the {shown_target(self.target)} passes each layer"

    def plot(self, query: int | str = -1, batch: int = 0, *, ax: Any = None) -> Any:
        """A matplotlib heat map, a row per layer and a column per route (install ``tensorlens-tl[plot]``).

        Args:
            query, batch: as in `top`.
            ax: draw here; None makes a figure of fitting size.

        Returns:
            The axes.

        Raises:
            InvalidInputError: no such query or prompt.
            ImportError: matplotlib is not installed.
        """
        _, routes, values = self._table(query, batch)
        return figure.heat_map(values, self.layers, routes, self.heading, ax, names=("layer", "route"))

    def show(self, query: int | str = -1, batch: int = 0) -> None:
        """Display the matrix in a notebook; elsewhere print a row per layer and a column per route.

        Every layer sums to the change. In print, the routes by the scale of a norm are a row below their layer's, in
        the columns of the routes with the scale held.
        """
        if page.display_in_notebook(lambda: self.to_html(query, batch)):
            return
        which, routes, values = self._table(query, batch)
        values[np.abs(values) < NOISE * np.abs(values).max(initial=0.0)] = 0.0
        columns = list(dict.fromkeys(route.removesuffix(SCALE) for route in routes))
        rows: list[tuple[str, ...]] = []
        for layer, scores in zip(self.layers, values.tolist(), strict=True):
            shown = {route: f"{score:+.3g}" for route, score in zip(routes, scores, strict=True)}
            rows.append((layer, *(shown.get(column, "") for column in columns)))
            if any(score and route.endswith(SCALE) for route, score in zip(routes, scores, strict=True)):
                rows.append((f"{layer}{SCALE}", *(shown.get(f"{column}{SCALE}", "") for column in columns)))
        row = query_row(self.queries, self.mask, self.tokens, query, batch)
        title = " · ".join(filter(None, [self.target, which]))
        caption = f"every layer sums to {number(float(self.total[batch, row]))}"
        terminal.show_table(title, ("layer", *columns), rows, left=("layer",), caption=caption)
