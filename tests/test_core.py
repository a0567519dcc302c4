"""Rules over operations, and what they are made of."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import tensorlens_tl as tlens
from tensorlens_tl.core import (
    ATTNLRP,
    FROZEN,
    GIM,
    TANGENT,
    Linearised,
    Recorded,
    Rule,
    activation,
    held,
    paired,
    ruled,
    shared,
    stands,
)
from tensorlens_tl.hooks import graph_of
from tensorlens_tl.testing import model_names, tiny_input

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("norm", [functional.layer_norm, functional.rms_norm], ids=["layer_norm", "rms_norm"])
def test_a_norm_in_one_operation_is_its_steps(norm):
    """Scales are held in one run; in two, the whole change is given."""
    x, weight = torch.randn(2, 8, dtype=torch.float64, requires_grad=True), nn.Parameter(torch.randn(8).double())
    with Linearised(Rule()):
        out = norm(x, (8,), weight)
    assert torch.equal(out, norm(x.detach(), (8,), weight))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose((gradient * x).sum(), out.sum())  # linear, with the scale held
    identity = nn.Identity()
    a, b = x.detach()[:, None, None]
    run = partial(norm, normalized_shape=(8,), weight=weight)
    change = paired(run, run, (identity, identity), a[None], b[None])
    assert torch.allclose(change(a[None] - b[None]), (out[0] - out[1])[None, None])


IN_PLACE = {
    "mul_": lambda x, y: x.clone().mul_(y),
    "div_": lambda x, y: x.clone().div_(y),
    "__imul__": lambda x, y: x.clone().__imul__(y),
    "relu_": lambda x, y: functional.relu(1 * x, inplace=True) * y,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_out_of_place(name):
    plain = {"div_": torch.div, "relu_": lambda x, y: functional.relu(x) * y}.get(name, torch.mul)
    x, y = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gradients = []
    for operation in (IN_PLACE[name], plain):
        with Linearised(ATTNLRP):
            out = operation(x, y)
        gradients.append(torch.autograd.grad(out.sum(), (x, y), allow_unused=True))
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_a_tensor_times_itself_is_two_factors():
    """Of one run shared between both, of two the whole change."""
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    with Linearised(Rule(matmul=shared)):
        out = torch.matmul(x, x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose((gradient * x).sum(), out.sum())
    a, b = torch.randn(2, 1, 1, 3, 3, dtype=torch.float64).unbind()
    identity = nn.Identity()
    change = paired(lambda y: torch.matmul(y, y), lambda y: torch.matmul(y, y), (identity, identity), a[0], b[0])
    assert torch.allclose(change((a - b)[0]), (a @ a - b @ b)[0])


def test_a_product_of_three_live_factors_is_refused():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with Linearised(FROZEN), pytest.raises(tlens.UnsupportedModelError, match=r"einsum .*3 of its factors"):
        torch.einsum("i,i,i->", x, 2 * x, 3 * x)


def test_a_softmax_is_one_however_it_is_called():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with Linearised(Rule(softmax=held)):
        out = torch.softmax(input=x, dim=-1)
    assert torch.equal(out, x.detach().softmax(-1))
    assert not out.requires_grad


@pytest.mark.parametrize("function", [functional.softplus, functional.gelu])
def test_what_an_activation_gives_at_zero_is_a_constant(function):
    """As of the operator, whose ratio is (φ(z) − φ(0))/z."""
    z = torch.tensor([-2.0, 0.0, 1e-9, 3.0], dtype=torch.float64, requires_grad=True)
    with Linearised(FROZEN) as run:
        out = activation(z, function)
    ratio, bias = torch.autograd.grad(out.sum(), (z, run.ones.leaf), allow_unused=True)
    at_zero = function(torch.zeros((), dtype=torch.float64))
    assert torch.allclose(ratio * z + at_zero, function(z.detach()))
    assert float(0 if bias is None else bias) == pytest.approx(4 * float(at_zero))
    assert ratio.abs().max() < 2


@pytest.mark.parametrize("rule", [TANGENT, FROZEN])
def test_what_a_model_computes_without_gradients_is_held(rule):
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with Linearised(rule):
        with torch.no_grad():
            size = (x * 3).abs().amax()
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
        out = x * size
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], size.expand_as(x))


def test_weights_are_not_live():
    """A product of views of weights is no product of two live values, whatever requires a gradient."""
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3, requires_grad=True)
    with Linearised(ATTNLRP):
        out = x @ (weight.mT @ weight)[:, :2].to(x) + torch.einsum("bi,ij->bj", x, weight[:, :2])
    expected = (weight.mT @ weight + weight)[:, :2].sum(1).expand(2, 3)
    assert torch.allclose(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_rule_of_ones_own():
    """Ten lines: gates keep the gradient of what they multiply, and a pattern that of nothing."""
    rule = Rule(multiply=lambda f, x, y: stands(f(x, y), f(x.detach(), y)), softmax=held)
    gate, up = (torch.randn(4, requires_grad=True) for _ in range(2))
    with Linearised(rule):
        out = functional.silu(gate) * up + gate.softmax(-1)
    given = torch.autograd.grad(out.sum(), (gate, up), allow_unused=True)
    assert given[0] is None or not given[0].any()
    assert torch.equal(given[1], functional.silu(gate).detach())


CONST = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4)
WEIGHT = nn.Parameter(CONST.mT.clone())
SUMS = {
    "a tensor": lambda x: x + CONST,
    "a parameter": lambda x: WEIGHT.mT - x,
    "a number": lambda x: 2 - (x + 1.5) * 3,
    "whole numbers": lambda x: torch.add(x, torch.arange(4), alpha=2),
    "in place": lambda x: (1 * x).add_(CONST).sub_(2),
    "onto a constant": lambda x: CONST.clone().add_(x),
    "joined": lambda x: torch.cat([torch.empty(0, 4), CONST, x]) + torch.stack([x, CONST, x]).sum(1).repeat(2, 1),
    "linear": lambda x: functional.linear(x, CONST, CONST[0, :3]),
    "addmm": lambda x: torch.addmm(CONST[0, :3], x, WEIGHT),
    "convolution": lambda x: functional.conv1d(x[None], CONST.view(4, 3, 1), CONST[0])[0],
    "padded": lambda x: functional.pad(functional.pad(x, (1, 1)), (1, 0), value=2.5),
    "filled": lambda x: x.masked_fill(CONST > 5, 7.0),
    "chosen": lambda x: torch.where(CONST > 5, x, CONST) + x.where(CONST > 7, 3.0),
    "written": lambda x: _written(CONST.clone(), x),
    "written into nothing": lambda x: _written(torch.full_like(CONST, torch.nan), x, rest=x[1:]),
    "a constant written": lambda x: _written(1 * x, CONST),
    "indexed": lambda x: CONST.index_add(0, torch.tensor([2, 0, 0]), x).scatter(
        1, torch.tensor([[1], [0], [3]]), x[:, :1]
    ),
    "a norm's shift": lambda x: functional.layer_norm(x, (4,), CONST[0], CONST[1]),
    "an activation of zero": lambda x: activation(x * (CONST > 5), lambda z: z.square() + z + 3),
}
"""Operations that add a constant to what is live."""


def _written(base, x, rest=None):
    base[0] = x[0]
    if rest is not None:
        base[1:] = rest
    return base


@pytest.mark.parametrize("name", SUMS)
def test_constants_are_the_gradient_by_one(name):
    """Every value is what the gradient gives its source, and the number 1 that all constants are multiplied by."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with Linearised(FROZEN) as run:
        out = SUMS[name](x)
    assert torch.equal(out, SUMS[name](x.detach()))
    g = torch.randn_like(out)
    of_x, of_one = torch.autograd.grad(out, (x, run.ones.leaf), g, retain_graph=True)
    assert of_one != 0 or name == "written into nothing"
    assert torch.allclose((of_x * x).sum() + of_one, (g * out).sum(), rtol=1e-12, atol=1e-12)
    with Linearised(ATTNLRP) as other:
        assert torch.equal(SUMS[name](x), out)
    assert other.ones is None


