"""Score the nodes and edges by which a clean and a corrupted prompt differ.

A prompt is *clean* where the model shows the behaviour of interest, and *corrupted* where a small change removes it.
Both are frozen and have the same length: positions must match, so that an activation of one run can replace the
other's. A node's score is what the target loses when the node's clean value is replaced by its corrupted one,
``number(clean) − number(patched)``, so what supports the clean answer is positive. An edge leads from one node's output
to the input of a later one (names: `tensorlens_tl.results.circuit`); its score is what the target loses when the later
node reads the earlier one's corrupted output instead of its clean one, with everything else as in the clean run. This
patches the clean run (noising). With ``patched="corrupted"`` the corrupted run is patched (denoising), and a score is
what the target gains from the clean value, ``number(patched) − number(corrupted)``. With Δa = a_clean − a_corrupted:

| method | score of a node with values a | score of an edge from a node that writes a | edges into queries and keys |
| --- | --- | --- | --- |
| `frozen` | Δa · pull of the target to the node | Δa · pull of the target to what is read | zero: patterns are frozen |
| `frozen+qk` | the same, with live gradients added at queries and keys | the same | as `integrated-gradients` |
| `gradient` | Δa · ∂target/∂a at the clean prompt | Δa · ∂target/∂(what is read) | the same |
| `integrated-gradients` | the same, averaged from the corrupted to the clean embeddings | the same | the same |
| `atp*` | as `gradient`, with queries and keys through their softmax and sizes by GradDrop | – | – |
| `difference` | Δa · pull of the target through the exact difference of the runs | the same | the same |
| `measured` | the largest as `patching`, the others the median of three estimates | the same | the same |
| `patching` | target(clean) − target(node patched), one live run each | one live run for each edge | the same |

`frozen` is exact in the model frozen at the clean prompt, where everything later is linear, whatever the two prompts
are, and a node's outgoing edges sum to its score there. In a model with a prediction head after its blocks (such as a
masked language model), the algebra freezes that head, but the frozen model's hooks leave it live. Patterns, ratios and
scales do not respond in the frozen model, so it cannot see effects through attention patterns, and edges into queries
and keys are zero by construction. `frozen+qk` adds the effects of patterns, by gradients of the live model averaged on
the way from the corrupted to the clean embeddings. A gradient at the clean prompt alone would miss a head whose
attention is saturated (its softmax is flat there).

`gradient` is attribution patching (Nanda 2023; of edges, Syed et al. 2023), `integrated-gradients` the inputs' variant
of EAP-IG (Hanna et al. 2024), whose published code takes its gradients at the left ends of the steps
(``points="left"``); midpoints, the default, are nearer to the integral. These two methods, any rule, and the pattern
effects of `frozen+qk` need a run of the live model, for edges and patterns cut at its nodes
(`tensorlens_tl.circuits.ruled`). Patching edges runs it with every edge separate (`tensorlens_tl.circuits.live_edges`),
which is not possible in blocks with norms on their way back to the stream.

`difference` pulls the target through the exact linear map between the two runs' differences
(`tensorlens_tl.passes.difference`), in which patterns, ratios and scales respond, each by its secant. It is complete at
every node: the score of ``"embed"`` is all of target(clean) − target(corrupted), and all edges into the target sum to
it, apart from what hooks or a patch put into one of the runs, which is a node and a source named by its hook point. A
gate after heads is a destination, as their values are (``"L1H0.g"``); the other methods freeze it, or reject such
models. Between two runs, an edge's interactions with the others are shared symmetrically; patching, the live model's
own answer, keeps all others at the clean prompt.

`atp*` scores nodes only (`tensorlens_tl.circuits.atp_star`): with ``by="qkv"`` queries, keys and values of heads are
nodes of their own, whose effect on their head is exact.

`measured` patches the nodes or edges that may be the largest, and reports how far off the others are
(`tensorlens_tl.circuits.measured`). The others get the median of three estimates: `difference`, `gradient`, and the
gradient of `integrated-gradients` at one point, a tenth of the way from the clean to the corrupted embeddings, where a
softmax that is saturated at the clean prompt begins to respond.

In an encoder–decoder, edges stay within one stack, except those into keys and values of cross-attention
(``"L0H3 → L2.cross.H0.k"``), which read the outputs of the encoder's nodes through the norm at its end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tensorlens_tl._arguments import Seed, check_choice, checked_names, formerly, whole_count, whole_seed
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.algebra.secants import Offset
from tensorlens_tl.circuits import atp_star
from tensorlens_tl.circuits.arguments import Circuits, Direction, RuleLike, Whole
from tensorlens_tl.circuits.live import NodeChange, NodeGradients, NodeValues, sublayer_nodes
from tensorlens_tl.circuits.live_edges import LiveEdges, encoder_end, refuse_hooks
from tensorlens_tl.circuits.measured import Budget, Measurement, budget_of, measure
from tensorlens_tl.circuits.ruled import ruled_target
from tensorlens_tl.circuits.stream import Pulled, Step, Stream, StreamTarget, Sublayer, stream_target, summed_by_name
from tensorlens_tl.core import Rule, recordable, rule_of
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, Query, TokenLike
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import Difference, FrozenPass, PassLike, check_pass, difference, one_question
from tensorlens_tl.passes.target import resolve_target
from tensorlens_tl.registry import frozen_rule, is_of_run
from tensorlens_tl.requirements import check_needs
from tensorlens_tl.results import TARGET, Circuit, EdgeScores, MeasuredEdges, MeasuredTerms, Terms

# ------------------------------------------------------------------ the two prompts and the target

if TYPE_CHECKING:
    Method = Literal[
        "frozen", "frozen+qk", "gradient", "integrated-gradients", "atp*", "difference", "measured", "patching"
    ]
    Nodes = Literal["component", "head", "qkv", "neuron", "stream"]
    Patched = Literal["clean", "corrupted", "both"]
    Points = Literal["midpoint", "left"]
else:
    Method = Nodes = Patched = Points = Any  # `check_choice` says what is wrong with it

METHODS: tuple[Method, ...] = (
    "frozen", "frozen+qk", "gradient", "integrated-gradients", "atp*", "difference", "measured", "patching",
)  # fmt: skip
"""How a node can be scored; edges take all but ``"atp*"``."""

SYNONYMS = {
    "eap": "gradient",
    "eap-ig": "integrated-gradients",
    "ig": "integrated-gradients",
    "attribution-patching": "gradient",
    "atp": "gradient",
    "atp-star": "atp*",
    "atpstar": "atp*",
    "activation-patching": "patching",
    "causal-tracing": "patching",
    "exact": "difference",
    "frozen-qk": "frozen+qk",
}
"""Names of these methods in the literature."""

ONCE_INTEGRATED = {"method": ("method", {"integrated": "integrated-gradients"})}
"""For `tensorlens_tl._arguments.formerly`."""

NEAR = (1.0, 0.9)
"""Where ``"measured"`` takes gradients, as shares of the way from the corrupted to the clean embeddings."""

DEFAULT = "difference"
"""The default method: exact between the two runs, at the cost of a few runs."""

PATCHED: dict[Patched, str] = {
    "clean": "clean − patched",
    "corrupted": "patched − corrupted",
    "both": "mean of clean − patched and patched − corrupted",
}
"""The run that is patched, with the difference that a score then is."""

POINTS: dict[Points, float] = {"midpoint": 0.5, "left": 0.0}
"""Where in each of the equal steps a gradient is taken, as a share of the step."""


def gradient_shares(method: str, steps: Whole, points: Points = "midpoint") -> list[float]:
    """Return where a method takes gradients, as shares of the way from the corrupted to the clean embeddings.

    Raises:
        InvalidInputError: no such method or points, or no whole number of steps, 1 or more.
    """
    check_choice("method", method, METHODS, SYNONYMS)
    check_choice("points", points, POINTS)
    steps = whole_count("steps", steps)
    on_the_way = [(step + POINTS[points]) / steps for step in range(steps)]
    if method == "measured":
        return [*NEAR]
    if method in ("gradient", "atp*"):
        return [1.0]
    return on_the_way if method in ("integrated-gradients", "frozen+qk") else []


def ruled_method(method: str | None, rule: Any, clean: PassLike) -> tuple[str, Rule | None]:
    """Return the method, and the rule that its gradients follow.

    Raises:
        InvalidInputError: no such rule, or a method that takes no gradients.
        UnsupportedModelError: the rule does not cover this model.
    """
    if rule is None:
        return method or DEFAULT, None
    follows = is_of_run(rule)
    method = method or ("gradient" if follows else "frozen")
    if not follows and method in ("frozen", "frozen+qk"):
        return method, None
    if method not in ("gradient", "integrated-gradients"):
        raise InvalidInputError(
            f"rule={rule!r}, method={method!r}: a rule says what gradients follow; use it with method='gradient' or "
            "'integrated-gradients', or leave one of the two out."
        )
    chosen = rule_of(rule)
    check_pass(clean)
    check_needs(chosen, clean, f"rule={rule!r}")
    return method, chosen


def check_pair(clean: PassLike, corrupted: PassLike) -> None:
    """Reject two passes that cannot be compared position by position.

    Raises:
        InvalidInputError: no frozen passes, of different models, of different numbers or lengths of prompts, or padded.
        UnsupportedModelError: blocks in a loop, shared keys and values, or a mixture of experts.
        FrozenModelError: the weights were changed since one of the passes.
    """
    for frozen in (clean, corrupted):
        check_pass(frozen)
    if clean.model is not corrupted.model:
        models = " and ".join(frozen.view.description for frozen in (clean, corrupted))
        if clean.view.description == corrupted.view.description:
            models = f"both {clean.view.description} (loaded twice, or copied)"
        raise InvalidInputError(
            f"clean and corrupted are passes of two model objects, {models}; freeze both prompts with "
            "one of them. What two models do differently is the question of tlens.difference(a, b) and "
            "circuits.compare_models."
        )
    clean.view.require_single_streams("comparing two prompts")
    for block in clean.view.blocks:
        if isinstance(block.mlp, ExpertsWeights):
            raise UnsupportedModelError(
                f"{block.name} of this {clean.view.description} is a mixture of experts: two prompts are sent to "
                "different ones, so no node of one prompt stands for a node of the other. Ask about each prompt by "
                "itself, with circuits.total_effects."
            )
    prompts = len(clean.tokens)
    others = len(corrupted.tokens)
    if prompts != others:
        raise InvalidInputError(f"{prompts} clean prompts and {others} corrupted ones; freeze as many, in pairs.")
    for side, length in _lengths(clean).items():
        other = _lengths(corrupted)[side]
        if length != other:
            raise InvalidInputError(
                f"the clean prompts have {length} tokens{side} and the corrupted ones {other}; positions must "
                "match. Replace tokens one for one."
            )
    for name, frozen in (("clean", clean), ("corrupted", corrupted)):
        if not bool(frozen.mask.all()):
            row = int((~frozen.mask).any(1).nonzero()[0])
            raise InvalidInputError(
                f"{name} ",
                PromptNumber(row),
                " is padded; prompts that are compared position by position must have one length. Freeze prompts of "
                "each length by themselves.",
            )
    clean.check_fresh()
    corrupted.check_fresh()


def _lengths(frozen: PassLike) -> dict[str, int]:
    """Return the number of tokens per prompt, by side in an encoder–decoder."""
    if frozen.sides is None:
        return {"": frozen.tokens.shape[1]}
    return dict(zip((" for the encoder", " for the decoder"), frozen.sides, strict=True))


def pair_target(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike,
    minus: TokenLike,
    direction: Direction,
    query: Query,
    rule: FrozenRule = "frozen",
) -> StreamTarget:
    """Return the target of the clean prompt, after `check_pair`; `stream_target` makes further checks."""
    check_pair(clean, corrupted)
    return stream_target(clean, target, minus, direction, query, rule)


def corrupted_stream(readout: StreamTarget, corrupted: PassLike, rule: FrozenRule = "frozen") -> Stream:
    """Return the stream of the corrupted prompt, up to where the target reads it.

    Raises:
        InvalidInputError: hooks add to the stream in one of the two passes only.
    """
    stream = Stream.of(corrupted, rule, final_norm=readout.stream.final_norm, to_tokens=readout.of_tokens)
    of_clean, of_corrupted = ([step.outer_name for step in of.steps] for of in (readout.stream, stream))
    if of_clean != of_corrupted:
        points = ", ".join(sorted({*of_clean} ^ {*of_corrupted}))
        raise InvalidInputError(
            f"hooks add to the stream in one of the two passes only ({points}), so that no step of one stands for a "
            "step of the other. Use method='difference', which has what they add as a source, or freeze both passes "
            "with the same hooks."
        )
    return stream


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Two prompts, the clean one's target, and a method: the common input of node and edge scores.

    Attributes:
        clean, corrupted: the passes.
        method: one of `METHODS`.
        rule: the rule that gradients follow; None for the model's own.
        shares: where gradients are taken on the way from the corrupted to the clean embeddings.
        frozen_rule: the rule of the frozen methods.
        readout: the target; under ``"difference"``, its change along the stream of the exact difference.
        numbers: the target in the clean and in the corrupted run, before any final soft cap.
        finder: under ``"measured"``, the comparison that finds what is large.
    """

    clean: FrozenPass
    corrupted: FrozenPass
    method: str
    rule: Rule | None
    shares: list[float]
    frozen_rule: FrozenRule
    readout: StreamTarget
    numbers: tuple[Float[Tensor, "batch query"], Float[Tensor, "batch query"]]
    finder: "_Comparison | None" = None

    @classmethod
    def of(
        cls, clean: PassLike, corrupted: PassLike, target: TokenLike, minus: TokenLike, *, direction: Direction,
        query: Query, method: str | None, rule: RuleLike, steps: Whole, points: Points,
    ) -> "_Comparison":  # fmt: skip
        """Check the arguments of `patch_scores` and `edge_scores` and build the comparison.

        Either run may have been patched by hooks: ``"difference"`` then explains the difference of the two, and
        neither of them on its own.
        """
        held = frozen_rule(rule)
        method, chosen = ruled_method(method, rule, clean)
        shares = gradient_shares(method, steps, points)
        if method == "difference":
            check_pair(clean, corrupted)
            readout = stream_target(difference(clean, corrupted), target, minus, direction, query, "frozen")
            resolved = resolve_target(clean, target, minus, direction, readout.positions)
            first, second = (readout.number_of(run.activation) + resolved.constant for run in (clean, corrupted))
            readout = replace(readout, label=readout.name)  # what other methods call the same number
        else:
            readout = pair_target(clean, corrupted, target, minus, direction, query, held)
            first, second = readout.total, readout.number_of(corrupted.activation)
        finder = None
        if method == "measured":
            finder = cls.of(
                clean, corrupted, target, minus, direction=direction, query=query,
                method="difference", rule=None, steps=steps, points=points,
            )  # fmt: skip
        return cls(clean, corrupted, method, chosen, shares, held, readout, (first, second), finder)

    def ends(self, patched: Patched) -> list[tuple["_Comparison", int]]:
        """Return a comparison for each run that is patched, with the sign by which its losses count.

        The exact difference is the same from either end.
        """
        if patched == "clean" or self.method == "difference":
            return [(self, 1)]
        stream = corrupted_stream(self.readout, self.corrupted, self.frozen_rule)
        readout = replace(self.readout, stream=stream, total=self.numbers[1])
        numbers = self.numbers[::-1]
        swapped = replace(self, clean=self.corrupted, corrupted=self.clean, readout=readout, numbers=numbers)
        return [(swapped, -1)] if patched == "corrupted" else [(self, 1), (swapped, -1)]

    @property
    def changes(self) -> Stream:
        """The stream, with the differences between the two runs as its values, in the form that pulls multiply."""
        stream = self.readout.stream
        if self.method == "difference":
            return stream
        other = corrupted_stream(self.readout, self.corrupted, self.frozen_rule)
        x = [first - second for first, second in zip(stream.x, other.x, strict=True)]
        hidden = [
            tuple(first - second for first, second in zip(*pair, strict=True))
            for pair in zip(stream.hidden, other.hidden, strict=True)
        ]
        return replace(stream, values=(x, hidden))

    def live_targets(self) -> Iterator[tuple[StreamTarget, Pulled]]:
        """Yield the live model's target, cut at its nodes, and its pull, wherever gradients are taken.

        Raises:
            FrozenModelError: a frozen pass is attached, or hooks were put on the model or taken off since a pass.
        """
        refuse_hooks(self.clean, self.corrupted)
        for share, start in zip(self.shares, self.starts(), strict=True):
            yield ruled_target(self.readout, self.rule, start if share != 1 else None, biases=False)

    def starts(self) -> Iterator[dict[str, Tensor]]:
        """Yield the first block's input wherever a gradient is taken, by hook point."""
        names = self.clean.capture.stream_names(0)
        ends = {name: (self.corrupted.activation(name), self.clean.activation(name)) for name in names}
        for share in self.shares:
            yield {name: torch.lerp(*pair, share) for name, pair in ends.items()}

    @property
    def layout(self) -> "EdgeLayout":
        """Sources, destinations and edges of the comparison."""
        return edge_layout(self.readout.stream, self.readout.positions)

    def live_edges(self) -> LiveEdges:
        """Return the live model with every edge separate."""
        return LiveEdges(self.readout, corrupted_stream(self.readout, self.corrupted), self.layout.exists)


