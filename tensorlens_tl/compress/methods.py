"""Methods that compress a layer's attention: TensorLLM's shared Tucker, and baselines with the same parameter count.

| method | what is left of each layer | parameters (one query head per key-value head) |
| --- | --- | --- |
| `tucker` | factors shared by all heads, a core per head (TensorLLM) | R1·R2·R3·h + d·R1 + d_head·R2 + 4·R3 |
| `laser` | each matrix's truncated SVD (Sharma et al. 2024) | 4·r·(d + h·d_head) |
| `head-svd` | each head's matrices' truncated SVDs | 4·h·r·(d + d_head) |
| `circuit-svd` | each head's truncated OV and QK circuits, as narrower heads | 4·h·r·d |

A method is a function of one layer's `HeadWeights` and keyword options that returns a `Replacement`, or changed
`HeadWeights`; any such function can be passed to `plan`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, nearest, plain, whole_number
from tensorlens_tl.compress.heads import (
    GAUGES,
    HOSVD,
    LETTERS,
    ROUNDED,
    RULES,
    Count,
    Gauge,
    HeadWeights,
    Layout,
    MLPShare,
    Number,
    RankChoice,
    RankRule,
    Ranks,
    Start,
    Tucker,
    check_letters,
    check_ranks,
    hooi,
    in_circuit_gauge,
    paper_ranks,
    positive,
    sequential_hosvd,
    slice_scales,
    stack_heads,
    unstacked,
)
from tensorlens_tl.errors import InvalidInputError

TABLES = ("biases", "left", "right", "weights")
"""Fields of replacements that hold tensors by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Replacement(ABC):
    """Compressed weights of one layer.

    Attributes:
        before: the number of parameters of the matrices that it replaces.
        biases: biases that change with a basis (``"b_Q"``, ``"b_K"``, ``"b_V"``), `[head, d_head]`; never counted.
    """

    before: int
    biases: Mapping[str, Tensor]

    @property
    @abstractmethod
    def parameters(self) -> int:
        """The number of its parameters, without biases."""

    @abstractmethod
    def matrices(self) -> dict[str, Tensor]:
        """Return dense weights by name: ``W_Q``, ``W_K``, ``W_V`` `[head, d_model, d_head]`, ``W_O`` `[head, d_head,
        d_model]`, ``W_in``, ``W_gate`` `[d_model, d_mlp]`, ``W_out`` `[d_mlp, d_model]`.
        """

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the weights that it replaces, biases included."""
        return tuple(self.dense())

    @property
    def ratio(self) -> float:
        """Parameters before ÷ after."""
        return self.before / self.parameters

    def dense(self) -> dict[str, Tensor]:
        """Return every weight that it replaces, biases included."""
        return {**self.matrices(), **self.biases}

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return its parts for a file: tensors, and JSON-compatible facts."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"kind": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = value
            elif field.name in TABLES:
                tensors |= {f"{field.name}.{key}": tensor for key, tensor in value.items()}
            else:
                facts[field.name] = value
        return tensors, facts


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class SharedTucker(Replacement):
    """One layer's heads as factors shared by all of them and a core for each (TensorLLM Eqs. 9–12).

    Attributes:
        core: `[R1, R2, R3, heads]` (key-value heads in grouped attention).
        U1, U2, U3: the shared factors, for d_model, d_head and the slices.
        letters: the matrices included, from ``"QKVO"``.
        layout: ``"paper"`` or ``"released"``.
        heads, kv_heads: the layer's head counts.
        error: ‖W − compressed‖ / ‖W‖ over these matrices, in the basis that was compressed.
        sweeps: the relative errors before and after every sweep of HOOI, for the tensor that was decomposed.
    """

    core: Float[Tensor, "R1 R2 R3 h"]
    U1: Float[Tensor, "d1 R1"]
    U2: Float[Tensor, "d2 R2"]
    U3: Float[Tensor, "slices R3"]
    letters: str
    layout: Layout
    heads: int
    kv_heads: int
    error: float
    sweeps: list[float]

    def __repr__(self) -> str:
        return f"SharedTucker({self.letters}, ranks={self.ranks}, ratio={self.ratio:.4g}, error={self.error:.3g})"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the weights that it replaces, biases included."""
        return (*(f"W_{letter}" for letter in self.letters), *self.biases)

    @property
    def tucker(self) -> Tucker:
        """Core and factors as a `Tucker`."""
        return Tucker(self.core, (self.U1, self.U2, self.U3))

    @property
    def ranks(self) -> Ranks:
        """(R1, R2, R3)."""
        return self.tucker.ranks

    @property
    def parameters(self) -> int:
        """R1·R2·R3·heads + d·R1 + d_head·R2 + slices·R3."""
        return self.tucker.parameters

    def matrices(self) -> dict[str, Tensor]:
        """Return dense weights by name, see `Replacement`."""
        parts = unstacked(self.tucker.dense(), self.letters, self.layout, self.heads, self.kv_heads)
        return named(parts)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class LowRank(Replacement):
    """Matrices as products of two thin ones, by name.

    Attributes:
        left: the first factor, `[d_model, R]` for all heads of a matrix together, `[head, d_model, R]` head by head, or
            a plain matrix's.
        right: the second factor, `[R, head d_head]`, `[head, R, d_head]` or a plain matrix's; without one, `left` holds
            the leading columns of each head's d_head, and the others are zero.
        widths: d_head for matrices by head; 0 for those of an MLP.
        error: ‖W − compressed‖ / ‖W‖ over these matrices, in the basis that was compressed.
    """

    left: Mapping[str, Tensor]
    right: Mapping[str, Tensor]
    widths: dict[str, int]
    error: float

    def __repr__(self) -> str:
        ranks = {name: left.shape[-1] for name, left in self.left.items()}
        return f"LowRank(ranks={ranks}, ratio={self.ratio:.4g}, error={self.error:.3g})"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the weights that it replaces, biases included."""
        mlp = [name for name in self.left if self.widths[name] == 0]
        heads = [f"W_{letter}" for letter in self.left if self.widths[letter] > 0]
        return (*heads, *mlp, *self.biases)

    @property
    def parameters(self) -> int:
        """The size of both factors of each matrix, or of the matrix itself if that is smaller."""
        return sum(self._count(name) for name in self.left)

    def _count(self, name: str) -> int:
        left = self.left[name]
        right = self.right.get(name)
        if right is None:
            return left.numel()
        return min(left.numel() + right.numel(), left[..., 0].numel() * right.shape[-1])

    def matrices(self) -> dict[str, Tensor]:
        """Return dense weights by name, see `Replacement`."""
        by_letter: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        for name, left in self.left.items():
            right = self.right.get(name)
            width = self.widths[name]
            if right is None:
                by_letter[name] = torch.cat([left, left.new_zeros(*left.shape[:-1], width - left.shape[-1])], dim=-1)
            elif width == 0:
                plain[name] = left @ right
            elif left.ndim == 2:
                by_letter[name] = rearrange(left @ right, "d (h k) -> h d k", k=width)
            else:
                by_letter[name] = left @ right
        return {**named(by_letter), **plain}


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Dense(Replacement):
    """Plain weights by TransformerLens' names, for methods of your own.

    Attributes:
        weights: the new matrices, in TransformerLens' layout (``W_O`` `[head, d_head, d_model]`).
        count: the number of parameters in the form in which the method would store them.
    """

    weights: Mapping[str, Tensor]
    count: int

    @classmethod
    def of(cls, old: HeadWeights, new: HeadWeights | Mapping[str, Tensor], count: int | None = None) -> "Dense":
        """Wrap weights that a method has computed from a layer's heads.

        >>> from tensorlens_tl import compress
        >>> heads = compress.head_weights(model, 0)
        >>> compress.Dense.of(heads, {"O": heads.matrices["O"] / 2}, count=100)
        Dense(W_O, ratio=163.8)

        Args:
            old: the original weights.
            new: changed weights (``old.changed({"O": ...})``), or changed matrices by letter, as in `HeadWeights`.
            count: their number of parameters; by default as before.

        Raises:
            InvalidInputError: a letter other than Q, K, V and O, or nothing changed.
        """
        if not isinstance(new, HeadWeights):
            strange = set(new) - set(old.matrices)
            if strange:
                raise InvalidInputError(f"Dense: there is no matrix {min(strange)!r}; use letters of 'QKVO'.")
            new = old.changed(new)
        changed = {letter: matrix for letter, matrix in new.matrices.items() if matrix is not old.matrices[letter]}
        if not changed:
            raise InvalidInputError(f"Dense: none of the matrices of {old.where} was changed.")
        before = old.count("".join(changed))
        biases = {f"b_{letter}": bias for letter, bias in new.biases.items() if bias is not old.biases.get(letter)}
        if count is None:
            count = before
        return cls(before=before, biases=biases, weights=named(changed), count=count)

    def __repr__(self) -> str:
        return f"Dense({', '.join(self.weights)}, ratio={self.ratio:.4g})"

    @property
    def parameters(self) -> int:
        """The number of parameters, as stated by the method."""
        return self.count

    def matrices(self) -> dict[str, Tensor]:
        """Return dense weights by name, see `Replacement`."""
        return dict(self.weights)


KINDS: dict[str, type[Replacement]] = {"SharedTucker": SharedTucker, "LowRank": LowRank, "Dense": Dense}
"""The classes that a plan's file may contain."""


