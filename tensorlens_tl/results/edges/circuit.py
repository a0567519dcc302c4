"""Circuits: some edges of a model."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.drawing import figure, matrix, page, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.edges.benchmark import benchmark_fields, benchmark_json
from tensorlens_tl.results.edges.names import ARROW, check_shape
from tensorlens_tl.results.entry import with_style
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.storage import replacing
from tensorlens_tl.results.views import array

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Circuit(Result):
    """Some edges of a model. Everything else is to carry what it carries for the corrupted prompt.

    Attributes:
        sources, destinations, exists: as of `EdgeScores`.
        scores: by which it was chosen, `[source, destination]`.
        selection: which edges are in it, `[source, destination]`.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`.
    """

    sources: list[str]
    destinations: list[str]
    scores: Float[Tensor, "source destination"]
    exists: Bool[Tensor, "source destination"]
    selection: Bool[Tensor, "source destination"]
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_shape(self.sources, self.destinations, self.exists, self.scores, self.selection)
        if bool((self.selection & ~self.exists).any()):
            raise InvalidInputError("Circuit: its selection has a pair that is no edge.")

    def __len__(self) -> int:
        return int(self.selection.sum())

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {int(self.exists.sum())} edges, {len(self.nodes)} nodes)"

    @property
    def edges(self) -> list[str]:
        """The names of its edges."""
        pairs = self.selection.nonzero().tolist()
        return [self.sources[source] + ARROW + self.destinations[destination] for source, destination in pairs]

    @property
    def nodes(self) -> list[str]:
        """The sources that an edge of it leads from."""
        return [name for name, used in zip(self.sources, self.selection.any(1).tolist(), strict=True) if used]

    LOADABLE: ClassVar = ("", ".json")

    @property
    def heading(self) -> str:
        """The title of its page."""
        return f"Circuit of {len(self)} edges"

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per edge of it, largest first: source, destination, score."""
        import pandas as pd

        source, destination = self.selection.nonzero(as_tuple=True)
        scores = self.scores[source, destination].double().cpu()
        order = scores.abs().argsort(descending=True, stable=True).tolist()
        return pd.DataFrame(
            {
                "source": [self.sources[int(source[edge])] for edge in order],
                "destination": [self.destinations[int(destination[edge])] for edge in order],
                "score": scores[order].tolist(),
            }
        )

    def _matrix(self) -> tuple[list[str], list[str], np.ndarray]:
        """The sources and destinations that it has edges at, and the scores of its edges between them."""
        rows = self.selection.any(1).nonzero()[:, 0].tolist()
        columns = self.selection.any(0).nonzero()[:, 0].tolist()
        scores = array(self.scores.masked_fill(~self.selection, 0.0))[np.ix_(rows, columns)]
        return [self.sources[row] for row in rows], [self.destinations[column] for column in columns], scores

    def to_html(self, *, style: bool = True) -> str:
        """A row for each node that an edge leads from, and a column for each that one leads to."""
        rows, columns, scores = self._matrix()
        picture = "<p>No edge.</p>"
        if rows:
            picture = matrix.matrix(rows, columns, scores, label=self.heading, corner="from ↓ to →")
        return with_style(page.panel(self.heading, picture, notes=repr(self)), style)

    def plot(self, *, ax: Any = None) -> Any:
        """The same matrix as a matplotlib heat map (install ``tensorlens-tl[plot]``); returns the axes.

        Args:
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: a circuit without edges.
            ImportError: matplotlib is not installed.
        """
        rows, columns, scores = self._matrix()
        if not rows:
            raise InvalidInputError("plot: this circuit has no edges.")
        return figure.heat_map(scores, rows, columns, self.heading, ax, values=False, names=("from", "to"))

    def show(self, k: int = 10) -> None:
        """Display the matrix in a notebook; elsewhere print the k edges of largest absolute score.

        Args:
            k: how many.
        """
        if page.display_in_notebook(self.to_html):
            return
        lines = self.to_dataframe().head(k).itertuples(index=False, name=None)
        rows = [(source + ARROW + destination, number(score)) for source, destination, score in lines]
        terminal.show_table(repr(self), ("edge", "score"), rows, [], left=("edge",))

    def _keep(self, path: Path) -> Path:
        """Write the JSON of the Mechanistic Interpretability Benchmark (`tensorlens_tl.results.edges.benchmark`)."""
        with replacing(path) as temporary:
            temporary.write_text(benchmark_json(self), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Circuit":
        """Read the JSON that `save` wrote, or the benchmark's. Scores and edges of neurons are not read; null is NaN.

        Raises:
            FileFormatError: no such JSON, or one without all edges of its nodes, those outside the circuit as well.
            OSError: there is no such file.
        """
        return cls(**benchmark_fields(path))
