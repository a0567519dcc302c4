"""The difference of two whole runs, recorded, beside the one that is put together from weights.

The other witness are the live numbers, whose change scores and constants sum to.
"""

from dataclasses import dataclass

import pytest
import torch
from conftest import rest_whole
from test_difference_families import built
from torch.overrides import TorchFunctionMode

import tensorlens_tl as tlens
from tensorlens_tl.core import in_two_runs, refuse_other_functions
from tensorlens_tl.hooks import graph_of
from tensorlens_tl.models.sublayers import ExpertsWeights
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
    """The difference of two runs of whole models: what its last position gives to a direction."""

    gradient: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    end: torch.Tensor
    change: torch.Tensor
    constants: dict[str, torch.Tensor]

    @property
    def scores(self):
        return (self.gradient * (self.a - self.b)).sum(-1)

    @property
    def size(self):
        """What scores are rounded by a share of."""
        return float((self.gradient.abs() * (self.a.abs() + self.b.abs())).sum(-1).max())


def change_of(a, b, point, direction):
    """What the whole of two runs gives, recorded once."""
    x = [frozen.resid_pre(0).clone().requires_grad_() for frozen in (a, b)]

    def run(frozen, leaf):
        parts = leaf.split(list(frozen.sides or (leaf.shape[1],)), dim=1)
        entries = zip(frozen.capture.stream_names(0), parts, strict=True)
        hooks = [(name, lambda stream, *, hook, part=part: part) for name, part in entries]
        return graph_of(frozen.model, frozen.inputs, [point], hooks)[0]

    others = []
    end, constants = in_two_runs(lambda: run(a, x[0]), lambda: others.append(run(b, x[1])), (a.model, b.model))
    refuse_other_functions([end])
    at_end = torch.zeros_like(end)
    at_end[:, -1] = direction
    leaves = [constant.leaf for constant in constants]
    gradient, *pulled = torch.autograd.grad(end, [x[0], *leaves], at_end, materialize_grads=True)
    terms = {}
    for constant, given in zip(constants, pulled, strict=True):
        terms[constant.name] = terms.get(constant.name, 0) + (given * constant.added).sum()
    change = (at_end * (end - others[0])).sum()
    return Change(gradient, x[0].detach(), x[1].detach(), end.detach(), change.detach(), terms)


def asked(name, frozen):
    """A hook point, a direction there, and the same question to `attribute`, of the last position."""
    last = frozen.tokens.shape[1] - 1
    if frozen.points.unembed_in is None or name in model_names("signals"):
        direction = torch.randn(frozen.output.shape[-1], dtype=torch.float64)
        return frozen.points.output, direction, {"direction": direction, "query": last}  # -1 is a class token
    vectors, _ = frozen.logit_vectors(torch.tensor([[3]] * 2), torch.tensor([[last]] * 2))
    return frozen.points.unembed_in, vectors[:, 0], {"target": 3}


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_two_whole_runs_are_the_difference(name, model):
    """The model's own values; scores that with constants sum to their change; and the scores that weights give."""
    a, b = (frozen_of(name, model, seed) for seed in (0, 1))
    point, direction, question = asked(name, a)
    mine = change_of(a, b, point, direction)
    live = a.activation(point)
    assert (mine.end - live).abs().max() <= ALLOWED * live.abs().max()
    assert abs(mine.scores.sum() + sum(mine.constants.values()) - mine.change) <= ALLOWED * mine.size
    back = change_of(b, a, point, direction)
    assert (back.gradient - mine.gradient).abs().max() <= ALLOWED * mine.gradient.abs().max()
    if name in SPLIT_OTHERWISE or name in NEW:
        return
    theirs = tlens.attribute(tlens.difference(a, b), **question)
    assert (mine.scores - theirs.scores[:, 0]).abs().max() <= ALLOWED * mine.size
    constants = sum(mine.constants.values(), torch.zeros(()))
    assert abs(constants - theirs.bias.sum()) <= ALLOWED * mine.size
    assert mine.scores.abs().max() > 1e-3 * mine.size
    assert all(term.endswith(".routing") for term in mine.constants)


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_equal_runs_have_the_models_gradient_whatever_is_split(name, model):
    """With the routing of experts held."""
    a = frozen_of(name, model, 0)
    point, direction, _ = asked(name, a)
    mine = change_of(a, a, point, direction)
    assert not any(map(bool, mine.constants.values()))
    if any(isinstance(block.mlp, ExpertsWeights) for block in a.view.blocks) or name in NEW:
        return
    leaf = a.resid_pre(0).clone().requires_grad_()
    parts = leaf.split(list(a.sides or (leaf.shape[1],)), dim=1)
    entries = zip(a.capture.stream_names(0), parts, strict=True)
    hooks = [(name, lambda stream, *, hook, part=part: part) for name, part in entries]
    (end,) = graph_of(model, a.inputs, [point], hooks)
    (expected,) = torch.autograd.grad((end[:, -1] * direction).sum(), leaf)
    assert (mine.gradient - expected).abs().max() <= ALLOWED * expected.abs().max()
