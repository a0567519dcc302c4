"""The secant of cross-attention: queries come from the decoder's stream, keys and values from the encoder's output.

    Δz_i = Σ_k P̄_ik·Δv_k + Σ_k ΔP_ik·v̄_k,    Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k),    i of the decoder, k of the encoder

Like self-attention it is the sum of three routes, each from the whole stream to the heads' outputs at the decoder's
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
    """A decoder block's cross-attention as a map of the difference of two runs.

    Attributes:
        read: the map from the whole stream to the heads' outputs at the decoder's positions, zero at the encoder's.
        out: the map from there to the output.
        pattern_error: the largest error of a probability in the two patterns recomputed from the scores.
    """

    read: Sum
    out: Chain
    pattern_error: float

    def within(self, side: Within) -> Within:
        """Return where the block acts, including this cross-attention."""
        return Within(side.start, side.stop, side.length, self.read, self.out)


def cross_secant(
    a: BlockMaps, b: BlockMaps, layer: int, of_a: CrossValues, of_b: CrossValues, norm: AffineMap | None
) -> CrossSecant:
    """Return the secant of one decoder block's cross-attention.

    Args:
        of_a, of_b: the inputs and outputs in either run.
        norm: the secant of the norm before the queries, or None.

    Raises:
        UnsupportedModelError: the attention scores cannot be read.
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
    """Return the change of the scores or patterns of cross-attention through its queries, and through its keys.

    Cross-attention has neither sinks nor relative positions, so no constant of its scores changes between two models.
    The routes are the outputs of heads with one-hot values, ``[.., d_model] -> [.., (head key)]`` at the decoder's
    positions.

    Args:
        a, b, layer, of_a, of_b, norm: as in `cross_secant`.
        of: ``"pattern"``, or ``"score"``: before a soft cap and the softmax.

    Raises:
        UnsupportedModelError: the attention scores cannot be read.
    """
    scores = _scores(a, b, layer, of_a.streams, of_b.streams)
    secant, _ = scores.one_hot(of)
    return _responses(a, layer, scores, secant, norm)


def _scores(a: BlockMaps, b: BlockMaps, layer: int, of_a: CrossStreams, of_b: CrossStreams) -> TwoScores:
    """Return the scores of both runs of a layer's cross-attention.

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
    """Return the heads' responses, from the whole stream, to changed queries in the decoder and keys in the encoder."""
    start, stop = a.capture.side(layer)
    length = a.capture.tokens.shape[1]
    normed = () if norm is None else (norm,)
    by_query = Chain((*normed, *scores.queries.stages, QueryResponse.of(secant)))
    of_keys = Segment(scores.keys.map, 0, start, length, only=True)
    by_key = CrossKeyResponse(secant, (start, stop), (0, start), length)
    return Chain((Segment(by_query, start, stop, length, only=True),)), Chain((of_keys, by_key))


def _read(projection: HeadProjection, stream: Float[Tensor, "batch decoder d_model"]) -> Tensor:
    """Return the input of queries: the decoder's stream after the norm with its scale held."""
    return Chain((Identity(), *projection.reads))(upcast(stream))
