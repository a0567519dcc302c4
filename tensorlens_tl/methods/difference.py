"""Attribute the change of a prediction against a baseline exactly to the prompt's tokens, with nothing frozen.

    logit(prompt) − logit(baseline) = Σ_j ⟨gradient of the secants at token j, x_j − x'_j⟩

The two runs' difference is a linear map of the difference of their embeddings (`tensorlens_tl.passes.difference`):
attention patterns, activations and norm scales respond, each by its exact secant, and one pull gives every token's
part. This is DeepLIFT (Shrikumar et al. 2017) for transformers, with an exact rule for the softmax. With several
baselines the scores are averaged (DeepLIFT-SHAP's expectation, Lundberg & Lee 2017).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments, nearest
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import relative_gap, upcast
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import Direction, Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass, check_pass, difference as difference_of, freeze_changed
from tensorlens_tl.passes.inputs import prepare, query_positions
from tensorlens_tl.passes.operator import Collapse
from tensorlens_tl.passes.replacement import REPLACEMENTS, Placement, Replacement, embedding_points, vocabulary_mean
from tensorlens_tl.passes.target import explained_tokens, logit_label, predicts_at
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution

CHANGE = "change"
"""The value of `direction=` for the change of each query's own output."""

LARGEST_GAP = 0.1
"""The gap, as a share of the scores' size, above which scores are uninformative."""

UNLIKE = 10
"""How many times longer one run's stream must be to count as the reason for a gap."""


if TYPE_CHECKING:
    One = str | int | Tensor | Sequence[int] | FrozenPass
    Baseline = One | Sequence[One] | None
    """What the run is compared with; one or several, whose scores are averaged."""
else:
    Baseline = Any  # `baseline_pass` says what is wrong with it


@register_method("difference", needs=("secants",), explains_differences=True)
@checked_arguments
def difference(
    frozen: FrozenPass | Difference,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    direction: Direction | Literal["change"] = None,
    query: Query = -1,
    baseline: Baseline = None,
    memory: Memory = None,
) -> Attribution:
    """Attribute the change between two runs to tokens: two prompts, two models, or a prompt and a baseline.

    Signed scores and `bias`, the constants that belong to no token, sum to `total`, the change of the model's number.

    Args:
        frozen: the pass, or the difference of two passes, which needs no baseline.
        target, minus, direction: the number whose change is explained, as in `FrozenOperator.target`. By default it is
            the token that the run predicts against its runner-up, or for a difference against the token that the second
            run predicts. ``direction="change"`` explains the length of the change of the query's own output, as a sum
            over tokens; it is the default if the model or a query predicts no token.
        baseline: ``"mask"`` or ``"pad"`` (the tokenizer's token in every place), ``"mean"`` (the vocabulary's mean
            embedding), ``"zero"``, a token id, a text or ids of the same length (a list, or a tensor `[pos]` or
            `[batch, pos]`), embeddings `[d_model]` or `[pos, d_model]`, or a frozen pass; for a list of these, scores
            are averaged. None is the mask token if there is one, else the mean. For images and sound: another one,
            ``"mean"`` (its mean patch in all places) or ``"zero"`` (position embeddings only). Special tokens stay
            where a single thing replaces every token. In an encoder–decoder a baseline replaces the tokens of both
            sides; a text, or ids of the encoder's length, only the source; ids or embeddings `[pos, ..]` of all
            positions both sides.

    Raises:
        InvalidInputError: no such baseline, or one of another length; and what `FrozenOperator.target` raises.
        UnsupportedModelError: see `tensorlens_tl.difference`.
        NumericalError: the runs are so different that the scores are mostly rounding error.

    Source: ours; the rules are those of `tensorlens_tl.algebra.secants`.

    >>> result = tlens.methods.difference(frozen, target=" value", baseline="mean")
    >>> torch.allclose(result.scores.sum(-1) + result.bias, result.total, rtol=1e-3)
    True
    """
    positions = query_positions(frozen.prompt, query)
    if target is None and minus is None and direction is None and not predicts_at(frozen, positions):
        direction = CHANGE
    if direction is None:
        target, minus = explained_tokens(frozen, target, minus, positions)
    if isinstance(direction, str) and direction != CHANGE:
        raise InvalidInputError(f"direction={direction!r}: pass a vector, or 'change'.")
    options = {"baseline": baseline, "target": target, "minus": minus, "query": query}
    changes = [_change(of, target, minus, direction, query, memory) for of in _explained(frozen, baseline)]
    if direction is None:
        label = f"change of the {logit_label(frozen.view, target, minus)}"
    elif isinstance(direction, str):
        label = "length of the change of the output"
    else:
        label = "change of a direction"

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(change, name) for change in changes]).mean(0)

    scores, bias, total = map(mean, ("scores", "bias", "total"))
    return Attribution.of(
        frozen,
        scores,
        method="difference",
        query=query,
        bias=bias,
        total=total,
        gap=relative_gap(scores, bias, total),  # each difference's own gap was judged relative to its rounding
        additive=True,
        target=label,
        options={name: value for name, value in options.items() if value is not None},
    )


