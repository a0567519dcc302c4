"""The frozen operator: how its tensor collapses to a score for each source token.

In+Out and target scores pull one row per query, a sum of targets one row for all of them; norms pull the basis vectors
of a query, `d_model` times dearer, or some random rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, RowPositions
from tensorlens_tl.algebra.memory import Memory, check_size
from tensorlens_tl.algebra.numerics import relative_gap, size_of_sum, upcast
from tensorlens_tl.algebra.positions import BiasTerms, by_position, in_total
from tensorlens_tl.algebra.probes import Estimate, check_probes, probed, stored_rows
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes.operator.collapse import Collapse
from tensorlens_tl.passes.operator.question import Question, factors
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
        keys: Query = "all",
        memory: Memory = None,
    ) -> Collapse:
        """‖T[i,:,j,:]‖, the Frobenius norm of each token pair's block (TensorLens Eq. 21).

        Exact by default: `d_model` rows are pulled per query. With `probes` or `tol` it is estimated from fewer, random
        rows: the mean of ‖row·T_ij‖² is unbiased for ‖T_ij‖², and `stderr` is the norm's by the delta method. From
        `d_model` rows on the exact norm is cheaper, and is what this returns.

        Args:
            query: positions, the last real token by default; see `contributions`.
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

        >>> frozen.operator().norm().scores.shape
        torch.Size([1, 1, 7])
        """
        check_probes(probes, tol, rows)
        positions = self._positions(query)
        sources = chosen_keys(self.frozen.prompt, keys)
        is_estimated = probes is not None or tol is not None
        norm_of: Callable[[Tensor], Estimate] = partial(self._norm, sources=sources, memory=memory)
        if is_estimated and (probes or 0) < self.x.shape[-1]:
            generator = torch.Generator().manual_seed(seed)
            norm_of = partial(norm_of, generator=generator, probes=probes, tol=tol, rows=rows)
        estimates = [norm_of(at) for at in positions.T]

        def by_query(columns: list[Tensor]) -> Tensor:
            return sources.select(self._masked(torch.stack(columns, dim=1), positions, sources), dim=2)

        scores = by_query([estimate.norm for estimate in estimates])
        if not is_estimated:
            return Collapse(scores)
        stderr = by_query([estimate.stderr for estimate in estimates])
        freedom = sources.select(torch.stack([estimate.freedom for estimate in estimates], dim=1), dim=2)
        most_rows = max(estimate.rows for estimate in estimates)
        return Collapse(scores, stderr=stderr, freedom=freedom, probes=most_rows)

    def in_out(self, query: Query = -1, *, bias: str = "apart", memory: Memory = None) -> Collapse:
        """``x^N_i · T[i,:,j,:] · x^0_j`` (TensorLens Eq. 22), with the operator's own output x^N.

        One pull per query. The total is ‖x^N_i‖².

        Args:
            query: positions, the last real token by default; see `contributions`.
            bias: ``"apart"`` from the scores, as in the paper, or by ``"position"`` (ours): each bias of the model
                counts for the position it is added at, b_V for the source token.
            memory: as in `contributions`.

        Returns:
            Scores `[batch, query, key]` with bias, total and gap.

        >>> collapse = frozen.operator().in_out()
        >>> torch.allclose(collapse.total, frozen.output[:, -1:].square().sum(-1))
        True

        Raises:
            InvalidInputError: a query out of range, or no such way with biases.
        """
        positions = self._positions(query)
        vectors = torch.take_along_dim(self.output, positions[..., None], dim=1)
        total = upcast(vectors).square().sum(-1)
        noise = self._noise(upcast(vectors), positions, unembedded=False)
        question = Question(vectors, positions, self.map, total, torch.zeros_like(total), noise)
        return self._scores(question, places_bias(bias), memory)

    def target(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Float[Tensor, "..."] | None = None,
        bias: str = "apart",
        summed: bool = False,
        weights: Float[Tensor, "batch query"] | None = None,
        keys: Query = "all",
        memory: Memory = None,
    ) -> Collapse:
        """The effect of each source token on one logit (TensorLens Eq. 24), a logit difference, or any direction.

        One pull per query. The total is the model's logit before any soft cap; b_U is part of the bias. On a masked
        language model the target is first pulled through the prediction head, frozen at this input.

        Args:
            target: a token (string or id), one per prompt, one per query (``[batch][query]``), or `NEXT`: the token
                that follows each query in its prompt; or ``"first-choice"``, the token that the model predicts there.
            minus: another token, for ``logit(target) − logit(minus)``; or ``"runner-up"``, the token of largest logit
                besides the target at each query. Without target, minus and direction it is the first choice against
                the runner-up.
            query: the positions whose predictions are explained, the last real token by default.
            direction: instead of a token, a vector at the operator's output (a probe, a feature, a classifier column):
                `[d_model]`, `[batch, d_model]` or `[batch, query, d_model]`.
            bias: as in `in_out`; b_U stays apart.
            summed: one row of scores instead of one per query: what the source tokens give to the sum of all the
                queries' targets, by one pull of a vector that lives at all of them.
            weights: what each query's target is multiplied by, `[batch, query]`; None for 1. Scores, bias and total
                have the factor.
            keys: source tokens, counted as queries are (a text stands for all its tokens), every one by default. In a
                causal model those before them and before the first query cost nothing.
            memory: as in `contributions`.

        Returns:
            Scores `[batch, query, key]` with bias, total and gap; of some keys the scores alone.

        >>> collapse = frozen.operator().target(" value")
        >>> torch.allclose(collapse.scores.sum(-1) + collapse.bias, collapse.total, atol=1e-4)
        True

        Raises:
            InvalidInputError: no target, both kinds, target and minus the same, several tokens, out of the vocabulary,
                a wrong shape (weights too), or no such way with biases.
            UnsupportedModelError: a token target where the model's logits are not ``cap(W_U·x + b_U)``.
        """
        positions = self._positions(query)
        place_bias = places_bias(bias)
        question = self._question(target, minus, direction, positions)
        if weights is not None:
            question = question.weighted(factors(weights, question.total))
        sources = chosen_keys(self.frozen.prompt, keys)
        return self._scores(question, place_bias, memory, summed=summed, sources=sources)

    def totals(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "batch query"]:
        """The numbers that `target` explains, without a pull.

        Args:
            target, minus, query, direction: as in `target`.

        Returns:
            The total of each query; zero at padding.

        >>> totals = frozen.operator().totals(" value")
        >>> torch.equal(totals, frozen.operator().target(" value").total)
        True

        Raises:
            InvalidInputError, UnsupportedModelError: as `target`.
        """
        question = self._question(target, minus, direction, self._positions(query))
        return question.at_real_tokens(self.frozen.mask).total

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
        the target's number (before a final soft cap) by ⟨gradient at that position, v⟩ for a v of any size.

        Args:
            target, minus, query, direction: as in `target`.
            memory: as in `contributions`.

        >>> frozen.operator().gradient(" value").shape == (1, 1, *frozen.output.shape[1:])
        True

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
        parts = CAUSAL_PARTS if self.frozen.causal else 1
        for rows in self._chunks(queries, "queries", memory, parts=parts):
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
        if direction is None and not self.reaches_end:
            raise InvalidInputError(
                f"target: this operator ends at {self.end}, before the unembedding; use direction=, or all layers "
                "with their final norm."
            )
        resolved = resolve_target(self.frozen, target, minus, direction, positions)
        if not resolved.of_tokens:
            return resolved, self.map
        head = self.frozen.prediction_head(self.activation)
        return resolved, self.map if head is None else head @ self.map

    def _question(
        self, target: TokenLike, minus: TokenLike, direction: Any, positions: Int[Tensor, "batch query"]
    ) -> Question:
        """What `target` asks, one vector for each query."""
        resolved, through = self._resolved(target, minus, direction, positions)
        soft_cap = None
        if resolved.of_tokens:
            soft_cap = self.frozen.soft_cap
        if not resolved.of_tokens:
            states = self.output
        elif self.whole:
            states = self.frozen.unembedded()
        else:
            states = through(self.x)
        states = upcast(torch.take_along_dim(states, positions[..., None], dim=1))
        total = (states * resolved.vectors).sum(-1) + resolved.constant
        noise = self._noise(resolved.vectors, positions, resolved.of_tokens)
        return Question(resolved.vectors, positions, through, total, resolved.constant, noise, soft_cap)

    def _scores(
        self,
        question: Question,
        place_bias: bool,
        memory: Memory = None,
        *,
        summed: bool = False,
        sources: Keys | None = None,
    ) -> Collapse:
        """Pull one vector per query, or their sum, and dot with the source tokens."""
        question = question.at_real_tokens(self.frozen.mask)
        if summed:
            question = question.summed(self.frozen.mask, whole=self.frozen.sides is not None)
        if sources is not None and sources.columns is not None:
            return Collapse(self._scores_of(question, place_bias, memory, sources))
        scores, bias = self._pulled(question, place_bias, memory)
        positions = question.positions
        scores = self._masked(scores, positions, chosen_keys(self.frozen.prompt, "all"))
        bias = bias * torch.take_along_dim(self.frozen.mask, positions, dim=1) + question.constant
        for numbers in (question.total, scores, bias):
            if not bool(torch.isfinite(numbers).all()):
                dtype = str(self.x.dtype).removeprefix("torch.")
                raise NumericalError(f"the scores overflow {dtype}; load the model in a wider dtype.")
        gap = relative_gap(scores, bias, question.total)
        collapse = Collapse(scores, bias, question.total, gap, soft_cap=question.soft_cap)
        return self.frozen.checked(collapse, question.noise / size_of_sum(scores, bias))

    def _scores_of(
        self, question: Question, place_bias: bool, memory: Memory, sources: Keys
    ) -> Float[Tensor, "batch query key"]:
        """Scores of some source tokens, without what comes before them and before the first query."""
        first = 0
        if self.frozen.causal:
            first = min(sources.positions[0], question.first)
        scores, _ = self._pulled(question, place_bias, memory, first)
        chosen = scores[:, :, [position - first for position in sources.positions]]
        return sources.select(self._masked(chosen, question.positions, sources), dim=2)

    def _pulled(
        self, question: Question, place_bias: bool, memory: Memory, first: int = 0
    ) -> tuple[Float[Tensor, "batch query key"], Float[Tensor, "batch query"]]:
        """Scores of the source tokens from a position on, and the bias that is added there, by one pull per query."""
        x = self.x
        if first:
            question = question.after(first)
            x = x[:, first:]
        positions = question.positions
        scores = upcast(x[:0]).new_zeros(*positions.shape, x.shape[1])
        bias = scores.new_zeros(positions.shape)
        for rows in self._chunks(positions.shape[1], "queries", memory, parts=self._causal_parts(positions)):
            chunk = slice(rows.start, rows.stop)
            terms = BiasTerms()
            cotangents = question.vectors[:, chunk].transpose(0, 1).to(x.dtype)
            gradient = question.through.pull_between(
                cotangents, question.where(chunk), None, x.shape[1], causal=self.frozen.causal, biases=terms
            )
            keys = gradient.shape[2]  # a causal model needs no key after its last query
            scores[:, chunk, :keys] = (upcast(gradient) * x[:, :keys]).sum(-1).transpose(0, 1).to(scores)
            if place_bias:
                scores[:, chunk] += by_position(terms, scores[:, chunk].transpose(0, 1)).transpose(0, 1)
            else:
                bias[:, chunk] = in_total(terms, bias[:, chunk].T).T
        return scores, bias

    def _noise(
        self, vectors: Float[Tensor, "batch query d"], positions: Int[Tensor, "batch query"], unembedded: bool
    ) -> Float[Tensor, "batch query"]:
        """What rounding may leave in the products of the model's last states and these vectors."""
        noise = self.frozen.noise(unembedded)
        if noise is None:
            return torch.zeros_like(vectors[..., 0])
        return vectors.norm(dim=-1) * noise.gather(1, positions)

    def _causal_parts(self, positions: Int[Tensor, "batch query"]) -> int:
        """The least number of chunks of queries; those that are close together gain little from being cut apart."""
        if not self.frozen.causal:
            return 1
        spread = (int(positions.max()) - int(positions.min()) + 1) / self.x.shape[1]
        return min(CAUSAL_PARTS, ceil(2 * CAUSAL_PARTS * spread))

    def _norm(
        self,
        at: Int[Tensor, "batch"],
        sources: Keys,
        memory: Memory,
        generator: torch.Generator | None = None,
        **probes: Any,
    ) -> Estimate:
        """Return norms at one position per prompt, from random rows, or exact where basis vectors are cheaper."""
        batch, _, width = self.x.shape
        if generator is not None:
            per_row = batch * len(sources.positions) * width * upcast(self.x[:0]).element_size()
            product_rows, free_memory = stored_rows(per_row, memory)
            pull = partial(self._row_products, at=at, sources=sources, memory=free_memory)
            estimate = probed(pull, (batch, width), generator, stored=product_rows, **probes)
            if estimate is not None:
                return estimate
        squares = upcast(self.x[:0]).new_zeros(batch, len(sources.positions))
        for _, pulled in self._basis_rows(at, sources, "norm", memory):
            norms = torch.linalg.vector_norm(upcast(pulled), dim=(0, -1))
            squares[:, : norms.shape[-1]] += norms.square()
        return Estimate(squares.sqrt_(), torch.zeros_like(squares), torch.full_like(squares, torch.inf), width)

    def _row_products(
        self, vectors: Float[Tensor, "row batch d"], count: int, at: Int[Tensor, "batch"], sources: Keys, memory: Memory
    ) -> tuple[Float[Tensor, "row batch key"], Float[Tensor, "count batch key d"]]:
        """‖vector·T_ij‖² of vectors at one position per prompt, and the first `count` of the vector·T_ij."""
        shape = (*vectors.shape[:2], len(sources.positions))
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
