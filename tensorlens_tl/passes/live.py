"""The live model: held fixed by hooks, or run with changes in copies of its prompts."""

import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Identity, Norm
from tensorlens_tl.algebra.memory import Memory, chunks, in_bytes
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import FrozenModelError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import (
    Ends,
    FwdHook,
    Placing,
    attention_hooks,
    capture,
    foreign_hooks,
    hook_points,
    leave_out,
    lock_of,
    mlp_hooks,
    other_hooks,
    patterns_take_effect,
    refuse_attached,
    replace,
    unheld_run,
    whole_hooks,
    without_numbers,
)
from tensorlens_tl.models import FrozenRule
from tensorlens_tl.models.lifecycle import OncePerWeights, refuse_dropout
from tensorlens_tl.passes.block_maps import BlockMaps, held_coefficients
from tensorlens_tl.passes.capture import Capture

_effective_patterns: OncePerWeights[frozenset[str]] = OncePerWeights()
# for models that obey hooks: the pattern hook points that take effect (weight processing may rewire them)


# ------------------------------------------------------------------
# Holding the live model fixed: the hooks, and whether the model obeys them.
#
# On some models a hook point only observes: a hook's return value is ignored, and the model would silently run
# unfrozen. Patterns can be frozen in another way (`tensorlens_tl.hooks.freeze`); otherwise this raises an error. Both
# are decided by a test, once per model: the frozen model runs with another residual stream, and every block must agree
# with its map.


def prove_obedience(maps: BlockMaps) -> frozenset[str]:
    """Test, once per model, whether it obeys hooks; return the patterns' hook points where they take effect.

    Raises `UnsupportedModelError` if it ignores hooks at `hook_z`, `mlp.hook_post` or `hook_scale`, or has offloaded
    weights and cannot run with norms frozen as a whole.
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
    rule: FrozenRule = "frozen",
) -> list[FwdHook]:
    """Return the hooks that freeze a pass; see `FrozenPass.fwd_hooks`. Raises an error if the model ignores hooks."""
    hooks = _hooks(maps, prove_obedience(maps), patterns, activations, norms, rule)
    return without_numbers(maps.capture.model, hook_points(maps.capture.model), hooks)


def _hooks(
    maps: BlockMaps,
    effective: frozenset[str],
    patterns: bool = True,
    activations: bool = True,
    norms: bool = True,
    rule: FrozenRule = "frozen",
) -> list[FwdHook]:
    """Return the same, given the pattern hook points that take effect."""
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
                hooks += _per_layer_hooks(local, layer, rule)
                hooks += _mlp_hooks(local, layer, rule)
    if norms:
        hooks += _end_hooks(maps, maps.encoder_norm(), maps.points.encoder_scale, maps.points.encoder_norm, 0)
        last = maps.capture.n_layers - 1
        hooks += _end_hooks(maps, maps.final_norm(), maps.points.final_scale, maps.points.final_norm, last)
        hooks += _class_hooks(maps)
    return hooks


def _shape(maps: BlockMaps, layer: int) -> tuple[int, int]:
    """Return the number of prompts, and of positions that a block acts on."""
    start, stop = maps.capture.side(layer)
    return len(maps.mask), stop - start


def _whole(maps: BlockMaps, layer: int, part: Callable[[int], AffineMap]) -> AffineMap:
    """Return the map of a part held as a whole; its layer's weights are loaded when a hook needs them."""
    return maps.lazily(layer, lambda: part(layer))


def _padding_hooks(maps: BlockMaps, layer: int) -> list[FwdHook]:
    """Return hooks that keep padding out of a whitened block's recursion."""
    points = maps.points.blocks[layer]
    if points.whitened is None or bool(maps.mask.all()):
        return []
    return [leave_out(points.resid_pre, ~maps.mask)]


