"""CP-LRP (Ali et al. 2022): relevance passes values and up projections only, patterns and gates are held."""

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_alias
from tensorlens_tl.results import Attribution


@register_alias("cp-lrp", of="tensorlens", collapse="target", needs=("predictions",))
def cp_lrp(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """x_j · ∂logit/∂x_j with nothing through queries, keys, gates and norm scales, and φ(z)/z.

    With all of these held the model is affine, and its gradient is the pull of TensorLens' operator: this is
    `tensorlens` with ``collapse="target"``, computed from the weights. Scores and bias sum to the logit before any soft
    cap.

    Args:
        frozen: the pass.
        target, minus: a token, and one to subtract; one per prompt, or one per query (``[batch][query]``).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        memory: what may be allocated beyond the result, as ``"512MB"`` or bytes.

    Returns:
        Scores `[batch, query, key]`, and the logit, its bias and the gap `[batch, query]`.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range.
        UnsupportedModelError: the model predicts no tokens, or its logits are not ``cap(W_U·x + b_U)``.

    >>> result = tlens.methods.cp_lrp(frozen, target=" value")
    >>> torch.equal(result.scores, tlens.methods.tensorlens(frozen, target=" value").scores)
    True
    """
    raise NotImplementedError  # the decorator puts a call of the other method in place of this body
