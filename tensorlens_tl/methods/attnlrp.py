"""AttnLRP (Achtibat et al. 2024): relevance that every product shares between its two factors, softmax live."""

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.core import ATTNLRP
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import by_rule, register_method
from tensorlens_tl.results import Attribution


@register_method("attnlrp", needs=("predictions", "attention_products"))
@checked_arguments
def attnlrp(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """x_j · ∂logit/∂x_j under AttnLRP's rules.

    Norm scales are held, activations are φ(z)/z, the products A·V, Q·K and φ(g)·u give each factor half, and softmax
    passes its own gradient on. These are the ε-rules of the paper with ε = 0, as input × gradient.

    The total is the logit before any soft cap, and `gap` the part of it that no token is given, relative to the
    scores: additive biases, and the constant term of every softmax, keep their share.

    Args:
        frozen: the pass.
        target, minus: a token, and one to subtract; one per prompt, or one per query (``[batch][query]``).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        memory: what the backward passes of several queries may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Scores `[batch, query, key]`, and the logit and the gap `[batch, query]`.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range.
        UnsupportedModelError: the model predicts no tokens, mixes tokens by something other than softmax
            attention, or computes with an operation that no rule knows.
        NumericalError: gradients are not finite.

    >>> result = tlens.methods.attnlrp(frozen, target=" value")
    >>> result.additive, result.scores.shape
    (False, torch.Size([1, 1, 7]))
    """
    return by_rule(frozen, "attnlrp", ATTNLRP, target, minus, query, memory)
