"""One layer's attention projections by head: stacking them as a tensor, their gauge freedom, and Tucker decompositions.

A head's circuits do not depend on the basis inside the head: for any invertible G, queries W_Q·G and keys W_K·G⁻ᵀ give
the same scores, and values W_V·G with outputs G⁻¹·W_O the same output. Tucker's shared factor of that axis does depend
on it. `in_circuit_gauge` moves every head to the basis that its own circuits single out.

The Tucker decomposition here leaves the last mode alone: factors are shared, with one core per entry of that mode.

    T[i, j, k, h] ≈ Σ_abc core[a, b, c, h] · U1[i, a] · U2[j, b] · U3[k, c]

TensorLLM (Eqs. 9–11) factorises the attention weights of a layer in this way, with h over heads. The decomposition is
independent of what the tensor means.

Factors come from the Gram matrix of each mode (HOSVD; De Lathauwer et al. 2000). With all of them and the whole core,
the error of *every* choice of ranks is a partial sum of squared core entries, so one decomposition gives the whole
table. `hooi` refines one choice (De Lathauwer et al. 2000b): each update is the best factor given the others, so the
error never increases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Seed, check_choice, checked_names, plain, real_number, whole_number, whole_seed
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.scores import score_reading
from tensorlens_tl.circuits.weights import as_pass, as_view
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.writing import writable
from tensorlens_tl.passes import FrozenPass

if TYPE_CHECKING:
    import torch

    Number = float | torch.Tensor | None
    """A number of any kind (also numpy's and torch's), or None if another option is used."""

    Count = int | torch.Tensor | None
    """An integer of any kind."""

    RankChoice = Sequence[int] | torch.Tensor | None
    """(R1, R2, R3), or None."""

    Layers = int | slice | Sequence[int] | set[int] | None
    """A layer, several, a slice, or None for all."""

    MLPShare = float | Mapping[str, float] | None
    """LASER's ρ, for all of an MLP's matrices or by name."""

    RankRule = Literal["free", "paper"]
    Layout = Literal["paper", "released"]
    Gauge = Literal["circuit"] | None
    Start = Literal["hosvd", "sequential"]
else:
    Number = Count = RankChoice = Layers = MLPShare = RankRule = Layout = Gauge = Start = Any


RULES = ("free", "paper")
"""Which ranks are considered: all, or only TensorLLM's (r·h, r, s)."""
CHUNK_BYTES = 64 * 2**20
"""How much of a Gram matrix's input is cast to float64 at once."""

ROUNDED = 1 + 1e-12
"""Tolerance for rounding, so that ranks reach a ratio that was computed from them."""

Ranks = tuple[int, ...]
Shape = tuple[int, ...]


def parameter_count(shape: Sequence[int], ranks: Sequence[int]) -> int:
    """Return R1·R2·R3·h + d·R1 + d_head·R2 + slices·R3: the numbers in core and factors.

    >>> shape = (4096, 256, 4, 16)  # GPT-J
    >>> round(4 * 4096**2 / parameter_count(shape, (64, 4, 2)), 2)  # printed in the paper: 247.30
    247.3
    """
    return math.prod(ranks) * shape[3] + sum(length * rank for length, rank in zip(shape, ranks, strict=False))


