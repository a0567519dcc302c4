"""relp, attnlrp, cp-lrp and gim: the peers' own numbers, the frozen operator, and what is given to no token."""

import importlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import some_tokens, tolerance
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import StableLmConfig, StableLmForCausalLM

import tensorlens_tl as tlens
from tensorlens_tl.hooks import BackwardRule, RuleHooks, graph_of
from tensorlens_tl.passes.backward import rule_scores
from tensorlens_tl.testing import model_names, tiny_input, tiny_model

pytestmark = pytest.mark.numeric

GOLDEN = Path(__file__).parent / "golden"
ATTNLRP = BackwardRule("split", values=0.5, scores=0.25)
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


REFUSED = (
    "mamba", "jamba", "falcon-h1", "lfm2", "qwen3-next", "rwkv", "deepseek", "afmoe", "bitnet", "jetmoe", "llama4",
)  # fmt: skip
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
        if not any(part in name for part in REFUSED)
    ],
)
def test_nothing_through_the_scores_is_the_frozen_operator(model_name, model_named):
    """By autograd through the live model, and by pulling through the weights."""
    name, model = model_name, model_named(model_name)
    tokens, given = tiny_input(model)
    frozen = tlens.freeze(model, tokens, **given)
    for rule in ("split", "tangent"):
        mine = rule_scores(frozen, BackwardRule(rule, values=1.0, scores=0.0), 5, 9)
        theirs = frozen.operator(activation=rule).target(5, 9)
        assert float((mine.scores - theirs.scores).abs().max()) <= tolerance(name) * float(theirs.scores.abs().max())
        assert torch.equal(mine.total, theirs.total)
    relp = tlens.attribute(frozen, method="relp", target=5, minus=9)
    paper = tlens.attribute(frozen, method="tensorlens", collapse="target", activation="split", target=5, minus=9)
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
    mine = rule_scores(frozen, BackwardRule("ratio", values=1.0, scores=1.0), 5, query="all")
    theirs = tlens.attribute(frozen, method="input-x-gradient", target=5, query="all")
    assert torch.allclose(mine.scores, theirs.scores, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 3.0])
def test_the_temperature_by_hand(temperature):
    """J(s/T)·g at the scores, also where softmax underflows or a token is masked."""
    scores = torch.tensor([[0.3, -1.2, 2.0, -torch.inf], [-800.0, 1.0, 0.5, 0.0]]).double().requires_grad_(True)
    gradient = torch.randn(2, 4, dtype=torch.float64)
    pattern = scores.softmax(-1)
    hooks = RuleHooks(BackwardRule("split", 1.0, 0.25, temperature), [], [])
    pattern.register_hook(lambda g: hooks._pattern(pattern.detach(), g))
    (made,) = torch.autograd.grad(pattern, scores, gradient)
    soft = (scores.detach() / temperature).softmax(-1)
    assert torch.allclose(made, 0.25 * soft * (gradient - (soft * gradient).sum(-1, keepdim=True)), atol=1e-12)


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/bert", "bridge/llama"])
def test_the_forward_pass_is_the_models_own(name, model_named):
    """Bit for bit: hooks of a rule look at activations and change gradients."""
    model = model_named(name)
    frozen = tlens.freeze(model, some_tokens())
    hooks = RuleHooks(ATTNLRP, [block.heads for block in frozen.points.blocks], []).hooks
    assert torch.equal(model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks), model(**frozen.inputs))


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/bert", "bridge/llama"])
def test_attnlrp_conserves(name, model_named):
    """Scores, additive biases and the constant terms of softmax sum to the logit, each measured by autograd."""
    model = model_named(name)
    frozen = tlens.freeze(model, some_tokens(1))
    head = frozen.prediction_head("split")
    seen, arrived = {}, {}

    def look(name, tensor):
        if name not in seen:
            seen[name] = tensor.detach()
            tensor.register_hook(lambda g: arrived.__setitem__(name, g))

    sites = [block.heads for block in frozen.points.blocks]
    hooks = [(site.pattern, lambda P, *, hook, name=site.pattern: look(name, P)) for site in sites]
    hooks += [*frozen.fwd_hooks(patterns=False, activation="split"), *RuleHooks(ATTNLRP, sites, []).hooks]
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
        constant += 0.5 * float((P * g).sum() - (s * passed).sum())
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
    for name, what in (("bridge/mamba", "mixer is held as a whole"), ("bridge/deepseek-v3", "attn is held as a whole")):
        frozen = tlens.freeze(model_named(name), some_tokens())
        for method, options in LIVE:
            with pytest.raises(tlens.UnsupportedModelError, match=rf"blocks\.0 of this .*{what}"):
                tlens.attribute(frozen, method=method, target=5, **options)
    frozen = tlens.freeze(model_named("bridge/gpt-oss"), some_tokens())
    with pytest.raises(tlens.UnsupportedModelError, match="attention sinks"):
        tlens.attribute(frozen, method="gim", target=5)
    with pytest.raises(tlens.InvalidInputError, match="'frozen' or 'live'"):
        tlens.attribute(frozen, method="relp", target=5, attention="half")


def test_a_product_that_is_not_reached_is_refused(model_named):
    """Keys in place of values: they are computed with, but z is not made of them."""
    model = model_named("bridge/gpt2")
    frozen = tlens.freeze(model, some_tokens())
    site = frozen.points.blocks[1].heads
    wrong = type(site)(site.pattern, site.value.replace("hook_v", "hook_k"), site.z)
    hooks = RuleHooks(ATTNLRP, [wrong], [])
    logits = model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks.hooks)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1\.attn\.hook_k .*only shows a copy"):
        hooks.prove([logits], "a model", 1e-6)
    unseen = RuleHooks(ATTNLRP, [site], [])
    with pytest.raises(tlens.UnsupportedModelError, match="only shows a copy"):
        unseen.check("a model", 1e-6)


def test_a_norm_of_queries_that_has_no_hook_point_is_refused():
    """StableLM's has none on a Bridge, and its scale would stay live unseen: no proof of P·v shows it."""
    torch.manual_seed(0)
    config = StableLmConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=24, pad_token_id=0, qk_layernorm=True,
        attn_implementation="eager",
    )  # fmt: skip
    inner = StableLmForCausalLM(config).double().eval()
    model = build_bridge_from_module(inner, "StableLmForCausalLM", hf_config=config)
    frozen = tlens.freeze(model, some_tokens())
    for method, options in (("attnlrp", {}), ("gim", {}), ("relp", {"attention": "live"})):
        with pytest.raises(tlens.UnsupportedModelError, match="a norm inside attention without a hook point"):
            tlens.attribute(frozen, method=method, target=5, **options)
    assert tlens.attribute(frozen, method="relp", target=5).gap.max() < 1e-6


@pytest.mark.parametrize(("name", "same"), [("bridge/gpt2", True), ("bridge/llama", False)])
def test_whose_numbers_relp_gives_by_default(name, same):
    """As its entry says: those of the frozen pull, where no MLP is gated."""
    assert tlens.get_method("relp").equal_to == "tensorlens (collapse=target), where no MLP is gated"
    frozen = tlens.freeze(tiny_model(name), torch.tensor([[3, 4, 5, 6]]))
    said, pulled = (tlens.attribute(frozen, 5, method=method).scores for method in ("relp", "tensorlens"))
    assert torch.allclose(said, pulled, atol=1e-12) is same
