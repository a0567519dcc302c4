"""The frozen pass as one affine map, and the ways to look at it.

The tensor ``T[query, :, key, :]`` of TensorLens is never stored unless asked for. Contributions push the
source tokens as rows; In+Out and target scores pull one row per query; a slice pulls the basis vectors of
one query, `d_model` times dearer. Padded entries are zero in every result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl.activation import Rule, check_rule
from tensorlens_tl.errors import InvalidInputError, NumericalError, SizeError
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.maps import AffineMap, Chain, at_positions
from tensorlens_tl.selection import chosen_heads, chosen_layers, chosen_mlps
from tensorlens_tl.targets import question

if TYPE_CHECKING:  # frozen imports this module
    from tensorlens_tl.frozen import FrozenPass

ROW_BUDGET = 256 * 2**20
"""Bytes of hidden activations that one chunk of rows may take."""

MOST_BYTES = 4 * 2**30
"""Largest tensor that `slice`, `dense` and `contributions` return."""


@dataclass(frozen=True)
class Collapse:
    """Scores of source tokens for a query, `[batch, query, key]`, with everything needed to check them.

    Where `total` is given, ``scores.sum(-1) + bias == total`` up to `residual`, which is
    abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)).

    Attributes:
        scores: `[batch, query, key]`.
        bias: what no source token explains, `[batch, query]`; None where the collapse is not additive.
        total: the model's own number that is explained, `[batch, query]`.
        residual: how far the sum is from it, `[batch, query]`.
        stderr: standard error of estimated scores, `[batch, query, key]`.
        soft_cap: the cap that the model applies to its logits after this total (a target's), or None.
    """

    scores: Float[Tensor, "batch query key"]
    bias: Float[Tensor, "batch query"] | None = None
    total: Float[Tensor, "batch query"] | None = None
    residual: Float[Tensor, "batch query"] | None = None
    stderr: Float[Tensor, "batch query key"] | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, eq=False)
class FrozenOperator:
    """An affine map from the residual stream at one depth to another: ``op(x) = op.push(x) + op.bias``.

    Attributes:
        frozen: the pass it was made from.
        map: the map itself; `push`, `pull` and `bias` are its own.
        x: the pass's residual stream at the map's input, `[batch, pos, d_model]`.
        first, last: the first layer inside, and the first one after.
        whole: whether the range is complete (no head or MLP left out), so that the model's own output is reproduced.
    """

    frozen: "FrozenPass"
    map: AffineMap
    first: int
    last: int
    whole: bool
    activation: Rule

    @classmethod
    def of(
        cls,
        frozen: "FrozenPass",
        *,
        layers: Any = None,
        heads: Any = None,
        mlp: Any = True,
        activation: str = "ratio",
    ) -> "FrozenOperator":
        """See `FrozenPass.operator`."""
        rule = check_rule(activation)
        chosen = chosen_layers(frozen.n_layers, layers)
        if not isinstance(heads or {}, Mapping):
            raise InvalidInputError(f"heads={heads!r}: pass layer -> heads to keep, such as {{1: [0, 3]}}.")
        kept = {layer: chosen_heads(frozen, layer, chosen, ids) for layer, ids in (heads or {}).items()}
        frozen.check_fresh()
        with_mlp = set(chosen) if mlp is True else set() if mlp is False else chosen_mlps(mlp, chosen)
        stages = tuple(
            frozen.block(layer, activation=rule, heads=kept.get(layer), mlp=layer in with_mlp) for layer in chosen
        )
        final = frozen.final_norm() if chosen.stop == frozen.n_layers else None
        stages = stages if final is None else (*stages, final)
        whole = not kept and all(layer in with_mlp or not frozen.view.blocks[layer].has_mlp for layer in chosen)
        return cls(frozen, Chain(stages), chosen.start, chosen.stop, whole, rule)

    def __repr__(self) -> str:
        batch, pos = self.frozen.tokens.shape
        parts = "" if self.whole else ", with parts left out"
        end = "final norm" if self._reaches_end else f"blocks.{self.last} input"
        return (
            f"FrozenOperator(blocks.{self.first} input -> {end}{parts}, activation={self.activation!r}, "
            f"batch={batch}, pos={pos}, d_model={self.x.shape[-1]})"
        )

    # ------------------------------------------------------------------ the map

    def push(self, x: Float[Tensor, "..."]) -> Float[Tensor, "*rows batch pos d_model"]:
        """The linear part, T·x."""
        return self.map.push(self._fitting(x, "push"))

    def pull(self, g: Float[Tensor, "..."]) -> Float[Tensor, "*rows batch pos d_model"]:
        """The adjoint, Tᵀ·g."""
        return self.map.pull(self._fitting(g, "pull"))

    def __call__(self, x: Float[Tensor, "..."]) -> Float[Tensor, "*rows batch pos d_model"]:
        """T·x + B. At the pass's own `x` this is the model's own output."""
        return self.map(self._fitting(x, "the operator"))

    def _fitting(self, x: Tensor, name: str) -> Tensor:
        if x.shape[-3:] != self.x.shape:
            raise InvalidInputError(
                f"{name}: vectors must be [*rows, {', '.join(map(str, self.x.shape))}] as the frozen pass "
                f"([*rows, batch, pos, d_model]), got {list(x.shape)}."
            )
        return x.to(self.x.dtype)

    @property
    def T(self) -> AffineMap:
        """The adjoint as a map."""
        return self.map.T

    @cached_property
    def bias(self) -> Float[Tensor, "batch pos d_model"]:
        """B: what the operator adds besides its linear part."""
        return self.map.bias.to(self.x).expand(self.x.shape)

    @cached_property
    def x(self) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream at the operator's input."""
        return self.frozen.resid_pre(self.first)

    @cached_property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """What the operator reproduces: the model's own activation where it is whole, else its own value at `x`."""
        if not self.whole:
            return self(self.x)
        return self.frozen.output if self._reaches_end else self.frozen.resid_pre(self.last)

    @property
    def _reaches_end(self) -> bool:
        return self.last == self.frozen.n_layers

    # ------------------------------------------------------------------ tensors

    def contributions(self, query: int | None = None) -> Float[Tensor, "batch query key d_model"]:
        """``T[i,:,j,:]·x_j``: what source token j puts into position i.

        Summed over keys, plus `bias`, they are the model's own output at every real token. On a causal model the empty
        triangle is skipped.

        Args:
            query: one query counted over each row's real tokens, or None for all.

        Raises:
            InvalidInputError: a query out of range.
            SizeError: the result would be larger than `MOST_BYTES`.
        """
        positions = self._positions(query)
        batch, pos, width = self.x.shape
        check_size("contributions", (batch, positions.shape[1], pos, width), self.x)
        result = self.x.new_zeros(batch, positions.shape[1], pos, width)
        for rows in self._chunks(pos, "contributions", parts=8):
            live = slice(rows.start if self.frozen.causal else 0, None)
            sources = self.x.new_zeros(len(rows), batch, pos, width)
            sources[range(len(rows)), :, rows] = self.x[:, rows].transpose(0, 1)
            pushed = torch.zeros_like(sources)
            pushed[:, :, live] = at_positions(self.map, live).push(sources[:, :, live])
            pushed = pushed.permute(1, 2, 0, 3)
            asked = pushed if query is None else torch.take_along_dim(pushed, positions[..., None, None], dim=1)
            result[:, :, rows] = asked
        mask = self._pair_mask(positions)
        return result if bool(mask.all()) else result * mask[..., None]

    def slice(self, query: int | None = -1) -> Float[Tensor, "batch d_out key d_in"]:
        """``T[i,:,j,:]`` for one query i and every key j.

        Raises:
            InvalidInputError: a query out of range.
            SizeError: the result would be larger than `MOST_BYTES`.
        """
        if query is None:
            raise InvalidInputError("slice: one query at a time; use dense() for all of them.")
        positions = self._positions(query)
        batch, pos, width = self.x.shape
        check_size("slice", (batch, width, pos, width), self.x)
        result = self.x.new_empty(batch, width, pos, width)
        for rows, pulled in self._basis_rows(positions[:, 0], "slice"):
            result[:, rows] = pulled.transpose(0, 1)
        return result * self.frozen.mask[:, None, :, None]

    def dense(self) -> Float[Tensor, "batch query d_out key d_in"]:
        """The whole tensor, for small models.

        Raises:
            SizeError: it would be larger than `MOST_BYTES`.
        """
        batch, pos, width = self.x.shape
        check_size("dense", (batch, pos, width, pos, width), self.x)
        result = self.x.new_empty(batch, pos, width, pos, width)
        for query in range(pos):
            positions = torch.full((batch,), query, device=self.x.device)
            for rows, pulled in self._basis_rows(positions, "dense"):
                result[:, query, rows] = pulled.transpose(0, 1)
        mask = self.frozen.mask
        return result * (mask[:, :, None, None, None] & mask[:, None, None, :, None])

    # ------------------------------------------------------------------ collapses

    def norm(self, query: Any = -1, *, probes: int | None = None, seed: int = 0) -> Collapse:
        """‖T[i,:,j,:]‖, the Frobenius norm of each token pair's block (TensorLens Eq. 21).

        Args:
            query: one query, counted over each row's real tokens, or None for all.
            probes: estimate with this many random Gaussian rows per query instead of `d_model` basis rows: the mean of
                ‖row·T_ij‖² is unbiased for the square; `stderr` is the norm's, by the delta method.
            seed: of the probes.

        Raises:
            InvalidInputError: a query out of range, or fewer than 2 probes.
        """
        if probes is not None and probes < 2:
            raise InvalidInputError(f"probes={probes}: a standard error needs at least 2.")
        positions = self._positions(query)
        batch, pos, _ = self.x.shape
        scores = self.x.new_zeros(batch, positions.shape[1], pos)
        stderr = None if probes is None else torch.zeros_like(scores)
        generator = torch.Generator().manual_seed(seed)
        for number in range(positions.shape[1]):
            if probes is None:
                squares = sum(p.square().sum((0, -1)) for _, p in self._basis_rows(positions[:, number], "norm"))
                scores[:, number] = cast(Tensor, squares).sqrt()
                continue
            samples = torch.cat([p.square().sum(-1) for p in self._probe_rows(positions[:, number], probes, generator)])
            mean = samples.mean(0)
            scores[:, number] = mean.sqrt()
            error = samples.std(0) / probes**0.5
            cast(Tensor, stderr)[:, number] = error / (2 * mean.sqrt()).clamp_min(torch.finfo(mean.dtype).tiny)
        mask = self._pair_mask(positions)
        return Collapse(scores * mask, stderr=None if stderr is None else stderr * mask)

    def in_out(self, query: int | None = -1) -> Collapse:
        """``x^N_i · T[i,:,j,:] · x^0_j`` (TensorLens Eq. 22), with the operator's own output x^N.

        One pull per query. The total is ‖x^N_i‖².

        Raises:
            InvalidInputError: a query out of range.
        """
        positions = self._positions(query)
        vectors = torch.take_along_dim(self.output, positions[..., None], dim=1)
        return self._scores(vectors, positions, self.map, wide(vectors).square().sum(-1))

    def target(
        self,
        target: Any = None,
        query: int | None = -1,
        *,
        minus: Any = None,
        direction: Float[Tensor, "..."] | None = None,
    ) -> Collapse:
        """The effect of each source token on one logit (TensorLens Eq. 24), a logit difference, or any direction.

        One pull per query. The total is the model's logit before any soft cap; b_U is part of the bias. On a masked
        language model the target is first pulled through the prediction head, frozen at this input.

        Args:
            target: a token (string or id), or one per prompt.
            query: the position whose prediction is explained, or None for every position.
            minus: another token, for ``logit(target) − logit(minus)``.
            direction: instead of a token, a vector at the operator's output `[d_model]` or `[batch, d_model]`: a probe,
                a feature, a classifier column.

        Raises:
            InvalidInputError: no target, both kinds, several tokens, out of the vocabulary, or a wrong shape.
            UnsupportedModelError: a token target where the model's logits are not ``cap(W_U·x + b_U)``.
        """
        positions = self._positions(query)
        if target is not None and direction is None and not self._reaches_end:
            raise InvalidInputError(
                f"target: this operator ends at blocks.{self.last} input, before the final norm and the unembedding; "
                "use direction=, or layers up to the last."
            )
        asked = question(self.frozen, target, minus, direction)
        vectors = asked.vectors[:, None].expand(-1, positions.shape[1], -1)
        whole_map, explained, cap = self.map, self.output, None
        if asked.of_tokens:
            head = self.frozen.prediction_head(self.activation)
            whole_map = self.map if head is None else head @ self.map
            explained = self.frozen.unembedded() if self.whole else whole_map(self.x)
            cap = self.frozen.view.soft_cap
        explained = torch.take_along_dim(explained, positions[..., None], dim=1)
        total = (wide(explained) * vectors).sum(-1) + asked.constant[:, None]
        return self._scores(vectors, positions, whole_map, total, asked.constant, soft_cap=cap)

    # ------------------------------------------------------------------ inside

    def _scores(
        self,
        vectors: Float[Tensor, "batch query d"],
        positions: Int[Tensor, "batch query"],
        through: AffineMap,
        total: Float[Tensor, "batch query"],
        constant: Float[Tensor, "batch"] | float = 0.0,
        soft_cap: float | None = None,
    ) -> Collapse:
        """Pull one vector per query and dot with the source tokens."""
        batch, queries = positions.shape
        scores = wide(self.x[:0]).new_empty(batch, queries, self.x.shape[1])
        bias = scores.new_empty(batch, queries)
        for rows in self._chunks(queries, "queries"):
            placed = place(vectors[:, rows].transpose(0, 1), positions[:, rows].T, self.x)
            pulled, share = through.pull_with_bias(placed)
            scores[:, rows] = (wide(pulled) * self.x).sum(-1).transpose(0, 1)
            bias[:, rows] = share.T.to(bias)
        if isinstance(constant, Tensor):
            bias = bias + constant[:, None]
        real = torch.take_along_dim(self.frozen.mask, positions, dim=1)
        scores, bias, total = scores * self._pair_mask(positions), bias * real, total * real
        if not bool(torch.isfinite(total).all() and torch.isfinite(scores).all() and torch.isfinite(bias).all()):
            raise NumericalError(
                f"the scores overflow {str(self.x.dtype).removeprefix('torch.')}; load the model in a wider dtype."
            )
        return Collapse(scores, bias, total, relative_residual(scores, bias, total), soft_cap=soft_cap)

    def _positions(self, query: int | None) -> Int[Tensor, "batch query"]:
        return query_positions(self.frozen.mask, query)

    def _pair_mask(self, positions: Int[Tensor, "batch query"]) -> Tensor:
        mask = self.frozen.mask
        return torch.take_along_dim(mask, positions, dim=1)[:, :, None] & mask[:, None, :]

    def _basis_rows(self, positions: Int[Tensor, "batch"], what: str) -> Iterator[tuple[range, Tensor]]:
        """Basis vectors at one position per prompt, pulled: ``rows, [rows, batch, key, d_in]``."""
        width = self.x.shape[-1]
        for rows in self._chunks(width, what):
            basis = torch.eye(width, dtype=self.x.dtype, device=self.x.device)[rows.start : rows.stop]
            vectors = basis[:, None].expand(-1, len(positions), -1)
            yield rows, self.pull(place(vectors, positions.expand(len(rows), -1), self.x))

    def _probe_rows(self, positions: Int[Tensor, "batch"], probes: int, generator: torch.Generator) -> Iterator[Tensor]:
        batch, _, width = self.x.shape
        for rows in self._chunks(probes, "probes"):
            vectors = torch.randn(len(rows), batch, width, generator=generator, dtype=torch.float32).to(self.x)
            yield self.pull(place(vectors, positions.expand(len(rows), -1), self.x))

    def _chunks(self, rows: int, what: str, parts: int = 1) -> Iterator[range]:
        """At least `parts` ranges of rows whose hidden activations fit the budget; a progress bar on long work."""
        self.frozen.check_fresh()
        mlp = self.frozen.view.blocks[self.first].mlp
        attention = self.frozen.view.blocks[self.first].attention
        hidden = 0 if mlp is None else mlp.W_in.shape[1] * (1 if mlp.W_gate is None else 2)
        batch, pos, width = self.x.shape
        # what is alive at once: the stream and a sublayer's input, and the widest hidden layer twice over
        per_row = batch * pos * (2 * width + 2 * max(hidden, attention.W_O.shape[0])) * self.x.element_size()
        step = max(1, min(ROW_BUDGET // per_row, -(-rows // parts)))
        starts = range(0, rows, step)
        bar = tqdm(starts, desc=what, leave=False, delay=2.0, disable=len(starts) < 4)
        return (range(start, min(start + step, rows)) for start in bar)


def relative_residual(
    scores: Float[Tensor, "batch query key"], bias: Float[Tensor, "batch query"], total: Float[Tensor, "batch query"]
) -> Float[Tensor, "batch query"]:
    """abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)): how far an additive claim is from holding."""
    size = scores.abs().sum(-1) + bias.abs()
    return (scores.sum(-1) + bias - total).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, where sums of products would overflow or lose their digits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def place(vectors: Float[Tensor, "rows batch d"], positions: Int[Tensor, "rows batch"], x: Tensor) -> Tensor:
    """Rows `[rows, batch, pos, d]` that are zero except for one vector at one position per prompt."""
    placed = x.new_zeros(*vectors.shape[:2], x.shape[1], vectors.shape[-1])
    index = positions[:, :, None, None].expand(-1, -1, 1, vectors.shape[-1])
    return placed.scatter_(2, index, vectors[:, :, None].to(placed.dtype))


def check_size(what: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise `SizeError` where a result would be larger than `MOST_BYTES`."""
    size = like.element_size()
    for length in shape:
        size *= length
    if size > MOST_BYTES:
        raise SizeError(
            f"{what}: the result {list(shape)} would take {size / 2**30:.1f} GiB, above the limit of "
            f"{MOST_BYTES / 2**30:.0f} GiB. Use a collapse (in_out, target, norm) or a shorter prompt, or raise "
            "tensorlens_tl.operator.MOST_BYTES."
        )
