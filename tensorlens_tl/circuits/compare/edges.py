"""What differs between a clean and a corrupted prompt, edge by edge.

An edge leads from what a node writes to what a later one reads (names: `tensorlens_tl.results.edge_names`). Its score
is what the target loses when the later node reads the earlier one's corrupted output in place of its clean one, all
else as it is for the clean prompt:

| method | score of an edge | queries and keys |
| --- | --- | --- |
| `frozen` | (a_clean − a_corrupted) · pull of the target to what the destination reads | zero: patterns are held |
| `frozen+qk` | the same, the pull joined by the patterns' responses where they are read | as `integrated` |
| `gradient` | (a_clean − a_corrupted) · ∂target/∂(what it reads) at the clean prompt | the same |
| `integrated` | gradients averaged from the corrupted to the clean embeddings | the same |
| `difference` | (a_clean − a_corrupted) · pull of the target through the exact difference of the runs | the same |
| `patching` | target(clean) − target(edge patched), a run for each edge | the same |

Edges into values, MLPs and the target are exact in the model frozen at the clean prompt, and a node's outgoing edges
sum to its score there. Edges into queries and keys act through patterns, which a frozen model holds: there they are
zero by construction, and only live gradients, or patching, show them. A gradient at the clean prompt alone misses a
head that is sure where to look (its softmax is flat there), so `frozen+qk` takes averaged ones.

`difference` takes the exact linear map between the two runs' differences (`tensorlens_tl.passes.difference`), in which
patterns, ratios and scales respond: it is complete at every node, and all edges into the target sum to
target(clean) − target(corrupted). A gate after heads is a destination as their values are (``"L1H0.g"``); the other
methods hold it, or do not run such models. What a hook added to one of the runs, or a patch put there, is a source by
the name of its hook point. Between two runs an edge shares what it does with the others symmetrically; patching takes
all others at the clean prompt.

`gradient` is edge attribution patching (Syed et al. 2023), `integrated` the inputs' variant of EAP-IG (Hanna et al.
2024), whose published code takes its gradients at the left ends of the steps (``points="left"``); midpoints, the
default, are nearer to the integral. Both, and any rule, take a run of the live model that is cut at its nodes
(`tensorlens_tl.circuits.stream.ruled`). ``"patching"``, ``"frozen+qk"`` and all methods of an encoder–decoder run the
model from its weights (`tensorlens_tl.circuits.compare.weights_forward`), which blocks with norms on their way back to
the stream do not allow.

In an encoder–decoder, edges stay within one stack, except those into keys and values of cross-attention
(``"L0H3 → L2.cross.H0.k"``), which read what the encoder's nodes write, through the norm at its end.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import Offset
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.compare.pairs import (
    change_target,
    corrupted_stream,
    gradient_shares,
    pair_target,
    refuse_hooks,
    ruled_method,
)
from tensorlens_tl.circuits.compare.weights_forward import Replay, edge_products
from tensorlens_tl.circuits.stream import Pulled, Step, Stream, StreamTarget, Sublayer, ruled_target
from tensorlens_tl.core import Rule, recordable
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import Difference, PassLike, one_question
from tensorlens_tl.results import TARGET, Circuit, EdgeScores


@recordable()
@one_question
def edge_scores(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    method: str | None = None,
    rule: RuleLike = None,
    positions: bool = False,
    query: Query = -1,
    direction: Direction = None,
    activation: str = "ratio",
    steps: int = 5,
    points: str = "midpoint",
    memory: Memory = None,
) -> EdgeScores:
    """What the target loses when each edge carries its corrupted value.

    Args:
        clean, corrupted, target, minus, direction, query: as in `patch_scores`.
        method: ``"frozen"`` (exact with patterns held), ``"frozen+qk"`` (what patterns do added by averaged gradients),
            ``"gradient"`` (attribution patching), ``"integrated"`` (EAP-IG), ``"difference"`` (exact between the two
            runs) or ``"patching"`` (a live run for each edge). None is ``"frozen"``, and with a rule ``"gradient"``.
        rule: what gradients follow, as in `patch_scores`.
        positions: also each edge at each position where its destination reads, `EdgeScores.by_position`; not with
            ``"patching"``.
        activation: the rule for MLPs, of the frozen methods.
        steps: gradients of ``"integrated"`` and ``"frozen+qk"``, one in each of as many equal steps.
        points: where in its step a gradient is taken: at the ``"midpoint"``, or at the ``"left"`` end, k/steps for k
            from 0: the corrupted embeddings are one of them and the clean ones are not, as in the published code of
            EAP-IG and of the Mechanistic Interpretability Benchmark.
        memory: what the runs of ``"patching"`` may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no such method, rule or points, and what `patch_scores` refuses.
        UnsupportedModelError: blocks in a loop, shared keys and values, a mixture of experts; under ``"difference"``
            what `difference` refuses; along gradients a part that cannot be cut out of a run; under ``"patching"`` and
            ``"frozen+qk"`` blocks that are not read as a sum of what their parts write (see
            `tensorlens_tl.circuits.compare.live_blocks`).
        FrozenModelError: weights changed since a pass; and except under ``"frozen"`` and ``"difference"``, which
            describe the passes alone, hooks put on the model or taken off since, or a frozen pass attached to it.

    >>> corrupted = tlens.freeze(model, "Return the name. Return the")
    >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
    >>> edges.scores.shape  # prompt source destination
    torch.Size([1, 21, 53])
    """
    method, chosen = ruled_method(method, rule, clean)
    shares = gradient_shares(method, steps, points)
    if positions and method == "patching":
        raise InvalidInputError("positions: patching measures whole edges; use another method, or leave it out.")
    if method == "difference":
        pair = change_target(clean, corrupted, target, minus, direction, query)
        readout = pair.change
        numbers = (pair.clean, pair.corrupted)
    else:
        readout = pair_target(clean, corrupted, target, minus, direction, query, activation)
        numbers = (readout.total, readout.number_of(corrupted.activation))
    layout = edge_layout(readout.stream, readout.positions)
    if method == "patching":
        scores = Replay(readout, clean, corrupted, layout.exists).patched(memory)
    elif method == "difference":
        pulled = readout.stream.pull(readout.seed)
        scores = _products(readout.stream, Changes.of(readout.stream), layout, pulled, positions)
    elif method in ("gradient", "integrated") and clean.sides is None:
        layout, scores = _live_scores(readout, clean, corrupted, shares, chosen, positions)
    elif method in ("gradient", "integrated"):
        replay = Replay(readout, clean, corrupted, layout.exists)
        scores = replay.products(replay.gradients(shares, chosen), positions)
    else:
        changes = Changes.of(readout.stream, corrupted_stream(readout, corrupted, activation))
        if method == "frozen":
            pulled = readout.stream.pull(readout.seed)
            scores = _products(readout.stream, changes, layout, pulled, positions)
        else:
            replay = Replay(readout, clean, corrupted, layout.exists)
            responses = replay.gradients(shares)
            pulled = pull_with_patterns(readout, responses)
            scores = _products(readout.stream, changes, layout, pulled, positions)
            matching = [name.endswith((".q", ".k")) for name in layout.destinations]
            scores[:, :, matching] = replay.products(responses, positions)[:, :, matching]
    by_position = None
    if positions:
        by_position = scores
        scores = by_position.sum(-1)
    return EdgeScores(
        sources=layout.sources,
        destinations=layout.destinations,
        scores=scores,
        exists=layout.exists,
        clean=numbers[0][:, 0],
        corrupted=numbers[1][:, 0],
        target=readout.label,
        method=method,
        config=_config(readout),
        by_position=by_position,
        provenance=readout.stream.frozen.provenance(),
    )


@checked_names
def run_circuits(
    clean: PassLike,
    corrupted: PassLike,
    circuits: Any,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Direction = None,
    memory: Memory = None,
) -> Float[Tensor, "circuit batch"]:
    """The target's number in the live model with only a circuit's edges clean: all others carry corrupted values.

    Every destination reads Σ over its edges of what their sources write: in the circuit, what they write in this very
    run; outside it, what they write for the corrupted prompt. All edges give the clean number, none the corrupted one.

    Args:
        clean, corrupted, target, minus, direction, query: as in `patch_scores`.
        circuits: of this model, one or a list; they run together.
        memory: what the run may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no circuit, one of another model, or, of an encoder–decoder, one whose target reads in the
            other stack; and what `patch_scores` refuses.
        UnsupportedModelError, FrozenModelError: as for `edge_scores`.

    >>> corrupted = tlens.freeze(model, "Return the name. Return the")
    >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
    >>> tlens.circuits.run_circuits(frozen, corrupted, edges.circuit(5), " value", " name").shape  # circuit prompt
    torch.Size([1, 1])
    """
    if not isinstance(circuits, (Circuit, Iterable)):
        raise InvalidInputError(
            f"circuits={circuits!r}: pass one or a list of circuits, such as edge_scores().circuit(100)."
        )
    if isinstance(circuits, Circuit):
        circuits = [circuits]
    circuits = list(circuits)
    readout = pair_target(clean, corrupted, target, minus, direction, query)
    layout = edge_layout(readout.stream, readout.positions)
    config = _config(readout)
    for number, circuit in enumerate(circuits):
        if not isinstance(circuit, Circuit):
            raise InvalidInputError(
                f"circuits: number {number} is {type(circuit).__name__}; pass edge_scores().circuit()."
            )
        same = circuit.sources == layout.sources and circuit.destinations == layout.destinations
        if not same or config | circuit.config != config:
            raise InvalidInputError(
                f"circuits: number {number} is of another model: {len(circuit.sources)} sources, "
                f"{len(circuit.destinations)} destinations, {circuit.config}, and "
                f"{readout.stream.frozen.view.description} has {len(layout.sources)}, {len(layout.destinations)}, "
                f"{config}."
            )
        differing = int((circuit.exists.to(layout.exists.device) ^ layout.exists).sum())
        if differing:
            raise InvalidInputError(
                f"circuits: number {number} is of a target that reads elsewhere: {differing} edges are there for one "
                "of the two targets alone. Choose it by edge_scores of this target and query."
            )
    if not circuits:
        raise InvalidInputError("circuits: none given.")
    clean_edges = torch.stack([circuit.selection.to(readout.total.device) for circuit in circuits])
    return Replay(readout, clean, corrupted, layout.exists).numbers(clean_edges, memory)


class Changes(NamedTuple):
    """What differs between two runs: the stream before each step, and every sublayer's hidden vector by step."""

    x: list[Float[Tensor, "batch pos d_model"]]
    hidden: list[tuple[Tensor, ...]]

    @classmethod
    def of(cls, stream: Stream, other: Stream | None = None) -> "Changes":
        """Between two passes' streams, or of the stream of a difference, whose values they are."""
        if other is None:
            return cls(stream.x, stream.hidden)
        x = [first - second for first, second in zip(stream.x, other.x, strict=True)]
        hidden = [
            tuple(first - second for first, second in zip(*pair, strict=True))
            for pair in zip(stream.hidden, other.hidden, strict=True)
        ]
        return cls(x, hidden)

    @classmethod
    def at_points(cls, stream: Stream, differences: Mapping[str, Float[Tensor, "batch pos _width"]]) -> "Changes":
        """Between two runs of the live model, by hook point; what heads give changes as a whole, by their values."""
        hidden = [
            tuple(differences[part.point] * (part.kind not in ("query", "key")) for part in step.sublayers)
            for step in stream.steps
        ]
        return cls([differences[stream.run.capture.stream_names(0)[0]]], hidden)


