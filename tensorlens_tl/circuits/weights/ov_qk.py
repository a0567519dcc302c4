"""OV and QK circuits read from the weights alone (Elhage et al. 2021), as TransformerLens `FactoredMatrix`.

Vectors are rows: an OV circuit maps a source's stream x to ``x W_V W_O``, a QK circuit gives the score
``x_query W_Q R W_Kᵀ x_key`` (without the factor 1/√d_head; R rotates by the distance between the two). With
grouped-query attention a head is a query head, and its values and keys are those of the group it belongs to.

Functions take a model or a `FrozenPass`. Folding, and every question about scores, needs to know how a block is put
together: a model is frozen on a few tokens for that, so who asks often passes a pass.

With ``fold_norms=True`` the gain and the centring of the norm that feeds the head are folded into what it reads (and
the gains of the head's query and key norms, and a norm after the sublayer into what it writes); the norm's shift
would be a bias and is left out, and so is its denominator, which depends on the input. Norms of the residual stream
itself (post-LN) belong to no head.

Adapters (peft's LoRA and the like) are in the weights; the matrices that are returned name them as `adapters`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Complex, Float
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.numerics import product, upcast
from tensorlens_tl.circuits.arguments import Offset, WeightsLike, Whole
from tensorlens_tl.circuits.scores import ScoreReading, score_reading
from tensorlens_tl.errors import InvalidInputError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import other_hooks
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.passes.operator import chosen_head, token_label

if TYPE_CHECKING:
    import pandas as pd
    from transformer_lens import FactoredMatrix

HeadMatrix = Float[Tensor, "*head d_model d_head"]


def ov(model: WeightsLike, layer: Whole, head: Whole, *, fold_norms: bool = False) -> "FactoredMatrix":
    """``W_V W_O`` of one head, `[d_model, d_model]` of rank d_head.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which one.
        fold_norms: see the module.

    Raises:
        InvalidInputError: no such layer or head.

    >>> tlens.circuits.ov(model, 0, 0).shape
    torch.Size([128, 128])
    """
    layer, head = chosen_head(as_view(model), layer, head)
    weights = LayerWeights.of(as_pass(model) if fold_norms else as_view(model), layer, fold_norms)
    return factored(weights.V[head], weights.O[head], weights.adapters)


def qk(
    model: WeightsLike, layer: Whole, head: Whole, *, offset: Offset = None, fold_norms: bool = False
) -> "FactoredMatrix":
    """``W_Q R(offset) W_Kᵀ`` of one head, `[d_model, d_model]` of rank d_head, rows for the query.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which one.
        offset: query position minus key position; needed by rotary models, of no effect in others.
        fold_norms: see the module.

    Raises:
        InvalidInputError: no such layer or head; a rotary model without an offset, or one outside the context.
        UnsupportedModelError: the layer's scores cannot be read.

    >>> tlens.circuits.qk(model, 0, 0).shape
    torch.Size([128, 128])
    """
    layer, head = chosen_head(as_view(model), layer, head)
    weights = LayerWeights.with_scores(as_pass(model, offset), layer, fold_norms, offset)
    assert weights.Q is not None
    assert weights.K is not None
    return factored(weights.Q[head], weights.K[head].T, as_view(model).blocks[layer].adapters("QK"))


def full_ov(model: WeightsLike, layer: Whole, head: Whole, *, fold_norms: bool = False) -> "FactoredMatrix":
    """``W_E W_V W_O W_U``, `[d_vocab, d_vocab]`: what a head writes to the logits for each token it reads.

    Raises:
        InvalidInputError: no such layer or head.
        UnsupportedModelError: no readable embedding or unembedding, or a prediction head between them.

    >>> tlens.circuits.full_ov(model, 0, 0).shape == (model.cfg.d_vocab, model.cfg.d_vocab)
    True
    """
    view = as_view(model)
    circuit = ov(model, layer, head, fold_norms=fold_norms)
    refuse_whitened(view, "full_ov")
    adapters = {*circuit_adapters(circuit), *view.end_adapters}
    return factored(
        product(view.embedding, circuit.A), product(circuit.B, stream_unembedding(view, fold_norms)), sorted(adapters)
    )


def full_qk(
    model: WeightsLike, layer: Whole, head: Whole, *, offset: Offset = None, fold_norms: bool = False
) -> "FactoredMatrix":
    """``W_E W_Q R W_Kᵀ W_Eᵀ``, `[d_vocab, d_vocab]`: how much one token, as query, attends to another, as key.

    Raises:
        InvalidInputError, UnsupportedModelError: as `qk`; also no readable embedding.

    >>> tlens.circuits.full_qk(model, 0, 0, offset=1).shape == (model.cfg.d_vocab, model.cfg.d_vocab)
    True
    """
    view = as_view(model)
    circuit = qk(model, layer, head, offset=offset, fold_norms=fold_norms)
    refuse_whitened(view, "full_qk")
    adapters = {*circuit_adapters(circuit), *view.end_adapters}
    return factored(product(view.embedding, circuit.A), product(circuit.B, view.embedding.T), sorted(adapters))


def ov_eigenvalues(
    model: WeightsLike, layer: Whole, head: Whole, *, fold_norms: bool = False
) -> Complex[Tensor, "d_head"]:
    """The non-zero eigenvalues of `full_ov`, largest first: positive ones copy tokens, negative ones suppress them.

    >>> tlens.circuits.ov_eigenvalues(model, 0, 0).shape  # d_head of them are not zero
    torch.Size([32])
    """
    unembedding, embedding = _square_vocabulary(as_view(model), fold_norms)
    circuit = ov(model, layer, head, fold_norms=fold_norms)
    values = torch.linalg.eigvals(upcast(circuit.B) @ unembedding @ embedding @ upcast(circuit.A))
    return values[values.abs().argsort(descending=True)]


def copying_scores(model: WeightsLike, *, fold_norms: bool = False) -> Float[Tensor, "layer head"]:
    """Σλ / Σ|λ| over the eigenvalues of every head's `full_ov`: 1 copies, −1 suppresses (Elhage et al. 2021).

    >>> bool((tlens.circuits.copying_scores(model).abs() <= 1).all())
    True
    """
    view = as_view(model)
    unembedding, embedding = _square_vocabulary(view, fold_norms)
    through = unembedding @ embedding  # [d_model, d_model]: the vocabulary once, for all heads
    source = _source(model, fold_norms)
    scores = []
    for layer in range(view.n_layers):
        weights = LayerWeights.of(source, layer, fold_norms)
        values = torch.linalg.eigvals(upcast(weights.O) @ through @ upcast(weights.V))
        scores.append(values.sum(-1).real / values.abs().sum(-1).clamp_min(torch.finfo(through.dtype).tiny))
    return torch.stack(scores)


def svd_tokens(
    model: WeightsLike,
    layer: Whole,
    head: Whole,
    *,
    circuit: str = "ov",
    k: Whole = 5,
    top: Whole = 8,
    offset: Offset = None,
    fold_norms: bool = True,
    gap: Any = 1e-3,
) -> "pd.DataFrame":
    """The leading singular directions of a head's OV or QK circuit, read as tokens.

    A singular vector is only determined where its singular value stands apart. Directions whose neighbours differ by
    less than `gap` (relative to the largest) are therefore read together: their tokens are those with the longest
    projection on the whole subspace, which no rotation inside it changes.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which one.
        circuit: ``"ov"`` (reads through W_E, writes through W_U) or ``"qk"`` (query and key through W_E).
        k: how many directions, at least; a group is never cut.
        top: tokens per list.
        offset: for ``"qk"`` of rotary models.
        fold_norms: see the module.
        gap: the smallest relative distance at which neighbours count as separate.

    Returns:
        One row per direction or group: `singular_values`, `dimensions`, and token lists `reads`, `writes` (for QK
        `query`, `key`) and their opposites, `…_negative` (None for a group, which has no sign).

    Raises:
        InvalidInputError: no such circuit, layer or head; k or top below 1.

    >>> tlens.circuits.svd_tokens(model, 0, 0, k=2, top=3).shape
    (2, 6)
    """
    import pandas as pd

    if circuit not in ("ov", "qk"):
        raise InvalidInputError(f"circuit={circuit!r}; use 'ov' or 'qk'.")
    k = whole_number("k", k, 1)
    top = whole_number("top", top, 1)
    view = as_view(model)
    refuse_whitened(view, "svd_tokens")
    if circuit == "ov":
        matrix = ov(model, layer, head, fold_norms=fold_norms)
        tables = {"reads": view.embedding, "writes": stream_unembedding(view, fold_norms).T}
    else:
        matrix = qk(model, layer, head, offset=offset, fold_norms=fold_norms)
        tables = {"query": view.embedding, "key": view.embedding}
    matrix = factored(upcast(matrix.A), upcast(matrix.B), circuit_adapters(matrix))
    sides = {
        name: (vectors, upcast(table))
        for (name, table), vectors in zip(tables.items(), (matrix.U, matrix.V), strict=True)
    }
    values = matrix.S
    rank = min(matrix.A.shape[-1], matrix.S.shape[-1])
    rows = []
    start = 0
    while start < min(k, rank):
        stop = start + 1
        while stop < rank and float(values[stop - 1] - values[stop]) < gap * float(values[0]):
            stop += 1
        row: dict[str, Any] = {"singular_values": tuple(values[start:stop].tolist()), "dimensions": stop - start}
        projected = {name: table @ vectors[:, start:stop] for name, (vectors, table) in sides.items()}
        if stop - start > 1:
            for name, tokens in projected.items():
                row[name] = _tokens(view, tokens.norm(dim=-1), top)
                row[f"{name}_negative"] = None
        else:
            writes = list(projected.values())[-1]
            sign = 1.0
            if -float(writes.min()) > float(writes.max()):  # the strongest token is a positive one
                sign = -1.0
            for name, tokens in projected.items():
                row[name] = _tokens(view, sign * tokens[:, 0], top)
                row[f"{name}_negative"] = _tokens(view, -sign * tokens[:, 0], top)
        rows.append(row)
        start = stop
    frame = pd.DataFrame(rows)
    frame.attrs["adapters"] = sorted({*circuit_adapters(matrix), *view.end_adapters})
    return frame


def virtual_head(model: WeightsLike, heads: Any, *, fold_norms: bool = False) -> "FactoredMatrix":
    """The OV circuit of heads one after the other, ``W_OV¹ W_OV² …`` (Elhage et al. 2021).

    Args:
        model: a model or a `FrozenPass`.
        heads: ``[(layer, head), …]`` in the order of the model.
        fold_norms: see the module.

    Raises:
        InvalidInputError: fewer than one head, no such head, or layers that do not ascend.

    >>> tlens.circuits.virtual_head(model, [(0, 1), (1, 2)]).shape
    torch.Size([128, 128])
    """
    try:
        heads = [(whole_number("layer", layer), whole_number("head", head)) for layer, head in heads]
    except (TypeError, ValueError):
        heads = []
    if not heads:
        raise InvalidInputError("virtual_head: pass one or more heads as [(layer, head), …].")
    layers = [layer for layer, _ in heads]
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise InvalidInputError(f"virtual_head: each head must be in a later layer than the one before, got {heads}.")
    refuse_whitened(as_view(model), "virtual_head")
    source = _source(model, fold_norms)
    circuits = [ov(source, layer, head, fold_norms=fold_norms) for layer, head in heads]
    left = circuits[0].A
    for before, after in pairwise(circuits):
        left = product(left, product(before.B, after.A))  # [d_model, d_head] throughout
    return factored(left, circuits[-1].B, sorted({name for circuit in circuits for name in circuit_adapters(circuit)}))


# ------------------------------------------------------------------ the weights of one layer


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's weights by query head, folded and rotated as the options say.

    Attributes:
        V: `[head, d_model, d_head]`.
        O: `[head, d_head, d_model]`.
        Q, K: `[head, d_model, d_head]`, the rotation in Q; None where only OV is read.
        adapters: the names of those that are in V and O.
    """

    V: Float[Tensor, "head d_model d_head"]
    O: Float[Tensor, "head d_head d_model"]  # noqa: E741 (the field's own name)
    Q: Float[Tensor, "head d_model d_head"] | None = None
    K: Float[Tensor, "head d_model d_head"] | None = None
    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: ModelView | FrozenPass, layer: int, fold_norms: bool) -> "LayerWeights":
        """Values and outputs; folding needs a pass, which knows how the block is put together."""
        block = as_view(source).blocks[layer]
        weights = block.plain_attention
        group = weights.heads // weights.kv_heads
        V = rearrange(weights.W_V, "m (kv d) -> kv m d", kv=weights.kv_heads).repeat_interleave(group, dim=0)
        O = rearrange(weights.W_O, "(h d) m -> h d m", h=weights.heads)  # noqa: E741
        before, after = _norms_around(source, layer, fold_norms)
        return cls(_reading(V, before), _writing(O, after), adapters=block.adapters("VO"))

    @classmethod
    def with_scores(cls, frozen: FrozenPass, layer: int, fold_norms: bool, offset: int | None) -> "LayerWeights":
        """The same with queries and keys."""
        weights = frozen.view.blocks[layer].query_key
        reading = score_reading(frozen, layer)
        Q = rearrange(weights.W_Q, "m (h d) -> h m d", h=reading.heads)
        K = rearrange(weights.W_K, "m (kv d) -> kv m d", kv=reading.kv_heads)
        before, _ = _norms_around(frozen, layer, fold_norms)
        if fold_norms:
            Q = _head_norm_gain(Q, weights.q_norm)
            K = _head_norm_gain(K, weights.k_norm)
        K = _reading(K, before).repeat_interleave(reading.heads // reading.kv_heads, dim=0)
        return replace(cls.of(frozen, layer, fold_norms), Q=_rotated(_reading(Q, before), reading, offset), K=K)


def _norms_around(
    source: ModelView | FrozenPass, layer: int, fold_norms: bool
) -> tuple[NormWeights | None, NormWeights | None]:
    """The norms before and after attention that are to be folded."""
    if not fold_norms or not isinstance(source, FrozenPass):
        return None, None
    norms = source.view.blocks[layer].norms
    at = source.layouts[layer].attn
    return norms.get(at.before or ""), norms.get(at.after or "")


def _rotated(Q: HeadMatrix, reading: ScoreReading, offset: int | None) -> HeadMatrix:
    """Query weights times R(query − key)."""
    if reading.rotation is None:
        return Q
    if offset is None:
        raise InvalidInputError(
            "offset: this model rotates queries and keys, so its QK circuit depends on their distance; pass "
            "offset=query position − key position."
        )
    R = reading.rotation
    return product(Q, R[max(offset, 0)] @ R[max(-offset, 0)].T)


def _reading(W: HeadMatrix, norm: NormWeights | None) -> HeadMatrix:
    """Weights that read the stream, with the gain and centring of the norm before them inside."""
    if norm is None:
        return W
    if norm.gain is not None:
        W = norm.gain[:, None] * W
    if norm.centre:
        W = W - W.mean(-2, keepdim=True)
    return W


def _writing(W: HeadMatrix, norm: NormWeights | None) -> HeadMatrix:
    """Weights that write to the stream, with the centring and gain of the norm after them inside."""
    if norm is None:
        return W
    if norm.centre:
        W = W - W.mean(-1, keepdim=True)
    if norm.gain is not None:
        W = W * norm.gain
    return W


def _head_norm_gain(W: HeadMatrix, norm: NormWeights | None) -> HeadMatrix:
    """Query or key weights with the gain of the norm after them, per head or over all of them."""
    if norm is None or norm.gain is None:
        return W
    if norm.gain.numel() == W.shape[-1]:
        return W * norm.gain
    return W * rearrange(norm.gain, "(h d) -> h 1 d", h=len(W))


def stream_unembedding(view: ModelView, fold_norms: bool) -> Float[Tensor, "d_model d_vocab"]:
    """W_U as it reads the stream: with the final norm's gain and centring inside, where they are to be folded.

    Raises:
        UnsupportedModelError: a model that predicts no tokens, or has a head with an activation before W_U.
    """
    if view.unembedding is None:
        raise UnsupportedModelError(f"{view.description} predicts no tokens.")
    if view.mlm_head is not None:
        raise UnsupportedModelError(
            f"{view.description}: a prediction head with an activation lies between the stream and the unembedding, "
            "so no matrix leads from tokens to logits. Use ov() and qk(), or logit_attribution() on a frozen pass."
        )
    W_U = view.unembedding[0]
    if fold_norms:
        W_U = _reading(W_U, view.final_norm)
    return W_U


def _square_vocabulary(view: ModelView, fold_norms: bool) -> tuple[Tensor, Tensor]:
    """Unembedding and embedding of the same tokens, wide enough for eigenvalues."""
    refuse_whitened(view, "copying")
    W_U = stream_unembedding(view, fold_norms)
    W_E = view.embedding
    if W_U.shape[1] != W_E.shape[0]:
        raise UnsupportedModelError(
            f"{view.description} reads {W_E.shape[0]} tokens and predicts {W_U.shape[1]}: copying is not defined "
            "between two vocabularies. Use full_ov()."
        )
    return upcast(W_U), upcast(W_E)


def refuse_whitened(view: ModelView, what: str) -> None:
    """Refuse to multiply a head's matrices with another part's where whitening stands between the two.

    Raises:
        UnsupportedModelError: the model is whitened.
    """
    if view.is_whitened:
        raise UnsupportedModelError(
            f"{what}: {view.description} is whitened, so between a head and what it reads or is read by stands a "
            "recursion over positions, which no product of two weight matrices holds. Use what takes a frozen pass: "
            "logit_attribution, paths, contribution_graph."
        )


def as_view(model: WeightsLike) -> ModelView:
    """The reading of a model, or of a pass's model."""
    if isinstance(model, FrozenPass):
        model.check_fresh()
        model = model.view
    if not isinstance(model, ModelView):
        model = ModelView(model)
    model.refuse_encoder_decoder("the weights of heads")
    return model


def _source(model: WeightsLike, fold_norms: bool) -> ModelView | FrozenPass:
    """What weights are read from: folding needs a pass, which knows how the blocks are put together."""
    if fold_norms:
        return as_pass(model)
    return as_view(model)


def as_pass(model: WeightsLike, offset: Offset = None) -> FrozenPass:
    """A pass long enough for a distance between two tokens: the one given, or one on tokens of no meaning.

    Raises:
        InvalidInputError: the offset is no integer, or does not fit into the context; or hooks on the model do not run
            on so few tokens.
    """
    view = as_view(model)
    if offset is not None:
        most = view.n_ctx - 1
        offset = whole_number("offset", offset, -most, most, why=f"within the context of {view.n_ctx} tokens")
    length = min(1 + max(2, abs(offset or 0)), view.n_ctx)  # three settle how a layer is put together
    if isinstance(model, FrozenPass) and model.tokens.shape[1] >= length:
        return model
    tokens = torch.arange(length)[None] % view.d_vocab
    try:
        return freeze(view.model, tokens)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        hooks = other_hooks(view.model)
        if isinstance(error, TensorLensError) or not hooks:
            raise
        raise InvalidInputError(
            f"the hooks on this {view.description} (at {', '.join(hooks[:4])}) do not run on {length} tokens, by which "
            f"it is read how its attention scores are made: {type(error).__name__}: {error}. Pass a frozen pass of a "
            "prompt that they fit, or take them off."
        ) from error


def factored(A: Tensor, B: Tensor, adapters: Sequence[str] = ()) -> "FactoredMatrix":
    """A·B as TransformerLens' own type, in the wider dtype of the two; its `adapters` names those that are in it."""
    from transformer_lens import FactoredMatrix

    wide = torch.promote_types(A.dtype, B.dtype)
    matrix = FactoredMatrix(A.to(wide), B.to(wide))
    vars(matrix)["adapters"] = tuple(adapters)
    return matrix


def circuit_adapters(matrix: "FactoredMatrix") -> tuple[str, ...]:
    """The names of the adapters that are in a circuit."""
    return vars(matrix).get("adapters", ())


def _tokens(view: ModelView, strengths: Float[Tensor, "d_vocab"], top: int) -> list[str]:
    return [token_label(view, token) for token in strengths.topk(min(top, len(strengths))).indices.tolist()]
