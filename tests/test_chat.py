"""Chats, rendered templates, encodings, and columns of texts: every function reads them, and reads the same tokens."""

import copy
import re

import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate, generation
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import tokenized
from tensorlens_tl.testing import model_names

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('the roles are system, user and assistant') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "Return it."}, {"role": "user", "content": "The value of the"}]
OTHER = [{"role": "user", "content": "If the file is not found, a"}]
KINDS = ["hooked", "bridge"] if any(name.startswith("hooked/") for name in model_names()) else ["bridge"]


def refused(message):
    return pytest.raises(tlens.InvalidInputError, match=re.escape(message))


def with_template(model, *, adds_bos=True):
    """The model with a tokenizer of its own, that has a chat template; TransformerLens adds BOS if it does not."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = TEMPLATE
    if not adds_bos:
        tokenizer.backend_tokenizer.post_processor = tokenizers.processors.Sequence([])
        model.cfg.tokenizer_prepends_bos = False
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module", params=[(kind, adds) for kind in KINDS for adds in (True, False)], ids=str)
def model(request):
    kind, adds_bos = request.param
    model = with_template(tlens.load_demo_model(kind=kind, dtype=torch.float64), adds_bos=adds_bos)
    assert len(model.tokenizer("a")["input_ids"]) == 1 + adds_bos
    return model


@pytest.fixture(scope="module")
def chatty():
    return with_template(tlens.load_demo_model(dtype=torch.float64))


def template_ids(model, chat):
    return model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def template_text(model, chat):
    return model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def ways(model, *chats):
    """Every way in which people pass chats."""
    texts = [template_text(model, chat) for chat in chats]
    options = {"add_special_tokens": False, "padding": True, "padding_side": "left", "return_tensors": "pt"}
    encoding = model.tokenizer(texts, **options)
    given = {
        "chats": list(chats), "texts": texts, "a column": pd.Series(texts, index=range(3, 3 + len(texts))),
        "an array": np.array(texts), "an array of objects": np.array(texts, dtype=object),
        "an encoding": encoding, "a dict": dict(encoding), "lists": [template_ids(model, chat) for chat in chats],
        "an encoding of lists": model.tokenizer(texts, add_special_tokens=False),
    }  # fmt: skip
    if len(chats) == 1:
        given |= {"a chat": chats[0], "a tuple": tuple(chats[0]), "a text": texts[0]}
    return given


# ------------------------------------------------------------------ one way in


@pytest.mark.parametrize("chats", [(CHAT,), (CHAT, OTHER)])
@pytest.mark.few(5)
def test_every_way_gives_the_templates_own_tokens(model, chats):
    expected = [template_ids(model, chat) for chat in chats]
    for name, given in ways(model, *chats).items():
        frozen = tlens.freeze(model, given)
        rows = [row[real].tolist() for row, real in zip(frozen.tokens, frozen.mask, strict=True)]
        assert rows == expected, name
        assert tokenized(ModelView(model), given) == expected, name
        written = generation.freeze_generation(model, given, max_new_tokens=2)
        whole = [row[real].tolist() for row, real in zip(written.frozen.tokens, written.frozen.mask, strict=True)]
        assert [row[:-2] for row in whole] == expected, name


def tuned(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.blocks[0].mlp.parameters():
            parameter.mul_(1.1)
    return changed


QUESTIONS = {
    "attribute": lambda model, way: tlens.attribute(model, way, " the").total,
    "batches of attribute": lambda model, way: tlens.attribute(model, way, " the", memory="1MB").total,
    "generation": lambda model, way: tlens.attribute_generation(model, way, max_new_tokens=2).total,
    "compare_models": lambda model, way: tlens.compare_models(model, tuned(model), way, " the").total,
    "perturbation": lambda model, way: evaluate.perturbation(model, way, ["alti"], fractions=(0, 0.5)).values,
    "perturbation of generated text": lambda model, way: (
        evaluate.perturbation(model, way, ["alti"], max_new_tokens=2, fractions=(0, 0.5)).values
    ),
    "completeness": lambda model, way: evaluate.completeness(model, way, ["relp"]).values,
    "head scores": lambda model, way: circuits.previous_token_scores(model, way).scores,
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.few(4)
def test_every_function_takes_every_way(chatty, question):
    ask = QUESTIONS[question]
    given = ways(chatty, CHAT, OTHER)
    expected = ask(chatty, given.pop("lists"))
    assert bool(expected.isfinite().any())
    for name in ("chats", "a column", "an encoding", "a dict"):
        assert torch.allclose(ask(chatty, given[name]), expected, atol=1e-9, equal_nan=True), name


@pytest.mark.parametrize("several", [False, True])
def test_a_baseline_is_a_chat(chatty, several):
    other = [CHAT[0], {"role": "user", "content": "The name of the"}]
    chats, ids = other, template_ids(chatty, other)
    if several:
        chats, ids = [chats, CHAT], [ids, template_ids(chatty, CHAT)]
    options = {"method": "difference", "target": " the"}
    expected = tlens.attribute(chatty, CHAT, baseline=ids, **options)
    assert bool(expected.total.any())
    assert tlens.attribute(chatty, CHAT, baseline=chats, **options).scores.equal(expected.scores)


def test_pairs_of_prompts_are_columns_and_chats(chatty):
    texts = [f"The {word} of the" for word in ("value", "name")]
    chats = [[{"role": "user", "content": text}] for text in texts]
    for given in ([pd.Series([text], index=[7]) for text in texts], [np.array([text]) for text in texts]):
        assert evaluate.text_pairs(chatty, *given).clean.equal(evaluate.text_pairs(chatty, *[[t] for t in texts]).clean)
    pairs = evaluate.text_pairs(chatty, [chats[0]], [chats[1]])
    assert [pairs.clean[0].tolist(), pairs.corrupted[0].tolist()] == [template_ids(chatty, chat) for chat in chats]


def test_logits_of_a_chat_are_the_models_own(model):
    with torch.no_grad():
        logits = model(torch.tensor([template_ids(model, CHAT)]))[0, -1]
    assert (tlens.freeze(model, CHAT).logits()[0, 0] - logits).abs().max() < 1e-9 * logits.abs().max()


def test_rows_of_a_data_set_are_chats(chatty, tmp_path):
    rows = [{"messages": CHAT, "answer": " the"}, {"messages": OTHER, "answer": " file"}]
    texts = [{"messages": template_text(chatty, row["messages"]), "answer": row["answer"]} for row in rows]
    options = {"text": "messages", "columns": {"target": "answer"}, "progress": False}
    results = [
        tlens.attribute_dataset(chatty, given, tmp_path / name, **options)
        for name, given in {"lists": rows, "texts": texts, "frame": pd.DataFrame(rows)}.items()
    ]
    ids = [template_ids(chatty, CHAT), template_ids(chatty, OTHER)]
    for result in results:
        assert [list(row) for row in result.to_dataframe()["token_ids"]] == ids
    with refused("pass [messages]"):
        tlens.attribute_dataset(chatty, CHAT, tmp_path / "one", progress=False)


# ------------------------------------------------------------------ special tokens that a text has already


@pytest.mark.parametrize("prepend_bos", [None, True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.few(8)
def test_a_text_with_bos_gets_no_second_one(model, prepend_bos, count):
    bos = model.tokenizer.bos_token
    text = count * bos + "Return the value" + bos + " of the"
    alone = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert alone[: count + 1].count(model.tokenizer.bos_token_id) == count
    frozen = tlens.freeze(model, text, prepend_bos=prepend_bos)
    assert frozen.tokens[0].tolist() == alone
    plain = tlens.freeze(model, "Return the value", prepend_bos=prepend_bos).tokens[0].tolist()
    assert (plain[0] == model.tokenizer.bos_token_id) == (prepend_bos is not False)


def test_bos_alone_is_a_prompt(model):
    bos = [model.tokenizer.bos_token_id]
    for text in ("", model.tokenizer.bos_token):
        assert tlens.freeze(model, text).tokens.tolist() == [bos]
        written = tlens.generation.freeze_generation(model, text, max_new_tokens=2)
        assert written.frozen.tokens.tolist()[0][:1] == bos
    assert tlens.freeze(model, ["", "Return"]).mask.sum(1).tolist() == [1, 2]
    with refused("text number 1 ('') has no token; add text or prepend_bos=True"):
        tlens.freeze(model, ["Return", ""], prepend_bos=False)


def test_separators_that_a_text_has_are_not_doubled():
    model = tlens.load_demo_model("encoder")
    tokenizer = model.tokenizer
    text = f"the {tokenizer.mask_token} of"
    expected = tokenizer(text)["input_ids"]
    for given in (text, tokenizer.cls_token + text, text + tokenizer.sep_token, tokenizer.decode(expected)):
        assert tlens.freeze(model, given).tokens[0].tolist() == expected


# ------------------------------------------------------------------ continuations


def test_a_chat_is_continued_by_its_answer(model):
    written = generation.freeze_generation(model, CHAT, continuation=" value of")
    ids = model.tokenizer(template_text(model, CHAT) + " value of", add_special_tokens=False)["input_ids"]
    assert written.frozen.tokens[0].tolist() == ids
    assert written.texts == [" value of"]
    for name, given in ways(model, CHAT).items():
        more = " value of" if name in ("a text", "a chat", "a tuple") else [ids[-2:]]
        assert generation.freeze_generation(model, given, continuation=more).frozen.tokens[0].tolist() == ids, name
    encoding = model.tokenizer([" value of"], add_special_tokens=False)
    both = generation.freeze_generation(model, [CHAT], continuation=encoding)
    assert both.frozen.tokens[0].tolist() == ids
    several = generation.freeze_generation(model, [CHAT, CHAT], continuation=pd.Series([" value of"] * 2))
    assert several.frozen.tokens[:, : len(ids)].tolist() == [ids, ids]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "tool", "content": "x"}], "rejects these messages (the roles are system, user and assistant)"),
        ([{"role": "user", "content": 3}], "rejects these messages"),
        ([{"role": "user", "contnet": "x"}], "message 0 of a chat is {'role': 'user', 'contnet': 'x'}"),
        ([CHAT[0], {"content": "x"}], "message 1 of a chat is {'content': 'x'}"),
        ([CHAT[0], "x"], "message 1 of a chat is 'x'"),
        ([CHAT, "text"], "message 0 of a chat is 't'"),
        (["text", CHAT], "prompt 0 is text and prompt 1 is list"),
        (CHAT[0], "one message of a chat; pass a list of messages"),
    ],
)
@pytest.mark.parametrize("ask", [tlens.freeze, lambda *given: tlens.attribute_generation(*given, max_new_tokens=1)])
def test_chats_that_are_none_are_refused(chatty, ask, chat, message):
    with refused(message):
        ask(chatty, chat)


def test_a_chat_needs_a_template(demo_model):
    with refused("this model's tokenizer has no chat template; set model.tokenizer.chat_template"):
        tlens.freeze(demo_model, CHAT)


def test_generated_text_is_of_tokens_alone(chatty):
    encoding = {"input_ids": [[1, 2]], "pixel_values": torch.ones(1, 3, 8, 8)}
    with refused("'pixel_values' cannot be used here"):
        tlens.attribute_generation(chatty, encoding, max_new_tokens=1)
    segments = {"input_ids": [[1, 2]], "token_type_ids": [[0, 0]]}
    assert tlens.attribute_generation(chatty, segments, max_new_tokens=1).scores.shape == (1, 1, 3)


def test_a_difference_of_logits_is_one_of_log_probabilities(chatty):
    """What the message about a log-probability as a target recommends."""
    result = tlens.attribute(chatty, CHAT, " the", minus=" a")
    logs = tlens.freeze(chatty, CHAT).logits()[0, 0].log_softmax(-1)
    first, second = (chatty.tokenizer.convert_tokens_to_ids(token) for token in ("Ġthe", "Ġa"))
    assert abs(float(result.total - (logs[first] - logs[second]))) < 1e-9
    assert float(result.gap) < 1e-9
