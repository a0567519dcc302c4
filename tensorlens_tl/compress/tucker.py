"""The Tucker decomposition that leaves the last mode alone: shared factors, one core per entry of that mode.

    T[i, j, k, h] ≈ Σ_abc core[a, b, c, h] · U1[i, a] · U2[j, b] · U3[k, c]

TensorLLM (Eqs. 9–11) factorises the attention weights of a layer this way, with h over heads. Nothing here knows what
the tensor means.

Factors come from the Gram matrix of each mode (HOSVD; De Lathauwer et al. 2000). With all of them and the whole core,
the error of *every* choice of ranks is a partial sum of squared core entries, so one decomposition gives the whole
table. `hooi` refines one choice (De Lathauwer et al. 2000b); each of its updates is the best factor given the others,
so that the error never rises.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_number
from tensorlens_tl.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

    Number = float | torch.Tensor | None
    """A number of any kind (numpy's and torch's too), or None where another option says it."""

    Count = int | torch.Tensor | None
    """An integer of any kind."""

    RankChoice = Sequence[int] | torch.Tensor | None
    """(R1, R2, R3), or None."""

    Layers = int | slice | Sequence[int] | set[int] | None
    """A layer, several, a slice, or None for all."""

    MLPShare = float | Mapping[str, float] | None
    """LASER's ρ for all of an MLP's matrices, or by name."""

    RankRule = Literal["free", "paper"]
    Layout = Literal["paper", "released"]
    Gauge = Literal["circuit"] | None
    Start = Literal["hosvd", "sequential"]
else:
    Number = Count = RankChoice = Layers = MLPShare = RankRule = Layout = Gauge = Start = Any


RULES = ("free", "paper")
"""Which ranks are looked through: all, or TensorLLM's (r·h, r, s) only."""
CHUNK_BYTES = 64 * 2**20
"""What a Gram matrix widens to float64 at once."""

ROUNDED = 1 + 1e-12
"""Ranks reach a ratio that was computed from them, in spite of rounding."""

Ranks = tuple[int, int, int]
Shape = tuple[int, int, int, int]


def parameter_count(shape: Sequence[int], ranks: Sequence[int]) -> int:
    """R1·R2·R3·h + d·R1 + d_head·R2 + slices·R3: the numbers of core and factors.

    >>> shape = (4096, 256, 4, 16)  # GPT-J
    >>> round(4 * 4096**2 / parameter_count(shape, (64, 4, 2)), 2)  # printed in the paper: 247.30
    247.3
    """
    return math.prod(ranks) * shape[3] + sum(length * rank for length, rank in zip(shape, ranks, strict=False))


