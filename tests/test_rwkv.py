"""RWKV-4 (time mixing and channel mixing), against what its blocks compute, written out from their weights."""

import copy

import pytest
import torch
from conftest import close, some_tokens
from test_offload import offload
from test_scans import Wide
from torch import nn

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models.mixers import channel_mix_weights, mixer_map
from tensorlens_tl.testing import check_map, tiny_model
from tensorlens_tl.testing.model_checks import held_output
from tensorlens_tl.testing.models import build_bridge

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]

NAME = "bridge/rwkv"
"""Halves its stream after every block."""


@pytest.fixture
def frozen(model_named):
    return tlens.freeze(model_named(NAME), some_tokens(2, 7))


def block_of(model, layer):
    """Hugging Face's block."""
    block = model.blocks[layer]
    return getattr(block, "original_component", block)


def inner(module):
    return getattr(module, "original_component", module)


def mixed(module, part, x):
    """A matrix of each token mixed with the one before, token by token."""
    share = getattr(module, f"time_mix_{part}").detach()[0, 0]
    weight = inner(getattr(module, part)).weight.detach()
    before = torch.zeros_like(x[:, 0])
    rows = []
    for token in x.unbind(1):
        rows.append((share * token + (1 - share) * before) @ weight.T)
        before = token
    return torch.stack(rows, 1)


def mean_weights(module, at):
    """What every token's mean takes from every token, `[batch, query, key, channel]`, one by one."""
    k = mixed(module, "key", at).float().double()  # the module rounds them
    w, u = module.time_decay.detach().exp(), module.time_first.detach()
    batch, pos, channels = k.shape
    weights = torch.zeros(batch, pos, pos, channels, dtype=k.dtype)
    for i in range(pos):
        for j in range(i):
            weights[:, i, j] = (k[:, j] - (i - 1 - j) * w).exp()
        weights[:, i, i] = (k[:, i] + u).exp()
    return weights / weights.sum(2, keepdim=True)


def time_mix(module, at, x):
    mean = torch.einsum("bijc,bjc->bic", mean_weights(module, at), mixed(module, "value", x))
    return (mixed(module, "receptance", at).sigmoid() * mean) @ inner(module.output).weight.detach().T


def channel_mix(module, at, x):
    ratio = mixed(module, "key", at).relu()  # relu(k)² is this times k
    written = (ratio * mixed(module, "key", x)) @ inner(module.value).weight.detach().T
    return mixed(module, "receptance", at).sigmoid() * written


def normed(norm, scale, x):
    norm = inner(norm)
    return (x - x.mean(-1, keepdim=True)) / scale * norm.weight.detach() + norm.bias.detach()


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
def test_a_block_is_what_its_weights_compute(frozen, layer):
    """With scales, gates, ratios and the weights of means held, at another stream."""
    block, name = block_of(frozen.model, layer), f"blocks.{layer}"
    other = torch.randn_like(frozen.resid_pre(0))
    seen = {point: frozen.activation(f"{name}.{point}") for point in ("time_mix.hook_in", "channel_mix.hook_in")}
    scales = [frozen.activation(f"{name}.{norm}.hook_scale") for norm in ("ln1", "ln2")]
    attention, feed_forward = inner(block.attention), inner(block.feed_forward)
    middle = other + time_mix(attention, seen["time_mix.hook_in"], normed(block.ln1, scales[0], other))
    end = middle + channel_mix(feed_forward, seen["channel_mix.hook_in"], normed(block.ln2, scales[1], middle))
    assert close(frozen.maps.block_map(layer)(other), end / 2)
    assert close(frozen.maps.block_map(layer)(frozen.resid_pre(layer)), frozen.resid_pre(layer + 1))


@torch.no_grad()
def test_implicit_attention_is_the_weights_of_the_means(frozen):
    weights = mean_weights(inner(block_of(frozen.model, 1).attention), frozen.activation("blocks.1.time_mix.hook_in"))
    shown = tlens.implicit_attention(frozen, 1, channels=True)
    assert close(shown, weights.permute(0, 3, 1, 2))
    assert close(tlens.implicit_attention(frozen, 1).sum(-1), torch.ones(2, 1, 7, dtype=torch.float64))


