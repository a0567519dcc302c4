"""A small algebra of affine maps of the residual stream.

Every map knows three things: how to `push` a vector through its linear part, how to `pull` one back
through the adjoint, and its `bias`. Primitives are `Linear`, `Diagonal`, `Norm` and `Attention`;
`Sum`, `Chain` and `Transpose` combine them, and nothing else in the library multiplies matrices.

Vectors are `[*rows, batch, pos, d]`. The leading `*rows` carry many vectors through one product: that
axis is how tokens, basis vectors, probes and targets are all handled without a loop. Only positions mix
in `Attention`, so `batch` and `pos` are always the frozen prompt's.

    >>> import torch
    >>> double, shift = Linear(2 * torch.eye(3)), Linear(torch.eye(3), torch.ones(3))
    >>> both = shift @ double
    >>> both
    Linear(3 → 3, offset) @ Linear(3 → 3)
    >>> both(torch.ones(1, 1, 3))
    tensor([[[3., 3., 3.]]])
    >>> both.pull(torch.ones(5, 1, 1, 3)).shape
    torch.Size([5, 1, 1, 3])

Classes are either abstract (`AffineMap`) or final (all others); write a new map by inheriting from
`AffineMap` and defining its three abstract members.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "*rows batch pos d"]
"""Vectors of the residual stream (or of a hidden layer), any number of leading row axes."""

ZERO = torch.zeros(())
"""The bias of a linear map: a scalar, which broadcasts on any device without promoting any dtype."""

SHOWN = 6
"""Stages that the repr of a chain writes out."""


class AffineMap(ABC):
    """``m(x) = m.push(x) + m.bias``, with the adjoint of the linear part in ``m.pull``."""

    @property
    @abstractmethod
    def bias(self) -> Tensor:
        """What the map adds besides its linear part; broadcasts to `[batch, pos, d_out]`."""

    @abstractmethod
    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        """The linear part of `x`, plus the bias where `affine`."""

    @abstractmethod
    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        """The adjoint; appends each primitive's ⟨g, bias⟩ per position (`[*rows, batch, pos]`) to a list `biases`."""

    def push(self, x: Float[Tensor, "*rows batch pos d_in"]) -> Float[Tensor, "*rows batch pos d_out"]:
        """The linear part, J·x, for every row."""
        return self._forward(x, affine=False)

    def __call__(self, x: Float[Tensor, "*rows batch pos d_in"]) -> Float[Tensor, "*rows batch pos d_out"]:
        """The whole map, J·x + bias, at the cost of one push."""
        return self._forward(x, affine=True)

    def pull(self, g: Float[Tensor, "*rows batch pos d_out"]) -> Float[Tensor, "*rows batch pos d_in"]:
        """The adjoint of the linear part, Jᵀ·g, for every row."""
        return self._backward(g, None)

    def pull_with_bias(
        self, g: Float[Tensor, "*rows batch pos d_out"]
    ) -> tuple[Float[Tensor, "*rows batch pos d_in"], Float[Tensor, "*rows batch"]]:
        """``(Jᵀ·g, ⟨g, bias⟩)`` for every row, the second by the adjoint as well, so the bias is never pushed."""
        biases: list[Tensor] = []
        pulled = self._backward(g, biases)
        total = torch.stack(biases).sum((0, -1)) if biases else g.new_zeros(g.shape[:-2])
        return pulled, total

    @property
    def T(self) -> "AffineMap":
        """The adjoint of the linear part as a map of its own, with bias zero."""
        return Transpose(self)

    def __matmul__(self, other: "AffineMap") -> "Chain":
        """``(a @ b)(x) = a(b(x))``."""
        return Chain((*_stages(other), *_stages(self)))

    def __add__(self, other: "AffineMap") -> "Sum":
        return Sum((*_terms(self), *_terms(other)))


def _stages(m: AffineMap) -> tuple[AffineMap, ...]:
    return tuple(inner for stage in m.stages for inner in _stages(stage)) if isinstance(m, Chain) else (m,)


def _terms(m: AffineMap) -> tuple[AffineMap, ...]:
    return m.terms if isinstance(m, Sum) else (m,)


def _note_bias(g: Tensor, bias: Tensor, biases: list[Tensor] | None) -> None:
    if biases is None or bias is ZERO:
        return
    biases.append(g @ bias if bias.ndim == 1 else (g * bias).sum(-1))


# ----------------------------------------------------------------------------------- primitives


@final
@dataclass(frozen=True, eq=False, repr=False)
class Identity(AffineMap):
    """The residual connection."""

    def __repr__(self) -> str:
        return "Identity"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return g


@final
@dataclass(frozen=True, eq=False, repr=False)
class Linear(AffineMap):
    """``x @ weight + offset``: the same matrix at every position."""

    weight: Float[Tensor, "d_in d_out"]
    offset: Float[Tensor, "d_out"] | None = None

    def __repr__(self) -> str:
        return "Linear({} → {}{})".format(*self.weight.shape, "" if self.offset is None else ", offset")

    @property
    def bias(self) -> Tensor:
        return ZERO if self.offset is None else self.offset

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.T, self.offset if affine else None)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        _note_bias(g, self.bias, biases)
        return torch.nn.functional.linear(g, self.weight)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(AffineMap):
    """``x * factor + offset``: a frozen factor per position and channel, such as an activation ratio."""

    factor: Float[Tensor, "*rows batch pos d"]
    offset: Float[Tensor, "*rows batch pos d"] | None = None

    def __repr__(self) -> str:
        return f"Diagonal({self.factor.shape[-1]}{'' if self.offset is None else ', offset'})"

    @property
    def bias(self) -> Tensor:
        return ZERO if self.offset is None else self.offset

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = x * self.factor
        return y if self.offset is None or not affine else y + self.offset

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        _note_bias(g, self.bias, biases)
        return g * self.factor


