"""Nodes of the live model taken away, or given other values, one in each copy of the prompts.

A node is a part of what the model has at a hook point: a head's vector, a neuron, the whole of an MLP. An expert that
no hook point shows is taken away where it is called (`tensorlens_tl.circuits.live.experts`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import Beside
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.live.experts import Expert, without_experts
from tensorlens_tl.circuits.live.target import LiveTarget
from tensorlens_tl.circuits.stream import StreamTarget, Sublayer
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, changed_calls, in_this_thread
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.live import Copies, EarlierLayers

EVERY_POSITION = slice(None)


class NodeChange(NamedTuple):
    """A node that is changed in one copy of the prompts.

    Attributes:
        name: of the node.
        points: the hook points of its hidden vector, or of what it writes.
        part, parts: which of how many equal parts of the vector there it is.
        position: where it is changed.
        expert: the expert that it is, where no hook point shows it.
        layer: the first that has to be computed for it.
    """

    name: str
    points: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1
    position: int | slice = EVERY_POSITION
    expert: Expert | None = None
    layer: int = 0


def losses(
    live: LiveTarget,
    changes: Sequence[NodeChange],
    values: Mapping[str, Float[Tensor, "batch _side _width"]] | None,
    memory: Memory,
    title: str,
) -> Float[Tensor, "batch query change"]:
    """What the target's number loses under each change by itself.

    Args:
        live: the target.
        changes: of nodes.
        values: what nodes have instead, by hook point; None takes them away.
        memory: what the copies of one run may allocate at once.
        title: of the progress bar.
    """

    def run(copies: Copies) -> Float[Tensor, "copy batch query"]:
        chosen = [(copy, changes[number]) for copy, number in enumerate(copies) if number is not None]
        if copies[0] is None and chosen and live.shares_layers:
            numbers = _shared_run(live, chosen, len(copies), values)
            if numbers is not None:
                return numbers
        return _numbers(live, chosen, len(copies), values)

    remaining = [numbers for _, numbers in live.changed(len(changes), run, memory, title)]
    return live.readout.total[..., None] - torch.cat(remaining).permute(1, 2, 0)


def _shared_run(
    live: LiveTarget,
    changes: Sequence[tuple[int, NodeChange]],
    copies: int,
    values: Mapping[str, Float[Tensor, "batch _side _width"]] | None,
) -> Float[Tensor, "copy batch query"] | None:
    """The number in each copy, each from its first changed layer on; None where unchanged copies come out otherwise."""
    firsts = [min(change.layer for _, change in changes)] * copies
    if not any(change.expert for _, change in changes):  # experts are taken away in all rows of a run
        for copy, change in changes:
            firsts[copy] = change.layer
    numbers = None
    try:
        with live.earlier.skipped(firsts), live.only_what_is_read():
            numbers = _numbers(live, changes, copies, values)
    except Exception:  # a model may raise anything where it is called with some rows: the whole run says what is wrong
        live.earlier.forms = []
    if numbers is not None and live.gives_its_number(numbers[0]) and live.gives_its_number(numbers[-1]):
        return numbers
    live.earlier.forms = []
    return None


def _numbers(
    live: LiveTarget,
    changes: Sequence[tuple[int, NodeChange]],
    copies: int,
    values: Mapping[str, Float[Tensor, "batch _side _width"]] | None,
) -> Float[Tensor, "copy batch query"]:
    """The number in each copy of the prompts, in one run."""
    experts = [(copy, change.expert) for copy, change in changes if change.expert is not None]
    with changed_calls(without_experts(experts, copies, live.frozen.tokens)):
        return live.numbers(copies, _hooks(live, changes, copies, values))


def _hooks(
    live: LiveTarget,
    changes: Sequence[tuple[int, NodeChange]],
    copies: int,
    values: Mapping[str, Float[Tensor, "batch _side _width"]] | None,
) -> list[FwdHook]:
    """The hooks that change nodes, each in its copy of the prompts."""
    frozen = live.frozen
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
            marked[copy, :, change.position, change.part] = True
        replacement = None
        if values is not None:
            replacement = values[point].reshape(1, batch, pos, parts, -1)
        hook = partial(_changed, earlier=live.earlier, marked=marked, replacement=replacement)
        hooks.append((point, in_this_thread(hook)))
    return hooks


def _changed(
    tensor: Tensor,
    *,
    hook: Any,
    earlier: EarlierLayers,
    marked: Bool[Tensor, "copy batch pos part 1"],
    replacement: Float[Tensor, "1 batch pos part width"] | None,
) -> Tensor:
    """What a hook point has in copies of the prompts, with other values, or zeros, in the parts that are marked.

    Some classes flatten batch and position, some have heads side by side.
    """
    marked = earlier.entered(marked).to(tensor.device)
    split = tensor.reshape(*marked.shape[:-1], -1)
    if replacement is None:
        changed = split.masked_fill(marked, 0)
    else:
        changed = torch.where(marked, earlier.at_positions(replacement).to(tensor), split)
    return changed.reshape(tensor.shape)


def sublayer_nodes(readout: StreamTarget, question: str, by: str, advice: str) -> Iterator[NodeChange]:
    """Every sublayer's nodes where the live model has them.

    Args:
        readout: the target whose stream they belong to.
        question: the function that was called, for messages.
        by: ``"component"`` (attention and MLPs whole), ``"head"`` (attention by head, a mixture by expert) or
            ``"neuron"`` (MLPs by neuron as well).
        advice: what to do where no hook reaches a sublayer, for the message.

    Raises:
        UnsupportedModelError: neither a hook nor a module's call reaches a sublayer's nodes.
    """
    frozen = readout.stream.run
    for step in readout.stream.steps:
        for sublayer in step.sublayers:
            if isinstance(sublayer.read.stages[-1], Beside):
                yield from _expert_nodes(frozen, question, sublayer, by)
                continue
            point = _hidden_point(frozen, sublayer)
            if point is None:
                raise UnsupportedModelError(
                    f"{question}: nothing inside {sublayer.name} of this {frozen.view.description} can be "
                    f"changed by a hook (a gate or a norm inside, a mixer in place of attention, one output of self- "
                    f"and cross-attention). {advice}"
                )
            names = _node_names(frozen, sublayer, by)
            for part, name in enumerate(names):
                yield NodeChange(name, (point,), part, len(names), layer=sublayer.layer)


def _hidden_point(frozen: FrozenPass, sublayer: Sublayer) -> str | None:
    """The hook point of a sublayer's hidden vector; None where no hook reaches it."""
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


def _node_names(frozen: FrozenPass, sublayer: Sublayer, by: str) -> Sequence[str]:
    """The names of a sublayer's nodes, which are equal parts of its hidden vector."""
    if by == "component":
        return (sublayer.name,)
    if by == "neuron" and sublayer.is_mlp:
        mlp = frozen.view.blocks[sublayer.layer].dense_mlp
        assert mlp is not None
        return [f"{sublayer.name}.N{neuron}" for neuron in range(mlp.W_out.shape[0])]
    return sublayer.nodes


def _expert_nodes(frozen: FrozenPass, question: str, sublayer: Sublayer, by: str) -> Iterator[NodeChange]:
    """A mixture of experts at its end, or each of them where it is called.

    Raises:
        UnsupportedModelError: a shared expert that is called in a way that is not known.
    """
    points = frozen.points.blocks[sublayer.layer]
    weights = frozen.view.blocks[sublayer.layer].mlp
    assert isinstance(weights, ExpertsWeights)
    assert points.mlp is not None  # experts are held as a whole
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
                f"{question}: no hook and no module is known where {name} could be taken away. "
                "by='component' takes all experts of a layer away; or leave live out."
            )
