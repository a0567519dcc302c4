"""Perturbation tests: replace source tokens in the order of their scores, and see what that does to the live model.

With the most relevant tokens first (``order="descending"``, positive perturbation) a faithful map breaks the model
sooner: higher is better. With the least relevant first (``"ascending"``, negative perturbation) it leaves the model as
it was: lower is better. After a share f of a prompt's tokens has been replaced, at the query:

| metric | damage(f) |
| --- | --- |
| `hs_mse` | mean squared difference of the final hidden state (what the model unembeds, or what its blocks give) |
| `aopc` | p(0) − p(f), p the probability of the token that was predicted for the whole prompt |
| `logit` | the same token's logit(0) − logit(f) |

An area under the curve is the trapezoid rule over the fractions, divided by their range: the damage averaged over it.
Special tokens and padding are never replaced, and each step but the first replaces at least one token, so that short
prompts can be measured with the same fractions. (TensorLens 2026, Figures 3 to 7; AOPC: Samek et al. 2017.)
"""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import Seed, Whole, checked_names, plain, whole_count, whole_number
from tensorlens_tl._row_files import UNKNOWN_ID, Reading
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.datasets import (
    DatasetResults,
    Engine,
    LoadModel,
    RowSource,
    RunOptions,
    check_columns,
    read_prompts,
    run_work,
)
from tensorlens_tl.datasets.work import Record, Work
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.evaluate.scorers import (
    MEAN_TOLERANCE,
    PROMPTS_AT_ONCE,
    Explained,
    Fractions,
    Hidden,
    MethodFunction,
    Methods,
    Metrics,
    Order,
    PerturbationQuery,
    ReplacementName,
    Scorer,
    Stretch,
    random_scores,
    scorers_of,
    usable,
)
from tensorlens_tl.generation import Continuation, Count, Span, freeze_generation, not_causal
from tensorlens_tl.hooks import SomeLogits, capture, foreign_hooks, model_points
from tensorlens_tl.models import FIRST_CHOICE, NEXT, RUNNER_UP, ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import TOLERANCE, freeze
from tensorlens_tl.passes.inputs import IdsLike, InputLike, Prompt, prepare, query_positions
from tensorlens_tl.passes.replacement import Mean, Placement, Replacement, inputs_of, vocabulary_mean
from tensorlens_tl.passes.target import FIRST_CHOICE_ID, RUNNER_UP_ID, logit_label, next_ids, token_ids
from tensorlens_tl.results import SEVERAL_TARGETS, Evaluation, area

OF_PREDICTION = ("aopc", "aopc_abs", "logit")
"""Metrics of a prediction."""

RESAMPLED = "resampled"
"""The name of the replacement; a `Replacement` of that name has no tokens before they are drawn for some prompts."""

AT_ONCE = 2**23
"""How many probabilities are held at once, in float64."""


