"""A frozen text of prompt and continuation, and what made its generated tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number, whole_slice
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.generation.hops import check_hops, sent_on
from tensorlens_tl.generation.writing import Text, refuse_non_causal, texts_of
from tensorlens_tl.models.activations import check_rule
from tensorlens_tl.models.protocol import NEXT, ModelLike, TokenLike
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.freezing import freeze
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import find, memory_batches, numbered, one_per_prompt, taken
from tensorlens_tl.passes.operator import Collapse
from tensorlens_tl.results.attribution import Attribution
from tensorlens_tl.results.joining import joined

RUNNER_UP = "runner-up"
"""As `minus=`: at each position the token of largest logit besides the one that is there."""


@dataclass(frozen=True, eq=False)
class FrozenGeneration:
    """Prompts and their continuations in one frozen pass. Made by `freeze_generation`.

    Attributes:
        frozen: the pass of the whole text.
        places: where each generated token stands, `[batch, token]`; where a prompt has fewer of them, padding.
    """

    frozen: FrozenPass
    places: Int[Tensor, "batch token"]
    _links: dict[tuple[str, str], Collapse] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = sorted(set(self.real.sum(1).tolist()))
        return f"FrozenGeneration({'–'.join(map(str, counts))} generated tokens, {self.frozen})"

    @property
    def real(self) -> Bool[Tensor, "batch token"]:
        """Which entries of `places` are generated tokens."""
        return torch.take_along_dim(self.frozen.mask, self.places, dim=1)

    @property
    def texts(self) -> list[str]:
        """What was generated after each prompt."""
        return ["".join(self._tokens(row)) for row in range(len(self.places))]

    def attribute(
        self,
        *,
        span: Any = None,
        hops: Any = 0,
        minus: TokenLike = None,
        bias: str = "apart",
        activation: str = "ratio",
        memory: Memory = None,
    ) -> Attribution:
        """What made the generated tokens, one query for each, or a stretch of them together.

        Args:
            span, hops, minus, bias, activation, memory: as for `attribute_generation`.

        Raises:
            InvalidInputError: a span that is empty, outside the generated text or not in it; no such number of hops;
                and what `FrozenOperator.target` raises.
        """
        check_hops(hops)
        places = self.places if span is None else self._span(span)
        queries = self._queries(places)
        operator = self.frozen.operator(activation=activation)
        if span is None and minus is None:
            collapse = self.links(bias=bias, activation=activation, memory=memory)
        else:
            others = minus
            if isinstance(minus, str) and minus == RUNNER_UP:
                others = self._runners_up(queries)
            collapse = operator.target(NEXT, others, query=queries, bias=bias, summed=span is not None, memory=memory)
        scores = collapse.scores
        constant = collapse.bias
        assert constant is not None
        if hops != 0:
            links = self.links(bias=bias, activation=activation, memory=memory)
            assert links.bias is not None
            positions = torch.arange(self.frozen.tokens.shape[1], device=self.places.device)
            generated = (self.places[..., None] == positions) & self.real[..., None]
            scores, constant = sent_on(scores, constant, links.scores, links.bias, generated, hops)
        options = {"span": span, "hops": hops, "minus": minus, "bias": bias, "activation": activation}
        shown = queries if span is None else self._last(queries)
        return Attribution.of(
            self.frozen,
            scores,
            method="generation",
            query=shown,
            bias=constant,
            total=collapse.total,
            additive=True,
            target=self._label(queries, span, minus, hops),
            options={name: value for name, value in options.items() if value is not None}
            | {"generated": self.places_of_each(), "asked": self._token_places(queries)},
        )

    def links(self, *, bias: str = "apart", activation: str = "ratio", memory: Memory = None) -> Collapse:
        """What made the logit of every generated token: the scores that hops go along; kept for the next question."""
        self.frozen.check_fresh()
        in_bytes(memory)  # refused also where nothing is left to compute
        links = self._links.get((bias, activation))
        if links is None:
            operator = self.frozen.operator(activation=activation)
            queries = self._queries(self.places)
            links = self._links[bias, activation] = operator.target(NEXT, query=queries, bias=bias, memory=memory)
        return links

    def places_of_each(self) -> list[list[int]]:
        """The first place of each prompt's generated tokens, and the one after the last."""
        counts = self.real.sum(1).tolist()
        return [[row[0], row[count - 1] + 1] for row, count in zip(self.places.tolist(), counts, strict=True)]

    # ------------------------------------------------------------------ inside

    def _queries(self, places: Int[Tensor, "batch token"]) -> Int[Tensor, "batch token"]:
        """Where tokens are predicted: one position earlier; padding stays."""
        return places - torch.take_along_dim(self.frozen.mask, places, dim=1).long()

    def _last(self, queries: Int[Tensor, "batch query"]) -> Int[Tensor, "batch 1"]:
        real = torch.take_along_dim(self.frozen.mask, queries, dim=1)
        return (queries * real).amax(1, keepdim=True)

    def _token_places(self, queries: Int[Tensor, "batch query"]) -> list[list[int]]:
        """The generated tokens that are asked about, by place."""
        real = torch.take_along_dim(self.frozen.mask, queries, dim=1).tolist()
        return [
            [p + 1 for p, is_real in zip(*pair, strict=True) if is_real]
            for pair in zip(queries.tolist(), real, strict=True)
        ]

    def _tokens(self, row: int) -> list[str]:
        first, stop = self.places_of_each()[row]
        return self.frozen.str_tokens[row][first:stop]

    def _span(self, span: Any) -> Int[Tensor, "batch token"]:
        """The places of a span's tokens."""
        rows = [self._stretch(span, row) for row in range(len(self.places))]
        most = max(map(len, rows))
        padding = (~self.frozen.mask).long()
        if any(len(row) < most for row in rows) and not bool(padding.any(1).all()):
            counts = sorted({len(row) for row in rows})
            raise InvalidInputError(
                f"span={span!r} stands for {counts} tokens of these prompts, which are equally long; freeze them one "
                "by one, or pass a slice."
            )
        spare = padding.argmax(1).tolist()
        filled = [row + [place] * (most - len(row)) for row, place in zip(rows, spare, strict=True)]
        return torch.tensor(filled, device=self.places.device)

    def _stretch(self, span: Any, row: int) -> list[int]:
        """The same of one prompt; `span` counts its generated tokens."""
        first, stop = self.places_of_each()[row]
        places = list(range(first, stop))
        tokens = self._tokens(row)
        if isinstance(span, str) and span != "all":
            try:
                begin, end = find(tokens, span)[-1]
            except InvalidInputError:
                raise InvalidInputError(
                    f"span={span!r} does not occur as whole tokens in the text generated after prompt {row}: {tokens}."
                ) from None
            return places[begin:end]
        within = _bounds(span, len(places))
        if not places[within]:
            raise InvalidInputError(
                f"span={span!r} is empty: {len(places)} tokens were generated after prompt {row}, 0 to "
                f"{len(places) - 1}."
            )
        return places[within]

    def _runners_up(self, queries: Int[Tensor, "batch query"]) -> Int[Tensor, "batch query"]:
        """The token of largest logit besides the next one, at each query."""
        logits = self.frozen.logits(queries)
        assert logits is not None  # `refuse_non_causal`
        after = (queries + 1).clamp_max(self.frozen.tokens.shape[1] - 1)
        next_tokens = torch.take_along_dim(self.frozen.tokens, after, dim=1)
        return logits.scatter(-1, next_tokens[..., None].to(logits.device), -torch.inf).argmax(-1)

    def _label(self, queries: Int[Tensor, "batch query"], span: Any, minus: TokenLike, hops: Any) -> str:
        what = "logit" if minus is None else "logit difference"
        against = ""
        if minus is not None:
            against = " to the runner-up" if minus == RUNNER_UP else f" to {minus!r}"
        if span is None:
            what = f"{what}{against} of each generated token"
        else:
            tokens = [self.frozen.str_tokens[0][place] for place in self._token_places(queries)[0]]
            text = f" {''.join(tokens)!r}" if len(self.places) == 1 and len(tokens) <= 12 else ""
            plural = "s" if len(tokens) > 1 else ""
            what = f"sum of the {what}s{against} of {len(tokens)} generated token{plural}{text}"
        if hops == 0:
            return what
        return f"{what}, after {hops} hop{'' if hops == 1 else 's'}"


