"""Secants of a linear layer and of a norm, and the named offsets inside maps."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, Chain, Sum, bias_of
from tensorlens_tl.algebra.numerics import centred
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.algebra.primitives import Diagonal, Linear, Norm
from tensorlens_tl.algebra.routing import Branch, Routed
from tensorlens_tl.algebra.secants.maps import MatrixChange, Offset, RankOne, WithConstants
from tensorlens_tl.algebra.segments import Segment


def linear_secant(
    a: Linear, b: Linear, x_a: Float[Tensor, "batch pos d_in"], x_b: Float[Tensor, "batch pos d_in"], name: str
) -> tuple[AffineMap, ...]:
    """Return the stages of Δ(xW + b) = Δx·W̄ + x̄·ΔW + Δb; the matrix alone if the weights are the same.

    Args:
        a, b: the two layers.
        x_a, x_b: their inputs.
        name: the name of the matrix; its bias is named after it, as ``"L0.W_V"`` and ``"L0.b_V"``.
    """
    if same(a.weight, b.weight) and same(a.offset, b.offset):
        return (Linear(a.weight),)
    stages: list[AffineMap] = [Linear((a.weight + b.weight) / 2)]
    if not same(a.weight, b.weight):
        change = MatrixChange((x_a + x_b) / 2, a.weight, b.weight)
        stages.append(Offset(change.vectors, name, change))
    return (*stages, *shift_secant(a.offset, b.offset, bias_name(name)))


def shift_secant(a: Float[Tensor, "d"] | None, b: Float[Tensor, "d"] | None, name: str) -> tuple[Offset, ...]:
    """Return Δ of an added vector: a named offset if the vectors differ; None stands for zero."""
    return () if same(a, b) else (Offset((bias_of(a) - bias_of(b))[None, None], name),)


def bias_name(matrix: str) -> str:
    """Return the name of the bias that belongs to a matrix: ``"L0.b_V"`` for ``"L0.W_V"``."""
    *before, last = matrix.split(".")
    return ".".join([*before, last.replace("W_", "b_", 1)])


def norm_secant(
    a: Norm, b: Norm, x_a: Float[Tensor, "batch pos d"], x_b: Float[Tensor, "batch pos d"], name: str
) -> Chain:
    """Return Δ of a norm with a responding scale: the norm at the harmonic mean of the scales, and a map of rank one.

    Args:
        a, b: the norm of either run, with that run's scale.
        x_a, x_b: their inputs.
        name: the name of the norm, for the offsets if gain and shift of two models differ.
    """
    c_a = centred(x_a, a.centre)
    c_b = centred(x_b, b.centre)
    held = Norm(2 / (1 / a.scale + 1 / b.scale), None, None, a.centre)
    responds = scale_response(c_a, c_b, a.scale, b.scale)
    normed = (c_a / a.scale + c_b / b.scale) / 2
    gained = gain_secant(a.gain, b.gain, normed, name)
    return Chain((Sum((held, responds)), *gained, *shift_secant(a.shift, b.shift, f"{name}.b")))


def gain_secant(
    a: Float[Tensor, "d"] | None, b: Float[Tensor, "d"] | None, mean: Float[Tensor, "batch pos d"], name: str
) -> tuple[AffineMap, ...]:
    """Return Δ of a product with a norm's gain: the mean gain, and an offset ``"{name}.w"`` if the gains differ.

    Args:
        a, b: the gains; None for 1.
        mean: the mean of the values that they multiply.
        name: the name of the norm.
    """
    if same(a, b):
        return () if a is None else (Diagonal(a[None, None]),)
    ones = torch.ones_like(mean[0, 0])
    of_a = ones if a is None else a
    of_b = ones if b is None else b
    return Diagonal(((of_a + of_b) / 2)[None, None]), Offset(mean * (of_a - of_b), f"{name}.w")


def scale_response(
    c_a: Float[Tensor, "batch pos d"],
    c_b: Float[Tensor, "batch pos d"],
    scale_a: Float[Tensor, "batch pos group"],
    scale_b: Float[Tensor, "batch pos group"],
    groups: int = 1,
) -> RankOne:
    """Return the change of a norm's output due to its scale: c̄·Δ(1/σ), linear in the difference of its input.

    Args:
        c_a, c_b: the numerators of the norm, centred for LayerNorm.
        scale_a, scale_b: the scales, one for each group of channels.
        groups: the number of groups of channels with separate scales.
    """
    size = c_a.shape[-1] // groups
    factor = -1 / ((scale_a + scale_b) * scale_a * scale_b)
    if groups > 1:
        factor = factor.repeat_interleave(size, dim=-1)
    return RankOne((c_a + c_b) / size, factor * (c_a + c_b) / 2, groups)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two parameters are the same or equal."""
    if a is None or b is None:
        return a is b
    is_one = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    return a is b or is_one or torch.equal(a, b)


