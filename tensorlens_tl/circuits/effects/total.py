"""Total effects: what a logit loses when a component is taken away, whatever lies between.

In the frozen pass everything later is linear, so the total effect of every head and MLP comes from one pull: its
hidden vector dotted with the target pulled through everything later. Patterns, ratios and scales stay as they were. In
the live model they respond as well: with ``live=True`` each component is ablated in a run of its own, many to a batch.
The two differ by what the ablation does to patterns, activations and norms; a previous-token head, say, acts on an
induction head's *pattern*, which only the live model shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import Beside
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.effects.live_target import LiveTarget, hidden_point
from tensorlens_tl.circuits.stream import StreamTarget, Sublayer, dot, stream_target
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import BlockPoints, CallChange, CallPoint, FwdHook, changed_calls, in_this_thread
from tensorlens_tl.models.protocol import LayerRange, Query, TokenLike
from tensorlens_tl.models.sublayers import ExpertsWeights, Routing
from tensorlens_tl.passes.frozen import PassLike
from tensorlens_tl.passes.live import Copies
from tensorlens_tl.results.terms import Terms

BY = ("component", "head")


def total_effects(
    frozen: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: str = "head",
    query: Query = -1,
    direction: Any = None,
    layers: LayerRange = None,
    final_norm: bool = True,
    activation: str = "ratio",
    live: bool = False,
    memory: Memory = None,
) -> Terms:
    """What a logit loses when each head and MLP is ablated: its output taken away, biases b_O and b_out kept.

    Args:
        frozen: the pass.
        target, minus, direction: as in `FrozenOperator.target`.
        by: ``"head"`` (heads one by one, MLPs whole) or ``"component"`` (each layer's attention whole).
        query: positions, the last real token unless said; see `tensorlens_tl.passes.inputs.query_positions`.
        layers: consecutive layers: their components are ablated, and a direction reads the stream where they end.
        final_norm: as in `logit_attribution`.
        activation: the rule for the MLPs that effects go through, frozen.
        live: ablate in the live model, patterns, activations and norms responding, instead of the frozen one. An
            expert that is taken away counts nothing where its tokens are sent to it; routing of later layers responds.
        memory: what the runs of ``live=True`` may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: what goes through two components counts for both.

    Raises:
        InvalidInputError: no such `by`, and what `logit_attribution` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
            Live effects where the model ignores hooks, or of a part that neither a hook nor a module's call reaches.
        FrozenModelError: live effects asked for while a frozen pass is attached, or where the live model no longer
            gives the number that the pass holds.
    """
    if by not in BY:
        raise InvalidInputError(f"by={by!r}; use one of {', '.join(BY)}.")
    readout = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm, one=False)
    names, scores = _live(readout, by, memory) if live else _frozen(readout, by)
    return Terms(names=names, scores=scores.permute(1, 0, 2), **readout.fields())


def _frozen(readout: StreamTarget, by: str) -> tuple[list[str], Float[Tensor, "query batch term"]]:
    stream = readout.stream
    pulled = readout.stream.pull(readout.seed)
    names: list[str] = []
    scores: list[Tensor] = []
    for number, step in enumerate(stream.steps):
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            cotangent = sublayer.write.pull(pulled.sums[number])
            if by == "head":
                names += sublayer.nodes
                scores.append(sublayer.shares(cotangent, hidden))
            else:
                names.append(sublayer.name)
                scores.append(dot(cotangent, hidden))
    return names, torch.cat(scores, dim=-1)


class _Component(NamedTuple):
    """A component to be taken away.

    Attributes:
        name: of its node.
        points: the hook points of its hidden vector, or of what it writes.
        head, heads: which head of how many it is there.
        experts: the mixture of experts that it belongs to; `expert` is its number, None for the shared one.
    """

    name: str
    points: tuple[str, ...] = ()
    head: int | None = None
    heads: int = 1
    experts: ExpertsWeights | None = None
    expert: int | None = None


def _live(readout: StreamTarget, by: str, memory: Memory) -> tuple[list[str], Float[Tensor, "query batch term"]]:
    live = LiveTarget(readout, "total_effects")
    components = list(_components(readout, by))

    def run(copies: Copies) -> Float[Tensor, "copy batch query"]:
        return _without(live, [None if number is None else components[number] for number in copies])

    remaining = [numbers.permute(2, 1, 0) for _, numbers in live.changed(len(components), run, memory, "ablations")]
    return [component.name for component in components], readout.total.T[..., None] - torch.cat(remaining, dim=-1)


def _components(readout: StreamTarget, by: str) -> Iterator[_Component]:
    frozen = readout.stream.frozen
    for step in readout.stream.steps:
        for sublayer in step.sublayers:
            at = frozen.points.blocks[sublayer.layer]
            mlp = frozen.view.blocks[sublayer.layer].mlp
            if isinstance(mlp, ExpertsWeights) and isinstance(sublayer.read.stages[-1], Beside):
                yield from _experts(sublayer, at, mlp, by)
                continue
            inside = hidden_point(sublayer, at)
            if inside is None:
                raise UnsupportedModelError(
                    f"total_effects(live=True): nothing inside {sublayer.name} of this {frozen.view.description} can "
                    "be taken away by a hook (a gate or a norm inside, a mixer in place of attention). Leave live out: "
                    "the frozen model's effects are exact."
                )
            if not sublayer.is_attention or by == "component":
                yield _Component(sublayer.name, (inside,))
            else:
                heads = len(sublayer.nodes)
                yield from (_Component(name, (inside,), head, heads) for head, name in enumerate(sublayer.nodes))


def _experts(sublayer: Sublayer, at: BlockPoints, experts: ExpertsWeights, by: str) -> Iterator[_Component]:
    """A mixture of experts at its end, or each of them where it is called.

    Raises:
        UnsupportedModelError: a shared expert that is called in a way that is not known.
    """
    assert at.mlp is not None  # experts are held as a whole
    shared = () if at.shared is None else (at.shared.out,)
    if by == "component":
        yield _Component(sublayer.name, (at.mlp.out, *shared))
        return
    inside = sublayer.read.stages[-1]
    assert isinstance(inside, Beside)
    for name in sublayer.nodes:
        number = name.removeprefix(f"L{sublayer.layer}E")
        if number != name:
            yield _Component(name, experts=experts, expert=int(number))
        elif shared:
            yield _Component(name, shared)
        elif experts.shared_module is not None:
            yield _Component(name, experts=experts)
        else:
            raise UnsupportedModelError(
                f"total_effects(live=True): no hook and no module is known where {name} could be taken away. "
                "by='component' takes all experts of a layer away; or leave live out."
            )


def _without(live: LiveTarget, components: Sequence[_Component | None]) -> Float[Tensor, "copy batch query"]:
    """The number asked about, with one component taken away in each copy of the prompts, or none."""
    tokens = live.frozen.tokens
    copies = len(components)
    ablations = [(copy, component) for copy, component in enumerate(components) if component is not None]
    hooks: list[FwdHook] = []
    for point in dict.fromkeys(point for _, component in ablations for point in component.points):
        point_ablations = [(copy, component) for copy, component in ablations if point in component.points]
        keep = torch.ones(copies, point_ablations[0][1].heads, dtype=torch.bool, device=tokens.device)
        for copy, component in point_ablations:
            heads = slice(None) if component.head is None else component.head
            keep[copy, heads] = False
        hooks.append((point, in_this_thread(partial(_keep_only, keep=keep, positions=tokens.numel()))))
    return live.numbers(copies, hooks, changed_calls(_calls(ablations, copies, tokens)))


def _calls(ablations: Sequence[tuple[int, _Component]], copies: int, tokens: Tensor) -> list[CallChange]:
    """What takes experts away in some copies of the prompts: each counts nothing for the tokens that are sent there."""
    changes: list[CallChange] = []
    mixtures = {id(component.experts): component.experts for _, component in ablations if component.experts is not None}
    for experts in mixtures.values():
        expert_ablations = [(copy, component.expert) for copy, component in ablations if component.experts is experts]
        drop = torch.zeros(copies, experts.count, dtype=torch.bool, device=tokens.device)
        keep = torch.ones(copies, 1, dtype=torch.bool, device=tokens.device)
        for copy, number in expert_ablations:
            if number is None:
                keep[copy] = False
            else:
                drop[copy, number] = True
        if bool(drop.any()):
            routing = experts.routing
            point = CallPoint(routing.module, routing.weight)
            changes.append(CallChange(point, partial(_counting_less, routing=routing, drop=drop)))
        if experts.shared_module is not None and not bool(keep.all()):
            point = CallPoint(experts.shared_module, "output")
            changes.append(CallChange(point, partial(_shared_only, keep=keep, positions=tokens.numel())))
    return changes


def _counting_less(
    arguments: Mapping[str, Any],
    weight: Float[Tensor, "token choice"],
    routing: Routing,
    drop: Bool[Tensor, "copy expert"],
) -> Float[Tensor, "token choice"]:
    """What each choice counts, zero for the experts that a token's copy is without."""
    of_token = drop.to(weight.device).repeat_interleave(weight.shape[0] // len(drop), dim=0)
    if not routing.dense:
        index = arguments[routing.index].to(of_token.device)
        places = index < of_token.shape[1]  # some have a place that is no expert
        of_token = of_token.gather(1, index.where(places, 0).long()) & places
    return weight.masked_fill(of_token, 0)


def _shared_only(
    arguments: Mapping[str, Any], output: Tensor, keep: Bool[Tensor, "copy one"], positions: int
) -> Tensor:
    """What a shared expert gives, zero in the copies that are without it."""
    split = output.reshape(len(keep), positions, -1)
    return (split * keep[:, None].to(split)).reshape(output.shape)


def _keep_only(hidden: Tensor, *, hook: Any, keep: Bool[Tensor, "copy head"], positions: int) -> Tensor:
    """Hidden vectors of copies of the prompts without some heads.

    Some classes flatten batch and position, some have heads side by side; `positions` counts those of one copy.
    """
    copies, heads = keep.shape
    split = hidden.reshape(copies, positions, heads, -1)
    return (split * keep[:, None, :, None].to(split)).reshape(hidden.shape)
