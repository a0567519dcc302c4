"""One forward pass, and what it leaves behind."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks.calls import seen_calls
from tensorlens_tl.hooks.inspection import other_hooks, unembeds_by_libraries
from tensorlens_tl.hooks.loops import numbered
from tensorlens_tl.hooks.points import CallPoint
from tensorlens_tl.hooks.running import FwdHook, hook_points, in_this_thread, run
from tensorlens_tl.models import HookedModel


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
        names: hook points to look at.
        see: called with a name and its activation, detached, once for each name.
        hooks: further hooks of the run; what they change is seen after them, at their own point only if `changed`.
        last: a hook point to end the run at; there is no output then.
        optional: names that are left out where they do not fire; any other is refused.
        calls: names that are no hook points, and where their tensors are seen.

    Returns:
        The model's output, or None where the run ended before it. Hooks are gone afterwards, also on an exception.

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
    called = {name for name, point in points.items() if id(point) in wanted}  # every name of a wanted point
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

    # one filter instead of a hook for each name: a Bridge lists all its hook points again for every name
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
    """`run` up to a hook point, after the hooks there; then there is no output. None runs the whole model.

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
    """Run the model once and store the activations at `names`.

    Args:
        store: ``"model"`` puts what is returned on the device of the input, ``"cpu"`` moves activations off it.
        model, inputs, names, hooks, last, optional, calls, changed: see `observe`, also for errors.

    Returns:
        The activations by name, and the model's output (None where the run ended before it).

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
    """Where a model is given its input; of a model whose blocks run on several devices, results are put there."""
    return next((value.device for value in inputs.values() if isinstance(value, Tensor)), None)


def graph_of(
    model: HookedModel, inputs: Mapping[str, Any], names: Sequence[str], hooks: Sequence[FwdHook]
) -> list[Tensor]:
    """Run the model once and hand out its activations at `names` with their autograd graph, as hooks left them.

    Args:
        model, inputs: as for `observe`.
        names: hook points; of one that fires several times, the last activation.
        hooks: further hooks of the run, called first.

    Returns:
        The activations, in the order of the names, on the device of the input.

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
    """Store an activation by its name, on the CPU where `store` is ``"cpu"``."""
    activations[name] = activation.cpu() if store == "cpu" else activation


def _reference(tensor: Tensor) -> Callable[[], Tensor | None]:
    """What gives a tensor again: a small one itself, others only while they live elsewhere."""
    if tensor.shape[-1] > 1:
        return weakref.ref(tensor)
    detached = tensor.detach()
    return lambda: detached


def _same(before: Tensor | None, tensor: Tensor) -> bool:
    """Whether a point that fires again shows what it showed before.

    A Bridge in compatibility mode calls a hook once for each of its point's names, with the same tensor; a
    HookedTransformer computes a norm's scale for queries, keys and values each.
    """
    if before is None or before is tensor or before.shape != tensor.shape or tensor.shape[-1] != 1:
        return before is tensor
    return bool(torch.allclose(before, tensor, rtol=0, atol=0, equal_nan=True))  # a NaN is reported elsewhere


_EAGER = (
    " Fused attention makes no pattern: load the Hugging Face model with attn_implementation='eager', as "
    "TransformerBridge.boot_transformers(name) does by itself."
)


class _ReachedError(Exception):
    """Ends a forward pass early; never leaves this module."""


def _stop(tensor: Tensor, *, hook: Any) -> None:
    raise _ReachedError


def states_and_logits(
    model: HookedModel, inputs: Mapping[str, Any], unembed_in: str, positions: Int[Tensor, "batch query"]
) -> tuple[Tensor, Any]:
    """One run: the stream that is unembedded, `[batch, pos, d_model]`, and the logits at some positions.

    Logits that are no tensor `[batch, pos, d_vocab]` are handed back as they are.
    """
    some = SomeLogits(model, unembed_in, positions)
    activations, logits = capture(model, inputs, [unembed_in], hooks=some.hooks)
    return activations[unembed_in], some.of(logits)


class SomeLogits:
    """The logits of one run at some positions, without those of the others, which can cost as much as several blocks.

    With anybody's hooks on the model, or a custom class where logits are computed, all of them are computed: such code
    may count positions.

    Attributes:
        positions: as the model's logits count them, `[batch, query]`.
        hooks: to run the model with, before `of` reads what it gave.
    """

    def __init__(self, model: HookedModel, unembed_in: str | None, positions: Int[Tensor, "batch query"]) -> None:
        self.positions = positions
        self.hooks: list[FwdHook] = []
        self._alone = False
        if unembed_in is not None and unembeds_by_libraries(model) and not other_hooks(model):
            self.hooks = [(unembed_in, in_this_thread(self._take))]

    def _take(self, tensor: Tensor, *, hook: Any) -> Tensor:
        """The stream at the positions alone; a classifier's head takes one position out by itself."""
        if tensor.ndim != 3 or tensor.shape[1] <= self.positions.shape[1]:
            return tensor
        self._alone = True
        return torch.take_along_dim(tensor, self.positions[..., None].to(tensor.device), dim=1)

    def of(self, logits: Any) -> Any:
        """The logits at the positions, of what the run gave; what is no tensor of logits as it is."""
        if self._alone and isinstance(logits, Tensor) and logits.ndim == 3:
            return logits
        return logits_at(logits, self.positions)


def logits_at(logits: Any, positions: Int[Tensor, "batch query"]) -> Any:
    """The logits at some positions, of a run that gave all of them.

    A classifier's `[batch, class]` are one position's, whichever that is.
    """
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return logits[:, None].expand(-1, positions.shape[1], -1)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] == positions.shape[1] == 1:
        return logits
    return torch.take_along_dim(logits, positions[..., None].to(logits.device), dim=1)


def from_cache(cache: Any, names: Sequence[str], batch: int, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    """Copies of the activations at `names` of an existing cache; `lengths` says how many positions some of them have.

    Raises:
        InvalidInputError: the cache lacks a name, or was made for another batch or length.
    """
    missing = [name for name in names if name not in cache]
    if missing:
        raise InvalidInputError(
            f"cache: {len(missing)} of {len(names)} activations are missing, first {missing[0]!r}. Cache them all, "
            "without a names_filter and without removing the batch axis, or leave `cache` out."
        )
    activations = {name: cache[name].detach().clone() for name in names}  # its owner may write to it
    first = next(iter(activations.values()))
    if first.ndim == 2:
        raise InvalidInputError("cache: it has no batch axis; make it without remove_batch_dim=True.")
    for name, pos in lengths.items():
        if tuple(activations[name].shape[:2]) != (batch, pos):
            raise InvalidInputError(
                f"cache: {name} is {tuple(activations[name].shape)}, but the input has batch {batch} and {pos} tokens. "
                "Pass the same input that made the cache."
            )
    return activations


def check_finite(activations: Mapping[str, Tensor]) -> None:
    """Raise `NumericalError` for the first activation with a NaN or Inf, in the order of the forward pass."""
    for name, tensor in activations.items():
        # a sum shows most of what is not finite in one pass; only one that may have overflowed needs every number
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            what = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
            raise NumericalError(
                f"{what} at {name}: the first activation of this pass that is not finite. Check the weights before "
                "that point, or run in a wider dtype (bfloat16 and float16 overflow)."
            )
