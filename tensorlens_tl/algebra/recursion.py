"""Maps in which every position passes a state on to the next: y_i = x_i + step(y_{i−1}).

`Recursion` applies the same matrix at every step, y_i = x_i + y_{i−1}·W, as whitened self-attention does (Eq. 9).
`DiagonalRecursion` has a factor for each position and channel, y_i = x_i + a_i ⊙ y_{i−1}: the scan of state-space
layers with their gates held fixed. Both are linear and causal; their adjoints are the same recursions from the last
position to the first.

Going through positions sequentially takes many small products. A *prefix* scan (Blelloch 1990) pairs neighbours, solves
the pairs, and fills in the positions between: twice the arithmetic, in far fewer steps. *Doubling* (Hillis & Steele
1986) does it log2(pos) times, in the fewest steps: best for few vectors. `scan` chooses the cheapest.

State-space layers (Mamba 1 and 2, and their hybrids): with Δ, B and C fixed at their values for one input, a selective
scan is linear in its input, with an implicit attention (Ali, Zimerman & Wolf 2024). In each channel, the weight of
input j ≤ i in output i is

    α_ij = Σ_n C_i[n] · exp(A[n]·(Δ_{j+1} + … + Δ_i)) · B_j[n] · Δ_j

`CausalConvolution` is the short convolution before it. `SelectiveScan` never forms the positions × positions matrix α:
it applies the matrix inside each chunk of positions and passes one state to the next chunk, as Mamba 2 itself is
computed (Dao & Gu 2024). The same chunks serve Mamba 1, whose states have different decay rates, and the adjoint: the
same scan from the last position to the first, with B and C swapped.
"""

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra.maps import MixingMap, WithoutBias, bias_of, note_bias
from tensorlens_tl.algebra.memory import Memory, check_size, chunks, joined
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.algebra.positions import Where, shared
from tensorlens_tl.algebra.primitives import largest_singular_value

STEP = 800_000
"""The overhead of a step, as a number of multiplications and additions (measured on a CPU)."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Recursion(WithoutBias, MixingMap):
    """The recursion ``y_i = x_i + y_{i−1} @ weight``.

    Attributes:
        weight: the matrix of a step.
        keep: True at positions that take part; the others (padding) are skipped. None for all.

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

    def at(self, where: Where) -> "Recursion":
        if self.keep is None:
            return self
        return replace(self, keep=self.keep[:, shared(where)])

    def norm_bound(self) -> float:
        """A bound on ``Σ_k ‖Wᵏ‖``, infinite unless the powers shrink."""
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
class DiagonalRecursion(WithoutBias, MixingMap):
    """The recursion ``y_i = x_i + factor_i ⊙ y_{i−1}``, with channels and states flattened in the last axis of vectors.

    Attributes:
        factor: for every position, `[batch, pos, channel, state]`; the factor of the first position is not used.

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
    """Return the factors of the adjoint's scan, which runs from the last position: each acts one step later."""
    back = factor.flip(-2)
    return torch.cat([torch.ones_like(back[..., :1, :]), back[..., :-1, :]], dim=-2)


def spectral_radius(weight: Float[Tensor, "d d"]) -> float:
    """Return the largest absolute eigenvalue, the asymptotic growth per step of a vector."""
    return float(torch.linalg.eigvals(weight.double()).abs().max())


# ------------------------------------------------------------------ scans


