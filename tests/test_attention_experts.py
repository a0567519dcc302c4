"""Attention whose heads are chosen as experts are (JetMoe), against what a block computes, token by token."""

import pytest
import torch
from conftest import close, some_tokens
from torch.nn.functional import silu

import tensorlens_tl as tlens
from tensorlens_tl import circuits

pytestmark = pytest.mark.numeric

NAME = "bridge/jetmoe"


@pytest.fixture
def frozen(model_named):
    return tlens.freeze(model_named(NAME), some_tokens(2, 6))


def inside(module):
    return getattr(module, "original_component", module)


def choices(router, x):
    """The experts of one token, the largest number first, and their softmax."""
    numbers = (inside(router).layer.weight @ x).float()
    weights, index = numbers.topk(2)
    return list(zip(index.tolist(), weights.softmax(0).double(), strict=True))


def attended(module, pattern, at, x):
    """Pattern of each choice, values of the token's heads, and the output of the expert that was chosen."""
    experts = inside(module.experts)
    values = (x @ inside(module.kv_proj).weight[8:].T).unflatten(-1, (2, 4))
    out = experts.bias.expand_as(x).clone()
    for prompt in range(len(x)):
        for query in range(x.shape[1]):
            for choice, (expert, weight) in enumerate(choices(experts.router, at[prompt, query])):
                gathered = [pattern[prompt, 2 * choice + kv, query] @ values[prompt, :, kv] for kv in range(2)]
                out[prompt, query] += weight * (experts.output_linear.weight[expert] @ torch.cat(gathered))
    return out


def processed(module, at, x):
    """Every chosen expert's gated MLP, its gate held."""
    out = module.bias.expand_as(x).clone()
    for place in torch.cartesian_prod(torch.arange(len(x)), torch.arange(x.shape[1])).tolist():
        token = tuple(place)
        for expert, weight in choices(module.router, at[token]):
            gate, _ = (module.input_linear.weight[expert] @ at[token]).chunk(2)
            _, linear = (module.input_linear.weight[expert] @ x[token]).chunk(2)
            out[token] += weight * (module.output_linear.weight[expert] @ (silu(gate) * linear))
    return out


@torch.no_grad()
def test_the_block_is_what_its_weights_compute(frozen):
    """With patterns, scales, gates and choices held, at another stream; weights of choices are float32 in the model."""
    layer = inside(frozen.model.original_model.model.layers[0])
    pattern = frozen.activation("blocks.0.attn.hook_pattern")
    other = torch.randn_like(frozen.resid_pre(0))
    reads = frozen.activation("blocks.0.attn.hook_in")
    normed = other / frozen.activation("blocks.0.ln1.hook_scale") * inside(layer.input_layernorm).weight
    middle = other + attended(inside(layer.self_attention), pattern, reads, normed)
    reads = frozen.activation("blocks.0.mlp.hook_in")
    normed = middle / frozen.activation("blocks.0.ln2.hook_scale") * inside(layer.post_attention_layernorm).weight
    expected = middle + processed(inside(layer.mlp), reads, normed)
    assert close(frozen.maps.block_map(0)(other), expected, 1e-6)


def test_a_head_is_an_experts(frozen):
    """Rows of its pattern sum to what the expert counts for the query, in both key-value heads."""
    shares = frozen.maps.pattern(0).sum(-1).unflatten(1, (2, 3))
    assert close(shares[:, 0], shares[:, 1], 1e-6)  # its softmax is in float32
    assert close(shares[:, 0].sum(1), torch.ones(2, 6, dtype=torch.float64), 1e-6)
    assert close(frozen.pattern(0).sum(-1), torch.ones(2, 4, 6, dtype=torch.float64), 1e-6)
    assert bool(((shares[:, 0] > 0).sum(1) == 2).all())
    layer = inside(frozen.model.original_model.model.layers[0])
    router = inside(inside(layer.self_attention).experts).router
    chosen = choices(router, frozen.activation("blocks.0.attn.hook_in")[1, 4].detach())
    assert all(close(shares[1, 0, expert, 4], weight.detach(), 1e-6) for expert, weight in chosen)


def test_terms_name_heads_and_experts(frozen):
    terms = circuits.logit_attribution(frozen, 7, by="head", query=[2, -1])
    assert float(terms.gap.max()) < 1e-6
    assert {"L0H5", "L1H0", "L0E2"} <= set(terms.names)
    silent = [name for name in terms.names if name.startswith("L1H") and not float(terms[name].abs().max())]
    assert silent or bool((frozen.maps.pattern(1)[:, :, [2, 5]].sum((0, 2, 3)) > 0).all())


@torch.no_grad()
def test_one_head_is_worth_what_the_frozen_model_loses_without_it(frozen):
    seen = []
    read = frozen.maps.attention(0)
    alone = frozen.maps.attention(0, heads=[4])(frozen.activation("blocks.0.attn.hook_in"))
    bias = read.stages[-1].bias
    lost = (frozen.points.blocks[0].attention.out, lambda live, *, hook: live - (alone - bias))
    end = (frozen.points.unembed_in, lambda live, *, hook: seen.append(live[:, -1] @ frozen.view.unembedding[0][:, 7]))
    for hooks in ([], [lost]):
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*frozen.fwd_hooks(), *hooks, end])
    effects = circuits.total_effects(frozen, 7)
    assert close(effects["L0H4"][:, 0], seen[0] - seen[1], 1e-6)


@pytest.mark.parametrize("method", ["rollout", "norm", "ifr", "decompx"])
def test_methods_over_heads_read_the_pattern_of_experts(frozen, method):
    assert frozen.pattern(0).shape[1] == 4
    assert bool(tlens.attribute(frozen, method=method).scores.isfinite().all())


def test_what_is_not_read_is_refused_by_name(frozen, model_named):
    with pytest.raises(tlens.UnsupportedModelError, match="a mixture of attention heads"):
        tlens.difference(frozen, tlens.freeze(model_named(NAME), some_tokens(2, 6, 1)))
    with pytest.raises(tlens.UnsupportedModelError, match=r"nothing inside L0\.attn"):
        circuits.total_effects(frozen, 7, live=True, by="head")
    with pytest.raises(tlens.UnsupportedModelError, match="a choice of experts stands inside its attention"):
        frozen.view.blocks[0].require_plain_attention()
