"""The live model with every edge separate: each destination reads its own mix of the nodes' outputs for two prompts.

Nothing is frozen. The only weights used are the norm before attention and each head's query, key and value matrices:
the model's own modules compute these for all heads from one stream, but here each head reads its own. The model runs
the corrupted prompt once. After each block, that block is called again for many circuits at a time: with its heads'
queries, keys and values for their mixes, to obtain the heads' outputs; and with a stream that makes the MLP read its
mix, to obtain its neurons.

Blocks must add the unmodified outputs of attention and MLP to the stream: pre-LN, sequential or parallel. With a norm
in between (post-LN, sandwich, OLMo 2), a single head's output is not defined in the live model, and such blocks raise
an error, as does a node that no hook point shows. The run is verified: with all edges clean it must reproduce the clean
prompt's stream before every step, and with none the corrupted prompt's values at every node.

In an encoder–decoder, keys and values of cross-attention read the encoder's stream through the norm at its end, which
counts as part of their read.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.cache_utils import Cache

from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.live import hidden_point
from tensorlens_tl.circuits.stream import Step, Stream, StreamTarget, Sublayer, normed
from tensorlens_tl.errors import FrozenModelError, UnsupportedModelError
from tensorlens_tl.hooks import (
    Placing,
    hook_numbers,
    hook_points,
    in_this_thread,
    lock_of,
    other_hooks,
    refuse_attached,
    run,
)
from tensorlens_tl.models.names import ENCODER_NORM
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.passes import PassLike
from tensorlens_tl.passes.live import replace_forward, rows_of

Again = Callable[[dict[str, Tensor], str], Tensor]
"""Calls a block for copies of the prompts: returns their values at a hook point, given those at others."""


class _ReachedError(Exception):
    """Raised once a call of a block, or the run, has reached the wanted value."""


@dataclass(frozen=True, eq=False)
class _Way:
    """How heads read the stream, by queries, keys or values.

    Attributes:
        point: the hook point of these vectors.
        step: the step before which they read.
        side: the positions that they read.
        norm: the norm that the stream passes first.
        W, b: for every head of the model; in grouped attention, fewer keys and values than queries.
    """

    point: str
    step: int
    side: tuple[int, int]
    norm: Callable[[Tensor], Tensor]
    W: Float[Tensor, "head d_model d_head"]
    b: Float[Tensor, "head 1 d_head"] | None

    def __call__(self, x: Float[Tensor, "row head pos d_model"]) -> Float[Tensor, "row some head d_head"]:
        """Return each head's vector for what it reads; heads of a group share weights."""
        x = self.norm(x[..., slice(*self.side), :])
        each = x.shape[1] // len(self.W)
        wide = torch.promote_types(x.dtype, self.W.dtype)
        y = torch.einsum("rgepd,gdf->rgepf", x.unflatten(1, (-1, each)).to(wide), self.W.to(wide)).to(x)
        if self.b is not None:
            y = y + self.b[:, None].to(x)
        return y.flatten(1, 2).transpose(1, 2)


