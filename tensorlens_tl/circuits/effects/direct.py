"""Direct effects: what each component writes straight into a logit.

A component's direct effect is what it adds to the logit along the residual stream alone, past every later head and
MLP: the inner product of its output with the target's direction pulled through the final norm (and, in a post-LN
model, through the norms on the way). With all biases counted the direct effects are the logit, exactly. What a
component does through later ones is its *total* effect: `tensorlens_tl.circuits.effects.total`.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.stream import (
    StreamTarget,
    Sublayer,
    dot,
    stream_target,
    summed_by_name,
    target_under,
    token_pairs,
)
from tensorlens_tl.core import recordable
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import LayerRange, Query, TokenLike
from tensorlens_tl.passes import PassOrDifference, one_question
from tensorlens_tl.results import Terms

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
    queries = len(readout.seed)
    if queries == 1:
        memory = None
    names: list[str] = []
    scores: list[Tensor] = []
    keys: list[Tensor] = []
    for rows in chunks(queries, per_row, memory, "queries"):
        names, effects, by_key = _effects(readout, slice(rows.start, rows.stop), by)
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
    pulled = stream.pull(readout.seed[rows], sublayers=False)
    names: list[str] = []
    scores: list[Tensor] = []
    keys: list[Tensor] = []

    def add(term_names: list[str], values: Tensor, by_key: Callable[[], Tensor]) -> None:
        names.extend(term_names)
        scores.append(values)
        if by == "head_token":
            keys.append(by_key())

    for name, part in stream.sources().items():
        add([name], dot(pulled.stream[0], part), partial(_by_position, pulled.stream[0], part))
    biases = list(pulled.of_biases(stream.steps))
    for number, step in enumerate(stream.steps):
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            cotangent = sublayer.write.pull(pulled.sums[number])
            if by == "neuron" and sublayer.has_neurons:
                stream.frozen.view.blocks[sublayer.layer].require_dense_mlp()
                add(
                    sublayer.neurons(hidden),
                    (cotangent.to(readout.total) * hidden).sum(-2),
                    partial(_by_position, cotangent, hidden),
                )
            elif by == "component":
                add([sublayer.name], dot(cotangent, hidden), partial(_by_position, cotangent, hidden))
            else:
                by_key = partial(_by_node, sublayer, cotangent, hidden)
                if sublayer.is_attention:
                    by_key = partial(_by_source, sublayer, stream.x[number], cotangent)
                elif sublayer.read.mixes:
                    by_key = partial(_by_source_without_pattern, sublayer, stream.x[number], cotangent)
                add(list(sublayer.nodes), sublayer.shares(cotangent, hidden), by_key)
        for at, name, bias, g in biases:
            if at == number:
                add([name], dot(g, bias), partial(_by_position, g, bias))
    if bool(readout.constant.any()):
        constant = readout.constant[:, rows].T[..., None]
        add([readout.constant_name], constant, partial(_at_query, constant, positions, stream.x[0].shape[1]))
    merged, values = summed_by_name(names, torch.cat(scores, dim=-1), -1)
    if keys:
        keys = [summed_by_name(names, torch.cat(keys, dim=2), 2)[1]]
    return merged, values, keys


def _by_position(cotangent: Float[Tensor, "query batch pos d"], x: Tensor) -> Float[Tensor, "query batch 1 pos"]:
    """⟨cotangent, x⟩ where the vectors are: the query's position, and on a whitened model those before it."""
    return (upcast(cotangent) * x).sum(-1)[:, :, None]


def _by_node(sublayer: Sublayer, cotangent: Tensor, x: Tensor) -> Float[Tensor, "query batch node pos"]:
    """The same for each node of a sublayer."""
    return sublayer.split(upcast(cotangent) * x).sum(-1).mT


def _by_source(sublayer: Sublayer, x: Tensor, cotangent: Tensor) -> Float[Tensor, "query batch head key"]:
    """What each head moves from each source token, wherever it writes it."""
    return token_pairs(sublayer, x, cotangent).sum(-2)


def _by_source_without_pattern(
    sublayer: Sublayer, x: Tensor, cotangent: Tensor
) -> Float[Tensor, "query batch node pos"]:
    """What each node moves from each source token; what it adds by itself counts where it comes out."""
    moved: list[Tensor] = []
    for number, part in enumerate(sublayer.split(cotangent).unbind(-2)):
        read = sublayer.read_of(number)
        given = (upcast(read.pull(part)) * x).sum(-1)
        moved.append(given + (upcast(part) * read.bias).sum(-1))
    return torch.stack(moved, dim=2)


def _at_query(
    values: Float[Tensor, "query batch term"], positions: Int[Tensor, "batch query"], pos: int
) -> Float[Tensor, "query batch term key"]:
    """Effects as shares of source tokens, all at the query's position."""
    shares = values.new_zeros(*values.shape, pos)
    return shares.scatter_(3, positions.T[:, :, None, None].expand(*values.shape, 1), values[..., None])
