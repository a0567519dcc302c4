"""The frozen pass as one affine map, and its tensor, whole or in parts.

Only `dense` stores the tensor ``T[query, :, key, :]`` of TensorLens. Contributions push the source tokens as rows; a
slice pulls the basis vectors of one query. Padded entries are zero in every result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, RowPositions
from tensorlens_tl.algebra.memory import Memory, check_size, chunks
from tensorlens_tl.algebra.positions import BiasTerms, Queries
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query, Rule, check_rule
from tensorlens_tl.passes.inputs import is_all, one_query, query_positions
from tensorlens_tl.passes.linearisation import Linearisation
from tensorlens_tl.passes.operator.selection import (
    Keys,
    chosen_heads,
    chosen_keys,
    chosen_layers,
    chosen_mlps,
    end_of,
    through_final_norm,
)

OperatorType = TypeVar("OperatorType", bound="FrozenTensor")


@dataclass(frozen=True, eq=False, repr=False)
class FrozenTensor:
    """An affine map from the residual stream at one depth to another: ``op(x) = op.push(x) + op.bias``.

    Attributes:
        map: the map itself, with `push`, `pull` and `bias`.
        x: the pass's residual stream at its input, `[batch, pos, d_model]`.
        first, last: the first layer inside, and the first one after.
        whole: no head or MLP is left out, so that the model's own output is reproduced.
        reaches_end: whether it ends at the model's own output, with any final norm.
    """

    frozen: Linearisation
    map: AffineMap
    first: int
    last: int
    whole: bool
    reaches_end: bool
    activation: Rule

    @classmethod
    def of(
        cls: type[OperatorType],
        frozen: Linearisation,
        *,
        layers: Any = None,
        heads: Any = None,
        mlp: Any = True,
        final_norm: bool | None = None,
        activation: str = "ratio",
    ) -> OperatorType:
        """See `FrozenPass.operator`."""
        rule = check_rule(activation)
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
        stages = frozen.stages(chosen, activation=rule, heads=head_choice, mlp=with_mlp)
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
            f"{type(self).__name__}(blocks.{self.first} input -> {self.end}{parts}, activation={self.activation!r}, "
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
        if self.reaches_end:
            return self.frozen.output
        return self.frozen.resid_pre(self.last)

    @property
    def end(self) -> str:
        """Where it ends, in words."""
        return end_of(self.frozen, self.last, self.reaches_end)

    # ------------------------------------------------------------------ tensors

    def contributions(
        self, query: Query = "all", *, keys: Query = "all", memory: Memory = None
    ) -> Float[Tensor, "batch query key d_model"]:
        """``T[i,:,j,:]·x_j``: what source token j puts into position i.

        Summed over keys, plus `bias`, they are the model's output at every real token. A causal model's empty triangle
        is
        skipped.

        Args:
            query: positions, by default all; see `tensorlens_tl.passes.inputs.query_positions`.
            keys: source tokens (a text stands for all its tokens), by default all; others cost nothing.
            memory: what may be allocated beyond the result, as ``"512MB"`` or bytes.

        >>> op = frozen.operator()
        >>> torch.allclose(op.contributions().sum(2) + op.bias, frozen.output, atol=1e-4)
        True

        Raises:
            InvalidInputError: a query or key out of range.
            SizeError: the result would be larger than `algebra.memory.MOST_BYTES`, or one row than `memory`.
        """
        positions = self._positions(query)
        sources = chosen_keys(self.frozen.prompt, keys)
        batch, _, width = self.x.shape
        check_size("contributions", (batch, positions.shape[1], len(sources.positions), width), self.x)
        result = self.x.new_zeros(batch, positions.shape[1], len(sources.positions), width)
        # a row is placed, pushed, and moved into the result: three of them at once
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
        """``T[i,:,j,:]`` for one query i, by default the last, and every key j or some.

        Arguments and errors are those of `contributions`.
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
        """The whole tensor, of small models; raises `SizeError` above `tensorlens_tl.algebra.memory.MOST_BYTES`."""
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

    # ------------------------------------------------------------------ inside

    def _pull(
        self,
        through: AffineMap,
        vectors: Float[Tensor, "row batch *live d"],
        queries: Queries,
        sources: list[int] | None = None,
        biases: BiasTerms | None = None,
    ) -> Float[Tensor, "row batch live d_in"]:
        """Vectors at their queries, pulled to the source tokens: to the first `live` of them, as far as they reach."""
        vectors = vectors.to(self.x.dtype)
        length = self.x.shape[1]
        return through.pull_between(vectors, queries, sources, length, causal=self.frozen.causal, biases=biases)

    def _positions(self, query: Query) -> Int[Tensor, "batch query"]:
        return query_positions(self.frozen.prompt, query)

    def _masked(self, result: Tensor, positions: Int[Tensor, "batch query"], sources: Keys) -> Tensor:
        """Zero at padding, in place."""
        pairs = torch.take_along_dim(self.frozen.mask, positions, dim=1)[:, :, None] & sources.mask[:, None, :]
        if bool(pairs.all()):
            return result
        return result.mul_(pairs.reshape(*pairs.shape, *(1,) * (result.ndim - 3)))

    def _basis_rows(
        self, positions: Int[Tensor, "batch"], sources: Keys, what: str, memory: Memory
    ) -> Iterator[tuple[range, Float[Tensor, "row batch live d_in"]]]:
        """Basis vectors at one position per prompt, pulled."""
        batch, _, width = self.x.shape
        for rows in self._chunks(width, what, memory):
            basis = self.x.new_zeros(len(rows), width)
            basis.diagonal(rows.start).fill_(1)
            vectors = basis[:, None].expand(-1, batch, -1)
            yield rows, self._pull(self.map, vectors, RowPositions(positions[None]), sources.chosen)

    def _chunks(
        self, rows: int, what: str, memory: Memory = None, *, parts: int = 1, streams: int = 0
    ) -> Iterator[range]:
        """Ranges of rows that fit the bound, `streams` copies of the residual stream counted besides."""
        self.frozen.check_fresh()
        stream = self.x.numel() * self.x.element_size()
        if memory is None and self.frozen.view.any_offloaded:
            # rows are held as vectors and cut into chunks inside each block: one sweep over the weights for all of them
            return chunks(rows, (4 + streams) * stream, memory, what)
        per_row = self.frozen.row_bytes + streams * stream
        return chunks(rows, per_row, memory, what, parts)