def _bounds(span: Any, count: int) -> slice:
    """A span by numbers as a slice of the generated tokens."""
    if isinstance(span, slice):
        return whole_slice("span", span, why="a slice of the generated tokens")
    if span == "all":
        return slice(None)
    if isinstance(span, tuple | list) and len(span) == 2:
        start, stop = (whole_number("span", end, 0, count, "ends among the generated tokens") for end in span)
        return slice(start, stop)
    place = whole_number("span", span, -count, count - 1, "a generated token, (start, stop), a slice or a text")
    return slice(place, place + 1 or None)


def _frozen(model: ModelLike, texts: Sequence[Text], padding_side: str | None, **freezing: Any) -> FrozenGeneration:
    """Texts in one pass; where they are unequal, with one place of padding at least in each."""
    ids = [text for text, _ in texts]
    first = [begin for _, begin in texts]
    lengths = [len(row) for row in ids]
    if padding_side not in (None, "left", "right"):
        raise InvalidInputError(f"padding_side={padding_side!r}; use 'left' or 'right'.")
    if len(set(lengths)) == len(set(first)) == 1:
        frozen = freeze(model, torch.tensor(ids), **freezing)
    else:
        width = max(lengths) + 1  # a prompt with fewer generated tokens asks there for the missing ones
        tokens = torch.zeros(len(ids), width, dtype=torch.long)
        mask = torch.zeros(len(ids), width, dtype=torch.long)
        for number, row in enumerate(ids):
            place = slice(width - len(row), None) if padding_side == "left" else slice(0, len(row))
            tokens[number, place] = torch.tensor(row)
            mask[number, place] = 1
        frozen = freeze(model, tokens, attention_mask=mask, **freezing)
    if _looks_ahead(frozen):
        raise UnsupportedModelError(
            f"generated text: tokens of this {frozen.view.description} attend to later ones. A causal language model "
            "is needed."
        )
    most = max(length - begin for length, begin in zip(lengths, first, strict=True))
    start = frozen.mask.long().argmax(1).tolist()
    padding = (~frozen.mask).long().argmax(1).tolist()
    places = [
        [*range(left + begin, left + length)] + [spare] * (most - length + begin)
        for left, begin, length, spare in zip(start, first, lengths, padding, strict=True)
    ]
    return FrozenGeneration(frozen, torch.tensor(places, device=frozen.mask.device))


