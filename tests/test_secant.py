"""The difference of two runs as a rule over operations, beside the one that is put together from weights.

The other witness are the live numbers, whose change scores and constants sum to.
"""

from dataclasses import dataclass

import pytest
import torch
from conftest import rest_whole
from test_difference_families import built
from torch.overrides import TorchFunctionMode

import tensorlens_tl as tlens
from tensorlens_tl.core import SECANT, Linearised, refuse_other_functions, ruled
from tensorlens_tl.hooks import graph_of
from tensorlens_tl.testing import model_names, tiny_input
from tensorlens_tl.testing.models import random_input

pytestmark = pytest.mark.numeric

SPLIT_OTHERWISE = {
    "bridge/mamba": "of a product of three factors, another pair is multiplied first",
    "bridge/jamba": "as mamba",
    "bridge/rwkv": "a quotient is a product with one over its divisor, and what exponents are taken less of is live",
    "bridge/qwen3-next": "the delta rule in chunks, and not its recurrence",
}
"""Families whose changes are split otherwise than weights say, and why; the split is exact all the same."""

NEW = {"bridge/jetmoe": "its heads are experts, whose queries are not read"}
"""Families of which weights give no difference."""

BUILT = ("attention of qwen3-next", "experts of gemma4", "inputs of gemma4")
NAMES = [*model_names(), *model_names("signals"), *BUILT]
QUICK = ("hooked/ln", "encoder/bert", "bridge/gpt2", "bridge/llama", "bridge/opt", "bridge/bart", "bridge/mixtral")


ALLOWED = 1e-9


class Wide(TorchFunctionMode):
    """Inside, what a model computes in float32 whatever its dtype it computes in float64, as all else."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = kwargs or {}
        return func(*map(self.dtype, args), **{name: self.dtype(value) for name, value in kwargs.items()})

    def dtype(self, value):
        return torch.float64 if value is torch.float32 else value


@pytest.fixture(autouse=True)
def _wide():
    with Wide():
        yield


@pytest.fixture
def model(name, model_named):
    return built(name) if name in BUILT else model_named(name)


def frozen_of(name, model, seed):
    if name in model_names("signals"):
        return tlens.freeze(model, random_input(model, 6, torch.Generator().manual_seed(seed)).double())
    tokens, options = tiny_input(model, seed=seed)
    return tlens.freeze(model, tokens, **options)


@dataclass
class Change:
    """The difference of two runs, of one batch of both: what its last position gives to a direction."""

    gradient: torch.Tensor
    leaf: torch.Tensor
    end: torch.Tensor
    at_end: torch.Tensor
    constants: dict[str, torch.Tensor]

    @property
    def scores(self):
        first, second = self.leaf.chunk(2)
        return (self.gradient.chunk(2)[0] * (first - second)).sum(-1)

    @property
    def size(self):
        """What scores are rounded by a share of."""
        return float((self.gradient * self.leaf).abs().sum(-1).max())


def change_of(a, b, point, direction, rule=SECANT):
    """Under a rule, runs `a` and `b` as one batch; without one, of each its model's own gradient."""
    model = a.model
    both = {name: torch.cat([a.inputs[name], b.inputs[name]]) for name in a.inputs}
    leaf = torch.cat([a.resid_pre(0), b.resid_pre(0)]).requires_grad_()
    parts = leaf.split(list(a.sides or (leaf.shape[1],)), dim=1)
    entries = zip(a.capture.stream_names(0), parts, strict=True)
    hooks = [(name, lambda stream, *, hook, part=part: part) for name, part in entries]
    with ruled(model, rule) as linearised:
        (end,) = graph_of(model, both, [point], hooks)
    at_end = torch.zeros_like(end)
    first, second = at_end.chunk(2)
    first[:, -1], second[:, -1] = direction, -direction
    if rule is None:
        return Change(*torch.autograd.grad(end, leaf, at_end), leaf.detach(), end.detach(), at_end, {})
    refuse_other_functions([end])
    leaves = [constant for _, constant in linearised.constants]
    gradient, *of_constants = torch.autograd.grad(end, [leaf, *leaves], at_end, allow_unused=True)
    constants = {}
    for (name, value), given in zip(linearised.constants, of_constants, strict=True):
        if given is not None:
            constants[name] = constants.get(name, 0) + (given * value.detach()).sum()
    return Change(gradient, leaf.detach(), end.detach(), at_end, constants)


def asked(name, frozen):
    """A hook point, a direction there, and the same question to `attribute`, of the last position."""
    last = frozen.tokens.shape[1] - 1
    if frozen.points.unembed_in is None or name in model_names("signals"):
        direction = torch.randn(frozen.output.shape[-1], dtype=torch.float64)
        return frozen.points.output, direction, {"direction": direction, "query": last}  # -1 is a class token
    vectors, _ = frozen.logit_vectors(torch.tensor([[3]] * 2), torch.tensor([[last]] * 2))
    return frozen.points.unembed_in, vectors[:, 0], {"target": 3}


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_two_runs_in_one_batch_are_the_difference(name, model):
    """The model's own values; scores that with constants sum to their change; and the scores that weights give."""
    a, b = (frozen_of(name, model, seed) for seed in (0, 1))
    point, direction, question = asked(name, a)
    mine = change_of(a, b, point, direction)
    for half, frozen in zip(mine.end.chunk(2), (a, b), strict=True):
        live = frozen.activation(point)
        assert (half - live).abs().max() <= ALLOWED * live.abs().max()
    of_a, of_b = mine.gradient.chunk(2)
    assert (of_a + of_b).abs().max() <= ALLOWED * of_a.abs().max()
    change = (mine.at_end * mine.end).sum()
    assert abs(mine.scores.sum() + sum(mine.constants.values()) - change) <= ALLOWED * mine.size
    there = change_of(b, a, point, direction)
    assert (there.gradient - mine.gradient).abs().max() <= ALLOWED * of_a.abs().max()
    if name in SPLIT_OTHERWISE or name in NEW:
        return
    theirs = tlens.attribute(tlens.difference(a, b), **question)
    assert (mine.scores - theirs.scores[:, 0]).abs().max() <= ALLOWED * mine.size
    constants = sum(mine.constants.values(), torch.zeros(()))
    assert abs(constants - theirs.bias.sum()) <= ALLOWED * mine.size
    assert mine.scores.abs().max() > 1e-3 * mine.size


@pytest.mark.parametrize(
    "choice",
    [lambda x: x.topk(2), lambda x: x[torch.tensor([0, 1, 1])], lambda x: torch.where(x > 0, x, 0.0)],
    ids=["topk", "rows", "where"],
)
def test_a_choice_that_no_module_makes_is_refused(choice):
    """Which rows, and where, is another thing in each run, so that halves of the batch no longer match."""
    x = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 2.0, 0.5]], requires_grad=True)
    with Linearised(SECANT), pytest.raises(tlens.UnsupportedModelError, match=r"in both runs|in each of the two runs"):
        choice(x)


def test_equal_runs_have_the_models_gradient_whatever_is_split(model_named):
    model = model_named("bridge/mamba")
    a = frozen_of("bridge/mamba", model, 0)
    point, direction, _ = asked("bridge/mamba", a)
    mine, theirs = (change_of(a, a, point, direction, rule).gradient for rule in (SECANT, None))
    assert (mine - theirs).abs().max() <= ALLOWED * theirs.abs().max()
