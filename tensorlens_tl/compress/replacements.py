"""Weights of one layer in fewer parameters, and the dense weights that they stand for.

A `Replacement` gives dense weights by TransformerLens' names, so that a plan can write, save and undo it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.compress.heads import HeadWeights, unstacked
from tensorlens_tl.compress.options import Layout
from tensorlens_tl.compress.tucker import Ranks, Tucker
from tensorlens_tl.errors import InvalidInputError

TABLES = ("biases", "left", "right", "weights")
"""The fields of replacements that are tensors by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Replacement(ABC):
    """Some weights of one layer, compressed.

    Attributes:
        before: how many parameters the matrices have that it replaces.
        biases: those that move along with a basis (``"b_Q"``, ``"b_K"``, ``"b_V"``), `[head, d_head]`; never counted.
    """

    before: int
    biases: Mapping[str, Tensor]

    @property
    @abstractmethod
    def parameters(self) -> int:
        """How many it holds, biases apart."""

    @abstractmethod
    def matrices(self) -> dict[str, Tensor]:
        """Dense weights by name: ``W_Q``, ``W_K``, ``W_V`` `[head, d_model, d_head]`, ``W_O`` `[head, d_head,
        d_model]`, ``W_in``, ``W_gate`` `[d_model, d_mlp]`, ``W_out`` `[d_mlp, d_model]`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that it replaces, biases included."""
        return tuple(self.dense())

    @property
    def ratio(self) -> float:
        """Parameters before ÷ after."""
        return self.before / self.parameters

    def dense(self) -> dict[str, Tensor]:
        """Every weight that it replaces, biases included."""
        return {**self.matrices(), **self.biases}

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its parts for a file: tensors, and facts that JSON can hold."""
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
    """One layer's heads by factors that all of them share and a core for each (TensorLLM Eqs. 9–12).

    Attributes:
        core: `[R1, R2, R3, heads]` (key-value heads of grouped attention).
        U1, U2, U3: the shared factors, of d_model, d_head and the slices.
        letters: which matrices, of ``"QKVO"``.
        layout: ``"paper"`` or ``"released"``.
        heads, kv_heads: of the layer.
        error: ‖W − compressed‖ / ‖W‖ over these matrices, in the basis that was compressed.
        sweeps: the relative error before and after every sweep of HOOI; of what was decomposed, balanced or not.
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
        """The weights that it replaces, biases included."""
        return (*(f"W_{letter}" for letter in self.letters), *self.biases)

    @property
    def tucker(self) -> Tucker:
        """Core and factors."""
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
        """Dense weights by name, see `Replacement`."""
        parts = unstacked(self.tucker.dense(), self.letters, self.layout, self.heads, self.kv_heads)
        return named(parts)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class LowRank(Replacement):
    """Matrices as products of two thin ones, by name.

    Attributes:
        left: `[d_model, R]` for all heads of a matrix together, `[head, d_model, R]` head by head, or the plain
            matrix's.
        right: what it is multiplied by, `[R, head d_head]`, `[head, R, d_head]` or the plain matrix's; where there is
            none, `left` is the leading columns of the head's d_head, the others being zero.
        widths: d_head of matrices by head; 0 for the MLP's, which have none.
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
        """The weights that it replaces, biases included."""
        mlp = [name for name in self.left if self.widths[name] == 0]
        heads = [f"W_{letter}" for letter in self.left if self.widths[letter] > 0]
        return (*heads, *mlp, *self.biases)

    @property
    def parameters(self) -> int:
        """The numbers in both factors of each matrix, or in the matrix itself where those are fewer."""
        return sum(self._count(name) for name in self.left)

    def _count(self, name: str) -> int:
        left = self.left[name]
        right = self.right.get(name)
        if right is None:
            return left.numel()
        return min(left.numel() + right.numel(), left[..., 0].numel() * right.shape[-1])

    def matrices(self) -> dict[str, Tensor]:
        """Dense weights by name, see `Replacement`."""
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
    """Weights as they are, by TransformerLens' names: for your own method.

    Attributes:
        weights: the new matrices, laid out as TransformerLens has them (``W_O`` `[head, d_head, d_model]`).
        count: how many parameters they take in the form in which the method would store them.
    """

    weights: Mapping[str, Tensor]
    count: int

    @classmethod
    def of(cls, old: HeadWeights, new: HeadWeights | Mapping[str, Tensor], count: int | None = None) -> "Dense":
        """What a method has computed from a layer's heads.

        >>> from tensorlens_tl import compress
        >>> heads = compress.head_weights(model, 0)
        >>> compress.Dense.of(heads, {"O": heads.matrices["O"] / 2}, count=100)
        Dense(W_O, ratio=163.8)

        Args:
            old: the weights before.
            new: the same, changed (``old.changed({"O": ...})``), or the changed matrices by letter, laid out as in
                `HeadWeights`.
            count: the parameters they take; as many as before unless said.

        Raises:
            InvalidInputError: a letter that is none of Q, K, V and O, or nothing changed.
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
        """As the method counts them."""
        return self.count

    def matrices(self) -> dict[str, Tensor]:
        """Dense weights by name, see `Replacement`."""
        return dict(self.weights)


KINDS: dict[str, type[Replacement]] = {"SharedTucker": SharedTucker, "LowRank": LowRank, "Dense": Dense}
"""What a plan's file may hold."""


def unpacked(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Replacement:
    """`Replacement.packed` undone."""
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
    """Matrices by letter as TransformerLens names and lays them out: outputs are `[head, d_head, d_model]`."""
    matrices = {f"W_{letter}": matrix for letter, matrix in by_letter.items()}
    if "O" in by_letter:
        matrices["W_O"] = by_letter["O"].mT
    return matrices
