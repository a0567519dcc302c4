"""Text of encoders: read as the checkpoint's own tokenizer reads it, so that the model is Hugging Face's for that text.

TransformerLens loads tokenizers again, with add_bos_token=True and takes an EOS token off the end: language models need
it so.
"""

import shutil

import pytest
import torch
import transformers
from test_classifiers import LINE_4
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens

WORDS = [f"w{letter}" for letter in "abcdefghi"]
NAMES = {"bos": "<s>", "eos": "</s>", "cls": "[CLS]", "sep": "[SEP]"}
SHORT, LONG = "wc <mask> wd", "wc we <mask> wf wd"


def from_file(template, *named):
    """A tokenizer whose template is what its file says, with names for these special tokens."""
    special = ["<unk>", "<pad>", "<mask>", *NAMES.values()]
    vocabulary = {token: number for number, token in enumerate([*special, *WORDS])}
    splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(token, number) for token, number in vocabulary.items() if token in template.split()]
    splitter.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    names = {f"{name}_token": NAMES[name] for name in named}
    names |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, **names)


def of_bert():
    names = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    tokens = [*names.values(), "[CLS]", "[SEP]", *WORDS]
    return transformers.BertTokenizerFast(vocab={token: number for number, token in enumerate(tokens)}, **names)


def of_roberta():
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [*WORDS, *(f"Ġ{word}" for word in WORDS)]
    merges = [("w", word[1:]) for word in WORDS] + [("Ġ", word) for word in WORDS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges)


TOKENIZERS = {
    "BERT's": of_bert,
    "RoBERTa's": of_roberta,
    "BERT's template": lambda: from_file("[CLS] $A [SEP]", "cls", "sep"),
    "BERT's template, and BOS": lambda: from_file("[CLS] $A [SEP]", "bos", "cls", "sep"),
    "BERT's template, all names": lambda: from_file("[CLS] $A [SEP]", *NAMES),
    "BERT's template, no names": lambda: from_file("[CLS] $A [SEP]"),
    "RoBERTa's template": lambda: from_file("<s> $A </s>", "bos", "eos"),
    "T5's template": lambda: from_file("$A </s>", "eos"),
    "none": lambda: from_file("$A", "bos", "eos"),
}
MASKED = ["BertForMaskedLM", *(["RobertaForMaskedLM"] if LINE_4 else [])]
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 6,
}  # fmt: skip
ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def saved(folder, name, tokenizer):
    """A checkpoint of a random model with this tokenizer."""
    kind = getattr(transformers, name)
    sizes = BART if name.startswith("Bart") else ENCODER
    numbers = {"vocab_size": len(tokenizer) + 2, "pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 40}
    torch.manual_seed(0)
    kind(kind.config_class(**sizes, **numbers)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def booted(folder, name, way):
    options = {"dtype": torch.float64, "device": "cpu"}
    if way == "built":
        module = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return build_bridge_from_module(module, name, hf_config=module.config, tokenizer=tokenizer)
    if way == "passed":
        options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder)
    model = TransformerBridge.boot_transformers(str(folder), **options)
    if way == "set later":
        model.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return model


@pytest.mark.few(6)
@pytest.mark.parametrize("way", ["folder", "passed", "built", "set later"])
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", MASKED)
def test_an_encoder_is_hugging_faces_own_for_a_text(tmp_path, name, kind, way):
    """Alone and in a batch padded on either side: tokens, logits at the mask, words, and labels."""
    saved(tmp_path, name, TOKENIZERS[kind]())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reference = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float64).eval()
    model = booted(tmp_path, name, way)
    target = tokenizer("wg", add_special_tokens=False)["input_ids"][0]
    for texts, side in ((SHORT, None), ([SHORT, LONG], "right"), ([SHORT, LONG], "left")):
        frozen = tlens.freeze(model, texts, padding_side=side)
        expected = [tokenizer(text)["input_ids"] for text in ([texts] if side is None else texts)]
        assert [row[real].tolist() for row, real in zip(frozen.tokens, frozen.mask, strict=True)] == expected
        attribution = tlens.attribute(frozen, target, query="<mask>")
        for row, ids in enumerate(expected):
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([ids])).logits[0]
            logit = logits[ids.index(tokenizer.mask_token_id), target]
            scale = logits.abs().max()
            assert abs(attribution.total[row, 0] - logit) < 1e-9 * scale
            assert abs(attribution.scores[row].sum() + attribution.bias[row, 0] - logit) < 1e-9 * scale
    named = tlens.attribute(model, SHORT, "wg", query="<mask>")
    (entry,) = named["wd"]
    assert named.target.startswith("logit of 'wg'")
    assert tokenizer.convert_ids_to_tokens(expected[0][entry.position]) in ("wd", "Ġwd")
    assert tlens.attribute(model, SHORT, target, query=-1).queries.tolist() == [[len(expected[0]) - 1]]


