"""The frozen operator: how its tensor collapses to a score for each source token.

In+Out and target scores pull one row per query, a sum of targets one row for all of them; norms pull the basis vectors
of a query, `d_model` times dearer, or some random rows.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, RowPositions
from tensorlens_tl.algebra.memory import Memory, check_size
from tensorlens_tl.algebra.numerics import relative_residual, upcast
from tensorlens_tl.algebra.positions import BiasTerms, Queries, by_position, in_total
from tensorlens_tl.algebra.probes import check_probes, probed, stored_rows
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.models.protocol import Query, TokenLike
from tensorlens_tl.passes.operator.collapse import Collapse
from tensorlens_tl.passes.operator.selection import Keys, chosen_keys, places_bias
from tensorlens_tl.passes.operator.target import Target, resolve_target
from tensorlens_tl.passes.operator.tensor import FrozenTensor

CAUSAL_PARTS = 16
"""Chunks of queries in a causal model: each is cut at its last query, so more of them waste less."""


@dataclass(frozen=True, eq=False, repr=False)
class FrozenOperator(FrozenTensor):
    """An affine map from the residual stream at one depth to another, and its collapses to scores of source tokens.

    The map, and its tensor in parts, are those of a `FrozenTensor`, whose attributes these are.
    """

    # ------------------------------------------------------------------ collapses

    def norm(
        self,
        query: Query = -1,
        *,
        probes: Any = None,
        tol: Any = None,
        rows: str = "gaussian",
        seed: int = 0,
        keys: Query = None,
        memory: Memory = None,
    ) -> Collapse:
        """‖T[i,:,j,:]‖, the Frobenius norm of each token pair's block (TensorLens Eq. 21).

        Exact by default: `d_model` rows are pulled per query. With `probes` or `tol` it is estimated from fewer, random
        rows: the mean of ‖row·T_ij‖² is unbiased for ‖T_ij‖², and `stderr` is the norm's by the delta method. From
        `d_model` rows on the exact norm is the cheaper one, and is what you get.

        Args:
            query: positions, the last real token unless said; see `contributions`.
            probes: how many random rows.
            tol: pull as many as it takes until every pair's standard error is at most this share of its norm (pairs
                below a hundredth of their query's largest aside).
            rows: ``"gaussian"``, or ``"orthonormal"`` ones, which repeat nothing and vary less.
            seed: of the probes.
            keys, memory: as in `contributions`.

        Raises:
            InvalidInputError: a query or key out of range, fewer than 2 probes, a tolerance that is not positive, or
                no such rows.
            SizeError: one row is larger than `memory`.
        """
        width = self.x.shape[-1]
        check_probes(probes, tol, rows)
        positions = self._positions(query)
        sources = chosen_keys(self.frozen.prompt, keys)
        scores = upcast(self.x[:0]).new_zeros(len(self.x), positions.shape[1], len(sources.places))
        stderr = torch.zeros_like(scores)
        freedom = torch.full_like(scores, torch.inf)
        row_count = 0
        sampled = probes is not None or tol is not None
        generator = torch.Generator().manual_seed(seed)
        for number in range(positions.shape[1]):
            at = positions[:, number]
            estimate = None
            if sampled and (probes or 0) < width:
                per_row = len(self.x) * len(sources.places) * width * upcast(self.x[:0]).element_size()
                product_rows, free_memory = stored_rows(per_row, memory)
                pull = partial(self._row_products, at=at, sources=sources, memory=free_memory)
                shape = (len(self.x), width)
                estimate = probed(pull, shape, generator, probes=probes, tol=tol, rows=rows, stored=product_rows)
            if estimate is None:  # exact; or the tolerance asks for so many rows that exact is cheaper
                for _, pulled in self._basis_rows(at, sources, "norm", memory):
                    norms = torch.linalg.vector_norm(upcast(pulled), dim=(0, -1))
                    scores[:, number, : norms.shape[-1]] += norms.square()
                scores[:, number].sqrt_()
                row_count = width
            else:
                scores[:, number] = estimate.norm
                stderr[:, number] = estimate.stderr
                freedom[:, number] = estimate.freedom
                row_count = max(row_count, estimate.rows)
        scores = sources.select(self._masked(scores, positions, sources), dim=2)
        if not sampled:
            return Collapse(scores)
        stderr = sources.select(self._masked(stderr, positions, sources), dim=2)
        return Collapse(scores, stderr=stderr, freedom=sources.select(freedom, dim=2), probes=row_count)

    def in_out(self, query: Query = -1, *, bias: str = "apart", memory: Memory = None) -> Collapse:
        """``x^N_i · T[i,:,j,:] · x^0_j`` (TensorLens Eq. 22), with the operator's own output x^N.

        One pull per query. The total is ‖x^N_i‖².

        Args:
            query: positions, the last real token unless said; see `contributions`.
            bias: ``"apart"`` from the scores, as in the paper, or by ``"position"`` (ours): each bias of the model
                counts for the position it is added at, b_V for the source token.
            memory: as in `contributions`.

        Raises:
            InvalidInputError: a query out of range, or no such way with biases.
        """
        positions = self._positions(query)
        vectors = torch.take_along_dim(self.output, positions[..., None], dim=1)
        total = upcast(vectors).square().sum(-1)
        return self._scores(vectors, positions, self.map, total, place_bias=places_bias(bias), memory=memory)

    def target(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Float[Tensor, "..."] | None = None,
        bias: str = "apart",
        summed: bool = False,
        memory: Memory = None,
    ) -> Collapse:
        """The effect of each source token on one logit (TensorLens Eq. 24), a logit difference, or any direction.

        One pull per query. The total is the model's logit before any soft cap; b_U is part of the bias. On a masked
        language model the target is first pulled through the prediction head, frozen at this input.

        Args:
            target: a token (string or id), one per prompt, one per query (``[batch][query]``), or `NEXT`: the token
                that follows each query in its prompt.
            minus: another token, for ``logit(target) − logit(minus)``.
            query: the positions whose predictions are explained, the last real token unless said.
            direction: instead of a token, a vector at the operator's output (a probe, a feature, a classifier column):
                `[d_model]`, `[batch, d_model]` or `[batch, query, d_model]`.
            bias: as in `in_out`; b_U stays apart.
            summed: one answer instead of one per query: what the source tokens give to the sum of all the queries'
                targets, by one pull of a vector that lives at all of them.
            memory: as in `contributions`.

        Raises:
            InvalidInputError: no target, both kinds, target and minus the same, several tokens, out of the vocabulary,
                a wrong shape, or no such way with biases.
            UnsupportedModelError: a token target where the model's logits are not ``cap(W_U·x + b_U)``.
        """
        positions = self._positions(query)
        place_bias = places_bias(bias)
        resolved, through = self._resolved(target, minus, direction, positions)
        states = self.output
        soft_cap = None
        if resolved.of_tokens:
            states = self.frozen.unembedded() if self.whole else through(self.x)
            soft_cap = self.frozen.view.soft_cap
        states = torch.take_along_dim(states, positions[..., None], dim=1)
        total = (upcast(states) * resolved.vectors).sum(-1) + resolved.constant
        return self._scores(
            resolved.vectors, positions, through, total, resolved.constant, soft_cap=soft_cap, place_bias=place_bias,
            summed=summed, memory=memory,
        )  # fmt: skip

    def gradient(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Float[Tensor, "..."] | None = None,
        memory: Memory = None,
    ) -> Float[Tensor, "batch query pos d_model"]:
        """The frozen model's gradient of a logit with respect to the stream at the operator's input: Tᵀ·g, one pull.

        The frozen model is affine, so this is no approximation: adding a vector v to the stream at a position changes
        the number asked about (before a final soft cap) by ⟨gradient at that position, v⟩, whatever the size of v.

        Args:
            target, minus, query, direction: as in `target`.
            memory: as in `contributions`.

        Raises:
            InvalidInputError, UnsupportedModelError: as `target`.
            SizeError: the result would be larger than `algebra.memory.MOST_BYTES`, or one row than `memory`.
        """
        positions = self._positions(query)
        resolved, through = self._resolved(target, minus, direction, positions)
        batch, queries = positions.shape
        _, pos, width = self.x.shape
        check_size("gradient", (batch, queries, pos, width), self.x)
        result = self.x.new_zeros(batch, queries, pos, width)
        for rows in self._chunks(queries, "queries", memory, parts=CAUSAL_PARTS if self.frozen.causal else 1):
            chunk = slice(rows.start, rows.stop)
            vectors = resolved.vectors[:, chunk].transpose(0, 1)
            pulled = self._pull(through, vectors, RowPositions(positions[:, chunk].T))
            result[:, chunk, : pulled.shape[2]] = pulled.transpose(0, 1)
        real = torch.take_along_dim(self.frozen.mask, positions, dim=1)
        return result.mul_((real[:, :, None] & self.frozen.mask[:, None])[..., None])

    # ------------------------------------------------------------------ inside

    def _resolved(
        self, target: TokenLike, minus: TokenLike, direction: Any, positions: Int[Tensor, "batch query"]
    ) -> tuple[Target, AffineMap]:
        """The target after its checks, and the map from the operator's input to where the target is read."""
        if target is not None and direction is None and not self.reaches_end:
            raise InvalidInputError(
                f"target: this operator ends at {self.end}, before the unembedding; use direction=, or all layers "
                "with their final norm."
            )
        resolved = resolve_target(self.frozen, target, minus, direction, positions)
        head = self.frozen.prediction_head(self.activation) if resolved.of_tokens else None
        return resolved, self.map if head is None else head @ self.map

    def _scores(
        self,
        vectors: Float[Tensor, "batch query d"],
        positions: Int[Tensor, "batch query"],
        through: AffineMap,
        total: Float[Tensor, "batch query"],
        constant: Float[Tensor, "batch query"] | float = 0.0,
        *,
        soft_cap: float | None = None,
        place_bias: bool = False,
        summed: bool = False,
        memory: Memory = None,
    ) -> Collapse:
        """Pull one vector per query, or their sum, and dot with the source tokens."""
        real = torch.take_along_dim(self.frozen.mask, positions, dim=1)
        total = total * real
        constant = constant * real
        span = None
        if summed:
            span, vectors = self._summed(vectors * real[..., None], positions)
            total = total.sum(1, keepdim=True)
            constant = constant.sum(1, keepdim=True)
            positions = (positions * real).amax(1, keepdim=True)
        batch, queries = positions.shape
        scores = upcast(self.x[:0]).new_zeros(batch, queries, self.x.shape[1])
        bias = scores.new_zeros(batch, queries)
        parts = 1
        if self.frozen.causal:  # queries that are close together gain little from being cut apart
            spread = (int(positions.max()) - int(positions.min()) + 1) / self.x.shape[1]
            parts = min(CAUSAL_PARTS, ceil(2 * CAUSAL_PARTS * spread))
        for rows in self._chunks(queries, "queries", memory, parts=parts):
            chunk = slice(rows.start, rows.stop)
            terms = BiasTerms()
            places = RowPositions(positions[:, chunk].T) if span is None else span
            pulled = self._pull(through, vectors[:, chunk].transpose(0, 1), places, None, terms)
            live = pulled.shape[2]
            scores[:, chunk, :live] = (upcast(pulled) * self.x[:, :live]).sum(-1).transpose(0, 1).to(scores)
            if place_bias:
                scores[:, chunk] += by_position(terms, scores[:, chunk].transpose(0, 1)).transpose(0, 1)
            else:
                bias[:, chunk] = in_total(terms, bias[:, chunk].T).T
        scores = self._masked(scores, positions, chosen_keys(self.frozen.prompt, None))
        bias = bias * torch.take_along_dim(self.frozen.mask, positions, dim=1) + constant
        if not bool(torch.isfinite(total).all() and torch.isfinite(scores).all() and torch.isfinite(bias).all()):
            raise NumericalError(
                f"the scores overflow {str(self.x.dtype).removeprefix('torch.')}; load the model in a wider dtype."
            )
        residual = relative_residual(scores, bias, total)
        return self.frozen.checked(Collapse(scores, bias, total, residual, soft_cap=soft_cap))

    def _summed(
        self, vectors: Float[Tensor, "batch query d"], positions: Int[Tensor, "batch query"]
    ) -> tuple[Queries, Float[Tensor, "batch 1 live d"]]:
        """The span that several positions cover, and one vector over that span that is the sum of the vectors there."""
        first = 0 if self.frozen.sides is not None else int(positions.min())
        placed = vectors.new_zeros(len(vectors), int(positions.max()) + 1 - first, vectors.shape[-1])
        placed.scatter_add_(1, (positions - first)[..., None].expand_as(vectors), vectors)
        return slice(first, first + placed.shape[1]), placed[:, None]

    def _row_products(
        self, vectors: Float[Tensor, "row batch d"], count: int, at: Int[Tensor, "batch"], sources: Keys, memory: Memory
    ) -> tuple[Float[Tensor, "row batch key"], Float[Tensor, "count batch key d"]]:
        """‖vector·T_ij‖² of vectors at one position per prompt, and the first `count` of the vector·T_ij."""
        shape = (*vectors.shape[:2], len(sources.places))
        squares = upcast(self.x[:0]).new_zeros(shape)
        first = squares.new_zeros(count, *shape[1:], self.x.shape[-1])
        for rows in self._chunks(len(vectors), "probes", memory):
            part = vectors[rows.start : rows.stop].to(self.x)
            pulled = upcast(self._pull(self.map, part, RowPositions(at[None]), sources.chosen))
            live = pulled.shape[2]
            squares[rows.start : rows.stop, :, :live] = torch.linalg.vector_norm(pulled, dim=-1).square()
            products = pulled[: max(0, count - rows.start)]
            first[rows.start : rows.start + len(products), :, :live] = products
        return squares, first
