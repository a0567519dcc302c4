"""Rules: which linear function stands for an operation that is not linear, when a run is made a linear map.

A run computes what it computes. A rule only changes gradients, so that autograd gives the adjoint of the whole map.
Most operations of a transformer are linear already (views, sums, products with weights), and no rule is asked. The
others are of six kinds, and a `Rule` has a function for each. It is given the operation `f` and the live inputs (those
that depend on the sources of the map), and returns f's value with the gradient that the rule gives it.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from tensorlens_tl._arguments import nearest
from tensorlens_tl.algebra.secants import logarithmic_mean, slope
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import FrozenRule

Operation = Callable[..., Tensor]


SAME_VALUE = (
    "A rule says what gradients an operation passes on, and returns the operation's own value: stands(f(x), …) does."
)
"""What to do where a model under a rule gives another number."""


def unchanged(f: Operation, *inputs: Any) -> Tensor:
    """The operation with its own gradient."""
    return f(*inputs)


def held(f: Operation, *inputs: Any) -> Tensor:
    """The operation's value, fixed."""
    return f(*inputs).detach()


@dataclass(frozen=True)
class Rule:
    """What stands for each kind of operation; by default the model's own gradient, with scales and gates held.

    Attributes:
        matmul: a matrix product of two live values: scores, and patterns times values.
        multiply: an elementwise product of two live values: an activation times what it gates.
        activation: φ(z) of each number, of what the model uses as its activation.
        function: any other function of each number: exponentials, soft caps.
        scale: what a norm divides by, or one over it, and sigmoids, which are gates.
        softmax: attention patterns, of scores and the dimension that they are normalised over.
        mean: a value that is fixed: itself, or of two runs their mean.
        runs: of how many runs the map is.
        head: the same for prediction heads that are read from their weights, as `rule` of an operator.
        needs: names of `tensorlens_tl.requirements.REQUIREMENTS`: what it needs of a model.
        affine: whether it makes one run an affine map, whose scores and bias sum to the model's own number. What
            `core.families` names is then held, too, and a sum that misses is refused.
    """

    matmul: Operation = unchanged
    multiply: Operation = unchanged
    activation: Operation = unchanged
    function: Operation = unchanged
    scale: Operation = held
    softmax: Operation = unchanged
    mean: Operation = Tensor.detach
    runs: int = 1
    head: FrozenRule = "frozen-tangent"
    needs: tuple[str, ...] = ("attention_products",)
    affine: bool = False


# ------------------------------------------------------------------ one run


class Constant(torch.autograd.Function):
    """A value that does not depend on the sources of the map, times a number that is 1: its gradient is the bias."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, one: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(value)
        ctx.dtype = one.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:  # noqa: D102
        (value,) = ctx.saved_tensors
        finite = value.masked_fill(~value.isfinite(), 0)  # −∞ where a mask was added, memory that nothing has filled
        return None, (gradients[0].to(ctx.dtype) * finite).sum()


class Ones:
    """The leaf, 1, by which an affine rule multiplies every constant that is added, on each device of a run."""

    def __init__(self) -> None:
        self.leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
        self._on: dict[torch.device, Tensor] = {}

    def times(self, value: Tensor) -> Tensor:
        """The value, as a constant of the map."""
        at = value.device
        if at not in self._on:
            self._on[at] = self.leaf.to(at, torch.float32 if at.type == "mps" else torch.float64)
        return Constant.apply(value.detach(), self._on[at])


ONES: ContextVar[Ones | None] = ContextVar("ONES", default=None)
"""Those of the run of this thread, where its rule is affine."""


def constant(value: Tensor) -> Tensor:
    """What a rule adds that depends on no source: part of the bias, where the rule is affine."""
    ones = ONES.get()
    return value if ones is None else ones.times(value)


class Half(torch.autograd.Function):
    """A value of whose gradient half passes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # noqa: D102
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:  # noqa: D102
        return gradients[0] / 2


class Stands(torch.autograd.Function):
    """The value of one tensor with the gradient of another, which stands for it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, linear: Tensor, of_activation: bool = False) -> Tensor:  # noqa: D102
        ctx.of_activation = of_activation
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[None, Tensor, None]:  # noqa: D102
        return None, gradients[0], None


def stands(value: Tensor, linear: Tensor) -> Tensor:
    """The value of one tensor with the gradient of another, which stands for it."""
    return Stands.apply(value.detach(), linear)


def shared(f: Operation, x: Tensor, y: Tensor) -> Tensor:
    """A product of which each factor gets half."""
    return f(Half.apply(x), Half.apply(y))


def by_ratio(f: Operation, z: Tensor) -> Tensor:
    """φ(z) as (φ(z) − φ(0))/z · z + φ(0), with φ'(0) for the ratio at zero: φ(0) is a constant."""
    at = z.detach()
    out, offset = f(at), f(torch.zeros_like(at))
    ratio, is_zero = (out - offset) / at, at == 0
    if bool(is_zero.any()):
        ratio = torch.where(is_zero, derivative(f, at), ratio)
    linear = z * ratio
    return Stands.apply(out, linear + constant(offset) if bool(offset.any()) else linear, True)


def softened(f: Operation, scores: Tensor, dim: int) -> Tensor:
    """A softmax that is differentiated at twice its temperature, without the factor ½."""
    return weighted(f(scores.detach(), dim), scores, (scores.detach() / 2).softmax(dim), dim)


