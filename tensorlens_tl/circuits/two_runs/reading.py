"""The number whose change between two runs is explained, and the vector that is pulled back for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import resolve_target


@dataclass(frozen=True, eq=False)
class Reading:
    """A number of two runs at some queries.

    Attributes:
        difference: of the two runs.
        positions: the queries, `[batch, query]`.
        vectors: the mean direction of each query's number in what it is read from, zero at padding.
        constant: what the weights of the unembedding add to its change.
        total: its change.
        of_tokens: whether it is read from what is unembedded, else from the operator's output.
        label: in words.
    """

    difference: Difference
    positions: Int[Tensor, "batch query"]
    vectors: Float[Tensor, "batch query d"]
    constant: Float[Tensor, "batch query"]
    total: Float[Tensor, "batch query"]
    of_tokens: bool
    label: str

    @classmethod
    def of(
        cls, difference: Difference, target: TokenLike, minus: TokenLike, direction: Direction, query: Query
    ) -> "Reading":
        """Check what is asked.

        Raises:
            InvalidInputError: a query out of range, and what `FrozenOperator.target` refuses.
            UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
            FrozenModelError: a model is no longer that of its run.
        """
        difference.check_fresh()
        positions = query_positions(difference.prompt, query)
        resolved = resolve_target(difference, target, minus, direction, positions)
        real = torch.take_along_dim(difference.mask, positions, dim=1)
        vectors = resolved.vectors * real[..., None]
        constant = resolved.constant * real
        change = difference.output
        if resolved.of_tokens:
            change = difference.unembedded()
        total = (_at(change, positions) * vectors).sum(-1) + constant
        return cls(difference, positions, vectors, constant, total, resolved.of_tokens, resolved.label)

    def number(self, frozen: FrozenPass, target: TokenLike, minus: TokenLike, direction: Direction) -> "Number":
        """One run's own number."""
        resolved = resolve_target(frozen, target, minus, direction, self.positions)
        real = torch.take_along_dim(frozen.mask, self.positions, dim=1)
        states = frozen.unembedded() if self.of_tokens else frozen.output
        return Number(_at(states, self.positions), resolved.vectors * real[..., None], resolved.constant * real)

    @property
    def noise(self) -> Float[Tensor, "batch query"]:
        """What rounding of the two runs may leave in the number, which may itself be no more."""
        lengths = self.difference.noise(self.of_tokens).gather(1, self.positions)
        return self.vectors.norm(dim=-1) * lengths

    def at_queries(self, like: Tensor) -> Float[Tensor, "batch query pos"]:
        """1 at each query's own position."""
        pos = torch.arange(self.difference.mask.shape[1], device=self.positions.device)
        return (self.positions[..., None] == pos).to(like)

    def ends(self, noted: Callable[[str, AffineMap], AffineMap] = lambda name, norm: norm) -> Chain:
        """What lies between the last block and where the number is read.

        Args:
            noted: puts something in place of its norms, which are called ``"ln_final"`` and ``"head.ln"``.
        """
        stages: list[AffineMap] = []
        maps = self.difference.maps
        final = maps.final_norm()
        if final is not None:
            stages.append(maps.on_last_side(noted("ln_final", final)))
        head = None
        if self.of_tokens:
            head = self.difference.prediction_head()
        if head is not None:
            *inside, norm = head.stages
            stages += [*inside, noted("head.ln", norm)]
        return Chain(tuple(stages))

    def seeds(self, memory: Memory) -> Iterator[Float[Tensor, "query batch pos d"]]:
        """The vectors at their positions, a row per query, some queries at a time."""
        queries = self.positions.shape[1]
        like = self.difference.output
        bound = memory
        if queries == 1:
            bound = None
        for rows in chunks(queries, self.difference.row_bytes, bound, "queries"):
            chosen = slice(rows.start, rows.stop)
            yield place(self.vectors[:, chosen].transpose(0, 1), self.positions[:, chosen].T, like)

    def fields(self) -> dict[str, Any]:
        """What a result says about these queries."""
        soft_cap = None
        if self.of_tokens:
            soft_cap = self.difference.view.soft_cap
        return {
            "total": self.total,
            "queries": self.positions,
            "mask": self.difference.mask,
            "tokens": self.difference.str_tokens,
            "target": f"change of the {self.label}",
            "soft_cap": soft_cap,
            "provenance": self.difference.provenance(),
        }


@dataclass(frozen=True, eq=False)
class Number:
    """The number of one run at some queries: ``⟨vectors, state⟩ + constant``, zero at padding."""

    state: Float[Tensor, "batch query d"]
    vectors: Float[Tensor, "batch query d"]
    constant: Float[Tensor, "batch query"]

    @property
    def value(self) -> Float[Tensor, "batch query"]:
        """The number."""
        return (self.state * self.vectors).sum(-1) + self.constant


def _at(states: Float[Tensor, "batch pos d"], positions: Int[Tensor, "batch query"]) -> Float[Tensor, "batch query d"]:
    return upcast(torch.take_along_dim(states, positions[..., None], dim=1))
