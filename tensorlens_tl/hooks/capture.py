"""Capturing activations of a forward pass, at hook points and in places where TransformerLens has none.

A hook point is the identity. Its input is what the model computes, and its output is the result of the hooks: the
difference is what user-installed hooks, such as steering vectors, add to the residual stream. The routing of experts
and some patterns are read from arguments or outputs of modules.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks.points import PATTERN, BlockPoints, CallPoint, ModelPoints
from tensorlens_tl.hooks.running import (
    FwdHook,
    Placing,
    hook_points,
    in_this_thread,
    numbered,
    other_hooks,
    run,
    unembeds_by_libraries,
)
from tensorlens_tl.models import BlockView, HookedModel, ModelView

# ------------------------------------------------------------------ arguments and outputs of modules


@contextmanager
def _on_calls(
    points: Sequence[CallPoint], see: Callable[[int, Mapping[str, Any], Any], Any]
) -> Generator[None, None, None]:
    """Call `see` with arguments or outputs of modules in this thread; its return value takes their place.

    It gets the number of the point, the call's arguments by name (none for an output), and the argument or output.
    """
    home = threading.get_ident()

    def before(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != home:
            return None
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        value = bound.arguments.get(points[number].argument)
        seen = see(number, bound.arguments, value)
        if seen is value:
            return None
        bound.arguments[points[number].argument] = seen
        return bound.args, bound.kwargs

    def after(number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != home:
            return None
        seen = see(number, {}, output)
        return None if seen is output else seen

    with Placing() as placing:
        for number, point in enumerate(points):
            if point.argument == "output":
                placing.on_module(point.module, partial(after, number))
            else:
                placing.on_module(point.module, partial(before, number), before=True)
        yield


@contextmanager
def seen_calls(calls: Mapping[str, CallPoint], see: Callable[[str, Tensor], None]) -> Generator[None, None, None]:
    """Call `see` with the tensors at `calls`, detached, whenever this thread calls their modules.

    Raises `UnsupportedModelError` if a module is not called, or is called again with another tensor.
    """
    names = list(calls)
    seen = set[str]()

    def note(number: int, arguments: Mapping[str, Any], shown: Any) -> Any:
        name = names[number]
        call = calls[name]
        value = call.read(shown) if call.argument == "output" else shown
        what = f"{name} ({type(call.module).__name__}, {call.argument})"
        if call.optional and (name in seen or not isinstance(value, Tensor)):
            return shown
        if name in seen:
            raise UnsupportedModelError(f"{what} is called several times in one forward pass, which is not supported.")
        if value is None and name.endswith(PATTERN):
            raise UnsupportedModelError(
                f"{what} is no pattern over all pairs of tokens: attention within windows, or fused attention. Fused "
                "attention shows its pattern where the Hugging Face model is loaded with attn_implementation='eager'."
            )
        if not isinstance(value, Tensor):
            raise UnsupportedModelError(f"{what} is {type(value).__name__}, not a tensor.")
        seen.add(name)
        see(name, value.detach())
        return shown

    with _on_calls([*calls.values()], note):
        yield
    silent = [name for name, call in calls.items() if name not in seen and not call.optional]
    if silent:
        raise UnsupportedModelError(
            f"{silent[0]}: {type(calls[silent[0]].module).__name__} was not called in a forward pass (fused experts?). "
            "Load the Hugging Face model with experts_implementation='eager'."
        )


class CallChange(NamedTuple):
    """A change of a module's argument or output (the first of several outputs) at `point`.

    `change` maps the call's arguments by name, and the tensor there, to the new tensor.
    """

    point: CallPoint
    change: Callable[[Mapping[str, Any], Tensor], Tensor]


@contextmanager
def changed_calls(changes: Sequence[CallChange]) -> Generator[None, None, None]:
    """Change calls of some modules in this thread while the context is open.

    Raises `UnsupportedModelError` if a module is not called, or there is no tensor to change.
    """
    called = set[int]()

    def change(number: int, arguments: Mapping[str, Any], shown: Any) -> Any:
        called.add(number)
        point = changes[number].point
        first, *others = shown if isinstance(shown, tuple) and point.argument == "output" else (shown,)
        if not isinstance(first, Tensor):
            what = f"{type(point.module).__name__}, {point.argument}"
            raise UnsupportedModelError(f"{what} is {type(first).__name__}, not a tensor that could be changed.")
        first = changes[number].change(arguments, first)
        return (first, *others) if isinstance(shown, tuple) else first

    with _on_calls([each.point for each in changes], change):
        yield
    for number, each in enumerate(changes):
        if number not in called and not each.point.optional:
            module = type(each.point.module).__name__
            raise UnsupportedModelError(
                f"{module} was not called in a forward pass (fused experts?), so nothing could be changed there. "
                "Load the Hugging Face model with experts_implementation='eager'."
            )


# ------------------------------------------------------------------ additions to the stream by hooks

StreamPlace = Literal["attention", "middle", "mlp", "late", "end"]
"""Where something joins the stream in a block: with attention's output, after that has been added, with the MLP's
output, after that has been added (and before a norm around the sum), or after the whole block."""


@dataclass(frozen=True)
class StreamPoint:
    """A hook point whose tensor is the residual stream, or is added to it unchanged.

    `inside` is True for the output of a sublayer's own module, before the block's factor.
    """

    name: str
    layer: int
    place: StreamPlace
    inside: bool = False


@dataclass(frozen=True, eq=False)
class Passed:
    """The input and output of a hook point."""

    before: Float[Tensor, "..."]
    after: Float[Tensor, "..."]


def hooked_stream_points(view: ModelView, points: ModelPoints) -> list[StreamPoint]:
    """Return the points of the stream that have user-installed hooks, in the order of the pass."""
    names = other_hooks(view.model)
    if not names or view.is_encoder_decoder or view.loop is not None:
        return []
    known = hook_points(view.model)
    hooked = {id(known[name]) for name in names if name in known}
    unseen = {id(known[point.name]): point for point in reversed(_stream_points(view, points, known))}
    return [point for module, point in reversed(unseen.items()) if module in hooked]


def _stream_points(view: ModelView, points: ModelPoints, known: dict[str, Any]) -> list[StreamPoint]:
    """Return every point of the stream that a model has."""
    stream: list[StreamPoint] = []
    for layer, (block, of_block) in enumerate(zip(view.blocks, points.blocks, strict=True)):
        norms = {id(known.get(f"{block.name}.{norm}.hook_out")) for norm in block.norms}
        for place, (name, module, factor) in _writes(block, of_block).items():
            if name is None:
                continue
            scaled = factor != 1 and known[name] is not known.get(module)
            if scaled and module in known:
                stream.append(StreamPoint(module, layer, place, inside=True))
            inside = view.is_bridge and not scaled and id(known[name]) not in norms
            stream.append(StreamPoint(name, layer, place, inside))
        sums: dict[str, StreamPlace] = {f"{block.name}.{name}": place for name, place in _sums(view).items()}
        if layer + 1 < len(view.blocks):
            sums[f"{view.blocks[layer + 1].name}.hook_resid_pre"] = "end"
        stream += [StreamPoint(name, layer, place) for name, place in sums.items()]
    return [point for point in stream if point.name in known]


def _writes(block: BlockView, points: BlockPoints) -> dict[StreamPlace, tuple[str | None, str, float]]:
    """Return by place the points of a sublayer's output to the stream and of its module's output, and their ratio.

    If they are one hook point, or the block's factor is 1, both show the same; Granite has a point after the factor.
    """
    attention = f"{block.name}.{block.parts.mixer_name}.hook_out"
    mlp = f"{block.name}.{block.parts.mlp_name}.hook_out"
    return {
        "attention": (points.attention_write, attention, block.attention_factor),
        "mlp": (points.mlp_write, mlp, block.branch_factor),
    }


def _sums(view: ModelView) -> dict[str, StreamPlace]:
    """Return the points of a block that hold the stream; a Bridge's `hook_resid_mid` is what the second norm reads."""
    if view.is_hooked_encoder:
        return {"hook_resid_mid": "middle", "hook_resid_post": "late", "hook_normalized_resid_post": "end"}
    if view.is_bridge:
        return {"hook_resid_post": "end"}
    return {"hook_resid_mid": "middle", "hook_resid_post": "end"}


