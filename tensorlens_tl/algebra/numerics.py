"""Precision and error measures shared by the whole library."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, NumericalError

Given = TypeVar("Given")
Result = TypeVar("Result")


def upcast(x: Tensor) -> Tensor:
    """Convert half precision to float32, in which sums of products neither overflow nor lose their digits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def widest(x: Tensor) -> Tensor:
    """Convert to float64, for sums whose terms cancel; as `upcast` on Apple's GPUs, which have no float64."""
    return upcast(x) if x.device.type == "mps" else x.double()


def plus(x: Float[Tensor, "*any d"], offset: Tensor | None) -> Float[Tensor, "*both d"]:
    """Return ``x + offset``; None stands for zero."""
    return x if offset is None else x + offset


def times(x: Float[Tensor, "*any d"], factor: Tensor | None) -> Float[Tensor, "*both d"]:
    """Return ``x * factor``; None stands for 1."""
    return x if factor is None else x * factor


def maybe(function: Callable[[Given], Result], value: Given | None) -> Result | None:
    """Return ``function(value)``, or None if the value is None, such as an optional bias."""
    return None if value is None else function(value)


def centred(x: Float[Tensor, "*any d"], subtract: bool = True) -> Float[Tensor, "*any d"]:
    """Subtract the mean of each vector, as LayerNorm does; unchanged unless `subtract` (RMSNorm)."""
    return x - x.mean(-1, keepdim=True) if subtract else x


def product(a: Float[Tensor, "*any m k"], b: Float[Tensor, "*other k n"]) -> Float[Tensor, "*both m n"]:
    """Return a·b in the wider dtype of the two (a merged adapter may be wider than a half-precision model)."""
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.to(wide) @ b.to(wide)


def refuse_nan(what: str, *numbers: Tensor | float) -> None:
    """Raise `NumericalError` if a number is NaN.

    Args:
        what: what the numbers are, for the message.
        numbers: tensors of any shape.
    """
    if not any(bool(torch.as_tensor(each).isnan().any()) for each in numbers):
        return
    raise NumericalError(
        f"{what}: NaN. Look for weights that are not finite, "
        "[name for name, weight in model.named_parameters() if not weight.isfinite().all()]; if there are none, use "
        "float32 or float64."
    )


def relative_error(
    ours: Float[Tensor, "*any d"],
    expected: Float[Tensor, "*any d"],
    mask: Bool[Tensor, "..."] | None = None,
    summands: Iterable[Float[Tensor, "*any d"]] = (),
) -> float:
    """Return ‖ours − expected‖ / ‖expected‖ of the worst vector: infinite if shapes differ, NaN if a value is NaN.

    Args:
        ours: vectors that should equal `expected`.
        expected: the reference.
        mask: True at the vectors to compare, one entry for each; None compares all.
        summands: summands of `expected`, which may cancel: the error of a sum is relative to its largest summand.
    """
    if ours.shape != expected.shape:
        return float("inf")
    ours, expected = upcast(ours), upcast(expected)  # float16 would overflow in a norm, and anything over ∞ is 0
    sizes = expected.norm(dim=-1).clamp_min(torch.finfo(expected.dtype).tiny)
    for summand in summands:
        sizes = torch.maximum(sizes, upcast(summand).to(sizes).norm(dim=-1))
    errors = (ours - expected).norm(dim=-1) / sizes
    if mask is not None:
        errors = errors[mask]
    return float(errors.max()) if errors.numel() else 0.0


def relative_gap(
    scores: Float[Tensor, "*any key"], bias: Float[Tensor, "*any"], total: Float[Tensor, "*any"]
) -> Float[Tensor, "*any"]:
    """Return abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)), the relative error of an additive claim."""
    return (scores.sum(-1) + bias - total).abs() / size_of_sum(scores, bias)


def size_of_sum(scores: Float[Tensor, "*any key"], bias: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return Σ abs(scores) + abs(bias), the denominator of a relative gap; never zero."""
    size = scores.abs().sum(-1) + bias.abs()
    return size.clamp_min(torch.finfo(size.dtype).tiny)


def refuse_autocast(device: torch.device) -> None:
    """Raise an error inside ``torch.autocast``, which rounds some products and not others.

    There, a pass would differ from the model's runs outside, and maps from the ones that were verified.

    Raises:
        InvalidInputError: autocast is on for this kind of device, in this thread.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return
    raise InvalidInputError(
        f"torch.autocast({kind!r}) is on, which rounds products to {torch.get_autocast_dtype(kind)}. Leave its `with` "
        f"block, or put `with torch.autocast({kind!r}, enabled=False):` around this call; to explain a model in half "
        "precision, cast it (model.to(torch.bfloat16))."
    )
