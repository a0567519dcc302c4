"""Hugging Face models and tokenizers as people bring them: frozen, or refused with a message that says what to do."""

import pytest
import torch
import transformers
from conftest import some_tokens
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens
from tensorlens_tl.testing.models import randomise

STREAM = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = {**STREAM, "vocab_size": 48, "max_position_embeddings": 24}
GPT2 = {"vocab_size": 48, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
OPT = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24,
       "max_position_embeddings": 24, "word_embed_proj_dim": 16}  # fmt: skip

RWKV = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2}
T5 = {"vocab_size": 48, "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 4, "d_kv": 4}


def made(architecture, attention="eager", **options):
    """A random Hugging Face model with every bias set."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    module = kind._from_config(kind.config_class(**options), attn_implementation=attention).double().eval()
    randomise(module)
    return module


def wrapped(module, tokenizer=None):
    return build_bridge_from_module(module, type(module).__name__, hf_config=module.config, tokenizer=tokenizer)


# ------------------------------------------------------------------------------------------ what is refused


def test_a_mixer_under_another_name_is_refused():
    model = wrapped(made("RwkvForCausalLM", **RWKV))
    parts = model.blocks[0]._modules
    parts["another"] = parts.pop("time_mix")
    message = r"blocks\.0 .*has pre_ln, ln1, ln2, channel_mix, another: no attention, and no mixer under a name that is"
    with pytest.raises(tlens.UnsupportedModelError, match=message):
        tlens.freeze(model, some_tokens())


def test_an_encoder_decoder_without_its_second_input():
    with pytest.raises(tlens.InvalidInputError, match=r"decoder_input_ids: .*T5For.* is an encoder–decoder; pass"):
        tlens.freeze(wrapped(made("T5ForConditionalGeneration", **T5)), some_tokens())


def test_logits_that_the_model_scales_are_read():
    """Cohere multiplies them by a constant of its config."""
    model = wrapped(made("CohereForCausalLM", **GROUPED, logit_scale=0.25))
    own, asked = model(some_tokens()), tlens.freeze(model, some_tokens()).operator().target(5)
    assert torch.allclose(asked.total[:, 0], own[:, -1, 5], rtol=1e-9)
    assert asked.gap.max() < 1e-6


def test_logits_scaled_after_the_unembedding_are_noticed():
    """Then a token's logit is not W_U·x + b_U, also when the pass came from a cache and nothing was proved yet."""
    model = wrapped(made("CohereForCausalLM", **GROUPED))
    with model.hooks(fwd_hooks=[("unembed.hook_out", lambda logits, hook: 0.3 * logits)]):
        _, cache = model.run_with_cache(some_tokens())
        for frozen in (tlens.freeze(model, some_tokens()), tlens.freeze(model, some_tokens(), cache=cache)):
            assert frozen.operator().in_out().gap.max() < 1e-6
            with pytest.raises(tlens.UnsupportedModelError, match=r"not cap\(W_U"):
                frozen.operator().target(5)


@pytest.mark.parametrize(
    ("architecture", "options"), [("BertForMaskedLM", TEXT), ("OPTForCausalLM", OPT)], ids=["bert", "opt"]
)
def test_fused_attention_names_the_option(architecture, options):
    model = wrapped(made(architecture, "sdpa", **options))
    with pytest.raises(tlens.UnsupportedModelError, match="attn_implementation='eager'"):
        tlens.freeze(model, some_tokens())


def test_a_model_wrapped_twice_is_right_or_told():
    """Some families wrap over their first wrapping without harm; Llama's attention does not."""
    module = made("LlamaForCausalLM", **GROUPED)
    wrapped(module)
    with pytest.raises(tlens.UnsupportedModelError, match="wrapped by a Bridge before: load it again"):
        tlens.freeze(wrapped(module), some_tokens())
    module = made("GPT2LMHeadModel", **GPT2)
    wrapped(module)
    assert tlens.freeze(wrapped(module), some_tokens()).errors["head"] < 1e-9


# ------------------------------------------------------------------------------------------ what is frozen


def test_a_norm_that_is_a_wrapped_identity():
    config = TransformerBridgeConfig(
        n_layers=2, d_model=16, n_ctx=24, d_head=4, n_heads=4, d_mlp=24, d_vocab=48, act_fn="gelu",
        normalization_type=None,
    )  # fmt: skip
    model = TransformerBridge.boot_native(config).double().eval()
    randomise(model)
    assert tlens.testing.check_model(model, some_tokens()).layouts == ["pre", "pre"]


def test_ids_beyond_the_tokenizer_are_shown_as_numbers(demo_model):
    model = wrapped(made("GPT2LMHeadModel", **{**GPT2, "vocab_size": 3000}), demo_model.tokenizer)
    frozen = tlens.freeze(model, [[3, 2500, 2900]])
    assert frozen.str_tokens[0][1:] == [" 2500", " 2900"]
    assert "2900" in tlens.attribute(frozen, target=5).to_html()


def test_an_empty_tokenizer_counts_as_none():
    model = wrapped(made("GPT2LMHeadModel", **GPT2))
    model.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=empty_vocabulary())
    assert len(tlens.freeze(model, [[3, 4, 5]]).str_tokens[0]) == 3
    with pytest.raises(tlens.InvalidInputError, match="no tokenizer, or an empty one"):
        tlens.freeze(model, "a text")


def empty_vocabulary():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())
