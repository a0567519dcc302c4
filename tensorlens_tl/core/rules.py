"""Rules: linear substitutes for operations that are not linear, which turn a run into a linear map.

A rule does not change the values of a run, only its gradients, so that autograd gives the adjoint of the whole map.
Most operations of a transformer are linear already (views, sums, products with weights) and need no rule. The others
are of six kinds, and a `Rule` has a function for each. It takes the operation `f` and the live inputs (those that
depend on the sources of the map), and returns f's value with the gradient that the rule defines.
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
from tensorlens_tl.models import FrozenRule, derivative

Operation = Callable[..., Tensor]


SAME_VALUE = (
    "A rule only changes an operation's gradients and must return the operation's own value, as stands(f(x), …) does."
)
"""Advice for rules that change the model's output."""


def unchanged(f: Operation, *inputs: Any) -> Tensor:
    """Run the operation with its own gradient."""
    return f(*inputs)


def held(f: Operation, *inputs: Any) -> Tensor:
    """Run the operation without a gradient."""
    return f(*inputs).detach()


@dataclass(frozen=True)
class Rule:
    """A substitute for each kind of operation; by default the model's own gradient, with scales and gates held.

    Attributes:
        matmul: a matrix product of two live values: scores, and patterns times values.
        multiply: an elementwise product of two live values, such as an activation times a gate.
        activation: φ(z), elementwise, for the model's activation function.
        function: any other elementwise function: exponentials, soft caps.
        scale: the denominator of a norm, or its inverse, and sigmoids, which are gates.
        softmax: attention patterns, from scores and the dimension of normalisation.
        mean: a value that is held: itself, or the mean over two runs.
        runs: the number of runs that the map describes.
        head: the corresponding rule for prediction heads that are read from their weights, as an operator's `rule`.
        needs: names of `tensorlens_tl.requirements.REQUIREMENTS` that a model must meet.
        affine: whether one run becomes an affine map, whose scores and bias sum to the model's own logit. The factors
            named in `core.families` are then held too, and a sum that misses the logit raises an error.
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


class TimesOne(torch.autograd.Function):
    """A value that does not depend on the sources of the map, times a 1 whose gradient is the bias."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, one: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(value)
        ctx.dtype = one.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:  # noqa: D102
        (value,) = ctx.saved_tensors
        finite = value.masked_fill(~value.isfinite(), 0)  # −∞ from masks, or uninitialised memory
        return None, (gradients[0].to(ctx.dtype) * finite).sum()


class Ones:
    """The leaf, 1, by which an affine rule multiplies every added constant, on each device of a run."""

    def __init__(self) -> None:
        self.leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
        self._on: dict[torch.device, Tensor] = {}

    def times(self, value: Tensor) -> Tensor:
        """Return the value as a constant of the map."""
        at = value.device
        if at not in self._on:
            self._on[at] = self.leaf.to(at, torch.float32 if at.type == "mps" else torch.float64)
        return TimesOne.apply(value.detach(), self._on[at])


ONES: ContextVar[Ones | None] = ContextVar("ONES", default=None)
"""The `Ones` of this thread's run, if its rule is affine."""


def constant(value: Tensor) -> Tensor:
    """Mark a value that a rule adds and that depends on no source: it is part of the bias if the rule is affine."""
    ones = ONES.get()
    return value if ones is None else ones.times(value)


class Half(torch.autograd.Function):
    """The identity with half of its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # noqa: D102
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:  # noqa: D102
        return gradients[0] / 2


class Stands(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, linear: Tensor, of_activation: bool = False) -> Tensor:  # noqa: D102
        ctx.of_activation = of_activation
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[None, Tensor, None]:  # noqa: D102
        return None, gradients[0], None


def stands(value: Tensor, linear: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return Stands.apply(value.detach(), linear)


def shared(f: Operation, x: Tensor, y: Tensor) -> Tensor:
    """Run a product in which each factor gets half of the gradient."""
    return f(Half.apply(x), Half.apply(y))


def by_ratio(f: Operation, z: Tensor) -> Tensor:
    """Run φ(z) as (φ(z) − φ(0))/z · z + φ(0), with φ'(0) as the ratio at zero and a constant φ(0)."""
    at = z.detach()
    out, offset = f(at), f(torch.zeros_like(at))
    ratio, is_zero = (out - offset) / at, at == 0
    if bool(is_zero.any()):
        ratio = torch.where(is_zero, derivative(f, at), ratio)
    linear = z * ratio
    return Stands.apply(out, linear + constant(offset) if bool(offset.any()) else linear, True)


def softened(f: Operation, scores: Tensor, dim: int) -> Tensor:
    """Run a softmax whose gradient is taken at twice its temperature, without the factor ½."""
    return weighted(f(scores.detach(), dim), scores, (scores.detach() / 2).softmax(dim), dim)


