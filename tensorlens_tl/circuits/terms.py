"""Named parts that sum to one number of the model."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.collapse import relative_residual, wide
from tensorlens_tl.errors import InvalidInputError

if TYPE_CHECKING:
    import pandas as pd


class Term(NamedTuple):
    """One part and what it adds."""

    name: str
    score: float


@dataclass(frozen=True, eq=False)
class Terms:
    """Named parts of a logit before any final soft cap (or of a logit difference, or of any direction).

    ``scores.sum(-1) + remainder == total`` up to `residual`.

    Attributes:
        names: what the parts are, such as ``"embed"``, ``"L0H3"``, ``"L0H3 → L1H5"``, ``"MLP1.N7"``, ``"L0.b_O"``.
        scores: `[batch, term]`.
        total: the model's own number, `[batch]`.
        remainder: what the named parts leave out, `[batch]`.
        keys: for parts that read other tokens, each token's share, `[batch, term, key]`; None where not asked for.
        tokens: readable tokens of each prompt.
        question: what was asked, for people.
        soft_cap: the cap that the model applies to its logits after `total`, or None.
    """

    names: list[str]
    scores: Float[Tensor, "batch term"]
    total: Float[Tensor, "batch"]
    remainder: Float[Tensor, "batch"]
    tokens: list[list[str]]
    question: str
    keys: Float[Tensor, "batch term key"] | None = None
    soft_cap: float | None = None

    @property
    def residual(self) -> Float[Tensor, "batch"]:
        """abs(Σ scores + remainder − total) / (Σ abs(scores) + abs(remainder)): how far the sum is from holding."""
        return relative_residual(self.scores[:, None], self.remainder[:, None], self.total[:, None])[:, 0]

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        totals = ", ".join(f"{total:.4g}" for total in self.total.tolist())
        residual = f"{float(self.residual.max()):.1e}"
        return f"{type(self).__name__}({len(self)} of {self.question!r}, total={totals}, residual={residual})"

    def _repr_html_(self) -> str:
        from tensorlens_tl.report import circuits, page

        return page.head() + circuits.terms(self)

    def __getitem__(self, name: str) -> Float[Tensor, "batch"]:
        """One part's score in every prompt.

        Raises:
            InvalidInputError: no part of that name.
        """
        if name not in self.names:
            raise InvalidInputError(f"no term {name!r}; there are {', '.join(self.names[:8])}, …")
        return self.scores[:, self.names.index(name)]

    def top(self, k: int = 10, batch: int = 0, *, names: str = "*") -> list[Term]:
        """The k parts of one prompt that are largest in absolute value.

        Args:
            k: how many.
            batch: the prompt.
            names: of parts of such names only: ``"L*H*"`` are heads, ``"L3H*"`` those of one layer, ``"MLP*"`` MLPs.
        """
        order = self.scores[batch].abs().argsort(descending=True).tolist()
        order = [i for i in order if fnmatchcase(self.names[i], names)]
        return [Term(self.names[i], float(self.scores[batch, i])) for i in order[: max(k, 0)]]

    def to_dataframe(self, batch: int = 0) -> "pd.DataFrame":
        """One row per part, in the order of the model, with each token's share where there is one."""
        import pandas as pd

        frame = pd.DataFrame({"term": self.names, "score": self.scores[batch].tolist()})
        if self.keys is not None:
            labels = [f"{number} {token}" for number, token in enumerate(self.tokens[batch])]
            frame = frame.join(pd.DataFrame(wide(self.keys[batch]).cpu().numpy(), columns=labels))
        return frame
