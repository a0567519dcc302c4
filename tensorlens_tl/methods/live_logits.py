"""Logits of the live model, for a token or the difference of two, and their gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import NumericalError
from tensorlens_tl.hooks import FwdHook, in_this_thread, logits_at, run
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass, entering, note_rounding
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.live import repeated
from tensorlens_tl.passes.target import explained_tokens, logit_label, target_ids
from tensorlens_tl.results import Attribution


class LiveLogits:
    """Logits of the live model at some queries of a pass, for one method.

    Attributes:
        live: the model, verified to be that of the pass.
        positions: each query's position, `[batch, query]`; `in_logits` is the same as an index into the logits.
        target, minus: the explained tokens, including defaults.
        ids, others: the target token of each query, and the one that is subtracted, or None.
        real: True at queries that are real tokens.
        label: a description of the target.
    """

    def __init__(self, frozen: FrozenPass, target: TokenLike, minus: TokenLike, query: Query, method: str) -> None:
        self.live = frozen.live(method)
        self.method = method
        self.query = query
        self._is_measured = False  # rounding of gradients in half precision is measured once per path
        self.frozen = frozen
        self.positions = query_positions(frozen.prompt, query)
        self.in_logits = frozen.prompt.in_logits(self.positions)
        self.real = torch.take_along_dim(frozen.mask, self.positions, dim=1)
        with frozen.view.loaded("unembedding"):  # read only once, even if it is offloaded
            self.target, self.minus = explained_tokens(frozen, target, minus, self.positions)
            self.ids, self.others = target_ids(frozen, self.positions, self.target, self.minus)
            self.label = logit_label(frozen.view, self.target, self.minus, capped=True)

    def attribution(self, scores: Float[Tensor, "batch query key"], *, of: str = "logit", **fields: Any) -> Attribution:
        """Return the method's result; `fields` are those of `Attribution.of`, with options other than these."""
        named = {"target": self.target, "minus": self.minus, **fields.pop("options", {}), "query": self.query}
        label = self.label.replace("logit", of, 1)
        return Attribution.of(
            self.frozen, scores, method=self.method, query=self.query, target=label, options=named, **fields
        )

    def read(self, logits: Float[Tensor, "*any batch query d_vocab"]) -> Float[Tensor, "*any batch query"]:
        """Return the target's value at each query, from the model's logits or any function of them."""

        def at_ids(ids: Tensor) -> Tensor:
            # autograd cannot store an index that was created in a caller's inference mode
            index = ids[..., None].clone().to(logits.device).expand(*logits.shape[:-1], 1)
            return logits.gather(-1, index)[..., 0].to(ids.device)

        if self.others is None:
            return at_ids(self.ids)
        return at_ids(self.ids) - at_ids(self.others)

    def check(self, states: Tensor, logits: Float[Tensor, "batch query d_vocab"]) -> None:
        """Reject a run of the pass's prompts with a different unembedded stream or different logits at the queries."""
        frozen = self.frozen
        name = frozen.points.unembed_in
        assert name is not None  # a model with an unembedding
        self.live.check({name: states})
        # the weights' logits equal those of the pass where they were compared
        with frozen.view.loaded("unembedding"):
            expected = frozen.view.logits(torch.take_along_dim(frozen.unembedded(), self.positions[..., None], dim=1))
        known = self.real
        if self.live.same_hooks:
            known = known & self._compared
        errors = (logits.detach().to(expected) - expected).abs().amax(-1) / expected.abs().amax(-1)
        error = float(errors.where(known, 0).max())
        self.live.refuse(error, f"the logits differ by {error:.1e}")

    @property
    def _compared(self) -> Tensor:
        """The queries at which the weights' logits were compared with those of the pass, and agree."""
        frozen = self.frozen
        if frozen.logits_check.compared is None or not frozen.errors.get("unembed", 1.0) <= frozen.tolerance:
            return torch.zeros_like(self.real)
        return torch.take_along_dim(frozen.logits_check.compared, self.positions, dim=1)

    def graph(
        self,
        x: Float[Tensor, "row pos d_model"],
        hooks: Sequence[FwdHook] = (),
        is_pass_input: bool = True,
        copies: int = 1,
    ) -> tuple[Tensor, Float[Tensor, "row query"]]:
        """Run once and return the input and the values that it gives; call with gradients enabled.

        Args:
            x: the first block's input.
            hooks: further hooks of the run.
            is_pass_input: whether `x` is the pass's own input, so that the run must reproduce the pass.
            copies: how often `x` repeats the prompts, copy after copy.
        """
        frozen = self.frozen
        frozen.view.refuse_gradients("gradients")
        unembed_in = frozen.points.unembed_in
        streams: list[Tensor] = []

        def see(stream: Tensor, *, hook: object) -> None:
            streams[:] = [stream]

        leaf, entry = entering(frozen, x)
        inputs = frozen.inputs if copies == 1 else repeated(frozen.inputs, copies)
        output = run(frozen.model, inputs, [*entry, *hooks, (unembed_in, in_this_thread(see))])
        logits = logits_at(output, self.in_logits.repeat(copies, 1))
        if is_pass_input:
            self.check(streams[0], logits)
        return leaf, self.read(logits.unflatten(0, (copies, -1))).flatten(0, 1)

    def gradients(
        self,
        numbers: Float[Tensor, "row query"],
        tensors: Sequence[Tensor],
        bytes_per_query: int,
        memory: Memory,
    ) -> Iterator[tuple[slice, list[Float[Tensor, "query *shape"] | None]]]:
        """Yield some queries, and the gradients of their values by each of some tensors; the graph is kept."""
        queries = numbers.shape[1]
        for rows in chunks(queries, bytes_per_query, memory if queries > 1 else None, "gradients"):
            seeds = numbers.new_zeros(len(rows), *numbers.shape)
            for row, query in enumerate(rows):
                seeds[row, :, query] = 1
            gradients = _batched_gradients(numbers, tensors, seeds)
            for gradient in gradients:
                self._check_finite(gradient)
            if not self._is_measured:
                note_rounding(self.frozen, *_products(numbers, tensors, seeds, gradients))
                self._is_measured = True
            yield slice(rows.start, rows.stop), gradients

    def _check_finite(self, gradient: Tensor | None) -> None:
        if gradient is None or bool(torch.isfinite(gradient).all()):
            return
        hint = "use float32 or float64"
        if not bool(self.frozen.mask.all()):  # left padding leaves empty rows of attention
            hint = "some models have none for padded prompts: pad on the right, or take one prompt at a time"
        raise NumericalError(f"{self.frozen.view.description}: gradients are not finite; {hint}.")


def _batched_gradients(
    numbers: Tensor, tensors: Sequence[Tensor], seeds: Float[Tensor, "row batch query"]
) -> list[Tensor | None]:
    """Return the gradients by each tensor for every row of seeds, in one batched backward pass if there are several."""
    if len(seeds) == 1:
        gradients = torch.autograd.grad(numbers, tensors, seeds[0], retain_graph=True, allow_unused=True)
        return [None if gradient is None else gradient[None] for gradient in gradients]
    return list(
        torch.autograd.grad(numbers, tensors, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True)
    )


def _products(
    numbers: Tensor, tensors: Sequence[Tensor], seeds: Tensor, gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], Callable[[float], list[Tensor | None]]]:
    """Multiply tensors with their gradients, summed over the last axis; also for values scaled by a factor."""

    def products(rows: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = zip(tensors, rows, strict=True)
        return [None if row is None else (upcast(x.detach()) * upcast(row)).sum(-1) for x, row in pairs]

    return products(gradients), lambda factor: products(_batched_gradients(numbers, tensors, factor * seeds))
