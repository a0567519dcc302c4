"""A number of every attention head: how much it attends where a kind of head would."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.drawing import figure, matrix
from tensorlens_tl.results.entry import check_batch, prompts_in_words
from tensorlens_tl.results.scores import Bars, Parts, Scored, long_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(Scored):
    """A number of every head and prompt, between 0 and 1: a mean of attention over the tokens that it is about.

    `top`, `show` and `plot` take `batch`, and are of the mean over prompts without it.

    Attributes:
        scores: `[batch, layer, head]`; NaN of a head that a layer lacks, and of a prompt without such a token.
        counts: how many tokens of each prompt the mean is over, `[batch]`.
        target: what is attended to, in words.
        provenance: model name, class, TransformerLens version, weight processing, dtype, user-installed hooks.
    """

    HEADING: ClassVar = "Attention {}"
    BY_PLACE: ClassVar = {"to_html": ("batch",), "plot": ("batch",), "show": ("k", "batch"), "top": ("k", "batch")}

    scores: Float[Tensor, "batch layer head"]
    counts: Int[Tensor, "batch"]
    target: str
    provenance: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        prompts, layers, heads = self.scores.shape
        best = self.top(1)[0]
        sizes = f"{prompts_in_words(prompts)}, {layers} × {heads} heads"
        return f"HeadScores({self.target!r}, {sizes}, {best.name}={best.score:.3f})"

    def mean(self) -> Float[Tensor, "layer head"]:
        """The mean over the prompts that have such tokens."""
        return self.scores.nanmean(0)

    def _parts(self, batch: int | None = None) -> Parts:
        """The heads that there are, of one prompt or of the mean over prompts."""
        scores = self._plane(batch)
        names = [f"L{layer}H{head}" for layer, head in scores.isfinite().nonzero().tolist()]
        return Parts(scores[scores.isfinite()], names)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per prompt and head: batch, layer, head, target, score."""
        axes = dict.fromkeys(self._axes()["scores"])
        return long_table(self, self.scores, axes, real=self.scores.isfinite().cpu(), target=self.target)

    def _plane(self, batch: int | None) -> Float[Tensor, "layer head"]:
        if batch is None:
            return self.mean()
        check_batch(batch, list(self.scores))
        return self.scores[batch]

    def _cells(self, batch: int | None) -> dict[tuple[int, str], float]:
        """The scores of the heads that there are, by layer and column."""
        plane = self._plane(batch)
        return {(layer, f"H{head}"): float(plane[layer, head]) for layer, head in plane.isfinite().nonzero().tolist()}

    def _title(self, batch: int | None) -> str:
        count = int(self.counts.sum()) if batch is None else int(self.counts[batch])
        tokens = f"mean over {count} tokens"
        if batch is not None:
            return f"{self.heading} · prompt {batch} · {tokens}"
        return f"{self.heading} · {tokens} of {prompts_in_words(len(self.scores))}"

    def _html(self, k: int, batch: int | None = None) -> str:
        """A row for each layer and a column for each head."""
        picture = matrix.head_grid(self._cells(batch), self.heading)
        return self._panel(picture, title=self._title(batch))

    def _figure(self, k: int, batch: int | None = None, *, ax: Any) -> Any:
        return self.plot_heads(batch, ax=ax)

    def plot_heads(self, batch: int | None = None, *, ax: Any = None) -> Any:
        """Heads as a matplotlib heat map, a row per layer, in colours from zero upwards (extra ``plot``).

        Args:
            batch: as in `top`.
            ax: draw here; None makes a figure of fitting size.

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
