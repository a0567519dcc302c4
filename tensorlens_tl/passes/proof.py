"""Proofs: do the weights, as they are read, reproduce what the model does?

Every block is composed from its weights in each way that its norms allow; the one that reproduces the block's own
output on its own input is its layout. A block that no layout reproduces raises an error with the first component that
differs. A proof may look at a few positions of each prompt instead of all, and also compares what heads, neurons and
sublayers compute and write. Products whose result the model shows are compared without computing them. What follows
the last block is proved the same way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import UnionType
from typing import NamedTuple, TypeGuard

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

from tensorlens_tl.algebra import AffineMap, AnyAttention, Chain, Diagonal, Linear, Tap, on_device, query_chunks
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.algebra.positions import RowPositions
from tensorlens_tl.algebra.progress import note_progress
from tensorlens_tl.errors import NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import ModelPoints, keep_in, observe
from tensorlens_tl.models import BlockView, FrozenRule, Layout, ModelView, Place, Query, candidates
from tensorlens_tl.models.lifecycle import OncePerWeights
from tensorlens_tl.passes.block_maps import BlockMaps, BlockParts, check_loop
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.inputs import Prompt, query_positions

POSITIONS = 8
"""Queries of each prompt at which a sampled proof looks."""


# ------------------------------------------------------------------
# Proofs at a few positions: which ones, and a block's attention there.
#
# A query's output needs what all its keys hold, and of everything else only what happens at the query itself. Values
# are linear, so each head of a sampled query mixes what attention reads before W_V is applied, Σ_j A_qj (x_j W_V) =
# (Σ_j A_qj x_j) W_V: no matrix is applied to every token. Half precision, and queries so many that this would take more
# products, compute the values of every token.


def sampled_positions(mask: Bool[Tensor, "batch pos"], count: int = POSITIONS) -> Int[Tensor, "batch query"]:
    """Return each prompt's last real token and random others, ascending, the same for the same mask; repeats fill
    rows."""
    real = mask.cpu()
    numbers = torch.arange(real.shape[1])
    last = (real * (numbers + 1)).amax(1, keepdim=True).sub(1).clamp_min(0)
    priorities = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~real, -1.0)
    priorities = priorities.scatter(1, last, 2.0)
    priority, drawn = priorities.topk(min(count, int(real.sum(1).amax().clamp_min(1))), dim=1)
    return torch.where(priority < 0, last, drawn).sort(dim=1).values.to(mask.device)


def can_be_sampled(view: ModelView, layer: int) -> bool:
    """True if a block can be evaluated at some positions.

    Not so with whitening and other mixers, which pass on from token to token, in an encoder–decoder, and with shared
    values.
    """
    block = view.blocks[layer]
    if block.reads_embedding:
        return False
    mixes = block.whitening is not None or block.mixer is not None or block.has_beside
    return not view.is_encoder_decoder and not mixes and block.values_layer is None


def attention_at(
    maps: BlockMaps, layer: int, layout: Layout, positions: Int[Tensor, "batch query"]
) -> tuple[Float[Tensor, "batch query width"], Diagonal]:
    """Return what a block's heads gather at some positions, and the map to what attention writes there."""
    x = maps.capture.resid_pre(layer)
    if layout.attn.before is not None:
        x = maps.norm(layer, layout.attn.before)(x)
    values, mixing, out = maps.attention(layer).stages
    assert isinstance(mixing, AnyAttention)
    mixed = _mixed(values, mixing, x, positions)
    # one position per row, as what follows the mixing may hold a factor for each position
    attended = out.at(RowPositions(positions.T))(mixed.transpose(0, 1)[:, :, None])[:, :, 0].transpose(0, 1)
    return mixed, Diagonal(torch.zeros_like(attended), attended)  # a constant: it ignores what it reads


