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

Of an encoder–decoder the heads of both stacks are read, and with ``cross=True`` those of cross-attention. Their keys
and values read the encoder's output, so the norm that is folded into these is the one after the encoder's last block.

Adapters (peft's LoRA and the like) are in the weights; the matrices that are returned name them as `adapters`.
"""

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.numerics import product
from tensorlens_tl.circuits.arguments import Offset, WeightsLike, Whole
from tensorlens_tl.circuits.weights.layer_weights import (
    LayerWeights,
    as_pass,
    as_view,
    circuit_adapters,
    factored,
    pass_if_folding,
    readable_view,
    refuse_whitened,
    stream_unembedding,
)
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.operator import chosen_head

if TYPE_CHECKING:
    from transformer_lens import FactoredMatrix


@checked_names
def ov(
    model: WeightsLike, layer: Whole, head: Whole, *, cross: bool = False, fold_norms: bool = False
) -> "FactoredMatrix":
    """``W_V W_O`` of one head, `[d_model, d_model]` of rank d_head.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which one.
        cross: a head of an encoder–decoder's cross-attention instead of self-attention: it maps the encoder's output
            to the decoder's stream.
        fold_norms: see the module.

    Raises:
        InvalidInputError: no such layer or head.

    >>> tlens.circuits.ov(model, 0, 0).shape
    torch.Size([128, 128])
    """
    layer, head = chosen_head(readable_view(model), layer, head, cross=cross)
    weights = LayerWeights.of(pass_if_folding(model, fold_norms), layer, fold_norms, cross=cross)
    return factored(weights.V[head], weights.O[head], weights.adapters)


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
    """``W_Q R(offset) W_Kᵀ`` of one head, `[d_model, d_model]` of rank d_head, rows for the query.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which one.
        cross: a head of cross-attention, as in `ov`: the query is of the decoder's stream, the key of the encoder's
            output, and nothing is rotated.
        offset: query position minus key position; needed by rotary models, of no effect in others.
        fold_norms: see the module.

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
def full_ov(model: WeightsLike, layer: Whole, head: Whole, *, fold_norms: bool = False) -> "FactoredMatrix":
    """``W_E W_V W_O W_U``, `[d_vocab, d_vocab]`: what a head writes to the logits for each token it reads.

    Raises:
        InvalidInputError: no such layer or head.
        UnsupportedModelError: no readable embedding or unembedding, or a prediction head between them.

    >>> tlens.circuits.full_ov(model, 0, 0).shape == (model.cfg.d_vocab, model.cfg.d_vocab)
    True
    """
    view = as_view(model, "full_ov")
    circuit = ov(model, layer, head, fold_norms=fold_norms)
    refuse_whitened(view, "full_ov")
    adapters = {*circuit_adapters(circuit), *view.end_adapters}
    return factored(
        product(view.embedding, circuit.A), product(circuit.B, stream_unembedding(view, fold_norms)), sorted(adapters)
    )


@checked_names
def full_qk(
    model: WeightsLike, layer: Whole, head: Whole, *, offset: Offset = None, fold_norms: bool = False
) -> "FactoredMatrix":
    """``W_E W_Q R W_Kᵀ W_Eᵀ``, `[d_vocab, d_vocab]`: how much one token, as query, attends to another, as key.

    Raises:
        InvalidInputError, UnsupportedModelError: as `qk`; also no readable embedding.

    >>> tlens.circuits.full_qk(model, 0, 0, offset=1).shape == (model.cfg.d_vocab, model.cfg.d_vocab)
    True
    """
    view = as_view(model, "full_qk")
    circuit = qk(model, layer, head, offset=offset, fold_norms=fold_norms)
    refuse_whitened(view, "full_qk")
    adapters = {*circuit_adapters(circuit), *view.end_adapters}
    return factored(product(view.embedding, circuit.A), product(circuit.B, view.embedding.T), sorted(adapters))


@checked_names
def virtual_head(model: WeightsLike, heads: Any, *, fold_norms: bool = False) -> "FactoredMatrix":
    """The OV circuit of heads one after the other, ``W_OV¹ W_OV² …`` (Elhage et al. 2021).

    Args:
        model: a model or a `FrozenPass`.
        heads: ``[(layer, head), …]`` in the order of the model, or their names, ``["L0H1", "L2.cross.H3"]``: in an
            encoder–decoder a head of cross-attention may follow one of the encoder.
        fold_norms: see the module.

    Raises:
        InvalidInputError: fewer than one head, no such head, layers that do not ascend, or a head that does not read
            what the one before writes.

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
    """A head of a layer, of self-attention or of cross-attention."""

    layer: int
    number: int
    cross: bool = False

    def __str__(self) -> str:
        return f"L{self.layer}.cross.H{self.number}" if self.cross else f"L{self.layer}H{self.number}"


def _chosen_heads(heads: Any) -> list[_Head]:
    """Heads, each as ``(layer, head)`` or by its name."""
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
    """Raise `InvalidInputError` for a head that does not read what the one before it writes."""
    of_encoder = [head.layer < view.encoder_layers for head in (before, after)]
    if after.cross and not of_encoder[0]:
        raise InvalidInputError(
            f"virtual_head: {after} reads the encoder's output, which {before} does not write to; only a head of the "
            "encoder may come before it."
        )
    if not after.cross and of_encoder[0] and not of_encoder[1]:
        raise InvalidInputError(
            f"virtual_head: {after} does not read what {before} writes: between encoder and decoder stands a head of "
            "cross-attention."
        )
    if after.layer <= before.layer:
        raise InvalidInputError(
            f"virtual_head: each head must be in a later layer than the one before, got {before} and {after}."
        )
