"""The secant of cross-attention: queries are read from the decoder's stream, keys and values from the encoder's output.

    Δz_i = Σ_k P̄_ik·Δv_k + Σ_k ΔP_ik·v̄_k,    Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k),    i of the decoder, k of the encoder

As self-attention it is the sum of three routes, each from the whole stream to what heads give at the decoder's
positions.
"""

from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, CrossAttention, Identity, Linear, Segment, Sum
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import Change, CrossKeyResponse, QueryResponse, ScoreSecant
from tensorlens_tl.models import Within
from tensorlens_tl.passes.attention_scores import CrossStreams, HeadProjection, score_projections
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.two_runs.attention import projected_secant, two_scores, value_secant, values_by_head
from tensorlens_tl.passes.two_runs.scores import TwoScores
from tensorlens_tl.passes.two_runs.values import CrossValues


@dataclass(frozen=True, eq=False)
class CrossSecant:
    """Cross-attention of a decoder block as a map of the difference of two runs.

    Attributes:
        read: from the whole stream to what heads give at the decoder's positions, zero at the encoder's.
        out: what writes that.
        pattern_error: the largest error of a probability of the two patterns, as the scores that were read give them.
    """

    read: Sum
    out: Chain
    pattern_error: float

    def within(self, side: Within) -> Within:
        """Where the block acts, with this cross-attention."""
        return Within(side.start, side.stop, side.length, self.read, self.out)


def cross_secant(
    a: BlockMaps, b: BlockMaps, layer: int, of_a: CrossValues, of_b: CrossValues, norm: AffineMap | None
) -> CrossSecant:
    """The secant of one decoder block's cross-attention.

    Args:
        a, b: the two runs.
        layer: which block.
        of_a, of_b: what it reads and gives in either.
        norm: the secant of the norm that queries are read after; None without.

    Raises:
        UnsupportedModelError: attention scores that are not read.
    """
    weights = [maps.view.blocks[layer].require_cross_attention() for maps in (a, b)]
    name = partial("L{}.cross.{}".format, layer)
    scores = _scores(a, b, layer, of_a.streams, of_b.streams)
    values = value_secant(weights, Change(of_a.streams.keys, of_b.streams.keys), name)
    secant, _ = scores.secant(values_by_head(values, weights[0].kv_heads))
    start, stop = a.capture.side(layer)
    length = a.capture.tokens.shape[1]
    of_encoder = Segment(values.map, 0, start, length, only=True)
    mixing = CrossAttention(scores.mean_pattern.to(of_a.heads), weights[0].kv_heads, (start, stop), (0, start), length)
    routes = (Chain((of_encoder, mixing)), *_responses(a, layer, scores, secant, norm))
    out_a, out_b = (Linear(of.W_O, of.b_O) for of in weights)
    written = Change(of_a.heads, of_b.heads).written(out_a, out_b, name("W_O"))
    return CrossSecant(Sum(routes), written, scores.error)


def cross_score_routes(
    a: BlockMaps, b: BlockMaps, layer: int, of_a: CrossValues, of_b: CrossValues, norm: AffineMap | None, of: str
) -> tuple[Chain, Chain]:
    """What the scores or patterns of cross-attention change by with its queries, and with its keys.

    Cross-attention has neither sinks nor relative positions, so that no constant of its scores changes between two
    models. The routes are what heads give whose values are one-hot, ``[.., d_model] -> [.., (head key)]`` at the
    decoder's positions.

    Args:
        a, b, layer, of_a, of_b, norm: as of `cross_secant`.
        of: ``"pattern"``, or ``"score"``: before a soft cap and the softmax.

    Raises:
        UnsupportedModelError: attention scores that are not read.
    """
    scores = _scores(a, b, layer, of_a.streams, of_b.streams)
    secant, _ = scores.one_hot(of)
    return _responses(a, layer, scores, secant, norm)


def _scores(a: BlockMaps, b: BlockMaps, layer: int, of_a: CrossStreams, of_b: CrossStreams) -> TwoScores:
    """What both runs of a layer's cross-attention make their scores of.

    Raises:
        UnsupportedModelError: they do not give its patterns.
    """
    name = partial("L{}.cross.{}".format, layer)
    place = a.layouts[layer].cross
    before = None if place is None else place.before
    (query_a, key_a), (query_b, key_b) = (score_projections(maps, layer, before, crossing=True) for maps in (a, b))
    decoder = Change(_read(query_a, of_a.queries), _read(query_b, of_b.queries))
    encoder = Change(upcast(of_a.keys), upcast(of_b.keys))
    queries = projected_secant(decoder, query_a, query_b, name("W_Q"), name("q_norm"))
    keys = projected_secant(encoder, key_a, key_b, name("W_K"), name("k_norm"))
    return two_scores(a, b, layer, queries, keys, (of_a, of_b))


def _responses(
    a: BlockMaps, layer: int, scores: TwoScores, secant: ScoreSecant, norm: AffineMap | None
) -> tuple[Chain, Chain]:
    """What heads give for a change of the decoder's queries, and of the encoder's keys, each from the whole stream."""
    start, stop = a.capture.side(layer)
    length = a.capture.tokens.shape[1]
    normed = () if norm is None else (norm,)
    by_query = Chain((*normed, *scores.queries.stages, QueryResponse.of(secant)))
    of_keys = Segment(scores.keys.map, 0, start, length, only=True)
    by_key = CrossKeyResponse(secant, (start, stop), (0, start), length)
    return Chain((Segment(by_query, start, stop, length, only=True),)), Chain((of_keys, by_key))


def _read(projection: HeadProjection, stream: Float[Tensor, "batch decoder d_model"]) -> Tensor:
    """What queries are read from: the decoder's stream after the norm, its scale held."""
    return Chain((Identity(), *projection.reads))(upcast(stream))
