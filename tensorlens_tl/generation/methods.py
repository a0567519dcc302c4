"""Generated text by any registered method: a query for each of its tokens, or one for a stretch of them."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.generation.hops import Hops
from tensorlens_tl.models import NEXT, TokenLike
from tensorlens_tl.passes import PassOrDifference
from tensorlens_tl.registry import attribute, get_method
from tensorlens_tl.results import Attribution, one_query

METHOD = "tensorlens"
"""The method whose own way with spans and hops generated text has."""


def check_method(
    method: str, options: Mapping[str, Any], hops: Hops, minus: TokenLike, bias: str, activation: str
) -> None:
    """Refuse what a method cannot say of generated text.

    Raises:
        RegistryError: no such method.
        InvalidInputError: an option that it does not take; hops, which follow shares of logits, of another method than
            `METHOD`.
    """
    chosen = get_method(method)
    named = dict(options)
    if minus is not None:
        named["minus"] = minus
    if method == METHOD:
        if options:
            raise InvalidInputError(f"generated text: no option {next(iter(options))!r}; other methods have options.")
        return
    defaults = {"bias": (bias, "apart"), "activation": (activation, "ratio")}
    named |= {name: value for name, (value, default) in defaults.items() if value != default}
    unknown = [name for name in named if not chosen.takes(name)]
    if unknown:
        raise InvalidInputError(
            f"generated text: method {method!r} has no option {unknown[0]!r}; it takes "
            f"{', '.join(chosen.options) or 'none'}."
        )
    for name in ("query", "target", "direction"):
        if name in options:
            raise InvalidInputError(f"generated text: {name}= is the generated tokens' own; span= chooses among them.")
    if hops != 0:
        raise InvalidInputError(
            f"hops={hops!r}: hops need method={METHOD!r}, which says what tokens give to each other's logits. Leave "
            f"hops out with method={method!r}."
        )


def scored_by(
    run: PassOrDifference,
    method: str,
    queries: Int[Tensor, "batch query"],
    options: Mapping[str, Any],
    *,
    span: bool,
    memory: Memory = None,
) -> Attribution:
    """What a method says of the tokens that queries predict.

    Args:
        run: the frozen text, or the difference of two.
        method: a name that `check_method` passed.
        queries: one before each token.
        options: of the method.
        span: one query for all of them. Scores of a method that explains a prediction are summed, as the targets of a
            span are; those of one that explains none are averaged.
        memory: see `attribute`.
    """
    explains = get_method(method).explains_prediction(options)
    target = {"target": NEXT} if explains else {}
    result = attribute(run, method=method, query=queries, memory=memory, **target, **options)
    if not span:
        return result
    return one_query(result, mean=not explains)


def given(**options: Any) -> dict[str, Any]:
    """The options that say something besides their defaults."""
    defaults = {"bias": "apart", "activation": "ratio"}
    return {name: value for name, value in options.items() if value is not None and value != defaults.get(name)}
