"""The frozen pass as one affine map: its tensor, whole or in parts, and its collapses to scores of source tokens.

Only `dense` stores the tensor ``T[query, :, key, :]`` of TensorLens. Contributions push the source tokens as rows; a
slice pulls the basis vectors of one query. In+Out and target scores pull one row per query, a sum of targets one row in
total; norms pull the basis vectors of a query, `d_model` times as expensive, or some random rows. Padded entries are
zero in every result.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Number, Whole, confidence, whole_seed
from tensorlens_tl.algebra import AffineMap, Chain, RowPositions
from tensorlens_tl.algebra.memory import Memory, check_size, chunks
from tensorlens_tl.algebra.numerics import relative_gap, size_of_sum, upcast
from tensorlens_tl.algebra.positions import BiasTerms, Queries, by_position, in_total
from tensorlens_tl.algebra.probes import Estimate, check_probes, chi_square_quantile, probed, stored_rows
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.models import FrozenRule, HeadChoice, LayerRange, MlpChoice, Query, TokenLike, known_rule
from tensorlens_tl.passes.inputs import is_all, one_query, query_positions
from tensorlens_tl.passes.linearisation import Linearisation
from tensorlens_tl.passes.target import (
    Keys,
    Target,
    chosen_heads,
    chosen_keys,
    chosen_layers,
    chosen_mlps,
    end_of,
    places_bias,
    resolve_target,
    through_final_norm,
)

CAUSAL_PARTS = 16
"""Chunks of queries in a causal model: each ends at its last query, so more of them waste less."""


@dataclass(frozen=True, repr=False)
class Collapse:
    """Scores of source tokens for a query, `[batch, query, key]`.

    If there is a `total`, ``scores.sum(-1) + bias == total`` up to `gap`, which is
    abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)).

    Attributes:
        scores: `[batch, query, key]`.
        bias: the part that no source token explains, `[batch, query]`; None if the collapse is not additive.
        total: the model's own number that is explained, `[batch, query]`.
        gap: the relative difference between sum and total, `[batch, query]`.
        stderr: the standard error of estimated scores, `[batch, query, key]`.
        freedom: the degrees of freedom of their squares, infinite for exact scores; used by `interval`.
        soft_cap: the cap that the model applies to the total of a target afterwards, or None.
        probes: the number of random rows for each query's estimate; None for exact scores.
    """

    scores: Float[Tensor, "batch query key"]
    bias: Float[Tensor, "batch query"] | None = None
    total: Float[Tensor, "batch query"] | None = None
    gap: Float[Tensor, "batch query"] | None = None
    stderr: Float[Tensor, "batch query key"] | None = None
    freedom: Float[Tensor, "batch query key"] | None = None
    soft_cap: float | None = None
    probes: int | None = None

    def __repr__(self) -> str:
        batch, query, key = self.scores.shape
        gap = "" if self.gap is None else f", gap={float(self.gap.max()):.1e}"
        return f"Collapse(batch={batch}, query={query}, key={key}{gap})"

    def interval(self, level: Number = 0.95) -> tuple[Tensor, Tensor]:
        """Return a confidence interval of the true score; the score itself if it is exact.

        The mean square is assumed to follow a χ² distribution with `freedom` degrees of freedom (Satterthwaite). At a
        level of 0.95, coverage is 91 to 99 % from 4 probes on, at any effective rank of the block; with 2 probes it can
        be as low as 80 % if the effective rank is above one.

        Returns:
            The lower and upper ends, `[batch, query, key]` each.

        Raises:
            InvalidInputError: the level is outside (0, 1).

        >>> norms = frozen.operator().norm(probes=64)
        >>> low, high = norms.interval()
        >>> bool((low <= norms.scores).all() and (norms.scores <= high).all())
        True
        """
        level = confidence(level)
        if self.freedom is None:
            return self.scores, self.scores
        return self._end((1 + level) / 2), self._end((1 - level) / 2)

    def _end(self, level: float) -> Tensor:
        assert self.freedom is not None
        estimated = torch.isfinite(self.freedom)
        freedom = torch.where(estimated, self.freedom, 1.0).double()
        factor = (freedom / chi_square_quantile(freedom, level)).sqrt()
        return self.scores * torch.where(estimated, factor, 1.0).to(self.scores)


@dataclass(frozen=True, eq=False)
class Question:
    """`vectors` to pull, one for each query at `positions`, and the number `total` that the scores must sum to.

    Attributes:
        through: the map from the operator's input to the vectors' place.
        constant: the part of the bias that no map adds.
        noise: possible rounding errors in the total.
        soft_cap: the cap that the model applies to the total afterwards.
        span: the positions that one vector for all queries covers; None where each query has its own position.
    """

    vectors: Float[Tensor, "batch query *live d"]
    positions: Int[Tensor, "batch query"]
    through: AffineMap
    total: Float[Tensor, "batch query"]
    constant: Float[Tensor, "batch query"]
    noise: Float[Tensor, "batch query"]
    soft_cap: float | None = None
    span: slice | None = None

    @property
    def first(self) -> int:
        """The first position where a vector lives."""
        if self.span is not None:
            return self.span.start
        return int(self.positions.min())

    def after(self, first: int) -> "Question":
        """Return the same for a causal map restricted to the positions from `first` on, where all vectors live."""
        span = self.span
        if span is not None:
            span = slice(span.start - first, span.stop - first)
        through = self.through.at(slice(first, None))
        return replace(self, through=through, positions=(self.positions - first).clamp_min(0), span=span)

    def where(self, chunk: slice) -> Queries:
        """Return the positions of some queries' vectors."""
        return self.span or RowPositions(self.positions[:, chunk].T)

    def at_real_tokens(self, mask: Bool[Tensor, "batch pos"]) -> "Question":
        """Return the same, zero at queries that are padding."""
        real = torch.take_along_dim(mask, self.positions, dim=1)
        vectors = self.vectors * real[..., None]
        return replace(self, vectors=vectors, total=self.total * real, constant=self.constant * real)

    def weighted(self, weights: Any) -> "Question":
        """Return the same, times a number for each query, `[batch, query]`."""
        shape = self.total.shape
        if not isinstance(weights, Tensor) or weights.shape != shape or not bool(torch.isfinite(weights).all()):
            given = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise InvalidInputError(f"weights: {given}; pass finite numbers {list(shape)}, one for each query.")
        weights = weights.to(self.total)
        return replace(
            self,
            vectors=self.vectors * weights[..., None].to(self.vectors),
            total=self.total * weights,
            constant=self.constant * weights,
            noise=self.noise * weights.abs(),
        )

    def summed(self, mask: Bool[Tensor, "batch pos"], whole: bool) -> "Question":
        """Return the sum as one vector over the span of the queries (`whole`: from the first position on)."""
        real = torch.take_along_dim(mask, self.positions, dim=1)
        first = 0 if whole else int(self.positions.min())
        length = int(self.positions.max()) + 1 - first
        vectors = self.vectors.new_zeros(len(self.vectors), length, self.vectors.shape[-1])
        vectors.scatter_add_(1, (self.positions - first)[..., None].expand_as(self.vectors), self.vectors)
        return replace(
            self,
            vectors=vectors[:, None],
            positions=(self.positions * real).amax(1, keepdim=True),
            total=self.total.sum(1, keepdim=True),
            constant=self.constant.sum(1, keepdim=True),
            noise=self.noise.sum(1, keepdim=True),
            span=slice(first, first + vectors.shape[1]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class FrozenOperator:
    """An affine map from the residual stream at one depth to another, and its collapses to scores of source tokens.

    ``op(x) = op.push(x) + op.bias``.

    Attributes:
        map: the map itself, with `push`, `pull` and `bias`.
        x: the pass's residual stream at its input, `[batch, pos, d_model]`.
        first, last: the first layer inside, and the first layer after it.
        whole: whether it includes every head and MLP, and so reproduces the model's own output.
        reaches_end: whether it ends at the model's own output, including any final norm.
    """

    frozen: Linearisation
    map: AffineMap
    first: int
    last: int
    whole: bool
    reaches_end: bool
    rule: FrozenRule

    @classmethod
    def of(
        cls,
        frozen: Linearisation,
        *,
        layers: LayerRange = None,
        heads: HeadChoice = None,
        mlp: MlpChoice = True,
        final_norm: bool | None = None,
        rule: FrozenRule = "frozen",
    ) -> "FrozenOperator":
        """See `FrozenPass.operator`."""
        rule = known_rule(rule)
        chosen = chosen_layers(frozen.n_layers, layers)
        if not isinstance(heads or {}, Mapping):
            raise InvalidInputError(f"heads={heads!r}: pass layer -> heads to keep, such as {{1: [0, 3]}}.")
        head_choice = {layer: chosen_heads(frozen, layer, chosen, ids) for layer, ids in (heads or {}).items()}
        frozen.check_fresh()
        if mlp is True:
            with_mlp = set(chosen)
        elif mlp is False:
            with_mlp = set[int]()
        else:
            with_mlp = chosen_mlps(mlp, chosen)
        stages = frozen.stages(chosen, rule=rule, heads=head_choice, mlp=with_mlp)
        reaches_last = chosen.stop == frozen.n_layers
        normed = through_final_norm(frozen, chosen.stop, final_norm)
        final = frozen.final_map()
        if final is not None and normed:
            stages.append(final)
        whole = not head_choice and all(layer in with_mlp or not frozen.view.blocks[layer].has_mlp for layer in chosen)
        reaches_end = reaches_last and (normed or frozen.view.final_norm is None)
        return cls(frozen, Chain(tuple(stages)), chosen.start, chosen.stop, whole, reaches_end, rule)

    def __repr__(self) -> str:
        batch, pos = self.frozen.mask.shape
        parts = "" if self.whole else ", with parts left out"
        return (
            f"{type(self).__name__}(blocks.{self.first} input -> {self.end}{parts}, rule={self.rule!r}, "
            f"batch={batch}, pos={pos}, d_model={self.x.shape[-1]})"
        )

    # ------------------------------------------------------------------ the map

    def push(self, x: Float[Tensor, "..."]) -> Float[Tensor, "*rows batch pos d_model"]:
        """Apply the linear part, T·x."""
        return self.map.push(self._fitting(x, "push"))

    def pull(self, g: Float[Tensor, "..."]) -> Float[Tensor, "*rows batch pos d_model"]:
        """Apply the adjoint, Tᵀ·g."""
        return self.map.pull(self._fitting(g, "pull"))

    def __call__(self, x: Float[Tensor, "..."]) -> Float[Tensor, "*rows batch pos d_model"]:
        """Compute T·x + B; at the pass's own `x` this is the model's own output."""
        return self.map(self._fitting(x, "the operator"))

    def _fitting(self, x: Tensor, name: str) -> Tensor:
        if x.shape[-3:] != self.x.shape:
            raise InvalidInputError(
                f"{name}: vectors must be [*rows, {', '.join(map(str, self.x.shape))}] as in the frozen pass "
                f"([*rows, batch, pos, d_model]), got {list(x.shape)}."
            )
        return x.to(self.x.dtype)

    @property
    def T(self) -> AffineMap:
        """The adjoint as a map."""
        return self.map.T

    @cached_property
    def bias(self) -> Float[Tensor, "batch pos d_model"]:
        """B, the constant part of the operator."""
        return self.map.bias.to(self.x).expand(self.x.shape)

    @cached_property
    def x(self) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream at the operator's input."""
        return self.frozen.resid_pre(self.first)

    @cached_property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The operator's output: the model's own activation if the operator is whole, else its value at `x`."""
        if not self.whole:
            return self(self.x)
        if self.reaches_end:
            return self.frozen.output
        return self.frozen.resid_pre(self.last)

    @property
    def end(self) -> str:
        """The end of the operator, in words."""
        return end_of(self.frozen, self.last, self.reaches_end)

    # ------------------------------------------------------------------ tensors

    def contributions(
        self, query: Query = "all", *, keys: Query = "all", memory: Memory = None
    ) -> Float[Tensor, "batch query key d_model"]:
        """Return ``T[i,:,j,:]·x_j``, the contribution of source token j to position i.

        Summed over keys, plus `bias`, contributions are the model's output at every real token. A causal model's empty
        triangle is skipped.

        Args:
            query: positions, by default all; see `tensorlens_tl.passes.inputs.query_positions`.
            keys: source tokens (a text denotes all its tokens), by default all; others cost nothing.
            memory: the memory that may be allocated beyond the result, as ``"512MB"`` or bytes.

        >>> op = frozen.operator()
        >>> torch.allclose(op.contributions().sum(2) + op.bias, frozen.output, atol=1e-4)
        True

        Raises:
            InvalidInputError: a query or key out of range.
            SizeError: the result would exceed `algebra.memory.MOST_BYTES`, or one row `memory`.
        """
        positions = self._positions(query)
        sources = chosen_keys(self.frozen.prompt, keys)
        batch, _, width = self.x.shape
        check_size("contributions", (batch, positions.shape[1], len(sources.positions), width), self.x)
        result = self.x.new_zeros(batch, positions.shape[1], len(sources.positions), width)
        # a row is placed, pushed, and copied to the result: three at once
        for rows in self._chunks(len(sources.positions), "contributions", memory, parts=8, streams=3):
            keys_at = sources.positions[rows.start : rows.stop]
            first = keys_at[0] if self.frozen.causal else 0
            pushed = self.x.new_zeros(len(rows), batch, self.x.shape[1] - first, width)
            pushed[range(len(rows)), :, [position - first for position in keys_at]] = self.x[:, keys_at].transpose(0, 1)
            pushed = self.map.at(slice(first, None)).push(pushed).permute(1, 2, 0, 3)
            if is_all(query):
                result[:, first:, rows.start : rows.stop] = pushed
            else:  # a query before the first source receives nothing from it
                at = (positions - first)[..., None, None]
                reached = (positions >= first)[..., None, None]
                result[:, :, rows.start : rows.stop] = torch.take_along_dim(pushed, at.clamp_min(0), dim=1) * reached
        return sources.select(self._masked(result, positions, sources), dim=2)

    def slice(
        self, query: Query = -1, *, keys: Query = "all", memory: Memory = None
    ) -> Float[Tensor, "batch d_out key d_in"]:
        """Return ``T[i,:,j,:]`` for one query i, by default the last, and all or some keys j.

        Arguments and errors are as for `contributions`.
        """
        positions = one_query(self.frozen.prompt, query)
        sources = chosen_keys(self.frozen.prompt, keys)
        batch, _, width = self.x.shape
        check_size("slice", (batch, width, len(sources.positions), width), self.x)
        result = self.x.new_zeros(batch, width, len(sources.positions), width)
        for rows, pulled in self._basis_rows(positions[:, 0], sources, "slice", memory):
            result[:, rows.start : rows.stop, : pulled.shape[2]] = pulled.transpose(0, 1)
        return sources.select(result.mul_(sources.mask[:, None, :, None]), dim=2)

    def dense(self) -> Float[Tensor, "batch query d_out key d_in"]:
        """Return the whole tensor, for small models; raises `SizeError` above `algebra.memory.MOST_BYTES`."""
        batch, pos, width = self.x.shape
        check_size("dense", (batch, pos, width, pos, width), self.x)
        result = self.x.new_zeros(batch, pos, width, pos, width)
        sources = chosen_keys(self.frozen.prompt, "all")
        for query in range(pos):
            positions = torch.full((batch,), query, device=self.x.device)
            for rows, pulled in self._basis_rows(positions, sources, "dense", None):
                result[:, query, rows.start : rows.stop, : pulled.shape[2]] = pulled.transpose(0, 1)
        mask = self.frozen.mask
        return result.mul_(mask[:, :, None, None, None] & mask[:, None, None, :, None])

    # ------------------------------------------------------------------ collapses

    def norm(
        self,
        query: Query = -1,
        *,
        probes: Whole | None = None,
        tol: Number | None = None,
        rows: str = "gaussian",
        seed: Whole = 0,
        keys: Query = "all",
        memory: Memory = None,
    ) -> Collapse:
        """Return ‖T[i,:,j,:]‖, the Frobenius norm of each token pair's block (TensorLens Eq. 21).

        Exact by default: `d_model` rows are pulled per query. With `probes` or `tol` it is estimated from fewer, random
        rows: the mean of ‖row·T_ij‖² is unbiased for ‖T_ij‖², and `stderr` is that of the norm by the delta method.
        From `d_model` rows on, the exact norm is cheaper and is returned instead.

        Args:
            query: positions, the last real token by default; see `contributions`.
            probes: the number of random rows.
            tol: pull rows until every pair's standard error is at most this share of its norm (except for pairs below
                a hundredth of their query's largest norm).
            rows: ``"gaussian"``, or ``"orthonormal"`` rows, which are not redundant and vary less.
            seed: the seed of the probes.
            keys, memory: as in `contributions`.

        Raises:
            InvalidInputError: a query or key out of range, fewer than 2 probes, a tolerance that is not positive, or
                an unknown kind of rows.
            SizeError: one row exceeds `memory`.

        >>> frozen.operator().norm().scores.shape
        torch.Size([1, 1, 7])
        """
        probes, tol = check_probes(probes, tol, rows)
        positions = self._positions(query)
        sources = chosen_keys(self.frozen.prompt, keys)
        is_estimated = probes is not None or tol is not None
        norm_of: Callable[[Tensor], Estimate] = partial(self._norm, sources=sources, memory=memory)
        if is_estimated and int(probes or 0) < self.x.shape[-1]:
            generator = torch.Generator().manual_seed(whole_seed(seed))
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
        """Return ``x^N_i · T[i,:,j,:] · x^0_j`` (TensorLens Eq. 22), with the operator's own output x^N.

        One pull per query. The total is ‖x^N_i‖².

        Args:
            query: positions, the last real token by default; see `contributions`.
            bias: ``"apart"`` from the scores, as in the paper, or by ``"position"`` (ours): each bias of the model
                is assigned to the position where it is added, b_V to the source token.
            memory: as in `contributions`.

        Returns:
            Scores `[batch, query, key]` with bias, total and gap.

        >>> collapse = frozen.operator().in_out()
        >>> torch.allclose(collapse.total, frozen.output[:, -1:].square().sum(-1))
        True

        Raises:
            InvalidInputError: a query out of range, or an unknown value of `bias`.
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
        """Return the effect of each source token on one logit (TensorLens Eq. 24), a logit difference, or a direction.

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
            summed: return one row of scores instead of one per query: the effect on the sum of all queries' targets,
                by a single pull of a vector that lives at all of them.
            weights: factors of the queries' targets, `[batch, query]`, which apply to scores, bias and total; None for
                1.
            keys: source tokens, denoted as queries are (a text denotes all its tokens), by default all. In a causal
                model, tokens before these and before the first query cost nothing.
            memory: as in `contributions`.

        Returns:
            Scores `[batch, query, key]` with bias, total and gap; for some of the keys, only the scores.

        >>> collapse = frozen.operator().target(" value")
        >>> torch.allclose(collapse.scores.sum(-1) + collapse.bias, collapse.total, atol=1e-4)
        True

        Raises:
            InvalidInputError: no target, both kinds, target and minus the same, several tokens, out of the vocabulary,
                a wrong shape (weights too), or an unknown value of `bias`.
            UnsupportedModelError: the target is a token, but the model's logits are not ``cap(W_U·x + b_U)``.
        """
        positions = self._positions(query)
        place_bias = places_bias(bias)
        question = self._question(target, minus, direction, positions)
        if weights is not None:
            question = question.weighted(weights)
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
        """Return the numbers that `target` explains, without a pull.

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
        """Return the frozen model's gradient of a logit with respect to the operator's input: Tᵀ·g, one pull.

        The frozen model is affine, so this is exact: adding a vector v of any size to the stream at a position changes
        the target's number (before a final soft cap) by ⟨gradient at that position, v⟩.

        Args:
            target, minus, query, direction: as in `target`.
            memory: as in `contributions`.

        >>> frozen.operator().gradient(" value").shape == (1, 1, *frozen.output.shape[1:])
        True

        Raises:
            InvalidInputError, UnsupportedModelError: as `target`.
            SizeError: the result would exceed `algebra.memory.MOST_BYTES`, or one row `memory`.
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
        """The checked target, and the map from the operator's input to the place where the target is read."""
        if direction is None and not self.reaches_end:
            raise InvalidInputError(
                f"target: this operator ends at {self.end}, before the unembedding; use direction=, or all layers "
                "including the final norm."
            )
        resolved = resolve_target(self.frozen, target, minus, direction, positions)
        if not resolved.of_tokens:
            return resolved, self.map
        head = self.frozen.prediction_head(self.rule)
        return resolved, self.map if head is None else head @ self.map

    def _question(
        self, target: TokenLike, minus: TokenLike, direction: Any, positions: Int[Tensor, "batch query"]
    ) -> Question:
        """The vectors and numbers for `target`, one vector for each query."""
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
        """Pull one vector per query, or their sum, and take dot products with the source tokens."""
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
        """Scores of some source tokens, skipping positions before these and before the first query."""
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
        """Possible rounding errors in the products of the model's last states and these vectors."""
        noise = self.frozen.noise(unembedded)
        if noise is None:
            return torch.zeros_like(vectors[..., 0])
        return vectors.norm(dim=-1) * noise.gather(1, positions)

    def _causal_parts(self, positions: Int[Tensor, "batch query"]) -> int:
        """The minimal number of chunks of queries; for queries that are close together, chunks save little."""
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
        """Norms at one position per prompt, from random rows, or exact if basis vectors are cheaper."""
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

    def _pull(
        self,
        through: AffineMap,
        vectors: Float[Tensor, "row batch *live d"],
        queries: Queries,
        sources: list[int] | None = None,
    ) -> Float[Tensor, "row batch live d_in"]:
        """Pull vectors from their queries to the source tokens: to the first `live` of them, as far as they reach."""
        vectors = vectors.to(self.x.dtype)
        return through.pull_between(vectors, queries, sources, self.x.shape[1], causal=self.frozen.causal)

    def _positions(self, query: Query) -> Int[Tensor, "batch query"]:
        return query_positions(self.frozen.prompt, query)

    def _masked(self, result: Tensor, positions: Int[Tensor, "batch query"], sources: Keys) -> Tensor:
        """Set padding to zero, in place."""
        pairs = torch.take_along_dim(self.frozen.mask, positions, dim=1)[:, :, None] & sources.mask[:, None, :]
        if bool(pairs.all()):
            return result
        return result.mul_(pairs.reshape(*pairs.shape, *(1,) * (result.ndim - 3)))

    def _basis_rows(
        self, positions: Int[Tensor, "batch"], sources: Keys, what: str, memory: Memory
    ) -> Iterator[tuple[range, Float[Tensor, "row batch live d_in"]]]:
        """Pulled basis vectors at one position per prompt."""
        batch, _, width = self.x.shape
        for rows in self._chunks(width, what, memory):
            basis = self.x.new_zeros(len(rows), width)
            basis.diagonal(rows.start).fill_(1)
            vectors = basis[:, None].expand(-1, batch, -1)
            yield rows, self._pull(self.map, vectors, RowPositions(positions[None]), sources.chosen)

    def _chunks(
        self, rows: int, what: str, memory: Memory = None, *, parts: int = 1, streams: int = 0
    ) -> Iterator[range]:
        """Ranges of rows that fit the bound, which also covers `streams` copies of the residual stream."""
        self.frozen.check_fresh()
        stream = self.x.numel() * self.x.element_size()
        if memory is None and self.frozen.view.any_offloaded:
            # rows are stored as vectors and cut into chunks inside each block: one sweep over the weights for all
            return chunks(rows, (4 + streams) * stream, memory, what)
        per_row = self.frozen.row_bytes + streams * stream
        return chunks(rows, per_row, memory, what, parts)
