"""Whole proofs without the products whose result the model shows: these are compared by random projections.

Of a plain block, what attention and MLP write is shown at hook points, and so is what W_O and W_out multiply. Heads and
neurons are computed at every token, each compared against its own size, and the shown writes have to make up the
block's output. What remains is h·W + b = w at every token, with h, W and w known. For a Gaussian matrix R of k columns,
‖(h·W + b − w)·R‖ / √k estimates the norm of the difference, and h·(W·R) costs k products where h·W costs d_model
(Freivalds 1977 does so for whole numbers).

This only ever accepts: a block passes here if every comparison is within the tolerance, and every estimate within a
tenth of it. Any other block is composed and compared in full. A difference above the tolerance is taken for less than a
tenth of it with the probability that χ² of k = 8 degrees of freedom is below 8/100, which is 1e-7.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from tensorlens_tl.algebra import AffineMap, Chain, Linear
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.models import Layout
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.proof.writes import BlockErrors, WriteError, write_errors

COLUMNS = 8
"""Random vectors that every difference is projected on."""

SHARE = 0.1
"""The part of the tolerance that an estimate may reach."""


class ShownProduct(NamedTuple):
    """A product h·W + b (`out`), and what the model shows of it at a hook point, `[batch, pos, d_model]`."""

    point: str
    out: Linear
    shown: Float[Tensor, "batch pos d_model"]

    def missed(self, reads: Float[Tensor, "batch pos d_in"]) -> Float[Tensor, "batch pos"]:
        """Estimated norms of h·W + b − w."""
        random = _projections(self.shown.shape[-1], self.shown.dtype, self.shown.device)
        projected = linear(random, self.out.weight)  # several times as fast as weight @ random.T
        ours = linear(reads, projected)
        if self.out.offset is not None:
            ours = ours + linear(self.out.offset, random)
        return (ours - linear(self.shown, random)).norm(dim=-1)


@lru_cache(maxsize=16)
def _projections(width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "row width"]:
    """R, its columns as rows: scaled so that projected vectors have the norms of the vectors in the mean of squares."""
    drawn = torch.randn(COLUMNS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn / COLUMNS**0.5).to(device, dtype)


def projected_errors(maps: BlockMaps, layer: int, layout: Layout, seen: Mapping[str, Tensor]) -> BlockErrors | None:
    """Return the errors of a block that is proved by projections, None for one that has to be composed.

    `seen` is what the model showed (`SeenWrites.tensors`), at every position.
    """
    if not _is_plain(maps, layer, layout, seen):
        return None
    parts = maps.parts(layer)
    x = maps.capture.resid_pre(layer)
    points = maps.points.blocks[layer]
    attention = _shown(points.attention_write, parts.attention, seen, x)
    mlp = _shown(points.mlp_write, parts.mlp, seen, x)
    if attention is None or mlp is None or parts.mlp is None:
        return None
    heads = _before(parts.attention)(parts.norms[layout.attn.before or ""](x))
    after_attention = x + attention.shown
    middle = x if layout.parallel else after_attention
    hidden = _before(parts.mlp)(parts.norms[layout.mlp.before or ""](middle))
    output = after_attention + mlp.shown
    compared = {name: tensor for name, tensor in seen.items() if name not in (attention.point, mlp.point)}
    noted = {"heads": heads, "hidden": hidden, "output": output}
    writes = write_errors(maps, layer, layout, compared, noted)
    expected = maps.capture.resid_pre(layer + 1)
    error = relative_error(output, expected, maps.mask)
    for product, reads in ((attention, heads), (mlp, hidden)):
        missed = product.missed(reads)[maps.mask]
        estimate = _largest_share(missed, product.shown[maps.mask])
        if not estimate <= SHARE * maps.tolerance:
            return None
        writes.append(WriteError(product.point, estimate))
        error = error + _largest_share(missed, expected[maps.mask])
    if not max(error, *(write.error for write in writes)) <= maps.tolerance:
        return None
    return BlockErrors(error, writes)


def _is_plain(maps: BlockMaps, layer: int, layout: Layout, seen: Mapping[str, Tensor]) -> bool:
    """True if a block is plain attention and dense MLP in full precision without user hooks, and shows heads and
    neurons."""
    block = maps.view.blocks[layer]
    points = maps.points.blocks[layer]
    capture = maps.capture
    if capture.other_hooks or capture.sides is not None or maps.ends(layer):
        return False
    if block.mixer is not None or block.has_beside or block.whitening is not None or block.per_layer is not None:
        return False
    if points.attention is not None or points.mlp is not None or block.dense_mlp is None:
        return False
    around = (layout.attn.after, layout.attn.outer, layout.mlp.after, layout.mlp.outer, layout.cross)
    before = (layout.attn.before, layout.mlp.before)
    if any(place is not None for place in around) or any(name not in block.norms for name in before):
        return False
    precise = capture.resid_pre(layer).dtype in (torch.float32, torch.float64)
    factors = (block.attention_factor, block.branch_factor)
    return precise and factors == (1, 1) and points.z in seen and points.post in seen


def _shown(point: str | None, sublayer: AffineMap | None, seen: Mapping[str, Tensor], x: Tensor) -> ShownProduct | None:
    """The last product of a sublayer, if it is a matrix and the model shows what it gives."""
    if point is None or point not in seen or not isinstance(sublayer, Chain):
        return None
    out = sublayer.stages[-1]
    shown = seen[point].to(x.device)
    if not isinstance(out, Linear) or shown.shape != x.shape:
        return None
    dtypes = {tensor.dtype for tensor in (x, shown, out.weight, out.offset) if tensor is not None}
    return ShownProduct(point, out, shown) if len(dtypes) == 1 else None


def _before(sublayer: AffineMap) -> Chain:
    """A sublayer without its last product."""
    assert isinstance(sublayer, Chain)
    return Chain(sublayer.stages[:-1])


def _largest_share(missed: Float[Tensor, "token"], whole: Float[Tensor, "token d"]) -> float:
    """The largest of some norms relative to those of vectors; NaN where one is."""
    if not len(missed):
        return 0.0
    return float((missed / whole.norm(dim=-1).clamp_min(torch.finfo(whole.dtype).tiny)).max())