def _explained(frozen: FrozenPass | Difference, baseline: Any) -> Iterator[Difference]:
    """Yield the difference from each baseline."""
    if isinstance(frozen, Difference):
        if baseline is not None:
            raise InvalidInputError("baseline: a difference of two runs has its baseline already; leave it out.")
        return iter([frozen])
    check_pass(frozen)
    several = [baseline]
    if isinstance(baseline, list | tuple) and not _is_prompt(baseline):
        several = list(baseline)
    if not several:
        raise InvalidInputError("baseline=[]: pass one baseline, or a list with at least one.")
    return (difference_of(frozen, baseline_pass(frozen, one)) for one in several)


def _is_prompt(values: Any) -> bool:
    """True if a list is one prompt: token ids, or the messages of a chat."""
    return isinstance(values, list | tuple) and len(values) > 0 and all(type(v) in (int, dict) for v in values)


def _change(
    of: Difference, target: TokenLike, minus: TokenLike, direction: Any, query: Query, memory: Memory
) -> Collapse:
    """Return one difference's sum over tokens."""
    operator = of.operator()
    if isinstance(direction, str):
        change = torch.take_along_dim(upcast(of.output), query_positions(of.prompt, query)[..., None], dim=1)
        length = change.norm(dim=-1, keepdim=True)
        direction = change / length.clamp_min(torch.finfo(length.dtype).tiny)
    change = operator.target(target, minus, direction=direction, query=query, memory=memory)
    if change.gap is not None and not float(change.gap.max()) <= LARGEST_GAP:
        _refuse_amplified(of, float(change.gap.max()))
    return change


def _refuse_amplified(of: Difference, gap: float) -> None:
    """Raise an error if scores miss their sum and the runs' streams differ much in length.

    A norm's secant grows with the shorter one, so rounding in the longer one is multiplied from block to block. Runs
    that differ by rounding only also have a gap, but nothing to explain.
    """
    lengths = [
        torch.stack([upcast(run.resid_pre(layer)).norm(dim=-1) for layer in range(of.a.n_layers)])
        for run in (of.a, of.b)
    ]
    ratios = (lengths[0] / lengths[1]).log().abs().where(of.a.mask, 0).flatten(0, 1).amax(0).exp()
    largest, position = float(ratios.max()), int(ratios.argmax())
    if largest < UNLIKE:
        return
    raise NumericalError(
        f"difference: the scores miss the change that they should sum to by {gap:.1%} of their size. At position "
        f"{position} one run's stream is up to {largest:.0f} times as long as the other's, and secants between such "
        "runs multiply the model's own rounding, in float64 too where its norms compute in float32. Compare with a run "
        "that has the same tokens there, such as a text of as many tokens with the same beginning."
    )


def baseline_pass(frozen: FrozenPass, baseline: Any) -> FrozenPass:
    """Return the run that a pass is compared with; see `difference` for possible baselines."""
    if isinstance(baseline, FrozenPass):
        return baseline
    is_tensor = isinstance(baseline, Tensor)
    if is_tensor and _is_signal(frozen, baseline):
        other = prepare(frozen.view, baseline).kwargs["input"]
        return freeze_changed(frozen, {**frozen.inputs, "input": other.expand_as(frozen.inputs["input"])})
    if is_tensor and baseline.is_floating_point():
        return _with_embeddings(frozen, baseline)
    is_text = isinstance(baseline, str) and baseline not in REPLACEMENTS
    if is_text or _is_prompt(baseline) or (is_tensor and baseline.ndim > 0):
        return _with_tokens(frozen, baseline)
    try:
        chosen = Replacement.of(frozen.view, frozen.prompt, baseline, vocabulary_mean(frozen.view), alone=True)
    except InvalidInputError as error:
        raise InvalidInputError(f"baseline: {str(error).removeprefix('baseline: ')}") from error
    return _replaced(frozen, chosen, _exchanged(frozen))