def _pattern_hooks(maps: BlockMaps, layer: int, effective: frozenset[str]) -> list[FwdHook]:
    """Return hooks that hold one layer's patterns, or its attention as a whole if nothing inside can be held."""
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
    """Return hooks that hold the scales of one layer's norms, or whole norms without a replaceable scale."""
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
    """Return the ends of the norm with this scale, which is frozen as a whole if weights are offloaded.

    A Bridge whose scale is replaced reads the norm's weights itself, where accelerate does not load them, or moves the
    norm's input to their device.
    """
    norm = scale.removesuffix(".hook_scale")
    return Ends(f"{norm}.hook_in", f"{norm}.hook_out")


def _per_layer_hooks(maps: BlockMaps, layer: int, rule: FrozenRule) -> list[FwdHook]:
    """Return hooks that hold the branch for a separate input of each token at this layer."""
    branch = maps.per_layer(layer, rule)
    ends = maps.points.blocks[layer].per_layer
    if branch is None or ends is None:
        return []
    return whole_hooks(ends, branch, _shape(maps, layer))


def _held_pattern(maps: BlockMaps, layer: int) -> Tensor | Callable[[], Tensor]:
    """Return one layer's pattern; if it is not stored, a function that recomputes it when the hook runs."""
    if maps.points.blocks[layer].pattern in maps.capture.held_scores:
        return partial(maps.capture.pattern, layer)
    return maps.capture.pattern(layer)


def _end_hooks(maps: BlockMaps, norm: Norm | None, scale: str | None, whole: Ends | None, layer: int) -> list[FwdHook]:
    """Return hooks that hold the norm after the last block of a stack."""
    if norm is None or scale is None:
        return []
    on_other_device = maps.view.is_bridge and maps.view.any_moved
    if whole is None and (maps.view.any_offloaded or on_other_device):
        whole = _ends_of(scale)
    if whole is None:
        return [replace(scale, maps.capture.activation(scale))]
    return whole_hooks(whole, norm, _shape(maps, layer), again=True)


def _class_hooks(maps: BlockMaps) -> list[FwdHook]:
    """Return hooks that hold a sound classifier's norm of the mean."""
    classes = maps.view.class_head
    scale = maps.points.head_scale
    if classes is None or classes.norm is None or classes.norm.epsilon is not None or scale is None:
        return []
    return [replace(scale, maps.capture.activation(scale)[:, 0])]


def _mlp_hooks(maps: BlockMaps, layer: int, rule: FrozenRule) -> list[FwdHook]:
    """Return hooks that hold one layer's MLP: its activation, or the whole if nothing inside can be held."""
    points = maps.points.blocks[layer]
    shape = _shape(maps, layer)
    if points.experts:
        return _expert_hooks(maps, layer, rule)
    if points.mlp is None:
        held = maps.mlp_coefficients(layer, rule)
        dense = maps.view.blocks[layer].dense_mlp
        if held is None or dense is None:
            return []
        return mlp_hooks(points, held, dense.b_post)
    if points.shared is not None:
        experts, shared = (
            _whole(maps, layer, lambda layer, part=part: maps.experts_alone(layer, rule)[part])
            for part in ("experts", "shared")
        )
        return [*whole_hooks(points.mlp, experts, shape), *whole_hooks(points.shared, shared, shape)]
    whole = _whole(maps, layer, lambda layer: maps.mlp_alone(layer, rule) or Identity())
    return whole_hooks(points.mlp, whole, shape)


def _expert_hooks(maps: BlockMaps, layer: int, rule: FrozenRule) -> list[FwdHook]:
    """Return hooks that hold a mixture of experts from inside: the routing, and each expert's activation."""
    points = maps.points.blocks[layer]
    weights = maps.expert_weights(layer)
    assert points.mlp is not None
    x = maps.capture.activation(points.mlp.into).flatten(0, 1)
    index = maps.routing(layer).index.flatten(0, 1)
    hooks = [replace(name, maps.capture.activation(name)) for name in (points.weight, points.index) if name is not None]
    for number in index.unique().tolist():
        tokens, choice = (index == number).nonzero(as_tuple=True)
        held = held_coefficients(weights.expert(number), x[tokens][None], rule)
        hooks += mlp_hooks(points.experts[number], held, None, choice)
    return hooks