# ------------------------------------------------------------------ edges


@formerly(ONCE_ACTIVATION | ONCE_INTEGRATED)
@recordable()
@one_question
def edge_scores(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    method: Method | None = None,
    rule: RuleLike = None,
    positions: bool = False,
    query: Query = -1,
    direction: Direction = None,
    steps: Whole = 5,
    points: Points = "midpoint",
    patched: Patched = "clean",
    live: int | float | str | None = None,
    seed: Seed = 0,
    memory: Memory = None,
) -> EdgeScores:
    """Compute what the target loses when each edge carries its corrupted value.

    Args:
        clean, corrupted, target, minus, direction, query: as in `patch_scores`.
        method: ``"frozen"`` (exact with patterns fixed), ``"frozen+qk"`` (adds the effects of patterns by gradients),
            ``"gradient"`` (attribution patching), ``"integrated-gradients"`` (EAP-IG), ``"difference"`` (exact between
            the two runs), ``"measured"`` (the largest by live runs) or ``"patching"`` (a live run for each edge). None
            selects the same default as in `patch_scores`.
        rule: what gradients follow, as in `patch_scores`.
        positions: also score each edge at each position where its destination reads, in `EdgeScores.by_position`; not
            available with ``"measured"`` and ``"patching"``.
        steps, points, patched, live, seed, memory: as in `patch_scores`.

    Returns:
        Scores; under ``"measured"`` also `measured`, which scores were measured, and `rest()`, the error of the others.

    Raises:
        InvalidInputError: no such method, rule, points or run to patch, and what `patch_scores` rejects.
        UnsupportedModelError: blocks in a loop, shared keys and values, a mixture of experts; under ``"difference"``
            and ``"measured"`` what `difference` rejects; along gradients a part that cannot be cut out of a run, and
            under ``"frozen+qk"`` attention whose queries and keys no hook points expose; under ``"measured"`` and
            ``"patching"`` blocks that cannot be written as a sum of their parts' outputs (see
            `tensorlens_tl.circuits.live_edges`).
        FrozenModelError: the weights changed since a pass; and except under ``"frozen"`` and ``"difference"``, which
            describe the passes alone, hooks were added or removed since, or a frozen pass is attached to the model.

    >>> corrupted = tlens.freeze(model, "Return the name. Return the")
    >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
    >>> edges.scores.shape  # prompt source destination
    torch.Size([1, 21, 53])
    """
    if method == "atp*":
        raise InvalidInputError(
            "method='atp*' scores nodes (patch_scores); for edges use another, such as 'integrated-gradients'."
        )
    if positions and method in ("measured", "patching"):
        raise InvalidInputError("positions: patching measures whole edges; use another method, or leave it out.")
    check_choice("patched", patched, PATCHED)
    seed, budget = whole_seed(seed, least=0), budget_of(live, method)
    comparison = _Comparison.of(
        clean, corrupted, target, minus, direction=direction, query=query, method=method,
        rule=rule, steps=steps, points=points,
    )  # fmt: skip
    readout = comparison.readout
    ends = comparison.ends(patched)
    measured = dict[str, Tensor]()
    if comparison.method == "measured":
        layout = comparison.layout
        scores, measured = _measured_edges(comparison, ends, budget, seed, memory)
    else:
        of_ends = [(_edges_of(end, positions, memory), sign) for end, sign in ends]
        layout = of_ends[0][0][0]
        scores = torch.stack([sign * of_end for (_, of_end), sign in of_ends]).mean(0)
    by_position = None
    if positions:
        by_position = scores
        scores = by_position.sum(-1)
    kind: Any = MeasuredEdges if measured else EdgeScores
    return kind(
        sources=layout.sources,
        destinations=layout.destinations,
        scores=scores,
        exists=layout.exists,
        clean=comparison.numbers[0][:, 0],
        corrupted=comparison.numbers[1][:, 0],
        target=readout.label,
        method=comparison.method,
        config=_config(readout),
        by_position=by_position,
        provenance=readout.stream.frozen.provenance(),
        **measured,
    )


