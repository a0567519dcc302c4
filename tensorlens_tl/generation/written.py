"""Generated text: greedy decoding, given continuations, attribution of tokens and spans, hops, and differences.

Greedy decoding takes the token of largest logit in a plain run over everything before it. The model's own ``generate``
drafts the text using its key–value cache. One plain run then checks the whole draft, which is corrected and continued
from the first difference. A model whose ``generate`` is wrong (with whitening, for example) thus only costs time.

Hops pass scores on generated tokens back to what produced those tokens.

Let s be scores over the keys of a text and s_b a bias. Let generated token g have scores a_g over the earlier keys and
a bias a_gb, which sum to its own total t_g: its logit or, for the difference of two texts, the change of that logit.
One hop replaces the score s_g of every generated token at once by s_g·w_g, spread over its sources:

    s_j ← s_j·[j is in the prompt] + Σ_g s_g·w_gj,        s_b ← s_b + Σ_g s_g·w_gb

A token's weights, including the one of the bias, sum to 1, so Σ_j s_j + s_b is the same after every hop: it consists of
what has reached the prompt, what is still on generated tokens, and the bias. There are two kinds of weights:

* ``"signed"``: shares of the token's own total, w_gj = a_gj / t_g and w_gb = a_gb / t_g. They are linear in the scores
  being passed, so one hop is a single pull of Σ_g (s_g / t_g)·u_g, where u_g is the vector of token g's logit at the
  position that predicts it, whatever the number of tokens. A source that counts against a token receives a share of the
  opposite sign. Shares of a near-zero total would be large and meaningless: the score of a token whose |t_g| is below
  `LEAST_TOTAL` times the root mean square of its text's totals goes to the bias.
* ``"absolute"``: shares of absolute scores, w_gj = |a_gj| / (Σ_j |a_gj| + |a_gb|), and likewise for the bias. They are
  at most 1, and need each generated token's own scores: one pull per token.

A token depends only on earlier ones, so after n hops nothing is left on n generated tokens. With W the weights between
generated tokens (strictly lower triangular), everything that ever passes through them is s_G·(I − W)⁻¹, one triangular
solve; k hops are k products with W. The idea of hops is due to FlashTrace (2026), which defines its weights
differently; conservation with the bias, signed shares by one pull, and the solve are ours.

Only s itself is linear in the frozen model. The weights distribute a token's score among its sources in proportion;
they are not derivatives.

Signed shares are known before they are pulled, and hops are linear in the scores on generated tokens. So each hop of a
span only needs scores of generated tokens, which in a causal model do not require the prompt before them, and
everything passed on is pulled to the prompt at the end, in one pull (`sent_on_by_pulls`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, formerly, plain, whole_number, whole_slice
from tensorlens_tl.algebra.memory import Memory, in_bytes
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
from tensorlens_tl.models import NEXT, ONCE_ACTIVATION, FrozenRule, ModelLike, ModelView, TokenLike, known_rule
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes import Difference, FrozenOperator, PassOrDifference, difference, freeze, one_check
from tensorlens_tl.passes.inputs import (
    InputLike,
    Store,
    Verify,
    chat_text,
    chats_in,
    memory_batches,
    one_per_prompt,
    plain_input,
    prepare,
    taken,
    tokenized,
)
from tensorlens_tl.passes.operator import Collapse
from tensorlens_tl.passes.target import EACH_NEXT, RANKED, UNCAPPED, logit_word
from tensorlens_tl.passes.texts import find, joined
from tensorlens_tl.registry import attribute, get_method
from tensorlens_tl.results import (
    EACH_GENERATED,
    EACH_MINUS,
    EACH_SPAN,
    Attribution,
    joined as joined_results,
    one_query,
    span_text,
)

Text = tuple[list[int], int]
"""The token ids of a prompt and its continuation, and the length of the prompt."""

if TYPE_CHECKING:
    Continuation = InputLike | None
    """The new text only, one per prompt, as text or token ids; None if the model writes it."""

    Count = int | None
else:
    Continuation = Count = Any  # `texts_of` checks them


def not_causal(view: ModelView) -> str | None:
    """Return why a model does not generate text from left to right, as the end of a sentence; None if it does."""
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
    """Return every prompt with its continuation, generated or given; arguments as for `attribute_generation`."""
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
    texts: list[Any] = prompts  # prompts given as token ids have no text
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, Sequence) and isinstance(prompt[0], str):
        texts = list(prompt)
    tokenize = partial(tokenized, view, prepend_bos=prepend_bos)
    if chats is not None:  # a chat template adds the special tokens itself
        texts = [chat_text(view, chat) for chat in chats]
        tokenize = lambda text: [view.tokenizer(text, add_special_tokens=False)["input_ids"]]  # noqa: E731
    return [
        _continued(view, text, ids, more, tokenize)
        for text, ids, more in zip(texts, prompts, continuations, strict=True)
    ]


def end_tokens(view: ModelView) -> set[int]:
    """Return the end-of-text tokens, as named by tokenizer and config."""
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
    """Continue one prompt greedily."""
    points = model_points(view)
    first = len(ids)
    assert points.unembed_in is not None  # every causal language model has it
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
    """Return the output of the model's own ``generate``, right or not; empty if it fails."""
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
    except Exception:  # the draft only saves time, and a real problem will also show in the plain run
        return []


