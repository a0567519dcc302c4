"""What a model takes: prompts of one token, token types, vocabularies, padding with and without a mask."""

import warnings

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.testing import model_names
from tensorlens_tl.testing.models import build_hooked

HOOKED = any(name.startswith("hooked/") for name in model_names())


@pytest.mark.parametrize("name", ["bridge/opt", "bridge/llama", "bridge/bert", "bridge/gpt2"])
def test_one_token_prompts(model_named, name):
    frozen = tlens.freeze(model_named(name), torch.tensor([[5], [6], [7]]))
    assert frozen.operator().contributions().shape == (3, 1, 1, 16)
    assert frozen.operator().in_out().gap.max() < 1e-6
    with frozen.attached() as model:
        model(**frozen.inputs)


@pytest.mark.parametrize("options", [{"token_type_ids": [[0] * 6] * 3}, {"token_type_ids": [0, 1]}])
def test_segments_of_another_shape(model_named, options):
    with pytest.raises(tlens.InvalidInputError, match="token_type_ids"):
        tlens.freeze(model_named("bridge/bert"), some_tokens(), **options)


@pytest.mark.skipif(not HOOKED, reason="HookedTransformer exists up to TransformerLens 3.9")
def test_hooked_transformer_particulars(model_named):
    with pytest.raises(tlens.InvalidInputError, match="takes none"):
        tlens.freeze(model_named("hooked/ln"), some_tokens(), token_type_ids=[[0] * 6] * 2)
    narrow = build_hooked(normalization_type="LN", act_fn="gelu", d_vocab_out=10)
    op = tlens.freeze(narrow, some_tokens()).operator()
    assert op.target(9).gap.max() < 1e-9
    with pytest.raises(tlens.InvalidInputError, match="outside the vocabulary of 10"):
        op.target(20)


def test_padding_without_a_mask_is_warned_of():
    model = tlens.load_demo_model()
    pad = model.tokenizer.pad_token_id
    with pytest.warns(UserWarning, match="Pass attention_mask="):
        tlens.freeze(model, [[5, 460, 259, pad, pad]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tlens.freeze(model, [[pad, 460, 259, 489, pad]])  # as BOS and EOS
        tlens.freeze(model, [[5, 460, 259, pad, pad]], attention_mask=[[1, 1, 1, 0, 0]])