def _measured_edges(
    comparison: _Comparison, ends: Sequence[tuple[_Comparison, int]], budget: Budget, seed: int, memory: Memory
) -> tuple[Float[Tensor, "batch source destination"], dict[str, Tensor]]:
    """Patch the largest edges live, estimate the others, and return the further fields of `MeasuredEdges`."""
    sources, destinations, exists = comparison.layout
    first = budget.of(int(exists.sum()), "edges")
    live = [(end.live_edges(), sign) for end, sign in ends]

    def by_edge(layout: EdgeLayout, scores: Float[Tensor, "batch s d"]) -> Float[Tensor, "batch edge"]:
        """Return the scores of the edges that are patched; a difference also has sources for what hooks add."""
        rows, columns = (
            [names.index(name) for name in chosen]
            for names, chosen in ((layout.sources, sources), (layout.destinations, destinations))
        )
        return scores[:, rows][:, :, columns][:, exists]

    assert comparison.finder is not None
    readout, layout = comparison.finder.readout, comparison.finder.layout
    pulled = readout.stream.pull(readout.seed)
    differences = by_edge(layout, _products(comparison.finder.changes, layout, pulled, False))
    by_end = [torch.stack([sign * by_edge(*of_share) for of_share in _live_scores(end, False)]) for end, sign in ends]
    estimates = torch.cat([differences[None], torch.stack(by_end).mean(0)])

    def of_edges(values: Shaped[Tensor, "*rows edge"]) -> Shaped[Tensor, "*rows source destination"]:
        return values.new_zeros(*values.shape[:-1], *exists.shape).masked_scatter(exists, values)

    def patched(edges: Bool[Tensor, "run batch edge"]) -> Float[Tensor, "run batch"]:
        return torch.stack([sign * of_end.losses(of_edges(edges), memory) for of_end, sign in live]).mean(0)

    result = measure(estimates, patched, first, budget.error, seed)
    fields = {"measured": of_edges(result.measured), "draws": result.draws, "groups": result.groups}
    return of_edges(result.scores), fields


