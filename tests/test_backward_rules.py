"""relp, attnlrp, cp-lrp and gim: the peers' own numbers, the frozen operator, and what is given to no token."""

import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MIXED, close, some_tokens, tolerance
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import StableLmConfig, StableLmForCausalLM

import tensorlens_tl as tlens
from tensorlens_tl.core import ATTNLRP, FROZEN, GIM, RELP, Linearised, Rule, held, ruled
from tensorlens_tl.hooks import graph_of
from tensorlens_tl.passes.backward import rule_scores
from tensorlens_tl.testing import model_names, tiny_input, tiny_model

pytestmark = pytest.mark.numeric

GOLDEN = Path(__file__).parent / "golden"
LIVE = [("attnlrp", {}), ("gim", {}), ("relp", {"attention": "live"})]


@pytest.fixture(scope="module")
def peers():
    """The script that ran the peers."""
    spec = importlib.util.spec_from_file_location("backward_rules", GOLDEN / "backward_rules.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("case", sorted(np.load(GOLDEN / "backward_rules.npz").files))
def test_the_peers_numbers(case, peers):
    """lxt 2.1 and gim-explain 0.1.4, x · ∂ at the first block; norms of all but GPT-2 and BERT compute in float32."""
    of, family, *rule = case.split(".")
    method = "gim" if of == "gim" else {"attnLRP": "attnlrp", "cp_LRP": "cp-lrp"}[rule[0]]
    module = peers.with_weights(family)
    model = build_bridge_from_module(module, type(module).__name__, hf_config=module.config)
    mine = tlens.attribute(model, peers.tokens(), method=method, target=peers.TARGET).scores[0, 0]
    theirs = torch.from_numpy(np.load(GOLDEN / "backward_rules.npz")[case])
    allowed = 1e-8 if family in ("gpt2", "bert") else 1e-6  # lxt adds 1e-10 to z in φ(z)/z
    assert float((mine - theirs).abs().max()) <= allowed * float(theirs.abs().max())


HELD = {"frozen": FROZEN, "frozen-split": replace(RELP, softmax=held), "frozen-tangent": Rule(softmax=held)}
"""Rules that hold patterns are the frozen operator, by the names of its `rule`."""
LAYOUTS = (
    "hooked/ln", "hooked/sandwich", "hooked/sinks", "encoder/bert", "bridge/neox", "bridge/llama", "bridge/gemma2",
    "bridge/opt", "bridge/bert", "bridge/whitened", "bridge/bart",
)  # fmt: skip
"""One of each layout, and of each way to make a pattern; the others are in the whole run."""


@pytest.mark.parametrize(
    "model_name",
    [
        name if name in LAYOUTS else pytest.param(name, marks=pytest.mark.whole)
        for name in model_names()
        if not any(part in name for part in MIXED)
    ],
)
def test_nothing_through_the_scores_is_the_frozen_operator(model_name, model_named):
    """By autograd through the live model, and by pulling through the weights."""
    name, model = model_name, model_named(model_name)
    tokens, given = tiny_input(model)
    frozen = tlens.freeze(model, tokens, **given)
    for name_of_rule, rule in HELD.items():
        if name_of_rule == "frozen-tangent" and "gpt-oss" in name:
            continue  # its φ is written as z·σ(z), of which a rule holds σ as it holds a gate
        mine = rule_scores(frozen, rule, 5, 9)
        theirs = frozen.operator(rule=name_of_rule).target(5, 9)
        assert float((mine.scores - theirs.scores).abs().max()) <= tolerance(name) * float(theirs.scores.abs().max())
        assert torch.equal(mine.total, theirs.total)
        assert (mine.bias is not None) is rule.affine
        if rule.affine:
            assert close(mine.bias, theirs.bias, atol=tolerance(name))
            assert float(mine.gap.max()) <= 10 * tolerance(name)
    relp = tlens.attribute(frozen, method="relp", target=5, minus=9)
    paper = tlens.attribute(frozen, method="tensorlens", collapse="target", rule="frozen-split", target=5, minus=9)
    assert float((relp.scores - paper.scores).abs().max()) <= 1e-9 * float(paper.scores.abs().max())
    assert relp.additive
    assert float(relp.gap.max()) < tolerance(name) * 10
    cp, ratio = (tlens.attribute(frozen, method=method, target=5, minus=9) for method in ("cp-lrp", "tensorlens"))
    assert float((cp.scores - ratio.scores).abs().max()) <= 1e-9 * float(ratio.scores.abs().max())


def test_whole_shares_are_the_live_gradient():
    """With no norm, no MLP and whole shares nothing is changed."""
    name = "hooked/attn-only-no-norm"
    if name not in model_names():
        pytest.skip("a HookedTransformer, which TransformerLens 4 has no more")
    frozen = tlens.freeze(tiny_model(name), some_tokens())
    mine = rule_scores(frozen, Rule(), 5, query="all")
    theirs = tlens.attribute(frozen, method="input-x-gradient", target=5, query="all")
    assert torch.allclose(mine.scores, theirs.scores, rtol=1e-9, atol=1e-12)


def test_the_temperature_by_hand():
    """J(s/2)·g at the scores, also where softmax underflows or a token is masked."""
    scores = torch.tensor([[0.3, -1.2, 2.0, -torch.inf], [-800.0, 1.0, 0.5, 0.0]]).double().requires_grad_(True)
    gradient = torch.randn(2, 4, dtype=torch.float64)
    with Linearised(GIM):
        pattern = scores.softmax(-1)
    assert torch.equal(pattern, scores.detach().softmax(-1))
    (made,) = torch.autograd.grad(pattern, scores, gradient)
    soft = (scores.detach() / 2).softmax(-1)
    assert torch.allclose(made, soft * (gradient - (soft * gradient).sum(-1, keepdim=True)), atol=1e-12)


@pytest.mark.parametrize("rule", [ATTNLRP, GIM, RELP], ids=["attnlrp", "gim", "relp"])
@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/bert", "bridge/llama"])
def test_the_forward_pass_is_the_models_own(name, rule, model_named):
    """Bit for bit: a rule changes gradients alone, and leaves nothing on the model."""
    model = model_named(name)
    frozen = tlens.freeze(model, some_tokens())
    own = model(**frozen.inputs)
    forwards = [vars(module).get("forward") for module in model.modules()]
    leaf = frozen.resid_pre(0).requires_grad_(True)
    with ruled(model, rule):
        logits = model.run_with_hooks(
            **frozen.inputs, fwd_hooks=[(frozen.points.blocks[0].resid_pre, lambda stream, *, hook: leaf)]
        )
    assert torch.equal(logits, own)
    assert logits.requires_grad
    assert [vars(module).get("forward") for module in model.modules()] == forwards


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/bert", "bridge/llama"])
def test_attnlrp_conserves(name, model_named):
    """Scores, additive biases and the constant terms of softmax sum to the logit, each measured by autograd."""
    model = model_named(name)
    frozen = tlens.freeze(model, some_tokens(1))
    head = frozen.prediction_head("frozen-split")
    seen, arrived = {}, {}

    def look(name, tensor):
        if name not in seen:
            seen[name] = tensor.detach()
            tensor.register_hook(lambda g: arrived.__setitem__(name, g))

    sites = [block.heads for block in frozen.points.blocks]
    hooks = [(site.pattern, lambda P, *, hook, name=site.pattern: look(name, P)) for site in sites]
    leaf = frozen.resid_pre(0).requires_grad_(True)
    hooks.append((frozen.points.blocks[0].resid_pre, lambda stream, *, hook: leaf))
    with ruled(model, ATTNLRP):
        (y,) = graph_of(model, frozen.inputs, [frozen.points.output], hooks)
    W_U, b_U = frozen.view.unembedding
    vector = torch.zeros_like(y if head is None else head(y))
    vector[0, -1] = W_U[:, 5]
    at_output = vector if head is None else head.pull(vector)
    logit = float((y.detach() if head is None else head(y).detach()).mul(vector).sum()) + float(b_U[5])
    constant = logit - float((y.detach() * at_output).sum())  # of b_U and the prediction head
    within = {key: p for key, p in model.original_model.named_parameters() if "embed" not in key}
    found = dict(zip(within, torch.autograd.grad(y, [*within.values()], at_output, allow_unused=True), strict=True))
    biases = [key for key, gradient in found.items() if key.endswith("bias") and gradient is not None]
    constant += sum(float((within[key].detach() * found[key]).sum()) for key in biases)
    for site in sites:
        P, g = seen[site.pattern], arrived[site.pattern]
        s = P.clamp_min(1e-300).log()  # scores up to a constant of each row, which J takes to zero
        passed = P * (g - (P * g).sum(-1, keepdim=True))
        constant += float((P * g).sum() - (s * passed).sum())
    result = tlens.attribute(frozen, method="attnlrp", target=5)
    assert float(result.total) == pytest.approx(logit, rel=tolerance(name))
    given = float(result.scores.sum())
    allowed = 1e-9 if name == "bridge/gpt2" else 1e-6  # softmax of the others computes in float32
    assert given + constant == pytest.approx(logit, abs=allowed * float(result.scores.abs().sum()))
    off = abs(given - logit) / float(result.scores.abs().sum())
    assert float(result.gap) == pytest.approx(off, rel=1e-5)


def test_queries_prompts_and_memory(model_named):
    """Some queries, some prompts and small chunks give the same rows as all at once."""
    frozen = tlens.freeze(model_named("bridge/llama"), some_tokens())
    for method, options in LIVE:
        every = tlens.attribute(frozen, method=method, target=5, query="all", **options)
        few = tlens.attribute(frozen, method=method, target=5, query=[1, 4], memory="60KB", **options)
        assert torch.allclose(few.scores, every.scores[:, [1, 4]], rtol=1e-6, atol=1e-12)
        alone = tlens.freeze(frozen.model, some_tokens()[1:])
        one = tlens.attribute(alone, method=method, target=[[3, 4, 5, 6, 7, 8]], query="all", **options)
        assert torch.allclose(one.scores[:, 2], every.scores[1:, 2], rtol=1e-5, atol=1e-7)


def test_what_is_refused(model_named):
    frozen = tlens.freeze(model_named("bridge/mamba"), some_tokens())
    for method, options in LIVE:
        with pytest.raises(
            tlens.UnsupportedModelError, match=r"blocks\.0 of this .*: its mixer is no softmax attention"
        ):
            tlens.attribute(frozen, method=method, target=5, **options)
    frozen = tlens.freeze(model_named("bridge/gpt-oss"), some_tokens())
    with pytest.raises(tlens.UnsupportedModelError, match="attention sinks"):
        tlens.attribute(frozen, method="gim", target=5)
    with pytest.raises(tlens.InvalidInputError, match="'frozen' or 'live'"):
        tlens.attribute(frozen, method="relp", target=5, attention="half")


@pytest.mark.parametrize("method", ["attnlrp", "gim"])
def test_an_operation_that_no_rule_knows_is_refused(method, model_named, monkeypatch):
    """Its gradient would be the model's own, without a word; and nothing stays on the model."""
    model = model_named("bridge/gpt2")
    frozen = tlens.freeze(model, some_tokens())
    mlp = model.original_model.transformer.h[1].mlp
    own = type(mlp.dropout).forward
    monkeypatch.setattr(mlp.dropout, "forward", lambda x: torch.sinh(torch.asinh(own(mlp.dropout, x))))
    with pytest.raises(tlens.UnsupportedModelError, match=r"asinh in .*: no rule knows this operation"):
        tlens.attribute(frozen, method=method, target=5)
    assert not any("forward" in vars(module) for module in model.modules() if module is not mlp.dropout)


class Rounded(torch.autograd.Function):
    """A straight-through estimator, as quantised models have: it passes gradients on as if it did nothing."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_autograd_function_of_the_models_own_is_refused(model_named, monkeypatch):
    model = model_named("bridge/gpt2")
    frozen = tlens.freeze(model, some_tokens())
    monkeypatch.setattr(model.original_model.transformer.h[1].mlp.dropout, "forward", Rounded.apply)
    with pytest.raises(tlens.UnsupportedModelError, match="computes with Rounded, an autograd function of its own"):
        tlens.attribute(frozen, method="attnlrp", target=5)


def test_norms_of_queries_without_hook_points():
    """StableLM's have none on a Bridge: scales are known by what they compute. RelP by hand."""
    config = StableLmConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=24, pad_token_id=0, qk_layernorm=True,
        attn_implementation="eager",
    )  # fmt: skip
    inner, other = (torch.random.manual_seed(0) and StableLmForCausalLM(config).double().eval() for _ in range(2))
    frozen = tlens.freeze(build_bridge_from_module(inner, "StableLmForCausalLM", hf_config=config), some_tokens(1))
    leaf = other.get_input_embeddings()(frozen.inputs["input"]).detach().requires_grad_(True)

    def norm_by_hand(norm, args, out):
        centred = args[0] - args[0].mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt().detach()
        return centred / scale * norm.weight + (0 if norm.bias is None else norm.bias)

    def mlp_by_hand(mlp, args, out):
        gate, up = mlp.gate_proj(args[0]), mlp.up_proj(args[0])
        active = gate * gate.detach().sigmoid()
        return mlp.down_proj((active * up.detach() + active.detach() * up) / 2)

    norms = [module for module in other.modules() if isinstance(module, torch.nn.LayerNorm)]
    for norm in norms:
        norm.register_forward_hook(norm_by_hand)
    other.model.layers[0].mlp.register_forward_hook(mlp_by_hand)
    (gradient,) = torch.autograd.grad(other(inputs_embeds=leaf).logits[0, -1, 5], leaf)
    by_hand = (gradient * leaf).sum(-1).detach()
    mine = tlens.attribute(frozen, method="relp", target=5, attention="live").scores[:, 0]
    assert len(norms) == 2 + 2 * 2 + 1
    assert torch.allclose(mine, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "same"), [("bridge/gpt2", True), ("bridge/llama", False)])
def test_whose_numbers_relp_gives_by_default(name, same):
    """As its entry says: those of the frozen pull, where no MLP is gated."""
    assert tlens.get_method("relp").equal_to == "tensorlens (collapse=target), where no MLP is gated"
    frozen = tlens.freeze(tiny_model(name), torch.tensor([[3, 4, 5, 6]]))
    said, pulled = (tlens.attribute(frozen, 5, method=method).scores for method in ("relp", "tensorlens"))
    assert torch.allclose(said, pulled, atol=1e-12) is same
