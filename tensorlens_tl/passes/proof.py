"""Verification: do the weights, as they were read, reproduce what the model computes?

Every block is composed from its weights in each way that its norms allow; the one that reproduces the block's output
from its input is its layout. If none does, an error names the first component that differs. A proof may use a few
positions of each prompt instead of all, and also compares heads, neurons and the outputs of sublayers. Products with a
hook point for their result are verified without computing them. The maps after the last block are verified in the same
way.
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
from tensorlens_tl.passes.block_maps import BlockMaps, PartMaps, check_loop
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.inputs import Prompt, query_positions

POSITIONS = 8
"""The number of queries of each prompt in a sampled proof."""
SAMPLED = "sampled positions of each prompt"


# ------------------------------------------------------------------
# Proofs at a few positions: their choice, and a block's attention there.
#
# A query's output depends on the values at all its keys, and otherwise only on the query's own position. Values are
# linear, so each head of a sampled query mixes the input of attention before W_V is applied, Σ_j A_qj (x_j W_V) =
# (Σ_j A_qj x_j) W_V: no matrix is applied to every token. In half precision, or with so many queries that this takes
# more products, the values of every token are computed.


def sampled_positions(mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch query"]:
    """Return each prompt's last real token and random others, ascending, fixed by the mask; repeats fill rows."""
    real = mask.cpu()
    numbers = torch.arange(real.shape[1])
    last = (real * (numbers + 1)).amax(1, keepdim=True).sub(1).clamp_min(0)
    priorities = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~real, -1.0)
    priorities = priorities.scatter(1, last, 2.0)
    priority, drawn = priorities.topk(min(POSITIONS, int(real.sum(1).amax().clamp_min(1))), dim=1)
    return torch.where(priority < 0, last, drawn).sort(dim=1).values.to(mask.device)


def can_be_sampled(view: ModelView, layer: int) -> bool:
    """Return whether a block can be evaluated at some positions only.

    It cannot with whitening and other mixers, which carry a state from token to token, in an encoder–decoder, and with
    shared values.
    """
    block = view.blocks[layer]
    if block.reads_embedding:
        return False
    mixes = block.whitening is not None or block.mixer is not None or block.has_beside
    return not view.is_encoder_decoder and not mixes and block.values_layer is None


def attention_at(
    maps: BlockMaps, layer: int, layout: Layout, positions: Int[Tensor, "batch query"]
) -> tuple[Float[Tensor, "batch query width"], Diagonal]:
    """Return the mixed values of a block's heads at some positions, and the map to attention's output there."""
    x = maps.capture.resid_pre(layer)
    if layout.attn.before is not None:
        x = maps.norm(layer, layout.attn.before)(x)
    values, mixing, out = maps.attention(layer).stages
    assert isinstance(mixing, AnyAttention)
    mixed = _mixed(values, mixing, x, positions)
    # one position per row, as the maps after the mixing may have a factor for each position
    attended = out.at(RowPositions(positions.T))(mixed.transpose(0, 1)[:, :, None])[:, :, 0].transpose(0, 1)
    return mixed, Diagonal(torch.zeros_like(attended), attended)  # a constant: it ignores its input


def _mixed(
    values: AffineMap,
    mixing: AnyAttention,
    x: Float[Tensor, "batch key d_model"],
    positions: Int[Tensor, "batch query"],
) -> Float[Tensor, "batch query width"]:
    """Return the mixed values of the heads at some positions."""
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
# The heads, neurons and outputs of a block's sublayers, compared with the model at hook points.
#
# A block's output is the residual stream plus the outputs of its sublayers. Relative to the whole stream, errors in a
# head or a few neurons can go unnoticed, in half precision or next to one large channel. So the proof of a block also
# compares each head's mixed values, each neuron and each sublayer's output, relative to their own size.


