"""Attention scores computed from the weights, and patterns recomputed from them.

A pattern that is not stored is verified while the pass runs. The model computes it anyway; a hook chooses the reading
of the layer's scores that fits it, compares it with the pattern recomputed from queries and keys, a few queries at a
time, and drops it. The memory per layer is linear in the number of tokens: queries, keys, and the sum of each row of
the pattern, which is less than 1 with attention sinks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, HeldScores, Linear, grouped_products, query_chunks
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, ModelPoints, capture, check_finite, hook_points, in_this_thread, keep_in
from tensorlens_tl.models import ModelView, candidates
from tensorlens_tl.models.lifecycle import WeightState
from tensorlens_tl.models.mixers import is_delta
from tensorlens_tl.models.parameters import Latent, NormWeights, innermost
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.proof import check_pattern

# ------------------------------------------------------------------
# Position encodings in attention scores: rotary tables, ALiBi, relative biases, as each model class stores them.


def alibis(maps: BlockMaps, attn: nn.Module, heads: int, x: Tensor, pos: int) -> list[Tensor | None]:
    """Return ALiBi as HookedTransformer computes it, if the configuration says that the model has it."""
    create = getattr(attn, "create_alibi_bias", None)
    if create is None or getattr(maps.view.cfg, "positional_embedding_type", None) != "alibi":
        return [None]
    return [create(heads, pos, x.device).to(x)[:, :pos, :pos]]


def relative_bias(maps: BlockMaps, layer: int, pos: int) -> Float[Tensor, "head query key"] | None:
    """Return T5's bias of each head's scores for the distance of query and key; None for any other model.

    The first block of a side has the table, which all its blocks share.
    """
    first = 0 if layer < maps.view.encoder_layers else maps.view.encoder_layers
    block = maps.view.blocks[first]
    with block.loaded():
        owner = innermost(block.module._modules.get(block.parts.mixer_name))
        table = innermost(getattr(owner, "relative_attention_bias", None))
        if table is None:  # a HookedEncoderDecoder's
            table = getattr(owner, "rel_pos_bias", None)
        bucket = getattr(owner, "_relative_position_bucket", None)
        if not isinstance(table, nn.Embedding) or bucket is None:
            return None
        positions = torch.arange(pos, device=table.weight.device)
        buckets = bucket(
            positions - positions[:, None],
            bidirectional=not owner.is_decoder,
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
        return table.weight.detach()[buckets].permute(2, 0, 1)


def rotations(maps: BlockMaps, attn: nn.Module, inner: nn.Module, x: Tensor, d_head: int) -> Iterator[Tensor | None]:
    """Yield rotation matrices for each position, for every possible interpretation of the model's tables of angles."""
    stated = getattr(maps.view.cfg, "positional_embedding_type", None) == "rotary"
    if not stated:
        yield None
    pos = x.shape[1]
    for cos, sin in _angle_tables(maps, attn, inner, x):
        for adjacent in (False, True):
            if cos.shape[0] >= pos and 2 * cos.shape[1] <= d_head:
                yield rotation_matrices(cos[:pos].to(x), sin[:pos].to(x), d_head, adjacent)
    if stated:  # some models rotate only in some layers
        yield None


