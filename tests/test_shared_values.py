"""Keys and values that blocks take from an earlier one (Gemma 4), beside a literal forward pass.

What such a block writes is linear in two streams: its own, and the one at the block whose values it takes. The operator
carries both.
"""

from copy import deepcopy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import transformers
from conftest import Choices, bridge_of, close, hooks_left
from transformers.models.gemma4 import modeling_gemma4

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.core import RELP, held
from tensorlens_tl.passes.backward import rule_scores
from tensorlens_tl.testing import check_method
from tensorlens_tl.testing.models import HookedTransformer, randomise

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(HookedTransformer is not None, reason="TransformerLens 3.9 has no adapter for Gemma 4"),
]
TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 4,
    "global_head_dim": 8, "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 24,
    "sliding_window": 4, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 48,
    "enable_moe_block": False, "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0, "final_logit_softcapping": None,
}  # fmt: skip
SOURCES = [None, None, 0, 0, 1]
TOKENS = [[3, 4, 5, 6, 7, 8]]


def in_float64(norm, x):
    """Gemma 4's norm without its casts to float32, so that nothing below is rounded to that."""
    return norm._norm(x) * norm.weight if norm.with_scale else norm._norm(x)


@pytest.fixture(scope="module", autouse=True)
def no_casts():
    with patch.object(modeling_gemma4.Gemma4RMSNorm, "forward", in_float64):
        yield


@pytest.fixture(scope="module")
def module():
    """A model of Hugging Face."""
    config = transformers.Gemma4TextConfig(**TEXT)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = transformers.Gemma4ForCausalLM(config).double().eval()
    randomise(made)
    for layer in made.model.layers:
        layer.layer_scalar += 0.1 * torch.randn(1, dtype=torch.float64)
    return made


@pytest.fixture(scope="module")
def model(module):
    return bridge_of(module)


@pytest.fixture(scope="module")
def frozen(model):
    return tlens.freeze(model, TOKENS)


