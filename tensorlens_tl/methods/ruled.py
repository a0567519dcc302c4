"""What methods that are one backward rule have in common."""

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.core import Rule
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass, rule_scores
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import explained_tokens, logit_label
from tensorlens_tl.results import Attribution


def by_rule(
    frozen: FrozenPass,
    method: str,
    rule: Rule,
    target: TokenLike,
    minus: TokenLike,
    query: Query,
    memory: Memory,
) -> Attribution:
    """The scores of a rule (see `rule_scores`) as the attribution of a method, which claims no sum."""
    target, minus = explained_tokens(frozen, target, minus, query_positions(frozen.prompt, query))
    result = rule_scores(frozen, rule, target, minus, query=query, memory=memory)
    return Attribution.of(
        frozen,
        result.scores,
        method=method,
        query=query,
        total=result.total,
        gap=result.gap,
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query},
    )
