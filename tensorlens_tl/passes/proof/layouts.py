"""How a block is put together: the one layout whose map reproduces the block's own output on its own input."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import Layout, candidates
from tensorlens_tl.models.lifecycle import OncePerWeights
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.capture import Capture

_unambiguous: OncePerWeights[dict[int, Layout]] = OncePerWeights()
# the layouts of blocks where an input excluded all other layouts


def block_error(capture: Capture, layer: int, output: Float[Tensor, "batch pos d_model"]) -> float:
    """Return a map's relative error in place of a block.

    A stream that hooks set to zero is compared with what it was before.
    """
    return relative_error(output, capture.resid_post(layer), capture.mask, capture.additions.of(layer).values())


class LayoutSearch:
    """The search for one block's layout among `candidates`, those with the norms of the block."""

    def __init__(self, maps: BlockMaps, layer: int) -> None:
        block = maps.view.blocks[layer]
        self.maps = maps
        self.layer = layer
        self.candidates = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)

    def expected(self, previous: Layout | None) -> Layout | None:
        """The layout to try first: that of the block before, or the only one that fitted in an earlier pass."""
        if previous in self.candidates:
            return previous
        earlier = self._earlier().get(self.layer)
        return earlier if earlier in self.candidates else None

    def best(self) -> Layout | None:
        """Return the one layout that reproduces the block (a causal block's first tokens), or None; two raise an
        error."""
        start = self.maps.with_capture(self.maps.capture.block_at_start(self.layer))
        errors = self._errors(start, self.candidates, "ratio")
        passing = [option for option in sorted(errors, key=errors.__getitem__) if self._is_small(errors[option])]
        if not passing:
            return None
        if len(passing) == 1:
            self._remember(passing[0])
            return passing[0]
        # Folded norms commute with sublayers that have no bias, and at a single token with attention too. A rule with
        # a constant of its own still shows on which side the norm is; with the other layout it would be wrong.
        tangent = self._errors(start, passing, "tangent")
        passing = [option for option in passing if self._is_small(tangent[option])] or passing
        rounding = torch.finfo(self.maps.capture.resid_pre(self.layer).dtype).eps
        first, *others = passing
        if not others or errors[others[0]] >= 10 * max(errors[first], rounding):
            return first
        second = others[0]
        if self._same_map(start, first, second):
            return min(first, second, key=self.candidates.index)
        raise UnsupportedModelError(
            f"blocks.{self.layer} of this {self.maps.view.description}: two layouts reproduce it equally well "
            f"({errors[first]:.1e} and {errors[second]:.1e}), so this input cannot tell its structure; freeze a longer "
            "prompt, or in float64."
        )

    def reproducing(self) -> list[Layout]:
        """Every layout that reproduces the block at all tokens, however well another one does."""
        errors = self._errors(self.maps, self.candidates, "ratio")
        return [option for option in self.candidates if self._is_small(errors[option])]

    def _is_small(self, error: float) -> bool:
        return error <= self.maps.tolerance

    def _errors(self, maps: BlockMaps, options: Sequence[Layout], activation: str) -> dict[Layout, float]:
        parts = maps.parts(self.layer, activation)
        x = maps.capture.resid_pre(self.layer)
        return {
            option: block_error(maps.capture, self.layer, maps.composed(self.layer, option, parts, activation)(x))
            for option in options
        }

    def _same_map(self, maps: BlockMaps, first: Layout, second: Layout) -> bool:
        """Whether two layouts agree on random vectors too (a sublayer that writes nothing): then either is right."""
        x = maps.capture.resid_pre(self.layer)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        output, other_output = (maps.block_map(self.layer, layout=option)(noise) for option in (first, second))
        return relative_error(output, other_output, maps.mask) <= maps.tolerance

    def _earlier(self) -> dict[int, Layout]:
        """The layouts of blocks in earlier passes of the same weights; each is proved on this pass too."""
        capture = self.maps.capture
        if capture.other_hooks:
            return {}
        return _unambiguous.get(capture.model, capture.weights) or {}

    def _remember(self, layout: Layout) -> None:
        capture = self.maps.capture
        if not capture.other_hooks:
            _unambiguous.set(capture.model, capture.weights, self._earlier() | {self.layer: layout})
