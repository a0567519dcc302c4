"""The routes by which the change of a number passes each layer, as cuts that each sum to all of it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.drawing import figure, matrix, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import some_numbers
from tensorlens_tl.results.scores import Parts, PartScores, long_table, refuse_ranked
from tensorlens_tl.results.terms import Terms

if TYPE_CHECKING:
    import pandas as pd

ROUTES = (
    "direct",
    "values", "values, scale", "queries", "queries, scale", "keys", "keys, scale", "gates", "gates, scale",
    "cross values", "cross queries", "cross queries, scale", "cross keys",
    "mixer", "mixer, scale", "MLP", "MLP, scale",
    "norms", "constants", "later constants",
)  # fmt: skip
"""The ways in which a change passes a layer."""

SCALE = ", scale"
"""What the name of a route ends with that acts by the scale of a norm."""

HEAD_ROUTES = ROUTES[ROUTES.index("values") : ROUTES.index("mixer")]
"""Those of them that are heads'."""

CROSS = "cross "
"""What the name of a route begins with that is one of heads of cross-attention."""

NOISE = 1e-9
"""What share of a table's largest number is rounding, and printed as zero."""


@dataclass(frozen=True, eq=False, repr=False)
class ChangeRoutes(PartScores):
    """By which routes the change of a number passes each layer; `circuits.routes` returns one.

    Every layer's scores sum to the whole change: layers are cuts through one and the same change at different depths,
    and do not add up to each other.

    `show`, `plot` and `to_html` take `query` and `batch`, and are of the mean over several prompts where no `batch` is
    chosen; `top` also needs a `layer`.

    Attributes:
        layers: what the layer axis is: ``"L0"`` …, and ``"end"``, what follows the last block.
        scores: `[batch, query, layer, route]`, the routes being `ROUTES`: past the layer (``"direct"``); by each head's
            values, queries, keys and gates; by heads of an encoder–decoder's cross-attention (``"cross values"``,
            ``"cross queries"``, ``"cross keys"``); through what mixes positions in place of attention, and the MLP;
            where the norm before a sublayer responds with its scale, under ``", scale"``; by the scales of norms around
            the stream or after a sublayer (``"norms"``); and what the weights of two models add in this layer and after
            it (``"constants"``, ``"later constants"``).
        heads: each head's share of the routes of attention (`HEAD_ROUTES`), `[batch, query, layer, head, route]`;
            under the routes of cross-attention the heads are its own.
        total: the change of the number, `[batch, query]`.
        queries, mask, tokens, target, provenance: as of `Attribution`.
        soft_cap: the cap that the model applies to its logits after `total`, or None.
    """

    NUMBERS: ClassVar = ("scores", "heads", "total")
    NAMES: ClassVar = {"layer": "layers"}
    HEADING: ClassVar = "How the {} passes each layer"
    BY_PLACE: ClassVar = dict.fromkeys(("to_html", "plot", "show"), ("query", "batch"))

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
            if route.startswith(CROSS) and not bool(self[route].any()):
                continue  # in most models there is no cross-attention
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
        """The routes through one layer."""
        return self.at(layer)._parts(query, batch)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per score: batch, query, query_token, layer, route, score."""
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
        """What is shown, in words; the routes that give anything; their scores `[layer, route]`, and their sum."""
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
        """A row per layer and a column per route; every row sums to the change."""
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
        """A row per layer and a column per route; those by the scale of a norm are a row below their layer's, in the
        columns of the routes with the scale held.
        """
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
