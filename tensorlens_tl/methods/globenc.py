"""GlobEnc: Modarressi et al. 2022.

    post-LN   N_ij = ‖LN2(LN1(a_ij + δ_ij x_i))‖, linear parts, both with the scales of the true vectors
    pre-LN    N_ij = ‖LN2(a_ij + δ_ij x_i)‖, LN2 the norm before the MLP: the ATBLN of Kobayashi et al. 2024 (ours)

aggregated by the plain matrix product: no residual is added again, and rows are normalised only on request.

In a decoder block of an encoder–decoder (ours) the vectors of both attentions pass every norm that follows them.
"""

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra import Norm
from tensorlens_tl.layerwise import LocalLayer, Maps, normalize_rows, of_layers, product, side_by_side
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import Attribution


@register_layer_map("globenc", holds_residual=True, needs=("norm_after_sum", "head_vectors"), both_stacks=True)
def globenc_map(frozen: FrozenPass) -> Maps:
    """Return N_ij of every layer."""
    return side_by_side(frozen, lambda layer: layer.pair_norms(globenc_norms(layer), residual=not layer.is_cross))


def globenc_norms(layer: LocalLayer) -> tuple[Norm, ...]:
    """Return the norms that GlobEnc pushes attention and residual through: both of a post-LN block, else the MLP's.

    The model must meet `norm_after_sum`.
    """
    if layer.attn.outer is not None:
        return (*layer.outer, *layer.norms(layer.mlp.outer))
    return layer.norms(layer.mlp.before)


@register_method("globenc", needs=("norm_after_sum", "head_vectors", "unwhitened"))
@checked_arguments
def globenc(frozen: FrozenPass, *, normalize: bool = False, query: Query = "all") -> Attribution:
    """The product over layers of norms through attention, residual and both norms (Modarressi 2022).

    `normalize` divides each layer's rows by their sum, which the original does not do.

    Raises:
        UnsupportedModelError: parallel blocks, no norm that reads attention plus residual, or a whitened model; a layer
            without softmax attention, or with a gate or a norm inside it.

    >>> tlens.methods.globenc(frozen, normalize=True, query=-1).scores.sum(-1).round(decimals=4)
    tensor([[1.]])
    """
    maps = globenc_map(frozen)
    if normalize:
        maps = normalize_rows(maps)
    return of_layers(frozen, product(maps), maps, method="globenc", query=query, normalize=normalize)
