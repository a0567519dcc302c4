"""Effects of components on a logit: direct, total, head by head, along paths; and the logit lens.

A component's *direct* effect is what it adds to the logit along the residual stream alone, past every later head and
MLP: the inner product of its output with the target's direction pulled through the final norm (and, in a post-LN
model, through the norms on the way). Direct effects and biases sum exactly to the logit.

Its *total* effect is what the logit loses when the component is removed, with everything downstream included. In the
frozen pass everything later is linear, so one pull gives the total effect of every head and MLP: its hidden vector
dotted with the target pulled through everything later. Patterns, ratios and scales keep their values. In the live model
they respond as well: with ``live=True`` each component is ablated in a separate run, many to a batch. The two differ by
the ablation's effect on patterns, activations and norms; a previous-token head, for example, acts on an induction
head's *pattern*, which only the live model shows.

The *logit lens* is the model's prediction if it stopped before a layer. The residual stream there passes through the
model's own end: the final norm with the scale of *this* stream, a masked language model's prediction head, the
unembedding. Nothing but the stream itself is fixed. The last value is the model's own logit (nostalgebraist,
"interpreting GPT: the logit lens", 2020).

*Paths* come from multiplying out the steps of the stream: choose any nodes (heads, MLPs) in order, and pass through
each of them, with the residual stream in between. The sum over all paths is exactly the frozen model. A path of order 0
is the direct one, order 1 are the full OV circuits of Elhage et al. (2021) and single MLPs, order 2 holds the virtual
heads. Every path starts from what reaches its first node directly: the embeddings, and the biases written before it
(including the node's b_V). With biases assigned this way, the scores of all paths and b_U sum to the logit.

In a difference of two runs, the paths sum to the change of the logit. A head is three nodes then, as a path may enter
it by its values, its queries or its keys: ``"L0H3.v → L1H5.k"`` is the effect of the change of L0H3's values on where
L1H5 attends, through L1H5's keys. Paths start from the difference between the two embeddings.

Paths are followed backwards, from the target to their first node; ``pulled`` is the target's vector at that node's
input.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, formerly, plain, whole_number
from tensorlens_tl.algebra import AffineMap, AnyAttention, Chain, Linear, Norm, Segment
from tensorlens_tl.algebra.memory import WORKING_BYTES, Memory, check_size, in_bytes
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.circuits.arguments import Direction, RuleLike, Whole
from tensorlens_tl.circuits.live import (
    LiveTarget,
    NodeChange,
    NodeGradients,
    bytes_per_copy,
    changed_nodes,
    sublayer_nodes,
)
from tensorlens_tl.circuits.ruled import target_under
from tensorlens_tl.circuits.stream import (
    Stream,
    StreamTarget,
    Sublayer,
    dot,
    normed,
    stream_target,
    summed_by_name,
    token_pairs,
)
from tensorlens_tl.core import Rule, recordable, rule_of
from tensorlens_tl.errors import InvalidInputError, SizeError, UnsupportedModelError
from tensorlens_tl.hooks import capture, states_and_logits
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, LayerRange, Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass, PassLike, PassOrDifference, check_pass, one_question
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.live import error_at, in_one_batch, prove_obedience
from tensorlens_tl.passes.target import chosen_head, resolve_target
from tensorlens_tl.passes.texts import special_positions
from tensorlens_tl.registry import frozen_rule, is_of_run
from tensorlens_tl.requirements import check_needs
from tensorlens_tl.results import Paths, Terms

# ------------------------------------------------------------------ direct effects

if TYPE_CHECKING:
    Parts = Literal["component", "head", "head_token", "neuron"]
    LiveParts = Literal["component", "head"]
else:
    Parts = LiveParts = Any  # `check_choice` says what is wrong with it

BY: tuple[Parts, ...] = ("component", "head", "head_token", "neuron")


@formerly(ONCE_ACTIVATION)
@recordable()
@checked_names
@one_question
def logit_attribution(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: Parts = "head",
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    rule: RuleLike = None,
    memory: Memory = None,
) -> Terms:
    """Compute the direct effect of every component on a logit; direct effects and biases sum to it.

    A head's term includes b_V, as in TransformerLens' ``hook_result``; b_O and b_out are separate terms. In an
    encoder–decoder both stacks have terms, and heads of cross-attention are ``"L2.cross.H0"``. The encoder's output
    reaches a logit through these alone, so its direct effect is zero.

    Args:
        frozen: the pass, or the difference of two, in which every term is a part of the change.
        target, minus, direction: as in `FrozenOperator.target`.
        by: ``"head"`` (embeddings, heads, each layer's MLP, each bias), ``"component"`` (each layer's attention whole),
            ``"head_token"`` (by head, with each head's or mixer's source tokens in `Terms.keys`), or ``"neuron"``
            (also MLPs by neuron).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        layers: consecutive layers. A direction then reads the stream where they end (a probe, or a feature in the
            middle of the model), and everything before them is one term.
        final_norm: False ends before the norm that follows the last layer, for a direction at ``hook_resid_post``.
            True is an error if the layers end earlier; `logit_lens` applies that norm to the stream there.
        rule: what replaces the nonlinear operations on the way, which are norms and a prediction head's activation,
            since direct effects bypass every MLP. One of ``tlens.list_rules()``, or a `Rule`; ``"head_token"`` needs a
            rule of the frozen model.
        memory: how much several queries may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no such `by`, a query out of range, no target, and what `target` rejects.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.

    >>> terms = tlens.circuits.logit_attribution(frozen, " value", by="head")
    >>> bool(torch.isclose(terms.scores.sum(), terms.total, rtol=1e-4))
    True
    """
    check_choice("by", by, BY)
    readout = stream_target(frozen, target, minus, direction, query, frozen_rule(rule), layers, final_norm, one=False)
    if is_of_run(rule) and by == "head_token":
        raise InvalidInputError("logit_attribution(rule=): by='head_token' needs frozen patterns; use by='head'.")
    readout = target_under(readout, rule, "logit_attribution", neurons=by == "neuron")
    return direct_effects(readout, by, memory)


def direct_effects(readout: StreamTarget, by: str, memory: Memory = None) -> Terms:
    """Compute the direct effects on a target of any stream; `by` is one of `BY`."""
    stream = readout.stream
    x = stream.x[0]
    per_row = ((2 * len(stream.steps) + 2) * x.shape[-1] + 2 * stream.widest) * x[..., 0].numel() * x.element_size()
    names: list[str] = []
    scores: list[Tensor] = []
    keys: list[Tensor] = []
    for rows in readout.some_queries(per_row, memory):
        names, effects, by_key = _effects(readout, rows, by)
        scores.append(effects)
        keys += by_key
    shares = None
    if keys:
        shares = torch.cat(keys).transpose(0, 1)
    terms = Terms(
        names=names,
        scores=torch.cat(scores).transpose(0, 1),
        remainder=torch.zeros_like(readout.total),
        keys=shares,
        **readout.fields(),
    )
    return stream.frozen.checked(terms, readout.noise / size_of_sum(terms.scores, torch.zeros_like(readout.total)))


def _effects(readout: StreamTarget, rows: slice, by: str) -> tuple[list[str], Tensor, list[Tensor]]:
    """Return names, effects `[query, batch, term]` and, by head and token, keys `[query, batch, term, key]`."""
    stream = readout.stream
    positions = readout.positions[:, rows]
    pulled = stream.pull(readout.seed_of(rows), sublayers=False)
    names: list[str] = []
    scores: list[Tensor] = []
    keys: list[Tensor] = []

    def add(term_names: list[str], by_position: Tensor, by_source: Tensor | None = None) -> None:
        names.extend(term_names)
        scores.append(by_position.sum(-1))
        if by == "head_token":
            keys.append(by_position if by_source is None else by_source)

    def add_bias(name: str, bias: Tensor, g: Tensor) -> None:
        add([name], (upcast(g) * bias).sum(-1)[:, :, None])

    for name, part in stream.sources().items():
        add_bias(name, part, pulled.stream[0])
    biases = list(pulled.of_biases(stream.steps))
    for number in range(len(stream.steps)):
        for sublayer, nodes, by_position in stream.terms(number, pulled, by):
            moved = None
            if by == "head_token" and sublayer.read.mixes:
                moved = _by_source(sublayer, stream.x[number], sublayer.write.pull(pulled.sums[number]))
            add(nodes, by_position, moved)
        for at, name, bias, g in biases:
            if at == number:
                add_bias(name, bias, g)
    if bool(readout.constant.any()):
        at_query = positions.T[..., None] == torch.arange(stream.x[0].shape[1], device=positions.device)
        add([readout.constant_name], (readout.constant[:, rows].T[..., None] * at_query)[:, :, None])
    merged, values = summed_by_name(names, torch.cat(scores, dim=-1), -1)
    if keys:
        keys = [summed_by_name(names, torch.cat(keys, dim=2), 2)[1]]
    return merged, values, keys


def _by_source(sublayer: Sublayer, x: Tensor, cotangent: Tensor) -> Float[Tensor, "query batch node pos"]:
    """Return what each node moves from each source token, wherever it writes it.

    The bias of a node without a pattern counts at the position of its output.
    """
    if sublayer.is_attention:
        return token_pairs(sublayer, x, cotangent).sum(-2)
    moved: list[Tensor] = []
    for number, part in enumerate(sublayer.split(cotangent).unbind(-2)):
        read = sublayer.read_of(number)
        given = (upcast(read.pull(part)) * x).sum(-1)
        moved.append(given + (upcast(part) * read.bias).sum(-1))
    return torch.stack(moved, dim=2)


# ------------------------------------------------------------------ total effects


@formerly(ONCE_ACTIVATION)
@checked_names
def total_effects(
    frozen: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: LiveParts = "head",
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    live: bool = False,
    rule: RuleLike = None,
    nodes: Iterable[str] | None = None,
    memory: Memory = None,
) -> Terms:
    """Compute what a logit loses when each head or MLP is ablated; the biases b_O and b_out stay.

    Args:
        frozen: the pass.
        target, minus, direction: as in `FrozenOperator.target`.
        by: ``"head"`` (heads one by one, MLPs whole) or ``"component"`` (each layer's attention whole).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        layers: consecutive layers: their components are ablated, and a direction reads the stream where they end.
        final_norm: as in `logit_attribution`.
        live: ablate in the live model, where patterns, activations and norms respond, instead of the frozen one. An
            ablated expert outputs zero for the tokens that are routed to it; the routing of later layers responds.
        rule: the rule of the pull: one of ``tlens.list_rules()``, or a `Rule`. Rules of the frozen model read weights.
            Under any other, an effect is a component's hidden vector dotted with the target's gradient there, in the
            live model.
        nodes: the only components to ablate, by name, such as ``["L1H0", "MLP2"]``; each in its own copy of the
            prompts.
        memory: how much the runs of ``live=True``, or queries of a rule, may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Terms that are not additive: an effect that passes through two components counts for both.

    Raises:
        InvalidInputError: no such `by`, node or rule, a rule of a difference, and what `logit_attribution` rejects.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
            Live effects where the model ignores hooks, or of a part that neither a hook nor a module's call reaches.
        FrozenModelError: ``live=True`` while a frozen pass is attached, or where the live model no longer
            reproduces the pass.

    >>> effects = tlens.circuits.total_effects(frozen, " value")
    >>> effects.additive, effects.scores.shape == (1, 1, len(effects))
    (False, True)
    """
    check_choice("by", by, ("component", "head"))
    if not isinstance(live, bool):
        raise InvalidInputError(f"live={live!r}: pass True (each component is ablated in the live model) or False.")
    if live and isinstance(frozen, Difference):
        raise InvalidInputError(
            "total_effects(live=True): live effects are of a single run. Pass one of this difference's "
            "two passes, or leave live out."
        )
    if rule is not None and (live or isinstance(frozen, Difference)):
        raise InvalidInputError(
            "total_effects(rule=): a rule applies to one run, and ablates nothing in it; leave live out, and pass one "
            "of the passes of a difference."
        )
    readout = stream_target(frozen, target, minus, direction, query, frozen_rule(rule), layers, final_norm, one=False)
    if live or is_of_run(rule):
        chosen = None if live else rule_of(rule)
        names, scores = _in_live_model(readout, by, nodes, memory, chosen)
    else:
        names, scores = _frozen(readout, by, nodes)
    return Terms(names=names, scores=scores, **readout.fields())


def _chosen(names: Sequence[str], nodes: Iterable[str] | None) -> list[int]:
    """Return the indices of the requested nodes; None requests all of them.

    Raises:
        InvalidInputError: no such node.
    """
    if nodes is None:
        return list(range(len(names)))
    chosen = plain(nodes)  # of an array, or a column of a table
    chosen = list(chosen) if isinstance(chosen, Iterable) and not isinstance(chosen, str) else []
    if not chosen or not all(node in names for node in chosen):
        raise InvalidInputError(f"nodes={nodes!r}: name some of {', '.join(names[:6])}, … in a list.")
    return [names.index(node) for node in chosen]


def _frozen(
    readout: StreamTarget, by: str, nodes: Iterable[str] | None
) -> tuple[list[str], Float[Tensor, "batch query term"]]:
    stream = readout.stream
    pulled = stream.pull(readout.seed)
    names: list[str] = []
    scores: list[Tensor] = []
    for number in range(len(stream.steps)):
        for _, of_sublayer, by_position in stream.terms(number, pulled, by):
            names += of_sublayer
            scores.append(by_position.sum(-1))
    chosen = _chosen(names, nodes)
    return [names[number] for number in chosen], torch.cat(scores, dim=-1).transpose(0, 1)[..., chosen]


def _in_live_model(
    readout: StreamTarget, by: str, nodes: Iterable[str] | None, memory: Memory, rule: Rule | None
) -> tuple[list[str], Float[Tensor, "batch query term"]]:
    """Ablate in the live model, or with a rule multiply hidden vectors by the rule's gradients there."""
    question = "total_effects(live=True)" if rule is None else "total_effects(rule=)"
    if rule is not None:
        check_needs(rule, readout.stream.run, question)
    advice = "Leave live and rule out: the frozen model's effects are exact."
    changes = list(sublayer_nodes(readout, question, by, advice))
    changes = [changes[number] for number in _chosen([change.name for change in changes], nodes)]
    names = [change.name for change in changes]
    if rule is None:
        return names, LiveTarget(readout, question).losses([[change] for change in changes], None, memory, "ablations")
    gradients = NodeGradients(readout, question, changes, rule)
    frozen = gradients.frozen
    at_nodes = gradients.at({name: frozen.activation(name) for name in frozen.capture.stream_names(0)}, memory)
    scores = gradients.products(gradients.values, at_nodes).sum(-1)  # over positions
    return names, scores.transpose(0, 1)


ABLATIONS = ("zero", "mean", "other")


def ablated_logits(
    frozen: FrozenPass, nodes: Sequence[str], by: str = "zero", other: FrozenPass | None = None, query: Query = -1
) -> Float[Tensor, "batch query d_vocab"]:
    """Return the live model's logits with several heads and MLPs ablated together, at every position.

    Args:
        frozen: the pass whose prompts are run again.
        nodes: such as ``["L1H0", "MLP2"]``.
        by: what replaces a node's hidden vector: ``"zero"``; ``"mean"``, its mean over the prompt's tokens except
            special ones; or ``"other"``, its value in another pass.
        other: that pass, with as many prompts and tokens; only with ``by="other"``.
        query: positions of the logits.

    Raises:
        InvalidInputError: no such node or ablation, no other pass of the same shape, or an expert to be replaced by
            anything but zero.
        UnsupportedModelError: the model has no logits, ignores hooks, or a node is out of their reach.

    >>> from tensorlens_tl.circuits.effects import ablated_logits
    >>> ablated_logits(frozen, ["L1H0", "L1H2"], by="mean").shape
    torch.Size([1, 1, 2048])
    """
    return Ablation(frozen, query).logits(nodes, by, other)


class Ablation:
    """The live model of a pass, prepared for ablating several choices of heads and MLPs one after the other.

    Args:
        frozen: the pass whose prompts are run again.
        query: positions of the logits.
        also: another pass of the model with as many prompts and tokens. Its prompts share the runs of the first, or run
            separately if a joint run does not reproduce both passes.

    >>> from tensorlens_tl.circuits.effects import Ablation
    >>> ablation = Ablation(frozen)
    >>> [ablation.logits([node]).shape for node in ("L0H1", "MLP1")]
    [torch.Size([1, 1, 2048]), torch.Size([1, 1, 2048])]
    """

    def __init__(self, frozen: FrozenPass, query: Query = -1, also: FrozenPass | None = None) -> None:
        self.frozen = frozen
        self._runs = [frozen] if also is None else [frozen, also]
        self._query = query
        self._readout = stream_target(frozen, None, None, None, query, "frozen", one=False)
        self._nodes = list(sublayer_nodes(self._readout, "ablated_logits", "head", "Name other nodes."))
        self._verified = False
        self._singly: list[Ablation] = []  # one for each pass, if they cannot share a run

    @one_question
    def logits(
        self, nodes: Sequence[str], by: str = "zero", other: FrozenPass | None = None
    ) -> Float[Tensor, "run_and_batch query d_vocab"]:
        """Return the logits without some nodes: the prompts of `frozen`, then those of `also`; see `ablated_logits`.

        The first run also has unchanged copies of the prompts, as its first and last rows: both must reproduce their
        passes. User hooks and custom classes may act on one row only, and a batch may not fit: then these copies, and
        each pass, run separately.
        """
        frozen, runs = self.frozen, self._runs
        check_choice("by", by, ABLATIONS)
        if (other is not None) != (by == "other") or (other is not None and other.tokens.shape != frozen.tokens.shape):
            raise InvalidInputError("ablated_logits: by='other' takes another pass with as many prompts and tokens.")
        changes = [self._nodes[number] for number in _chosen([change.name for change in self._nodes], nodes)]
        if by != "zero" and any(change.expert is not None for change in changes):
            raise InvalidInputError("ablated_logits: an expert has no hidden vector that a hook shows; use by='zero'.")
        if frozen.view.unembedding is None or frozen.points.unembed_in is None:
            raise self._no_logits
        live = frozen.live("ablated_logits")
        live.check_hooks()
        count = len(runs)
        if self._verified and (count == 1 or not live.alone):
            return self._run(runs, range(count), changes, by, other)[1]
        fits = (count + 2) * bytes_per_copy(self._readout) <= in_bytes(None)
        if fits and not live.alone and not self._singly:
            error, logits = self._run([runs[0], *runs, runs[-1]], range(1, count + 1), changes, by, other)
            if error <= live.tolerance:
                self._note_verified()
                return logits
        if count > 1:
            self._singly = self._singly or [Ablation(run, self._query) for run in runs]
            return torch.cat([single.logits(nodes, by, other) for single in self._singly])
        error, _ = self._run(runs, range(0), [], "zero", None)
        live.refuse(error, f"they differ by {error:.1e}")
        self._note_verified()
        return self._run(runs, range(1), changes, by, other)[1]

    @property
    def _no_logits(self) -> UnsupportedModelError:
        return UnsupportedModelError(f"ablated_logits: {self.frozen.view.description} has no logits.")

    def _note_verified(self) -> None:
        # after the comparison with the passes: a hook put on since would look like disobedience
        prove_obedience(self.frozen.maps)
        self._verified = True

    def _run(
        self,
        copies: Sequence[FrozenPass],
        changed: range,
        changes: Sequence[NodeChange],
        by: str,
        other: FrozenPass | None,
    ) -> tuple[float, Float[Tensor, "changed_and_batch query d_vocab"]]:
        """Run copies of the passes' prompts, some of them with changes.

        Returns:
            The largest error of the unchanged copies, relative to their passes, and the logits of the changed ones.
        """
        frozen = self.frozen
        at, batch = frozen.points.unembed_in, len(frozen.tokens)
        assert at is not None
        numbered = [(copy, change) for copy in changed for change in changes]
        values = None if by == "zero" else self._values(copies, changes, by, other)
        positions = frozen.prompt.in_logits(self._readout.positions).repeat(len(copies), 1)
        inputs = in_one_batch([run.inputs for run in copies])
        with changed_nodes(frozen, numbered, len(copies), values) as hooks:
            states, logits = states_and_logits(frozen.model, inputs, at, positions, hooks)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise self._no_logits
        parts = zip(copies, states.chunk(len(copies)), strict=True)
        errors = [error_at(run.capture, at, part) for copy, (run, part) in enumerate(parts) if copy not in changed]
        return max(errors, default=0.0), logits[changed.start * batch : changed.stop * batch]

    def _values(
        self, copies: Sequence[FrozenPass], changes: Sequence[NodeChange], by: str, other: FrozenPass | None
    ) -> dict[str, Float[Tensor, "run_and_batch _some _width"]]:
        """Return what replaces the nodes' values in copies of the prompts, from a run that stops after the last node.

        A mean is that of each copy's own values.
        """
        frozen = self.frozen
        givers = [other or run for run in copies]
        runs = list(dict.fromkeys(givers))
        points = list(dict.fromkeys(point for change in changes for point in change.points))
        blocks = frozen.points.blocks
        after = max(change.layer for change in changes) + 1
        last = blocks[after].resid_pre if after < len(blocks) else self._readout.points[-1]
        inputs = in_one_batch([run.inputs for run in runs])
        shown, _ = capture(runs[0].model, inputs, [*points, last], last=last)
        values: dict[str, Tensor] = {}
        for point in points:
            shape = frozen.tokens[:, frozen.capture.span(point)].shape
            of_runs = shown[point].reshape(len(runs), *shape, -1)
            if by == "mean":
                means = [_mean_of_tokens(run, point, value) for run, value in zip(runs, of_runs, strict=True)]
                of_runs = torch.stack(means)
            values[point] = of_runs[[runs.index(run) for run in givers]].flatten(0, 1)
        return values


def _mean_of_tokens(
    frozen: FrozenPass, point: str, value: Float[Tensor, "batch some width"]
) -> Float[Tensor, "batch some width"]:
    """Replace a hook point's vectors at every position by each prompt's mean over its real tokens."""
    counted = frozen.mask.clone()
    for row, special in zip(counted, special_positions(frozen.view, frozen.prompt) or (), strict=False):
        row[special] = False
    counted = torch.where(counted.any(1, keepdim=True), counted, frozen.mask)
    weights = counted[:, frozen.capture.span(point), None].to(value)
    return ((value * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp_min(1)).expand_as(value)


# ------------------------------------------------------------------ one head on its own


@dataclass(frozen=True, eq=False)
class HeadMap:
    """One head on its own, with its pattern frozen: what it moves from token to token, and the effect of that.

    Attributes:
        layer, head: which head.
        cross: whether it belongs to cross-attention.
        map: the map from the stream before the head to its output (with b_V, without b_O), an `AffineMap`.
        pattern: `[batch, query, key]`; in an encoder–decoder between all positions, the encoder's first.
        vectors: each source token's v_j W_O, `[batch, key, d_model]`, through the linear part of any norm after the
            sublayer, without its denominator.
    """

    frozen: FrozenPass
    layer: int
    head: int
    map: Chain
    pattern: Float[Tensor, "batch query key"]
    vectors: Float[Tensor, "batch key d_model"]
    _scale: Float[Tensor, "batch query 1"]
    _stream: Stream
    _rule: FrozenRule
    cross: bool = False

    def __repr__(self) -> str:
        batch, query, _ = self.pattern.shape
        _, sublayer = self._stream.at(self.layer, cross=self.cross)
        return f"HeadMap({sublayer.nodes[self.head]} of {self.frozen.view.description}, batch={batch}, pos={query})"

    def contributions(self, query: Query = "all") -> Float[Tensor, "batch query key d_model"]:
        """Return ``A_ij v_j W_O``: what source token j contributes to position i through this head.

        Raises:
            InvalidInputError: a query out of range.
            SizeError: the result would be larger than `tensorlens_tl.algebra.memory.MOST_BYTES`.

        >>> tlens.circuits.head_map(frozen, 0, 0).contributions().shape  # batch query key d_model
        torch.Size([1, 7, 7, 128])
        """
        positions = query_positions(self.frozen.prompt, query)
        batch, _, key = self.pattern.shape
        check_size("contributions", (batch, positions.shape[1], key, self.vectors.shape[-1]), self.vectors)
        weights = torch.take_along_dim(self._weights, positions[..., None], dim=1)
        return weights[..., None] * self.vectors[:, None]

    @property
    def _weights(self) -> Float[Tensor, "batch query key"]:
        """The pattern divided by the scale of any norm after the sublayer, between real tokens."""
        mask = self.frozen.mask
        return self.pattern / self._scale * (mask[:, :, None] & mask[:, None])

    @property
    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖A_ij v_j W_O‖ (Kobayashi et al. 2020) for all pairs."""
        return self._weights.abs() * self.vectors.norm(dim=-1)[:, None]

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The head's output to the residual stream, zero at padding."""
        number, _ = self._stream.at(self.layer, cross=self.cross)
        return self.map(self._stream.x[number]) * self.frozen.mask[..., None]

    @cached_property
    def effect(self) -> Float[Tensor, "batch pos d_out"]:
        """The head's total effect: its output pushed through everything later, to the stream that is unembedded.

        With a range of layers, to the end of that range.
        """
        self.frozen.check_fresh()
        number, _ = self._stream.at(self.layer, cross=self.cross)
        x = self._stream.steps[number].outer.push(self.output)
        for step in self._stream.steps[number + 1 :]:
            x = step.map.push(x)
        return x

    def target(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Direction = None,
        direct: bool = False,
    ) -> Float[Tensor, "batch query key"]:
        """Compute what each token pair of this head adds to a logit through everything later, `[batch, query, key]`.

        Args:
            target, minus, direction: as in `FrozenOperator.target`; if the head was taken from a range of layers, a
                direction reads the stream where they end.
            query: the position of the target.
            direct: count only the direct effect along the residual stream, past every later head and MLP.

        Returns:
            Scores whose sum is ⟨output, pulled-back target⟩, the head's total (or direct) effect on the logit.

        >>> tlens.circuits.head_map(frozen, 0, 0).target(" value").shape  # batch query key
        torch.Size([1, 7, 7])
        """
        layers = self._stream.layers
        norm = self._stream.final_norm
        readout = stream_target(self.frozen, target, minus, direction, query, self._rule, layers, norm)
        pulled = readout.stream.pull(readout.seed, sublayers=not direct)
        number, sublayer = readout.stream.at(self.layer, cross=self.cross)
        cotangent = sublayer.write.pull(pulled.sums[number][0])
        return token_pairs(sublayer, readout.stream.x[number], cotangent)[:, self.head]


@formerly(ONCE_ACTIVATION)
@checked_names
def head_map(
    frozen: PassLike,
    layer: Whole,
    head: Whole,
    *,
    cross: bool = False,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    rule: FrozenRule = "frozen",
) -> HeadMap:
    """Return one head of a frozen pass on its own.

    Args:
        frozen: the pass.
        layer, head: which head; with grouped-query attention a query head.
        cross: take a head of an encoder–decoder's cross-attention, ``"L2.cross.H0"``, instead of self-attention.
        layers: consecutive layers that its effect passes, the head's layer among them; None for all.
        final_norm: whether its effect passes the norm after the last layer.
        rule: what replaces the activations of the MLPs that its effect passes.

    Raises:
        InvalidInputError: no such layer or head.

    >>> tlens.circuits.head_map(frozen, 0, 0).pattern.shape
    torch.Size([1, 7, 7])
    """
    check_pass(frozen)
    layer, head = chosen_head(frozen.view, layer, head, cross=cross)
    to_tokens = final_norm is not False and frozen.view.unembedding is not None
    stream = Stream.of(frozen, rule, layers=layers, final_norm=final_norm, to_tokens=to_tokens)
    number, sublayer = stream.at(layer, cross=cross)
    read = sublayer.read_of(head)
    output, *after = sublayer.write.stages
    if isinstance(output, Segment):  # its weights are the same at every position
        output = output.inner
    if not isinstance(output, Linear):
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: a gate or a norm scales the outputs of its heads "
            "by what the receiving token is, so a head has no map of its own. Terms and effects work (by='head')."
        )
    width = output.weight.shape[0] // len(sublayer.nodes)
    linear: list[AffineMap] = [Linear(output.weight[head * width : (head + 1) * width])]
    scale = torch.ones_like(stream.x[0][..., :1])
    unscaled = list(linear)
    for norm in map(_at_all_positions, after):
        linear.append(Norm(norm.scale, norm.gain, None, norm.centre))
        unscaled.append(Norm(torch.ones_like(norm.scale[:1, :1]), norm.gain, None, norm.centre))
        scale = scale * norm.scale.to(scale)
    *before, mix = read.stages
    assert isinstance(mix, AnyAttention)
    vectors = Chain((*before, *unscaled))(stream.x[number])
    alone = Chain((*read.stages, *linear))
    return HeadMap(frozen, layer, head, alone, mix.pattern[:, 0], vectors, scale, stream, rule, cross)


def _at_all_positions(norm: AffineMap) -> Norm:
    """Return a norm after the sublayer; in an encoder–decoder with scale 1 at the other side's positions."""
    if not isinstance(norm, Segment):
        assert isinstance(norm, Norm)
        return norm
    assert isinstance(norm.inner, Norm)
    around = (0, 0, norm.start, norm.length - norm.stop)
    return replace(norm.inner, scale=torch.nn.functional.pad(norm.inner.scale, around, value=1.0))


# ------------------------------------------------------------------ the logit lens


@checked_names
def logit_lens(
    frozen: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    direction: Direction = None,
    query: Query = -1,
) -> Float[Tensor, "batch query depth"]:
    """Compute the logit of a token in the residual stream before every layer, and after the last one.

    Args:
        frozen: the pass.
        target, minus: as in `FrozenOperator.target`; ``"first-choice"`` is the whole model's prediction.
        direction: a vector at the final norm's output instead of a token.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.

    Returns:
        `n_layers + 1` logits before any final soft cap: in the stream before layer 0, 1, …, and at the end, where it
        is the model's own. An encoder–decoder has those of its decoder's layers. They are not parts of a sum;
        `logit_attribution` gives what each component adds to the logit.

    Raises:
        InvalidInputError: no frozen pass, and what `FrozenOperator.target` rejects.
        UnsupportedModelError: several streams, or an end that does not reproduce the model's own number from its last
            stream.

    >>> tlens.circuits.logit_lens(frozen, " value").shape  # batch query depth
    torch.Size([1, 1, 5])
    """
    check_pass(frozen)
    frozen.view.require_single_streams("the logit lens")
    frozen.check_fresh()
    positions = query_positions(frozen.prompt, query)
    resolved = resolve_target(frozen, target, minus, direction, positions)
    real = torch.take_along_dim(frozen.mask, positions, dim=1)
    at = positions[..., None]

    def number(read: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch query"]:
        vectors = upcast(torch.take_along_dim(read, at, dim=1))
        return ((vectors * resolved.vectors).sum(-1) + resolved.constant) * real

    depths = range(frozen.view.encoder_layers, frozen.n_layers + 1)
    lens = torch.stack([number(_end(frozen, layer, resolved.of_tokens)) for layer in depths], dim=-1)
    expected = number(frozen.unembedded() if resolved.of_tokens else frozen.output)
    size = upcast(frozen.output).norm(dim=-1).gather(1, positions) * resolved.vectors.norm(dim=-1) + expected.abs()
    error = float(((lens[..., -1] - expected).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)).max())
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"logit_lens: the end of {frozen.view.description}, as read from its weights, gives another number for the "
            f"last stream than the model (relative error {error:.1e}; are there hooks at its final norm?)."
        )
    return lens


