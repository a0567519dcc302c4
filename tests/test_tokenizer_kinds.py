"""Every kind of tokenizer: a text, the token that it is, its label, and where it stands in a prompt."""

import dataclasses
import functools
import json

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens
from tensorlens_tl import generation
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.target import logit_label
from tensorlens_tl.passes.texts import find, joined, readable_tokens, text_ids, token_text

SCRIPTS = [
    "The capital of France is Paris. Mary is in Rome, Mary's file is read. Paris is. Paris . Rome . a man (12).",
    "Столица Франции это Париж. Париж большой город.",
    "Η πρωτεύουσα της Γαλλίας είναι το Παρίσι.",
    "בירת צרפת היא פריז. פריז היא עיר.",
    "عاصمة فرنسا هي باريس. باريس مدينة.",
    "法国的首都是巴黎。巴黎是城市。",
    "フランスの首都はパリです。パリは都市です。",
    "프랑스의 수도는 파리입니다. 파리는 도시입니다.",
    "फ्रांस की राजधानी पेरिस है। पेरिस शहर है।",
    "เมืองหลวงของฝรั่งเศสคือปารีส ปารีสเป็นเมือง",
    "so much 😂 love ♩ café naïve 😂😂 ♩♪",
]
CHARACTERS = sorted(set("".join(SCRIPTS)) - {" "})
"""Those of the texts but the space, which the kinds write each in its way."""
SPECIAL = ["<unk>", "<s>", "<pad>"]
KINDS = [
    *(f"byte-level, prefix space {prefix}" for prefix in (False, True)),
    *(f"metaspace {scheme}" for scheme in ("always", "first", "never")),
    "legacy llama",
    "byte fallback",
    "gemma",
    "wordpiece",
    *(f"unigram {scheme}" for scheme in ("always", "never")),
]
KINDS_WITH_SPACES = [kind for kind in KINDS if kind != "wordpiece"]


@functools.cache
def tokenizer_of(kind):
    """A tokenizer of this kind, trained on a sentence in each of ten scripts."""
    scheme = kind.split()[-1] if kind.split()[-1] in ("always", "first", "never") else "always"
    alphabet = [] if kind == "byte fallback" else CHARACTERS
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    if kind.startswith("byte-level"):
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind.endswith("True"))
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "wordpiece":
        inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind.startswith("unigram"):
        inner = Tokenizer(models.Unigram())
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=alphabet
        )
    else:
        falls_back = kind in ("byte fallback", "legacy llama", "gemma")
        inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=falls_back, fuse_unk=True))
        special = [*SPECIAL, *bytes_] if falls_back else SPECIAL
        limit = {"limit_alphabet": 60} if kind == "byte fallback" else {"initial_alphabet": alphabet}
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(vocab_size=450 + 256 * falls_back, special_tokens=special, **limit)
    inner.train_from_iterator(SCRIPTS * 3, trainer)
    if kind in ("legacy llama", "gemma"):  # these replace spaces before anything else, the first puts one before a text
        replaced = normalizers.Replace(" ", "▁")
        legacy = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
        inner.normalizer = legacy if kind == "legacy llama" else replaced
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        if kind == "gemma":
            inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if kind in ("byte fallback", "legacy llama", "gemma"):  # bytes are ordinary tokens, not special ones
        inner = without_added_bytes(inner)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", pad_token="<pad>", name_or_path=kind
    )


def without_added_bytes(inner):
    """A tokenizer whose byte tokens are ordinary ones: `decode` takes special tokens for what they are called."""
    content = json.loads(inner.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))


@functools.cache
def model_of(kind):
    """A random Llama with a tokenizer of this kind."""
    tokenizer = tokenizer_of(kind)
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**options, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    model = build_bridge_from_module(module, "LlamaForCausalLM", hf_config=config, tokenizer=None)
    model.tokenizer = tokenizer
    model.cfg.tokenizer_prepends_bos = False  # TransformerLens notes it where it is given the tokenizer
    return model


@functools.cache
def view_of(kind):
    return ModelView(model_of(kind))


texts = st.one_of(
    st.text(st.sampled_from([" ", *CHARACTERS]), min_size=1, max_size=12),
    st.lists(st.sampled_from(" ".join(SCRIPTS).split()), min_size=1, max_size=8).map(" ".join),
)


def ids_of(kind, text):
    return tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100)
@pytest.mark.few(5)
def test_text_id_label_and_continuation_agree(kind, data):
    """A token of a text is named by its label; the label is that token, and no other token of the vocabulary has it."""
    view = view_of(kind)
    ids = ids_of(kind, data.draw(texts))
    number = data.draw(st.integers(0, len(ids) - 1)) if ids else None
    if number is None or ids[number] == tokenizer_of(kind).unk_token_id:
        return
    label = token_text(view, ids[number])
    same = [token for token in range(len(tokenizer_of(kind))) if token_text(view, token) == label]
    assert same == [ids[number]]
    assert text_ids(view, label) == [ids[number]]
    assert logit_label(view, label).startswith(f"logit of {label!r}")
    assert logit_label(view, ids[number]) == f"logit of {label!r}"


