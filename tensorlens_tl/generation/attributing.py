"""Text that a model writes, attributed in one call: batches of prompts, and their results as one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError, PromptNumber
from tensorlens_tl.generation.hops import SIGNED, Hops, Shares, check_hops, check_shares
from tensorlens_tl.generation.methods import METHOD, check_method
from tensorlens_tl.generation.writing import Continuation, Count, texts_of
from tensorlens_tl.generation.written import Span, frozen_texts, span_of_each
from tensorlens_tl.models import ModelLike, ModelView, TokenLike, check_rule
from tensorlens_tl.passes.inputs import InputLike, Store, Verify, memory_batches, one_per_prompt, taken
from tensorlens_tl.results import Attribution, joined


@checked_names
def attribute_generation(
    model: ModelLike,
    prompt: InputLike,
    *,
    max_new_tokens: Count = None,
    continuation: Continuation = None,
    span: Span = None,
    hops: Hops = 0,
    shares: Shares = SIGNED,
    minus: TokenLike = None,
    bias: str = "apart",
    activation: str = "ratio",
    stop_at_eos: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    store: Store = "model",
    verify: Verify = True,
    memory: Memory = None,
    method: str = METHOD,
    **options: Any,
) -> Attribution:
    """What made the text that a model writes after a prompt: scores of the prompt and of earlier generated tokens.

    >>> result = tlens.attribute_generation(model, text, max_new_tokens=3)
    >>> result.scores.shape  # batch, generated tokens, source tokens
    torch.Size([1, 3, 10])
    >>> bool(((result.scores.sum(-1) + result.bias - result.total).abs() < 1e-3).all())
    True

    The whole text is frozen once. The result has one query for each generated token, which is the position that
    predicts it, one before its own; or with `span` one query in all, computed by one pull. Its options say where the
    generated tokens stand (``"generated"``: the first position, and the one after the last, of each prompt) and which
    of them the scores are about (``"asked"``).

    Args:
        model: a causal language model.
        prompt: text, the messages of a chat or token ids, one prompt or several; see `freeze`.
        max_new_tokens: write so many tokens greedily: each has the largest logit of a plain run. Fewer where the model
            ends before.
        continuation: or take this continuation: the new text only, one for each prompt, as text or token ids; of a chat
            what the assistant answers.
        span: a stretch of the generated text, attributed as a whole: the sum of its tokens' targets. ``"all"``, a
            text (its last occurrence), ``(start, stop)`` or a slice of the generated tokens, or the number of one; or a
            list with one for each prompt.
        hops: send what reached generated tokens on to what made those: so many times, or ``"all"``, after which only
            the prompt and the bias have scores. See `tensorlens_tl.generation.hops`; weights are those of each token's
            own logit, whatever `minus` says.
        shares: what a token's makers take over of what it was given: ``"signed"`` shares of its own logit, one pull for
            each hop of a span, or ``"absolute"`` ones, one pull for each generated token, whatever the number of hops.
        minus: a token to hold each one against, ``"runner-up"`` for the likeliest other token at each position, or one
            for each prompt or query, as in `FrozenOperator.target`.
        bias: ``"apart"`` from the scores, or by ``"position"``; see `FrozenOperator.in_out`.
        activation: the rule for activations; see `FrozenPass.operator`.
        stop_at_eos: end a text before the first end token (of the tokenizer or the config) that the model writes.
        prepend_bos: as in TransformerLens; of strings.
        padding_side: ``"left"`` or ``"right"`` (the default), where texts differ in length.
        store, verify: as for `freeze`.
        memory: what may be allocated at once, as ``"512MB"`` or bytes; it bounds how many prompts run together.
        method: any of `list_methods()`, for the same tokens: one query for each, or of a span the sum of their scores.
            A method that explains no prediction (attention, say) has one map for every target; its rows are averaged
            over a span.
        options: of another method than the default.

    Returns:
        Scores `[batch, query, key]`, additive with their bias to each target where the method is.

    Raises:
        RegistryError: no such method.
        InvalidInputError: an option that the method does not take, or hops of another than the default;
            both or neither of `max_new_tokens` and `continuation`; a continuation that is empty, that
            changes the prompt's tokens, or not one per prompt; nothing written; a text beyond the context; a span that
            is empty, outside the generated text or not in it; no such number of hops.
        UnsupportedModelError: not a causal language model, and what `freeze` refuses.
    """
    check_hops(hops)
    check_shares(shares)
    check_rule(activation)
    in_bytes(memory)
    view = ModelView(model)
    texts = texts_of(
        view, prompt, max_new_tokens, continuation, stop_at_eos=stop_at_eos, prepend_bos=prepend_bos
    )  # fmt: skip
    check_method(method, options, hops, minus, bias, activation)
    settings: dict[str, Any] = {"span": span, "hops": hops, "shares": shares, "bias": bias, "activation": activation}
    settings |= {"memory": memory, "method": method, **options}
    batches = memory_batches(view, [len(ids) for ids, _ in texts], memory)
    if len(batches) == 1:
        return frozen_texts(model, texts, padding_side, store, verify).attribute(minus=minus, **settings)
    others = None if isinstance(minus, str) else one_per_prompt("minus", minus, len(texts))
    spans = span_of_each(span, len(texts))
    parts = []
    for batch in batches:
        batch_minus: Any = minus if others is None else taken(others, batch)
        if spans is not None:
            settings["span"] = taken(spans, batch)
        try:
            frozen = frozen_texts(model, [texts[number] for number in batch], padding_side, store, verify)
            frozen = replace(frozen, _of_batch=True)
            parts.append(frozen.attribute(minus=batch_minus, **settings))
        except InvalidInputError as error:
            raise error.with_prompts(dict(enumerate(map(PromptNumber, batch)))) from error
    explained: dict[str, Any] = {name: _by_prompt(parts, batches, name) for name in ("generated", "asked")}
    if others is not None:
        explained["minus"] = minus
    if spans is not None:
        explained["span"] = span
    return joined(parts, batches, explained)


def _by_prompt(parts: Sequence[Attribution], batches: Sequence[Sequence[int]], name: str) -> list[list[int]]:
    """An option of every prompt, in the order of the prompts."""
    values: dict[int, list[int]] = {}
    for part, batch in zip(parts, batches, strict=True):
        values.update(zip(batch, part.options[name], strict=True))
    return [values[prompt] for prompt in sorted(values)]