def weighted(pattern: Tensor, scores: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Run a softmax whose gradient uses other weights: w·(s − Σ w·s / Σ w)."""
    given = weights * scores.masked_fill(weights == 0, 0.0)  # a masked score is −∞
    return stands(pattern, given - weights * (given.sum(dim, keepdim=True) / weights.sum(dim, keepdim=True)))


class Doubt(torch.autograd.Function):
    """A value through which no gradient may pass, as it is undefined which of its factors are held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: str) -> Tensor:  # noqa: D102
        ctx.message = message
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        raise UnsupportedModelError(ctx.message)


def doubted(f: Operation, *inputs: Any) -> Tensor:
    """Run the operation; its gradient raises an error if it is needed."""
    return Doubt.apply(
        f(*inputs),
        f"{getattr(f, '__name__', 'an operation')} in {calling_module()}: the result depends on it, and the rule does "
        "not define what to hold fixed: neither it nor one of its factors is an activation, pattern or scale. Use a "
        "method based on the operator (tensorlens, cp-lrp).",
    )


def calling_module() -> str:
    """Return the class name of the module whose code is running."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return "the model"


def gates_held(f: Operation, x: Tensor, y: Tensor) -> Tensor:
    """Run a product with its activation held; any other product is `doubted`."""
    of_x, of_y = is_activation(x), is_activation(y)
    if of_x is of_y:
        return doubted(f, x, y)
    return f(x.detach(), y) if of_x else f(x, y.detach())


def ratios_go_on(f: Operation, x: Tensor) -> Tensor:
    """Run a function of an activation, such as relu(z)², as an activation; any other function is `doubted`."""
    return by_ratio(f, x) if is_activation(x) else doubted(f, x)


def is_activation(x: Tensor) -> bool:
    """Return whether a value is φ(z) from `by_ratio`, possibly viewed, cut, cast or scaled."""
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
"""Autograd's names of operations that leave an activation an activation."""


TANGENT = Rule(scale=unchanged, needs=())
"""The model's own gradient."""

FROZEN = Rule(doubted, gates_held, by_ratio, function=ratios_go_on, softmax=held, head="frozen", needs=(), affine=True)
"""TensorLens: patterns, scales and gates are held; φ becomes φ(z)/z."""

RELP = Rule(multiply=shared, activation=by_ratio, head="frozen-split")
"""Jafari et al. 2025 with live attention: gates are shared; φ becomes φ(z)/z; attention keeps its gradient."""

ATTNLRP = Rule(matmul=shared, multiply=shared, activation=by_ratio, head="frozen-split")
"""Achtibat et al. 2024: every product is shared by its factors; φ becomes φ(z)/z; softmax keeps its gradient."""

GIM = Rule(matmul=shared, softmax=softened, needs=("attention_products", "full_rows"))
"""Edin et al. 2025: attention products are shared; softmax has a softer gradient; MLPs keep their gradient."""


# ------------------------------------------------------------------ two runs


def secant(pair: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Rule:
    """Return the rule for the exact difference of two runs, in which nothing is held.

    Args:
        pair: maps a value of this run to the pair of this and the other run's values.
    """

    def mean(x: Tensor) -> Tensor:
        first, second = pair(x)
        return (first + second) / 2

    def by_means(f: Operation, x: Tensor, y: Tensor) -> Tensor:
        """Δ(xy) = Δx·ȳ + x̄·Δy."""
        return stands(f(x.detach(), y.detach()), f(x, mean(y)) + f(mean(x), y))

    def by_slope(f: Operation, z: Tensor) -> Tensor:
        """Use the slope of a function between the two runs' values."""
        out = f(z.detach())
        steep = slope(lambda middle: derivative(f, middle), pair(z), pair(out))
        steep.masked_fill_(steep.isnan(), 0)  # −∞ in both runs, from a mask
        return stands(out, z * steep)

    def by_logarithmic_mean(f: Operation, scores: Tensor, dim: int) -> Tensor:
        """Use the logarithmic mean of the two patterns."""
        first, second = (run.double().log_softmax(dim) for run in pair(scores))
        return weighted(f(scores.detach(), dim), scores, logarithmic_mean(first, second).to(scores), dim)

    return Rule(by_means, by_means, by_slope, by_slope, by_slope, by_logarithmic_mean, mean, runs=2)


# ------------------------------------------------------------------ by name


RULES: dict[str, Rule] = {"attnlrp": ATTNLRP, "frozen": FROZEN, "gim": GIM, "relp": RELP, "tangent": TANGENT}
"""Rules of one run by name, including those that users register."""


def rule_of(rule: Any) -> Rule:
    """Return a rule, given itself or its name.

    Raises:
        InvalidInputError: it is neither a rule of one run nor the name of one.
    """
    if isinstance(rule, Rule) and rule.runs == 1:
        return rule
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule]
    if rule == "secant" or isinstance(rule, Rule):
        raise InvalidInputError(
            f"rule={rule!r} is of two runs. Pass tlens.difference(first, second) instead of one run, without rule=."
        )
    names = ", ".join(map(repr, RULES))
    raise InvalidInputError(f"rule={rule!r}; use one of {names}, or a tlens.Rule.{nearest(rule, RULES)}")