def _looks_ahead(frozen: FrozenPass) -> bool:
    """Whether a real token attends to later ones; padding on the left may, where all of its own keys are masked."""
    patterns = (frozen.pattern(n) for n, points in enumerate(frozen.points.blocks) if points.pattern is not None)
    return any(bool((pattern.triu(1) * frozen.mask[:, None, :, None]).any()) for pattern in patterns)


def freeze_generation(
    model: ModelLike,
    prompt: Any,
    *,
    max_new_tokens: Any = None,
    continuation: Any = None,
    stop_at_eos: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    store: str = "model",
    verify: Any = True,
) -> FrozenGeneration:
    """Write or take continuations of prompts, and freeze the whole texts once, in one pass.

    Args:
        model, prompt, max_new_tokens, continuation, stop_at_eos, prepend_bos, padding_side: as for
            `attribute_generation`.
        store, verify: as for `freeze`.

    Raises:
        InvalidInputError: see `attribute_generation`.
        UnsupportedModelError: not a causal language model, and what `freeze` refuses.
    """
    view = ModelView(model)
    refuse_non_causal(view)
    texts = texts_of(
        view, prompt, max_new_tokens, continuation, stop_at_eos=stop_at_eos, prepend_bos=prepend_bos
    )  # fmt: skip
    return _frozen(model, texts, padding_side, store=store, verify=verify)