class LiveEdges:
    """The live model with every edge separate, relative to its run of the corrupted prompt.

    Args:
        readout: the clean prompt's target.
        other: the stream of the corrupted prompt.
        exists: which pairs are edges.

    Raises:
        FrozenModelError: a frozen pass is attached, or hooks were added or removed since a pass.
        UnsupportedModelError: a block is not the sum of its nodes' outputs, or no hook point shows one of them; or the
            run does not reproduce the model.
    """

    def __init__(self, readout: StreamTarget, other: Stream, exists: Bool[Tensor, "source destination"]) -> None:
        self.readout, self.exists = readout, exists
        self.frozen, self.corrupted = readout.stream.run, other.run
        refuse_hooks(self.frozen, self.corrupted)
        self.alone = self.frozen.live("edges of the live model").alone  # also rejects dropout
        self.steps = readout.stream.steps
        self.end = next((number for number, step in enumerate(self.steps) if step.layer < 0), len(self.steps))
        if (
            self.frozen.view.mlm_head is not None
            or self.frozen.view.class_head is not None
            or self.steps[-1].outer.mixes
        ):
            raise self.refusal("a prediction head or a classifier's stands after its final norm")
        self._check_steps()
        self.x = other.anchored().x
        self.points = hook_points(self.frozen.model)
        self.ways = {number: self._ways(number, part) for number, part in self.parts() if part.is_attention}
        with torch.no_grad():
            _Run(self, torch.stack([exists, torch.zeros_like(exists)])[:, None], readout.stream.anchored().x).numbers()

    def parts(self) -> Iterator[tuple[int, Sublayer]]:
        """Yield every sublayer with the number of its step."""
        for number, step in enumerate(self.steps[: self.end]):
            for part in step.sublayers:
                yield number, part

    def refusal(self, why: str) -> UnsupportedModelError:
        """Return the error for a model in which live runs with separate edges are not defined, or fail."""
        return UnsupportedModelError(
            f"live edges of this {self.frozen.view.description}: {why}. They need pre-LN blocks, sequential or "
            "parallel, with hook points at queries, keys, values and neurons; patch_scores, and edge_scores with any "
            "other method, work without."
        )

    def _check_steps(self) -> None:
        """Reject a block that does more than add the outputs of attention and an MLP to the stream."""
        for step in self.steps[: self.end]:
            name = self.frozen.view.blocks[step.layer].name
            layout = self.frozen.layouts[step.layer]
            places = (layout.attn, layout.mlp, *([layout.cross] if layout.cross else []))
            if any(place.after or place.outer for place in places):
                between = f"its {layout.name} layout has norms between what a part writes and the stream"
                raise self.refusal(f"{name}: {between}")
            if not step.sublayers and step.outer_name != f"{ENCODER_NORM}.b":
                raise self.refusal(f"{name}: {step.outer_name} stands between the outputs of its parts")
            for part in step.sublayers:
                if part.kind not in ("head", "mlp") or hidden_point(self.frozen, part) is None:
                    raise self.refusal(
                        f"{name}: no hook point shows the nodes of {part.name} (a gate, a norm or a latent inside, a "
                        "mixer in place of attention, one output of self- and cross-attention)"
                    )

    def _ways(self, number: int, part: Sublayer) -> tuple[_Way, _Way, _Way]:
        """Return how the heads of one attention read by queries, keys and values."""
        block = self.frozen.view.blocks[part.layer]
        layout, points = self.frozen.layouts[part.layer], self.frozen.points.blocks[part.layer]
        side = self.frozen.capture.side(part.layer)
        before = layout.attn.before
        attention, weights, heads = block.attention, block.query_key, points.heads
        if part.is_cross and layout.cross is not None:
            before = layout.cross.before
            attention, weights, heads = block.require_cross_attention(), block.cross_query_key, points.cross
        assert heads is not None
        norm = partial(self._normed, norm=block.norms[before] if before else None, name=f"{block.name}.{before}")
        attended: tuple[int, tuple[int, int], Callable[[Tensor], Tensor]] = (number, side, norm)
        if part.is_cross:
            attended = (encoder_end(self.readout.stream), (0, side[0]), self.encoder_norm)
        of_keys, of_values = weights.W_K.shape[1], attention.W_V.shape[1]
        widths = weights.W_Q.shape[1] // attention.heads, of_keys // attention.kv_heads, of_values // attention.kv_heads
        for inner in (weights.q_norm, weights.k_norm):
            if inner is not None and inner.gain is not None and inner.gain.numel() != widths[0]:
                raise self.refusal(f"{block.name}: its queries are normed over all heads together")
        stem = heads.z.removesuffix("hook_z")
        reads = zip(
            "qkv", ((number, side, norm), attended, attended), (weights.W_Q, weights.W_K, attention.W_V),
            (weights.b_Q, weights.b_K, attention.b_V), widths, strict=True,
        )  # fmt: skip
        ways: list[_Way] = []
        for letter, read, W, b, width in reads:
            point = f"{stem}hook_{letter}"
            if point not in self.points:
                raise self.refusal(f"{block.name}: no {point} shows what {part.name} reads")
            by_head = rearrange(W, "d (head e) -> head d e", e=width)
            ways.append(
                _Way(point, *read, by_head, None if b is None else rearrange(b, "(head e) -> head 1 e", e=width))
            )
        return ways[0], ways[1], ways[2]

    def encoder_norm(self, x: Float[Tensor, "*rows pos d"]) -> Float[Tensor, "*rows pos d"]:
        """Apply the norm at an encoder's end."""
        view = self.frozen.view
        return self._normed(x, view.encoder_norm, view.encoder_norm_name)

    def _normed(self, x: Float[Tensor, "*rows d"], norm: NormWeights | None, name: str) -> Float[Tensor, "*rows d"]:
        """Apply a norm as the live model computes it; its gain may be kept outside its module."""
        if norm is None:
            return x
        return normed(self.frozen.view, norm, name, x)

    def number(
        self, decoder: Float[Tensor, "row batch pos d"], encoder: Float[Tensor, "row batch pos d"]
    ) -> Float[Tensor, "row batch"]:
        """Return the target's value from the streams after the last block of each stack, at all positions."""
        view, length = self.frozen.view, self.frozen.prompt.encoder_length
        after = self._normed(decoder[..., length:, :], view.final_norm, view.final_norm_name)
        if length:
            after = torch.cat([self.encoder_norm(encoder[..., :length, :]), after], dim=-2)
        return self.readout.number(after)[..., 0]

    @torch.no_grad()
    def numbers(
        self, clean_edges: Bool[Tensor, "circuit source destination"], memory: Memory
    ) -> Float[Tensor, "circuit batch"]:
        """Return the target's value with only these edges clean."""
        return self._numbers(len(clean_edges), lambda rows: clean_edges[rows.start : rows.stop, None], memory)

    @torch.no_grad()
    def patched(self, memory: Memory) -> Float[Tensor, "batch source destination"]:
        """Return what the target loses with each edge corrupted on its own."""
        edges = self.exists.nonzero()

        def all_but_one(rows: range) -> Bool[Tensor, "row 1 source destination"]:
            source, destination = edges[rows.start : rows.stop].T
            clean_edges = self.exists.repeat(len(rows), 1, 1, 1)
            clean_edges[torch.arange(len(rows), device=clean_edges.device), 0, source, destination] = False
            return clean_edges

        losses = self.readout.total[:, 0] - self._numbers(len(edges), all_but_one, memory)
        scores = losses.new_zeros(losses.shape[1], *self.exists.shape)
        scores[:, self.exists] = losses.T
        return scores

    @torch.no_grad()
    def losses(
        self, corrupted: Bool[Tensor, "run batch source destination"], memory: Memory
    ) -> Float[Tensor, "run batch"]:
        """Return what the target loses in each run with some edges of each prompt corrupted together."""

        def others(rows: range) -> Bool[Tensor, "row batch source destination"]:
            return self.exists & ~corrupted[rows.start : rows.stop]

        return self.readout.total[:, 0] - self._numbers(len(corrupted), others, memory)

    def _numbers(
        self,
        circuits: int,
        clean_edges: Callable[[range], Bool[Tensor, "row #batch source destination"]],
        memory: Memory,
    ) -> Float[Tensor, "circuit batch"]:
        """Return the target's value for circuits whose clean edges are computed for a range of them at a time."""
        x, heads = self.x[0], max((len(part.nodes) for _, part in self.parts()), default=1)
        per_row = 2 * (6 * heads + len(self.exists)) * x.numel() * x.element_size()
        per_row += (1 + x.element_size()) * self.exists.numel()
        runs = chunks(circuits, per_row, memory, "circuits", parts=circuits if self.alone else 1)
        return torch.cat([_Run(self, clean_edges(rows)).numbers() for rows in runs])


