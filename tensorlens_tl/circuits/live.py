"""Runs of the live model with nodes changed, each in its own copy of the prompts, and gradients at nodes.

A node is a part of the values at a hook point: a head's vector, a neuron, or a whole MLP. It is ablated or given
another value. An expert that no hook point shows is ablated where it is called. A target's gradients at nodes are the
model's own, or those of a rule.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import Beside
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import refuse_nan
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.stream import StreamTarget, Sublayer
from tensorlens_tl.core import SAME_VALUE, Rule, refuse_other_functions, ruled
from tensorlens_tl.errors import NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import (
    CallChange,
    CallPoint,
    FwdHook,
    capture,
    changed_calls,
    in_this_thread,
    run_until,
)
from tensorlens_tl.models.offload import saved_by_name
from tensorlens_tl.models.sublayers import ExpertsWeights, Routing
from tensorlens_tl.passes import FrozenPass, PassLike, note_rounding
from tensorlens_tl.passes.live import Copies, EarlierLayers, prove_obedience, repeated

# ------------------------------------------------------------------ ablated experts


class Expert(NamedTuple):
    """One expert of a mixture; without a `number`, the output of a module: the shared expert, or the whole mixture."""

    mixture: ExpertsWeights
    number: int | None
    module: nn.Module | None = None


def without_experts(experts: Sequence[tuple[int, Expert]], copies: int, tokens: Tensor) -> list[CallChange]:
    """Return the call changes that ablate experts, each in its copy: their weight is zero for the tokens sent there."""
    changes: list[CallChange] = []
    mixtures = {id(expert.mixture): expert.mixture for _, expert in experts}
    for mixture in mixtures.values():
        dropped = torch.zeros(copies, mixture.count, dtype=torch.bool, device=tokens.device)
        present: dict[nn.Module, Tensor] = {}
        for copy, expert in experts:
            if expert.mixture is not mixture:
                continue
            if expert.number is not None:
                dropped[copy, expert.number] = True
            elif expert.module is not None:
                ones = torch.ones(copies, 1, dtype=torch.bool, device=tokens.device)
                present.setdefault(expert.module, ones)[copy] = False
        if bool(dropped.any()) and mixture.routing.shown:
            changes += _silenced(mixture, dropped)
        elif bool(dropped.any()):
            point = CallPoint(mixture.routing.module, mixture.routing.weight)
            changes.append(CallChange(point, partial(_routed_elsewhere, routing=mixture.routing, dropped=dropped)))
        for module, copies_with in present.items():
            change = partial(_without_module, present=copies_with, positions=tokens.numel())
            changes.append(CallChange(CallPoint(module, "output"), change))
    return changes


def _silenced(mixture: ExpertsWeights, dropped: Bool[Tensor, "copy expert"]) -> Iterator[CallChange]:
    """Ablate experts that are separate modules by zeroing their outputs for the tokens of their copies.

    Routing weights are left alone: they are normalised, and the model would choose another expert.
    """
    sent: dict[str, Tensor] = {}

    def note(arguments: Mapping[str, Any], index: Int[Tensor, "token choice"]) -> Tensor:
        sent["index"] = index
        return index

    def silence(arguments: Mapping[str, Any], output: Float[Tensor, "row d"], number: int) -> Float[Tensor, "row d"]:
        index = sent["index"]
        _, token = index.T.eq(number).nonzero(as_tuple=True)  # in the order in which the tokens are packed
        of_token = dropped[:, number].to(output.device).repeat_interleave(len(index) // len(dropped))
        return output.masked_fill(of_token[token.to(output.device), None], 0)

    yield CallChange(CallPoint(getattr(mixture.module, mixture.routing.index), "output"), note)
    for number in dropped.any(0).nonzero()[:, 0].tolist():
        yield CallChange(CallPoint(mixture.modules[number], "output", optional=True), partial(silence, number=number))


def _routed_elsewhere(
    arguments: Mapping[str, Any],
    weight: Float[Tensor, "token choice"],
    routing: Routing,
    dropped: Bool[Tensor, "copy expert"],
) -> Float[Tensor, "token choice"]:
    """Zero the routing weights of the experts that are ablated in a token's copy."""
    of_token = dropped.to(weight.device).repeat_interleave(weight.shape[0] // len(dropped), dim=0)
    if not routing.dense:
        index = arguments[routing.index].to(of_token.device)
        is_expert = index < of_token.shape[1]  # some models route tokens to a number that stands for no expert
        of_token = of_token.gather(1, index.where(is_expert, 0).long()) & is_expert
    return weight.masked_fill(of_token, 0)


def _without_module(
    arguments: Mapping[str, Any], output: Tensor, present: Bool[Tensor, "copy one"], positions: int
) -> Tensor:
    """Zero a module's output (a shared expert or a whole mixture) in the copies in which it is ablated."""
    split = output.reshape(len(present), positions, -1)
    return (split * present[:, None].to(split)).reshape(output.shape)


# ------------------------------------------------------------------ nodes changed

EVERY = slice(None)

NodeValues = Mapping[str, Float[Tensor, "... batch _some _width"]]
"""Values at hook points, heads side by side; in an encoder–decoder at the positions of one side."""


class NodeChange(NamedTuple):
    """A node that is changed in one copy of the prompts, for one prompt or for all.

    Attributes:
        name: the node's name.
        points: the hook points of its hidden vector, or of its output.
        part, parts: which of how many equal parts of that vector it is.
        position: where it is changed.
        prompt: for which prompt it is changed.
        expert: the expert, if no hook point shows it; it is ablated for every prompt.
        layer: the first layer that has to be computed again.
    """

    name: str
    points: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1
    position: int | slice = EVERY
    prompt: int | slice = EVERY
    expert: Expert | None = None
    layer: int = 0


def _changed(
    tensor: Tensor,
    *,
    hook: Any,
    earlier: EarlierLayers | None,
    marked: Bool[Tensor, "copy batch pos part 1"],
    replacement: Float[Tensor, "_one_or_copy batch pos part width"] | None,
) -> Tensor:
    """Return a hook point's values in copies of the prompts, with the marked parts replaced or zeroed.

    Some classes flatten batch and position, some have heads side by side.
    """
    if earlier is not None:
        marked = earlier.entered(marked)
        replacement = None if replacement is None else earlier.at_positions(replacement)
    marked = marked.to(tensor.device)
    split = tensor.reshape(*marked.shape[:-1], -1)
    if replacement is None:
        changed = split.masked_fill(marked, 0)
    else:
        changed = torch.where(marked, replacement.to(tensor), split)
    return changed.reshape(tensor.shape)


@contextmanager
def changed_nodes(
    frozen: FrozenPass,
    changes: Sequence[tuple[int, NodeChange]],
    copies: int,
    values: NodeValues | None,
    earlier: EarlierLayers | None = None,
) -> Iterator[list[FwdHook]]:
    """Change nodes in a run of copies of the prompts inside, each in its copy; yield the hooks that the run needs.

    Nodes get `values`, of every copy or of all; None zeroes them. `earlier` are layers that copies may skip.
    """
    by_point = defaultdict[str, list[tuple[int, NodeChange]]](list)
    for copy, change in changes:
        for point in change.points:
            by_point[point].append((copy, change))
    batch, length = frozen.tokens.shape
    hooks: list[FwdHook] = []
    for point, point_changes in by_point.items():
        parts = point_changes[0][1].parts
        pos = len(range(length)[frozen.capture.span(point)])
        marked = torch.zeros(copies, batch, pos, parts, 1, dtype=torch.bool, device=frozen.tokens.device)
        for copy, change in point_changes:
            marked[copy, change.prompt, change.position, change.part] = True
        replacement = None
        if values is not None:
            replacement = values[point].unflatten(0, (-1, batch)).unflatten(-1, (parts, -1))
        hook = partial(_changed, earlier=earlier, marked=marked, replacement=replacement)
        hooks.append((point, in_this_thread(hook)))
    experts = [(copy, change.expert) for copy, change in changes if change.expert is not None]
    with changed_calls(without_experts(experts, copies, frozen.tokens)):
        yield hooks


def bytes_per_copy(readout: StreamTarget) -> int:
    """Return roughly what one copy of a target's prompts allocates in a run."""
    frozen = readout.stream.run
    x = frozen.resid_pre(0)
    heads = max((len(step.nodes) for step in readout.stream.steps), default=1)
    widest = max(block.widest for block in frozen.view.blocks) // 3  # it counts up to three vectors of that width
    return 4 * x.shape[0] * x.shape[1] * (2 * x.shape[2] + widest + heads * x.shape[1]) * x.element_size()


class LiveTarget:
    """A target in the live model, which must obey hooks and reproduce the pass's value.

    Attributes:
        readout: the target of the pass.
        frozen: the pass.
        question: the function that was called, for messages.
        earlier: the layers that a change need not compute again.
        seen: activations of the verifying run, where the target reads and at the further `points`.
    """

    def __init__(self, readout: StreamTarget, question: str, points: Sequence[str] = ()) -> None:
        self.readout = readout
        self.frozen = readout.stream.run
        self.question = question
        self.earlier = EarlierLayers(self.frozen.capture)
        self._model = self.frozen.live(question)
        read = readout.read_of(self.frozen.activation)
        activations = torch.take_along_dim(read, readout.positions[..., None], dim=1)
        sizes = activations.norm(dim=-1).to(readout.vectors) * readout.vectors.norm(dim=-1)
        # a difference of two logits may be small relative to the rounding of the logits themselves
        rounding = 32 * torch.finfo(activations.dtype).eps / activations.shape[-1] ** 0.5
        self._scale = max(float(readout.total.abs().max()), rounding / self._model.tolerance * float(sizes.max()))
        with self.earlier.seen():
            self.seen = self.run_of(self.frozen, points)
        error = self._error(self.number(self.seen)[0])
        self._model.refuse(error, f"they differ by {error:.1e}")
        prove_obedience(self.frozen.maps)  # after the number: a hook put on since would look like disobedience

    def run_of(self, frozen: FrozenPass, points: Sequence[str]) -> dict[str, Tensor]:
        """Run the prompts of a pass; return the values at hook points and, last, where the target reads."""
        names = list(dict.fromkeys([*points, *self.readout.points]))
        return capture(frozen.model, frozen.inputs, names, last=self.readout.points[-1])[0]

    def number(self, activations: Mapping[str, Tensor], copies: int = 1) -> Float[Tensor, "copy batch query"]:
        """Return the target's value from the activations, in copies of the prompts, where it reads."""

        def by_copy(name: str) -> Float[Tensor, "copy batch some d_model"]:
            """Split copies; a classifier's head gets one vector for each prompt."""
            shown = activations[name]
            return shown.reshape(copies, len(self.frozen.tokens), -1, shown.shape[-1])

        return self.readout.number_of(by_copy)

    def losses(
        self, changes: Sequence[Sequence[NodeChange]], values: NodeValues | None, memory: Memory, title: str
    ) -> Float[Tensor, "batch query change"]:
        """Return what the target loses in copies of the prompts with some nodes changed, many copies to a run.

        Nodes get the given values, by hook point; None zeroes them. `title` is the progress bar's.
        """

        def run(copies: Copies) -> Float[Tensor, "copy batch query"]:
            numbered = [(copy, number) for copy, number in enumerate(copies) if number is not None]
            chosen = [(copy, change) for copy, number in numbered for change in changes[number]]
            if copies[0] is None and chosen and self.shares_layers:
                numbers = self._shared_run(chosen, len(copies), values)
                if numbers is not None:
                    return numbers
            return self._run(chosen, len(copies), values)

        runs = self._model.changed(len(changes), run, self._error, bytes_per_copy(self.readout), memory, title)
        return self.readout.total[..., None] - torch.cat([numbers for _, numbers in runs]).permute(1, 2, 0)

    def _run(
        self, changes: Sequence[tuple[int, NodeChange]], copies: int, values: NodeValues | None
    ) -> Float[Tensor, "copy batch query"]:
        """Return the target in each copy of the prompts, in one run; changes are given with their copy."""
        names = self.readout.points
        inputs = repeated(self.frozen.inputs, copies)
        with changed_nodes(self.frozen, changes, copies, values, self.earlier) as hooks:
            activations, _ = capture(self.frozen.model, inputs, names, hooks=hooks, last=names[-1])
        return self.number(activations, copies)

    def _shared_run(
        self, changes: Sequence[tuple[int, NodeChange]], copies: int, values: NodeValues | None
    ) -> Float[Tensor, "copy batch query"] | None:
        """Run each copy from its first changed layer on; None if unchanged copies do not reproduce the target."""
        firsts = [min(change.layer for _, change in changes)] * copies
        if not any(change.expert for _, change in changes):  # experts are ablated in all rows of a run
            for copy, in_copy in groupby(changes, key=lambda change: change[0]):
                firsts[copy] = min(change.layer for _, change in in_copy)
        numbers = None
        try:
            with self.earlier.skipped(firsts), self._only_what_is_read():
                numbers = self._run(changes, copies, values)
        except Exception:  # a model may raise anything when called with some of the rows; the full run reports errors
            self.earlier.forms = []
        if numbers is not None:
            unchanged = (numbers[0], numbers[-1])
            if all(self._error(number) <= self._model.tolerance for number in unchanged):
                return numbers
        self.earlier.forms = []
        return None

    @property
    def shares_layers(self) -> bool:
        """Whether a run may begin at the first changed layer: no user's hooks need the earlier ones."""
        return self.earlier.may_be_skipped and not self._model.alone

    def _only_what_is_read(self) -> AbstractContextManager[None]:
        """Compute the last layer's MLP only at the queries, where that saves something."""
        positions = self.readout.positions
        if positions.shape[1] >= self.frozen.tokens.shape[1] or self.frozen.sides is not None:
            return nullcontext()
        return self.earlier.narrowed(self.readout.stream.layers.stop - 1, positions)

    def check_other(self, other: Float[Tensor, "batch query"], held: Float[Tensor, "batch query"]) -> None:
        """Reject a run of other prompts whose target differs from the value in their pass."""
        error = self._error(other, held)
        self._model.refuse(error, f"of the corrupted prompts they differ by {error:.1e}")

    def _error(
        self, numbers: Float[Tensor, "*run batch query"], held: Float[Tensor, "*run batch query"] | None = None
    ) -> float:
        """Return the largest error of numbers against those of the pass, or against `held`, relative to their scale."""
        total = self.readout.total if held is None else held
        scale = max(self._scale, torch.finfo(total.dtype).tiny)
        if held is not None:
            scale = max(scale, float(held.abs().max()))
        return float((numbers - total).abs().max()) / scale


def sublayer_nodes(readout: StreamTarget, question: str, by: str, advice: str) -> Iterator[NodeChange]:
    """Yield every sublayer's nodes with their place in the live model.

    By ``"component"`` (attention and MLPs whole), ``"head"`` (attention by head, a mixture by expert) or ``"neuron"``
    (MLPs by neuron as well). `question` and `advice` are for the error where neither a hook nor a call reaches a node.
    """
    frozen = readout.stream.run
    for step in readout.stream.steps:
        for sublayer in step.sublayers:
            if isinstance(sublayer.read.stages[-1], Beside):
                yield from _expert_nodes(frozen, question, sublayer, by)
                continue
            point = hidden_point(frozen, sublayer)
            if point is None:
                raise UnsupportedModelError(
                    f"{question}: nothing inside {sublayer.name} of this {frozen.view.description} can be "
                    f"changed by a hook (a gate or a norm inside, a mixer in place of attention, one output of self- "
                    f"and cross-attention). {advice}"
                )
            names: Sequence[str] = sublayer.nodes
            mlp = frozen.view.blocks[sublayer.layer].dense_mlp if by == "neuron" and sublayer.is_mlp else None
            if by == "component":
                names = (sublayer.name,)
            elif mlp is not None:
                names = [f"{sublayer.name}.N{neuron}" for neuron in range(mlp.W_out.shape[0])]
            for part, name in enumerate(names):  # equal parts of the hidden vector
                yield NodeChange(name, (point,), part, len(names), layer=sublayer.layer)


def hidden_point(frozen: FrozenPass, sublayer: Sublayer) -> str | None:
    """Return the hook point of a sublayer's hidden vector; None where no hook reaches it."""
    points = frozen.points.blocks[sublayer.layer]
    if sublayer.is_mlp:
        return points.post
    if points.merged:
        return None
    if sublayer.is_cross:
        return points.cross and points.cross.z
    if sublayer.is_attention and points.attention is None:
        return points.z
    return None


def _expert_nodes(frozen: FrozenPass, question: str, sublayer: Sublayer, by: str) -> Iterator[NodeChange]:
    """Yield a mixture of experts as a whole at its output, or each expert where it is called.

    Raises:
        UnsupportedModelError: a shared expert whose call is not known.
    """
    points = frozen.points.blocks[sublayer.layer]
    weights = frozen.view.blocks[sublayer.layer].mlp
    assert isinstance(weights, ExpertsWeights)
    assert points.mlp is not None  # experts are frozen as a whole
    shared = () if points.shared is None else (points.shared.out,)
    layer = sublayer.layer
    if by == "component" and weights.module is not None:
        yield NodeChange(sublayer.name, expert=Expert(weights, None, weights.module), layer=layer)
        return
    if by == "component":
        yield NodeChange(sublayer.name, (points.mlp.out, *shared), layer=layer)
        return
    for name in sublayer.nodes:
        number = name.removeprefix(f"L{layer}E")
        if number != name:
            yield NodeChange(name, expert=Expert(weights, int(number)), layer=layer)
        elif shared:
            yield NodeChange(name, shared, layer=layer)
        elif weights.shared_module is not None:
            yield NodeChange(name, expert=Expert(weights, None, weights.shared_module), layer=layer)
        else:
            raise UnsupportedModelError(
                f"{question}: no hook and no module is known where {name} could be ablated. "
                "by='component' ablates all experts of a layer together; or leave live out."
            )


# ------------------------------------------------------------------ gradients at nodes


class NodeGradients:
    """The nodes of a target in the live model, with their values and the target's gradients there.

    Attributes:
        nodes: the nodes.
        points: their hook points.
        rule: the rule that gradients follow; None for the model's own.
        live: the target in the live model.
        frozen: its pass.
        values: the values at every node.
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

    def values_of(self, other: FrozenPass) -> NodeValues:
        """Return the values at every node for the prompts of another pass, verified against it."""
        seen = self.live.run_of(other, self.points)
        self.live.check_other(self.live.number(seen)[0], self.live.readout.number_of(other.activation))
        return self._by_point(seen)

    def at(self, start: Mapping[str, Tensor], memory: Memory = None) -> NodeValues:
        """Return the target's gradients at every node, a row for each query; `start` is the first block's input."""
        with self._graph(start) as (number, leaves):
            per_query = 4 * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
            queries = number.shape[1]
            rows = [
                self._pulled(number, leaves, of_queries)
                for of_queries in chunks(queries, per_query, memory if queries > 1 else None, "gradients")
            ]
        gradients = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        return self._of_leaves(gradients, queries)

    def without(self, start: Mapping[str, Tensor], dropped: Sequence[Sequence[str]]) -> Iterator[NodeValues]:
        """Yield the gradients of a target's only query with no gradient through some hook points, once for each."""
        closed: list[str] = []
        with self._graph(start, {*chain(*dropped)}, closed) as (number, leaves):
            for points in dropped:
                closed[:] = points
                yield self._of_leaves(self._pulled(number, leaves, range(1)), 1)

    def _of_leaves(self, gradients: Sequence[Tensor], rows: int) -> NodeValues:
        refuse_nan("gradients of the live model", *gradients)
        return self._by_point(dict(zip(self.points, gradients, strict=True)), rows)

    @contextmanager
    def _graph(
        self, start: Mapping[str, Tensor], gates: Collection[str] = (), closed: Collection[str] = ()
    ) -> Iterator[tuple[Float[Tensor, "batch query"], list[Tensor]]]:
        """Run the model from the first block's input; yield the target's value and a leaf at every point of nodes.

        A gate that is closed while gradients are taken passes none back to what is before it.
        """
        added: dict[str, Tensor] = {}

        def add(live: Tensor, *, hook: Any, name: str) -> Tensor:
            # a Bridge may show a hook a tensor that it does not use itself; it does use what the hook returns
            if name in gates:
                live = live.view_as(live)
                live.register_hook(lambda gradient: torch.zeros_like(gradient) if name in closed else gradient)
            if name not in self.points:
                return live
            added[name] = torch.zeros_like(live, requires_grad=True)
            return live + added[name]

        def enter(live: Tensor, *, hook: Any, name: str) -> Tensor:
            return added[name]

        with saved_by_name(self.frozen.model), torch.enable_grad():
            added |= {name: value.detach().clone().requires_grad_(True) for name, value in start.items()}
            entry: list[FwdHook] = [(name, in_this_thread(partial(enter, name=name))) for name in start]
            points = dict.fromkeys([*self.points, *gates])
            nodes = [(name, in_this_thread(partial(add, name=name))) for name in points if name not in added]
            with ruled(self.frozen.model, self.rule):
                number = self._number([*entry, *nodes])
            if self.rule is not None:
                refuse_other_functions([number])
                with torch.no_grad():
                    refuse_other_values(self.frozen, number, self._number(entry))
            yield number, [added[point] for point in self.points]

    def _number(self, hooks: Sequence[FwdHook]) -> Float[Tensor, "batch query"]:
        """Return the target's value in a run with these hooks."""
        read: dict[str, Tensor] = {}

        def see(live: Tensor, *, hook: Any, name: str) -> None:
            read[name] = live

        seeing = [(name, in_this_thread(partial(see, name=name))) for name in self.live.readout.points]
        run_until(self.frozen.model, self.frozen.inputs, [*hooks, *seeing], self.live.readout.points[-1])
        return self.live.number(read)[0]

    def _pulled(self, number: Float[Tensor, "batch query"], leaves: Sequence[Tensor], queries: range) -> list[Tensor]:
        """Return the gradients of some queries at every leaf, a row for each; the graph is kept."""
        chosen = torch.eye(number.shape[1], dtype=number.dtype, device=number.device)[queries.start : queries.stop]
        cotangents = chosen[:, None].expand(-1, *number.shape)

        def of_multiple(factor: float) -> list[Tensor]:
            given = factor * cotangents
            if len(given) == 1:  # without vmap over rows, which some operations of the model do not support
                gradients = torch.autograd.grad(number, leaves, given[0], retain_graph=True, materialize_grads=True)
                return [gradient[None] for gradient in gradients]
            return [*torch.autograd.grad(number, leaves, given, True, is_grads_batched=True, materialize_grads=True)]

        gradients = of_multiple(1.0)
        if leaves[0].dtype.itemsize == 2:
            note_rounding(self.frozen, _in_a_row(gradients), lambda factor: _in_a_row(of_multiple(factor)))
        return gradients

    def products(self, values: NodeValues, gradients: NodeValues) -> Float[Tensor, "*row batch node pos"]:
        """Dot values with gradients, by node and position; both sides of an encoder–decoder are in one row."""
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
        """Return the positions that a hook point shows, among all of an encoder–decoder."""
        return range(self.frozen.tokens.shape[1])[self.frozen.capture.span(point)]

    def _by_point(self, shown: Mapping[str, Tensor], *rows: int) -> NodeValues:
        """Arrange the values of hook points with heads side by side; some classes flatten batch and position."""
        batch = len(self.frozen.tokens)
        return {point: shown[point].reshape(*rows, batch, len(self.positions(point)), -1) for point in self.points}


def _in_a_row(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Concatenate gradients of every leaf into one vector per row."""
    return [torch.cat([tensor.flatten(1).to(tensors[0].device) for tensor in tensors], dim=1)]


def refuse_other_values(frozen: PassLike, under_rule: Tensor, plain: Tensor) -> None:
    """Check that a rule changes only gradients.

    Raises:
        NumericalError: it changed what the model computes.
    """
    error = float((under_rule - plain).abs().max())
    if not error <= frozen.tolerance * max(float(plain.abs().max()), 1.0):
        raise NumericalError(
            f"{frozen.view.description}: under the rule the model computes another value, {error:.1e} off. {SAME_VALUE}"
        )
