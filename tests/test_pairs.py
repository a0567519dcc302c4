"""Modules in two runs, against Hugging Face's own mixers run twice and differentiated, all in float64."""

import copy
from functools import partial

import pytest
import torch
import transformers as hf
from conftest import Wide, close, rest_whole
from test_scans import FAMILIES, family, off

from tensorlens_tl.algebra.secants import offset_terms
from tensorlens_tl.core import paired
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.mixers import read_mixer
from tensorlens_tl.testing import check_map

pytestmark = pytest.mark.numeric

LENGTH = 9
LFM2 = "LFM2"
NAMES = [*FAMILIES, LFM2]
ONE_OF_EACH = ("Mamba", "Mamba2", "Qwen3Next", LFM2)


def short_convolution():
    torch.manual_seed(0)
    config = hf.Lfm2Config(hidden_size=16, vocab_size=61, num_hidden_layers=1, num_attention_heads=2, conv_bias=True)
    module = hf.models.lfm2.modeling_lfm2.Lfm2ShortConv(config, 0).double()
    for part in module.parameters():
        part.data = 0.4 * torch.randn_like(part)
    return module


def mixer_of(name):
    return short_convolution() if name == LFM2 else family(name)[1]


def varied(module):
    """The same with every parameter changed."""
    other = copy.deepcopy(module)
    for part in other.parameters():
        part.data = part.data + 0.1 * torch.randn_like(part)
    return other


def weights_that_count(module, x, mask):
    """The names of those whose change changes what the module gives."""
    before = live(module, x, mask)
    counting = set()
    for name, _ in module.named_parameters():
        other = copy.deepcopy(module)
        weight = other.get_parameter(name)
        weight.data = weight.data + 0.1 * torch.randn_like(weight)
        if not torch.equal(live(other, x, mask), before):
            counting.add(name)
    return counting


