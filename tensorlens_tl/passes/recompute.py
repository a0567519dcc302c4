"""Patterns that are not kept: recomputed from queries and keys when they are needed, and proved while the pass runs.

The model makes a pattern for every layer anyhow. Each is seen in a hook, a reading of the layer's scores
(`tensorlens_tl.passes.scores`) is chosen by it, and the pattern made from queries and keys is compared with it, a few
queries at a time; then it is dropped. What stays of a layer is linear in tokens: queries, keys, and what each row of
the pattern sums to, which is less than 1 with attention sinks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.algebra.recomputed import query_chunks
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, ModelPoints, check_finite, hook_points, in_this_thread
from tensorlens_tl.models.layouts import candidates
from tensorlens_tl.models.lifecycle import WeightState
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers import is_delta
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.held_scores import HeldScores
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.proof import check_pattern
from tensorlens_tl.passes.record import Record
from tensorlens_tl.passes.scores import ScoreReading, added_positions, score_candidates

PATTERN = "hook_pattern"
SHOWN = (("hook_rot_q", "hook_rot_k"), ("hook_q", "hook_k"))
"""Where a model may show queries and keys as they meet. Reading them from the weights is right to rounding; in half
precision, and beside norms that compute in float32, only the model's own give its pattern to the last digits."""

TRIED = 16
"""How many rows of a pattern decide between readings; all of them prove the one that is chosen."""

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
            if is_delta(innermost(block.module._modules[block.mixer_name])):
                raise _refusal(view, f"{block.name} mixes by the gated delta rule, whose own pattern is quadratic")
            continue
        try:
            _ = block.query_key
        except UnsupportedModelError as error:
            raise _refusal(view, str(error).rstrip(".")) from error


def _refusal(view: ModelView, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"freeze(patterns='recompute') of this {view.description}: {why}. Use patterns='keep', which holds every "
        "pattern as the model made it."
    )


