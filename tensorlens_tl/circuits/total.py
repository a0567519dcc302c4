"""Total effects: what a logit loses when a component is taken away, whatever lies between.

In the frozen pass everything later is linear, so the total effect of every head and MLP comes from one pull: its
hidden vector dotted with the target pulled through everything later. Patterns, ratios and scales stay as they were. In
the live model they respond as well: with ``live=True`` each component is ablated in a run of its own, many to a batch.
The two differ by what the ablation does to patterns, activations and norms; a previous-token head, say, acts on an
induction head's *pattern*, which only the live model shows.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.circuits.live import bytes_per_copy, check_live, live_numbers
from tensorlens_tl.circuits.stream import StreamTarget, dot, stream_target
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook
from tensorlens_tl.models.protocol import LayerRange, Query, TokenLike
from tensorlens_tl.passes.frozen import PassLike
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
        query: positions, the last real token unless said; see `tensorlens_tl.passes.prompts.query_positions`.
        layers: consecutive layers: their components are ablated, and a direction reads the stream where they end.
        final_norm: as in `logit_attribution`.
        activation: the rule for the MLPs that effects go through, frozen.
        live: ablate in the live model, patterns, activations and norms responding, instead of the frozen one.
        memory: what the runs of ``live=True`` may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: what goes through two components counts for both.

    Raises:
        InvalidInputError: no such `by`, and what `logit_attribution` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
            Live effects where the model ignores hooks.
        FrozenModelError: live effects asked for while a frozen pass is attached, or where the live model no longer
            gives the number that the pass holds.
    """
    if by not in BY:
        raise InvalidInputError(f"by={by!r}; use one of {', '.join(BY)}.")
    asked = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm, one=False)
    names, scores = _live(asked, by, memory) if live else _frozen(asked, by)
    return Terms(names=names, scores=scores.permute(1, 0, 2), **asked.fields())


def _frozen(asked: StreamTarget, by: str) -> tuple[list[str], Float[Tensor, "query batch term"]]:
    stream, pulled = asked.stream, asked.stream.pull(asked.seed)
    names: list[str] = []
    scores: list[Tensor] = []
    for number, step in enumerate(stream.steps):
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            met = sublayer.write.pull(pulled.sums[number])
            names += sublayer.nodes if by == "head" else [sublayer.name]
            scores.append(sublayer.shares(met, hidden) if by == "head" else dot(met, hidden))
    return names, torch.cat(scores, dim=-1)


class _Component(NamedTuple):
    """A component to be taken away: its name, the hook point of its hidden vector, and which head of how many."""

    name: str
    point: str
    head: int | None = None
    heads: int = 1


def _live(asked: StreamTarget, by: str, memory: Memory) -> tuple[list[str], Float[Tensor, "query batch term"]]:
    check_live(asked, "total_effects")
    components, per_row = list(_components(asked, by)), bytes_per_copy(asked)
    left = [
        _without(asked, components[rows.start : rows.stop])
        for rows in chunks(len(components), per_row, memory, "ablations")
    ]
    return [component.name for component in components], asked.total.T[..., None] - torch.cat(left, dim=-1)


def _components(asked: StreamTarget, by: str) -> Iterator[_Component]:
    points = asked.stream.frozen.points.blocks
    for step in asked.stream.steps:
        for sublayer in step.sublayers:
            at = points[sublayer.layer]
            inside = at.z if sublayer.is_attention else None if sublayer.is_mixer else at.post
            inside = None if sublayer.is_attention and at.attention is not None else inside
            if inside is None:
                raise UnsupportedModelError(
                    f"total_effects(live=True): nothing inside {sublayer.name} of this "
                    f"{asked.stream.frozen.view.description} can be taken away by a hook (a mixture of experts, a gate "
                    "or a norm inside, a mixer in place of attention). Leave live out: the frozen model's effects are "
                    "exact."
                )
            if not sublayer.is_attention or by == "component":
                yield _Component(sublayer.name, inside)
            else:
                heads = len(sublayer.nodes)
                yield from (_Component(name, inside, head, heads) for head, name in enumerate(sublayer.nodes))


def _without(asked: StreamTarget, components: Sequence[_Component]) -> Float[Tensor, "query batch term"]:
    """The number asked about, with each component taken away in a copy of every prompt."""
    tokens, copies = asked.stream.frozen.tokens, len(components)
    hooks: list[FwdHook] = []
    for point in dict.fromkeys(component.point for component in components):
        there = [(copy, component) for copy, component in enumerate(components) if component.point == point]
        keep = torch.ones(copies, there[0][1].heads, dtype=torch.bool, device=tokens.device)
        for copy, component in there:
            keep[copy, slice(None) if component.head is None else component.head] = False
        hooks.append((point, partial(_keep_only, keep=keep, positions=tokens.numel())))
    return live_numbers(asked, copies, hooks).permute(2, 1, 0)


def _keep_only(hidden: Tensor, *, hook: Any, keep: Bool[Tensor, "copy head"], positions: int) -> Tensor:
    """Hidden vectors of copies of the prompts without some heads.

    Some classes flatten batch and position, some have heads side by side; `positions` counts those of one copy.
    """
    copies, heads = keep.shape
    split = hidden.reshape(copies, positions, heads, -1)
    return (split * keep[:, None, :, None].to(split)).reshape(hidden.shape)