def paper_ranks(shape: Sequence[int], r: Count, s: Count) -> Ranks:
    """TensorLLM's ranks (r·h, r, s), for a tensor of this shape (d_model, d_head, slices, heads).

    >>> from tensorlens_tl.compress import paper_ranks
    >>> paper_ranks((4096, 256, 4, 16), r=4, s=2)
    (64, 4, 2)

    They are behind every compression ratio that the paper prints. r and s out of range raise `InvalidInputError`.
    """
    d, width, slices, heads = shape
    r = whole_number("r", r, 1, min(width, d // heads), why=f"R1 = {heads}·r is at most {d}")
    return heads * r, r, whole_number("s", s, 1, slices)


@dataclass(frozen=True, eq=False)
class Tucker:
    """Shared factors and a core per entry of the last mode."""

    core: Float[Tensor, "R1 R2 R3 h"]
    factors: tuple[Tensor, Tensor, Tensor]

    @property
    def ranks(self) -> Ranks:
        """(R1, R2, R3)."""
        return self.core.shape[0], self.core.shape[1], self.core.shape[2]

    @property
    def shape(self) -> Shape:
        """Of the tensor that it stands for."""
        first, second, third = (len(factor) for factor in self.factors)
        return first, second, third, self.core.shape[3]

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return parameter_count(self.shape, self.ranks)

    def dense(self) -> Float[Tensor, "d1 d2 d3 h"]:
        """The tensor that it stands for.

        >>> tensor = torch.randn(6, 5, 4, 3)
        >>> whole = tlens.compress.sequential_hosvd(tensor, (6, 5, 4))  # nothing cut off
        >>> torch.allclose(whole.dense(), tensor, atol=1e-5)
        True
        """
        tensor = self.core
        for mode in (2, 1, 0):  # the largest mode last
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
        factors: orthonormal, directions in descending order of energy.
        core: the tensor in these bases.
        spectra: the energy ‖direction's slice of the core‖² of every mode's directions.
    """

    factors: tuple[Tensor, Tensor, Tensor]
    core: Float[Tensor, "d1 d2 d3 h"]
    spectra: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "HOSVD":
        """Decompose a tensor `[d1, d2, d3, h]`; raises `InvalidInputError` for another number of modes, NaN, or only
        zeros."""
        _check_tensor(tensor)
        (first, one), (second, two), (third, three) = (_directions(tensor, mode) for mode in range(3))
        factors = first.to(tensor), second.to(tensor), third.to(tensor)
        core = tensor
        for mode, factor in enumerate(factors):
            core = mode_product(core, factor.T, mode)
        return cls(factors, core, (one, two, three))

    @property
    def shape(self) -> Shape:
        """Of the tensor."""
        first, second, third, heads = self.core.shape
        return first, second, third, heads

    @cached_property
    def lost(self) -> Float[Tensor, "d1 d2 d3"]:
        """The share of ‖T‖² that ranks (a+1, b+1, c+1) lose: entry [a, b, c].

        Summed over what is cut off, as 1 − what is left would round small errors away.
        """
        energy = self.core.double().square().sum(3)
        energy = energy / energy.sum()
        first = _after(energy.sum((1, 2)), 0)[:, None, None]
        second = _after(energy.sum(2), 1).cumsum(0)[:, :, None]
        return first + second + _after(energy, 2).cumsum(0).cumsum(1)

    @cached_property
    def counts(self) -> Int[Tensor, "d1 d2 d3"]:
        """The parameters of every choice of ranks, laid out as `lost`."""
        d, width, slices, heads = self.shape
        one, two, three = (torch.arange(1, n + 1, device=self.core.device) for n in (d, width, slices))
        one = one[:, None, None]
        two = two[:, None]
        return one * two * three * heads + d * one + width * two + slices * three

    def error(self, ranks: Sequence[int]) -> float:
        """‖T − truncated‖ / ‖T‖ for these ranks; raises `InvalidInputError` where they are out of range."""
        a, b, c = check_ranks(self.shape, ranks)
        return math.sqrt(float(self.lost[a - 1, b - 1, c - 1]))

    def ratio(self, ranks: Sequence[int]) -> float:
        """Parameters before ÷ after, for these ranks; raises `InvalidInputError` where they are out of range."""
        return math.prod(self.shape) / parameter_count(self.shape, check_ranks(self.shape, ranks))

    def best_ranks(self, *, ratio: Number = None, energy: Number = None, rule: RankRule = "free") -> Ranks:
        """Return the ranks (R1, R2, R3) that lose least at a ratio, or have the fewest parameters for a share of the
        energy.

        Args:
            ratio: parameters before ÷ after, at least.
            energy: the share of ‖T‖² to keep, at least.
            rule: ``"free"`` or ``"paper"``, see `RULES`.

        Raises:
            InvalidInputError: neither or both, no such rule, or no ranks that reach it; says what ranks can reach.

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
        """Which choices of ranks a rule considers, laid out as `lost`."""
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
        """Return the leading directions of every mode; raises `InvalidInputError` for ranks out of range.

        >>> whole = tlens.compress.HOSVD.of(torch.randn(8, 6, 4, 3))
        >>> whole.truncated((4, 3, 2)).core.shape
        torch.Size([4, 3, 2, 3])
        """
        a, b, c = check_ranks(self.shape, ranks)
        first, second, third = (factor[:, :rank].clone() for factor, rank in zip(self.factors, (a, b, c), strict=True))
        return Tucker(self.core[:a, :b, :c].clone(), (first, second, third))


def sequential_hosvd(tensor: Float[Tensor, "d1 d2 d3 h"], ranks: Sequence[int]) -> Tucker:
    """Truncate mode by mode, each factor from what the ones before have left (Vannieuwenhoven et al. 2012).

    Cheaper than `HOSVD` for a single choice of ranks.

    Raises:
        InvalidInputError: not four modes, not finite, or ranks out of range.

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
    first, second, third = factors
    return Tucker(core, (first, second, third))


class Refined(NamedTuple):
    """What `hooi` returns: the decomposition, and its relative error before and after every sweep."""

    tucker: Tucker
    errors: list[float]


def hooi(tensor: Float[Tensor, "d1 d2 d3 h"], start: Tucker, *, sweeps: Count = 25, tolerance: float = 1e-9) -> Refined:
    """Higher-order orthogonal iteration: each factor in turn becomes the best one given the others.

    Args:
        tensor: what is approximated.
        start: a decomposition of it with orthonormal factors, such as a truncated HOSVD.
        sweeps: at most so many; fewer where the error falls by less than `tolerance`.

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
    first, second, third = factors
    return Refined(Tucker(core, (first, second, third)), errors)


def mode_product(tensor: Float[Tensor, "d1 d2 d3 h"], matrix: Float[Tensor, "new old"], mode: int) -> Tensor:
    """``tensor ×_mode matrix`` (TensorLLM Eqs. 1–2)."""
    return torch.tensordot(matrix, tensor.movedim(mode, 0), dims=1).movedim(0, mode)


def check_ranks(shape: Sequence[int], ranks: RankChoice) -> Ranks:
    """Three ranks, each within its mode."""
    ranks = plain(ranks)
    if isinstance(ranks, str) or not isinstance(ranks, Sequence) or len(ranks) != 3:
        raise InvalidInputError(f"ranks={ranks!r}: pass three, (R1, R2, R3).")
    one, two, three = (
        whole_number(f"ranks[{mode}]", rank, 1, shape[mode], why=f"the tensor is {list(shape)}")
        for mode, rank in enumerate(ranks)
    )
    return one, two, three


def positive(name: str, value: Number, most: float = math.inf) -> float:
    """A positive number of any kind (numpy's and torch's too), at most `most`."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        if most == math.inf:
            raise InvalidInputError(f"{name}={value!r}: pass a positive number.")
        raise InvalidInputError(f"{name}={value!r}: pass a number above 0, at most {most:g}.")
    return float(value)


def check_choice(name: str, value: str | None, known: Sequence[str | None]) -> None:
    """Raise `InvalidInputError` unless an option is one of the values that it can have."""
    if value not in known:
        raise InvalidInputError(f"{name}={value!r}; use one of {', '.join(map(repr, known))}.")


def _check_tensor(tensor: Tensor) -> None:
    if tensor.ndim != 4:
        raise InvalidInputError(f"a tensor of four modes is needed, got {tuple(tensor.shape)}.")
    if not bool(torch.isfinite(tensor).all()) or not bool(tensor.any()):
        raise InvalidInputError("the tensor has values that are not finite, or none but zeros.")


def _directions(tensor: Tensor, mode: int) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"]]:
    """A mode's orthonormal directions, strongest first, and their energies, from its Gram matrix in float64."""
    per_head = tensor[..., 0].numel() * 8
    gram = torch.zeros(2 * (tensor.shape[mode],), dtype=torch.float64, device=tensor.device)
    for part in tensor.split(max(1, CHUNK_BYTES // per_head), dim=3):
        rows = part.double().movedim(mode, 0).flatten(1)
        gram += rows @ rows.T
    energies, directions = torch.linalg.eigh(gram)
    return directions.flip(1), energies.flip(0).clamp_min(0)


def _after(energy: Tensor, dim: int) -> Tensor:
    """Along one axis, the sum of what comes after each entry; of those numbers alone, so that small tails are exact."""
    tails = energy.flip(dim).cumsum(dim).flip(dim).narrow(dim, 1, energy.shape[dim] - 1)
    return torch.cat([tails, torch.zeros_like(energy.narrow(dim, 0, 1))], dim)
