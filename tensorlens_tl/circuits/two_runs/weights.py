"""What each changed weight adds to a number: terms that are collected while a vector is pulled through two models.

A changed matrix adds ⟨g, x̄·ΔW⟩ with the vector g that is pulled to where it writes. By head, the channels of a matrix
are told apart; by rank, the singular directions of ΔW = Σ_r s_r u_r v_rᵀ, each of which adds s_r ⟨x̄, u_r⟩⟨g, v_r⟩.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Linear
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import MatrixChange, Offset, pull_noting
from tensorlens_tl.circuits.stream import Sublayer
from tensorlens_tl.errors import InvalidInputError

BY = ("matrix", "layer", "component", "head", "head_matrix", "rank")
BY_HEAD = ("head", "head_matrix")

MOST_DIRECTIONS = 64
"""How many singular directions a change may have, by rank."""

SPARE = 8
"""Random vectors beyond these, by which they are looked for."""

QUERIES = ("W_Q", "b_Q", "q_norm.w", "relative_bias")
ATTENTION = (*QUERIES, "W_K", "b_K", "k_norm.w", "W_V", "b_V", "W_O", "b_O")
LATENT = ("W_down_Q", "b_down_Q", "W_down_K", "b_down_K", "W_down_V", "b_down_V")
"""Matrices of attention that all heads share."""

MLP = ("W_in", "b_in", "W_gate", "b_gate", "W_out", "b_out")
UNEMBEDDING = ("W_U", "b_U")
CROSS = "cross."
"""Before the names of cross-attention's weights, in their layer."""

Directions = tuple[Float[Tensor, "_rank _d_in"], Float[Tensor, "_rank _d_out"]]
"""Of a change: s_r·u_r and v_r, the largest first."""


def term_name(weight: str, by: str) -> str:
    """The term that a weight belongs to; by head, where it is no head's."""
    place, _, part = weight.partition(".")
    if by in ("matrix", "rank"):
        return weight
    if weight in UNEMBEDDING:
        return "unembed"
    if by == "layer" or not part or not place[1:].isdigit():
        return place
    if part.removeprefix(CROSS) in ATTENTION and by in BY_HEAD:
        return weight
    if part.startswith(CROSS):
        return f"{place}.cross"
    if part in (*ATTENTION, *LATENT):
        return f"{place}.attn"
    if part == "routing":
        return weight
    if part in MLP or part.startswith("channel_mix."):
        return f"MLP{place[1:]}"
    if part.startswith("mixer."):
        return f"{place}.mixer"
    if part.startswith("whitening."):
        return f"{place}.whitening"
    if part.startswith("attn.") or part == "sinks":
        return f"{place}.attn"
    return f"{place}.norms"


def _matrix(weight: str) -> str:
    """A weight's name in its attention, self or cross: ``"W_V"`` of ``"L0.W_V"`` and of ``"L2.cross.W_V"``."""
    return weight.partition(".")[2].removeprefix(CROSS)


