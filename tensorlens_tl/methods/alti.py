"""ALTI: Ferrando et al. 2022.

    T_ij = LN(a_ij + δ_ij x_i), linear part;   y_i = LN(x_i + attention output), biases included
    C_ij = max(0, ‖y_i‖ − ‖y_i − T_ij‖), rows divided by their sum;   aggregated by the product of C

Pre-LN and parallel blocks (ours): no norm around the sum, y = x + attention output. The original adds 1e-6 to every
component inside its distance, an error of about 1e-5; here the formula is exact.
"""

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.layer_maps import alti_map, product, select_query
from tensorlens_tl.registry import register_method


@register_method("alti")
def alti(frozen: FrozenPass, *, distance: str = "l1", query: int | None = None) -> Attribution:
    """How much nearer each token's vector brings a layer's output, rolled out over layers (Ferrando 2022).

    Rows are distributions: they sum to 1.

    Args:
        frozen: the pass.
        distance: `"l1"` or `"l2"`.
        query: one query counted over real tokens, or None for all.

    Raises:
        InvalidInputError: an unknown distance, or a query out of range.
    """
    if distance not in ("l1", "l2"):
        raise InvalidInputError(f"distance={distance!r}; use 'l1' or 'l2'.")
    maps = alti_map(frozen, distance)
    return Attribution.of(
        frozen,
        select_query(frozen, product(maps), query),
        method="alti",
        query=query,
        layers=maps,
        options={"distance": distance, "query": query},
    )