@checked_names
def run_circuits(
    clean: PassLike,
    corrupted: PassLike,
    circuits: Circuits,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Direction = None,
    memory: Memory = None,
) -> Float[Tensor, "circuit batch"]:
    """Run the live model with only a circuit's edges clean and all others corrupted, and return the target's value.

    Every destination reads the sum of its sources' outputs over its edges: within the circuit, their outputs in this
    same run; outside it, their outputs for the corrupted prompt. All edges give the clean value, none the corrupted.

    Args:
        clean, corrupted, target, minus, direction, query: as in `patch_scores`.
        circuits: one circuit of this model or a list of them, which run together.
        memory: how much the run may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no circuit, one of another model, or, in an encoder–decoder, one whose target reads in the
            other stack; and what `patch_scores` rejects.
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
    return LiveEdges(readout, corrupted_stream(readout, corrupted), layout.exists).numbers(clean_edges, memory)


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
    """Return the edges of a stream, from everything written before a step to everything that its sublayers read.

    In a difference, what hooks added to only one of the runs is a source as well, and a gate after heads a destination.
    In an encoder–decoder, edges stay within one stack, except those into keys and values of cross-attention, which read
    only the outputs of the encoder's nodes. The target has edges from every stack in which it reads for some prompt; a
    prompt whose target reads in the other stack scores zero there.

    Args:
        stream: the stream of a pass, or of the difference of two.
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
    destinations[TARGET] = BOTH
    if queries is not None:
        encoder = queries < stream.frozen.maps.capture.prompt.encoder_length
        destinations[TARGET] = bool(encoder.any()), bool((~encoder).any())
    known.append(len(sources))
    device = stream.frozen.resid_pre(0).device
    before = torch.arange(len(sources), device=device)[:, None] < torch.tensor(known, device=device)
    together = torch.tensor(written, device=device)[:, None] & torch.tensor([*destinations.values()], device=device)
    return EdgeLayout(sources, [*destinations], before & together.any(-1))


def added_by_hooks(stream: Stream, step: Step) -> Float[Tensor, "1 #batch #pos d_model"] | None:
    """Return what hooks added at a step to one run of a difference beyond the other; None at any other step."""
    if isinstance(stream.frozen, Difference) and isinstance(step.outer, Offset):
        return step.outer.vectors[None]
    return None


def read_names(sublayer: Sublayer, letter: str = "") -> list[str]:
    """Return a sublayer's destinations; a head's are named by the letter of what it reads, or by another letter."""
    if not sublayer.letter:
        return list(sublayer.nodes)
    return [f"{node}.{letter or sublayer.letter}" for node in sublayer.nodes]


