"""What went wrong once, or would have: stale passes, nested freezing, odd shapes, half precision, tokenizers."""

import importlib
import warnings

import pytest
import torch
from conftest import hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import registry
from tensorlens_tl.testing import check_model, model_names, tiny_model
from tensorlens_tl.testing.models import randomise

HOOKED = any(name.startswith("hooked/") for name in model_names())
GPT2 = "bridge/gpt2"


@pytest.mark.parametrize("change", ["in place", "cast", "loaded"])
def test_a_pass_older_than_the_weights_is_refused(change):
    model = tiny_model(GPT2)
    frozen = tlens.freeze(model, some_tokens())
    operator = frozen.operator()
    if change == "in place":
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.1)
    elif change == "cast":
        model.to(torch.float32)
    else:
        model.load_state_dict(tiny_model(GPT2, seed=1).state_dict())
    for stale in (frozen.operator, operator.in_out, operator.norm, operator.contributions, frozen.fwd_hooks):
        with pytest.raises(tlens.FrozenModelError, match="Freeze again"):
            stale()


def test_freezing_a_frozen_model_is_refused(model_named):
    model = model_named(GPT2)
    frozen = tlens.freeze(model, some_tokens())
    other = tlens.freeze(model, some_tokens(seed=4))
    with frozen.attached():
        for wrong in (lambda: tlens.freeze(model, some_tokens()), lambda: other.attached().__enter__()):
            with pytest.raises(tlens.FrozenModelError, match="attached to this model"):
                wrong()
    assert hooks_left(model) == 0


def test_two_passes_do_not_interfere(model_named):
    model = model_named(GPT2)
    a, b = (tlens.freeze(model, some_tokens(seed=seed)) for seed in (0, 1))
    first = a.operator().in_out().scores
    with b.attached():
        model(**b.inputs)
    assert torch.equal(a.operator().in_out().scores, first)


@pytest.mark.parametrize("name", ["bridge/opt", "bridge/llama", "bridge/bert", GPT2])
def test_one_token_prompts(model_named, name):
    frozen = tlens.freeze(model_named(name), torch.tensor([[5], [6], [7]]))
    assert frozen.operator().contributions().shape == (3, 1, 1, 16)
    assert frozen.operator().in_out().residual.max() < 1e-6
    with frozen.attached() as model:
        model(**frozen.inputs)


def test_a_slice_is_of_one_query(model_named):
    with pytest.raises(tlens.InvalidInputError, match="about one"):
        tlens.freeze(model_named(GPT2), some_tokens()).operator().slice(None)


def test_sublayers_that_write_nothing_have_any_layout():
    model = tiny_model(GPT2)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.original_component.c_proj.weight.zero_()
            block.mlp.original_component.c_proj.bias.zero_()
    assert tlens.freeze(model, some_tokens()).operator().in_out().residual.max() < 1e-9


def test_one_token_with_folded_norms_keeps_its_layout():
    """There a norm before a gated MLP and one after it are one map under the ratio rule, but not under the tangent."""
    models = importlib.import_module("tensorlens_tl.testing.models")
    for seed in range(4):
        torch.manual_seed(seed)
        model = models._bridge("llama", compatibility=True, hidden_act="relu", intermediate_size=3)
        frozen = tlens.freeze(model, [[5]])
        assert {layout.name for layout in frozen.layouts} == {"pre"}
        assert max(check_model(model, [[5]]).errors.values()) < 1e-5


def test_inference_mode_is_no_obstacle(model_named):
    with torch.inference_mode():
        frozen = tlens.freeze(model_named(GPT2), some_tokens())
        frozen.operator(activation="tangent").in_out()
    op = frozen.operator()
    x = op.x.clone().requires_grad_(True)
    op(x).sum().backward()
    assert x.grad is not None


def test_no_graph_is_kept_alive(model_named):
    frozen = tlens.freeze(model_named("bridge/opt"), some_tokens())
    hooks = frozen.fwd_hooks()
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks).sum().backward()
    held = [cell.cell_contents for _, hook in hooks for cell in hook.__closure__ or ()]
    live = [value for thing in held if isinstance(thing, dict) for value in thing.values()]
    assert not live


def test_dropout_inside_is_seen_whatever_the_outer_mode():
    model = tiny_model(GPT2)
    next(m for m in model.original_model.modules() if isinstance(m, torch.nn.Dropout)).p = 0.3
    model.original_model.train()
    with pytest.raises(tlens.InvalidInputError, match="probability"):
        tlens.freeze(model, some_tokens())


def test_float16_overflow_is_an_error_or_right():
    model = tiny_model(GPT2).to(torch.float16)
    with torch.no_grad():
        model.blocks[1].mlp.original_component.c_proj.weight.mul_(400)
        model.ln_final.original_component.weight.mul_(400)
    op = tlens.freeze(model, some_tokens(), tolerance=0.1).operator()
    assert float(op.output.float().square().sum(-1).max()) > 65504  # float16's largest number
    with pytest.raises(tlens.NumericalError, match="overflow float16"):
        op.in_out()
    assert torch.isfinite(op.target(5).scores).all()