def _mixed(
    values: AffineMap,
    mixing: AnyAttention,
    x: Float[Tensor, "batch key d_model"],
    positions: Int[Tensor, "batch query"],
) -> Float[Tensor, "batch query width"]:
    """What the heads gather at some positions."""
    exact = x.dtype in (torch.float32, torch.float64)
    if not exact or not isinstance(values, Linear) or values.weight.dtype != x.dtype:
        return mixing.at_queries(values(x), positions)
    rows = mixing.rows_at(positions)
    heads = rows.shape[1] * rows.shape[2]
    if 2 * heads > values.weight.shape[1]:
        return mixing.at_queries(values(x), positions)
    read = rows.to(x.dtype).flatten(1, 2) @ x[:, : rows.shape[-1]]
    by_head = rearrange(read, "b (kv group q) d -> kv b (group q) d", kv=mixing.kv_heads, q=rows.shape[2])
    weights = rearrange(values.weight, "d (kv e) -> kv 1 d e", kv=mixing.kv_heads)
    gathered = by_head @ weights
    if values.offset is not None:
        sums = rearrange(rows.sum(-1), "b (kv group) q -> kv b (group q) 1", kv=mixing.kv_heads)
        gathered = gathered + sums * rearrange(values.offset, "(kv e) -> kv 1 1 e", kv=mixing.kv_heads)
    return rearrange(gathered, "kv b (group q) e -> b q (kv group e)", q=rows.shape[2])


# ------------------------------------------------------------------
# What the sublayers of a block hold and write, compared with the model at the hook points that show it.
#
# A block's output is the residual stream plus what its sublayers write to it. Measured against the whole stream, a head
# or a few neurons can go unnoticed: in half precision, or beside one large channel. So the proof of a block also
# compares what each head gathers, what each neuron computes and what each sublayer writes, every one against its own
# size.


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


COLUMNS = 8
"""Random vectors that every difference is projected on."""

SHARE = 0.1
"""The part of the tolerance that an estimate may reach."""


# ------------------------------------------------------------------
# Whole proofs without the products whose result the model shows: these are compared by random projections.
#
# Of a plain block, what attention and MLP write is shown at hook points, and so is what W_O and W_out multiply. Heads
# and neurons are computed at every token, each compared against its own size, and the shown writes have to make up the
# block's output. What remains is h·W + b = w at every token, with h, W and w known. For a Gaussian matrix R of k
# columns, ‖(h·W + b − w)·R‖ / √k estimates the norm of the difference, and h·(W·R) costs k products where h·W costs
# d_model (Freivalds 1977 does so for whole numbers).
#
# This only ever accepts: a block passes here if every comparison is within the tolerance, and every estimate within a
# tenth of it. Any other block is composed and compared in full. A difference above the tolerance is taken for less than
# a tenth of it with the probability that χ² of k = 8 degrees of freedom is below 8/100, which is 1e-7.


class ShownProduct(NamedTuple):
    """A product h·W + b (`out`), and what the model shows of it at a hook point, `[batch, pos, d_model]`."""

    point: str
    out: Linear
    shown: Float[Tensor, "batch pos d_model"]

    def missed(self, reads: Float[Tensor, "batch pos d_in"]) -> Float[Tensor, "batch pos"]:
        """Estimated norms of h·W + b − w."""
        random = _projections(self.shown.shape[-1], self.shown.dtype, self.shown.device)
        projected = linear(random, self.out.weight)  # several times as fast as weight @ random.T
        ours = linear(reads, projected)
        if self.out.offset is not None:
            ours = ours + linear(self.out.offset, random)
        return (ours - linear(self.shown, random)).norm(dim=-1)


@lru_cache(maxsize=16)
def _projections(width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "row width"]:
    """R, its columns as rows: scaled so that projected vectors have the norms of the vectors in the mean of squares."""
    drawn = torch.randn(COLUMNS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn / COLUMNS**0.5).to(device, dtype)