def unpacked(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Replacement:
    """Invert `Replacement.packed`."""
    kind = KINDS[facts["kind"]]
    tables: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Any] = {name: value for name, value in facts.items() if name != "kind"}
    for name, tensor in tensors.items():
        table, _, key = name.partition(".")
        if key:
            tables.setdefault(table, {})[key] = tensor
        else:
            values[name] = tensor
    empty = {field.name: {} for field in fields(kind) if field.name in TABLES}
    return kind(**{**empty, **tables, **values})


def named(by_letter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert matrices by letter to TransformerLens' names and layout, with outputs `[head, d_head, d_model]`."""
    matrices = {f"W_{letter}": matrix for letter, matrix in by_letter.items()}
    if "O" in by_letter:
        matrices["W_O"] = by_letter["O"].mT
    return matrices


Method = Callable[..., Replacement]
STARTS = ("hosvd", "sequential")


@checked_names
def tucker(
    weights: HeadWeights,
    *,
    ranks: RankChoice = None,
    ratio: Number = None,
    energy: Number = None,
    rule: RankRule = "free",
    matrices: str = LETTERS,
    layout: Layout = "paper",
    balance: bool = False,
    gauge: Gauge = None,
    start: Start = "hosvd",
    sweeps: Count = 0,
) -> SharedTucker:
    """Compress heads by TensorLLM's Tucker decomposition: factors shared by all heads, and a core for each (Eqs. 7–14).

    >>> from tensorlens_tl import compress
    >>> shared = compress.tucker(compress.head_weights(model, 1), ratio=2)
    >>> shared.ratio >= 2, shared.dense()["W_O"].shape
    (True, torch.Size([4, 32, 128]))

    Args:
        weights: one layer's heads.
        ranks: (R1, R2, R3); with ``rule="paper"`` also (r, s), which stands for (r·heads, r, s).
        ratio: instead, the compression ratio, reached with the least loss.
        energy: instead, the share of ‖W‖² to keep (with `balance`, of the scaled slices), with the fewest parameters.
        rule: with `ratio` and `energy`, which ranks to consider: all (``"free"``), or TensorLLM's (r·heads, r, s)
            (``"paper"``).
        matrices: which of Q, K, V and O to stack; the ratio counts only those.
        layout: ``"paper"`` splits heads; ``"released"`` splits d_model, see `stack_heads`.
        balance: scale all slices to the same norm first, and back afterwards (not in the paper).
        gauge: ``"circuit"`` first applies `in_circuit_gauge` (not in the paper).
        start: ``"hosvd"``, or the cheaper ``"sequential"`` truncation, for given ranks only.
        sweeps: the most sweeps of HOOI after the truncation.

    Raises:
        InvalidInputError: not exactly one of ranks, ratio and energy; no ranks that reach them; or an unknown option.
        UnsupportedModelError: a gauge is requested where the basis is not free.
    """
    letters = check_letters(matrices)
    sweeps = whole_number("sweeps", sweeps, least=0)
    check_choice("gauge", gauge, GAUGES)
    check_choice("start", start, STARTS)
    check_choice("rule", rule, RULES)
    if sum(option is not None for option in (ranks, ratio, energy)) != 1:
        raise InvalidInputError("ranks: pass one of ranks=, ratio= and energy=.")
    if ratio is not None:
        _at_least_one(ratio)
    if start == "sequential" and ranks is None:
        raise InvalidInputError("start='sequential': it needs ranks=; a ratio or energy needs the whole HOSVD.")
    moved = weights
    if gauge == "circuit":
        moved = in_circuit_gauge(weights, letters)
    tensor = stack_heads(moved, letters, layout)
    scaled = tensor
    scales = tensor.new_ones(1, 1)
    if balance:
        scales = slice_scales(tensor)[:, None]
        scaled = tensor * scales
    if ranks is None:
        whole = HOSVD.of(scaled)
        decomposition = whole.truncated(whole.best_ranks(ratio=ratio, energy=energy, rule=rule))
        del whole  # it is large
    elif start == "sequential":
        decomposition = sequential_hosvd(scaled, _three_ranks(tensor, ranks, rule))
    else:
        decomposition = HOSVD.of(scaled).truncated(_three_ranks(tensor, ranks, rule))
    errors: list[float] = []
    if sweeps:
        decomposition, errors = hooi(scaled, decomposition, sweeps=sweeps)
    U1, U2, U3 = decomposition.factors
    U3 = U3 / scales
    residual = Tucker(decomposition.core, (U1, U2, U3)).dense() - tensor
    return SharedTucker(
        before=weights.count(letters),
        biases=_moved_biases(weights, moved),
        core=decomposition.core.contiguous(),
        U1=U1,
        U2=U2,
        U3=U3,
        letters=letters,
        layout=layout,
        heads=weights.heads,
        kv_heads=weights.kv_heads,
        error=float(residual.norm() / tensor.norm()),
        sweeps=errors,
    )


def _three_ranks(tensor: Float[Tensor, "d1 d2 slices h"], ranks: RankChoice, rule: RankRule) -> Ranks:
    """Return (R1, R2, R3), also from TensorLLM's (r, s)."""
    ranks = plain(ranks)
    if rule == "paper" and isinstance(ranks, list | tuple) and len(ranks) == 2:
        return paper_ranks(tensor.shape, *ranks)
    return check_ranks(tuple(tensor.shape), ranks)


@checked_names
def laser(
    weights: HeadWeights,
    *,
    ratio: Number = None,
    rank: Count = None,
    rho: Number = None,
    matrices: str = LETTERS,
) -> LowRank:
    """Compress each matrix, all heads together, by its truncated SVD (LASER, Sharma et al. 2024).

    >>> from tensorlens_tl import compress
    >>> low_rank = compress.laser(compress.head_weights(model, 1), rank=16)
    >>> low_rank.left["V"].shape, low_rank.right["V"].shape  # all heads together
    (torch.Size([128, 16]), torch.Size([16, 128]))

    Args:
        weights: one layer's heads.
        ratio: the compression ratio; all matrices get the same rank.
        rank: instead, the rank.
        rho: instead, LASER's ρ: the share of each matrix's largest possible rank to keep.
        matrices: which of Q, K, V and O to compress.

    Raises:
        InvalidInputError: not exactly one of the three, or out of range.
    """
    letters = check_letters(matrices)
    flat = {m: rearrange(weights.matrices[m], "h d k -> d (h k)") for m in letters}
    ranks = _ranks(flat, weights.count(letters), ratio, rank, rho)
    widths = {m: weights.matrices[m].shape[2] for m in letters}
    return _low_rank(flat, ranks, widths)


@checked_names
def laser_mlp(matrices: Mapping[str, Tensor], rho: MLPShare) -> LowRank:
    """Compress an MLP's matrices by their truncated SVDs: the other half of TensorLLM's hybrid with LASER.

    Args:
        matrices: by name (``W_in``, ``W_gate``, ``W_out``).
        rho: the share of each matrix's largest possible rank to keep; for all, or by name, leaving others unchanged.

    Raises:
        InvalidInputError: unknown matrix, or a share out of range.
    """
    shares: dict[str, Number] = dict(rho) if isinstance(rho, Mapping) else dict.fromkeys(matrices, rho)
    strange = sorted(set(shares) - set(matrices))
    if strange or not shares:
        raise InvalidInputError(f"mlp={rho!r}: pass a share, or shares of {', '.join(matrices)}.")
    selection = {name: matrices[name] for name in shares}
    ranks = {name: _share(share, selection[name], "mlp") for name, share in shares.items()}
    return _low_rank(selection, ranks, dict.fromkeys(selection, 0))


@checked_names
def head_svd(weights: HeadWeights, *, ratio: Number = None, rank: Count = None, matrices: str = LETTERS) -> LowRank:
    """Compress each matrix of each head by its truncated SVD; arguments as in `laser`, with a rank of at most d_head.

    Raises:
        InvalidInputError: not exactly one of ratio and rank, or out of range.

    >>> from tensorlens_tl import compress
    >>> compress.head_svd(compress.head_weights(model, 0), rank=8).ratio
    3.2
    """
    letters = check_letters(matrices)
    selection = {m: weights.matrices[m] for m in letters}
    ranks = _ranks(selection, weights.count(letters), ratio, rank)
    return _low_rank(selection, ranks, {m: matrix.shape[2] for m, matrix in selection.items()})


@checked_names
def circuit_svd(weights: HeadWeights, *, ratio: Number = None, rank: Count = None, matrices: str = LETTERS) -> LowRank:
    """Compress each head's OV and QK circuits by truncated SVD: the best narrower heads, biases included.

    Args:
        weights, ratio, rank: as in `head_svd`.
        matrices: ``"QKVO"``, ``"VO"`` or ``"QK"``; circuits cannot be split.

    Raises:
        InvalidInputError: as in `head_svd`, or only half of a circuit.
        UnsupportedModelError: queries and keys are included, and their basis is not free.

    >>> from tensorlens_tl import compress
    >>> compress.circuit_svd(compress.head_weights(model, 0), rank=8).ratio
    4.0
    """
    letters = check_letters(matrices)
    moved = in_circuit_gauge(weights, letters)
    selection = {m: moved.matrices[m] for m in letters}
    widths = {m: matrix.shape[2] for m, matrix in selection.items()}
    per_rank = {m: matrix.shape[0] * matrix.shape[1] for m, matrix in selection.items()}
    new_width = _rank(per_rank, min(widths.values()), weights.count(letters), ratio, rank)
    cut = {m: matrix[..., :new_width].contiguous() for m, matrix in selection.items()}
    biases = {
        name: torch.cat([bias[..., :new_width], torch.zeros_like(bias[..., new_width:])], dim=-1)
        for name, bias in _moved_biases(weights, moved).items()
    }
    energy_loss = sum(float(selection[m][..., new_width:].double().square().sum()) for m in letters)
    error = _relative(energy_loss, selection)
    return LowRank(before=weights.count(letters), biases=biases, left=cut, right={}, widths=widths, error=error)


METHODS: dict[str, Method] = {
    "tucker": tucker,
    "laser": laser,
    "head-svd": head_svd,
    "circuit-svd": circuit_svd,
}
"""The methods of `plan`, by name."""


def find_method(method: Method | str) -> Method:
    """Return a method by name, or the function that was passed."""
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]
    if isinstance(method, str) or not callable(method):
        near = nearest(method, METHODS)
        raise InvalidInputError(f"method={method!r}; use one of {', '.join(METHODS)}, or a function.{near}")
    return method


