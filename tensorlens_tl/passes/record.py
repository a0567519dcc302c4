"""What one forward pass leaves behind, and the maps that its parts become.

A record holds captured activations and the reading of the model's weights, and hands out the parts of the model as
maps composed of both. It runs nothing and proves nothing: `tensorlens_tl.passes.freezing` makes it,
`tensorlens_tl.passes.proof.blocks` proves it, and `FrozenPass` is the record that users hold.
"""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra import (
    AffineMap,
    AnyAttention,
    Attention,
    Chain,
    Diagonal,
    Identity,
    LazyMap,
    Linear,
    Norm,
    Sum,
)
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.recursion import Recursion
from tensorlens_tl.algebra.segments import CrossAttention, Segment
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.activations import Coefficients, coefficients
from tensorlens_tl.models.layouts import Layout, Place, Within, compose
from tensorlens_tl.models.names import PER_LAYER_NORM
from tensorlens_tl.models.parameters import NormWeights
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.captured import Captured
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.mlps import Routes, expert_maps, frozen_mlp, held_coefficients, mlp_chain

RecordType = TypeVar("RecordType", bound="Record")
Result = TypeVar("Result")


def _read(method: Callable[..., Result]) -> Callable[..., Result]:
    """A method of a record that reads one layer's weights: they are brought in for it where they are offloaded."""

    @wraps(method)
    def reading(self: Any, layer: int, *given: Any, **options: Any) -> Result:
        blocks = self.view.blocks
        if not isinstance(layer, int) or not 0 <= layer < len(blocks) or not blocks[layer].offloaded:
            return method(self, layer, *given, **options)
        with blocks[layer].loaded():
            result = method(self, layer, *given, **options)
        for cached in (self._ratios, self._experts):  # they grow with the model as the weights do
            cached.pop(layer, None)
        return result

    return reading


