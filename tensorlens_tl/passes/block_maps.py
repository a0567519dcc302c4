"""The maps of the parts of a pass, composed from its captured activations and the model's weights.

Nothing here runs the model or verifies anything: `tensorlens_tl.passes.freezing` makes the capture, and
`tensorlens_tl.passes.proof` determines each block's layout and verifies its map.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra import (
    AffineMap,
    AnyAttention,
    Attention,
    Branch,
    Chain,
    ChainWithReads,
    CrossAttention,
    Diagonal,
    EarlierRead,
    Identity,
    LazyMap,
    Linear,
    Norm,
    Placed,
    Recursion,
    Routed,
    Segment,
    Streams,
    Sum,
    on_device,
    stages_of,
)
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.algebra.secants import Offset
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import ModelPoints, StreamPlace, StreamPoint
from tensorlens_tl.models import (
    FAST,
    SLOW,
    Coefficients,
    FrozenRule,
    Layout,
    Loop,
    ModelView,
    Place,
    Within,
    coefficients,
    compose,
    in_one_kernel,
)
from tensorlens_tl.models.mixers import ChannelMixWeights
from tensorlens_tl.models.names import ENCODER_NORM, END_NORM, PER_LAYER_NORM
from tensorlens_tl.models.parameters import InverseScale, MLPWeights, NormWeights
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.capture import Capture

FIRST = ((1.0, 0.0),)
IN_FIRST = ((1.0,), (0.0,))
SECOND_STAYS = ((0.0, 0.0), (0.0, 1.0))
SAME_STACK = ((1.0, 1.0), (0.0, 1.0))
OTHER_STACK = ((1.0, 1.0), (1.0, 0.0))


# ------------------------------------------------------------------
# The blocks of a loop as one map, from the embedding to the output of the last call.
#
# Between blocks there are two streams side by side: the one that the blocks of a call read and write, and the state of
# the stack that is not called. A call returns its stack's new state; the next call reads the sum of both states, next
# to the state of the stack that it does not belong to: the same as before if one stack is called twice, else the new
# one.


def unrolled(loop: Loop, stages: Sequence[AffineMap], x: Float[Tensor, "batch pos d_model"]) -> list[AffineMap]:
    """Return the maps of all blocks in the order of their calls, composed as in the loop.

    Args:
        loop: the calls.
        stages: the map of each block, including the norm at the end of every call but the last.
        x: the first block's input, for its dtype.
    """

    def streams(factors: Sequence[Sequence[float]]) -> Streams:
        return Streams(torch.tensor(factors, dtype=x.dtype, device=x.device))

    maps: list[AffineMap] = [streams(((1.0,), (loop.scale,)))]  # the first block scales its input itself
    remaining = iter(stages)
    for call, after in zip(loop.calls, [*loop.calls[1:], None], strict=True):
        blocks = [next(remaining) for _ in range(call.length)]
        called = Chain((streams(FIRST), *blocks, streams(IN_FIRST)))
        maps.append(Sum((called, streams(SECOND_STAYS))))
        if after is None:
            maps.append(streams(FIRST))
        else:
            maps.append(streams(SAME_STACK if after.stack == call.stack else OTHER_STACK))
    return maps


def check_loop(capture: Capture, tolerance: float) -> dict[str, float]:
    """Compare the input of the first block of every call with the sum of both states.

    Returns:
        The largest relative error, as ``"loop"``; empty for a model without a loop.

    Raises:
        UnsupportedModelError: they differ, so the calls follow each other in another way.
    """
    loop = capture.view.loop
    if loop is None:
        return {}
    first = 0
    x = capture.resid_pre(0)
    states = {SLOW: x * loop.scale, FAST: loop.start.to(x).expand_as(x)}
    worst = 0.0
    for call in loop.calls:
        total = sum(states.values(), start=torch.zeros_like(x))
        worst = max(worst, relative_error(total, capture.resid_read(first), capture.mask))
        first += call.length
        states[call.stack] = capture.resid_post(first - 1)
    if not worst <= tolerance:
        raise UnsupportedModelError(
            f"{capture.view.description}: its stacks are not called as its config says: the input of a block is not "
            f"the sum of their states (relative error {worst:.1e}, allowed {tolerance:.0e})."
        )
    return {"loop": worst}


EXPERTS = "experts"
SHARED = "shared"


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts to which the tokens of one layer are routed.

    Attributes:
        index: the experts' numbers, `[batch, pos, choice]`.
        weight: their weights, in the same shape; factors of the experts' outputs, or (Llama 4) of their inputs.
    """

    index: Int[Tensor, "batch pos choice"]
    weight: Float[Tensor, "batch pos choice"]


def held_coefficients(weights: MLPWeights, x: Float[Tensor, "batch pos d_model"], rule: FrozenRule) -> Coefficients:
    """Return the coefficients of an MLP's activation under a rule, at its input."""
    pre_in = Linear(weights.W_in, weights.b_in)(x)
    phi = in_one_kernel(weights.activation, pre_in.dtype)
    if weights.W_gate is None:
        return coefficients(phi, pre_in, None, rule)
    gate = Linear(weights.W_gate, weights.b_gate)(x)
    return coefficients(phi, gate, pre_in, rule, weights.linear_activation)