def padding(side):
    """Which tokens are real: three of the first prompt are not."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    if side == "left":
        mask[0, :3] = False
    if side == "right":
        mask[0, -3:] = False
    return mask


def live(module, x, mask):
    """What the module itself gives, in float64."""
    with Wide():
        return module(x, attention_mask=mask.long())


def inputs(size=1.0):
    x_a = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    return x_a, x_a + size * torch.randn_like(x_a)


def secant_of(module_a, module_b, x_a, x_b, mask):
    mask = None if mask.all() else mask
    runs = (read_mixer(module).runs(mask) for module in (module_a, module_b))
    return paired(*runs, (module_a, module_b), x_a, x_b, "L0.mixer")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_it_gives_the_difference_of_what_the_module_gives(name, side):
    module = mixer_of(name)
    mask = padding(side)
    x_a, x_b = inputs()
    expected = live(module, x_a, mask) - live(module, x_b, mask)
    with Wide():
        secant = secant_of(module, module, x_a, x_b, mask)
    assert off((secant(x_a - x_b))[mask], expected[mask]) <= 1e-9
    assert not bool(torch.as_tensor(secant.bias).any())


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
def test_of_one_input_it_is_the_derivative(name, side):
    module = mixer_of(name)
    mask = padding(side)
    x, _ = inputs()
    g = torch.randn_like(x) * mask[..., None]
    leaf = x.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(live(module, leaf, mask), leaf, g)
    with torch.no_grad(), Wide():
        secant = secant_of(module, module, x, x, mask)
    assert off(secant.pull(g), expected) <= 1e-9


@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_both_inputs_count_alike(name):
    module = mixer_of(name)
    mask = padding("left")
    x_a, x_b = inputs()
    g = torch.randn(3, 2, LENGTH, 16, dtype=torch.float64)
    there, back = secant_of(module, module, x_a, x_b, mask), secant_of(module, module, x_b, x_a, mask)
    assert off(back.pull(g), there.pull(g)) <= 1e-12


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
def test_other_weights_are_constants_by_name(name, side):
    module = mixer_of(name)
    other = varied(module)
    mask = padding(side)
    x_a, x_b = inputs()
    expected = live(module, x_a, mask) - live(other, x_b, mask)
    with Wide():
        secant = secant_of(module, other, x_a, x_b, mask)
    assert off((secant(x_a - x_b))[mask], expected[mask]) <= 1e-9
    g = torch.randn_like(expected)
    terms = offset_terms(secant, g)
    assert off(sum(term.sum(-1) for _, term in terms), (g * secant.bias).sum((-2, -1))) <= 1e-9
    assert {term.removeprefix("L0.mixer.") for term, _ in terms} == weights_that_count(module, x_a, mask)


@pytest.mark.parametrize("name", rest_whole(NAMES, *ONE_OF_EACH))
@torch.no_grad()
@pytest.mark.few(2)
def test_it_is_a_map(name):
    module = mixer_of(name)
    mask = padding("left")
    x_a, x_b = inputs()
    with Wide():
        check_map(secant_of(module, varied(module), x_a, x_b, mask), x_a)


@pytest.mark.parametrize("size", [1e-14, 1e-10, 1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("name", ONE_OF_EACH)
@torch.no_grad()
def test_differences_of_any_size(name, size):
    """Of close inputs it is the derivative, to the rounding of the difference itself."""
    module = mixer_of(name)
    mask = padding("none")
    x_a, x_b = inputs(size)
    with Wide():
        secant = secant_of(module, module, x_a, x_b, mask)
    y_a, y_b = live(module, x_a, mask), live(module, x_b, mask)
    error = (secant(x_a - x_b) - (y_a - y_b)).norm()
    assert error <= 1e-9 * (y_a - y_b).norm() + 1e-13 * (y_a.norm() + y_b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
@torch.no_grad()
def test_dtypes_are_kept(name, dtype):
    module = mixer_of(name)
    mask = padding("left")
    x_a, x_b = inputs()
    expected = live(module, x_a, mask) - live(module, x_b, mask)
    narrow = copy.deepcopy(module).to(dtype)
    secant = secant_of(narrow, narrow, x_a.to(dtype), x_b.to(dtype), mask)
    y = secant((x_a - x_b).to(dtype))
    assert y.dtype == secant.pull(y).dtype == dtype
    assert off(y.double()[mask], expected[mask]) <= {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]


# ------------------------------------------------------------------ any module


def difference_of(first, second, a, b, modules=None):
    same = torch.nn.Identity()
    secant = paired(first, second, modules or (same, same), a, b)
    return secant, first(a) - second(b)


def two_inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64), torch.randn(*shape, dtype=torch.float64)


def changed_in_place(x):
    """What an operation was given is overwritten after it."""
    hidden = x * 2.0
    gate = torch.sigmoid(hidden)
    hidden[:, 0] = 7.0 * hidden[:, 1]
    hidden += 3.0
    return (gate * hidden).sum(-1, keepdim=True)


def test_what_was_noted_is_copied_before_it_is_changed_in_place():
    a, b = two_inputs(2, 4, 3)
    secant, expected = difference_of(changed_in_place, changed_in_place, a, b)
    assert close(secant(a - b), expected)


def state_in_place(x):
    """A state that holds no live value is noted beside one, and overwritten."""
    state = torch.zeros_like(x[:, 0])
    total = (x[:, 0] + state).tanh()
    state.add_(1.0)
    return (total + (x[:, 1] + state).tanh())[:, None].expand_as(x)


def test_a_state_that_is_overwritten_is_the_same_in_both_runs():
    a, b = two_inputs(2, 4, 3)
    secant, expected = difference_of(state_in_place, state_in_place, a, b)
    assert close(secant(a - b), expected)
    assert not secant.constants


def test_a_run_that_takes_another_way_is_refused():
    a, b = two_inputs(1, 4, 3)
    for first, second in [
        (torch.tanh, lambda x: x),
        (lambda x: x, torch.tanh),
        (lambda x: x.cumsum(1).tanh(), lambda x: x[:, :3].tanh()),
        (lambda x: x.take_along_dim(x.argsort(1), 1), lambda x: x.take_along_dim(x.argsort(1), 1)),
    ]:
        with pytest.raises(UnsupportedModelError, match="different ways through a module"):
            difference_of(first, second, a, b)


@pytest.mark.parametrize(
    "largest", [lambda x: x.amax(1, keepdim=True), lambda x: x.topk(1, 1).values], ids=["amax", "topk"]
)
def test_what_is_held_and_differs_is_a_constant_of_its_module(largest):
    """The largest value is held, as in a softmax that is written out."""
    a, b = two_inputs(1, 4, 3)
    secant, expected = difference_of(*[lambda x: x * largest(x)] * 2, a, b)
    assert close(secant(a - b), expected)
    assert {offset.name for offset, _ in secant.noted(expected)} == {"the model"}


class Choosing(torch.nn.Module):
    """One of three experts for each token, which counts as much as it is chosen by."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4).double() for _ in range(3))

    def choice(self, x):
        return x.tanh()[..., :3].topk(1, dim=-1)

    def forward(self, x, choice=None):
        weights, chosen = choice or self.choice(x)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen[..., 0] == number).nonzero(as_tuple=True)
            out = out.index_put(rows, weights[rows] * self.experts[number](x[rows]).sigmoid())
        return out