@dataclass(eq=False)
class Record(Captured):
    """One forward pass as data and maps; the data are those of `Captured`, whose attributes these are."""

    _ratios: dict[int, Coefficients] = field(default_factory=dict)
    _experts: dict[int, dict[str, AffineMap]] = field(default_factory=dict)
    _gates: set[int] = field(default_factory=set)  # layers whose gate was compared

    # ------------------------------------------------------------------ parts of the pass

    @cached_property
    def row_bytes(self) -> int:
        """What a vector allocates on its way at most: the stream, a sublayer's input, and the widest hidden layer."""
        widest = 0
        for block in self.view.blocks:
            widest = max(widest, block.widest)
        x = self.resid_pre(0)
        return x[..., 0].numel() * (3 * x.shape[-1] + widest) * x.element_size()

    def first_tokens(self, layer: int, length: int = 8) -> "Record":
        """One block of the record, cut to its first tokens where these do not look ahead; else the whole record."""
        mask = self.mask[:, :length]
        pattern = self.points.blocks[layer].pattern
        if self.sides is not None or not bool(mask.any(1).all()):
            return self
        first = None if pattern is None else self.pattern_rows(layer, length)
        if first is not None and bool(first[..., length:].any()):
            return self
        names = {*self.points.blocks[layer].captured, self.output_name(layer)} - {pattern}
        cache = {name: self.captured(name)[:, :length] for name in names}
        if pattern is not None and first is not None:
            cache[pattern] = first[..., :length]
        prompt = Prompt(self.tokens[:, :length], mask, {}, [])
        return Record(self.view, self.points, prompt, cache, self.weights, tolerance=self.tolerance)

    def cut(self: "RecordType", length: int) -> "RecordType":
        """A causal pass of its first tokens only."""
        patterns = {block.pattern for block in self.points.blocks}
        cache = {
            name: self.captured(name)[:, :, :length, :length] if name in patterns else self.captured(name)[:, :length]
            for name in self.points.captured
            if name not in self.held_scores
        }
        scores = {name: held.cut(length) for name, held in self.held_scores.items()}
        rows = [row[:length] for row in self.str_tokens]
        cut = {"tokens": self.tokens[:, :length], "mask": self.mask[:, :length], "str_tokens": rows}
        prompt = replace(self.prompt, **cut, kwargs={}, word_starts=None)
        fields = {"prompt": prompt, "cache": cache, "held_scores": scores}
        return replace(self, **fields, logits_compared=None, _ratios={}, _experts={}, _gates=set())

    # ------------------------------------------------------------------ maps

    @_read
    def norm(self, layer: int, name: str) -> Norm:
        """One norm of one block, scale frozen; a map of the positions that the block acts on (see `side`)."""
        block = self.view.blocks[layer]
        return self._norm((block.norms | block.inner_norms)[name], self.points.blocks[layer].scales[name])

    def final_norm(self) -> Norm | None:
        """The norm after the last block, or None."""
        if self.view.final_norm is None or self.points.final_scale is None:
            return None
        return self._norm(self.view.final_norm, self.points.final_scale)

    def _norm(self, weights: NormWeights, scale_name: str) -> Norm:
        captured = self.captured(scale_name)
        scale = captured if weights.epsilon is None else weights.scale_of(captured)
        return Norm(scale, weights.gain, weights.shift, weights.centre)

    def final_map(self) -> AffineMap | None:
        """The same as a map of all positions: of an encoder–decoder it acts on the decoder's."""
        norm = self.final_norm()
        if norm is None or self.sides is None:
            return norm
        start, stop = self.side(self.n_layers - 1)
        return Segment(norm, start, stop, stop)

    def encoder_norm(self) -> Norm | None:
        """The norm after an encoder–decoder's last encoder block, or None."""
        if self.view.encoder_norm is None or self.points.encoder_scale is None:
            return None
        return self._norm(self.view.encoder_norm, self.points.encoder_scale)

    @_read
    def _within(self, layer: int) -> Within | None:
        """Where a block acts; None where there is one stack."""
        if self.sides is None:
            return None
        start, stop = self.side(layer)
        length = self.tokens.shape[1]
        weights = self.view.blocks[layer].cross_attention
        points = self.points.blocks[layer].cross
        if weights is None or points is None:
            return Within(start, stop, length)
        pattern = self.cross_pattern(layer).to(self.resid_pre(0).dtype)
        mixing = CrossAttention(pattern, weights.kv_heads, (start, stop), (0, start), length)
        read = Chain((Linear(weights.W_V, weights.b_V), mixing))
        return Within(start, stop, length, read, Linear(weights.W_O, weights.b_O))

    def whitening(self, layer: int) -> Chain | None:
        """What the stream goes through before a block of a whitened model, linear as it is; None of any other."""
        weights = self.view.blocks[layer].whitening
        if weights is None:
            return None
        keep = None if bool(self.mask.all()) else self.mask
        return Chain((Linear(weights.entry), Recursion(weights.step, keep)))

    @_read
    def attention(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """One self-attention sublayer, pattern frozen: values, mixing, output. `heads` keeps only those (b_O stays).

        As `mlp`, a map of the positions that the block acts on (see `side`).
        """
        weights = self.view.blocks[layer].attention
        ends = self.points.blocks[layer].attention
        mixing = self._mixing(layer, heads)
        out = Linear(weights.W_O, weights.b_O)
        if ends is None:
            return Chain((Linear(weights.W_V, weights.b_V), mixing, out))
        x = self.captured(ends.into)
        if weights.inner_values is None:
            assert weights.value_matrix is not None
            values = Linear(weights.value_matrix, weights.b_V)
        else:
            values = weights.inner_values(x)
        if weights.output_factor is None:
            return Chain((values, mixing, out))
        whole = self._mixing(layer)
        factor = weights.output_factor(x, whole(values(x)))
        return Chain((values, mixing, Chain((Diagonal(factor), out))))

    def _mixing(self, layer: int, heads: Collection[int] | None = None) -> AnyAttention:
        """The pattern as a map, held or recomputed; heads that are left out are zero."""
        weights = self.view.blocks[layer].attention
        name = self.points.blocks[layer].pattern
        dtype = self.resid_pre(layer).dtype
        head_mask = None
        if heads is not None:
            head_mask = torch.zeros(weights.heads, dtype=dtype, device=self.tokens.device)
            head_mask[list(heads)] = 1
        if name is not None and name not in self.cache and name in self.held_scores:
            return self.held_scores[name].attention(dtype, head_mask)
        pattern = self.pattern(layer).to(dtype)
        return Attention(pattern if head_mask is None else pattern * head_mask[:, None, None], weights.kv_heads)

    @_read
    def mixer(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """Attention, or what mixes positions in its place, with all that depends on its input held."""
        read = self.view.blocks[layer].mixer
        ends = self.points.blocks[layer].attention
        if read is None or ends is None:
            return self.attention(layer, heads)
        if heads is not None:
            self.view.blocks[layer].require_attention()
        mixing = read(self.captured(ends.into), None if bool(self.mask.all()) else self.mask)
        factor = self.view.blocks[layer].branch_factor
        if factor == 1:
            return mixing
        return Chain((*mixing.stages, Diagonal(self.resid_pre(layer).new_full((1, 1, 1), factor))))

    @_read
    def attention_alone(self, layer: int) -> AffineMap:
        """The same as the model's own module computes it, without what the block multiplies its branches by."""
        return _divided(self.mixer(layer), self.view.blocks[layer].branch_factor, self.tokens.device)

    @_read
    def mlp_alone(self, layer: int, activation: str = "ratio") -> AffineMap | None:
        """The MLP likewise."""
        mlp = self.mlp(layer, activation)
        return None if mlp is None else _divided(mlp, self.view.blocks[layer].branch_factor, self.tokens.device)

    @_read
    def experts_alone(self, layer: int, activation: str = "ratio") -> dict[str, AffineMap]:
        """The parts of a mixture of experts likewise."""
        factor = self.view.blocks[layer].branch_factor
        return {
            name: _divided(part, factor, self.tokens.device) for name, part in self.experts(layer, activation).items()
        }

    @_read
    def mlp_coefficients(self, layer: int, activation: str = "ratio") -> Coefficients | None:
        """What one layer's activation is replaced by under a rule; None without an MLP.

        Raises:
            UnsupportedModelError: a mixture of experts.
        """
        points = self.points.blocks[layer]
        weights = self.view.blocks[layer].dense_mlp
        if weights is None:
            return None
        if activation == "ratio" and layer in self._ratios:  # the proof and every default operator use them
            return self._ratios[layer]
        if points.mlp is not None:
            held = held_coefficients(weights, self.captured(points.mlp.into), activation)
        else:
            assert points.pre is not None
            linear = self.captured(points.pre_linear) if points.pre_linear else None
            held = coefficients(weights.activation, self.captured(points.pre), linear, activation)
        if activation == "ratio":
            self._ratios[layer] = held
        return held

    @_read
    def mlp(self, layer: int, activation: str = "ratio") -> AffineMap | None:
        """One MLP, or mixture of experts, with its activations and routing frozen, or None without one."""
        weights = self.view.blocks[layer].mlp
        if isinstance(weights, ExpertsWeights):
            branches = [self.with_norms(layer, name, part) for name, part in self.experts(layer, activation).items()]
            return branches[0] if len(branches) == 1 else Sum(tuple(branches))
        held = self.mlp_coefficients(layer, activation)
        ends = self.points.blocks[layer].mlp
        if weights is None or held is None:
            return None
        if weights.post_factor is not None and ends is not None:
            return frozen_mlp(weights, self.captured(ends.into), activation)
        if held.gate is not None and layer < len(self.layouts):
            self.check_gate(layer)
        return mlp_chain(weights, held)

    @_read
    def check_gate(self, layer: int) -> None:
        """Compare what a gate makes of what it reads with what was captured of it; once for each layer.

        The default rule holds the gate's activation and never reads its weights; a rule that pulls through them is
        right only where they are what made it.

        Raises:
            UnsupportedModelError: they are not: a hook on the gate, or something that was put on its module.
        """
        weights = self.view.blocks[layer].dense_mlp
        name = self.points.blocks[layer].pre
        if layer in self._gates or weights is None or weights.W_gate is None or name is None:
            return
        x = self._mlp_input(layer)
        mask = self.mask[:, slice(*self.side(layer))]
        differences = upcast(Linear(weights.W_gate, weights.b_gate)(x) - self.captured(name))[mask]
        # what such vectors and weights give; a token's own pre-activations may be nearly zero
        typical = upcast(x)[mask].norm() * upcast(weights.W_gate).norm() / (mask.sum() * x.shape[-1]).sqrt()
        size = typical.clamp_min(torch.finfo(typical.dtype).tiny)
        error = float(differences.norm(dim=-1).max() / size)
        if not error <= self.tolerance:
            raise UnsupportedModelError(
                f"{self.view.blocks[layer].name}.mlp of this {self.view.description}: its gate's pre-activations at "
                f"{name} are not N(x)·W_gate + b_gate (relative error {error:.1e}, allowed {self.tolerance:.0e}), so a "
                "rule that goes through the gate's weights would be wrong. Take hooks off the gate, or use "
                "activation='ratio', which holds the gate as it is."
            )
        self._gates.add(layer)

    @_read
    def _mlp_input(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """What a block's MLP reads, made from the block's own input, at the positions that the block acts on."""
        layout = self.layouts[layer]
        start, stop = self.side(layer)
        norms = {name: self.norm(layer, name) for name in self.view.blocks[layer].norms}
        if layout.parallel:
            x = self.resid_read(layer)
        else:
            before = replace(layout, mlp=Place())
            x = compose(before, self.mixer(layer), None, norms, self.whitening(layer), self._within(layer))(
                self.resid_pre(layer)
            )
        x = x[:, start:stop]
        return x if layout.mlp.before is None else norms[layout.mlp.before](x)

    @_read
    def experts(self, layer: int, activation: str = "ratio") -> dict[str, AffineMap]:
        """What a mixture of experts is the sum of: the chosen ones together, and what every token goes through.

        Raises:
            UnsupportedModelError: the layer has no experts.
        """
        if activation == "ratio" and layer in self._experts:
            return self._experts[layer]
        points = self.points.blocks[layer]
        weights = self._expert_weights(layer)
        assert points.mlp is not None  # experts are held as a whole
        x = self.captured(points.mlp.into)
        beside = x if points.shared is None else self.captured(points.shared.into)
        experts = expert_maps(weights, x, beside, self.routing(layer), activation)
        if activation == "ratio":
            self._experts[layer] = experts
        return experts

    @_read
    def with_norms(self, layer: int, name: str, part: AffineMap) -> AffineMap:
        """A part of a mixture of experts with the norms around it, where it has some of its own."""
        weights = self.view.blocks[layer].mlp
        if not isinstance(weights, ExpertsWeights) or name not in weights.around:
            return part
        before, after = weights.around[name]
        return Chain((self.norm(layer, before), part, self.norm(layer, after)))

    @_read
    def per_layer(self, layer: int, activation: str = "ratio") -> Chain | None:
        """What a block adds for an input of each token at this layer, gate and input held; None without."""
        weights = self.view.blocks[layer].per_layer
        points = self.points.blocks[layer]
        if weights is None or points.per_layer is None or points.per_layer_input is None:
            return None
        gate = Linear(weights.W_gate)
        given = self.captured(points.per_layer_input)
        held = coefficients(weights.activation, gate(self.captured(points.per_layer.into)), None, activation)
        rest = None if held.rest is None else held.rest * given
        return Chain((gate, Diagonal(held.through * given, rest), Linear(weights.W_out)))

    @_read
    def routing(self, layer: int) -> Routes:
        """Which experts each token of a layer is sent to, and what each of them counts: `[batch, pos, choice]` each.

        At padding they are what the model happened to choose there.

        Raises:
            InvalidInputError: no such layer.
            UnsupportedModelError: the layer has no experts.
        """
        layer = whole_number("layer", layer, 0, self.n_layers - 1, why="a layer of this model")
        points = self.points.blocks[layer]
        weights = self._expert_weights(layer)
        assert points.weight is not None
        weight = self.captured(points.weight)
        if points.index is None:  # the weights of all experts, zero for those that are not chosen
            weight, index = weight.topk(weights.choices, dim=-1)
        else:
            index = self.captured(points.index)
        return Routes(index, weight * weights.routing.factor)

    def _expert_weights(self, layer: int) -> ExpertsWeights:
        weights = self.view.blocks[layer].mlp
        if not isinstance(weights, ExpertsWeights):
            raise UnsupportedModelError(f"blocks.{layer} of this {self.view.description} has no experts.")
        return weights

    @_read
    def parts(
        self, layer: int, activation: str = "ratio", heads: Collection[int] | None = None, mlp: bool = True
    ) -> tuple[Chain, AffineMap | None, dict[str, Norm], Chain | None, Within | None]:
        """What a block is composed of: attention, MLP, norms, whitening, and where an encoder–decoder's block acts."""
        norms = {name: self.norm(layer, name) for name in self.view.blocks[layer].norms}
        branch = self.mlp(layer, activation) if mlp else None
        return self.mixer(layer, heads), branch, norms, self.whitening(layer), self._within(layer)

    @_read
    def block_map(
        self,
        layer: int,
        *,
        activation: str = "ratio",
        heads: Collection[int] | None = None,
        mlp: bool = True,
        layout: Layout | None = None,
    ) -> AffineMap:
        """One block as a map; `heads` keeps only those of self-attention, ``mlp=False`` leaves the MLP's branch out.

        An encoder's last block ends with the encoder's norm.

        Raises:
            InvalidInputError: no such layer.
        """
        layer = whole_number("layer", layer, 0, self.n_layers - 1, why="a layer of this model")
        parts = self.parts(layer, activation, heads, mlp)
        return self.composed(layer, layout or self.layouts[layer], parts, activation)

    @_read
    def composed(self, layer: int, layout: Layout, parts: Any, activation: str = "ratio") -> AffineMap:
        """A block from its `parts`, put together in one way."""
        per_layer = self.per_layer(layer, activation)
        ends = self.ends(layer)
        if per_layer is not None:
            ends = [Sum((Identity(), Chain((*per_layer.stages, self.norm(layer, PER_LAYER_NORM))))), *ends]
        return Chain((compose(layout, *parts), *ends)) if ends else compose(layout, *parts)

    def stage(self, layer: int, **options: Any) -> AffineMap:
        """`block_map`, of a block whose weights are offloaded made each time it is used and dropped after."""
        block = self.view.blocks[layer]
        if not block.offloaded:
            return self.block_map(layer, **options)

        @contextmanager
        def block_map() -> Generator[AffineMap, None, None]:
            with block.loaded():
                yield self.block_map(layer, **options)

        return LazyMap(block_map, self.tokens.shape[1], self.row_bytes, block.name)

    def ends(self, layer: int) -> list[AffineMap]:
        """What a block's output goes through besides: a factor of its own, an encoder's final norm."""
        scalar = self.view.blocks[layer].scalar
        norm = self.encoder_norm()
        ends: list[AffineMap] = [] if scalar is None else [Diagonal(scalar.to(self.resid_pre(layer)).reshape(1, 1, 1))]
        if norm is not None and layer + 1 == self.view.encoder_layers:
            ends.append(Segment(norm, *self.side(layer), self.tokens.shape[1]))
        return ends

    def prediction_head(self, activation: str = "ratio") -> Chain | None:
        """What lies between the model's output and its unembedding, frozen; None where nothing does.

        Of a masked language model it is norm(φ(x·W + b)); of a classifier that reads several positions, the norm of
        their mean, the same for every query.
        """
        head = self.view.mlm_head
        classes = self.view.class_head
        if classes is not None and classes.norm is not None and self.points.head_scale is not None:
            batch, pos = self.tokens.shape
            mean = self.output.new_zeros(batch, 1, pos, pos)
            mean[..., : classes.tokens] = 1 / classes.tokens
            norm = self._norm(classes.norm, self.points.head_scale)
            return Chain((Attention(mean, 1), replace(norm, scale=norm.scale.expand(batch, pos, 1))))
        if head is None:
            return None
        dense = Linear(head.W, head.b)
        held = coefficients(head.activation, dense(self.output), rule=activation)
        inside = (dense, Diagonal(held.through, held.rest))
        if head.scale_name is not None:
            return Chain((*inside, self._norm(head.norm, head.scale_name)))
        scale = head.norm.scale_of(Chain(inside)(self.output))
        return Chain((*inside, Norm(scale, head.norm.gain, head.norm.shift, head.norm.centre)))


def _divided(branch: AffineMap, factor: float, device: torch.device) -> AffineMap:
    if factor == 1:
        return branch
    return Chain((branch, Diagonal(torch.full((1, 1, 1), 1 / factor, device=device))))


def check_pass(frozen: Any) -> None:
    """Raise `InvalidInputError` where a model, or anything else, was passed instead of a frozen pass."""
    if not isinstance(frozen, Record):
        raise InvalidInputError(
            f"a frozen pass is needed, got {type(frozen).__name__}: make one with tlens.freeze(model, text)."
        )