@pytest.mark.parametrize("options", [{"token_type_ids": [[0] * 6] * 3}, {"token_type_ids": [0, 1]}])
def test_segments_of_another_shape(model_named, options):
    with pytest.raises(tlens.InvalidInputError, match="token_type_ids"):
        tlens.freeze(model_named("bridge/bert"), some_tokens(), **options)


@pytest.mark.skipif(not HOOKED, reason="HookedTransformer exists up to TransformerLens 3.9")
def test_hooked_transformer_particulars(model_named):
    with pytest.raises(tlens.InvalidInputError, match="takes none"):
        tlens.freeze(model_named("hooked/ln"), some_tokens(), token_type_ids=[[0] * 6] * 2)
    models = importlib.import_module("tensorlens_tl.testing.models")
    narrow = models._hooked(normalization_type="LN", act_fn="gelu", d_vocab_out=10)
    op = tlens.freeze(narrow, some_tokens()).operator()
    assert op.target(9).residual.max() < 1e-9
    with pytest.raises(tlens.InvalidInputError, match="outside the vocabulary of 10"):
        op.target(20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.operator(layers=1), "slice"),
        (lambda f: f.operator(heads={0: 1}), "collection"),
        (lambda f: f.operator(mlp=None), "True, False"),
        (lambda f: tlens.freeze(f.model, f.tokens, store="gpu"), "store='gpu'"),
    ],
)
def test_wrong_kinds_of_argument(model_named, call, message):
    with pytest.raises(tlens.InvalidInputError, match=message):
        call(tlens.freeze(model_named(GPT2), some_tokens()))


def test_numpy_numbers_are_tokens_too(model_named):
    numpy = pytest.importorskip("numpy")
    op = tlens.freeze(model_named(GPT2), some_tokens()).operator()
    assert torch.equal(op.target(numpy.int64(5)).scores, op.target(5).scores)
    assert torch.equal(op.target(numpy.array([5, 6])).scores, op.target([5, 6]).scores)


def test_logits_scaled_after_the_unembedding_are_noticed(model_named):
    """Then a token's logit is not W_U·x + b_U, also when the pass came from a cache and nothing was proved yet."""
    transformers = importlib.import_module("transformers")
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    config = transformers.CohereConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, logit_scale=0.25, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = transformers.CohereForCausalLM(config).double().eval()
    torch.manual_seed(0)
    randomise(module)
    model = builder.build_bridge_from_module(module, "CohereForCausalLM", hf_config=config)
    _, cache = model.run_with_cache(some_tokens())
    for frozen in (tlens.freeze(model, some_tokens()), tlens.freeze(model, some_tokens(), cache=cache)):
        assert frozen.operator().in_out().residual.max() < 1e-6
        with pytest.raises(tlens.UnsupportedModelError, match=r"not cap\(W_U"):
            frozen.operator().target(5)


def test_shared_tensors_can_be_saved(model_named, tmp_path):
    frozen = tlens.freeze(model_named(GPT2), some_tokens())
    scores = frozen.operator().in_out().scores
    result = tlens.Attribution.of(frozen, scores, method="x", query=-1, layers=scores[None])
    assert torch.equal(tlens.Attribution.load(result.save(tmp_path / "x")).layers[0], scores)


def test_a_broken_plug_in_takes_nothing_down(monkeypatch):
    class Point:
        name, value = "broken", "nowhere:broken"

        def load(self):
            raise ImportError("no such module")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    monkeypatch.setattr(registry, "_LOADED", set())
    with pytest.warns(UserWarning, match="'broken'"):
        assert "tensorlens" in tlens.list_methods()


def word_tokenizer(kind):
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat"]
    if kind == "wordpiece":
        vocabulary = {t: i for i, t in enumerate([*words, "##s", "##ting"])}
        inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        inner.decoder = tokenizers.decoders.WordPiece()
    else:
        vocabulary = {t: i for i, t in enumerate([*words[:3], "▁the", "▁cat", "s", "▁sat"])}
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        inner.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@pytest.mark.parametrize(
    ("kind", "ids", "words"),
    [
        ("wordpiece", [1, 3, 4, 6, 5, 2], ["[CLS]", "the", "cats", "sat", "[SEP]"]),
        ("wordpiece", [1, 3, 4, 5, 2], ["[CLS]", "the", "cat", "sat", "[SEP]"]),
        ("sentencepiece", [1, 3, 4, 5, 6, 2], ["[CLS]", " the", " cats", " sat", "[SEP]"]),
    ],
)
def test_words_are_the_tokenizers_own(kind, ids, words):
    model = tiny_model(GPT2)
    model.tokenizer = word_tokenizer(kind)
    merged = tlens.attribute(model, ids).merge_words()
    assert merged.tokens == [words]


def test_top_skips_the_queries_of_padding(model_named):
    tokens, mask = some_tokens(), torch.ones(2, 6, dtype=torch.long)
    mask[1, 3:] = 0
    result = tlens.attribute(model_named(GPT2), tokens, attention_mask=mask, query=None)
    assert abs(result.top(1, batch=1)[0].score) == float(result.scores[1, 2].abs().max())
    assert len(result.top(10, query=-3, batch=1)) == 3