@torch.no_grad()
@pytest.mark.parametrize("rule", tlens.FROZEN_RULES)
def test_the_live_model_at_another_input_is_the_operator(frozen, rule):
    op = frozen.operator(rule=rule)
    x = op.x + torch.randn_like(op.x)
    outputs = []
    hooks = [
        (frozen.points.blocks[0].resid_pre, lambda live, hook: x),
        *frozen.fwd_hooks(rule=rule),
        (frozen.points.output, lambda live, hook: outputs.append(live)),
    ]
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    assert close(op(x), outputs[0])
    assert close(op.contributions().sum(2) + op.bias, frozen.output)


def test_autograd_through_the_held_model_is_pull(frozen):
    op = frozen.operator()
    g = torch.randn(3, *op.output.shape, dtype=op.output.dtype)
    x = op.x.clone().requires_grad_(True)
    output = held_output(frozen, x)
    pulled = [torch.autograd.grad(output, x, cotangent, retain_graph=True)[0] for cotangent in g]
    assert close(op.pull(g), torch.stack(pulled))


def test_maps_of_both_sublayers_keep_what_every_map_promises(frozen):
    for at in ("time_mix", "channel_mix"):
        x = frozen.activation(f"blocks.0.{at}.hook_in")
        module = inner(frozen.model.blocks[0]._modules[at])
        with torch.no_grad():
            expected = module(x)[0]
        for rule in tlens.FROZEN_RULES if at == "channel_mix" else ("frozen",):
            m = channel_mix_weights(module).hold(x, rule) if at == "channel_mix" else mixer_map(module, x)
            assert close(m(x), expected)
            check_map(m, x)


def test_tangent_is_the_jacobian_of_channel_mixing(frozen):
    x = frozen.activation("blocks.0.channel_mix.hook_in").clone().requires_grad_(True)
    module = inner(frozen.model.blocks[0].channel_mix)
    g = torch.randn_like(x)
    (pulled,) = torch.autograd.grad(module(x)[0], x, g)
    assert close(channel_mix_weights(module).hold(x.detach(), "frozen-tangent").pull(g), pulled)


# ------------------------------------------------------------------------------------------ its stream


@pytest.mark.parametrize("every", [0, 1, 2, 3])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.few(3)
def test_halved_streams(every, train):
    """After every block, after some, after the last or not at all; in train mode weights are larger, and nothing is."""
    model = build_bridge("rwkv", num_hidden_layers=3, rescale_every=every)
    for mode in (train, not train, train):  # the module changes its weights in the first run of either
        model.train(mode)
        frozen = tlens.freeze(model, some_tokens(2, 7))
        assert max(frozen.errors.values()) < 1e-12
        result = frozen.operator().target(7)
        assert close(result.total[:, 0], model(some_tokens(2, 7))[:, -1, 7])
        assert close(result.scores.sum(-1) + result.bias, result.total)
        halved = [block.halved for block in frozen.view.blocks]
        assert halved == [not mode and every > 0 and (layer + 1) % every == 0 for layer in range(3)]


def test_a_pass_is_of_the_mode_that_it_was_frozen_in():
    model = tiny_model(NAME)
    frozen = tlens.freeze(model, some_tokens())
    model.train()
    with pytest.raises(tlens.FrozenModelError, match="switched between train and eval mode"):
        tlens.attribute(frozen, 7)
    model.eval()
    assert tlens.attribute(frozen, 7).gap.max() < 1e-9


POINTS = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"]


