"""How much heads of later layers read from heads of earlier ones (Elhage et al. 2021).

The score of an earlier head's OV circuit A and a later head's circuit B is ‖AB‖_F / (‖A‖_F ‖B‖_F), with B the later
head's OV circuit (V-composition), its QK circuit (Q-composition) or its transpose (K-composition). With ``A = V₁O₁``
and ``B = r₂l₂`` (reading and other side) the norm needs d_head × d_head matrices only:
``‖AB‖² = tr(V₁ᵀV₁ · C · l₂l₂ᵀ · Cᵀ)``, ``C = O₁r₂``; so no d_model × d_model matrix is ever formed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names
from tensorlens_tl.algebra.numerics import refuse_nan, upcast
from tensorlens_tl.circuits.arguments import Offset, WeightsLike
from tensorlens_tl.circuits.weights.layer_weights import LayerWeights, as_pass, readable_view, refuse_whitened
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.operator import check_crossing

KINDS = ("Q", "K", "V")


@checked_names
def composition_scores(
    model: WeightsLike,
    kind: str,
    *,
    from_cross: bool = False,
    to_cross: bool = False,
    baseline: str | None = None,
    offset: Offset = None,
    fold_norms: bool = False,
) -> Float[Tensor, "layer head later_layer later_head"]:
    """Composition scores of all pairs of heads at once, zero where the second does not read what the first writes.

    The same numbers as ``HookedTransformer.all_composition_scores``, which leaves rotation out (``offset=0``). Heads of
    self-attention read from those of earlier layers; of an encoder–decoder, of earlier layers of their own stack.

    Args:
        model: a model or a `FrozenPass`.
        kind: ``"Q"``, ``"K"`` or ``"V"``.
        from_cross: whether the earlier heads are those of an encoder–decoder's cross-attention; heads of its decoder
            read what they write.
        to_cross: whether the later heads are those of cross-attention: their keys and values (``"K"``, ``"V"``) read
            what heads of the encoder write, their queries (``"Q"``) what heads of the decoder do, of self-attention in
            the same layer as well.
        baseline: ``"random"`` subtracts what circuits without relation score, 1/√d_model: under a random rotation U
            between them E‖AUB‖² = ‖A‖²‖B‖²/d_model exactly.
        offset: for Q and K in rotary models, the distance query − key at which the later head is taken.
        fold_norms: as in `tensorlens_tl.circuits.weights.ov_qk`.

    Raises:
        InvalidInputError: no such kind or baseline; a rotary model without an offset for Q or K; a model without
            cross-attention, or keys and values of it that would read it.
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
    read = _Reader(source, fold_norms, offset)
    later = read.heads(view, kind, to_cross)
    earlier = later
    if from_cross != to_cross:
        earlier = read.heads(view, "V", from_cross)
    result = earlier.O.new_zeros(view.n_layers, earlier.O.shape[1], view.n_layers, later.reads.shape[1])
    for number, layer in enumerate(earlier.layers):
        readers = _readers(view, layer, kind, from_cross, to_cross)
        if not readers:
            continue
        ratios = _ratios(earlier, number, later, [later.layers.index(reader) for reader in readers])
        if baseline == "random":
            ratios = ratios - earlier.O.shape[-1] ** -0.5
        result[layer][:, readers] = ratios
    refuse_nan("composition_scores", result)
    return result


@dataclass(frozen=True, eq=False)
class _Heads:
    """Heads of some layers, as `composition_scores` multiplies them.

    Attributes:
        layers: their numbers.
        V, O: `[layer, head, d_model, d_head]`, `[layer, head, d_head, d_model]`.
        reads, others: the two sides of the circuit of a later head, the one that reads first, `[layer, head, d, d]`.
    """

    layers: range
    V: Float[Tensor, "layer head d_model d_head"]
    O: Float[Tensor, "layer head d_head d_model"]  # noqa: E741 (the field's own name)
    reads: Float[Tensor, "layer head d_model d_read"]
    others: Float[Tensor, "layer head d_model d_read"]


class _Reader(NamedTuple):
    """What heads' weights are read from, and how."""

    source: ModelView | FrozenPass
    fold_norms: bool
    offset: int | None

    def heads(self, view: ModelView, kind: str, cross: bool) -> _Heads:
        """The heads of all layers that have them.

        Raises:
            UnsupportedModelError: layers with different numbers of heads.
        """
        numbers = range(view.encoder_layers if cross else 0, view.n_layers)
        layers = [self._layer(number, kind, cross) for number in numbers]
        if len({layer.V.shape for layer in layers}) > 1:
            raise UnsupportedModelError(
                f"{view.description}: its layers differ in their heads, which do not fit one table."
            )
        V = upcast(torch.stack([layer.V for layer in layers]))
        O = upcast(torch.stack([layer.O for layer in layers]))  # noqa: E741
        if kind == "V":
            return _Heads(numbers, V, O, V, O.mT)
        Q = upcast(torch.stack([layer.Q for layer in layers if layer.Q is not None]))
        K = upcast(torch.stack([layer.K for layer in layers if layer.K is not None]))
        reads, others = {"Q": (Q, K), "K": (K, Q)}[kind]
        return _Heads(numbers, V, O, reads, others)

    def _layer(self, layer: int, kind: str, cross: bool) -> LayerWeights:
        if kind == "V":
            return LayerWeights.of(self.source, layer, self.fold_norms, cross=cross)
        assert isinstance(self.source, FrozenPass)
        return LayerWeights.with_scores(self.source, layer, self.fold_norms, self.offset, cross=cross)


def _readers(view: ModelView, layer: int, kind: str, from_cross: bool, to_cross: bool) -> list[int]:
    """The layers whose heads read what the heads of one layer write."""
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
    earlier: _Heads, number: int, later: _Heads, readers: list[int]
) -> Float[Tensor, "head later_layer later_head"]:
    """``‖AB‖ / (‖A‖ ‖B‖)`` of the heads of one layer with those of some later ones."""
    V = earlier.V[number]
    O = earlier.O[number]  # noqa: E741
    reads = later.reads[readers]
    gram_v = V.mT @ V
    gram_other = later.others[readers].mT @ later.others[readers]
    norms = (gram_v * (O @ O.mT)).sum((-2, -1)).sqrt()
    later_norms = ((reads.mT @ reads) * gram_other).sum((-2, -1)).sqrt()
    C = rearrange(O @ rearrange(reads, "l h m d -> m (l h d)"), "e a (p d) -> e p a d", d=reads.shape[-1])
    other = rearrange(gram_other, "l h a d -> (l h) a d")
    squares = ((gram_v[:, None] @ C) * (C @ other)).sum((-2, -1)).clamp_min(0)
    sizes = norms[:, None] * later_norms.flatten()
    ratios = squares.sqrt() / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return rearrange(ratios, "e (l h) -> e l h", h=reads.shape[1])
