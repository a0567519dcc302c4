"""Attention of two runs as the live module computes it, if its weights do not explain its scores.

The module is called again with its arguments from either run, its operations paired (`core.in_two_runs`), and cut at
queries, keys, values and the heads' outputs. This assumes nothing about how scores are computed: the module may have
any rotations, biases and norms, and keys that are values.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from tensorlens_tl.algebra import Chain, Diagonal, Sum
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.algebra.secants import MatrixChange, Offset
from tensorlens_tl.core import Constant, Cuts, Paired, Recorded, depends, in_two_runs, readable, refuse_other_functions
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import Placing, drop_patterns, hook_points, refuse_attached, run_until
from tensorlens_tl.models import BlockView
from tensorlens_tl.models.parameters import first_output
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.two_runs.attention import of_heads
from tensorlens_tl.passes.two_runs.values import BlockValues

SAME = 1e-4
"""The largest relative error of a changed matrix's effect, compared with the module; its norms may be in float32."""

WAYS = "vqk"
"""The letters of values, queries and keys, in the order of the routes."""


@dataclass(frozen=True)
class Call:
    """The arguments of a module's call in a run."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, module: nn.Module, read: Tensor, leaf: Tensor, tolerance: float) -> Any:
        """Call the module again, with a leaf in place of its input, which is recognised up to the tolerance of a pass.

        A cache is left out, as it is empty for a whole prompt.
        """

        def put(value: Any) -> Any:
            if isinstance(value, Cache):
                return None
            same = isinstance(value, Tensor) and value.shape == read.shape and value.is_floating_point()
            return leaf if same and relative_error(value.detach().to(read), read) <= tolerance else value

        return module(*map(put, self.args), **{name: put(value) for name, value in self.kwargs.items()})


def attention_calls(maps: BlockMaps) -> dict[int, Call]:
    """Return the arguments of every block's attention in a run, by running the model once more.

    Raises `FrozenModelError` if a frozen pass is attached, which would hold its patterns.
    """
    refuse_attached(maps.view.model)
    calls: dict[int, Call] = {}
    with torch.no_grad(), Placing() as placing:
        for layer, block in enumerate(maps.view.blocks):

            def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], layer: int = layer) -> None:
                calls[layer] = Call(args, dict(kwargs))

            if isinstance(block.parts.mixer, nn.Module):
                placing.on_module(block.parts.mixer, look, before=True)
        last = maps.capture.output_name(maps.capture.n_layers - 1)
        run_until(maps.view.model, maps.capture.inputs, maps.capture.entry_hooks, last)
    return calls


def recorded_attention(
    a: BlockMaps,
    b: BlockMaps,
    layer: int,
    calls: tuple[Call, Call],
    values: tuple[BlockValues, BlockValues],
    heads: Collection[int] | None = None,
) -> tuple[Chain, float]:
    """Return the secant of one layer's attention from its input to its output, and its error in the first run.

    Args:
        calls, values: the arguments and inputs of its attention in either run.
        heads: keep only these.

    Differing weights of two models are constants, with the same names as when they are read from weights.

    Raises:
        UnsupportedModelError: no hook points show queries, keys and values; the heads' outputs depend on more than
            these; hooks are on the attention itself; or an operation is not known.
    """
    block, points = a.view.blocks[layer], a.points.blocks[layer].heads
    known = [hook_points(maps.view.model) for maps in (a, b)]
    stem = "" if points is None else points.z.removesuffix("hook_z")
    ways = [f"{stem}hook_{letter}" for letter in WAYS]
    if points is None or a.points.blocks[layer].merged or not all(name in known[0] for name in ways):
        raise block.refuse("no hook points show its queries, keys and values.")
    if any(name.startswith(stem) for maps in (a, b) for name in maps.capture.other_hooks):
        raise block.refuse("there are hooks on its attention, which would act twice.")
    modules = block.parts.mixer, b.view.blocks[layer].parts.mixer

    def run(number: int) -> Callable[[], tuple[Cuts, Tensor, Tensor]]:
        def attend() -> tuple[Cuts, Tensor, Tensor]:
            read, cuts = values[number].attention, Cuts()
            cutting = [cuts.at(name) for name in (*ways, points.z)]
            leaf = read.detach().clone().requires_grad_()
            with Placing() as placing:
                placing.at_points((a, b)[number].view.model, known[number], cutting)
                out = calls[number].of(modules[number], read, leaf, a.tolerance)
            drop_patterns(modules[number])  # with its graph
            return cuts, leaf, first_output(out)

        return attend

    (cuts, entry, out), constants = in_two_runs(run(0), run(1), modules, f"L{layer}")
    z, leaf = cuts.arrived[points.z], cuts.leaves[points.z]
    if depends(z, entry) or depends(out, entry) or not depends(cuts.arrived[ways[0]], entry):
        raise block.refuse("its heads' outputs depend on more than queries, keys and values.")
    refuse_other_functions([out, z, *(cuts.arrived[name] for name in ways)])
    shape = entry.shape[0], entry.shape[1]
    ones = values[0].heads.new_ones(1, 1, values[0].heads.shape[-1])
    keep = () if heads is None else (Diagonal(of_heads(ones, a.capture.pattern(layer).shape[1], heads)),)
    # other arguments may differ between the runs: Bloom's attention adds the stream to its output, as its block does
    weights = {readable(f"L{layer}.{name}") for name, _ in modules[0].named_parameters()}
    others = [constant for constant in constants if constant.name not in weights]
    constants = [constant for constant in constants if constant not in others]
    if any(depends(y, constant.leaf) for constant in others for y in (z, *cuts.arrived.values())):
        raise block.refuse("its heads' outputs depend on more than its input.")
    inside = [constant for constant in constants if depends(z, constant.leaf)]

    def changes(letter: str) -> MatrixChange:
        pairs = [values[0].heads, values[1].heads] if letter == "O" else [values[0].attention, values[1].attention]
        of_a, of_b = (_matrix(maps.view.blocks[layer], letter) for maps in (a, b))
        return MatrixChange((pairs[0] + pairs[1]) / 2, of_a, of_b)

    routes: list[Chain] = []
    for name in ways:
        letter = name[-1].upper()
        read = Recorded(entry, cuts.arrived[name], shape, across=False)
        attended = Recorded(cuts.leaves[name], z, shape)
        reached = [constant for constant in inside if depends(constant.before, cuts.leaves[name])]
        inside = [constant for constant in inside if constant not in reached]
        mixing = attended
        if reached:
            mixing = Paired(attended, tuple(_within(layer, letter, constant) for constant in reached))
        routes.append(Chain((read, *_offsets(read, constants, layer, letter, changes), mixing, *keep)))
    if inside or any(not any(depends(y, of.leaf) for y in (z, out, *cuts.arrived.values())) for of in constants):
        raise block.refuse("some of its changed weights act neither on queries, keys and values nor on its output.")
    written = Recorded(leaf, out, shape, across=False)
    error = relative_error(z.detach().reshape(*shape, -1).to(values[0].heads), values[0].heads)
    added = _offsets(written, constants, layer, "O", changes)
    if heads is not None:
        added = [_of_some(offset, block, heads) for offset in added]
    return Chain((Sum(tuple(routes)), Chain((written, *added)))), error


def _of_some(offset: Offset, block: BlockView, heads: Collection[int]) -> Offset:
    """Return the effect of a changed W_O for some heads; a bias belongs to no head.

    Raises:
        UnsupportedModelError: the matrix cannot be split by head.
    """
    if not offset.name.endswith(".W_O"):
        return offset
    if offset.change is None:
        raise block.refuse("the effect of its changed output matrix cannot be split by head.")
    change = replace(offset.change, read=of_heads(offset.change.read, block.attention.heads, heads))
    return replace(offset, vectors=change.vectors, change=change)


def _matrix(block: BlockView, letter: str) -> Tensor:
    """Return a matrix of attention with heads concatenated.

    Raises:
        UnsupportedModelError: it cannot be read from weights.
    """
    of = block.attention if letter in "VO" else block.require_query_key()
    return getattr(of, f"W_{letter}")


def _offsets(
    m: Recorded, constants: Sequence[Constant], layer: int, letter: str, changes: Callable[[str], MatrixChange]
) -> list[Offset]:
    """Return the effects of differing weights on the output of one matrix, named after the matrix and its bias.

    A joint matrix for queries, keys and values has an effect on each.

    Args:
        m: the map up to the matrix's output.
        constants: those of the whole module.
        layer, letter: the matrix.
        changes: returns the factors of its effect, if its weights are read.
    """
    added: dict[str, Tensor] = {}
    for constant in constants:
        if depends(m.output, constant.leaf):
            name = _name(layer, letter, constant.name)
            vectors = m.pushed_from(constant.leaf, constant.added[None]).reshape(*m.shape, -1)
            added[name] = added[name] + vectors if name in added else vectors
    change: MatrixChange | None = None
    matrix = f"L{layer}.W_{letter}"
    if matrix in added:
        with suppress(UnsupportedModelError):
            change = changes(letter)
        if change is not None and relative_error(change.vectors.to(added[matrix]), added[matrix]) > SAME:
            change = None
    return [Offset(vectors, name, change if name == matrix else None) for name, vectors in added.items()]


def _name(layer: int, letter: str, weight: str) -> str:
    """Return the name of a weight (of a norm, a bias or a matrix), given its name in the module."""
    kind = "b" if weight.rpartition(".")[2].lstrip("_").startswith("b") else "W"
    return f"L{layer}.{letter.lower()}_norm.w" if "norm" in weight else f"L{layer}.{kind}_{letter}"


def _within(layer: int, letter: str, constant: Constant) -> Constant:
    """Return a constant that acts between queries, keys and values and the heads' outputs, under its usual name."""
    name = constant.name
    if "norm" in name:
        name = _name(layer, letter, name)
    elif "sink" in name:
        name = f"L{layer}.sinks"
    elif "relative" in name or "rel_pos" in name:
        name = f"L{layer}.relative_bias"
    return replace(constant, name=name)