@pytest.mark.parametrize("point", [*POINTS, "blocks.0.time_mix.hook_out", "blocks.1.channel_mix.hook_out"])
def test_what_hooks_add_is_halved_with_the_stream(model_named, point):
    vector = torch.randn(16, dtype=torch.float64)
    model = model_named(NAME)
    with model.hooks(fwd_hooks=[(point, lambda live, hook: live + vector)]):
        frozen = tlens.freeze(model, some_tokens())
        assert max(frozen.errors.values()) < 1e-9
        terms = circuits.logit_attribution(frozen, 7)
    assert float(terms.gap.max()) < 1e-9
    assert point in terms.names


def test_the_norm_before_the_stream_is_held_among_the_terms(frozen):
    terms = circuits.logit_attribution(frozen, 7)
    assert {"embed", "blocks.0.pre_ln.b", "L0.mixer", "MLP0"} <= set(terms.names)
    assert float(terms.gap.max()) < 1e-9
    assert close(terms.total[:, 0], frozen.model(frozen.tokens)[:, -1, 7])


def test_an_mlp_that_mixes_positions_has_edges_between_them(frozen):
    frozen = tlens.freeze(frozen.model, frozen.tokens[:1])
    graph = circuits.contribution_graph(frozen, 7, threshold=0)
    assert graph.gap < 1e-9
    into = graph.edges[graph.edges.target.isin(graph.nodes.index[graph.nodes.kind == "mlp"])]
    steps = graph.nodes.pos[into.target].to_numpy() - graph.nodes.pos[into.source].to_numpy()
    assert set(steps) == {0, 1}


# ------------------------------------------------------------------------------------------ numbers and dtypes


def with_large_keys():
    """Keys of a channel that differ by hundreds."""
    model = tiny_model(NAME)
    for layer in range(2):
        inner(block_of(model, layer).attention).key.weight.data *= 60
    return model


def test_large_keys():
    """Weights of a mean that differ by more than a float32 can hold."""
    model = with_large_keys()
    frozen = tlens.freeze(model, some_tokens(2, 7))
    module = inner(block_of(model, 0).attention)
    k = mixed(module, "key", frozen.activation("blocks.0.time_mix.hook_in"))
    assert float((k.amax(1) - k.amin(1)).max()) > 200
    assert max(frozen.errors.values()) < 1e-12
    narrow = tlens.freeze(model.float(), some_tokens(2, 7))
    assert max(narrow.errors.values()) < 1e-4
    assert tlens.attribute(narrow, 7).gap.max() < 1e-4


def test_the_difference_with_large_keys():
    """Sums of two runs that differ by many orders of magnitude."""
    model = with_large_keys()
    with Wide():
        change = tlens.difference(*(tlens.freeze(model, some_tokens(2, 7, seed)) for seed in (0, 1)))
        assert max(change.errors.values()) < 1e-9
        expected = live(model, some_tokens(2, 7)) - live(model, some_tokens(2, 7, 1))
        assert close(tlens.attribute(change, 5).scores.sum(-1), expected)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_narrow_dtypes(frozen, dtype, allowed):
    exact = tlens.attribute(frozen, 7).scores
    narrow = tlens.attribute(tlens.freeze(tiny_model(NAME).to(dtype), frozen.tokens), 7).scores
    assert (narrow - exact).norm() <= allowed * exact.norm()


# ------------------------------------------------------------------------------------------ two runs


def live(model, tokens):
    with torch.no_grad():
        return model(tokens)[:, -1:, 5]


@pytest.fixture
def wide():
    with Wide():
        yield


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("models", [1, 2])
def test_the_difference_of_two_runs(models):
    a, b = tiny_model(NAME), tiny_model(NAME, seed=models - 1)
    tokens, others = some_tokens(2, 7), some_tokens(2, 7, seed=1)
    change = tlens.difference(tlens.freeze(a, tokens), tlens.freeze(b, others))
    result = tlens.attribute(change, 5)
    assert close(result.scores.sum(-1) + result.bias, live(a, tokens) - live(b, others))
    assert bool((result.bias != 0).any()) == (models == 2)
    back = tlens.attribute(tlens.difference(change.b, change.a), 5)
    assert close(back.scores, -result.scores)