# ------------------------------------------------------------------ given


def _one_each(view: ModelView, continuation: Continuation, prompts: int) -> list[str | list[int]]:
    continuations = plain(continuation)
    if isinstance(continuation, Mapping):  # the output of a tokenizer
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
    """Append a given continuation to one prompt; `tokenize` turns texts into tokens."""
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
                f"{together}. Pass only what follows the prompt, beginning with the space between them, or "
                "token ids."
            )
    if len(whole) == len(ids):
        raise InvalidInputError("continuation: it has no token; pass what the model wrote after the prompt.")
    return whole, len(ids)


if TYPE_CHECKING:
    Hops = int | Literal["all"]
    """A number of hops, or ``"all"`` for as many as there are generated tokens."""

    Shares = Literal["signed", "absolute"]
    """The kind of weights of hops."""
else:
    Hops = Shares = Any  # `sent_on` checks them

SHARES = ("signed", "absolute")
SIGNED = SHARES[0]

LEAST_TOTAL = 0.25
"""Totals below this fraction of their text's root mean square have no signed shares."""


def check_hops(hops: Hops) -> int | None:
    """Return the number of hops, None for all; raise `InvalidInputError` unless it is at least 0 or ``"all"``."""
    if isinstance(hops, str) and hops == "all":
        return None
    return whole_number("hops", hops, least=0, why="a number of hops, or 'all'")


def divisors(totals: Float[Tensor, "batch token"], real: Bool[Tensor, "batch token"]) -> Float[Tensor, "batch token"]:
    """Return the totals to divide signed shares by; zero where a `real` token's total is negligible."""
    typical = (totals.square().sum(1, keepdim=True) / real.sum(1, keepdim=True)).sqrt()
    return totals.masked_fill(totals.abs() < LEAST_TOTAL * typical, 0.0)


def quotients(held: Float[Tensor, "*rows"], totals: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """Return held ÷ totals, and zero where a total is zero."""
    return torch.where(totals == 0, 0.0, held / torch.where(totals == 0, 1.0, totals))


@checked_names
def sent_on(
    scores: Float[Tensor, "batch query key"],
    bias: Float[Tensor, "batch query"],
    links: Float[Tensor, "batch token key"],
    link_bias: Float[Tensor, "batch token"],
    generated: Bool[Tensor, "batch token key"],
    hops: Hops = "all",
    shares: Shares = "signed",
    totals: Float[Tensor, "batch token"] | None = None,
) -> tuple[Float[Tensor, "batch query key"], Float[Tensor, "batch query"]]:
    """Return scores after some hops; see `tensorlens_tl.generation.written` for the definition.

    >>> from tensorlens_tl.generation import sent_on
    >>> scores = torch.tensor([[[1.0, 0.0, 4.0]]])  # the last of three tokens was generated, and has a score of 4
    >>> links = torch.tensor([[[1.0, 2.0, 0.0]]])  # the two prompt tokens that it came from, by a quarter and a half
    >>> generated = torch.tensor([[[False, False, True]]])
    >>> landed, _ = sent_on(scores, torch.zeros(1, 1), links, torch.ones(1, 1), generated)
    >>> landed.tolist()  # the bias has the missing 1
    [[[2.0, 2.0, 0.0]]]

    Args:
        scores, bias: the scores to pass on, one row per query.
        links, link_bias: scores of each generated token, over the keys and for the bias, in order of generation.
        generated: the position of each generated token, one True per row; no True in a row without a token.
        hops: how many, or ``"all"``.
        shares: ``"signed"`` or ``"absolute"``.
        totals: divisors for signed shares; a token with total zero passes everything to the bias. None uses the sums
            of scores and bias.

    Returns:
        Scores `[batch, query, key]` and bias `[batch, query]` with the same sum.

    Raises:
        InvalidInputError: an invalid number of hops, or unknown shares.
    """
    count = check_hops(hops)
    check_choice("shares", shares, SHARES)
    at = generated.to(scores)
    if shares == SIGNED:
        if totals is None:
            totals = links.sum(-1) + link_bias
        weights = quotients(links, totals[..., None].expand_as(links))
        bias_weights = torch.where(totals == 0, 1.0, quotients(link_bias, totals))
    else:  # weights sum to 1
        size = links.abs().sum(-1) + link_bias.abs()
        weights = links.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)[..., None]
        bias_weights = 1 - weights.sum(-1)
    weights = weights.to(scores)
    between = weights @ at.mT  # [batch, token, token]: how much a generated token passes to an earlier one
    held = scores @ at.mT
    scores = scores - held @ at
    if count is None:  # held + held·W + held·W² + …
        solved = torch.eye(between.shape[-1]).to(between) - between
        passed = torch.linalg.solve_triangular(solved, held, upper=False, left=False)
        held = torch.zeros_like(held)
    else:
        passed = torch.zeros_like(held)
        for _ in range(min(count, between.shape[-1])):  # after as many hops as tokens, nothing is left
            passed = passed + held
            held = held @ between
    outside = weights - between @ at
    sent_to_bias = (passed @ bias_weights.to(scores)[..., None])[..., 0]
    return scores + passed @ outside + held @ at, bias + sent_to_bias


