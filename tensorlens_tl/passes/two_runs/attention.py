"""The secant of a layer's attention: what its heads write changes through values, queries and keys.

    Δz_i = Σ_k P̄_ik·Δv_k + Σ_k ΔP_ik·v̄_k,    ΔP by the softmax's secant from Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k)

so that attention is the sum of three linear maps of what it reads: one by values, one by queries, one by keys. A gate
of what heads give is a fourth, Δ(g·z) = ḡ·Δz + z̄·Δg; the scale of a norm before W_O responds as any norm's does.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import Attention, Chain, Diagonal, Identity, Linear, Sum
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import (
    Change,
    KeyResponse,
    Offset,
    QueryResponse,
    ScoreSecant,
    same,
)
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.parameters import AttentionWeights, Gate, InverseScale
from tensorlens_tl.passes.attention_scores import (
    CrossStreams,
    HeadProjection,
    ScoreReading,
    added_positions,
    relative_bias,
    score_candidates,
    score_projections,
    score_reading,
    side_read,
)
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.two_runs.mlps import gate_secant
from tensorlens_tl.passes.two_runs.scores import TwoScores
from tensorlens_tl.passes.two_runs.values import BlockValues, known


def attention_secant(
    a: BlockMaps, b: BlockMaps, layer: int, of_a: BlockValues, of_b: BlockValues, heads: Collection[int] | None = None
) -> tuple[Chain, float]:
    """The secant of one layer's attention, from what it reads to what it writes, and how exactly its scores are read.

    Args:
        a, b: the two runs.
        layer: which block.
        of_a, of_b: what its parts read.
        heads: keep only these.

    Returns:
        The map, and the largest error of a probability of the two patterns, as their scores give them.

    Raises:
        UnsupportedModelError: attention scores that are not read.
    """
    weights = [maps.view.blocks[layer].attention for maps in (a, b)]
    name = partial("L{}.{}".format, layer)
    scores = _scores(a, b, layer)
    read = Change(of_a.attention, of_b.attention)
    values = value_secant(weights, read, name, (of_a.values, of_b.values))
    secant, constants = scores.secant(values_by_head(values, weights[0].kv_heads))
    mixing = Attention(scores.mean_pattern.to(of_a.attention), weights[0].kv_heads)
    if heads is not None:
        mixing, secant = _only(mixing, secant, heads)
    only = partial(of_heads, n_heads=weights[0].heads, heads=heads)
    offsets = [Offset(only(vectors.to(of_a.heads)), name(of)) for of, vectors in constants.items()]
    routes = (
        Chain((*values.stages, mixing)),
        Chain((*scores.queries.stages, *scores.rotation, QueryResponse.of(secant), *offsets)),
        Chain((*scores.keys.stages, *scores.rotation, KeyResponse(secant))),
    )
    routes, z = _gated(weights, routes, Change(of_a.heads, of_b.heads), read, name("attn.W_gate"), only)
    return Chain((Sum(routes), _written(weights, z, name("W_O"), only))), scores.error


def score_routes(a: BlockMaps, b: BlockMaps, layer: int, of: str) -> tuple[Chain, Chain]:
    """What a layer's scores or patterns change by with its queries, and with its keys and sinks.

    They are what heads give whose values are one-hot: ``[.., d_model] -> [.., (head key)]`` at every query.

    Args:
        a, b: the two runs.
        layer: which block.
        of: ``"pattern"``, or ``"score"``: before a soft cap, ALiBi and the softmax.

    Raises:
        UnsupportedModelError: attention scores that are not read.
    """
    scores = _scores(a, b, layer)
    secant, constants = scores.one_hot(of)
    offsets = [Offset(vectors, f"L{layer}.{name}") for name, vectors in constants.items()]
    by_query = Chain((*scores.queries.stages, *scores.rotation, QueryResponse.of(secant)))
    return by_query, Chain((*scores.keys.stages, *scores.rotation, KeyResponse(secant), *offsets))


def _scores(a: BlockMaps, b: BlockMaps, layer: int) -> TwoScores:
    """What both runs of a layer make their scores of.

    Raises:
        UnsupportedModelError: they do not give its patterns.
    """
    return two_scores(a, b, layer, *_projection_secants(a, b, layer))


def two_scores(
    a: BlockMaps,
    b: BlockMaps,
    layer: int,
    queries: Change,
    keys: Change,
    cross: tuple[CrossStreams | None, CrossStreams | None] = (None, None),
) -> TwoScores:
    """The scores of two runs, by the reading of the first run, or of the second where the first does not tell.

    Attention that is even, as of one repeated token, is what several readings give. Where each run has one token, all
    do, and only sinks tell them apart.

    Args:
        a, b: the two runs.
        layer: which block.
        queries, keys: before rotation.
        cross: what cross-attention reads in either run.

    Raises:
        UnsupportedModelError: neither reading gives both patterns; says why of the first.
    """
    refusals: list[UnsupportedModelError] = []
    of_runs = ((a, queries.a, keys.a, cross[0]), (b, queries.b, keys.b, cross[1]))
    for maps, query, key, streams in of_runs:
        try:
            reading = score_reading(maps, layer, (query, key), streams, proved=False)
            if key.shape[1] == 1 and streams is None:
                reading = _reading_of_one_token(a, b, layer, queries, keys, reading)
            in_a, in_b = (_with_bias_of(run, layer, reading, query.shape[1]) for run in (a, b))
            return TwoScores.of(a, b, layer, (in_a, in_b), queries, keys, crossing=streams is not None)
        except UnsupportedModelError as error:
            refusals.append(error)
    if not any(bool(maps.capture.resid_read(layer)[maps.mask].any()) for maps in (a, b)):
        raise UnsupportedModelError(
            f"difference: the stream that {a.view.blocks[layer].name} reads is zero at every token of both runs, so "
            "that attention is even and does not tell how its scores are computed. Compare with a run whose stream is "
            "not zero."
        )
    raise refusals[0]


def _with_bias_of(maps: BlockMaps, layer: int, reading: ScoreReading, pos: int) -> ScoreReading:
    """A reading with the table of relative positions of one run's model, where there is one."""
    if reading.relative is None:
        return reading
    return replace(reading, relative=relative_bias(maps, layer, pos))


