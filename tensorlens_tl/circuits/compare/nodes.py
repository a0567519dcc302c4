"""What differs between a clean and a corrupted prompt, node by node.

A node's score is what the target loses when the node's clean value is replaced by its corrupted one
(`tensorlens_tl.circuits.compare.pairs` states the sign). Ways to get it:

| method | score of a node with values a | what it takes |
| --- | --- | --- |
| `frozen` | (a_clean − a_corrupted) · pull of the target to the node | one pull |
| `frozen+qk` | the same, the pull joined by live gradients where queries and keys are read | `steps` gradients |
| `gradient` | (a_clean − a_corrupted) · ∂target/∂a at the clean prompt | one gradient |
| `integrated` | the same, gradients averaged from the corrupted to the clean embeddings | `steps` gradients |
| `difference` | (a_clean − a_corrupted) · pull of the target through the exact difference of the runs | one pull |
| `patching` | target(clean) − target(node patched), measured | a live run for each node |

Everything later than the node is linear in the model frozen at the clean prompt, so the first is exact there, whatever
the two prompts are. In a masked model, or another one with a prediction head after its blocks, that head is held in the
algebra and not by the hooks: the frozen model's hooks leave it live. Patterns, ratios and scales do not respond in the
frozen model: what acts through an attention pattern is invisible to it. `frozen+qk` adds what the patterns do, by
gradients of the live model averaged on the way from the corrupted to the clean embeddings
(`tensorlens_tl.circuits.compare.edges` says of which models). The gradients of the live model see it to first order:
`gradient` is attribution patching (Nanda 2023), `integrated` the inputs' variant of EAP-IG (Hanna et al. 2024); with
``points="left"`` its gradients are where the published code has them. `difference` pulls the target through the exact
linear map between the two runs' differences (`tensorlens_tl.passes.difference`), in which patterns, ratios and scales
respond, each by its secant: the score of ``"embed"`` is all of target(clean) − target(corrupted), less that of what
hooks added to one of the runs, or of a patch, which is a node by the name of its hook point. Patching is the live
model's own answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.compare.edges import Changes, added_by_hooks, edge_layout, pull_with_patterns
from tensorlens_tl.circuits.compare.pairs import (
    change_target,
    corrupted_stream,
    gradient_shares,
    pair_target,
    ruled_method,
)
from tensorlens_tl.circuits.compare.weights_forward import Replay
from tensorlens_tl.circuits.live import NodeChange, NodeGradients, losses, sublayer_nodes
from tensorlens_tl.circuits.stream import Pulled, Stream, StreamTarget, summed_by_name
from tensorlens_tl.core import Rule, recordable
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import PassLike, one_question
from tensorlens_tl.results import Terms

BY = ("component", "head", "neuron", "stream")


@recordable()
@one_question
def patch_scores(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: str = "head",
    method: str | None = None,
    rule: RuleLike = None,
    positions: bool = False,
    query: Query = -1,
    direction: Direction = None,
    activation: str = "ratio",
    steps: int = 5,
    points: str = "midpoint",
    memory: Memory = None,
) -> Terms:
    """What the target loses when each node's clean value is replaced by its corrupted one.

    Nodes are the first block's input (``"embed"``; in an encoder–decoder, the input of both stacks) and, by `by`,

    * ``"component"``: each layer's attention and MLP, and cross-attention (``"L2.cross"``);
    * ``"head"``: heads one by one (``"L0H1"``, ``"L2.cross.H1"``), MLPs whole;
    * ``"neuron"``: heads and neurons one by one (``"MLP1.N7"``);
    * ``"stream"``: the residual stream before each block, ``"L1.stream"``; in an encoder–decoder, the stream of
      the block's own stack.

    Args:
        clean, corrupted: passes of prompts of the same length, by one model, each clean prompt beside its corrupted
            one; in an encoder–decoder, each side has the same length in both.
        target, minus, direction: as in `FrozenOperator.target`, of the clean prompt.
        by: what a node is.
        method: ``"frozen"`` (exact with patterns held), ``"frozen+qk"`` (what patterns do added by gradients),
            ``"gradient"`` (attribution patching), ``"integrated"`` (EAP-IG), ``"difference"`` (exact between the two
            runs) or ``"patching"`` (a live run for each node). None is ``"frozen"``, and with a rule ``"gradient"``.
        rule: what gradients follow in place of the model's own: one of ``tlens.list_rules()``, or a `Rule`.
        positions: also each node at each position, in `Terms.keys`, `[batch, query, node, pos]`. They sum to the
            node's score, except under ``"patching"``, where each is patched by itself. Of an encoder–decoder they are
            zero at the positions of the other side.
        query: one position of each prompt, the last by default.
        activation: the rule for MLPs, of the frozen methods.
        steps: gradients of ``"integrated"`` and ``"frozen+qk"``, one in each of as many equal steps.
        points: where in its step a gradient is taken: at the ``"midpoint"``, or at the ``"left"`` end, k/steps for k
            from 0: the corrupted embeddings are one of them and the clean ones are not, as in the published code of
            EAP-IG and of the Mechanistic Interpretability Benchmark.
        memory: what the runs of ``"patching"`` may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: what goes through two nodes counts for both. `Terms.total` is the clean number, of
        ``"difference"`` what it is more than the corrupted one.

    Raises:
        InvalidInputError: no such `by`, method, rule or points, a rule for a method without gradients, prompts that
            cannot be compared (see `check_pair`), and what `logit_attribution` refuses.
        UnsupportedModelError: blocks in a loop, shared keys and values, a mixture of experts, or, except under
            ``"frozen"``, a part that no hook reaches; under ``"frozen+qk"`` what live edges refuse (see `edge_scores`).
        FrozenModelError: weights changed since a pass; and except under ``"frozen"``, which describes the passes
            alone, hooks put on the model or taken off since that change what it does (under ``"frozen+qk"`` any), or
            a frozen pass attached to it.

    >>> corrupted = tlens.freeze(model, "Return the name. Return the")
    >>> scores = tlens.circuits.patch_scores(frozen, corrupted, " value", " name", by="component")
    >>> scores.scores.shape[-1] == len(scores.names)
    True
    """
    check_choice("by", by, BY)
    method, chosen = ruled_method(method, rule, clean)
    shares = gradient_shares(method, steps, points)
    if method == "difference":
        readout = change_target(clean, corrupted, target, minus, direction, query).change
        label = f"change of the {readout.label}, clean − corrupted"
    else:
        readout = pair_target(clean, corrupted, target, minus, direction, query, activation)
        label = f"{readout.label}, clean − patched"
    keys = None
    if method == "patching":
        nodes = _LiveNodes(readout, corrupted, by, method)
        names = nodes.names
        scores = nodes.patched(memory)
        if positions:
            keys = nodes.patched_at_positions(memory)
    else:
        if method in ("gradient", "integrated"):
            nodes = _LiveNodes(readout, corrupted, by, method, chosen)
            names = nodes.names
            by_position = nodes.along_gradients(shares)
        elif method == "difference":
            pulled = readout.stream.pull(readout.seed)
            names, by_position = _along(pulled, readout.stream, Changes.of(readout.stream), by)
        else:
            changes = Changes.of(readout.stream, corrupted_stream(readout, corrupted, activation))
            names, by_position = _along(_pulled(readout, clean, corrupted, shares), readout.stream, changes, by)
        scores = by_position.sum(-1)[:, None]
        if positions:
            keys = by_position[:, None]
    terms = Terms(names=names, scores=scores, keys=keys, **readout.fields())
    return replace(terms, target=label)


# ------------------------------------------------------------------ frozen


def _pulled(readout: StreamTarget, clean: PassLike, corrupted: PassLike, shares: Sequence[float]) -> Pulled:
    """The target pulled back, joined by live gradients where there are shares of the way to take them at."""
    if not shares:
        return readout.stream.pull(readout.seed)
    layout = edge_layout(readout.stream, readout.positions)
    replay = Replay(readout, clean, corrupted, layout.exists)
    return pull_with_patterns(readout, replay.gradients(shares))


def _along(
    pulled: Pulled, stream: Stream, changes: Changes, by: str
) -> tuple[list[str], Float[Tensor, "batch node pos"]]:
    """What differs between two runs at every node, dotted with the target pulled back to it."""
    names = ["embed"]
    scores = [_at_positions(pulled, changes, 0)]
    pos = scores[0].shape[-1]
    previous = -1
    for number, step in enumerate(stream.steps):
        if by == "stream":
            if step.layer not in (-1, previous):
                start, stop = stream.frozen.maps.capture.side(step.layer)
                names.append(f"L{step.layer}.stream")
                scores.append(_among_all(_at_positions(pulled, changes, number)[..., start:stop], start, pos))
            previous = step.layer
            continue
        for sublayer, change in zip(step.sublayers, changes.hidden[number], strict=True):
            cotangent = sublayer.write.pull(pulled.sums[number])[0]
            product = upcast(cotangent) * change
            if by == "component":
                names.append(sublayer.name)
                scores.append(product.sum(-1)[:, None])
            elif by == "neuron" and sublayer.has_neurons:
                stream.frozen.view.blocks[sublayer.layer].require_dense_mlp()
                names += sublayer.neurons(change)
                scores.append(product.mT)
            else:
                names += sublayer.nodes
                scores.append(sublayer.split(product).sum(-1).mT)
        added = added_by_hooks(stream, step)
        if added is not None:
            names.append(step.outer_name)
            scores.append((upcast(pulled.stream[number + 1][0]) * added[0]).sum(-1)[:, None])
    return summed_by_name(names, torch.cat(scores, dim=1), 1)


def _at_positions(pulled: Pulled, changes: Changes, number: int) -> Float[Tensor, "batch 1 pos"]:
    """The streams' difference before a step, dotted with the target there."""
    return (upcast(pulled.stream[number][0]) * changes.x[number]).sum(-1)[:, None]