def _end(frozen: FrozenPass, layer: int, to_tokens: bool) -> Float[Tensor, "batch pos d_model"]:
    """Return the unembedding's input (or the final norm's output) if the model stops before a layer."""
    view = frozen.view
    x = upcast(frozen.resid_pre(layer))
    if view.final_norm is not None:
        x = normed(view, view.final_norm, view.final_norm_name, x)
    if not to_tokens:
        return x
    classes, head = view.class_head, view.mlm_head
    if classes is not None:  # one answer for all positions
        x = x[:, : classes.tokens].mean(1, keepdim=True).expand_as(x)
        return x if classes.norm is None else normed(view, classes.norm, "classifier_ln", x)
    if head is None:
        return x
    x = head.activation(Linear(head.W, head.b)(x))
    return x if head.norm is None else normed(view, head.norm, head.scale_name, x)


MOST_PATHS = 100_000
"""The most paths that `paths` lists before it raises an error."""

MOST_ROWS = 64
"""Partial paths that are pulled back at once, memory permitting."""


@dataclass(frozen=True, eq=False)
class _Partial:
    """Paths whose beginning is still open: the target's vector at the input of their first node.

    Attributes:
        pulled: `[path, batch, pos, d_model]`, sorted by `step`, latest first.
        step: the step of each path's first node; the path begins in an earlier step.
        names: each path's nodes, first to last.
    """

    pulled: Float[Tensor, "path batch pos d_model"]
    step: Int[Tensor, "path"]
    names: list[tuple[str, ...]]


