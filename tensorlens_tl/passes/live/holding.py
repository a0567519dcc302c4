"""Holding the live model fixed: which hooks, and whether the model obeys them.

On some models a hook point only observes: what a hook returns there is ignored, and the model would run unfrozen
without a word. Patterns have another way (`tensorlens_tl.hooks.freeze`); anything else that is ignored is refused. Both
are found by trying, once per model: the model runs, held, with something else in its residual stream, and every block
must do what its map says.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tensorlens_tl.algebra import Identity, Norm
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import (
    Ends,
    FwdHook,
    attention_hooks,
    capture,
    leave_out,
    mlp_hooks,
    other_hooks,
    own_run,
    patterns_take_effect,
    replace,
    whole_hooks,
)
from tensorlens_tl.passes.block_maps import BlockMaps


class _Proved(NamedTuple):
    """What trying showed of a model, and the versions its weights had (weight processing may rewire hook points)."""

    versions: list[tuple[int, int]] | None
    patterns: frozenset[str]


_proved: "WeakKeyDictionary[Any, _Proved]" = WeakKeyDictionary()  # by model


def prove_obedience(maps: BlockMaps) -> frozenset[str]:
    """Try, once per model, whether it obeys hooks; tells at which patterns' hook points.

    Raises:
        UnsupportedModelError: it ignores what a hook returns at `hook_z`, `mlp.hook_post` or a norm's `hook_scale`; or
            its weights are offloaded.
    """
    if maps.view.any_offloaded:
        raise UnsupportedModelError(
            f"the weights of this {maps.view.description} are offloaded: a Bridge whose norms are held reads their "
            "weights where no hook of accelerate brings them in, so that fwd_hooks, attached and what runs the held "
            "model do not work. The operator and what is made from it do; or load the model into memory."
        )
    known = _proved.get(maps.capture.model)
    if known is None or known.versions != maps.capture.weights.versions or other_hooks(maps.capture.model):
        known = _prove(maps)
    return known.patterns


def holding_hooks(
    maps: BlockMaps,
    patterns: bool = True,
    activations: bool = True,
    norms: bool = True,
    activation: str = "ratio",
) -> list[FwdHook]:
    """The hooks that hold a pass's patterns, activations and norm scales; see `FrozenPass.fwd_hooks`.

    Raises:
        UnsupportedModelError: the model ignores what a hook returns.
    """
    return _hooks(maps, prove_obedience(maps), patterns, activations, norms, activation)


def _hooks(
    maps: BlockMaps,
    taken: frozenset[str],
    patterns: bool = True,
    activations: bool = True,
    norms: bool = True,
    activation: str = "ratio",
) -> list[FwdHook]:
    hooks: list[FwdHook] = []
    batch = maps.capture.tokens.shape[0]
    for layer, points in enumerate(maps.points.blocks):
        start, stop = maps.capture.side(layer)
        shape = batch, stop - start
        if points.whitened is not None and not bool(maps.mask.all()):
            hooks.append(leave_out(points.resid_pre, ~maps.mask))
        if patterns and points.attention is None and points.heads is not None:
            hooks += attention_hooks(points.heads, _held_pattern(maps, layer), points.pattern in taken)
        elif patterns and points.attention is not None:
            hooks += whole_hooks(points.attention, maps.attention_alone(layer), shape)
        if patterns and points.cross is not None:
            held = maps.capture.activation(points.cross.pattern)
            hooks += attention_hooks(points.cross, held, points.cross.pattern in taken)
        if norms:
            hooks += [
                replace(at, maps.capture.activation(at))
                for name, at in points.scales.items()
                if name not in points.norms
            ]
            for name, ends in points.norms.items():
                hooks += whole_hooks(ends, maps.norm(layer, name), shape)
        per_layer = maps.per_layer(layer, activation) if activations else None
        if per_layer is not None and points.per_layer is not None:
            hooks += whole_hooks(points.per_layer, per_layer, shape)
        if activations:
            hooks += _mlp_hooks(maps, layer, activation, shape)
    if norms:
        hooks += _end_hooks(maps, maps.encoder_norm(), maps.points.encoder_scale, maps.points.encoder_norm, 0)
        last = maps.capture.n_layers - 1
        hooks += _end_hooks(maps, maps.final_norm(), maps.points.final_scale, maps.points.final_norm, last)
        hooks += _class_hooks(maps)
    return hooks


def _held_pattern(maps: BlockMaps, layer: int) -> Tensor | Callable[[], Tensor]:
    """One layer's pattern; where it is not kept, what recomputes it when the hook runs."""
    if maps.points.blocks[layer].pattern in maps.capture.held_scores:
        return partial(maps.capture.pattern, layer)
    return maps.capture.pattern(layer)