@pytest.fixture(scope="module")
def patterns(module):
    """By layer, from the model itself: the pattern, and the input of each token at this layer."""
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: inputs.append(given[1])) for layer in module.model.layers
    ]
    with torch.no_grad():
        attentions = module(torch.tensor(TOKENS), output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    return [(pattern[0], given[0]) for pattern, given in zip(attentions, inputs, strict=True)]


class Literal(Choices):
    """One prompt through the blocks, head by head; scales and gates are noted, or those of another pass.

    Attributes:
        patterns: by layer those of the model itself, and each token's input there.
        streams: what entered each block.
    """

    def __init__(self, module, patterns, given=None):
        super().__init__(given)
        self.layers = module.model.layers
        self.final = module.model.norm
        self.patterns = patterns
        self.streams = []

    def gelu(self, x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    def norm(self, norm, x):
        scaled = x / self.hold((x.square().mean(-1, keepdim=True) + norm.eps).sqrt())
        return scaled * norm.weight if norm.with_scale else scaled

    def __call__(self, x):
        """What the final norm gives of the stream that enters the first block."""
        values = {}
        for number, layer in enumerate(self.layers):
            self.streams.append(x)
            attention = layer.self_attn
            read = self.norm(layer.input_layernorm, x)
            if SOURCES[number] is None:
                by_head = attention.v_proj(read).unflatten(-1, (2, -1))
                values[number] = self.norm(attention.v_norm, by_head)
            taken = values[number if SOURCES[number] is None else SOURCES[number]]
            pattern, given = self.patterns[number]
            heads = [pattern[head] @ taken[:, head // 2] for head in range(4)]
            x = x + self.norm(layer.post_attention_layernorm, attention.o_proj(torch.cat(heads, dim=-1)))
            read = self.norm(layer.pre_feedforward_layernorm, x)
            gate = self.hold(self.gelu(layer.mlp.gate_proj(read)))
            written = layer.mlp.down_proj(gate * layer.mlp.up_proj(read))
            x = x + self.norm(layer.post_feedforward_layernorm, written)
            before = layer.per_layer_input_gate(x)
            written = layer.per_layer_projection(self.hold(self.gelu(before) / before) * before * given)
            x = (x + self.norm(layer.post_per_layer_input_norm, written)) * layer.layer_scalar
        self.streams.append(x)
        return self.norm(self.final, x)


@pytest.fixture(scope="module")
def plain(module, frozen, patterns):
    """The literal pass at the prompt's own stream."""
    literal = Literal(module, patterns)
    with torch.no_grad():
        output = literal(frozen.resid_pre(0)[0])
    assert close(frozen.output[0], output)
    return literal


def test_which_blocks_take_values_from_which(frozen, patterns):
    assert [block.values_layer for block in frozen.view.blocks] == SOURCES
    assert all(close(frozen.pattern(layer)[0], pattern) for layer, (pattern, _) in enumerate(patterns))


def test_the_operator_is_a_literal_forward_pass_with_its_choices_held(module, frozen, patterns, plain):
    x = frozen.resid_pre(0)[0]
    other = x + torch.randn_like(x)
    with torch.no_grad():
        expected = Literal(module, patterns, plain.noted)(other)
        constant = Literal(module, patterns, plain.noted)(torch.zeros_like(x))
    op = frozen.operator()
    assert close(op(other[None])[0], expected)
    assert close(op.push(other[None])[0], expected - constant)
    assert close(op.bias[0], constant)
    assert close(op.contributions().sum(2) + op.bias, frozen.output)


def test_the_pull_is_autograd_through_the_literal_pass(module, frozen, patterns, plain):
    x = frozen.resid_pre(0)[0].clone().requires_grad_(True)
    output = Literal(module, patterns, plain.noted)(x)
    op = frozen.operator()
    cotangents = torch.randn(3, *output.shape, dtype=output.dtype)
    gradients = [torch.autograd.grad(output, x, g, retain_graph=True)[0] for g in cotangents]
    assert close(op.pull(cotangents[:, None])[:, 0], torch.stack(gradients))
    rows = torch.zeros(16, 1, *output.shape, dtype=torch.float64)
    rows[:, 0, 3] = torch.eye(16, dtype=torch.float64)
    assert close(op.slice(query=3)[0], op.pull(rows)[:, 0])


def test_the_held_model_at_another_input_is_the_literal_pass(module, model, frozen, patterns, plain):
    x = frozen.resid_pre(0)[0]
    other = x + torch.randn_like(x)
    seen = {}
    put = ("blocks.0.hook_resid_pre", lambda live, hook: other[None])
    see = (frozen.points.output, lambda live, hook: seen.update(output=live))
    with torch.no_grad():
        model.run_with_hooks(**frozen.inputs, fwd_hooks=[put, *frozen.fwd_hooks(), see])
        assert close(seen["output"][0], Literal(module, patterns, plain.noted)(other))
    assert hooks_left(model) == 0


def test_a_target_is_the_models_own_logit(model, frozen):
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS))
    result = tlens.attribute(frozen, 7, query="all")
    assert close(result.scores.sum(-1) + result.bias, logits[..., 7])
    placed = frozen.operator().target(7, query="all", bias="position")
    assert close(placed.scores.sum(-1) + placed.bias, logits[..., 7])


def test_some_blocks_only(frozen, plain):
    """Values from a block before the range are constants; those from inside are carried."""
    first, last = frozen.operator(layers=range(1)), frozen.operator(layers=range(1, 5))
    streams = torch.stack(plain.streams)
    other = streams[1] + torch.randn_like(streams[1])
    assert close(first(frozen.resid_pre(0))[0], streams[1])
    from_block = frozen.operator(layers=range(1, 5), final_norm=False)
    seen = {}
    put = ("blocks.1.hook_resid_pre", lambda live, hook: other[None])
    see = (frozen.points.last_output, lambda live, hook: seen.update(output=live))
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[put, *frozen.fwd_hooks(), see])
    assert close(from_block(other[None]), seen["output"])
    assert close(last(frozen.resid_pre(1)), frozen.output)
    for layer in range(5):
        assert close(frozen.block(layer)(frozen.resid_pre(layer)), frozen.resid_pre(layer + 1))


def test_a_head_of_a_block_that_takes_values(frozen):
    """The live model, held, without heads of the last block, whose output weights do not read them."""
    op = frozen.operator(heads={4: [1, 2]}, mlp={0, 1, 2, 4})
    assert float(op.in_out(query="all").gap.max()) < 1e-9
    whole = frozen.operator()
    x = torch.randn_like(op.x)
    assert float((op.push(x) - whole.push(x)).norm() / whole.push(x).norm()) > 1e-3


METHODS = [
    ("tensorlens", {"target": 7}), ("tensorlens", {"collapse": "norm"}), ("input-x-gradient", {"target": 7}),
    ("integrated-gradients", {"target": 7, "steps": 3}), ("cp-lrp", {"target": 7}),
    ("relp", {"target": 7, "attention": "frozen"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_methods(method, options, model):
    assert not check_method(method, model, options=options)


def test_a_sampled_proof(model):
    frozen = tlens.freeze(model, TOKENS, verify="sample")
    assert max(frozen.errors.values()) < 1e-5


def test_rules_need_no_hook_points(frozen):
    """Patterns held, a rule is the frozen operator; attention live, it is not."""
    of_rule = rule_scores(frozen, replace(RELP, softmax=held), 7).scores
    theirs = frozen.operator(rule="frozen-split").target(7).scores
    assert float((of_rule - theirs).abs().max()) <= 1e-6 * float(theirs.abs().max())
    for method in ("attnlrp", "gim"):
        assert not torch.allclose(tlens.attribute(frozen, 7, method=method).scores, of_rule, rtol=1e-2)


def test_what_reads_one_stream_is_refused(model, frozen):
    shared = r"blocks\.2 of this .* takes keys and values of block 0 \(shared keys and values\)"
    refused = [
        lambda: tlens.difference(frozen, tlens.freeze(model, [[3, 4, 5, 6, 7, 9]])),
        lambda: circuits.logit_attribution(frozen, 7),
        lambda: circuits.total_effects(frozen, 7),
        lambda: circuits.contribution_graph(frozen, 7),
        lambda: circuits.qk_attribution(frozen, 1, 0, query=-1, key=1),
        lambda: circuits.spectral_norm_bound(frozen),
        lambda: circuits.patch_scores(frozen, frozen, 7),
        lambda: tlens.whiten(deepcopy(model)),
        lambda: tlens.registry.get_layer_map("attention")(frozen),
        *(
            lambda method=method: tlens.attribute(frozen, method=method)
            for method in ("decompx", "alti", "attention", "globenc", "ifr", "norm", "rollout", "value-zeroing")
        ),
    ]
    for ask in refused:
        with pytest.raises(tlens.UnsupportedModelError, match=shared):
            ask()
    with pytest.raises(tlens.UnsupportedModelError, match="takes the keys of block 0"):
        frozen.view.blocks[2].require_query_key()
    with pytest.raises(tlens.UnsupportedModelError, match="no product of W_V and W_O"):
        circuits.ov(model, 2, 0)
    assert hooks_left(model) == 0
