"""What is passed as input, span, task or file is taken as it is meant, or refused in words that say what to do."""

import json
import re

import pytest
import torch
from conftest import close, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.passes.inputs import Prompt, query_positions, span_positions
from tensorlens_tl.testing import model_names, tiny_model

TEXTS = ["Return the value of the", "If the file is not found"]


def refused(message):
    return pytest.raises(tlens.InvalidInputError, match=re.escape(message))


# ------------------------------------------------------------------------------- what tokenizers and processors return


def test_what_a_tokenizer_returns_is_an_input():
    model = tlens.load_demo_model(dtype=torch.float64, kind="bridge")
    encoded = model.tokenizer(TEXTS, return_tensors="pt", padding=True)
    frozen = tlens.freeze(model, encoded)
    assert frozen.mask.tolist() == encoded["attention_mask"].bool().tolist()
    known = tlens.freeze(model, encoded["input_ids"], attention_mask=encoded["attention_mask"])
    assert close(frozen.operator().in_out().scores, known.operator().in_out().scores)
    result = tlens.attribute(model, dict(encoded), method="alti")
    assert close(result.scores, tlens.attribute(known, method="alti").scores)


def test_rows_that_are_not_padded_are_an_input():
    model = tlens.load_demo_model(dtype=torch.float64, kind="bridge")
    encoded = model.tokenizer(TEXTS)
    assert len({len(row) for row in encoded["input_ids"]}) == 2
    frozen = tlens.freeze(model, encoded)
    assert frozen.mask.sum(1).tolist() == [len(row) for row in encoded["input_ids"]]


def test_segments_of_a_tokenizer_are_read(model_named):
    tokens, segments = some_tokens(1, 6), torch.tensor([[0, 0, 0, 1, 1, 1]])
    model = model_named("bridge/bert")
    frozen = tlens.freeze(model, {"input_ids": tokens, "token_type_ids": segments})
    known = tlens.freeze(model, tokens, token_type_ids=segments)
    assert close(frozen.output, known.output)
    assert not close(frozen.output, tlens.freeze(model, tokens).output)


@pytest.mark.skipif("hooked/ln" not in model_names(), reason="HookedTransformer exists up to TransformerLens 3.9")
def test_one_segment_is_what_a_model_without_segments_reads(model_named):
    tokens = some_tokens(1, 6)
    model = model_named("hooked/ln")
    assert tlens.freeze(model, {"input_ids": tokens, "token_type_ids": 0 * tokens}).tokens.equal(tokens)
    with refused("takes none"):
        tlens.freeze(model, {"input_ids": tokens, "token_type_ids": 0 * tokens + 1})


def test_a_decoder_reads_what_a_tokenizer_returns(model_named):
    tokens, model = some_tokens(1, 6), model_named("bridge/bart")
    decoder = tokens[:, :3]
    frozen = tlens.freeze(model, {"input_ids": tokens, "decoder_input_ids": decoder})
    assert close(frozen.output, tlens.freeze(model, tokens, decoder_input_ids=decoder).output)


MESSAGES = [{"role": "user", "content": "Return the value"}]


@pytest.mark.parametrize(
    ("input", "message"),
    [
        (MESSAGES, "input: messages of a chat, but this model's tokenizer has no chat template"),
        ([MESSAGES, MESSAGES], "has no chat template"),
        (MESSAGES[0], "input: one message of a chat"),
        ({"pixel_values": torch.ones(1, 3, 8, 8)}, "a mapping with 'pixel_values' in it, but without 'input_ids'"),
        ({}, "a mapping with nothing in it"),
        ({"input_ids": [[3, 4]], "inputs_embeds": torch.ones(1, 2, 8)}, "'inputs_embeds' takes the place of token ids"),
        ({"input_ids": [[3, 4]], "past_key_values": ()}, "'past_key_values' contains earlier tokens"),
        ({"input_ids": [[3, 4]], "offset_mapping": [[(0, 1)]]}, "'offset_mapping' cannot be given"),
        (torch.ones(1, 3, 128), "embeddings (inputs_embeds) are not accepted"),
    ],
)
def test_what_is_no_input_is_refused(input, message):
    model = tlens.load_demo_model(kind="bridge")
    with refused(message):
        tlens.freeze(model, input)
    with refused(message):
        tlens.attribute(model, input, method="alti")


def test_what_is_passed_twice_is_refused():
    model = tlens.load_demo_model(kind="bridge")
    with refused("attention_mask: the input already contains it"):
        tlens.freeze(model, model.tokenizer(TEXTS, return_tensors="pt", padding=True), attention_mask=torch.ones(2, 6))


def test_embeddings_are_refused_by_name():
    with refused("model_inputs: 'inputs_embeds' takes the place of token ids"):
        tlens.freeze(
            tlens.load_demo_model(kind="bridge"), [[3, 4]], model_inputs={"inputs_embeds": torch.ones(1, 2, 128)}
        )