def _end_hooks(maps: BlockMaps, norm: Norm | None, scale: str | None, whole: Ends | None, layer: int) -> list[FwdHook]:
    """What holds the norm after the last block of a stack."""
    if norm is None or scale is None:
        return []
    if whole is None:
        return [replace(scale, maps.capture.activation(scale))]
    start, stop = maps.capture.side(layer)
    return whole_hooks(whole, norm, (maps.capture.tokens.shape[0], stop - start), again=True)


def _class_hooks(maps: BlockMaps) -> list[FwdHook]:
    """What holds the norm of the mean that a classifier of sound reads its classes from."""
    classes = maps.view.class_head
    scale = maps.points.head_scale
    if classes is None or classes.norm is None or classes.norm.epsilon is not None or scale is None:
        return []
    return [replace(scale, maps.capture.activation(scale)[:, 0])]


def _mlp_hooks(maps: BlockMaps, layer: int, activation: str, shape: tuple[int, int]) -> list[FwdHook]:
    """What holds one layer's MLP: its activation, or all of it where nothing inside can be held."""
    points = maps.points.blocks[layer]
    weights = maps.view.blocks[layer].mlp
    if weights is None:
        return []
    if points.mlp is None:
        held = maps.mlp_coefficients(layer, activation)
        dense = maps.view.blocks[layer].dense_mlp
        return [] if held is None or dense is None else mlp_hooks(points, held, dense.b_post)
    if points.shared is not None:
        parts = maps.experts_alone(layer, activation)
        return [
            *whole_hooks(points.mlp, parts["experts"], shape),
            *whole_hooks(points.shared, parts["shared"], shape),
        ]
    whole = maps.mlp_alone(layer, activation)
    return [] if whole is None else whole_hooks(points.mlp, whole, shape)


def _prove(maps: BlockMaps) -> _Proved:
    """Run the model, held, with another stream at its first block, and compare every block with its map there."""
    model = maps.capture.model
    points = maps.points
    with own_run(model):
        sites = [site for block in points.blocks for site in (block.heads, block.cross) if site is not None]
        reached = patterns_take_effect(model, maps.capture.inputs, sites)
        taken = frozenset(site.pattern for site, reaches in zip(sites, reached, strict=True) if reaches)
        proved = _Proved(maps.capture.weights.versions, taken)
    # another stream and not another prompt: a model of images and tokens checks that both fit together
    others = [replace(name, _other(maps.capture.activation(name))) for name in maps.capture.stream_names(0)]
    names = list(
        dict.fromkeys(name for layer in range(maps.capture.n_layers + 1) for name in maps.capture.stream_names(layer))
    )
    after = maps.final_map() or Identity()
    ends = [] if maps.final_map() is None else [points.output]
    # patterns by way of hook_z: live ablations take heads away there, and hook_pattern was tried above
    hooks = [*others, *_hooks(maps, frozenset())]
    last = points.output if ends else points.last_output
    seen, _ = capture(model, maps.capture.inputs, [*dict.fromkeys(names + ends)], hooks=hooks, last=last, changed=True)
    live = dataclasses.replace(maps.capture, activations=seen)
    streams = [live.resid_pre(layer) for layer in range(maps.capture.n_layers + 1)]
    streams += [live.output] if ends else []
    steps = [*map(maps.block_map, range(maps.capture.n_layers)), after]
    for layer, (step, before, own) in enumerate(zip(steps, streams, streams[1:], strict=False)):
        error = relative_error(step(before), own, maps.mask)
        if not error <= maps.tolerance:
            where = f"blocks.{layer}" if layer < maps.capture.n_layers else "ln_final"
            raise UnsupportedModelError(
                f"{where} of this {maps.view.description} does not obey the hooks that should hold it fixed: held, "
                f"and with another stream, it differs from its map by {error:.1e} (allowed {maps.tolerance:.0e}). "
                "One of its hook points only observes, or another hook undoes it. What reads the weights works "
                "(operator, most methods and circuits); fwd_hooks, attached and live ablations do not."
            )
    if not other_hooks(model):
        _proved[model] = proved
    return proved


def _other(x: Tensor) -> Tensor:
    """Vectors of like size that point elsewhere: a uniform factor would be invisible behind a norm."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(x)
    return x + noise * upcast(x).square().mean(-1, keepdim=True).sqrt().to(x)
