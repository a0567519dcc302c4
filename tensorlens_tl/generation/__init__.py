"""Text that a model has written: which part of the prompt made it, and through which of its own tokens?

One pass of prompt and continuation is frozen, and every generated token is a query that asks for itself:

* `attribute_generation`: writes a continuation (or takes one) and attributes its tokens, or a stretch of them;
* `freeze_generation`: the frozen text by itself, a `FrozenGeneration`, to ask as often as you like;
* `sent_on`: the hops, from what a stretch took of generated tokens to what made those.

| module | question |
| --- | --- |
| `written` | what does a model write, what explains a frozen text, and what made the tokens that a score landed on? |
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
