"""Maps whose every position passes something on to the next: y_i = x_i + step(y_{i−1}).

`Recursion` takes the same matrix at every step, y_i = x_i + y_{i−1}·W, as whitened self-attention does (Eq. 9).
`DiagonalRecursion` takes a factor for each position and channel, y_i = x_i + a_i ⊙ y_{i−1}: the scan of state-space
layers with their gates held fixed. Both are linear and look back only; their adjoints are the same recursions from
the last position to the first.

Positions one after the other are many small products. A *chunked* scan takes chunks one position at a time, all chunks
at once, and then hands over what each chunk ends with; a *prefix* scan (Blelloch 1990) pairs neighbours, solves the
pairs, and fills in the places between. Both do the arithmetic twice, in far fewer steps. *Doubling* (Hillis & Steele
1986) does it log2(pos) times, in the fewest: best where vectors are few. `scan` takes what costs least.

State-space layers (Mamba 1 and 2, and the hybrids made of them): with Δ, B and C held at one input, a selective scan is
linear in what it carries, and its attention is implicit (Ali, Zimerman & Wolf 2024). Channel by channel, output i hears
of input j ≤ i by

    α_ij = Σ_n C_i[n] · exp(A[n]·(Δ_{j+1} + … + Δ_i)) · B_j[n] · Δ_j

`CausalConvolution` is the short convolution before it. `SelectiveScan` never forms the positions × positions matrix of
α: it takes a chunk of positions at a time by the matrix inside the chunk, and hands one state on to the next, as Mamba
2 itself is computed (Dao & Gu 2024). The same chunks serve Mamba 1, whose states decay at rates of their own, and the
adjoint: the same scan from the last position to the first, with B and C in each other's place.
"""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, MixingMap, bias_of, note_bias
from tensorlens_tl.algebra.memory import Memory, check_size, chunks, joined
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.algebra.positions import Where, shared
from tensorlens_tl.algebra.primitives import largest_singular_value

