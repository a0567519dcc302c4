"""The secant of an MLP: Δφ = slope·Δz, and Δ(φ(g)·ψ(u)) = mean φ(g)·Δψ + mean ψ(u)·Δφ of a gated one."""

from functools import partial
from itertools import starmap

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, Sum
from tensorlens_tl.algebra.numerics import plus
from tensorlens_tl.algebra.secants import Offset, bias_name, linear_secant, scale_response, slope
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import Activation, derivative
from tensorlens_tl.models.parameters import MLPWeights

Pair = tuple[Float[Tensor, "batch pos d"], Float[Tensor, "batch pos d"]]
"""A value in either run."""


def mlp_secant(a: MLPWeights, b: MLPWeights, x: Pair, layer: int) -> Chain:
    """The secant of an MLP, plain or gated.

    Args:
        a, b: its weights in either run.
        x: what it read in either.
        layer: its block's number, for the names of what differs between two models.

    Raises:
        UnsupportedModelError: the two are of different forms.
    """
    if _form(a) != _form(b):
        raise UnsupportedModelError(f"difference: the MLPs of blocks.{layer} are of two forms.")
    name = partial("L{}.{}".format, layer)
    ins = (Linear(a.W_in, a.b_in), Linear(b.W_in, b.b_in))
    linear = Chain(linear_secant(*ins, *x, name("W_in")))
    u = _both(ins, x)
    if a.W_gate is None or b.W_gate is None:
        hidden, post = _through(a.activation, linear, u)
    else:
        gates = (Linear(a.W_gate, a.b_gate), Linear(b.W_gate, b.b_gate))
        gate = Chain(linear_secant(*gates, *x, name("W_gate")))
        hidden, post = _gated(_through(a.activation, gate, _both(gates, x)), _through(a.linear_activation, linear, u))
    stages: list[AffineMap] = [hidden]
    if a.b_post is not None and b.b_post is not None:
        if not torch.equal(a.b_post, b.b_post):
            stages.append(Offset((a.b_post - b.b_post)[None, None], bias_name(name("W_in"))))
        post = (plus(post[0], a.b_post), plus(post[1], b.b_post))
    if a.post_factor is not None and b.post_factor is not None:
        scales = (1 / a.post_factor(post[0]), 1 / b.post_factor(post[1]))
        held = Diagonal((1 / scales[0] + 1 / scales[1]) / 2)
        stages.append(Sum((held, scale_response(*post, *scales))))
        post = (post[0] / scales[0], post[1] / scales[1])
    outs = (Linear(a.W_out, a.b_out), Linear(b.W_out, b.b_out))
    return Chain((*stages, *linear_secant(*outs, *post, name("W_out"))))


def _form(weights: MLPWeights) -> tuple[bool, ...]:
    return weights.W_gate is None, weights.b_post is None, weights.post_factor is None


def _both(linears: tuple[Linear, Linear], x: Pair) -> Pair:
    a, b = starmap(Linear.__call__, zip(linears, x, strict=True))
    return a, b


def _through(phi: Activation | None, read: AffineMap, z: Pair) -> tuple[Chain, Pair]:
    """The secant of an activation after what reads its argument, and its values; None is the identity."""
    if phi is None:
        return Chain((read,)), z
    slopes = slope(phi, partial(derivative, phi), *z)
    return Chain((read, Diagonal(slopes))), (phi(z[0]), phi(z[1]))


def _gated(gate: tuple[Chain, Pair], linear: tuple[Chain, Pair]) -> tuple[Sum, Pair]:
    """The secant of a product, each factor's change times the mean of the other."""
    (by_gate, of_gate), (by_linear, of_linear) = gate, linear
    mean_gate = Diagonal((of_gate[0] + of_gate[1]) / 2)
    mean_linear = Diagonal((of_linear[0] + of_linear[1]) / 2)
    both = Sum((Chain((*by_linear.stages, mean_gate)), Chain((*by_gate.stages, mean_linear))))
    return both, (of_gate[0] * of_linear[0], of_gate[1] * of_linear[1])