def _edges_of(
    comparison: _Comparison, positions: bool, memory: Memory
) -> tuple[EdgeLayout, Float[Tensor, "batch source destination *pos"]]:
    """Score edges in the run that is patched, by any method but ``"measured"``."""
    readout, layout = comparison.readout, comparison.layout
    if comparison.method == "patching":
        return layout, comparison.live_edges().patched(memory)
    if comparison.method == "frozen+qk":
        changes = comparison.changes  # refuses two passes that hooks tell apart, before the live model is run
        responses = _pattern_responses(comparison, by_node=True)
        pulled = _pull_with_patterns(readout, responses)
        return layout, _products(changes, layout, pulled, positions, responses)
    if comparison.shares:
        of_shares = [*_live_scores(comparison, positions)]
        return of_shares[0][0], torch.stack([scores for _, scores in of_shares]).mean(0)
    return layout, _products(comparison.changes, layout, readout.stream.pull(readout.seed), positions)


def _live_scores(
    comparison: _Comparison, positions: bool
) -> Iterator[tuple[EdgeLayout, Float[Tensor, "batch source destination *pos"]]]:
    """Yield edge scores along gradients of the live model, for each share of the way, over that run's own parts."""
    entering = comparison.clean.resid_pre(0) - comparison.corrupted.resid_pre(0)
    differences = dict[str, Tensor]()
    for one, pulled in comparison.live_targets():
        differences = differences or _live_differences(one.stream, comparison.corrupted)
        hidden = [  # what heads give changes as a whole, by their values
            tuple(differences[part.point] * (part.kind not in ("query", "key")) for part in step.sublayers)
            for step in one.stream.steps
        ]
        changes = replace(one.stream, values=([entering], hidden))
        layout = edge_layout(one.stream, one.positions)
        yield layout, _products(changes, layout, pulled, positions)


def _live_differences(stream: Stream, corrupted: FrozenPass) -> dict[str, Float[Tensor, "batch pos _width"]]:
    """Return the differences between two live runs, by the points of a ruled stream."""
    clean, (batch, length) = stream.run, stream.run.tokens.shape
    points = list(dict.fromkeys(part.point for step in stream.steps for part in step.sublayers))
    seen, other = (
        capture(run.model, run.inputs, points, last=clean.points.last_output)[0] for run in (clean, corrupted)
    )
    differences = dict[str, Tensor]()
    for point in points:
        start, stop, _ = clean.capture.span(point).indices(length)
        differences[point] = widened((seen[point] - other[point]).reshape(batch, stop - start, -1), start, length)
    return differences


Responses = dict[int, dict[tuple[str, ...], Float[Tensor, "node batch pos d_model"]]]
"""Gradients of the target at the inputs of queries and keys, by the step before which these read and by their names."""


def _pattern_responses(comparison: _Comparison, *, by_node: bool) -> Responses:
    """Return what ``"frozen+qk"`` adds to a frozen pull: mean gradients at what queries and keys read, each or summed.

    Raises:
        UnsupportedModelError: the live model does not expose the inputs of some attention's queries and keys.
    """
    stream, responses = comparison.readout.stream, Responses()
    for one, pulled in comparison.live_targets():
        for number, (step, held) in enumerate(zip(one.stream.steps, stream.steps, strict=False)):
            shown = {node for part in step.sublayers if part.kind == "query" for node in part.nodes}
            for part in held.sublayers:
                if part.kind in ("head", "mixer") and not shown.issuperset(part.nodes):
                    raise UnsupportedModelError(
                        f"method='frozen+qk': no hook points show what queries and keys of {part.name} of this "
                        f"{stream.frozen.view.description} read. Use one of the other methods."
                    )
            for part in step.sublayers:
                if part.kind not in ("query", "key"):
                    continue
                at, cotangent = number, part.write.pull(pulled.sums[number]) / len(comparison.shares)
                reads = part.pull_each(part.split(cotangent))[:, 0] if by_node else part.read.pull(cotangent)
                if part.is_cross and part.kind == "key":
                    at = encoder_end(stream)
                    if not one.stream.steps[at].sublayers:  # through the norm there, which belongs to what they read
                        reads = one.stream.steps[at].outer.pull(reads)
                of_step, names = responses.setdefault(at, {}), tuple(read_names(part))
                of_step[names] = of_step[names] + reads if names in of_step else reads
    return responses


def _pull_with_patterns(readout: StreamTarget, responses: Responses) -> Pulled:
    """Pull the target through the frozen model, adding gradients of the live one where queries and keys are read.

    The pull then also follows effects through patterns, to the order of the gradients.
    """
    joining = {number: torch.cat([*of_step.values()]).sum(0) for number, of_step in responses.items()}
    return readout.stream.pull(readout.seed, joining=joining)


def edge_products(
    written: Float[Tensor, "source batch pos d"], cotangents: Float[Tensor, "destination batch pos d"], positions: bool
) -> Float[Tensor, "batch source destination *pos"]:
    """Dot every source's output with a vector at every destination, by position or summed over positions."""
    if positions:
        return torch.einsum("sbpd,tbpd->bstp", upcast(written), upcast(cotangents))
    sources, destinations = (upcast(vectors).transpose(0, 1).flatten(2) for vectors in (written, cotangents))
    return sources @ destinations.mT  # as matrices, which einsum would copy first


def _products(
    changes: Stream, layout: EdgeLayout, pulled: Pulled, positions: bool, responses: Responses | None = None
) -> Float[Tensor, "batch source destination *pos"]:
    """Carry the change of each source's output past the sublayers to every destination, and dot it with the target.

    For destinations that are not among the stream's steps, the vector to dot with comes from `responses`.
    """
    steps, entering = changes.steps, changes.x[0]
    batch, pos = entering.shape[:2]
    shape = [batch, *layout.exists.shape]
    if positions:
        shape.append(pos)
    scores = upcast(entering).new_zeros(shape)
    columns = {name: number for number, name in enumerate(layout.destinations)}
    carried = entering.new_zeros(len(layout.sources), *entering.shape)
    carried[0] = entering
    known = 1
    writes = [bool(step.sublayers) or added_by_hooks(changes, step) is not None for step in steps]
    last = max((number for number, step_writes in enumerate(writes) if step_writes), default=-1)
    for number, step in enumerate(steps[: last + 1]):
        before = carried[:known]
        for names, reads in (responses or {}).get(number, {}).items():
            scores[:, :known, [columns[name] for name in names]] = edge_products(before, reads, positions)
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
        added = added_by_hooks(changes, step)
        if added is not None:
            carried[known] = added[0]
            known += 1
    # steps after the last that writes take every source alike: the target is pulled through them instead
    scores[:, :, -1:] = edge_products(carried, pulled.stream[last + 1], positions)
    return scores


