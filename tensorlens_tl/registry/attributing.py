"""`attribute`: any registered method on a model, or on a frozen pass."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tensorlens_tl._arguments import checked_arguments, nearest, plain
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.core import RULES, Rule, rule_of
from tensorlens_tl.errors import InvalidInputError, PromptNumber, RegistryError
from tensorlens_tl.models import NEXT, ModelLike, Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass, freeze, one_check, rule_scores, unchecked_view
from tensorlens_tl.passes.inputs import (
    check_slice,
    one_per_prompt,
    prompt_batches,
    query_positions,
    taken,
)
from tensorlens_tl.passes.operator import RANKED, explained_tokens, logit_label, target_ids, token_label
from tensorlens_tl.registry.registering import Method, checking, get_method, is_ours, list_methods, register_method
from tensorlens_tl.results import MEAN_QUERY, TOKENS_OF_QUERIES, Attribution, joined, one_query

PER_PROMPT = ("target", "minus", "direction")
"""Options that say which number is explained; they may name one thing for each prompt."""

PROBABILITIES = (
    " A probability is no sum over tokens. With minus= scores sum to a difference of two logits, which is that of "
    "the two tokens' log-probabilities; method='leave-one-out' measures how a probability changes "
    "(of='log_probability')."
)

MEAN = "mean"
"""As `query=`: the mean over every query of a prompt. The word of a prompt is ``" mean"``, with its space."""

DEFAULT = "tensorlens"
DEFAULT_OF_DIFFERENCES = "difference"
"""What `attribute` answers with where no method is named."""

_BUILT_IN = frozenset(RULES)


def attribute(
    model: ModelLike | FrozenPass | Difference,
    input: Any = None,
    target: TokenLike = None,
    *,
    method: str | None = None,
    rule: Rule | str | None = None,
    memory: Memory = None,
    **options: Any,
) -> Attribution:
    """Attribute with any registered method: ``attribute(model, text, " Paris")`` or ``attribute(frozen, " Paris")``.

    Many prompts are run in batches of similar length, as many at once as fit the bound of `memory`, and come back as
    one result in their own order.

    Args:
        model: a TransformerLens model; or a `FrozenPass`, which has its input already: the target may come next; or the
            `Difference` of two, likewise.
        input: text, the messages of a chat or token ids, one prompt or several; images or sound where the model reads
            those (see `freeze`).
        target: of the methods that take one: a token, one for each prompt, or `NEXT`; see `FrozenOperator.target`. By
            default the model's first choice against its runner-up, and of a `Difference` the tokens that its two runs
            predict against each other.
        method: one of `list_methods()`; None is ``"tensorlens"``, and of a `Difference` ``"difference"``.
        rule: in place of a method, a rule of gradients: one of `list_rules()`, or a `Rule` of your own.
        memory: what may be allocated at once besides the result, as ``"512MB"`` or bytes; None is 256 MiB. It bounds
            the batches, and whatever the method itself bounds by it.
        options: the method's options (``help(tlens.get_method(name).function)`` describes them; the default method
            takes `collapse`, `query`, `minus`, `direction`, `layers`, `heads`, `mlp`, `activation`,
            `probes`); options of `freeze` (`attention_mask`, `prepend_bos`, `verify` …) are passed to
            it. ``query="mean"`` explains the mean over every query (with `NEXT` as the target, every query that a
            token follows), for the work of ``query="all"``; its total is the mean of the model's own numbers.

    Returns:
        The scores, `[batch, query, key]` unless the method says otherwise, with tokens, positions and provenance.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an option that neither knows, a method of one run for the difference of two; see also
            `freeze`.
        UnsupportedModelError: the model does not meet what the method needs; see also `freeze`.
        FrozenModelError: the model's weights changed after it was frozen.

    Every built-in method is a function of a frozen pass, too, with its options in its signature, for editors to
    complete and `help` to show:

    >>> attribution = tlens.attribute(model, text, method="alti", distance="l2")
    >>> torch.equal(attribution.scores, tlens.methods.alti(frozen, distance="l2").scores)
    True
    """
    chosen = _chosen(model, method, rule)
    in_bytes(memory)
    if memory is not None and "memory" in chosen.options:
        options = {**options, "memory": memory}
    if isinstance(model, FrozenPass | Difference) and input is not None:
        if target is not None:
            raise InvalidInputError(
                "attribute: a frozen pass has its input already, so what follows it is the target: "
                "attribute(frozen, ' Paris')."
            )
        target = input
    if target is not None:
        options = {**options, "target": target}
    for_freeze, for_method = split_options(chosen, options)
    if isinstance(model, FrozenPass | Difference):
        if for_freeze:
            raise InvalidInputError(
                f"attribute: a frozen pass has its input already; leave {', '.join(for_freeze)} out, or pass it to "
                "freeze."
            )
        return _answered(chosen, model, for_method)
    if input is None:
        raise InvalidInputError("attribute: `input` is missing; pass text, messages of a chat or token ids.")
    rows, batches = prompt_batches(unchecked_view(model), input, for_freeze, memory)
    if len(batches) < 2:
        return _frozen_and_answered(chosen, model, input, for_freeze, for_method)
    for_freeze.pop("prepend_bos", None)  # the rows are token ids now
    split = {name: one_per_prompt(name, for_method[name], len(rows)) for name in PER_PROMPT if name in for_method}
    check_slice(for_method.get("query"), [len(row) for row in rows])
    parts = []
    for batch in batches:
        of_batch = {name: taken(values, batch) for name, values in split.items() if values is not None}
        try:
            prompts = [rows[i] for i in batch]
            parts.append(_frozen_and_answered(chosen, model, prompts, for_freeze, for_method | of_batch))
        except InvalidInputError as error:
            raise error.with_prompts(dict(enumerate(map(PromptNumber, batch)))) from error
    explained = {name: for_method[name] for name in PER_PROMPT if for_method.get(name) is not None}
    return joined(parts, batches, explained)


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `freeze`, and those of the method.

    Raises:
        InvalidInputError: one that neither knows; suggests the nearest.
    """
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    del freezing["query"]  # of a method; `attribute` tells `freeze` of it
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in method.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if not method.takes(name)]
    if unknown:
        hint = nearest(unknown[0], method.options)
        if unknown[0] in PER_PROMPT:
            others = [name for name in list_methods() if unknown[0] in get_method(name).options]
            hint = f" What it scores is not one number of the model. These take one: {', '.join(map(repr, others))}."
        elif unknown[0] == "of" or "prob" in unknown[0]:
            hint = PROBABILITIES
        raise InvalidInputError(
            f"attribute: method {method.name!r} has no option {unknown[0]!r}.{hint} It "
            f"takes {', '.join(method.options) or 'none'}; freezing takes {', '.join(freezing)}."
        )
    return for_freeze, for_method


