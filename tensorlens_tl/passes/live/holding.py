"""Holding the live model fixed: which hooks, and whether the model obeys them.

On some models a hook point only observes: what a hook returns there is ignored, and the model would run unfrozen
without a word. Patterns have another way (`tensorlens_tl.hooks.freeze`); anything else that is ignored is refused. A
trial decides both, once per model: the model runs, held, with another residual stream, and every block must do what its
map says.
"""

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Identity, Norm
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import (
    Ends,
    FwdHook,
    attention_hooks,
    capture,
    hook_points,
    leave_out,
    mlp_hooks,
    other_hooks,
    patterns_take_effect,
    replace,
    unheld_run,
    whole_hooks,
    without_numbers,
)
from tensorlens_tl.models.lifecycle import OncePerWeights
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.mlps import held_coefficients

_effective_patterns: OncePerWeights[frozenset[str]] = OncePerWeights()
# of models that obey hooks: the hook points of patterns at which one takes effect (weight processing may rewire them)


def prove_obedience(maps: BlockMaps) -> frozenset[str]:
    """Try, once per model, whether it obeys hooks; returns the patterns' hook points where they take effect.

    Raises `UnsupportedModelError` if it ignores hooks at `hook_z`, `mlp.hook_post` or `hook_scale`, or has offloaded
    weights and cannot run with norms frozen as wholes.
    """
    known = _effective_patterns.get(maps.capture.model, maps.capture.weights)
    if known is None or other_hooks(maps.capture.model):
        return _prove(maps)
    return known


def holding_hooks(
    maps: BlockMaps,
    patterns: bool = True,
    activations: bool = True,
    norms: bool = True,
    activation: str = "ratio",
) -> list[FwdHook]:
    """Return the hooks that freeze a pass; see `FrozenPass.fwd_hooks`. Raises where the model ignores what hooks
    return."""
    hooks = _hooks(maps, prove_obedience(maps), patterns, activations, norms, activation)
    return without_numbers(maps.capture.model, hook_points(maps.capture.model), hooks)


def _hooks(
    maps: BlockMaps,
    effective: frozenset[str],
    patterns: bool = True,
    activations: bool = True,
    norms: bool = True,
    activation: str = "ratio",
) -> list[FwdHook]:
    """The same, given the hook points of patterns at which a hook takes effect."""
    hooks: list[FwdHook] = []
    for layer in range(maps.capture.n_layers):
        local = maps.at_weights(layer)
        with local.view.blocks[layer].loaded():
            hooks += _padding_hooks(local, layer)
            if patterns:
                hooks += _pattern_hooks(local, layer, effective)
            if norms:
                hooks += _norm_hooks(local, layer)
            if activations:
                hooks += _per_layer_hooks(local, layer, activation)
                hooks += _mlp_hooks(local, layer, activation)
    if norms:
        hooks += _end_hooks(maps, maps.encoder_norm(), maps.points.encoder_scale, maps.points.encoder_norm, 0)
        last = maps.capture.n_layers - 1
        hooks += _end_hooks(maps, maps.final_norm(), maps.points.final_scale, maps.points.final_norm, last)
        hooks += _class_hooks(maps)
    return hooks


def _shape(maps: BlockMaps, layer: int) -> tuple[int, int]:
    """Prompts, and the number of positions that a block acts on."""
    start, stop = maps.capture.side(layer)
    return len(maps.mask), stop - start


def _whole(maps: BlockMaps, layer: int, part: Callable[[int], AffineMap]) -> AffineMap:
    """The map of a part that is held as a whole, by one layer's weights, which are read when a hook needs them."""
    return maps.lazily(layer, lambda: part(layer))


def _padding_hooks(maps: BlockMaps, layer: int) -> list[FwdHook]:
    """What keeps padding out of the recursion of a whitened block."""
    points = maps.points.blocks[layer]
    if points.whitened is None or bool(maps.mask.all()):
        return []
    return [leave_out(points.resid_pre, ~maps.mask)]


