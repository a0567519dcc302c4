"""The contribution graph: how a logit came about, node by node and position by position.

Nodes are the token and position embeddings, every head, every MLP, every bias, and the target, each at each position.
A node's *weight* is its contribution to the target through everything later: its output dotted with the target pulled
back to it through the whole frozen model. The *edge* from a source to a node is the share of that contribution which
entered the node through the source: pull the target back to the node's output, through the node alone to the residual
stream, and dot with the source's output there. So

* a node's incoming edges and its bias sum to its weight;
* embeddings and biases (those that are sources, and those of the nodes) sum to the logit.

An edge into a head comes from the source's position, so that it says which token was read; an edge out of a head
mixes all that the head has read. ``sources=k`` splits each head at each query into a node for each of the k tokens
that give most, ``L0H3←5``, and one for all others, ``L0H3.rest``: an edge out of one then belongs to one head and one
source token. ``neurons=k`` splits each MLP at each position into its k largest neurons, ``MLP0.N17``, and the rest,
``MLP0.rest``. A node's parts sum to it, edge by edge, and both sums above hold for the parts as they do for the whole.

``dictionaries`` takes the stream apart where a sparse autoencoder stands: all that was written before ends in its
active features, ``F12``, the error of its reconstruction, and b_dec; all that is later is fed by them. ``features=k``
makes nodes of the k largest features at each position, and one node, ``F.rest``, of the others. With several
dictionaries their nodes' names begin with the block after which each stands, ``L0.F12``, or, inside a block, with the
block and how many of its steps come before, ``L0.1.F12``. Both sums hold as before, and a feature's weight is its score
in `feature_effects`.

Nothing is trained and nothing is approximated: attention patterns, activation ratios and norm scales are frozen. In a
post-LN model what a source wrote goes through the norms of the residual stream before it enters a node. Whitening
passes vectors on from position to position, so it is one node, which takes in all that was written before it.
A mixer in place of attention (a state-space layer, a convolution) is one node with edges from every earlier position.

An encoder–decoder is one stream, the encoder's positions and then the decoder's, and every node is at positions of its
side. A head of cross-attention, ``L2.cross.H0``, stands at the decoder's positions; the edges into it come from the
encoder's, through the norm after its last block and the head's values.

Of the difference of two runs (`tensorlens_tl.passes.difference`) weights and edges are parts of the change of the
target, and nothing is held: every head is three nodes, ``L0H3.v``, ``L0H3.q`` and ``L0H3.k``, what it gives because its
values changed, and because its queries and keys changed where it attends. So an edge from one head to another's ``.k``
says that the first tells the second where to look.
"""

import sys
from typing import Any

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import Direction, RuleLike, Share, Whole
from tensorlens_tl.circuits.graph import nodes as graph_nodes
from tensorlens_tl.circuits.graph.builder import GraphBuilder, kind_of_split
from tensorlens_tl.circuits.graph.edges import Edges, NoEdges
from tensorlens_tl.circuits.graph.features import Dictionaries, feature_splits
from tensorlens_tl.circuits.graph.nodes import Choice
from tensorlens_tl.circuits.stream import Pulled, Stream, StreamTarget, stream_target, target_under, token_pairs
from tensorlens_tl.core import recordable
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import LayerRange, ModelView, Query, TokenLike
from tensorlens_tl.passes import Difference, PassOrDifference, one_question
from tensorlens_tl.passes.operator import target_ids
from tensorlens_tl.results import ContributionGraph

MOST_EDGES = 2_000_000
"""Edges a graph may keep."""