def projected_errors(maps: BlockMaps, layer: int, layout: Layout, seen: Mapping[str, Tensor]) -> BlockErrors | None:
    """Return the errors of a block that is proved by projections, None for one that has to be composed.

    `seen` is what the model showed (`SeenWrites.tensors`), at every position.
    """
    if not _is_plain(maps, layer, layout, seen):
        return None
    parts = maps.parts(layer)
    x = maps.capture.resid_pre(layer)
    points = maps.points.blocks[layer]
    attention = _shown(points.attention_write, parts.attention, seen, x)
    mlp = _shown(points.mlp_write, parts.mlp, seen, x)
    if attention is None or mlp is None or parts.mlp is None:
        return None
    heads = _before(parts.attention)(parts.norms[layout.attn.before or ""](x))
    after_attention = x + attention.shown
    middle = x if layout.parallel else after_attention
    hidden = _before(parts.mlp)(parts.norms[layout.mlp.before or ""](middle))
    output = after_attention + mlp.shown
    compared = {name: tensor for name, tensor in seen.items() if name not in (attention.point, mlp.point)}
    noted = {"heads": heads, "hidden": hidden, "output": output}
    writes = write_errors(maps, layer, layout, compared, noted)
    expected = maps.capture.resid_pre(layer + 1)
    error = relative_error(output, expected, maps.mask)
    for product, reads in ((attention, heads), (mlp, hidden)):
        missed = product.missed(reads)[maps.mask]
        estimate = _largest_share(missed, product.shown[maps.mask])
        if not estimate <= SHARE * maps.tolerance:
            return None
        writes.append(WriteError(product.point, estimate))
        error = error + _largest_share(missed, expected[maps.mask])
    if not max(error, *(write.error for write in writes)) <= maps.tolerance:
        return None
    return BlockErrors(error, writes)


def _is_plain(maps: BlockMaps, layer: int, layout: Layout, seen: Mapping[str, Tensor]) -> bool:
    """True if a block is plain attention and dense MLP in full precision without user hooks, and shows heads and
    neurons."""
    block = maps.view.blocks[layer]
    points = maps.points.blocks[layer]
    capture = maps.capture
    if capture.other_hooks or capture.sides is not None or maps.ends(layer):
        return False
    if block.mixer is not None or block.has_beside or block.whitening is not None or block.per_layer is not None:
        return False
    if points.attention is not None or points.mlp is not None or block.dense_mlp is None:
        return False
    around = (layout.attn.after, layout.attn.outer, layout.mlp.after, layout.mlp.outer, layout.cross)
    before = (layout.attn.before, layout.mlp.before)
    if any(place is not None for place in around) or any(name not in block.norms for name in before):
        return False
    precise = capture.resid_pre(layer).dtype in (torch.float32, torch.float64)
    factors = (block.attention_factor, block.branch_factor)
    return precise and factors == (1, 1) and points.z in seen and points.post in seen


def _shown(point: str | None, sublayer: AffineMap | None, seen: Mapping[str, Tensor], x: Tensor) -> ShownProduct | None:
    """The last product of a sublayer, if it is a matrix and the model shows what it gives."""
    if point is None or point not in seen or not isinstance(sublayer, Chain):
        return None
    out = sublayer.stages[-1]
    shown = seen[point].to(x.device)
    if not isinstance(out, Linear) or shown.shape != x.shape:
        return None
    dtypes = {tensor.dtype for tensor in (x, shown, out.weight, out.offset) if tensor is not None}
    return ShownProduct(point, out, shown) if len(dtypes) == 1 else None


def _before(sublayer: AffineMap) -> Chain:
    """A sublayer without its last product."""
    assert isinstance(sublayer, Chain)
    return Chain(sublayer.stages[:-1])


def _largest_share(missed: Float[Tensor, "token"], whole: Float[Tensor, "token d"]) -> float:
    """The largest of some norms relative to those of vectors; NaN where one is."""
    if not len(missed):
        return 0.0
    return float((missed / whole.norm(dim=-1).clamp_min(torch.finfo(whole.dtype).tiny)).max())


ROUNDINGS = 4
"""How often a block in half precision is composed with other rounding, where that may explain what it misses."""


@dataclass(frozen=True, eq=False)
class Proof:
    """How each block is put together, and how far its map is from the model.

    Attributes:
        layouts: of each block.
        errors: largest relative error of any real token by ``"blocks.0"`` …, ``"blocks.0.writes"`` … (what heads,
            neurons and sublayers hold and write, each against its own size) and ``"head"``.
        positions: where blocks were proved, `[batch, query]`, if the proof was sampled; None for every position.
    """

    layouts: tuple[Layout, ...]
    errors: Mapping[str, float]
    positions: Int[Tensor, "batch query"] | None = None

    @property
    def scope(self) -> str:
        """The positions that blocks were proved at, in words."""
        return scope_of(self.positions)


def scope_of(positions: Int[Tensor, "batch query"] | None) -> str:
    """The positions that a proof looks at, in words."""
    return "every position" if positions is None else "sampled positions of each prompt"


