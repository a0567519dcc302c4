"""Encoder–decoders: one stream of both sides, exact as any other, and refused where blocks of one stack are read."""

import dataclasses

import pandas as pd
import pytest
import torch
from conftest import tolerance

import tensorlens_tl as tlens
from scripts import train_reversal
from tensorlens_tl import circuits, compress, demo, evaluate, whitening
from tensorlens_tl.methods import contextualisation
from tensorlens_tl.results import storage
from tensorlens_tl.testing import check_method, encoder_decoder_names, held_output, tiny_input, tiny_model
from tensorlens_tl.testing.models import build_bridge

BART = "bridge/bart"
REPRESENTATIVES = {BART, "bridge/t5"}
pytestmark = pytest.mark.numeric


@pytest.fixture(params=encoder_decoder_names())
def name(request):
    return request.param


@pytest.fixture
def frozen(model):
    input, options = tiny_input(model)
    return tlens.freeze(model, input, **options)


@pytest.fixture
def bart(model_named):
    input, options = tiny_input(model_named(BART))
    return tlens.freeze(model_named(BART), input, **options)


def relative(made, own):
    return float((made - own).norm() / own.norm())


# ------------------------------------------------------------------------------------------ the operator


def test_both_sides_and_the_bias_sum_to_the_models_own_logits(frozen, model, name):
    encoder, decoder = frozen.sides
    assert frozen.tokens.shape[1] == encoder + decoder
    asked = slice(encoder, None)
    result = tlens.attribute(frozen, target=7, minus=11, query=asked)
    own, cap = model(**frozen.inputs).detach(), frozen.view.soft_cap
    own = own if cap is None else cap * torch.atanh(own / cap)  # T5Gemma: totals are logits before the cap
    own = own[..., 7] - own[..., 11]
    made = result.scores[..., :encoder].sum(-1) + result.scores[..., encoder:].sum(-1) + result.bias
    assert relative(made, own) < tolerance(name)
    assert relative(result.total, own) < tolerance(name)
    placed = tlens.attribute(frozen, target=7, minus=11, query=asked, bias="position")
    assert relative(placed.scores.sum(-1) + placed.bias, own) < tolerance(name)
    last = tlens.attribute(frozen, target=7, minus=11)
    assert torch.allclose(last.scores[:, 0], result.scores[:, -1], rtol=1e-9, atol=1e-12)
    contributions = frozen.operator().contributions().sum(2) + frozen.operator().bias
    assert relative(contributions, frozen.output) < tolerance(name)


def test_the_algebra_equals_autograd_through_the_held_model(frozen, name):
    op = frozen.operator()
    x = op.x.clone().requires_grad_(True)
    output = held_output(frozen, x)
    batch, pos, width = output.shape
    seeds = torch.eye(pos * width, dtype=output.dtype).view(-1, 1, pos, width).expand(-1, batch, -1, -1)
    (jacobian,) = torch.autograd.grad(output, x, seeds, is_grads_batched=True)
    dense = op.dense()
    assert relative(dense, jacobian.view(pos, width, batch, pos, width).permute(2, 0, 1, 3, 4)) < tolerance(name)
    assert torch.allclose(op.slice(query=-1), dense[:, -1])
    assert torch.allclose(op.norm(query="all").scores, dense.permute(0, 1, 3, 2, 4).flatten(3).norm(dim=-1))
    # nothing reaches the encoder from the decoder, nor an earlier token of the decoder from a later one
    encoder = frozen.sides[0]
    ahead = torch.ones(pos, pos).triu(1).bool()
    ahead[:encoder, :encoder] = False
    assert not dense.permute(0, 1, 3, 2, 4)[:, ahead].any()
    assert dense[:, :encoder, :, :encoder].any(-1).any(2).all()
    assert dense[:, encoder:, :, :encoder].any(-1).any(2).all()