@final
@dataclass(frozen=True, eq=False, repr=False)
class Norm(AffineMap):
    """LayerNorm or RMSNorm with its denominator held fixed: ``(x − mean x) / scale * gain + shift``.

    `scale` is √(var + ε) or √(mean square + ε); `centre` tells LayerNorm (subtracts the mean) from RMSNorm.
    Models divide in float32 and cast back; a float32 scale beside bfloat16 vectors does the same here.
    """

    scale: Float[Tensor, "*rows batch pos 1"]
    gain: Float[Tensor, "d"] | None = None
    shift: Float[Tensor, "d"] | None = None
    centre: bool = True

    def __repr__(self) -> str:
        return f"Norm({'centred' if self.centre else 'not centred'})"

    @property
    def bias(self) -> Tensor:
        return ZERO if self.shift is None else self.shift

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        y = ((x - x.mean(-1, keepdim=True) if self.centre else x) / self.scale).to(x.dtype)
        y = y if self.gain is None else y * self.gain
        return y if self.shift is None or not affine else y + self.shift

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        _note_bias(g, self.bias, biases)
        y = ((g if self.gain is None else g * self.gain) / self.scale).to(g.dtype)
        return y - y.mean(-1, keepdim=True) if self.centre else y


@final
@dataclass(frozen=True, eq=False, repr=False)
class Attention(AffineMap):
    """Mixes values over positions by a frozen pattern, in head space: ``[.., (kv d_head)] -> [.., (head d_head)]``.

    Grouped-query attention needs no expanded weights: query head h reads key-value head ``h // (heads // kv_heads)``.
    Pattern rows need not sum to 1 (attention sinks, fully masked rows).
    """

    pattern: Float[Tensor, "batch head query key"]
    kv_heads: int

    def __repr__(self) -> str:
        _, heads, query, key = self.pattern.shape
        return f"Attention({heads} heads, {query} × {key})"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def _grouped(self) -> Tensor:
        return rearrange(self.pattern, "b (kv group) q k -> b kv group q k", kv=self.kv_heads)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        values = rearrange(x.reshape(-1, *x.shape[-3:]), "r b k (kv d) -> r b k kv d", kv=self.kv_heads)
        mixed = torch.einsum("bcgqk,rbkcd->rbqcgd", self._grouped(), values)
        return mixed.reshape(*x.shape[:-3], *mixed.shape[1:3], -1)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        heads = rearrange(
            g.reshape(-1, *g.shape[-3:]),
            "r b q (kv group d) -> r b q kv group d",
            kv=self.kv_heads,
            group=self.pattern.shape[1] // self.kv_heads,
        )
        mixed = torch.einsum("bcgqk,rbqcgd->rbkcd", self._grouped(), heads)
        return mixed.reshape(*g.shape[:-3], *mixed.shape[1:3], -1)


# ----------------------------------------------------------------------------------- combinations


@final
@dataclass(frozen=True, eq=False, repr=False)
class Chain(AffineMap):
    """Maps applied one after the other; `stages` are in the order of application, each with its own bias."""

    stages: tuple[AffineMap, ...]

    def __repr__(self) -> str:
        shown = [f"({stage})" if isinstance(stage, Sum) else repr(stage) for stage in reversed(_stages(self))]
        if len(shown) > SHOWN:
            shown = [*shown[: SHOWN // 2], f"… {len(shown) - SHOWN} more …", *shown[-(SHOWN // 2) :]]
        return " @ ".join(shown)

    @property
    def bias(self) -> Tensor:
        bias = ZERO
        for stage in self.stages:
            bias = stage.bias if bias is ZERO else stage._forward(_with_positions(bias), affine=True)
        return bias

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        for stage in self.stages:
            x = stage._forward(x, affine)
        return x

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        for stage in reversed(self.stages):
            g = stage._backward(g, biases)
        return g


@final
@dataclass(frozen=True, eq=False, repr=False)
class Sum(AffineMap):
    """Branches that read the same vector and add up."""

    terms: tuple[AffineMap, ...]

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))

    @property
    def bias(self) -> Tensor:
        biases = [term.bias for term in self.terms]
        return sum((bias for bias in biases if bias is not ZERO), start=ZERO)

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        first, *others = (term._forward(x, affine) for term in self.terms)
        return sum(others, start=first)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        first, *others = (term._backward(g, biases) for term in self.terms)
        return sum(others, start=first)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Transpose(AffineMap):
    """The adjoint of a map's linear part."""

    inner: AffineMap

    def __repr__(self) -> str:
        return f"({self.inner}).T"

    @property
    def bias(self) -> Tensor:
        return ZERO

    def _forward(self, x: Tensor, affine: bool) -> Tensor:
        return self.inner._backward(x, None)

    def _backward(self, g: Tensor, biases: list[Tensor] | None) -> Tensor:
        return self.inner._forward(g, affine=False)


def _with_positions(bias: Tensor) -> Tensor:
    """A bias as vectors a map accepts; one vector for all positions becomes `[1, 1, d]` and broadcasts."""
    return bias if bias.ndim >= 3 else bias[None, None]