# ------------------------------------------------------------------ ranks and products


def _ranks(
    matrices: Mapping[str, Tensor], before: int, ratio: Number, rank: Count, rho: Number = None
) -> dict[str, int]:
    """Return the rank of each matrix `[.., n, m]`."""
    if rho is not None:
        if ratio is not None or rank is not None:
            raise InvalidInputError("ranks: pass one of ratio=, rank= and rho=.")
        return {name: _share(rho, matrix) for name, matrix in matrices.items()}
    per_rank = {name: sum(m.shape[-2:]) * m.shape[:-2].numel() for name, m in matrices.items()}
    most = min(min(matrix.shape[-2:]) for matrix in matrices.values())
    return dict.fromkeys(matrices, _rank(per_rank, most, before, ratio, rank))


def _rank(per_rank: Mapping[str, int], most: int, before: int, ratio: Number, rank: Count) -> int:
    """Return one rank for all matrices: as passed, or the largest that reaches a ratio."""
    if (ratio is None) == (rank is None):
        raise InvalidInputError("ranks: pass one of ratio= and rank= (or, for LASER, rho=).")
    if rank is not None:
        return whole_number("rank", rank, 1, most)
    each = sum(per_rank.values())
    largest = int(before / _at_least_one(ratio) / each * ROUNDED)
    if largest < 1:
        raise InvalidInputError(f"ratio={ratio}: even rank 1 gives only {before / each:.4g}; the largest here is that.")
    return min(largest, most)