def _reading_of_one_token(
    a: BlockMaps, b: BlockMaps, layer: int, queries: Change, keys: Change, stated: ScoreReading
) -> ScoreReading:
    """The first known reading of prompts of one token by which all of them have the same sinks, else what is stated."""
    patterns = [upcast(maps.capture.pattern(layer))[..., 0] for maps in (a, b)]
    share = torch.cat(patterns)
    if a.capture.model is not b.capture.model or bool((1 - share <= a.tolerance).all()):
        return stated
    before = a.layouts[layer].attn.before
    for reading in score_candidates(a, layer, before, added_positions(a)):
        of_runs = ((queries.a, keys.a), (queries.b, keys.b))
        scores = torch.cat([reading.finished(reading.scores_of(*vectors))[..., 0] for vectors in of_runs])
        sinks = scores - torch.logit(share)
        if float((torch.sigmoid(scores - sinks[:1]) - share).abs().max()) <= a.tolerance:
            return reading
    return stated


def values_by_head(values: Change, kv_heads: int) -> Float[Tensor, "batch kv pos d_head"]:
    """The mean values of two runs."""
    return rearrange(upcast(values.mean), "b p (h d) -> b h p d", h=kv_heads)


def value_secant(
    weights: list[AttentionWeights],
    read: Change,
    name: Callable[[str], str],
    values: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Change:
    """The values, through a norm where one is inside.

    Args:
        weights: of either run.
        read: what attention reads.
        name: of a matrix.
        values: what it makes of that in either run, where that is known; None computes it.

    Raises:
        UnsupportedModelError: the two runs' are of different forms.
    """
    inner_a, inner_b = (weights_of.inner_values for weights_of in weights)
    if inner_a is None and inner_b is None:
        plain_a, plain_b = map(_values, weights)
        return read.linear(plain_a, plain_b, name("W_V"), known(*values))
    if inner_a is None or inner_b is None or (inner_a.out is None) != (inner_b.out is None):
        raise UnsupportedModelError(f"difference: the values of {name('attention')} are of two forms.")
    if inner_a.out is not None and inner_b.out is not None:
        entry = read.linear(inner_a.entry, inner_b.entry, name("W_down_V"))
        latent = entry.normed(inner_a.held(entry.a), inner_b.held(entry.b), name("v_norm"))
        return latent.linear(inner_a.out, inner_b.out, name("W_V"))
    entry = read.linear(inner_a.entry, inner_b.entry, name("W_V"))
    groups = inner_a.groups
    gains = (inner_a.norm.gains(entry.a, groups), inner_b.norm.gains(entry.b, groups))
    scale_a = inner_a.norm.scales(upcast(entry.a), groups)
    scale_b = inner_b.norm.scales(upcast(entry.b), groups)
    return entry.over(scale_a, scale_b, gains, name("v_norm"), groups)


def _values(weights: AttentionWeights) -> Linear:
    assert weights.value_matrix is not None
    return Linear(weights.value_matrix, weights.b_V)


def _gated(
    weights: list[AttentionWeights],
    routes: tuple[Chain, ...],
    z: Change,
    read: Change,
    name: str,
    only: Callable[[Tensor], Tensor],
) -> tuple[tuple[Chain, ...], Change]:
    """The routes to what heads give, and what they give, after a gate, which is one more route; without one as before.

    Args:
        weights: of either run.
        routes: to what heads give.
        z: what they give.
        read: what attention reads.
        name: of the gate's matrix.
        only: leaves the heads that count.
    """
    gate_a, gate_b = (weights_of.output_factor for weights_of in weights)
    if not isinstance(gate_a, Gate) or not isinstance(gate_b, Gate):
        return routes, z
    gate = gate_secant(gate_a, gate_b, read, name)
    gate = gate.repeated(z.a.shape[-1] // gate.a.shape[-1])
    held = Diagonal(gate.mean)
    by_gate = Chain((*gate.stages, Diagonal(only(z.mean))))
    gated = (*(Chain((*route.stages, held)) for route in routes), by_gate)
    return gated, Change(z.a * gate.a, z.b * gate.b)


def _written(weights: list[AttentionWeights], z: Change, name: str, only: Callable[[Tensor], Tensor]) -> Chain:
    """What attention writes: through a norm where there is one, and W_O.

    Raises:
        UnsupportedModelError: the two runs' are of different forms.
    """
    norm_a, norm_b = (weights_of.output_factor for weights_of in weights)
    if type(norm_a) is not type(norm_b):
        raise UnsupportedModelError(f"difference: what stands before {name} is of two forms.")
    if isinstance(norm_a, InverseScale) and isinstance(norm_b, InverseScale):
        z = z.over(norm_a.norm.scale_of(z.a), norm_b.norm.scale_of(z.b))
    out_a, out_b = (Linear(weights_of.W_O, weights_of.b_O) for weights_of in weights)
    return replace(z, a=only(z.a), b=only(z.b)).written(out_a, out_b, name)


def of_heads(
    z: Float[Tensor, "batch pos width"], n_heads: int, heads: Collection[int] | None
) -> Float[Tensor, "batch pos width"]:
    """Some heads' vectors, the others zero; None for all of them."""
    if heads is None:
        return z
    keep = torch.zeros(n_heads, dtype=z.dtype, device=z.device)
    keep[list(heads)] = 1
    return z * keep.repeat_interleave(z.shape[-1] // n_heads)


def _projection_secants(a: BlockMaps, b: BlockMaps, layer: int) -> tuple[Change, Change]:
    """Queries and keys before rotation: their matrices, and their norms with the scale responding.

    What two shortformers differ by in the positions that they add to what queries and keys read is ``"W_pos"``.
    """
    before = a.layouts[layer].attn.before
    added = [added_positions(maps) for maps in (a, b)]
    projections = [score_projections(maps, layer, before, of_run) for maps, of_run in zip((a, b), added, strict=True)]
    reads = [Chain((Identity(), *of_queries.reads)) for of_queries, _ in projections]  # keys read the same
    x_a, x_b = (upcast(side_read(maps, layer)) for maps in (a, b))
    read = Change(reads[0](x_a), reads[1](x_b))
    if added[0] is not None and added[1] is not None and not same(*added):
        read = replace(read, stages=(Offset(upcast(added[0]) - upcast(added[1]), "W_pos"),))
    (query_a, key_a), (query_b, key_b) = projections
    queries = projected_secant(read, query_a, query_b, f"L{layer}.W_Q", f"L{layer}.q_norm")
    return queries, projected_secant(read, key_a, key_b, f"L{layer}.W_K", f"L{layer}.k_norm")


def projected_secant(read: Change, a: HeadProjection, b: HeadProjection, name: str, norm_name: str) -> Change:
    """What attention reads, through one projection, its norm, and the latent before it where there is one."""
    if a.latent is not None and b.latent is not None:
        entry = read.linear(a.latent.entry, b.latent.entry, name.replace("W_", "W_down_"))
        scales = (a.latent.scale(entry.a), b.latent.scale(entry.b))
        gains = (a.latent.gain, b.latent.gain)
        read = entry.over(*scales, gains, name.replace("W_", "latent_norm_"), first=a.latent.rank)
    vectors = read.linear(a.linear, b.linear, name)
    if a.norm is None or b.norm is None:
        return vectors
    scales = (a.scale(vectors.a), b.scale(vectors.b))
    gains = (a.gain(vectors.a), b.gain(vectors.b))
    return vectors.over(*scales, gains, norm_name, a.groups)


def _only(mixing: Attention, secant: ScoreSecant, heads: Collection[int]) -> tuple[Attention, ScoreSecant]:
    """Other heads give nothing."""
    keep = torch.zeros(mixing.n_heads, dtype=torch.bool, device=mixing.pattern.device)
    keep[list(heads)] = True
    mixing = replace(mixing, pattern=mixing.pattern * keep[:, None, None])
    return mixing, replace(secant, weights=secant.weights * keep[:, None])
