"""The parts of every block as secants of two runs: linear in the difference of what enters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, Norm
from tensorlens_tl.algebra.secants import Offset, linear_secant, norm_secant, slope
from tensorlens_tl.hooks import StreamPoint
from tensorlens_tl.models import Layout, Within
from tensorlens_tl.models.activations import derivative
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.blocks import Blocks
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.difference.attention import attention_secant
from tensorlens_tl.passes.difference.mlps import mlp_secant
from tensorlens_tl.passes.difference.values import BlockValues, block_values


@dataclass(eq=False)
class _Parts:
    """The secants of one block's attention and MLP, once they were needed, and the values that they lie between."""

    of_a: BlockValues
    of_b: BlockValues
    attention: Chain | None = None
    mlp: Chain | None = None


@dataclass(frozen=True, eq=False)
class SecantMaps(Blocks):
    """The parts of every block as exact linear maps of the difference of two runs.

    Attributes:
        a, b: the maps of the two runs, whose blocks are put together in the same way.
        capture: the first run, which tells positions.
        layouts: how each block is put together.
    """

    a: BlockMaps
    b: BlockMaps
    capture: Capture
    layouts: tuple[Layout, ...]
    cache: dict[int, _Parts] = field(default_factory=dict[int, _Parts], repr=False)

    @classmethod
    def of(cls, a: BlockMaps, b: BlockMaps) -> "SecantMaps":
        """Of the maps of two runs."""
        return cls(a, b, a.capture, a.layouts)

    @cached_property
    def row_bytes(self) -> int:
        """What a vector allocates on its way at most, the products with all keys of its layer included."""
        batch, pos = self.capture.tokens.shape
        heads = max((block.attention.heads for block in self.view.blocks if block.mixer is None), default=0)
        return self.a.row_bytes + 3 * heads * batch * pos * pos * self.capture.resid_pre(0).element_size()

    def forget(self, layer: int) -> None:
        """Drop what was cached of a layer."""
        self.cache.pop(layer, None)

    # ------------------------------------------------------------------ parts

    def _parts(self, layer: int) -> _Parts:
        if layer not in self.cache:
            self.cache[layer] = _Parts(block_values(self.a, layer), block_values(self.b, layer))
        return self.cache[layer]

    def norm(self, layer: int, name: str) -> Chain:
        """One norm of one block, its scale responding."""
        parts = self._parts(layer)
        norms = (self.a.norm(layer, name), self.b.norm(layer, name))
        return norm_secant(*norms, parts.of_a.norms[name], parts.of_b.norms[name], f"L{layer}.{name}")

    def final_norm(self) -> Chain | None:
        """The norm after the last block, or None."""
        a, b = (maps.final_norm() for maps in (self.a, self.b))
        if a is None or b is None:
            return None
        x_a, x_b = (maps.capture.resid_pre(maps.capture.n_layers) for maps in (self.a, self.b))
        return norm_secant(a, b, x_a, x_b, "ln_final")

    def encoder_norm(self) -> None:
        """None: encoder–decoders are refused."""
        return

    def within(self, layer: int) -> Within | None:
        """None: encoder–decoders are refused."""
        return None

    def whitening(self, layer: int) -> Chain | None:
        """The whitening before a block, which is linear; None of a model without."""
        return self.a.whitening(layer)

    def mixer(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """Attention by three routes, values, queries and keys, and what writes it."""
        parts = self._parts(layer)
        if heads is not None:
            return attention_secant(self.a, self.b, layer, parts.of_a, parts.of_b, heads)
        if parts.attention is None:
            parts.attention = attention_secant(self.a, self.b, layer, parts.of_a, parts.of_b)
        return parts.attention

    def mlp(self, layer: int, activation: str = "ratio") -> Chain | None:
        """One MLP, its activations by their slopes; the rule does not matter."""
        parts = self._parts(layer)
        if parts.of_a.mlp is None or parts.of_b.mlp is None:
            return None
        if parts.mlp is None:
            weights = [maps.view.blocks[layer].require_dense_mlp() for maps in (self.a, self.b)]
            assert weights[0] is not None
            assert weights[1] is not None
            parts.mlp = mlp_secant(weights[0], weights[1], (parts.of_a.mlp, parts.of_b.mlp), layer)
        return parts.mlp

    def experts(self, layer: int, activation: str = "ratio") -> dict[str, AffineMap]:
        """None: mixtures of experts are refused."""
        return {}

    def with_norms(self, layer: int, name: str, part: AffineMap) -> AffineMap:
        """The part itself: mixtures of experts are refused."""
        return part

    def per_layer(self, layer: int, activation: str = "ratio") -> None:
        """None: a separate input of each token at each layer is refused."""
        return

    def additions(self, layer: int) -> dict[StreamPoint, Offset]:
        """What hooks add to the first run more than to the second, by hook point, where it is not the same."""
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

    def prediction_head(self, activation: str = "ratio") -> Chain | None:
        """A masked language model's transform; None where nothing lies between output and unembedding."""
        a, b = (maps.prediction_head() for maps in (self.a, self.b))
        if a is None or b is None:
            return None
        *inside_a, norm_a = a.stages
        *inside_b, norm_b = b.stages
        assert isinstance(norm_a, Norm)
        assert isinstance(norm_b, Norm)
        x_a, x_b = (maps.capture.output for maps in (self.a, self.b))
        between = (Chain(tuple(inside_a))(x_a), Chain(tuple(inside_b))(x_b))
        normed = norm_secant(norm_a, norm_b, *between, "head.ln")
        if self.view.mlm_head is None:  # a classifier's, of the mean of some positions
            return Chain((*inside_a, normed))
        dense_a, dense_b = inside_a[0], inside_b[0]
        assert isinstance(dense_a, Linear)
        assert isinstance(dense_b, Linear)
        phi = self.view.mlm_head.activation
        slopes = slope(phi, partial(derivative, phi), dense_a(x_a), dense_b(x_b))
        return Chain((*linear_secant(dense_a, dense_b, x_a, x_b, "head.W_dense"), Diagonal(slopes), normed))