@formerly(ONCE_ACTIVATION)
@recordable()
@checked_names
def paths(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    max_order: Whole = 1,
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    rule: RuleLike = None,
) -> Paths:
    """List every path through at most `max_order` heads and MLPs, and sum the longer ones.

    Args:
        frozen: the pass, or the difference of two: then heads are nodes by values, queries and keys (``"L0H3.k"``), and
            the paths sum to the change of the target.
        target, minus, direction, layers, final_norm: as in `logit_attribution`.
        max_order: the most nodes of a listed path; the longer paths are the remainder, summed by one more pull.
        query: one position; see `tensorlens_tl.passes.inputs.query_positions`.
        rule: what replaces the nonlinear operations, as in `contribution_graph`.

    Returns:
        Terms named ``"direct"``, ``"L0H3"``, ``"L0H3 → L1H5"`` and so on, in order of length.

    Raises:
        InvalidInputError: a negative order, several queries, and what `logit_attribution` rejects.
        SizeError: more than `MOST_PATHS` paths.

    >>> paths = tlens.circuits.paths(frozen, " value", max_order=1)
    >>> bool((paths.gap < 1e-4).all())
    True
    """
    max_order = whole_number("max_order", max_order, 0, why="0 is the direct path")
    readout = stream_target(frozen, target, minus, direction, query, frozen_rule(rule), layers, final_norm)
    readout = target_under(readout, rule, "paths")
    stream = readout.stream
    max_order = min(max_order, len(readout.stream.steps))
    ways = [1] + [0] * max_order  # paths of each order: elementary symmetric polynomials of the steps' node counts
    for step in stream.steps:
        nodes = len(step.part_names)
        ways = [ways[0], *(ways[order] + nodes * ways[order - 1] for order in range(1, max_order + 1))]
    count = sum(ways)
    if count > MOST_PATHS:
        raise SizeError(
            f"paths: there are {count:,} paths of at most {max_order} nodes, more than {MOST_PATHS:,}. Lower "
            "max_order, use top_paths(), or raise tensorlens_tl.circuits.effects.MOST_PATHS."
        )
    orders = _by_order(stream, readout.seed, max_order)
    names: list[list[tuple[str, ...]]] = [[()], *([] for _ in range(max_order))]
    scores = [[_direct_path(readout)], *([] for _ in range(max_order))]

    def visit(partial: _Partial, order: int) -> None:
        """Depth first, a few partial paths at a time, so that their vectors never pile up."""
        candidates, _, alone = _candidates(stream, partial)
        if not len(candidates):
            return
        names[order] += _named(stream, partial, candidates)
        scores[order].append(alone)
        if order < max_order:
            for some in candidates.split(_rows_at_once(stream)):
                visit(_extend(stream, partial, some), order + 1)

    if max_order:
        visit(_Partial(readout.seed, torch.tensor([len(stream.steps)]), [()]), 1)
    listed = [path for paths_of_order in names for path in paths_of_order]
    labels = [_label(path) for path in listed]
    if bool(readout.constant.any()):
        labels.append(readout.constant_name)
        scores.append([readout.constant.T])
    paths = Paths(
        names=labels,
        scores=torch.cat([part for parts in scores for part in parts]).T[:, None],
        remainder=orders[:, -1:],
        nodes=tuple(listed),
        orders=orders,
        **readout.fields(),
    )
    return stream.frozen.checked(paths, readout.noise / size_of_sum(paths.scores, orders[:, -1:]))