def attribute_generation(
    model: ModelLike,
    prompt: Any,
    *,
    max_new_tokens: Any = None,
    continuation: Any = None,
    span: Any = None,
    hops: Any = 0,
    minus: TokenLike = None,
    bias: str = "apart",
    activation: str = "ratio",
    stop_at_eos: bool = True,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    store: str = "model",
    verify: Any = True,
    memory: Memory = None,
) -> Attribution:
    """What made the text that a model writes after a prompt: scores of the prompt and of earlier generated tokens.

    The whole text is frozen once. The result has one query for each generated token, which is the position that
    predicts it, one before its own; or with `span` one query in all, made by one pull. Its options say where the
    generated tokens stand (``"generated"``: first place, and the one after the last, of each prompt) and which of them
    are asked about (``"asked"``).

    Args:
        model: a causal language model.
        prompt: a string, a list of strings, or token ids.
        max_new_tokens: write so many tokens greedily: each has the largest logit of a plain run. Fewer where the model
            ends before.
        continuation: or take this continuation: the new text only, one for each prompt, as text or token ids.
        span: a stretch of the generated text, asked about as a whole: the sum of its tokens' targets. ``"all"``, a
            text (its last occurrence), ``(start, stop)`` or a slice of the generated tokens, or the number of one.
        hops: send what reached generated tokens on to what made those: so many times, or ``"all"``, after which only
            the prompt and the bias have scores. See `tensorlens_tl.generation.hops`; weights are those of each token's
            own logit, whatever `minus` says.
        minus: a token to hold each one against, ``"runner-up"`` for the likeliest other token at each position, or one
            for each prompt or query, as in `FrozenOperator.target`.
        bias: ``"apart"`` from the scores, or by ``"position"``; see `FrozenOperator.in_out`.
        activation: the rule for activations; see `FrozenPass.operator`.
        stop_at_eos: end a text before the first end token (of the tokenizer or the config) that the model writes.
        prepend_bos: as in TransformerLens; of strings.
        padding_side: ``"left"`` or ``"right"`` (the default), where texts differ in length.
        store, verify: as for `freeze`.
        memory: what may be allocated at once, as ``"512MB"`` or bytes; it bounds how many prompts run together.

    Raises:
        InvalidInputError: both or neither of `max_new_tokens` and `continuation`; a continuation that is empty, that
            changes the prompt's tokens, or not one per prompt; nothing written; a text beyond the context; a span that
            is empty, outside the generated text or not in it; no such number of hops.
        UnsupportedModelError: not a causal language model, and what `freeze` refuses.
    """
    check_hops(hops)
    check_rule(activation)
    in_bytes(memory)
    view = ModelView(model)
    refuse_non_causal(view)
    texts = texts_of(
        view, prompt, max_new_tokens, continuation, stop_at_eos=stop_at_eos, prepend_bos=prepend_bos
    )  # fmt: skip
    question: dict[str, Any] = {"span": span, "hops": hops, "minus": minus}
    question |= {"bias": bias, "activation": activation, "memory": memory}
    freezing = {"padding_side": padding_side, "store": store, "verify": verify}
    batches = memory_batches(view, [len(ids) for ids, _ in texts], memory)
    if len(batches) == 1:
        return _frozen(model, texts, **freezing).attribute(**question)
    split = None if isinstance(minus, str) else one_per_prompt("minus", minus, len(texts))
    parts = []
    for batch in batches:
        batch_question: dict[str, Any] = question if split is None else {**question, "minus": taken(split, batch)}
        try:
            parts.append(_frozen(model, [texts[number] for number in batch], **freezing).attribute(**batch_question))
        except InvalidInputError as error:
            raise InvalidInputError(numbered(str(error), batch)) from error
    prompt_options = {
        name: [row for _, row in sorted(_by_prompt(parts, batches, name), key=lambda numbered: numbered[0])]
        for name in ("generated", "asked")
    }
    if split is not None:
        return joined(parts, batches, prompt_options | {"minus": minus})
    return joined(parts, batches, prompt_options)


def _by_prompt(parts: Sequence[Attribution], batches: Sequence[Sequence[int]], name: str) -> list[tuple[int, Any]]:
    """An option of every prompt, with the prompt's number."""
    return [
        pair for part, batch in zip(parts, batches, strict=True) for pair in zip(batch, part.options[name], strict=True)
    ]
