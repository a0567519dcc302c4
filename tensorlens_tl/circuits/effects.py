"""What components do to a logit: directly, in all, head by head; and what the model would say before a layer.

A component's *direct* effect is what it adds to the logit along the residual stream alone, past every later head and
MLP: the inner product of its output with the target's direction pulled through the final norm (and, in a post-LN
model, through the norms on the way). With all biases counted the direct effects are the logit, exactly.

Its *total* effect is what the logit loses when the component is taken away, whatever lies between. In the frozen pass
everything later is linear, so the total effect of every head and MLP comes from one pull: its hidden vector dotted with
the target pulled through everything later. Patterns, ratios and scales stay as they were. In the live model they
respond as well: with ``live=True`` each component is ablated in a separate run, many to a batch. The two differ by what
the ablation does to patterns, activations and norms; a previous-token head, say, acts on an induction head's *pattern*,
which only the live model shows.

The *logit lens* is what the model would predict if it stopped before a layer. The residual stream there goes through
the model's own end: the final norm with the scale that *this* stream has, a masked language model's prediction head,
the unembedding. Nothing is held fixed but the stream itself. The last value is the model's own logit (nostalgebraist,
"interpreting GPT: the logit lens", 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names
from tensorlens_tl.algebra import AffineMap, AnyAttention, Chain, Linear, Norm, Segment
from tensorlens_tl.algebra.memory import Memory, check_size
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.circuits.arguments import Direction, RuleLike, Whole
from tensorlens_tl.circuits.live import LiveTarget, NodeGradients, sublayer_nodes
from tensorlens_tl.circuits.ruled import target_under
from tensorlens_tl.circuits.stream import Stream, StreamTarget, Sublayer, stream_target, summed_by_name, token_pairs
from tensorlens_tl.core import Rule, recordable, rule_of
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import LayerRange, Query, TokenLike
from tensorlens_tl.models.parameters import NormWeights, norm_epsilon
from tensorlens_tl.passes import Difference, FrozenPass, PassLike, PassOrDifference, check_pass, one_question
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.target import chosen_head, resolve_target
from tensorlens_tl.requirements import check_rule
from tensorlens_tl.results import Terms

# ------------------------------------------------------------------ direct effects

BY = ("component", "head", "head_token", "neuron")


@recordable()
@checked_names
@one_question
def logit_attribution(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: str = "component",
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
    rule: RuleLike = None,
    memory: Memory = None,
) -> Terms:
    """The direct effect of every component on a logit; with the biases they sum to it.

    Heads count with b_V inside, as TransformerLens' ``hook_result``; b_O and b_out are separate terms. Of an
    encoder–decoder both stacks have terms, and heads of cross-attention are ``"L2.cross.H0"``; what the encoder writes
    reaches a logit through these alone, so its direct effect is zero.

    Args:
        frozen: the pass, or the difference of two: then every term is a part of the change.
        target, minus, direction: as in `FrozenOperator.target`.
        by: ``"component"`` (embeddings, each layer's attention and MLP, each bias), ``"head"`` (attention by head),
            ``"head_token"`` (the same, and each head's or mixer's source tokens in `Terms.keys`), or ``"neuron"`` (also
            MLPs by neuron).
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        layers: consecutive layers: a direction then reads the stream where they end (a probe, a feature in the
            middle of the model), and what comes before them is one term.
        final_norm: False ends before the norm that follows the last layer: for a direction of ``hook_resid_post``.
            True is refused where the layers end earlier; `logit_lens` applies that norm to the stream there.
        activation: the rule; it matters where a prediction head's activation lies on the way (masked models): direct
            effects pass every MLP by.
        rule: what norms on the way pass on in place of the frozen model: one of ``tlens.list_rules()``, or a `Rule`;
            not by ``"head_token"``.
        memory: what several queries may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no such `by`, a query out of range, no target, and what `target` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.

    >>> terms = tlens.circuits.logit_attribution(frozen, " value", by="head")
    >>> bool(torch.isclose(terms.scores.sum(), terms.total, rtol=1e-4))
    True
    """
    check_choice("by", by, BY)
    readout = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm, one=False)
    if rule is not None and by == "head_token":
        raise InvalidInputError("logit_attribution(rule=): tokens by head are of held patterns; use by='head'.")
    readout = target_under(readout, rule, "logit_attribution", activation, neurons=by == "neuron")
    return direct_effects(readout, by, memory)


def direct_effects(readout: StreamTarget, by: str, memory: Memory = None) -> Terms:
    """The direct effects on a target of any stream; `by` is one of `BY`."""
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
    """Some queries' names, effects `[query, batch, term]` and, by head and token, keys `[query, batch, term, key]`."""
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
    """What each node moves from each source token, wherever it writes it.

    What one without a pattern adds by itself counts where it comes out.
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
    check_choice("by", by, ("component", "head"))
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
    if live or rule is not None:
        chosen = None if rule is None else rule_of(rule)
        names, scores = _in_live_model(readout, by, nodes, memory, chosen)
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
    for number in range(len(stream.steps)):
        for _, of_sublayer, by_position in stream.terms(number, pulled, by):
            names += of_sublayer
            scores.append(by_position.sum(-1))
    chosen = _chosen(names, nodes)
    return [names[number] for number in chosen], torch.cat(scores, dim=-1).transpose(0, 1)[..., chosen]


def _in_live_model(
    readout: StreamTarget, by: str, nodes: Sequence[str] | None, memory: Memory, rule: Rule | None
) -> tuple[list[str], Float[Tensor, "batch query term"]]:
    """Ablated in the live model, or by the gradients of a rule there."""
    question = "total_effects(live=True)" if rule is None else "total_effects(rule=)"
    if rule is not None:
        check_rule(rule, readout.stream.run, question)
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


# ------------------------------------------------------------------ one head by itself


@dataclass(frozen=True, eq=False)
class HeadMap:
    """One head by itself, pattern frozen: what it moves from token to token, and what becomes of that.

    Attributes:
        layer, head: which one.
        cross: whether it is one of cross-attention.
        map: stream before the head -> what it writes (b_V inside, b_O not), an `AffineMap`.
        pattern: `[batch, query, key]`; of an encoder–decoder's between all positions, the encoder's first.
        vectors: what each source token offers, v_j W_O, through the linear part of a norm after the sublayer but its
            denominator, `[batch, key, d_model]`.
    """

    frozen: FrozenPass
    layer: int
    head: int
    map: Chain
    pattern: Float[Tensor, "batch query key"]
    vectors: Float[Tensor, "batch key d_model"]
    _scale: Float[Tensor, "batch query 1"]
    _stream: Stream
    _activation: str
    cross: bool = False

    def __repr__(self) -> str:
        batch, query, _ = self.pattern.shape
        _, sublayer = self._stream.at(self.layer, cross=self.cross)
        return f"HeadMap({sublayer.nodes[self.head]} of {self.frozen.view.description}, batch={batch}, pos={query})"

    def contributions(self, query: Query = "all") -> Float[Tensor, "batch query key d_model"]:
        """``A_ij v_j W_O``: what source token j puts into position i through this head.

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
        """The pattern over the scale of a norm after the sublayer, between real tokens."""
        mask = self.frozen.mask
        return self.pattern / self._scale * (mask[:, :, None] & mask[:, None])

    @property
    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖A_ij v_j W_O‖ (Kobayashi et al. 2020) for all pairs."""
        return self._weights.abs() * self.vectors.norm(dim=-1)[:, None]

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """What the head writes to the residual stream, zero at padding."""
        number, _ = self._stream.at(self.layer, cross=self.cross)
        return self.map(self._stream.x[number]) * self.frozen.mask[..., None]

    @cached_property
    def effect(self) -> Float[Tensor, "batch pos d_out"]:
        """The head's total effect: its output pushed through everything later, to the stream that is unembedded.

        Of a range of layers, to where the range ends.
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
        """What each token pair of this head adds to a logit through everything later, `[batch, query, key]`.

        Args:
            target, minus, direction: as in `FrozenOperator.target`; where the head was taken from a range of layers, a
                direction reads the stream where they end.
            query: the position whose prediction the target is part of.
            direct: only along the residual stream, past every later head and MLP.

        Returns:
            Scores whose sum is ⟨output, pulled-back target⟩, the head's total (or direct) effect on the logit.

        >>> tlens.circuits.head_map(frozen, 0, 0).target(" value").shape  # batch query key
        torch.Size([1, 7, 7])
        """
        layers = self._stream.layers
        norm = self._stream.final_norm
        readout = stream_target(self.frozen, target, minus, direction, query, self._activation, layers, norm)
        pulled = readout.stream.pull(readout.seed, sublayers=not direct)
        number, sublayer = readout.stream.at(self.layer, cross=self.cross)
        cotangent = sublayer.write.pull(pulled.sums[number][0])
        return token_pairs(sublayer, readout.stream.x[number], cotangent)[:, self.head]


@checked_names
def head_map(
    frozen: PassLike,
    layer: Whole,
    head: Whole,
    *,
    cross: bool = False,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
) -> HeadMap:
    """One head of a frozen pass, by itself.

    Args:
        frozen: the pass.
        layer, head: which one; with grouped-query attention the head is a query head.
        cross: a head of an encoder–decoder's cross-attention, ``"L2.cross.H0"``, instead of self-attention.
        layers: consecutive layers that its effect goes through, the head's layer among them; None for all.
        final_norm: whether its effect goes through the norm after the last layer.
        activation: the rule for the MLPs that its effect goes through.

    Raises:
        InvalidInputError: no such layer or head.

    >>> tlens.circuits.head_map(frozen, 0, 0).pattern.shape
    torch.Size([1, 7, 7])
    """
    check_pass(frozen)
    layer, head = chosen_head(frozen.view, layer, head, cross=cross)
    to_tokens = final_norm is not False and frozen.view.unembedding is not None
    stream = Stream.of(frozen, activation, layers=layers, final_norm=final_norm, to_tokens=to_tokens)
    number, sublayer = stream.at(layer, cross=cross)
    read = sublayer.read_of(head)
    output, *after = sublayer.write.stages
    if isinstance(output, Segment):  # its weights are the same at every position
        output = output.inner
    if not isinstance(output, Linear):
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: a gate or a norm scales what its heads give, by what "
            "the receiving token is; a head has no map of its own there. Its terms and effects work (by='head')."
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
    return HeadMap(frozen, layer, head, alone, mix.pattern[:, 0], vectors, scale, stream, activation, cross)


def _at_all_positions(norm: AffineMap) -> Norm:
    """A norm after the sublayer; of one side of an encoder–decoder with scale 1 at the other's positions."""
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
    """The logit of a token in the residual stream before every layer, and after the last one.

    Args:
        frozen: the pass.
        target, minus: as in `FrozenOperator.target`; ``"first-choice"`` is what the whole model predicts.
        direction: a vector at the final norm's output instead of a token.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.

    Returns:
        Logits before any final soft cap, `n_layers + 1` of them: in the stream before layer 0, 1, …, and at the end,
        where it is the model's own. Of an encoder–decoder, its decoder's layers. They are no parts of a sum: what each
        component adds to the logit is `logit_attribution`.

    Raises:
        InvalidInputError: no frozen pass, and what `FrozenOperator.target` refuses.
        UnsupportedModelError: several streams, or an end that does not give the model's own number from its last
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
    """What is unembedded (or the final norm's output) if the model stops before a layer."""
    view = frozen.view
    x = upcast(frozen.resid_pre(layer))
    if view.final_norm is not None:
        x = _normed(frozen, view.final_norm, view.final_norm_name, x)
    if not to_tokens:
        return x
    classes, head = view.class_head, view.mlm_head
    if classes is not None:  # one answer for all positions
        x = x[:, : classes.tokens].mean(1, keepdim=True).expand_as(x)
        return x if classes.norm is None else _normed(frozen, classes.norm, "classifier_ln", x)
    if head is None:
        return x
    x = head.activation(Linear(head.W, head.b)(x))
    return x if head.norm is None else _normed(frozen, head.norm, head.scale_name, x)


def _normed(frozen: FrozenPass, norm: NormWeights, name: str | None, x: Tensor) -> Float[Tensor, "batch pos d_model"]:
    """A norm with the scale that this stream has; `name` is the module's (or its hook point's), where it has one."""
    if norm.epsilon is None:
        assert name is not None  # it has a hook point of its own
        module = frozen.view.model.get_submodule(name.removesuffix(".hook_scale"))
        norm = replace(norm, epsilon=norm_epsilon(module, frozen.view.cfg))
    return Norm(norm.scale_of(x), norm.gain, norm.shift, norm.centre)(x)