CHUNK = 16
"""Positions of a chunk."""
STEP = 800_000
"""What a step costs besides its arithmetic, in multiplications and additions (measured on a CPU)."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Recursion(MixingMap):
    """``y_i = x_i + y_{i−1} @ weight``.

    Attributes:
        weight: the step.
        keep: True at positions that take part; the others (padding) neither give, receive, nor pass on. None for all.

    >>> from tensorlens_tl.algebra import Recursion
    >>> Recursion(0.5 * torch.eye(1))(torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    weight: Float[Tensor, "d d"]
    keep: Bool[Tensor, "batch pos"] | None = None

    @property
    def needs_positions(self) -> bool:
        return self.keep is None

    @property
    def positions(self) -> int | None:
        return maybe(_length, self.keep)

    def __repr__(self) -> str:
        padded = "" if self.keep is None else ", padded"
        return f"Recursion({len(self.weight)}{padded})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "Recursion":
        if self.keep is None:
            return self
        return replace(self, keep=self.keep[:, shared(where)])

    def norm_bound(self) -> float:
        """A bound of ``Σ_k ‖Wᵏ‖``, infinite where the powers do not shrink."""
        bound = 1.0
        power = self.weight.double()
        for _ in range(64):  # Σ_{k<2m} ‖Wᵏ‖ ≤ (1 + ‖Wᵐ‖) Σ_{k<m} ‖Wᵏ‖
            if not bool(power.abs().max() < 1e100):
                break
            size = largest_singular_value(power)
            bound *= 1 + size
            if size < 1e-12:
                return bound
            power = power @ power
        return float("inf")

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return scan_where(x, self.weight, self.keep)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return scan_where(g, self.weight.T, self.keep, backwards=True)


@final
@dataclass(frozen=True, eq=False, repr=False)
class DiagonalRecursion(MixingMap):
    """``y_i = x_i + factor_i ⊙ y_{i−1}``, channels and states side by side in the last axis of vectors.

    Attributes:
        factor: of every position, `[batch, pos, channel, state]`; the first position's multiplies nothing.

    >>> from tensorlens_tl.algebra import DiagonalRecursion
    >>> DiagonalRecursion(torch.full((1, 3, 1, 1), 0.5))(torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """

    factor: Float[Tensor, "batch pos channel state"]

    @property
    def positions(self) -> int | None:
        return self.factor.shape[1]

    def __repr__(self) -> str:
        return "DiagonalRecursion({} channels, {} states)".format(*self.factor.shape[-2:])

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "DiagonalRecursion":
        return DiagonalRecursion(self.factor[:, shared(where)])

    def norm_bound(self) -> float:
        """√(largest row sum · largest column sum) of the absolute kernel (Schur's test)."""
        sizes = self.factor.flatten(-2).abs().double()
        ones = torch.ones_like(sizes)
        rows = diagonal_scan(ones, sizes).max()
        columns = diagonal_scan(ones.flip(-2), passed_back(sizes)).max()
        return float((rows * columns).sqrt())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        factor = self.factor.flatten(-2)
        return diagonal_scan(x.expand(torch.broadcast_shapes(x.shape, factor.shape)), factor)  # a bias may come once

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return diagonal_scan(g.flip(-2), passed_back(self.factor.flatten(-2))).flip(-2)


def _length(keep: Bool[Tensor, "batch pos"]) -> int:
    return keep.shape[-1]


def passed_back(factor: Float[Tensor, "*any pos d"]) -> Float[Tensor, "*any pos d"]:
    """The factors of the adjoint's scan, which runs from the last position: each acts one step later."""
    back = factor.flip(-2)
    return torch.cat([torch.ones_like(back[..., :1, :]), back[..., :-1, :]], dim=-2)


def spectral_radius(weight: Float[Tensor, "d d"]) -> float:
    """The largest absolute eigenvalue: what a step makes of a vector's size, in the long run."""
    return float(torch.linalg.eigvals(weight.double()).abs().max())


# ------------------------------------------------------------------ scans


def scan(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """All ``y_i = x_i + y_{i−1} @ weight``; differentiable, also twice."""
    if x.numel() == 0:
        return x
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Scan.apply(x, weight)
    return fastest(x, weight)


def scan_where(
    x: Float[Tensor, "*rows pos d"],
    weight: Float[Tensor, "d d"],
    keep: Bool[Tensor, "batch length"] | None,
    *,
    backwards: bool = False,
) -> Float[Tensor, "..."]:
    """The scan of the positions to keep, as if the others were not there; these give zero.

    Args:
        x, weight: as for `scan`.
        keep: True where a position takes part, or None for all.
        backwards: from the last position to the first.
    """
    order = None
    if keep is not None:
        x = x.masked_fill(~keep[..., None], 0)  # what padding holds need not be finite
        if _has_gaps(keep):  # the neighbours of a gap move together
            order = keep.long().argsort(dim=-1, descending=True, stable=True)[..., None]
            x = torch.take_along_dim(x, order.expand(*x.shape[-3:-1], 1), dim=-2)
    y = scan(x.flip(-2), weight).flip(-2) if backwards else scan(x, weight)
    if keep is None:
        return y
    if order is not None:
        y = torch.take_along_dim(y, order.argsort(dim=-2), dim=-2)
    return y.masked_fill(~keep[..., None], 0)


def _has_gaps(keep: Bool[Tensor, "batch length"]) -> bool:
    """Whether any row has a position left out between two that are kept."""
    starts = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
    return bool((starts > 1).any())


def diagonal_scan(x: Float[Tensor, "*rows pos d"], factor: Float[Tensor, "*any pos d"]) -> Float[Tensor, "*rows pos d"]:
    """All ``y_i = x_i + factor_i ⊙ y_{i−1}``, by a prefix scan; differentiable by autograd."""
    pos = x.shape[-2]
    if pos == 1:
        return x
    even, odd = x[..., 0::2, :], x[..., 1::2, :]
    at_even, at_odd = factor[..., 0::2, :], factor[..., 1::2, :]
    both = at_odd * at_even[..., : at_odd.shape[-2], :]
    pairs = diagonal_scan(odd + at_odd * even[..., : odd.shape[-2], :], both)
    rest = even[..., 1:, :] + at_even[..., 1:, :] * pairs[..., : even.shape[-2] - 1, :]
    return _interleaved(torch.cat([even[..., :1, :], rest], dim=-2), pairs)


class _Scan(torch.autograd.Function):
    """The adjoint written out: the same scan backwards, and one product for the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return fastest(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, weight = ctx.saved_tensors
        h = scan(g.flip(-2), weight.mT).flip(-2)
        if not ctx.needs_input_grad[1]:
            return h, None
        width = y.shape[-1]
        return h, y[..., :-1, :].reshape(-1, width).mT @ h[..., 1:, :].reshape(-1, width)


def fastest(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """The scan that costs least for so many rows and positions: by steps, products of vectors, and powers of W."""
    pos, width = x.shape[-2:]
    vectors = 2 * x[..., 0].numel() * width**2
    power = 2 * width**3
    rounds = max(1, (pos - 1).bit_length())
    costs = {
        sequential: pos * STEP + vectors,
        chunked: (CHUNK + pos / CHUNK) * STEP + 2 * vectors + CHUNK * power,
        prefix: rounds * (4 * STEP + power) + 2 * vectors,
        doubling: rounds * (2 * STEP + power + vectors),
    }
    return min(costs, key=lambda way: costs[way])(x, weight)


def sequential(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """One position after the other."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y[..., 0, :] = x[..., 0, :]
    for position in range(1, x.shape[-2]):
        y[..., position, :] = x[..., position, :] + y[..., position - 1, :] @ weight
    return y


def chunked(
    x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"], size: int = CHUNK
) -> Float[Tensor, "*rows pos d"]:
    """Chunks one position after the other, all at once; then what each chunk hands on to the next."""
    pos, width = x.shape[-2:]
    chunks = -(-pos // size)
    padded = torch.nn.functional.pad(x, (0, 0, 0, chunks * size - pos)).unflatten(-2, (chunks, size))
    inside = sequential(padded, weight)
    powers = [weight]
    for _ in range(size - 1):
        powers.append(powers[-1] @ weight)
    ends = fastest(inside[..., -1, :], powers[-1])
    handed = torch.cat(powers, dim=1)  # what a chunk's start receives is multiplied by W, W², … inside it
    carried = (ends[..., :-1, :] @ handed).unflatten(-1, (size, width))
    inside[..., 1:, :, :] += carried
    return inside.reshape(*x.shape[:-2], -1, width)[..., :pos, :]


def prefix(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """Pairs of neighbours first, then the places between them: 2·log2(pos) rounds (Blelloch 1990)."""
    if x.shape[-2] == 1:
        return x
    even, odd = x[..., 0::2, :], x[..., 1::2, :]
    pairs = prefix(odd + even[..., : odd.shape[-2], :] @ weight, weight @ weight)
    rest = even[..., 1:, :] + pairs[..., : even.shape[-2] - 1, :] @ weight
    return _interleaved(torch.cat([even[..., :1, :], rest], dim=-2), pairs)


def doubling(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """What comes from one position before, then from two, four, … before: log2(pos) rounds (Hillis & Steele 1986)."""
    y = x
    reach = 1
    while reach < x.shape[-2]:
        if reach > 1:
            weight = weight @ weight
        y = torch.cat([y[..., :reach, :], y[..., reach:, :] + y[..., :-reach, :] @ weight], dim=-2)
        reach *= 2
    return y


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Two sequences, one position of each in turn; the second may be one shorter."""
    pos = even.shape[-2] + odd.shape[-2]
    if odd.shape[-2] < even.shape[-2]:
        odd = torch.nn.functional.pad(odd, (0, 0, 0, 1))
    return torch.stack([even, odd], dim=-2).reshape(*even.shape[:-2], -1, even.shape[-1])[..., :pos, :]


PASS = 12
"""What it costs to decay or to write a number, in multiplications and additions of a matrix product."""
CHUNK_BYTES = 64 * 2**20
"""The largest state of a chunk, over as many rows as fit, and the largest array that its matrix comes from."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class CausalConvolution(MixingMap):
    """``y_i = Σ_k weight[:, width−1−k] ⊙ x_{i−k} + offset``: every channel by itself, the last weight for i itself.

    What is before the first position counts as zero. There is no mask: models zero what padding holds before the
    projection that comes first, whose bias the convolution does read, and again after the activation that follows.
    Unless `length` says how many positions there are, a bias that comes to it must be given at each of them.

    >>> from tensorlens_tl.algebra import CausalConvolution
    >>> CausalConvolution(torch.tensor([[1.0, 10.0]]))(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten()
    tensor([10., 21., 32.])
    """

    weight: Float[Tensor, "channel width"]
    offset: Float[Tensor, "channel"] | None = None
    length: int | None = None

    @property
    def needs_positions(self) -> bool:
        return True

    @property
    def positions(self) -> int | None:
        return self.length

    def __repr__(self) -> str:
        offset = "" if self.offset is None else ", offset"
        return "CausalConvolution({} channels, {} positions{})".format(*self.weight.shape, offset)

    @property
    def bias(self) -> Tensor:
        return bias_of(self.offset)

    def at(self, where: Where) -> "CausalConvolution":
        if self.length is None:
            return self
        return replace(self, length=len(torch.arange(self.length)[shared(where)]))

    def norm_bound(self) -> float:
        """Σ_k |weight_k| of the largest channel (Young's inequality)."""
        return float(self.weight.double().abs().sum(-1).max())

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = x * self.weight[:, -1]
        for back in range(1, min(self.weight.shape[-1], x.shape[-2])):
            y[..., back:, :] += x[..., :-back, :] * self.weight[:, -1 - back]
        return plus(y, self.offset) if affine else y

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        note_bias(g, self.bias, biases)
        x = g * self.weight[:, -1]
        for back in range(1, min(self.weight.shape[-1], g.shape[-2])):
            x[..., :-back, :] += g[..., back:, :] * self.weight[:, -1 - back]
        return x


@final
@dataclass(frozen=True, eq=False, repr=False)
class SelectiveScan(MixingMap):
    """``h_i = exp(Δ_i·A) ⊙ h_{i−1} + Δ_i·B_i ⊗ x_i`` and ``y_i = C_i·h_i``, with Δ, B and C held fixed.

    Heads of `head_dim` channels share Δ and A; head h reads group ``h // (heads // groups)`` of B and C. In Mamba 1
    every channel is a head. Decays are made from Δ and A where they are used: kept, they would take a number for every
    position, channel and state. Channels lie side by side in the last axis of vectors, head by head.

    A push or a pull is linear in the number of positions. Besides vectors it holds one state, `[state, channel]` for
    each row and prompt, and the matrices of one chunk of positions; rows that make a larger state than `CHUNK_BYTES`
    take turns.

    Attributes:
        delta: the step sizes Δ.
        A: the rates at which states decay (negative in models): one for a head (Mamba 2), or for each of its states.
        B: what an input writes to each state.
        C: what an output reads of each.
        head_dim: channels of a head.

    >>> from tensorlens_tl.algebra import SelectiveScan
    >>> ones = torch.ones(1, 2, 1, 1)
    >>> SelectiveScan(delta=ones[..., 0], A=torch.tensor([-1.0]), B=ones, C=ones).implicit_attention()[0, 0]
    tensor([[1.0000, 0.0000],
            [0.3679, 1.0000]])
    """

    delta: Float[Tensor, "batch pos head"]
    A: Float[Tensor, "head"] | Float[Tensor, "head state"]
    B: Float[Tensor, "batch pos group state"]
    C: Float[Tensor, "batch pos group state"]
    head_dim: int = 1

    @property
    def positions(self) -> int | None:
        return self.delta.shape[1]

    def __repr__(self) -> str:
        return f"SelectiveScan({self.delta.shape[-1]} × {self.head_dim} channels, {self.B.shape[-1]} states)"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def at(self, where: Where) -> "SelectiveScan":
        where = shared(where)
        return replace(self, delta=self.delta[:, where], B=self.B[:, where], C=self.C[:, where])

    def norm_bound(self) -> float:
        """√(largest row sum · largest column sum) of a bound of the absolute α (Schur's test)."""
        delta, A, B, C = (held.double() for held in (self.delta, self.A, self.B.abs(), self.C.abs()))
        sizes = delta.abs()[..., None]
        rows = _scan(sizes, delta, A, B, C).max()
        columns = (sizes * _scanned_back(torch.ones_like(sizes), delta, A, B, C)).max()
        return float((rows * columns).sqrt())

    def implicit_attention(self) -> Float[Tensor, "batch head query key"]:
        """α of every head: for pictures and tests, as it takes a number for each pair of positions.

        Raises:
            SizeError: larger than `memory.MOST_BYTES`.
        """
        batch, pos, heads = self.delta.shape
        check_size("implicit_attention", (batch, heads, pos, pos), self.delta)
        return self._columns(range(pos)).permute(1, 3, 2, 0)

    def mean_attention(self, memory: Memory = None) -> Float[Tensor, "batch query key"]:
        """The mean of |α| over heads, some keys at a time.

        Raises:
            InvalidInputError: `memory` cannot be read.
            SizeError: the result is larger than `memory.MOST_BYTES`, or a key larger than a bound that was given.
        """
        batch, pos, _ = self.delta.shape
        check_size("mean_attention", (batch, pos, pos), self.delta)
        means = self.delta.new_empty(pos, batch, pos)
        size = 4 * self.delta.numel() * self.delta.element_size()
        for keys in chunks(pos, size, memory, "mean attention"):
            means[keys.start : keys.stop] = self._columns(keys).abs_().mean(-1)
        return means.permute(1, 2, 0)

    def _columns(self, keys: range) -> Float[Tensor, "key batch query head"]:
        """What one at each key, in every head, puts into every query."""
        batch, pos, heads = self.delta.shape
        ones = self.delta.new_zeros(len(keys), batch, pos, heads)
        ones[torch.arange(len(keys)), :, torch.tensor(keys)] = 1
        return replace(self, head_dim=1).push(ones)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        heads = x.to(torch.promote_types(x.dtype, self.delta.dtype)).unflatten(-1, (-1, self.head_dim))
        y = _scan(heads * self.delta[..., None], self.delta, self.A, self.B, self.C)
        return y.flatten(-2).to(x.dtype)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        heads = g.to(torch.promote_types(g.dtype, self.delta.dtype)).unflatten(-1, (-1, self.head_dim))
        x = _scanned_back(heads, self.delta, self.A, self.B, self.C) * self.delta[..., None]
        return x.flatten(-2).to(g.dtype)


# ------------------------------------------------------------------ scans

Heads = Float[Tensor, "row batch pos head head_dim"]


def _scanned_back(g: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The adjoint of `_scan`, from the last position: C writes, B reads, and each decay acts one step later."""
    back = torch.nn.functional.pad(delta.flip(1), (0, 0, 1, 0))[:, :-1]
    return _scan(g.flip(-3), back, A, C.flip(1), B.flip(1)).flip(-3)


def _scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """All ``C_i·h_i`` of ``h_i = exp(Δ_i·A) ⊙ h_{i−1} + B_i ⊗ x_i``; vectors are `[*rows, batch, pos, head, head_dim]`.

    Rows go as many at a time as their states allow, positions a chunk at a time.
    """
    if x.numel() == 0:
        return x
    delta, A, B, C = (held.to(x.dtype) for held in (delta, A, B, C))
    rows = x.reshape(-1, *x.shape[-4:])
    state = delta[:, 0].numel() * x.shape[-1] * B.shape[-1] * x.element_size()
    parts = [_scan_rows(part, delta, A, B, C) for part in rows.split(max(1, CHUNK_BYTES // state))]
    return joined(parts).view(x.shape)


def _scan_rows(x: Heads, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Heads:
    rows, batch, pos, heads, width = x.shape
    size = _chunk_size(rows * width, delta, A, B)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    state = x.new_zeros(batch, heads, B.shape[-1], rows * width)
    for start in range(0, pos, size):
        here = slice(start, start + size)
        inside, entering, decay, leaving = _chunk(delta[:, here], A, B[:, here], C[:, here])
        vectors = rearrange(x[:, :, here], "r b i h d -> b h i (r d)")
        outputs = inside @ vectors
        if start:
            outputs = outputs + leaving @ state
        y[:, :, here] = rearrange(outputs, "b h i (r d) -> r b i h d", r=rows)
        if start + size < pos:
            state = entering.mT @ vectors + decay.mT * state
    return y


def _chunk(delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a chunk does: the matrix inside it, what enters the state, the decay of the old state, what leaves it.

    Returns:
        `[batch, head, i, j]`, `[batch, head, j, state]`, `[batch, head, 1, state]` and `[batch, head, i, state]`; the
        third has one column where a head has one rate.
    """
    share = delta.shape[-1] // B.shape[2]
    grouped = [rearrange(held, "b i group n -> b group i n") for held in (B, C)]
    writes, reads = (held.repeat_interleave(share, 1) for held in grouped)
    rates = A.reshape(len(A), 1, -1)
    passed = rearrange(delta, "b i h -> b h i 1").cumsum(-2)
    end = passed[..., -1:, :]
    between = passed - passed.mT
    later = torch.ones_like(between[0, 0], dtype=torch.bool).triu(1)
    if A.ndim == 1:
        decays = (rates * between).masked_fill_(later, -torch.inf).exp_()
        inside = (grouped[1] @ grouped[0].mT).repeat_interleave(share, 1) * decays
    else:
        decays = (rates.mT[..., None] * between[:, :, None]).masked_fill_(later, -torch.inf).exp_()
        inside = (decays * reads.mT[..., None] * writes.mT[..., None, :]).sum(2)
    return inside, writes * (rates * (end - passed)).exp(), (rates * end).exp(), reads * (rates * passed).exp()


def _chunk_size(columns: int, delta: Tensor, A: Tensor, B: Tensor) -> int:
    """The positions of a chunk: more of them hand on fewer states, but make a larger matrix.

    Args:
        columns: vectors, of all rows and channels of a head.
        delta, A, B: as for `SelectiveScan`.
    """
    heads, states = delta[:, 0].numel(), B.shape[-1]
    decays = 1
    if A.ndim == 2:
        decays = states
    for_each = STEP + PASS * heads * states * columns
    for_pairs = heads * (PASS * decays + columns) + B[:, 0].numel()
    most = (CHUNK_BYTES / (heads * decays * delta.element_size())) ** 0.5
    return max(1, int(min((for_each / for_pairs) ** 0.5, most)))