def _at_least_one(ratio: Number) -> float:
    value = positive("ratio", ratio)
    if value < 1:
        raise InvalidInputError(f"ratio={ratio}: pass parameters before ÷ after, a number of at least 1.")
    return value


def _share(rho: Number, matrix: Tensor, name: str = "rho") -> int:
    """Convert LASER's ρ to a rank."""
    return max(1, int(positive(name, rho, most=1.0) * min(matrix.shape[-2:]) * ROUNDED))


def _low_rank(matrices: Mapping[str, Tensor], ranks: Mapping[str, int], widths: dict[str, int]) -> LowRank:
    left = {}
    right = {}
    energy_loss = 0.0
    for name, matrix in matrices.items():
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
        rank = ranks[name]
        left[name] = u[..., :rank] * values[..., None, :rank]
        right[name] = vh[..., :rank, :].contiguous()
        energy_loss += float(values[..., rank:].double().square().sum())
    before = sum(matrix.numel() for matrix in matrices.values())
    error = _relative(energy_loss, matrices)
    return LowRank(before=before, biases={}, left=left, right=right, widths=widths, error=error)


def _relative(energy_loss: float, matrices: Mapping[str, Tensor]) -> float:
    """Return √(lost / ‖W‖²), or 0 if there was nothing to lose."""
    energy = sum(float(matrix.double().square().sum()) for matrix in matrices.values())
    if energy == 0:
        return 0.0
    return (energy_loss / energy) ** 0.5


def _moved_biases(weights: HeadWeights, moved: HeadWeights) -> dict[str, Tensor]:
    """Return the biases that a change of basis affects, by TransformerLens' names."""
    return {f"b_{m}": bias for m, bias in moved.biases.items() if bias is not weights.biases[m]}