class GeneratedTokens(NamedTuple):
    """The generated tokens of texts: `positions` `[batch, token]`, the `queries` predicting them, which are `real`."""

    positions: Int[Tensor, "batch token"]
    queries: Int[Tensor, "batch token"]
    real: Bool[Tensor, "batch token"]


def sent_on_by_pulls(
    operator: FrozenOperator,
    tokens: GeneratedTokens,
    queries: Int[Tensor, "batch query"],
    hops: int,
    minus: TokenLike = None,
    **settings: Any,
) -> Collapse:
    """Return a span's scores `[batch, 1, key]` after some hops with signed shares (see `sent_on`), with bias and total.

    `queries` predict the span's tokens; `settings` are bias and memory, as for a target.
    """
    ask = partial(operator.target, NEXT, summed=True, **settings)
    reached = partial(ask, keys=tokens.positions)
    totals = operator.totals(NEXT, query=tokens.queries)
    shared = divisors(totals, tokens.real)
    held = reached(minus, query=queries).scores[:, 0]
    given = quotients(held, shared)
    sent = held
    weights = given
    for _ in range(hops - 1):
        if not bool(given.any()):
            break
        held = reached(query=tokens.queries, weights=given).scores[:, 0]
        given = quotients(held, shared)
        sent = sent + held
        weights = weights + given
    explained = (tokens.queries[..., None] == queries[:, None]).any(-1) & tokens.real
    if minus is None:
        scores, bias = scores_and_bias(ask(query=tokens.queries, weights=weights + explained))
        total = (totals * explained).sum(1, keepdim=True)
    else:
        first = ask(minus, query=queries)
        scores, bias = scores_and_bias(first)
        others = scores_and_bias(ask(query=tokens.queries, weights=weights))
        scores = scores + others[0]
        bias = bias + others[1]
        total = first.total
    at = tokens.positions[:, None]
    gives = (given != 0).long()
    before_some = gives.flip(1).cumsum(1).flip(1) > gives  # on other positions nothing is left, not even rounding
    left = (torch.take_along_dim(scores, at, dim=2)[:, 0] - sent) * before_some * tokens.real
    lost = (sent * (shared == 0)).sum(1, keepdim=True)
    return Collapse(scores.scatter(2, at, left[:, None]), bias + lost, total)


def scores_and_bias(collapse: Collapse) -> tuple[Float[Tensor, "batch query key"], Float[Tensor, "batch query"]]:
    """Return the scores and bias of a collapse to one score per source token."""
    assert collapse.bias is not None
    return collapse.scores, collapse.bias


if TYPE_CHECKING:
    Stretch = str | int | slice | tuple[int, int] | Sequence[int]
    """A span of one generated text: ``"all"``, a text, a number, a slice, or ``(start, stop)``."""

    Span = Stretch | list[Stretch] | None
    """A span for all texts, or a list with one per text; None for each token separately."""
else:
    Span = Stretch = Any  # `_bounds` checks it

METHOD = "tensorlens"
"""The method whose spans and hops are computed here rather than by the general path."""


