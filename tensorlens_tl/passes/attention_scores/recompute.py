"""Patterns that are not stored: recomputed from queries and keys when they are needed, and proved while the pass runs.

The model computes a pattern for every layer anyway. A hook reads each of them and chooses the reading of the layer's
scores (`tensorlens_tl.passes.attention_scores.reading`) that fits it. The pattern recomputed from queries and keys is
then compared with the model's, a few queries at a time, and the model's is dropped. What is stored of a layer is linear
in the number of tokens: queries, keys, and the sum of each row of the pattern, which is less than 1 with attention
sinks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import HeldScores, query_chunks
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, ModelPoints, check_finite, hook_points, in_this_thread, keep_in
from tensorlens_tl.models import ModelView, candidates
from tensorlens_tl.models.lifecycle import WeightState
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers import is_delta
from tensorlens_tl.passes.attention_scores.fitting import sampled_rows
from tensorlens_tl.passes.attention_scores.reading import ScoreReading, added_positions, score_candidates
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.proof import check_pattern

PATTERN = "hook_pattern"
SHOWN = (("hook_rot_q", "hook_rot_k"), ("hook_q", "hook_k"))
"""Hook points where a model may show its final queries and keys. Those computed from the weights are right to rounding;
in half precision, and with norms that compute in float32, only the model's own give its pattern to the last digits."""

ENOUGH = 0.01
"""The share of the tolerance below which no other reading is tried."""


def refuse_unreadable(view: ModelView) -> None:
    """Refuse, before any work, a model with a layer whose pattern is known not to be recomputed.

    Raises:
        UnsupportedModelError: names the layer and the cause.
    """
    if view.is_encoder_decoder:
        raise _refusal(view, "an encoder–decoder's patterns (cross-attention, relative positions) are not recomputed")
    for block in view.blocks:
        if block.mixer is not None:
            if is_delta(innermost(block.module._modules[block.parts.mixer_name])):
                raise _refusal(view, f"{block.name} mixes by the gated delta rule, whose own pattern is quadratic")
            continue
        try:
            block.require_query_key()
        except UnsupportedModelError as error:
            raise _refusal(view, str(error).rstrip(".")) from error


def _refusal(view: ModelView, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"freeze(patterns='recompute') of this {view.description}: {why}. Use patterns='keep', which holds every "
        "pattern as the model computes it."
    )