def _chosen(model: ModelLike | FrozenPass | Difference, name: str | None, rule: Rule | str | None) -> Method:
    """The method of a name or a rule, or the default."""
    if rule is not None:
        if name is not None:
            raise InvalidInputError(f"attribute: method={name!r} and rule={rule!r} are two answers; leave one out.")
        if isinstance(model, Difference):
            raise InvalidInputError("attribute: a rule explains one run; pass one of its passes, or leave rule out.")
        return method_of_rule(rule)
    if not isinstance(model, Difference):
        return get_method(DEFAULT if name is None else name)
    chosen = get_method(DEFAULT_OF_DIFFERENCES if name is None else name)
    if not chosen.explains_differences:
        of_two = [repr(known) for known in list_methods() if get_method(known).explains_differences]
        raise InvalidInputError(
            f"method={name!r} explains one run, and this is the difference of two, which {', '.join(of_two)} explains. "
            "Leave `method` out, or pass one of the two runs."
        )
    return chosen


def _logit_positions(method: Method, options: Mapping[str, Any]) -> Query | None:
    """The positions whose logits a method reads, to be compared while the model is frozen."""
    query = options.get("query")
    if not method.explains_prediction(options) or options.get("direction") is not None:
        return None
    if options.get("target") is None and not isinstance(query, int):
        return None  # several queries need not all predict something
    if isinstance(query, str) and query == MEAN:
        return None
    return query