@pytest.mark.parametrize("pieces", [3, 5])
def test_another_number_of_image_tokens_is_refused(pieces):
    tokens = torch.tensor([[5, 6, *[47] * pieces, 7, 8]])
    pixels = {"pixel_values": torch.randn(1, 3, 8, 8)}
    model = tiny_model("bridge/llava")
    with refused("each image or sound has its number of tokens"):
        tlens.freeze(model, tokens, model_inputs=pixels)


# ------------------------------------------------------------------------------------------------------- every position


def test_all_is_every_position():
    frozen = tlens.freeze(tlens.load_demo_model(dtype=torch.float64), TEXTS)
    operator = frozen.operator()
    every = torch.arange(frozen.mask.shape[1]).expand(frozen.mask.shape)
    assert query_positions(frozen.prompt).equal(every)
    assert query_positions(frozen.prompt, "all").equal(every)
    assert span_positions(frozen.prompt, "all").equal(every)
    assert operator.norm("all", keys="all").scores.equal(operator.norm("all").scores)
    assert operator.contributions("all", keys="all").equal(operator.contributions())


def test_the_word_all_of_a_prompt_is_found_with_its_space():
    tokens = torch.tensor([[5, 6, 7]])
    prompt = Prompt(tokens, torch.ones_like(tokens).bool(), {}, [["for", " all", " in"]])
    assert query_positions(prompt, " all").tolist() == [[1]]
    assert span_positions(prompt, " all").tolist() == [[1]]
    assert query_positions(prompt, "all").tolist() == [[0, 1, 2]]
    assert span_positions(prompt, "all").tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda frozen: frozen.operator().in_out(None), "query"),
        (lambda frozen: frozen.operator().contributions(keys=None), "keys"),
        (lambda frozen: frozen.logits(None), "query"),
        (lambda frozen: tlens.attribute(frozen, method="rollout", query=None), "query"),
        (lambda frozen: tlens.attribute(frozen, method="decompx", query=None), "query"),
        (lambda frozen: circuits.logit_attribution(frozen, 3, query=None), "query"),
        (lambda frozen: circuits.paths(frozen, 3, query=None), "query"),
        (lambda frozen: circuits.qk_attribution(frozen, 0, 0, key=None), "key"),
    ],
)
def test_none_is_no_query(ask, name):
    with refused(f'{name}=None: pass "all" for every position, or -1 for the last.'):
        ask(tlens.freeze(tlens.load_demo_model(), TEXTS[0]))


# --------------------------------------------------------------------------------------------------- slices and counts


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda frozen, text: frozen.operator().in_out(slice(0, 5, 0)), "its step is 0"),
        (lambda frozen, text: frozen.operator().in_out(slice("a", None)), "query='a': pass an integer"),
        (lambda frozen, text: frozen.operator().contributions(keys=slice(0, 5, 0)), "its step is 0"),
        (lambda frozen, text: frozen.operator(layers=slice(0, 2, 0)), "its step is 0"),
        (lambda frozen, text: frozen.operator(layers=slice("a", None)), "layers='a': pass an integer"),
        (lambda frozen, text: tlens.attribute(frozen, method="alti")[slice(0, 5, 0)], "its step is 0"),
        (lambda frozen, text: text.attribute(span=slice(0, 5, 0)), "its step is 0"),
        (lambda frozen, text: circuits.logit_attribution(frozen, 3).to_html("page.html"), "k='page.html'"),
        (lambda frozen, text: circuits.logit_attribution(frozen, 3).top(2.5), "k=2.5: pass an integer"),
        (lambda frozen, text: circuits.logit_attribution(frozen, 3).top(2, query=0.5), "query=0.5: pass an integer"),
        (lambda frozen, text: circuits.logit_attribution(frozen, 3).top(2, batch="a"), "batch='a': pass an integer"),
        (lambda frozen, text: circuits.contribution_graph(frozen, 3).to_html("page.html"), "k='page.html'"),
    ],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(demo_model, ask, message):
    frozen = tlens.freeze(demo_model, TEXTS[0])
    text = tlens.generation.freeze_generation(demo_model, TEXTS[0], max_new_tokens=2)
    with refused(message):
        ask(frozen, text)


def test_a_slice_of_many_prompts_is_refused_too(demo_model):
    with refused("its step is 0"):
        tlens.attribute(demo_model, TEXTS, method="alti", query=slice(0, 3, 0), memory="1MB")


@pytest.mark.parametrize("keep", ["top:²", "top:0", "top:", "top:-1"])
def test_other_digits_are_no_count(demo_model, tmp_path, keep):
    with refused(f"keep={keep!r}"):
        tlens.attribute_dataset(demo_model, [{"text": TEXTS[0]}], tmp_path / "run", keep=keep)


