"""What freezing refuses, with which words, what it proves, and that the model is clean afterwards."""

import pytest
import torch
from conftest import hooks_left, some_tokens
from torch import nn

import tensorlens_tl as tlens
from tensorlens_tl.models.layouts import LAYOUTS
from tensorlens_tl.passes.proof import block_error
from tensorlens_tl.testing import check_model, model_names, tiny_model
from tensorlens_tl.testing.models import build_bridge, build_hooked

HOOKED = [name for name in model_names() if name.startswith("hooked/")]
needs_hooked = pytest.mark.skipif(not HOOKED, reason="HookedTransformer exists up to TransformerLens 3.9")
GPT2 = "bridge/gpt2"


@pytest.mark.parametrize(
    ("input", "options", "message"),
    [
        ([], {}, "not empty"),
        (torch.zeros(0, 4, dtype=torch.long), {}, "not empty"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, "batch, pos"),
        (torch.full((1, 25), 3), {}, "25 tokens, but the context of this model is 24"),
        ([[1, 2], ["3"]], {}, "cannot read"),
        ([[1, 2], []], {}, "not empty"),
        (object(), {}, "cannot read"),
        (torch.ones(1, 3), {}, "must be integers"),
        (torch.tensor([True, False]), {}, "must be integers"),
        ([3, 48], {}, r"token id 48 at \[0, 1\] is outside the vocabulary of 48"),
        ([3, -1], {}, "token id -1"),
        ("text", {}, "no tokenizer"),
        ("", {}, "empty"),
        (["a", ""], {"attention_mask": [1]}, "only together with token ids"),
        ([3, 4], {"attention_mask": [1, 1, 1]}, "they must agree"),
        ([3, 4], {"attention_mask": [0, 0]}, "row 0 has no real token"),
    ],
)
def test_bad_input(model_named, input, options, message):
    model = model_named(GPT2)
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.freeze(model, input, **options)
    assert hooks_left(model) == 0


def test_something_that_is_no_model():
    with pytest.raises(tlens.UnsupportedModelError, match="Linear has no `cfg`"):
        tlens.freeze(nn.Linear(2, 2), [1, 2])


def test_what_is_no_model_is_told_what_to_do():
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(tlens.UnsupportedModelError, match="boot_transformers"):
        tlens.freeze(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=5)), [[1]])
    with pytest.raises(tlens.UnsupportedModelError, match="comes first"):
        tlens.freeze("gpt2", tiny_model(GPT2))


def test_train_mode_matters_only_with_dropout():
    model = tiny_model(GPT2)
    model.train()
    tlens.freeze(model, some_tokens())
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).p = 0.1
    with pytest.raises(tlens.InvalidInputError, match=r"model\.eval"):
        tlens.freeze(model, some_tokens())
    model.eval()
    tlens.freeze(model, some_tokens())


def test_functional_dropout_is_seen_too():
    model = tiny_model("bridge/llama")
    attention = next(m for m in model.modules() if hasattr(m, "attention_dropout"))
    attention.attention_dropout = 0.2
    model.train()
    with pytest.raises(tlens.InvalidInputError, match="probability"):
        tlens.freeze(model, some_tokens())


def test_dropout_inside_is_seen_whatever_the_outer_mode():
    model = tiny_model(GPT2)
    next(m for m in model.original_model.modules() if isinstance(m, nn.Dropout)).p = 0.3
    model.original_model.train()
    with pytest.raises(tlens.InvalidInputError, match="probability"):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(bad):
    model = tiny_model("bridge/llama")
    with torch.no_grad():
        model.blocks[1].mlp.original_component.down_proj.weight[0, 0] = bad
    with pytest.raises(tlens.NumericalError, match=r"at blocks\.1\.hook_resid_post"):
        tlens.freeze(model, some_tokens())
    assert hooks_left(model) == 0


def test_the_block_that_wrote_what_is_not_finite_is_named():
    model = tiny_model("bridge/llama")
    with torch.no_grad():
        model.blocks[0].mlp.original_component.down_proj.weight[0, 0] = float("nan")
    where = r"at blocks\.1\.hook_resid_pre, in what blocks\.0 wrote: .* weights of blocks\.0"
    with pytest.raises(tlens.NumericalError, match=where):
        tlens.freeze(model, some_tokens())


def test_a_cache_of_something_else(model_named):
    model = model_named(GPT2)
    _, cache = model.run_with_cache(some_tokens())
    with pytest.raises(tlens.InvalidInputError, match="input that the cache was computed from"):
        tlens.freeze(model, some_tokens(1, 4), cache=cache)
    _, partial = model.run_with_cache(some_tokens(), names_filter="blocks.0.hook_resid_pre")
    with pytest.raises(tlens.InvalidInputError, match="missing, first"):
        tlens.freeze(model, some_tokens(), cache=partial)
    _, other = model.run_with_cache(some_tokens(seed=5))
    mixed = {**dict(cache.items()), **{k: v for k, v in other.items() if "resid_pre" in k}}
    with pytest.raises(tlens.InvalidInputError, match="made from another input"):
        tlens.freeze(model, some_tokens(), cache=mixed)
    with pytest.raises(tlens.InvalidInputError, match="made from another input"):
        tlens.freeze(model, some_tokens().flip(1), cache=cache)
    _, one = model.run_with_cache(some_tokens(1), remove_batch_dim=True)
    with pytest.raises(tlens.InvalidInputError, match="no batch axis"):
        tlens.freeze(model, some_tokens(1), cache=one)
    later = {**dict(cache.items()), "blocks.1.hook_resid_pre": other["blocks.1.hook_resid_pre"]}
    with pytest.raises(tlens.InvalidInputError, match=r"blocks\.1\.hook_resid_pre differs"):
        tlens.freeze(model, some_tokens(), cache=later)


