"""Difference quotients that stay accurate when two values are close."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def logarithmic_mean(log_a: Float[Tensor, "*any"], log_b: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return (a − b) / (ln a − ln b) of positive numbers given by their logarithms; a if both are equal, 0 if one is 0.

    Nothing underflows before the result does, and close numbers lose no digits: it is computed as
    ``max · (1 − exp(−δ))/δ`` with δ = abs(ln a − ln b).

    >>> from tensorlens_tl.algebra.secants import logarithmic_mean
    >>> a, b = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 3.0])
    >>> logarithmic_mean(a.log(), b.log())
    tensor([1.4427, 3.0000])
    """
    return mean_share(log_a, log_b).mul_(torch.maximum(log_a, log_b).exp_())


def mean_share(log_a: Float[Tensor, "*any"], log_b: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return the logarithmic mean as a share of the larger number; 1 if both are equal, or both zero.

    >>> from tensorlens_tl.algebra.secants.numbers import mean_share
    >>> mean_share(torch.tensor([2.0]).log(), torch.tensor([1.0]).log())
    tensor([0.7213])
    """
    distance = (log_a - log_b).abs_().neg_()
    return torch.expm1(distance).div_(distance).nan_to_num_(nan=1.0)  # (e^x − 1)/x, at 0 too


def slope(
    derivative: Callable[[Tensor], Tensor], inputs: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]
) -> Tensor:
    """Return (φ(a) − φ(b)) / (a − b) elementwise, or φ' at the midpoint if a and b are too close to divide by a − b.

    They are too close if their distance is below ε^⅓ of their size and the derivative reproduces φ(a) − φ(b) to
    rounding; at a kink between two close numbers it does not, and the quotient is used.

    Args:
        derivative: φ', elementwise; only evaluated at close numbers.
        inputs: a and b.
        values: φ(a) and φ(b).

    >>> from tensorlens_tl.algebra.secants import slope
    >>> inputs = (torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0]))
    >>> slope(lambda z: 2 * z, inputs, tuple(map(torch.square, inputs)))
    tensor([4., 4.])
    """
    a, b = inputs
    distance = a - b
    change = values[0] - values[1]
    share = torch.finfo(a.dtype).eps ** (1 / 3)
    around = a.abs().clamp_min_(1).mul_(2 * share)  # contains every close number
    close = (distance.abs() <= around).flatten().nonzero()[:, 0]
    near = [tensor.flatten().index_select(0, close) for tensor in (a, b, values[0], distance, change)]
    quotients = change.div_(distance).flatten()
    if len(close):
        quotients.index_copy_(0, close, _slope_of_close(derivative, *near))
    return quotients.view_as(distance)


def _slope_of_close(
    derivative: Callable[[Tensor], Tensor],
    a: Float[Tensor, "number"],
    b: Float[Tensor, "number"],
    value: Float[Tensor, "number"],
    distance: Float[Tensor, "number"],
    change: Float[Tensor, "number"],
) -> Float[Tensor, "number"]:
    """Return the derivative, or the quotient where the derivative does not reproduce the change."""
    epsilon = torch.finfo(a.dtype).eps
    at_midpoint = derivative((a + b) / 2)
    size = torch.maximum(a.abs(), b.abs())
    close = distance.abs() <= epsilon ** (1 / 3) * size.clamp_min(1)
    smooth = (change - at_midpoint * distance).abs() <= 16 * epsilon * (size + value.abs())
    return torch.where((close & smooth) | (distance == 0), at_midpoint, change / distance)
