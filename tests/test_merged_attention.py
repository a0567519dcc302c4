"""Self- and cross-attention in one softmax (T5Gemma 2), beside a literal forward pass of its two stacks."""

from dataclasses import replace

import pytest
import torch
import transformers
from conftest import Choices, Wide, bridge_of, close, hooks_left

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.core import RELP, held
from tensorlens_tl.passes.backward import rule_scores
from tensorlens_tl.testing import check_method
from tensorlens_tl.testing.models import HookedTransformer, randomise

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(HookedTransformer is not None, reason="TransformerLens 3.9 has no adapter for T5Gemma 2"),
]
TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 24, "query_pre_attn_scalar": 4,
    "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    "dropout_rate": 0.0, "pad_token_id": 0,
}  # fmt: skip
PICTURES = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "hidden_size": 8,
            "image_size": 8, "patch_size": 4}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def no_casts():
    with Wide():
        yield


@pytest.fixture(scope="module")
def module():
    """A model of Hugging Face."""
    encoder = transformers.T5Gemma2EncoderConfig(
        text_config=transformers.T5Gemma2TextConfig(**TEXT),
        vision_config=transformers.SiglipVisionConfig(**PICTURES),
        mm_tokens_per_image=4, image_token_index=47, boi_token_index=45, eoi_token_index=46,
    )  # fmt: skip
    decoder = transformers.T5Gemma2DecoderConfig(**TEXT)
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=decoder, image_token_index=47)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = transformers.T5Gemma2ForConditionalGeneration(config).double().eval()
    randomise(made)
    return made


@pytest.fixture(scope="module")
def model(module):
    return bridge_of(module)


@pytest.fixture(scope="module")
def frozen(model):
    return tlens.freeze(model, [[3, 4, 5, 6, 7, 8]], decoder_input_ids=[[1, 9, 10, 11]])


