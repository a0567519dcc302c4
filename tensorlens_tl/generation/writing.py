"""What a model writes after a prompt, greedily; and what somebody else wrote, as tokens after the prompt's own.

Greedy means: every token has the largest logit of a plain run of what stands before it. The model's own ``generate``,
which keeps keys and values, makes a draft; one plain run checks all of it at once, and where the draft differs it is
mended and written on. So a model whose ``generate`` is wrong (with whitening, say) costs time and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import torch

from tensorlens_tl._arguments import plain, whole_number
from tensorlens_tl.algebra.progress import note_progress
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.hooks import (
    hooked,
    lock_of,
    model_points,
    progress_hooks,
    refuse_attached,
    states_and_logits,
    unheld_run,
)
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes.inputs import InputLike, chat_text, chats_in, plain_input, prepare, tokenized

Text = tuple[list[int], int]
"""Token ids of a prompt and its continuation, and how many of them are the prompt's."""

if TYPE_CHECKING:
    Continuation = InputLike | None
    """The new text only, one for each prompt, as text or token ids; None where the model writes it."""

    Count = int | None
else:
    Continuation = Count = Any  # what is wrong with them is said by `texts_of`


def not_causal(view: ModelView) -> str | None:
    """Why a model does not write text from left to right, as the end of a sentence about it; None if it does."""
    bidirectional = getattr(view.cfg, "attention_dir", "causal") == "bidirectional"
    if view.reads != "tokens":
        return f"reads {view.reads}"
    if view.is_encoder_decoder:
        return "is an encoder–decoder; attribute its decoder's tokens with tlens.attribute(..., decoder_input_ids=...)"
    if view.is_hooked_encoder or hasattr(view.model, "mlm_head") or bidirectional:
        return "is an encoder, which fills gaps and continues nothing"
    if view.classes is not None:
        return "is a classifier, which writes nothing"
    if view.unembedding is None:
        return "predicts no tokens"
    return None


def texts_of(
    view: ModelView,
    prompt: InputLike,
    max_new_tokens: Count = None,
    continuation: Continuation = None,
    *,
    stop_at_eos: bool = True,
    prepend_bos: bool | None = None,
) -> list[Text]:
    """Every prompt with what follows it, written by the model or given; arguments as for `attribute_generation`."""
    what = not_causal(view)
    if what is not None:
        raise UnsupportedModelError(f"generated text: {view.description} {what}. A causal language model is needed.")
    if (max_new_tokens is None) == (continuation is None):
        raise InvalidInputError(
            "max_new_tokens, continuation: pass one of them: how many tokens to write, or the text that was written."
        )
    if continuation is None:
        most = whole_number("max_new_tokens", max_new_tokens, least=1)
        prompts = tokenized(view, prompt, prepend_bos)
        longest = max(map(len, prompts))
        if longest + most > view.n_ctx:
            raise InvalidInputError(
                f"max_new_tokens={most}: with a prompt of {longest} tokens that goes beyond the context of "
                f"{view.n_ctx}; ask for at most {view.n_ctx - longest}."
            )
        ends = end_tokens(view) if stop_at_eos else set[int]()
        return [_written(view, ids, most, ends, number) for number, ids in enumerate(prompts)]
    chats = chats_in(prompt)
    prompt = plain_input(view, prompt)
    prompts = tokenized(view, prompt, prepend_bos)
    continuations = _one_each(view, continuation, len(prompts))
    texts: list[Any] = prompts  # a prompt of token ids has no text
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, Sequence) and isinstance(prompt[0], str):
        texts = list(prompt)
    tokenize = partial(tokenized, view, prepend_bos=prepend_bos)
    if chats is not None:  # what a chat template made has its special tokens already
        texts = [chat_text(view, chat) for chat in chats]
        tokenize = lambda text: [view.tokenizer(text, add_special_tokens=False)["input_ids"]]  # noqa: E731
    return [
        _continued(view, text, ids, more, tokenize)
        for text, ids, more in zip(texts, prompts, continuations, strict=True)
    ]


def end_tokens(view: ModelView) -> set[int]:
    """The tokens that end a text, as tokenizer and config name them."""
    inner = getattr(view.model, "original_model", None)
    ends: set[int] = set()
    for owner in (view.tokenizer, view.config, getattr(inner, "generation_config", None)):
        ids = plain(getattr(owner, "eos_token_id", None))
        if isinstance(ids, list):
            ends.update(map(int, ids))
        elif ids is not None:
            ends.add(int(ids))
    return ends


