"""RelP (Jafari et al. 2025): the propagation coefficients of layer-wise relevance, held or live attention."""

from collections.abc import Mapping
from typing import Any, Literal

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.core import RELP
from tensorlens_tl.methods.tensorlens import tensorlens
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import by_rule, register_method, renamed
from tensorlens_tl.results import Attribution


def _needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    if options["attention"] == "live":
        return "predictions", "attention_products"
    return ("predictions",)


@register_method("relp", needs=_needs, same_numbers="tensorlens (collapse=target), where no MLP is gated")
@checked_arguments
def relp(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    attention: Literal["frozen", "live"] = "frozen",
    memory: Memory = None,
) -> Attribution:
    """x_j · ∂logit/∂x_j with norm scales held, φ(z)/z, and gated products φ(g)·u halved.

    With ``attention="frozen"`` patterns are held as well, and the scores are those of `tensorlens` with
    ``collapse="target", activation="split"``, computed from the weights; they and the bias sum to the logit before any
    soft cap. With ``attention="live"`` attention keeps its own gradient, softmax included, and they do not: `gap`
    is how far their sum is from it.

    Args:
        frozen: the pass.
        target, minus: a token, and one to subtract; one per prompt, or one per query (``[batch][query]``).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        attention: ``"frozen"`` (the paper's AH-rule) or ``"live"`` (the paper's code without it).
        memory: what the backward passes of several queries may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Scores `[batch, query, key]`, and the logit and the gap `[batch, query]`; with held attention its bias.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range; `attention` is neither.
        UnsupportedModelError: the model predicts no tokens, or its logits are not ``cap(W_U·x + b_U)``;
            with ``attention="live"``, it mixes tokens by something other than softmax attention, or
            computes with an operation that no rule knows.
        NumericalError: gradients are not finite.

    >>> tlens.methods.relp(frozen, target=" value").additive
    True
    >>> tlens.methods.relp(frozen, target=" value", attention="live").additive
    False
    """
    explained: dict[str, Any] = {"target": target, "minus": minus, "query": query}
    if attention == "live":
        result = by_rule(frozen, "relp", RELP, memory=memory, **explained)
    else:
        result = tensorlens(frozen, collapse="target", activation="split", memory=memory, **explained)
    return renamed(result, "relp", {**explained, "attention": attention})