def _exchanged(frozen: FrozenPass) -> Bool[Tensor, "batch pos"]:
    """Return the positions to replace: not special tokens, which have no content.

    Also, streams at the first token (the attention sink) can be thousands of times larger with it than without, and
    secants between such runs multiply the model's rounding. A prompt of special tokens only is replaced as a whole.
    """
    positions = torch.arange(frozen.tokens.shape[1], device=frozen.mask.device)
    real = frozen.mask & (positions >= frozen.prompt.special)
    if frozen.view.reads != "tokens":
        return real
    special = torch.tensor(sorted(getattr(frozen.view.tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    content = real & ~torch.isin(frozen.tokens, special.to(frozen.tokens.device))
    return torch.where(content.any(1, keepdim=True), content, real)


def _is_signal(frozen: FrozenPass, values: Tensor) -> bool:
    """Whether these are another image or sound, for each of the pass's or for all."""
    if frozen.view.reads == "tokens":
        return False
    batch, *one = frozen.inputs["input"].shape
    return list(values.shape) in (one, [1, *one], [batch, *one])


def _with_tokens(frozen: FrozenPass, baseline: Any) -> FrozenPass:
    """Run the model on another prompt, for each of the pass's or for all."""
    try:
        other = _other_tokens(frozen, baseline)
    except InvalidInputError as error:
        near = nearest(baseline, REPLACEMENTS, {"average": "mean", "zeros": "zero", "padding": "pad"})
        raise InvalidInputError(f"baseline: {str(error).removeprefix('baseline: ')}{near}") from error
    tokens = torch.where(frozen.mask, other, frozen.tokens)
    inputs = {**frozen.inputs, "input": tokens}
    encoder = frozen.prompt.encoder_length
    if encoder:
        inputs |= {"input": tokens[:, :encoder], frozen.view.decoder_argument: tokens[:, encoder:]}
    return freeze_changed(frozen, inputs)


def _other_tokens(frozen: FrozenPass, baseline: Any) -> Int[Tensor, "#batch pos"]:
    """Return the tokens of another prompt; in an encoder–decoder, of the source alone or of both sides."""
    encoder = frozen.prompt.encoder_length
    options: dict[str, Any] = {}
    decoder = None
    if encoder and not isinstance(baseline, str):
        baseline = torch.as_tensor(baseline)
    if encoder and isinstance(baseline, Tensor) and baseline.shape[-1] == frozen.tokens.shape[1]:
        baseline, options["decoder_input_ids"] = baseline.tensor_split([encoder], dim=-1)
    elif encoder:
        decoder = frozen.tokens[:, encoder:]
        rows = 1 if isinstance(baseline, str) or baseline.ndim == 1 else len(baseline)
        options["decoder_input_ids"] = decoder[:1].expand(rows, -1)
    other = prepare(frozen.view, baseline, **options)
    rows, pos = other.tokens.shape
    if pos != frozen.tokens.shape[1] or other.encoder_length != encoder or rows not in (1, len(frozen.tokens)):
        raise _wrong_shape(frozen, f"{rows} × {other.encoder_length or pos} tokens")
    if decoder is None:
        return other.tokens
    source = other.tokens[:, :encoder]
    return torch.cat([source.expand(len(decoder), -1), decoder], dim=1)


def _with_embeddings(frozen: FrozenPass, vectors: Tensor) -> FrozenPass:
    """Run the model on these embeddings instead of the tokens', on both sides of an encoder–decoder."""
    points = embedding_points(frozen.view, frozen.prompt, "baseline")
    shown, _ = capture(frozen.model, dict(frozen.inputs), points, last=points[-1])
    batch, pos, width = torch.cat([shown[at] for at in points], dim=1).shape
    if tuple(vectors.shape) not in {(width,), (pos, width), (1, pos, width), (batch, pos, width)}:
        raise _wrong_shape(frozen, f"embeddings {tuple(vectors.shape)}")
    parts = [vectors.detach()] * len(points)
    if vectors.ndim > 1:
        parts = list(parts[0].split([shown[at].shape[1] for at in points], dim=-2))
    sides = [Replacement("embeddings", at=at, vector=part) for at, part in zip(points, parts, strict=True)]
    return _replaced(frozen, Replacement.of_sides(*sides), frozen.mask)


def _replaced(frozen: FrozenPass, replacement: Replacement, where: Bool[Tensor, "batch pos"]) -> FrozenPass:
    placement = Placement.of(frozen.view, frozen.prompt, replacement)
    inputs, hooks = placement.put(dict(frozen.inputs), where, proves=False)
    changed = freeze_changed(frozen, inputs, hooks)
    placement.check(changed.resid_pre(0), where)
    return changed


def _wrong_shape(frozen: FrozenPass, given: str) -> InvalidInputError:
    batch, pos = frozen.tokens.shape
    length = f"{pos}"
    if frozen.sides is not None:
        length = f"{frozen.sides[0]} (the source) or {pos} (both sides)"
    return InvalidInputError(
        f"baseline: {given}, and there are {batch} × {pos} tokens; positions must match. Use 'mean', 'zero', a token "
        f"id, one prompt of {length} tokens or {batch} of them, or embeddings [d_model] or [{pos}, d_model]."
    )
