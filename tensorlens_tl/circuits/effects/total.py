"""Total effects: what a logit loses when a component is taken away, whatever lies between.

In the frozen pass everything later is linear, so the total effect of every head and MLP comes from one pull: its
hidden vector dotted with the target pulled through everything later. Patterns, ratios and scales stay as they were. In
the live model they respond as well: with ``live=True`` each component is ablated in a separate run, many to a batch.
The two differ by what the ablation does to patterns, activations and norms; a previous-token head, say, acts on an
induction head's *pattern*, which only the live model shows.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.live import LiveTarget, NodeChange, NodeGradients, losses, sublayer_nodes
from tensorlens_tl.circuits.stream import StreamTarget, dot, stream_target
from tensorlens_tl.core import Rule, rule_of
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import LayerRange, Query, TokenLike
from tensorlens_tl.passes import Difference, PassLike
from tensorlens_tl.requirements import check_rule
from tensorlens_tl.results import Terms

BY = ("component", "head")


@checked_names
def total_effects(
    frozen: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: str = "head",
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
    live: bool = False,
    rule: RuleLike = None,
    nodes: Sequence[str] | None = None,
    memory: Memory = None,
) -> Terms:
    """What a logit loses when each head and MLP is ablated: its output taken away, biases b_O and b_out kept.

    Args:
        frozen: the pass.
        target, minus, direction: as in `FrozenOperator.target`.
        by: ``"head"`` (heads one by one, MLPs whole) or ``"component"`` (each layer's attention whole).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        layers: consecutive layers: their components are ablated, and a direction reads the stream where they end.
        final_norm: as in `logit_attribution`.
        activation: the rule for the MLPs that effects go through, frozen.
        live: ablate in the live model, patterns, activations and norms responding, instead of the frozen one. An
            expert that is taken away counts nothing where its tokens are sent to it; routing of later layers responds.
        rule: what the pull follows in place of the frozen model: one of ``tlens.list_rules()``, or a `Rule`. An effect
            is a component's hidden vector dotted with the target's gradient there, in the live model.
        nodes: only these, by name, such as ``["L1H0", "MLP2"]``: one live run then has a copy of the prompts for each.
        memory: what the runs of ``live=True``, or queries of a rule, may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: what goes through two components counts for both.

    Raises:
        InvalidInputError: no such `by`, node or rule, a rule of a difference, and what `logit_attribution` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
            Live effects where the model ignores hooks, or of a part that neither a hook nor a module's call reaches.
        FrozenModelError: ``live=True`` while a frozen pass is attached, or where the live model no longer
            gives the number that the pass holds.

    >>> effects = tlens.circuits.total_effects(frozen, " value")
    >>> effects.additive, effects.scores.shape == (1, 1, len(effects))
    (False, True)
    """
    check_choice("by", by, BY)
    if not isinstance(live, bool):
        raise InvalidInputError(f"live={live!r}: pass True (each component is ablated in the live model) or False.")
    if live and isinstance(frozen, Difference):
        raise InvalidInputError(
            "total_effects(live=True): a difference of two runs is no run of its own. Ask about either of its passes, "
            "or leave live out."
        )
    if rule is not None and (live or activation != "ratio" or isinstance(frozen, Difference)):
        raise InvalidInputError(
            "total_effects(rule=): a rule is of one run, whose gradients it says; leave live and activation out, and "
            "ask about one of the passes of a difference."
        )
    readout = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm, one=False)
    if rule is not None:
        names, scores = _under(rule_of(rule), readout, by, nodes, memory)
    elif live:
        names, scores = _live(readout, by, nodes, memory)
    else:
        names, scores = _frozen(readout, by, nodes)
    return Terms(names=names, scores=scores, **readout.fields())


def _chosen(names: Sequence[str], nodes: Sequence[str] | None) -> list[int]:
    """Where the nodes that are asked about are among all; all of them for None.

    Raises:
        InvalidInputError: no such node.
    """
    if nodes is None:
        return list(range(len(names)))
    unknown = [node for node in nodes if node not in names]
    if unknown or not nodes or isinstance(nodes, str):
        raise InvalidInputError(f"nodes={nodes!r}: name some of {', '.join(names[:6])}, … in a list.")
    return [names.index(node) for node in nodes]


def _frozen(
    readout: StreamTarget, by: str, nodes: Sequence[str] | None
) -> tuple[list[str], Float[Tensor, "batch query term"]]:
    stream = readout.stream
    pulled = stream.pull(readout.seed)
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
    chosen = _chosen(names, nodes)
    return [names[number] for number in chosen], torch.cat(scores, dim=-1).transpose(0, 1)[..., chosen]


def _under(
    rule: Rule, readout: StreamTarget, by: str, nodes: Sequence[str] | None, memory: Memory
) -> tuple[list[str], Float[Tensor, "batch query term"]]:
    question = "total_effects(rule=)"
    check_rule(rule, readout.stream.run, question)
    changes = _live_nodes(readout, question, by, nodes)
    gradients = NodeGradients(readout, question, changes, rule)
    frozen = gradients.frozen
    at_nodes = gradients.at({name: frozen.activation(name) for name in frozen.capture.stream_names(0)}, memory)
    scores = gradients.products(gradients.values, at_nodes).sum(-1)  # over positions
    return [change.name for change in changes], scores.transpose(0, 1)


def _live(
    readout: StreamTarget, by: str, nodes: Sequence[str] | None, memory: Memory
) -> tuple[list[str], Float[Tensor, "batch query term"]]:
    question = "total_effects(live=True)"
    changes = _live_nodes(readout, question, by, nodes)
    live = LiveTarget(readout, question)
    return [change.name for change in changes], losses(live, changes, None, memory, "ablations")


def _live_nodes(readout: StreamTarget, question: str, by: str, nodes: Sequence[str] | None) -> list[NodeChange]:
    """The components, where the live model has them."""
    advice = "Leave live and rule out: the frozen model's effects are exact."
    changes = list(sublayer_nodes(readout, question, by, advice))
    return [changes[number] for number in _chosen([change.name for change in changes], nodes)]
