"""The ways in which a layer may compute its attention scores, read from its weights.

    score_ij = scale · (R_i q_i)·(R_j k_j)  then soft cap, ALiBi, mask and softmax

with q and k linear in the normalised stream (their own norms' scales frozen) and R rotary. Neither the scale nor the
way of rotating is stated the same way by any two model classes, so the known ways are candidates; a reading is right
when the softmax of its scores is the model's own pattern.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, grouped_products
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models.parameters import Latent, NormWeights
from tensorlens_tl.passes.block_maps import BlockMaps


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """How a layer reads its queries, or its keys.

    Attributes:
        reads: what comes before: the norm before attention, held, and what a shortformer adds.
        linear: to all heads side by side.
        heads: how many there are.
        norm: the RMSNorm of queries or keys, per head or over all of them; None without.
        latent: what the matrix reads in place of what attention reads (DeepSeek); None for that.
    """

    reads: tuple[AffineMap, ...]
    linear: Linear
    heads: int
    norm: NormWeights | None = None
    latent: Latent | None = None

    def _held_linear(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """From the stream to all heads, with the scale of a latent's norm held."""
        if self.latent is None:
            return Chain((*self.reads, self.linear))
        entry = Chain((*self.reads, self.latent.entry))
        read = entry(x)
        factor = self.latent.gain.expand_as(read).clone()
        factor[..., : self.latent.rank] /= self.latent.scale(read)
        return Chain((*entry.stages, Diagonal(factor), self.linear))

    def raw(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """Before their own norm."""
        return self._held_linear(x)(x)

    @property
    def groups(self) -> int:
        """How many groups of channels have a scale of their own under the norm."""
        width = self.linear.weight.shape[1]
        gain = None if self.norm is None else self.norm.gain
        if gain is not None and gain.numel() == width != width // self.heads:
            return 1
        return self.heads

    def scale(self, raw: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos group"]:
        """The norm's scale of every group."""
        assert self.norm is not None
        return self.norm.scales(raw, self.groups)

    def gain(self, raw: Float[Tensor, "batch pos width"]) -> Float[Tensor, "width"]:
        """The norm's gain of every channel; 1 where it has none."""
        ones = torch.ones_like(raw[0, 0]).unflatten(-1, (self.groups, -1))
        if self.norm is None or self.norm.gain is None:
            return ones.flatten()
        return (ones * self.norm.gain.to(raw)).flatten()

    def held(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """From the stream to queries or keys, with the scale of their norm held: a diagonal map."""
        linear = self._held_linear(x)
        if self.norm is None:
            return linear
        raw = linear(x)
        inverse = (1 / self.scale(raw)).to(raw).repeat_interleave(raw.shape[-1] // self.groups, dim=-1)
        return Chain((*linear.stages, Diagonal(self.gain(raw) * inverse)))


@dataclass(frozen=True, eq=False)
class ScoreReading:
    """One layer's scores as bilinear in the stream.

    Attributes:
        query, key: the stream that the block reads (`Capture.resid_read`) -> queries `[.., head d_head]` and keys
            `[.., kv d_head]`, their norms maps.
        projections: how queries and keys are read.
        heads, kv_heads: how many of each; query head h reads key head ``h // (heads // kv_heads)``.
        scale: the factor of the product, usually 1/√d_head.
        rotation: R for each position, applied from the right, `[pos, d_head, d_head]`; None without rotary positions.
        alibi: what is added per head after the product, `[head, query, key]`, or None.
        soft_cap: c of c·tanh(score/c), or None.
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
    error: float = float("inf")

    def vectors(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch head pos d_head"], Float[Tensor, "batch kv pos d_head"]]:
        """Queries and keys as their product takes them: after norms and rotation."""
        return self.rotated(self.query(x), self.key(x))

    def rotated(
        self, query: Float[Tensor, "batch pos width"], key: Float[Tensor, "batch pos kv_width"]
    ) -> tuple[Float[Tensor, "batch head pos d_head"], Float[Tensor, "batch kv pos d_head"]]:
        """The same from what `query` and `key` give."""
        q = rearrange(query, "b p (h d) -> b h p d", h=self.heads)
        k = rearrange(key, "b p (h d) -> b h p d", h=self.kv_heads)
        if self.rotation is None:
            return q, k
        rotated = partial(torch.einsum, "pde,bhpd->bhpe", self.rotation.to(q))
        return rotated(q), rotated(k)

    def scores(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head query key"]:
        """Scores before soft cap, ALiBi and mask."""
        return self.scores_of(self.query(x), self.key(x))

    def scores_of(
        self, query: Float[Tensor, "batch pos width"], key: Float[Tensor, "batch pos kv_width"]
    ) -> Float[Tensor, "batch head query key"]:
        """The same from what `query` and `key` give."""
        return self.scale * grouped_products(*self.rotated(query, key))

    def finished(self, scores: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head query key"]:
        """The same after soft cap and ALiBi, as they enter the mask and the softmax."""
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if self.alibi is not None:
            scores = scores + self.alibi
        return scores


def score_candidates(
    maps: BlockMaps, layer: int, before: str | None, added: Tensor | None = None, alibi_positions: int | None = None
) -> Iterator[ScoreReading]:
    """The known ways in which a layer may compute its scores; the one that its configuration states comes first.

    Args:
        maps: of what was captured, up to the layer's attention at least.
        layer: which one.
        before: the norm before attention, by name, or None.
        added: see `added_positions`.
        alibi_positions: for how many positions to compute ALiBi; None for all.

    Raises:
        UnsupportedModelError: the layer has no query and key weights that are read.
    """
    projections = score_projections(maps, layer, before, added)
    block = maps.view.blocks[layer]
    heads = block.attention.heads
    kv_heads = block.attention.kv_heads
    attn = block.module.get_submodule("attn")
    inner: nn.Module = getattr(attn, "original_component", attn)
    x = maps.capture.resid_read(layer)
    query, key = (projection.held(x) for projection in projections)
    d_head = projections[0].linear.weight.shape[1] // heads
    cap = float(getattr(maps.view.cfg, "attn_scores_soft_cap", None) or 0)
    soft_cap = cap if cap > 0 else None
    scales = list(dict.fromkeys([*_stated_scales(attn, inner), d_head**-0.5, 1.0, d_head**-0.5 / (layer + 1)]))
    for rotation in _rotations(maps, attn, inner, x, d_head):
        for alibi in _alibis(maps, attn, heads, x, alibi_positions or x.shape[1]):
            for scale in scales:
                yield ScoreReading(query, key, projections, heads, kv_heads, scale, rotation, alibi, soft_cap)


def score_projections(
    maps: BlockMaps, layer: int, before: str | None, added: Tensor | None = None
) -> tuple[HeadProjection, HeadProjection]:
    """How a layer reads queries and keys; arguments as of `score_candidates`.

    Raises:
        UnsupportedModelError: the layer has no query and key weights that are read.
    """
    block = maps.view.blocks[layer]
    weights = block.latent_scores or block.query_key
    reads: list[AffineMap] = []
    if before is not None:
        reads.append(maps.norm(layer, before))
    if added is not None:
        x = maps.capture.resid_read(layer)
        offset = added.to(x).expand_as(x)
        reads.append(Diagonal(torch.ones_like(offset), offset))

    def norm(weights_of: NormWeights | None) -> NormWeights | None:
        if weights_of is None or weights_of.centre:
            return None  # a centred one is not read: the proof then fails
        return replace(weights_of, epsilon=weights.epsilon)

    attention = block.attention
    queries = Linear(weights.W_Q, weights.b_Q)
    keys = Linear(weights.W_K, weights.b_K)
    return (
        HeadProjection(tuple(reads), queries, attention.heads, norm(weights.q_norm), weights.query_latent),
        HeadProjection(tuple(reads), keys, attention.kv_heads, norm(weights.k_norm), weights.key_latent),
    )


def _stated_scales(attn: nn.Module, inner: nn.Module) -> list[float]:
    """The factors of the product that TransformerLens's module and the Hugging Face module inside it state."""
    divisor = getattr(attn, "attn_scale", None)
    factor = getattr(inner, "scaling", None)
    scales: list[float] = []
    if isinstance(divisor, int | float):
        scales.append(1 / divisor)
    if isinstance(factor, int | float):
        scales.append(float(factor))
    return scales


def added_positions(maps: BlockMaps) -> Tensor | None:
    """What a shortformer adds to what queries and keys read, not to the stream: its position embeddings.

    Runs the model up to its first block; None of any other model.
    """
    if getattr(maps.view.cfg, "positional_embedding_type", None) != "shortformer":
        return None
    name = "hook_pos_embed"
    last = maps.points.blocks[0].resid_pre
    embeddings, _ = capture(maps.capture.model, maps.capture.inputs, [name], last=last, optional=[name])
    return embeddings.get(name)


def _alibis(maps: BlockMaps, attn: nn.Module, heads: int, x: Tensor, pos: int) -> list[Tensor | None]:
    """ALiBi as HookedTransformer computes it, where the configuration says that the model has it."""
    create = getattr(attn, "create_alibi_bias", None)
    if create is None or getattr(maps.view.cfg, "positional_embedding_type", None) != "alibi":
        return [None]
    return [create(heads, pos, x.device).to(x)[:, :pos, :pos]]


def _rotations(maps: BlockMaps, attn: nn.Module, inner: nn.Module, x: Tensor, d_head: int) -> Iterator[Tensor | None]:
    """Rotation matrices for each position, in every way that the model's tables of angles can be meant."""
    stated = getattr(maps.view.cfg, "positional_embedding_type", None) == "rotary"
    if not stated:
        yield None
    pos = x.shape[1]
    for cos, sin in _angle_tables(maps, attn, inner, x):
        for adjacent in (False, True):
            if cos.shape[0] >= pos and 2 * cos.shape[1] <= d_head:
                yield rotation_matrices(cos[:pos].to(x), sin[:pos].to(x), d_head, adjacent)
    if stated:  # some rotate in some of their layers only
        yield None


def _angle_tables(maps: BlockMaps, attn: nn.Module, inner: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """cos and sin by position and plane `[pos, planes]`, from every attribute in which a class stores them."""
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
    owner = getattr(maps.capture.model, "original_model", None)
    if owner is None:
        return
    kind = _layer_kind(inner)
    arguments = [()] if kind is None else [(kind,), ()]
    for module in [module for name, module in owner.named_modules() if name.endswith("rotary_emb")]:
        module = getattr(module, "original_component", module)
        for extra in arguments:
            with suppress(TypeError), torch.no_grad():  # only some classes take the layer's kind
                tables = module(x, positions, *extra)
                if isinstance(tables, Tensor) and tables.is_complex():  # cos + i·sin, each plane once (Llama 4)
                    yield tables[0].real, tables[0].imag
                if isinstance(tables, tuple) and len(tables) == 2:
                    cos, sin = tables
                    half = cos.shape[-1] // 2
                    yield cos[0, :, :half], sin[0, :, :half]
                    yield cos[0], sin[0]  # each plane once (gpt-oss)
                break


def _layer_kind(inner: nn.Module) -> str | None:
    """The kind of attention that a layer has, where its module or the model's configuration states one."""
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
    """``q @ R[pos]`` rotates q in each plane: channels (c, c + planes), or (2c, 2c + 1) where `adjacent`."""
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


def score_reading(maps: BlockMaps, layer: int, vectors: tuple[Tensor, Tensor] | None = None) -> ScoreReading:
    """The reading of one layer's scores that reproduces its pattern.

    Args:
        maps: of the run.
        layer: which one.
        vectors: its queries and keys as of `projected`, where they are known.

    Raises:
        UnsupportedModelError: no known reading does; says how near the best came.
    """
    maps.view.refuse_encoder_decoder("attention scores")
    before = maps.layouts[layer].attn.before
    added = added_positions(maps)
    queries, keys = vectors or projected(maps, layer, score_projections(maps, layer, before, added))
    candidates = [
        replace(candidate, error=pattern_error(candidate, maps, layer, queries, keys))
        for candidate in score_candidates(maps, layer, before, added)
    ]
    best = min(candidates, key=lambda reading: reading.error, default=None)
    if best is None or not best.error <= maps.tolerance:
        nearest = min((candidate.error for candidate in candidates), default=float("nan"))
        raise UnsupportedModelError(
            f"blocks.{layer} of this {maps.view.description}: its attention scores cannot be read; no known scale "
            f"and position encoding reproduces its pattern (nearest: off by {nearest:.1e}). "
            "Relative position biases and centred query norms are not supported."
        )
    # what the pattern cannot tell apart (one token; nothing but uniform attention) goes to what the model states
    near = [reading for reading in candidates if reading.error <= 2 * best.error and reading is not best]
    scores = best.scores_of(queries, keys)
    size = 0.1 * float(scores.norm())
    unlike = [reading for reading in near if float((reading.scores_of(queries, keys) - scores).norm()) > size]
    if unlike and queries.shape[1] > 1:
        raise UnsupportedModelError(
            f"blocks.{layer} of this {maps.view.description}: several ways to make its attention scores reproduce "
            f"its pattern equally well (off by {best.error:.1e} and {unlike[0].error:.1e}); it is too even to tell. "
            "Freeze a longer prompt, or use a wider dtype."
        )
    if unlike:
        return next(reading for reading in candidates if reading.error <= 2 * best.error)
    return best


def projected(
    maps: BlockMaps, layer: int, projections: tuple[HeadProjection, HeadProjection]
) -> tuple[Float[Tensor, "batch pos width"], Float[Tensor, "batch pos kv_width"]]:
    """One layer's queries and keys before rotation, heads side by side."""
    x = maps.capture.resid_read(layer)
    query, key = projections
    return query.held(x)(x), key.held(x)(x)


def pattern_error(
    reading: ScoreReading,
    maps: BlockMaps,
    layer: int,
    queries: Float[Tensor, "batch pos width"],
    keys: Float[Tensor, "batch pos kv_width"],
) -> float:
    """The largest error of an attention probability. A row's own sum is kept: attention sinks take their share.

    Args:
        reading: how scores are computed.
        maps: of the run.
        layer: which one.
        queries, keys: before rotation, as of `projected`.
    """
    pattern = maps.capture.pattern(layer).to(queries.dtype)
    allowed = pattern > 0
    scores = reading.finished(reading.scores_of(queries, keys)).masked_fill(~allowed, -torch.inf)
    probabilities = torch.softmax(upcast(scores), dim=-1) * pattern.sum(-1, keepdim=True)
    real = maps.mask[:, None, :, None] & allowed.any(-1, keepdim=True)
    return float((probabilities - pattern).masked_fill(~real, 0.0).abs().max())