class EdgeLayout(NamedTuple):
    """Sources and destinations of a model in the order of the forward pass, and which pairs are edges."""

    sources: list[str]
    destinations: list[str]
    exists: Bool[Tensor, "source destination"]


Stacks = tuple[bool, bool]
"""Whether something is written or read in an encoder–decoder's encoder, and whether in its decoder or an only stack."""

ENCODER: Stacks = (True, False)
DECODER: Stacks = (False, True)
BOTH: Stacks = (True, True)


def edge_layout(stream: Stream, queries: Int[Tensor, "batch query"] | None = None) -> EdgeLayout:
    """The edges of a stream: from everything written before a step to everything that its sublayers read.

    In a difference, what hooks added to one run and not to the other is written as well, and a gate after heads reads.
    In an encoder–decoder, edges stay within one stack, except those into keys and values of cross-attention, which read
    only what the encoder's nodes write. The target has edges from every stack in which it reads for some prompt; a
    prompt whose target reads in the other stack scores zero there.

    Args:
        stream: of a pass, or of the difference of two.
        queries: where the target reads; None for anywhere.
    """
    sources = ["embed"]
    written = [BOTH]
    destinations = dict[str, Stacks]()
    known = list[int]()
    for step in stream.steps:
        stack = DECODER if step.layer >= stream.frozen.view.encoder_layers else ENCODER
        read_at = dict[str, Stacks]()  # heads are three sublayers in a difference
        for sublayer in step.sublayers:
            attended = ENCODER if sublayer.is_cross else stack
            read_at |= dict.fromkeys(read_names(sublayer, "q"), stack)
            read_at |= dict.fromkeys(read_names(sublayer, "k"), attended)
            read_at |= dict.fromkeys(read_names(sublayer, "v" if sublayer.letter else ""), attended)
        gates = [name for sublayer in step.sublayers for name in read_names(sublayer) if name not in read_at]
        read_at |= dict.fromkeys(gates, stack)
        destinations |= read_at
        known += [len(sources)] * len(read_at)
        sources += step.nodes
        if added_by_hooks(stream, step) is not None:
            sources.append(step.outer_name)
        written += [stack] * (len(sources) - len(written))
    destinations[TARGET] = _stacks_at(stream, queries)
    known.append(len(sources))
    device = stream.x[0].device
    before = torch.arange(len(sources), device=device)[:, None] < torch.tensor(known, device=device)
    together = torch.tensor(written, device=device)[:, None] & torch.tensor([*destinations.values()], device=device)
    return EdgeLayout(sources, [*destinations], before & together.any(-1))