def _pattern_hooks(maps: BlockMaps, layer: int, effective: frozenset[str]) -> list[FwdHook]:
    """What holds one layer's patterns, or all of its attention where nothing inside can be held."""
    points = maps.points.blocks[layer]
    hooks: list[FwdHook] = []
    if points.attention is not None:
        hooks += whole_hooks(points.attention, _whole(maps, layer, maps.attention_alone), _shape(maps, layer))
    elif points.heads is not None:
        beside = maps.capture.cross_pattern(layer) if points.merged else None
        takes_effect = points.pattern in effective and not points.merged
        hooks += attention_hooks(points.heads, _held_pattern(maps, layer), takes_effect, beside)
    second = maps.beside_alone(layer)
    if second is not None and points.beside is not None:
        hooks += whole_hooks(points.beside, second, _shape(maps, layer))
    if points.cross is not None and not points.merged:
        pattern = maps.capture.activation(points.cross.pattern)
        hooks += attention_hooks(points.cross, pattern, points.cross.pattern in effective)
    return hooks


def _norm_hooks(maps: BlockMaps, layer: int) -> list[FwdHook]:
    """What holds the scales of one layer's norms, or whole norms where no scale can be held."""
    points = maps.points.blocks[layer]
    whole = dict(points.norms)
    if maps.view.any_offloaded:
        whole = {norm: _ends_of(name) for norm, name in points.scales.items()} | whole
    scales = [name for norm, name in points.scales.items() if norm not in whole]
    hooks = [replace(name, maps.capture.activation(name)) for name in scales]
    for norm, ends in whole.items():
        hooks += whole_hooks(ends, maps.norm(layer, norm), _shape(maps, layer))
    return hooks


def _ends_of(scale: str) -> Ends:
    """Return where the norm with this scale begins and ends, to be frozen as a whole where weights are offloaded.

    A Bridge whose scale is replaced reads the norm's weights itself, where accelerate does not load them, or moves the
    norm's input to their device.
    """
    norm = scale.removesuffix(".hook_scale")
    return Ends(f"{norm}.hook_in", f"{norm}.hook_out")


def _per_layer_hooks(maps: BlockMaps, layer: int, activation: str) -> list[FwdHook]:
    """What holds the branch that reads a separate input of each token at this layer."""
    branch = maps.per_layer(layer, activation)
    ends = maps.points.blocks[layer].per_layer
    if branch is None or ends is None:
        return []
    return whole_hooks(ends, branch, _shape(maps, layer))


def _held_pattern(maps: BlockMaps, layer: int) -> Tensor | Callable[[], Tensor]:
    """One layer's pattern; where it is not stored, a function that recomputes it when the hook runs."""
    if maps.points.blocks[layer].pattern in maps.capture.held_scores:
        return partial(maps.capture.pattern, layer)
    return maps.capture.pattern(layer)


def _end_hooks(maps: BlockMaps, norm: Norm | None, scale: str | None, whole: Ends | None, layer: int) -> list[FwdHook]:
    """What holds the norm after the last block of a stack."""
    if norm is None or scale is None:
        return []
    on_other_device = maps.view.is_bridge and maps.view.any_moved
    if whole is None and (maps.view.any_offloaded or on_other_device):
        whole = _ends_of(scale)
    if whole is None:
        return [replace(scale, maps.capture.activation(scale))]
    return whole_hooks(whole, norm, _shape(maps, layer), again=True)


def _class_hooks(maps: BlockMaps) -> list[FwdHook]:
    """What holds the norm of the mean that a classifier of sound reads its classes from."""
    classes = maps.view.class_head
    scale = maps.points.head_scale
    if classes is None or classes.norm is None or classes.norm.epsilon is not None or scale is None:
        return []
    return [replace(scale, maps.capture.activation(scale)[:, 0])]


def _mlp_hooks(maps: BlockMaps, layer: int, activation: str) -> list[FwdHook]:
    """What holds one layer's MLP: its activation, or all of it where nothing inside can be held."""
    points = maps.points.blocks[layer]
    shape = _shape(maps, layer)
    if points.experts:
        return _expert_hooks(maps, layer, activation)
    if points.mlp is None:
        held = maps.mlp_coefficients(layer, activation)
        dense = maps.view.blocks[layer].dense_mlp
        if held is None or dense is None:
            return []
        return mlp_hooks(points, held, dense.b_post)
    if points.shared is not None:
        experts, shared = (
            _whole(maps, layer, lambda layer, part=part: maps.experts_alone(layer, activation)[part])
            for part in ("experts", "shared")
        )
        return [*whole_hooks(points.mlp, experts, shape), *whole_hooks(points.shared, shared, shape)]
    whole = _whole(maps, layer, lambda layer: maps.mlp_alone(layer, activation) or Identity())
    return whole_hooks(points.mlp, whole, shape)


