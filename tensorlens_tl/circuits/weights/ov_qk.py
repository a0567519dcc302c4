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

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.numerics import product
from tensorlens_tl.circuits.arguments import Offset, WeightsLike, Whole
from tensorlens_tl.circuits.weights.layer_weights import (
    LayerWeights,
    as_pass,
    as_view,
    circuit_adapters,
    factored,
    pass_if_folding,
    refuse_whitened,
    stream_unembedding,
)
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes.operator import chosen_head

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix


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
    source = pass_if_folding(model, fold_norms)
    circuits = [ov(source, layer, head, fold_norms=fold_norms) for layer, head in heads]
    left = circuits[0].A
    for before, after in pairwise(circuits):
        left = product(left, product(before.B, after.A))  # [d_model, d_head] throughout
    return factored(left, circuits[-1].B, sorted({name for circuit in circuits for name in circuit_adapters(circuit)}))