def test_a_text_of_other_digits_is_a_text():
    from tensorlens_tl.commands.shared import position

    assert position("²") == "²"
    assert position("--5") == "--5"
    assert position("-5") == -5


# ----------------------------------------------------------------------------------------------------- tasks and files


def test_tasks_take_lists_and_refuse_texts():
    task = evaluate.KnownAnswers("x", [[3, 4, 5]], [6], [[True, False, True]])
    assert task.tokens.equal(torch.tensor([[3, 4, 5]]))
    assert task.sources.dtype == torch.bool
    pairs = evaluate.PromptPairs("x", [[3, 4, 5]], [[3, 7, 5]], [6], [8])
    assert pairs.only(torch.tensor([True])).minus.equal(torch.tensor([8]))
    for values, message in (
        ((["a b c"], [6], [[True]]), "KnownAnswers: tokens: 'a b c' is a text, and a task has no tokenizer"),
        (("a b c", [6], [[True]]), "model.to_tokens(texts"),
        (([["a", "b"]], [6], [[True]]), "'a' is a text"),
        (([[3, 4]], [" Paris"], [[True, True]]), "KnownAnswers: answers: ' Paris' is a text"),
        (([[3, 4], [3]], [6, 7], [[True, True]]), "KnownAnswers: tokens: cannot read list"),
        (([[3.0, 4.0]], [6], [[True, True]]), "tokens are torch.float32"),
        (([[3, 4]], [6], [[0, 1]]), "KnownAnswers: sources are torch.int64; pass True"),
        (([[3, 4]], 6, [[True, True]]), "answers are torch.int64 ()"),
    ):
        with refused(message):
            evaluate.KnownAnswers("x", *values)
    with refused("PromptPairs: clean: 'a b' is a text"):
        evaluate.PromptPairs("x", ["a b"], ["a c"], ["d"], ["e"])
    with refused("PromptPairs: minus: 'e' is a text"):
        evaluate.PromptPairs("x", [[3, 4]], [[3, 5]], [6], ["e"])


def test_a_random_order_is_expected_by_every_prompts_own_sources(model_named):
    tokens = some_tokens(3, 6)
    sources = torch.zeros(3, 6, dtype=torch.bool)
    for row, count in enumerate((1, 2, 5)):
        sources[row, :count] = True
    task = evaluate.KnownAnswers("x", tokens, torch.tensor([3, 4, 5]), sources)
    result = evaluate.known_answer(model_named("bridge/gpt2"), task, ["random"], only_correct=False)
    expected = [evaluate.expected_mrr(6, count) for count in (1, 2, 5)]
    assert result.settings["random_mrr"] == pytest.approx(sum(expected) / 3, abs=1e-12)


def _changed(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content, content["edges"][next(iter(content["edges"]))])
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content, edge: edge.update(in_graph="false"), "\"in_graph\" is 'false', not true or false"),
        (lambda content, edge: edge.update(in_graph=0), '"in_graph" is 0'),
        (lambda content, edge: edge.update(score="1.5"), "\"score\" is '1.5'"),
        (lambda content, edge: edge.update(score=True), '"score" is True'),
        (lambda content, edge: edge.update(score=float("inf")), '"score" is inf'),
        (lambda content, edge: edge.update(score=10**400), "OverflowError"),
        (lambda content, edge: content.update(target=3), "target is a int, not str"),
        (lambda content, edge: content["cfg"].update(parallel_attn_mlp="false"), "\"parallel_attn_mlp\" is 'false'"),
    ],
)
def test_a_circuits_file_says_true_false_and_finite_numbers(model_named, tmp_path, change, message):
    model = model_named("bridge/gpt2")
    passes = (tlens.freeze(model, some_tokens(1, 6, seed=seed)) for seed in (0, 1))
    path = circuits.edge_scores(*passes, 3, 4).circuit(5).save(tmp_path / "circuit.json")
    assert len(circuits.Circuit.load(path)) <= 5
    _changed(path, change)
    with pytest.raises(tlens.FileFormatError, match=re.escape(message)):
        circuits.Circuit.load(path)


def test_a_number_beyond_all_numbers_is_no_score(model_named, tmp_path):
    model = model_named("bridge/gpt2")
    passes = (tlens.freeze(model, some_tokens(1, 6, seed=seed)) for seed in (0, 1))
    path = circuits.edge_scores(*passes, 3, 4).circuit(5).save(tmp_path / "circuit.json")
    text = re.sub(r'"score": -?\d[^,]*', '"score": 1e999', path.read_text(encoding="utf-8"), count=1)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(tlens.FileFormatError, match='"score" is inf'):
        circuits.Circuit.load(path)