_unambiguous: OncePerWeights[dict[int, Layout]] = OncePerWeights()
# the layouts of blocks where an input excluded all other layouts


def block_error(capture: Capture, layer: int, output: Float[Tensor, "batch pos d_model"]) -> float:
    """Return a map's relative error in place of a block.

    A stream that hooks set to zero is compared with what it was before.
    """
    return relative_error(output, capture.resid_post(layer), capture.mask, capture.additions.of(layer).values())


class LayoutSearch:
    """The search for one block's layout among `candidates`, those with the norms of the block."""

    def __init__(self, maps: BlockMaps, layer: int) -> None:
        block = maps.view.blocks[layer]
        self.maps = maps
        self.layer = layer
        self.candidates = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)

    def expected(self, previous: Layout | None) -> Layout | None:
        """The layout to try first: that of the block before, or the only one that fitted in an earlier pass."""
        if previous in self.candidates:
            return previous
        earlier = self._earlier().get(self.layer)
        return earlier if earlier in self.candidates else None

    def best(self) -> Layout | None:
        """Return the one layout that reproduces the block (a causal block's first tokens), or None; two raise an
        error."""
        start = self.maps.with_capture(self.maps.capture.block_at_start(self.layer))
        errors = self._errors(start, self.candidates, "frozen")
        passing = [option for option in sorted(errors, key=errors.__getitem__) if self._is_small(errors[option])]
        if not passing:
            return None
        if len(passing) == 1:
            self._remember(passing[0])
            return passing[0]
        # Folded norms commute with sublayers that have no bias, and at a single token with attention too. A rule with
        # a constant of its own still shows on which side the norm is; with the other layout it would be wrong.
        tangent = self._errors(start, passing, "frozen-tangent")
        passing = [option for option in passing if self._is_small(tangent[option])] or passing
        rounding = torch.finfo(self.maps.capture.resid_pre(self.layer).dtype).eps
        first, *others = passing
        if not others or errors[others[0]] >= 10 * max(errors[first], rounding):
            return first
        second = others[0]
        if self._same_map(start, first, second):
            return min(first, second, key=self.candidates.index)
        raise UnsupportedModelError(
            f"blocks.{self.layer} of this {self.maps.view.description}: two layouts reproduce it equally well "
            f"({errors[first]:.1e} and {errors[second]:.1e}), so this input cannot tell its structure; freeze a longer "
            "prompt, or in float64."
        )

    def reproducing(self) -> list[Layout]:
        """Every layout that reproduces the block at all tokens, however well another one does."""
        errors = self._errors(self.maps, self.candidates, "frozen")
        return [option for option in self.candidates if self._is_small(errors[option])]

    def _is_small(self, error: float) -> bool:
        return error <= self.maps.tolerance

    def _errors(self, maps: BlockMaps, options: Sequence[Layout], rule: FrozenRule) -> dict[Layout, float]:
        parts = maps.parts(self.layer, rule)
        x = maps.capture.resid_pre(self.layer)
        return {
            option: block_error(maps.capture, self.layer, maps.composed(self.layer, option, parts, rule)(x))
            for option in options
        }

    def _same_map(self, maps: BlockMaps, first: Layout, second: Layout) -> bool:
        """True if two layouts agree on random vectors too (a sublayer that writes nothing): then either is right."""
        x = maps.capture.resid_pre(self.layer)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        output, other_output = (maps.block_map(self.layer, layout=option)(noise) for option in (first, second))
        return relative_error(output, other_output, maps.mask) <= maps.tolerance

    def _earlier(self) -> dict[int, Layout]:
        """The layouts of blocks in earlier passes of the same weights; each is proved on this pass too."""
        capture = self.maps.capture
        if capture.other_hooks:
            return {}
        return _unambiguous.get(capture.model, capture.weights) or {}

    def _remember(self, layout: Layout) -> None:
        capture = self.maps.capture
        if not capture.other_hooks:
            _unambiguous.set(capture.model, capture.weights, self._earlier() | {self.layer: layout})