def _prove(maps: BlockMaps) -> frozenset[str]:
    """Run the frozen model with another stream at its first block, and compare every block with its map."""
    model = maps.capture.model
    points = maps.points
    with unheld_run(model):
        by_pattern = (
            site for block in points.blocks for site in (None if block.attention else block.heads, block.cross)
        )
        sites = [site for site in by_pattern if site is not None and site.pattern not in points.calls]
        reached = patterns_take_effect(model, maps.capture.inputs, sites)
        effective = frozenset(site.pattern for site, reaches in zip(sites, reached, strict=True) if reaches)
    # change the stream, not the prompt: a model of images and tokens checks that both fit together
    others = [replace(name, _other(maps.capture.activation(name))) for name in maps.capture.stream_names(0)]
    depths = range(maps.capture.n_layers + 1)
    names = [name for layer in depths for name in maps.capture.stream_names(layer)]
    names += [block.call_end for block in points.blocks if block.call_end is not None]
    last = points.last_output
    final = maps.final_map()
    if final is not None:
        last = points.output
        names.append(last)
    # hold patterns via hook_z: live ablations remove heads there, and hook_pattern was tested above
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
                f"{where} of this {maps.view.description} does not obey the hooks that should hold it fixed: frozen, "
                f"and with another stream, it differs from its map by {error:.1e} (allowed {maps.tolerance:.0e}). "
                "One of its hook points only observes, or another hook undoes it. Use functions that read the weights "
                "(operator, most methods and circuits) instead of fwd_hooks, attached and live ablations."
            )
    if not other_hooks(model):
        _effective_patterns.set(model, maps.capture.weights, effective)
    return effective


@contextmanager
def _norms_taken(maps: BlockMaps) -> Generator[None, None, None]:
    """Raise our own error if a model with offloaded weights cannot run with replaced whole norms (OPT-350m)."""
    try:
        yield
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not maps.view.any_offloaded or isinstance(error, TensorLensError):
            raise
        raise UnsupportedModelError(
            f"the weights of this {maps.view.description} are offloaded, so its norms are replaced as a whole, but it "
            f"cannot run with the replacements ({type(error).__name__}: {error}). Use functions that read the weights "
            "(operator, most methods and circuits), or load the model into memory."
        ) from error


def _other(x: Tensor) -> Tensor:
    """Return vectors of similar size in other directions: a uniform factor would be invisible behind a norm."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(x)
    return x + noise * upcast(x).square().mean(-1, keepdim=True).sqrt().to(x)


Copies = Sequence[int | None]
"""The number of the change in each copy of the prompts, or None for an unchanged copy."""

SAME_SHAPE = 1e-5
"""The largest relative difference of two runs of the same batch, in any precision: they compute the same."""


# ------------------------------------------------------------------
# Further runs of the live model for a pass, with changes in copies of its prompts.
#
# Every further run of the model for a pass goes through `LiveModel`, which refuses a model that has changed since the
# pass: other weights, another configuration, dropout, a frozen pass attached, or activations that differ.
#
# Several changes are run at once as copies of the prompts, one after the other in the rows of a batch. User hooks may
# act on one row only (``t[0, 3] += v``, the usual idiom with one prompt), and would not reach the copies in other rows.
# Therefore
#
# * with such hooks (`tensorlens_tl.hooks.foreign_hooks`), each copy is run separately, in a batch of the pass's shape;
# * without, the first and the last copy of every batch are unchanged, and both must reproduce the pass (of an
#   `Ablation`, in its first batch).


def error_at(capture: Capture, name: str, tensor: Tensor) -> float:
    """Return the relative error of a run's activation at a hook point, compared with that of the pass."""
    expected = capture.activation(name)
    mask = capture.mask[:, capture.span(name)]
    real = mask if mask.shape == expected.shape[:2] else None  # a classifier's head reads one vector
    live = tensor.detach().to(expected.device).reshape(expected.shape)
    return relative_error(upcast(live), upcast(expected), real)


