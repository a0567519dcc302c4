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

from typing import Any

import torch

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.arguments import (
    Fractions,
    Hidden,
    Methods,
    Metrics,
    Order,
    PerturbationQuery,
    ReplacementName,
    WholeNumber,
)
from tensorlens_tl.evaluate.generated import GeneratedStretch
from tensorlens_tl.evaluate.perturbing import FRACTIONS, METRICS, PerturbationTest, explained_in_words
from tensorlens_tl.evaluate.resampling import replacement_of
from tensorlens_tl.evaluate.scorers import usable
from tensorlens_tl.generation import Continuation, Count, Span
from tensorlens_tl.models import NEXT, ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import InputLike, prepare
from tensorlens_tl.results import Evaluation, area


@checked_names
def perturbation(
    model: ModelLike,
    prompts: InputLike,
    methods: Methods = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: PerturbationQuery = "last",
    max_new_tokens: Count = None,
    continuation: Continuation = None,
    span: Span = None,
    fractions: Fractions = FRACTIONS,
    replacement: ReplacementName = None,
    draws: WholeNumber = 3,
    metrics: Metrics = METRICS,
    order: Order = "descending",
    absolute: bool = False,
    hidden: Hidden = "unembedded",
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
    memory: Memory = None,
) -> Evaluation:
    """How much damage is done by replacing the tokens that each method names first.

    Args:
        model: a TransformerLens model.
        prompts: strings, or token ids `[prompt, pos]`; of a model of images or sound, what it reads (see
            `tlens.freeze`): its patches are replaced, or a sound's frames.
        methods: see `tensorlens_tl.evaluate.scorers`; None is all that fit the model, and a random order. Methods that
            you name must fit the model. A method without a target ranks tokens in one order for every target.
        target, minus: the token that methods explain and metrics measure, and one that it is compared with (also
            ``"runner-up"``); one for each prompt, or one for all. None, as ``"first-choice"``, is what the model
            predicts for the whole prompt. With `minus`, `logit` and `aopc` are falls of the difference of both logits,
            or probabilities.
        query: ``"last"``, ``"cls"`` (the first token), a position counted over real tokens, or ``"mean"``: scores and
            final hidden states averaged over all positions (metric `hs_mse` alone; norms of T are then estimated, to
            `MEAN_TOLERANCE`).
        max_new_tokens, continuation, span: test methods on text that the model wrote after each prompt, or that is
            given: on the sum of the targets of a span of its tokens, as `tlens.attribute_generation` explains it (None
            is ``"all"`` of them; a list has one for each prompt). What stands before the span is replaced, the span
            itself stays; `logit` is the fall of the sum of its tokens' logits, other metrics are means over its tokens.
            All prompts are frozen at once.
        fractions: shares of a prompt's tokens to replace, ascending, the first 0.
        replacement: ``"resampled"`` (a token that the model itself would write there: drawn from its predictions at the
            position before, without the token that it replaces and special tokens; of the first token, from their
            mean), ``"mask"`` or ``"pad"`` (the tokenizer's), a token (string or id), ``"mean"`` (the token
            embedding's mean over all prompts) or ``"zero"`` (no token embedding; positions stay). None is
            ``"resampled"`` of a causal language model on tokens alone, else the mask token where there is one, else the
            mean. Of patches, `"mean"` and `"zero"` are those of what the patch embedding gives.
        draws: over how many draws the damage of ``"resampled"`` is averaged. A prompt's draws depend on `seed` and its
            tokens, not on its batch.
        metrics: of `hs_mse` (mean squared change of the final hidden state), `aopc` (how far the probability of the
            model's first choice falls), `aopc_abs` (the absolute value of that: TensorLens' Table 1), `logit` (how
            far its logit falls).
        order: ``"descending"`` (positive perturbation) or ``"ascending"`` (negative).
        absolute: order by absolute score; the paper and the default keep the sign.
        hidden: which vector `hs_mse` measures: ``"unembedded"``, what the model unembeds, or ``"output"``, what its
            blocks and final norm give. They differ where a prediction head lies between (masked language models).
        attention_mask: 1 at real tokens, with token ids only.
        prepend_bos: as in TransformerLens, with strings only.
        seed: of the random order, of the order of equal scores, and of the draws.
        memory: what the perturbed runs may allocate, as ``"512MB"`` or bytes.

    Returns:
        An Evaluation: areas per prompt in `values`, curves over the fractions; of generated text its `settings` hold
        what was generated after each prompt.

    Raises:
        MethodError: a method fails with an error that is none of the library's; names it.
        InvalidInputError: fractions outside [0, 1] or not ascending, an unknown metric, order or replacement, prompts
            of special tokens alone, or methods that cannot be run with their options, or explain no span.
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
    generated = {"max_new_tokens": max_new_tokens, "continuation": continuation, "span": span}
    if any(value is not None for value in generated.values()):
        if target is not None or attention_mask is not None:
            raise InvalidInputError(
                "perturbation: a span's tokens are their own targets, and generated text has its own mask; leave "
                "target= and attention_mask= out."
            )
        test.check_generated(minus)
        stretch = GeneratedStretch.of(model, prompts, prepend_bos=prepend_bos, **generated)
        prompt = stretch.prompt
        position = -1
        explained |= {"target": NEXT, "query": stretch.queries}
        words = (stretch.in_words(minus), repr("all" if span is None else span))
        facts["generated"] = stretch.written.texts
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
