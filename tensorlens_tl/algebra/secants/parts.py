"""Secants of the parts that two runs share: a linear layer, a norm."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.maps import AffineMap, Chain, Sum
from tensorlens_tl.algebra.numerics import centred
from tensorlens_tl.algebra.primitives import Linear, Norm
from tensorlens_tl.algebra.secants.maps import MatrixChange, Offset, RankOne


def linear_secant(
    a: Linear, b: Linear, x_a: Float[Tensor, "batch pos d_in"], x_b: Float[Tensor, "batch pos d_in"], name: str
) -> tuple[AffineMap, ...]:
    """Δ(xW + b) = Δx·W̄ + x̄·ΔW + Δb, as stages; where the weights are the same, the matrix alone.

    Args:
        a, b: the two layers.
        x_a, x_b: what they read.
        name: of the matrix; its bias is named after it, as ``"L0.W_V"`` and ``"L0.b_V"``.
    """
    if _same(a.weight, b.weight) and _same(a.offset, b.offset):
        return (Linear(a.weight),)
    stages: list[AffineMap] = [Linear((a.weight + b.weight) / 2)]
    if not _same(a.weight, b.weight):
        change = MatrixChange((x_a + x_b) / 2, a.weight, b.weight)
        stages.append(Offset(change.vectors, name, change))
    if not _same(a.offset, b.offset):
        zero = a.weight.new_zeros(a.weight.shape[1])
        shift = (zero if a.offset is None else a.offset) - (zero if b.offset is None else b.offset)
        stages.append(Offset(shift[None, None], bias_name(name)))
    return tuple(stages)


def bias_name(matrix: str) -> str:
    """The name of the bias beside a matrix: ``"L0.b_V"`` beside ``"L0.W_V"``."""
    *before, last = matrix.split(".")
    return ".".join([*before, last.replace("W_", "b_", 1)])


def norm_secant(
    a: Norm, b: Norm, x_a: Float[Tensor, "batch pos d"], x_b: Float[Tensor, "batch pos d"], name: str
) -> Chain:
    """Δ of a norm, its scale responding: the norm at the harmonic mean of the scales, and a map of rank one.

    Args:
        a, b: the norm of either run, with the scale that it had.
        x_a, x_b: what it read.
        name: of the norm, for what its gain and shift add where those of two models differ.
    """
    c_a = centred(x_a, a.centre)
    c_b = centred(x_b, b.centre)
    mean_inverse = (1 / a.scale + 1 / b.scale) / 2
    gain = a.gain
    if not _same(a.gain, b.gain):
        gain = (_factor(a.gain, x_a) + _factor(b.gain, x_b)) / 2
    held = Norm(1 / mean_inverse, gain, None, a.centre)
    responds = scale_response(c_a, c_b, a.scale, b.scale, gain)
    stages: list[AffineMap] = [Sum((held, responds))]
    if not _same(a.gain, b.gain):
        normed = (c_a / a.scale + c_b / b.scale) / 2
        stages.append(Offset(normed * (_factor(a.gain, x_a) - _factor(b.gain, x_b)), f"{name}.w"))
    if not _same(a.shift, b.shift):
        zero = torch.zeros_like(x_a[0, 0])
        shift = (zero if a.shift is None else a.shift) - (zero if b.shift is None else b.shift)
        stages.append(Offset(shift[None, None], f"{name}.b"))
    return Chain(tuple(stages))


def _factor(gain: Tensor | None, x: Tensor) -> Tensor:
    """A gain, 1 where there is none."""
    return torch.ones_like(x[0, 0]) if gain is None else gain


def scale_response(
    c_a: Float[Tensor, "batch pos d"],
    c_b: Float[Tensor, "batch pos d"],
    scale_a: Float[Tensor, "batch pos group"],
    scale_b: Float[Tensor, "batch pos group"],
    gain: Float[Tensor, "..."] | None = None,
    groups: int = 1,
) -> RankOne:
    """What a norm's output changes by because its scale does: c̄·Δ(1/σ), linear in the difference of its input.

    Args:
        c_a, c_b: what is divided by the scale, centred where the norm centres.
        scale_a, scale_b: the scales, one for each group of channels.
        gain: what the norm multiplies by afterwards.
        groups: how many groups of channels have scales of their own.
    """
    size = c_a.shape[-1] // groups
    factor = -1 / ((scale_a + scale_b) * scale_a * scale_b)
    if groups > 1:
        factor = factor.repeat_interleave(size, dim=-1)
    write = factor * (c_a + c_b) / 2
    return RankOne((c_a + c_b) / size, write if gain is None else write * gain, groups)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape) or torch.equal(a, b)


def pull_noting(
    m: AffineMap, g: Float[Tensor, "*rows batch pos d"], note: Callable[[Offset, Tensor], None]
) -> Float[Tensor, "*rows batch pos d_in"]:
    """``m.pull(g)``; on the way ``note(offset, vectors)`` is called with every `Offset` and what is pulled to it.

    Args:
        m: the map, of chains and sums.
        g: the vector at its end.
        note: takes the offsets, the last of the map first.
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
        case _:
            return m.pull(g)


def offsets_met(
    m: AffineMap, g: Float[Tensor, "*rows batch pos d"]
) -> list[tuple[str, Float[Tensor, "*rows batch pos"]]]:
    """What every `Offset` in a map gives to a vector at its end, by name and position: ⟨g pulled to it, its vectors⟩.

    Args:
        m: the map, of chains and sums.
        g: the vector, `[*rows, batch, pos, d]`.
    """
    terms: list[tuple[str, Tensor]] = []
    pull_noting(m, g, lambda offset, pulled: terms.append((offset.name, (pulled * offset.vectors).sum(-1))))
    return terms
