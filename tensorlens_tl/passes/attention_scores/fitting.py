"""Which reading of a layer's scores reproduces its pattern."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.passes.attention_scores.reading import (
    ALL,
    CrossStreams,
    HeadProjection,
    ScoreReading,
    added_positions,
    score_candidates,
    score_projections,
    side_read,
)
from tensorlens_tl.passes.block_maps import BlockMaps

SAMPLED_ROWS = 16
"""How many rows of a pattern decide between readings. The chosen reading is proved on all of them."""


def sampled_rows(pattern: Float[Tensor, "batch head query key"]) -> Int[Tensor, "row"]:
    """The queries that decide between readings, as far apart as there are."""
    length = pattern.shape[2]
    return torch.linspace(0, length - 1, min(SAMPLED_ROWS, length), device=pattern.device).long()


def score_reading(
    maps: BlockMaps,
    layer: int,
    vectors: tuple[Tensor, Tensor] | None = None,
    cross: CrossStreams | None = None,
    *,
    proved: bool = True,
) -> ScoreReading:
    """The reading of one layer's scores that reproduces its pattern.

    Args:
        maps: of the run.
        layer: which one.
        vectors: its queries and keys as of `projected`, where they are known.
        cross: as of `score_candidates`; then `vectors` are needed.
        proved: False leaves it to the caller to compare every row, where a few rows exclude all readings but one.

    Raises:
        UnsupportedModelError: no known reading does; says how near the best came.
    """
    crossing = cross is not None
    place = maps.layouts[layer].attn
    added = None
    if crossing:
        place = maps.layouts[layer].cross or place
    else:
        added = added_positions(maps)
    queries, keys = vectors or projected(maps, layer, score_projections(maps, layer, place.before, added))
    pattern = maps.capture.cross_pattern(layer) if crossing else maps.capture.pattern(layer)
    mask = maps.mask[:, slice(*maps.capture.side(layer))]
    error = partial(pattern_error, pattern=pattern, mask=mask, queries=queries, keys=keys)
    rows = sampled_rows(pattern)
    candidates = [
        replace(candidate, error=error(candidate, rows=rows))
        for candidate in score_candidates(maps, layer, place.before, added, cross=cross)
    ]
    possible = [candidate for candidate in candidates if candidate.error <= 2 * maps.tolerance]
    if len(possible) == 1 and not proved:
        return possible[0]
    candidates = _measured(candidates, error)
    best = min(candidates, key=lambda reading: reading.error, default=None)
    if best is None or not best.error <= maps.tolerance:
        nearest = min((candidate.error for candidate in candidates), default=float("nan"))
        raise unread(maps, layer, nearest, crossing=crossing)
    # what the pattern cannot tell apart (one token; nothing but uniform attention) goes to what the model states
    near = [reading for reading in candidates if reading.error <= 2 * best.error and reading is not best]
    if not near:
        return best
    scores = best.scores_of(queries, keys)
    size = 0.1 * float(scores.norm())
    unlike = [reading for reading in near if float((reading.scores_of(queries, keys) - scores).norm()) > size]
    if unlike and keys.shape[1] > 1:
        raise UnsupportedModelError(
            f"{_named(maps, layer, crossing)} of this {maps.view.description}: several ways to make its attention "
            f"scores reproduce its pattern equally well (off by {best.error:.1e} and {unlike[0].error:.1e}); it is too "
            "even to tell. Freeze a longer prompt, or use a wider dtype."
        )
    if unlike:
        return next(reading for reading in candidates if reading.error <= 2 * best.error)
    return best


def _measured(candidates: list[ScoreReading], error: Callable[[ScoreReading], float]) -> list[ScoreReading]:
    """The candidates that may be within twice the smallest error, in their order, with their errors on all rows.

    On some rows an error is no larger than on all: a candidate that is further off there than twice the best on all is
    not measured on the others.
    """
    best = float("inf")
    measured: dict[int, ScoreReading] = {}
    for number in sorted(range(len(candidates)), key=lambda number: _or_infinite(candidates[number].error)):
        if measured and not candidates[number].error <= 2 * best:
            break
        candidate = replace(candidates[number], error=error(candidates[number]))
        measured[number] = candidate
        best = min(best, _or_infinite(candidate.error))
    return [measured[number] for number in sorted(measured)]


def _or_infinite(error: float) -> float:
    """The error, infinite where scores are no numbers."""
    if math.isnan(error):
        return float("inf")
    return error


def unread(maps: BlockMaps, layer: int, error: float, *, crossing: bool = False) -> UnsupportedModelError:
    """The refusal of a layer whose nearest reading is off by so much."""
    inside = maps.capture.hooks_in(maps.view.blocks[layer].name)
    if inside:
        return UnsupportedModelError(
            f"{_named(maps, layer, crossing)} of this {maps.view.description}: its queries and keys do not give its "
            f"attention pattern (off by {error:.1e}). A hook at {' and '.join(inside)} may have changed what lies "
            "between them, which is not read: freeze without it."
        )
    return UnsupportedModelError(
        f"{_named(maps, layer, crossing)} of this {maps.view.description}: its attention scores cannot be read; no "
        f"known scale and position encoding reproduces its pattern (nearest: off by {error:.1e}). "
        "Relative position biases other than T5's and centred query norms are not supported."
    )


def _named(maps: BlockMaps, layer: int, crossing: bool) -> str:
    """Of which attention scores are."""
    name = maps.view.blocks[layer].name
    return f"{name}.cross_attn" if crossing else name


def projected(
    maps: BlockMaps, layer: int, projections: tuple[HeadProjection, HeadProjection]
) -> tuple[Float[Tensor, "batch pos width"], Float[Tensor, "batch pos kv_width"]]:
    """One layer's queries and keys before rotation, heads side by side."""
    x = side_read(maps, layer)
    query, key = projections
    return query.held(x)(x), key.held(x)(x)


def pattern_error(
    reading: ScoreReading,
    pattern: Float[Tensor, "batch head query key"],
    mask: Bool[Tensor, "batch query"],
    queries: Float[Tensor, "batch query width"],
    keys: Float[Tensor, "batch key kv_width"],
    rows: slice | Int[Tensor, "row"] = ALL,
) -> float:
    """The largest error of an attention probability. A row's own sum is kept: attention sinks take their share.

    Args:
        reading: how scores are computed.
        pattern: the model's own.
        mask: True at queries that are real tokens.
        queries, keys: before rotation, as of `projected`.
        rows: the queries that count.
    """
    shown = pattern[:, :, rows].to(queries.dtype)
    allowed = shown > 0
    scores = reading.finished(reading.scores_of(queries, keys, rows), rows).masked_fill(~allowed, -torch.inf)
    probabilities = torch.softmax(upcast(scores), dim=-1) * shown.sum(-1, keepdim=True)
    real = mask[:, None, rows, None] & allowed.any(-1, keepdim=True)
    return float((probabilities - shown).masked_fill(~real, 0.0).abs().max())