class Literal(Choices):
    """One prompt through both stacks, head by head; scales, patterns and gates are noted, or those of another pass.

    Attributes:
        patterns: those of the model itself, by layer: the encoder's, the decoder's and those from the decoder to the
            encoder.
    """

    def __init__(self, module, patterns, given=None):
        super().__init__(given)
        self.encoder = module.model.encoder.text_model
        self.decoder = module.model.decoder
        self.patterns = patterns

    def norm(self, module, x):
        return x / self.hold((x.square().mean(-1, keepdim=True) + module.eps).sqrt()) * (1 + module.weight)

    def layer(self, layer, x, keys, pattern):
        """One layer at stream x, whose attention mixes the values of several lists of keys by one pattern."""
        attention = layer.self_attn
        read = self.norm(layer.pre_self_attn_layernorm, x)
        values = torch.cat([attention.v_proj(vectors) for vectors in (read, *keys)])
        heads = [pattern[head] @ values[:, 4 * (head // 2) : 4 * (head // 2) + 4] for head in range(4)]
        written = attention.o_proj(torch.cat(heads, dim=-1))
        x = x + self.norm(layer.post_self_attn_layernorm, written)
        read = self.norm(layer.pre_feedforward_layernorm, x)
        gate = torch.nn.functional.gelu(layer.mlp.gate_proj(read), approximate="tanh")
        hidden = self.hold(gate) * layer.mlp.up_proj(read)
        return x + self.norm(layer.post_feedforward_layernorm, layer.mlp.down_proj(hidden))

    def __call__(self, x, y):
        """What the decoder gives of stream y where the encoder's stream is x."""
        own, decoder, cross = self.patterns
        for layer, pattern in zip(self.encoder.layers, own, strict=True):
            x = self.layer(layer, x, (), pattern)
        x = self.norm(self.encoder.norm, x)
        for layer, *patterns in zip(self.decoder.layers, decoder, cross, strict=True):
            y = self.layer(layer, y, (x,), torch.cat(patterns, dim=-1))
        return self.norm(self.decoder.norm, y)


@pytest.fixture(scope="module")
def patterns(module, frozen):
    names = {"input_ids": frozen.inputs["input"], "decoder_input_ids": frozen.inputs["decoder_input_ids"]}
    with torch.no_grad():
        outputs = module(**names, output_attentions=True)
    every = (outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions)
    return [[pattern[0] for pattern in stack] for stack in every]


def test_one_softmax_over_the_keys_of_both_sides(frozen, patterns):
    _, decoder, cross = patterns
    for layer in (2, 3):
        assert close(frozen.pattern(layer)[0], decoder[layer - 2])
        assert close(frozen.cross_pattern(layer)[0], cross[layer - 2])
        both = frozen.pattern(layer).sum(-1) + frozen.cross_pattern(layer).sum(-1)
        assert close(both, torch.ones_like(both))
        assert float(frozen.cross_pattern(layer).sum(-1).mean()) > 0.1
        assert frozen.layouts[layer].cross is not None


def test_the_frozen_model_is_a_literal_forward_pass_with_its_choices_held(model, module, frozen, patterns):
    streams = frozen.resid_pre(0)[0].split(list(frozen.sides))
    plain = Literal(module, patterns)
    with torch.no_grad():
        output = plain(*streams)
        assert close(frozen.output[0, frozen.sides[0] :], output)
        others = [stream + torch.randn_like(stream) for stream in streams]
        expected = Literal(module, patterns, plain.noted)(*others)
    assert close(frozen.operator()(torch.cat(others)[None])[0, frozen.sides[0] :], expected)
    with torch.no_grad():
        put = [
            (name, lambda live, hook, stream=stream: stream[None])
            for name, stream in zip(frozen.capture.stream_names(0), others, strict=True)
        ]
        seen = {}
        see = (frozen.points.output, lambda live, hook: seen.update(output=live))
        model.run_with_hooks(**frozen.inputs, fwd_hooks=[*put, *frozen.fwd_hooks(), see])
    assert close(seen["output"][0], expected)
    assert hooks_left(model) == 0


def test_the_pull_and_the_bias_are_those_of_the_literal_pass(module, frozen, patterns):
    operator = frozen.operator()
    plain = Literal(module, patterns)
    with torch.no_grad():
        plain(*frozen.resid_pre(0)[0].split(list(frozen.sides)))
    x = frozen.resid_pre(0)[0].clone().requires_grad_(True)
    output = Literal(module, patterns, plain.noted)(*x.split(list(frozen.sides)))
    cotangent = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, x, cotangent)
    whole = torch.cat([torch.zeros_like(x[: frozen.sides[0]]), cotangent])
    assert close(operator.pull(whole[None])[0], gradient)
    with torch.no_grad():
        zero = Literal(module, patterns, plain.noted)(*torch.zeros_like(x).split(list(frozen.sides)))
    assert float(zero.abs().max()) > 0.1
    assert close(operator.bias.expand_as(frozen.output)[0, frozen.sides[0] :], zero)


def test_terms_of_heads_of_either_kind_are_their_share_of_the_sum(frozen):
    terms = circuits.logit_attribution(frozen, 7, by="head")
    assert float(terms.gap.max()) < 1e-9
    names = set(terms.names)
    assert {"L0H0", "L2H0", "L2.cross.H0", "L3H3", "L3.cross.H3"} <= names
    assert "L2.cross.b_O" not in names
    assert "L2.b_O" in names
    effects = circuits.total_effects(frozen, 7, by="head")
    assert "L3.cross.H1" in effects.names


METHODS = [
    ("tensorlens", {"target": 7}), ("decompx", {"bias": "token"}), ("input-x-gradient", {"target": 7}),
    ("integrated-gradients", {"target": 7, "steps": 3}), ("cp-lrp", {"target": 7}),
    ("relp", {"target": 7, "attention": "frozen"}), ("leave-one-out", {"target": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_methods(method, options, model):
    assert not check_method(method, model, options=options)


def test_prompts_of_different_length(model, frozen):
    together = tlens.freeze(
        model, [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7]], decoder_input_ids=[[1, 9, 10, 11], [1, 9, 10]]
    )
    alone = frozen.operator().target(7)
    assert close(together.operator().target(7).scores[0], alone.scores[0])
    short = tlens.freeze(model, [[3, 4, 5, 6, 7]], decoder_input_ids=[[1, 9, 10]]).operator().target(7)
    assert close(together.operator().target(7).scores[1][:, [0, 1, 2, 3, 4, 6, 7, 8]], short.scores[0])


def test_rules_need_no_hook_points(frozen):
    """Patterns held, a rule is the frozen operator; attention live, it is not."""
    of_rule = rule_scores(frozen, replace(RELP, softmax=held), 7).scores
    theirs = frozen.operator(rule="frozen-split").target(7).scores
    assert float((of_rule - theirs).abs().max()) <= 1e-9 * float(theirs.abs().max())
    assert not torch.allclose(tlens.attribute(frozen, 7, method="attnlrp").scores, of_rule, rtol=1e-2)
    with pytest.raises(tlens.UnsupportedModelError, match="rows do not sum to 1"):
        tlens.attribute(frozen, 7, method="gim")


def test_what_needs_its_scores_or_a_hook_at_one_of_them_is_refused(model, frozen):
    other = tlens.freeze(model, [[3, 4, 5, 6, 7, 9]], decoder_input_ids=[[1, 9, 10, 11]])
    one_softmax = r"decoder_blocks\.0 .*self- and cross-attention share one softmax"
    with pytest.raises(tlens.UnsupportedModelError, match=one_softmax):
        tlens.difference(frozen, other)
    with pytest.raises(tlens.UnsupportedModelError, match=one_softmax):
        circuits.qk(frozen, 2, 0, offset=1)
    with pytest.raises(tlens.UnsupportedModelError, match=one_softmax):
        circuits.qk(frozen, 2, 0, offset=1, cross=True)
    for where in ({"key": 7}, {"key": 1, "cross": True}):
        with pytest.raises(tlens.UnsupportedModelError, match=one_softmax):
            circuits.qk_attribution(frozen, 2, 0, **where)
    with pytest.raises(tlens.UnsupportedModelError, match="one output of self- and cross-attention"):
        circuits.total_effects(frozen, 7, by="head", live=True)
    for method in ("rollout", "alti", "chefer", "value-zeroing"):
        with pytest.raises(tlens.UnsupportedModelError, match=one_softmax):
            tlens.attribute(frozen, method=method, target=7 if method == "chefer" else None)
    assert hooks_left(model) == 0