def paper_ranks(shape: Sequence[int], r: Count, s: Count) -> Ranks:
    """Return TensorLLM's ranks (r·h, r, s) for a tensor of this shape, (d_model, d_head, slices, heads).

    >>> from tensorlens_tl.compress import paper_ranks
    >>> paper_ranks((4096, 256, 4, 16), r=4, s=2)
    (64, 4, 2)

    They reproduce every compression ratio in the paper. r and s out of range raise `InvalidInputError`.
    """
    d, width, slices, heads = shape
    r = whole_number("r", r, 1, min(width, d // heads), why=f"R1 = {heads}·r is at most {d}")
    return heads * r, r, whole_number("s", s, 1, slices)


@dataclass(frozen=True, eq=False)
class Tucker:
    """A Tucker decomposition: shared factors, and a core per entry of the last mode."""

    core: Float[Tensor, "R1 R2 R3 h"]
    factors: tuple[Tensor, ...]

    @property
    def ranks(self) -> Ranks:
        """(R1, R2, R3)."""
        return tuple(self.core.shape[:3])

    @property
    def shape(self) -> Shape:
        """The shape of the tensor that it stands for."""
        return (*map(len, self.factors), self.core.shape[3])

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return parameter_count(self.shape, self.ranks)

    def dense(self) -> Float[Tensor, "d1 d2 d3 h"]:
        """Return the tensor that it stands for.

        >>> tensor = torch.randn(6, 5, 4, 3)
        >>> whole = tlens.compress.sequential_hosvd(tensor, (6, 5, 4))  # nothing cut off
        >>> torch.allclose(whole.dense(), tensor, atol=1e-5)
        True
        """
        tensor = self.core
        for mode in (2, 1, 0):  # the largest mode last, to keep intermediate results small
            tensor = mode_product(tensor, self.factors[mode], mode)
        return tensor


@dataclass(frozen=True, eq=False)
class HOSVD:
    """A tensor in the singular basis of each of its first three modes, before truncation.

    >>> from tensorlens_tl.compress import HOSVD
    >>> whole = HOSVD.of(torch.randn(8, 6, 4, 3))
    >>> whole.error((8, 6, 4))  # nothing cut off
    0.0
    >>> bool(whole.error((4, 3, 2)) < whole.error((2, 3, 2)))
    True

    Attributes:
        factors: orthonormal, with directions in descending order of energy.
        core: the tensor in these bases.
        spectra: the energy of each mode's directions, ‖slice of the core‖².
    """

    factors: tuple[Tensor, ...]
    core: Float[Tensor, "d1 d2 d3 h"]
    spectra: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "HOSVD":
        """Decompose `[d1, d2, d3, h]`; raise `InvalidInputError` for another number of modes, NaN, or only zeros."""
        _check_tensor(tensor)
        directions, spectra = zip(*(_directions(tensor, mode) for mode in range(3)), strict=True)
        factors = tuple(factor.to(tensor) for factor in directions)
        core = tensor
        for mode, factor in enumerate(factors):
            core = mode_product(core, factor.T, mode)
        return cls(factors, core, spectra)

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(self.core.shape)

    @cached_property
    def lost(self) -> Float[Tensor, "d1 d2 d3"]:
        """The share of ‖T‖² lost at ranks (a+1, b+1, c+1), at entry [a, b, c].

        Summed over what is cut off, since 1 minus what remains would round small errors away.
        """
        energy = self.core.double().square().sum(3)
        energy = energy / energy.sum()
        first = _after(energy.sum((1, 2)), 0)[:, None, None]
        second = _after(energy.sum(2), 1).cumsum(0)[:, :, None]
        return first + second + _after(energy, 2).cumsum(0).cumsum(1)

    @cached_property
    def counts(self) -> Int[Tensor, "d1 d2 d3"]:
        """The number of parameters for every choice of ranks, laid out as `lost`."""
        d, width, slices, heads = self.shape
        one, two, three = (torch.arange(1, n + 1, device=self.core.device) for n in (d, width, slices))
        one = one[:, None, None]
        two = two[:, None]
        return one * two * three * heads + d * one + width * two + slices * three

    def error(self, ranks: Sequence[int]) -> float:
        """Return ‖T − truncated‖ / ‖T‖ for these ranks; raise `InvalidInputError` if they are out of range."""
        a, b, c = check_ranks(self.shape, ranks)
        return math.sqrt(float(self.lost[a - 1, b - 1, c - 1]))

    def ratio(self, ranks: Sequence[int]) -> float:
        """Return parameters before ÷ after for these ranks; raise `InvalidInputError` if they are out of range."""
        return math.prod(self.shape) / parameter_count(self.shape, check_ranks(self.shape, ranks))

    def best_ranks(self, *, ratio: Number = None, energy: Number = None, rule: RankRule = "free") -> Ranks:
        """Return the ranks (R1, R2, R3) with the least loss at a ratio, or with the fewest parameters at an energy.

        Args:
            ratio: the least ratio of parameters before ÷ after.
            energy: the least share of ‖T‖² to keep.
            rule: ``"free"`` or ``"paper"``, see `RULES`.

        Raises:
            InvalidInputError: neither or both, unknown rule, or no ranks that reach it; says what ranks can reach.

        >>> whole = tlens.compress.HOSVD.of(torch.randn(8, 6, 4, 3))
        >>> whole.ratio(whole.best_ranks(ratio=2)) >= 2
        True
        """
        if (ratio is None) == (energy is None):
            raise InvalidInputError("ranks: pass one of ranks=, ratio= and energy=.")
        counts = self.counts
        losses = self.lost
        allowed = self._allowed(rule)
        if ratio is not None:
            before = math.prod(self.shape)
            ratio = positive("ratio", ratio)
            condition = f"ratio={ratio}"
            candidates = allowed & (counts * ratio <= before * ROUNDED)
            objective = losses
            limit = f"the largest here is {before / int(counts[allowed].min()):.4g}"
        else:
            energy = positive("energy", energy, most=1.0)
            condition = f"energy={energy}"
            candidates = allowed & (losses <= 1 - energy)
            objective = counts
            limit = f"the largest share here is {1 - float(losses[allowed].min()):.4g}"
        if not bool(candidates.any()):
            raise InvalidInputError(f"{condition}: no ranks of {list(self.shape)} by rule {rule!r} reach it; {limit}.")
        best = int(objective.double().masked_fill(~candidates, torch.inf).argmin())
        a, b, c = torch.unravel_index(torch.tensor(best), counts.shape)
        return int(a) + 1, int(b) + 1, int(c) + 1

    def _allowed(self, rule: RankRule) -> Bool[Tensor, "d1 d2 d3"]:
        """Return which choices of ranks a rule allows, laid out as `lost`."""
        check_choice("rule", rule, RULES)
        allowed = torch.ones_like(self.counts, dtype=torch.bool)
        if rule == "free":
            return allowed
        first, second = (torch.arange(1, n + 1, device=allowed.device) for n in self.shape[:2])
        allowed &= (first[:, None] == self.shape[3] * second)[..., None]
        if not bool(allowed.any()):
            raise InvalidInputError(f"rule='paper': R1 = r·{self.shape[3]} is more than {self.shape[0]} for any r.")
        return allowed

    def truncated(self, ranks: Sequence[int]) -> Tucker:
        """Keep the leading directions of every mode; raise `InvalidInputError` for ranks out of range.

        >>> whole = tlens.compress.HOSVD.of(torch.randn(8, 6, 4, 3))
        >>> whole.truncated((4, 3, 2)).core.shape
        torch.Size([4, 3, 2, 3])
        """
        a, b, c = check_ranks(self.shape, ranks)
        factors = tuple(factor[:, :rank].clone() for factor, rank in zip(self.factors, (a, b, c), strict=True))
        return Tucker(self.core[:a, :b, :c].clone(), factors)


def sequential_hosvd(tensor: Float[Tensor, "d1 d2 d3 h"], ranks: Sequence[int]) -> Tucker:
    """Truncate mode by mode, computing each factor from what is left (Vannieuwenhoven et al. 2012).

    Cheaper than `HOSVD` for a single choice of ranks.

    Raises:
        InvalidInputError: not four modes, values that are not finite, or ranks out of range.

    >>> from tensorlens_tl import compress
    >>> compress.sequential_hosvd(torch.randn(6, 5, 4, 3), (3, 3, 2)).core.shape
    torch.Size([3, 3, 2, 3])
    """
    _check_tensor(tensor)
    core = tensor
    factors = []
    for mode, rank in enumerate(check_ranks(tuple(tensor.shape), ranks)):
        factors.append(_directions(core, mode)[0][:, :rank].to(tensor))
        core = mode_product(core, factors[-1].T, mode)
    return Tucker(core, tuple(factors))


class Refined(NamedTuple):
    """The result of `hooi`: the decomposition, and its relative errors before and after every sweep."""

    tucker: Tucker
    errors: list[float]


def hooi(tensor: Float[Tensor, "d1 d2 d3 h"], start: Tucker, *, sweeps: Count = 25, tolerance: float = 1e-9) -> Refined:
    """Run higher-order orthogonal iteration: each factor in turn becomes the best one given the others.

    Args:
        tensor: the tensor to approximate.
        start: a decomposition of it with orthonormal factors, such as a truncated HOSVD.
        sweeps: the most sweeps; it stops earlier once the error falls by less than `tolerance`.

    Raises:
        InvalidInputError: `sweeps` below 1, or a start of another shape.

    >>> from tensorlens_tl import compress
    >>> tensor = torch.randn(6, 5, 4, 3)
    >>> refined = compress.hooi(tensor, compress.sequential_hosvd(tensor, (2, 2, 2)))
    >>> refined.errors[-1] <= refined.errors[0]
    True
    """
    sweeps = whole_number("sweeps", sweeps, least=1)
    if tuple(tensor.shape) != start.shape:
        raise InvalidInputError(f"hooi: the start is of shape {start.shape}, the tensor {tuple(tensor.shape)}.")
    whole = float(tensor.double().square().sum())
    factors = list(start.factors)
    core = start.core
    ranks = start.ranks

    def error() -> float:
        return math.sqrt(max(0.0, 1 - float(core.double().square().sum()) / whole))

    errors = [error()]
    for _ in range(sweeps):
        for mode in range(3):
            left = tensor
            for other in sorted(set(range(3)) - {mode}, key=lambda m: ranks[m] / tensor.shape[m]):
                left = mode_product(left, factors[other].T, other)
            factors[mode] = _directions(left, mode)[0][:, : ranks[mode]].to(tensor)
            core = mode_product(left, factors[mode].T, mode)
        errors.append(error())
        if errors[-2] - errors[-1] < tolerance:
            break
    return Refined(Tucker(core, tuple(factors)), errors)


def mode_product(tensor: Float[Tensor, "d1 d2 d3 h"], matrix: Float[Tensor, "new old"], mode: int) -> Tensor:
    """Return ``tensor ×_mode matrix`` (TensorLLM Eqs. 1–2)."""
    return torch.tensordot(matrix, tensor.movedim(mode, 0), dims=1).movedim(0, mode)


def check_ranks(shape: Sequence[int], ranks: RankChoice) -> Ranks:
    """Return three ranks, checking each against its mode."""
    ranks = plain(ranks)
    if isinstance(ranks, str) or not isinstance(ranks, Sequence) or len(ranks) != 3:
        raise InvalidInputError(f"ranks={ranks!r}: pass three, (R1, R2, R3).")
    why = f"the tensor is {list(shape)}"
    return tuple(whole_number(f"ranks[{mode}]", rank, 1, shape[mode], why=why) for mode, rank in enumerate(ranks))


def positive(name: str, value: Number, most: float = math.inf) -> float:
    """Return a positive number of any kind (also numpy's and torch's), at most `most`."""
    words = "pass a positive number" if most == math.inf else f"pass a number above 0, at most {most:g}"
    return real_number(name, value, lambda x: 0 < x <= most, words)


def _check_tensor(tensor: Tensor) -> None:
    if tensor.ndim != 4:
        raise InvalidInputError(f"a tensor with four modes is needed, got {tuple(tensor.shape)}.")
    if not bool(torch.isfinite(tensor).all()) or not bool(tensor.any()):
        raise InvalidInputError("the tensor has values that are not finite, or only zeros.")


def _directions(tensor: Tensor, mode: int) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]]:
    """Return a mode's orthonormal directions, strongest first, and their energies, from its float64 Gram matrix."""
    per_head = tensor[..., 0].numel() * 8
    gram = torch.zeros(2 * (tensor.shape[mode],), dtype=torch.float64, device=tensor.device)
    for part in tensor.split(max(1, CHUNK_BYTES // per_head), dim=3):
        rows = part.double().movedim(mode, 0).flatten(1)
        gram += rows @ rows.T
    energies, directions = torch.linalg.eigh(gram)
    return directions.flip(1), energies.flip(0).clamp_min(0)


def _after(energy: Tensor, dim: int) -> Tensor:
    """Return along one axis the sum of all later entries, adding only those, so that small tails are exact."""
    tails = energy.flip(dim).cumsum(dim).flip(dim).narrow(dim, 1, energy.shape[dim] - 1)
    return torch.cat([tails, torch.zeros_like(energy.narrow(dim, 0, 1))], dim)


LETTERS = "QKVO"
LAYOUTS = ("paper", "released")
"""Which axis `stack_heads` splits: by head, or d_model."""
GAUGES = (None, "circuit")


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """One layer's four projections by head, with outputs transposed, and the biases of the first three.

    Keys and values have the key-value heads of grouped attention: query head h uses key head ``h // group``.

    Attributes:
        matrices: by letter: Q and O `[head, d_model, d_head]`, K and V `[kv, d_model, d_head]`.
        biases: by letter, `[head, d_head]`, if there are any.
        fixed_scores: returns why the basis of queries and keys in a head is not free (such as rotary positions), or
            None; called only when needed.
        where: the layer, for messages.
    """

    matrices: Mapping[str, Float[Tensor, "_head _d_model _d_head"]]
    biases: Mapping[str, Float[Tensor, "_head d_head"]]
    fixed_scores: Callable[[], str | None] = lambda: None
    where: str = "this layer"

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return len(self.matrices["Q"])

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads."""
        return len(self.matrices["K"])

    @property
    def group(self) -> int:
        """The number of query heads per key-value head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """The size of all four matrices; biases are never counted."""
        return self.count(LETTERS)

    def count(self, letters: str) -> int:
        """Return the total size of some of the matrices."""
        return sum(self.matrices[letter].numel() for letter in letters)

    def changed(self, matrices: Mapping[str, Tensor], biases: Mapping[str, Tensor] | None = None) -> "HeadWeights":
        """Return a copy with other weights for some letters."""
        return replace(self, matrices={**self.matrices, **matrices}, biases={**self.biases, **(biases or {})})

    def check_free(self, letters: str) -> None:
        """Raise `UnsupportedModelError` if queries or keys are among the letters and their basis is not free."""
        if not set(letters) & set("QK"):
            return
        why = self.fixed_scores()
        if why is not None:
            raise UnsupportedModelError(
                f"{self.where}: the basis of queries and keys inside a head is not free here ({why}), so "
                "their circuit has no gauge. Use matrices='VO', or a method that leaves the basis alone."
            )


def check_letters(matrices: object) -> str:
    """Return some of Q, K, V and O, in that order."""
    if not isinstance(matrices, str) or not matrices or set(matrices) - set(LETTERS):
        raise InvalidInputError(f"matrices={matrices!r}: pass some of 'QKVO', such as 'VO'.")
    return "".join(letter for letter in LETTERS if letter in matrices)


# ------------------------------------------------------------------ tensors


@checked_names
def stack_heads(
    weights: HeadWeights, matrices: str = LETTERS, layout: Layout = "paper"
) -> Float[Tensor, "d1 d2 slices h"]:
    """Stack the matrices of every head as one tensor (TensorLLM Eqs. 7–8): `[d_model, d_head, slices, heads]`.

    In grouped attention, the heads are key-value groups: Q and O give a slice for each query head of a group, K and V
    one, 2g + 2 in total. ``layout="released"`` follows what the authors' code is reported to do instead: it views each
    matrix `[heads·d_head, d_model]` as `[heads·d_head, heads, d_model/heads]`, which splits d_model rather than the
    heads.

    Raises:
        InvalidInputError: unknown layout, or one that these shapes do not allow.

    >>> from tensorlens_tl import compress
    >>> compress.stack_heads(compress.head_weights(model, 0)).shape  # d_model d_head matrices heads
    torch.Size([128, 32, 4, 4])
    """
    if layout == "paper":
        widths = {letter: weights.matrices[letter].shape[2] for letter in matrices}
        if len(set(widths.values())) > 1:
            raise InvalidInputError(f"{weights.where}: heads of different widths ({widths}) cannot be stacked.")
        split = [rearrange(weights.matrices[m], "(kv g) d k -> d k g kv", kv=weights.kv_heads) for m in matrices]
        return torch.cat(split, dim=2)
    check_choice("layout", layout, LAYOUTS)
    first, *others = (weights.matrices[letter].shape for letter in matrices)
    heads, d_model, _ = first
    if any(shape != first for shape in others) or d_model % heads:
        raise InvalidInputError(
            f"layout='released': it needs matrices of one shape and as many heads as divide d_model; {weights.where} "
            f"has {weights.heads} query heads, {weights.kv_heads} key-value heads and d_model {d_model}."
        )
    return torch.stack([rearrange(weights.matrices[m], "h (c e) k -> (h k) e c", c=heads) for m in matrices], dim=2)


def unstacked(
    tensor: Float[Tensor, "d1 d2 slices h"], matrices: str, layout: Layout, heads: int, kv_heads: int
) -> dict[str, Float[Tensor, "_head d_model d_head"]]:
    """Invert `stack_heads`, returning the matrices by letter."""
    if layout == "released":
        slices = zip(matrices, tensor.unbind(2), strict=True)
        return {letter: rearrange(part, "(h k) e c -> h (c e) k", h=heads) for letter, part in slices}
    group = heads // kv_heads
    counts = {"Q": group, "K": 1, "V": 1, "O": group}
    parts = zip(matrices, tensor.split([counts[letter] for letter in matrices], dim=2), strict=True)
    return {letter: rearrange(part, "d k g kv -> (kv g) d k") for letter, part in parts}


def slice_scales(tensor: Float[Tensor, "d1 d2 slices h"]) -> Float[Tensor, "slices"]:
    """Return 1 / ‖slice‖, used by ``balance=True``; otherwise the largest matrices (Q and K) take most of the ranks."""
    norms = tensor.double().square().sum((0, 1, 3)).sqrt()
    return (1 / norms.clamp_min(torch.finfo(tensor.dtype).tiny)).to(tensor)


# ------------------------------------------------------------------ the basis inside a head


@checked_names
def in_circuit_gauge(weights: HeadWeights, matrices: str = LETTERS) -> HeadWeights:
    """Move every head, biases included, to the singular basis of its own circuits; the model's output is unchanged.

    >>> from tensorlens_tl import compress
    >>> before = compress.head_weights(model, 0)
    >>> after = compress.in_circuit_gauge(before)
    >>> circuits = [weights.matrices["Q"] @ weights.matrices["K"].mT for weights in (before, after)]
    >>> torch.allclose(*circuits, atol=1e-4)
    True

    The QK circuit is ``[W_Q; b_Q]·[W_K; b_K]ᵀ``, the OV circuit ``[W_V; b_V]·W_O``; in a group, those of all its query
    heads together. Each side gets the square root of the singular values, so that directions are in descending order
    and truncating them gives the circuit's truncated SVD. The sign of a direction, which its circuit leaves open, is
    chosen to make the sum of cubes on its query (value) side positive. `matrices` are ``"QK"``, ``"VO"`` or both.

    Raises:
        InvalidInputError: only half of a circuit.
        UnsupportedModelError: queries and keys are included, and their basis is not free.
    """
    if check_letters(matrices) not in ("QKVO", "QK", "VO"):
        raise InvalidInputError(f"matrices={matrices!r}: a circuit's basis belongs to both its matrices; use QK, VO.")
    weights.check_free(matrices)
    new_matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for read, other in (("Q", "K"), ("V", "O")):
        if read not in matrices:
            continue
        sides = [_side(weights, letter) for letter in (read, other)]
        for letter, side in zip((read, other), _singular(*sides), strict=True):
            group = len(weights.matrices[letter]) // weights.kv_heads
            rows = rearrange(side, "kv (g rows) k -> (kv g) rows k", g=group)
            new_matrices[letter] = rows
            if letter in weights.biases:  # the row below those of the matrix
                new_matrices[letter] = rows[:, :-1]
                biases[letter] = rows[:, -1]
    return weights.changed(new_matrices, biases)


def _side(weights: HeadWeights, letter: str) -> Float[Tensor, "kv rows d_head"]:
    """Return one side of the circuits: rows of a group's heads stacked, each followed by its bias as a row."""
    matrix = weights.matrices[letter]
    if letter in weights.biases:
        matrix = torch.cat([matrix, weights.biases[letter][:, None]], dim=1)
    return rearrange(matrix, "(kv g) rows k -> kv (g rows) k", kv=weights.kv_heads)


def _singular(a: Float[Tensor, "h n k"], b: Float[Tensor, "h m k"]) -> tuple[Tensor, Tensor]:
    """Factorise ``a·bᵀ`` for every head by its SVD, with the square root of the singular values on either side."""
    qa, ra = torch.linalg.qr(a)
    qb, rb = torch.linalg.qr(b)
    u, values, vh = torch.linalg.svd(ra @ rb.mT, full_matrices=False)
    left = qa @ u
    right = qb @ vh.mT
    signs = torch.where(left.pow(3).sum(1, keepdim=True) < 0, -1.0, 1.0).to(a)
    roots = values.sqrt()[:, None] * signs
    wider = (0, a.shape[-1] - values.shape[-1])  # if heads are wider than the stream, directions beyond it are zero
    return torch.nn.functional.pad(left * roots, wider), torch.nn.functional.pad(right * roots, wider)


@checked_names
def rotate_heads(weights: HeadWeights, seed: Seed = 0) -> HeadWeights:
    """Return the same circuits in a random basis inside every head, to test whether a method depends on it.

    >>> from tensorlens_tl import compress
    >>> heads = compress.head_weights(model, 0)
    >>> before, after = (h.matrices["V"] @ h.matrices["O"].mT for h in (heads, compress.rotate_heads(heads)))
    >>> torch.allclose(before, after, atol=1e-5)
    True
    """
    generator = torch.Generator().manual_seed(whole_seed(seed))
    like = weights.matrices["Q"]
    new_matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for pair in ("QK", "VO"):
        if pair == "QK" and weights.fixed_scores() is not None:
            continue
        width = weights.matrices[pair[0]].shape[2]
        basis = torch.randn(weights.kv_heads, width, width, generator=generator, dtype=torch.float64)
        basis = (basis + 2 * width**0.5 * torch.eye(width, dtype=torch.float64)).to(like)  # far from singular
        for letter, change in zip(pair, (basis, torch.linalg.inv(basis).mT), strict=True):
            by_head = change.repeat_interleave(len(weights.matrices[letter]) // weights.kv_heads, dim=0)
            new_matrices[letter] = weights.matrices[letter] @ by_head
            if letter in weights.biases:
                biases[letter] = (weights.biases[letter][:, None] @ by_head)[:, 0]
    return weights.changed(new_matrices, biases)


def circuits(weights: HeadWeights) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both factors of every query head's circuits without biases: ``{"QK": (W_Q, W_K), "OV": (W_V, W_Oᵀ)}``."""
    expand = {letter: len(weights.matrices["Q"]) // len(matrix) for letter, matrix in weights.matrices.items()}
    by_head = {letter: matrix.repeat_interleave(expand[letter], dim=0) for letter, matrix in weights.matrices.items()}
    return {"QK": (by_head["Q"], by_head["K"]), "OV": (by_head["V"], by_head["O"])}


@checked_names
def head_weights(model: ModelLike | ModelView, layer: int) -> HeadWeights:
    """Return copies of one layer's projections by head, half precision as float32; `model` may be a `FrozenPass`.

    >>> from tensorlens_tl import compress
    >>> compress.head_weights(model, 0).matrices["Q"].shape  # head, d_model, d_head
    torch.Size([4, 128, 32])

    Raises:
        InvalidInputError: no such layer.
        UnsupportedModelError: attention that cannot be read or written, or quantised weights.
        NumericalError: NaN or Inf in a weight.
    """
    view = as_view(model)
    layer = whole_number("layer", layer, -view.n_layers, view.n_layers - 1, why="a layer of this model")
    return read(view, layer % view.n_layers, cache(partial(as_pass, view)))


def read(view: ModelView, layer: int, short_pass: Callable[[], FrozenPass]) -> HeadWeights:
    """Implement `head_weights`; `short_pass` gives a pass of a few tokens, shared by all layers and run on demand."""
    view.blocks[layer].require_plain_attention()  # requires exactly four matrices
    parameters = writable(view.blocks[layer])
    matrices = {letter: _copied(parameters[f"W_{letter}"]) for letter in "QKV"} | {"O": _copied(parameters["W_O"].mT)}
    biases = {letter: _copied(parameters[f"b_{letter}"]) for letter in "QKV" if f"b_{letter}" in parameters}
    where = f"blocks.{layer} of this {view.description}"
    for kind, weights in (("W", matrices), ("b", biases)):
        for letter, weight in weights.items():
            if not bool(torch.isfinite(weight).all()):
                raise NumericalError(f"{where}: attn.{kind}_{letter} has values that are not finite.")
    return HeadWeights(matrices, biases, partial(why_scores_fix_the_basis, view, layer, short_pass), where)


def mlp_matrices(view: ModelView, layer: int) -> dict[str, Tensor]:
    """Return copies of one layer's MLP matrices by name."""
    block = view.blocks[layer]
    where = f"blocks.{layer} of this {view.description}"
    if block.dense_mlp is None:
        raise InvalidInputError(f"mlp: {where} has no MLP.")
    if block.dense_mlp.post_factor is not None:
        raise UnsupportedModelError(
            f"mlp: {where} has a norm inside its MLP, whose gain and scale stand between its matrices; they are not "
            "compressed. Leave mlp= out."
        )
    names = ["W_in", "W_gate", "W_out"]
    if block.dense_mlp.W_gate is None:
        names.remove("W_gate")
    parameters = writable(block)
    packed = [name for name in names if name not in parameters]
    if packed:
        raise UnsupportedModelError(
            f"{where}: mlp.{packed[0]} is not a view of the model's floating-point parameters (packed or quantised?), "
            "so writing to it would change nothing. Load the model in floating point."
        )
    return {name: _copied(parameters[name]) for name in names}


def why_scores_fix_the_basis(view: ModelView, layer: int, short_pass: Callable[[], FrozenPass]) -> str | None:
    """Return why another basis of queries and keys would change the scores, or None.

    Tested on a pass: only scores that are a plain product of queries and keys reproduce the layer's pattern
    (`tensorlens_tl.circuits.scores`).
    """
    weights = view.blocks[layer].query_key
    if weights.q_norm is not None or weights.k_norm is not None:
        return "norms of queries and keys"
    try:
        reading = score_reading(short_pass(), layer)
    except UnsupportedModelError as error:
        return str(error)
    if reading.rotation is None:
        return None
    return "rotary positions"


def _copied(weight: Tensor) -> Tensor:
    return upcast(weight.detach()).clone(memory_format=torch.contiguous_format)