class PerturbedRuns:
    """Runs the live model on perturbed prompts, and compares it with itself on the whole ones.

    User code may act on some rows of a batch only (see `tensorlens_tl.passes.live`): prompts then run one by one
    (`alone`), else between whole ones that must come out the same. A query is one position of each prompt, "all" for
    the mean, or the positions that predict a stretch of generated text, `[prompt, query]` with `NEXT` as the target.
    Damages of several replacements are averaged.
    """

    def __init__(
        self,
        test: "PerturbationTest",
        view: ModelView,
        prompt: Prompt,
        query: int | Literal["all"] | Int[Tensor, "prompt query"],
        replacements: Sequence[Replacement],
        target: TokenLike = None,
        minus: TokenLike = None,
    ) -> None:
        if isinstance(target, str) and target == FIRST_CHOICE:  # as where none is named
            target = None
        self.model = view.model
        self.prompt = prompt
        self.is_stretch = isinstance(query, Tensor)
        self.query: int | Literal["all"] = -1 if isinstance(query, Tensor) else query
        self.metrics = test.names
        points = model_points(view)
        self.unembed_at = points.unembed_in or points.output
        # a mean over positions is one of the output; a classifier's head reads too few of them
        of_output = test.hidden == "output" or (self.query == "all" and view.class_head is not None)
        self.hidden_at = points.output if of_output else self.unembed_at
        self.positions = None if self.query == "all" else query_positions(prompt, query)
        self.predicts = test.predicts
        for metric in set(test.names) & {"aopc", "aopc_abs"}:
            view.require_probabilities(f"metrics={metric!r}")
        self.alone = bool(foreign_hooks(view.model))
        self._placements = [Placement.of(view, prompt, one, singly=self.alone) for one in replacements]
        self.rows = self._rows_at_once(view, test.working_bytes)
        self.tolerance = TOLERANCE.get(next(view.model.parameters()).dtype, 1e-4)
        self._whole: list[Tensor] = []  # hidden states of whole prompts, and logits where they are read, once known
        nothing = torch.zeros_like(prompt.mask).cpu()
        self._whole = self._measure(torch.arange(len(prompt.tokens)), nothing, self._placements[0])
        self._tokens = self._tokens_of(view, target, minus)
        self._is_named = target is not None or minus is not None

    def _tokens_of(
        self, view: ModelView, target: TokenLike, minus: TokenLike
    ) -> tuple[Int[Tensor, "prompt query"] | None, Int[Tensor, "prompt query"] | None]:
        """The tokens that each prompt is measured by, and those that they are compared with."""
        if self.positions is None:  # a mean over all queries is about no token
            return None, None
        prompts, queries = self.positions.shape
        ids = None
        if target is NEXT:
            ids = next_ids(self.prompt, self.positions).cpu()
        elif target is not None:
            ids = self._ranked("target", token_ids(view, target, prompts, queries=queries))
        elif self.predicts:
            ids = self._whole[1].argmax(-1)
        if minus is None:
            return ids, None
        if ids is None:
            raise InvalidInputError("perturbation: minus= needs target=, or a metric of the prediction.")
        others = self._ranked("minus", token_ids(view, minus, prompts, "minus", queries), ids)
        same = ((ids == others) & self._real(torch.arange(prompts))).any(1)
        if bool(same.any()):
            raise InvalidInputError(
                f"perturbation: target and minus of prompt {int(same.nonzero()[0])} are the same token."
            )
        return ids, others

    def _ranked(
        self, name: str, ids: Int[Tensor, "prompt query"], besides: Int[Tensor, "prompt query"] | None = None
    ) -> Int[Tensor, "prompt query"]:
        """Token ids, with those that are named by the rank of their logits; a runner-up is none of `besides`."""
        words = {FIRST_CHOICE_ID: FIRST_CHOICE, RUNNER_UP_ID: RUNNER_UP}
        for number, word in words.items():
            if not bool((ids == number).any()):
                continue
            if not self.predicts:
                raise InvalidInputError(f"{name}={word!r}: measure 'aopc' or 'logit' as well, or name a token.")
            logits = self._whole[1]
            if number == RUNNER_UP_ID and besides is not None:
                logits = logits.scatter(-1, besides[..., None], -torch.inf)
            ids = torch.where(ids == number, logits.argmax(-1), ids)
        return ids

    def _real(self, index: Int[Tensor, "row"]) -> Bool[Tensor, "row query"]:
        """Which queries of some prompts are none of padding."""
        assert self.positions is not None
        return torch.take_along_dim(self.prompt.mask, self.positions, dim=1).cpu()[index]

    def explained(self, part: slice) -> Explained | Stretch | None:
        """What methods explain of some prompts; None where it is the token that the model predicts."""
        ids, others = self._tokens
        minus = None if others is None else others[part].tolist()
        if self.is_stretch and self.positions is not None:
            return Stretch(self.positions[part], minus)
        if not self._is_named or ids is None:
            return None
        if minus is not None:
            minus = [row[0] for row in minus]
        return Explained(ids[part, 0].tolist(), minus)

    def _rows_at_once(self, view: ModelView, memory: int) -> int:
        """How many perturbed prompts are run together."""
        if self.alone:
            return 1
        pos = self.prompt.tokens.shape[1]
        widest = max((block.mlp.hidden for block in view.blocks if block.mlp is not None), default=0)
        heads = max((block.attention.heads for block in view.blocks if block.mixer is None), default=0)
        per_row = pos * (8 * view.cfg.d_model + 2 * widest + 2 * pos * heads)
        if self.predicts:
            per_row += view.d_vocab * (1 if self.positions is None else self.positions.shape[1])
        return max(1, memory // (4 * per_row))

    def damage(self, part: slice, replaced: Bool[Tensor, "prompt step pos"]) -> Float[Tensor, "metric prompt step"]:
        """Every metric of some prompts with some of their tokens replaced."""
        prompts, steps, _ = replaced.shape
        index = torch.arange(part.start, part.start + prompts).repeat_interleave(steps)
        before = [whole[index] for whole in self._whole]
        ids, others = (None if tokens is None else tokens[index] for tokens in self._tokens)
        real = torch.ones(len(index), 1, dtype=torch.bool) if self.positions is None else self._real(index)
        damages: list[Tensor] = []
        for placement in self._placements:
            after = self._measure(index, replaced.flatten(0, 1), placement)
            damages.append(torch.stack([_damage(name, before, after, ids, others, real) for name in self.metrics]))
        return torch.stack(damages).mean(0).unflatten(1, (prompts, steps))

    def _measure(
        self, index: Int[Tensor, "row"], replaced: Bool[Tensor, "row pos"], placement: Placement
    ) -> list[Float[Tensor, "row query _width"]]:
        """Final hidden states at the queries, and where a metric reads them the logits there."""
        chunks = zip(index.split(self.rows), replaced.split(self.rows), strict=True)
        outputs = [self._between_whole(rows, part, placement) for rows, part in chunks]
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def _between_whole(self, rows: Tensor, replaced: Tensor, placement: Placement) -> list[Tensor]:
        """One run: a row by itself, or several between the first and the last of their prompts, whole."""
        if len(rows) == 1:
            return self._run(rows, replaced, placement)
        whole = torch.zeros_like(replaced[:1])
        ends = rows[[0, -1]]
        outputs = self._run(torch.cat([ends[:1], rows, ends[1:]]), torch.cat([whole, replaced, whole]), placement)
        # the whole prompts themselves are measured first: their rows beside the ends are the same prompts
        expected = [known[ends] for known in self._whole] or [output[[1, -2]] for output in outputs]
        for output, prompts in zip(outputs, expected, strict=True):
            error = relative_error(output[[0, -1]], prompts)
            if not error <= self.tolerance:
                raise FrozenModelError(
                    f"perturbation: a prompt gives another number in the first or the last row of a batch than "
                    f"elsewhere (they differ by {error:.1e}): something acts on some rows only, and it is none of "
                    "the model's hooks. Let it act on every row; or put it on the model as a hook, and prompts are run "
                    "one by one."
                )
        return [output[1:-1] for output in outputs]

    def _run(self, rows: Tensor, replaced: Tensor, placement: Placement) -> list[Tensor]:
        """What `_measure` gives, of one batch."""
        rows = rows.to(self.prompt.tokens.device)
        inputs, hooks = placement.put(inputs_of(self.prompt, rows), replaced.to(rows.device), rows)
        at = None if self.positions is None else self.positions[rows]
        if at is not None and self.predicts:
            some = SomeLogits(self.model, self.unembed_at, at)
            activations, logits = capture(self.model, inputs, [self.hidden_at], hooks=[*hooks, *some.hooks])
            outputs = [_vectors(activations[self.hidden_at], at), some.of(logits)]
        else:
            activations, _ = capture(self.model, inputs, [self.hidden_at], hooks=hooks, last=self.hidden_at)
            hidden, mask = activations[self.hidden_at], self.prompt.mask[rows]
            if at is None:  # the mean over real tokens
                outputs = [((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))[:, None]]
            else:
                outputs = [_vectors(hidden, at)]
        return [output.double().cpu() for output in outputs]


def _damage(
    metric: str,
    before: list[Tensor],
    after: list[Tensor],
    ids: Int[Tensor, "row query"] | None,
    others: Int[Tensor, "row query"] | None,
    real: Bool[Tensor, "row query"],
) -> Float[Tensor, "row"]:
    """Return one metric, from hidden states and logits of whole prompts and of perturbed ones.

    Metrics of a prediction are about the tokens `ids`, less `others`. Falls of logits are summed over the `real`
    queries, everything else is averaged.
    """
    counts = real.sum(1)
    if metric == "hs_mse":
        return ((after[0] - before[0]).square().mean(-1) * real).sum(1) / counts
    whole = before[1]
    perturbed = after[1]
    assert ids is not None
    if metric != "logit":
        whole = whole.softmax(-1)
        perturbed = perturbed.softmax(-1)
    changes = whole - perturbed
    fall = changes.gather(-1, ids[..., None])[..., 0]
    if others is not None:
        fall = fall - changes.gather(-1, others[..., None])[..., 0]
    fall = (fall * real).sum(1)
    if metric == "logit":
        return fall
    fall = fall / counts
    if metric == "aopc_abs":
        return fall.abs()
    return fall


def _vectors(hidden: Tensor, at: Int[Tensor, "row query"]) -> Float[Tensor, "row query d"]:
    """Vectors at some positions per prompt; a classifier's head may have been given no other."""
    if hidden.ndim == 2:
        return hidden[:, None]
    return torch.take_along_dim(hidden, at[..., None], dim=1)


# ------------------------------------------------------------------ what stands for a token

# A mean embedding, or a token that fits nowhere, takes a trained model to inputs that it has never seen: one of them
# may break a prediction wherever it stands, so that a test by it says nothing about which token mattered. A token that
# the model expects after what stands before keeps the prompt a text.


def replacement_of(view: ModelView, prompt: Prompt, name: ReplacementName, mean: Mean | None = None) -> Replacement:
    """The replacement that a user names; None is ``"resampled"`` of a causal language model that reads tokens alone."""
    if name is not None and not (isinstance(name, str) and name == RESAMPLED):
        return Replacement.of(view, prompt, name, mean)
    why = not_causal(view)
    if why is None and prompt.extra:
        why = f"reads more than tokens here ({', '.join(sorted(prompt.extra))})"
    if why is None and view.unembedding is not None and view.unembedding[0].shape[1] != view.d_vocab:
        why = "has logits that are not those of the tokens that it reads"
    if why is None:
        return Replacement(RESAMPLED)
    if name is None:
        return Replacement.of(view, prompt, None, mean)
    raise InvalidInputError(
        f"replacement={RESAMPLED!r}: a token is drawn from a causal language model's own predictions, and "
        f"{view.description} {why}. Use 'mean', 'zero', or of a model that reads text 'mask' or a token."
    )


def drawn(view: ModelView, prompt: Prompt, replacement: Replacement, draws: int, seed: int) -> list[Replacement]:
    """Return what replaces tokens in some prompts: `draws` times other tokens, or a fixed replacement itself.

    Prompts run one by one without padding; draws depend on the seed, their number and the prompt's tokens, so they are
    the same in every batch.
    """
    if replacement.name != RESAMPLED:
        return [replacement]
    tokens = prompt.tokens.repeat(draws, 1, 1)
    for row, mask in enumerate(prompt.mask):
        ids = prompt.tokens[row, mask]
        seeds = [hash((seed, draw, *ids.tolist())) for draw in range(draws)]
        rngs = [random.Random(one) for one in seeds]
        uniform = torch.tensor([[rng.random() for _ in range(len(ids))] for rng in rngs], dtype=torch.float64)
        parts: list[Tensor] = []
        for probabilities in _expected(view, ids):
            if not bool(torch.isfinite(probabilities).all()):
                raise InvalidInputError(
                    PromptNumber(row),
                    f": replacement={RESAMPLED!r} finds no other token to draw: all are special tokens, or the logits "
                    "are not finite. Use 'mean', 'zero' or a token.",
                )
            first = sum(part.shape[1] for part in parts)
            up_to = probabilities.cumsum(-1)
            at = (uniform[:, first : first + len(up_to)].T * up_to[:, -1:]).contiguous()
            parts.append(torch.searchsorted(up_to, at, right=True).T)
        tokens[:, row, mask] = torch.cat(parts, dim=1).to(tokens.device)
    return [replace(replacement, tokens=some) for some in tokens]


def _expected(view: ModelView, ids: Int[Tensor, "pos"]) -> Iterator[Float[Tensor, "_some d_vocab"]]:
    """Return what the model expects at each position of a prompt, some at a time, in float64 on the CPU.

    The token itself and special ones are excluded. The first position (never replaced where it is BOS) has the mean
    over what follows each token.
    """
    _, logits = capture(view.model, prepare(view, [ids.tolist()]).kwargs, [])
    logits = logits[0]
    ids = ids.cpu()
    size = max(1, AT_ONCE // logits.shape[-1])
    special = torch.tensor(sorted(getattr(view.tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    special = special[special < logits.shape[-1]]

    def without(some: Tensor, besides: Tensor) -> Tensor:
        some = some.double().cpu()
        some[:, special] = -torch.inf
        return some.scatter(1, besides[:, None], -torch.inf).softmax(-1)

    sums = [without(some, ids[:1].expand(len(some))).sum(0) for some in logits.split(size)]
    yield torch.stack(sums).sum(0, keepdim=True) / len(ids)
    for some, besides in zip(logits[:-1].split(size), ids[1:].split(size), strict=True):
        if len(besides):
            yield without(some, besides)


FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
METRICS = ("hs_mse", "aopc", "logit")
"""The metrics that are measured unless others are named."""

KINDS = {"descending": "positive perturbation", "ascending": "negative perturbation"}
"""What an evaluation is called, by the order of replacement."""


@checked_names
def perturbation(
    model: ModelLike,
    prompts: InputLike,
    methods: Methods = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: PerturbationQuery = -1,
    max_new_tokens: Count = None,
    continuation: Continuation = None,
    span: Span = None,
    fractions: Fractions = FRACTIONS,
    replacement: ReplacementName = None,
    draws: Whole = 3,
    metrics: Metrics = METRICS,
    order: Order = "descending",
    absolute: bool = False,
    hidden: Hidden = "unembedded",
    attention_mask: IdsLike = None,
    prepend_bos: bool | None = None,
    seed: Seed = 0,
    memory: Memory = None,
) -> Evaluation:
    """Measure the damage of replacing the tokens that each method ranks first.

    Args:
        model: a TransformerLens model.
        prompts: strings, or token ids `[prompt, pos]`; images or sound as the model reads them (see `tlens.freeze`):
            patches or frames are replaced.
        methods: see `tensorlens_tl.evaluate.scorers`; None is all that fit the model, and a random order. Methods that
            you name must fit the model. A method without a target ranks tokens in one order for every target.
        target, minus: the token that methods explain and metrics measure, and one that it is compared with (also
            ``"runner-up"``); one for each prompt, or one for all. None, as ``"first-choice"``, is what the model
            predicts for the whole prompt. With `minus`, `logit` and `aopc` are falls of the difference of both logits,
            or probabilities.
        query: a position counted over real tokens (-1 the last, 0 an encoder's [CLS]), or ``"mean"``: scores and final
            hidden states averaged over all positions (metric `hs_mse` only; norms of T are then estimated, to
            `MEAN_TOLERANCE`).
        max_new_tokens, continuation, span: test methods on text that the model wrote after each prompt, or that is
            given: on the sum of the targets of a span of its tokens, as `tlens.attribute_generation` explains it (None
            is ``"all"`` of them; a list has one for each prompt). Only what precedes the span is replaced; `logit` is
            the fall of the sum of its tokens' logits, other metrics are means over its tokens. All prompts are frozen
            at once.
        fractions: shares of a prompt's tokens to replace, ascending, the first 0.
        replacement: ``"resampled"`` (drawn from the model's predictions at the position before, without the token
            itself and special tokens; at the first token, from their mean), ``"mask"`` or ``"pad"`` (the tokenizer's),
            a token (string or id), ``"mean"`` (the token embedding's mean over all prompts) or ``"zero"`` (no token
            embedding; positions stay). None is ``"resampled"`` for a causal language model on tokens only, else the
            mask token where there is one, else the mean. For patches, `"mean"` and `"zero"` are those of the patch
            embedding's output.
        draws: of ``"resampled"``, averaged. A prompt's draws depend on `seed` and its tokens, not on its batch.
        metrics: of `hs_mse` (mean squared change of the final hidden state), `aopc` (the fall of the probability of the
            model's first choice), `aopc_abs` (its absolute value: TensorLens' Table 1), `logit` (the fall of its
            logit).
        order: ``"descending"`` (positive perturbation) or ``"ascending"`` (negative).
        absolute: order by absolute score; the paper and the default keep the sign.
        hidden: which vector `hs_mse` measures: ``"unembedded"``, what the model unembeds, or ``"output"``, that of its
            blocks and final norm. They differ where a prediction head is between (masked language models).
        attention_mask: 1 at real tokens, with token ids only.
        prepend_bos: as in TransformerLens, with strings only.
        seed: of the random order, of the order of equal scores, and of the draws.
        memory: what the perturbed runs may allocate, as ``"512MB"`` or bytes.

    Returns:
        An Evaluation: areas per prompt in `values`, curves over the fractions; for generated text `settings` has
        what was generated after each prompt.

    Raises:
        MethodError: a method fails with an error that is none of the library's; names it.
        InvalidInputError: fractions outside [0, 1] or not ascending, an unknown metric, order or replacement, prompts
            of special tokens only, or methods that cannot be run with their options, or explain no span.
        UnsupportedModelError: the model cannot be frozen, or a metric needs a prediction and it has none.

    >>> from tensorlens_tl import evaluate
    >>> result = evaluate.perturbation(model, [text], ["tensorlens target", "random"], fractions=(0, 0.5, 1))
    >>> result.curves.shape  # metric, method, prompt, step
    torch.Size([3, 2, 1, 3])
    """
    test = PerturbationTest(methods, query, fractions, metrics, order, absolute, hidden, seed, draws, memory)
    view = ModelView(model)
    view.refuse_encoder_decoder("perturbation")
    facts: dict[str, Any] = {}
    explained: dict[str, Any] = {"target": target, "minus": minus}
    if any(option is not None for option in (max_new_tokens, continuation, span)):
        if target is not None or attention_mask is not None:
            raise InvalidInputError(
                "perturbation: a span's tokens are their own targets, and generated text has its own mask; leave "
                "target= and attention_mask= out."
            )
        test.check_generated(minus)
        written = freeze_generation(
            model, prompts, max_new_tokens=max_new_tokens, continuation=continuation, prepend_bos=prepend_bos
        )
        whole_span: Any = "all" if span is None else span
        queries = written.queries(whole_span)
        prompt = written.frozen.prompt
        position = -1
        explained |= {"target": NEXT, "query": queries}
        words = (written.label(queries, "all", minus), repr(whole_span))
        facts["generated"] = written.texts
        if max_new_tokens is not None:
            facts["max_new_tokens"] = max_new_tokens
    else:
        test.check_explained(target, minus)
        prompt = prepare(view, prompts, attention_mask=attention_mask, prepend_bos=prepend_bos)
        position = test.query_of(view, prompt)
        words = (explained_in_words(view, target, minus),)
    by = replacement_of(view, prompt, replacement)
    runs = test.runs(view, prompt, by, **explained)
    part = slice(0, 1)
    first = freeze(model, **prompt.again(part))
    scorers, skipped = usable(test.scorers, first, position, methods is None, runs.explained(part))
    curves = test.curves(runs, scorers)
    axis = torch.tensor(test.steps, dtype=torch.float64)
    about = test.described(view, by, scorers, len(prompt.tokens), *words)
    about["settings"] |= facts
    return Evaluation(
        values=area(curves, axis),
        units=[f"prompt {number}" for number in range(len(prompt.tokens))],
        curves=curves,
        axis=axis,
        skipped=skipped,
        **about,
    )


# ------------------------------------------------------------------ the test


class PerturbationTest:
    """What is measured of prompts; see `perturbation` for each option. Can be pickled if its scorers can.

    `steps` are the shares of tokens that are replaced, `names` those of the metrics, `predicts` whether one is of a
    prediction, `working_bytes` what runs may allocate.
    """

    def __init__(
        self,
        methods: Methods,
        query: PerturbationQuery,
        fractions: Fractions,
        metrics: Metrics,
        order: Order,
        absolute: bool,
        hidden: Hidden,
        seed: int,
        draws: Whole,
        memory: Memory,
    ) -> None:
        self.scorers = scorers_of(methods, seed=seed)
        self.query: PerturbationQuery = query
        self.steps = _fractions(fractions)
        self.names = _metrics(metrics, query)
        self.predicts = bool(set(OF_PREDICTION) & set(self.names))
        self.working_bytes = in_bytes(memory)
        self.draws = whole_count("draws", draws)
        self.order: Order = order
        self.absolute = absolute
        self.hidden: Hidden = hidden
        self.seed = seed
        if order not in ("descending", "ascending"):
            raise InvalidInputError(f"order={order!r}; use 'descending' (most relevant first) or 'ascending'.")
        if hidden not in ("unembedded", "output"):
            raise InvalidInputError(
                f"hidden={hidden!r}; use 'unembedded' or 'output' (what blocks and final norm give)."
            )

    def query_of(self, view: ModelView, prompt: Prompt) -> int | Literal["all"]:
        """The query of some prompts as methods take it, "all" for the mean; prompts and model are checked."""
        query = _query(self.query, prompt)
        if self.predicts and query != "all":
            prompt.in_logits(query_positions(prompt, query))
        if self.predicts and view.unembedding is None:
            raise UnsupportedModelError(f"{view.description} predicts no tokens; use metrics=['hs_mse'].")
        _counts(perturbable(view, prompt), self.steps)
        return query

    def check_explained(self, target: TokenLike, minus: TokenLike) -> None:
        """Refuse tokens that this test cannot be about."""
        if self.query == "mean" and (target is not None or minus is not None):
            raise InvalidInputError("query='mean' has no single prediction; leave target= and minus= out.")
        if minus is not None:
            for scorer in self.scorers:
                scorer.check_minus()

    def check_generated(self, minus: TokenLike) -> None:
        """Refuse what cannot be measured of a stretch of generated text."""
        if self.query != -1:
            raise InvalidInputError(
                f"query={self.query!r}: span= chooses among the generated tokens; leave query= out."
            )
        for scorer in self.scorers:
            scorer.check_stretch()
            if minus is not None:
                scorer.check_minus()

    def runs(
        self,
        view: ModelView,
        prompt: Prompt,
        replacement: Replacement,
        target: TokenLike = None,
        minus: TokenLike = None,
        query: Int[Tensor, "prompt query"] | None = None,
    ) -> PerturbedRuns:
        """The live model on some prompts, checked by `query_of`; or at the queries of a stretch of generated text."""
        replacements = drawn(view, prompt, replacement, self.draws, self.seed)
        at = _query(self.query, prompt) if query is None else query
        return PerturbedRuns(self, view, prompt, at, replacements, target, minus)

    def curves(
        self, runs: PerturbedRuns, scorers: Sequence[Scorer], progress: bool = True
    ) -> Float[Tensor, "metric method prompt step"]:
        """The damage done to each prompt after each step."""
        prompt = runs.prompt
        allowed = perturbable(ModelView(runs.model), prompt)
        if runs.is_stretch and runs.positions is not None:  # what stands before the stretch, which itself stays
            allowed &= torch.arange(allowed.shape[1]) <= runs.positions[:, :1].cpu()
        counts = _counts(allowed, self.steps)
        curves = torch.zeros(len(self.names), len(scorers), len(prompt.tokens), len(self.steps), dtype=torch.float64)
        ties_of = random_scores(self.seed)
        at_once = 1 if runs.alone else PROMPTS_AT_ONCE
        starts = range(0, len(prompt.tokens), at_once)
        for start in tqdm(starts, desc="perturbation", leave=False, delay=2.0, disable=not progress):
            part = slice(start, start + at_once)
            frozen = freeze(runs.model, **prompt.again(part))
            ties = ties_of(frozen).cpu()  # those of a prompt do not depend on its batch
            for number, scorer in enumerate(scorers):
                scores = scorer(frozen, runs.query, runs.explained(part)).cpu()
                if self.absolute:
                    scores = scores.abs()
                ranks = rank(scores, allowed[part], self.order, ties)
                # nothing is replaced at the first step, and no damage done
                curves[:, number, part, 1:] = runs.damage(part, ranks[:, None] < counts[part, 1:, None])
        return curves

    def described(
        self,
        view: ModelView,
        replacement: Replacement,
        scorers: Sequence[Scorer],
        prompts: int,
        target: str = "",
        span: str = "",
    ) -> dict[str, Any]:
        """What an Evaluation says besides the numbers: of how many prompts, and what is explained where it is named."""
        settings = {
            **view.provenance(),
            "prompts": prompts,
            "query": self.query,
            "replacement": replacement.name,
            "order": self.order,
            "absolute": self.absolute,
            "hidden": self.hidden,
            "seed": self.seed,
            "biases": "methods without 'biases' in their label leave the model's biases out of the scores, as the "
            "paper",
        }
        if replacement.name == RESAMPLED:
            settings["draws"] = self.draws
        if target:
            settings["target"] = target
        if span:
            settings["query"] = f"span {span}"
        if self.query == "mean" and any(scorer.estimates_norms for scorer in scorers):
            settings["norms"] = f"estimated by random rows to a relative standard error of {MEAN_TOLERANCE:g}"
        return {
            "kind": KINDS[self.order],
            "metrics": dict.fromkeys(self.names, self.order == "descending"),
            "methods": [scorer.label for scorer in scorers],
            "axis_name": "share of tokens replaced",
            "settings": settings,
        }


def explained_in_words(view: ModelView, target: TokenLike, minus: TokenLike) -> str:
    """What methods explain and metrics measure, where a token is named."""
    if target is None and minus is None:
        return ""
    if target is None:
        target = FIRST_CHOICE
    return logit_label(view, target, minus, capped=True)


def rank(
    scores: Float[Tensor, "batch pos"],
    allowed: Bool[Tensor, "batch pos"],
    order: str = "descending",
    ties: Float[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, "batch pos"]:
    """Return each token's rank in the order of replacement, from 0; tokens that are not allowed come last.

    Equal scores are ordered by `ties`, else by position. Reversing the order reverses the ranks.
    """
    if ties is None:
        ties = torch.arange(scores.shape[1]).expand_as(scores)
    by_ties = ties.argsort(dim=1)
    key = scores.gather(1, by_ties)
    ordered = by_ties.gather(1, key.argsort(dim=1, stable=True))  # ascending
    if order == "descending":
        ordered = ordered.flip(1)
    forbidden = ~allowed.gather(1, ordered)
    ordered = ordered.gather(1, forbidden.long().argsort(dim=1, stable=True))
    return ordered.argsort(dim=1)


def perturbable(view: ModelView, prompt: Prompt) -> Bool[Tensor, "prompt pos"]:
    """True at tokens that may be replaced: neither padding nor special tokens (of an image, all but its patches)."""
    tokenizer = view.tokenizer
    if view.reads != "tokens":
        return (prompt.mask & (prompt.tokens >= prompt.special)).cpu()
    special = torch.tensor(sorted(getattr(tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    return (prompt.mask.cpu() & ~torch.isin(prompt.tokens.cpu(), special)).clone()


# ------------------------------------------------------------------ its arguments


def _fractions(fractions: Fractions) -> list[float]:
    try:
        steps = [float(f) for f in fractions]
    except (TypeError, ValueError):
        raise InvalidInputError(f"fractions={fractions!r}: pass shares such as (0, 0.1, 0.2).") from None
    if len(steps) < 2 or steps[0] != 0 or not all(a < b <= 1 for a, b in pairwise(steps)):
        raise InvalidInputError(f"fractions={steps}: pass at least two shares in [0, 1], ascending, the first 0.")
    return steps


def _metrics(metrics: Metrics, query: PerturbationQuery) -> list[str]:
    if isinstance(metrics, str):
        metrics = [metrics]
    names = list[str](metrics)
    known = ("hs_mse", *OF_PREDICTION)
    unknown = [metric for metric in names if metric not in known]
    if unknown or not names:
        raise InvalidInputError(f"metrics={names!r}; use some of {', '.join(map(repr, known))}.")
    if query != "mean":
        return names
    if tuple(names) not in (METRICS, ("hs_mse",)):
        raise InvalidInputError("query='mean' has no single prediction; use metrics=['hs_mse'], or one query.")
    return ["hs_mse"]


def _query(query: PerturbationQuery, prompt: Prompt) -> int | Literal["all"]:
    """The query as the methods take it: an integer, or "all" for the mean."""
    if query == "mean":
        return "all"
    if isinstance(query, str):
        raise InvalidInputError(f"query={query!r}; use a position (-1 is the last, 0 the first) or 'mean'.")
    position = whole_number("query", query, why="or 'mean'")
    query_positions(prompt, position)
    return position


def _counts(allowed: Bool[Tensor, "prompt pos"], steps: Sequence[float]) -> Int[Tensor, "prompt step"]:
    """How many tokens each step replaces: its share rounded, and at least one, so that short prompts need no others."""
    tokens = allowed.sum(1)
    counts = (tokens[:, None] * torch.tensor(steps, dtype=torch.float64) + 0.5).long()
    counts[:, 1:].clamp_(min=1)
    empty = (tokens == 0).nonzero()
    if len(empty):
        raise InvalidInputError(
            PromptNumber(int(empty[0])), " has no token that may be replaced: all are special tokens or padding."
        )
    return counts


# ------------------------------------------------------------------ over the rows of a data set


@checked_names
def perturbation_dataset(
    model: ModelLike,
    rows: RowSource,
    out: str | os.PathLike[str],
    methods: Methods = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    columns: Mapping[str, str] | None = None,
    query: PerturbationQuery = -1,
    fractions: Fractions = FRACTIONS,
    replacement: ReplacementName = None,
    draws: Whole = 3,
    metrics: Metrics = METRICS,
    order: Order = "descending",
    absolute: bool = False,
    hidden: Hidden = "unembedded",
    seed: Seed = 0,
    memory: Memory = None,
    text: str = "text",
    id: str = UNKNOWN_ID,
    tokens_per_batch: int = 8192,
    truncate: bool = False,
    resume: bool = True,
    progress: bool = True,
    prepend_bos: bool | None = None,
    engine: Engine = None,
    load_model: LoadModel | None = None,
    num_actors: int = 1,
    num_gpus: float | int = 0,
) -> DatasetResults:
    """`perturbation` over every row of a data set, each row's curves written to Parquet shards.

    The numbers are those of one call of `perturbation` with all rows; `DatasetResults.evaluation` returns them as one
    `Evaluation`. A row of which no token may be replaced is written with its error. An interrupted run is resumed when
    it is called again.

    Args:
        model: a TransformerLens model that reads text.
        rows, out, text, id, tokens_per_batch, truncate, resume, progress, prepend_bos: see `tlens.attribute_dataset`.
        methods, query, fractions, metrics, order, absolute, hidden, seed, memory: see `perturbation`. When a run is
            resumed, functions among the methods are known by their names only.
        target, minus: see `perturbation`; the same for every row.
        columns: the columns of each row's own `target` or `minus`: ``{"target": "answer"}``.
        replacement, draws: see `perturbation`; ``"mean"`` is the token embedding's mean over all rows.
        engine, load_model, num_actors, num_gpus: see `tlens.attribute_dataset`.

    Raises:
        InvalidInputError: what `perturbation` and `tlens.attribute_dataset` raise.
        UnsupportedModelError: the model cannot be frozen, or a metric needs a prediction and it has none.
        FileFormatError: the folder's manifest or one of its shards is damaged.
        OSError: a shard cannot be written; those before it are whole.
    """
    test = PerturbationTest(methods, query, fractions, metrics, order, absolute, hidden, seed, draws, memory)
    explained = {name: value for name, value in (("target", target), ("minus", minus)) if value is not None}
    check_columns(columns, explained, ("target", "minus"))
    for name, value in explained.items():
        if not isinstance(plain(value), str | int):
            raise InvalidInputError(f"{name}={value!r}: pass one token for every row; columns= names a column of them.")
    named = explained | dict.fromkeys(columns or {}, "")
    test.check_explained(named.get("target"), named.get("minus"))
    reading = Reading(text, id, columns, truncate, prepend_bos)
    run = RunOptions(out, reading, tokens_per_batch, resume, progress, engine, load_model, num_actors, num_gpus)
    view, prompts = read_prompts(model, rows, run.reading)
    token_ids = [prompts.tokens[row] for row in prompts.prompts()]
    # a token's embedding is the same at every position: the mean over all rows needs their counts alone
    counts = torch.from_numpy(sum(np.bincount(ids, minlength=view.d_vocab) for ids in token_ids))
    longest = max(token_ids, key=len).tolist()
    prompt = prepare(view, [longest])
    try:
        position = test.query_of(view, prompt)
    except InvalidInputError as error:
        raise InvalidInputError(f"perturbation: the longest row cannot be tested. {error}") from error
    by = replacement_of(view, prompt, replacement, vocabulary_mean(view, counts))
    scorers, skipped = usable(test.scorers, freeze(view.model, [longest]), position, skip=methods is None)
    options = {
        "methods": {scorer.label: [_name(scorer.method), repr(dict(scorer.options))] for scorer in scorers},
        "skipped": sorted(skipped),
        "fractions": test.steps,
        "replacement": by.name,
        "query": test.query,
        "metrics": test.names,
        **{name: getattr(test, name) for name in ("order", "absolute", "hidden", "seed")},
    }
    if by.name == RESAMPLED:
        options["draws"] = test.draws
    options |= explained
    words = explained_in_words(view, target, minus)
    if columns:
        words = SEVERAL_TARGETS
    described = test.described(view, by, scorers, len(token_ids), words)
    work = _Perturbing(test, by, scorers, skipped, explained, described, options)
    return run_work(view, prompts, work, run)


@dataclass(frozen=True, eq=False)
class _Perturbing(Work):
    """A perturbation test of each row.

    Attributes:
        replacement: the same for all rows unless it is drawn.
        skipped: methods that do not fit the model.
        explained: the tokens that all rows explain, if any are named.
        described: what an Evaluation says besides its numbers.
        options: all of this, as a manifest has it.
    """

    test: PerturbationTest
    replacement: Replacement
    scorers: list[Scorer]
    skipped: dict[str, str]
    explained: dict[str, Any]
    described: dict[str, Any]
    options: Mapping[str, Any]

    name = "perturbation"
    double = True

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run of it is resumed."""
        return {"method": self.name, "options": dict(self.options), "keep": "scores"}

    def together(
        self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]
    ) -> tuple[Prompt, Float[Tensor, "metric method prompt step"]]:
        """The result of some rows."""
        view = ModelView(model)
        prompt = prepare(view, list(tokens))
        self.test.query_of(view, prompt)
        explained = self.explained | dict(per_row)
        runs = self.test.runs(view, prompt, self.replacement, explained.get("target"), explained.get("minus"))
        return prompt, self.test.curves(runs, self.scorers, progress=False)

    def packed(self, result: tuple[Prompt, Tensor]) -> list[Record]:
        """Such a result as one record for each row."""
        prompt, curves = result
        return [
            {
                "tokens": [token for token, is_real in zip(prompt.str_tokens[row], real, strict=True) if is_real],
                "shape": list(curves[:, :, row].shape),
                "scores": curves[:, :, row].flatten().numpy(),
            }
            for row, real in enumerate(prompt.mask.tolist())
        ]

    def facts(self, result: Any) -> dict[str, Any]:
        """What the rows of such a result have in common."""
        about = {"result": "Evaluation", "dtype": "float64", "axis": self.test.steps, "skipped": self.skipped}
        return about | self.described


def _name(method: str | MethodFunction) -> str:
    """A method in a manifest: a function is known by its name alone."""
    if isinstance(method, str):
        return method
    return f"{method.__module__}.{getattr(method, '__qualname__', '?')}"
