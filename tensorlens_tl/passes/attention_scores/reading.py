"""The ways in which a layer may compute its attention scores, read from its weights.

    score_ij = scale · (R_i q_i)·(R_j k_j)  then soft cap, ALiBi, mask and softmax

with q and k linear in the normalised stream (their own norms' scales frozen) and R rotary. Neither the scale nor the
way of rotating is stated the same way by any two model classes, so the known ways are candidates; a reading is right
when the softmax of its scores is the model's own pattern.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, grouped_products
from tensorlens_tl.hooks import capture
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.passes.block_maps import BlockMaps


@dataclass(frozen=True, eq=False)
class ScoreReading:
    """One layer's scores as bilinear in the stream.

    Attributes:
        query, key: the stream that the block reads (`Capture.resid_read`) -> queries `[.., head d_head]` and keys
            `[.., kv d_head]`, their norms maps.
        heads, kv_heads: how many of each; query head h reads key head ``h // (heads // kv_heads)``.
        scale: the factor of the product, usually 1/√d_head.
        rotation: R for each position, applied from the right, `[pos, d_head, d_head]`; None without rotary positions.
        alibi: what is added per head after the product, `[head, query, key]`, or None.
        soft_cap: c of c·tanh(score/c), or None.
        error: the largest difference between the softmax of these scores and the model's own pattern, once measured.
    """

    query: Chain
    key: Chain
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
        q = rearrange(self.query(x), "b p (h d) -> b h p d", h=self.heads)
        k = rearrange(self.key(x), "b p (h d) -> b h p d", h=self.kv_heads)
        if self.rotation is None:
            return q, k
        rotated = partial(torch.einsum, "bhpd,pde->bhpe")
        return rotated(q, self.rotation), rotated(k, self.rotation)

    def scores(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head query key"]:
        """Scores before soft cap, ALiBi and mask."""
        return self.scale * grouped_products(*self.vectors(x))

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
    weights = maps.view.blocks[layer].query_key
    block = maps.view.blocks[layer]
    heads = block.attention.heads
    kv_heads = block.attention.kv_heads
    attn = block.module.get_submodule("attn")
    inner: nn.Module = getattr(attn, "original_component", attn)
    d_head = weights.W_Q.shape[1] // heads
    reads: list[AffineMap] = []
    if before is not None:
        reads.append(maps.norm(layer, before))
    x = maps.capture.resid_read(layer)
    if added is not None:
        offset = added.to(x).expand_as(x)
        reads.append(Diagonal(torch.ones_like(offset), offset))
    query = Chain((*reads, Linear(weights.W_Q, weights.b_Q)))
    key = Chain((*reads, Linear(weights.W_K, weights.b_K)))
    query = _normed(query, x, weights.q_norm, weights.epsilon, heads)
    key = _normed(key, x, weights.k_norm, weights.epsilon, kv_heads)
    cap = float(getattr(maps.view.cfg, "attn_scores_soft_cap", None) or 0)
    soft_cap = cap if cap > 0 else None
    scales = list(dict.fromkeys([*_stated_scales(attn, inner), d_head**-0.5, 1.0, d_head**-0.5 / (layer + 1)]))
    for rotation in _rotations(maps, attn, inner, x, d_head):
        for alibi in _alibis(maps, attn, heads, x, alibi_positions or x.shape[1]):
            for scale in scales:
                yield ScoreReading(query, key, heads, kv_heads, scale, rotation, alibi, soft_cap)


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


def _normed(project: Chain, x: Tensor, norm: NormWeights | None, epsilon: float, heads: int) -> Chain:
    """Queries or keys after their own RMSNorm (per head, or over all heads), its scale frozen: a diagonal map."""
    if norm is None or norm.centre:
        return project  # a centred one is not read: the proof then fails
    raw = project(x)
    d_head = raw.shape[-1] // heads
    groups = heads
    if norm.gain is not None and norm.gain.numel() == raw.shape[-1] != d_head:
        groups = 1
    group = rearrange(raw, "b p (h d) -> b p h d", h=groups)
    scale = (group.square().mean(-1, keepdim=True) + epsilon).sqrt()
    gain = torch.ones_like(group[0, 0, 0]) if norm.gain is None else norm.gain.to(group)
    return Chain((*project.stages, Diagonal((gain / scale).expand_as(group).flatten(-2))))


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
                if isinstance(tables, tuple) and len(tables) == 2:  # else complex numbers
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
