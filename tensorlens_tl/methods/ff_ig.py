"""Feed-forward maps by integrated gradients: Kobayashi et al. 2024.

The attention block's vector atb_ij (attention, residual and, post-LN, the norm around them) goes on through the
feed-forward layer by integrated gradients with a zero baseline, whose closed form is the ratio φ(z)/z:

    ff_ij = W_out·diag(φ(z_i)/z_i)·W_in·atb_ij

    post-LN   atb → atb_ff = ff → atb_ff_res = ff + atb → atb_ff_res_ln = LN2(ff + atb)
    pre-LN    atb → atb_ln = LN2(atb) → atb_ln_ff = ff(atb_ln) → atb_ln_ff_res = ff + atb
              → atb_ln_ff_res_nextln = the next block's norm before attention, or the final norm (ours: no biases)

All norms by their linear parts. For gated MLPs `ig` is ours, see `tensorlens_tl.activation`.
"""

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.layer_maps import ff_map, ff_scope, select_query
from tensorlens_tl.registry import register_method


@register_method("ff-ig")
def ff_ig(frozen: FrozenPass, *, scope: str | None = None, query: int | None = None) -> Attribution:
    """Norms of token-to-token vectors through the feed-forward layer (Kobayashi 2024), averaged over layers.

    Args:
        frozen: the pass.
        scope: how far through the block, see the module; None goes to its end.
        query: one query counted over real tokens, or None for all.

    Raises:
        InvalidInputError: a scope that this kind of block does not have, or a query out of range.
        UnsupportedModelError: parallel or attention-only blocks, where no MLP reads the attention output.
    """
    scope = ff_scope(frozen, scope)
    layers = ff_map(frozen, scope)
    return Attribution.of(
        frozen,
        select_query(frozen, layers.mean(0), query),
        method="ff-ig",
        query=query,
        layers=layers,
        options={"scope": scope, "query": query},
    )