def prove(
    maps: BlockMaps,
    every_block: bool = True,
    seen: SeenWrites | None = None,
    positions: Int[Tensor, "batch query"] | None = None,
) -> Proof:
    """Find every block's layout and measure its error; raise `UnsupportedModelError` where no layout reproduces it.

    Args:
        every_block: prove each block; else the first of each kind only, and not what follows the last.
        seen: what the model showed of its sublayers, compared as well and dropped block by block.
        positions: compare these only, in blocks that can be evaluated at some positions.
    """
    writes = {} if seen is None else seen.tensors
    layouts: list[Layout] = []
    errors: dict[str, float] = {}
    kinds = set[tuple[object, ...]]()
    for layer in range(len(maps.view.blocks)):
        note_progress("proof of the blocks", layer / len(maps.view.blocks))
        local = maps.at_weights(layer)
        block = local.view.blocks[layer]
        previous = layouts[-1] if layouts else None
        with block.loaded():
            kind = _kind(block)
            proof = _BlockProof(local, layer, on_device(positions, local.mask.device), writes)
            if previous is not None and not every_block and kind in kinds and previous in proof.search.candidates:
                layouts.append(previous)
                continue
            layout, measured = proof.find(previous)
            if block.brought:
                _ = block.widest  # read while the weights are loaded, and cached: it decides how rows are cut
        kinds.add(kind)
        layouts.append(layout)
        errors[f"blocks.{layer}"] = measured.output
        if measured.writes:
            errors[f"blocks.{layer}.writes"] = max(write.error for write in measured.writes)
        for name in maps.points.blocks[layer].proved:
            writes.pop(name, None)
    note_progress("proof of the blocks", 1.0)
    if every_block:
        errors |= _prove_head(maps)
    errors |= check_loop(maps.capture, maps.tolerance)
    return Proof(tuple(layouts), errors, positions)


def _kind(block: BlockView) -> tuple[object, ...]:
    """What blocks of one kind share."""
    hooked = block.mixer is None and block.attention.hooked
    return frozenset(block.norms), type(block.mlp), block.mixer is None, not block.has_beside, hooked


def _prove_head(maps: BlockMaps) -> dict[str, float]:
    """Return the error of what precedes the unembedding, if anything; raise if it is no norm or head as read from
    weights."""
    capture = maps.capture
    after = [part for part in (maps.final_map(), maps.prediction_head()) if part is not None]
    predicts = maps.points.unembed_in is not None
    if not after and not predicts:
        return {}
    expected = capture.unembedded() if predicts else capture.output
    error = relative_error(Chain(tuple(after))(capture.resid_pre(capture.n_layers)), expected, capture.mask)
    if not error <= maps.tolerance:
        raise UnsupportedModelError(
            f"what stands between the last block and the unembedding of this {maps.view.description} is not a "
            f"norm or prediction head as we read it: relative error {error:.1e}, allowed {maps.tolerance:.0e}."
        )
    return {"head": error}