class LiveModel:
    """The model of a pass, for further runs.

    Attributes:
        question: the subject of messages, such as ``"logits"``.
        alone: user hooks are on the model, so every copy of the prompts runs separately.
        tolerance: the largest relative difference of a run from the pass; if hooks changed since, a run of the same
            batch must repeat the pass up to rounding.

    Raises:
        InvalidInputError: the model is now in train mode with active dropout.
        FrozenModelError: its weights or configuration have changed since the pass, or a frozen pass is attached.
    """

    def __init__(self, capture: Capture, tolerance: float, question: str) -> None:
        capture.check_fresh()
        refuse_attached(capture.model)
        refuse_dropout(capture.view.model)
        self.capture = capture
        self.question = question
        others = foreign_hooks(capture.model)
        self.alone = bool(others)
        self.same_hooks = capture.hook_numbers == frozenset(hook.number for hook in others)
        self.copies_tolerance = tolerance
        self.tolerance = tolerance if self.same_hooks else min(tolerance, SAME_SHAPE)

    def check(self, seen: Mapping[str, Tensor]) -> None:
        """Raise `FrozenModelError` if an activation (by hook point) of a run differs from that of the pass."""
        for name, tensor in seen.items():
            error = error_at(self.capture, name, tensor)
            self.refuse(error, f"{name} differs by {error:.1e}")

    def check_hooks(self) -> None:
        """If hooks were added or removed since the pass, run its prompts once and `check` the output."""
        if not self.same_hooks:
            name = self.capture.points.last_output
            self.check(capture(self.capture.model, self.capture.inputs, [name], last=name)[0])

    def refuse(self, error: float, where: str) -> None:
        """Raise `FrozenModelError` for a run that differs from the pass by more than allowed, or by NaN."""
        if not error <= self.tolerance:
            raise self._other_model(where)

    def _other_model(self, where: str) -> FrozenModelError:
        changed = "" if self.same_hooks else " (hooks were put on it or taken off since)"
        return FrozenModelError(
            f"{self.question}: the live model no longer reproduces this pass{changed}: {where}. Freeze again."
        )

    def changed(
        self,
        changes: int,
        run: Callable[[Copies], Float[Tensor, "copy *rest"]],
        error: Callable[[Float[Tensor, "*rest"]], float],
        bytes_per_copy: int,
        memory: Memory,
        title: str,
        parts: int = 1,
    ) -> Iterator[tuple[range, Float[Tensor, "change *rest"]]]:
        """Run every change in a copy of the prompts, as many at once as fit `memory`; yield changes and results.

        Args:
            changes: the number of changes.
            run: runs copies of the prompts, and returns the result of each.
            error: returns the error of an unchanged copy's result, relative to the pass.
            bytes_per_copy: the bytes that one copy allocates.
            title: the title of the progress bar.
            parts: the minimal number of runs.

        Raises:
            FrozenModelError: an unchanged copy does not reproduce the pass.
            SizeError: one copy exceeds an explicit bound.
        """
        room = in_bytes(memory) - 2 * bytes_per_copy
        singly = self.alone or changes == 1 or room < bytes_per_copy
        self.check_hooks()
        if singly or not self.same_hooks:
            off = error(run([None])[0])
            self.refuse(off, f"they differ by {off:.1e}")
        if singly:
            for rows in chunks(changes, bytes_per_copy, memory, title, parts=max(changes, 1)):
                yield rows, run(list(rows))
            return
        for rows in chunks(changes, bytes_per_copy, room, title, parts=parts):
            outputs = run([None, *rows, None])
            self._check_controls(error(outputs[0]), error(outputs[-1]))
            yield rows, outputs[1:-1]

    def _check_controls(self, first: float, last: float) -> None:
        """Raise `FrozenModelError` if an unchanged copy does not reproduce the pass: rows of a batch differ."""
        if not first <= self.copies_tolerance:
            raise self._other_model(f"they differ by {first:.1e}")
        if not last <= self.copies_tolerance:
            raise FrozenModelError(
                f"{self.question}: the same prompts give different results in the first and the last rows of a batch "
                f"(they differ by {last:.1e}): something acts on some rows only, but it is not a visible hook. Make it "
                "act on every row, or install it as a hook on the model, so that prompts are run one by one."
            )


