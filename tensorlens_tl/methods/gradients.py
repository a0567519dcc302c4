"""Gradient baselines on the live model: input × gradient, and integrated gradients (Sundararajan et al. 2017).

The input is the residual stream entering the first block (token and position embeddings, after an encoder's embedding
norm), in an encoder–decoder that of both its sides; the target is a logit at one query. Nothing is frozen here.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_residual
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import in_this_thread, logits_at, refuse_attached, run
from tensorlens_tl.models.protocol import Query, TokenLike
from tensorlens_tl.models.state import refuse_dropout
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.prompts import query_positions
from tensorlens_tl.passes.target import logit_label, target_ids
from tensorlens_tl.registry import register_method
from tensorlens_tl.results.attribution import Attribution


@register_method("input-x-gradient")
def input_x_gradient(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """x_j · ∂logit/∂x_j on the live model.

    Args:
        frozen: the pass; only its prompt is used.
        target, minus: a token, and one to subtract; one per prompt, or one per query (``[batch][query]``).
        query: positions, the last real token unless said; see `tensorlens_tl.passes.prompts.query_positions`.
        memory: what the runs of several queries may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range.
        UnsupportedModelError: the model predicts no tokens.
        NumericalError: the model's own gradients are not finite, as with padding on the left in some models.
    """
    logit = _Logit(frozen, target, minus, query, memory)
    _, gradient = logit.at(1.0)
    return Attribution.of(
        frozen,
        logit.scores(gradient),
        method="input-x-gradient",
        query=query,
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query},
    )


@register_method("integrated-gradients")
def integrated_gradients(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    steps: int = 32,
    memory: Memory = None,
) -> Attribution:
    """x_j · ∫₀¹ ∂logit/∂x_j (αx) dα on the live model, from a zero baseline, by the midpoint rule.

    Scores and bias (the logit at the baseline) sum to the logit up to the quadrature's error, which `residual` shows;
    near α = 0 norms bend sharply, so it falls slowly with `steps`.

    Args:
        frozen: the pass; only its prompt is used.
        target, minus, query, memory: as for `input-x-gradient`.
        steps: gradient evaluations.

    Raises:
        InvalidInputError: no target, several tokens, fewer than one step, or a query out of range.
        UnsupportedModelError: the model predicts no tokens.
        NumericalError: the model's own gradients are not finite, as with padding on the left in some models.
    """
    steps = whole_number("steps", steps, least=1)
    logit = _Logit(frozen, target, minus, query, memory)
    mean = sum((logit.at((step + 0.5) / steps)[1] / steps for step in range(steps)), start=torch.zeros(()))
    scores = logit.scores(mean)
    total, bias = logit.at(1.0)[0] * logit.real, logit.at(0.0)[0] * logit.real
    return Attribution.of(
        frozen,
        scores,
        method="integrated-gradients",
        query=query,
        bias=bias,
        total=total,
        residual=relative_residual(scores, bias, total),
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query, "steps": steps},
    )


class _Logit:
    """Logits (or differences) of the live model as a function of the first block's input, a row for each query."""

    def __init__(self, frozen: FrozenPass, target: TokenLike, minus: TokenLike, query: Query, memory: Memory) -> None:
        if target is None:
            raise InvalidInputError("target: missing. Pass a token, such as target=' Paris'.")
        if frozen.view.unembedding is None:
            raise UnsupportedModelError(f"target: {frozen.view.description} predicts no tokens.")
        refuse_attached(frozen.model)
        refuse_dropout(frozen.view.model)
        self.frozen, self.memory = frozen, memory
        self.positions = query_positions(frozen.prompt, query)
        self.ids, self.others = target_ids(frozen, self.positions, target, minus)
        self.real = torch.take_along_dim(frozen.mask, self.positions, dim=1)

    def scores(self, gradient: Float[Tensor, "batch query pos d"]) -> Float[Tensor, "batch query pos"]:
        """x · gradient, zero at padding."""
        pairs = self.real[:, :, None] & self.frozen.mask[:, None]
        return (self.frozen.resid_pre(0)[:, None] * gradient).sum(-1) * pairs

    def at(self, share: float) -> tuple[Float[Tensor, "batch query"], Float[Tensor, "batch query pos d"]]:
        """Logits and their gradients with the first block's input at a share of its own."""
        x = self.frozen.resid_pre(0)
        queries = self.positions.shape[1]
        logits, gradients = [], []
        # one run of as many copies of the prompts as queries fit; autograd keeps every layer's activations
        per_query = 16 * self.frozen.n_layers * x.numel() * x.element_size()
        for rows in chunks(queries, per_query, self.memory if queries > 1 else None, "gradients"):
            chosen = slice(rows.start, rows.stop)
            logit, gradient = self._run(x * share, self.positions[:, chosen], chosen)
            logits.append(logit)
            gradients.append(gradient)
        return torch.cat(logits, dim=1), torch.cat(gradients, dim=1)

    def _run(
        self, x: Float[Tensor, "batch pos d"], positions: Int[Tensor, "batch query"], chosen: slice
    ) -> tuple[Tensor, Tensor]:
        frozen, (batch, copies) = self.frozen, positions.shape
        # what autograd keeps must not have been made in somebody's inference mode
        with torch.inference_mode(False), torch.enable_grad():
            repeated: dict[str, Any] = {
                name: value.repeat_interleave(copies, dim=0) if isinstance(value, Tensor) else value
                for name, value in frozen.inputs.items()
            }
            leaf = x.detach().repeat_interleave(copies, dim=0).requires_grad_(True)
            parts = leaf.split([leaf.shape[1]] if frozen.sides is None else list(frozen.sides), dim=1)
            hooks = [
                (name, in_this_thread(lambda live, *, hook, part=part: part))
                for name, part in zip(frozen.stream_names(0), parts, strict=True)
            ]
            made = run(frozen.model, repeated, hooks)
            made = logits_at(made, frozen.prompt.in_logits(positions).flatten().clone()[:, None])[:, 0]
            rows = torch.arange(batch * copies, device=x.device)
            logit = made[rows, self.ids[:, chosen].flatten().clone()]
            if self.others is not None:
                logit = logit - made[rows, self.others[:, chosen].flatten().clone()]
            (gradient,) = torch.autograd.grad(logit.sum(), leaf)
        if not bool(torch.isfinite(gradient).all()):
            hint = "use float32 or float64"
            if not bool(frozen.mask.all()):  # rows of attention that padding on the left leaves empty
                hint = "some models have none where a prompt is padded: pad on the right, or take one prompt at a time"
            raise NumericalError(f"{frozen.view.description}: gradients are not finite; {hint}.")
        shape = (batch, copies)
        return logit.detach().unflatten(0, shape), gradient.unflatten(0, shape)
