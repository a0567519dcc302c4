"""NemotronH, whose blocks are one sublayer each: a mixer, attention whose pattern no hook point shows, an MLP, experts.

Beside it stands a literal forward pass.
"""

import pytest
import torch
import transformers
from conftest import Choices, Wide, close, hooks_left
from torch import Tensor
from torch.nn.functional import softplus

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress
from tensorlens_tl.hooks import points
from tensorlens_tl.models import layouts
from tensorlens_tl.testing import check_method
from tensorlens_tl.testing.models import bridge_of

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]
MAMBA, ATTENTION, MLP, EXPERTS = "mamba", "attention", "mlp", "moe"
SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 12, "routed_scaling_factor": 1.5, "mlp_bias": True, "time_step_min": 0.6,
}  # fmt: skip
TOKENS = [[3, 4, 5, 6, 7, 8], [9, 31, 7, 22, 5, 14]]


@pytest.fixture(scope="module", autouse=True)
def no_casts():
    with Wide():
        yield


def built(*kinds, **changes):
    torch.manual_seed(0)
    config = transformers.NemotronHConfig(**SIZES | {"layers_block_type": list(kinds)} | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    module = transformers.NemotronHForCausalLM(config)
    for part in module.modules():
        if hasattr(part, "e_score_correction_bias"):
            part.e_score_correction_bias.normal_(0.0, 0.3)
    return bridge_of(module)


@pytest.fixture(scope="module")
def model():
    return built(MAMBA, ATTENTION, MLP, EXPERTS)


@pytest.fixture(scope="module")
def dense():
    return built(MLP, ATTENTION, MAMBA, MLP)


@pytest.fixture(scope="module")
def frozen(model):
    return tlens.freeze(model, TOKENS)


class Literal(Choices):
    """One prompt through all blocks; holds scales, patterns, gates and routes."""

    def __init__(self, model, given=None):
        super().__init__(given)
        self.inside = model.original_model.model

    def norm(self, module, x):
        module = original(module)
        return x / self.hold((x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()) * module.weight

    def mamba(self, module, x):
        """The recurrence, token by token and head by head."""
        gate, mixed, step = original(module.in_proj)(x).split([32, 56, 4], dim=-1)
        convolution = original(module.conv1d)
        padded = torch.cat([torch.zeros(3, 56, dtype=x.dtype), mixed])
        taps = torch.stack([padded[start : start + len(x)] for start in range(4)], -1)
        mixed = (taps * convolution.weight[:, 0]).sum(-1) + convolution.bias
        mixed = self.hold(mixed.sigmoid()) * mixed
        vectors = mixed[:, :32].unflatten(-1, (4, 8))
        B, C = (self.hold(part.unflatten(-1, (2, 6))) for part in (mixed[:, 32:44], mixed[:, 44:]))
        delta = self.hold(softplus(step + module.dt_bias).clamp(*module.time_step_limit))
        state = torch.zeros(4, 8, 6, dtype=x.dtype)
        rows = []
        for token in range(len(x)):
            heads = []
            for head in range(4):
                decay = (-delta[token, head] * module.A_log[head].exp()).exp()
                entering = delta[token, head] * torch.outer(vectors[token, head], B[token, head // 2])
                heads.append(decay * state[head] + entering)
            state = torch.stack(heads)
            read = torch.einsum("hds,hs->hd", state, C[token].repeat_interleave(2, 0))
            rows.append(read + module.D[:, None] * vectors[token])
        y = torch.stack(rows).flatten(1) * self.hold(gate * gate.sigmoid())
        norm = original(module.norm)
        groups = y.unflatten(-1, (2, 16))
        groups = groups / self.hold((groups.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt())
        return original(module.out_proj)(norm.weight * groups.flatten(1))

    def attention(self, module, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, 4)).transpose(0, 1) for part in (module.q_proj, module.k_proj, module.v_proj)
        )
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        later = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        pattern = self.hold((q @ k.mT / 2 + later).softmax(-1))
        return module.o_proj((pattern @ v).transpose(0, 1).flatten(1))

    def mlp(self, module, x):
        pre = module.up_proj(x)
        return module.down_proj(self.hold(pre.relu()) * pre)

    def routes(self, router, x):
        """The two experts of each token, chosen by one number and counted by another."""
        scores = (x @ router.weight.mT).sigmoid()
        chosen = (scores + router.e_score_correction_bias).topk(2).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * 1.5

    def experts(self, module, x):
        chosen, weights = self.hold(self.routes(module.gate, x))
        rows = []
        for token, vector in enumerate(x):
            written = torch.zeros_like(vector)
            for number, weight in zip(chosen[token], weights[token], strict=True):
                pre = module.experts.up_proj[number] @ vector
                written = written + weight * (module.experts.down_proj[number] @ (self.hold(pre.relu()) * pre))
            rows.append(written)
        return torch.stack(rows) + self.mlp(module.shared_experts, x)

    def __call__(self, x):
        kinds = {"Mamba2Mixer": self.mamba, "Attention": self.attention, "MLP": self.mlp, "MoE": self.experts}
        for layer in self.inside.layers:
            block = original(layer)
            module = original(block.mixer)
            x = x + kinds[type(module).__name__.removeprefix("NemotronH")](module, self.norm(block.norm, x))
        return self.norm(self.inside.norm_f, x)


def original(module):
    """What a Bridge put its hook points around."""
    return getattr(module, "original_component", module)


# ------------------------------------------------------------------ the operator


@pytest.mark.parametrize("which", ["model", "dense"])
def test_the_frozen_model_is_a_literal_forward_pass_with_its_choices_held(which, request):
    model = request.getfixturevalue(which)
    frozen = tlens.freeze(model, TOKENS)
    operator = frozen.operator()
    assert max(frozen.errors.values()) < 1e-9
    for row in range(2):
        plain = Literal(model)
        with torch.no_grad():
            output = plain(frozen.resid_pre(0)[row])
        assert close(frozen.output[row], output)
        other = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
        held = Literal(model, plain.noted)(other)
        x = operator.x.clone()
        x[row] = other.detach()
        assert close(operator(x)[row], held.detach())
        cotangent = torch.zeros_like(frozen.output)
        cotangent[row] = torch.randn(6, 16, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(held, other, cotangent[row])
        assert close(operator.pull(cotangent)[row], gradient)
        seen = {}
        enter = (frozen.capture.stream_names(0)[0], lambda live, hook, x=x: x)
        see = (frozen.points.output, lambda live, hook, seen=seen: seen.update(output=live))
        with torch.no_grad():
            model.run_with_hooks(**frozen.inputs, fwd_hooks=[enter, *frozen.fwd_hooks(), see])
        assert close(seen["output"][row], held.detach())
    assert hooks_left(model) == 0


def test_patterns_and_routes_are_those_of_the_literal_pass(model, frozen):
    for row in range(2):
        plain = Literal(model)
        with torch.no_grad():
            plain(frozen.resid_pre(0)[row])
        (pattern,) = (held for held in plain.noted if isinstance(held, Tensor) and held.shape == (4, 6, 6))
        assert close(frozen.pattern(1)[row], pattern)
        ((chosen, weights),) = (held for held in plain.noted if isinstance(held, tuple))
        routes = frozen.maps.routing(3)
        dense = torch.zeros(6, 4, dtype=torch.float64)
        assert close(dense.scatter(1, routes.index[row], routes.weight[row]), dense.scatter(1, chosen, weights))


def test_an_mlp_alone_follows_the_rule_of_activations(dense):
    """Its tangent is that of the squared ReLU, twice its ratio; what mixes positions follows no rule."""
    frozen = tlens.freeze(dense, TOKENS)
    x = frozen.maps.norm(0, "norm")(frozen.resid_pre(0))
    mlp = original(original(dense.blocks[0]).mixer)
    pre = original(mlp).up_proj(x)
    step = torch.randn_like(x)
    written = (2 * pre.relu() * (step @ original(mlp).up_proj.weight.mT)) @ original(mlp).down_proj.weight.mT
    assert close(frozen.maps.mlp(0, "frozen-tangent").push(step), written.detach())
    assert not frozen.maps.mixer(0).push(step).any()
    assert tlens.attribute(frozen, 7, method="tensorlens", rule="frozen-tangent").gap.max() < 1e-9


def test_terms_edges_and_paths_sum_to_the_logit(model, dense, frozen):
    own = model(**frozen.inputs).detach()[:, -1, 7]
    names = ["embed", "L0.mixer", *(f"L1H{head}" for head in range(4)), "MLP2"]
    for by in ("head", "head_token"):
        terms = circuits.logit_attribution(frozen, 7, by=by)
        assert close(terms.total[:, 0], own)
        assert float(terms.gap.max()) < 1e-9
        assert terms.names[: len(names)] == names
        assert {"L3E0", "L3.shared"} <= set(terms.names)
    assert close(circuits.head_map(frozen, 1, 2).target(7).sum((1, 2)), circuits.total_effects(frozen, 7)["L1H2"][:, 0])
    one = tlens.freeze(dense, TOKENS[:1])
    assert float(circuits.logit_attribution(one, 7, by="neuron").gap.max()) < 1e-9
    assert circuits.contribution_graph(one, 7, threshold=0, neurons=3).gap < 1e-9
    assert float(circuits.paths(one, 7, max_order=2).gap.max()) < 1e-9


def test_circuits_of_its_heads_are_read_from_weights(frozen):
    """Its attention has no positions: the softmax of ⟨q, k⟩ / 2 is the pattern."""
    x = frozen.maps.norm(1, "norm")(frozen.resid_pre(1))[0]
    circuit = circuits.qk(frozen, 1, 2)
    scores = (x @ circuit.A @ circuit.B @ x.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    assert close(scores.softmax(-1), frozen.pattern(1)[0, 2])
    circuit = circuits.ov(frozen, 1, 2)
    written = frozen.pattern(1)[0, 2] @ x @ circuit.A @ circuit.B
    assert close(written, circuits.head_map(frozen, 1, 2).output[0])


def test_a_difference_of_two_runs(dense):
    a = tlens.freeze(dense, TOKENS)
    b = tlens.freeze(dense, [row[::-1] for row in TOKENS])
    change = tlens.difference(a, b)
    result = tlens.attribute(change, 7)
    live = (dense(**a.inputs) - dense(**b.inputs)).detach()[:, -1, 7]
    assert close((result.scores.sum(-1) + result.bias)[:, 0], live)
    leaf = a.resid_pre(0).clone().requires_grad_(True)
    enter = (a.capture.stream_names(0)[0], lambda live, hook: leaf)
    logits = dense.run_with_hooks(**a.inputs, fwd_hooks=[enter])
    (gradient,) = torch.autograd.grad(logits[:, -1, 7].sum(), leaf)
    assert close(tlens.difference(a, a).operator().gradient(7)[:, 0], gradient)


def test_other_ways_to_freeze(model, frozen):
    expected = frozen.operator().in_out().scores
    _, cache = model.run_with_cache(**frozen.inputs)
    for options in ({"cache": cache}, {"store": "cpu"}, {"verify": "sample"}, {"verify": False}):
        assert close(tlens.freeze(model, TOKENS, **options).operator().in_out().scores, expected)
    recomputed = tlens.freeze(model, TOKENS, patterns="recompute")
    assert close(recomputed.pattern(1), frozen.pattern(1))
    assert close(recomputed.operator().in_out().scores, expected)
    together = tlens.freeze(model, [TOKENS[0], TOKENS[1][:4]])
    alone = tlens.freeze(model, [TOKENS[1][:4]]).operator().target(7).scores[0, 0]
    assert close(together.operator().target(7).scores[1, 0, :4], alone)


METHODS = [
    ("tensorlens", {"target": 7}), ("decompx", {}), ("input-x-gradient", {"target": 7}), ("cp-lrp", {"target": 7}),
    ("relp", {"target": 7}), ("leave-one-out", {"target": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.few(2)
def test_methods(method, options, model):
    assert not check_method(method, model, options=options)


# ------------------------------------------------------------------ what is refused


NEEDS_HEADS = {
    "pattern": lambda frozen: frozen.pattern(0),
    "heads": lambda frozen: frozen.operator(heads={0: [0]}),
    "head_map": lambda frozen: circuits.head_map(frozen, 0, 0),
    "ov": lambda frozen: circuits.ov(frozen, 0, 0),
    "qk": lambda frozen: circuits.qk(frozen, 0, 0),
    "rollout": lambda frozen: tlens.attribute(frozen, method="rollout"),
    "chefer": lambda frozen: tlens.attribute(frozen, 7, method="chefer"),
    "compress": lambda frozen: compress.plan(frozen.model),
}


@pytest.mark.parametrize("question", NEEDS_HEADS)
def test_what_needs_heads_is_refused_in_a_block_that_is_an_mlp_alone(dense, question):
    frozen = tlens.freeze(dense, TOKENS[:1])
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*has an MLP alone .*no attention"):
        NEEDS_HEADS[question](frozen)
    with pytest.raises(tlens.InvalidInputError, match="layer 0 has an MLP alone"):
        tlens.implicit_attention(frozen, 0)
    assert torch.equal(tlens.implicit_attention(frozen, 1), frozen.pattern(1))


def test_what_needs_hooks_inside_is_refused(frozen):
    for method in ("attnlrp", "gim"):
        with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*its mixer is no softmax attention"):
            tlens.attribute(frozen, 7, method=method)
    with pytest.raises(tlens.UnsupportedModelError, match=r"nothing inside L0\.mixer"):
        circuits.total_effects(frozen, 7, live=True)


WRONG_PATTERNS = {
    "heads in another order": lambda output: output[1].flip(1),
    "keys in another order": lambda output: output[1].roll(1, -1),
    "nothing but the token itself": lambda output: torch.eye(6).to(output[1]).expand_as(output[1]),
}


@pytest.mark.parametrize("which", WRONG_PATTERNS)
def test_another_pattern_is_refused_by_the_proof(model, read_anew, monkeypatch, which):
    known = points.pattern_reader
    monkeypatch.setattr(points, "pattern_reader", lambda attention: known(attention) and WRONG_PATTERNS[which])
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .*misses its own output"):
        tlens.freeze(model, TOKENS)


@pytest.mark.parametrize("kind", [ATTENTION, MLP, EXPERTS])
def test_what_computes_something_else_is_refused_by_the_proof(kind, monkeypatch):
    kinds = (MAMBA, ATTENTION, MLP, EXPERTS)
    model = built(*kinds)
    layer = kinds.index(kind)
    module = original(original(model.blocks[layer]).mixer)
    inner = original(module)
    forward = inner.forward

    def another(*args, **kwargs):
        output = forward(*args, **kwargs)
        return (1.1 * output[0], *output[1:]) if isinstance(output, tuple) else 1.1 * output

    monkeypatch.setattr(inner, "forward", another)
    with pytest.raises(tlens.UnsupportedModelError, match=rf"blocks\.{layer} "):
        tlens.freeze(model, TOKENS)


def test_a_block_that_no_layout_has_is_refused(dense, monkeypatch):
    others = tuple(layout for layout in layouts.LAYOUTS if layout.mlp.before != "norm")
    monkeypatch.setattr(layouts, "LAYOUTS", others)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*misses its own output"):
        tlens.freeze(dense, TOKENS)


def test_fused_attention_and_latent_experts_are_refused():
    model = built(MAMBA, ATTENTION)
    model.original_model.config._attn_implementation = "sdpa"
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1\.mixer\.pattern .*attn_implementation='eager'"):
        tlens.freeze(model, TOKENS)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .*experts read a latent"):
        tlens.freeze(built(ATTENTION, EXPERTS, moe_latent_size=8), TOKENS)
