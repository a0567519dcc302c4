"""GlobEnc: Modarressi et al. 2022.

    post-LN   N_ij = ‖LN2(LN1(a_ij + δ_ij x_i))‖, linear parts, both with the scales of the true vectors
    pre-LN    N_ij = ‖LN2(a_ij + δ_ij x_i)‖, LN2 the norm before the MLP: the ATBLN of Kobayashi et al. 2024 (ours)

aggregated by the plain matrix product: no residual is added again, and rows are normalised only on request.
"""

import torch

from tensorlens_tl.algebra import Norm
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.layerwise import (
    LocalLayer,
    Maps,
    locals_of,
    normalize_rows,
    product,
    refuse_whitened,
    select_query,
)
from tensorlens_tl.models.protocol import Query
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results.attribution import Attribution


@register_layer_map("globenc", holds_residual=True)
def globenc_map(frozen: FrozenPass) -> Maps:
    """N_ij of every layer."""
    layers = locals_of(frozen)
    outer = [globenc_norms(layer) for layer in layers]  # refuse before work
    return torch.stack([layer.pair_norms(norms, residual=True) for layer, norms in zip(layers, outer, strict=True)])


def globenc_norms(layer: LocalLayer, method: str = "globenc") -> tuple[Norm, ...]:
    """The norms GlobEnc pushes attention and residual through: both of a post-LN block, else the one before the MLP.

    Raises:
        UnsupportedModelError: parallel blocks, and blocks without a norm that reads the sum.
    """
    layout = layer.frozen.layouts[layer.layer]
    if layout.attn.outer is not None:
        return layer.norms(layout.attn.outer, layout.mlp.outer)
    if layout.name == "pre" and layout.mlp.before is None and layer.frozen.view.blocks[layer.layer].has_mlp:
        return ()  # a model without norms: the MLP reads the sum itself
    if layout.parallel or layout.mlp.before is None or not layer.frozen.view.blocks[layer.layer].has_mlp:
        why = "attention and MLP are parallel" if layout.parallel else "no norm reads attention plus residual"
        raise UnsupportedModelError(
            f"{method}: undefined at blocks.{layer.layer} of this {layer.frozen.view.description}, where {why}. "
            "Use norm with scope='attn_res_ln', which is defined for every block."
        )
    return layer.norms(layout.mlp.before)


@register_method("globenc")
def globenc(frozen: FrozenPass, *, normalize: bool = False, query: Query = None) -> Attribution:
    """The product over layers of norms through attention, residual and both norms (Modarressi 2022).

    Args:
        frozen: the pass.
        normalize: whether the rows of each layer are divided by their sum (the original does not).
        query: positions, every one unless said; see `tensorlens_tl.passes.inputs.query_positions`.

    Raises:
        UnsupportedModelError: parallel blocks, no norm that reads attention plus residual, or a whitened model.
        InvalidInputError: a query out of range.
    """
    refuse_whitened(frozen, "globenc")
    maps = globenc_map(frozen)
    maps = normalize_rows(maps) if normalize else maps
    return Attribution.of(
        frozen,
        select_query(frozen, product(maps), query),
        method="globenc",
        query=query,
        layers=maps,
        options={"normalize": normalize, "query": query},
    )
