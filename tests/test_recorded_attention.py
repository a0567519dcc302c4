"""A difference through attention whose scores no weights explain: the live module says how they come about."""

import copy

import pytest
import torch
import transformers
from conftest import hooks_left

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing.models import _GROUPED, CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH, bridge_of

pytestmark = [pytest.mark.numeric, pytest.mark.few(3)]

SHAPES = {
    "Bloom": {"hidden_size": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "vocab_size": VOCABULARY},  # adds the stream
    "Cohere": _GROUPED,  # turns neighbouring channels, by tables that are laid out in another way
    "Mpt": {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": CONTEXT, "vocab_size": VOCABULARY},
    "NanoChat": _GROUPED,  # norms queries and keys after turning them
}
TOLERANCE = 1e-6
"""These modules take softmax in float32."""


def bridge(name):
    config = getattr(transformers, f"{name}Config")(**SHAPES[name])
    config._attn_implementation = "eager"
    return bridge_of(getattr(transformers, f"{name}ForCausalLM")(config))


def passes(model, **options):
    tokens = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    return [tlens.freeze(model, prompts, **options) for prompts in (tokens, tokens.flip(1))]


@pytest.mark.parametrize("name", SHAPES)
def test_everything_sums_to_the_change(name):
    model = bridge(name)
    difference = tlens.difference(*passes(model))
    assert difference.maps.calls, "its scores are read from weights: take another family"
    assert max(difference.errors.values()) < TOLERANCE
    attribution = tlens.attribute(difference, 5)
    assert float(attribution.gap.max()) < TOLERANCE
    effects = circuits.logit_attribution(difference, 5, by="head")
    torch.testing.assert_close(effects.total, attribution.total.reshape(effects.total.shape))
    assert float(effects.gap.max()) < TOLERANCE
    assert float(circuits.routes(difference, 5).gap.max()) < TOLERANCE
    assert not hooks_left(model)


@pytest.mark.parametrize("name", SHAPES)
def test_equal_runs_have_the_gradients_of_the_live_model(name):
    model = bridge(name)
    frozen = passes(model)[0]
    op = tlens.difference(frozen, frozen).operator()
    with torch.enable_grad():
        x = frozen.resid_pre(0).detach().clone().requires_grad_()
        seen = []
        model.run_with_hooks(
            **frozen.inputs,
            fwd_hooks=[
                (frozen.points.blocks[0].resid_pre, lambda live, hook: x),
                (frozen.points.output, lambda live, hook: seen.append(live)),
            ],
        )
        cotangent = torch.randn(seen[0].shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
        (pulled,) = torch.autograd.grad(seen[0], x, cotangent)
    torch.testing.assert_close(op.pull(cotangent), pulled, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
def test_heads_add_up(name):
    difference = tlens.difference(*passes(bridge(name)))
    x = difference.resid_pre(0)
    each = [difference.maps.mixer(0, heads=[head])(x) for head in range(HEADS)]
    torch.testing.assert_close(sum(each), difference.maps.mixer(0)(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "Bloom"])
def test_heads_of_two_models_add_up(name):
    """What a changed output matrix adds is each head's by what that head gives."""
    model = bridge(name)
    difference = tlens.difference(passes(model)[0], passes(changed(model))[1])
    x = difference.resid_pre(0)
    each = [difference.maps.mixer(0, heads=[head])(x) for head in range(HEADS)]
    torch.testing.assert_close(sum(each), difference.maps.mixer(0)(x), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
def test_a_node_has_the_sum_of_its_edges(name):
    first, second = passes(bridge(name))
    nodes = circuits.patch_scores(first, second, 5, method="difference")
    edges = circuits.edge_scores(first, second, 5, method="difference")
    by_source = dict(zip(edges.sources, edges.scores.sum(2).T, strict=True))
    for node in nodes.names:
        torch.testing.assert_close(nodes[node][:, 0], by_source[node], rtol=TOLERANCE, atol=TOLERANCE)


def changed(model):
    """A copy whose every weight of attention is another."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "attn" in name or "attention" in name:
                weight += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return other


@pytest.mark.parametrize("name", SHAPES)
def test_what_changed_weights_of_two_models_add_is_told_by_their_names(name):
    model = bridge(name)
    tokens = passes(model)[0].tokens
    ways = ("matrix", "component", "head", "head_matrix")
    terms = {by: circuits.compare_models(model, changed(model), tokens, 5, by=by) for by in ways}
    for found in terms.values():
        assert float(found.gap.max()) < TOLERANCE
    names = set(terms["matrix"].names)
    assert {f"L{layer}.W_{letter}" for layer in range(LAYERS) for letter in "QKVO"} <= names
    known = {"prompt", "embed", "unembed", "W_E", "W_U"}
    assert all(name in known or name.startswith(("L", "MLP", "W_", "b_")) for name in names), names
    by_head = terms["head"]
    assert {f"L{layer}H{head}" for layer in range(LAYERS) for head in range(HEADS)} <= set(by_head.names)


@pytest.mark.parametrize("name", SHAPES)
def test_one_changed_matrix_is_all_of_the_change(name):
    model = bridge(name)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].attn.o.weight.mul_(1.1)
    tokens = passes(model)[0].tokens
    terms = circuits.compare_models(model, other, tokens, 5, by="matrix")
    torch.testing.assert_close(terms["L1.W_O"], terms.total.expand_as(terms["L1.W_O"]), rtol=TOLERANCE, atol=TOLERANCE)
    by_head = circuits.compare_models(model, other, tokens, 5, by="head")
    torch.testing.assert_close(by_head.scores.sum(-1), by_head.total, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
def test_a_mean_embedding_is_a_baseline(name):
    frozen = passes(bridge(name))[0]
    attribution = tlens.attribute(frozen, 5, method="difference", baseline="mean")
    assert float(attribution.gap.max()) < TOLERANCE


def test_an_attached_pass_is_refused():
    first, second = passes(bridge("Mpt"))
    with first.attached(), pytest.raises(tlens.FrozenModelError):
        tlens.difference(first, second)
