"""Mixtures of experts: where tokens are sent, what each expert is worth, and what is refused or warned of."""

import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import close, hooks_left, some_tokens, tolerance
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models import BlockView
from tensorlens_tl.passes.target import resolve_target
from tensorlens_tl.testing import model_names, tiny_model
from tensorlens_tl.testing.models import randomise

NAMES = ["bridge/mixtral", "bridge/qwen2-moe", "bridge/gpt-oss", "bridge/llama4", "bridge/granite-moe"]
LAYER = {"bridge/qwen2-moe": 1, "bridge/llama4": 1}


def layer_of(model, layer):
    """The Hugging Face module of a layer's experts and what stands beside them."""
    body = model.original_model.model.layers[layer]
    found = next(m for m in body.modules() if hasattr(m, "experts"))
    return getattr(found, "original_component", found)


def frozen_logit(frozen, hooks=()):
    seen = {}

    def see(live, *, hook):
        seen["x"] = live.detach()

    end = (frozen.points.unembed_in, see)
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*frozen.fwd_hooks(), *hooks, end])
    asked = resolve_target(frozen, 5, 7)
    return ((seen["x"][:, -1:] * asked.vectors).sum(-1) + asked.constant)[:, 0]


def by_hand(name, layer, number, x, weight):
    """One expert's output from its stored weights, as its family computes it."""
    experts = getattr(layer.experts, "original_component", layer.experts)
    first, down = experts.gate_up_proj[number].detach(), experts.down_proj[number].detach()
    if name == "bridge/gpt-oss":
        made = x @ first + experts.gate_up_proj_bias[number].detach()
        gate, up = made[..., ::2].clamp(max=experts.limit), made[..., 1::2].clamp(-experts.limit, experts.limit)
        out = ((up + 1) * gate * torch.sigmoid(experts.alpha * gate)) @ down + experts.down_proj_bias[number].detach()
    elif name == "bridge/llama4":
        gate, up = (weight * x @ first).chunk(2, dim=-1)
        return (up * torch.nn.functional.silu(gate)) @ down
    else:
        gate, up = (x @ first.T).chunk(2, dim=-1)
        out = (up * torch.nn.functional.silu(gate)) @ down.T
    return weight * out


@pytest.mark.parametrize("name", NAMES)
def test_one_expert_is_worth_what_the_frozen_model_loses_without_it(name, model_named):
    model, at = model_named(name), LAYER.get(name, 0)
    frozen = tlens.freeze(model, some_tokens())
    effects, direct = (made(frozen, 5, 7, by="head") for made in (circuits.total_effects, circuits.logit_attribution))
    assert float(direct.gap.max()) < tolerance(name)
    routes, ends = frozen.routing(at), frozen.points.blocks[at].mlp
    everything = frozen_logit(frozen)
    chosen = routes.index[routes.weight != 0].unique().tolist()
    assert {f"L{at}E{number}" for number in chosen} <= set(effects.names)
    for number in chosen[:2]:
        share = (routes.weight * (routes.index == number)).sum(-1, keepdim=True)
        made = by_hand(name, layer_of(model, at), number, frozen.activation(ends.into), share) * (share != 0)
        lost = everything - frozen_logit(frozen, [(ends.out, lambda out, *, hook, made=made: out - made)])
        assert close(effects[f"L{at}E{number}"][:, 0], lost, atol=tolerance(name))
    together = sum(effects[node] for node in effects.names if node.startswith((f"L{at}E", f"L{at}.shared")))
    assert close(circuits.total_effects(frozen, 5, 7, by="component")[f"MLP{at}"], together, 1e-9)
    graph = circuits.contribution_graph(tlens.freeze(model, some_tokens(1)), 5, threshold=0)
    assert graph.gap < tolerance(name)
    assert graph.nodes["name"].str.startswith(f"L{at}E").any()
    assert hooks_left(model) == 0


def test_routing_is_the_routers_own_choice(model_named):
    model = model_named("bridge/mixtral")
    tokens, mask = some_tokens(), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    frozen = tlens.freeze(model, tokens, attention_mask=mask)
    for layer in range(2):
        x = frozen.activation(frozen.points.blocks[layer].mlp.into)
        router = layer_of(model, layer).gate
        logits = x @ getattr(router, "original_component", router).weight.detach().T
        best = logits.topk(2, dim=-1)
        made = frozen.routing(layer)
        assert torch.equal(made.index, best.indices)
        assert close(made.weight.double(), best.values.softmax(-1), 1e-6)
        assert made.index.shape == made.weight.shape == (2, 6, 2)


def test_routing_of_a_layer_without_experts_is_refused(model_named):
    frozen = tlens.freeze(model_named("bridge/qwen2-moe"), some_tokens())
    assert frozen.routing(1).index.shape == (2, 6, 2)
    for ask in (frozen.routing, frozen.maps.experts):
        with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .* has no experts"):
            ask(0)
    unproved = tlens.freeze(frozen.model, some_tokens(), verify=False)  # but for the first block of each kind
    assert {"blocks.0", "blocks.1"} <= set(unproved.errors)
    with pytest.raises(tlens.InvalidInputError, match="layer=2"):
        frozen.routing(2)


