"""Contributions between the tokens of one layer, and the aggregation of layer maps `[layer, batch, query, key]`.

With v_j^h the value of source token j in head h (b_V included, through the frozen norm that feeds attention)
and u_j^h = v_j^h·W_O^h, the attention contribution is ``a_ij = Σ_h A^h_ij u_j^h``; b_O belongs to no token. A norm
after the sublayer (sandwich, post-only) is part of it and is applied by its linear part only.

Norms of all pairs come from one Gram matrix of heads per source token, since a frozen norm is a fixed linear map of
the channels times a factor of the query: ``‖Σ_h A^h_ij u_j^h‖² = Σ_hh' A^h_ij A^h'_ij ⟨u_j^h, u_j^h'⟩``. So neither
`[head, query, key, d_model]` nor `[query, key, d_model]` is formed for them.

A decoder block of an encoder–decoder has two such layers: self-attention, whose tokens are the decoder's, and then
cross-attention, whose keys are the encoder's tokens and whose values read the encoder's output.

An encoder–decoder is one sequence, its encoder's tokens before its decoder's. An encoder block's map relates the
encoder's tokens, and a decoder block's has a row for each of the decoder's tokens with columns for both sides:
cross-attention's, and self-attention's. At the tokens of the other side, which the block leaves unchanged, every map is
the identity; so the product of all maps follows the encoder's tokens through the encoder into the decoder, as ALTI+
does (Ferrando et al. 2022, "Towards opening the black box of neural machine translation").
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import Whole, checked_names, whole_number
from tensorlens_tl.algebra import (
    AnyAttention,
    CausalConvolution,
    Chain,
    Diagonal,
    Identity,
    Linear,
    Norm,
    SelectiveScan,
    Sum,
    ones_at,
    stages_of,
)
from tensorlens_tl.algebra.memory import Memory, check_size, chunks
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import Place, Query
from tensorlens_tl.models.parameters import AttentionWeights
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.inputs import is_all, query_positions
from tensorlens_tl.results import AXES, Attribution

__all__ = [
    "LocalLayer",
    "Maps",
    "MapsOfAttentions",
    "add_residual",
    "attentions_of",
    "by_attention",
    "implicit_attention",
    "locals_of",
    "mean_of_layers",
    "normalize_rows",
    "of_layers",
    "only_acting",
    "product",
    "refuse_whitened",
    "select_query",
    "side_by_side",
    "through",
]

VECTOR_BUDGET = 32 * 2**20
"""Bytes of pair vectors that exist at once."""


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """The attention of one layer of a frozen pass, by what its source tokens (keys) contribute to its queries.

    Attributes:
        frozen, layer: the pass, and the number of the layer.
        with_biases: whether a source token's value includes b_V and what a norm before attention adds.
        is_cross: whether it is the cross-attention of an encoder–decoder's decoder block.
    """

    frozen: FrozenPass
    layer: int
    with_biases: bool = True
    is_cross: bool = False

    def __post_init__(self) -> None:
        self.frozen.view.require_single_streams("what the tokens of one layer give each other (layer maps)")
        self.frozen.maps.additions(self.layer)  # rejects a patch

    @property
    def queries(self) -> slice:
        """The positions of its queries: all, or those of one side of an encoder–decoder."""
        return slice(*self.frozen.capture.side(self.layer))

    @property
    def keys(self) -> slice:
        """The positions of its source tokens: those of the queries, or for cross-attention the encoder's."""
        if self.is_cross:
            return slice(0, self.queries.start)
        return self.queries

    @property
    def cross(self) -> "LocalLayer | None":
        """The cross-attention after self-attention in its block, if any."""
        if self.is_cross or self.frozen.layouts[self.layer].cross is None:
            return None
        return replace(self, is_cross=True)

    @cached_property
    def x(self) -> Float[Tensor, "batch query d_model"]:
        """The residual stream at the queries, which the block's sublayers read; in a whitened block, after whitening.

        For cross-attention, the stream after self-attention.
        """
        if self.is_cross:
            return replace(self, is_cross=False).attended()
        return self.frozen.capture.resid_read(self.layer)[:, self.queries]

    @cached_property
    def pattern(self) -> Float[Tensor, "batch head query key"]:
        """Attention probabilities, in the stream's dtype."""
        if self.is_cross:
            return self.frozen.capture.cross_pattern(self.layer).to(self.x.dtype)
        return self.frozen.maps.pattern(self.layer).to(self.x.dtype)

    @property
    def weights(self) -> AttentionWeights:
        """The weights of its attention."""
        block = self.frozen.view.blocks[self.layer]
        return block.require_cross_attention() if self.is_cross else block.attention

    @cached_property
    def outputs(self) -> Float[Tensor, "batch key head d_model"]:
        """u: each source token's value multiplied by its head's part of W_O."""
        weights = self.weights
        if weights.output_factor is not None:
            raise UnsupportedModelError(
                f"blocks.{self.layer} of this {self.frozen.view.description}: a gate or a norm scales the outputs of "
                "its heads by what the receiving token is, so a source token has no single vector for all queries. "
                "Methods over the operator (tensorlens, decompx) work."
            )
        if self.is_cross:
            values = Chain((Linear(weights.W_V, weights.b_V),))
            read = self.frozen.resid_pre(self.layer)[:, self.keys]
        else:
            values = Chain((*self.norms(self.attn.before), self.frozen.maps.attention(self.layer).stages[0]))
            read = self.x
        v = values(read) if self.with_biases else values.push(read)
        v = rearrange(v, "b k (kv d) -> b k kv d", kv=weights.kv_heads)
        v = v.repeat_interleave(weights.heads // weights.kv_heads, dim=2)
        return torch.einsum("bkhd,hdm->bkhm", v, rearrange(weights.W_O.to(v), "(h d) m -> h d m", h=weights.heads))

    @property
    def attn(self) -> Place:
        """The norms around attention, by name."""
        layout = self.frozen.layouts[self.layer]
        if self.is_cross:
            assert layout.cross is not None
            return layout.cross
        return layout.attn

    @property
    def mlp(self) -> Place:
        """The norms around the MLP, by name."""
        return self.frozen.layouts[self.layer].mlp

    def norms(self, *names: str | None) -> tuple[Norm, ...]:
        """Return the named norms, without those that are None."""
        return tuple(self.frozen.maps.norm(self.layer, name) for name in names if name is not None)

    @cached_property
    def pairs(self) -> Bool[Tensor, "batch query key"]:
        """True where query and key are both real tokens."""
        mask = self.frozen.mask
        return mask[:, self.queries, None] & mask[:, None, self.keys]

    @property
    def outer(self) -> tuple[Norm, ...]:
        """The norms around the sums of stream and attention: its own, and that of any cross-attention after it."""
        around = self.norms(self.attn.outer)
        return around if self.cross is None else (*around, *self.cross.outer)

    def with_stream(
        self, pairs: Float[Tensor, "batch query key"], stream: Float[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query column"]:
        """Combine source tokens' contributions and the stream's in one map.

        The stream is the diagonal, or in cross-attention further columns after those of the encoder's tokens.
        """
        diagonal = torch.diag_embed(stream)
        if self.is_cross:
            return torch.cat([pairs, diagonal], dim=-1)
        return pairs + diagonal

    def attended(self) -> Float[Tensor, "batch query d_model"]:
        """Return the residual stream after attention with its biases, and after the norm around the sum, if any."""
        y = self.attention_sum()
        for norm in self.norms(self.attn.outer):
            y = norm(y)
        return y

    def attention_sum(self) -> Float[Tensor, "batch query d_model"]:
        """Return the residual stream plus what attention adds, biases included, before any norm around the sum."""
        if self.is_cross:
            return self.x + self._crossed()
        stream = self.frozen.maps.attention(self.layer)
        for norm in self.norms(self.attn.before):
            stream = stream @ norm
        for norm in self.norms(self.attn.after):
            stream = norm @ stream
        added, _ = self.frozen.maps.stream_offsets(self.layer)
        return Chain((Identity(), *added))(stream(self.x) + self.x)

    def _crossed(self) -> Float[Tensor, "batch query d_model"]:
        """Return what cross-attention adds to the stream, biases included."""
        within = self.frozen.maps.within(self.layer)
        assert within is not None
        assert within.read is not None
        assert within.out is not None
        mixed = within.read(self.frozen.resid_pre(self.layer))[:, self.queries]
        return Chain((within.out, *self.norms(self.attn.after)))(mixed)

    @property
    def mlp_write(self) -> Chain | None:
        """The map from the stream to what the following MLP adds to it, with norms before and after; None without one.

        In a decoder block the MLP follows cross-attention.
        """
        mlp = None
        if self.cross is None:
            mlp = self.frozen.maps.mlp(self.layer)
        if mlp is None:
            return None
        added = [offset for point, offset in self.frozen.maps.additions(self.layer).items() if point.place == "mlp"]
        return Chain((*self.norms(self.mlp.before), *stages_of(mlp), *self.norms(self.mlp.after), *added))

    # ------------------------------------------------------------------ norms of all pairs

    def head_norms(self) -> Float[Tensor, "batch head query key"]:
        """Compute ‖A^h_ij u_j^h‖ per head (without any norm after the sublayer, which joins the heads)."""
        return self.pattern * rearrange(self.outputs.norm(dim=-1), "b k h -> b h 1 k") * self.pairs[:, None]

    def pair_norms(self, outer: Sequence[Norm] = (), *, residual: bool = False) -> Float[Tensor, "batch query key"]:
        """Compute ‖N(a_ij + δ_ij x_i)‖ for all pairs, with N the linear parts of `outer`, at the query's scale.

        Args:
            outer: frozen norms applied to the sum, in order.
            residual: whether to add the residual stream's own x_i on the diagonal.
        """
        after = self.norms(self.attn.after)
        transformed = self.outputs
        for norm in (*after, *outer):
            transformed = _unscaled(norm).push(transformed)
        gram = transformed @ transformed.mT
        weights = rearrange(self.pattern, "b h q k -> b k q h")
        squares = ((weights @ gram) * weights).sum(-1).mT
        scores = squares.clamp_min(0).sqrt()
        for norm in (*after, *outer):
            scores = scores / norm.scale.to(scores.dtype)
        if residual:
            itself, _ = self.itself_and_others(outer, residual=True)
            scores = torch.diagonal_scatter(scores, itself.norm(dim=-1), dim1=-2, dim2=-1)
        return scores * self.pairs

    def itself_and_others(
        self, outer: Sequence[Norm] = (), *, residual: bool = False
    ) -> tuple[Float[Tensor, "batch query d_model"], Float[Tensor, "batch query d_model"]]:
        """Return a token's own part, ``N(a_ii + x_i)``, and what the others contribute, ``N(Σ_{j≠i} a_ij)``."""
        after = self.norms(self.attn.after)
        diagonal = self.pattern.diagonal(dim1=-2, dim2=-1)
        itself = torch.einsum("bhi,bihm->bim", diagonal, self.outputs)
        others = torch.einsum("bhqk,bkhm->bqm", self.pattern, self.outputs) - itself
        itself = through(after, itself)
        if residual:
            itself = itself + self.x
        return through(outer, itself), through(outer, through(after, others))

    def head_distances(self, sums: Float[Tensor, "batch query d_model"]) -> Float[Tensor, "batch head query key"]:
        """Compute ‖y_i − A^h_ij u_j^h‖₁ for every head and pair, through any norm after the sublayer.

        `sums` is y, one vector for each query.
        """
        outputs = self.outputs
        shares = self.pattern
        for norm in self.norms(self.attn.after):
            outputs = _unscaled(norm).push(outputs)
            shares = shares / norm.scale[:, None].to(shares.dtype)
        sums = upcast(sums)
        outputs = upcast(rearrange(outputs, "b k h m -> (k h) b 1 m"))
        shares = upcast(rearrange(shares, "b h q k -> (k h) b q 1"))
        distances = sums.norm(p=1, dim=-1).repeat(len(shares), 1, 1)
        step = max(1, VECTOR_BUDGET // (sums.numel() * sums.element_size()))
        for start in range(0, len(shares), step):
            rows = slice(start, start + step)
            reached = slice(None)
            if self.frozen.causal:
                reached = slice(start // self.pattern.shape[1], None)
            away = torch.addcmul(sums[:, reached], shares[rows, :, reached], outputs[rows], value=-1)
            distances[rows, :, reached] = away.norm(p=1, dim=-1)
        return rearrange(distances, "(k h) b q -> b h q k", h=self.pattern.shape[1])

    # ------------------------------------------------------------------ vectors, a few source tokens at a time

    def vectors(
        self,
        outer: Sequence[Norm] = (),
        *,
        residual: bool = False,
        width: int | None = None,
        budget: int = VECTOR_BUDGET,
    ) -> Iterator[tuple[slice, Float[Tensor, "rows batch query d_model"]]]:
        """Yield ``N(a_ij + δ_ij x_i)`` in chunks: a slice of source tokens, and their vectors as rows.

        Args:
            outer, residual: as in `pair_norms`.
            width: how many channels the caller needs per vector, if more than d_model; sizes the chunks.
            budget: how many bytes a chunk may allocate.
        """
        batch, queries, d_model = self.x.shape
        per_row = batch * queries * max(width or 0, d_model) * self.x.element_size()
        step = max(1, budget // per_row)
        count = self.pairs.shape[-1]
        for start in range(0, count, step):
            keys = slice(start, min(start + step, count))
            rows = torch.einsum("bhqk,bkhm->kbqm", self.pattern[..., keys], self.outputs[:, keys])
            rows = through(self.norms(self.attn.after), rows)
            if residual:
                number = torch.arange(keys.stop - keys.start, device=rows.device)
                rows[number, :, number + start] += self.x[:, keys].transpose(0, 1)
            yield keys, through(outer, rows)


def _unscaled(norm: Norm) -> Norm:
    """Return a norm without its denominator: its action on the channels of any vector."""
    return replace(norm, scale=torch.ones_like(norm.scale[:1, :1]))


def through(norms: Sequence[Norm], x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Apply the linear parts of frozen norms in order."""
    for norm in norms:
        x = norm.push(x)
    return x


@checked_names
def implicit_attention(
    frozen: PassLike, layer: Whole, *, channels: bool = False, memory: Memory = None
) -> Float[Tensor, "batch head query key"]:
    """Return how much each query takes from each key in one layer, by head; averaged if every channel is a head.

    For pictures alongside attention patterns: the matrix that takes the pattern's place in other layers, with
    everything that depends on the input frozen.

    | the layer | matrix of a head | heads |
    | --- | --- | --- |
    | softmax attention | its pattern | its own |
    | a state-space layer | α of `SelectiveScan` (Ali, Zimerman & Wolf 2024) | its own |
    | the gated delta rule | M of `tensorlens_tl.models.mixers` | its own |
    | a gated short convolution | ``C_i·w_{i−j}·B_j`` of a channel | every channel |
    | time mixing (RWKV) | the weights of a channel's mean | every channel |

    In Mamba 1 every channel is a head of its own as well. All but patterns and the weights of means have negative
    numbers, and rows that do not sum to 1. None of them includes what lies before and after: value and output weights,
    and for mixers the short convolution, the activation, the gates and D, through which tokens reach each other as
    well. `FrozenPass.mixer` includes all of it.

    Args:
        frozen: the pass.
        layer: which layer.
        channels: if every channel is a head of its own (Mamba 1, short convolutions), return each of them with its
            sign, instead of the mean of their absolute values.
        memory: how much the mean may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        One or more heads; zero at padding.

    Raises:
        InvalidInputError: no such layer, or `channels` where heads have several channels.
        SizeError: larger than `tensorlens_tl.algebra.memory.MOST_BYTES`.

    >>> import tensorlens_tl as tlens
    >>> from tensorlens_tl.testing import tiny_model
    >>> frozen = tlens.freeze(tiny_model("bridge/mamba"), [[3, 4, 5]])
    >>> tlens.implicit_attention(frozen, 0).shape, tlens.implicit_attention(frozen, 0, channels=True).shape
    (torch.Size([1, 1, 3, 3]), torch.Size([1, 32, 3, 3]))
    """
    check_pass(frozen)
    layer = whole_number("layer", layer, 0, frozen.n_layers - 1, why="a layer of this model")
    if frozen.view.blocks[layer].parts.is_mlp_alone:
        raise InvalidInputError(f"implicit_attention: layer {layer} has an MLP alone, and mixes no positions.")
    if frozen.view.blocks[layer].has_beside:
        raise InvalidInputError(
            f"implicit_attention: layer {layer} has attention and a mixer beside it, and no one matrix of both. Take "
            "frozen.pattern(layer), and scan_of(frozen.maps.beside(layer)).implicit_attention()."
        )
    attention, by_channel = _of_heads(frozen.maps.mixer(layer), channels, memory)
    if channels and not by_channel:
        raise InvalidInputError(
            f"channels: in layer {layer} the channels of a head take from the same positions; leave it out."
        )
    real = frozen.mask[:, slice(*frozen.capture.side(layer))]
    return attention * (real[:, None, :, None] & real[:, None, None, :])


def _of_heads(mixer: Chain, channels: bool, memory: Memory) -> tuple[Tensor, bool]:
    """Return the heads' matrices including padding, and whether every channel is a head of its own."""
    terms = [term for stage in mixer.stages for term in stage.summands]
    for term in terms:
        if isinstance(term, AnyAttention):
            return term.pattern, False
        if isinstance(term, SelectiveScan):
            if term.head_dim > 1 or channels:
                return term.implicit_attention(), term.head_dim == 1
            return term.mean_attention(memory)[:, None], True
    means = [stage for stage in mixer.stages if isinstance(stage, Sum) and stage.mixes]
    if means:
        like = means[0].terms[-1]
        assert isinstance(like, Diagonal)
        return _convolved(Chain((means[0],)), like.factor, channels, memory), True
    at = next(number for number, term in enumerate(terms) if isinstance(term, CausalConvolution))
    before, _, after = gated = tuple(terms[at - 1 : at + 2])
    assert isinstance(before, Diagonal)
    assert isinstance(after, Diagonal)
    return _convolved(Chain(gated), before.factor, channels, memory), True


def _convolved(gated: Chain, like: Tensor, channels: bool, memory: Memory) -> Float[Tensor, "batch head query key"]:
    """Return the matrix of a gated convolution, computed some keys at a time."""
    batch, pos, width = like.shape
    heads = width if channels else 1
    check_size("implicit_attention", (batch, heads, pos, pos), like)
    attention = like.new_empty(pos, batch, pos, heads)
    for keys in chunks(pos, 4 * like.numel() * like.element_size(), memory, "implicit attention"):
        pushed = gated.push(ones_at(keys, like))
        if not channels:
            pushed = pushed.abs().mean(-1, keepdim=True)
        attention[keys.start : keys.stop] = pushed
    return attention.permute(1, 3, 2, 0)


Maps = Float[Tensor, "layer batch query key"]
"""One map of token pairs per layer; padding is zero."""

MapsOfAttentions = Float[Tensor, "_attention batch query key"]
"""One map for each attention of a block: two in a decoder block of an encoder–decoder."""


def locals_of(frozen: FrozenPass) -> list[LocalLayer]:
    """Return every layer of a pass with a single stack as a `LocalLayer`.

    Raises:
        UnsupportedModelError: an encoder–decoder, whose decoder blocks have two attentions: see `attentions_of`.
        FrozenModelError: the model is no longer the one that the pass was taken from.
    """
    frozen.view.refuse_encoder_decoder("what the tokens of one layer give each other (locals_of)")
    return [layer for block in attentions_of(frozen) for layer in block]


def attentions_of(frozen: FrozenPass, with_biases: bool = True) -> list[tuple[LocalLayer, ...]]:
    """Return the attentions of every block as `LocalLayer`: one, or in a decoder block self- and cross-attention.

    Raises:
        FrozenModelError: the model is no longer the one that the pass was taken from.
    """
    frozen.check_fresh()
    blocks: list[tuple[LocalLayer, ...]] = []
    for number in range(frozen.n_layers):
        layer = LocalLayer(frozen, number, with_biases)
        blocks.append((layer,) if layer.cross is None else (layer, layer.cross))
    return blocks


def side_by_side(
    frozen: FrozenPass, part: Callable[[LocalLayer], Tensor], with_biases: bool = True
) -> Float[Tensor, "layer batch *head query key"]:
    """Build one map for each block, with cross-attention's columns next to those of self-attention.

    Args:
        frozen: the pass.
        part: returns the rows of one attention, `[batch, *head, query, key]` for its own queries and keys.
        with_biases: see `LocalLayer`.
    """
    maps: list[Tensor] = []
    for layers in attentions_of(frozen, with_biases):
        rows = torch.cat([part(layer) for layer in reversed(layers)], dim=-1)  # the encoder's tokens come first
        maps.append(among_all(layers[0], rows))
    return torch.stack(maps)


def by_attention(
    frozen: FrozenPass, part: Callable[[LocalLayer], Tensor], with_biases: bool = True
) -> list[MapsOfAttentions]:
    """Return for each block the maps of its attentions in order, over all positions.

    Args:
        frozen: the pass.
        part: returns the rows of one attention, with the stream's part (see `LocalLayer.with_stream`).
        with_biases: see `LocalLayer`.
    """
    blocks = attentions_of(frozen, with_biases)
    return [torch.stack([among_all(layer, part(layer)) for layer in layers]) for layers in blocks]


def among_all(layer: LocalLayer, rows: Float[Tensor, "batch *head query column"]) -> Tensor:
    """Extend the rows of one attention's queries to a map of all positions, with the identity at the others.

    `rows` has a column for every position, or for those of the queries.
    """
    frozen = layer.frozen
    if frozen.sides is None:
        return rows
    whole = torch.diag_embed(frozen.mask.to(rows.dtype))
    between = rows.shape[1:-2]
    whole = whole.view(len(whole), *(1 for _ in between), *whole.shape[1:]).repeat(1, *between, 1, 1)
    first = 0 if rows.shape[-1] == whole.shape[-1] else layer.queries.start
    whole[..., layer.queries, :] = 0
    whole[..., layer.queries, first : first + rows.shape[-1]] = rows
    return whole


def only_acting(
    frozen: FrozenPass, maps: Float[Tensor, "layer batch *head query key"]
) -> Float[Tensor, "layer batch *head query key"]:
    """Remove the identity from maps at the tokens that a block leaves unchanged: zero there."""
    if frozen.sides is None:
        return maps
    acting = torch.zeros(len(maps), maps.shape[-2], 1, dtype=maps.dtype, device=maps.device)
    for layer, rows in enumerate(acting):
        rows[slice(*frozen.capture.side(layer))] = 1
    return maps * acting.view(len(maps), *(1 for _ in maps.shape[1:-2]), *acting.shape[1:])


def mean_of_layers(
    frozen: FrozenPass, maps: Float[Tensor, "layer batch *head query key"]
) -> Float[Tensor, "batch *head query key"]:
    """Average maps over layers; in an encoder–decoder, for each token over the layers of its own side."""
    if frozen.sides is None:
        return maps.mean(0)
    encoder = frozen.sides[0]
    first = frozen.view.encoder_layers
    sides = (maps[:first, ..., :encoder, :], maps[first:, ..., encoder:, :])
    return torch.cat([side.mean(0) for side in sides], dim=-2)


def normalize_rows(maps: Float[Tensor, "*any query key"]) -> Float[Tensor, "*any query key"]:
    """Divide rows by their sum; an empty row (padding) stays zero."""
    total = maps.sum(-1, keepdim=True)
    return maps / torch.where(total == 0, torch.ones_like(total), total)


def add_residual(maps: Maps, share: float, mask: Tensor) -> Maps:
    """Return ``(1 − share)·map + share·I`` on real tokens."""
    return (1 - share) * maps + share * torch.diag_embed(mask.to(maps.dtype))


def product(maps: Maps) -> Float[Tensor, "batch query key"]:
    """Return M_L ⋯ M_2 M_1, which leads from the first layer to the last."""
    result = maps[0]
    for later in maps[1:]:
        result = later @ result
    return result


def refuse_whitened(frozen: FrozenPass, method: str) -> None:
    """Reject products of layer maps in a model with whitening, which moves vectors between positions with no factor.

    Raises:
        UnsupportedModelError: the model is whitened.
    """
    if frozen.view.is_whitened:
        raise UnsupportedModelError(
            f"{method}: the stream of this {frozen.view.description} is whitened before its blocks, which passes "
            "vectors on between positions; a product of one map per layer has no factor for that. Use tensorlens or "
            "decompx, which hold it exactly, or mean, which multiplies nothing."
        )


def select_query(frozen: FrozenPass, scores: Tensor, query: Query) -> Tensor:
    """Select the requested queries of `[batch, ..., query, key]`; "all" keeps every one."""
    if is_all(query):
        return scores
    index = query_positions(frozen.prompt, query)
    index = index.view(len(index), *(1 for _ in scores.shape[1:-2]), index.shape[1], 1)
    return torch.take_along_dim(scores, index, dim=-2)


def of_layers(
    frozen: FrozenPass,
    scores: Tensor,
    layers: Float[Tensor, "layer batch *head query key"],
    *,
    method: str,
    query: Query,
    axes: Sequence[str] = AXES,
    **options: Any,
) -> Attribution:
    """Return a method's result together with the layer maps that it aggregates.

    Args:
        frozen: the pass.
        scores: for every query, `[batch, query, key]`, or with the further axes that `axes` names.
        layers: one map for each layer.
        method, options: the method and its options, for the record.
        query: the queries to select.
    """
    return Attribution.of(
        frozen,
        select_query(frozen, scores, query),
        method=method,
        query=query,
        axes=axes,
        layers=layers,
        options={**options, "query": query},
    )