@dataclass(frozen=True, eq=False)
class _Question:
    """The options of an attribution of generated tokens; see `attribute_generation`."""

    span: Span
    hops: Hops
    shares: Shares
    minus: TokenLike
    bias: str
    rule: FrozenRule
    memory: Memory
    method: str
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_hops(self.hops)
        check_choice("shares", self.shares, SHARES)
        chosen = get_method(self.method)
        if self.method == METHOD:
            if self.options:
                raise InvalidInputError(
                    f"generated text: no option {next(iter(self.options))!r}; other methods have options."
                )
            return
        unknown = [name for name in self.of_method if not chosen.takes(name)]
        if unknown:
            raise InvalidInputError(
                f"generated text: method {self.method!r} has no option {unknown[0]!r}; it takes "
                f"{', '.join(chosen.options) or 'none'}."
            )
        for name in ("query", "target", "direction"):
            if name in self.options:
                raise InvalidInputError(
                    f"generated text: {name}= is set by the generated tokens; span= chooses among them."
                )
        if self.hops != 0:
            raise InvalidInputError(
                f"hops={self.hops!r}: hops need method={METHOD!r}, whose scores sum to each token's own logit. "
                f"Leave hops out with method={self.method!r}."
            )

    @property
    def of_method(self) -> dict[str, Any]:
        """Options for a method other than `METHOD`: its own, and ours where they differ from their defaults."""
        options = dict(self.options)
        if self.minus is not None:
            options["minus"] = self.minus
        if self.bias != "apart":
            options["bias"] = self.bias
        if self.rule != "frozen":
            options["rule"] = self.rule
        return options


