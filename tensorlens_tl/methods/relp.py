"""RelP (Jafari et al. 2025): the propagation coefficients of layer-wise relevance, held or live attention."""

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import BackwardRule
from tensorlens_tl.models.protocol import Query, TokenLike
from tensorlens_tl.passes.backward import rule_scores
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.operator import logit_label
from tensorlens_tl.registry import register_method
from tensorlens_tl.results.attribution import Attribution

RELP = BackwardRule(activation="split", values=1.0, scores=1.0)
"""The rules for norms, activations and gates alone: attention keeps its own gradient."""


@register_method("relp")
def relp(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    attention: str = "frozen",
    memory: Memory = None,
) -> Attribution:
    """x_j · ∂logit/∂x_j with norm scales held, φ(z)/z, and gated products φ(g)·u halved.

    With ``attention="frozen"`` patterns are held as well, and the scores are those of `tensorlens` with
    ``collapse="target", activation="split"``, computed from the weights; they and the bias sum to the logit before any
    soft cap. With ``attention="live"`` attention keeps its own gradient, softmax included, and they do not: `residual`
    is how far their sum is from it.

    Args:
        frozen: the pass.
        target, minus: a token, and one to subtract; one per prompt, or one per query (``[batch][query]``).
        query: positions, the last real token unless said; see `tensorlens_tl.passes.inputs.query_positions`.
        attention: ``"frozen"`` (the paper's AH-rule) or ``"live"`` (the paper's code without it).
        memory: what the backward passes of several queries may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range; `attention` is neither.
        UnsupportedModelError: the model predicts no tokens, or its logits are not ``cap(W_U·x + b_U)``;
            with ``attention="live"``, a block's attention is held as a whole, so that its products are not reached.
        NumericalError: gradients are not finite.
    """
    if attention not in ("frozen", "live"):
        raise InvalidInputError(f"attention={attention!r}; use 'frozen' or 'live'.")
    if attention == "live":
        result = rule_scores(frozen, RELP, target, minus, query=query, memory=memory)
    else:
        result = frozen.operator(activation=RELP.activation).target(target, minus, query=query, memory=memory)
    return Attribution.of(
        frozen,
        result.scores,
        method="relp",
        query=query,
        bias=result.bias,
        total=result.total,
        residual=result.residual,
        additive=attention == "frozen",
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query, "attention": attention},
    )