@pytest.mark.usefixtures("wide")
def test_changed_weights_are_terms():
    a, b = tiny_model(NAME), tiny_model(NAME, seed=1)
    change = tlens.compare_models(a, b, some_tokens(), 5, by="component")
    assert set(change.names) == {"embed", *(f"L{n}.{p}" for n in (0, 1) for p in ("mixer", "norms")), "MLP0", "MLP1",
                                 "ln_final", "unembed"}  # fmt: skip
    assert close(change.scores.sum(-1) + change.remainder, live(b, some_tokens()) - live(a, some_tokens()))


def test_the_secant_of_equal_runs_is_the_jacobian():
    model = tiny_model(NAME)
    with Wide():  # autograd rounds to float32 with the keys
        frozen = tlens.freeze(model, some_tokens(2, 7))
        g = torch.randn_like(frozen.output)
        x = frozen.resid_pre(0).clone().requires_grad_(True)
        outputs = []
        hooks = [
            (frozen.points.blocks[0].resid_pre, lambda live, hook: x),
            (frozen.points.output, lambda live, hook: outputs.append(live)),
        ]
        model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
        (pulled,) = torch.autograd.grad(outputs[0], x, g)
        assert close(tlens.difference(frozen, frozen).operator().pull(g), pulled)


# ------------------------------------------------------------------------------------------ what is refused


def test_offloaded_weights_that_would_have_to_be_scaled_are_refused(tmp_path):
    model = tiny_model(NAME)
    offload(model.original_model, "cpu", tmp_path)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*halves its stream after every 1 blocks"):
        tlens.freeze(model, some_tokens())
    here, away = build_bridge("rwkv", rescale_every=0), build_bridge("rwkv", rescale_every=0)
    away.original_model.load_state_dict(here.original_model.state_dict())
    offload(away.original_model, "cpu", tmp_path)
    assert close(*(tlens.attribute(tlens.freeze(model, some_tokens()), 7).scores for model in (here, away)))


def test_padding_on_the_left_is_refused(model_named):
    model, tokens = model_named(NAME), some_tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*RwkvSelfAttention reads padding .*Pad on the"):
        tlens.freeze(model, tokens, attention_mask=mask)
    padded = tlens.freeze(model, tokens, attention_mask=mask.flip(1))
    alone = tlens.freeze(model, tokens[:1, :5])
    assert close(tlens.attribute(padded, 7).scores[0, 0, :5], tlens.attribute(alone, 7).scores[0, 0])


NEURONS = {
    "terms": lambda frozen, other: circuits.logit_attribution(frozen, 7, by="neuron"),
    "graph": lambda frozen, other: circuits.contribution_graph(frozen, 7, neurons=2),
    "patches": lambda frozen, other: circuits.patch_scores(frozen, other, 7, by="neuron"),
    "exact patches": lambda frozen, other: circuits.patch_scores(frozen, other, 7, by="neuron", method="difference"),
}


@pytest.mark.parametrize("ask", NEURONS)
def test_neurons_are_refused(frozen, ask):
    frozen, other = (tlens.freeze(frozen.model, tokens[None]) for tokens in frozen.tokens)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*channel_mix reads each token mixed with"):
        NEURONS[ask](frozen, other)


PARTS = {
    "time_decay": (nn.Parameter(torch.zeros(3)), "time_decay.*one number for each channel"),
    "time_mix_key": (nn.Parameter(torch.zeros(1, 1, 5)), "time_mix_key.*one number for each channel of the stream"),
    "time_shift": (nn.Identity(), "time_shift.*the one before it"),
    "key": (nn.Linear(16, 5, bias=False), "key.*gives 5 numbers, not the 16"),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_other_forms_are_named(frozen, part):
    module = copy.deepcopy(inner(block_of(frozen.model, 0).attention))
    other, message = PARTS[part]
    setattr(module, part, other)
    with pytest.raises(tlens.UnsupportedModelError, match=message):
        mixer_map(module, torch.zeros(1, 3, 16))