def _angle_tables(maps: BlockMaps, attn: nn.Module, inner: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield cos and sin by position and plane, `[pos, planes]`, from every attribute in which a class stores them."""
    cos = getattr(attn, "rotary_cos", None)
    sin = getattr(attn, "rotary_sin", None)
    if isinstance(cos, Tensor) and isinstance(sin, Tensor):  # HookedTransformer repeats each plane
        half = cos.shape[-1] // 2
        yield cos[:, :half], sin[:, :half]  # planes (c, c + half)
        yield cos[:, ::2], sin[:, ::2]  # planes (2c, 2c + 1)
    table = getattr(inner, "embed_positions", None)
    if isinstance(table, Tensor):  # GPT-J: sin beside cos
        sin, cos = table.chunk(2, dim=-1)
        yield cos, sin
    positions = torch.arange(x.shape[1], device=x.device)[None]
    kind = _layer_kind(inner)
    arguments = [()] if kind is None else [(kind,), ()]
    for module in maps.view.rotary_modules:
        for extra in arguments:
            with suppress(TypeError), torch.no_grad():  # only some classes take the layer's kind
                tables = module(x, positions, *extra)
                if isinstance(tables, Tensor) and tables.is_complex():  # cos + i·sin, each plane once (Llama 4)
                    yield tables[0].real, tables[0].imag
                if isinstance(tables, tuple) and len(tables) == 2 and tables[0].ndim == 3:
                    cos, sin = tables
                    if not bool(cos[0, 0].any()):  # cos 0 is 1: GPT-J's sines come first
                        cos, sin = sin, cos
                    half = cos.shape[-1] // 2
                    yield cos[0, :, :half], sin[0, :, :half]
                    yield cos[0], sin[0]  # each plane once (gpt-oss)
                break


def _layer_kind(inner: nn.Module) -> str | None:
    """Return the kind of attention of a layer, if its module or the model's configuration states one."""
    kind = getattr(inner, "layer_type", None)
    if kind is not None:
        return kind
    kinds = getattr(getattr(inner, "config", None), "layer_types", None)
    number = getattr(inner, "layer_idx", None)
    if kinds is None or not isinstance(number, int):
        return None
    return kinds[number]


def rotation_matrices(
    cos: Float[Tensor, "pos planes"], sin: Float[Tensor, "pos planes"], d_head: int, adjacent: bool
) -> Float[Tensor, "pos d_head d_head"]:
    """Return R such that ``q @ R[pos]`` rotates q in planes (c, c + planes), or (2c, 2c + 1) if `adjacent`."""
    planes = torch.arange(cos.shape[1], device=cos.device)
    first = planes
    second = planes + len(planes)
    if adjacent:
        first = 2 * planes
        second = first + 1
    matrices = torch.eye(d_head, dtype=cos.dtype, device=cos.device).repeat(len(cos), 1, 1)
    matrices[:, first, first] = cos
    matrices[:, second, second] = cos
    matrices[:, first, second] = sin
    matrices[:, second, first] = -sin
    return matrices


ALL = slice(None)
"""Every query."""


# ------------------------------------------------------------------
# The possible readings of a layer's attention scores from its weights.
#
#     score_ij = scale · (R_i q_i)·(R_j k_j)  then soft cap, ALiBi or a relative bias, mask and softmax
#
# with q and k linear in the normalised stream (the scales of their norms are frozen) and R rotary. Model classes state
# the scale and the kind of rotation in different ways, so all known variants are candidates; a reading is right if the
# softmax of its scores is the model's own pattern. In cross-attention i is a position of the decoder, j one of the
# encoder's output, and there is no bias for their distance.


@dataclass(frozen=True, eq=False)
class CrossStreams:
    """The inputs of a decoder block's cross-attention.

    Attributes:
        queries: the decoder's stream, before the norm that precedes the queries.
        keys: the encoder's output, which values are read from as well.
    """

    queries: Float[Tensor, "batch decoder d_model"]
    keys: Float[Tensor, "batch encoder d_model"]


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """How a layer computes its queries, or its keys.

    Attributes:
        reads: the maps before the projection: the norm before attention, held, and a shortformer's positions.
        linear: the projection to all heads, concatenated.
        heads: the number of heads.
        norm: the RMSNorm of queries or keys, per head or over all of them, if any.
        latent: the matrix's input if that is a latent vector (DeepSeek); None otherwise.
    """

    reads: tuple[AffineMap, ...]
    linear: Linear
    heads: int
    norm: NormWeights | None = None
    latent: Latent | None = None

    def _held_linear(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """The map from the stream to all heads, with the scale of a latent's norm held."""
        if self.latent is None:
            return Chain((*self.reads, self.linear))
        entry = Chain((*self.reads, self.latent.entry))
        read = entry(x)
        factor = self.latent.gain.expand_as(read).clone()
        factor[..., : self.latent.rank] /= self.latent.scale(read)
        return Chain((*entry.stages, Diagonal(factor), self.linear))

    def raw(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """Return queries or keys before their own norm."""
        return self._held_linear(x)(x)

    @property
    def groups(self) -> int:
        """The number of groups of channels that the norm scales separately."""
        width = self.linear.weight.shape[1]
        gain = None if self.norm is None else self.norm.gain
        if gain is not None and gain.numel() == width != width // self.heads:
            return 1
        return self.heads

    def scale(self, raw: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos group"]:
        """Return the norm's scale of every group."""
        assert self.norm is not None
        return self.norm.scales(raw, self.groups)

    def gain(self, raw: Float[Tensor, "batch pos width"]) -> Float[Tensor, "width"]:
        """Return the norm's gain of every channel; 1 if it has none."""
        ones = torch.ones_like(raw[0, 0]).unflatten(-1, (self.groups, -1))
        if self.norm is None or self.norm.gain is None:
            return ones.flatten()
        return (ones * self.norm.gain.to(raw)).flatten()

    def held(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """Return the map from the stream to queries or keys, with the scale of their norm held."""
        linear = self._held_linear(x)
        if self.norm is None:
            return linear
        raw = linear(x)
        inverse = (1 / self.scale(raw)).to(raw).repeat_interleave(raw.shape[-1] // self.groups, dim=-1)
        return Chain((*linear.stages, Diagonal(self.gain(raw) * inverse)))


@dataclass(frozen=True, eq=False)
class ScoreReading:
    """One layer's attention scores as a bilinear form of the stream.

    Attributes:
        query, key: the maps from the block's input (`Capture.resid_read`) to queries `[.., head d_head]` and keys
            `[.., kv d_head]`, including their norms.
        projections: how queries and keys are computed.
        heads, kv_heads: the numbers of heads; query head h reads key head ``h // (heads // kv_heads)``.
        scale: the factor of the product, usually 1/√d_head.
        rotation: R for each position, applied from the right, `[pos, d_head, d_head]`; None without rotary positions.
        alibi: the bias added per head after the product, `[head, query, key]`, or None.
        relative: the same for T5's relative positions.
        soft_cap: c in c·tanh(score/c), or None.
        error: the largest difference between the softmax of these scores and the model's own pattern, once measured.
    """

    query: Chain
    key: Chain
    projections: tuple[HeadProjection, HeadProjection]
    heads: int
    kv_heads: int
    scale: float
    rotation: Float[Tensor, "pos d_head d_head"] | None = None
    alibi: Float[Tensor, "head query key"] | None = None
    soft_cap: float | None = None
    relative: Float[Tensor, "head query key"] | None = None
    error: float = float("inf")

    def vectors(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch head pos d_head"], Float[Tensor, "batch kv pos d_head"]]:
        """Return queries and keys as they enter their product, after norms and rotation."""
        return self.rotated(self.query(x), self.key(x))

    def rotated(
        self, query: Float[Tensor, "batch query width"], key: Float[Tensor, "batch key kv_width"]
    ) -> tuple[Float[Tensor, "batch head query d_head"], Float[Tensor, "batch kv key d_head"]]:
        """Return the same from the outputs of `query` and `key`."""
        q = rearrange(query, "b p (h d) -> b h p d", h=self.heads)
        k = rearrange(key, "b p (h d) -> b h p d", h=self.kv_heads)
        if self.rotation is None:
            return q, k
        rotated = partial(torch.einsum, "pde,bhpd->bhpe", self.rotation.to(q))
        return rotated(q), rotated(k)

    def scores(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head query key"]:
        """Return scores before soft cap, ALiBi and mask."""
        return self.scores_of(self.query(x), self.key(x))

    def scores_of(
        self,
        query: Float[Tensor, "batch query width"],
        key: Float[Tensor, "batch key kv_width"],
        rows: slice | Int[Tensor, "row"] = ALL,
    ) -> Float[Tensor, "batch head row key"]:
        """Return the same from the outputs of `query` and `key`, at some queries."""
        q, k = self.rotated(query, key)
        return self.scale * grouped_products(q[:, :, rows], k)

    def finished(
        self, scores: Float[Tensor, "batch head row key"], rows: slice | Int[Tensor, "row"] = ALL
    ) -> Float[Tensor, "batch head row key"]:
        """Return scores after soft cap and position biases, as they enter the mask and the softmax."""
        return self.placed(self.capped(scores), rows)

    def capped(self, scores: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return scores after the soft cap, if there is one."""
        if self.soft_cap is None:
            return scores
        return self.soft_cap * torch.tanh(scores / self.soft_cap)

    def placed(
        self, scores: Float[Tensor, "batch head row key"], rows: slice | Int[Tensor, "row"] = ALL
    ) -> Float[Tensor, "batch head row key"]:
        """Return scores with position biases added, at some queries."""
        for added in (self.alibi, self.relative):
            if added is not None:
                scores = scores + added[:, rows].to(scores)
        return scores


def score_candidates(
    maps: BlockMaps,
    layer: int,
    before: str | None,
    added: Tensor | None = None,
    alibi_positions: int | None = None,
    cross: CrossStreams | None = None,
) -> Iterator[ScoreReading]:
    """Yield the known ways in which a layer may compute its scores, the one stated in its configuration first.

    Args:
        maps: the captured run, at least up to the layer's attention.
        before: the name of the norm before attention, or None.
        added: see `added_positions`.
        alibi_positions: the number of positions for which to compute ALiBi; None for all.
        cross: the inputs of cross-attention, for its scores; None for those of self-attention.

    Raises:
        UnsupportedModelError: the layer's query and key weights cannot be read.
    """
    projections = score_projections(maps, layer, before, added, crossing=cross is not None)
    block = maps.view.blocks[layer]
    heads, kv_heads = (projection.heads for projection in projections)
    attn = block.module.get_submodule(block.parts.mixer_name if cross is None else block.parts.cross_name)
    inner: nn.Module = getattr(attn, "original_component", attn)
    x = side_read(maps, layer)
    reads = (x, x) if cross is None else (cross.queries, cross.keys)
    query, key = (projection.held(read) for projection, read in zip(projections, reads, strict=True))
    d_head = projections[0].linear.weight.shape[1] // heads
    cap = float(getattr(maps.view.cfg, "attn_scores_soft_cap", None) or 0)
    soft_cap = cap if cap > 0 else None
    scales = list(dict.fromkeys([*_stated_scales(attn, inner), d_head**-0.5, 1.0, d_head**-0.5 / (layer + 1)]))
    reading = ScoreReading(query, key, projections, heads, kv_heads, scales[0], soft_cap=soft_cap)
    if cross is not None:
        yield from (replace(reading, scale=scale) for scale in scales)
        return
    relative = relative_bias(maps, layer, x.shape[1])
    for rotation in rotations(maps, attn, inner, x, d_head):
        for alibi in alibis(maps, attn, heads, x, alibi_positions or x.shape[1]):
            for scale in scales:
                yield replace(reading, scale=scale, rotation=rotation, alibi=alibi, relative=relative)


def side_read(maps: BlockMaps, layer: int) -> Float[Tensor, "batch pos d_model"]:
    """Return the stream that a block reads, at the positions that it acts on."""
    return maps.capture.resid_read(layer)[:, slice(*maps.capture.side(layer))]


def score_projections(
    maps: BlockMaps, layer: int, before: str | None, added: Tensor | None = None, *, crossing: bool = False
) -> tuple[HeadProjection, HeadProjection]:
    """Return how a layer computes queries and keys; arguments as in `score_candidates`.

    Raises:
        UnsupportedModelError: the layer's query and key weights cannot be read.
    """
    block = maps.view.blocks[layer]
    reads: list[AffineMap] = []
    if before is not None:
        reads.append(maps.norm(layer, before))
    if added is not None:
        x = maps.capture.resid_read(layer)
        offset = added.to(x).expand_as(x)
        reads.append(Diagonal(torch.ones_like(offset), offset))
    of_queries = tuple(reads)
    of_keys = of_queries
    attention = block.attention
    weights = block.latent_scores or block.query_key
    if crossing:
        of_keys = ()
        attention = block.require_cross_attention()
        weights = block.cross_query_key

    def norm(weights_of: NormWeights | None) -> NormWeights | None:
        if weights_of is None or weights_of.centre:
            return None  # centred norms are not supported: the proof then fails
        return replace(weights_of, epsilon=weights.epsilon)

    queries = Linear(weights.W_Q, weights.b_Q)
    keys = Linear(weights.W_K, weights.b_K)
    return (
        HeadProjection(of_queries, queries, attention.heads, norm(weights.q_norm), weights.query_latent),
        HeadProjection(of_keys, keys, attention.kv_heads, norm(weights.k_norm), weights.key_latent),
    )


def _stated_scales(attn: nn.Module, inner: nn.Module) -> list[float]:
    """Return the factors of the product stated by TransformerLens's module and by the Hugging Face module inside."""
    divisor = getattr(attn, "attn_scale", None)
    factor = getattr(inner, "scaling", None)
    scales: list[float] = []
    if isinstance(divisor, int | float):
        scales.append(1 / divisor)
    if isinstance(factor, int | float):
        scales.append(float(factor))
    return scales


def added_positions(maps: BlockMaps) -> Tensor | None:
    """Return the position embeddings that a shortformer adds to the input of queries and keys, not to the stream.

    Runs the model up to its first block; None for any other model.
    """
    if getattr(maps.view.cfg, "positional_embedding_type", None) != "shortformer":
        return None
    name = "hook_pos_embed"
    last = maps.points.blocks[0].resid_pre
    embeddings, _ = capture(maps.capture.model, maps.capture.inputs, [name], last=last, optional=[name])
    return embeddings.get(name)


SAMPLED_ROWS = 16
"""The number of rows of a pattern that decide between readings; the chosen reading is verified on all rows."""


# ------------------------------------------------------------------
# The choice of the reading that reproduces a layer's pattern.


def sampled_rows(pattern: Float[Tensor, "batch head query key"]) -> Int[Tensor, "row"]:
    """Return evenly spaced queries that decide between readings."""
    length = pattern.shape[2]
    return torch.linspace(0, length - 1, min(SAMPLED_ROWS, length), device=pattern.device).long()


def score_reading(
    maps: BlockMaps,
    layer: int,
    vectors: tuple[Tensor, Tensor] | None = None,
    cross: CrossStreams | None = None,
    *,
    proved: bool = True,
) -> ScoreReading:
    """Return the reading of one layer's scores that reproduces its pattern.

    Args:
        vectors: its queries and keys as from `projected`, if known.
        cross: as in `score_candidates`; then `vectors` are required.
        proved: False if the caller compares every row, and a few rows exclude all readings but one.

    Raises:
        UnsupportedModelError: no known reading does; gives the smallest error.
    """
    crossing = cross is not None
    place = maps.layouts[layer].attn
    added = None
    if crossing:
        place = maps.layouts[layer].cross or place
    else:
        added = added_positions(maps)
    queries, keys = vectors or projected(maps, layer, score_projections(maps, layer, place.before, added))
    pattern = maps.capture.cross_pattern(layer) if crossing else maps.capture.pattern(layer)
    mask = maps.mask[:, slice(*maps.capture.side(layer))]
    error = partial(pattern_error, pattern=pattern, mask=mask, queries=queries, keys=keys)
    rows = sampled_rows(pattern)
    candidates = [
        replace(candidate, error=error(candidate, rows=rows))
        for candidate in score_candidates(maps, layer, place.before, added, cross=cross)
    ]
    possible = [candidate for candidate in candidates if candidate.error <= 2 * maps.tolerance]
    if len(possible) == 1 and not proved:
        return possible[0]
    candidates = _measured(candidates, error)
    best = min(candidates, key=lambda reading: reading.error, default=None)
    if best is None or not best.error <= maps.tolerance:
        nearest = min((candidate.error for candidate in candidates), default=float("nan"))
        raise unread(maps, layer, nearest, crossing=crossing)
    # if the pattern is ambiguous (one token, or uniform attention), prefer what the model states
    near = [reading for reading in candidates if reading.error <= 2 * best.error and reading is not best]
    if not near:
        return best
    scores = best.scores_of(queries, keys)
    size = 0.1 * float(scores.norm())
    unlike = [reading for reading in near if float((reading.scores_of(queries, keys) - scores).norm()) > size]
    if unlike and keys.shape[1] > 1:
        raise UnsupportedModelError(
            f"{_named(maps, layer, crossing)} of this {maps.view.description}: several readings of its attention "
            f"scores reproduce its pattern equally well (errors {best.error:.1e} and {unlike[0].error:.1e}), which is "
            "too uniform to decide. Freeze a longer prompt, or use a wider dtype."
        )
    if unlike:
        return next(reading for reading in candidates if reading.error <= 2 * best.error)
    return best


def _measured(candidates: list[ScoreReading], error: Callable[[ScoreReading], float]) -> list[ScoreReading]:
    """Return the candidates that may be within twice the smallest error, in order, with their errors on all rows.

    The error on some rows is a lower bound of that on all: a candidate whose error there exceeds twice the best error
    on all rows is not measured further.
    """
    best = float("inf")
    measured: dict[int, ScoreReading] = {}
    for number in sorted(range(len(candidates)), key=lambda number: _or_infinite(candidates[number].error)):
        if measured and not candidates[number].error <= 2 * best:
            break
        candidate = replace(candidates[number], error=error(candidates[number]))
        measured[number] = candidate
        best = min(best, _or_infinite(candidate.error))
    return [measured[number] for number in sorted(measured)]


def _or_infinite(error: float) -> float:
    """Return the error, or infinity if it is NaN."""
    if math.isnan(error):
        return float("inf")
    return error


def unread(maps: BlockMaps, layer: int, error: float, *, crossing: bool = False) -> UnsupportedModelError:
    """Return the error for a layer whose best reading is off by `error`."""
    inside = maps.capture.hooks_in(maps.view.blocks[layer].name)
    if inside:
        return UnsupportedModelError(
            f"{_named(maps, layer, crossing)} of this {maps.view.description}: its queries and keys do not give its "
            f"attention pattern (off by {error:.1e}). A hook at {' and '.join(inside)} may change an activation "
            "between them, which is not supported: freeze without it."
        )
    return UnsupportedModelError(
        f"{_named(maps, layer, crossing)} of this {maps.view.description}: its attention scores cannot be read; no "
        f"known scale and position encoding reproduces its pattern (nearest: off by {error:.1e}). "
        "Relative position biases other than T5's and centred query norms are not supported."
    )


def _named(maps: BlockMaps, layer: int, crossing: bool) -> str:
    """Return the name of the attention module."""
    name = maps.view.blocks[layer].name
    return f"{name}.cross_attn" if crossing else name


def projected(
    maps: BlockMaps, layer: int, projections: tuple[HeadProjection, HeadProjection]
) -> tuple[Float[Tensor, "batch pos width"], Float[Tensor, "batch pos kv_width"]]:
    """Return one layer's queries and keys before rotation, with heads concatenated."""
    x = side_read(maps, layer)
    query, key = projections
    return query.held(x)(x), key.held(x)(x)


def pattern_error(
    reading: ScoreReading,
    pattern: Float[Tensor, "batch head query key"],
    mask: Bool[Tensor, "batch query"],
    queries: Float[Tensor, "batch query width"],
    keys: Float[Tensor, "batch key kv_width"],
    rows: slice | Int[Tensor, "row"] = ALL,
) -> float:
    """Return the largest error of an attention probability; the pattern's row sums are kept, which allows sinks.

    Args:
        reading: the reading of the scores.
        pattern: the model's own pattern.
        mask: True at queries that are real tokens.
        queries, keys: before rotation, as from `projected`.
        rows: the queries to compare.
    """
    shown = pattern[:, :, rows].to(queries.dtype)
    allowed = shown > 0
    scores = reading.finished(reading.scores_of(queries, keys, rows), rows).masked_fill(~allowed, -torch.inf)
    probabilities = torch.softmax(upcast(scores), dim=-1) * shown.sum(-1, keepdim=True)
    real = mask[:, None, rows, None] & allowed.any(-1, keepdim=True)
    return float((probabilities - shown).masked_fill(~real, 0.0).abs().max())


PATTERN = "hook_pattern"
SHOWN = (("hook_rot_q", "hook_rot_k"), ("hook_q", "hook_k"))
"""Hook points where a model may show its final queries and keys. Those computed from the weights are right to rounding,
but in half precision, or with norms that compute in float32, only the model's own reproduce its pattern accurately."""

ENOUGH = 0.01
"""The share of the tolerance below which no further reading is tried."""


def refuse_unreadable(view: ModelView) -> None:
    """Refuse, before any work, a model with a layer whose pattern cannot be recomputed.

    Raises:
        UnsupportedModelError: names the layer and the cause.
    """
    if view.is_encoder_decoder:
        raise _refusal(view, "an encoder–decoder's patterns (cross-attention, relative positions) are not recomputed")
    for block in view.blocks:
        if block.mixer is not None:
            if is_delta(innermost(block.module._modules[block.parts.mixer_name])):
                raise _refusal(view, f"{block.name} mixes by the gated delta rule, whose own pattern is quadratic")
            continue
        try:
            block.require_query_key()
        except UnsupportedModelError as error:
            raise _refusal(view, str(error).rstrip(".")) from error


def _refusal(view: ModelView, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"freeze(patterns='recompute') of this {view.description}: {why}. Use patterns='keep', which stores every "
        "pattern as the model computes it."
    )


class PatternReader:
    """Reads every layer's pattern while the pass runs, and stores the tensors that it can be recomputed from.

    Attributes:
        activations: the activations other than patterns, by hook-point name.
        scores: the tensors for recomputing each pattern, by its hook point's name.

    Args:
        view, points, prompt: as in `Capture`.
        store: ``"cpu"`` keeps activations, queries and keys off the device.
        tolerance: the largest allowed error for a dtype.
    """

    def __init__(
        self,
        view: ModelView,
        points: ModelPoints,
        prompt: Prompt,
        store: str,
        tolerance: Callable[[torch.dtype], float],
    ) -> None:
        self.activations: dict[str, Tensor] = {}
        self.scores: dict[str, HeldScores] = {}
        self.maps = BlockMaps(Capture(view, points, prompt, self.activations, WeightState.of(view.model)))
        self.store = store
        self.tolerance = tolerance
        self.layers = {block.pattern: layer for layer, block in enumerate(points.blocks) if block.pattern is not None}
        self.added = added_positions(self.maps)
        self._model_vectors: dict[str, Tensor] = {}

    def hooks(self) -> list[FwdHook]:
        """Return hooks that read the final queries and keys, if the model shows them."""

        def read(tensor: Tensor, *, hook: Any, name: str) -> None:
            self._model_vectors[name] = tensor.detach().to(self.maps.mask.device)

        known = hook_points(self.maps.view.model)
        names = [pattern.replace(PATTERN, shown) for pattern in self.layers for pair in SHOWN for shown in pair]
        return [(name, in_this_thread(partial(read, name=name))) for name in names if name in known]

    def see(self, name: str, activation: Tensor) -> None:
        """Store an activation, or for a pattern the tensors that it can be recomputed from.

        Raises:
            NumericalError, UnsupportedModelError: see `check_pattern` and `_read_pattern`.
        """
        if name in self.layers:
            self._read_pattern(name, activation.to(self.maps.mask.device), activation.device)
        else:
            keep_in(self.activations, self.store, name, activation)

    def _read_pattern(self, name: str, pattern: Float[Tensor, "batch head query key"], device: torch.device) -> None:
        """Find the tensors that a layer's pattern can be recomputed from, verify all of it, and store them.

        Raises:
            UnsupportedModelError: no known reading of the scores gives the pattern; gives the smallest error.
        """
        layer = self.layers[name]
        tolerance = self.tolerance(self.maps.capture.resid_pre(layer).dtype)
        captured = self.maps.points.blocks[layer].captured
        check_finite({name: self.activations[name] for name in captured if name in self.activations})
        if not bool(self.maps.mask.all()):
            check_pattern(name, pattern, self.maps.mask, self.maps.mask)
        check_finite({name: pattern})
        best = self._best(layer, pattern, ENOUGH * tolerance)
        self._model_vectors.clear()
        error = float("nan")
        if best is not None:
            error = best.error
        if best is not None and error <= tolerance:
            chunks = query_chunks(pattern.shape[2], pattern[:, :, :1].numel() * pattern.element_size())
            error = max((self._error(best, queries, pattern) for queries in chunks), default=0.0)
        if best is None or not error <= tolerance:
            raise _refusal(
                self.maps.view,
                f"the pattern of blocks.{layer} is not the one that its queries and keys give (relative error of a "
                f"row: {error:.1e}; allowed {tolerance:.0e}); possible causes are relative position biases, a mask "
                "that is neither causal nor a window, or another hook on the model",
            )
        place = torch.device("cpu") if self.store == "cpu" else device
        tensors = {field: getattr(best, field).to(place) for field in ("queries", "keys", "sums", "real")}
        self.scores[name] = replace(best, **tensors, device=device, error=error)

    def _best(self, layer: int, pattern: Tensor, enough: float) -> HeldScores | None:
        """The candidate with the smallest error on a few rows, or the first with an error that is small enough."""
        best: HeldScores | None = None
        for candidate in self._candidates(layer, pattern):
            if best is None or not best.error <= candidate.error:
                best = candidate
            if best.error <= enough:
                break
        return best

    def _candidates(self, layer: int, pattern: Tensor) -> Iterator[HeldScores]:
        """The candidates for recomputing the pattern, each with its error on a few rows."""
        rows = sampled_rows(pattern)
        sums = pattern.sum(-1)
        window = cache(partial(_reach, pattern, self.maps.mask))  # measured at most once, and only if needed
        for reading in self._readings(layer):
            for unmasked in self._unmasked(reading, layer, sums):
                for back, ahead in _reaches(window):
                    candidate = replace(unmasked, back=back, ahead=ahead)
                    yield replace(candidate, error=self._error(candidate, rows, pattern))

    def _readings(self, layer: int) -> Iterator[ScoreReading]:
        """The known ways in which the layer may compute its scores."""
        block = self.maps.view.blocks[layer]
        layouts = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)
        scales = self.maps.points.blocks[layer].scales
        for before in dict.fromkeys(layout.attn.before for layout in layouts):
            if before is None or scales[before] in self.activations:  # else the norm comes after attention
                yield from score_candidates(self.maps, layer, before, self.added, alibi_positions=2)

    def _unmasked(
        self, reading: ScoreReading, layer: int, sums: Float[Tensor, "batch head query"]
    ) -> Iterator[HeldScores]:
        """A reading's scores before any mask: from the queries and keys that the model shows, then from its own."""
        name = self.maps.points.blocks[layer].pattern
        assert name is not None
        shape = (len(sums), sums.shape[2])
        shown = [tuple(self._model_vectors.get(name.replace(PATTERN, end)) for end in ends) for ends in SHOWN]
        pairs = [
            (q.transpose(1, 2), k.transpose(1, 2))
            for q, k in shown
            if q is not None and k is not None and q.ndim == k.ndim == 4 and q.shape[:2] == k.shape[:2] == shape
        ]
        for queries, keys in pairs[:1]:
            if queries.shape[1] == reading.heads and keys.shape[1] % reading.kv_heads == 0:
                # some models repeat a key-value head for every query head that reads it
                yield self._scores(queries, keys[:, :: keys.shape[1] // reading.kv_heads], reading, sums)
        yield self._scores(*reading.vectors(self.maps.capture.resid_read(layer)), reading, sums)

    def _scores(self, queries: Tensor, keys: Tensor, reading: ScoreReading, sums: Tensor) -> HeldScores:
        return HeldScores(
            queries,
            keys,
            sums,
            self.maps.mask,
            reading.scale,
            reading.soft_cap,
            None if reading.alibi is None else reading.alibi[:, -1, 0],
            None,
            None,
            sums.device,
        )

    def _error(self, scores: HeldScores, queries: slice | Tensor, pattern: Tensor) -> float:
        """The largest relative error among some rows of real queries."""
        at = torch.arange(pattern.shape[2], device=pattern.device)[queries]
        expected = pattern[:, :, queries]
        rows = scores.rows(at.expand(len(pattern), -1), expected.dtype)
        rows = torch.nn.functional.pad(rows, (0, expected.shape[-1] - rows.shape[-1]))
        return relative_error(rows.transpose(1, 2), expected.transpose(1, 2), self.maps.mask[:, queries])


def _reaches(window: Callable[[], tuple[int, int]]) -> Iterator[tuple[int | None, int | None]]:
    """Yield how far before and after its query a key may lie: causal, unlimited, and the window seen in the pattern."""
    yield None, 0
    yield None, None
    yield window()


def _reach(pattern: Tensor, mask: Tensor) -> tuple[int, int]:
    """Return the largest distances before and after a real query at which a key has weight."""
    back = 0
    ahead = 0
    for at in query_chunks(pattern.shape[2], pattern[:, :, :1].numel() * pattern.element_size()):
        weighted = ((pattern[:, :, at] > 0) & mask[:, None, at, None]).flatten(0, 1).any(0)
        query, key = weighted.nonzero(as_tuple=True)
        if len(query):
            distance = query + at.start - key
            back = max(back, int(distance.max()))
            ahead = max(ahead, -int(distance.min()))
    return back, ahead
