"""The conformance battery of rules: what any `Rule`, ours or yours, must hold on any model.

>>> import tensorlens_tl as tlens
>>> from tensorlens_tl.testing import check_rule
>>> check_rule("gim", ["bridge/gpt2"])
{}
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.core import Rule, rule_of, unchanged
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes import FrozenPass, run_under_rule
from tensorlens_tl.requirements import resolved
from tensorlens_tl.testing.models import Models, as_list, labelled, random_input
from tensorlens_tl.testing.requirements import EXACT, Check, checks_of, frozen_rows, precision, require, same, untouched

LENGTH = 6
EVERY_KIND = ("bridge/gpt2", "bridge/llama", "bridge/bert")
"""Plain and gated MLPs, LayerNorm and RMSNorm, biases and none, causal and not."""

OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "matmul": (torch.matmul, ((2, 3, 4), (2, 4, 3))),
    "multiply": (torch.mul, ((2, 3, 4), (2, 3, 4))),
    "activation": (torch.nn.functional.gelu, ((2, 3, 4),)),
    "function": (torch.tanh, ((2, 3, 4),)),
    "scale": (torch.sigmoid, ((2, 3, 1),)),
    "softmax": (torch.softmax, ((2, 3, 4),)),
}
"""An operation of each kind that a rule has a function for, and the shapes of what it takes."""


def check_rule(
    rule: Any,
    models: Models = None,
    *,
    tolerance: float | None = None,
    seed: int = 0,
) -> dict[str, str]:
    """Put a rule of one run through everything that questions rely on: all of `RULE_CHECKS`.

    Each of its functions returns the operation's own value, and the model computes what it always does; the pull of a
    zero target is zero, and gradients are linear in the target; a rule that says ``affine`` gives scores and a bias
    that sum to the model's own number; a rule that changes nothing is the derivative; and the model is left as it was.
    Returns the models that the rule does not support, with its messages.

    Args:
        rule: a `Rule`, or the name of one.
        models: a model, or several models or names of `model_names()`; None for three small ones.
        tolerance: largest relative difference; None takes what suits the dtype and the proof of each model.
        seed: of the input and the targets.

    Raises:
        InvalidInputError: no such rule, or one of two runs.
        ConformanceError: naming what does not hold, and on which model.
    """
    refusals: dict[str, str] = {}
    for check in rule_checks(rule, models, tolerance=tolerance, seed=seed):
        try:
            check()
        except UnsupportedModelError as error:
            refusals[check.of] = str(error)
    return refusals


def rule_checks(
    rule: Any,
    models: Models = None,
    *,
    tolerance: float | None = None,
    seed: int = 0,
) -> list[Check]:
    """The checks of `check_rule` on each model, one by one, for `parametrize_with_checks`; the same arguments and
    errors.

    >>> from tensorlens_tl.testing import rule_checks
    >>> [check.name for check in rule_checks("frozen", ["bridge/gpt2"])][:2]
    ['bridge/gpt2: functions', 'bridge/gpt2: values']
    """
    rule = rule_of(rule)
    checks: list[Check] = []
    for label, build in map(labelled, as_list(models, EVERY_KIND)):
        case = partial(RuleCase, rule, build, label, tolerance, seed)
        checks += checks_of(RULE_CHECKS, case, label, untouched)
    return checks


class RuleCase:
    """A rule, and a pass of a model that runs under it."""

    def __init__(self, rule: Rule, build: Callable[[], Any], label: str, tolerance: float | None, seed: int) -> None:
        self.rule = rule
        self.model = build()
        self.who = label
        self.generator = torch.Generator().manual_seed(seed)
        encoder = LENGTH // 2 if ModelView(self.model).is_encoder_decoder else 0
        self.frozen: FrozenPass = frozen_rows(self.model, random_input(self.model, LENGTH, self.generator), encoder)
        self.tolerance = precision(self.frozen) if tolerance is None else tolerance
        for requirement in resolved(rule.needs, "check_rule"):
            requirement.check(self.frozen, "this rule")

    @cached_property
    def run(self) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The sources of the map, and where the model ends, in a run under the rule."""
        with torch.enable_grad():
            return run_under_rule(self.frozen, self.rule)

    def targets(self) -> list[Tensor]:
        """Random vectors where the model ends."""
        return [torch.randn(y.shape, generator=self.generator, dtype=torch.float64).to(y) for y in self.run[2]]

    def pull(self, targets: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The gradients of what entered the first block, and of the 1 that constants are multiplied by."""
        leaf, one, outputs = self.run
        sources = [leaf] if one is None else [leaf, one]
        of_leaf, *of_one = torch.autograd.grad(outputs, sources, targets, retain_graph=True, materialize_grads=True)
        return of_leaf, of_one[0] if of_one else torch.zeros((), dtype=torch.float64)


def check_functions(case: RuleCase) -> None:
    """Each function of the rule returns the value of the operation that it is given."""
    for kind, (f, shapes) in OPERATIONS.items():
        inputs = [torch.randn(shape, generator=case.generator, dtype=torch.float64) for shape in shapes]
        more = (-1,) if kind == "softmax" else ()
        with torch.enable_grad():
            mine = getattr(case.rule, kind)(f, *(x.clone().requires_grad_() * 1 for x in inputs), *more)
        same(mine.detach(), f(*inputs, *more), EXACT, f"Rule.{kind} changes the value of {f.__name__}")


def check_values(case: RuleCase) -> None:
    """The model ends where it does without the rule."""
    points = (case.frozen.points.encoder_output, case.frozen.points.output)
    for name, output in zip([name for name in points if name is not None], case.run[2], strict=True):
        same(output.detach(), case.frozen.activation(name), case.tolerance, f"{case.who}: {name} under the rule")


def check_zero(case: RuleCase) -> None:
    """Nothing is pulled back of nothing."""
    gradients = case.pull([torch.zeros_like(y) for y in case.run[2]])
    holds = all(bool((gradient == 0).all()) for gradient in gradients)
    require(holds, f"{case.who}: the gradient of a zero target is not zero.")


def check_linear(case: RuleCase) -> None:
    """Gradients are linear in the target."""
    first, second = case.targets(), case.targets()
    both = case.pull([a + 2 * b for a, b in zip(first, second, strict=True)])
    for of_both, a, b in zip(both, case.pull(first), case.pull(second), strict=True):
        size = float(a.abs().max() + 2 * b.abs().max())
        off = float((of_both - a - 2 * b).abs().max())
        require(off <= case.tolerance * size, f"{case.who}: gradients are not linear in the target ({off:.1e} off).")


def check_sum(case: RuleCase) -> None:
    """Of a rule that says it is affine, gradient times input and the bias are the model's own number."""
    if not case.rule.affine:
        return
    targets = case.targets()
    leaf, _, outputs = case.run
    of_leaf, bias = case.pull(targets)
    number = sum(float((g * y.detach()).sum()) for g, y in zip(targets, outputs, strict=True))
    scores = (of_leaf * leaf.detach()).sum(-1)
    summed = float(scores.sum() + bias)
    size = float(scores.abs().sum() + bias.abs())
    require(
        abs(summed - number) <= case.tolerance * size,
        f"{case.who}: the rule says affine=True, and its scores and bias sum to {summed:.6g}, where the model's "
        f"number is {number:.6g}.",
    )


def check_derivative(case: RuleCase) -> None:
    """A rule that leaves every function unchanged gives the gradients of autograd."""
    if any(getattr(case.rule, kind) is not unchanged for kind in OPERATIONS):
        return
    targets = case.targets()
    with torch.enable_grad():
        leaf, _, outputs = run_under_rule(case.frozen, None)
    (theirs,) = torch.autograd.grad(outputs, leaf, targets)
    same(case.pull(targets)[0], theirs, case.tolerance, f"{case.who}: the derivative and autograd's")


RULE_CHECKS = (check_functions, check_values, check_zero, check_linear, check_sum, check_derivative)
"""Everything that `check_rule` asks of a rule."""