def pull_noting(
    m: AffineMap, g: Float[Tensor, "*rows batch pos d"], note: Callable[[Offset, Tensor], None]
) -> Float[Tensor, "*rows batch pos d_in"]:
    """Return ``m.pull(g)``, calling ``note(offset, vectors)`` with every `Offset` and the vectors pulled to it.

    Args:
        m: a map made of chains, sums and segments.
        g: the vector at its output.
        note: receives the offsets, the last of the map first.
    """
    match m:
        case Offset():
            note(m, g)
            return g
        case Chain(stages=stages):
            for stage in reversed(stages):
                g = pull_noting(stage, g, note)
            return g
        case Sum(terms=terms):
            first, *others = (pull_noting(term, g, note) for term in terms)
            return sum(others, start=first)
        case Segment():
            return _pull_segment(m, g, note)
        case Routed():
            _note_routed(m, g, note)
            return m.pull(g)
        case WithConstants():
            for offset, pulled in m.noted(g):
                note(offset, pulled)
            return m.pull(g)
        case _:
            return m.pull(g)


def _pull_segment(
    m: Segment, g: Float[Tensor, "*rows batch pos d"], note: Callable[[Offset, Tensor], None]
) -> Float[Tensor, "*rows batch pos d_in"]:
    """Return ``m.pull(g)``, with the offsets inside placed at the segment's positions among all; zero elsewhere."""

    def among_all(vectors: Float[Tensor, "*rows batch inside d"]) -> Float[Tensor, "*rows batch pos d"]:
        if vectors.shape[-2] == 1 < m.stop - m.start:  # the same for all positions
            return vectors
        return widened(vectors, m.start, m.length)

    def note_among_all(offset: Offset, pulled: Tensor) -> None:
        note(offset.placed(among_all), among_all(pulled))

    return m.beside_others(g, pull_noting(m.inner, g[..., m.start : m.stop, :], note_among_all))


def _note_routed(m: Routed, g: Float[Tensor, "*rows batch pos d"], note: Callable[[Offset, Tensor], None]) -> None:
    """Note the offsets in each expert at the positions of its tokens; zero elsewhere."""
    flat = g.flatten(-1 - len(m.shape), -2)

    def spread(branch: Branch, packed: Float[Tensor, "*rows 1 token d"]) -> Float[Tensor, "*rows batch pos d"]:
        vectors = packed.expand(*packed.shape[:-2], len(branch.places), packed.shape[-1]).squeeze(-3)
        whole = vectors.new_zeros(*vectors.shape[:-2], flat.shape[-2], vectors.shape[-1])
        return whole.index_add(-2, branch.places, vectors).unflatten(-2, m.shape)

    for branch in m.branches:
        packed = (flat[..., branch.places, :] * branch.weight[:, None]).unsqueeze(-3)

        def note_spread(offset: Offset, pulled: Tensor, branch: Branch = branch) -> None:
            note(offset.placed(partial(spread, branch)), spread(branch, pulled))

        pull_noting(branch.map, packed, note_spread)


def offset_terms(
    m: AffineMap, g: Float[Tensor, "*rows batch pos d"]
) -> list[tuple[str, Float[Tensor, "*rows batch pos"]]]:
    """Return ⟨g pulled to it, its vectors⟩ of every `Offset` in a map, by name and position.

    Args:
        m: a map made of chains, sums, segments and experts.
        g: the vector at the map's output, `[*rows, batch, pos, d]`.
    """
    terms: list[tuple[str, Tensor]] = []
    pull_noting(m, g, lambda offset, pulled: terms.append((offset.name, (pulled * offset.vectors).sum(-1))))
    return terms


def without_offsets(m: AffineMap) -> AffineMap:
    """Return a map of chains without its `Offset`s."""
    if not isinstance(m, Chain):
        return m
    return Chain(tuple(without_offsets(stage) for stage in m.stages if not isinstance(stage, Offset)))