class PatternReader:
    """Sees every layer's pattern while the pass runs, and keeps what it can be recomputed from.

    Attributes:
        kept: every other activation, by hook-point name.
        scores: what each pattern is recomputed from, by its hook point's name.

    Args:
        view, points, prompt: as of a `Record`.
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
        self.kept: dict[str, Tensor] = {}
        self.scores: dict[str, HeldScores] = {}
        self.record = Record(view, points, prompt, self.kept, WeightState.of(view.model))
        self.store, self.tolerance = store, tolerance
        self.layers = {block.pattern: layer for layer, block in enumerate(points.blocks) if block.pattern is not None}
        self.added = added_positions(self.record)
        self._seen: dict[str, Tensor] = {}

    def hooks(self) -> list[FwdHook]:
        """What sees queries and keys as they meet, where the model shows them."""

        def see(tensor: Tensor, *, hook: Any, name: str) -> None:
            self._seen[name] = tensor.detach()

        known = hook_points(self.record.model)
        names = [pattern.replace(PATTERN, shown) for pattern in self.layers for pair in SHOWN for shown in pair]
        return [(name, in_this_thread(partial(see, name=name))) for name in names if name in known]

    def see(self, name: str, activation: Tensor) -> None:
        """Keep an activation; of a pattern, what it is made from.

        Raises:
            NumericalError, UnsupportedModelError: see `check_pattern` and `_see_pattern`.
        """
        if name in self.layers:
            self._see_pattern(name, activation)
        else:
            self.kept[name] = activation.cpu() if self.store == "cpu" else activation

    def _see_pattern(self, name: str, pattern: Float[Tensor, "batch head query key"]) -> None:
        """Find what a layer's pattern is recomputed from, and prove that all of it is.

        Raises:
            UnsupportedModelError: no known way to make scores gives the pattern; says how near the best came.
        """
        layer, view = self.layers[name], self.record.view
        self.record.tolerance = self.tolerance(self.record.resid_pre(layer).dtype)
        check_finite({name: self.kept[name] for name in self.record.points.blocks[layer].captured if name in self.kept})
        if not bool(self.record.mask.all()):
            check_pattern(name, pattern, self.record.mask, self.record.mask)
        check_finite({name: pattern})
        best: HeldScores | None = None
        for held in self._candidates(layer, pattern):
            best = held if best is None or not best.error <= held.error else best
            if best.error <= ENOUGH * self.record.tolerance:
                break
        self._seen.clear()
        error = float("nan") if best is None else best.error
        if best is not None and error <= self.record.tolerance:
            error = max(
                (
                    self._error(best, at, pattern)
                    for at in query_chunks(pattern.shape[2], pattern[:, :, :1].numel() * pattern.element_size())
                ),
                default=0.0,
            )
        if best is None or not error <= self.record.tolerance:
            raise _refusal(
                view,
                f"the pattern of blocks.{layer} is not the one that its queries and keys give (relative error of a "
                f"row: {error:.1e}; allowed {self.record.tolerance:.0e}); relative position biases, a mask that is "
                "neither causal nor a window, or another hook on the model would explain it",
            )
        kept = {name: getattr(best, name) for name in ("queries", "keys", "sums", "real")}
        kept = {name: tensor.cpu() for name, tensor in kept.items()} if self.store == "cpu" else kept
        self.scores[name] = replace(best, **kept, error=error)

    def _candidates(self, layer: int, pattern: Tensor) -> Iterator[HeldScores]:
        """What the pattern may be made from, with the error of a few rows."""
        record = self.record
        block = record.view.blocks[layer]
        places = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)
        tried = torch.linspace(0, pattern.shape[2] - 1, min(TRIED, pattern.shape[2]), device=pattern.device).long()
        sums, reach = pattern.sum(-1), cache(partial(_reach, pattern, record.mask))
        for before in dict.fromkeys(layout.attn.before for layout in places):
            if before is not None and record.points.blocks[layer].scales[before] not in record.cache:
                continue  # a norm that comes after attention
            for reading in score_candidates(record, layer, before, self.added, alibi_positions=2):
                for made in self._made(reading, layer, sums):
                    for mask in (lambda: (None, 0), lambda: (None, None), reach):  # causal, open, a measured window
                        back, ahead = mask()
                        held = replace(made, back=back, ahead=ahead)
                        yield replace(held, error=self._error(held, tried, pattern))

    def _made(self, reading: ScoreReading, layer: int, sums: Float[Tensor, "batch head query"]) -> Iterator[HeldScores]:
        """What a reading makes of the queries and keys that the model showed, and of those that it reads itself."""
        name = self.record.points.blocks[layer].pattern
        assert name is not None
        alike = (len(sums), sums.shape[2])
        shown = [tuple(self._seen.get(name.replace(PATTERN, end)) for end in ends) for ends in SHOWN]
        pairs = [
            (q.transpose(1, 2), k.transpose(1, 2))
            for q, k in shown
            if q is not None and k is not None and q.ndim == k.ndim == 4 and q.shape[:2] == k.shape[:2] == alike
        ]
        for queries, keys in pairs[:1]:
            if queries.shape[1] == reading.heads and keys.shape[1] % reading.kv_heads == 0:
                # some show a key-value head once for every query head that reads it
                yield self._held(queries, keys[:, :: keys.shape[1] // reading.kv_heads], reading, sums)
        yield self._held(*reading.vectors(self.record.resid_read(layer)), reading, sums)

    def _held(self, queries: Tensor, keys: Tensor, reading: ScoreReading, sums: Tensor) -> HeldScores:
        return HeldScores(
            queries,
            keys,
            sums,
            self.record.mask,
            reading.scale,
            reading.soft_cap,
            None if reading.alibi is None else reading.alibi[:, -1, 0],
            None,
            None,
            sums.device,
        )

    def _error(self, held: HeldScores, queries: slice | Tensor, pattern: Tensor) -> float:
        """The largest relative error of some rows of real queries."""
        at = torch.arange(pattern.shape[2], device=pattern.device)[queries]
        own = pattern[:, :, queries]
        made = held.rows(at.expand(len(pattern), -1), own.dtype)
        made = torch.nn.functional.pad(made, (0, own.shape[-1] - made.shape[-1]))
        return relative_error(made.transpose(1, 2), own.transpose(1, 2), self.record.mask[:, queries])


def _reach(pattern: Tensor, mask: Tensor) -> tuple[int, int]:
    """How far before and after a real query some key has weight."""
    back = ahead = 0
    for at in query_chunks(pattern.shape[2], pattern[:, :, :1].numel() * pattern.element_size()):
        weighted = ((pattern[:, :, at] > 0) & mask[:, None, at, None]).flatten(0, 1).any(0)
        query, key = weighted.nonzero(as_tuple=True)
        if len(query):
            distance = query + at.start - key
            back, ahead = max(back, int(distance.max())), max(ahead, -int(distance.min()))
    return back, ahead