class PatternReader:
    """Reads every layer's pattern while the pass runs, and stores what it can be recomputed from.

    Attributes:
        activations: those that are no pattern, by hook-point name.
        scores: what each pattern is recomputed from, by its hook point's name.

    Args:
        view, points, prompt: as of a `Capture`.
        store: ``"cpu"`` keeps activations, queries and keys off the device.
        tolerance: the largest error that a dtype allows.
    """

    def __init__(
        self,
        view: ModelView,
        points: ModelPoints,
        prompt: Prompt,
        store: str,
        tolerance: Callable[[torch.dtype], float],
    ) -> None:
        self.activations: dict[str, Tensor] = {}
        self.scores: dict[str, HeldScores] = {}
        self.maps = BlockMaps(Capture(view, points, prompt, self.activations, WeightState.of(view.model)))
        self.store = store
        self.tolerance = tolerance
        self.layers = {block.pattern: layer for layer, block in enumerate(points.blocks) if block.pattern is not None}
        self.added = added_positions(self.maps)
        self._model_vectors: dict[str, Tensor] = {}

    def hooks(self) -> list[FwdHook]:
        """Hooks that read the final queries and keys, where the model shows them."""

        def read(tensor: Tensor, *, hook: Any, name: str) -> None:
            self._model_vectors[name] = tensor.detach().to(self.maps.mask.device)

        known = hook_points(self.maps.view.model)
        names = [pattern.replace(PATTERN, shown) for pattern in self.layers for pair in SHOWN for shown in pair]
        return [(name, in_this_thread(partial(read, name=name))) for name in names if name in known]

    def see(self, name: str, activation: Tensor) -> None:
        """Store an activation, or of a pattern what it is recomputed from.

        Raises:
            NumericalError, UnsupportedModelError: see `check_pattern` and `_read_pattern`.
        """
        if name in self.layers:
            self._read_pattern(name, activation.to(self.maps.mask.device), activation.device)
        else:
            keep_in(self.activations, self.store, name, activation)

    def _read_pattern(self, name: str, pattern: Float[Tensor, "batch head query key"], device: torch.device) -> None:
        """Find what a layer's pattern is recomputed from, and prove that all of it is; it is stored on a device.

        Raises:
            UnsupportedModelError: no known reading of the scores gives the pattern; names the smallest error.
        """
        layer = self.layers[name]
        tolerance = self.tolerance(self.maps.capture.resid_pre(layer).dtype)
        captured = self.maps.points.blocks[layer].captured
        check_finite({name: self.activations[name] for name in captured if name in self.activations})
        if not bool(self.maps.mask.all()):
            check_pattern(name, pattern, self.maps.mask, self.maps.mask)
        check_finite({name: pattern})
        best = self._best(layer, pattern, ENOUGH * tolerance)
        self._model_vectors.clear()
        error = float("nan")
        if best is not None:
            error = best.error
        if best is not None and error <= tolerance:
            chunks = query_chunks(pattern.shape[2], pattern[:, :, :1].numel() * pattern.element_size())
            error = max((self._error(best, queries, pattern) for queries in chunks), default=0.0)
        if best is None or not error <= tolerance:
            raise _refusal(
                self.maps.view,
                f"the pattern of blocks.{layer} is not the one that its queries and keys give (relative error of a "
                f"row: {error:.1e}; allowed {tolerance:.0e}); relative position biases, a mask that is "
                "neither causal nor a window, or another hook on the model would explain it",
            )
        place = torch.device("cpu") if self.store == "cpu" else device
        tensors = {field: getattr(best, field).to(place) for field in ("queries", "keys", "sums", "real")}
        self.scores[name] = replace(best, **tensors, device=device, error=error)

    def _best(self, layer: int, pattern: Tensor, enough: float) -> HeldScores | None:
        """The candidate with the smallest error on a few rows, or the first whose error is small enough."""
        best: HeldScores | None = None
        for candidate in self._candidates(layer, pattern):
            if best is None or not best.error <= candidate.error:
                best = candidate
            if best.error <= enough:
                break
        return best

    def _candidates(self, layer: int, pattern: Tensor) -> Iterator[HeldScores]:
        """What the pattern may be recomputed from, each candidate with its error on a few rows."""
        rows = sampled_rows(pattern)
        sums = pattern.sum(-1)
        window = cache(partial(_reach, pattern, self.maps.mask))  # measured at most once, and only if it is needed
        for reading in self._readings(layer):
            for unmasked in self._unmasked(reading, layer, sums):
                for back, ahead in _reaches(window):
                    candidate = replace(unmasked, back=back, ahead=ahead)
                    yield replace(candidate, error=self._error(candidate, rows, pattern))

    def _readings(self, layer: int) -> Iterator[ScoreReading]:
        """The known ways in which the layer may compute its scores."""
        block = self.maps.view.blocks[layer]
        layouts = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)
        scales = self.maps.points.blocks[layer].scales
        for before in dict.fromkeys(layout.attn.before for layout in layouts):
            if before is None or scales[before] in self.activations:  # else it is a norm that comes after attention
                yield from score_candidates(self.maps, layer, before, self.added, alibi_positions=2)

    def _unmasked(
        self, reading: ScoreReading, layer: int, sums: Float[Tensor, "batch head query"]
    ) -> Iterator[HeldScores]:
        """Scores of a reading before any mask: of the queries and keys that the model showed, then of the reading's."""
        name = self.maps.points.blocks[layer].pattern
        assert name is not None
        shape = (len(sums), sums.shape[2])
        shown = [tuple(self._model_vectors.get(name.replace(PATTERN, end)) for end in ends) for ends in SHOWN]
        pairs = [
            (q.transpose(1, 2), k.transpose(1, 2))
            for q, k in shown
            if q is not None and k is not None and q.ndim == k.ndim == 4 and q.shape[:2] == k.shape[:2] == shape
        ]
        for queries, keys in pairs[:1]:
            if queries.shape[1] == reading.heads and keys.shape[1] % reading.kv_heads == 0:
                # some models show a key-value head once for every query head that reads it
                yield self._scores(queries, keys[:, :: keys.shape[1] // reading.kv_heads], reading, sums)
        yield self._scores(*reading.vectors(self.maps.capture.resid_read(layer)), reading, sums)

    def _scores(self, queries: Tensor, keys: Tensor, reading: ScoreReading, sums: Tensor) -> HeldScores:
        return HeldScores(
            queries,
            keys,
            sums,
            self.maps.mask,
            reading.scale,
            reading.soft_cap,
            None if reading.alibi is None else reading.alibi[:, -1, 0],
            None,
            None,
            sums.device,
        )

    def _error(self, scores: HeldScores, queries: slice | Tensor, pattern: Tensor) -> float:
        """The largest relative error of some rows of real queries."""
        at = torch.arange(pattern.shape[2], device=pattern.device)[queries]
        expected = pattern[:, :, queries]
        rows = scores.rows(at.expand(len(pattern), -1), expected.dtype)
        rows = torch.nn.functional.pad(rows, (0, expected.shape[-1] - rows.shape[-1]))
        return relative_error(rows.transpose(1, 2), expected.transpose(1, 2), self.maps.mask[:, queries])


def _reaches(window: Callable[[], tuple[int, int]]) -> Iterator[tuple[int | None, int | None]]:
    """How far before and after its query a key may lie: causal, open, and the window that the pattern shows."""
    yield None, 0
    yield None, None
    yield window()


def _reach(pattern: Tensor, mask: Tensor) -> tuple[int, int]:
    """How far before and after a real query some key has weight."""
    back = 0
    ahead = 0
    for at in query_chunks(pattern.shape[2], pattern[:, :, :1].numel() * pattern.element_size()):
        weighted = ((pattern[:, :, at] > 0) & mask[:, None, at, None]).flatten(0, 1).any(0)
        query, key = weighted.nonzero(as_tuple=True)
        if len(query):
            distance = query + at.start - key
            back = max(back, int(distance.max()))
            ahead = max(ahead, -int(distance.min()))
    return back, ahead
