"""Attribution of generated text: which parts of the prompt produced it, and through which generated tokens.

Prompt and continuation are frozen in one pass, and every generated token is explained at the query that predicts it:

* `attribute_generation` writes a continuation (or takes one) and attributes its tokens, or a span of them;
* `freeze_generation` returns the frozen text, a `FrozenGeneration`, for any number of attributions;
* `sent_on` computes hops: it passes scores on generated tokens back to what produced those tokens.

| module | question |
| --- | --- |
| `written` | what a model writes, what explains a frozen text, and how hops pass scores back |
"""

from tensorlens_tl.generation.written import (
    Continuation as Continuation,
    Count as Count,
    FrozenGeneration,
    Hops as Hops,
    Span as Span,
    attribute_generation,
    check_hops as check_hops,
    freeze_generation,
    not_causal as not_causal,
    scored_by as scored_by,
    sent_on,
)

__all__ = ["FrozenGeneration", "attribute_generation", "freeze_generation", "sent_on"]