@formerly(ONCE_ACTIVATION)
@recordable()
@checked_names
@one_question
def top_paths(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    k: Whole = 10,
    width: Whole = 64,
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    rule: RuleLike = None,
) -> Paths:
    """Find the k largest paths of any length by beam search, for one prompt.

    The search goes backwards from the target: a partial path is worth the absolute value of everything that flows
    through it, and the `width` best of each length are extended. The remainder is everything else: the sum of all
    paths, by one more pull, minus the k; so here `gap` measures that pull, not the scores of the k.

    Args:
        frozen: a pass of one prompt, or the difference of two.
        target, minus, query, direction, layers, rule: as in `paths`.
        k: how many paths.
        width: how many partial paths to extend at each length.

    Raises:
        InvalidInputError: k or width below 1, several prompts, and what `paths` rejects.

    >>> paths = tlens.circuits.top_paths(frozen, " value", k=3)
    >>> len(paths.names), bool((paths.gap < 1e-4).all())
    (3, True)
    """
    k = whole_number("k", k, 1)
    width = whole_number("width", width, 1)
    readout = stream_target(frozen, target, minus, direction, query, frozen_rule(rule), layers, final_norm)
    readout = target_under(readout, rule, "top_paths")
    if len(frozen.tokens) != 1:
        raise InvalidInputError(
            f"top_paths: the pass has {len(frozen.tokens)} prompts, each with its own paths; freeze one."
        )
    stream = readout.stream
    names: list[tuple[str, ...]] = [()]
    scores = [_direct_path(readout)[:, 0]]
    # only the k largest of each length: a deep model has a hundred times as many candidates, and naming them is slow
    partial = _Partial(readout.seed, torch.tensor([len(stream.steps)]), [()])
    while partial.names:
        candidates, through, alone = _candidates(stream, partial)
        largest = alone[:, 0].abs().topk(min(k, len(candidates))).indices
        names += _named(stream, partial, candidates[largest.cpu()])
        scores.append(alone[largest, 0])
        best = through[:, 0].abs().topk(min(width, len(candidates))).indices.cpu()
        partial = _extend(stream, partial, candidates[best.sort().values])
    everything = torch.cat(scores)
    order = everything.abs().topk(min(k, len(everything))).indices
    top_scores = everything[order]
    top_names = [names[i] for i in order.tolist()]
    everything_else = _by_order(stream, readout.seed, 0).sum(-1, keepdim=True) + readout.constant - top_scores.sum()
    return Paths(
        names=[*map(_label, top_names)],
        scores=top_scores[None, None],
        remainder=everything_else,
        nodes=tuple(top_names),
        **readout.fields(),
    )