@dataclass
class SeenWrites:
    """The model's activations at `ModelPoints.proved`, stored until their blocks are verified.

    Attributes:
        at: the positions `[batch, query]` for points of blocks that are verified at some positions only.
        store: ``"cpu"`` moves them to the CPU's memory.
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
        """Prepare to store activations for a full proof, or at some `positions` of the blocks that can be sampled."""
        at: dict[str, Tensor] = {}
        if positions is not None:
            for layer, block in enumerate(points.blocks):
                if can_be_sampled(view, layer):
                    at |= dict.fromkeys(block.proved, positions)
        return cls(frozenset(points.proved), batch, at, store)

    def see(self, name: str, activation: Tensor) -> None:
        """Store the activation at one hook point."""
        by_token = activation.reshape(self.batch, -1, _width(activation))
        if name in self.at:
            positions = self.at[name].to(by_token.device)
            by_token = by_token[torch.arange(self.batch, device=positions.device)[:, None], positions]
        keep_in(self.tensors, self.store, name, by_token)


def _width(activation: Tensor) -> int:
    """Return the numbers per token: the axes after batch and position, which some classes flatten into one."""
    if activation.ndim == 2:
        return activation.shape[-1]
    return activation[0, 0].numel()


class WriteError(NamedTuple):
    """The difference of one hook point from the map, and its unit with the largest difference."""

    point: str
    error: float
    unit: str = ""


class BlockErrors(NamedTuple):
    """The errors of a block's map: at the block's output, and at hook points inside."""

    output: float
    writes: list[WriteError]

    def first_above(self, tolerance: float) -> WriteError | None:
        """Return the first hook point, in the order of the pass, with an error above the tolerance."""
        return next((write for write in self.writes if not write.error <= tolerance), None)


def tapped(parts: PartMaps, seen: dict[str, Tensor], factors: Mapping[str, Tensor]) -> PartMaps:
    """Return a block's parts with taps that record intermediate results in `seen`, after multiplying by `factors`.

    ``"heads"``, ``"hidden"`` and ``"crossing"`` are inside heads, the MLP and cross-attention, ``"attention"`` and
    ``"mlp"`` at the outputs of sublayers.
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
    """Return a sublayer with taps after its first stage of the given kind, if there is one, and at its end."""
    stages = list(sublayer.stages) if isinstance(sublayer, Chain) else [sublayer]
    matches = [number for number, stage in enumerate(stages) if isinstance(stage, kind)]
    if matches and matches[0] < len(stages) - 1:
        stages.insert(matches[0] + 1, inside)
    return Chain((*stages, end))


