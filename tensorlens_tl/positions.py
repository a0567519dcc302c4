"""Maps cut to the positions that matter, so that no work is done for the others.

A pulled-back vector starts at one query, and lives at that position alone until it meets attention; in a causal model
it never lives after it. At the other end only some source tokens may be asked for. `pull_between` pulls vectors from
where they live to where they are asked for and touches nothing else:

    queries ─(final norm, MLP: one position per row)─ last attention ─(up to the query)─ first attention ─ sources
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.maps import AffineMap, Attention, Chain, Diagonal, Identity, Linear, Norm, Sum, Transpose


def at_positions(m: AffineMap, positions: slice | Sequence[int]) -> AffineMap:
    """A map cut to some positions, which must not need any other (causal: from the first live position on)."""
    if isinstance(m, Diagonal):
        return Diagonal(m.factor[:, positions], None if m.offset is None else m.offset[:, positions])
    if isinstance(m, Norm):
        return replace(m, scale=m.scale[:, positions])
    if isinstance(m, Attention):
        return replace(m, pattern=m.pattern[:, :, positions][..., positions])
    if isinstance(m, Chain):
        return Chain(tuple(at_positions(stage, positions) for stage in m.stages))
    if isinstance(m, Sum):
        return Sum(tuple(at_positions(term, positions) for term in m.terms))
    if isinstance(m, Transpose):
        return Transpose(at_positions(m.inner, positions))
    return m


def mixes_positions(m: AffineMap) -> bool:
    """Whether any part of the map is attention."""
    parts = m.stages if isinstance(m, Chain) else m.terms if isinstance(m, Sum) else ()
    return isinstance(m, Attention) or any(map(mixes_positions, parts))


@dataclass(frozen=True, eq=False)
class Points:
    """One position per row and prompt, where each row's vector lives: vectors are `[row, batch, 1, d]`."""

    positions: Int[Tensor, "row batch"]


Where = Points | slice | list[int]
"""Where vectors live: a position of their own for each row, or the same positions for all."""

Shares = list[tuple[Tensor, Where]]
"""⟨vector, bias⟩ of primitives, `[row, batch, live]` each, and where those positions are."""


def pull_between(
    m: AffineMap,
    vectors: Float[Tensor, "row batch d_out"],
    queries: Points,
    sources: list[int] | None,
    length: int,
    *,
    causal: bool,
    biases: Shares | None = None,
) -> Float[Tensor, "row batch live d_in"]:
    """Pull vectors at one position per row back to the source tokens.

    Args:
        m: the map; its stages are gone through backwards.
        vectors: one per row and prompt.
        queries: where they live.
        sources: the source tokens that are asked for, ascending, or None for all.
        length: the number of positions.
        causal: whether no attention of the map looks forward: then nothing lives after the last query.
        biases: takes ⟨vector, bias⟩ of every primitive, at the positions where the vector lived, if a list.

    Returns:
        The pulled vectors at the source tokens, as far as the last query can reach: those after it are zero.
    """
    stages = m.stages if isinstance(m, Chain) else (m,)
    mixing = [number for number, stage in enumerate(stages) if mixes_positions(stage)]
    reach = slice(0, int(queries.positions.max()) + 1 if causal else length)
    reached = reach.stop if sources is None else sum(place < reach.stop for place in sources)
    asked: slice | list[int] = reach if sources is None else sources[:reached] or [0]  # none reached: pull one, cut it
    where: Where = queries
    g = vectors[:, :, None]
    for number in range(len(stages) - 1, -1, -1):
        then: Where = where if number not in mixing else asked if number == mixing[0] else reach
        g = _pull(stages[number], g, where, then, biases)
        where = then
    if where is not asked:  # no attention on the way
        count = asked.stop if isinstance(asked, slice) else len(asked)
        g = _added(g.new_zeros(*g.shape[:2], count, g.shape[-1]), g, where, asked)
    return g[:, :, :reached]


def _pull(m: AffineMap, g: Tensor, came: Where, goes: Where, biases: Shares | None) -> Tensor:
    """The adjoint for vectors that live at `came`, as vectors that live at `goes`."""
    if isinstance(m, Chain):
        for number in range(len(m.stages) - 1, -1, -1):
            mixing = mixes_positions(m.stages[number])
            g = _pull(m.stages[number], g, came, goes if mixing else came, biases)
            came = goes if mixing else came
        return g
    if isinstance(m, Sum):
        mixing = [mixes_positions(term) for term in m.terms]
        pulled = [
            _pull(term, g, came, goes if mixes else came, biases) for term, mixes in zip(m.terms, mixing, strict=True)
        ]
        if not any(mixing):
            return sum(pulled[1:], start=pulled[0])
        there = [made for made, mixes in zip(pulled, mixing, strict=True) if mixes]
        total = sum(there[1:], start=there[0])
        for made, mixes in zip(pulled, mixing, strict=True):
            total = total if mixes else _added(total, made, came, goes)
        return total
    if isinstance(m, Attention):
        return _attention(m, g, came, goes)
    noted: list[Tensor] | None = None if biases is None else []
    pulled = _cut(m, came)._backward(g, noted)
    if biases is not None:
        biases += [(share, came) for share in noted or ()]
    return pulled


