"""The parts of every block as secants of two runs: linear in the difference of their inputs."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Identity, Linear, Norm
from tensorlens_tl.algebra.secants import Change, Offset, norm_secant
from tensorlens_tl.core import paired
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import StreamPoint
from tensorlens_tl.models import BlockView, FrozenRule, Layout, Within
from tensorlens_tl.models.mixers import ChannelMixWeights, Mixer, NoMixing
from tensorlens_tl.models.names import ENCODER_NORM
from tensorlens_tl.models.parameters import first_output, innermost
from tensorlens_tl.passes.block_maps import BlockMaps, Blocks, reads_weights
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.two_runs.attention import attention_secant, score_routes as attention_score_routes
from tensorlens_tl.passes.two_runs.cross import CrossSecant, cross_score_routes, cross_secant
from tensorlens_tl.passes.two_runs.experts import Mixture, experts_secant
from tensorlens_tl.passes.two_runs.mlps import activated, hidden_secant
from tensorlens_tl.passes.two_runs.recorded import Call, attention_calls, recorded_attention
from tensorlens_tl.passes.two_runs.values import (
    BlockValues,
    CrossValues,
    block_values,
    hidden_values,
    per_layer_values,
)
from tensorlens_tl.passes.two_runs.whitening import whitening_secant


@dataclass(eq=False)
class _Parts:
    """The secants of one block's attention and MLP, computed when needed, and the values between which they lie."""

    of_a: BlockValues
    of_b: BlockValues
    attention: Chain | None = None
    beside: Chain | None = None
    mlp: AffineMap | None = None
    experts: dict[str, AffineMap] | None = None
    cross: CrossSecant | None = None
    pattern_error: float = 0.0