def _frozen_and_answered(
    method: Method, model: ModelLike, input: Any, for_freeze: Mapping[str, Any], options: Mapping[str, Any]
) -> Attribution:
    """A method's answer on a pass that is frozen for it; what it reads of the pass is proved."""
    proof: dict[str, Any] = {"verify": method.reads_maps, **for_freeze}
    with one_check(model):
        frozen = freeze(model, input, **proof, query=_logit_positions(method, options))
        return _answered(method, frozen, options)


def _answered(method: Method, frozen: FrozenPass | Difference, options: Mapping[str, Any]) -> Attribution:
    """A method's answer, to each query or to their mean."""
    query = options.get("query")
    if not isinstance(query, str) or query != MEAN:
        return _computed(method, frozen, options)
    frozen.view.refuse_encoder_decoder("query='mean'")
    every = _with_prediction(frozen, options.get("target"))
    result = one_query(_computed(method, frozen, {**options, "query": every}), mean=True)
    what = " of the ".join([MEAN_QUERY, *filter(None, [result.target])])
    return replace(result, target=what, options=result.options | {"query": MEAN})


def _with_prediction(frozen: FrozenPass | Difference, target: TokenLike) -> Query:
    """Every query, or for `NEXT` those that a token follows; padding where a prompt has fewer."""
    if target is not NEXT:
        return "all"
    rows = [row.nonzero()[:-1, 0] for row in frozen.mask]
    most = max(map(len, rows))
    if any(len(row) == 0 for row in rows):
        raise InvalidInputError(
            "query='mean': a prompt of one token, which none follows, has no query for target=NEXT; name a token."
        )
    padding = (~frozen.mask).long().argmax(1)
    filled = [torch.cat([row, at.expand(most - len(row))]) for row, at in zip(rows, padding, strict=True)]
    return torch.stack(filled)


def _computed(method: Method, frozen: FrozenPass | Difference, options: Mapping[str, Any]) -> Attribution:
    """The result of a method; no other thread gives the model other weights before it is computed."""
    with one_check(frozen.view.model):
        frozen.check_fresh()
        result: Any = method.function(frozen, **options)
        if not isinstance(result, Attribution):
            raise RegistryError(
                f"method {method.name!r} returned {type(result).__name__}, not an Attribution; wrap its scores with "
                "tlens.Attribution.of(frozen, scores, method=..., query=...)."
            )
        if result.additive and not is_ours(str(method.function.__module__)):
            result = _measured(frozen, result, options)
        return _with_tokens_of_queries(frozen, result, options)


def _measured(frozen: FrozenPass | Difference, result: Attribution, options: Mapping[str, Any]) -> Attribution:
    """The sum of somebody else's method with the gap that it has, whatever gap was handed over.

    Where the method was given a target, the total is the model's own logit, read here.
    """
    if result.bias is None:
        return result
    total = result.total
    if options.get("target") is not None and options.get("direction") is None:
        named = {name: options[name] for name in ("target", "minus") if name in options}
        total = frozen.operator().totals(**named, query=result.queries)
    if total is None:
        return result
    return frozen.checked(replace(result, total=total, gap=relative_gap(result.scores, result.bias, total)))


def _with_tokens_of_queries(
    frozen: FrozenPass | Difference, result: Attribution, options: Mapping[str, Any]
) -> Attribution:
    """The result with the tokens of each prompt and query in its options, where a list or a rank names them."""
    target, minus = (plain(result.options.get(name, options.get(name))) for name in ("target", "minus"))
    if target is None or not any(isinstance(token, list | tuple) or token in RANKED for token in (target, minus)):
        return result
    ids = [each for each in target_ids(frozen, result.queries, target, minus) if each is not None]
    texts = [
        [[token_label(frozen.view, token) for token in query] for query in prompt]
        for prompt in torch.stack(ids, dim=-1).tolist()
    ]
    return replace(result, options={**result.options, TOKENS_OF_QUERIES: texts})


# ------------------------------------------------------------------ rules of gradients


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
    """What `attribute` answers with for ``rule=``."""
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