def _stacks_at(stream: Stream, queries: Int[Tensor, "batch query"] | None) -> Stacks:
    """The stacks of some positions."""
    if queries is None:
        return BOTH
    encoder = queries < stream.frozen.maps.capture.prompt.encoder_length
    return bool(encoder.any()), bool((~encoder).any())


def added_by_hooks(stream: Stream, step: Step) -> Float[Tensor, "1 #batch #pos d_model"] | None:
    """What hooks added at a step to one run of a difference more than to the other; None of any other step."""
    if isinstance(stream.frozen, Difference) and isinstance(step.outer, Offset):
        return step.outer.vectors[None]
    return None


def read_names(sublayer: Sublayer, letter: str = "") -> list[str]:
    """The destinations that a sublayer's nodes are: of heads what they read by, or by another letter."""
    if not sublayer.letter:
        return list(sublayer.nodes)
    return [f"{node}.{letter or sublayer.letter}" for node in sublayer.nodes]


def _live_scores(
    readout: StreamTarget,
    clean: PassLike,
    corrupted: PassLike,
    shares: Sequence[float],
    rule: Rule | None,
    positions: bool,
) -> tuple[EdgeLayout, Float[Tensor, "batch source destination *pos"]]:
    """Edges along gradients of the live model, averaged over shares of the way; its parts are those of its own run."""
    refuse_hooks(clean, corrupted)
    names = clean.capture.stream_names(0)
    ends = {name: (corrupted.activation(name), clean.activation(name)) for name in names}
    differences = dict[str, Tensor]()
    of_shares = list[Tensor]()
    layout = edge_layout(readout.stream, readout.positions)
    for share in shares:
        start = {name: torch.lerp(*pair, share) for name, pair in ends.items()} if share != 1 else None
        one, pulled = ruled_target(readout, rule, start, biases=False)
        layout = edge_layout(one.stream, one.positions)
        if not differences:
            points = dict.fromkeys(part.point for step in one.stream.steps for part in step.sublayers)
            differences = _live_differences(clean, corrupted, [*names, *points])
        changes = Changes.at_points(one.stream, differences)
        of_shares.append(_products(one.stream, changes, layout, pulled, positions) / len(shares))
    return layout, torch.stack(of_shares).sum(0)


