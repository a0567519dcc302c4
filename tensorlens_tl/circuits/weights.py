"""OV and QK circuits read from the weights alone (Elhage et al. 2021), as TransformerLens `FactoredMatrix`.

Vectors are rows: an OV circuit maps a source's stream x to ``x W_V W_O``, a QK circuit gives the score
``x_query W_Q R W_Kᵀ x_key`` (without the factor 1/√d_head; R rotates by the distance between the two). With
grouped-query attention a head is a query head, with the values and keys of its group.

Functions take a model or a `FrozenPass`. Folding, and everything about scores, needs the block's layout, for which a
model is frozen on a few tokens; pass a `FrozenPass` to avoid doing so repeatedly.

With ``fold_norms=True`` the gain and the centring of the norm before the head are folded into the weights that read the
stream (and the gains of the head's query and key norms, and a norm after the sublayer into the output weights). The
norm's shift would be a bias and is left out, and so is its denominator, which depends on the input. Norms of the
residual stream itself (post-LN) belong to no head.

In an encoder–decoder the heads of both stacks are available, and with ``cross=True`` those of cross-attention. Their
keys and values read the encoder's output, so the norm that is folded into these is the one after the encoder's last
block.

Adapters (peft's LoRA and the like) are included in the weights; returned matrices name them in `adapters`.

Eigenvalues, copying scores and singular directions interpret circuits as tokens. Composition scores measure how much
heads of later layers read from heads of earlier ones: for an earlier head's OV circuit A and a later head's circuit B,
the score is ‖AB‖_F / (‖A‖_F ‖B‖_F), with B the later head's OV circuit (V-composition), its QK circuit (Q-composition)
or its transpose (K-composition). With ``A = V₁O₁`` and ``B = r₂l₂`` (reading and other side) the norm needs only
d_head × d_head matrices: ``‖AB‖² = tr(V₁ᵀV₁ · C · l₂l₂ᵀ · Cᵀ)``, ``C = O₁r₂``; no d_model × d_model matrix is formed.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Complex, Float
from torch import Tensor

from tensorlens_tl._arguments import Number, check_choice, checked_names, whole_number
from tensorlens_tl.algebra.numerics import product, refuse_nan, upcast
from tensorlens_tl.circuits.arguments import HeadList, Offset, WeightsLike, Whole
from tensorlens_tl.circuits.scores import score_reading
from tensorlens_tl.errors import InvalidInputError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import other_hooks
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.passes.attention_scores import ScoreReading
from tensorlens_tl.passes.target import check_crossing, chosen_head, token_label

if TYPE_CHECKING:
    import pandas as pd
    from transformer_lens import FactoredMatrix

# ------------------------------------------------------------------ the weights of a layer by head

HeadMatrix = Float[Tensor, "*head d_model d_head"]


class LayerWeights(NamedTuple):
    """Weights by query head, of one layer or of several, folded and rotated according to the options.

    Attributes:
        V, O: of values and outputs.
        Q, K: of queries, with the rotation, and of keys; None where only OV is read.
    """

    V: Float[Tensor, "*layer head d_model d_head"]
    O: Float[Tensor, "*layer head d_head d_model"]  # noqa: E741 (the field's own name)
    Q: Float[Tensor, "*layer head d_model d_head"] | None = None
    K: Float[Tensor, "*layer head d_model d_head"] | None = None

    @classmethod
    def of(cls, source: ModelView | FrozenPass, layer: int, fold_norms: bool, *, cross: bool = False) -> "LayerWeights":
        """Read the values and outputs of a layer; folding needs a pass, for the block's layout."""
        block = readable_view(source).blocks[layer]
        weights = block.require_cross_attention() if cross else block.require_plain_attention()
        group = weights.heads // weights.kv_heads
        V = rearrange(weights.W_V, "m (kv d) -> kv m d", kv=weights.kv_heads).repeat_interleave(group, dim=0)
        O = rearrange(weights.W_O, "(h d) m -> h d m", h=weights.heads)  # noqa: E741
        _, before_values, after = _norms(source, layer, fold_norms, cross)
        return cls(_reading(V, before_values), _writing(O, after))

    @classmethod
    def with_scores(
        cls, frozen: FrozenPass, layer: int, fold_norms: bool, offset: int | None, *, cross: bool = False
    ) -> "LayerWeights":
        """Read a layer's weights including queries and keys."""
        block = frozen.view.blocks[layer]
        weights = block.cross_query_key if cross else block.query_key
        reading = score_reading(frozen, layer, cross=cross)
        Q = rearrange(weights.W_Q, "m (h d) -> h m d", h=reading.heads)
        K = rearrange(weights.W_K, "m (kv d) -> kv m d", kv=reading.kv_heads)
        before_queries, before_keys, _ = _norms(frozen, layer, fold_norms, cross)
        if fold_norms:
            Q = _head_norm_gain(Q, weights.q_norm)
            K = _head_norm_gain(K, weights.k_norm)
        Q = _rotated(_reading(Q, before_queries), reading, offset)
        K = _reading(K, before_keys).repeat_interleave(reading.heads // reading.kv_heads, dim=0)
        return cls.of(frozen, layer, fold_norms, cross=cross)._replace(Q=Q, K=K)


def _norms(
    source: ModelView | FrozenPass, layer: int, fold_norms: bool, cross: bool
) -> tuple[NormWeights | None, NormWeights | None, NormWeights | None]:
    """Return the norms to fold for a layer's attention, None for none: before queries, before values, and after.

    Keys read through the norm before values: in cross-attention the one after the encoder's last block.
    """
    if not fold_norms or not isinstance(source, FrozenPass):
        return None, None, None
    norms = source.view.blocks[layer].norms
    at = source.layouts[layer].attn
    if cross:
        at = source.layouts[layer].cross or at
    before = norms.get(at.before or "")
    return before, source.view.encoder_norm if cross else before, norms.get(at.after or "")


def _rotated(Q: HeadMatrix, reading: ScoreReading, offset: int | None) -> HeadMatrix:
    """Return query weights times R(query − key)."""
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
    """Fold the gain and centring of the norm before them into weights that read the stream."""
    if norm is None:
        return W
    if norm.gain is not None:
        W = norm.gain[:, None] * W
    if norm.centre:
        W = W - W.mean(-2, keepdim=True)
    return W


def _writing(W: HeadMatrix, norm: NormWeights | None) -> HeadMatrix:
    """Fold the centring and gain of the norm after them into weights that write to the stream."""
    if norm is None:
        return W
    if norm.centre:
        W = W - W.mean(-1, keepdim=True)
    if norm.gain is not None:
        W = W * norm.gain
    return W


def _head_norm_gain(W: HeadMatrix, norm: NormWeights | None) -> HeadMatrix:
    """Fold the gain of the norm after query or key weights into them, per head or over all of them."""
    if norm is None or norm.gain is None:
        return W
    if norm.gain.numel() == W.shape[-1]:
        return W * norm.gain
    return W * rearrange(norm.gain, "(h d) -> h 1 d", h=len(W))


def stream_unembedding(view: ModelView, fold_norms: bool) -> Float[Tensor, "d_model d_vocab"]:
    """Return W_U as it reads the stream, with the final norm's gain and centring folded in where requested.

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


def refuse_whitened(view: ModelView, what: str) -> None:
    """Reject products of a head's matrices with another part's in a model that whitens the stream between the two.

    Raises:
        UnsupportedModelError: the model is whitened.
    """
    if view.is_whitened:
        raise UnsupportedModelError(
            f"{what}: {view.description} is whitened: between a head and the parts that it reads from or writes to "
            "stands a recursion over positions, which is not in any product of weight matrices. Use functions of a "
            "frozen pass: logit_attribution, paths, contribution_graph."
        )


def readable_view(model: WeightsLike) -> ModelView:
    """Return the view of a model, or of a pass's model, which may be an encoder–decoder."""
    if isinstance(model, FrozenPass):
        model.check_fresh()
        model = model.view
    if not isinstance(model, ModelView):
        model = ModelView(model)
    return model


def as_view(model: WeightsLike, what: str = "the weights of heads") -> ModelView:
    """Return the view of a model with a single stack; `what` is the subject of the error for others."""
    view = readable_view(model)
    view.refuse_encoder_decoder(what)
    return view


def pass_if_folding(model: WeightsLike, fold_norms: bool) -> ModelView | FrozenPass:
    """Return the source of weights: folding needs a pass, for the blocks' layouts."""
    if fold_norms:
        return as_pass(model)
    return readable_view(model)


def as_pass(model: WeightsLike, offset: Offset = None) -> FrozenPass:
    """Return a pass long enough for a distance between two tokens: the given one, or one on arbitrary tokens.

    Raises:
        InvalidInputError: the offset is not an integer, or does not fit into the context; or hooks on the model fail
            on so few tokens.
    """
    view = readable_view(model)
    if offset is not None:
        most = view.n_ctx - 1
        offset = whole_number("offset", offset, -most, most, why=f"within the context of {view.n_ctx} tokens")
    length = min(1 + max(2, abs(offset or 0)), view.n_ctx)  # three tokens determine a layer's layout
    if isinstance(model, FrozenPass) and min(model.sides or model.tokens.shape[1:]) >= length:
        return model
    tokens = torch.arange(length)[None] % view.d_vocab
    written = tokens if view.is_encoder_decoder else None
    try:
        return freeze(view.model, tokens, decoder_input_ids=written)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        hooks = other_hooks(view.model)
        if isinstance(error, TensorLensError) or not hooks:
            raise
        raise InvalidInputError(
            f"the hooks on this {view.description} (at {', '.join(hooks[:4])}) do not run on {length} tokens, needed "
            f"to find out how attention scores are computed: {type(error).__name__}: {error}. Pass a frozen pass of "
            "a prompt that they fit, or remove them."
        ) from error


def factored(A: Tensor, B: Tensor, adapters: Sequence[str] = ()) -> "FactoredMatrix":
    """Return A·B as TransformerLens' type, in the wider dtype of the two, with the names of its `adapters`."""
    from transformer_lens import FactoredMatrix

    wide = torch.promote_types(A.dtype, B.dtype)
    matrix = FactoredMatrix(A.to(wide), B.to(wide))
    vars(matrix)["adapters"] = tuple(adapters)
    return matrix


def circuit_adapters(matrix: "FactoredMatrix") -> tuple[str, ...]:
    """Return the names of the adapters in a circuit."""
    return vars(matrix).get("adapters", ())


# ------------------------------------------------------------------ the circuits of heads


@checked_names
def ov(
    model: WeightsLike, layer: Whole, head: Whole, *, cross: bool = False, fold_norms: bool = False
) -> "FactoredMatrix":
    """Return ``W_V W_O`` of one head, `[d_model, d_model]` of rank d_head.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which head.
        cross: take a head of an encoder–decoder's cross-attention instead of self-attention: it maps the encoder's
            output to the decoder's stream.
        fold_norms: True multiplies the gain and the centring of the norm before the head into the weights (see
            `tensorlens_tl.circuits.weights`). False, the default, uses the weights as they are: already folded in a
            `HookedTransformer` that was loaded with ``fold_ln``, raw in a `TransformerBridge`.

    Raises:
        InvalidInputError: no such layer or head.

    >>> tlens.circuits.ov(model, 0, 0).shape
    torch.Size([128, 128])
    """
    layer, head = chosen_head(readable_view(model), layer, head, cross=cross)
    weights = LayerWeights.of(pass_if_folding(model, fold_norms), layer, fold_norms, cross=cross)
    adapters = readable_view(model).blocks[layer].adapters("VO", cross=cross)
    return factored(weights.V[head], weights.O[head], adapters)


@checked_names
def qk(
    model: WeightsLike,
    layer: Whole,
    head: Whole,
    *,
    cross: bool = False,
    offset: Offset = None,
    fold_norms: bool = False,
) -> "FactoredMatrix":
    """Return ``W_Q R(offset) W_Kᵀ`` of one head, `[d_model, d_model]` of rank d_head, with queries as rows.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which head.
        cross: take a head of cross-attention, as in `ov`: the query reads the decoder's stream, the key the encoder's
            output, and nothing is rotated.
        offset: query position minus key position; required by rotary models, without effect in others.
        fold_norms: see `ov`; False by default.

    Raises:
        InvalidInputError: no such layer or head; a rotary model without an offset, or one outside the context.
        UnsupportedModelError: the layer's scores cannot be read.

    >>> tlens.circuits.qk(model, 0, 0).shape
    torch.Size([128, 128])
    """
    layer, head = chosen_head(readable_view(model), layer, head, cross=cross)
    weights = LayerWeights.with_scores(as_pass(model, offset), layer, fold_norms, offset, cross=cross)
    assert weights.Q is not None
    assert weights.K is not None
    adapters = readable_view(model).blocks[layer].adapters("QK", cross=cross)
    return factored(weights.Q[head], weights.K[head].T, adapters)


@checked_names
def full_ov(
    model: WeightsLike, layer: Whole, head: Whole, *, tokens: Sequence[int] | None = None, fold_norms: bool = False
) -> "FactoredMatrix":
    """Return ``W_E W_V W_O W_U``, `[d_vocab, d_vocab]`: a head's effect on the logits for each token it reads.

    Args:
        model, layer, head: as in `ov`.
        tokens: token ids whose rows to compute, `[token, d_vocab]`; all tokens by default.
        fold_norms: see `ov`; False by default.

    Raises:
        InvalidInputError: no such layer, head or token.
        UnsupportedModelError: no readable embedding or unembedding, or a prediction head between them.

    >>> tlens.circuits.full_ov(model, 0, 0).shape == (model.cfg.d_vocab, model.cfg.d_vocab)
    True
    """
    view = as_view(model, "full_ov")
    circuit = ov(model, layer, head, fold_norms=fold_norms)
    refuse_whitened(view, "full_ov")
    last = stream_unembedding(view, fold_norms)
    if tokens is None:
        return _between_tokens(view, circuit, last)
    if not isinstance(tokens, Iterable):
        raise InvalidInputError(f"tokens={tokens!r}: pass a list of token ids.")
    read = torch.tensor([whole_number("tokens", token, 0, len(view.embedding) - 1) for token in tokens]).long()
    written = product(product(view.embedding[read.to(view.embedding.device)], circuit.A), circuit.B)
    return factored(written, last, _end_adapters(view, circuit))


@checked_names
def full_qk(
    model: WeightsLike, layer: Whole, head: Whole, *, offset: Offset = None, fold_norms: bool = False
) -> "FactoredMatrix":
    """Return ``W_E W_Q R W_Kᵀ W_Eᵀ``, `[d_vocab, d_vocab]`: how much one token, as query, attends to another, as key.

    Args:
        model, layer, head, offset: as in `qk`.
        fold_norms: see `ov`; False by default.

    Raises:
        InvalidInputError, UnsupportedModelError: as for `qk`; also no readable embedding.

    >>> tlens.circuits.full_qk(model, 0, 0, offset=1).shape == (model.cfg.d_vocab, model.cfg.d_vocab)
    True
    """
    view = as_view(model, "full_qk")
    circuit = qk(model, layer, head, offset=offset, fold_norms=fold_norms)
    refuse_whitened(view, "full_qk")
    return _between_tokens(view, circuit, view.embedding.T)


def _between_tokens(view: ModelView, circuit: "FactoredMatrix", last: Float[Tensor, "d_model d_vocab"]) -> Any:
    """Return a circuit from the embedding of every token, followed by `last`."""
    return factored(product(view.embedding, circuit.A), product(circuit.B, last), _end_adapters(view, circuit))


def _end_adapters(view: ModelView, circuit: "FactoredMatrix") -> list[str]:
    """Return the adapters in a circuit, the embedding or the unembedding."""
    return sorted({*circuit_adapters(circuit), *view.end_adapters})


@checked_names
def virtual_head(model: WeightsLike, heads: HeadList, *, fold_norms: bool = False) -> "FactoredMatrix":
    """Return the OV circuit of heads applied one after the other, ``W_OV¹ W_OV² …`` (Elhage et al. 2021).

    Args:
        model: a model or a `FrozenPass`.
        heads: ``[(layer, head), …]`` in the order of the model, or their names, ``["L0H1", "L2.cross.H3"]``: in an
            encoder–decoder a head of cross-attention may follow one of the encoder.
        fold_norms: see `ov`; False by default.

    Raises:
        InvalidInputError: fewer than one head, no such head, layers that do not ascend, or a head that cannot read the
            output of the one before.

    >>> tlens.circuits.virtual_head(model, [(0, 1), (1, 2)]).shape
    torch.Size([128, 128])
    """
    chosen = _chosen_heads(heads)
    view = readable_view(model)
    for before, after in pairwise(chosen):
        _check_order(view, before, after)
    refuse_whitened(view, "virtual_head")
    source = pass_if_folding(model, fold_norms)
    circuits = [ov(source, head.layer, head.number, cross=head.cross, fold_norms=fold_norms) for head in chosen]
    left = circuits[0].A
    for before, after in pairwise(circuits):
        left = product(left, product(before.B, after.A))  # [d_model, d_head] throughout
    return factored(left, circuits[-1].B, sorted({name for circuit in circuits for name in circuit_adapters(circuit)}))


class _Head(NamedTuple):
    """A head of a layer, in self-attention or cross-attention."""

    layer: int
    number: int
    cross: bool = False

    def __str__(self) -> str:
        return f"L{self.layer}.cross.H{self.number}" if self.cross else f"L{self.layer}H{self.number}"


def _chosen_heads(heads: Any) -> list[_Head]:
    """Parse heads, each given as ``(layer, head)`` or by name."""
    chosen: list[_Head] = []
    try:
        for head in heads:
            match = re.fullmatch(r"L(\d+)(\.cross\.)?H(\d+)", head) if isinstance(head, str) else None
            if match is not None:
                chosen.append(_Head(int(match[1]), int(match[3]), match[2] is not None))
            else:
                layer, number = head
                chosen.append(_Head(whole_number("layer", layer), whole_number("head", number)))
    except (TypeError, ValueError):
        chosen = []
    if not chosen or isinstance(heads, str):
        raise InvalidInputError("virtual_head: pass one or more heads as [(layer, head), …], or their names.")
    return chosen


def _check_order(view: ModelView, before: _Head, after: _Head) -> None:
    """Raise `InvalidInputError` if a head cannot read the output of the one before it."""
    of_encoder = [head.layer < view.encoder_layers for head in (before, after)]
    if after.cross and not of_encoder[0]:
        raise InvalidInputError(
            f"virtual_head: {after} reads the encoder's output, which {before} does not write to; only a head of the "
            "encoder may come before it."
        )
    if not after.cross and of_encoder[0] and not of_encoder[1]:
        raise InvalidInputError(
            f"virtual_head: {after} does not read what {before} writes: only heads of cross-attention lead from the "
            "encoder to the decoder."
        )
    if after.layer <= before.layer:
        raise InvalidInputError(
            f"virtual_head: each head must be in a later layer than the one before, got {before} and {after}."
        )


# ------------------------------------------------------------------ circuits read as tokens


@checked_names
def ov_eigenvalues(
    model: WeightsLike, layer: Whole, head: Whole, *, fold_norms: bool = False
) -> Complex[Tensor, "d_head"]:
    """Return the non-zero eigenvalues of `full_ov`, largest first: positive ones copy tokens, negative ones suppress.

    Args:
        model, layer, head: as in `ov`.
        fold_norms: see `ov`; False by default.

    >>> tlens.circuits.ov_eigenvalues(model, 0, 0).shape  # at most d_head are non-zero
    torch.Size([32])
    """
    unembedding, embedding = _square_vocabulary(as_view(model, "ov_eigenvalues"), fold_norms)
    circuit = ov(model, layer, head, fold_norms=fold_norms)
    values = torch.linalg.eigvals(upcast(circuit.B) @ unembedding @ embedding @ upcast(circuit.A))
    return values[values.abs().argsort(descending=True)]


@checked_names
def copying_scores(model: WeightsLike, *, fold_norms: bool = False) -> Float[Tensor, "layer head"]:
    """Compute Σλ / Σ|λ| over the eigenvalues of every head's `full_ov`: 1 copies, −1 suppresses (Elhage et al. 2021).

    Args:
        model: as in `ov`.
        fold_norms: see `ov`; False by default.

    >>> bool((tlens.circuits.copying_scores(model).abs() <= 1).all())
    True
    """
    view = as_view(model, "copying_scores")
    unembedding, embedding = _square_vocabulary(view, fold_norms)
    through = unembedding @ embedding  # [d_model, d_model]: the vocabulary once, for all heads
    source = pass_if_folding(model, fold_norms)
    scores = []
    for layer in range(view.n_layers):
        weights = LayerWeights.of(source, layer, fold_norms)
        values = torch.linalg.eigvals(upcast(weights.O) @ through @ upcast(weights.V))
        scores.append(values.sum(-1).real / values.abs().sum(-1).clamp_min(torch.finfo(through.dtype).tiny))
    return torch.stack(scores)


@checked_names
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
    gap: Number = 1e-3,
) -> "pd.DataFrame":
    """Interpret the leading singular directions of a head's OV or QK circuit as tokens.

    A singular vector is determined only if its singular value is distinct. Directions whose neighbours differ by less
    than `gap` (relative to the largest) are therefore read together: their tokens are those with the longest
    projection on the whole subspace, which no rotation inside it changes.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which head.
        circuit: ``"ov"`` (reads through W_E, writes through W_U) or ``"qk"`` (query and key through W_E).
        k: how many directions, at least; a group is never split.
        top: tokens per list.
        offset: for ``"qk"`` of rotary models.
        fold_norms: see `ov`; here True by default, since tokens are read through the norms as well.
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
    view = as_view(model, "svd_tokens")
    refuse_whitened(view, "svd_tokens")
    if circuit == "ov":
        matrix = ov(model, layer, head, fold_norms=fold_norms)
        tables = {"reads": view.embedding, "writes": stream_unembedding(view, fold_norms).T}
    else:
        matrix = qk(model, layer, head, offset=offset, fold_norms=fold_norms)
        tables = {"query": view.embedding, "key": view.embedding}
    adapters = circuit_adapters(matrix)
    matrix = factored(upcast(matrix.A), upcast(matrix.B))
    rank = min(matrix.A.shape[-1], matrix.S.shape[-1])
    groups = _direction_groups(matrix.S[:rank], k, gap)
    projections = {
        name: upcast(table) @ vectors[:, : groups[-1].stop]
        for (name, table), vectors in zip(tables.items(), (matrix.U, matrix.V), strict=True)
    }
    rows = []
    for group in groups:
        members = slice(group.start, group.stop)
        row: dict[str, Any] = {"singular_values": tuple(matrix.S[members].tolist()), "dimensions": len(group)}
        rows.append(row | _token_lists(view, {name: on[:, members] for name, on in projections.items()}, top))
    frame = pd.DataFrame(rows)
    frame.attrs["adapters"] = sorted({*adapters, *view.end_adapters})
    return frame


def _direction_groups(values: Float[Tensor, "rank"], k: int, gap: float) -> list[range]:
    """Return the first k directions, grouped where their singular values are closer than the gap."""
    groups = []
    start = 0
    while start < min(k, len(values)):
        stop = start + 1
        while stop < len(values) and float(values[stop - 1] - values[stop]) < gap * float(values[0]):
            stop += 1
        groups.append(range(start, stop))
        start = stop
    return groups


def _token_lists(
    view: ModelView, projections: dict[str, Float[Tensor, "d_vocab direction"]], top: int
) -> dict[str, list[str] | None]:
    """List the tokens with the longest projection on one direction, by sign, or on a subspace, which has none."""
    lists: dict[str, list[str] | None] = {}
    *_, writes = projections.values()
    alone = writes.shape[1] == 1
    # a direction's own sign is arbitrary: make the strongest token that it writes positive
    sign = -1.0 if alone and -float(writes.min()) > float(writes.max()) else 1.0
    for name, tokens in projections.items():
        strengths = sign * tokens[:, 0] if alone else tokens.norm(dim=-1)
        lists[name] = _tokens(view, strengths, top)
        lists[f"{name}_negative"] = _tokens(view, -strengths, top) if alone else None
    return lists


def _square_vocabulary(view: ModelView, fold_norms: bool) -> tuple[Tensor, Tensor]:
    """Return unembedding and embedding of the same tokens, in a dtype wide enough for eigenvalues."""
    refuse_whitened(view, "copying")
    W_U = stream_unembedding(view, fold_norms)
    W_E = view.embedding
    if W_U.shape[1] != W_E.shape[0]:
        raise UnsupportedModelError(
            f"{view.description} reads {W_E.shape[0]} tokens and predicts {W_U.shape[1]}: copying is not defined "
            "between two vocabularies. Use full_ov()."
        )
    return upcast(W_U), upcast(W_E)


def _tokens(view: ModelView, strengths: Float[Tensor, "d_vocab"], top: int) -> list[str]:
    return [token_label(view, token) for token in strengths.topk(min(top, len(strengths))).indices.tolist()]


# ------------------------------------------------------------------ how heads compose

if TYPE_CHECKING:
    Composition = Literal["Q", "K", "V"]
else:
    Composition = Any  # `check_choice` says what is wrong with it

KINDS: tuple[Composition, ...] = ("Q", "K", "V")


@checked_names
def composition_scores(
    model: WeightsLike,
    kind: Composition,
    *,
    from_cross: bool = False,
    to_cross: bool = False,
    baseline: str | None = None,
    offset: Offset = None,
    fold_norms: bool = False,
) -> Float[Tensor, "layer head later_layer later_head"]:
    """Compute composition scores of all pairs of heads, zero where the second cannot read the first's output.

    The scores equal ``HookedTransformer.all_composition_scores``, which leaves rotation out (``offset=0``). Heads of
    self-attention read from those of earlier layers; in an encoder–decoder, from earlier layers of their own stack.

    Args:
        model: a model or a `FrozenPass`.
        kind: ``"Q"``, ``"K"`` or ``"V"``.
        from_cross: whether the earlier heads are those of an encoder–decoder's cross-attention, whose outputs the
            decoder's heads read.
        to_cross: whether the later heads are those of cross-attention: their keys and values (``"K"``, ``"V"``) read
            the outputs of the encoder's heads, their queries (``"Q"``) those of the decoder's heads, including
            self-attention in the same layer.
        baseline: ``"random"`` subtracts the score of unrelated circuits, 1/√d_model: under a random rotation U between
            them, E‖AUB‖² = ‖A‖²‖B‖²/d_model exactly.
        offset: for Q and K in rotary models, the distance query − key at which the later head is taken.
        fold_norms: see `ov`; False by default.

    Raises:
        InvalidInputError: no such kind or baseline; a rotary model without an offset for Q or K; a model without
            cross-attention, or `from_cross` with keys or values of cross-attention, which cannot read its output.
        UnsupportedModelError: layers with different numbers of heads.
        NumericalError: scores that are NaN.

    >>> tlens.circuits.composition_scores(model, "V").shape  # layer head later_layer later_head
    torch.Size([4, 4, 4, 4])
    """
    check_choice("kind", kind, KINDS)
    if baseline not in (None, "random"):
        raise InvalidInputError(f"baseline={baseline!r}; use 'random' or None.")
    view = readable_view(model)
    refuse_whitened(view, "composition_scores")
    if from_cross or to_cross:
        check_crossing(view, view.n_layers - 1)
    if from_cross and to_cross and kind != "Q":
        raise InvalidInputError(
            f"kind={kind!r}: keys and values of cross-attention read the encoder's output, to which no head of "
            "cross-attention writes. Use kind='Q', or leave from_cross or to_cross out."
        )
    source = view
    if kind != "V" or fold_norms:
        source = as_pass(model, offset)  # once for all layers
    later = earlier = _of_all_layers(source, kind, fold_norms, offset, to_cross)
    if from_cross != to_cross:
        earlier = _of_all_layers(source, "V", fold_norms, offset, from_cross)
    first = {cross: view.encoder_layers if cross else 0 for cross in (False, True)}
    reads, others = {"V": (later.V, later.O.mT), "Q": (later.Q, later.K), "K": (later.K, later.Q)}[kind]
    assert reads is not None
    assert others is not None
    result = earlier.O.new_zeros(view.n_layers, earlier.O.shape[1], view.n_layers, reads.shape[1])
    for layer in range(first[from_cross], view.n_layers):
        readers = _readers(view, layer, kind, from_cross, to_cross)
        if not readers:
            continue
        chosen = [reader - first[to_cross] for reader in readers]
        at = layer - first[from_cross]
        ratios = _ratios(earlier.V[at], earlier.O[at], reads[chosen], others[chosen])
        if baseline == "random":
            ratios = ratios - earlier.O.shape[-1] ** -0.5
        result[layer][:, readers] = ratios
    refuse_nan("composition_scores", result)
    return result


def _of_all_layers(
    source: ModelView | FrozenPass, kind: str, fold_norms: bool, offset: int | None, cross: bool
) -> LayerWeights:
    """Stack the heads of all layers that have them, in a wide dtype; for kind V without queries and keys.

    Raises:
        UnsupportedModelError: layers with different numbers of heads.
    """
    view = readable_view(source)
    layers: list[LayerWeights] = []
    for number in range(view.encoder_layers if cross else 0, view.n_layers):
        if kind == "V":
            layers.append(LayerWeights.of(source, number, fold_norms, cross=cross))
        else:
            assert isinstance(source, FrozenPass)
            layers.append(LayerWeights.with_scores(source, number, fold_norms, offset, cross=cross))
    if len({layer.V.shape for layer in layers}) > 1:
        raise UnsupportedModelError(
            f"{view.description}: its layers have different numbers of heads, which do not fit one table."
        )

    def stacked(name: str) -> Any:
        parts = [getattr(layer, name) for layer in layers]
        return None if parts[0] is None else upcast(torch.stack(parts))

    return LayerWeights(*map(stacked, LayerWeights._fields))


def _readers(view: ModelView, layer: int, kind: str, from_cross: bool, to_cross: bool) -> list[int]:
    """Return the layers whose heads read the outputs of one layer's heads."""
    of_encoder = layer < view.encoder_layers
    if to_cross and of_encoder == (kind == "Q"):  # keys and values read the encoder, queries the decoder
        return []
    if to_cross and of_encoder:
        return list(range(view.encoder_layers, view.n_layers))
    first = layer + 1
    if to_cross and not from_cross:  # it follows self-attention in the same block
        first = layer
    return list(range(first, view.encoder_layers if of_encoder else view.n_layers))


def _ratios(
    V: Float[Tensor, "head d_model d_head"],
    O: Float[Tensor, "head d_head d_model"],  # noqa: E741
    reads: Float[Tensor, "later_layer later_head d_model d_read"],
    others: Float[Tensor, "later_layer later_head d_model d_read"],
) -> Float[Tensor, "head later_layer later_head"]:
    """Compute ``‖AB‖ / (‖A‖ ‖B‖)`` of one layer's heads with the circuits of later ones, given by both their sides."""
    gram_v = V.mT @ V
    gram_other = others.mT @ others
    norms = (gram_v * (O @ O.mT)).sum((-2, -1)).sqrt()
    later_norms = ((reads.mT @ reads) * gram_other).sum((-2, -1)).sqrt()
    C = rearrange(O @ rearrange(reads, "l h m d -> m (l h d)"), "e a (p d) -> e p a d", d=reads.shape[-1])
    other = rearrange(gram_other, "l h a d -> (l h) a d")
    squares = ((gram_v[:, None] @ C) * (C @ other)).sum((-2, -1)).clamp_min(0)
    sizes = norms[:, None] * later_norms.flatten()
    ratios = squares.sqrt() / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return rearrange(ratios, "e (l h) -> e l h", h=reads.shape[1])
