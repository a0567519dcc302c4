"""The secant of an MLP: Δφ = slope·Δz, and Δ(φ(g)·ψ(u)) = mean φ(g)·Δψ + mean ψ(u)·Δφ for a gated one."""

from functools import partial

from torch import Tensor

from tensorlens_tl.algebra import Linear
from tensorlens_tl.algebra.secants import Change, bias_name
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import Activation, derivative
from tensorlens_tl.models.parameters import Gate, MLPWeights
from tensorlens_tl.passes.two_runs.values import HiddenValues, known


def mlp_secant(a: MLPWeights, b: MLPWeights, read: Change, block: str) -> Change:
    """Return the output of an MLP, plain or gated; arguments and errors as in `hidden_secant`."""
    hidden = hidden_secant(a, b, read, block)
    return hidden.linear(Linear(a.W_out, a.b_out), Linear(b.W_out, b.b_out), f"{block}.W_out")


def hidden_secant(
    a: MLPWeights,
    b: MLPWeights,
    read: Change,
    block: str,
    held: tuple[HiddenValues | None, HiddenValues | None] = (None, None),
) -> Change:
    """Return an MLP's hidden vector, the input of its output matrix.

    Args:
        a, b: its weights in either run.
        read: its input.
        block: the prefix for the names of its matrices, for differences between two models.
        held: the inputs and outputs of its neurons in either run, if the passes store them; None computes them.

    Raises:
        UnsupportedModelError: the two have different forms.
    """
    if _form(a) != _form(b):
        raise UnsupportedModelError(f"difference: the MLPs of {block} have different forms.")
    name = partial("{}.{}".format, block)
    entries = (Linear(a.W_in, a.b_in), Linear(b.W_in, b.b_in))
    if a.W_gate is None or b.W_gate is None:
        hidden = read.linear(*entries, name("W_in"), _pair(held, "pre"))
        hidden = activated(hidden, a.activation, _pair(held, "activated"))
    else:
        gates = (Linear(a.W_gate, a.b_gate), Linear(b.W_gate, b.b_gate))
        gate = read.linear(*gates, name("W_gate"), _pair(held, "pre"))
        gate = activated(gate, a.activation, _pair(held, "activated"))
        hidden = read.linear(*entries, name("W_in"), _pair(held, "linear"))
        hidden = activated(hidden, a.linear_activation).times(gate)
    if a.b_post is not None and b.b_post is not None:
        hidden = hidden.plus(a.b_post, b.b_post, bias_name(name("W_in")))
    if a.post_factor is not None and b.post_factor is not None:
        hidden = hidden.over(a.post_factor.norm.scale_of(hidden.a), b.post_factor.norm.scale_of(hidden.b))
    return hidden


def _pair(held: tuple[HiddenValues | None, HiddenValues | None], name: str) -> tuple[Tensor, Tensor] | None:
    """Return one of the held values in both runs; None if a run does not hold it."""
    return known(*(getattr(of_run, name, None) for of_run in held))


def _form(weights: MLPWeights) -> tuple[bool, ...]:
    return weights.W_gate is None, weights.b_post is None, weights.post_factor is None


def activated(z: Change, phi: Activation | None, values: tuple[Tensor, Tensor] | None = None) -> Change:
    """Apply an activation, whose `values` may be known; None is the identity."""
    if phi is None:
        return z
    return z.elementwise(phi, partial(derivative, phi), values)


def gate_secant(a: Gate, b: Gate, read: Change, name: str) -> Change:
    """Return the output of a gate, whose channels each multiply one or several channels of a sublayer.

    Args:
        a, b: the gate in either run.
        read: the input of its sublayer.
        name: the name of its matrix.
    """
    return activated(read.linear(a.linear, b.linear, name), a.squash)