def test_an_operator_of_some_layers_and_heads(frozen, model, name):
    """The encoder alone, the decoder alone, and both without a head and an MLP, as the held model has them."""
    first, last = frozen.view.encoder_layers, frozen.n_layers
    encoder, decoder = frozen.operator(layers=range(first)), frozen.operator(layers=range(first, last))
    assert encoder.end == f"{frozen.view.blocks[first].name} input"
    assert relative(decoder(encoder(encoder.x)), frozen.output) < tolerance(name)
    start = frozen.sides[0]
    assert torch.equal(encoder.push(encoder.x)[:, start:], encoder.x[:, start:])
    assert torch.equal(decoder.push(decoder.x)[:, :start], decoder.x[:, :start])
    for layer in (0, last - 1):
        op = frozen.operator(heads={layer: [1, 2]})
        seen = {}

        def two_of_four(z, hook):
            heads = z if z.ndim == 4 else z.unflatten(-1, (4, -1))
            return (heads * torch.tensor([0.0, 1, 1, 0])[:, None]).reshape(z.shape)

        x = op.x + torch.randn(op.x.shape, dtype=op.x.dtype)
        put = [
            (at, lambda live, hook, part=part: part)
            for at, part in zip(frozen.capture.stream_names(0), x.split(list(frozen.sides), 1), strict=True)
        ]
        see = [(frozen.points.output, lambda live, hook, seen=seen: seen.update(output=live))]
        hooks = [*put, *frozen.fwd_hooks(), (frozen.points.blocks[layer].z, two_of_four), *see]
        with torch.no_grad():
            model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
        assert relative(op(x)[:, start:], seen["output"]) < tolerance(name)
        without = frozen.operator(mlp=set(range(last)) - {layer})
        assert float(without.in_out(query="all").gap.max()) < 1e-9
        assert relative(without(x), frozen.operator()(x)) > 1e-3


ASKED = [
    ("tensorlens", {"target": 7, "minus": 9}), ("decompx", {"bias": "token"}), ("decompx", {}),
    ("decompx", {"target": 7, "query": -1}), ("tensorlens", {"collapse": "norm"}), ("input-x-gradient", {"target": 7}),
    ("integrated-gradients", {"target": 7, "steps": 3}), ("attnlrp", {"target": 7}), ("gim", {"target": 7}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "options"), [ASKED[0], *(pytest.param(*more, marks=pytest.mark.whole) for more in ASKED[1:])]
)
def test_methods_that_need_the_operator_or_the_model_only(method, options, model):
    assert not check_method(method, model, options=options)


def test_vectors_of_decompx(bart):
    vectors = tlens.attribute(bart, method="decompx", aggregate="vector")
    assert relative(vectors.scores.sum(2), bart.output) < 1e-9
    ratio = tlens.attribute(bart, method="decompx", bias="none", aggregate="vector").scores
    assert relative(ratio, bart.operator().contributions()) < 1e-9  # without biases, DecompX is the operator itself