def in_total(shares: Shares, like: Float[Tensor, "row batch"]) -> Float[Tensor, "row batch"]:
    """The shares of all biases, summed."""
    return sum((share.sum(-1) for share, _ in shares), start=torch.zeros_like(like))


def by_position(shares: Shares, like: Float[Tensor, "row batch pos"]) -> Float[Tensor, "row batch pos"]:
    """The shares of biases, summed at the positions where the biases are added."""
    total = torch.zeros_like(like)
    for share, where in shares:
        if isinstance(where, Points):
            total.scatter_add_(2, where.positions.expand(share.shape[:2])[..., None], share.to(total))
        else:
            total[:, :, where] += share
    return total


def _attention(m: Attention, g: Tensor, came: Where, goes: Where) -> Tensor:
    assert not isinstance(goes, Points)
    keys, kv = m.pattern[..., goes], m.kv_heads
    if not isinstance(came, Points):
        pattern = rearrange(keys[:, :, came], "b (kv group) q k -> b kv group q k", kv=kv)
        heads = rearrange(g, "r b q (kv group d) -> r b q kv group d", kv=kv, group=pattern.shape[2])
        mixed = torch.einsum("bcgqk,rbqcgd->rbkcd", pattern, heads)
        return mixed.flatten(-2)
    rows = came.positions
    index = torch.arange(rows.shape[1], device=rows.device)
    pattern = rearrange(keys[index, :, rows], "r b (kv group) k -> r b kv group k", kv=kv)
    heads = rearrange(g[:, :, 0], "r b (kv group d) -> r b kv group d", kv=kv, group=pattern.shape[3])
    if pattern.shape[0] == 1 != heads.shape[0]:  # one query for all rows: a product per head
        return torch.einsum("bcgk,rbcgd->rbkcd", pattern[0], heads).flatten(-2)
    return torch.einsum("rbcgk,rbcgd->rbkcd", pattern, heads).flatten(-2)


def _cut(m: AffineMap, where: Where) -> AffineMap:
    """A primitive that treats positions alone, at those where vectors live."""
    if not isinstance(where, Points):
        return at_positions(m, where)
    if isinstance(m, Identity | Linear):
        return m
    if isinstance(m, Diagonal):
        return Diagonal(_at(m.factor, where), None if m.offset is None else _at(m.offset, where))
    if isinstance(m, Norm):
        return replace(m, scale=_at(m.scale, where))
    if isinstance(m, Transpose):
        return Transpose(_cut(m.inner, where))
    raise TypeError(f"{type(m).__name__} has no rule for single positions; see tensorlens_tl.positions.")


def _at(tensor: Float[Tensor, "batch pos d"], where: Points) -> Float[Tensor, "row batch 1 d"]:
    """What belongs to each row's position; one vector for all positions serves every row."""
    if tensor.shape[1] == 1:
        return tensor[None]
    index = torch.arange(where.positions.shape[1], device=tensor.device)
    batch = index if tensor.shape[0] > 1 else torch.zeros_like(index)
    return tensor[batch, where.positions][:, :, None]


def _added(total: Tensor, g: Tensor, came: Where, goes: Where) -> Tensor:
    """`total`, which lives at `goes` and may be overwritten, with vectors added that live at `came`."""
    assert not isinstance(goes, Points)
    if isinstance(came, Points):
        rows = came.positions.expand(g.shape[:2])[:, :, None, None]
        if isinstance(goes, list):  # places that are not asked for are left out
            asked = torch.tensor(goes, device=g.device)
            column = torch.searchsorted(asked, rows.contiguous()).clamp_max(len(goes) - 1)
            g = g * (asked[column] == rows)
            rows = column
        return total.scatter_add_(2, rows.expand_as(g), g)
    return total.add_(g if isinstance(goes, slice) else g[:, :, goes])


def place(
    vectors: Float[Tensor, "rows batch d"], positions: Int[Tensor, "rows batch"], x: Tensor
) -> Float[Tensor, "rows batch pos d"]:
    """Rows that are zero except for one vector at one position per prompt, like `x` otherwise."""
    placed = x.new_zeros(*vectors.shape[:2], x.shape[1], vectors.shape[-1])
    index = positions[:, :, None, None].expand(-1, -1, 1, vectors.shape[-1])
    return placed.scatter_(2, index, vectors[:, :, None].to(placed.dtype))