def mlp_chain(weights: MLPWeights, held: Coefficients) -> Chain:
    """Return an MLP with its activation replaced by these coefficients."""
    through = Diagonal(held.through, held.offset(weights.b_post))
    if weights.W_gate is None or held.gate is None:
        hidden: tuple[AffineMap, ...] = (Linear(weights.W_in, weights.b_in), through)
    else:
        branches = (
            Chain((Linear(weights.W_in, weights.b_in), through)),
            Chain((Linear(weights.W_gate, weights.b_gate), Diagonal(held.gate))),
        )
        hidden = (Sum(branches),)
    return Chain((*hidden, Linear(weights.W_out, weights.b_out)))


def frozen_mlp(weights: MLPWeights, x: Float[Tensor, "batch pos d_model"], rule: FrozenRule) -> Chain:
    """Return an MLP as a map of its input."""
    chain = mlp_chain(weights, held_coefficients(weights, x, rule))
    if weights.post_factor is None:
        return chain
    *hidden, written = chain.stages
    return Chain((*hidden, Diagonal(weights.post_factor(Chain(tuple(hidden))(x))), written))


def expert_maps(
    weights: ExpertsWeights,
    x: Float[Tensor, "batch pos d_model"],
    beside: Float[Tensor, "batch pos d_model"],
    routes: Routes,
    rule: FrozenRule,
) -> dict[str, AffineMap]:
    """Return the summands of a mixture of experts by name: ``"experts"`` and, if there are any, ``"shared"``.

    Args:
        weights: the experts' weights.
        x: the experts' input.
        beside: the shared expert's input.
        routes: the routing of tokens.
        rule: the rule for activations.

    Raises:
        UnsupportedModelError: the routing has another form.
    """
    if routes.index.shape != routes.weight.shape:
        raise UnsupportedModelError(
            f"experts are called with {tuple(routes.index.shape)} choices and {tuple(routes.weight.shape)} weights for "
            f"tokens {tuple(x.shape[:2])}; only routing [token, choice] is supported."
        )
    flat_index = routes.index.flatten(0, 1)
    flat_weight = routes.weight.flatten(0, 1).to(x)
    flat_x = x.flatten(0, 1)
    branches = []
    for number in flat_index[flat_weight != 0].unique().tolist():
        if number >= weights.count:  # some routers have a choice without an expert
            continue
        tokens, choice = ((flat_index == number) & (flat_weight != 0)).nonzero(as_tuple=True)
        scale = flat_weight[tokens, choice]
        packed = flat_x[tokens][None]
        if weights.routing.scales_input:
            inner = frozen_mlp(weights.expert(number), packed * scale[:, None], rule)
            expert = Chain((Diagonal(scale[None, :, None]), *inner.stages))
            scale = torch.ones_like(scale)
        else:
            expert = frozen_mlp(weights.expert(number), packed, rule)
        branches.append(Branch(expert, tokens, scale * weights.branch_factor, number))
    if not branches:  # every choice has weight zero
        nothing = frozen_mlp(weights.expert(0), flat_x[:0][None], rule)
        branches.append(Branch(nothing, flat_index.new_zeros(0), flat_weight.new_zeros(0)))
    maps: dict[str, AffineMap] = {EXPERTS: Routed(tuple(branches), tuple(x.shape[:2]), x.shape[-1])}
    if weights.shared is not None:
        shared = frozen_mlp(weights.shared, beside, rule)
        stages = list(shared.stages)
        if weights.shared_gate is not None:
            stages.append(Diagonal(weights.shared_gate(beside)))
        if weights.branch_factor != 1:
            stages.append(Diagonal(torch.full_like(x[:1, :1, :1], weights.branch_factor)))
        maps[SHARED] = Chain(tuple(stages))
    return maps


Options = ParamSpec("Options")
Result = TypeVar("Result")
BlocksType = TypeVar("BlocksType", bound="Blocks")


def reads_weights(
    method: Callable[Concatenate[BlocksType, int, Options], Result],
) -> Callable[Concatenate[BlocksType, int, Options], Result]:
    """Decorate a method that reads one layer's weights: loads them for the call if they are offloaded."""

    @wraps(method)
    def reading(self: BlocksType, layer: int, *arguments: Options.args, **options: Options.kwargs) -> Result:
        blocks = self.view.blocks
        if not isinstance(layer, int) or not 0 <= layer < len(blocks) or not blocks[layer].brought:
            return method(self, layer, *arguments, **options)
        with blocks[layer].loaded():
            result = method(self, layer, *arguments, **options)
        self.forget(layer)  # cached maps are as large as the weights
        return result

    return reading


class PartMaps(NamedTuple):
    """The components of a block, in the order of `models.layouts.compose`.

    Attributes:
        attention: attention, or the mixer in its place.
        mlp: None if the block has none, or it is left out.
        norms: the norms by name.
        whitening: the whitening in a whitened model.
        within: where an encoder–decoder's block acts.
        beside: a mixer next to attention.
    """

    attention: AffineMap
    mlp: AffineMap | None
    norms: Mapping[str, AffineMap]
    whitening: Chain | None = None
    within: Within | None = None
    beside: AffineMap | None = None