def _config(readout: StreamTarget) -> dict[str, Any]:
    """Return what the benchmark's files record about a model."""
    frozen = readout.stream.frozen
    heads = [sublayer.heads for step in readout.stream.steps for sublayer in step.sublayers]
    return {
        "n_layers": frozen.n_layers,
        "n_heads": max(heads, default=0),
        "d_model": readout.vectors.shape[-1],
        "parallel_attn_mlp": any(layout.parallel for layout in frozen.layouts),
    }


# ------------------------------------------------------------------ nodes

BY: tuple[Nodes, ...] = ("component", "head", "qkv", "neuron", "stream")

NODES = "nodes besides the input"


@formerly(ONCE_ACTIVATION | ONCE_INTEGRATED)
@recordable()
@one_question
def patch_scores(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: Nodes = "head",
    method: Method | None = None,
    rule: RuleLike = None,
    positions: bool = False,
    query: Query = -1,
    direction: Direction = None,
    steps: Whole = 5,
    points: Points = "midpoint",
    patched: Patched = "clean",
    live: int | float | str | None = None,
    seed: Seed = 0,
    memory: Memory = None,
) -> Terms:
    """Compute what the target loses when each node's clean value is replaced by its corrupted one.

    Nodes are the first block's input (``"embed"``; in an encoder–decoder, the input of both stacks) and, by `by`,

    * ``"component"``: each layer's attention and MLP, and cross-attention (``"L2.cross"``);
    * ``"head"``: heads one by one (``"L0H1"``, ``"L2.cross.H1"``), MLPs whole;
    * ``"qkv"``: the same, plus each head's query, key and value (``"L0H1.q"``), under ``"atp*"`` and
      ``"patching"``;
    * ``"neuron"``: heads and neurons one by one (``"MLP1.N7"``);
    * ``"stream"``: the residual stream before each block, ``"L1.stream"``; in an encoder–decoder, the stream of
      the block's own stack.

    Args:
        clean, corrupted: passes of prompts of the same length, by one model, each clean prompt with its corrupted
            one; in an encoder–decoder, each side has the same length in both.
        target, minus, direction: as in `FrozenOperator.target`, of the clean prompt.
        by: what a node is.
        method: ``"frozen"`` (exact with patterns fixed), ``"frozen+qk"`` (adds the effects of patterns by gradients),
            ``"gradient"`` (attribution patching), ``"integrated-gradients"`` (EAP-IG), ``"atp*"`` (AtP*: a gradient
            without each layer), ``"difference"`` (exact between the two runs), ``"measured"`` (the largest by live
            runs) or ``"patching"`` (a live run for each node). None selects ``"difference"``, or with a rule of
            gradients ``"gradient"``, or with a rule of the frozen model ``"frozen"``.
        rule: for the frozen methods, a rule of the frozen model; for ``"gradient"`` and ``"integrated-gradients"``, the
            rule that replaces the model's own gradients: one of ``tlens.list_rules()``, or a `Rule`.
        positions: also score each node at each position, in `Terms.keys`, `[batch, query, node, pos]`. They sum to the
            node's score, except under ``"atp*"``, ``"measured"`` and ``"patching"``, where each is a separate node.
            In an encoder–decoder they are zero at the positions of the other side.
        query: one position of each prompt, the last by default.
        steps: how many gradients ``"integrated-gradients"`` and ``"frozen+qk"`` average, one in each of as many steps.
        points: where in its step a gradient is taken: at the ``"midpoint"``, or at the ``"left"`` end, k/steps for k
            from 0, which includes the corrupted embeddings but not the clean ones, as in the published code of
            EAP-IG and of the Mechanistic Interpretability Benchmark.
        patched: the run whose nodes get the other run's values: the ``"clean"`` one (noising: what is needed), the
            ``"corrupted"`` one (denoising: what suffices; a score is what the target gains), or ``"both"``, the mean of
            the two, at twice the runs. Gradients and frozen pulls are taken in that run; ``"difference"`` is the same
            in both directions, as is ``"integrated-gradients"`` with midpoints.
        live: for ``"measured"``, how many of the largest nodes to patch for each prompt: a number (10 by default), or
            a share of all (0.1). Or the largest acceptable error of the others, ``"error<5%"`` of the sum of all
            absolute scores: nodes are then patched until the upper end of the error's interval is below that. Half as
            many others, drawn at random, are patched singly, the rest in as many groups, and also the whole input.
        seed: for ``"measured"``, the seed of draws and groups.
        memory: how much the runs of ``"measured"`` and ``"patching"`` may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: an effect that passes through two nodes counts for both. `Terms.total` is the
            target in the run that is patched; under ``"both"`` and ``"difference"`` it is the clean value minus the
            corrupted one. Under ``"measured"`` the terms have `measured`, which marks the scores of live runs, and
            `rest()`, how far off the others are.

    Raises:
        InvalidInputError: no such `by`, method, rule, points or run to patch, a rule for a method without gradients,
            prompts that cannot be compared (different models, lengths or numbers, or padded), `live` with another
            method or above the number of nodes, and what `logit_attribution` rejects.
        UnsupportedModelError: blocks in a loop, shared keys and values, a mixture of experts, or, except under
            ``"frozen"``, a part that no hook reaches; under ``"measured"`` what `difference` rejects; under
            ``"frozen+qk"`` what `edge_scores` rejects.
        FrozenModelError: the weights changed since a pass; and except under ``"frozen"``, which describes the passes
            alone, hooks added or removed since that change what the model does (under ``"frozen+qk"`` any), or a
            frozen pass is attached to it.

    >>> corrupted = tlens.freeze(model, "Return the name. Return the")
    >>> scores = tlens.circuits.patch_scores(frozen, corrupted, " value", " name", by="component")
    >>> scores.scores.shape[-1] == len(scores.names)
    True
    """
    check_choice("by", by, BY)
    if by == "qkv" and (method not in ("atp*", "patching") or positions):
        raise InvalidInputError(
            f"by='qkv', method={method!r}, positions={positions}: queries, keys and values are nodes of method='atp*' "
            "and 'patching', each at all positions together; use one of these, or by='head'."
        )
    check_choice("patched", patched, PATCHED)
    seed, budget = whole_seed(seed, least=0), budget_of(live, method)
    comparison = _Comparison.of(
        clean, corrupted, target, minus, direction=direction, query=query, method=method,
        rule=rule, steps=steps, points=points,
    )  # fmt: skip
    ends = comparison.ends(patched)
    if comparison.method == "measured":
        return _measured_nodes(comparison, ends, by, positions, budget, seed, memory, _fields(comparison, patched))
    of_ends = [(_nodes_of(end, by, positions, memory), sign) for end, sign in ends]
    names = of_ends[0][0][0]
    scores = torch.stack([sign * of_end for (_, of_end, _), sign in of_ends]).mean(0)
    keys = None
    if positions:
        keys = torch.stack([sign * of_end for (_, _, of_end), sign in of_ends if of_end is not None]).mean(0)
    return Terms(names=names, scores=scores, keys=keys, **_fields(comparison, patched))


