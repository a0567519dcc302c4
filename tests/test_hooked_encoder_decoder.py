"""TransformerLens' own encoder–decoder (HookedEncoderDecoder, 3.9), beside a literal forward pass of a T5."""

import pytest
import torch
from conftest import Choices, close, hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.models import BlockView
from tensorlens_tl.testing import tiny_input, tiny_model
from tensorlens_tl.testing.models import HookedEncoderDecoder

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(HookedEncoderDecoder is None, reason="TransformerLens 4 has no HookedEncoderDecoder"),
]
NAMES = ["encoder-decoder/tied", "encoder-decoder/gated"]


class Literal(Choices):
    """One prompt through a T5, head by head; scales, patterns and gates are noted, or those of another pass."""

    def __init__(self, model, given=None):
        super().__init__(given)
        self.model = model

    def norm(self, module, x):
        return x / self.hold((x.square().mean(-1, keepdim=True) + module.eps).sqrt()) * module.w

    def attend(self, attn, read, keys, bias=None, causal=False):
        out = attn.b_O.clone()
        for head in range(len(attn.W_Q)):
            q = read @ attn.W_Q[head] + attn.b_Q[head]
            k = keys @ attn.W_K[head] + attn.b_K[head]
            v = keys @ attn.W_V[head] + attn.b_V[head]
            scores = q @ k.T
            if bias is not None:
                scores = scores + bias[head]
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            out = out + self.hold(scores.softmax(-1)) @ v @ attn.W_O[head]
        return out

    def mlp(self, mlp, x):
        if self.model.cfg.gated_mlp:
            gate = torch.nn.functional.gelu(x @ mlp.W_gate, approximate="tanh")
            return (self.hold(gate) * (x @ mlp.W_in) + mlp.b_in) @ mlp.W_out + mlp.b_out
        before = x @ mlp.W_in + mlp.b_in
        return (self.hold((before > 0).to(x)) * before) @ mlp.W_out + mlp.b_out

    def bias(self, stack, length):
        table = stack[0].attn
        positions = torch.arange(length)
        buckets = table._relative_position_bucket(
            positions - positions[:, None],
            bidirectional=stack is self.model.encoder,
            num_buckets=self.model.cfg.relative_attention_num_buckets,
            max_distance=self.model.cfg.relative_attention_max_distance,
        )
        return table.rel_pos_bias.weight[buckets].permute(2, 0, 1)

    def __call__(self, x, y):
        """The logits of a decoder that reads y, where the encoder reads x."""
        model = self.model
        bias = self.bias(model.encoder, len(x))
        for block in model.encoder:
            read = self.norm(block.ln1, x)
            x = x + self.attend(block.attn, read, read, bias)
            x = x + self.mlp(block.mlp, self.norm(block.ln2, x))
        x = self.norm(model.encoder_final_ln, x)
        bias = self.bias(model.decoder, len(y))
        for block in model.decoder:
            read = self.norm(block.ln1, y)
            y = y + self.attend(block.attn, read, read, bias, causal=True)
            y = y + self.attend(block.cross_attn, self.norm(block.ln2, y), x)
            y = y + self.mlp(block.mlp, self.norm(block.ln3, y))
        y = self.norm(model.decoder_final_ln, y)
        if model.cfg.tie_word_embeddings:
            y = y * model.cfg.d_model**-0.5
        return y @ model.unembed.W_U + model.unembed.b_U


@pytest.mark.parametrize("name", NAMES)
def test_the_frozen_model_is_a_literal_forward_pass_with_its_choices_held(name, model_named):
    model = model_named(name)
    tokens, options = tiny_input(model, 1)
    frozen = tlens.freeze(model, tokens, **options)
    streams = frozen.resid_pre(0)[0].split(list(frozen.sides))
    plain = Literal(model)
    with torch.no_grad():
        logits = plain(*streams)
        assert close(model(**frozen.inputs)[0], logits)
        others = [stream + torch.randn_like(stream) for stream in streams]
        expected = Literal(model, plain.noted)(*others)
    operator = frozen.operator()
    for query, token in ((-1, 5), (-3, 7)):
        target = operator.target(token, query=query)
        assert close(target.total[0, 0], logits[query, token])
    output = operator(torch.cat(others)[None])[0, frozen.sides[0] :]
    assert close(output @ model.unembed.W_U + model.unembed.b_U, expected)
    assert hooks_left(model) == 0


def test_padding_of_either_side_changes_nothing(model_named):
    """Also in float64, where the model's own integer mask would make every pattern of its encoder zero."""
    model = model_named(NAMES[1])
    whole = tlens.freeze(model, [[3, 4, 5, 6, 7], [8, 9, 10]], decoder_input_ids=[[1, 4], [1, 5, 6]])
    alone = tlens.freeze(model, [[8, 9, 10]], decoder_input_ids=[[1, 5, 6]])
    both, one = (tlens.attribute(frozen, 7, query=-1) for frozen in (whole, alone))
    assert close(both.scores[1:, :, [0, 1, 2, 5, 6, 7]], one.scores)
    assert not both.scores[1, :, 3:5].any()
    left = torch.tensor([[1, 1], [0, 1]])
    with pytest.raises(tlens.UnsupportedModelError, match="padd"):
        tlens.freeze(
            model, [[3, 4], [5, 6]], decoder_input_ids=[[1, 4], [0, 1]], decoder_attention_mask=left
        ).operator()


def test_an_embedding_in_another_dtype():
    """The mask is multiplied by the smallest number of the config's dtype, which is none of float32."""
    model = tiny_model("encoder-decoder/gated")
    model.embed.float()
    tokens, written = some_tokens(), some_tokens(2, 4, seed=1)
    frozen = tlens.freeze(model, tokens, decoder_input_ids=written)
    with torch.no_grad():
        live = model(tokens, written)[:, -1:, 5]
    assert close(tlens.attribute(frozen, 5).total, live)


def test_a_gain_that_cross_attention_does_not_read_through_is_caught_by_the_proof(monkeypatch):
    monkeypatch.setattr(BlockView, "_of_encoder", lambda self, weight: weight)
    model = tiny_model(NAMES[0])
    tokens, options = tiny_input(model)
    with pytest.raises(tlens.UnsupportedModelError, match=r"decoder\.0"):
        tlens.freeze(model, tokens, **options)
