"""One layer's weights by query head, as the circuits of `ov_qk` and `spectra` multiply them: folded and rotated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.numerics import product
from tensorlens_tl.circuits.arguments import Offset, WeightsLike
from tensorlens_tl.circuits.scores import ScoreReading, score_reading
from tensorlens_tl.errors import InvalidInputError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import other_hooks
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.passes import FrozenPass, freeze

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix

HeadMatrix = Float[Tensor, "*head d_model d_head"]


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
    def of(cls, source: ModelView | FrozenPass, layer: int, fold_norms: bool, *, cross: bool = False) -> "LayerWeights":
        """Values and outputs; folding needs a pass, which knows how the block is put together.

        Args:
            source: what is read.
            layer: which one.
            fold_norms: whether norms around the sublayer are inside.
            cross: those of cross-attention.
        """
        block = readable_view(source).blocks[layer]
        weights = block.require_cross_attention() if cross else block.require_plain_attention()
        group = weights.heads // weights.kv_heads
        V = rearrange(weights.W_V, "m (kv d) -> kv m d", kv=weights.kv_heads).repeat_interleave(group, dim=0)
        O = rearrange(weights.W_O, "(h d) m -> h d m", h=weights.heads)  # noqa: E741
        norms = _Norms.of(source, layer, fold_norms, cross)
        return cls(_reading(V, norms.values), _writing(O, norms.after), adapters=block.adapters("VO", cross=cross))

    @classmethod
    def with_scores(
        cls, frozen: FrozenPass, layer: int, fold_norms: bool, offset: int | None, *, cross: bool = False
    ) -> "LayerWeights":
        """The same with queries and keys."""
        block = frozen.view.blocks[layer]
        weights = block.cross_query_key if cross else block.query_key
        reading = score_reading(frozen, layer, cross=cross)
        Q = rearrange(weights.W_Q, "m (h d) -> h m d", h=reading.heads)
        K = rearrange(weights.W_K, "m (kv d) -> kv m d", kv=reading.kv_heads)
        norms = _Norms.of(frozen, layer, fold_norms, cross)
        if fold_norms:
            Q = _head_norm_gain(Q, weights.q_norm)
            K = _head_norm_gain(K, weights.k_norm)
        Q = _rotated(_reading(Q, norms.queries), reading, offset)
        K = _reading(K, norms.values).repeat_interleave(reading.heads // reading.kv_heads, dim=0)
        return replace(cls.of(frozen, layer, fold_norms, cross=cross), Q=Q, K=K)


class _Norms(NamedTuple):
    """The norms around attention that are to be folded; None for none.

    Attributes:
        queries: before its queries.
        values: before its keys and values: in cross-attention the one after the encoder's last block.
        after: of what it writes.
    """

    queries: NormWeights | None = None
    values: NormWeights | None = None
    after: NormWeights | None = None

    @classmethod
    def of(cls, source: ModelView | FrozenPass, layer: int, fold_norms: bool, cross: bool) -> "_Norms":
        """Those of a layer's self- or cross-attention."""
        if not fold_norms or not isinstance(source, FrozenPass):
            return cls()
        norms = source.view.blocks[layer].norms
        at = source.layouts[layer].attn
        if cross:
            at = source.layouts[layer].cross or at
        before = norms.get(at.before or "")
        values = source.view.encoder_norm if cross else before
        return cls(before, values, norms.get(at.after or ""))


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


def readable_view(model: WeightsLike) -> ModelView:
    """The reading of a model, or of a pass's model, which may be an encoder–decoder."""
    if isinstance(model, FrozenPass):
        model.check_fresh()
        model = model.view
    if not isinstance(model, ModelView):
        model = ModelView(model)
    return model


def as_view(model: WeightsLike, what: str = "the weights of heads") -> ModelView:
    """The reading of a model, or of a pass's model, whose heads are those of one stack.

    Args:
        model: what is read.
        what: the subject of a refusal.
    """
    view = readable_view(model)
    view.refuse_encoder_decoder(what)
    return view


def pass_if_folding(model: WeightsLike, fold_norms: bool) -> ModelView | FrozenPass:
    """What weights are read from: folding needs a pass, which knows how the blocks are put together."""
    if fold_norms:
        return as_pass(model)
    return readable_view(model)


def as_pass(model: WeightsLike, offset: Offset = None) -> FrozenPass:
    """A pass long enough for a distance between two tokens: the one given, or one on tokens of no meaning.

    Raises:
        InvalidInputError: the offset is no integer, or does not fit into the context; or hooks on the model do not run
            on so few tokens.
    """
    view = readable_view(model)
    if offset is not None:
        most = view.n_ctx - 1
        offset = whole_number("offset", offset, -most, most, why=f"within the context of {view.n_ctx} tokens")
    length = min(1 + max(2, abs(offset or 0)), view.n_ctx)  # three settle how a layer is put together
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