@dataclass(frozen=True, eq=False)
class FrozenGeneration:
    """Prompts and their continuations in one frozen pass, from `freeze_generation`.

    >>> from tensorlens_tl.generation import freeze_generation
    >>> written = freeze_generation(model, text, max_new_tokens=3)
    >>> written.texts
    [' value of the']
    >>> written.attribute(span="all").scores.shape  # one query: the whole stretch
    torch.Size([1, 1, 10])

    Attributes:
        frozen: the pass over the whole text, or the difference of two; see `difference`.
        positions: positions of the generated tokens, `[batch, token]`; padding where a prompt has fewer.
    """

    frozen: PassOrDifference
    positions: Int[Tensor, "batch token"]
    _links: dict[tuple[str, str], Collapse] = field(default_factory=dict)
    _of_batch: bool = False

    @property
    def _is_one(self) -> bool:
        """Whether this is the only prompt, in this pass and in the whole call."""
        return len(self.positions) == 1 and not self._of_batch

    def __repr__(self) -> str:
        counts = sorted(set(self.real.sum(1).tolist()))
        return f"FrozenGeneration({'–'.join(map(str, counts))} generated tokens, {self.frozen})"

    @property
    def real(self) -> Bool[Tensor, "batch token"]:
        """Which entries of `positions` are generated tokens."""
        return torch.take_along_dim(self.frozen.mask, self.positions, dim=1)

    @property
    def texts(self) -> list[str]:
        """The generated text after each prompt."""
        return [joined(self._tokens(row)) for row in range(len(self.positions))]

    @formerly(ONCE_ACTIVATION)
    def attribute(
        self,
        *,
        span: Span = None,
        hops: Hops = 0,
        shares: Shares = SIGNED,
        minus: TokenLike = None,
        bias: str = "apart",
        rule: FrozenRule = "frozen",
        memory: Memory = None,
        method: str = METHOD,
        **options: Any,
    ) -> Attribution:
        """Attribute the generated tokens, with one query each, or a span of them as a whole.

        Arguments, result and errors are those of `attribute_generation`.

        >>> written = tlens.generation.freeze_generation(model, "Return the", max_new_tokens=3)
        >>> bool((written.attribute().gap < 1e-4).all())
        True
        """
        question = _Question(span, hops, shares, minus, bias, rule, memory, method, options)
        return self._answer(question)

    def _answer(self, question: _Question) -> Attribution:
        """Run a checked request; see `attribute`."""
        span = question.span
        queries = self.queries(span)
        about = {"generated": self.generated_ranges(), "asked": self._token_positions(queries)}
        if question.method != METHOD:
            options = question.of_method
            result = scored_by(
                self.frozen, question.method, queries, options, span=span is not None, memory=question.memory
            )
            if span is not None:
                options["span"] = span
            target = self._method_label(result.target, queries, question)
            return replace(result, target=target, options=options | about)
        shown = queries
        if span is not None:  # a span is shown at the last of its queries
            real = torch.take_along_dim(self.frozen.mask, queries, dim=1)
            shown = (queries * real).amax(1, keepdim=True)
        with one_check(self.frozen.view.model):
            collapse = self._collapse(queries, question)
        scores, constant = scores_and_bias(collapse)
        options = {name: getattr(question, name) for name in ("span", "hops", "minus", "bias", "rule")}
        if question.hops != 0:
            options["shares"] = question.shares
        return Attribution.of(
            self.frozen,
            scores,
            method="generation",
            query=shown,
            bias=constant,
            total=collapse.total,
            additive=True,
            target=self.label(queries, span, question.minus, question.hops),
            options={name: value for name, value in options.items() if value is not None} | about,
        )

    def _method_label(self, target: str, queries: Int[Tensor, "batch query"], question: _Question) -> str:
        """Describe a method's scores of generated tokens, in terms of the method's own target."""
        before, logit, _ = target.partition("logit of ")
        if not logit:
            return target.replace(EACH_NEXT, EACH_GENERATED)
        label = self.label(queries, question.span, question.minus, capped=UNCAPPED not in before + logit)
        return label if label.startswith(before) else before + label

    def difference(self, other: "FrozenGeneration") -> "FrozenGeneration":
        """Compare with another text, or the same text in another run; the result is used like a single text.

        Targets are the logits of this text's own tokens in both runs. Scores are parts of the exact change
        (`tlens.difference`).

        Args:
            other: a text with as many tokens, generated at the same positions: from another prompt, from another model
                of the same architecture, or from a model that was changed in between.

        Raises:
            InvalidInputError: the positions differ; also whatever `tlens.difference` raises.
            UnsupportedModelError: see `tlens.difference`.

        >>> other = text.replace("red", "blue")
        >>> first, second = (
        ...     tlens.generation.freeze_generation(model, prompt, continuation=" value of")
        ...     for prompt in (text, other)
        ... )
        >>> change = first.difference(second).attribute(span="all")
        >>> torch.allclose(change.scores.sum(-1) + change.bias, change.total, atol=1e-3)
        True
        """
        if not isinstance(other, FrozenGeneration):
            raise InvalidInputError(f"difference: pass another FrozenGeneration, not a {type(other).__name__}.")
        first, second = self.frozen, other.frozen
        if isinstance(first, Difference) or isinstance(second, Difference):
            raise InvalidInputError("difference: one of these is a difference of two texts; pass texts of one run.")
        if self.positions.shape != other.positions.shape or not torch.equal(self.positions, other.positions):
            raise InvalidInputError(
                f"difference: the generated tokens stand elsewhere, {self.generated_ranges()} and "
                f"{other.generated_ranges()}. Pass continuations of one length to prompts of one length. For two "
                "answers of different lengths to one prompt, attribute each by itself (span='all', minus='runner-up', "
                "since logits of different tokens have no common zero) and compare the scores of the prompt's tokens; "
                "or explain the first token in which they differ, attribute(model, prompt and what they share, "
                "token, minus=other)."
            )
        return FrozenGeneration(difference(first, second), self.positions)

    @formerly(ONCE_ACTIVATION)
    def links(self, *, bias: str = "apart", rule: FrozenRule = "frozen", memory: Memory = None) -> Collapse:
        """Return the scores behind every generated token's logit, which hops follow; cached for the next call."""
        self.frozen.check_fresh()
        in_bytes(memory)  # checked even if nothing is left to compute
        links = self._links.get((bias, rule))
        if links is None:
            operator = self.frozen.operator(rule=rule)
            queries = self._queries(self.positions)
            links = self._links[bias, rule] = operator.target(NEXT, query=queries, bias=bias, memory=memory)
        return links

    def queries(self, span: Span = None) -> Int[Tensor, "batch query"]:
        """Return the positions that predict a span's tokens (None: every generated token), one before each.

        Positions count padding; padding positions fill up prompts with fewer tokens.

        Raises:
            InvalidInputError: a span that is empty, or not within the generated text.

        >>> written = tlens.generation.freeze_generation(model, "Return the", max_new_tokens=3)
        >>> written.queries((0, 2))
        tensor([[2, 3]])
        """
        return self._queries(self.positions if span is None else self._span(span))

    def generated_ranges(self) -> list[list[int]]:
        """Return ``[first, stop]`` for each prompt: its first generated position, and the one after the last."""
        counts = self.real.sum(1).tolist()
        return [[row[0], row[count - 1] + 1] for row, count in zip(self.positions.tolist(), counts, strict=True)]

    def label(
        self,
        queries: Int[Tensor, "batch query"],
        span: Span = None,
        minus: TokenLike = None,
        hops: Hops = 0,
        *,
        capped: bool = False,
    ) -> str:
        """Return a description of what scores of generated tokens explain.

        Args:
            queries: the positions that predict the tokens; see `queries`.
            span: None if each token is explained separately; otherwise they are explained as a whole.
            minus, hops: as for `attribute_generation`.
            capped: see `tensorlens_tl.passes.target.logit_word`.
        """
        unit, against = _unit(minus)
        unit = unit.replace("logit", logit_word(self.frozen.view, capped))
        if span is None:
            label = f"{unit}{against} of {EACH_GENERATED}"
        elif self._is_one:
            tokens = [self.frozen.str_tokens[0][position] for position in self._token_positions(queries)[0]]
            label = f"sum of the {unit}s{against} of {span_text(tokens)}"
        else:
            label = f"sum of the {unit}s{against} of {EACH_SPAN}"
        if isinstance(self.frozen, Difference):
            label = f"change of the {label}"
        if hops == 0:
            return label
        return f"{label}, after {hops} hop{'' if hops == 1 else 's'}"

    # ------------------------------------------------------------------ inside

    def _collapse(self, queries: Int[Tensor, "batch query"], question: _Question) -> Collapse:
        """Attribute the tokens that queries predict, or their sum for a span, and apply hops."""
        settings: dict[str, Any] = {"bias": question.bias, "memory": question.memory}
        rule = question.rule
        minus = question.minus
        is_span = question.span is not None
        count = check_hops(question.hops)
        few_hops = count is not None and 0 < count < self.positions.shape[1]
        if is_span and few_hops and question.shares == SIGNED and (question.bias, rule) not in self._links:
            # a pull per hop is cheaper than the scores of every token
            operator = self.frozen.operator(rule=rule)
            tokens = GeneratedTokens(self.positions, self._queries(self.positions), self.real)
            return sent_on_by_pulls(operator, tokens, queries, count or 0, minus, **settings)
        if not is_span and minus is None:
            collapse = self.links(rule=rule, **settings)
        else:
            operator = self.frozen.operator(rule=rule)
            collapse = operator.target(NEXT, minus, query=queries, summed=is_span, **settings)
        if question.hops == 0:
            return collapse
        totals = None
        if question.shares == SIGNED:
            every_query = self._queries(self.positions)
            totals = divisors(self.frozen.operator().totals(NEXT, query=every_query), self.real)
        links = scores_and_bias(self.links(rule=rule, **settings))
        positions = torch.arange(self.frozen.tokens.shape[1], device=self.positions.device)
        generated = (self.positions[..., None] == positions) & self.real[..., None]
        scores, bias = sent_on(*scores_and_bias(collapse), *links, generated, question.hops, question.shares, totals)
        return Collapse(scores, bias, collapse.total)

    def _queries(self, positions: Int[Tensor, "batch token"]) -> Int[Tensor, "batch token"]:
        """Return the positions that predict tokens: one earlier each, except for padding."""
        return positions - torch.take_along_dim(self.frozen.mask, positions, dim=1).long()

    def _token_positions(self, queries: Int[Tensor, "batch query"]) -> list[list[int]]:
        """Return the positions of the generated tokens that queries predict."""
        real = torch.take_along_dim(self.frozen.mask, queries, dim=1).tolist()
        return [
            [p + 1 for p, is_real in zip(*pair, strict=True) if is_real]
            for pair in zip(queries.tolist(), real, strict=True)
        ]

    def _tokens(self, row: int) -> list[str]:
        first, stop = self.generated_ranges()[row]
        return self.frozen.str_tokens[row][first:stop]

    def _span(self, span: Span) -> Int[Tensor, "batch token"]:
        """Return the positions of a span's tokens, padded where prompts have fewer."""
        texts = len(self.positions)
        spans: list[Any] = span_of_each(span, texts) or [span] * texts
        rows = [self._stretch(each, row) for row, each in enumerate(spans)]
        most = max(map(len, rows))
        padding = (~self.frozen.mask).long()
        if any(len(row) < most for row in rows) and not bool(padding.any(1).all()):
            counts = sorted({len(row) for row in rows})
            raise InvalidInputError(
                f"span={span!r} stands for {counts} tokens of these prompts, which are equally long; freeze them one "
                "by one, or pass a slice."
            )
        spare = padding.argmax(1).tolist()
        filled = [row + [position] * (most - len(row)) for row, position in zip(rows, spare, strict=True)]
        return torch.tensor(filled, device=self.positions.device)

    def _stretch(self, span: Stretch, row: int) -> list[int]:
        """Return the positions of one prompt's span; `span` counts its generated tokens."""
        first, stop = self.generated_ranges()[row]
        positions = list(range(first, stop))
        if isinstance(span, str) and span != "all":
            tokens = self._tokens(row)
            try:
                begin, end = find(tokens, span)[-1]
            except InvalidInputError:
                raise InvalidInputError(
                    f"span={span!r} does not occur as whole tokens in the text generated after ",
                    PromptNumber(row),
                    f": {tokens}.",
                ) from None
            return positions[begin:end]
        within = positions[_bounds(span, len(positions))]
        if not within:
            raise InvalidInputError(
                f"span={span!r} is empty: {len(positions)} tokens were generated after ",
                PromptNumber(row),
                f", 0 to {len(positions) - 1}.",
            )
        return within


