"""The secant of a layer's attention: what its heads write changes through values, queries and keys.

    Δz_i = Σ_k P̄_ik·Δv_k + Σ_k ΔP_ik·v̄_k,    ΔP by the softmax's secant from Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k)

so that attention is the sum of three linear maps of what it reads: one by values, one by queries, one by keys.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Attention, Chain, Diagonal, Linear, Sum, grouped_products
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import (
    KeyResponse,
    QueryResponse,
    Rotation,
    ScoreSecant,
    linear_secant,
    logarithmic_mean,
    scale_response,
    slope,
)
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import derivative
from tensorlens_tl.passes.attention_scores import (
    HeadProjection,
    ScoreReading,
    added_positions,
    pattern_error,
    score_projections,
    score_reading,
)
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.difference.values import BlockValues


@dataclass(frozen=True, eq=False)
class _Run:
    """One layer's attention in one run: the frozen maps, what was read, and how scores follow from it."""

    maps: BlockMaps
    values: BlockValues
    reading: ScoreReading

    def raw(self, side: int, layer: int) -> Float[Tensor, "batch pos width"]:
        """Queries (0) or keys (1) before their own norm."""
        return self.reading.projections[side].raw(self.maps.capture.resid_read(layer))


def attention_secant(
    a: BlockMaps, b: BlockMaps, layer: int, of_a: BlockValues, of_b: BlockValues, heads: Collection[int] | None = None
) -> Chain:
    """The secant of one layer's attention, from what it reads to what it writes.

    Args:
        a, b: the two runs.
        layer: which block.
        of_a, of_b: what its parts read.
        heads: keep only these.

    Raises:
        UnsupportedModelError: attention scores that are not read.
    """
    weights_a, weights_b = (maps.view.blocks[layer].attention for maps in (a, b))
    name = partial("L{}.{}".format, layer)
    reading = score_reading(a, layer)
    runs = (_Run(a, of_a, reading), _Run(b, of_b, same_reading(reading, b, layer)))
    values_a = Linear(weights_a.W_V, weights_a.b_V)
    values_b = Linear(weights_b.W_V, weights_b.b_V)
    by_value = linear_secant(values_a, values_b, of_a.attention, of_b.attention, name("W_V"))
    patterns = [upcast(maps.capture.pattern(layer)) for maps in (a, b)]
    mean = (values_a(upcast(of_a.attention)) + values_b(upcast(of_b.attention))) / 2
    mean_values = rearrange(mean, "b p (h d) -> b h p d", h=weights_a.kv_heads)
    secant = _score_secant(runs, layer, patterns, mean_values)
    mixing = Attention(((patterns[0] + patterns[1]) / 2).to(of_a.attention), weights_a.kv_heads)
    if heads is not None:
        mixing, secant = _only(mixing, secant, heads)
    routes = Sum(
        (
            Chain((*by_value, mixing)),
            Chain((*_projection_secant(runs, 0, layer, name("W_Q")), QueryResponse.of(secant))),
            Chain((*_projection_secant(runs, 1, layer, name("W_K")), KeyResponse(secant))),
        )
    )
    outs = (Linear(weights_a.W_O, weights_a.b_O), Linear(weights_b.W_O, weights_b.b_O))
    return Chain((routes, *linear_secant(*outs, of_a.heads, of_b.heads, name("W_O"))))


def same_reading(reading: ScoreReading, maps: BlockMaps, layer: int) -> ScoreReading:
    """The other run's scores, made in the same way.

    Raises:
        UnsupportedModelError: they do not give its pattern.
    """
    before = maps.layouts[layer].attn.before
    projections = score_projections(maps, layer, before, added_positions(maps))
    x = maps.capture.resid_read(layer)
    query, key = (projection.held(x) for projection in projections)
    other = replace(reading, query=query, key=key, projections=projections)
    error = pattern_error(other, maps, layer)
    if not error <= maps.tolerance:
        raise UnsupportedModelError(
            f"difference: blocks.{layer} of this {maps.view.description} makes its attention scores in one way in the "
            f"first run and in another in the second (its pattern is off by {error:.1e}). Freeze both runs without "
            "other hooks, or ask about each by itself."
        )
    return replace(other, error=error)


def _projection_secant(runs: tuple[_Run, _Run], side: int, layer: int, name: str) -> list[AffineMap]:
    """The secant of queries (0) or keys (1): their matrix, their norm with its scale responding, and their rotation."""
    a, b = runs
    projections = [run.reading.projections[side] for run in runs]
    linears = (projections[0].linear, projections[1].linear)
    stages = list(linear_secant(*linears, a.values.attention, b.values.attention, name))
    if projections[0].norm is not None:
        stages.append(_norm_secant(projections, [run.raw(side, layer) for run in runs]))
    if a.reading.rotation is not None:
        stages.append(Rotation.of(a.reading.rotation))
    return stages