def _expert_hooks(maps: BlockMaps, layer: int, activation: str) -> list[FwdHook]:
    """What holds a mixture of experts from inside: where tokens are sent, and what each expert's activation is."""
    points = maps.points.blocks[layer]
    weights = maps.expert_weights(layer)
    assert points.mlp is not None
    x = maps.capture.activation(points.mlp.into).flatten(0, 1)
    index = maps.routing(layer).index.flatten(0, 1)
    hooks = [replace(name, maps.capture.activation(name)) for name in (points.weight, points.index) if name is not None]
    for number in index.unique().tolist():
        tokens, choice = (index == number).nonzero(as_tuple=True)
        held = held_coefficients(weights.expert(number), x[tokens][None], activation)
        hooks += mlp_hooks(points.experts[number], held, None, choice)
    return hooks


def _prove(maps: BlockMaps) -> frozenset[str]:
    """Run the model, held, with another stream at its first block, and compare every block with its map there."""
    model = maps.capture.model
    points = maps.points
    with unheld_run(model):
        by_pattern = (
            site for block in points.blocks for site in (None if block.attention else block.heads, block.cross)
        )
        sites = [site for site in by_pattern if site is not None and site.pattern not in points.calls]
        reached = patterns_take_effect(model, maps.capture.inputs, sites)
        effective = frozenset(site.pattern for site, reaches in zip(sites, reached, strict=True) if reaches)
    # another stream and not another prompt: a model of images and tokens checks that both fit together
    others = [replace(name, _other(maps.capture.activation(name))) for name in maps.capture.stream_names(0)]
    depths = range(maps.capture.n_layers + 1)
    names = [name for layer in depths for name in maps.capture.stream_names(layer)]
    names += [block.call_end for block in points.blocks if block.call_end is not None]
    last = points.last_output
    final = maps.final_map()
    if final is not None:
        last = points.output
        names.append(last)
    # patterns by way of hook_z: live ablations take heads away there, and hook_pattern was tried above
    hooks = [*others, *_hooks(maps, frozenset())]
    with _norms_taken(maps):
        seen, _ = capture(model, maps.capture.inputs, [*dict.fromkeys(names)], hooks=hooks, last=last, changed=True)
    live = dataclasses.replace(maps.capture, activations=seen)
    steps: dict[str, AffineMap] = {}
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in depths[:-1]:
        read = maps.shared_read(layer)
        steps[f"blocks.{layer}"] = maps.stage(layer)
        before = live.resid_pre(layer)
        if read is not None:
            before = before + read.map(live.resid_pre(read.source))
        ends.append((before, live.resid_post(layer)))
    if final is not None:
        ends.append((live.resid_pre(depths[-1]), live.output))
        steps["ln_final"] = final
    for (where, step), (before, after) in zip(steps.items(), ends, strict=True):
        error = relative_error(step(before), after, maps.mask)
        if not error <= maps.tolerance:
            raise UnsupportedModelError(
                f"{where} of this {maps.view.description} does not obey the hooks that should hold it fixed: held, "
                f"and with another stream, it differs from its map by {error:.1e} (allowed {maps.tolerance:.0e}). "
                "One of its hook points only observes, or another hook undoes it. What reads the weights works "
                "(operator, most methods and circuits); fwd_hooks, attached and live ablations do not."
            )
    if not other_hooks(model):
        _effective_patterns.set(model, maps.capture.weights, effective)
    return effective


@contextmanager
def _norms_taken(maps: BlockMaps) -> Generator[None, None, None]:
    """A model with offloaded weights that fails inside does not take what whole norms are replaced by (OPT-350m)."""
    try:
        yield
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not maps.view.any_offloaded or isinstance(error, TensorLensError):
            raise
        raise UnsupportedModelError(
            f"the weights of this {maps.view.description} are offloaded, so that its norms are held as wholes, and it "
            f"cannot run with what stands in their place ({type(error).__name__}: {error}). What reads the weights "
            "works (operator, most methods and circuits); or load the model into memory."
        ) from error


def _other(x: Tensor) -> Tensor:
    """Vectors of like size that point elsewhere: a uniform factor would be invisible behind a norm."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(x)
    return x + noise * upcast(x).square().mean(-1, keepdim=True).sqrt().to(x)