def span_of_each(span: Span, prompts: int) -> list[Stretch] | None:
    """Return a list of spans, one per prompt, with numbers as slices; None for a single span (or its two ends)."""
    if not isinstance(span, list) or [type(each) for each in span] == [int, int]:
        return None
    if len(span) != prompts:
        raise InvalidInputError(f"span: {len(span)} for {prompts} prompts; pass one, or one for each prompt.")
    return [slice(each, each + 1 or None) if type(each) is int else each for each in span]


def _unit(minus: TokenLike) -> tuple[str, str]:
    """Describe the explained number of a token, and what it is compared with."""
    if minus is None:
        return "logit", ""
    if isinstance(minus, str) and minus in RANKED:
        return "logit difference", f" to {RANKED[minus]}"
    minus = plain(minus)
    if isinstance(minus, list | tuple):
        return "logit difference", f" to {EACH_MINUS}"
    return "logit difference", f" to {minus!r}"


def _bounds(span: Stretch, count: int) -> slice:
    """Turn a numeric span into a slice of the generated tokens."""
    if isinstance(span, slice):
        return whole_slice("span", span, why="a slice of the generated tokens")
    if span == "all":
        return slice(None)
    if isinstance(span, tuple | list) and len(span) == 2:
        start, stop = (whole_number("span", end, 0, count, "ends among the generated tokens") for end in span)
        return slice(start, stop)
    number = whole_number("span", span, -count, count - 1, "a generated token, (start, stop), a slice or a text")
    return slice(number, number + 1 or None)