def _live_differences(
    clean: PassLike, corrupted: PassLike, points: Sequence[str]
) -> dict[str, Float[Tensor, "batch pos _width"]]:
    """What the live model has at hook points for the clean prompts, less what it has for the corrupted ones."""
    seen = [
        capture(frozen.model, frozen.inputs, points, last=clean.points.last_output)[0] for frozen in (clean, corrupted)
    ]
    shape = clean.tokens.shape
    return {point: (seen[0][point] - seen[1][point]).reshape(*shape, -1) for point in points}


def pull_with_patterns(readout: StreamTarget, responses: Float[Tensor, "destination batch pos d"]) -> Pulled:
    """The target pulled through the frozen model, joined by gradients of the live one where queries and keys are read.

    So a frozen pull also follows what acts through patterns, to the order that the gradients do.

    Args:
        readout: the target.
        responses: its gradient by what every destination reads; only those of queries and keys join.
    """
    by_step = defaultdict[int, list[Tensor]](list)
    first = 0
    for number, step in enumerate(readout.stream.steps):
        for sublayer in step.sublayers:
            nodes = len(sublayer.nodes)
            if sublayer.is_attention:
                keys_at = _encoder_end(readout.stream) if sublayer.is_cross else number
                by_step[number].append(responses[first : first + nodes].sum(0))
                by_step[keys_at].append(responses[first + nodes : first + 2 * nodes].sum(0))
                first += 2 * nodes
            first += nodes
    joining = {number: torch.stack(vectors).sum(0) for number, vectors in by_step.items()}
    return readout.stream.pull(readout.seed, joining=joining)