@one_question
def patched_at(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    nodes: Sequence[str],
    query: Query = -1,
    memory: Memory = None,
) -> Terms:
    """Patch single nodes at single positions with their corrupted values, one live run each, and return the losses.

    Args:
        clean, corrupted, target, minus, query, memory: as in `patch_scores`.
        nodes: such as ``["L1H0@3", "MLP2@-1", "embed@0"]``; -1 is the last position.

    Raises:
        InvalidInputError: no such node, or no such position; and what `patch_scores` rejects for ``"patching"``.
        UnsupportedModelError: a part of the model that no hook reaches.

    >>> from tensorlens_tl.circuits.compare import patched_at
    >>> corrupted = tlens.freeze(model, text.replace("red", "blue"))
    >>> patched_at(frozen, corrupted, " value", nodes=["L1H0@-1", "MLP2@-1"]).names
    ['L1H0@-1', 'MLP2@-1']
    """
    comparison = _Comparison.of(
        clean, corrupted, target, minus, direction=None, query=query, method="patching", rule=None, steps=1,
        points="midpoint",
    )  # fmt: skip
    live, other = _live_nodes(comparison, "head")
    names = [node.name for node in live.nodes]
    length = live.frozen.tokens.shape[1]
    at: dict[str, list[NodeChange]] = {}
    for change, column in zip(*_at_positions(live), strict=True):
        for position in (column % length, column % length - length):
            at.setdefault(f"{names[column // length]}@{position}", []).append(change)
    wrong = next((node for node in nodes if node not in at), None)
    if wrong is not None or not nodes:
        raise InvalidInputError(
            f"nodes: {wrong!r} is no node at a position, such as 'L1H0@3'; this model has {', '.join(names[:3])}, …, "
            f"{names[-1]} at positions 0 to {length - 1}."
        )
    lost = live.live.losses([at[node] for node in nodes], other, memory, "patches")
    return Terms(names=[*nodes], scores=lost, **_fields(comparison, "clean"))


def _fields(comparison: _Comparison, patched: Patched) -> dict[str, Any]:
    """Return a result's fields about its target: the run that is patched, and the compared value."""
    readout, (clean, corrupted) = comparison.readout, comparison.numbers
    totals = {"clean": clean, "corrupted": corrupted, "both": clean - corrupted}
    target, total = f"{readout.label}, {PATCHED[patched]}", totals[patched]
    if comparison.method == "difference":
        target, total = f"change of the {readout.label}, clean − corrupted", clean - corrupted
    return readout.fields() | {"target": f"{target}, by {comparison.method}", "total": total}


def _nodes_of(
    comparison: _Comparison, by: str, positions: bool, memory: Memory
) -> tuple[list[str], Float[Tensor, "batch 1 node"], Float[Tensor, "batch 1 node pos"] | None]:
    """Return node names and what the target loses in the patched run, by every method but ``"measured"``."""
    if comparison.method in ("atp*", "patching"):
        return _of_live_nodes(comparison, by, positions, memory)
    along = _along_gradients if comparison.method in ("gradient", "integrated-gradients") else _along_pull
    names, by_position = along(comparison, by)
    return names, by_position.sum(-1)[:, None], by_position[:, None]


def _along_pull(comparison: _Comparison, by: str) -> tuple[list[str], Float[Tensor, "batch node pos"]]:
    """Dot the difference between the two runs at every node with the target pulled back to it."""
    readout = comparison.readout
    stream = readout.stream
    changes = comparison.changes
    if comparison.shares:
        pulled = _pull_with_patterns(readout, _pattern_responses(comparison, by_node=False))
    else:
        pulled = stream.pull(readout.seed)

    def at_positions(number: int) -> Float[Tensor, "batch 1 pos"]:
        """Dot the streams' difference before a step with the target there."""
        return (upcast(pulled.stream[number][0]) * changes.x[number]).sum(-1)[:, None]

    names = ["embed"]
    scores = [at_positions(0)]
    pos = scores[0].shape[-1]
    previous = -1
    for number, step in enumerate(stream.steps):
        if by == "stream":
            if step.layer not in (-1, previous):
                start, stop = stream.frozen.maps.capture.side(step.layer)
                names.append(f"L{step.layer}.stream")
                of_side = at_positions(number)[..., start:stop]
                scores.append(widened(of_side[..., None], start, pos)[..., 0])  # zero at the other side's positions
            previous = step.layer
            continue
        for _, nodes, by_position in changes.terms(number, pulled, by):
            names += nodes
            scores.append(by_position[0])
        added = added_by_hooks(stream, step)
        if added is not None:
            names.append(step.outer_name)
            scores.append((upcast(pulled.stream[number + 1][0]) * added[0]).sum(-1)[:, None])
    return summed_by_name(names, torch.cat(scores, dim=1), 1)


def _of_live_nodes(
    comparison: _Comparison, by: str, positions: bool, memory: Memory
) -> tuple[list[str], Float[Tensor, "batch 1 node"], Float[Tensor, "batch 1 node pos"] | None]:
    """Return names and scores of nodes by patching, or by AtP*'s estimate of it; with scores by position."""
    nodes, other = _live_nodes(comparison, by)
    replaced = {"": other}
    if by == "qkv":
        replaced |= atp_star.attended(nodes, other, comparison.corrupted)
    heads = atp_star.head_nodes(nodes)
    groups = {suffix: heads if suffix else nodes.nodes for suffix in replaced}  # queries, keys and values are of heads
    names = [node.name + suffix for suffix, of_suffix in groups.items() for node in of_suffix]
    if comparison.method == "patching":
        lost = [
            nodes.live.losses([[node] for node in groups[suffix]], values, memory, "patches")
            for suffix, values in replaced.items()
        ]
        return names, torch.cat(lost, -1), _patched_at_positions(nodes, other, memory) if positions else None
    (start,) = comparison.starts()
    every = atp_star.dropped_scores(nodes, [*replaced.values()], start)
    rows = [[nodes.nodes.index(node) for node in of_suffix] for of_suffix in groups.values()]
    scores = torch.cat([of_suffix[:, row] for of_suffix, row in zip(every, rows, strict=True)], 1)[:, None]
    return names, scores[..., -1], scores[..., :-1] if positions else None


