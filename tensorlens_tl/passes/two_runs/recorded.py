"""Attention of two runs as the live module computes it, where its weights do not say how its scores come about.

The module is called again with what it was called with in either run, its operations paired (`core.in_two_runs`), and
cut at queries, keys, values and what heads give. No way of making scores is known here: rotations of any kind, biases
of any kind, norms on either side of them and keys that are values are what they are in the module.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from tensorlens_tl.algebra import Chain, Diagonal, Sum
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.core import Cuts, Recorded, depends, in_two_runs, refuse_other_functions
from tensorlens_tl.hooks import Placing, hook_points, refuse_attached, run_until
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.two_runs.attention import of_heads
from tensorlens_tl.passes.two_runs.values import BlockValues

WAYS = "vqk"
"""What heads are read by, in the order of the routes."""


@dataclass(frozen=True)
class Call:
    """What a module was called with in a run."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, module: nn.Module, read: Tensor, leaf: Tensor, tolerance: float) -> Any:
        """Call it again, with a leaf in the place of what it read, which a pass knows to its tolerance.

        A cache is left out: it holds nothing of a whole prompt.
        """

        def put(value: Any) -> Any:
            if isinstance(value, Cache):
                return None
            same = isinstance(value, Tensor) and value.shape == read.shape and value.is_floating_point()
            return leaf if same and relative_error(value.detach().to(read), read) <= tolerance else value

        return module(*map(put, self.args), **{name: put(value) for name, value in self.kwargs.items()})


def attention_calls(maps: BlockMaps) -> dict[int, Call]:
    """What the attention of every block is called with in a run: the model runs once more.

    Raises `FrozenModelError` where a frozen pass is attached, whose patterns would be held.
    """
    refuse_attached(maps.view.model)
    calls: dict[int, Call] = {}
    with torch.no_grad(), Placing() as placing:
        for layer, block in enumerate(maps.view.blocks):

            def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], layer: int = layer) -> None:
                calls[layer] = Call(args, dict(kwargs))

            if isinstance(block.parts.mixer, nn.Module):
                placing.on_module(block.parts.mixer, look, before=True)
        run_until(maps.view.model, maps.capture.inputs, [], maps.capture.output_name(maps.capture.n_layers - 1))
    return calls


def recorded_attention(
    a: BlockMaps,
    layer: int,
    calls: tuple[Call, Call],
    values: tuple[BlockValues, BlockValues],
    heads: Collection[int] | None = None,
) -> tuple[Chain, float]:
    """The secant of one layer's attention from what it reads to what it writes, and how far it is from the first run.

    Args:
        a: the first run, of one model with the second.
        layer: which block.
        calls, values: what its attention is called with and reads, in either run.
        heads: keep only these.

    Raises:
        UnsupportedModelError: no hook points show queries, keys and values, or what heads give depends on more; or an
            operation that is not known.
    """
    block, points = a.view.blocks[layer], a.points.blocks[layer].heads
    known = hook_points(a.view.model)
    stem = "" if points is None else points.z.removesuffix("hook_z")
    ways = [f"{stem}hook_{letter}" for letter in WAYS]
    if points is None or a.points.blocks[layer].merged or not all(name in known for name in ways):
        raise block.refuse("no hook points show its queries, keys and values.")
    module = block.parts.mixer

    def run(number: int) -> Callable[[], tuple[Cuts, Tensor, Tensor]]:
        def attend() -> tuple[Cuts, Tensor, Tensor]:
            read, cuts = values[number].attention, Cuts()
            leaf = read.detach().clone().requires_grad_()
            with Placing() as placing:
                placing.at_points(a.view.model, known, [cuts.at(name) for name in (*ways, points.z)])
                out = calls[number].of(module, read, leaf, a.tolerance)
            return cuts, leaf, out[0] if isinstance(out, tuple) else out

        return attend

    (cuts, entry, out), constants = in_two_runs(run(0), run(1), (module, module), f"L{layer}.attn")
    z, leaf = cuts.arrived[points.z], cuts.leaves[points.z]
    if constants or depends(z, entry) or depends(out, entry) or not depends(cuts.arrived[ways[0]], entry):
        raise block.refuse("what its heads give depends on more than queries, keys and values.")
    refuse_other_functions([out, z, *(cuts.arrived[name] for name in ways)])
    shape = entry.shape[0], entry.shape[1]
    ones = values[0].heads.new_ones(1, 1, values[0].heads.shape[-1])
    keep = () if heads is None else (Diagonal(of_heads(ones, a.capture.pattern(layer).shape[1], heads)),)
    routes: list[Chain] = []
    for name in ways:
        read = Recorded(entry, cuts.arrived[name], shape, across=False)
        routes.append(Chain((read, Recorded(cuts.leaves[name], z, shape), *keep)))
    error = relative_error(z.detach().reshape(*shape, -1).to(values[0].heads), values[0].heads)
    return Chain((Sum(tuple(routes)), Chain((Recorded(leaf, out, shape, across=False),)))), error
