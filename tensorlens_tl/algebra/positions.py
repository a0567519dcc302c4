"""Where vectors live, so that no work is done for positions that no vector reaches.

A pulled-back vector starts at one query and lives only at that position until it reaches attention; in a causal model
it never lives at later positions. At the other end only some source tokens may be wanted. `AffineMap.pull_between`
pulls vectors from where they live to where they are wanted and computes nothing else:

    queries ─(final norm, MLP: one position per row)─ last attention ─(up to the query)─ first attention ─ sources

The functions here deal with tensors and positions, not with maps.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowPositions:
    """The position of each row's vector in each prompt; vectors are `[row, batch, 1, d]`.

    A row axis of length 1 serves all rows.
    """

    positions: Int[Tensor, "row batch"]


Positions = slice | list[int]
"""The same positions for all rows."""

Where = RowPositions | Positions
"""Where vectors live: one position for each row, or the same positions for all rows."""

Queries = RowPositions | slice
"""Where vectors begin: one position for each row, or the same contiguous positions for all rows."""

BiasTerms = list[tuple[Tensor, Where]]
"""⟨vector, bias⟩ of primitives, each `[row, batch, live]` with its positions."""


def shared(where: Where) -> Positions:
    """Return positions that are the same for all rows, the kind that a map that mixes positions can be restricted to.

    Raises:
        TypeError: each row has its own position.
    """
    if isinstance(where, RowPositions):
        raise TypeError("a map that mixes positions cannot be cut to one position per row.")
    return where


def at(tensor: Shaped[Tensor, "*rows batch pos d"], where: Where) -> Shaped[Tensor, "..."]:
    """Restrict a tensor with a position axis to the positions where vectors live, `[*rows, batch, live, d]`.

    One position for each row gives `[row, batch, 1, d]`; a position axis of length 1 broadcasts.
    """
    if tensor.shape[-2] == 1:
        return tensor
    if not isinstance(where, RowPositions):
        return tensor[..., where, :]
    index = torch.arange(where.positions.shape[1], device=tensor.device)
    if tensor.shape[-3] == 1:
        index = torch.zeros_like(index)
    return tensor[index, where.positions][:, :, None]


def add_at(total: Tensor, vectors: Tensor, here: Where, destination: Positions) -> Tensor:
    """Add vectors that live `here` to `total`, which lives at the `destination` and may be overwritten.

    Vectors at positions outside the destination are dropped.
    """
    if isinstance(here, RowPositions):
        rows = here.positions.expand(vectors.shape[:2])[:, :, None, None]
        if isinstance(destination, list):
            wanted = torch.tensor(destination, device=vectors.device)
            column = torch.searchsorted(wanted, rows.contiguous()).clamp_max(len(destination) - 1)
            vectors = vectors * (wanted[column] == rows)
            rows = column
        return total.scatter_add_(2, rows.expand_as(vectors), vectors.to(total.dtype))
    if isinstance(destination, slice):  # it begins at 0
        total[:, :, here] += vectors
        return total
    assert isinstance(here, slice)
    columns = [column for column, position in enumerate(destination) if here.start <= position < here.stop]
    total[:, :, columns] += vectors[:, :, [destination[column] - here.start for column in columns]]
    return total


def spread_to(vectors: Tensor, here: Where, reach: slice) -> Float[Tensor, "row batch live d"]:
    """Place vectors that live `here` among all positions of `reach`, zero elsewhere."""
    if not isinstance(here, RowPositions) and here == reach:
        return vectors
    whole = vectors.new_zeros(*vectors.shape[:2], reach.stop, vectors.shape[-1])
    if isinstance(here, RowPositions):
        return add_at(whole, vectors, here, reach)
    whole[:, :, here] = vectors
    return whole


def place(
    vectors: Float[Tensor, "rows batch d"], positions: Int[Tensor, "rows batch"], x: Tensor
) -> Float[Tensor, "rows batch pos d"]:
    """Return rows of the shape of `x` that are zero except for one vector at one position per prompt."""
    placed = x.new_zeros(*vectors.shape[:2], x.shape[1], vectors.shape[-1])
    return add_at(placed, vectors[:, :, None].to(placed.dtype), RowPositions(positions), slice(None))


def widened(vectors: Float[Tensor, "*rows some d"], start: int, length: int) -> Float[Tensor, "*rows pos d"]:
    """Pad vectors at neighbouring positions from `start` on with zeros to all `length` positions."""
    return torch.nn.functional.pad(vectors, (0, 0, start, length - start - vectors.shape[-2]))


def in_total(terms: BiasTerms, like: Float[Tensor, "row batch"]) -> Float[Tensor, "row batch"]:
    """Return the sum of all bias terms."""
    return sum((term.sum(-1) for term, _ in terms), start=torch.zeros_like(like))


def by_position(terms: BiasTerms, like: Float[Tensor, "row batch pos"]) -> Float[Tensor, "row batch pos"]:
    """Return the bias terms summed at each position where biases are added."""
    total = torch.zeros_like(like)
    for term, where in terms:
        if isinstance(where, RowPositions):
            total.scatter_add_(2, where.positions.expand(term.shape[:2])[..., None], term.to(total))
        else:
            total[:, :, where] += term
    return total