@pytest.mark.parametrize("rule", [ATTNLRP, GIM], ids=["attnlrp", "gim"])
def test_what_no_rule_knows_is_refused(rule):
    x = torch.randn(2, 3, requires_grad=True)
    with Linearised(rule), pytest.raises(tlens.UnsupportedModelError, match=r"sinc in .*: no rule knows"):
        torch.sinc(x)
    assert shared(torch.mul, x, x).requires_grad


@pytest.mark.parametrize("name", ["hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/bert"])
def test_a_rule_that_changes_nothing_is_the_models_gradient(name, model_named):
    """Scales live as well: norms, quotients, activations and patterns are those of autograd."""
    if name not in model_names():
        pytest.skip("a HookedTransformer, which TransformerLens 4 has no more")
    model = model_named(name)
    tokens, given = tiny_input(model, 1, 6)
    frozen = tlens.freeze(model, tokens, **given)
    gradients = []
    for rule in (TANGENT, None):
        leaf = frozen.resid_pre(0).requires_grad_()
        hooks = [(frozen.points.blocks[0].resid_pre, lambda stream, *, hook, leaf=leaf: leaf)]
        with ruled(model, rule):
            (end,) = graph_of(model, frozen.inputs, [frozen.points.output], hooks)
        gradients.append(torch.autograd.grad(end[0, -1, 3], leaf)[0])
    assert gradients[1].abs().max() > 0
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("keep_apart", [True, False])
def test_groups_of_a_recorded_map_are_pulled_alone(kv_heads, keep_apart):
    """Each head's vector through the graph, as if the others were zero, whatever channels heads share."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, kv_heads, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    pattern = torch.randn(2, 4, 3, 3, generator=generator, dtype=torch.float64)
    shares = values if keep_apart else values / values.norm(dim=(-2, -1), keepdim=True)
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, shares.repeat_interleave(4 // kv_heads, dim=2))
    recorded = Recorded(values, z, (2, 3))
    g = torch.randn(7, 2, 3, 4, 5, generator=generator, dtype=torch.float64)
    for chosen in (range(4), [2], [3, 0]):
        pulled = recorded.pull_groups(g, chosen)
        for row, head in zip(pulled, chosen, strict=True):
            alone = torch.zeros_like(g)
            alone[..., head, :] = g[..., head, :]
            assert (row - recorded.pull(alone.flatten(-2))).abs().max() <= 1e-12
    assert recorded.apart[4] == (kv_heads if keep_apart else 1)
