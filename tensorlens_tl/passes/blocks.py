"""Blocks as maps: what any linearisation composes them of, and the one way in which they are composed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra import (
    AffineMap,
    Chain,
    ChainWithReads,
    Diagonal,
    EarlierRead,
    Identity,
    LazyMap,
    Segment,
    Sum,
    stages_of,
)
from tensorlens_tl.algebra.secants import Offset
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import StreamPoint
from tensorlens_tl.models import Layout, ModelView, Within, compose
from tensorlens_tl.models.names import ENCODER_NORM, END_NORM, PER_LAYER_NORM
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.loops import unrolled

Options = ParamSpec("Options")
Result = TypeVar("Result")
BlocksType = TypeVar("BlocksType", bound="Blocks")


def reads_weights(
    method: Callable[Concatenate[BlocksType, int, Options], Result],
) -> Callable[Concatenate[BlocksType, int, Options], Result]:
    """A method that reads one layer's weights: they are brought in for it where they lie elsewhere."""

    @wraps(method)
    def reading(self: BlocksType, layer: int, *arguments: Options.args, **options: Options.kwargs) -> Result:
        blocks = self.view.blocks
        if not isinstance(layer, int) or not 0 <= layer < len(blocks) or not blocks[layer].brought:
            return method(self, layer, *arguments, **options)
        with blocks[layer].loaded():
            result = method(self, layer, *arguments, **options)
        self.forget(layer)  # what it holds grows with the model, as the weights do
        return result

    return reading


