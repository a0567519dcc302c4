"""A HookedTransformer's own mixture of experts (TransformerLens 3.9), beside a literal forward pass of it."""

import pytest
import torch
from conftest import close, hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing import tiny_model
from tensorlens_tl.testing.models import HOOKED, HookedTransformer, build_hooked

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(HookedTransformer is None, reason="TransformerLens 4 has no HookedTransformer"),
]
NAMES = ["hooked/experts", "hooked/gpt-oss"]
ALPHA = 1.702
LIMIT = 7.0


def chosen(name, mlp, x):
    """The experts of one token and what each counts, as the family computes them."""
    logits = mlp.W_gate(x)
    if name == "hooked/gpt-oss":
        best = logits.topk(2)
        return best.indices.tolist(), best.values.float().softmax(-1).double()
    best = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(2)
    return best.indices.tolist(), (best.values / best.values.sum()).double()


def halves(name, expert, x):
    """What an expert's gate is after its activation, and what that multiplies."""
    gate, up = expert.W_gate(x), expert.W_in(x)
    if name == "hooked/gpt-oss":
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(ALPHA * gate), up.clamp(-LIMIT, LIMIT) + 1
    return torch.nn.functional.silu(gate), up


def literal(name, model, tokens, held=None, start=None):
    """A forward pass token by token; with what another one held, scales, patterns, routes and gates are those.

    Returns the final norm's output, what it held, and the stream that entered.
    """
    given = iter(held or [])
    values = []

    def hold(value):
        values.append(value if held is None else next(given))
        return values[-1]

    def norm(module, x):
        return x / hold((x.square().mean(-1, keepdim=True) + module.eps).sqrt()) * module.w

    x = model.embed.W_E[tokens] + model.pos_embed.W_pos[: len(tokens)] if start is None else start
    entered = x
    for block in model.blocks:
        read, attn = norm(block.ln1, x), block.attn
        out = attn.b_O.clone()
        for head in range(len(attn.W_Q)):
            q, k, v = (read @ getattr(attn, f"W_{p}")[head] + getattr(attn, f"b_{p}")[head] for p in "QKV")
            scores = q @ k.T / attn.attn_scale
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            if name == "hooked/gpt-oss":
                scores = torch.cat([scores, attn.sinks[head].expand(len(scores), 1)], dim=1)
            out = out + hold(scores.softmax(-1)[:, : len(tokens)]) @ v @ attn.W_O[head]
        x = x + out
        read = norm(block.ln2, x)
        rows = []
        for row in read:
            numbers, weights = hold(chosen(name, block.mlp, row))
            total = torch.zeros_like(row)
            for number, weight in zip(numbers, weights, strict=True):
                expert = block.mlp.experts[number]
                gate, up = halves(name, expert, row)
                total = total + weight * expert.W_out(hold(gate) * up)
            rows.append(total)
        x = x + torch.stack(rows)
    return norm(model.ln_final, x), values, entered


@pytest.mark.parametrize("name", NAMES)
def test_the_frozen_model_is_a_literal_forward_pass_with_its_choices_held(name, model_named):
    model, tokens = model_named(name), some_tokens(1)
    frozen = tlens.freeze(model, tokens)
    with torch.no_grad():
        output, held, start = literal(name, model, tokens[0])
        assert close(frozen.output[0], output)
        other = start + torch.randn_like(start)
        expected, _, _ = literal(name, model, tokens[0], held, other)
    assert close(frozen.operator()(other[None])[0], expected)
    for layer, block in enumerate(model.blocks):
        for position, row in enumerate(frozen.activation(frozen.points.blocks[layer].mlp.into)[0]):
            numbers, weights = chosen(name, block.mlp, row)
            assert frozen.routing(layer).index[0, position].tolist() == numbers
            assert close(frozen.routing(layer).weight[0, position].double(), weights, 1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", tlens.FROZEN_RULES)
def test_a_single_prompts_hooks_serve_any_batch(name, activation, model_named):
    """Copies of a prompt lie packed in another order than the prompt by itself."""
    model, tokens = model_named(name), some_tokens(1)
    frozen = tlens.freeze(model, tokens)
    operator = frozen.operator(rule=activation)
    streams = operator.x + torch.randn(3, *operator.x.shape[1:], dtype=torch.float64)
    enters = (frozen.points.blocks[0].resid_pre, lambda x, hook: streams)
    seen = []
    ends = (frozen.points.output, lambda x, hook: seen.append(x))
    with torch.no_grad():
        hooks = [enters, *frozen.fwd_hooks(rule=activation), ends]
        model.run_with_hooks(tokens.expand(3, -1), fwd_hooks=hooks)
    expected = torch.cat([operator(stream[None]) for stream in streams])
    assert close(seen[0], expected)
    assert hooks_left(model) == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_an_expert_is_worth_to_the_live_model(name):
    """Its output weights zeroed by hand; where the tokens of later layers are sent responds."""
    model, tokens = tiny_model(name), some_tokens()
    frozen = tlens.freeze(model, tokens)
    effects = circuits.total_effects(frozen, 5, live=True, memory="200KB")
    assert effects.names == circuits.total_effects(frozen, 5).names

    def lost(modules):
        weights = [weight for module in modules for weight in module.parameters()]
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.zero_()
            without = model(tokens)[:, -1, 5]
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
            return model(tokens)[:, -1, 5] - without

    whole = circuits.total_effects(frozen, 5, live=True, by="component")
    assert whole.names == ["L0.attn", "MLP0", "L1.attn", "MLP1"]
    for layer, block in enumerate(model.blocks):
        outs = [expert.W_out for expert in block.mlp.experts]
        for number, out in enumerate(outs):
            if f"L{layer}E{number}" in effects.names:
                assert close(effects[f"L{layer}E{number}"][:, 0], lost([out]))
        assert close(whole[f"MLP{layer}"][:, 0], lost(outs))
    assert hooks_left(model) == 0


@pytest.mark.parametrize("changes", [{"norm_topk_prob": False}, {"use_normalization_before_and_after": True}])
def test_weights_that_do_not_sum_to_one_and_a_norm_after_the_experts(changes):
    torch.manual_seed(0)
    frozen = tlens.freeze(build_hooked(**{**HOOKED["experts"], **changes}), some_tokens())
    assert max(frozen.errors.values()) < 1e-9
    shares = frozen.routing(0).weight.sum(-1)
    assert bool((shares < 0.999).any()) is ("norm_topk_prob" in changes)
    operator = frozen.operator()
    other = operator.x + torch.randn_like(operator.x)
    seen = []
    enters = (frozen.points.blocks[0].resid_pre, lambda x, hook: other)
    ends = (frozen.points.output, lambda x, hook: seen.append(x))
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[enters, *frozen.fwd_hooks(), ends])
    assert close(operator(other), seen[0])