def _along_gradients(comparison: _Comparison, by: str) -> tuple[list[str], Float[Tensor, "batch node pos"]]:
    """Return (a_clean − a_corrupted) · mean gradient on the way from the corrupted to the clean embeddings."""
    nodes, other = _live_nodes(comparison, by)
    of_shares = [*_gradient_products(comparison, nodes, other)]
    return [node.name for node in nodes.nodes], torch.stack(of_shares).mean(0)


def _gradient_products(
    comparison: _Comparison, nodes: NodeGradients, other: NodeValues
) -> Iterator[Float[Tensor, "batch node pos"]]:
    """Yield the products of `_along_gradients`, for each share of the way."""
    changes = {point: nodes.values[point] - other[point] for point in nodes.points}
    for start in comparison.starts():
        yield nodes.products(changes, {point: gradient[0] for point, gradient in nodes.at(start).items()})


def _patched_at_positions(
    nodes: NodeGradients, other: NodeValues, memory: Memory
) -> Float[Tensor, "batch query node pos"]:
    """Return what the target loses with each node patched at one position at a time."""
    changes, columns = _at_positions(nodes)
    lost = nodes.live.losses([[change] for change in changes], other, memory, "patches")
    return _in_columns(nodes, lost, columns)


def _at_positions(nodes: NodeGradients) -> tuple[list[NodeChange], list[int]]:
    """Return each node changed at one position, with its index among all (node, position) pairs."""
    changes: list[NodeChange] = []
    columns: list[int] = []
    pos = nodes.frozen.tokens.shape[1]
    for number, node in enumerate(nodes.nodes):
        for point in node.points:
            for place, position in enumerate(nodes.positions(point)):
                changes.append(node._replace(points=(point,), position=place))
                columns.append(number * pos + position)
    return changes, columns


def _in_columns(
    nodes: NodeGradients, values: Shaped[Tensor, "*rows change"], columns: Sequence[int]
) -> Shaped[Tensor, "*rows node pos"]:
    """Arrange values by node and position, with zeros where a node has none."""
    pos = nodes.frozen.tokens.shape[1]
    every = values.new_zeros(*values.shape[:-1], len(nodes.nodes) * pos)
    every[..., columns] = values
    return every.unflatten(-1, (-1, pos))


def _measured_nodes(
    comparison: _Comparison, ends: Sequence[tuple[_Comparison, int]], by: str, positions: bool, budget: Budget,
    seed: int, memory: Memory, of_target: Mapping[str, Any],
) -> MeasuredTerms:  # fmt: skip
    """Patch the largest nodes live and estimate the others; also at each position, where requested."""
    at_ends = [(end, *_live_nodes(end, by, budget), sign) for end, sign in ends]
    nodes = at_ends[0][1]
    assert comparison.finder is not None
    of_finder, differences = _along_pull(comparison.finder, by)
    names = [node.name for node in nodes.nodes]
    differences = differences[:, [of_finder.index(name) for name in names]]
    by_end = [
        torch.stack([sign * of_share for of_share in _gradient_products(end, of_end, other)])
        for end, of_end, other, sign in at_ends
    ]
    gradients = torch.stack(by_end).mean(0)
    estimates = torch.cat([differences[None], gradients.to(differences)])

    def measured(estimates: Tensor, changes: Sequence[NodeChange], first: int) -> Measurement:
        def patched(parts: Bool[Tensor, "run batch part"]) -> Float[Tensor, "run batch"]:
            runs: list[list[NodeChange]] = [[] for _ in parts]
            for run, prompt, part in parts.nonzero().tolist():
                runs[run].append(changes[part]._replace(prompt=prompt))
            losses = [sign * of_end.live.losses(runs, other, memory, "patches") for _, of_end, other, sign in at_ends]
            return torch.stack(losses).mean(0)[:, 0].T

        return measure(estimates, patched, first, budget.error, seed)

    sums = estimates.sum(-1)
    sums[0, :, 0] = torch.inf  # the whole input is measured, and counts for none of the largest
    of_nodes = measured(sums, nodes.nodes, 1 + budget.of(len(names) - 1, NODES))
    fields: dict[str, Any] = {}
    if positions:
        changes, columns = _at_positions(nodes)
        of_keys = measured(estimates.flatten(2)[..., columns], changes, budget.of(len(columns), NODES))
        fields = {
            "keys": _in_columns(nodes, of_keys.scores, columns)[:, None],
            "measured_keys": _in_columns(nodes, of_keys.measured, columns)[:, None],
            "draws_of_keys": of_keys.draws,
            "groups_of_keys": of_keys.groups,
        }
    return MeasuredTerms(
        names=names,
        scores=of_nodes.scores[:, None],
        measured=of_nodes.measured[:, None],
        draws=of_nodes.draws,
        groups=of_nodes.groups,
        **of_target,
        **fields,
    )


def _live_nodes(comparison: _Comparison, by: str, budget: Budget | None = None) -> tuple[NodeGradients, NodeValues]:
    """Return the first block's input and the nodes of every sublayer (or the stream before every block).

    Returns:
        The nodes in the live model with their values for the clean prompt, and their values for the corrupted one.
    """
    readout = comparison.readout
    question = f"patch_scores(method={comparison.method!r})"
    captured = readout.stream.run.capture
    nodes = [NodeChange("embed", tuple(captured.stream_names(0)))]
    if by == "stream":
        for layer in range(captured.n_layers):
            # the stream before a block is what the block before it gives; of an encoder–decoder that of its side
            side = -1 if layer >= captured.view.encoder_layers else 0
            point = captured.stream_names(layer)[side]
            nodes.append(NodeChange(f"L{layer}.stream", (point,), layer=max(layer - 1, 0)))
    else:
        nodes += sublayer_nodes(readout, question, by, "Use method='frozen', which reads weights, or by='stream'.")
    if budget is not None:
        budget.of(len(nodes) - 1, NODES)
    live = NodeGradients(readout, question, nodes, comparison.rule)
    return live, live.values_of(comparison.corrupted)