class _BlockProof:
    """One block beside what the model did there."""

    def __init__(
        self,
        maps: BlockMaps,
        layer: int,
        positions: Int[Tensor, "batch query"] | None,
        seen: Mapping[str, Tensor],
    ) -> None:
        self.maps = maps
        self.layer = layer
        self.positions = positions if can_be_sampled(maps.view, layer) else None
        self.seen = seen
        self.search = LayoutSearch(maps, layer)

    def find(self, previous: Layout | None) -> tuple[Layout, BlockErrors]:
        """Return the block's layout and errors; raise where no layout reproduces it, or a part is not what its
        weights give."""
        # blocks of a model mostly share one layout
        for suggest in (partial(self.search.expected, previous), self.search.best):
            layout = suggest()
            if layout is None:
                continue
            errors = self.errors(layout)
            if not errors.output <= self.maps.tolerance:
                continue
            write = errors.first_above(self.maps.tolerance)
            if write is not None:
                raise UnsupportedModelError(self._refusal_of_write(write, errors.output))
            return layout, errors
        raise UnsupportedModelError(self._refusal())

    def errors(self, layout: Layout) -> BlockErrors:
        """What a proof measures of the block, at every position or at some."""
        maps = self.maps
        if self.positions is None:
            measured = projected_errors(maps, self.layer, layout, self.seen)
            if measured is not None:
                return measured
        measured = self._compared(layout, self._noted(maps, layout))
        narrow = upcast(maps.capture.resid_pre(self.layer)).dtype != maps.capture.resid_pre(self.layer).dtype
        if not narrow or max(measured.output, *(write.error for write in measured.writes), 0.0) <= maps.tolerance:
            return measured
        return self._errors_beyond_rounding(layout)

    def _errors_beyond_rounding(self, layout: Layout) -> BlockErrors:
        """Return the errors in half precision, where its rounding alone may exceed the tolerance.

        The block is composed in float32 from half-precision activations, so only the model's rounding is between the
        two. Its size is measured by composing again with inputs, heads, neurons and sublayers moved by half a unit of
        rounding.
        """
        eps = torch.finfo(self.maps.capture.resid_pre(self.layer).dtype).eps
        wide = self.maps.with_capture(self.maps.capture.in_float32(self.layer))
        exact = self._noted(wide, layout)
        generator = torch.Generator().manual_seed(0)

        def moved(x: Tensor) -> Tensor:
            signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
            return 1 + eps / 2 * signs

        reads = exact["output"]
        rounded = [
            self._noted(wide, layout, {"reads": moved(reads)} | {name: moved(x) for name, x in exact.items()})
            for _ in range(ROUNDINGS)
        ]
        return self._compared(layout, exact, rounded)

    def _noted(self, maps: BlockMaps, layout: Layout, factors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return what the block's map computes on its way (`tapped`), its ``"output"`` included.

        `factors` multiply what the block reads (``"reads"``), and what it computes on its way.
        """
        factors = factors or {}
        noted: dict[str, Tensor] = {}
        if self.positions is None:
            parts = maps.parts(self.layer)
        else:
            noted["heads"], attention = attention_at(maps, self.layer, layout, self.positions)
            maps = maps.with_capture(maps.capture.block_at(self.layer, self.positions))
            norms = {name: maps.norm(self.layer, name) for name in maps.view.blocks[self.layer].norms}
            parts = BlockParts(attention, maps.mlp(self.layer), norms)
        block = maps.composed(self.layer, layout, tapped(parts, noted, factors))
        reads = maps.capture.resid_pre(self.layer)
        if "reads" in factors:
            reads = reads * factors["reads"]
        noted["output"] = block(reads)
        return noted

    def _compared(
        self, layout: Layout, noted: Mapping[str, Tensor], rounded: Sequence[Mapping[str, Tensor]] = ()
    ) -> BlockErrors:
        """What the block's map computes beside what the model did."""
        maps = self.maps
        if self.positions is not None:
            maps = maps.with_capture(maps.capture.block_at(self.layer, self.positions))
        error = block_error(maps.capture, self.layer, noted["output"])
        return BlockErrors(error, write_errors(maps, self.layer, layout, self.seen, noted, rounded))

    def _refusal(self) -> str:
        maps = self.maps
        block = maps.view.blocks[self.layer]
        start = f"blocks.{self.layer} of this {maps.view.description} cannot be frozen: "
        if not self.search.candidates:
            return start + f"no known layout has its norms ({', '.join(block.norms) or 'none'})."
        if not self.seen:
            self.seen = self._writes_again()
        errors = {layout: self.errors(layout) for layout in self.search.candidates}
        best = min(errors.values(), key=lambda error: error.output)
        tried = ", ".join(f"{layout.name} {error.output:.1e}" for layout, error in errors.items())
        where = "" if self.positions is None else f" at {scope_of(self.positions)}"
        first = best.first_above(maps.tolerance)
        part = (
            "Attention and MLP agree where they can be seen; the difference is in the norms or in "
            f"blocks.{self.layer}.mlp."
        )
        if first is not None:
            part = f"The first part that differs is {_named(first)}."
        return (
            start + f"composed from its weights it misses its own output{where} (relative error: {tried}; allowed "
            f"{maps.tolerance:.0e}). {part} {self._explanation()}"
        )

    def _refusal_of_write(self, write: WriteError, output: float) -> str:
        name = ".".join(write.point.split(".")[:2])
        return (
            f"{name} of this {self.maps.view.description} cannot be frozen: its output is reproduced to {output:.1e} "
            f"of the whole stream, but {_named(write)} is not what its weights give (allowed {self.maps.tolerance:.0e} "
            f"of its own size). {self._explanation()}"
        )

    def _explanation(self) -> str:
        additions = self.maps.capture.additions
        dependent = [point.name for point in additions.dependent if point.layer == self.layer]
        constant = [point.name for point in additions.of(self.layer)]
        if dependent:
            return (
                f"A hook at {' and '.join(dependent)} adds something that depends on what it reads, as a factor or a "
                "projection does; only what is the same whatever the model computes there can be held: vectors that "
                "are added (steering), or values that take its place (a patch). Take it off, or make the change in the "
                "weights."
            )
        patched = [point.name for point in additions.patched if point.layer == self.layer]
        if patched:
            return (
                f"A hook at {' and '.join(patched)} puts values in the place of what the model computes, and this "
                "block does not take them in where the point lies in others. Patch the stream itself, at "
                "hook_resid_pre or hook_resid_post."
            )
        if constant:
            return (
                f"A hook at {' and '.join(constant)} adds a vector, and this block does not take it in at the place "
                "that the point has in others. Add it to the stream itself, at hook_resid_pre or hook_resid_post."
            )
        if self.maps.view.wrapped_twice:
            return "This Hugging Face model was wrapped by a Bridge before: load it again, and wrap it once."
        inside = self.maps.capture.hooks_in(self.maps.view.blocks[self.layer].name)
        if inside:
            return (
                f"A hook at {' and '.join(inside)} may have changed what the block computes inside, which is not held: "
                "only what is added to the stream, or put in its place, is. Take it off, or make the change in the "
                "weights."
            )
        wrapped = getattr(self.maps.capture.model, "original_model", None)
        clip = getattr(getattr(wrapped, "config", None), "clip_qkv", None)
        if clip is not None:
            return (
                f"Its configuration clips queries, keys and values (clip_qkv={clip}), and a number that is clipped is "
                "not what the weights give. Prompts on which nothing is clipped can be frozen."
            )
        return (
            "Other hooks on the model (model.reset_hooks() takes them off), or a part that is not attention, norm or "
            "MLP, would explain it."
        )

    def _writes_again(self) -> dict[str, Tensor]:
        """What the block's sublayers write, by one more run of the model, where the pass did not look at it."""
        capture = self.maps.capture
        names = capture.points.blocks[self.layer].proved
        seen = SeenWrites.of(capture.view, capture.points, len(capture.tokens), self.positions, "model")
        observe(capture.model, capture.inputs, names, seen.see, optional=names)
        return seen.tensors


def _named(write: WriteError) -> str:
    """A hook point that differs, and by how much."""
    unit = f"{write.unit}: " if write.unit else ""
    return f"{write.point} ({unit}{write.error:.1e})"


# ------------------------------------------------------------------
# What one attention pattern shows of padding and of the direction in which a layer looks.


def looks_ahead(pattern: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch query"]) -> bool:
    """True if a real query has weight on later tokens."""
    keys = torch.arange(pattern.shape[-1], device=pattern.device)
    return any(
        bool(((pattern[:, :, at] != 0) & (keys > queries[:, None]) & mask[:, None, at, None]).any())
        for at, queries in _some_queries(pattern)
    )


def check_pattern(
    name: str,
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    keys: Bool[Tensor, "batch key"],
) -> None:
    """Raise for padding in one pattern that the model does not handle: NaN at real queries, or weight on padded
    keys."""
    if bool(torch.isnan(pattern.sum())) and bool(torch.isnan(pattern).any()):
        raise NumericalError(
            f"NaN at {name}, in a padded batch: this model does not handle a query all of whose keys are "
            "padding or outside its window (left padding on several bridges, short prompts beside ones longer than "
            "a sliding window). Pad on the right, or freeze the prompts one by one."
        )
    padded = ~keys
    columns = padded.any(0).nonzero()[:, 0]
    if not len(columns):
        return
    # the keys between the first padding and the last: with prompts of similar length these are few
    within = slice(int(columns[0]), int(columns[-1]) + 1)
    reads = pattern[..., within]
    padded = padded[:, within]
    if any(
        bool(((reads[:, :, at] != 0) & queries[:, None, at, None] & padded[:, None, None, :]).any())
        for at, _ in _some_queries(reads)
    ):
        raise UnsupportedModelError(
            f"{name} puts weight on padded tokens: this model ignores the attention mask (a bidirectional "
            "HookedTransformer does). Freeze the prompts one by one."
        )


def _some_queries(pattern: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the queries and their positions, so that no other tensor of the whole pattern's size is allocated."""
    positions = torch.arange(pattern.shape[2], device=pattern.device)
    per_query = pattern[:, :, :1].numel() * pattern.element_size()
    return ((at, positions[at]) for at in query_chunks(pattern.shape[2], per_query))


# ------------------------------------------------------------------
# Whether the model's logits are ``cap(W_U·x + b_U)``: compared at every position that a result is about.


class LogitsCheck:
    """The positions whose logits were compared with the model's own; a cache that grows with the positions of results.

    Attributes:
        error: the largest ``max abs(ours − logits) / max abs(logits)`` so far; None before any comparison.
        compared: True where logits were compared, or will be when the error is first read.
        postponed: the model's logits that are compared then, and where; None after that.
    """

    def __init__(self, mask: Bool[Tensor, "batch pos"]) -> None:
        self.error: float | None = None
        self.compared = torch.zeros_like(mask)
        self.postponed: tuple[object, Int[Tensor, "batch query"]] | None = None

    def covers(self, positions: Int[Tensor, "batch query"]) -> bool:
        """True if every one of some positions was compared."""
        return bool(torch.take_along_dim(self.compared, positions, dim=1).all())

    def add(self, error: float, positions: Int[Tensor, "batch query"]) -> None:
        """Note what a comparison at some positions measured."""
        self.compared = self.compared.scatter(1, positions, True)
        self.error = max(error, self.error or 0.0)

    def postpone(self, logits: object, positions: Int[Tensor, "batch query"]) -> None:
        """Hold the model's logits at some positions until somebody reads their error: it reads all of W_U."""
        self.compared = self.compared.scatter(1, positions, True)
        self.postponed = logits, positions

    def held(self, positions: Int[Tensor, "batch query"]) -> Float[Tensor, "batch query d_vocab"] | None:
        """The model's logits at some positions, while they are held; None otherwise."""
        if self.postponed is None:
            return None
        logits, places = self.postponed
        matches = places[:, :, None] == positions[:, None].to(places.device)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or not bool(matches.any(1).all()):
            return None
        return torch.take_along_dim(logits, matches.int().argmax(1)[..., None].to(logits.device), dim=1)

    def catch_up(self, capture: Capture, states: Tensor) -> None:
        """Compare what was postponed with the weights' logits of the model's last states."""
        if self.postponed is None:
            return
        logits, positions = self.postponed
        self.postponed = None
        self.add(logits_error(capture, states, logits, positions), positions)


def compared_positions(view: ModelView, prompt: Prompt, query: Query | None = None) -> Int[Tensor, "batch compared"]:
    """Return the positions whose logits are compared while freezing; some may repeat.

    They are each prompt's last real token, those of `query`, and in a masked language model the first and every mask.
    """
    last = query_positions(prompt, -1)
    columns = [last]
    if query is not None:
        columns.append(query_positions(prompt, query).to(last.device))
        prompt.in_logits(columns[-1])
    mask_id = getattr(view.tokenizer, "mask_token_id", None)
    if view.mlm_head is not None:
        columns.append(query_positions(prompt, 0))
    if view.mlm_head is not None and mask_id is not None:
        masks = prompt.tokens == mask_id
        numbers = torch.arange(masks.shape[1], device=masks.device)
        places = torch.where(masks, numbers, last)  # a prompt with fewer masks has its last token several times
        columns.append(places[:, masks.any(0)])
    return torch.cat(columns, dim=1)


def logits_error(capture: Capture, states: Tensor, logits: object, positions: Int[Tensor, "batch query"]) -> float:
    """Return the largest ``max abs(ours − logits) / max abs(logits)`` of real tokens, ours from weights and last
    states.

    `logits` are the model's, `[batch, query, d_vocab]`; any other shape has an infinite error.
    """
    ours = capture.view.logits(torch.take_along_dim(states, positions[..., None], dim=1))
    if not isinstance(logits, Tensor) or logits.shape != ours.shape:
        return float("inf")
    expected = logits.to(ours)
    scale = expected.abs().amax(-1).clamp_min(torch.finfo(expected.dtype).tiny)
    real = torch.take_along_dim(capture.mask, positions, dim=1)
    errors = ((ours - expected).abs().amax(-1) / scale)[real]
    return float(errors.max()) if errors.numel() else 0.0