def scan(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """Compute all ``y_i = x_i + y_{i−1} @ weight``; twice differentiable."""
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
    """Scan the positions to keep as if the others did not exist; those come out zero.

    Args:
        x, weight: as for `scan`.
        keep: True at positions that take part, or None for all.
        backwards: scan from the last position to the first.
    """
    order = None
    if keep is not None:
        x = x.masked_fill(~keep[..., None], 0)  # padding need not be finite
        if _has_gaps(keep):  # close the gaps
            order = keep.long().argsort(dim=-1, descending=True, stable=True)[..., None]
            x = torch.take_along_dim(x, order.expand(*x.shape[-3:-1], 1), dim=-2)
    y = scan(x.flip(-2), weight).flip(-2) if backwards else scan(x, weight)
    if keep is None:
        return y
    if order is not None:
        y = torch.take_along_dim(y, order.argsort(dim=-2), dim=-2)
    return y.masked_fill(~keep[..., None], 0)


def _has_gaps(keep: Bool[Tensor, "batch length"]) -> bool:
    """Return whether any row skips a position between two that are kept."""
    starts = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
    return bool((starts > 1).any())


def diagonal_scan(x: Float[Tensor, "*rows pos d"], factor: Float[Tensor, "*any pos d"]) -> Float[Tensor, "*rows pos d"]:
    """Compute all ``y_i = x_i + factor_i ⊙ y_{i−1}`` by a prefix scan; differentiable by autograd."""
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
    """A scan with an explicit adjoint: the same scan backwards, and one product for the weight."""

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
    """Run the cheapest scan for this number of rows and positions, counting steps, products, and powers of W."""
    pos, width = x.shape[-2:]
    vectors = 2 * x[..., 0].numel() * width**2
    power = 2 * width**3
    rounds = max(1, (pos - 1).bit_length())
    costs = {
        sequential: pos * STEP + vectors,
        prefix: rounds * (4 * STEP + power) + 2 * vectors,
        doubling: rounds * (2 * STEP + power + vectors),
    }
    return min(costs, key=lambda way: costs[way])(x, weight)


def sequential(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """Scan one position after the other."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y[..., 0, :] = x[..., 0, :]
    for position in range(1, x.shape[-2]):
        y[..., position, :] = x[..., position, :] + y[..., position - 1, :] @ weight
    return y


def prefix(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """Scan pairs of neighbours first, then the positions between them: 2·log2(pos) rounds (Blelloch 1990)."""
    if x.shape[-2] == 1:
        return x
    even, odd = x[..., 0::2, :], x[..., 1::2, :]
    pairs = prefix(odd + even[..., : odd.shape[-2], :] @ weight, weight @ weight)
    rest = even[..., 1:, :] + pairs[..., : even.shape[-2] - 1, :] @ weight
    return _interleaved(torch.cat([even[..., :1, :], rest], dim=-2), pairs)


def doubling(x: Float[Tensor, "*rows pos d"], weight: Float[Tensor, "d d"]) -> Float[Tensor, "*rows pos d"]:
    """Add what comes from one position before, then from two, four, …: log2(pos) rounds (Hillis & Steele 1986)."""
    y = x
    reach = 1
    while reach < x.shape[-2]:
        if reach > 1:
            weight = weight @ weight
        y = torch.cat([y[..., :reach, :], y[..., reach:, :] + y[..., :-reach, :] @ weight], dim=-2)
        reach *= 2
    return y


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Interleave two sequences; the second may be one position shorter."""
    pos = even.shape[-2] + odd.shape[-2]
    if odd.shape[-2] < even.shape[-2]:
        odd = torch.nn.functional.pad(odd, (0, 0, 0, 1))
    return torch.stack([even, odd], dim=-2).reshape(*even.shape[:-2], -1, even.shape[-1])[..., :pos, :]


PASS = 12
"""The cost of decaying or writing a number, as a number of multiplications and additions of a matrix product."""
CHUNK_BYTES = 64 * 2**20
"""Maximal bytes of a chunk's state, over as many rows as fit, and of the array that its matrix is computed from."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class CausalConvolution(MixingMap):
    """``y_i = Σ_k weight[:, width−1−k] ⊙ x_{i−k} + offset``: channels are separate, and the last weight is that of x_i.

    Inputs before the first position count as zero. There is no mask: models zero padding before the preceding
    projection, whose bias the convolution does read, and again after the activation that follows. Unless `length` gives
    the number of positions, an incoming bias must have an entry for each position.

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
class SelectiveScan(WithoutBias, MixingMap):
    """``h_i = exp(Δ_i·A) ⊙ h_{i−1} + Δ_i·B_i ⊗ x_i`` and ``y_i = C_i·h_i``, with Δ, B and C held fixed.

    Heads of `head_dim` channels share Δ and A; head h reads group ``h // (heads // groups)`` of B and C. In Mamba 1
    every channel is a head. Decays are computed from Δ and A on the fly: stored, they would take a number for every
    position, channel and state. The last axis of vectors holds the channels, head by head.

    A push or a pull takes time linear in the number of positions. Apart from the vectors it stores one state,
    `[state, channel]` for each row and prompt, and the matrices of one chunk of positions; rows are processed in turns
    if their states exceed `CHUNK_BYTES`.

    Attributes:
        delta: the step sizes Δ.
        A: the decay rates of states (negative in models): one per head (Mamba 2), or one for each of its states.
        B: how an input is written to each state.
        C: how an output reads each state.
        head_dim: channels per head.

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

    def at(self, where: Where) -> "SelectiveScan":
        where = shared(where)
        return replace(self, delta=self.delta[:, where], B=self.B[:, where], C=self.C[:, where])

    def norm_bound(self) -> float:
        """√(largest row sum · largest column sum) of a bound on the absolute α (Schur's test)."""
        delta, A, B, C = (held.double() for held in (self.delta, self.A, self.B.abs(), self.C.abs()))
        sizes = delta.abs()[..., None]
        rows = _scan(sizes, delta, A, B, C).max()
        columns = (sizes * _scanned_back(torch.ones_like(sizes), delta, A, B, C)).max()
        return float((rows * columns).sqrt())

    def implicit_attention(self) -> Float[Tensor, "batch head query key"]:
        """Return α of every head, for pictures and tests: it takes a number for each pair of positions.

        Raises:
            SizeError: the result is larger than `memory.MOST_BYTES`.
        """
        batch, pos, heads = self.delta.shape
        check_size("implicit_attention", (batch, heads, pos, pos), self.delta)
        return self._columns(range(pos)).permute(1, 3, 2, 0)

    def mean_attention(self, memory: Memory = None) -> Float[Tensor, "batch query key"]:
        """Return the mean of |α| over heads, computed for some keys at a time.

        Raises:
            InvalidInputError: `memory` cannot be read.
            SizeError: the result is larger than `memory.MOST_BYTES`, or a single key exceeds an explicit bound.
        """
        batch, pos, _ = self.delta.shape
        check_size("mean_attention", (batch, pos, pos), self.delta)
        means = self.delta.new_empty(pos, batch, pos)
        size = 4 * self.delta.numel() * self.delta.element_size()
        for keys in chunks(pos, size, memory, "mean attention"):
            means[keys.start : keys.stop] = self._columns(keys).abs_().mean(-1)
        return means.permute(1, 2, 0)

    def _columns(self, keys: range) -> Float[Tensor, "key batch query head"]:
        """Return the columns of α at some keys: every query's output for a 1 at the key."""
        return replace(self, head_dim=1).push(ones_at(keys, self.delta))

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        heads = x.to(torch.promote_types(x.dtype, self.delta.dtype)).unflatten(-1, (-1, self.head_dim))
        y = _scan(heads * self.delta[..., None], self.delta, self.A, self.B, self.C)
        return y.flatten(-2).to(x.dtype)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        heads = g.to(torch.promote_types(g.dtype, self.delta.dtype)).unflatten(-1, (-1, self.head_dim))
        x = _scanned_back(heads, self.delta, self.A, self.B, self.C) * self.delta[..., None]
        return x.flatten(-2).to(g.dtype)


def ones_at(keys: range, like: Float[Tensor, "batch pos d"]) -> Float[Tensor, "key batch pos d"]:
    """Return a row for each key: 1 at the key in every channel, zero elsewhere."""
    ones = like.new_zeros(len(keys), *like.shape)
    ones[torch.arange(len(keys)), :, torch.tensor(keys)] = 1
    return ones


# ------------------------------------------------------------------ scans

Heads = Float[Tensor, "row batch pos head head_dim"]


def _scanned_back(g: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Apply the adjoint of `_scan`, from the last position: C writes, B reads, and each decay acts one step later."""
    back = torch.nn.functional.pad(delta.flip(1), (0, 0, 1, 0))[:, :-1]
    return _scan(g.flip(-3), back, A, C.flip(1), B.flip(1)).flip(-3)


def _scan(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Compute ``C_i·h_i`` with ``h_i = exp(Δ_i·A) ⊙ h_{i−1} + B_i ⊗ x_i``, for `[*rows, batch, pos, head, head_dim]`.

    Processes as many rows at a time as their states allow, and positions a chunk at a time.
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
    """Return the matrix inside a chunk, what enters the state, the decay of the old state, and what leaves it.

    Returns:
        `[batch, head, i, j]`, `[batch, head, j, state]`, `[batch, head, 1, state]` and `[batch, head, i, state]`; the
        third has one column if a head has a single rate.
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
    """Return the positions per chunk: larger chunks pass on fewer states, but make larger matrices.

    Args:
        columns: the number of vectors, over all rows and channels of a head.
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