def frozen_texts(
    model: ModelLike, texts: Sequence[Text], padding_side: str | None, store: Store, verify: Verify
) -> FrozenGeneration:
    """Freeze texts in one pass; if their lengths differ, each gets at least one position of padding."""
    ids = [text for text, _ in texts]
    first = [begin for _, begin in texts]
    lengths = [len(row) for row in ids]
    if padding_side not in (None, "left", "right"):
        raise InvalidInputError(f"padding_side={padding_side!r}; use 'left' or 'right'.")
    padded = len(set(lengths)) != 1 or len(set(first)) != 1
    width = max(lengths)
    if padded:
        width += 1  # the position at which a prompt with fewer tokens places its missing queries
    most = max(length - begin for length, begin in zip(lengths, first, strict=True))
    tokens = torch.zeros(len(ids), width, dtype=torch.long)
    mask = torch.zeros(len(ids), width, dtype=torch.long)
    positions = torch.zeros(len(ids), most, dtype=torch.long)
    for number, (row, begin) in enumerate(zip(ids, first, strict=True)):
        start = width - len(row) if padding_side == "left" else 0
        end = start + len(row)
        tokens[number, start:end] = torch.tensor(row)
        mask[number, start:end] = 1
        positions[number] = int((1 - mask[number]).argmax())  # a padding position stands in for all missing tokens
        positions[number, : len(row) - begin] = torch.arange(start + begin, end)
    frozen = freeze(
        model,
        tokens,
        attention_mask=mask if padded else None,
        store=store,
        verify=verify,
        query=positions - torch.take_along_dim(mask, positions, dim=1),
    )
    if frozen.capture.real_tokens_look_ahead:
        raise UnsupportedModelError(
            f"generated text: tokens of this {frozen.view.description} attend to later ones. A causal language model "
            "is needed."
        )
    return FrozenGeneration(frozen, positions.to(frozen.mask.device))


@checked_names
def freeze_generation(
    model: ModelLike,
    prompt: InputLike,
    *,
    max_new_tokens: Count = None,
    continuation: Continuation = None,
    stop_at_eos: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    store: Store = "model",
    verify: Verify = True,
) -> FrozenGeneration:
    """Generate or take continuations of prompts, and freeze the whole texts once for any number of attributions.

    Args:
        model, prompt, max_new_tokens, continuation, stop_at_eos, prepend_bos, padding_side: as for
            `attribute_generation`.
        store, verify: as for `freeze`.

    Raises:
        InvalidInputError: see `attribute_generation`.
        UnsupportedModelError: not a causal language model; also whatever `freeze` raises.

    >>> written = tlens.generation.freeze_generation(model, "Return the", max_new_tokens=3)
    >>> written.generated_ranges()
    [[3, 6]]
    """
    view = ModelView(model)
    texts = texts_of(view, prompt, max_new_tokens, continuation, stop_at_eos=stop_at_eos, prepend_bos=prepend_bos)
    return frozen_texts(model, texts, padding_side, store, verify)


