"""Gradient baselines on the live model: input × gradient, and integrated gradients (Sundararajan et al. 2017).

The input is the residual stream entering the first block (token and position embeddings, after an encoder's embedding
norm), in an encoder–decoder that of both its sides; the target is a logit at one query. Nothing is frozen: one run of
the prompts serves all queries, and at the pass's own input it must reproduce the pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments, whole_count
from tensorlens_tl.algebra.memory import Memory, chunks, in_bytes
from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.errors import GapWarning, NumericalError, warn_caller
from tensorlens_tl.methods.live_logits import LiveLogits
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.models.offload import saved_by_name
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution


@register_method("input-x-gradient", needs=("predictions",), reads_maps=False)
@checked_arguments
def input_x_gradient(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """Compute x_j · ∂logit/∂x_j on the live model.

    x_j is the first block's input; the model is run again on the pass's prompt.

    >>> tlens.methods.input_x_gradient(frozen, target=" value", query=[2, -1])
    Attribution('input-x-gradient', "logit of ' value'", batch=1, query=2, key=7)
    """
    logit = _Logit(LiveLogits(frozen, target, minus, query, "input-x-gradient"), memory)
    _, gradient = logit.at(1.0)
    return logit.live_logits.attribution(logit.scores(gradient))


def _runs(frozen: FrozenPass, options: Mapping[str, Any]) -> int:
    """Count a run and its gradient for each step; a gradient costs as much as two runs."""
    return 3 * int(options["steps"])


@register_method("integrated-gradients", needs=("predictions",), reads_maps=False, runs=_runs)
@checked_arguments
def integrated_gradients(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    steps: SupportsIndex = 32,
    memory: Memory = None,
) -> Attribution:
    """Compute x_j · ∫₀¹ ∂logit/∂x_j (αx) dα on the live model, from a zero baseline, by the midpoint rule.

    Scores and bias (the logit at the baseline) sum to the logit up to the quadrature error, which `gap` shows; near
    α = 0 norms bend sharply, so it falls slowly with `steps`, the number of gradient evaluations. A gap above 0.05
    raises a `GapWarning`, or in a strict pass a `NumericalError`.

    >>> result = tlens.methods.integrated_gradients(frozen, target=" value", steps=8)
    >>> result.scores.shape, result.gap.shape
    (torch.Size([1, 1, 7]), torch.Size([1, 1]))
    """
    count = whole_count("steps", steps)
    live_logits = LiveLogits(frozen, target, minus, query, "integrated-gradients")
    logit = _Logit(live_logits, memory)
    total = logit.value(1.0) * live_logits.real
    bias = logit.value(0.0) * live_logits.real
    midpoints = [(step + 0.5) / count for step in range(count)]
    scores = logit.scores(logit.mean_along(midpoints, total))
    gap = relative_gap(scores, bias, total)
    _note_quadrature(frozen, count, float(gap.max()))
    return live_logits.attribution(scores, bias=bias, total=total, gap=gap, options={"steps": count})


MOST = 0.05
"""The largest gap of the quadrature without a warning."""

LEAST_AT_ONCE = 4
"""With fewer steps in one run, the two control copies would cost as much as the run saves."""


def _note_quadrature(frozen: FrozenPass, steps: int, gap: float) -> None:
    """Warn where these steps miss the integral; in a strict pass raise an error."""
    if gap <= MOST:
        return
    message = (
        f"integrated-gradients: {steps} steps miss the logit by {gap:.1e} of the scores' size, since norms bend "
        f"sharply near the zero baseline. Take more (steps={4 * steps}), or a method that is exact: tensorlens, or the "
        "difference of two prompts."
    )
    if frozen.strict:
        raise NumericalError(message)
    warn_caller(message, GapWarning)


class _Logit:
    """Logits (or differences) of the live model as a function of the first block's input."""

    def __init__(self, live_logits: LiveLogits, memory: Memory) -> None:
        self.live_logits = live_logits
        self.frozen = live_logits.frozen
        self.memory = memory

    def scores(self, gradient: Float[Tensor, "batch query pos d"]) -> Float[Tensor, "batch query pos"]:
        """Return x · gradient, zero at padding."""
        pairs = self.live_logits.real[:, :, None] & self.frozen.mask[:, None]
        return (self.frozen.resid_pre(0)[:, None] * gradient).sum(-1) * pairs

    def value(self, share: float) -> Float[Tensor, "batch query"]:
        """Return logits with the first block's input multiplied by a share."""
        with torch.inference_mode(False), torch.no_grad():
            _, numbers = self.live_logits.graph(self.frozen.resid_pre(0) * share, is_pass_input=share == 1)
        return numbers

    def at(self, share: float) -> tuple[Float[Tensor, "batch query"], Float[Tensor, "batch query pos d"]]:
        """Return logits and their gradients with the first block's input multiplied by a share."""
        numbers, gradients = self._at([share])
        return numbers[0], gradients[0]

    def mean_along(
        self, shares: Sequence[float], total: Float[Tensor, "batch query"]
    ) -> Float[Tensor, "batch query pos d"]:
        """Return the mean of the gradients at several shares, as many of them in one run as fit.

        Copies of a short prompt share the time of reading weights. In every such run the first and last copy are the
        pass's own input; if they do not reproduce its `total`, something acts on some rows only, and the shares are run
        one by one.
        """
        size = self._bytes_per_copy
        room = max(0, in_bytes(self.memory) - 2 * size)
        if not self.live_logits.live.alone and min(len(shares), room // size) >= LEAST_AT_ONCE:
            mean = torch.zeros(())
            for rows in chunks(len(shares), size, room, "integrated gradients"):
                numbers, gradients = self._at([1.0, *shares[rows.start : rows.stop], 1.0])
                controls = (numbers[[0, -1]] - total).where(self.live_logits.real, 0).abs().max()
                if not float(controls) <= self.frozen.tolerance * max(1.0, float(total.abs().max())):
                    break
                mean = mean + (gradients[1:-1] / len(shares)).sum(0)
            else:
                return mean
        return sum((self.at(share)[1] / len(shares) for share in shares), start=torch.zeros(()))

    @property
    def _bytes_per_copy(self) -> int:
        """Roughly what a run with gradients allocates per copy of the prompts: its graph, and one batched pull."""
        x = self.frozen.resid_pre(0)
        several = self.live_logits.positions.shape[1] > 1
        graph = (36 if several else 20) * self.frozen.n_layers * x.numel()
        return (graph + 2 * self.frozen.tokens.numel() * self.frozen.view.d_vocab) * x.element_size()

    def _at(
        self, shares: Sequence[float]
    ) -> tuple[Float[Tensor, "share batch query"], Float[Tensor, "share batch query pos d"]]:
        """Return logits and their gradients at several shares, from one run with a copy of the prompts for each."""
        x = self.frozen.resid_pre(0)
        copies = len(shares)
        per_query = 16 * self.frozen.n_layers * copies * x.numel() * x.element_size()
        # autograd cannot store tensors that were created in a caller's inference mode
        with saved_by_name(self.frozen.model), torch.inference_mode(False), torch.enable_grad():
            scaled = torch.cat([x * share for share in shares])
            leaf, numbers = self.live_logits.graph(scaled, is_pass_input=list(shares) == [1], copies=copies)
            rows = [gradient for _, (gradient,) in self.live_logits.gradients(numbers, [leaf], per_query, self.memory)]
        gradients = torch.cat([row for row in rows if row is not None]).transpose(0, 1)
        return numbers.detach().unflatten(0, (copies, -1)), gradients.unflatten(0, (copies, -1))