def weighted(pattern: Tensor, scores: Tensor, weights: Tensor, dim: int) -> Tensor:
    """A softmax that is differentiated with weights of its own: w·(s − Σ w·s / Σ w)."""
    given = weights * scores.masked_fill(weights == 0, 0.0)  # a masked score is −∞
    return stands(pattern, given - weights * (given.sum(dim, keepdim=True) / weights.sum(dim, keepdim=True)))


def derivative(f: Operation, z: Tensor) -> Tensor:
    """φ'(z) of each number."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(f(z).sum(), z)[0]


class Doubt(torch.autograd.Function):
    """A value that no gradient may pass, as nothing says what of it is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: str) -> Tensor:  # noqa: D102
        ctx.message = message
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        raise UnsupportedModelError(ctx.message)


def doubted(f: Operation, *inputs: Any) -> Tensor:
    """The operation, whose gradient is refused if the answer needs it."""
    return Doubt.apply(
        f(*inputs),
        f"{getattr(f, '__name__', 'an operation')} in {calling_module()}: the answer depends on it, and nothing says "
        "what of it is held: it is no activation, pattern or scale, and no factor of it is. Methods over the operator "
        "(tensorlens, cp-lrp) work.",
    )


def calling_module() -> str:
    """The class of the module whose code computes."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return "the model"


def gates_held(f: Operation, x: Tensor, y: Tensor) -> Tensor:
    """A product in which the activation is held; of other products it is in doubt what is."""
    of_x, of_y = is_activation(x), is_activation(y)
    if of_x is of_y:
        return doubted(f, x, y)
    return f(x.detach(), y) if of_x else f(x, y.detach())


def ratios_go_on(f: Operation, x: Tensor) -> Tensor:
    """A function of an activation is one, as relu(z)² is; of any other function it is in doubt what is held."""
    return by_ratio(f, x) if is_activation(x) else doubted(f, x)


def is_activation(x: Tensor) -> bool:
    """Whether a value is φ(z) as `by_ratio` gives it, perhaps viewed, cut, cast or scaled."""
    node: Any = x.grad_fn
    while node is not None and node.name().partition("Backward")[0] in ELEMENTWISE:
        live = [before for before, _ in node.next_functions if before is not None]
        if len(live) != 1:
            return False
        node = live[0]
    return getattr(node, "of_activation", False)


ELEMENTWISE = frozenset(
    (
        "View", "UnsafeView", "Reshape", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze",
        "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Index", "Alias", "Clone", "ToCopy", "Mul", "Div",
    )
)  # fmt: skip
"""What autograd calls operations after which a number is still that of an activation."""


TANGENT = Rule(scale=unchanged, needs=())
"""The model's own gradient."""

FROZEN = Rule(doubted, gates_held, by_ratio, function=ratios_go_on, softmax=held, head="frozen", needs=(), affine=True)
"""TensorLens: patterns, scales and gates are held, φ is φ(z)/z."""

RELP = Rule(multiply=shared, activation=by_ratio, head="frozen-split")
"""Jafari et al. 2025, attention live: gates are shared, φ is φ(z)/z, attention keeps its gradient."""

ATTNLRP = Rule(matmul=shared, multiply=shared, activation=by_ratio, head="frozen-split")
"""Achtibat et al. 2024: every product is shared between its factors, φ is φ(z)/z, softmax keeps its gradient."""

GIM = Rule(matmul=shared, softmax=softened, needs=("attention_products", "full_rows"))
"""Edin et al. 2025: products of attention are shared, softmax is softer on the way back, MLPs keep their gradient."""


# ------------------------------------------------------------------ two runs


def secant(pair: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Rule:
    """The exact difference of two runs: nothing is held.

    Args:
        pair: a value of this run, and what it is in the other one.
    """

    def mean(x: Tensor) -> Tensor:
        first, second = pair(x)
        return (first + second) / 2

    def by_means(f: Operation, x: Tensor, y: Tensor) -> Tensor:
        """Δ(xy) = Δx·ȳ + x̄·Δy."""
        return stands(f(x.detach(), y.detach()), f(x, mean(y)) + f(mean(x), y))

    def by_slope(f: Operation, z: Tensor) -> Tensor:
        """A function by its slope between the values of both runs."""
        out = f(z.detach())
        steep = slope(lambda middle: derivative(f, middle), pair(z), pair(out))
        steep.masked_fill_(steep.isnan(), 0)  # −∞ in both runs, where a mask was added
        return stands(out, z * steep)

    def by_logarithmic_mean(f: Operation, scores: Tensor, dim: int) -> Tensor:
        """A softmax by the logarithmic mean of both patterns."""
        first, second = (run.double().log_softmax(dim) for run in pair(scores))
        return weighted(f(scores.detach(), dim), scores, logarithmic_mean(first, second).to(scores), dim)

    return Rule(by_means, by_means, by_slope, by_slope, by_slope, by_logarithmic_mean, mean, runs=2)


# ------------------------------------------------------------------ by name


RULES: dict[str, Rule] = {"attnlrp": ATTNLRP, "frozen": FROZEN, "gim": GIM, "relp": RELP, "tangent": TANGENT}
"""Rules of one run by their names, those that users register among them."""


def rule_of(rule: Any) -> Rule:
    """A rule, or the rule of a name.

    Raises:
        InvalidInputError: neither.
    """
    if isinstance(rule, Rule) and rule.runs == 1:
        return rule
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]
    if rule == "secant" or isinstance(rule, Rule):
        raise InvalidInputError(
            f"rule={rule!r} is of two runs. Ask about tlens.difference(first, second): any question takes it."
        )
    names = ", ".join(map(repr, RULES))
    raise InvalidInputError(f"rule={rule!r}; use one of {names}, or a tlens.Rule.{nearest(rule, RULES)}")