def test_gradients_are_those_of_both_sides(bart, model_named):
    """By finite differences of the live model, at a token of each side."""
    model = model_named(BART)
    result = tlens.attribute(bart, method="input-x-gradient", target=7)
    for where, side in ((2, 0), (7, 1)):
        place, at = where - side * bart.sides[0], bart.capture.stream_names(0)[side]

        def moved(step, place=place, at=at, where=where):
            def add(live, hook):
                live = live.clone()
                live[:, place] += step * bart.resid_pre(0)[:, where]
                return live

            with torch.no_grad():
                return model.run_with_hooks(**bart.inputs, fwd_hooks=[(at, add)])[:, -1, 7]

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        assert torch.allclose(slope, result.scores[:, 0, where], rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------ what is refused

PARTS = {
    "bounds": [
        lambda m, f: circuits.error_bound(f, f.resid_pre(0)),
        lambda m, f: circuits.frozen_error_bound(f, f.resid_pre(0)),
        lambda m, f: circuits.spectral_norm_bound(f),
    ],
    "full_ov": [lambda m, f: circuits.full_ov(m, 0, 0)],
    "full_qk": [lambda m, f: circuits.full_qk(f, 0, 0)],
    "copying_scores": [lambda m, f: circuits.copying_scores(m)],
    "ov_eigenvalues": [lambda m, f: circuits.ov_eigenvalues(m, 0, 0)],
    "svd_tokens": [lambda m, f: circuits.svd_tokens(m, 0, 0)],
    "attention to the previous token": [lambda m, f: circuits.previous_token_scores(f)],
    "the weights of heads": [
        lambda m, f: compress.plan(m, ratio=2),
        lambda m, f: compress.plan(m, method=None, mlp=0.5),
        lambda m, f: compress.sharing(m),
        lambda m, f: compress.head_weights(f, 0),
    ],
    "one layer": [lambda m, f: contextualisation.gain_against_ff(f), lambda m, f: tlens.methods.mixing_ratio(f)],
    "one stack": [
        lambda m, f: contextualisation.context_change(f, "atb", "atb_ff"),
        lambda m, f: contextualisation.ff_amp(f, "atb", "atb_ff"),
    ],
    "flow_edges": [lambda m, f: tlens.methods.flow_edges(f)],
    "whiten": [lambda m, f: tlens.whiten(m), lambda m, f: whitening.measure(m, f.tokens)],
    "perturbation": [lambda m, f: evaluate.perturbation(m, f.tokens)],
    "relation decoding": [
        lambda m, f: evaluate.relation_decoding(m),
        lambda m, f: evaluate.RelationDecoder.fit(m, f.tokens),
    ],
    "known_answer": [lambda m, f: evaluate.known_answer(m, evaluate.recall(3))],
    "stability": [lambda m, f: evaluate.stability(m, f.tokens[:, :6], decoder_input_ids=f.tokens[:, 6:])],
    "randomisation": [lambda m, f: evaluate.randomisation(m, f.tokens[:, :6], decoder_input_ids=f.tokens[:, 6:])],
}  # fmt: skip


@pytest.mark.parametrize("what", PARTS)
@pytest.mark.few(8)
def test_what_reads_blocks_of_one_stack_is_refused_by_name(what, model_named):
    model = model_named(BART)
    input, options = tiny_input(model, 1)
    frozen = tlens.freeze(model, input, **options)
    for asked in PARTS[what]:
        with pytest.raises(tlens.UnsupportedModelError, match=f"{what}.*not supported for encoder–decoders"):
            asked(model, frozen)


@pytest.mark.parametrize("method", ["tensorlens", "decompx", "input-x-gradient", "attnlrp"])
def test_the_encoder_predicts_nothing(bart, method):
    for query in (0, 5, "all"):
        with pytest.raises(tlens.InvalidInputError, match="positions 0 to 5 are the encoder's"):
            tlens.attribute(bart, method=method, target=7, query=query)
    assert float(bart.operator().in_out(query="all").gap.max()) < 1e-9
    asked = bart.operator().target(direction=torch.randn(16, dtype=torch.float64), query="all")
    assert float(asked.gap.max()) < 1e-9


BAD = [
    (None, "decoder_input_ids: .* is an encoder–decoder; pass"),
    (torch.full((3, 4), 5), "decoder_input_ids: 3 prompts for the decoder, but 2 for the encoder"),
    (torch.zeros(2, 0, dtype=torch.long), r"decoder_input_ids: .*not empty"),
    (torch.full((2, 4), 48), "decoder_input_ids: token id 48 .* outside the vocabulary of 48"),
    (torch.full((2, 25), 5), "decoder_input_ids: 25 tokens, but the context"),
    (torch.rand(2, 4), "decoder_input_ids: .*integers"),
    (["a text", "another"], "decoder_input_ids: this model has no tokenizer"),
]


@pytest.mark.parametrize(("ids", "message"), BAD)
def test_bad_second_inputs(ids, message, model_named):
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.freeze(model_named(BART), torch.full((2, 6), 4), decoder_input_ids=ids)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), r"decoder_attention_mask is \(2, 3\), the token ids are \(2, 4\)"),
        (torch.tensor([[1] * 4, [0] * 4]), "decoder_attention_mask: row 1 has no real token"),
    ],
)
def test_bad_masks(mask, message, model_named):
    given = {"decoder_input_ids": torch.full((2, 4), 5), "decoder_attention_mask": mask}
    with pytest.raises(tlens.InvalidInputError, match=message):
        tlens.freeze(model_named(BART), torch.full((2, 6), 4), **given)


