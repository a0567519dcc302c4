"""Gradient baselines on the live model: input × gradient, and integrated gradients (Sundararajan et al. 2017).

The input is the residual stream entering the first block (token and position embeddings, after an encoder's embedding
norm); the target is a logit at one query. Nothing is frozen here.
"""

from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.collapse import relative_residual
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.registry import register_method
from tensorlens_tl.targets import logit_label, token_ids


@register_method("input-x-gradient")
def input_x_gradient(frozen: FrozenPass, *, target: Any = None, minus: Any = None, query: Any = -1) -> Attribution:
    """x_j · ∂logit/∂x_j on the live model.

    Args:
        frozen: the pass; only its prompt is used.
        target, minus: a token, and one to subtract.
        query: the position whose logit it is, counted over real tokens.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range.
        UnsupportedModelError: the model predicts no tokens.
        NumericalError: the model's own gradients are not finite, as with padding on the left in some models.
    """
    x = frozen.resid_pre(0)
    _, gradient = _logit_and_gradient(frozen, x, target, minus, query)
    scores = (x * gradient).sum(-1)[:, None] * frozen.mask[:, None]
    return Attribution.of(
        frozen,
        scores,
        method="input-x-gradient",
        query=query,
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query},
    )


@register_method("integrated-gradients")
def integrated_gradients(
    frozen: FrozenPass, *, target: Any = None, minus: Any = None, query: Any = -1, steps: int = 32
) -> Attribution:
    """x_j · ∫₀¹ ∂logit/∂x_j (αx) dα on the live model, from a zero baseline, by the midpoint rule.

    Scores and bias (the logit at the baseline) sum to the logit up to the quadrature's error, which `residual` shows;
    near α = 0 norms bend sharply, so it falls slowly with `steps`.

    Args:
        frozen: the pass; only its prompt is used.
        target, minus: a token, and one to subtract.
        query: the position whose logit it is, counted over real tokens.
        steps: gradient evaluations.

    Raises:
        InvalidInputError: no target, several tokens, fewer than one step, or a query out of range.
        UnsupportedModelError: the model predicts no tokens.
        NumericalError: the model's own gradients are not finite, as with padding on the left in some models.
    """
    if steps < 1:
        raise InvalidInputError(f"steps={steps}; use at least 1.")
    x = frozen.resid_pre(0)
    mean = torch.zeros_like(x)
    for step in range(steps):
        mean += _logit_and_gradient(frozen, x * ((step + 0.5) / steps), target, minus, query)[1] / steps
    total, _ = _logit_and_gradient(frozen, x, target, minus, query)
    bias, _ = _logit_and_gradient(frozen, torch.zeros_like(x), target, minus, query)
    scores = (x * mean).sum(-1)[:, None] * frozen.mask[:, None]
    return Attribution.of(
        frozen,
        scores,
        method="integrated-gradients",
        query=query,
        bias=bias[:, None],
        total=total[:, None],
        residual=relative_residual(scores, bias[:, None], total[:, None]),
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query, "steps": steps},
    )


def _logit_and_gradient(frozen: FrozenPass, x: Tensor, target: Any, minus: Any, query: Any) -> tuple[Tensor, Tensor]:
    """The logit (difference) `[batch]` with the first block's input put at x, and its gradient there."""
    if target is None:
        raise InvalidInputError("target: missing. Pass a token, such as target=' Paris'.")
    if query is None:
        raise InvalidInputError("query=None: one query at a time here; pass an integer.")
    if frozen.view.unembedding is None:
        raise UnsupportedModelError(f"target: {frozen.view.description} predicts no tokens.")
    rows = torch.arange(len(frozen.tokens), device=x.device)
    positions = query_positions(frozen.mask, query)[:, 0]
    wanted = token_ids(frozen.view, target, len(rows)).to(x.device)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        hooks = [(frozen.points.blocks[0].resid_pre, lambda live, *, hook: leaf)]
        logits = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
        logit = logits[rows, positions, wanted]
        if minus is not None:
            logit = logit - logits[rows, positions, token_ids(frozen.view, minus, len(rows), "minus").to(x.device)]
        (gradient,) = torch.autograd.grad(logit.sum(), leaf)
    if not bool(torch.isfinite(gradient).all()):
        hint = "use float32 or float64"
        if not bool(frozen.mask.all()):  # rows of attention that padding on the left leaves empty
            hint = "some models have none where a prompt is padded: pad on the right, or take one prompt at a time"
        raise NumericalError(f"{frozen.view.description}: gradients are not finite; {hint}.")
    return logit.detach(), gradient
