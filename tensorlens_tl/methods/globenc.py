"""GlobEnc: Modarressi et al. 2022.

    post-LN   N_ij = ‖LN2(LN1(a_ij + δ_ij x_i))‖, linear parts, both with the scales of the true vectors
    pre-LN    N_ij = ‖LN2(a_ij + δ_ij x_i)‖, LN2 the norm before the MLP: the ATBLN of Kobayashi et al. 2024 (ours)

aggregated by the plain matrix product: no residual is added again, and rows are normalised only on request.
"""

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.layer_maps import globenc_map, normalize_rows, product, select_query
from tensorlens_tl.registry import register_method


@register_method("globenc")
def globenc(frozen: FrozenPass, *, normalize: bool = False, query: int | None = None) -> Attribution:
    """The product over layers of norms through attention, residual and both norms (Modarressi 2022).

    Args:
        frozen: the pass.
        normalize: whether the rows of each layer are divided by their sum (the original does not).
        query: one query counted over real tokens, or None for all.

    Raises:
        UnsupportedModelError: parallel blocks, or no norm that reads attention plus residual.
        InvalidInputError: a query out of range.
    """
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