@contextmanager
def passing(
    view: ModelView,
    points: Sequence[StreamPoint],
    see: Callable[[StreamPoint, Passed], None],
    *,
    instead: Callable[[Tensor], Tensor] | None = None,
) -> Generator[None, None, None]:
    """Call `see` with the tensors at some hook points in this thread, before and after hooks.

    `instead` maps the model's activation to the tensor that its hooks receive instead.
    """
    known = hook_points(view.model) if points else {}
    home = threading.get_ident()
    entered: dict[str, Tensor] = {}

    def before(point: StreamPoint, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != home:
            return None
        x = args[0] if instead is None else instead(args[0])
        entered[point.name] = x.detach().clone()  # a hook may write into it
        return (x, *args[1:]), kwargs

    def after(point: StreamPoint, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if threading.get_ident() == home:
            see(point, Passed(entered.pop(point.name), output.detach()))

    with Placing() as placing:
        for point in points:
            module = known[point.name]
            placing.on_module(module, partial(before, point), before=True)
            placing.on_module(module, partial(after, point))
        yield


# ------------------------------------------------------------------ one forward pass


def observe(
    model: HookedModel,
    inputs: Mapping[str, Any],
    names: Iterable[str],
    see: Callable[[str, Tensor], None],
    *,
    hooks: Sequence[FwdHook] = (),
    last: str | None = None,
    optional: Collection[str] = (),
    calls: Mapping[str, CallPoint] | None = None,
    changed: bool = False,
) -> Any:
    """Run the model once and show `see` the activation at each of `names`, in the order of the forward pass.

    Args:
        model: any TransformerLens model.
        inputs: keyword arguments of its forward.
        names: hook points.
        see: called with a name and its activation, detached, once for each name.
        hooks: further hooks; `see` gets later activations with their changes, and their own point's if `changed`.
        last: a hook point at which the run ends, without an output.
        optional: names that may be missing.
        calls: names that are not hook points, and where their tensors are.

    Returns:
        The model's output, or None if the run ended before it. Hooks are removed, also on an exception.

    Raises:
        UnsupportedModelError: a hook point did not fire, or fired again with another activation.

    >>> from tensorlens_tl.hooks import observe
    >>> names = ["blocks.1.hook_resid_pre", "blocks.0.hook_resid_pre"]
    >>> _ = observe(model, frozen.inputs, names, lambda name, activation: print(name), last=names[0])
    blocks.0.hook_resid_pre
    blocks.1.hook_resid_pre
    """
    listed = hook_points(model)
    points = numbered(model, listed)
    calls = calls or {}
    names = list(names)
    wanted: dict[int, list[str]] = {}
    for name in names:
        if name in calls:
            continue
        wanted.setdefault(id(points[name]), []).append(name)
    called = {name for name, point in points.items() if id(point) in wanted}  # all names of the requested points
    fired: dict[int, Callable[[], Tensor | None]] = {}
    again: list[str] = []

    def note(tensor: Tensor, *, hook: Any) -> None:
        point = id(hook)
        if point in fired:
            if not _same(fired[point](), tensor):
                again.extend(wanted[point])
            return
        fired[point] = _reference(tensor)
        for name in wanted[point]:
            see(name, tensor.detach())

    # one filter instead of a hook per name: a Bridge lists all its hook points again for every name
    look: list[FwdHook] = [(called.__contains__, in_this_thread(note))]
    placed = [*hooks, *look] if changed else [*look, *hooks]
    output = None
    called_with = {name: calls[name] for name in names if name in calls}
    with torch.no_grad(), seen_calls(called_with, see):
        output = run_until(model, inputs, placed, last, listed)
    expected = [name for point, names in wanted.items() if point not in fired for name in names]
    silent = [name for name in expected if name not in optional]
    if silent:
        hint = _EAGER if silent[0].endswith("hook_pattern") else ""
        raise UnsupportedModelError(
            f"the hook point {silent[0]!r} exists but did not fire in a forward pass of this {type(model).__name__}; "
            f"a frozen pass needs it.{hint}"
        )
    if again:
        raise UnsupportedModelError(
            f"{again[0]!r} fires several times in one forward pass of this {type(model).__name__}, with another "
            "activation each time: its blocks run in a loop (a looped or recurrent-depth transformer), and one "
            "activation for each block does not describe it. Such models cannot be frozen."
        )
    return output


def run_until(
    model: HookedModel,
    inputs: Mapping[str, Any],
    hooks: Sequence[FwdHook],
    last: str | None,
    points: Mapping[str, Any] | None = None,
) -> Any:
    """Run the model up to a hook point, with the hooks there, and return None; None for `last` runs the whole model.

    >>> from tensorlens_tl.hooks import run_until
    >>> show = ("hook_embed", lambda activation, hook: print(activation.shape))
    >>> run_until(model, frozen.inputs, [show], "blocks.0.hook_resid_pre")
    torch.Size([1, 7, 128])
    """
    if last is not None:
        hooks = [*hooks, (last, in_this_thread(_stop))]
    with suppress(_ReachedError):
        return run(model, inputs, hooks, points)
    return None


def capture(
    model: HookedModel,
    inputs: Mapping[str, Any],
    names: Sequence[str],
    *,
    store: str = "model",
    hooks: Sequence[FwdHook] = (),
    last: str | None = None,
    optional: Collection[str] = (),
    calls: Mapping[str, CallPoint] | None = None,
    changed: bool = False,
) -> tuple[dict[str, Tensor], Any]:
    """Run the model once and return the activations at `names`, by name, and the output.

    Args:
        store: ``"model"`` stores them on the input's device, ``"cpu"`` in the CPU's memory.
        model, inputs, names, hooks, last, optional, calls, changed: see `observe`, also for errors.

    >>> from tensorlens_tl.hooks import capture
    >>> activations, logits = capture(model, frozen.inputs, ["blocks.0.hook_resid_pre"])
    >>> activations["blocks.0.hook_resid_pre"].shape, logits.shape
    (torch.Size([1, 7, 128]), torch.Size([1, 7, 2048]))
    """
    activations: dict[str, Tensor] = {}
    options: dict[str, Any] = {"hooks": hooks, "last": last, "optional": optional, "calls": calls, "changed": changed}
    device = _device_of(inputs)

    def see(name: str, activation: Tensor) -> None:
        keep_in(activations, store, name, activation.to(device))

    output = observe(model, inputs, names, see, **options)
    if isinstance(output, Tensor):
        output = output.to(device)
    return activations, output


def _device_of(inputs: Mapping[str, Any]) -> torch.device | None:
    """Return the device of the input; results are put there even if the blocks run on several devices."""
    return next((value.device for value in inputs.values() if isinstance(value, Tensor)), None)


def graph_of(
    model: HookedModel, inputs: Mapping[str, Any], names: Sequence[str], hooks: Sequence[FwdHook]
) -> list[Tensor]:
    """Run the model once and return its activations at `names` with their autograd graph, in that order.

    Args:
        model, inputs: as in `observe`.
        names: hook points; one that fires several times gives its last activation.
        hooks: further hooks of the run, called first.

    Raises:
        UnsupportedModelError: a hook point did not fire.

    >>> from tensorlens_tl.hooks import graph_of
    >>> (stream,) = graph_of(model, frozen.inputs, ["blocks.0.hook_resid_pre"], [])
    >>> stream.requires_grad
    True
    """
    activations: dict[str, Tensor] = {}

    def store(name: str, tensor: Tensor, *, hook: Any) -> None:
        activations[name] = tensor

    run(model, inputs, [*hooks, *((name, in_this_thread(partial(store, name))) for name in names)])
    if silent := [name for name in names if name not in activations]:
        raise UnsupportedModelError(f"the hook point {silent[0]!r} did not fire in a run of {type(model).__name__}.")
    device = _device_of(inputs)
    return [activations[name].to(device) for name in names]


def keep_in(activations: dict[str, Tensor], store: str, name: str, activation: Tensor) -> None:
    """Store an activation by name, in the CPU's memory if `store` is ``"cpu"``."""
    activations[name] = activation.cpu() if store == "cpu" else activation


def _reference(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that returns the tensor: a small one itself, others only while they are alive elsewhere."""
    if tensor.shape[-1] > 1:
        return weakref.ref(tensor)
    detached = tensor.detach()
    return lambda: detached


def _same(before: Tensor | None, tensor: Tensor) -> bool:
    """Return whether a point that fires again shows the same tensor as before.

    A Bridge in compatibility mode calls a hook once for each name of its point; a HookedTransformer computes a norm's
    scale separately for queries, keys and values.
    """
    if before is None or before is tensor or before.shape != tensor.shape or tensor.shape[-1] != 1:
        return before is tensor
    return bool(torch.allclose(before, tensor, rtol=0, atol=0, equal_nan=True))  # a NaN is reported elsewhere


_EAGER = (
    " Fused attention computes no pattern: load the Hugging Face model with attn_implementation='eager', as "
    "TransformerBridge.boot_transformers(name) does."
)


class _ReachedError(Exception):
    """Ends a forward pass early; never leaves this module."""


def _stop(tensor: Tensor, *, hook: Any) -> None:
    raise _ReachedError


def states_and_logits(
    model: HookedModel,
    inputs: Mapping[str, Any],
    unembed_in: str,
    positions: Int[Tensor, "batch query"],
    hooks: Sequence[FwdHook] = (),
) -> tuple[Tensor, Any]:
    """Return the stream that is unembedded, `[batch, pos, d_model]`, and the logits at some positions, from one run.

    `hooks` are further hooks of the run. Logits that are not a tensor `[batch, pos, d_vocab]` are returned unchanged.
    """
    some = SomeLogits(model, unembed_in, positions)
    activations, logits = capture(model, inputs, [unembed_in], hooks=[*hooks, *some.hooks])
    return activations[unembed_in], some.of(logits)


class SomeLogits:
    """The logits of one run at `positions` `[batch, query]` only; the others can cost as much as several blocks.

    All logits are computed if the model has user hooks, or a custom class computes logits: such code may count
    positions. `hooks` must be on the model during the run whose output `of` reads.
    """

    def __init__(self, model: HookedModel, unembed_in: str | None, positions: Int[Tensor, "batch query"]) -> None:
        self.positions = positions
        self.hooks: list[FwdHook] = []
        self._alone = False
        if unembed_in is not None and unembeds_by_libraries(model) and not other_hooks(model):
            self.hooks = [(unembed_in, in_this_thread(self._take))]

    def _take(self, tensor: Tensor, *, hook: Any) -> Tensor:
        """Keep only the positions of the stream; a classifier's head selects one position itself."""
        if tensor.ndim != 3 or tensor.shape[1] <= self.positions.shape[1]:
            return tensor
        self._alone = True
        return torch.take_along_dim(tensor, self.positions[..., None].to(tensor.device), dim=1)

    def of(self, logits: Any) -> Any:
        """Return the logits at the positions, given the run's output; anything but a tensor is returned unchanged."""
        if self._alone and isinstance(logits, Tensor) and logits.ndim == 3:
            return logits
        return logits_at(logits, self.positions)


def logits_at(logits: Any, positions: Int[Tensor, "batch query"]) -> Any:
    """Return a run's logits at some positions; a classifier's `[batch, class]` count as one position."""
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return logits[:, None].expand(-1, positions.shape[1], -1)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] == positions.shape[1] == 1:
        return logits
    return torch.take_along_dim(logits, positions[..., None].to(logits.device), dim=1)


def from_cache(cache: Any, names: Sequence[str], batch: int, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Copy the activations at `names` from a cache; `lengths` gives the number of positions of some of them.

    Raises `InvalidInputError` if the cache lacks a name, or has another batch or length.
    """
    if not hasattr(cache, "keys"):
        raise InvalidInputError(f"cache: pass the cache of model.run_with_cache, not a {type(cache).__name__}.")
    missing = [name for name in names if name not in cache]
    if missing:
        raise InvalidInputError(
            f"cache: {len(missing)} of {len(names)} activations are missing, first {missing[0]!r}. Cache them all, "
            "without a names_filter and without removing the batch axis, or leave `cache` out."
        )
    activations = {name: cache[name].detach().clone() for name in names}  # its owner may write to it
    first = next(iter(activations.values()))
    if first.ndim == 2:
        raise InvalidInputError("cache has no batch axis; create it without remove_batch_dim=True.")
    for name, pos in lengths.items():
        if tuple(activations[name].shape[:2]) != (batch, pos):
            raise InvalidInputError(
                f"cache: {name} is {tuple(activations[name].shape)}, but the input has batch {batch} and {pos} tokens. "
                "Pass the input that the cache was computed from."
            )
    return activations


def check_finite(activations: Mapping[str, Tensor], writers: Mapping[str, str] | None = None) -> None:
    """Raise `NumericalError` for the first activation with a NaN or Inf, in the order of the forward pass.

    `writers` gives, for some points, the block that wrote the activation.
    """
    for name, tensor in activations.items():
        # the sum is finite unless an entry is not or the sum itself overflows; only then check every entry
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            what = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
            writer = (writers or {}).get(name)
            place = f"{name}, in what {writer} wrote" if writer else name
            where = f"of {writer}" if writer else "before that point"
            raise NumericalError(
                f"{what} at {place}: the first activation of this pass that is not finite. Check the weights "
                f"{where}, or run in a wider dtype (bfloat16 and float16 overflow)."
            )
