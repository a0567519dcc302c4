"""Gradients of a target at the nodes of the live model: its own, or those of a rule."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import refuse_nan
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.live.changes import NodeChange
from tensorlens_tl.circuits.live.target import LiveTarget
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.core import Rule, refuse_other_functions, ruled
from tensorlens_tl.errors import NumericalError
from tensorlens_tl.hooks import FwdHook, in_this_thread, run_until
from tensorlens_tl.models.parameters import saved_by_name
from tensorlens_tl.passes import FrozenPass, PassLike, note_rounding

Values = dict[str, Float[Tensor, "... batch _some _width"]]
"""What the model has at hook points, heads side by side; of an encoder–decoder at the positions of one side."""


class NodeGradients:
    """Nodes of a target of the live model.

    Attributes:
        nodes: which.
        points: the hook points where they are.
        rule: what gradients follow; None for the model's own.
        live: the target, in the live model.
        frozen: its pass.
        values: what the model has at every node.
    """

    def __init__(
        self, readout: StreamTarget, question: str, nodes: Sequence[NodeChange], rule: Rule | None = None
    ) -> None:
        self.nodes = nodes
        self.points = list(dict.fromkeys(point for node in nodes for point in node.points))
        self.rule = rule
        self.live = LiveTarget(readout, question, self.points)
        self.frozen = self.live.frozen
        self.values = self._by_point(self.live.seen)

    def values_of(self, other: FrozenPass) -> Values:
        """What the model has at every node for the prompts of another pass, whose number it gives."""
        seen = self.live.run_of(other, self.points)
        self.live.check_other(self.live.number(seen)[0], self.live.readout.number_of(other.activation))
        return self._by_point(seen)

    def at(self, start: Mapping[str, Tensor], memory: Memory = None) -> Values:
        """The target's gradients by every node, a row for each query.

        Args:
            start: what enters the first block, by hook point.
            memory: what the backward passes of several queries may allocate at once.
        """
        added: dict[str, Tensor] = {}

        def add(live: Tensor, *, hook: Any, name: str) -> Tensor:
            # the tensor that a Bridge shows a hook need not be the one that it uses; what the hook returns is
            added[name] = torch.zeros_like(live, requires_grad=True)
            return live + added[name]

        def enter(live: Tensor, *, hook: Any, name: str) -> Tensor:
            return added[name]

        with saved_by_name(self.frozen.model), torch.enable_grad():
            added |= {name: value.detach().clone().requires_grad_(True) for name, value in start.items()}
            entry: list[FwdHook] = [(name, in_this_thread(partial(enter, name=name))) for name in start]
            nodes = [(name, in_this_thread(partial(add, name=name))) for name in self.points if name not in added]
            with ruled(self.frozen.model, self.rule):
                number = self._number([*entry, *nodes])
            if self.rule is not None:
                refuse_other_functions([number])
                with torch.no_grad():
                    refuse_other_values(self.frozen, number, self._number(entry))
            leaves = [added[point] for point in self.points]
            per_query = 4 * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
            queries = number.shape[1]
            rows = [
                self._pulled(number, leaves, of_queries)
                for of_queries in chunks(queries, per_query, memory if queries > 1 else None, "gradients")
            ]
        gradients = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        refuse_nan("gradients of the live model", *gradients)
        return self._by_point(dict(zip(self.points, gradients, strict=True)), queries)

    def _number(self, hooks: Sequence[FwdHook]) -> Float[Tensor, "batch query"]:
        """The target's number in a run with these hooks."""
        read: dict[str, Tensor] = {}

        def see(live: Tensor, *, hook: Any, name: str) -> None:
            read[name] = live

        seeing = [(name, in_this_thread(partial(see, name=name))) for name in self.live.readout.points]
        run_until(self.frozen.model, self.frozen.inputs, [*hooks, *seeing], self.live.readout.points[-1])
        return self.live.number(read)[0]

    def _pulled(self, number: Float[Tensor, "batch query"], leaves: Sequence[Tensor], queries: range) -> list[Tensor]:
        """The gradients of some queries by every leaf, a row for each; the graph is kept."""
        chosen = torch.eye(number.shape[1], dtype=number.dtype, device=number.device)[queries.start : queries.stop]
        cotangents = chosen[:, None].expand(-1, *number.shape)

        def of_multiple(factor: float) -> list[Tensor]:
            given = factor * cotangents
            if len(given) == 1:  # no map over rows, which some operations of the model do not know
                gradients = torch.autograd.grad(number, leaves, given[0], retain_graph=True, materialize_grads=True)
                return [gradient[None] for gradient in gradients]
            return [*torch.autograd.grad(number, leaves, given, True, is_grads_batched=True, materialize_grads=True)]

        gradients = of_multiple(1.0)
        if leaves[0].dtype.itemsize == 2:
            note_rounding(self.frozen, _in_a_row(gradients), lambda factor: _in_a_row(of_multiple(factor)))
        return gradients

    def products(self, values: Values, gradients: Values) -> Float[Tensor, "*row batch node pos"]:
        """Values dotted with gradients, by node and position; those of both sides of an encoder–decoder in one row."""
        pos = self.frozen.tokens.shape[1]
        scores: list[Tensor] = []
        for (points, parts), nodes in groupby(self.nodes, key=lambda node: (node.points, node.parts)):
            numbers = [node.part for node in nodes]
            by_side: list[Tensor] = []
            for point in points:
                product = values[point] * gradients[point].to(values[point])
                by_part = product.unflatten(-1, (parts, -1)).sum(-1).mT
                by_side.append(widened(by_part[..., numbers, :, None], self.positions(point).start, pos)[..., 0])
            scores.append(torch.stack(by_side).sum(0))
        return torch.cat(scores, dim=-2)

    def positions(self, point: str) -> range:
        """The positions that a hook point shows, among all of an encoder–decoder."""
        return range(self.frozen.tokens.shape[1])[self.frozen.capture.span(point)]

    def _by_point(self, shown: Mapping[str, Tensor], *rows: int) -> Values:
        """What hook points show, with heads side by side; some classes flatten batch and position."""
        batch = len(self.frozen.tokens)
        return {point: shown[point].reshape(*rows, batch, len(self.positions(point)), -1) for point in self.points}


def _in_a_row(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of every leaf as one vector of each row."""
    return [torch.cat([tensor.flatten(1).to(tensors[0].device) for tensor in tensors], dim=1)]


def refuse_other_values(frozen: PassLike, under_rule: Tensor, plain: Tensor) -> None:
    """A rule changes gradients alone.

    Raises:
        NumericalError: it changed what the model computes.
    """
    error = float((under_rule - plain).abs().max())
    if not error <= frozen.tolerance * max(float(plain.abs().max()), 1.0):
        raise NumericalError(
            f"{frozen.view.description}: under the rule the model gives another number, {error:.1e} off. A rule says "
            "what gradients an operation passes on, and returns the operation's own value: stands(f(x), …) does."
        )
