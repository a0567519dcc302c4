"""What the features of an early dictionary add to those of a late one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.terms import Terms

if TYPE_CHECKING:
    import pandas as pd


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
        fields: dict[str, Any] = {
            name: getattr(self, name)[:, rows] for name in ("scores", "total", "queries", "remainder")
        }
        target = self.target.replace("pre-activations", f"pre-activation of F{feature}", 1)
        fields |= {"names": self.names, "mask": self.mask, "tokens": self.tokens, "labels": self.labels}
        fields["provenance"] = self.provenance
        return Terms(target=target, **fields)

    def to_dataframe(self, *, keys: bool | None = None) -> "pd.DataFrame":
        """One line per edge: batch, query, query_token, feature (the late one), term, target, score."""
        import pandas as pd

        frames = []
        for feature in dict.fromkeys(self.features):
            frame = self.into(feature).to_dataframe(keys=keys)
            frame.insert(list(frame.columns).index("term"), "feature", feature)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)