def _direct_path(readout: StreamTarget) -> Float[Tensor, "1 batch"]:
    """Return the direct path's score."""
    return dot(readout.seed, readout.stream.direct[-1])


def _label(path: tuple[str, ...]) -> str:
    return " → ".join(path) or "direct"


def _named(stream: Stream, partial: "_Partial", candidates: Int[Tensor, "path 3"]) -> list[tuple[str, ...]]:
    """Name the nodes of paths that are one longer, first to last."""
    return [(stream.steps[step].part_names[node], *partial.names[row]) for row, step, node in candidates.tolist()]


def _rows_at_once(stream: Stream) -> int:
    """Return how many partial paths fit in the working memory, each with the widest hidden layer."""
    x = stream.x[0]
    per_row = x[..., 0].numel() * (4 * x.shape[-1] + 2 * stream.widest) * x.element_size()
    return max(1, min(MOST_ROWS, WORKING_BYTES // per_row))


def _by_order(stream: Stream, seed: Tensor, max_order: int) -> Float[Tensor, "batch order"]:
    """Return the sum of all paths of each order, and of all longer ones, by one pull with orders as rows."""
    rows = torch.cat([seed, seed.new_zeros(max_order + 1, *seed.shape[1:])])
    sums = upcast(rows[..., 0, 0]) * 0

    def shifted(values: Tensor) -> Tensor:
        """Move row n to n + 1, for one more node; the last row accumulates all longer paths."""
        moved = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        moved[-1] += values[-1]
        return moved

    for step in reversed(stream.steps):
        sums += dot(rows, step.outer.bias)
        rows = step.outer.pull(rows)
        through = torch.zeros_like(rows)
        for sublayer in step.sublayers:
            sums += dot(rows, sublayer.write.bias)
            pulled, bias = sublayer.read.pull_with_bias(sublayer.write.pull(rows))
            through += shifted(pulled)
            sums += shifted(bias)
        rows = rows + through
    return (sums + dot(rows, stream.x[0])).T


def _candidates(stream: Stream, partial: _Partial) -> tuple[Tensor, Tensor, Tensor]:
    """Return every path that is one node longer: ``(row, step, node)``, everything through it, and it alone.

    Shapes `[path, 3]`, `[path, batch]`, `[path, batch]`.
    """
    candidates = []
    through = []
    alone = []
    for number, rows, cotangent in _sweep(stream, partial):
        step = stream.steps[number]
        nodes = 0
        for sublayer, values in zip(step.sublayers, stream.shown[number], strict=True):
            reached = cotangent if len(sublayer.nodes) == 1 else sublayer.write.pull(cotangent)
            shares = torch.einsum(
                "rbpnc,vbpnc->vrnb", upcast(sublayer.split(reached)), upcast(sublayer.split(values))
            ).flatten(1, 2)
            through.append(shares[0])
            alone.append(shares[1])
            node = torch.arange(nodes, nodes + len(sublayer.nodes))
            nodes += len(sublayer.nodes)
            candidates.append(torch.cartesian_prod(rows, torch.tensor([number]), node))
    if not candidates:
        empty = partial.pulled.new_zeros(0, partial.pulled.shape[1])
        return torch.zeros(0, 3, dtype=torch.long), empty, empty
    return torch.cat(candidates), torch.cat(through), torch.cat(alone)


def _extend(stream: Stream, partial: _Partial, chosen: Int[Tensor, "path 3"]) -> _Partial:
    """Extend the chosen paths, pulled back to the input of their new first node."""
    pulled = []
    steps = []
    names = []
    for number, rows, cotangent in _sweep(stream, partial):
        step = stream.steps[number]
        nodes = 0
        for sublayer in step.sublayers:
            for node, name in enumerate(sublayer.part_names):
                parents = chosen[(chosen[:, 1] == number) & (chosen[:, 2] == nodes + node), 0]
                parents = parents[torch.isin(parents, rows)]
                if not len(parents):
                    continue
                hidden = sublayer.split(sublayer.write.pull(cotangent[parents - rows[0]]))[..., node, :]
                pulled.append(sublayer.read_of(node).pull(hidden))
                steps += [number] * len(parents)
                names += [(name, *partial.names[row]) for row in parents.tolist()]
            nodes += len(sublayer.nodes)
    if not pulled:
        return _Partial(partial.pulled[:0], torch.zeros(0, dtype=torch.long), [])
    order = torch.tensor(steps).argsort(descending=True, stable=True)
    return _Partial(torch.cat(pulled)[order], torch.tensor(steps)[order], [names[i] for i in order.tolist()])


def _sweep(stream: Stream, partial: _Partial) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Move partial paths down the stream, some at a time: at each step, the rows that reach it and their vectors there.

    Yields ``(step, rows, cotangent)``; the last is `[row, batch, pos, d_model]` at the sum that sublayers write to.
    """
    at_once = _rows_at_once(stream)
    for start in range(0, len(partial.names), at_once):
        rows = torch.arange(start, min(start + at_once, len(partial.names)))
        steps = partial.step[rows]
        pulled = partial.pulled[rows].clone()
        for number in range(len(stream.steps) - 1, -1, -1):
            live = int((steps > number).sum())  # sorted: they come first
            if not live:
                continue
            pulled[:live] = stream.steps[number].outer.pull(pulled[:live])
            if stream.steps[number].sublayers:
                yield number, rows[:live], pulled[:live]
