"""What the prediction loses against a baseline, as an exact sum over the prompt's tokens: nothing is held.

    logit(prompt) − logit(baseline) = Σ_j ⟨gradient of the secants at token j, x_j − x'_j⟩

The two runs' difference is a linear map of the difference of their embeddings (`tensorlens_tl.passes.difference`):
attention choice, activations and norm scales respond, each by its exact secant, and one pull gives every token's part.
It is DeepLIFT (Shrikumar et al. 2017) for transformers, with an exact rule for the softmax. With several baselines the
scores are averaged (DeepLIFT-SHAP's expectation, Lundberg & Lee 2017).
"""

from typing import Any

import torch
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Direction, Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass, difference as difference_of, freeze, freeze_changed
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import Collapse, logit_label
from tensorlens_tl.passes.replacement import REPLACEMENTS, Replacement, vocabulary_mean
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution


@register_method("difference", needs=("secants",), explains_differences=True)
@checked_arguments
def difference(
    frozen: FrozenPass | Difference,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    direction: Direction = None,
    query: Query = -1,
    baseline: Any = None,
    memory: Memory = None,
) -> Attribution:
    """Each token's part in the exact difference between a prompt and a baseline.

    Args:
        frozen: the pass, or the difference of two passes.
        target, minus, direction: the number whose change is explained, as in `FrozenOperator.target`. None is the
            length of the change of the query's own output, as a sum over tokens.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        baseline: what the prompt is compared with: ``"mask"`` or ``"pad"`` (the tokenizer's token in every place),
            ``"mean"`` (the vocabulary's mean embedding), ``"zero"``, a token id, a text or ids of the same length, or
            embeddings `[d_model]` or `[pos, d_model]`; or a list of several, over which scores are averaged. None is
            the mask token where there is one, else the mean. A difference has its baseline already.
        memory: what several queries may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Signed scores `[batch, query, key]`; with `bias`, the constants that are no token's, they sum to `total`, the
        change of the model's number.

    Raises:
        InvalidInputError: no such baseline, or one of another length; and what `FrozenOperator.target` refuses.
        UnsupportedModelError: see `tensorlens_tl.difference`.

    Source: ours; the rules are those of `tensorlens_tl.algebra.secants`.

    >>> result = tlens.methods.difference(frozen, target=" value", baseline="mean")
    >>> torch.allclose(result.scores.sum(-1) + result.bias, result.total, rtol=1e-3)
    True
    """
    options = {"baseline": baseline, "target": target, "minus": minus, "query": query}
    explained = _explained(frozen, baseline)
    changes = [_change(of, target, minus, direction, query, memory) for of in explained]
    label = "length of the change of the output"
    if direction is not None:
        label = "change of a direction"
    elif target is not None:
        label = f"change of the {logit_label(frozen.view, target, minus)}"

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(change, name) for change in changes]).mean(0)

    return Attribution.of(
        frozen,
        mean("scores"),
        method="difference",
        query=query,
        bias=mean("bias"),
        total=mean("total"),
        additive=True,
        target=label,
        options={name: value for name, value in options.items() if value is not None},
    )


def _explained(frozen: FrozenPass | Difference, baseline: Any) -> list[Difference]:
    """The differences from each baseline."""
    if isinstance(frozen, Difference):
        if baseline is not None:
            raise InvalidInputError("baseline: a difference of two runs has its baseline already; leave it out.")
        return [frozen]
    several = baseline if isinstance(baseline, list | tuple) else [baseline]
    if not several:
        raise InvalidInputError("baseline=[]: pass one baseline, or a list of some.")
    return [difference_of(frozen, baseline_pass(frozen, one)) for one in several]


def _change(
    of: Difference, target: TokenLike, minus: TokenLike, direction: Any, query: Query, memory: Memory
) -> Collapse:
    """One difference's sum over tokens; without a target along the change itself."""
    operator = of.operator()
    if target is None and minus is None and direction is None:
        change = torch.take_along_dim(upcast(of.output), query_positions(of.prompt, query)[..., None], dim=1)
        length = change.norm(dim=-1, keepdim=True)
        direction = change / length.clamp_min(torch.finfo(length.dtype).tiny)
    return operator.target(target, minus, direction=direction, query=query, memory=memory)


def baseline_pass(frozen: FrozenPass, baseline: Any) -> FrozenPass:
    """The run that a pass is compared with; see `difference` for what a baseline may be.

    Raises:
        InvalidInputError: no such baseline, or one of another length.
    """
    if isinstance(baseline, FrozenPass):
        return baseline
    inputs = dict(frozen.inputs)
    pos = frozen.tokens.shape[1]
    if isinstance(baseline, Tensor) and baseline.is_floating_point():
        return _with_embeddings(frozen, baseline)
    if isinstance(baseline, Tensor) and baseline.ndim:
        if baseline.shape[-1] != pos:
            raise _wrong_length(frozen, f"{tuple(baseline.shape)} ids")
        return freeze_changed(frozen, {**inputs, "input": baseline.to(frozen.tokens).expand_as(frozen.tokens)})
    if isinstance(baseline, str) and baseline not in REPLACEMENTS:
        other = freeze(frozen.model, baseline, tolerance=frozen.tolerance)
        if other.tokens.shape != frozen.tokens.shape:
            raise _wrong_length(frozen, f"{baseline!r} has {other.tokens.shape[1]} tokens")
        return other
    try:
        chosen = Replacement.of(frozen.view, frozen.prompt, baseline, vocabulary_mean(frozen.view))
    except InvalidInputError as error:
        raise InvalidInputError(f"baseline: {error}") from error
    replaced = frozen.mask & (torch.arange(pos, device=frozen.mask.device) >= frozen.prompt.special)
    inputs, hooks = chosen.put(inputs, replaced)
    return freeze_changed(frozen, inputs, hooks)


def _with_embeddings(frozen: FrozenPass, vectors: Tensor) -> FrozenPass:
    """A run with these embeddings in place of the tokens'."""
    named = Replacement.of(frozen.view, frozen.prompt, "zero")
    pos = frozen.tokens.shape[1]
    if vectors.ndim > 1 and vectors.shape[-2] != pos:
        raise _wrong_length(frozen, f"{tuple(vectors.shape)} embeddings")
    chosen = Replacement("embeddings", at=named.at, vector=vectors)
    inputs, hooks = chosen.put(dict(frozen.inputs), frozen.mask)
    return freeze_changed(frozen, inputs, hooks)


def _wrong_length(frozen: FrozenPass, given: str) -> InvalidInputError:
    pos = frozen.tokens.shape[1]
    return InvalidInputError(
        f"baseline: {given}, and the prompt has {pos} tokens; positions must match. Use 'mean', 'zero', a token id, or "
        f"a baseline of {pos} tokens."
    )