def repeated(inputs: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """Repeat all prompts of a pass's inputs for each copy."""
    return in_one_batch([inputs] * copies)


def in_one_batch(inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the inputs of passes with equally many tokens into those of one run, pass after pass."""
    tensors = [name for name, value in inputs[0].items() if isinstance(value, Tensor)]
    return dict(inputs[0]) | {name: torch.cat([each[name] for each in inputs]) for name in tensors}


# ------------------------------------------------------------------
# Work that a changed run can skip: the layers before its change, and unread positions in the last one.
#
# Copies of the prompts are rows of one run. Each enters at the first block that its change affects, with the pass's
# stream; blocks compute only copies that have entered. The MLP of the last relevant block is called only with the
# positions that are read later.
#
# This is always checked: callers compare the results of unchanged copies, and run the whole model if these differ (a
# layer may read something that an earlier one computed outside the stream).


class Form(NamedTuple):
    """The form of a block's output: the stream alone, or first in a tuple of nothing else."""

    device: torch.device
    length: int | None

    @classmethod
    def of(cls, output: Any, shape: torch.Size) -> "Form | None":
        """Return the form of an output; None if it contains more than the stream."""
        if isinstance(output, Tensor):
            return cls(output.device, None) if output.shape == shape else None
        if not isinstance(output, tuple) or any(part is not None for part in output[1:]):
            return None
        alone = cls.of(output[0], shape)
        return alone and alone._replace(length=len(output))

    def output(self, stream: Tensor) -> Any:
        """Return the stream in this form."""
        stream = stream.to(self.device)
        return stream if self.length is None else (stream, *[None] * (self.length - 1))

    def stream(self, output: Any) -> Tensor:
        """Return the stream of an output in this form."""
        return output if self.length is None else output[0]


class EarlierLayers:
    """The blocks of a pass's model, with copies of the prompts that enter at the first block that they change.

    `forms` are the forms of the blocks' outputs, recorded by `seen`; if one is more than the stream, no block is
    skipped.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.forms: list[Form] = []
        self._blocks: list[nn.Module] = [block.module for block in capture.view.blocks]
        self._entered: list[int] | None = None
        self._positions: Int[Tensor, "batch query"] | None = None

    @contextmanager
    def seen(self) -> Generator[None, None, None]:
        """Record the forms of the blocks' outputs during a run of the pass's prompts inside."""
        home = threading.get_ident()
        forms: dict[int, Form] = {}

        def note(number: int, module: nn.Module, args: Any, output: Any) -> None:
            form = Form.of(output, self.capture.resid_pre(number + 1).shape)
            if form is not None and threading.get_ident() == home:
                forms[number] = form

        with lock_of(self.capture.model), Placing() as placing:
            for number, block in enumerate(self._blocks):
                placing.on_module(block, partial(note, number))
            yield
        self.forms = list(forms.values())

    @property
    def may_be_skipped(self) -> bool:
        """Whether every block's output is the stream and nothing else."""
        return len(self.forms) == len(self._blocks)

    @contextmanager
    def skipped(self, firsts: Sequence[int]) -> Generator[None, None, None]:
        """Let each copy of the prompts enter a run of this thread at its first block, `firsts`."""
        with lock_of(self.capture.model), Placing() as placing:
            for number, block in enumerate(self._blocks[: max(firsts)]):
                entered = [copy for copy, first in enumerate(firsts) if first <= number]
                replace_forward(placing, block, partial(self._some_copies, number, entered, len(firsts)))
            yield

    def _some_copies(
        self, number: int, entered: list[int], copies: int, computed: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A block's output for the copies that have entered; the others keep the pass's stream."""
        form = self.forms[number]
        stream = torch.cat([self.capture.resid_pre(number + 1)] * copies).to(form.device)
        if not entered:
            return form.output(stream)
        batch = len(stream) // copies
        rows = torch.arange(len(stream), device=form.device).unflatten(0, (copies, batch))[entered].flatten()
        self._entered = entered
        try:
            output = computed(*rows_of(args, rows, len(stream)), **rows_of(kwargs, rows, len(stream)))
        finally:
            self._entered = None
        return form.output(stream.index_copy(0, rows, form.stream(output)))

    @contextmanager
    def narrowed(self, last: int, positions: Int[Tensor, "batch query"]) -> Generator[None, None, None]:
        """Let the MLP of the last block that is read compute only the positions that are read, in this thread."""
        mlp = getattr(self._blocks[last], "mlp", None)
        points = self.capture.points.blocks[last]
        is_mixture = bool(points.index or points.weight or points.experts)
        with lock_of(self.capture.model), Placing() as placing:
            if isinstance(mlp, nn.Module) and not is_mixture:
                replace_forward(placing, mlp, partial(self._some_positions, positions))
            yield

    def _some_positions(
        self, positions: Int[Tensor, "batch query"], computed: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return an MLP's output at some positions, zero elsewhere; raise if input or output is not just a stream."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise UnsupportedModelError("the last MLP is not called with the stream alone.")
        at = positions.repeat(len(x) // len(positions), 1).to(x.device)[..., None]
        self._positions = positions
        try:
            output = computed(x.take_along_dim(at, 1), *args, **kwargs)
        finally:
            self._positions = None
        if not isinstance(output, Tensor) or output.shape[:2] != at.shape[:2]:
            raise UnsupportedModelError("the last MLP's output is not just the stream.")
        return output.new_zeros(*x.shape[:2], output.shape[-1]).scatter(1, at.expand_as(output), output)

    def entered(self, values: Shaped[Tensor, "copy batch pos *rest"]) -> Shaped[Tensor, "some batch some_pos *rest"]:
        """Select from values for every copy and position those that a hook gets now: entered copies, read positions."""
        if self._entered is not None:
            values = values[self._entered]
        return self.at_positions(values)

    def at_positions(
        self, values: Shaped[Tensor, "copy batch pos *rest"]
    ) -> Shaped[Tensor, "copy batch some_pos *rest"]:
        """Select values at the positions that a hook gets now."""
        if self._positions is None:
            return values
        index = self._positions.to(values.device)[None].expand(len(values), -1, -1)
        return values.take_along_dim(index.reshape(*index.shape, *[1] * (values.ndim - 3)), 2)


@contextmanager
def one_copy_attends(capture: Capture, copies: int) -> Generator[None, None, None]:
    """Let attention with hook points in its heads compute only the second copy of the prompts, in this thread.

    For runs in which hooks replace the heads' outputs in every copy. The unchanged first copy then reveals attention
    that also adds something of its input.
    """
    batch = len(capture.mask)
    rows = torch.arange(batch, 2 * batch, device=capture.mask.device)

    def attend(computed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return computed(*rows_of(args, rows, copies * batch), **rows_of(kwargs, rows, copies * batch))

    with lock_of(capture.model), Placing() as placing:
        for block, points in zip(capture.view.blocks, capture.points.blocks, strict=True):
            module = getattr(block.module, "attn", None)
            if isinstance(module, nn.Module) and points.heads is not None and points.attention is None:
                replace_forward(placing, module, attend)
        yield


def rows_of(value: Any, rows: Int[Tensor, " row"], count: int) -> Any:
    """Return some rows of every tensor with `count` rows, also in tuples, lists and dictionaries."""
    if isinstance(value, Tensor) and value.ndim and len(value) == count:
        return value.index_select(0, rows.to(value.device))
    if type(value) in (tuple, list):
        return type(value)(rows_of(part, rows, count) for part in value)
    if type(value) is dict:
        return {name: rows_of(part, rows, count) for name, part in value.items()}
    return value


def replace_forward(placing: Placing, module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace a module's forward in this thread by a function of it and its arguments, until the placing ends."""
    home = threading.get_ident()
    computed = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != home:
            return computed(*args, **kwargs)
        return function(computed, *args, **kwargs)

    placing.instead_of(module, "forward", forward)