def _encoder_end(stream: Stream) -> int:
    """The step before which an encoder's stream is all that its blocks write: that of the norm at its end, if any."""
    last = max(
        number for number, step in enumerate(stream.steps) if 0 <= step.layer < stream.frozen.view.encoder_layers
    )
    if stream.steps[last].sublayers:
        return last + 1
    return last


def _products(
    stream: Stream, changes: Changes, layout: EdgeLayout, pulled: Pulled, positions: bool
) -> Float[Tensor, "batch source destination *pos"]:
    """What differs in each source's output, carried past the sublayers to every destination, dotted with the target."""
    batch, pos = stream.x[0].shape[:2]
    shape = [batch, *layout.exists.shape]
    if positions:
        shape.append(pos)
    scores = upcast(stream.x[0]).new_zeros(shape)
    columns = {name: number for number, name in enumerate(layout.destinations)}
    carried = changes.x[0].new_zeros(len(layout.sources), *changes.x[0].shape)
    carried[0] = changes.x[0]
    known = 1
    last = max((number for number, step in enumerate(stream.steps) if _writes(stream, step)), default=-1)
    for number, step in enumerate(stream.steps[: last + 1]):
        before = carried[:known]
        for sublayer, change in zip(step.sublayers, changes.hidden[number], strict=True):
            parts = sublayer.split(sublayer.write.pull(pulled.sums[number]))
            reads = sublayer.pull_each(parts)[:, 0]
            into = [columns[name] for name in read_names(sublayer)]
            scores[:, :known, into] = edge_products(before, reads, positions)
            first = known + step.nodes.index(sublayer.nodes[0])
            carried[first : first + len(sublayer.nodes)] += sublayer.outputs(change)
        known += len(step.nodes)
        if not step.outer.is_identity:
            carried[:known] = step.outer.push(carried[:known])
        added = added_by_hooks(stream, step)
        if added is not None:
            carried[known] = added[0]
            known += 1
    # steps after the last that writes take every source alike: the target is pulled through them instead
    scores[:, :, -1:] = edge_products(carried, pulled.stream[last + 1], positions)
    return scores


def _writes(stream: Stream, step: Step) -> bool:
    """Whether a step has sources of its own."""
    return bool(step.sublayers) or added_by_hooks(stream, step) is not None


def _config(readout: StreamTarget) -> dict[str, Any]:
    """What the benchmark's files say of a model."""
    frozen = readout.stream.frozen
    heads = [sublayer.heads for step in readout.stream.steps for sublayer in step.sublayers]
    return {
        "n_layers": frozen.n_layers,
        "n_heads": max(heads, default=0),
        "d_model": readout.stream.x[0].shape[-1],
        "parallel_attn_mlp": any(layout.parallel for layout in frozen.layouts),
    }