def test_hooks_taken_off_inside_are_noticed(model_named):
    frozen = tlens.freeze(model_named(GPT2), some_tokens())
    with pytest.raises(tlens.FrozenModelError, match="removed inside"), frozen.attached() as model:
        model.reset_hooks()


def test_contributions_of_one_query(model_named):
    tokens, mask = some_tokens(), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    op = tlens.freeze(model_named(GPT2), tokens, attention_mask=mask).operator()
    every = op.contributions()
    assert torch.allclose(op.contributions(-1)[:, 0], torch.stack([every[0, 5], every[1, 3]]))
    assert not op.contributions(-1)[1, 0, 4:].any()


def test_a_part_of_the_model_says_so(model_named):
    frozen = tlens.freeze(model_named(GPT2), some_tokens())
    assert "part of the model" not in tlens.attribute(frozen).target
    for options in ({"mlp": False}, {"layers": slice(1, None)}, {"heads": {0: [1]}}):
        assert "part of the model" in tlens.attribute(frozen, **options).target


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f.operator(mlp={1: [3]}), tlens.InvalidInputError, "each whole"),
        (lambda f: f.operator(heads=[0, 3]), tlens.InvalidInputError, "layer -> heads"),
        (lambda f: tlens.register_method(lambda frozen: None), tlens.RegistryError, "'my-method'"),
        (lambda f: tlens.attribute(f, method="returns-a-collapse"), tlens.RegistryError, "returned Collapse"),
        (lambda f: tlens.attribute(f).top(0), tlens.InvalidInputError, "at least one"),
        (lambda f: tlens.attribute(f).save("no/such/folder/x"), tlens.InvalidInputError, "no folder"),
        (lambda f: tlens.attribute(f).save("x.html"), tlens.InvalidInputError, "to_html"),
        (lambda f: f.operator().target(minus=5), tlens.InvalidInputError, "minus alone"),
        (lambda f: f.operator().target([1, 2, 3]), tlens.InvalidInputError, "minus="),
    ],
)
def test_what_a_newcomer_stumbles_over(model_named, monkeypatch, call, error, message):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    tlens.register_method("returns-a-collapse")(lambda frozen: frozen.operator().in_out())
    with pytest.raises(error, match=message):
        call(tlens.freeze(model_named(GPT2), some_tokens()))


def test_a_target_can_be_asked_while_attached(model_named):
    frozen = tlens.freeze(model_named(GPT2), some_tokens())
    with frozen.attached():
        inside = frozen.operator().target(5)
    assert torch.equal(inside.scores, tlens.freeze(model_named(GPT2), some_tokens()).operator().target(5).scores)
    assert frozen.errors["unembed"] < 1e-9


def test_a_model_split_over_devices_is_refused():
    model = tiny_model(GPT2)
    model.blocks[1].mlp.to("meta")
    with pytest.raises(tlens.UnsupportedModelError, match="meta"):
        tlens.freeze(model, some_tokens())


def test_padding_without_a_mask_is_warned_of():
    model = tlens.load_demo_model()
    pad = model.tokenizer.pad_token_id
    with pytest.warns(UserWarning, match="Pass attention_mask="):
        tlens.freeze(model, [[5, 460, 259, pad, pad]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tlens.freeze(model, [[pad, 460, 259, 489, pad]])  # as BOS and EOS
        tlens.freeze(model, [[5, 460, 259, pad, pad]], attention_mask=[[1, 1, 1, 0, 0]])


def test_names_are_suggested_and_the_namespace_is_tidy():
    for name, near in (("ALTI", "alti"), ("tensorlense", "tensorlens"), ("nope", None)):
        with pytest.raises(tlens.RegistryError) as raised:
            tlens.get_method(name)
        assert ("Did you mean" in str(raised.value)) is (near is not None)
        assert near is None or f"mean {near!r}" in str(raised.value)
    with pytest.raises(tlens.RegistryError, match="mean 'tensorlens target'"):
        tlens.evaluate.known_answer(
            tlens.load_demo_model(), tlens.evaluate.induction(2, d_vocab=99), ["tensorlens targett"]
        )
    assert "collapsed by its norm" in tlens.get_method("tensorlens").__doc__
    assert {"testing", "attribute"} < set(dir(tlens))
    assert "budget" not in dir(tlens)
    assert tlens.testing.check_method
    with pytest.raises(AttributeError, match="nonsense"):
        tlens.nonsense  # noqa: B018


def test_what_is_no_model_is_told_what_to_do():
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(tlens.UnsupportedModelError, match="boot_transformers"):
        tlens.freeze(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=5)), [[1]])
    with pytest.raises(tlens.UnsupportedModelError, match="comes first"):
        tlens.freeze("gpt2", tiny_model(GPT2))


def test_a_direction_that_is_not_finite_is_named(model_named):
    operator = tlens.freeze(model_named(GPT2), some_tokens()).operator()
    with pytest.raises(tlens.InvalidInputError, match="direction has values that are not finite"):
        operator.target(direction=torch.full((16,), torch.nan))