def _among_all(values: Float[Tensor, "batch node some"], start: int, positions: int) -> Float[Tensor, "batch node pos"]:
    """Values of one side of an encoder–decoder among all positions, zero at the others."""
    return widened(values[..., None], start, positions)[..., 0]


# ------------------------------------------------------------------ live


class _LiveNodes:
    """The nodes of a live model, with their values for both prompts."""

    def __init__(
        self, readout: StreamTarget, corrupted: PassLike, by: str, method: str, rule: Rule | None = None
    ) -> None:
        question = f"patch_scores(method={method!r})"
        self.frozen = readout.stream.run
        self.corrupted = corrupted
        self.nodes = list(_live_nodes(readout, question, by))
        self.names = [node.name for node in self.nodes]
        self.gradients = NodeGradients(readout, question, self.nodes, rule)
        self.live = self.gradients.live
        self.other = self.gradients.values_of(corrupted)

    def along_gradients(self, shares: Sequence[float]) -> Float[Tensor, "batch node pos"]:
        """(a_clean − a_corrupted) · mean gradient, embeddings at these shares of the way from corrupted to clean."""
        names = self.frozen.capture.stream_names(0)
        ends = [(self.corrupted.activation(name), self.frozen.activation(name)) for name in names]
        summed: dict[str, Tensor] = {}
        for share in shares:
            start = {name: torch.lerp(*pair, share) for name, pair in zip(names, ends, strict=True)}
            for point, gradient in self.gradients.at(start).items():
                summed[point] = summed[point] + gradient if point in summed else gradient
        mean = {point: gradient[0] / len(shares) for point, gradient in summed.items()}
        changes = {point: self.gradients.values[point] - self.other[point] for point in mean}
        return self.gradients.products(changes, mean)

    def patched(self, memory: Memory) -> Float[Tensor, "batch query node"]:
        """What the target loses with each node patched, at all its positions."""
        return losses(self.live, self.nodes, self.other, memory, "patches")

    def patched_at_positions(self, memory: Memory) -> Float[Tensor, "batch query node pos"]:
        """The same with each node patched at one position at a time."""
        changes: list[NodeChange] = []
        columns: list[int] = []
        pos = self.frozen.tokens.shape[1]
        for number, node in enumerate(self.nodes):
            for point in node.points:
                for place, position in enumerate(self.gradients.positions(point)):
                    changes.append(node._replace(points=(point,), position=place))
                    columns.append(number * pos + position)
        lost = losses(self.live, changes, self.other, memory, "patches")
        scores = lost.new_zeros(*lost.shape[:2], len(self.nodes) * pos)
        scores[..., columns] = lost
        return scores.unflatten(2, (-1, pos))


def _live_nodes(readout: StreamTarget, question: str, by: str) -> Iterator[NodeChange]:
    """The first block's input, and the nodes of every sublayer or the stream before every block."""
    captured = readout.stream.run.capture
    yield NodeChange("embed", tuple(captured.stream_names(0)))
    if by != "stream":
        yield from sublayer_nodes(readout, question, by, "Use method='frozen', which reads weights, or by='stream'.")
        return
    for layer in range(captured.n_layers):
        # the stream before a block is what the block before it gives; of an encoder–decoder that of its side
        side = -1 if layer >= captured.view.encoder_layers else 0
        yield NodeChange(f"L{layer}.stream", (captured.stream_names(layer)[side],), layer=max(layer - 1, 0))
