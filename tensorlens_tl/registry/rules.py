"""Methods that are one backward rule, and rules of users."""

from typing import Any

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.core import RULES, Rule, rule_of
from tensorlens_tl.errors import RegistryError
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass, rule_scores
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import explained_tokens, logit_label
from tensorlens_tl.registry.entries import Method
from tensorlens_tl.registry.registering import checking, register_method
from tensorlens_tl.results import Attribution

_BUILT_IN = frozenset(RULES)


def by_rule(
    frozen: FrozenPass,
    method: str,
    rule: Rule,
    target: TokenLike,
    minus: TokenLike,
    query: Query,
    memory: Memory,
) -> Attribution:
    """The scores of a rule (see `rule_scores`) as the attribution of a method, a sum where the rule is affine."""
    target, minus = explained_tokens(frozen, target, minus, query_positions(frozen.prompt, query))
    result = rule_scores(frozen, rule, target, minus, query=query, memory=memory)
    return Attribution.of(
        frozen,
        result.scores,
        method=method,
        query=query,
        bias=result.bias,
        total=result.total,
        gap=None if rule.affine else result.gap,
        additive=rule.affine,
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query},
    )


def method_of(rule: Rule, name: str) -> Method:
    """A rule as a method, which is not registered."""

    def of_rule(
        frozen: FrozenPass,
        *,
        target: TokenLike = None,
        minus: TokenLike = None,
        query: Query = -1,
        memory: Memory = None,
    ) -> Attribution:
        """x_j · ∂logit/∂x_j under a rule; `gap` is how far scores (and an affine rule's bias) are from the logit."""
        return by_rule(frozen, name, rule, target, minus, query, memory)

    of_rule.__module__, of_rule.__qualname__ = "rules", name
    return Method(name, of_rule, needs=("predictions", *rule.needs), reads_maps=False)


def method_of_rule(rule: Any) -> Method:
    """What `attribute` answers with for ``rule=``.

    Raises:
        InvalidInputError: no such rule.
        UnsupportedModelError: from its function, a model of which the rule says nothing.
    """
    chosen = rule_of(rule)
    names = [name for name, known in RULES.items() if known is chosen]
    return checking(method_of(chosen, f"rule={names[0] if names else 'own'}"))


@checked_arguments
def register_rule(name: str, rule: Rule) -> Rule:
    """Register a rule under a name, for every question that takes ``rule=``, and as a method of `attribute`.

    Args:
        name: what questions, evaluations and the command line call it. A name of your own may be registered again.
        rule: what stands for each kind of operation.

    Returns:
        The rule.

    Raises:
        RegistryError: the name is that of a built-in rule or of another method.

    >>> from tensorlens_tl.core import held, shared
    >>> mlps = tlens.register_rule("no-mixing", tlens.Rule(softmax=held, multiply=shared))
    >>> torch.equal(
    ...     tlens.attribute(frozen, " value", method="no-mixing").scores,
    ...     tlens.attribute(frozen, " value", rule=mlps).scores,
    ... )
    True
    """
    if name in _BUILT_IN:
        raise RegistryError(f"register_rule: {name!r} is a built-in rule; choose another name, such as 'my-{name}'.")
    method = method_of(rule, name)
    register_method(name, needs=method.needs, reads_maps=False)(method.function)
    RULES[name] = rule
    return rule


def list_rules() -> list[str]:
    """The names that ``rule=`` takes.

    >>> tlens.list_rules()[:3]
    ['attnlrp', 'frozen', 'gim']
    """
    return sorted(RULES)
