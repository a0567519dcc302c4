"""Methods defined by a rule of gradients: AttnLRP, GIM, RelP and CP-LRP. Scores are x_j · ∂logit/∂x_j under the rule.

| method | norms | activations | products | softmax |
| --- | --- | --- | --- | --- |
| `attnlrp` (Achtibat et al. 2024) | fixed | φ(z)/z | A·V, Q·K and φ(g)·u give each factor half | its own gradient |
| `gim` (Edin et al. 2025) | fixed | their own | queries and keys a quarter, values half | at twice its temperature |
| `relp` (Jafari et al. 2025) | fixed | φ(z)/z | φ(g)·u halved | fixed, or its own gradient |
| `cp-lrp` (Ali et al. 2022) | fixed | φ(z)/z | values and up projections only | fixed |

A rule itself is data (`tensorlens_tl.core.RULES`). If it fixes attention as well, the model is affine, and the scores
are those of `tensorlens`, computed from the weights.
"""

from collections.abc import Mapping
from typing import Any, Literal

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.core import ATTNLRP, GIM, RELP
from tensorlens_tl.methods.tensorlens import tensorlens
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import by_rule, register_alias, register_method, renamed
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
    """Compute x_j · ∂logit/∂x_j under AttnLRP's rules.

    Norm scales are fixed, activations are φ(z)/z, the products A·V, Q·K and φ(g)·u give each factor half, and softmax
    keeps its own gradient. These are the ε-rules of the paper with ε = 0, as input × gradient.

    The total is the logit before any soft cap, and `gap` the part of it that no token receives, relative to the
    scores: additive biases, and the constant term of every softmax, keep their share.

    Raises:
        UnsupportedModelError: the model predicts no tokens, mixes tokens by something other than softmax
            attention, or uses an operation that no rule covers.

    >>> result = tlens.methods.attnlrp(frozen, target=" value")
    >>> result.additive, result.scores.shape
    (False, torch.Size([1, 1, 7]))
    """
    return by_rule(frozen, "attnlrp", ATTNLRP, target, minus, query, memory)


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
    """Compute x_j · ∂logit/∂x_j with gradient interaction modifications.

    Norm scales are fixed; softmax is differentiated at twice its temperature (without the factor ½ of a softmax of
    s/2); queries and keys receive a quarter of their gradient, values half. Activations and gates keep their own
    gradient.

    The total is the logit before any soft cap, and `gap` how far the scores' sum is from it: this method does not claim
    that they sum to it.

    Raises:
        UnsupportedModelError: as `attnlrp`; and rows of a pattern that do not sum to 1 (attention sinks).

    >>> result = tlens.methods.gim(frozen, target=" value")
    >>> result.additive, result.scores.shape
    (False, torch.Size([1, 1, 7]))
    """
    return by_rule(frozen, "gim", GIM, target, minus, query, memory)


def _needs_of_relp(options: Mapping[str, Any]) -> tuple[str, ...]:
    if options["attention"] == "live":
        return "predictions", "attention_products"
    return ("predictions",)


@register_method("relp", needs=_needs_of_relp, same_numbers="tensorlens (collapse=target), where no MLP is gated")
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
    """Compute x_j · ∂logit/∂x_j with fixed norm scales, φ(z)/z, and gated products φ(g)·u halved.

    With ``attention="frozen"`` (the paper's AH-rule) patterns are fixed too: the scores are those of `tensorlens` with
    ``collapse="target", rule="frozen-split"``, computed from the weights, and sum with the bias to the logit before any
    soft cap. With ``attention="live"`` (the paper's code without that rule) attention keeps its own gradient, softmax
    included, and `gap` is how far their sum is from it.

    Raises:
        UnsupportedModelError: the model predicts no tokens, or its logits are not ``cap(W_U·x + b_U)``;
            with ``attention="live"`` as `attnlrp`.

    >>> tlens.methods.relp(frozen, target=" value").additive
    True
    >>> tlens.methods.relp(frozen, target=" value", attention="live").additive
    False
    """
    explained: dict[str, Any] = {"target": target, "minus": minus, "query": query}
    if attention == "live":
        result = by_rule(frozen, "relp", RELP, memory=memory, **explained)
    else:
        result = tensorlens(frozen, collapse="target", rule="frozen-split", memory=memory, **explained)
    return renamed(result, "relp", {**explained, "attention": attention})


@register_alias("cp-lrp", of="tensorlens", collapse="target", needs=("predictions",))
def cp_lrp(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """Compute x_j · ∂logit/∂x_j with no gradient through queries, keys, gates and norm scales, and φ(z)/z.

    With all of these fixed the model is affine, and its gradient is the pull of TensorLens' operator: this is
    `tensorlens` with ``collapse="target"``, computed from the weights. Scores and bias sum to the logit before any soft
    cap.

    Raises:
        UnsupportedModelError: the model predicts no tokens, or its logits are not ``cap(W_U·x + b_U)``.

    >>> result = tlens.methods.cp_lrp(frozen, target=" value")
    >>> torch.equal(result.scores, tlens.methods.tensorlens(frozen, target=" value").scores)
    True
    """
    raise NotImplementedError  # the decorator replaces this body by a call of the other method