def test_a_module_that_gives_nothing_is_no_stream():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = torch.nn.Identity(), 0

        def forward(self, x):
            self.calls += 1

    module = torch.nn.Sequential(Counting())
    a, b = two_inputs(1, 4, 3)

    def run(x):
        module[0](x)
        return x * x

    secant, expected = difference_of(run, run, a, b, (module, module))
    assert close(secant(a - b), expected)
    assert module[0].calls == 4  # twice as pairs, twice for what is expected


OTHER_CHOICES = {
    "other rows": ([[2.0, 0, 0, 1], [0, 2, 0, -1]], [[0, 2.0, 0, 1], [0, 2, 0, 2]]),
    "the same rows, other experts": ([[2.0, 0, 0, 1], [0, 2, 0, -1]], [[0, 2.0, 0, 1], [0, 0, 2, 2]]),
    "the same experts": ([[2.0, 0, 0, 1], [0, 2, 0, -1]], [[1.0, 0.5, 0, 1], [0, 1, 0, 2]]),
}


@pytest.mark.parametrize("name", OTHER_CHOICES)
def test_a_changed_choice_is_a_constant(name):
    """The module with either run's choice, and what that counts, explains its mean; the rest is the constant."""
    module = Choosing()
    a, b = torch.tensor(OTHER_CHOICES[name]).double()[:, None]
    secant, expected = difference_of(module, module, a, b, (module, module))
    assert close(secant(a - b), expected)
    assert {offset.name for offset, _ in secant.noted(expected)} == {"routing"}
    explained = sum(module(a, choice) - module(b, choice) for choice in map(module.choice, (a, b))) / 2
    assert close(secant.linear(a - b), explained)


def test_weights_that_an_operation_is_not_linear_in_are_refused():
    modules = [torch.nn.PReLU(init=init).double() for init in (0.1, 0.3)]
    a, b = two_inputs(1, 4, 3)
    for first, second in (modules, [lambda x, m=m: torch.clamp(x, m.weight) for m in modules]):
        with pytest.raises(UnsupportedModelError, match=r"prelu|clamp"):
            difference_of(first, second, a, b, tuple(modules))


@pytest.mark.parametrize("operation", [torch.add, torch.mul, torch.div, torch.matmul, torch.sub])
def test_constants_sum_to_what_changed_weights_add(operation):
    modules = [torch.nn.Linear(3, 3).double() for _ in range(2)]
    a, b = two_inputs(2, 4, 3)
    part = slice(None) if operation is torch.matmul else slice(1)

    def run(module, x):
        return torch.tanh(operation(x, torch.exp(module.weight[part])))

    runs = [partial(run, module) for module in modules]
    secant, expected = difference_of(*runs, a, b, tuple(modules))
    assert close(secant(a - b), expected)
    assert {offset.name for offset, _ in secant.noted(expected)} == {"weight"}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_weight_that_nothing_reads_later_adds_nothing(rows):
    """As the state after the last token."""
    modules = [torch.nn.Linear(3, 3).double() for _ in range(2)]

    def run(module, x):
        module(x)
        return torch.tanh(x)

    a, b = two_inputs(2, 4, 3)
    secant, expected = difference_of(*(partial(run, module) for module in modules), a, b, tuple(modules))
    assert close(secant(a - b), expected)
    for offset, pulled in secant.noted(expected.expand(rows, -1, -1, -1)):
        assert pulled.shape == (rows, *offset.vectors.shape)
        assert not pulled.any()


@pytest.mark.parametrize("heads", [4, 3])
def test_what_a_weight_adds_is_at_its_position(heads):
    """Also where as many heads as positions stand beside them."""
    modules = [torch.nn.Linear(6, 2 * heads).double() for _ in range(2)]
    a, b = two_inputs(2, 4, 6)
    gains = [torch.nn.Parameter(torch.rand(2, dtype=torch.float64)) for _ in modules]
    for module, gain in zip(modules, gains, strict=True):
        module.gain = gain

    def run(module, x):
        by_head = module(x).unflatten(-1, (heads, 2)).transpose(1, 2)
        return (by_head.cumsum(2) * module.gain).transpose(1, 2).flatten(2)

    secant, expected = difference_of(*(partial(run, module) for module in modules), a, b, tuple(modules))
    g = torch.zeros_like(expected)
    g[:, 2] = 1
    terms = dict(offset_terms(secant, g))
    given = torch.zeros_like(terms["gain"])
    mean = sum(module(x).unflatten(-1, (heads, 2)).cumsum(1) for module, x in zip(modules, (a, b), strict=True)) / 2
    given[:, 2] = (mean * (gains[0] - gains[1])).sum((-2, -1))[:, 2].detach()
    assert close(terms["gain"], given)