def test_second_inputs_of_other_models(model_named):
    with pytest.raises(tlens.InvalidInputError, match="is not an encoder–decoder"):
        tlens.freeze(model_named("bridge/gpt2"), [[3, 4]], decoder_input_ids=[[3]])
    frozen = tlens.freeze(model_named("bridge/gpt2"), [[3, 4]])
    assert (frozen.sides, tlens.attribute(frozen).sides) == (None, None)
    with pytest.raises(tlens.InvalidInputError, match="no layer has"):
        frozen.cross_pattern(0)


def test_cross_patterns(bart):
    pattern = bart.cross_pattern(2)
    assert pattern.shape == (2, 4, 4, 6)
    assert torch.allclose(pattern.sum(-1), torch.ones(2, 4, 4, dtype=torch.float64))
    assert [bart.pattern(layer).shape[-1] for layer in range(4)] == [6, 6, 4, 4]
    with pytest.raises(tlens.InvalidInputError, match="layers 2 to 3 have"):
        bart.cross_pattern(1)


def test_a_cache_of_such_a_run(bart, model_named):
    model, ids = model_named(BART), bart.inputs
    _, cache = model.run_with_cache(**ids)
    given = {"decoder_input_ids": ids["decoder_input_ids"]}
    again = tlens.freeze(model, ids["input"], cache=cache, **given)
    assert torch.equal(again.operator().in_out().scores, bart.operator().in_out().scores)
    with pytest.raises(tlens.InvalidInputError, match="another input"):
        tlens.freeze(model, ids["input"], cache=cache, decoder_input_ids=given["decoder_input_ids"].flip(0))
    with pytest.raises(tlens.InvalidInputError, match=r"cache: decoder_blocks.0\S+ is \(2, 4, 16\), but .* 3 tokens"):
        tlens.freeze(model, ids["input"], cache=cache, decoder_input_ids=given["decoder_input_ids"][:, :3])


def test_prompts_of_different_length(bart, model_named):
    """Lists of token ids, padded on the right on both sides, and what each prompt is alone."""
    model, (one, two) = model_named(BART), bart.tokens.tolist()
    together = tlens.freeze(model, [one[:6], two[:4]], decoder_input_ids=[one[6:8], two[6:]])
    assert together.sides == (6, 4)
    assert together.mask.tolist() == [[True] * 8 + [False] * 2, [True] * 4 + [False] * 2 + [True] * 4]
    for row, (encoder, decoder) in enumerate(((one[:6], one[6:8]), (two[:4], two[6:]))):
        alone = tlens.freeze(model, [encoder], decoder_input_ids=[decoder])
        a, b = together.operator().target(7), alone.operator().target(7)
        assert torch.allclose(a.scores[row, 0][together.mask[row]], b.scores[0, 0], rtol=1e-9, atol=1e-12)
        assert torch.allclose(a.total[row], b.total[0], rtol=1e-9)
    # many prompts are one pass, since both inputs must stay beside each other
    whole = tlens.attribute(model, [one[:6], two[:4]], decoder_input_ids=[one[6:8], two[6:]], target=7, memory="1MB")
    assert torch.equal(whole.scores, tlens.attribute(together, target=7).scores)


