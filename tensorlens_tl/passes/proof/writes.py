"""What the sublayers of a block hold and write, compared with the model at the hook points that show it.

A block's output is the residual stream plus what its sublayers write to it. Measured against the whole stream, a head
or a few neurons can go unnoticed: in half precision, or beside one large channel. So the proof of a block also compares
what each head gathers, what each neuron computes and what each sublayer writes, every one against its own size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import UnionType
from typing import NamedTuple, TypeGuard

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, AnyAttention, Chain, Diagonal, Tap
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.hooks import ModelPoints, keep_in
from tensorlens_tl.models import Layout, ModelView, Place
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.blocks import BlockParts
from tensorlens_tl.passes.proof.sampled import can_be_sampled


@dataclass
class SeenWrites:
    """What the model showed at `ModelPoints.proved`, stored until its blocks are proved.

    Attributes:
        at: the positions `[batch, query]` of points whose blocks are proved at some positions only.
        store: ``"cpu"`` moves them off the model's device.
        tensors: by name, `[batch, pos, width]`.
    """

    names: frozenset[str]
    batch: int
    at: dict[str, Int[Tensor, "batch query"]] = field(default_factory=dict)
    store: str = "model"
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, view: ModelView, points: ModelPoints, batch: int, positions: Int[Tensor, "batch query"] | None, store: str
    ) -> "SeenWrites":
        """What a whole proof looks at, or (`positions`) one at some positions, of the blocks that can be proved so."""
        at: dict[str, Tensor] = {}
        if positions is not None:
            for layer, block in enumerate(points.blocks):
                if can_be_sampled(view, layer):
                    at |= dict.fromkeys(block.proved, positions)
        return cls(frozenset(points.proved), batch, at, store)

    def see(self, name: str, activation: Tensor) -> None:
        """Store what one hook point shows."""
        by_token = activation.reshape(self.batch, -1, _width(activation))
        if name in self.at:
            positions = self.at[name].to(by_token.device)
            by_token = by_token[torch.arange(self.batch, device=positions.device)[:, None], positions]
        keep_in(self.tensors, self.store, name, by_token)


def _width(activation: Tensor) -> int:
    """Numbers of a token: everything after batch and position, which some classes flatten into one axis."""
    if activation.ndim == 2:
        return activation.shape[-1]
    return activation[0, 0].numel()


class WriteError(NamedTuple):
    """How far one hook point is from the map, and which of its units is furthest."""

    point: str
    error: float
    unit: str = ""


class BlockErrors(NamedTuple):
    """How far a block's map is from the model: at the block's output, and at the hook points inside."""

    output: float
    writes: list[WriteError]

    def first_above(self, tolerance: float) -> WriteError | None:
        """The first hook point, in the order of the pass, that differs by more."""
        return next((write for write in self.writes if not write.error <= tolerance), None)


def tapped(parts: BlockParts, seen: dict[str, Tensor], factors: Mapping[str, Tensor]) -> BlockParts:
    """Return a block's parts, noting in `seen` what its map computes, multiplied by its entry of `factors` first.

    ``"heads"``, ``"hidden"`` and ``"crossing"`` are what heads, an MLP and cross-attention hold inside, ``"attention"``
    and ``"mlp"`` what sublayers write.
    """

    def tap(name: str) -> AffineMap:
        note = Tap(seen, name)
        return Chain((Diagonal(factors[name]), note)) if name in factors else note

    attention = _tapped_after(parts.attention, AnyAttention, tap("heads"), tap("attention"))
    mlp = parts.mlp
    if mlp is not None:
        mlp = _tapped_after(mlp, Diagonal, tap("hidden"), tap("mlp"))
    within = parts.within
    if within is not None and within.read is not None:
        within = replace(within, read=Chain((within.read, tap("crossing"))))
    return parts._replace(attention=attention, mlp=mlp, within=within)


def _tapped_after(sublayer: AffineMap, kind: type | UnionType, inside: AffineMap, end: AffineMap) -> Chain:
    """A sublayer with taps after its first stage of a kind, if it has one, and at its end."""
    stages = list(sublayer.stages) if isinstance(sublayer, Chain) else [sublayer]
    matches = [number for number, stage in enumerate(stages) if isinstance(stage, kind)]
    if matches and matches[0] < len(stages) - 1:
        stages.insert(matches[0] + 1, inside)
    return Chain((*stages, end))


def write_errors(
    maps: BlockMaps,
    layer: int,
    layout: Layout,
    seen: Mapping[str, Tensor],
    noted: Mapping[str, Tensor],
    rounded: Sequence[Mapping[str, Tensor]] = (),
) -> list[WriteError]:
    """Return how far a block's hook points are from what its map computes, in the order of the pass.

    `seen` is what the model showed, `noted` what the map noted; how far `rounded` is from `noted` does not count.
    """
    return list(_Comparison(maps, layer, layout, seen, noted, rounded).errors())


class _Comparison:
    """One block's hook points beside what its map computes there."""

    def __init__(
        self,
        maps: BlockMaps,
        layer: int,
        layout: Layout,
        seen: Mapping[str, Tensor],
        noted: Mapping[str, Tensor],
        rounded: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.maps = maps
        self.layer = layer
        self.layout = layout
        self.seen = seen
        self.block = maps.view.blocks[layer]
        self.points = maps.points.blocks[layer]
        self.side = slice(*maps.capture.side(layer))
        self.noted = self._merged(noted) if self.points.merged else noted
        self.rounded = [self._merged(other) if self.points.merged else other for other in rounded]
        mask = maps.mask[:, self.side]
        self.real = None if bool(mask.all()) else mask.flatten()
        self.stream = maps.capture.resid_pre(layer)[:, self.side]
        self.rounding = torch.finfo(self.stream.dtype).eps

    def errors(self) -> Iterator[WriteError]:
        """In the order of the pass."""
        points = self.points
        noted = self.noted
        if self._is_shown(points.z):
            yield self._heads(points.z, noted["heads"], self.block.attention.heads, "heads")
            if self._is_shown(points.head_writes):
                yield self._head_writes(points.head_writes)
        if self._is_shown(points.attention_write):
            factor = self.block.attention_factor
            yield self._write(points.attention_write, "attention", self.layout.attn, factor)
        cross = self.block.cross_attention
        crossing = points.cross
        if cross is not None and crossing is not None and not points.merged and self._is_shown(crossing.z):
            yield self._heads(crossing.z, noted["crossing"][:, self.side], cross.heads)
        if self._is_shown(points.post) and "hidden" in noted:
            yield self._neurons(points.post)
        if self._is_shown(points.mlp_write) and "mlp" in noted:
            yield self._write(points.mlp_write, "mlp", self.layout.mlp, self.block.branch_factor)
        if self.layout.attn.outer is None and self.layout.mlp.outer is None:
            yield self._added(noted["output"])

    def _merged(self, noted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the map computes where self- and cross-attention give one output together."""
        crossing = noted["crossing"][:, self.side]
        written = noted["attention"] + crossing @ self.block.attention.W_O
        return {**noted, "heads": noted["heads"] + crossing, "attention": written}

    def _is_shown(self, point: str | None) -> TypeGuard[str]:
        return point in self.seen

    def _by_token(self, x: Float[Tensor, "batch pos *d"]) -> Float[Tensor, "token *d"]:
        """The vectors of all tokens, in float32 at least; errors of padding are left out once they are numbers."""
        return upcast(x.to(self.stream.device).flatten(0, 1))

    def _at_real(self, numbers: Float[Tensor, "token *unit"]) -> Float[Tensor, "real *unit"]:
        """Those of real tokens."""
        return numbers if self.real is None else numbers[self.real]

    @cached_property
    def _stream_size(self) -> Float[Tensor, "token d"]:
        """The size of every number of the stream that the block reads."""
        return self._by_token(self.stream).abs()

    def _lost(
        self, sizes: Callable[[Mapping[str, Tensor]], Float[Tensor, "token *unit"]]
    ) -> Float[Tensor, "token *unit"] | float:
        """Return how much of an error is rounding: twice the deviation, `sizes`, of what is computed with other
        rounding.

        Never more than the tolerance: what is zero in the model or in the map alone is an error, however it rounds.
        """
        if not self.rounded:
            return 0.0
        squares = torch.stack([sizes(other).square() for other in self.rounded])
        return (2 * squares.mean(0).sqrt()).clamp_max(self.maps.tolerance)

    def _heads(self, point: str, ours: Tensor, heads: int, name: str = "") -> WriteError:
        expected = self._by_token(self.seen[point]).unflatten(-1, (heads, -1))
        exact = self._by_token(ours).unflatten(-1, (heads, -1))
        sizes = self._at_real(expected.norm(dim=-1))
        sizes = sizes + _positive(torch.linalg.vector_norm(sizes, dim=-1, keepdim=True) / sizes.shape[-1] ** 0.5)

        def off(other: Tensor) -> Tensor:
            return self._at_real((exact - other).norm(dim=-1)) / sizes

        errors = off(expected)
        if name:
            errors -= self._lost(lambda other: off(self._by_token(other[name]).unflatten(-1, (heads, -1))))
        return _worst(point, "head", errors)

    def _head_writes(self, point: str) -> WriteError:
        """What each head writes; TransformerLens shows it before the block's factor (3.9, Falcon-H1) or after it."""
        weights = self.block.attention
        by_head = rearrange(weights.W_O, "(h e) d -> h e d", h=weights.heads)
        gathered = rearrange(self.noted["heads"], "b p (h e) -> b p h e", h=weights.heads)
        writes = torch.einsum("bphe,hed->bphd", gathered, by_head).flatten(2)
        errors = [self._heads(point, writes, weights.heads)]
        if self.block.attention_factor != 1:
            errors.append(self._heads(point, writes / self.block.attention_factor, weights.heads))
        return min(errors, key=lambda error: error.error)

    def _neurons(self, post: str) -> WriteError:
        """Compare an MLP's hidden vector with the captured pre-activation times its activation ratio.

        A pre-activation rounds like an average one, and reaches a neuron by its ratio. An activation may round relative
        to its argument, however small its value (GELU by tanh adds 1 to a number near −1). Subnormal numbers may be
        flushed to zero.
        """
        expected = self._by_token(self.seen[post])
        hidden = self._by_token(self.noted["hidden"])
        held = self.maps.mlp_coefficients(self.layer)
        assert held is not None  # it has neurons
        linear = self._by_token(self.maps.capture.activation(self.points.pre_linear or self.points.pre or ""))
        typical = torch.linalg.vector_norm(linear, dim=-1, keepdim=True) / linear.shape[-1] ** 0.5
        argument = typical
        if self.points.pre_linear is None:  # a gate is read by its own function, which rounds alike
            argument = torch.maximum(linear.abs(), typical)
        lost = torch.clamp(self.rounding * argument, min=torch.finfo(typical.dtype).tiny)
        sizes = (self._by_token(held.through).abs() * typical).add_(expected.abs())
        sizes.add_(lost, alpha=1 / self.maps.tolerance)
        errors = (hidden - expected).abs_().div_(sizes)
        errors -= self._lost(lambda other: (self._by_token(other["hidden"]) - hidden).abs() / sizes)
        return _worst(post, "neuron", errors, self.real)

    def _write(self, point: str, name: str, place: Place, factor: float) -> WriteError:
        """What a sublayer writes, relative to its size; what is lost in the stream's own rounding does not count."""
        ours = self.noted[name]
        if ours.shape != self.seen[point].shape:
            return WriteError(point, float("inf"))
        expected = self._by_token(self.seen[point])
        for added in self._shown_additions(point, factor):
            expected = expected - self._by_token(added)
        rounding = self.rounding * self._stream_size
        writes = [self._by_token(write) for write in self._as_shown(ours, place, factor)]
        errors = [self._beyond(write - expected, rounding, expected) for write in writes]
        best = min(range(len(errors)), key=lambda form: float(errors[form].nan_to_num(torch.inf).sum()))

        def off(other: Mapping[str, Tensor]) -> Tensor:
            rounded = list(self._as_shown(other[name], place, factor))[best]
            return self._beyond(self._by_token(rounded) - writes[best], torch.zeros_like(rounding), expected)

        return WriteError(point, _largest(errors[best] - self._lost(off)))

    def _shown_additions(self, point: str, factor: float) -> Iterator[Float[Tensor, "batch pos d"]]:
        """What hooks added to a write: at its own point, and at its module's where the block's factor comes after."""
        place = "attention" if point == self.points.attention_write else "mlp"
        for other, vectors in self.maps.capture.additions.of(self.layer).items():
            if other.name == point:
                yield vectors
            elif other.inside and other.place == place:
                yield vectors * factor

    def _added(self, output: Tensor) -> WriteError:
        """Return the output's error relative to what the block adds; something may stand between hook points and
        stream."""
        before = self._by_token(self.stream)
        after = self._by_token(self.maps.capture.resid_post(self.layer)[:, self.side])
        composed = self._by_token(output[:, self.side])
        rounding = (self._stream_size + after.abs()).mul_(self.rounding)
        errors = self._beyond(composed - after, rounding, after - before)

        def off(other: Mapping[str, Tensor]) -> Tensor:
            rounded = self._by_token(other["output"][:, self.side])
            return self._beyond(rounded - composed, torch.zeros_like(rounding), after - before)

        return WriteError(f"what blocks.{self.layer} adds to the stream", _largest(errors - self._lost(off)))

    def _beyond(
        self, difference: Float[Tensor, "token d"], rounding: Float[Tensor, "token d"], write: Float[Tensor, "token d"]
    ) -> Float[Tensor, "real"]:
        """Return how much of a difference, which is overwritten, is not rounding, relative to each token's write."""
        beyond = self._at_real(difference.abs_().sub_(rounding).clamp_min_(0).norm(dim=-1))
        sizes = self._at_real(write.norm(dim=-1))
        scanned = (self.block.mixer is not None and not self.block.parts.is_mlp_alone) or self.block.has_beside
        if scanned and len(sizes):
            sizes = sizes + sizes.median()  # the terms of a scan may cancel at a token; their rounding does not
        return beyond / _positive(sizes)

    def _as_shown(self, write: Tensor, place: Place, factor: float) -> Iterator[Tensor]:
        """A write in each form that some class shows: plain, before the block's factor, after its norm or the sum's."""
        yield write
        if factor != 1:
            yield write / factor
        if place.after is not None:
            yield self.maps.norm(self.layer, place.after)(write)
        if place.outer is not None:
            yield self.maps.norm(self.layer, place.outer)(self.stream + write)


def _largest(errors: Float[Tensor, "token"]) -> float:
    return float(errors.max()) if len(errors) else 0.0


def _worst(
    point: str, what: str, errors: Float[Tensor, "token unit"], real: Bool[Tensor, "token"] | None = None
) -> WriteError:
    """The unit of largest error; of real tokens, where some are padding."""
    by_token = errors.amax(-1) if errors.numel() else errors.new_zeros(0)
    if real is not None:
        by_token = by_token.where(real, 0.0)
    if not len(by_token):
        return WriteError(point, 0.0)
    token = int(by_token.argmax())
    return WriteError(point, float(by_token[token]), f"{what} {int(errors[token].argmax())}")


def _positive(sizes: Tensor) -> Tensor:
    return sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
