"""One forward pass, and what it leaves behind."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.models.protocol import HookedModel


def capture(
    model: HookedModel,
    inputs: Mapping[str, Any],
    names: Sequence[str],
    *,
    store: str = "model",
    hooks: Sequence[tuple[str, Callable[..., Any]]] = (),
    last: str | None = None,
    optional: bool = False,
) -> tuple[dict[str, Tensor], Any]:
    """Run the model once and keep the activations at `names`.

    Args:
        model: any TransformerLens model.
        inputs: keyword arguments of its forward.
        names: hook points to keep.
        store: ``"model"`` leaves activations where they are computed, ``"cpu"`` keeps them off the device.
        hooks: further hooks of the run; what they change is captured after them, except at their own point.
        last: a hook point to end the run at; there is no output then.
        optional: whether a hook point that does not fire is left out instead of refused.

    Returns:
        The activations by name, and the model's output (None where the run ended before it). Hooks are gone
        afterwards, also on an exception.

    Raises:
        UnsupportedModelError: a hook point did not fire.
    """
    kept: dict[str, Tensor] = {}
    points = dict(model.hook_dict)
    wanted: dict[int, list[str]] = {}
    for name in names:
        wanted.setdefault(id(points[name]), []).append(name)
    called = {name for name, point in points.items() if id(point) in wanted}  # every name of a wanted point

    def keep(tensor: Tensor, *, hook: Any) -> None:
        for name in wanted[id(hook)]:
            kept[name] = tensor.detach().cpu() if store == "cpu" else tensor.detach()

    # one filter instead of a hook for each name: a Bridge lists all its hook points again for every name
    ends = [] if last is None else [(last, _stop)]
    output = None
    with torch.no_grad(), suppress(_ReachedError):
        output = model.run_with_hooks(**inputs, fwd_hooks=[(called.__contains__, keep), *hooks, *ends])
    silent = [name for name in names if name not in kept]
    if silent and not optional:
        raise UnsupportedModelError(
            f"the hook point {silent[0]!r} exists but did not fire in a forward pass of this {type(model).__name__}; "
            f"a frozen pass needs it.{_EAGER * silent[0].endswith('hook_pattern')}"
        )
    return kept, output


_EAGER = (
    " Fused attention makes no pattern: load the Hugging Face model with attn_implementation='eager', as "
    "TransformerBridge.boot_transformers(name) does by itself."
)


class _ReachedError(Exception):
    """Ends a forward pass early; never leaves this module."""


def _stop(tensor: Tensor, *, hook: Any) -> None:
    raise _ReachedError


def only_at(name: str, positions: Int[Tensor, "batch 1"]) -> tuple[str, Callable[..., Tensor]]:
    """A hook that lets one position per prompt through: logits of all tokens can cost as much as several blocks."""

    def hook(tensor: Tensor, *, hook: Any) -> Tensor:
        if tensor.shape[1] == 1:
            return tensor
        return torch.take_along_dim(tensor, positions[..., None].to(tensor.device), dim=1)

    return name, hook


def from_cache(cache: Any, names: Sequence[str], batch: int, pos: int) -> dict[str, Tensor]:
    """The activations at `names` out of an existing cache.

    Raises:
        InvalidInputError: the cache lacks a name, or was made for another batch or length.
    """
    missing = [name for name in names if name not in cache]
    if missing:
        raise InvalidInputError(
            f"cache: {len(missing)} of {len(names)} activations are missing, first {missing[0]!r}. Cache them all, "
            "without a names_filter and without removing the batch axis, or leave `cache` out."
        )
    kept = {name: cache[name].detach() for name in names}
    first = next(iter(kept.values()))
    if first.ndim == 2:
        raise InvalidInputError("cache: it has no batch axis; make it without remove_batch_dim=True.")
    if tuple(first.shape[:2]) != (batch, pos):
        raise InvalidInputError(
            f"cache: {names[0]} is {tuple(first.shape)}, but the input has batch {batch} and {pos} tokens. "
            "Pass the same input that made the cache."
        )
    return kept


def check_finite(kept: Mapping[str, Tensor]) -> None:
    """Raise `NumericalError` for the first activation with a NaN or Inf, in the order of the forward pass."""
    for name, tensor in kept.items():
        # a sum shows most of what is not finite in one pass; only a sum that may have overflowed is looked at closely
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            what = "NaN" if bool(torch.isnan(tensor).any()) else "Inf"
            raise NumericalError(
                f"{what} at {name}: the first activation of this pass that is not finite. Check the weights before "
                "that point, or run in a wider dtype (bfloat16 and float16 overflow)."
            )