@pytest.mark.parametrize("kind", KINDS_WITH_SPACES)
@given(prompt=texts, more=texts, spaced=st.booleans())
@settings(max_examples=100)
@pytest.mark.few(5)
def test_a_text_is_the_token_that_the_model_reads_after_a_prompt(kind, prompt, more, spaced):
    """Where a text adds one token to a prompt, it is that token, whatever the prompt."""
    view = view_of(kind)
    more = f" {more.strip()}" if spaced else more.lstrip()
    first, both = ids_of(kind, prompt), ids_of(kind, prompt + more)
    added = both[len(first) :]
    if not more.strip() or both[: len(first)] != first or len(added) != 1:
        return
    if prompt[-1:].isspace() or added[0] == tokenizer_of(kind).unk_token_id:
        return
    assert text_ids(view, more) == added


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, data=st.data())
@settings(max_examples=100)
@pytest.mark.few(5)
def test_texts_are_found_where_the_offsets_say(kind, text, data):
    """From the beginning of any token to the end of any other, as far as both end between characters."""
    view = view_of(kind)
    encoding = tokenizer_of(kind)(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    if not ids or tokenizer_of(kind).unk_token_id in ids:
        return
    first = data.draw(st.integers(0, len(ids) - 1))
    last = data.draw(st.integers(first, len(ids) - 1))
    begin, end = offsets[first][0], offsets[last][1]
    tokens = readable_tokens(view, torch.tensor([ids]))[0][0]
    wanted = text[begin:end].strip()
    if not wanted or tokens[first].isspace() or tokens[last].isspace():
        return
    begin, end = text.index(wanted, begin), text.index(wanted, begin) + len(wanted)
    covered = [  # a space that the tokenizer puts before a text is a token whose offsets are those of the next one
        number
        for number, (start, stop) in enumerate(offsets)
        if start < end and stop > begin and not tokens[number].isspace()
    ]
    assert (covered[0], covered[-1] + 1) in find(tokens, wanted)
    if kind != "wordpiece":
        assert joined(tokens).strip() == text.strip()


@pytest.mark.parametrize("kind", KINDS_WITH_SPACES)
@pytest.mark.few(5)
def test_a_target_is_what_generated_text_and_the_next_token_are(kind):
    """The logit of ``"."`` is that of the token that continues a word, the one of ``" ."`` that which begins one."""
    model, prompt = model_of(kind), "The capital of France is Paris"
    pieces = {".": ["."], " .": ["▁.", "Ġ."]}
    numbers = {
        text: number
        for text, names in pieces.items()
        for number in map(tokenizer_of(kind).convert_tokens_to_ids, names)
        if number != tokenizer_of(kind).unk_token_id
    }
    assert set(numbers) == set(pieces) or kind.startswith("unigram")  # which writes a space apart here
    rows = {text: [*ids_of(kind, prompt), number] for text, number in numbers.items()}
    for text, ids in rows.items():
        logit = model(torch.tensor([ids[:-1]]))[0, -1, ids[-1]].item()
        asked = tlens.attribute(model, [ids[:-1]], text)
        following = tlens.attribute(model, [ids], tlens.NEXT, query=-2)
        written = tlens.attribute_generation(model, [ids[:-1]], continuation=[ids[-1:]])
        assert asked.target == f"logit of {text!r}"
        assert [float(each.total) for each in (asked, following, written)] == pytest.approx([logit] * 3, rel=1e-6)
        if ids_of(kind, prompt + text) == ids:
            frozen = generation.freeze_generation(model, prompt, continuation=text, prepend_bos=False)
            assert frozen.frozen.tokens.tolist() == [ids]
    if len(numbers) < 2:
        return
    difference = tlens.attribute(model, [rows["."]], ".", minus=" .")
    one, other = (tlens.attribute(model, [rows["."]], numbers[text]).total for text in (".", " ."))
    torch.testing.assert_close(difference.total, one - other, rtol=1e-6, atol=1e-6)  # norms compute in float32


@pytest.mark.parametrize("kind", KINDS_WITH_SPACES)
def test_a_word_without_its_space_says_which_it_is(kind):
    """Where there is a token for both; else the label names the one that there is."""
    view = view_of(kind)
    pieces = [token_text(view, number) for number in range(len(tokenizer_of(kind)))]
    words = [text for text in pieces if text.isalpha() and text.isascii() and f" {text}" in pieces]
    assert words
    for word in words:
        assert logit_label(view, word, f" {word}") == f"logit of {word!r} (not ' {word}') − ' {word}'"
    only = next(text for text in pieces if text[:1] == " " and len(text) > 3 and text[1:] not in pieces)
    assert logit_label(view, only[1:]) == f"logit of {only!r}" or len(text_ids(view, only[1:])) > 1


@pytest.mark.parametrize("kind", ["byte-level, prefix space False", "byte fallback", "legacy llama"])
@pytest.mark.parametrize("word", ["😂", "♩", "פריז", "巴黎", "पेरिस", "ปารีส", "naïve"])
def test_characters_of_several_tokens_are_found_and_read(kind, word, tmp_path):
    """Also in a result from a file, which holds the tokens' texts alone."""
    model = model_of(kind)
    text = f"love this {word} so much"
    result = tlens.attribute(model, text, ".")
    end = len(ids_of(kind, text[: text.index(word) + len(word)]))
    result.save(tmp_path / "result.safetensors")
    loaded = tlens.Attribution.load(tmp_path / "result.safetensors")
    for each in (result, loaded):
        (entry,) = each[word]
        assert entry.token.strip() == word
        assert [found.token.strip() for found in each.merge_words()[word]] == [word]
        assert "�" not in "".join(each.tokens[0])
    bos = result.tokens[0][0] == "<s>"
    asked = tlens.attribute(model, text, ".", query=word)
    assert asked.queries.tolist() == [[end - 1 + bos]]


def test_a_file_with_tokens_as_they_were_written_before_is_read(tmp_path):
    """Where each part of a character was ``�``: what is whole there is found."""
    result = tlens.attribute(model_of(KINDS[0]), "love this 😂 so much", ".")
    older = [["�" if "<0x" in token else token for token in result.tokens[0]]]
    dataclasses.replace(result, tokens=older).save(tmp_path / "older.safetensors")
    loaded = tlens.Attribution.load(tmp_path / "older.safetensors")
    assert loaded.tokens == older
    assert loaded["much"] == result["much"]
