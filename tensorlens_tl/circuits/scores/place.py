"""Which score is explained: of which head, for which query and which key of each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.circuits.arguments import Whole
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass, PassOrDifference
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.passes.operator import chosen_head


@dataclass(frozen=True, eq=False)
class ScorePlace:
    """One head, and one query and one key of each prompt.

    Attributes:
        layer, head: which head.
        cross: whether it is one of cross-attention.
        query, key: positions, those of a decoder after the encoder's.
        queries, keys: where the layer has its queries, and its keys: the first position, and the one after the last.
    """

    layer: int
    head: int
    cross: bool
    query: Int[Tensor, "batch"]
    key: Int[Tensor, "batch"]
    queries: tuple[int, int]
    keys: tuple[int, int]

    @classmethod
    def of(
        cls, frozen: PassOrDifference, layer: Whole, head: Whole, query: Query, key: Query, *, cross: bool
    ) -> "ScorePlace":
        """From the arguments of `qk_attribution`.

        Raises:
            InvalidInputError: no such layer, head or position, or a key that the query cannot attend to.
        """
        layer, head = chosen_head(frozen.view, layer, head, cross=cross)
        capture = frozen.maps.capture
        queries = capture.side(layer)
        keys = (0, queries[0]) if cross else queries
        at_query = one_query(frozen.prompt, query, "query")[:, 0]
        at_key = one_query(frozen.prompt, key, "key")[:, 0]
        place = cls(layer, head, cross, at_query, at_key, queries, keys)
        place._check_side("query", query, at_query, queries)
        place._check_side("key", key, at_key, keys)
        if not cross and capture.is_causal_at(layer) and bool((at_key > at_query).any()):
            raise InvalidInputError(
                f"query={query!r}, key={key!r}: the key comes after the query, and this model attends to no later "
                "token."
            )
        return place

    def _check_side(self, name: str, at: Query, positions: Int[Tensor, "batch"], side: tuple[int, int]) -> None:
        start, stop = side
        outside = positions[(positions < start) | (positions >= stop)].tolist()
        if not outside:
            return
        attention = "cross-attention" if self.cross else "self-attention"
        whose = "encoder" if start == 0 else "decoder"
        raise InvalidInputError(
            f"{name}={at!r}: {attention} of layer {self.layer} has its {name} among the {whose}'s tokens, positions "
            f"{start} to {stop - 1}, and this is position {outside[0]}. Pass one of those."
        )

    @property
    def inside(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Query and key as positions of the sides that they are on."""
        return self.query - self.queries[0], self.key - self.keys[0]

    def pattern_row(self, frozen: FrozenPass) -> Float[Tensor, "batch key"]:
        """The probabilities of the query's keys."""
        pattern = frozen.cross_pattern(self.layer) if self.cross else frozen.pattern(self.layer)
        query, _ = self.inside
        return pattern[torch.arange(len(query), device=query.device), self.head, query]

    def words(self, tokens: Sequence[Sequence[str]]) -> list[str]:
        """Head, query and key of each prompt in words: ``"L1H0, 5 ' the' → 2 ' value'"``."""
        head = f"L{self.layer}.cross.H{self.head}" if self.cross else f"L{self.layer}H{self.head}"
        pairs = zip(tokens, self.query.tolist(), self.key.tolist(), strict=True)
        return [f"{head}, {q} {row[q]!r} → {k} {row[k]!r}" for row, q, k in pairs]