class _Comparison:
    """The comparison of one block's hook points with the results of its map.

    `seen` has the model's activations, `noted` the map's; the difference of `rounded` from `noted` is not counted.
    """

    def __init__(
        self,
        maps: BlockMaps,
        layer: int,
        layout: Layout,
        seen: Mapping[str, Tensor],
        noted: Mapping[str, Tensor],
        rounded: Sequence[Mapping[str, Tensor]] = (),
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
        """Yield the errors in the order of the pass."""
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
        """The map's results if self- and cross-attention have a joint output."""
        crossing = noted["crossing"][:, self.side]
        written = noted["attention"] + crossing @ self.block.attention.W_O
        return {**noted, "heads": noted["heads"] + crossing, "attention": written}

    def _is_shown(self, point: str | None) -> TypeGuard[str]:
        return point in self.seen

    def _by_token(self, x: Float[Tensor, "batch pos *d"]) -> Float[Tensor, "token *d"]:
        """The vectors of all tokens, in float32 at least; padding is only removed from the resulting errors."""
        return upcast(x.to(self.stream.device).flatten(0, 1))

    def _at_real(self, numbers: Float[Tensor, "token *unit"]) -> Float[Tensor, "real *unit"]:
        """The numbers of real tokens."""
        return numbers if self.real is None else numbers[self.real]

    @cached_property
    def _stream_size(self) -> Float[Tensor, "token d"]:
        """The size of every number of the block's input stream."""
        return self._by_token(self.stream).abs()

    def _lost(
        self, sizes: Callable[[Mapping[str, Tensor]], Float[Tensor, "token *unit"]]
    ) -> Float[Tensor, "token *unit"] | float:
        """The part of an error due to rounding: twice the deviation, `sizes`, of results with different rounding.

        At most the tolerance: a value that is zero only in the model, or only in the map, is an error in any case.
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
        """The error of each head's output, which is shown before the block's factor (3.9, Falcon-H1) or after it."""
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

        The rounding of a pre-activation is that of a typical one, times the ratio. An activation's rounding may be
        relative to its argument, however small its value (tanh-GELU adds 1 to a number near −1). Subnormal numbers may
        be flushed to zero.
        """
        expected = self._by_token(self.seen[post])
        hidden = self._by_token(self.noted["hidden"])
        held = self.maps.mlp_coefficients(self.layer)
        assert held is not None  # there are neurons
        linear = self._by_token(self.maps.capture.activation(self.points.pre_linear or self.points.pre or ""))
        typical = torch.linalg.vector_norm(linear, dim=-1, keepdim=True) / linear.shape[-1] ** 0.5
        argument = typical
        if self.points.pre_linear is None:  # a gate is computed by the same function, with equal rounding
            argument = torch.maximum(linear.abs(), typical)
        lost = torch.clamp(self.rounding * argument, min=torch.finfo(typical.dtype).tiny)
        sizes = (self._by_token(held.through).abs() * typical).add_(expected.abs())
        sizes.add_(lost, alpha=1 / self.maps.tolerance)
        errors = (hidden - expected).abs_().div_(sizes)
        errors -= self._lost(lambda other: (self._by_token(other["hidden"]) - hidden).abs() / sizes)
        return _worst(post, "neuron", errors, self.real)

    def _write(self, point: str, name: str, place: Place, factor: float) -> WriteError:
        """The error of a sublayer's output, relative to its size, without what is lost in the stream's own rounding."""
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
        """Additions by hooks to an output: at its own point, and at its module's if the block's factor comes after."""
        place = "attention" if point == self.points.attention_write else "mlp"
        for other, vectors in self.maps.capture.additions.of(self.layer).items():
            if other.name == point:
                yield vectors
            elif other.inside and other.place == place:
                yield vectors * factor

    def _added(self, output: Tensor) -> WriteError:
        """The output's error relative to what the block adds; there may be maps between hook points and stream."""
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
        """The part of a difference, which is overwritten, that is not rounding, relative to each token's output."""
        beyond = self._at_real(difference.abs_().sub_(rounding).clamp_min_(0).norm(dim=-1))
        sizes = self._at_real(write.norm(dim=-1))
        scanned = (self.block.mixer is not None and not self.block.parts.is_mlp_alone) or self.block.has_beside
        if scanned and len(sizes):
            sizes = sizes + sizes.median()  # terms of a scan may cancel at a token, but not their rounding
        return beyond / _positive(sizes)

    def _as_shown(self, write: Tensor, place: Place, factor: float) -> Iterator[Tensor]:
        """An output in each form that classes show: plain, before the block's factor, after its norm or the sum's."""
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
    """Return the unit with the largest error, among real tokens if there is padding."""
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
"""The number of random vectors that every difference is projected onto."""

SHARE = 0.1
"""The share of the tolerance that an estimate may reach."""


# ------------------------------------------------------------------
# Full proofs by random projections, without the products whose result the model shows.
#
# In a plain block, hook points show the outputs of attention and MLP, and the inputs of W_O and W_out. Heads and
# neurons are computed at every token and compared relative to their own size, and the shown outputs must add up to the
# block's output. It remains to check h·W + b = w at every token, with h, W and w known. For a Gaussian matrix R with k
# columns, ‖(h·W + b − w)·R‖ / √k estimates the norm of the difference, and h·(W·R) costs k products instead of d_model
# (Freivalds 1977 does this for integers).
#
# This test only accepts: a block passes if every comparison is within the tolerance, and every estimate within a tenth
# of it. Any other block is composed and compared in full. The probability that a difference above the tolerance is
# estimated at less than a tenth is that of χ² with k = 8 degrees of freedom being below 8/100, which is 1e-7.


class ShownProduct(NamedTuple):
    """A product h·W + b (`out`), and the model's result at a hook point, `[batch, pos, d_model]`."""

    point: str
    out: Linear
    shown: Float[Tensor, "batch pos d_model"]

    def missed(self, reads: Float[Tensor, "batch pos d_in"]) -> Float[Tensor, "batch pos"]:
        """Return estimated norms of h·W + b − w."""
        random = _projections(self.shown.shape[-1], self.shown.dtype, self.shown.device)
        projected = linear(random, self.out.weight)  # several times as fast as weight @ random.T
        ours = linear(reads, projected)
        if self.out.offset is not None:
            ours = ours + linear(self.out.offset, random)
        return (ours - linear(self.shown, random)).norm(dim=-1)


@lru_cache(maxsize=16)
def _projections(width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "row width"]:
    """Return Rᵀ, scaled so that projection preserves the mean square of norms."""
    drawn = torch.randn(COLUMNS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn / COLUMNS**0.5).to(device, dtype)


def projected_errors(maps: BlockMaps, layer: int, layout: Layout, seen: Mapping[str, Tensor]) -> BlockErrors | None:
    """Return the errors of a block that is verified by projections, None for one that has to be composed.

    `seen` has the model's activations (`SeenWrites.tensors`), at every position.
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
    writes = list(_Comparison(maps, layer, layout, compared, noted).errors())
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
    """Return whether a block is plain attention and dense MLP in full precision, without user hooks, fully shown."""
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
    """Return the last product of a sublayer, if it is a matrix and the model shows its result."""
    if point is None or point not in seen or not isinstance(sublayer, Chain):
        return None
    out = sublayer.stages[-1]
    shown = seen[point].to(x.device)
    if not isinstance(out, Linear) or shown.shape != x.shape:
        return None
    dtypes = {tensor.dtype for tensor in (x, shown, out.weight, out.offset) if tensor is not None}
    return ShownProduct(point, out, shown) if len(dtypes) == 1 else None


def _before(sublayer: AffineMap) -> Chain:
    """Return a sublayer without its last product."""
    assert isinstance(sublayer, Chain)
    return Chain(sublayer.stages[:-1])


def _largest_share(missed: Float[Tensor, "token"], whole: Float[Tensor, "token d"]) -> float:
    """Return the largest of some norms relative to those of vectors; NaN if one is NaN."""
    if not len(missed):
        return 0.0
    return float((missed / whole.norm(dim=-1).clamp_min(torch.finfo(whole.dtype).tiny)).max())


ROUNDINGS = 4
"""How often a half-precision block is composed with different rounding, if that may explain its error."""


@dataclass(frozen=True, eq=False)
class Proof:
    """The layout of each block, and the error of its map.

    Attributes:
        layouts: the layout of each block.
        errors: the largest relative error of any real token by ``"blocks.0"`` …, ``"blocks.0.writes"`` … (heads,
            neurons and outputs of sublayers, relative to their own size) and ``"head"``.
        positions: the positions of a sampled proof, `[batch, query]`; None for every position.
    """

    layouts: tuple[Layout, ...]
    errors: Mapping[str, float]
    positions: Int[Tensor, "batch query"] | None = None

    @property
    def scope(self) -> str:
        """The positions at which blocks were verified, in words."""
        return "every position" if self.positions is None else SAMPLED


_unambiguous: OncePerWeights[dict[int, Layout]] = OncePerWeights()
# the layouts of blocks where an input excluded all other layouts


def block_error(capture: Capture, layer: int, output: Float[Tensor, "batch pos d_model"]) -> float:
    """Return the relative error of a map's output for a block.

    If hooks set the stream to zero, the error is relative to the stream before that.
    """
    return relative_error(output, capture.resid_post(layer), capture.mask, capture.additions.of(layer).values())


class LayoutSearch:
    """The search for one block's layout among `candidates`, the layouts with the block's norms."""

    def __init__(self, maps: BlockMaps, layer: int) -> None:
        block = maps.view.blocks[layer]
        self.maps = maps
        self.layer = layer
        self.candidates = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)

    def expected(self, previous: Layout | None) -> Layout | None:
        """Return the layout to try first: that of the previous block, or the only one that fits in an earlier pass."""
        if previous in self.candidates:
            return previous
        earlier = self._earlier().get(self.layer)
        return earlier if earlier in self.candidates else None

    def best(self) -> Layout | None:
        """Return the one layout that reproduces the block (a causal block's first tokens), or None; raise for two."""
        start = self.maps.with_capture(self.maps.capture.block_at_start(self.layer))
        errors = self._errors(start, self.candidates, "frozen")
        tolerance = self.maps.tolerance
        passing = [option for option in sorted(errors, key=errors.__getitem__) if errors[option] <= tolerance]
        if not passing:
            return None
        if len(passing) == 1:
            self._remember(passing[0])
            return passing[0]
        # Folded norms commute with sublayers without bias, and at a single token also with attention. A rule with its
        # own constant still shows on which side the norm is; with the other layout it would be wrong.
        tangent = self._errors(start, passing, "frozen-tangent")
        passing = [option for option in passing if tangent[option] <= tolerance] or passing
        rounding = torch.finfo(self.maps.capture.resid_pre(self.layer).dtype).eps
        first, *others = passing
        if not others or errors[others[0]] >= 10 * max(errors[first], rounding):
            return first
        second = others[0]
        if self._same_map(start, first, second):
            return min(first, second, key=self.candidates.index)
        raise UnsupportedModelError(
            f"blocks.{self.layer} of this {self.maps.view.description}: two layouts reproduce it equally well "
            f"({errors[first]:.1e} and {errors[second]:.1e}), so this input does not determine its structure; freeze a "
            "longer prompt, or use float64."
        )

    def reproducing(self) -> list[Layout]:
        """Return every layout that reproduces the block at all tokens."""
        errors = self._errors(self.maps, self.candidates, "frozen")
        return [option for option in self.candidates if errors[option] <= self.maps.tolerance]

    def _errors(self, maps: BlockMaps, options: Sequence[Layout], rule: FrozenRule) -> dict[Layout, float]:
        parts = maps.parts(self.layer, rule)
        x = maps.capture.resid_pre(self.layer)
        return {
            option: block_error(maps.capture, self.layer, maps.composed(self.layer, option, parts, rule)(x))
            for option in options
        }

    def _same_map(self, maps: BlockMaps, first: Layout, second: Layout) -> bool:
        """Whether two layouts also agree on random vectors (a sublayer with zero output): then either is right."""
        x = maps.capture.resid_pre(self.layer)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        output, other_output = (maps.block_map(self.layer, layout=option)(noise) for option in (first, second))
        return relative_error(output, other_output, maps.mask) <= maps.tolerance

    def _earlier(self) -> dict[int, Layout]:
        """The layouts of blocks in earlier passes with the same weights; each is verified on this pass too."""
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
    """Find every block's layout and measure its error; raise `UnsupportedModelError` if no layout reproduces it.

    Args:
        every_block: verify every block; otherwise only the first of each kind, and nothing after the last block.
        seen: the model's activations in sublayers, compared as well and dropped block by block.
        positions: compare only these, in blocks that can be evaluated at some positions.
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
                _ = block.widest  # cached while the weights are loaded; it determines chunk sizes
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
    """Return the properties that blocks of one kind share."""
    hooked = block.mixer is None and block.attention.hooked
    return frozenset(block.norms), type(block.mlp), block.mixer is None, not block.has_beside, hooked


def _prove_head(maps: BlockMaps) -> dict[str, float]:
    """Return the error of the norm or head before the unembedding, if any; raise if the weights do not give it."""
    capture = maps.capture
    after = [part for part in (maps.final_map(), maps.prediction_head()) if part is not None]
    predicts = maps.points.unembed_in is not None
    if not after and not predicts:
        return {}
    expected = capture.unembedded() if predicts else capture.output
    error = relative_error(Chain(tuple(after))(capture.resid_pre(capture.n_layers)), expected, capture.mask)
    if not error <= maps.tolerance:
        raise UnsupportedModelError(
            f"the part between the last block and the unembedding of this {maps.view.description} is not the norm or "
            f"prediction head read from its weights: relative error {error:.1e}, allowed {maps.tolerance:.0e}."
        )
    return {"head": error}


class _BlockProof:
    """The verification of one block against the model."""

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
        """Return the block's layout and errors; raise if no layout, or not every part, agrees with the weights."""
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
        """Return the errors of the block, at every position or at some."""
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
        """The errors in half precision, whose rounding alone may exceed the tolerance.

        The block is composed in float32 from half-precision activations, so the two differ only by the model's
        rounding. Its size is measured by composing again with inputs, heads, neurons and sublayers changed by half a
        unit of rounding.
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
        """The intermediate results of the block's map (`tapped`), including its ``"output"``.

        `factors` multiply the block's input (``"reads"``) and its intermediate results.
        """
        factors = factors or {}
        noted: dict[str, Tensor] = {}
        if self.positions is None:
            parts = maps.parts(self.layer)
        else:
            noted["heads"], attention = attention_at(maps, self.layer, layout, self.positions)
            maps = maps.with_capture(maps.capture.block_at(self.layer, self.positions))
            norms = {name: maps.norm(self.layer, name) for name in maps.view.blocks[self.layer].norms}
            parts = PartMaps(attention, maps.mlp(self.layer), norms)
        block = maps.composed(self.layer, layout, tapped(parts, noted, factors))
        reads = maps.capture.resid_pre(self.layer)
        if "reads" in factors:
            reads = reads * factors["reads"]
        noted["output"] = block(reads)
        return noted

    def _compared(
        self, layout: Layout, noted: Mapping[str, Tensor], rounded: Sequence[Mapping[str, Tensor]] = ()
    ) -> BlockErrors:
        """The comparison of the map's results with the model's."""
        maps = self.maps
        if self.positions is not None:
            maps = maps.with_capture(maps.capture.block_at(self.layer, self.positions))
        error = block_error(maps.capture, self.layer, noted["output"])
        comparison = _Comparison(maps, self.layer, layout, self.seen, noted, rounded)
        return BlockErrors(error, list(comparison.errors()))

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
        where = "" if self.positions is None else f" at {SAMPLED}"
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
                "projection does; only changes that do not depend on the activation there can be held: added vectors "
                "(steering), or replaced values (a patch). Take it off, or make the change in the weights."
            )
        patched = [point.name for point in additions.patched if point.layer == self.layer]
        if patched:
            return (
                f"A hook at {' and '.join(patched)} replaces values that the model computes, but in this block the "
                "point lies elsewhere than in others. Patch the stream itself, at hook_resid_pre or hook_resid_post."
            )
        if constant:
            return (
                f"A hook at {' and '.join(constant)} adds a vector, but in this block the point lies elsewhere than in "
                "others. Add it to the stream itself, at hook_resid_pre or hook_resid_post."
            )
        if self.maps.view.wrapped_twice:
            return "This Hugging Face model was wrapped by a Bridge before: load it again, and wrap it only once."
        inside = self.maps.capture.hooks_in(self.maps.view.blocks[self.layer].name)
        if inside:
            return (
                f"A hook at {' and '.join(inside)} may have changed activations inside the block, which cannot be "
                "held: only additions to the stream, or replacements of it, can. Take it off, or make the change in "
                "the weights."
            )
        wrapped = getattr(self.maps.capture.model, "original_model", None)
        clip = getattr(getattr(wrapped, "config", None), "clip_qkv", None)
        if clip is not None:
            return (
                f"Its configuration clips queries, keys and values (clip_qkv={clip}), and clipped numbers are not what "
                "the weights give. Prompts on which nothing is clipped can be frozen."
            )
        return (
            "Possible causes are other hooks on the model (model.reset_hooks() removes them), or a part that is not "
            "attention, norm or MLP."
        )

    def _writes_again(self) -> dict[str, Tensor]:
        """The outputs of the block's sublayers, from one more run of the model if the pass did not record them."""
        capture = self.maps.capture
        names = capture.points.blocks[self.layer].proved
        seen = SeenWrites.of(capture.view, capture.points, len(capture.tokens), self.positions, "model")
        observe(capture.model, capture.inputs, names, seen.see, optional=names)
        return seen.tensors


def _named(write: WriteError) -> str:
    """Return a hook point that differs, with its error."""
    unit = f"{write.unit}: " if write.unit else ""
    return f"{write.point} ({unit}{write.error:.1e})"


# ------------------------------------------------------------------
# The check of a single attention pattern for padding.


def check_pattern(
    name: str,
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    keys: Bool[Tensor, "batch key"],
) -> None:
    """Raise an error for padding that the model does not handle: NaN at real queries, or weight on padded keys."""
    if bool(torch.isnan(pattern.sum())) and bool(torch.isnan(pattern).any()):
        raise NumericalError(
            f"NaN at {name}, in a padded batch: this model does not handle a query all of whose keys are padding or "
            "outside its window (left padding on several bridges, or short prompts together with ones longer than a "
            "sliding window). Pad on the right, or freeze the prompts one by one."
        )
    padded = ~keys
    columns = padded.any(0).nonzero()[:, 0]
    if not len(columns):
        return
    # the keys between the first and the last padding: few for prompts of similar length
    within = slice(int(columns[0]), int(columns[-1]) + 1)
    reads = pattern[..., within]
    padded = padded[:, within]
    per_query = reads[:, :, :1].numel() * reads.element_size()
    if any(  # for some queries at a time, so that no second tensor of the pattern's size is allocated
        bool(((reads[:, :, at] != 0) & queries[:, None, at, None] & padded[:, None, None, :]).any())
        for at in query_chunks(reads.shape[2], per_query)
    ):
        raise UnsupportedModelError(
            f"{name} puts weight on padded tokens: this model ignores the attention mask (a bidirectional "
            "HookedTransformer does). Freeze the prompts one by one."
        )


# ------------------------------------------------------------------
# The check that the model's logits are ``cap(W_U·x + b_U)``, at every position that a result explains.


class LogitsCheck:
    """The positions whose logits were compared with the model's own; it grows with the positions of results.

    Attributes:
        error: the largest ``max abs(ours − logits) / max abs(logits)`` so far; None before any comparison.
        compared: True where logits were compared, or will be when the error is first read.
        postponed: the model's logits for that later comparison, and their positions; None after it.
    """

    def __init__(self, mask: Bool[Tensor, "batch pos"]) -> None:
        self.error: float | None = None
        self.compared = torch.zeros_like(mask)
        self.postponed: tuple[object, Int[Tensor, "batch query"]] | None = None

    def covers(self, positions: Int[Tensor, "batch query"]) -> bool:
        """Return whether all of some positions were compared."""
        return bool(torch.take_along_dim(self.compared, positions, dim=1).all())

    def add(self, error: float, positions: Int[Tensor, "batch query"]) -> None:
        """Record the error of a comparison at some positions."""
        self.compared = self.compared.scatter(1, positions, True)
        self.error = max(error, self.error or 0.0)

    def postpone(self, logits: object, positions: Int[Tensor, "batch query"]) -> None:
        """Keep the model's logits at some positions until their error is needed, as computing it reads all of W_U."""
        self.compared = self.compared.scatter(1, positions, True)
        self.postponed = logits, positions

    def held(self, positions: Int[Tensor, "batch query"]) -> Float[Tensor, "batch query d_vocab"] | None:
        """Return the model's logits at some positions while they are kept, else None."""
        if self.postponed is None:
            return None
        logits, places = self.postponed
        matches = places[:, :, None] == positions[:, None].to(places.device)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or not bool(matches.any(1).all()):
            return None
        return torch.take_along_dim(logits, matches.int().argmax(1)[..., None].to(logits.device), dim=1)

    def catch_up(self, capture: Capture, states: Tensor) -> None:
        """Compare the postponed logits with those computed from weights and the model's last states."""
        if self.postponed is None:
            return
        logits, positions = self.postponed
        self.postponed = None
        self.add(logits_error(capture, states, logits, positions), positions)


def compared_positions(view: ModelView, prompt: Prompt, query: Query | None = None) -> Int[Tensor, "batch compared"]:
    """Return the positions whose logits are compared while freezing; some may repeat.

    These are each prompt's last real token, those of `query`, and in a masked language model the first and every mask.
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
        places = torch.where(masks, numbers, last)  # a prompt with fewer masks repeats its last token
        columns.append(places[:, masks.any(0)])
    return torch.cat(columns, dim=1)


def logits_error(capture: Capture, states: Tensor, logits: object, positions: Int[Tensor, "batch query"]) -> float:
    """Return the largest ``max abs(ours − logits) / max abs(logits)`` of real tokens, ours from the last states.

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
