"""The ways in which a layer may compute its attention scores, read from its weights.

    score_ij = scale · (R_i q_i)·(R_j k_j)  then soft cap, ALiBi or a relative bias, mask and softmax

with q and k linear in the normalised stream (their own norms' scales frozen) and R rotary. Neither the scale nor the
way of rotating is stated the same way by any two model classes, so the known ways are candidates; a reading is right
when the softmax of its scores is the model's own pattern. In cross-attention i is a position of the decoder, j one of
the encoder's output, and nothing is added for their distance.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, grouped_products
from tensorlens_tl.hooks import capture
from tensorlens_tl.models.parameters import Latent, NormWeights
from tensorlens_tl.passes.attention_scores.encodings import alibis, relative_bias, rotations
from tensorlens_tl.passes.block_maps import BlockMaps

ALL = slice(None)
"""Every query."""


@dataclass(frozen=True, eq=False)
class CrossStreams:
    """What a decoder block's cross-attention reads.

    Attributes:
        queries: the decoder's stream, before the norm that queries are read after.
        keys: the encoder's output, which values are read from as well.
    """

    queries: Float[Tensor, "batch decoder d_model"]
    keys: Float[Tensor, "batch encoder d_model"]


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
        relative: the same of T5's relative positions.
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
    relative: Float[Tensor, "head query key"] | None = None
    error: float = float("inf")

    def vectors(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch head pos d_head"], Float[Tensor, "batch kv pos d_head"]]:
        """Queries and keys as their product takes them: after norms and rotation."""
        return self.rotated(self.query(x), self.key(x))

    def rotated(
        self, query: Float[Tensor, "batch query width"], key: Float[Tensor, "batch key kv_width"]
    ) -> tuple[Float[Tensor, "batch head query d_head"], Float[Tensor, "batch kv key d_head"]]:
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
        self,
        query: Float[Tensor, "batch query width"],
        key: Float[Tensor, "batch key kv_width"],
        rows: slice | Int[Tensor, "row"] = ALL,
    ) -> Float[Tensor, "batch head row key"]:
        """The same from what `query` and `key` give, of some queries."""
        q, k = self.rotated(query, key)
        return self.scale * grouped_products(q[:, :, rows], k)

    def finished(
        self, scores: Float[Tensor, "batch head row key"], rows: slice | Int[Tensor, "row"] = ALL
    ) -> Float[Tensor, "batch head row key"]:
        """The same after soft cap and what is added for positions, as they enter the mask and the softmax."""
        return self.placed(self.capped(scores), rows)

    def capped(self, scores: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Scores after the soft cap; the same where there is none."""
        if self.soft_cap is None:
            return scores
        return self.soft_cap * torch.tanh(scores / self.soft_cap)

    def placed(
        self, scores: Float[Tensor, "batch head row key"], rows: slice | Int[Tensor, "row"] = ALL
    ) -> Float[Tensor, "batch head row key"]:
        """With what is added for positions, of some queries."""
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
    """The known ways in which a layer may compute its scores; the one that its configuration states comes first.

    Args:
        maps: of what was captured, up to the layer's attention at least.
        layer: which one.
        before: the norm before attention, by name, or None.
        added: see `added_positions`.
        alibi_positions: for how many positions to compute ALiBi; None for all.
        cross: what cross-attention reads, for its scores; None for those of self-attention.

    Raises:
        UnsupportedModelError: the layer has no query and key weights that are read.
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
    """The stream that a block reads, at the positions that it acts on."""
    return maps.capture.resid_read(layer)[:, slice(*maps.capture.side(layer))]


def score_projections(
    maps: BlockMaps, layer: int, before: str | None, added: Tensor | None = None, *, crossing: bool = False
) -> tuple[HeadProjection, HeadProjection]:
    """How a layer reads queries and keys; arguments as of `score_candidates`.

    Raises:
        UnsupportedModelError: the layer has no query and key weights that are read.
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
            return None  # a centred one is not read: the proof then fails
        return replace(weights_of, epsilon=weights.epsilon)

    queries = Linear(weights.W_Q, weights.b_Q)
    keys = Linear(weights.W_K, weights.b_K)
    return (
        HeadProjection(of_queries, queries, attention.heads, norm(weights.q_norm), weights.query_latent),
        HeadProjection(of_keys, keys, attention.kv_heads, norm(weights.k_norm), weights.key_latent),
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