def _norm_secant(projections: list[HeadProjection], raws: list[Float[Tensor, "batch pos width"]]) -> Sum:
    """The secant of the RMSNorm of queries or keys."""
    groups = projections[0].groups
    raw_a, raw_b = map(upcast, raws)
    scale_a = projections[0].scale(raw_a)
    scale_b = projections[1].scale(raw_b)
    gain = projections[0].gain(raw_a)
    mean_inverse = ((1 / scale_a + 1 / scale_b) / 2).repeat_interleave(raw_a.shape[-1] // groups, dim=-1)
    held = Diagonal((mean_inverse * gain).to(raws[0]))
    return Sum((held, scale_response(raw_a, raw_b, scale_a, scale_b, gain, groups)))


def _score_secant(
    runs: tuple[_Run, _Run],
    layer: int,
    patterns: list[Float[Tensor, "batch head query key"]],
    mean_values: Float[Tensor, "batch kv pos d_head"],
) -> ScoreSecant:
    """The secant of softmax and scores together."""
    reading = runs[0].reading
    vectors = [run.reading.vectors(upcast(run.maps.capture.resid_read(layer))) for run in runs]
    raw_scores = [reading.scale * grouped_products(*pair) for pair in vectors]
    allowed = (patterns[0] > 0) | (patterns[1] > 0)
    finished = [reading.finished(scores).masked_fill(~allowed, -torch.inf) for scores in raw_scores]
    sinks = _sink_scores(finished, patterns, max(run.maps.tolerance for run in runs))
    logs, rests = zip(*(_log_pattern(scores, sinks) for scores in finished), strict=True)
    scale: Tensor | float = reading.scale
    if reading.soft_cap is not None:
        cap = partial(_capped, cap=reading.soft_cap)
        scale = scale * slope(cap, partial(derivative, cap), *raw_scores)
    (q_a, k_a), (q_b, k_b) = vectors
    repeated = partial(torch.repeat_interleave, repeats=reading.heads // reading.kv_heads, dim=1)
    keys = repeated((k_a + k_b) / 2)
    of_kv_heads = reading.heads // mean_values.shape[1]
    values = mean_values.repeat_interleave(of_kv_heads, dim=1)
    return ScoreSecant.of(logs, logarithmic_mean(*rests), scale, (q_a + q_b) / 2, keys, values, reading.kv_heads)


def _capped(scores: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(scores / cap)


def _sink_scores(
    scores: list[Float[Tensor, "batch head query key"]],
    patterns: list[Float[Tensor, "batch head query key"]],
    tolerance: float,
) -> Float[Tensor, "head"] | None:
    """Each head's score of its attention sink, from the row that it takes the largest share of; None without sinks."""
    sums = torch.cat([pattern.sum(-1).transpose(0, 1).flatten(1) for pattern in patterns], dim=1)
    real = sums > 0
    if bool(((1 - sums).abs() <= tolerance)[real].all()):
        return None
    totals = torch.cat([row.logsumexp(-1).transpose(0, 1).flatten(1) for row in scores], dim=1)
    best = sums.masked_fill(~real, torch.inf).min(dim=1, keepdim=True)
    share = best.values
    total = totals.gather(1, best.indices)
    return (total + torch.log1p(-share) - torch.log(share))[:, 0]


def _log_pattern(
    scores: Float[Tensor, "batch head query key"], sinks: Float[Tensor, "head"] | None
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query"]]:
    """ln of the pattern and of what a sink takes; −inf of keys, and rows, that are masked."""
    total = scores.logsumexp(-1)
    rest = torch.full_like(total, -torch.inf)
    if sinks is not None:
        with_sink = torch.logaddexp(total, sinks[:, None])
        rest = sinks[:, None] - with_sink
        total = with_sink
    logs = scores - total.masked_fill(total == -torch.inf, 0.0)[..., None]
    return logs, rest


def _only(mixing: Attention, secant: ScoreSecant, heads: Collection[int]) -> tuple[Attention, ScoreSecant]:
    """Other heads give nothing."""
    keep = torch.zeros(mixing.n_heads, dtype=torch.bool, device=mixing.pattern.device)
    keep[list(heads)] = True
    mixing = replace(mixing, pattern=mixing.pattern * keep[:, None, None])
    return mixing, replace(secant, weights=secant.weights * keep[:, None])
