"""How large the frozen operator is: its spectral norm and its singular directions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import Whole
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.passes.operator import FrozenOperator

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@checked_names
def as_scipy(op: Any) -> "LinearOperator":
    """The operator's linear part as a scipy `LinearOperator` on ``pos · d_model`` numbers, for any matrix-free method.

    Needs scipy (extra ``spectral``).

    Raises:
        InvalidInputError: the pass has several prompts.

    >>> tlens.circuits.as_scipy(frozen.operator()).shape  # 7 tokens of 128 numbers
    (896, 896)
    """
    from scipy.sparse.linalg import LinearOperator

    one_prompt(op)
    size = op.x[0].numel()
    shape = op.x[0].shape
    real = op.frozen.mask[..., None]

    def through(move: Any) -> Any:
        def columns(x: Any) -> Any:
            rows = torch.as_tensor(x.reshape(size, -1).T.copy()).to(op.x).reshape(-1, 1, *shape)
            moved = upcast(move(rows * real) * real)  # padding neither gives nor receives
            return moved.reshape(len(rows), size).T.cpu().numpy().reshape(x.shape)

        return columns

    push = through(op.push)
    pull = through(op.pull)
    dtype = upcast(op.x[:0]).cpu().numpy().dtype
    # each is written for one vector and for a matrix of columns alike, which scipy names apart
    return LinearOperator((size, size), dtype=dtype, matvec=push, rmatvec=pull, matmat=push, rmatmat=pull)  # pyright: ignore[reportCallIssue]


@checked_names
def spectral_norm(op: Any, *, tol: Any = 1e-6, seed: int = 0) -> float:
    """‖T‖₂, the largest singular value, by Lanczos on push and pull.

    What Lanczos returns is attained by a vector, so it is a lower estimate, from which `tol` tells how far it moves.
    Needs scipy.

    Args:
        op: the operator of one prompt.
        tol: the relative accuracy at which the Lanczos iteration stops.
        seed: of its starting vector.

    Raises:
        InvalidInputError: several prompts, or a tolerance that is not positive.

    >>> tlens.circuits.spectral_norm(frozen.operator()) > tlens.circuits.spectral_norm(frozen.operator(layers=[3]))
    True
    """
    if not isinstance(tol, (int, float)) or not tol > 0:
        raise InvalidInputError(f"tol={tol!r}: pass a positive number.")
    _, values, _ = _svds(as_scipy(op), op.x[0].numel(), 1, tol, seed)
    return float(values[0])


@dataclass(frozen=True, eq=False)
class Directions:
    """The leading singular directions of ``T[query, :, key, :]``, largest first.

    Attributes:
        values: `[k]`.
        written: unit vectors at the query's output, `[k, d_out]`.
        read: unit vectors at the key's input, `[k, d_in]`: ``T[query, :, key, :] · read[n] = values[n] · written[n]``.
    """

    values: Float[Tensor, "k"]
    written: Float[Tensor, "k d_out"]
    read: Float[Tensor, "k d_in"]


@checked_names
def singular_directions(op: Any, query: Query = -1, key: Query = 0, *, k: Whole = 5) -> Directions:
    """Which directions of one token another token's output depends on most, exactly, for `d_model` pulls.

    Args:
        op: the operator of one prompt.
        query, key: one position each; see `tensorlens_tl.passes.inputs.query_positions`.
        k: how many directions; d_model at most.

    Raises:
        InvalidInputError: several prompts, a position out of range, or k outside 1 … d_model.

    >>> tlens.circuits.singular_directions(frozen.operator(), key=2, k=3).values.shape
    torch.Size([3])
    """
    one_prompt(op)
    k = whole_number("k", k, 1, op.x.shape[-1])
    position = one_query(op.frozen.prompt, key, "key")
    block = op.slice(query, keys=position[0])[0, :, 0]
    left, values, right = torch.linalg.svd(upcast(block))
    return Directions(values[:k], left.T[:k], right[:k])


def _svds(matrix: Any, size: int, k: int, tol: float = 0.0, seed: int = 0) -> Any:
    """scipy's Lanczos, from a start that depends on the seed alone (scipy has renamed its argument for it)."""
    import numpy as np
    from scipy.sparse import linalg

    svds: Any = linalg.svds
    return svds(matrix, k=k, tol=tol, v0=np.random.default_rng(seed).standard_normal(size).astype(matrix.dtype))


def one_prompt(op: Any) -> None:
    """Raise `InvalidInputError` for what is no operator, or one of several prompts."""
    if not isinstance(op, FrozenOperator):
        raise InvalidInputError(f"an operator is needed, got {type(op).__name__}: pass frozen.operator().")
    if len(op.x) != 1:
        raise InvalidInputError(f"the pass has {len(op.x)} prompts, each with an operator of its own; freeze one.")