class BlockParts(NamedTuple):
    """What a block is composed of, in the order of `models.layouts.compose`.

    Attributes:
        attention: or what mixes positions in its place.
        mlp: None where the block has none, or where it is left out.
        norms: by name.
        whitening: of a whitened model.
        within: where an encoder–decoder's block acts.
        beside: what mixes positions beside attention.
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
        capture: the run that tells positions and sides; of two runs the first.
        layouts: how each block is put together; empty until that is proved.
    """

    capture: Capture
    layouts: tuple[Layout, ...]

    @cached_property
    @abstractmethod
    def row_bytes(self) -> int:
        """What a vector allocates on its way at most."""

    @property
    def view(self) -> ModelView:
        """The reading of the model's weights."""
        return self.capture.view

    @abstractmethod
    def forget(self, layer: int) -> None:
        """Drop what was cached of a layer and is as large as its weights."""

    # ------------------------------------------------------------------ parts

    @abstractmethod
    def norm(self, layer: int, /, name: str) -> AffineMap:
        """One norm of one block; a map of the positions that the block acts on."""

    @abstractmethod
    def final_norm(self) -> AffineMap | None:
        """The norm after the last block, or None."""

    @abstractmethod
    def encoder_norm(self) -> AffineMap | None:
        """The norm after an encoder–decoder's last encoder block, or None."""

    @abstractmethod
    def within(self, layer: int, /) -> Within | None:
        """Where a block acts; None where there is one stack."""

    @abstractmethod
    def whitening(self, layer: int, /) -> Chain | None:
        """The whitening of the stream before a block of a whitened model; None of any other model."""

    @abstractmethod
    def mixer(self, layer: int, /, heads: Collection[int] | None = None) -> Chain:
        """Attention, or what mixes positions in its place; `heads` keeps only those."""

    @abstractmethod
    def beside(self, layer: int, /) -> Chain | None:
        """What mixes positions beside attention; None where nothing does."""

    @abstractmethod
    def mlp(self, layer: int, /, activation: str = "ratio") -> AffineMap | None:
        """One MLP, or mixture of experts, or None without one."""

    @abstractmethod
    def experts(self, layer: int, /, activation: str = "ratio") -> dict[str, AffineMap]:
        """What a mixture of experts is the sum of: the chosen ones together, and what every token goes through."""

    @abstractmethod
    def per_layer(self, layer: int, /, activation: str = "ratio") -> Chain | None:
        """What a block adds for a separate input of each token at this layer; None without one."""

    @abstractmethod
    def additions(self, layer: int, /) -> Mapping[StreamPoint, Offset]:
        """What user-installed hooks add to the stream in a block, by hook point."""

    @abstractmethod
    def prediction_head(self, activation: str = "ratio") -> Chain | None:
        """What lies between the model's output and its unembedding; None where nothing does."""

    # ------------------------------------------------------------------ composed

    def final_map(self) -> AffineMap | None:
        """The norm after the last block as a map of all positions: in an encoder–decoder it acts on the decoder's."""
        norm = self.final_norm()
        return None if norm is None else self.on_last_side(norm)

    def on_last_side(self, inner: AffineMap) -> AffineMap:
        """What acts where the last block does, as a map of all positions: in an encoder–decoder on the decoder's."""
        if self.capture.sides is None:
            return inner
        start, stop = self.capture.side(self.capture.n_layers - 1)
        return Segment(inner, start, stop, stop)

    @reads_weights
    def parts(
        self, layer: int, activation: str = "ratio", heads: Collection[int] | None = None, mlp: bool = True
    ) -> BlockParts:
        """What a block is composed of, as maps of the stream that enters it."""
        norms = {name: self.norm(layer, name) for name in self.view.blocks[layer].norms}
        last = self.encoder_norm() if layer + 1 == self.view.encoder_layers else None
        if last is not None:
            norms[ENCODER_NORM] = last
        mixing = self._attention_of_stream(layer, heads)
        branch = self.mlp(layer, activation) if mlp else None
        within = self.within(layer)
        return BlockParts(mixing, branch, norms, self.whitening(layer), within, self.beside(layer))

    def _attention_of_stream(self, layer: int, heads: Collection[int] | None) -> AffineMap:
        """Attention as a map of the stream that enters the block: a constant where it takes another block's values."""
        mixing = self.mixer(layer, heads)
        ends = self.capture.points.blocks[layer].attention
        if self.view.blocks[layer].values_layer is None or ends is None:
            return mixing
        written = mixing(self.capture.activation(ends.into))
        return Diagonal(torch.zeros_like(written), written)

    def shared_read(self, layer: int, heads: Collection[int] | None = None) -> EarlierRead | None:
        """What another stream at the block whose values a block takes adds to the stream that enters it.

        Returns:
            A map of that stream, zero at the pass's own, whose share is a constant of the block; None where the block
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
                "which is not read where attention and MLP are parallel or the stream is whitened."
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
        activation: str = "ratio",
        heads: Collection[int] | None = None,
        mlp: bool = True,
        layout: Layout | None = None,
    ) -> AffineMap:
        """One block as a map; `heads` keeps only those of self-attention, ``mlp=False`` leaves the MLP's branch out.

        An encoder's last block ends with the encoder's norm. Values that are taken from an earlier block are constants
        of it.

        Raises:
            InvalidInputError: no such layer.
        """
        layer = whole_number("layer", layer, 0, self.capture.n_layers - 1, why="a layer of this model")
        parts = self.parts(layer, activation, heads, mlp)
        return self.composed(layer, layout or self.layouts[layer], parts, activation)

    @reads_weights
    def composed(self, layer: int, layout: Layout, parts: BlockParts, activation: str = "ratio") -> AffineMap:
        """A block from its `parts`, put together in one way."""
        per_layer = self.per_layer(layer, activation)
        ends = self.ends(layer, parts.norms)
        if per_layer is not None:
            ends = [Sum((Identity(), Chain((*per_layer.stages, self.norm(layer, PER_LAYER_NORM))))), *ends]
        block = self.sublayers(layer, layout, parts)
        return Chain((*stages_of(block), *ends)) if ends else block

    def sublayers(self, layer: int, layout: Layout, parts: BlockParts) -> AffineMap:
        """A block from its `parts`, without what comes after both sublayers; what hooks add goes with its sublayer."""
        middle, late = self.stream_offsets(layer, mlp=parts.mlp is not None)
        return compose(layout, *parts, middle=middle, late=late)

    def stream_offsets(self, layer: int, *, mlp: bool = True) -> tuple[list[Offset], list[Offset]]:
        """What hooks add to the stream after attention, and after the MLP (without `mlp`, not to what it writes)."""
        added = self.additions(layer).items()
        middle = [offset for point, offset in added if point.place in ("attention", "middle")]
        late = [offset for point, offset in added if point.place == "late" or (mlp and point.place == "mlp")]
        return middle, late

    @reads_weights
    def mixture(self, layer: int, parts: Mapping[str, AffineMap]) -> AffineMap:
        """A mixture of experts from its parts."""
        branches = [self.with_norms(layer, name, part) for name, part in parts.items()]
        return branches[0] if len(branches) == 1 else Sum(tuple(branches))

    @reads_weights
    def with_norms(self, layer: int, name: str, part: AffineMap) -> AffineMap:
        """A part of a mixture of experts with the norms around it, where it has any."""
        weights = self.view.blocks[layer].mlp
        if not isinstance(weights, ExpertsWeights) or name not in weights.around:
            return part
        before, after = weights.around[name]
        return Chain((self.norm(layer, before), part, self.norm(layer, after)))

    def stage(self, layer: int, **options: Any) -> AffineMap:
        """`block_map`, `lazily`."""
        return self.lazily(layer, lambda: self.block_map(layer, **options))

    def stages(
        self, layers: range, *, activation: str, heads: Mapping[int, Collection[int]], mlp: Collection[int]
    ) -> list[AffineMap]:
        """Blocks that follow each other, as maps to be applied one after the other.

        Where some take values from an earlier one of them, they are all one map. Values from a block before the first
        are constants. Blocks that run in a loop are put together as it does.

        Args:
            layers: which blocks.
            activation: the rule for MLPs.
            heads: of some layers, those to keep.
            mlp: the layers whose MLPs are kept.
        """
        reads: dict[int, EarlierRead] = {}
        blocks: list[AffineMap] = []
        for number, layer in enumerate(layers):
            only = heads.get(layer)
            read = self.shared_read(layer, only)
            if read is not None and read.source in layers:
                reads[number] = read._replace(source=read.source - layers.start)
            blocks.append(self.stage(layer, activation=activation, heads=only, mlp=layer in mlp))
        if self.view.loop is not None:
            if len(layers) < self.view.n_layers:
                self.view.refuse_loop(f"layers {layers.start} to {layers.stop - 1}")
            return unrolled(self.view.loop, blocks, self.capture.resid_pre(0))
        return [ChainWithReads(tuple(blocks), reads)] if reads else blocks

    def lazily(self, layer: int, compose_part: Callable[[], AffineMap]) -> AffineMap:
        """A part of a block; where its weights are brought in, composed each time it is used, and dropped after."""
        block = self.view.blocks[layer]
        if not block.brought:
            return compose_part()

        @contextmanager
        def opened() -> Generator[AffineMap, None, None]:
            with block.loaded():
                yield compose_part()

        return LazyMap(opened, self.capture.tokens.shape[1], self.row_bytes, block.name)

    def ends(self, layer: int, norms: Mapping[str, AffineMap] | None = None) -> list[AffineMap]:
        """The maps after a block's sublayers: the block's scalar factor, an encoder's final norm, what hooks add.

        Args:
            layer: which block.
            norms: of `parts`, with the encoder's final norm where that is to be another map.
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