@formerly(ONCE_ACTIVATION)
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
    rule: FrozenRule = "frozen",
    stop_at_eos: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    store: Store = "model",
    verify: Verify = True,
    memory: Memory = None,
    method: str = METHOD,
    **options: Any,
) -> Attribution:
    """Attribute the text that a model writes after a prompt to the prompt and to earlier generated tokens.

    >>> result = tlens.attribute_generation(model, text, max_new_tokens=3)
    >>> result.scores.shape  # batch, generated tokens, source tokens
    torch.Size([1, 3, 10])
    >>> bool(((result.scores.sum(-1) + result.bias - result.total).abs() < 1e-3).all())
    True

    The whole text is frozen once. Each generated token has a query, the position before it, which predicts it; with
    `span` there is a single query, computed by one pull. The result's options record where the generated tokens are
    (``"generated"``: each prompt's first position, and the one after the last) and which are explained (``"asked"``).

    Args:
        model: a causal language model.
        prompt: text, the messages of a chat or token ids, one prompt or several; see `freeze`.
        max_new_tokens: write this many tokens greedily, or fewer if the model ends the text.
        continuation: instead, explain this continuation: the new text only, one per prompt, as text or token ids; in a
            chat, the assistant's answer.
        span: a span of the generated text, attributed as a whole (the sum of its tokens' targets). ``"all"``, a text
            (its last occurrence), ``(start, stop)`` or a slice of the generated tokens, or the number of one; or a list
            with one per prompt.
        hops: how many times to pass scores on generated tokens back to their sources, or ``"all"``, after which only
            the prompt and the bias have scores. Weights are those of each token's own logit, whatever `minus` is.
        shares: how a token's score is divided among its sources: by ``"signed"`` shares of its own logit, one pull per
            hop of a span; or by ``"absolute"`` ones, one pull per generated token, whatever the number of hops.
        minus: a token to subtract, ``"runner-up"`` for the most likely other token at each position, or one for each
            prompt or query, as in `FrozenOperator.target`.
        bias: ``"apart"`` from the scores, or by ``"position"``; see `FrozenOperator.in_out`.
        rule: the rule for activations; see `FrozenPass.operator`.
        stop_at_eos: end a text before the first end token (of the tokenizer or the config).
        prepend_bos: as in TransformerLens, for strings.
        padding_side: ``"left"`` or ``"right"`` (default), if texts differ in length.
        store, verify: as for `freeze`.
        memory: what may be allocated at once, as ``"512MB"`` or bytes; limits how many prompts run together.
        method: any of `list_methods()`, applied to the same tokens. Scores are summed over a span, or averaged for a
            method that explains no prediction (such as attention).
        options: options of a method other than the default.

    Raises:
        RegistryError: no such method.
        InvalidInputError: an option that the method does not take, or hops with a method other than the default; both
            or neither of `max_new_tokens` and `continuation`; a continuation that is empty, changes the prompt's
            tokens, or is not one per prompt; nothing generated; a text beyond the context; a span that is empty or not
            within the generated text; an invalid number of hops.
        UnsupportedModelError: not a causal language model; also whatever `freeze` raises.
    """
    question = _Question(span, hops, shares, minus, bias, rule, memory, method, options)
    known_rule(rule)
    in_bytes(memory)
    view = ModelView(model)
    texts = texts_of(view, prompt, max_new_tokens, continuation, stop_at_eos=stop_at_eos, prepend_bos=prepend_bos)
    batches = memory_batches(view, [len(ids) for ids, _ in texts], memory)
    if len(batches) == 1:
        return frozen_texts(model, texts, padding_side, store, verify)._answer(question)
    others = None if isinstance(minus, str) else one_per_prompt("minus", minus, len(texts))
    spans = span_of_each(span, len(texts))
    parts = []
    for batch in batches:
        of_batch: dict[str, Any] = {}
        if others is not None:
            of_batch["minus"] = taken(others, batch)
        if spans is not None:
            of_batch["span"] = taken(spans, batch)
        try:
            frozen = frozen_texts(model, [texts[number] for number in batch], padding_side, store, verify)
            parts.append(replace(frozen, _of_batch=True)._answer(replace(question, **of_batch)))
        except InvalidInputError as error:
            raise error.with_prompts(dict(enumerate(map(PromptNumber, batch)))) from error
    explained: dict[str, Any] = {}
    for name in ("generated", "asked"):
        of_parts = (zip(batch, part.options[name], strict=True) for part, batch in zip(parts, batches, strict=True))
        by_prompt = dict(chain.from_iterable(of_parts))
        explained[name] = [by_prompt[prompt] for prompt in sorted(by_prompt)]
    if others is not None:
        explained["minus"] = minus
    if spans is not None:
        explained["span"] = span
    return joined_results(parts, batches, explained)


def scored_by(
    run: PassOrDifference,
    method: str,
    queries: Int[Tensor, "batch query"],
    options: Mapping[str, Any],
    *,
    span: bool,
    memory: Memory = None,
) -> Attribution:
    """Return a method's scores of the tokens that queries predict; for a `span`, summed (averaged without a target)."""
    explains = get_method(method).explains_prediction(options)
    target = {"target": NEXT} if explains else {}
    result = attribute(run, method=method, query=queries, memory=memory, **target, **options)
    if not span:
        return result
    return one_query(result, mean=not explains)