class Blocks(ABC):
    """The parts of every block as maps.

    Attributes:
        capture: the run that defines positions and sides; the first of two runs.
        layouts: how each block is composed; empty until that is verified.
    """

    capture: Capture
    layouts: tuple[Layout, ...]

    @cached_property
    @abstractmethod
    def row_bytes(self) -> int:
        """The maximal bytes that one vector allocates on its way."""

    @property
    def view(self) -> ModelView:
        """The reader of the model's weights."""
        return self.capture.view

    @property
    def mask(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens; the same in both of two runs."""
        return self.capture.mask

    @property
    def padding_mask(self) -> Bool[Tensor, "batch pos"] | None:
        """The mask for maps that carry a state from token to token; None if every token is real."""
        return None if bool(self.mask.all()) else self.mask

    @abstractmethod
    def forget(self, layer: int) -> None:
        """Drop cached results for a layer that are as large as its weights."""

    # ------------------------------------------------------------------ parts

    @abstractmethod
    def norm(self, layer: int, /, name: str) -> AffineMap:
        """Return one norm of one block, as a map of the positions that the block acts on."""

    @abstractmethod
    def final_norm(self) -> AffineMap | None:
        """Return the norm after the last block, or None."""

    @abstractmethod
    def encoder_norm(self) -> AffineMap | None:
        """Return the norm after an encoder–decoder's last encoder block, or None."""

    @abstractmethod
    def within(self, layer: int, /) -> Within | None:
        """Return where a block acts; None if there is one stack."""

    @abstractmethod
    def whitening(self, layer: int, /) -> Chain | None:
        """Return the whitening of the stream before a block of a whitened model; None for any other model."""

    @abstractmethod
    def mixer(self, layer: int, /, heads: Collection[int] | None = None) -> Chain:
        """Return attention, or the mixer in its place; `heads` keeps only those heads."""

    @abstractmethod
    def beside(self, layer: int, /) -> Chain | None:
        """Return the mixer next to attention, or None."""

    @abstractmethod
    def mlp(self, layer: int, /, rule: FrozenRule = "frozen") -> AffineMap | None:
        """Return one MLP or mixture of experts, or None without one."""

    @abstractmethod
    def experts(self, layer: int, /, rule: FrozenRule = "frozen") -> dict[str, AffineMap]:
        """Return the summands of a mixture of experts: the routed experts together, and the shared one."""

    @abstractmethod
    def per_layer(self, layer: int, /, rule: FrozenRule = "frozen") -> Chain | None:
        """Return the branch for a separate input of each token at this layer; None without one."""

    @abstractmethod
    def additions(self, layer: int, /) -> Mapping[StreamPoint, Offset]:
        """Return the vectors that user-installed hooks add to the stream in a block, by hook point."""

    @abstractmethod
    def prediction_head(self, rule: FrozenRule = "frozen") -> Chain | None:
        """Return the map between the model's output and its unembedding, or None."""

    # ------------------------------------------------------------------ composed

    def final_map(self) -> AffineMap | None:
        """Return the norm after the last block as a map of all positions; it acts on those of the last block."""
        norm = self.final_norm()
        if norm is None or self.capture.sides is None:
            return norm
        start, stop = self.capture.side(self.capture.n_layers - 1)
        return Segment(norm, start, stop, stop)

    @reads_weights
    def parts(
        self, layer: int, rule: FrozenRule = "frozen", heads: Collection[int] | None = None, mlp: bool = True
    ) -> PartMaps:
        """Return the components of a block, as maps of the stream that enters it."""
        norms = {name: self.norm(layer, name) for name in self.view.blocks[layer].norms}
        last = self.encoder_norm() if layer + 1 == self.view.encoder_layers else None
        if last is not None:
            norms[ENCODER_NORM] = last
        mixing = self._attention_of_stream(layer, heads)
        branch = self.mlp(layer, rule) if mlp else None
        within = self.within(layer)
        return PartMaps(mixing, branch, norms, self.whitening(layer), within, self.beside(layer))

    def _attention_of_stream(self, layer: int, heads: Collection[int] | None) -> AffineMap:
        """Attention as a map of the stream that enters the block: a constant if it takes another block's values."""
        mixing = self.mixer(layer, heads)
        ends = self.capture.points.blocks[layer].attention
        if self.view.blocks[layer].values_layer is None or ends is None:
            return mixing
        written = mixing(self.capture.activation(ends.into))
        return Diagonal(torch.zeros_like(written), written)

    def shared_read(self, layer: int, heads: Collection[int] | None = None) -> EarlierRead | None:
        """Return the effect, on a block that takes another block's values, of a change of the stream at that block.

        Returns:
            A map of that stream, zero at the pass's own, which is counted as a constant of the block; None if the block
            takes no values.

        Raises:
            UnsupportedModelError: attention and MLP are parallel, or the stream of the other block is whitened.
        """
        source = self.view.blocks[layer].values_layer
        if source is None:
            return None
        layout = self.layouts[layer]
        if layout.parallel or self.view.is_whitened:
            raise UnsupportedModelError(
                f"{self.view.blocks[layer].name} of this {self.view.description} takes the values of an earlier block, "
                "which is not supported if attention and MLP are parallel or the stream is whitened."
            )
        before = self.layouts[source].attn.before
        reads = () if before is None else (self.norm(source, before),)
        writes = () if layout.attn.after is None else (self.norm(layer, layout.attn.after),)
        written = Chain((*reads, *self.mixer(layer, heads).stages, *writes))
        constant = Offset(-written(self.capture.resid_pre(source)), f"L{layer}.attn")
        return EarlierRead(source, Chain((*written.stages, constant)))

    @reads_weights
    def block_map(
        self,
        layer: int,
        *,
        rule: FrozenRule = "frozen",
        heads: Collection[int] | None = None,
        mlp: bool = True,
        layout: Layout | None = None,
    ) -> AffineMap:
        """Return one block as a map; `heads` keeps only those of self-attention, ``mlp=False`` leaves out the MLP.

        An encoder's last block ends with the encoder's norm. Values taken from an earlier block are constants.

        Raises:
            InvalidInputError: no such layer.
        """
        layer = whole_number("layer", layer, 0, self.capture.n_layers - 1, why="a layer of this model")
        parts = self.parts(layer, rule, heads, mlp)
        return self.composed(layer, layout or self.layouts[layer], parts, rule)

    @reads_weights
    def composed(self, layer: int, layout: Layout, parts: PartMaps, rule: FrozenRule = "frozen") -> AffineMap:
        """Return a block composed from its `parts` in the given layout."""
        per_layer = self.per_layer(layer, rule)
        ends = self.ends(layer, parts.norms)
        if per_layer is not None:
            ends = [Sum((Identity(), Chain((*per_layer.stages, self.norm(layer, PER_LAYER_NORM))))), *ends]
        block = self.sublayers(layer, layout, parts)
        return Chain((*stages_of(block), *ends)) if ends else block

    def sublayers(self, layer: int, layout: Layout, parts: PartMaps) -> AffineMap:
        """Return a block from its `parts` up to both sublayers; additions by hooks go with their sublayer."""
        middle, late = self.stream_offsets(layer, mlp=parts.mlp is not None)
        return compose(layout, *parts, middle=middle, late=late)

    def stream_offsets(self, layer: int, *, mlp: bool = True) -> tuple[list[Offset], list[Offset]]:
        """Return additions by hooks after attention and after the MLP (without `mlp`, not those to its output)."""
        added = self.additions(layer).items()
        middle = [offset for point, offset in added if point.place in ("attention", "middle")]
        late = [offset for point, offset in added if point.place == "late" or (mlp and point.place == "mlp")]
        return middle, late

    @reads_weights
    def mixture(self, layer: int, parts: Mapping[str, AffineMap]) -> AffineMap:
        """Return a mixture of experts from its parts."""
        branches = [self.with_norms(layer, name, part) for name, part in parts.items()]
        return branches[0] if len(branches) == 1 else Sum(tuple(branches))

    @reads_weights
    def with_norms(self, layer: int, name: str, part: AffineMap) -> AffineMap:
        """Return a part of a mixture of experts with the norms around it, if any."""
        weights = self.view.blocks[layer].mlp
        if not isinstance(weights, ExpertsWeights) or name not in weights.around:
            return part
        before, after = weights.around[name]
        return Chain((self.norm(layer, before), part, self.norm(layer, after)))

    def stage(self, layer: int, **options: Any) -> AffineMap:
        """See `block_map`; composed `lazily`."""
        return self.lazily(layer, lambda: self.block_map(layer, **options))

    def stages(
        self, layers: range, *, rule: FrozenRule, heads: Mapping[int, Collection[int]], mlp: Collection[int]
    ) -> list[AffineMap]:
        """Return consecutive blocks as maps to be applied one after the other.

        Blocks that take values from an earlier one of them form a single map with it. Values from a block before the
        first are constants. Blocks that run in a loop are composed as in the loop.

        Args:
            layers: the blocks.
            rule: the rule for MLPs.
            heads: the heads to keep, for some layers.
            mlp: the layers whose MLPs are kept.
        """
        reads: dict[int, EarlierRead] = {}
        blocks: list[AffineMap] = []
        for number, layer in enumerate(layers):
            only = heads.get(layer)
            read = self.shared_read(layer, only)
            if read is not None and read.source in layers:
                reads[number] = read._replace(source=read.source - layers.start)
            blocks.append(self.stage(layer, rule=rule, heads=only, mlp=layer in mlp))
        if self.view.loop is not None:
            if len(layers) < self.view.n_layers:
                self.view.refuse_loop(f"layers {layers.start} to {layers.stop - 1}")
            return unrolled(self.view.loop, blocks, self.capture.resid_pre(0))
        return [ChainWithReads(tuple(blocks), reads)] if reads else blocks

    def lazily(self, layer: int, compose_part: Callable[[], AffineMap]) -> AffineMap:
        """Return a part of a block; if its weights are offloaded, compose it at each use and drop it afterwards."""
        block = self.view.blocks[layer]
        if not block.brought:
            return compose_part()

        @contextmanager
        def opened() -> Generator[AffineMap, None, None]:
            with block.loaded():
                yield compose_part()

        return LazyMap(opened, self.capture.tokens.shape[1], self.row_bytes, block.name)

    def ends(self, layer: int, norms: Mapping[str, AffineMap] | None = None) -> list[AffineMap]:
        """Return the maps after a block's sublayers: its scalar factor, an encoder's final norm, additions by hooks.

        Args:
            layer: the block.
            norms: those of `parts`, including the encoder's final norm if that is to be another map.
        """
        ends: list[AffineMap] = []
        scalar = self.view.blocks[layer].scalar
        if scalar is not None:
            ends.append(Diagonal(scalar.to(self.capture.resid_pre(layer)).reshape(1, 1, 1)))
        if self.view.blocks[layer].end_norm is not None:
            ends.append(self.norm(layer, END_NORM))
        norm = self.encoder_norm() if layer + 1 == self.view.encoder_layers else None
        if norm is not None:
            norm = (norms or {}).get(ENCODER_NORM, norm)
            ends.append(Segment(norm, *self.capture.side(layer), self.capture.tokens.shape[1]))
        return ends + [offset for point, offset in self.additions(layer).items() if point.place == "end"]


@dataclass(eq=False)
class _Cache:
    """Results that are computed once for each layer under the default activation rule.

    Attributes:
        ratios: the coefficients of a dense MLP's activation.
        experts: the parts of a mixture of experts.
        gates: the layers whose gate was compared with its weights.
    """

    ratios: dict[int, Coefficients] = field(default_factory=dict[int, Coefficients])
    experts: dict[int, dict[str, AffineMap]] = field(default_factory=dict[int, dict[str, AffineMap]])
    gates: set[int] = field(default_factory=set[int])

    def forget(self, layer: int) -> None:
        """Drop results that are as large as a layer's weights."""
        self.ratios.pop(layer, None)
        self.experts.pop(layer, None)


@dataclass(frozen=True, eq=False)
class BlockMaps(Blocks):
    """The parts of every block as maps, with patterns, activation ratios and norm scales from one capture.

    Attributes:
        capture: the activations.
        tolerance: the largest error that a proof allows.
        layouts: how each block is composed; empty until that is verified.
    """

    capture: Capture
    tolerance: float = 1e-4
    layouts: tuple[Layout, ...] = ()
    cache: _Cache = field(default_factory=_Cache, repr=False)

    def with_capture(self, capture: Capture) -> "BlockMaps":
        """Return the same blocks at other activations, or with other weights."""
        return replace(self, capture=capture, cache=_Cache())

    def of_two_runs(self) -> "BlockMaps":
        """Return the same blocks for a difference, in which the effect of a patch is a constant of the run."""
        additions = replace(self.capture.additions, patched=())
        return replace(self, capture=replace(self.capture, additions=additions))

    def at_weights(self, layer: int) -> "BlockMaps":
        """Return the same maps on the device of a block's weights; these if results are there too."""
        block = self.view.blocks[layer]
        if not block.moved:
            return self
        if block.device not in self._on_devices:
            capture = self.capture.on(block.device)
            self._on_devices[block.device] = replace(self, capture=capture, cache=_Cache())
        return self._on_devices[block.device]

    @cached_property
    def _on_devices(self) -> dict[torch.device, "BlockMaps"]:
        return {}

    def stage(self, layer: int, **options: Any) -> AffineMap:
        """See `block_map`; on the device of the block's weights, and composed `lazily`."""
        maps = self.at_weights(layer)
        stage = maps.lazily(layer, partial(maps.block_map, layer, **options))
        if maps is self:
            return stage
        return Placed(stage, maps.mask.device, self.mask.device)

    def forget(self, layer: int) -> None:
        """Drop cached results for a layer that are as large as its weights."""
        self.cache.forget(layer)

    @property
    def points(self) -> ModelPoints:
        """The hook points."""
        return self.capture.points

    @cached_property
    def row_bytes(self) -> int:
        """The maximal bytes that one vector allocates: the stream, a sublayer's input, and the widest hidden layer."""
        widest = max((block.widest for block in self.view.blocks), default=0)
        x = self.capture.resid_pre(0)
        vectors = 3 if self.view.loop is None else 4  # plus the state of the stack that is not called
        return x[..., 0].numel() * (vectors * x.shape[-1] + widest) * x.element_size()

    # ------------------------------------------------------------------ maps

    @reads_weights
    def norm(self, layer: int, name: str) -> Norm:
        """Return one norm of one block, with a frozen scale; a map of the block's positions (see `side`)."""
        block = self.view.blocks[layer]
        return self._norm((block.norms | block.inner_norms)[name], self.points.blocks[layer].scales[name])

    def final_norm(self) -> Norm | None:
        """Return the norm after the last block, or None."""
        if self.view.final_norm is None or self.points.final_scale is None:
            return None
        return self._norm(self.view.final_norm, self.points.final_scale)

    def _norm(self, weights: NormWeights, scale_name: str) -> Norm:
        scale = self.capture.activation(scale_name)
        if weights.epsilon is not None:  # the hook point shows the norm's input
            scale = weights.scale_of(scale)
        return Norm(scale, weights.gain, weights.shift, weights.centre)

    def encoder_norm(self) -> Norm | None:
        """Return the norm after an encoder–decoder's last encoder block, or None."""
        if self.view.encoder_norm is None or self.points.encoder_scale is None:
            return None
        return on_device(self._norm(self.view.encoder_norm, self.points.encoder_scale), self.mask.device)

    @reads_weights
    def within(self, layer: int) -> Within | None:
        """Return where a block acts; None if there is one stack."""
        if self.capture.sides is None:
            return None
        start, stop = self.capture.side(layer)
        length = self.capture.tokens.shape[1]
        weights = self.view.blocks[layer].cross_attention
        points = self.points.blocks[layer].cross
        if weights is None or points is None:
            return Within(start, stop, length)
        pattern = self.capture.cross_pattern(layer).to(self.capture.resid_pre(0).dtype)
        mixing = CrossAttention(pattern, weights.kv_heads, (start, stop), (0, start), length)
        read = Chain((Linear(weights.W_V, weights.b_V), mixing))
        return Within(start, stop, length, read, Linear(weights.W_O, weights.b_O))

    def whitening(self, layer: int) -> Chain | None:
        """Return the whitening of the stream before a block of a whitened model; None for any other model.

        Before the first block of a loop, it is the map of the embedding to that block's input.
        """
        loop = self.view.loop
        if loop is not None and layer == 0:
            start = loop.start.to(self.capture.resid_pre(0))[None, None]
            return Chain((Diagonal(start.new_full(start.shape, loop.scale), start),))
        weights = self.view.blocks[layer].whitening
        if weights is None:
            return None
        return Chain((Linear(weights.entry), Recursion(weights.step, self.padding_mask)))

    @reads_weights
    def attention(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """Return one self-attention sublayer with a frozen pattern: values, mixing, output.

        `heads` keeps only those (b_O stays). As `mlp`, a map of the block's positions (see `side`).
        """
        weights = self.view.blocks[layer].attention
        ends = self.points.blocks[layer].attention
        mixing = self._mixing(layer, heads)
        out = Linear(weights.W_O, weights.b_O)
        if ends is None:
            return Chain((Linear(weights.W_V, weights.b_V), mixing, out))
        x = self.capture.activation(ends.into)
        if weights.inner_values is None:
            assert weights.value_matrix is not None
            values = Linear(weights.value_matrix, weights.b_V)
        else:
            values = weights.inner_values(x)
        if weights.output_factor is None:
            return Chain((values, mixing, out))
        reads = x
        if isinstance(weights.output_factor, InverseScale):
            reads = self._mixing(layer)(values(x))
        factor = weights.output_factor(reads)
        return Chain((values, mixing, Chain((Diagonal(factor), out))))

    @reads_weights
    def pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return `Capture.pattern`; if heads belong to experts (JetMoe), that of every expert's heads.

        It is multiplied by the expert's weight at the query, zero for an expert that the query's token is not routed
        to. Each key-value head has one head of each expert.
        """
        pattern = self.capture.pattern(layer)
        ends = self.points.blocks[layer].attention
        if ends is None:
            return pattern
        routing = self.view.blocks[layer].attention.routing
        return pattern if routing is None else routing.patterns(pattern, self.capture.activation(ends.into))

    def _mixing(self, layer: int, heads: Collection[int] | None = None) -> AnyAttention:
        """The pattern as a map, stored or recomputed; heads that are left out are zero."""
        weights = self.view.blocks[layer].attention
        name = self.points.blocks[layer].pattern
        dtype = self.capture.resid_pre(layer).dtype
        head_mask = None
        if heads is not None:
            head_mask = torch.zeros(weights.heads, dtype=dtype, device=self.capture.tokens.device)
            head_mask[list(heads)] = 1
        if name is not None and name not in self.capture.activations and name in self.capture.held_scores:
            return self.capture.scores_behind(name).attention(dtype, head_mask)
        pattern = self.pattern(layer).to(dtype)
        if head_mask is not None:
            pattern = pattern * head_mask[:, None, None]
        return Attention(pattern, weights.kv_heads)

    @reads_weights
    def mixer(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """Return attention, or the mixer in its place, with everything that depends on its input held."""
        read = self.view.blocks[layer].mixer
        ends = self.points.blocks[layer].attention
        if read is None:
            return self.attention(layer, heads)
        if heads is not None:
            self.view.blocks[layer].require_attention()
        if ends is None:  # nothing mixes positions
            return read(self.capture.resid_pre(layer), None)
        mixing = read(self.capture.activation(ends.into), self.padding_mask)
        return self._multiplied(layer, mixing, self.view.blocks[layer].branch_factor)

    @reads_weights
    def beside(self, layer: int) -> Chain | None:
        """Return the mixer next to attention, with everything that depends on its input held, or None."""
        mixing = self.beside_alone(layer)
        if mixing is None:
            return None
        return self._multiplied(layer, mixing, self.view.blocks[layer].beside_factor)

    @reads_weights
    def beside_alone(self, layer: int) -> Chain | None:
        """Return the same as its own module computes it, without the block's factor."""
        read = self.view.blocks[layer].beside
        ends = self.points.blocks[layer].beside
        if read is None or ends is None:
            return None
        return read(self.capture.activation(ends.into), self.padding_mask)

    def _multiplied(self, layer: int, mixing: Chain, factor: float) -> Chain:
        if factor == 1:
            return mixing
        return Chain((*mixing.stages, Diagonal(self.capture.resid_pre(layer).new_full((1, 1, 1), factor))))

    @reads_weights
    def attention_alone(self, layer: int) -> AffineMap:
        """Return attention as the model's own module computes it, without the block's factor for its branches.

        Additions by hooks to its output are included, because a replacement of that output comes after them.
        """
        factor = self.view.blocks[layer].attention_factor
        return self._divided(layer, self._with_added(layer, self.mixer(layer), "attention"), factor)

    @reads_weights
    def mlp_alone(self, layer: int, rule: FrozenRule = "frozen") -> AffineMap | None:
        """Return the MLP as the model's own module computes it; see `attention_alone`."""
        mlp = self.mlp(layer, rule)
        if mlp is None:
            return None
        return self._divided(layer, self._with_added(layer, mlp, "mlp"), self.view.blocks[layer].branch_factor)

    @reads_weights
    def experts_alone(self, layer: int, rule: FrozenRule = "frozen") -> dict[str, AffineMap]:
        """Return the parts of a mixture of experts without the block's factor."""
        factor = self.view.blocks[layer].branch_factor
        return {name: self._divided(layer, part, factor) for name, part in self.experts(layer, rule).items()}

    def _with_added(self, layer: int, branch: AffineMap, place: StreamPlace) -> AffineMap:
        """A branch with the additions by hooks to the output of its module."""
        added = self.additions(layer).items()
        offsets = [offset for point, offset in added if point.inside and point.place == place]
        return Chain((*stages_of(branch), *offsets)) if offsets else branch

    def _divided(self, layer: int, branch: AffineMap, factor: float) -> AffineMap:
        """A branch of a block without the block's factor."""
        if factor == 1:
            return branch
        return self._multiplied(layer, Chain((branch,)), 1 / factor)

    @reads_weights
    def mlp_coefficients(self, layer: int, rule: FrozenRule = "frozen") -> Coefficients | None:
        """Return the replacement of one layer's activation under a rule; None without an MLP.

        Raises:
            UnsupportedModelError: the layer is a mixture of experts.
        """
        points = self.points.blocks[layer]
        weights = self.view.blocks[layer].dense_mlp
        if weights is None:
            return None
        if rule == "frozen" and layer in self.cache.ratios:  # the proof and every default operator use them
            return self.cache.ratios[layer]
        if points.mlp is not None:
            held = held_coefficients(weights, self.capture.activation(points.mlp.into), rule)
        else:
            assert points.pre is not None
            linear = None if points.pre_linear is None else self.capture.activation(points.pre_linear)
            pre = self.capture.activation(points.pre)
            held = coefficients(in_one_kernel(weights.activation, pre.dtype), pre, linear, rule)
        if rule == "frozen":
            self.cache.ratios[layer] = held
        return held

    @reads_weights
    def mlp(self, layer: int, rule: FrozenRule = "frozen") -> AffineMap | None:
        """Return one MLP or mixture of experts, with activations and routing frozen, or None without one."""
        weights = self.view.blocks[layer].mlp
        if isinstance(weights, ExpertsWeights):
            return self.mixture(layer, self.experts(layer, rule))
        ends = self.points.blocks[layer].mlp
        if isinstance(weights, ChannelMixWeights):
            assert ends is not None
            return weights.hold(self.capture.activation(ends.into), rule)
        held = self.mlp_coefficients(layer, rule)
        if weights is None or held is None:
            return None
        if weights.post_factor is not None and ends is not None:
            return frozen_mlp(weights, self.capture.activation(ends.into), rule)
        if held.gate is not None and layer < len(self.layouts):
            self.check_gate(layer)
        return mlp_chain(weights, held)

    @reads_weights
    def check_gate(self, layer: int) -> None:
        """Compare a gate's pre-activations, computed from its weights, with the captured ones; once per layer.

        The default rule holds the gate's activation and never reads its weights; a rule that pulls through them is
        right only if they give that activation.

        Raises:
            UnsupportedModelError: they differ: there is a hook on the gate, or its module was changed.
        """
        weights = self.view.blocks[layer].dense_mlp
        name = self.points.blocks[layer].pre
        if layer in self.cache.gates or weights is None or weights.W_gate is None or name is None:
            return
        x = self._mlp_input(layer)
        mask = self.mask[:, slice(*self.capture.side(layer))]
        differences = upcast(Linear(weights.W_gate, weights.b_gate)(x) - self.capture.activation(name))[mask]
        # the size expected from such vectors and weights; a token's own pre-activations may be nearly zero
        typical = upcast(x)[mask].norm() * upcast(weights.W_gate).norm() / (mask.sum() * x.shape[-1]).sqrt()
        size = typical.clamp_min(torch.finfo(typical.dtype).tiny)
        error = float(differences.norm(dim=-1).max() / size)
        if not error <= self.tolerance:
            raise UnsupportedModelError(
                f"{self.view.blocks[layer].name}.mlp of this {self.view.description}: its gate's pre-activations at "
                f"{name} are not N(x)·W_gate + b_gate (relative error {error:.1e}, allowed {self.tolerance:.0e}), so a "
                "rule that goes through the gate's weights would be wrong. Take hooks off the gate, or use "
                "rule='frozen', which holds the gate as it is."
            )
        self.cache.gates.add(layer)

    @reads_weights
    def _mlp_input(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The input of a block's MLP, computed from the block's input, at the positions that the block acts on."""
        layout = self.layouts[layer]
        start, stop = self.capture.side(layer)
        if layout.parallel:
            x = self.capture.resid_read(layer)
        else:
            before = replace(layout, mlp=Place())
            parts = self.parts(layer, mlp=False)
            x = self.sublayers(layer, before, parts)(self.capture.resid_pre(layer))
        x = x[:, start:stop]
        if layout.mlp.before is None:
            return x
        return self.norm(layer, layout.mlp.before)(x)

    @reads_weights
    def experts(self, layer: int, rule: FrozenRule = "frozen") -> dict[str, AffineMap]:
        """Return the summands of a mixture of experts: the routed experts together, and the shared one.

        Raises:
            UnsupportedModelError: the layer has no experts.
        """
        if rule == "frozen" and layer in self.cache.experts:
            return self.cache.experts[layer]
        points = self.points.blocks[layer]
        weights = self.expert_weights(layer)
        assert points.mlp is not None  # experts are held as a whole
        x = self.capture.activation(points.mlp.into)
        beside = self.capture.activation((points.shared or points.mlp).into)
        experts = expert_maps(weights, x, beside, self.routing(layer), rule)
        if rule == "frozen":
            self.cache.experts[layer] = experts
        return experts

    @reads_weights
    def per_layer(self, layer: int, rule: FrozenRule = "frozen") -> Chain | None:
        """Return the branch for a separate input of each token at this layer, gate and input held; None without one."""
        weights = self.view.blocks[layer].per_layer
        points = self.points.blocks[layer]
        if weights is None or points.per_layer is None or points.per_layer_input is None:
            return None
        gate = Linear(weights.W_gate)
        factor = self.capture.activation(points.per_layer_input)
        held = coefficients(weights.activation, gate(self.capture.activation(points.per_layer.into)), None, rule)
        rest = None if held.rest is None else held.rest * factor
        return Chain((gate, Diagonal(held.through * factor, rest), Linear(weights.W_out)))

    def additions(self, layer: int) -> dict[StreamPoint, Offset]:
        """Return the vectors that user-installed hooks add to the stream in a block, by hook point.

        Raises:
            UnsupportedModelError: a hook replaces entries of the stream, and this is a single pass: the replaced
                entries must have no effect, but in a map that adds a constant they would.
        """
        patched = [point.name for point in self.capture.additions.patched if point.layer == layer]
        if patched and self.layouts:
            raise UnsupportedModelError(
                f"blocks.{layer} of this {self.view.description}: a hook at {' and '.join(patched)} replaced values "
                "that the model computes (a patch), so a single pass has no map there. Compare it with a run without "
                "the hook, tlens.difference(patched, plain), in which the change made by the patch is a constant."
            )
        block = self.view.blocks[layer]
        offsets: dict[StreamPoint, Offset] = {}
        for point, vectors in self.capture.additions.of(layer).items():
            factor = block.attention_factor if point.place == "attention" else block.branch_factor
            if block.halved and point.name == f"{block.name}.hook_resid_post":
                vectors = vectors / 2
            offsets[point] = Offset(vectors * factor if point.inside else vectors, point.name)
        return offsets

    @reads_weights
    def routing(self, layer: int) -> Routes:
        """Return the experts that each token of a layer is routed to, and their weights: `[batch, pos, choice]` each.

        At padding, these are the model's arbitrary choices.

        Raises:
            InvalidInputError: no such layer.
            UnsupportedModelError: the layer has no experts.
        """
        layer = whole_number("layer", layer, 0, self.capture.n_layers - 1, why="a layer of this model")
        points = self.points.blocks[layer]
        weights = self.expert_weights(layer)
        assert points.weight is not None
        weight = self.capture.activation(points.weight)
        if points.index is None:  # the weights of all experts, zero for those that are not chosen
            weight, index = weight.topk(weights.choices, dim=-1)
        else:
            index = self.capture.activation(points.index)
        return Routes(index, weights.routing.of_choices(weight, index))

    def expert_weights(self, layer: int) -> ExpertsWeights:
        """Return the weights of a layer's experts.

        Raises:
            UnsupportedModelError: it has none.
        """
        weights = self.view.blocks[layer].mlp
        if not isinstance(weights, ExpertsWeights):
            raise UnsupportedModelError(f"blocks.{layer} of this {self.view.description} has no experts.")
        return weights

    def prediction_head(self, rule: FrozenRule = "frozen") -> Chain | None:
        """Return the frozen map between the model's output and its unembedding, or None.

        For a masked language model it is norm(φ(x·W + b)); for a classifier that reads several positions, the norm of
        their mean, the same for every query.
        """
        head = self.view.mlm_head
        classes = self.view.class_head
        if classes is not None and classes.norm is not None and self.points.head_scale is not None:
            batch, pos = self.capture.tokens.shape
            mean = self.capture.output.new_zeros(batch, 1, pos, pos)
            mean[..., : classes.tokens] = 1 / classes.tokens
            norm = self._norm(classes.norm, self.points.head_scale)
            return Chain((Attention(mean, 1), replace(norm, scale=norm.scale.expand(batch, pos, 1))))
        if head is None:
            return None
        dense = Linear(head.W, head.b)
        held = coefficients(head.activation, dense(self.capture.output), rule=rule)
        inside = (dense, Diagonal(held.through, held.rest))
        if head.norm is None:
            return Chain(inside)
        if head.scale_name is not None:
            return Chain((*inside, self._norm(head.norm, head.scale_name)))
        return Chain((*inside, head.norm.held(Chain(inside)(self.capture.output))))