class _Run:
    """One run of the corrupted prompts in which each block, once it has run, is called again for every circuit.

    Attributes:
        clean_edges: by destination and source, 1 for a clean edge and 0 for a corrupted one, a row for each circuit.
        changes: each source's output in each circuit minus that for the corrupted prompts.
        sources, destinations: how many have been reached so far, in the order of `EdgeLayout`.
        held: the corrupted prompts' values at hook points; outputs: their attention outputs, by layer and module.
        given, until: in a call of a block for circuits, their values at hook points, and where the call ends.
        shown, rows: the value where such a call ends, and the prompt of each of its copies.
        clean_x: the stream of the clean prompts, for verification: then all edges of the first circuit are clean, and
            none of the second.
    """

    def __init__(
        self,
        edges: LiveEdges,
        clean_edges: Bool[Tensor, "row #batch source destination"],
        clean_x: list[Tensor] | None = None,
    ) -> None:
        x = edges.x[0]
        self.edges, self.clean_x = edges, clean_x
        self.clean_edges = clean_edges.mT.to(x)
        self.changes = x.new_zeros(len(clean_edges), len(x), clean_edges.shape[2], *x.shape[1:])
        self.changes[:, :, 0] = edges.frozen.resid_pre(0) - x
        self.sources, self.destinations = 1, 0
        self.held: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.outputs: dict[str, Any] = {}
        self.entries = {block.resid_pre for block in edges.frozen.points.blocks}
        self.until = ""
        self.shown = self.rows = x

    def numbers(self) -> Float[Tensor, "row batch"]:
        """Return the target's value in every circuit."""
        edges, frozen = self.edges, self.edges.corrupted
        points = [*self.entries]
        points += [way.point for ways in edges.ways.values() for way in ways]
        points += [str(hidden_point(frozen, part)) for _, part in edges.parts()]
        hooks = [(point, in_this_thread(partial(self._at, name=point))) for point in points]
        with lock_of(frozen.model), Placing() as placing, suppress(_ReachedError):
            for layer, block in enumerate(frozen.view.blocks):
                for name in {block.parts.mixer_name, block.parts.cross_name} & {*block.module._modules}:
                    replace_forward(placing, getattr(block.module, name), partial(self._attention, f"{layer}.{name}"))
                replace_forward(placing, block.module, partial(self._block, layer))
            run(frozen.model, frozen.inputs, hooks)
        self._prove_stream(edges.end)
        ends = (edges.end, encoder_end(edges.readout.stream))
        numbers = edges.number(*(self._reads(end, slice(-1, None))[:, :, 0] for end in ends))
        if self.clean_x is not None:
            expected = torch.stack([edges.readout.number_of(of.activation)[:, 0] for of in (edges.frozen, frozen)])
            size = float(expected.abs().max().clamp_min(1.0))
            self._prove("the target's number", float((numbers - expected).abs().max()) / size)
        return numbers

    # ------------------------------------------------------------------ calls of a block

    def _at(self, live: Tensor, *, hook: Any, name: str) -> Tensor:
        """Note the corrupted prompts' values at a hook point; in a call for circuits, insert theirs and stop there."""
        if not self.until:
            self.held[name] = live
            return live
        if name in self.given:
            live = self.given[name].to(live).reshape(live.shape)
        if name == self.until:
            self.shown = live
            raise _ReachedError
        return live

    def _attention(self, name: str, computed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run attention; in a call for an MLP, return its output for the corrupted prompts again."""
        if self.until and not self.given.keys() - self.entries:
            return rows_of(self.outputs[name], self.rows, len(self.edges.corrupted.tokens))
        output = computed(*args, **kwargs)
        if not self.until:
            self.outputs[name] = output
        return output

    def _block(self, layer: int, computed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block, and compute its nodes' outputs in every circuit."""
        output = computed(*args, **kwargs)
        batch = len(self.edges.corrupted.tokens)

        def again(given: dict[str, Tensor], until: str) -> Tensor:
            copies = len(next(iter(given.values()))) // batch
            rows = self.rows = torch.arange(batch, device=self.changes.device).repeat(copies)
            values = [None if isinstance(value, Cache) else value for value in (*args, *kwargs.values())]
            first, named = rows_of(values[: len(args)], rows, batch), rows_of(values[len(args) :], rows, batch)
            self.given, self.until = given, until
            try:
                computed(*first, **dict(zip(kwargs, named, strict=True)))
            except _ReachedError:
                return self.shown
            finally:
                self.given, self.until = {}, ""
            raise self.edges.refusal(f"L{layer}: {until} is not reached when the block is called again")

        for number, step in enumerate(self.edges.steps):
            if step.layer == layer and step.sublayers:
                self._prove_stream(number)
                self._write(number, step, again)
        if layer + 1 == self.edges.frozen.n_layers:
            raise _ReachedError
        return output

    # ------------------------------------------------------------------ what nodes read, have and write

    def _reads(self, step: int, destinations: slice) -> Float[Tensor, "row batch destination pos d"]:
        """Return what some destinations read before a step: the corrupted stream plus the changes along clean edges."""
        x, known = self.edges.x[step], self.changes[:, :, : self.sources]
        changed = self.clean_edges[:, :, destinations, : self.sources] @ known.flatten(3)
        return changed.unflatten(3, x.shape[1:]) + x[:, None]

    def _next(self, count: int) -> slice:
        self.destinations += count
        return slice(self.destinations - count, self.destinations)

    def _write(self, number: int, step: Step, again: Again) -> None:
        """Compute the outputs of a step's nodes, which read what was written before it."""
        start, stop = self.edges.frozen.capture.side(step.layer)
        length = self.edges.frozen.tokens.shape[1]
        changes: list[Tensor] = []
        for part in step.sublayers:
            point = str(hidden_point(self.edges.frozen, part))
            hidden = self._heads(number, part, point, again) if part.is_attention else self._neurons(part, point, again)
            held = self.held[point].reshape(-1, stop - start, hidden.shape[-1])
            if self.clean_x is not None:
                self._prove(f"what {part.name} gives", relative_error(hidden[len(held) :], held))
            change = hidden - held.repeat(len(self.changes), 1, 1)
            changes.append(part.outputs(widened(change, start, length)))
        written = torch.cat(changes).unflatten(1, (len(self.changes), -1)).movedim(0, 2)
        self.changes[:, :, self.sources : self.sources + written.shape[2]] = written
        self.sources += written.shape[2]

    def _heads(self, number: int, part: Sublayer, point: str, again: Again) -> Float[Tensor, "rows pos width"]:
        """Return every head's output for what its own queries, keys and values read.

        In grouped attention the model has one key and one value per group. A call then has as many copies of each
        circuit as there are heads in a group, and each copy is right for a different one of them.
        """
        ways, heads, rows = self.edges.ways[number], len(part.nodes), len(self.changes)
        if part.is_cross:
            reads = [self._reads(way.step, self._next(heads)) for way in ways]
        else:  # all at once, as the tensor of what was written is large
            reads = self._reads(number, self._next(3 * heads)).chunk(3, dim=2)
        vectors = [way(x.flatten(0, 1)) for way, x in zip(ways, reads, strict=True)]
        each = vectors[1].numel() // rows // self.held[ways[1].point].numel()
        given: dict[str, Tensor] = {}
        for way, by_head in zip(ways, vectors, strict=True):
            given[way.point] = by_head.repeat(each, 1, 1, 1)
            if way is not ways[0]:
                given[way.point] = by_head.unflatten(2, (-1, each)).movedim(3, 0).flatten(0, 1)
            if self.clean_x is not None:  # the second circuit has what the corrupted prompts have
                batch = len(by_head) // rows
                held = self.held[way.point].reshape(batch, by_head.shape[1], -1, by_head.shape[3])
                held = held.repeat_interleave(heads // held.shape[2], dim=2)
                error = relative_error(by_head[batch:].flatten(2), held.flatten(2))
                self._prove(f"{way.point}, by the weights,", error)
        z = again(given, point).reshape(each, len(vectors[0]), vectors[0].shape[1], heads // each, each, -1)
        return z.diagonal(dim1=0, dim2=4).movedim(-1, -2).flatten(2)

    def _neurons(self, part: Sublayer, point: str, again: Again) -> Float[Tensor, "rows pos width"]:
        """Return an MLP's neurons.

        Its block is called on a stream to which attention adds its output for the corrupted prompts.
        """
        frozen = self.edges.frozen
        first = self.edges.readout.stream.step_at(part.layer)
        start, stop = frozen.capture.side(part.layer)
        reads = self._reads(first, self._next(1))[:, :, 0, start:stop].flatten(0, 1)
        return again({frozen.points.blocks[part.layer].resid_pre: reads}, point).reshape(len(reads), stop - start, -1)

    # ------------------------------------------------------------------ verification

    def _prove(self, what: str, error: float) -> None:
        """Reject a model that the run does not reproduce.

        Raises:
            UnsupportedModelError: the error exceeds the tolerance of the pass.
        """
        if not error <= self.edges.frozen.tolerance:
            raise self.edges.refusal(f"{what} differs from the model's own by {error:.1e}")

    def _prove_stream(self, number: int) -> None:
        """Compare the stream before a step, with all edges clean, with that of the clean prompts."""
        if self.clean_x is None:
            return
        layer = self.edges.steps[min(number, self.edges.end - 1)].layer
        at = slice(*self.edges.frozen.capture.side(layer))
        stream = self.edges.x[number] + self.changes[0, :, : self.sources].sum(1)
        error = relative_error(stream[:, at], self.clean_x[number][:, at])
        self._prove(f"the stream before step {number} (L{layer})", error)


def encoder_end(stream: Stream) -> int:
    """Return the step before which an encoder's stream is complete: that of the norm at its end, if any."""
    of_encoder = [step for step in stream.steps if 0 <= step.layer < stream.frozen.view.encoder_layers]
    ends_in_norm = bool(of_encoder) and not of_encoder[-1].sublayers
    return len(of_encoder) - ends_in_norm


def refuse_hooks(clean: PassLike, corrupted: PassLike) -> None:
    """Reject live runs for two passes if the model's hooks are no longer those of the passes.

    Raises:
        FrozenModelError: a frozen pass is attached, or hooks were added or removed since a pass.
    """
    refuse_attached(clean.model)
    now = other_hooks(clean.model)
    numbers = hook_numbers(clean.model)
    for name, frozen in (("clean", clean), ("corrupted", corrupted)):
        if frozen.capture.hook_numbers != numbers:
            raise FrozenModelError(
                f"hooks were put on the model or taken off since the {name} prompts were frozen (at "
                f"{', '.join(sorted({*now} ^ {*frozen.other_hooks})) or 'the same points'}), so the live model is "
                "no longer the one of the passes. Undo this, or freeze both again."
            )