@dataclass(frozen=True, eq=False)
class SecantMaps(Blocks):
    """The parts of every block as exact linear maps of the difference of two runs.

    Attributes:
        a, b: the maps of the two runs, whose blocks have the same layouts.
        capture: the first run, which defines positions.
        layouts: the layout of each block.
    """

    a: BlockMaps
    b: BlockMaps
    capture: Capture
    layouts: tuple[Layout, ...]
    cache: dict[int, _Parts] = field(default_factory=dict[int, _Parts], repr=False)
    calls: dict[int, tuple[Call, Call]] = field(default_factory=dict[int, tuple[Call, Call]], repr=False)

    @classmethod
    def of(cls, a: BlockMaps, b: BlockMaps) -> "SecantMaps":
        """Return the secants for the maps of two runs."""
        return cls(a.of_two_runs(), b.of_two_runs(), a.capture, a.layouts)

    @cached_property
    def row_bytes(self) -> int:
        """The maximal bytes that one vector allocates, including its products with all keys or states of a layer."""
        batch, pos = self.capture.tokens.shape
        most = max((_numbers(block, pos) for block in self.view.blocks), default=0)
        return self.a.row_bytes + batch * pos * most * self.capture.resid_pre(0).element_size()

    def forget(self, layer: int) -> None:
        """Drop cached results for a layer."""
        self.cache.pop(layer, None)

    # ------------------------------------------------------------------ parts

    def _parts(self, layer: int) -> _Parts:
        if layer not in self.cache:
            self.cache[layer] = _Parts(block_values(self.a, layer), block_values(self.b, layer))
        return self.cache[layer]

    def norm(self, layer: int, name: str) -> Chain:
        """Return one norm of one block, with its scale responding."""
        parts = self._parts(layer)
        norms = (self.a.norm(layer, name), self.b.norm(layer, name))
        return norm_secant(*norms, parts.of_a.norms[name], parts.of_b.norms[name], f"L{layer}.{name}")

    def final_norm(self) -> Chain | None:
        """Return the norm after the last block, or None."""
        a, b = (maps.final_norm() for maps in (self.a, self.b))
        if a is None or b is None:
            return None
        last = self.capture.n_layers
        reads = slice(*self.capture.side(last - 1))
        x_a, x_b = (maps.capture.resid_pre(last)[:, reads] for maps in (self.a, self.b))
        return norm_secant(a, b, x_a, x_b, "ln_final")

    def encoder_norm(self) -> Chain | None:
        """Return the norm after an encoder–decoder's last encoder block, or None."""
        a, b = (maps.encoder_norm() for maps in (self.a, self.b))
        if a is None or b is None:
            return None
        parts = self._parts(self.view.encoder_layers - 1)
        return norm_secant(a, b, parts.of_a.norms[ENCODER_NORM], parts.of_b.norms[ENCODER_NORM], ENCODER_NORM)

    def within(self, layer: int) -> Within | None:
        """Return where a block acts, including its cross-attention by three routes; None if there is one stack."""
        side = self.a.within(layer)
        if side is None or side.read is None:
            return side
        parts = self._parts(layer)
        if parts.cross is None:
            parts.cross = cross_secant(self.a, self.b, layer, *self._crossing(layer))
        return parts.cross.within(side)

    def _crossing(self, layer: int) -> tuple[CrossValues, CrossValues, Chain | None]:
        """The inputs and outputs of cross-attention in either run, and the norm before its queries."""
        parts = self._parts(layer)
        assert parts.of_a.cross is not None
        assert parts.of_b.cross is not None
        place = self.layouts[layer].cross
        norm = None
        if place is not None and place.before is not None:
            norm = self.norm(layer, place.before)
        return parts.of_a.cross, parts.of_b.cross, norm

    def whitening(self, layer: int) -> Chain | None:
        """Return the whitening before a block, with the effects of changed weights; None without whitening."""
        of_a, of_b = (maps.view.blocks[layer].whitening for maps in (self.a, self.b))
        if of_a is None and of_b is None:
            return None
        read = Change(self.a.capture.resid_pre(layer), self.b.capture.resid_pre(layer))
        return whitening_secant(of_a, of_b, read, self.padding_mask, f"L{layer}.whitening")

    def mixer(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """Return attention by three routes (values, queries and keys) with its output, or the mixer in its place."""
        if self.view.blocks[layer].mixer is not None:
            return self._in_place_of_attention(layer, heads)
        parts = self._parts(layer)
        if heads is not None:
            return self._attention_secant(layer, heads)[0]
        if parts.attention is None:
            parts.attention, parts.pattern_error = self._attention_secant(layer)
        return parts.attention

    def _attention_secant(self, layer: int, heads: Collection[int] | None = None) -> tuple[Chain, float]:
        """The secant of attention from its weights, or from the live module if these do not explain the scores.

        Raises:
            UnsupportedModelError: neither reproduces both runs.
        """
        values = self._parts(layer).of_a, self._parts(layer).of_b
        try:
            return attention_secant(self.a, self.b, layer, *values, heads)
        except UnsupportedModelError:
            if self.view.blocks[layer].brought:
                raise
            if not self.calls:
                first, second = attention_calls(self.a), attention_calls(self.b)
                self.calls.update({number: (first[number], second[number]) for number in first.keys() & second.keys()})
            if layer in self.calls:
                with suppress(UnsupportedModelError):
                    return recorded_attention(self.a, self.b, layer, self.calls[layer], values, heads)
            raise

    @reads_weights
    def _in_place_of_attention(self, layer: int, heads: Collection[int] | None) -> Chain:
        """The secant of a mixer.

        Raises:
            UnsupportedModelError: only some heads are requested, which a mixer does not have.
        """
        blocks = [maps.view.blocks[layer] for maps in (self.a, self.b)]
        if heads is not None:
            blocks[0].require_attention()
        parts = self._parts(layer)
        if parts.attention is None:
            with blocks[1].loaded():
                mixers = [block.mixer for block in blocks]
                parts.attention = self._mixer_secant(layer, mixers, blocks[0].branch_factor)
        return parts.attention

    @reads_weights
    def beside(self, layer: int) -> Chain | None:
        """Return the secant of a mixer next to attention, with the same input, or None."""
        blocks = [maps.view.blocks[layer] for maps in (self.a, self.b)]
        if not blocks[0].has_beside:
            return None
        parts = self._parts(layer)
        if parts.beside is None:
            with blocks[1].loaded():
                mixers = [block.beside for block in blocks]
                parts.beside = self._mixer_secant(layer, mixers, blocks[0].beside_factor)
        return parts.beside

    def _mixer_secant(self, layer: int, mixers: Sequence[Mixer | NoMixing | None], factor: float) -> Chain:
        """The secant of the two runs' mixers, times a factor."""
        parts = self._parts(layer)
        of_a, of_b = mixers
        assert of_a is not None
        assert of_b is not None
        a, b = parts.of_a.attention, parts.of_b.attention
        if isinstance(of_a, NoMixing) or isinstance(of_b, NoMixing):
            return of_a(a, None)
        runs = (of_a.runs(self.padding_mask), of_b.runs(self.padding_mask))
        secant = paired(*runs, (of_a.module, of_b.module), a, b, f"L{layer}.mixer")
        return Chain((secant, Identity() if factor == 1 else Diagonal(a.new_full((1, 1, 1), factor))))

    def pattern_error(self, layer: int) -> float:
        """Return the largest error of a probability in the two patterns recomputed from the scores."""
        self.mixer(layer)
        self.within(layer)
        parts = self._parts(layer)
        return parts.pattern_error if parts.cross is None else max(parts.pattern_error, parts.cross.pattern_error)

    @reads_weights
    def score_routes(self, layer: int, head: int, of: str, *, cross: bool = False) -> tuple[AffineMap, AffineMap]:
        """Return one head's scores, or its pattern, through its queries and its keys, as maps of its layer's input.

        Args:
            layer, head: the head.
            of: ``"score"`` or ``"pattern"``.
            cross: whether it is a head of cross-attention.

        Returns:
            Two maps to a vector over keys at every query, `[batch, query, key]`; their sum is the change.
        """
        if cross:
            routes = cross_score_routes(self.a, self.b, layer, *self._crossing(layer), of)
            return routes[0].component(head), routes[1].component(head)
        before = self.layouts[layer].attn.before
        norms = () if before is None else (self.norm(layer, before),)
        by_query, by_key = attention_score_routes(self.a, self.b, layer, of)
        of_query = Chain((*norms, by_query.component(head)))
        of_key = Chain((*norms, by_key.component(head)))
        within = self.within(layer)
        if within is None:
            return of_query, of_key
        return within(of_query, only=True), within(of_key, only=True)

    def mlp(self, layer: int, rule: FrozenRule = "frozen") -> AffineMap | None:
        """Return one MLP or mixture of experts, with slopes of its activations; `rule` has no effect."""
        parts = self._parts(layer)
        if parts.of_a.mlp is None or parts.of_b.mlp is None:
            return None
        if parts.mlp is None and parts.of_a.experts:
            parts.mlp = self.mixture(layer, self.experts(layer))
        if parts.mlp is None:
            parts.mlp = self._mlp_secant(layer, Change(parts.of_a.mlp, parts.of_b.mlp))
        return parts.mlp

    def _mlp_secant(self, layer: int, read: Change) -> Chain:
        """The secant of the two runs' MLPs, or of modules in the place of an MLP."""
        if isinstance(self.view.blocks[layer].mlp, ChannelMixWeights):
            a, b = (innermost(maps.view.blocks[layer].parts.mlp) for maps in (self.a, self.b))
            runs = (lambda x: first_output(a(x)), lambda x: first_output(b(x)))
            secant = paired(*runs, (a, b), read.a, read.b, f"L{layer}.channel_mix")
            return Chain((secant, Identity()))
        dense_a = self.a.view.blocks[layer].dense_mlp
        dense_b = self.b.view.blocks[layer].dense_mlp
        assert dense_a is not None
        assert dense_b is not None
        held = (hidden_values(self.a, layer), hidden_values(self.b, layer))
        hidden = hidden_secant(dense_a, dense_b, read, f"L{layer}", held)
        outs = (Linear(dense_a.W_out, dense_a.b_out), Linear(dense_b.W_out, dense_b.b_out))
        return hidden.written(*outs, f"L{layer}.W_out")

    @reads_weights
    def experts(self, layer: int, rule: FrozenRule = "frozen") -> dict[str, AffineMap]:
        """Return the summands of a mixture of experts by name; see `experts_secant`.

        Raises:
            UnsupportedModelError: the layer has no experts.
        """
        parts = self._parts(layer)
        if parts.experts is not None:
            return parts.experts
        mixture_a, mixture_b = (Mixture(maps.expert_weights(layer), maps.routing(layer)) for maps in (self.a, self.b))
        read = {name: Change(x, parts.of_b.experts[name]) for name, x in parts.of_a.experts.items()}
        parts.experts = experts_secant(mixture_a, mixture_b, read, layer)
        return parts.experts

    @reads_weights
    def per_layer(self, layer: int, rule: FrozenRule = "frozen") -> Chain | None:
        """Return the branch for a separate input of each token at this layer; None without one.

        Δ(φ(g)·p) = p̄·Δφ + φ̄·Δp: that input comes from the token, not from the stream, so its change is a constant
        called ``"L{layer}.per_layer"``.
        """
        weights_a, weights_b = (maps.view.blocks[layer].per_layer for maps in (self.a, self.b))
        if weights_a is None or weights_b is None:
            return None
        (x_a, input_a), (x_b, input_b) = (per_layer_values(maps, layer) for maps in (self.a, self.b))
        name = f"L{layer}.per_layer"
        gate = Change(x_a, x_b).linear(Linear(weights_a.W_gate), Linear(weights_b.W_gate), f"{name}.W_gate")
        gated = activated(gate, weights_a.activation).weighted(input_a, input_b, name)
        return gated.linear(Linear(weights_a.W_out), Linear(weights_b.W_out), f"{name}.W_out").map

    def additions(self, layer: int) -> dict[StreamPoint, Offset]:
        """Return the additions by hooks in the first run minus those in the second, by hook point, if not equal."""
        of_a, of_b = (maps.additions(layer) for maps in (self.a, self.b))
        more: dict[StreamPoint, Offset] = {}
        for point in {**of_a, **of_b}:
            vectors = self._added(of_a, point) - self._added(of_b, point)
            if bool(vectors.any()):
                more[point] = Offset(vectors, point.name)
        return more

    def _added(self, of_run: Mapping[StreamPoint, Offset], point: StreamPoint) -> Float[Tensor, "batch pos d_model"]:
        if point not in of_run:
            return torch.zeros_like(self.capture.resid_pre(0))
        return of_run[point].vectors

    def prediction_head(self, rule: FrozenRule = "frozen") -> Chain | None:
        """Return a masked language model's transform, or a pooler, between output and unembedding, or None."""
        a, b = (maps.prediction_head() for maps in (self.a, self.b))
        if a is None or b is None:
            return None
        x_a, x_b = (maps.capture.output for maps in (self.a, self.b))
        if self.view.mlm_head is None:  # a classifier's norm, of the mean of some positions
            stages = a.stages[:-1]
            inside = Change(Chain(stages)(x_a), Chain(b.stages[:-1])(x_b), stages)
        else:
            dense_a, dense_b = a.stages[0], b.stages[0]
            assert isinstance(dense_a, Linear)
            assert isinstance(dense_b, Linear)
            dense = Change(x_a, x_b).linear(dense_a, dense_b, "head.W_dense")
            inside = activated(dense, self.view.mlm_head.activation)
            if self.view.mlm_head.norm is None:
                return Chain(inside.stages)
        norm_a, norm_b = a.stages[-1], b.stages[-1]
        assert isinstance(norm_a, Norm)
        assert isinstance(norm_b, Norm)
        return Chain((*inside.stages, norm_secant(norm_a, norm_b, inside.a, inside.b, "head.ln")))


def _numbers(block: BlockView, pos: int) -> int:
    """Return how many numbers a vector takes for each position in a block with attention."""
    with block.loaded():
        return 0 if block.mixer is not None else 3 * block.attention.heads * pos
