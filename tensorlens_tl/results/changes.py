"""What the changed weights of two models add to the change of a number, as parts that add up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import both_provenances
from tensorlens_tl.results.means import intervals, mean_of, mean_queries, mean_words
from tensorlens_tl.results.statistics import bootstrap_interval
from tensorlens_tl.results.terms import Terms

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 80
"""Letters of a target in the title of a mean: one that names each prompt's own token is longer."""


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
        real = torch.take_along_dim(self.mask, self.queries, dim=1)
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
            counts=real.sum(0)[None],
            target=f"{target}, {mean_words(real)}",
            keys=None,
            **mean_queries(real),
        )

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
        a = self.with_names(names)
        b = other.with_names(names)
        target = self.target
        if other.target != target:
            target = f"{target} − {other.target}"
        pairs = {name: (getattr(a, name), getattr(b, name)) for name in ("scores", "keys", *NUMBERS)}
        tensors = {name: None if x is None or y is None else x - y for name, (x, y) in pairs.items()}
        provenance = both_provenances(self.provenance, other.provenance)
        return replace(a, **tensors, target=target, provenance=provenance)

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
