"""The numbers that secants are made of: quotients of differences that stay exact where two values are close."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def logarithmic_mean(log_a: Float[Tensor, "*any"], log_b: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """(a − b) / (ln a − ln b) of positive numbers that are given by their logarithms, a where both are the same.

    Nothing underflows before the result does, and close numbers lose no digits: it is computed as
    ``max · (1 − exp(−δ))/δ`` with δ = abs(ln a − ln b). Zero where either number is.

    >>> from tensorlens_tl.algebra.secants import logarithmic_mean
    >>> a, b = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 3.0])
    >>> logarithmic_mean(a.log(), b.log())
    tensor([1.4427, 3.0000])
    """
    larger = torch.maximum(log_a, log_b)
    distance = (log_a - log_b).abs()
    share = torch.where(distance == 0, 1.0, -torch.expm1(-distance) / distance)
    return torch.where(torch.minimum(log_a, log_b) == -torch.inf, 0.0, larger.exp() * share)


def slope(phi: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """(φ(a) − φ(b)) / (a − b) elementwise, and φ' at the midpoint where a and b are too close to divide by.

    They are where their distance is below ε^⅓ of their size, and the derivative reproduces φ(a) − φ(b) to rounding: at
    a kink, which lies between two close numbers, it does not, and the quotient is taken.

    Args:
        phi: the function, elementwise.
        derivative: its derivative, elementwise.
        a, b: the two inputs.

    >>> from tensorlens_tl.algebra.secants import slope
    >>> slope(torch.square, lambda z: 2 * z, torch.tensor([3.0, 2.0]), torch.tensor([1.0, 2.0]))
    tensor([4., 4.])
    """
    epsilon = torch.finfo(a.dtype).eps
    values = phi(a)
    distance = a - b
    change = values - phi(b)
    at_midpoint = derivative((a + b) / 2)
    size = torch.maximum(a.abs(), b.abs())
    close = distance.abs() <= epsilon ** (1 / 3) * size.clamp_min(1)
    smooth = (change - at_midpoint * distance).abs() <= 16 * epsilon * (size + values.abs())
    uses_derivative = (close & smooth) | (distance == 0)
    return torch.where(uses_derivative, at_midpoint, change / torch.where(uses_derivative, 1.0, distance))