@recordable()
@checked_names
@one_question
def contribution_graph(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    threshold: Any = 0.01,
    nodes: Whole | None = None,
    neurons: Share = None,
    sources: Share = None,
    dictionaries: Dictionaries = None,
    features: Share = None,
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
    rule: RuleLike = None,
) -> ContributionGraph:
    """The contribution graph of one logit of one prompt.

    Args:
        frozen: a pass of one prompt, or the difference of two.
        target, minus, direction, layers, final_norm: as in `logit_attribution`.
        threshold: edges smaller than this share of the largest edge are left out (0 keeps all but exact zeros); nodes
            keep their weights, and `ContributionGraph.completeness` says what the kept edges carry.
        nodes: only so many, those of the largest abs(weight), and the edges between them: a large model's graph in a
            fraction of the time. What enters them from others is counted in ``entering``. None gives every node.
        neurons: split MLPs into neurons: an integer, so many at each position of each MLP, the largest; or a number
            below 1, all whose abs(weight) is at least this share of the largest neuron's. None leaves MLPs whole.
        sources: split heads by the token they read, in the same way: so many for each head and query, or all that are
            at least this share of the largest. None leaves heads whole. Mixers have no pattern and stay whole.
        dictionaries: the active features of a sparse autoencoder, or of several, in this pass, from
            `tensorlens_tl.circuits.features`. Each takes the residual stream apart at its place; one place takes one.
        features: which active features become nodes, in the same way: so many at each position, or all that are at
            least this share of the largest. None makes a node of each.
        query: one position; see `tensorlens_tl.passes.inputs.query_positions`.
        activation: the rule for MLPs.
        rule: what stands in place of the frozen model: one of ``tlens.list_rules()``, or a `Rule`. Where it lets
            patterns respond, a head is three nodes, as in a difference; what a node adds besides its linear map is its
            bias. Without `sources` and `dictionaries`.

    Raises:
        InvalidInputError: several prompts or queries, a threshold outside [0, 1], nodes below 1, neurons, sources or
            features that are neither a number of them nor a share, features without dictionaries, dictionaries of
            another pass, outside the layers or two at one place, transcoders (`feature_effects` takes them), and what
            `logit_attribution` refuses.
        UnsupportedModelError: neurons of a mixture of experts.
        SizeError: more than `MOST_NODES` nodes, or more than `MOST_EDGES` edges would be kept.

    >>> graph = tlens.circuits.contribution_graph(frozen, " value", threshold=0.1)
    >>> graph.gap < 1e-4
    True
    """
    check_options(threshold, neurons, sources, features)
    strongest = None
    if nodes is not None:
        strongest = whole_number("contribution_graph: nodes", nodes, 1)
    if features is not None and dictionaries in (None, [], ()):
        raise InvalidInputError(f"features={features!r}: there are none without dictionaries=.")
    readout = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm)
    if rule is not None and (sources is not None or dictionaries not in (None, [], ())):
        raise InvalidInputError(
            "contribution_graph(rule=): heads are split by source token, and features read, in the frozen model alone. "
            "Leave sources and dictionaries out, or rule."
        )
    readout = target_under(readout, rule, "contribution_graph", activation, neurons=neurons is not None)
    if len(frozen.tokens) != 1:
        raise InvalidInputError(f"contribution_graph: the pass has {len(frozen.tokens)} prompts; freeze one.")
    if neurons is not None:
        for layer in readout.stream.layers:
            frozen.view.blocks[layer].require_dense_mlp()
    pulled = readout.stream.pull(upcast(readout.seed))
    split = {"neurons": neurons, "sources": sources}
    choices = {name: _choice(readout.stream, pulled, name, value) for name, value in split.items() if value is not None}
    splits = feature_splits(dictionaries, readout.stream, pulled)
    if features is not None:
        largest = max(
            (float(split.weights.abs().max()) for split in splits.values() if len(split.weights)), default=0.0
        )
        choices["features"] = _of_largest("features", features, largest)
    edges = Edges(float(threshold), MOST_EDGES)
    builder = GraphBuilder(readout, pulled, edges, choices, splits)
    if strongest is not None:
        weighed = GraphBuilder(readout, pulled, NoEdges(0.0, MOST_EDGES), choices, splits)
        weighed.walk()
        edges.selection = weighed.largest(strongest)
        builder.prepared = weighed.prepared
    return builder.graph(_prediction(readout, target, minus))


def check_options(threshold: Any, neurons: Share, sources: Share, features: Share = None) -> None:
    """Raise `InvalidInputError` for options that `contribution_graph` refuses, before there is a pass."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise InvalidInputError(f"threshold={threshold!r}: a share of the largest edge, from 0 to 1.")
    for name, value in {"neurons": neurons, "sources": sources, "features": features}.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and (0 < value < 1 or (isinstance(value, int) and value >= 1))):
            raise InvalidInputError(
                f"{name}={value!r}: a whole number of them at each position, 1 or more, or a share of the largest, "
                "above 0 and below 1."
            )


def _choice(stream: Stream, pulled: Pulled, name: str, value: int | float) -> Choice:
    """Which neurons or source tokens become nodes; for a share, all are looked at for the largest."""
    largest = 0.0
    if value >= 1:
        return _of_largest(name, value, largest)
    for number, step in enumerate(stream.steps):
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            if kind_of_split(sublayer) != name:
                continue
            cotangent = sublayer.write.pull(pulled.sums[number])
            shares = cotangent[0] * hidden
            if sublayer.is_attention:
                shares = token_pairs(sublayer, stream.x[number], cotangent)
            largest = max(largest, float(shares.abs().max()))
    return _of_largest(name, value, largest)


def _of_largest(name: str, value: int | float, largest: float) -> Choice:
    """So many, or all that are at least a share of the largest."""
    if value >= 1:
        return Choice(name, graph_nodes.MOST_NODES, int(value))
    return Choice(name, graph_nodes.MOST_NODES, sys.maxsize, value * largest)


def _prediction(readout: StreamTarget, target: TokenLike, minus: TokenLike) -> dict[str, Any]:
    """What others' formats say about the model and its prediction besides the graph."""
    frozen = readout.stream.frozen
    (query,) = readout.positions[0].tolist()
    view = frozen.view
    token_ids: list[int] = []
    if not frozen.tokens.is_floating_point():
        token_ids = frozen.tokens[0].tolist()
    facts: dict[str, Any] = {
        "tokens": list(frozen.str_tokens[0]),
        "token_ids": token_ids,
        "n_layers": frozen.n_layers,
        "d_vocab": _vocabulary(view),
        "provenance": frozen.provenance(),
    }
    if target is not None and minus is None and view.unembedding is not None:
        run = frozen.a if isinstance(frozen, Difference) else frozen
        logits = upcast(view.logits(run.unembedded()[0, query]))
        token = int(target_ids(frozen, readout.positions, target)[0])
        facts["token_id"] = token
        if view.has_probabilities:
            facts["probability"] = float(logits.softmax(-1)[token])
    return facts


def _vocabulary(view: ModelView) -> int:
    """How many tokens or classes the logits are of."""
    if view.unembedding is None:
        return 0
    return view.unembedding[0].shape[1]