def test_freezing_a_frozen_model_is_refused(model_named):
    model = model_named(GPT2)
    frozen = tlens.freeze(model, some_tokens())
    other = tlens.freeze(model, some_tokens(seed=4))
    with frozen.attached():
        for wrong in (lambda: tlens.freeze(model, some_tokens()), lambda: other.attached().__enter__()):
            with pytest.raises(tlens.FrozenModelError, match="attached to this model"):
                wrong()
    assert hooks_left(model) == 0


def test_a_model_split_over_devices_is_refused():
    model = tiny_model(GPT2)
    model.blocks[1].mlp.to("meta")
    with pytest.raises(tlens.UnsupportedModelError, match="meta"):
        tlens.freeze(model, some_tokens())


@needs_hooked
def test_solu_ln_is_refused():
    model = build_hooked(normalization_type="LN", act_fn="solu_ln")
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*solu_ln"):
        tlens.freeze(model, some_tokens())


@needs_hooked
def test_a_head_axis_on_the_stream_is_refused():
    model = tiny_model("hooked/ln")
    model.set_use_split_qkv_input(True)
    with pytest.raises(tlens.UnsupportedModelError, match="use_split_qkv_input"):
        tlens.freeze(model, some_tokens())


def break_values(model):
    """A hook that changes values after the weights: the algebra cannot know."""
    return "attn.hook_v", lambda v, hook: 2 * v, r"attn\.hook_z"


def break_activation(model):
    return "mlp.hook_post", lambda post, hook: post + 1, r"mlp\.hook_post"


def break_output(model):
    return "hook_mlp_out", lambda out, hook: 1.5 * out, r"hook_mlp_out"


@pytest.mark.parametrize("broken", [break_values, break_activation, break_output])
def test_a_block_that_is_not_what_its_weights_say_is_refused(broken):
    """The message names the block and the first component that differs, and what was measured."""
    model = tiny_model(GPT2)
    point, hook, component = broken(model)
    model.add_hook(f"blocks.1.{point}", hook)
    with pytest.raises(tlens.UnsupportedModelError, match=rf"blocks\.1 .*relative error: pre .*{component}"):
        tlens.freeze(model, some_tokens())
    model.reset_hooks()
    tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("name", ["bridge/gpt2", "bridge/llama", "bridge/neox", "bridge/bert"])
def test_a_wrong_layout_misses_by_far(model_named, name):
    frozen = tlens.freeze(model_named(name), some_tokens())
    right = frozen.layouts[0]
    others = [layout for layout in LAYOUTS if layout != right and layout.norm_names(True) == right.norm_names(True)]
    assert len(others) >= 3
    assert (
        min(block_error(frozen.capture, 0, frozen.block(0, layout=layout)(frozen.resid_pre(0))) for layout in others)
        > 1e-2
        > 1e4 * frozen.errors["blocks.0"]
    )


def test_sublayers_that_write_nothing_have_any_layout():
    model = tiny_model(GPT2)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.original_component.c_proj.weight.zero_()
            block.mlp.original_component.c_proj.bias.zero_()
    assert tlens.freeze(model, some_tokens()).operator().in_out().gap.max() < 1e-9


def test_one_token_with_folded_norms_keeps_its_layout():
    """There a norm before a gated MLP and one after it are one map under the ratio rule, but not under the tangent."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = build_bridge("llama", compatibility=True, hidden_act="relu", intermediate_size=3)
        frozen = tlens.freeze(model, [[5]])
        assert {layout.name for layout in frozen.layouts} == {"pre"}
        assert max(check_model(model, [[5]]).errors.values()) < 1e-5


def test_without_verification_only_the_first_block_is_proved(model_named):
    frozen = tlens.freeze(model_named(GPT2), some_tokens(), verify=False)
    assert list(frozen.errors) == ["blocks.0", "blocks.0.writes", "unembed"]
    assert len(frozen.layouts) == 2
    assert frozen.operator().in_out().gap.max() < 1e-9


def test_a_stricter_tolerance_can_be_asked_for(model_named):
    with pytest.raises(tlens.UnsupportedModelError, match="allowed 1e-12"):
        tlens.freeze(model_named("bridge/llama"), some_tokens(), tolerance=1e-12)


def test_bias_free_and_token_type_inputs(model_named):
    types = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    plain = tlens.freeze(model_named("bridge/bert"), some_tokens())
    typed = tlens.freeze(model_named("bridge/bert"), some_tokens(), token_type_ids=types)
    assert not torch.allclose(plain.output, typed.output)
    assert typed.operator().in_out().gap.max() < 1e-9


def test_errors_are_one_family():
    for error in (tlens.InvalidInputError, tlens.UnsupportedModelError, tlens.NumericalError, tlens.FrozenModelError):
        assert issubclass(error, tlens.TensorLensError)
    assert issubclass(tlens.InvalidInputError, ValueError)
