"""The attention scores of a layer in two runs, and the joint secant of scores and softmax.

The softmax of either run is computed once: its logarithms give the logarithmic means, its values are compared with the
model's own pattern.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import grouped_products
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.secants import Change, Rotation, ScoreSecant, logarithmic_mean, mean_share, same, slope
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import derivative
from tensorlens_tl.passes.attention_scores import ScoreReading, unread
from tensorlens_tl.passes.block_maps import BlockMaps


@dataclass(frozen=True, eq=False)
class RunScores:
    """One run's attention scores, and tensors computed from them.

    Attributes:
        reading: how the scores are computed.
        queries, keys: as they enter their product.
        raw: before soft cap and position biases.
        capped: after the soft cap, if there is one.
        totals: the logsumexp over unmasked keys; −inf for rows without any.
        logs: the log-softmax over unmasked keys; −inf for others.
        shares: the softmax.
    """

    reading: ScoreReading
    queries: Float[Tensor, "batch head query d_head"]
    keys: Float[Tensor, "batch kv key d_head"]
    raw: Float[Tensor, "batch head query key"]
    capped: Float[Tensor, "batch head query key"]
    totals: Float[Tensor, "batch head query"]
    logs: Float[Tensor, "batch head query key"]
    shares: Float[Tensor, "batch head query key"]

    @classmethod
    def of(
        cls, reading: ScoreReading, queries: Tensor, keys: Tensor, masked: Bool[Tensor, "batch head query key"]
    ) -> "RunScores":
        """Compute the scores from queries and keys before rotation; a `masked` key has no weight in either run."""
        q, k = reading.rotated(queries, keys)
        raw = grouped_products(reading.scale * q, k)
        capped = reading.capped(raw)
        logs = upcast(reading.placed(capped)).masked_fill(masked, -torch.inf)
        largest = logs.amax(-1, keepdim=True)
        nowhere = largest == -torch.inf
        logs -= largest.masked_fill(nowhere, 0.0)
        shares = logs.exp()
        sums = shares.sum(-1, keepdim=True).masked_fill_(nowhere, 1.0)
        logs -= sums.log()
        return cls(reading, q, k, raw, capped, (largest + sums.log())[..., 0], logs, shares.div_(sums))

    def error(self, pattern: Float[Tensor, "batch head query key"]) -> float:
        """Return the largest error of a probability against the model's own pattern, keeping its row sums."""
        return float((self.shares * pattern.sum(-1, keepdim=True)).sub_(pattern).abs_().max())

    def log_pattern(
        self, sinks: Float[Tensor, "head"] | None
    ) -> tuple[
        Float[Tensor, "batch head query key"], Float[Tensor, "batch head query key"], Float[Tensor, "batch head query"]
    ]:
        """Return ln of the pattern, the pattern, and ln of a sink's share; −inf for masked keys and rows."""
        if sinks is None:
            return self.logs, self.shares, torch.full_like(self.totals, -torch.inf)
        with_sink = torch.logaddexp(self.totals, sinks[:, None])
        beside = (self.totals - with_sink)[..., None]
        return self.logs + beside, self.shares * beside.exp(), sinks[:, None] - with_sink