def test_a_vocabulary_for_each_side():
    """Marian may have two: ids beyond the encoder's are the decoder's own, and so are its logits."""
    sizes = {"decoder_vocab_size": 60, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    model = build_bridge("marian", **sizes)
    frozen = tlens.freeze(model, [[3, 4, 5]], decoder_input_ids=[[1, 55]])
    assert float(frozen.operator().target(57).gap.max()) < 1e-9
    assert frozen.fwd_hooks()
    with pytest.raises(tlens.InvalidInputError, match=r"input: token id 55 .* vocabulary of 48"):
        tlens.freeze(model, [[3, 55, 5]], decoder_input_ids=[[1, 55]])
    with pytest.raises(tlens.InvalidInputError, match=r"decoder_input_ids: token id 60 .* vocabulary of 60"):
        tlens.freeze(model, [[3, 5, 5]], decoder_input_ids=[[1, 60]])


@pytest.mark.skipif("bridge/t5" in encoder_decoder_names(), reason="TransformerLens 4 runs T5")
def test_t5_where_it_does_not_run():
    with pytest.raises(tlens.UnsupportedModelError, match="cannot run on the TransformerLens and transformers"):
        tlens.freeze(build_bridge("t5"), [[3, 4, 5]], decoder_input_ids=[[1, 4]])


# ------------------------------------------------------------------------------------------ results


def test_results_say_which_side_a_token_is_on(bart, tmp_path, capsys):
    result = tlens.attribute(bart, target=7)
    assert result.sides == [["encoder"] * 6 + ["decoder"] * 4] * 2
    frame = result.to_dataframe()
    assert isinstance(frame, pd.DataFrame)
    assert frame.loc[frame["kind"] == "token", "key_side"].tolist() == result.sides[0] * 2
    assert set(frame["query_side"]) == {"decoder"}
    loaded = tlens.Attribution.load(result.save(tmp_path / "result"))
    assert loaded.sides == result.sides
    assert result.normalize().sides == (result - loaded).sides == result.sides
    one, several = result.to_html(batch=0), tlens.attribute(bart, query="all").to_html(batch=0)
    assert (
        one.index(">encoder ")
        < one.index(" at 0:")
        < one.index(" at 5:")
        < one.index(">decoder ")
        < one.index(" at 6:")
    )
    assert "the first 6 keys are the encoder" in several
    result.show(k=10, batch=0)
    printed = capsys.readouterr().out
    assert "side" in printed
    assert (printed.count("encoder"), printed.count("decoder")) == (6, 4)
    extra = tlens.attribute(bart, method="decompx", bias="token")
    assert extra.sides[0] == [*result.sides[0], ""]
    with pytest.raises(tlens.InvalidInputError, match="sides are neither"):
        dataclasses.replace(result, sides=[["left"] * 10] * 2)


def test_files_from_before_sides(bart, tmp_path):
    """A file of an earlier version does not name them."""
    result = tlens.attribute(bart, target=7)
    tensors, facts = result._packed()
    facts.pop("sides")
    storage.write(tmp_path / "old", "Attribution", tensors, facts)
    assert tlens.Attribution.load(tmp_path / "old").sides is None


# ------------------------------------------------------------------------------------------ a known answer

WORDS = 200


@pytest.fixture(scope="module")
def reversal():
    """The shipped model on words that it has not seen, its own right answers read by the decoder."""
    model = tlens.load_demo_model("reversal", dtype=torch.float64)
    letters = demo.reversal_words()[:: 1004 // WORDS][:WORDS]
    start = torch.ones_like(letters[:, :1])
    written = torch.cat([start, letters.flip(1)[:, :-1]], dim=1)
    return letters, tlens.freeze(model, torch.cat([start, letters], dim=1), decoder_input_ids=written)


def scores_of(letters, frozen):
    """Each letter's logit over its runner-up's, by source, `[word, letter, source]`."""
    asked, answers = slice(7, 13), letters.flip(1)
    runners = frozen.logits(asked).scatter(2, answers[..., None], -torch.inf).argmax(-1)
    return frozen.operator().target(answers.tolist(), minus=runners.tolist(), query=asked)


def test_the_letter_that_is_copied_gets_the_score(reversal):
    letters, frozen = reversal
    assert max(frozen.errors.values()) < 1e-9
    made = scores_of(letters, frozen)
    assert float(made.gap.max()) < 1e-9
    assert bool((made.total > 0).all())  # every letter is right
    mirrored = 6 - torch.arange(6)  # the encoder's start token is at 0
    assert float((made.scores.argmax(-1) == mirrored).double().mean()) > 0.99
    own = made.scores.gather(2, mirrored.expand(len(letters), -1)[..., None])[..., 0]
    assert float((own / made.total).median()) > 0.9  # what the copied letter gives, as a share of the difference
    assert float((frozen.cross_pattern(1).mean(1).argmax(-1) == mirrored).double().mean()) > 0.99


def test_it_comes_by_cross_attention(reversal):
    """Without cross-attention no token of the input gives anything, and the model does not know the answer: of the mean
    logit difference, 18.1, the encoder's tokens give 16.5 and the decoder's own 5.5 (the bias takes 3.8)."""
    letters, frozen = reversal
    made, points = scores_of(letters, frozen), frozen.points.blocks[1].cross
    encoder, decoder = made.scores.split([7, 6], dim=-1)
    assert float(encoder.sum(-1).mean()) > 2.5 * float(decoder.sum(-1).mean())
    cache = frozen.capture.activations | {points.pattern: torch.zeros_like(frozen.capture.activations[points.pattern])}
    without = (
        frozen.with_capture(dataclasses.replace(frozen.capture, activations=cache))
        .operator()
        .contributions(slice(7, 13))
    )
    assert not without[:, :, :7].any()
    assert without[:, :, 7:].any()
    with torch.no_grad():
        logits = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[(points.z, lambda z, hook: 0 * z)])
    assert float((logits.argmax(-1) == letters.flip(1)).double().mean()) < 0.3  # one letter in ten by chance


def test_the_shipped_reversal_model():
    folder = demo.FOLDERS["reversal"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 150_000
    model, letters = tlens.load_demo_model("reversal"), demo.reversal_words()
    assert letters.shape == (1004, 6)
    assert bool(train_reversal.is_held_out_word(letters).all())
    start = written = torch.ones_like(letters[:, :1])
    with torch.no_grad():
        for _ in range(6):
            logits = model(torch.cat([start, letters], dim=1), decoder_input_ids=written)
            written = torch.cat([written, logits[:, -1:].argmax(-1)], dim=1)
    assert float((written[:, 1:] == letters.flip(1)).all(1).double().mean()) > 0.95
    frozen = tlens.freeze(model, "a b c d e f", decoder_input_ids="f e d")
    assert frozen.str_tokens == [["<|start|>", *"abcdef", "<|start|>", *"fed"]]
    result = tlens.attribute(frozen, target="c", minus="b")
    assert result.top(1)[0][::2] == ("c", 3)
    assert result.merge_words().sides == [["encoder", "encoder", "decoder", "decoder"]]
    assert tlens.freeze(model, "a b", decoder_input_ids="").str_tokens[0][3:] == ["<|start|>"]


def test_tiny_inputs(model_named):
    tokens, options = tiny_input(model_named("bridge/gpt2"), 3, 5)
    assert (tokens.shape, options) == ((3, 5), {})
    tokens, options = tiny_input(model_named(BART), 1, 3)
    assert (tokens.shape, options["decoder_input_ids"].shape) == ((1, 3), (1, 2))
    assert tiny_model(BART).cfg.d_vocab == 48
    assert set(encoder_decoder_names()) >= REPRESENTATIVES - {"bridge/t5"}