# ------------------------------------------------------------------ written by the model


def _written(view: ModelView, ids: list[int], most: int, ends: set[int], number: int) -> Text:
    """One prompt with its greedy continuation."""
    points = model_points(view)
    first = len(ids)
    assert points.unembed_in is not None  # of a causal language model
    with torch.no_grad(), unheld_run(view.model):
        refuse_dropout(view.model)
        refuse_attached(view.model)
        draft = _draft(view, ids, most, ends)
        text = ids + list(takewhile(lambda token: token not in ends, draft))
        while True:
            inputs = prepare(view, torch.tensor([text]))
            positions = torch.arange(first - 1, len(text), device=inputs.tokens.device)[None]
            _, logits = states_and_logits(view.model, inputs.kwargs, points.unembed_in, positions)
            choices: list[int] = logits[0].argmax(-1).tolist()
            written = text[first:]
            right = next((n for n, token in enumerate(written) if token != choices[n]), len(written))
            text = text[: first + right]
            if right == most or choices[right] in ends:
                break
            text.append(choices[right])
            if right + 1 == most:
                break
    if len(text) == first:
        raise InvalidInputError(
            "max_new_tokens: after ",
            PromptNumber(number),
            " the model's first choice is its end token, so nothing is written. Pass stop_at_eos=False, another "
            "prompt, or a continuation=.",
        )
    return text, first


def _draft(view: ModelView, ids: list[int], most: int, ends: set[int]) -> list[int]:
    """What the model's own ``generate`` writes, right or not; nothing where it cannot."""
    if view.is_whitened or not hasattr(view.model, "generate"):
        return []
    model: Any = view.model
    device = view.device
    stop: dict[str, Any] = {"stop_at_eos": True, "eos_token_id": min(ends)} if ends else {"stop_at_eos": False}
    blocks = count()

    def note() -> None:
        note_progress("writing", min(next(blocks) / (most * len(view.blocks)), 1.0))

    try:
        with lock_of(model), hooked(model, progress_hooks(note)):
            output = model.generate(
                torch.tensor([ids], device=device), max_new_tokens=most, do_sample=False, return_type="tokens",
                verbose=False, **stop,
            )  # fmt: skip
        return output[0].tolist()[len(ids) : len(ids) + most]
    except Exception:  # a draft only saves time: what fails here for a reason fails in the plain run as well
        return []


# ------------------------------------------------------------------ given


def _one_each(view: ModelView, continuation: Continuation, prompts: int) -> list[str | list[int]]:
    """One continuation for each prompt."""
    continuations = plain(continuation)
    if isinstance(continuation, Mapping):  # what a tokenizer returns
        continuations = tokenized(view, continuation)
    if not isinstance(continuations, Sequence):
        count = repr(continuations)
        continuations = []
    elif isinstance(continuations, str) or all(isinstance(one, int) for one in continuations):
        count = "one"
        continuations = [continuations]
    else:
        count = str(len(continuations))
    if len(continuations) != prompts:
        raise InvalidInputError(
            f"continuation: {count} for {prompts} prompts; pass one for each, as text or token ids."
        )
    return [plain(one) for one in continuations]


def _continued(
    view: ModelView,
    prompt: str | list[int],
    ids: list[int],
    more: object,
    tokenize: Callable[[str], list[list[int]]],
) -> Text:
    """One prompt with a given continuation; `tokenize` is how texts become tokens."""
    if not isinstance(more, str):
        if not isinstance(more, Sequence) or not all(type(token) is int for token in more):
            raise InvalidInputError(f"continuation={more!r}: pass text or token ids.")
        whole = [*ids, *more]
    elif not isinstance(prompt, str):
        raise InvalidInputError("continuation: the prompt is token ids; pass the continuation as token ids too.")
    else:
        (whole,) = tokenize(prompt + more)
        if whole[: len(ids)] != ids:
            apart, together = (view.tokenizer.convert_ids_to_tokens(row) for row in (ids, whole[: len(ids) + 1]))
            raise InvalidInputError(
                f"continuation: {more!r} changes the prompt's own tokens: they are {apart}, and with it they begin "
                f"{together}. Pass only what follows the prompt, with the space between them at its beginning, or "
                "token ids."
            )
    if len(whole) == len(ids):
        raise InvalidInputError("continuation: it has no token; pass what the model wrote after the prompt.")
    return whole, len(ids)