@dataclass
class WeightTerms:
    """Terms of some queries, by name; the last part of the model comes first.

    Attributes:
        by: what a term is, one of `BY`.
        directions: those of every changed matrix, once they were needed.
        values: each term at each position, `[query, batch, pos]`.
        remainder: what directions that are left out as rounding would add.
    """

    by: str
    directions: dict[str, Directions]
    values: dict[str, Float[Tensor, "query batch pos"]] = field(default_factory=dict[str, Tensor])
    remainder: Tensor | None = None

    def add(self, names: Sequence[str], values: Float[Tensor, "query batch pos term"]) -> None:
        """Terms, in the order of the model; what has a name already is added to it."""
        for name, value in reversed(list(zip(names, values.unbind(-1), strict=True))):
            if name in self.values:
                value = self.values[name] + value
            self.values[name] = value

    def remainder_like(self, seed: Float[Tensor, "query batch pos d"]) -> Float[Tensor, "query batch"]:
        """The remainder, zero where nothing is left out."""
        if self.remainder is None:
            return upcast(seed[..., 0, 0]).new_zeros(seed.shape[:2])
        return self.remainder.sum(-1)

    def pull(self, m: AffineMap, g: Float[Tensor, "query batch pos d"]) -> Float[Tensor, "query batch pos d_in"]:
        """Pull a vector through a map, and collect what its changed weights add; by head, attention's are left out."""
        return pull_noting(m, g, self._note)

    def _note(self, offset: Offset, g: Float[Tensor, "query batch pos d"]) -> None:
        if self.by in BY_HEAD and _matrix(offset.name) in ATTENTION:
            return
        whole = (upcast(g) * offset.vectors).sum(-1)
        if self.by == "rank" and offset.change is not None:
            self._note_directions(offset.name, offset.change, g, whole)
        else:
            self.add([term_name(offset.name, self.by)], whole[..., None])

    # ------------------------------------------------------------------ by rank

    def _note_directions(self, name: str, change: MatrixChange, g: Tensor, whole: Tensor) -> None:
        if name not in self.directions:
            self.directions[name] = directions_of(change, name)
        read, write = self.directions[name]
        shares = (upcast(change.read).to(read) @ read.mT) * (upcast(g).to(write) @ write.mT)
        self.add([f"{name} rank {number + 1}" for number in range(len(read))], shares.to(whole))
        left = whole - shares.sum(-1).to(whole)
        self.remainder = left if self.remainder is None else self.remainder + left

    # ------------------------------------------------------------------ by head

    def pull_heads(self, sublayer: Sublayer, g: Float[Tensor, "query batch pos d_model"], kv_heads: int) -> None:
        """Collect what the changed weights of attention add by one of its routes, head by head.

        Where heads share keys and values, each pulls the vector to these by itself: heads that share none together.

        Args:
            sublayer: the route, and what writes what heads give.
            g: the vector at the sum that they write to.
            kv_heads: how many heads have keys and values of their own.
        """
        heads = len(sublayer.nodes)
        repeats = heads // kv_heads

        def note_output(offset: Offset, g: Tensor) -> None:
            if _matrix(offset.name) not in ATTENTION:
                return  # a norm's: `pull` has noted it, as no head's
            if offset.change is None:
                self.add([offset.name], (upcast(g) * offset.vectors).sum(-1)[..., None])
                return
            shares = upcast(Linear(offset.change.matrix).pull(g)) * offset.change.read
            self._add_heads(sublayer.nodes, offset.name, shares.unflatten(-1, (heads, -1)).sum(-1))

        def note_input(offset: Offset, g: Tensor) -> None:
            if _matrix(offset.name) not in ATTENTION:
                return  # a gate's, a sink's, a latent's or a norm's
            products = upcast(g) * offset.vectors
            if _matrix(offset.name) in QUERIES:
                shares = products.sum(0).unflatten(-1, (heads, -1)).sum(-1)
            else:  # of the heads that share keys and values, each is one row
                shares = products.unflatten(-1, (kv_heads, -1)).sum(-1).movedim(0, -1).flatten(-2)
            self._add_heads(sublayer.nodes, offset.name, shares)

        g = pull_noting(sublayer.write, g, note_output)
        number = torch.arange(heads, device=g.device) % repeats
        chosen = (number == torch.arange(repeats, device=g.device)[:, None]).to(g.dtype)
        by_channel = chosen.repeat_interleave(g.shape[-1] // heads, dim=-1)
        pull_noting(sublayer.read, g[None] * by_channel[:, None, None, None], note_input)

    def _add_heads(self, heads: Sequence[str], weight: str, shares: Float[Tensor, "query batch pos head"]) -> None:
        names = list(heads)
        if self.by == "head_matrix":
            names = [f"{head}.{_matrix(weight)}" for head in heads]
        self.add(names, shares)


def directions_of(change: MatrixChange, name: str) -> Directions:
    """The singular directions of a change that are more than the rounding of its matrices.

    Looked for in the span of what the change gives for some random vectors, which is all of its range where the rank is
    lower than their number.

    Raises:
        InvalidInputError: there are more than `MOST_DIRECTIONS`.
    """
    matrix = upcast(change.matrix)
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(columns, min(MOST_DIRECTIONS + SPARE, rows, columns), generator=generator).to(matrix)
    span = torch.linalg.qr(matrix @ probes).Q
    u, s, v = torch.linalg.svd(span.mT @ matrix, full_matrices=False)
    count = int((s > _rounding(change, float(s.max()))).sum())
    if count > MOST_DIRECTIONS:
        raise InvalidInputError(
            f"by='rank': {name} changed in more than {MOST_DIRECTIONS} singular directions, as in a fine-tuning of all "
            "weights. Use by='matrix', 'component' or 'head'."
        )
    return (span @ u[:, :count] * s[:count]).mT, v[:count]


def _rounding(change: MatrixChange, largest: float) -> float:
    """What rounding alone may add to a singular value of a change: that of its matrices, and of the computation."""
    rows, columns = change.a.shape
    epsilon = torch.finfo(torch.promote_types(change.a.dtype, change.b.dtype)).eps
    size = float(upcast(change.a).norm()) / sqrt(rows * columns)
    computed = torch.finfo(upcast(change.a).dtype).eps * largest
    return epsilon * size * (sqrt(rows) + sqrt(columns)) + 8 * sqrt(max(rows, columns)) * computed