@dataclass(frozen=True, eq=False)
class TwoScores:
    """The attention scores of a layer in two runs.

    Attributes:
        a, b: the scores of either run.
        queries, keys: before rotation.
        mean_pattern: the mean pattern, zero at queries that are padding.
        sinks: the scores of either run's attention sinks; the same tensor for one model.
        error: the largest error of a probability in the two patterns recomputed from the scores.
    """

    a: RunScores
    b: RunScores
    queries: Change
    keys: Change
    mean_pattern: Float[Tensor, "batch head query key"]
    sinks: tuple[Float[Tensor, "head"] | None, Float[Tensor, "head"] | None]
    error: float

    @classmethod
    def of(
        cls,
        a: BlockMaps,
        b: BlockMaps,
        layer: int,
        readings: tuple[ScoreReading, ScoreReading],
        queries: Change,
        keys: Change,
        *,
        crossing: bool = False,
    ) -> "TwoScores":
        """Compute the scores, and compare either run's softmax with its pattern.

        Args:
            a, b: the two runs.
            layer: the block.
            readings: how either run computes its scores; two models each have their own relative positions.
            queries, keys: before rotation.
            crossing: whether the scores are those of cross-attention.

        Raises:
            UnsupportedModelError: the scores do not give the pattern, or only one of two models has sinks.
        """
        patterns = _patterns(a, b, layer, crossing=crossing)
        mean_pattern = (patterns[0] + patterns[1]).div_(2)
        masked = mean_pattern == 0
        in_a = RunScores.of(readings[0], queries.a, keys.a, masked)
        in_b = RunScores.of(readings[1], queries.b, keys.b, masked)
        errors = (in_a.error(patterns[0]), in_b.error(patterns[1]))
        _check_errors(a, b, layer, errors, crossing=crossing)
        of_one_model = a.capture.model is b.capture.model
        sinks = _sinks((in_a, in_b), patterns, of_one_model, max(a.tolerance, b.tolerance))
        if (sinks[0] is None) != (sinks[1] is None):
            raise UnsupportedModelError(
                f"difference: {a.view.blocks[layer].name} has attention sinks in only one of the two models, whose "
                "effect is not a finite sum. Explain each run separately."
            )
        return cls(in_a, in_b, queries, keys, mean_pattern, sinks, max(errors))

    @property
    def rotation(self) -> tuple[Rotation, ...]:
        """The rotation of queries, or keys, before their product."""
        rotation = self.a.reading.rotation
        return () if rotation is None else (Rotation.of(rotation),)

    @property
    def relative_change(self) -> Float[Tensor, "head query key"] | None:
        """The difference of two models' relative positions; None if there is none."""
        first, second = self.a.reading.relative, self.b.reading.relative
        if first is None or second is None or same(first, second):
            return None
        return first - second

    def one_hot(self, of: str) -> tuple[ScoreSecant, dict[str, Float[Tensor, "batch query width"]]]:
        """Return the secant of heads with one-hot values, whose outputs are their patterns, or their scores.

        Args:
            of: ``"pattern"``, or ``"score"``: before a soft cap, ALiBi and the softmax.

        Returns:
            The secant, ``[.., d_head] -> [.., (head key)]`` of every query, and constants as in `secant`.
        """
        batch, _, _, keys = self.mean_pattern.shape
        secant, constants = self.secant(torch.eye(keys).to(self.mean_pattern).expand(batch, 1, -1, -1))
        if of == "pattern":
            return secant, constants
        weights = torch.full_like(secant.weights, self.a.reading.scale)
        secant = replace(secant, weights=weights, centres=torch.zeros_like(secant.centres))
        change = self.relative_change
        if change is None:
            return secant, {}
        return secant, {"relative_bias": change.to(weights).transpose(0, 1).flatten(-2).expand(batch, -1, -1)}

    def secant(
        self, mean_values: Float[Tensor, "batch kv key d_value"]
    ) -> tuple[ScoreSecant, dict[str, Float[Tensor, "batch query width"]]]:
        """Return the joint secant of softmax and scores, and the effects of differing constants on the heads' outputs.

        Args:
            mean_values: the heads' values, the mean of both runs.

        Returns:
            The secant, and by name the effects on the heads' outputs of differing sinks or relative biases of two
            models.
        """
        reading = self.a.reading
        log_a, share_a, rest_a = self.a.log_pattern(self.sinks[0])
        log_b, share_b, rest_b = self.b.log_pattern(self.sinks[1])
        means = mean_share(log_a, log_b).mul_(torch.maximum(share_a, share_b))
        rest = logarithmic_mean(rest_a, rest_b)
        scale: Tensor | float = reading.scale
        if reading.soft_cap is not None:
            of_raw = partial(derivative, reading.capped)
            scale = scale * slope(of_raw, (self.a.raw, self.b.raw), (self.a.capped, self.b.capped))
        repeated = partial(torch.repeat_interleave, dim=1)
        mean_keys = repeated((self.a.keys + self.b.keys) / 2, reading.heads // reading.kv_heads)
        mean_queries = (self.a.queries + self.b.queries) / 2
        values = repeated(mean_values, reading.heads // mean_values.shape[1])
        secant = ScoreSecant.of(means, rest, scale, mean_queries, mean_keys, values, reading.kv_heads)
        constants: dict[str, Tensor] = {}
        sinks = self.sinks
        if sinks[0] is not sinks[1] and sinks[0] is not None and sinks[1] is not None:
            taken = (rest * (sinks[0] - sinks[1])[:, None]).transpose(1, 2)[..., None]  # from every key in proportion
            constants["sinks"] = -(taken * secant.centres).flatten(-2)
        change = self.relative_change
        if change is not None:
            moved = (means * change.to(means)).transpose(1, 2)
            by_key = torch.einsum("bqhk,bhkd->bqhd", moved, values)
            constants["relative_bias"] = (by_key - moved.sum(-1, keepdim=True) * secant.centres).flatten(-2)
        return secant, constants


def _patterns(
    a: BlockMaps, b: BlockMaps, layer: int, *, crossing: bool
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query key"]]:
    """Return the patterns of two runs, zero at queries that are padding, whose positions and scores may differ."""
    pattern_a, pattern_b = (
        upcast(maps.capture.cross_pattern(layer) if crossing else maps.capture.pattern(layer)) for maps in (a, b)
    )
    real = a.capture.mask[:, slice(*a.capture.side(layer))]
    if bool(real.all()):
        return pattern_a, pattern_b
    padded = ~real[:, None, :, None]
    return pattern_a.masked_fill(padded, 0.0), pattern_b.masked_fill(padded, 0.0)


def _check_errors(a: BlockMaps, b: BlockMaps, layer: int, errors: tuple[float, float], *, crossing: bool) -> None:
    """Refuse runs whose patterns do not follow from their scores.

    Raises:
        UnsupportedModelError: names the run.
    """
    if errors[0] <= a.tolerance and errors[1] <= b.tolerance:
        return
    name = b.view.blocks[layer].name
    for maps, error in zip((a, b), errors, strict=True):
        if maps.capture.hooks_in(name):
            raise unread(maps, layer, error, crossing=crossing)
    if not errors[0] <= a.tolerance:
        raise unread(a, layer, errors[0], crossing=crossing)
    raise UnsupportedModelError(
        f"difference: {name} of this {b.view.description} computes its attention scores in one way in the first run "
        f"and in another in the second (its pattern is off by {errors[1]:.1e}). Freeze both runs without other hooks, "
        "or explain each run separately."
    )


def _sinks(
    scores: tuple[RunScores, RunScores],
    patterns: tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query key"]],
    of_one_model: bool,
    tolerance: float,
) -> tuple[Float[Tensor, "head"] | None, Float[Tensor, "head"] | None]:
    """Return the scores of either run's sinks; the same tensor for one model."""
    totals = [run.totals for run in scores]
    if of_one_model:
        shared = _sink_scores(totals, [*patterns], tolerance)
        return shared, shared
    of_a, of_b = (_sink_scores([row], [pattern], tolerance) for row, pattern in zip(totals, patterns, strict=True))
    return of_a, of_b


def _sink_scores(
    totals: list[Float[Tensor, "batch head query"]],
    patterns: list[Float[Tensor, "batch head query key"]],
    tolerance: float,
) -> Float[Tensor, "head"] | None:
    """Return each head's sink score, from the row with the sink's largest share; None without sinks."""
    sums = torch.cat([pattern.sum(-1).transpose(0, 1).flatten(1) for pattern in patterns], dim=1)
    real = sums > 0
    if bool(((1 - sums).abs() <= tolerance)[real].all()):
        return None
    beside = torch.cat([row.transpose(0, 1).flatten(1) for row in totals], dim=1)
    best = sums.masked_fill(~real, torch.inf).min(dim=1, keepdim=True)
    share = best.values.clamp_max(1)  # a row without a sink may round above 1
    total = beside.gather(1, best.indices)
    return (total + torch.log1p(-share) - torch.log(share))[:, 0]
