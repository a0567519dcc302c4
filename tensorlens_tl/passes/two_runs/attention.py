"""The secant of a layer's attention, whose output changes through values, queries and keys.

    Δz_i = Σ_k P̄_ik·Δv_k + Σ_k ΔP_ik·v̄_k,    ΔP by the softmax's secant from Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k)

so attention is the sum of three linear maps of its input: through values, queries and keys. A gate on the heads'
outputs is a fourth, Δ(g·z) = ḡ·Δz + z̄·Δg; the scale of a norm before W_O responds like that of any norm.
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
    """Return the secant of one layer's attention, from its input to its output, and the error of its scores.

    Args:
        of_a, of_b: the inputs of its parts.
        heads: keep only these.

    Returns:
        The map, and the largest error of a probability in the two patterns recomputed from the scores.

    Raises:
        UnsupportedModelError: the attention scores cannot be read.
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
    """Return the change of a layer's scores or patterns through its queries, and through its keys and sinks.

    These are the outputs of heads with one-hot values: ``[.., d_model] -> [.., (head key)]`` at every query.

    Args:
        of: ``"pattern"``, or ``"score"``: before a soft cap, ALiBi and the softmax.

    Raises:
        UnsupportedModelError: the attention scores cannot be read.
    """
    scores = _scores(a, b, layer)
    secant, constants = scores.one_hot(of)
    offsets = [Offset(vectors, f"L{layer}.{name}") for name, vectors in constants.items()]
    by_query = Chain((*scores.queries.stages, *scores.rotation, QueryResponse.of(secant)))
    return by_query, Chain((*scores.keys.stages, *scores.rotation, KeyResponse(secant), *offsets))


def _scores(a: BlockMaps, b: BlockMaps, layer: int) -> TwoScores:
    """Return the scores of both runs of a layer.

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
    """Return the scores of two runs, by the reading of the first run, or of the second if the first is ambiguous.

    Several readings give uniform attention, for instance over a repeated token. If each run has one token, all readings
    agree, and only sinks distinguish them.

    Args:
        queries, keys: before rotation.
        cross: the inputs of cross-attention in either run.

    Raises:
        UnsupportedModelError: neither reading gives both patterns; explains why for the first.
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
            "attention is uniform and does not show how its scores are computed. Compare with a run whose stream is "
            "not zero."
        )
    raise refusals[0]


def _with_bias_of(maps: BlockMaps, layer: int, reading: ScoreReading, pos: int) -> ScoreReading:
    """Return a reading with the relative position biases of one run's model, if it has any."""
    if reading.relative is None:
        return reading
    return replace(reading, relative=relative_bias(maps, layer, pos))


def _reading_of_one_token(
    a: BlockMaps, b: BlockMaps, layer: int, queries: Change, keys: Change, stated: ScoreReading
) -> ScoreReading:
    """Return the first known reading of one-token prompts with the same sinks for all of them, else the stated one."""
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
    """Return the mean values of two runs."""
    return rearrange(upcast(values.mean), "b p (h d) -> b h p d", h=kv_heads)


def value_secant(
    weights: list[AttentionWeights],
    read: Change,
    name: Callable[[str], str],
    values: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Change:
    """Return the values as a function of attention's input, through a norm if there is one.

    Args:
        weights: those of either run.
        read: the input of attention.
        name: returns the full name of a matrix.
        values: the values in either run if they are known; None computes them.

    Raises:
        UnsupportedModelError: the two runs have values of different forms.
    """
    inner_a, inner_b = (weights_of.inner_values for weights_of in weights)
    if inner_a is None and inner_b is None:
        plain_a, plain_b = map(_values, weights)
        return read.linear(plain_a, plain_b, name("W_V"), known(*values))
    if inner_a is None or inner_b is None or (inner_a.out is None) != (inner_b.out is None):
        raise UnsupportedModelError(f"difference: the values of {name('attention')} have different forms.")
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
    """Return the routes to the heads' outputs, and these, after a gate, which adds a route; unchanged without a gate.

    Args:
        weights: those of either run.
        routes: the routes to the heads' outputs.
        z: the heads' outputs.
        read: the input of attention.
        name: the name of the gate's matrix.
        only: selects the heads to keep.
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
    """Return the map from the heads' outputs to attention's output: a norm, if there is one, and W_O.

    Raises:
        UnsupportedModelError: the two runs have different forms.
    """
    norm_a, norm_b = (weights_of.output_factor for weights_of in weights)
    if type(norm_a) is not type(norm_b):
        raise UnsupportedModelError(f"difference: the norms before {name} have different forms.")
    if isinstance(norm_a, InverseScale) and isinstance(norm_b, InverseScale):
        z = z.over(norm_a.norm.scale_of(z.a), norm_b.norm.scale_of(z.b))
    out_a, out_b = (Linear(weights_of.W_O, weights_of.b_O) for weights_of in weights)
    return replace(z, a=only(z.a), b=only(z.b)).written(out_a, out_b, name)


def of_heads(
    z: Float[Tensor, "batch pos width"], n_heads: int, heads: Collection[int] | None
) -> Float[Tensor, "batch pos width"]:
    """Set all but some heads' vectors to zero; None keeps all."""
    if heads is None:
        return z
    keep = torch.zeros(n_heads, dtype=z.dtype, device=z.device)
    keep[list(heads)] = 1
    return z * keep.repeat_interleave(z.shape[-1] // n_heads)


def _projection_secants(a: BlockMaps, b: BlockMaps, layer: int) -> tuple[Change, Change]:
    """Return queries and keys before rotation: their matrices, and their norms with responding scales.

    The difference of two shortformers' positions, added to the input of queries and keys, is called ``"W_pos"``.
    """
    before = a.layouts[layer].attn.before
    added = [added_positions(maps) for maps in (a, b)]
    projections = [score_projections(maps, layer, before, of_run) for maps, of_run in zip((a, b), added, strict=True)]
    reads = [Chain((Identity(), *of_queries.reads)) for of_queries, _ in projections]  # keys have the same input
    x_a, x_b = (upcast(side_read(maps, layer)) for maps in (a, b))
    read = Change(reads[0](x_a), reads[1](x_b))
    if added[0] is not None and added[1] is not None and not same(*added):
        read = replace(read, stages=(Offset(upcast(added[0]) - upcast(added[1]), "W_pos"),))
    (query_a, key_a), (query_b, key_b) = projections
    queries = projected_secant(read, query_a, query_b, f"L{layer}.W_Q", f"L{layer}.q_norm")
    return queries, projected_secant(read, key_a, key_b, f"L{layer}.W_K", f"L{layer}.k_norm")


def projected_secant(read: Change, a: HeadProjection, b: HeadProjection, name: str, norm_name: str) -> Change:
    """Return attention's input after one projection and its norm, and through the latent before it if there is one."""
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
    """Set the outputs of other heads to zero."""
    keep = torch.zeros(mixing.n_heads, dtype=torch.bool, device=mixing.pattern.device)
    keep[list(heads)] = True
    mixing = replace(mixing, pattern=mixing.pattern * keep[:, None, None])
    return mixing, replace(secant, weights=secant.weights * keep[:, None])