@pytest.mark.parametrize("kind", ["RoBERTa's", "BERT's template, and BOS"])
@pytest.mark.parametrize("prepend_bos", [False, True])
def test_who_says_whether_bos_is_put_first_gets_transformer_lens_tokens(tmp_path, kind, prepend_bos):
    saved(tmp_path, MASKED[-1], TOKENIZERS[kind]())
    model = booted(tmp_path, MASKED[-1], "folder")
    expected = model.to_tokens(SHORT, prepend_bos=prepend_bos).tolist()
    assert tlens.freeze(model, SHORT, prepend_bos=prepend_bos).tokens.tolist() == expected


@pytest.mark.parametrize("kind", ["RoBERTa's", "RoBERTa's template", "T5's template"])
def test_the_encoder_of_an_encoder_decoder_reads_its_special_tokens(tmp_path, kind):
    name = "BartForConditionalGeneration"
    saved(tmp_path, name, TOKENIZERS[kind]())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reference = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float64).eval()
    model = booted(tmp_path, name, "folder")
    attribution = tlens.attribute(model, SHORT, 9, decoder_input_ids=[[6, 5]])
    expected = tokenizer(SHORT)["input_ids"]
    assert attribution.scores.shape[-1] == len(expected) + 2
    with pytest.raises(tlens.InvalidInputError, match="pass token ids that begin with 6"):
        tlens.freeze(model, SHORT, decoder_input_ids="wd")
    with torch.no_grad():
        output = reference(input_ids=torch.tensor([expected]), decoder_input_ids=torch.tensor([[6, 5]]))
    logits = output.logits[0, -1]
    assert abs(attribution.total[0, 0] - logits[9]) < 1e-9 * logits.abs().max()


def test_text_is_refused_where_its_special_tokens_cannot_be_known(tmp_path):
    """Where there is nothing to load the tokenizer from, or that lacks tokens which were added to it."""
    saved(tmp_path, "BertForMaskedLM", from_file("[CLS] $A [SEP]", "bos", "cls", "sep"))
    model, other = (booted(tmp_path, "BertForMaskedLM", "folder") for _ in range(2))
    other.tokenizer.add_tokens(["wj"])
    with pytest.raises(tlens.InvalidInputError, match=r"has tokens \('wj'\) that .* Pass token ids"):
        tlens.freeze(other, SHORT)
    shutil.rmtree(tmp_path)
    with pytest.raises(tlens.InvalidInputError, match=r"cannot be loaded from .* Pass token ids"):
        tlens.freeze(model, SHORT)
    assert tlens.freeze(model, SHORT, prepend_bos=True).tokens.tolist() == model.to_tokens(SHORT).tolist()
    ids = [[5, 7, 2, 8, 6]]
    assert tlens.freeze(model, ids).tokens.tolist() == ids


def test_a_tokenizer_that_keeps_its_template_needs_no_folder(tmp_path):
    saved(tmp_path, MASKED[-1], of_roberta())
    model = booted(tmp_path, MASKED[-1], "folder")
    shutil.rmtree(tmp_path)
    assert tlens.freeze(model, SHORT).tokens.tolist() == [of_roberta()(SHORT)["input_ids"]]