@pytest.mark.parametrize("name", NAMES)
def test_what_an_expert_is_worth_to_the_live_model(name):
    """Its weights zeroed by hand, patterns, norms and the routing of later layers respond."""
    model, tokens = tiny_model(name), some_tokens(2, 6)
    frozen = tlens.freeze(model, tokens)
    effects = circuits.total_effects(frozen, 5, live=True, memory="200KB")
    assert effects.names == circuits.total_effects(frozen, 5).names

    def lost(weights):
        """What the logit loses with some weights zero, before any soft cap."""
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        without = circuits.total_effects(tlens.freeze(model, tokens), 5).total
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
        return (effects.total - without)[:, 0]

    for layer in range(LAYER.get(name, 0), 2):
        module = layer_of(model, layer)
        experts = getattr(module.experts, "original_component", module.experts)
        for number in range(2):
            weights = [experts.down_proj.data[number]]
            weights += [experts.down_proj_bias.data[number]] if hasattr(experts, "down_proj_bias") else []
            if f"L{layer}E{number}" in effects.names:
                assert close(effects[f"L{layer}E{number}"][:, 0], lost(weights), tolerance(name))
        shared = next(
            (m for n, m in module.named_children() if n.startswith("shared_expert") and "gate" not in n), None
        )
        if shared is not None:
            down = getattr(shared, "original_component", shared).down_proj
            weights = [getattr(down, "original_component", down).weight.data]
            assert close(effects[f"L{layer}.shared"][:, 0], lost(weights), tolerance(name))
    whole = circuits.total_effects(frozen, 5, live=True, by="component")
    assert whole.names == ["L0.attn", "MLP0", "L1.attn", "MLP1"]
    assert hooks_left(model) == 0


def test_a_shared_expert_is_worth_the_same_in_compatibility_mode():
    """There a Bridge computes it without calling the module of Hugging Face."""
    model, tokens = tiny_model("bridge/llama4"), some_tokens(2, 6)
    plain = circuits.total_effects(tlens.freeze(model, tokens), 5, 7, live=True)
    model.enable_compatibility_mode(disable_warnings=True)
    effects = circuits.total_effects(tlens.freeze(model, tokens), 5, 7, live=True)
    assert "L1.shared" in effects.names
    assert close(effects["L1.shared"], plain["L1.shared"], tolerance("llama4"))
    assert hooks_left(model) == 0


def test_experts_that_tie_are_told():
    """Two experts with the same router weights: which of them is chosen is arbitrary, and said so."""
    model = tiny_model("bridge/mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tlens.freeze(model, some_tokens(1))
    router = layer_of(model, 1).gate
    weight = getattr(router, "original_component", router).weight
    with torch.no_grad():
        weight[:] = weight[:1]
    with pytest.warns(UserWarning, match=r"blocks\.1\.mlp .*6 tokens \(first: prompt 0, position 0\).* is arbitrary"):
        frozen = tlens.freeze(model, some_tokens(1))
    assert max(frozen.errors.values()) < tolerance("mixtral")
    assert not any(name in frozen.capture.activations for name in frozen.points.routers)
    mask = torch.tensor([[1] * 4 + [0] * 2])
    with pytest.warns(UserWarning, match=r"4 tokens"):
        tlens.freeze(model, some_tokens(1), attention_mask=mask)


@pytest.mark.parametrize("name", [n for n in ("bridge/mixtral", "hooked/experts") if n in model_names()])
def test_a_misread_expert_is_caught_by_the_proof(name, monkeypatch):
    right = BlockView.mlp.func

    def swapped(self):
        read = right(self)
        others = {0: 1, 1: 0}
        return replace(read, expert=lambda number: read.expert(others.get(number, number)))

    monkeypatch.setattr(BlockView, "mlp", property(swapped))
    with pytest.raises(
        tlens.UnsupportedModelError, match=r"blocks\.0 .*first part that differs is blocks\.0\.hook_mlp_out"
    ):
        tlens.freeze(tiny_model(name), some_tokens())


def test_fused_experts_in_single_precision():
    """As people load them: float32, with whatever kernel transformers chooses for experts."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=48, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=24,
    )  # fmt: skip
    module = transformers.MixtralForCausalLM._from_config(config, attn_implementation="eager").eval()
    randomise(module)
    model = build_bridge_from_module(module, "MixtralForCausalLM", hf_config=config)
    frozen = tlens.freeze(model, some_tokens(), store="cpu")
    assert max(frozen.errors.values()) < 1e-5
    _, cache = model.run_with_cache(some_tokens())
    again = tlens.freeze(model, some_tokens(), cache=cache)
    assert close(again.operator().in_out().scores, frozen.operator().in_out().scores, 1e-5)
