"""How much heads of later layers read from heads of earlier ones (Elhage et al. 2021).

The score of an earlier head's OV circuit A and a later head's circuit B is ‖AB‖_F / (‖A‖_F ‖B‖_F), with B the later
head's OV circuit (V-composition), its QK circuit (Q-composition) or its transpose (K-composition). With ``A = V₁O₁``
and ``B = r₂l₂`` (reading and other side) the norm needs d_head × d_head matrices only:
``‖AB‖² = tr(V₁ᵀV₁ · C · l₂l₂ᵀ · Cᵀ)``, ``C = O₁r₂``; so no d_model × d_model matrix is ever formed.
"""

from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import Offset, WeightsLike
from tensorlens_tl.circuits.weights.layer_weights import LayerWeights, as_pass, as_view, refuse_whitened
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError

KINDS = ("Q", "K", "V")


def composition_scores(
    model: WeightsLike,
    kind: str,
    *,
    baseline: str | None = None,
    offset: Offset = None,
    fold_norms: bool = False,
) -> Float[Tensor, "layer head later_layer later_head"]:
    """Composition scores of all pairs of heads at once, zero where the second is not in a later layer.

    The same numbers as ``HookedTransformer.all_composition_scores``, which leaves rotation out (``offset=0``).

    Args:
        model: a model or a `FrozenPass`.
        kind: ``"Q"``, ``"K"`` or ``"V"``.
        baseline: ``"random"`` subtracts what circuits without relation score, 1/√d_model: under a random rotation U
            between them E‖AUB‖² = ‖A‖²‖B‖²/d_model exactly.
        offset: for Q and K in rotary models, the distance query − key at which the later head is taken.
        fold_norms: as in `tensorlens_tl.circuits.weights.ov_qk`.

    Raises:
        InvalidInputError: no such kind or baseline; a rotary model without an offset for Q or K.
        UnsupportedModelError: layers with different numbers of heads.

    >>> tlens.circuits.composition_scores(model, "V").shape  # layer head later_layer later_head
    torch.Size([4, 4, 4, 4])
    """
    check_choice("kind", kind, KINDS)
    if baseline not in (None, "random"):
        raise InvalidInputError(f"baseline={baseline!r}; use 'random' or None.")
    view = as_view(model)
    scores = kind != "V"
    refuse_whitened(view, "composition_scores")
    if scores or fold_norms:
        frozen = as_pass(model, offset)  # once for all layers
        read = partial(LayerWeights.of, frozen, fold_norms=fold_norms)
        if scores:
            read = partial(LayerWeights.with_scores, frozen, fold_norms=fold_norms, offset=offset)
    else:
        read = partial(LayerWeights.of, view, fold_norms=False)
    layers = [read(layer) for layer in range(view.n_layers)]
    if len({layer.V.shape for layer in layers}) > 1:
        raise UnsupportedModelError(
            f"{view.description}: its layers differ in their heads, which do not fit one table."
        )
    V = upcast(torch.stack([layer.V for layer in layers]))
    O = upcast(torch.stack([layer.O for layer in layers]))  # noqa: E741
    reads = V
    others = O.mT
    if scores:
        Q = upcast(torch.stack([layer.Q for layer in layers if layer.Q is not None]))
        K = upcast(torch.stack([layer.K for layer in layers if layer.K is not None]))
        reads, others = {"Q": (Q, K), "K": (K, Q)}[kind]
    gram_v = V.mT @ V
    gram_other = others.mT @ others
    norms = (gram_v * (O @ O.mT)).sum((-2, -1)).sqrt()
    later_norms = ((reads.mT @ reads) * gram_other).sum((-2, -1)).sqrt()
    n_layers, heads = norms.shape
    result = norms.new_zeros(n_layers, heads, n_layers, heads)
    for layer in range(n_layers - 1):
        later = rearrange(reads[layer + 1 :], "l h m d -> m (l h d)")
        C = rearrange(O[layer] @ later, "e a (p d) -> e p a d", d=reads.shape[-1])
        other = rearrange(gram_other[layer + 1 :], "l h a d -> (l h) a d")
        squares = ((gram_v[layer][:, None] @ C) * (C @ other)).sum((-2, -1)).clamp_min(0)
        sizes = norms[layer][:, None] * later_norms[layer + 1 :].flatten()
        ratios = squares.sqrt() / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
        if baseline == "random":
            ratios = ratios - V.shape[-2] ** -0.5
        result[layer, :, layer + 1 :] = rearrange(ratios, "e (l h) -> e l h", h=heads)
    return result
