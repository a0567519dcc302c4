"""GIM (Edin et al. 2025): gradients that undo the self-repair of attention, by a softer softmax on the way back."""

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.core import GIM
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import by_rule, register_method
from tensorlens_tl.results import Attribution


@register_method("gim", needs=("predictions", "attention_products", "full_rows"))
@checked_arguments
def gim(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """x_j · ∂logit/∂x_j with gradient interaction modifications.

    Norm scales are held; softmax is differentiated at twice its temperature (without the factor ½ of a softmax of s/2);
    queries and keys are given a quarter of their gradient, values half. Activations and gates keep their own gradient.

    The total is the logit before any soft cap, and `gap` how far the scores' sum is from it: this method claims
    no sum.

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
            attention, or computes with an operation that no rule knows; rows of a pattern that do
            not sum to 1 (attention sinks).
        NumericalError: gradients are not finite.

    >>> result = tlens.methods.gim(frozen, target=" value")
    >>> result.additive, result.scores.shape
    (False, torch.Size([1, 1, 7]))
    """
    return by_rule(frozen, "gim", GIM, target, minus, query, memory)
